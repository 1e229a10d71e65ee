/* SPDX-License-Identifier: Apache-2.0

An optimizer's step and its undo log in one pass over memory; one_pass_update.py says what for.

For each block, and each line before the next can be seen by anybody else:

    head = block, step, counter             what is about to change
    head[STATE] = PASSING
        copy a chunk aside, head[COPIED] += chunk, update the chunk in place; the next chunk
    counter = counter + 1
    done = step + 1
    head[STATE] = IDLE

So whoever finds PASSING copies COPIED elements back, and the block is as it was. A chunk is small
enough to be in the first cache still when it is updated: the copy costs no trip to memory.

What follows a block, follows it here while it is in the cache (followers.py): an average of the
weights takes it in, in place and under a head of its own, in the same order of stores; or it is
copied aside once more, past the caches, for whoever may write to it later.

The arithmetic is torch's, operation by operation: with FMA where its kernels have been compiled to
it (`fma`), and otherwise rounded in the last `size % width` elements of a span, where its vectors
end. Compiled without contraction, so that nothing else is fused. */

#include <math.h>
#include <stdint.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

enum { CHUNK = 512 }; /* elements */
enum { STATE, FIRST, STOP, STEP, COPIED, COUNTER, LANES }; /* words of a head; undo_log.py */
enum { IDLE, HOLDS, PASSING };
enum { ADAM, ADAMW, SGD };

struct span {
    float *weight, *first, *second; /* and the optimizer's slots; NULL where there is none */
    const float *gradient;          /* NULL: nobody touched it, so the step passes it over */
    float *counter;                 /* of its first block, or NULL */
    int64_t *done;                  /* of its first block */
    int64_t number, size;           /* of its first block; elements */
    int64_t lanes;                  /* bits: which lanes of the undo log are copied aside */
    int64_t kind, nesterov;
    double rate, decay, beta1, beta2, eps; /* of SGD: beta1 is the momentum, beta2 the dampening */
};

struct undo {
    int64_t *head;
    float *weight, *first, *second;
    int64_t block; /* elements in one; layout.BLOCK */
};

struct follower {
    const float *weights;   /* the lane of the weights, */
    float *lane;            /* and the one that follows it, element by element */
    int64_t *head;          /* NULL: it is copied */
    float *aside;           /* room for a block */
    int64_t *words;         /* of all blocks */
    int64_t before, after;  /* what they say of a block that has not followed, and of one that has */
    double part;            /* of the new weights in the average */
    int64_t begins;         /* with them: there is nothing in it yet */
    int64_t fma;
};

struct numbers { /* of one span's step, as torch rounds them */
    float rate, shrink, decay, beta1, beta2, rest1, rest2, root, eps;
};

