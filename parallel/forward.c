/* Forward: the transformer, once, for every family and every number of ranks.
 *
 * A rank holds some heads, some MLP columns and some of the vocabulary; everything between the sums is replicated.
 * Partials are written where the comm wants them, summed in rank order, and only then are the output biases and the
 * residual added.
 */
#include "parallel/forward.h"

#include "base/memory.h"
#include "parallel/plan_layout.h"
#include "parallel/select.h"

#include <stdlib.h>

struct dskv_forward {
    struct dskv_forward_parts parts;
    struct dskv_select_state *select;
    char *memory; /* all buffers below, one device allocation */
    size_t memory_bytes;
    void *x, *h;                   /* [max_tokens, width]: the residual stream; its norm */
    void *wide, *narrow;           /* [max_tokens, qkv or up columns]; [max_tokens, heads or MLP columns] */
    int32_t *kv_head_of_head;      /* [n_heads_local] */
    struct dskv_plan *device_plan; /* null where the device reads host memory */
};

/* A step's sections in device memory, and its number of rows. */
struct step {
    int64_t rows;
    const int32_t *ids, *positions, *slots, *tables;
    const struct dskv_attention_work *work;
    const struct dskv_block_copy *copies;
    int32_t n_work, n_copies;
    int32_t max_keys; /* of the row that sees most */
};

size_t dskv_forward_slot_bytes(const struct dskv_model *model, int32_t n_ranks, int32_t max_tokens)
{
    size_t sums = (size_t)max_tokens * (size_t)model->width * dskv_dtype_bytes(DSKV_F32);
    size_t rows = dskv_select_slot_bytes(model, n_ranks, max_tokens);
    return sums > rows ? sums : rows;
}

/* ---- buffers ------------------------------------------------------------------------------------ */

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Takes the next rows * cols elements from the allocation; called once with memory null to measure. */
static void *carve(const struct dskv_forward *f, size_t *at, int64_t rows, int64_t cols, size_t element_bytes)
{
    void *place = f->memory ? f->memory + *at : NULL;
    size_t bytes = (size_t)rows * (size_t)cols * element_bytes;
    *at += (bytes + DSKV_PLAN_ALIGNMENT - 1) / DSKV_PLAN_ALIGNMENT * DSKV_PLAN_ALIGNMENT;
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
    if (!dskv_device_is_host(f->parts.device)) {
        struct dskv_plan_sizes largest = dskv_plan_largest(&f->parts.bounds);
        f->device_plan = carve(f, &at, 1, (int64_t)dskv_plan_bytes(&largest), 1);
    }
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
    enum dskv_exit code = DSKV_EXIT_OK;
    if (!f->memory)
        code = dskv_fail_exit(error, DSKV_EXIT_MEMORY,
                              "no memory for %zu bytes of activations: lower --max-batch-tokens", f->memory_bytes);
    if (!code)
        code = dskv_select_open(parts, &f->select, error);
    if (code) {
        dskv_forward_close(&f);
        return code;
    }
    place_buffers(f);
    fill_kv_head_of_head(f);
    *forward = f;
    return DSKV_EXIT_OK;
}

void dskv_forward_close(struct dskv_forward **forward)
{
    struct dskv_forward *f = *forward;
    if (!f)
        return;
    dskv_select_close(&f->select);
    if (f->memory)
        dskv_device_free(f->parts.device, f->memory, f->memory_bytes);
    free(f);
    *forward = NULL;
}

/* ---- the pass ----------------------------------------------------------------------------------- */

static struct dskv_tensor buffer(const struct dskv_forward *f, void *data, int64_t rows, int64_t cols)
{
    return dskv_tensor(data, f->parts.activation_dtype, rows, cols);
}

/* Where this rank writes its partial of [rows, width]. */
static struct dskv_tensor partial(const struct dskv_forward *f, int64_t rows)
{
    return buffer(f, dskv_comm_slot(f->parts.comm), rows, f->parts.model->width);
}

