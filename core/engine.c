// The engine: one thread of a process that drives lanes while no other thread does.
//
// A thread that waits for an operation drives its lane for some microseconds itself, and an active loop does so in every
// iteration. The engine skips lanes that were driven recently. After a poll, its action depends on the lanes:
//
//     an operation advanced         polls again
//     operations wait for ranks     polls for `spin` more, then LISTENS: a rank that writes to its block wakes it
//     other threads drive           DOZES for a millisecond
//     no operation is in flight     DOZES after recent operations; then SLEEPS, and a submit wakes it
//
// No wake-up is lost: the engine stores its `sleep` state, polls once more, and sleeps only if no operation advanced. A
// rank that writes or submits reads `sleep` afterwards. The fences between store and load on both sides (`doze`, `ring`
// of lane.c, core_engine_notice) ensure that at least one side sees the store of the other.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "doorbell.h"
#include "lane.h"

enum {
    KEEP_OFF = 20000,      // nanoseconds for which a lane is skipped after another thread has driven it
    SLICE = 200000,        // nanoseconds of one drive of a lane
    DOZE = 1000000,
    LINGER = 2000000,      // nanoseconds after the last operation; a doze takes the core of a computing thread
    MUCH = 1 << 20,        // bytes in flight from which engines use separate cores
};

enum look { IDLE, OTHERS, STUCK, MOVED_ON };

struct core_engine {
    core_doorbell *doorbell;
    _Atomic uint64_t spin, wakes_in;
    pthread_t thread;
    pthread_mutex_t mutex;  // for the fields below; held while lanes are driven
    core_lane **lanes;
    size_t count, room;
    bool others;            // true if a lane was skipped at the last poll
    _Atomic bool stopping;
};

// Moves the calling thread to another core; the kernel may move it again.
static void leave_core(int core, unsigned ranks) {
    cpu_set_t all, others;
    if (sched_getaffinity(0, sizeof all, &all) < 0 || (unsigned)CPU_COUNT(&all) < ranks) return;
    others = all;
    CPU_CLR((size_t)core, &others);
    if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}

// The kernel may wake two engines of one lane on one core, where they take twice as long, and move one of them only
// after some milliseconds. So the engine of the higher rank moves immediately, if there are enough cores.
static void keep_apart(core_engine *engine, const core_lane *lane) {
    int core = sched_getcpu();
    if (core < 0) return;
    atomic_store_explicit(&engine->doorbell->core, core + 1, memory_order_relaxed);
    for (unsigned q = 0; q < lane->rank; q++) {
        const core_doorbell *doorbell = lane->peers[q].doorbell;
        if (doorbell != NULL && atomic_load_explicit(&doorbell->core, memory_order_relaxed) == core + 1) {
            leave_core(core, lane->ranks);
            return;
        }
    }
}

// Drives each lane once.
static enum look look(core_engine *engine) {
    enum look found = IDLE;
    engine->others = false;
    pthread_mutex_lock(&engine->mutex);
    for (size_t i = 0; i < engine->count; i++) {
        core_lane *lane = engine->lanes[i];
        if (!core_lane_busy(lane)) continue;
        uint64_t driven_at = atomic_load_explicit(&lane->driven_at, memory_order_relaxed);
        enum drive drive = HELD;
        if (driven_at == 0 || core_now() - driven_at > KEEP_OFF) drive = lane_drive(lane, SLICE);
        if (drive == DROVE && core_lane_load(lane) >= MUCH) keep_apart(engine, lane);
        enum look now = drive == HELD ? OTHERS : drive == STILL ? STUCK : MOVED_ON;
        if (now == OTHERS) engine->others = true;
        if (now > found) found = now;
    }
    pthread_mutex_unlock(&engine->mutex);
    return found;
}

// Averages the time of recent wake-ups, without wake-ups by the time limit.
static void learn(core_engine *engine, uint64_t fell_asleep) {
    uint64_t rung_at = atomic_load_explicit(&engine->doorbell->rung_at, memory_order_relaxed), now = core_now();
    if (rung_at < fell_asleep || rung_at > now) return;
    uint64_t before = atomic_load_explicit(&engine->wakes_in, memory_order_relaxed);
    atomic_store_explicit(&engine->wakes_in, before - before / 4 + (now - rung_at) / 4, memory_order_relaxed);
}

