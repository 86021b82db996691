/* Norms: sums run in 16 lanes over the columns and one fixed tree, so that they depend on the width alone. */
#include "kernels/cpu/names.h"
#include "kernels/cpu/vector.h"

#include <math.h>

/* Sum over the row of x - mean (square == 0), or of its square; the last, partial vector is filled with the mean. */
static float sum_row(const float *x, int64_t width, float mean, int square)
{
    struct vec sum = vec_zero(), shift = vec_set1(mean);
    int64_t i = 0;
    for (; i + VEC_LANES <= width; i += VEC_LANES) {
        struct vec v = vec_sub(vec_load(x + i), shift);
        sum = square ? vec_fma(v, v, sum) : vec_add(sum, v);
    }
    if (i < width) {
        struct vec v = vec_sub(vec_load_first(x + i, (int)(width - i), mean), shift);
        sum = square ? vec_fma(v, v, sum) : vec_add(sum, v);
    }
    return vec_sum(sum);
}

static void norm_row(const struct dskv_norm *p, const float *x, float *out)
{
    const int64_t width = p->x.cols;
    float mean = p->kind == DSKV_LAYER_NORM ? sum_row(x, width, 0.0f, 0) / (float)width : 0.0f;
    float variance = sum_row(x, width, mean, 1) / (float)width;
    float inverse = 1.0f / sqrtf(variance + p->eps);
    for (int64_t i = 0; i < width; i++) {
        float normal = (x[i] - mean) * inverse;
        out[i] = p->bias ? normal * p->weight[i] + p->bias[i] : normal * p->weight[i];
    }
}

static void norm_rows(void *context, int64_t first, int64_t last)
{
    const struct dskv_norm *p = context;
    for (int64_t r = first; r < last; r++)
        norm_row(p, (const float *)p->x.data + r * p->x.stride, (float *)p->out.data + r * p->out.stride);
}

void dskv_cpu_norm(struct dskv_device *device, const struct dskv_norm *p)
{
    dskv_threads_for(dskv_cpu_threads(device), p->x.rows, p->x.cols / 8 + 20, norm_rows, (void *)p);
}
