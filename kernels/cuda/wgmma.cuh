/* wgmma, the asynchronous form of the instruction that sums (mma.cuh).  The order and the bits are the same, but a
 * chain of steps of k takes half of the time, and operands come from shared memory by themselves.  Compute capability
 * 9.0a alone; elsewhere these do nothing.
 *
 * A warpgroup of four warps multiplies 64 rows, 16 a warp, by N columns: weights by tokens, queries by keys, weights of
 * keys by values.  Of the sums c[N / 8][4], c[j] holds columns 8 j .. as an accumulator of mma does.  The right operand
 * lies in shared memory as the copy engine stores boxes of 64 elements: rows of 128 bytes whose 16-byte chunks are
 * swizzled by the row's number modulo 8.  The left one lies there too or in registers.
 *
 * The instructions run behind the back of the program: from wgmma_begin to the wait nothing else may touch their
 * registers, and to what they read from shared memory they are another proxy.
 *
 * A run is straight code from wgmma_begin to wgmma_commit.  Where a loop or a second wgmma_begin stands between, the
 * compiler makes several runs of it, and a wait that should leave one under way waits for all that matter. */
#ifndef DSKV_KERNELS_CUDA_WGMMA_CUH
#define DSKV_KERNELS_CUDA_WGMMA_CUH

#include "cuda/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DSKV_HAS_WGMMA 1
#endif

/* The operand in shared memory whose first row lies at this address, a multiple of 1024: eight rows are 1024 bytes, the
 * swizzle is that of 128 bytes.  column_bytes: where rows are the steps (values), from 64 columns to the next 64;
 * unused where columns are.  All count in units of 16 bytes, so the operand n bytes further is n >> 4 more. */
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, int column_bytes = 0)
{
    return (uint64_t)(1u << 30 | 1024 >> 4) << 32 | (uint32_t)(column_bytes >> 4) << 16 | address >> 4;
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

#define DSKV_WGMMA_SUMS_8(io, j) io(c[j][0]), io(c[j][1]), io(c[j][2]), io(c[j][3])
#define DSKV_WGMMA_SUMS_16(io, j) DSKV_WGMMA_SUMS_8(io, j), DSKV_WGMMA_SUMS_8(io, j + 1)
#define DSKV_WGMMA_SUMS_24(io, j) DSKV_WGMMA_SUMS_16(io, j), DSKV_WGMMA_SUMS_8(io, j + 2)
#define DSKV_WGMMA_SUMS_32(io, j) DSKV_WGMMA_SUMS_16(io, j), DSKV_WGMMA_SUMS_16(io, j + 2)
#define DSKV_WGMMA_SUMS_40(io, j) DSKV_WGMMA_SUMS_32(io, j), DSKV_WGMMA_SUMS_8(io, j + 4)
#define DSKV_WGMMA_SUMS_48(io, j) DSKV_WGMMA_SUMS_32(io, j), DSKV_WGMMA_SUMS_16(io, j + 4)
#define DSKV_WGMMA_SUMS_56(io, j) DSKV_WGMMA_SUMS_48(io, j), DSKV_WGMMA_SUMS_8(io, j + 6)
#define DSKV_WGMMA_SUMS_64(io, j) DSKV_WGMMA_SUMS_32(io, j), DSKV_WGMMA_SUMS_32(io, j + 4)
#define DSKV_WGMMA_SUMS_128(io, j) DSKV_WGMMA_SUMS_64(io, j), DSKV_WGMMA_SUMS_64(io, j + 8)
#define DSKV_WGMMA_NAMES_8 "%0,%1,%2,%3"
#define DSKV_WGMMA_NAMES_16 DSKV_WGMMA_NAMES_8 ",%4,%5,%6,%7"
#define DSKV_WGMMA_NAMES_24 DSKV_WGMMA_NAMES_16 ",%8,%9,%10,%11"
#define DSKV_WGMMA_NAMES_32 DSKV_WGMMA_NAMES_24 ",%12,%13,%14,%15"
#define DSKV_WGMMA_NAMES_40 DSKV_WGMMA_NAMES_32 ",%16,%17,%18,%19"
#define DSKV_WGMMA_NAMES_48 DSKV_WGMMA_NAMES_40 ",%20,%21,%22,%23"
#define DSKV_WGMMA_NAMES_56 DSKV_WGMMA_NAMES_48 ",%24,%25,%26,%27"
#define DSKV_WGMMA_NAMES_64 DSKV_WGMMA_NAMES_56 ",%28,%29,%30,%31"
#define DSKV_WGMMA_NAMES_128                                                                                           \
    DSKV_WGMMA_NAMES_64                                                                                                \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"    \
    "%59,%60,%61,%62,%63"
#define DSKV_WGMMA_OLD(x) "+f"(x)
#define DSKV_WGMMA_NEW(x) "=f"(x)

/* One instruction.  adds: "1": c += left right, of DSKV_WGMMA_OLD; "0": c = left right, of DSKV_WGMMA_NEW, which holds
 * no register before.  operands: how they are named, behind the n / 2 registers of c. */
#define DSKV_WGMMA(io, adds, type, n, operands, transposed, ...)                                                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" DSKV_WGMMA_NAMES_##n             \
                 "}, " operands ", " adds ", 1, 1, " transposed ";"                                                    \
                 : DSKV_WGMMA_SUMS_##n(io, 0)                                                                          \
                 : __VA_ARGS__)
