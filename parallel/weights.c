#include "parallel/weights.h"

#include "base/log.h"
#include "base/memory.h"
#include "parallel/load.h"
#include "parallel/rope.h"

#include <stdlib.h>
#include <time.h>

struct allocation {
    void *memory;
    size_t bytes;
};

/* What dskv_weights_open gives out, and what it needs to take back. */
struct held {
    struct dskv_weights public; /* first: the two are cast into each other */
    int32_t n_layers;
    struct allocation *allocations; /* f32 vectors and tables */
    size_t n_allocations;
};

struct opening {
    struct dskv_device *device;
    const struct dskv_model *model;
    const struct dskv_shard *shard;
    const struct dskv_weights_options *options;
    struct held *held;
    int failed; /* some allocation gave null */
};

/* ---- memory on the device --------------------------------------------------------------------------------------- */

static float *open_vector(struct opening *o, int present, int64_t n)
{
    if (!present)
        return NULL;
    struct held *held = o->held;
    size_t bytes = (size_t)n * sizeof(float);
    float *memory = dskv_device_alloc(o->device, bytes);
    if (!memory) {
        o->failed = 1;
        return NULL;
    }
    held->allocations = dskv_realloc(held->allocations, held->n_allocations + 1, sizeof *held->allocations);
    held->allocations[held->n_allocations++] = (struct allocation){memory, bytes};
    held->public.replicated_bytes += bytes;
    return memory;
}

static struct dskv_weight *open_matrix(struct opening *o, int64_t n, int64_t k)
{
    struct dskv_weight *weight = dskv_weight_open(o->device, n, k, o->options->dtype);
    if (!weight)
        o->failed = 1;
    return weight;
}

static void open_layer(struct opening *o, struct dskv_layer_weights *layer)
{
    const struct dskv_model *m = o->model;
    int64_t head_dim = m->head_dim, q = o->shard->n_heads_local * head_dim;
    int64_t qkv = q + 2 * o->shard->n_kv_heads_local * head_dim;
    int64_t up = (m->gated ? 2 : 1) * (int64_t)o->shard->n_mlp_local;
    layer->norm1_weight = open_vector(o, 1, m->width);
    layer->norm1_bias = open_vector(o, m->norm == DSKV_LAYER_NORM, m->width);
    layer->qkv = open_matrix(o, qkv, m->width);
    layer->qkv_bias = open_vector(o, m->qkv_bias, qkv);
    layer->o = open_matrix(o, m->width, q);
    layer->o_bias = open_vector(o, m->o_bias, m->width);
    layer->norm2_weight = open_vector(o, 1, m->width);
    layer->norm2_bias = open_vector(o, m->norm == DSKV_LAYER_NORM, m->width);
    layer->up = open_matrix(o, up, m->width);
    layer->up_bias = open_vector(o, m->mlp_bias, up);
    layer->down = open_matrix(o, m->width, o->shard->n_mlp_local);
    layer->down_bias = open_vector(o, m->mlp_bias, m->width);
}

/* Matrices of all layers; KV heads count where they are exported. */
static uint64_t matrix_elements(const struct dskv_model *m, const struct dskv_shard *s)
{
    uint64_t width = (uint64_t)m->width, head_dim = (uint64_t)m->head_dim;
    uint64_t qkv = ((uint64_t)s->n_heads_local + 2 * (uint64_t)s->n_export_heads) * head_dim * width;
    uint64_t o = width * (uint64_t)s->n_heads_local * head_dim;
    uint64_t mlp = (m->gated ? 3 : 2) * (uint64_t)s->n_mlp_local * width;
    return (uint64_t)m->n_layers * (qkv + o + mlp) + (m->tied ? 1 : 2) * (uint64_t)s->n_vocab_local * width;
}

static void open_rope(struct opening *o)
{
    enum { CHUNK = 1024 }; /* positions made at once: a long context's whole table would weigh on the host, too */
    const struct dskv_model *m = o->model;
    if (m->positions != DSKV_POSITIONS_ROTARY)
        return;
    int32_t n = o->options->max_model_len;
    size_t half = (size_t)m->rotary_dim / 2;
    float *device_cos = open_vector(o, 1, (int64_t)half * n), *device_sin = open_vector(o, 1, (int64_t)half * n);
    o->held->public.rope_cos = device_cos;
    o->held->public.rope_sin = device_sin;
    if (o->failed)
        return;
    float *cosines = dskv_calloc(CHUNK * half, sizeof *cosines), *sines = dskv_calloc(CHUNK * half, sizeof *sines);
    for (int32_t first = 0; first < n; first += CHUNK) {
        int32_t rows = n - first < CHUNK ? n - first : CHUNK;
        size_t offset = (size_t)first * half, bytes = (size_t)rows * half * sizeof *cosines;
        dskv_rope_fill(m, n, first, rows, cosines, sines);
        dskv_device_upload(o->device, device_cos + offset, cosines, bytes);
        dskv_device_upload(o->device, device_sin + offset, sines, bytes);
    }
    free(cosines);
    free(sines);
}

