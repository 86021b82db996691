/* Forward: the transformer, once, for every family and every number of ranks.
 *
 * A rank holds some heads, some MLP columns and some of the vocabulary; everything between the sums is replicated.
 * Partials are written where the comm wants them, summed in rank order, and only then are the output biases and the
 * residual added.
 *
 * The transformer itself is embed, attention_part, mlp_part and run_pass, which goes through the layers; the head is in
 * select.c.
 */
#include "parallel/forward.h"

#include "base/memory.h"
#include "parallel/plan_layout.h"
#include "parallel/recorded.h"
#include "parallel/select.h"

#include <stdlib.h>
#include <string.h>

#define MAX_RECORDED_ROWS 128 /* above, computing takes longer than queueing operation by operation */

/* A step under way. */
struct under_way {
    const struct dskv_plan *plan;
    dskv_mark end;
};

struct dskv_forward {
    struct dskv_forward_parts parts;
    struct dskv_select_state *select;
    struct dskv_recorded *recorded; /* null where nothing can be recorded */
    char *memory;                   /* all buffers below, one device allocation */
    size_t memory_bytes;
    void *x, *h;              /* [max_tokens, width]: the residual stream; its norm */
    void *wide, *narrow;      /* [max_tokens, qkv or up columns]; [max_tokens, heads or MLP columns] */
    int32_t *kv_head_of_head; /* [n_heads_local] */
    struct dskv_turn *turn;   /* of the two places for plans, and for reports */
    /* Null where the device reads host memory: the plan there, and the places that it comes from. */
    struct dskv_plan *device_plan;
    struct dskv_turns plans;
    struct under_way steps[DSKV_STEPS_UNDER_WAY];
    uint32_t n_submitted, n_collected;
};

/* Sizes of a pass, and all else that its operations depend on but the content of device memory. */
struct shape {
    struct dskv_plan_sizes capacity; /* says where the plan's sections lie */
    int32_t n_copies, rows, n_work;
    int32_t max_keys; /* of the row that sees most */
    int32_t is_last;  /* there is no second chunk */
    struct dskv_select_chunk chunk;
};

/* What a pass runs on: its shape, and the plan's sections in device memory. */
struct pass {
    struct shape shape;
    size_t plan_bytes;
    const int32_t *ids, *positions, *slots, *tables;
    const struct dskv_attention_work *work;
    const struct dskv_block_copy *copies;
    struct dskv_select_rows rows;
};

