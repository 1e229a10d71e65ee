/* SPDX-License-Identifier: Apache-2.0

Passes over ids and rows, one each where numpy and torch take many; row_passes.py says what for.

Nothing here decides anything: ids are numbered, found, selected and merged, rows are copied, and
added one to another in the order that is asked for. The optimizers' arithmetic stays torch's.

What can be seen of a table is changed by two of them, and only after the journal knows of it
(row_journal.py): `rows_keep` copies rows aside, then counts them, and what is counted is changed
by `rows_put`; `rows_insert` notes a free place, then counts it, then takes it. Stores stay in that
order: the compiler is told, and x86-64 does it anyway. */

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

struct numbered { uint64_t id; int64_t number; };

/* By id, byte by byte, of those bytes that differ; `ids` have their sign turned. */
static struct numbered *sorted(struct numbered *these, struct numbered *room, int64_t n)
{
    uint64_t differ = 0;
    for (int64_t i = 1; i < n; i++) differ |= these[i].id ^ these[0].id;
    for (int shift = 0; shift < 64; shift += 8) {
        int64_t at[256] = {0}, sum = 0;
        if (!(differ >> shift & 255)) continue;
        for (int64_t i = 0; i < n; i++) at[these[i].id >> shift & 255]++;
        for (int k = 0; k < 256; k++) {
            const int64_t count = at[k];
            at[k] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++) room[at[these[i].id >> shift & 255]++] = these[i];
        struct numbered *other = these;
        these = room;
        room = other;
    }
    return these;
}

/* Ids in ascending order, each once; of each position, which of them is there; of each of them, its
first position. `table` has `size` cells, a power of two; `room` is for 2 n of them. */
int64_t rows_group(const int64_t *ids, int64_t n, int32_t *table, int64_t size,
                   struct numbered *room, int64_t *distinct, int32_t *each, int32_t *first)
{
    const uint64_t sign = 1ull << 63;
    int64_t count = 0;
    memset(table, 0, size * sizeof *table);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t id = (uint64_t)ids[i] ^ sign;
        int64_t cell = scramble(id) & (size - 1);
        while (table[cell] && room[table[cell] - 1].id != id) cell = (cell + 1) & (size - 1);
        if (!table[cell]) {
            room[count] = (struct numbered){id, count};
            table[cell] = (int32_t)++count;
        }
        each[i] = table[cell] - 1;
    }
    int32_t *ranks = table; /* which is not needed any more */
    const struct numbered *in_order = sorted(room, room + n, count);
    for (int64_t rank = 0; rank < count; rank++) {
        ranks[in_order[rank].number] = (int32_t)rank;
        distinct[rank] = (int64_t)(in_order[rank].id ^ sign);
    }
    for (int64_t i = 0; i < n; i++) each[i] = ranks[each[i]];
    for (int64_t i = n - 1; i >= 0; i--) first[each[i]] = (int32_t)i;
    return count;
}

void rows_spread(const float *rows, const int32_t *each, int64_t n, int64_t dim, float *out)
{
    for (int64_t i = 0; i < n; i++) copy_row(out + i * dim, rows + each[i] * dim, dim);
}

/* In the order of positions, the first of each id as it is. */
void rows_sum(const float *grads, const int32_t *each, const int32_t *first, int64_t n,
              int64_t dim, float *out)
{
    if (dim == 1) /* without a branch that nobody can foresee */
        for (int64_t i = 0; i < n; i++) {
            const float sum = out[each[i]] + grads[i];
            out[each[i]] = first[each[i]] == i ? grads[i] : sum;
        }
    else
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

/* The hashes of all; how many of them are in buckets that are marked. */
int64_t rows_hash(const int64_t *ids, int64_t n, const uint8_t *marked, uint64_t *hashes)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        hashes[i] = scramble(ids[i]);
        count += marked[hashes[i] >> BUCKET_SHIFT];
    }
    return count;
}

