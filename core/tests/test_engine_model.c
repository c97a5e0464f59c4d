// Every order in which the threads of two ranks can take their steps, up to some preemptions: the engine, the lanes and
// the doorbells as they are, under a scheduler.
//
//     test_engine_model scenario preemptions
//
// Each thread is a coroutine. Before each access to an atomic, and at mutexes, futexes and the clock, the scheduler may
// continue another thread. All its choices are tried, depth first, by repeated runs of the scenario. A choice that is
// not forced costs one preemption: another thread, a sleep that ends early, time that passes at a look at the clock, or
// a store that other threads see late. The clock stands still meanwhile, and jumps when no thread can continue.
//
// The checked properties: no operation is pending while all threads sleep without a time limit; the end of each
// operation is reported exactly once; the engine stops; no thread uses a lane that was removed.
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "../doorbell.h"

enum {
    RANKS = 2, THREADS = 4, OPS = 4, LATE = 4, STACK = 1 << 16, DEPTH = 1 << 15, COUNT = 140,
    PASSES = 30000,      // nanoseconds that may pass at a look at the clock: more than a slice, and than the engine keeps off
    OVERSLEPT = 300000000,
};

// --- threads -----------------------------------------------------------------------------------------------------

typedef struct {
    ucontext_t context;
    void *(*run)(void *);
    void *argument;
    enum state { READY, ASLEEP, LOCKED, JOINING, OVER } state;
    const void *at;    // the futex, the mutex or the thread that it waits for
    uint64_t until;    // 0: without a limit
    struct { void *to; uint64_t value; size_t nbytes; } late[LATE];  // stores that other threads do not see yet
    unsigned stored;
} thread;

static struct {
    thread threads[THREADS];
    unsigned count, current;
    uint64_t now;
} world;
static _Alignas(64) char stacks[THREADS][STACK];
static ucontext_t scheduler;
static unsigned scenario, allowed, used, depth, steps;
static struct { uint16_t chosen, among; bool costs; } path[DEPTH];
static unsigned replayed;
static uint64_t executions;
static const void *removed[2];  // from, to: memory that no thread may use any more

static void tell(const char *what) {
    fprintf(stderr, "scenario %u, %u preemptions: %s\n", scenario, used, what);
    for (unsigned t = 0; t < world.count; t++)
        fprintf(stderr, "thread %u: state %d, until %llu\n", t, (int)world.threads[t].state, (unsigned long long)world.threads[t].until);
    exit(1);
}

// Returns which of `among` ways to go; where it costs, all but the first do.
static unsigned choose(unsigned among, bool costs) {
    if (among < 2 || (costs && used == allowed)) return 0;
    if (depth == DEPTH) tell("it goes on for ever");
    if (depth == replayed) {
        path[depth].chosen = 0;
        path[depth].among = (uint16_t)among;
        path[depth].costs = costs;
        replayed++;
    }
    unsigned chosen = path[depth++].chosen;
    used += costs && chosen > 0;
    return chosen;
}

static void store_late(thread *t) {
    for (unsigned i = 0; i < t->stored; i++) memcpy(t->late[i].to, &t->late[i].value, t->late[i].nbytes);
    t->stored = 0;
}

static void switch_to(unsigned next) {
    unsigned before = world.current;
    if (next == before) return;
    world.current = next;
    store_late(&world.threads[next]);  // those that it made before it was interrupted have arrived by now
    swapcontext(&world.threads[before].context, &world.threads[next].context);
}

