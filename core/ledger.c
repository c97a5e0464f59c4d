// Tables that every operation uses: bytes in flight, the log, and the published memory.
#include "binding.h"

#include "checksum.h"

// --- claims ------------------------------------------------------------------------------------------------------

PyTypeObject *claims_type, *log_type, *segments_type;

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

typedef struct {
    unsigned long long start, nbytes;
    int writes;
} claim;

// Reads element `i` of `claims`, a tuple that begins with address, bytes and a flag; false with an exception set.
static bool claim_at(PyObject *claims, Py_ssize_t i, claim *found) {
    PyObject *one = PySequence_GetItem(claims, i);
    PyObject *fields = one == NULL ? NULL : PyTuple_GetSlice(one, 0, 3);
    bool read = fields != NULL && PyArg_ParseTuple(fields, "KKp", &found->start, &found->nbytes, &found->writes);
    Py_XDECREF(fields), Py_XDECREF(one);
    return read;
}

// Releases the first `count` of `claims`; false with an exception set.
static bool release_first(Claims *self, PyObject *claims, Py_ssize_t count) {
    claim one;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!claim_at(claims, i, &one)) return false;
        if (one.nbytes > 0) claims_release(self, (uintptr_t)one.start, one.nbytes, one.writes);
    }
    return true;
}

static PyObject *claims_acquire_all(Claims *self, PyObject *args) {
    PyObject *claims, *owner;
    if (!PyArg_ParseTuple(args, "OO", &claims, &owner)) return NULL;
    Py_ssize_t count = PySequence_Size(claims);
    if (count < 0) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        claim one;
        bool failed = false;
        const core_range *held = NULL;
        if (!claim_at(claims, i, &one)) failed = true;
        else if (one.nbytes > 0) held = claims_acquire(self, (uintptr_t)one.start, one.nbytes, one.writes, owner, &failed);
        if (held == NULL && !failed) continue;
        if (held != NULL) {  // Python raises the error, or withdraws the holder
            PyObject *holder = held->owner;
            Py_INCREF(holder);
            PyObject *gone = PyObject_CallMethod((PyObject *)self, "_drop_holder", "OnOO", claims, i, holder, owner);
            Py_DECREF(holder);
            if (gone != NULL) {
                Py_DECREF(gone);
                i--;
                continue;
            }
        }
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        release_first(self, claims, i);
        PyErr_Restore(type, value, traceback);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *claims_release_all(Claims *self, PyObject *claims) {
    Py_ssize_t count = PySequence_Size(claims);
    if (count < 0 || !release_first(self, claims, count)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *claims_checksum(Claims *self, PyObject *args) {
    (void)self;
    unsigned long long start, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &start, &nbytes)) return NULL;
    return PyLong_FromUnsignedLongLong(checksum((const void *)(uintptr_t)start, (size_t)nbytes));
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
     "claim(start, nbytes, writes, owner): claim these bytes, or return the owner of a conflicting claim."},
    {"acquire_all", (PyCFunction)claims_acquire_all, METH_VARARGS,
     "acquire_all(claims, owner): claim all (address, bytes, written, ...), or none. Calls `_drop_holder(claims, i, holder, owner)` "
     "if a holder has bytes of claim i."},
    {"release_all", (PyCFunction)claims_release_all, METH_O, "release_all(claims): release all claims of `acquire_all`."},
    {"checksum", (PyCFunction)claims_checksum, METH_VARARGS, "checksum(start, nbytes): return a hash of these bytes, of 64 bits."},
    {"release", (PyCFunction)claims_give_back, METH_VARARGS, "release(start, nbytes, writes): release a claim."},
    {0},
};
static PyType_Slot claims_slots[] = {
    {Py_tp_doc, "The bytes in flight: written ranges overlap no other range, read ranges may overlap one another."},
    {Py_tp_new, claims_new}, {Py_tp_dealloc, claims_dealloc}, {Py_tp_methods, claims_methods}, {Py_sq_length, claims_length}, {0},
};
static PyType_Spec claims_spec = {
    "aiodist._core.Claims", sizeof(Claims), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, claims_slots,
};

// --- published memory --------------------------------------------------------------------------------------------

core_place segments_find(const Segments *self, uintptr_t start, size_t nbytes) {
    for (unsigned i = 0; i < self->count; i++) {
        const struct segment_range *one = &self->segments[i];
        if (one->start <= start && start <= one->end && nbytes <= one->end - start)
            return (core_place){i, start - one->start};
    }
    return (core_place){CORE_NOWHERE, 0};
}

