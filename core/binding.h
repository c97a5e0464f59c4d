// What the files of the Python module share: binding.c (the module, lanes), doorbells.c (sleeping), handle.c
// (awaiting), issue.c (issuing), rings.c (messages).
#ifndef CORE_BINDING_H
#define CORE_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <structmember.h>

#include "doorbell.h"
#include "core.h"
#include "ranges.h"

enum {
    SLICE = 20000,          // nanoseconds that a lane is driven at a time by a thread of Python
    // From so much under way on the engine does it from the start: an await would look for longer than a millisecond;
    // a poller has other things to look at; and a thread that computes needs the GIL, which an await holds.
    AWAITED_BYTES = 1 << 23,
    POLLED_BYTES = 1 << 20,
    BESIDE_BYTES = 1 << 18,
    WHOLE_BYTES = 1 << 15,  // so much travels whole, wherever it lies
};

typedef struct Lane Lane;
typedef struct Issuer Issuer;

// A place in a program: an instruction of a code object; a line is made of it when somebody asks. NULL: not known.
typedef struct {
    PyObject *code;
    int instruction;
} origin;

// What has ended on the lanes of one loop.
typedef struct {
    PyObject_HEAD
    _Atomic(core_op *) ended;    // whose `done` is to be called, the newest first; any thread pushes, one takes all
    _Atomic(core_op *) settled;  // those of handles, likewise
    // Whether the loop is to be woken, by `event`, when something ends: always, but while its own thread drives lanes
    // (and looks afterwards), and from a wake-up that was sent until the loop has heard it.
    _Atomic bool sleeps;
    _Atomic bool wants;          // some lane wants a segment
    int event;
    Py_ssize_t pending;          // operations whose `done` was not called yet
    Lane *lanes;                 // the first of a list
} Completions;

typedef struct {
    PyObject_HEAD
    core_engine *engine;
    Py_buffer doorbell;
} Engine;

struct Lane {
    PyObject_HEAD
    core_lane *lane;
    Completions *completions;
    Engine *engine;
    PyObject *map, *fail;
    unsigned rank, ranks;
    Py_buffer *views;     // the block, the stage, and of each other rank: the block, the doorbell
    PyObject **memories;  // of the other ranks
    PyObject *limbo;      // a list: what others may still work on of operations that were given up; NULL while empty
    size_t count;
    uint64_t arena_bytes, ordinary_bytes;  // of inputs that others worked on, and of those that were copied
    _Atomic unsigned drivers;  // threads that drive it without the GIL just now
    bool closed;
    Lane *next;
};

// Where this rank's own memory lies that others can map: segments, by their numbers. None ever goes.
typedef struct {
    PyObject_HEAD
    struct segment_range {
        uintptr_t start, end;
    } *segments;
    unsigned count, told;  // the others have been told of the first `told` of them
} Segments;

// Returns where `nbytes` from `start` on lie, in no segment where they lie in none.
core_place segments_find(const Segments *, uintptr_t start, size_t nbytes);

// A handle, the base type of `Handle` in Python.
typedef struct {
    PyObject_HEAD
    PyObject *weak;
    PyObject *progress, *op, *account, *status, *value, *traceback, *waiters, *callbacks, *event, *canceller, *expires,
        *late, *finisher, *keep, *fence, *parts, *name, *source, *tag, *version, *observer;
    long long seq;
    Py_ssize_t nbytes;
    origin called;  // by whom
    char consumed, detached, looked_at, polled;
    char given_up;  // an await of it ended without its outcome
    char posted;    // its operation does not keep it, and withdraws what it drops
    char writes;    // its result is in memory of the caller's
    // While a lane does it: who issued it (which keeps it alive), how, on what, and the operation. It writes `target`,
    // for a caller who gave `out`, and `result` is to be returned; NULL: `tensor`, and nothing for `out`.
    Issuer *issuer;
    PyObject *plan, *tensor, *target, *result, *out;
    PyObject *memory[2];  // the storages of `tensor` and `target`, once it is known not to be over at once
    core_op native;
} Handle;

