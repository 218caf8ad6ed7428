/* Vectors of LANES float32 numbers, and loading and storing them as float32 or bfloat16.
 *
 * Written with the vector types that GCC and Clang share: the compiler maps them to what the CPU
 * has, and there is no order of sums for it to choose. Functions take ``bf16`` as a constant and
 * are inlined, so that each caller exists once for either dtype.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE lanes splat(float x) { return x - (lanes){0}; }

INLINE lanes pick(ints mask, lanes yes, lanes no) {
    return (lanes)((mask & (ints)yes) | (~mask & (ints)no));
}

/* a * b + c, rounded once where the CPU can. Left to the compiler, it might fuse one copy of a loop
 * and not another, or the other product of two: results would depend on the loop they came from. */
INLINE lanes multiply_add(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE lanes load_floats(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store_floats(float *to, lanes x) { memcpy(to, &x, sizeof x); }

/* bfloat16 to float32. Compilers split conversions so wide into several, hence the intrinsics. */
INLINE lanes widen_halves(halves h) {
#if defined(__AVX512F__)
    return (lanes)((uints)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif defined(__AVX2__)
    return (lanes)((uints)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
    return (lanes)(__builtin_convertvector(h, uints) << 16);
#endif
}

/* float32 to bfloat16, rounded to nearest, ties to even; NaN stays NaN. */
INLINE halves round_halves(lanes x) {
#if defined(__AVX512BF16__)
    return (halves)_mm512_cvtneps_pbh((__m512)x); /* and denormal numbers become zero */
#else
    uints bits = (uints)x;
    uints nearest = bits + 0x7fff + ((bits >> 16) & 1);
    uints nan = (uints)(x != x);
    bits = (nan & (bits | 0x400000)) | (~nan & nearest);
#if defined(__AVX512F__)
    return (halves)_mm512_cvtepi32_epi16((__m512i)(bits >> 16));
#else
    return __builtin_convertvector(bits >> 16, halves);
#endif
#endif
}

INLINE lanes round_to(lanes x, int bf16) { return bf16 ? widen_halves(round_halves(x)) : x; }

/* LANES elements from index i on, of a tensor that is bfloat16 or else float32. */
INLINE lanes load(const void *from, int64_t i, int bf16) {
    if (!bf16) return load_floats((const float *)from + i);
    halves h;
    memcpy(&h, (const uint16_t *)from + i, sizeof h);
    return widen_halves(h);
}

INLINE void store(void *to, int64_t i, lanes x, int bf16) {
    if (!bf16) {
        store_floats((float *)to + i, x);
        return;
    }
    halves h = round_halves(x);
    memcpy((uint16_t *)to + i, &h, sizeof h);
}

/* The same for the last n < LANES elements of a row; what is missing reads as zero. */
INLINE lanes load_part(const void *from, int64_t i, int n, int bf16) {
    if (!bf16) {
        lanes x = {0};
        memcpy(&x, (const float *)from + i, 4 * (size_t)n);
        return x;
    }
    halves h = {0};
    memcpy(&h, (const uint16_t *)from + i, 2 * (size_t)n);
    return widen_halves(h);
}

INLINE void store_part(void *to, int64_t i, lanes x, int n, int bf16) {
    if (!bf16) {
        memcpy((float *)to + i, &x, 4 * (size_t)n);
        return;
    }
    halves h = round_halves(x);
    memcpy((uint16_t *)to + i, &h, 2 * (size_t)n);
}

/* Folds the upper half of the lanes onto the lower until one is left. */
INLINE float sum_lanes(lanes x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

INLINE float max_lanes(lanes x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            if (part[i] < part[i + half]) part[i] = part[i + half];
    return part[0];
}

/* 2^x for x up to 127, relative error about 1e-7; exactly 1 at 0 and exactly 0 below -126.5. The
 * polynomial was fitted to 2^f on [-0.5, 0.5] for least relative error. */
INLINE lanes exp2_lanes(lanes x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer below */
    x = pick(x < -127.0f, splat(-127.0f), x);
    lanes shifted = x + magic;
    lanes f = x - (shifted - magic);
    lanes y = splat(1.535336196e-4f);
    y = multiply_add(y, f, splat(1.339887385e-3f));
    y = multiply_add(y, f, splat(9.618436918e-3f));
    y = multiply_add(y, f, splat(5.550332367e-2f));
    y = multiply_add(y, f, splat(2.402264774e-1f));
    y = multiply_add(y, f, splat(6.931471825e-1f));
    y = multiply_add(y, f, splat(1.0f));
    return y * (lanes)(((ints)shifted << 23) + 0x3f800000); /* bits of 2^n; of 0 for n = -127 */
}

/* The first n of LANES elements, n from 1 to LANES. */
INLINE lanes load_some(const void *from, int64_t i, int n, int bf16) {
    return n == LANES ? load(from, i, bf16) : load_part(from, i, n, bf16);
}

INLINE void store_some(void *to, int64_t i, lanes x, int n, int bf16) {
    if (n == LANES) store(to, i, x, bf16);
    else store_part(to, i, x, n, bf16);
}

/* n elements to float32 and back. */
INLINE void widen(float *to, const void *from, int64_t i, int n, int bf16) {
    int j = 0;
    for (; j + LANES <= n; j += LANES) store_floats(to + j, load(from, i + j, bf16));
    if (j < n) {
        lanes x = load_part(from, i + j, n - j, bf16);
        memcpy(to + j, &x, 4 * (size_t)(n - j));
    }
}

INLINE void narrow(void *to, int64_t i, const float *from, int n, int bf16) {
    int j = 0;
    for (; j + LANES <= n; j += LANES) store(to, i + j, load_floats(from + j), bf16);
    if (j < n) store_part(to, i + j, load_part(from, j, n - j, 0), n - j, bf16);
}
