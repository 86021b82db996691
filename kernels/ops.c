/* Checked wrappers: every shape is asserted here, once for all devices, before the device's own operation runs.
 *
 * What lies in device memory (ids, slots, tables) is the device's to check, where it can.  An operation with nothing to
 * write returns before the device sees it.
 */
#include "kernels/trace.h"

#include "base/limits.h"

/* A tensor of rows x cols floats. */
static void check_tensor(const char *operation, const char *what, const struct dskv_tensor *t, int64_t rows,
                         int64_t cols)
{
    DSKV_ASSERT(t->rows == rows && t->cols == cols && t->stride >= t->cols && t->dtype <= DSKV_BF16,
                "%s: %s is [%lld, %lld], stride %lld, %s; expected [%lld, %lld]", operation, what, (long long)t->rows,
                (long long)t->cols, (long long)t->stride, dskv_dtype_name(t->dtype), (long long)rows, (long long)cols);
    DSKV_ASSERT(t->data || rows == 0 || cols == 0, "%s: %s is null", operation, what);
}

/* The same, as an activation: all activations of a call are of one dtype, and the device must compute in it. */
static void check_activation(struct dskv_device *device, const char *operation, const char *what,
                             const struct dskv_tensor *t, int64_t rows, int64_t cols)
{
    check_tensor(operation, what, t, rows, cols);
    DSKV_ASSERT(device->table->activation_dtype(t->dtype) == t->dtype, "%s: %s is %s", operation, what,
                dskv_dtype_name(t->dtype));
}

static void check_same_dtype(const char *operation, const struct dskv_tensor *a, const struct dskv_tensor *b)
{
    DSKV_ASSERT(a->dtype == b->dtype, "%s: %s and %s", operation, dskv_dtype_name(a->dtype), dskv_dtype_name(b->dtype));
}

static void check_kv(const char *operation, const struct dskv_kv *kv, int32_t layer)
{
    DSKV_ASSERT(kv->dtype <= DSKV_BF16 && kv->n_blocks >= 0 && kv->n_kv_heads_local >= 1, "%s: %s, %d blocks, %d heads",
                operation, dskv_dtype_name(kv->dtype), kv->n_blocks, kv->n_kv_heads_local);
    DSKV_ASSERT(kv->head_dim >= 1 && kv->head_dim <= DSKV_MAX_HEAD_DIM, "%s: head_dim %d", operation, kv->head_dim);
    DSKV_ASSERT(kv->block_tokens >= DSKV_MIN_BLOCK_TOKENS && kv->block_tokens <= DSKV_MAX_BLOCK_TOKENS &&
                    kv->block_tokens % 16 == 0,
                "%s: block_tokens %d", operation, kv->block_tokens);
    DSKV_ASSERT(layer >= 0 && layer < kv->n_layers, "%s: layer %d of %d", operation, layer, kv->n_layers);
    DSKV_ASSERT(kv->block_bytes == dskv_kv_block_bytes(kv), "%s: block_bytes %zu, expected %zu", operation,
                kv->block_bytes, dskv_kv_block_bytes(kv));
    DSKV_ASSERT(kv->data || kv->n_blocks == 0, "%s: no pool", operation);
}

static void trace(struct dskv_device *device, const char *operation, const struct dskv_tensor *t)
{
    if (device->trace)
        dskv_trace_tensor(device, operation, t);
}

void dskv_op_embed(struct dskv_device *device, const struct dskv_embed *p)
{
    check_activation(device, "embed", "out", &p->out, p->out.rows, p->table->k);
    if (p->position_table.data) {
        check_tensor("embed", "position_table", &p->position_table, p->position_table.rows, p->out.cols);
        DSKV_ASSERT(p->position_table.dtype == DSKV_F32, "position_table is %s",
                    dskv_dtype_name(p->position_table.dtype));
        DSKV_ASSERT(p->positions || p->out.rows == 0, "no positions");
    }
    DSKV_ASSERT(p->first >= 0 && (p->ids || p->out.rows == 0), "first %d, ids %p", p->first, (const void *)p->ids);
    if (p->out.rows == 0 || p->out.cols == 0)
        return;
    device->ops->embed(device, p);
    trace(device, "embed", &p->out);
}

static void check_norm(struct dskv_device *device, const struct dskv_norm *p)
{
    check_activation(device, "norm", "x", &p->x, p->x.rows, p->x.cols);
    check_activation(device, "norm", "out", &p->out, p->x.rows, p->x.cols);
    check_same_dtype("norm", &p->x, &p->out);
    DSKV_ASSERT(p->kind == DSKV_LAYER_NORM || p->kind == DSKV_RMS_NORM, "kind %d", (int)p->kind);
    DSKV_ASSERT(p->weight || p->x.rows == 0 || p->x.cols == 0, "norm has no weight");
}

