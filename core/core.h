// Collectives among the ranks of one host, in memory that all of them map. This code needs only C11 and libc, no
// Python.
//
// A *lane* is an ordered sequence of collectives among some ranks, the same on all of them. Each rank has a *block* of
// the lane in its own memory. Only this rank writes the block, and all others read it, so no word of a block has two
// writers. The caller maps the blocks and tensors of other ranks into this process, and registers each mapped segment
// in a `core_memory`.
//
// The threads that call `core_lane_advance` drive a lane, one at a time; no code of a lane sleeps, allocates or takes a
// lock while an operation is in flight. A `core_engine` is a thread that drives lanes while no other thread does.
#ifndef CORE_H
#define CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A barrier only compares fingerprints, so other ranks may submit operations of another kind.
enum core_kind {
    CORE_BARRIER, CORE_ALLREDUCE, CORE_REDUCE, CORE_SCAN, CORE_BROADCAST, CORE_REDUCE_SCATTER, CORE_ALLGATHER,
    CORE_ALLTOALL, CORE_KINDS
};

// The state of an operation. All except CORE_PENDING and CORE_WATCHED are final.
enum core_state {
    CORE_PENDING,
    CORE_DONE,
    CORE_DIFFERENT,  // the fingerprints of the ranks differ; no output was written
    CORE_ABANDONED,  // this rank or another one has abandoned the lane; the content of the outputs is unspecified
    CORE_BROKEN,     // another rank's block is invalid: its memory was overwritten
    CORE_STOPPED,    // this rank or another one takes no part, see core_lane_stop; no output was written
    CORE_UNLIKE,     // the fingerprints agree, but the kind, `levels` or `like` differs between ranks; no output was written
    CORE_WATCHED,    // like CORE_PENDING; a thread sleeps until the end (core_op_wait)
};

// The mapped segments of one rank's memory, by number.
typedef struct core_memory core_memory;
core_memory *core_memory_new(void);  // NULL: no memory
void core_memory_free(core_memory *);
// Adds a segment, once per number. One thread may call this at a time, also while lanes are driven. Returns -1 if there
// is no memory, or if the number is not below CORE_SEGMENTS.
#define CORE_SEGMENTS 4096
int core_memory_map(core_memory *, uint32_t segment, void *base, size_t nbytes);

// Sets the eventfd for which the rank's loop waits, initially -1 for none; the caller owns the eventfd.
void core_memory_set_event(core_memory *, int event);

// An address in the memory of a rank. The segment is CORE_NOWHERE if other ranks cannot access the address.
#define CORE_NOWHERE UINT32_MAX
typedef struct {
    uint32_t segment;
    uint64_t offset;
} core_place;

enum { CORE_MOST_LEVELS = 4 };  // the parts of a portion are combined in one step

// One rank's part of a collective. The caller keeps this part and its tensors until `state` is final.
typedef struct core_op {
    // Set by the caller. Counts are in elements; for the tensors see `Primitive` in Python.
    uint8_t kind, dtype, reduction;
    uint32_t root;
    uint64_t print;          // fingerprint, see core_prints_merge
    uint64_t like;           // of an allgather: a value outside the fingerprint that must be equal on all ranks
    uint64_t key;            // in a led lane: identifies an operation on all ranks; see CORE_KEY_BITS
    void *in, *out;          // equal if the operation works in place
    // With 2^levels parts, the input of an allreduce or a reduce is their combination, which needs no memory of the
    // caller. `out` may be one of the parts, and `in` is the first. All ranks must have the same number of parts.
    const void *const *parts;  // kept by the caller
    uint8_t levels;          // 0: the input is `in`
    uint64_t count;          // of `in`; of a broadcast and an allgather: total of all ranks
    const uint64_t *sent;    // by rank, in elements, kept by the caller: reduce_scatter, allgather, alltoall
    const uint64_t *received;  // by rank: alltoall
    core_place in_at;        // address of `in` for other ranks; of an allreduce of parts: address of `out`; of a reduce of parts: none
    void *caller;            // for use by `ended`
    bool direct;             // for use by `ended`

    // Set by the lane.
    _Atomic uint32_t state;  // core_state; release when final, pairs with the acquire in core_op_state
    uint32_t differs;        // the rank that caused a final state other than CORE_DONE
    uint64_t met;            // the union of the fingerprints of all ranks

    // Internal to the lane.
    struct core_op *next;
    uint64_t number;                 // in the lane, from 0
    uint64_t base, rounds;           // its portions: base .. base + rounds - 1
    uint64_t filled, reduced, taken; // portions that this rank has finished; `taken` of IN_PLACE: elements
    uint64_t piece;                  // elements of each part in one portion
    uint8_t whole, way;
    bool absent;                     // a placeholder: this rank takes no part
} core_op;

