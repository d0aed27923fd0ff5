/* Products of rows with a matrix that is held in panels, where a row's bits depend on that row alone.
 *
 * `kinds` lists the product kinds that this processor supports; `products` computes with one. products.py lays matrices out, chooses this
 * form, checks the arguments and calls `products` with addresses.
 *
 * A row of either dtype is a sequence of columns of 32 bits: one float32, or two bfloat16. A panel is 16 outputs of the matrix, column
 * by column: 64 bytes a column, one register. Decoding has few rows, so the matrix is read once, in memory order, and used for
 * all rows. Sums run over the columns in one order, with one accumulator for each row and
 * output, independent of the number of rows, their place and the number of threads. No library guarantees this, and strict numerics
 * need it. In a tile product (AMX, for bfloat16) the processor defines the order, which does not depend on the other rows of the tile.
 * The library computes bfloat16 without tiles.
 */
#include "_segments.h"

#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16_TILES, NUM_KINDS };

typedef struct {
    const char *x; /* whole rows for tiles, else interleaved */
    const char *panels;
    char *y; /* rows at `y_pitch` bytes */
    long rows, columns, y_pitch;
} Work;

typedef struct {
    long columns, y_pitch;
    int kind;
} Shape;

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FLOAT32_TARGET __attribute__((target("avx512f")))
#define TILES_TARGET __attribute__((target("avx512f,avx512bf16,amx-tile,amx-bf16")))
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 24")

#define COLUMN_BYTES 64             /* of a panel */
#define MAX_ROWS 12                 /* of a block: with two panels, 24 accumulators of 32 registers */
#define SPAN 256                    /* columns that are added up by themselves: a sum of a thousand terms, one by one, loses digits */
#define TILE_ROWS 16
#define TILE_COLUMNS 16
#define AHEAD 2048                  /* bytes of a panel that are prefetched */
#define ROWS_OF_ALL 96              /* whole blocks of every kind */
#define CHUNK_BYTES (8 << 20)       /* of rows that are taken together, and read once per pair of panels */
#define TILES_CHUNK_BYTES (1 << 20) /* tiles read them so fast that they must be in the second-level cache */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* `rows` rows with `panels` panels; both known when this is compiled, so that all sums are in registers. This is block `number` of
   `blocks` that go down these panels. A single one asks memory for what it needs soon; of several, each asks for its part of the panels
   that come next, because these are there when the second begins. */
INLINE FLOAT32_TARGET void block(const int rows, const int panels, const Work *work, long row, long panel, long number, long blocks)
{
    const long stride = work->columns * COLUMN_BYTES, step = COLUMN_BYTES / blocks;
    const char *w = work->panels + panel * stride, *x = work->x + row * work->columns * 4;
    const char *ahead = blocks == 1 ? w + AHEAD : w + panels * stride + number * (stride / blocks);
    __m512 totals[2 * MAX_ROWS], sums[2 * MAX_ROWS], column[8];
    UNROLLED for (int i = 0; i < rows * panels; i++) totals[i] = _mm512_setzero_ps();
    for (long first = 0; first < work->columns; first += SPAN) {
        const long end = first + SPAN < work->columns ? first + SPAN : work->columns;
        UNROLLED for (int i = 0; i < rows * panels; i++) sums[i] = _mm512_setzero_ps();
        for (long k = first; k < end; k++) {
            UNROLLED for (int p = 0; p < panels; p++) {
                _mm_prefetch(ahead + p * stride + k * step, _MM_HINT_T0);
                column[p] = _mm512_loadu_ps(w + p * stride + k * COLUMN_BYTES);
            }
            UNROLLED for (int r = 0; r < rows; r++) {
                float value;
                memcpy(&value, x + (k * rows + r) * 4, 4);
                UNROLLED for (int p = 0; p < panels; p++)
                    sums[r * panels + p] = _mm512_fmadd_ps(_mm512_set1_ps(value), column[p], sums[r * panels + p]);
            }
        }
        UNROLLED for (int i = 0; i < rows * panels; i++) totals[i] = _mm512_add_ps(totals[i], sums[i]);
    }
    char *y = work->y + row * work->y_pitch + panel * PANEL * 4;
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int p = 0; p < panels; p++)
            _mm512_storeu_ps(y + r * work->y_pitch + p * PANEL * 4, totals[r * panels + p]);
}

