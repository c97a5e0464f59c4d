// A lane on one rank: its operations in order, its loans to other ranks, and its waits for other ranks.
//
//     submitted -> waiting -> posted -> met -> [steps ->] done, different, unlike, stopped, abandoned, broken
//
//     submitted  in the inbox of this rank's lane, until a thread drives the lane
//     waiting    this rank has no room for its data, or the first rank of a led lane has not posted it
//     posted     other ranks can read this rank's entry; short data are there, or in the stage
//     met        all ranks have posted the same operation; ways.c moves the data
//
// An operation is posted as soon as there is room, also if earlier ones still wait. Operations are met, and end, in
// order. block.h has the words that ranks share. Within a process these threads write:
//
//     word                         writer                              protection
//     held                         any thread                          an atomic exchange: a try-lock
//     inbox                        one submitting thread at a time     compare and swap; the lane need not be held
//     operation up to met          the holder of the lane              the lane; words for others with release
//     operation to its end         the holder of the lane              an exchange of its state, then one report
//     operation pending, watched   a thread that sleeps until its end  compare and swap; the end wakes the futex
//     driven_at                    a driver other than the engine      none: a hint for 20 us
//
// A thread that releases a lane then looks for new submissions: a sequential store, then a load.
#include "lane.h"

#include <stdlib.h>
#include <string.h>

#include "doorbell.h"

size_t core_block_bytes(void) { return sizeof(struct block); }

core_lane *core_lane_open(const core_lane_options *options) {
    unsigned ranks = options->ranks;
    if (options->stage_bytes < (size_t)ranks * CORE_LEAST_STAGE_BYTES || options->stage_bytes > UINT32_MAX) return NULL;
    size_t nbytes = sizeof(core_lane) + ranks * sizeof(struct peer);
    core_lane *lane = aligned_alloc(64, (nbytes + 63) & ~(size_t)63);
    const void **pointers = calloc(3 * (size_t)ranks, sizeof *pointers);
    if (lane == NULL || pointers == NULL) {
        free(lane);
        free(pointers);
        return NULL;
    }
    memset(lane, 0, nbytes);
    lane->rank = options->rank;
    lane->ranks = ranks;
    lane->led = options->led;
    lane->joined = 1;
    lane->mine = options->block;
    lane->stage = options->stage;
    lane->stage_bytes = options->stage_bytes;
    lane->stage_at = options->stage_at;
    lane->ended = options->ended;
    lane->context = options->context;
    lane->sources = pointers;
    lane->targets = (void **)(pointers + ranks);
    lane->windows = (const uint8_t **)(pointers + 2 * (size_t)ranks);
    lane->last = &lane->first;
    lane->waiting_last = &lane->waiting;
    lane->peers[lane->rank].block = lane->mine;
    for (unsigned i = 0; i < STAND_INS; i++) {
        lane->stand_ins[i] = (core_op){.kind = CORE_BARRIER, .dtype = CORE_U8, .absent = true, .next = lane->idle};
        lane->idle = &lane->stand_ins[i];
    }
    return lane;
}

void core_lane_close(core_lane *lane) {
    free(lane->sources);
    free(lane);
}

void core_lane_join(core_lane *lane, unsigned rank, void *block, core_memory *memory, core_doorbell *doorbell) {
    lane->joined += lane->peers[rank].block == NULL;
    lane->peers[rank] = (struct peer){.block = block, .memory = memory, .doorbell = doorbell};
}

bool core_lane_joined(const core_lane *lane) { return lane->joined == lane->ranks; }

bool core_lane_hold(core_lane *lane) { return !atomic_exchange(&lane->held, true); }

void core_lane_release(core_lane *lane) { atomic_store(&lane->held, false); }

uint64_t core_lane_busy(const core_lane *lane) { return atomic_load_explicit(&lane->busy, memory_order_acquire); }

uint64_t core_lane_load(const core_lane *lane) { return atomic_load_explicit(&lane->load, memory_order_relaxed); }

