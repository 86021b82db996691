/* What kernels share that bring operands to shared memory: copies by threads; and by the copy engine (compute
 * capability 9.0 on), with barriers in shared memory that count arrivals and bytes, and how the driver describes a
 * tensor to it. */
#ifndef DSKV_KERNELS_CUDA_BULK_CUH
#define DSKV_KERNELS_CUDA_BULK_CUH

#include "cuda/cuda.h"

#include <cuda.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* x in a register for good.  Behind every asm the compiler reads parameters, and what shared addresses are made of,
 * anew from where it takes tens of cycles; a loop over the stages of a ring has a hundred or two for everything. */
__device__ __forceinline__ uint32_t kept(uint32_t x)
{
    uint32_t y;
    asm volatile("mov.u32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* 16 bytes to shared memory, in groups that are waited for (compute capability 8.0 on); zeros where `bytes` is 0. */
__device__ __forceinline__ void copy_16(void *shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_or_clear(void *shared, const void *global, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void wait_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/* Barriers in shared memory, by their address or by a pointer. */
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
__device__ __forceinline__ void barrier_init(uint64_t *barrier, int count)
{
    barrier_init(shared_address(barrier), count);
}
__device__ __forceinline__ void barrier_expect(uint64_t *barrier, int bytes)
{
    barrier_expect(shared_address(barrier), bytes);
}
__device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    barrier_arrive(shared_address(barrier));
}
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, int parity)
{
    barrier_wait(shared_address(barrier), parity);
}
/* Behind the inits: the copy engine may use them. */
__device__ __forceinline__ void barriers_are_ready()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* The box of a map of three dimensions that begins there, as large as the map says. */
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap *map, int x, int y, int z, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(shared),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void copy_box(unsigned char *shared, const CUtensorMap *map, int x, int y, int z,
                                         uint64_t *barrier)
{
    copy_box(shared_address(shared), map, x, y, z, shared_address(barrier));
}

#endif

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function, found without linking to the driver: a host without one runs this build too. */
static inline encode_function find_encode(void)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
        function = NULL;
    return (encode_function)function;
}

#endif
