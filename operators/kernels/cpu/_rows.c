/* Fused kernels for single rows between the products of a layer. Part of the module flowrt.operators.kernels.cpu._rows.
 *
 * Norms, with the addition before them; rotation of queries and keys, and storing of keys and values in their pages; addition of results.
 * Only rows.py calls this module, with addresses; it checks shapes and dtypes first.
 *
 * Why: a decode step has few rows and a dozen small operations per layer. The weights of a layer pass through the caches between two of
 * them, so each library call fetches its code and tables from memory again: 15 to 40 us for a microsecond of work.
 */
#include "_rows.h"

int numbers(PyObject *const *arguments, Py_ssize_t given, long *n, int wanted)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%d numbers are wanted", wanted);
        return -1;
    }
    for (int i = 0; i < wanted; i++)
        if ((n[i] = PyLong_AsLong(arguments[i])) == -1 && PyErr_Occurred())
            return -1;
    return 0;
}

int64_t *checked_indices(const int64_t *from, long count, long end, const char *name)
{
    int64_t *found = malloc(count * sizeof *found + 1);
    if (!found)
        return (int64_t *)PyErr_NoMemory();
    for (long i = 0; i < count; i++) {
        found[i] = read_once(from + i);
        if (found[i] < 0 || found[i] >= end) {
            PyErr_Format(PyExc_IndexError, "%s %ld of %ld", name, (long)found[i], end);
            free(found);
            return NULL;
        }
    }
    return found;
}

/* --- norms ----------------------------------------------------------------------------------------------------------- */

/* Divides x by its root mean square, rounds, multiplies by the weight, rounds. x and y may be the same. */
INLINE void normalize(const int dtype, const char *x, const char *weight, char *y, long width, float epsilon)
{
    vec squares = {0};
    for (long i = 0; i < width; i += LANES) {
        const vec part = load(dtype, x, i, width);
        squares += part * part;
    }
    const float scale = 1 / sqrtf(total(squares) / width + epsilon);
    for (long i = 0; i < width; i += LANES)
        store(dtype, y, i, width, rounded(dtype, load(dtype, x, i, width) * scale) * load(dtype, weight, i, width));
}

typedef struct {
    const char *x, *added, *weight; /* `added` may be NULL */
    char *sum, *y;
    long width, weights; /* a weight per row, in turn, where there are several */
    float epsilon;
    int dtype;
} Norm;

INLINE void norm_rows(const int dtype, const Norm *n, long first, long end)
{
    const long pitch = n->width * (4 >> dtype);
    for (long row = first; row < end; row++) {
        const char *x = n->x + row * pitch;
        if (n->added) {
            for (long i = 0; i < n->width; i += LANES)
                store(dtype, n->sum + row * pitch, i, n->width,
                      load(dtype, x, i, n->width) + load(dtype, n->added + row * pitch, i, n->width));
            x = n->sum + row * pitch;
        }
        normalize(dtype, x, n->weight + row % n->weights * pitch, n->y + row * pitch, n->width, n->epsilon);
    }
}

IN_BOTH(norm_rows, (const Norm *n, long first, long end), n, first, end)

