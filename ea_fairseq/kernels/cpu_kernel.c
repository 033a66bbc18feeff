/* Evolving attention on the CPU, float32: from queries, keys and values to the context, and all gradients.

       logits  = given, or scale * q k^T
       mixed   = a * previous + b * logits                  zero where hidden; what the convolution reads
       carried = d * previous + e * logits
       A_logit = c * ReLU(Conv(mixed)) + (1 - c) * carried
       context = dropout(softmax(mask(A_logit))) v

   One sentence at a time stays in the cache: its K maps are a few tens of kilobytes at translation's lengths, while a
   batch's are megabytes, and passes over those, not arithmetic, are what the plain composition spends its time on.
   Nothing of a map is kept for the backward pass, which computes them again. evolution.py has the mathematics; cpu.py
   calls this, and has its oracle's test in tests/test_cpu.py.

   Axes: B batch, K heads, T target (query) length, S source (key) length, D head dimension; k kernel size.
   Rows of maps are padded with zeros to whole vectors; maps that are convolved also have the zeros around them. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Floats in a vector: as many as the machine's own vectors hold. GCC splits longer ones by way of memory, which made
   products twenty times slower. */
#ifdef __AVX512F__
enum { V = 16 };
#else
enum { V = 8 };
#endif
typedef float vf __attribute__((vector_size(V * sizeof(float))));
typedef float vhalf __attribute__((vector_size(V / 2 * sizeof(float))));
typedef int32_t vi __attribute__((vector_size(V * sizeof(int32_t))));
typedef uint32_t vu __attribute__((vector_size(V * sizeof(uint32_t))));
typedef uint64_t vlong __attribute__((vector_size(V * sizeof(uint64_t))));
#ifdef __AVX512F__
static const vu lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const vu lanes = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

#define INLINE static inline __attribute__((always_inline))

/* Strides are in elements. A head's vectors are contiguous: element d of token t is at b * sb + h * sh + t * st + d. */
typedef struct {
    float *data;
    int64_t sb, sh, st;
} Vectors;

/* Bytes, 0 or 1, broadcast over the heads: strides may be 0; data may be NULL, then nothing is masked. */
typedef struct {
    const uint8_t *data;
    int64_t sb, st, ss;
} Mask;

/* What a call works on; arrays of maps are B x K x T x S, contiguous, and NULL where there are none. */
typedef struct {
    int64_t B, K, T, S, D, k;
    int64_t before;              /* columns of the rows above */
    int64_t left, top;           /* how far the kernel reaches to the left and up */
    int64_t lower;               /* 1: without the kernel's strict upper triangle */
    int64_t same;                /* 1: what is carried is what is mixed, zeros at hidden places included */
    float scale;                 /* of q k^T */
    float a, b, c, d, e;         /* the shares above; a and d are 0 where there is no previous map */
    uint32_t threshold;          /* dropout: a weight is dropped where its 16 random bits are below this */
    float kept_share;            /* dropout: what the weights that are kept are divided by */
    uint64_t seed;               /* of dropout's random bits */
    Vectors q, key, v;           /* q and key are not read where logits are given */
    Mask hidden, masked;         /* from the convolution; from attention */
    const float *previous;       /* A_logit of the layer before */
    const float *above;          /* B x K x top x before, mixed of the rows before these; NULL: zeros */
    const float *kernel, *bias;  /* K x K x k x k, K; NULL: no convolution, and A_logit is what is carried */
    const float *given;          /* logits, or NULL */
    /* results of the forward pass */
    Vectors context;
    float *a_logit, *weights;    /* weights: before dropout */
    float *kept;                 /* B x K x top x S, mixed of the last rows: what is above the next step's */
    /* of the backward pass: gradients that come in, gradients that go out */
    Vectors d_context;           /* data may be NULL */
    const float *d_a_logit, *d_weights;
    Vectors d_q, d_key, d_v;     /* data of the first two may be NULL: not wanted */
    float *d_previous, *d_given; /* NULL: not wanted */
    float *d_kernel, *d_bias;    /* B x (K x K x k x k), B x K: a part for each sentence, summed by the caller */
    double *d_shares;            /* B x 5, of a, b, c, d, e, likewise; NULL: not wanted */
} Problem;

