// The rings between this rank and another one, for Python.
#include "binding.h"
#include "ring.h"

#include <string.h>

enum { MINE, THEIRS, OUT, IN, VIEWS };

typedef struct {
    PyObject_HEAD
    core_rings rings;
    core_record record;  // what `first` returned
    const void *data;
    Py_buffer views[VIEWS];
} Rings;

static PyTypeObject *rings_type;

static PyObject *rings_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *mine;
    unsigned long long nbytes;
    if (!PyArg_ParseTuple(args, "OK", &mine, &nbytes)) return NULL;
    if (nbytes == 0 || nbytes % CORE_LINE != 0)
        return PyErr_Format(PyExc_ValueError, "rings of %llu bytes: expected a multiple of %d", nbytes, CORE_LINE);
    Rings *self = (Rings *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    if (!memory_of(mine, &self->views[MINE], sizeof(core_numbers))) {
        DECREF(self);
        return NULL;
    }
    self->rings = (core_rings){.mine = self->views[MINE].buf, .nbytes = nbytes};
    return (PyObject *)self;
}

static void rings_dealloc(Rings *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (int i = 0; i < VIEWS; i++)
        if (self->views[i].obj != NULL) PyBuffer_Release(&self->views[i]);
    PyObject_Free(self);
    DECREF(type);
}

// Takes memory of the other rank, or this one's ring, once.
static bool takes(Rings *self, int which, PyObject *memory, size_t least) {
    if (self->views[which].obj == NULL) return memory_of(memory, &self->views[which], least);
    PyErr_SetString(PyExc_RuntimeError, "the memory is set already");
    return false;
}

static PyObject *rings_meet(Rings *self, PyObject *numbers) {
    if (!takes(self, THEIRS, numbers, sizeof(core_numbers))) return NULL;
    self->rings.theirs = self->views[THEIRS].buf;
    Py_RETURN_NONE;
}

static PyObject *rings_open(Rings *self, PyObject *args) {
    PyObject *memory;
    unsigned long long segment, offset;
    if (!PyArg_ParseTuple(args, "OKK", &memory, &segment, &offset)) return NULL;
    if (!takes(self, OUT, memory, self->rings.nbytes)) return NULL;
    self->rings.out = self->views[OUT].buf;
    atomic_store(&self->rings.mine->segment, segment);
    atomic_store(&self->rings.mine->offset, offset);
    Py_RETURN_NONE;
}

static PyObject *rings_map(Rings *self, PyObject *memory) {
    if (!takes(self, IN, memory, self->rings.nbytes)) return NULL;
    self->rings.in = self->views[IN].buf;
    Py_RETURN_NONE;
}

static PyObject *rings_put(Rings *self, PyObject *args) {
    PyObject *data = NULL;
    unsigned long long size = 0;
    long long kind, comm, tag, number, nbytes, segment, offset;
    if (!PyArg_ParseTuple(args, "LLLLLLL|KO", &kind, &comm, &tag, &number, &nbytes, &segment, &offset, &size, &data)) return NULL;
    if (self->rings.out == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "there is no ring: expected open() before put()");
        return NULL;
    }
    core_record r = {kind, comm, tag, number, nbytes, segment, offset, size};
    if (data == NULL || PyLong_Check(data)) {
        const void *at = data == NULL ? NULL : PyLong_AsVoidPtr(data);
        return PyErr_Occurred() ? NULL : PyBool_FromLong(core_ring_put(&self->rings, &r, at));
    }
    Py_buffer view;
    if (!memory_of(data, &view, size)) return NULL;
    bool fits = core_ring_put(&self->rings, &r, view.buf);
    PyBuffer_Release(&view);
    return PyBool_FromLong(fits);
}

