#include "base/dtype.h"

#include "base/half.h"
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

static float load(const char *src, enum dskv_dtype dtype, size_t i)
{
    if (dtype == DSKV_F32) {
        float value;
        memcpy(&value, src + 4 * i, 4);
        return value;
    }
    uint16_t half;
    memcpy(&half, src + 2 * i, 2);
    return dtype == DSKV_F16 ? dskv_f16_to_f32(half) : dskv_bf16_to_f32(half);
}

/* Stores, and tells whether what was stored is finite. */
static int store(char *dst, enum dskv_dtype dtype, size_t i, float value)
{
    if (dtype == DSKV_F32) {
        memcpy(dst + 4 * i, &value, 4);
        return (dskv_float_bits(value) & 0x7f800000) != 0x7f800000;
    }
    uint16_t half = dtype == DSKV_F16 ? dskv_f32_to_f16(value) : dskv_f32_to_bf16(value),
             exponent = dtype == DSKV_F16 ? 0x7c00 : 0x7f80;
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
