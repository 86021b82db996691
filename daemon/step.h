/* Step: makes a plan of what the scheduler picked, runs it, and hands every row to the task that wanted it.
 *
 * The only place where sequences meet plans.  A block that a copy reads stays held until the step has ended.
 */
#ifndef DSKV_DAEMON_STEP_H
#define DSKV_DAEMON_STEP_H

#include "daemon/task.h"

#include <stdio.h>

struct dskv_step {
    struct dskv_pick *picks; /* [max_sequences] */
    int32_t n_picks;
    struct dskv_block_copy *copies; /* [max_sequences] */
    int32_t n_copies;
    int32_t *ids, *slots; /* [max_tokens]: of one run at a time */
    FILE *trace;          /* plans are recorded here; null: nowhere */
};

/* trace_path may be null.  DSKV_EXIT_USAGE when the file cannot be written. */
enum dskv_exit dskv_step_open(const struct dskv_step_limits *limits, const char *trace_path, struct dskv_step *step,
                              struct dskv_error *error);
void dskv_step_close(struct dskv_step *step);
/* Runs one step; returns 0 when nothing waits.  A step that fails breaks the state. */
int dskv_step_run(struct dskv_step *step, struct dskv_state *state);

#endif