// Continues another thread, since this one cannot continue, or waits for the others.
static void yield(void) {
    thread *me = &world.threads[world.current];
    store_late(me);
    unsigned ready[THREADS], count = 0, soonest = THREADS;
    for (unsigned t = 0; t < world.count; t++) {
        thread *other = &world.threads[t];
        if (other->state == READY && other != me) ready[count++] = t;
        if (other->state == ASLEEP && other->until > 0 && (soonest == THREADS || other->until < world.threads[soonest].until))
            soonest = t;
    }
    if (count > 0) {
        switch_to(ready[choose(count, false)]);
    } else if (me->state == READY) {
        world.now += PASSES;
    } else if (soonest < THREADS) {
        world.now = world.threads[soonest].until + OVERSLEPT;
        world.threads[soonest].state = READY;
        switch_to(soonest);
    } else {
        tell("everybody sleeps");
    }
}

// Another thread may continue here; the sleep of a thread with a time limit may end.
static void point(const void *at) {
    if (at >= removed[0] && at < removed[1]) tell("a lane is touched that was removed");
    if (++steps > DEPTH) tell("it goes on for ever");
    if (used == allowed) return;
    unsigned able[THREADS + 1] = {world.current}, count = 1;
    for (unsigned t = 0; t < world.count; t++) {
        const thread *other = &world.threads[t];
        if (t != world.current && (other->state == READY || (other->state == ASLEEP && other->until > 0))) able[count++] = t;
    }
    unsigned next = able[choose(count, true)];
    if (next == world.current) return;
    world.threads[next].state = READY;
    switch_to(next);
}

static void sleep_at(const void *at, uint64_t nanoseconds, enum state state) {
    thread *me = &world.threads[world.current];
    me->state = state;
    me->at = at;
    me->until = nanoseconds == 0 ? 0 : world.now + nanoseconds;
    yield();
}

static void wake_at(const void *at, enum state state) {
    for (unsigned t = 0; t < world.count; t++)
        if (world.threads[t].state == state && world.threads[t].at == at) world.threads[t].state = READY;
}

static void begin(void) {
    thread *me = &world.threads[world.current];
    me->run(me->argument);
    store_late(me);
    me->state = OVER;
    wake_at(me, JOINING);
    for (unsigned t = 0; t < world.count; t++)
        if (world.threads[t].state != OVER) yield();
    setcontext(&scheduler);
}

static thread *spawn(void *(*run)(void *), void *argument) {
    thread *t = &world.threads[world.count];
    *t = (thread){.run = run, .argument = argument, .state = READY};
    getcontext(&t->context);
    t->context.uc_stack.ss_sp = stacks[world.count++];
    t->context.uc_stack.ss_size = STACK;
    makecontext(&t->context, begin, 0);
    return t;
}

// --- what the core calls -----------------------------------------------------------------------------------------

static void fence(void) { store_late(&world.threads[world.current]); }

// Reads the last store of this thread, although other threads may not see it yet.
static void read_word(const void *from, void *to, size_t nbytes) {
    point(from);
    const thread *me = &world.threads[world.current];
    memcpy(to, from, nbytes);
    for (unsigned i = 0; i < me->stored; i++)
        if (me->late[i].to == from) memcpy(to, &me->late[i].value, nbytes);
}

static void write_word(void *to, const void *from, size_t nbytes, bool sequential) {
    point(to);
    thread *me = &world.threads[world.current];
    if (sequential || (me->stored == 0 && choose(2, true) == 0) || me->stored == LATE) {
        fence();
        memcpy(to, from, nbytes);
        return;
    }
    me->late[me->stored].to = to;
    me->late[me->stored].nbytes = nbytes;
    memcpy(&me->late[me->stored++].value, from, nbytes);
}

static long model_futex(long number, _Atomic uint32_t *word, int how, uint32_t value, const struct timespec *limit, void *none, int more) {
    (void)number, (void)none, (void)more;
    point(NULL);  // a futex may be woken at memory that has gone
    fence();
    if ((how & ~FUTEX_PRIVATE_FLAG) == FUTEX_WAKE) wake_at(word, ASLEEP);
    else if (*word == value)
        sleep_at(word, limit == NULL ? 0 : (uint64_t)limit->tv_sec * 1000000000u + (uint64_t)limit->tv_nsec, ASLEEP);
    return 0;
}

