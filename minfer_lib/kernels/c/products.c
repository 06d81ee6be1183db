/* Products of a linear layer, out = x w^T, on a CPU: for weights of one byte, and for few rows of any weights.

   Compiled when the library needs it (see compiled.py), for the CPU it runs on. One function, `product`, three ways:

   dynamic      w is int8, and x becomes int8 on the way in, one scale per token (row of x); the sums are exact integers.
   weight-only  w is int8, x stays as it is; each byte becomes a float on the way into the multiplication.
   floats       w is float32 or bfloat16.

   What follows the product may be part of it: SiLU of the first half of the outputs times the second, and adding to what
   `out` holds. A decoding step reads every weight once and has little to do with it, so the bytes decide: one token takes
   the rows of w one after the other, as memory likes it. With more tokens the arithmetic decides: a tile of several
   tokens x 4 output channels uses each loaded byte several times. Sums of one output are added in an order that does not
   depend on the tile: so a token's result does not depend on its company. Scratch memory belongs to the call and holds
   at most `MOST` tokens, so any number of threads may call at once and nothing is kept. */

#include "vectors.h"

typedef struct {
    const void *x;          /* [m, k] in float32 or bfloat16 */
    void *out;              /* [m, n], gated [m, n / 2], in the same dtype */
    const void *w;          /* [n, k], row by row */
    const int32_t *sums;    /* [n] 128 x the sum of each row of w; NULL: not dynamic */
    const float *scale;     /* [n] one per output channel; NULL: w is in floats */
    const void *bias;       /* [n] or NULL: float32, beside weights in floats of their dtype */
    const float *smoothing; /* [k] what x is divided by first, or NULL */
    int64_t m, n, k;
    int32_t kind, weight_kind;  /* of x and out; of w */
    int32_t gated, adds;
} call;

enum { COLUMNS = 4 };
#define NEAR 16384  /* bytes of w that all tokens take in turn, so that they stay in a core's nearest cache */
#define SMALL 16384  /* numbers below which a second thread costs more than it does */
#define MOST 128  /* tokens that are computed together; more of them gain nothing from sharing a read of w */

typedef float float4 __attribute__((vector_size(16)));
typedef int32_t int4 __attribute__((vector_size(16)));
typedef uint16_t short4 __attribute__((vector_size(8)));

/* Bytes of a row that begins at a cache line, as the next one does: what crosses from one to another is read twice. */
static inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static void read_row(const void *x, int kind, int64_t k, float *restrict out) {
    if (kind == FLOAT32) memcpy(out, x, (size_t)k * sizeof(float));
    else for (int64_t j = 0; j < k; j++) out[j] = number_at(BFLOAT16, x, j);
}

/* [quantize_row] */
/* One token to codes 1..255 that stand for -127..127; returns its scale. The magnitudes are compared as
   integers, among which NaN and infinity are the largest: such a token gets the scale NaN, and so does
   all that comes of it. */
