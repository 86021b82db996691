/* Engine: opens a model over all ranks, part by part, and agrees on each part before the next; closes in reverse. */
#include "base/log.h"
#include "base/memory.h"
#include "parallel/engine_parts.h"
#include "parallel/fingerprint.h"
#include "parallel/job.h"
#include "parallel/numerics.h"
#include "parallel/plan_layout.h"
#include "parallel/pool.h"
#include "parallel/rope.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOGIT_ROWS_BYTES (16 << 20) /* of the rows that one step may return whole */
#define DEFAULT_BATCH_TOKENS 512
#define DEFAULT_SEQUENCES 64
#define DEFAULT_BLOCK_TOKENS 64

/* ---- options -> info ---------------------------------------------------------------------------- */

/* A dtype by name, or `automatic` for "auto" and null. */
static enum dskv_exit choose_dtype(const char *option, const char *name, enum dskv_dtype automatic,
                                   enum dskv_dtype *dtype, struct dskv_error *error)
{
    *dtype = !name || strcmp(name, "auto") == 0 ? automatic : dskv_dtype_from_name(name);
    if (*dtype == DSKV_F32 || *dtype == DSKV_F16 || *dtype == DSKV_BF16)
        return DSKV_EXIT_OK;
    return dskv_fail_exit(error, DSKV_EXIT_USAGE, "%s is %s; it must be auto, f32, f16 or bf16", option, name);
}

static enum dskv_exit check_options(const struct dskv_engine_options *options, const struct dskv_engine_info *info,
                                    struct dskv_error *error)
{
    int32_t block = info->block_tokens;
    if (options->tensor_parallel && options->tensor_parallel != info->n_ranks)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--tensor-parallel is %d, but %d rank%s started",
                              (int)options->tensor_parallel, (int)info->n_ranks,
                              info->n_ranks == 1 ? " was" : "s were");
    if (info->max_batch_tokens < 1 || info->max_sequences < 1 ||
        (int64_t)info->max_batch_tokens + info->max_sequences > DSKV_MAX_STEP_ROWS)
        return dskv_fail_exit(
            error, DSKV_EXIT_USAGE,
            "--max-batch-tokens %d and --max-sequences %d: both must be 1 or more, together %d at most",
            (int)info->max_batch_tokens, (int)info->max_sequences, DSKV_MAX_STEP_ROWS);
    if (block < DSKV_MIN_BLOCK_TOKENS || block > DSKV_MAX_BLOCK_TOKENS || (block & (block - 1)))
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--block-tokens is %d; it must be 16, 32, 64, 128 or 256",
                              (int)block);
    return DSKV_EXIT_OK;
}

static int32_t or_default(int32_t value, int32_t otherwise)
{
    return value ? value : otherwise;
}

/* What the options mean for this model; device, dtypes and blocks come later. */
static void fill_info(const struct dskv_engine_options *options, struct dskv_engine_info *info)
{
    info->n_ranks = dskv_job_n_ranks();
    info->max_model_len = options->max_model_len;
    info->max_batch_tokens = or_default(options->max_batch_tokens, DEFAULT_BATCH_TOKENS);
    info->max_sequences = or_default(options->max_sequences, DEFAULT_SEQUENCES);
    info->block_tokens = or_default(options->block_tokens, DEFAULT_BLOCK_TOKENS);
    int64_t rows = LOGIT_ROWS_BYTES / ((int64_t)info->model.vocab * (int64_t)sizeof(float));
    int64_t most = (int64_t)info->max_batch_tokens + info->max_sequences;
    info->max_logit_rows = (int32_t)(rows < 1 ? 1 : rows < most ? rows : most);
}

/* ---- the parts, in order ------------------------------------------------------------------------ */

static enum dskv_exit open_device(struct dskv_engine *engine, const struct dskv_engine_options *options,
                                  struct dskv_error *error)
{
    struct dskv_engine_info *info = &engine->info;
    int fair_threads = dskv_job_n_cores() / info->n_ranks;
    struct dskv_device_options device = {.kind = options->device ? options->device : "auto",
                                         .index = dskv_job_rank(),
                                         .share = options->share_gpu,
                                         .n_threads =
                                             or_default(options->n_threads, fair_threads < 1 ? 1 : fair_threads),
                                         .trace = options->trace_ops,
                                         .free_order = options->free_order};
    enum dskv_exit code = dskv_device_open(&device, &engine->device, error);
    if (!code)
        code = choose_dtype("--dtype", options->dtype, info->model.stored_dtype, &info->weight_dtype, error);
    if (code)
        return code;
    enum dskv_dtype kv = strcmp(dskv_device_kind(engine->device), "cpu") == 0 ? DSKV_F32 : info->weight_dtype;
    info->activation_dtype = dskv_device_activation_dtype(engine->device, info->weight_dtype);
    snprintf(info->device, sizeof info->device, "%s", dskv_device_name(engine->device));
    return choose_dtype("--kv-dtype", options->kv_dtype, kv, &info->kv_dtype, error);
}

