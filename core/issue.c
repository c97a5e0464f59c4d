// Issuing: a collective in a lane, from the call to the submission.
#include "binding.h"

#include <string.h>

#include "checksum.h"
#include "dlpack.h"

// --- plans -------------------------------------------------------------------------------------------------------

// A plan: collectives of one kind in a lane, on tensors of one shape.
typedef struct {
    PyObject_VAR_HEAD
    PyObject *what, *name, *otherwise;
    core_op op;          // without tensors; the fingerprint is not mixed with the number yet
    uint64_t nbytes, target_nbytes;
    char writes;         // true if this rank's tensor is written
    uint64_t counts[];   // elements sent, then received, by rank
} Plan;

static PyTypeObject *plan_type;

// Plan(what, name, otherwise, word, kind, dtype, reduction, root, like, count, nbytes, target_nbytes, writes, sent, received)
static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *what, *name, *otherwise, *sent, *received;
    unsigned char kind, dtype, reduction;
    unsigned root;
    unsigned long long word, like, count, nbytes, target_nbytes;
    int writes;
    if (!PyArg_ParseTuple(args, "OUOKbbbIKKKKpO!O!", &what, &name, &otherwise, &word, &kind, &dtype, &reduction, &root, &like,
                          &count, &nbytes, &target_nbytes, &writes, &PyTuple_Type, &sent, &PyTuple_Type, &received))
        return NULL;
    Py_ssize_t sends = PyTuple_Size(sent), receives = PyTuple_Size(received);
    Plan *self = (Plan *)PyType_GenericAlloc(type, sends + receives);
    if (self == NULL) return NULL;
    self->op = (core_op){
        .kind = kind, .dtype = dtype, .reduction = reduction, .root = root, .print = word, .like = like, .count = count, .direct = true,
        .sent = sends == 0 ? NULL : self->counts, .received = receives == 0 ? NULL : self->counts + sends,
    };
    self->nbytes = nbytes, self->target_nbytes = target_nbytes, self->writes = (char)writes;
    self->what = what, self->name = name, self->otherwise = otherwise;
    Py_INCREF(what), Py_INCREF(name), Py_INCREF(otherwise);
    for (Py_ssize_t i = 0; i < sends + receives; i++)
        self->counts[i] = PyLong_AsUnsignedLongLong(i < sends ? PyTuple_GetItem(sent, i) : PyTuple_GetItem(received, i - sends));
    if (!PyErr_Occurred() && !core_op_valid(&self->op, UINT32_MAX))
        PyErr_Format(PyExc_ValueError, "kind %d dtype %d op %d: no such operation", kind, dtype, reduction);
    if (!PyErr_Occurred()) return (PyObject *)self;
    DECREF(self);
    return NULL;
}

static int plan_traverse(Plan *self, visitproc visit, void *arg) {
    Py_VISIT(self->what);
    Py_VISIT(self->otherwise);
    Py_VISIT(Py_TYPE((PyObject *)self));
    return 0;
}

static int plan_clear(Plan *self) {
    Py_CLEAR(self->otherwise);
    return 0;
}

static void plan_dealloc(Plan *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    plan_clear(self);
    Py_XDECREF(self->what), Py_XDECREF(self->name);
    PyObject_GC_Del(self);
    DECREF(type);
}

static PyType_Slot plan_slots[] = {
    {Py_tp_doc,
     "Plan(what, name, otherwise, word, kind, dtype, reduction, root, like, count, nbytes, target_nbytes, writes, sent, received): "
     "a collective of a lane. `otherwise(handle, t, out, claims, changed)` continues if the ranks' parts are not alike."},
    {Py_tp_new, plan_new}, {Py_tp_dealloc, plan_dealloc}, {Py_tp_traverse, plan_traverse}, {Py_tp_clear, plan_clear}, {0},
};
static PyType_Spec plan_spec = {
    "aiodist._core.Plan", sizeof(Plan), sizeof(uint64_t), Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plan_slots,
};

// --- issuing -----------------------------------------------------------------------------------------------------

// The descriptor of an attribute of a type. It reads the attribute in a third of the time of PyObject_GetAttr.
typedef struct {
    PyObject *descriptor;
    descrgetfunc get;
} Getter;

static Getter frame_back, frame_lasti;

// Finds the descriptor of attribute `name`; false with an exception set.
static bool find_getter(Getter *getter, PyObject *type, const char *name) {
    getter->descriptor = PyObject_GetAttrString(type, name);
    if (getter->descriptor == NULL) return false;
    getter->get = (descrgetfunc)PyType_GetSlot(Py_TYPE(getter->descriptor), Py_tp_descr_get);
    if (getter->get == NULL) PyErr_Format(PyExc_TypeError, "attribute %s of %R is no descriptor", name, type);
    return getter->get != NULL;
}

static PyObject *get(const Getter *getter, PyObject *object) {
    return getter->get(getter->descriptor, object, (PyObject *)Py_TYPE(object));
}

enum { KNOWN = 256, KNOWN_DIMS = 6 };
enum { UNWATCHED_BYTES = 4096 };  // longest tensors whose versions are compared only if the world is strict

// Key of the plan of an allreduce: dtype and shape.
typedef struct {
    uint8_t code, bits;
    int32_t ndim;
    int64_t shape[KNOWN_DIMS];
    PyObject *op, *impl;
    Plan *plan;
} Known;

// A cache of the owners of files, by code object.
enum { SEEN = 32 };
typedef enum { PROGRAMS, OURS, CALLS } whose;  // `CALLS`: the file of `Call`, whose frames know the line of the call
typedef struct {
    PyObject *code;
    whose file;
} Seen;

typedef struct Once Once;

struct Issuer {
    PyObject_HEAD
    Lane *lane;
    Claims *claims;
    Log *log;
    Pacer *pacer;
    Segments *segments;
    PyObject *account, *pending, *inbox, *to_fail, *ours, *watch, *publish, *failed, *changed, *observer, *expire;
    PyObject *running;  // the thread's running-loop object when the running loop was found to be the communicator's
    PyTypeObject *handle, *tensor, *parameter;
    PyObject *increment, *grad_enabled;  // of torch: count writes of tensors; return True while autograd records
    PyCFunction increment_of;            // the C function of `increment`, a tenth faster; NULL: none
    Once *once;                          // the argument of `increment`
    PyObject *inference;                 // of torch: a method of a tensor, returns True for an inference tensor
    Getter requires_grad;                // of a tensor
    PyCFunction inference_of;            // the C function of `inference`, which takes any tensor; NULL: none
    const dl_exchange *exchange;  // of `tensor`
    char open, threads;
    char strict;  // true compares checksums of the memory that operations only read
    Known known[KNOWN];
    Seen seen[SEEN];
};

