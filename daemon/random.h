/* Random: numbers that nobody can guess (ids, secrets, seeds), and seeds that repeat when --seed says so. */
#ifndef DSKV_DAEMON_RANDOM_H
#define DSKV_DAEMON_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Bytes from the system's generator; a system without one is a bug of the installation and ends the process. */
void dskv_random_bytes(void *bytes, size_t n);

/* Seeds for requests that bring none, 0 .. 2^63 - 1. */
struct dskv_seeds {
    int64_t base; /* --seed: the n-th seed is a function of base and n; -1: from the system */
    uint64_t n_drawn;
};
uint64_t dskv_seeds_next(struct dskv_seeds *seeds);

#endif
