/* Export: the keys and values of a cache, in parts, as fast as the client takes them.
 *
 * Holds the cache's blocks until the end, so that what it gives does not change when the cache is freed meanwhile.
 * Parts come layer by layer, keys before values, tokens ascending.
 */
#include "base/memory.h"
#include "daemon/task.h"

#include <stdio.h>
#include <stdlib.h>

struct export
{
    struct dskv_task task;
    int32_t length, n_blocks;
    int32_t *table;      /* [n_blocks], each held */
    int32_t part_tokens; /* of every part but the last of a layer's keys or values */
    int32_t n_pieces;    /* parts of one layer's keys */
    int32_t n_parts, n_sent;
    int32_t credits;
};

static enum dskv_code send_begin(struct dskv_state *state, struct export *export, const struct dskv_cache *cache,
                                 struct dskv_error *error)
{
    if (dskv_task_check_ids("the token ids", export->length, error))
        return DSKV_REPLY_TOO_LARGE;
    const struct dskv_model *model = &state->info->model;
    int32_t *tokens = dskv_calloc((size_t) export->length, sizeof *tokens);
    dskv_caches_tokens(state->blocks, export->table, export->length, tokens);
    struct dskv_cache_ref ref;
    dskv_task_describe_cache(state, cache, &ref);
    struct dskv_event event = {.kind = DSKV_EVENT_BEGIN};
    event.export_begin.tokens = dskv_tensor_1d(tokens, DSKV_I32, export->length);
    event.export_begin.dtype = state->info->kv_dtype;
    event.export_begin.n_layers = model->n_layers;
    event.export_begin.n_kv_heads = model->n_kv_heads;
    event.export_begin.head_dim = model->head_dim;
    event.export_begin.length = export->length;
    event.export_begin.n_parts = export->n_parts;
    snprintf(event.export_begin.model, sizeof event.export_begin.model, "%s", model->fingerprint);
    snprintf(event.export_begin.origin, sizeof event.export_begin.origin, "%s", ref.origin);
    dskv_state_post(state, export->task.ticket, &event);
    free(tokens);
    return DSKV_OK;
}

static void end_when_sent(struct dskv_state *state, struct export *export)
{
    struct dskv_event event = {.kind = DSKV_EVENT_RESULT};
    if (export->n_sent == export->n_parts)
        dskv_task_succeed(state, &export->task, &event);
}

static enum dskv_code export_begin(struct dskv_state *state, struct dskv_task *task, struct dskv_error *error)
{
    struct export *export = (struct export *)task;
    const struct dskv_export *asked = &task->request.export_;
    struct dskv_prefix prefix = {.present = 1, .cache = asked->cache, .length = asked->length};
    struct dskv_cache *cache;
    enum dskv_code code = dskv_task_find_prefix(state, &prefix, "cache", &cache, error);
    if (code)
        return code;
    export->length = asked->length;
    export->credits = asked->credits;
    export->part_tokens = dskv_engine_kv_piece_tokens(state->engine);
    export->n_pieces = (export->length + export->part_tokens - 1) / export->part_tokens;
    export->n_parts = export->n_pieces * 2 * state->info->model.n_layers;
    export->n_blocks = dskv_blocks_for(state->blocks, export->length);
    export->table = dskv_calloc((size_t) export->n_blocks, sizeof *export->table);
    for (int32_t i = 0; i < export->n_blocks; i++) {
        export->table[i] = cache->blocks[i];
        dskv_blocks_hold(state->blocks, export->table[i]);
    }
    code = send_begin(state, export, cache, error);
    if (!code)
        end_when_sent(state, export);
    return code;
}

static void export_follow(struct dskv_state *state, struct dskv_task *task, const struct dskv_request *request)
{
    struct export *export = (struct export *)task;
    (void)state;
    int32_t most = DSKV_MAX_CREDITS - export->credits;
    export->credits += request->credit.n < most ? request->credit.n : most;
}

static int export_ready(const struct dskv_task *task)
{
    const struct export *export = (const struct export *)task;
    return export->credits > 0;
}

/* Sends the next part. */
static void export_work(struct dskv_state *state, struct dskv_task *task)
{
    struct export *export = (struct export *)task;
    const struct dskv_model *model = &state->info->model;
    int32_t piece_index = export->n_sent % export->n_pieces, plane = export->n_sent / export->n_pieces;
    struct dskv_kv_piece piece = {.layer = plane / 2,
                                  .is_value = plane % 2,
                                  .start = piece_index * export->part_tokens,
                                  .table = export->table,
                                  .n_blocks = export->n_blocks};
    int32_t left = export->length - piece.start;
    piece.stop = piece.start + (left < export->part_tokens ? left : export->part_tokens);
    struct dskv_event event = {.kind = DSKV_EVENT_PART};
    event.part =
        (struct dskv_part){.layer = piece.layer, .is_value = piece.is_value, .start = piece.start, .stop = piece.stop};
    event.part.data.dtype = state->info->kv_dtype;
    event.part.data.n_dims = 3;
    event.part.data.shape[0] = model->n_kv_heads;
    event.part.data.shape[1] = piece.stop - piece.start;
    event.part.data.shape[2] = model->head_dim;
    event.part.data.bytes = dskv_engine_kv_piece_bytes(state->engine, &piece, state->info->kv_dtype);
    void *bytes = dskv_calloc(1, event.part.data.bytes);
    event.part.data.data = bytes;
    struct dskv_error error;
    enum dskv_exit code = dskv_engine_copy_out(state->engine, &piece, bytes, &error);
    if (code) {
        dskv_state_break(state, code, &error);
    } else {
        dskv_state_post(state, task->ticket, &event);
        export->credits--;
        export->n_sent++;
        end_when_sent(state, export);
    }
    free(bytes);
}

static void export_close(struct dskv_state *state, struct dskv_task *task)
{
    struct export *export = (struct export *)task;
    for (int32_t i = export->n_blocks; i-- > 0;)
        dskv_blocks_release(state->blocks, export->table[i]);
    free(export->table);
}

const struct dskv_task_kind dskv_task_export = {
    .bytes = sizeof(struct export),
    .is_transfer = 1,
    .begin = export_begin,
    .follow = export_follow,
    .ready = export_ready,
    .work = export_work,
    .close = export_close,
};
