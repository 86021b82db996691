#include "engine_run.h"

#include "base/log.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct engine_test *all_tests, *next_test;
static int32_t n_taken;

/* ---- opening on every rank ---------------------------------------------------------------------- */

static void run_next(void)
{
    const struct engine_test *test = next_test++;
    struct dskv_engine *engine = NULL;
    struct dskv_error error = {0};
    enum dskv_exit code = dskv_engine_open(&test->options, &engine, &error);
    if (code)
        printf("(%s) ", error.message);
    CU_ASSERT_EQUAL(code, test->expected);
    CU_ASSERT_EQUAL(code == DSKV_EXIT_OK, engine != NULL);
    CU_ASSERT(code == DSKV_EXIT_OK || error.message[0] != 0);
    take_all_blocks_back();
    if (engine && test->body)
        test->body(engine);
    dskv_engine_close(&engine);
}

static int work_through(void)
{
    int failures = 0;
    for (const struct engine_test *test = all_tests; test->name; test++) {
        struct dskv_engine *engine = NULL;
        struct dskv_error error = {0};
        enum dskv_exit code = dskv_engine_open(&test->options, &engine, &error);
        failures += code != test->expected;
        if (engine)
            failures += dskv_engine_work(engine) != DSKV_EXIT_OK;
        dskv_engine_close(&engine);
    }
    return failures;
}

int engine_run_tests(const char *suite, const struct engine_test *tests)
{
    int rank, n_ranks, n_tests = 0, failures;
    struct dskv_error error = {0};
    if (dskv_parallel_start(&rank, &n_ranks, &error)) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    dskv_log_open(DSKV_LOG_WARNING, rank);
    setvbuf(stdout, NULL, _IOLBF, 0);
    all_tests = next_test = tests;
    if (rank == 0) {
        struct dskv_test list[64] = {{NULL, NULL}};
        for (; tests[n_tests].name && n_tests < 63; n_tests++)
            list[n_tests] = (struct dskv_test){tests[n_tests].name, run_next};
        failures = dskv_run_tests(suite, list);
    } else {
        failures = work_through();
    }
    dskv_parallel_stop();
    return failures;
}

/* ---- lines and plans ---------------------------------------------------------------------------- */

void take_all_blocks_back(void)
{
    n_taken = 0;
}

int32_t take_block(const struct dskv_engine *engine)
{
    int32_t n_blocks = dskv_engine_info(engine)->n_blocks;
    if (n_taken >= n_blocks) {
        fprintf(stderr, "the test needs more than %d blocks\n", n_blocks);
        abort();
    }
    int64_t stride = 7; /* coprime to the pool's size, so that neighbours in a table are no neighbours in the pool */
    while (n_blocks % stride == 0)
        stride += 2;
    return (int32_t)((n_taken++ * stride + 3) % n_blocks);
}

void plan_extend(struct dskv_engine *engine, struct dskv_plan *plan, struct line *line, const int32_t *tokens,
                 int32_t n, uint32_t want, int32_t first_row)
{
    int32_t slots[LINE_MAX_TOKENS], block_tokens = dskv_engine_info(engine)->block_tokens;
    for (int32_t i = 0; i < n; i++) {
        int32_t position = line->n + i;
        if (position / block_tokens == line->n_blocks)
            line->table[line->n_blocks++] = take_block(engine);
        slots[i] = line->table[position / block_tokens] * block_tokens + position % block_tokens;
        line->tokens[position] = tokens[i];
    }
    int32_t first = dskv_plan_add_work(plan, tokens, slots, n, line->n, line->table, line->n_blocks);
    for (int32_t i = first_row; i < n; i++) {
        struct dskv_plan_row row = {.token = first + i, .want = want, .target = -1};
        dskv_plan_add_row(plan, &row, NULL);
    }
    line->n += n;
}

struct dskv_plan *plan_for(struct dskv_engine *engine, int32_t n_tokens, int32_t n_work)
{
    struct dskv_plan_sizes need = {
        .n_tokens = n_tokens, .n_work = n_work, .n_table = n_work * LINE_MAX_BLOCKS, .n_copies = 8, .n_rows = n_tokens};
    return dskv_engine_plan(engine, &need);
}

const struct dskv_row_result *run_plan(struct dskv_engine *engine, const struct dskv_plan *plan)
{
    const struct dskv_row_result *results = NULL;
    int32_t n_computed = -1;
    struct dskv_error error = {0};
    if (dskv_plan_validate(plan, plan->bytes, &dskv_engine_info(engine)->bounds, NULL, &error) != DSKV_OK ||
        dskv_engine_step(engine, plan, &results, &n_computed, &error) != DSKV_EXIT_OK) {
        fprintf(stderr, "the step failed: %s\n", error.message);
        abort();
    }
    CU_ASSERT_EQUAL(n_computed, plan->used.n_tokens);
    return results;
}

void extend(struct dskv_engine *engine, struct line *line, const int32_t *tokens, int32_t n, float *rows)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    int32_t most = info->max_batch_tokens < info->max_logit_rows ? info->max_batch_tokens : info->max_logit_rows;
    for (int32_t done = 0, m; done < n; done += m) {
        m = n - done < most ? n - done : most;
        struct dskv_plan *plan = plan_for(engine, m, 1);
        plan_extend(engine, plan, line, tokens + done, m, DSKV_ROW_LOGITS, rows ? 0 : m);
        const struct dskv_row_result *results = run_plan(engine, plan);
        for (int32_t r = 0; r < plan->used.n_rows; r++) {
            CU_ASSERT(results[r].finite);
            memcpy(rows + (size_t)(done + r) * (size_t)info->model.vocab, results[r].logits,
                   (size_t)info->model.vocab * sizeof *rows);
        }
    }
}

void *copy_out_all(struct dskv_engine *engine, const struct line *line, int32_t start, size_t *bytes)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    struct dskv_kv_piece whole = {.start = start, .stop = line->n};
    size_t layer_bytes = dskv_engine_kv_piece_bytes(engine, &whole, info->kv_dtype);
    char *out = malloc(layer_bytes * 2 * (size_t)info->model.n_layers), *at = out;
    int32_t most = dskv_engine_kv_piece_tokens(engine);
    for (int32_t layer = 0; layer < info->model.n_layers; layer++)
        for (int32_t is_value = 0; is_value < 2; is_value++)
            for (int32_t from = start; from < line->n; from += most) {
                int32_t stop = from + most < line->n ? from + most : line->n;
                struct dskv_kv_piece piece = {layer, is_value, from, stop, line->table, line->n_blocks};
                struct dskv_error error = {0};
                CU_ASSERT_EQUAL(dskv_engine_copy_out(engine, &piece, at, &error), DSKV_EXIT_OK);
                at += dskv_engine_kv_piece_bytes(engine, &piece, info->kv_dtype);
            }
    *bytes = (size_t)(at - out);
    return out;
}

int compare_bits(const char *what, const void *a, const void *b, size_t bytes)
{
    if (memcmp(a, b, bytes) == 0)
        return 0;
    size_t at = 0, n = 0;
    for (size_t i = bytes; i-- > 0;)
        if (((const uint8_t *)a)[i] != ((const uint8_t *)b)[i]) {
            at = i;
            n++;
        }
    printf("%s: %zu of %zu bytes differ, first at %zu\n", what, n, bytes, at);
    return 1;
}

void random_tokens(uint64_t seed, int32_t vocab, int32_t *tokens, int32_t n)
{
    uint64_t state = seed * 2862933555777941757u + 3037000493u;
    for (int32_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        tokens[i] = (int32_t)((state >> 33) % (uint64_t)vocab);
    }
}
