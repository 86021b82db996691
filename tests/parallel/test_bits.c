/* Bits: a row and its keys and values are one function of the tokens before it, however the work was cut, packed or
 * stored. Everything here is compared with memcmp. */
#include "engine_run.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- cuts --------------------------------------------------------------------------------------- */

/* 16 tokens cold; then in pieces of 1, 2, 3, 7, 16, and as a prefix of each length with the rest in one step. */
static void every_cut_gives_the_same(struct dskv_engine *engine)
{
    static const int32_t sizes[] = {1, 2, 3, 7, 16};
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[16];
    size_t row_bytes = (size_t)vocab * sizeof(float), kv_bytes, n;
    float *cold = malloc(16 * row_bytes), *rows = malloc(16 * row_bytes);
    struct line line = {0};
    int differ = 0;
    random_tokens(1, vocab, tokens, 16);
    extend(engine, &line, tokens, 16, cold);
    void *cold_kv = copy_out_all(engine, &line, 0, &kv_bytes);
    for (int32_t s = 0; s < 5 + 15; s++) {
        struct line cut = {0};
        int32_t first = s < 5 ? 0 : s - 4, size = s < 5 ? sizes[s] : 16;
        if (first)
            extend(engine, &cut, tokens, first, rows);
        while (cut.n < 16) {
            int32_t m = 16 - cut.n < size ? 16 - cut.n : size;
            extend(engine, &cut, tokens + cut.n, m, rows + (size_t)cut.n * (size_t)vocab);
        }
        void *kv = copy_out_all(engine, &cut, 0, &n);
        differ +=
            compare_bits("rows of a cut", cold, rows, 16 * row_bytes) + compare_bits("kv of a cut", cold_kv, kv, n);
        free(kv);
    }
    CU_ASSERT_EQUAL(differ, 0);
    free(cold_kv);
    free(cold);
    free(rows);
}

/* The prefix's last token run again, writing nothing: the same row, the same keys and values. */
static void running_a_token_again_changes_nothing(struct dskv_engine *engine)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[70];
    size_t row_bytes = (size_t)vocab * sizeof(float), bytes, n;
    float *rows = malloc(70 * row_bytes);
    struct line line = {0};
    random_tokens(2, vocab, tokens, 70);
    extend(engine, &line, tokens, 70, rows);
    void *before = copy_out_all(engine, &line, 0, &bytes);
    for (int32_t last = 0; last < 70; last += 23) {
        struct dskv_plan *plan = plan_for(engine, 1, 1);
        struct dskv_plan_row row = {.want = DSKV_ROW_LOGITS, .target = -1};
        int32_t block_tokens = dskv_engine_info(engine)->block_tokens;
        dskv_plan_add_work(plan, &tokens[last], NULL, 1, last, line.table, last / block_tokens + 1);
        dskv_plan_add_row(plan, &row, NULL);
        const struct dskv_row_result *results = run_plan(engine, plan);
        CU_ASSERT_EQUAL(
            compare_bits("row run again", results[0].logits, rows + (size_t)last * (size_t)vocab, row_bytes), 0);
    }
    void *after = copy_out_all(engine, &line, 0, &n);
    CU_ASSERT_EQUAL(compare_bits("kv after it", before, after, bytes), 0);
    free(before);
    free(after);
    free(rows);
}

/* ---- company ------------------------------------------------------------------------------------ */

