// Records of many sizes between two threads that stand for ranks, in both directions, and invalid records.
//
//     test_rings [records]
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ring.h"

enum { RING_BYTES = 4096 };

static _Alignas(64) core_numbers numbers[2];
static _Alignas(64) uint8_t ring[2][RING_BYTES];
static int64_t records;

static core_rings of(int rank) {
    return (core_rings){&numbers[rank], &numbers[1 - rank], ring[rank], ring[1 - rank], RING_BYTES, 0};
}

static uint64_t size_of(int64_t i) { return (uint64_t)i * 2654435761u % (RING_BYTES / 2); }

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: not %s\n", __LINE__, #what), exit(1)))

static void *run(void *argument) {
    int me = (int)(uintptr_t)argument;
    core_rings rings = of(me);
    uint8_t bytes[RING_BYTES];
    for (int64_t sent = 0, read = 0; sent < records || read < records;) {
        bool moved = false;
        if (sent < records) {
            core_record record = {.kind = 1, .number = sent, .tag = me, .size = size_of(sent)};
            memset(bytes, (int)(sent % 251) + me, record.size);
            if (core_ring_put(&rings, &record, bytes)) sent++, moved = true;
        }
        core_record record;
        const void *data;
        if (core_ring_arrived(&rings) && core_ring_first(&rings, &record, &data)) {
            CHECK(record.kind == 1 && record.number == read && record.tag == 1 - me && record.size == size_of(read));
            memset(bytes, (int)(read % 251) + 1 - me, record.size);
            CHECK(memcmp(data, bytes, record.size) == 0);
            core_ring_take(&rings);
            read++, moved = true;
        }
        if (!moved) sched_yield();
    }
    return NULL;
}

static void reset(void) {
    memset(numbers, 0, sizeof numbers);
    memset(ring, 0, sizeof ring);
}

// An overwritten record is detected before memory after the ring is read.
static void overwritten(void) {
    core_rings writer = of(0), reader = of(1);
    core_record record, wrong[] = {{.kind = 1, .size = RING_BYTES}, {.kind = 1, .size = UINT64_MAX}, {.kind = 1, .size = 100}, {.kind = 0}};
    const void *data;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        reset();
        memcpy(ring[0], &wrong[i], sizeof wrong[i]);
        numbers[0].sent = CORE_LINE;
        CHECK(core_ring_first(&reader, &record, &data) == -1);
    }
    const uint64_t counts[] = {RING_BYTES + CORE_LINE, UINT64_MAX, 1, UINT64_MAX / CORE_LINE * CORE_LINE};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        reset();
        memcpy(ring[0], &(core_record){.kind = 1}, sizeof record);
        numbers[0].sent = counts[i];
        CHECK(core_ring_first(&reader, &record, &data) == -1);
    }
    reset();
    numbers[1].taken = CORE_LINE;  // more than was sent
    CHECK(!core_ring_put(&writer, &(core_record){.kind = 1}, NULL));
    reset();
    CHECK(!core_ring_put(&writer, &(core_record){.kind = 1, .size = RING_BYTES}, NULL));
    CHECK(core_ring_put(&writer, &(core_record){.kind = 1, .size = RING_BYTES - CORE_LINE}, ring[1]));
    CHECK(!core_ring_put(&writer, &(core_record){.kind = 1}, NULL));
    CHECK(core_ring_first(&reader, &record, &data) == 1 && record.size == RING_BYTES - CORE_LINE);
    core_ring_take(&reader);
    CHECK(core_ring_first(&reader, &record, &data) == 0 && core_ring_put(&writer, &(core_record){.kind = 1}, NULL));
}

int main(int argc, char **argv) {
    records = argc > 1 ? atoi(argv[1]) : 100000;
    overwritten();
    reset();
    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++) pthread_create(&threads[i], NULL, run, (void *)i);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    printf("%lld records each way\n", (long long)records);
    return 0;
}
