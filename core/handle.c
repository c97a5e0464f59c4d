// Awaiting: the state of a handle, and the fast path of an await that need not suspend.
#include "binding.h"

PyTypeObject *pacer_type;
static PyTypeObject *handle_type;
PyObject *status_pending, *status_returned;

static PyObject *s_spin, *s_spin_counted, *s_suspended, *s_suspended_counted, *s_yielding, *s_outcome, *s_dropped;

enum { LOOK = 20000 };            // nanoseconds that a thread polls before it releases the GIL
static const double FAIR = 1e-3;  // seconds after which an await yields to the loop once

// --- an iterator with an immediate result ------------------------------------------------------------------------

typedef struct {
    PyObject_HEAD
    PyObject *value;
} Ready;

static PyTypeObject *ready_type;

static void ready_dealloc(Ready *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->value);
    PyObject_Free(self);
    DECREF(type);
}

static PyObject *ready_next(Ready *self) {
    PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, self->value, NULL);
    if (stop != NULL) PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    return NULL;
}

static PySendResult ready_send(Ready *self, PyObject *sent, PyObject **result) {
    (void)sent;
    *result = self->value;
    Py_INCREF(*result);
    return PYGEN_RETURN;
}

static PyObject *ready_iter(PyObject *self) {
    Py_INCREF(self);
    return self;
}

static PyType_Slot ready_slots[] = {
    {Py_tp_dealloc, ready_dealloc}, {Py_tp_iter, ready_iter}, {Py_tp_iternext, ready_next}, {Py_am_send, ready_send}, {0},
};
static PyType_Spec ready_spec = {
    "aiodist._core.Ready", sizeof(Ready), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ready_slots,
};

static PyObject *ready(PyObject *value) {
    Ready *self = PyObject_New(Ready, ready_type);
    if (self == NULL) return NULL;
    Py_INCREF(value);
    self->value = value;
    return (PyObject *)self;
}

// --- handles -----------------------------------------------------------------------------------------------------

static PyObject *handle_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)args, (void)named;
    Handle *self = (Handle *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->status = status_pending;
    Py_XINCREF(status_pending);
    self->polled = 1;
    return (PyObject *)self;
}

static int handle_init(Handle *self, PyObject *args, PyObject *named) {
    static char *names[] = {"progress", "op", "seq", "nbytes", "origin", "account", "writes", NULL};
    PyObject *progress, *op, *called = NULL, *account = NULL;
    int writes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OO|LnOOp", names, &progress, &op, &self->seq, &self->nbytes, &called, &account,
                                     &writes))
        return -1;
    origin place = {NULL, 0};
    if (is_set(called) && !PyArg_ParseTuple(called, "Oi", &place.code, &place.instruction)) return -1;
    self->called = place;
    Py_INCREF(progress), Py_INCREF(op), Py_XINCREF(self->called.code), Py_XINCREF(account);
    self->progress = progress;
    self->op = op;
    self->account = account;
    self->writes = (char)writes;
    return 0;
}

// All objects that a handle refers to.
#define HANDLE_REFERENCES(self)                                                                                            \
    {                                                                                                                      \
        &self->progress, &self->op, &self->called.code, &self->account, &self->status, &self->value, &self->traceback,     \
            &self->waiters, &self->callbacks, &self->event, &self->canceller, &self->expires, &self->late, &self->finisher,\
            &self->keep, &self->fence, &self->parts, &self->name, &self->source, &self->tag, &self->version,               \
            &self->observer, &self->plan, &self->tensor, &self->target, &self->result, &self->out, &self->memory[0],       \
            &self->memory[1], &self->others, &self->others_memory                                                          \
    }

static int handle_traverse(Handle *self, visitproc visit, void *arg) {
    PyObject **const references[] = HANDLE_REFERENCES(self);
    for (size_t i = 0; i < sizeof references / sizeof *references; i++) Py_VISIT(*references[i]);
    Py_VISIT(Py_TYPE((PyObject *)self));
    return 0;
}

static int handle_clear(Handle *self) {
    PyObject **const references[] = HANDLE_REFERENCES(self);
    for (size_t i = 0; i < sizeof references / sizeof *references; i++) Py_CLEAR(*references[i]);
    return 0;
}