/* Sequences of very different lengths in one step, and in another order, against each alone. */
static void company_changes_nothing(struct dskv_engine *engine)
{
    static const int32_t lengths[] = {1, 17, 300, 64, 5, 150};
    enum { N = sizeof lengths / sizeof *lengths };
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[N][300];
    size_t row_bytes = (size_t)vocab * sizeof(float);
    float *alone = malloc(N * row_bytes);
    int differ = 0;
    for (int i = 0; i < N; i++) {
        struct line line = {0};
        random_tokens(100 + (uint64_t)i, vocab, tokens[i], lengths[i]);
        float *rows = malloc((size_t)lengths[i] * row_bytes);
        extend(engine, &line, tokens[i], lengths[i], rows);
        memcpy(alone + (size_t)i * (size_t)vocab, rows + (size_t)(lengths[i] - 1) * (size_t)vocab, row_bytes);
        free(rows);
    }
    for (int order = 0; order < 6; order++) {
        struct dskv_plan *plan = plan_for(engine, 600, N);
        struct line lines[N] = {{0}};
        for (int j = 0; j < N; j++) {
            int i = (order + j * (order % 2 ? 5 : 1)) % N;
            plan_extend(engine, plan, &lines[i], tokens[i], lengths[i], DSKV_ROW_LOGITS, lengths[i] - 1);
        }
        const struct dskv_row_result *results = run_plan(engine, plan);
        for (int j = 0; j < N; j++) {
            int i = (order + j * (order % 2 ? 5 : 1)) % N;
            differ += compare_bits("row in company", results[j].logits, alone + (size_t)i * (size_t)vocab, row_bytes);
        }
    }
    CU_ASSERT_EQUAL(differ, 0);
    free(alone);
}

/* Forks: a block is copied, both extend it with other tokens, each is as its own cold run. */
static void forks_do_not_meet(struct dskv_engine *engine)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[90],
            block_tokens = dskv_engine_info(engine)->block_tokens;
    size_t row_bytes = (size_t)vocab * sizeof(float);
    float *rows = malloc(20 * row_bytes), *cold = malloc(90 * row_bytes);
    struct line trunk = {0};
    random_tokens(8, vocab, tokens, 90);
    extend(engine, &trunk, tokens, 70, NULL);
    for (int fork = 0; fork < 2; fork++) {
        struct line branch = trunk, alone = {0};
        int32_t all[90], last = trunk.n_blocks - 1;
        memcpy(all, tokens, sizeof all);
        all[70] = (all[70] + 1 + fork) % vocab;
        branch.table[last] = take_block(engine);
        struct dskv_plan *plan = plan_for(engine, 20, 1);
        dskv_plan_add_copy(plan, trunk.table[last], branch.table[last], 70 - last * block_tokens);
        plan_extend(engine, plan, &branch, all + 70, 20, DSKV_ROW_LOGITS, 0);
        const struct dskv_row_result *results = run_plan(engine, plan);
        for (int i = 0; i < 20; i++)
            memcpy(rows + (size_t)i * (size_t)vocab, results[i].logits, row_bytes);
        extend(engine, &alone, all, 90, cold);
        CU_ASSERT_EQUAL(compare_bits("rows of a fork", rows, cold + (size_t)70 * (size_t)vocab, 20 * row_bytes), 0);
    }
    free(rows);
    free(cold);
}

/* ---- engines against each other ----------------------------------------------------------------- */

static float *kept_rows; /* of the engine with other blocks, a test earlier */
#define KEPT 200

static void keep_rows(struct dskv_engine *engine)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[KEPT];
    struct line line = {0};
    random_tokens(12, vocab, tokens, KEPT);
    kept_rows = malloc((size_t)KEPT * (size_t)vocab * sizeof *kept_rows);
    extend(engine, &line, tokens, KEPT, kept_rows);
}

static void rows_are_as_kept(struct dskv_engine *engine)
{
    int32_t vocab = dskv_engine_info(engine)->model.vocab, tokens[KEPT];
    size_t bytes = (size_t)KEPT * (size_t)vocab * sizeof(float);
    float *rows = malloc(bytes);
    struct line line = {0};
    random_tokens(12, vocab, tokens, KEPT);
    extend(engine, &line, tokens, 100, rows);
    extend(engine, &line, tokens + 100, KEPT - 100, rows + (size_t)100 * (size_t)vocab);
    CU_ASSERT_EQUAL(compare_bits("rows of another engine", rows, kept_rows, bytes), 0);
    free(rows);
    free(kept_rows);
}

/* ---- export and import -------------------------------------------------------------------------- */