static PyTypeObject *issuer_type;
static PyObject *s_filename, *s_locals, *s_self, *s_origin, *s_watching, *s_keep_watch, *s_told, *s_way, *s_untyped_storage, *s_data_ptr, *s_nbytes, *s_version, *s_is_inference, *s_loop, *s_running;
static PyObject *running_loop;  // asyncio's function

Lane *issuer_lane(Issuer *self) { return self->lane; }

Log *issuer_log(Issuer *self) { return self->log; }

// Returns true if attribute `name` of `object` is `expected`.
static bool has(PyObject *object, PyObject *name, const PyObject *expected) {
    PyObject *found = PyObject_GetAttr(object, name);
    Py_XDECREF(found);
    return found == expected;
}

static bool same(PyObject *a, PyObject *b) { return a == b || PyObject_RichCompareBool(a, b, Py_EQ) == 1; }

// Returns a hash of dtype and shape.
static uint64_t form_of(const dl_tensor *t) {
    uint64_t hash = (t->dtype_code * 256u + t->dtype_bits) * UINT64_C(0x9E3779B97F4A7C15);
    for (int32_t i = 0; i < t->ndim; i++) hash = (hash ^ (uint64_t)t->shape[i]) * UINT64_C(0x9E3779B97F4A7C15);
    return hash;
}

static Known *known_at(Issuer *self, const dl_tensor *t) { return &self->known[(form_of(t) >> 32) % KNOWN]; }

static void known_release(Known *known) {
    Py_XDECREF(known->op), Py_XDECREF(known->impl);
    Py_XDECREF((PyObject *)known->plan);
}

static uint64_t address_of(const dl_tensor *t) { return (uint64_t)(uintptr_t)t->data + t->byte_offset; }

// Returns the number that a method of `object` returns; 0 with an exception set.
static uint64_t number_of(PyObject *object, PyObject *method) {
    PyObject *number = object == NULL ? NULL : PyObject_CallMethodObjArgs(object, method, NULL);
    uint64_t value = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(number);
    return value;
}

bool has_memory(PyObject *tensor, uint64_t start, uint64_t nbytes) {
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, s_untyped_storage, NULL);
    uint64_t end = number_of(storage, s_data_ptr) + number_of(storage, s_nbytes);
    Py_XDECREF(storage);
    return start + nbytes <= end;
}

// Fills `t` with the description of `tensor`; false unless it is a dense tensor of torch with host memory. The memory of
// short tensors is not compared with their size, which would cost a tenth of the call.
static bool describe(const Issuer *self, PyObject *tensor, dl_tensor *t) {
    if (Py_TYPE(tensor) != self->tensor && Py_TYPE(tensor) != self->parameter) return false;
    int64_t numel = self->exchange->describe(tensor, t) == 0 ? dl_dense_numel(t) : -1;
    uint64_t nbytes = numel < 0 ? 0 : (uint64_t)numel * t->dtype_bits / 8;
    // The imaginary part of a complex number, which torch may negate. Longer views of such parts have a stride of two.
    bool imaginary = numel == 1 && nbytes > 0 && address_of(t) / nbytes % 2 == 1;
    if (imaginary && is_negated(tensor)) return false;
    if (numel == 0 || (numel > 0 && t->data != NULL && (nbytes <= WHOLE_BYTES || has_memory(tensor, address_of(t), nbytes)))) return true;
    PyErr_Clear();  // the general path reports the error
    return false;
}

// Returns the plan of an allreduce of `t`, or NULL.
static Plan *plan_for(Issuer *self, const dl_tensor *t, PyObject *op, PyObject *impl) {
    const Known *known = known_at(self, t);
    bool alike = known->plan != NULL && known->code == t->dtype_code && known->bits == t->dtype_bits && known->ndim == t->ndim &&
                 memcmp(known->shape, t->shape, (size_t)t->ndim * sizeof *t->shape) == 0;
    return alike && same(known->op, op) && same(known->impl, impl) ? known->plan : NULL;
}

// Returns the owner of the file of `code`.
static whose file_of(Issuer *self, PyObject *code) {
    Seen *seen = &self->seen[((uintptr_t)code >> 5) % SEEN];
    if (seen->code == code) return seen->file;
    PyObject *filename = PyObject_GetAttr(code, s_filename);
    PyObject *ours = filename == NULL ? NULL : PyObject_GetItem(self->ours, filename);
    if (ours == NULL) PyErr_Clear();
    whose found = ours == Py_True ? OURS : ours == Py_None ? CALLS : PROGRAMS;
    PyObject *before = seen->code;  // read now, since the call above may have run Python code
    *seen = (Seen){code, found};
    Py_INCREF(code);  // nothing else is at its address meanwhile
    Py_XDECREF(before), Py_XDECREF(filename), Py_XDECREF(ours);
    return found;
}

// Returns the place that a tuple (code, instruction) has, with a new reference to the code; NULL with an exception set.
static origin origin_in(PyObject *pair) {
    origin named;
    if (!PyArg_ParseTuple(pair, "Oi", &named.code, &named.instruction)) return (origin){NULL, 0};
    Py_INCREF(named.code);
    return named;
}

// As `origin_in`, for the `Call` to which `frame` belongs.
static origin origin_of_call(PyObject *frame) {
    PyObject *locals = PyObject_GetAttr(frame, s_locals);
    PyObject *call = locals == NULL ? NULL : PyObject_GetItem(locals, s_self);
    PyObject *pair = call == NULL ? NULL : PyObject_GetAttr(call, s_origin);
    origin found = pair == NULL ? (origin){NULL, 0} : origin_in(pair);
    Py_XDECREF(pair), Py_XDECREF(call), Py_XDECREF(locals);
    return found;
}

