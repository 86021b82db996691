/* What kernels share: conversions, fixed-shape reductions, dispatch over dtypes.
 *
 * The build sets -fmad=false: a fused multiply-add stands where fmaf is written, and nowhere else. */
#ifndef DSKV_KERNELS_CUDA_COMMON_CUH
#define DSKV_KERNELS_CUDA_COMMON_CUH

#include "cuda/cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float to_float(float x)
{
    return x;
}
__device__ __forceinline__ float to_float(__half x)
{
    return __half2float(x);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ __half from_float<__half>(float x)
{
    return __float2half_rn(x);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

/* The sum over a block of 256 threads, in one fixed tree; every thread gets it.  shared: 8 floats. */
__device__ __forceinline__ float block_sum(float x, float *shared)
{
    for (int offset = 16; offset; offset >>= 1)
        x = x + __shfl_xor_sync(~0u, x, offset);
    __syncthreads(); /* shared may still be read from an earlier use */
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = shared[0];
    for (int warp = 1; warp < 8; warp++)
        sum = sum + shared[warp];
    return sum;
}

/* Calls f with a value of the dtype's element type. */
template <typename F> static void with_dtype(enum dskv_dtype dtype, F f)
{
    if (dtype == DSKV_F32)
        f(float());
    else if (dtype == DSKV_F16)
        f(__half());
    else
        f(__nv_bfloat16());
}

/* After a launch: an invalid one is found here, a failing one at the next sync. */
static inline void launched(struct dskv_device *device, const char *operation)
{
    dskv_cuda_note(dskv_cuda_of(device), cudaGetLastError(), operation);
}

static inline unsigned blocks_for(int64_t n, int per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}

#endif
