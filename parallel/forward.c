/* Forward: the transformer, once, for every family and every number of ranks.
 *
 * A rank holds some heads, some MLP columns and some of the vocabulary; everything between the sums is replicated.
 * Partials are written where the comm wants them, summed in rank order, and only then are the output biases and the
 * residual added.  The head is in select.c.
 */
#include "parallel/forward.h"

#include "base/memory.h"

#include <stdlib.h>

struct dskv_forward {
    struct dskv_forward_parts parts;
    char *memory; /* all buffers below, one device allocation */
    size_t memory_bytes;
    void *x, *h;              /* [max_tokens, width]: the residual stream; its norm */
    void *wide, *narrow;      /* [max_tokens, qkv or up columns]; [max_tokens, heads or MLP columns] */
    int32_t *kv_head_of_head; /* [n_heads_local] */
};

static struct dskv_tensor buffer(const struct dskv_forward *f, void *data, int64_t rows, int64_t cols)
{
    return dskv_tensor(data, f->parts.activation_dtype, rows, cols);
}

/* Where this rank writes its partial of [rows, width]. */
static struct dskv_tensor partial(const struct dskv_forward *f, int64_t rows)
{
    return buffer(f, dskv_comm_slot(f->parts.comm), rows, f->parts.model->width);
}

static void norm(const struct dskv_forward *f, struct dskv_tensor x, const float *weight, const float *bias,
                 struct dskv_tensor out)
{
    struct dskv_norm p = {f->parts.model->norm, f->parts.model->norm_eps, x, weight, bias, out};
    dskv_op_norm(f->parts.device, &p);
}

static void matmul(const struct dskv_forward *f, struct dskv_tensor x, const struct dskv_weight *w, const float *bias,
                   struct dskv_tensor y)
{
    struct dskv_matmul p = {x, w, bias, y};
    dskv_op_matmul(f->parts.device, &p);
}

/* A part's end: x += the sum of all ranks' partials (+ bias), h = its norm, which the next part begins with. */
static enum dskv_exit add_partials(const struct dskv_forward *f, int64_t rows, const float *bias,
                                   const float *norm_weight, const float *norm_bias, struct dskv_error *error)
{
    const struct dskv_model *m = f->parts.model;
    struct dskv_tensor x = buffer(f, f->x, rows, m->width), h = buffer(f, f->h, rows, m->width);
    struct dskv_residual_norm p = {{x, partial(f, rows), bias}, {m->norm, m->norm_eps, x, norm_weight, norm_bias, h}};
    return dskv_comm_add(f->parts.comm, &p, error);
}

/* x = token embeddings, each from the rank that holds it, + position embeddings, which rank 0 adds to its partial. */
static enum dskv_exit embed(const struct dskv_forward *f, const struct dskv_pass *pass, struct dskv_error *error)
{
    int64_t rows = pass->rows;
    struct dskv_tensor none = {0}, sum, x = buffer(f, f->x, rows, f->parts.model->width);
    struct dskv_embed p = {.ids = pass->ids,
                           .positions = pass->positions,
                           .drawn = pass->drawn,
                           .table = f->parts.weights->embedding,
                           .first = f->parts.shard->first_vocab,
                           .position_table = f->parts.shard->rank == 0 ? f->parts.weights->position_table : none,
                           .out = partial(f, rows)};
    dskv_op_embed(f->parts.device, &p);
    enum dskv_exit code = dskv_comm_sum(f->parts.comm, rows, x.cols, x.dtype, &sum, error);
    if (code)
        return code;
    const void *const whole[] = {sum.data};
    struct dskv_sum copy = {whole, 1, x};
    dskv_op_sum(f->parts.device, &copy);
    const struct dskv_layer_weights *first = &f->parts.weights->layers[0];
    norm(f, x, first->norm1_weight, first->norm1_bias, buffer(f, f->h, rows, x.cols));
    return DSKV_EXIT_OK;
}

