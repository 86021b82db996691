#include "daemon/random.h"

#include "base/status.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

void dskv_random_bytes(void *bytes, size_t n)
{
    char *next = bytes;
    while (n) {
        ssize_t got = getrandom(next, n, 0);
        if (got < 0 && errno == EINTR)
            continue;
        DSKV_ASSERT(got > 0, "getrandom: %s", strerror(errno));
        next += got;
        n -= (size_t)got;
    }
}

/* A bijective mix of 64 bits, so that neighbouring counters give unrelated seeds. */
static uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    return x;
}

uint64_t dskv_seeds_next(struct dskv_seeds *seeds)
{
    uint64_t seed;
    if (seeds->base < 0)
        dskv_random_bytes(&seed, sizeof seed);
    else
        seed = mix((uint64_t)seeds->base + mix(++seeds->n_drawn));
    return seed >> 1;
}