static PyObject *segments_add(Segments *self, PyObject *args) {
    unsigned long long start, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &start, &nbytes)) return NULL;
    struct segment_range *segments = PyMem_Realloc(self->segments, (self->count + 1) * sizeof *segments);
    if (segments == NULL) return PyErr_NoMemory();
    segments[self->count] = (struct segment_range){(uintptr_t)start, (uintptr_t)(start + nbytes)};
    self->segments = segments;
    self->count++;
    Py_RETURN_NONE;
}

static PyObject *segments_locate(Segments *self, PyObject *args) {
    unsigned long long start, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &start, &nbytes)) return NULL;
    core_place place = segments_find(self, (uintptr_t)start, (size_t)nbytes);
    if (place.segment == CORE_NOWHERE) Py_RETURN_NONE;
    return Py_BuildValue("(IK)", place.segment, (unsigned long long)place.offset);
}

static void segments_dealloc(Segments *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyMem_Free(self->segments);
    PyObject_Free(self);
    DECREF(type);
}

static Py_ssize_t segments_length(Segments *self) { return (Py_ssize_t)self->count; }

static PyMethodDef segments_methods[] = {
    {"add", (PyCFunction)segments_add, METH_VARARGS, "add(address, nbytes): add the next segment."},
    {"locate", (PyCFunction)segments_locate, METH_VARARGS,
     "locate(address, nbytes): return (segment, offset) of these bytes; None if no segment has them."},
    {0},
};
static PyMemberDef segments_members[] = {
    OFFERS("told", T_UINT, Segments, told, 0, "Number of published segments, in order of their numbers."),
    {0},
};
static PyType_Slot segments_slots[] = {
    {Py_tp_doc, "The segments of this rank's memory that others can map, by number."},
    {Py_tp_dealloc, segments_dealloc}, {Py_tp_methods, segments_methods}, {Py_tp_members, segments_members},
    {Py_sq_length, segments_length}, {0},
};
static PyType_Spec segments_spec = {"aiodist._core.Segments", sizeof(Segments), 0, Py_TPFLAGS_DEFAULT, segments_slots};

// --- the log of operations ---------------------------------------------------------------------------------------

PyObject *origin_pair(origin place) {
    if (place.code == NULL) Py_RETURN_NONE;
    return Py_BuildValue("(Oi)", place.code, place.instruction);
}

static PyObject *log_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    (void)args, (void)named;
    Log *self = (Log *)PyType_GenericAlloc(type, 0);
    if (self != NULL && (self->awaited = PyDict_New()) == NULL) {
        DECREF(self);
        return NULL;
    }
    if (self != NULL) self->full_at = -1;
    return (PyObject *)self;
}

static void log_dealloc(Log *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->totals);
    for (size_t i = 0; i < LOG_KEPT; i++) Py_XDECREF(self->kept[i].what), Py_XDECREF(self->kept[i].called.code);
    Py_XDECREF(self->awaited), Py_XDECREF(self->caller);
    for (size_t i = 0; self->gaps != NULL && i < GAPS_KEPT; i++)
        Py_XDECREF(self->gaps[i].kept.what), Py_XDECREF(self->gaps[i].kept.called.code);
    PyMem_Free(self->gaps);
    freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(self);
    DECREF(type);
}

void report_later(PyObject *where) {
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
    PyErr_WriteUnraisable(where);
}

// Calls the function that waits for the issue of operation `number`; its error does not undo the issue.
static void tell_issued(Log *self, long long number) {
    PyObject *key = PyLong_FromLongLong(number), *tell = key == NULL ? NULL : PyDict_GetItemWithError(self->awaited, key);
    if (tell != NULL) {
        Py_INCREF(tell);
        PyObject *result = PyDict_DelItem(self->awaited, key) < 0 ? NULL : PyObject_CallNoArgs(tell);
        Py_XDECREF(result);
    }
    if (PyErr_Occurred()) report_later(tell);
    Py_XDECREF(tell);
    Py_XDECREF(key);
}

static void count_oldest(Log *self);

void log_record(Log *self, PyObject *what, origin called, uint64_t nbytes) {
    if (self->seq == self->full_at) count_oldest(self);
    record *kept = &self->kept[self->seq % LOG_KEPT], before = *kept;
    Py_INCREF(what), Py_XINCREF(called.code);
    *kept = (record){what, called, 0, nbytes, 0};
    self->seq++;
    Py_XDECREF(before.what), Py_XDECREF(before.called.code);
    if (PyDict_Size(self->awaited) > 0) tell_issued(self, self->seq - 1);
}

