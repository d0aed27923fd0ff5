/* The record ring of one direction: one call writes a record and notifies the reader, one call reads the next and notifies the writer.
 *
 * This file handles the bytes of records and the cursors, as ring.py describes them. ring_writer.py and ring_reader.py handle envelopes and
 * choose the path of a payload. These two functions are in C because they are most of the cost of a small message: one call replaces a
 * dozen.
 */
#include "_words.h"

enum { SKIP, INLINE, PLACED, BULK, CHUNKED, NUM_KINDS }; /* as in ring.py */
enum { HEAD = 0, TAIL = 8, TAKEN_MESSAGES = 9, TAKEN_BYTES = 10, READER_SLEEPS = 24, WRITER_SLEEPS = 32 }; /* the same, in words */
#define ALIGNMENT 32
#define WARM_BYTES (1 << 16)

typedef struct {
    uint32_t nbytes, kind, envelope_bytes, payload_bytes;
    uint64_t start;
} Record;

typedef struct {
    PyObject_HEAD
    Memory *memory;
    char *records;
    uint64_t *words;
    uint64_t size, head, tail;
    uint64_t taken_messages, taken_bytes;
    int wake_fd;
} Records;

static PyObject *records_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "words_offset", "records_offset", "records_bytes", "wake_fd", NULL};
    Memory *memory;
    Py_ssize_t words, at, size;
    int wake_fd;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nnni", names, &MemoryType, &memory, &words, &at, &size, &wake_fd))
        return NULL;
    if (!flowrt_word(memory, words) || !flowrt_word(memory, words + 8 * WRITER_SLEEPS))
        return NULL;
    if (at < 0 || at % ALIGNMENT || size <= 0 || size % ALIGNMENT || size > UINT32_MAX || at > memory->nbytes || size > memory->nbytes - at)
        return PyErr_Format(PyExc_ValueError, "records of %zd bytes at %zd do not fit", size, at);
    Records *self = (Records *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    Py_INCREF(memory);
    self->memory = memory;
    self->records = memory->base + at;
    self->words = (uint64_t *)(memory->base + words);
    self->size = (uint64_t)size;
    self->wake_fd = wake_fd;
    return (PyObject *)self;
}

