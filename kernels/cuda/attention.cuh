/* What the forms of attention share: the generic one (attention.cu), that of tensor instructions (attention_tensor.cu),
 * which takes 16-bit activations on a pool of the same dtype at the usual head sizes, that of warpgroups
 * (attention_wgmma.cu), which takes many rows of it, and that of batches (attention_batch.cu). */
#ifndef DSKV_KERNELS_CUDA_ATTENTION_CUH
#define DSKV_KERNELS_CUDA_ATTENTION_CUH

#include "cuda/kv.cuh"

struct attention_grid { /* what all kernels need, by value */
    kv_layer kv;
    float scale;
    int n_heads;
    const int32_t *kv_head_of_head;
    const struct dskv_attention_work *work;
    int n_work;
    const int32_t *tables;
    int64_t q_stride, out_stride;
    int n_pieces; /* of the longest row; 0: not known */
};

/* The work of a row: its block table and its last key; false for a row of no run, which is left alone. */
static __device__ __forceinline__ bool find_row(const attention_grid &g, int row, const int32_t **table, int *last)
{
    int low = 0, high = g.n_work - 1; /* runs are ascending, empty ones are last */
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (g.work[middle].n_tokens > 0 && g.work[middle].first <= row)
            low = middle;
        else
            high = middle - 1;
    }
    struct dskv_attention_work w = g.work[low];
    *table = g.tables + w.first_block;
    *last = w.start + row - w.first;
    return row >= w.first && row < w.first + w.n_tokens;
}

/* Where a piece of a row and head lies in scratch, N floats each. */
template <int N, typename F>
__device__ __forceinline__ F *piece_place(F *scratch, const attention_grid &g, int row, int head, int piece)
{
    return scratch + (((int64_t)row * g.n_heads + head) * g.n_pieces + piece) * N;
}

/* Queues the operation and says so, or leaves it to the generic form. */
int attention_with_tensor_instructions(struct dskv_device *device, const struct dskv_attention *p,
                                       const attention_grid &g);

/* The same in place of the former, with its bits, where it is the faster one; dtypes are known to suit it, sizes and
 * alignment it looks at itself. */
int attention_with_warpgroups(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g);
/* The same for runs of few pairs of (token, head) a KV head, which fill the device without a split. */
int attention_of_batch(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g);

#endif
