/* The product of a linear layer whose weights are one byte each, on a CPU.

   Compiled when the library needs it (see compiled.py), for the CPU it runs on. One function, `int8_linear`, two ways:

   dynamic      x becomes int8 on the way in, one scale per token (row of x); the sums are exact integers.
   weight-only  x stays as it is; each byte becomes a float on the way into the multiplication.

   A decoding step reads every weight once and has little to do with it, so the bytes decide. With more tokens the
   arithmetic does: a tile of 2 tokens x 4 output channels uses each loaded byte several times. Scratch memory belongs to
   the call and holds at most `MOST` tokens, so any number of threads may call at once and nothing is kept. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *x;          /* [m, k] in float32 or bfloat16 */
    void *out;              /* [m, n] in the same dtype */
    const int8_t *w;        /* [n, k] codes, row by row */
    const int32_t *sums;    /* [n] 128 x the sum of each row of w; NULL: weight-only */
    const float *scale;     /* [n] one per output channel */
    const float *bias;      /* [n] or NULL */
    const float *smoothing; /* [k] what x is divided by first, or NULL */
    int64_t m, n, k, dtype;
} call;

enum { FLOAT32 = 0, BFLOAT16 = 1 };
enum { COLUMNS = 4, ROWS = 2 };
#define AHEAD 16  /* rows of w that are asked for before they are needed: short rows stop the hardware's own guess */
#define SMALL 16384  /* bytes of w below which a second thread costs more than it does */
#define MOST 128  /* tokens that are computed together; more of them gain nothing from sharing a read of w */

static inline float from_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 64); /* stays a NaN */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);              /* to nearest, ties to even */
}

static void read_row(const void *x, int64_t dtype, int64_t k, float *restrict out) {
    if (dtype == FLOAT32) memcpy(out, x, (size_t)k * sizeof(float));
    else for (int64_t j = 0; j < k; j++) out[j] = from_bfloat16(((const uint16_t *)x)[j]);
}

static inline void write(void *out, int64_t dtype, int64_t at, float value) {
    if (dtype == FLOAT32) ((float *)out)[at] = value;
    else ((uint16_t *)out)[at] = to_bfloat16(value);
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

#if defined(__AVX2__)
#include <immintrin.h>

static inline int32_t sum_of(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_hadd_epi32(s, s);
    return _mm_cvtsi128_si32(_mm_hadd_epi32(s, s));
}

/* [dot32] */
/* 32 products of bytes, added up to 8 sums. Without VNNI neighbours meet in 16 bits on the way; the
   weights were quantised so that two of them always fit (pair_safe_quantize). */
static inline __m256i dot32(__m256i sums, __m256i x, __m256i w) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(sums, x, w);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
#endif
}
/* [end] */

#define INT_TILE(R)                                                                                                 \
    static void int_tile##R(const uint8_t *restrict x, const int8_t *restrict w, int64_t k, int32_t *restrict out) { \
        __m256i s[R][COLUMNS];                                                                                      \
        int64_t j = 0;                                                                                              \
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)                                                         \
            _Pragma("GCC unroll 8") for (int c = 0; c < COLUMNS; c++) s[r][c] = _mm256_setzero_si256();             \
        for (; j + 32 <= k; j += 32) {                                                                              \
            __m256i v[COLUMNS];                                                                                     \
            _Pragma("GCC unroll 8") for (int c = 0; c < COLUMNS; c++)                                               \
                v[c] = _mm256_loadu_si256((const __m256i *)(w + c * k + j));                                        \
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                                   \
                __m256i u = _mm256_loadu_si256((const __m256i *)(x + r * k + j));                                   \
                _Pragma("GCC unroll 8") for (int c = 0; c < COLUMNS; c++) s[r][c] = dot32(s[r][c], u, v[c]);        \
            }                                                                                                       \
        }                                                                                                           \
        for (int r = 0; r < R; r++)                                                                                 \
            for (int c = 0; c < COLUMNS; c++) {                                                                     \
                int32_t t = sum_of(s[r][c]);                                                                        \
                for (int64_t i = j; i < k; i++) t += (int32_t)x[r * k + i] * w[c * k + i];                          \
                out[r * COLUMNS + c] = t;                                                                           \
            }                                                                                                       \
    }
