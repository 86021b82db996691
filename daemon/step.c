#include "daemon/step.h"

#include "base/log.h"
#include "base/memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum dskv_exit dskv_step_open(const struct dskv_step_limits *limits, int queues_ahead, const char *trace_path,
                              struct dskv_step *step, struct dskv_error *error)
{
    *step = (struct dskv_step){.queues_ahead = queues_ahead};
    if (trace_path) {
        step->trace = fopen(trace_path, "wbe");
        if (!step->trace)
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--trace-plans: cannot write %s: %s", trace_path,
                                  strerror(errno));
    }
    for (int i = 0; i < 2; i++)
        step->submitted[i].runs = dskv_calloc((size_t)limits->max_sequences, sizeof(struct dskv_run));
    step->picks = dskv_calloc((size_t)limits->max_sequences, sizeof *step->picks);
    step->copies = dskv_calloc((size_t)limits->max_sequences, sizeof *step->copies);
    step->ids = dskv_calloc((size_t)limits->max_tokens, sizeof *step->ids);
    step->slots = dskv_calloc((size_t)limits->max_tokens, sizeof *step->slots);
    return DSKV_EXIT_OK;
}

void dskv_step_close(struct dskv_step *step)
{
    for (int i = 0; i < 2; i++)
        free(step->submitted[i].runs);
    free(step->picks);
    free(step->copies);
    free(step->ids);
    free(step->slots);
    if (step->trace)
        fclose(step->trace);
    *step = (struct dskv_step){0};
}

/* ---- submit ----------------------------------------------------------------------------------------------------- */

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
static struct dskv_plan_sizes grow_all(struct dskv_step *step, struct dskv_submitted *submitted)
{
    struct dskv_plan_sizes need = {.n_work = submitted->n_runs};
    step->n_copies = 0;
    for (int32_t i = 0; i < submitted->n_runs; i++) {
        const struct dskv_pick *pick = &step->picks[i];
        struct dskv_run *run = &submitted->runs[i];
        *run = (struct dskv_run){pick->sequence, pick->n_tokens, count_rows(pick)};
        step->n_copies += dskv_sequence_grow(run->sequence, run->n_tokens, &step->copies[step->n_copies]);
        need.n_tokens += run->n_tokens;
        need.n_table += run->sequence->n_blocks;
        need.n_rows += run->n_rows;
    }
    need.n_copies = step->n_copies;
    return need;
}

static void add_run(struct dskv_step *step, struct dskv_plan *plan, const struct dskv_run *run)
{
    struct dskv_sequence *sequence = run->sequence;
    dskv_sequence_fill(sequence, run->n_tokens, step->ids, step->slots);
    int32_t first = dskv_plan_add_work(plan, step->ids, step->slots, run->n_tokens, dskv_sequence_position(sequence),
                                       sequence->table, sequence->n_blocks);
    for (int32_t i = 0; i < run->n_tokens; i++) {
        struct dskv_plan_row row;
        struct dskv_sampling sampling;
        if (!dskv_sequence_row(sequence, sequence->next + i, &row, &sampling))
            continue;
        row.token = first + i;
        dskv_plan_add_row(plan, &row, &sampling);
    }
}

static struct dskv_plan *make_plan(struct dskv_step *step, struct dskv_state *state, struct dskv_submitted *submitted)
{
    struct dskv_plan_sizes need = grow_all(step, submitted);
    struct dskv_plan *plan = dskv_engine_plan(state->engine, &need);
    for (int32_t i = 0; i < step->n_copies; i++)
        dskv_plan_add_copy(plan, step->copies[i].src, step->copies[i].dst, step->copies[i].n_tokens);
    for (int32_t i = 0; i < submitted->n_runs; i++)
        add_run(step, plan, &submitted->runs[i]);
    submitted->n_tokens = need.n_tokens;
    return plan;
}

/* A trace that cannot be written any more is given up; serving goes on. */
static void trace_plan(struct dskv_step *step, const struct dskv_plan *plan)
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

/* Whether the next token of the run's sequence is the one that its last row draws. */
static int draws_on(const struct dskv_run *run)
{
    const struct dskv_sequence *sequence = run->sequence;
    const struct dskv_task *task = sequence->owner;
    return !dskv_sequence_waiting(sequence) && task->kind->draws_on && task->kind->draws_on(task, sequence);
}

/* A step is not followed where whole rows would be overwritten, nor where a sequence would first have to copy a block
 * for a token that may turn out to be its last. */