/* Keys and values to their slots; queries and keys are rotated on the way, where the model rotates. */
static void store(const struct dskv_forward *f, const struct dskv_pass *pass, int32_t layer, struct dskv_tensor q_and_k,
                  struct dskv_tensor k, struct dskv_tensor v)
{
    const struct dskv_model *m = f->parts.model;
    struct dskv_rope_kv_write p = {.rope = {.style = m->rope_style,
                                            .positions = pass->positions,
                                            .cos = f->parts.weights->rope_cos,
                                            .sin = f->parts.weights->rope_sin,
                                            .rotary_dim = m->positions == DSKV_POSITIONS_ROTARY ? m->rotary_dim : 0,
                                            .head_dim = m->head_dim,
                                            .n_heads = (int32_t)(q_and_k.cols / m->head_dim),
                                            .x = q_and_k},
                                   .write = {f->parts.kv, layer, pass->slots, k, v}};
    dskv_op_rope_kv_write(f->parts.device, &p);
}

static void attend(const struct dskv_forward *f, const struct dskv_pass *pass, int32_t layer, struct dskv_tensor q,
                   struct dskv_tensor out)
{
    const struct dskv_model *m = f->parts.model;
    struct dskv_attention p = {.kv = f->parts.kv,
                               .layer = layer,
                               .scale =
                                   m->scale_by_layer ? m->attention_scale / (float)(layer + 1) : m->attention_scale,
                               .n_heads_local = f->parts.shard->n_heads_local,
                               .kv_head_of_head = f->kv_head_of_head,
                               .work = pass->work,
                               .n_work = pass->n_work,
                               .max_keys = pass->max_keys,
                               .tables = pass->tables,
                               .q = q,
                               .out = out};
    dskv_op_attention(f->parts.device, &p);
}

/* x += o(attention(h)), h = norm2(x) */
static enum dskv_exit attention_part(const struct dskv_forward *f, const struct dskv_pass *pass, int32_t layer,
                                     struct dskv_error *error)
{
    const struct dskv_layer_weights *w = &f->parts.weights->layers[layer];
    int64_t rows = pass->rows, head_dim = f->parts.model->head_dim;
    int64_t q_cols = f->parts.shard->n_heads_local * head_dim, kv_cols = f->parts.shard->n_kv_heads_local * head_dim;
    struct dskv_tensor h = buffer(f, f->h, rows, f->parts.model->width);
    struct dskv_tensor qkv = buffer(f, f->wide, rows, q_cols + 2 * kv_cols);
    struct dskv_tensor q = dskv_tensor_cols(qkv, 0, q_cols);
    struct dskv_tensor k = dskv_tensor_cols(qkv, q_cols, kv_cols);
    struct dskv_tensor v = dskv_tensor_cols(qkv, q_cols + kv_cols, kv_cols);
    struct dskv_tensor heads = buffer(f, f->narrow, rows, q_cols);

    matmul(f, h, w->qkv, w->qkv_bias, qkv);
    store(f, pass, layer, dskv_tensor_cols(qkv, 0, q_cols + kv_cols), k, v);
    attend(f, pass, layer, q, heads);
    matmul(f, heads, w->o, NULL, partial(f, rows));
    return add_partials(f, rows, w->o_bias, w->norm2_weight, w->norm2_bias, error);
}

/* x += down(act(up(h))), h = norm1(x) of the next layer, after the last one the final norm */
static enum dskv_exit mlp_part(const struct dskv_forward *f, const struct dskv_pass *pass, int32_t layer,
                               struct dskv_error *error)
{
    const struct dskv_model *m = f->parts.model;
    const struct dskv_layer_weights *w = &f->parts.weights->layers[layer];
    int is_last = layer + 1 == m->n_layers;
    int64_t rows = pass->rows, mlp = f->parts.shard->n_mlp_local;
    struct dskv_tensor h = buffer(f, f->h, rows, m->width);
    struct dskv_tensor up = buffer(f, f->wide, rows, m->gated ? 2 * mlp : mlp);
    struct dskv_tensor act = buffer(f, f->narrow, rows, mlp);

