/* CUDA device (private): what its files share.  C and CUDA both include this. */
#ifndef DSKV_KERNELS_CUDA_H
#define DSKV_KERNELS_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

#include "base/limits.h"
#include "kernels/device.h"

#include <cuda_runtime.h>

struct dskv_cuda {
    struct dskv_device base;
    struct dskv_device_table table; /* base.table: the device's own, for its numerics */
    char numerics[32];
    cudaStream_t stream;
    int n_multiprocessors;
    int32_t identity;  /* see dskv_device_identity */
    cudaError_t error; /* the first one; later operations do nothing useful, the job ends at the next sync */
    char error_place[64];
    float *scratch; /* DSKV_CUDA_COUNTERS counters, zero between operations; then one operation's partial results */
    size_t scratch_bytes;
    int next_waits;                    /* the next kernel begins when the one ahead has ended, for good */
    cudaEvent_t marks[DSKV_MAX_MARKS]; /* in turn */
    uint64_t n_marks;
    int begins_early;        /* what was compiled for this GPU waits for the kernel ahead (common.cuh) */
    int free_order;          /* see dskv_device_options */
    int has_stream_matmul;   /* the streaming matmul runs on this GPU */
    int has_warpgroups;      /* attention by warpgroups does */
    int has_batch_attention; /* attention of batches does */
    struct dskv_cuda_lt *lt; /* matmul_lt.c's own; null until the first weight is filled */
};

/* Counters by which the last of the blocks that share a result knows that it is the last. */
#define DSKV_CUDA_COUNTERS ((size_t)1 << 16)
static inline unsigned *dskv_cuda_counters(struct dskv_cuda *cuda)
{
    return (unsigned *)cuda->scratch;
}
static inline float *dskv_cuda_scratch(struct dskv_cuda *cuda)
{
    return cuda->scratch + DSKV_CUDA_COUNTERS;
}
static inline size_t dskv_cuda_scratch_bytes(const struct dskv_cuda *cuda)
{
    return cuda->scratch_bytes - DSKV_CUDA_COUNTERS * sizeof *cuda->scratch;
}

static inline struct dskv_cuda *dskv_cuda_of(struct dskv_device *device)
{
    return (struct dskv_cuda *)device;
}

/* Keeps the first error, with the operation it came from. */
void dskv_cuda_note(struct dskv_cuda *cuda, cudaError_t error, const char *place);

/* Weights are row-major [n, k], both rounded up to this, so that tiles need no bounds. */
#define DSKV_CUDA_WEIGHT_TILE 64
static inline int64_t dskv_cuda_padded(int64_t n)
{
    return (n + DSKV_CUDA_WEIGHT_TILE - 1) / DSKV_CUDA_WEIGHT_TILE * DSKV_CUDA_WEIGHT_TILE;
}

void dskv_cuda_embed(struct dskv_device *device, const struct dskv_embed *p);
void dskv_cuda_norm(struct dskv_device *device, const struct dskv_norm *p);
/* Whether the streaming matmul runs here, and whether kernels may begin early: for open. */
int dskv_cuda_matmul_stream_open(void);
int dskv_cuda_begins_early(void);
/* Chooses and proves cuBLASLt's algorithms for a weight's shape, when it is new; the weight's data is not read. */
void dskv_cuda_matmul_lt_prepare(struct dskv_device *device, const struct dskv_weight *weight);
void dskv_cuda_matmul_lt_close(struct dskv_cuda_lt **lt);
void dskv_cuda_matmul(struct dskv_device *device, const struct dskv_matmul *p);
void dskv_cuda_matmul_activate(struct dskv_device *device, const struct dskv_matmul_activate *p);
void dskv_cuda_rope(struct dskv_device *device, const struct dskv_rope *p);
void dskv_cuda_kv_write(struct dskv_device *device, const struct dskv_kv_write *p);
void dskv_cuda_rope_kv_write(struct dskv_device *device, const struct dskv_rope_kv_write *p);
void dskv_cuda_attention(struct dskv_device *device, const struct dskv_attention *p);
/* Whether attention by warpgroups and that of batches run here: for open. */
int dskv_cuda_attention_wgmma_open(void);
int dskv_cuda_attention_batch_open(void);
void dskv_cuda_activate(struct dskv_device *device, const struct dskv_activate *p);
void dskv_cuda_residual(struct dskv_device *device, const struct dskv_residual *p);
void dskv_cuda_residual_norm(struct dskv_device *device, const struct dskv_residual_norm *p);
void dskv_cuda_sum(struct dskv_device *device, const struct dskv_sum *p);
void dskv_cuda_gather_rows(struct dskv_device *device, const struct dskv_gather_rows *p);
void dskv_cuda_select(struct dskv_device *device, const struct dskv_select *p);
void dskv_cuda_choose(struct dskv_device *device, const struct dskv_choose *p);
void dskv_cuda_sample(struct dskv_device *device, const struct dskv_sample *p);
void dskv_cuda_kv_copy(struct dskv_device *device, const struct dskv_kv_copy *p);
void dskv_cuda_receive(struct dskv_device *device, const struct dskv_receive *p);
void dskv_cuda_report(struct dskv_device *device, const struct dskv_report *p);
void dskv_cuda_kv_gather(struct dskv_device *device, const struct dskv_kv_dense *p);
void dskv_cuda_kv_scatter(struct dskv_device *device, const struct dskv_kv_dense *p);

size_t dskv_cuda_exchange_bytes(int32_t n);
void dskv_cuda_exchange_gather(struct dskv_device *device, const struct dskv_exchange_gather *p);
void dskv_cuda_exchange_add(struct dskv_device *device, const struct dskv_exchange_add *p);
int dskv_cuda_exchange_residual_norm(struct dskv_device *device, const struct dskv_exchange_residual_norm *p);

void dskv_cuda_weight_fill_noise(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                                 uint64_t seed, int64_t first_output, int64_t first_input);
void dskv_cuda_read(struct dskv_device *device, const void *memory, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
