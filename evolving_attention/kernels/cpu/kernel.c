/* Evolving attention on the CPU, float32: from queries, keys and values to the context, and all gradients.

       logits  = given, or scale * q k^T
       mixed   = a * previous + b * logits                  zero where hidden; what the convolution reads
       carried = d * previous + e * logits
       A_logit = c * ReLU(Conv(mixed)) + (1 - c) * carried
       context = dropout(softmax(mask(A_logit))) v

   A sentence's rows are worked on in chunks, which threads share, and a chunk's in bands, whose maps stay in the cache:
   passes over maps that do not, not arithmetic, are what the plain composition spends its time on. Every band does all
   from the logits to the context, or to the gradients, with whole rows of all heads. The convolution makes rows depend
   on their neighbours: a band keeps the last k - 1 rows of the one before it, and a chunk begins and ends k - 1 rows
   outside of its own rows. Nothing of a map is kept for the backward pass, which computes it again.

   How rows are shared out depends on shapes alone, and every sum has one order: so bits do not depend on the number of
   threads. evolution.py has the mathematics; __init__.py calls this.

   Axes: B batch, K heads, T target (query) length, S source (key) length, D head dimension; k kernel size. */

#include "vectors.h"

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
    int64_t same;                /* 1: what is carried is what is mixed, before hidden places become zero; d and e are not read */
    float scale;                 /* of q k^T */
    float a, b, c, d, e;         /* the shares above; a and d are 0 where there is no previous map */
    uint32_t threshold;          /* dropout: a weight is dropped where its 16 random bits are below this */
    uint64_t seed;               /* of dropout's random bits */
    Vectors q, key, v;           /* q and key are not read where logits are given */
    Mask hidden, masked;         /* from the convolution; from attention */
    const float *previous;       /* A_logit of the layer before */
    const float *above;          /* B x K x top x before, mixed of the rows before these; NULL if empty */
    const float *kernel, *bias;  /* K x K x k x k, K; NULL: no convolution, and A_logit is what is carried */
    const float *given;          /* logits, or NULL */
    int64_t beams;               /* neighbouring rows of B that share keys and values */
    /* results of the forward pass */
    Vectors context;
    float *a_logit, *weights;    /* weights: before dropout */
    float *kept;                 /* where there are rows above: those of the next step, B x K x top x S */
    /* of the backward pass: gradients that come in, gradients that go out */
    Vectors d_context;           /* data may be NULL */
    const float *d_a_logit, *d_weights;
    Vectors d_q, d_key, d_v;     /* data of the first two may be NULL: not wanted */
    float *d_previous, *d_given; /* NULL: not wanted */
    float *d_kernel, *d_bias;    /* B x (K x K x k x k), B x K: a part for each sentence, summed by the caller */
    double *d_shares;            /* B x 5, of a, b, c, d, e, likewise; NULL: not wanted */
} Problem;

/* How a call is worked on: all that follows from the problem's shapes. */
typedef struct {
    Problem p;              /* its kernel 1 x 1 where nothing is convolved */
    int backward;
    int skips;              /* whether what is masked and hidden on the right may be left out: nobody asks for maps */
    int reads_mixed;        /* whether what is carried is read from what is mixed: no hidden place is looked at */
    int logits;             /* whether the logits themselves are needed after they were mixed */
    int64_t down, gap;      /* how far the kernel reaches down; zeros between rows, for what it reads beside the map */
    int64_t Sp, Dp, pitch;  /* S and D, rounded up to whole vectors; floats from row to row */
    int64_t chunk, chunks;  /* rows in one, how many there are */
    int64_t band, tall;     /* rows in one at most, and with those kept of the band before */
    int64_t floats;         /* in an array of maps */
    int64_t packed;         /* floats of one head's packed matrices */
    int64_t taps;           /* of one head's kernel for another, without its strict upper triangle if that is left out */
} Plan;

/* One thread's maps of a band, K x tall x pitch if nothing else is said. Row i of X, L and shown lies at row
   i - from + k - 1, row i of G and A `down` rows below that, and row i of P and seen k - 1 rows above that. */
typedef struct {
    float *X, *L;           /* what is mixed, with zeros around; the logits */
    float *P;               /* A_logit, then the weights, K x band x pitch */
    float *G, *A;           /* gradients of the convolution's result, with zeros around, and of A_logit */
    float *dropped, *noise; /* one head's weights after dropout, band x pitch; what they were multiplied with, band x Sp */
    int32_t *seen, *shown;  /* all bits where attention, band x pitch, and where the convolution may see, tall x pitch */
    int64_t *ends;          /* tall: rows' columns that are worked on, whole vectors */
    int32_t *inside;        /* Sp: all bits in the S columns that there are */
    float *few, *out;       /* one head's vectors of a band, side by side or packed; their product, band x Dp */
    float *d_key, *d_v;     /* K x S x Dp: the chunk's part */
    float *taps, *turned;   /* the kernel in the order of the loops, and turned round for the backward pass */
    float *d_taps, *d_bias; /* the chunk's part of their gradients, whole vectors that are still to be summed */
    double d_shares[5];
    float *packs;           /* the sentence's packed matrices, where it has one chunk */
} Scratch;

/* Rows that are worked on at a time: logits of n rows from row `from`, and what follows for the rows before them. */
typedef struct {
    int64_t b;
    int64_t own, past;      /* the chunk's own rows */
    int64_t from, n;
    int64_t end;            /* columns that are worked on, whole vectors; on its right all is masked and hidden */
} Band;

/* The matrices of one head that are packed once for all its rows. */
typedef struct { float *keys_across, *values_across, *keys, *values; } Packs;

INLINE Packs packs_of(const Plan *w, float *packed) {
    int64_t across = w->p.D * w->Sp;
    if (!w->backward) return (Packs){packed, NULL, NULL, packed + across};
    return (Packs){packed, packed + across, packed + 2 * across, NULL};
}

/* Where the keys or values of head h begin that sentence b looks at. */
INLINE const float *vectors_of(const Problem *p, const Vectors *x, int64_t b, int64_t h) {
    return x->data + b / p->beams * x->sb + h * x->sh;
}

static void pack_head(const Plan *w, int64_t b, int64_t h, float *packed) {
    const Problem *p = &w->p;
    Packs to = packs_of(w, packed);
    const float *values = vectors_of(p, &p->v, b, h);
    if (to.values) pack_rows(values, p->v.st, p->S, p->D, w->Dp, to.values);
    else pack_columns(values, p->v.st, p->S, p->D, w->Sp, to.values_across);
    if (p->given) return;
    const float *keys = vectors_of(p, &p->key, b, h);
    pack_columns(keys, p->key.st, p->S, p->D, w->Sp, to.keys_across);
    if (to.keys) pack_rows(keys, p->key.st, p->S, p->D, w->Dp, to.keys);
}