size_t dskv_forward_slot_bytes(const struct dskv_model *model, const struct dskv_device *device,
                               enum dskv_dtype activation_dtype, int32_t n_ranks, int32_t max_tokens)
{
    size_t sums = (size_t)max_tokens * (size_t)model->width * dskv_dtype_bytes(activation_dtype);
    size_t rows = dskv_select_slot_bytes(model, device, n_ranks, max_tokens);
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

static size_t largest_plan_bytes(const struct dskv_forward *f)
{
    struct dskv_plan_sizes largest = dskv_plan_largest(&f->parts.bounds);
    return dskv_plan_bytes(&largest);
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
    f->turn = carve(f, &at, 1, 1, sizeof *f->turn);
    if (!dskv_device_is_host(f->parts.device))
        f->device_plan = carve(f, &at, 1, (int64_t)largest_plan_bytes(f), 1);
    return at;
}

/* Host memory from which plans are sent while the host goes on. */
static int open_queue(struct dskv_forward *f)
{
    if (dskv_comm_is_queued(f->parts.comm) && !dskv_device_is_host(f->parts.device))
        f->recorded = dskv_recorded_open(f->parts.device);
    f->plans.turn = f->turn;
    for (int i = 0; f->device_plan && i < 2; i++)
        if (!(f->plans.places[i] = dskv_device_host_alloc(f->parts.device, largest_plan_bytes(f))))
            return 0;
    return 1;
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
    enum dskv_exit code = DSKV_EXIT_OK;
    if (!f->memory || !open_queue(f))
        code = dskv_fail_exit(error, DSKV_EXIT_MEMORY,
                              "no memory for %zu bytes of activations: lower --max-batch-tokens", f->memory_bytes);
    if (!code)
        code = dskv_select_open(parts, f->turn, &f->select, error);
    if (code) {
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
    dskv_recorded_close(&f->recorded);
    dskv_select_close(&f->select);
    for (int i = 0; i < 2; i++)
        dskv_device_host_free(f->parts.device, f->plans.places[i], largest_plan_bytes(f));
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
static enum dskv_exit embed(const struct dskv_forward *f, const struct pass *pass, struct dskv_error *error)
{
    int64_t rows = pass->shape.rows;
    struct dskv_tensor none = {0}, sum, x = buffer(f, f->x, rows, f->parts.model->width);
    struct dskv_embed p = {.ids = pass->ids,
                           .positions = pass->positions,
                           .drawn = dskv_select_drawn(f->select),
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
static void store(const struct dskv_forward *f, const struct pass *pass, int32_t layer, struct dskv_tensor q_and_k,
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

static void attend(const struct dskv_forward *f, const struct pass *pass, int32_t layer, struct dskv_tensor q,
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
                               .n_work = pass->shape.n_work,
                               .max_keys = pass->shape.max_keys,
                               .tables = pass->tables,
                               .q = q,
                               .out = out};
    dskv_op_attention(f->parts.device, &p);
}

/* x += o(attention(h)), h = norm2(x) */
static enum dskv_exit attention_part(const struct dskv_forward *f, const struct pass *pass, int32_t layer,
                                     struct dskv_error *error)
{
    const struct dskv_layer_weights *w = &f->parts.weights->layers[layer];
    int64_t rows = pass->shape.rows, head_dim = f->parts.model->head_dim;
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
static enum dskv_exit mlp_part(const struct dskv_forward *f, const struct pass *pass, int32_t layer,
                               struct dskv_error *error)
{
    const struct dskv_model *m = f->parts.model;
    const struct dskv_layer_weights *w = &f->parts.weights->layers[layer];
    int is_last = layer + 1 == m->n_layers;
    int64_t rows = pass->shape.rows, mlp = f->parts.shard->n_mlp_local;
    struct dskv_tensor h = buffer(f, f->h, rows, m->width);
    struct dskv_tensor up = buffer(f, f->wide, rows, m->gated ? 2 * mlp : mlp);
    struct dskv_tensor act = buffer(f, f->narrow, rows, mlp);

    struct dskv_matmul_activate activate = {{h, w->up, w->up_bias, up}, {m->activation, m->gated, up, act}};
    dskv_op_matmul_activate(f->parts.device, &activate);
    matmul(f, act, w->down, NULL, partial(f, rows));
    return add_partials(f, rows, w->down_bias, is_last ? f->parts.weights->norm_weight : w[1].norm1_weight,
                        is_last ? f->parts.weights->norm_bias : w[1].norm1_bias, error);
}

/* A step but for its further chunks: the plan comes in, blocks are copied, the transformer runs over the rows, the
 * first chunk of what is wanted of them is computed and reported. */
static enum dskv_exit run_pass(const struct dskv_forward *f, const struct pass *pass, struct dskv_error *error)
{
    const struct shape *shape = &pass->shape;
    struct dskv_receive receive = {f->plans, f->device_plan, pass->plan_bytes};
    struct dskv_kv_copy copy = {f->parts.kv, pass->copies, shape->n_copies};
    enum dskv_exit code = DSKV_EXIT_OK;
    if (f->device_plan)
        dskv_op_receive(f->parts.device, &receive);
    dskv_op_kv_copy(f->parts.device, &copy);
    if (shape->rows)
        code = embed(f, pass, error);
    for (int32_t layer = 0; shape->rows && !code && layer < f->parts.model->n_layers; layer++) {
        code = attention_part(f, pass, layer, error);
        if (!code)
            code = mlp_part(f, pass, layer, error);
    }
    if (!code && shape->chunk.n_rows)
        code = dskv_select_compute(f->select, &shape->chunk, &pass->rows,
                                   buffer(f, f->h, shape->rows, f->parts.model->width), error);
    if (!code)
        dskv_select_report(f->select, &shape->chunk, shape->is_last);
    return code;
}

/* ---- steps -------------------------------------------------------------------------------------- */

static int32_t count_max_keys(const struct dskv_plan *plan)
{
    const struct dskv_attention_work *work = dskv_plan_work(plan);
    int32_t most = 0;
    for (int32_t i = 0; i < plan->used.n_work; i++)
        if (work[i].start + work[i].n_tokens > most)
            most = work[i].start + work[i].n_tokens;
    return most;
}

/* What the step uses; rounded up where passes are recorded, within the plan's bucket and the buffers. */
static struct shape shape_of(const struct dskv_forward *f, const struct dskv_plan *plan)
{
    struct shape shape;
    memset(&shape, 0, sizeof shape); /* a key is compared as bytes */
    shape.capacity = plan->capacity;
    shape.n_copies = plan->used.n_copies;
    shape.rows = plan->used.n_tokens;
    shape.n_work = plan->used.n_work;
    shape.max_keys = count_max_keys(plan);
    shape.chunk = dskv_select_chunk_at(f->select, plan, 0);
    shape.is_last = plan->used.n_rows <= dskv_select_chunk_rows(f->select);
    if (!f->recorded)
        return shape;
    int32_t rows = dskv_recorded_size(shape.rows), keys = DSKV_KEY_PIECE;
    while (keys < shape.max_keys)
        keys *= 2;
    shape.rows = rows <= f->parts.bounds.max_tokens ? rows : shape.rows;
    shape.max_keys = keys;
    return shape;
}

/* The plan where the device will read it: in place, or where the step begins with receiving it. */
static const struct dskv_plan *place_plan(const struct dskv_forward *f, const struct dskv_plan *plan)
{
    if (!f->device_plan)
        return plan;
    memcpy(f->plans.places[f->n_submitted % 2], plan, plan->bytes);
    return f->device_plan;
}

/* The head of the plan is read on the host, its sections lie at the same offsets on the device. */
static const void *section_at(const struct dskv_plan *device_plan, const struct dskv_plan *plan,
                              enum dskv_plan_section s)
{
    return (const char *)device_plan + plan->offset[s];
}

/* Queues the pass: again as it was recorded, or recording it, or operation by operation. */
static enum dskv_exit queue_pass(struct dskv_forward *f, const struct pass *pass, struct dskv_error *error)
{
    _Static_assert(sizeof pass->shape == DSKV_RECORDED_KEY_BYTES, "a shape is the key of a recording");
    const struct dskv_recording *known = NULL;
    int is_due = 0;
    if (f->recorded && pass->shape.rows <= MAX_RECORDED_ROWS)
        known = dskv_recorded_find(f->recorded, &pass->shape, &is_due);
    if (!known && is_due && dskv_device_record_begin(f->parts.device)) {
        enum dskv_exit code = run_pass(f, pass, error);
        struct dskv_recording *recording = dskv_device_record_end(f->parts.device);
        if (code)
            return code;
        if (!recording && dskv_device_sync(f->parts.device, error))
            return DSKV_EXIT_DEVICE;
        if (!recording)
            return dskv_fail_exit(error, DSKV_EXIT_BUG,
                                  "a step's pass was not recorded, and the device knows no reason");
        dskv_recorded_keep(f->recorded, recording);
        known = recording;
    }
    if (!known)
        return run_pass(f, pass, error);
    dskv_device_replay(f->parts.device, known);
    return DSKV_EXIT_OK;
}

/* What is wanted of rows beyond the first chunk, and rows that are wanted whole. */
static enum dskv_exit queue_further(const struct dskv_forward *f, const struct dskv_plan *plan, const struct pass *pass,
                                    struct dskv_error *error)
{
    struct dskv_tensor h = buffer(f, f->h, pass->shape.rows, f->parts.model->width);
    int32_t chunk_rows = dskv_select_chunk_rows(f->select);
    dskv_select_fetch(f->select, plan, &pass->shape.chunk);
    for (int32_t first = chunk_rows; first < plan->used.n_rows; first += chunk_rows) {
        struct dskv_select_chunk chunk = dskv_select_chunk_at(f->select, plan, first);
        enum dskv_exit code = dskv_select_compute(f->select, &chunk, &pass->rows, h, error);
        if (code)
            return code;
        dskv_select_report(f->select, &chunk, first + chunk_rows >= plan->used.n_rows);
        dskv_select_fetch(f->select, plan, &chunk);
    }
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_forward_submit(struct dskv_forward *f, const struct dskv_plan *plan, struct dskv_error *error)
{
    DSKV_ASSERT(f->n_submitted - f->n_collected < DSKV_STEPS_UNDER_WAY, "%u steps are under way",
                f->n_submitted - f->n_collected);
    const struct dskv_plan *device_plan = place_plan(f, plan);
    const struct pass pass = {.shape = shape_of(f, plan),
                              .plan_bytes = plan->bytes,
                              .ids = section_at(device_plan, plan, DSKV_PLAN_IDS),
                              .positions = section_at(device_plan, plan, DSKV_PLAN_POSITIONS),
                              .slots = section_at(device_plan, plan, DSKV_PLAN_SLOTS),
                              .tables = section_at(device_plan, plan, DSKV_PLAN_TABLES),
                              .work = section_at(device_plan, plan, DSKV_PLAN_WORK),
                              .copies = section_at(device_plan, plan, DSKV_PLAN_COPIES),
                              .rows = {.tokens = section_at(device_plan, plan, DSKV_PLAN_ROW_TOKENS),
                                       .targets = section_at(device_plan, plan, DSKV_PLAN_ROW_TARGETS),
                                       .sampling = section_at(device_plan, plan, DSKV_PLAN_SAMPLING)}};
    enum dskv_exit code = queue_pass(f, &pass, error);
    if (!code)
        code = queue_further(f, plan, &pass, error);
    f->steps[f->n_submitted++ % 2] = (struct under_way){plan, dskv_device_mark(f->parts.device)};
    return code;
}

int dskv_forward_reached(struct dskv_forward *f)
{
    return dskv_device_reached(f->parts.device, f->steps[f->n_collected % 2].end);
}

enum dskv_exit dskv_forward_collect(struct dskv_forward *f, const struct dskv_row_result **results,
                                    struct dskv_error *error)
{
    DSKV_ASSERT(f->n_submitted != f->n_collected, "no step is under way");
    int place = f->n_collected++ % 2;
    if (dskv_device_wait(f->parts.device, f->steps[place].end, error))
        return DSKV_EXIT_DEVICE;
    *results = dskv_select_results(f->select, f->steps[place].plan, place);
    return DSKV_EXIT_OK;
}

struct dskv_turn_times dskv_forward_times(const struct dskv_forward *f)
{
    DSKV_ASSERT(f->n_collected > 0, "no step was collected");
    return dskv_select_times(f->select, (f->n_collected - 1) % 2);
}