// Returns the recorded caller, or the innermost frame outside aiodist, with a new reference to its code; NULL with an
// exception set.
static origin origin_of(Issuer *self) {
    if (is_set(self->log->caller)) return origin_in(self->log->caller);
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    PyObject *code;
    Py_XINCREF(frame);
    if (frame == NULL) PyErr_SetString(PyExc_RuntimeError, "called from outside of Python");
    if (frame == NULL) return (origin){NULL, 0};
    whose file;
    while (true) {
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        if ((file = file_of(self, code)) != OURS) break;
        PyObject *back = get(&frame_back, frame);
        if (!is_set(back)) {
            Py_XDECREF(back);
            break;
        }
        Py_DECREF(code), Py_DECREF(frame);
        frame = back;
    }
    if (file == CALLS) {
        origin found = origin_of_call(frame);
        Py_DECREF(frame), Py_DECREF(code);
        return found;
    }
    PyObject *lasti = get(&frame_lasti, frame);
    int instruction = lasti == NULL ? 0 : (int)PyLong_AsLong(lasti);
    if (lasti == NULL) Py_CLEAR(code);
    Py_XDECREF(lasti);
    Py_DECREF(frame);
    return (origin){code, instruction};
}

// Starts the watchdog.
static bool keep_watch(Issuer *self) {
    if (has(self->watch, s_watching, Py_True)) return true;
    PyObject *kept = PyObject_CallMethodObjArgs(self->watch, s_keep_watch, NULL);
    Py_XDECREF(kept);
    return kept != NULL;
}

// Finds the published place of a tensor in the arena; false with an exception set.
static bool place_of(Issuer *self, uint64_t start, uint64_t nbytes, core_place *place) {
    *place = (core_place){CORE_NOWHERE, 0};
    if (nbytes <= WHOLE_BYTES) return true;
    *place = segments_find(self->segments, (uintptr_t)start, nbytes);
    if (place->segment == CORE_NOWHERE || place->segment < self->segments->told) return true;
    PyObject *published = PyObject_CallNoArgs(self->publish);
    Py_XDECREF(published);
    return published != NULL;
}

// The memory claimed by an operation until its end.
typedef struct {
    uintptr_t start;
    size_t nbytes;
    bool writes;
    PyObject *tensor, *memory;  // or NULL
} claim;

enum { MOST_CLAIMS = 1 + (1 << CORE_MOST_LEVELS) };

static PyObject *written_by(const Handle *h);

static unsigned others_of(const Handle *h) { return h->others == NULL ? 0 : (unsigned)PyTuple_Size(h->others); }

// Returns the number of `claims` of an operation: it reads its tensors and writes its target; a tensor inside its target
// needs no claim.
static unsigned claims_of(const Handle *h, claim claims[MOST_CLAIMS]) {
    const Plan *plan = (const Plan *)h->plan;
    uintptr_t in = (uintptr_t)h->native.in, out = (uintptr_t)h->native.out;
    if (plan->nbytes + plan->target_nbytes == 0) return 0;
    unsigned count = 0;
    bool apart = h->target != NULL, inside = apart && out <= in && in + plan->nbytes <= out + plan->target_nbytes;
    bool writes = plan->writes && !apart;
    PyObject *tensor = writes ? written_by(h) : h->tensor;
    if (!apart || (plan->nbytes > 0 && !inside)) claims[count++] = (claim){in, plan->nbytes, writes, tensor, h->memory[0]};
    if (apart && plan->target_nbytes > 0) claims[count++] = (claim){out, plan->target_nbytes, true, written_by(h), h->memory[1]};
    for (unsigned i = 0; i < others_of(h); i++) {
        const void *at = h->parts_of->at[i + 1];
        PyObject *memory = h->others_memory == NULL ? NULL : PyList_GetItem(h->others_memory, i);
        if (at != h->native.out) claims[count++] = (claim){(uintptr_t)at, plan->nbytes, false, PyTuple_GetItem(h->others, i), memory};
    }
    return count;
}

static void release(Issuer *self, const claim *claims, unsigned count) {
    for (unsigned i = 0; i < count; i++) claims_release(self->claims, claims[i].start, claims[i].nbytes, claims[i].writes);
}

// Claims the memory of `h`; false with an exception set.
static bool acquire(Issuer *self, Handle *h) {
    claim claims[MOST_CLAIMS];
    unsigned count = claims_of(h, claims);
    for (unsigned i = 0; i < count; i++) {
        bool failed;
        const claim *one = &claims[i];
        const core_range *held = claims_acquire(self->claims, one->start, one->nbytes, one->writes, (PyObject *)h, &failed);
        if (held == NULL && !failed) continue;
        if (held != NULL) {  // Python raises the error
            PyObject *said = PyObject_CallMethod((PyObject *)self->claims, "acquire", "KKOO", (unsigned long long)one->start,
                                                 (unsigned long long)one->nbytes, one->writes ? Py_True : Py_False, h);
            if (said != NULL) {  // the holder was dropped by the program, and is withdrawn now
                Py_DECREF(said);
                continue;
            }
        }
        release(self, claims, i);
        return false;
    }
    return true;
}

// Keeps the memory of an operation in flight, since the program may replace the memory of its tensors by `t.data = ...`
// or `module.half()`, and torch would reuse the old memory.
static void keep_memory(Handle *h) {
    PyObject *const tensors[2] = {h->tensor, h->target};
    for (int i = 0; i < 2; i++) {
        if (!is_set(tensors[i]) || h->memory[i] != NULL) continue;
        h->memory[i] = PyObject_CallMethodObjArgs(tensors[i], s_untyped_storage, NULL);
        if (h->memory[i] == NULL) PyErr_WriteUnraisable((PyObject *)h);
    }
    if (h->others == NULL || h->others_memory != NULL) return;
    PyObject *kept = PyList_New(0);
    for (unsigned i = 0; kept != NULL && i < others_of(h); i++) {
        PyObject *memory = PyObject_CallMethodObjArgs(PyTuple_GetItem(h->others, i), s_untyped_storage, NULL);
        if (memory == NULL || PyList_Append(kept, memory) < 0) Py_CLEAR(kept);
        Py_XDECREF(memory);
    }
    h->others_memory = kept;
    if (kept == NULL) PyErr_WriteUnraisable((PyObject *)h);
}

// An iterator of at most one tensor, the argument of torch's `increment`. Its reuse allocates nothing.
struct Once {
    PyObject_HEAD
    PyObject *tensor;
};

static PyTypeObject *once_type;

static PyObject *once_next(Once *self) {
    PyObject *tensor = self->tensor;
    self->tensor = NULL;
    return tensor;
}