uint64_t core_lane_lent(const core_lane *lane) { return atomic_load_explicit(&lane->lent, memory_order_relaxed); }

void lane_count(core_lane *lane, uint64_t nbytes) {
    atomic_store_explicit(&lane->lent, core_lane_lent(lane) + nbytes, memory_order_relaxed);
}

bool core_lane_wants(const core_lane *lane, unsigned *rank, uint32_t *segment) {
    *rank = lane->wanted_rank;
    *segment = lane->wanted_segment;
    return lane->wants;
}

// --- memory of ranks ---------------------------------------------------------------------------------------------

struct segment {
    _Atomic(uint8_t *) base;  // stored with release after nbytes; the acquire of lane_find pairs with it
    size_t nbytes;
};

// A segment may be mapped while driven lanes look for other segments, so known segments never move.
enum { CHUNK = 64, CHUNKS = CORE_SEGMENTS / CHUNK };
struct core_memory {
    _Atomic(struct segment *) chunks[CHUNKS];
    _Atomic int event;
};

core_memory *core_memory_new(void) {
    core_memory *memory = calloc(1, sizeof *memory);
    if (memory != NULL) core_memory_set_event(memory, -1);
    return memory;
}

void core_memory_set_event(core_memory *memory, int event) {
    atomic_store_explicit(&memory->event, event, memory_order_relaxed);
}

void core_memory_free(core_memory *memory) {
    for (unsigned i = 0; memory != NULL && i < CHUNKS; i++) free(memory->chunks[i]);
    free(memory);
}

int core_memory_map(core_memory *memory, uint32_t segment, void *base, size_t nbytes) {
    if (segment >= CHUNK * CHUNKS) return -1;
    struct segment *chunk = atomic_load_explicit(&memory->chunks[segment / CHUNK], memory_order_relaxed);
    if (chunk == NULL) {
        chunk = calloc(CHUNK, sizeof *chunk);
        if (chunk == NULL) return -1;
        atomic_store_explicit(&memory->chunks[segment / CHUNK], chunk, memory_order_release);
    }
    chunk[segment % CHUNK].nbytes = nbytes;
    atomic_store_explicit(&chunk[segment % CHUNK].base, base, memory_order_release);
    return 0;
}

enum found lane_find(core_lane *lane, unsigned rank, core_place place, uint64_t nbytes, const uint8_t **at) {
    core_memory *memory = lane->peers[rank].memory;
    if (place.segment >= CHUNK * CHUNKS) return OUTSIDE;
    struct segment *chunk = atomic_load_explicit(&memory->chunks[place.segment / CHUNK], memory_order_acquire);
    struct segment *segment = chunk == NULL ? NULL : &chunk[place.segment % CHUNK];
    uint8_t *base = segment == NULL ? NULL : atomic_load_explicit(&segment->base, memory_order_acquire);
    if (base == NULL) {
        lane->wants = true;
        lane->wanted_rank = rank;
        lane->wanted_segment = place.segment;
        return UNMAPPED;
    }
    if (place.offset > segment->nbytes || nbytes > segment->nbytes - place.offset) return OUTSIDE;
    *at = base + place.offset;
    return FOUND;
}

// --- loans -------------------------------------------------------------------------------------------------------

// Returns the number of portions that every other rank has consumed, by the last known values or by fresh ones.
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

