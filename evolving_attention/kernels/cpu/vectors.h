/* What kernel.c and dropout.c are built of: vectors of floats, e^x, random bits, products of small matrices,
   memory of a thread. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

/* Floats in a vector: as many as the machine's own vectors hold. GCC splits longer ones by way of memory, which made
   products twenty times slower. */
#ifdef __AVX512F__
enum { V = 16 };
#else
enum { V = 8 };
#endif
typedef float vf __attribute__((vector_size(V * sizeof(float))));
typedef int32_t vi __attribute__((vector_size(V * sizeof(int32_t))));
typedef uint32_t vu __attribute__((vector_size(V * sizeof(uint32_t))));
typedef uint64_t vlong __attribute__((vector_size(V * sizeof(uint64_t))));
#ifdef __AVX512F__
static const vu lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const vu lanes = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) /* sums that would not stay in registers where there is more around them */

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vi loadi(const int32_t *p) { vi v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
/* The first `floats` of a vector, at most V, and zeros after them; nothing behind them is read or written. */
#ifdef __AVX512F__
INLINE vf load_first(const float *p, int64_t floats) { return _mm512_maskz_loadu_ps((__mmask16)((1u << floats) - 1), p); }
INLINE void store_first(float *p, int64_t floats, vf v) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << floats) - 1), v); }
#else
INLINE vf load_first(const float *p, int64_t floats) {
    vf v = {0};
    if (floats == V) return load(p);
    for (int i = 0; i < floats; i++) v[i] = p[i];
    return v;
}
INLINE void store_first(float *p, int64_t floats, vf v) {
    if (floats == V) store(p, v);
    else for (int i = 0; i < floats; i++) p[i] = v[i];
}
#endif
INLINE void copy(const float *from, int64_t floats, float *to) { /* few: a call would take as long */
    int64_t i = 0;
    for (; i + V <= floats; i += V) store(to + i, load(from + i));
    if (i < floats) store_first(to + i, floats - i, load_first(from + i, floats - i));
}
INLINE void add(const float *from, int64_t floats, float *to) {
    int64_t i = 0;
    for (; i + V <= floats; i += V) store(to + i, load(to + i) + load(from + i));
    if (i < floats) store_first(to + i, floats - i, load_first(to + i, floats - i) + load_first(from + i, floats - i));
}
INLINE vf spread(float x) { return x - (vf){0}; }
INLINE vf keep(vf x, vi bits) { return (vf)((vi)x & bits); }
INLINE vf choose(vi bits, vf yes, vf no) { return (vf)(((vi)yes & bits) | ((vi)no & ~bits)); }
/* x with its halves, quarters and so on exchanged: lane i is that of i ^ distance. */
#ifdef __clang__
INLINE vf exchanged(vf x, int distance) {
    vf v;
    for (int i = 0; i < V; i++) v[i] = x[i ^ distance];
    return v;
}
#else
INLINE vf exchanged(vf x, int distance) { return __builtin_shuffle(x, (vi)(lanes ^ (uint32_t)distance)); }
#endif
/* Each distance is a constant, for shuffles by a variable, and loops over lanes, go by way of memory. */
INLINE float sum(vf x) {
    if (V == 16) x += exchanged(x, 8);
    x += exchanged(x, 4);
    x += exchanged(x, 2);
    return x[0] + x[1];
}
INLINE vf larger(vf x, vf y) { return choose(x > y, x, y); }
INLINE float largest(vf x) {
    if (V == 16) x = larger(x, exchanged(x, 8));
    x = larger(x, exchanged(x, 4));
    x = larger(x, exchanged(x, 2));
    return x[0] > x[1] ? x[0] : x[1];
}
/* Have a vector in a register: GCC would load it anew for each of its uses, which takes longer than the products. */
INLINE void hold(vf *x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(*x));
#elif defined(__AVX__)
    __asm__("" : "+x"(*x));
#else
    (void)x;
#endif
}
INLINE int64_t whole(int64_t n) { return (n + V - 1) / V * V; } /* up to whole vectors */

/* How many vectors to work on at column s of a row that ends at `end`, a whole number of vectors: two, but first three
   where their number is odd. Three or two times four sums keep a processor busy, one does not. */
INLINE int vectors_at(int64_t s, int64_t end) {
    int64_t left = (end - s) / V;
    return left % 2 == 0 ? 2 : left == 1 ? 1 : 3;
}

