/* Products of groups of rows, each with its own matrix, in one parallel region: to wake a sleeping thread takes as long as reading a
 * megabyte. All matrices have one shape and lie in panels. A module defines `some_panels` and calls `read_groups` and `multiply_groups`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#define PANEL 16
#define MAX_THREADS 4096
#define BYTES_OF_THREAD (1 << 18) /* of matrices: with fewer a thread is woken in vain */
#define EIGHT 8                   /* panels that are taken together, so that no thread has to take its last ones singly */
#define ITEMS_OF_THREAD 8         /* so that a thread whose core another process takes leaves its work to the others */

typedef struct {
    const char *x, *matrix;
    char *y;
    long rows;
} Group;

/* Writes the products of `group` with the panels from `first` to `end`; `work` is the module's own. */
static void some_panels(const void *work, const Group *group, long first, long end);

static void multiply_groups(const void *work, const Group *groups, long count, long panels, long matrix_bytes, long threads)
{
    double bytes = 0;
    for (long i = 0; i < count; i++)
        bytes += (double)matrix_bytes * ((groups[i].rows + 15) / 16);
    const long eights = (panels + EIGHT - 1) / EIGHT, useful = 1 + (long)(bytes / BYTES_OF_THREAD);
    threads = threads < useful ? threads : useful;
    const long wanted = count * eights / (ITEMS_OF_THREAD * threads), step = wanted < 1 ? 1 : wanted < eights ? wanted : eights;
    const long steps = (eights + step - 1) / step, items = count * steps;
    threads = threads < items ? threads : items;
    if (threads <= 1) {
        for (long i = 0; i < count; i++)
            some_panels(work, &groups[i], 0, panels);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long item = 0; item < items; item++) {
        const long first = item % steps * step * EIGHT, end = first + step * EIGHT;
        some_panels(work, &groups[item / steps], first, end < panels ? end : panels);
    }
}

/* The groups that have rows, of `most` rows at most, from a sequence of addresses and one of counts. `x` and `y`: where the first rows are,
   at these pitches. Returns NULL with an exception set. */
static Group *read_groups(PyObject *addresses, PyObject *counts, long x, long x_pitch, long y, long y_pitch, long most, long *count)
{
    PyObject *matrices = PySequence_Fast(addresses, "addresses are not a sequence");
    PyObject *numbers = matrices ? PySequence_Fast(counts, "counts are not a sequence") : NULL;
    Group *groups = NULL;
    *count = 0;
    if (!numbers)
        goto end;
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(matrices);
    if (length != PySequence_Fast_GET_SIZE(numbers)) {
        PyErr_SetString(PyExc_ValueError, "a matrix has no number of rows, or a number no matrix");
        goto end;
    }
    long total = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        const long rows = PyLong_AsLong(PySequence_Fast_GET_ITEM(numbers, i));
        if (rows < 0 || rows > 1L << 40) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "unknown number of rows: %ld", rows);
            goto end;
        }
        total += (rows + most - 1) / most;
    }
    if (!(groups = malloc((total + 1) * sizeof *groups))) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        const char *matrix = (char *)PyLong_AsLong(PySequence_Fast_GET_ITEM(matrices, i));
        for (long rows, left = PyLong_AsLong(PySequence_Fast_GET_ITEM(numbers, i)); left > 0; left -= rows, x += rows * x_pitch, y += rows * y_pitch) {
            rows = left < most ? left : most;
            groups[(*count)++] = (Group){.x = (char *)x, .matrix = matrix, .y = (char *)y, .rows = rows};
        }
    }
    if (PyErr_Occurred()) {
        free(groups);
        groups = NULL;
    }
end:
    Py_XDECREF(matrices);
    Py_XDECREF(numbers);
    return groups;
}
