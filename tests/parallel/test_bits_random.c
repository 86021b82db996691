/* Bits in random company: a sequence's rows from one call without a prefix, against the same rows when it came in
 * random pieces, on a fork of a longer line, in steps with random neighbours.  memcmp decides.
 *
 *     test_parallel_bits_random [CASES [SEED]]
 *
 * The environment says where: DSKV_TEST_DEVICE (cpu, cuda), DSKV_BITS_MODEL (odd-model, or wide-model: two layers of a
 * Llama of 8B parameters), DSKV_BITS_DTYPE (auto, f32, f16, bf16), DSKV_BITS_BLOCK (tokens of a block).  Weights are
 * random.  A case that fails prints what it was.
 */
#include "engine_run.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_TOKENS = 1600,
    MAX_ROWS = 8,
    MAX_PIECES = 6,
    MAX_NEIGHBOURS = 12,
    NEIGHBOUR_TOKENS = 256,
    MAX_JUNK = 90,
    STEP_TOKENS = 2048
};

static int n_cases = 60;
static uint64_t first_seed = 1;

/* ---- random numbers ----------------------------------------------------------------------------- */

static uint64_t state;

static int32_t below(int32_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((state >> 33) % (uint64_t)n);
}

/* 1 .. most; small ones and powers of two and their neighbours often: there tiles and buckets change. */
static int32_t some_length(int32_t most)
{
    int32_t n;
    switch (below(4)) {
    case 0: n = 1 + below(8); break;
    case 1: n = (1 << below(11)) + below(3) - 1; break;
    case 2: n = 1 + below(100); break;
    default: n = 1 + below(most); break;
    }
    return n < 1 ? 1 : n > most ? most : n;
}

/* ---- a case ------------------------------------------------------------------------------------- */

struct random_case {
    int32_t n_tokens, n_rows; /* the last n_rows rows are compared */
    int32_t tokens[MAX_TOKENS];
    int32_t n_pieces, pieces[MAX_PIECES]; /* sum: n_tokens */
    int32_t n_junk;                       /* of a longer line that is cut behind the first piece; 0: none */
    int32_t n_neighbours[MAX_PIECES];     /* of each step */
};

static void make_case(struct random_case *c, int32_t vocab, int32_t max_model_len)
{
    c->n_tokens = some_length(max_model_len - MAX_JUNK < MAX_TOKENS ? max_model_len - MAX_JUNK : MAX_TOKENS);
    c->n_rows = c->n_tokens < MAX_ROWS ? c->n_tokens : MAX_ROWS;
    random_tokens(state, vocab, c->tokens, c->n_tokens);
    c->n_pieces = 0;
    int32_t left = c->n_tokens, most = 2 + below(MAX_PIECES - 1);
    while (left > 0) {
        int32_t n = c->n_pieces == most - 1 ? left : some_length(left);
        if (c->n_pieces == 0 && left > 1 && n == left)
            n = 1 + below(left - 1); /* at least one cut */
        c->n_neighbours[c->n_pieces] = below(3) ? below(MAX_NEIGHBOURS + 1) : 0;
        c->pieces[c->n_pieces++] = n;
        left -= n;
    }
    c->n_junk = below(2) && c->n_pieces > 1 ? 1 + below(MAX_JUNK) : 0;
}

static void print_case(const struct random_case *c, uint64_t seed)
{
    printf("case %llu: %d tokens, pieces", (unsigned long long)seed, c->n_tokens);
    for (int32_t i = 0; i < c->n_pieces; i++)
        printf(" %d (%d beside)", c->pieces[i], c->n_neighbours[i]);
    printf(", cut from a line with %d more\n", c->n_junk);
}

/* Copies the wanted rows among a step's own; rows[] are those of positions [n_tokens - n_rows, n_tokens). */
static void keep_rows(const struct random_case *c, const struct dskv_row_result *results, int32_t end, int32_t n_wanted,
                      int32_t vocab, float *rows)
{
    int32_t first = c->n_tokens - c->n_rows;
    for (int32_t i = 0; i < n_wanted; i++) {
        CU_ASSERT(results[i].finite);
        memcpy(rows + (size_t)(end - n_wanted + i - first) * (size_t)vocab, results[i].logits,
               (size_t)vocab * sizeof *rows);
    }
}