static PyType_Slot once_slots[] = {{Py_tp_iter, PyObject_SelfIter}, {Py_tp_iternext, once_next}, {0}};
static PyType_Spec once_spec = {"aiodist._core.Once", sizeof(Once), 0, Py_TPFLAGS_DEFAULT, once_slots};

// Raises the version of `tensor` for autograd.
static void count_write(const Issuer *self, PyObject *tensor) {
    if (tensor == NULL) return;
    Py_INCREF(tensor);
    self->once->tensor = tensor;
    PyObject *once = (PyObject *)self->once;
    PyObject *counted = self->increment_of != NULL ? self->increment_of(PyCFunction_GetSelf(self->increment), once)
                                                   : PyObject_CallFunctionObjArgs(self->increment, once, NULL);
    if (counted == NULL) PyErr_WriteUnraisable(self->increment);
    Py_XDECREF(counted);
    Py_CLEAR(self->once->tensor);  // left by an error before the first step
}

// Returns the written tensor of the user, or NULL. New memory has no version to compare.
static PyObject *written(const Plan *plan, PyObject *tensor, PyObject *target, PyObject *out) {
    if (is_set(target) && target != tensor) return is_set(out) ? target : NULL;
    return plan->writes ? tensor : NULL;
}

// As `written`; NULL after the end, or after a program has taken over.
static PyObject *written_by(const Handle *h) {
    return h->plan == NULL ? NULL : written((const Plan *)h->plan, h->tensor, h->target, h->out);
}

// Returns true if autograd would have to record a write into `tensor`, for which the general path raises.
static bool is_recorded(const Issuer *self, PyObject *tensor) {
    if (tensor == NULL) return false;
    PyObject *requires = get(&self->requires_grad, tensor);
    Py_XDECREF(requires);
    if (requires != Py_True) return false;
    PyObject *enabled = PyObject_CallNoArgs(self->grad_enabled);
    Py_XDECREF(enabled);
    return enabled != Py_False;
}

// The tensors of a call: (t, target, result, out); `in` and `out` are the addresses of t and target, `forms` their forms.
typedef struct {
    Plan *plan;
    PyObject *const *tensors;
    uint64_t in, out, forms[2];
    PyObject *others;  // a tuple of 2^levels - 1 more parts, or NULL
    parts *parts_of;   // of all parts; NULL after the handle has taken it
    uint8_t levels;
} call;

// --- writes of the program into memory in flight ------------------------------------------------------------------

// Returns the version of `tensor`, or -1 if there is none. Any thread that has the GIL may call: torch's counter is atomic.
static long long version_of(PyObject *tensor) {
    PyObject *version = PyObject_GetAttr(tensor, s_version);
    long long number = version == NULL ? -1 : PyLong_AsLongLong(version);
    Py_XDECREF(version);
    if (number < 0) PyErr_Clear();
    return number;
}

// Returns true for an inference tensor, whose version raises an error. The error would take longer than this call.
static bool is_inference(const Issuer *self, PyObject *tensor) {
    PyObject *inference = self->inference_of != NULL ? self->inference_of(tensor, NULL)
                                                     : PyObject_CallMethodObjArgs(tensor, s_is_inference, NULL);
    if (inference == NULL) PyErr_Clear();
    Py_XDECREF(inference);
    return inference != Py_False;
}

// Returns the checksum of the memory that the operation only reads, or 0 if there is none.
static uint64_t sum_of(const Handle *h) {
    claim claims[MOST_CLAIMS];
    unsigned count = claims_of(h, claims);
    for (unsigned i = 0; i < count; i++) {
        PyObject *memory = claims[i].memory;
        if (claims[i].writes || memory == NULL) continue;
        uint64_t start = number_of(memory, s_data_ptr), end = start + number_of(memory, s_nbytes);
        // A program may have shrunk the storage.
        if (start <= claims[i].start && claims[i].start + claims[i].nbytes <= end)
            return checksum((const void *)claims[i].start, claims[i].nbytes);
    }
    return 0;
}

// Notes the state of the caller's tensors when the call returns. A short tensor is skipped unless the world is strict: the
// comparison takes 0.2 us, a tenth of such an operation. A torch function mode of the program may run Python code here, and
// another thread may then finish the operation, so only the arguments of the call are used after the checksum.
static void watch(const Issuer *self, Handle *h, const call *what) {
    PyObject *const *given = what->tensors;
    PyObject *const tensors[2] = {given[0], is_set(given[3]) && given[1] != given[0] ? given[1] : NULL};
    const uint64_t sizes[2] = {what->plan->nbytes, what->plan->target_nbytes};
    h->sum = self->strict ? sum_of(h) : 0;
    bool watched = h->sum != 0;
    for (int i = 0; i < 2; i++) {
        bool compared = is_set(tensors[i]) && (self->strict || sizes[i] > UNWATCHED_BYTES) && !is_inference(self, tensors[i]);
        h->versions[i] = compared ? version_of(tensors[i]) : -1;
        h->forms[i] = what->forms[i];
        watched = watched || compared;
    }
    for (unsigned i = 0; i < others_of(h); i++) {
        PyObject *part = PyTuple_GetItem(what->others, i);
        bool compared = sizes[0] > UNWATCHED_BYTES && part != given[1] && !is_inference(self, part);
        h->parts_of->versions[i + 1] = compared ? version_of(part) : -1;
        watched = watched || compared;
    }
    h->watched = watched;
}

// Returns the tensor that the program has changed during the operation, or NULL. A new version counts if the tensor has
// all of its storage, since views share one counter, and still has the memory and the shape of the call.
static PyObject *changed(const Issuer *self, const Handle *h) {
    const Plan *plan = (const Plan *)h->plan;
    PyObject *const tensors[2] = {h->tensor, h->target};
    const uint64_t at[2] = {(uint64_t)(uintptr_t)h->native.in, (uint64_t)(uintptr_t)h->native.out};
    for (int i = 0; i < 2; i++) {
        long long version = h->versions[i] < 0 ? -1 : version_of(tensors[i]);
        if (version < 0 || version == h->versions[i]) continue;
        dl_tensor t;
        bool whole = h->memory[i] != NULL && number_of(h->memory[i], s_nbytes) == (i == 0 ? plan->nbytes : plan->target_nbytes);
        if (whole && describe(self, tensors[i], &t) && address_of(&t) == at[i] && form_of(&t) == h->forms[i]) return tensors[i];
    }
    for (unsigned i = 0; i < others_of(h); i++) {
        PyObject *part = PyTuple_GetItem(h->others, i), *memory = h->others_memory == NULL ? NULL : PyList_GetItem(h->others_memory, i);
        long long before = h->parts_of->versions[i + 1], version = before < 0 || memory == NULL ? -1 : version_of(part);
        dl_tensor t;
        if (version < 0 || version == before || number_of(memory, s_nbytes) != plan->nbytes || !describe(self, part, &t)) continue;
        if (address_of(&t) == (uint64_t)(uintptr_t)h->parts_of->at[i + 1] && form_of(&t) == h->forms[0]) return part;
    }
    uint64_t sum = h->sum == 0 ? 0 : sum_of(h);
    return sum != 0 && sum != h->sum ? h->tensor : NULL;  // 0: the storage has other memory now
}