/* Writes what was copied out of one line into the blocks of another. */
static void copy_in_all(struct dskv_engine *engine, struct line *line, enum dskv_dtype dtype, const char *bytes)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    int32_t most = dskv_engine_kv_piece_tokens(engine);
    for (int32_t layer = 0; layer < info->model.n_layers; layer++)
        for (int32_t is_value = 0; is_value < 2; is_value++)
            for (int32_t from = 0; from < line->n; from += most) {
                int32_t stop = from + most < line->n ? from + most : line->n;
                struct dskv_kv_piece piece = {layer, is_value, from, stop, line->table, line->n_blocks};
                struct dskv_error error = {0};
                CU_ASSERT_EQUAL(dskv_engine_copy_in(engine, &piece, dtype, bytes, &error), DSKV_EXIT_OK);
                bytes += dskv_engine_kv_piece_bytes(engine, &piece, dtype);
            }
}

static struct line fresh_line_like(const struct dskv_engine *engine, const struct line *line)
{
    struct line copy = *line;
    for (int32_t b = 0; b < copy.n_blocks; b++)
        copy.table[b] = take_block(engine);
    return copy;
}

/* Out, into other blocks, on: the next row is the same; out again: the same bytes, none of them a row of zeros. */
static void copied_kv_goes_on_the_same(struct dskv_engine *engine)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    int32_t vocab = info->model.vocab, tokens[310];
    size_t row_bytes = (size_t)vocab * sizeof(float), bytes, n, head_bytes;
    float *row = malloc(row_bytes), *again = malloc(row_bytes);
    struct line line = {0};
    random_tokens(21, vocab, tokens, 310);
    extend(engine, &line, tokens, 309, NULL);
    char *kv = copy_out_all(engine, &line, 0, &bytes), *zeros = calloc(1, 4096);
    head_bytes = (size_t)info->model.head_dim * dskv_dtype_bytes(info->kv_dtype);
    int32_t n_zero = 0;
    for (size_t at = 0; at < bytes; at += head_bytes)
        n_zero += memcmp(kv + at, zeros, head_bytes) == 0;
    CU_ASSERT_EQUAL(n_zero, 0);
    struct line copy = fresh_line_like(engine, &line);
    copy_in_all(engine, &copy, info->kv_dtype, kv);
    char *kv_again = copy_out_all(engine, &copy, 0, &n);
    CU_ASSERT_EQUAL(n, bytes);
    CU_ASSERT_EQUAL(compare_bits("kv out, in, out", kv, kv_again, bytes), 0);
    extend(engine, &line, tokens + 309, 1, row);
    extend(engine, &copy, tokens + 309, 1, again);
    CU_ASSERT_EQUAL(compare_bits("row after it", row, again, row_bytes), 0);
    free(kv);
    free(kv_again);
    free(zeros);
    free(row);
    free(again);
}

/* f32 in, rounded once to the pool's dtype; and what cannot be held there is found before. */
static void copied_kv_is_converted(struct dskv_engine *engine)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    struct line line = {.n = 20};
    size_t n = (size_t)info->model.n_kv_heads * 20 * (size_t)info->model.head_dim, index = 0, bytes;
    size_t total = n * 2 * (size_t)info->model.n_layers;
    float *wide = malloc(total * sizeof *wide);
    char *rounded = malloc(total * dskv_dtype_bytes(info->kv_dtype));
    for (size_t i = 0; i < total; i++)
        wide[i] = (float)((i * 7919) % 10007) / 1237.0f - 4;
    line.n_blocks = (20 + info->block_tokens - 1) / info->block_tokens;
    line = fresh_line_like(engine, &line);
    CU_ASSERT(dskv_engine_kv_finite(engine, DSKV_F32, wide, total, &index));
    copy_in_all(engine, &line, DSKV_F32, (const char *)wide);
    CU_ASSERT_EQUAL(dskv_convert(rounded, info->kv_dtype, wide, DSKV_F32, total), total);
    char *out = copy_out_all(engine, &line, 0, &bytes);
    CU_ASSERT_EQUAL(compare_bits("converted kv", out, rounded, bytes), 0);
    wide[5000] = 1e38f; /* infinite in f16 alone */
    wide[6000] = 0.0f / 0.0f + wide[1] / 0.0f;
    CU_ASSERT_FALSE(dskv_engine_kv_finite(engine, DSKV_F32, wide, total, &index));
    CU_ASSERT_EQUAL(index, info->kv_dtype == DSKV_F16 ? 5000 : 6000);
    free(out);
    free(wide);
    free(rounded);
}

