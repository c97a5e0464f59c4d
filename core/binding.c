// The Python module `aiodist._core`. This file converts and owns objects; the other files have the algorithms.
//
// Written by hand instead of Cython: the limited API gives one wheel for all versions of Python, and the source shows
// the cost of an operation.
#include "binding.h"

#include <errno.h>
#include <unistd.h>

#include "files.h"
#include "kernels.h"
#include "rows.h"

// --- memory ------------------------------------------------------------------------------------------------------

bool memory_of(PyObject *buffer, Py_buffer *view, size_t least) {
    if (PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE) < 0) return false;
    if ((size_t)view->len >= least) return true;
    PyErr_Format(PyExc_ValueError, "memory of %zd bytes: expected at least %zu", view->len, least);
    PyBuffer_Release(view);
    return false;
}

typedef struct {
    PyObject_HEAD
    core_memory *memory;
    Py_buffer *views;
    size_t count;
    int event;
} Memory;

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)args, (void)named;
    Memory *self = (Memory *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->event = -1;
    if ((self->memory = core_memory_new()) != NULL) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return PyErr_NoMemory();
}

static void memory_dealloc(Memory *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    core_memory_free(self->memory);
    if (self->event >= 0) close(self->event);
    for (size_t i = 0; i < self->count; i++) PyBuffer_Release(&self->views[i]);
    PyMem_Free(self->views);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *memory_map(Memory *self, PyObject *args) {
    unsigned segment;
    PyObject *buffer;
    if (!PyArg_ParseTuple(args, "IO", &segment, &buffer)) return NULL;
    Py_buffer *views = PyMem_Realloc(self->views, (self->count + 1) * sizeof *views);
    if (views == NULL) return PyErr_NoMemory();
    self->views = views;
    Py_buffer *view = &views[self->count];
    if (!memory_of(buffer, view, 1)) return NULL;
    self->count++;
    if (core_memory_map(self->memory, segment, view->buf, (size_t)view->len) < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *memory_set_event(Memory *self, PyObject *event) {
    long given = PyLong_AsLong(event);
    if (given == -1 && PyErr_Occurred()) return NULL;
    if (self->event >= 0) return PyErr_Format(PyExc_ValueError, "the memory has an event already");
    self->event = (int)given;
    core_memory_set_event(self->memory, self->event);
    Py_RETURN_NONE;
}

static PyMethodDef memory_methods[] = {
    {"set_event", (PyCFunction)memory_set_event, METH_O, "set_event(event): own the eventfd of the rank's loop."},
    {"map", (PyCFunction)memory_map, METH_VARARGS, "map(segment, buffer): record the mapping of a segment, once."},
    {0},
};
static PyType_Slot memory_slots[] = {
    {Py_tp_doc, "The mapped segments of one rank's memory, by number."},
    {Py_tp_new, memory_new},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_methods, memory_methods},
    {0},
};
static PyType_Spec memory_spec = {"aiodist._core.Memory", sizeof(Memory), 0, Py_TPFLAGS_DEFAULT, memory_slots};

// --- the engine --------------------------------------------------------------------------------------------------

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *doorbell;
    double spin;
    if (!PyArg_ParseTuple(args, "Od", &doorbell, &spin)) return NULL;
    Engine *self = (Engine *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    if (memory_of(doorbell, &self->doorbell, sizeof(core_doorbell))) {
        self->engine = core_engine_start(self->doorbell.buf, (uint64_t)(spin * 1e9));
        if (self->engine != NULL) return (PyObject *)self;
        PyErr_SetString(PyExc_OSError, "no thread can be started");
    }
    Py_DECREF((PyObject *)self);
    return NULL;
}

static PyObject *engine_stop(Engine *self, PyObject *none) {
    (void)none;
    core_engine *engine = self->engine;
    self->engine = NULL;
    if (engine != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        core_engine_stop(engine);
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

static PyObject *engine_forget(Engine *self, PyObject *none) {
    (void)none;
    if (self->engine != NULL) core_engine_forget(self->engine);
    self->engine = NULL;
    Py_RETURN_NONE;
}

static void engine_dealloc(Engine *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->engine != NULL) core_engine_stop(self->engine);
    if (self->doorbell.obj != NULL) PyBuffer_Release(&self->doorbell);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *engine_spin(Engine *self, PyObject *seconds) {
    double spin = PyFloat_AsDouble(seconds);
    if (spin == -1 && PyErr_Occurred()) return NULL;
    if (self->engine != NULL) core_engine_spin(self->engine, (uint64_t)(spin * 1e9));
    Py_RETURN_NONE;
}

static PyMethodDef engine_methods[] = {
    {"spin", (PyCFunction)engine_spin, METH_O, "spin(seconds): set the time of polls before the thread sleeps."},
    {"stop", (PyCFunction)engine_stop, METH_NOARGS, "Stop the thread."},
    {"forget", (PyCFunction)engine_forget, METH_NOARGS, "In a forked child: let no thread drive the parent's lanes."},
    {0},
};
static PyType_Slot engine_slots[] = {
    {Py_tp_doc, "Engine(doorbell, spin): a thread that drives lanes while no other thread does; it sleeps after `spin` seconds in vain."},
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {0},
};
static PyType_Spec engine_spec = {"aiodist._core.Engine", sizeof(Engine), 0, Py_TPFLAGS_DEFAULT, engine_slots};

// --- ended operations --------------------------------------------------------------------------------------------

typedef struct {
    PyObject_HEAD
    core_op op;
    Lane *lane;
    PyObject *done, *keep;
    uint64_t *counts;
} Operation;

static void push(_Atomic(core_op *) *stack, core_op *op) {
    op->next = atomic_load_explicit(stack, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(stack, &op->next, op)) continue;
}

void wait_for_word(Lane *lane) {
    core_doorbell *doorbell = lane->engine->doorbell.buf;
    if (core_lane_busy(lane->lane) && core_lane_load(lane->lane) < POLLED_BYTES) atomic_store(&doorbell->loop_waits, true);
}

// Takes all operations of a stack, the oldest first.
static core_op *take(_Atomic(core_op *) *stack) {
    if (atomic_load_explicit(stack, memory_order_relaxed) == NULL) return NULL;
    core_op *op = atomic_exchange_explicit(stack, NULL, memory_order_acquire), *oldest = NULL;
    while (op != NULL) {
        core_op *older = op->next;
        op->next = oldest;
        oldest = op;
        op = older;
    }
    return oldest;
}

static void wake(Completions *self) {
    if (atomic_load(&self->sleeps) && atomic_exchange(&self->sleeps, false)) eventfd_write(self->event, 1);
}

// Called by the thread that drives a lane, which may not hold the GIL.
static void ended(void *context, core_op *op) {
    Completions *self = context;
    if (op == NULL) atomic_store(&self->wants, true);
    else push(op->direct ? &self->settled : &self->ended, op);
    // A program must continue, by the progress thread if the loop is busy.
    bool notices = (op == NULL || !op->direct) && atomic_load(&self->thread->loop_waits) && atomic_exchange(&self->thread->loop_waits, false);
    if (notices) atomic_store(&self->notified, true);
    wake(self);
    if (notices) core_doorbell_loop_woken(self->thread);
}

void settle_all(Completions *self) {
    for (core_op *op = take(&self->settled), *next; op != NULL; op = next) {
        next = op->next;
        issuer_settle(op->caller);
    }
}

void drive_begin(Completions *self) { atomic_store(&self->sleeps, false); }

void drive_end(Completions *self) {
    atomic_store(&self->sleeps, true);
    settle_all(self);
    // The engine may have ended more operations during the Python calls.
    if (atomic_load(&self->ended) != NULL || atomic_load(&self->wants)) wake(self);
}

static PyObject *completions_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *doorbell;
    if (!PyArg_ParseTuple(args, "O", &doorbell)) return NULL;
    core_doorbell *thread = doorbell_of(doorbell);
    Completions *self = thread == NULL ? NULL : (Completions *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(doorbell);
    self->doorbell = doorbell;
    self->thread = thread;
    self->event = -1;
    atomic_store(&self->sleeps, true);
    if ((self->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) >= 0) return (PyObject *)self;
    PyErr_SetFromErrno(PyExc_OSError);
    Py_DECREF((PyObject *)self);
    return NULL;
}

static void completions_dealloc(Completions *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->event >= 0) close(self->event);
    Py_XDECREF(self->doorbell);
    PyObject_Free(self);
    Py_DECREF(type);
}

void lane_keep(Lane *lane, const core_op *op, PyObject *memory) {
    uint32_t state = core_op_state(op);
    if ((state != CORE_ABANDONED && state != CORE_BROKEN) || op->in_at.segment == CORE_NOWHERE) return;
    if (lane->limbo == NULL) lane->limbo = PyList_New(0);
    if (lane->limbo == NULL || PyList_Append(lane->limbo, memory) < 0) PyErr_WriteUnraisable((PyObject *)lane);
}

// Calls `done` of an ended operation, and frees the operation. `sys.unraisablehook` gets an exception of `done`.
static void tell(Operation *o) {
    enum core_state state = core_op_state(&o->op);
    PyObject *done = o->done, *keep = o->keep, *error = NULL, *result = NULL;
    o->done = o->keep = NULL;
    o->lane->completions->pending--;
    lane_keep(o->lane, &o->op, keep);
    if (state == CORE_DONE) result = PyObject_CallFunctionObjArgs(done, Py_None, NULL);
    else if ((error = PyObject_CallFunction(o->lane->fail, "iI", (int)state, o->op.differs)) != NULL)
        result = PyObject_CallFunctionObjArgs(done, error, NULL);
    if (result == NULL) PyErr_WriteUnraisable(done);
    Py_XDECREF(error);
    Py_XDECREF(result);
    Py_DECREF(done);
    Py_XDECREF(keep);
    Py_DECREF((PyObject *)o);
}

// Calls `done` of all ended operations, in the order of their ends; returns their number.
static int tell_all(Completions *self) {
    int count = 0;
    settle_all(self);
    self->telling++;
    for (core_op *op = take(&self->ended), *next; op != NULL; op = next, count++) {
        next = op->next;
        tell(op->caller);
    }
    self->telling--;
    return count;
}

// Calls `map` for the segments that lanes wait for; false with an exception set.
static bool map_wanted(Completions *self) {
    if (!atomic_load_explicit(&self->wants, memory_order_relaxed)) return true;
    atomic_store(&self->wants, false);
    for (Lane *lane = self->lanes; lane != NULL; lane = lane->next) {
        unsigned rank;
        uint32_t segment;
        while (!core_lane_hold(lane->lane)) core_relax();  // at most for the duration of a step
        if (core_lane_wants(lane->lane, &rank, &segment)) {
            PyObject *mapped = PyObject_CallFunction(lane->map, "II", rank, (unsigned)segment);
            Py_XDECREF(mapped);
            core_lane_release(lane->lane);
            if (mapped == NULL) return false;
            core_engine_notice(lane->engine->engine, lane->lane, true);
        } else {
            core_lane_release(lane->lane);
        }
    }
    return true;
}

static PyObject *completions_poll(Completions *self, PyObject *seconds) {
    double limit = PyFloat_AsDouble(seconds);
    if (limit == -1 && PyErr_Occurred()) return NULL;
    uint64_t until = 0;
    int told;
    while (true) {
        if (!map_wanted(self)) return NULL;
        for (Lane *lane = self->lanes; lane != NULL; lane = lane->next)
            if (core_lane_busy(lane->lane) && core_lane_load(lane->lane) < POLLED_BYTES)
                core_lane_advance(lane->lane, SLICE);
        if ((told = tell_all(self)) > 0 || limit <= 0) break;
        uint64_t now = core_now();
        if (until == 0) until = now + (uint64_t)(limit * 1e9);
        if (now >= until) break;
    }
    return PyBool_FromLong(told);
}

// Returns False if an operation has ended already, or a segment is missing. The loop must then not sleep.
static PyObject *completions_sleep(Completions *self, PyObject *none) {
    (void)none;
    atomic_store(&self->sleeps, true);
    if (atomic_load(&self->ended) != NULL || atomic_load(&self->settled) != NULL || atomic_load(&self->wants)) Py_RETURN_FALSE;
    for (Lane *lane = self->lanes; lane != NULL; lane = lane->next) {
        if (!core_lane_busy(lane->lane)) continue;
        wait_for_word(lane);
        core_engine_notice(lane->engine->engine, lane->lane, true);
    }
    Py_RETURN_TRUE;
}

// Returns True if `poll` has work.
static PyObject *completions_woken(Completions *self, PyObject *none) {
    (void)none;
    eventfd_t value = 0;
    (void)eventfd_read(self->event, &value);
    drive_begin(self);
    for (Lane *lane = self->lanes; lane != NULL; lane = lane->next) {
        if (!core_lane_busy(lane->lane) || core_lane_load(lane->lane) >= POLLED_BYTES) continue;
        core_lane_advance(lane->lane, SLICE);  // another rank may have posted its part
        wait_for_word(lane);
    }
    drive_end(self);  // later ends wake the loop again
    bool notified = atomic_exchange(&self->notified, false);
    return PyBool_FromLong(self->pending > 0 || atomic_load(&self->wants) || notified || value >= MESSAGE_CAME);
}

static PyObject *completions_heavy(Completions *self, void *closure) {
    (void)closure;
    uint64_t load = 0;
    for (Lane *lane = self->lanes; lane != NULL; lane = lane->next) load += core_lane_load(lane->lane);
    return PyBool_FromLong(load >= POLLED_BYTES);
}

static PyObject *completions_tell(Completions *self, PyObject *none) {
    (void)none;
    return PyBool_FromLong(tell_all(self));
}

static PyMethodDef completions_methods[] = {
    {"tell", (PyCFunction)completions_tell, METH_NOARGS, "Call `done` of ended operations, without a poll."},
    {"poll", (PyCFunction)completions_poll, METH_O,
     "poll(seconds): drive the lanes for this time, or until an operation has ended; call `done` of ended operations."},
    {"sleep", (PyCFunction)completions_sleep, METH_NOARGS,
     "Make `event` readable at the next end, and wake the engine; return False if an operation has ended."},
    {"woken", (PyCFunction)completions_woken, METH_NOARGS,
     "Settle handles, since `event` was readable; return True if `poll` has more to do."},
    {0},
};
static PyMemberDef completions_members[] = {
    {"event", T_INT, offsetof(Completions, event), READONLY, "An eventfd, see `sleep`."},
    {"pending", T_PYSSIZET, offsetof(Completions, pending), READONLY, "Operations whose `done` was not called yet."},
    {"telling", T_INT, offsetof(Completions, telling), READONLY, "Positive while `done` of ended operations are called, in order."},
    {0},
};
static PyGetSetDef completions_getset[] = {
    {"heavy", (getter)completions_heavy, NULL, "True if many bytes are in flight: only the engine then drives.", NULL},
    {0},
};
static PyType_Slot completions_slots[] = {
    {Py_tp_doc, "Completions(doorbell): ended operations of the lanes of one loop, whose progress thread sleeps at `doorbell`; for one "
                "thread at a time."},
    {Py_tp_new, completions_new},
    {Py_tp_dealloc, completions_dealloc},
    {Py_tp_methods, completions_methods},
    {Py_tp_members, completions_members},
    {Py_tp_getset, completions_getset},
    {0},
};
static PyType_Spec completions_spec = {
    "aiodist._core.Completions", sizeof(Completions), 0, Py_TPFLAGS_DEFAULT, completions_slots,
};

// --- operations --------------------------------------------------------------------------------------------------

static void operation_dealloc(Operation *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->done);
    Py_XDECREF(self->keep);
    Py_XDECREF((PyObject *)self->lane);
    PyMem_Free(self->counts);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef operation_members[] = {
    {"met", T_ULONGLONG, offsetof(Operation, op) + offsetof(core_op, met), READONLY,
     "Union of the fingerprints of all ranks, once they have met."},
    {0},
};
static PyType_Slot operation_slots[] = {
    {Py_tp_doc, "One collective that was submitted to a lane."},
    {Py_tp_dealloc, operation_dealloc},
    {Py_tp_members, operation_members},
    {0},
};
static PyType_Spec operation_spec = {
    "aiodist._core.LaneOperation", sizeof(Operation), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, operation_slots,
};
static PyTypeObject *operation_type;
PyTypeObject *lane_type;

// Reads the counts of all ranks from a sequence; false with an exception set.
static bool read_counts(PyObject *given, uint64_t *counts, unsigned ranks) {
    if (PySequence_Size(given) != (Py_ssize_t)ranks) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "counts of %zd ranks: expected %u", PySequence_Size(given), ranks);
        return false;
    }
    for (unsigned q = 0; q < ranks; q++) {
        PyObject *item = PySequence_GetItem(given, (Py_ssize_t)q);
        if (item == NULL) return false;
        counts[q] = PyLong_AsUnsignedLongLong(item);
        Py_DECREF(item);
        if (PyErr_Occurred()) return false;
    }
    return true;
}

// --- lanes -------------------------------------------------------------------------------------------------------

static PyObject *lane_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    Completions *completions;
    Engine *engine;
    PyObject *block, *stage, *map, *fail;
    unsigned rank, ranks, segment;
    unsigned long long offset;
    int led;
    if (!PyArg_ParseTuple(args, "OOIIpOOIKOO", &completions, &engine, &rank, &ranks, &led, &block, &stage, &segment, &offset,
                          &map, &fail))
        return NULL;
    Lane *self = (Lane *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->rank = rank;
    self->ranks = ranks;
    self->views = PyMem_Calloc(2 + 2 * (size_t)ranks, sizeof *self->views);
    self->memories = PyMem_Calloc(ranks, sizeof *self->memories);
    if (self->views == NULL || self->memories == NULL) {
        PyErr_NoMemory();
    } else if (memory_of(block, &self->views[0], core_block_bytes()) && ++self->count &&
               memory_of(stage, &self->views[1], CORE_LEAST_STAGE_BYTES * (size_t)ranks) && ++self->count) {
        core_lane_options options = {
            .rank = rank, .ranks = ranks, .led = led, .block = self->views[0].buf, .stage = self->views[1].buf,
            .stage_bytes = (size_t)self->views[1].len, .stage_at = {segment, offset}, .ended = ended, .context = completions,
        };
        self->lane = core_lane_open(&options);
        if (self->lane != NULL && engine->engine != NULL && core_engine_add(engine->engine, self->lane) == 0) {
            Py_INCREF((PyObject *)completions), Py_INCREF((PyObject *)engine), Py_INCREF(map), Py_INCREF(fail);
            self->completions = completions;
            self->engine = engine;
            self->map = map;
            self->fail = fail;
            self->next = completions->lanes;
            completions->lanes = self;
            return (PyObject *)self;
        }
        PyErr_NoMemory();
    }
    Py_DECREF((PyObject *)self);
    return NULL;
}

// Detaches the lane from the drivers and releases its memory, after `abandon`; some `done` may not be called yet.
static PyObject *lane_close(Lane *self, PyObject *none) {
    (void)none;
    if (self->closed || self->completions == NULL) Py_RETURN_NONE;
    self->closed = true;
    while (atomic_load(&self->drivers) > 0) sched_yield();  // all operations have ended: the drivers leave soon
    if (self->engine->engine != NULL) core_engine_remove(self->engine->engine, self->lane);
    Lane **at = &self->completions->lanes;
    while (*at != NULL && *at != self) at = &(*at)->next;
    if (*at != NULL) *at = self->next;
    for (size_t i = 0; i < self->count; i++) PyBuffer_Release(&self->views[i]);
    self->count = 0;
    Py_RETURN_NONE;
}

// `fail` may refer to a raised error, whose traceback refers to the callers.
static int lane_traverse(Lane *self, visitproc visit, void *arg) {
    Py_VISIT(self->map);
    Py_VISIT(self->fail);
    Py_VISIT(self->limbo);
    Py_VISIT(Py_TYPE((PyObject *)self));
    return 0;
}

static int lane_clear(Lane *self) {
    Py_CLEAR(self->limbo);
    Py_CLEAR(self->map);
    Py_CLEAR(self->fail);
    return 0;
}

static void lane_dealloc(Lane *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    PyObject *closed = lane_close(self, NULL);
    Py_XDECREF(closed);
    if (self->lane != NULL) core_lane_close(self->lane);
    Py_XDECREF((PyObject *)self->completions);
    Py_XDECREF((PyObject *)self->engine);
    lane_clear(self);
    for (size_t i = 0; i < self->count; i++) PyBuffer_Release(&self->views[i]);
    for (unsigned q = 0; q < self->ranks && self->memories != NULL; q++) Py_XDECREF(self->memories[q]);
    PyMem_Free(self->views);
    PyMem_Free(self->memories);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static bool still_open(Lane *self) {
    if (self->closed) PyErr_SetString(PyExc_ValueError, "the lane is closed");
    return !self->closed;
}

static PyObject *lane_join(Lane *self, PyObject *args) {
    unsigned rank;
    PyObject *block, *memory, *doorbell;
    if (!still_open(self) || !PyArg_ParseTuple(args, "IOOO", &rank, &block, &memory, &doorbell)) return NULL;
    if (rank >= self->ranks || rank == self->rank || self->memories[rank] != NULL)
        return PyErr_Format(PyExc_ValueError, "rank %u: expected another one of %u, once", rank, self->ranks);
    Py_buffer *view = &self->views[self->count];
    if (!memory_of(block, view, core_block_bytes())) return NULL;
    self->count++;
    if (!memory_of(doorbell, view + 1, sizeof(core_doorbell))) return NULL;
    self->count++;
    Py_INCREF(memory);
    self->memories[rank] = memory;
    while (!core_lane_hold(self->lane)) core_relax();
    core_lane_join(self->lane, rank, view->buf, ((Memory *)memory)->memory, view[1].buf);
    core_lane_release(self->lane);
    core_engine_notice(self->engine->engine, self->lane, true);
    Py_RETURN_NONE;
}

static PyObject *lane_submit(Lane *self, PyObject *args) {
    PyObject *sent, *received, *done, *keep;
    unsigned char kind, dtype, reduction;
    unsigned root, segment;
    unsigned long long print, key, in, out, count, offset;
    if (!still_open(self) || !PyArg_ParseTuple(args, "bbbIKKKKKOOIKOO", &kind, &dtype, &reduction, &root, &print, &key, &in,
                                               &out, &count, &sent, &received, &segment, &offset, &done, &keep))
        return NULL;
    Operation *o = (Operation *)PyType_GenericAlloc(operation_type, 0);
    if (o == NULL) return NULL;
    uint64_t *counts = NULL;
    if (sent != Py_None) {
        counts = o->counts = PyMem_Calloc(2 * (size_t)self->ranks, sizeof *counts);
        if (counts == NULL) PyErr_NoMemory();
        else if (read_counts(sent, counts, self->ranks) && received != Py_None)
            read_counts(received, counts + self->ranks, self->ranks);
    }
    o->op = (core_op){
        .kind = kind, .dtype = dtype, .reduction = reduction, .root = root, .print = print, .key = key,
        .in = (void *)(uintptr_t)in, .out = (void *)(uintptr_t)out, .count = count, .sent = counts,
        .received = received == Py_None || counts == NULL ? NULL : counts + self->ranks, .in_at = {segment, offset},
        .caller = o,
    };
    Py_INCREF((PyObject *)self), Py_INCREF(done), Py_INCREF(keep);
    o->lane = self;
    o->done = done;
    o->keep = keep;
    if (PyErr_Occurred() || !core_op_valid(&o->op, self->ranks)) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "kind %d dtype %d op %d root %u: no such operation", kind, dtype, reduction, root);
        Py_DECREF((PyObject *)o);
        return NULL;
    }
    uint64_t nbytes = (kind == CORE_ALLGATHER ? counts[self->rank] : count) * core_itemsize(dtype);
    count_bytes(self, o->op.in_at, nbytes);
    self->completions->pending++;
    Py_INCREF((PyObject *)o);  // until its `done` is called
    core_lane_submit(self->lane, &o->op);
    bool heavy = core_lane_load(self->lane) >= POLLED_BYTES;
    if (!heavy) core_lane_advance(self->lane, SLICE);
    if (core_lane_busy(self->lane)) core_engine_notice(self->engine->engine, self->lane, core_lane_load(self->lane) > 0);
    return (PyObject *)o;
}