// Adds the handle to the pending operations; false with an exception set.
static bool list(Issuer *self, Handle *h) {
    PyObject *number = PyLong_FromLongLong(h->seq);
    h->listed = number != NULL && PyDict_SetItem(self->pending, number, (PyObject *)h) == 0;
    Py_XDECREF(number);
    return h->listed;
}

static void unlist(Issuer *self, Handle *h) {
    if (!h->listed) return;
    PyObject *number = PyLong_FromLongLong(h->seq);
    if (number == NULL || PyDict_DelItem(self->pending, number) < 0) PyErr_Clear();
    Py_XDECREF(number);
    h->listed = 0;
}

// Returns a handle that owns its memory and is in the log; NULL with an exception set. The handle is listed now only if
// Python code runs before the first step of the lane, since most short operations end there.
static Handle *issued(Issuer *self, call *what, core_place place) {
    Plan *plan = what->plan;
    PyObject *const *tensors = what->tensors;
    Handle *h = (Handle *)PyType_GenericAlloc(self->handle, 0);
    if (h == NULL) return NULL;
    h->called = origin_of(self);
    h->progress = (PyObject *)self->pacer;
    h->op = plan->name;
    h->account = self->account;
    h->status = status_pending;
    h->plan = (PyObject *)plan;
    h->tensor = tensors[0];
    h->target = tensors[1] == tensors[0] ? NULL : tensors[1];
    h->result = tensors[2] == tensors[0] ? NULL : tensors[2];
    h->out = tensors[3] == Py_None ? NULL : tensors[3];
    INCREF(h->progress), Py_INCREF(h->op), Py_INCREF(h->account), Py_INCREF(h->status), Py_INCREF(h->plan), Py_INCREF(h->tensor);
    Py_XINCREF(h->target), Py_XINCREF(h->result), Py_XINCREF(h->out);
    h->seq = self->log->seq;
    h->nbytes = (Py_ssize_t)(plan->nbytes << what->levels);
    h->polled = 1;
    h->writes = written(plan, tensors[0], tensors[1], tensors[3]) != NULL;
    h->native = plan->op;
    h->native.print ^= (uint64_t)h->seq;
    h->native.in = (void *)(uintptr_t)what->in, h->native.out = (void *)(uintptr_t)what->out;
    h->native.in_at = place;
    h->native.caller = h;
    if (what->others != NULL) {
        h->others = what->others, h->parts_of = what->parts_of, what->parts_of = NULL;
        h->native.parts = h->parts_of->at, h->native.levels = what->levels;
        Py_INCREF(h->others);
    }
    if (h->called.code == NULL || !acquire(self, h)) {
        DECREF(h);
        return NULL;
    }
    if ((is_set(self->observer) || PyDict_Size(self->log->awaited) > 0) && !list(self, h)) {
        claim claims[MOST_CLAIMS];
        release(self, claims, claims_of(h, claims));
        DECREF(h);
        return NULL;
    }
    log_record(self->log, plan->what, h->called, (uint64_t)h->nbytes);
    INCREF(self), INCREF(h);  // until issuer_settle
    h->issuer = self;
    if (is_set(self->observer)) {
        h->observer = PyObject_CallFunctionObjArgs(self->observer, h, NULL);
        if (h->observer == NULL) PyErr_WriteUnraisable(self->observer);
    }
    return h;
}

// Returns true if the loop of the communicator runs in the calling thread, which is the loop's thread. Up to Python
// 3.13, asyncio keeps an object for the running loop in the state of each thread, and replaces it whenever the loop
// changes. A look at this object takes a tenth of asyncio's own call, which is made if there is no such object.
static bool runs_loop(Issuer *self) {
    PyObject *state = PyThreadState_GetDict();
    PyObject *running = state == NULL ? NULL : PyDict_GetItemWithError(state, s_running);
    if (running != NULL && running == self->running) return true;
    PyObject *loop = PyObject_GetAttr((PyObject *)self->pacer, s_loop), *found = PyObject_CallNoArgs(running_loop);
    bool same = loop != NULL && loop == found;
    if (same && running != NULL) {
        PyObject *before = self->running;
        Py_INCREF(running);  // nothing else is at its address meanwhile
        self->running = running;
        Py_XDECREF(before);
    }
    Py_XDECREF(loop), Py_XDECREF(found);
    PyErr_Clear();
    return same;
}

enum from { ELSEWHERE, ON_LOOP, IN_THREAD };

// Returns the kind of the calling thread; ELSEWHERE if the thread may not issue now. Until all ranks have joined the
// lane, the general path issues, since it polls for the missing ranks.
static enum from may_issue(Issuer *self) {
    if (!self->open || !core_lane_joined(self->lane->lane) || PyObject_Size(self->inbox) != 0 || PyDict_Size(self->to_fail) != 0)
        return ELSEWHERE;
    if (PyThread_get_thread_ident() == self->pacer->thread) return runs_loop(self) ? ON_LOOP : ELSEWHERE;
    return self->threads ? IN_THREAD : ELSEWHERE;
}

