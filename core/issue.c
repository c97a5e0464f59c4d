// Issuing: what is in flight, what was issued, and the way of an allreduce that a lane does from the call on.
#include "binding.h"

#include "kernels.h"

// --- claims ------------------------------------------------------------------------------------------------------

PyTypeObject *claims_type;

const core_range *claims_acquire(Claims *self, uintptr_t start, size_t nbytes, bool writes, PyObject *owner, bool *failed) {
    *failed = false;
    uintptr_t end = start + nbytes;
    const core_range *held = core_ranges_find(&self->writes, start, end);
    if (held == NULL && writes) held = core_ranges_find(&self->reads, start, end);
    if (held != NULL) return held;
    if (core_ranges_insert(writes ? &self->writes : &self->reads, (core_range){start, end, owner}) < 0) {
        PyErr_NoMemory();
        *failed = true;
        return NULL;
    }
    Py_INCREF(owner);
    return NULL;
}

void claims_release(Claims *self, uintptr_t start, size_t nbytes, bool writes) {
    PyObject *owner = core_ranges_remove(writes ? &self->writes : &self->reads, (core_range){start, start + nbytes, NULL});
    Py_XDECREF(owner);
}

static PyObject *claims_claim(Claims *self, PyObject *args) {
    unsigned long long start, nbytes;
    int writes;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "KKpO", &start, &nbytes, &writes, &owner)) return NULL;
    bool failed = false;
    const core_range *held = nbytes == 0 ? NULL : claims_acquire(self, (uintptr_t)start, nbytes, writes, owner, &failed);
    if (failed) return NULL;
    PyObject *holder = held == NULL ? Py_None : held->owner;
    Py_INCREF(holder);
    return holder;
}

static PyObject *claims_give_back(Claims *self, PyObject *args) {
    unsigned long long start, nbytes;
    int writes;
    if (!PyArg_ParseTuple(args, "KKp", &start, &nbytes, &writes)) return NULL;
    if (nbytes > 0) claims_release(self, (uintptr_t)start, nbytes, writes);
    Py_RETURN_NONE;
}

static Py_ssize_t claims_length(Claims *self) { return (Py_ssize_t)(self->writes.ranges + self->reads.ranges); }

static PyObject *claims_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)args, (void)named;
    Claims *self = (Claims *)PyType_GenericAlloc(type, 0);
    if (self != NULL) self->reads.overlap = true;
    return (PyObject *)self;
}

static void claims_dealloc(Claims *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    core_ranges_free(&self->writes);
    core_ranges_free(&self->reads);
    freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(self);
    DECREF(type);
}

static PyMethodDef claims_methods[] = {
    {"claim", (PyCFunction)claims_claim, METH_VARARGS,
     "claim(start, nbytes, writes, owner): return who has some of these bytes, None where nobody does, and `owner` now has."},
    {"release", (PyCFunction)claims_give_back, METH_VARARGS, "release(start, nbytes, writes): give back what was claimed."},
    {0},
};
static PyType_Slot claims_slots[] = {
    {Py_tp_doc, "Which bytes are in flight: those that are written overlap nothing, those that are read may overlap."},
    {Py_tp_new, claims_new}, {Py_tp_dealloc, claims_dealloc}, {Py_tp_methods, claims_methods}, {Py_sq_length, claims_length}, {0},
};
static PyType_Spec claims_spec = {
    "aiodist._core.Claims", sizeof(Claims), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, claims_slots,
};

// --- the log of what was issued ----------------------------------------------------------------------------------

enum { KEPT = 4096 };

typedef struct {
    PyObject_HEAD
    long long seq;
    PyObject *kept, *awaited;
} Log;

static PyTypeObject *log_type;

static PyObject *log_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)args, (void)named;
    Log *self = (Log *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->kept = PyList_New(KEPT);
    self->awaited = PyDict_New();
    for (Py_ssize_t i = 0; self->kept != NULL && i < KEPT; i++) {
        Py_INCREF(Py_None);
        PyList_SetItem(self->kept, i, Py_None);
    }
    if (self->kept != NULL && self->awaited != NULL) return (PyObject *)self;
    DECREF(self);
    return NULL;
}

static void log_dealloc(Log *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->kept);
    Py_XDECREF(self->awaited);
    freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(self);
    DECREF(type);
}

