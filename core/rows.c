#include "rows.h"

enum { AHEAD = 32 };  // ids whose first cells are fetched into the cache together

// The finaliser of SplitMix64, as `mix` in aiodist/ps/rows.py. The low bits choose the cell, since the ids of one server
// agree in the high bits.
static uint64_t mixed(int64_t id) {
    uint64_t z = (uint64_t)id;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t fetch(const core_cell *cells, uint64_t mask, const int64_t *ids, size_t left, uint64_t at[AHEAD]) {
    size_t some = left < AHEAD ? left : AHEAD;
    for (size_t i = 0; i < some; i++) {
        at[i] = mixed(ids[i]) & mask;
        __builtin_prefetch(&cells[at[i]]);
    }
    return some;
}

// Returns the first cell from `at` on that has `id`, or is free.
static uint64_t cell_of(const core_cell *cells, uint64_t mask, int64_t id, uint64_t at) {
    while (cells[at].id != id && cells[at].id != -1) at = (at + 1) & mask;
    return at;
}

void core_rows_find(const core_cell *cells, uint64_t mask, const int64_t *ids, size_t count, int64_t *slots) {
    uint64_t at[AHEAD];
    for (size_t done = 0; done < count;) {
        size_t some = fetch(cells, mask, ids + done, count - done, at);
        for (size_t i = 0; i < some; i++, done++) slots[done] = cells[cell_of(cells, mask, ids[done], at[i])].slot;
    }
}

void core_rows_add(core_cell *cells, uint64_t mask, const int64_t *ids, size_t count, int64_t first) {
    uint64_t at[AHEAD];
    for (size_t done = 0; done < count;) {
        size_t some = fetch(cells, mask, ids + done, count - done, at);
        for (size_t i = 0; i < some; i++, done++)
            cells[cell_of(cells, mask, ids[done], at[i])] = (core_cell){ids[done], first + (int64_t)done};
    }
}