/* Element s of row r of an array of maps, which is not padded, and what follows; zeros past the row's end. The same place
   of the next row is asked for: long rows begin where processors foresee nothing. */
INLINE vf row_load(const Plan *w, const Scratch *m, const float *maps, int64_t r, int64_t s) {
    const float *from = maps + r * w->p.S + s;
    __builtin_prefetch(from + w->p.S);
    if (from + V <= maps + w->floats) return keep(load(from), loadi(m->inside + s));
    vf v = spread(0); /* the end of the array */
    memcpy(&v, from, least(V, w->p.S - s) * sizeof(float));
    return v;
}

/* A row to B x K x T x S; zeros from column `end` on. */
static void write_row(const Plan *w, const float *from, int64_t end, float *maps, int64_t r) {
    int64_t S = w->p.S, filled = least(end, S);
    memcpy(maps + r * S, from, filled * sizeof(float));
    memset(maps + r * S + filled, 0, (S - filled) * sizeof(float));
}

INLINE int64_t row_number(const Plan *w, int64_t b, int64_t h, int64_t i) { return (b * w->p.K + h) * w->p.T + i; }

static void zero(float *row, int64_t floats) { memset(row, 0, floats * sizeof(float)); }

/* ---- masks ---- */

/* All bits where a row's mask is not set, up to column `end`; none past the end of the row. */
static void bits(const Mask *mask, int64_t b, int64_t i, int64_t S, int64_t end, int32_t *to) {
    int64_t filled = least(S, end);
    if (!mask->data) {
        for (int64_t s = 0; s < filled; s++) to[s] = -1;
    } else {
        const uint8_t *row = mask->data + b * mask->sb + i * mask->st;
        if (mask->ss == 1) for (int64_t s = 0; s < filled; s++) to[s] = (int32_t)row[s] - 1;
        else for (int64_t s = 0; s < filled; s++) to[s] = (int32_t)row[s * mask->ss] - 1;
    }
    for (int64_t s = filled; s < end; s++) to[s] = 0;
}

/* Columns of a row up to the last one that is not masked. */
static int64_t last_seen(const Mask *mask, int64_t b, int64_t i, int64_t S) {
    if (!mask->data) return S;
    const uint8_t *row = mask->data + b * mask->sb + i * mask->st;
    const uint64_t eight_masked = 0x0101010101010101u;
    int64_t s = S;
    for (uint64_t eight; mask->ss == 1 && s >= 8; s -= 8) {
        memcpy(&eight, row + s - 8, 8);
        if (eight != eight_masked) break;
    }
    while (s > 0 && row[(s - 1) * mask->ss]) s--;
    return s;
}

/* Columns of row i that attention or the convolution looks at, as whole vectors. */
static int64_t columns_of(const Problem *p, int64_t b, int64_t i) {
    int64_t seen = last_seen(&p->masked, b, i, p->S);
    if (seen == 0) seen = p->S; /* a row that is all masked gets equal weights */
    return whole(most(seen, p->kernel ? last_seen(&p->hidden, b, i, p->S) : 0));
}

/* The ends of a band's rows, and of the band, after one of `n` rows. */
static void set_ends(const Plan *w, Scratch *m, Band *band, int64_t n) {
    int64_t kept = w->p.k - 1;
    memmove(m->ends, m->ends + n, kept * sizeof(int64_t));
    for (int64_t i = band->from; i < least(band->from + band->n, w->p.T); i++) {
        int64_t end = m->ends[i - band->from + kept] = w->skips ? columns_of(&w->p, band->b, i) : w->Sp;
        band->end = most(band->end, end);
    }
}

/* Columns that must be worked on for one row; from there to the band's end there are zeros. */
INLINE int64_t end_of(const Plan *w, const Scratch *m, const Band *band, int64_t i) {
    return m->ends[i - band->from + w->p.k - 1];
}

/* ---- the parts of the forward pass, on one band ---- */

/* of_previous * previous + of_logits * logits; what has no share is not read, so that infinities there do no harm. */
INLINE vf weighted(float of_previous, vf previous, float of_logits, vf logits) {
    if (of_previous == 0) return of_logits * logits;
    if (of_logits == 0) return of_previous * previous;
    return of_previous * previous + of_logits * logits;
}

/* Vectors i to past, side by side: they may lie so far apart that the first cache keeps only a few of them. */
static void gather(const float *from, int64_t stride, int64_t i, int64_t past, int64_t D, int64_t Dp, float *to) {
    for (from += i * stride; i < past; i++, from += stride, to += Dp) {
        foresee_vector(from, stride, D);
        copy(from, D, to);
    }
}

/* The logits of head h, rows i to past, before they are scaled. */
static void logits_of(const Plan *w, const Scratch *m, const Band *band, int64_t h, int64_t i, int64_t past,
                      const Packs *packs, float *to) {
    const Problem *p = &w->p;
    const float *q = p->q.data + band->b * p->q.sb + h * p->q.sh;
    if (p->given) {
        for (; i < past; i++, to += w->pitch)
            for (int64_t s = 0; s < band->end; s += V)
                store(to + s, row_load(w, m, p->given, row_number(w, band->b, h, i), s));
    } else if (p->T == 1 && !w->backward) {
        row_of_products(q, vectors_of(p, &p->key, band->b, h), p->key.st, least(p->S, band->end), p->D, to);
        zero(to + p->S, w->Sp - p->S);
    } else {
        gather(q, p->q.st, i, past, p->D, w->Dp, m->few);
        product(past - i, w->Sp, band->end, p->D, p->D, m->few, w->Dp, packs->keys_across, to, w->pitch);
    }
}

/* X, and L where it is needed: rows from `from` on, and zeros outside of the map. */
static void mix(const Plan *w, Scratch *m, const Band *band, float *packed) {
    const Problem *p = &w->p;
    int64_t past = band->from + band->n, filled = least(past, p->T);
    float scale = p->given ? 1 : p->scale;
    for (int64_t i = band->from; i < filled; i++)
        bits(&p->hidden, band->b, i, p->S, band->end, m->shown + (i - band->from + p->k - 1) * w->pitch);
    for (int64_t h = 0; h < p->K; h++) {
        int64_t first = (h * w->tall + p->k - 1) * w->pitch;
        float *X = m->X + first, *L = w->logits ? m->L + first : X;
        Packs packs = packs_of(w, packed + h * w->packed);
        if (band->from < filled) logits_of(w, m, band, h, band->from, filled, &packs, L);
        for (int64_t i = band->from; i < filled; i++, X += w->pitch, L += w->pitch) {
            const int32_t *shown = m->shown + (i - band->from + p->k - 1) * w->pitch;
            for (int64_t s = 0; s < band->end; s += V) {
                vf logits = scale * load(L + s), previous = spread(0);
                if (w->logits) store(L + s, logits);
                if (!p->kernel) continue;
                if (p->previous) previous = row_load(w, m, p->previous, row_number(w, band->b, h, i), s);
                store(X + s, keep(weighted(p->a, previous, p->b, logits), loadi(shown + s)));
            }
            if (!p->kernel) continue;
            zero(X + band->end, w->gap);
            if (p->kept && i >= p->T - p->top)
                write_row(w, X, band->end, p->kept, (band->b * p->K + h) * p->top + i - (p->T - p->top));
        }
        if (p->kernel)
            for (int64_t i = most(filled, band->from); i < past; i++, X += w->pitch) zero(X, band->end + w->gap);
    }
}

