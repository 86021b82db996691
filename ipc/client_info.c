/* The C client: info, stats and ping. */
#include "ipc/client_inside.h"

#include "base/memory.h"

#include <stdlib.h>

/* A result that points into the event that brought it. */
struct info_box {
    struct dskv_server_info info;
    struct dskv_event event;
};

static void fill_info(struct dskv_server_info *info, const struct dskv_info_result *from, int64_t lease_ms)
{
    *info = (struct dskv_server_info){
        .server_version = from->server_version,
        .model_dir = from->model_dir,
        .family = from->family,
        .fingerprint = from->fingerprint,
        .numerics_id = from->numerics_id,
        .device = from->device,
        .weight_dtype = dskv_dtype_name(from->weight_dtype),
        .activation_dtype = dskv_dtype_name(from->activation_dtype),
        .kv_dtype = dskv_dtype_name(from->kv_dtype),
        .protocol_version = from->protocol_version,
        .n_ranks = from->n_ranks,
        .n_layers = from->n_layers,
        .n_heads = from->n_heads,
        .n_kv_heads = from->n_kv_heads,
        .head_dim = from->head_dim,
        .width = from->width,
        .mlp = from->mlp,
        .vocab = from->vocab,
        .max_context = from->max_context,
        .max_model_len = from->limits.max_model_len,
        .block_tokens = from->block_tokens,
        .n_blocks = from->n_blocks,
        .cache_lease_ms = lease_ms,
        .n_end_tokens = from->n_end_tokens,
        .end_tokens = from->end_tokens,
        .max_request_bytes = from->limits.request_bytes,
        .max_reply_bytes = from->limits.reply_bytes,
        .max_sequences = from->limits.sequences,
        .max_topk = from->limits.topk,
        .max_stops = from->limits.stops,
        .max_stop_tokens = from->limits.stop_tokens,
    };
}

enum dskv_code dskv_info(struct dskv_client *client, int32_t timeout_ms, struct dskv_server_info **info,
                         struct dskv_error *error)
{
    *info = NULL;
    struct dskv_request request = {.op = DSKV_OP_INFO};
    struct info_box *box = dskv_calloc(1, sizeof *box);
    enum dskv_code code = dskv_call_run(client, &request, timeout_ms, &box->event, error);
    if (code) {
        free(box);
        return code;
    }
    fill_info(&box->info, &box->event.info, client->lease_ms);
    *info = &box->info;
    return DSKV_OK;
}

void dskv_info_free(struct dskv_server_info **info)
{
    struct info_box *box = (struct info_box *)*info; /* its first member */
    *info = NULL;
    if (!box)
        return;
    dskv_event_clear(&box->event);
    free(box);
}

struct stats_box {
    struct dskv_server_stats stats;
    struct dskv_rank_usage ranks[];
};

enum dskv_code dskv_stats(struct dskv_client *client, int32_t timeout_ms, struct dskv_server_stats **stats,
                          struct dskv_error *error)
{
    *stats = NULL;
    struct dskv_request request = {.op = DSKV_OP_STATS};
    struct dskv_event event;
    enum dskv_code code = dskv_call_run(client, &request, timeout_ms, &event, error);
    if (code)
        return code;
    const struct dskv_stats_result *from = &event.stats;
    struct stats_box *box = dskv_calloc(1, sizeof *box + (size_t)from->n_ranks * sizeof box->ranks[0]);
    for (int i = 0; i < from->n_ranks; i++)
        box->ranks[i] = (struct dskv_rank_usage){
            .weight_bytes = from->ranks[i].weight_bytes,
            .replicated_bytes = from->ranks[i].replicated_bytes,
            .pool_bytes = from->ranks[i].pool_bytes,
            .resident_bytes = from->ranks[i].resident_bytes,
            .read_bytes = from->ranks[i].read_bytes,
            .steps = from->ranks[i].steps,
            .rows_computed = from->ranks[i].rows_computed,
        };
    box->stats = (struct dskv_server_stats){
        .uptime_s = from->uptime_s,
        .requests = from->requests,
        .errors = from->errors,
        .steps = from->steps,
        .rows_computed = from->rows_computed,
        .tokens_cached = from->tokens_cached,
        .tokens_generated = from->tokens_generated,
        .blocks_total = from->blocks_total,
        .blocks_used = from->blocks_used,
        .blocks_reserved = from->blocks_reserved,
        .caches = from->caches,
        .sessions = from->sessions,
        .sequences_active = from->sequences_active,
        .requests_queued = from->requests_queued,
        .backlog_bytes = from->backlog_bytes,
        .n_ranks = from->n_ranks,
        .ranks = box->ranks,
    };
    dskv_event_clear(&event);
    *stats = &box->stats;
    return DSKV_OK;
}

void dskv_stats_free(struct dskv_server_stats **stats)
{
    free(*stats); /* the box's first member */
    *stats = NULL;
}

enum dskv_code dskv_ping(struct dskv_client *client, int32_t timeout_ms, struct dskv_error *error)
{
    struct dskv_request request = {.op = DSKV_OP_PING};
    struct dskv_event event;
    enum dskv_code code = dskv_call_run(client, &request, timeout_ms, &event, error);
    if (!code)
        dskv_event_clear(&event);
    return code;
}
