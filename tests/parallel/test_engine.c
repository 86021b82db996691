/* The engine against transformers' own numbers, its results against one another, its counters and its refusals. */
#include "engine_run.h"
#include "parallel/json.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOGITS_TOLERANCE 2e-3 /* f32 arithmetic of another order */
#define GAP 5e-3              /* where two logits are closer, another order may rightly choose the other */

/* ---- the oracle --------------------------------------------------------------------------------- */

/* oracle.json is a list; the reader takes objects. */
static struct dskv_json *read_oracle(const char *model_dir)
{
    char path[512];
    snprintf(path, sizeof path, "%s/oracle.json", model_dir);
    FILE *file = fopen(path, "r");
    char *text = malloc(4 << 20);
    size_t n = (size_t)sprintf(text, "{\"cases\":");
    n += fread(text + n, 1, (4 << 20) - n - 2, file);
    text[n++] = '}';
    fclose(file);
    struct dskv_json *document = NULL;
    struct dskv_error error = {0};
    if (dskv_json_parse(path, text, n, &document, &error))
        CU_FAIL("the oracle cannot be read");
    free(text);
    return document;
}

static int32_t read_ids(const struct dskv_json *array, int32_t *ids)
{
    size_t n = dskv_json_count(array);
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)dskv_json_integer(dskv_json_at(array, i));
    return (int32_t)n;
}

/* The best id of a row, and how far the second best is behind. */
static int32_t best_of(const float *row, int32_t vocab, float *gap)
{
    int32_t best = 0;
    float second = -INFINITY;
    for (int32_t i = 1; i < vocab; i++) {
        if (row[i] > row[best]) {
            second = row[best];
            best = i;
        } else if (row[i] > second) {
            second = row[i];
        }
    }
    *gap = row[best] - second;
    return best;
}

/* Greedy steps follow the oracle's tokens, so that one close call does not end the comparison. */
static void follow_greedy(struct dskv_engine *engine, struct line *line, const float *last, const int32_t *greedy,
                          int32_t n_greedy)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab;
    float *row = malloc((size_t)vocab * sizeof *row), gap;
    memcpy(row, last, (size_t)vocab * sizeof *row);
    for (int32_t i = 0; i < n_greedy; i++) {
        int32_t best = best_of(row, vocab, &gap);
        if (gap > GAP)
            CU_ASSERT_EQUAL(best, greedy[i]);
        extend(engine, line, &greedy[i], 1, row);
    }
    free(row);
}

static void matches_the_oracle(struct dskv_engine *engine, const char *model_dir)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab;
    struct dskv_json *document = read_oracle(model_dir);
    const struct dskv_json *cases = dskv_json_get(document, "cases");
    float *rows = malloc((size_t)LINE_MAX_TOKENS * (size_t)vocab * sizeof *rows), gap, worst = 0;
    CU_ASSERT(dskv_json_count(cases) >= 12);
    for (size_t c = 0; c < dskv_json_count(cases); c++) {
        const struct dskv_json *one = dskv_json_at(cases, c), *last = dskv_json_get(one, "last_logits");
        int32_t ids[LINE_MAX_TOKENS], argmax[LINE_MAX_TOKENS], greedy[64];
        int32_t n = read_ids(dskv_json_get(one, "input_ids"), ids);
        CU_ASSERT_EQUAL(read_ids(dskv_json_get(one, "argmax"), argmax), n);
        struct line line = {0};
        extend(engine, &line, ids, n, rows);
        const float *row = rows + (size_t)(n - 1) * (size_t)vocab;
        for (size_t i = 0; i < dskv_json_count(last); i++)
            worst = fmaxf(worst, fabsf(row[i] - (float)dskv_json_number(dskv_json_at(last, i))));
        for (int32_t i = 0; i < n; i++) {
            int32_t best = best_of(rows + (size_t)i * (size_t)vocab, vocab, &gap);
            if (gap > GAP)
                CU_ASSERT_EQUAL(best, argmax[i]);
        }
        follow_greedy(engine, &line, row, greedy, read_ids(dskv_json_get(one, "greedy"), greedy));
        take_all_blocks_back();
    }
    printf("largest difference of logits %.1e ... ", (double)worst);
    CU_ASSERT(worst < LOGITS_TOLERANCE);
    free(rows);
    dskv_json_close(&document);
}