/* Columns of the kernel's row a that have taps: without its strict upper triangle, up to the diagonal. */
INLINE int64_t taps_past(int lower, int64_t size, int64_t a) { return lower ? a + 1 : size; }

/* The kernel's taps of four heads side by side: ((o / 4, c, a, b), o % 4) of output heads o; or of input heads c, for the
   gradient of the input, the kernel turned round: ((c / 4, o, a, b), c % 4). */
static void order_taps(const Problem *p, int turned, float *to) {
    int64_t K = p->K, k = p->k;
    for (int64_t first = 0; first < K; first += 4)
        for (int64_t other = 0; other < K; other++)
            for (int64_t row = 0; row < k; row++) {
                int64_t a = turned ? k - 1 - row : row, taps = taps_past((int)p->lower, k, a);
                for (int64_t column = 0; column < taps; column++)
                    for (int64_t head = first; head < first + 4; head++) {
                        int64_t o = turned ? other : head, c = turned ? head : other, b = turned ? taps - 1 - column : column;
                        *to++ = head < K ? p->kernel[((o * K + c) * k + a) * k + b] : 0;
                    }
            }
}

/* Four heads' convolution, with a kernel of `size`, at `vectors` places: sums[o][j] += taps * maps, whose first row and
   column are given. */
INLINE void convolve_at(const int vectors, const int lower, const int turned, int64_t size, const Plan *w,
                        const float *maps, const float *taps, vf sums[4][3]) {
    vf acc[4][3];
    for (int o = 0; o < 4; o++) for (int j = 0; j < vectors; j++) acc[o][j] = sums[o][j];
    for (int64_t c = 0; c < w->p.K; c++, maps += w->tall * w->pitch)
        for (int64_t a = 0; a < size; a++) {
            int64_t b = turned ? size - taps_past(lower, size, size - 1 - a) : 0;
            int64_t past = turned ? size : taps_past(lower, size, a);
            for (; b < past; b++, taps += 4) {
                vf x[3];
                for (int j = 0; j < vectors; j++) {
                    x[j] = load(maps + a * w->pitch + b + j * V);
                    hold(&x[j]);
                }
                for (int o = 0; o < 4; o++) for (int j = 0; j < vectors; j++) acc[o][j] += taps[o] * x[j];
            }
        }
    for (int o = 0; o < 4; o++) for (int j = 0; j < vectors; j++) sums[o][j] = acc[o][j];
}

INLINE void convolve_some(const int vectors, int turned, const Plan *w, const float *maps, const float *taps,
                          vf sums[4][3]) {
    int64_t size = w->p.k;
    if (size == 3 && !w->p.lower) convolve_at(vectors, 0, 0, 3, w, maps, taps, sums);
    else if (size == 3 && turned) convolve_at(vectors, 1, 1, 3, w, maps, taps, sums);
    else if (size == 3) convolve_at(vectors, 1, 0, 3, w, maps, taps, sums);
    else convolve_at(vectors, (int)w->p.lower, turned, size, w, maps, taps, sums);
}

APART void convolve(int vectors, int turned, const Plan *w, const float *maps, const float *taps, int64_t first,
                    vf sums[4][3]) {
    taps += first * w->p.K * w->taps;
    switch (vectors) {
    case 1: convolve_some(1, turned, w, maps, taps, sums); break;
    case 2: convolve_some(2, turned, w, maps, taps, sums); break;
    default: convolve_some(3, turned, w, maps, taps, sums);
    }
}

/* What is carried at head h, row i, from column s on. */
INLINE vf carried(const Plan *w, const Scratch *m, const Band *band, int64_t h, int64_t i, int64_t s) {
    const Problem *p = &w->p;
    int64_t place = (h * w->tall + i - band->from + p->k - 1) * w->pitch + s;
    if (w->reads_mixed) return load(m->X + place);
    float of_previous = p->same ? p->a : p->d, of_logits = p->same ? p->b : p->e;
    vf previous = of_previous ? row_load(w, m, p->previous, row_number(w, band->b, h, i), s) : spread(0);
    return weighted(of_previous, previous, of_logits, load(m->L + place));
}

/* Ask for what is needed of all heads at the columns to come: so many rows at once are more than processors foresee. */
INLINE void foresee(const Plan *w, const float *maps, int64_t tall) {
    for (int64_t h = 0; h < w->p.K; h++) __builtin_prefetch(maps + h * tall * w->pitch + 4 * V);
}

/* P = A_logit of four heads at `vectors` places of row i; in the backward pass G = ReLU(Conv(X)). */
INLINE void evolve_at(int vectors, const Plan *w, Scratch *m, const Band *band, int64_t first, int64_t i, int64_t s) {
    const Problem *p = &w->p;
    int64_t row = i - (band->from - w->down), heads = least(4, p->K - first), tall = w->tall * w->pitch;
    int backward = w->backward, reads_mixed = w->reads_mixed;
    float c = p->c, *P = m->P + (first * w->band + row) * w->pitch + s;
    float *G = m->G + first * tall + (row + p->k - 1) * w->pitch + s;
    const float *X = m->X + first * tall + (i - band->from + p->k - 1) * w->pitch + s;
    vf acc[4][3];
    for (int o = 0; o < 4; o++) for (int j = 0; j < vectors; j++) acc[o][j] = spread(o < heads ? p->bias[first + o] : 0);
    convolve(vectors, 0, w, m->X + row * w->pitch + s - p->left, m->taps, first, acc);
    for (int o = 0; o < 4; o++) {
        if (o == heads) break;
        for (int j = 0; j < vectors; j++) {
            vf r = choose(acc[o][j] <= 0.0f, spread(0), acc[o][j]);
            vf x = reads_mixed ? load(X + j * V) : carried(w, m, band, first + o, i, s + j * V);
            if (backward) store(G + j * V, r);
            store(P + j * V, c * r + (1 - c) * x);
        }
        X += tall;
        G += tall;
        P += w->band * w->pitch;
    }
}

