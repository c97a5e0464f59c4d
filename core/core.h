// Collectives among the ranks of one host, in memory that all of them map. C11, libc alone; no Python.
//
// A *lane* is an ordered sequence of collectives among some ranks, the same on all of them. Each rank has a *block* in
// its own memory for it, which it alone writes and all others read; so no word in shared memory has two writers. How
// blocks and tensors of other ranks get into this process's address space is the caller's business: `core_memory`
// is told of each segment that was mapped.
//
// A lane is driven by the threads that call `core_lane_advance`, one at a time; nothing in a lane sleeps, allocates or
// takes a lock while an operation is under way. A `core_engine` is a thread that drives lanes when nobody else does.
#ifndef CORE_H
#define CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A barrier only compares: the others may have brought something else of that fingerprint.
enum core_kind {
    CORE_BARRIER, CORE_ALLREDUCE, CORE_REDUCE, CORE_SCAN, CORE_BROADCAST, CORE_REDUCE_SCATTER, CORE_ALLGATHER,
    CORE_ALLTOALL, CORE_KINDS
};

// How an operation ended, or that it has not. It is final but for CORE_PENDING.
enum core_state {
    CORE_PENDING,
    CORE_DONE,
    CORE_DIFFERENT,  // the ranks brought different fingerprints; nothing was written
    CORE_ABANDONED,  // this rank or another one gave the lane up; what the outputs hold is unspecified
    CORE_BROKEN,     // another rank's words make no sense: its memory was overwritten
    CORE_REFUSED,    // this rank or another one takes no part in it: core_lane_refuse; nothing was written
    CORE_UNLIKE,     // the fingerprints agree, but not all ranks brought this kind, or what `like` says; nothing was written
    CORE_WATCHED,    // as CORE_PENDING; a thread sleeps until it ends (core_op_wait)
};

// Memory of one rank, as this process sees it: segments that were mapped, by the numbers which that rank gave them.
typedef struct core_memory core_memory;
core_memory *core_memory_new(void);  // NULL: no memory
void core_memory_free(core_memory *);
// Each segment once; one thread at a time, also while lanes that look into it are driven. -1: no memory, or a number from
// CORE_SEGMENTS on.
#define CORE_SEGMENTS 4096
int core_memory_map(core_memory *, uint32_t segment, void *base, size_t nbytes);

// The eventfd that its loop sleeps at, -1 (at first) for none; it stays the caller's.
void core_memory_set_event(core_memory *, int event);

// Where something lies in the memory of its rank. No segment: nobody else can reach it.
#define CORE_NOWHERE UINT32_MAX
typedef struct {
    uint32_t segment;
    uint64_t offset;
} core_place;

// One collective, as one rank takes part in it. The caller owns it, and its tensors, until `state` is final.
typedef struct core_op {
    // Given. Counts are in elements; n is what `Primitive` in Python says.
    uint8_t kind, dtype, reduction;
    uint32_t root;
    uint64_t print;          // fingerprint, see core_prints_merge
    uint64_t like;           // of an allgather: what the fingerprint leaves open, and must be alike for it to be done
    uint64_t key;            // where the first rank chooses the order: tells operations under way apart; see CORE_KEY_BITS
    void *in, *out;          // one and the same where it works in place
    uint64_t count;          // of `in`; of a broadcast and an allgather: what all bring together
    const uint64_t *sent;    // by rank, in elements, kept by the caller: reduce_scatter, allgather, alltoall
    const uint64_t *received;  // by rank: alltoall
    core_place in_at;        // where others can reach `in`
    void *caller;            // what `ended` finds there
    bool direct;             // likewise

    // Found.
    _Atomic uint32_t state;  // core_state; release when final, pairs with the acquire in core_op_state
    uint32_t differs;        // where it is not CORE_DONE: a rank because of which
    uint64_t met;            // what the fingerprints of all ranks say together

    // The lane's own.
    struct core_op *next;
    uint64_t number;                 // in the lane, from 0 on
    uint64_t base, rounds;           // its portions: base .. base + rounds - 1
    uint64_t filled, reduced, taken; // how many of them this rank is through with; of what is done in place: elements
    uint64_t piece;                  // elements of each part that one portion holds
    uint8_t whole, way;
    bool absent;                     // nobody's: it says that this rank takes no part
} core_op;

static inline uint32_t core_op_state(const core_op *op) {
    uint32_t state = __atomic_load_n((const uint32_t *)&op->state, __ATOMIC_ACQUIRE);
    return state == CORE_WATCHED ? CORE_PENDING : state;
}

// Sleeps until it has ended, for `nanoseconds` at most.
void core_op_wait(core_op *, uint64_t nanoseconds);

// A fingerprint is a hash in its low CORE_PRINT_BITS, which all ranks must have in common. The bits above are 0 where
// this rank does not know the rest; those that know it must agree on it.
#define CORE_PRINT_BITS 52
static inline bool core_prints_merge(uint64_t *print, uint64_t other) {
    if (*print == other) return true;
    if ((*print ^ other) << (64 - CORE_PRINT_BITS) != 0) return false;
    if (*print >> CORE_PRINT_BITS != 0 && other >> CORE_PRINT_BITS != 0) return false;
    *print |= other;
    return true;
}

// In a lane that the first rank leads several steps of a program may share a key: then all ranks submit those in one
// order. The low CORE_KEY_BITS number the parts of a program that go on apart.
#define CORE_KEY_BITS 5

