/* Generate: draws tokens one by one until something ends it.
 *
 * The last token is drawn but not run for anybody, so the cache that comes out holds all tokens but that one, and
 * prefix, tokens and drawn tokens together never exceed the context limit.  Where steps are queued ahead, a token that
 * turns out to be the last may be under way already: its row and its slot are nobody's, and neither `steps` nor
 * `computed` counts it.
 */
#include "base/memory.h"
#include "daemon/task.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

struct generate {
    struct dskv_task task;
    struct dskv_sequence *sequence;
    int32_t n_prompt; /* new tokens of the request */
    int32_t n_most;   /* tokens that may be drawn: max_tokens, or what the context leaves */
    int foreign;
    uint64_t seed;
    int32_t *drawn; /* [n_drawn] */
    int32_t n_drawn, drawn_capacity;
};

/* ---- the beginning ---------------------------------------------------------------------------------------------- */

static enum dskv_code check_prompt(struct dskv_state *state, const struct dskv_generate *asked, int32_t length,
                                   struct dskv_error *error)
{
    int32_t n = dskv_tensor_count(&asked->tokens);
    if (!n && !asked->prefix.present)
        return dskv_fail(error, DSKV_EMPTY_REQUEST, "there are neither tokens nor a prefix");
    if (!n && !length)
        return dskv_fail(error, DSKV_NO_ROW, "there are no tokens, and a prefix of length 0 has no last token");
    enum dskv_code code = dskv_task_check_tokens(state, &asked->tokens, "tokens", error);
    for (int32_t i = 0; i < asked->n_stops && !code; i++)
        code = dskv_task_check_tokens(state, &asked->stops[i], "stop", error);
    if (!code) /* the drawn token counts */
        code = dskv_task_check_length(state, (int64_t)length + n + 1, error);
    return code;
}

static void set_wants(struct generate *generate, const struct dskv_generate *asked)
{
    struct dskv_sequence_wants *wants = &generate->sequence->wants;
    wants->bits = asked->temperature > 0 ? DSKV_ROW_SAMPLE : DSKV_ROW_ARGMAX;
    wants->bits_from = generate->n_prompt - 1;
    wants->sampling = (struct dskv_sampling){
        /* Doubles that floats cannot hold must not become 0, which means something else. */
        .temperature =
            asked->temperature > 0 && asked->temperature < (double)FLT_MIN ? FLT_MIN : (float)asked->temperature,
        .top_p = asked->top_p < (double)FLT_MIN ? FLT_MIN : (float)asked->top_p,
        .min_p = (float)asked->min_p,
        .top_k = asked->top_k,
        .seed = generate->seed,
    };
}

static enum dskv_code generate_begin(struct dskv_state *state, struct dskv_task *task, struct dskv_error *error)
{
    struct generate *generate = (struct generate *)task;
    const struct dskv_generate *asked = &task->request.generate;
    int32_t length = asked->prefix.present ? asked->prefix.length : 0;
    int32_t n = generate->n_prompt = dskv_tensor_count(&asked->tokens);
    struct dskv_cache *prefix;
    enum dskv_code code = dskv_task_find_prefix(state, &asked->prefix, "prefix", &prefix, error);
    if (!code)
        code = check_prompt(state, asked, length, error);
    if (code)
        return code;
    int32_t room = state->info->max_model_len - length - n;
    generate->n_most = asked->max_tokens < room ? asked->max_tokens : room;
    code = dskv_task_check_ids("the drawn tokens", generate->n_most, error);
    if (code)
        dskv_error_set_field(error, "max_tokens");
    if (!code)
        code = dskv_task_promise(state, task, (int64_t)generate->n_most * 4, 1, error);
    if (code)
        return code;
    generate->seed = asked->has_seed ? asked->seed : dskv_seeds_next(&state->seeds);
    generate->foreign = length > 0 && prefix->foreign;
    generate->sequence =
        dskv_sequence_open(state->blocks, prefix, length, asked->tokens.data, n, n + generate->n_most - 1, n == 0);
    generate->sequence->owner = generate;
    set_wants(generate, asked);
    task->group.sequences = &generate->sequence;
    task->group.n_sequences = 1;
    return dskv_task_admit(state, task, error);
}

/* ---- tokens ----------------------------------------------------------------------------------------------------- */

static void keep_token(struct generate *generate, int32_t token)
{
    if (generate->n_drawn == generate->drawn_capacity) {
        generate->drawn_capacity = generate->drawn_capacity * 2 + 16;
        generate->drawn = dskv_realloc(generate->drawn, (size_t)generate->drawn_capacity, sizeof *generate->drawn);
    }
    generate->drawn[generate->n_drawn++] = token;
}

