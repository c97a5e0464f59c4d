// Records from one rank to another, in memory that both map.
//
// A ring of bytes is in the sender's memory. For each other rank, a rank has *numbers* that only this rank writes, such
// as the bytes written to its own ring and the bytes taken from the other ring. The numbers only grow. So no word has
// two writers. Each number is stored with release, and loaded with acquire, so a record is visible before the number
// that counts it.
#ifndef CORE_RING_H
#define CORE_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    _Atomic uint64_t sent;      // total bytes of records; pairs with core_ring_first
    _Atomic uint64_t taken;     // bytes that the other rank may overwrite; pairs with core_ring_put
    _Atomic uint64_t returned;  // bytes of received short messages
    _Atomic uint64_t drained;   // chunks of staged messages that were copied, so that they may be overwritten
    _Atomic uint64_t segment, offset;  // place of this rank's ring, stored before the first record
} core_numbers;

// A record from one rank to another; `kind`, which is not 0, determines the used fields.
typedef struct {
    int64_t kind, comm, tag, number, nbytes, segment, offset;
    uint64_t size;  // bytes that follow the record
} core_record;

// Alignment of records.
enum { CORE_LINE = 64 };
_Static_assert(sizeof(core_record) == CORE_LINE, "a record is one line");

// The two rings between this rank and another one, of `nbytes` each, a multiple of CORE_LINE. `out` is NULL before this
// rank has a ring, `in` before the other's is mapped; the mapping must not change during a read.
typedef struct {
    core_numbers *mine;
    const core_numbers *theirs;  // NULL: not known yet
    uint8_t *out;
    const uint8_t *in;
    uint64_t nbytes;
    uint64_t need;  // bytes of the record that core_ring_first returned
} core_rings;

// Writes a record, and after it the `size` bytes at `data`; false if there is no room.
bool core_ring_put(core_rings *, const core_record *, const void *data);

// True if there is a record to read.
static inline bool core_ring_arrived(const core_rings *rings) {
    return rings->theirs != NULL && atomic_load_explicit(&rings->theirs->sent, memory_order_acquire) !=
                                        atomic_load_explicit(&rings->mine->taken, memory_order_relaxed);
}

// Finds the oldest record, and the address of the bytes after it, both valid until core_ring_take. 1: found, 0: none,
// -1: the other rank's data are invalid. The record is copied first, then the copy is checked.
int core_ring_first(core_rings *, core_record *, const void **data);
void core_ring_take(core_rings *);

#endif