static enum dskv_exit open_all(struct opening *o, struct dskv_error *error)
{
    const struct dskv_model *m = o->model;
    struct dskv_weights *w = &o->held->public;
    w->embedding = open_matrix(o, o->shard->n_vocab_local, m->width);
    w->head = m->tied ? w->embedding : open_matrix(o, o->shard->n_vocab_local, m->width);
    if (m->positions == DSKV_POSITIONS_LEARNED)
        w->position_table =
            dskv_tensor(open_vector(o, 1, (int64_t)m->max_context * m->width), DSKV_F32, m->max_context, m->width);
    w->norm_weight = open_vector(o, 1, m->width);
    w->norm_bias = open_vector(o, m->norm == DSKV_LAYER_NORM, m->width);
    for (int32_t layer = 0; layer < m->n_layers && !o->failed; layer++)
        open_layer(o, &w->layers[layer]);
    open_rope(o);
    uint64_t size = dskv_dtype_bytes(o->options->dtype);
    uint64_t repeated_heads = (uint64_t)(o->shard->n_kv_heads_local - o->shard->n_export_heads);
    w->sharded_bytes = matrix_elements(m, o->shard) * size;
    w->replicated_bytes +=
        2 * repeated_heads * (uint64_t)m->head_dim * (uint64_t)m->width * (uint64_t)m->n_layers * size;
    if (o->failed)
        return dskv_fail_exit(
            error, DSKV_EXIT_MEMORY,
            "rank %d has no memory for its weights: %.1f MB of matrices as %s and %.1f MB beside them", o->shard->rank,
            (double)w->sharded_bytes / 1e6, dskv_dtype_name(o->options->dtype), (double)w->replicated_bytes / 1e6);
    return DSKV_EXIT_OK;
}

/* ---- which part of a tensor goes where -------------------------------------------------------------------------- */

#define MAX_SLICES 3

/* Local heads of q, k and v inside the fused qkv of this rank: first local row, first global row, rows. */
struct head_rows {
    int64_t local, global, n;
};

static struct head_rows rows_of(const struct opening *o, int which)
{
    const struct dskv_shard *s = o->shard;
    int64_t d = o->model->head_dim, q = s->n_heads_local * d, kv = s->n_kv_heads_local * d;
    if (which == 0)
        return (struct head_rows){0, s->first_head * d, q};
    return (struct head_rows){q + (which - 1) * kv, s->first_kv_head * d, kv};
}

/* Adds the rows of q (0), k (1) or v (2) of a matrix or bias in which they begin at output `base`. */
static int add_heads(const struct opening *o, struct dskv_slice *slice, struct dskv_weight *weight, const float *vector,
                     int which, int64_t base)
{
    struct head_rows rows = rows_of(o, which);
    *slice = (struct dskv_slice){weight, (float *)(uintptr_t)vector,  rows.local, base + rows.global, rows.n,
                                 0,      weight ? o->model->width : 0};
    return 1;
}

static int add_fused(const struct opening *o, struct dskv_slice *slices, struct dskv_weight *weight,
                     const float *vector)
{
    int64_t q = (int64_t)o->model->n_heads * o->model->head_dim,
            kv = (int64_t)o->model->n_kv_heads * o->model->head_dim;
    for (int which = 0; which < 3; which++)
        add_heads(o, &slices[which], weight, vector, which, which == 0 ? 0 : q + (which - 1) * kv);
    return 3;
}

static int add_rows(struct dskv_slice *slice, struct dskv_weight *weight, int64_t dst, int64_t first, int64_t n,
                    int64_t k)
{
    *slice = (struct dskv_slice){weight, NULL, dst, first, n, 0, k};
    return 1;
}

static int add_columns(struct dskv_slice *slice, struct dskv_weight *weight, int64_t n, int64_t first, int64_t k)
{
    *slice = (struct dskv_slice){weight, NULL, 0, 0, n, first, k};
    return 1;
}

static int add_vector(struct dskv_slice *slice, const float *vector, int64_t dst, int64_t first, int64_t n)
{
    *slice = (struct dskv_slice){NULL, (float *)(uintptr_t)vector, dst, first, n, 0, 0};
    return 1;
}

