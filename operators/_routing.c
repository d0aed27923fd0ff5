/* Which experts a row goes to, and which servers its pairs; there, the pairs by expert, and their sum. Part of the module operators._rows.
 *
 * Here: `choose`, the best experts of each row and their weights; `cut`, the pairs by server; `sort`, the pairs by expert, with their rows;
 * `weigh`, the weighted sum of a row's pairs. Not here: the scores of models that do not take a softmax over the best (gate.py), who holds
 * which expert (dispatch.py, experts.py).
 */
#include "_rows.h"

/* The best `active` of a row's scores, best first; of equal ones the first. */
INLINE void best_of(const int dtype, const char *row, long experts, long active, int64_t *ids, float *scores)
{
    long taken = 0;
    for (long first = 0; first < experts; first += LANES) {
        const vec part = load(dtype, row, first, experts);
        for (long i = 0; i < LANES && first + i < experts; i++) {
            long at = taken;
            if (taken == active && !(part[i] > scores[active - 1]))
                continue;
            for (at = taken < active ? taken++ : active - 1; at && part[i] > scores[at - 1]; at--) {
                scores[at] = scores[at - 1];
                ids[at] = ids[at - 1];
            }
            scores[at] = part[i];
            ids[at] = first + i;
        }
    }
}

INLINE void choose_rows(const int dtype, const long *n, float scale, float *scores)
{
    const long experts = n[6], active = n[7], bytes = 4 >> n[2];
    for (long row = 0; row < n[5]; row++) {
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

static CLONES void choose_float32(const long *n, float scale, float *scores) { choose_rows(FLOAT32, n, scale, scores); }
static CLONES void choose_bfloat16(const long *n, float scale, float *scores) { choose_rows(BFLOAT16, n, scale, scores); }

PyObject *choose(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[8]; /* dtype, logits, weights' dtype, ids, weights, rows, experts, active; and scale */
    if (numbers(arguments, given - 1, n, 8))
        return NULL;
    const float scale = (float)PyFloat_AsDouble(arguments[8]);
    if (PyErr_Occurred())
        return NULL;
    if (n[7] < 1 || n[7] > n[6])
        return PyErr_Format(PyExc_ValueError, "%ld of %ld experts", n[7], n[6]);
    float *scores = malloc(n[7] * sizeof *scores);
    if (!scores)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    (n[0] == FLOAT32 ? choose_float32 : choose_bfloat16)(n, scale, scores);
    Py_END_ALLOW_THREADS
    free(scores);
    Py_RETURN_NONE;
}

typedef struct {
    const int64_t *experts, *pairs, *positions, *servers, *copies; /* `pairs` may be missing: all, in order */
    const char *weights;
    char *weights_out;
    int64_t *out, *counts;
    long weight_bytes, count, active, num_experts, width, num_servers;
} Cut;

/* The place of a pair's server: 0 for nowhere. -1 for an expert or a server that is none. */
INLINE long server_place(const Cut *c, long i, long row)
{
    const int64_t expert = c->experts[i];
    if (expert < 0 || expert >= c->num_experts)
        return -1;
    const long turn = c->width == 1 ? 0 : c->positions[row] % c->copies[expert];
    const int64_t server = c->servers[expert * c->width + turn];
    return server < -1 || server >= c->num_servers ? -1 : server + 1;
}

typedef struct {
    int64_t *out; /* its row_P, expert_P, pair_P and rows_R, one after the other */
    char *weights;
    long pairs, num_rows, done, last;
} Place;

INLINE long row_of(const Cut *c, long i) { return (c->pairs ? c->pairs[i] : i) / c->active; }

/* By ascending server. counts: pairs and rows of each, nowhere first. -1 for a pair that nobody could be given. */
static int cut_pairs(const Cut *c, Place *places)
{
    for (long i = 0; i <= c->num_servers; i++)
        places[i] = (Place){.last = -1};
    for (long i = 0; i < c->count; i++) {
        const long row = row_of(c, i), number = server_place(c, i, row);
        if (number < 0)
            return -1;
        places[number].pairs++;
        places[number].num_rows += row != places[number].last;
        places[number].last = row;
    }
    int64_t *out = c->out;
    char *weights = c->weights_out;
    for (long i = 0; i <= c->num_servers; i++) {
        Place *place = places + i;
        place->out = out;
        place->weights = weights;
        c->counts[2 * i] = place->pairs;
        c->counts[2 * i + 1] = place->num_rows;
        out += 3 * place->pairs + place->num_rows;
        weights += place->pairs * c->weight_bytes;
        place->num_rows = 0;
    }
    for (long i = 0; i < c->count; i++) {
        const long row = row_of(c, i);
        Place *place = places + server_place(c, i, row);
        int64_t *rows = place->out + 3 * place->pairs, at = place->done++;
        if (!place->num_rows || rows[place->num_rows - 1] != row)
            rows[place->num_rows++] = row;
        place->out[at] = place->num_rows - 1;
        place->out[place->pairs + at] = c->experts[i];
        place->out[2 * place->pairs + at] = c->pairs ? c->pairs[i] : i;
        memcpy(place->weights + at * c->weight_bytes, c->weights + i * c->weight_bytes, c->weight_bytes);
    }
    return 0;
}

PyObject *cut(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[15];
    if (numbers(arguments, given, n, 15))
        return NULL;
    const Cut work = {
        .experts = (int64_t *)n[0], .weights = (char *)n[1], .weight_bytes = n[2], .pairs = (int64_t *)n[3], .count = n[4], .active = n[5],
        .positions = (int64_t *)n[6], .servers = (int64_t *)n[7], .copies = (int64_t *)n[8], .num_experts = n[9], .width = n[10],
        .num_servers = n[11], .out = (int64_t *)n[12], .weights_out = (char *)n[13], .counts = (int64_t *)n[14],
    };
    Place *places = malloc((work.num_servers + 1) * sizeof *places);
    if (!places)
        return PyErr_NoMemory();
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = cut_pairs(&work, places);
    Py_END_ALLOW_THREADS
    free(places);
    if (failed)
        return PyErr_Format(PyExc_IndexError, "a pair asks for an expert that is none of %ld, or that no server of %ld holds", n[9], n[11]);
    Py_RETURN_NONE;
}

PyObject *sort(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    /* experts, places (of experts among those held, plus 1), number of experts, held, row_P, pairs, rows, row bytes, x, sorted,
       place of each pair, counts */
    long n[12];
    if (numbers(arguments, given, n, 12))
        return NULL;
    const int64_t *experts = (int64_t *)n[0], *places = (int64_t *)n[1], *rows = (int64_t *)n[4];
    const long held = n[3], pairs = n[5], row_bytes = n[7];
    int64_t *sorted_place = (int64_t *)n[10], *counts = (int64_t *)n[11];
    memset(counts, 0, held * sizeof *counts);
    for (long i = 0; i < pairs; i++) {
        if (rows[i] < 0 || rows[i] >= n[6])
            return PyErr_Format(PyExc_IndexError, "row %ld of %ld", (long)rows[i], n[6]);
        if (experts[i] < 0 || experts[i] >= n[2] || !places[experts[i]])
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
    for (long i = 0; i < pairs; i++) {
        const int64_t at = sorted_place[i] = next[places[experts[i]] - 1]++;
        memcpy((char *)n[9] + at * row_bytes, (char *)n[8] + rows[i] * row_bytes, row_bytes);
    }
    Py_END_ALLOW_THREADS
    free(next);
    Py_RETURN_TRUE;
}

/* Each product is rounded; sums are taken in float32, in pair order, and rounded once: as the library does it. */
INLINE void weigh_pairs(const int dtype, const long *n, char *sums)
{
    const int64_t *places = (int64_t *)n[2], *rows = (int64_t *)n[3];
    const long width = n[7], row_bytes = width * (4 >> dtype);
    memset(sums, 0, n[8] * width * 4);
    for (long pair = 0; pair < n[6]; pair++) {
        const char *x = (char *)n[1] + places[pair] * row_bytes;
        char *sum = sums + rows[pair] * width * 4;
        const float weight = load(dtype, (char *)n[4], pair, pair + 1)[0];
        for (long i = 0; i < width; i += LANES)
            store(FLOAT32, sum, i, width, load(FLOAT32, sum, i, width) + rounded(dtype, load(dtype, x, i, width) * weight));
    }
    if (dtype != FLOAT32)
        for (long i = 0; i < n[8] * width; i += LANES)
            store(dtype, (char *)n[5], i, n[8] * width, load(FLOAT32, sums, i, n[8] * width));
}

static CLONES void weigh_float32(const long *n, char *sums) { weigh_pairs(FLOAT32, n, sums); }
static CLONES void weigh_bfloat16(const long *n, char *sums) { weigh_pairs(BFLOAT16, n, sums); }

PyObject *weigh(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[9]; /* dtype, sorted, place of each pair, row_P, weight_P, sums, pairs, width, rows */
    if (numbers(arguments, given, n, 9))
        return NULL;
    char *sums = n[0] == FLOAT32 ? (char *)n[5] : malloc(n[8] * n[7] * 4 + 1);
    if (!sums)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    (n[0] == FLOAT32 ? weigh_float32 : weigh_bfloat16)(n, sums);
    Py_END_ALLOW_THREADS
    if (n[0] != FLOAT32)
        free(sums);
    Py_RETURN_NONE;
}