static float quantize_row(float *restrict x, const float *restrict inverse, int64_t k, uint8_t *restrict codes) {
    uint32_t top = 0;
    if (inverse) for (int64_t j = 0; j < k; j++) x[j] *= inverse[j];
    for (int64_t j = 0; j < k; j++) {
        uint32_t bits;
        memcpy(&bits, &x[j], sizeof bits);
        bits &= 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    float peak;
    memcpy(&peak, &top, sizeof peak);
    if (top >= 0x7f800000u) { memset(codes, 128, (size_t)k); return NAN; }
    if (peak < 1.5e-36f) { memset(codes, 128, (size_t)k); return 0.0f; }
    const float steps = 127.0f / peak;
    for (int64_t j = 0; j < k; j++) codes[j] = (uint8_t)(int32_t)(rintf(x[j] * steps) + 128.0f);
    return peak / 127.0f;
}
/* [end] */

/* -- one tile ------------------------------------------------------------------------------------------------------ */

/* BYTES codes of a token (unsigned) and of a weight (signed) are multiplied, four neighbours added to a 32-bit sum. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
enum { BYTES = 64, TOKENS = 4 };
typedef __m512i sums, bytes;
ALWAYS bytes load(const void *p) { return _mm512_loadu_si512(p); }
ALWAYS sums dot(sums s, bytes x, bytes w) {  /* _mm512_dpbusd_epi32, for which GCC 12 moves every sum about */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(s) : "v"(x), "v"(w));
    return s;
}
ALWAYS int4 four_sums(sums a, sums b, sums c, sums d) {  /* neighbours are interleaved and added until four are left */
    a = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    c = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    a = _mm512_add_epi32(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    return (int4)_mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
#elif defined(__AVX2__)
enum { BYTES = 32, TOKENS = 2 };
typedef __m256i sums, bytes;
ALWAYS bytes load(const void *p) { return _mm256_loadu_si256(p); }
/* [dot32] */
/* 32 products of bytes, added up to 8 sums. Without VNNI neighbours meet in 16 bits on the way; the
   weights were quantised so that two of them always fit (pair_safe_quantize). */
ALWAYS sums dot(sums s, bytes x, bytes w) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(s, x, w);
#else
    return _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
#endif
}
/* [end] */
ALWAYS int4 four_sums(sums a, sums b, sums c, sums d) {
    a = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    return (int4)_mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
enum { BYTES = 16, TOKENS = 4 };
typedef int32x4_t sums;
typedef int8x16_t bytes;
ALWAYS bytes load(const void *p) { return vld1q_s8(p); }
ALWAYS sums dot(sums s, bytes x, bytes w) { return vdotq_s32(s, veorq_s8(x, vdupq_n_s8(-128)), w); }
#define SIGNED_CODES 1  /* 128 was taken off each code of a token */
ALWAYS int4 four_sums(sums a, sums b, sums c, sums d) {
    return (int4)vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}
#else /* the compiler finds the vector instructions */
enum { BYTES = 16, TOKENS = 2 };
typedef int32_t sums __attribute__((vector_size(64)));
typedef struct { uint8_t at[16]; } bytes;
ALWAYS bytes load(const void *p) { bytes b; memcpy(&b, p, sizeof b); return b; }
ALWAYS sums dot(sums s, bytes x, bytes w) {
    for (int i = 0; i < 16; i++) s[i] += (int32_t)x.at[i] * (int8_t)w.at[i];
    return s;
}
ALWAYS int4 four_sums(sums a, sums b, sums c, sums d) {
    int4 s = {0};
    for (int i = 0; i < 16; i++) s += (int4){a[i], b[i], c[i], d[i]};
    return s;
}
#endif
#if !defined(SIGNED_CODES)
#define SIGNED_CODES 0
#endif

/* Sums of `tokens` rows of codes [k] with four rows w[c] of weights. */
ALWAYS void int_tile(int tokens, const uint8_t *restrict x, const char *const *w, int64_t k, int4 *restrict out) {
    const int64_t step = aligned(k);
    sums s[TOKENS][COLUMNS];
    const int64_t end = k / BYTES * BYTES;
    UNROLL for (int r = 0; r < tokens; r++) UNROLL for (int c = 0; c < COLUMNS; c++) s[r][c] = (sums){0};
    if (tokens == 1) { /* one row of w after the other */
        UNROLL for (int c = 0; c < COLUMNS; c++)
            for (int64_t j = 0; j < end; j += BYTES) s[0][c] = dot(s[0][c], load(x + j), load(w[c] + j));
    } else for (int64_t j = 0; j < end; j += BYTES) {
        bytes v[COLUMNS];
        UNROLL for (int c = 0; c < COLUMNS; c++) v[c] = load(w[c] + j);
        UNROLL for (int c = 0; c < COLUMNS; c++) HOLD(v[c]);
        UNROLL for (int r = 0; r < tokens; r++) {
            const bytes u = load(x + r * step + j);
            UNROLL for (int c = 0; c < COLUMNS; c++) s[r][c] = dot(s[r][c], u, v[c]);
        }
    }
    UNROLL for (int r = 0; r < tokens; r++) {
        out[r] = four_sums(s[r][0], s[r][1], s[r][2], s[r][3]);
        for (int64_t j = end; j < k; j++)
            for (int c = 0; c < COLUMNS; c++) out[r][c] += ((int32_t)x[r * step + j] - 128 * SIGNED_CODES) * (int8_t)w[c][j];
    }
}

/* The same in floats: LANES partial sums an output. */
ALWAYS void float_tile(int tokens, int kind, const float *restrict x, const char *const *w, int64_t k,
                       float4 *restrict out) {
    vec s[TOKENS][COLUMNS] = {{{0}}};
    const int64_t end = k / LANES * LANES;
    if (tokens == 1) {
        UNROLL for (int c = 0; c < COLUMNS; c++)
            for (int64_t j = 0; j < end; j += LANES) s[0][c] += floats_at(x + j) * numbers_at(kind, w[c], j);
    } else for (int64_t j = 0; j < end; j += LANES) {
        vec u[TOKENS];
        UNROLL for (int r = 0; r < tokens; r++) u[r] = floats_at(x + r * k + j);
        UNROLL for (int r = 0; r < tokens; r++) HOLD(u[r]);
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            vec v = numbers_at(kind, w[c], j);
            HOLD(v);
            UNROLL for (int r = 0; r < tokens; r++) s[r][c] += u[r] * v;
        }
    }
    UNROLL for (int r = 0; r < tokens; r++) {
        sums_of_four(s[r][0], s[r][1], s[r][2], s[r][3], (float *)(out + r));
        for (int64_t j = end; j < k; j++)
            for (int c = 0; c < COLUMNS; c++) out[r][c] += x[r * k + j] * number_at(kind, w[c], j);
    }
}

/* -- a layer ------------------------------------------------------------------------------------------------------- */

/* The m tokens that a layer works on: as floats [m, k], as codes [m, k] with a scale each. */
typedef struct {
    const float *rows, *row_scale;
    const uint8_t *codes;
} input;

/* `count` numbers of four bytes, and what does not matter behind them. */
ALWAYS float4 four_numbers(const void *p, int64_t first, int count) {
    float4 v = {0};
    if (count == COLUMNS) memcpy(&v, (const float *)p + first, sizeof v);
    else memcpy(&v, (const float *)p + first, (size_t)count * sizeof(float));
    return v;
}

/* [outputs] */
/* Outputs first..first + 3 of `tokens` tokens from the r-th on; of `count` that there are, the last stands for more. */
ALWAYS void outputs(const call *l, input in, int tokens, int64_t r, int64_t first, int count, float4 *y) {
    const int64_t k = l->k;
    const int kind = l->weight_kind;
    const float *x = in.rows + r * k;
    const char *w[COLUMNS];
    UNROLL for (int c = 0; c < COLUMNS; c++)
        w[c] = (const char *)l->w + (first + (c < count ? c : count - 1)) * k * size_of(kind);
    if (l->sums) {
        const int4 offset = (int4)four_numbers(l->sums, first, count);
        int4 found[TOKENS];
        int_tile(tokens, in.codes + r * aligned(k), w, k, found);
        UNROLL for (int i = 0; i < tokens; i++)
            y[i] = __builtin_convertvector(SIGNED_CODES ? found[i] : found[i] - offset, float4);
    } else if (kind == INT8) float_tile(tokens, INT8, x, w, k, y);
    else if (kind == FLOAT32) float_tile(tokens, FLOAT32, x, w, k, y);
    else float_tile(tokens, BFLOAT16, x, w, k, y);
    if (l->scale) {
        const float4 scale = four_numbers(l->scale, first, count);
        UNROLL for (int i = 0; i < tokens; i++) y[i] *= scale;
    }
    /* the scale of the weights first: that of a huge token could lead beyond float32 */
    if (l->sums) UNROLL for (int i = 0; i < tokens; i++) y[i] *= in.row_scale[r + i];
    if (l->bias) {
        const int bias_kind = kind == BFLOAT16 ? BFLOAT16 : FLOAT32;
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            const float bias = number_at(bias_kind, l->bias, first + (c < count ? c : count - 1));
            UNROLL for (int i = 0; i < tokens; i++) y[i][c] += bias;
        }
    }
}
/* [end] */

