/* Philox4x32-10 (Salmon et al., 2011): a counter-based random number, a pure function of seed and position. */
#ifndef DSKV_KERNELS_PHILOX_H
#define DSKV_KERNELS_PHILOX_H

#include <stdint.h>

/* out = philox(counter, key): ten rounds. */
static inline void dskv_philox(const uint32_t counter[4], uint64_t seed, uint32_t out[4])
{
    uint32_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t first = (uint64_t)0xd2511f53u * a, second = (uint64_t)0xcd9e8d57u * c;
        a = (uint32_t)(second >> 32) ^ b ^ key0;
        b = (uint32_t)second;
        c = (uint32_t)(first >> 32) ^ d ^ key1;
        d = (uint32_t)first;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}

/* In [0, 1), 53 bits, of counter {position, 0, 0, 0}. */
static inline double dskv_philox_uniform(uint64_t seed, uint32_t position)
{
    const uint32_t counter[4] = {position, 0, 0, 0};
    uint32_t out[4];
    dskv_philox(counter, seed, out);
    uint64_t bits = (uint64_t)out[1] << 32 | out[0];
    return (double)(bits >> 11) * 0x1p-53;
}

#endif
