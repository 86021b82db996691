/* Rotary positions: unfused products and sums of single elements, so that any compiler's vectors give the same bits. */
#include "kernels/cpu/names.h"

static void rotate(float *a, float *b, float cos, float sin)
{
    float x = *a, y = *b;
    *a = x * cos - y * sin;
    *b = y * cos + x * sin;
}

static void rope_rows(void *context, int64_t first, int64_t last)
{
    const struct dskv_rope *p = context;
    const int half = p->rotary_dim / 2;
    for (int64_t r = first; r < last; r++) {
        const float *cos = p->cos + (int64_t)p->positions[r] * half, *sin = p->sin + (int64_t)p->positions[r] * half;
        for (int h = 0; h < p->n_heads; h++) {
            float *x = (float *)p->x.data + r * p->x.stride + (int64_t)h * p->head_dim;
            if (p->style == DSKV_ROPE_HALVES)
                for (int i = 0; i < half; i++)
                    rotate(&x[i], &x[i + half], cos[i], sin[i]);
            else
                for (int i = 0; i < half; i++)
                    rotate(&x[2 * i], &x[2 * i + 1], cos[i], sin[i]);
        }
    }
}

void dskv_cpu_rope(struct dskv_device *device, const struct dskv_rope *p)
{
    dskv_threads_for(dskv_cpu_threads(device), p->x.rows, (int64_t)p->n_heads * p->rotary_dim / 4 + 5, rope_rows,
                     (void *)p);
}