/* y = y / (1 + e^-y) * up, as many numbers at a time as a vector has; where it comes near zero from below, zero. */
ALWAYS void gate(float4 *y, const float4 *up, int tokens) {
    UNROLL for (int i = 0; i < tokens; i += LANES / 4) {
        vec v = {0}, u = {0};
        const size_t bytes = (tokens - i < LANES / 4 ? tokens - i : LANES / 4) * sizeof *y;
        memcpy(&v, y + i, bytes);
        memcpy(&u, up + i, bytes);
        v = v / (1.0f + exp_of(choose(-v > 87.0f, all(87.0f), -v))) * u;
        memcpy(y + i, &v, bytes);
    }
}

ALWAYS float4 four_at(int kind, const void *p, int64_t at) {
    float4 y;
    if (kind == FLOAT32) memcpy(&y, (const float *)p + at, sizeof y);
    else {
        short4 part;
        memcpy(&part, (const uint16_t *)p + at, sizeof part);
        y = (float4)(__builtin_convertvector(part, int4) << 16);
    }
    return y;
}

/* bfloat16: to nearest, ties to even; NaN stays NaN. */
ALWAYS void put_four(int kind, void *p, int64_t at, float4 y) {
    if (kind == FLOAT32) memcpy((float *)p + at, &y, sizeof y);
    else {
        const int4 bits = (int4)y, even = bits + 0x7fff + (bits >> 16 & 1), nan = y != y;
        const short4 part = __builtin_convertvector(((nan & (bits | 0x400000)) | (~nan & even)) >> 16, short4);
        memcpy((uint16_t *)p + at, &part, sizeof part);
    }
}

