#include "sim/fake_engine.h"

#include "base/memory.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the host gets of a step. */
struct fake_results {
    struct dskv_row_result *rows; /* [max_batch_tokens] */
    float *logits;                /* [max_batch_tokens, vocab] */
    int32_t *topk_ids;            /* [max_batch_tokens, DSKV_MAX_TOPK] */
    float *topk_logprobs;
};

struct fake_step {
    const struct dskv_plan *plan;
    int has_run, fails;
};

struct dskv_engine {
    struct dskv_engine_info info;
    int32_t piece_tokens;
    int runs_at_submit;
    struct fake_kv *pool; /* [n_blocks * block_tokens] */
    void *plans[2];       /* the two buffers that alternate */
    size_t plan_bytes[2];
    uint64_t n_plans;
    struct fake_step steps[2]; /* under way: a ring */
    uint32_t n_submitted, n_collected;
    const struct dskv_plan *last; /* that was submitted */
    struct fake_results results[2];
    int32_t *ids;   /* [max_batch_tokens]: of the step that runs, references resolved */
    int32_t *drawn; /* [max_batch_tokens]: by the rows of the last step that ran */
    uint64_t rows_computed;
    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t changed;
    int allowed; /* -1: all */
    int waits, fails;
    int n_steps, most_runs, n_chained;
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
    info->runs_queued = options->runs_queued;
    info->kv_block_bytes = (size_t)options->block_tokens * sizeof(struct fake_kv);
    info->bounds = (struct dskv_plan_bounds){.vocab = FAKE_VOCAB,
                                             .max_context = options->max_model_len,
                                             .n_blocks = options->n_blocks,
                                             .block_tokens = options->block_tokens,
                                             .max_tokens = options->max_batch_tokens,
                                             .max_sequences = options->max_sequences};
    engine->piece_tokens = options->piece_tokens;
    engine->runs_at_submit = options->runs_at_submit;
    engine->pool = dskv_calloc((size_t)options->n_blocks * (size_t)options->block_tokens, sizeof *engine->pool);
    size_t n_rows = (size_t)options->max_batch_tokens;
    for (int i = 0; i < 2; i++)
        engine->results[i] = (struct fake_results){
            .rows = dskv_calloc(n_rows, sizeof(struct dskv_row_result)),
            .logits = dskv_calloc(n_rows * FAKE_VOCAB, sizeof(float)),
            .topk_ids = dskv_calloc(n_rows * DSKV_MAX_TOPK, sizeof(int32_t)),
            .topk_logprobs = dskv_calloc(n_rows * DSKV_MAX_TOPK, sizeof(float)),
        };
    engine->ids = dskv_calloc(n_rows, sizeof *engine->ids);
    engine->drawn = dskv_calloc(n_rows, sizeof *engine->drawn);
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
    for (int i = 0; i < 2; i++) {
        free(e->results[i].rows);
        free(e->results[i].logits);
        free(e->results[i].topk_ids);
        free(e->results[i].topk_logprobs);
    }
    free(e->ids);
    free(e->drawn);
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

int fake_engine_n_chained(struct dskv_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    int n = engine->n_chained;
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

static void assert_settled(const struct dskv_engine *engine)
{
    DSKV_ASSERT(engine->n_submitted == engine->n_collected, "%u steps are under way",
                engine->n_submitted - engine->n_collected);
}

enum dskv_exit dskv_engine_stats(struct dskv_engine *engine, struct dskv_rank_stats *stats, struct dskv_error *error)
{
    (void)error;
    assert_settled(engine);
    *stats = (struct dskv_rank_stats){.weight_bytes = 1,
                                      .pool_bytes = engine->info.kv_block_bytes * (size_t)engine->info.n_blocks,
                                      .steps = (uint64_t)fake_engine_n_steps(engine),
                                      .rows_computed = engine->rows_computed};
    return DSKV_EXIT_OK;
}

struct dskv_plan *dskv_engine_plan(struct dskv_engine *engine, const struct dskv_plan_sizes *need)
{
    DSKV_ASSERT(engine->n_submitted - engine->n_collected < 2, "both plans are in use, %u submitted",
                engine->n_submitted);
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
            fake_store(chain, engine->ids[i], position, stored);
        }
        chain = fake_chain(chain, stored);
        chains[i] = chain;
    }
}

static void fill_row(struct dskv_engine *engine, const struct dskv_plan *plan, int32_t index, uint64_t chain,
                     const struct fake_results *results)
{
    const struct dskv_plan_row *row = &dskv_plan_rows(plan)[index];
    struct dskv_row_result *result = &results->rows[index];
    float *logits = results->logits + (size_t)index * FAKE_VOCAB;
    *result = (struct dskv_row_result){.argmax = -1, .sampled = -1, .score = NAN};
    result->finite = fake_logits(chain, engine->ids[row->token], logits);
    if (row->want & DSKV_ROW_LOGITS)
        result->logits = logits;
    if (row->want & DSKV_ROW_ARGMAX)
        result->argmax = fake_argmax(logits);
    if (row->want & DSKV_ROW_SCORE)
        result->score = fake_score(logits, row->target);
    if (row->want & DSKV_ROW_SAMPLE)
        result->sampled = fake_sample(logits, &dskv_plan_sampling(plan)[index]);
    if (row->want & DSKV_ROW_TOPK) {
        int32_t *ids = results->topk_ids + (size_t)index * DSKV_MAX_TOPK;
        float *logprobs = results->topk_logprobs + (size_t)index * DSKV_MAX_TOPK;
        fake_topk(logits, row->topk, ids, logprobs);
        result->topk_ids = ids;
        result->topk_logprobs = logprobs;
    }
}