/* e^x to float32's precision for x <= 0; 0 below -87. */
INLINE vf exponential(vf x) {
    vi tiny = x < -87.0f;
    vf y = choose(tiny, spread(0), x);
    vi n = __builtin_convertvector(y * 1.44269504f - 0.5f, vi);
    vf m = __builtin_convertvector(n, vf);
    vf r = y - m * 0.693359375f + m * 2.12194440e-4f; /* ln 2 in two parts */
    vf p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return keep(p * (vf)((n + 127) << 23), ~tiny);
}

/* Threads that have enough to do: waking one takes as long as about a million operations. */
static int worthwhile(double operations, int64_t tasks, int threads) {
    double useful = 1 + operations / 1e6;
    if (useful > tasks) useful = tasks;
    return useful < threads ? (int)useful : threads;
}

/* ---- random bits ---- */

/* One round of Philox 4x32 for a vector of counters (Salmon et al. 2011). */
INLINE void philox_round(vu x[4], uint32_t key0, uint32_t key1) {
    vlong first = __builtin_convertvector(x[0], vlong) * 0xD2511F53u;
    vlong second = __builtin_convertvector(x[2], vlong) * 0xCD9E8D57u;
    x[0] = __builtin_convertvector(second >> 32, vu) ^ x[1] ^ key0;
    x[1] = __builtin_convertvector(second & 0xFFFFFFFFu, vu);
    x[2] = __builtin_convertvector(first >> 32, vu) ^ x[3] ^ key1;
    x[3] = __builtin_convertvector(first & 0xFFFFFFFFu, vu);
}

/* Seven rounds are the fewest that pass every test of randomness (Salmon et al. 2011, table 2). */
INLINE void philox(vu x[4], uint64_t seed) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 7; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) philox_round(x, key0, key1);
}

/* Dropout's noise for eight vectors of numbers, 0 or what kept numbers are multiplied with: a function of the seed, of the
   place, three counters, and of V. A number is dropped where its 16 random bits are below the threshold. One draw of 4 x 32 bits
   for each of V lanes serves all eight. */
INLINE void draw_noise(uint64_t block, uint32_t h, uint32_t b, uint64_t seed, uint32_t threshold, vf noise[8]) {
    vf factor = spread(threshold < 65536 ? 65536.0f / (float)(65536 - threshold) : 0);
    vu x[4] = {(uint32_t)(block * V) + lanes, h + (vu){0}, b + (vu){0}, (uint32_t)(block * V >> 32) + (vu){0}};
    philox(x, seed);
    for (int i = 0; i < 8; i++) {
        vi bits16 = (vi)(i % 2 ? x[i / 2] >> 16 : x[i / 2] & 0xFFFF);
        noise[i] = keep(factor, bits16 >= (int32_t)threshold);
    }
}

/* ---- products of matrices: C = A B, or C += A B ----

   A is read element by element, at A[row * rs + depth * cs]. B is packed in panels of a few vectors of columns: the
   panel that begins at column s begins at B + s * depth, and its rows follow one another. */

INLINE void product_tile(const int rows, const int vectors, const int width, int64_t depth, const float *A, int64_t rs,
                         int64_t cs, const float *B, float *C, int64_t ldc, int add) {
    vf acc[6][3];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) acc[i][j] = add ? load(C + i * ldc + j * V) : spread(0);
    for (int64_t d = 0; d < depth; d++, B += width * V) {
        vf b[3];
        for (int j = 0; j < vectors; j++) {
            b[j] = load(B + j * V);
            hold(&b[j]);
        }
        for (int i = 0; i < rows; i++) {
            float a = A[i * rs + d * cs];
            for (int j = 0; j < vectors; j++) acc[i][j] += a * b[j];
        }
    }
    for (int i = 0; i < rows; i++) for (int j = 0; j < vectors; j++) store(C + i * ldc + j * V, acc[i][j]);
}

/* All rows by one panel, `width` vectors wide, of whose columns the first `vectors` are wanted. */
INLINE void product_panel(const int most_rows, const int vectors, const int width, int64_t rows, int64_t depth,
                          const float *A, int64_t rs, int64_t cs, const float *B, float *C, int64_t ldc, int add) {
    for (; rows >= most_rows; rows -= most_rows, A += most_rows * rs, C += most_rows * ldc)
        product_tile(most_rows, vectors, width, depth, A, rs, cs, B, C, ldc, add);
    switch (rows) { /* all that are left at once: a tile of one row takes as long as one of three */
    case 5: product_tile(5, vectors, width, depth, A, rs, cs, B, C, ldc, add); break;
    case 4: product_tile(4, vectors, width, depth, A, rs, cs, B, C, ldc, add); break;
    case 3: product_tile(3, vectors, width, depth, A, rs, cs, B, C, ldc, add); break;
    case 2: product_tile(2, vectors, width, depth, A, rs, cs, B, C, ldc, add); break;
    case 1: product_tile(1, vectors, width, depth, A, rs, cs, B, C, ldc, add);
    }
}

