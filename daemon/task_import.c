/* Import: a cache made of keys and values that the client sends in parts.
 *
 * Its blocks are taken at once and are nobody else's until the commit, so a failed import has changed nothing.  Every
 * token of every layer's keys and values comes exactly once, in any order.
 */
#include "base/memory.h"
#include "daemon/task.h"

#include <stdlib.h>
#include <string.h>

struct import {
    struct dskv_task task;
    int32_t length, n_blocks;
    int32_t *table;    /* [n_blocks], taken */
    uint8_t *seen;     /* bits [2 n_layers][length]: the tokens that came */
    int64_t n_missing; /* bits that are not set */
};

/* ---- the beginning ---------------------------------------------------------------------------------------------- */

static enum dskv_code refuse_shape(struct dskv_error *error, const char *field, int64_t given, int64_t wanted)
{
    dskv_fail(error, DSKV_WRONG_SHAPE, "%s is %lld, the model's is %lld", field, (long long)given, (long long)wanted);
    dskv_error_set_field(error, field);
    dskv_error_set_valid(error, "%lld", (long long)wanted);
    return DSKV_WRONG_SHAPE;
}

static enum dskv_code check_import(const struct dskv_state *state, const struct dskv_import *asked,
                                   struct dskv_error *error)
{
    const struct dskv_model *model = &state->info->model;
    if (asked->model[0] && strcmp(asked->model, model->fingerprint) != 0) {
        dskv_fail(error, DSKV_WRONG_MODEL, "the keys and values come from model %s, this one is %s", asked->model,
                  model->fingerprint);
        dskv_error_set_field(error, "model");
        dskv_error_set_valid(error, "%s", model->fingerprint);
        return DSKV_WRONG_MODEL;
    }
    if (asked->n_layers != model->n_layers)
        return refuse_shape(error, "n_layers", asked->n_layers, model->n_layers);
    if (asked->n_kv_heads != model->n_kv_heads)
        return refuse_shape(error, "n_kv_heads", asked->n_kv_heads, model->n_kv_heads);
    if (asked->head_dim != model->head_dim)
        return refuse_shape(error, "head_dim", asked->head_dim, model->head_dim);
    if (asked->dtype != state->info->kv_dtype && !asked->convert) {
        dskv_fail(error, DSKV_WRONG_DTYPE, "the keys and values are %s, caches are %s (convert was not asked for)",
                  dskv_dtype_name(asked->dtype), dskv_dtype_name(state->info->kv_dtype));
        dskv_error_set_field(error, "dtype");
        dskv_error_set_valid(error, "%s", dskv_dtype_name(state->info->kv_dtype));
        return DSKV_WRONG_DTYPE;
    }
    return DSKV_OK;
}

/* Takes the blocks and notes the tokens in them. */
static enum dskv_code take_blocks(struct dskv_state *state, struct import *import, const int32_t *tokens,
                                  struct dskv_error *error)
{
    int32_t block_tokens = dskv_blocks_block_tokens(state->blocks);
    int32_t n_blocks = dskv_blocks_for(state->blocks, import->length);
    enum dskv_code code = dskv_blocks_reserve(state->blocks, n_blocks, error);
    if (code)
        return code;
    import->table = dskv_calloc((size_t)n_blocks, sizeof *import->table);
    for (; import->n_blocks < n_blocks; import->n_blocks++) {
        int32_t block = dskv_blocks_take(state->blocks), start = import->n_blocks * block_tokens;
        int32_t left = import->length - start, n = left < block_tokens ? left : block_tokens;
        memcpy(dskv_blocks_tokens(state->blocks, block), tokens + start, (size_t)n * sizeof *tokens);
        import->table[import->n_blocks] = block;
    }
    return DSKV_OK;
}

