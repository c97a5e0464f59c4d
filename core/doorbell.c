// Futexes and eventfds (futex(2), eventfd(2)).
#include "doorbell.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

static void wait(_Atomic uint32_t *word, int how, uint32_t value, uint64_t nanoseconds) {
    struct timespec limit = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
    syscall(SYS_futex, word, how, value, nanoseconds ? &limit : NULL, NULL, 0);
}

void core_doorbell_ring(core_doorbell *doorbell) {
    atomic_store_explicit(&doorbell->rung_at, core_now(), memory_order_relaxed);
    atomic_fetch_add(&doorbell->count, 1);
    syscall(SYS_futex, &doorbell->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void core_event_write(int event) {
    uint64_t one = 1;
    // If the write fails, the engine continues the operations.
    if (event >= 0) (void)!write(event, &one, sizeof one);
}

void core_doorbell_wait(core_doorbell *doorbell, uint32_t heard, uint64_t nanoseconds) {
    wait(&doorbell->count, FUTEX_WAIT, heard, nanoseconds);
}

// One of the two threads sees the store of the other: this one stores `sleep` and reads `loop_waits`, and the waker of
// the loop stores `loop_waits` and reads `sleep`, all with seq_cst.
void core_doorbell_rest(core_doorbell *doorbell, uint32_t heard, uint64_t longest, uint64_t nanoseconds) {
    atomic_store(&doorbell->sleep, CORE_RESTS);
    if (atomic_load(&doorbell->loop_waits)) core_doorbell_wait(doorbell, heard, longest);
    atomic_store(&doorbell->sleep, CORE_LISTENS);
    uint32_t count = atomic_load(&doorbell->count);
    if (!atomic_load(&doorbell->loop_waits)) core_doorbell_wait(doorbell, count, nanoseconds);
}

void core_doorbell_loop_woken(core_doorbell *doorbell) {
    if (atomic_load(&doorbell->sleep) == CORE_RESTS) core_doorbell_ring(doorbell);
}

void core_word_wait(_Atomic uint32_t *word, uint32_t value, uint64_t nanoseconds) {
    wait(word, FUTEX_WAIT_PRIVATE, value, nanoseconds);
}

void core_word_wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
