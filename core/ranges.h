// Byte ranges in order of their first byte: those that operations in flight read, or write.
#ifndef CORE_RANGES_H
#define CORE_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    uintptr_t start, end;  // one past the last; never empty
    void *owner;
} core_range;

// Sorted, in chunks of at most CORE_CHUNK: what is inserted or removed moves no more than one, and the list of them.
// n ranges: O(log n), and n / CORE_CHUNK pointers moved now and then.
enum { CORE_CHUNK = 128 };
struct core_chunk;
typedef struct {
    struct core_chunk **chunks;
    size_t count, room, ranges;
    bool overlap;       // they may: then what overlaps another is found within the longest one's length before it
    uintptr_t longest;  // of any range since it was empty
} core_ranges;

int core_ranges_insert(core_ranges *, core_range);  // -1: no memory
// Removes one that is equal; `owner` NULL: of any owner. Returns its owner, NULL where there is none.
void *core_ranges_remove(core_ranges *, core_range);
// Returns one that overlaps [start, end), NULL where there is none.
const core_range *core_ranges_find(const core_ranges *, uintptr_t start, uintptr_t end);
void core_ranges_free(core_ranges *);

#endif
