/* Running an engine in tests: every rank opens the same engines in the same order, rank 0 alone runs the tests' bodies.
 *
 * A line is one sequence of tokens with blocks of its own, extended in steps. */
#ifndef DSKV_TESTS_ENGINE_RUN_H
#define DSKV_TESTS_ENGINE_RUN_H

#include "parallel/engine.h"

#define LINE_MAX_TOKENS 2048
#define LINE_MAX_BLOCKS (LINE_MAX_TOKENS / DSKV_MIN_BLOCK_TOKENS)

struct engine_test {
    const char *name;
    struct dskv_engine_options options;
    enum dskv_exit expected;                  /* of the open; the body runs when it is DSKV_EXIT_OK */
    void (*body)(struct dskv_engine *engine); /* rank 0 */
};

/* Runs the tests (ended by a null name) under MPI or alone; the program's exit code. */
int engine_run_tests(const char *suite, const struct engine_test *tests);
/* A model directory of launch/models. */
#define MODEL(name) DSKV_SOURCE_DIR "/launch/models/" name
/* Filled in the tests' options: small pools, short steps. */
#define OPTIONS(model, ...)                                                                                            \
    {                                                                                                                  \
        .model_dir = MODEL(model), .memory_fraction = 0.5, .kv_cache_bytes = 192 << 20, __VA_ARGS__                    \
    }

struct line {
    int32_t n, n_blocks;
    int32_t tokens[LINE_MAX_TOKENS];
    int32_t table[LINE_MAX_BLOCKS];
};

/* Blocks are given out in a scattered order and never come back; a new engine starts with all of them. */
int32_t take_block(const struct dskv_engine *engine);
void take_all_blocks_back(void);

/* Appends a run of n tokens to a plan: writes their slots, wants `want` of every row from first_row on. */
void plan_extend(struct dskv_engine *engine, struct dskv_plan *plan, struct line *line, const int32_t *tokens,
                 int32_t n, uint32_t want, int32_t first_row);
/* A plan that holds n_tokens in n_work runs of these lines' lengths. */
struct dskv_plan *plan_for(struct dskv_engine *engine, int32_t n_tokens, int32_t n_work);
/* Steps; asserts that it went well and computed n_tokens. */
const struct dskv_row_result *run_plan(struct dskv_engine *engine, const struct dskv_plan *plan);
/* Extends one line by n tokens in steps that fit; copies every new row's logits to rows [n, vocab], unless null. */
void extend(struct dskv_engine *engine, struct line *line, const int32_t *tokens, int32_t n, float *rows);

/* All keys and values of the line's tokens [start, n), in the pool's dtype; malloc'ed, *bytes long. */
void *copy_out_all(struct dskv_engine *engine, const struct line *line, int32_t start, size_t *bytes);

/* 0 when equal, with a message for the first difference otherwise. */
int compare_bits(const char *what, const void *a, const void *b, size_t bytes);
/* Token ids from a counter: the same on every machine. */
void random_tokens(uint64_t seed, int32_t vocab, int32_t *tokens, int32_t n);

#endif
