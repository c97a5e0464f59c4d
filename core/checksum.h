// A checksum of memory, to find changes made by mistake.
#ifndef CORE_CHECKSUM_H
#define CORE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Returns a hash of `nbytes` at `from`. Four sums take every fourth word, since one product would wait for the other.
// Each step is invertible for a given word, so a change of one word always changes the hash.
static inline uint64_t checksum(const void *from, size_t nbytes) {
    enum { SUMS = 4 };
    const uint64_t odd = UINT64_C(0x9E3779B97F4A7C15);
    const uint8_t *at = from;
    uint64_t sums[SUMS] = {1, 2, 3, 4}, words[SUMS];
    for (size_t left = nbytes; left > 0;) {
        size_t step = left < sizeof words ? left : sizeof words;
        if (step < sizeof words) memset(words, 0, sizeof words);
        memcpy(words, at, step);
        for (int i = 0; i < SUMS; i++) {
            sums[i] = (sums[i] ^ words[i]) * odd;
            sums[i] ^= sums[i] >> 32;
        }
        at += step, left -= step;
    }
    uint64_t hash = nbytes;
    for (int i = 0; i < SUMS; i++) hash = (hash ^ sums[i]) * odd, hash ^= hash >> 29;
    return hash;
}

#endif
