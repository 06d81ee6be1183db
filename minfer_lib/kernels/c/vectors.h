/* Vectors of floats, and numbers in two bytes: what the kernels of a CPU have in common.

   Written with the vector types that GCC and Clang share, so that one text serves every CPU; instructions by name only
   where a compiler does not find them. */

#ifndef MINFER_VECTORS_H
#define MINFER_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 };

/* -- a vector of floats: what one instruction works on ------------------------------------------------------------ */

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__) && defined(__F16C__)
#define LANES 8
#else
#define LANES 4
#endif
#if LANES > 4
#include <immintrin.h>
#endif
/* Keeps a value in a register: GCC reads again from memory what it has just loaded, if it can be part of a product. */
#if defined(__AVX512F__)
#define HOLD(v) __asm__("" : "+v"(v))
#elif defined(__SSE2__)
#define HOLD(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define HOLD(v) __asm__("" : "+w"(v))
#else
#define HOLD(v)
#endif
#define ALWAYS static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int8_t codes __attribute__((vector_size(LANES)));

ALWAYS vec floats_at(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
ALWAYS void put(float *p, vec v) { memcpy(p, &v, sizeof v); }
ALWAYS vec all(float x) { return (vec){0} + x; }
ALWAYS vec choose(ints where, vec a, vec b) { return (vec)((where & (ints)a) | (~where & (ints)b)); }
ALWAYS vec larger(vec a, vec b) { return choose(a > b, a, b); }  /* b if a is NaN */
static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
static inline int64_t size_of(int kind) { return kind == FLOAT32 ? 4 : kind == INT8 ? 1 : 2; }

/* e^x for x up to 88, to the last bit or next to it: 2^n times a polynomial, n and the rest from x / ln 2.
   Below the smallest normal number it is 0; NaN stays NaN. Coefficients of the Cephes library (Moshier). */
ALWAYS vec exp_of(vec x) {
    const ints zero = x < -87.3f;
    x = choose(zero, all(0.0f), x);
    const vec shifted = x * 1.44269504f + 12582912.0f;  /* 1.5 x 2^23: what follows the point is rounded off */
    const vec n = shifted - 12582912.0f;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  /* ln 2 in two parts, the first times n is exact */
    vec y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    y *= (vec)(((ints)shifted - 0x4b400000 + 127) << 23);  /* 2^n, written as a float's exponent */
    return choose(zero, all(0.0f), y);
}

ALWAYS float exp_one(float x) { return exp_of(all(x))[0]; }

/* The sums of four vectors: neighbours are interleaved and added until one vector holds all four sums. */
ALWAYS void sums_of_four(vec a, vec b, vec c, vec d, float *out) {
#if LANES == 16
    a = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    c = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    a = (vec)(_mm512_unpacklo_pd((__m512d)a, (__m512d)c)) + (vec)(_mm512_unpackhi_pd((__m512d)a, (__m512d)c));
    const __m256 half = _mm512_castps512_ps256(a) + (__m256)_mm512_extractf64x4_pd((__m512d)a, 1);
    _mm_storeu_ps(out, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif LANES == 8
    a = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1));
#else
    for (int i = 0; i < LANES; i++) {
        const vec four = {a[i], b[i], c[i], d[i]};
        put(out, i ? floats_at(out) + four : four);
    }
#endif
}

/* -- numbers of two bytes, and of one ------------------------------------------------------------------------------------------ */

#if LANES == 16
ALWAYS vec from_float16(const void *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(p)); }
ALWAYS ints widened(const void *p) { return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
ALWAYS vec from_int8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
#elif LANES == 8
ALWAYS vec from_float16(const void *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS ints widened(const void *p) { return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS vec from_int8(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p))); }
#else
ALWAYS ints widened(const void *p) {
    halves h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, ints);
}
ALWAYS vec from_int8(const void *p) {
    codes c;
    memcpy(&c, p, sizeof c);
    return __builtin_convertvector(c, vec);
}
/* Exponent and digits move to where a float has them; 2^112 makes up for the exponents' different zeros. */
ALWAYS vec from_float16(const void *p) {
    const ints bits = widened(p), size = bits & 0x7fff;
    const vec value = (vec)(size << 13) * 0x1p112f;
    const ints endless = (size > 0x7bff) & 0x7f800000;  /* infinity and NaN */
    return (vec)((ints)value | endless | (bits & 0x8000) << 16);
}
#endif

/* LANES numbers of a row, from the i-th on. */
ALWAYS vec numbers_at(int kind, const char *row, int64_t i) {
    if (kind == FLOAT32) return floats_at((const float *)row + i);
    if (kind == BFLOAT16) return (vec)(widened(row + 2 * i) << 16);
    if (kind == INT8) return from_int8(row + i);
    return from_float16(row + 2 * i);
}

/* The same for the end of a row, with zeros behind it. */
static inline vec last_numbers(int kind, const char *row, int64_t i, int64_t end) {
    char part[4 * LANES] = {0};
    memcpy(part, row + i * size_of(kind), (size_t)((end - i) * size_of(kind)));
    return numbers_at(kind, part, 0);
}

/* The i-th number of a row, not of FLOAT16. */
ALWAYS float number_at(int kind, const void *row, int64_t i) {
    if (kind == FLOAT32) return ((const float *)row)[i];
    if (kind == INT8) return (float)((const int8_t *)row)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)row)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ALWAYS void write(void *out, int kind, int64_t at, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t size = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    if (kind == FLOAT32) ((float *)out)[at] = value;
    else if (kind == BFLOAT16) {  /* to nearest, ties to even; NaN stays NaN */
        bits = size > 0x7f800000u ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1);
        ((uint16_t *)out)[at] = (uint16_t)(bits >> 16);
    } else {
        if (size > 0x7f800000u) size = 0x7e00u;
        else if (size >= 0x477ff000u) size = 0x7c00u;  /* from 65,520 on: infinity */
        else if (size >= 0x38800000u) size = (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13;
        else {  /* float16's steps next to zero are those of a float at 0.5 */
            float small;
            memcpy(&small, &size, sizeof small);
            small += 0.5f;
            memcpy(&size, &small, sizeof size);
            size -= 0x3f000000u;
        }
        ((uint16_t *)out)[at] = (uint16_t)(sign | size);
    }
}

#endif