static inline uint32_t core_op_state(const core_op *op) {
    uint32_t state = __atomic_load_n((const uint32_t *)&op->state, __ATOMIC_ACQUIRE);
    return state == CORE_WATCHED ? CORE_PENDING : state;
}

// Sleeps until the operation has ended, for at most `nanoseconds`.
void core_op_wait(core_op *, uint64_t nanoseconds);

// The low CORE_PRINT_BITS of a fingerprint are a hash that must be equal on all ranks. The high bits are a second hash,
// or 0 on ranks that do not know the hashed facts. All ranks that know these facts must have the same second hash.
#define CORE_PRINT_BITS 52
static inline bool core_prints_merge(uint64_t *print, uint64_t other) {
    if (*print == other) return true;
    if ((*print ^ other) << (64 - CORE_PRINT_BITS) != 0) return false;
    if (*print >> CORE_PRINT_BITS != 0 && other >> CORE_PRINT_BITS != 0) return false;
    *print |= other;
    return true;
}

// In a led lane, several steps of a program may share a key. All ranks then submit these steps in the same order. The
// low CORE_KEY_BITS number the parts of a program that run independently.
#define CORE_KEY_BITS 5

// The doorbell of a process's engine, in memory that the ranks of the host map. engine.c has its states.
typedef struct core_doorbell {
    _Alignas(64) _Atomic uint32_t count;  // changes with each ring; any process adds to it
    _Alignas(64) _Atomic uint32_t sleep;  // a core_sleep, written only by its process
    _Atomic uint64_t rung_at;             // time of the last ring
    _Atomic int core;                     // 1 + the core on which its engine is busy, or 0; written only by its process
    // True if the loop of this process waits for other ranks. The first rank that then writes to its block, or sends a
    // message, also writes the loop's event, which is faster than a wake-up of another thread first. The engine is rung
    // too, since the loop may be busy. A progress thread needs the loop's GIL, so it waits a millisecond for the loop first.
    _Alignas(64) _Atomic bool loop_waits;
} core_doorbell;
enum core_sleep {
    CORE_AWAKE,
    CORE_DOZES,    // for at most a millisecond: other threads drive the operations in flight
    CORE_LISTENS,  // until another rank has written to its block
    CORE_SLEEPS,   // no operation is in flight
    CORE_RESTS,    // until the loop is woken, or another thread rings; see core_doorbell_rest
};
void core_doorbell_ring(core_doorbell *);

typedef struct core_lane core_lane;

size_t core_block_bytes(void);

// Options of a lane. `block` has core_block_bytes() zeroed bytes of this rank's memory, aligned to 128; `stage`, at
// `stage_at`, has `stage_bytes`, the same number on all ranks.
typedef struct {
    unsigned rank, ranks;
    bool led;  // the first rank chooses the order, so ranks may submit operations, identified by keys, in any order
    void *block, *stage;
    size_t stage_bytes;
    core_place stage_at;
    // Called with each operation that has ended, which the lane does not use afterwards, and with NULL if a segment is
    // missing (core_lane_wants). The driving thread calls `ended`, which must be short and must not call the lane.
    void (*ended)(void *context, core_op *);
    void *context;
} core_lane_options;

