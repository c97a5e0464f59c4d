// Declarations shared by lane.c and ways.c.
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
    PORTION_BYTES = CORE_PORTION_BYTES,  // bytes of a portion
    AHEAD = 2,                // portions that are filled ahead of the current one
    SLICE_BYTES = 1 << 16,    // bytes of work between two reads of the clock
    WHOLE_BYTES = CORE_WHOLE_BYTES,  // longest data sent with the entry, so that the ranks meet once
    PAST_BYTES = CORE_PAST_BYTES,  // smallest result that is copied past the caches
    TIMED_BYTES = 1 << 15,    // smallest store that is timed, to learn the distance of other ranks' caches
    NEAR_BYTES_PER_US = CORE_NEAR_BYTES_PER_US,  // least speed of stores to near caches
    MOST_ROUNDS = 1 << 30,    // largest valid number of rounds from another rank
    UNTIMED = 2,             // moves before the clock is read; short operations need no more
    STREAMED = 16,            // stores past the caches before the next test of the distance
    STOPPED_KEYS = 64,        // remembered keys
    STAND_INS = 4,            // placeholders that may be posted and not met
};

// Tests stop or kill a rank at each of these.
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
    uint64_t consumed;  // last known value of the rank's `consumed`
    bool lost;          // true if the rank's process has ended
};

struct loan {
    uint64_t portion, at, end;
};

struct core_lane {
    unsigned rank, ranks;
    unsigned joined;  // ranks with known blocks; 0 in a forked child, which must not use its parent's
    struct block *mine;
    uint8_t *stage;
    uint64_t stage_bytes;
    core_place stage_at;
    void (*ended)(void *context, core_op *);
    void *context;
    bool led;

    // Written by any thread, with seq_cst. If a submitting thread finds the lane held, the holder sees the submission
    // after the release.
    _Alignas(64) _Atomic bool held;
    _Atomic(core_op *) inbox;          // submitted, the newest first
    _Atomic uint64_t busy, load;       // operations in flight; bytes of those longer than WHOLE_BYTES
    _Atomic uint64_t lent;             // see core_lane_lent; the holder counts
    _Atomic uint64_t driven_at;        // time of the last drive, in nanoseconds; the engine then skips the lane

    // Used only by the holder, from here on.
    core_op *first, **last;            // posted, in order
    core_op *waiting, **waiting_last;  // not posted yet, in order of submission
    bool spoke;                        // true if the block was written since the last test of the doorbells
    uint64_t next_number, next_portion;
    uint64_t lent_end;       // a rank that has consumed this many portions does not use this rank's memory
    bool unsettled;          // next_portion is known only after the newest posted operation is met
    unsigned portioned;      // posted operations that lend one portion after another
    uint64_t ends[ENTRIES];  // by entry: the portion after the last one of its present or last operation

    uint64_t stopped[STOPPED_KEYS];  // stopped keys, without their low bits
    uint64_t stops;                  // number of stops; the newest are kept
    core_op stand_ins[STAND_INS], *idle;  // placeholders for stopped operations that the first rank posts

    uint64_t consumed;       // this rank's word `consumed`
    unsigned slowest;        // the rank with the least `consumed` when there was no room
    struct loan loans[PLACES];
    uint64_t places[PLACES]; // a copy of the block's, which other processes cannot overwrite
    uint64_t loans_first, loans_last;

    unsigned slow, streamed; // consecutive stores to the stage: see `put`

    uint32_t abandoned;      // core_state with which all operations end, 0 while the lane works
    uint32_t culprit;
    uint64_t parting;        // 1 + next_number when a rank was first seen to have abandoned the lane
    bool wants;
    unsigned wanted_rank;
    uint32_t wanted_segment;

    const uint8_t **windows; // by rank: the tensors of the operation in place
    const void **sources;    // arguments of one call of a kernel
    void **targets;
    struct peer peers[];
};

enum found { FOUND, UNMAPPED, OUTSIDE };
enum outcome { WAITS, MOVED, ENDED, FAILED, STOPPED, UNLIKE };

enum way { UNMET, DIRECT, HALVES, IN_PLACE };  // see ways.c

// Like core_lane_advance, but without an update of driven_at, which the engine reads. HELD: another thread holds the
// lane, so it is unknown if an operation could advance.
enum drive { HELD, STILL, DROVE };
enum drive lane_drive(core_lane *, uint64_t nanoseconds);

// See core_engine_forget.
void lane_forget(core_lane *);

// Finds `nbytes` in the memory of another rank. With UNMAPPED, `wants` has the segment to map.
enum found lane_find(core_lane *, unsigned rank, core_place, uint64_t nbytes, const uint8_t **at);

// Allocates `nbytes` of the stage for a portion; -1 if there is no room.
int64_t lane_lend(core_lane *, uint64_t portion, uint64_t nbytes);

// Counts `nbytes` as copied for others to read.
void lane_count(core_lane *, uint64_t nbytes);

// Publishes that this rank no longer needs the first `portions` portions.
void lane_consume(core_lane *, uint64_t portions);


static inline const struct entry *entry_of(const core_lane *lane, unsigned rank, const core_op *op) {
    return &lane->peers[rank].block->entries[op->number % ENTRIES];
}

// --- ways.c: the algorithms of each kind of operation ------------------------------------------------------------

// Sets `piece` and `rounds` of this rank's part before the part is posted. True if the whole part is sent with the
// entry, in one portion, independent of the other ranks.
bool way_prepare(const core_lane *, core_op *);

// way_posts returns true if this rank lends all of its data with its entry. way_posted_bytes returns their number.
bool way_posts(const core_op *);
uint64_t way_posted_bytes(const core_lane *, const core_op *);

// Copies the posted bytes.
void way_post(const core_lane *, const core_op *, struct entry *, uint8_t *to);

// Lends the first portion before the ranks meet, if the portion is certainly needed. Data of one portion then take one
// meeting.
void way_begin(core_lane *, core_op *);

// Continues after all ranks have posted the same operation: runs the operation (ENDED) or chooses the algorithm
// (MOVED). FAILED: the entry of rank `*who` is invalid. WAITS: a segment is not mapped yet.
enum outcome way_meet(core_lane *, core_op *, unsigned *who);

// Runs a step of some microseconds; with WAITS, `*who` is the awaited rank.
enum outcome way_step(core_lane *, core_op *, unsigned *who);

#endif
