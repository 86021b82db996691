/* What the kernels of the matmul share: copies of the operands of mma. */
#ifndef DSKV_KERNELS_CUDA_MATMUL_CUH
#define DSKV_KERNELS_CUDA_MATMUL_CUH

#include "cuda/bulk.cuh"
#include "cuda/common.cuh"
#include "cuda/matmul.h"
#include "cuda/mma.cuh"

/* Four 8x8 matrices of 2-byte elements; lane l names row l % 8 of matrix l / 8. */
__device__ __forceinline__ void load_matrices(uint32_t *r, uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#endif
