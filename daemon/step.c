#include "daemon/step.h"

#include "base/log.h"
#include "base/memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum dskv_exit dskv_step_open(const struct dskv_step_limits *limits, const char *trace_path, struct dskv_step *step,
                              struct dskv_error *error)
{
    *step = (struct dskv_step){0};
    if (trace_path) {
        step->trace = fopen(trace_path, "wbe");
        if (!step->trace)
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--trace-plans: cannot write %s: %s", trace_path,
                                  strerror(errno));
    }
    step->picks = dskv_calloc((size_t)limits->max_sequences, sizeof *step->picks);
    step->copies = dskv_calloc((size_t)limits->max_sequences, sizeof *step->copies);
    step->ids = dskv_calloc((size_t)limits->max_tokens, sizeof *step->ids);
    step->slots = dskv_calloc((size_t)limits->max_tokens, sizeof *step->slots);
    return DSKV_EXIT_OK;
}

void dskv_step_close(struct dskv_step *step)
{
    free(step->picks);
    free(step->copies);
    free(step->ids);
    free(step->slots);
    if (step->trace)
        fclose(step->trace);
    *step = (struct dskv_step){0};
}

static int32_t count_rows(const struct dskv_pick *pick)
{
    struct dskv_plan_row row;
    struct dskv_sampling sampling;
    int32_t n = 0;
    for (int32_t i = 0; i < pick->n_tokens; i++)
        n += dskv_sequence_row(pick->sequence, pick->sequence->next + i, &row, &sampling);
    return n;
}

/* Makes room for all runs, so that sizes and tables are final before the plan begins. */
static struct dskv_plan_sizes grow_all(struct dskv_step *step)
{
    struct dskv_plan_sizes need = {.n_work = step->n_picks};
    step->n_copies = 0;
    for (int32_t i = 0; i < step->n_picks; i++) {
        struct dskv_pick *pick = &step->picks[i];
        step->n_copies += dskv_sequence_grow(pick->sequence, pick->n_tokens, &step->copies[step->n_copies]);
        need.n_tokens += pick->n_tokens;
        need.n_table += pick->sequence->n_blocks;
        need.n_rows += count_rows(pick);
    }
    need.n_copies = step->n_copies;
    return need;
}

static void add_run(struct dskv_step *step, struct dskv_plan *plan, const struct dskv_pick *pick)
{
    struct dskv_sequence *sequence = pick->sequence;
    dskv_sequence_fill(sequence, pick->n_tokens, step->ids, step->slots);
    int32_t first = dskv_plan_add_work(plan, step->ids, step->slots, pick->n_tokens, dskv_sequence_position(sequence),
                                       sequence->table, sequence->n_blocks);
    for (int32_t i = 0; i < pick->n_tokens; i++) {
        struct dskv_plan_row row;
        struct dskv_sampling sampling;
        if (!dskv_sequence_row(sequence, sequence->next + i, &row, &sampling))
            continue;
        row.token = first + i;
        dskv_plan_add_row(plan, &row, &sampling);
    }
}

/* A trace that cannot be written any more is given up; serving goes on. */
static void record(struct dskv_step *step, const struct dskv_plan *plan)
{
    struct dskv_error error;
    if (!step->trace)
        return;
    enum dskv_code code = dskv_plan_record(plan, step->trace, &error);
    if (!code && fflush(step->trace) == 0)
        return;
    dskv_log(DSKV_LOG_ERROR, "server", "plans are not recorded any more: %s", code ? error.message : strerror(errno));
    fclose(step->trace);
    step->trace = NULL;
}

/* Hands the rows of a run to its task; one that ends meanwhile gets no more. */
static const struct dskv_row_result *give_rows(struct dskv_state *state, const struct dskv_pick *pick,
                                               const struct dskv_row_result *result)
{
    struct dskv_sequence *sequence = pick->sequence;
    struct dskv_task *task = sequence->owner;
    int32_t first = sequence->next;
    dskv_sequence_advance(sequence, pick->n_tokens);
    for (int32_t number = first; number < first + pick->n_tokens; number++) {
        struct dskv_plan_row row;
        struct dskv_sampling sampling;
        if (!dskv_sequence_row(sequence, number, &row, &sampling))
            continue;
        if (!task->ended)
            task->kind->row(state, task, sequence, number, result);
        result++;
    }
    if (!task->ended && !dskv_sequence_waiting(sequence))
        task->kind->ran(state, task, sequence);
    return result;
}

int dskv_step_run(struct dskv_step *step, struct dskv_state *state)
{
    step->n_picks = dskv_scheduler_pick(&state->scheduler, step->picks);
    if (!step->n_picks)
        return 0;
    struct dskv_plan_sizes need = grow_all(step);
    struct dskv_plan *plan = dskv_engine_plan(state->engine, &need);
    for (int32_t i = 0; i < step->n_copies; i++)
        dskv_plan_add_copy(plan, step->copies[i].src, step->copies[i].dst, step->copies[i].n_tokens);
    for (int32_t i = 0; i < step->n_picks; i++)
        add_run(step, plan, &step->picks[i]);
    record(step, plan);
    const struct dskv_row_result *results;
    int32_t n_computed;
    struct dskv_error error;
    enum dskv_exit code = dskv_engine_step(state->engine, plan, &results, &n_computed, &error);
    for (int32_t i = 0; i < step->n_copies; i++)
        dskv_blocks_release(state->blocks, step->copies[i].src);
    if (code) {
        dskv_state_break(state, code, &error);
        return 1;
    }
    DSKV_ASSERT(n_computed == need.n_tokens, "%d rows computed, %d planned", n_computed, need.n_tokens);
    state->stats.steps++;
    state->stats.rows_computed += n_computed;
    for (int32_t i = 0; i < step->n_picks; i++)
        results = give_rows(state, &step->picks[i], results);
    return 1;
}