static void handle_finalize(Handle *self) {
    bool kept = self->status == status_pending && !self->posted;  // the operation keeps its handle until the end
    if (self->consumed || self->status == NULL || kept) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *result = PyObject_CallMethodObjArgs((PyObject *)self, s_dropped, NULL);
    if (result == NULL) PyErr_WriteUnraisable((PyObject *)self);
    Py_XDECREF(result);
    PyErr_Restore(type, value, traceback);
}

static void handle_dealloc(Handle *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    if (self->weak != NULL) PyObject_ClearWeakRefs((PyObject *)self);
    handle_clear(self);
    PyMem_Free(self->parts_of);
    freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(self);
    DECREF(type);
}

// Returns the time, in seconds, until which a starting await may poll. If many tasks await late operations, their polls
// would block the loop. So after a poll without success, an await polls only until FAIR after the loop's last run.
static double look_until(const Pacer *pacer, double now) {
    return (pacer->looked_in_vain > pacer->last_ran ? pacer->last_ran : now) + FAIR;
}

// Returns how long an await polls, in nanoseconds: about as long as a wake-up takes, which costs at most twice the
// optimum (Karlin et al. 1991, doi:10.1145/121132.286599). Wake-ups are slow while other processes use the cores, so
// the limit is FAIR. Ranks that outnumber the cores poll until then, since each poll lets another rank run; an engine
// that wakes takes a core from the ranks, which then are late for the next operation too.
static uint64_t looks_for(const Pacer *pacer, const core_engine *engine) {
    uint64_t least = (uint64_t)(pacer->spin_seconds * 1e9), most = (uint64_t)(FAIR * 1e9);
    uint64_t wakes_in = pacer->crowded ? most : core_engine_wakes_in(engine);
    bool alone = least > 0 && (pacer->computing == NULL || PySet_Size(pacer->computing) == 0);
    return !alone || wakes_in < least ? least : wakes_in < most ? wakes_in : most;
}

// Polls for a while; true if Python code must poll instead.
static bool spin(Handle *self, Pacer *pacer, uint64_t now) {
    Issuer *issuer = self->issuer;
    if (issuer == NULL) return true;
    Lane *lane = issuer_lane(issuer);
    Completions *completions = lane->completions;
    INCREF(issuer);  // settling releases the handle's reference, and the lane with it
    uint64_t began = now, spins = looks_for(pacer, lane->engine->engine), until = now + spins;
    uint64_t heavy = heavy_bytes(pacer), limit = (uint64_t)(look_until(pacer, (double)now * 1e-9) * 1e9);
    drive_begin(completions);
    while (true) {
        bool moved = core_lane_load(lane->lane) < heavy && core_lane_advance(lane->lane, SLICE);
        settle_all(completions);
        if (self->status != status_pending || self->issuer == NULL) break;
        now = core_lane_driven_at(lane->lane);
        if (moved) until = now + spins;
        if (now >= until || now >= limit) break;
        if (pacer->crowded) sched_yield();
        else core_relax();
    }
    drive_end(completions);
    Log *log = issuer_log(issuer);
    if (self->seq >= log->counted) log->kept[self->seq % LOG_KEPT].polled += now - began;
    if (self->status == status_pending) pacer->looked_in_vain = (double)now * 1e-9;
    // The engine continues the operations, and wakes the loop, unless another rank's write wakes the loop first.
    if (self->status == status_pending) wait_for_word(lane);
    if (core_lane_busy(lane->lane)) core_engine_notice(lane->engine->engine, lane->lane, true);
    DECREF(issuer);
    return self->status == status_pending && self->issuer == NULL;  // true if a program continues the operation
}