static PyObject *lane_stop(Lane *self, PyObject *key) {
    unsigned long long given = PyLong_AsUnsignedLongLong(key);
    if (PyErr_Occurred() || !still_open(self)) return NULL;
    core_lane_stop(self->lane, given);
    core_lane_advance(self->lane, SLICE);
    if (core_lane_busy(self->lane)) core_engine_notice(self->engine->engine, self->lane, false);
    Py_RETURN_NONE;
}

// Ends all operations in flight; the next `poll` calls their `done`.
static PyObject *lane_abandon(Lane *self, PyObject *none) {
    (void)none;
    if (!still_open(self)) return NULL;
    core_lane_abandon(self->lane);
    Py_RETURN_NONE;
}

static PyMethodDef lane_methods[] = {
    {"join", (PyCFunction)lane_join, METH_VARARGS,
     "join(rank, block, memory, doorbell): set the mapped block of another rank, its memory, its engine's doorbell."},
    {"submit", (PyCFunction)lane_submit, METH_VARARGS,
     "submit(kind, dtype, reduction, root, print, key, in, out, count, sent, received, segment, offset, done, keep): "
     "return the operation. `Completions.poll` calls `done(error)`; `keep` is kept alive until then."},
    {"stop", (PyCFunction)lane_stop, METH_O,
     "stop(key): take no part in further operations whose keys equal `key` above the low KEY_BITS."},
    {"abandon", (PyCFunction)lane_abandon, METH_NOARGS, "Abandon the lane: operations in flight end with an error."},
    {"close", (PyCFunction)lane_close, METH_NOARGS, "Let no thread drive the lane any more, and release its memory."},
    {0},
};
static PyObject *lane_lent_bytes(Lane *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(core_lane_lent(self->lane));
}

