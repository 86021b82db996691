/* One element's activation, alone or gated: shared by every kernel that activates, so that all give the same bits. */
#ifndef DSKV_KERNELS_CUDA_ACTIVATION_CUH
#define DSKV_KERNELS_CUDA_ACTIVATION_CUH

#include "cuda/common.cuh"

/* x / d for d from 1 on, without the branches of a division that serves all: the same bits for normal quotients, but 0
 * from d = 2^125 on, and no number for an infinite x. */
__device__ __forceinline__ float quotient(float x, float d)
{
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(d));
    inverse = fmaf(fmaf(-d, inverse, 1.0f), inverse, inverse);
    float q = x * inverse;
    q = fmaf(fmaf(-d, q, x), inverse, q);
    q = fmaf(fmaf(-d, q, x), inverse, q);
    return d >= 0x1p125f ? 0.0f : q;
}

template <enum dskv_activation KIND> __device__ __forceinline__ float activation(float x)
{
    if constexpr (KIND == DSKV_GELU_TANH)
        return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * (x * x * x))));
    else if constexpr (KIND == DSKV_GELU_ERF)
        return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    else if constexpr (KIND == DSKV_SILU)
        return quotient(x, 1.0f + expf(-x));
    else /* DSKV_RELU */
        return x > 0.0f ? x : 0.0f;
}

/* act(x), or act(x) * factor, rounded where two operations would round. */
template <enum dskv_activation KIND, typename T> __device__ __forceinline__ T activated(T x)
{
    return from_float<T>(activation<KIND>(to_float(x)));
}
template <enum dskv_activation KIND, typename T> __device__ __forceinline__ T activated(T x, T factor)
{
    return from_float<T>(to_float(activated<KIND>(x)) * to_float(factor));
}

/* Calls f with the kind: one decision for all elements of a thread, which can then be computed side by side. */
template <typename F> __device__ __forceinline__ void with_activation(enum dskv_activation kind, F f)
{
    switch (kind) {
    case DSKV_GELU_TANH: f(std::integral_constant<enum dskv_activation, DSKV_GELU_TANH>()); break;
    case DSKV_GELU_ERF: f(std::integral_constant<enum dskv_activation, DSKV_GELU_ERF>()); break;
    case DSKV_SILU: f(std::integral_constant<enum dskv_activation, DSKV_SILU>()); break;
    default: f(std::integral_constant<enum dskv_activation, DSKV_RELU>());
    }
}

#endif
