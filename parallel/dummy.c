#include "parallel/dummy.h"

/* A bijection of 64 bits whose outputs look independent: once per tensor and row. */
static uint64_t mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* The same of 32 bits, in a few cycles: billions of elements pass through it. */
static uint32_t mix32(uint32_t x)
{
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    return x ^ x >> 15;
}

void dskv_dummy_fill(const char *name, int64_t first_output, int64_t n, int64_t first_input, int64_t k, float *dst)
{
    /* The sum of a word's four bytes is nearly normal: mean 510, deviation sqrt(4 * (256^2 - 1) / 12) = 147.8. */
    const float scale = 0.02f / 147.8f;
    uint64_t seed = 0;
    for (; *name; name++)
        seed = mix64(seed ^ (unsigned char)*name);
    for (int64_t i = 0; i < n; i++) {
        uint32_t row = (uint32_t)mix64(seed + (uint64_t)(first_output + i));
        for (int64_t j = 0; j < k; j++) {
            uint32_t word = mix32(row + (uint32_t)(first_input + j) * 0x9e3779b9u);
            uint32_t sum = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24);
            dst[i * k + j] = (float)((int32_t)sum - 510) * scale;
        }
    }
}
