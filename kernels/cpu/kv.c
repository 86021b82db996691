/* Moving keys and values: into the pool, between its blocks, and between the pool and dense tensors.  Bytes, except
 * that new rows are rounded to the pool's dtype. */
#include "kernels/cpu/names.h"

#include "base/half.h"

#include <string.h>

/* ---- new rows --------------------------------------------------------------------------------------------------- */

/* n floats in the pool's dtype, `stride` elements apart. */
static void store_strided(void *dst, enum dskv_dtype dtype, int64_t stride, const float *src, int64_t n)
{
    float *full = dst;
    uint16_t *half = dst;
    switch (dtype) {
    case DSKV_F32:
        for (int64_t i = 0; i < n; i++)
            full[i * stride] = src[i];
        break;
    case DSKV_F16:
        for (int64_t i = 0; i < n; i++)
            half[i * stride] = dskv_f32_to_f16(src[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            half[i * stride] = dskv_f32_to_bf16(src[i]);
        break;
    }
}

static void write_head(const struct dskv_kv_write *p, int64_t row, int32_t head)
{
    const struct dskv_kv *kv = &p->kv;
    const size_t bytes = dskv_dtype_bytes(kv->dtype);
    const int32_t block = p->slots[row] / kv->block_tokens, place = p->slots[row] % kv->block_tokens;
    const int64_t from = (int64_t)head * kv->head_dim;
    char *keys = dskv_kv_plane(kv, block, p->layer, head, 0) + (size_t)place * bytes;
    char *values = dskv_kv_plane(kv, block, p->layer, head, 1) + (size_t)(place * dskv_kv_value_stride(kv)) * bytes;
    store_strided(keys, kv->dtype, kv->block_tokens, (const float *)p->k.data + row * p->k.stride + from, kv->head_dim);
    store_strided(values, kv->dtype, 1, (const float *)p->v.data + row * p->v.stride + from, kv->head_dim);
}

/* Items are heads: rows of one block then write the same lines of keys one after the other. */
static void write_heads(void *context, int64_t first, int64_t last)
{
    const struct dskv_kv_write *p = context;
    for (int64_t head = first; head < last; head++)
        for (int64_t row = 0; row < p->k.rows; row++)
            if (p->slots[row] >= 0)
                write_head(p, row, (int32_t)head);
}

void dskv_cpu_kv_write(struct dskv_device *device, const struct dskv_kv_write *p)
{
    dskv_threads_for(dskv_cpu_threads(device), p->kv.n_kv_heads_local, p->k.rows * p->kv.head_dim, write_heads,
                     (void *)p);
}

/* ---- block to block --------------------------------------------------------------------------------------------- */

static void copy_plane(const struct dskv_kv *kv, const struct dskv_block_copy *copy, int32_t layer, int32_t head)
{
    const size_t bytes = dskv_dtype_bytes(kv->dtype), n = (size_t)copy->n_tokens;
    const char *src = dskv_kv_plane(kv, copy->src, layer, head, 0);
    char *dst = dskv_kv_plane(kv, copy->dst, layer, head, 0);
    for (int32_t d = 0; d < kv->head_dim; d++) {
        size_t row = (size_t)d * (size_t)kv->block_tokens * bytes;
        memcpy(dst + row, src + row, n * bytes);
    }
    src = dskv_kv_plane(kv, copy->src, layer, head, 1);
    dst = dskv_kv_plane(kv, copy->dst, layer, head, 1);
    memcpy(dst, src, n * (size_t)dskv_kv_value_stride(kv) * bytes);
}

/* Items are layers; each does all copies in their order, for one may read what an earlier one wrote. */
static void copy_layers(void *context, int64_t first, int64_t last)
{
    const struct dskv_kv_copy *p = context;
    for (int64_t layer = first; layer < last; layer++)
        for (int32_t i = 0; i < p->n; i++)
            for (int32_t head = 0; head < p->kv.n_kv_heads_local; head++)
                copy_plane(&p->kv, &p->copies[i], (int32_t)layer, head);
}

void dskv_cpu_kv_copy(struct dskv_device *device, const struct dskv_kv_copy *p)
{
    for (int32_t i = 0; i < p->n; i++)
        DSKV_ASSERT(p->copies[i].src != p->copies[i].dst && p->copies[i].n_tokens >= 0 &&
                        p->copies[i].n_tokens <= p->kv.block_tokens,
                    "copy of %d tokens from block %d to %d", p->copies[i].n_tokens, p->copies[i].src, p->copies[i].dst);
    dskv_threads_for(dskv_cpu_threads(device), p->kv.n_layers, (int64_t)p->kv.block_bytes / p->kv.n_layers / 8 * p->n,
                     copy_layers, (void *)p);
}

/* ---- pool and dense --------------------------------------------------------------------------------------------- */

struct dense {
    const struct dskv_kv_dense *p;
    int to_pool;
};

/* n_rows x n_cols elements, each side with its own strides, as 4 or 2 bytes each. */
static void move(void *dst, int64_t dst_row, int64_t dst_col, const void *src, int64_t src_row, int64_t src_col,
                 int64_t n_rows, int64_t n_cols, size_t bytes)
{
    if (bytes == 4) {
        for (int64_t i = 0; i < n_rows; i++)
            for (int64_t j = 0; j < n_cols; j++)
                ((uint32_t *)dst)[i * dst_row + j * dst_col] = ((const uint32_t *)src)[i * src_row + j * src_col];
    } else {
        for (int64_t i = 0; i < n_rows; i++)
            for (int64_t j = 0; j < n_cols; j++)
                ((uint16_t *)dst)[i * dst_row + j * dst_col] = ((const uint16_t *)src)[i * src_row + j * src_col];
    }
}

/* Head first_head + i, block by block: dense rows are tokens, pool rows tokens (values) or dimensions (keys). */
static void move_head(const struct dskv_kv_dense *p, int64_t i, int to_pool)
{
    const struct dskv_kv *kv = &p->kv;
    const size_t bytes = dskv_dtype_bytes(kv->dtype);
    const int64_t pool_token = p->is_value ? dskv_kv_value_stride(kv) : 1,
                  pool_dim = p->is_value ? 1 : kv->block_tokens;
    char *dense = (char *)p->dense + (size_t)(i * (p->stop - p->start) * kv->head_dim) * bytes;
    for (int32_t token = p->start; token < p->stop;) {
        int32_t place = token % kv->block_tokens, n = kv->block_tokens - place;
        n = n < p->stop - token ? n : p->stop - token;
        int32_t block = p->table[token / kv->block_tokens];
        char *pool = dskv_kv_plane(kv, block, p->layer, p->first_head + (int32_t)i, p->is_value);
        pool += (size_t)(place * pool_token) * bytes;
        if (to_pool)
            move(pool, pool_token, pool_dim, dense, kv->head_dim, 1, n, kv->head_dim, bytes);
        else
            move(dense, kv->head_dim, 1, pool, pool_token, pool_dim, n, kv->head_dim, bytes);
        dense += (size_t)n * (size_t)kv->head_dim * bytes;
        token += n;
    }
}

static void move_heads(void *context, int64_t first, int64_t last)
{
    const struct dense *dense = context;
    for (int64_t i = first; i < last; i++)
        move_head(dense->p, i, dense->to_pool);
}

static void run_dense(struct dskv_device *device, const struct dskv_kv_dense *p, int to_pool)
{
    struct dense dense = {p, to_pool};
    dskv_threads_for(dskv_cpu_threads(device), p->n_heads, (int64_t)(p->stop - p->start) * p->kv.head_dim, move_heads,
                     &dense);
}

void dskv_cpu_kv_gather(struct dskv_device *device, const struct dskv_kv_dense *p)
{
    run_dense(device, p, 0);
}

void dskv_cpu_kv_scatter(struct dskv_device *device, const struct dskv_kv_dense *p)
{
    run_dense(device, p, 1);
}