static PyGetSetDef lane_getset[] = {
    {"lent_bytes", (getter)lane_lent_bytes, NULL, "Bytes that this rank has copied for others to read.", NULL},
    {0},
};
static PyMemberDef lane_members[] = {
    {"arena_bytes", T_ULONGLONG, offsetof(Lane, arena_bytes), READONLY, "Bytes of inputs that other ranks accessed."},
    {"ordinary_bytes", T_ULONGLONG, offsetof(Lane, ordinary_bytes), READONLY, "Bytes of copied inputs."},
    {0},
};
static PyType_Slot lane_slots[] = {
    {Py_tp_doc,
     "Lane(completions, engine, rank, ranks, led, block, stage, segment, offset, map, fail): an ordered sequence of "
     "collectives. `map(rank, segment)` maps a wanted segment; `fail(state, rank)` returns the error of an operation."},
    {Py_tp_new, lane_new},
    {Py_tp_dealloc, lane_dealloc},
    {Py_tp_traverse, lane_traverse},
    {Py_tp_clear, lane_clear},
    {Py_tp_methods, lane_methods},
    {Py_tp_members, lane_members},
    {Py_tp_getset, lane_getset},
    {0},
};
static PyType_Spec lane_spec = {
    "aiodist._core.Lane", sizeof(Lane), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, lane_slots,
};

