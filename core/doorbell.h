// Waits and wake-ups of threads.
#ifndef CORE_DOORBELL_H
#define CORE_DOORBELL_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "core.h"

// Sleeps while the word has `value`, for at most `nanoseconds`; 0 is no limit. Only within this process.
void core_word_wait(_Atomic uint32_t *word, uint32_t value, uint64_t nanoseconds);
void core_word_wake(_Atomic uint32_t *word);

// Sleeps until a ring of `doorbell` after its count was `heard`, for at most `nanoseconds`; 0 is no limit.
void core_doorbell_wait(core_doorbell *doorbell, uint32_t heard, uint64_t nanoseconds);

// Lets a progress thread whose loop waits sleep until a ring after the count was `heard`, for at most `longest`
// nanoseconds, or until `nanoseconds` after the loop was woken, since the loop may be busy.
void core_doorbell_rest(core_doorbell *doorbell, uint32_t heard, uint64_t longest, uint64_t nanoseconds);

// Notifies a thread that rests, after `loop_waits` has become false.
void core_doorbell_loop_woken(core_doorbell *doorbell);

// Makes an eventfd readable; -1 is none.
void core_event_write(int event);

static inline uint64_t core_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void core_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
