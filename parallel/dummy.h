/* Dummy: random weights for measurements, the same at every number of ranks.
 *
 * An element is one function of the tensor's name and its global output and input, so that a shard needs no other
 * shard, and a device may make its own.
 */
#ifndef DSKV_PARALLEL_DUMMY_H
#define DSKV_PARALLEL_DUMMY_H

#include <stdint.h>

/* Of a tensor's name: the seed of kernels/noise.h. */
uint64_t dskv_dummy_seed(const char *name);
/* dst [n, k] = outputs [first_output, + n) x inputs [first_input, + k): about normal, standard deviation 0.02. */
void dskv_dummy_fill(const char *name, int64_t first_output, int64_t n, int64_t first_input, int64_t k, float *dst);

#endif
