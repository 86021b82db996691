/* wgmma, the asynchronous form of the instruction that sums (mma.cuh): what brackets a run of them, and the matmul's
 * form of it (attention_wgmma.cuh has attention's).  The order and the bits are the same, but a chain of steps of k
 * takes half of the time, and operands come from shared memory by themselves.  Compute capability 9.0 alone.
 *
 * A warpgroup of four warps multiplies 64 rows of weights, 16 a warp, by N tokens.  Both operands lie as the copy
 * engine stores boxes of 64 k-values: rows of 128 bytes whose 16-byte chunks are swizzled by the row's number modulo 8.
 */
#ifndef DSKV_KERNELS_CUDA_WGMMA_CUH
#define DSKV_KERNELS_CUDA_WGMMA_CUH

#include "cuda/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DSKV_HAS_WGMMA 1
#endif

/* The operand whose first row lies at this address of shared memory, a multiple of 1024: eight rows are 1024 bytes, the
 * swizzle is that of 128 bytes.  Sixteen k-values on, the address is 32 bytes larger. */
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* Before the first of a run, behind its last, and until all but the last LEFT runs are done. */
__device__ __forceinline__ void wgmma_begin()
{
#ifdef DSKV_HAS_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit()
{
#ifdef DSKV_HAS_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int LEFT> __device__ __forceinline__ void wgmma_wait()
{
#ifdef DSKV_HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

/* Behind the last wait: whatever uses the sums stays behind it. */
template <int N> __device__ __forceinline__ void wgmma_sums(float (*c)[4])
{
#pragma unroll
    for (int i = 0; i < N / 8 * 4; i++)
        asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}

/* c[N / 8][4] += 64 rows of w times N tokens of x, 16 k-values; c[j] holds tokens 8 j .. as an accumulator of mma does.
 */
#define DSKV_WGMMA(shape, type, registers, w_at, x_at, ...)                                                            \
    asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" registers "}, " w_at ", " x_at       \
                 ", 1, 1, 1, 0, 0;"                                                                                    \
                 : __VA_ARGS__                                                                                         \
                 : "l"(w), "l"(x)                                                                                      \
                 : "memory")
#define DSKV_SUMS(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
template <typename T, int N> __device__ __forceinline__ void wgmma(float (*c)[4], uint64_t w, uint64_t x)
{
#ifdef DSKV_HAS_WGMMA
    constexpr bool is_half = std::is_same<T, __half>::value;
    static_assert(N == 8 || N == 16 || N == 32, "tokens of a step");
    if constexpr (N == 8 && is_half)
        DSKV_WGMMA("m64n8k16", "f16", "%0,%1,%2,%3", "%4", "%5", DSKV_SUMS(0));
    else if constexpr (N == 8)
        DSKV_WGMMA("m64n8k16", "bf16", "%0,%1,%2,%3", "%4", "%5", DSKV_SUMS(0));
    else if constexpr (N == 16 && is_half)
        DSKV_WGMMA("m64n16k16", "f16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", DSKV_SUMS(0), DSKV_SUMS(1));
    else if constexpr (N == 16)
        DSKV_WGMMA("m64n16k16", "bf16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", DSKV_SUMS(0), DSKV_SUMS(1));
    else if constexpr (is_half)
        DSKV_WGMMA("m64n32k16", "f16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17",
                   DSKV_SUMS(0), DSKV_SUMS(1), DSKV_SUMS(2), DSKV_SUMS(3));
    else
        DSKV_WGMMA("m64n32k16", "bf16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17",
                   DSKV_SUMS(0), DSKV_SUMS(1), DSKV_SUMS(2), DSKV_SUMS(3));
#endif
}
#undef DSKV_WGMMA
#undef DSKV_SUMS

#endif
