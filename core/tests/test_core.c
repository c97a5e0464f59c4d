// Random operations among threads that stand for ranks, compared with the results that one thread computes.
//
//     test_core [seed [operations]]
//
// In a second round of each, one rank abandons the lane at some point: every operation of every rank still ends. If the
// first rank chooses the order, ranks stop operations and notify the others.
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../core.h"
#include "../kernels.h"

enum { MOST_RANKS = 32, SEGMENT_BYTES = 24 << 20, STAGE_BYTES = 1 << 20, TENSOR_BYTES = 3 << 20, IN_FLIGHT = 40 };

typedef struct {
    uint8_t *segment;
    core_memory *memory;
    core_lane *lane;
    core_engine *engine;
    core_doorbell *doorbell;
} rank_t;

typedef struct {
    uint32_t kind, dtype, reduction, root;
    uint64_t count, sent[MOST_RANKS][MOST_RANKS], received[MOST_RANKS][MOST_RANKS];
    uint64_t seed;
    int windows;  // 0 none, 1 all, 2 some
    int differs;  // the rank that brings another fingerprint, or -1
    int stopper;  // the rank that stops it where the lane is led, or -1
    int unlike;   // the rank that only compares, or brings another `like` or number of parts, or -1
    uint8_t levels;  // each rank brings 2^levels parts
    _Atomic bool stopped;        // true if all ranks are notified
    _Atomic unsigned done, not;  // on how many ranks it was done, and was not
} spec_t;

static unsigned ranks;
static rank_t rank[MOST_RANKS];
static spec_t *specs;
static unsigned operations, all_operations;
static unsigned leaver, leaves_after;  // the rank that abandons the lane, and the number of operations before
static bool led;      // the first rank chooses the order, the others submit in any
static _Atomic unsigned finished;  // ranks: those that stopped something drive on until all have
static bool engines;  // threads of their own drive the lanes, and the ranks mostly wait