static enum dskv_code import_begin(struct dskv_state *state, struct dskv_task *task, struct dskv_error *error)
{
    struct import *import = (struct import *)task;
    const struct dskv_import *asked = &task->request.import_;
    int32_t length = dskv_tensor_count(&asked->tokens);
    enum dskv_code code = check_import(state, asked, error);
    if (!code)
        code = dskv_task_check_tokens(state, &asked->tokens, "tokens", error);
    if (!code)
        code = dskv_task_check_length(state, length, error);
    if (!code)
        code = dskv_task_promise(state, task, 0, 1, error);
    if (code)
        return code;
    import->length = length;
    code = take_blocks(state, import, asked->tokens.data, error);
    if (code)
        return code;
    import->n_missing = (int64_t)length * 2 * state->info->model.n_layers;
    import->seen = dskv_calloc((size_t)import->n_missing / 8 + 1, 1);
    struct dskv_event event = {.kind = DSKV_EVENT_BEGIN};
    event.import_begin.credits = DSKV_MAX_CREDITS / 2;
    event.import_begin.part_tokens = dskv_engine_kv_piece_tokens(state->engine);
    dskv_state_post(state, task->ticket, &event);
    return DSKV_OK;
}

/* ---- parts ------------------------------------------------------------------------------------------------------ */

static int64_t bit_of(const struct import *import, int32_t layer, int32_t is_value, int32_t token)
{
    return ((int64_t)layer * 2 + is_value) * import->length + token;
}

static int is_seen(const struct import *import, int64_t bit)
{
    return import->seen[bit / 8] >> (bit % 8) & 1;
}

static enum dskv_code refuse_part(struct dskv_error *error, enum dskv_code code, const char *field,
                                  const struct dskv_part *part, const char *why)
{
    dskv_fail(error, code, "the part of layer %d %s, tokens %d .. %d: %s", part->layer, part->is_value ? "v" : "k",
              part->start, part->stop, why);
    dskv_error_set_field(error, field);
    return code;
}

static enum dskv_code check_place(const struct dskv_state *state, const struct import *import,
                                  const struct dskv_part *part, struct dskv_error *error)
{
    if (part->layer < 0 || part->layer >= state->info->model.n_layers) {
        refuse_part(error, DSKV_BAD_VALUE, "layer", part, "there is no such layer");
        dskv_error_set_valid(error, "0 .. %d", state->info->model.n_layers - 1);
        return DSKV_BAD_VALUE;
    }
    if (part->start < 0 || part->start >= part->stop || part->stop > import->length) {
        refuse_part(error, DSKV_BAD_VALUE, "stop", part, "there are no such tokens");
        dskv_error_set_valid(error, "start < stop <= %d", import->length);
        return DSKV_BAD_VALUE;
    }
    int32_t most = dskv_engine_kv_piece_tokens(state->engine);
    if (part->stop - part->start > most) {
        refuse_part(error, DSKV_BAD_VALUE, "stop", part, "too many for one part");
        dskv_error_set(error, DSKV_HAS_LIMIT, most);
        dskv_error_set(error, DSKV_HAS_LENGTH, part->stop - part->start);
        return DSKV_BAD_VALUE;
    }
    for (int32_t token = part->start; token < part->stop; token++)
        if (is_seen(import, bit_of(import, part->layer, part->is_value, token))) {
            refuse_part(error, DSKV_BAD_VALUE, "start", part, "some of it came before");
            dskv_error_set(error, DSKV_HAS_INDEX, token);
            return DSKV_BAD_VALUE;
        }
    return DSKV_OK;
}

static enum dskv_code check_data(const struct dskv_state *state, const struct import *import,
                                 const struct dskv_part *part, struct dskv_error *error)
{
    const struct dskv_model *model = &state->info->model;
    const struct dskv_wire_tensor *data = &part->data;
    enum dskv_dtype dtype = import->task.request.import_.dtype;
    if (data->dtype != dtype) {
        refuse_part(error, DSKV_WRONG_DTYPE, "data", part, "its dtype is not the import's");
        dskv_error_set_valid(error, "%s", dskv_dtype_name(dtype));
        return DSKV_WRONG_DTYPE;
    }
    if (data->n_dims != 3 || data->shape[0] != model->n_kv_heads || data->shape[1] != part->stop - part->start ||
        data->shape[2] != model->head_dim) {
        refuse_part(error, DSKV_WRONG_SHAPE, "data", part, "its shape is not [n_kv_heads, stop - start, head_dim]");
        dskv_error_set_valid(error, "[%d, %d, %d]", model->n_kv_heads, part->stop - part->start, model->head_dim);
        return DSKV_WRONG_SHAPE;
    }
    size_t n = data->bytes / dskv_dtype_bytes(dtype), index;
    if (!dskv_engine_kv_finite(state->engine, dtype, data->data, n, &index)) {
        refuse_part(error, DSKV_NOT_FINITE, "data", part, "a value is infinite or not a number, or becomes so");
        dskv_error_set(error, DSKV_HAS_INDEX, (int64_t)index);
        return DSKV_NOT_FINITE;
    }
    return DSKV_OK;
}