void dskv_op_norm(struct dskv_device *device, const struct dskv_norm *p)
{
    check_norm(device, p);
    if (p->x.rows == 0 || p->x.cols == 0)
        return;
    device->ops->norm(device, p);
    trace(device, "norm", &p->out);
}

static void check_matmul(struct dskv_device *device, const struct dskv_matmul *p)
{
    check_activation(device, "matmul", "x", &p->x, p->x.rows, p->w->k);
    check_tensor("matmul", "y", &p->y, p->x.rows, p->w->n);
    DSKV_ASSERT(p->y.dtype == DSKV_F32 || p->y.dtype == p->x.dtype, "matmul: y is %s, x %s",
                dskv_dtype_name(p->y.dtype), dskv_dtype_name(p->x.dtype));
}

void dskv_op_matmul(struct dskv_device *device, const struct dskv_matmul *p)
{
    check_matmul(device, p);
    if (p->y.rows == 0 || p->y.cols == 0)
        return;
    device->ops->matmul(device, p);
    trace(device, "matmul", &p->y);
}

static int rotates_nothing(const struct dskv_rope *p)
{
    return p->x.rows == 0 || p->n_heads == 0 || p->rotary_dim == 0;
}

static void check_rope(struct dskv_device *device, const struct dskv_rope *p)
{
    check_activation(device, "rope", "x", &p->x, p->x.rows, (int64_t)p->n_heads * p->head_dim);
    DSKV_ASSERT(p->rotary_dim >= 0 && p->rotary_dim % 2 == 0 && p->rotary_dim <= p->head_dim, "rotary_dim %d of %d",
                p->rotary_dim, p->head_dim);
    DSKV_ASSERT(p->style == DSKV_ROPE_HALVES || p->style == DSKV_ROPE_PAIRS, "style %d", (int)p->style);
    DSKV_ASSERT(rotates_nothing(p) || (p->positions && p->cos && p->sin), "rope: no positions or table");
}

void dskv_op_rope(struct dskv_device *device, const struct dskv_rope *p)
{
    check_rope(device, p);
    if (rotates_nothing(p))
        return;
    device->ops->rope(device, p);
    trace(device, "rope", &p->x);
}

size_t dskv_kv_block_bytes(const struct dskv_kv *shape)
{
    /* Values are padded to whole vectors of 16 on every device; see kernels/cpu/cpu.h. */
    size_t value_stride = ((size_t)shape->head_dim + 15) / 16 * 16;
    return (size_t)shape->n_layers * (size_t)shape->n_kv_heads_local * (size_t)shape->block_tokens *
           ((size_t)shape->head_dim + value_stride) * dskv_dtype_bytes(shape->dtype);
}

static void check_kv_write(struct dskv_device *device, const struct dskv_kv_write *p)
{
    const int64_t cols = (int64_t)p->kv.n_kv_heads_local * p->kv.head_dim;
    check_kv("kv_write", &p->kv, p->layer);
    check_activation(device, "kv_write", "k", &p->k, p->k.rows, cols);
    check_activation(device, "kv_write", "v", &p->v, p->k.rows, cols);
    check_same_dtype("kv_write", &p->k, &p->v);
}

void dskv_op_kv_write(struct dskv_device *device, const struct dskv_kv_write *p)
{
    check_kv_write(device, p);
    if (p->k.rows == 0)
        return;
    device->ops->kv_write(device, p);
    trace(device, "kv_write k", &p->k); /* what went in: the pool is too large, and its layout the device's own */
    trace(device, "kv_write v", &p->v);
}

void dskv_op_rope_kv_write(struct dskv_device *device, const struct dskv_rope_kv_write *p)
{
    if (!device->ops->rope_kv_write || rotates_nothing(&p->rope)) {
        dskv_op_rope(device, &p->rope);
        dskv_op_kv_write(device, &p->write);
        return;
    }
    check_rope(device, &p->rope);
    check_kv_write(device, &p->write);
    const struct dskv_tensor *x = &p->rope.x, *k = &p->write.k;
    DSKV_ASSERT(k->rows == x->rows && k->cols <= x->cols && k->stride == x->stride && k->dtype == x->dtype &&
                    (const char *)k->data ==
                        (const char *)x->data + (size_t)(x->cols - k->cols) * dskv_dtype_bytes(x->dtype),
                "rope_kv_write: k is not the end of what is rotated");
    device->ops->rope_kv_write(device, p);
    trace(device, "rope", x);
    trace(device, "kv_write k", k);
    trace(device, "kv_write v", &p->write.v);
}

