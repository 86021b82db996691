/* Pool: the bytes of this rank's KV blocks.  Knows sizes; which block is whose is rank 0's affair (daemon/). */
#ifndef DSKV_PARALLEL_POOL_H
#define DSKV_PARALLEL_POOL_H

#include "parallel/model.h"

struct dskv_pool_options {
    int64_t bytes;          /* per rank; 0: from memory_fraction */
    double memory_fraction; /* of what is free on the device, or on this host for all its ranks together */
    int shares_device;      /* all ranks take from one device's memory */
    int32_t block_tokens;
    int32_t max_model_len;
    enum dskv_dtype dtype;
};

/* The shape of a rank's pool without its blocks: n_blocks is 0, data null. */
struct dskv_kv dskv_pool_shape(const struct dskv_model *model, const struct dskv_shard *shard, int32_t block_tokens,
                               enum dskv_dtype dtype);
/* Collective: all ranks get the same number of blocks, the smallest that any of them can have.  DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_pool_open(struct dskv_device *device, const struct dskv_model *model,
                              const struct dskv_shard *shard, const struct dskv_pool_options *options,
                              struct dskv_kv *pool, struct dskv_error *error);
void dskv_pool_close(struct dskv_device *device, struct dskv_kv *pool);

#endif
