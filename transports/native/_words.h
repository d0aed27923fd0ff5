/* What the files of the module flowrt.transports.native._words share. See _words.c. */
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

extern PyTypeObject MemoryType, RecordsType, LaneType, LoanType;

/* The word at `offset`; NULL with IndexError set when there is none. */
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

/* Copy from memory that a peer may write meanwhile. What is checked afterwards is the copy: the compiler must not read the original again. */
static inline void flowrt_copy_in(void *to, const void *from, size_t nbytes)
{
    memcpy(to, from, nbytes);
    __asm__ volatile("" : : : "memory");
}

/* Exactly `wanted` arguments, else 0 with TypeError set. */
int flowrt_expect(Py_ssize_t given, Py_ssize_t wanted);

/* 1 when the integer was read into `value`, else 0 with an error set. */
static inline int flowrt_uint64(PyObject *number, uint64_t *value)
{
    *value = PyLong_AsUnsignedLongLong(number);
    return *value != (uint64_t)-1 || !PyErr_Occurred();
}

static inline uint64_t flowrt_load(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

static inline void flowrt_store(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

/* The two halves of going to sleep without missing a wake-up. Each side writes its own word, passes a full fence, and reads the
 * other's: at least one of the two sees what the other wrote. True when the flag was up; it is down now, and somebody must be woken. */
static inline int flowrt_publish(uint64_t *at, uint64_t value, uint64_t *flag)
{
    flowrt_store(at, value);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(flag, __ATOMIC_RELAXED) != 0 && __atomic_exchange_n(flag, 0, __ATOMIC_SEQ_CST) != 0;
}

/* One system call: the eventfd's owner wakes. A negative descriptor is nobody. */
static inline void flowrt_wake(int fd)
{
    uint64_t one = 1;
    while (fd >= 0 && write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

#endif
