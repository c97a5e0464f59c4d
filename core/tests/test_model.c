// Every order in which two or three ranks can take their steps: a model checker that drives the lanes themselves.
//
//     test_model ranks sequences seed
//
// A step is one call of one rank: it submits its next operation, advances its lane by one step, abandons the lane, or
// gets a report of a death. From each state of all ranks' memory every step is tried; known states are not entered
// again. The checked properties: results are right and alike; every operation has ended in a state without a next step;
// no state occurs again. Memory that is free for reuse is overwritten immediately: a rank that reads it gets wrong
// results, and a write is detected. Built with few entries and places, and with portions of some bytes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The lanes' own memory is part of a state.
static void *model_calloc(size_t count, size_t nbytes);
static void *model_aligned_alloc(size_t alignment, size_t nbytes);
#define calloc model_calloc
#define aligned_alloc model_aligned_alloc
#define free(x) (void)(x)
#include "../lane.c"
#include "../ways.c"
#undef calloc
#undef aligned_alloc
#undef free

enum {
    MOST_RANKS = 3, MOST_OPS = 3, MOST_PARTS = 2, PARTED = 8, TENSOR_BYTES = 640, STAGE_BYTES = 4 * CORE_PORTION_BYTES, DEPTH = 400,
    FREE = 0xee, OVER = 0xa5, HEAP_BYTES = 8192, SEEN = 1 << 22,
};

typedef struct {
    core_op op;
    uint64_t sent[MOST_RANKS], received[MOST_RANKS];
    uint8_t in[TENSOR_BYTES], out[TENSOR_BYTES], also[TENSOR_BYTES];
    const void *parts[MOST_PARTS];
    bool reused;
} flight;

typedef struct {
    struct block block;
    uint8_t stage[STAGE_BYTES];
    flight flights[MOST_OPS];
    core_lane *lane;
    unsigned submitted, over;
    bool left, dead, told;
} side;

static struct world {
    side sides[MOST_RANKS];
    _Alignas(64) uint8_t heap[HEAP_BYTES];
    size_t used;
} world;

typedef struct {
    uint8_t kind;
    uint32_t count;
    unsigned windows;  // a bit for each rank whose tensor the others reach; with PARTED, each rank brings two parts
    enum { SAME, DIFFERS, COMPARES } differs;  // rank 1 brings another fingerprint; it brings a barrier of the same
} spec;

static const spec TEMPLATES[] = {
    {CORE_BARRIER, 0, 0, SAME},       {CORE_ALLREDUCE, 4, 0, SAME},    {CORE_ALLREDUCE, 60, 7, SAME},
    {CORE_ALLREDUCE, 110, 0, SAME},   {CORE_ALLREDUCE, 110, 7, DIFFERS},   {CORE_ALLREDUCE, 140, 0, SAME},
    {CORE_ALLREDUCE, 140, 7, SAME},   {CORE_ALLREDUCE, 140, 1, SAME},  {CORE_ALLREDUCE, 140, 0, DIFFERS},
    {CORE_REDUCE, 140, 0, SAME},      {CORE_REDUCE, 140, 7, SAME},     {CORE_SCAN, 140, 2, SAME},
    {CORE_SCAN, 140, 7, SAME},        {CORE_BROADCAST, 140, 0, SAME},  {CORE_BROADCAST, 140, 7, SAME},
    {CORE_REDUCE_SCATTER, 140, 0, SAME}, {CORE_REDUCE_SCATTER, 140, 7, SAME}, {CORE_ALLGATHER, 150, 0, SAME},
    {CORE_ALLGATHER, 150, 7, SAME},   {CORE_ALLTOALL, 30, 0, SAME},    {CORE_ALLTOALL, 100, 0, SAME},
    {CORE_ALLTOALL, 100, 0, DIFFERS},    {CORE_ALLREDUCE, 140, 1, COMPARES}, {CORE_ALLGATHER, 60, 0, COMPARES},
    {CORE_ALLREDUCE, 4, PARTED, SAME},  {CORE_ALLREDUCE, 110, PARTED, SAME}, {CORE_ALLREDUCE, 140, PARTED, SAME},
    {CORE_REDUCE, 140, PARTED, SAME},   {CORE_ALLREDUCE, 140, PARTED, COMPARES},
    {CORE_ALLREDUCE, 140, PARTED | 7, SAME}, {CORE_ALLREDUCE, 140, PARTED | 1, SAME},
};
enum { TEMPLATE_COUNT = sizeof TEMPLATES / sizeof *TEMPLATES, ROOT = 1 };

