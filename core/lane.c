// A lane on one rank: its operations in order, what it lends to the other ranks, and what it waits for.
//
//     submitted -> posted -> met -> [steps ->] over
//
// An operation is posted as soon as there is room for what this rank lends, ahead of those before it that still wait.
// It is met when all other ranks have posted the same. Operations are met, and end, in order. block.h has what the
// ranks say to one another, ways.c what they do once they have met.
#include "lane.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

size_t core_block_bytes(void) { return sizeof(struct block); }

core_lane *core_lane_open(unsigned rank, unsigned ranks, void *block, void *stage, size_t stage_bytes,
                          core_place stage_at) {
    if (stage_bytes < (size_t)ranks * CORE_LEAST_STAGE_BYTES) return NULL;
    core_lane *lane = calloc(1, sizeof *lane + ranks * sizeof lane->peers[0]);
    const void **pointers = calloc(3 * (size_t)ranks, sizeof *pointers);
    if (lane == NULL || pointers == NULL) {
        free(lane);
        free(pointers);
        return NULL;
    }
    lane->rank = rank;
    lane->ranks = ranks;
    lane->joined = 1;
    lane->mine = block;
    lane->stage = stage;
    lane->stage_bytes = stage_bytes;
    lane->stage_at = stage_at;
    lane->sources = pointers;
    lane->targets = (void **)(pointers + ranks);
    lane->windows = (const uint8_t **)(pointers + 2 * (size_t)ranks);
    lane->last = &lane->first;
    lane->peers[rank].block = block;
    atomic_flag_clear(&lane->held);
    return lane;
}

void core_lane_close(core_lane *lane) {
    free(lane->sources);
    free(lane);
}

void core_lane_join(core_lane *lane, unsigned rank, void *block, core_memory *memory) {
    lane->joined += lane->peers[rank].block == NULL;
    lane->peers[rank] = (struct peer){.block = block, .memory = memory};
}

bool core_lane_hold(core_lane *lane) { return !atomic_flag_test_and_set_explicit(&lane->held, memory_order_acquire); }

void core_lane_release(core_lane *lane) { atomic_flag_clear_explicit(&lane->held, memory_order_release); }

bool core_lane_busy(const core_lane *lane) { return lane->first != NULL; }

bool core_lane_wants(const core_lane *lane, unsigned *rank, uint32_t *segment) {
    *rank = lane->wanted_rank;
    *segment = lane->wanted_segment;
    return lane->wants;
}

// --- memory of ranks ---------------------------------------------------------------------------------------------

struct segment {
    uint8_t *base;
    size_t nbytes;
};

struct core_memory {
    struct segment *segments;
    uint32_t count;
};

core_memory *core_memory_new(void) { return calloc(1, sizeof(core_memory)); }

void core_memory_free(core_memory *memory) {
    if (memory != NULL) free(memory->segments);
    free(memory);
}

int core_memory_map(core_memory *memory, uint32_t segment, void *base, size_t nbytes) {
    if (segment >= memory->count) {
        struct segment *more = realloc(memory->segments, (segment + (size_t)1) * sizeof *more);
        if (more == NULL) return -1;
        memset(more + memory->count, 0, (segment + (size_t)1 - memory->count) * sizeof *more);
        memory->segments = more;
        memory->count = segment + 1;
    }
    memory->segments[segment] = (struct segment){base, nbytes};
    return 0;
}

enum found lane_find(core_lane *lane, unsigned rank, core_place place, uint64_t nbytes, const uint8_t **at) {
    const core_memory *memory = lane->peers[rank].memory;
    if (place.segment >= memory->count || memory->segments[place.segment].base == NULL) {
        lane->wants = true;
        lane->wanted_rank = rank;
        lane->wanted_segment = place.segment;
        return UNMAPPED;
    }
    const struct segment *segment = &memory->segments[place.segment];
    if (place.offset > segment->nbytes || nbytes > segment->nbytes - place.offset) return OUTSIDE;
    *at = segment->base + place.offset;
    return FOUND;
}

// --- what this rank lends ----------------------------------------------------------------------------------------

// Returns how many portions every other rank has consumed at least: as they said last, or as they say now.
static uint64_t least_consumed(core_lane *lane, bool look) {
    uint64_t least = UINT64_MAX;
    for (unsigned q = 0; q < lane->ranks; q++) {
        if (q == lane->rank) continue;
        struct peer *peer = &lane->peers[q];
        if (look) peer->consumed = atomic_load_explicit(&peer->block->consumed, memory_order_acquire);
        if (peer->consumed < least) {
            least = peer->consumed;
            lane->slowest = q;
        }
    }
    return least;
}