/* P = A_logit of one row up to column `end`; in the backward pass G = ReLU(Conv(X)). */
static void evolve_row(const Plan *w, Scratch *m, const Band *band, int64_t i, int64_t end) {
    const Problem *p = &w->p;
    int64_t row = i - (band->from - w->down);
    for (int64_t s = 0, vectors; s < end; s += vectors * V) {
        vectors = vectors_at(s, end);
        foresee(w, m->X + (row + p->k - 1) * w->pitch + s, w->tall);
        foresee(w, m->P + row * w->pitch + s, w->band);
        if (w->backward) foresee(w, m->G + (row + p->k - 1) * w->pitch + s, w->tall);
        for (int64_t first = 0; first < p->K; first += 4) evolve_at(vectors, w, m, band, first, i, s);
    }
}

/* The same where nothing is convolved. */
static void carry_row(const Plan *w, Scratch *m, const Band *band, int64_t i, int64_t end) {
    for (int64_t h = 0; h < w->p.K; h++)
        for (int64_t s = 0; s < end; s += V)
            store(m->P + (h * w->band + i - band->from) * w->pitch + s, carried(w, m, band, h, i, s));
}

/* A row of weights from one of A_logit; a row that is all masked gets equal weights, as everywhere. */
static void softmax_row(const Scratch *m, int64_t end, const int32_t *seen, float *row) {
    vf top = spread(-INFINITY);
    for (int64_t s = 0; s < end; s += V) {
        vf x = choose(loadi(seen + s), load(row + s), spread(-__FLT_MAX__));
        x = choose(loadi(m->inside + s), x, spread(-INFINITY));
        store(row + s, x);
        top = larger(x, top);
    }
    float highest = largest(top);
    vf total = spread(0);
    for (int64_t s = 0; s < end; s += V) {
        vf x = exponential(load(row + s) - highest);
        store(row + s, x);
        total += x;
    }
    vf scale = spread(1.0f / sum(total));
    for (int64_t s = 0; s < end; s += V) store(row + s, load(row + s) * scale);
}

/* P = the weights of rows i to past, of all heads; results that are maps are written for the chunk's own rows. */
static void weigh(const Plan *w, Scratch *m, const Band *band, int64_t i, int64_t past) {
    const Problem *p = &w->p;
    for (; i < past; i++) {
        int64_t row = i - (band->from - w->down), end = end_of(w, m, band, i);
        int32_t *seen = m->seen + row * w->pitch;
        bits(&p->masked, band->b, i, p->S, end, seen);
        if (p->kernel) evolve_row(w, m, band, i, end);
        else carry_row(w, m, band, i, end);
        for (int64_t h = 0; h < p->K; h++) {
            float *P = m->P + (h * w->band + row) * w->pitch;
            if (p->a_logit) write_row(w, P, end, p->a_logit, row_number(w, band->b, h, i));
            softmax_row(m, end, seen, P);
            zero(P + end, band->end - end);
            if (p->weights) write_row(w, P, band->end, p->weights, row_number(w, band->b, h, i));
        }
    }
}

/* Dropout's noise for vectors `vector` to `past` of a sentence's map of T x Sp. */
static void noise_of_map(const Problem *p, int64_t b, int64_t h, int64_t vector, int64_t past, float *to) {
    for (int64_t block = vector / 8; block * 8 < past; block++) {
        vf noise[8];
        draw_noise((uint64_t)block, (uint32_t)h, (uint32_t)b, p->seed, p->threshold, noise);
        for (int i = 0; i < 8; i++) {
            int64_t at = block * 8 + i - vector;
            if (at >= 0 && at < past - vector) store(to + at * V, noise[i]);
        }
    }
}

/* The weights of head h, rows i to past, that values are multiplied with; m->noise is what dropout multiplied by. */
static const float *dropped(const Plan *w, Scratch *m, const Band *band, int64_t h, int64_t i, int64_t past) {
    const float *P = m->P + (h * w->band + i - (band->from - w->down)) * w->pitch;
    if (!w->p.threshold) return P;
    int64_t long_row = w->Sp / V;
    if (band->end == w->Sp) { /* short rows share draws */
        noise_of_map(&w->p, band->b, h, i * long_row, past * long_row, m->noise);
    } else {
        for (int64_t r = i; r < past; r++)
            noise_of_map(&w->p, band->b, h, r * long_row, r * long_row + band->end / V, m->noise + (r - i) * w->Sp);
    }
    for (int64_t r = 0; r < past - i; r++)
        for (int64_t s = 0; s < band->end; s += V)
            store(m->dropped + r * w->pitch + s, load(P + r * w->pitch + s) * load(m->noise + r * w->Sp + s));
    return m->dropped;
}

static void scatter(const float *from, int64_t Dp, const Vectors *x, int64_t b, int64_t h, int64_t i, int64_t past,
                    int64_t D) {
    for (; i < past; i++, from += Dp) copy(from, D, x->data + b * x->sb + h * x->sh + i * x->st);
}

/* The context of rows i to past. */
static void look(const Plan *w, Scratch *m, const Band *band, float *packed, int64_t i, int64_t past) {
    const Problem *p = &w->p;
    int64_t columns = least(p->S, band->end);
    for (int64_t h = 0; h < p->K; h++) {
        const float *P = dropped(w, m, band, h, i, past);
        if (p->T == 1) {
            row_of_context(P, vectors_of(p, &p->v, band->b, h), p->v.st, columns, p->D, m->out);
        } else {
            Packs packs = packs_of(w, packed + h * w->packed);
            product(past - i, w->Dp, w->Dp, columns, p->S, P, w->pitch, packs.values, m->out, w->Dp);
        }
        scatter(m->out, w->Dp, &p->context, band->b, h, i, past, p->D);
    }
}

/* ---- the parts of the backward pass ---- */

/* Of one row: A, a gradient of the dropped weights or zero, is turned into that of A_logit. */
static void softmax_backward(const Plan *w, const Scratch *m, const Band *band, int64_t h, int64_t i, const float *P,
                             const float *noise, float *A) {
    const Problem *p = &w->p;
    const int32_t *seen = m->seen + (i - (band->from - w->down)) * w->pitch;
    int64_t r = row_number(w, band->b, h, i), end = end_of(w, m, band, i);
    vf total = spread(0);
    for (int64_t s = 0; s < end; s += V) {
        vf x = load(A + s);
        if (noise) x *= load(noise + s);
        if (p->d_weights) x += row_load(w, m, p->d_weights, r, s);
        store(A + s, x);
        total += x * load(P + s);
    }
    float mean = sum(total);
    for (int64_t s = 0; s < end; s += V) {
        vf x = keep(load(P + s) * (load(A + s) - mean), loadi(seen + s));
        if (p->d_a_logit) x += row_load(w, m, p->d_a_logit, r, s);
        store(A + s, x);
    }
    zero(A + end, band->end - end);
}