#else /* the compiler finds the vector instructions */
#define INT_TILE(R)                                                                                                 \
    static void int_tile##R(const uint8_t *restrict x, const int8_t *restrict w, int64_t k, int32_t *restrict out) { \
        int32_t s[R][COLUMNS] = {{0}};                                                                              \
        for (int64_t j = 0; j < k; j++)                                                                             \
            for (int r = 0; r < R; r++)                                                                             \
                for (int c = 0; c < COLUMNS; c++) s[r][c] += (int32_t)x[r * k + j] * w[c * k + j];                  \
        memcpy(out, s, sizeof s);                                                                                   \
    }
#endif
INT_TILE(1)
INT_TILE(2)

/* Eight partial sums a channel, in an order that is fixed: so a token's result does not depend on its company. */
typedef float float8 __attribute__((vector_size(32)));
typedef int8_t byte8 __attribute__((vector_size(8)));

static inline float8 floats_at(const float *p) {
    float8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline float8 weights_at(const int8_t *p) {
#if defined(__AVX2__)
    return (float8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    byte8 v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, float8);
#endif
}

#define FLOAT_TILE(R)                                                                                               \
    static void float_tile##R(const float *restrict x, const int8_t *restrict w, int64_t k, float *restrict out) {   \
        float8 s[R][COLUMNS] = {{{0}}};                                                                             \
        int64_t j = 0;                                                                                              \
        for (; j + 8 <= k; j += 8) {                                                                                \
            float8 u[R];                                                                                            \
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) u[r] = floats_at(x + r * k + j);                    \
            _Pragma("GCC unroll 8") for (int c = 0; c < COLUMNS; c++) {                                             \
                float8 v = weights_at(w + c * k + j);                                                               \
                _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) s[r][c] += u[r] * v;                            \
            }                                                                                                       \
        }                                                                                                           \
        for (int r = 0; r < R; r++)                                                                                 \
            for (int c = 0; c < COLUMNS; c++) {                                                                     \
                float t = 0.0f;                                                                                     \
                for (int i = 0; i < 8; i++) t += s[r][c][i];                                                        \
                for (int64_t i = j; i < k; i++) t += x[r * k + i] * (float)w[c * k + i];                            \
                out[r * COLUMNS + c] = t;                                                                           \
            }                                                                                                       \
    }
FLOAT_TILE(1)
FLOAT_TILE(2)

static inline void ask_ahead(const call *l, int64_t row) {
    if (row + COLUMNS + AHEAD > l->n) return;
    const int8_t *next = l->w + (row + AHEAD) * l->k;
    for (int64_t j = 0; j < COLUMNS * l->k; j += 64) __builtin_prefetch(next + j);
}

/* The last tile of four channels overlaps the one before it when n is no multiple of four. */
static inline int64_t first_of(int64_t block, int64_t n) {
    int64_t first = block * COLUMNS;
    return first + COLUMNS > n ? n - COLUMNS : first;
}

/* Row r of x, as floats, to its codes and scale. */
static void quantize(const call *l, int64_t r, const float *inverse, float *rows, uint8_t *codes, float *row_scale) {
    const int64_t k = l->k, size = l->dtype == FLOAT32 ? 4 : 2;
    read_row((const char *)l->x + r * k * size, l->dtype, k, rows + r * k);
    row_scale[r] = quantize_row(rows + r * k, inverse, k, codes + r * k);
}

/* [dynamic] */
/* l->m tokens, at most MOST of them, in integers. inverse: 1 / smoothing, [k] or NULL; rows: m x k floats;
   row_scale: m floats; codes: m x k bytes. */