static PyObject *issue(Issuer *self, call *what, bool on_loop) {
    core_place place = {CORE_NOWHERE, 0};
    PyObject *const *tensors = what->tensors;
    if (is_recorded(self, written(what->plan, tensors[0], tensors[1], tensors[3]))) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    // Other ranks may access the tensor in place, and write the results of kinds up to CORE_BROADCAST into the inputs.
    bool windows = tensors[0] != Py_None && (what->plan->op.kind > CORE_BROADCAST || tensors[1] == tensors[0]);
    uint64_t window = what->in;
    if (what->others != NULL) windows = what->plan->op.kind == CORE_ALLREDUCE, window = what->out;
    if (windows && !place_of(self, window, what->plan->nbytes, &place)) return NULL;
    Handle *h = issued(self, what, place);
    if (h == NULL) return NULL;
    Lane *lane = self->lane;
    Completions *completions = lane->completions;
    if (on_loop) self->pacer->polls++;  // a loop that issues is alive
    drive_begin(completions);
    core_lane_submit(lane->lane, &h->native);
    uint64_t load = core_lane_load(lane->lane);
    bool heavy = load >= heavy_bytes(self->pacer);
    if (!heavy) core_lane_advance(lane->lane, SLICE);
    if (!h->listed && core_op_state(&h->native) != CORE_DONE && !list(self, h)) report_later((PyObject *)h);
    if (self->log->timed) log_came(self->log, core_lane_busy(lane->lane) && !heavy ? core_lane_driven_at(lane->lane) : core_now());
    drive_end(completions);
    if (h->status == status_pending) {
        // Another thread may have ended the operation, and not yet passed it on: later events find the handle by its number.
        if (h->issuer != NULL && !h->listed && !list(self, h)) report_later((PyObject *)h);
        keep_memory(h);
        count_write(self, written_by(h));
        if (h->issuer != NULL) watch(self, h, what);  // else a program has taken over
        core_engine_notice(lane->engine->engine, lane->lane, heavy);
        if (!keep_watch(self)) report_later((PyObject *)h);
    }
    return (PyObject *)h;
}

PyObject *issuer_allreduce(PyObject *issuer, PyObject *tensor, PyObject *op, PyObject *impl) {
    if (Py_TYPE(issuer) != issuer_type) Py_RETURN_NONE;
    Issuer *self = (Issuer *)issuer;
    PyObject *const tensors[4] = {tensor, tensor, tensor, Py_None};
    enum from from = may_issue(self);
    dl_tensor t;
    Plan *plan = from != ELSEWHERE && describe(self, tensor, &t) ? plan_for(self, &t, op, impl) : NULL;
    if (plan == NULL) Py_RETURN_NONE;
    call what = {plan, tensors, address_of(&t), address_of(&t), {form_of(&t), 0}, NULL, NULL, 0};
    PyObject *handle = issue(self, &what, from == ON_LOOP);
    if (handle == NULL || handle == Py_None || !is_set(self->expire)) return handle;
    PyObject *expires = PyObject_CallFunctionObjArgs(self->expire, handle, NULL);
    if (expires == NULL) Py_CLEAR(handle);
    Py_XDECREF(expires);
    return handle;
}

// Sets the parts of the input of a call; false, perhaps with an exception set, if Python must issue the call.
static bool take_parts(const Issuer *self, call *what, PyObject *others) {
    Py_ssize_t count = 1 + PyTuple_Size(others);
    while ((Py_ssize_t)1 << what->levels < count && what->levels < CORE_MOST_LEVELS) what->levels++;
    core_op op = what->plan->op;
    what->parts_of = self->strict || (Py_ssize_t)1 << what->levels != count ? NULL : PyMem_Calloc(1, sizeof *what->parts_of);
    if (what->parts_of == NULL) return false;
    op.parts = what->parts_of->at, op.levels = what->levels;
    what->parts_of->at[0] = (void *)(uintptr_t)what->in;
    what->others = others;
    bool alike = core_op_valid(&op, UINT32_MAX);
    for (Py_ssize_t i = 1; alike && i < count; i++) {
        dl_tensor t;
        alike = describe(self, PyTuple_GetItem(others, i - 1), &t) && form_of(&t) == what->forms[0];
        if (alike) what->parts_of->at[i] = (void *)(uintptr_t)address_of(&t);
    }
    return alike;
}

// issue(plan, t, target, result, out, others): returns the handle, or None if Python must issue the call.
static PyObject *issuer_issue(Issuer *self, PyObject *const *args, Py_ssize_t count) {
    if ((count != 5 && count != 6) || Py_TYPE(args[0]) != plan_type)
        return PyErr_Format(PyExc_TypeError, "expected plan, t, target, result, out and perhaps a tuple of more parts");
    call what = {(Plan *)args[0], args + 1, 0, 0, {0, 0}, NULL, NULL, 0};
    PyObject *t = args[1], *target = args[2];
    enum from from = may_issue(self);
    dl_tensor found;
    if (from == ELSEWHERE || (t != Py_None && !describe(self, t, &found))) Py_RETURN_NONE;
    if (t != Py_None) what.in = what.out = address_of(&found), what.forms[0] = form_of(&found);
    if (target != Py_None && target != t) {
        if (!describe(self, target, &found)) Py_RETURN_NONE;
        what.out = address_of(&found), what.forms[1] = form_of(&found);
    }
    bool taken = count == 5 || PyTuple_Size(args[5]) == 0 || take_parts(self, &what, args[5]);
    PyObject *handle = taken && !PyErr_Occurred() ? issue(self, &what, from == ON_LOOP) : NULL;
    PyMem_Free(what.parts_of);
    if (handle != NULL || PyErr_Occurred()) return handle;
    Py_RETURN_NONE;
}

// Lets a program continue the operation, with its claims and the tensor that the user's program has changed, or NULL. The
// ranks agree on the operation, but a lane cannot run their parts together.
static PyObject *go_on(Handle *h, PyObject *changed) {
    claim claims[MOST_CLAIMS];
    keep_memory(h);
    unsigned count = claims_of(h, claims);
    PyObject *owned = PyList_New(0), *given = h->tensor, *parts = NULL;
    if (h->others != NULL) {
        PyObject *first = PyTuple_Pack(1, h->tensor);
        given = parts = first == NULL ? NULL : PySequence_Concat(first, h->others);
        Py_XDECREF(first);
        if (parts == NULL) Py_CLEAR(owned);
    }
    for (unsigned i = 0; owned != NULL && i < count; i++) {
        PyObject *memory = claims[i].memory, *tensor = claims[i].tensor;
        PyObject *one = Py_BuildValue("(KKOOO)", (unsigned long long)claims[i].start, (unsigned long long)claims[i].nbytes,
                                      claims[i].writes ? Py_True : Py_False, is_set(memory) ? memory : Py_None,
                                      tensor == NULL ? Py_None : tensor);
        if (one == NULL || PyList_Append(owned, one) < 0) Py_CLEAR(owned);
        Py_XDECREF(one);
    }
    PyObject *out = h->out == NULL ? Py_None : h->out;
    PyObject *told = owned == NULL ? NULL : PyObject_CallFunctionObjArgs(((Plan *)h->plan)->otherwise, h, given, out, owned,
                                                                              changed == NULL ? Py_None : changed, NULL);
    Py_XDECREF(owned), Py_XDECREF(parts);
    return told;
}

