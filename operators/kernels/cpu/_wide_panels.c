/* Products of rows with matrices whose weights have 8, 16 or 32 bits, in float32 or in integers, where a row's bits depend on that row alone.
 *
 * `levels` lists the levels of instructions that this processor has; `products` computes at one. products.py and quantized_products.py lay
 * matrices out, check the arguments and call `products` with addresses.
 *
 * As in _panels.c, a panel is 16 outputs of the matrix, column by column. The rows are float32, and weights are widened to float32 in
 * registers, on their way from memory: decoding reads no more bytes than are stored. Or rows and weights are INT8, and nothing is widened.
 * The columns of a panel in 8 bits form groups, and each output has a scale for each group. Sums run over the columns in one order, independent of the number of rows, their place and the number
 * of threads.
 */
#include "_segments.h"

#include <stdint.h>
#include <string.h>

#define INPUTS_PER_COLUMN 4 /* of integers */

enum { AVX2, AVX512, VNNI, NUM_LEVELS }; /* VNNI: AVX512 with products of four integers at once */
/* FLOAT8: 4 bits of exponent, 3 of mantissa (E4M3), no infinity. BOTH_INT8: the rows become integers, too. */
enum { INT8, FLOAT8, FLOAT16, BFLOAT16, FLOAT32, BOTH_INT8, NUM_KINDS };

typedef struct {
    const char *x; /* floats, or integers with the row's scale behind them */
    const uint8_t *codes;
    const float *scales; /* of weights in 8 bits */
    float *y;
    long rows, outputs, columns, group, x_pitch;
} Work;

typedef struct {
    long outputs, columns, group;
    int level, kind;
} Shape;

static long x_pitch(const Shape *shape)
{
    return shape->kind == BOTH_INT8 ? shape->columns + (long)sizeof(float) : shape->columns * (long)sizeof(float);
}

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 24")
#define SPAN 256   /* columns that are added up by themselves: a sum of a thousand terms, one by one, loses digits */
#define INTEGER_SPAN 32768 /* inputs whose sum fits into 32 bits */
#define AHEAD 4096 /* bytes of a panel that are prefetched */
#define CHUNK_BYTES (1 << 19) /* of rows that are taken together: they stay in the cache for all panels */
#define WEIGHT_BYTES(kind) ((kind) == FLOAT32 ? 4 : (kind) == FLOAT16 || (kind) == BFLOAT16 ? 2 : 1)

#define AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx2,fma,f16c")))
#define VNNI_TARGET __attribute__((target("avx512f,avx512bw,avx512vnni,avx2,fma,f16c")))

/* An 8-bit float as a 16-bit one has the same mantissa and an exponent that is too small by 8; the scale makes up for it. */
#define FLOAT8_FACTOR 256.0f
#define FLOAT8_BITS 0xBF80

INLINE AVX2_TARGET __m256 widen_avx2(const int kind, const uint8_t *codes)
{
    if (kind == FLOAT32)
        return _mm256_loadu_ps((const float *)codes);
    if (kind == FLOAT16)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)codes));
    if (kind == BFLOAT16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)codes)), 16));
    const __m128i eight = _mm_loadl_epi64((const __m128i *)codes);
    if (kind == INT8)
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
    const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(eight), 7);
    return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16((short)FLOAT8_BITS)));
}

INLINE AVX512_TARGET __m512 widen_avx512(const int kind, const uint8_t *codes)
{
    if (kind == FLOAT32)
        return _mm512_loadu_ps((const float *)codes);
    if (kind == FLOAT16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)codes));
    if (kind == BFLOAT16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)codes)), 16));
    const __m128i sixteen = _mm_loadu_si128((const __m128i *)codes);
    if (kind == INT8)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen));
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(sixteen), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((short)FLOAT8_BITS)));
}