/* G of head h, the ReLU's results, is turned into the gradient of the convolution's; zeros where there are no rows. The
   chunk's own rows add to the gradients of the bias and of c. */
static void relu_backward(const Plan *w, Scratch *m, const Band *band, int64_t h, int64_t i, int64_t past) {
    const Problem *p = &w->p;
    for (int64_t r = band->from - w->down; r < band->from - w->down + band->n; r++) {
        int64_t place = (h * w->tall + r - band->from + w->down + p->k - 1) * w->pitch;
        float *G = m->G + place, *A = m->A + place;
        if (r < i || r >= past) {
            zero(G, band->end + w->gap);
            continue;
        }
        int64_t end = end_of(w, m, band, r);
        vf total = spread(0), convolved = spread(0);
        for (int64_t s = 0; s < end; s += V) {
            vf relu = load(G + s), d = load(A + s), g = keep(p->c * d, relu > 0.0f);
            if (p->d_shares) convolved += d * (relu - carried(w, m, band, h, r, s));
            store(G + s, g);
            total += g;
        }
        zero(G + end, band->end - end + w->gap);
        if (r < band->own || r >= band->past) continue;
        store(m->d_bias + h * V, load(m->d_bias + h * V) + total);
        m->d_shares[2] += sum(convolved);
    }
}

/* A and G = gradients of A_logit and of the convolution's result of rows i to past; the chunk's own rows add to the
   gradient of the values. */
static void weigh_backward(const Plan *w, Scratch *m, const Band *band, float *packed, int64_t i, int64_t past) {
    const Problem *p = &w->p;
    int64_t row = i - (band->from - w->down), own = most(i, band->own), own_past = least(past, band->past);
    for (int64_t h = 0; h < p->K; h++) {
        const float *P = m->P + (h * w->band + row) * w->pitch, *d_context = p->d_context.data;
        float *A = m->A + (h * w->tall + row + p->k - 1) * w->pitch;
        const float *noise = p->threshold && d_context ? m->noise : NULL;
        if (d_context && i < past) {
            d_context += band->b * p->d_context.sb + h * p->d_context.sh;
            Packs packs = packs_of(w, packed + h * w->packed);
            gather(d_context, p->d_context.st, i, past, p->D, w->Dp, m->few);
            product(past - i, w->Sp, band->end, p->D, p->D, m->few, w->Dp, packs.values_across, A, w->pitch);
            const float *kept = dropped(w, m, band, h, i, past) + (own - i) * w->pitch;
            if (own < own_past) {
                pack_rows(d_context + own * p->d_context.st, p->d_context.st, own_past - own, p->D, w->Dp, m->few);
                add_product(least(p->S, band->end), w->Dp, own_past - own, kept, w->pitch, m->few,
                            m->d_v + h * p->S * w->Dp, w->Dp);
            }
        }
        for (int64_t r = i; r < past; r++, A += w->pitch, P += w->pitch) {
            if (!d_context) zero(A, band->end);
            softmax_backward(w, m, band, h, r, P, noise, A);
            if (noise) noise += w->Sp;
        }
        if (p->kernel) relu_backward(w, m, band, h, i, past);
    }
}

/* Gradients of `count` neighbouring taps of some output heads: sums of products of G with X, moved by the tap's place.
   X and G begin at the first of `rows` rows. */
INLINE void taps_at(const int heads, const int count, const Plan *w, int64_t rows, int64_t end, const float *X,
                    const float *G, float *to) {
    vf acc[3][4];
    for (int e = 0; e < count; e++) for (int o = 0; o < heads; o++) acc[e][o] = load(to + (e * 4 + o) * V);
    for (int64_t t = 0; t < rows; t++, X += w->pitch, G += w->pitch)
        for (int64_t s = 0; s < end; s += V) {
            vf x[3];
            for (int e = 0; e < count; e++) {
                x[e] = load(X + s + e);
                hold(&x[e]);
            }
            for (int o = 0; o < heads; o++) {
                vf g = load(G + o * w->tall * w->pitch + s);
                hold(&g);
                for (int e = 0; e < count; e++) acc[e][o] += g * x[e];
            }
        }
    for (int e = 0; e < count; e++) for (int o = 0; o < heads; o++) store(to + (e * 4 + o) * V, acc[e][o]);
}

INLINE void taps_of(const int heads, const Plan *w, int64_t rows, int64_t end, const float *X, const float *G, float *to) {
    int64_t k = w->p.k;
    for (int64_t c = 0; c < w->p.K; c++, X += w->tall * w->pitch)
        for (int64_t a = 0; a < k; a++, to += k * 4 * V) {
            int64_t e = 0, taps = taps_past((int)w->p.lower, k, a);
            for (; e + 3 <= taps; e += 3) taps_at(heads, 3, w, rows, end, X + a * w->pitch + e, G, to + e * 4 * V);
            if (e + 2 == taps) taps_at(heads, 2, w, rows, end, X + a * w->pitch + e, G, to + e * 4 * V);
            else if (e + 1 == taps) taps_at(heads, 1, w, rows, end, X + a * w->pitch + e, G, to + e * 4 * V);
        }
}

/* The gradient of the kernel, of rows i to past; a few at a time, so that G's of four heads stay in the first cache. */
static void kernel_backward(const Plan *w, Scratch *m, const Band *band, int64_t i, int64_t past) {
    const Problem *p = &w->p;
    int64_t few = most(1, 1024 / band->end);
    for (; i < past; i += few) {
        int64_t rows = least(few, past - i), row = i - (band->from - w->down), end = 0;
        for (int64_t r = i; r < i + rows; r++) end = most(end, end_of(w, m, band, r));
        const float *X = m->X + row * w->pitch - p->left;
        for (int64_t first = 0; first < p->K; first += 4) {
            const float *G = m->G + (first * w->tall + row + p->k - 1) * w->pitch;
            float *to = m->d_taps + first * p->K * p->k * p->k * V;
            switch (p->K - first) {
            case 1: taps_of(1, w, rows, end, X, G, to); break;
            case 2: taps_of(2, w, rows, end, X, G, to); break;
            case 3: taps_of(3, w, rows, end, X, G, to); break;
            default: taps_of(4, w, rows, end, X, G, to);
            }
        }
    }
}