static void take_part(struct dskv_state *state, struct import *import, const struct dskv_part *part)
{
    struct dskv_error error;
    if (check_place(state, import, part, &error) || check_data(state, import, part, &error)) {
        dskv_task_fail(state, &import->task, &error);
        return;
    }
    struct dskv_kv_piece piece = {.layer = part->layer,
                                  .is_value = part->is_value,
                                  .start = part->start,
                                  .stop = part->stop,
                                  .table = import->table,
                                  .n_blocks = import->n_blocks};
    enum dskv_exit code = dskv_engine_copy_in(state->engine, &piece, part->data.dtype, part->data.data, &error);
    if (code) {
        dskv_state_break(state, code, &error);
        return;
    }
    for (int32_t token = part->start; token < part->stop; token++) {
        int64_t bit = bit_of(import, part->layer, part->is_value, token);
        import->seen[bit / 8] |= (uint8_t)(1u << (bit % 8));
    }
    import->n_missing -= part->stop - part->start;
    dskv_mailbox_give_credit(state->mailbox, import->task.ticket);
    struct dskv_event event = {.kind = DSKV_EVENT_CREDIT, .credit.n = 1};
    dskv_state_post(state, import->task.ticket, &event);
}

/* ---- the end ---------------------------------------------------------------------------------------------------- */

static void refuse_commit(struct dskv_state *state, struct import *import)
{
    int64_t bit = 0;
    while (is_seen(import, bit))
        bit++;
    int64_t plane = bit / import->length;
    struct dskv_error error;
    dskv_fail(&error, DSKV_BAD_VALUE, "%lld tokens' parts are missing, the first is layer %lld %s, token %lld",
              (long long)import->n_missing, (long long)plane / 2, plane % 2 ? "v" : "k",
              (long long)(bit % import->length));
    dskv_error_set_field(&error, "part");
    dskv_error_set(&error, DSKV_HAS_INDEX, bit % import->length);
    dskv_task_fail(state, &import->task, &error);
}

static void commit(struct dskv_state *state, struct import *import)
{
    if (import->n_missing) {
        refuse_commit(state, import);
        return;
    }
    if (import->n_blocks) {
        int32_t used = import->length - (import->n_blocks - 1) * dskv_blocks_block_tokens(state->blocks);
        dskv_blocks_set_mark(state->blocks, import->table[import->n_blocks - 1], used);
    }
    struct dskv_event event = {.kind = DSKV_EVENT_RESULT};
    struct dskv_cache *cache =
        dskv_caches_add(state->caches, import->task.session, import->table, import->n_blocks, import->length, 1);
    import->table = NULL;
    import->n_blocks = 0;
    dskv_task_describe_cache(state, cache, &event.import_);
    dskv_task_succeed(state, &import->task, &event);
}

static void import_follow(struct dskv_state *state, struct dskv_task *task, const struct dskv_request *request)
{
    struct import *import = (struct import *)task;
    if (request->op == DSKV_OP_PART)
        take_part(state, import, &request->part.part);
    else
        commit(state, import);
}

static void import_close(struct dskv_state *state, struct dskv_task *task)
{
    struct import *import = (struct import *)task;
    for (int32_t i = import->n_blocks; i-- > 0;)
        dskv_blocks_release(state->blocks, import->table[i]);
    free(import->table);
    free(import->seen);
}

const struct dskv_task_kind dskv_task_import = {
    .bytes = sizeof(struct import),
    .needs_session = 1,
    .is_transfer = 1,
    .begin = import_begin,
    .follow = import_follow,
    .close = import_close,
};