static uint64_t model_now(void) {
    world.now += choose(2, true) * PASSES;
    return world.now;
}

static int model_lock(void *mutex) {
    point(mutex);
    fence();
    while (*(int *)mutex) sleep_at(mutex, 0, LOCKED);
    *(int *)mutex = 1;
    return 0;
}

static int model_unlock(void *mutex) {
    point(mutex);
    fence();
    *(int *)mutex = 0;
    wake_at(mutex, LOCKED);
    return 0;
}

static int model_join(thread *t) {
    while (t->state != OVER) sleep_at(t, 0, JOINING);
    return 0;
}

#define PLAIN(p) __typeof__((void)0, *(p))
#define READ(p) ({ PLAIN(p) read_; read_word((const void *)(p), &read_, sizeof read_); read_; })
#define WRITE(p, v, sequential) ({ PLAIN(p) write_ = (v); write_word((void *)(p), &write_, sizeof write_, sequential); })
#define CHANGE(p, changed) ({ point((const void *)(p)); fence(); PLAIN(p) old_ = *(p); *(p) = (changed); old_; })
#define SWAP(p, e, v) \
    ({ point((const void *)(p)); fence(); __auto_type e_ = (e); bool same_ = *(p) == *e_; if (same_) *(p) = (v); else *e_ = *(p); same_; })
#undef atomic_load
#undef atomic_load_explicit
#undef atomic_store
#undef atomic_store_explicit
#undef atomic_exchange
#undef atomic_exchange_explicit
#undef atomic_fetch_add
#undef atomic_fetch_add_explicit
#undef atomic_fetch_sub_explicit
#undef atomic_compare_exchange_weak
#undef atomic_compare_exchange_strong
#undef atomic_thread_fence
#define atomic_load(p) READ(p)
#define atomic_load_explicit(p, order) READ(p)
#define atomic_store(p, v) WRITE(p, v, true)
#define atomic_store_explicit(p, v, order) WRITE(p, v, (order) == memory_order_seq_cst)
#define atomic_exchange(p, v) CHANGE(p, v)
#define atomic_exchange_explicit(p, v, order) CHANGE(p, v)
#define atomic_fetch_add(p, v) CHANGE(p, old_ + (v))
#define atomic_fetch_add_explicit(p, v, order) CHANGE(p, old_ + (v))
#define atomic_fetch_sub_explicit(p, v, order) CHANGE(p, old_ - (v))
#define atomic_compare_exchange_weak(p, e, v) SWAP(p, e, v)
#define atomic_compare_exchange_strong(p, e, v) SWAP(p, e, v)
#define atomic_thread_fence(order) fence()
#define syscall model_futex
#define core_now model_now
#define core_relax yield
#define pthread_t thread *
#define pthread_create(t, attributes, run, argument) ((*(t) = spawn(run, argument)) == NULL)
#define pthread_join(t, result) model_join(t)
#define pthread_mutex_init(mutex, attributes) (void)(*(int *)(mutex) = 0)
#define pthread_mutex_destroy(mutex) (void)(mutex)
#define pthread_mutex_lock(mutex) model_lock(mutex)
#define pthread_mutex_unlock(mutex) model_unlock(mutex)
#define pthread_sigmask(how, set, before) (void)(before)
#define pthread_setname_np(t, name) (void)(t)
#include "../doorbell.c"
#include "../engine.c"
#include "../lane.c"
#include "../ways.c"

// --- scenarios ---------------------------------------------------------------------------------------------------

typedef struct {
    struct block block;
    uint8_t stage[RANKS * CORE_LEAST_STAGE_BYTES];
    int32_t tensors[OPS][COUNT];
} segment;

typedef struct {
    core_doorbell doorbell;
    segment segments[2];  // of a lane each
    core_lane *lanes[2];
    core_memory *memory[2];
    core_engine *engine;
    core_op ops[OPS];
    unsigned submitted, told;
} side;

