/* Drawing a token from whole rows of logits: temperature, then top-k, top-p, min-p.
 *
 * Grid: (blocks of a row, rows), 1024 threads each; the blocks of a row are one cluster, up to 8 of them, fewer when
 * there are rows enough to fill the GPU.  Shared memory: twice BINS sums of 64 bits a block.  Any alignment.
 *
 * A weight is an integer, exp((logit - max) / temperature) * 2^40 rounded, so that every sum of weights is exact: it is
 * the same whoever adds in whichever order, and no result depends on the cluster's size, on other rows or on the run.
 * 2^22 weights of at most 2^40 fit 64 bits; what rounds to 0 would be drawn once in 10^12 times.
 *
 * Top-k and top-p each keep a head of the order (logit descending, id ascending), which ends at one (logit, id).  It is
 * found by narrowing an interval of logits: its BINS equal parts are summed, and the smallest and the largest logit of
 * the part in which the goal is reached are the next interval, until one logit is left and its lowest ids count.  The
 * parts are of the logits and not of their bits, because logits spread evenly over them: equal places would have to be
 * added to one after the other.
 */
#include "cuda/common.cuh"

#include <algorithm>
#include <climits>

enum {
    THREADS = 1024,
    WARPS = THREADS / 32,
    BINS = THREADS,
    MAX_BLOCKS = 8, /* of a cluster, on every GPU that has clusters */
    MAX_LEVELS = 40 /* of narrowing; a float's 276 octaves over 10 bits a level need 28 */
};
#define WEIGHT_ONE 0x1p40f
#define WEIGHTLESS 29.0f /* (max - logit) / temperature from which on a weight rounds to 0 */

typedef unsigned long long sum_t;

/* ---- the blocks of a row ---------------------------------------------------------------------------------------- */

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
/* The place of one's own shared memory in a block of the cluster. */
__device__ __forceinline__ uint32_t place_in(const void *shared, int block)
{
    uint32_t place;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(place)
        : "r"((uint32_t)__cvta_generic_to_shared(shared)), "r"(block));
    return place;
}
__device__ __forceinline__ sum_t read_from(const sum_t *shared, int block)
{
    sum_t x;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(place_in(shared, block)) : "memory");
    return x;
}
__device__ __forceinline__ void write_to(sum_t *shared, int block, sum_t x)
{
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(place_in(shared, block)), "l"(x) : "memory");
}
#else /* a row is one block's */
__device__ __forceinline__ void cluster_sync()
{
    __syncthreads();
}
__device__ __forceinline__ sum_t read_from(const sum_t *shared, int)
{
    return *(const volatile sum_t *)shared;
}
__device__ __forceinline__ void write_to(sum_t *shared, int, sum_t x)
{
    *(volatile sum_t *)shared = x;
}
#endif

struct row_shared {
    unsigned low[BINS], high[BINS];
    sum_t sums[BINS]; /* of this block's bins, for the others */
    sum_t warps[WARPS];
    /* What blocks tell each other, in turns: a place is written again only after a barrier that all have passed since
     * they read it. */
    sum_t word[2], found[2];
    sum_t above;
    int bin;
};

struct row_view {
    const float *values;
    int n, n_blocks, block, lane, warp;
    unsigned turn;
    float max, scale, min_weight; /* scale: log2(e) / temperature */
    struct row_shared *s;
};