/* Number of rows of the block that begins at `row`; blocks are as even as possible. */
static long block_rows(long row, long rows)
{
    const long left = rows - row, blocks = (left + MAX_ROWS - 1) / MAX_ROWS;
    return (left + blocks - 1) / blocks;
}

/* Rows in the order in which a block reads them: column by column. */
static void interleave(char *to, const char *from, long num_rows, long columns)
{
    for (long row = 0, rows; row < num_rows; row += rows) {
        rows = block_rows(row, num_rows);
        for (long first = 0; first < columns; first += 16) /* a line of each row */
            for (long r = 0; r < rows; r++)
                for (long k = first; k < first + 16; k++)
                    memcpy(to + (row * columns + k * rows + r) * 4, from + ((row + r) * columns + k) * 4, 4);
    }
}

/* All rows, with `panels` panels. */
INLINE FLOAT32_TARGET void all_rows(const int panels, const Work *work, long panel)
{
    const long blocks = (work->rows + MAX_ROWS - 1) / MAX_ROWS;
    for (long row = 0, number = 0, rows; row < work->rows; row += rows, number++) {
        rows = block_rows(row, work->rows);
        switch (rows) {
#define ROWS(count) \
    case count: \
        block(count, panels, work, row, panel, number, blocks); \
        break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
        }
    }
}

/* One to three rows take more panels at once: an addition has to wait for the one before, so eight sums and more must be under way. */
static FLOAT32_TARGET void some_panels_float32(const Work *work, long panel, long end)
{
    if (work->rows == 1)
        for (; panel + 8 <= end; panel += 8)
            block(1, 8, work, 0, panel, 0, 1);
    if (work->rows == 2)
        for (; panel + 4 <= end; panel += 4)
            block(2, 4, work, 0, panel, 0, 1);
    if (work->rows == 3)
        for (; panel + 4 <= end; panel += 4)
            block(3, 4, work, 0, panel, 0, 1);
    for (; panel + 2 <= end; panel += 2)
        all_rows(2, work, panel);
    if (panel < end)
        all_rows(1, work, panel);
}

/* Tiles 0 to 3 are sums, the others rows and panels. A tile of `rows` rows costs that many cycles, so tiles are no higher than needed. */
static TILES_TARGET void configure(long sums_0_1, long sums_2_3, long tile_4, long tile_5)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    const long rows[8] = {sums_0_1, sums_0_1, sums_2_3, sums_2_3, tile_4, tile_5, TILE_COLUMNS, TILE_COLUMNS};
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = COLUMN_BYTES;
        tiles.rows[i] = (uint8_t)rows[i];
    }
    /* Older compilers take the next line to read 8 bytes of the 64, and may leave the others unwritten. */
    __asm__ volatile("" : : "r"(&tiles) : "memory");
    _tile_loadconfig(&tiles);
}

INLINE TILES_TARGET void ask_for(const char *tile)
{
    UNROLLED for (int i = 0; i < TILE_COLUMNS; i++) _mm_prefetch(tile + AHEAD + i * COLUMN_BYTES, _MM_HINT_T0);
}

INLINE TILES_TARGET void zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* From a tile's sums to `rows` rows of y, rounded once. */
#define PUT_TILE(tile, work, row, num_rows, panel) \
    do { \
        float sums_[TILE_ROWS][PANEL] __attribute__((aligned(64))); \
        _tile_stored(tile, sums_, sizeof sums_[0]); \
        for (long r_ = 0; r_ < (num_rows); r_++) { \
            const __m256bh rounded_ = _mm512_cvtneps_pbh(_mm512_load_ps(sums_[r_])); \
            memcpy((work)->y + ((row) + r_) * (work)->y_pitch + (panel) * PANEL * 2, &rounded_, sizeof rounded_); \
        } \
    } while (0)