static side sides[RANKS];
static core_doorbell resting;  // of a progress thread whose loop waits
static _Atomic unsigned finished;

static void ended(void *context, core_op *op) {
    side *me = context;
    if (op == NULL) tell("a segment is wanted");
    if (op->caller == NULL) tell("an operation is told of twice");
    op->caller = NULL;
    me->told++;
}

static void open_lanes(unsigned rank, unsigned lanes) {
    side *me = &sides[rank], *other = &sides[1 - rank];
    for (unsigned i = 0; i < lanes; i++) {
        segment *mine = &me->segments[i];
        core_lane_options options = {
            .rank = rank, .ranks = RANKS, .block = &mine->block, .stage = mine->stage, .stage_bytes = sizeof mine->stage,
            .stage_at = {0, offsetof(segment, stage)}, .ended = ended, .context = me,
        };
        me->lanes[i] = core_lane_open(&options);
        me->memory[i] = core_memory_new();
        core_memory_map(me->memory[i], 0, &other->segments[i], sizeof(segment));
        core_lane_join(me->lanes[i], 1 - rank, &other->segments[i].block, me->memory[i], &other->doorbell);
    }
}

// Submits an operation as a call does: it drives the lane once, and leaves the rest, or what is heavy, to the engine.
static core_op *issue(side *me, unsigned lane, enum core_kind kind) {
    unsigned k = me->submitted++;
    int32_t *t = me->segments[lane].tensors[k];
    core_op *op = &me->ops[k];
    *op = (core_op){.kind = (uint8_t)kind, .dtype = CORE_I32, .print = kind, .in = t, .out = t, .count = kind == CORE_BARRIER ? 0 : COUNT,
                    .in_at = {0, offsetof(segment, tensors) + k * sizeof *me->segments->tensors}, .caller = me};
    for (unsigned i = 0; i < COUNT; i++) t[i] = (int32_t)i + (me == sides);
    core_lane_submit(me->lanes[lane], op);
    bool heavy = scenario == 7;
    if (!heavy) core_lane_advance(me->lanes[lane], 20000);
    if (core_op_state(op) == CORE_PENDING) core_engine_notice(me->engine, me->lanes[lane], heavy);
    return op;
}

// Waits for an operation as a thread does that only the engine helps.
static void await(core_op *op, enum core_state wanted) {
    while (core_op_state(op) == CORE_PENDING) core_op_wait(op, 0);
    if (core_op_state(op) != (unsigned)wanted) tell("an operation ended in another way");
    if (op->kind == CORE_ALLREDUCE && wanted == CORE_DONE)
        for (unsigned i = 0; i < COUNT; i++)
            if (((int32_t *)op->out)[i] != (int32_t)(2 * i + 1)) tell("a sum is wrong");
}

// Rests for so long that the engine goes to sleep.
static void rest(void) { sleep_at(NULL, 1, ASLEEP), sleep_at(NULL, 1, ASLEEP); }