static PyObject *norm(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[10]; /* dtype, x, added, weight, sum, y, rows, width, weights, threads; and epsilon */
    if (numbers(arguments, given - 1, n, 10))
        return NULL;
    const Norm work = {
        .x = (char *)n[1], .added = (char *)n[2], .weight = (char *)n[3], .sum = (char *)n[4], .y = (char *)n[5],
        .width = n[7], .weights = n[8], .epsilon = (float)PyFloat_AsDouble(arguments[10]), .dtype = (int)n[0],
    };
    const long rows = n[6], threads = rows * work.width < FEW_NUMBERS ? 1 : n[9];
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    IN_THREADS(threads, rows, (work.dtype == FLOAT32 ? norm_rows_float32 : norm_rows_bfloat16)(&work, first, end));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* --- positions and pages ------------------------------------------------------------------------------------------------ */

typedef struct {
    char *qkv; /* [T, heads + 2 * kv_heads, width] */
    const char *cosines, *sines, *weights; /* [T, width] twice; of the queries' and keys' norm [heads + kv_heads, width], or NULL */
    char *keys, *values; /* [slots, kv_heads] of `head_bytes` each */
    const int64_t *slots;
    long heads, kv_heads, width, head_bytes;
    int int8;
    float epsilon;
    int dtype;
} RopeAndStore;

/* Rotates each pair (x[i], x[i + width / 2]) by its angle. */
INLINE void rotate(const int dtype, char *x, const char *cosines, const char *sines, long width)
{
    const long half = width / 2;
    const long bytes = half * (4 >> dtype);
    for (long i = 0; i < half; i += LANES) {
        const vec low = load(dtype, x, i, half), high = load(dtype, x + bytes, i, half);
        const vec new_low = low * load(dtype, cosines, i, half) + high * load(dtype, sines, i, half);
        const vec new_high = high * load(dtype, cosines + bytes, i, half) + low * load(dtype, sines + bytes, i, half);
        store(dtype, x, i, half, new_low);
        store(dtype, x + bytes, i, half, new_high);
    }
}

/* Keeps a row or a head as INT8, as `packed_rows` (int8_rows.py) does; `restored`: where the values that are kept go, or NULL. */
INLINE void keep_int8(const int dtype, const char *x, char *kept, char *restored, long width)
{
    const vec magic = (vec){0} + 12582912.0f, bound = (vec){0} + 127; /* 1.5 * 2^23: adding it rounds to a whole number */
    vec most = {0}, unfinite = {0};
    for (long i = 0; i < width; i += LANES) {
        const vec part = load(dtype, x, i, width);
        most = larger(part, larger(-part, most));
        unfinite += part - part; /* NaN where a number is not finite */
    }
    const float scale = largest(most) / 127 + total(unfinite), divisor = scale > 0 ? scale : 1;
    for (long i = 0; i < width; i += LANES) {
        const vec whole = load(dtype, x, i, width) / divisor + magic - magic;
        const vec q = chosen(whole > bound, bound, larger(whole, -bound));
        const chars y = __builtin_convertvector(q, chars);
        memcpy(kept + i, &y, width - i < LANES ? width - i : LANES);
        if (restored)
            store(dtype, restored, i, width, q * scale);
    }
    memcpy(kept + scale_at(width), &scale, sizeof scale);
}

INLINE void rope_and_store_rows(const int dtype, const RopeAndStore *p, long first, long end)
{
    const long head_bytes = p->width * (4 >> dtype), num_rotated = p->heads + p->kv_heads;
    for (long row = first; row < end; row++) {
        char *x = p->qkv + row * (num_rotated + p->kv_heads) * head_bytes;
        for (long head = 0; head < num_rotated; head++) {
            char *each = x + head * head_bytes;
            if (p->weights)
                normalize(dtype, each, p->weights + head * head_bytes, each, p->width, p->epsilon);
            rotate(dtype, each, p->cosines + row * head_bytes, p->sines + row * head_bytes, p->width);
        }
        for (long head = 0; head < 2 * p->kv_heads; head++) { /* keys, then values */
            char *pages = head < p->kv_heads ? p->keys : p->values, *each = x + (p->heads + head) * head_bytes;
            char *kept = pages + (p->slots[row] * p->kv_heads + head % p->kv_heads) * p->head_bytes;
            if (p->int8)
                keep_int8(dtype, each, kept, each, p->width);
            else
                memcpy(kept, each, head_bytes);
        }
    }
}

IN_BOTH(rope_and_store_rows, (const RopeAndStore *p, long first, long end), p, first, end)

static PyObject *rope_and_store_kv(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    /* dtype, qkv, cosines, sines, weights, keys, values, slots, rows, heads, kv_heads, width, num_slots, threads, int8, head bytes; epsilon */
    long n[16];
    if (numbers(arguments, given - 1, n, 16))
        return NULL;
    RopeAndStore work = {
        .qkv = (char *)n[1], .cosines = (char *)n[2], .sines = (char *)n[3], .weights = (char *)n[4], .keys = (char *)n[5],
        .values = (char *)n[6], .heads = n[9], .kv_heads = n[10], .width = n[11],
        .int8 = (int)n[14], .head_bytes = n[15], .epsilon = (float)PyFloat_AsDouble(arguments[16]), .dtype = (int)n[0],
    };
    const long rows = n[8], threads = rows * (work.heads + work.kv_heads) * work.width < FEW_NUMBERS ? 1 : n[13];
    if (PyErr_Occurred())
        return NULL;
    int64_t *slots = checked_indices((int64_t *)n[7], rows, n[12], "slot");
    if (!slots)
        return NULL;
    work.slots = slots;
    Py_BEGIN_ALLOW_THREADS
    IN_THREADS(threads, rows, (work.dtype == FLOAT32 ? rope_and_store_rows_float32 : rope_and_store_rows_bfloat16)(&work, first, end));
    Py_END_ALLOW_THREADS
    free(slots);
    Py_RETURN_NONE;
}

/* --- rows as INT8 ---------------------------------------------------------------------------------------------------------- */

INLINE void int8_rows_between(const int dtype, const long *n, long first, long end)
{
    for (long row = first; row < end; row++)
        keep_int8(dtype, (char *)n[1] + row * n[4] * (4 >> dtype), (char *)n[2] + row * n[5], NULL, n[4]);
}

IN_BOTH(int8_rows_between, (const long *n, long first, long end), n, first, end)

static PyObject *int8_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[7]; /* dtype, x, packed, rows, width, bytes of a packed row, threads */
    if (numbers(arguments, given, n, 7))
        return NULL;
    const long threads = n[3] * n[4] < FEW_NUMBERS ? 1 : n[6];
    Py_BEGIN_ALLOW_THREADS
    IN_THREADS(threads, n[3], (n[0] == FLOAT32 ? int8_rows_between_float32 : int8_rows_between_bfloat16)(n, first, end));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* --- results -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t *rows; /* a private copy */
    const char *y;
    long count;
} Part;

