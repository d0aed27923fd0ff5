/* Which experts a row goes to, and which servers its pairs; there, the pairs by expert, and their sum. Part of the module flowrt.operators._rows.
 *
 * Here: `choose`, the best experts of each row and their weights; `cut`, the pairs by server; `sort`, the pairs by expert, with their rows;
 * `weigh`, the weighted sum of a row's pairs. Not here: the scores of models that do not take a softmax over the best (gate.py), who holds
 * which expert (dispatch.py, experts.py).
 */
#include "_rows.h"

/* As torch has it: what is no number is the greatest. */
INLINE int exceeds(float x, float y) { return x > y || (x != x && y == y); }

/* The best `active` of a row's scores, best first; of equal ones the first. */
INLINE void best_of(const int dtype, const char *row, long experts, long active, int64_t *ids, float *scores)
{
    long taken = 0;
    for (long first = 0; first < experts; first += LANES) {
        const vec part = load(dtype, row, first, experts);
        for (long i = 0; i < LANES && first + i < experts; i++) {
            long at = taken;
            if (taken == active && !exceeds(part[i], scores[active - 1]))
                continue;
            for (at = taken < active ? taken++ : active - 1; at && exceeds(part[i], scores[at - 1]); at--) {
                scores[at] = scores[at - 1];
                ids[at] = ids[at - 1];
            }
            scores[at] = part[i];
            ids[at] = first + i;
        }
    }
}

INLINE void choose_rows(const int dtype, const long *n, float scale, float *scores, long first_row, long end_row)
{
    const long experts = n[6], active = n[7], bytes = 4 >> n[2];
    for (long row = first_row; row < end_row; row++) {
        best_of(dtype, (char *)n[1] + row * experts * (4 >> dtype), experts, active, (int64_t *)n[3] + row * active, scores);
        vec sum = {0};
        const float top = scores[0];
        for (long i = 0; i < active; i += LANES) {
            const vec part = exponential(load(FLOAT32, (char *)scores, i, active) - top);
            store(FLOAT32, (char *)scores, i, active, part);
            sum += load(FLOAT32, (char *)scores, i, active);
        }
        const float all = total(sum);
        char *weights = (char *)n[4] + row * active * bytes;
        for (long i = 0; i < active; i += LANES)
            store((int)n[2], weights, i, active, load(FLOAT32, (char *)scores, i, active) / all * scale);
    }
}

IN_BOTH(choose_rows, (const long *n, float scale, float *scores, long first, long end), n, scale, scores, first, end)

PyObject *choose(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[9]; /* dtype, logits, weights' dtype, ids, weights, rows, experts, active, threads; and scale */
    if (numbers(arguments, given - 1, n, 9))
        return NULL;
    const float scale = (float)PyFloat_AsDouble(arguments[9]);
    if (PyErr_Occurred())
        return NULL;
    if (n[7] < 1 || n[7] > n[6])
        return PyErr_Format(PyExc_ValueError, "%ld of %ld experts", n[7], n[6]);
    const long threads = n[5] * n[6] < FEW_NUMBERS ? 1 : n[8];
    float *scores = malloc(threads * n[7] * sizeof *scores);
    if (!scores)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    IN_THREADS(threads, n[5],
               (n[0] == FLOAT32 ? choose_rows_float32 : choose_rows_bfloat16)(n, scale, scores + thread * n[7], first, end));
    Py_END_ALLOW_THREADS
    free(scores);
    Py_RETURN_NONE;
}

typedef struct {
    const int64_t *experts, *pairs, *positions, *servers, *copies; /* `pairs` may be missing: all, in order */
    const char *weights;
    char *weights_out;
    int64_t *out, *counts;
    long weight_bytes, count, active, num_experts, width, num_servers, num_rows;
} Cut;