// Returns this rank's part of a lane; NULL if there is no memory, or if the stage has fewer than CORE_LEAST_STAGE_BYTES
// for each rank.
#ifndef CORE_LEAST_STAGE_BYTES
#define CORE_LEAST_STAGE_BYTES 4096
#endif
core_lane *core_lane_open(const core_lane_options *);
void core_lane_close(core_lane *);

// Sets the mapped block of another rank, its memory, and the doorbell of its engine (NULL: none). No operation ends
// before all ranks are joined. The lane must be held.
void core_lane_join(core_lane *, unsigned rank, void *block, core_memory *memory, core_doorbell *doorbell);

// Returns true if all ranks have been joined.
bool core_lane_joined(const core_lane *);

// Returns true if the operation is valid, and torch has its arithmetic.
bool core_op_valid(const core_op *, unsigned ranks);

// Submits a valid `op` after earlier ones; never blocks. The caller drives the lane once afterwards. One thread submits
// at a time.
void core_lane_submit(core_lane *, core_op *);

// For a led lane. This rank takes no further part in operations whose keys equal `key` above the low CORE_KEY_BITS.
// Operations that this rank has posted continue. Others, also later ones, end with CORE_STOPPED on all ranks. All ranks
// must call this, since operations that the first rank does not post would wait on the others. The caller drives the
// lane once afterwards. The newest 64 keys are remembered.
void core_lane_stop(core_lane *, uint64_t key);

// Advances operations until none can advance, or until `nanoseconds` have passed; true if one advanced. Does nothing if
// another thread holds the lane; that thread then accepts the submitted operations.
bool core_lane_advance(core_lane *, uint64_t nanoseconds);

// Returns the time of the last drive, in nanoseconds of core_now; the present time if the engine was notified since.
uint64_t core_lane_driven_at(const core_lane *);

// core_lane_busy returns the number of operations in flight. core_lane_load returns the bytes of the operations in
// flight that are too large to be posted as a whole.
uint64_t core_lane_busy(const core_lane *);
uint64_t core_lane_load(const core_lane *);

// Returns the bytes of tensors that this rank has copied for the others to read.
uint64_t core_lane_lent(const core_lane *);

// Returns true if an operation waits for the mapping of a segment, with the segment and its rank.
bool core_lane_wants(const core_lane *, unsigned *rank, uint32_t *segment);

// Abandons the lane. Operations in flight end with CORE_ABANDONED here, and on another rank once it waits for this
// rank.
void core_lane_abandon(core_lane *);

// Records that the process of another rank has ended, and abandons the lane.
void core_lane_lost(core_lane *, unsigned rank);

// Returns true if no other rank will read or write this rank's tensors or stage again, since each one has abandoned the
// lane, has finished all operations, or has ended. Until then, the memory of an abandoned lane must not change. Ranks
// that wait for this rank notice that the lane is abandoned. The caller must notify the other ranks.
bool core_lane_quiet(const core_lane *);

// One thread holds a lane at a time. core_lane_hold returns false if another thread holds the lane.
bool core_lane_hold(core_lane *);
void core_lane_release(core_lane *);

// Starts a thread that drives lanes while no other thread does, and sleeps at `doorbell` after it has polled for `spin`
// nanoseconds. NULL if the thread cannot be created.
typedef struct core_engine core_engine;
core_engine *core_engine_start(core_doorbell *doorbell, uint64_t spin);
void core_engine_spin(core_engine *, uint64_t spin);  // sets `spin`
void core_engine_stop(core_engine *);  // joins the thread; the lanes remain
uint64_t core_engine_wakes_in(const core_engine *);  // recent time from a ring until the engine runs, in nanoseconds
int core_engine_add(core_engine *, core_lane *);  // -1: no memory
void core_engine_remove(core_engine *, core_lane *);

// Detaches the lanes in a forked child, which has no engine thread. Operations in flight belong to the parent, in
// memory that both processes map. No thread of the child drives these operations, so they never end there.
void core_engine_forget(core_engine *);

// Notifies the engine of a submission to `lane`. With `now`, the engine drives the lane immediately. Otherwise the
// engine does so if no other thread drives the lane for some time.
void core_engine_notice(core_engine *, core_lane *, bool now);

#endif
