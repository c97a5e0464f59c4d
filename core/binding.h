// Declarations shared by the files of the Python module: binding.c (the module, lanes), doorbells.c (sleeping), handle.c
// (awaiting), issue.c (issuing), method.c (calls), rings.c (messages), form.c (bytes of tensors).
#ifndef CORE_BINDING_H
#define CORE_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <structmember.h>
#include <sys/eventfd.h>

#include "doorbell.h"
#include "core.h"
#include "dlpack.h"
#include "ranges.h"

// Added to the event of a loop by a message that wakes it. Lanes add 1.
#define MESSAGE_CAME ((eventfd_t)1 << 32)

enum {
    SLICE = 20000,            // nanoseconds of one drive of a lane by a Python thread
    // Bytes in flight from which only the engine drives.
    AWAITED_BYTES = 1 << 23,  // in an await, which would poll for more than a millisecond
    POLLED_BYTES = 1 << 20,   // in a poll, which has other sources too
    BESIDE_BYTES = 1 << 18,   // in an await while another thread computes and needs the GIL
    WHOLE_BYTES = 1 << 15,    // longest data that are copied as a whole, from any memory
};

typedef struct Lane Lane;
typedef struct Issuer Issuer;

// A place in a program, as an instruction of a code object. A report computes the line. `code` is NULL if unknown.
typedef struct {
    PyObject *code;
    int instruction;
} origin;

// The ended operations of the lanes of one loop.
typedef struct {
    PyObject_HEAD
    _Atomic(core_op *) ended;    // operations whose `done` is due, the newest first; any thread pushes, one takes all
    _Atomic(core_op *) settled;  // ended operations of handles, the newest first
    // True if the end of an operation must wake the loop by `event`. False while a Python thread drives lanes, since
    // that thread checks afterwards, and after a wake-up that the loop has not handled yet.
    _Atomic bool sleeps;
    _Atomic bool wants;          // a lane waits for a segment
    _Atomic bool notified;       // the progress thread waits for no loop, until the loop has polled
    int event;
    core_doorbell *thread;       // of the loop's progress thread, in memory that `doorbell` keeps
    PyObject *doorbell;
    Py_ssize_t pending;          // operations whose `done` was not called yet
    int telling;                 // nested calls of `tell_all`
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
    Py_buffer *views;     // the block, the stage, and the block and the doorbell of each other rank
    PyObject **memories;  // of the other ranks
    PyObject *limbo;      // a list: memory of aborted operations that other ranks may still use; NULL while empty
    size_t count;
    uint64_t arena_bytes, ordinary_bytes;  // of inputs that other ranks accessed, and of copied inputs
    _Atomic unsigned drivers;  // threads that drive the lane without the GIL
    bool closed;
    Lane *next;
};

// The segments of this rank's memory that others can map, by number; never removed.
typedef struct {
    PyObject_HEAD
    struct segment_range {
        uintptr_t start, end;
    } *segments;
    unsigned count, told;  // the first `told` segments are published to the other ranks
} Segments;

// Returns the place of `nbytes` at `start`; its segment is CORE_NOWHERE if no segment has these bytes.
core_place segments_find(const Segments *, uintptr_t start, size_t nbytes);

// The parts of an input, in order.
typedef struct {
    const void *at[1 << CORE_MOST_LEVELS];
    long long versions[1 << CORE_MOST_LEVELS];  // when the call returned, or -1
} parts;

// A handle, the base type of `Handle` in Python.
typedef struct {
    PyObject_HEAD
    PyObject *weak;
    PyObject *progress, *op, *account, *status, *value, *traceback, *waiters, *callbacks, *event, *canceller, *expires,
        *late, *finisher, *keep, *fence, *parts, *name, *source, *tag, *version, *observer;
    long long seq;
    Py_ssize_t nbytes;
    origin called;  // the call
    char consumed, detached, looked_at, polled;
    char given_up;  // true if an await ended without the outcome
    char posted;    // true if the operation is withdrawn when the program drops the handle
    char writes;    // true if the result is in the caller's memory
    char listed;    // true if the lane's operation is among the pending operations of the communicator
    // While a lane runs the operation: the issuer, which keeps the handle alive, the plan, the tensors, and the core's
    // operation. `target` is the output, and `result` the value to return; both are NULL if equal to `tensor`. `out` is
    // the caller's argument, or NULL.
    Issuer *issuer;
    PyObject *plan, *tensor, *target, *result, *out;
    PyObject *memory[2];  // the storages of `tensor` and `target`, if the operation did not finish immediately
    PyObject *others, *others_memory;  // the parts of the input after `tensor`, a tuple, or NULL; their storages, a list, as above
    parts *parts_of;                   // NULL without `others`
    // The state of `tensor` and `target` when the call returned, to find writes of the program: their versions, or -1,
    // hashes of their forms, and the checksum of the memory that is only read, or 0.
    bool watched;
    long long versions[2];
    uint64_t forms[2], sum;
    core_op native;
} Handle;