/* The number of a pair's share: 0 for nowhere. -1 for an expert, a server or a row that is none. */
INLINE long share_of(const Cut *c, long i, long row)
{
    const int64_t expert = c->experts[i];
    if (expert < 0 || expert >= c->num_experts)
        return -1;
    if (c->pairs && c->pairs[i] < 0)
        return -1;
    if (c->width != 1 && (row < 0 || row >= c->num_rows || c->positions[row] < 0 || c->copies[expert] < 1 || c->copies[expert] > c->width))
        return -1;
    const long turn = c->width == 1 ? 0 : c->positions[row] % c->copies[expert];
    const int64_t server = c->servers[expert * c->width + turn];
    return server < -1 || server >= c->num_servers ? -1 : server + 1;
}

typedef struct {
    int64_t *out; /* its row_P, expert_P, pair_P and rows_R, one after the other */
    char *weights;
    long pairs, num_rows, done, last;
} Share;

INLINE long row_of(const Cut *c, long i) { return (c->pairs ? c->pairs[i] : i) / c->active; }

/* By ascending server. counts: pairs and rows of each, nowhere first. -1 for a pair that nobody could be given. */
static int cut_pairs(const Cut *c, Share *shares)
{
    for (long i = 0; i <= c->num_servers; i++)
        shares[i] = (Share){.last = -1};
    for (long i = 0; i < c->count; i++) {
        const long row = row_of(c, i), number = share_of(c, i, row);
        if (number < 0)
            return -1;
        shares[number].pairs++;
        shares[number].num_rows += row != shares[number].last;
        shares[number].last = row;
    }
    int64_t *out = c->out;
    char *weights = c->weights_out;
    for (long i = 0; i <= c->num_servers; i++) {
        Share *share = shares + i;
        share->out = out;
        share->weights = weights;
        c->counts[2 * i] = share->pairs;
        c->counts[2 * i + 1] = share->num_rows;
        out += 3 * share->pairs + share->num_rows;
        weights += share->pairs * c->weight_bytes;
        share->num_rows = 0;
    }
    for (long i = 0; i < c->count; i++) {
        const long row = row_of(c, i);
        Share *share = shares + share_of(c, i, row);
        int64_t *rows = share->out + 3 * share->pairs, at = share->done++;
        if (!share->num_rows || rows[share->num_rows - 1] != row)
            rows[share->num_rows++] = row;
        share->out[at] = share->num_rows - 1;
        share->out[share->pairs + at] = c->experts[i];
        share->out[2 * share->pairs + at] = c->pairs ? c->pairs[i] : i;
        memcpy(share->weights + at * c->weight_bytes, c->weights + i * c->weight_bytes, c->weight_bytes);
    }
    return 0;
}

PyObject *cut(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[16];
    if (numbers(arguments, given, n, 16))
        return NULL;
    const Cut work = {
        .experts = (int64_t *)n[0], .weights = (char *)n[1], .weight_bytes = n[2], .pairs = (int64_t *)n[3], .count = n[4], .active = n[5],
        .positions = (int64_t *)n[6], .servers = (int64_t *)n[7], .copies = (int64_t *)n[8], .num_experts = n[9], .width = n[10],
        .num_servers = n[11], .out = (int64_t *)n[12], .weights_out = (char *)n[13], .counts = (int64_t *)n[14],
        .num_rows = n[15],
    };
    Share *shares = malloc((work.num_servers + 1) * sizeof *shares);
    if (!shares)
        return PyErr_NoMemory();
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = cut_pairs(&work, shares);
    Py_END_ALLOW_THREADS
    free(shares);
    if (failed)
        return PyErr_Format(PyExc_IndexError, "a pair names what there is not: %ld experts, %ld servers, %ld rows", n[9], n[11], n[15]);
    Py_RETURN_NONE;
}

