/* Keys and values as the copy engine brings them (compute capability 9.0 on), into the places of attention_tile.cuh. */
#ifndef DSKV_KERNELS_CUDA_ATTENTION_BULK_CUH
#define DSKV_KERNELS_CUDA_ATTENTION_BULK_CUH

#include "cuda/attention_tile.cuh"
#include "cuda/bulk.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/* One thread: 64 keys or values from `first` on, half_bytes<D>; what stands for those behind the tile's last one is any
 * of them. */
template <int D>
__device__ __forceinline__ void bring_half(unsigned char *shared, const CUtensorMap *map, int box_rows,
                                           int block_tokens, const tile &t, int first, int is_value, uint64_t *barrier)
{
    for (int key = 0; key < KEYS; key += box_rows) {
        int position = first + key <= t.last ? first + key : first;
        int row = ((int)blockIdx.y * 2 + is_value) * block_tokens + position % block_tokens;
        int block = t.table[position / block_tokens];
        for (int column = 0; column < D; column += BOX_DIMS)
            copy_box(shared + place_of(key, column), map, column, row, block, barrier);
    }
}

#endif

/* A layer of the pool as [blocks][rows][D], a row being a key or a value; boxes of 64 dimensions, of which those that a
 * head lacks read as zeros, and of as many rows as are returned; 0: it cannot be described. */
static inline int describe_layer(CUtensorMap *map, const struct dskv_kv *kv, const kv_layer &layer)
{
    static const encode_function function = find_encode();
    int box_rows = kv->block_tokens % 64 == 0 ? 64 : kv->block_tokens % 32 == 0 ? 32 : 16;
    cuuint64_t sizes[3] = {(cuuint64_t)kv->head_dim, (cuuint64_t)kv->n_kv_heads_local * 2 * kv->block_tokens,
                           (cuuint64_t)kv->n_blocks};
    cuuint64_t strides[2] = {(cuuint64_t)kv->head_dim * 2, (cuuint64_t)kv->block_bytes};
    cuuint32_t box[3] = {BOX_DIMS, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    return function &&
                   function(map,
                            kv->dtype == DSKV_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                            3, layer.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
               ? box_rows
               : 0;
}

#endif
