/* The basis of kernel.c and dropout.c: vectors of floats, e^x, random bits, products of small matrices. */

#include <math.h>
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
INLINE vf spread(float x) { return x - (vf){0}; }
INLINE vf keep(vf x, vi bits) { return (vf)((vi)x & bits); }
INLINE vf choose(vi bits, vf yes, vf no) { return (vf)(((vi)yes & bits) | ((vi)no & ~bits)); }
/* Elements of two vectors at these places: 0 to V - 1 are of a, V and more of b. */
#ifdef __clang__ /* it has no shuffle by a vector, and vectorises this */
INLINE vf shuffle(vf a, vf b, vi places) {
    vf v;
    for (int i = 0; i < V; i++) v[i] = places[i] < V ? a[places[i]] : b[places[i] - V];
    return v;
}
#else
INLINE vf shuffle(vf a, vf b, vi places) { return __builtin_shuffle(a, b, places); }
#endif
/* x with its halves, quarters and so on exchanged: lane i is that of i ^ distance. The distance is constant: shuffles by
   a variable, and loops over lanes, go by way of memory. */
INLINE vf exchanged(vf x, uint32_t distance) { return shuffle(x, x, (vi)(lanes ^ distance)); }
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

   A's elements are at A[row * rs + depth * cs]; rows of B and C are ldb and ldc apart, and whole vectors long. */

INLINE void product_tile(const int rows, const int vectors, int64_t depth, const float *A, int64_t rs, int64_t cs,
                         const float *B, int64_t ldb, float *C, int64_t ldc, int add) {
    vf acc[6][3];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) acc[i][j] = add ? load(C + i * ldc + j * V) : spread(0);
    for (int64_t d = 0; d < depth; d++, B += ldb) {
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

INLINE void product_columns(const int most_rows, const int vectors, int64_t rows, int64_t depth, const float *A,
                            int64_t rs, int64_t cs, const float *B, int64_t ldb, float *C, int64_t ldc, int add) {
    for (; rows >= most_rows; rows -= most_rows, A += most_rows * rs, C += most_rows * ldc)
        product_tile(most_rows, vectors, depth, A, rs, cs, B, ldb, C, ldc, add);
    switch (rows) { /* all that are left at once: a tile of one row takes as long as one of three */
    case 5: product_tile(5, vectors, depth, A, rs, cs, B, ldb, C, ldc, add); break;
    case 4: product_tile(4, vectors, depth, A, rs, cs, B, ldb, C, ldc, add); break;
    case 3: product_tile(3, vectors, depth, A, rs, cs, B, ldb, C, ldc, add); break;
    case 2: product_tile(2, vectors, depth, A, rs, cs, B, ldb, C, ldc, add); break;
    case 1: product_tile(1, vectors, depth, A, rs, cs, B, ldb, C, ldc, add);
    }
}

INLINE void product_of(int64_t rows, int64_t columns, int64_t depth, const float *A, int64_t rs, int64_t cs,
                       const float *B, int64_t ldb, float *C, int64_t ldc, int add) {
    for (int64_t s = 0, vectors; s < columns; s += vectors * V) {
        vectors = vectors_at(s, columns);
        if (vectors == 3) product_columns(4, 3, rows, depth, A, rs, cs, B + s, ldb, C + s, ldc, add);
        else if (vectors == 2) product_columns(6, 2, rows, depth, A, rs, cs, B + s, ldb, C + s, ldc, add);
        else product_columns(6, 1, rows, depth, A, rs, cs, B + s, ldb, C + s, ldc, add);
    }
}

/* C = A B. One stride of A is a constant here and in the next. */
static void product(int64_t rows, int64_t columns, int64_t depth, const float *A, int64_t lda, const float *B, int64_t ldb,
                    float *C, int64_t ldc) {
    product_of(rows, columns, depth, A, lda, 1, B, ldb, C, ldc, 0);
}

/* C += A^T B */
static void add_product(int64_t rows, int64_t columns, int64_t depth, const float *A, int64_t lda, const float *B,
                        int64_t ldb, float *C, int64_t ldc) {
    product_of(rows, columns, depth, A, 1, lda, B, ldb, C, ldc, 1);
}

/* Ask for the vector that is read a few vectors later: processors do not foresee it where they lie far apart. */
INLINE void foresee(const float *from, int64_t stride, int64_t floats) {
    for (int64_t d = 0; d < floats; d += 16) __builtin_prefetch(from + 6 * stride + d);
}

/* Copy `count` vectors of D floats, `stride` apart, side by side: count x Dp, zeros from D on. */
static void gather(const float *from, int64_t stride, int64_t count, int64_t D, int64_t Dp, float *to) {
    for (int64_t t = 0; t < count; t++, from += stride, to += Dp) {
        foresee(from, stride, D);
        for (int64_t d = 0; d < Dp; d += V) store(to + d, load_first(from + d, least(V, D - d)));
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
/* A square of V vectors, turned over its diagonal: a perfect shuffle of its rows for each power of two in V. */
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

/* The same, turned: D x ld, of which whole vectors of columns are written, zeros from `count` on. */
static void gather_turned(const float *from, int64_t stride, int64_t count, int64_t D, int64_t ld, float *to) {
    for (int64_t s = 0; s < count; s += V) {
        for (int64_t j = s; j < least(s + V, count); j++) foresee(from + j * stride, stride, D);
        for (int64_t d = 0; d < D; d += V) {
            vf x[V];
            int64_t floats = least(V, D - d);
            for (int j = 0; j < V; j++)
                x[j] = s + j < count ? load_first(from + (s + j) * stride + d, floats) : spread(0);
            transpose(x);
            for (int j = 0; j < floats; j++) store(to + (d + j) * ld + s, x[j]);
        }
    }
}

/* ---- a single query, for step-by-step decoding: keys and values are read where they lie ---- */

/* q k^T */
static void row_of_products(const float *q, const float *keys, int64_t stride, int64_t S, int64_t D, float *to) {
    for (int64_t s = 0; s < S; s++, keys += stride) {
        foresee(keys, stride, D);
        vf total = spread(0);
        for (int64_t d = 0; d < D; d += V) total += load_first(q + d, least(V, D - d)) * load_first(keys + d, least(V, D - d));
        to[s] = sum(total);
    }
}

/* P v, of up to four vectors of every value at a time */
static void row_of_context(const float *P, const float *values, int64_t stride, int64_t S, int64_t D, float *to) {
    for (int64_t d = 0; d < D; d += 4 * V) {
        vf total[4] = {0};
        int64_t floats = least(4 * V, D - d);
        for (int64_t s = 0; s < S; s++) {
            const float *from = values + s * stride + d;
            foresee(from, stride, floats);
            for (int j = 0; j < 4; j++)
                if (j * V < floats) total[j] += P[s] * load_first(from + j * V, least(V, floats - j * V));
        }
        for (int j = 0; j < 4; j++)
            if (j * V < floats) store_first(to + d + j * V, least(V, floats - j * V), total[j]);
    }
}
