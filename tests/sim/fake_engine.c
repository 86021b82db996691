#include "sim/fake_engine.h"

#include "base/memory.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct dskv_engine {
    struct dskv_engine_info info;
    int32_t piece_tokens;
    struct fake_kv *pool; /* [n_blocks * block_tokens] */
    void *plans[2];       /* the two buffers that alternate */
    size_t plan_bytes[2];
    uint64_t n_plans;
    struct dskv_row_result *results; /* [max_batch_tokens] */
    float *logits;                   /* [max_batch_tokens, vocab] */
    int32_t *topk_ids;               /* [max_batch_tokens, DSKV_MAX_TOPK] */
    float *topk_logprobs;
    uint64_t rows_computed;
    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t changed;
    int allowed; /* -1: all */
    int waits, fails;
    int n_steps, most_runs;
};

struct dskv_engine *fake_engine_open(const struct fake_engine_options *options)
{
    struct dskv_engine *engine = dskv_calloc(1, sizeof *engine);
    struct dskv_engine_info *info = &engine->info;
    info->model = (struct dskv_model){.family = "fake",
                                      .n_layers = FAKE_LAYERS,
                                      .n_heads = FAKE_KV_HEADS,
                                      .n_kv_heads = FAKE_KV_HEADS,
                                      .head_dim = FAKE_HEAD_DIM,
                                      .vocab = FAKE_VOCAB,
                                      .max_context = options->max_model_len,
                                      .end_tokens = {FAKE_END_TOKEN},
                                      .n_end_tokens = 1};
    snprintf(info->model.fingerprint, sizeof info->model.fingerprint, "%032x", 0xfa4e);
    snprintf(info->numerics_id, sizeof info->numerics_id, "%032x", 0x1d);
    info->n_ranks = 1;
    info->max_model_len = options->max_model_len;
    info->max_batch_tokens = options->max_batch_tokens;
    info->max_sequences = options->max_sequences;
    info->max_logit_rows = options->max_logit_rows;
    info->block_tokens = options->block_tokens;
    info->n_blocks = options->n_blocks;
    info->kv_dtype = options->kv_dtype;
    info->kv_block_bytes = (size_t)options->block_tokens * sizeof(struct fake_kv);
    info->bounds = (struct dskv_plan_bounds){.vocab = FAKE_VOCAB,
                                             .max_context = options->max_model_len,
                                             .n_blocks = options->n_blocks,
                                             .block_tokens = options->block_tokens,
                                             .max_tokens = options->max_batch_tokens,
                                             .max_sequences = options->max_sequences};
    engine->piece_tokens = options->piece_tokens;
    engine->pool = dskv_calloc((size_t)options->n_blocks * (size_t)options->block_tokens, sizeof *engine->pool);
    size_t n_rows = (size_t)options->max_batch_tokens;
    engine->results = dskv_calloc(n_rows, sizeof *engine->results);
    engine->logits = dskv_calloc(n_rows * FAKE_VOCAB, sizeof *engine->logits);
    engine->topk_ids = dskv_calloc(n_rows * DSKV_MAX_TOPK, sizeof *engine->topk_ids);
    engine->topk_logprobs = dskv_calloc(n_rows * DSKV_MAX_TOPK, sizeof *engine->topk_logprobs);
    engine->allowed = -1;
    pthread_mutex_init(&engine->mutex, NULL);
    pthread_cond_init(&engine->changed, NULL);
    return engine;
}

void fake_engine_close(struct dskv_engine **engine)
{
    struct dskv_engine *e = *engine;
    free(e->pool);
    free(e->plans[0]);
    free(e->plans[1]);
    free(e->results);
    free(e->logits);
    free(e->topk_ids);
    free(e->topk_logprobs);
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->changed);
    free(e);
    *engine = NULL;
}

/* ---- what tests steer ------------------------------------------------------------------------------------------- */

void fake_engine_allow(struct dskv_engine *engine, int n)
{
    pthread_mutex_lock(&engine->mutex);
    engine->allowed = n;
    pthread_cond_broadcast(&engine->changed);
    pthread_mutex_unlock(&engine->mutex);
}

void fake_engine_await_step(struct dskv_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    while (!engine->waits || engine->allowed)
        pthread_cond_wait(&engine->changed, &engine->mutex);
    pthread_mutex_unlock(&engine->mutex);
}

void fake_engine_fail_next(struct dskv_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    engine->fails = 1;
    pthread_mutex_unlock(&engine->mutex);
}

int fake_engine_n_steps(struct dskv_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    int n = engine->n_steps;
    pthread_mutex_unlock(&engine->mutex);
    return n;
}

