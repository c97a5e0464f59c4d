// The algorithms of each kind of operation after the ranks have met. There are p ranks, and n elements.
//
// Short data are sent as a whole with the entries, and each rank does its part from there: the ranks meet once, and no
// rank waits afterwards. Longer data use one of these algorithms, which all ranks choose alike by their entries:
//
//     IN_PLACE  all ranks can access every rank's tensor: each rank works on its part of all tensors, in place.
//               An allreduce reads and writes 2n(p-1)/p elements a rank. The ranks meet again at the end.
//     DIRECT    for each portion, each rank copies a piece into its stage, and takes the needed parts of the others'
//               pieces from their stages.
//     HALVES    the same in two steps, for allreduce, and for reduce among more than two: each rank reduces its part of
//               the others' pieces, in place in their stages; then each takes the results from its own stage
//               (reduce-scatter and allgather: Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521).
//               n(p-1)/p read from other caches, and as much read back. A processor may move a line to the cache of its
//               reader, so results that are written where the data were read cost no second transfer of the lines: 29
//               instead of 43 us for 256 KiB on two ranks, compared with n copied and n taken by each.
//
// If an input has parts, a rank combines these in place of each copy. It takes its own data from its stage too, or
// combines its own part of an allreduce in its output. IN_PLACE each rank first combines its parts in its output, after
// the ranks have met, and fills a portion without bytes.
#include <string.h>

#include "doorbell.h"
#include "lane.h"

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

static unsigned itemsize(const core_op *op) { return core_itemsize(op->dtype); }

static bool reduces(const core_op *op) {
    return op->kind == CORE_ALLREDUCE || op->kind == CORE_REDUCE || op->kind == CORE_SCAN ||
           op->kind == CORE_REDUCE_SCATTER;
}

// Returns true for the reductions of parts. Combinations of 16-bit floats would be rounded twice.
static bool takes_parts(const core_op *op) {
    return (op->kind == CORE_ALLREDUCE || op->kind == CORE_REDUCE) && op->dtype != CORE_F16 && op->dtype != CORE_BF16;
}

bool core_op_valid(const core_op *op, unsigned ranks) {
    unsigned scale;
    bool cut = op->kind == CORE_REDUCE_SCATTER || op->kind == CORE_ALLGATHER || op->kind == CORE_ALLTOALL;
    return op->kind < CORE_KINDS && core_itemsize(op->dtype) > 0 && op->root < ranks &&
           (!cut || op->sent != NULL) && (op->kind != CORE_ALLTOALL || op->received != NULL) &&
           (!reduces(op) || core_kernel_for(op->dtype, op->reduction, &scale) != NULL) &&
           (op->levels == 0 || (op->levels <= CORE_MOST_LEVELS && op->parts != NULL && takes_parts(op)));
}

// --- sizes of the parts ------------------------------------------------------------------------------------------

static uint64_t largest(const uint64_t *counts, unsigned ranks) {
    uint64_t most = 0;
    for (unsigned q = 0; q < ranks; q++) most = counts[q] > most ? counts[q] : most;
    return most;
}

static uint64_t before(const uint64_t *counts, unsigned rank) {
    uint64_t sum = 0;
    for (unsigned q = 0; q < rank; q++) sum += counts[q];
    return sum;
}

// Returns the first element of part `part` of n elements in p parts.
static uint64_t cut(const core_lane *lane, uint64_t n, unsigned part) {
    return (uint64_t)((unsigned __int128)n * part / lane->ranks);
}

// Returns the number of elements of a rank's input.
static uint64_t brought(const core_op *op, unsigned rank) {
    return op->kind == CORE_BARRIER ? 0 : op->kind == CORE_ALLGATHER ? op->sent[rank] : op->count;
}

static bool in_halves(const core_lane *lane, const core_op *op) {
    return op->kind == CORE_ALLREDUCE || (op->kind == CORE_REDUCE && lane->ranks > 2);
}