/* So many rows of B at a time, and of A where it has more, stay near the processor until all is done with them. */
enum { DEPTH_AT_ONCE = 256, ROWS_AT_ONCE = 96 };

/* Some rows of A by `depth` rows of B, after the `above` first. Inlined, for the stride of A that is 1 is a constant then. */
INLINE void product_block(int64_t rows, int64_t columns, int64_t end, int64_t above, int64_t depth, int64_t panel_depth,
                          const float *A, int64_t rs, int64_t cs, const float *B, float *C, int64_t ldc, int add) {
    for (int64_t s = 0, width; s < end; s += width * V) {
        width = vectors_at(s, columns);
        int vectors = (int)least(width, (end - s) / V);
        const float *panel = B + s * panel_depth + above * width * V;
        switch (4 * width + vectors) {
        case 4 * 3 + 3: product_panel(4, 3, 3, rows, depth, A, rs, cs, panel, C + s, ldc, add); break;
        case 4 * 3 + 2: product_panel(6, 2, 3, rows, depth, A, rs, cs, panel, C + s, ldc, add); break;
        case 4 * 3 + 1: product_panel(6, 1, 3, rows, depth, A, rs, cs, panel, C + s, ldc, add); break;
        case 4 * 2 + 2: product_panel(6, 2, 2, rows, depth, A, rs, cs, panel, C + s, ldc, add); break;
        case 4 * 2 + 1: product_panel(6, 1, 2, rows, depth, A, rs, cs, panel, C + s, ldc, add); break;
        default: product_panel(6, 1, 1, rows, depth, A, rs, cs, panel, C + s, ldc, add);
        }
    }
}

/* C = A B: its first `end` columns. A's rows are rs apart; B has `columns`, and the first `depth` of its `panel_depth` rows
   are wanted. */
static void product(int64_t rows, int64_t columns, int64_t end, int64_t depth, int64_t panel_depth, const float *A,
                    int64_t rs, const float *B, float *C, int64_t ldc) {
    for (int64_t i = 0; i < rows; i += ROWS_AT_ONCE)
        for (int64_t d = 0; d < depth; d += DEPTH_AT_ONCE)
            product_block(least(rows - i, ROWS_AT_ONCE), columns, end, d, least(depth - d, DEPTH_AT_ONCE), panel_depth,
                          A + i * rs + d, rs, 1, B, C + i * ldc, ldc, d > 0);
}

/* C += A^T B, for an A of a band's rows, cs apart. */
static void add_product(int64_t rows, int64_t columns, int64_t depth, const float *A, int64_t cs, const float *B, float *C,
                        int64_t ldc) {
    for (int64_t i = 0; i < rows; i += ROWS_AT_ONCE)
        product_block(least(rows - i, ROWS_AT_ONCE), columns, columns, 0, depth, depth, A + i, 1, cs, B, C + i * ldc, ldc, 1);
}

/* Ask for the vector that is packed a few vectors later: they may lie so far apart that processors do not foresee it, and
   that caches keep few of them. */
INLINE void foresee_vector(const float *from, int64_t stride, int64_t D) {
    for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(from + 6 * stride + d);
}

/* Pack count x D vectors, `stride` apart, as the matrix B that has them as its rows: count x Dp, zeros from D on. */
static void pack_rows(const float *from, int64_t stride, int64_t count, int64_t D, int64_t Dp, float *to) {
    for (int64_t t = 0; t < count; t++, from += stride) {
        foresee_vector(from, stride, D);
        for (int64_t d = 0, width; d < Dp; d += width) {
            width = vectors_at(d, Dp) * V;
            float *row = to + d * count + t * width;
            for (int64_t i = 0; i < width; i += V) {
                store(row + i, load_first(from + d + i, least(V, most(D - d - i, 0))));
            }
        }
    }
}