// What the engine of a process sleeps at, in memory that the ranks of the host map: see engine.c for its states.
typedef struct core_doorbell {
    _Alignas(64) _Atomic uint32_t count;  // changes with each ring; any process adds to it
    _Alignas(64) _Atomic uint32_t sleep;  // core_sleep: its process alone writes it
    _Atomic uint64_t rung_at;             // when it was last
    _Atomic int core;                     // 1 + where its engine drives much just now, 0 for nowhere: its process writes it
    // The loop of this process waits for what others say: the first of them to say something writes its event, too. The
    // engine is rung all the same, for the loop may be at other things; that one of both looks saves a hop of threads.
    _Alignas(64) _Atomic bool loop_waits;
} core_doorbell;
enum core_sleep {
    CORE_AWAKE,
    CORE_DOZES,    // for a millisecond at most: others drive what is under way
    CORE_LISTENS,  // until another rank has said something
    CORE_SLEEPS,   // nothing is under way
};
void core_doorbell_ring(core_doorbell *);

typedef struct core_lane core_lane;

size_t core_block_bytes(void);

// How the lanes of a process are opened. `block` are core_block_bytes() zeroed bytes of this rank's memory, aligned to
// 128; `stage`, at `stage_at`, are `stage_bytes` more, as many on all ranks.
typedef struct {
    unsigned rank, ranks;
    bool led;  // the first rank chooses the order: ranks may submit operations, told apart by keys, in any order
    void *block, *stage;
    size_t stage_bytes;
    core_place stage_at;
    // Told of each operation that ended, as the last thing that is done with it; and, with NULL, that a segment is
    // wanted (core_lane_wants). By the thread that drives the lane; it must be quick, and leave the lane alone.
    void (*ended)(void *context, core_op *);
    void *context;
} core_lane_options;

// Returns this rank's share of a lane, NULL without memory and where a stage has fewer than CORE_LEAST_STAGE_BYTES for
// each rank.
#ifndef CORE_LEAST_STAGE_BYTES
#define CORE_LEAST_STAGE_BYTES 4096
#endif
core_lane *core_lane_open(const core_lane_options *);
void core_lane_close(core_lane *);

// Says where the block of another rank is mapped here, its memory, and what its engine sleeps at (NULL: at nothing);
// needed from all before anything ends. The lane must be held.
void core_lane_join(core_lane *, unsigned rank, void *block, core_memory *memory, core_doorbell *doorbell);

// Returns true once all have been joined.
bool core_lane_joined(const core_lane *);

// Returns false for what torch has no arithmetic for, and for what no such operation is.
bool core_op_valid(const core_op *, unsigned ranks);

// Takes `op`, which is valid, in, behind those that were submitted before; never waits. Who submits drives the lane
// once afterwards. One thread submits at a time.
void core_lane_submit(core_lane *, core_op *);

// In a lane that the first rank leads: this rank takes no part any more in operations whose keys are as `key` above the
// low CORE_KEY_BITS. What it has posted of them goes on; the rest ends with CORE_REFUSED, on those ranks too that have
// posted it, and so does what is submitted later. The others should be told, and do the same: what the first rank does
// not post would wait there. Who calls it drives the lane once afterwards. The newest 64 keys are remembered.
void core_lane_refuse(core_lane *, uint64_t key);

// Moves operations on until nothing moves, or until `nanoseconds` have passed; true when something moved. Does nothing
// while another thread holds the lane, which then takes in what was submitted.
bool core_lane_advance(core_lane *, uint64_t nanoseconds);

// Returns when it was driven last, in nanoseconds of core_now: now, where it was advanced just before and is busy.
uint64_t core_lane_driven_at(const core_lane *);

// Returns how many operations are under way; how many bytes of input they have that do not travel at once.
uint64_t core_lane_busy(const core_lane *);
uint64_t core_lane_load(const core_lane *);

// Returns how many bytes of tensors this rank has copied so far, for the others to read.
uint64_t core_lane_lent(const core_lane *);

// Returns true when an operation cannot go on before a segment is mapped: which, of which rank.
bool core_lane_wants(const core_lane *, unsigned *rank, uint32_t *segment);

// Gives the lane up: all that is under way ends with CORE_ABANDONED, here and, when they look, on the other ranks.
void core_lane_abandon(core_lane *);

// Says that the process of another rank is gone: it gives the lane up too.
void core_lane_lost(core_lane *, unsigned rank);

// Returns true when no other rank reads or writes what this rank brought to the lane, or its stage, ever again: each has
// given the lane up, is through with all of it, or is gone. Before that, the memory of a lane that was given up must stay
// as it is. Others that wait for this rank look by themselves; those that do not must be told to give up.
bool core_lane_quiet(const core_lane *);

// One thread holds a lane at a time: false when another one does.
bool core_lane_hold(core_lane *);
void core_lane_release(core_lane *);

// A thread that drives lanes while nobody else does, and sleeps at `doorbell`. It looks for `spin` nanoseconds before it
// does. NULL where no thread can be had.
typedef struct core_engine core_engine;
core_engine *core_engine_start(core_doorbell *doorbell, uint64_t spin);
void core_engine_spin(core_engine *, uint64_t spin);  // from now on
void core_engine_stop(core_engine *);  // it has driven its lanes for the last time; they stay
uint64_t core_engine_wakes_in(const core_engine *);  // how long it took lately from a ring until it ran: nanoseconds
int core_engine_add(core_engine *, core_lane *);  // -1: no memory
void core_engine_remove(core_engine *, core_lane *);

// In a forked child, where there is no such thread: what its lanes have under way is the parent's, in memory that both
// map. Nobody drives them any more; nothing that is under way ends.
void core_engine_forget(core_engine *);

// Something was submitted to `lane`. With `now` the engine drives it at once, else where nobody else does so for long.
void core_engine_notice(core_engine *, core_lane *, bool now);

#endif