// Returns true if a portion holds a piece for each rank, false if it holds one piece.
static bool has_parts(const core_lane *lane, const core_op *op) {
    return op->kind == CORE_REDUCE_SCATTER || op->kind == CORE_ALLTOALL || in_halves(lane, op);
}

static bool lends(const core_lane *lane, const core_op *op, unsigned rank) {
    switch (op->kind) {
        case CORE_BARRIER: return false;
        case CORE_BROADCAST: return rank == op->root;
        case CORE_REDUCE: return in_halves(lane, op) || rank != op->root || op->levels > 0;
        case CORE_SCAN: return rank + 1 < lane->ranks;
        default: return true;
    }
}

// Returns true if `rank`, which must be this rank, takes data of other ranks.
static bool takes(const core_op *op, unsigned rank) {
    switch (op->kind) {
        case CORE_BROADCAST: return rank != op->root;
        case CORE_REDUCE: return rank == op->root;
        case CORE_SCAN: return rank > 0 || op->in != op->out;
        default: return true;
    }
}

static uint64_t stride_of(const core_lane *lane, const core_op *op) {
    uint64_t longest = op->piece;
    if (op->kind == CORE_ALLTOALL) longest = least(longest, largest(op->sent, lane->ranks));
    return longest * itemsize(op);
}

// Returns the bytes of a portion; all ranks have stages of one size.
static uint64_t portion_bytes(const core_lane *lane) { return least(PORTION_BYTES, lane->stage_bytes / 4); }

bool way_prepare(const core_lane *lane, core_op *op) {
    uint64_t item = itemsize(op), portion = portion_bytes(lane);
    uint64_t longest = op->kind == CORE_ALLGATHER ? largest(op->sent, lane->ranks) : brought(op, lane->rank);
    op->whole = op->kind != CORE_ALLTOALL && (longest * item <= SHORT_BYTES || longest * item <= least(portion, WHOLE_BYTES));
    op->rounds = 1;
    if (op->whole) return true;
    op->piece = portion / item;
    if (has_parts(lane, op)) {
        op->piece /= lane->ranks;
        uint64_t line = LINE / item;
        if (op->piece > line) op->piece -= op->piece % line;
        longest = in_halves(lane, op) ? up(op->count, lane->ranks) : largest(op->sent, lane->ranks);
    }
    if (longest > op->piece) op->rounds = up(longest, op->piece);
    return false;
}

bool way_posts(const core_op *op) { return op->whole || (op->kind == CORE_ALLTOALL && op->rounds == 1); }

uint64_t way_posted_bytes(const core_lane *lane, const core_op *op) {
    if (op->kind == CORE_ALLTOALL) return way_posts(op) ? stride_of(lane, op) * lane->ranks : 0;
    return op->whole && lends(lane, op, lane->rank) ? brought(op, lane->rank) * itemsize(op) : 0;
}

// Writes the combination of the parts' elements [first, first + n).
static void combine(const core_op *op, uint8_t *to, uint64_t first, uint64_t n) {
    const void *from[1 << CORE_MOST_LEVELS];
    void *target = to;
    unsigned count = 1u << op->levels, scale;
    for (unsigned i = 0; i < count; i++) from[i] = (const uint8_t *)op->parts[i] + first * itemsize(op);
    core_kernel_for(op->dtype, op->reduction, &scale)(&target, 1, from, (int)count, n * scale, 1, false);
}

void way_post(const core_lane *lane, const core_op *op, struct entry *entry, uint8_t *to) {
    uint64_t item = itemsize(op), stride = stride_of(lane, op);
    if (op->levels > 0) {
        combine(op, to, 0, op->count);
        return;
    }
    if (op->kind != CORE_ALLTOALL) {
        memcpy(to, op->in, brought(op, lane->rank) * item);
        return;
    }
    entry->stride = stride;
    const uint8_t *from = op->in;
    for (unsigned q = 0; q < lane->ranks; q++) {
        memcpy(to + q * stride, from, op->sent[q] * item);
        from += op->sent[q] * item;
    }
}

// --- data of others ----------------------------------------------------------------------------------------------