// What awaits look at of the progress of a loop. `Progress` in Python is made of it.
typedef struct {
    PyObject_HEAD
    PyObject *weak;
    double last_ran, looked_in_vain, spin_seconds;
    unsigned long thread;
    long long polls;
    char crowded, fair;
    PyObject *computing;  // a set: the threads that compute just now
} Pacer;

// Which bytes are in flight.
typedef struct {
    PyObject_HEAD
    core_ranges writes, reads;
} Claims;

// What a communicator issued, in order: each record lies at its number modulo LOG_KEPT. No objects are made of it
// before somebody asks: the collector of garbage would look at each of them.
enum { LOG_KEPT = 4096 };
typedef struct {
    PyObject *what;
    origin called;
    uint64_t came;  // when, in nanoseconds of core_now; 0 where nobody takes the time
} record;
// Operations before and behind which a rank issued nothing for so many nanoseconds are kept for longer.
enum { GAP = 1000000, GAPS_KEPT = 2048 };
typedef struct {
    uint64_t seq;
    record kept;
} gap;
typedef struct {
    PyObject_HEAD
    long long seq;
    PyObject *awaited;
    PyObject *caller;  // who is to be named for what is issued: (code, instruction); None: the line that calls
    char timed;  // when each came is noted
    gap *gaps;
    size_t gap_count;
    record kept[LOG_KEPT];
} Log;

static inline uint64_t heavy_bytes(const Pacer *pacer) {
    return pacer->computing != NULL && PySet_Size(pacer->computing) > 0 ? BESIDE_BYTES : AWAITED_BYTES;
}

extern PyTypeObject *pacer_type, *lane_type, *claims_type, *log_type, *segments_type;
extern PyObject *status_pending, *status_returned;

int doorbells_add(PyObject *module);
int handle_add(PyObject *module);
int issue_add(PyObject *module);
int ledger_add(PyObject *module);
int rings_add(PyObject *module);

// Fills `view` with writable memory; false with an exception set.
bool memory_of(PyObject *buffer, Py_buffer *view, size_t least);

// Keeps `memory` as long as `lane`, where others may still work on it: its operation was given up while they could.
void lane_keep(Lane *lane, const core_op *, PyObject *memory);

// Returns the range that keeps `owner` from having [start, start + nbytes), NULL where nothing does and it has it now;
// `*failed` with an exception set.
const core_range *claims_acquire(Claims *, uintptr_t start, size_t nbytes, bool writes, PyObject *owner, bool *failed);
void claims_release(Claims *, uintptr_t start, size_t nbytes, bool writes);

// Takes note of the next operation.
void log_record(Log *, PyObject *what, origin);

// Takes note of when the last one came, where that is wanted.
void log_came(Log *, uint64_t when);

// Returns (code, instruction), None where it is not known.
PyObject *origin_pair(origin);

// Tells the ends of all handles that are known; from any thread that has the GIL.
void settle_all(Completions *);

// The calling thread drives lanes from the first to the second: what ends meanwhile does not wake the loop.
void drive_begin(Completions *);
void drive_end(Completions *);

// Has the loop be woken when another rank says something, too, and not by the engine alone: unless so much is under way
// that the engine does it.
void wait_for_word(Lane *);

// The end of one of them: gives back what was claimed, and tells who waits.
void issuer_settle(Handle *);
Lane *issuer_lane(Issuer *);

#define INCREF(object) Py_INCREF((PyObject *)(object))
#define DECREF(object) Py_DECREF((PyObject *)(object))
#define OFFERS(name, type, of, field, flags, doc) {name, type, offsetof(of, field), flags, doc}

static inline void count_bytes(Lane *lane, core_place place, uint64_t nbytes) {
    *(place.segment == CORE_NOWHERE || nbytes <= WHOLE_BYTES ? &lane->ordinary_bytes : &lane->arena_bytes) += nbytes;
}

static inline bool is_set(const PyObject *object) { return object != NULL && object != Py_None; }

// Adds a type to the module; NULL with an exception set.
static inline PyTypeObject *add_type(PyObject *module, PyType_Spec *spec) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddType(module, type) < 0) Py_CLEAR(type);
    return type;
}

#endif
