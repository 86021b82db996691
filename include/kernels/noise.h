/* Noise: random weights for measurements, one function of a seed, a global output and a global input, the same on every
 * device and for every shard. */
#ifndef DSKV_KERNELS_NOISE_H
#define DSKV_KERNELS_NOISE_H

#include <stdint.h>

#ifdef __CUDACC__
#define DSKV_NOISE_FUNCTION static inline __host__ __device__
#else
#define DSKV_NOISE_FUNCTION static inline
#endif

/* A bijection of 64 bits whose outputs look independent: once per tensor and output. */
DSKV_NOISE_FUNCTION uint64_t dskv_noise_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* What all inputs of one output share. */
DSKV_NOISE_FUNCTION uint32_t dskv_noise_row(uint64_t seed, int64_t output)
{
    return (uint32_t)dskv_noise_mix(seed + (uint64_t)output);
}

/* About normal, standard deviation 0.02; a few cycles, since billions of elements are made. */
DSKV_NOISE_FUNCTION float dskv_noise(uint32_t row, int64_t input)
{
    /* The sum of a word's four bytes is nearly normal: mean 510, deviation sqrt(4 * (256^2 - 1) / 12) = 147.8. */
    const float scale = 0.02f / 147.8f;
    uint32_t x = row + (uint32_t)input * 0x9e3779b9u;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    x ^= x >> 15;
    uint32_t sum = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24);
    return (float)((int32_t)sum - 510) * scale;
}

#endif