static void play(side *me) {
    unsigned rank = me == sides ? 0 : 1;
    core_op *first;
    switch (scenario) {
        case 0:  // an operation of one meeting, then one in place; each is awaited
            await(issue(me, 0, CORE_BARRIER), CORE_DONE);
            break;
        case 1:
            await(issue(me, 0, CORE_ALLREDUCE), CORE_DONE);
            break;
        case 2:  // two in flight; the loop looks once more, without a notice
            first = issue(me, 0, CORE_ALLREDUCE);
            issue(me, 0, CORE_BARRIER);
            core_lane_advance(me->lanes[0], 20000);
            await(first, CORE_DONE);
            await(&me->ops[1], CORE_DONE);
            break;
        case 3:  // one comes late, when the engine of the other one listens, and its own sleeps
            if (rank == 1) rest();
            await(issue(me, 0, CORE_ALLREDUCE), CORE_DONE);
            break;
        case 4:  // another lane waits meanwhile
        case 7:  // an engine listens for it, and the next operation is heavy
            if (rank == 0) first = issue(me, 1, CORE_BARRIER);
            if (rank == 0 && scenario == 7) rest();
            await(issue(me, 0, CORE_ALLREDUCE), CORE_DONE);
            if (rank == 1) first = issue(me, 1, CORE_BARRIER);
            await(first, CORE_DONE);
            break;
        case 5:  // one rank abandons the lane while the other one waits
            if (rank == 1) core_lane_abandon(me->lanes[0]);
            else await(issue(me, 0, CORE_BARRIER), CORE_ABANDONED);
            break;
        case 6:  // a lane is removed, and its memory goes
            await(issue(me, 1, CORE_BARRIER), CORE_DONE);
            if (rank == 0) {
                core_engine_remove(me->engine, me->lanes[1]);
                removed[0] = me->lanes[1];
                removed[1] = me->lanes[1] + 1;
            }
            await(issue(me, 0, CORE_BARRIER), CORE_DONE);
            break;
        case 8:  // a progress thread rests without a limit, and the other rank wakes its loop, which is busy
        case 9:  // another thread of its process rings
            if (rank == 0) {
                core_doorbell_rest(&resting, 0, 0, 1);
            } else if (scenario == 8) {
                if (atomic_exchange(&resting.loop_waits, false)) core_doorbell_loop_woken(&resting);
            } else {
                atomic_fetch_add(&resting.count, 1);
                if (atomic_load(&resting.sleep) != CORE_AWAKE) core_doorbell_ring(&resting);
            }
            break;
        default: exit(2);
    }
}

static void *be_rank(void *context) {
    side *me = context;
    unsigned lanes = scenario == 4 || scenario == 6 || scenario == 7 ? 2 : 1;
    me->engine = core_engine_start(&me->doorbell, 0);
    for (unsigned i = 0; i < lanes; i++) core_engine_add(me->engine, me->lanes[i]);
    play(me);
    finished++;
    // While other ranks need the operations of this rank, its engine continues.
    while (finished < RANKS) sleep_at(&finished, 0, ASLEEP);
    wake_at(&finished, ASLEEP);
    core_engine_stop(me->engine);
    if (me->told != me->submitted) tell("an operation was not told of");
    return NULL;
}

static void execute(void) {
    memset(&world, 0, sizeof world);
    memset(sides, 0, sizeof sides);
    memset(&resting, 0, sizeof resting);
    resting.loop_waits = true;
    world.now = 1000000000;
    finished = 0;
    removed[0] = removed[1] = NULL;
    unsigned bound = allowed;
    allowed = used = depth = steps = 0;
    for (unsigned r = 0; r < RANKS; r++) open_lanes(r, 2);
    allowed = bound;
    for (unsigned r = 0; r < RANKS; r++) spawn(be_rank, &sides[r]);
    executions++;
    volatile bool begun = false;
    getcontext(&scheduler);
    if (!begun) {
        begun = true;
        setcontext(&world.threads[0].context);
    }
    removed[0] = removed[1] = NULL;
    for (unsigned r = 0; r < RANKS; r++) {
        for (unsigned i = 0; i < 2; i++) {
            core_lane_close(sides[r].lanes[i]);
            core_memory_free(sides[r].memory[i]);
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: test_engine_model scenario preemptions\n");
        return 2;
    }
    scenario = (unsigned)atoi(argv[1]);
    allowed = (unsigned)atoi(argv[2]);
    do {
        execute();
        while (replayed > 0 && path[replayed - 1].chosen + 1 == path[replayed - 1].among) replayed--;
        if (replayed > 0) path[replayed - 1].chosen++;
    } while (replayed > 0);
    printf("scenario %u, %u preemptions: %llu orders\n", scenario, allowed, (unsigned long long)executions);
    return 0;
}