// Reads a word that another rank may change at any time: once, so that the checked value is the used value.
#define ONCE(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)

// Kernels need elements at multiples of their size, or of 8 bytes.
static bool aligned(const core_op *op, const uint8_t *at) { return (uintptr_t)at % least(itemsize(op), 8) == 0; }

// Finds `nbytes` at `offset` of the data that rank `q`, which may be this one, lends in portion `j` of `op`.
static enum found lent(core_lane *lane, const core_op *op, unsigned q, uint64_t j, uint64_t offset, uint64_t nbytes,
                       const uint8_t **at) {
    const struct entry *entry = entry_of(lane, q, op);
    uint32_t form = ONCE(entry->form);
    uint64_t place = 0, length = portion_bytes(lane);
    if (form == TINY || form == SHORT) {
        length = form == TINY ? TINY_BYTES : SHORT_BYTES;
        *at = form == TINY ? entry->tiny : entry->bytes;
    } else {
        enum found found = FOUND;
        if (q == lane->rank) *at = lane->stage;
        else found = lane_find(lane, q, entry->stage, lane->stage_bytes, at);
        if (found != FOUND) return found;
        if (form == STAGED) length = ONCE(entry->nbytes);
        place = form == STAGED ? ONCE(entry->at) : ONCE(lane->peers[q].block->places[(op->base + j) % PLACES]);
        if (place > lane->stage_bytes || length > lane->stage_bytes - place) return OUTSIDE;
    }
    if (offset > length || nbytes > length - offset) return OUTSIDE;
    *at += place + offset;
    return aligned(op, *at) ? FOUND : OUTSIDE;
}

static enum outcome lack(enum found found) { return found == UNMAPPED ? WAITS : FAILED; }

// Writes the reduction of lane->sources[0 .. nins - 1] to lane->targets[0 .. nouts - 1].
static void reduce(core_lane *lane, const core_op *op, unsigned nouts, unsigned nins, uint64_t n, unsigned ranks) {
    unsigned scale;
    core_kernel *kernel = core_kernel_for(op->dtype, op->reduction, &scale);
    int divisor = op->reduction == CORE_MEAN ? (int)(ranks << op->levels) : 1;
    kernel(lane->targets, (int)nouts, lane->sources, (int)nins, n * scale, divisor, op->kind == CORE_SCAN);
}

// Copies a slice of a result, past the caches if the result is larger than the caches.
static void copy(const core_op *op, uint8_t *to, const uint8_t *from, uint64_t nbytes) {
    if (to == from || nbytes == 0) return;
    bool apart = to + nbytes <= from || from + nbytes <= to;
    if (apart && op->count * itemsize(op) >= PAST_BYTES) core_stream(to, from, nbytes);
    else memmove(to, from, nbytes);
}

// Copies or reduces elements [first, last) of the parts that the ranks lend in portion `j`, into this rank's output.
static enum outcome take(core_lane *lane, core_op *op, uint64_t j, uint64_t first, uint64_t last, unsigned *who) {
    uint64_t item = itemsize(op);
    unsigned me = lane->rank;
    uint8_t *out = op->out;
    const uint8_t *in = op->in;
    for (unsigned q = 0; q < lane->ranks; q++) {
        uint64_t stop = least(last, op->count), offset = 0;
        const uint8_t *at = in + first * item;  // this rank's own data, which are not lent
        switch (op->kind) {
            case CORE_REDUCE_SCATTER:
                stop = least(last, op->sent[me]);
                offset = op->whole ? before(op->sent, me) * item : me * stride_of(lane, op);
                at = in + (before(op->sent, me) + first) * item;
                break;
            case CORE_ALLGATHER:
                stop = least(last, op->sent[q]);
                break;
            case CORE_ALLTOALL:
                stop = least(last, op->received[q]);
                offset = me * (entry_of(lane, q, op)->form == LARGE ? op->piece * item : entry_of(lane, q, op)->stride);
                at = in + (before(op->sent, me) + first) * item;
                break;
            default: break;
        }
        uint64_t n = stop > first ? stop - first : 0;
        if ((q != me || op->levels > 0) && lends(lane, op, q) && n > 0) {
            *who = q;
            enum found found = lent(lane, op, q, j, offset, n * item, &at);
            if (found != FOUND) return lack(found);
        }
        lane->sources[q] = at;
        if (n == 0) continue;
        if (op->kind == CORE_ALLGATHER) copy(op, out + (before(op->sent, q) + first) * item, at, n * item);
        if (op->kind == CORE_ALLTOALL) copy(op, out + (before(op->received, q) + first) * item, at, n * item);
        if (op->kind == CORE_BROADCAST && q == op->root) copy(op, out + first * item, at, n * item);
    }
    lane->targets[0] = out + first * item;
    uint64_t stop = least(last, op->kind == CORE_REDUCE_SCATTER ? op->sent[me] : op->count);
    uint64_t n = stop > first ? stop - first : 0;
    if (op->kind == CORE_SCAN) reduce(lane, op, 1, me + 1, n, me + 1);
    else if (reduces(op)) reduce(lane, op, 1, lane->ranks, n, lane->ranks);
    return MOVED;
}