// Takes note of the next operation; false with an exception set.
static bool record(Log *self, PyObject *what, PyObject *origin) {
    PyObject *number = PyLong_FromLongLong(self->seq);
    PyObject *entry = number == NULL ? NULL : PyTuple_Pack(3, number, what, origin);
    if (entry == NULL || PyList_SetItem(self->kept, (Py_ssize_t)(self->seq % KEPT), entry) < 0) {
        Py_XDECREF(number);
        return false;
    }
    self->seq++;
    bool told = true;
    if (PyDict_Size(self->awaited) > 0) {
        PyObject *tell = PyDict_GetItemWithError(self->awaited, number);
        if (tell != NULL) {
            Py_INCREF(tell);
            PyObject *result = PyDict_DelItem(self->awaited, number) < 0 ? NULL : PyObject_CallNoArgs(tell);
            told = result != NULL;
            Py_XDECREF(result);
            Py_DECREF(tell);
        }
        told = told && !PyErr_Occurred();
    }
    Py_DECREF(number);
    return told;
}

static PyObject *log_record(Log *self, PyObject *args) {
    PyObject *what, *origin;
    if (!PyArg_ParseTuple(args, "OO", &what, &origin) || !record(self, what, origin)) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef log_methods[] = {
    {"record", (PyCFunction)log_record, METH_VARARGS, "record(what, origin): take note of the next operation, whose number is `seq`."},
    {0},
};
static PyMemberDef log_members[] = {
    OFFERS("seq", T_LONGLONG, Log, seq, 0, "How many operations were issued: the number of the next one."),
    OFFERS("awaited", T_OBJECT, Log, awaited, READONLY, "By number: what to call, once, when this rank has recorded it."),
    OFFERS("kept", T_OBJECT, Log, kept, READONLY, "The newest records, each at its number modulo how many there are."),
    {0},
};
static PyType_Slot log_slots[] = {
    {Py_tp_doc, "What a communicator issued, in order."},
    {Py_tp_new, log_new}, {Py_tp_dealloc, log_dealloc}, {Py_tp_methods, log_methods}, {Py_tp_members, log_members}, {0},
};
static PyType_Spec log_spec = {"aiodist._core.Log", sizeof(Log), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, log_slots};

// --- issuing -----------------------------------------------------------------------------------------------------

// How to reduce tensors of one kind.
typedef struct {
    PyObject *dtype, *shape, *op, *impl, *what;
    uint64_t word, count, nbytes;
    uint8_t code, reduction;
} Plan;

enum { PLANS = 256 };

struct Issuer {
    PyObject_HEAD
    Lane *lane;
    Claims *claims;
    Log *log;
    Pacer *pacer;
    PyObject *account, *pending, *inbox, *ours, *watch, *locate, *failed;
    PyTypeObject *handle, *tensor, *parameter;
    char open;
    Plan plans[PLANS];
};

static PyTypeObject *issuer_type;
static PyObject *s_is_cpu, *s_dtype, *s_shape, *s_contiguous, *s_data_ptr, *s_back, *s_lasti, *s_filename, *s_watching,
    *s_keep_watch, *s_told, *s_allreduce;

Lane *issuer_lane(Issuer *self) { return self->lane; }

// Returns whether attribute `name` of `object` is `expected`.
static bool has(PyObject *object, PyObject *name, const PyObject *expected) {
    PyObject *found = PyObject_GetAttr(object, name);
    Py_XDECREF(found);
    return found == expected;
}

static bool same(PyObject *a, PyObject *b) { return a == b || PyObject_RichCompareBool(a, b, Py_EQ) == 1; }

static Plan *plan_at(Issuer *self, const PyObject *dtype, PyObject *shape) {
    Py_hash_t hash = PyObject_Hash(shape);
    if (hash == -1) PyErr_Clear();
    return &self->plans[((size_t)hash ^ (size_t)dtype >> 5) % PLANS];
}

// Returns the plan for `t`, NULL where there is none, or it is not dense memory of the host.
static Plan *plan_for(Issuer *self, PyObject *t, PyObject *op, PyObject *impl) {
    PyObject *dtype = PyObject_GetAttr(t, s_dtype), *shape = PyObject_GetAttr(t, s_shape), *contiguous = NULL;
    Plan *plan = NULL;
    if (dtype != NULL && shape != NULL) {
        plan = plan_at(self, dtype, shape);
        if (plan->dtype != dtype || !same(plan->shape, shape) || !same(plan->op, op) || !same(plan->impl, impl)) plan = NULL;
    }
    if (plan != NULL && !has(t, s_is_cpu, Py_True)) plan = NULL;
    if (plan != NULL) {  // it raises where the layout is another than strided
        contiguous = PyObject_CallMethodObjArgs(t, s_contiguous, NULL);
        if (contiguous != Py_True) plan = NULL;
    }
    Py_XDECREF(dtype), Py_XDECREF(shape), Py_XDECREF(contiguous);
    PyErr_Clear();  // what is wrong with it is said elsewhere
    return plan;
}

// Returns the innermost place outside aiodist, as (code, instruction).
static PyObject *origin_of(Issuer *self) {
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    if (frame == NULL) Py_RETURN_NONE;
    Py_INCREF(frame);
    PyObject *code = NULL;
    while (true) {
        PyObject *back = PyObject_GetAttr(frame, s_back);
        if (back == NULL || back == Py_None) {
            Py_XDECREF(back);
            break;
        }
        Py_DECREF(frame);
        frame = back;
        Py_XDECREF(code);
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        PyObject *filename = PyObject_GetAttr(code, s_filename);
        PyObject *ours = filename == NULL ? NULL : PyObject_GetItem(self->ours, filename);
        Py_XDECREF(filename);
        Py_XDECREF(ours);
        if (ours == NULL) PyErr_Clear();
        if (ours != Py_True) break;
    }
    if (code == NULL) code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    PyObject *lasti = PyObject_GetAttr(frame, s_lasti);
    PyObject *origin = lasti == NULL ? NULL : PyTuple_Pack(2, code, lasti);
    Py_XDECREF(lasti);
    Py_DECREF(code);
    Py_DECREF(frame);
    return origin;
}

// Has somebody look now and again at what is pending.
static bool keep_watch(Issuer *self) {
    if (has(self->watch, s_watching, Py_True)) return true;
    PyObject *kept = PyObject_CallMethodObjArgs(self->watch, s_keep_watch, NULL);
    Py_XDECREF(kept);
    return kept != NULL;
}

static uint64_t address_of(PyObject *t) {
    PyObject *address = PyObject_CallMethodObjArgs(t, s_data_ptr, NULL);
    uint64_t found = address == NULL ? 0 : PyLong_AsUnsignedLongLong(address);
    Py_XDECREF(address);
    return found;
}

// Finds where others can reach a tensor of the arena; false with an exception set.
static bool place_of(Issuer *self, PyObject *t, uint64_t nbytes, core_place *place) {
    *place = (core_place){CORE_NOWHERE, 0};
    if (nbytes <= WHOLE_BYTES) return true;
    PyObject *found = PyObject_CallFunctionObjArgs(self->locate, t, NULL);
    bool known = found == Py_None;
    if (found != NULL && !known) {
        unsigned long long offset = 0;
        known = PyArg_ParseTuple(found, "IK", &place->segment, &offset);
        place->offset = offset;
    }
    Py_XDECREF(found);
    return known;
}

// Returns a handle that claims the memory of `t` and is in the log; NULL with an exception set.
static Handle *issued(Issuer *self, const Plan *plan, PyObject *t, uint64_t address) {
    Handle *h = (Handle *)PyType_GenericAlloc(self->handle, 0);
    PyObject *origin = h == NULL ? NULL : origin_of(self);
    if (origin == NULL) {
        Py_XDECREF((PyObject *)h);
        return NULL;
    }
    h->progress = (PyObject *)self->pacer;
    h->op = s_allreduce;
    h->account = self->account;
    h->status = status_pending;
    INCREF(h->progress), Py_INCREF(h->op), Py_INCREF(h->account), Py_INCREF(h->status);
    h->origin = origin;
    h->seq = self->log->seq;
    h->nbytes = (Py_ssize_t)plan->nbytes;
    h->polled = 1;
    bool failed;
    const core_range *held = claims_acquire(self->claims, address, plan->nbytes, true, (PyObject *)h, &failed);
    if (held != NULL) {  // said in Python
        PyObject *said = PyObject_CallMethod((PyObject *)self->claims, "acquire", "KKOO", (unsigned long long)address,
                                             (unsigned long long)plan->nbytes, Py_True, h);
        Py_XDECREF(said);
    }
    if (held != NULL || failed) {
        DECREF(h);
        return NULL;
    }
    if (!record(self->log, plan->what, origin) || PyDict_SetItem(self->pending, (PyObject *)h, Py_True) < 0) {
        claims_release(self->claims, address, plan->nbytes, true);
        DECREF(h);
        return NULL;
    }
    INCREF(self), Py_INCREF(t), INCREF(h);  // until it is settled
    h->issuer = self;
    h->tensor = t;
    return h;
}

// allreduce(t, op, impl): the handle; None where another way must be gone.
static PyObject *issuer_allreduce(Issuer *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "expected t, op and impl");
    PyObject *t = args[0];
    Plan *plan = NULL;
    // Until the lane is joined somebody has to look for the other ranks: the other way has the loop do so.
    if (self->open && (Py_TYPE(t) == self->tensor || Py_TYPE(t) == self->parameter) && core_lane_joined(self->lane->lane) &&
        PyThread_get_thread_ident() == self->pacer->thread && PyObject_Size(self->inbox) == 0)
        plan = plan_for(self, t, args[1], args[2]);
    if (plan == NULL) Py_RETURN_NONE;
    uint64_t address = address_of(t), number = (uint64_t)self->log->seq;
    core_place place;
    if (PyErr_Occurred() || !place_of(self, t, plan->nbytes, &place) || !keep_watch(self)) return NULL;
    Handle *h = issued(self, plan, t, address);
    if (h == NULL) return NULL;
    h->native = (core_op){
        .kind = CORE_ALLREDUCE, .dtype = plan->code, .reduction = plan->reduction, .print = plan->word ^ number,
        .in = (void *)(uintptr_t)address, .out = (void *)(uintptr_t)address, .count = plan->count, .in_at = place,
        .caller = h, .direct = true,
    };
    Lane *lane = self->lane;
    Completions *completions = lane->completions;
    self->pacer->polls++;
    drive_begin(completions);
    count_bytes(lane, place, plan->nbytes);
    core_lane_submit(lane->lane, &h->native);
    uint64_t load = core_lane_load(lane->lane);
    bool heavy = load >= heavy_bytes(self->pacer);
    if (!heavy) core_lane_advance(lane->lane, SLICE);
    drive_end(completions);
    if (h->status == status_pending) core_engine_notice(lane->engine->engine, lane->lane, heavy);
    return (PyObject *)h;
}