/* Everything that can be refused before a weight is read. */
static enum dskv_exit open_model(struct dskv_engine *engine, const struct dskv_engine_options *options,
                                 struct dskv_error *error)
{
    struct dskv_engine_info *info = &engine->info;
    enum dskv_exit code = dskv_model_read(options->model_dir, options->dummy_weights, &info->model, error);
    if (code)
        return code;
    fill_info(options, info);
    if (!(code = check_options(options, info, error)) &&
        !(code = dskv_model_limit(&info->model, &info->max_model_len, error)) &&
        !(code = dskv_shard_of(&info->model, dskv_job_rank(), info->n_ranks, &engine->shard, error)))
        code = open_device(engine, options, error);
    if (code)
        return code;
    dskv_fingerprint_serve(&info->model, info->max_model_len);
    int32_t length = dskv_rope_length(&info->model, info->max_model_len);
    if (length)
        dskv_log(DSKV_LOG_INFO, "model", "rotary positions are those of sequences of %d tokens, whatever their length",
                 (int)length);
    return DSKV_EXIT_OK;
}

/* "auto" may find a GPU on one rank and none on another; what they compute would not fit together. */
static enum dskv_exit check_devices(const struct dskv_engine *engine, struct dskv_error *error)
{
    int is_host = dskv_device_is_host(engine->device);
    if (dskv_job_min(is_host) == 1 - dskv_job_min(1 - is_host))
        return DSKV_EXIT_OK;
    return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "some ranks have a GPU and others none: say --device cpu or cuda");
}

static enum dskv_exit open_weights(struct dskv_engine *engine, const struct dskv_engine_options *options,
                                   struct dskv_error *error)
{
    struct dskv_weights_options weights = {.model_dir = options->model_dir,
                                           .dtype = engine->info.weight_dtype,
                                           .max_model_len = engine->info.max_model_len,
                                           .dummy = options->dummy_weights};
    return dskv_weights_open(engine->device, &engine->info.model, &engine->shard, &weights, &engine->weights, error);
}

static enum dskv_exit open_pool(struct dskv_engine *engine, const struct dskv_engine_options *options,
                                struct dskv_error *error)
{
    struct dskv_engine_info *info = &engine->info;
    struct dskv_pool_options pool = {.bytes = options->kv_cache_bytes,
                                     .memory_fraction = options->memory_fraction,
                                     .shares_device = options->share_gpu,
                                     .block_tokens = info->block_tokens,
                                     .max_model_len = info->max_model_len,
                                     .dtype = info->kv_dtype};
    enum dskv_exit code = dskv_pool_open(engine->device, &info->model, &engine->shard, &pool, &engine->kv, error);
    if (code)
        return code;
    info->n_blocks = engine->kv.n_blocks;
    for (int32_t r = 0; r < info->n_ranks; r++) {
        struct dskv_shard shard;
        if ((code = dskv_shard_of(&info->model, r, info->n_ranks, &shard, error)))
            return code;
        info->kv_block_bytes += dskv_pool_shape(&info->model, &shard, info->block_tokens, info->kv_dtype).block_bytes;
    }
    info->bounds = (struct dskv_plan_bounds){.vocab = info->model.vocab,
                                             .max_context = info->max_model_len,
                                             .n_blocks = info->n_blocks,
                                             .block_tokens = info->block_tokens,
                                             .max_tokens = info->max_batch_tokens + info->max_sequences,
                                             .max_sequences = info->max_sequences};
    return DSKV_EXIT_OK;
}

/* A slot holds a step's partial sums, or its rows of logits, or a piece of KV and its block table. */
static size_t count_slot_bytes(const struct dskv_engine *engine)
{
    const struct dskv_engine_info *info = &engine->info;
    size_t passes = dskv_passes_slot_bytes(&info->model, engine->device, info->activation_dtype, info->n_ranks,
                                           info->bounds.max_tokens);
    return passes > engine->piece_bytes ? passes : engine->piece_bytes;
}

