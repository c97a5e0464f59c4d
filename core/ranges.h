// The byte ranges that operations in flight read or write, in order of their first byte.
#ifndef CORE_RANGES_H
#define CORE_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uintptr_t start, end;  // `end` is one past the last byte; never empty
    void *owner;
} core_range;

// Sorted ranges in chunks of at most CORE_CHUNK. An insertion or removal moves at most the ranges of one chunk, in
// O(log n) for n ranges. Adding or removing a chunk also moves n / CORE_CHUNK pointers.
enum { CORE_CHUNK = 128 };
struct core_chunk;
typedef struct {
    struct core_chunk **chunks;
    size_t count, room, ranges;
    bool overlap;       // true if ranges may overlap: a search then begins the longest length earlier
    uintptr_t longest;  // longest length of a range since the set was empty
} core_ranges;

int core_ranges_insert(core_ranges *, core_range);  // -1: no memory
// Removes an equal range, of any owner if `owner` is NULL. Returns its owner; NULL if there is no such range.
void *core_ranges_remove(core_ranges *, core_range);
// Returns a range that overlaps [start, end); NULL if there is none.
const core_range *core_ranges_find(const core_ranges *, uintptr_t start, uintptr_t end);
void core_ranges_free(core_ranges *);

#endif