/* The slices of a tensor that this rank holds: their number, at most MAX_SLICES. */
static int slices_of(const struct opening *o, const struct dskv_bound_tensor *tensor, struct dskv_slice *s)
{
    const struct dskv_model *m = o->model;
    const struct dskv_shard *shard = o->shard;
    const struct dskv_weights *w = &o->held->public;
    const struct dskv_layer_weights *layer = tensor->layer >= 0 ? &w->layers[tensor->layer] : NULL;
    int64_t width = m->width, n_mlp = shard->n_mlp_local, up_row = m->gated ? n_mlp : 0;
    switch (tensor->part) {
    case DSKV_PART_EMBEDDING: return add_rows(s, w->embedding, 0, shard->first_vocab, shard->n_vocab_local, width);
    case DSKV_PART_HEAD: return add_rows(s, w->head, 0, shard->first_vocab, shard->n_vocab_local, width);
    case DSKV_PART_POSITIONS: return add_vector(s, w->position_table.data, 0, 0, m->max_context * width);
    case DSKV_PART_NORM_WEIGHT: return add_vector(s, w->norm_weight, 0, 0, width);
    case DSKV_PART_NORM_BIAS: return add_vector(s, w->norm_bias, 0, 0, width);
    case DSKV_PART_NORM1_WEIGHT: return add_vector(s, layer->norm1_weight, 0, 0, width);
    case DSKV_PART_NORM1_BIAS: return add_vector(s, layer->norm1_bias, 0, 0, width);
    case DSKV_PART_QKV: return add_fused(o, s, layer->qkv, NULL);
    case DSKV_PART_Q: return add_heads(o, s, layer->qkv, NULL, 0, 0);
    case DSKV_PART_K: return add_heads(o, s, layer->qkv, NULL, 1, 0);
    case DSKV_PART_V: return add_heads(o, s, layer->qkv, NULL, 2, 0);
    case DSKV_PART_QKV_BIAS: return add_fused(o, s, NULL, layer->qkv_bias);
    case DSKV_PART_Q_BIAS: return add_heads(o, s, NULL, layer->qkv_bias, 0, 0);
    case DSKV_PART_K_BIAS: return add_heads(o, s, NULL, layer->qkv_bias, 1, 0);
    case DSKV_PART_V_BIAS: return add_heads(o, s, NULL, layer->qkv_bias, 2, 0);
    case DSKV_PART_O:
        return add_columns(s, layer->o, width, shard->first_head * (int64_t)m->head_dim,
                           shard->n_heads_local * (int64_t)m->head_dim);
    case DSKV_PART_O_BIAS: return add_vector(s, layer->o_bias, 0, 0, width);
    case DSKV_PART_NORM2_WEIGHT: return add_vector(s, layer->norm2_weight, 0, 0, width);
    case DSKV_PART_NORM2_BIAS: return add_vector(s, layer->norm2_bias, 0, 0, width);
    case DSKV_PART_GATE: return add_rows(s, layer->up, 0, shard->first_mlp, n_mlp, width);
    case DSKV_PART_GATE_BIAS: return add_vector(s, layer->up_bias, 0, shard->first_mlp, n_mlp);
    case DSKV_PART_UP: return add_rows(s, layer->up, up_row, shard->first_mlp, n_mlp, width);
    case DSKV_PART_UP_BIAS: return add_vector(s, layer->up_bias, up_row, shard->first_mlp, n_mlp);
    case DSKV_PART_DOWN: return add_columns(s, layer->down, width, shard->first_mlp, n_mlp);
    case DSKV_PART_DOWN_BIAS: return add_vector(s, layer->down_bias, 0, 0, width);
    case DSKV_PART_IGNORED:
    case DSKV_N_PARTS: break;
    }
    dskv_bug(__FILE__, __LINE__, "part", "%d", (int)tensor->part);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static uint64_t bytes_to_read(const struct opening *o, const struct dskv_tensors *tensors)
{
    uint64_t bytes = 0;
    struct dskv_slice slices[MAX_SLICES];
    for (size_t i = 0; i < tensors->n; i++) {
        const struct dskv_bound_tensor *tensor = &tensors->list[i];
        size_t size = dskv_dtype_bytes(tensor->stored ? tensor->stored->dtype : DSKV_F32);
        int n = slices_of(o, tensor, slices);
        for (int s = 0; s < n; s++)
            bytes += (uint64_t)slices[s].n_outputs * (uint64_t)(slices[s].weight ? slices[s].n_inputs : 1) * size;
    }
    return bytes;
}

static enum dskv_exit read_all(const struct opening *o, struct dskv_checkpoint *checkpoint,
                               const struct dskv_tensors *tensors, struct dskv_error *error)
{
    struct dskv_load *load = dskv_load_begin(o->device, checkpoint, o->options->dtype, bytes_to_read(o, tensors));
    const struct dskv_bound_tensor *embedding = NULL;
    struct dskv_slice slices[MAX_SLICES];
    enum dskv_exit code = DSKV_EXIT_OK;
    for (size_t i = 0; i < tensors->n && code == DSKV_EXIT_OK; i++) {
        const struct dskv_bound_tensor *tensor = &tensors->list[i];
        if (tensor->part == DSKV_PART_EMBEDDING)
            embedding = tensor;
        if (tensor->part == DSKV_PART_HEAD && o->model->tied) {
            code = dskv_load_compare(load, embedding, tensor, o->shard->first_vocab, o->shard->n_vocab_local, error);
            continue;
        }
        int n = slices_of(o, tensor, slices);
        for (int s = 0; s < n && code == DSKV_EXIT_OK; s++)
            code = dskv_load_slice(load, tensor, &slices[s], error);
    }
    dskv_load_end(&load);
    return code;
}

static enum dskv_exit fill_all(const struct opening *o, struct dskv_error *error)
{
    struct dskv_checkpoint *checkpoint = NULL;
    struct dskv_tensors tensors = {0};
    enum dskv_exit code =
        o->options->dummy ? DSKV_EXIT_OK : dskv_checkpoint_open(o->options->model_dir, &checkpoint, error);
    if (code == DSKV_EXIT_OK)
        code = dskv_tensors_open(o->model, checkpoint, &tensors, error);
    if (code == DSKV_EXIT_OK)
        code = read_all(o, checkpoint, &tensors, error);
    if (checkpoint)
        o->held->public.read_bytes = dskv_checkpoint_n_read(checkpoint);
    dskv_tensors_close(&tensors);
    dskv_checkpoint_close(&checkpoint);
    return code;
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

enum dskv_exit dskv_weights_open(struct dskv_device *device, const struct dskv_model *model,
                                 const struct dskv_shard *shard, const struct dskv_weights_options *options,
                                 struct dskv_weights **weights, struct dskv_error *error)
{
    DSKV_ASSERT(options->max_model_len >= 1 && options->max_model_len <= model->max_context, "%d of %d positions",
                options->max_model_len, model->max_context);
    double start = seconds_now();
    struct held *held = dskv_calloc(1, sizeof *held);
    held->n_layers = model->n_layers;
    held->public.layers = dskv_calloc((size_t)model->n_layers, sizeof *held->public.layers);
    struct opening opening = {device, model, shard, options, held, 0};
    *weights = &held->public;
    enum dskv_exit code = open_all(&opening, error);
    if (code == DSKV_EXIT_OK)
        code = fill_all(&opening, error);
    if (code != DSKV_EXIT_OK) {
        dskv_weights_close(device, weights);
        return code;
    }
    dskv_log(DSKV_LOG_INFO, "weights", "%.1f MB %s in %.2f s; %.1f MB of matrices held as %s, %.1f MB beside them",
             (double)(options->dummy ? held->public.sharded_bytes : held->public.read_bytes) / 1e6,
             options->dummy ? "made" : "read", seconds_now() - start, (double)held->public.sharded_bytes / 1e6,
             dskv_dtype_name(options->dtype), (double)held->public.replicated_bytes / 1e6);
    return DSKV_EXIT_OK;
}

static void close_matrix(struct dskv_device *device, struct dskv_weight **weight)
{
    if (*weight)
        dskv_weight_close(device, weight);
}

void dskv_weights_close(struct dskv_device *device, struct dskv_weights **weights)
{
    struct held *held = (struct held *)*weights;
    if (!held)
        return;
    struct dskv_weights *w = &held->public;
    for (int32_t i = 0; i < held->n_layers; i++) {
        struct dskv_layer_weights *layer = &w->layers[i];
        close_matrix(device, &layer->qkv);
        close_matrix(device, &layer->o);
        close_matrix(device, &layer->up);
        close_matrix(device, &layer->down);
    }
    if (w->head != w->embedding)
        close_matrix(device, &w->head);
    close_matrix(device, &w->embedding);
    for (size_t i = 0; i < held->n_allocations; i++)
        dskv_device_free(device, held->allocations[i].memory, held->allocations[i].bytes);
    free(held->allocations);
    free(w->layers);
    free(held);
    *weights = NULL;
}