void issuer_settle(Handle *h) {
    Issuer *self = h->issuer;
    uint32_t state = core_op_state(&h->native);
    claim claims[MOST_CLAIMS];
    unsigned count = claims_of(h, claims);
    h->issuer = NULL;
    PyObject *told = NULL;
    bool succeeds = state == CORE_DONE || state == CORE_UNLIKE;
    PyObject *tensor = succeeds && h->status == status_pending && h->watched ? changed(self, h) : NULL;
    lane_keep(self->lane, &h->native, h->others != NULL && h->target != NULL ? h->target : h->tensor);
    count_write(self, written_by(h));
    if (state != CORE_UNLIKE) release(self, claims, count);
    if (state == CORE_UNLIKE) {
        told = go_on(h, tensor);
    } else if (state != CORE_DONE) {
        PyObject *error = PyObject_CallFunction(self->lane->fail, "iI", (int)state, h->native.differs);
        if (error != NULL) told = PyObject_CallFunctionObjArgs(self->failed, h, error, NULL);
        Py_XDECREF(error);
    } else if (tensor != NULL) {
        told = PyObject_CallFunctionObjArgs(self->changed, h, h->result != NULL ? h->result : h->tensor, tensor, NULL);
    } else if (h->status == status_pending) {
        count_bytes(self->lane, h->native.in_at, (uint64_t)h->nbytes);
        unlist(self, h);
        h->value = h->result != NULL ? h->result : h->tensor;
        Py_INCREF(h->value), Py_INCREF(status_returned), Py_DECREF(status_pending);
        h->status = status_returned;
        if (is_set(h->observer)) {
            PyObject *observer = h->observer, *observed = PyObject_CallFunctionObjArgs(observer, h, s_way, NULL);
            h->observer = NULL;
            if (observed == NULL) PyErr_WriteUnraisable(observer);
            Py_XDECREF(observed);
            Py_DECREF(observer);
        }
        if (is_set(h->waiters) || is_set(h->callbacks) || is_set(h->event))
            told = PyObject_CallMethodObjArgs((PyObject *)h, s_told, NULL);
    }
    if (PyErr_Occurred()) PyErr_WriteUnraisable((PyObject *)h);
    Py_XDECREF(told);
    PyObject **const held[] = {&h->plan, &h->tensor, &h->target, &h->result, &h->out, &h->memory[0], &h->memory[1], &h->others, &h->others_memory};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_CLEAR(*held[i]);
    DECREF(h);
    DECREF(self);
}

static PyObject *issuer_add(Issuer *self, PyObject *args) {
    PyObject *tensor;
    Known made = {0};
    dl_tensor t;
    if (!PyArg_ParseTuple(args, "OOOO!", &tensor, &made.op, &made.impl, plan_type, &made.plan)) return NULL;
    if (!describe(self, tensor, &t) || t.ndim > KNOWN_DIMS) Py_RETURN_NONE;
    made.code = t.dtype_code, made.bits = t.dtype_bits, made.ndim = t.ndim;
    memcpy(made.shape, t.shape, (size_t)t.ndim * sizeof *t.shape);
    Py_INCREF(made.op), Py_INCREF(made.impl), INCREF(made.plan);
    Known *known = known_at(self, &t), before = *known;
    *known = made;
    known_release(&before);
    Py_RETURN_NONE;
}

static PyObject *issuer_forget(Issuer *self, PyObject *none) {
    (void)none;
    for (size_t i = 0; i < KNOWN; i++) {
        Known before = self->known[i];
        self->known[i] = (Known){0};
        known_release(&before);
    }
    Py_RETURN_NONE;
}

const dl_exchange *exchange_of(PyObject *tensor) {
    PyObject *capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
    const dl_exchange *exchange = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);  // its target stays valid
    if (exchange == NULL || (exchange->major == DL_MAJOR && exchange->describe != NULL)) return exchange;
    PyErr_Format(PyExc_ImportError, "torch offers version %u.%u of DLPack's exchange functions: expected %d with all of them",
                 exchange->major, exchange->minor, DL_MAJOR);
    return NULL;
}

static PyObject *issuer_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)named;
    PyObject *lane, *claims, *log, *pacer, *segments, *account, *pending, *inbox, *to_fail, *ours, *watch, *publish, *failed, *changed, *handle,
        *tensor, *parameter, *increment, *grad_enabled, *inference;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!OO!OO!O!OOOOOOOOOO", lane_type, &lane, claims_type, &claims, log_type, &log, pacer_type, &pacer,
                          segments_type, &segments, &account, &PyDict_Type, &pending, &inbox, &PyDict_Type, &to_fail, &PyDict_Type, &ours,
                          &watch, &publish, &failed, &changed, &handle, &tensor, &parameter, &increment, &grad_enabled, &inference))
        return NULL;
    const dl_exchange *exchange = exchange_of(tensor);
    if (exchange == NULL) return NULL;
    Issuer *self = (Issuer *)PyType_GenericAlloc(type, 0);
    Once *once = self == NULL ? NULL : (Once *)PyType_GenericAlloc(once_type, 0);
    if (once == NULL) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->exchange = exchange;
    self->once = once;
    self->lane = (Lane *)lane, self->claims = (Claims *)claims, self->log = (Log *)log, self->pacer = (Pacer *)pacer;
    self->account = account, self->pending = pending, self->inbox = inbox, self->to_fail = to_fail, self->ours = ours, self->watch = watch;
    self->segments = (Segments *)segments, self->publish = publish, self->failed = failed, self->changed = changed;
    self->handle = (PyTypeObject *)handle, self->tensor = (PyTypeObject *)tensor, self->parameter = (PyTypeObject *)parameter;
    self->increment = increment, self->grad_enabled = grad_enabled, self->inference = inference;
    self->increment_of = PyCFunction_GetFlags(increment) == METH_O ? PyCFunction_GetFunction(increment) : NULL;
    self->inference_of = PyCFunction_GetFlags(inference) == METH_NOARGS ? PyCFunction_GetFunction(inference) : NULL;
    PyErr_Clear();  // one of them is no function of C
    bool found = find_getter(&self->requires_grad, tensor, "requires_grad");
    PyObject *const kept[] = {lane,    claims, log,   pacer,   segments, account, pending, inbox,
                              to_fail, ours,   watch, publish, failed,   changed, handle,  tensor,  parameter, increment, grad_enabled, inference};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) Py_INCREF(kept[i]);
    self->open = 1;
    if (!found) Py_CLEAR(self);
    return (PyObject *)self;
}

