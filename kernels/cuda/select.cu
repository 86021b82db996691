/* Choosing from rows of logits: statistics and the k best of a shard, and drawing a token from whole rows.
 *
 * Grid: (parts of 4096 columns, rows) for selecting, one block a row for drawing, 256 threads each.  Every sum runs
 * over fixed strides and one fixed tree, so that equal logits give equal results on every rank.  Order among logits is
 * that of (value descending, id ascending), told by one 64-bit key.
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

/* The best key below `limit` of a row whose columns have the ids first, first + 1, ...; 0 when there is none. */
__device__ uint64_t best_below(const float *row, int n, int first, uint64_t limit, uint64_t *shared)
{
    uint64_t best = 0;
    for (int i = (int)threadIdx.x; i < n; i += 256) {
        uint64_t key = key_of(row[i], first + i);
        if (key < limit && key > best)
            best = key;
    }
    return block_max(best, shared);
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

/* Philox4x32-10: counter-based random numbers (Salmon, Moraes, Dror, Shaw 2011). */
__device__ uint4 philox(uint4 counter, uint2 key)
{
    for (int round = 0; round < 10; round++) {
        uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return counter;
}

struct row_view {
    const float *values;
    int n;
    float max, inverse_temperature;
};

/* The weight of an id, not yet normalised, relative to the best one's. */
__device__ __forceinline__ float weight_of(const row_view &row, int i)
{
    return expf((row.values[i] - row.max) * row.inverse_temperature);
}

/* How many ids have a key of at least `limit`, and the sum of their weights. */
__device__ void count_from(const row_view &row, uint64_t limit, int *count, float *sum, float *shared)
{
    int n = 0;
    float total = 0.0f;
    for (int i = (int)threadIdx.x; i < row.n; i += 256)
        if (key_of(row.values[i], i) >= limit) {
            n++;
            total = total + weight_of(row, i);
        }
    *sum = block_sum(total, shared);
    *count = (int)block_sum((float)n, shared); /* exact: at most 2^22 ids */
}

/* The largest limit such that the ids from it on are at least `least` in number, or at least `mass` in weight. */
__device__ uint64_t lower_limit(const row_view &row, int least, float mass, float *shared)
{
    uint64_t limit = 0;
    for (int bit = 63; bit >= 0; bit--) {
        uint64_t trial = limit | (uint64_t)1 << bit;
        int count;
        float sum;
        count_from(row, trial, &count, &sum, shared);
        if (least > 0 ? count >= least : sum >= mass)
            limit = trial;
    }
    return limit;
}

__global__ void sample_kernel(const float *logits, int64_t stride, int vocab, const struct dskv_sampling *sampling,
                              int32_t *ids)
{
    __shared__ uint64_t keys[8];
    __shared__ float shared[8], sums[256];
    follow_previous();
    struct dskv_sampling s = sampling[blockIdx.x];
    row_view row = {logits + blockIdx.x * stride, vocab, 0.0f, 0.0f};
    if (!(s.temperature > 0.0f))
        return;
    uint64_t best = best_below(row.values, vocab, 0, ~(uint64_t)0, keys);
    row.max = value_of(best);
    row.inverse_temperature = 1.0f / s.temperature;
    uint64_t limit = 0;
    int count;
    float total;
    if (s.top_k > 0 && s.top_k < vocab)
        limit = lower_limit(row, s.top_k, 0.0f, shared);
    if (s.top_p < 1.0f) {
        count_from(row, limit, &count, &total, shared);
        uint64_t nucleus = lower_limit(row, 0, s.top_p * total, shared);
        limit = nucleus > limit ? nucleus : limit;
    }
    if (s.min_p > 0.0f) { /* relative to the best one, whose weight is 1 */
        uint64_t least = best;
        for (int i = (int)threadIdx.x; i < vocab; i += 256) {
            uint64_t key = key_of(row.values[i], i);
            if (key < least && weight_of(row, i) >= s.min_p)
                least = key;
        }
        least = ~block_max(~least, keys);
        limit = least > limit ? least : limit;
    }
    if (limit > best)
        limit = best;

    /* Inverse of the distribution over ids ascending: each thread sums one run of ids. */
    int run = (vocab + 255) / 256, begin = (int)threadIdx.x * run, end = min(begin + run, vocab);
    float sum = 0.0f;
    for (int i = begin; i < end; i++)
        if (key_of(row.values[i], i) >= limit)
            sum = sum + weight_of(row, i);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint4 random =
            philox(make_uint4((uint32_t)s.position, 0, 0, 0), make_uint2((uint32_t)s.seed, (uint32_t)(s.seed >> 32)));
        total = 0.0f;
        for (int i = 0; i < 256; i++)
            total = total + sums[i];
        double unit = (double)(((uint64_t)random.y << 32 | random.x) >> 11) * 0x1p-53; /* as on the CPU */
        float aim = (float)(unit * (double)total), passed = 0.0f;
        int last = id_of(best), chosen = -1;
        for (int i = 0; i < 256 && chosen < 0; i++) {
            if (passed + sums[i] <= aim && i < 255) {
                passed = passed + sums[i];
                continue;
            }
            for (int id = i * run; id < min((i + 1) * run, vocab) && chosen < 0; id++)
                if (key_of(row.values[id], id) >= limit) {
                    passed = passed + weight_of(row, id);
                    last = id;
                    if (passed > aim)
                        chosen = id;
                }
        }
        ids[blockIdx.x] = chosen >= 0 ? chosen : last;
    }
}

extern "C" void dskv_cuda_sample(struct dskv_device *device, const struct dskv_sample *p)
{
    queue_kernel(device, "sample", sample_kernel, dim3((unsigned)p->logits.rows), dim3(256), 0,
                 (const float *)p->logits.data, p->logits.stride, (int)p->logits.cols, p->sampling, p->ids);
}
