/* What measurements need: weights made where they lie, and a pass that only reads.
 *
 * Grids: one block of 256 threads a row of a weight; a few blocks a multiprocessor for the reads, 64 bytes in flight a
 * thread.
 */
#include "cuda/common.cuh"

#include "kernels/noise.h"

template <typename W>
__global__ void noise_kernel(W *rows, int64_t stride, int64_t k, uint64_t seed, int64_t first_output,
                             int64_t first_input)
{
    uint32_t row = dskv_noise_row(seed, first_output + blockIdx.x);
    for (int64_t i = threadIdx.x; i < k; i += blockDim.x)
        rows[blockIdx.x * stride + i] = from_float<W>(dskv_noise(row, first_input + i));
}

extern "C" void dskv_cuda_weight_fill_noise(struct dskv_device *device, struct dskv_weight *weight, int64_t first,
                                            int64_t n_rows, uint64_t seed, int64_t first_output, int64_t first_input)
{
    int64_t stride = dskv_cuda_padded(weight->k);
    dskv_cuda_matmul_lt_prepare(device, weight);
    with_dtype(weight->dtype, [&](auto w) {
        using W = decltype(w);
        noise_kernel<<<(unsigned)n_rows, 256, 0, dskv_cuda_of(device)->stream>>>(
            (W *)weight->data + first * stride, stride, weight->k, seed, first_output, first_input);
    });
    launched(device, "noise");
    dskv_cuda_of(device)->next_waits = 1; /* kernels may read weights ahead of their turn */
}

enum { READ_THREADS = 512, READ_LOADS = 4 };

__device__ __forceinline__ uint32_t load_once(const uint4 *place)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(place));
    return v.x ^ v.y ^ v.z ^ v.w;
}

__global__ void __launch_bounds__(READ_THREADS) read_kernel(const uint4 *memory, int64_t n, uint32_t *sink)
{
    const int64_t step = (int64_t)gridDim.x * READ_THREADS;
    uint32_t folded = 0;
    int64_t i = (int64_t)blockIdx.x * READ_THREADS + threadIdx.x;
    for (; i + (READ_LOADS - 1) * step < n; i += READ_LOADS * step)
#pragma unroll
        for (int j = 0; j < READ_LOADS; j++)
            folded ^= load_once(memory + i + j * step);
    for (; i < n; i += step)
        folded ^= load_once(memory + i);
    if (folded == 0x9e3779b9u) /* hardly ever, but the compiler cannot know */
        *sink = folded;
}

extern "C" void dskv_cuda_read(struct dskv_device *device, const void *memory, size_t bytes)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    read_kernel<<<(unsigned)cuda->n_multiprocessors * 4, READ_THREADS, 0, cuda->stream>>>(
        (const uint4 *)memory, (int64_t)(bytes / sizeof(uint4)), (uint32_t *)dskv_cuda_scratch(cuda));
    launched(device, "read");
}
