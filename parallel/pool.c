#include "parallel/pool.h"

#include "parallel/engine.h"
#include "parallel/job.h"

#define HOST_FRACTION 0.5             /* of free memory at most by default: the host has other work */
#define HOST_BYTES (INT64_C(1) << 30) /* per rank at most by default */
#define DEFAULT_CONTEXTS 64           /* full-length contexts at most by default */

struct dskv_kv dskv_pool_shape(const struct dskv_model *model, const struct dskv_shard *shard, int32_t block_tokens,
                               enum dskv_dtype dtype)
{
    struct dskv_kv shape = {.dtype = dtype,
                            .block_tokens = block_tokens,
                            .n_layers = model->n_layers,
                            .n_kv_heads_local = shard->n_kv_heads_local,
                            .head_dim = model->head_dim};
    shape.block_bytes = dskv_kv_block_bytes(&shape);
    return shape;
}

/* Ranks take from the same memory when they share a device, or the host. */
static int64_t own_part(struct dskv_device *device, const struct dskv_pool_options *options, int64_t available)
{
    return dskv_device_is_host(device) || options->shares_device ? available / dskv_job_n_ranks() : available;
}

static int64_t default_bytes(struct dskv_device *device, const struct dskv_pool_options *options, size_t block_bytes,
                             int64_t available)
{
    double fraction = options->memory_fraction;
    int64_t most = INT64_MAX;
    if (dskv_device_is_host(device)) {
        fraction = fraction < HOST_FRACTION ? fraction : HOST_FRACTION;
        most = HOST_BYTES;
    }
    int64_t bytes = available < 0 ? HOST_BYTES : (int64_t)((double)own_part(device, options, available) * fraction);
    int64_t blocks_of_context = (options->max_model_len + options->block_tokens - 1) / options->block_tokens;
    int64_t enough = DEFAULT_CONTEXTS * blocks_of_context * (int64_t)block_bytes;
    bytes = bytes < most ? bytes : most;
    return bytes < enough ? bytes : enough;
}

/* How many blocks this rank can have; 0 with a sentence when not even one. */
static int64_t count_blocks(struct dskv_device *device, const struct dskv_pool_options *options, size_t block_bytes,
                            struct dskv_error *error)
{
    int64_t available = dskv_device_available(device);
    int64_t bytes = options->bytes ? options->bytes : default_bytes(device, options, block_bytes, available);
    int64_t n = bytes / (int64_t)block_bytes;
    if (n < 1)
        dskv_fail_exit(error, DSKV_EXIT_MEMORY,
                       "a KV cache of %lld bytes per rank holds no block: one block of %d tokens takes %zu",
                       (long long)bytes, (int)options->block_tokens, block_bytes);
    if (available >= 0 && options->bytes && bytes > own_part(device, options, available)) {
        dskv_fail_exit(error, DSKV_EXIT_MEMORY,
                       "a KV cache of %lld bytes on each of %d ranks does not fit the %lld bytes that are free",
                       (long long)bytes, dskv_job_n_ranks(), (long long)available);
        n = 0;
    }
    return n < DSKV_MAX_BLOCKS ? n : DSKV_MAX_BLOCKS;
}

enum dskv_exit dskv_pool_open(struct dskv_device *device, const struct dskv_model *model,
                              const struct dskv_shard *shard, const struct dskv_pool_options *options,
                              struct dskv_kv *pool, struct dskv_error *error)
{
    *pool = dskv_pool_shape(model, shard, options->block_tokens, options->dtype);
    int64_t own = count_blocks(device, options, pool->block_bytes, error);
    enum dskv_exit code = dskv_parallel_agree(own > 0 ? DSKV_EXIT_OK : DSKV_EXIT_MEMORY, error);
    if (code)
        return code;
    pool->n_blocks = (int32_t)dskv_job_min(own);
    size_t bytes = (size_t)pool->n_blocks * pool->block_bytes;
    pool->data = dskv_device_alloc(device, bytes);
    if (!pool->data)
        code = dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for a KV cache of %d blocks of %zu bytes",
                              (int)pool->n_blocks, pool->block_bytes);
    code = dskv_parallel_agree(code, error);
    if (code)
        dskv_pool_close(device, pool);
    return code;
}

void dskv_pool_close(struct dskv_device *device, struct dskv_kv *pool)
{
    if (pool->data)
        dskv_device_free(device, pool->data, (size_t)pool->n_blocks * pool->block_bytes);
    pool->data = NULL;
}
