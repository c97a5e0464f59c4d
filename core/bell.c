// Futexes (futex(2)).
#include "bell.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

void core_bell_ring(core_bell *bell) {
    atomic_fetch_add(&bell->count, 1);
    syscall(SYS_futex, &bell->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void core_bell_wait(core_bell *bell, uint32_t heard, uint64_t nanoseconds) {
    struct timespec limit = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
    syscall(SYS_futex, &bell->count, FUTEX_WAIT, heard, nanoseconds ? &limit : NULL, NULL, 0);
}
