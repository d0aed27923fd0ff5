/* Products of rows with a matrix whose weights have 8, 16 or 32 bits and are widened to float32, where a row's bits depend on that row alone.
 *
 * `levels` lists the levels of instructions that this processor has; `product` computes at one. products.py and quantized_products.py lay
 * matrices out, check the arguments and call `product` with addresses.
 *
 * As in _panels.c, a panel is 16 outputs of the matrix, column by column. The rows are float32, and weights are widened to float32 in
 * registers, on their way from memory: decoding reads no more bytes than are stored. The columns of a panel in 8 bits form groups, and each
 * output has a scale for each group. Sums run over the columns in one order, independent of the number of rows, their place and the number
 * of threads.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define PANEL 16
#define MAX_THREADS 4096

enum { AVX2, AVX512, NUM_LEVELS };
enum { INT8, FLOAT8, FLOAT16, BFLOAT16, FLOAT32, NUM_KINDS }; /* FLOAT8: 4 bits of exponent, 3 of mantissa (E4M3), no infinity */

typedef struct {
    const float *x;
    const uint8_t *codes;
    const float *scales; /* of weights in 8 bits */
    float *y;
    long rows, outputs, columns, group;
    int level, kind;
} Work;

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 24")
#define SPAN 256   /* columns that are added up by themselves: a sum of a thousand terms, one by one, loses digits */
#define AHEAD 1024 /* bytes of a panel that are prefetched */
#define CHUNK_BYTES (1 << 19) /* of rows that are taken together: they stay in the cache for all panels */
#define WEIGHT_BYTES(kind) ((kind) == FLOAT32 ? 4 : (kind) == FLOAT16 || (kind) == BFLOAT16 ? 2 : 1)