PyObject *sort(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    /* experts, places (of experts among those held, plus 1), number of experts, held, row_P, pairs, rows, row bytes, x, sorted,
       place of each pair, counts, threads */
    long n[13];
    if (numbers(arguments, given, n, 13))
        return NULL;
    const int64_t *experts = (int64_t *)n[0], *places = (int64_t *)n[1], *rows = (int64_t *)n[4];
    const long held = n[3], pairs = n[5], row_bytes = n[7];
    int64_t *sorted_place = (int64_t *)n[10], *counts = (int64_t *)n[11];
    memset(counts, 0, held * sizeof *counts);
    for (long i = 0; i < pairs; i++) {
        if (rows[i] < 0 || rows[i] >= n[6])
            return PyErr_Format(PyExc_IndexError, "row %ld of %ld", (long)rows[i], n[6]);
        if (experts[i] < 0 || experts[i] >= n[2] || places[experts[i]] < 1 || places[experts[i]] > held)
            Py_RETURN_FALSE;
        counts[places[experts[i]] - 1]++;
    }
    int64_t *next = malloc((held + 1) * sizeof *next);
    if (!next)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    next[0] = 0;
    for (long i = 0; i < held; i++)
        next[i + 1] = next[i] + counts[i];
    for (long i = 0; i < pairs; i++)
        sorted_place[i] = next[places[experts[i]] - 1]++;
    const long threads = pairs * row_bytes < 4 * FEW_NUMBERS ? 1 : n[12];
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long i = 0; i < pairs; i++)
        memcpy((char *)n[9] + sorted_place[i] * row_bytes, (char *)n[8] + rows[i] * row_bytes, row_bytes);
    Py_END_ALLOW_THREADS
    free(next);
    Py_RETURN_TRUE;
}

/* Numbers `first` to `end` of every row. As the library has it, each product is rounded; sums are taken in float32, in pair order, and
   rounded once. */
INLINE void weigh_numbers(const int dtype, const long *n, char *sums, long first, long end)
{
    const int64_t *places = (int64_t *)n[2], *rows = (int64_t *)n[3];
    const long width = n[7], row_bytes = width * (4 >> dtype);
    for (long row = 0; row < n[8]; row++)
        memset(sums + (row * width + first) * 4, 0, (end - first) * 4);
    for (long pair = 0; pair < n[6]; pair++) {
        const char *x = (char *)n[1] + places[pair] * row_bytes;
        char *sum = sums + rows[pair] * width * 4;
        const float weight = load(dtype, (char *)n[4], pair, pair + 1)[0];
        for (long i = first; i < end; i += LANES)
            store(FLOAT32, sum, i, end, load(FLOAT32, sum, i, end) + rounded(dtype, load(dtype, x, i, end) * weight));
    }
    if (dtype == FLOAT32)
        return;
    for (long row = 0; row < n[8]; row++)
        for (long i = first; i < end; i += LANES)
            store(dtype, (char *)n[5] + row * row_bytes, i, end, load(FLOAT32, sums + row * width * 4, i, end));
}

IN_BOTH(weigh_numbers, (const long *n, char *sums, long first, long end), n, sums, first, end)

PyObject *weigh(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[10]; /* dtype, sorted, place of each pair, row_P, weight_P, sums, pairs, width, rows, threads */
    if (numbers(arguments, given, n, 10))
        return NULL;
    const int64_t *places = (int64_t *)n[2], *rows = (int64_t *)n[3];
    for (long pair = 0; pair < n[6]; pair++)
        if (places[pair] < 0 || places[pair] >= n[6] || rows[pair] < 0 || rows[pair] >= n[8])
            return PyErr_Format(PyExc_IndexError, "answer %ld of %ld, row %ld of %ld", (long)places[pair], n[6], (long)rows[pair], n[8]);
    char *wide = n[0] == FLOAT32 ? NULL : malloc(n[8] * n[7] * 4 + 1), *sums = wide ? wide : (char *)n[5];
    if (n[0] != FLOAT32 && !wide)
        return PyErr_NoMemory();
    const long lines = (n[7] + LANES - 1) / LANES, threads = n[6] * n[7] < FEW_NUMBERS ? 1 : n[9];
    Py_BEGIN_ALLOW_THREADS
    IN_THREADS(threads, lines, (n[0] == FLOAT32 ? weigh_numbers_float32 : weigh_numbers_bfloat16)(
                                   n, sums, first * LANES, end * LANES < n[7] ? end * LANES : n[7]));
    Py_END_ALLOW_THREADS
    free(wide);
    Py_RETURN_NONE;
}
