/* Random choices that a seed repeats. */
#ifndef DSKV_TESTS_SIM_RNG_H
#define DSKV_TESTS_SIM_RNG_H

#include <stdint.h>

struct rng {
    uint64_t state;
};

static inline uint64_t rng_next(struct rng *rng)
{
    uint64_t x = rng->state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
/* 0 .. n - 1. */
static inline int32_t rng_below(struct rng *rng, int32_t n)
{
    return (int32_t)(rng_next(rng) % (uint64_t)n);
}
/* True once in n. */
static inline int rng_one_in(struct rng *rng, int32_t n)
{
    return rng_below(rng, n) == 0;
}

#endif