#define AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define AVX512_TARGET __attribute__((target("avx512f,avx512bw,avx2,fma,f16c")))

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
    INLINE TARGET void block_##level(const int kind, const int rows, const int panels, const Work *work, long row, long panel) \
    { \
        const int parts = PANEL / width, bytes = WEIGHT_BYTES(kind), has_scales = bytes == 1; \
        const long stride = work->columns * PANEL * bytes, groups = (work->columns + work->group - 1) / work->group; \
        const uint8_t *codes = work->codes + panel * stride; \
        const float *x = work->x + row * work->columns, *scales = work->scales + panel * groups * PANEL; \
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
                    const Vector value = prefix##_set1_ps(x[r * work->columns + k]); \
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

/* Number of rows of the block that begins at `row`; blocks are as even as possible. */
static long block_rows(long row, long rows, long most)
{
    const long left = rows - row, blocks = (left + most - 1) / most;
    return (left + blocks - 1) / blocks;
}

#define CASE(level, kind, rows, panels) \
    case rows: \
        block_##level(kind, rows, panels, work, row, panel); \
        break;

/* One to three rows take more panels at once: an addition has to wait for the one before, so eight sums and more must be under way. */
INLINE AVX2_TARGET void panels_avx2(const int kind, const Work *work, long panel, long end)
{
    if (work->rows == 1)
        for (; panel + 4 <= end; panel += 4)
            block_avx2(kind, 1, 4, work, 0, panel);
    if (work->rows == 2)
        for (; panel + 2 <= end; panel += 2)
            block_avx2(kind, 2, 2, work, 0, panel);
    for (; panel < end; panel++)
        for (long row = 0, rows; row < work->rows; row += rows)
            switch (rows = block_rows(row, work->rows, 6)) {
                CASE(avx2, kind, 1, 1) CASE(avx2, kind, 2, 1) CASE(avx2, kind, 3, 1)
                CASE(avx2, kind, 4, 1) CASE(avx2, kind, 5, 1) CASE(avx2, kind, 6, 1)
            }
}

INLINE AVX512_TARGET void panels_avx512(const int kind, const Work *work, long panel, long end)
{
    if (work->rows == 1)
        for (; panel + 8 <= end; panel += 8)
            block_avx512(kind, 1, 8, work, 0, panel);
    if (work->rows == 2)
        for (; panel + 4 <= end; panel += 4)
            block_avx512(kind, 2, 4, work, 0, panel);
    if (work->rows == 3)
        for (; panel + 4 <= end; panel += 4)
            block_avx512(kind, 3, 4, work, 0, panel);
    for (; panel + 2 <= end; panel += 2)
        for (long row = 0, rows; row < work->rows; row += rows)
            switch (rows = block_rows(row, work->rows, 12)) {
                CASE(avx512, kind, 1, 2) CASE(avx512, kind, 2, 2) CASE(avx512, kind, 3, 2) CASE(avx512, kind, 4, 2)
                CASE(avx512, kind, 5, 2) CASE(avx512, kind, 6, 2) CASE(avx512, kind, 7, 2) CASE(avx512, kind, 8, 2)
                CASE(avx512, kind, 9, 2) CASE(avx512, kind, 10, 2) CASE(avx512, kind, 11, 2) CASE(avx512, kind, 12, 2)
            }
    panels_avx2(kind, work, panel, end); /* the same sums */
}

#define DEFINE_KIND(name, kind) \
    static AVX2_TARGET void name##_avx2(const Work *work, long panel, long end) { panels_avx2(kind, work, panel, end); } \
    static AVX512_TARGET void name##_avx512(const Work *work, long panel, long end) { panels_avx512(kind, work, panel, end); }

DEFINE_KIND(int8, INT8)
DEFINE_KIND(float8, FLOAT8)
DEFINE_KIND(float16, FLOAT16)
DEFINE_KIND(bfloat16, BFLOAT16)
DEFINE_KIND(float32, FLOAT32)

#define OF_KINDS(level) \
    {[INT8] = int8_##level, [FLOAT8] = float8_##level, [FLOAT16] = float16_##level, [BFLOAT16] = bfloat16_##level, [FLOAT32] = float32_##level}

static void (*const PANELS[NUM_LEVELS][NUM_KINDS])(const Work *, long, long) = {[AVX2] = OF_KINDS(avx2), [AVX512] = OF_KINDS(avx512)};

static int has(int level)
{
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return avx2 && (level == AVX2 || (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")));
}

/* The panels of one of `threads` threads; in multiples of eight, so that none has to take its last ones singly. */
static void share(const Work *work, long thread, long threads)
{
    const long panels = work->outputs / PANEL, eights = (panels + 7) / 8;
    const long first = eights * thread / threads * 8, end = eights * (thread + 1) / threads * 8;
    PANELS[work->level][work->kind](work, first, end < panels ? end : panels);
}

static void all_panels(const Work *work, long threads)
{
    const long useful = (work->outputs / PANEL + 7) / 8;
    threads = threads < useful ? threads : useful;
    if (threads <= 1) {
        share(work, 0, 1);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long thread = 0; thread < threads; thread++)
        share(work, thread, threads);
}

static void multiply(Work work, long threads)
{
    const long rows = work.rows, fitting = CHUNK_BYTES / (work.columns * 4) / 12 * 12, most = fitting ? fitting : 12; /* whole blocks */
    for (long row = 0; row < rows; row += most, work.x += most * work.columns, work.y += most * work.outputs) {
        work.rows = rows - row < most ? rows - row : most;
        all_panels(&work, threads);
    }
}

#else

static void multiply(Work work, long threads) {}

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

static PyObject *product(PyObject *module, PyObject *const *arguments, Py_ssize_t number)
{
    enum { LEVEL, KIND, X, CODES, SCALES, Y, ROWS, OUTPUTS, COLUMNS, GROUP, THREADS, NUMBER };
    long n[NUMBER];
    if (number != NUMBER) {
        PyErr_Format(PyExc_TypeError, "product takes %d numbers", NUMBER);
        return NULL;
    }
    for (int i = 0; i < NUMBER; i++) {
        n[i] = PyLong_AsLong(arguments[i]);
        if (n[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    const int known = n[LEVEL] >= 0 && n[LEVEL] < NUM_LEVELS && found_levels[n[LEVEL]] && n[KIND] >= 0 && n[KIND] < NUM_KINDS;
    const int sized = n[ROWS] >= 0 && n[OUTPUTS] >= 0 && n[OUTPUTS] % PANEL == 0 && n[COLUMNS] >= 1 && n[GROUP] >= 1;
    if (!known || !sized || n[THREADS] < 1 || n[THREADS] > MAX_THREADS) {
        PyErr_SetString(PyExc_ValueError, "unknown level, kind or number of threads, or outputs that are not a multiple of 16");
        return NULL;
    }
    const Work work = {
        .level = (int)n[LEVEL], .kind = (int)n[KIND], .x = (float *)n[X], .codes = (uint8_t *)n[CODES], .scales = (float *)n[SCALES],
        .y = (float *)n[Y], .rows = n[ROWS], .outputs = n[OUTPUTS], .columns = n[COLUMNS], .group = n[GROUP],
    };
    Py_BEGIN_ALLOW_THREADS
    multiply(work, n[THREADS]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"levels", levels, METH_NOARGS, "The levels of instructions that this processor has: AVX2, AVX512."},
    {"product", (PyCFunction)(void (*)(void))product, METH_FASTCALL,
     "product(level, kind, x, codes, scales, y, rows, outputs, columns, group, threads): y = x @ matrix.T; x, codes, scales and y are addresses."},
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
                           || PyModule_AddIntMacro(module, FLOAT32) || PyModule_AddIntMacro(module, AVX2)
                           || PyModule_AddIntMacro(module, AVX512));
    if (failed)
        Py_CLEAR(module);
    return module;
}