/* A sentence's maps. X: what is mixed, with zeros around; G: gradient of the convolution's result, with zeros around. */
typedef struct {
    int64_t Sp, Dp;        /* S and D, rounded up to whole vectors */
    int64_t wide, tall;    /* of X and G */
    float *X, *G;          /* K x tall x wide */
    float *P, *R;          /* K x T x Sp: what is carried, then A_logit, then the weights; the ReLU's result */
    float *L;              /* K x T x Sp: the logits, where shares want gradients */
    float *noise;          /* T x Sp: one head's dropout, 0 or what kept weights are multiplied with */
    float *rows;           /* max(T, S) x Dp: one head's vectors */
    float *transposed;     /* D x Sp: one head's keys or values */
    float *out;            /* max(T, S) x Dp, a product */
    float *dmap;           /* K x T x Sp */
    int32_t *seen, *shown; /* T x Sp: all bits where attention, where the convolution may see */
    int32_t *inside;       /* Sp: all bits in the S columns that there are */
    float *taps, *turned;  /* the kernel in the order of the loops, and turned round for the backward pass */
} Scratch;

INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vi loadi(const int32_t *p) { vi v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf spread(float x) { return x - (vf){0}; }
INLINE vf keep(vf x, vi bits) { return (vf)((vi)x & bits); }
INLINE vf choose(vi bits, vf yes, vf no) { return (vf)(((vi)yes & bits) | ((vi)no & ~bits)); }
INLINE vhalf load_half(const float *p) { vhalf v; memcpy(&v, p, sizeof v); return v; }
INLINE vhalf halves(vf x) {
    vhalf two[2];
    memcpy(two, &x, sizeof two);
    return two[0] + two[1];
}
INLINE float sum_half(vhalf x) {
    float total = 0;
    for (int i = 0; i < V / 2; i++) total += x[i];
    return total;
}
INLINE float sum(vf x) { return sum_half(halves(x)); }
INLINE int64_t whole(int64_t n) { return (n + V - 1) / V * V; }

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

/* ---- small matrix products: C = A B, A read element by element, B and C rows of whole vectors ---- */

INLINE void product_block(const int rows, const int vectors, int64_t depth, const float *A, int64_t rs, int64_t cs,
                          const float *B, int64_t ldb, float *C, int64_t ldc) {
    vf acc[4][2];
    for (int i = 0; i < rows; i++) for (int j = 0; j < vectors; j++) acc[i][j] = spread(0);
    for (int64_t d = 0; d < depth; d++) {
        vf b[2];
        for (int j = 0; j < vectors; j++) b[j] = load(B + d * ldb + j * V);
        for (int i = 0; i < rows; i++) {
            float a = A[i * rs + d * cs];
            for (int j = 0; j < vectors; j++) acc[i][j] += a * b[j];
        }
    }
    for (int i = 0; i < rows; i++) for (int j = 0; j < vectors; j++) store(C + i * ldc + j * V, acc[i][j]);
}

static void product(int64_t rows, int64_t columns, int64_t depth, const float *A, int64_t rs, int64_t cs,
                    const float *B, int64_t ldb, float *C, int64_t ldc) {
    for (int64_t j = 0; j < columns; j += 2 * V) {
        int64_t i = 0;
        if (columns - j > V) {
            for (; i + 4 <= rows; i += 4)
                product_block(4, 2, depth, A + i * rs, rs, cs, B + j, ldb, C + i * ldc + j, ldc);
            for (; i < rows; i++) product_block(1, 2, depth, A + i * rs, rs, cs, B + j, ldb, C + i * ldc + j, ldc);
        } else {
            for (; i + 4 <= rows; i += 4)
                product_block(4, 1, depth, A + i * rs, rs, cs, B + j, ldb, C + i * ldc + j, ldc);
            for (; i < rows; i++) product_block(1, 1, depth, A + i * rs, rs, cs, B + j, ldb, C + i * ldc + j, ldc);
        }
    }
}

/* One row of q k^T, for step-by-step decoding: turning the keys, for so few rows, would cost more than it gives. */
static void row_of_products(const float *q, const float *keys, int64_t stride, int64_t S, int64_t D, float *to) {
    for (int64_t s = 0; s < S; s++, keys += stride) {
        vf acc = spread(0);
        int64_t d = 0;
        for (; d + V <= D; d += V) acc += load(q + d) * load(keys + d);
        vhalf rest = halves(acc);
        if (d + V / 2 <= D) {
            rest += load_half(q + d) * load_half(keys + d);
            d += V / 2;
        }
        float x = sum_half(rest);
        for (; d < D; d++) x += q[d] * keys[d];
        to[s] = x;
    }
}

/* One row of P v, likewise from where the values lie. */
static void row_of_context(const float *P, const float *values, int64_t stride, int64_t S, int64_t D, float *to) {
    int64_t d = 0;
    for (; d + V <= D; d += V) {
        vf acc = spread(0);
        for (int64_t s = 0; s < S; s++) acc += P[s] * load(values + s * stride + d);
        store(to + d, acc);
    }
    if (d + V / 2 <= D) {
        vhalf acc = (vhalf){0};
        for (int64_t s = 0; s < S; s++) acc += P[s] * load_half(values + s * stride + d);
        memcpy(to + d, &acc, sizeof acc);
        d += V / 2;
    }
    for (; d < D; d++) {
        float x = 0;
        for (int64_t s = 0; s < S; s++) x += P[s] * values[s * stride + d];
        to[d] = x;
    }
}

/* One head's vectors of one sentence, count x Dp; the last vector's surplus is zero. */
static void gather(const Vectors *x, int64_t b, int64_t h, int64_t count, int64_t D, int64_t Dp, float *to) {
    for (int64_t t = 0; t < count; t++) {
        memcpy(to + t * Dp, x->data + b * x->sb + h * x->sh + t * x->st, D * sizeof(float));
        memset(to + t * Dp + D, 0, (Dp - D) * sizeof(float));
    }
}

static void scatter(const float *from, int64_t Dp, const Vectors *x, int64_t b, int64_t h, int64_t count, int64_t D) {
    for (int64_t t = 0; t < count; t++)
        memcpy(x->data + b * x->sb + h * x->sh + t * x->st, from + t * Dp, D * sizeof(float));
}

/* One head's vectors of one sentence, turned: D x Sp; the surplus is zero. */
static void turn(const Vectors *x, int64_t b, int64_t h, int64_t count, int64_t D, int64_t Sp, float *to) {
    const float *from = x->data + b * x->sb + h * x->sh;
    int64_t s = 0;
    for (; s + 8 <= count; s += 8) /* a few columns at a time: what is read and written stays in the cache */
        for (int64_t d = 0; d < D; d++) {
            float eight[8];
            for (int i = 0; i < 8; i++) eight[i] = from[(s + i) * x->st + d];
            memcpy(to + d * Sp + s, eight, sizeof eight);
        }
    for (int64_t d = 0; d < D; d++)
        for (int64_t i = s; i < Sp; i++) to[d * Sp + i] = i < count ? from[i * x->st + d] : 0;
}

/* All bits where a mask is not set; none past the end of a row. */
static void bits(const Mask *mask, int64_t b, int64_t T, int64_t S, int64_t Sp, int32_t *to) {
    for (int64_t t = 0; t < T; t++) {
        int32_t *out = to + t * Sp;
        if (!mask->data) {
            for (int64_t s = 0; s < S; s++) out[s] = -1;
        } else {
            const uint8_t *row = mask->data + b * mask->sb + t * mask->st;
            if (mask->ss == 1) for (int64_t s = 0; s < S; s++) out[s] = (int32_t)row[s] - 1;
            else for (int64_t s = 0; s < S; s++) out[s] = (int32_t)row[s * mask->ss] - 1;
        }
        for (int64_t s = S; s < Sp; s++) out[s] = 0;
    }
}

/* Vector s of row r of an array of maps, which is not padded; zeros past the row's end. */
INLINE vf row_load(const Problem *p, const Scratch *m, const float *maps, int64_t r, int64_t s) {
    const float *from = maps + r * p->S + s;
    if (from + V <= maps + p->B * p->K * p->T * p->S) return keep(load(from), loadi(m->inside + s));
    vf v = spread(0); /* the end of the array */
    memcpy(&v, from, (p->S - s < V ? p->S - s : V) * sizeof(float));
    return v;
}

/* A vector to column s of a row that is not padded. */
INLINE void store_row(const Problem *p, float *row, int64_t s, vf x) {
    if (s + V <= p->S) store(row + s, x);
    else if (s < p->S) memcpy(row + s, &x, (p->S - s) * sizeof(float));
}

/* ---- the parts of the forward pass, on one sentence ---- */

/* The logits of head h, T x Sp. */
static void logits_of(const Problem *p, int64_t b, int64_t h, Scratch *m, float *to) {
    if (p->given) {
        for (int64_t t = 0; t < p->T; t++)
            for (int64_t s = 0; s < m->Sp; s += V)
                store(to + t * m->Sp + s, row_load(p, m, p->given, (b * p->K + h) * p->T + t, s));
        return;
    }
    const float *q = p->q.data + b * p->q.sb + h * p->q.sh, *keys = p->key.data + b * p->key.sb + h * p->key.sh;
    if (p->T == 1) {
        row_of_products(q, keys, p->key.st, p->S, p->D, to);
        memset(to + p->S, 0, (m->Sp - p->S) * sizeof(float));
    } else {
        turn(&p->key, b, h, p->S, p->D, m->Sp, m->transposed);
        product(p->T, m->Sp, p->D, q, p->q.st, 1, m->transposed, m->Sp, to, m->Sp);
    }
    for (int64_t i = 0; i < p->T * m->Sp; i += V) store(to + i, p->scale * load(to + i));
}

/* of_previous * previous + of_logits * logits; what has no share is not read, so that infinities there do no harm. */
INLINE vf weighted(float of_previous, vf previous, float of_logits, vf logits) {
    if (of_previous == 0) return of_logits * logits;
    if (of_logits == 0) return of_previous * previous;
    return of_previous * previous + of_logits * logits;
}

/* X = what is mixed of all heads, with what is around it; P = what is carried, where that is something else. */
static void mix(const Problem *p, int64_t b, Scratch *m) {
    for (int64_t h = 0; h < p->K; h++) {
        float *X = m->X + h * m->tall * m->wide, *P = m->P + h * p->T * m->Sp;
        if (p->above)
            for (int64_t t = 0; t < p->top; t++)
                memcpy(X + t * m->wide + p->left, p->above + ((b * p->K + h) * p->top + t) * p->before,
                       p->before * sizeof(float));
        X += p->top * m->wide + p->left;
        logits_of(p, b, h, m, P);
        if (m->L) memcpy(m->L + h * p->T * m->Sp, P, p->T * m->Sp * sizeof(float));
        for (int64_t t = 0; t < p->T; t++) {
            int64_t r = (b * p->K + h) * p->T + t;
            for (int64_t s = 0; s < m->Sp; s += V) {
                vf logits = load(P + t * m->Sp + s), previous = spread(0);
                if (p->previous) previous = row_load(p, m, p->previous, r, s);
                if (p->kernel) {
                    vf mixed = weighted(p->a, previous, p->b, logits);
                    store(X + t * m->wide + s, keep(mixed, loadi(m->shown + t * m->Sp + s)));
                }
                if (!p->same) store(P + t * m->Sp + s, weighted(p->d, previous, p->e, logits));
            }
        }
        if (p->kept)
            for (int64_t t = 0; t < p->top; t++)
                memcpy(p->kept + ((b * p->K + h) * p->top + t) * p->S, X + (p->T - p->top + t) * m->wide,
                       p->S * sizeof(float));
    }
}

/* The kernel's taps for output heads o, o + 1, ... side by side: ((o / 4, c, a, b), o % 4), zero where there are none. */
static void order_taps(const Problem *p, Scratch *m) {
    int64_t K = p->K, k = p->k;
    float *to = m->taps;
    for (int64_t first = 0; first < K; first += 4)
        for (int64_t c = 0; c < K; c++)
            for (int64_t a = 0; a < k; a++)
                for (int64_t b = 0; b < k; b++)
                    for (int64_t o = first; o < first + 4; o++)
                        *to++ = o < K && !(p->lower && b > a) ? p->kernel[((o * K + c) * k + a) * k + b] : 0;
}

/* The same for the gradient of the input: heads c side by side, the kernel turned round. */
static void order_taps_turned(const Problem *p, Scratch *m) {
    int64_t K = p->K, k = p->k;
    float *to = m->turned;
    for (int64_t first = 0; first < K; first += 4)
        for (int64_t o = 0; o < K; o++)
            for (int64_t a = k - 1; a >= 0; a--)
                for (int64_t b = k - 1; b >= 0; b--)
                    for (int64_t c = first; c < first + 4; c++)
                        *to++ = c < K && !(p->lower && b > a) ? p->kernel[((o * K + c) * k + a) * k + b] : 0;
}

/* Four heads' convolution at `vectors` places in a row: acc[o][j] += taps * maps, whose padding is in front. */
INLINE void convolve_block(const int vectors, const Problem *p, const Scratch *m, const float *maps, const float *taps,
                           int64_t t, int64_t s, vf acc[4][2]) {
    for (int64_t c = 0; c < p->K; c++)
        for (int64_t a = 0; a < p->k; a++) {
            const float *row = maps + (c * m->tall + t + a) * m->wide + s;
            for (int64_t b = 0; b < p->k; b++, taps += 4)
                for (int j = 0; j < vectors; j++) {
                    vf x = load(row + b + j * V);
                    for (int o = 0; o < 4; o++) acc[o][j] += taps[o] * x;
                }
        }
}

static void convolve_at(const Problem *p, const Scratch *m, const float *maps, const float *taps, int64_t first,
                        int64_t t, int64_t s, int vectors, vf acc[4][2]) {
    taps += first * p->K * p->k * p->k;
    if (vectors == 2) convolve_block(2, p, m, maps, taps, t, s, acc);
    else convolve_block(1, p, m, maps, taps, t, s, acc);
}

/* What is carried of head h, row t, from column s on, while P still holds it or need not. */
INLINE vf carried(const Problem *p, const Scratch *m, int64_t h, int64_t t, int64_t s) {
    if (p->same) return load(m->X + (h * m->tall + p->top + t) * m->wide + p->left + s);
    return load(m->P + (h * p->T + t) * m->Sp + s);
}

/* P = A_logit, R = ReLU(Conv(X)) */
static void evolve(const Problem *p, Scratch *m) {
    for (int64_t first = 0; first < p->K; first += 4)
        for (int64_t t = 0; t < p->T; t++)
            for (int64_t s = 0; s < m->Sp; s += 2 * V) {
                int vectors = m->Sp - s > V ? 2 : 1;
                vf acc[4][2];
                for (int o = 0; o < 4; o++)
                    for (int j = 0; j < vectors; j++)
                        acc[o][j] = spread(first + o < p->K ? p->bias[first + o] : 0);
                convolve_at(p, m, m->X, m->taps, first, t, s, vectors, acc);
                for (int64_t o = 0; o < 4 && first + o < p->K; o++)
                    for (int j = 0; j < vectors; j++) {
                        int64_t h = first + o, place = (h * p->T + t) * m->Sp + s + j * V;
                        vf r = choose(acc[o][j] <= 0.0f, spread(0), acc[o][j]);
                        store(m->R + place, r);
                        store(m->P + place, p->c * r + (1 - p->c) * carried(p, m, h, t, s + j * V));
                    }
            }
}

/* P = softmax(mask(P)); a row that is all masked gets equal weights, as everywhere. */
static void softmax(const Problem *p, Scratch *m) {
    for (int64_t h = 0; h < p->K; h++)
        for (int64_t t = 0; t < p->T; t++) {
            float *row = m->P + (h * p->T + t) * m->Sp;
            const int32_t *seen = m->seen + t * m->Sp;
            vf top = spread(-INFINITY);
            for (int64_t s = 0; s < m->Sp; s += V) {
                vf x = choose(loadi(seen + s), load(row + s), spread(-__FLT_MAX__));
                x = choose(loadi(m->inside + s), x, spread(-INFINITY));
                store(row + s, x);
                top = choose(x > top, x, top);
            }
            float highest = top[0];
            for (int i = 1; i < V; i++) highest = top[i] > highest ? top[i] : highest;
            vf total = spread(0);
            for (int64_t s = 0; s < m->Sp; s += V) {
                vf x = exponential(load(row + s) - highest);
                store(row + s, x);
                total += x;
            }
            vf scale = spread(1.0f / sum(total));
            for (int64_t s = 0; s < m->Sp; s += V) store(row + s, load(row + s) * scale);
        }
}

/* Copy T padded rows of head h to B x K x T x S. */
static void write_map(const Problem *p, int64_t b, int64_t h, const Scratch *m, const float *from, float *to) {
    for (int64_t t = 0; t < p->T; t++)
        memcpy(to + ((b * p->K + h) * p->T + t) * p->S, from + t * m->Sp, p->S * sizeof(float));
}

/* The same for all heads. */
static void write_maps(const Problem *p, int64_t b, const Scratch *m, const float *from, float *to) {
    for (int64_t h = 0; h < p->K; h++) write_map(p, b, h, m, from + h * p->T * m->Sp, to);
}

static void maps_of_sentence(const Problem *p, int64_t b, Scratch *m) {
    bits(&p->masked, b, p->T, p->S, m->Sp, m->seen);
    bits(&p->hidden, b, p->T, p->S, m->Sp, m->shown);
    mix(p, b, m);
    if (p->kernel) evolve(p, m);
    if (p->a_logit) write_maps(p, b, m, m->P, p->a_logit);
    softmax(p, m);
}

/* ---- dropout ---- */

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

/* Dropout's noise for head h, 0 or what kept weights are multiplied with: a function of the seed and the place alone.
   One draw of 4 x 32 bits for each of V lanes serves 8 vectors of 16 places, 16 bits each. */
static void draw_noise(const Problem *p, int64_t b, int64_t h, const Scratch *m) {
    vf factor = spread(p->threshold < 65536 ? 1 / p->kept_share : 0);
    int64_t places = p->T * m->Sp;
    for (int64_t block = 0; block * 8 * V < places; block++) {
        vu x[4] = {(uint32_t)(block * V) + lanes, (uint32_t)h + (vu){0}, (uint32_t)b + (vu){0}, (vu){0}};
        philox(x, p->seed);
        for (int i = 0; i < 8 && (block * 8 + i) * V < places; i++) {
            vi bits16 = (vi)(i % 2 ? x[i / 2] >> 16 : x[i / 2] & 0xFFFF);
            store(m->noise + (block * 8 + i) * V, keep(factor, bits16 >= (int32_t)p->threshold));
        }
    }
}

/* The weights that values are multiplied with: P, after dropout; `room` holds them where they are not P itself. */
static const float *dropped(const Problem *p, int64_t b, int64_t h, const Scratch *m, float *room) {
    const float *P = m->P + h * p->T * m->Sp;
    if (!p->threshold) return P;
    draw_noise(p, b, h, m);
    for (int64_t i = 0; i < p->T * m->Sp; i += V) store(room + i, load(P + i) * load(m->noise + i));
    return room;
}

/* ---- the parts of the backward pass ---- */

/* dmap = gradient of A_logit of head h; its dropout's noise has been drawn */
static void softmax_backward(const Problem *p, int64_t b, int64_t h, Scratch *m) {
    for (int64_t t = 0; t < p->T; t++) {
        int64_t r = (b * p->K + h) * p->T + t;
        float *row = m->dmap + (h * p->T + t) * m->Sp;
        const float *P = m->P + (h * p->T + t) * m->Sp;
        vf total = spread(0);
        for (int64_t s = 0; s < m->Sp; s += V) {
            vf x = load(row + s);
            if (p->threshold && p->d_context.data) x *= load(m->noise + t * m->Sp + s);
            if (p->d_weights) x += row_load(p, m, p->d_weights, r, s);
            store(row + s, x);
            total += x * load(P + s);
        }
        float mean = sum(total);
        for (int64_t s = 0; s < m->Sp; s += V) {
            vf x = keep(load(P + s) * (load(row + s) - mean), loadi(m->seen + t * m->Sp + s));
            if (p->d_a_logit) x += row_load(p, m, p->d_a_logit, r, s);
            store(row + s, x);
        }
    }
}

/* Gradient of the taps of some output heads: sums of products of G with X, moved by the tap's place. */
INLINE void taps_backward(const int heads, const Problem *p, int64_t b, const Scratch *m, int64_t first) {
    int64_t K = p->K, k = p->k;
    const float *G = m->G + (first * m->tall + k - 1 - p->top) * m->wide + k - 1 - p->left;
    float *to = p->d_kernel + b * K * K * k * k;
    for (int64_t c = 0; c < K; c++)
        for (int64_t a = 0; a < k; a++)
            for (int64_t e = 0; e < k; e++) {
                const float *X = m->X + (c * m->tall + a) * m->wide + e;
                vf acc[4] = {spread(0), spread(0), spread(0), spread(0)};
                if (!(p->lower && e > a))
                    for (int64_t t = 0; t < p->T; t++)
                        for (int64_t s = 0; s < m->Sp; s += V) {
                            vf x = load(X + t * m->wide + s);
                            for (int o = 0; o < heads; o++) acc[o] += x * load(G + (o * m->tall + t) * m->wide + s);
                        }
                for (int o = 0; o < heads; o++) to[(((first + o) * K + c) * k + a) * k + e] = sum(acc[o]);
            }
}

/* G = gradient of the convolution's result; the sentence's part of the gradients of kernel and bias */
static void kernel_backward(const Problem *p, int64_t b, Scratch *m) {
    int64_t K = p->K, k = p->k, up = k - 1 - p->top, before = k - 1 - p->left;
    for (int64_t h = 0; h < K; h++) {
        vf total = spread(0);
        for (int64_t t = 0; t < p->T; t++)
            for (int64_t s = 0; s < m->Sp; s += V) {
                int64_t place = (h * p->T + t) * m->Sp + s;
                vf g = keep(p->c * load(m->dmap + place), load(m->R + place) > 0.0f);
                store(m->G + (h * m->tall + up + t) * m->wide + before + s, g);
                total += g;
            }
        p->d_bias[b * K + h] = sum(total);
    }
    for (int64_t first = 0; first < K; first += 4)
        switch (K - first) {
        case 1: taps_backward(1, p, b, m, first); break;
        case 2: taps_backward(2, p, b, m, first); break;
        case 3: taps_backward(3, p, b, m, first); break;
        default: taps_backward(4, p, b, m, first);
        }
}

/* Sums over a sentence that make the gradients of a, b, c, d and e. */
typedef struct { vf previous_mixed, logits_mixed, previous_carried, logits_carried, convolved; } Shares;

/* At head h, row t, from column s on: the gradient of what is mixed and of what is carried are turned into those of
   the logits, which take the place of A_logit's in dmap, and of the previous map. */
INLINE void split_gradient(const Problem *p, int64_t b, int64_t h, int64_t t, int64_t s, vf d_mixed, const Scratch *m,
                           Shares *shares) {
    float *row = m->dmap + (h * p->T + t) * m->Sp + s, c = p->kernel ? p->c : 0;
    int64_t r = (b * p->K + h) * p->T + t;
    vf d_carried = (1 - c) * load(row);
    if (p->same) {
        d_mixed += d_carried;
        d_carried = spread(0);
    }
    if (p->kernel) d_mixed = keep(d_mixed, loadi(m->shown + t * m->Sp + s));
    if (shares) {
        vf logits = load(m->L + (h * p->T + t) * m->Sp + s), previous = spread(0);
        if (p->previous) previous = row_load(p, m, p->previous, r, s);
        shares->previous_mixed += d_mixed * previous;
        shares->logits_mixed += d_mixed * logits;
        shares->previous_carried += d_carried * previous;
        shares->logits_carried += d_carried * logits;
        if (p->kernel) {
            vf x = weighted(p->d, previous, p->e, logits);
            if (p->same) x = load(m->X + (h * m->tall + p->top + t) * m->wide + p->left + s);
            shares->convolved += load(row) * (load(m->R + (h * p->T + t) * m->Sp + s) - x);
        }
    }
    store(row, p->b * d_mixed + p->e * d_carried);
    vf d_previous = p->a * d_mixed + p->d * d_carried;
    if (p->d_previous) store_row(p, p->d_previous + r * p->S, s, d_previous);
}

/* dmap = gradient of the logits, from that of A_logit; that of the previous map, and of the shares */
static void mix_backward(const Problem *p, int64_t b, Scratch *m) {
    double *d_shares = p->d_shares ? p->d_shares + 5 * b : NULL;
    if (d_shares) memset(d_shares, 0, 5 * sizeof(double));
    for (int64_t first = 0; first < p->K; first += 4)
        for (int64_t t = 0; t < p->T; t++) {
            Shares shares = {0};
            for (int64_t s = 0; s < m->Sp; s += 2 * V) {
                int vectors = m->Sp - s > V ? 2 : 1;
                vf acc[4][2];
                for (int o = 0; o < 4; o++) for (int j = 0; j < vectors; j++) acc[o][j] = spread(0);
                if (p->kernel) convolve_at(p, m, m->G, m->turned, first, t, s, vectors, acc);
                for (int64_t o = 0; o < 4 && first + o < p->K; o++)
                    for (int j = 0; j < vectors; j++)
                        split_gradient(p, b, first + o, t, s + j * V, acc[o][j], m, d_shares ? &shares : NULL);
            }
            if (!d_shares) continue;
            d_shares[0] += sum(shares.previous_mixed);
            d_shares[1] += sum(shares.logits_mixed);
            d_shares[2] += sum(shares.convolved);
            d_shares[3] += sum(shares.previous_carried);
            d_shares[4] += sum(shares.logits_carried);
        }
}

/* ---- the two passes ---- */

static float *take(char **next, int64_t floats) {
    float *taken = (float *)*next;
    *next += whole(floats + V) * sizeof(float); /* a vector more: loads may reach past the end */
    return taken;
}

/* Lay the scratch out in `memory`, or only measure it where that is NULL: the bytes needed. */
static int64_t lay_out(const Problem *p, int backward, char *memory, Scratch *m) {
    int64_t longer = p->T > p->S ? p->T : p->S;
    char *next = memory;
    m->Sp = whole(p->S);
    m->Dp = whole(p->D);
    m->wide = whole(m->Sp + p->k - 1);
    m->tall = p->T + p->k - 1;
    m->X = take(&next, p->K * m->tall * m->wide);
    m->G = backward ? take(&next, p->K * m->tall * m->wide) : NULL;
    int64_t zeroed = next - memory;
    m->P = take(&next, p->K * p->T * m->Sp);
    m->R = take(&next, p->kernel ? p->K * p->T * m->Sp : 0);
    m->L = backward && p->d_shares ? take(&next, p->K * p->T * m->Sp) : NULL;
    m->noise = take(&next, p->threshold ? p->T * m->Sp : 0);
    m->dmap = take(&next, (backward ? p->K : 1) * p->T * m->Sp);
    m->rows = take(&next, longer * m->Dp);
    m->transposed = take(&next, p->D * m->Sp);
    m->out = take(&next, longer * m->Dp);
    m->seen = (int32_t *)take(&next, p->T * m->Sp);
    m->shown = (int32_t *)take(&next, p->T * m->Sp);
    m->inside = (int32_t *)take(&next, m->Sp);
    m->taps = take(&next, whole(p->K) * p->K * p->k * p->k);
    m->turned = take(&next, whole(p->K) * p->K * p->k * p->k);
    if (memory) {
        memset(memory, 0, zeroed); /* the zeros around X and G, once: what is inside is written each time */
        for (int64_t s = 0; s < m->Sp; s++) m->inside[s] = s < p->S ? -1 : 0;
        if (p->kernel) order_taps(p, m);
        if (p->kernel && backward) order_taps_turned(p, m);
    }
    return next - memory;
}

static void forward_sentence(const Problem *p, int64_t b, Scratch *m) {
    maps_of_sentence(p, b, m);
    if (p->weights) write_maps(p, b, m, m->P, p->weights);
    for (int64_t h = 0; h < p->K; h++) {
        const float *P = dropped(p, b, h, m, m->dmap);
        if (p->T == 1) {
            row_of_context(P, p->v.data + b * p->v.sb + h * p->v.sh, p->v.st, p->S, p->D, m->out);
        } else {
            gather(&p->v, b, h, p->S, p->D, m->Dp, m->rows);
            product(p->T, m->Dp, p->S, P, m->Sp, 1, m->rows, m->Dp, m->out, m->Dp);
        }
        scatter(m->out, m->Dp, &p->context, b, h, p->T, p->D);
    }
}

static void backward_sentence(const Problem *p, int64_t b, Scratch *m) {
    maps_of_sentence(p, b, m);
    for (int64_t h = 0; h < p->K; h++) {
        float *dmap = m->dmap + h * p->T * m->Sp;
        if (p->d_context.data) {
            gather(&p->d_context, b, h, p->T, p->D, m->Dp, m->rows);
            const float *P = dropped(p, b, h, m, dmap);
            product(p->S, m->Dp, p->T, P, 1, m->Sp, m->rows, m->Dp, m->out, m->Dp);
            scatter(m->out, m->Dp, &p->d_v, b, h, p->S, p->D);
            turn(&p->v, b, h, p->S, p->D, m->Sp, m->transposed);
            product(p->T, m->Sp, p->D, m->rows, m->Dp, 1, m->transposed, m->Sp, dmap, m->Sp);
        } else {
            memset(dmap, 0, p->T * m->Sp * sizeof(float));
        }
        softmax_backward(p, b, h, m);
    }
    if (p->kernel) kernel_backward(p, b, m);
    mix_backward(p, b, m);
    for (int64_t h = 0; h < p->K; h++) {
        float *dmap = m->dmap + h * p->T * m->Sp;
        if (p->d_given) write_map(p, b, h, m, dmap, p->d_given);
        if (!p->d_q.data) continue;
        for (int64_t i = 0; i < p->T * m->Sp; i += V) store(dmap + i, p->scale * load(dmap + i));
        gather(&p->key, b, h, p->S, p->D, m->Dp, m->rows);
        product(p->T, m->Dp, p->S, dmap, m->Sp, 1, m->rows, m->Dp, m->out, m->Dp);
        scatter(m->out, m->Dp, &p->d_q, b, h, p->T, p->D);
        gather(&p->q, b, h, p->T, p->D, m->Dp, m->rows);
        product(p->S, m->Dp, p->T, dmap, 1, m->Sp, m->rows, m->Dp, m->out, m->Dp);
        scatter(m->out, m->Dp, &p->d_key, b, h, p->S, p->D);
    }
}

/* Threads that have enough to do: waking one takes as long as about a million operations. */
static int worthwhile(const Problem *p, int threads) {
    double operations = (double)p->B * p->K * p->T * p->S * (4 * p->D + (p->kernel ? 2 * p->K * p->k * p->k : 0));
    double most = 1 + operations / 1e6;
    return most < threads ? (int)most : threads;
}

/* Run one pass on at most `threads` threads; 0, or 1 where there is not enough memory. */
static int run(const Problem *p, int backward, int threads) {
    Scratch measured;
    size_t bytes = (lay_out(p, backward, NULL, &measured) + 63) / 64 * 64;
    int failed = 0;
    threads = worthwhile(p, threads);
#pragma omp parallel num_threads(threads) if (threads > 1 && p->B > 1)
    {
        Scratch m;
        char *memory = aligned_alloc(64, bytes);
        if (memory) {
            lay_out(p, backward, memory, &m);
#pragma omp for schedule(static)
            for (int64_t b = 0; b < p->B; b++) {
                if (backward) backward_sentence(p, b, &m);
                else forward_sentence(p, b, &m);
            }
            free(memory);
        } else {
#pragma omp atomic write
            failed = 1;
        }
    }
    return failed;
}

int evolving_attention_forward(const Problem *p, int threads) { return run(p, 0, threads); }
int evolving_attention_backward(const Problem *p, int threads) { return run(p, 1, threads); }