static void gpt2_matches_the_oracle(struct dskv_engine *engine)
{
    matches_the_oracle(engine, MODEL("atlas-gpt2"));
}

static void llama_matches_the_oracle(struct dskv_engine *engine)
{
    matches_the_oracle(engine, MODEL("atlas-llama"));
}

/* ---- what a row can give ------------------------------------------------------------------------ */

#define TOPK 40

/* Everything at once of one row; the shards' merged words against the whole row's. */
static void results_agree_with_the_row(struct dskv_engine *engine)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[90];
    struct line line = {0};
    random_tokens(3, vocab, tokens, 90);
    struct dskv_plan *plan = plan_for(engine, 90, 1);
    plan_extend(engine, plan, &line, tokens, 90, 0, 90);
    for (int32_t i = 0; i < 90; i++) { /* more rows than one chunk; every third without logits */
        uint32_t want =
            DSKV_ROW_ARGMAX | DSKV_ROW_TOPK | DSKV_ROW_SCORE | DSKV_ROW_SAMPLE | (i % 3 ? DSKV_ROW_LOGITS : 0);
        struct dskv_plan_row row = {.token = i, .want = want, .topk = i % 2 ? TOPK : 1, .target = (i * 37) % vocab};
        struct dskv_sampling sampling = {
            .temperature = i % 5 ? 1 : 0, .top_p = 1, .top_k = i % 5 == 1, .seed = 9, .position = i};
        dskv_plan_add_row(plan, &row, &sampling);
    }
    const struct dskv_row_result *results = run_plan(engine, plan);
    for (int32_t i = 0; i < 90; i++) {
        const struct dskv_row_result *r = &results[i];
        CU_ASSERT_EQUAL(r->logits != NULL, i % 3 != 0);
        CU_ASSERT(r->sampled >= 0 && r->sampled < vocab);
        if (i % 5 < 2) /* no temperature, or the best one alone */
            CU_ASSERT_EQUAL(r->sampled, r->argmax);
        if (!r->logits)
            continue;
        double sum = 0, max;
        float gap;
        CU_ASSERT_EQUAL(r->argmax, best_of(r->logits, vocab, &gap));
        max = (double)r->logits[r->argmax];
        for (int32_t id = 0; id < vocab; id++)
            sum += exp((double)r->logits[id] - max);
        CU_ASSERT(fabs((double)r->score - ((double)r->logits[(i * 37) % vocab] - max - log(sum))) < 1e-5);
        int32_t k = i % 2 ? TOPK : 1, better = 0;
        for (int32_t j = 0; j < k; j++)
            CU_ASSERT(fabs((double)r->topk_logprobs[j] - ((double)r->logits[r->topk_ids[j]] - max - log(sum))) < 1e-5);
        for (int32_t id = 0; id < vocab; id++)
            better += r->logits[id] > r->logits[r->topk_ids[k - 1]];
        CU_ASSERT(better < k);
    }
}

/* A drawn token depends on its seed and position, not on what else was in the step or whose turn it was. */
static void drawn_tokens_can_be_drawn_again(struct dskv_engine *engine)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[40], first[40], same = 0;
    random_tokens(4, vocab, tokens, 40);
    for (int round = 0; round < 3; round++) {
        struct line line = {0};
        for (int32_t at = 0, n; at < 40; at += n) {
            n = round == 0 ? 40 : round == 1 ? 8 : 1;
            struct dskv_plan *plan = plan_for(engine, n, 1);
            plan_extend(engine, plan, &line, tokens + at, n, 0, n);
            for (int32_t i = 0; i < n; i++) {
                struct dskv_plan_row row = {.token = i, .want = DSKV_ROW_SAMPLE, .target = -1};
                struct dskv_sampling sampling = {.temperature = 2, .top_p = 0.95f, .seed = 11, .position = at + i + 1};
                dskv_plan_add_row(plan, &row, &sampling);
            }
            const struct dskv_row_result *results = run_plan(engine, plan);
            for (int32_t i = 0; i < n; i++) {
                if (round == 0)
                    first[at + i] = results[i].sampled;
                CU_ASSERT_EQUAL(results[i].sampled, first[at + i]);
            }
        }
    }
    for (int32_t i = 1; i < 40; i++)
        same += first[i] == first[i - 1];
    CU_ASSERT(same < 20);
}