static PyObject *rings_first(Rings *self, PyObject *none) {
    (void)none;
    core_record *r = &self->record;
    int found = self->rings.in == NULL || self->rings.theirs == NULL ? 0 : core_ring_first(&self->rings, r, &self->data);
    if (found == 0) Py_RETURN_NONE;
    if (found > 0)
        return Py_BuildValue("LLLLLLLK", (long long)r->kind, (long long)r->comm, (long long)r->tag, (long long)r->number,
                             (long long)r->nbytes, (long long)r->segment, (long long)r->offset, (unsigned long long)r->size);
    PyErr_SetString(PyExc_ValueError, "what the other rank wrote into its ring makes no sense: expected records");
    return NULL;
}

// Returns true if `first` has returned a record that was not taken; else false with an exception set.
static bool at_record(const Rings *self) {
    if (self->rings.need != 0) return true;
    PyErr_SetString(PyExc_RuntimeError, "there is no record: expected first() before");
    return false;
}

static PyObject *rings_copy(Rings *self, PyObject *to) {
    void *into = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(to);
    if (PyErr_Occurred() || !at_record(self)) return NULL;
    if (self->record.size) memcpy(into, self->data, self->record.size);
    Py_RETURN_NONE;
}

static PyObject *rings_data(Rings *self, PyObject *none) {
    (void)none;
    return at_record(self) ? PyBytes_FromStringAndSize(self->data, (Py_ssize_t)self->record.size) : NULL;
}

static PyObject *rings_take(Rings *self, PyObject *none) {
    (void)none;
    if (!at_record(self)) return NULL;
    core_ring_take(&self->rings);
    Py_RETURN_NONE;
}

// Releases the record that `first` returned, and counts `nbytes` of short messages.
static PyObject *rings_take_data(Rings *self, PyObject *nbytes) {
    unsigned long long count = PyLong_AsUnsignedLongLong(nbytes);
    if (PyErr_Occurred() || !at_record(self)) return NULL;
    PyObject *data = PyByteArray_FromStringAndSize(self->data, (Py_ssize_t)self->record.size);
    if (data == NULL) return NULL;
    core_ring_take(&self->rings);
    atomic_fetch_add_explicit(&self->rings.mine->returned, count, memory_order_relaxed);
    return data;
}

static PyObject *rings_give_back(Rings *self, PyObject *nbytes) {
    unsigned long long count = PyLong_AsUnsignedLongLong(nbytes);
    if (PyErr_Occurred()) return NULL;
    atomic_fetch_add_explicit(&self->rings.mine->returned, count, memory_order_relaxed);
    Py_RETURN_NONE;
}

static PyObject *rings_drain(Rings *self, PyObject *none) {
    (void)none;
    atomic_fetch_add_explicit(&self->rings.mine->drained, 1, memory_order_release);  // the chunk was read before
    Py_RETURN_NONE;
}

static PyObject *rings_arrived(Rings *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(core_ring_arrived(&self->rings));
}

// The number of the other rank at `offset` of a core_numbers.
static PyObject *rings_theirs(Rings *self, void *offset) {
    const core_numbers *theirs = self->rings.theirs;
    if (theirs == NULL) return PyLong_FromLong(0);
    const _Atomic uint64_t *number = (const _Atomic uint64_t *)((const char *)theirs + (uintptr_t)offset);
    return PyLong_FromUnsignedLongLong(atomic_load_explicit(number, memory_order_acquire));
}

static PyObject *rings_fill(Rings *self, void *closure) {
    (void)closure;
    if (self->rings.theirs == NULL) return PyLong_FromLong(0);
    return PyLong_FromUnsignedLongLong(atomic_load(&self->rings.theirs->sent) - atomic_load(&self->rings.mine->taken));
}

static PyObject *rings_met(Rings *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(self->rings.theirs != NULL);
}

static PyObject *rings_is_open(Rings *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(self->rings.out != NULL);
}

static PyObject *rings_is_mapped(Rings *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(self->rings.in != NULL);
}