static enum dskv_exit sum_partials(const struct dskv_forward *f, int64_t rows, struct dskv_tensor *sum,
                                   struct dskv_error *error)
{
    return dskv_comm_sum(f->parts.comm, rows, f->parts.model->width, f->parts.activation_dtype, sum, error);
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

/* x = token embeddings, each from the rank that holds it, + position embeddings, which rank 0 adds to its partial. */
static enum dskv_exit embed(const struct dskv_forward *f, const struct step *step, struct dskv_tensor x,
                            struct dskv_error *error)
{
    struct dskv_tensor none = {0}, sum;
    struct dskv_embed p = {.ids = step->ids,
                           .positions = step->positions,
                           .table = f->parts.weights->embedding,
                           .first = f->parts.shard->first_vocab,
                           .position_table = f->parts.shard->rank == 0 ? f->parts.weights->position_table : none,
                           .out = partial(f, step->rows)};
    dskv_op_embed(f->parts.device, &p);
    enum dskv_exit code = sum_partials(f, step->rows, &sum, error);
    if (code)
        return code;
    const void *const whole[] = {sum.data};
    struct dskv_sum copy = {whole, 1, x};
    dskv_op_sum(f->parts.device, &copy);
    return DSKV_EXIT_OK;
}

static void rotate(const struct dskv_forward *f, const struct step *step, struct dskv_tensor q_and_k)
{
    const struct dskv_model *m = f->parts.model;
    if (m->positions != DSKV_POSITIONS_ROTARY)
        return;
    struct dskv_rope p = {.style = m->rope_style,
                          .positions = step->positions,
                          .cos = f->parts.weights->rope_cos,
                          .sin = f->parts.weights->rope_sin,
                          .rotary_dim = m->rotary_dim,
                          .head_dim = m->head_dim,
                          .n_heads = (int32_t)(q_and_k.cols / m->head_dim),
                          .x = q_and_k};
    dskv_op_rope(f->parts.device, &p);
}

static void attend(const struct dskv_forward *f, const struct step *step, int32_t layer, struct dskv_tensor q,
                   struct dskv_tensor out)
{
    const struct dskv_model *m = f->parts.model;
    struct dskv_attention p = {.kv = f->parts.kv,
                               .layer = layer,
                               .scale =
                                   m->scale_by_layer ? m->attention_scale / (float)(layer + 1) : m->attention_scale,
                               .n_heads_local = f->parts.shard->n_heads_local,
                               .kv_head_of_head = f->kv_head_of_head,
                               .work = step->work,
                               .n_work = step->n_work,
                               .max_keys = step->max_keys,
                               .tables = step->tables,
                               .q = q,
                               .out = out};
    dskv_op_attention(f->parts.device, &p);
}

/* x += o(attention(norm(x))) */
static enum dskv_exit attention_part(const struct dskv_forward *f, const struct step *step, int32_t layer,
                                     struct dskv_tensor x, struct dskv_error *error)
{
    const struct dskv_layer_weights *w = &f->parts.weights->layers[layer];
    int64_t rows = step->rows, head_dim = f->parts.model->head_dim;
    int64_t q_cols = f->parts.shard->n_heads_local * head_dim, kv_cols = f->parts.shard->n_kv_heads_local * head_dim;
    struct dskv_tensor h = buffer(f, f->h, rows, x.cols);
    struct dskv_tensor qkv = buffer(f, f->wide, rows, q_cols + 2 * kv_cols);
    struct dskv_tensor q = dskv_tensor_cols(qkv, 0, q_cols);
    struct dskv_tensor k = dskv_tensor_cols(qkv, q_cols, kv_cols);
    struct dskv_tensor v = dskv_tensor_cols(qkv, q_cols + kv_cols, kv_cols);
    struct dskv_tensor heads = buffer(f, f->narrow, rows, q_cols), sum;

    norm(f, x, w->norm1_weight, w->norm1_bias, h);
    matmul(f, h, w->qkv, w->qkv_bias, qkv);
    rotate(f, step, dskv_tensor_cols(qkv, 0, q_cols + kv_cols));
    struct dskv_kv_write write = {f->parts.kv, layer, step->slots, k, v};
    dskv_op_kv_write(f->parts.device, &write);
    attend(f, step, layer, q, heads);
    matmul(f, heads, w->o, NULL, partial(f, rows));
    enum dskv_exit code = sum_partials(f, rows, &sum, error);
    if (code)
        return code;
    struct dskv_residual residual = {x, sum, w->o_bias};
    dskv_op_residual(f->parts.device, &residual);
    return DSKV_EXIT_OK;
}

/* x += down(act(up(norm(x)))) */
static enum dskv_exit mlp_part(const struct dskv_forward *f, const struct step *step, int32_t layer,
                               struct dskv_tensor x, struct dskv_error *error)
{
    const struct dskv_model *m = f->parts.model;
    const struct dskv_layer_weights *w = &f->parts.weights->layers[layer];
    int64_t rows = step->rows, mlp = f->parts.shard->n_mlp_local;
    struct dskv_tensor h = buffer(f, f->h, rows, x.cols);
    struct dskv_tensor up = buffer(f, f->wide, rows, m->gated ? 2 * mlp : mlp);
    struct dskv_tensor act = buffer(f, f->narrow, rows, mlp), sum;

