/* Where a key or value lies.  In a block: per layer and local KV head, keys as [block_tokens][head_dim], then values as
 * [block_tokens][head_dim]. */
#ifndef DSKV_KERNELS_CUDA_KV_CUH
#define DSKV_KERNELS_CUDA_KV_CUH

#include "cuda/common.cuh"

struct kv_layer { /* one layer of the pool, by value to a kernel */
    char *data;
    int64_t block_bytes;
    int32_t block_tokens, head_dim;
};

static inline kv_layer kv_layer_of(const struct dskv_kv *kv, int32_t layer)
{
    int64_t head_elements = (int64_t)2 * kv->block_tokens * kv->head_dim;
    return {(char *)kv->data + layer * kv->n_kv_heads_local * head_elements * (int64_t)dskv_dtype_bytes(kv->dtype),
            (int64_t)kv->block_bytes, kv->block_tokens, kv->head_dim};
}

/* The key of a head's token at `place` in a block. */
template <typename K> __device__ __forceinline__ K *key_at(kv_layer kv, int64_t block, int head, int place)
{
    return (K *)(kv.data + block * kv.block_bytes) + ((int64_t)head * 2 * kv.block_tokens + place) * kv.head_dim;
}
/* The same of a slot, which counts tokens over all blocks. */
template <typename K> __device__ __forceinline__ K *key_of_slot(kv_layer kv, int slot, int head)
{
    return key_at<K>(kv, slot / kv.block_tokens, head, slot % kv.block_tokens);
}
/* The same of a position, by its sequence's block table. */
template <typename K>
__device__ __forceinline__ K *key_of_position(kv_layer kv, const int32_t *table, int position, int head)
{
    return key_at<K>(kv, table[position / kv.block_tokens], head, position % kv.block_tokens);
}
/* From a token's key to its value. */
__device__ __forceinline__ int64_t value_offset(kv_layer kv)
{
    return (int64_t)kv.block_tokens * kv.head_dim;
}

/* Neighbours of activations, rounded to the pool's dtype. */
template <typename K, typename T, int N> __device__ __forceinline__ void store_as(K *place, const neighbours<T, N> &x)
{
    neighbours<K, N> y;
#pragma unroll
    for (int i = 0; i < N; i++)
        y.at[i] = from_float<K>(to_float(x.at[i]));
    store<K, N>(place, y);
}

#endif
