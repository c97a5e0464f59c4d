// Records from one rank to another, in memory that both map.
//
// A ring of bytes lies in the sender's memory. Each rank has *numbers* for each of the others, which it alone writes, and
// which tell what it has written to its ring and what it has taken from the other's. They only grow. So no word has two
// writers, and what a rank writes is seen before the number that counts it: each is stored with release, and loaded with
// acquire.
#ifndef CORE_RING_H
#define CORE_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    _Atomic uint64_t sent;      // bytes of records, ever; pairs with core_ring_first
    _Atomic uint64_t taken;     // bytes of the other's ring that it may write again; pairs with core_ring_put
    _Atomic uint64_t returned;  // bytes of short messages that were received
    _Atomic uint64_t drained;   // pieces of staged messages that were copied out, and may be written again
    _Atomic uint64_t segment, offset;  // where my ring lies, from before the first record on
} core_numbers;

// What one rank says to another; which of the fields mean something depends on `kind`, which is not 0.
typedef struct {
    int64_t kind, comm, tag, number, nbytes, segment, offset;
    uint64_t size;  // how many bytes follow it
} core_record;

// Records begin at multiples of it.
enum { CORE_LINE = 64 };
_Static_assert(sizeof(core_record) == CORE_LINE, "a record is one line");

// The two rings between this rank and another one, as this rank sees them; of `nbytes` each, a multiple of CORE_LINE.
// `out` is NULL before this rank has a ring, `in` before the other's is mapped, which must not be while something is read.
typedef struct {
    core_numbers *mine;
    const core_numbers *theirs;  // NULL: not known yet
    uint8_t *out;
    const uint8_t *in;
    uint64_t nbytes;
    uint64_t need;  // bytes of the record that core_ring_first returned
} core_rings;

// Writes a record, and behind it the `size` bytes at `data`; false when there is no room now.
bool core_ring_put(core_rings *, const core_record *, const void *data);

// Whether there is something to read.
static inline bool core_ring_arrived(const core_rings *rings) {
    return rings->theirs != NULL && atomic_load_explicit(&rings->theirs->sent, memory_order_acquire) !=
                                        atomic_load_explicit(&rings->mine->taken, memory_order_relaxed);
}

// Finds the oldest record, and where the bytes behind it lie until core_ring_take lets go of both. 1: found, 0: there is
// none, -1: what the other rank wrote makes no sense. It is checked here: a copy of the record is what counts.
int core_ring_first(core_rings *, core_record *, const void **data);
void core_ring_take(core_rings *);

#endif
