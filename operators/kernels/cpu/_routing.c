/* Kernels for expert choice and routing. Part of the module flowrt.operators.kernels.cpu._rows.
 *
 * `topk_softmax`: the best experts of each row and their weights. `partition_by_server`: partitions pairs by server.
 * `sort_by_expert`: sorts pairs and their rows by expert. `weighted_sum`: the weighted sum of the pairs of each row. gate.py computes the
 * scores of models that do not use a softmax over the best experts.
 */
#include "_rows.h"

/* As in torch, NaN is the greatest value. */
INLINE int exceeds(float x, float y) { return x > y || (x != x && y == y); }

/* The best `active` scores of a row, best first; of equal scores the first. */
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

INLINE void topk_softmax_rows(const int dtype, const long *n, float scale, float *scores, long first_row, long end_row)
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

IN_BOTH(topk_softmax_rows, (const long *n, float scale, float *scores, long first, long end), n, scale, scores, first, end)

PyObject *topk_softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
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
               (n[0] == FLOAT32 ? topk_softmax_rows_float32 : topk_softmax_rows_bfloat16)(n, scale, scores + thread * n[7], first, end));
    Py_END_ALLOW_THREADS
    free(scores);
    Py_RETURN_NONE;
}

typedef struct {
    const int64_t *experts, *pairs, *servers, *num_replicas; /* `pairs` may be NULL: all pairs, in order */
    const char *weights;
    char *weights_out;
    int64_t *out, *counts;
    long weight_bytes, count, active, num_experts, width, num_servers, max_piece, turn;
} Partition;

/* A private copy of the indices of a pair, and the number of its share: the number of its server plus 1, or 0 for an unavailable expert. */
typedef struct {
    int64_t expert, pair;
    long row, share;
} Pair;

/* The pairs of an expert: their number, its replicas, the pairs of a piece, its first piece, and how many pairs have their share. */
typedef struct {
    long pairs, replicas, size, first, done;
} Expert;

typedef struct {
    int64_t *out; /* its row_P, expert_P, pair_P and rows_R, one after the other */
    char *weights;
    long pairs, num_rows, done, last;
} Share;

/* Copies the pairs and counts those of each expert. Returns -1 if an expert or a pair does not exist. */
static int read_pairs(const Partition *p, Pair *pairs, Expert *experts)
{
    memset(experts, 0, p->num_experts * sizeof *experts);
    for (long i = 0; i < p->count; i++) {
        const int64_t expert = read_once(p->experts + i), pair = p->pairs ? read_once(p->pairs + i) : i;
        if (expert < 0 || expert >= p->num_experts || pair < 0)
            return -1;
        pairs[i] = (Pair){.expert = expert, .pair = pair, .row = pair / p->active};
        experts[expert].pairs++;
    }
    return 0;
}

/* Gives each piece of an expert to a replica that has pairs already and not too many with it, else to the one with the fewest pairs.
   Returns -1 if a server does not exist. */
static int place_expert(const Partition *p, long expert, const Expert *e, long *pieces, Share *shares)
{
    const int64_t *servers = p->servers + expert * p->width;
    for (long left = e->pairs, at = e->first; left > 0; left -= e->size, at++) {
        const long size = left < e->size ? left : e->size;
        long found = -1, least = 0, first = 0;
        for (long i = 0; i < e->replicas; i++) {
            const int64_t server = read_once(servers + i);
            if (server < -1 || server >= p->num_servers)
                return -1;
            const long pairs = shares[server + 1].pairs;
            const long load = pairs && pairs + size <= p->active ? pairs - p->active : pairs;
            const long place = (server + p->turn) % p->num_servers; /* of equal loads the first place */
            if (found < 0 || load < least || (load == least && place < first)) {
                found = server + 1;
                least = load;
                first = place;
            }
        }
        pieces[at] = found;
        shares[found].pairs += size;
    }
    return 0;
}

/* Gives each pair its share, as `_servers_of` in kernels/torch/rows.py: experts with one replica first, then by descending size of a piece.
   Returns -1 if a pair has no possible server. */