/* At most 16 rows with one panel or four. */
INLINE TILES_TARGET void low_tiles(const int panels, const Work *work, long row, long rows, long panel)
{
    const long stride = work->columns * COLUMN_BYTES, pitch = work->columns * 4;
    const char *w = work->panels + panel * stride, *x = work->x + row * pitch;
    zero_sums();
    for (long k = 0; k < work->columns; k += TILE_COLUMNS, w += TILE_COLUMNS * COLUMN_BYTES) {
        _tile_loadd(4, x + k * 4, pitch);
        ask_for(w);
        _tile_loadd(6, w, COLUMN_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (panels == 4) {
            ask_for(w + stride);
            _tile_loadd(7, w + stride, COLUMN_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            ask_for(w + 2 * stride);
            _tile_loadd(6, w + 2 * stride, COLUMN_BYTES);
            _tile_dpbf16ps(2, 4, 6);
            ask_for(w + 3 * stride);
            _tile_loadd(7, w + 3 * stride, COLUMN_BYTES);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    PUT_TILE(0, work, row, rows, panel);
    if (panels == 4) {
        PUT_TILE(1, work, row, rows, panel + 1);
        PUT_TILE(2, work, row, rows, panel + 2);
        PUT_TILE(3, work, row, rows, panel + 3);
    }
}

/* 16 rows and `rows` more, at most 16, with two panels. */
INLINE TILES_TARGET void high_tiles(const Work *work, long row, long rows, long panel)
{
    const long stride = work->columns * COLUMN_BYTES, pitch = work->columns * 4;
    const char *w = work->panels + panel * stride, *x = work->x + row * pitch;
    zero_sums();
    for (long k = 0; k < work->columns; k += TILE_COLUMNS, w += TILE_COLUMNS * COLUMN_BYTES) {
        _tile_loadd(4, x + k * 4, pitch);
        _tile_loadd(5, x + k * 4 + TILE_ROWS * pitch, pitch);
        ask_for(w);
        _tile_loadd(6, w, COLUMN_BYTES);
        ask_for(w + stride);
        _tile_loadd(7, w + stride, COLUMN_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    PUT_TILE(0, work, row, TILE_ROWS, panel);
    PUT_TILE(1, work, row, TILE_ROWS, panel + 1);
    PUT_TILE(2, work, row + TILE_ROWS, rows, panel);
    PUT_TILE(3, work, row + TILE_ROWS, rows, panel + 1);
}

static TILES_TARGET void some_panels_tiles(const Work *work, long first, long end)
{
    const long high = work->rows / (2 * TILE_ROWS) * 2 * TILE_ROWS, rest = work->rows - high;
    const long paired = first + (end - first) / 2 * 2;
    if (high) {
        configure(TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS);
        for (long panel = first; panel < paired; panel += 2)
            for (long row = 0; row < high; row += 2 * TILE_ROWS)
                high_tiles(work, row, TILE_ROWS, panel);
        for (long panel = paired; panel < end; panel++)
            for (long row = 0; row < high; row += TILE_ROWS)
                low_tiles(1, work, row, TILE_ROWS, panel);
    }
    if (rest > TILE_ROWS) {
        configure(TILE_ROWS, rest - TILE_ROWS, TILE_ROWS, rest - TILE_ROWS);
        for (long panel = first; panel < paired; panel += 2)
            high_tiles(work, high, rest - TILE_ROWS, panel);
        for (long panel = paired; panel < end; panel++) {
            configure(TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS);
            low_tiles(1, work, high, TILE_ROWS, panel);
            configure(rest - TILE_ROWS, rest - TILE_ROWS, rest - TILE_ROWS, rest - TILE_ROWS);
            low_tiles(1, work, high + TILE_ROWS, rest - TILE_ROWS, panel);
        }
    } else if (rest) {
        long panel = first;
        configure(rest, rest, rest, rest);
        for (; panel + 4 <= end; panel += 4)
            low_tiles(4, work, high, rest, panel);
        for (; panel < end; panel++)
            low_tiles(1, work, high, rest, panel);
    }
    _tile_release();
}

static void some_panels(const void *work, const Segment *segment, long first, long end)
{
    const Shape *shape = work;
    const Work own = {
        .x = segment->x, .panels = segment->matrix, .y = segment->y, .rows = segment->rows, .columns = shape->columns, .y_pitch = shape->y_pitch,
    };
    (shape->kind == FLOAT32 ? some_panels_float32 : some_panels_tiles)(&own, first, end);
}

static long max_rows(const Shape *shape)
{
    const long bytes = shape->kind == FLOAT32 ? CHUNK_BYTES : TILES_CHUNK_BYTES, whole = bytes / (shape->columns * 4) / ROWS_OF_ALL;
    return (whole ? whole : 1) * ROWS_OF_ALL;
}

/* Returns 0, or -1 if there is no memory for the reordered rows. */
static int multiply(const Shape *shape, Segment *segments, long count, long panels, long threads)
{
    const long row_bytes = shape->columns * 4, matrix_bytes = panels * shape->columns * COLUMN_BYTES;
    if (shape->kind != FLOAT32) {
        multiply_segments(shape, segments, count, panels, matrix_bytes, threads);
        return 0;
    }
    const long room = 2 * max_rows(shape); /* rows that are reordered at a time; single ones need no order */
    for (long first = 0, end; first < count; first = end) {
        long rows = 0;
        for (end = first; end < count && (segments[end].rows == 1 || rows + segments[end].rows <= room); end++)
            rows += segments[end].rows > 1 ? segments[end].rows : 0;
        char *placed = rows ? malloc(rows * row_bytes) : NULL, *to = placed;
        if (rows && !placed)
            return -1;
        for (long i = first; i < end; i++)
            if (segments[i].rows > 1) {
                interleave(to, segments[i].x, segments[i].rows, shape->columns);
                segments[i].x = to;
                to += segments[i].rows * row_bytes;
            }
        multiply_segments(shape, segments + first, end - first, panels, matrix_bytes, threads);
        free(placed);
    }
    return 0;
}

/* Linux lets a process use tiles after a request; its threads and forked processes inherit the permission. */
static int has_tiles(void)
{
    unsigned a, b, c, d;
    const unsigned both = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE */
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) /* AVX512_BF16, which rounds */
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & both) == both
           && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

static int has(int kind) { return __builtin_cpu_supports("avx512f") && (kind == FLOAT32 || has_tiles()); }

#else

static void some_panels(const void *work, const Segment *segment, long first, long end) {}

static long max_rows(const Shape *shape) { return 1; }

static int multiply(const Shape *shape, Segment *segments, long count, long panels, long threads)
{
    return -1;
}

static int has(int kind) { return 0; }

#endif

static int found_kinds[NUM_KINDS]; /* kinds that `kinds` has found; others would run illegal instructions */

static PyObject *kinds(PyObject *module, PyObject *unused)
{
    PyObject *found = PyList_New(0);
    for (int kind = 0; found && kind < NUM_KINDS; kind++) {
        PyObject *number = (found_kinds[kind] = has(kind)) ? PyLong_FromLong(kind) : NULL;
        if (number && PyList_Append(found, number))
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

static PyObject *products(PyObject *module, PyObject *const *arguments, Py_ssize_t number)
{
    enum { KIND, X, Y, ROWS, OUTPUTS, COLUMNS, THREADS, NUMBER };
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
    const int known = n[KIND] >= 0 && n[KIND] < NUM_KINDS && found_kinds[n[KIND]];
    const int sized = n[OUTPUTS] >= 0 && n[OUTPUTS] % PANEL == 0 && n[COLUMNS] >= 1 && n[COLUMNS] % 16 == 0;
    if (!known || !sized || n[THREADS] < 1 || n[THREADS] > MAX_THREADS) {
        PyErr_SetString(PyExc_ValueError, "unknown kind or number of threads, or outputs or columns that are not multiples of 16");
        return NULL;
    }
    const Shape shape = {.columns = n[COLUMNS], .y_pitch = n[OUTPUTS] * (n[KIND] == FLOAT32 ? 4 : 2), .kind = (int)n[KIND]};
    Segment *segments = read_segments(arguments[NUMBER], arguments[NUMBER + 1], n[ROWS], n[X], n[COLUMNS] * 4, n[Y], shape.y_pitch, max_rows(&shape), &count);
    if (!segments)
        return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = multiply(&shape, segments, count, n[OUTPUTS] / PANEL, n[THREADS]);
    Py_END_ALLOW_THREADS
    free(segments);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"kinds", kinds, METH_NOARGS, "The kinds that this processor can do: FLOAT32, BFLOAT16_TILES."},
    {"products", (PyCFunction)(void (*)(void))products, METH_FASTCALL,
     "products(kind, x, y, rows, outputs, columns, threads, matrices, counts): y = x @ matrix.T of the rows of each matrix; x, y and matrices are"
     " addresses."},
    {NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "flowrt.operators.kernels.cpu._panels", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__panels(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddIntMacro(module, FLOAT32) || PyModule_AddIntMacro(module, BFLOAT16_TILES)))
        Py_CLEAR(module);
    return module;
}