static uint64_t next(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static const uint32_t DTYPES[] = {CORE_F32, CORE_F64, CORE_I32, CORE_U8, CORE_BF16, CORE_F16, CORE_I64};

// Small whole numbers: sums of them are exact in every dtype.
static void store(uint8_t *at, uint32_t dtype, uint64_t i, int value) {
    switch (dtype) {
        case CORE_F32: ((float *)at)[i] = (float)value; break;
        case CORE_F64: ((double *)at)[i] = value; break;
        case CORE_I32: ((int32_t *)at)[i] = value; break;
        case CORE_I64: ((int64_t *)at)[i] = value; break;
        case CORE_U8: at[i] = (uint8_t)value; break;
        case CORE_F16: ((_Float16 *)at)[i] = (_Float16)value; break;
        case CORE_BF16: {
            float x = (float)value;
            uint32_t bits;
            memcpy(&bits, &x, 4);
            ((uint16_t *)at)[i] = (uint16_t)(bits >> 16);
            break;
        }
    }
}

static double load(const uint8_t *at, uint32_t dtype, uint64_t i) {
    switch (dtype) {
        case CORE_F32: return ((float *)at)[i];
        case CORE_F64: return ((double *)at)[i];
        case CORE_I32: return ((int32_t *)at)[i];
        case CORE_I64: return (double)((int64_t *)at)[i];
        case CORE_U8: return at[i];
        case CORE_F16: return (double)((_Float16 *)at)[i];
        default: {
            uint32_t bits = (uint32_t)((uint16_t *)at)[i] << 16;
            float x;
            memcpy(&x, &bits, 4);
            return x;
        }
    }
}

// Returns element `i` of rank `r`, or of part `r` of all ranks.
static int value_of(const spec_t *spec, unsigned r, uint64_t i) {
    uint64_t state = spec->seed + r * 0x1000003 + i * 7919;
    return (int)(next(&state) % 7);
}

static double reduced(const spec_t *spec, unsigned among, uint64_t i) {
    double total = value_of(spec, 0, i);
    for (unsigned q = 1; q < among; q++) {
        double x = value_of(spec, q, i);
        if (spec->reduction == CORE_MIN) total = x < total ? x : total;
        else if (spec->reduction == CORE_MAX) total = x > total ? x : total;
        else total += x;
    }
    return spec->reduction == CORE_MEAN ? (double)(float)(total / among) : total;
}

static void make_specs(uint64_t seed) {
    for (unsigned k = 0; k < operations; k++) {
        spec_t *s = &specs[k];
        s->kind = (uint32_t)(next(&seed) % CORE_KINDS);
        s->dtype = DTYPES[next(&seed) % (sizeof DTYPES / sizeof *DTYPES)];
        static const uint32_t ops[] = {CORE_SUM, CORE_MIN, CORE_MAX, CORE_MEAN};
        s->reduction = ops[next(&seed) % (s->dtype == CORE_F32 || s->dtype == CORE_F64 ? 4 : 3)];
        s->root = (uint32_t)(next(&seed) % ranks);
        static const uint64_t sizes[] = {1, 3, 7, 40, 100, 1000, 9000, 70000, 300000};
        uint64_t most = sizes[next(&seed) % (sizeof sizes / sizeof *sizes)];
        while (most * core_itemsize(s->dtype) > TENSOR_BYTES) most /= 2;
        s->count = next(&seed) % (most + 1);
        s->windows = (int)(next(&seed) % 3);
        bool parted = (s->kind == CORE_ALLREDUCE || s->kind == CORE_REDUCE) && s->dtype != CORE_F16 && s->dtype != CORE_BF16;
        s->levels = parted ? (uint8_t)(next(&seed) % 4) : 0;
        while (ranks << s->levels > MOST_RANKS) s->levels--;  // sums of bytes do not wrap
        s->differs = next(&seed) % 29 == 0 && ranks > 1 ? (int)(next(&seed) % ranks) : -1;
        s->stopper = next(&seed) % 13 == 0 ? (int)(next(&seed) % ranks) : -1;
        s->unlike = next(&seed) % 17 == 0 && ranks > 1 && s->kind != CORE_BARRIER ? (int)(next(&seed) % ranks) : -1;
        s->seed = next(&seed);
        for (unsigned r = 0; r < ranks; r++) {
            uint64_t left = s->count;
            for (unsigned q = 0; q < ranks; q++) {
                // All ranks know the counts of a reduce_scatter and an allgather; the counts of an alltoall differ.
                uint64_t part = s->kind == CORE_ALLTOALL ? next(&seed) % (s->count / ranks + 1)
                                : r > 0                  ? s->sent[0][q]
                                : q + 1 < ranks          ? next(&seed) % (left + 1)
                                                         : left;
                left -= part <= left ? part : left;
                s->sent[r][q] = part;
            }
        }
        for (unsigned r = 0; r < ranks; r++)
            for (unsigned q = 0; q < ranks; q++) s->received[r][q] = s->sent[q][r];
    }
}

typedef struct {
    core_op op;
    unsigned number;
    uint8_t *in, *out;
    uint8_t *also[7];  // the other parts, if there are several
    const void *parts[8];
    bool window;
    bool heard;  // that it was stopped
} flight_t;

#define EXPECT(condition, ...)                                                                       \
    if (!(condition)) {                                                                              \
        fprintf(stderr, "rank %u of %u, operation %u (kind %u dtype %u op %u count %llu windows %d): ", me, ranks, \
                f->number, s->kind, s->dtype, s->reduction, (unsigned long long)s->count, s->windows); \
        fprintf(stderr, __VA_ARGS__);                                                                \
        fprintf(stderr, "\n");                                                                       \
        abort();                                                                                     \
    }

static void begin(unsigned me, flight_t *f, unsigned slot, unsigned number) {
    const spec_t *s = &specs[number];
    unsigned item = core_itemsize(s->dtype);
    f->number = number;
    f->heard = false;
    uint64_t brought = s->kind == CORE_ALLGATHER ? s->sent[0][me] : s->count, gives = s->count;
    if (s->kind == CORE_ALLTOALL) {
        brought = gives = 0;
        for (unsigned q = 0; q < ranks; q++) brought += s->sent[me][q], gives += s->received[me][q];
    }
    f->window = s->windows == 1 || (s->windows == 2 && (me + number) % 2);
    uint64_t at = 2 << 20;
    at += (uint64_t)(slot % 6) * TENSOR_BYTES;  // of the six newest: those that may be in a window
    f->in = f->window && slot < 6 ? rank[me].segment + at : malloc(brought * item + 16);
    f->window = f->window && slot < 6;
    bool in_place = s->kind == CORE_ALLREDUCE || s->kind == CORE_REDUCE || s->kind == CORE_SCAN || s->kind == CORE_BROADCAST;
    // A reduction may leave its input unchanged; then no other rank knows the place of the input.
    bool apart = !f->window && s->seed % 3 == 0 && (s->kind == CORE_ALLREDUCE || s->kind == CORE_SCAN || (s->kind == CORE_REDUCE && s->root == me));
    unsigned parts = 1u << s->levels;
    for (unsigned p = 0; p < parts; p++) {
        uint8_t *part = p == 0 ? f->in : (f->also[p - 1] = malloc(brought * item + 16));
        for (uint64_t i = 0; i < brought; i++) store(part, s->dtype, i, value_of(s, (me << s->levels) + p, i));
        f->parts[p] = part;
    }
    f->out = in_place && !apart ? f->in : malloc(gives * item + 16);
    if (apart) memcpy(f->out, f->in, brought * item);
    f->op = (core_op){
        .kind = (uint8_t)s->kind, .dtype = (uint8_t)s->dtype, .reduction = (uint8_t)s->reduction, .root = s->root,
        .print = s->seed ^ (s->differs == (int)me), .in = f->in, .out = f->out,
        .count = s->kind == CORE_ALLTOALL ? brought : s->count, .sent = s->sent[me], .received = s->received[me],
        .key = (uint64_t)number << CORE_KEY_BITS | s->seed % (1 << CORE_KEY_BITS), .in_at = {f->window ? 0 : CORE_NOWHERE, f->window ? at : 0},
        .parts = f->parts, .levels = s->levels,
    };
    if (s->kind == CORE_REDUCE && s->levels > 0) f->op.in_at.segment = CORE_NOWHERE;
    if (s->unlike == (int)me) {
        if (s->kind == CORE_ALLGATHER && s->seed % 2) f->op.like = 1;
        else if (s->levels > 0 && s->seed % 2) f->op.levels--;
        else f->op.kind = CORE_BARRIER, f->op.levels = 0;
    }
    if (!core_op_valid(&f->op, ranks)) abort();
}

// Stops the operation, and notifies the others, which stop it too.
static void stop(unsigned me, flight_t *f) {
    if (f->heard) return;
    f->heard = true;
    core_lane_stop(rank[me].lane, f->op.key);
    core_lane_advance(rank[me].lane, 1000);
    atomic_store(&specs[f->number].stopped, true);
}

static void submit(unsigned me, flight_t *f, uint64_t *state) {
    bool stops = led && specs[f->number].stopper == (int)me;
    if (stops && next(state) % 3) {
        atomic_store(&f->op.state, CORE_STOPPED);
        stop(me, f);
        if (next(state) % 2) return;  // else it is submitted all the same
    }
    core_lane_submit(rank[me].lane, &f->op);
    if (stops) stop(me, f);
    if (engines) core_engine_notice(rank[me].engine, rank[me].lane, next(state) % 3 == 0);
    core_lane_advance(rank[me].lane, 1000);
}

// Begins operations [begun, end), and submits them.
static void begin_some(unsigned me, flight_t *flights, unsigned begun, unsigned end, uint64_t *state) {
    unsigned order[IN_FLIGHT], n = end - begun;
    for (unsigned i = 0; i < n; i++) {
        order[i] = begun + i;
        begin(me, &flights[(begun + i) % IN_FLIGHT], (begun + i) % IN_FLIGHT, begun + i);
    }
    for (unsigned i = n; led && me > 0 && i-- > 1;) {
        unsigned j = (unsigned)(next(state) % (i + 1)), swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
    }
    for (unsigned i = 0; i < n; i++) submit(me, &flights[order[i] % IN_FLIGHT], state);
}

static void let_go(flight_t *f) {
    for (unsigned p = 1; p < 1u << specs[f->number].levels; p++) free(f->also[p - 1]);
    if (f->out != f->in) free(f->out);
    if (!f->window) free(f->in);
}

// Returns false if the lane was abandoned.
static bool check(unsigned me, flight_t *f) {
    spec_t *s = &specs[f->number];
    bool stopped = core_op_state(&f->op) == CORE_STOPPED, differ = s->differs >= 0 || s->unlike >= 0 || stopped;
    if (leaver < ranks && core_op_state(&f->op) == CORE_ABANDONED) {
        EXPECT(f->op.differs < ranks, "rank %u has left", f->op.differs);
        let_go(f);
        return false;
    }
    EXPECT(!stopped || (led && s->stopper >= 0), "stopped by nobody");
    if (s->unlike < 0) atomic_fetch_add(core_op_state(&f->op) == CORE_DONE ? &s->done : &s->not, 1);
    EXPECT(s->done == 0 || s->not == 0, "done by %u ranks, and by %u not", s->done, s->not);
    uint32_t state = stopped ? CORE_STOPPED : s->differs >= 0 ? CORE_DIFFERENT : CORE_DONE;
    if (state == CORE_DONE && s->unlike >= 0 && f->op.kind != CORE_BARRIER) state = CORE_UNLIKE;
    EXPECT(core_op_state(&f->op) == state, "state %u, expected %u", core_op_state(&f->op), state);
    uint64_t begin = 0;
    for (unsigned q = 0; q < ranks && !differ; q++) {
        uint64_t n = s->kind == CORE_ALLTOALL ? s->received[me][q] : s->kind == CORE_ALLGATHER ? s->sent[0][q] : 0;
        uint64_t from = 0;
        for (unsigned r = 0; s->kind == CORE_ALLTOALL && r < me; r++) from += s->sent[q][r];
        for (uint64_t i = 0; i < n; i++) {
            double seen = load(f->out, s->dtype, begin + i), wanted = value_of(s, q, from + i);
            EXPECT(seen == wanted, "block %u element %llu is %g, expected %g", q, (unsigned long long)i, seen, wanted);
        }
        begin += n;
    }
    uint64_t n = 0, offset = 0;
    unsigned among = ranks;
    if (s->kind == CORE_ALLREDUCE || s->kind == CORE_SCAN || s->kind == CORE_BROADCAST || s->kind == CORE_REDUCE) n = s->count;
    if (s->kind == CORE_SCAN) among = me + 1;
    if (s->kind == CORE_REDUCE_SCATTER) {
        n = s->sent[0][me];
        for (unsigned q = 0; q < me; q++) offset += s->sent[0][q];
        if (differ) n = 0;
    }
    for (uint64_t i = 0; i < n; i++) {
        double seen = load(f->out, s->dtype, i), wanted = value_of(s, me << s->levels, i);
        if (!differ) {
            if (s->kind == CORE_BROADCAST) wanted = value_of(s, s->root, i);
            else if (s->kind != CORE_REDUCE || me == s->root) wanted = reduced(s, among << s->levels, offset + i);
        }
        EXPECT((s->reduction == CORE_MEAN ? (float)seen == (float)wanted : seen == wanted), "element %llu is %g, expected %g",
               (unsigned long long)i, seen, wanted);
    }
    for (uint64_t i = 0; f->out != f->in && s->kind <= CORE_SCAN && i < n; i++)
        EXPECT(load(f->in, s->dtype, i) == value_of(s, me << s->levels, i), "element %llu of the input was written", (unsigned long long)i);
    for (unsigned p = 1; p < 1u << s->levels; p++)
        for (uint64_t i = 0; i < n; i++)
            EXPECT(load(f->also[p - 1], s->dtype, i) == value_of(s, (me << s->levels) + p, i), "part %u was written", p);
    let_go(f);
    return true;
}

static void *run(void *number) {
    unsigned me = (unsigned)(uintptr_t)number;
    uint64_t state = 77 + me;
    flight_t *flights = calloc(IN_FLIGHT, sizeof *flights);
    unsigned begun = 0, over = 0;
    while (over < operations) {
        unsigned depth = 1 + (unsigned)(next(&state) % IN_FLIGHT);
        unsigned end = over + depth < operations ? over + depth : operations;
        if (begun < end) {
            begin_some(me, flights, begun, end, &state);
            begun = end;
        }
        while (over < begun && (next(&state) % 4 || begun == operations)) {
            flight_t *f = &flights[over % IN_FLIGHT];
            while (core_op_state(&f->op) == CORE_PENDING) {
                if (atomic_load(&specs[f->number].stopped)) stop(me, f);
                if (engines && next(&state) % 8) usleep(20);
                else if (!core_lane_advance(rank[me].lane, 20000)) sched_yield();
            }
            check(me, f);
            over++;
            // A segment may be mapped while others are looked for.
            if (over < CORE_SEGMENTS) core_memory_map(rank[me].memory, over, rank[me].segment, 1);
            if (me == leaver && over == leaves_after) core_lane_abandon(rank[me].lane);
        }
    }
    atomic_fetch_add(&finished, 1);
    while (atomic_load(&finished) < ranks)
        if (!core_lane_advance(rank[me].lane, 20000)) sched_yield();
    free(flights);
    return NULL;
}

static void told(void *context, core_op *op) { (void)context, (void)op; }

// Runs all operations in `ranks` threads; `leaver`, if there is such a rank, abandons the lane in between.
static void play(void) {
    pthread_t threads[MOST_RANKS];
    finished = 0;
    for (unsigned k = 0; k < operations; k++) specs[k].stopped = specs[k].done = specs[k].not = 0;
    for (unsigned r = 0; r < ranks; r++) {
        rank[r].segment = aligned_alloc(4096, SEGMENT_BYTES);
        memset(rank[r].segment, 0, 2 << 20);
        rank[r].memory = core_memory_new();
        core_memory_map(rank[r].memory, 0, rank[r].segment, SEGMENT_BYTES);
        core_lane_options options = {
            .rank = r, .ranks = ranks, .led = led, .block = rank[r].segment, .stage = rank[r].segment + (1 << 20),
            .stage_bytes = STAGE_BYTES, .stage_at = {0, 1 << 20}, .ended = told,
        };
        rank[r].lane = core_lane_open(&options);
        rank[r].doorbell = (core_doorbell *)(rank[r].segment + (1 << 19));
        rank[r].engine = engines ? core_engine_start(rank[r].doorbell, 1000) : NULL;
    }
    for (unsigned r = 0; r < ranks; r++)
        for (unsigned q = 0; q < ranks; q++)
            if (q != r) core_lane_join(rank[r].lane, q, rank[q].segment, rank[q].memory, rank[q].doorbell);
    for (unsigned r = 0; engines && r < ranks; r++) core_engine_add(rank[r].engine, rank[r].lane);
    for (unsigned r = 0; r < ranks; r++) pthread_create(&threads[r], NULL, run, (void *)(uintptr_t)r);
    for (unsigned r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
    for (unsigned r = 0; engines && r < ranks; r++) core_engine_stop(rank[r].engine);
    for (unsigned r = 0; r < ranks; r++) {
        core_lane_close(rank[r].lane);
        core_memory_free(rank[r].memory);
        free(rank[r].segment);
    }
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    all_operations = argc > 2 ? (unsigned)atoi(argv[2]) : 400;
    const unsigned most = argc > 3 ? (unsigned)atoi(argv[3]) : MOST_RANKS;
    specs = calloc(all_operations, sizeof *specs);
    static const unsigned sizes[] = {1, 2, 3, 5, 8, 16, 32};
    for (unsigned c = 0; c < sizeof sizes / sizeof *sizes && sizes[c] <= most; c++) {
        ranks = sizes[c];
        operations = all_operations * 8 / (ranks > 8 ? ranks : 8);  // as many elements in all
        core_kernels_limit((int)((seed + c) % 3));
        make_specs(seed + c);
        for (unsigned form = 0; form < 4; form++) {
            led = form & 1;
            engines = form & 2;
            leaver = MOST_RANKS;
            play();
            leaver = (unsigned)(next(&seed) % ranks);
            leaves_after = 1 + (unsigned)(next(&seed) % operations);
            play();
        }
        printf("%u ranks: %u operations, and as many of which rank %u left after %u\n", ranks, operations, leaver, leaves_after);
    }
    free(specs);
    return 0;
}
