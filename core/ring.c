// See ring.h.
#include "ring.h"

#include <string.h>

enum { SKIP = 0 };  // a kind: the next record is at the start of the ring

static uint64_t lines(uint64_t size) { return CORE_LINE + (size + CORE_LINE - 1) / CORE_LINE * CORE_LINE; }

bool core_ring_put(core_rings *rings, const core_record *record, const void *data) {
    if (record->size > rings->nbytes - CORE_LINE) return false;
    uint64_t sent = atomic_load_explicit(&rings->mine->sent, memory_order_relaxed);
    // Acquire: the other rank has read the taken bytes, so they may be overwritten.
    uint64_t taken = rings->theirs == NULL ? 0 : atomic_load_explicit(&rings->theirs->taken, memory_order_acquire);
    uint64_t at = sent % rings->nbytes, need = lines(record->size);
    uint64_t skipped = need > rings->nbytes - at ? rings->nbytes - at : 0;
    // If the other rank's number is invalid, no record is written any more.
    if (taken > sent || sent - taken + skipped + need > rings->nbytes) return false;
    if (skipped) {
        memset(rings->out + at, SKIP, CORE_LINE);
        at = 0;
    }
    memcpy(rings->out + at, record, sizeof *record);
    if (record->size) memcpy(rings->out + at + CORE_LINE, data, record->size);
    atomic_store_explicit(&rings->mine->sent, sent + skipped + need, memory_order_release);
    return true;
}

int core_ring_first(core_rings *rings, core_record *record, const void **data) {
    uint64_t sent = atomic_load_explicit(&rings->theirs->sent, memory_order_acquire);
    uint64_t taken = atomic_load_explicit(&rings->mine->taken, memory_order_relaxed);
    while (sent != taken) {
        uint64_t at = taken % rings->nbytes, left = rings->nbytes - at;
        if (sent - taken > rings->nbytes || sent % CORE_LINE != 0) return -1;
        memcpy(record, rings->in + at, sizeof *record);
        if (record->kind != SKIP) {
            if (record->size > left - CORE_LINE || lines(record->size) > sent - taken) return -1;
            rings->need = lines(record->size);
            *data = rings->in + at + CORE_LINE;
            return 1;
        }
        if (left >= sent - taken) return -1;  // a record follows the skipped bytes
        taken += left;
        atomic_store_explicit(&rings->mine->taken, taken, memory_order_release);
    }
    return 0;
}

void core_ring_take(core_rings *rings) {
    // Release: the bytes have been read before the other rank writes there again.
    atomic_fetch_add_explicit(&rings->mine->taken, rings->need, memory_order_release);
    rings->need = 0;
}