void dskv_op_attention(struct dskv_device *device, const struct dskv_attention *p)
{
    const int64_t cols = (int64_t)p->n_heads_local * p->kv.head_dim;
    check_kv("attention", &p->kv, p->layer);
    check_activation(device, "attention", "q", &p->q, p->q.rows, cols);
    check_activation(device, "attention", "out", &p->out, p->q.rows, cols);
    check_same_dtype("attention", &p->q, &p->out);
    DSKV_ASSERT(p->n_work >= 0 && p->n_heads_local <= DSKV_MAX_HEADS, "attention: %d works, %d heads", p->n_work,
                p->n_heads_local);
    if (p->n_work == 0 || p->n_heads_local == 0 || p->q.rows == 0)
        return;
    device->ops->attention(device, p);
    trace(device, "attention", &p->out);
}

static void check_activate(struct dskv_device *device, const struct dskv_activate *p)
{
    check_activation(device, "activate", "x", &p->x, p->out.rows, p->gated ? 2 * p->out.cols : p->out.cols);
    check_activation(device, "activate", "out", &p->out, p->out.rows, p->out.cols);
    check_same_dtype("activate", &p->x, &p->out);
    DSKV_ASSERT((unsigned)p->kind < DSKV_N_ACTIVATIONS, "activation %d", (int)p->kind);
}

void dskv_op_activate(struct dskv_device *device, const struct dskv_activate *p)
{
    check_activate(device, p);
    if (p->out.rows == 0 || p->out.cols == 0)
        return;
    device->ops->activate(device, p);
    trace(device, "activate", &p->out);
}

void dskv_op_matmul_activate(struct dskv_device *device, const struct dskv_matmul_activate *p)
{
    const struct dskv_tensor *y = &p->matmul.y, *x = &p->activate.x;
    DSKV_ASSERT(y->data == x->data && y->stride == x->stride && y->dtype == x->dtype, "matmul_activate: x is not y");
    if (!device->ops->matmul_activate || y->rows == 0 || y->cols == 0) {
        dskv_op_matmul(device, &p->matmul);
        dskv_op_activate(device, &p->activate);
        return;
    }
    check_matmul(device, &p->matmul);
    check_activate(device, &p->activate);
    device->ops->matmul_activate(device, p);
    trace(device, "activate", &p->activate.out);
}

static void check_residual(struct dskv_device *device, const struct dskv_residual *p)
{
    check_activation(device, "residual", "x", &p->x, p->x.rows, p->x.cols);
    check_activation(device, "residual", "y", &p->y, p->x.rows, p->x.cols);
    check_same_dtype("residual", &p->x, &p->y);
}

void dskv_op_residual(struct dskv_device *device, const struct dskv_residual *p)
{
    check_residual(device, p);
    if (p->x.rows == 0 || p->x.cols == 0)
        return;
    device->ops->residual(device, p);
    trace(device, "residual", &p->x);
}

void dskv_op_residual_norm(struct dskv_device *device, const struct dskv_residual_norm *p)
{
    const struct dskv_tensor *x = &p->residual.x;
    DSKV_ASSERT(p->norm.x.data == x->data && p->norm.x.stride == x->stride, "residual_norm: two tensors x");
    if (!device->ops->residual_norm || x->rows == 0 || x->cols == 0) {
        dskv_op_residual(device, &p->residual);
        dskv_op_norm(device, &p->norm);
        return;
    }
    check_residual(device, &p->residual);
    check_norm(device, &p->norm);
    device->ops->residual_norm(device, p);
    trace(device, "residual", x);
    trace(device, "norm", &p->norm.out);
}

void dskv_op_sum(struct dskv_device *device, const struct dskv_sum *p)
{
    check_activation(device, "sum", "out", &p->out, p->out.rows, p->out.cols);
    DSKV_ASSERT(p->n >= 1 && p->out.stride == p->out.cols, "sum: %d partials, stride %lld of %lld", p->n,
                (long long)p->out.stride, (long long)p->out.cols);
    for (int32_t i = 1; i < p->n; i++)
        DSKV_ASSERT(p->partials[i] != p->out.data || !p->out.data, "sum: partial %d of %d is the result", i, p->n);
    if (p->out.rows == 0 || p->out.cols == 0)
        return;
    device->ops->sum(device, p);
    trace(device, "sum", &p->out);
}