void issuer_settle(Handle *h) {
    Issuer *self = h->issuer;
    PyObject *tensor = h->tensor;
    h->issuer = NULL;
    h->tensor = NULL;
    claims_release(self->claims, (uintptr_t)h->native.in, h->nbytes > 0 ? (size_t)h->nbytes : 0, true);
    PyObject *told = NULL;
    lane_keep(self->lane, &h->native, tensor);
    if (core_op_state(&h->native) != CORE_DONE) {
        PyObject *error = PyObject_CallFunction(self->lane->fail, "iI", (int)core_op_state(&h->native), h->native.differs);
        if (error != NULL) told = PyObject_CallFunctionObjArgs(self->failed, h, error, NULL);
        Py_XDECREF(error);
    } else if (h->status == status_pending) {
        if (PyDict_DelItem(self->pending, (PyObject *)h) < 0) PyErr_Clear();
        Py_INCREF(tensor), Py_INCREF(status_returned), Py_DECREF(status_pending);
        h->value = tensor;
        h->status = status_returned;
        if (is_set(h->waiters) || is_set(h->callbacks) || is_set(h->event))
            told = PyObject_CallMethodObjArgs((PyObject *)h, s_told, NULL);
    }
    if (PyErr_Occurred()) PyErr_WriteUnraisable((PyObject *)h);
    Py_XDECREF(told);
    Py_DECREF(tensor);
    DECREF(h);
    DECREF(self);
}