/* How many of a piece's rows, which ends at `end`, are compared. */
static int32_t count_wanted(const struct random_case *c, int32_t end, int32_t n)
{
    int32_t wanted = end - (c->n_tokens - c->n_rows);
    return wanted < 0 ? 0 : wanted < n ? wanted : n;
}

/* One step: a piece of the line, some neighbours before it and some behind; the plan's bucket is as large as they are.
 */
static void step_in_company(struct dskv_engine *engine, const struct random_case *c, struct line *line, int32_t piece,
                            float *rows)
{
    static struct line beside[MAX_NEIGHBOURS];
    int32_t vocab = dskv_engine_info(engine)->model.vocab, n = c->pieces[piece], n_all = n, n_beside = 0;
    int32_t lengths[MAX_NEIGHBOURS], ids[NEIGHBOUR_TOKENS];
    for (; n_beside < c->n_neighbours[piece] && n_all < STEP_TOKENS; n_all += lengths[n_beside++]) {
        int32_t room = STEP_TOKENS - n_all;
        lengths[n_beside] = some_length(room < NEIGHBOUR_TOKENS ? room : NEIGHBOUR_TOKENS);
    }
    int32_t place = below(n_beside + 1), n_before = 0, n_wanted = count_wanted(c, line->n + n, n);
    struct dskv_plan *plan = plan_for(engine, n_all, n_beside + 1);
    for (int32_t i = 0; i <= n_beside; i++) {
        if (i == place) {
            n_before = plan->used.n_rows;
            plan_extend(engine, plan, line, c->tokens + line->n, n, DSKV_ROW_LOGITS, n - n_wanted);
        }
        if (i == n_beside)
            break;
        beside[i].n = beside[i].n_blocks = 0;
        random_tokens(state + (uint64_t)i, vocab, ids, lengths[i]);
        plan_extend(engine, plan, &beside[i], ids, lengths[i], DSKV_ROW_ARGMAX, below(3) ? lengths[i] - 1 : 0);
    }
    keep_rows(c, run_plan(engine, plan) + n_before, line->n, n_wanted, vocab, rows);
}

/* The first piece as the beginning of a longer line: its last block is copied where the cut goes through it. */
static void fork_line(struct dskv_engine *engine, const struct random_case *c, struct line *line, float *rows)
{
    static struct line trunk;
    int32_t vocab = dskv_engine_info(engine)->model.vocab, block = dskv_engine_info(engine)->block_tokens,
            junk[MAX_JUNK];
    int32_t n = c->pieces[0];
    trunk.n = trunk.n_blocks = 0;
    struct random_case first = *c;
    step_in_company(engine, &first, &trunk, 0, rows);
    random_tokens(state, vocab, junk, c->n_junk);
    extend(engine, &trunk, junk, c->n_junk, NULL);
    *line = trunk;
    line->n = n;
    line->n_blocks = (n + block - 1) / block;
    if (n % block == 0)
        return;
    int32_t old = line->table[line->n_blocks - 1], ids[1] = {c->tokens[n - 1]};
    line->table[line->n_blocks - 1] = take_block(engine);
    struct dskv_plan *plan = plan_for(engine, 1, 1);
    dskv_plan_add_copy(plan, old, line->table[line->n_blocks - 1], n % block);
    dskv_plan_add_work(plan, ids, NULL, 1, n - 1, line->table, line->n_blocks); /* a step has tokens */
    run_plan(engine, plan);
}