int main(void)
{
#define SMALL(model, ...) OPTIONS(model, .max_batch_tokens = 700, .max_sequences = 8, __VA_ARGS__)
/* 6 heads on 2 KV heads of 20, a width that no head count divides, and MLP and vocabulary of so few units that some
 * ranks have none. */
#define ODD(...)                                                                                                       \
    {                                                                                                                  \
        .model_dir = DSKV_SOURCE_DIR "/tests/parallel/odd-model", .dummy_weights = 1, .kv_cache_bytes = 64 << 20,      \
        .max_batch_tokens = 700, .max_sequences = 8, __VA_ARGS__                                                       \
    }
    static const struct engine_test tests[] = {
        {"every cut gives the same, gpt2", SMALL("atlas-gpt2", .block_tokens = 16), 0, every_cut_gives_the_same},
        {"every cut gives the same, llama", SMALL("atlas-llama", .block_tokens = 64), 0, every_cut_gives_the_same},
        {"every cut gives the same, kv in f16", SMALL("atlas-llama", .kv_dtype = "f16"), 0, every_cut_gives_the_same},
        {"every cut gives the same, kv in bf16", SMALL("atlas-gpt2", .kv_dtype = "bf16"), 0, every_cut_gives_the_same},
        {"running a token again changes nothing", SMALL("atlas-llama", .block_tokens = 16), 0,
         running_a_token_again_changes_nothing},
        {"company changes nothing, gpt2", SMALL("atlas-gpt2", .block_tokens = 16), 0, company_changes_nothing},
        {"company changes nothing, llama", SMALL("atlas-llama", .kv_dtype = "f16"), 0, company_changes_nothing},
        {"forks do not meet", SMALL("atlas-llama", .block_tokens = 64), 0, forks_do_not_meet},
        {"rows with blocks of 16", SMALL("atlas-llama", .block_tokens = 16), 0, keep_rows},
        {"are those with blocks of 256", SMALL("atlas-llama", .block_tokens = 256), 0, rows_are_as_kept},
        {"rows with two threads", SMALL("atlas-gpt2", .n_threads = 2), 0, keep_rows},
        {"are those with one", SMALL("atlas-gpt2", .n_threads = 1), 0, rows_are_as_kept},
        {"copied kv goes on the same, f32", SMALL("atlas-llama", .block_tokens = 16), 0, copied_kv_goes_on_the_same},
        {"copied kv goes on the same, f16", SMALL("atlas-gpt2", .kv_dtype = "f16"), 0, copied_kv_goes_on_the_same},
        {"copied kv goes on the same, bf16", SMALL("atlas-llama", .kv_dtype = "bf16"), 0, copied_kv_goes_on_the_same},
        {"copied kv is converted to f16", SMALL("atlas-llama", .kv_dtype = "f16"), 0, copied_kv_is_converted},
        {"every cut gives the same, odd shapes", ODD(.block_tokens = 16), 0, every_cut_gives_the_same},
        {"company changes nothing, odd shapes", ODD(.block_tokens = 32), 0, company_changes_nothing},
        {"copied kv goes on the same, odd shapes", ODD(.kv_dtype = "f16"), 0, copied_kv_goes_on_the_same},
        {"copied kv is converted to bf16", SMALL("atlas-llama", .kv_dtype = "bf16"), 0, copied_kv_is_converted},
        {.name = NULL},
    };
    return engine_run_tests("parallel.bits", tests);
}