// add(dtype, shape, op, impl, what, word, count, nbytes, code, reduction)
static PyObject *issuer_add(Issuer *self, PyObject *args) {
    Plan made = {0};
    unsigned long long word, count, nbytes;
    if (!PyArg_ParseTuple(args, "OOOOOKKKbb", &made.dtype, &made.shape, &made.op, &made.impl, &made.what, &word, &count, &nbytes,
                          &made.code, &made.reduction))
        return NULL;
    made.word = word, made.count = count, made.nbytes = nbytes;
    Py_INCREF(made.dtype), Py_INCREF(made.shape), Py_INCREF(made.op), Py_INCREF(made.impl), Py_INCREF(made.what);
    Plan *plan = plan_at(self, made.dtype, made.shape), before = *plan;
    *plan = made;
    Py_XDECREF(before.dtype), Py_XDECREF(before.shape), Py_XDECREF(before.op), Py_XDECREF(before.impl), Py_XDECREF(before.what);
    Py_RETURN_NONE;
}

static PyObject *issuer_forget(Issuer *self, PyObject *none) {
    (void)none;
    for (size_t i = 0; i < PLANS; i++) {
        Plan before = self->plans[i];
        self->plans[i] = (Plan){0};
        Py_XDECREF(before.dtype), Py_XDECREF(before.shape), Py_XDECREF(before.op), Py_XDECREF(before.impl), Py_XDECREF(before.what);
    }
    Py_RETURN_NONE;
}