enum act { SUBMIT, ADVANCE, LEAVE, TELL, ACTS };

// Sequences that come first, since a mistake was once seen in them alone.
static const unsigned FIRST[][MOST_OPS] = {{20, 1, 2}, {5, 3, 3}, {5, 5, 1}, {22, 23, 22}, {25, 3, 3}, {26, 25, 25}, {29, 29, 3}};
enum { FIRST_COUNT = sizeof FIRST / sizeof *FIRST };

static unsigned ranks, ops, leaver;
static bool begun;  // what is allocated before is not part of a state
static core_memory *memory[MOST_RANKS];
static enum { ALL_STAY, ONE_LEAVES, ONE_DIES } mode;
static spec specs[MOST_OPS];
static uint64_t seen[SEEN], path[DEPTH], states, terminals;
static unsigned steps[DEPTH], deep;
static struct world *saved[DEPTH];

static void *model_calloc(size_t count, size_t nbytes) {
    if (!begun) return (calloc)(count, nbytes);
    void *at = world.heap + world.used;
    world.used += (count * nbytes + 15) & ~(size_t)15;
    if (world.used > HEAP_BYTES) abort();
    return memset(at, 0, count * nbytes);
}

static void *model_aligned_alloc(size_t alignment, size_t nbytes) {
    world.used = (world.used + alignment - 1) & ~(alignment - 1);
    return model_calloc(1, nbytes);
}

// No thread sleeps here.
void core_doorbell_ring(core_doorbell *doorbell) { (void)doorbell; }
void core_event_write(int event) { (void)event; }
void core_word_wait(_Atomic uint32_t *word, uint32_t value, uint64_t nanoseconds) { (void)word, (void)value, (void)nanoseconds; }
void core_word_wake(_Atomic uint32_t *word) { (void)word; }
static void ended(void *context, core_op *op) { (void)context, (void)op; }

// Prints the scenario, and the steps that led here.
static void tell(void) {
    fprintf(stderr, "%u ranks, mode %d, rank %u of them special, operations", ranks, (int)mode, leaver);
    for (unsigned i = 0; i < ops; i++)
        fprintf(stderr, " [kind %u count %u windows %u%s]", specs[i].kind, specs[i].count, specs[i].windows,
                specs[i].differs == DIFFERS ? " differs" : specs[i].differs == COMPARES ? " compares" : "");
    for (unsigned d = 0; d <= deep; d++) fprintf(stderr, " %u:%c", steps[d] / ACTS, "SALT"[steps[d] % ACTS]);
    for (unsigned r = 0; r < ranks; r++) {
        side *me = &world.sides[r];
        fprintf(stderr, "\nrank %u: filled %llu reduced %llu consumed %llu, over %u of %u", r,
                (unsigned long long)me->block.filled, (unsigned long long)me->block.reduced,
                (unsigned long long)me->block.consumed, me->over, me->submitted);
        for (unsigned k = 0; k < me->submitted; k++) {
            const core_op *op = &me->flights[k].op;
            fprintf(stderr, "; way %u base %u rounds %u filled %u reduced %u taken %u", op->way, (unsigned)op->base,
                    (unsigned)op->rounds, (unsigned)op->filled, (unsigned)op->reduced, (unsigned)op->taken);
        }
    }
}

#define EXPECT(condition, ...)              \
    if (!(condition)) {                     \
        tell();                             \
        fprintf(stderr, "\n" __VA_ARGS__);  \
        fprintf(stderr, "\n");              \
        exit(1);                            \
    }

// --- operations --------------------------------------------------------------------------------------------------

static int32_t value(unsigned k, unsigned r, uint64_t i) { return (int32_t)((k * 31 + r * 17 + i * 3) % 101); }

static uint64_t part(uint64_t n, unsigned q) { return n * (q + 1) / ranks - n * q / ranks; }