static int choose_shares(const Partition *p, Pair *pairs, Expert *experts, long *pieces, Share *shares)
{
    long first = 0, left = 0;
    for (long expert = 0; expert < p->num_experts; expert++) {
        Expert *e = experts + expert;
        if (!e->pairs)
            continue;
        const int64_t replicas = p->width == 1 ? 1 : read_once(p->num_replicas + expert);
        if (replicas < 1 || replicas > p->width)
            return -1;
        e->replicas = replicas;
        const long num = replicas == 1 ? 1 : (e->pairs + p->max_piece - 1) / p->max_piece;
        e->size = (e->pairs + num - 1) / num;
        e->first = first;
        first += num;
        left++;
    }
    for (long size = p->max_piece + 1; left; size--)
        for (long i = 0; i < p->num_experts; i++) {
            const long expert = (p->turn + i) % p->num_experts;
            const Expert *e = experts + expert;
            if (!e->pairs || (e->replicas == 1 ? p->max_piece + 1 : e->size) != size)
                continue;
            if (place_expert(p, expert, e, pieces, shares))
                return -1;
            left--;
        }
    for (long i = 0; i < p->count; i++) {
        Expert *e = experts + pairs[i].expert;
        pairs[i].share = pieces[e->first + e->done++ / e->size];
    }
    return 0;
}

/* By ascending server. counts: pairs and rows of each, unavailable experts first. -1 for a pair that no server can be given. */
static int partition_pairs(const Partition *p, Pair *pairs, Expert *experts, long *pieces, Share *shares)
{
    for (long i = 0; i <= p->num_servers; i++)
        shares[i] = (Share){.last = -1};
    if (read_pairs(p, pairs, experts) || choose_shares(p, pairs, experts, pieces, shares))
        return -1;
    for (long i = 0; i < p->count; i++) {
        Share *share = shares + pairs[i].share;
        share->num_rows += pairs[i].row != share->last;
        share->last = pairs[i].row;
    }
    int64_t *out = p->out;
    char *weights = p->weights_out;
    for (long i = 0; i <= p->num_servers; i++) {
        Share *share = shares + i;
        share->out = out;
        share->weights = weights;
        p->counts[2 * i] = share->pairs;
        p->counts[2 * i + 1] = share->num_rows;
        out += 3 * share->pairs + share->num_rows;
        weights += share->pairs * p->weight_bytes;
        share->num_rows = 0;
        share->last = -1;
    }
    for (long i = 0; i < p->count; i++) {
        Share *share = shares + pairs[i].share;
        const long at = share->done++;
        if (pairs[i].row != share->last)
            share->out[3 * share->pairs + share->num_rows++] = share->last = pairs[i].row;
        share->out[at] = share->num_rows - 1;
        share->out[share->pairs + at] = pairs[i].expert;
        share->out[2 * share->pairs + at] = pairs[i].pair;
        memcpy(share->weights + at * p->weight_bytes, p->weights + i * p->weight_bytes, p->weight_bytes);
    }
    return 0;
}

