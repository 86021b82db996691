/* Choosing from rows of logits: statistics and the k best of a shard, and the best id over shards.
 *
 * Grid: (parts of 4096 columns, rows) for selecting, 256 threads each.  Every sum runs over fixed strides and one fixed
 * tree, so that equal logits give equal results on every rank.  Order among logits is that of (value descending, id
 * ascending), told by one 64-bit key.
 */
#include "cuda/common.cuh"

#include <climits>

/* Larger is better: the value's bits in an order-preserving form, then the id reversed.  +0 and -0 are equal values. */
__device__ __forceinline__ uint64_t key_of(float value, int id)
{
    uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)(INT_MAX - id);
}
__device__ __forceinline__ int id_of(uint64_t key)
{
    return INT_MAX - (int)(uint32_t)key;
}
__device__ __forceinline__ float value_of(uint64_t key)
{
    uint32_t bits = (uint32_t)(key >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

/* The largest key of a block of 256 threads; every thread gets it.  shared: 8 keys. */
__device__ __forceinline__ uint64_t block_max(uint64_t key, uint64_t *shared)
{
    for (int offset = 16; offset; offset >>= 1) {
        uint64_t other = __shfl_xor_sync(~0u, key, offset);
        key = other > key ? other : key;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = key;
    __syncthreads();
    for (int warp = 0; warp < 8; warp++)
        key = shared[warp] > key ? shared[warp] : key;
    return key;
}

/* A row's columns are cut into parts of PART, whatever the row; each is a block, which stores what its part says: the
 * best key, the sum of exp(logit - the part's max), whether all are finite, and its k best.  The row's last block to
 * come merges the parts in ascending order. */
enum { SELECT_THREADS = 256, HELD = 16, PART = SELECT_THREADS * HELD };

struct part_stats {
    uint64_t best; /* 0: the part is empty */
    float sum;
    int finite;
};

struct select_grid {
    int n, first; /* columns that are read; the id of the first one */
    int k, n_parts;
    part_stats *parts; /* [rows][n_parts] */
    uint64_t *tops;    /* [rows][n_parts][k], descending, 0 behind the part's end */
    unsigned *counters;
};

/* A thread's columns of a part are every 256th. */
__device__ void select_part(const select_grid &g, const float *values, int part, part_stats *stats, uint64_t *tops,
                            uint64_t *shared_keys, float *shared)
{
    float held[HELD];
    uint64_t best = 0;
    int finite = 1, begin = part * PART + (int)threadIdx.x;
#pragma unroll
    for (int i = 0; i < HELD; i++)
        held[i] = begin + i * SELECT_THREADS < g.n ? values[begin + i * SELECT_THREADS] : 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (begin + i * SELECT_THREADS < g.n) {
            uint64_t key = key_of(held[i], g.first + begin + i * SELECT_THREADS);
            best = key > best ? key : best;
            finite &= isfinite(held[i]) != 0;
        }
    finite = __syncthreads_and(finite);
    uint64_t mine = best;
    best = block_max(best, shared_keys);
    float max = value_of(best), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (begin + i * SELECT_THREADS < g.n)
            sum = sum + expf(held[i] - max);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        *stats = {best, sum, finite};
    for (int i = 0; i < g.k; i++) {
        if (threadIdx.x == 0)
            tops[i] = best;
        if (best == 0)
            continue;       /* the part has no more */
        if (mine == best) { /* this thread had the best one: its next one */
            mine = 0;
#pragma unroll
            for (int j = 0; j < HELD; j++)
                if (begin + j * SELECT_THREADS < g.n) {
                    uint64_t key = key_of(held[j], g.first + begin + j * SELECT_THREADS);
                    mine = key < best && key > mine ? key : mine;
                }
        }
        best = block_max(mine, shared_keys);
    }
}

/* The parts' statistics into the row's, by one warp: a lane takes every 32nd part, in order, then a tree. */
__device__ void merge_stats(const select_grid &g, const part_stats *parts, const float *values, int target,
                            struct dskv_row_stats *stats)
{
    int lane = (int)threadIdx.x, finite = 1;
    uint64_t best = 0;
    for (int i = lane; i < g.n_parts; i += 32) {
        uint64_t key = __ldcg((const unsigned long long *)&parts[i].best);
        best = key > best ? key : best;
        finite &= __ldcg(&parts[i].finite);
    }
    for (int offset = 16; offset; offset >>= 1) {
        uint64_t other = __shfl_xor_sync(~0u, best, offset);
        best = other > best ? other : best;
    }
    finite = __all_sync(~0u, finite);
    float max = best ? value_of(best) : -INFINITY, sum = 0.0f;
    for (int i = lane; i < g.n_parts; i += 32) {
        uint64_t key = __ldcg((const unsigned long long *)&parts[i].best);
        if (key)
            sum = fmaf(__ldcg(&parts[i].sum), expf(value_of(key) - max), sum);
    }
    for (int offset = 16; offset; offset >>= 1)
        sum = sum + __shfl_xor_sync(~0u, sum, offset);
    int column = target - g.first;
    if (lane == 0)
        *stats = {max, best ? id_of(best) : INT_MAX, sum,
                  target >= 0 && column >= 0 && column < g.n ? values[column] : -INFINITY, finite};
}

/* The k best of the parts' k best. */
__device__ void merge_tops(const select_grid &g, const uint64_t *tops, float *top_values, int32_t *top_ids,
                           uint64_t *shared_keys)
{
    uint64_t limit = ~(uint64_t)0;
    for (int i = 0; i < g.k; i++) {
        uint64_t mine = 0;
        for (int j = (int)threadIdx.x; j < g.n_parts * g.k; j += SELECT_THREADS) {
            uint64_t key = __ldcg((const unsigned long long *)tops + j);
            mine = key < limit && key > mine ? key : mine;
        }
        limit = block_max(mine, shared_keys);
        if (threadIdx.x == 0) {
            top_values[i] = limit ? value_of(limit) : -INFINITY;
            top_ids[i] = limit ? id_of(limit) : INT_MAX;
        }
    }
}

/* Grid: (parts, rows). */
__global__ void __launch_bounds__(SELECT_THREADS)
    select_kernel(select_grid g, const float *logits, int64_t stride, const int32_t *targets,
                  struct dskv_row_stats *stats, float *top_values, int32_t *top_ids)
{
    __shared__ uint64_t keys[8];
    __shared__ float sums[8];
    __shared__ bool is_last;
    follow_previous();
    int64_t row = blockIdx.y, place = row * g.n_parts + blockIdx.x;
    const float *values = logits + row * stride;
    uint64_t *tops = g.tops + row * g.n_parts * g.k;
    select_part(g, values, (int)blockIdx.x, g.parts + place, g.tops + place * g.k, keys, sums);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(g.counters + row, 1) == (unsigned)(g.n_parts - 1);
        if (is_last)
            g.counters[row] = 0;
    }
    __syncthreads();
    if (!is_last)
        return;
    __threadfence();
    if (threadIdx.x < 32)
        merge_stats(g, g.parts + row * g.n_parts, values, targets[row], stats + row);
    merge_tops(g, tops, top_values + row * g.k, top_ids + row * g.k, keys);
}

extern "C" void dskv_cuda_select(struct dskv_device *device, const struct dskv_select *p)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    int64_t left = (int64_t)p->vocab - p->first;
    select_grid g = {};
    g.n = (int)(p->logits.cols < left ? p->logits.cols : left < 0 ? 0 : left);
    g.first = p->first;
    g.k = p->k;
    g.n_parts = g.n > 0 ? (g.n + PART - 1) / PART : 1;
    g.counters = dskv_cuda_counters(cuda);
    size_t row_bytes = (size_t)g.n_parts * (sizeof(part_stats) + (size_t)g.k * sizeof(uint64_t));
    int64_t most = (int64_t)(dskv_cuda_scratch_bytes(cuda) / row_bytes);
    most = most < (int64_t)DSKV_CUDA_COUNTERS ? most : (int64_t)DSKV_CUDA_COUNTERS - 1;
    for (int64_t row = 0; row < p->logits.rows; row += most) {
        int64_t n_rows = p->logits.rows - row < most ? p->logits.rows - row : most;
        g.parts = (part_stats *)dskv_cuda_scratch(cuda);
        g.tops = (uint64_t *)(g.parts + n_rows * g.n_parts);
        queue_kernel(device, "select", select_kernel, dim3((unsigned)g.n_parts, (unsigned)n_rows), dim3(SELECT_THREADS),
                     0, g, (const float *)p->logits.data + row * p->logits.stride, p->logits.stride, p->targets + row,
                     p->stats + row, p->top_values + row * g.k, p->top_ids + row * g.k);
    }
}

struct shard_stats {
    const struct dskv_row_stats *data[DSKV_MAX_RANKS];
};

/* A thread a row. */
__global__ void choose_kernel(shard_stats shards, int n, int rows, int32_t *ids)
{
    int row = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    follow_previous();
    if (row >= rows)
        return;
    float max = shards.data[0][row].max;
    int32_t id = shards.data[0][row].argmax;
    for (int i = 1; i < n; i++) {
        const struct dskv_row_stats *other = shards.data[i] + row;
        if (other->max > max || (other->max == max && other->argmax < id)) {
            max = other->max;
            id = other->argmax;
        }
    }
    ids[row] = id;
}

extern "C" void dskv_cuda_choose(struct dskv_device *device, const struct dskv_choose *p)
{
    shard_stats shards = {};
    for (int i = 0; i < p->n; i++)
        shards.data[i] = p->stats[i];
    queue_kernel(device, "choose", choose_kernel, dim3(blocks_for(p->rows, 128)), dim3(128), 0, shards, p->n, p->rows,
                 p->ids);
}