// --- meeting -----------------------------------------------------------------------------------------------------

static bool all_reach(core_lane *lane, const core_op *op) {
    if (op->kind == CORE_ALLTOALL) return false;  // the offset of a block in another rank's tensor is unknown
    for (unsigned q = 0; q < lane->ranks; q++)
        if (entry_of(lane, q, op)->window.segment == CORE_NOWHERE) return false;
    return true;
}

static enum outcome find_windows(core_lane *lane, core_op *op, unsigned *who) {
    for (unsigned q = 0; q < lane->ranks; q++) {
        lane->windows[q] = op->levels > 0 ? op->out : op->in;
        if (q == lane->rank) continue;
        *who = q;
        enum found found = lane_find(lane, q, entry_of(lane, q, op)->window, brought(op, q) * itemsize(op), &lane->windows[q]);
        if (found != FOUND) return lack(found);
        if (!aligned(op, lane->windows[q])) return FAILED;
    }
    return MOVED;
}

enum outcome way_meet(core_lane *lane, core_op *op, unsigned *who) {
    if (op->kind == CORE_BARRIER || (op->count == 0 && op->kind != CORE_ALLTOALL)) return ENDED;
    if (op->whole) {
        if (!takes(op, lane->rank)) return ENDED;
        uint64_t longest = op->kind == CORE_ALLGATHER ? largest(op->sent, lane->ranks) : op->count;
        enum outcome outcome = take(lane, op, 0, 0, longest, who);
        return outcome == MOVED ? ENDED : outcome;
    }
    if (all_reach(lane, op)) {
        enum outcome outcome = find_windows(lane, op, who);
        if (outcome != MOVED) return outcome;
        op->way = IN_PLACE;
        op->rounds = 1;
        op->taken = 0;
        return MOVED;
    }
    op->way = in_halves(lane, op) ? HALVES : DIRECT;
    if (op->kind == CORE_ALLTOALL) {
        if (entry_of(lane, lane->rank, op)->form != LARGE) op->filled = 1;
        for (unsigned q = 0; q < lane->ranks; q++) {
            uint64_t rounds = ONCE(entry_of(lane, q, op)->rounds);
            *who = q;
            if (rounds > MOST_ROUNDS) return FAILED;
            if (rounds > op->rounds) op->rounds = rounds;
        }
    }
    return MOVED;
}

// --- rounds ------------------------------------------------------------------------------------------------------

// Returns true if all lending ranks have filled portion `j` of `op`; with `reduced`, if they have reduced it.
static bool reached(core_lane *lane, const core_op *op, bool reduced, uint64_t j, unsigned *who) {
    for (unsigned q = 0; q < lane->ranks; q++) {
        if (q == lane->rank || !lends(lane, op, q)) continue;
        if (op->kind == CORE_ALLTOALL && (j >= entry_of(lane, q, op)->rounds || entry_of(lane, q, op)->form != LARGE))
            continue;
        struct block *block = lane->peers[q].block;
        _Atomic uint64_t *word = reduced ? &block->reduced : &block->filled;
        if (atomic_load_explicit(word, memory_order_acquire) <= op->base + j) {
            *who = q;
            return false;
        }
    }
    return true;
}