// Returns the offset of `nbytes` in the stage, or -1 if other ranks must read more first. Loans end in order, so they
// form a ring; if only one loan is open, the next begins at the front, whose lines are in the caches.
static int64_t room_in_stage(core_lane *lane, uint64_t portion, uint64_t nbytes, uint64_t consumed) {
    if (lane->consumed < consumed) consumed = lane->consumed;  // it takes results from its own stage
    while (lane->loans_first != lane->loans_last && lane->loans[lane->loans_first % PLACES].portion < consumed)
        lane->loans_first++;
    uint64_t count = lane->loans_last - lane->loans_first;
    if (count == 0) return nbytes <= lane->stage_bytes ? 0 : -1;
    const struct loan *oldest = &lane->loans[lane->loans_first % PLACES];
    const struct loan *newest = &lane->loans[(lane->loans_last - 1) % PLACES];
    if (portion - oldest->portion >= PLACES) return -1;  // other ranks must read its place first
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

// Returns the kind with the number of parts, which must both be equal on all ranks.
static uint8_t kind_of(const core_op *op) { return (uint8_t)(op->kind | op->levels << 4); }

// Posts this rank's entry of `op`; false if there is no room for it.
static bool post(core_lane *lane, core_op *op) {
    uint64_t k = lane->next_number, end = lane->ends[k % ENTRIES];
    op->number = k;
    if (lane->unsettled) return false;
    if (lane->first != NULL && k - lane->first->number >= ENTRIES) return false;  // this rank still needs the entry
    if (k >= ENTRIES && least_consumed(lane, false) < end && least_consumed(lane, true) < end) return false;
    op->base = lane->next_portion;
    bool whole = way_prepare(lane, op);
    uint64_t nbytes = way_posted_bytes(lane, op);
    struct entry *entry = &lane->mine->entries[k % ENTRIES];
    uint8_t *to = NULL;
    enum form form = op->absent ? ABSENT : way_posts(op) ? NOTHING : LARGE;
    if (nbytes > SHORT_BYTES) {
        if (lane->portioned > 0) return false;  // its loans come first, since loans end in order
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
    entry->form = (uint8_t)form;
    entry->kind = kind_of(op);
    entry->consumed = lane->consumed;
    if (form > TINY || !whole || lane->led || op->kind == CORE_ALLGATHER) {
        entry->stage = lane->stage_at;
        entry->window = op->in_at;
        entry->key = op->key;
        entry->stage_bytes = (uint32_t)lane->stage_bytes;
        entry->rounds = (uint32_t)op->rounds;
        entry->nbytes = nbytes;
        if (op->kind == CORE_ALLGATHER) entry->like = op->like;
    }
    if (to != NULL) {
        way_post(lane, op, entry, to);
        lane_count(lane, nbytes);
    }
    if (form == LARGE && lane->portioned == 0) way_begin(lane, op);
    STOP(POSTING);
    atomic_store_explicit(&entry->number, k + 1, memory_order_release);
    STOP(POSTED);
    lane->spoke = true;
    lane->next_number++;
    lane->next_portion += whole;
    lane->unsettled = !whole;
    lane->portioned += !whole;
    lane->lent_end = whole ? op->base + 1 : UINT64_MAX;  // not known for other operations before the ranks have met
    lane->ends[k % ENTRIES] = op->base + 1;  // a lower bound until the ranks meet
    return true;
}

static bool is_stopped(const core_lane *lane, uint64_t key) {
    for (uint64_t i = 0; i < lane->stops && i < STOPPED_KEYS; i++)
        if (lane->stopped[i] == key >> CORE_KEY_BITS) return true;
    return false;
}

// Queues a placeholder for a stopped operation as the next entry; false if too many placeholders are posted.
static bool stand_in(core_lane *lane) {
    core_op *op = lane->idle;
    if (op == NULL) return false;
    lane->idle = op->next;
    op->next = lane->waiting;
    op->way = UNMET;
    if (lane->waiting == NULL) lane->waiting_last = &op->next;
    lane->waiting = op;
    atomic_fetch_add_explicit(&lane->busy, 1, memory_order_relaxed);
    return true;
}

// Returns the link to the operation that must be posted next; NULL if it is not submitted yet, or not known.
static core_op **next_waiting(core_lane *lane) {
    core_op **at = &lane->waiting;
    if (!lane->led || lane->rank == 0) return *at == NULL ? NULL : at;
    if (*at == NULL && lane->stops == 0) return NULL;
    const struct entry *entry = &lane->peers[0].block->entries[lane->next_number % ENTRIES];
    if (atomic_load_explicit(&entry->number, memory_order_acquire) != lane->next_number + 1) return NULL;
    if (*at != NULL && (*at)->absent) return at;
    if (is_stopped(lane, entry->key)) return stand_in(lane) ? at : NULL;
    while (*at != NULL && (*at)->key != entry->key) at = &(*at)->next;
    return *at == NULL ? NULL : at;
}

// Posts the operations for which there is room; true if one was posted.
static bool post_waiting(core_lane *lane) {
    bool posted = false;
    for (core_op **at; (at = next_waiting(lane)) != NULL && post(lane, *at); posted = true) {
        core_op *op = *at;
        *at = op->next;
        if (lane->waiting_last == &op->next) lane->waiting_last = at;
        op->next = NULL;
        *lane->last = op;
        lane->last = &op->next;
    }
    return posted;
}

// True if an entry with the same fingerprint can be run together with `op`.
static bool alike(const struct entry *entry, const core_op *op) {
    return entry->kind == kind_of(op) && (op->kind != CORE_ALLGATHER || entry->like == op->like);
}

// Checks if the other ranks have posted the same operation. ENDED: all have; FAILED: a fingerprint differs; UNLIKE: the
// same fingerprint, but not alike; STOPPED: a rank takes no part. All ranks see all entries, and find the same outcome,
// except for FAILED.
static enum outcome meet(core_lane *lane, core_op *op, unsigned *who) {
    enum outcome met = ENDED;
    unsigned other = lane->ranks;
    op->met = op->print;
    *who = lane->rank;
    if (op->absent) return STOPPED;
    for (unsigned q = 0; q < lane->ranks; q++) {
        if (q == lane->rank) continue;
        struct entry *entry = &lane->peers[q].block->entries[op->number % ENTRIES];
        if (atomic_load_explicit(&entry->number, memory_order_acquire) != op->number + 1) {
            if (met == ENDED) *who = q;
            met = WAITS;
        } else if (entry->form == ABSENT) {
            *who = q;
            return STOPPED;
        } else if (!core_prints_merge(&op->met, entry->print)) {
            *who = q;
            return FAILED;
        } else {
            if (!alike(entry, op)) other = q;
            if (entry->consumed > lane->peers[q].consumed) lane->peers[q].consumed = entry->consumed;
        }
    }
    if (met != ENDED || other == lane->ranks || op->kind == CORE_BARRIER) return met;
    *who = other;
    return UNLIKE;
}

static uint64_t load_of(const core_op *op) {
    uint64_t nbytes = op->count * core_itemsize(op->dtype);
    return nbytes > WHOLE_BYTES ? nbytes : 0;
}

// Ends an operation, which then belongs to the caller.
static void end(core_lane *lane, core_op *op, enum core_state state, unsigned who) {
    op->differs = who;
    atomic_fetch_sub_explicit(&lane->load, load_of(op), memory_order_relaxed);
    atomic_fetch_sub_explicit(&lane->busy, 1, memory_order_release);
    if (op->absent) {
        op->next = lane->idle;
        lane->idle = op;
        return;
    }
    bool watched = atomic_exchange_explicit(&op->state, state, memory_order_acq_rel) == CORE_WATCHED;
    lane->ended(lane->context, op);
    // After `ended`, whose result the woken thread reads. A wake-up at memory that was freed meanwhile has no effect.
    if (watched) core_word_wake(&op->state);
}

void core_op_wait(core_op *op, uint64_t nanoseconds) {
    uint32_t state = CORE_PENDING;
    if (atomic_compare_exchange_strong(&op->state, &state, CORE_WATCHED) || state == CORE_WATCHED)
        core_word_wait(&op->state, CORE_WATCHED, nanoseconds);
}

static void end_first(core_lane *lane, enum core_state state, unsigned who) {
    core_op *op = lane->first;
    lane->first = op->next;
    if (lane->first == NULL) lane->last = &lane->first;
    lane->portioned -= !op->whole;
    end(lane, op, state, who);
}

// Sets the first portion of the next operation, now that `op` has `rounds` portions.
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
    lane->spoke = true;
    atomic_store_explicit(&lane->mine->consumed, portions, memory_order_release);
    STOP(CONSUMED);
}

static void end_waiting(core_lane *lane) {
    while (lane->waiting != NULL) {
        core_op *op = lane->waiting;
        lane->waiting = op->next;
        if (lane->waiting == NULL) lane->waiting_last = &lane->waiting;
        end(lane, op, lane->abandoned, lane->culprit);
    }
}

// Ends the operations that this rank has stopped and has not posted.
static void withdraw(core_lane *lane) {
    for (core_op **at = &lane->waiting, *op; (op = *at) != NULL;) {
        if (op->absent || !is_stopped(lane, op->key)) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        if (lane->waiting_last == &op->next) lane->waiting_last = at;
        end(lane, op, CORE_STOPPED, lane->rank);
    }
}

static void abandon(core_lane *lane, enum core_state state, unsigned who) {
    lane->abandoned = state;
    lane->culprit = who;
    lane->spoke = lane->joined > 0;
    if (lane->joined > 0) atomic_store_explicit(&lane->mine->abandoned, 1, memory_order_release);
    while (lane->first != NULL) end_first(lane, state, who);
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
    op->way = 0;
    op->filled = op->reduced = op->taken = 0;
    atomic_store_explicit(&op->state, CORE_PENDING, memory_order_relaxed);
    atomic_fetch_add_explicit(&lane->load, load_of(op), memory_order_relaxed);
    atomic_fetch_add_explicit(&lane->busy, 1, memory_order_relaxed);
    op->next = atomic_load_explicit(&lane->inbox, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&lane->inbox, &op->next, op)) continue;
}

