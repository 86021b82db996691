/* One element's activation, alone or gated: shared by every kernel that activates, so that all give the same bits. */
#ifndef DSKV_KERNELS_CUDA_ACTIVATION_CUH
#define DSKV_KERNELS_CUDA_ACTIVATION_CUH

#include "cuda/common.cuh"

__device__ __forceinline__ float activation(enum dskv_activation kind, float x)
{
    switch (kind) {
    case DSKV_GELU_TANH: return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * (x * x * x))));
    case DSKV_GELU_ERF: return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    case DSKV_SILU: return x / (1.0f + expf(-x));
    default: return x > 0.0f ? x : 0.0f; /* DSKV_RELU */
    }
}

/* act(x), or act(x) * factor, rounded where two operations would round. */
template <typename T> __device__ __forceinline__ T activated(enum dskv_activation kind, T x)
{
    return from_float<T>(activation(kind, to_float(x)));
}
template <typename T> __device__ __forceinline__ T activated(enum dskv_activation kind, T x, T factor)
{
    return from_float<T>(to_float(activated(kind, x)) * to_float(factor));
}

#endif