static bool far(const core_lane *lane) { return lane->slow > 1 && lane->streamed < STREAMED; }

// Copies into the stage. If the caches of the reading ranks are far, as in another socket or another complex of cores,
// plain stores wait until these caches have released each line: 2 GB/s were seen, and 10 GB/s with near caches. Stores
// past all caches are then faster; with near caches they are slower. Threads move, so the speed is measured repeatedly;
// another process may be the cause of one slow store.
static void put(core_lane *lane, uint8_t *to, const uint8_t *from, uint64_t nbytes) {
    if (nbytes < TIMED_BYTES) {
        memcpy(to, from, nbytes);
    } else if (far(lane)) {
        lane->streamed++;
        core_stream(to, from, nbytes);
    } else {
        uint64_t begin = core_now();
        memcpy(to, from, nbytes);
        bool slow = (core_now() - begin) * NEAR_BYTES_PER_US > nbytes * 1000;
        lane->slow = slow ? lane->slow + 1 : 0;
        lane->streamed = 0;
    }
}

// As `put`, for the combination of the parts' elements [first, first + n).
static void put_parts(core_lane *lane, const core_op *op, uint8_t *to, uint64_t first, uint64_t n) {
    _Alignas(64) uint8_t block[TIMED_BYTES];
    uint64_t item = itemsize(op), most = sizeof block / item;
    for (uint64_t at = 0; at < n; at += most) {
        uint64_t count = least(most, n - at);
        combine(op, block, first + at, count);
        put(lane, to + at * item, block, count * item);
    }
}

// Returns true if this rank's own piece of its parts is in its stage too. An allreduce combines the piece in its output.
static bool keeps_own(const core_op *op) { return op->levels > 0 && op->kind != CORE_ALLREDUCE; }

// Copies the pieces of portion `j` that ranks take from the stage; false if there is no room.
static bool fill(core_lane *lane, core_op *op, uint64_t j) {
    uint64_t item = itemsize(op), stride = op->piece * item, first = j * op->piece;
    bool parts = has_parts(lane, op);
    int64_t at = lane_lend(lane, op->base + j, portion_bytes(lane));
    if (at < 0) return false;
    uint8_t *to = lane->stage + at;
    const uint8_t *in = op->in;
    for (unsigned q = 0; q < (parts ? lane->ranks : 1); q++) {
        uint64_t begin = 0, n = brought(op, lane->rank);
        if (parts && q == lane->rank && !keeps_own(op)) continue;
        if (in_halves(lane, op)) {
            begin = cut(lane, op->count, q);
            n = cut(lane, op->count, q + 1) - begin;
        } else if (parts) {
            begin = before(op->sent, q);
            n = op->sent[q];
        }
        uint64_t last = least(first + op->piece, n);
        if (last <= first) continue;
        if (op->levels > 0) put_parts(lane, op, to + q * stride, begin + first, last - first);
        else put(lane, to + q * stride, in + (begin + first) * item, (last - first) * item);
        lane_count(lane, (last - first) * item);
    }
    STOP(FILLING);
    lane->spoke = true;
    atomic_store_explicit(&lane->mine->filled, op->base + j + 1, memory_order_release);
    STOP(FILLED);
    return true;
}

void way_begin(core_lane *lane, core_op *op) {
    bool private = op->in_at.segment == CORE_NOWHERE;  // else the operation may run in place
    if (private && op->kind != CORE_ALLTOALL && lends(lane, op, lane->rank)) op->filled = fill(lane, op, 0);
}

