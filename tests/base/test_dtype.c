#include "base/dtype.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <string.h>

static float through(enum dskv_dtype dtype, float value)
{
    uint16_t half;
    float back;
    dskv_convert(&half, dtype, &value, DSKV_F32, 1);
    dskv_convert(&back, DSKV_F32, &half, dtype, 1);
    return back;
}

static void every_half_survives(void)
{
    const enum dskv_dtype kinds[] = {DSKV_F16, DSKV_BF16};
    for (int kind = 0; kind < 2; kind++)
        for (uint32_t bits = 0; bits < 65536; bits++) {
            uint16_t half = (uint16_t)bits, again;
            float value;
            dskv_convert(&value, DSKV_F32, &half, kinds[kind], 1);
            dskv_convert(&again, kinds[kind], &value, DSKV_F32, 1);
            int still_nan = (again & 0x7fff) > (kinds[kind] == DSKV_F16 ? 0x7c00 : 0x7f80);
            if (isnan(value) ? !still_nan : again != half)
                CU_FAIL("a half changed on the way to f32 and back");
        }
}

static void rounds_to_nearest_even(void)
{
    CU_ASSERT(through(DSKV_F16, 2049.0f) == 2048.0f); /* ties to even, down and up */
    CU_ASSERT(through(DSKV_F16, 2051.0f) == 2052.0f);
    CU_ASSERT(through(DSKV_F16, 65519.0f) == 65504.0f);
    CU_ASSERT(isinf(through(DSKV_F16, 65520.0f)));
    CU_ASSERT(through(DSKV_F16, 0x1p-25f) == 0.0f);
    CU_ASSERT(through(DSKV_F16, -0x1.8p-24f) == -0x1p-23f);
    CU_ASSERT(signbit(through(DSKV_F16, -0.0f)) != 0);
    CU_ASSERT(through(DSKV_BF16, 257.0f) == 256.0f);
    CU_ASSERT(through(DSKV_BF16, 259.0f) == 260.0f);
    CU_ASSERT(isinf(through(DSKV_BF16, 3.4028234e38f)));
    CU_ASSERT(isnan(through(DSKV_BF16, NAN)) && isnan(through(DSKV_F16, NAN)));
}

#ifdef __FLT16_MAX__
static void agrees_with_the_compiler(void)
{
    for (uint64_t i = 0; i < 1u << 20; i++) {
        uint32_t bits = (uint32_t)(i * 2654435761u);
        float value;
        uint16_t ours, theirs;
        memcpy(&value, &bits, 4);
        if (isnan(value))
            continue;
        _Float16 half = (_Float16)value;
        memcpy(&theirs, &half, 2);
        dskv_convert(&ours, DSKV_F16, &value, DSKV_F32, 1);
        if (ours != theirs)
            CU_FAIL("another f16 than the compiler's");
    }
}
#endif

static void finds_the_first_that_is_not_finite(void)
{
    char odd[4 * 4 + 1], out[2 * 4 + 1]; /* any alignment */
    const float values[4] = {1.0f, 70000.0f, NAN, 2.0f};
    memcpy(odd + 1, values, sizeof values);
    CU_ASSERT_EQUAL(dskv_convert(out + 1, DSKV_F16, odd + 1, DSKV_F32, 4), 1);
    CU_ASSERT_EQUAL(dskv_convert(out + 1, DSKV_BF16, odd + 1, DSKV_F32, 4), 2);
    CU_ASSERT_EQUAL(dskv_convert(out + 1, DSKV_F16, odd + 1, DSKV_F32, 1), 1);
}

static void names_are_reversible(void)
{
    for (int dtype = 0; dtype < DSKV_N_DTYPES; dtype++)
        CU_ASSERT_EQUAL(dskv_dtype_from_name(dskv_dtype_name((enum dskv_dtype)dtype)), dtype);
    CU_ASSERT_EQUAL(dskv_dtype_from_name("float"), DSKV_N_DTYPES);
}

int main(void)
{
    return dskv_run_tests("base.dtype", (struct dskv_test[]){
                                            {"every half survives", every_half_survives},
                                            {"rounds to nearest even", rounds_to_nearest_even},
#ifdef __FLT16_MAX__
                                            {"agrees with the compiler", agrees_with_the_compiler},
#endif
                                            {"finds the first that is not finite", finds_the_first_that_is_not_finite},
                                            {"names are reversible", names_are_reversible},
                                            {NULL, NULL},
                                        });
}
