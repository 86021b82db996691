/* Conversions: every 16-bit pattern, every rounding boundary, and the pool's own rounding against the host's. */
#include "base/half.h"
#include "kernels/kernel_test.h"

#include "base/memory.h"

static double value_of(enum dskv_dtype dtype, uint16_t half)
{
    int is_f16 = dtype == DSKV_F16, mantissa_bits = is_f16 ? 10 : 7, bias = is_f16 ? 15 : 127;
    int exponent = half >> mantissa_bits & (is_f16 ? 31 : 255), mantissa = half & ((1 << mantissa_bits) - 1);
    double sign = half & 0x8000 ? -1 : 1;
    if (exponent == (is_f16 ? 31 : 255))
        return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

static uint16_t to_half(enum dskv_dtype dtype, float x)
{
    return dtype == DSKV_F16 ? dskv_f32_to_f16(x) : dskv_f32_to_bf16(x);
}

static void every_pattern_widens_exactly_and_comes_back(void)
{
    int wrong = 0;
    for (enum dskv_dtype dtype = DSKV_F16; dtype <= DSKV_BF16; dtype++)
        for (uint32_t half = 0; half < 65536; half++) {
            uint16_t in = (uint16_t)half, out;
            float wide, inlined = dtype == DSKV_F16 ? dskv_f16_to_f32(in) : dskv_bf16_to_f32(in);
            dskv_convert(&wide, DSKV_F32, &in, dtype, 1);
            double expected = value_of(dtype, in);
            if (isnan(expected)) {
                wrong += !isnan(wide) || !isnan(inlined) || !isnan(value_of(dtype, to_half(dtype, inlined)));
                continue;
            }
            wrong += (double)wide != expected || !signbit(wide) != !signbit(expected);
            wrong += dskv_float_bits(inlined) != dskv_float_bits(wide);
            dskv_convert(&out, dtype, &wide, DSKV_F32, 1);
            wrong += out != in || to_half(dtype, wide) != in;
        }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Around the middle of every two neighbours: below it, on it (to even), above it. */
static void narrowing_rounds_to_nearest_even(void)
{
    int wrong = 0;
    for (enum dskv_dtype dtype = DSKV_F16; dtype <= DSKV_BF16; dtype++) {
        const uint32_t largest = dtype == DSKV_F16 ? 0x7bff : 0x7f7f;
        for (uint32_t half = 0; half <= largest; half++) {
            double low = value_of(dtype, (uint16_t)half);
            double high = half == largest ? 2 * low - value_of(dtype, (uint16_t)(half - 1))
                                          : value_of(dtype, (uint16_t)(half + 1));
            if ((double)(float)((low + high) / 2) != (low + high) / 2)
                continue; /* the middle of bf16's denormals is not always an f32 */
            float middle = (float)((low + high) / 2),
                  inputs[3] = {nextafterf(middle, 0), middle, nextafterf(middle, INFINITY)};
            const uint32_t expected[3] = {half, half + (half & 1), half + 1};
            for (int i = 0; i < 3; i++) {
                uint16_t out;
                dskv_convert(&out, dtype, &inputs[i], DSKV_F32, 1);
                wrong += out != expected[i] || to_half(dtype, inputs[i]) != expected[i];
                float negative = -inputs[i];
                dskv_convert(&out, dtype, &negative, DSKV_F32, 1);
                wrong += out != (expected[i] | 0x8000) || to_half(dtype, negative) != (expected[i] | 0x8000);
            }
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void the_first_that_is_not_finite_is_told(void)
{
    enum { N = 600 };
    float x[N] = {0};
    unsigned char out[4 * N + 1], in[4 * N + 1];
    CU_ASSERT_EQUAL(dskv_convert(out + 1, DSKV_F16, x, DSKV_F32, N), N); /* odd addresses */
    x[300] = 65520;                                                      /* overflows f16 alone */
    x[301] = 3.4e38f;                                                    /* and bf16: halfway to the next power */
    CU_ASSERT_EQUAL(dskv_convert(out + 1, DSKV_F16, x, DSKV_F32, N), 300);
    CU_ASSERT_EQUAL(dskv_convert(out, DSKV_BF16, x, DSKV_F32, N), 301);
    CU_ASSERT_EQUAL(dskv_convert(in + 1, DSKV_F32, x, DSKV_F32, N), N);
    CU_ASSERT(memcmp(in + 1, x, sizeof x) == 0);
    x[599] = NAN;
    CU_ASSERT_EQUAL(dskv_convert(out, DSKV_F32, x, DSKV_F32, N), 599);
    CU_ASSERT_EQUAL(dskv_convert(out, DSKV_F32, x, DSKV_F32, 0), 0);
}

/* kv_write rounds on the vector path; a gather gives the host's own conversion. */
static void the_pool_rounds_like_the_host(void)
{
    enum { TOKENS = 16, DIM = 256, N = TOKENS * DIM };
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 4;
    float x[N];
    for (int i = 0; i < N; i++) /* all exponents, denormals and overflow too */
        do
            x[i] = dskv_float_of_bits((uint32_t)test_random(&seed));
        while (isnan(x[i]));
    int32_t slots[TOKENS];
    for (int i = 0; i < TOKENS; i++)
        slots[i] = i;
    const int32_t table = 0;
    for (int d = 0; d < devices.n; d++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
            struct dskv_kv kv = {
                .dtype = dtype, .n_blocks = 1, .block_tokens = TOKENS, .n_layers = 1, .n_kv_heads_local = 1};
            kv.head_dim = DIM;
            kv.block_bytes = dskv_kv_block_bytes(&kv);
            kv.data = dskv_calloc(1, kv.block_bytes);
            dskv_op_kv_write(devices.device[d], &(struct dskv_kv_write){.kv = kv,
                                                                        .slots = slots,
                                                                        .k = dskv_tensor(x, DSKV_F32, TOKENS, DIM),
                                                                        .v = dskv_tensor(x, DSKV_F32, TOKENS, DIM)});
            char expected[4 * N], dense[4 * N];
            dskv_convert(expected, dtype, x, DSKV_F32, N);
            for (int is_value = 0; is_value < 2; is_value++) {
                dskv_op_kv_gather(
                    devices.device[d],
                    &(struct dskv_kv_dense){
                        .kv = kv, .is_value = is_value, .n_heads = 1, .table = &table, .stop = TOKENS, .dense = dense});
                CU_ASSERT(memcmp(dense, expected, N * dskv_dtype_bytes(dtype)) == 0);
            }
            free(kv.data);
        }
    test_devices_close(&devices);
}

static void names_are_reversible(void)
{
    for (enum dskv_dtype dtype = DSKV_F32; dtype < DSKV_N_DTYPES; dtype++)
        CU_ASSERT_EQUAL(dskv_dtype_from_name(dskv_dtype_name(dtype)), dtype);
    CU_ASSERT_EQUAL(dskv_dtype_from_name("f64"), DSKV_N_DTYPES);
}

int main(void)
{
    return dskv_run_tests(
        "kernels.convert",
        (struct dskv_test[]){
            {"every pattern widens exactly and comes back", every_pattern_widens_exactly_and_comes_back},
            {"narrowing rounds to nearest even", narrowing_rounds_to_nearest_even},
            {"the first that is not finite is told", the_first_that_is_not_finite_is_told},
            {"the pool rounds like the host", the_pool_rounds_like_the_host},
            {"names are reversible", names_are_reversible},
            {NULL, NULL},
        });
}
