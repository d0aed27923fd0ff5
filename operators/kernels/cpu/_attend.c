/* `paged_attention`: attention of one row per sequence, in place (module flowrt.operators.kernels.cpu._rows).
 *
 * The library computes the rows of prompts (attention.py). This kernel copies nothing out of pages and pads nothing, and the bits of a row
 * depend on its own sequence alone. Query heads that share a key head read it together. A task is a sequence, or some of its key heads if
 * one sequence is too long for one thread. A task computes all scores, their softmax in float32, and the weighted sum of values.
 */
#include "_rows.h"

#define FEW_READ (1 << 17)    /* numbers of keys and values; waking another thread costs as much as reading these */
#define TOGETHER 4            /* tokens that are read together */
#define AHEAD 8               /* tokens */

/* One row and its visible context, as private copies of indices. */
typedef struct {
    long row, length;
    int64_t *pages; /* of the whole context, in order */
} Context;

typedef struct {
    const char *q, *keys, *values; /* row [T] at `q_pitch` bytes: [heads, width]; [pages, page_size, kv_heads] of `head_bytes` twice */
    char *out;                     /* [T, heads * width] */
    const Context *contexts;
    long q_pitch, heads, kv_heads, width, page_size, window, head_bytes;
    int dtype, int8; /* `int8`: of the pages */
} Attend;