/* Sums that make the gradients of a, b, d and e. */
typedef struct { vf previous_mixed, logits_mixed, previous_carried, logits_carried; } Shares;

/* At head h, row i, from column s on: what the gradients of what is mixed and of what is carried add to the shares'. */
INLINE void add_shares(const Plan *w, const Scratch *m, const Band *band, int64_t h, int64_t i, int64_t s, vf d_mixed,
                       vf d_carried, Shares *shares) {
    const Problem *p = &w->p;
    vf logits = load(m->L + (h * w->tall + i - band->from + p->k - 1) * w->pitch + s), previous = spread(0);
    if (p->previous) previous = row_load(w, m, p->previous, row_number(w, band->b, h, i), s);
    shares->previous_mixed += d_mixed * previous;
    shares->logits_mixed += d_mixed * logits;
    shares->previous_carried += d_carried * previous;
    shares->logits_carried += d_carried * logits;
}

/* Of four heads at `vectors` places of row i: A, the gradient of A_logit, is turned into that of the logits, times their
   scale; that of the previous map, in P's first rows, whose weights are no longer needed; and that of the shares. */
INLINE void mix_backward_at(int vectors, const Plan *w, Scratch *m, const Band *band, int64_t first, int64_t i,
                            int64_t s, Shares *shares) {
    const Problem *p = &w->p;
    int64_t row = i - band->from + p->k - 1, heads = least(4, p->K - first);
    int convolved = p->kernel != NULL, same = (int)p->same;
    float of_carried = convolved ? 1 - p->c : 1, scale = p->given ? 1 : p->scale;
    float mixed_logits = scale * p->b, carried_logits = scale * p->e;
    const int32_t *shown = m->shown + row * w->pitch + s;
    float *A = m->A + (first * w->tall + row + w->down) * w->pitch + s;
    float *d_previous = m->P + first * w->band * w->pitch + s;
    vf acc[4][3];
    for (int o = 0; o < 4; o++) for (int j = 0; j < vectors; j++) acc[o][j] = spread(0);
    if (convolved)
        convolve(vectors, 1, w, m->G + row * w->pitch + s - (p->k - 1 - p->left), m->turned, first, acc);
    for (int o = 0; o < 4; o++) {
        if (o == heads) break;
        for (int j = 0; j < vectors; j++) {
            vf d_mixed = acc[o][j], d_carried = of_carried * load(A + j * V);
            if (convolved) d_mixed = keep(d_mixed, loadi(shown + j * V));
            if (same) {
                d_mixed += d_carried;
                d_carried = spread(0);
            }
            if (shares) add_shares(w, m, band, first + o, i, s + j * V, d_mixed, d_carried, shares);
            store(A + j * V, mixed_logits * d_mixed + carried_logits * d_carried);
            if (p->d_previous) store(d_previous + j * V, p->a * d_mixed + p->d * d_carried);
        }
        A += w->tall * w->pitch;
        d_previous += w->band * w->pitch;
    }
}

/* A = gradient of the logits, times their scale, of rows i to past; that of the previous map, and of the shares. */
static void mix_backward(const Plan *w, Scratch *m, const Band *band, int64_t i, int64_t past) {
    const Problem *p = &w->p;
    for (; i < past; i++) {
        Shares shares = {0}, *wanted = p->d_shares ? &shares : NULL;
        int64_t end = end_of(w, m, band, i);
        for (int64_t s = 0, vectors; s < end; s += vectors * V) {
            vectors = vectors_at(s, end);
            if (p->kernel) foresee(w, m->G + (i - band->from + 2 * (p->k - 1)) * w->pitch + s, w->tall);
            foresee(w, m->A + (i - band->from + w->down + p->k - 1) * w->pitch + s, w->tall);
            for (int64_t first = 0; first < p->K; first += 4) mix_backward_at(vectors, w, m, band, first, i, s, wanted);
        }
        m->d_shares[0] += sum(shares.previous_mixed);
        m->d_shares[1] += sum(shares.logits_mixed);
        m->d_shares[3] += sum(shares.previous_carried);
        m->d_shares[4] += sum(shares.logits_carried);
        for (int64_t h = 0; p->d_given && h < p->K; h++)
            write_row(w, m->A + (h * w->tall + i - band->from + w->down + p->k - 1) * w->pitch, band->end, p->d_given,
                      row_number(w, band->b, h, i));
        for (int64_t h = 0; p->d_previous && h < p->K; h++)
            write_row(w, m->P + h * w->band * w->pitch, end, p->d_previous, row_number(w, band->b, h, i));
    }
}

/* Gradients of the queries of rows i to past; they add to those of the keys. */
static void look_backward(const Plan *w, Scratch *m, const Band *band, float *packed, int64_t i, int64_t past) {
    const Problem *p = &w->p;
    int64_t columns = least(p->S, band->end), rows = past - i;
    for (int64_t h = 0; h < p->K; h++) {
        const float *A = m->A + (h * w->tall + i - band->from + w->down + p->k - 1) * w->pitch;
        const float *q = p->q.data + band->b * p->q.sb + h * p->q.sh;
        Packs packs = packs_of(w, packed + h * w->packed);
        product(rows, w->Dp, w->Dp, columns, p->S, A, w->pitch, packs.keys, m->out, w->Dp);
        scatter(m->out, w->Dp, &p->d_q, band->b, h, i, past, p->D);
        pack_rows(q + i * p->q.st, p->q.st, rows, p->D, w->Dp, m->few);
        add_product(columns, w->Dp, rows, A, w->pitch, m->few, m->d_key + h * p->S * w->Dp, w->Dp);
    }
}

/* ---- a band, a chunk, a pass ---- */

/* Keep the last k - 1 rows of the band before, which had `n` rows and ended at column `end`; zeros from there on. */
static void roll(const Plan *w, Scratch *m, int64_t n, int64_t old_end, int64_t end) {
    float *maps[] = {w->p.kernel ? m->X : NULL, w->logits ? m->L : NULL, w->backward ? m->G : NULL,
                     w->backward ? m->A : NULL, (float *)m->shown};
    for (int number = 0; number < 5; number++)
        for (int64_t h = 0; maps[number] && h < (number == 4 ? 1 : w->p.K); h++)
            for (int64_t t = 0; t < w->p.k - 1; t++) {
                float *to = maps[number] + (h * w->tall + t) * w->pitch;
                memmove(to, to + n * w->pitch, old_end * sizeof(float));
                zero(to + old_end, end + w->gap - old_end);
            }
}

