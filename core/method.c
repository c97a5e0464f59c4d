// The method `allreduce` of a communicator: a lane issues its plain calls without Python code, which takes a quarter of
// the time of a call.
#include "binding.h"

// The vectorcall protocol (PEP 590), which is in the limited API from Python 3.12 on, and unchanged since 3.9.
typedef PyObject *(*vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);
#define HAVE_VECTORCALL (1ul << 11)
#define ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))

typedef struct {
    PyObject_HEAD
    PyObject *function;   // takes all calls
    PyObject *op, *impl;  // its default values
    vectorcall call;
} Method;

static PyTypeObject *method_type;
static PyObject *bound_type;  // Python's type of bound methods
static PyObject *s_issuer, *s_op, *s_impl;

// Calls the function.
static PyObject *call_function(const Method *self, PyObject *const *args, size_t count, PyObject *names) {
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    PyObject *given = PyTuple_New((Py_ssize_t)count), *keywords = PyDict_New(), *result = NULL;
    for (size_t i = 0; given != NULL && i < count; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(given, (Py_ssize_t)i, args[i]);
    }
    bool made = given != NULL && keywords != NULL;
    for (Py_ssize_t i = 0; made && i < named; i++) made = PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[count + (size_t)i]) == 0;
    if (made) result = PyObject_Call(self->function, given, keywords);
    Py_XDECREF(given), Py_XDECREF(keywords);
    return result;
}

static PyObject *method_vectorcall(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
    const Method *self = (const Method *)object;
    size_t count = flags & ~ARGUMENTS_OFFSET;
    PyObject *op = count == 3 ? args[2] : self->op, *impl = self->impl;
    bool plain = count == 2 || count == 3;
    for (Py_ssize_t i = 0; plain && names != NULL && i < PyTuple_Size(names); i++) {
        PyObject *name = PyTuple_GetItem(names, i), *value = args[count + (size_t)i];
        if (name == s_impl) impl = value;
        else if (name == s_op && count == 2) op = value;
        else plain = false;
    }
    if (plain) {
        PyObject *issuer = PyObject_GetAttr(args[0], s_issuer);
        PyObject *handle = issuer == NULL ? NULL : issuer_allreduce(issuer, args[1], op, impl);
        Py_XDECREF(issuer);
        if (handle != Py_None) return handle;
        Py_DECREF(handle);
    }
    return call_function(self, args, count, names);
}

static PyObject *method_get(PyObject *self, PyObject *object, PyObject *type) {
    (void)type;
    if (is_set(object)) return PyObject_CallFunctionObjArgs(bound_type, self, object, NULL);
    Py_INCREF(self);
    return self;
}

// All attributes are the function's, `__class__` too, so that its signature, its documentation and its source are found.
static PyObject *method_getattr(Method *self, PyObject *name) { return PyObject_GetAttr(self->function, name); }

static int method_setattr(Method *self, PyObject *name, PyObject *value) { return PyObject_SetAttr(self->function, name, value); }

static PyObject *method_repr(Method *self) { return PyObject_Repr(self->function); }

static PyObject *method_call(Method *self, PyObject *args, PyObject *named) { return PyObject_Call(self->function, args, named); }

static int method_traverse(Method *self, visitproc visit, void *arg) {
    Py_VISIT(self->function);
    Py_VISIT(Py_TYPE((PyObject *)self));
    return 0;
}

static int method_clear(Method *self) {
    Py_CLEAR(self->function);
    return 0;
}

static void method_dealloc(Method *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->function), Py_XDECREF(self->op), Py_XDECREF(self->impl);
    PyObject_GC_Del(self);
    DECREF(type);
}

static PyMemberDef method_members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, NULL}, {0}};
static PyType_Slot method_slots[] = {
    {Py_tp_dealloc, method_dealloc}, {Py_tp_traverse, method_traverse}, {Py_tp_clear, method_clear}, {Py_tp_call, method_call},
    {Py_tp_descr_get, method_get}, {Py_tp_getattro, method_getattr}, {Py_tp_setattro, method_setattr}, {Py_tp_repr, method_repr},
    {Py_tp_members, method_members}, {0},
};
static PyType_Spec method_spec = {
    "aiodist._core.Method", sizeof(Method), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_METHOD_DESCRIPTOR | HAVE_VECTORCALL, method_slots,
};

static PyObject *allreduce_method(PyObject *module, PyObject *function) {
    (void)module;
    PyObject *positional = PyObject_GetAttrString(function, "__defaults__"), *named = PyObject_GetAttrString(function, "__kwdefaults__");
    PyObject *op = positional == NULL || named == NULL ? NULL : PySequence_GetItem(positional, 0);
    PyObject *impl = op == NULL ? NULL : PyObject_GetItem(named, s_impl);
    Py_XDECREF(positional), Py_XDECREF(named);
    Method *self = impl == NULL ? NULL : (Method *)PyType_GenericAlloc(method_type, 0);
    if (self == NULL) {
        Py_XDECREF(op), Py_XDECREF(impl);
        return NULL;
    }
    Py_INCREF(function);
    self->function = function, self->op = op, self->impl = impl, self->call = method_vectorcall;
    return (PyObject *)self;
}

static PyMethodDef functions[] = {
    {"allreduce_method", allreduce_method, METH_O,
     "allreduce_method(function): return the method `function(self, t, op=..., *, impl=..., ...)`, whose calls with these arguments "
     "are issued by `self._issuer` if it can. Otherwise `function` is called."},
    {0},
};

int method_add(PyObject *module) {
    PyObject *types = PyImport_ImportModule("types");
    bound_type = types == NULL ? NULL : PyObject_GetAttrString(types, "MethodType");
    Py_XDECREF(types);
    s_issuer = PyUnicode_InternFromString("_issuer"), s_op = PyUnicode_InternFromString("op"), s_impl = PyUnicode_InternFromString("impl");
    return bound_type == NULL || !(method_type = add_type(module, &method_spec)) || PyModule_AddFunctions(module, functions) < 0 ? -1 : 0;
}