/* Stream, comm and passes, over one segment: the stream first, then the comm's slots. */
static enum dskv_exit open_parts(struct dskv_engine *engine, const struct dskv_engine_options *options,
                                 struct dskv_error *error)
{
    struct dskv_engine_info *info = &engine->info;
    struct dskv_plan_sizes largest = dskv_plan_largest(&info->bounds);
    struct dskv_kv_piece piece = {.stop = dskv_engine_kv_piece_tokens(engine)};
    int32_t blocks_of_context = (info->max_model_len + info->block_tokens - 1) / info->block_tokens;
    engine->plan_bytes = dskv_plan_bytes(&largest);
    engine->piece_bytes =
        dskv_piece_data_offset(blocks_of_context) + dskv_engine_kv_piece_bytes(engine, &piece, DSKV_F32);
    size_t payload_bytes = 2 * engine->plan_bytes + engine->piece_bytes, slot_bytes = count_slot_bytes(engine);
    size_t stream_bytes = dskv_stream_bytes(info->n_ranks, payload_bytes);
    enum dskv_exit code =
        dskv_segment_open(stream_bytes + dskv_comm_shared_bytes(info->n_ranks, slot_bytes), &engine->segment, error);
    if (code)
        return code;
    engine->stream = dskv_stream_open(engine->segment.memory, payload_bytes, &engine->segment.peers);
    struct dskv_comm_options comm = {.device = engine->device,
                                     .peers = &engine->segment.peers,
                                     .slot_bytes = slot_bytes,
                                     .shared = (char *)engine->segment.memory + stream_bytes};
    if (!(code = dskv_comm_open(&comm, &engine->comm, error))) {
        struct dskv_forward_parts parts = {.model = &info->model,
                                           .shard = &engine->shard,
                                           .weights = engine->weights,
                                           .device = engine->device,
                                           .comm = engine->comm,
                                           .kv = engine->kv,
                                           .activation_dtype = info->activation_dtype,
                                           .bounds = info->bounds,
                                           .max_logit_rows = info->max_logit_rows,
                                           .every_rank_selects = options->check_plans || options->takes_references ||
                                                                 !dskv_device_is_host(engine->device)};
        code = dskv_passes_open(&parts, &engine->passes, error);
        engine->has_drawn = dskv_calloc((size_t)info->bounds.max_tokens, sizeof *engine->has_drawn);
        info->runs_queued = dskv_comm_is_queued(engine->comm) && !dskv_device_is_host(engine->device);
        engine->takes_references = options->takes_references || info->runs_queued;
    }
    return dskv_parallel_agree(code, error);
}

/* ---- open and close ----------------------------------------------------------------------------- */

static void free_engine(struct dskv_engine **engine)
{
    struct dskv_engine *e = *engine;
    dskv_passes_close(&e->passes);
    dskv_comm_close(&e->comm);
    dskv_stream_close(&e->stream);
    dskv_segment_close(&e->segment);
    if (e->device) {
        dskv_pool_close(e->device, &e->kv);
        if (e->weights)
            dskv_weights_close(e->device, &e->weights);
        dskv_device_close(&e->device);
    }
    free(e->has_drawn);
    free(e);
    *engine = NULL;
}

enum dskv_exit dskv_engine_open(const struct dskv_engine_options *options, struct dskv_engine **engine,
                                struct dskv_error *error)
{
    struct dskv_engine *e = dskv_calloc(1, sizeof *e);
    e->check_plans = options->check_plans;
    enum dskv_exit code = dskv_parallel_agree(open_model(e, options, error), error);
    if (!code)
        code = check_devices(e, error);
    if (!code)
        code = dskv_parallel_agree(open_weights(e, options, error), error);
    if (!code)
        code = open_pool(e, options, error);
    if (!code)
        code = open_parts(e, options, error);
    if (code) {
        free_engine(&e);
        return code;
    }
    dskv_numerics_id(&e->info, dskv_device_numerics(e->device), e->info.numerics_id);
    dskv_log(DSKV_LOG_INFO, "engine", "%s over %d rank%s (%s), device %s, %d blocks of %d tokens, numerics %s",
             e->info.model.family, (int)e->info.n_ranks, e->info.n_ranks == 1 ? "" : "s", dskv_comm_name(e->comm),
             e->info.device, (int)e->info.n_blocks, (int)e->info.block_tokens, e->info.numerics_id);
    *engine = e;
    return DSKV_EXIT_OK;
}

void dskv_engine_close(struct dskv_engine **engine)
{
    if (!*engine)
        return;
    if ((*engine)->shard.rank == 0)
        dskv_engine_stop(*engine);
    free_engine(engine);
}

const struct dskv_engine_info *dskv_engine_info(const struct dskv_engine *engine)
{
    return &engine->info;
}
