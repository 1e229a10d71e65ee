/* SPDX-License-Identifier: Apache-2.0

Passes over ids and rows, one each where numpy and torch take many; row_passes.py says what for.

Nothing here decides anything: ids are numbered, found, selected and merged, rows are copied, and
added one to another in the order that is asked for. The optimizers' arithmetic stays torch's.

The passes that change a table are `rows_keep` and `rows_put`. The first copies rows aside and then
counts them in the journal; only what is counted is changed by the second (row_journal.py). Stores
stay in that order: the compiler is told, and x86-64 does it anyway. */

#include <stdint.h>
#include <string.h>

#define IN_ORDER __asm__ volatile("" ::: "memory")
#define INLINE static inline __attribute__((always_inline))

enum { AT_ONCE = 64 };     /* ids whose memory is called for before it is looked at */
enum { BUCKET_SHIFT = 54 }; /* row_hash.py */

struct index { /* row_index.py */
    const int64_t *regions;       /* of all buckets: which region it is */
    const int64_t *starts, *sizes; /* of all regions */
    const uint64_t *keys;
    const int32_t *values;
    int64_t zero_place;
    const int64_t *last, *done; /* NULL: rows do not expire */
    int64_t expire;
};

struct lane { /* row_slots.py, row_journal.py */
    float *rows, *copies, *work;
    int64_t width;
};

INLINE uint64_t scramble(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

INLINE void copy_row(float *to, const float *from, int64_t width)
{
    if (width == 16) memcpy(to, from, 64);
    else if (width == 1) *to = *from;
    else if (width == 8) memcpy(to, from, 32);
    else memcpy(to, from, width * sizeof(float));
}

INLINE void add_row(float *to, const float *from, int64_t width)
{
    if (width == 16)
        for (int k = 0; k < 16; k++) to[k] = to[k] + from[k];
    else
        for (int64_t k = 0; k < width; k++) to[k] = to[k] + from[k];
}

/* ---- ids by position */

INLINE int64_t cell_of(const int32_t *table, int64_t mask, const int64_t *distinct, int64_t id)
{
    int64_t cell = scramble(id) & mask;
    while (table[cell] && distinct[table[cell] - 1] != id) cell = (cell + 1) & mask;
    return cell;
}

/* Ids by number, in the order in which they come; `table` has `size` cells, a power of two. */
int64_t rows_number(const int64_t *ids, int64_t n, int32_t *table, int64_t size,
                    int64_t *distinct, int32_t *each, int32_t *first)
{
    int64_t count = 0;
    memset(table, 0, size * sizeof *table);
    for (int64_t i = 0; i < n; i++) {
        const int64_t cell = cell_of(table, size - 1, distinct, ids[i]);
        if (!table[cell]) {
            distinct[count] = ids[i];
            first[count] = (int32_t)i;
            table[cell] = (int32_t)++count;
        }
        each[i] = table[cell] - 1;
    }
    return count;
}

/* The same ids by rank; `ranks` is room for `count`. */
void rows_rank(const int64_t *sorted, int64_t count, const int32_t *table, int64_t size,
               const int64_t *distinct, int32_t *ranks, const int32_t *first_seen,
               int32_t *first, int32_t *each, int64_t n)
{
    for (int64_t rank = 0; rank < count; rank++) {
        const int32_t number = table[cell_of(table, size - 1, distinct, sorted[rank])] - 1;
        ranks[number] = (int32_t)rank;
        first[rank] = first_seen[number];
    }
    for (int64_t i = 0; i < n; i++) each[i] = ranks[each[i]];
}

void rows_spread(const float *rows, const int32_t *each, int64_t n, int64_t dim, float *out)
{
    for (int64_t i = 0; i < n; i++) copy_row(out + i * dim, rows + each[i] * dim, dim);
}

/* In the order of positions, the first of each id as it is. */
void rows_sum(const float *grads, const int32_t *each, const int32_t *first, int64_t n,
              int64_t dim, float *out)
{
    for (int64_t i = 0; i < n; i++) {
        float *to = out + each[i] * dim;
        if (first[each[i]] == i) copy_row(to, grads + i * dim, dim);
        else add_row(to, grads + i * dim, dim);
    }
}

/* ---- ids in ascending order, each once */

int64_t rows_merge(const int64_t *left, int64_t n, const float *left_rows, const int64_t *right,
                   int64_t m, const float *right_rows, int64_t dim, int64_t *ids, float *rows)
{
    int64_t i = 0, j = 0, count = 0;
    while (i < n || j < m) {
        float *to = rows + count * dim;
        const int of_left = i < n && (j == m || left[i] <= right[j]);
        const int of_right = j < m && (i == n || right[j] <= left[i]);
        ids[count++] = of_left ? left[i] : right[j];
        if (of_left) copy_row(to, left_rows + i++ * dim, dim);
        if (of_left && of_right) add_row(to, right_rows + j++ * dim, dim);
        else if (of_right) copy_row(to, right_rows + j++ * dim, dim);
    }
    return count;
}

/* Those in buckets that are marked. */
int64_t rows_select(const int64_t *ids, int64_t n, const float *rows, int64_t dim,
                    const uint8_t *marked, int64_t *out_ids, float *out_rows)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        if (marked[scramble(ids[i]) >> BUCKET_SHIFT]) {
            out_ids[count] = ids[i];
            copy_row(out_rows + count++ * dim, rows + i * dim, dim);
        }
    return count;
}