static int issuer_traverse(Issuer *self, visitproc visit, void *arg) {
    PyObject *const kept[] = {
        (PyObject *)self->lane, (PyObject *)self->claims, (PyObject *)self->log, (PyObject *)self->pacer, self->account, self->pending,
        self->inbox, self->to_fail, self->ours, self->watch, self->publish, self->failed, self->changed, self->observer, self->expire, self->running, (PyObject *)self->handle,
        (PyObject *)self->tensor, (PyObject *)self->parameter, self->increment, self->grad_enabled, self->inference, (PyObject *)Py_TYPE((PyObject *)self),
    };
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) Py_VISIT(kept[i]);
    for (size_t i = 0; i < KNOWN; i++) Py_VISIT((PyObject *)self->known[i].plan);
    return 0;
}

static int issuer_clear(Issuer *self) {
    PyObject **const kept[] = {&self->account, &self->pending, &self->inbox, &self->to_fail, &self->ours, &self->watch, &self->publish, &self->failed,
                                &self->changed, &self->observer, &self->expire, &self->running};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) Py_CLEAR(*kept[i]);
    for (size_t i = 0; i < KNOWN; i++) Py_CLEAR(self->known[i].plan);
    self->open = 0;
    return 0;
}

static void issuer_dealloc(Issuer *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    PyObject *forgotten = issuer_forget(self, NULL);
    Py_XDECREF(forgotten);
    issuer_clear(self);
    for (size_t i = 0; i < SEEN; i++) Py_XDECREF(self->seen[i].code);
    Py_XDECREF((PyObject *)self->lane), Py_XDECREF((PyObject *)self->claims), Py_XDECREF((PyObject *)self->log);
    Py_XDECREF((PyObject *)self->pacer), Py_XDECREF((PyObject *)self->handle), Py_XDECREF((PyObject *)self->tensor);
    Py_XDECREF((PyObject *)self->parameter), Py_XDECREF((PyObject *)self->segments), Py_XDECREF(self->increment), Py_XDECREF(self->grad_enabled);
    Py_XDECREF(self->inference), Py_XDECREF(self->requires_grad.descriptor);
    Py_XDECREF((PyObject *)self->once);
    PyObject_GC_Del(self);
    DECREF(type);
}

static PyMethodDef issuer_methods[] = {
    {"issue", (PyCFunction)(void *)issuer_issue, METH_FASTCALL,
     "issue(plan, t, target, result, out, others=()): return the handle of a collective that reads `t` and the `others`, "
     "which are combined first, writes `target` and returns `result`, for a caller who gave `out`; None if Python must "
     "issue the call."},
    {"add", (PyCFunction)issuer_add, METH_VARARGS, "add(t, op, impl, plan): set the plan for an allreduce of tensors like `t`."},
    {"forget", (PyCFunction)issuer_forget, METH_NOARGS, "Remove the plans that `add` has set."},
    {0},
};
static PyMemberDef issuer_members[] = {
    OFFERS("open", T_BOOL, Issuer, open, 0, "True while the communicator takes calls."),
    OFFERS("observer", T_OBJECT, Issuer, observer, 0, "Called with each handle; returns a callback for the end."),
    OFFERS("expire", T_OBJECT, Issuer, expire, 0, "Sets the default deadline of an allreduce's handle; None: there is no default."),
    OFFERS("strict", T_BOOL, Issuer, strict, 0, "True compares checksums of the memory that operations only read."),
    OFFERS("threads", T_BOOL, Issuer, threads, 0, "True if other threads may call too, one at a time."),
    {0},
};
static PyType_Slot issuer_slots[] = {
    {Py_tp_doc, "Issues the collectives of a lane."},
    {Py_tp_new, issuer_new}, {Py_tp_dealloc, issuer_dealloc}, {Py_tp_traverse, issuer_traverse}, {Py_tp_clear, issuer_clear},
    {Py_tp_methods, issuer_methods}, {Py_tp_members, issuer_members}, {0},
};
static PyType_Spec issuer_spec = {
    "aiodist._core.Issuer", sizeof(Issuer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, issuer_slots,
};

int issue_add(PyObject *module) {
    static const struct { PyObject **at; const char *text; } names[] = {
        {&s_filename, "co_filename"}, {&s_locals, "f_locals"}, {&s_self, "self"}, {&s_origin, "origin"},
        {&s_watching, "watching"}, {&s_keep_watch, "keep_watch"}, {&s_told, "_told"}, {&s_way, "shm"}, {&s_untyped_storage, "untyped_storage"}, {&s_data_ptr, "data_ptr"}, {&s_nbytes, "nbytes"},
        {&s_version, "_version"}, {&s_is_inference, "is_inference"},
        {&s_loop, "loop"}, {&s_running, "__asyncio_running_event_loop__"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].at = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
    PyObject *asyncio = PyImport_ImportModule("asyncio.events");
    running_loop = asyncio == NULL ? NULL : PyObject_GetAttrString(asyncio, "_get_running_loop");
    Py_XDECREF(asyncio);
    PyObject *types = PyImport_ImportModule("types"), *frame = types == NULL ? NULL : PyObject_GetAttrString(types, "FrameType");
    bool found = frame != NULL && find_getter(&frame_back, frame, "f_back") && find_getter(&frame_lasti, frame, "f_lasti");
    Py_XDECREF(types), Py_XDECREF(frame);
    if (running_loop == NULL || !found) return -1;
    if ((once_type = (PyTypeObject *)PyType_FromSpec(&once_spec)) == NULL) return -1;
    return (plan_type = add_type(module, &plan_spec)) && (issuer_type = add_type(module, &issuer_spec)) ? 0 : -1;
}