// Reduces this rank's part of portion `j`, into its tensor and into the stages that the part came from.
static enum outcome reduce_part(core_lane *lane, core_op *op, uint64_t j, unsigned *who) {
    uint64_t item = itemsize(op), me = lane->rank, first = j * op->piece;
    uint64_t begin = cut(lane, op->count, lane->rank), n = cut(lane, op->count, lane->rank + 1) - begin;
    uint64_t last = least(first + op->piece, n);
    if (last > first) {
        uint8_t *mine = (uint8_t *)op->out + (begin + first) * item;
        bool combines = op->levels > 0 && op->kind == CORE_ALLREDUCE;
        for (unsigned q = 0; q < lane->ranks; q++) {
            const uint8_t *at = (const uint8_t *)op->in + (begin + first) * item;
            if (q == me && combines) {
                at = mine;
            } else if (q != me || keeps_own(op)) {
                *who = q;
                enum found found = lent(lane, op, q, j, me * op->piece * item, (last - first) * item, &at);
                if (found != FOUND) return lack(found);
            }
            lane->sources[q] = at;
        }
        if (combines) combine(op, mine, begin + first, last - first);  // once: a step that lacks data is repeated
        unsigned targets = 0;
        for (unsigned q = 0; q < lane->ranks; q++)
            if (op->kind == CORE_ALLREDUCE || q == op->root)
                lane->targets[targets++] = q == me ? mine : (void *)lane->sources[q];
        reduce(lane, op, targets, lane->ranks, last - first, lane->ranks);
    }
    STOP(REDUCING);
    lane->spoke = true;
    atomic_store_explicit(&lane->mine->reduced, op->base + j + 1, memory_order_release);
    STOP(REDUCED);
    return MOVED;
}

// Takes the other ranks' results of portion `j`, which are in this rank's stage.
static void take_results(core_lane *lane, core_op *op, uint64_t j) {
    uint64_t item = itemsize(op), first = j * op->piece;
    const uint8_t *at = lane->stage + lane->places[(op->base + j) % PLACES];
    for (unsigned q = 0; q < lane->ranks; q++) {
        uint64_t begin = cut(lane, op->count, q), n = cut(lane, op->count, q + 1) - begin;
        uint64_t last = least(first + op->piece, n);
        if (q == lane->rank || last <= first) continue;
        memcpy((uint8_t *)op->out + (begin + first) * item, at + q * op->piece * item, (last - first) * item);
    }
}

static enum outcome step_in_portions(core_lane *lane, core_op *op, unsigned *who) {
    bool halves = op->way == HALVES;
    unsigned me = lane->rank;
    *who = lane->slowest;  // if there is no room to fill
    uint64_t to_fill = !lends(lane, op, me) ? 0 : op->kind == CORE_ALLTOALL ? entry_of(lane, me, op)->rounds : op->rounds;
    if (op->filled < to_fill && op->filled < op->taken + AHEAD && fill(lane, op, op->filled)) {
        op->filled++;
        return MOVED;
    }
    if (halves && op->reduced < op->filled && reached(lane, op, false, op->reduced, who)) {
        enum outcome outcome = reduce_part(lane, op, op->reduced, who);
        if (outcome == MOVED) op->reduced++;
        return outcome;
    }
    // The taken data overwrite this rank's own part, which must be in the stage by then.
    uint64_t may_take = halves ? op->reduced : op->filled < to_fill ? op->filled : op->rounds;
    if (op->taken < may_take && (!takes(op, me) || reached(lane, op, halves, op->taken, who))) {
        enum outcome outcome = MOVED;
        uint64_t first = op->taken * op->piece;
        if (takes(op, me)) {
            if (halves) take_results(lane, op, op->taken);
            else outcome = take(lane, op, op->taken, first, first + op->piece, who);
        }
        if (outcome != MOVED) return outcome;
        STOP(TAKEN);
        op->taken++;
        lane_consume(lane, op->base + op->taken);
        return MOVED;
    }
    return op->taken == op->rounds && op->filled == to_fill ? ENDED : WAITS;
}