/* ---- steps that follow one another --------------------------------------------------------------- */

#define CHAIN_LINES 3
#define CHAIN_STEPS 24

/* One more token of each line, and what its row draws: the first line greedily, the others by chance. */
static struct dskv_plan *plan_chain(struct dskv_engine *engine, struct line *lines, const int32_t *ids)
{
    struct dskv_plan *plan = plan_for(engine, CHAIN_LINES, CHAIN_LINES);
    for (int32_t i = 0; i < CHAIN_LINES; i++) {
        plan_extend(engine, plan, &lines[i], &ids[i], 1, 0, 1);
        struct dskv_plan_row row = {.token = i, .want = i ? DSKV_ROW_SAMPLE : DSKV_ROW_ARGMAX, .target = -1};
        struct dskv_sampling sampling = {
            .temperature = 1, .top_p = 0.9f, .seed = 5 + (uint64_t)i, .position = lines[i].n};
        dskv_plan_add_row(plan, &row, &sampling);
    }
    return plan;
}

static void take_drawn(const struct dskv_row_result *results, int32_t *drawn)
{
    for (int32_t i = 0; i < CHAIN_LINES; i++)
        drawn[i] = i ? results[i].sampled : results[i].argmax;
}

/* Each step is collected before the next one names its tokens. */
static void run_one_by_one(struct dskv_engine *engine, struct line *lines, int32_t drawn[][CHAIN_LINES])
{
    int32_t ids[CHAIN_LINES] = {1, 2, 3};
    for (int32_t s = 0; s < CHAIN_STEPS; s++) {
        take_drawn(run_plan(engine, plan_chain(engine, lines, ids)), drawn[s]);
        memcpy(ids, drawn[s], sizeof ids);
    }
}

/* Each step is submitted before the last one is collected; only rows are named. */
static void run_ahead(struct dskv_engine *engine, struct line *lines, int32_t drawn[][CHAIN_LINES])
{
    int32_t ids[CHAIN_LINES] = {1, 2, 3}, n_computed;
    const struct dskv_row_result *results = NULL;
    struct dskv_error error = {0};
    for (int32_t s = 0; s <= CHAIN_STEPS; s++) {
        if (s < CHAIN_STEPS)
            CU_ASSERT_EQUAL(dskv_engine_submit(engine, plan_chain(engine, lines, ids), &error), DSKV_EXIT_OK);
        if (s > 1) /* of two steps before, and still there */
            take_drawn(results, drawn[s - 2]);
        if (s > 0) {
            CU_ASSERT_EQUAL(dskv_engine_collect(engine, &results, &n_computed, &error), DSKV_EXIT_OK);
            CU_ASSERT_EQUAL(n_computed, CHAIN_LINES);
        }
        for (int32_t i = 0; i < CHAIN_LINES; i++)
            ids[i] = dskv_plan_reference(i);
    }
    take_drawn(results, drawn[CHAIN_STEPS - 1]);
}