    norm(f, x, w->norm2_weight, w->norm2_bias, h);
    matmul(f, h, w->up, w->up_bias, up);
    struct dskv_activate activate = {m->activation, m->gated, up, act};
    dskv_op_activate(f->parts.device, &activate);
    matmul(f, act, w->down, NULL, partial(f, rows));
    enum dskv_exit code = sum_partials(f, rows, &sum, error);
    if (code)
        return code;
    struct dskv_residual residual = {x, sum, w->down_bias};
    dskv_op_residual(f->parts.device, &residual);
    return DSKV_EXIT_OK;
}

/* The plan where the device reads it: in place, or in one copy. */
static const struct dskv_plan *place_plan(const struct dskv_forward *f, const struct dskv_plan *plan)
{
    if (!f->device_plan)
        return plan;
    dskv_device_upload(f->parts.device, f->device_plan, plan, plan->bytes);
    return f->device_plan;
}

/* The head of the plan is read on the host, its sections lie at the same offsets on the device. */
static const void *section_at(const struct dskv_plan *device_plan, const struct dskv_plan *plan,
                              enum dskv_plan_section s)
{
    return (const char *)device_plan + plan->offset[s];
}

static int32_t count_max_keys(const struct dskv_plan *plan)
{
    const struct dskv_attention_work *work = dskv_plan_work(plan);
    int32_t most = 0;
    for (int32_t i = 0; i < plan->used.n_work; i++)
        if (work[i].start + work[i].n_tokens > most)
            most = work[i].start + work[i].n_tokens;
    return most;
}

enum dskv_exit dskv_forward_run(struct dskv_forward *f, const struct dskv_plan *plan,
                                const struct dskv_row_result **results, struct dskv_error *error)
{
    const struct dskv_plan *device_plan = place_plan(f, plan);
    const struct step step = {.rows = plan->used.n_tokens,
                              .ids = section_at(device_plan, plan, DSKV_PLAN_IDS),
                              .positions = section_at(device_plan, plan, DSKV_PLAN_POSITIONS),
                              .slots = section_at(device_plan, plan, DSKV_PLAN_SLOTS),
                              .tables = section_at(device_plan, plan, DSKV_PLAN_TABLES),
                              .work = section_at(device_plan, plan, DSKV_PLAN_WORK),
                              .copies = section_at(device_plan, plan, DSKV_PLAN_COPIES),
                              .n_work = plan->used.n_work,
                              .n_copies = plan->used.n_copies,
                              .max_keys = count_max_keys(plan)};
    struct dskv_tensor x = buffer(f, f->x, step.rows, f->parts.model->width);
    enum dskv_exit code = DSKV_EXIT_OK;
    if (step.n_copies) {
        struct dskv_kv_copy copy = {f->parts.kv, step.copies, step.n_copies};
        dskv_op_kv_copy(f->parts.device, &copy);
    }
    if (step.rows)
        code = embed(f, &step, x, error);
    for (int32_t layer = 0; step.rows && !code && layer < f->parts.model->n_layers; layer++) {
        code = attention_part(f, &step, layer, x, error);
        if (!code)
            code = mlp_part(f, &step, layer, x, error);
    }
    const int32_t *row_tokens = section_at(device_plan, plan, DSKV_PLAN_ROW_TOKENS);
    const int32_t *row_targets = section_at(device_plan, plan, DSKV_PLAN_ROW_TARGETS);
    if (!code)
        code = dskv_select_rows(f->select, plan, row_tokens, row_targets, x, results, error);
    if (!code && dskv_device_sync(f->parts.device, error))
        code = DSKV_EXIT_DEVICE;
    return code;
}