// How many elements rank `r` sends to rank `q`: of reduce_scatter and allgather, how long part q is.
static uint64_t sent(const spec *s, unsigned r, unsigned q) {
    return s->kind == CORE_ALLTOALL ? (s->count + 20 * r * (q == 0)) / ranks : part(s->count, q);
}

static uint64_t sum(const uint64_t *counts) {
    uint64_t total = 0;
    for (unsigned q = 0; q < ranks; q++) total += counts[q];
    return total;
}

static bool parted(const spec *s) { return s->windows & PARTED; }

static bool in_place(const spec *s) { return s->kind <= CORE_BROADCAST; }

static void submit(unsigned r) {
    side *me = &world.sides[r];
    unsigned k = me->submitted++;
    const spec *s = &specs[k];
    flight *f = &me->flights[k];
    for (unsigned q = 0; q < ranks; q++) f->sent[q] = sent(s, r, q), f->received[q] = sent(s, q, r);
    for (uint64_t i = 0; i < TENSOR_BYTES / 4; i++) {
        ((int32_t *)f->in)[i] = value(k, r, i);
        ((int32_t *)f->also)[i] = value(k, r + MOST_RANKS, i);
    }
    f->parts[0] = f->in, f->parts[1] = f->also;
    bool window = s->windows >> r & 1;
    f->op = (core_op){
        .kind = s->differs == COMPARES && r == 1 ? CORE_BARRIER : s->kind, .dtype = CORE_I32, .reduction = CORE_SUM,
        .root = ROOT, .print = 5 + (s->differs == DIFFERS && r == 1),
        .in = f->in, .out = in_place(s) ? f->in : f->out, .sent = f->sent, .received = f->received,
        .count = s->kind == CORE_ALLTOALL ? sum(f->sent) : s->count,
        .in_at = {window ? 0 : CORE_NOWHERE, window ? (uint64_t)(f->in - (uint8_t *)me) : 0},
        .parts = f->parts, .levels = parted(s),
    };
    core_lane_submit(me->lane, &f->op);
}

// Returns what element `i` of the result of operation k is on rank `r`.
static int32_t expected(unsigned k, unsigned r, uint64_t i) {
    const spec *s = &specs[k];
    int32_t total = 0;
    unsigned among = s->kind == CORE_SCAN ? r + 1 : ranks, q = 0;
    switch (s->kind) {
        case CORE_BROADCAST: return value(k, ROOT, i);
        case CORE_ALLGATHER:
            for (; i >= sent(s, 0, q); q++) i -= sent(s, 0, q);
            return value(k, q, i);
        case CORE_ALLTOALL:
            for (; i >= sent(s, q, r); q++) i -= sent(s, q, r);
            for (unsigned before = 0; before < r; before++) i += sent(s, q, before);
            return value(k, q, i);
        case CORE_REDUCE_SCATTER:
            for (; q < r; q++) i += sent(s, 0, q);
            break;
        case CORE_REDUCE:
            if (r != ROOT) return value(k, r, i);
            break;
        default: break;
    }
    for (q = 0; q < among; q++) total += value(k, q, i) + (parted(s) ? value(k, q + MOST_RANKS, i) : 0);
    return total;
}

static void check(unsigned r, unsigned k) {
    const spec *s = &specs[k];
    flight *f = &world.sides[r].flights[k];
    unsigned state = core_op_state(&f->op);
    if (state == CORE_ABANDONED && mode != ALL_STAY) return;
    static const unsigned ends[] = {CORE_DONE, CORE_DIFFERENT, CORE_UNLIKE};
    unsigned end = f->op.kind == CORE_BARRIER && s->differs != DIFFERS ? CORE_DONE : ends[s->differs];
    EXPECT(state == end, "rank %u: operation %u ended with %u", r, k, state);
    const int32_t *out = f->op.out;
    uint64_t n = s->kind == CORE_BARRIER          ? 0
                 : s->kind == CORE_REDUCE_SCATTER ? sent(s, 0, r)
                 : s->kind == CORE_ALLTOALL       ? sum(f->received)
                                                  : s->count;
    if (s->differs) out = (int32_t *)f->in, n = TENSOR_BYTES / 4;
    for (uint64_t i = 0; i < n; i++) {
        int32_t wanted = s->differs ? value(k, r, i) : expected(k, r, i);
        EXPECT(out[i] == wanted, "rank %u: element %llu of operation %u is %d, expected %d", r, (unsigned long long)i, k,
               out[i], wanted);
    }
}