/* The cluster's combination of every thread's x by f, which may be applied in any order; all threads get it. */
template <typename F> __device__ sum_t combine(row_view &row, sum_t x, F f)
{
    unsigned turn = row.turn++ & 1;
    for (int offset = 16; offset; offset >>= 1)
        x = f(x, __shfl_xor_sync(~0u, x, offset));
    if (row.lane == 0)
        row.s->warps[row.warp] = x;
    __syncthreads();
    if (row.warp == 0) {
        x = row.s->warps[row.lane];
        for (int offset = WARPS / 2; offset; offset >>= 1)
            x = f(x, __shfl_xor_sync(~0u, x, offset));
        if (row.lane == 0)
            row.s->word[turn] = x;
    }
    cluster_sync();
    x = read_from(&row.s->word[turn], row.lane % row.n_blocks);
    for (int offset = row.n_blocks / 2; offset; offset >>= 1)
        x = f(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

/* ---- weights and cuts ------------------------------------------------------------------------------------------- */

__device__ __forceinline__ float weight_of(const row_view &row, float x)
{
    return exp2f((x - row.max) * row.scale);
}
__device__ __forceinline__ sum_t as_sum(float weight)
{
    return __float2ull_rn(weight * WEIGHT_ONE);
}

/* The last (logit, id) that is kept. */
struct cut {
    float value;
    int id;
};
__device__ __forceinline__ bool is_kept(const cut &c, float x, int id)
{
    return x > c.value || (x == c.value && id <= c.id);
}

/* Calls f(id, logit) for every id, once in the cluster. */
template <typename F> __device__ __forceinline__ void for_each(const row_view &row, F f)
{
    const int step = THREADS * row.n_blocks;
#pragma unroll 4
    for (int i = row.block * THREADS + (int)threadIdx.x; i < row.n; i += step)
        f(i, row.values[i]);
}

__device__ __forceinline__ sum_t pack(float least, float most)
{
    return (sum_t)__float_as_uint(least) << 32 | __float_as_uint(most);
}
__device__ __forceinline__ float least_of(sum_t pair)
{
    return __uint_as_float((uint32_t)(pair >> 32));
}
__device__ __forceinline__ float most_of(sum_t pair)
{
    return __uint_as_float((uint32_t)pair);
}

/* The smallest and the largest logit of those that belong(logit); inf and -inf when none does. */
template <typename F> __device__ sum_t find_range(row_view &row, F belongs)
{
    float least = INFINITY, most = -INFINITY;
    for_each(row, [&](int, float x) {
        if (belongs(x)) {
            least = fminf(least, x);
            most = fmaxf(most, x);
        }
    });
    return combine(row, pack(least, most), [](sum_t a, sum_t b) {
        return pack(fminf(least_of(a), least_of(b)), fmaxf(most_of(a), most_of(b)));
    });
}

/* The id at which the sum of f(id, logit) over ids ascending first exceeds goal(sum of all); INT_MAX when it never
 * does.  Each warp sums a run of ids; the one in which it happens walks its run. */
template <typename F, typename G> __device__ int find_id(row_view &row, F f, G goal)
{
    unsigned turn = row.turn++ & 1;
    int run = (row.n + WARPS * row.n_blocks - 1) / (WARPS * row.n_blocks);
    int begin = min((row.block * WARPS + row.warp) * run, row.n), end = min(begin + run, row.n);
    sum_t sum = 0, all = 0, before = 0;
#pragma unroll 4
    for (int i = begin + row.lane; i < end; i += 32)
        sum += f(i, row.values[i]);
    for (int offset = 16; offset; offset >>= 1)
        sum += __shfl_xor_sync(~0u, sum, offset);
    if (row.lane == 0)
        row.s->warps[row.warp] = sum;
    if (threadIdx.x == 0)
        row.s->found[turn] = (sum_t)INT_MAX;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 0; w < WARPS; w++)
            all += row.s->warps[w];
        row.s->word[turn] = all;
    }
    cluster_sync();
    all = 0;
    for (int b = 0; b < row.n_blocks; b++) {
        if (b == row.block)
            before = all;
        all += read_from(&row.s->word[turn], b);
    }
    for (int w = 0; w < row.warp; w++)
        before += row.s->warps[w];
    sum_t aim = goal(all);
    if (before <= aim && aim < before + sum) {
#pragma unroll 4
        for (int base = begin; base < end; base += 32) {
            int i = base + row.lane;
            sum_t upto = i < end ? f(i, row.values[i]) : 0;
            for (int offset = 1; offset < 32; offset <<= 1) {
                sum_t other = __shfl_up_sync(~0u, upto, offset);
                upto += row.lane >= offset ? other : 0;
            }
            unsigned past = __ballot_sync(~0u, before + upto > aim);
            if (past) {
                if (row.lane == 0)
                    for (int b = 0; b < row.n_blocks; b++)
                        write_to(&row.s->found[turn], b, (sum_t)(base + __ffs((int)past) - 1));
                break;
            }
            before += __shfl_sync(~0u, upto, 31);
        }
    }
    cluster_sync();
    return (int)row.s->found[turn];
}

/* ---- filters ---------------------------------------------------------------------------------------------------- */

