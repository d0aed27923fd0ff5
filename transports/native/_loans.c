/* Loan: memory lent to a library that reports its return from a thread of its own. Part of the module flowrt.transports.native._words.
 *
 * The library calls a function of this file to end a loan. The function writes one word and uses no Python, so that the library's thread
 * never waits for the interpreter. zeromq/loans.py is the only user.
 */
#include "_words.h"

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    uint64_t *returned; /* outlives the object while it is lent */
} Loan;

static void loan_return(void *data, void *hint)
{
    flowrt_store(hint, 1);
}

static PyObject *loan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *buffer;
    if (!PyArg_ParseTuple(args, "O", &buffer))
        return NULL;
    Loan *self = (Loan *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->returned = calloc(1, sizeof *self->returned);
    if (!self->returned)
        PyErr_NoMemory();
    else if (!PyObject_GetBuffer(buffer, &self->view, PyBUF_CONTIG_RO))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* Memory whose Loan is freed while lent is never released: a leak is better than overwriting memory that is being read. */
static void loan_dealloc(Loan *self)
{
    if (!self->view.obj || flowrt_load(self->returned)) {
        PyBuffer_Release(&self->view);
        free(self->returned);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *loan_returned(Loan *self, void *unused)
{
    return PyBool_FromLong(flowrt_load(self->returned) != 0);
}

static PyObject *loan_terms(Loan *self, PyObject *unused)
{
    return Py_BuildValue("(nnnn)", (Py_ssize_t)self->view.buf, self->view.len, (Py_ssize_t)&loan_return, (Py_ssize_t)self->returned);
}

static PyMethodDef loan_methods[] = {
    {"terms", (PyCFunction)loan_terms, METH_NOARGS,
     "terms() -> address, bytes, function to be called when done, its second argument. All as integers."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef loan_attributes[] = {
    {"returned", (getter)loan_returned, NULL, "Whether the library is done with the memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject LoanType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flowrt.transports.native._words.Loan",
    .tp_doc = "Loan(buffer): keep this object until `returned`.",
    .tp_basicsize = sizeof(Loan),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = loan_new,
    .tp_dealloc = (destructor)loan_dealloc,
    .tp_methods = loan_methods,
    .tp_getset = loan_attributes,
};
