/* What is one rounding per element: residuals, ordered sums of partials, rows that are picked. */
#include "kernels/cpu/names.h"

#include <string.h>

static float *row_of(const struct dskv_tensor *t, int64_t r)
{
    return (float *)t->data + r * t->stride;
}

/* ---- residual --------------------------------------------------------------------------------------------------- */

static void residual_rows(void *context, int64_t first, int64_t last)
{
    const struct dskv_residual *p = context;
    for (int64_t r = first; r < last; r++) {
        float *x = row_of(&p->x, r);
        const float *y = row_of(&p->y, r);
        if (p->bias)
            for (int64_t i = 0; i < p->x.cols; i++)
                x[i] = x[i] + (y[i] + p->bias[i]);
        else
            for (int64_t i = 0; i < p->x.cols; i++)
                x[i] = x[i] + y[i];
    }
}

void dskv_cpu_residual(struct dskv_device *device, const struct dskv_residual *p)
{
    dskv_threads_for(dskv_cpu_threads(device), p->x.rows, p->x.cols / 8, residual_rows, (void *)p);
}

/* ---- sum -------------------------------------------------------------------------------------------------------- */

static void sum_rows(void *context, int64_t first, int64_t last)
{
    const struct dskv_sum *p = context;
    const int64_t begin = first * p->out.cols, n = (last - first) * p->out.cols;
    float *out = (float *)p->out.data + begin;
    memmove(out, (const float *)p->partials[0] + begin, (size_t)n * sizeof *out);
    for (int32_t i = 1; i < p->n; i++) {
        const float *partial = (const float *)p->partials[i] + begin;
        for (int64_t j = 0; j < n; j++)
            out[j] = out[j] + partial[j];
    }
}

void dskv_cpu_sum(struct dskv_device *device, const struct dskv_sum *p)
{
    dskv_threads_for(dskv_cpu_threads(device), p->out.rows, p->out.cols * p->n / 8, sum_rows, (void *)p);
}

/* ---- gather ----------------------------------------------------------------------------------------------------- */

void dskv_cpu_gather_rows(struct dskv_device *device, const struct dskv_gather_rows *p)
{
    (void)device;
    for (int64_t i = 0; i < p->out.rows; i++) {
        DSKV_ASSERT(p->index[i] >= 0 && p->index[i] < p->x.rows, "row %d of %lld", p->index[i], (long long)p->x.rows);
        memcpy(row_of(&p->out, i), row_of(&p->x, p->index[i]), (size_t)p->x.cols * sizeof(float));
    }
}
