// An allreduce of float32 as DeepSpeed's CPU backend has it (csrc/cpu/comm/shm.cpp), rebuilt to be measured.
//
// Each rank has a slot, which it alone writes: two short and two long buffers, taken in turn, so that no round needs a
// barrier at its end, and two words. Below 1 MiB every rank sums what all have copied in. From there on each sums its
// own slice, of at most 32 MiB at a time, and fetches the other slices when they are done. One thread a rank.
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SHORT = (1 << 20) / sizeof(float), LONG = (32 << 20) / sizeof(float), BLOCK = 1024, LOOKS = 2000 };

struct slot {
    _Alignas(4096) _Atomic uint64_t copied;  // rounds that this rank has copied in; release, pairs with await_all
    _Alignas(128) _Atomic uint64_t reduced;  // the last round whose slice it has summed; the same
    _Alignas(4096) float shorts[2][SHORT], longs[2][LONG];
};

struct group {
    struct slot *slots;
    unsigned rank, ranks;
    uint64_t round;  // from 1 on
};

size_t shm_c_slot_bytes(void) { return sizeof(struct slot); }

static void await_all(const struct group *group, size_t word) {
    for (unsigned rank = 0; rank < group->ranks; rank++) {
        const _Atomic uint64_t *said = (const void *)((const char *)&group->slots[rank] + word);
        // DeepSpeed spins without end; where ranks outnumber cores that would cost it a time slice each time.
        for (unsigned looks = 0; atomic_load_explicit(said, memory_order_acquire) < group->round; looks++)
            if (looks >= LOOKS) sched_yield();
    }
}

static const float *lent(const struct group *group, unsigned rank, int whole) {
    const struct slot *slot = &group->slots[rank];
    return whole ? slot->shorts[group->round % 2] : slot->longs[group->round % 2];
}

// Sums elements first .. last - 1 of all ranks, in the order of the ranks, into the same places of `into`.
static void reduce(const struct group *group, int whole, float *into, size_t first, size_t last) {
    for (size_t at = first; at < last; at += BLOCK) {
        size_t count = last - at < BLOCK ? last - at : BLOCK;
        float sums[BLOCK];
        memcpy(sums, lent(group, 0, whole) + at, count * sizeof(float));
        for (unsigned rank = 1; rank < group->ranks; rank++) {
            const float *from = lent(group, rank, whole) + at;
            for (size_t i = 0; i < count; i++) sums[i] += from[i];
        }
        memcpy(into + at, sums, count * sizeof(float));
    }
}

static void chunk(struct group *group, float *data, size_t count) {
    int whole = count < SHORT;
    struct slot *mine = &group->slots[group->rank];
    group->round++;
    memcpy((float *)lent(group, group->rank, whole), data, count * sizeof(float));
    atomic_store_explicit(&mine->copied, group->round, memory_order_release);
    await_all(group, offsetof(struct slot, copied));
    if (whole) {
        reduce(group, whole, data, 0, count);
        return;
    }
    size_t slice = count / group->ranks, first = group->rank * slice;
    size_t last = group->rank + 1 == group->ranks ? count : first + slice;
    reduce(group, whole, (float *)lent(group, group->rank, whole), first, last);
    atomic_store_explicit(&mine->reduced, group->round, memory_order_release);
    await_all(group, offsetof(struct slot, reduced));
    for (unsigned i = 0; i < group->ranks; i++) {
        unsigned rank = (group->rank + i) % group->ranks;  // its own slice first, then each from another rank
        size_t from = rank * slice, to = rank + 1 == group->ranks ? count : from + slice;
        memcpy(data + from, lent(group, rank, whole) + from, (to - from) * sizeof(float));
    }
}

void shm_c_allreduce(struct group *group, float *data, size_t count) {
    for (size_t at = 0; at < count; at += LONG) chunk(group, data + at, count - at < LONG ? count - at : LONG);
}