    struct dskv_matmul_activate activate = {{h, w->up, w->up_bias, up}, {m->activation, m->gated, up, act}};
    dskv_op_matmul_activate(f->parts.device, &activate);
    matmul(f, act, w->down, NULL, partial(f, rows));
    return add_partials(f, rows, w->down_bias, is_last ? f->parts.weights->norm_weight : w[1].norm1_weight,
                        is_last ? f->parts.weights->norm_bias : w[1].norm1_bias, error);
}

enum dskv_exit dskv_forward_run(const struct dskv_forward *f, const struct dskv_pass *pass, struct dskv_error *error)
{
    enum dskv_exit code = embed(f, pass, error);
    for (int32_t layer = 0; !code && layer < f->parts.model->n_layers; layer++) {
        code = attention_part(f, pass, layer, error);
        if (!code)
            code = mlp_part(f, pass, layer, error);
    }
    return code;
}

struct dskv_tensor dskv_forward_result(const struct dskv_forward *f, int32_t rows)
{
    return buffer(f, f->h, rows, f->parts.model->width);
}

/* ---- buffers ------------------------------------------------------------------------------------ */

#define BUFFER_ALIGNMENT 64

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Takes the next rows * cols elements from the allocation; called once with memory null to measure. */
static void *carve(const struct dskv_forward *f, size_t *at, int64_t rows, int64_t cols, size_t element_bytes)
{
    void *place = f->memory ? f->memory + *at : NULL;
    size_t bytes = (size_t)rows * (size_t)cols * element_bytes;
    *at += (bytes + BUFFER_ALIGNMENT - 1) / BUFFER_ALIGNMENT * BUFFER_ALIGNMENT;
    return place;
}

static size_t place_buffers(struct dskv_forward *f)
{
    const struct dskv_model *m = f->parts.model;
    const struct dskv_shard *s = f->parts.shard;
    size_t element = dskv_dtype_bytes(f->parts.activation_dtype), at = 0;
    int64_t rows = f->parts.bounds.max_tokens;
    int64_t qkv = (s->n_heads_local + 2 * (int64_t)s->n_kv_heads_local) * m->head_dim;
    int64_t up = (m->gated ? 2 : 1) * (int64_t)s->n_mlp_local;
    f->x = carve(f, &at, rows, m->width, element);
    f->h = carve(f, &at, rows, m->width, element);
    f->wide = carve(f, &at, rows, larger(qkv, up), element);
    f->narrow = carve(f, &at, rows, larger((int64_t)s->n_heads_local * m->head_dim, s->n_mlp_local), element);
    f->kv_head_of_head = carve(f, &at, 1, s->n_heads_local, sizeof(int32_t));
    return at;
}

static void fill_kv_head_of_head(struct dskv_forward *f)
{
    const struct dskv_model *m = f->parts.model;
    const struct dskv_shard *s = f->parts.shard;
    int32_t map[DSKV_MAX_HEADS];
    for (int32_t h = 0; h < s->n_heads_local; h++)
        map[h] = (s->first_head + h) / (m->n_heads / m->n_kv_heads) - s->first_kv_head;
    dskv_device_upload(f->parts.device, f->kv_head_of_head, map, (size_t)s->n_heads_local * sizeof *map);
}

enum dskv_exit dskv_forward_open(const struct dskv_forward_parts *parts, struct dskv_forward **forward,
                                 struct dskv_error *error)
{
    struct dskv_forward *f = dskv_calloc(1, sizeof *f);
    f->parts = *parts;
    f->memory_bytes = place_buffers(f);
    f->memory = dskv_device_alloc(parts->device, f->memory_bytes);
    place_buffers(f);
    if (!f->memory) {
        enum dskv_exit code =
            dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes of activations: lower --max-batch-tokens",
                           f->memory_bytes);
        dskv_forward_close(&f);
        return code;
    }
    fill_kv_head_of_head(f);
    *forward = f;
    return DSKV_EXIT_OK;
}

void dskv_forward_close(struct dskv_forward **forward)
{
    struct dskv_forward *f = *forward;
    if (!f)
        return;
    if (f->memory)
        dskv_device_free(f->parts.device, f->memory, f->memory_bytes);
    free(f);
    *forward = NULL;
}