// --- what may be reused ------------------------------------------------------------------------------------------

static bool all_are(const uint8_t *bytes, size_t nbytes, uint8_t byte) {
    return nbytes == 0 || (bytes[0] == byte && memcmp(bytes, bytes + 1, nbytes - 1) == 0);
}

static void reuse_tensors(unsigned r) {
    side *me = &world.sides[r];
    for (; me->over < me->submitted && core_op_state(&me->flights[me->over].op) != CORE_PENDING; me->over++)
        check(r, me->over);
    bool quiet = core_lane_quiet(me->lane);
    for (unsigned k = 0; k < me->over; k++) {
        flight *f = &me->flights[k];
        if (!f->reused && (core_op_state(&f->op) != CORE_ABANDONED || quiet)) {
            memset(f->in, OVER, TENSOR_BYTES);
            memset(f->out, OVER, TENSOR_BYTES);
            memset(f->also, OVER, TENSOR_BYTES);
            f->reused = true;
        }
        EXPECT(!f->reused || (all_are(f->in, TENSOR_BYTES, OVER) && all_are(f->out, TENSOR_BYTES, OVER)),
               "a rank wrote into operation %u of rank %u, which was over", k, r);
    }
}

// Overwrites what rank `r` lends no longer, as all others have said.
static void reuse_lent(unsigned r) {
    side *me = &world.sides[r];
    core_lane *lane = me->lane;
    bool quiet = lane->abandoned && core_lane_quiet(lane);
    uint64_t least = UINT64_MAX;
    for (unsigned q = 0; q < ranks; q++) {
        uint64_t consumed = atomic_load(&world.sides[q].block.consumed);
        if (consumed < least && !(quiet && q != r)) least = consumed;
    }
    if (quiet) least = UINT64_MAX;
    uint8_t kept[STAGE_BYTES];
    memset(kept, FREE, sizeof kept);
    for (uint64_t i = lane->loans_first; i < lane->loans_last; i++) {
        const struct loan *loan = &lane->loans[i % PLACES];
        if (loan->portion >= least) memcpy(kept + loan->at, me->stage + loan->at, loan->end - loan->at);
    }
    memcpy(me->stage, kept, sizeof kept);
    for (unsigned e = 0; e < ENTRIES; e++) {
        struct entry *entry = &me->block.entries[e];
        bool over = entry->number > 0 && (lane->first == NULL || entry->number <= lane->first->number);
        if (over && least >= lane->ends[e])
            memset((uint8_t *)entry + sizeof entry->number, FREE, sizeof *entry - sizeof entry->number);
    }
}

// --- states ------------------------------------------------------------------------------------------------------

