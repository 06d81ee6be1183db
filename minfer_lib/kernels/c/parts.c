/* What stands between the products of a decoder layer, on a CPU: the norm, and the rotary embedding with the cache write.

   In torch each is half a dozen operations, and to start one takes longer than to compute it for a few tokens.

   All sums are in float32, in an order that the size of a row alone decides; numbers are rounded to their dtype where the
   model's own modules do. Compiled when the library needs it (see compiled.py), for the CPU it runs on. */

#include "vectors.h"

/* Numbers up to which one thread works, and no parallel region is opened: be it of one thread, it takes longer. */
#define SMALL 16384
enum { MOST = 1024 }; /* numbers of a head */

typedef struct {
    const void *x, *gain;  /* [rows, size], [size] */
    void *out;             /* [rows, size] */
    int64_t rows, size;
    float eps;
    int32_t kind;          /* of all three: FLOAT32 or BFLOAT16 */
} norm_call;

typedef struct {
    const void *qkv, *cos, *sin;      /* [tokens, heads + 2 kv_heads, dim], [tokens, dim] */
    const void *q_gain, *k_gain;      /* [dim]: queries and keys are normed first; or NULL */
    const int64_t *slots;             /* [tokens] rows of the pools */
    void *query, *keys, *values;      /* [tokens, heads, dim]; pools [rows, kv_heads, dim] */
    float *key_scales, *value_scales; /* [rows, kv_heads] of pools in INT8 */
    int64_t tokens, heads, kv_heads, dim;
    float eps;
    int32_t kind, pool_kind;          /* of all but the pools; FLOAT32 or BFLOAT16 */
} rope_call;

ALWAYS float rounded(int kind, float value) {
    uint16_t half;
    if (kind == FLOAT32) return value;
    write(&half, BFLOAT16, 0, value);
    return number_at(BFLOAT16, &half, 0);
}

/* 1 / sqrt(mean of x^2 + eps) */
ALWAYS float norm_factor(int kind, const void *x, int64_t size, float eps) {
    float sums[16] = {0}, sum = 0.0f;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += number_at(kind, x, i + j) * number_at(kind, x, i + j);
    for (; i < size; i++) sums[0] += number_at(kind, x, i) * number_at(kind, x, i);
    for (int j = 0; j < 16; j++) sum += sums[j];
    return 1.0f / sqrtf(sum / (float)size + eps);
}

ALWAYS void norm_row(int kind, const void *restrict x, const void *restrict gain, int64_t size, float eps,
                     void *restrict out) {
    const float factor = norm_factor(kind, x, size, eps);
    for (int64_t i = 0; i < size; i++)
        write(out, kind, i, rounded(kind, number_at(kind, x, i) * factor) * number_at(kind, gain, i));
}

/* Rows begin..end - 1 of a norm. */
static void norm_rows(const norm_call *c, int64_t begin, int64_t end) {
    const int64_t step = c->size * size_of(c->kind);
    for (int64_t r = begin; r < end; r++) {
        const void *x = (const char *)c->x + r * step;
        void *out = (char *)c->out + r * step;
        if (c->kind == FLOAT32) norm_row(FLOAT32, x, c->gain, c->size, c->eps, out);
        else norm_row(BFLOAT16, x, c->gain, c->size, c->eps, out);
    }
}

void rms_norm(const norm_call *c) {
    if (c->rows == 1 || c->rows * c->size <= SMALL) { norm_rows(c, 0, c->rows); return; }
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < c->rows; r++) norm_rows(c, r, r + 1);
}

/* One head [dim] as floats, normed if there is a gain, and each pair (i, i + dim / 2) turned by its angle. */
ALWAYS void turn(int kind, const void *restrict x, const void *gain, const void *restrict cos, const void *restrict sin,
                 int64_t dim, float eps, float *restrict out) {
    float row[MOST];
    const int64_t half = dim / 2;
    const float factor = gain ? norm_factor(kind, x, dim, eps) : 1.0f;
    for (int64_t i = 0; i < dim; i++) row[i] = number_at(kind, x, i);
    if (gain) for (int64_t i = 0; i < dim; i++)
        row[i] = rounded(kind, rounded(kind, row[i] * factor) * number_at(kind, gain, i));
    for (int64_t i = 0; i < half; i++) {
        const float low = row[i] * number_at(kind, cos, i) - row[i + half] * number_at(kind, sin, i);
        const float high = row[i + half] * number_at(kind, cos, i + half) + row[i] * number_at(kind, sin, i + half);
        out[i] = rounded(kind, low);
        out[i + half] = rounded(kind, high);
    }
}

/* A row to where it stays, in its kind. */
ALWAYS void keep(int kind, const float *restrict row, int64_t dim, void *restrict out) {
    for (int64_t i = 0; i < dim; i++) write(out, kind, i, row[i]);
}

/* The same in 8 bits: codes -127..127 and their scale, by the definition that `reference_parts.quantize_rows` is. */
static void keep_codes(const float *restrict row, int64_t dim, int8_t *restrict out, float *scale) {
    float peak = 0.0f;
    for (int64_t i = 0; i < dim; i++) peak = fabsf(row[i]) > peak || row[i] != row[i] ? fabsf(row[i]) : peak;
    *scale = peak / 127.0f;
    if (!(peak > 0.0f && peak < INFINITY)) { memset(out, 0, (size_t)dim); return; }
    for (int64_t i = 0; i < dim; i++) {
        const float code = row[i] / *scale;  /* of numbers next to zero, whose scale has no digits left, more than 127 */
        out[i] = (int8_t)(int32_t)rintf(code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code);
    }
}

/* One token: queries and keys turned, keys and values to their row of the pools. */
ALWAYS void token(const rope_call *c, int kind, int64_t t) {
    const int64_t dim = c->dim, step = dim * size_of(kind), row = c->slots[t] * c->kv_heads;
    const char *x = (const char *)c->qkv + t * (c->heads + 2 * c->kv_heads) * step;
    const char *cos = (const char *)c->cos + t * step, *sin = (const char *)c->sin + t * step;
    float out[MOST];
    for (int64_t h = 0; h < c->heads + 2 * c->kv_heads; h++, x += step) {
        if (h < c->heads) {
            turn(kind, x, c->q_gain, cos, sin, dim, c->eps, out);
            keep(kind, out, dim, (char *)c->query + (t * c->heads + h) * step);
            continue;
        }
        const int is_key = h < c->heads + c->kv_heads;
        const int64_t at = row + (h - c->heads) % c->kv_heads;
        if (is_key) turn(kind, x, c->k_gain, cos, sin, dim, c->eps, out);
        else for (int64_t i = 0; i < dim; i++) out[i] = number_at(kind, x, i);
        char *pool = (char *)(is_key ? c->keys : c->values) + at * dim * size_of(c->pool_kind);
        if (c->pool_kind == INT8) keep_codes(out, dim, (int8_t *)pool, (is_key ? c->key_scales : c->value_scales) + at);
        else keep(kind, out, dim, pool);
    }
}

static void tokens(const rope_call *c, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
        if (c->kind == FLOAT32) token(c, FLOAT32, t);
        else token(c, BFLOAT16, t);
    }
}

/* dim is even and at most MOST; pool_kind is kind or INT8. */
void rope_cache(const rope_call *c) {
    const int64_t numbers = c->tokens * (c->heads + 2 * c->kv_heads) * c->dim;
    if (c->tokens == 1 || numbers <= SMALL) { tokens(c, 0, c->tokens); return; }
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < c->tokens; t++) tokens(c, t, t + 1);
}