// Moves submitted operations from the inbox to the queue, in order.
static void take_in(core_lane *lane) {
    if (atomic_load_explicit(&lane->inbox, memory_order_relaxed) == NULL) return;
    core_op *newest = atomic_exchange_explicit(&lane->inbox, NULL, memory_order_acquire), *oldest = NULL;
    core_op **last = &newest->next;
    while (newest != NULL) {
        core_op *older = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = older;
    }
    *lane->waiting_last = oldest;
    lane->waiting_last = last;
    if (lane->stops > 0) withdraw(lane);
}

void core_lane_stop(core_lane *lane, uint64_t key) {
    while (!core_lane_hold(lane)) core_relax();  // at most for the duration of a step
    if (!is_stopped(lane, key)) lane->stopped[lane->stops++ % STOPPED_KEYS] = key >> CORE_KEY_BITS;
    take_in(lane);
    withdraw(lane);
    core_lane_release(lane);
}

// Advances the first operation.
static enum outcome step(core_lane *lane) {
    core_op *op = lane->first;
    unsigned who = lane->slowest;  // while this rank has no room to post one
    enum outcome outcome = WAITS;
    if (op == NULL) {
        if (lane->waiting == NULL) return WAITS;
        if (lane->led && lane->rank != 0) who = 0;
    } else if (op->way == UNMET) {
        outcome = meet(lane, op, &who);
        if (outcome == FAILED || outcome == STOPPED || outcome == UNLIKE) {
            settle(lane, op, 1);
            lane_consume(lane, op->base + 1);
            end_first(lane, outcome == FAILED ? CORE_DIFFERENT : outcome == UNLIKE ? CORE_UNLIKE : CORE_STOPPED, who);
            return MOVED;
        }
        if (outcome == ENDED) STOP(MET);
        if (outcome == ENDED) outcome = way_meet(lane, op, &who);
        if (outcome == MOVED) settle(lane, op, op->rounds);
    } else {
        outcome = way_step(lane, op, &who);
    }
    if (outcome == ENDED) {
        STOP(ENDING);
        lane_consume(lane, op->base + op->rounds);
        end_first(lane, CORE_DONE, lane->rank);
        return MOVED;
    }
    if (outcome == FAILED) {
        abandon(lane, CORE_BROKEN, who);
        return MOVED;
    }
    if (outcome == WAITS && !lane->wants && who != lane->rank &&
        atomic_load_explicit(&lane->peers[who].block->abandoned, memory_order_acquire)) {
        // That rank may have posted its entry before it abandoned the lane. So its entry is read once more first.
        if (lane->parting != lane->next_number + 1) {
            lane->parting = lane->next_number + 1;
            return MOVED;
        }
        abandon(lane, CORE_ABANDONED, who);
        return MOVED;
    }
    return outcome;
}