static void keep_gap(Log *self, uint64_t seq) {
    gap *at = &self->gaps[self->gap_count++ % GAPS_KEPT], before = *at;
    *at = (gap){seq, self->kept[seq % LOG_KEPT]};
    Py_INCREF(at->kept.what), Py_XINCREF(at->kept.called.code);
    Py_XDECREF(before.kept.what), Py_XDECREF(before.kept.called.code);
}

void log_came(Log *self, uint64_t when) {
    uint64_t seq = (uint64_t)self->seq - 1;
    self->kept[seq % LOG_KEPT].came = when;
    uint64_t before = seq == 0 ? 0 : self->kept[(seq - 1) % LOG_KEPT].came;
    if (before == 0 || when < before + GAP) return;
    if (self->gaps == NULL && (self->gaps = PyMem_Calloc(GAPS_KEPT, sizeof *self->gaps)) == NULL) return;
    // Both ends count: this rank may have waited in the previous operation, or be late in this one.
    keep_gap(self, seq - 1);
    keep_gap(self, seq);
}

// arrivals(since): returns the times of issue from operation `since` on, as pairs of number and nanoseconds in uint64.
static PyObject *log_arrivals(Log *self, PyObject *number) {
    unsigned long long since = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    uint64_t seq = (uint64_t)self->seq, kept = seq < LOG_KEPT ? 0 : seq - LOG_KEPT;
    size_t gaps = self->gap_count < GAPS_KEPT ? self->gap_count : GAPS_KEPT, count = 0;
    struct { uint64_t seq, came; } *found = PyMem_Malloc((gaps + LOG_KEPT) * sizeof *found);
    if (found == NULL) return PyErr_NoMemory();
    for (size_t i = self->gap_count - gaps; i < self->gap_count; i++) {
        const gap *one = &self->gaps[i % GAPS_KEPT];
        // The operation between two consecutive gaps is stored twice.
        if (one->seq < since || one->seq >= kept || (count > 0 && found[count - 1].seq == one->seq)) continue;
        found[count].seq = one->seq, found[count++].came = one->kept.came;
    }
    for (uint64_t i = since > kept ? since : kept; i < seq; i++) {
        if (self->kept[i % LOG_KEPT].came == 0) continue;
        found[count].seq = i, found[count++].came = self->kept[i % LOG_KEPT].came;
    }
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)found, (Py_ssize_t)(count * sizeof *found));
    PyMem_Free(found);
    return bytes;
}

static PyObject *log_recorded(Log *self, PyObject *args) {
    PyObject *what, *code;
    int instruction;
    unsigned long long nbytes = 0;
    if (!PyArg_ParseTuple(args, "O(Oi)|K", &what, &code, &instruction, &nbytes)) return NULL;
    log_record(self, what, (origin){code, instruction}, nbytes);
    if (self->timed) log_came(self, core_now());
    Py_RETURN_NONE;
}

static PyObject *log_find(Log *self, PyObject *number) {
    long long seq = PyLong_AsLongLong(number);
    if (seq == -1 && PyErr_Occurred()) return NULL;
    const record *kept = NULL;
    if (seq >= 0 && seq < self->seq && seq >= self->seq - LOG_KEPT) kept = &self->kept[seq % LOG_KEPT];
    for (size_t i = 0; kept == NULL && self->gaps != NULL && i < GAPS_KEPT; i++)
        if (self->gaps[i].kept.what != NULL && self->gaps[i].seq == (uint64_t)seq) kept = &self->gaps[i].kept;
    if (kept == NULL) Py_RETURN_NONE;
    return Py_BuildValue("(LON)", seq, kept->what, origin_pair(kept->called));
}

// --- counts of operations, for metrics

// Operations of one fingerprint.
typedef struct {
    PyObject *what;
    unsigned long long operations, nbytes, polled;
} count;

static bool add_count(PyObject *totals, const count *one) {
    unsigned long long operations = 0, nbytes = 0;
    double seconds = 0;
    PyObject *kind = PyObject_GetAttrString(one->what, "kind"), *before = kind == NULL ? NULL : PyDict_GetItemWithError(totals, kind);
    if (before != NULL) PyArg_ParseTuple(before, "KKd", &operations, &nbytes, &seconds);
    PyObject *sum = PyErr_Occurred() ? NULL : Py_BuildValue("(KKd)", operations + one->operations, nbytes + one->nbytes,
                                                           seconds + (double)one->polled * 1e-9);
    bool added = sum != NULL && PyDict_SetItem(totals, kind, sum) == 0;
    Py_XDECREF(sum), Py_XDECREF(kind);
    return added;
}