/* Elements of two vectors in turns: from their first halves, and from their second. */
#ifdef __AVX512F__
static const vi low_halves = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
static const vi high_halves = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#else
static const vi low_halves = {0, 8, 1, 9, 2, 10, 3, 11};
static const vi high_halves = {4, 12, 5, 13, 6, 14, 7, 15};
#endif
#ifdef __clang__ /* which has no shuffle by a vector, and vectorises this */
INLINE vf shuffle(vf a, vf b, vi places) {
    vf v;
    for (int i = 0; i < V; i++) v[i] = places[i] < V ? a[places[i]] : b[places[i] - V];
    return v;
}
#else
INLINE vf shuffle(vf a, vf b, vi places) { return __builtin_shuffle(a, b, places); }
#endif

/* A square of V vectors, turned over its diagonal: so many perfect shuffles of its rows as V has powers of two. */
INLINE void transpose(vf x[V]) {
    for (int round = 1; round < V; round *= 2) {
        vf y[V];
        for (int i = 0; i < V / 2; i++) {
            y[2 * i] = shuffle(x[i], x[i + V / 2], low_halves);
            y[2 * i + 1] = shuffle(x[i], x[i + V / 2], high_halves);
        }
        memcpy(x, y, sizeof y);
    }
}

/* Pack them as the matrix B that has them as its columns: D x Sp, zeros from `count` on. */
static void pack_columns(const float *from, int64_t stride, int64_t count, int64_t D, int64_t Sp, float *to) {
    for (int64_t s = 0, width; s < Sp; s += width, to += D * width) {
        width = vectors_at(s, Sp) * V;
        for (int64_t i = 0; i < width; i += V) {
            int64_t filled = most(0, least(V, count - s - i)), d = 0;
            const float *columns = from + (s + i) * stride;
            for (int64_t j = 0; j < filled; j++) foresee_vector(columns + j * stride, stride, D);
            for (; d < D; d += V) {
                vf x[V];
                int64_t numbers = least(V, D - d);
                for (int j = 0; j < V; j++) x[j] = j < filled ? load_first(columns + j * stride + d, numbers) : spread(0);
                transpose(x);
                for (int j = 0; j < numbers; j++) store(to + (d + j) * width + i, x[j]);
            }
        }
    }
}

/* ---- products of one row, for step-by-step decoding: packing would cost more than it gives ---- */

/* q k^T, keys where they lie */
static void row_of_products(const float *q, const float *keys, int64_t stride, int64_t S, int64_t D, float *to) {
    for (int64_t s = 0; s < S; s++, keys += stride) {
        foresee_vector(keys, stride, D);
        vf acc = spread(0);
        for (int64_t d = 0; d < D; d += V) acc += load_first(q + d, least(V, D - d)) * load_first(keys + d, least(V, D - d));
        to[s] = sum(acc);
    }
}

/* P v, likewise: whole vectors, which `to` has room for */
static void row_of_context(const float *P, const float *values, int64_t stride, int64_t S, int64_t D, float *to) {
    for (int64_t d = 0; d < D; d += V) {
        vf acc = spread(0);
        for (int64_t s = 0; s < S; s++) acc += P[s] * load_first(values + s * stride + d, least(V, D - d));
        store(to + d, acc);
    }
}

/* ---- memory that a thread keeps from call to call ----

   Memory that is given back after every call is mapped and cleared anew at the next, which took longer than all
   arithmetic. A thread's memory only grows, is given back when the thread ends, and not kept where it is much. */

typedef struct {
    char *memory;
    size_t bytes;
} Arena;

static __thread Arena arenas[2]; /* of what a thread has for itself, and of what it shares during a call */
static pthread_key_t arenas_key;
static pthread_once_t arenas_once = PTHREAD_ONCE_INIT;

static void give_back(void *of_thread) {
    Arena *all = of_thread;
    for (int i = 0; i < 2; i++) {
        free(all[i].memory);
        all[i] = (Arena){0};
    }
}

static void make_key(void) { pthread_key_create(&arenas_key, give_back); }

/* At least so many bytes, of any content; NULL where there are not so many. */
static char *take_arena(int which, size_t bytes) {
    Arena *arena = &arenas[which];
    if (arena->bytes >= bytes) return arena->memory;
    pthread_once(&arenas_once, make_key);
    pthread_setspecific(arenas_key, arenas); /* so that give_back is called when the thread ends */
    free(arena->memory);
    bytes = (bytes + 4095) / 4096 * 4096;
    arena->memory = aligned_alloc(64, bytes);
    arena->bytes = arena->memory ? bytes : 0;
    return arena->memory;
}

/* After a call: keep at most so many bytes. */
static void leave_arena(int which, size_t most_kept) {
    Arena *arena = &arenas[which];
    if (arena->bytes <= most_kept) return;
    free(arena->memory);
    *arena = (Arena){0};
}