void dskv_op_gather_rows(struct dskv_device *device, const struct dskv_gather_rows *p)
{
    check_tensor("gather_rows", "x", &p->x, p->x.rows, p->x.cols);
    check_tensor("gather_rows", "out", &p->out, p->out.rows, p->x.cols);
    check_same_dtype("gather_rows", &p->x, &p->out);
    if (p->out.rows == 0 || p->out.cols == 0)
        return;
    device->ops->gather_rows(device, p);
    trace(device, "gather_rows", &p->out);
}

void dskv_op_select(struct dskv_device *device, const struct dskv_select *p)
{
    check_tensor("select", "logits", &p->logits, p->logits.rows, p->logits.cols);
    DSKV_ASSERT(p->logits.dtype == DSKV_F32 && p->first >= 0 && p->vocab >= 1, "select: %s, first %d, vocab %d",
                dskv_dtype_name(p->logits.dtype), p->first, p->vocab);
    DSKV_ASSERT(p->k >= 0 && p->k <= DSKV_MAX_TOPK, "select: k %d", p->k);
    if (p->logits.rows == 0)
        return;
    DSKV_ASSERT(p->stats && p->targets && (p->k == 0 || (p->top_values && p->top_ids)), "select: no place for results");
    device->ops->select(device, p);
    if (device->trace)
        dskv_trace_bytes(device, "select", p->stats, (size_t)p->logits.rows * sizeof *p->stats);
}

void dskv_op_choose(struct dskv_device *device, const struct dskv_choose *p)
{
    DSKV_ASSERT(p->n >= 1 && p->n <= DSKV_MAX_RANKS && p->rows >= 0, "choose: %d shards, %d rows", p->n, p->rows);
    if (p->rows == 0)
        return;
    DSKV_ASSERT(p->ids, "choose: no place for results");
    device->ops->choose(device, p);
    if (device->trace)
        dskv_trace_bytes(device, "choose", p->ids, (size_t)p->rows * sizeof *p->ids);
}

size_t dskv_sample_scratch_bytes(int64_t vocab)
{
    return (size_t)vocab * (sizeof(float) + sizeof(int32_t)); /* a weight and a candidate per id */
}

void dskv_op_sample(struct dskv_device *device, const struct dskv_sample *p)
{
    check_tensor("sample", "logits", &p->logits, p->logits.rows, p->logits.cols);
    DSKV_ASSERT(p->logits.dtype == DSKV_F32 && p->logits.cols >= 1 && p->logits.cols <= DSKV_MAX_VOCAB,
                "sample: %s, vocab %lld", dskv_dtype_name(p->logits.dtype), (long long)p->logits.cols);
    if (p->logits.rows == 0)
        return;
    DSKV_ASSERT(p->sampling && p->ids && p->scratch, "sample: no parameters, result or scratch");
    device->ops->sample(device, p);
    if (device->trace)
        dskv_trace_bytes(device, "sample", p->ids, (size_t)p->logits.rows * sizeof *p->ids);
}

void dskv_op_kv_copy(struct dskv_device *device, const struct dskv_kv_copy *p)
{
    check_kv("kv_copy", &p->kv, 0);
    DSKV_ASSERT(p->n >= 0, "kv_copy: %d copies", p->n);
    if (p->n == 0)
        return;
    device->ops->kv_copy(device, p);
    if (device->trace)
        dskv_trace_bytes(device, "kv_copy", p->copies, (size_t)p->n * sizeof *p->copies);
}

void dskv_op_receive(struct dskv_device *device, const struct dskv_receive *p)
{
    DSKV_ASSERT(p->from.turn && (uintptr_t)p->dst % 16 == 0 && p->bytes % 16 == 0, "receive: %zu bytes to %p", p->bytes,
                p->dst);
    if (p->bytes)
        device->ops->receive(device, p);
}

void dskv_op_report(struct dskv_device *device, const struct dskv_report *p)
{
    DSKV_ASSERT(p->to.turn && p->offset % 4 == 0 && p->offset >= sizeof(struct dskv_turn_times) && p->n_parts >= 0 &&
                    p->n_parts <= DSKV_MAX_REPORT_PARTS,
                "report: %d parts at %zu", p->n_parts, p->offset);
    size_t bytes = 0;
    for (int32_t i = 0; i < p->n_parts; i++) {
        bytes += p->bytes[i];
        DSKV_ASSERT(p->bytes[i] % 4 == 0 && bytes <= INT32_MAX, "report: part %d has %zu bytes", i, p->bytes[i]);
    }
    if (p->n_parts || p->passes_turn)
        device->ops->report(device, p);
}

