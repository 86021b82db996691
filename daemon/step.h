/* Step: makes plans of what the scheduler picks, submits them, and hands every row to the task that wanted it.
 *
 * The only place where sequences meet plans.  Where steps are queued ahead, the next one is submitted before the last
 * is collected, with the tokens that this one draws named by their rows; so the device always has one to go on with.
 * The ranks execute steps in order, hence a block that was given up may be used by any step that is submitted later;
 * what is no step (pieces of KV, counters) waits until none is under way.
 *
 * A sequence that turns out to have ended, or whose task ends, is forgotten: the rows that it has under way are
 * computed and dropped.
 */
#ifndef DSKV_DAEMON_STEP_H
#define DSKV_DAEMON_STEP_H

#include "daemon/task.h"

#include <stdio.h>

struct dskv_run {
    struct dskv_sequence *sequence; /* null: forgotten */
    int32_t n_tokens, n_rows;
};

/* A step that was submitted and not collected. */
struct dskv_submitted {
    struct dskv_run *runs; /* [max_sequences] */
    int32_t n_runs, n_tokens;
    int may_be_followed; /* by another before it is collected */
};

struct dskv_step {
    struct dskv_submitted submitted[2];
    int32_t n_submitted, oldest;
    int queues_ahead;
    struct dskv_pick *picks;        /* [max_sequences] */
    struct dskv_block_copy *copies; /* [max_sequences] */
    int32_t n_copies;
    int32_t *ids, *slots; /* [max_tokens]: of one run at a time */
    FILE *trace;          /* plans are recorded here; null: nowhere */
};

/* trace_path may be null.  DSKV_EXIT_USAGE when the file cannot be written. */
enum dskv_exit dskv_step_open(const struct dskv_step_limits *limits, int queues_ahead, const char *trace_path,
                              struct dskv_step *step, struct dskv_error *error);
void dskv_step_close(struct dskv_step *step);
/* Submits what is to be submitted and collects one step; nothing when nothing waits and none is under way.  A step that
 * fails breaks the state. */
void dskv_step_run(struct dskv_step *step, struct dskv_state *state);
/* Collects all steps that are under way: before the engine is given anything else. */
void dskv_step_settle(struct dskv_step *step, struct dskv_state *state);
/* The task ends: nobody wants the rows of its sequences any more. */
void dskv_step_forget(struct dskv_step *step, const struct dskv_task *task);

#endif