/* ---- a table */

INLINE int64_t start_of(const struct index *in, uint64_t hash, int64_t *mask)
{
    const int64_t bucket = hash >> BUCKET_SHIFT, code = in->regions[bucket];
    *mask = in->sizes[code] - 1;
    return in->starts[code] + bucket * in->sizes[code];
}

/* The place of each, or a free one. */
INLINE void find_some(const struct index *in, const uint64_t *hashes, int64_t n, int64_t *places)
{
    int64_t starts[AT_ONCE], masks[AT_ONCE];
    for (int64_t i = 0; i < n; i++) {
        starts[i] = start_of(in, hashes[i], masks + i);
        __builtin_prefetch(in->keys + starts[i] + (hashes[i] & masks[i]));
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t offset = hashes[i] & masks[i];
        for (uint64_t key; (key = in->keys[starts[i] + offset]) && key != hashes[i];)
            offset = (offset + 1) & masks[i];
        places[i] = hashes[i] ? starts[i] + offset : in->zero_place;
        __builtin_prefetch(in->values + places[i]);
    }
}

void rows_find(const struct index *in, const uint64_t *hashes, int64_t n, int64_t *places)
{
    for (int64_t i = 0; i < n; i += AT_ONCE)
        find_some(in, hashes + i, n - i < AT_ONCE ? n - i : AT_ONCE, places + i);
}

/* Copies the rows of these ids; how many of them have none, and the positions of those. */
int64_t rows_read(const struct index *in, const int64_t *ids, int64_t n, const float *lane,
                  int64_t width, int64_t dim, float *out, int64_t *unknown)
{
    int64_t missing = 0;
    for (int64_t at = 0; at < n; at += AT_ONCE) {
        const int64_t part = n - at < AT_ONCE ? n - at : AT_ONCE;
        uint64_t hashes[AT_ONCE];
        int64_t places[AT_ONCE], slots[AT_ONCE];
        for (int64_t i = 0; i < part; i++) hashes[i] = scramble(ids[at + i]);
        find_some(in, hashes, part, places);
        for (int64_t i = 0; i < part; i++) {
            slots[i] = (int64_t)in->values[places[i]] - 1;
            if (in->last && slots[i] >= 0 &&
                in->done[hashes[i] >> BUCKET_SHIFT] - in->last[places[i]] >= in->expire)
                slots[i] = -1;
            if (slots[i] >= 0) __builtin_prefetch(lane + slots[i] * width);
        }
        for (int64_t i = 0; i < part; i++)
            if (slots[i] >= 0) copy_row(out + (at + i) * dim, lane + slots[i] * width, dim);
            else unknown[missing++] = at + i;
    }
    return missing;
}

/* Copies rows aside behind `counted` others, into the journal and into a room to work in. */
void rows_keep(const struct lane *lanes, int64_t count, const int64_t *slots, int64_t n,
               int64_t *aside, int64_t *counter)
{
    const int64_t counted = *counter;
    for (const struct lane *l = lanes; l < lanes + count; l++) {
        const int64_t width = l->width;
        float *copies = l->copies + counted * width;
        for (int64_t i = 0; i < n; i++) {
            if (i + 16 < n) __builtin_prefetch(l->rows + slots[i + 16] * width, 1);
            copy_row(copies + i * width, l->rows + slots[i] * width, width);
        }
        memcpy(l->work, copies, n * width * sizeof(float));
    }
    memcpy(aside + counted, slots, n * sizeof *slots);
    IN_ORDER;
    *counter = counted + n;
    IN_ORDER;
}

/* What has been made of them, to where they came from. */
void rows_put(const struct lane *lanes, int64_t count, const int64_t *slots, int64_t n)
{
    IN_ORDER;
    for (const struct lane *l = lanes; l < lanes + count; l++)
        for (int64_t i = 0; i < n; i++)
            copy_row(l->rows + slots[i] * l->width, l->work + i * l->width, l->width);
    IN_ORDER;
}
