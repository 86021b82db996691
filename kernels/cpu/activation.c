/* Activations, gated or not. */
#include "kernels/cpu/names.h"
#include "kernels/cpu/vecmath.h"

static inline struct vec gelu_tanh(struct vec x)
{
    struct vec cube = vec_mul(vec_mul(x, x), x);
    struct vec inner = vec_mul(vec_set1(0x1.988454p-1f), vec_fma(vec_set1(0.044715f), cube, x)); /* sqrt(2 / pi) */
    return vec_mul(vec_mul(vec_set1(0.5f), x), vec_add(vec_set1(1.0f), vec_tanh(inner)));
}

static inline struct vec gelu_erf(struct vec x)
{
    struct vec e = vec_erf(vec_mul(x, vec_set1(0x1.6a09e6p-1f))); /* 1 / sqrt(2) */
    return vec_mul(vec_mul(vec_set1(0.5f), x), vec_add(vec_set1(1.0f), e));
}

static inline struct vec silu(struct vec x)
{
    return vec_div(x, vec_add(vec_set1(1.0f), vec_exp(vec_sub(vec_zero(), x))));
}

static inline __attribute__((always_inline)) struct vec activate(const enum dskv_activation kind, struct vec x)
{
    switch (kind) {
    case DSKV_GELU_TANH: return gelu_tanh(x);
    case DSKV_GELU_ERF: return gelu_erf(x);
    case DSKV_SILU: return silu(x);
    default: return vec_max(x, vec_zero()); /* DSKV_RELU */
    }
}

static inline __attribute__((always_inline)) void
activate_rows(const struct dskv_activate *p, const enum dskv_activation kind, int64_t first, int64_t last)
{
    const int64_t n = p->out.cols;
    for (int64_t r = first; r < last; r++) {
        const float *x = (const float *)p->x.data + r * p->x.stride, *gate = x + n;
        float *out = (float *)p->out.data + r * p->out.stride;
        int64_t i = 0;
        for (; i + VEC_LANES <= n; i += VEC_LANES) {
            struct vec y = activate(kind, vec_load(x + i));
            vec_store(out + i, p->gated ? vec_mul(y, vec_load(gate + i)) : y);
        }
        if (i < n) {
            int rest = (int)(n - i);
            struct vec y = activate(kind, vec_load_first(x + i, rest, 0.0f));
            vec_store_first(out + i, rest, p->gated ? vec_mul(y, vec_load_first(gate + i, rest, 0.0f)) : y);
        }
    }
}

static void run(void *context, int64_t first, int64_t last)
{
    const struct dskv_activate *p = context;
    switch (p->kind) {
    case DSKV_GELU_TANH: activate_rows(p, DSKV_GELU_TANH, first, last); break;
    case DSKV_GELU_ERF: activate_rows(p, DSKV_GELU_ERF, first, last); break;
    case DSKV_SILU: activate_rows(p, DSKV_SILU, first, last); break;
    default: activate_rows(p, DSKV_RELU, first, last); break;
    }
}

void dskv_cpu_activate(struct dskv_device *device, const struct dskv_activate *p)
{
    dskv_threads_for(dskv_cpu_threads(device), p->out.rows, p->out.cols + 10, run, (void *)p);
}