/* The rows above a chunk: outside of the map, but for those that are given. */
static void begin(const Plan *w, Scratch *m, int64_t b, int64_t from) {
    const Problem *p = &w->p;
    for (int64_t h = 0; p->kernel && h < p->K; h++) {
        for (int64_t t = 0; t < p->k - 1; t++) {
            zero(m->X + (h * w->tall + t) * w->pitch, w->Sp + w->gap);
            if (w->backward) zero(m->G + (h * w->tall + t) * w->pitch, w->Sp + w->gap);
        }
        for (int64_t t = 0; p->kept && from == 0 && t < p->top; t++) {
            float *row = m->X + (h * w->tall + p->k - 1 - p->top + t) * w->pitch;
            const float *above = p->above + ((b * p->K + h) * p->top + t) * p->before;
            if (p->before) memcpy(row, above, p->before * sizeof(float));
            if (t >= p->T) write_row(w, row, w->Sp, p->kept, (b * p->K + h) * p->top + t - p->T);
        }
    }
    if (!w->backward) return;
    zero(m->d_key, p->K * p->S * w->Dp);
    zero(m->d_v, p->K * p->S * w->Dp);
    zero(m->d_taps, p->kernel ? (p->K + 3) / 4 * 4 * p->K * p->k * p->k * V : 0);
    zero(m->d_bias, p->K * V);
    memset(m->d_shares, 0, sizeof m->d_shares);
}

static void work_on_band(const Plan *w, Scratch *m, const Band *band, float *packed) {
    const Problem *p = &w->p;
    int64_t before = w->backward ? w->down : 0, after = w->backward ? p->top : 0;
    /* the rows whose A_logit is known now, and those whose logits' gradient is */
    int64_t i = most(most(band->from - w->down, band->own - before), 0);
    int64_t past = least(least(band->from - w->down + band->n, band->past + after), p->T);
    int64_t first = most(band->from - (p->k - 1), band->own), last = least(band->from + band->n - (p->k - 1), band->past);
    mix(w, m, band, packed);
    if (i < past) weigh(w, m, band, i, past);
    if (!w->backward) {
        if (i < past) look(w, m, band, packed, i, past);
        return;
    }
    weigh_backward(w, m, band, packed, i, past);
    if (p->kernel) kernel_backward(w, m, band, most(i, band->own), least(past, band->past));
    if (first >= last) return;
    mix_backward(w, m, band, first, last);
    if (p->d_q.data) look_backward(w, m, band, packed, first, last);
}

/* A multiple of the six or four rows that products work on at a time. */
enum { ROWS_OF_TILES = 12 };

/* Returns the last column that was worked on, in whole vectors. */
static int64_t work_on_chunk(const Plan *w, Scratch *m, int64_t b, int64_t chunk, float *packed) {
    const Problem *p = &w->p;
    Band band = {.b = b, .own = chunk * w->chunk, .past = least((chunk + 1) * w->chunk, p->T)};
    int64_t from = most(band.own - (w->backward ? p->k - 1 : p->top), 0);
    int64_t past = band.past + (w->backward ? p->k - 1 : w->down);
    int64_t bands = (past - from + w->band - 1) / w->band, rows = (past - from + bands - 1) / bands;
    rows = least((rows + ROWS_OF_TILES - 1) / ROWS_OF_TILES * ROWS_OF_TILES, w->band);
    begin(w, m, b, from);
    for (band.from = from; band.from < past; band.from += rows) {
        int64_t old_end = band.end, n = band.n;
        band.n = least(rows, past - band.from);
        set_ends(w, m, &band, n);
        if (band.from > from) roll(w, m, n, old_end, band.end);
        work_on_band(w, m, &band, packed);
    }
    return band.end;
}

/* The chunk's parts of sums over a sentence's rows; the chunk that is worked on first begins them. */
static void add_up(const Plan *w, const Scratch *m, int64_t b, int64_t end, int begins) {
    const Problem *p = &w->p;
    int64_t K = p->K, k = p->k;
    for (int64_t h = 0; h < K; h++) {
        const Vectors *to[] = {&p->d_v, &p->d_key};
        const float *parts[] = {m->d_v, m->d_key};
        for (int number = 0; number < (p->d_key.data ? 2 : 1); number++)
            for (int64_t s = 0; s < (begins ? p->S : least(p->S, end)); s++) {
                float *row = to[number]->data + b * to[number]->sb + h * to[number]->sh + s * to[number]->st;
                const float *part = parts[number] + (h * p->S + s) * w->Dp;
                if (w->chunks > 1) foresee_vector(row, to[number]->st, p->D); /* else caches may still have it */
                if (begins) copy(part, p->D, row);
                else add(part, p->D, row);
            }
        if (!p->kernel) continue;
        p->d_bias[b * K + h] = (begins ? 0 : p->d_bias[b * K + h]) + sum(load(m->d_bias + h * V));
        for (int64_t tap = 0; tap < K * k * k; tap++) {
            float *total = p->d_kernel + (b * K + h) * K * k * k + tap;
            float part = sum(load(m->d_taps + ((h / 4 * K * k * k + tap) * 4 + h % 4) * V));
            *total = begins ? part : *total + part;
        }
    }
    for (int i = 0; p->d_shares && i < 5; i++)
        p->d_shares[5 * b + i] = (begins ? 0 : p->d_shares[5 * b + i]) + m->d_shares[i];
}

/* Take part of a thread's memory, with a vector more on both sides: loads may reach past the ends. */
static float *take(char **next, int64_t floats) {
    float *taken = (float *)*next + V;
    *next += (whole(floats) + 2 * V) * sizeof(float);
    return taken;
}

/* Lay the scratch out in `memory`, or only measure it where that is NULL: the bytes needed. */
static int64_t lay_out(const Plan *w, char *memory, Scratch *m) {
    const Problem *p = &w->p;
    int64_t map = p->K * w->tall * w->pitch + w->gap, K4 = (p->K + 3) / 4 * 4, taps = p->kernel ? K4 * p->K * p->k * p->k : 0;
    int backward = w->backward;
    char *next = memory;
    m->X = take(&next, p->kernel ? map : 0) + w->gap;
    m->G = take(&next, backward && p->kernel ? map : 0) + w->gap;
    int64_t zeroed = next - memory;
    m->L = take(&next, w->logits ? map : 0);
    m->A = take(&next, backward ? map : 0);
    m->P = take(&next, p->K * w->band * w->pitch);
    m->dropped = take(&next, p->threshold ? w->band * w->pitch : 0);
    m->noise = take(&next, p->threshold ? w->band * w->Sp : 0);
    m->seen = (int32_t *)take(&next, w->band * w->pitch);
    m->shown = (int32_t *)take(&next, w->tall * w->pitch);
    m->ends = (int64_t *)take(&next, 2 * w->tall);
    m->inside = (int32_t *)take(&next, w->Sp);
    m->few = take(&next, w->band * w->Dp);
    m->out = take(&next, w->band * w->Dp);
    m->d_key = take(&next, backward ? p->K * p->S * w->Dp : 0);
    m->d_v = take(&next, backward ? p->K * p->S * w->Dp : 0);
    m->taps = take(&next, taps);
    m->turned = take(&next, backward ? taps : 0);
    m->d_taps = take(&next, backward ? taps * V : 0);
    m->d_bias = take(&next, p->K * V);
    m->packs = take(&next, w->chunks == 1 ? p->K * w->packed : 0);
    if (!memory) return next - memory;
    memset(memory, 0, zeroed); /* the zeros between the rows of X and G, once: what is inside is written each time */
    for (int64_t s = 0; s < w->Sp; s++) m->inside[s] = s < p->S ? -1 : 0;
    if (p->kernel) order_taps(p, 0, m->taps);
    if (p->kernel && backward) order_taps(p, 1, m->turned);
    return next - memory;
}

