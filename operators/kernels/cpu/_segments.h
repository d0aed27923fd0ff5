/* A grouped GEMM of rows in segments, each with its own matrix, in one parallel region: to wake a sleeping thread takes as long as reading
 * a megabyte. All matrices have one shape and lie in panels. A module defines `some_panels` and calls `read_segments` and
 * `multiply_segments`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#define PANEL 16
#define MAX_THREADS 4096
#define BYTES_OF_THREAD (1 << 18) /* of matrices: with fewer a thread is woken in vain */
#define PANELS_PER_ITEM 8         /* panels that are taken together, so that no thread has to take its last ones singly */
#define ITEMS_OF_THREAD 8         /* so that a thread whose core another process takes leaves its work to the others */

typedef struct {
    const char *x, *matrix;
    char *y;
    long rows;
} Segment;

/* Writes the products of `segment` with the panels from `first` to `end`; `work` is the module's own. */
static void some_panels(const void *work, const Segment *segment, long first, long end);

static __attribute__((unused)) void
multiply_segments(const void *work, const Segment *segments, long count, long panels, long matrix_bytes, long threads)
{
    double bytes = 0;
    for (long i = 0; i < count; i++)
        bytes += (double)matrix_bytes * ((segments[i].rows + 15) / 16);
    const long parts = (panels + PANELS_PER_ITEM - 1) / PANELS_PER_ITEM, useful = 1 + (long)(bytes / BYTES_OF_THREAD);
    threads = threads < useful ? threads : useful;
    const long wanted = count * parts / (ITEMS_OF_THREAD * threads), step = wanted < 1 ? 1 : wanted < parts ? wanted : parts;
    const long steps = (parts + step - 1) / step, items = count * steps;
    threads = threads < items ? threads : items;
    if (threads <= 1) {
        for (long i = 0; i < count; i++)
            some_panels(work, &segments[i], 0, panels);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long item = 0; item < items; item++) {
        const long first = item % steps * step * PANELS_PER_ITEM, end = first + step * PANELS_PER_ITEM;
        some_panels(work, &segments[item / steps], first, end < panels ? end : panels);
    }
}

/* The segments that have rows, of `max_rows` rows at most, from a sequence of addresses and one of counts. `x` and `y`: where the first rows
   are, at these pitches. The counts add up to `num_rows`. Returns NULL with an exception set. */
static Segment *
read_segments(PyObject *addresses, PyObject *counts, long num_rows, long x, long x_pitch, long y, long y_pitch, long max_rows, long *count)
{
    PyObject *matrices = PySequence_Fast(addresses, "addresses are not a sequence");
    PyObject *numbers = matrices ? PySequence_Fast(counts, "counts are not a sequence") : NULL;
    Segment *segments = NULL;
    *count = 0;
    if (!numbers)
        goto end;
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(matrices);
    if (length != PySequence_Fast_GET_SIZE(numbers)) {
        PyErr_SetString(PyExc_ValueError, "a matrix has no number of rows, or a number no matrix");
        goto end;
    }
    long total = 0, left_rows = num_rows;
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *number = PySequence_Fast_GET_ITEM(numbers, i);
        if (!PyLong_CheckExact(number)) { /* another type may answer differently the second time */
            PyErr_SetString(PyExc_TypeError, "a number of rows is not an int");
            goto end;
        }
        const long rows = PyLong_AsLong(number);
        if (rows < 0 || rows > left_rows) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "the numbers of rows do not add up to %ld", num_rows);
            goto end;
        }
        left_rows -= rows;
        total += (rows + max_rows - 1) / max_rows;
    }
    if (left_rows) {
        PyErr_Format(PyExc_ValueError, "the numbers of rows do not add up to %ld", num_rows);
        goto end;
    }
    if (!(segments = malloc((total + 1) * sizeof *segments))) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        const char *matrix = (char *)PyLong_AsLong(PySequence_Fast_GET_ITEM(matrices, i));
        for (long rows, left = PyLong_AsLong(PySequence_Fast_GET_ITEM(numbers, i)); left > 0; left -= rows, x += rows * x_pitch, y += rows * y_pitch) {
            rows = left < max_rows ? left : max_rows;
            segments[(*count)++] = (Segment){.x = (char *)x, .matrix = matrix, .y = (char *)y, .rows = rows};
        }
    }
    if (PyErr_Occurred()) {
        free(segments);
        segments = NULL;
    }
end:
    Py_XDECREF(matrices);
    Py_XDECREF(numbers);
    return segments;
}