static int can_be_followed(const struct dskv_submitted *submitted, const struct dskv_plan *plan)
{
    for (int32_t r = 0; r < plan->used.n_rows; r++)
        if (dskv_plan_rows(plan)[r].want & DSKV_ROW_LOGITS)
            return 0;
    for (int32_t i = 0; i < submitted->n_runs; i++)
        if (submitted->runs[i].sequence->copies_last && draws_on(&submitted->runs[i]))
            return 0;
    return 1;
}

/* Gives each sequence that goes on with what the step draws the row that draws it in place of the token. */
static void expect_drawn(const struct dskv_submitted *submitted)
{
    for (int32_t i = 0, row = 0; i < submitted->n_runs; i++) {
        const struct dskv_run *run = &submitted->runs[i];
        row += run->n_rows;
        if (draws_on(run))
            dskv_sequence_expect(run->sequence, dskv_plan_reference(row - 1));
    }
}

/* The next step, of all that waits. */
static void submit(struct dskv_step *step, struct dskv_state *state)
{
    struct dskv_submitted *submitted = &step->submitted[(step->oldest + step->n_submitted) % 2];
    struct dskv_error error;
    submitted->n_runs = dskv_scheduler_pick(&state->scheduler, step->picks);
    if (!submitted->n_runs)
        return;
    struct dskv_plan *plan = make_plan(step, state, submitted);
    trace_plan(step, plan);
    step->n_submitted++;
    for (int32_t i = 0; i < submitted->n_runs; i++)
        dskv_sequence_advance(submitted->runs[i].sequence, submitted->runs[i].n_tokens);
    submitted->may_be_followed = step->queues_ahead && can_be_followed(submitted, plan);
    if (submitted->may_be_followed)
        expect_drawn(submitted);
    enum dskv_exit code = dskv_engine_submit(state->engine, plan, &error);
    for (int32_t i = 0; i < step->n_copies; i++)
        dskv_blocks_release(state->blocks, step->copies[i].src);
    if (code)
        dskv_state_break(state, code, &error);
}

/* ---- collect ---------------------------------------------------------------------------------------------------- */

/* Hands the rows of a run to its task; one that ends meanwhile gets no more. */
static void give_rows(struct dskv_state *state, struct dskv_sequence *sequence, int32_t n_tokens,
                      const struct dskv_row_result *result)
{
    struct dskv_task *task = sequence->owner;
    int32_t first = sequence->completed;
    dskv_sequence_complete(sequence, n_tokens);
    for (int32_t number = first; number < first + n_tokens && !task->ended; number++) {
        struct dskv_plan_row row;
        struct dskv_sampling sampling;
        if (dskv_sequence_row(sequence, number, &row, &sampling))
            task->kind->row(state, task, sequence, number, result++);
    }
    if (!task->ended && sequence->completed == sequence->n_known)
        task->kind->ran(state, task, sequence);
}

/* The oldest step. */
static void collect(struct dskv_step *step, struct dskv_state *state)
{
    struct dskv_submitted *submitted = &step->submitted[step->oldest];
    const struct dskv_row_result *results;
    int32_t n_computed;
    struct dskv_error error;
    enum dskv_exit code = dskv_engine_collect(state->engine, &results, &n_computed, &error);
    step->oldest ^= 1;
    step->n_submitted--;
    if (code) {
        dskv_state_break(state, code, &error);
        return;
    }
    DSKV_ASSERT(n_computed == submitted->n_tokens, "%d rows computed, %d planned", n_computed, submitted->n_tokens);
    state->stats.steps++;
    state->stats.rows_computed += n_computed;
    for (int32_t i = 0; i < submitted->n_runs; i++) {
        const struct dskv_run *run = &submitted->runs[i];
        if (run->sequence)
            give_rows(state, run->sequence, run->n_tokens, results);
        results += run->n_rows;
    }
}

void dskv_step_run(struct dskv_step *step, struct dskv_state *state)
{
    if (!step->n_submitted)
        submit(step, state);
    if (step->n_submitted == 1 && step->submitted[step->oldest].may_be_followed && !state->failed)
        submit(step, state);
    if (step->n_submitted && !state->failed)
        collect(step, state);
}

void dskv_step_settle(struct dskv_step *step, struct dskv_state *state)
{
    while (step->n_submitted && !state->failed)
        collect(step, state);
}

void dskv_step_forget(struct dskv_step *step, const struct dskv_task *task)
{
    for (int32_t i = 0; i < step->n_submitted; i++) {
        struct dskv_submitted *submitted = &step->submitted[(step->oldest + i) % 2];
        for (int32_t j = 0; j < submitted->n_runs; j++)
            if (submitted->runs[j].sequence && submitted->runs[j].sequence->owner == task)
                submitted->runs[j].sequence = NULL;
    }
}
