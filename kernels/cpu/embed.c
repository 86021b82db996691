/* Embeddings: rows of a prepared weight, read where the matmul reads it, so that a tied model keeps one copy. */
#include "kernels/cpu/names.h"

#include "base/half.h"

#include <string.h>

/* Output `id` of a prepared weight: one element per k, DSKV_PANEL apart. */
static void read_output(const struct dskv_weight *weight, int64_t id, float *out)
{
    const int64_t first =
        id / DSKV_PANEL * dskv_panel_stride(weight) + dskv_panel_place(weight->dtype, (int)(id % DSKV_PANEL));
    const float *full = (const float *)weight->data + (weight->dtype == DSKV_F32 ? first : 0);
    const uint16_t *half = (const uint16_t *)weight->data + (weight->dtype == DSKV_F32 ? 0 : first);
    switch (weight->dtype) {
    case DSKV_F32:
        for (int64_t k = 0; k < weight->k; k++)
            out[k] = full[k * DSKV_PANEL];
        break;
    case DSKV_F16:
        for (int64_t k = 0; k < weight->k; k++)
            out[k] = dskv_f16_to_f32(half[k * DSKV_PANEL]);
        break;
    default:
        for (int64_t k = 0; k < weight->k; k++)
            out[k] = dskv_bf16_to_f32(half[k * DSKV_PANEL]);
        break;
    }
}

static void embed_rows(void *context, int64_t first, int64_t last)
{
    const struct dskv_embed *p = context;
    const int64_t width = p->out.cols;
    for (int64_t r = first; r < last; r++) {
        float *out = (float *)p->out.data + r * p->out.stride;
        int32_t given = p->ids[r];
        int64_t id = (int64_t)(given < 0 ? p->drawn[-1 - given] : given) - p->first;
        if (id >= 0 && id < p->table->n)
            read_output(p->table, id, out);
        else
            memset(out, 0, (size_t)width * sizeof *out);
        if (!p->position_table.data)
            continue;
        DSKV_ASSERT(p->positions[r] >= 0 && p->positions[r] < p->position_table.rows, "position %d of %lld",
                    p->positions[r], (long long)p->position_table.rows);
        const float *position = (const float *)p->position_table.data + p->positions[r] * p->position_table.stride;
        for (int64_t i = 0; i < width; i++)
            out[i] = out[i] + position[i];
    }
}

void dskv_cpu_embed(struct dskv_device *device, const struct dskv_embed *p)
{
    dskv_threads_for(dskv_cpu_threads(device), p->out.rows, p->out.cols * 2, embed_rows, (void *)p);
}
