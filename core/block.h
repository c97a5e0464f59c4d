// What the ranks of a lane say to one another: the layout of a block, in shared memory.
//
// Its rank alone writes it. A word that is stored with release is read with acquire by the others; what is said beside
// it was stored before.
//
//     entry.number   k + 1: this entry is that of operation k. Pairs with `entry_of`. The entry stays as it is until
//                    all others have said, by `consumed`, that they need nothing of operation k any more.
//     filled         how many portions this rank has filled, in all operations so far. Pairs with `all_reached`.
//     reduced        how many portions it has reduced. Pairs with `all_reached`.
//     consumed       how many portions of others it needs no more. Pairs with `all_reached`, `free_portions`.
//     abandoned      1 when it has given the lane up. Pairs with `anybody_left`.
//
// A *portion* is what one rank lends the others at a time: its bytes lie in its stage, at places[number % PLACES].
// Every operation takes as many portions on all ranks, whether a rank has something to lend in each or not, so that
// the numbers mean the same everywhere.
#ifndef CORE_BLOCK_H
#define CORE_BLOCK_H

#include <stdint.h>

#include "core.h"

// With small ones a test comes to their ends within few steps.
#ifndef CORE_ENTRIES
#define CORE_ENTRIES 64
#define CORE_PLACES 16
#define CORE_PORTION_BYTES (1 << 18)
#define CORE_WHOLE_BYTES (1 << 15)
#endif

enum {
    LINE = 64,
    ENTRIES = CORE_ENTRIES,  // how many operations may be under way between the first and the last rank
    TINY_BYTES = 32,     // what fits beside the fingerprint, in one line
    SHORT_BYTES = 384,   // what fits in an entry
    PLACES = CORE_PLACES,  // portions that may be lent at a time
};

// Where a rank's part of an operation is.
enum form {
    NOTHING,
    TINY,
    SHORT,
    STAGED,  // all of it, in its stage
    LARGE,   // in its tensor, from which portions are lent once the ranks have met
    ABSENT,  // there is none: it takes no part, and so nobody does
};

struct entry {
    _Atomic uint64_t number;
    uint64_t print;
    uint64_t consumed;  // as the word of that name, when this was written: it saves reading another line
    uint8_t form, kind;
    uint32_t at;        // STAGED: where in the stage
    uint8_t tiny[TINY_BYTES];

    core_place stage;   // STAGED and LARGE
    core_place window;  // LARGE: its `in`, where others can reach that
    uint64_t key;       // in a lane that the first rank leads
    uint32_t stage_bytes;
    uint32_t rounds;    // how many portions this rank has to lend
    union {
        uint64_t stride;  // CORE_ALLTOALL: bytes from one rank's block to the next, in what is lent
        uint64_t like;    // CORE_ALLGATHER: as it was given
    };
    uint64_t nbytes;    // of what is lent in the first portion

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
_Static_assert(offsetof(struct entry, stage) == LINE, "what is short travels in one line");
_Static_assert(offsetof(struct entry, bytes) == 2 * LINE, "bytes begin with a line");
_Static_assert(sizeof(struct block) == 5 * 128 + 512 * ENTRIES, "no holes but those that keep words apart");

#endif
