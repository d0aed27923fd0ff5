/* Copies rows between KV pages and packed memory, and hashes the copies: the module flowrt.operators.kernels.cpu._pages.
 *
 * The hash is XXH3 of 64 bits (seed 0), as the package xxhash computes it, of the bytes that are stored: so it shows what is at the
 * destination, also where another process can write into the source meanwhile. What is hashed is loaded once, and stored from the register.
 * Stores into pages pass the caches by: no step reads them before the whole prompt is there, and without these stores a line is read
 * before it is written. https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define STRIPE 64
#define STRIPES 16 /* of a block, after which the sums are scrambled */
#define MIN_HASHED 241 /* bytes: XXH3 hashes shorter inputs in other ways */

typedef uint64_t two __attribute__((vector_size(16))); /* every processor has these, and hashes as fast as memory is read */
#define TWOS (STRIPE / 16)

static const uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
static const uint64_t PRIME32_1 = 0x9e3779b1, PRIME32_2 = 0x85ebca77, PRIME32_3 = 0xc2b2ae3d;
static const uint64_t PRIME64_1 = 0x9e3779b185ebca87, PRIME64_2 = 0xc2b2ae3d27d4eb4f, PRIME64_3 = 0x165667b19e3779f9,
                      PRIME64_4 = 0x85ebca77c2b2ae63, PRIME64_5 = 0x27d4eb2f165667c5;

/* The hash of `total` bytes, of which the first have been added. `begun` holds the `held` bytes of an unfinished stripe, `last` the last
   STRIPE bytes of all. The last stripe, whole or not, is hashed once more at the end, so `left` stripes are hashed before. `coming` bytes
   have not been added. */
typedef struct {
    two acc[TWOS];
    unsigned char begun[STRIPE], last[STRIPE];
    long held, left, in_block, coming;
} Hash;

typedef enum { ONLY_HASH, STORE, STREAM } Copying; /* STREAM: past the caches, to addresses that are multiples of 16 */

INLINE two load_two(const void *at)
{
    two found;
    memcpy(&found, at, sizeof found);
    return found;
}

INLINE two low_times_high(two x)
{
#ifdef __SSE2__
    return (two)__builtin_ia32_pmuludq128((int __attribute__((vector_size(16))))x, (int __attribute__((vector_size(16))))(x >> 32));
#else
    return (x & 0xffffffff) * (x >> 32);
#endif
}

INLINE void store_two(unsigned char *to, two data, Copying how)
{
#ifdef __SSE2__
    if (how == STREAM) {
        __builtin_ia32_movntdq((long long __attribute__((vector_size(16))) *)to, (long long __attribute__((vector_size(16))))data);
        return;
    }
#endif
    if (how != ONLY_HASH)
        memcpy(to, &data, sizeof data);
}

INLINE void add_stripe(two *acc, const unsigned char *at, const char *secret, unsigned char *to, Copying how)
{
    for (int i = 0; i < TWOS; i++) {
        const two data = load_two(at + 16 * i);
        store_two(to + 16 * i, data, how);
        acc[i] += low_times_high(data ^ load_two(secret + 16 * i)) + __builtin_shuffle(data, (two){1, 0});
    }
}

INLINE void scramble(two *acc)
{
    for (int i = 0; i < TWOS; i++) {
        const two x = acc[i] ^ acc[i] >> 47 ^ load_two((const char *)SECRET + sizeof SECRET - STRIPE + 16 * i);
        acc[i] = x * PRIME32_1;
    }
}

/* `count` stripes before the last one. */
INLINE void add_stripes(Hash *hash, const unsigned char *at, long count, unsigned char *to, Copying how)
{
    two acc[TWOS];
    memcpy(acc, hash->acc, sizeof acc);
    hash->left -= count;
    while (count) {
        const long in_block = hash->in_block, some = count < STRIPES - in_block ? count : STRIPES - in_block;
        for (long i = 0; i < some; i++)
            add_stripe(acc, at + i * STRIPE, (const char *)SECRET + 8 * (in_block + i), to + i * STRIPE, how);
        hash->in_block = (in_block + some) % STRIPES;
        if (!hash->in_block)
            scramble(acc);
        at += some * STRIPE;
        to += some * STRIPE;
        count -= some;
    }
    memcpy(hash->acc, acc, sizeof acc);
}