/* Numbers `first` to `end` of every row: the parts in order, then the rest. */
INLINE void add_numbers(const int dtype, const long *n, const Part *parts, long num_parts, long first, long end)
{
    const long row_bytes = n[4] * (4 >> dtype);
    const char *residual = (const char *)n[1];
    char *totals = (char *)n[2];
    for (long row = 0; row < n[3]; row++)
        memset(totals + row * row_bytes + first * (4 >> dtype), 0, (end - first) * (4 >> dtype));
    for (const Part *part = parts; part < parts + num_parts; part++)
        for (long at = 0; at < part->count; at++)
            for (long i = first; i < end; i += LANES) {
                char *sum = totals + part->rows[at] * row_bytes;
                store(dtype, sum, i, end, load(dtype, sum, i, end) + load(dtype, part->y + at * row_bytes, i, end));
            }
    for (long row = 0; row < n[3]; row++)
        for (long i = first; i < end; i += LANES) {
            char *sum = totals + row * row_bytes;
            store(dtype, sum, i, end, load(dtype, sum, i, end) + load(dtype, residual + row * row_bytes, i, end));
        }
}

IN_BOTH(add_numbers, (const long *n, const Part *parts, long num_parts, long first, long end), n, parts, num_parts, first, end)

static PyObject *add_parts(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[6], part[3]; /* dtype, residual, total, rows, width, threads; then rows_R, y_RH and the number of rows of each part */
    const long num_parts = given > 6 ? (given - 6) / 3 : 0;
    if (numbers(arguments, given - 3 * num_parts, n, 6))
        return NULL;
    Part *parts = calloc(num_parts + 1, sizeof *parts);
    if (!parts)
        return PyErr_NoMemory();
    for (long at = 0; at < num_parts; at++) {
        if (numbers(arguments + 6 + 3 * at, 3, part, 3))
            goto end;
        parts[at] = (Part){.rows = checked_indices((int64_t *)part[0], part[2], n[3], "row"), .y = (char *)part[1], .count = part[2]};
        if (!parts[at].rows)
            goto end;
    }
    const long lines = (n[4] + LANES - 1) / LANES, threads = n[3] * n[4] < FEW_NUMBERS ? 1 : n[5];
    Py_BEGIN_ALLOW_THREADS
    IN_THREADS(threads, lines, (n[0] == FLOAT32 ? add_numbers_float32 : add_numbers_bfloat16)(
                                   n, parts, num_parts, first * LANES, end * LANES < n[4] ? end * LANES : n[4]));
    Py_END_ALLOW_THREADS
end:
    for (long at = 0; at < num_parts; at++)
        free(parts[at].rows);
    free(parts);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

#define CALLED(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

static PyMethodDef methods[] = {
    {"norm", CALLED(norm),
     "norm(dtype, x, added, weight, sum, y, rows, width, weights, threads, epsilon): sum = x + added, y = its norm; added may be 0."},
    {"rope_and_store_kv", CALLED(rope_and_store_kv),
     "rope_and_store_kv(dtype, qkv, cosines, sines, weights, keys, values, slots, rows, heads, kv_heads, width, num_slots, threads, int8, head_bytes,"
     " epsilon):"
     " normalizes (if there are weights) and rotates queries and keys in place, and stores keys and values in their slots."},
    {"int8_rows", CALLED(int8_rows), "int8_rows(dtype, x, packed, rows, width, row bytes, threads): each row as INT8, its scale behind it."},
    {"paged_attention", CALLED(paged_attention),
     "paged_attention(dtype, q, q_pitch, rows, sequences, lengths, tables, table_pitch, keys, values, out, count, heads, kv_heads, width,"
     " page_size, num_pages, window, num_rows, num_sequences, threads, int8, head_bytes): attention of one row for each of `count` sequences."},
    {"topk_softmax", CALLED(topk_softmax),
     "topk_softmax(dtype, logits, dtype of weights, ids, weights, rows, experts, active, threads, scale): each row's best, and their softmax."},
    {"partition_by_server", CALLED(partition_by_server),
     "partition_by_server(experts, weights, weight bytes, pairs, count, active, servers, replicas, num_experts, width, num_servers, max_piece, turn, out,"
     " weights out, counts): (row, slot) pairs by server."},
    {"sort_by_expert", CALLED(sort_by_expert),
     "sort_by_expert(experts, places, number of experts, held, row_P, pairs, rows, row bytes, x, sorted, place of each pair, counts, threads):"
     " the pairs' rows by expert; false if an expert is not held."},
    {"weighted_sum", CALLED(weighted_sum),
     "weighted_sum(dtype, sorted, place of each pair, row_P, weight_P, sums, pairs, width, rows, threads): the weighted sum of each row's pairs."},
    {"add_parts", CALLED(add_parts),
     "add_parts(dtype, residual, total, rows, width, threads, rows_R, y_RH, number of rows, ...): the parts, then the residual."},
    {NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "flowrt.operators.kernels.cpu._rows", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__rows(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddIntMacro(module, FLOAT32) || PyModule_AddIntMacro(module, BFLOAT16)))
        Py_CLEAR(module);
    return module;
}