/* The same tokens and the same keys and values, to the bit, whoever named the tokens. */
static void steps_can_be_queued_ahead(struct dskv_engine *engine)
{
    static struct line lines[2][CHAIN_LINES];
    static int32_t drawn[2][CHAIN_STEPS][CHAIN_LINES];
    struct dskv_rank_stats before[DSKV_MAX_RANKS], after[DSKV_MAX_RANKS];
    struct dskv_error error = {0};
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[40], n_different = 0;
    memset(lines, 0, sizeof lines);
    for (int ahead = 0; ahead < 2; ahead++)
        for (int32_t i = 0; i < CHAIN_LINES; i++) {
            random_tokens(20 + (uint64_t)i, vocab, tokens, 40);
            extend(engine, &lines[ahead][i], tokens, 20 + 9 * i, NULL);
        }
    run_one_by_one(engine, lines[0], drawn[0]);
    CU_ASSERT_EQUAL(dskv_engine_stats(engine, before, &error), DSKV_EXIT_OK);
    run_ahead(engine, lines[1], drawn[1]);
    CU_ASSERT_EQUAL(dskv_engine_stats(engine, after, &error), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(memcmp(drawn[0], drawn[1], sizeof drawn[0]), 0);
    for (int32_t s = 1; s < CHAIN_STEPS; s++)
        n_different += drawn[0][s][1] != drawn[0][s - 1][1];
    CU_ASSERT(n_different > CHAIN_STEPS / 2); /* they are tokens that could have been mixed up */
    for (int32_t r = 0; r < dskv_engine_info(engine)->n_ranks; r++) {
        CU_ASSERT_EQUAL(after[r].steps - before[r].steps, CHAIN_STEPS);
        CU_ASSERT_EQUAL(after[r].rows_computed - before[r].rows_computed, CHAIN_STEPS * CHAIN_LINES);
    }
    for (int32_t i = 0; i < CHAIN_LINES; i++) {
        size_t bytes[2];
        void *kv[2] = {copy_out_all(engine, &lines[0][i], 0, &bytes[0]),
                       copy_out_all(engine, &lines[1][i], 0, &bytes[1])};
        CU_ASSERT_EQUAL_FATAL(bytes[0], bytes[1]);
        CU_ASSERT_EQUAL(compare_bits("keys and values", kv[0], kv[1], bytes[0]), 0);
        free(kv[0]);
        free(kv[1]);
    }
}

/* ---- counters, replay, refusals ----------------------------------------------------------------- */

static void counters_count(struct dskv_engine *engine)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    struct dskv_rank_stats before[DSKV_MAX_RANKS], after[DSKV_MAX_RANKS];
    struct dskv_error error = {0};
    int32_t tokens[33];
    struct line line = {0};
    uint64_t sharded = 0;
    random_tokens(5, info->model.vocab, tokens, 33);
    CU_ASSERT_EQUAL(dskv_engine_stats(engine, before, &error), DSKV_EXIT_OK);
    extend(engine, &line, tokens, 33, NULL);
    CU_ASSERT_EQUAL(dskv_engine_stats(engine, after, &error), DSKV_EXIT_OK);
    for (int32_t r = 0; r < info->n_ranks; r++) {
        CU_ASSERT_EQUAL(after[r].rows_computed - before[r].rows_computed, 33);
        CU_ASSERT_EQUAL(after[r].steps - before[r].steps, 1);
        CU_ASSERT(after[r].pool_bytes > 0 && after[r].pool_bytes <= 192 << 20);
        size_t own = after[r].resident_bytes - after[r].weight_bytes - after[r].replicated_bytes;
        printf("rank %d %zu KiB beyond its weights ... ", r, own >> 10);
#ifndef __SANITIZE_ADDRESS__
        CU_ASSERT(own < (size_t)64 << 20);
#endif
        sharded += after[r].weight_bytes;
    }
    int64_t width = info->model.width, mlp = info->model.mlp; /* atlas-gpt2: qkv, o, up, down, tied embedding, in f16 */
    CU_ASSERT_EQUAL(sharded, (uint64_t)(2 * (info->model.n_layers * (4 * width * width + 2 * width * mlp) +
                                             info->model.vocab * width)));
    CU_ASSERT_EQUAL(dskv_engine_check(engine, &error), DSKV_EXIT_OK);
}

