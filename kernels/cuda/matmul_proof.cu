/* What the proof of equal bits needs: operands of wide range, and a comparison of words.
 *
 * Grids: a few blocks of 256 threads a multiprocessor, each striding over the memory; no shared memory; alignment of
 * the elements alone.
 */
#include "cuda/common.cuh"
#include "cuda/matmul.h"

#include "kernels/noise.h"

template <typename T> __global__ void wide_kernel(T *data, int64_t n, uint64_t seed)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t random = dskv_noise_mix(seed ^ (uint64_t)i);
        float mantissa = 1.0f + (float)(random & 0xffff) * 0x1p-16f;
        float magnitude = ldexpf(mantissa, (int)(random >> 16 & 0xff) % 14 - 7);
        data[i] = from_float<T>(random >> 32 & 1 ? -magnitude : magnitude);
    }
}

extern "C" void dskv_cuda_fill_wide(struct dskv_device *device, void *data, enum dskv_dtype dtype, int64_t n,
                                    uint64_t seed)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    with_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        wide_kernel<<<(unsigned)cuda->n_multiprocessors * 4, 256, 0, cuda->stream>>>((T *)data, n, seed);
    });
    launched(device, "filling with wide values");
}

__global__ void count_kernel(const uint16_t *a, const uint16_t *b, int64_t n, unsigned long long *count)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        if (a[i] != b[i])
            atomicAdd(count, 1ull);
}

extern "C" int64_t dskv_cuda_count_differences(struct dskv_device *device, const void *a, const void *b, size_t bytes)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    unsigned long long *count = NULL, found = ~0ull;
    if (cudaMalloc((void **)&count, sizeof *count) != cudaSuccess)
        return INT64_MAX; /* nothing shown */
    cudaMemsetAsync(count, 0, sizeof *count, cuda->stream);
    count_kernel<<<(unsigned)cuda->n_multiprocessors * 4, 256, 0, cuda->stream>>>(
        (const uint16_t *)a, (const uint16_t *)b, (int64_t)(bytes / 2), count);
    launched(device, "comparing bits");
    dskv_cuda_note(cuda, cudaMemcpyAsync(&found, count, sizeof found, cudaMemcpyDeviceToHost, cuda->stream),
                   "comparing bits");
    dskv_cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "comparing bits");
    cudaFree(count);
    return found > INT64_MAX ? INT64_MAX : (int64_t)found;
}
