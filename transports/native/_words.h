/* Declarations shared by the files of the module flowrt.transports.native._words. See _words.c. */
#ifndef FLOWRT_WORDS_H
#define FLOWRT_WORDS_H

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <stdint.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    char *base;
    Py_ssize_t nbytes;
} Memory;

extern PyTypeObject MemoryType, RecordsType, CopyThreadType, LoanType, KnownEnvelopesType;

/* Envelopes that differ only in their numbers (_envelopes.c). */
typedef struct KnownEnvelopes KnownEnvelopes;
#define MAX_ENVELOPE_BYTES 512

/* Writes the envelope of a message with a known form to `envelope`, and returns its bytes, or 0. `data` gets its tensor's buffer, borrowed,
 * or NULL, and `payload_bytes` the size that this must have. */
size_t flowrt_known_encode(KnownEnvelopes *self, PyObject *message, uint64_t sequence, char *envelope, PyObject **data, size_t *payload_bytes);

/* The message of an envelope of a known form, number `expected`, with a copy of its payload. NULL without an error when it is another. */
PyObject *flowrt_known_decode(KnownEnvelopes *self, const char *envelope, size_t nbytes, uint64_t expected, const char *payload,
                              size_t payload_bytes);

/* Returns the word at `offset`, or NULL with IndexError set for an invalid offset. */
uint64_t *flowrt_word(Memory *memory, Py_ssize_t offset);

/* Copy what `view` shows to `to`, row-major, whatever its strides. -1 with an error set when it cannot be. */
static inline int flowrt_flatten(char *to, Py_buffer *view)
{
    if (!PyBuffer_IsContiguous(view, 'C'))
        return PyBuffer_ToContiguous(to, view, view->len, 'C');
    if (view->len)
        memcpy(to, view->buf, (size_t)view->len);
    return 0;
}

/* Returns 0 with TypeError set unless there are exactly `wanted` arguments. */
int flowrt_expect(Py_ssize_t given, Py_ssize_t wanted);

/* Reads an integer into `value`. Returns 1, or 0 with an error set. */
static inline int flowrt_uint64(PyObject *number, uint64_t *value)
{
    *value = PyLong_AsUnsignedLongLong(number);
    return *value != (uint64_t)-1 || !PyErr_Occurred();
}

/* Every access to memory that two processes share goes through these. In a build with FLOWRT_STEPS a test decides before each of them
 * which process goes on, and when a stored word becomes visible (tests/ring_steps.py). */
#ifdef FLOWRT_STEPS
enum { STEP_LOAD, STEP_STORE, STEP_FENCE, STEP_EXCHANGE, STEP_BYTES, STEP_WAKE };
uint64_t flowrt_step(int kind, uint64_t *at, uint64_t value);
#define FLOWRT_ACCESS(kind, at, value, access) return flowrt_step(kind, at, value)
#else
#define FLOWRT_ACCESS(kind, at, value, access) return access
#endif

static inline uint64_t flowrt_load(const uint64_t *at)
{
    FLOWRT_ACCESS(STEP_LOAD, (uint64_t *)at, 0, __atomic_load_n(at, __ATOMIC_ACQUIRE));
}

static inline uint64_t flowrt_store(uint64_t *at, uint64_t value)
{
    FLOWRT_ACCESS(STEP_STORE, at, value, (__atomic_store_n(at, value, __ATOMIC_RELEASE), 0));
}

static inline uint64_t flowrt_fence(void)
{
    FLOWRT_ACCESS(STEP_FENCE, NULL, 0, (__atomic_thread_fence(__ATOMIC_SEQ_CST), 0));
}

static inline uint64_t flowrt_exchange(uint64_t *at, uint64_t value)
{
    FLOWRT_ACCESS(STEP_EXCHANGE, at, value, __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST));
}

/* Called before bytes of a record are written or read. */
static inline uint64_t flowrt_bytes(void)
{
    FLOWRT_ACCESS(STEP_BYTES, NULL, 0, 0);
}

/* Copy from memory that a peer may write meanwhile. What is checked afterwards is the copy: the compiler must not read the original again. */
static inline void flowrt_copy_in(void *to, const void *from, size_t nbytes)
{
    flowrt_bytes();
    memcpy(to, from, nbytes);
    __asm__ volatile("" : : : "memory");
}

/* The two halves of going to sleep without missing a wake-up. Each side writes its own word, passes a full fence, and reads the
 * other's: at least one of the two sees what the other wrote. True when the flag was up; it is down now, and the peer must be woken. */
static inline int flowrt_publish(uint64_t *at, uint64_t value, uint64_t *flag)
{
    flowrt_store(at, value);
    flowrt_fence();
    return flowrt_load(flag) != 0 && flowrt_exchange(flag, 0) != 0;
}

static inline void flowrt_raise(uint64_t *flag)
{
    flowrt_store(flag, 1);
    flowrt_fence();
}

/* One system call: the process that reads the eventfd wakes. A negative descriptor wakes no process. */
static inline uint64_t flowrt_eventfd_add(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    return 0;
}

static inline uint64_t flowrt_wake(int fd)
{
    if (fd < 0)
        return 0;
    FLOWRT_ACCESS(STEP_WAKE, NULL, (uint64_t)fd, flowrt_eventfd_add(fd));
}

#endif