static uint64_t hash(void) {
    uint64_t h = 0x9e3779b97f4a7c15u;
    const uint64_t *words = (const uint64_t *)&world;
    for (size_t i = 0; i < sizeof world / 8; i++) {
        h = (h ^ words[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    return h | 1;
}

// Returns whether the state was not seen before.
static bool enter(uint64_t state) {
    for (size_t at = state % SEEN;; at = (at + 1) % SEEN) {
        if (seen[at] == state) return false;
        if (seen[at] == 0) {
            seen[at] = state;
            EXPECT(++states < SEEN / 4 * 3, "more than %d states", SEEN / 4 * 3);
            return true;
        }
    }
}

// Has rank `r` take a step; false where it cannot.
static bool act(unsigned r, enum act what) {
    side *me = &world.sides[r];
    if (me->dead) return false;
    switch (what) {
        case SUBMIT:
            if (me->submitted == ops) return false;
            do submit(r);  // of three ranks each submits all at once: else there are too many orders
            while (ranks > 2 && me->submitted < ops);
            break;
        case ADVANCE: lane_drive(me->lane, 0); break;  // without the time, which would make states differ
        case LEAVE:
            if (mode == ALL_STAY || r != leaver || me->left) return false;
            me->left = true;
            me->dead = mode == ONE_DIES;
            if (!me->dead) core_lane_abandon(me->lane);
            break;
        default:
            if (!world.sides[leaver].dead || me->told) return false;
            me->told = true;
            core_lane_lost(me->lane, leaver);
    }
    for (unsigned q = 0; q < ranks; q++) {
        if (!world.sides[q].dead) reuse_tensors(q);
        if (!world.sides[q].dead) reuse_lent(q);
    }
    return true;
}

static void at_the_end(void) {
    terminals++;
    for (unsigned r = 0; r < ranks; r++) {
        side *me = &world.sides[r];
        if (me->dead) continue;
        EXPECT(me->over == ops, "rank %u can never end operation %u", r, me->over);
        bool knows = me->lane->lent_end != UINT64_MAX;
        EXPECT(!knows || core_lane_quiet(me->lane), "rank %u never learns that its memory is free", r);
    }
}

static void explore(unsigned depth, uint64_t state) {
    EXPECT(depth < DEPTH, "more than %d steps", DEPTH);
    if (saved[depth] == NULL) saved[depth] = malloc(sizeof world);
    memcpy(saved[depth], &world, sizeof world);
    path[depth] = state;
    bool stuck = true;
    for (unsigned step = 0; step < ranks * ACTS; step++) {
        deep = depth;
        steps[depth] = step;
        if (!act(step / ACTS, step % ACTS)) continue;
        uint64_t after = hash();
        if (after != state) {
            stuck = false;
            for (unsigned d = 0; d < depth; d++) EXPECT(path[d] != after, "a state came back: nobody gets on");
            if (enter(after)) explore(depth + 1, after);
            memcpy(&world, saved[depth], sizeof world);
        }
    }
    if (stuck) at_the_end();
}

static void begin(void) {
    memset(&world, 0, sizeof world);
    memset(seen, 0, sizeof seen);
    states = 0;
    for (unsigned r = 0; r < ranks; r++) {
        side *me = &world.sides[r];
        core_lane_options options = {
            .rank = r, .ranks = ranks, .block = &me->block, .stage = me->stage, .stage_bytes = STAGE_BYTES,
            .stage_at = {0, offsetof(side, stage)}, .ended = ended,
        };
        me->lane = core_lane_open(&options);
        EXPECT(me->lane != NULL, "no lane with a stage of %d bytes", STAGE_BYTES);
    }
    for (unsigned r = 0; r < ranks; r++)
        for (unsigned q = 0; q < ranks; q++)
            if (q != r) core_lane_join(world.sides[r].lane, q, &world.sides[q].block, memory[q], NULL);
}

int main(int argc, char **argv) {
    ranks = argc > 1 ? (unsigned)atoi(argv[1]) : 2;
    unsigned sequences = argc > 2 ? (unsigned)atoi(argv[2]) : TEMPLATE_COUNT;
    srand(argc > 3 ? (unsigned)atoi(argv[3]) : 1);
    for (unsigned r = 0; r < ranks; r++) {
        memory[r] = core_memory_new();
        core_memory_map(memory[r], 0, &world.sides[r], sizeof world.sides[r]);
    }
    begun = true;
    uint64_t total = 0, most = 0;
    for (unsigned i = 0; i < sequences; i++) {
        mode = i % 3;
        ops = ranks == 2 ? 3 : 2;
        leaver = (unsigned)rand() % ranks;
        for (unsigned k = 0; k < ops; k++) specs[k] = TEMPLATES[(unsigned)rand() % TEMPLATE_COUNT];
        specs[(unsigned)rand() % ops] = TEMPLATES[(i + i / TEMPLATE_COUNT) % TEMPLATE_COUNT];
        for (unsigned k = 0; k < ops && i < FIRST_COUNT; k++) specs[k] = TEMPLATES[FIRST[i][k]], mode = ALL_STAY;
        begin();
        explore(0, hash());
        total += states;
        most = states > most ? states : most;
    }
    printf("%u ranks: %u sequences, %llu states, at most %llu, %llu ends\n", ranks, sequences, (unsigned long long)total,
           (unsigned long long)most, (unsigned long long)terminals);
    return 0;
}
