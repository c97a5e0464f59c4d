// The layout of a block, the shared memory in which one rank of a lane writes for the other ranks.
//
// Only its own rank writes a block. Each word below is stored with release, after the data that belong to it. The other
// ranks load the words with acquire.
//
//     entry.number   k + 1 if this is the entry of operation k. Pairs with `meet`. The entry does not change until
//                    `consumed` of all other ranks shows that they have finished operation k.
//     filled         portions that this rank has filled, over all operations. Pairs with `reached`.
//     reduced        portions that this rank has reduced. Pairs with `reached`.
//     consumed       portions of other ranks that this rank no longer needs. Pairs with `least_consumed`.
//     abandoned      1 if this rank has abandoned the lane. Pairs with `step`, `core_lane_quiet`.
//
// A *portion* is a buffer that one rank lends to the others. Its bytes are in the rank's stage, at places[number %
// PLACES]. In HALVES (ways.c), each other rank overwrites its part of these bytes with the result before it stores
// `reduced`, and the lender takes them after that. Every operation takes the same number of portions on all ranks, also
// on ranks without data to lend. So all ranks number the portions alike.
#ifndef CORE_BLOCK_H
#define CORE_BLOCK_H

#include <stdint.h>

#include "core.h"

// Tests define small limits, to reach them within few steps.
#ifndef CORE_ENTRIES
#define CORE_ENTRIES 64
#define CORE_PLACES 16
#define CORE_PORTION_BYTES (1 << 18)
#define CORE_WHOLE_BYTES (1 << 15)
#endif

enum {
    LINE = 64,
    ENTRIES = CORE_ENTRIES,  // most operations by which a rank may be ahead of another
    TINY_BYTES = 32,     // longest data in the line of the fingerprint
    SHORT_BYTES = 384,   // longest data in an entry
    PLACES = CORE_PLACES,  // most portions lent at a time
};

// The place of a rank's part of an operation.
enum form {
    NOTHING,
    TINY,
    SHORT,
    STAGED,  // as a whole in the rank's stage
    LARGE,   // in the rank's tensor, and lent in portions
    ABSENT,  // the rank takes no part, so the operation ends on all ranks
};

struct entry {
    _Atomic uint64_t number;
    uint64_t print;
    uint64_t consumed;  // a copy of the word `consumed`, so that readers load no other line
    uint8_t form, kind;
    uint32_t at;        // STAGED: offset in the stage
    uint8_t tiny[TINY_BYTES];

    core_place stage;   // STAGED and LARGE
    core_place window;  // LARGE: the rank's `in`, if other ranks can access it
    uint64_t key;       // in a led lane
    uint32_t stage_bytes;
    uint32_t rounds;    // portions that this rank lends
    union {
        uint64_t stride;  // CORE_ALLTOALL: bytes between the blocks of two ranks in a portion
        uint64_t like;    // CORE_ALLGATHER: `like` of core_op
    };
    uint64_t nbytes;    // bytes in the first portion

    uint8_t bytes[SHORT_BYTES];
};

struct block {
    _Alignas(128) _Atomic uint64_t filled;
    _Alignas(128) _Atomic uint64_t reduced;
    _Alignas(128) _Atomic uint64_t consumed;
    _Alignas(128) _Atomic uint32_t abandoned;
    _Alignas(128) uint64_t places[PLACES];
    _Alignas(128) struct entry entries[ENTRIES];
};

_Static_assert(sizeof(core_place) == 16, "a place has one layout in all processes");
_Static_assert(sizeof(struct entry) == 512, "an entry is eight lines");
_Static_assert(offsetof(struct entry, stage) == LINE, "tiny data are in one line");
_Static_assert(offsetof(struct entry, bytes) == 2 * LINE, "bytes begin with a line");
_Static_assert(sizeof(struct block) == 5 * 128 + 512 * ENTRIES, "no padding except between the words");

#endif
