/* CUDA matmul (private): the kernels among which dskv_cuda_matmul chooses by shape alone.  All have the same bits. */
#ifndef DSKV_KERNELS_CUDA_MATMUL_H
#define DSKV_KERNELS_CUDA_MATMUL_H

#include "cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* From this many rows on cuBLASLt is asked, unless the kernel of batches serves: below, weights stream at the pace of
 * memory.  Wide: more outputs a multiprocessor than the kernel of batches takes, so that x is no more to read than
 * weights.  Long chains: too few outputs for all multiprocessors, and many products each. */
#define DSKV_CUDA_MANY_ROWS 33
#define DSKV_CUDA_MANY_ROWS_OF_WIDE 65
#define DSKV_CUDA_MANY_ROWS_OF_LONG_CHAINS 9
/* From this many rows on the kernel of batches is faster than that of few rows; of long chains from the above on. */
#define DSKV_CUDA_BATCH_ROWS 17
#define DSKV_CUDA_BATCH_OUTPUTS 64 /* a multiprocessor, at most */

/* The fastest of those whose bits are the own kernels'. */
void dskv_cuda_matmul_exact(struct dskv_device *device, const struct dskv_matmul *p);
/* Own kernels: any shape. */
void dskv_cuda_matmul_own(struct dskv_device *device, const struct dskv_matmul *p);
/* Whether the operands and the GPU are such as both streaming kernels want. */
int dskv_cuda_matmul_streams(const struct dskv_cuda *cuda, const struct dskv_matmul *p);
/* The one of few rows: 1 when it has been queued, 0 when this shape or GPU is not for it. */
int dskv_cuda_matmul_stream(struct dskv_device *device, const struct dskv_matmul *p);
/* The one of batches, up to 64 rows and no gates, likewise.  open: whether it runs here. */
int dskv_cuda_matmul_batch(struct dskv_device *device, const struct dskv_matmul *p);
int dskv_cuda_matmul_batch_open(void);
/* Both followed by the activation, rounding where the two do. */
int dskv_cuda_matmul_stream_activate(struct dskv_device *device, const struct dskv_matmul_activate *p);
int dskv_cuda_matmul_batch_activate(struct dskv_device *device, const struct dskv_matmul_activate *p);

/* cuBLASLt, where the bits of its algorithm for this shape are those of the own kernels: 1 when queued, 0 when an own
 * kernel must serve. */
int dskv_cuda_matmul_lt(struct dskv_device *device, const struct dskv_matmul *p);

/* With free_order: the fastest of all that cuBLASLt offers, whatever its order; 0 when the exact kernels are faster. */
int dskv_cuda_matmul_any_order(struct dskv_device *device, const struct dskv_matmul *p);

/* y = x + bias, rounded once; x [y.rows, y.cols] contiguous; columns in fours, rows aligned to them. */
void dskv_cuda_add_bias(struct dskv_device *device, const float *x, const float *bias, const struct dskv_tensor *y);
/* Fills n elements with values of both signs whose magnitudes span 2^-7 .. 2^7, one function of the seed. */
void dskv_cuda_fill_wide(struct dskv_device *device, void *data, enum dskv_dtype dtype, int64_t n, uint64_t seed);
/* The number of 2-byte words in which two runs of memory differ; waits for the device. */
int64_t dskv_cuda_count_differences(struct dskv_device *device, const void *a, const void *b, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