// Returns where `nbytes` of the stage are free, -1 where there is no room before others have read more. Loans end in
// order, so they make a ring; where one alone is out it begins anew at the front, whose lines are in the caches.
static int64_t room_in_stage(core_lane *lane, uint64_t portion, uint64_t nbytes, uint64_t consumed) {
    while (lane->loans_first != lane->loans_last && lane->loans[lane->loans_first % PLACES].portion < consumed)
        lane->loans_first++;
    uint64_t count = lane->loans_last - lane->loans_first;
    if (count == 0) return nbytes <= lane->stage_bytes ? 0 : -1;
    const struct loan *oldest = &lane->loans[lane->loans_first % PLACES];
    const struct loan *newest = &lane->loans[(lane->loans_last - 1) % PLACES];
    if (portion - oldest->portion >= PLACES) return -1;  // its place is still to be read
    if (newest->at < oldest->at) return nbytes <= oldest->at - newest->end ? (int64_t)newest->end : -1;
    if (count == 1 && nbytes <= oldest->at) return 0;
    if (nbytes <= lane->stage_bytes - newest->end) return (int64_t)newest->end;
    return nbytes <= oldest->at ? 0 : -1;
}

int64_t lane_lend(core_lane *lane, uint64_t portion, uint64_t nbytes) {
    nbytes = (nbytes + 127) & ~(uint64_t)127;
    int64_t at = room_in_stage(lane, portion, nbytes, least_consumed(lane, false));
    if (at < 0) at = room_in_stage(lane, portion, nbytes, least_consumed(lane, true));
    if (at < 0) return -1;
    lane->loans[lane->loans_last++ % PLACES] = (struct loan){portion, (uint64_t)at, (uint64_t)at + nbytes};
    lane->mine->places[portion % PLACES] = lane->places[portion % PLACES] = (uint64_t)at;
    return at;
}

// --- operations --------------------------------------------------------------------------------------------------

// Says what this rank brings to `op`; false while there is no room for that.
static bool post(core_lane *lane, core_op *op) {
    uint64_t k = lane->next_number, end = lane->ends[k % ENTRIES];
    op->number = k;
    if (lane->unsettled || k - lane->first->number >= ENTRIES) return false;  // this rank itself needs the entry
    if (k >= ENTRIES && least_consumed(lane, false) < end && least_consumed(lane, true) < end) return false;
    op->base = lane->next_portion;
    bool whole = way_prepare(lane, op);
    uint64_t nbytes = way_posted_bytes(lane, op);
    struct entry *entry = &lane->mine->entries[k % ENTRIES];
    uint8_t *to = NULL;
    enum form form = way_posts(op) ? NOTHING : LARGE;
    if (nbytes > SHORT_BYTES) {
        if (lane->portioned > 0) return false;  // what that lends comes first: loans end in order
        int64_t at = lane_lend(lane, op->base, nbytes);
        if (at < 0) return false;
        form = STAGED;
        to = lane->stage + at;
        entry->at = (uint32_t)at;
    } else if (nbytes > 0) {
        form = nbytes <= TINY_BYTES ? TINY : SHORT;
        to = form == TINY ? entry->tiny : entry->bytes;
    }
    entry->print = op->print;
    entry->form = form;
    entry->consumed = lane->consumed;
    if (form > TINY || !whole) {
        entry->stage = lane->stage_at;
        entry->stage_bytes = lane->stage_bytes;
        entry->window = op->in_at;
        entry->rounds = op->rounds;
        entry->nbytes = nbytes;
    }
    if (to != NULL) way_post(lane, op, entry, to);
    if (form == LARGE && lane->portioned == 0) way_begin(lane, op);
    STOP(POSTING);
    atomic_store_explicit(&entry->number, k + 1, memory_order_release);
    STOP(POSTED);
    lane->next_number++;
    lane->next_portion += whole;
    lane->unsettled = !whole;
    lane->portioned += !whole;
    lane->lent_end = whole ? op->base + 1 : UINT64_MAX;  // of what is not whole it is known once the ranks have met
    lane->ends[k % ENTRIES] = op->base + 1;  // at least; more is known when it is met
    op->posted = 1;
    return true;
}

// Looks whether the other ranks have posted the same. ENDED: they have; FAILED: one has posted another thing.
static enum outcome meet(core_lane *lane, core_op *op, unsigned *who) {
    enum outcome met = ENDED;
    for (unsigned q = 0; q < lane->ranks; q++) {
        if (q == lane->rank) continue;
        struct entry *entry = &lane->peers[q].block->entries[op->number % ENTRIES];
        if (atomic_load_explicit(&entry->number, memory_order_acquire) != op->number + 1) {
            if (met == ENDED) *who = q;
            met = WAITS;
        } else if (entry->print != op->print) {
            *who = q;
            return FAILED;
        } else if (entry->consumed > lane->peers[q].consumed) {
            lane->peers[q].consumed = entry->consumed;
        }
    }
    return met;
}