// Wakes the loops and the engines of the ranks that wait for a write to this block.
static void ring(core_lane *lane) {
    lane->spoke = false;
    atomic_thread_fence(memory_order_seq_cst);  // pairs with the fence of an engine that goes to sleep
    for (unsigned q = 0; q < lane->ranks; q++) {
        core_doorbell *doorbell = lane->peers[q].doorbell;
        if (doorbell == NULL) continue;
        if (atomic_load_explicit(&doorbell->loop_waits, memory_order_relaxed) && atomic_exchange(&doorbell->loop_waits, false))
            core_event_write(atomic_load_explicit(&lane->peers[q].memory->event, memory_order_relaxed));
        if (atomic_load_explicit(&doorbell->sleep, memory_order_relaxed) == CORE_LISTENS) core_doorbell_ring(doorbell);
    }
}

static bool advance(core_lane *lane, uint64_t nanoseconds) {
    bool moved = false;
    unsigned moves = 0;
    uint64_t until = 0;
    bool wanted = lane->wants;
    lane->wants = false;
    take_in(lane);
    if (lane->abandoned) end_waiting(lane);
    while (lane->joined == lane->ranks) {
        bool posted = post_waiting(lane), stepped = step(lane) == MOVED;
        if (!posted && !stepped) break;
        moved = true;
        if (lane->abandoned) end_waiting(lane);
        if (lane->first == NULL && lane->waiting == NULL) break;
        if (++moves < UNTIMED) continue;
        uint64_t time = core_now();
        if (until == 0) until = time + nanoseconds;
        if (time >= until) break;
    }
    if (lane->spoke) ring(lane);
    if (lane->wants && !wanted) lane->ended(lane->context, NULL);
    return moved;
}

