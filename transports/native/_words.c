/* 64-bit words in memory that two processes share, and buffers that report when their last view is freed.
 *
 * Stores made by Python code have no defined order for another process; the stores of this module have one. ring.py defines the protocol
 * and the meaning of the words.
 *
 * Memory(fd, nbytes)   a shared mapping, exported as a buffer; aligned 64-bit words in it with acquire, release and full fence
 * Leases(...)          ranges of such memory handed out in order and returned in any order; the released prefix is published
 * Lease                one range of Leases, a writable buffer; freed when the last view of it is, on whatever thread that happens
 *
 * Records(...)         the record ring: one call writes a record, one reads the next (_records.c)
 * CopyThread(...)      copies made in order by a thread of their own (_copy_thread.c)
 *
 * All but the copies of a CopyThread runs under the interpreter's lock, which makes Leases safe to use from several threads of one process.
 */
#include "_words.h"
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14; the headers may be older than the kernel */
#define MADV_POPULATE_WRITE 23
#endif

uint64_t *flowrt_word(Memory *self, Py_ssize_t at)
{
    if (at < 0 || at % 8 || at > self->nbytes - 8) {
        PyErr_Format(PyExc_IndexError, "no 64-bit word at offset %zd of %zd bytes", at, self->nbytes);
        return NULL;
    }
    return (uint64_t *)(self->base + at);
}

static uint64_t *word(Memory *self, PyObject *offset)
{
    Py_ssize_t at = PyLong_AsSsize_t(offset);
    return at == -1 && PyErr_Occurred() ? NULL : flowrt_word(self, at);
}

