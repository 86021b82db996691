/* Choosing from rows of logits: statistics and the k best of a shard, and drawing a token from whole rows.
 *
 * Grid: one block of 256 threads a row.  Every sum runs over fixed strides and one fixed tree, so that equal logits
 * give equal results on every rank.  Order among logits is that of (value descending, id ascending), told by one 64-bit
 * key.
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

__global__ void select_kernel(const float *logits, int64_t stride, int n, int first, const int32_t *targets, int k,
                              struct dskv_row_stats *stats, float *top_values, int32_t *top_ids)
{
    __shared__ uint64_t keys[8];
    __shared__ float sums[8];
    int64_t row = blockIdx.x;
    const float *values = logits + row * stride;
    int finite = 1;
    for (int i = (int)threadIdx.x; i < n; i += 256)
        finite &= isfinite(values[i]) != 0;
    finite = __syncthreads_and(finite);
    uint64_t best = best_below(values, n, first, ~(uint64_t)0, keys);
    float max = best ? value_of(best) : -INFINITY, sum = 0.0f;
    for (int i = (int)threadIdx.x; i < n; i += 256)
        sum = sum + expf(values[i] - max);
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) {
        int target = targets[row] - first;
        stats[row] = {max, best ? id_of(best) : INT_MAX, n ? sum : 0.0f,
                      targets[row] >= 0 && target >= 0 && target < n ? values[target] : -INFINITY, finite};
    }
    uint64_t limit = ~(uint64_t)0;
    for (int i = 0; i < k; i++) {
        best = best_below(values, n, first, limit, keys);
        if (threadIdx.x == 0) {
            top_values[row * k + i] = best ? value_of(best) : -INFINITY;
            top_ids[row * k + i] = best ? id_of(best) : INT_MAX;
        }
        limit = best; /* 0 when the shard is exhausted: nothing is below it */
    }
}

extern "C" void dskv_cuda_select(struct dskv_device *device, const struct dskv_select *p)
{
    int64_t left = (int64_t)p->vocab - p->first;
    int n = (int)(p->logits.cols < left ? p->logits.cols : left < 0 ? 0 : left);
    select_kernel<<<(unsigned)p->logits.rows, 256, 0, dskv_cuda_of(device)->stream>>>(
        (const float *)p->logits.data, p->logits.stride, n, p->first, p->targets, p->k, p->stats, p->top_values,
        p->top_ids);
    launched(device, "select");
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
    struct dskv_sampling s = sampling[blockIdx.x];
    row_view row = {logits + blockIdx.x * stride, vocab, 0.0f, 0.0f};
    uint64_t best = best_below(row.values, vocab, 0, ~(uint64_t)0, keys);
    if (s.temperature == 0.0f) {
        if (threadIdx.x == 0)
            ids[blockIdx.x] = id_of(best);
        return;
    }
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
    sample_kernel<<<(unsigned)p->logits.rows, 256, 0, dskv_cuda_of(device)->stream>>>(
        (const float *)p->logits.data, p->logits.stride, (int)p->logits.cols, p->sampling, p->ids);
    launched(device, "sample");
}
