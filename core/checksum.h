// A checksum of memory, to find changes made by mistake.
#ifndef CORE_CHECKSUM_H
#define CORE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { CHECKSUM_WORDS = 4 };

static inline void checksum_add(uint64_t sums[CHECKSUM_WORDS], const uint64_t words[CHECKSUM_WORDS]) {
    for (int i = 0; i < CHECKSUM_WORDS; i++) {
        sums[i] = (sums[i] ^ words[i]) * UINT64_C(0x9E3779B97F4A7C15);
        sums[i] ^= sums[i] >> 32;
    }
}

// Returns a hash of `nbytes` at `from`. Four sums take every fourth word, since one product would wait for the other.
// Each step is invertible for a given word, so a change of one word always changes the hash.
static inline uint64_t checksum(const void *from, size_t nbytes) {
    const uint8_t *at = from;
    uint64_t sums[CHECKSUM_WORDS] = {1, 2, 3, 4}, words[CHECKSUM_WORDS] = {0};
    size_t left = nbytes;
    for (; left >= sizeof words; at += sizeof words, left -= sizeof words) {
        memcpy(words, at, sizeof words);
        checksum_add(sums, words);
    }
    if (left > 0) {
        memset(words, 0, sizeof words);
        memcpy(words, at, left);
        checksum_add(sums, words);
    }
    uint64_t hash = nbytes;
    for (int i = 0; i < CHECKSUM_WORDS; i++) {
        hash = (hash ^ sums[i]) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 29;
    }
    return hash;
}

#endif