/* The same outputs, and what follows the product. */
ALWAYS void tile(const call *l, input in, int tokens, int64_t r, int64_t first) {
    const int64_t width = l->gated ? l->n / 2 : l->n;
    const int count = width - first < COLUMNS ? (int)(width - first) : COLUMNS;
    float4 y[TOKENS];
    outputs(l, in, tokens, r, first, count, y);
    if (l->gated) {
        float4 up[TOKENS];
        outputs(l, in, tokens, r, width + first, count, up);
        gate(y, up, tokens);
    }
    UNROLL for (int i = 0; i < tokens; i++) {
        const int64_t at = (r + i) * width + first;
        if (count < COLUMNS) {
            for (int c = 0; c < count; c++)
                write(l->out, l->kind, at + c, l->adds ? y[i][c] + number_at(l->kind, l->out, at + c) : y[i][c]);
            continue;
        }
        if (l->adds) y[i] += four_at(l->kind, l->out, at);
        put_four(l->kind, l->out, at, y[i]);
    }
}

/* Row r of x, as floats, and where the layer is dynamic to its codes. */
static void prepare(const call *l, int64_t r, const float *inverse, float *rows, uint8_t *codes, float *row_scale) {
    const int64_t k = l->k;
    if (rows) read_row((const char *)l->x + r * k * size_of(l->kind), l->kind, k, rows + r * k);
    if (codes) row_scale[r] = quantize_row(rows + r * k, inverse, k, codes + r * aligned(k));
}

/* Brings four rows of w to the nearest cache, byte after byte, as memory is fastest at: side by side they take twice as
   long to come. */
static void fetch(const call *l, int64_t first) {
    const int64_t step = l->k * size_of(l->weight_kind);
    const volatile char *w = (const char *)l->w + first * step;
    for (int64_t j = 0; j < COLUMNS * step && first * step + j < l->n * step; j += 64) (void)w[j];
}

/* Tiles begin..end - 1, which all tokens take in turn. */
static void piece(const call *l, input in, int64_t begin, int64_t end) {
    if (l->m >= TOKENS) for (int64_t t = begin; t < end; t++) {
        fetch(l, t * COLUMNS);
        if (l->gated) fetch(l, l->n / 2 + t * COLUMNS);
    }
    for (int64_t r = 0; r < l->m; r += TOKENS)
        for (int64_t t = begin; t < end; t++) {
            if (r + TOKENS <= l->m) tile(l, in, TOKENS, r, t * COLUMNS);
            else for (int64_t i = r; i < l->m; i++) tile(l, in, 1, i, t * COLUMNS);
        }
}

/* l->m tokens, at most MOST of them. inverse: 1 / smoothing, [k] or NULL; rows: room for m x k floats, NULL
   where x is read as it is; codes: for m x aligned(k) bytes, and row_scale for m floats, NULL where x stays. */
static void multiply(const call *l, const float *inverse, float *rows, uint8_t *codes, float *row_scale) {
    const int64_t m = l->m, k = l->k, width = l->gated ? l->n / 2 : l->n, tiles = (width + COLUMNS - 1) / COLUMNS;
    const int64_t group = NEAR / (COLUMNS * k * size_of(l->weight_kind) + 1) + 1, pieces = (tiles + group - 1) / group;
    const input in = {rows ? rows : l->x, row_scale, codes};
    const int alone = m * k <= SMALL; /* to wait for a second thread would take longer */
    if (alone) for (int64_t r = 0; r < m; r++) prepare(l, r, inverse, rows, codes, row_scale);
    if (alone && l->n * k <= SMALL) { piece(l, in, 0, tiles); return; }
#pragma omp parallel
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < m; r++) prepare(l, r, inverse, rows, codes, row_scale);
        }
#pragma omp for schedule(static) nowait
        for (int64_t p = 0; p < pieces; p++) piece(l, in, p * group, p + 1 < pieces ? (p + 1) * group : tiles);
    }
}

/* Returns 0, or 1 without memory. */
int product(const call *whole) {
    call l = *whole;
    const int64_t most = l.m < MOST ? l.m : MOST, width = l.gated ? l.n / 2 : l.n;
    const int64_t floats = l.sums || l.kind != FLOAT32 ? most * l.k : 0, codes = l.sums ? most * aligned(l.k) : 0;
    char *memory = malloc((size_t)(codes + 4 * (floats + l.k + most) + 63));
    if (!memory) return 1;
    uint8_t *code_rows = (uint8_t *)memory + (-(uintptr_t)memory & 63);
    float *rows = (float *)(code_rows + codes), *inverse = rows + floats, *row_scale = inverse + l.k;
    if (l.smoothing) for (int64_t j = 0; j < l.k; j++) inverse[j] = 1.0f / l.smoothing[j];
    for (int64_t at = 0; at < whole->m; at += MOST) {
        l.m = whole->m - at < MOST ? whole->m - at : MOST;
        l.x = (const char *)whole->x + at * l.k * size_of(l.kind);
        l.out = (char *)whole->out + at * width * size_of(l.kind);
        multiply(&l, l.smoothing ? inverse : NULL, floats ? rows : NULL, codes ? code_rows : NULL, row_scale);
    }
    free(memory);
    return 0;
}