static void records_dealloc(Records *self)
{
    Py_XDECREF(self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Reads TAIL. Returns 0 with an error set for an impossible value. */
static int refresh(Records *self)
{
    uint64_t tail = flowrt_load(self->words + TAIL);
    if (tail - self->tail > self->head - self->tail) {
        PyErr_SetString(PyExc_RuntimeError, "the peer's cursors are impossible");
        return 0;
    }
    self->tail = tail;
    return 1;
}

/* Whether `nbytes` fit in one piece: 1, or 0 when there is no room now, or -1 with an error set. `skipped` gets the bytes up to the
 * end of the ring that have to be skipped first. Changes nothing that the writer remembers: a refused record leaves no trace. */
static int find_room(Records *self, uint64_t nbytes, uint64_t *skipped)
{
    uint64_t at = self->head % self->size, rest = self->size - at;
    *skipped = 0;
    if (at >= WARM_BYTES || nbytes > rest) {
        if (!refresh(self))
            return -1;
        /* All read: begin again at the start, whose pages and cache lines are warm, if that leaves room for the record. */
        if (nbytes > rest || (self->tail == self->head && rest + nbytes <= self->size))
            *skipped = rest;
    }
    uint64_t needed = *skipped + nbytes;
    if (self->head + needed - self->tail > self->size && !refresh(self))
        return -1;
    return self->head + needed - self->tail <= self->size;
}

static PyObject *records_put(Records *self, PyObject *const *args, Py_ssize_t count)
{
    if (!flowrt_expect(count, 6))
        return NULL;
    unsigned long kind = PyLong_AsUnsignedLong(args[0]);
    uint64_t start, payload_bytes;
    if ((kind == (unsigned long)-1 && PyErr_Occurred()) || !flowrt_uint64(args[1], &start) || !flowrt_uint64(args[2], &payload_bytes))
        return NULL;
    if (!PyBytes_Check(args[3]) || !PyList_Check(args[4]) || !PyList_Check(args[5]) || PyList_GET_SIZE(args[4]) != PyList_GET_SIZE(args[5]))
        return PyErr_Format(PyExc_TypeError, "an envelope in bytes, a list of sizes and a list of as many buffers are expected");
    uint64_t envelope_bytes = (uint64_t)PyBytes_GET_SIZE(args[3]);
    uint64_t nbytes = sizeof(Record) + envelope_bytes + (kind == INLINE ? payload_bytes : 0);
    nbytes = (nbytes + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1);
    /* At most half the ring: then it fits before the end or after the start of an empty ring, wherever the cursors are. */
    if (kind == SKIP || kind >= NUM_KINDS || payload_bytes > UINT32_MAX || nbytes > self->size / 2)
        return PyErr_Format(PyExc_ValueError, "a record of kind %lu and %llu bytes; at most %llu bytes fit", kind,
                            (unsigned long long)nbytes, (unsigned long long)self->size / 2);
    uint64_t skipped;
    int room = find_room(self, nbytes, &skipped);
    if (room <= 0)
        return room < 0 ? NULL : PyBool_FromLong(0);
    if (skipped) {
        Record skip = {(uint32_t)skipped, SKIP, 0, 0, 0};
        flowrt_bytes();
        memcpy(self->records + self->head % self->size, &skip, sizeof skip);
    }
    char *at = self->records + (self->head + skipped) % self->size;
    Record record = {(uint32_t)nbytes, (uint32_t)kind, (uint32_t)envelope_bytes, (uint32_t)payload_bytes, start};
    flowrt_bytes();
    memcpy(at, &record, sizeof record);
    at += sizeof record;
    memcpy(at, PyBytes_AS_STRING(args[3]), envelope_bytes);
    at += envelope_bytes;
    uint64_t left = kind == INLINE ? payload_bytes : 0;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(args[5]); index++) {
        Py_ssize_t size = PyLong_AsSsize_t(PyList_GET_ITEM(args[4], index));
        Py_buffer view;
        if ((size == -1 && PyErr_Occurred()) || PyObject_GetBuffer(PyList_GET_ITEM(args[5], index), &view, PyBUF_FULL_RO) < 0)
            return NULL;
        int failed = view.len != size || (uint64_t)size > left;
        if (failed)
            PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes where %zd were announced", view.len, size);
        else
            failed = flowrt_flatten(at, &view) < 0;
        PyBuffer_Release(&view);
        if (failed)
            return NULL; /* nothing was published */
        at += size;
        left -= (uint64_t)size;
    }
    if (left)
        return PyErr_Format(PyExc_ValueError, "%llu bytes fewer than announced", (unsigned long long)left);
    self->head += skipped + nbytes;
    if (flowrt_publish(self->words + HEAD, self->head, self->words + READER_SLEEPS))
        flowrt_wake(self->wake_fd);
    Py_RETURN_TRUE;
}

/* Writes a message of a known form, with its payload. The payload bytes; None: nothing done. */
static PyObject *records_put_message(Records *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t sequence, skipped;
    if (!flowrt_expect(count, 3) || !flowrt_uint64(args[2], &sequence))
        return NULL;
    if (!PyObject_TypeCheck(args[0], &KnownEnvelopesType))
        return PyErr_Format(PyExc_TypeError, "known envelopes are expected");
    char envelope[MAX_ENVELOPE_BYTES];
    PyObject *data;
    size_t payload_bytes, envelope_bytes = flowrt_known_encode((KnownEnvelopes *)args[0], args[1], sequence, envelope, &data, &payload_bytes);
    if (!envelope_bytes)
        Py_RETURN_NONE;
    uint64_t nbytes = (sizeof(Record) + envelope_bytes + payload_bytes + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1);
    if (nbytes > self->size / 2)
        Py_RETURN_NONE;
    Py_buffer view = {0};
    if (data && PyObject_GetBuffer(data, &view, PyBUF_FULL_RO) < 0) {
        PyErr_Clear(); /* codec.py says what is wrong */
        Py_RETURN_NONE;
    }
    int room = (size_t)view.len == payload_bytes ? find_room(self, nbytes, &skipped) : 0;
    if (room > 0) {
        flowrt_bytes();
        if (skipped) {
            Record skip = {(uint32_t)skipped, SKIP, 0, 0, 0};
            memcpy(self->records + self->head % self->size, &skip, sizeof skip);
        }
        char *at = self->records + (self->head + skipped) % self->size;
        Record record = {(uint32_t)nbytes, INLINE, (uint32_t)envelope_bytes, (uint32_t)payload_bytes, 0};
        memcpy(at, &record, sizeof record);
        memcpy(at + sizeof record, envelope, envelope_bytes);
        if (data && flowrt_flatten(at + sizeof record + envelope_bytes, &view) < 0)
            room = -1;
    }
    if (data)
        PyBuffer_Release(&view);
    if (room < 0)
        return NULL;
    if (!room)
        Py_RETURN_NONE;
    self->head += skipped + nbytes;
    if (flowrt_publish(self->words + HEAD, self->head, self->words + READER_SLEEPS))
        flowrt_wake(self->wake_fd);
    return PyLong_FromSize_t(payload_bytes);
}

static void take(Records *self, uint64_t payload_bytes)
{
    flowrt_store(self->words + TAKEN_BYTES, self->taken_bytes += payload_bytes);
    flowrt_store(self->words + TAKEN_MESSAGES, ++self->taken_messages);
}

/* Copies the head of the record at the read cursor out of shared memory and checks it. Returns 0, or -1 with an error set. */
static int read_head(Records *self, Record *record)
{
    uint64_t there = self->head - self->tail, rest = self->size - self->tail % self->size;
    if (there < sizeof *record || rest < sizeof *record) {
        PyErr_SetString(PyExc_ValueError, "a record that is cut off");
        return -1;
    }
    flowrt_copy_in(record, self->records + self->tail % self->size, sizeof *record);
    uint64_t body = sizeof *record + (uint64_t)record->envelope_bytes + (record->kind == INLINE ? record->payload_bytes : 0);
    if (record->nbytes % ALIGNMENT || body > record->nbytes || record->nbytes > there || record->nbytes > rest ||
        record->kind >= NUM_KINDS) {
        PyErr_Format(PyExc_ValueError, "a record of kind %u and %u bytes that does not fit where it lies", record->kind, record->nbytes);
        return -1;
    }
    return 0;
}

static PyObject *records_next(Records *self, PyObject *unused)
{
    if (self->tail == self->head) {
        uint64_t head = flowrt_load(self->words + HEAD);
        if (head == self->tail)
            Py_RETURN_NONE;
        if (head - self->tail > self->size)
            return PyErr_Format(PyExc_ValueError, "the peer's cursors are impossible");
        self->head = head;
    }
    Record record;
    if (read_head(self, &record) < 0)
        return NULL;
    if (record.kind == SKIP) { /* a record follows it at the start of the ring: one call reads at most one of each */
        if (record.nbytes != self->size - self->tail % self->size)
            return PyErr_Format(PyExc_ValueError, "%u bytes skipped that do not reach the end of the ring", record.nbytes);
        self->tail += record.nbytes;
        if (read_head(self, &record) < 0)
            return NULL;
        if (record.kind == SKIP)
            return PyErr_Format(PyExc_ValueError, "two skips in a row");
    }
    const char *at = self->records + self->tail % self->size + sizeof record;
    flowrt_bytes();
    PyObject *envelope = PyBytes_FromStringAndSize(at, record.envelope_bytes), *payload = NULL;
    if (record.kind == INLINE && record.payload_bytes)
        payload = PyByteArray_FromStringAndSize(at + record.envelope_bytes, record.payload_bytes);
    else
        payload = Py_NewRef(Py_None);
    PyObject *read = envelope && payload ? Py_BuildValue("IKINN", record.kind, (unsigned long long)record.start, record.payload_bytes,
                                                         envelope, payload)
                                         : NULL;
    if (!read) {
        if (!envelope || !payload) {
            Py_XDECREF(envelope);
            Py_XDECREF(payload);
        }
        return NULL;
    }
    self->tail += record.nbytes;
    if (record.kind == INLINE || record.kind == PLACED)
        take(self, record.payload_bytes);
    if (flowrt_publish(self->words + TAIL, self->tail, self->words + WRITER_SLEEPS))
        flowrt_wake(self->wake_fd);
    return read;
}

/* As `next`, for a record in place of a message of a known form. Another record is left to `next`. */
static PyObject *records_next_message(Records *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t expected;
    if (!flowrt_expect(count, 2) || !flowrt_uint64(args[1], &expected))
        return NULL;
    if (!PyObject_TypeCheck(args[0], &KnownEnvelopesType))
        return PyErr_Format(PyExc_TypeError, "known envelopes are expected");
    if (self->tail == self->head) {
        uint64_t head = flowrt_load(self->words + HEAD);
        if (head == self->tail)
            Py_RETURN_NONE;
        if (head - self->tail > self->size)
            return PyErr_Format(PyExc_ValueError, "the peer's cursors are impossible");
        self->head = head;
    }
    Record record;
    if (read_head(self, &record) < 0)
        return NULL;
    if (record.kind == INLINE && record.envelope_bytes <= MAX_ENVELOPE_BYTES) {
        char envelope[MAX_ENVELOPE_BYTES];
        const char *at = self->records + self->tail % self->size + sizeof record;
        flowrt_copy_in(envelope, at, record.envelope_bytes);
        PyObject *message = flowrt_known_decode((KnownEnvelopes *)args[0], envelope, record.envelope_bytes, expected,
                                                at + record.envelope_bytes, record.payload_bytes);
        if (message) {
            self->tail += record.nbytes;
            take(self, record.payload_bytes);
            if (flowrt_publish(self->words + TAIL, self->tail, self->words + WRITER_SLEEPS))
                flowrt_wake(self->wake_fd);
            return message;
        }
        if (PyErr_Occurred())
            return NULL;
    }
    return records_next(self, NULL);
}

static PyObject *records_took(Records *self, PyObject *nbytes)
{
    uint64_t payload_bytes;
    if (!flowrt_uint64(nbytes, &payload_bytes))
        return NULL;
    take(self, payload_bytes);
    if (flowrt_publish(self->words + TAKEN_MESSAGES, self->taken_messages, self->words + WRITER_SLEEPS))
        flowrt_wake(self->wake_fd);
    Py_RETURN_NONE;
}

static PyObject *records_unread(Records *self, PyObject *unused)
{
    return PyBool_FromLong(flowrt_load(self->words + HEAD) != self->tail);
}

#ifdef FLOWRT_STEPS
static PyObject *records_cursors(Records *self, void *unused)
{
    return Py_BuildValue("KKKK", (unsigned long long)self->head, (unsigned long long)self->tail, (unsigned long long)self->taken_messages,
                         (unsigned long long)self->taken_bytes);
}

static PyGetSetDef records_attributes[] = {
    {"cursors", (getter)records_cursors, NULL, "The cursors of this end.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
#endif

static PyMethodDef records_methods[] = {
    {"put", (PyCFunction)(void (*)(void))records_put, METH_FASTCALL,
     "put(kind, start, payload_bytes, envelope, sizes, buffers) -> bool: write a record, with the buffers' bytes when it is INLINE, and "
     "wake the reader if it sleeps. False, nothing done: no room now. ValueError: a buffer of another size. "
     "RuntimeError: the peer's cursors are impossible."},
    {"put_message", (PyCFunction)(void (*)(void))records_put_message, METH_FASTCALL,
     "put_message(known_envelopes, message, sequence) -> int: write an INLINE record as `put`; its payload bytes. None, nothing done: the "
     "message has no known form, its buffer does not fit it, or there is no room now. Errors as `put`."},
    {"next_message", (PyCFunction)(void (*)(void))records_next_message, METH_FASTCALL,
     "next_message(known_envelopes, expected): the message of the next record, if that has a known form and this sequence number, taken as "
     "by `next`; else `next()`."},
    {"next", (PyCFunction)records_next, METH_NOARGS,
     "next() -> (kind, start, payload_bytes, envelope, payload or None), or None when there is no record. Copies everything out, frees the "
     "room, counts INLINE and PLACED as taken, and wakes the writer if it sleeps. ValueError: the bytes are not a record."},
    {"took", (PyCFunction)records_took, METH_O, "took(payload_bytes): a message of another kind was taken."},
    {"unread", (PyCFunction)records_unread, METH_NOARGS, "unread() -> bool: is there a record that `next` has not returned?"},
    {NULL, NULL, 0, NULL},
};

PyTypeObject RecordsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flowrt.transports.native._words.Records",
    .tp_doc = "Records(memory, words_offset, records_offset, records_bytes, wake_fd): one end of a record ring, to write or to read.",
    .tp_basicsize = sizeof(Records),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = records_new,
    .tp_dealloc = (destructor)records_dealloc,
    .tp_methods = records_methods,
#ifdef FLOWRT_STEPS
    .tp_getset = records_attributes,
#endif
};