static void dynamic(const call *l, const float *inverse, float *rows, float *restrict row_scale,
                    uint8_t *restrict codes) {
    const int64_t m = l->m, n = l->n, k = l->k, blocks = (n + COLUMNS - 1) / COLUMNS;
    if (m * k <= SMALL) { /* to open a parallel region, be it of one thread, would take longer */
        for (int64_t r = 0; r < m; r++) quantize(l, r, inverse, rows, codes, row_scale);
    } else {
#pragma omp parallel for schedule(static)
        for (int64_t r = 0; r < m; r++) quantize(l, r, inverse, rows, codes, row_scale);
    }
#pragma omp parallel for schedule(static) if (n * k > SMALL)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t first = first_of(b, n);
        ask_ahead(l, first);
        for (int64_t r = 0; r < m; r += ROWS) {
            const int64_t rows = m - r < ROWS ? m - r : ROWS;
            int32_t sums[ROWS * COLUMNS];
            if (rows == 2) int_tile2(codes + r * k, l->w + first * k, k, sums);
            else int_tile1(codes + r * k, l->w + first * k, k, sums);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t c = 0; c < COLUMNS; c++) {
                    /* the scale of the weights first: that of a huge token could lead beyond float32 */
                    int32_t sum = sums[i * COLUMNS + c] - l->sums[first + c];
                    float y = (float)sum * l->scale[first + c] * row_scale[r + i];
                    write(l->out, l->dtype, (r + i) * n + first + c, l->bias ? y + l->bias[first + c] : y);
                }
        }
    }
}
/* [end] */

/* l->m tokens, at most MOST of them, in floats. rows: m x k floats, unless x is in float32 already. */
static void weight_only(const call *l, float *rows) {
    const int64_t m = l->m, n = l->n, k = l->k, blocks = (n + COLUMNS - 1) / COLUMNS;
    const float *x = l->dtype == FLOAT32 ? l->x : rows;
    if (l->dtype != FLOAT32) read_row(l->x, l->dtype, m * k, rows);
#pragma omp parallel for schedule(static) if (n * k > SMALL)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t first = first_of(b, n);
        ask_ahead(l, first);
        for (int64_t r = 0; r < m; r += ROWS) {
            const int64_t taken = m - r < ROWS ? m - r : ROWS;
            float sums[ROWS * COLUMNS];
            if (taken == 2) float_tile2(x + r * k, l->w + first * k, k, sums);
            else float_tile1(x + r * k, l->w + first * k, k, sums);
            for (int64_t i = 0; i < taken; i++)
                for (int64_t c = 0; c < COLUMNS; c++) {
                    float y = sums[i * COLUMNS + c] * l->scale[first + c];
                    write(l->out, l->dtype, (r + i) * n + first + c, l->bias ? y + l->bias[first + c] : y);
                }
        }
    }
}

/* out = x w^T, scaled. Needs m >= 1, n >= 4 and k >= 1. Returns 0, or 1 if there is no memory. */
int int8_linear(const call *whole) {
    call l = *whole;
    const int64_t size = l.dtype == FLOAT32 ? 4 : 2, most = l.m < MOST ? l.m : MOST;
    const int64_t floats = l.sums || l.dtype != FLOAT32 ? most * l.k : 0, codes = l.sums ? most * l.k : 0;
    float *inverse = malloc((size_t)(4 * (l.k + floats + most) + codes)), *rows = inverse + l.k;
    float *row_scale = rows + floats;
    if (!inverse) return 1;
    if (l.smoothing) for (int64_t j = 0; j < l.k; j++) inverse[j] = 1.0f / l.smoothing[j];
    for (int64_t at = 0; at < whole->m; at += MOST) {
        l.m = whole->m - at < MOST ? whole->m - at : MOST;
        l.x = (const char *)whole->x + at * l.k * size;
        l.out = (char *)whole->out + at * l.n * size;
        if (l.sums) dynamic(&l, l.smoothing ? inverse : NULL, rows, row_scale, (uint8_t *)(row_scale + most));
        else weight_only(&l, rows);
    }
    free(inverse);
    return 0;
}
