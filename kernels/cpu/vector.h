/* Vector: 16 lanes of f32, in three ways with equal bits: AVX-512F, AVX2 with FMA and F16C, and plain C.
 *
 * The only file with intrinsics.  Every operation is exactly rounded (or exact), so that a kernel written with them
 * gives the same bits on every path: vec_fma rounds once, vec_max is a > b ? a : b, vec_sum is one fixed tree, and
 * conversions are those of half.h.  A kernel is compiled once per path; see names.h.  VEC_TILE_ROWS is how many rows by
 * 32 lanes of accumulators the path's registers hold.
 */
#ifndef DSKV_CPU_VECTOR_H
#define DSKV_CPU_VECTOR_H

#include "base/half.h"
#include "kernels/tensor.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { VEC_LANES = 16 };

#if defined(DSKV_PATH_AVX512)

#include <immintrin.h>

enum { VEC_TILE_ROWS = 8 };

struct vec {
    __m512 v;
};
struct vec_mask {
    __mmask16 m;
};

static inline struct vec vec_set1(float x)
{
    return (struct vec){_mm512_set1_ps(x)};
}
static inline struct vec vec_load(const float *p)
{
    return (struct vec){_mm512_loadu_ps(p)};
}
static inline void vec_store(float *p, struct vec a)
{
    _mm512_storeu_ps(p, a.v);
}
static inline struct vec vec_load_f16(const uint16_t *p)
{
    return (struct vec){_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))};
}
static inline struct vec vec_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return (struct vec){_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
/* 32 elements whose lanes i and i + 16 lie side by side: low[i] = p[2 i], high[i] = p[2 i + 1]. */
static inline void vec_load_bf16_pairs(const uint16_t *p, struct vec *low, struct vec *high)
{
    __m512i pairs = _mm512_loadu_si512(p);
    low->v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    high->v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}
static inline struct vec vec_add(struct vec a, struct vec b)
{
    return (struct vec){_mm512_add_ps(a.v, b.v)};
}
static inline struct vec vec_sub(struct vec a, struct vec b)
{
    return (struct vec){_mm512_sub_ps(a.v, b.v)};
}
static inline struct vec vec_mul(struct vec a, struct vec b)
{
    return (struct vec){_mm512_mul_ps(a.v, b.v)};
}
static inline struct vec vec_div(struct vec a, struct vec b)
{
    return (struct vec){_mm512_div_ps(a.v, b.v)};
}
static inline struct vec vec_fma(struct vec a, struct vec b, struct vec c)
{
    return (struct vec){_mm512_fmadd_ps(a.v, b.v, c.v)};
}
static inline struct vec vec_max(struct vec a, struct vec b)
{
    return (struct vec){_mm512_max_ps(a.v, b.v)};
}
static inline struct vec_mask vec_gt(struct vec a, struct vec b)
{
    return (struct vec_mask){_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)};
}
static inline struct vec vec_select(struct vec_mask m, struct vec a, struct vec b)
{
    return (struct vec){_mm512_mask_blend_ps(m.m, b.v, a.v)};
}
static inline struct vec_mask vec_first(int n)
{
    return (struct vec_mask){(__mmask16)((1u << n) - 1u)};
}
static inline unsigned vec_mask_bits(struct vec_mask m)
{
    return m.m;
}
static inline struct vec vec_and_bits(struct vec a, uint32_t bits)
{
    return (struct vec){_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32((int)bits)))};
}
static inline struct vec vec_or(struct vec a, struct vec b)
{
    return (struct vec){_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
static inline struct vec vec_shift_left_23(struct vec a)
{
    return (struct vec){_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))};
}
/* Lanes i and i + 8, then + 4, + 2, + 1. */
static inline float vec_sum(struct vec a)
{
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

#elif defined(DSKV_PATH_AVX2)

#include <immintrin.h>

enum { VEC_TILE_ROWS = 3 };

struct vec {
    __m256 a, b; /* lanes 0-7, 8-15 */
};
struct vec_mask {
    __m256 a, b;
};

static inline struct vec vec_set1(float x)
{
    __m256 v = _mm256_set1_ps(x);
    return (struct vec){v, v};
}
static inline struct vec vec_load(const float *p)
{
    return (struct vec){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static inline void vec_store(float *p, struct vec x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline struct vec vec_load_f16(const uint16_t *p)
{
    return (struct vec){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline struct vec vec_load_bf16(const uint16_t *p)
{
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
    return (struct vec){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
static inline void vec_load_bf16_pairs(const uint16_t *p, struct vec *low, struct vec *high)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)(p + 16));
    __m256i top = _mm256_set1_epi32((int)0xffff0000);
    low->a = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    low->b = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
    high->a = _mm256_castsi256_ps(_mm256_and_si256(a, top));
    high->b = _mm256_castsi256_ps(_mm256_and_si256(b, top));
}
static inline struct vec vec_add(struct vec x, struct vec y)
{
    return (struct vec){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
static inline struct vec vec_sub(struct vec x, struct vec y)
{
    return (struct vec){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
static inline struct vec vec_mul(struct vec x, struct vec y)
{
    return (struct vec){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
static inline struct vec vec_div(struct vec x, struct vec y)
{
    return (struct vec){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
static inline struct vec vec_fma(struct vec x, struct vec y, struct vec z)
{
    return (struct vec){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline struct vec vec_max(struct vec x, struct vec y)
{
    return (struct vec){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
static inline struct vec_mask vec_gt(struct vec x, struct vec y)
{
    return (struct vec_mask){_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)};
}
static inline struct vec vec_select(struct vec_mask m, struct vec x, struct vec y)
{
    return (struct vec){_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)};
}
static inline struct vec_mask vec_first(int n)
{
    __m256i count = _mm256_set1_epi32(n);
    __m256i a = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), b = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    return (struct vec_mask){_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, a)),
                             _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, b))};
}
static inline unsigned vec_mask_bits(struct vec_mask m)
{
    return (unsigned)_mm256_movemask_ps(m.a) | (unsigned)_mm256_movemask_ps(m.b) << 8;
}
static inline struct vec vec_and_bits(struct vec x, uint32_t bits)
{
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32((int)bits));
    return (struct vec){_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
static inline struct vec vec_or(struct vec x, struct vec y)
{
    return (struct vec){_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)};
}
static inline struct vec vec_shift_left_23(struct vec x)
{
    return (struct vec){_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.a), 23)),
                        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.b), 23))};
}
static inline float vec_sum(struct vec x)
{
    __m256 s8 = _mm256_add_ps(x.a, x.b);
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

#else

enum { VEC_TILE_ROWS = 2 };

struct vec {
    float v[VEC_LANES];
};
struct vec_mask {
    uint32_t m[VEC_LANES]; /* all ones or 0 */
};

#define VEC_EACH(expression)                                                                                           \
    for (int i = 0; i < VEC_LANES; i++)                                                                                \
    r.v[i] = (expression)

static inline struct vec vec_set1(float x)
{
    struct vec r;
    VEC_EACH(x);
    return r;
}
static inline struct vec vec_load(const float *p)
{
    struct vec r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
static inline void vec_store(float *p, struct vec a)
{
    memcpy(p, a.v, sizeof a.v);
}
static inline struct vec vec_load_f16(const uint16_t *p)
{
    struct vec r;
    VEC_EACH(dskv_f16_to_f32(p[i]));
    return r;
}
static inline struct vec vec_load_bf16(const uint16_t *p)
{
    struct vec r;
    VEC_EACH(dskv_bf16_to_f32(p[i]));
    return r;
}
static inline void vec_load_bf16_pairs(const uint16_t *p, struct vec *low, struct vec *high)
{
    for (int i = 0; i < VEC_LANES; i++) {
        low->v[i] = dskv_bf16_to_f32(p[2 * i]);
        high->v[i] = dskv_bf16_to_f32(p[2 * i + 1]);
    }
}
static inline struct vec vec_add(struct vec a, struct vec b)
{
    struct vec r;
    VEC_EACH(a.v[i] + b.v[i]);
    return r;
}
static inline struct vec vec_sub(struct vec a, struct vec b)
{
    struct vec r;
    VEC_EACH(a.v[i] - b.v[i]);
    return r;
}
static inline struct vec vec_mul(struct vec a, struct vec b)
{
    struct vec r;
    VEC_EACH(a.v[i] * b.v[i]);
    return r;
}
static inline struct vec vec_div(struct vec a, struct vec b)
{
    struct vec r;
    VEC_EACH(a.v[i] / b.v[i]);
    return r;
}
static inline struct vec vec_fma(struct vec a, struct vec b, struct vec c)
{
    struct vec r;
    VEC_EACH(fmaf(a.v[i], b.v[i], c.v[i]));
    return r;
}
static inline struct vec vec_max(struct vec a, struct vec b)
{
    struct vec r;
    VEC_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
    return r;
}
static inline struct vec_mask vec_gt(struct vec a, struct vec b)
{
    struct vec_mask r;
    for (int i = 0; i < VEC_LANES; i++)
        r.m[i] = a.v[i] > b.v[i] ? UINT32_MAX : 0;
    return r;
}
static inline struct vec vec_select(struct vec_mask m, struct vec a, struct vec b)
{
    struct vec r;
    VEC_EACH(m.m[i] ? a.v[i] : b.v[i]);
    return r;
}
static inline struct vec_mask vec_first(int n)
{
    struct vec_mask r;
    for (int i = 0; i < VEC_LANES; i++)
        r.m[i] = i < n ? UINT32_MAX : 0;
    return r;
}
static inline unsigned vec_mask_bits(struct vec_mask m)
{
    unsigned bits = 0;
    for (int i = 0; i < VEC_LANES; i++)
        bits |= (m.m[i] & 1u) << i;
    return bits;
}
static inline struct vec vec_and_bits(struct vec a, uint32_t bits)
{
    struct vec r;
    VEC_EACH(dskv_float_of_bits(dskv_float_bits(a.v[i]) & bits));
    return r;
}
static inline struct vec vec_or(struct vec a, struct vec b)
{
    struct vec r;
    VEC_EACH(dskv_float_of_bits(dskv_float_bits(a.v[i]) | dskv_float_bits(b.v[i])));
    return r;
}
static inline struct vec vec_shift_left_23(struct vec a)
{
    struct vec r;
    VEC_EACH(dskv_float_of_bits(dskv_float_bits(a.v[i]) << 23));
    return r;
}
static inline float vec_sum(struct vec a)
{
    for (int step = VEC_LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++)
            a.v[i] = a.v[i] + a.v[i + step];
    return a.v[0];
}

#undef VEC_EACH

#endif

/* ---- the same for every path ------------------------------------------------------------------------------------ */

static inline struct vec vec_zero(void)
{
    return vec_set1(0.0f);
}

/* The first n (0 .. 16) lanes from p, the others `fill`; reads nothing past them. */
static inline struct vec vec_load_first(const float *p, int n, float fill)
{
    float lanes[VEC_LANES];
    vec_store(lanes, vec_set1(fill));
    memcpy(lanes, p, (size_t)n * sizeof *lanes);
    return vec_load(lanes);
}

static inline void vec_store_first(float *p, int n, struct vec a)
{
    float lanes[VEC_LANES];
    vec_store(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof *lanes);
}

/* Elements [i, i + 16) of an array of dtype; dtype is a constant where this is inlined. */
static inline struct vec vec_load_as(enum dskv_dtype dtype, const void *p, int64_t i)
{
    if (dtype == DSKV_F32)
        return vec_load((const float *)p + i);
    if (dtype == DSKV_F16)
        return vec_load_f16((const uint16_t *)p + i);
    return vec_load_bf16((const uint16_t *)p + i);
}

/* The largest lane; which of equal zeros is taken does not matter to any user. */
static inline float vec_max_lane(struct vec a)
{
    float lanes[VEC_LANES];
    vec_store(lanes, a);
    float most = lanes[0];
    for (int i = 1; i < VEC_LANES; i++)
        most = lanes[i] > most ? lanes[i] : most;
    return most;
}

#endif