/* Rows in a band: what is read and written of its maps, four in the backward pass, stays in the second cache, but not
   so few that products and the rows at a band's edges cost too much. */
enum { BAND_BYTES = 512 << 10, FEWEST_ROWS = 36, MOST_ROWS = 60 };

static Plan plan(const Problem *p, int backward) {
    Plan w = {.p = *p, .backward = backward};
    if (!p->kernel) {
        w.p.k = 1;
        w.p.left = w.p.top = w.p.same = 0;
    }
    w.skips = p->masked.data && !p->a_logit && !p->d_a_logit && (!p->kernel || p->hidden.data);
    int unseen = !p->a_logit && !p->d_a_logit && !memcmp(&p->hidden, &p->masked, sizeof(Mask));
    w.reads_mixed = w.p.same && (!p->hidden.data || unseen);
    w.logits = !w.reads_mixed || (backward && p->d_shares);
    w.floats = p->B * p->K * p->T * p->S;
    w.down = w.p.k - 1 - w.p.top;
    w.gap = whole(w.p.k - 1);
    w.taps = p->lower ? w.p.k * (w.p.k + 1) / 2 : w.p.k * w.p.k;
    w.Sp = whole(p->S);
    w.Dp = whole(p->D);
    w.pitch = w.Sp + w.gap;
    if (w.pitch % 256 == 0) w.pitch += V; /* else rows would push one another out of the first cache */
    /* Sixteen in all or more, so that many threads have work; but not shorter than need be, for each has its price. */
    w.chunk = least(most(p->B * p->T / 16, 64), 256);
    w.chunks = (p->T + w.chunk - 1) / w.chunk;
    w.chunk = (p->T + w.chunks - 1) / w.chunks;
    int64_t fitting = BAND_BYTES / (p->K * w.pitch * (int64_t)sizeof(float) * (backward ? 4 : 2));
    w.band = least(most(FEWEST_ROWS, least(fitting, MOST_ROWS)), w.chunk + 2 * (w.p.k - 1));
    w.tall = w.band + w.p.k - 1;
    if (p->T > 1 || backward) w.packed = whole((backward ? 2 : 1) * p->D * w.Sp + p->S * w.Dp + V);
    return w;
}

/* All sentences, one at a time: a thread packs its own. */
static void share_sentences(const Plan *w, Scratch *m) {
#pragma omp for schedule(dynamic)
    for (int64_t b = 0; b < w->p.B; b++) {
        if (!m->packs) continue; /* there was no memory */
        for (int64_t h = 0; w->packed && h < w->p.K; h++) pack_head(w, b, h, m->packs + h * w->packed);
        int64_t end = work_on_chunk(w, m, b, 0, m->packs);
        if (w->backward) add_up(w, m, b, end, 1);
    }
}

/* Sentences b to past, by chunks: threads share what is packed. Chunks add to sums in the order in which they are worked on. */
static void share_chunks(const Plan *w, Scratch *m, int64_t b, int64_t past, float *packs) {
    int64_t K = w->p.K, tasks = (past - b) * w->chunks;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (past - b) * K; i++) pack_head(w, b + i / K, i % K, packs + i * w->packed);
    if (!w->backward) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = tasks - 1; i >= 0; i--) /* those with the most columns first */
            if (m->packs) work_on_chunk(w, m, b + i / w->chunks, i % w->chunks, packs + i / w->chunks * K * w->packed);
        return;
    }
#pragma omp for schedule(dynamic, 1) ordered
    for (int64_t i = 0; i < tasks; i++) {
        /* Every other sentence backwards: where later chunks have more columns, the short one after a long one would
           otherwise have to wait for it. */
        int64_t number = i / w->chunks, at = i % w->chunks, chunk = number % 2 ? w->chunks - 1 - at : at, end = 0;
        if (m->packs) end = work_on_chunk(w, m, b + number, chunk, packs + number * K * w->packed);
#pragma omp ordered
        if (m->packs) add_up(w, m, b + number, end, at == 0);
    }
}

/* Memory for packed matrices that threads share at a time, if one sentence does not take more; and what a thread keeps of
   its own from call to call. */
enum { PACKED_BYTES = 24 << 20, KEPT_BYTES = 8 << 20 };

/* Run one pass on at most `threads` threads; 0, or 1 where there is not enough memory. */
static int run(const Problem *p, int backward, int threads) {
    Plan w = plan(p, backward);
    Scratch measured;
    size_t bytes = lay_out(&w, NULL, &measured), sentence = p->K * w.packed * sizeof(float);
    int64_t group = w.chunks == 1 ? p->B : least(p->B, most(1, PACKED_BYTES / (int64_t)most(sentence, 1)));
    float *packs = w.chunks == 1 ? NULL : (float *)take_arena(1, group * sentence);
    int failed = w.chunks > 1 && !packs;
    double of_pixel = 4 * p->D + (p->kernel ? 2 * p->K * p->k * p->k : 0);
    threads = worthwhile(of_pixel * p->B * p->K * p->T * p->S, p->B * w.chunks, threads);
    if (failed) return failed;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch m;
        char *memory = take_arena(0, bytes);
        if (memory) {
            lay_out(&w, memory, &m);
        } else {
            m.packs = NULL;
#pragma omp atomic write
            failed = 1;
        }
        if (w.chunks == 1) share_sentences(&w, &m);
        else for (int64_t b = 0; b < p->B; b += group) share_chunks(&w, &m, b, least(b + group, p->B), packs);
        leave_arena(0, KEPT_BYTES);
    }
    leave_arena(1, PACKED_BYTES);
    return failed;
}

int evolving_attention_forward(const Problem *p, int threads) { return run(p, 0, threads); }
int evolving_attention_backward(const Problem *p, int threads) { return run(p, 1, threads); }