// Works on this rank's part of all tensors, [first, last).
static void work_in_place(core_lane *lane, core_op *op, uint64_t first, uint64_t last) {
    uint64_t item = itemsize(op), n = last - first;
    unsigned me = lane->rank;
    switch (op->kind) {
        case CORE_ALLREDUCE:
        case CORE_REDUCE:
            for (unsigned q = 0; q < lane->ranks; q++) {
                lane->sources[q] = lane->windows[q] + first * item;
                lane->targets[q] = (void *)lane->sources[q];
            }
            if (op->kind == CORE_REDUCE) lane->targets[0] = lane->targets[op->root];
            reduce(lane, op, op->kind == CORE_REDUCE ? 1 : lane->ranks, lane->ranks, n, lane->ranks);
            break;
        case CORE_SCAN:  // from the last rank on, since the results of later ranks need the inputs of earlier ones
            for (unsigned q = 0; q < lane->ranks; q++) lane->sources[q] = lane->windows[q] + first * item;
            for (unsigned q = lane->ranks; q-- > 1;) {
                lane->targets[0] = (void *)lane->sources[q];
                reduce(lane, op, 1, q + 1, n, q + 1);
            }
            break;
        case CORE_BROADCAST:
            for (unsigned q = 0; q < lane->ranks; q++)
                copy(op, (uint8_t *)lane->windows[q] + first * item, lane->windows[op->root] + first * item, n * item);
            break;
        case CORE_REDUCE_SCATTER: {
            uint64_t begin = before(op->sent, me);
            for (unsigned q = 0; q < lane->ranks; q++) lane->sources[q] = lane->windows[q] + (begin + first) * item;
            lane->targets[0] = (uint8_t *)op->out + first * item;
            reduce(lane, op, 1, lane->ranks, n, lane->ranks);
            break;
        }
        case CORE_ALLGATHER:
            for (unsigned q = 0; q < lane->ranks; q++) {
                uint64_t stop = least(last, op->sent[q]);
                if (stop > first)
                    copy(op, (uint8_t *)op->out + (before(op->sent, q) + first) * item, lane->windows[q] + first * item,
                         (stop - first) * item);
            }
            break;
    }
}

static enum outcome step_in_place(core_lane *lane, core_op *op, unsigned *who) {
    uint64_t first = 0, last = op->kind == CORE_ALLGATHER ? largest(op->sent, lane->ranks) : 0;
    if (op->kind == CORE_REDUCE_SCATTER) {
        last = op->sent[lane->rank];
    } else if (op->kind != CORE_ALLGATHER) {
        first = cut(lane, op->count, lane->rank);
        last = cut(lane, op->count, lane->rank + 1);
    }
    if (op->levels > 0 && op->filled == 0) {
        uint64_t n = least(op->count - op->taken, SLICE_BYTES / itemsize(op));
        combine(op, (uint8_t *)op->out + op->taken * itemsize(op), op->taken, n);
        op->taken += n;
        if (op->taken < op->count) return MOVED;
        op->taken = 0;
        op->filled = 1;
        STOP(FILLING);
        lane->spoke = true;
        atomic_store_explicit(&lane->mine->filled, op->base + 1, memory_order_release);
        STOP(FILLED);
        return MOVED;
    }
    if (op->levels > 0 && op->reduced == 0 && !reached(lane, op, false, 0, who)) return WAITS;
    if (op->reduced == 0) {
        first += op->taken;
        uint64_t n = least(last - first, SLICE_BYTES / itemsize(op));
        if (n > 0) work_in_place(lane, op, first, first + n);
        STOP(WORKED);
        op->taken += n;
        if (first + n == last) {
            op->reduced = 1;
            lane_consume(lane, op->base + 1);  // this rank no longer needs the others' tensors
        }
        return MOVED;
    }
    for (unsigned q = 0; q < lane->ranks; q++) {
        if (q == lane->rank) continue;
        if (atomic_load_explicit(&lane->peers[q].block->consumed, memory_order_acquire) <= op->base) {
            *who = q;
            return WAITS;
        }
    }
    return ENDED;
}

enum outcome way_step(core_lane *lane, core_op *op, unsigned *who) {
    return op->way == IN_PLACE ? step_in_place(lane, op, who) : step_in_portions(lane, op, who);
}
