/* Dropout of any numbers, such as what a layer adds to its input. No mask is kept: the way back draws it again. */

#include "cpu_vectors.h"

typedef struct {
    const float *x; /* may be y */
    float *y;
    int64_t count;
    uint32_t threshold; /* a number is dropped where its 16 random bits are below this */
    float kept_share;   /* what the numbers that are kept are divided by */
    uint64_t seed;
} Dropout;

/* One draw of 4 x 32 bits for each of V lanes serves so many numbers. */
enum { DRAW = 8 * V };

static void drop_block(const Dropout *d, int64_t block, const float *x, float *y) {
    vf noise[8];
    draw_noise((uint64_t)block, 0, 0, d->seed, d->threshold, d->kept_share, noise);
    for (int i = 0; i < 8; i++) store(y + i * V, load(x + i * V) * noise[i]);
}

/* y = x / kept_share where a number is kept, else 0: a function of the seed and the place alone. */
int evolving_attention_dropout(const Dropout *d, int threads) {
    int64_t whole_blocks = d->count / DRAW, left = d->count % DRAW;
    int64_t useful = 1 + d->count / 65536; /* for fewer numbers, waking a thread takes longer than it helps */
    threads = (int)least(threads, useful);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < whole_blocks; block++)
        drop_block(d, block, d->x + block * DRAW, d->y + block * DRAW);
    if (left) {
        float last[DRAW] = {0};
        memcpy(last, d->x + whole_blocks * DRAW, left * sizeof(float));
        drop_block(d, whole_blocks, last, last);
        memcpy(d->y + whole_blocks * DRAW, last, left * sizeof(float));
    }
    return 0;
}
