/* Numbers in groups of 16, for the module flowrt.operators.kernels.cpu._rows: loaded from either dtype, computed in float32, rounded once when stored.
 *
 * The compiler maps `vec` to the registers of the processor: one of 512 bits, two of 256, or four of 128. `CLONES` compiles several forms
 * of a function; the form for the processor is chosen when the module is loaded. All forms take the same steps in the same order, and none
 * fuses a product with a sum (setup.py forbids it), so the bits are the same on every machine.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define FEW_NUMBERS (1 << 15) /* numbers; waking another thread costs as much as computing these */
#if defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

/* Of `body(dtype, ...)`, body_float32 and body_bfloat16, in all forms. */
#define IN_BOTH(body, parameters, ...) \
    static CLONES void body##_float32 parameters { body(FLOAT32, __VA_ARGS__); } \
    static CLONES void body##_bfloat16 parameters { body(BFLOAT16, __VA_ARGS__); }

/* `call` for the share of each of `threads`: from `first` to `end` of `count`. */
#define IN_THREADS(threads, count, call) \
    do { \
        const long threads_ = (threads), count_ = (count); \
        _Pragma("omp parallel for num_threads(threads_) schedule(static, 1) if (threads_ > 1)") \
        for (long thread = 0; thread < threads_; thread++) { \
            const long first = count_ * thread / threads_, end = count_ * (thread + 1) / threads_; \
            call; \
        } \
    } while (0)

enum { FLOAT32, BFLOAT16 }; /* of rows; a number of either is 4 >> dtype bytes */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int8_t chars __attribute__((vector_size(LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE vec widened(halves x) { return (vec)(__builtin_convertvector(x, bits) << 16); }

/* Rounds to the nearest, half to even; NaN stays NaN. */
INLINE halves narrowed(vec x)
{
    const bits raw = (bits)x, rounded = (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
    return __builtin_convertvector(((bits)(x != x) & 0x7fc0) | ((bits)(x == x) & rounded), halves);
}

/* Numbers i to i + 16 of a row of n; 0 for those past its end. Whole groups are copied apart: so that is one instruction. */
INLINE vec load(const int dtype, const char *row, long i, long n)
{
    if (dtype == FLOAT32) {
        vec x;
        if (n - i < LANES)
            memcpy(memset(&x, 0, sizeof x), row + i * 4, (n - i) * 4);
        else
            memcpy(&x, row + i * 4, sizeof x);
        return x;
    }
    halves x;
    if (n - i < LANES)
        memcpy(memset(&x, 0, sizeof x), row + i * 2, (n - i) * 2);
    else
        memcpy(&x, row + i * 2, sizeof x);
    return widened(x);
}

INLINE void store(const int dtype, char *row, long i, long n, vec x)
{
    const halves y = narrowed(x);
    const char *from = dtype == FLOAT32 ? (const char *)&x : (const char *)&y;
    const long bytes = 4 >> dtype;
    if (n - i < LANES)
        memcpy(row + i * bytes, from, (n - i) * bytes);
    else
        memcpy(row + i * bytes, from, LANES * (4 >> dtype));
}

/* A head in pages of INT8 is `width` numbers and behind them, aligned, their scale (int8_rows.py). */
INLINE long scale_at(long width) { return (width + 3) / 4 * 4; }

INLINE float scale_of(const char *head, long width)
{
    float scale;
    memcpy(&scale, head + scale_at(width), sizeof scale);
    return scale;
}

/* Numbers i to i + 16 of a row of n as INT8. */
INLINE vec load_int8(const char *row, long i, long n)
{
    chars x;
    if (n - i < LANES)
        memcpy(memset(&x, 0, sizeof x), row + i, n - i);
    else
        memcpy(&x, row + i, sizeof x);
    return __builtin_convertvector(x, vec);
}

/* The value after a store and a load in this dtype. */
INLINE vec rounded(const int dtype, vec x) { return dtype == FLOAT32 ? x : widened(narrowed(x)); }

INLINE vec chosen(ints where, vec x, vec y) { return (vec)((where & (ints)x) | (~where & (ints)y)); }

INLINE vec larger(vec x, vec y) { return chosen(x > y, x, y); }

#define FOLDED(x, with) \
    x = with(x, __builtin_shuffle(x, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7})); \
    x = with(x, __builtin_shuffle(x, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11})); \
    x = with(x, __builtin_shuffle(x, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13})); \
    x = with(x, __builtin_shuffle(x, (ints){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));

INLINE vec plus(vec x, vec y) { return x + y; }

INLINE float total(vec x)
{
    FOLDED(x, plus)
    return x[0];
}

INLINE float largest(vec x)
{
    FOLDED(x, larger)
    return x[0];
}

/* e to the x, for x <= 0, to within two units in the last place; 0 below -87.3; NaN stays NaN. */
INLINE vec exponential(vec x)
{
    const vec magic = (vec){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    const ints vanishes = x < -87.33654f;
    x = chosen(vanishes, (vec){0}, x);
    const vec shifted = x * 1.44269504f + magic, n = shifted - magic;
    const vec r = (x - n * 0.693115234375f) - n * 3.19461833e-5f; /* ln 2 in two parts, the first of 12 bits: its products are exact */
    vec y = r * 1.38145394e-3f + 8.36874545e-3f; /* (e^r - 1 - r) / r^2 where |r| <= ln 2 / 2; minimax, relative error 3e-9 of e^r */
    y = y * r + 4.16683890e-2f;
    y = y * r + 1.66665211e-1f;
    y = y * r + 4.99999940e-1f;
    y = y * (r * r) + r + 1.0f;
    const vec power = (vec)((bits)((ints)shifted - (ints)magic + 127) << 23);
    return chosen(vanishes, (vec){0}, y * power);
}

/* One read of an index that another process or thread may write meanwhile. Every function here reads an index once, checks what it read
   and uses that: an index read again may have changed since the check. */
INLINE int64_t read_once(const int64_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }

/* A private copy of `count` indices, each in [0, end); free() it. NULL with an exception set, which calls an index `name`. */
int64_t *checked_indices(const int64_t *from, long count, long end, const char *name);

/* What Python calls, each with numbers; see the table in _rows.c. */
int numbers(PyObject *const *arguments, Py_ssize_t given, long *n, int wanted);
PyObject *paged_attention(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *topk_softmax(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *partition_by_server(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *sort_by_expert(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *weighted_sum(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
