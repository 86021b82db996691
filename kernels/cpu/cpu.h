/* CPU (private): the device's state and the two layouts that its operations share, of weights and of KV blocks.
 *
 * Activations are always f32.  A weight is cut into panels of DSKV_PANEL outputs, [panel][k][output in panel], in the
 * dtype in which it is held, the last panel padded with zeros; lanes of a vector run over outputs.  In a bf16 panel,
 * outputs i and i + 16 lie side by side, so that one 32-bit lane yields two f32 by a shift and a mask.
 *
 * A KV block is [layer][local KV head][keys, values]: keys as [head_dim][block_tokens], so that lanes run over tokens
 * and a score is one chain over dimensions; values as [block_tokens][value_stride], head_dim rounded up to whole
 * vectors.
 */
#ifndef DSKV_CPU_CPU_H
#define DSKV_CPU_CPU_H

#include "kernels/cpu/threads.h"
#include "kernels/device.h"

enum { DSKV_PANEL = 32, DSKV_SCRATCH_BYTES = 8 << 20 };

struct dskv_cpu {
    struct dskv_device base;
    int n_threads;
    struct dskv_threads *threads;
    void *scratch; /* DSKV_SCRATCH_BYTES for one operation's own use; pages are taken on first touch */
};

static inline struct dskv_threads *dskv_cpu_threads(struct dskv_device *device)
{
    return ((struct dskv_cpu *)device)->threads;
}

/* Elements from one panel to the next. */
static inline int64_t dskv_panel_stride(const struct dskv_weight *weight)
{
    return weight->k * DSKV_PANEL;
}

/* Where output `lane` of a panel lies among the DSKV_PANEL elements of one k. */
static inline int dskv_panel_place(enum dskv_dtype dtype, int lane)
{
    return dtype != DSKV_BF16 ? lane : lane < DSKV_PANEL / 2 ? 2 * lane : 2 * lane - DSKV_PANEL + 1;
}

/* Elements from one token's values to the next. */
static inline int64_t dskv_kv_value_stride(const struct dskv_kv *kv)
{
    return ((int64_t)kv->head_dim + 15) / 16 * 16;
}

/* Elements of one head's keys in a block; the values follow them. */
static inline int64_t dskv_kv_key_elements(const struct dskv_kv *kv)
{
    return (int64_t)kv->block_tokens * kv->head_dim;
}

/* Elements of one head's keys and values in a block. */
static inline int64_t dskv_kv_head_elements(const struct dskv_kv *kv)
{
    return (int64_t)kv->block_tokens * (kv->head_dim + dskv_kv_value_stride(kv));
}

/* The keys, or the values, of one layer and local head in a block. */
static inline char *dskv_kv_plane(const struct dskv_kv *kv, int32_t block, int32_t layer, int32_t head, int is_value)
{
    DSKV_ASSERT(block >= 0 && block < kv->n_blocks, "block %d of %d", block, kv->n_blocks);
    int64_t plane = (int64_t)layer * kv->n_kv_heads_local + head;
    int64_t element = plane * dskv_kv_head_elements(kv) + (is_value ? dskv_kv_key_elements(kv) : 0);
    return (char *)kv->data + (size_t)block * kv->block_bytes + (size_t)element * dskv_dtype_bytes(kv->dtype);
}

#endif