static int32_t count_logit_rows(const struct dskv_plan *plan)
{
    int32_t n = 0;
    for (int32_t i = 0; i < plan->used.n_rows; i++)
        n += (dskv_plan_rows(plan)[i].want & DSKV_ROW_LOGITS) != 0;
    return n;
}

static void check_plan(const struct dskv_engine *engine, const struct dskv_plan *plan)
{
    struct dskv_error error;
    uint32_t n_under_way = engine->n_submitted - engine->n_collected;
    DSKV_ASSERT(n_under_way < 2 && !(n_under_way && count_logit_rows(engine->last)), "%u steps are under way",
                n_under_way);
    enum dskv_code code = dskv_plan_validate(plan, plan->bytes, &engine->info.bounds, engine->last, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    DSKV_ASSERT(count_logit_rows(plan) <= engine->info.max_logit_rows, "%d rows of logits", count_logit_rows(plan));
}

/* Tokens as ids; then what this step's rows draw is what the next one refers to. */
static void resolve(struct dskv_engine *engine, const struct dskv_plan *plan)
{
    for (int32_t i = 0; i < plan->used.n_tokens; i++) {
        int32_t id = dskv_plan_ids(plan)[i], row = dskv_plan_reference_row(id);
        engine->ids[i] = row < 0 ? id : engine->drawn[row];
    }
}

static void run_step(struct dskv_engine *engine, struct fake_step *step, const struct fake_results *results)
{
    const struct dskv_plan *plan = step->plan;
    step->has_run = 1;
    step->fails = enter_step(engine, plan->used.n_work);
    if (step->fails)
        return;
    uint64_t *chains = dskv_calloc((size_t)plan->used.n_tokens, sizeof *chains);
    resolve(engine, plan);
    copy_blocks(engine, plan);
    for (int32_t i = 0; i < plan->used.n_work; i++)
        run_work(engine, plan, &dskv_plan_work(plan)[i], chains);
    for (int32_t i = 0; i < plan->used.n_rows; i++) {
        fill_row(engine, plan, i, chains[dskv_plan_rows(plan)[i].token], results);
        engine->drawn[i] =
            dskv_plan_rows(plan)[i].want & DSKV_ROW_SAMPLE ? results->rows[i].sampled : results->rows[i].argmax;
    }
    free(chains);
}

static void count_chained(struct dskv_engine *engine, const struct dskv_plan *plan)
{
    int is_chained = 0;
    for (int32_t i = 0; i < plan->used.n_tokens; i++)
        is_chained |= dskv_plan_ids(plan)[i] < 0;
    pthread_mutex_lock(&engine->mutex);
    engine->n_chained += is_chained && engine->n_submitted != engine->n_collected;
    pthread_mutex_unlock(&engine->mutex);
}

enum dskv_exit dskv_engine_submit(struct dskv_engine *engine, const struct dskv_plan *plan, struct dskv_error *error)
{
    check_plan(engine, plan);
    (void)error;
    count_chained(engine, plan);
    engine->last = plan;
    uint32_t place = engine->n_submitted++ % 2;
    engine->steps[place] = (struct fake_step){.plan = plan};
    if (engine->runs_at_submit)
        run_step(engine, &engine->steps[place], &engine->results[place]);
    return DSKV_EXIT_OK;
}

/* What the last collect gave is not to be read any more. */
static void spoil(struct dskv_engine *engine, const struct fake_results *results)
{
    memset(results->rows, 0xa5, (size_t)engine->info.max_batch_tokens * sizeof *results->rows);
}

enum dskv_exit dskv_engine_collect(struct dskv_engine *engine, const struct dskv_row_result **results,
                                   int32_t *n_computed, struct dskv_error *error)
{
    DSKV_ASSERT(engine->n_submitted != engine->n_collected, "none of %u steps is under way", engine->n_submitted);
    uint32_t place = engine->n_collected++ % 2;
    struct fake_step *step = &engine->steps[place];
    int is_last = engine->n_submitted == engine->n_collected;
    if (is_last || !engine->steps[place ^ 1].has_run)
        spoil(engine, &engine->results[place ^ 1]);
    if (!step->has_run)
        run_step(engine, step, &engine->results[place]);
    if (step->fails)
        return dskv_fail_exit(error, DSKV_EXIT_RANK_LOST, "rank 1 was lost");
    engine->rows_computed += (uint64_t)step->plan->used.n_tokens;
    *results = engine->results[place].rows;
    *n_computed = step->plan->used.n_tokens;
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
    assert_settled(engine);
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
    assert_settled(engine);
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