static int ends_with(const struct generate *generate, const struct dskv_wire_tensor *stop)
{
    int32_t n = dskv_tensor_count(stop);
    return n <= generate->n_drawn &&
           memcmp(generate->drawn + generate->n_drawn - n, stop->data, (size_t)n * sizeof(int32_t)) == 0;
}

static int is_stopped(const struct dskv_state *state, const struct generate *generate)
{
    const struct dskv_generate *asked = &generate->task.request.generate;
    const struct dskv_model *model = &state->info->model;
    int32_t token = generate->drawn[generate->n_drawn - 1];
    for (int32_t i = 0; i < model->n_end_tokens && !asked->ignore_eos; i++)
        if (token == model->end_tokens[i])
            return 1;
    for (int32_t i = 0; i < asked->n_stops; i++)
        if (ends_with(generate, &asked->stops[i]))
            return 1;
    return 0;
}

static void finish(struct dskv_state *state, struct generate *generate, enum dskv_finish reason)
{
    struct dskv_task *task = &generate->task;
    const struct dskv_generate *asked = &task->request.generate;
    struct dskv_sequence *sequence = generate->sequence;
    struct dskv_event event = {.kind = DSKV_EVENT_RESULT};
    event.generate.tokens =
        dskv_tensor_1d(generate->drawn ? generate->drawn : (const int32_t[1]){0}, DSKV_I32, generate->n_drawn);
    event.generate.steps = generate->n_drawn ? generate->n_drawn - 1 : 0;
    event.generate.finish = reason;
    event.generate.seed = generate->seed;
    event.generate.cached = sequence->prefix_length - (generate->n_prompt == 0 && sequence->n_computed > 0);
    event.generate.computed = sequence->n_computed;
    state->stats.tokens_cached += event.generate.cached;
    dskv_task_make_cache(state, task, sequence, sequence->prefix_length + dskv_sequence_stored(sequence),
                         generate->foreign, &event.generate.cache);
    if (asked->consume && reason != DSKV_FINISH_CANCELLED)
        dskv_task_consume(state, &asked->prefix);
    dskv_task_succeed(state, task, &event);
}

static void stream_token(struct dskv_state *state, struct generate *generate)
{
    struct dskv_event event = {.kind = DSKV_EVENT_TOKENS};
    event.tokens = dskv_tensor_1d(generate->drawn + generate->n_drawn - 1, DSKV_I32, 1);
    dskv_state_post(state, generate->task.ticket, &event);
}

static void generate_row(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence,
                         int32_t number, const struct dskv_row_result *result)
{
    struct generate *generate = (struct generate *)task;
    if (!result->finite) {
        dskv_task_fail_row(state, task, sequence, number);
        return;
    }
    keep_token(generate, sequence->wants.bits & DSKV_ROW_SAMPLE ? result->sampled : result->argmax);
    state->stats.tokens_generated++;
    if (task->request.generate.stream)
        stream_token(state, generate);
}

static void generate_ran(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence)
{
    struct generate *generate = (struct generate *)task;
    int32_t n = generate->n_drawn;
    if (is_stopped(state, generate))
        finish(state, generate, DSKV_FINISH_STOP);
    else if (n == task->request.generate.max_tokens)
        finish(state, generate, DSKV_FINISH_LENGTH);
    else if (n == generate->n_most)
        finish(state, generate, DSKV_FINISH_CONTEXT);
    else
        dskv_sequence_push(sequence, generate->drawn[n - 1]);
}

/* The last token is drawn and not run. */
static int generate_draws_on(const struct dskv_task *task, const struct dskv_sequence *sequence)
{
    const struct generate *generate = (const struct generate *)task;
    int32_t n_drawn = sequence->next - generate->n_prompt + 1; /* when all that is submitted has ended */
    return n_drawn < generate->n_most;
}

static void generate_cancel(struct dskv_state *state, struct dskv_task *task)
{
    finish(state, (struct generate *)task, DSKV_FINISH_CANCELLED);
}

static void generate_close(struct dskv_state *state, struct dskv_task *task)
{
    struct generate *generate = (struct generate *)task;
    (void)state;
    dskv_sequence_close(&generate->sequence);
    free(generate->drawn);
}

const struct dskv_task_kind dskv_task_generate = {
    .bytes = sizeof(struct generate),
    .needs_session = 1,
    .begin = generate_begin,
    .row = generate_row,
    .ran = generate_ran,
    .draws_on = generate_draws_on,
    .cancel = generate_cancel,
    .close = generate_close,
};
