/* Vector mathematics: exp, tanh and erf over 16 lanes, from exactly rounded steps only, so that all vector paths agree.
 *
 * Tails are computed in full vectors too: one element gets the same bits wherever it stands.  The polynomials are
 * minimax fits whose coefficients were rounded to f32 one after the other; their own errors are below 5e-9.
 */
#ifndef DSKV_CPU_VECMATH_H
#define DSKV_CPU_VECMATH_H

#include "kernels/cpu/vector.h"

/* c[0] + c[1] x + ... + c[n - 1] x^(n - 1). */
static inline struct vec vec_polynomial(struct vec x, const float *c, int n)
{
    struct vec sum = vec_set1(c[n - 1]);
    for (int i = n - 2; i >= 0; i--)
        sum = vec_fma(sum, x, vec_set1(c[i]));
    return sum;
}

/* 2^n for whole n in [-126, 127]. */
static inline struct vec vec_power_of_two(struct vec n)
{
    /* 1.5 * 2^23 + 127: the sum's low bits are n + 127, which the shift makes an exponent. */
    return vec_shift_left_23(vec_add(n, vec_set1(12582912.0f + 127.0f)));
}

/* The nearest whole number for |x| < 2^22, ties to even. */
static inline struct vec vec_round(struct vec x)
{
    struct vec magic = vec_set1(0x1.8p23f);
    return vec_sub(vec_add(x, magic), magic);
}

/* Within one unit in the last place; exp(-inf) = 0, denormal results are rounded once, a NaN stays one. */
static inline struct vec vec_exp(struct vec x)
{
    static const float c[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558b2p-5f, 0x1.12398ep-7f, 0x1.6a4b36p-10f};
    /* Beyond these bounds the result is 0 or infinite.  vec_max gives its second argument when one is a NaN. */
    x = vec_max(vec_set1(-104.0f), x);
    x = vec_select(vec_gt(x, vec_set1(89.0f)), vec_set1(89.0f), x);
    struct vec n = vec_round(vec_mul(x, vec_set1(0x1.715476p0f)));
    struct vec r = vec_fma(n, vec_set1(-0x1.62e4p-1f), x); /* ln 2 in two parts; the first product is exact */
    r = vec_fma(n, vec_set1(-0x1.7f7d1cp-20f), r);
    struct vec p = vec_fma(vec_polynomial(r, c, 5), vec_mul(r, r), r);
    p = vec_add(vec_set1(1.0f), p);
    struct vec half = vec_round(vec_mul(n, vec_set1(0.5f))); /* 2^n itself may be out of range: in two factors */
    return vec_mul(vec_mul(p, vec_power_of_two(half)), vec_power_of_two(vec_sub(n, half)));
}

static inline struct vec vec_abs(struct vec x)
{
    return vec_and_bits(x, 0x7fffffffu);
}

/* |a| with the sign of b. */
static inline struct vec vec_copysign(struct vec a, struct vec b)
{
    return vec_or(vec_abs(a), vec_and_bits(b, 0x80000000u));
}

static inline struct vec vec_tanh(struct vec x)
{
    static const float c[] = {-0x1.555554p-2f, 0x1.11107ap-3f, -0x1.b9f18ap-5f,
                              0x1.63a57ep-6f,  -0x1.0c602p-7f, 0x1.1a2e3ep-9f};
    struct vec t = vec_abs(x), s = vec_mul(x, x), one = vec_set1(1.0f);
    struct vec small = vec_fma(vec_polynomial(s, c, 6), vec_mul(s, x), x);
    struct vec large = vec_sub(one, vec_div(vec_set1(2.0f), vec_add(vec_exp(vec_add(t, t)), one)));
    return vec_select(vec_gt(vec_set1(0.625f), t), small, vec_copysign(large, x));
}

static inline struct vec vec_erf(struct vec x)
{
    static const float c[] = {0x1.06eba8p-3f, -0x1.81273ep-2f,  0x1.ce2ce6p-4f, -0x1.b7f71ap-6f,
                              0x1.53f224p-8f, -0x1.a3515ep-11f, 0x1.4771fcp-14f};
    static const float g[] = {0x1.575b32p+2f,  0x1.1ac322p+2f, 0x1.d8f624p-1f,   0x1.0e017ap-6f,
                              -0x1.d1ffcap-9f, 0x1.77c9dp-11f, -0x1.603266p-13f, 0x1.24900ap-17f};
    struct vec t = vec_abs(x), four = vec_set1(4.0f);
    struct vec small = vec_fma(vec_polynomial(vec_mul(x, x), c, 7), x, x);
    t = vec_select(vec_gt(t, four), four, t);                               /* erf(4) rounds to 1 */
    struct vec exponent = vec_polynomial(vec_sub(t, vec_set1(2.0f)), g, 8); /* -log(1 - erf(t)) */
    struct vec large = vec_sub(vec_set1(1.0f), vec_exp(vec_sub(vec_zero(), exponent)));
    return vec_select(vec_gt(vec_set1(1.0f), t), small, vec_copysign(large, x));
}

#endif