static PyObject *handle_await(Handle *self) {
    Pacer *pacer = (Pacer *)self->progress;
    uint64_t now = core_now();
    if (self->status == status_pending) {
        if (spin(self, pacer, now)) {
            PyObject *spun = PyObject_CallMethodObjArgs((PyObject *)pacer, pacer->counts_waits ? s_spin_counted : s_spin, self, NULL);
            if (spun == NULL) return NULL;
            Py_DECREF(spun);
        }
        if (self->status == status_pending)
            return PyObject_CallMethodObjArgs((PyObject *)self, pacer->counts_waits ? s_suspended_counted : s_suspended, NULL);
    }
    // Awaits that never suspend would starve the loop, so once a millisecond an await yields.
    if (pacer->fair && (double)now * 1e-9 - pacer->last_ran > FAIR && PyThread_get_thread_ident() == pacer->thread)
        return PyObject_CallMethodObjArgs((PyObject *)self, s_yielding, NULL);
    self->consumed = 1;
    if (self->status == status_returned) return ready(self->value == NULL ? Py_None : self->value);
    return PyObject_CallMethodObjArgs((PyObject *)self, s_outcome, NULL);  // raises
}

// Returns true if the handle is pending, after settling the ended operations of its lane.
static bool pending(Handle *self) {
    if (self->status == status_pending && self->issuer != NULL) settle_all(issuer_lane(self->issuer)->completions);
    return self->status == status_pending;
}

static PyObject *handle_done(Handle *self, PyObject *none) {
    (void)none;
    if (!pending(self)) Py_RETURN_TRUE;
    self->looked_at = 1;
    Py_RETURN_FALSE;
}

static PyObject *handle_is_pending(Handle *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(pending(self));
}

static PyObject *handle_origin(Handle *self, void *closure) {
    (void)closure;
    return origin_pair(self->called);
}

static PyObject *handle_in_lane(Handle *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(self->issuer != NULL);
}

// Drives the lane for a few microseconds with the GIL held: most small operations end in this time, and a release of
// the GIL costs more. Returns True if the operation has ended.
static PyObject *handle_look(Handle *self, PyObject *none) {
    (void)none;
    const Pacer *pacer = (const Pacer *)self->progress;
    if (!pending(self)) Py_RETURN_TRUE;
    Issuer *issuer = self->issuer;
    if (issuer == NULL || pacer->crowded) Py_RETURN_FALSE;
    Lane *lane = issuer_lane(issuer);
    if (lane->closed || lane->engine->engine == NULL) Py_RETURN_FALSE;  // see drive_alone
    uint64_t until = core_now() + LOOK, heavy = heavy_bytes(pacer);
    INCREF(issuer);  // settling releases the handle's reference, and the lane with it
    drive_begin(lane->completions);
    while (core_op_state(&self->native) == CORE_PENDING && core_lane_load(lane->lane) < heavy) {
        if (core_lane_advance(lane->lane, SLICE)) continue;
        if (core_now() >= until) break;
        core_relax();
    }
    drive_end(lane->completions);
    DECREF(issuer);
    return PyBool_FromLong(self->status != status_pending);
}

// Drives the lane for as long as an await would, without the GIL; true if the operation has ended.
static bool drive_alone(const Handle *self, Lane *lane) {
    const Pacer *pacer = (const Pacer *)self->progress;
    core_engine *engine = lane->engine->engine;  // NULL in a forked child, which must not drive its parent's lanes
    if (lane->closed || engine == NULL) return core_op_state(&self->native) != CORE_PENDING;
    uint64_t until = core_now() + looks_for(pacer, engine), heavy = heavy_bytes(pacer);
    bool crowded = pacer->crowded;
    atomic_fetch_add(&lane->drivers, 1);  // pairs with the check in lane_close
    drive_begin(lane->completions);
    Py_BEGIN_ALLOW_THREADS;
    while (core_op_state(&self->native) == CORE_PENDING && core_lane_load(lane->lane) < heavy) {
        bool moved = core_lane_advance(lane->lane, SLICE);
        if (core_now() >= until) break;  // operations on other lanes must not wait longer
        if (moved) continue;
        if (crowded) sched_yield();
        else core_relax();
    }
    atomic_fetch_sub(&lane->drivers, 1);
    Py_END_ALLOW_THREADS;
    drive_end(lane->completions);
    return core_op_state(&self->native) != CORE_PENDING;
}