/* Four sums of lanes each: in place i of every quarter that of the i-th. */
INLINE vec totals(vec a, vec b, vec c, vec d)
{
    const vec ab = __builtin_shuffle(a, b, (ints){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23})
                   + __builtin_shuffle(a, b, (ints){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    const vec cd = __builtin_shuffle(c, d, (ints){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23})
                   + __builtin_shuffle(c, d, (ints){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    vec all = __builtin_shuffle(ab, cd, (ints){0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27})
              + __builtin_shuffle(ab, cd, (ints){4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
    all += __builtin_shuffle(all, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    all += __builtin_shuffle(all, (ints){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
    return __builtin_shuffle(all, (ints){0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12});
}

/* Addresses of the next tokens from `token` on; past `end` the last token repeats. Prefetches the tokens AHEAD of them, because a page is
   too short for the hardware prefetcher. */
INLINE void locate_tokens(const Attend *a, const char *pages, const int64_t *table, long token, long end, long head, long end_head,
                          const char **at)
{
    const long head_bytes = a->head_bytes;
    for (int i = 0; i < TOGETHER; i++) {
        const long each = token + i < end ? token + i : end - 1, later = each + AHEAD < end ? each + AHEAD : end - 1;
        const long page = each / a->page_size, later_page = later / a->page_size;
        const char *next = pages + (table[later_page] * a->page_size + later - later_page * a->page_size) * a->kv_heads * head_bytes;
        for (long byte = head * head_bytes; byte < end_head * head_bytes; byte += 64)
            __builtin_prefetch(next + byte, 0, 2);
        at[i] = pages + (table[page] * a->page_size + each - page * a->page_size) * a->kv_heads * head_bytes;
    }
}

/* One head of these tokens as float32: in place, or widened once for all query heads that share it. */
INLINE void load_head(const int dtype, const int int8, const char *const *at, long head, const Attend *a, float *wide, const char **rows)
{
    const long width = a->width;
    for (int i = 0; i < TOGETHER; i++) {
        rows[i] = at[i] + head * a->head_bytes;
        if (dtype == FLOAT32 && !int8)
            continue;
        const float scale = int8 ? scale_of(rows[i], width) : 1;
        for (long k = 0; k < width; k += LANES)
            store(FLOAT32, (char *)(wide + i * width), k, width,
                  int8 ? load_int8(rows[i], k, width) * scale : load(dtype, rows[i], k, width));
        rows[i] = (const char *)(wide + i * width);
    }
}

/* Four scores of each of `sharing` queries. */
INLINE void score(const char *const *keys, const float *q, long sharing, long width, float *scores, long pitch)
{
    for (long g = 0; g < sharing; g++) {
        vec sums[TOGETHER] = {{0}};
        for (long i = 0; i < width; i += LANES) {
            const vec part = load(FLOAT32, (const char *)(q + g * width), i, width);
            for (int t = 0; t < TOGETHER; t++)
                sums[t] += part * load(FLOAT32, keys[t], i, width);
        }
        const vec all = totals(sums[0], sums[1], sums[2], sums[3]);
        memcpy(scores + g * pitch, &all, TOGETHER * sizeof(float));
    }
}

/* Replaces scores by their exponentials in place, sets those past the end to 0, and returns the sum. */
INLINE float exponentials(float *scores, long count)
{
    for (long i = count; i % LANES; i++)
        scores[i] = -INFINITY;
    vec most = (vec){0} - INFINITY, sum = {0};
    for (long i = 0; i < count; i += LANES)
        most = larger(load(FLOAT32, (const char *)scores, i, i + LANES), most);
    const float top = largest(most);
    for (long i = 0; i < count; i += LANES) {
        const vec each = exponential(load(FLOAT32, (const char *)scores, i, i + LANES) - top);
        sum += each;
        store(FLOAT32, (char *)scores, i, i + LANES, each);
    }
    return total(sum);
}

INLINE void add_values(const int count, const char *const *values, const float *weights, long pitch, long sharing, float *sums, long width)
{
    for (long g = 0; g < sharing; g++)
        for (long i = 0; i < width; i += LANES) {
            vec sum = load(FLOAT32, (const char *)(sums + g * width), i, width);
            for (int t = 0; t < count; t++)
                sum += weights[g * pitch + t] * load(FLOAT32, values[t], i, width);
            store(FLOAT32, (char *)(sums + g * width), i, width, sum);
        }
}

/* Computes key heads `head` to `end_head` of context `number`. */
INLINE void attend_pages(const int dtype, const int int8, const Attend *a, long number, long head, long end_head, float *scratch, long pitch)
{
    const long sharing = a->heads / a->kv_heads, width = a->width, heads = (end_head - head) * sharing, bytes = 4 >> dtype;
    const Context *context = a->contexts + number;
    const long end = context->length, first = a->window && end > a->window ? end - a->window : 0;
    const int64_t *table = context->pages;
    const char *q_row = a->q + context->row * a->q_pitch + head * sharing * width * bytes;
    char *out = a->out + (context->row * a->heads + head * sharing) * width * bytes;
    float *q = scratch, *sums = q + heads * width, *by_head = sums + heads * width, *wide = by_head + heads;
    float *scores = wide + TOGETHER * width;
    const char *at[TOGETHER], *rows[TOGETHER];
    const float scale = 1 / sqrtf(width);
    for (long i = 0; i < heads * width; i += LANES)
        store(FLOAT32, (char *)q, i, heads * width, load(dtype, q_row, i, heads * width) * scale);
    for (long token = first; token < end; token += TOGETHER) {
        locate_tokens(a, a->keys, table, token, end, head, end_head, at);
        for (long h = 0; h < end_head - head; h++) {
            load_head(dtype, int8, at, head + h, a, wide, rows);
            score(rows, q + h * sharing * width, sharing, width, scores + h * sharing * pitch + token - first, pitch);
        }
    }
    for (long h = 0; h < heads; h++)
        by_head[h] = exponentials(scores + h * pitch, end - first);
    memset(sums, 0, heads * width * sizeof *sums);
    for (long token = first; token < end; token += TOGETHER) {
        locate_tokens(a, a->values, table, token, end, head, end_head, at);
        for (long h = 0; h < end_head - head; h++) {
            const float *weights = scores + h * sharing * pitch + token - first;
            float *to = sums + h * sharing * width;
            load_head(dtype, int8, at, head + h, a, wide, rows);
            if (token + TOGETHER <= end)
                add_values(TOGETHER, rows, weights, pitch, sharing, to, width);
            else
                for (long t = 0; token + t < end; t++)
                    add_values(1, rows + t, weights + t, pitch, sharing, to, width);
        }
    }
    for (long h = 0; h < heads; h++)
        for (long i = 0; i < width; i += LANES)
            store(dtype, out + h * width * bytes, i, width, load(FLOAT32, (const char *)(sums + h * width), i, width) / by_head[h]);
}

INLINE void attend_task(const int dtype, const Attend *a, long number, long head, long end_head, float *scratch, long pitch)
{
    if (a->int8)
        attend_pages(dtype, 1, a, number, head, end_head, scratch, pitch);
    else
        attend_pages(dtype, 0, a, number, head, end_head, scratch, pitch);
}

IN_BOTH(attend_task, (const Attend *a, long number, long head, long end, float *scratch, long pitch), a, number, head, end, scratch, pitch)

/* Copies and checks the indices of one row. Returns 0, or -1 with an exception set. */
static int read_context(const long *n, long number, Context *context)
{
    const long num_rows = n[18], num_sequences = n[19], page_size = n[15], table_pitch = n[7];
    const long row = read_once((int64_t *)n[3] + number), sequence = read_once((int64_t *)n[4] + number);
    if (row < 0 || row >= num_rows || sequence < 0 || sequence >= num_sequences) {
        PyErr_Format(PyExc_IndexError, "row %ld of %ld, sequence %ld of %ld", row, num_rows, sequence, num_sequences);
        return -1;
    }
    const long length = read_once((int64_t *)n[5] + sequence), num_pages = (length - 1) / page_size + 1;
    if (length < 1 || num_pages > table_pitch) {
        PyErr_Format(PyExc_IndexError, "a context of %ld tokens in %ld pages", length, table_pitch);
        return -1;
    }
    *context = (Context){.row = row, .length = length,
                         .pages = checked_indices((int64_t *)n[6] + sequence * table_pitch, num_pages, n[16], "page")};
    return context->pages ? 0 : -1;
}

PyObject *paged_attention(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    long n[23];
    if (numbers(arguments, given, n, 23))
        return NULL;
    const long count = n[11];
    Context *contexts = calloc(count + 1, sizeof *contexts);
    if (!contexts)
        return PyErr_NoMemory();
    const Attend work = {
        .dtype = (int)n[0], .q = (char *)n[1], .q_pitch = n[2], .contexts = contexts, .keys = (char *)n[8], .values = (char *)n[9],
        .out = (char *)n[10], .heads = n[12], .kv_heads = n[13], .width = n[14], .page_size = n[15], .window = n[17],
        .int8 = (int)n[21], .head_bytes = n[22],
    };
    long tokens = 0, longest = 0; /* that the rows see together, that one row sees at most */
    for (long number = 0; number < count; number++) {
        if (read_context(n, number, contexts + number))
            goto end;
        const long length = contexts[number].length, seen = work.window && length > work.window ? work.window : length;
        tokens += seen;
        longest = seen > longest ? seen : longest;
    }
    const long threads = 2 * tokens * work.kv_heads * work.width < FEW_READ ? 1 : n[20];
    const long split = tokens < threads * longest; /* the longest sequence alone would occupy one thread while others are idle */
    const long shares = !split ? 1 : work.kv_heads < threads ? work.kv_heads : threads; /* of a sequence's heads */
    const long pitch = (longest + 2 * LANES) / LANES * LANES;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scratch = malloc((work.heads * (2 * work.width + 1 + pitch) + TOGETHER * work.width) * sizeof *scratch);
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < count * shares; task++) {
            const long share = task % shares, head = work.kv_heads * share / shares, end = work.kv_heads * (share + 1) / shares;
            if (scratch)
                (work.dtype == FLOAT32 ? attend_task_float32 : attend_task_bfloat16)(&work, task / shares, head, end, scratch, pitch);
            else {
#pragma omp atomic write
                failed = 1;
            }
        }
        free(scratch);
    }
    Py_END_ALLOW_THREADS
    if (failed)
        PyErr_NoMemory();
end:
    for (long number = 0; number < count; number++)
        free(contexts[number].pages);
    free(contexts);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}