/* Stores stay in the order of the program: the compiler is told, and x86-64 does it anyway. */
#define IN_ORDER __asm__ volatile("" ::: "memory")
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define WITH_FMA __attribute__((target("avx2,fma")))
int64_t has_fma(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
#define WITH_FMA
int64_t has_fma(void) { return 0; }
#endif

int64_t version(void) { return 3; } /* native_library.VERSION */

INLINE float mul_add(float a, float b, float c, int fma)
{
    return fma ? fmaf(a, b, c) : a * b + c;
}

INLINE void adam(float *restrict w, float *restrict m, float *restrict v,
                 const float *restrict g, int64_t size, const struct numbers *with,
                 int kind, int fma, int tail)
{
    const struct numbers n = *with;
    for (int64_t i = 0; i < size; i++) {
        float x = w[i], d = g[i];
        if (kind == ADAMW) x = x * n.shrink;
        else if (n.decay != 0) d = mul_add(x, n.decay, d, fma);
        m[i] = mul_add(n.rest1, d - m[i], m[i], fma);
        float square = n.rest2 * d;
        v[i] = tail ? mul_add(v[i], n.beta2, square * d, fma)
                    : mul_add(square, d, v[i] * n.beta2, fma);
        w[i] = x - n.rate * m[i] / (sqrtf(v[i]) / n.root + n.eps);
    }
}

INLINE void sgd(float *restrict w, float *restrict m, const float *restrict g, int64_t size,
                const struct numbers *with, int nesterov, int fma)
{
    const struct numbers n = *with;
    for (int64_t i = 0; i < size; i++) {
        float d = g[i];
        if (n.decay != 0) d = mul_add(w[i], n.decay, d, fma);
        if (m) {
            m[i] = mul_add(d, n.rest2, m[i] * n.beta1, fma);
            d = nesterov ? mul_add(m[i], n.beta1, d, fma) : m[i];
        }
        w[i] = mul_add(d, -n.rate, w[i], fma);
    }
}

INLINE void copy(float *restrict to, const float *restrict from, int64_t size)
{
    for (int64_t i = 0; i < size; i++) to[i] = from[i];
}

static struct numbers numbers_of(const struct span *s)
{
    struct numbers n = {
        .decay = (float)s->decay, .shrink = (float)(1 - s->rate * s->decay),
        .beta1 = (float)s->beta1, .beta2 = (float)s->beta2, .eps = (float)s->eps,
        .rest1 = (float)(1 - s->beta1), .rest2 = (float)(1 - s->beta2), .rate = (float)s->rate,
    };
    if (s->kind != SGD) {
        double count = *s->counter + 1;
        n.rate = (float)(s->rate / (1 - pow(s->beta1, count)));
        n.root = (float)sqrt(1 - pow(s->beta2, count));
    }
    return n;
}

INLINE void chunk(const struct span *s, int64_t at, int64_t size, const struct numbers *n,
                  int fma, int tail)
{
    float *w = s->weight + at, *m = s->first ? s->first + at : 0;
    const float *g = s->gradient + at;
    if (s->kind == SGD && m) sgd(w, m, g, size, n, s->nesterov != 0, fma);
    else if (s->kind == SGD) sgd(w, 0, g, size, n, 0, fma);
    else if (s->kind == ADAMW) adam(w, m, s->second + at, g, size, n, ADAMW, fma, tail);
    else adam(w, m, s->second + at, g, size, n, ADAM, fma, tail);
}

/* torch.lerp, as its vectors do it. */
INLINE void lerp(float *restrict average, const float *restrict w, int64_t size, float part, int fma)
{
    if (part < 0.5f && part > -0.5f)
        for (int64_t i = 0; i < size; i++)
            average[i] = mul_add(part, w[i] - average[i], average[i], fma);
    else
        for (int64_t i = 0; i < size; i++)
            average[i] = mul_add(part - 1.0f, w[i] - average[i], w[i], fma);
}

INLINE void average(const struct follower *f, const float *weight, int64_t number, int64_t size,
                    int fma)
{
    float *lane = f->lane + (weight - f->weights);
    int64_t *head = f->head;
    head[FIRST] = number;
    head[STOP] = number + 1;
    head[STEP] = f->before;
    head[COPIED] = 0;
    IN_ORDER;
    head[STATE] = PASSING;
    for (int64_t a = 0; a < size; a += CHUNK) {
        const int64_t part = size - a < CHUNK ? size - a : CHUNK;
        copy(f->aside + a, lane + a, part);
        IN_ORDER;
        head[COPIED] = a + part;
        IN_ORDER;
        if (f->begins) copy(lane + a, weight + a, part);
        else lerp(lane + a, weight + a, part, (float)f->part, fma);
        IN_ORDER;
    }
    f->words[number] = f->after;
    IN_ORDER;
    head[STATE] = IDLE;
    IN_ORDER;
}

WITH_FMA static void average_with_fma(const struct follower *f, const float *weight,
                                      int64_t number, int64_t size)
{
    average(f, weight, number, size, 1);
}

/* Nobody reads it soon: it takes no room in the caches, and is not read before it is written. */
static void copy_past_caches(float *to, const float *from, int64_t size)
{
    int64_t i = 0;
#if defined(__SSE__)
    if (((uintptr_t)to & 15) == 0)
        for (; i + 4 <= size; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
#endif
    for (; i < size; i++) to[i] = from[i];
}

static void follow_block(const struct follower *followers, int64_t count, const float *weight,
                         int64_t number, int64_t size)
{
    for (const struct follower *f = followers; f < followers + count; f++)
        if (!f->head) copy_past_caches(f->lane + (weight - f->weights), weight, size);
        else if (f->fma) average_with_fma(f, weight, number, size);
        else average(f, weight, number, size, 0);
}

/* What was copied past the caches is seen by others before whatever comes now. */
static void settle(void)
{
#if defined(__SSE__)
    _mm_sfence();
#endif
}

/* They will be wanted when the block is done: the arithmetic until then hides the way. */
INLINE void call_for(const struct follower *followers, int64_t count, const float *weight,
                     int64_t size)
{
    for (const struct follower *f = followers; f < followers + count; f++)
        if (f->head)
            for (int64_t i = 0; i < size; i += 16)
                __builtin_prefetch(f->lane + (weight - f->weights) + i, 0, 2);
}

INLINE void pass(const struct span *spans, int64_t count, int64_t step, const struct undo *u,
                 int64_t width, int fma, const struct follower *followers, int64_t following)
{
    int64_t *head = u->head;
    const int64_t block = u->block;
    for (const struct span *s = spans; s < spans + count; s++) {
        const int64_t blocks = (s->size + block - 1) / block;
        if (!s->gradient) {
            for (int64_t b = 0; b < blocks; b++) s->done[b] = step + 1;
            IN_ORDER;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t start = b * block, left = s->size - start;
                follow_block(followers, following, s->weight + start, s->number + b,
                             left < block ? left : block);
            }
            continue;
        }
        const struct numbers n = numbers_of(s);
        const float counted = s->counter ? *s->counter : 0;
        const int64_t vectors = s->size - s->size % width;
        if (s->counter) /* whoever finishes this span may have to begin at any of its blocks */
            for (int64_t b = 1; b < blocks; b++) s->counter[b] = counted;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t start = b * block, left = s->size - start;
            const int64_t size = left < block ? left : block;
            head[FIRST] = s->number + b;
            head[STOP] = s->number + b + 1;
            head[STEP] = step;
            head[COPIED] = 0;
            head[COUNTER] = (int64_t)counted;
            head[LANES] = s->lanes;
            IN_ORDER;
            head[STATE] = PASSING;
            for (int64_t a = 0; a < size; a += CHUNK) {
                const int64_t part = size - a < CHUNK ? size - a : CHUNK;
                const int64_t at = start + a;
                copy(u->weight + a, s->weight + at, part);
                if (s->first) copy(u->first + a, s->first + at, part);
                if (s->second) copy(u->second + a, s->second + at, part);
                IN_ORDER;
                head[COPIED] = a + part;
                IN_ORDER;
                call_for(followers, following, s->weight + at, part);
                const int64_t whole = vectors - at < part ? vectors - at : part;
                chunk(s, at, whole, &n, fma, 0);
                if (whole < part) chunk(s, at + whole, part - whole, &n, fma, 1);
                IN_ORDER;
            }
            if (s->counter) s->counter[b] = counted + 1;
            IN_ORDER;
            s->done[b] = step + 1;
            IN_ORDER;
            head[STATE] = IDLE;
            IN_ORDER; /* the next block's words */
            follow_block(followers, following, s->weight + start, s->number + b, size);
        }
    }
    settle();
}

WITH_FMA static void pass_with_fma(const struct span *spans, int64_t count, int64_t step,
                                   const struct undo *u, int64_t width,
                                   const struct follower *followers, int64_t following)
{
    pass(spans, count, step, u, width, 1, followers, following);
}

void update(const struct span *spans, int64_t count, int64_t step, const struct undo *u,
            int64_t width, int64_t fma, const struct follower *followers, int64_t following)
{
    if (fma) pass_with_fma(spans, count, step, u, width, followers, following);
    else pass(spans, count, step, u, width, 0, followers, following);
}