static void check_dense(const char *operation, const struct dskv_kv_dense *p)
{
    check_kv(operation, &p->kv, p->layer);
    DSKV_ASSERT(p->first_head >= 0 && p->n_heads >= 0 && p->first_head <= p->kv.n_kv_heads_local - p->n_heads,
                "%s: heads [%d, + %d) of %d", operation, p->first_head, p->n_heads, p->kv.n_kv_heads_local);
    DSKV_ASSERT(p->start >= 0 && p->stop >= p->start, "%s: tokens [%d, %d)", operation, p->start, p->stop);
}

static void trace_dense(struct dskv_device *device, const char *operation, const struct dskv_kv_dense *p)
{
    size_t n = (size_t)p->n_heads * (size_t)(p->stop - p->start) * (size_t)p->kv.head_dim;
    if (device->trace)
        dskv_trace_bytes(device, operation, p->dense, n * dskv_dtype_bytes(p->kv.dtype));
}

void dskv_op_kv_gather(struct dskv_device *device, const struct dskv_kv_dense *p)
{
    check_dense("kv_gather", p);
    if (p->n_heads == 0 || p->stop == p->start)
        return;
    device->ops->kv_gather(device, p);
    trace_dense(device, "kv_gather", p);
}

void dskv_op_kv_scatter(struct dskv_device *device, const struct dskv_kv_dense *p)
{
    check_dense("kv_scatter", p);
    if (p->n_heads == 0 || p->stop == p->start)
        return;
    device->ops->kv_scatter(device, p);
    trace_dense(device, "kv_scatter", p);
}

static void check_exchange(struct dskv_device *device, const char *operation, const struct dskv_exchange *exchange,
                           size_t bytes)
{
    DSKV_ASSERT(device->ops->exchange_gather, "%s: not on this device", operation);
    DSKV_ASSERT(exchange->n >= 1 && exchange->n <= DSKV_MAX_PEERS && exchange->self >= 0 &&
                    exchange->self < exchange->n,
                "%s: peer %d of %d", operation, (int)exchange->self, (int)exchange->n);
    DSKV_ASSERT(bytes <= exchange->slot_bytes, "%s: %zu bytes of a slot of %zu", operation, bytes,
                exchange->slot_bytes);
}

static void check_exchange_tensor(struct dskv_device *device, const char *operation,
                                  const struct dskv_exchange *exchange, const struct dskv_tensor *t)
{
    check_activation(device, operation, "what the slots hold", t, t->rows, t->cols);
    check_exchange(device, operation, exchange, (size_t)t->rows * (size_t)t->cols * dskv_dtype_bytes(t->dtype));
    DSKV_ASSERT(t->stride == t->cols && t->data == dskv_exchange_sum(exchange), "%s: stride %lld of %lld, or not there",
                operation, (long long)t->stride, (long long)t->cols);
}

void dskv_op_exchange_gather(struct dskv_device *device, const struct dskv_exchange_gather *p)
{
    check_exchange(device, "exchange_gather", p->exchange, p->bytes);
    if (p->bytes == 0)
        return;
    device->ops->exchange_gather(device, p);
    for (int32_t i = 0; device->trace && i < p->exchange->n; i++)
        dskv_trace_bytes(device, "exchange_gather", dskv_exchange_part(p->exchange, i), p->bytes);
}

void dskv_op_exchange_add(struct dskv_device *device, const struct dskv_exchange_add *p)
{
    check_exchange_tensor(device, "exchange_add", p->exchange, &p->out);
    if (p->out.rows == 0 || p->out.cols == 0)
        return;
    device->ops->exchange_add(device, p);
    trace(device, "sum", &p->out);
}

void dskv_op_exchange_residual_norm(struct dskv_device *device, const struct dskv_exchange_residual_norm *p)
{
    const struct dskv_residual *residual = &p->then.residual;
    check_exchange_tensor(device, "exchange_residual_norm", p->exchange, &residual->y);
    check_residual(device, residual);
    check_norm(device, &p->then.norm);
    DSKV_ASSERT(p->then.norm.x.data == residual->x.data && p->then.norm.x.stride == residual->x.stride,
                "exchange_residual_norm: two tensors x");
    if (residual->x.rows == 0 || residual->x.cols == 0)
        return;
    if (!device->ops->exchange_residual_norm(device, p)) {
        struct dskv_exchange_add add = {p->exchange, residual->y};
        dskv_op_exchange_add(device, &add);
        dskv_op_residual_norm(device, &p->then);
        return;
    }
    trace(device, "residual", &residual->x);
    trace(device, "norm", &p->then.norm.out);
}
