/* Half: the bits of f16 and bf16 against f32, one element at a time; the vector paths of kernels agree with these
 * functions.
 *
 * To nearest, ties to even; denormals are kept, a NaN stays a (quiet) NaN.  Written without branches, so that a
 * compiler can run them over many elements at once.
 */
#ifndef DSKV_BASE_HALF_H
#define DSKV_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t dskv_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float dskv_float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float dskv_f16_to_f32(uint16_t h)
{
    uint32_t magnitude = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    /* Exponents differ by 112; a product by a power of two is exact, for denormals too. */
    uint32_t finite = dskv_float_bits(dskv_float_of_bits(magnitude << 13) * 0x1p112f);
    uint32_t special = 0x7f800000u | magnitude << 13 | (magnitude > 0x7c00u ? 0x400000u : 0u);
    return dskv_float_of_bits(sign | (magnitude >= 0x7c00u ? special : finite));
}

static inline uint16_t dskv_f32_to_f16(float x)
{
    uint32_t bits = dskv_float_bits(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    uint32_t normal = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1u)) >> 13;
    /* The unit in the last place of 0.5 is that of f16's denormals, 2^-24: the sum rounds for us. */
    uint32_t denormal =
        dskv_float_bits(dskv_float_of_bits(magnitude < 0x38800000u ? magnitude : 0u) + 0.5f) - 0x3f000000u;
    uint32_t result = magnitude < 0x38800000u ? denormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : result;
    return (uint16_t)(sign | result);
}

static inline float dskv_bf16_to_f32(uint16_t h)
{
    return dskv_float_of_bits((uint32_t)h << 16);
}

static inline uint16_t dskv_f32_to_bf16(float x)
{
    uint32_t bits = dskv_float_bits(x);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

#endif