/* An interval of logits, cut into bins from the largest on.  The last bin has all of the rest.  Two factors, since for
 * the smallest intervals their product would be infinite. */
struct bins {
    float least, most, lift, scale;
};
__device__ __forceinline__ bins bins_of(float least, float most, float temperature)
{
    float width = fminf(most - least, WEIGHTLESS * temperature), lift = width < 0x1p-60f ? 0x1p90f : 1.0f;
    return {least, most, lift, (float)BINS / (width * lift)};
}
__device__ __forceinline__ int bin_of(const bins &b, float x)
{
    return min((int)((b.most - x) * b.lift * b.scale), BINS - 1);
}

/* 64-bit sums by additions of 32 bits, which shared memory does at once. */
__device__ __forceinline__ void add_to_bin(struct row_shared *s, int bin, sum_t x)
{
    unsigned low = (unsigned)x, high = (unsigned)(x >> 32);
    unsigned old = atomicAdd(&s->low[bin], low);
    high += old + low < old;
    if (high)
        atomicAdd(&s->high[bin], high);
}

/* The bin in which the sum of f(logit) over the interval, from the largest logit on and on top of *above, reaches the
 * goal; *above becomes the sum before that bin.  -1 when nothing is there to be summed. */
template <typename F> __device__ int find_bin(row_view &row, const bins &b, F f, sum_t goal, sum_t *above)
{
    struct row_shared *s = row.s;
    int own = (int)threadIdx.x;
    s->low[own] = s->high[own] = 0;
    if (own == 0)
        s->bin = -1;
    __syncthreads();
    for_each(row, [&](int, float x) {
        if (x >= b.least && x <= b.most)
            add_to_bin(s, bin_of(b, x), f(x));
    });
    __syncthreads();
    s->sums[own] = (sum_t)s->high[own] << 32 | s->low[own];
    cluster_sync();
    sum_t sum = 0;
    for (int block = 0; block < row.n_blocks; block++)
        sum += read_from(&s->sums[own], block);
    sum_t upto = sum;
    for (int offset = 1; offset < 32; offset <<= 1) {
        sum_t other = __shfl_up_sync(~0u, upto, offset);
        upto += row.lane >= offset ? other : 0;
    }
    if (row.lane == 31)
        s->warps[row.warp] = upto;
    __syncthreads();
    sum_t before = *above, all = *above;
    for (int w = 0; w < WARPS; w++) {
        before += w < row.warp ? s->warps[w] : 0;
        all += s->warps[w];
    }
    goal = min(goal, all); /* what is rounded away must not be waited for */
    upto += before;
    if (upto >= goal && upto - sum < goal) {
        s->bin = own;
        s->above = upto - sum;
    }
    __syncthreads();
    *above = s->above;
    return s->bin;
}

/* Where the head ends whose sum of f(logit) just reaches the goal.  limits: the smallest and largest logit. */
template <typename F> __device__ cut find_cut(row_view &row, sum_t limits, float temperature, F f, sum_t goal)
{
    float least = least_of(limits), most = most_of(limits);
    sum_t above = 0;
    for (int level = 0; level < MAX_LEVELS && least < most; level++) {
        if (as_sum(weight_of(row, most)) == 0)
            break; /* none of these is ever drawn, kept or not */
        bins b = bins_of(least, most, temperature);
        int bin = find_bin(row, b, f, goal, &above);
        if (bin < 0)
            return {-INFINITY, INT_MAX};
        sum_t range = find_range(row, [&](float x) { return x >= b.least && x <= b.most && bin_of(b, x) == bin; });
        least = least_of(range);
        most = most_of(range);
    }
    sum_t one = f(most), left = goal > above ? goal - above : 1;
    if (one == 0 || !(least == most))
        return {least, INT_MAX};
    sum_t last = (left + one - 1) / one - 1;
    int id = find_id(
        row, [&](int, float x) { return (sum_t)(x == most); }, [&](sum_t) { return last; });
    return {most, id};
}

/* ---- the draw --------------------------------------------------------------------------------------------------- */

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