int flowrt_expect(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments expected, %zd given", wanted, given);
    return 0;
}

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "nbytes", NULL};
    int fd;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "in", names, &fd, &nbytes))
        return NULL;
    if (nbytes <= 0)
        return PyErr_Format(PyExc_ValueError, "a mapping of %zd bytes", nbytes);
    Memory *self = (Memory *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    void *base = mmap(NULL, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        Py_DECREF(self);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->base = base;
    self->nbytes = nbytes;
    return (PyObject *)self;
}

static void memory_dealloc(Memory *self)
{
    if (self->base)
        munmap(self->base, (size_t)self->nbytes);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int memory_getbuffer(Memory *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->base, self->nbytes, 0, flags);
}

static PyObject *memory_load(Memory *self, PyObject *offset)
{
    uint64_t *at = word(self, offset);
    return at ? PyLong_FromUnsignedLongLong(flowrt_load(at)) : NULL;
}

static PyObject *memory_store(Memory *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t *at, value;
    if (!flowrt_expect(count, 2) || !(at = word(self, args[0])) || !flowrt_uint64(args[1], &value))
        return NULL;
    flowrt_store(at, value);
    Py_RETURN_NONE;
}

static PyObject *memory_publish(Memory *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t *at, *flag, value;
    if (count < 3 || count % 2 == 0) {
        flowrt_expect(count, 3);
        return NULL;
    }
    if (!(at = word(self, args[0])) || !flowrt_uint64(args[1], &value) || !(flag = word(self, args[2])))
        return NULL;
    for (Py_ssize_t next = 3; next < count; next += 2) {
        uint64_t *other = word(self, args[next]), also;
        if (!other || !flowrt_uint64(args[next + 1], &also))
            return NULL;
        flowrt_store(other, also);
    }
    return PyBool_FromLong(flowrt_publish(at, value, flag));
}

static PyObject *memory_raise_flag(Memory *self, PyObject *offset)
{
    uint64_t *flag = word(self, offset);
    if (!flag)
        return NULL;
    flowrt_raise(flag);
    Py_RETURN_NONE;
}

static PyObject *memory_populate(Memory *self, PyObject *const *args, Py_ssize_t count)
{
    if (!flowrt_expect(count, 2))
        return NULL;
    Py_ssize_t at = PyLong_AsSsize_t(args[0]), nbytes = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (at < 0 || nbytes < 0 || at > self->nbytes || nbytes > self->nbytes - at)
        return PyErr_Format(PyExc_ValueError, "no %zd bytes at %zd of %zd", nbytes, at, self->nbytes);
    int failed;
    Py_BEGIN_ALLOW_THREADS
    do
        failed = madvise(self->base + at, (size_t)nbytes, MADV_POPULATE_WRITE) < 0 ? errno : 0;
    while (failed == EINTR || failed == EAGAIN);
    Py_END_ALLOW_THREADS
    if (!failed || failed == EINVAL)
        return PyBool_FromLong(!failed);
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *memory_fill(Memory *self, PyObject *const *args, Py_ssize_t count)
{
    if (!flowrt_expect(count, 2))
        return NULL;
    Py_ssize_t at = PyLong_AsSsize_t(args[0]);
    if (at == -1 && PyErr_Occurred())
        return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(args[1], &view, PyBUF_FULL_RO) < 0)
        return NULL;
    int failed = at < 0 || at > self->nbytes || view.len > self->nbytes - at;
    if (failed)
        PyErr_Format(PyExc_ValueError, "no %zd bytes at %zd of %zd", view.len, at, self->nbytes);
    else
        failed = flowrt_flatten(self->base + at, &view) < 0;
    PyBuffer_Release(&view);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef memory_methods[] = {
    {"load", (PyCFunction)memory_load, METH_O, "load(offset) -> int: the word at `offset`, with acquire order."},
    {"store", (PyCFunction)(void (*)(void))memory_store, METH_FASTCALL, "store(offset, value): with release order."},
    {"publish", (PyCFunction)(void (*)(void))memory_publish, METH_FASTCALL,
     "publish(offset, value, flag_offset, *more) -> bool: store pairs (offset, value) of `more`, then `value`, with release order; full "
     "fence; lower the flag; was it raised?"},
    {"populate", (PyCFunction)(void (*)(void))memory_populate, METH_FASTCALL,
     "populate(offset, nbytes) -> bool: allocate and map whole pages for writing, with their content kept. False when this kernel cannot "
     "(then they must have been allocated before); OSError when there is no memory."},
    {"fill", (PyCFunction)(void (*)(void))memory_fill, METH_FASTCALL,
     "fill(offset, buffer): copy a buffer there, row-major; it may have strides."},
    {"raise_flag", (PyCFunction)memory_raise_flag, METH_O, "raise_flag(flag_offset): set the word to 1, then a full fence."},
    {NULL, NULL, 0, NULL},
};

static PyBufferProcs memory_buffer = {(getbufferproc)memory_getbuffer, NULL};

PyTypeObject MemoryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flowrt.transports.native._words.Memory",
    .tp_doc = "Memory(fd, nbytes): the first `nbytes` of `fd`, mapped shared. Keeps no descriptor.",
    .tp_basicsize = sizeof(Memory),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = memory_new,
    .tp_dealloc = (destructor)memory_dealloc,
    .tp_methods = memory_methods,
    .tp_as_buffer = &memory_buffer,
};

typedef struct {
    uint64_t end;
    int released;
} Entry;

typedef struct {
    PyObject_HEAD
    Memory *memory;
    char *area;
    uint64_t area_bytes;
    uint64_t *tail_word, *flag_word; /* after the tail's word comes that of the bytes held */
    uint64_t tail, held_bytes;
    uint64_t first, next; /* numbers of the oldest entry kept and of the next one; the entries lie in a power-of-two ring */
    uint64_t capacity;
    Py_ssize_t held;
    Entry *entries;
    int wake_fd;
    int detached;
} Leases;

typedef struct {
    PyObject_HEAD
    Leases *leases;
    char *base;
    Py_ssize_t nbytes;
    uint64_t number;
} Lease;

static PyTypeObject LeasesType, LeaseType;

static PyObject *leases_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "area_offset", "area_bytes", "tail_offset", "flag_offset", "wake_fd", NULL};
    Memory *memory;
    Py_ssize_t area, area_bytes;
    PyObject *tail, *flag;
    int wake_fd;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nnOOi", names, &MemoryType, &memory, &area, &area_bytes, &tail, &flag, &wake_fd))
        return NULL;
    if (area < 0 || area_bytes < 0 || area > memory->nbytes || area_bytes > memory->nbytes - area)
        return PyErr_Format(PyExc_ValueError, "an area of %zd bytes at %zd does not fit", area_bytes, area);
    uint64_t *tail_word = word(memory, tail), *flag_word = tail_word ? word(memory, flag) : NULL;
    if (!flag_word || !flowrt_word(memory, (char *)(tail_word + 1) - memory->base))
        return NULL;
    Leases *self = (Leases *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    Py_INCREF(memory);
    self->memory = memory;
    self->area = memory->base + area;
    self->area_bytes = (uint64_t)area_bytes;
    self->tail_word = tail_word;
    self->flag_word = flag_word;
    self->wake_fd = wake_fd;
    return (PyObject *)self;
}