// Sleeps unless the doorbell was rung meanwhile; true if it slept.
static bool doze(core_engine *engine, enum core_sleep how) {
    uint32_t heard = atomic_load(&engine->doorbell->count);
    atomic_store(&engine->doorbell->sleep, how);
    atomic_thread_fence(memory_order_seq_cst);
    enum look found = look(engine);
    bool sleeps = how == CORE_SLEEPS ? found == IDLE : how == CORE_LISTENS ? found == STUCK : found <= OTHERS;
    sleeps = sleeps && !atomic_load(&engine->stopping);
    if (sleeps) {
        uint64_t fell_asleep = core_now();
        atomic_store_explicit(&engine->doorbell->core, 0, memory_order_relaxed);
        // No ring announces that other threads have stopped driving.
        core_doorbell_wait(engine->doorbell, heard, how == CORE_DOZES || engine->others ? DOZE : 0);
        learn(engine, fell_asleep);
    }
    atomic_store(&engine->doorbell->sleep, CORE_AWAKE);
    return sleeps;
}

static void *run(void *context) {
    core_engine *engine = context;
    uint64_t moved_at = core_now(), busy_at = moved_at;
    while (!atomic_load_explicit(&engine->stopping, memory_order_relaxed)) {
        enum look found = look(engine);
        uint64_t now = core_now();
        if (found != IDLE) busy_at = now;
        if (found == MOVED_ON) {
            moved_at = now;
        } else if (found == STUCK && now - moved_at < atomic_load_explicit(&engine->spin, memory_order_relaxed)) {
            core_relax();
        } else if (found == STUCK) {
            if (doze(engine, CORE_LISTENS)) moved_at = core_now();  // after a wake-up it polls for a while
        } else {
            doze(engine, found == IDLE && now - busy_at > LINGER ? CORE_SLEEPS : CORE_DOZES);
        }
    }
    return NULL;
}

core_engine *core_engine_start(core_doorbell *doorbell, uint64_t spin) {
    core_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL) return NULL;
    engine->doorbell = doorbell;
    atomic_init(&engine->spin, spin);
    pthread_mutex_init(&engine->mutex, NULL);
    sigset_t all, before;  // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&engine->thread, NULL, run, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(engine);
        return NULL;
    }
    pthread_setname_np(engine->thread, "aiodist-engine");
    return engine;
}

void core_engine_spin(core_engine *engine, uint64_t spin) { atomic_store_explicit(&engine->spin, spin, memory_order_relaxed); }

uint64_t core_engine_wakes_in(const core_engine *engine) {
    return engine == NULL ? 0 : atomic_load_explicit(&engine->wakes_in, memory_order_relaxed);
}

void core_engine_stop(core_engine *engine) {
    atomic_store(&engine->stopping, true);
    core_doorbell_ring(engine->doorbell);
    pthread_join(engine->thread, NULL);
    pthread_mutex_destroy(&engine->mutex);
    free(engine->lanes);
    free(engine);
}

int core_engine_add(core_engine *engine, core_lane *lane) {
    int failed = 0;
    pthread_mutex_lock(&engine->mutex);
    if (engine->count == engine->room) {
        size_t room = 2 * engine->room + 4;
        core_lane **lanes = realloc(engine->lanes, room * sizeof *lanes);
        if (lanes != NULL) {
            engine->lanes = lanes;
            engine->room = room;
        }
        failed = lanes == NULL ? -1 : 0;
    }
    if (!failed) engine->lanes[engine->count++] = lane;
    pthread_mutex_unlock(&engine->mutex);
    return failed;
}

void core_engine_remove(core_engine *engine, core_lane *lane) {
    pthread_mutex_lock(&engine->mutex);
    for (size_t i = 0; i < engine->count; i++)
        if (engine->lanes[i] == lane) engine->lanes[i--] = engine->lanes[--engine->count];
    pthread_mutex_unlock(&engine->mutex);
}

void core_engine_forget(core_engine *engine) {
    for (size_t i = 0; i < engine->count; i++) lane_forget(engine->lanes[i]);
}

void core_engine_notice(core_engine *engine, core_lane *lane, bool now) {
    if (engine == NULL) return;  // a forked child has no engine
    if (now) atomic_store_explicit(&lane->driven_at, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    uint32_t sleep = atomic_load_explicit(&engine->doorbell->sleep, memory_order_relaxed);
    // A listening engine would wait for a ring of another rank, and that rank may wait for this one.
    bool wakes = sleep == CORE_SLEEPS || sleep == CORE_LISTENS || (now && sleep == CORE_DOZES);
    if (wakes) core_doorbell_ring(engine->doorbell);
}
