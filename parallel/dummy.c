#include "parallel/dummy.h"

#include "kernels/noise.h"

uint64_t dskv_dummy_seed(const char *name)
{
    uint64_t seed = 0;
    for (; *name; name++)
        seed = dskv_noise_mix(seed ^ (unsigned char)*name);
    return seed;
}

void dskv_dummy_fill(const char *name, int64_t first_output, int64_t n, int64_t first_input, int64_t k, float *dst)
{
    uint64_t seed = dskv_dummy_seed(name);
    for (int64_t i = 0; i < n; i++) {
        uint32_t row = dskv_noise_row(seed, first_output + i);
        for (int64_t j = 0; j < k; j++)
            dst[i * k + j] = dskv_noise(row, first_input + j);
    }
}