#define DSKV_WGMMA_OF_TYPE(...)                                                                                        \
    if constexpr (ADDS && std::is_same<T, __half>::value)                                                              \
        DSKV_WGMMA(DSKV_WGMMA_OLD, "1", "f16", __VA_ARGS__);                                                           \
    else if constexpr (ADDS)                                                                                           \
        DSKV_WGMMA(DSKV_WGMMA_OLD, "1", "bf16", __VA_ARGS__);                                                          \
    else if constexpr (std::is_same<T, __half>::value)                                                                 \
        DSKV_WGMMA(DSKV_WGMMA_NEW, "0", "f16", __VA_ARGS__);                                                           \
    else                                                                                                               \
        DSKV_WGMMA(DSKV_WGMMA_NEW, "0", "bf16", __VA_ARGS__)

/* 64 rows of a times N rows of b, of 16 columns each, in shared memory. */
template <typename T, int N, bool ADDS = true>
__device__ __forceinline__ void wgmma(float (*c)[4], uint64_t a, uint64_t b)
{
#ifdef DSKV_HAS_WGMMA
    static_assert(N % 8 == 0 && N >= 8 && N <= 64, "columns of a step");
    if constexpr (N == 8) {
        DSKV_WGMMA_OF_TYPE(8, "%4, %5", "0, 0", "l"(a), "l"(b));
    } else if constexpr (N == 16) {
        DSKV_WGMMA_OF_TYPE(16, "%8, %9", "0, 0", "l"(a), "l"(b));
    } else if constexpr (N == 24) {
        DSKV_WGMMA_OF_TYPE(24, "%12, %13", "0, 0", "l"(a), "l"(b));
    } else if constexpr (N == 32) {
        DSKV_WGMMA_OF_TYPE(32, "%16, %17", "0, 0", "l"(a), "l"(b));
    } else if constexpr (N == 40) {
        DSKV_WGMMA_OF_TYPE(40, "%20, %21", "0, 0", "l"(a), "l"(b));
    } else if constexpr (N == 48) {
        DSKV_WGMMA_OF_TYPE(48, "%24, %25", "0, 0", "l"(a), "l"(b));
    } else if constexpr (N == 56) {
        DSKV_WGMMA_OF_TYPE(56, "%28, %29", "0, 0", "l"(a), "l"(b));
    } else {
        DSKV_WGMMA_OF_TYPE(64, "%32, %33", "0, 0", "l"(a), "l"(b));
    }
#endif
}

/* 64 rows of a, in registers as the left operand of mma is, times N columns of b, whose rows are the steps. */
template <typename T, int N, bool ADDS>
__device__ __forceinline__ void wgmma_transposed(float (*c)[4], const uint32_t *a, uint64_t b)
{
#ifdef DSKV_HAS_WGMMA
    static_assert(N == 64 || N == 128, "columns of a step");
    if constexpr (N == 64) {
        DSKV_WGMMA_OF_TYPE(64, "{%32,%33,%34,%35}, %36", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        DSKV_WGMMA_OF_TYPE(128, "{%64,%65,%66,%67}, %68", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
#endif
}

#endif