PyObject *partition_by_server(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[16];
    if (numbers(arguments, given, n, 16))
        return NULL;
    const Partition work = {
        .experts = (int64_t *)n[0], .weights = (char *)n[1], .weight_bytes = n[2], .pairs = (int64_t *)n[3], .count = n[4], .active = n[5],
        .servers = (int64_t *)n[6], .num_replicas = (int64_t *)n[7], .num_experts = n[8], .width = n[9], .num_servers = n[10],
        .max_piece = n[11], .turn = n[12], .out = (int64_t *)n[13], .weights_out = (char *)n[14], .counts = (int64_t *)n[15],
    };
    Share *shares = malloc((work.num_servers + 1) * sizeof *shares);
    Pair *pairs = malloc(work.count * sizeof *pairs + 1);
    Expert *experts = malloc(work.num_experts * sizeof *experts + 1);
    long *pieces = malloc((work.num_experts + work.count / work.max_piece) * sizeof *pieces + 1);
    int failed = 0;
    if (shares && pairs && experts && pieces) {
        Py_BEGIN_ALLOW_THREADS
        failed = partition_pairs(&work, pairs, experts, pieces, shares);
        Py_END_ALLOW_THREADS
    } else
        PyErr_NoMemory();
    free(shares);
    free(pairs);
    free(experts);
    free(pieces);
    if (failed)
        PyErr_Format(PyExc_IndexError, "a pair names an expert or a server that does not exist: %ld experts, %ld servers", n[8], n[10]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* Where each pair goes among those sorted by expert, into `place`, and how many each expert has, into `counts` and before it into `next`.
   -1 for an expert that is not held. */
static int sort_pairs(const int64_t *experts, const int64_t *group_of, long num_experts, long num_groups, long pairs, int64_t *place,
                      int64_t *counts, int64_t *next)
{
    memset(next, 0, (num_groups + 1) * sizeof *next);
    for (long i = 0; i < pairs; i++) {
        const int64_t expert = read_once(experts + i);
        if (expert < 0 || expert >= num_experts)
            return -1;
        place[i] = read_once(group_of + expert); /* the group, plus 1 */
        if (place[i] < 1 || place[i] > num_groups)
            return -1;
        next[place[i]]++;
    }
    if (num_groups)
        memcpy(counts, next + 1, num_groups * sizeof *counts);
    for (long i = 0; i < num_groups; i++)
        next[i + 1] += next[i];
    for (long i = 0; i < pairs; i++)
        place[i] = next[place[i] - 1]++;
    return 0;
}

PyObject *sort_by_expert(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    /* experts, groups (of experts among those held, plus 1), number of experts, held, row_P, pairs, rows, row bytes, x, sorted,
       place of each pair, counts, threads */
    long n[13];
    if (numbers(arguments, given, n, 13))
        return NULL;
    const long held = n[3], pairs = n[5], row_bytes = n[7];
    int64_t *rows = checked_indices((int64_t *)n[4], pairs, n[6], "row");
    if (!rows)
        return NULL;
    int64_t *place = malloc((pairs + held + 1) * sizeof *place);
    int failed = 0;
    if (place) {
        Py_BEGIN_ALLOW_THREADS
        failed = sort_pairs((int64_t *)n[0], (int64_t *)n[1], n[2], held, pairs, place, (int64_t *)n[11], place + pairs);
        if (!failed) {
            const long threads = pairs * row_bytes < 4 * FEW_NUMBERS ? 1 : n[12];
            if (pairs) /* an empty tensor may have no address */
                memcpy((int64_t *)n[10], place, pairs * sizeof *place);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
            for (long i = 0; i < pairs; i++)
                memcpy((char *)n[9] + place[i] * row_bytes, (char *)n[8] + rows[i] * row_bytes, row_bytes);
        }
        Py_END_ALLOW_THREADS
    } else
        PyErr_NoMemory();
    free(rows);
    free(place);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(!failed);
}

/* Numbers `first` to `end` of every row. As the library has it, each product is rounded; sums are taken in float32, in pair order, and
   rounded once. */
INLINE void weighted_sum_numbers(const int dtype, const long *n, const int64_t *places, const int64_t *rows, char *sums, long first, long end)
{
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

IN_BOTH(weighted_sum_numbers, (const long *n, const int64_t *places, const int64_t *rows, char *sums, long first, long end),
        n, places, rows, sums, first, end)

PyObject *weighted_sum(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[10]; /* dtype, sorted, place of each pair, row_P, weight_P, sums, pairs, width, rows, threads */
    if (numbers(arguments, given, n, 10))
        return NULL;
    int64_t *places = checked_indices((int64_t *)n[2], n[6], n[6], "result");
    int64_t *rows = places ? checked_indices((int64_t *)n[3], n[6], n[8], "row") : NULL;
    char *wide = rows && n[0] != FLOAT32 ? malloc(n[8] * n[7] * 4 + 1) : NULL, *sums = wide ? wide : (char *)n[5];
    if (rows && n[0] != FLOAT32 && !wide)
        PyErr_NoMemory();
    if (!PyErr_Occurred()) {
        const long lines = (n[7] + LANES - 1) / LANES, threads = n[6] * n[7] < FEW_NUMBERS ? 1 : n[9];
        Py_BEGIN_ALLOW_THREADS
        IN_THREADS(threads, lines, (n[0] == FLOAT32 ? weighted_sum_numbers_float32 : weighted_sum_numbers_bfloat16)(
                                       n, places, rows, sums, first * LANES, end * LANES < n[7] ? end * LANES : n[7]));
        Py_END_ALLOW_THREADS
    }
    free(places);
    free(rows);
    free(wide);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}
