// Collectives among the ranks of one host, in memory that all of them map. C11, libc alone; no Python.
//
// A *lane* is an ordered sequence of collectives among some ranks, the same on all of them. Each rank has a *block* in
// its own memory for it, which it alone writes and all others read; so no word in shared memory has two writers. How
// blocks and tensors of other ranks get into this process's address space is the caller's business: `core_memory`
// is told of each segment that was mapped.
//
// A lane is driven by the threads that call `core_lane_advance`, one at a time; nothing here sleeps, allocates or
// takes a lock while an operation is under way.
#ifndef CORE_H
#define CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
};

// Memory of one rank, as this process sees it: segments that were mapped, by the numbers which that rank gave them.
typedef struct core_memory core_memory;
core_memory *core_memory_new(void);  // NULL: no memory
void core_memory_free(core_memory *);
int core_memory_map(core_memory *, uint32_t segment, void *base, size_t nbytes);  // -1: no memory

// Where something lies in the memory of its rank. No segment: nobody else can reach it.
#define CORE_NOWHERE UINT32_MAX
typedef struct {
    uint32_t segment;
    uint64_t offset;
} core_place;

// One collective, as one rank takes part in it. The caller owns it, and its tensors, until `state` is final.
typedef struct core_op {
    // Given. Counts are in elements; n is what `Operation` in Python says.
    uint8_t kind, dtype, reduction;
    uint32_t root;
    uint64_t print;          // fingerprint: equal on all ranks that mean the same
    void *in, *out;          // one and the same where it works in place
    uint64_t count;          // of `in`; of a broadcast and an allgather: what all bring together
    const uint64_t *sent;    // by rank, in elements, kept by the caller: reduce_scatter, allgather, alltoall
    const uint64_t *received;  // by rank: alltoall
    core_place in_at;        // where others can reach `in`

    // Found.
    _Atomic uint32_t state;  // core_state; release when final, pairs with the acquire in core_op_state
    uint32_t differs;        // CORE_DIFFERENT, CORE_ABANDONED, CORE_BROKEN: the first rank that does

    // The lane's own.
    struct core_op *next;
    uint64_t number;                 // in the lane, from 0 on
    uint64_t base, rounds;           // its portions: base .. base + rounds - 1
    uint64_t filled, reduced, taken; // how many of them this rank is through with; of what is done in place: elements
    uint64_t piece;                  // elements of each part that one portion holds
    uint8_t posted, whole, way;
} core_op;

static inline uint32_t core_op_state(const core_op *op) {
    return __atomic_load_n((const uint32_t *)&op->state, __ATOMIC_ACQUIRE);
}

typedef struct core_lane core_lane;

size_t core_block_bytes(void);

// Returns this rank's share of a lane, NULL without memory. `block` are core_block_bytes() zeroed bytes of this rank's
// memory, aligned to 128; `stage`, at `stage_at`, are `stage_bytes` more, as many on all ranks. NULL too where these are
// fewer than CORE_LEAST_STAGE_BYTES for each rank.
#ifndef CORE_LEAST_STAGE_BYTES
#define CORE_LEAST_STAGE_BYTES 4096
#endif
core_lane *core_lane_open(unsigned rank, unsigned ranks, void *block, void *stage, size_t stage_bytes,
                          core_place stage_at);
void core_lane_close(core_lane *);

// Says where the block of another rank is mapped here, and its memory; needed from all before anything ends.
void core_lane_join(core_lane *, unsigned rank, void *block, core_memory *memory);

// Returns false for what torch has no arithmetic for, and for what no such operation is.
bool core_op_valid(const core_op *, unsigned ranks);

// Takes `op`, which is valid, in, behind those that were submitted before. The lane must be held (core_lane_hold).
void core_lane_submit(core_lane *, core_op *);

// Moves operations on until nothing moves, or until `nanoseconds` have passed; true when something moved. Held.
bool core_lane_advance(core_lane *, uint64_t nanoseconds);

// Returns true when something is under way.
bool core_lane_busy(const core_lane *);

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

#endif