static PyObject *arrived(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *all;
    double until;
    if (!PyArg_ParseTuple(args, "O!d", &PyTuple_Type, &all, &until)) return NULL;
    Py_ssize_t count = PyTuple_Size(all);
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyObject_TypeCheck(PyTuple_GetItem(all, i), rings_type)) {
            PyErr_SetString(PyExc_TypeError, "expected a tuple of Rings");
            return NULL;
        }
    do {
        for (Py_ssize_t i = 0; i < count; i++)
            if (core_ring_arrived(&((Rings *)PyTuple_GetItem(all, i))->rings)) Py_RETURN_TRUE;
        core_relax();
    } while ((double)core_now() * 1e-9 < until);
    Py_RETURN_FALSE;
}

#define THEIR(name, field, doc) {name, (getter)rings_theirs, NULL, doc, (void *)offsetof(core_numbers, field)}
static PyGetSetDef rings_getset[] = {
    {"arrived", (getter)rings_arrived, NULL, "True if there is a record to read.", NULL},
    {"fill", (getter)rings_fill, NULL, "Bytes of unread records in the other rank's ring.", NULL},
    {"met", (getter)rings_met, NULL, "True if the other rank's numbers are known.", NULL},
    {"is_open", (getter)rings_is_open, NULL, "True if this rank has a ring.", NULL},
    {"is_mapped", (getter)rings_is_mapped, NULL, "True if the other rank's ring is mapped.", NULL},
    THEIR("returned", returned, "Bytes of short messages that the other rank has received."),
    THEIR("drained", drained, "Number of chunks that the other rank has copied."),
    THEIR("segment", segment, "Segment of the other rank's ring."),
    THEIR("offset", offset, "Offset of the other rank's ring in its segment, in bytes."),
    {0},
};
static PyMethodDef rings_methods[] = {
    {"meet", (PyCFunction)rings_meet, METH_O, "meet(numbers): set the other rank's numbers."},
    {"open", (PyCFunction)rings_open, METH_VARARGS, "open(memory, segment, offset): set this rank's ring and its place."},
    {"map", (PyCFunction)rings_map, METH_O, "map(memory): set the other rank's ring."},
    {"put", (PyCFunction)rings_put, METH_VARARGS,
     "put(kind, comm, tag, number, nbytes, segment, offset, size=0, data=0): write a record, and `size` bytes of "
     "`data`, a buffer or an address; return False if there is no room now."},
    {"first", (PyCFunction)rings_first, METH_NOARGS,
     "Return the fields of the oldest record, None if there is none; raise ValueError for an invalid record."},
    {"copy", (PyCFunction)rings_copy, METH_O, "copy(address): copy the data of the record that `first` returned."},
    {"data", (PyCFunction)rings_data, METH_NOARGS, "Return the data of the record that `first` returned."},
    {"take", (PyCFunction)rings_take, METH_NOARGS, "Release the record that `first` returned."},
    {"take_data", (PyCFunction)rings_take_data, METH_O,
     "take_data(nbytes): `data` as a bytearray, `take` and `give_back(nbytes)` in one call."},
    {"give_back", (PyCFunction)rings_give_back, METH_O, "give_back(nbytes): count received bytes of short messages."},
    {"drain", (PyCFunction)rings_drain, METH_NOARGS, "Count a copied chunk."},
    {0},
};
static PyType_Slot rings_slots[] = {
    {Py_tp_doc, "Rings(numbers, nbytes): the two rings between this rank and another one, of `nbytes` each."},
    {Py_tp_new, rings_new}, {Py_tp_dealloc, rings_dealloc}, {Py_tp_methods, rings_methods},
    {Py_tp_getset, rings_getset}, {0},
};
static PyType_Spec rings_spec = {"aiodist._core.Rings", sizeof(Rings), 0, Py_TPFLAGS_DEFAULT, rings_slots};

static PyMethodDef functions[] = {
    {"arrived", arrived, METH_VARARGS, "arrived(rings, until): wait for a record in a ring; False after `until`."},
    {0},
};

int rings_add(PyObject *module) {
    if ((rings_type = add_type(module, &rings_spec)) == NULL || PyModule_AddFunctions(module, functions) < 0) return -1;
    return PyModule_AddIntConstant(module, "NUMBERS_BYTES", 2 * CORE_LINE);  // no two ranks write one line
}
