#include "base/dtype.h"

#include "base/status.h"

#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} dtypes[DSKV_N_DTYPES] = {
    [DSKV_F32] = {"f32", 4}, [DSKV_F16] = {"f16", 2}, [DSKV_BF16] = {"bf16", 2}, [DSKV_I32] = {"i32", 4}};

const char *dskv_dtype_name(enum dskv_dtype dtype)
{
    DSKV_ASSERT((unsigned)dtype < DSKV_N_DTYPES, "dtype %d", (int)dtype);
    return dtypes[dtype].name;
}

enum dskv_dtype dskv_dtype_from_name(const char *name)
{
    int dtype = 0;
    while (dtype < DSKV_N_DTYPES && strcmp(dtypes[dtype].name, name) != 0)
        dtype++;
    return (enum dskv_dtype)dtype;
}

size_t dskv_dtype_bytes(enum dskv_dtype dtype)
{
    DSKV_ASSERT((unsigned)dtype < DSKV_N_DTYPES, "dtype %d", (int)dtype);
    return dtypes[dtype].bytes;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31)
        return float_of(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) { /* zero or subnormal: exact as a product */
        float value = (float)mantissa * 0x1p-24f;
        return float_of(sign | bits_of(value));
    }
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

static uint16_t to_f16(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000)
        return sign | 0x7e00;
    if (magnitude >= 0x477ff000) /* rounds to 65536 or more */
        return sign | 0x7c00;
    if (magnitude < 0x38800000) { /* below 2^-14: adding 0.5 rounds at the subnormals' step of 2^-24 */
        float rounded = float_of(magnitude) + 0.5f;
        return sign | (uint16_t)(bits_of(rounded) - bits_of(0.5f));
    }
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return sign | (uint16_t)((rounded - (112u << 23)) >> 13);
}

static uint16_t to_bf16(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float load(const char *src, enum dskv_dtype dtype, size_t i)
{
    if (dtype == DSKV_F32) {
        float value;
        memcpy(&value, src + 4 * i, 4);
        return value;
    }
    uint16_t half;
    memcpy(&half, src + 2 * i, 2);
    return dtype == DSKV_F16 ? from_f16(half) : float_of((uint32_t)half << 16);
}

/* Stores, and tells whether what was stored is finite. */
static int store(char *dst, enum dskv_dtype dtype, size_t i, float value)
{
    if (dtype == DSKV_F32) {
        memcpy(dst + 4 * i, &value, 4);
        return (bits_of(value) & 0x7f800000) != 0x7f800000;
    }
    uint16_t half = dtype == DSKV_F16 ? to_f16(value) : to_bf16(value), exponent = dtype == DSKV_F16 ? 0x7c00 : 0x7f80;
    memcpy(dst + 2 * i, &half, 2);
    return (half & exponent) != exponent;
}

size_t dskv_convert(void *dst, enum dskv_dtype dst_dtype, const void *src, enum dskv_dtype src_dtype, size_t n)
{
    DSKV_ASSERT(dst_dtype <= DSKV_BF16 && src_dtype <= DSKV_BF16, "dtypes %d, %d", (int)dst_dtype, (int)src_dtype);
    size_t first_bad = n;
    for (size_t i = 0; i < n; i++)
        if (!store(dst, dst_dtype, i, load(src, src_dtype, i)) && first_bad == n)
            first_bad = i;
    return first_bad;
}
