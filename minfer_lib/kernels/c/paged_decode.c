/* Attention of decoding requests over a paged cache, for CPUs.

   Every request has one new token; its query heads attend to all keys of the request so far. Where these lie, the
   request's block table says: position p is row table[p / block_size] * block_size + p % block_size of the pool.
   Rows are read where they lie, once, and rows behind a request's length never. A slot of the contiguous cache is a
   block as long as the longest request. A request of length 0, as a batch of fixed size has them, gets zeros.

   A piece of work is up to PIECE tokens of one request for one key head, with all query heads that share it. Within a
   piece, TILE tokens at a time: scores, softmax so far, weighted sum of the values. Pieces depend on a request's length
   alone, not on threads or other requests, and so does every bit of its result.

   In a pool of int8 a key or value is codes and a scale. A scale is the same for all of its numbers, so that products
   and sums are of codes: a score is multiplied by its key's scale, a weight by its value's.

   Compiled when the library needs it (see compiled.py), for the CPU it runs on. */

#include "vectors.h"

enum { DONE = 0, NO_MEMORY = 1, WRONG_LENGTH = 2, WRONG_BLOCK = 3 };
enum { TILE = 64, PIECE = 256 };
enum { KEYS = 4, HEADS = 3 };  /* multiplied with each other at once: 12 sums fit 16 registers */
#define AHEAD 16               /* keys that are asked for before they are needed, as values are while keys are read */
#define SMALL 65536            /* bytes of keys and values below which a second thread costs more than it does */

typedef struct {
    const void *query, *keys, *values;  /* [requests, heads, key_dim], pools [rows, kv_heads, key_dim or value_dim] */
    void *out;                          /* [requests, heads, value_dim], of the query's kind */
    const int32_t *tables, *lengths;    /* [requests, table_width], [requests] */
    const float *sinks;                 /* [heads] or NULL */
    const float *key_scales, *value_scales;  /* [rows, kv_heads], of pools of int8 alone */
    int64_t requests, heads, kv_heads, key_dim, value_dim;
    int64_t query_step, head_step, table_step;  /* from one request, head, table to the next; in elements */
    int64_t table_width, blocks, block_size, window;
    float scale, softcap;               /* softcap 0: none */
    int32_t query_kind, pool_kind;
} call;

/* tanh, near zero by a polynomial of its own (Cephes), since 1 - 2 / (e^2x + 1) cancels there. */
static vec tanh_of(vec x) {
    const ints sign = (ints)x & INT32_MIN;
    const vec size = (vec)((ints)x & INT32_MAX), z = x * x;
    vec y = all(-5.70498872745e-3f);
    y = y * z + 2.06390887954e-2f;
    y = y * z - 5.37397155531e-2f;
    y = y * z + 1.33314422036e-1f;
    y = y * z - 3.33332819422e-1f;
    const vec twice = choose(size > 20.0f, all(40.0f), 2.0f * size);
    const vec far = 1.0f - 2.0f / (exp_of(twice) + 1.0f);
    return choose(size < 0.625f, y * z * x + x, (vec)((ints)far | sign));
}

/* -- one tile ------------------------------------------------------------------------------------------------------ */

/* Products of `heads` queries with four keys: each key is loaded once for all of them. */
ALWAYS void products(int kind, int heads, const float *query, int64_t dim, const char *const *key, float *scores) {
    vec sums[HEADS][KEYS] = {{{0}}};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec k[KEYS];
        UNROLL for (int t = 0; t < KEYS; t++) k[t] = numbers_at(kind, key[t], i);
        UNROLL for (int h = 0; h < heads; h++) {
            const vec q = floats_at(query + h * padded(dim) + i);
            UNROLL for (int t = 0; t < KEYS; t++) sums[h][t] += q * k[t];
        }
    }
    if (i < dim)
        UNROLL for (int t = 0; t < KEYS; t++) {
            const vec k = last_numbers(kind, key[t], i, dim);
            UNROLL for (int h = 0; h < heads; h++) sums[h][t] += floats_at(query + h * padded(dim) + i) * k;
        }
    UNROLL for (int h = 0; h < heads; h++)
        sums_of_four(sums[h][0], sums[h][1], sums[h][2], sums[h][3], scores + h * TILE);
}

/* sums = sums * shrink + weights values, for `heads` heads and `width` vectors of columns from column i on. */
ALWAYS void add_values(int kind, int heads, int width, const float *weights, const float *shrink,
                       const char *const *value, int64_t count, int64_t i, int64_t dim, float *sums) {
    vec s[HEADS][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < width; c++)
            s[h][c] = floats_at(sums + h * padded(dim) + i + c * LANES) * shrink[h];
    for (int64_t t = 0; t < count; t++)
        UNROLL for (int c = 0; c < width; c++) {
            const int64_t at = i + c * LANES;
            const vec v = width > 1 || at + LANES <= dim ? numbers_at(kind, value[t], at)
                                                         : last_numbers(kind, value[t], at, dim);
            UNROLL for (int h = 0; h < heads; h++) s[h][c] += weights[h * TILE + t] * v;
        }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int c = 0; c < width; c++) put(sums + h * padded(dim) + i + c * LANES, s[h][c]);
}

