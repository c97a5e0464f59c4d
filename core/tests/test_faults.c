// Faults of other ranks: they write nonsense, stop, or die. Built with CORE_STOPS.
//
//     test_faults fuzz seed rounds    a lane among ranks whose blocks are random words: nothing is read or written but
//                                     what is mapped (an address sanitizer looks)
//     test_faults stops ranks         one of several processes stops and continues, or dies, at each call of core_stop
//     test_faults soak operations     two processes; says by how many KiB a rank grew in the second half of them
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../lane.h"

enum { MOST_RANKS = 3, STAGE = 1 << 16, TENSOR = 1 << 17, OPS = 8, SECONDS = 60 };

struct segment {
    struct block block;
    _Alignas(128) uint8_t stage[STAGE], windows[OPS][TENSOR];
};

static struct shared {
    struct segment segments[MOST_RANKS];
    _Atomic unsigned dead;  // 1 + the rank whose end was reported to all
} *shared;
static struct segment *segments[MOST_RANKS];
static unsigned ranks, rank, stopped, stop_at, hits_left;
static bool dies;
static core_lane *lane;
static core_memory *memory[MOST_RANKS];

#define EXPECT(condition, ...)                                                                         \
    if (!(condition)) {                                                                                \
        fprintf(stderr, "rank %u of %u, stop %u of rank %u (%s): ", rank, ranks, stop_at, stopped, dies ? "dies" : "stops"); \
        fprintf(stderr, __VA_ARGS__);                                                                  \
        fprintf(stderr, "\n");                                                                         \
        exit(1);                                                                                       \
    }

static void ended(void *context, core_op *op) { (void)context, (void)op; }

static void open_lane(unsigned me) {
    rank = me;
    struct segment *mine = segments[me];
    core_lane_options options = {
        .rank = me, .ranks = ranks, .block = &mine->block, .stage = mine->stage, .stage_bytes = STAGE,
        .stage_at = {0, offsetof(struct segment, stage)}, .ended = ended,
    };
    lane = core_lane_open(&options);
    EXPECT(lane != NULL, "no lane");
    for (unsigned q = 0; q < ranks; q++) {
        if (q == me) continue;
        memory[q] = core_memory_new();
        core_memory_map(memory[q], 0, segments[q], sizeof *mine);
        core_lane_join(lane, q, &segments[q]->block, memory[q], NULL);
    }
}

static void close_lane(void) {
    core_lane_close(lane);
    for (unsigned q = 0; q < ranks; q++)
        if (q != rank) core_memory_free(memory[q]);
}

// --- nonsense ----------------------------------------------------------------------------------------------------

static uint64_t state;

