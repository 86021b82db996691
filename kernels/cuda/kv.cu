/* Operations on the pool's bytes: a step's keys and values in, block copies, and pieces out and in. */
#include "cuda/kv.cuh"

/* Grid: (neighbours of a row / 128, rows), a thread takes N neighbours of one head. */
template <typename T, typename K, int N>
__global__ void kv_write_kernel(kv_layer kv, const int32_t *slots, const T *k, int64_t k_stride, const T *v,
                                int64_t v_stride, int width)
{
    int64_t row = blockIdx.y;
    int column = (int)(blockIdx.x * blockDim.x + threadIdx.x) * N, slot = slots[row];
    follow_previous();
    if (column >= width || slot < 0)
        return;
    K *place = key_of_slot<K>(kv, slot, column / kv.head_dim) + column % kv.head_dim;
    store_as<K>(place, load<T, N>(k + row * k_stride + column));
    store_as<K>(place + value_offset(kv), load<T, N>(v + row * v_stride + column));
}

extern "C" void dskv_cuda_kv_write(struct dskv_device *device, const struct dskv_kv_write *p)
{
    with_dtype(p->k.dtype, [&](auto t) {
        with_dtype(p->kv.dtype, [&](auto e) {
            with_neighbours(moves_by_8(p->k) && moves_by_8(p->v) && p->kv.head_dim % 8 == 0, [&](auto n) {
                using T = decltype(t);
                using K = decltype(e);
                constexpr int N = decltype(n)::value;
                dim3 grid(blocks_for(p->k.cols / N, 128), (unsigned)p->k.rows);
                queue_kernel(device, "kv_write", kv_write_kernel<T, K, N>, grid, dim3(128), 0,
                             kv_layer_of(&p->kv, p->layer), p->slots, (const T *)p->k.data, p->k.stride,
                             (const T *)p->v.data, p->v.stride, (int)p->k.cols);
            });
        });
    });
}

/* One block of threads per copy, layer and head. */
template <typename K> __global__ void kv_copy_kernel(kv_layer kv, int n_heads, const struct dskv_block_copy *copies)
{
    struct dskv_block_copy copy = copies[blockIdx.x];
    int64_t layer_bytes = (int64_t)n_heads * 2 * kv.block_tokens * kv.head_dim * (int64_t)sizeof(K);
    kv.data += blockIdx.y * layer_bytes;
    int head = (int)blockIdx.z, n = copy.n_tokens * kv.head_dim;
    const K *from = key_at<K>(kv, copy.src, head, 0);
    K *to = key_at<K>(kv, copy.dst, head, 0);
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        to[i] = from[i];
        to[i + value_offset(kv)] = from[i + value_offset(kv)];
    }
}

extern "C" void dskv_cuda_kv_copy(struct dskv_device *device, const struct dskv_kv_copy *p)
{
    dim3 grid((unsigned)p->n, (unsigned)p->kv.n_layers, (unsigned)p->kv.n_kv_heads_local);
    with_dtype(p->kv.dtype, [&](auto e) {
        using K = decltype(e);
        kv_copy_kernel<K>
            <<<grid, 128, 0, dskv_cuda_of(device)->stream>>>(kv_layer_of(&p->kv, 0), p->kv.n_kv_heads_local, p->copies);
    });
    launched(device, "kv_copy");
}

/* dense [n_heads, stop - start, head_dim] <-> the pool; one thread an element. */
template <typename K, bool TO_POOL>
__global__ void kv_dense_kernel(kv_layer kv, int is_value, int first_head, int n_heads, const int32_t *table, int start,
                                int stop, K *dense)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n_tokens = stop - start;
    if (i >= n_heads * n_tokens * kv.head_dim)
        return;
    int d = (int)(i % kv.head_dim), token = start + (int)(i / kv.head_dim % n_tokens);
    int head = first_head + (int)(i / (n_tokens * kv.head_dim)), place = token % kv.block_tokens;
    int64_t block = table[token / kv.block_tokens];
    K *element = key_at<K>(kv, block, head, place) + (is_value ? value_offset(kv) : 0) + d;
    if (TO_POOL)
        *element = dense[i];
    else
        dense[i] = *element;
}

template <bool TO_POOL> static void kv_dense(struct dskv_device *device, const struct dskv_kv_dense *p)
{
    int64_t n = (int64_t)p->n_heads * (p->stop - p->start) * p->kv.head_dim;
    with_dtype(p->kv.dtype, [&](auto e) {
        using K = decltype(e);
        kv_dense_kernel<K, TO_POOL><<<blocks_for(n, 256), 256, 0, dskv_cuda_of(device)->stream>>>(
            kv_layer_of(&p->kv, p->layer), p->is_value, p->first_head, p->n_heads, p->table, p->start, p->stop,
            (K *)p->dense);
    });
    launched(device, TO_POOL ? "kv_scatter" : "kv_gather");
}

extern "C" void dskv_cuda_kv_gather(struct dskv_device *device, const struct dskv_kv_dense *p)
{
    kv_dense<false>(device, p);
}

extern "C" void dskv_cuda_kv_scatter(struct dskv_device *device, const struct dskv_kv_dense *p)
{
    kv_dense<true>(device, p);
}
