// What lane.c and ways.c share.
#ifndef CORE_LANE_H
#define CORE_LANE_H

#include <stdatomic.h>

#include "block.h"
#include "core.h"
#include "kernels.h"

#ifndef CORE_PAST_BYTES
#define CORE_PAST_BYTES (1 << 24)
#define CORE_NEAR_BYTES_PER_US 4096
#endif

enum {
    PORTION_BYTES = CORE_PORTION_BYTES,  // that a rank lends at a time
    AHEAD = 2,                // portions that are filled ahead of the one that is worked on
    SLICE_BYTES = 1 << 16,    // worked on between two looks at the clock
    WHOLE_BYTES = CORE_WHOLE_BYTES,  // that travel with the entry: one meeting
    PAST_BYTES = CORE_PAST_BYTES,  // of a result from which on it is copied past the caches
    TIMED_BYTES = 1 << 15,    // of which the storing is timed, to see how far the caches of the other ranks are
    NEAR_BYTES_PER_US = CORE_NEAR_BYTES_PER_US,  // that are stored at least where they are near
    MOST_ROUNDS = 1 << 30,    // of an operation, as another rank says
    UNTIMED = 2,             // moves before the clock is read: what is short ends within them
    STREAMED = 16,            // stores past the caches before it is seen whether they are near by now
    REFUSED_KEYS = 64,        // that are remembered
    STAND_INS = 4,            // absences that may be posted and not met
};

// A test has a rank stop, or die, at each of these.
#ifdef CORE_STOPS
enum stop { POSTING, POSTED, MET, FILLING, FILLED, REDUCING, REDUCED, TAKEN, WORKED, CONSUMED, ENDING, STOPS };
void core_stop(enum stop);
#define STOP(place) core_stop(place)
#else
#define STOP(place) ((void)0)
#endif

struct peer {
    struct block *block;
    core_memory *memory;
    core_doorbell *doorbell;
    uint64_t consumed;  // at least: as it said last
    bool lost;          // its process is gone
};

struct loan {
    uint64_t portion, at, end;
};

struct core_lane {
    unsigned rank, ranks;
    unsigned joined;  // how many ranks' blocks are known; 0 in a forked child, which leaves its parent's alone
    struct block *mine;
    uint8_t *stage;
    uint64_t stage_bytes;
    core_place stage_at;
    void (*ended)(void *context, core_op *);
    void *context;
    bool led;

    // Written by any thread, with seq_cst: who submits and finds the lane held is sure that its holder sees the inbox
    // when it lets go.
    _Alignas(64) _Atomic bool held;
    _Atomic(core_op *) inbox;          // submitted, the newest first
    _Atomic uint64_t busy, load;       // how many are under way; bytes of those that are not WHOLE
    _Atomic uint64_t lent;             // see core_lane_lent; who holds it counts
    _Atomic uint64_t driven_at;        // when it was driven last, in nanoseconds: the engine keeps off

    // Of who holds it, from here on.
    core_op *first, **last;            // posted, in order
    core_op *waiting, **waiting_last;  // not posted yet, in order of submission
    bool spoke;                        // others may have waited for what was said since doorbells were looked at
    uint64_t next_number, next_portion;
    uint64_t lent_end;       // no rank looks at this rank's memory that has consumed so many portions
    bool unsettled;          // next_portion is known only once the newest posted operation is met
    unsigned portioned;      // how many operations are posted that lend portion after portion
    uint64_t ends[ENTRIES];  // by entry: the portion after the last one of the operation that is or was there

    uint64_t refused[REFUSED_KEYS];  // keys of which this rank submits nothing more, without their low bits
    uint64_t refusals;               // how many there were so far; the newest are kept
    core_op stand_ins[STAND_INS], *idle;  // what is posted for those that the first rank posts all the same

    uint64_t consumed;       // what this rank's word of that name says
    unsigned slowest;        // the rank that had consumed least when there was no room
    struct loan loans[PLACES];
    uint64_t places[PLACES]; // as the block's: nobody else can write these
    uint64_t loans_first, loans_last;

    unsigned slow, streamed; // stores into the stage, one after the other: see `put`

    uint32_t abandoned;      // core_state that all operations end with from now on, 0 while it works
    uint32_t culprit;
    uint64_t parting;        // 1 + the operation in which a rank was found to have left
    bool wants;
    unsigned wanted_rank;
    uint32_t wanted_segment;

    const uint8_t **windows; // by rank: the tensors of the operation that is done in place
    const void **sources;    // of a kernel: room for one call
    void **targets;
    struct peer peers[];
};

enum found { FOUND, UNMAPPED, OUTSIDE };
enum outcome { WAITS, MOVED, ENDED, FAILED, REFUSED, UNLIKE };

enum way { UNMET, DIRECT, HALVES, IN_PLACE };  // see ways.c

// As core_lane_advance, but for the time at which it was driven, which is what the engine looks at. HELD: another thread
// holds it, so nobody knows whether something could move.
enum drive { HELD, STILL, DROVE };
enum drive lane_drive(core_lane *, uint64_t nanoseconds);

// See core_engine_forget.
void lane_forget(core_lane *);

// Finds `nbytes` in the memory of another rank. UNMAPPED says by `wants` what is to be mapped.
enum found lane_find(core_lane *, unsigned rank, core_place, uint64_t nbytes, const uint8_t **at);

// Takes `nbytes` of the stage for a portion; -1 while there is no room.
int64_t lane_lend(core_lane *, uint64_t portion, uint64_t nbytes);

// Counts `nbytes` as copied for others to read.
void lane_count(core_lane *, uint64_t nbytes);

// Says that this rank needs none of the first `portions` portions any more.
void lane_consume(core_lane *, uint64_t portions);


static inline const struct entry *entry_of(const core_lane *lane, unsigned rank, const core_op *op) {
    return &lane->peers[rank].block->entries[op->number % ENTRIES];
}

// --- ways.c: how each kind of operation is done ------------------------------------------------------------------

// Describes this rank's part before it is posted: `piece`, `rounds`. True where all of it travels with the entry, in
// one portion, whatever the other ranks bring.
bool way_prepare(const core_lane *, core_op *);

// Returns whether this rank lends all that it has with its entry; and how many bytes that is.
bool way_posts(const core_op *);
uint64_t way_posted_bytes(const core_lane *, const core_op *);

// Copies them.
void way_post(const core_lane *, const core_op *, struct entry *, uint8_t *to);

// Lends the first portion before the ranks meet, where it is sure to be wanted: so what fits in it takes one meeting.
void way_begin(core_lane *, core_op *);

// All ranks have posted the same: does the operation (ENDED) or chooses how it goes on (MOVED). FAILED: what rank
// `*who` said makes no sense. WAITS: for a segment.
enum outcome way_meet(core_lane *, core_op *, unsigned *who);

// Takes a step of some microseconds; WAITS says for whom.
enum outcome way_step(core_lane *, core_op *, unsigned *who);

#endif
