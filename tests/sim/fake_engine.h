/* Fake engine: stands in for parallel/engine.h with the fake model, in one process and without MPI.
 *
 * It really stores keys and values in slots and reads them back through the block tables of each plan, so that wrong
 * slots, tables, copies and marks give wrong rows.  Plans are validated as if they came from a file.  A real device
 * computes a step at some time between its submit and its collect; this one does at the first or the last moment.  The
 * functions below let a test hold the steps back, or make one fail.
 */
#ifndef DSKV_TESTS_SIM_FAKE_ENGINE_H
#define DSKV_TESTS_SIM_FAKE_ENGINE_H

#include "sim/fake_model.h"

struct fake_engine_options {
    int32_t n_blocks, block_tokens;
    int32_t max_model_len, max_batch_tokens, max_sequences, max_logit_rows;
    int32_t piece_tokens; /* of an export's parts */
    enum dskv_dtype kv_dtype;
    int runs_at_submit; /* steps are computed when they are submitted, else when they are collected */
    int runs_queued;    /* what info says */
};

struct dskv_engine *fake_engine_open(const struct fake_engine_options *options);
void fake_engine_close(struct dskv_engine **engine);

/* From now on a step waits until it is allowed; n more steps are.  -1: all, as at the start. */
void fake_engine_allow(struct dskv_engine *engine, int n);
/* Waits until a step stands waiting for its permission. */
void fake_engine_await_step(struct dskv_engine *engine);
/* The next step fails with DSKV_EXIT_RANK_LOST. */
void fake_engine_fail_next(struct dskv_engine *engine);
/* Steps run, and the largest number of runs that one had. */
int fake_engine_n_steps(struct dskv_engine *engine);
int fake_engine_most_runs(struct dskv_engine *engine);
/* Steps that were submitted while another was under way and named what it draws. */
int fake_engine_n_chained(struct dskv_engine *engine);

#endif