int fake_engine_most_runs(struct dskv_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    int n = engine->most_runs;
    pthread_mutex_unlock(&engine->mutex);
    return n;
}

/* Waits for permission; returns whether the step is to fail. */
static int enter_step(struct dskv_engine *engine, int n_runs)
{
    pthread_mutex_lock(&engine->mutex);
    engine->waits = 1;
    pthread_cond_broadcast(&engine->changed);
    while (engine->allowed == 0)
        pthread_cond_wait(&engine->changed, &engine->mutex);
    engine->waits = 0;
    engine->allowed -= engine->allowed > 0;
    engine->n_steps++;
    if (n_runs > engine->most_runs)
        engine->most_runs = n_runs;
    int fails = engine->fails;
    pthread_mutex_unlock(&engine->mutex);
    return fails;
}

/* ---- parallel/engine.h ------------------------------------------------------------------------------------------ */

const struct dskv_engine_info *dskv_engine_info(const struct dskv_engine *engine)
{
    return &engine->info;
}

enum dskv_exit dskv_engine_stats(struct dskv_engine *engine, struct dskv_rank_stats *stats, struct dskv_error *error)
{
    (void)error;
    *stats = (struct dskv_rank_stats){.weight_bytes = 1,
                                      .pool_bytes = engine->info.kv_block_bytes * (size_t)engine->info.n_blocks,
                                      .steps = (uint64_t)fake_engine_n_steps(engine),
                                      .rows_computed = engine->rows_computed};
    return DSKV_EXIT_OK;
}

struct dskv_plan *dskv_engine_plan(struct dskv_engine *engine, const struct dskv_plan_sizes *need)
{
    int which = (int)(engine->n_plans % 2);
    size_t bytes = dskv_plan_bytes(need);
    if (bytes > engine->plan_bytes[which]) {
        free(engine->plans[which]);
        engine->plans[which] = aligned_alloc(64, (bytes + 63) / 64 * 64);
        engine->plan_bytes[which] = bytes;
    }
    return dskv_plan_begin(engine->plans[which], engine->plan_bytes[which], need, ++engine->n_plans);
}

static struct fake_kv *slot_of(struct dskv_engine *engine, const int32_t *table, int32_t token)
{
    int32_t block_tokens = engine->info.block_tokens;
    return &engine->pool[(size_t)table[token / block_tokens] * (size_t)block_tokens + (size_t)(token % block_tokens)];
}

static void copy_blocks(struct dskv_engine *engine, const struct dskv_plan *plan)
{
    const struct dskv_block_copy *copies = dskv_plan_copies(plan);
    for (int32_t i = 0; i < plan->used.n_copies; i++)
        memcpy(slot_of(engine, &copies[i].dst, 0), slot_of(engine, &copies[i].src, 0),
               (size_t)copies[i].n_tokens * sizeof(struct fake_kv));
}

/* Runs one sequence's tokens; chains[] gets the hash after each. */
static void run_work(struct dskv_engine *engine, const struct dskv_plan *plan, const struct dskv_attention_work *work,
                     uint64_t *chains)
{
    const int32_t *table = dskv_plan_tables(plan) + work->first_block;
    uint64_t chain = 0;
    for (int32_t key = 0; key < work->start; key++)
        chain = fake_chain(chain, slot_of(engine, table, key));
    for (int32_t i = work->first; i < work->first + work->n_tokens; i++) {
        int32_t position = dskv_plan_positions(plan)[i], slot = dskv_plan_slots(plan)[i];
        struct fake_kv *stored = slot_of(engine, table, position);
        if (slot >= 0) {
            DSKV_ASSERT(stored == &engine->pool[slot], "token %d is written to slot %d, and read elsewhere", i, slot);
            fake_store(chain, dskv_plan_ids(plan)[i], position, stored);
        }
        chain = fake_chain(chain, stored);
        chains[i] = chain;
    }
}

static void fill_row(struct dskv_engine *engine, const struct dskv_plan *plan, int32_t index, uint64_t chain)
{
    const struct dskv_plan_row *row = &dskv_plan_rows(plan)[index];
    struct dskv_row_result *result = &engine->results[index];
    float *logits = engine->logits + (size_t)index * FAKE_VOCAB;
    *result = (struct dskv_row_result){.argmax = -1, .sampled = -1, .score = NAN};
    result->finite = fake_logits(chain, dskv_plan_ids(plan)[row->token], logits);
    if (row->want & DSKV_ROW_LOGITS)
        result->logits = logits;
    if (row->want & DSKV_ROW_ARGMAX)
        result->argmax = fake_argmax(logits);
    if (row->want & DSKV_ROW_SCORE)
        result->score = fake_score(logits, row->target);
    if (row->want & DSKV_ROW_SAMPLE)
        result->sampled = fake_sample(logits, &dskv_plan_sampling(plan)[index]);
    if (row->want & DSKV_ROW_TOPK) {
        int32_t *ids = engine->topk_ids + (size_t)index * DSKV_MAX_TOPK;
        float *logprobs = engine->topk_logprobs + (size_t)index * DSKV_MAX_TOPK;
        fake_topk(logits, row->topk, ids, logprobs);
        result->topk_ids = ids;
        result->topk_logprobs = logprobs;
    }
}