static uint64_t next(void) {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t word(void) { return next() >> next() % 64; }

static uint8_t kinds[OPS];  // that this rank submits

// Writes what could be taken for a block, here and there.
static void scribble(struct block *block) {
    for (unsigned e = 0; e < ENTRIES; e++) {
        struct entry *entry = &block->entries[e];
        if (next() % 4 == 0) continue;
        for (size_t i = 0; i < sizeof *entry / 8; i++) ((uint64_t *)entry)[i] = word();
        if (next() % 8) entry->number = e + 1;
        if (next() % 8) entry->print = 1;
        if (next() % 8) entry->form = (uint32_t)(next() % 6);
        if (next() % 8) entry->stage = (core_place){0, offsetof(struct segment, stage)};
        if (next() % 2) entry->stage_bytes = STAGE;
        if (next() % 4) entry->at = (uint32_t)(next() % (STAGE + 64));
        if (next() % 4) entry->window = (core_place){0, sizeof(struct segment) - 16 * (next() % 8192)};
        if (next() % 4 == 0) entry->window.offset = next() % sizeof(struct segment);
        if (next() % 8 == 0) entry->window.segment = CORE_NOWHERE;
        if (next() % 2) entry->stride = 16 * word();
        if (next() % 2) entry->rounds = next() % 9;
        if (next() % 8) entry->kind = kinds[e % OPS];
        if (entry->kind == CORE_ALLGATHER && next() % 8) entry->like = 0;
    }
    for (unsigned i = 0; i < PLACES; i++) block->places[i] = next() % 2 ? next() % STAGE : word();
    block->filled = word();
    block->reduced = word();
    block->consumed = word();
    block->abandoned = next() % 16 == 0;
}

static uint64_t total(const uint64_t *counts) {
    uint64_t sum = 0;
    for (unsigned q = 0; q < ranks; q++) sum += counts[q];
    return sum;
}

static void fuzz_once(unsigned *ended) {
    core_op ops[OPS];
    uint64_t sent[OPS][MOST_RANKS], received[OPS][MOST_RANKS];
    void *in[OPS], *out[OPS];
    ranks = 2 + next() % 2;
    for (unsigned q = 0; q < ranks; q++)
        segments[q] = memset(aligned_alloc(128, sizeof **segments), 0, sizeof **segments);
    open_lane(next() % ranks);
    for (unsigned k = 0; k < OPS; k++) kinds[k] = (uint8_t)(next() % CORE_KINDS);
    for (unsigned q = 0; q < ranks; q++)
        if (q != rank) scribble(&segments[q]->block);
    for (unsigned k = 0; k < OPS; k++) {
        core_op op = {.kind = kinds[k], .root = (uint32_t)(next() % ranks), .print = 1};
        do op.dtype = (uint8_t)(next() % CORE_DTYPES), op.reduction = (uint8_t)(next() % CORE_REDUCTIONS);
        while (op.sent = sent[k], op.received = received[k], !core_op_valid(&op, ranks));
        for (unsigned q = 0; q < ranks; q++) sent[k][q] = word() % 4000, received[k][q] = word() % 4000;
        received[k][rank] = sent[k][rank];
        op.count = total(sent[k]);
        unsigned item = core_itemsize(op.dtype);
        bool window = next() % 2 && op.count * item <= TENSOR, in_place = op.kind <= CORE_BROADCAST;
        uint64_t brought = op.kind == CORE_ALLGATHER ? sent[k][rank] : op.count;
        uint64_t gives = op.kind == CORE_REDUCE_SCATTER ? sent[k][rank] : op.kind == CORE_ALLTOALL ? total(received[k]) : op.count;
        in[k] = malloc(brought * item + 1);
        out[k] = in_place ? in[k] : malloc(gives * item + 1);
        op.in = window ? segments[rank]->windows[k] : in[k];
        memset(op.in, 1, brought * item);
        op.out = in_place ? op.in : out[k];
        op.in_at = (core_place){window ? 0 : CORE_NOWHERE, window ? offsetof(struct segment, windows) + k * TENSOR : 0};
        ops[k] = op;
        core_lane_submit(lane, &ops[k]);
    }
    for (unsigned i = 0; i < 200; i++) {
        core_lane_advance(lane, 1000);
        unsigned q = (unsigned)(next() % ranks);
        if (q != rank && next() % 8 == 0) scribble(&segments[q]->block);
    }
    core_lane_abandon(lane);
    for (unsigned k = 0; k < OPS; k++) {
        ended[core_op_state(&ops[k])]++;
        EXPECT(core_op_state(&ops[k]) != CORE_PENDING, "operation %u never ended", k);
        if (out[k] != in[k]) free(out[k]);
        free(in[k]);
    }
    close_lane();
    for (unsigned q = 0; q < ranks; q++) free(segments[q]);
}

// --- processes ---------------------------------------------------------------------------------------------------

void core_stop(enum stop place) {
    if (rank == stopped && (unsigned)place == stop_at && hits_left > 0 && --hits_left == 0)
        raise(dies ? SIGKILL : SIGSTOP);
}

// Advances until `op` ends, as an engine does after the report of a death.
static unsigned wait_for(const core_op *op) {
    while (core_op_state(op) == CORE_PENDING) {
        unsigned dead = atomic_load(&shared->dead);
        if (dead > 0) core_lane_lost(lane, dead - 1);
        else if (!core_lane_advance(lane, 100000)) sched_yield();
    }
    return core_op_state(op);
}

// Sums of data that are short, staged, lent in portions, and in place, one after the other and many at a time.
static void work(void) {
    static const uint64_t counts[OPS] = {3, 90, 2000, 20000, 20000, 500, 20000, 7};
    static const bool windows[OPS] = {0, 0, 0, 0, 1, 0, 1, 0};
    for (unsigned turn = 0; turn < 4; turn++) {
        core_op ops[OPS];
        int32_t *tensors[OPS];
        for (unsigned k = 0; k < OPS; k++) {
            tensors[k] = windows[k] ? (int32_t *)segments[rank]->windows[k] : malloc(TENSOR);
            for (uint64_t i = 0; i < counts[k]; i++) tensors[k][i] = (int32_t)(i + rank + turn);
            ops[k] = (core_op){.kind = CORE_ALLREDUCE, .dtype = CORE_I32, .print = k, .in = tensors[k], .out = tensors[k],
                               .count = counts[k], .in_at = {windows[k] ? 0 : CORE_NOWHERE,
                               windows[k] ? offsetof(struct segment, windows) + k * TENSOR : 0}};
            core_lane_submit(lane, &ops[k]);
        }
        for (unsigned k = 0; k < OPS; k++) {
            unsigned ended = wait_for(&ops[k]);
            EXPECT(ended == CORE_DONE || (dies && ended == CORE_ABANDONED), "operation %u ended with %u", k, ended);
            for (uint64_t i = 0; i < counts[k] && ended == CORE_DONE; i++) {
                int32_t wanted = (int32_t)(ranks * (i + turn) + ranks * (ranks - 1) / 2);
                EXPECT(tensors[k][i] == wanted, "element %d of operation %u is %d, expected %d", (int)i, k, tensors[k][i], wanted);
            }
        }
        for (unsigned k = 0; k < OPS; k++)
            if (!windows[k]) free(tensors[k]);
    }
    while (atomic_load(&shared->dead) > 0 && !core_lane_quiet(lane)) sched_yield();
}

static void soak(unsigned operations) {
    struct rusage half, end;
    int32_t tensor[64];
    for (unsigned k = 0; k < operations; k++) {
        if (k == operations / 2) getrusage(RUSAGE_SELF, &half);
        core_op op = {.kind = CORE_ALLREDUCE, .dtype = CORE_I32, .print = k, .in = tensor, .out = tensor,
                      .count = 1 + k % 64, .in_at = {CORE_NOWHERE, 0}};
        for (unsigned i = 0; i < 64; i++) tensor[i] = (int32_t)(k + rank);
        core_lane_submit(lane, &op);
        unsigned ended = wait_for(&op);
        EXPECT(ended == CORE_DONE && tensor[0] == (int32_t)(2 * k + 1), "operation %u: %u, %d", k, ended, tensor[0]);
    }
    getrusage(RUSAGE_SELF, &end);
    if (rank == 0) printf("%ld\n", end.ru_maxrss - half.ru_maxrss);
    EXPECT(end.ru_maxrss == half.ru_maxrss, "grew by %ld KiB", end.ru_maxrss - half.ru_maxrss);
}

// Runs all ranks as processes. A stopped rank continues later; a death is reported to all. Returns true if it was seen.
static bool run(unsigned operations) {
    int file = memfd_create("segments", MFD_CLOEXEC);
    EXPECT(file >= 0 && ftruncate(file, sizeof *shared) == 0, "no memory: %s", strerror(errno));
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    EXPECT(shared != MAP_FAILED, "no memory: %s", strerror(errno));
    for (unsigned r = 0; r < ranks; r++) segments[r] = &shared->segments[r];
    pid_t children[MOST_RANKS];
    for (unsigned r = 0; r < ranks; r++) {
        fflush(stdout);
        children[r] = fork();
        if (children[r] != 0) continue;
        alarm(SECONDS);
        open_lane(r);
        if (operations > 0) soak(operations);
        else work();
        close_lane();
        fflush(stdout);
        _exit(0);
    }
    bool seen = false;
    for (unsigned left = ranks; left > 0;) {
        int status;
        pid_t child = waitpid(-1, &status, WUNTRACED);
        unsigned r = 0;
        while (r < ranks && children[r] != child) r++;
        bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && r == stopped && dies;
        if (WIFSTOPPED(status)) {
            usleep(2000);  // the others have come as far as they can without it
            kill(child, SIGCONT);
        } else {
            EXPECT(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "rank %u ended with status %d", r, status);
            left--;
        }
        if (killed) atomic_store(&shared->dead, r + 1);
        seen |= killed || WIFSTOPPED(status);
    }
    munmap(shared, sizeof *shared);
    close(file);
    return seen;
}

int main(int argc, char **argv) {
    unsigned number = argc > 2 ? (unsigned)atoi(argv[2]) : 2;
    if (argc > 3 && strcmp(argv[1], "fuzz") == 0) {
        unsigned ended[8] = {0};
        state = number;
        for (int i = 0; i < atoi(argv[3]); i++) fuzz_once(ended);
        printf("%u done, %u different, %u abandoned, %u broken\n", ended[CORE_DONE], ended[CORE_DIFFERENT],
               ended[CORE_ABANDONED], ended[CORE_BROKEN]);
    } else if (argc > 2 && strcmp(argv[1], "stops") == 0) {
        ranks = number;
        for (stop_at = 0; stop_at < STOPS; stop_at++) {
            unsigned seen = 0;
            for (unsigned i = 0; i < 6; i++) {
                stopped = i % ranks;
                dies = i / 3;
                hits_left = 1 + i % 3 * 5;
                seen += run(0);
            }
            printf("%u of 6 at stop %u\n", seen, stop_at);
        }
    } else if (argc > 2 && strcmp(argv[1], "soak") == 0) {
        ranks = 2;
        run(number);
    } else {
        fprintf(stderr, "usage: test_faults fuzz seed rounds | stops ranks | soak operations\n");
        return 2;
    }
    return 0;
}
