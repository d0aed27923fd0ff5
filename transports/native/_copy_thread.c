/* Makes copies into shared memory without blocking the event loop: one thread per number and process, alive while a CopyThread uses it.
 *
 * A CopyThread is one user's queue of copies. They are made in order, and each is announced to the peer in the 32-byte field of the thread
 * when it is done (ring.py defines the field). The threads never touch Python: they copy, store, and write to eventfds. A buffer
 * view keeps a source alive; the event loop's thread releases it in `collect`, after the copy is complete.
 */
#include "_words.h"
#include <pthread.h>
#include <signal.h>

#define MAX_COPY_THREADS 16

struct CopyThread;

typedef struct Job {
    struct Job *next;
    struct CopyThread *owner;
    char *to;
    size_t nbytes;
    const char *from;
    uint64_t event, chunk, tail;
    int announce;
    Py_buffer view;
} Job;

typedef struct {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* a job was queued or done, or the thread must stop */
    Job *first, **last;
    int users, stop;
    pid_t process;
} Worker;

typedef struct CopyThread {
    PyObject_HEAD
    Memory *memory;
    uint64_t *field, *flag;
    int wake_fd, own_fd;
    Worker *worker;
    Py_ssize_t pending; /* these two under the worker's mutex */
    Job *done;
} CopyThread;

static Worker workers[MAX_COPY_THREADS];

static void *work(void *argument)
{
    Worker *self = argument;
    pthread_mutex_lock(&self->mutex);
    for (;;) {
        while (!self->first && !self->stop)
            pthread_cond_wait(&self->changed, &self->mutex);
        Job *job = self->first;
        if (!job)
            break;
        if (!(self->first = job->next))
            self->last = &self->first;
        pthread_mutex_unlock(&self->mutex);

        CopyThread *owner = job->owner;
        if (job->nbytes)
            memcpy(job->to, job->from, job->nbytes);
        flowrt_store(owner->field, job->event);
        flowrt_store(owner->field + 1, job->chunk);
        if (flowrt_publish(owner->field + 2, job->tail, owner->flag))
            flowrt_wake(owner->wake_fd);
        int own_fd = job->announce ? owner->own_fd : -1;

        pthread_mutex_lock(&self->mutex);
        job->next = owner->done;
        owner->done = job;
        owner->pending--;
        flowrt_wake(own_fd); /* under the mutex: the owner, and so its descriptor, stays open until this is over */
        pthread_cond_broadcast(&self->changed);
    }
    pthread_mutex_unlock(&self->mutex);
    return NULL;
}

/* Adds a user of the thread and starts the thread if needed. Returns 0 or an error number. */
static int enter(Worker *self)
{
    if (self->process != getpid()) { /* a forked child has none of its parent's threads */
        memset(self, 0, sizeof *self);
        pthread_mutex_init(&self->mutex, NULL);
        pthread_cond_init(&self->changed, NULL);
        self->process = getpid();
    }
    if (!self->users) {
        sigset_t all, before;
        self->first = NULL;
        self->last = &self->first;
        self->stop = 0;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* only Python's threads handle signals */
        int failed = pthread_create(&self->thread, NULL, work, self);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (failed)
            return failed;
    }
    self->users++;
    return 0;
}

/* Removes a user; the last one ends the idle thread. Runs under the interpreter's lock throughout, as `enter` does. */
static void leave(Worker *self)
{
    if (--self->users)
        return;
    pthread_mutex_lock(&self->mutex);
    self->stop = 1;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
    pthread_join(self->thread, NULL);
}

static PyObject *copy_thread_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"number", "memory", "field_offset", "flag_offset", "wake_fd", "own_fd", NULL};
    int number, wake_fd, own_fd;
    Memory *memory;
    Py_ssize_t field, flag;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO!nnii", names, &number, &MemoryType, &memory, &field, &flag, &wake_fd, &own_fd))
        return NULL;
    if (number < 0 || number >= MAX_COPY_THREADS)
        return PyErr_Format(PyExc_ValueError, "copy thread %d of %d", number, MAX_COPY_THREADS);
    if (!flowrt_word(memory, field) || !flowrt_word(memory, field + 24) || !flowrt_word(memory, flag))
        return NULL;
    CopyThread *self = (CopyThread *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    int failed = enter(&workers[number]);
    if (failed) {
        Py_DECREF(self);
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_INCREF(memory);
    self->memory = memory;
    self->field = (uint64_t *)(memory->base + field);
    self->flag = (uint64_t *)(memory->base + flag);
    self->wake_fd = wake_fd;
    self->own_fd = own_fd;
    self->worker = &workers[number];
    return (PyObject *)self;
}

/* Releases the sources of completed copies; returns the number of incomplete copies. */
static Py_ssize_t collect(CopyThread *self)
{
    pthread_mutex_lock(&self->worker->mutex);
    Job *job = self->done;
    Py_ssize_t pending = self->pending;
    self->done = NULL;
    pthread_mutex_unlock(&self->worker->mutex);
    while (job) {
        Job *next = job->next;
        PyBuffer_Release(&job->view);
        PyMem_RawFree(job);
        job = next;
    }
    return pending;
}

static void wait_for_all(CopyThread *self)
{
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->worker->mutex);
    while (self->pending)
        pthread_cond_wait(&self->worker->changed, &self->worker->mutex);
    pthread_mutex_unlock(&self->worker->mutex);
    Py_END_ALLOW_THREADS
    collect(self);
}