// --- the module --------------------------------------------------------------------------------------------------

static PyObject *kernels(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyUnicode_FromString(core_kernels_level());
}

// Appends (frame, line) of each frame from `frame` to the outermost; steals `frame`; false with an exception set.
static bool walk(PyObject *found, PyObject *frame) {
    while (frame != NULL && frame != Py_None) {
        PyObject *line = PyObject_GetAttrString(frame, "f_lineno"), *back = PyObject_GetAttrString(frame, "f_back");
        PyObject *one = line == NULL || back == NULL ? NULL : PyTuple_Pack(2, frame, line);
        bool failed = one == NULL || PyList_Append(found, one) < 0;
        Py_XDECREF(one), Py_XDECREF(line), Py_DECREF(frame);
        frame = back;
        if (failed) break;
    }
    Py_XDECREF(frame);
    return !PyErr_Occurred();
}

// No other thread runs during this call, so all frames are of one moment. The garbage collector is disabled: before
// Python 3.12 an allocation may run it, and a destructor could release the GIL, so that the current frame might end.
static PyObject *frames_of_thread(PyObject *module, PyObject *thread) {
    (void)module;
    int collects = PyGC_Disable();
    PyObject *current = PySys_GetObject("_current_frames"), *frames = current == NULL ? NULL : PyObject_CallNoArgs(current);
    PyObject *found = frames == NULL ? NULL : PyList_New(0);
    if (found != NULL) {
        PyObject *frame = PyDict_GetItemWithError(frames, thread);
        Py_XINCREF(frame);
        if (PyErr_Occurred() || !walk(found, frame) || PyList_Reverse(found) < 0) Py_CLEAR(found);
    }
    Py_XDECREF(frames);
    if (collects) PyGC_Enable();
    return found;
}