static PyObject *sleep_for(Handle *self, PyObject *seconds, bool looks) {
    double limit = PyFloat_AsDouble(seconds);
    if (limit == -1 && PyErr_Occurred()) return NULL;
    Issuer *issuer = self->issuer;
    if (issuer != NULL) {
        Lane *lane = issuer_lane(issuer);
        INCREF(self), INCREF(issuer);  // another thread may settle the handle, which releases both
        if (!looks || !drive_alone(self, lane)) {
            core_engine_notice(lane->engine->engine, lane->lane, true);
            Py_BEGIN_ALLOW_THREADS;
            core_op_wait(&self->native, (uint64_t)(limit * 1e9) + 1);
            Py_END_ALLOW_THREADS;
            settle_all(lane->completions);
        }
        DECREF(issuer), DECREF(self);
    }
    return PyBool_FromLong(self->status != status_pending);
}

static PyObject *handle_sleep(Handle *self, PyObject *seconds) { return sleep_for(self, seconds, true); }

static PyObject *handle_rest(Handle *self, PyObject *seconds) { return sleep_for(self, seconds, false); }

// Names with an underscore are for `Operation`, the producer's side; users can only read the others.
#define OBJECT(name, field) OFFERS(name, T_OBJECT, Handle, field, 0, NULL)
#define SHOWN(name, type, field) OFFERS(name, type, Handle, field, READONLY, NULL)
static PyMemberDef handle_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Handle, weak), READONLY, NULL},
    SHOWN("op", T_OBJECT, op), SHOWN("seq", T_LONGLONG, seq), SHOWN("nbytes", T_PYSSIZET, nbytes),
    SHOWN("source", T_OBJECT, source), SHOWN("tag", T_OBJECT, tag), SHOWN("version", T_OBJECT, version),
    OBJECT("_op", op), OBJECT("_source", source), OBJECT("_tag", tag), OBJECT("_version", version),
    OBJECT("_progress", progress), OBJECT("_account", account),
    OBJECT("_status", status), OBJECT("_value", value), OBJECT("_traceback", traceback), OBJECT("_waiters", waiters),
    OBJECT("_callbacks", callbacks), OBJECT("_event", event), OBJECT("_canceller", canceller), OBJECT("_expires", expires),
    OBJECT("_late", late), OBJECT("_finisher", finisher), OBJECT("_keep", keep), OBJECT("_fence", fence),
    OBJECT("_parts", parts), OBJECT("_name", name), OBJECT("_observer", observer),
    OFFERS("_nbytes", T_PYSSIZET, Handle, nbytes, 0, NULL),
    OFFERS("_consumed", T_BOOL, Handle, consumed, 0, NULL), OFFERS("_detached", T_BOOL, Handle, detached, 0, NULL),
    OFFERS("_given_up", T_BOOL, Handle, given_up, 0, NULL), OFFERS("_posted", T_BOOL, Handle, posted, 0, NULL),
    OFFERS("_writes", T_BOOL, Handle, writes, 0, NULL),
    OFFERS("_looked_at", T_BOOL, Handle, looked_at, 0, NULL), OFFERS("_polled", T_BOOL, Handle, polled, 0, NULL),
    {0},
};
static PyMethodDef handle_methods[] = {
    {"done", (PyCFunction)handle_done, METH_NOARGS,
     "Return True if the operation has returned, raised or been withdrawn; from any thread.\n\n"
     "Reports of late ranks cover a receive that you poll with this method, unless the handle is detached."},
    {"_look", (PyCFunction)handle_look, METH_NOARGS, "Drive the lane for some microseconds, with the GIL; return True if the handle is done."},
    {"_sleep", (PyCFunction)handle_sleep, METH_O, "Block this thread until the lane has finished; return True if the handle is done."},
    {"_rest", (PyCFunction)handle_rest, METH_O, "As _sleep, but without driving the lane first."},
    {0},
};
static PyGetSetDef handle_getset[] = {
    {"_is_pending", (getter)handle_is_pending, NULL, "True until the handle is done; unlike `done()`, a read is no sign that the program waits.", NULL},
    {"_in_lane", (getter)handle_in_lane, NULL, "True while a lane runs the operation.", NULL},
    {"_origin", (getter)handle_origin, NULL, "Line that issued the operation, as (code, instruction); None if unknown.", NULL},
    {0},
};
static PyType_Slot handle_slots[] = {
    {Py_tp_doc, "The state of a handle, and the fast path of an await that need not suspend."},
    {Py_tp_new, handle_new}, {Py_tp_init, handle_init}, {Py_tp_dealloc, handle_dealloc}, {Py_tp_traverse, handle_traverse},
    {Py_tp_clear, handle_clear}, {Py_tp_finalize, handle_finalize}, {Py_tp_members, handle_members},
    {Py_tp_methods, handle_methods}, {Py_tp_getset, handle_getset}, {Py_am_await, handle_await}, {0},
};
static PyType_Spec handle_spec = {
    "aiodist._core.Handle", sizeof(Handle), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, handle_slots,
};

