/* Words in memory that two processes share, and buffers that tell when nobody looks at them any more.
 *
 * Here: what plain Python cannot promise. A store made by Python code has no defined order for another process to see; these have.
 * Not here: any protocol (ring.py says what the words mean).
 *
 * Memory(fd, nbytes)   a shared mapping, exported as a buffer; aligned 64-bit words in it with acquire, release and full fence
 * Ledger(...)          ranges of such memory handed out in order and given back in any order; the released prefix is published
 * Lease                one range of a Ledger, a writable buffer; gone when the last view of it is, on whatever thread that happens
 *
 * All of it runs under the interpreter's lock, which is what makes a Ledger safe to touch from several threads of one process.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    char *base;
    Py_ssize_t nbytes;
} Memory;

static PyTypeObject MemoryType;

static uint64_t *word(Memory *self, PyObject *offset)
{
    Py_ssize_t at = PyLong_AsSsize_t(offset);
    if (at == -1 && PyErr_Occurred())
        return NULL;
    if (at < 0 || at % 8 || at > self->nbytes - 8) {
        PyErr_Format(PyExc_IndexError, "no 64-bit word at offset %zd of %zd bytes", at, self->nbytes);
        return NULL;
    }
    return (uint64_t *)(self->base + at);
}

static int expect(Py_ssize_t given, Py_ssize_t wanted)
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
    return at ? PyLong_FromUnsignedLongLong(__atomic_load_n(at, __ATOMIC_ACQUIRE)) : NULL;
}

static PyObject *memory_store(Memory *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t *at;
    if (!expect(count, 2) || !(at = word(self, args[0])))
        return NULL;
    uint64_t value = PyLong_AsUnsignedLongLong(args[1]);
    if (value == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

/* The two halves of going to sleep without missing a wake-up. Each side writes its own word, passes a full fence, and reads the
 * other's: at least one of the two sees what the other wrote. */
static int publish(uint64_t *at, uint64_t value, uint64_t *flag)
{
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(flag, __ATOMIC_RELAXED) != 0 && __atomic_exchange_n(flag, 0, __ATOMIC_SEQ_CST) != 0;
}