static PyObject *write_checked(PyObject *module, PyObject *args) {
    (void)module;
    int fd, error = 0;
    Py_buffer memory;
    PyObject *parts;
    if (!PyArg_ParseTuple(args, "iw*O!", &fd, &memory, &PyList_Type, &parts)) return NULL;
    Py_ssize_t count = PyList_Size(parts);
    core_part *found = PyMem_Calloc((size_t)count + 1, sizeof *found);
    PyObject *sums = found == NULL ? PyErr_NoMemory() : NULL;
    if (found == NULL) goto end;
    if (memory.len < 2) {
        PyErr_Format(PyExc_ValueError, "memory of %zd bytes: expected two halves", memory.len);
        goto end;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long address, nbytes;
        unsigned crc;
        if (!PyArg_ParseTuple(PyList_GetItem(parts, i), "KKI", &address, &nbytes, &crc)) goto end;
        found[i] = (core_part){(const void *)(uintptr_t)address, (size_t)nbytes, crc};
    }
    Py_BEGIN_ALLOW_THREADS;
    error = core_write_checked(fd, memory.buf, (size_t)memory.len / 2, found, (size_t)count);
    Py_END_ALLOW_THREADS;
    if (error != 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        goto end;
    }
    sums = PyList_New(count);
    for (Py_ssize_t i = 0; sums != NULL && i < count; i++) {
        PyObject *sum = PyLong_FromUnsignedLong(found[i].crc);
        if (sum == NULL || PyList_SetItem(sums, i, sum)) Py_CLEAR(sums);
    }
end:
    PyMem_Free(found);
    PyBuffer_Release(&memory);
    return sums;
}

