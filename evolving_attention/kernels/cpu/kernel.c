/* Evolving attention on the CPU, float32: from queries, keys and values to the context, and all gradients.

       logits  = given, or scale * q k^T
       mixed   = a * previous + b * logits                  zero where hidden; what the convolution reads
       carried = d * previous + e * logits
       A_logit = c * ReLU(Conv(mixed)) + (1 - c) * carried
       context = dropout(softmax(mask(A_logit))) v

   A thread does one sentence after another, so that short maps stay in its caches; where sentences are fewer than
   threads, all threads share one. A sentence is done in phases: of heads, for products, and of rows of all heads, for the
   convolution. Nothing of a map is kept for the backward pass, which computes it again.

   Each number is made by one task, and every sum has one order: so bits do not depend on the number of threads.

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

/* What a call works on; arrays of maps are B x K x T x S, contiguous, and NULL where there are none. structures.py has
   the same fields. */
typedef struct {
    int64_t B, K, T, S, D, k;
    int64_t before;              /* columns of the rows above */
    int64_t left, top;           /* how far the kernel reaches to the left and up */
    int64_t lower;               /* 1: without the kernel's strict upper triangle */
    int64_t same;                /* 1: what is carried is what is mixed, zeros at hidden places included */
    float scale;                 /* of q k^T */
    float a, b, c, d, e;         /* the shares above; a and d are 0 where there is no previous map */
    uint32_t threshold;          /* dropout: a weight is dropped where its 16 random bits are below this */
    uint64_t seed;               /* of dropout's random bits */
    Vectors q, key, v;           /* q and key are not read where logits are given */
    Mask hidden, masked;         /* from the convolution; from attention */
    const float *previous;       /* A_logit of the layer before */
    const float *above;          /* B x K x top x before, mixed of the rows before these; NULL: zeros */
    const float *kernel, *bias;  /* K x K x k x k, K; NULL: no convolution, and A_logit is what is carried */
    const float *given;          /* logits, or NULL */
    int64_t beams;               /* neighbouring rows of B that share keys and values */
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

/* One sentence's work: what follows from the problem's shapes, and memory. Maps are K x T x pitch; those that the
   convolution reads have zeros around, and k - 1 rows more. */
typedef struct {
    Problem p;              /* its kernel 1 x 1 where nothing is convolved */
    int backward;
    int skips;              /* whether what is masked and hidden on the right may be left out: nobody asks for maps */
    int64_t b;              /* the sentence */
    int64_t down, gap;      /* how far the kernel reaches down; zeros between rows, for what it reads beside the map */
    int64_t Sp, Dp, pitch;  /* S and D, rounded up to whole vectors; floats from row to row */
    int64_t tall;           /* rows of the maps that the convolution reads */
    int64_t taps;           /* of one head's kernel for another, without its strict upper triangle if that is left out */
    float *X, *G;           /* what is mixed, row i at i + top; gradients of the convolution's result, row i at i + down */
    float *L;               /* logits, where they are needed after they were mixed */
    float *P, *A;           /* A_logit, then the weights; gradients of A_logit, then of the logits */
    float *N;               /* what dropout multiplies weights with, then weights after dropout */
    int32_t *seen, *shown;  /* T x pitch: all bits where attention, and where the convolution may see */
    int64_t *ends;          /* T: rows' columns that are worked on, whole vectors; beyond all is masked and hidden */
    int32_t *inside;        /* Sp: all bits in the S columns that there are */
    float *rows, *columns, *out; /* of each head: vectors side by side, vectors turned, a product of them */
    float *order, *turned;  /* the kernel in the order of the loops, and turned round for the backward pass */
    float *d_taps;          /* gradients of the taps, whole vectors that are still to be summed */
    double *of_rows, *of_heads; /* T x 4 and K: parts of the gradients of a, b, d, e, and of c */
} Work;

/* Rows of a head that products work on at a time. */
enum { BLOCK = 48 };

INLINE float *head(const Work *w, float *maps, int64_t h) { return maps + h * w->p.T * w->pitch; }
INLINE float *framed(const Work *w, float *maps, int64_t h, int64_t i) { return maps + (h * w->tall + i) * w->pitch; }
INLINE int64_t row_number(const Work *w, int64_t h, int64_t i) { return (w->b * w->p.K + h) * w->p.T + i; }
static void zero(float *row, int64_t floats) { memset(row, 0, floats * sizeof(float)); }

/* Where vector t of head h of this sentence begins. */
INLINE float *vector(const Work *w, const Vectors *x, int64_t h, int64_t t) {
    return x->data + w->b * x->sb + h * x->sh + t * x->st;
}

/* Where the keys or values of head h begin that this sentence looks at. */
INLINE float *shared(const Work *w, const Vectors *x, int64_t h) {
    return x->data + w->b / w->p.beams * x->sb + h * x->sh;
}

/* A head's part of memory that every head has. */
INLINE float *rows_of(const Work *w, int64_t h) { return w->rows + h * most(w->p.T, w->p.S) * w->Dp; }
INLINE float *out_of(const Work *w, int64_t h) { return w->out + h * most(w->p.T, w->p.S) * w->Dp; }
INLINE float *columns_of(const Work *w, int64_t h) { return w->columns + h * w->Dp * w->pitch; }

/* Element s of row r of an array of maps, which is not padded, and what follows; zeros past the row's end. */
INLINE vf row_load(const Work *w, const float *maps, int64_t r, int64_t s) {
    const Problem *p = &w->p;
    const float *from = maps + r * p->S + s;
    if (r + 1 < p->B * p->K * p->T || s + V <= p->S) return keep(load(from), loadi(w->inside + s));
    return load_first(from, p->S - s); /* the end of the array */
}

static void write_row(const Work *w, const float *from, float *maps, int64_t r) {
    memcpy(maps + r * w->p.S, from, w->p.S * sizeof(float));
}

/* ---- masks ---- */

/* All bits where a row's mask is not set; none past its end. */
static void bits(const Work *w, const Mask *mask, int64_t i, int32_t *to) {
    memcpy(to, w->inside, w->Sp * sizeof(int32_t));
    if (!mask->data) return;
    const uint8_t *row = mask->data + w->b * mask->sb + i * mask->st;
    if (mask->ss == 1) for (int64_t s = 0; s < w->p.S; s++) to[s] = (int32_t)row[s] - 1;
    else for (int64_t s = 0; s < w->p.S; s++) to[s] = (int32_t)row[s * mask->ss] - 1;
}

/* Columns of a row of bits up to the last that is set. */
static int64_t last(const int32_t *row, int64_t S) {
    while (S > 0 && !row[S - 1]) S--;
    return S;
}

static void read_masks(Work *w, int64_t i) {
    const Problem *p = &w->p;
    int32_t *seen = w->seen + i * w->pitch, *shown = w->shown + i * w->pitch;
    bits(w, &p->masked, i, seen);
    if (p->kernel) bits(w, &p->hidden, i, shown);
    w->ends[i] = w->Sp;
    if (!w->skips) return;
    int64_t end = last(seen, p->S);
    if (end == 0) return; /* a row that is all masked gets equal weights */
    w->ends[i] = whole(most(end, p->kernel ? last(shown, p->S) : 0));
}

/* Columns that must be worked on in a block of rows. */
static int64_t block_end(const Work *w, int64_t i, int64_t past) {
    int64_t end = 0;
    for (; i < past; i++) end = most(end, w->ends[i]);
    return end;
}

/* ---- the parts of the forward pass ---- */

/* of_previous * previous + of_logits * logits; what has no share is not read, so that infinities there do no harm. */
INLINE vf weighted(float of_previous, vf previous, float of_logits, vf logits) {
    if (of_previous == 0) return of_logits * logits;
    if (of_logits == 0) return of_previous * previous;
    return of_previous * previous + of_logits * logits;
}

/* L, where it is needed, and X of a row whose logits are in `logits`, from which they may be overwritten. */
static void mix_row(const Work *w, int64_t h, int64_t i, int64_t end, float *logits) {
    const Problem *p = &w->p;
    float scale = p->given ? 1 : p->scale, *X = p->kernel ? framed(w, w->X, h, i + p->top) : NULL;
    for (int64_t s = 0; s < end; s += V) {
        vf x = p->given ? row_load(w, p->given, row_number(w, h, i), s) : scale * load(logits + s), previous = spread(0);
        if (w->L) store(logits + s, x);
        if (!X) continue;
        if (p->previous) previous = row_load(w, p->previous, row_number(w, h, i), s);
        store(X + s, keep(weighted(p->a, previous, p->b, x), loadi(w->shown + i * w->pitch + s)));
    }
    if (X) zero(X + end, w->Sp - end);
}

/* X, and L where it is needed, of head h. */
static void mix_head(Work *w, int64_t h) {
    const Problem *p = &w->p;
    float *logits = w->L ? head(w, w->L, h) : framed(w, w->X, h, p->top), *queries = rows_of(w, h);
    int one = p->T == 1 && !w->backward && !p->given;
    if (one) {
        row_of_products(vector(w, &p->q, h, 0), shared(w, &p->key, h), p->key.st, p->S, p->D, logits);
        zero(logits + p->S, w->Sp - p->S);
    } else if (!p->given) {
        gather(vector(w, &p->q, h, 0), p->q.st, p->T, p->D, w->Dp, queries);
        gather_turned(shared(w, &p->key, h), p->key.st, p->S, p->D, w->pitch, columns_of(w, h));
    }
    for (int64_t t = 0; p->above && t < p->top; t++)
        memcpy(framed(w, w->X, h, t), p->above + ((w->b * p->K + h) * p->top + t) * p->before, p->before * sizeof(float));
    for (int64_t from = 0; from < p->T; from += BLOCK) {
        int64_t past = least(from + BLOCK, p->T), end = block_end(w, from, past);
        float *to = logits + from * w->pitch;
        if (!p->given && !one)
            product(past - from, end, p->D, queries + from * w->Dp, w->Dp, columns_of(w, h), w->pitch, to, w->pitch);
        for (int64_t i = from; i < past; i++) mix_row(w, h, i, end, logits + i * w->pitch);
    }
    for (int64_t t = 0; p->kept && t < p->top; t++)
        write_row(w, framed(w, w->X, h, p->T + t), p->kept, (w->b * p->K + h) * p->top + t);
}

/* Columns of the kernel's row a that have taps: without its strict upper triangle, up to the diagonal. */
INLINE int64_t taps_past(int lower, int64_t size, int64_t a) { return lower ? a + 1 : size; }

/* The kernel's taps for output heads o, o + 1, ... side by side: ((o / 4, c, a, b), o % 4). */
static void order_taps(const Problem *p, float *to) {
    int64_t K = p->K, k = p->k;
    for (int64_t first = 0; first < K; first += 4)
        for (int64_t c = 0; c < K; c++)
            for (int64_t a = 0; a < k; a++)
                for (int64_t b = 0; b < taps_past((int)p->lower, k, a); b++)
                    for (int64_t o = first; o < first + 4; o++)
                        *to++ = o < K ? p->kernel[((o * K + c) * k + a) * k + b] : 0;
}

/* The same for the gradient of the input: heads c side by side, the kernel turned round. */
static void order_taps_turned(const Problem *p, float *to) {
    int64_t K = p->K, k = p->k;
    for (int64_t first = 0; first < K; first += 4)
        for (int64_t o = 0; o < K; o++)
            for (int64_t a = k - 1; a >= 0; a--)
                for (int64_t b = taps_past((int)p->lower, k, a) - 1; b >= 0; b--)
                    for (int64_t c = first; c < first + 4; c++)
                        *to++ = c < K ? p->kernel[((o * K + c) * k + a) * k + b] : 0;
}

/* Four heads' convolution, with a kernel of `size`, at `vectors` places: sums[o][j] += taps * maps, whose first row and
   column are given. */
INLINE void convolve_at(const int vectors, const int lower, const int turned, int64_t size, const Work *w,
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

INLINE void convolve_some(const int vectors, int turned, const Work *w, const float *maps, const float *taps,
                          vf sums[4][3]) {
    int64_t size = w->p.k;
    if (size == 3 && !w->p.lower) convolve_at(vectors, 0, 0, 3, w, maps, taps, sums);
    else if (size == 3 && turned) convolve_at(vectors, 1, 1, 3, w, maps, taps, sums);
    else if (size == 3) convolve_at(vectors, 1, 0, 3, w, maps, taps, sums);
    else convolve_at(vectors, (int)w->p.lower, turned, size, w, maps, taps, sums);
}

APART void convolve_one(int turned, const Work *w, const float *maps, const float *taps, vf sums[4][3]) {
    convolve_some(1, turned, w, maps, taps, sums);
}
APART void convolve_two(int turned, const Work *w, const float *maps, const float *taps, vf sums[4][3]) {
    convolve_some(2, turned, w, maps, taps, sums);
}
APART void convolve_three(int turned, const Work *w, const float *maps, const float *taps, vf sums[4][3]) {
    convolve_some(3, turned, w, maps, taps, sums);
}

/* The sums of heads `first` to first + 3. */
INLINE void convolve(const int vectors, int turned, const Work *w, const float *maps, const float *taps, int64_t first,
                     vf sums[4][3]) {
    taps += first * w->p.K * w->taps;
    if (vectors == 1) convolve_one(turned, w, maps, taps, sums);
    else if (vectors == 2) convolve_two(turned, w, maps, taps, sums);
    else convolve_three(turned, w, maps, taps, sums);
}

/* What is carried at head h, row i, from column s on. */
INLINE vf carried(const Work *w, int64_t h, int64_t i, int64_t s) {
    const Problem *p = &w->p;
    if (p->same) return load(framed(w, w->X, h, i + p->top) + s);
    vf previous = p->d ? row_load(w, p->previous, row_number(w, h, i), s) : spread(0);
    return weighted(p->d, previous, p->e, load(head(w, w->L, h) + i * w->pitch + s));
}

/* P = A_logit of four heads at `vectors` places of row i; in the backward pass G = ReLU(Conv(X)). The number is constant,
   so that sums stay in registers. */
INLINE void evolve_at(const int vectors, Work *w, int64_t first, int64_t i, int64_t s) {
    const Problem *p = &w->p;
    int64_t heads = least(4, p->K - first);
    vf acc[4][3];
    for (int o = 0; o < 4; o++) for (int j = 0; j < vectors; j++) acc[o][j] = spread(o < heads ? p->bias[first + o] : 0);
    convolve(vectors, 0, w, framed(w, w->X, 0, i) + s - p->left, w->order, first, acc);
    for (int o = 0; o < 4; o++) {
        if (o == heads) break;
        float *P = head(w, w->P, first + o) + i * w->pitch + s;
        for (int j = 0; j < vectors; j++) {
            vf r = choose(acc[o][j] <= 0.0f, spread(0), acc[o][j]);
            if (w->backward) store(framed(w, w->G, first + o, i + w->down) + s + j * V, r);
            store(P + j * V, p->c * r + (1 - p->c) * carried(w, first + o, i, s + j * V));
        }
    }
}

/* P = A_logit of row i of all heads. */
static void evolve_row(Work *w, int64_t i) {
    const Problem *p = &w->p;
    int64_t end = w->ends[i];
    for (int64_t h = 0; !p->kernel && h < p->K; h++)
        for (int64_t s = 0; s < end; s += V) store(head(w, w->P, h) + i * w->pitch + s, carried(w, h, i, s));
    for (int64_t s = 0, vectors; p->kernel && s < end; s += vectors * V) {
        vectors = vectors_at(s, end);
        for (int64_t first = 0; first < p->K; first += 4) {
            if (vectors == 1) evolve_at(1, w, first, i, s);
            else if (vectors == 2) evolve_at(2, w, first, i, s);
            else evolve_at(3, w, first, i, s);
        }
    }
}

/* A row of weights from one of A_logit; a row that is all masked gets equal weights, as everywhere. */
static void softmax_row(const Work *w, int64_t end, const int32_t *seen, float *row) {
    vf top = spread(-INFINITY);
    for (int64_t s = 0; s < end; s += V) {
        vf x = choose(loadi(seen + s), load(row + s), spread(-__FLT_MAX__));
        x = choose(loadi(w->inside + s), x, spread(-INFINITY));
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

/* P = the weights of row i of all heads; results that are maps are written. */
static void weigh_row(Work *w, int64_t i) {
    const Problem *p = &w->p;
    int64_t end = w->ends[i];
    evolve_row(w, i);
    for (int64_t h = 0; h < p->K; h++) {
        float *row = head(w, w->P, h) + i * w->pitch;
        if (p->a_logit) write_row(w, row, p->a_logit, row_number(w, h, i));
        softmax_row(w, end, w->seen + i * w->pitch, row);
        zero(row + end, w->Sp - end);
        if (p->weights) write_row(w, row, p->weights, row_number(w, h, i));
    }
}

/* N = dropout's noise for a head's map of T x Sp, drawn for eight vectors at a time. */
static void draw_noise_of(Work *w, int64_t h) {
    int64_t i = 0, s = 0;
    float *N = head(w, w->N, h);
    for (int64_t block = 0; i < w->p.T; block++) {
        vf noise[8];
        draw_noise((uint64_t)block, (uint32_t)h, (uint32_t)w->b, w->p.seed, w->p.threshold, noise);
        for (int number = 0; number < 8 && i < w->p.T; number++) {
            store(N + i * w->pitch + s, noise[number]);
            s += V;
            if (s < w->Sp) continue;
            s = 0;
            i++;
        }
    }
}

/* N = N * P, the weights after dropout of head h. */
static void drop(Work *w, int64_t h) {
    float *N = head(w, w->N, h);
    const float *P = head(w, w->P, h);
    for (int64_t i = 0; i < w->p.T; i++)
        for (int64_t s = i * w->pitch; s < i * w->pitch + w->Sp; s += V) store(N + s, load(N + s) * load(P + s));
}

/* Vectors that lie side by side to where they belong. */
static void scatter(const Work *w, const float *from, const Vectors *to, int64_t h, int64_t count) {
    for (int64_t t = 0; t < count; t++, from += w->Dp) memcpy(vector(w, to, h, t), from, w->p.D * sizeof(float));
}

/* The context of head h. */
static void look_head(Work *w, int64_t h) {
    const Problem *p = &w->p;
    const float *P = head(w, p->threshold ? w->N : w->P, h);
    if (p->threshold) {
        draw_noise_of(w, h);
        drop(w, h);
    }
    if (p->T == 1) {
        row_of_context(P, shared(w, &p->v, h), p->v.st, p->S, p->D, vector(w, &p->context, h, 0));
        return;
    }
    gather(shared(w, &p->v, h), p->v.st, p->S, p->D, w->Dp, rows_of(w, h));
    for (int64_t from = 0; from < p->T; from += BLOCK) {
        int64_t past = least(from + BLOCK, p->T), columns = least(p->S, block_end(w, from, past));
        product(past - from, w->Dp, columns, P + from * w->pitch, w->pitch, rows_of(w, h), w->Dp,
                out_of(w, h) + from * w->Dp, w->Dp);
    }
    scatter(w, out_of(w, h), &p->context, h, p->T);
}

/* ---- the parts of the backward pass ---- */

/* Of one row: A, a gradient of the weights or zero, is turned into that of A_logit. */
static void softmax_backward(const Work *w, int64_t h, int64_t i) {
    const Problem *p = &w->p;
    const int32_t *seen = w->seen + i * w->pitch;
    const float *P = head(w, w->P, h) + i * w->pitch;
    float *A = head(w, w->A, h) + i * w->pitch;
    int64_t r = row_number(w, h, i), end = w->ends[i];
    vf total = spread(0);
    for (int64_t s = 0; s < end; s += V) {
        vf x = p->d_context.data ? load(A + s) : spread(0);
        if (p->d_weights) x += row_load(w, p->d_weights, r, s);
        store(A + s, x);
        total += x * load(P + s);
    }
    float mean = sum(total);
    for (int64_t s = 0; s < end; s += V) {
        vf x = keep(load(P + s) * (load(A + s) - mean), loadi(seen + s));
        if (p->d_a_logit) x += row_load(w, p->d_a_logit, r, s);
        store(A + s, x);
    }
    zero(A + end, w->Sp - end);
}

/* G of head h, the ReLU's results, is turned into the gradient of the convolution's. */
static void relu_backward(Work *w, int64_t h) {
    const Problem *p = &w->p;
    vf total = spread(0);
    w->of_heads[h] = 0;
    for (int64_t i = 0; i < p->T; i++) {
        float *G = framed(w, w->G, h, i + w->down), *A = head(w, w->A, h) + i * w->pitch;
        int64_t end = w->ends[i];
        vf convolved = spread(0);
        for (int64_t s = 0; s < end; s += V) {
            vf relu = load(G + s), d = load(A + s), g = keep(p->c * d, relu > 0.0f);
            if (p->d_shares) convolved += d * (relu - carried(w, h, i, s));
            store(G + s, g);
            total += g;
        }
        zero(G + end, w->Sp - end);
        w->of_heads[h] += sum(convolved);
    }
    p->d_bias[w->b * p->K + h] = sum(total);
}

/* A and G = gradients of A_logit and of the convolution's result of head h, and the gradient of the values. */
static void weigh_backward(Work *w, int64_t h) {
    const Problem *p = &w->p;
    float *A = head(w, w->A, h), *N = p->threshold ? head(w, w->N, h) : NULL, *of_context = rows_of(w, h);
    if (N) draw_noise_of(w, h);
    if (p->d_context.data) {
        gather(vector(w, &p->d_context, h, 0), p->d_context.st, p->T, p->D, w->Dp, of_context);
        gather_turned(vector(w, &p->v, h, 0), p->v.st, p->S, p->D, w->pitch, columns_of(w, h));
        for (int64_t from = 0; from < p->T; from += BLOCK) {
            int64_t past = least(from + BLOCK, p->T), end = block_end(w, from, past);
            product(past - from, end, p->D, of_context + from * w->Dp, w->Dp, columns_of(w, h), w->pitch,
                    A + from * w->pitch, w->pitch);
            for (int64_t i = from; N && i < past; i++)
                for (int64_t s = i * w->pitch; s < i * w->pitch + end; s += V) store(A + s, load(A + s) * load(N + s));
        }
    }
    for (int64_t i = 0; i < p->T; i++) softmax_backward(w, h, i);
    if (p->kernel) relu_backward(w, h);
    if (!p->d_context.data) return;
    if (N) drop(w, h);
    const float *P = N ? N : head(w, w->P, h);
    zero(out_of(w, h), p->S * w->Dp);
    for (int64_t from = 0; from < p->T; from += BLOCK) {
        int64_t past = least(from + BLOCK, p->T), columns = least(p->S, block_end(w, from, past));
        add_product(columns, w->Dp, past - from, P + from * w->pitch, w->pitch, of_context + from * w->Dp, w->Dp,
                    out_of(w, h), w->Dp);
    }
    scatter(w, out_of(w, h), &p->d_v, h, p->S);
}

/* Gradients of `count` neighbouring taps of four output heads: sums of products of G with X, moved by the tap's place.
   X and G begin at the first of `rows` rows. */
INLINE void taps_at(const int count, const Work *w, int64_t heads, int64_t rows, int64_t end, const float *X,
                    const float *G, float *to) {
    vf acc[3][4];
    for (int e = 0; e < count; e++) for (int o = 0; o < 4; o++) acc[e][o] = load(to + (e * 4 + o) * V);
    for (int64_t t = 0; t < rows; t++, X += w->pitch, G += w->pitch)
        for (int64_t s = 0; s < end; s += V) {
            vf x[3];
            for (int e = 0; e < count; e++) {
                x[e] = load(X + s + e);
                hold(&x[e]);
            }
            for (int o = 0; o < 4; o++) { /* heads that are not there: the last one again, whose sums nobody reads */
                vf g = load(G + least(o, heads - 1) * w->tall * w->pitch + s);
                hold(&g);
                for (int e = 0; e < count; e++) acc[e][o] += g * x[e];
            }
        }
    for (int e = 0; e < count; e++) for (int o = 0; o < 4; o++) store(to + (e * 4 + o) * V, acc[e][o]);
}

/* The gradient of the kernel: a task is four output heads and an input head. A few rows at a time, so that G's of four
   heads stay in the first cache. */
static void kernel_backward(Work *w, int64_t task) {
    const Problem *p = &w->p;
    int64_t k = p->k, first = task / p->K * 4, c = task % p->K, heads = least(4, p->K - first);
    float *parts = w->d_taps + task * k * k * 4 * V;
    zero(parts, k * k * 4 * V);
    for (int64_t i = 0, past; i < p->T; i = past) {
        past = least(i + most(1, 1024 / w->Sp), p->T);
        int64_t end = block_end(w, i, past);
        const float *G = framed(w, w->G, first, i + w->down);
        for (int64_t a = 0; a < k; a++) {
            int64_t e = 0, taps = taps_past((int)p->lower, k, a);
            const float *X = framed(w, w->X, c, i + a) - p->left;
            float *to = parts + a * k * 4 * V;
            for (; e + 3 <= taps; e += 3) taps_at(3, w, heads, past - i, end, X + e, G, to + e * 4 * V);
            if (e + 2 == taps) taps_at(2, w, heads, past - i, end, X + e, G, to + e * 4 * V);
            else if (e + 1 == taps) taps_at(1, w, heads, past - i, end, X + e, G, to + e * 4 * V);
        }
    }
    for (int64_t o = 0; o < heads; o++)
        for (int64_t tap = 0; tap < k * k; tap++)
            p->d_kernel[((w->b * p->K + first + o) * p->K + c) * k * k + tap] = sum(load(parts + (tap * 4 + o) * V));
}

/* Sums that make the gradients of a, b, d and e. */
typedef struct { vf previous_mixed, logits_mixed, previous_carried, logits_carried; } Shares;

/* At head h, row i, from column s on: what the gradients of what is mixed and of what is carried add to the shares'. */
INLINE void add_shares(const Work *w, int64_t h, int64_t i, int64_t s, vf d_mixed, vf d_carried, Shares *shares) {
    vf logits = load(head(w, w->L, h) + i * w->pitch + s), previous = spread(0);
    if (w->p.previous) previous = row_load(w, w->p.previous, row_number(w, h, i), s);
    shares->previous_mixed += d_mixed * previous;
    shares->logits_mixed += d_mixed * logits;
    shares->previous_carried += d_carried * previous;
    shares->logits_carried += d_carried * logits;
}

/* Of four heads at `vectors` places of row i: A, the gradient of A_logit, is turned into that of the logits, times their
   scale; that of the previous map, in P, whose weights are no longer needed; and that of the shares. */
INLINE void mix_backward_at(const int vectors, Work *w, int64_t first, int64_t i, int64_t s, Shares *shares) {
    const Problem *p = &w->p;
    int64_t heads = least(4, p->K - first);
    float of_carried = p->kernel ? 1 - p->c : 1, scale = p->given ? 1 : p->scale;
    const int32_t *shown = w->shown + i * w->pitch + s;
    vf acc[4][3];
    for (int o = 0; o < 4; o++) for (int j = 0; j < vectors; j++) acc[o][j] = spread(0);
    if (p->kernel) convolve(vectors, 1, w, framed(w, w->G, 0, i) + s - (p->k - 1 - p->left), w->turned, first, acc);
    for (int o = 0; o < 4; o++) {
        if (o == heads) break;
        float *A = head(w, w->A, first + o) + i * w->pitch + s, *d_previous = head(w, w->P, first + o) + i * w->pitch + s;
        for (int j = 0; j < vectors; j++) {
            vf d_mixed = acc[o][j], d_carried = of_carried * load(A + j * V);
            if (p->same) {
                d_mixed += d_carried;
                d_carried = spread(0);
            }
            if (p->kernel) d_mixed = keep(d_mixed, loadi(shown + j * V));
            if (p->d_shares) add_shares(w, first + o, i, s + j * V, d_mixed, d_carried, shares);
            store(A + j * V, scale * p->b * d_mixed + scale * p->e * d_carried);
            if (p->d_previous) store(d_previous + j * V, p->a * d_mixed + p->d * d_carried);
        }
    }
}

/* A = gradient of the logits, times their scale, of row i; that of the previous map, and of the shares. */
static void mix_backward(Work *w, int64_t i) {
    const Problem *p = &w->p;
    Shares shares = {0};
    int64_t end = w->ends[i];
    for (int64_t s = 0, vectors; s < end; s += vectors * V) {
        vectors = vectors_at(s, end);
        for (int64_t first = 0; first < p->K; first += 4) {
            if (vectors == 1) mix_backward_at(1, w, first, i, s, &shares);
            else if (vectors == 2) mix_backward_at(2, w, first, i, s, &shares);
            else mix_backward_at(3, w, first, i, s, &shares);
        }
    }
    for (int64_t h = 0; h < p->K; h++) {
        if (p->d_given) write_row(w, head(w, w->A, h) + i * w->pitch, p->d_given, row_number(w, h, i));
        if (p->d_previous) write_row(w, head(w, w->P, h) + i * w->pitch, p->d_previous, row_number(w, h, i));
    }
    double *of_row = w->of_rows + 4 * i;
    of_row[0] = sum(shares.previous_mixed);
    of_row[1] = sum(shares.logits_mixed);
    of_row[2] = sum(shares.previous_carried);
    of_row[3] = sum(shares.logits_carried);
}

/* Gradients of the queries and keys of head h. */
static void look_backward(Work *w, int64_t h) {
    const Problem *p = &w->p;
    const float *A = head(w, w->A, h);
    float *out = out_of(w, h), *rows = rows_of(w, h);
    gather(vector(w, &p->key, h, 0), p->key.st, p->S, p->D, w->Dp, rows);
    for (int64_t from = 0; from < p->T; from += BLOCK) {
        int64_t past = least(from + BLOCK, p->T), columns = least(p->S, block_end(w, from, past));
        product(past - from, w->Dp, columns, A + from * w->pitch, w->pitch, rows, w->Dp, out + from * w->Dp, w->Dp);
    }
    scatter(w, out, &p->d_q, h, p->T);
    gather(vector(w, &p->q, h, 0), p->q.st, p->T, p->D, w->Dp, rows);
    zero(out, p->S * w->Dp);
    for (int64_t from = 0; from < p->T; from += BLOCK) {
        int64_t past = least(from + BLOCK, p->T), columns = least(p->S, block_end(w, from, past));
        add_product(columns, w->Dp, past - from, A + from * w->pitch, w->pitch, rows + from * w->Dp, w->Dp, out, w->Dp);
    }
    scatter(w, out, &p->d_key, h, p->S);
}

/* ---- a sentence, a pass ---- */

typedef void (*Phase)(Work *, int64_t task);

static void all(Phase phase, Work *w, int64_t tasks, int threads) {
    if (threads == 1) {
        for (int64_t task = 0; task < tasks; task++) phase(w, task);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < tasks; task++) phase(w, task);
}

static void work_on_sentence(Work *w, int64_t b, int threads) {
    const Problem *p = &w->p;
    w->b = b;
    all(read_masks, w, p->T, threads);
    all(mix_head, w, p->K, threads);
    all(weigh_row, w, p->T, threads);
    if (!w->backward) {
        all(look_head, w, p->K, threads);
        return;
    }
    all(weigh_backward, w, p->K, threads);
    if (p->kernel) all(kernel_backward, w, (p->K + 3) / 4 * p->K, threads);
    all(mix_backward, w, p->T, threads);
    if (p->d_q.data) all(look_backward, w, p->K, threads);
    if (!p->d_shares) return;
    double *total = p->d_shares + 5 * b;
    memset(total, 0, 5 * sizeof(double));
    for (int64_t i = 0; i < p->T; i++)
        for (int number = 0; number < 4; number++) total[number < 2 ? number : number + 1] += w->of_rows[4 * i + number];
    for (int64_t h = 0; p->kernel && h < p->K; h++) total[2] += w->of_heads[h];
}

/* Take part of a thread's memory, with a vector more on both sides: loads may reach past the ends. */
static float *take(char **next, int64_t floats) {
    float *taken = (float *)*next + V;
    *next += (whole(floats) + 2 * V) * sizeof(float);
    return taken;
}

/* Lay a sentence's maps out in `memory`, or only measure them where that is NULL: the bytes needed. */
static int64_t lay_out(Work *w, char *memory) {
    const Problem *p = &w->p;
    int backward = w->backward, convolved = p->kernel != NULL;
    int64_t map = p->K * p->T * w->pitch, framed_map = convolved ? p->K * w->tall * w->pitch + 2 * w->gap : 0;
    int64_t vectors = p->K * most(p->T, p->S) * w->Dp, taps = convolved ? (p->K + 3) / 4 * 4 * p->K * p->k * p->k : 0;
    char *next = memory;
    w->X = take(&next, framed_map) + w->gap;
    w->G = take(&next, backward ? framed_map : 0) + w->gap;
    int64_t zeroed = next - memory; /* the zeros around X and G, once: what is inside is written for each sentence */
    float *logits = take(&next, !p->same || (backward && p->d_shares) ? map : 0);
    w->L = !p->same || (backward && p->d_shares) ? logits : NULL;
    w->P = take(&next, map);
    w->A = take(&next, backward ? map : 0);
    w->N = take(&next, p->threshold ? map : 0);
    w->seen = (int32_t *)take(&next, p->T * w->pitch);
    w->shown = (int32_t *)take(&next, p->T * w->pitch);
    w->ends = (int64_t *)take(&next, 2 * p->T);
    w->inside = (int32_t *)take(&next, w->Sp);
    w->rows = take(&next, vectors);
    w->out = take(&next, vectors);
    w->columns = take(&next, p->K * w->Dp * w->pitch);
    w->order = take(&next, taps);
    w->turned = take(&next, backward ? taps : 0);
    w->d_taps = take(&next, backward ? taps * V : 0);
    w->of_rows = (double *)take(&next, 8 * p->T);
    w->of_heads = (double *)take(&next, 2 * p->K);
    if (!memory) return next - memory;
    memset(memory, 0, zeroed);
    for (int64_t s = 0; s < w->Sp; s++) w->inside[s] = s < p->S ? -1 : 0;
    if (convolved) order_taps(p, w->order);
    if (convolved && backward) order_taps_turned(p, w->turned);
    return next - memory;
}

static Work plan(const Problem *p, int backward) {
    Work w = {.p = *p, .backward = backward};
    if (!p->kernel) {
        w.p.k = 1;
        w.p.left = w.p.top = w.p.same = 0;
    }
    w.skips = p->masked.data && !p->a_logit && !p->d_a_logit && (!p->kernel || p->hidden.data);
    w.down = w.p.k - 1 - w.p.top;
    w.gap = whole(w.p.k - 1);
    w.tall = p->T + w.p.k - 1;
    w.taps = p->lower ? w.p.k * (w.p.k + 1) / 2 : w.p.k * w.p.k;
    w.Sp = whole(p->S);
    w.Dp = whole(p->D);
    w.pitch = w.Sp + w.gap;
    if (w.pitch % 256 == 0) w.pitch += V; /* else rows would push one another out of the first cache */
    return w;
}

/* Run one pass on at most `threads` threads; 0, or 1 where there is not enough memory. */
static int run(const Problem *p, int backward, int threads) {
    Work planned = plan(p, backward);
    int64_t bytes = (lay_out(&planned, NULL) + 63) / 64 * 64;
    double of_pixel = 4 * p->D + (p->kernel ? 2 * p->K * p->k * p->k : 0);
    threads = worthwhile(of_pixel * p->B * p->K * p->T * p->S, p->B * p->T, threads);
    int sharing = p->B < threads ? threads : 1, failed = 0; /* threads for a sentence */
#pragma omp parallel num_threads(threads) if (sharing == 1 && threads > 1)
    {
        Work w = planned;
        char *memory = aligned_alloc(64, bytes);
        if (memory) {
            lay_out(&w, memory);
        } else {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t b = 0; b < p->B; b++)
            if (memory) work_on_sentence(&w, b, sharing);
        free(memory);
    }
    return failed;
}

int evolving_attention_forward(const Problem *p, int threads) { return run(p, 0, threads); }
int evolving_attention_backward(const Problem *p, int threads) { return run(p, 1, threads); }