static void leases_dealloc(Leases *self)
{
    PyMem_Free(self->entries);
    Py_XDECREF(self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int leases_grow(Leases *self)
{
    uint64_t capacity = self->capacity ? 2 * self->capacity : 16;
    Entry *entries = PyMem_Malloc(capacity * sizeof(Entry));
    if (!entries) {
        PyErr_NoMemory();
        return 0;
    }
    for (uint64_t number = self->first; number < self->next; number++)
        entries[number & (capacity - 1)] = self->entries[number & (self->capacity - 1)];
    PyMem_Free(self->entries);
    self->entries = entries;
    self->capacity = capacity;
    return 1;
}

static PyObject *leases_lease(Leases *self, PyObject *const *args, Py_ssize_t count)
{
    if (!flowrt_expect(count, 2))
        return NULL;
    if (self->detached)
        return PyErr_Format(PyExc_ValueError, "these leases are detached");
    uint64_t start, nbytes;
    if (!flowrt_uint64(args[0], &start) || !flowrt_uint64(args[1], &nbytes))
        return NULL;
    int empty = self->next == self->first; /* then the peer may restart anywhere further on */
    uint64_t last = empty ? self->tail : self->entries[(self->next - 1) & (self->capacity - 1)].end;
    uint64_t tail = empty ? start : self->tail;
    /* Compared by subtraction, so that no sum can overflow. */
    if (start < last || !nbytes || nbytes > self->area_bytes || start % self->area_bytes > self->area_bytes - nbytes ||
        start - tail > self->area_bytes - nbytes || start > UINT64_MAX - nbytes)
        return PyErr_Format(PyExc_ValueError, "a range of %llu bytes at %llu does not follow what was handed out", (unsigned long long)nbytes,
                            (unsigned long long)start);
    if (self->next - self->first == self->capacity && !leases_grow(self))
        return NULL;
    Lease *lease = PyObject_New(Lease, &LeaseType);
    if (!lease)
        return NULL;
    Py_INCREF(self);
    lease->leases = self;
    lease->base = self->area + start % self->area_bytes;
    lease->nbytes = (Py_ssize_t)nbytes;
    lease->number = self->next++;
    self->tail = tail;
    Entry *entry = &self->entries[lease->number & (self->capacity - 1)];
    entry->end = start + nbytes;
    entry->released = 0;
    self->held++;
    flowrt_store(self->tail_word + 1, self->held_bytes += nbytes);
    return (PyObject *)lease;
}

static void leases_release(Leases *self, uint64_t number, uint64_t nbytes)
{
    self->held--;
    if (self->detached) { /* no process waits for room any more; the last lease frees the mapping */
        if (!self->held)
            Py_CLEAR(self->memory);
        return;
    }
    flowrt_store(self->tail_word + 1, self->held_bytes -= nbytes);
    self->entries[number & (self->capacity - 1)].released = 1;
    if (number != self->first)
        return;
    while (self->first < self->next && self->entries[self->first & (self->capacity - 1)].released)
        self->tail = self->entries[self->first++ & (self->capacity - 1)].end;
    if (flowrt_publish(self->tail_word, self->tail, self->flag_word))
        flowrt_wake(self->wake_fd);
}

static PyObject *leases_detach(Leases *self, PyObject *unused)
{
    self->detached = 1;
    if (!self->held)
        Py_CLEAR(self->memory);
    Py_RETURN_NONE;
}

static PyObject *leases_held(Leases *self, void *unused)
{
    return PyLong_FromSsize_t(self->held);
}

static PyMethodDef leases_methods[] = {
    {"lease", (PyCFunction)(void (*)(void))leases_lease, METH_FASTCALL,
     "lease(start, nbytes) -> Lease. `start` counts all bytes ever handed out; ValueError when the range is impossible."},
    {"detach", (PyCFunction)leases_detach, METH_NOARGS, "detach(): the channel is closed. Sends no more wake-ups, and releases the memory with the last lease."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef leases_attributes[] = {
    {"held", (getter)leases_held, NULL, "How many leases are still referred to.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject LeasesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flowrt.transports.native._words.Leases",
    .tp_doc = "Leases(memory, area_offset, area_bytes, tail_offset, flag_offset, wake_fd): which ranges of an area are still referred to. "
              "The end of the released prefix is stored at tail_offset, the bytes held in the word after it; a raised flag is lowered, and wake_fd is written.",
    .tp_basicsize = sizeof(Leases),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = leases_new,
    .tp_dealloc = (destructor)leases_dealloc,
    .tp_methods = leases_methods,
    .tp_getset = leases_attributes,
};

static void lease_dealloc(Lease *self)
{
    Leases *leases = self->leases;
    leases_release(leases, self->number, (uint64_t)self->nbytes);
    Py_DECREF(leases);
    PyObject_Free(self);
}

static int lease_getbuffer(Lease *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->base, self->nbytes, 0, flags);
}

static PyBufferProcs lease_buffer = {(getbufferproc)lease_getbuffer, NULL};

static PyTypeObject LeaseType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flowrt.transports.native._words.Lease",
    .tp_doc = "A range of shared memory as a writable buffer; released when the last reference to it or to a view of it is dropped.",
    .tp_basicsize = sizeof(Lease),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)lease_dealloc,
    .tp_as_buffer = &lease_buffer,
};

#ifdef FLOWRT_STEPS
static PyObject *step_hook; /* hook(kind, address, value) -> int, the result of the access; or None: it is to be made here */

uint64_t flowrt_step(int kind, uint64_t *at, uint64_t value)
{
    PyObject *done = NULL;
    if (step_hook && PyGILState_Check()) { /* copy threads do not wait for the test */
        done = PyObject_CallFunction(step_hook, "iKK", kind, (unsigned long long)(uintptr_t)at, (unsigned long long)value);
        if (!done)
            PyErr_WriteUnraisable(step_hook);
    }
    uint64_t result = 0;
    if (done && done != Py_None)
        result = PyLong_AsUnsignedLongLong(done);
    else if (kind == STEP_LOAD)
        result = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    else if (kind == STEP_STORE)
        __atomic_store_n(at, value, __ATOMIC_RELEASE);
    else if (kind == STEP_EXCHANGE)
        result = __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
    else if (kind == STEP_WAKE)
        flowrt_eventfd_add((int)value);
    Py_XDECREF(done);
    return result;
}

static PyObject *set_step_hook(PyObject *self, PyObject *hook)
{
    Py_XSETREF(step_hook, Py_NewRef(hook));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"set_step_hook", set_step_hook, METH_O, NULL}, {NULL, NULL, 0, NULL}};
#else
static PyMethodDef functions[] = {{NULL, NULL, 0, NULL}};
#endif

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "flowrt.transports.native._words",
    .m_doc = "Atomic words in shared memory, and leases on ranges of it. See ring.py.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__words(void)
{
    PyTypeObject *types[] = {&MemoryType, &LeasesType, &LeaseType, &RecordsType, &CopyThreadType, &LoanType, &KnownEnvelopesType};
    PyObject *self = PyModule_Create(&module);
    for (size_t index = 0; self && index < sizeof types / sizeof *types; index++)
        if (PyModule_AddType(self, types[index]) < 0)
            Py_CLEAR(self);
    return self;
}