// State of a loop's progress that awaits read; the base type of `Progress` in Python.
typedef struct {
    PyObject_HEAD
    PyObject *weak;
    double last_ran, looked_in_vain, spin_seconds;
    unsigned long thread;
    long long polls;
    char crowded, fair, counts_waits;
    PyObject *computing;  // a set: the computing threads
} Pacer;

// The bytes in flight.
typedef struct {
    PyObject_HEAD
    core_ranges writes, reads;
} Claims;

// The log of a communicator. A record is at its number modulo LOG_KEPT. Python objects are created only on demand,
// since the garbage collector would traverse all of them.
enum { LOG_KEPT = 4096 };
typedef struct {
    PyObject *what;
    origin called;
    uint64_t came;  // time of issue, in nanoseconds of core_now; 0 if times are not recorded
    uint64_t nbytes, polled;  // `polled`: nanoseconds of awaits that polled
} record;
// Operations before and after GAP nanoseconds without an operation are kept longer.
enum { GAP = 1000000, GAPS_KEPT = 2048 };
typedef struct {
    uint64_t seq;
    record kept;
} gap;
typedef struct {
    PyObject_HEAD
    long long seq;
    PyObject *awaited;
    PyObject *caller;  // the call to record: (code, instruction); None: the calling line
    char timed;  // true if times of issue are recorded
    gap *gaps;
    size_t gap_count;
    PyObject *totals;   // (operations, bytes, seconds) by kind, of all operations before `counted`; NULL: no metrics
    long long counted;
    long long full_at;  // number whose record would replace one that is not in `totals`; -1: no metrics
    record kept[LOG_KEPT];
} Log;

static inline uint64_t heavy_bytes(const Pacer *pacer) {
    return pacer->computing != NULL && PySet_Size(pacer->computing) > 0 ? BESIDE_BYTES : AWAITED_BYTES;
}

extern PyTypeObject *pacer_type, *lane_type, *claims_type, *log_type, *segments_type;
extern PyObject *status_pending, *status_returned;

// Returns the exchange functions of a type of torch's tensors, which stay valid; NULL with an exception set.
const dl_exchange *exchange_of(PyObject *tensor);

// Returns true if the storage of `tensor` ends after the last element. A program may have shrunk the storage.
bool has_memory(PyObject *tensor, uint64_t start, uint64_t nbytes);

// Returns true if torch negates the values of `tensor` when it reads them.
bool is_negated(PyObject *tensor);

// Returns the doorbell of a `Doorbell`, or NULL with an exception set.
core_doorbell *doorbell_of(PyObject *doorbell);

int doorbells_add(PyObject *module);
int form_add(PyObject *module);
int handle_add(PyObject *module);
int issue_add(PyObject *module);
int ledger_add(PyObject *module);
int method_add(PyObject *module);
int rings_add(PyObject *module);

// Fills `view` with writable memory of at least `least` bytes; false with an exception set.
bool memory_of(PyObject *buffer, Py_buffer *view, size_t least);

// Keeps the `memory` of an aborted operation as long as `lane` exists, if other ranks may still use the memory.
void lane_keep(Lane *lane, const core_op *, PyObject *memory);

// Claims [start, start + nbytes) for `owner`; returns NULL, or the conflicting range. `*failed` is true with an
// exception set.
const core_range *claims_acquire(Claims *, uintptr_t start, size_t nbytes, bool writes, PyObject *owner, bool *failed);
void claims_release(Claims *, uintptr_t start, size_t nbytes, bool writes);

// Reports an exception that must not undo an issue. A KeyboardInterrupt is raised again in later code.
void report_later(PyObject *where);

// Records the next operation.
void log_record(Log *, PyObject *what, origin, uint64_t nbytes);

// Records the time of the last operation, if times are recorded.
void log_came(Log *, uint64_t when);

// Returns (code, instruction), or None for an unknown origin.
PyObject *origin_pair(origin);

// Settles the handles of all ended operations; from any thread that has the GIL.
void settle_all(Completions *);

// Begin and end a drive of lanes by the calling thread: operations that end meanwhile do not wake the loop.
void drive_begin(Completions *);
void drive_end(Completions *);

// Lets the next write of another rank wake the loop in addition to the engine, unless only the engine drives.
void wait_for_word(Lane *);

// Ends the operation of a handle: releases its claims, and wakes the waiters.
void issuer_settle(Handle *);
Lane *issuer_lane(Issuer *);

// Issues an allreduce; returns the handle, or None if Python must issue the call.
PyObject *issuer_allreduce(PyObject *issuer, PyObject *tensor, PyObject *op, PyObject *impl);
Log *issuer_log(Issuer *);

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
