/* Dropout of any numbers, such as what a layer adds to its input. No mask is kept: the backward pass draws it again. */

#include "vectors.h"

typedef struct {
    const float *x; /* may be y */
    float *y;
    int64_t count;
    uint32_t threshold; /* a number is dropped where its 16 random bits are below this */
    uint64_t seed;
} Dropout;

/* One draw of 4 x 32 bits for each of V lanes serves so many numbers. */
enum { DRAW = 8 * V };

static void drop_block(const Dropout *d, int64_t block, const float *x, float *y) {
    vf noise[8];
    draw_noise((uint64_t)block, 0, 0, d->seed, d->threshold, noise);
    for (int i = 0; i < 8; i++) store(y + i * V, load(x + i * V) * noise[i]);
}

/* y = x, divided by the share that is kept, or 0: a function of the seed, the place and V. */
void evolving_attention_dropout(const Dropout *d, int threads) {
    int64_t whole_blocks = d->count / DRAW, left = d->count % DRAW;
    threads = worthwhile(16.0 * d->count, most(whole_blocks, 1), threads); /* some 16 operations a number */
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < whole_blocks; block++)
        drop_block(d, block, d->x + block * DRAW, d->y + block * DRAW);
    if (left) {
        float last[DRAW] = {0};
        memcpy(last, d->x + whole_blocks * DRAW, left * sizeof(float));
        drop_block(d, whole_blocks, last, last);
        memcpy(d->y + whole_blocks * DRAW, last, left * sizeof(float));
    }
}
