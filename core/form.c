// Forms: the bytes of small tensors of one dtype and shape, for a message.
#include "binding.h"

#include <string.h>

enum { DIMS = 6 };

typedef struct {
    PyObject_HEAD
    PyTypeObject *tensor, *parameter;
    const dl_exchange *exchange;
    uint8_t code, bits;
    int32_t ndim;
    int64_t shape[DIMS];
    size_t nbytes;
} Form;

static PyObject *s_is_neg, *s_is_conj;

// Returns true unless the method of `tensor` returns False: torch would change the values when it reads them.
static bool is_lazy(PyObject *tensor, PyObject *method) {
    PyObject *found = PyObject_CallMethodObjArgs(tensor, method, NULL);
    if (found == NULL) PyErr_Clear();
    Py_XDECREF(found);
    return found != Py_False;
}

bool is_negated(PyObject *tensor) { return is_lazy(tensor, s_is_neg); }

// Fills `t`, and returns true for a dense tensor in host memory.
static bool described(const Form *self, PyObject *tensor, dl_tensor *t) {
    if (Py_TYPE(tensor) != self->tensor && Py_TYPE(tensor) != self->parameter) return false;
    if (self->exchange->describe(tensor, t) == 0) return t->ndim <= DIMS && dl_dense_numel(t) >= 0;
    PyErr_Clear();
    return false;
}

static PyObject *form_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *like, *tensor, *parameter;
    if (!PyArg_ParseTuple(args, "OO!O!", &like, &PyType_Type, &tensor, &PyType_Type, &parameter)) return NULL;
    const dl_exchange *exchange = exchange_of(tensor);
    Form *self = exchange == NULL ? NULL : (Form *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(tensor), Py_INCREF(parameter);
    self->tensor = (PyTypeObject *)tensor, self->parameter = (PyTypeObject *)parameter, self->exchange = exchange;
    dl_tensor t;
    if (!described(self, like, &t)) {
        DECREF(self);
        return PyErr_Format(PyExc_ValueError, "%R: expected a dense tensor on the host with at most %d dimensions", like, DIMS);
    }
    self->code = t.dtype_code, self->bits = t.dtype_bits, self->ndim = t.ndim;
    self->nbytes = (size_t)dl_dense_numel(&t) * t.dtype_bits / 8;
    memcpy(self->shape, t.shape, (size_t)t.ndim * sizeof *t.shape);
    return (PyObject *)self;
}

static void form_dealloc(Form *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF((PyObject *)self->tensor), Py_XDECREF((PyObject *)self->parameter);
    PyObject_Free(self);
    DECREF(type);
}

static PyObject *form_bytes(Form *self, PyObject *tensor) {
    dl_tensor t;
    if (!described(self, tensor, &t) || t.dtype_code != self->code || t.dtype_bits != self->bits || t.ndim != self->ndim ||
        memcmp(t.shape, self->shape, (size_t)t.ndim * sizeof *t.shape) != 0)
        Py_RETURN_NONE;
    const char *start = (const char *)t.data + t.byte_offset;
    bool whole = self->nbytes == 0 || (t.data != NULL && has_memory(tensor, (uintptr_t)start, self->nbytes));
    if (!whole || is_negated(tensor) || (t.dtype_code == DL_COMPLEX && is_lazy(tensor, s_is_conj))) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize(self->nbytes ? start : "", (Py_ssize_t)self->nbytes);
}

static PyMethodDef form_methods[] = {
    {"bytes", (PyCFunction)form_bytes, METH_O,
     "bytes(tensor): a copy of the memory of a dense tensor of this form on the host; None for any other object."},
    {0},
};
static PyType_Slot form_slots[] = {
    {Py_tp_doc, "Form(like, Tensor, Parameter): dtype and shape of the dense tensor `like`."},
    {Py_tp_new, form_new}, {Py_tp_dealloc, form_dealloc}, {Py_tp_methods, form_methods}, {0},
};
static PyType_Spec form_spec = {"aiodist._core.Form", sizeof(Form), 0, Py_TPFLAGS_DEFAULT, form_slots};

int form_add(PyObject *module) {
    s_is_neg = PyUnicode_InternFromString("is_neg");
    s_is_conj = PyUnicode_InternFromString("is_conj");
    return s_is_neg == NULL || s_is_conj == NULL || add_type(module, &form_spec) == NULL ? -1 : 0;
}
