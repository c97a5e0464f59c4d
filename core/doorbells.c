// Doorbells of Python threads.
#include "binding.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    core_doorbell *doorbell, *own;
    Py_buffer memory;
    uint32_t heard;
} Doorbell;

static PyTypeObject *doorbell_type;

static PyObject *doorbell_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *memory = NULL;
    if (!PyArg_ParseTuple(args, "|O", &memory)) return NULL;
    Doorbell *self = (Doorbell *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    if (memory != NULL) {
        self->doorbell = memory_of(memory, &self->memory, sizeof(core_doorbell)) ? self->memory.buf : NULL;
    } else {
        self->doorbell = self->own = aligned_alloc(_Alignof(core_doorbell), sizeof(core_doorbell));
        if (self->own != NULL) memset(self->own, 0, sizeof(core_doorbell));
        else PyErr_NoMemory();
    }
    if (self->doorbell == NULL) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->heard = atomic_load(&self->doorbell->count);
    return (PyObject *)self;
}

static void doorbell_dealloc(Doorbell *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->memory.obj != NULL) PyBuffer_Release(&self->memory);
    free(self->own);
    PyObject_Free(self);
    DECREF(type);
}

static PyObject *doorbell_ring(Doorbell *self, PyObject *none) {
    (void)none;
    atomic_fetch_add(&self->doorbell->count, 1);
    if (atomic_load(&self->doorbell->sleep) != CORE_AWAKE) core_doorbell_ring(self->doorbell);
    Py_RETURN_NONE;
}

static PyObject *doorbell_call(Doorbell *self, PyObject *args) {
    int event = -1;
    if (!PyArg_ParseTuple(args, "|i", &event)) return NULL;
    atomic_thread_fence(memory_order_seq_cst);  // an owner that is about to sleep sees the earlier writes of this rank
    uint32_t sleep = atomic_load(&self->doorbell->sleep);
    if (event >= 0 && atomic_load(&self->doorbell->loop_waits) && atomic_exchange(&self->doorbell->loop_waits, false)) {
        (void)eventfd_write(event, MESSAGE_CAME);  // if it fails, the owner's thread looks within a millisecond
        core_doorbell_loop_woken(self->doorbell);
    } else if (sleep == CORE_LISTENS || sleep == CORE_RESTS) {
        core_doorbell_ring(self->doorbell);
    }
    Py_RETURN_NONE;
}

static PyObject *doorbell_set_loop_waits(Doorbell *self, PyObject *waits) {
    int value = PyObject_IsTrue(waits);
    if (value < 0) return NULL;
    atomic_store(&self->doorbell->loop_waits, value != 0);
    atomic_thread_fence(memory_order_seq_cst);  // pairs with the fence of a `call`: the owner looks for messages next
    if (!value) core_doorbell_loop_woken(self->doorbell);
    Py_RETURN_NONE;
}

static PyObject *doorbell_wait(Doorbell *self, PyObject *args, PyObject *named) {
    static char *names[] = {"seconds", "for_all", "times", "rest", NULL};
    PyObject *limit;
    int for_all = 1, times = 1;
    double rest = 0;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O|pid", names, &limit, &for_all, &times, &rest)) return NULL;
    double seconds = limit == Py_None ? 0 : PyFloat_AsDouble(limit);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    uint64_t nanoseconds = limit == Py_None ? 0 : seconds > 0 ? (uint64_t)(seconds * 1e9) + 1 : 1;
    atomic_store(&self->doorbell->sleep, for_all ? CORE_LISTENS : CORE_SLEEPS);
    if (atomic_load(&self->doorbell->count) == self->heard) {
        Py_BEGIN_ALLOW_THREADS;
        do core_doorbell_wait(self->doorbell, self->heard, nanoseconds);
        while (--times > 0 && atomic_load(&self->doorbell->count) == self->heard && atomic_load(&self->doorbell->loop_waits));
        if (rest > 0 && atomic_load(&self->doorbell->count) == self->heard)
            core_doorbell_rest(self->doorbell, self->heard, (uint64_t)(rest * 1e9), nanoseconds);
        Py_END_ALLOW_THREADS;
    }
    atomic_store(&self->doorbell->sleep, CORE_AWAKE);
    self->heard = atomic_load(&self->doorbell->count);
    Py_RETURN_NONE;
}

static PyMethodDef doorbell_methods[] = {
    {"ring", (PyCFunction)doorbell_ring, METH_NOARGS, "Wake the thread that waits; from any thread."},
    {"call", (PyCFunction)doorbell_call, METH_VARARGS,
     "call(event=-1): from another process, write the `event` of the owner's loop if the loop waits, once; else ring if "
     "the owner waits for other processes too."},
    {"set_loop_waits", (PyCFunction)doorbell_set_loop_waits, METH_O,
     "set_loop_waits(waits): let the next `call` write the event of the owner's loop, or not."},
    {"wait", (PyCFunction)(void (*)(void))doorbell_wait, METH_VARARGS | METH_KEYWORDS,
     "wait(seconds, for_all=True, times=1, rest=0.0): return after a ring, or after `seconds`; None is no limit.\n\n"
     "True for `for_all` lets other processes ring too. Without a ring, wait up to `times` times while the loop waits, and "
     "then for `rest` seconds, or until `seconds` after the loop was woken."},
    {0},
};
static PyType_Slot doorbell_slots[] = {
    {Py_tp_doc, "Doorbell(memory): any thread rings, one thread waits; a wait after a missed ring ends immediately.\n\n"
    "A ring costs no system call if the thread is awake. All processes that map `memory`, of DOORBELL_BYTES "
    "zeros, share the doorbell. Without `memory`, it belongs to this process alone."},
    {Py_tp_new, doorbell_new}, {Py_tp_dealloc, doorbell_dealloc}, {Py_tp_methods, doorbell_methods}, {0},
};
static PyType_Spec doorbell_spec = {"aiodist._core.Doorbell", sizeof(Doorbell), 0, Py_TPFLAGS_DEFAULT, doorbell_slots};

core_doorbell *doorbell_of(PyObject *doorbell) {
    if (PyObject_TypeCheck(doorbell, doorbell_type)) return ((Doorbell *)doorbell)->doorbell;
    PyErr_SetString(PyExc_TypeError, "expected a Doorbell");
    return NULL;
}

int doorbells_add(PyObject *module) { return (doorbell_type = add_type(module, &doorbell_spec)) == NULL ? -1 : 0; }
