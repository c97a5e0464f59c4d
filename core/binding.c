// The module `aiodist._core`: what Python calls of this library.
//
// By hand, and not in Cython: that generates ten thousand lines that nobody reads, and what every operation pays should
// be in sight. The type of a handle fills slots of its own (am_await, am_send), and the limited API (3.11) makes one
// wheel serve all later Pythons. There is checking and conversion here, and no logic.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

static PyObject *kernels(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyUnicode_FromString(core_kernels_level());
}

static PyMethodDef functions[] = {
    {"kernels", kernels, METH_NOARGS,
     "kernels()\n--\n\nReturn which kernels reduce on this processor: 'baseline', 'avx2' or 'avx512'."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "aiodist._core",
    .m_doc = "Collectives of the ranks of a host, in C: the binding of core/.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