static int run_case(struct dskv_engine *engine, const struct random_case *c, float *cold, float *warm)
{
    static struct line alone, line;
    int32_t vocab = dskv_engine_info(engine)->model.vocab;
    alone.n = alone.n_blocks = line.n = line.n_blocks = 0;
    take_all_blocks_back();
    struct dskv_plan *plan = plan_for(engine, c->n_tokens, 1);
    plan_extend(engine, plan, &alone, c->tokens, c->n_tokens, DSKV_ROW_LOGITS, c->n_tokens - c->n_rows);
    keep_rows(c, run_plan(engine, plan), c->n_tokens, c->n_rows, vocab, cold);
    int32_t piece = 0;
    if (c->n_junk) {
        fork_line(engine, c, &line, warm);
        piece = 1;
    }
    for (; piece < c->n_pieces; piece++)
        step_in_company(engine, c, &line, piece, warm);
    return compare_bits("rows", cold, warm, (size_t)c->n_rows * (size_t)vocab * sizeof *cold);
}

/* Rows must differ from each other, or equality says little. */
static int are_all_equal(const float *rows, int32_t n, int32_t vocab)
{
    for (int32_t i = 1; i < n; i++)
        if (memcmp(rows, rows + (size_t)i * (size_t)vocab, (size_t)vocab * sizeof *rows) != 0)
            return 0;
    return n > 1;
}

static void random_cases_have_equal_bits(struct dskv_engine *engine)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    size_t bytes = (size_t)MAX_ROWS * (size_t)info->model.vocab * sizeof(float);
    float *cold = malloc(bytes), *warm = malloc(bytes);
    struct random_case *c = malloc(sizeof *c);
    int n_failed = 0, n_flat = 0, n_forked = 0;
    int64_t n_pieces = 0, n_rows = 0;
    for (int i = 0; i < n_cases; i++) {
        state = (first_seed + (uint64_t)i) * 0x9e3779b97f4a7c15u + 1;
        below(2);
        make_case(c, info->model.vocab, info->max_model_len);
        memset(cold, 0xff, bytes);
        memset(warm, 0, bytes);
        if (run_case(engine, c, cold, warm)) {
            print_case(c, first_seed + (uint64_t)i);
            n_failed++;
        }
        n_flat += are_all_equal(cold, c->n_rows, info->model.vocab);
        n_forked += c->n_junk > 0;
        n_pieces += c->n_pieces;
        n_rows += c->n_rows;
    }
    printf("%s, %d layers of %d, weights %s, KV %s, %d rank%s, %s: %d cases (%d forked, %lld pieces, %lld rows of %d "
           "logits), %d failed\n",
           info->device, info->model.n_layers, info->model.width, dskv_dtype_name(info->weight_dtype),
           dskv_dtype_name(info->kv_dtype), info->n_ranks, info->n_ranks == 1 ? "" : "s", info->numerics_id, n_cases,
           n_forked, (long long)n_pieces, (long long)n_rows, info->model.vocab, n_failed);
    CU_ASSERT_EQUAL(n_failed, 0);
    CU_ASSERT_EQUAL(n_flat, 0);
    free(cold);
    free(warm);
    free(c);
}

static const char *environment(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

int main(int argc, char **argv)
{
    char model_dir[512];
    if (argc > 1)
        n_cases = (int)strtol(argv[1], NULL, 10);
    if (argc > 2)
        first_seed = strtoull(argv[2], NULL, 10);
    snprintf(model_dir, sizeof model_dir, "%s/tests/parallel/%s", DSKV_SOURCE_DIR,
             environment("DSKV_BITS_MODEL", "odd-model"));
    struct engine_test tests[] = {
        {"random cases have equal bits",
         {.model_dir = model_dir,
          .device = environment("DSKV_TEST_DEVICE", "cpu"),
          .dtype = environment("DSKV_BITS_DTYPE", "auto"),
          .share_gpu = 1,
          .kv_cache_bytes = (int64_t)256 << 20,
          .max_batch_tokens = STEP_TOKENS,
          .max_sequences = MAX_NEIGHBOURS + 1,
          .block_tokens = (int32_t)strtol(environment("DSKV_BITS_BLOCK", "64"), NULL, 10),
          .dummy_weights = 1},
         DSKV_EXIT_OK,
         random_cases_have_equal_bits},
        {.name = NULL},
    };
    return engine_run_tests("parallel.bits_random", tests);
}