ALWAYS void add_all_values(int kind, int heads, const float *weights, const float *shrink, const char *const *value,
                           int64_t count, int64_t dim, float *sums) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES)
        add_values(kind, heads, 4, weights, shrink, value, count, i, dim, sums);
    for (; i + 2 * LANES <= dim; i += 2 * LANES)
        add_values(kind, heads, 2, weights, shrink, value, count, i, dim, sums);
    for (; i < dim; i += LANES) add_values(kind, heads, 1, weights, shrink, value, count, i, dim, sums);
}

/* What is known of one head so far: exp(score - peak) summed up, and the values summed up with these weights. */
typedef struct {
    float peak, total;
} state;

/* Where every score so far is -inf, so is the peak, and -inf - -inf would be NaN. */
static inline float reference(float peak) { return peak == -INFINITY ? 0.0f : peak; }

/* Scores of one head become weights exp(score - peak). A new peak makes all that was summed up before smaller, by the
   factor that is returned (online softmax, Milakov and Gimelshein 2018). */
static float weigh(const call *c, float *scores, int64_t count, state *head) {
    const int64_t end = padded(count);
    vec peaks = all(head->peak);
    for (int64_t t = 0; t < end; t += LANES) {
        vec s = floats_at(scores + t) * c->scale;
        if (c->softcap > 0.0f) s = tanh_of(s / c->softcap) * c->softcap;
        put(scores + t, s);
    }
    for (int64_t t = count; t < end; t++) scores[t] = -INFINITY;
    for (int64_t t = 0; t < end; t += LANES) peaks = larger(floats_at(scores + t), peaks);
    float peak = peaks[0];
    for (int i = 1; i < LANES; i++) peak = peaks[i] > peak ? peaks[i] : peak;

    vec totals = {0};
    for (int64_t t = 0; t < end; t += LANES) {
        const vec w = exp_of(floats_at(scores + t) - reference(peak));
        put(scores + t, w);
        totals += w;
    }
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += totals[i];
    const float shrink = exp_one(head->peak - reference(peak));
    head->total = head->total * shrink + total;
    head->peak = peak;
    return shrink;
}

/* -- one piece ----------------------------------------------------------------------------------------------------- */

/* What a thread works in; a part is what remains of a piece: [group] states, [group, padded value_dim] sums. */
typedef struct {
    float *query, *scores, *part, *shrink;  /* [group, padded key_dim], [group, TILE], a part, [group] */
} room;

ALWAYS float *sums_of(const call *c, float *part) { return part + padded(2 * (c->heads / c->kv_heads)); }
static int64_t part_size(const call *c) {
    const int64_t group = c->heads / c->kv_heads;
    return padded(2 * group) + group * padded(c->value_dim);
}

