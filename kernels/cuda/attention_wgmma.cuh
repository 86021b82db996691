/* Products of a warpgroup (compute capability 9.0a): 64 rows times N columns, in steps of 16, into f32 accumulators.
 *
 * Each of the group's four warps holds 16 rows, in its lanes as mma.sync would (mma.cuh), and the sums have the same
 * order and bits.  The right operand lies in shared memory, 128 bytes a row, 1024-byte aligned, its 16-byte chunks
 * swizzled by the row's number modulo 8; the left one lies there too or in registers.
 *
 * The instructions run behind the back of the program: from wgmma_begin to the wait nothing else may touch their
 * registers, and to what they read from shared memory they are another proxy. */
#ifndef DSKV_KERNELS_CUDA_ATTENTION_WGMMA_CUH
#define DSKV_KERNELS_CUDA_ATTENTION_WGMMA_CUH

#include "cuda/common.cuh"
#include "cuda/wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

enum { SWIZZLE_ROW_BYTES = 128 };

/* An operand as the instruction wants it named, its changing half; column_bytes: from 64 columns to the next 64, where
 * rows are the steps (values), unused where columns are (queries, keys). */
__device__ __forceinline__ uint32_t operand_at(uint32_t address, int column_bytes)
{
    return address >> 4 | (uint32_t)(column_bytes >> 4) << 16;
}
/* Its other half: 128-byte swizzle, 1024 bytes from eight rows to the next. */
#define WGMMA_LAYOUT "0x40000040"

/* After the wait: nothing that uses these is moved ahead of it. */
template <int N> __device__ __forceinline__ void wgmma_result(float *c)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(c[i])::"memory");
}

#define WGMMA_4(io, i) io(c[i]), io(c[i + 1]), io(c[i + 2]), io(c[i + 3])
#define WGMMA_16(io, i) WGMMA_4(io, i), WGMMA_4(io, i + 4), WGMMA_4(io, i + 8), WGMMA_4(io, i + 12)
#define WGMMA_32(io) WGMMA_16(io, 0), WGMMA_16(io, 16)
#define WGMMA_64(io) WGMMA_32(io), WGMMA_16(io, 32), WGMMA_16(io, 48)
#define WGMMA_NAMES_32                                                                                                 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"   \
    "%30,%31"
#define WGMMA_NAMES_64                                                                                                 \
    WGMMA_NAMES_32                                                                                                     \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"    \
    "%59,%60,%61,%62,%63"
#define WGMMA_OLD(x) "+f"(x)
#define WGMMA_NEW(x) "=f"(x)

/* adds: "1": c += a b, of WGMMA_OLD; "0": c = a b, of WGMMA_NEW, which holds no register before. */
#define WGMMA_SHARED(io, adds, type)                                                                                   \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " adds ", 0;\n"                                    \
                 "mov.b64 a, {%32, " WGMMA_LAYOUT "};\nmov.b64 b, {%33, " WGMMA_LAYOUT "};\n"                          \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" WGMMA_NAMES_32                       \
                 "}, a, b, p, 1, 1, 0, 0;\n}"                                                                          \
                 : WGMMA_32(io)                                                                                        \
                 : "r"(a), "r"(b))
#define WGMMA_REGISTERS_64(io, adds, type, transposed)                                                                 \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " adds ", 0;\n"                                    \
                 "mov.b64 b, {%36, " WGMMA_LAYOUT "};\n"                                                               \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" WGMMA_NAMES_32                       \
                 "}, {%32,%33,%34,%35}, b, p, 1, 1, " transposed ";\n}"                                                \
                 : WGMMA_32(io)                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define WGMMA_REGISTERS_128(io, adds, type, transposed)                                                                \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, " adds ", 0;\n"                                    \
                 "mov.b64 b, {%68, " WGMMA_LAYOUT "};\n"                                                               \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" WGMMA_NAMES_64                      \
                 "}, {%64,%65,%66,%67}, b, p, 1, 1, " transposed ";\n}"                                                \
                 : WGMMA_64(io)                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define WGMMA_OF_TYPE(form, ...)                                                                                       \
    if constexpr (ADDS && std::is_same<T, __half>::value)                                                              \
        form(WGMMA_OLD, "1", "f16", ##__VA_ARGS__);                                                                    \
    else if constexpr (ADDS)                                                                                           \
        form(WGMMA_OLD, "1", "bf16", ##__VA_ARGS__);                                                                   \
    else if constexpr (std::is_same<T, __half>::value)                                                                 \
        form(WGMMA_NEW, "0", "f16", ##__VA_ARGS__);                                                                    \
    else                                                                                                               \
        form(WGMMA_NEW, "0", "bf16", ##__VA_ARGS__)

/* 64 columns, which are the rows of b (keys); a lies in shared memory. */
template <typename T, bool ADDS> __device__ __forceinline__ void wgmma_keys(float *c, uint32_t a, uint32_t b)
{
    WGMMA_OF_TYPE(WGMMA_SHARED);
}
/* D columns, those of b (values), whose rows are the steps. */
template <typename T, int D, bool ADDS>
__device__ __forceinline__ void wgmma_values(float *c, const uint32_t *a, uint32_t b)
{
    if constexpr (D == 64) {
        WGMMA_OF_TYPE(WGMMA_REGISTERS_64, "1");
    } else {
        WGMMA_OF_TYPE(WGMMA_REGISTERS_128, "1");
    }
}

#endif
#endif
