/* Rotary, alone and together with the store of a step's keys and values.
 *
 * Grid: (neighbours of a row / 128, rows), a thread takes N pairs or numbers: 8 where halves are rotated and all rows
 * lie at multiples of 16 bytes, else 1.  Which of the two changes no bit.
 */
#include "cuda/kv.cuh"

enum { THREADS = 128 };

struct rotation {
    bool is_pairs;
    const int32_t *positions;
    const float *cosines, *sines;
    int half, head_dim, n_heads; /* half: pairs of a head */
};

static rotation rotation_of(const struct dskv_rope *p)
{
    return {p->style == DSKV_ROPE_PAIRS, p->positions, p->cos, p->sin, p->rotary_dim / 2, p->head_dim, p->n_heads};
}

static bool rotates_by_8(const struct dskv_rope *p)
{
    return p->style == DSKV_ROPE_HALVES && p->rotary_dim / 2 % 8 == 0 && p->head_dim % 8 == 0 && moves_by_8(p->x) &&
           moves_by_8(p->cos, 0, 0) && moves_by_8(p->sin, 0, 0);
}

/* N pairs of a head, of neighbouring numbers where a pair lies in two halves. */
template <typename T, int N> struct rotated {
    int head, first, second; /* where they lie in the head */
    neighbours<T, N> a, b;
};

template <typename T, int N>
__device__ __forceinline__ rotated<T, N> rotate(const rotation &r, int64_t row, int index, T *x)
{
    rotated<T, N> pair;
    int i = index % r.half;
    pair.head = index / r.half;
    pair.first = r.is_pairs ? 2 * i : i;
    pair.second = r.is_pairs ? 2 * i + 1 : i + r.half;
    int64_t angle = (int64_t)r.positions[row] * r.half + i;
    neighbours<float, N> c = load<float, N>(r.cosines + angle), s = load<float, N>(r.sines + angle);
    wait_for_previous();
    T *head = x + (int64_t)pair.head * r.head_dim;
    pair.a = load<T, N>(head + pair.first);
    pair.b = load<T, N>(head + pair.second);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float from = to_float(pair.a.at[j]), to = to_float(pair.b.at[j]);
        pair.a.at[j] = from_float<T>(from * c.at[j] - to * s.at[j]);
        pair.b.at[j] = from_float<T>(to * c.at[j] + from * s.at[j]);
    }
    store<T, N>(head + pair.first, pair.a);
    store<T, N>(head + pair.second, pair.b);
    return pair;
}

template <int N> __device__ __forceinline__ int my_index()
{
    return (int)(blockIdx.x * blockDim.x + threadIdx.x) * N;
}

template <typename T, int N> __global__ void rope_kernel(rotation r, T *x, int64_t stride)
{
    let_next_begin();
    if (my_index<N>() < r.n_heads * r.half)
        rotate<T, N>(r, blockIdx.y, my_index<N>(), x + blockIdx.y * stride);
}

extern "C" void dskv_cuda_rope(struct dskv_device *device, const struct dskv_rope *p)
{
    with_dtype(p->x.dtype, [&](auto t) {
        with_neighbours(rotates_by_8(p), [&](auto n) {
            using T = decltype(t);
            constexpr int N = decltype(n)::value;
            dim3 grid(blocks_for((int64_t)p->n_heads * (p->rotary_dim / 2) / N, THREADS), (unsigned)p->x.rows);
            queue_kernel(device, "rope", rope_kernel<T, N>, grid, dim3(THREADS), 0, rotation_of(p), (T *)p->x.data,
                         p->x.stride);
        });
    });
}

/* Of a row: first the pairs of queries and keys, then what keys have behind their rotated part, then values. */
template <typename T, typename K, int N>
__global__ void rope_kv_write_kernel(rotation r, T *x, int64_t x_stride, const T *v, int64_t v_stride, kv_layer kv,
                                     int n_kv_heads, const int32_t *slots)
{
    let_next_begin();
    int64_t row = blockIdx.y;
    int index = my_index<N>(), slot = slots[row], n_pairs = r.n_heads * r.half, first_key = r.n_heads - n_kv_heads;
    int behind = r.head_dim - 2 * r.half;
    x += row * x_stride;
    if (index < n_pairs) {
        rotated<T, N> pair = rotate<T, N>(r, row, index, x);
        if (slot >= 0 && pair.head >= first_key) {
            K *key = key_of_slot<K>(kv, slot, pair.head - first_key);
            store_as<K>(key + pair.first, pair.a);
            store_as<K>(key + pair.second, pair.b);
        }
        return;
    }
    wait_for_previous();
    index -= n_pairs;
    if (slot < 0)
        return;
    if (index < n_kv_heads * behind) {
        int head = index / behind, d = 2 * r.half + index % behind;
        store_as<K>(key_of_slot<K>(kv, slot, head) + d, load<T, N>(x + (int64_t)(first_key + head) * r.head_dim + d));
        return;
    }
    index -= n_kv_heads * behind;
    if (index < n_kv_heads * r.head_dim)
        store_as<K>(key_of_slot<K>(kv, slot, index / r.head_dim) + value_offset(kv) + index % r.head_dim,
                    load<T, N>(v + row * v_stride + index));
}

extern "C" void dskv_cuda_rope_kv_write(struct dskv_device *device, const struct dskv_rope_kv_write *p)
{
    const struct dskv_rope *rope = &p->rope;
    const struct dskv_kv *kv = &p->write.kv;
    int64_t n = (int64_t)rope->n_heads * (rope->rotary_dim / 2) +
                (int64_t)kv->n_kv_heads_local * (2 * rope->head_dim - rope->rotary_dim);
    with_dtype(rope->x.dtype, [&](auto t) {
        with_dtype(kv->dtype, [&](auto e) {
            with_neighbours(rotates_by_8(rope) && moves_by_8(p->write.v), [&](auto neighbours) {
                using T = decltype(t);
                using K = decltype(e);
                constexpr int N = decltype(neighbours)::value;
                queue_kernel(device, "rope_kv_write", rope_kv_write_kernel<T, K, N>,
                             dim3(blocks_for(n / N, THREADS), (unsigned)rope->x.rows), dim3(THREADS), 0,
                             rotation_of(rope), (T *)rope->x.data, rope->x.stride, (const T *)p->write.v.data,
                             p->write.v.stride, kv_layer_of(kv, p->write.layer), kv->n_kv_heads_local, p->write.slots);
            });
        });
    });
}