/* In [0, 1), 53 bits, as on the CPU. */
__device__ double uniform(const struct dskv_sampling &s)
{
    uint4 random =
        philox(make_uint4((uint32_t)s.position, 0, 0, 0), make_uint2((uint32_t)s.seed, (uint32_t)(s.seed >> 32)));
    return (double)(((uint64_t)random.y << 32 | random.x) >> 11) * 0x1p-53;
}

__device__ __forceinline__ cut tighter(const cut &a, const cut &b)
{
    return is_kept(a, b.value, b.id) ? b : a;
}

/* The id that is drawn, by all blocks of the row. */
__device__ int draw(row_view &row, const struct dskv_sampling &s)
{
    sum_t limits = find_range(row, [](float) { return true; });
    cut c = {-INFINITY, INT_MAX};
    row.max = most_of(limits);
    row.scale = fminf(1.44269504f / s.temperature, 0x1.fffffep127f); /* finite: the best one's weight is 1 */
    auto weigh = [&](float x) { return as_sum(weight_of(row, x)); };
    auto kept = [&](int id, float x) { return is_kept(c, x, id) ? weigh(x) : 0; };
    if (s.top_k > 0 && s.top_k < row.n)
        c = find_cut(
            row, limits, s.temperature, [](float) { return (sum_t)1; }, (sum_t)s.top_k);
    if (s.top_p < 1.0f) {
        sum_t sum = 0;
        for_each(row, [&](int id, float x) { sum += kept(id, x); });
        sum = combine(row, sum, [](sum_t a, sum_t b) { return a + b; });
        sum_t goal = (sum_t)ceil(fmax((double)s.top_p, 0.0) * (double)sum);
        c = tighter(c, find_cut(row, limits, s.temperature, weigh, max(goal, (sum_t)1)));
    }
    row.min_weight = s.min_p;
    auto drawn = [&](int id, float x) {
        float weight = weight_of(row, x);
        return is_kept(c, x, id) && weight >= row.min_weight ? as_sum(weight) : 0;
    };
    int id = find_id(row, drawn, [&](sum_t all) {
        sum_t aim = (sum_t)(uniform(s) * (double)all);
        return all ? min(aim, all - 1) : 0;
    });
    if (id == INT_MAX) /* nothing is left: the best one */
        id = find_id(
            row, [&](int, float x) { return (sum_t)(x == row.max); }, [](sum_t) { return (sum_t)0; });
    return id == INT_MAX ? 0 : id;
}

__global__ void __launch_bounds__(THREADS, 1)
    sample_kernel(const float *logits, int64_t stride, int vocab, const struct dskv_sampling *sampling, int32_t *ids)
{
    __shared__ struct row_shared shared;
    const struct dskv_sampling s = sampling[blockIdx.y];
    if (!(s.temperature > 0.0f))
        return; /* all blocks of the row */
    row_view row = {logits + blockIdx.y * stride,
                    vocab,
                    (int)gridDim.x,
                    (int)blockIdx.x,
                    (int)threadIdx.x % 32,
                    (int)threadIdx.x / 32,
                    0,
                    0.0f,
                    0.0f,
                    0.0f,
                    &shared};
    int id = draw(row, s);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ids[blockIdx.y] = id;
    cluster_sync(); /* others may still read this block's memory */
}

/* What was compiled counts, not the GPU: code for an older one, compiled anew for a newer, knows no clusters. */
static bool has_clusters(void)
{
    struct cudaFuncAttributes compiled;
    return cudaFuncGetAttributes(&compiled, sample_kernel) == cudaSuccess && compiled.ptxVersion >= 90;
}

extern "C" void dskv_cuda_sample(struct dskv_device *device, const struct dskv_sample *p)
{
    static const bool can_share = has_clusters();
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    unsigned n_blocks = 1, rows = (unsigned)p->logits.rows;
    while (can_share && n_blocks < MAX_BLOCKS && rows * n_blocks <= (unsigned)cuda->n_multiprocessors)
        n_blocks *= 2;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {n_blocks, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_blocks, rows);
    config.blockDim = dim3(THREADS);
    config.stream = cuda->stream;
    config.attrs = &attribute;
    config.numAttrs = can_share ? 1 : 0;
    dskv_cuda_note(cuda,
                   cudaLaunchKernelEx(&config, sample_kernel, (const float *)p->logits.data, p->logits.stride,
                                      (int)p->logits.cols, p->sampling, p->ids),
                   "sample");
}