/* Asks for a row before it is needed: rows of one head are apart, and the hardware's own guess stops there. */
ALWAYS void ask_for(const char *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* How many heads are multiplied at once when so many are left; 2 and 2 are better than 3 and 1. */
static inline int64_t next_heads(int64_t left) { return left == 4 ? 2 : left < HEADS ? left : HEADS; }

ALWAYS void do_piece(const call *c, int kind, int64_t request, int64_t head, int64_t begin, int64_t end, room r,
                     float *part) {
    const int64_t group = c->heads / c->kv_heads, size = size_of(kind);
    const int64_t key_dim = c->key_dim, value_dim = c->value_dim;
    const char *keys = (const char *)c->keys + head * key_dim * size;
    const char *values = (const char *)c->values + head * value_dim * size;
    const int32_t *table = c->tables + request * c->table_step;
    state *states = (state *)part;
    float *sums = sums_of(c, part);

    const char *keys_of[PIECE + KEYS], *values_of[PIECE];  /* where each token's are */
    float key_scales[PIECE], value_scales[PIECE];          /* of codes */
    const int64_t tokens = end - begin;
    for (int64_t t = 0; t < tokens;) {  /* block by block: within one, rows follow each other */
        const uint32_t position = (uint32_t)(begin + t), block_size = (uint32_t)c->block_size;
        const int64_t within = position % block_size, left = c->block_size - within;
        const int64_t run = left < tokens - t ? left : tokens - t;
        int64_t row = (table[position / block_size] * c->block_size + within) * c->kv_heads;
        for (int64_t i = 0; i < run; i++, t++, row += c->kv_heads) {
            keys_of[t] = keys + row * key_dim * size;
            values_of[t] = values + row * value_dim * size;
            if (kind == INT8) {
                key_scales[t] = c->key_scales[row + head];
                value_scales[t] = c->value_scales[row + head];
            }
        }
    }
    /* four keys are taken at a time; what is too much at the end is masked */
    for (int64_t t = tokens; t % KEYS; t++) keys_of[t] = keys_of[tokens - 1];

    for (int64_t first = 0; first < tokens; first += TILE) {
        const int64_t count = tokens - first < TILE ? tokens - first : TILE;
        const char *const *key = keys_of + first, *const *value = values_of + first;
        for (int64_t t = 0; t < count; t += KEYS) {
            for (int64_t i = t; i < count && i < t + KEYS; i++) {
                ask_for(value[i], value_dim * size);
                if (first + i + AHEAD < tokens) ask_for(key[i + AHEAD], key_dim * size);
            }
            for (int64_t h = 0, n; h < group; h += n) {
                const float *query = r.query + h * padded(key_dim);
                float *scores = r.scores + h * TILE + t;
                n = next_heads(group - h);
                if (n == 3) products(kind, 3, query, key_dim, key + t, scores);
                else if (n == 2) products(kind, 2, query, key_dim, key + t, scores);
                else products(kind, 1, query, key_dim, key + t, scores);
            }
        }
        for (int64_t h = 0; h < group; h++) {
            float *scores = r.scores + h * TILE;
            if (kind == INT8) for (int64_t t = 0; t < count; t++) scores[t] *= key_scales[first + t];
            r.shrink[h] = weigh(c, scores, count, states + h);
            if (kind == INT8) for (int64_t t = 0; t < count; t++) scores[t] *= value_scales[first + t];
        }
        for (int64_t h = 0, n; h < group; h += n) {
            const float *weights = r.scores + h * TILE, *shrink = r.shrink + h;
            float *into = sums + h * padded(value_dim);
            n = next_heads(group - h);
            if (n == 3) add_all_values(kind, 3, weights, shrink, value, count, value_dim, into);
            else if (n == 2) add_all_values(kind, 2, weights, shrink, value, count, value_dim, into);
            else add_all_values(kind, 1, weights, shrink, value, count, value_dim, into);
        }
    }
}

static void piece_of_float32(const call *c, int64_t q, int64_t h, int64_t from, int64_t to, room r, float *part) {
    do_piece(c, FLOAT32, q, h, from, to, r, part);
}
static void piece_of_bfloat16(const call *c, int64_t q, int64_t h, int64_t from, int64_t to, room r, float *part) {
    do_piece(c, BFLOAT16, q, h, from, to, r, part);
}
static void piece_of_float16(const call *c, int64_t q, int64_t h, int64_t from, int64_t to, room r, float *part) {
    do_piece(c, FLOAT16, q, h, from, to, r, part);
}
static void piece_of_int8(const call *c, int64_t q, int64_t h, int64_t from, int64_t to, room r, float *part) {
    do_piece(c, INT8, q, h, from, to, r, part);
}

/* Queries as floats, and a part that has seen nothing yet, or the attention sink: a score without a value. */
static void prepare(const call *c, int64_t request, int64_t head, int with_sinks, room r, float *part) {
    const int64_t group = c->heads / c->kv_heads, step = padded(c->key_dim);
    memset(part, 0, (size_t)part_size(c) * sizeof(float));
    for (int64_t h = 0; h < group; h++) {
        const int64_t from = request * c->query_step + (head * group + h) * c->head_step;
        const char *row = (const char *)c->query + from * size_of(c->query_kind);
        for (int64_t i = 0; i < step; i += LANES)
            put(r.query + h * step + i, i + LANES <= c->key_dim ? numbers_at(c->query_kind, row, i)
                                                                : last_numbers(c->query_kind, row, i, c->key_dim));
        state *s = (state *)part + h;
        s->peak = c->sinks && with_sinks ? c->sinks[head * group + h] : -INFINITY;
        s->total = exp_one(s->peak - reference(s->peak));
    }
}

/* The parts of a request's pieces become one, head by head, and that the result. */
static void finish(const call *c, int64_t request, int64_t head, float *part, int64_t pieces, int64_t step) {
    const int64_t group = c->heads / c->kv_heads, wide = padded(c->value_dim);
    for (int64_t h = 0; h < group; h++) {
        state *s = (state *)part + h;
        float *sums = sums_of(c, part) + h * wide;
        for (int64_t piece = 1; piece < pieces; piece++) {
            const state *t = (const state *)(part + piece * step) + h;
            const float *more = sums_of(c, part + piece * step) + h * wide;
            const float peak = t->peak > s->peak ? t->peak : s->peak;
            const float a = exp_one(s->peak - reference(peak)), b = exp_one(t->peak - reference(peak));
            for (int64_t i = 0; i < wide; i += LANES) put(sums + i, floats_at(sums + i) * a + floats_at(more + i) * b);
            s->total = s->total * a + t->total * b;
            s->peak = peak;
        }
        const int64_t to = (request * c->heads + head * group + h) * c->value_dim;
        const float total = c->lengths[request] ? s->total : 1.0f;
        for (int64_t i = 0; i < c->value_dim; i++) write(c->out, c->query_kind, to + i, sums[i] / total);
    }
}

/* -- all of it ----------------------------------------------------------------------------------------------------- */

static inline int64_t first_seen(const call *c, int64_t request) {
    const int64_t length = c->lengths[request];
    return length > c->window ? length - c->window : 0;
}

/* pieces[r]: how many there are before request r. Returns what is wrong with lengths or tables, or DONE. */
static int plan(const call *c, int64_t *pieces, int64_t *tokens) {
    pieces[0] = *tokens = 0;
    for (int64_t r = 0; r < c->requests; r++) {
        const int64_t length = c->lengths[r], begin = first_seen(c, r);
        if (length < 0 || length > c->table_width * c->block_size) return WRONG_LENGTH;
        for (int64_t b = begin / c->block_size; b * c->block_size < length; b++) {
            const int32_t block = c->tables[r * c->table_step + b];
            if (block < 0 || block >= c->blocks) return WRONG_BLOCK;
        }
        const int64_t count = (length - begin + PIECE - 1) / PIECE;
        pieces[r + 1] = pieces[r] + (count ? count : 1);  /* one of no tokens, so that zeros are written */
        *tokens += length - begin;
    }
    return DONE;
}

static float *reserve(int64_t floats) { return aligned_alloc(64, ((size_t)floats * sizeof(float) + 63) / 64 * 64); }

int paged_decode(const call *c) {
    const int64_t group = c->heads / c->kv_heads, step = (part_size(c) + 15) / 16 * 16;
    const int64_t query_size = group * padded(c->key_dim), scores_size = group * TILE;
    int64_t *pieces = malloc((size_t)(c->requests + 1) * sizeof *pieces), tokens;
    if (!pieces) return NO_MEMORY;
    int result = plan(c, pieces, &tokens);
    const int64_t all_pieces = result == DONE ? pieces[c->requests] : 0;
    const int several = all_pieces > c->requests;  /* then parts are kept until all pieces of a request are done */
    float *parts = several ? reserve(all_pieces * c->kv_heads * step) : NULL;
    if (several && !parts) result = NO_MEMORY;
    const int64_t work = tokens * c->kv_heads * (c->key_dim + c->value_dim) * size_of(c->pool_kind);

    if (result == DONE)
#pragma omp parallel if (work > SMALL)
    {
        float *mine = reserve(query_size + scores_size + step + group), *after = mine + query_size + scores_size;
        const room r = {.query = mine, .scores = mine + query_size, .part = after, .shrink = after + step};
        if (!mine) {
#pragma omp atomic write
            result = NO_MEMORY;
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < all_pieces * c->kv_heads; item++) {
            if (!mine) continue;
            const int64_t piece = item / c->kv_heads, head = item % c->kv_heads;
            int64_t request = 0, beyond = c->requests;  /* the last request that begins at this piece or before it */
            while (beyond - request > 1) {
                const int64_t middle = (request + beyond) / 2;
                if (pieces[middle] <= piece) request = middle;
                else beyond = middle;
            }
            const int64_t index = piece - pieces[request], count = pieces[request + 1] - pieces[request];
            const int64_t begin = first_seen(c, request) + index * PIECE, length = c->lengths[request];
            const int64_t end = begin + PIECE < length ? begin + PIECE : length;
            /* the parts of one request and head lie side by side */
            float *part = count == 1 ? r.part : parts + (pieces[request] * c->kv_heads + head * count + index) * step;
            prepare(c, request, head, index == 0, r, part);
            if (c->pool_kind == FLOAT32) piece_of_float32(c, request, head, begin, end, r, part);
            else if (c->pool_kind == BFLOAT16) piece_of_bfloat16(c, request, head, begin, end, r, part);
            else if (c->pool_kind == FLOAT16) piece_of_float16(c, request, head, begin, end, r, part);
            else piece_of_int8(c, request, head, begin, end, r, part);
            if (count == 1) finish(c, request, head, part, 1, step);
        }
        if (several) {
#pragma omp for schedule(dynamic)
            for (int64_t item = 0; item < c->requests * c->kv_heads; item++) {
                const int64_t request = item / c->kv_heads, head = item % c->kv_heads;
                const int64_t count = pieces[request + 1] - pieces[request];
                float *part = parts + (pieces[request] * c->kv_heads + head * count) * step;
                if (count > 1) finish(c, request, head, part, count, step);
            }
        }
        free(mine);
    }
    free(parts);
    free(pieces);
    return result;
}