static PyObject *issuer_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *lane, *claims, *log, *pacer, *account, *pending, *inbox, *ours, *watch, *locate, *failed, *handle, *tensor,
        *parameter;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OO!OO!OOOOOO", lane_type, &lane, claims_type, &claims, log_type, &log, pacer_type, &pacer,
                          &account, &PyDict_Type, &pending, &inbox, &PyDict_Type, &ours, &watch, &locate, &failed, &handle,
                          &tensor, &parameter))
        return NULL;
    Issuer *self = (Issuer *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->lane = (Lane *)lane, self->claims = (Claims *)claims, self->log = (Log *)log, self->pacer = (Pacer *)pacer;
    self->account = account, self->pending = pending, self->inbox = inbox, self->ours = ours, self->watch = watch;
    self->locate = locate, self->failed = failed;
    self->handle = (PyTypeObject *)handle, self->tensor = (PyTypeObject *)tensor, self->parameter = (PyTypeObject *)parameter;
    PyObject *const kept[] = {lane, claims, log, pacer, account, pending, inbox, ours, watch, locate, failed, handle, tensor, parameter};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) Py_INCREF(kept[i]);
    self->open = 1;
    return (PyObject *)self;
}

static int issuer_traverse(Issuer *self, visitproc visit, void *arg) {
    PyObject *const kept[] = {
        (PyObject *)self->lane, (PyObject *)self->claims, (PyObject *)self->log, (PyObject *)self->pacer, self->account, self->pending,
        self->inbox, self->ours, self->watch, self->locate, self->failed, (PyObject *)self->handle,
        (PyObject *)self->tensor, (PyObject *)self->parameter, (PyObject *)Py_TYPE((PyObject *)self),
    };
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) Py_VISIT(kept[i]);
    return 0;
}

static int issuer_clear(Issuer *self) {
    PyObject **const kept[] = {&self->account, &self->pending, &self->inbox, &self->ours, &self->watch, &self->locate, &self->failed};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) Py_CLEAR(*kept[i]);
    self->open = 0;
    return 0;
}

static void issuer_dealloc(Issuer *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    PyObject *forgotten = issuer_forget(self, NULL);
    Py_XDECREF(forgotten);
    issuer_clear(self);
    Py_XDECREF((PyObject *)self->lane), Py_XDECREF((PyObject *)self->claims), Py_XDECREF((PyObject *)self->log);
    Py_XDECREF((PyObject *)self->pacer), Py_XDECREF((PyObject *)self->handle), Py_XDECREF((PyObject *)self->tensor);
    Py_XDECREF((PyObject *)self->parameter);
    PyObject_GC_Del(self);
    DECREF(type);
}

static PyMethodDef issuer_methods[] = {
    {"allreduce", (PyCFunction)(void *)issuer_allreduce, METH_FASTCALL,
     "allreduce(t, op, impl): return the handle of an allreduce; None where it is to be issued in another way."},
    {"add", (PyCFunction)issuer_add, METH_VARARGS,
     "add(dtype, shape, op, impl, what, word, count, nbytes, code, reduction): this is how such tensors are reduced."},
    {"forget", (PyCFunction)issuer_forget, METH_NOARGS, "Know no more how any tensors are reduced."},
    {0},
};
static PyMemberDef issuer_members[] = {OFFERS("open", T_BOOL, Issuer, open, 0, "Calls are not refused."), {0}};
static PyType_Slot issuer_slots[] = {
    {Py_tp_doc, "Issues what a lane does from the call on."},
    {Py_tp_new, issuer_new}, {Py_tp_dealloc, issuer_dealloc}, {Py_tp_traverse, issuer_traverse}, {Py_tp_clear, issuer_clear},
    {Py_tp_methods, issuer_methods}, {Py_tp_members, issuer_members}, {0},
};
static PyType_Spec issuer_spec = {
    "aiodist._core.Issuer", sizeof(Issuer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, issuer_slots,
};

int issue_add(PyObject *module) {
    static const struct { PyObject **at; const char *text; } names[] = {
        {&s_is_cpu, "is_cpu"}, {&s_dtype, "dtype"}, {&s_shape, "shape"}, {&s_contiguous, "is_contiguous"},
        {&s_data_ptr, "data_ptr"}, {&s_back, "f_back"}, {&s_lasti, "f_lasti"}, {&s_filename, "co_filename"},
        {&s_watching, "watching"}, {&s_keep_watch, "keep_watch"}, {&s_told, "_told"}, {&s_allreduce, "allreduce"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].at = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
    return !(claims_type = add_type(module, &claims_spec)) || !(log_type = add_type(module, &log_spec)) ||
                   !(issuer_type = add_type(module, &issuer_spec))
               ? -1 : 0;
}