static PyObject *memory_publish(Memory *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t *at, *flag;
    if (count < 3 || count % 2 == 0) {
        expect(count, 3);
        return NULL;
    }
    if (!(at = word(self, args[0])) || !(flag = word(self, args[2])))
        return NULL;
    uint64_t value = PyLong_AsUnsignedLongLong(args[1]);
    if (value == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    for (Py_ssize_t next = 3; next < count; next += 2) {
        uint64_t *other = word(self, args[next]);
        if (!other)
            return NULL;
        uint64_t also = PyLong_AsUnsignedLongLong(args[next + 1]);
        if (also == (uint64_t)-1 && PyErr_Occurred())
            return NULL;
        __atomic_store_n(other, also, __ATOMIC_RELEASE);
    }
    return PyBool_FromLong(publish(at, value, flag));
}

static PyObject *memory_raise_flag(Memory *self, PyObject *offset)
{
    uint64_t *flag = word(self, offset);
    if (!flag)
        return NULL;
    __atomic_store_n(flag, 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyMethodDef memory_methods[] = {
    {"load", (PyCFunction)memory_load, METH_O, "load(offset) -> int: the word at `offset`, with acquire order."},
    {"store", (PyCFunction)(void (*)(void))memory_store, METH_FASTCALL, "store(offset, value): with release order."},
    {"publish", (PyCFunction)(void (*)(void))memory_publish, METH_FASTCALL,
     "publish(offset, value, flag_offset, *more) -> bool: store pairs (offset, value) of `more`, then `value`, with release order; full "
     "fence; lower the flag; was it raised?"},
    {"raise_flag", (PyCFunction)memory_raise_flag, METH_O, "raise_flag(flag_offset): set the word to 1, then a full fence."},
    {NULL, NULL, 0, NULL},
};

static PyBufferProcs memory_buffer = {(getbufferproc)memory_getbuffer, NULL};

static PyTypeObject MemoryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transports._words.Memory",
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
    uint64_t *tail_word, *flag_word;
    uint64_t tail;
    uint64_t first, next; /* numbers of the oldest entry kept and of the next one; the entries lie in a power-of-two ring */
    uint64_t capacity;
    Py_ssize_t held;
    Entry *entries;
    int wake_fd;
    int detached;
} Ledger;

typedef struct {
    PyObject_HEAD
    Ledger *ledger;
    char *base;
    Py_ssize_t nbytes;
    uint64_t number;
} Lease;

static PyTypeObject LedgerType, LeaseType;

static PyObject *ledger_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
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
    if (!flag_word)
        return NULL;
    Ledger *self = (Ledger *)type->tp_alloc(type, 0);
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

static void ledger_dealloc(Ledger *self)
{
    PyMem_Free(self->entries);
    Py_XDECREF(self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int ledger_grow(Ledger *self)
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

static PyObject *ledger_lease(Ledger *self, PyObject *const *args, Py_ssize_t count)
{
    if (!expect(count, 2))
        return NULL;
    if (self->detached)
        return PyErr_Format(PyExc_ValueError, "a detached ledger hands out nothing");
    uint64_t start = PyLong_AsUnsignedLongLong(args[0]);
    if (start == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    uint64_t nbytes = PyLong_AsUnsignedLongLong(args[1]);
    if (nbytes == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    int empty = self->next == self->first; /* then the peer may begin anew anywhere further on */
    uint64_t last = empty ? self->tail : self->entries[(self->next - 1) & (self->capacity - 1)].end;
    uint64_t tail = empty ? start : self->tail;
    /* Compared by subtraction, so that no sum can overflow. */
    if (start < last || !nbytes || nbytes > self->area_bytes || start % self->area_bytes > self->area_bytes - nbytes ||
        start - tail > self->area_bytes - nbytes || start > UINT64_MAX - nbytes)
        return PyErr_Format(PyExc_ValueError, "a range of %llu bytes at %llu does not follow what was handed out", (unsigned long long)nbytes,
                            (unsigned long long)start);
    if (self->next - self->first == self->capacity && !ledger_grow(self))
        return NULL;
    Lease *lease = PyObject_New(Lease, &LeaseType);
    if (!lease)
        return NULL;
    Py_INCREF(self);
    lease->ledger = self;
    lease->base = self->area + start % self->area_bytes;
    lease->nbytes = (Py_ssize_t)nbytes;
    lease->number = self->next++;
    self->tail = tail;
    Entry *entry = &self->entries[lease->number & (self->capacity - 1)];
    entry->end = start + nbytes;
    entry->released = 0;
    self->held++;
    return (PyObject *)lease;
}

static void ledger_release(Ledger *self, uint64_t number)
{
    self->held--;
    if (self->detached) { /* nobody waits for room any more; the mapping goes with the last lease */
        if (!self->held)
            Py_CLEAR(self->memory);
        return;
    }
    self->entries[number & (self->capacity - 1)].released = 1;
    if (number != self->first)
        return;
    while (self->first < self->next && self->entries[self->first & (self->capacity - 1)].released)
        self->tail = self->entries[self->first++ & (self->capacity - 1)].end;
    if (publish(self->tail_word, self->tail, self->flag_word) && self->wake_fd >= 0) {
        uint64_t one = 1;
        while (write(self->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
    }
}

static PyObject *ledger_detach(Ledger *self, PyObject *unused)
{
    self->detached = 1;
    if (!self->held)
        Py_CLEAR(self->memory);
    Py_RETURN_NONE;
}

static PyObject *ledger_held(Ledger *self, void *unused)
{
    return PyLong_FromSsize_t(self->held);
}

static PyMethodDef ledger_methods[] = {
    {"lease", (PyCFunction)(void (*)(void))ledger_lease, METH_FASTCALL,
     "lease(start, nbytes) -> Lease. `start` counts all bytes ever handed out; ValueError when the range is impossible."},
    {"detach", (PyCFunction)ledger_detach, METH_NOARGS, "detach(): the channel is closed. Wake nobody any more, and let go of the memory with the last lease."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ledger_attributes[] = {
    {"held", (getter)ledger_held, NULL, "How many leases are still referred to.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject LedgerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transports._words.Ledger",
    .tp_doc = "Ledger(memory, area_offset, area_bytes, tail_offset, flag_offset, wake_fd): who still looks at which range of an area. "
              "The end of the released prefix is stored at tail_offset; a raised flag is lowered and answered by a write to wake_fd.",
    .tp_basicsize = sizeof(Ledger),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = ledger_new,
    .tp_dealloc = (destructor)ledger_dealloc,
    .tp_methods = ledger_methods,
    .tp_getset = ledger_attributes,
};

static void lease_dealloc(Lease *self)
{
    Ledger *ledger = self->ledger;
    ledger_release(ledger, self->number);
    Py_DECREF(ledger);
    PyObject_Free(self);
}

static int lease_getbuffer(Lease *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->base, self->nbytes, 0, flags);
}

static PyBufferProcs lease_buffer = {(getbufferproc)lease_getbuffer, NULL};

static PyTypeObject LeaseType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "transports._words.Lease",
    .tp_doc = "A range of shared memory as a writable buffer; released when the last reference to it or to a view of it is gone.",
    .tp_basicsize = sizeof(Lease),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)lease_dealloc,
    .tp_as_buffer = &lease_buffer,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "transports._words",
    .m_doc = "Atomic words in shared memory, and leases on ranges of it. See ring.py.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__words(void)
{
    if (PyType_Ready(&MemoryType) < 0 || PyType_Ready(&LedgerType) < 0 || PyType_Ready(&LeaseType) < 0)
        return NULL;
    PyObject *self = PyModule_Create(&module);
    if (!self)
        return NULL;
    if (PyModule_AddObjectRef(self, "Memory", (PyObject *)&MemoryType) < 0 || PyModule_AddObjectRef(self, "Ledger", (PyObject *)&LedgerType) < 0 ||
        PyModule_AddObjectRef(self, "Lease", (PyObject *)&LeaseType) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}