/* For registers of `width` floats: `rows` rows with `panels` panels; both known when this is compiled, so that all sums are in registers. */
#define DEFINE_BLOCK(level, TARGET, Vector, width, prefix, most) \
    INLINE TARGET void floats_##level(const int kind, const int rows, const int panels, const Work *work, long row, long panel) \
    { \
        const char *x = work->x + row * work->x_pitch; \
        const int parts = PANEL / width, bytes = WEIGHT_BYTES(kind), has_scales = bytes == 1; \
        const long stride = work->columns * PANEL * bytes, groups = (work->columns + work->group - 1) / work->group; \
        const uint8_t *codes = work->codes + panel * stride; \
        const float *scales = work->scales + panel * groups * PANEL; \
        Vector totals[most], sums[most]; \
        UNROLLED for (int i = 0; i < rows * panels * parts; i++) totals[i] = prefix##_setzero_ps(); \
        for (long first = 0, end; first < work->columns; first = end) { \
            const long group = first / work->group, next = (group + 1) * work->group; \
            end = first + SPAN < next ? first + SPAN : next; \
            end = end < work->columns ? end : work->columns; \
            UNROLLED for (int i = 0; i < rows * panels * parts; i++) sums[i] = prefix##_setzero_ps(); \
            for (long k = first; k < end; k++) { \
                Vector column[8]; \
                UNROLLED for (int i = 0; i < panels * parts; i++) { \
                    const uint8_t *at = codes + i / parts * stride + (k * PANEL + i % parts * width) * bytes; \
                    if (i % parts == 0) \
                        _mm_prefetch(at + AHEAD, _MM_HINT_T0); \
                    column[i] = widen_##level(kind, at); \
                } \
                UNROLLED for (int r = 0; r < rows; r++) { \
                    const Vector value = prefix##_set1_ps(((const float *)(x + r * work->x_pitch))[k]); \
                    UNROLLED for (int i = 0; i < panels * parts; i++) { \
                        Vector *sum = &sums[r * panels * parts + i]; \
                        *sum = prefix##_fmadd_ps(value, column[i], *sum); \
                    } \
                } \
            } \
            if (!has_scales) { \
                UNROLLED for (int i = 0; i < rows * panels * parts; i++) totals[i] = prefix##_add_ps(totals[i], sums[i]); \
                continue; \
            } \
            UNROLLED for (int i = 0; i < panels * parts; i++) { \
                Vector scale = prefix##_loadu_ps(scales + (i / parts * groups + group) * PANEL + i % parts * width); \
                if (kind == FLOAT8) \
                    scale = prefix##_mul_ps(scale, prefix##_set1_ps(FLOAT8_FACTOR)); \
                UNROLLED for (int r = 0; r < rows; r++) { \
                    Vector *total = &totals[r * panels * parts + i]; \
                    *total = prefix##_fmadd_ps(sums[r * panels * parts + i], scale, *total); \
                } \
            } \
        } \
        float *y = work->y + row * work->outputs + panel * PANEL; \
        UNROLLED for (int r = 0; r < rows; r++) \
            UNROLLED for (int i = 0; i < panels * parts; i++) \
                prefix##_storeu_ps(y + r * work->outputs + i * width, totals[r * panels * parts + i]); \
    }

DEFINE_BLOCK(avx2, AVX2_TARGET, __m256, 8, _mm256, 12)
DEFINE_BLOCK(avx512, AVX512_TARGET, __m512, 16, _mm512, 24)

/* Four products of a weight without its sign and a row's value that has taken that sign, added up: no instruction that multiplies bytes takes
   two with signs. A pair of such products fits into the 16 bits that it passes through. */