/* Those in buckets that are marked. */
int64_t rows_select(const int64_t *ids, int64_t n, const float *rows, int64_t dim,
                    const uint8_t *marked, int64_t *out_ids, float *out_rows)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) { /* the next one is written over whoever is not among them */
        out_ids[count] = ids[i];
        copy_row(out_rows + count * dim, rows + i * dim, dim);
        count += marked[scramble(ids[i]) >> BUCKET_SHIFT];
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

/* And what is said there; how many of them are rows. */
int64_t rows_find(const struct index *in, const uint64_t *hashes, int64_t n, int64_t *places,
                  int32_t *values)
{
    int64_t rows = 0;
    for (int64_t at = 0; at < n; at += AT_ONCE) {
        const int64_t part = n - at < AT_ONCE ? n - at : AT_ONCE;
        find_some(in, hashes + at, part, places + at);
        for (int64_t i = at; i < at + part; i++) {
            values[i] = in->values[places[i]];
            rows += values[i] > 0;
        }
    }
    return rows;
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

/* Takes free places for ids that are not there, in `regions` of all buckets. Each is noted in
`claimed` and counted before it is taken (NULL: nobody can see them yet). */
void rows_insert(const struct index *in, const int64_t *regions, const uint64_t *hashes,
                 const int32_t *values, int64_t n, int64_t *places, int64_t *claimed,
                 int64_t *counter)
{
    struct index there = *in;
    there.regions = regions;
    for (int64_t i = 0; i < n; i++) {
        int64_t mask, start = start_of(&there, hashes[i], &mask), offset = hashes[i] & mask;
        if (i + 16 < n) {
            int64_t ahead, region = start_of(&there, hashes[i + 16], &ahead);
            __builtin_prefetch(in->keys + region + (hashes[i + 16] & ahead), 1);
        }
        while (in->keys[start + offset]) offset = (offset + 1) & mask;
        const int64_t place = hashes[i] ? start + offset : in->zero_place;
        places[i] = place;
        if (claimed) {
            claimed[*counter] = place;
            IN_ORDER;
            *counter += 1;
            IN_ORDER;
        }
        ((int32_t *)in->values)[place] = values[i];
        IN_ORDER;
        ((uint64_t *)in->keys)[place] = hashes[i];
    }
}

/* A slot in each of these buckets: those that were given back first. */
void rows_allocate(const uint64_t *hashes, int64_t n, int64_t *used, int64_t *free,
                   const int32_t *given_back, int64_t per_bucket, int64_t *slots)
{
    for (int64_t i = 0; i < n; i++) {
        const int64_t bucket = hashes[i] >> BUCKET_SHIFT;
        const int64_t local = free[bucket] ? given_back[bucket * per_bucket + --free[bucket]]
                                           : used[bucket]++;
        slots[i] = bucket * per_bucket + local;
    }
}

/* First values (row_init.py). */
void rows_first(const int64_t *ids, int64_t n, uint64_t key, int64_t dim, const float *quantiles,
                float *out)
{
    for (int64_t i = 0; i < n; i++) {
        const uint64_t row = scramble(scramble((uint64_t)ids[i] ^ key) + key);
        uint64_t word = 0;
        for (int64_t k = 0; k < dim; k++) {
            if (k % 4 == 0) word = scramble(row + (uint64_t)(k / 4 + 1) * 0x9E3779B97F4A7C15u);
            out[i * dim + k] = quantiles[word >> 16 * (k % 4) & 65535];
        }
    }
}

/* Whole rows of a lane, to slots that no entry names yet. */
void rows_write(float *lane, int64_t width, const int64_t *slots, int64_t n, const float *values,
                int64_t columns, float initial)
{
    for (int64_t i = 0; i < n; i++) {
        float *to = lane + slots[i] * width;
        if (!values)
            for (int64_t k = 0; k < width; k++) to[k] = initial;
        else {
            copy_row(to, values + i * columns, columns);
            for (int64_t k = columns; k < width; k++) to[k] = 0;
        }
    }
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
