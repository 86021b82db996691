/* One row's norm by one block, and the residual before it: shared by every kernel that norms, so that all give the same
 * bits.
 *
 * The shape of the sums depends on the width alone: norm_threads(width) threads share a row, thread t has the columns
 * [8 t, 8 t + 8), and the same of every further 8 * threads columns; it sums them in order, then a tree over its warp,
 * then one over 32 warps, of which those that the block lacks are zeros.
 */
#ifndef DSKV_KERNELS_CUDA_NORM_CUH
#define DSKV_KERNELS_CUDA_NORM_CUH

#include "cuda/common.cuh"

enum { NORM_MAX_THREADS = 1024 };

struct norm_of_row {
    bool is_rms;
    float eps;
    const float *weight, *bias; /* [width]; bias null: none */
    int width;
};

/* The block of a row, whole warps, and how many groups of eight columns a thread has. */
static inline int norm_threads(int64_t width)
{
    int64_t warps = (width + 255) / 256;
    return (int)(warps < NORM_MAX_THREADS / 32 ? warps : NORM_MAX_THREADS / 32) * 32;
}
static inline int norm_steps(int64_t width)
{
    return (int)((width + NORM_MAX_THREADS * 8 - 1) / (NORM_MAX_THREADS * 8));
}
/* Calls f with the compile-time number of steps that serves. */
template <typename F> static void with_norm_steps(int64_t width, F f)
{
    if (norm_steps(width) == 1)
        f(std::integral_constant<int, 1>());
    else if (norm_steps(width) == 2)
        f(std::integral_constant<int, 2>());
    else /* hardly any model: registers spill */
        f(std::integral_constant<int, DSKV_MAX_WIDTH / (NORM_MAX_THREADS * 8)>());
}

/* The first of a thread's columns of a step; may be past the row's end. */
__device__ __forceinline__ int norm_column(int step)
{
    return (step * (int)blockDim.x + (int)threadIdx.x) * 8;
}

/* Eight columns of a row, zeros from `width` on.  N: 8 where they can move as one, else 1. */
template <typename E, int N> __device__ __forceinline__ neighbours<E, 8> load_8(const E *row, int column, int width)
{
    neighbours<E, 8> x;
    if (N == 8 && column < width)
        return load<E, 8>(row + column);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x.at[i] = N == 1 && column + i < width ? row[column + i] : from_float<E>(0.0f);
    return x;
}
template <typename E, int N>
__device__ __forceinline__ void store_8(E *row, int column, int width, const neighbours<E, 8> &x)
{
    if (N == 8 && column < width)
        store<E, 8>(row + column, x);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (N == 1 && column + i < width)
            row[column + i] = x.at[i];
}

/* What a thread multiplies its columns by and adds to them.  No operation writes either: they may be asked for before
 * the operation ahead has ended. */
template <int STEPS> struct norm_factors {
    neighbours<float, 8> weight[STEPS], bias[STEPS];
};
template <int N, int STEPS>
__device__ __forceinline__ void load_factors(norm_factors<STEPS> *factors, const norm_of_row &p)
{
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        factors->weight[step] = load_8<float, N>(p.weight, norm_column(step), p.width);
        if (p.bias)
            factors->bias[step] = load_8<float, N>(p.bias, norm_column(step), p.width);
    }
}

/* x + (y + bias), y + bias rounded first. */
template <typename T> __device__ __forceinline__ T residual_of(T x, T y, bool has_bias, float bias)
{
    float term = to_float(y);
    if (has_bias)
        term = to_float(from_float<T>(__fadd_rn(term, bias)));
    return from_float<T>(__fadd_rn(to_float(x), term));
}

template <int N> __device__ __forceinline__ float tree_sum(const float4 *x)
{
    if constexpr (N == 1)
        return __fadd_rn(__fadd_rn(x->x, x->y), __fadd_rn(x->z, x->w));
    else
        return __fadd_rn(tree_sum<N / 2>(x), tree_sum<N / 2>(x + N / 2));
}

/* The sum over the block; every thread gets it.  shared: 32 floats, 16-byte aligned, not in use by any thread. */
__device__ __forceinline__ float norm_sum(float x, float *shared)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n_warps = (int)blockDim.x / 32;
#pragma unroll
    for (int offset = 16; offset; offset >>= 1)
        x = __fadd_rn(x, __shfl_xor_sync(~0u, x, offset));
    if (lane == 0)
        shared[warp] = x;
    if (warp == 0 && lane >= n_warps)
        shared[lane] = 0.0f;
    __syncthreads();
    return tree_sum<8>((const float4 *)shared);
}

struct alignas(16) norm_shared {
    float sums[2][32];
};

/* Norms the row whose columns the block's threads hold, zeros behind its end, in place.  All threads call it; a block
 * that norms several rows lets all threads meet in between. */
template <typename T, int STEPS>
__device__ __forceinline__ void norm_row(neighbours<T, 8> *x, const norm_of_row &p, const norm_factors<STEPS> &factors,
                                         norm_shared *shared)
{
    float mean = 0.0f, squares = 0.0f;
    if (!p.is_rms) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < STEPS * 8; i++)
            sum = __fadd_rn(sum, to_float(x[i / 8].at[i % 8]));
        mean = __fdiv_rn(norm_sum(sum, shared->sums[0]), (float)p.width);
    }
#pragma unroll
    for (int i = 0; i < STEPS * 8; i++) {
        float d = __fsub_rn(to_float(x[i / 8].at[i % 8]), mean);
        d = norm_column(i / 8) + i % 8 < p.width ? d : 0.0f;
        squares = fmaf(d, d, squares);
    }
    float variance = __fdiv_rn(norm_sum(squares, shared->sums[1]), (float)p.width);
    float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, p.eps)));
#pragma unroll
    for (int i = 0; i < STEPS * 8; i++) {
        float d = __fsub_rn(to_float(x[i / 8].at[i % 8]), mean);
        float y = __fmul_rn(__fmul_rn(d, scale), factors.weight[i / 8].at[i % 8]);
        x[i / 8].at[i % 8] = from_float<T>(p.bias ? __fadd_rn(y, factors.bias[i / 8].at[i % 8]) : y);
    }
}

#endif