/* A plan that was recorded and read again executes as the first time. */
static void a_recorded_plan_can_be_replayed(struct dskv_engine *engine)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[21];
    size_t bytes = (size_t)vocab * 21 * sizeof(float);
    float *rows = malloc(bytes), *again = malloc(bytes);
    struct line line = {0};
    struct dskv_error error = {0};
    FILE *trace = tmpfile();
    random_tokens(6, vocab, tokens, 21);
    struct dskv_plan *plan = plan_for(engine, 21, 1), *read = NULL;
    plan_extend(engine, plan, &line, tokens, 21, DSKV_ROW_LOGITS, 0);
    CU_ASSERT_EQUAL(dskv_plan_record(plan, trace, &error), DSKV_OK);
    rewind(trace);
    const struct dskv_row_result *results = run_plan(engine, plan);
    for (int32_t i = 0; i < 21; i++)
        memcpy(rows + (size_t)i * (size_t)vocab, results[i].logits, (size_t)vocab * sizeof *rows);
    CU_ASSERT_EQUAL(dskv_plan_read(trace, &read, &error), DSKV_OK);
    results = run_plan(engine, read);
    for (int32_t i = 0; i < 21; i++)
        memcpy(again + (size_t)i * (size_t)vocab, results[i].logits, (size_t)vocab * sizeof *rows);
    CU_ASSERT_EQUAL(compare_bits("replayed rows", rows, again, bytes), 0);
    fclose(trace);
    free(read);
    free(rows);
    free(again);
}

static void the_pool_is_as_asked(struct dskv_engine *engine)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    CU_ASSERT_EQUAL(info->block_tokens, 16);
    CU_ASSERT_EQUAL(info->max_model_len, 100);
    CU_ASSERT(info->n_blocks >= 1);
    CU_ASSERT((uint64_t)info->n_blocks * info->kv_block_bytes <= (uint64_t)info->n_ranks * (1 << 20));
    CU_ASSERT_EQUAL(info->bounds.max_tokens, 35);
    CU_ASSERT_EQUAL(strlen(info->numerics_id), 32);
}

int main(void)
{
    static const struct engine_test tests[] = {
        {"gpt2 matches the oracle", OPTIONS("atlas-gpt2"), 0, gpt2_matches_the_oracle},
        {"llama matches the oracle", OPTIONS("atlas-llama"), 0, llama_matches_the_oracle},
        {"results agree with the row", OPTIONS("atlas-gpt2", .check_plans = 1), 0, results_agree_with_the_row},
        {"results agree with the row, llama", OPTIONS("atlas-llama"), 0, results_agree_with_the_row},
        {"drawn tokens can be drawn again", OPTIONS("atlas-llama", .check_plans = 1), 0,
         drawn_tokens_can_be_drawn_again},
        {"steps can be queued ahead", OPTIONS("atlas-llama", .takes_references = 1), 0, steps_can_be_queued_ahead},
        {"steps can be queued ahead, and checked", OPTIONS("atlas-gpt2", .takes_references = 1, .check_plans = 1), 0,
         steps_can_be_queued_ahead},
        {"counters count", OPTIONS("atlas-gpt2"), 0, counters_count},
        {"a recorded plan can be replayed", OPTIONS("atlas-gpt2"), 0, a_recorded_plan_can_be_replayed},
        {"the pool is as asked",
         {.model_dir = MODEL("atlas-gpt2"),
          .kv_cache_bytes = 1 << 20,
          .block_tokens = 16,
          .max_model_len = 100,
          .max_batch_tokens = 32,
          .max_sequences = 3},
         0,
         the_pool_is_as_asked},
        {"a pool without room for a block",
         {.model_dir = MODEL("atlas-gpt2"), .kv_cache_bytes = 1000},
         DSKV_EXIT_MEMORY,
         NULL},
        {"a pool larger than the machine",
         {.model_dir = MODEL("atlas-gpt2"), .kv_cache_bytes = INT64_C(1) << 50},
         DSKV_EXIT_MEMORY,
         NULL},
        {"another number of ranks", OPTIONS("atlas-gpt2", .tensor_parallel = 63), DSKV_EXIT_USAGE, NULL},
        {"a context beyond the model's", OPTIONS("atlas-gpt2", .max_model_len = 1025), DSKV_EXIT_USAGE, NULL},
        {"a block size that is none", OPTIONS("atlas-gpt2", .block_tokens = 48), DSKV_EXIT_USAGE, NULL},
        {"a dtype that is none", OPTIONS("atlas-gpt2", .kv_dtype = "i32"), DSKV_EXIT_USAGE, NULL},
        {"a directory that is none", OPTIONS("no-model"), DSKV_EXIT_MODEL, NULL},
        {.name = NULL},
    };
    return engine_run_tests("parallel.engine", tests);
}