// Returns a new dict: `totals` with the operations before `until`; NULL with an exception set. Another thread may issue as
// soon as a Python object is created, so the records are read first.
static PyObject *counts_before(Log *self, long long until) {
    count *found = PyMem_Malloc((size_t)(until - self->counted + 1) * sizeof *found);
    if (found == NULL) return PyErr_NoMemory();
    size_t distinct = 0;
    for (long long seq = self->counted; seq < until; seq++) {
        const record *one = &self->kept[seq % LOG_KEPT];
        size_t at = distinct;
        while (at > 0 && distinct - at < 16 && found[at - 1].what != one->what) at--;  // a loop has few distinct calls
        if (at == 0 || found[at - 1].what != one->what) {
            Py_INCREF(one->what);
            found[at = distinct++] = (count){one->what, 0, 0, 0};
            at++;
        }
        found[at - 1].operations++, found[at - 1].nbytes += one->nbytes, found[at - 1].polled += one->polled;
    }
    PyObject *before = self->totals;
    Py_INCREF(before);
    PyObject *totals = PyDict_Copy(before);
    for (size_t i = 0; i < distinct; i++) {
        if (totals != NULL && !add_count(totals, &found[i])) Py_CLEAR(totals);
        Py_DECREF(found[i].what);
    }
    Py_DECREF(before);
    PyMem_Free(found);
    return totals;
}

// Adds the older half of the records to `totals`, before the next records replace them.
static void count_oldest(Log *self) {
    PyObject *before = self->totals, *totals = counts_before(self, self->counted + LOG_KEPT / 2);
    self->counted += LOG_KEPT / 2, self->full_at += LOG_KEPT / 2;
    if (totals != NULL) self->totals = totals, Py_DECREF(before);
    else PyErr_WriteUnraisable((PyObject *)self);
}

static PyObject *log_counts(Log *self, PyObject *none) {
    (void)none;
    if (self->totals == NULL) {
        if ((self->totals = PyDict_New()) == NULL) return NULL;
        self->counted = self->seq < LOG_KEPT ? 0 : self->seq - LOG_KEPT;
        self->full_at = self->counted + LOG_KEPT;
    }
    return counts_before(self, self->seq);
}

static PyMethodDef log_methods[] = {
    {"record", (PyCFunction)log_recorded, METH_VARARGS,
     "record(what, origin, nbytes=0): record the next operation, `seq`."},
    {"counts", (PyCFunction)log_counts, METH_NOARGS,
     "Return (operations, bytes, seconds of polling) by kind. Counts from the first call on, with the records of then."},
    {"arrivals", (PyCFunction)log_arrivals, METH_O,
     "arrivals(since): return the times of issue from operation `since` on: pairs (number, nanoseconds) of uint64."},
    {"kept", (PyCFunction)log_find, METH_O, "kept(seq): return (seq, what, origin) of an operation, or None."},
    {0},
};
static PyMemberDef log_members[] = {
    OFFERS("seq", T_LONGLONG, Log, seq, 0, "Number of issued operations, and number of the next one."),
    OFFERS("timed", T_BOOL, Log, timed, 0, "True if times of issue are recorded."),
    OFFERS("awaited", T_OBJECT, Log, awaited, READONLY, "Callbacks for the record of an operation, by number."),
    OFFERS("caller", T_OBJECT, Log, caller, 0, "Recorded origin, as (code, instruction); None for the calling line."),
    {0},
};
static PyType_Slot log_slots[] = {
    {Py_tp_doc, "The operations that a communicator has issued, in order."},
    {Py_tp_new, log_new}, {Py_tp_dealloc, log_dealloc}, {Py_tp_methods, log_methods}, {Py_tp_members, log_members}, {0},
};
static PyType_Spec log_spec = {"aiodist._core.Log", sizeof(Log), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, log_slots};

int ledger_add(PyObject *module) {
    return (claims_type = add_type(module, &claims_spec)) && (segments_type = add_type(module, &segments_spec)) &&
                   (log_type = add_type(module, &log_spec))
               ? 0 : -1;
}