uint64_t core_lane_driven_at(const core_lane *lane) {
    uint64_t driven_at = atomic_load_explicit(&lane->driven_at, memory_order_relaxed);
    return driven_at == 0 ? core_now() : driven_at;
}

bool core_lane_advance(core_lane *lane, uint64_t nanoseconds) {
    bool moved = lane_drive(lane, nanoseconds) == DROVE;
    if (core_lane_busy(lane)) atomic_store_explicit(&lane->driven_at, core_now(), memory_order_relaxed);
    return moved;
}

enum drive lane_drive(core_lane *lane, uint64_t nanoseconds) {
    enum drive drive = HELD;
    // A thread that submits while the lane is held leaves the operation to the holder, which checks after the release.
    while (core_lane_hold(lane)) {
        drive = advance(lane, nanoseconds) || drive == DROVE ? DROVE : STILL;
        core_lane_release(lane);
        if (atomic_load(&lane->inbox) == NULL) break;
    }
    return drive;
}

// Abandons the lane because of rank `who`, which may be this one.
static void give_up(core_lane *lane, unsigned who, bool lost) {
    while (!core_lane_hold(lane)) core_relax();  // at most for the duration of a step
    take_in(lane);
    lane->peers[who].lost = lane->peers[who].lost || lost;
    if (!lane->abandoned) abandon(lane, CORE_ABANDONED, who);
    end_waiting(lane);
    if (lane->spoke) ring(lane);
    core_lane_release(lane);
}

void core_lane_abandon(core_lane *lane) { give_up(lane, lane->rank, false); }

void lane_forget(core_lane *lane) {
    lane->joined = 0;
    lane->wants = false;
    core_lane_release(lane);  // the holder was a thread of the parent
}

void core_lane_lost(core_lane *lane, unsigned rank) { give_up(lane, rank, true); }