static PyObject *copy_thread_copy(CopyThread *self, PyObject *const *args, Py_ssize_t count)
{
    if (!flowrt_expect(count, 8))
        return NULL;
    if (!self->worker)
        return PyErr_Format(PyExc_ValueError, "this copy thread is closed");
    Py_ssize_t at = PyLong_AsSsize_t(args[0]), begin = PyLong_AsSsize_t(args[2]), nbytes = PyLong_AsSsize_t(args[3]);
    uint64_t event, chunk, tail;
    if (PyErr_Occurred() || !flowrt_uint64(args[4], &event) || !flowrt_uint64(args[5], &chunk) || !flowrt_uint64(args[6], &tail))
        return NULL;
    Job *job = PyMem_RawMalloc(sizeof *job);
    if (!job)
        return PyErr_NoMemory();
    if (PyObject_GetBuffer(args[1], &job->view, PyBUF_SIMPLE) < 0) {
        PyMem_RawFree(job);
        return NULL;
    }
    if (nbytes < 0 || begin < 0 || begin > job->view.len || nbytes > job->view.len - begin || at < 0 || at > self->memory->nbytes ||
        nbytes > self->memory->nbytes - at) {
        PyBuffer_Release(&job->view);
        PyMem_RawFree(job);
        return PyErr_Format(PyExc_ValueError, "no %zd bytes from %zd to %zd", nbytes, begin, at);
    }
    job->next = NULL;
    job->owner = self;
    job->to = self->memory->base + at;
    job->from = (const char *)job->view.buf + begin;
    job->nbytes = (size_t)nbytes;
    job->event = event;
    job->chunk = chunk;
    job->tail = tail;
    job->announce = PyObject_IsTrue(args[7]);
    pthread_mutex_lock(&self->worker->mutex);
    *self->worker->last = job;
    self->worker->last = &job->next;
    self->pending++;
    pthread_cond_broadcast(&self->worker->changed);
    pthread_mutex_unlock(&self->worker->mutex);
    Py_RETURN_NONE;
}

static PyObject *copy_thread_collect(CopyThread *self, PyObject *unused)
{
    return PyLong_FromSsize_t(self->worker ? collect(self) : 0);
}

static PyObject *copy_thread_wait(CopyThread *self, PyObject *unused)
{
    if (self->worker)
        wait_for_all(self);
    Py_RETURN_NONE;
}

static PyObject *copy_thread_close(CopyThread *self, PyObject *unused)
{
    Worker *worker = self->worker;
    if (worker && worker->process == getpid()) {
        wait_for_all(self);
        leave(worker);
    }
    self->worker = NULL;
    Py_CLEAR(self->memory);
    Py_RETURN_NONE;
}

static void copy_thread_dealloc(CopyThread *self)
{
    Py_XDECREF(copy_thread_close(self, NULL));
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef copy_thread_methods[] = {
    {"copy", (PyCFunction)(void (*)(void))copy_thread_copy, METH_FASTCALL,
     "copy(offset, source, begin, nbytes, event, chunk, tail, announce): later, on the thread and in order: copy source[begin:][:nbytes] "
     "to `offset`, store the field's words, wake the peer if it sleeps; and our own eventfd, when `announce`. The source must not change."},
    {"collect", (PyCFunction)copy_thread_collect, METH_NOARGS, "collect() -> int: releases the sources of finished copies; returns the number of unfinished ones."},
    {"wait", (PyCFunction)copy_thread_wait, METH_NOARGS, "wait(): block until all copies are done."},
    {"close", (PyCFunction)copy_thread_close, METH_NOARGS, "close(): waits, then releases everything. Idempotent."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject CopyThreadType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flowrt.transports.native._words.CopyThread",
    .tp_doc = "CopyThread(number, memory, field_offset, flag_offset, wake_fd, own_fd): copies into `memory` by thread `number` of this process. "
              "The field is three words: event, chunk, tail.",
    .tp_basicsize = sizeof(CopyThread),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = copy_thread_new,
    .tp_dealloc = (destructor)copy_thread_dealloc,
    .tp_methods = copy_thread_methods,
};