// --- the pace of a loop ------------------------------------------------------------------------------------------

static void pacer_dealloc(Pacer *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->weak != NULL) PyObject_ClearWeakRefs((PyObject *)self);
    Py_XDECREF(self->computing);
    freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(self);
    DECREF(type);
}

static PyMemberDef pacer_members[] = {
    OFFERS("computing", T_OBJECT, Pacer, computing, 0, "Numbers of the threads of host streams that compute now."),
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Pacer, weak), READONLY, NULL},
    OFFERS("last_ran", T_DOUBLE, Pacer, last_ran, 0, "Time of aiodist's last callback on the loop, in seconds of perf_counter."),
    OFFERS("looked_in_vain", T_DOUBLE, Pacer, looked_in_vain, 0, "Time of the last spin without success, in seconds of perf_counter."),
    OFFERS("spin_seconds", T_DOUBLE, Pacer, spin_seconds, 0, "Usual longest spin of an await, in seconds."),
    OFFERS("polls", T_LONGLONG, Pacer, polls, 0, "Number of polls for the loop."),
    OFFERS("crowded", T_BOOL, Pacer, crowded, 0, "True if ranks outnumber cores: a spin lets other threads run."),
    OFFERS("counts_waits", T_BOOL, Pacer, counts_waits, 0, "True if metrics count the time of awaits."),
    OFFERS("fair", T_BOOL, Pacer, fair, 0, "True lets awaits that never suspend yield now and then."),
    OFFERS("thread_id", T_ULONG, Pacer, thread, 0, "Number of the loop's thread."),
    {0},
};
static PyObject *pacer_look_until(Pacer *self, PyObject *now) {
    double seconds = PyFloat_AsDouble(now);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    double spun = seconds + self->spin_seconds, limit = look_until(self, seconds);
    return PyFloat_FromDouble(spun < limit ? spun : limit);
}

static PyMethodDef pacer_methods[] = {
    {"look_until", (PyCFunction)pacer_look_until, METH_O, "look_until(now): return the end of a spin that begins now."},
    {0},
};
static PyType_Slot pacer_slots[] = {
    {Py_tp_doc, "State of a loop's progress that awaits read."}, {Py_tp_dealloc, pacer_dealloc},
    {Py_tp_members, pacer_members}, {Py_tp_methods, pacer_methods}, {0},
};
static PyType_Spec pacer_spec = {
    "aiodist._core.Pacer", sizeof(Pacer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, pacer_slots,
};

static PyObject *set_statuses(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *pending, *returned;
    if (!PyArg_ParseTuple(args, "OO", &pending, &returned)) return NULL;
    Py_INCREF(pending), Py_INCREF(returned);
    status_pending = pending;
    status_returned = returned;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_statuses", set_statuses, METH_VARARGS, "set_statuses(pending, returned): set these two statuses."}, {0},
};

int handle_add(PyObject *module) {
    s_spin = PyUnicode_InternFromString("spin");
    s_spin_counted = PyUnicode_InternFromString("spin_counted");
    s_suspended = PyUnicode_InternFromString("_suspended");
    s_suspended_counted = PyUnicode_InternFromString("_suspended_counted");
    s_yielding = PyUnicode_InternFromString("_yielding");
    s_outcome = PyUnicode_InternFromString("_outcome");
    s_dropped = PyUnicode_InternFromString("_dropped");
    return !(ready_type = add_type(module, &ready_spec)) || !(handle_type = add_type(module, &handle_spec)) ||
                   !(pacer_type = add_type(module, &pacer_spec)) || PyModule_AddFunctions(module, functions) < 0
               ? -1 : 0;
}