static void check_plan(const struct dskv_engine *engine, const struct dskv_plan *plan)
{
    struct dskv_error error;
    enum dskv_code code = dskv_plan_validate(plan, plan->bytes, &engine->info.bounds, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    int32_t n_logits = 0;
    for (int32_t i = 0; i < plan->used.n_rows; i++)
        n_logits += (dskv_plan_rows(plan)[i].want & DSKV_ROW_LOGITS) != 0;
    DSKV_ASSERT(n_logits <= engine->info.max_logit_rows, "%d rows of logits", n_logits);
}

enum dskv_exit dskv_engine_step(struct dskv_engine *engine, const struct dskv_plan *plan,
                                const struct dskv_row_result **results, int32_t *n_computed, struct dskv_error *error)
{
    check_plan(engine, plan);
    if (enter_step(engine, plan->used.n_work))
        return dskv_fail_exit(error, DSKV_EXIT_RANK_LOST, "rank 1 was lost");
    uint64_t *chains = dskv_calloc((size_t)plan->used.n_tokens, sizeof *chains);
    copy_blocks(engine, plan);
    for (int32_t i = 0; i < plan->used.n_work; i++)
        run_work(engine, plan, &dskv_plan_work(plan)[i], chains);
    for (int32_t i = 0; i < plan->used.n_rows; i++)
        fill_row(engine, plan, i, chains[dskv_plan_rows(plan)[i].token]);
    free(chains);
    engine->rows_computed += (uint64_t)plan->used.n_tokens;
    *results = engine->results;
    *n_computed = plan->used.n_tokens;
    return DSKV_EXIT_OK;
}

size_t dskv_engine_kv_piece_bytes(const struct dskv_engine *engine, const struct dskv_kv_piece *piece,
                                  enum dskv_dtype dtype)
{
    (void)engine;
    return (size_t)(piece->stop - piece->start) * FAKE_KV_HEADS * FAKE_HEAD_DIM * dskv_dtype_bytes(dtype);
}

int32_t dskv_engine_kv_piece_tokens(const struct dskv_engine *engine)
{
    return engine->piece_tokens;
}

/* The values of one head and token of a piece, in the pool. */
static float *values_of(struct dskv_engine *engine, const struct dskv_kv_piece *piece, int32_t head, int32_t token)
{
    return slot_of(engine, piece->table, token)->values[piece->layer][piece->is_value][head];
}

enum dskv_exit dskv_engine_copy_out(struct dskv_engine *engine, const struct dskv_kv_piece *piece, void *bytes,
                                    struct dskv_error *error)
{
    (void)error;
    size_t row = FAKE_HEAD_DIM * dskv_dtype_bytes(engine->info.kv_dtype);
    char *next = bytes;
    for (int32_t head = 0; head < FAKE_KV_HEADS; head++)
        for (int32_t token = piece->start; token < piece->stop; token++, next += row)
            dskv_convert(next, engine->info.kv_dtype, values_of(engine, piece, head, token), DSKV_F32, FAKE_HEAD_DIM);
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_engine_copy_in(struct dskv_engine *engine, const struct dskv_kv_piece *piece, enum dskv_dtype dtype,
                                   const void *bytes, struct dskv_error *error)
{
    (void)error;
    size_t row = FAKE_HEAD_DIM * dskv_dtype_bytes(dtype);
    const char *next = bytes;
    for (int32_t head = 0; head < FAKE_KV_HEADS; head++)
        for (int32_t token = piece->start; token < piece->stop; token++, next += row)
            dskv_convert(values_of(engine, piece, head, token), DSKV_F32, next, dtype, FAKE_HEAD_DIM);
    return DSKV_EXIT_OK;
}

int dskv_engine_kv_finite(const struct dskv_engine *engine, enum dskv_dtype dtype, const void *bytes, size_t n,
                          size_t *index)
{
    char *converted = dskv_calloc(n, 4);
    *index = dskv_convert(converted, engine->info.kv_dtype, bytes, dtype, n);
    free(converted);
    return *index == n;
}
