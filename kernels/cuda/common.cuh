/* What kernels share: how they follow each other, conversions, fixed-shape reductions, dispatch over dtypes.
 *
 * The build sets -fmad=false: a fused multiply-add stands where fmaf is written, and nowhere else.
 *
 * A kernel may begin while the one ahead still runs (programmatic dependent launch), so that its blocks stand ready,
 * and weights are on their way, when their turn comes.  The rules:
 *   - Every kernel of queue_kernel calls wait_for_previous before it reads or writes what any operation writes or
 *     reads; one that is launched plainly begins when all ahead has ended.  So the end of one means the end of
 *     everything ahead of it.
 *   - Every kernel of queue_kernel calls let_next_begin as soon as it runs; the next one begins when all blocks have.
 *   - Before the wait a kernel may read only what no operation writes, and prefetch into the second-level cache.
 *   - What comes from the host (a plan) counts as such: the kernel that receives it lets nobody begin before it has
 *     ended.  So do kernels that write weights. */
#ifndef DSKV_KERNELS_CUDA_COMMON_CUH
#define DSKV_KERNELS_CUDA_COMMON_CUH

#include "cuda/cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>
#include <utility>

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

/* Neighbours that move as one, by 16 bytes at a time. */
template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) neighbours {
    T at[N];
};
template <typename T, int N> __device__ __forceinline__ neighbours<T, N> load(const T *p)
{
    return *(const neighbours<T, N> *)p;
}
template <typename T, int N> __device__ __forceinline__ void store(T *p, const neighbours<T, N> &x)
{
    *(neighbours<T, N> *)p = x;
}

/* Eight neighbours can move as one from every row (a null pointer has none). */
static inline bool moves_by_8(const void *data, int64_t stride, size_t element)
{
    return (size_t)data % 16 == 0 && (size_t)stride * element % 16 == 0;
}
static inline bool moves_by_8(const struct dskv_tensor &x)
{
    return moves_by_8(x.data, x.stride, dskv_dtype_bytes(x.dtype)) && x.cols % 8 == 0;
}

/* Calls f with the number of neighbours that a thread takes, 8 or 1. */
template <typename F> static void with_neighbours(bool by_8, F f)
{
    if (by_8)
        f(std::integral_constant<int, 8>());
    else
        f(std::integral_constant<int, 1>());
}

/* After a launch: an invalid one is found here, a failing one at the next sync. */
static inline void launched(struct dskv_device *device, const char *operation)
{
    dskv_cuda_note(dskv_cuda_of(device), cudaGetLastError(), operation);
}

__device__ __forceinline__ void wait_for_previous()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* For kernels that do nothing ahead of the wait. */
__device__ __forceinline__ void follow_previous()
{
    let_next_begin();
    wait_for_previous();
}

/* Queues a kernel that begins while the one ahead still runs, where what was compiled knows how to wait. */
template <typename... P, typename... A>
static void queue_kernel(struct dskv_device *device, const char *operation, void (*kernel)(P...), dim3 grid, dim3 block,
                         size_t shared_bytes, A &&...arguments)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = cuda->stream;
    config.attrs = &attribute;
    config.numAttrs = cuda->begins_early && !cuda->next_waits ? 1 : 0;
    cuda->next_waits = 0;
    dskv_cuda_note(cuda, cudaLaunchKernelEx(&config, kernel, std::forward<A>(arguments)...), operation);
}

static inline unsigned blocks_for(int64_t n, int per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}

#endif
