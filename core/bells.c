// What threads of Python sleep at.
#include "binding.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    core_bell *bell, *own;
    Py_buffer memory;
    uint32_t heard;
} Bell;

static PyObject *bell_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *memory = NULL;
    if (!PyArg_ParseTuple(args, "|O", &memory)) return NULL;
    Bell *self = (Bell *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    if (memory != NULL) {
        self->bell = memory_of(memory, &self->memory, sizeof(core_bell)) ? self->memory.buf : NULL;
    } else {
        self->bell = self->own = aligned_alloc(_Alignof(core_bell), sizeof(core_bell));
        if (self->own != NULL) memset(self->own, 0, sizeof(core_bell));
        else PyErr_NoMemory();
    }
    if (self->bell == NULL) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->heard = atomic_load(&self->bell->count);
    return (PyObject *)self;
}

static void bell_dealloc(Bell *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->memory.obj != NULL) PyBuffer_Release(&self->memory);
    free(self->own);
    PyObject_Free(self);
    DECREF(type);
}

static PyObject *bell_ring(Bell *self, PyObject *none) {
    (void)none;
    atomic_fetch_add(&self->bell->count, 1);
    if (atomic_load(&self->bell->sleep) != CORE_AWAKE) core_bell_ring(self->bell);
    Py_RETURN_NONE;
}

static PyObject *bell_call(Bell *self, PyObject *none) {
    (void)none;
    atomic_thread_fence(memory_order_seq_cst);  // what this rank has said is seen by one who goes to sleep just now
    if (atomic_load(&self->bell->sleep) == CORE_LISTENS) core_bell_ring(self->bell);
    Py_RETURN_NONE;
}

static PyObject *bell_wait(Bell *self, PyObject *args, PyObject *named) {
    static char *names[] = {"seconds", "for_all", NULL};
    PyObject *limit;
    int for_all = 1;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O|p", names, &limit, &for_all)) return NULL;
    double seconds = limit == Py_None ? 0 : PyFloat_AsDouble(limit);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    uint64_t nanoseconds = limit == Py_None ? 0 : seconds > 0 ? (uint64_t)(seconds * 1e9) + 1 : 1;
    atomic_store(&self->bell->sleep, for_all ? CORE_LISTENS : CORE_SLEEPS);
    if (atomic_load(&self->bell->count) == self->heard) {
        Py_BEGIN_ALLOW_THREADS;
        core_bell_wait(self->bell, self->heard, nanoseconds);
        Py_END_ALLOW_THREADS;
    }
    atomic_store(&self->bell->sleep, CORE_AWAKE);
    self->heard = atomic_load(&self->bell->count);
    Py_RETURN_NONE;
}

static PyMethodDef bell_methods[] = {
    {"ring", (PyCFunction)bell_ring, METH_NOARGS, "Wake the thread that waits; from any thread."},
    {"call", (PyCFunction)bell_call, METH_NOARGS, "Ring for another process: only where the owner waits for that too."},
    {"wait", (PyCFunction)(void (*)(void))bell_wait, METH_VARARGS | METH_KEYWORDS,
     "wait(seconds, for_all=True): return when it was rung, or after `seconds` (None: never).\n\n"
     "Unless it is `for_all` other processes need not ring."},
    {0},
};
static PyType_Slot bell_slots[] = {
    {Py_tp_doc, "Bell(memory): rung by anybody, heard by one thread; a ring that nobody waits for is heard by the next wait.\n\n"
                "Ringing one who is awake costs no system call. In `memory` of BELL_BYTES, zeros at first, it is of all "
                "processes that map it; without, of this one."},
    {Py_tp_new, bell_new}, {Py_tp_dealloc, bell_dealloc}, {Py_tp_methods, bell_methods}, {0},
};
static PyType_Spec bell_spec = {"aiodist._core.Bell", sizeof(Bell), 0, Py_TPFLAGS_DEFAULT, bell_slots};

int bells_add(PyObject *module) { return add_type(module, &bell_spec) == NULL ? -1 : 0; }
