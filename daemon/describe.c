/* Describe: plain copies and sums of what the engine and the model say of themselves. */
#include "daemon/describe.h"

#include "base/version.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void dskv_describe_limits(const struct dskv_engine_info *engine, struct dskv_limits *limits)
{
    *limits = (struct dskv_limits){
        .header_bytes = DSKV_MAX_HEADER_BYTES,
        .frame_bytes = DSKV_MAX_FRAME_BYTES,
        .request_bytes = DSKV_MAX_REQUEST_BYTES,
        .reply_bytes = DSKV_MAX_REPLY_BYTES,
        .part_bytes = DSKV_PART_BYTES,
        .sequences = DSKV_MAX_SEQUENCES_PER_REQUEST,
        .topk = DSKV_MAX_TOPK,
        .stops = DSKV_MAX_STOPS,
        .stop_tokens = DSKV_MAX_STOP_TOKENS,
        .free_ids = DSKV_MAX_FREE_IDS,
        .credits = DSKV_MAX_CREDITS,
        .max_model_len = engine->max_model_len,
        .max_batch_tokens = engine->max_batch_tokens,
        .max_sequences = engine->max_sequences,
    };
}

void dskv_describe_server(const struct dskv_engine_info *engine, const char *model_dir, struct dskv_info_result *info)
{
    const struct dskv_model *model = &engine->model;
    *info = (struct dskv_info_result){
        .server_version = DSKV_VERSION,
        .protocol_version = DSKV_PROTOCOL_VERSION,
        .n_ranks = engine->n_ranks,
        .n_layers = model->n_layers,
        .n_heads = model->n_heads,
        .n_kv_heads = model->n_kv_heads,
        .head_dim = model->head_dim,
        .width = model->width,
        .mlp = model->mlp,
        .vocab = model->vocab,
        .max_context = model->max_context,
        .weight_dtype = engine->weight_dtype,
        .activation_dtype = engine->activation_dtype,
        .kv_dtype = engine->kv_dtype,
        .n_end_tokens = model->n_end_tokens,
        .block_tokens = engine->block_tokens,
        .n_blocks = engine->n_blocks,
    };
    snprintf(info->model_dir, sizeof info->model_dir, "%s", model_dir);
    snprintf(info->family, sizeof info->family, "%s", model->family);
    snprintf(info->fingerprint, sizeof info->fingerprint, "%s", model->fingerprint);
    snprintf(info->numerics_id, sizeof info->numerics_id, "%s", engine->numerics_id);
    snprintf(info->device, sizeof info->device, "%s", engine->device);
    memcpy(info->end_tokens, model->end_tokens, sizeof info->end_tokens);
    dskv_describe_limits(engine, &info->limits);
}

void dskv_describe_model_name(const char *model_dir, char *name, size_t room)
{
    char path[PATH_MAX];
    const char *real = realpath(model_dir, path) ? path : model_dir;
    const char *slash = strrchr(real, '/');
    snprintf(name, room, "%s", slash && slash[1] ? slash + 1 : real);
}

int64_t dskv_describe_parameters(const struct dskv_model *model)
{
    int64_t width = model->width, q = (int64_t)model->n_heads * model->head_dim,
            kv = (int64_t)model->n_kv_heads * model->head_dim, mlp = model->mlp;
    int64_t n_norm = model->norm == DSKV_LAYER_NORM ? 2 * width : width;
    int64_t up = model->gated ? 2 * mlp : mlp;
    int64_t layer = 2 * n_norm + (q + 2 * kv) * width + q * width + up * width + mlp * width;
    layer += (model->qkv_bias ? q + 2 * kv : 0) + (model->o_bias ? width : 0) + (model->mlp_bias ? up + width : 0);
    int64_t total = model->n_layers * layer + n_norm + model->vocab * width * (model->tied ? 1 : 2);
    return total + (model->positions == DSKV_POSITIONS_LEARNED ? model->max_context * width : 0);
}

static void describe_positions(const struct dskv_model *model, int32_t max_model_len, char *text, size_t room)
{
    const struct dskv_rope_scaling *scaling = &model->rope_scaling;
    int32_t length = dskv_rope_length(model, max_model_len);
    size_t n = (size_t)snprintf(text, room, "%d, %s", (int)max_model_len,
                                model->positions == DSKV_POSITIONS_LEARNED ? "learned" : "rotary");
    if (scaling->kind != DSKV_ROPE_PLAIN)
        n += (size_t)snprintf(text + n, room - n, ", stretched by %g (%s)", (double)scaling->factor,
                              dskv_rope_stretch_name(scaling->kind));
    if (length)
        snprintf(text + n, room - n, ", for all as in sequences of %d tokens", (int)length);
}

void dskv_describe_model(const struct dskv_model *model, int32_t max_model_len, const char *model_dir, char *text,
                         size_t room)
{
    char name[128], positions[128];
    int64_t n = dskv_describe_parameters(model);
    dskv_describe_model_name(model_dir, name, sizeof name);
    describe_positions(model, max_model_len, positions, sizeof positions);
    int most = model->n_heads < DSKV_MAX_RANKS ? model->n_heads : DSKV_MAX_RANKS;
    snprintf(text, room,
             "%s: %s, %.1f million parameters (%.1f MB of %s), %d layers of width %d, %d query and %d KV heads of %d, "
             "vocabulary %d, context %d\npositions: %s\nranks: 1 to %d",
             name, model->family, (double)n / 1e6, (double)n * (double)dskv_dtype_bytes(model->stored_dtype) / 1e6,
             dskv_dtype_name(model->stored_dtype), model->n_layers, model->width, model->n_heads, model->n_kv_heads,
             model->head_dim, model->vocab, model->max_context, positions, most);
}
