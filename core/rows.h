// The hash table of a parameter server's rows: from ids, at least 0, to slots.
#ifndef CORE_ROWS_H
#define CORE_ROWS_H

#include <stddef.h>
#include <stdint.h>

// A cell of an open-addressed table with linear probing. The caller fills new cells with -1 in both fields, and keeps
// at least one cell free: every search ends there. One thread at a time uses a table.
typedef struct {
    int64_t id, slot;
} core_cell;

// Writes the slot of each id into `slots`, -1 for an unknown id. `mask` is the number of cells, a power of two, minus 1.
void core_rows_find(const core_cell *cells, uint64_t mask, const int64_t *ids, size_t count, int64_t *slots);
// Adds distinct new ids with the slots `first`, `first` + 1, and so on.
void core_rows_add(core_cell *cells, uint64_t mask, const int64_t *ids, size_t count, int64_t first);

#endif