/* Copies some bytes and adds them to the hash. */
static void move(Hash *hash, unsigned char *to, const unsigned char *from, long bytes, int to_pages)
{
    hash->coming -= bytes;
    unsigned char *const begin = to, *const end = to + bytes;
    if (hash->held) {
        const long more = bytes < STRIPE - hash->held ? bytes : STRIPE - hash->held;
        memcpy(to, from, more);
        memcpy(hash->begun + hash->held, to, more);
        to += more;
        from += more;
        hash->held += more;
        if (hash->held == STRIPE && hash->left) {
            add_stripes(hash, hash->begun, 1, NULL, ONLY_HASH);
            hash->held = 0;
        }
    }
    if (!hash->held) {
        const long fitting = (end - to) / STRIPE, whole = fitting < hash->left ? fitting : hash->left;
        if (to_pages && (uintptr_t)to % sizeof(two) == 0)
            add_stripes(hash, from, whole, to, STREAM);
        else
            add_stripes(hash, from, whole, to, STORE);
        to += whole * STRIPE;
        memcpy(to, from + whole * STRIPE, end - to);
        memcpy(hash->begun, to, hash->held = end - to);
    }
    if (hash->coming < STRIPE && bytes >= STRIPE)
        memcpy(hash->last, end - STRIPE, STRIPE);
    else if (hash->coming < STRIPE) {
        memmove(hash->last, hash->last + bytes, STRIPE - bytes);
        memcpy(hash->last + STRIPE - bytes, begin, bytes);
    }
}

INLINE uint64_t folded(uint64_t x, uint64_t y)
{
    const unsigned __int128 product = (unsigned __int128)x * y;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t end(Hash *hash, uint64_t total)
{
    uint64_t found = total * PRIME64_1, acc[8], secret[8];
    add_stripe(hash->acc, hash->last, (const char *)SECRET + sizeof SECRET - STRIPE - 7, NULL, ONLY_HASH);
    memcpy(acc, hash->acc, sizeof acc);
    memcpy(secret, (const char *)SECRET + 11, sizeof secret);
    for (int i = 0; i < 8; i += 2)
        found += folded(acc[i] ^ secret[i], acc[i + 1] ^ secret[i + 1]);
    found = (found ^ found >> 37) * 0x165667919e3779f9;
    return found ^ found >> 32;
}

/* The rows of one part: those in pages are `pitch` bytes apart, and rows in successive slots that fill it are moved at once. */
static void move_part(Hash *hash, int to_pages, const int64_t *slots, long rows, unsigned char *pages, long pitch, long row_bytes,
                      unsigned char *packed)
{
    for (long row = 0, count; row < rows; row += count) {
        for (count = 1; pitch == row_bytes && row + count < rows && slots[row + count] == slots[row] + count;)
            count++;
        unsigned char *at = pages + slots[row] * pitch, *other = packed + row * row_bytes;
        move(hash, to_pages ? at : other, to_pages ? other : at, count * row_bytes, to_pages);
    }
#ifdef __SSE2__
    __builtin_ia32_sfence(); /* streamed bytes are there before what tells others so */
#endif
}

static PyObject *move_slots(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    enum { OF_PART = 4, MAX_GIVEN = OF_PART * 3 };
    long n[MAX_GIVEN] = {0}, bytes = 0; /* to pages, slots, rows, number of slots; pages, pitch, row bytes and packed rows of one part or two */
    if (given < 2 * OF_PART || given > MAX_GIVEN || given % OF_PART)
        return PyErr_Format(PyExc_TypeError, "8 or 12 numbers are wanted");
    for (Py_ssize_t i = 0; i < given; i++)
        if ((n[i] = PyLong_AsLong(arguments[i])) == -1 && PyErr_Occurred())
            return NULL;
    const int64_t *slots = (int64_t *)n[1];
    const long rows = n[2];
    for (long row = 0; row < rows; row++)
        if (slots[row] < 0 || slots[row] >= n[3])
            return PyErr_Format(PyExc_IndexError, "slot %lld of %ld", (long long)slots[row], n[3]);
    for (Py_ssize_t at = OF_PART; at < given; at += OF_PART)
        bytes += rows * n[at + 2];
    if (bytes < MIN_HASHED)
        return PyErr_Format(PyExc_ValueError, "%ld bytes; at least %d are wanted", bytes, MIN_HASHED);
    Hash hash = {{{PRIME32_3, PRIME64_1}, {PRIME64_2, PRIME64_3}, {PRIME64_4, PRIME32_2}, {PRIME64_5, PRIME32_1}}, .left = (bytes - 1) / STRIPE, .coming = bytes};
    for (Py_ssize_t at = OF_PART; at < given; at += OF_PART) /* under the interpreter's lock: to get it back may take longer than all this */
        move_part(&hash, n[0], slots, rows, (unsigned char *)n[at], n[at + 1], n[at + 2], (unsigned char *)n[at + 3]);
    return PyLong_FromUnsignedLongLong(end(&hash, bytes));
}

static PyMethodDef methods[] = {
    {"move_slots", (PyCFunction)(void (*)(void))move_slots, METH_FASTCALL,
     "move_slots(to pages, slots, rows, number of slots, pages, pitch, row bytes, packed, ...): copies the rows of one part or two between slots"
     " and packed memory. Returns the xxh3_64 of the copies."},
    {NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "flowrt.operators.kernels.cpu._pages", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__pages(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntMacro(module, MIN_HASHED))
        Py_CLEAR(module);
    return module;
}