INLINE AVX2_TARGET __m256i times_avx2(__m256i sum, __m256i weights, __m256i value)
{
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(value, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

INLINE AVX512_TARGET __m512i with_sign(__m512i weights, __m512i value)
{
    return _mm512_mask_sub_epi8(value, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), value);
}

INLINE AVX512_TARGET __m512i times_avx512(__m512i sum, __m512i weights, __m512i value)
{
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(weights), with_sign(weights, value));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

/* Here the row's value is 128 too large, so that it has no sign; what this adds to a sum is what a row of zeros gives. */
INLINE VNNI_TARGET __m512i times_vnni(__m512i sum, __m512i weights, __m512i value)
{
    return _mm512_dpbusd_epi32(sum, _mm512_xor_si512(value, _mm512_set1_epi8(-128)), weights);
}

/* As DEFINE_BLOCK, for rows that are integers, too. A column of a panel is four inputs of each output. The sum of a group is exact, so
   that all levels give the same bits. */
#define DEFINE_INTEGERS(level, has_offset, TARGET, Vector, Integers, width, prefix, integer, most) \
    INLINE TARGET void integers_##level(const int rows, const int panels, const Work *work, long row, long panel) \
    { \
        const int parts = PANEL / width; \
        const long stride = work->columns * PANEL, groups = (work->columns + work->group - 1) / work->group; \
        const uint8_t *codes = work->codes + panel * stride; \
        const char *x = work->x + row * work->x_pitch; \
        const float *scales = work->scales + panel * groups * PANEL; \
        Vector totals[most]; \
        Integers sums[most], of_zeros[8]; \
        UNROLLED for (int i = 0; i < rows * panels * parts; i++) totals[i] = prefix##_setzero_ps(); \
        for (long first = 0, end; first < work->columns; first = end) { \
            const long group = first / work->group, next = (group + 1) * work->group; \
            end = first + INTEGER_SPAN < next ? first + INTEGER_SPAN : next; \
            end = end < work->columns ? end : work->columns; \
            UNROLLED for (int i = 0; i < rows * panels * parts; i++) sums[i] = prefix##_setzero_##integer(); \
            UNROLLED for (int i = 0; i < panels * parts; i++) of_zeros[i] = prefix##_setzero_##integer(); \
            for (long k = first; k < end; k += INPUTS_PER_COLUMN) { \
                Integers column[8]; \
                UNROLLED for (int i = 0; i < panels * parts; i++) { \
                    const uint8_t *at = codes + i / parts * stride + k * PANEL + i % parts * width * INPUTS_PER_COLUMN; \
                    if (i % parts == 0) \
                        _mm_prefetch(at + AHEAD, _MM_HINT_T0); \
                    column[i] = prefix##_loadu_##integer((const Integers *)at); \
                    if (has_offset) \
                        of_zeros[i] = times_##level(of_zeros[i], column[i], prefix##_setzero_##integer()); \
                } \
                UNROLLED for (int r = 0; r < rows; r++) { \
                    int inputs; \
                    memcpy(&inputs, x + r * work->x_pitch + k, INPUTS_PER_COLUMN); \
                    UNROLLED for (int i = 0; i < panels * parts; i++) { \
                        Integers *sum = &sums[r * panels * parts + i]; \
                        *sum = times_##level(*sum, column[i], prefix##_set1_epi32(inputs)); \
                    } \
                } \
            } \
            UNROLLED for (int i = 0; i < panels * parts; i++) { \
                const Vector scale = prefix##_loadu_ps(scales + (i / parts * groups + group) * PANEL + i % parts * width); \
                UNROLLED for (int r = 0; r < rows; r++) { \
                    Vector *total = &totals[r * panels * parts + i]; \
                    Integers sum = sums[r * panels * parts + i]; \
                    if (has_offset) \
                        sum = prefix##_sub_epi32(sum, of_zeros[i]); \
                    *total = prefix##_fmadd_ps(prefix##_cvtepi32_ps(sum), scale, *total); \
                } \
            } \
        } \
        float *y = work->y + row * work->outputs + panel * PANEL; \
        UNROLLED for (int r = 0; r < rows; r++) { \
            float scale; \
            memcpy(&scale, x + (r + 1) * work->x_pitch - sizeof scale, sizeof scale); \
            UNROLLED for (int i = 0; i < panels * parts; i++) { \
                const Vector total = prefix##_mul_ps(totals[r * panels * parts + i], prefix##_set1_ps(scale)); \
                prefix##_storeu_ps(y + r * work->outputs + i * width, total); \
            } \
        } \
    }

DEFINE_INTEGERS(avx2, 0, AVX2_TARGET, __m256, __m256i, 8, _mm256, si256, 12)
DEFINE_INTEGERS(avx512, 0, AVX512_TARGET, __m512, __m512i, 16, _mm512, si512, 24)
DEFINE_INTEGERS(vnni, 1, VNNI_TARGET, __m512, __m512i, 16, _mm512, si512, 24)

/* Number of rows of the block that begins at `row`; blocks are as even as possible. */
static long block_rows(long row, long rows, long most)
{
    const long left = rows - row, blocks = (left + most - 1) / most;
    return (left + blocks - 1) / blocks;
}

/* The block of `kind`, for rows and panels that are known when this is compiled. */
#define BLOCK(level, kind, rows, panels) \
    { \
        if (kind == BOTH_INT8) \
            integers_##level(rows, panels, work, row, panel); \
        else \
            floats_##level(kind, rows, panels, work, row, panel); \
    }

#define CASE(level, kind, rows, panels) \
    case rows: \
        BLOCK(level, kind, rows, panels) \
        break;

/* One to three rows take more panels at once: an addition has to wait for the one before, so eight sums and more must be under way. */
INLINE AVX2_TARGET void panels_avx2(const int kind, const Work *work, long panel, long end)
{
    const long row = 0;
    if (work->rows == 1)
        for (; panel + 4 <= end; panel += 4)
            BLOCK(avx2, kind, 1, 4)
    if (work->rows == 2)
        for (; panel + 2 <= end; panel += 2)
            BLOCK(avx2, kind, 2, 2)
    for (; panel < end; panel++)
        for (long row = 0, rows; row < work->rows; row += rows)
            switch (rows = block_rows(row, work->rows, 6)) {
                CASE(avx2, kind, 1, 1) CASE(avx2, kind, 2, 1) CASE(avx2, kind, 3, 1)
                CASE(avx2, kind, 4, 1) CASE(avx2, kind, 5, 1) CASE(avx2, kind, 6, 1)
            }
}

#define DEFINE_PANELS(level, TARGET) \
    INLINE TARGET void panels_##level(const int kind, const Work *work, long panel, long end) \
    { \
        const long row = 0; \
        if (work->rows == 1) \
            for (; panel + 8 <= end; panel += 8) \
                BLOCK(level, kind, 1, 8) \
        if (work->rows == 2) \
            for (; panel + 4 <= end; panel += 4) \
                BLOCK(level, kind, 2, 4) \
        if (work->rows == 3) \
            for (; panel + 4 <= end; panel += 4) \
                BLOCK(level, kind, 3, 4) \
        for (; panel + 2 <= end; panel += 2) \
            for (long row = 0, rows; row < work->rows; row += rows) \
                switch (rows = block_rows(row, work->rows, 12)) { \
                    CASE(level, kind, 1, 2) CASE(level, kind, 2, 2) CASE(level, kind, 3, 2) CASE(level, kind, 4, 2) \
                    CASE(level, kind, 5, 2) CASE(level, kind, 6, 2) CASE(level, kind, 7, 2) CASE(level, kind, 8, 2) \
                    CASE(level, kind, 9, 2) CASE(level, kind, 10, 2) CASE(level, kind, 11, 2) CASE(level, kind, 12, 2) \
                } \
        panels_avx2(kind, work, panel, end); /* the same sums */ \
    }

#define floats_vnni floats_avx512
DEFINE_PANELS(avx512, AVX512_TARGET)
DEFINE_PANELS(vnni, VNNI_TARGET)

#define DEFINE_KIND(name, kind) \
    static AVX2_TARGET void name##_avx2(const Work *work, long panel, long end) { panels_avx2(kind, work, panel, end); } \
    static AVX512_TARGET void name##_avx512(const Work *work, long panel, long end) { panels_avx512(kind, work, panel, end); }

DEFINE_KIND(int8, INT8)
DEFINE_KIND(float8, FLOAT8)
DEFINE_KIND(float16, FLOAT16)
DEFINE_KIND(bfloat16, BFLOAT16)
DEFINE_KIND(float32, FLOAT32)
DEFINE_KIND(both_int8, BOTH_INT8)
static VNNI_TARGET void both_int8_vnni(const Work *work, long panel, long end) { panels_vnni(BOTH_INT8, work, panel, end); }

#define FLOAT_KINDS(level) \
    [INT8] = int8_##level, [FLOAT8] = float8_##level, [FLOAT16] = float16_##level, [BFLOAT16] = bfloat16_##level, [FLOAT32] = float32_##level

static void (*const PANELS[NUM_LEVELS][NUM_KINDS])(const Work *, long, long) = {
    [AVX2] = {FLOAT_KINDS(avx2), [BOTH_INT8] = both_int8_avx2},
    [AVX512] = {FLOAT_KINDS(avx512), [BOTH_INT8] = both_int8_avx512},
    [VNNI] = {FLOAT_KINDS(avx512), [BOTH_INT8] = both_int8_vnni},
};

static int has(int level)
{
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    return level == AVX2 ? avx2 : level == AVX512 ? avx512 : avx512 && __builtin_cpu_supports("avx512vnni");
}

static long code_bytes(const Shape *shape) { return shape->outputs * shape->columns * WEIGHT_BYTES(shape->kind); }

static void some_panels(const void *work, const Segment *segment, long first, long end)
{
    const Shape *shape = work;
    const Work own = {
        .x = segment->x, .codes = (uint8_t *)segment->matrix, .scales = (float *)(segment->matrix + code_bytes(shape)), .y = (float *)segment->y,
        .rows = segment->rows, .outputs = shape->outputs, .columns = shape->columns, .group = shape->group, .x_pitch = x_pitch(shape),
    };
    PANELS[shape->level][shape->kind](&own, first, end);
}

static long max_rows(const Shape *shape)
{
    const long fitting = CHUNK_BYTES / (shape->columns * 4) / 12; /* whole blocks */
    return (fitting ? fitting : 1) * 12;
}

#else

static long code_bytes(const Shape *shape) { return 0; }

static void some_panels(const void *work, const Segment *segment, long first, long end) {}

static long max_rows(const Shape *shape) { return 1; }

static int has(int level) { return 0; }

#endif

static int found_levels[NUM_LEVELS]; /* levels that `levels` has found; others would run illegal instructions */

static PyObject *levels(PyObject *module, PyObject *unused)
{
    PyObject *found = PyList_New(0);
    for (int level = 0; found && level < NUM_LEVELS; level++) {
        PyObject *number = (found_levels[level] = has(level)) ? PyLong_FromLong(level) : NULL;
        if (number && PyList_Append(found, number))
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

static PyObject *products(PyObject *module, PyObject *const *arguments, Py_ssize_t number)
{
    enum { LEVEL, KIND, X, Y, ROWS, OUTPUTS, COLUMNS, GROUP, THREADS, NUMBER };
    long n[NUMBER], count;
    if (number != NUMBER + 2) {
        PyErr_Format(PyExc_TypeError, "products takes %d numbers and two sequences", NUMBER);
        return NULL;
    }
    for (int i = 0; i < NUMBER; i++) {
        n[i] = PyLong_AsLong(arguments[i]);
        if (n[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    const int known = n[LEVEL] >= 0 && n[LEVEL] < NUM_LEVELS && found_levels[n[LEVEL]] && n[KIND] >= 0 && n[KIND] < NUM_KINDS;
    const int whole = n[KIND] != BOTH_INT8 || (n[COLUMNS] % INPUTS_PER_COLUMN == 0 && n[GROUP] % INPUTS_PER_COLUMN == 0);
    const int sized = n[OUTPUTS] >= 0 && n[OUTPUTS] % PANEL == 0 && n[COLUMNS] >= 1 && n[GROUP] >= 1 && whole;
    if (!known || !sized || n[THREADS] < 1 || n[THREADS] > MAX_THREADS) {
        PyErr_SetString(PyExc_ValueError, "unknown level, kind or number of threads, or sizes that are not a multiple of what a panel holds");
        return NULL;
    }
    const Shape shape = {
        .level = (int)n[LEVEL], .kind = (int)n[KIND], .outputs = n[OUTPUTS], .columns = n[COLUMNS], .group = n[GROUP],
    };
    Segment *segments = read_segments(
        arguments[NUMBER], arguments[NUMBER + 1], n[ROWS], n[X], x_pitch(&shape), n[Y], n[OUTPUTS] * (long)sizeof(float), max_rows(&shape), &count);
    if (!segments)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    multiply_segments(&shape, segments, count, n[OUTPUTS] / PANEL, code_bytes(&shape), n[THREADS]);
    Py_END_ALLOW_THREADS
    free(segments);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"levels", levels, METH_NOARGS, "The levels of instructions that this processor has: AVX2, AVX512, VNNI."},
    {"products", (PyCFunction)(void (*)(void))products, METH_FASTCALL,
     "products(level, kind, x, y, rows, outputs, columns, group, threads, matrices, counts): y = x @ matrix.T of the rows of each matrix; x, y and"
     " matrices, with their scales behind them, are addresses."},
    {NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "flowrt.operators.kernels.cpu._wide_panels", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__wide_panels(void)
{
    PyObject *module = PyModule_Create(&definition);
    const int failed = module
                       && (PyModule_AddIntMacro(module, INT8) || PyModule_AddIntMacro(module, FLOAT8)
                           || PyModule_AddIntMacro(module, FLOAT16) || PyModule_AddIntMacro(module, BFLOAT16)
                           || PyModule_AddIntMacro(module, FLOAT32) || PyModule_AddIntMacro(module, BOTH_INT8)
                           || PyModule_AddIntMacro(module, AVX2) || PyModule_AddIntMacro(module, AVX512)
                           || PyModule_AddIntMacro(module, VNNI));
    if (failed)
        Py_CLEAR(module);
    return module;
}