static void end(core_lane *lane, core_op *op, enum core_state state, unsigned who) {
    lane->first = op->next;
    if (lane->first == NULL) lane->last = &lane->first;
    if (lane->unposted == op) lane->unposted = op->next;
    if (op->posted) lane->portioned -= !op->whole;
    op->differs = who;
    atomic_store_explicit(&op->state, state, memory_order_release);  // from here on it is the caller's
}

// Its portions are known: those after it begin behind them.
static void settle(core_lane *lane, core_op *op, uint64_t rounds) {
    if (lane->unsettled && !op->whole) {
        lane->next_portion = op->base + rounds;
        lane->unsettled = false;
        lane->ends[op->number % ENTRIES] = op->base + rounds;
        lane->lent_end = op->base + rounds;
    }
}

void lane_consume(core_lane *lane, uint64_t portions) {
    lane->consumed = portions;
    atomic_store_explicit(&lane->mine->consumed, portions, memory_order_release);
    STOP(CONSUMED);
}

static void abandon(core_lane *lane, enum core_state state, unsigned who) {
    lane->abandoned = state;
    lane->culprit = who;
    atomic_store_explicit(&lane->mine->abandoned, 1, memory_order_release);
    while (lane->first != NULL) end(lane, lane->first, state, who);
}

void core_lane_abandon(core_lane *lane) {
    if (!lane->abandoned) abandon(lane, CORE_ABANDONED, lane->rank);
}

void core_lane_lost(core_lane *lane, unsigned rank) {
    lane->peers[rank].lost = true;
    if (!lane->abandoned) abandon(lane, CORE_ABANDONED, rank);
}

bool core_lane_quiet(const core_lane *lane) {
    if (lane->joined < lane->ranks) return true;  // nothing was posted
    for (unsigned q = 0; q < lane->ranks; q++) {
        if (q == lane->rank || lane->peers[q].lost) continue;
        struct block *block = lane->peers[q].block;
        if (!atomic_load_explicit(&block->abandoned, memory_order_acquire) &&
            atomic_load_explicit(&block->consumed, memory_order_acquire) < lane->lent_end)
            return false;
    }
    return true;
}

void core_lane_submit(core_lane *lane, core_op *op) {
    op->next = NULL;
    op->posted = 0;
    op->way = 0;
    op->filled = op->reduced = op->taken = 0;
    atomic_store_explicit(&op->state, CORE_PENDING, memory_order_relaxed);
    *lane->last = op;
    lane->last = &op->next;
    if (lane->unposted == NULL) lane->unposted = op;
    if (lane->abandoned) {
        end(lane, op, lane->abandoned, lane->culprit);
    } else if (lane->joined == lane->ranks) {
        while (lane->unposted != NULL && post(lane, lane->unposted)) lane->unposted = lane->unposted->next;
    }
}

// Moves the first operation on.
static enum outcome step(core_lane *lane) {
    core_op *op = lane->first;
    unsigned who = lane->slowest;  // while this rank has no room to post it
    enum outcome outcome = WAITS;
    if (op->posted && op->way == UNMET) {
        outcome = meet(lane, op, &who);
        if (outcome == FAILED) {
            settle(lane, op, 1);
            lane_consume(lane, op->base + 1);
            end(lane, op, CORE_DIFFERENT, who);
            return MOVED;
        }
        if (outcome == ENDED) STOP(MET);
        if (outcome == ENDED) outcome = way_meet(lane, op, &who);
        if (outcome == MOVED) settle(lane, op, op->rounds);
    } else if (op->posted) {
        outcome = way_step(lane, op, &who);
    }
    if (outcome == ENDED) {
        STOP(ENDING);
        lane_consume(lane, op->base + op->rounds);
        end(lane, op, CORE_DONE, lane->rank);
        return MOVED;
    }
    if (outcome == FAILED) {
        abandon(lane, CORE_BROKEN, who);
        return MOVED;
    }
    if (outcome == WAITS && !lane->wants && who != lane->rank &&
        atomic_load_explicit(&lane->peers[who].block->abandoned, memory_order_acquire)) {
        // What it said before it left is seen by now: it has been looked for once more, or is not there.
        if (lane->parting != op->number + 1) {
            lane->parting = op->number + 1;
            return MOVED;
        }
        abandon(lane, CORE_ABANDONED, who);
        return MOVED;
    }
    return outcome;
}

uint64_t lane_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

bool core_lane_advance(core_lane *lane, uint64_t nanoseconds) {
    bool moved = false;
    uint64_t until = 0;
    lane->wants = false;
    if (lane->joined < lane->ranks) return false;
    while (lane->first != NULL) {
        bool posted = false;
        while (lane->unposted != NULL && post(lane, lane->unposted)) {
            lane->unposted = lane->unposted->next;
            posted = true;
        }
        bool stepped = step(lane) == MOVED;
        if (!posted && !stepped) break;
        moved = true;
        if (lane->first == NULL) break;
        uint64_t time = lane_now();
        if (until == 0) until = time + nanoseconds;
        if (time >= until) break;
    }
    return moved;
}
