#include "ranges.h"

#include <stdlib.h>
#include <string.h>

struct core_chunk {
    size_t count;
    core_range ranges[CORE_CHUNK];
};

struct place {
    size_t chunk, at;
};

// Returns the place of the first range that begins at `start` or later: within a chunk, or after the last range.
static struct place first_from(const core_ranges *self, uintptr_t start) {
    if (self->ranges == 0) return (struct place){0, 0};
    size_t low = 0, high = self->count;
    while (low < high) {  // find the first chunk whose last range begins at `start` or later
        size_t middle = (low + high) / 2;
        const struct core_chunk *chunk = self->chunks[middle];
        if (chunk->ranges[chunk->count - 1].start < start) low = middle + 1;
        else high = middle;
    }
    struct place place = {low, 0};
    if (low == self->count) return place;
    size_t first = 0, last = self->chunks[low]->count;
    while (first < last) {
        size_t middle = (first + last) / 2;
        if (self->chunks[low]->ranges[middle].start < start) first = middle + 1;
        else last = middle;
    }
    place.at = first;
    return place;
}

static struct core_chunk *add_chunk(core_ranges *self, size_t at) {
    if (self->count == self->room) {
        size_t room = 2 * self->room + 4;
        struct core_chunk **chunks = realloc(self->chunks, room * sizeof *chunks);
        if (chunks == NULL) return NULL;
        self->chunks = chunks;
        self->room = room;
    }
    struct core_chunk *chunk = malloc(sizeof *chunk);
    if (chunk == NULL) return NULL;
    chunk->count = 0;
    memmove(self->chunks + at + 1, self->chunks + at, (self->count - at) * sizeof *self->chunks);
    self->chunks[at] = chunk;
    self->count++;
    return chunk;
}

int core_ranges_insert(core_ranges *self, core_range range) {
    struct place place = first_from(self, range.start + 1);  // after equal ranges, so that the oldest is found first
    if (place.chunk == self->count && self->count > 0) {
        place.chunk--;
        place.at = self->chunks[place.chunk]->count;
    }
    if (self->count == 0 && add_chunk(self, 0) == NULL) return -1;
    struct core_chunk *chunk = self->chunks[place.chunk];
    if (chunk->count == CORE_CHUNK) {
        struct core_chunk *next = add_chunk(self, place.chunk + 1);
        if (next == NULL) return -1;
        // Ranges that are inserted in order fill chunks; other insertions halve a full chunk.
        size_t kept = place.at == CORE_CHUNK ? CORE_CHUNK : CORE_CHUNK / 2;
        next->count = CORE_CHUNK - kept;
        memcpy(next->ranges, chunk->ranges + kept, next->count * sizeof range);
        chunk->count = kept;
        if (place.at > kept || kept == CORE_CHUNK) {
            place.at -= kept;
            chunk = next;
        }
    }
    memmove(chunk->ranges + place.at + 1, chunk->ranges + place.at, (chunk->count - place.at) * sizeof range);
    chunk->ranges[place.at] = range;
    chunk->count++;
    self->ranges++;
    if (range.end - range.start > self->longest) self->longest = range.end - range.start;
    return 0;
}

// Advances to the next range; false after the last one.
static bool next(const core_ranges *self, struct place *place) {
    if (place->chunk < self->count && ++place->at == self->chunks[place->chunk]->count) *place = (struct place){place->chunk + 1, 0};
    return place->chunk < self->count;
}

void *core_ranges_remove(core_ranges *self, core_range range) {
    if (self->ranges == 0) return NULL;
    struct place place = first_from(self, range.start);
    bool there = place.chunk < self->count;
    for (; there; there = next(self, &place)) {
        core_range *found = &self->chunks[place.chunk]->ranges[place.at];
        if (found->start != range.start) return NULL;
        if (found->end == range.end && (range.owner == NULL || found->owner == range.owner)) break;
    }
    if (!there) return NULL;
    struct core_chunk *chunk = self->chunks[place.chunk];
    void *owner = chunk->ranges[place.at].owner;
    chunk->count--;
    memmove(chunk->ranges + place.at, chunk->ranges + place.at + 1, (chunk->count - place.at) * sizeof range);
    if (chunk->count == 0 && self->count > 1) {  // the last chunk is kept for the next insertion
        free(chunk);
        self->count--;
        memmove(self->chunks + place.chunk, self->chunks + place.chunk + 1, (self->count - place.chunk) * sizeof *self->chunks);
    }
    if (--self->ranges == 0) self->longest = 0;
    return owner;
}

const core_range *core_ranges_find(const core_ranges *self, uintptr_t start, uintptr_t end) {
    if (self->ranges == 0) return NULL;
    uintptr_t before = self->overlap ? self->longest : 0;
    struct place place = first_from(self, start > before ? start - before : 0);
    if (!self->overlap) {  // the previous range may overlap this one
        if (place.at > 0) place.at--;
        else if (place.chunk > 0) place = (struct place){place.chunk - 1, self->chunks[place.chunk - 1]->count - 1};
    }
    for (bool there = place.chunk < self->count; there; there = next(self, &place)) {
        const core_range *found = &self->chunks[place.chunk]->ranges[place.at];
        if (found->start >= end) return NULL;
        if (found->end > start) return found;
    }
    return NULL;
}

void core_ranges_free(core_ranges *self) {
    for (size_t i = 0; i < self->count; i++) free(self->chunks[i]);
    free(self->chunks);
    *self = (core_ranges){0};
}