static PyObject *rows_find(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long cells, mask, ids, count, slots;
    if (!PyArg_ParseTuple(args, "KKKKK", &cells, &mask, &ids, &count, &slots)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    core_rows_find((const core_cell *)(uintptr_t)cells, mask, (const int64_t *)(uintptr_t)ids, (size_t)count,
                   (int64_t *)(uintptr_t)slots);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *rows_add(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long cells, mask, ids, count, first;
    if (!PyArg_ParseTuple(args, "KKKKK", &cells, &mask, &ids, &count, &first)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    core_rows_add((core_cell *)(uintptr_t)cells, mask, (const int64_t *)(uintptr_t)ids, (size_t)count, (int64_t)first);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"kernels", kernels, METH_NOARGS, "Return the kernels that this processor runs: baseline, avx2 or avx512."},
    {"frames_of_thread", frames_of_thread, METH_O,
     "frames_of_thread(thread_id): return a thread's frames at one moment, the outermost first, each with its line; "
     "an empty list if it runs no Python."},
    {"write_checked", write_checked, METH_VARARGS,
     "write_checked(fd, memory, [(address, nbytes, crc), ...]): write these bytes in order, through the two halves of "
     "`memory` and without the GIL; return, for each part, the CRC-32 `crc` continued by its bytes."},
    {"rows_find", rows_find, METH_VARARGS,
     "rows_find(cells, mask, ids, count, slots): write the slot of each id, or -1, by addresses, without the GIL."},
    {"rows_add", rows_add, METH_VARARGS,
     "rows_add(cells, mask, ids, count, first): add distinct new ids with slots from `first` on, without the GIL."},
    {0},
};

static int fill(PyObject *module) {
    if (lane_type != NULL) {
        PyErr_SetString(PyExc_ImportError, "aiodist._core is for one interpreter of a process");
        return -1;
    }
    if (doorbells_add(module) || handle_add(module) || ledger_add(module) || issue_add(module) || method_add(module) ||
        form_add(module) || rings_add(module) ||
        !add_type(module, &memory_spec) || !add_type(module, &engine_spec) ||
        !add_type(module, &completions_spec) || !(operation_type = add_type(module, &operation_spec)) ||
        !(lane_type = add_type(module, &lane_spec)))
        return -1;
    return PyModule_AddIntConstant(module, "BLOCK_BYTES", (long)core_block_bytes()) ||
                   PyModule_AddIntConstant(module, "DOORBELL_BYTES", (long)sizeof(core_doorbell)) ||
                   PyModule_AddIntConstant(module, "STAGE_BYTES_PER_RANK", CORE_LEAST_STAGE_BYTES) ||
                   PyModule_AddIntConstant(module, "KEY_BITS", CORE_KEY_BITS) ||
                   PyModule_AddIntConstant(module, "DIFFERENT", CORE_DIFFERENT) ||
                   PyModule_AddIntConstant(module, "ABANDONED", CORE_ABANDONED) ||
                   PyModule_AddIntConstant(module, "STOPPED", CORE_STOPPED) ||
                   PyModule_AddIntConstant(module, "UNLIKE", CORE_UNLIKE)
               ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)fill}, {0}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "aiodist._core", .m_doc = "The compiled core: collectives of a host.",
    .m_size = 0, .m_methods = functions, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
