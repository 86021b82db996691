/* Forward: one or many sequences, all or none, and the rows that are wanted of them.
 *
 * Rows of logits beyond DSKV_PART_BYTES of a sequence leave as events while steps end; everything else is kept for the
 * result.
 */
#include "base/memory.h"
#include "daemon/task.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A sequence's outputs.  Row 0 is of token 0, or of the prefix's last token (number -1) when there are no tokens. */
struct output {
    struct dskv_sequence *sequence;
    const struct dskv_forward_sequence *asked;
    int32_t n_tokens, n_rows;
    int32_t row_offset; /* row = number + row_offset */
    int reruns;
    int foreign;
    int inline_logits;
    int32_t rows_kept, rows_room; /* of logits in the buffer */
    int32_t rows_sent;
    char *logits;         /* f32 or f16 [rows_room, vocab] */
    int32_t *argmax;      /* [n_rows] */
    int32_t *topk_ids;    /* [n_rows, topk] */
    float *topk_logprobs; /* [n_rows, topk] */
    float *scores;        /* [n_tokens] */
};

struct forward {
    struct dskv_task task;
    struct output *outputs; /* [group.n_sequences] */
    int32_t n_done;
};

static size_t logits_row_bytes(const struct dskv_state *state, const struct dskv_want *want)
{
    return (size_t)state->info->model.vocab * dskv_dtype_bytes(want->logits_dtype);
}

/* ---- checks ----------------------------------------------------------------------------------------------------- */

static enum dskv_code check_want(const struct dskv_state *state, const struct dskv_want *want, int32_t n_rows,
                                 struct dskv_error *error)
{
    if (want->logits_start > want->logits_stop || want->logits_stop > n_rows) {
        dskv_fail(error, DSKV_BAD_VALUE, "rows %d .. %d of logits were asked for, there are %d", want->logits_start,
                  want->logits_stop, n_rows);
        dskv_error_set_field(error, "logits");
        dskv_error_set_valid(error, "0 .. %d", n_rows);
        return DSKV_BAD_VALUE;
    }
    if (want->topk > state->info->model.vocab) {
        dskv_fail(error, DSKV_BAD_VALUE, "the %d best of %d ids were asked for", want->topk, state->info->model.vocab);
        dskv_error_set_field(error, "topk");
        dskv_error_set_valid(error, "0 .. %d", state->info->model.vocab);
        return DSKV_BAD_VALUE;
    }
    return DSKV_OK;
}

/* Counts the bytes of a sequence's outputs. */
static enum dskv_code count_reply(const struct dskv_state *state, const struct output *output, int64_t *bytes,
                                  struct dskv_error *error)
{
    const struct dskv_want *want = &output->asked->want;
    int64_t row = (int64_t)logits_row_bytes(state, want), n_rows = output->n_rows;
    int64_t column = 4 * n_rows * (want->topk ? want->topk : 1); /* the largest tensor that comes in one frame */
    *bytes += row * (want->logits_stop - want->logits_start) + 4 * n_rows * (want->argmax != 0) +
              8 * n_rows * want->topk + 4 * (int64_t)output->n_tokens * (want->score != 0);
    int64_t needed = *bytes, limit = DSKV_MAX_REPLY_BYTES;
    int64_t frame = want->logits_stop > want->logits_start && row > column ? row : column;
    if (needed <= limit && frame > DSKV_MAX_FRAME_BYTES) {
        needed = frame;
        limit = DSKV_MAX_FRAME_BYTES;
    }
    if (needed <= limit)
        return DSKV_OK;
    dskv_fail(error, DSKV_REPLY_TOO_LARGE, "the reply would take %lld bytes, the limit is %lld", (long long)needed,
              (long long)limit);
    dskv_error_set(error, DSKV_HAS_NEEDED, needed);
    dskv_error_set(error, DSKV_HAS_LIMIT, limit);
    return DSKV_REPLY_TOO_LARGE;
}

static enum dskv_code check_rows(const struct dskv_forward_sequence *asked, struct dskv_error *error)
{
    if (dskv_tensor_count(&asked->tokens))
        return DSKV_OK;
    if (!asked->prefix.present)
        return dskv_fail(error, DSKV_EMPTY_REQUEST, "there are neither tokens nor a prefix");
    if (!asked->prefix.length)
        return dskv_fail(error, DSKV_NO_ROW, "there are no tokens, and a prefix of length 0 has no last token");
    return DSKV_OK;
}

/* ---- the beginning ---------------------------------------------------------------------------------------------- */

static void set_wants(struct output *output)
{
    const struct dskv_want *want = &output->asked->want;
    struct dskv_sequence_wants *wants = &output->sequence->wants;
    wants->logits_from = want->logits_start - output->row_offset;
    wants->logits_to = want->logits_stop - output->row_offset;
    wants->bits = (want->argmax ? DSKV_ROW_ARGMAX : 0u) | (want->topk ? DSKV_ROW_TOPK : 0u);
    wants->bits_from = -output->row_offset;
    wants->topk = want->topk;
    wants->score = want->score;
}

static void make_room(const struct dskv_state *state, struct output *output)
{
    const struct dskv_want *want = &output->asked->want;
    size_t row_bytes = logits_row_bytes(state, want);
    int32_t n_logits = want->logits_stop - want->logits_start;
    size_t n_rows = (size_t)output->n_rows;
    output->inline_logits = (size_t)n_logits * row_bytes <= DSKV_PART_BYTES;
    output->rows_room = (int32_t)(DSKV_PART_BYTES / row_bytes);
    if (output->inline_logits)
        output->rows_room = n_logits;
    else if (!output->rows_room)
        output->rows_room = 1;
    if (n_logits)
        output->logits = dskv_calloc((size_t)output->rows_room, row_bytes);
    if (want->argmax)
        output->argmax = dskv_calloc(n_rows, sizeof *output->argmax);
    if (want->topk) {
        output->topk_ids = dskv_calloc(n_rows * (size_t)want->topk, sizeof *output->topk_ids);
        output->topk_logprobs = dskv_calloc(n_rows * (size_t)want->topk, sizeof *output->topk_logprobs);
    }
    if (want->score) {
        output->scores = dskv_calloc((size_t)output->n_tokens, sizeof *output->scores);
        if (output->n_tokens)
            output->scores[0] = NAN; /* stays so where no row predicts the first token */
    }
}

static enum dskv_code begin_sequence(struct dskv_state *state, struct forward *forward, int32_t index,
                                     int64_t *reply_bytes, struct dskv_error *error)
{
    struct output *output = &forward->outputs[index];
    const struct dskv_forward_sequence *asked = &forward->task.request.forward.sequences[index];
    output->asked = asked;
    output->n_tokens = dskv_tensor_count(&asked->tokens);
    output->n_rows = output->n_tokens ? output->n_tokens : 1;
    output->row_offset = output->n_tokens == 0;
    int32_t length = asked->prefix.present ? asked->prefix.length : 0;
    output->reruns = output->n_tokens == 0 || (asked->want.score && length > 0);
    struct dskv_cache *prefix;
    char name[32] = "tokens";
    if (forward->task.request.forward.n > 1)
        snprintf(name, sizeof name, "sequences[%d].tokens", index);
    enum dskv_code code = check_rows(asked, error);
    if (!code)
        code = dskv_task_check_tokens(state, &asked->tokens, name, error);
    if (!code)
        code = dskv_task_find_prefix(state, &asked->prefix, "prefix", &prefix, error);
    if (!code)
        code = dskv_task_check_length(state, (int64_t)length + output->n_tokens, error);
    if (!code)
        code = check_want(state, &asked->want, output->n_rows, error);
    if (!code)
        code = count_reply(state, output, reply_bytes, error);
    if (code)
        return code;
    output->foreign = length > 0 && prefix->foreign;
    output->sequence = dskv_sequence_open(state->blocks, prefix, length, asked->tokens.data, output->n_tokens,
                                          output->n_tokens, output->reruns);
    output->sequence->owner = forward;
    output->sequence->index = index;
    forward->task.group.sequences[index] = output->sequence;
    set_wants(output);
    return DSKV_OK;
}

static enum dskv_code forward_begin(struct dskv_state *state, struct dskv_task *task, struct dskv_error *error)
{
    struct forward *forward = (struct forward *)task;
    int32_t n = task->request.forward.n;
    int64_t reply_bytes = 0;
    forward->outputs = dskv_calloc((size_t)n, sizeof *forward->outputs);
    task->group.sequences = dskv_calloc((size_t)n, sizeof(struct dskv_sequence *));
    task->group.n_sequences = n;
    for (int32_t i = 0; i < n; i++) {
        enum dskv_code code = begin_sequence(state, forward, i, &reply_bytes, error);
        if (code && (n > 1 || !(error->has & DSKV_HAS_INDEX))) /* of one sequence, the token at fault says more */
            dskv_error_set(error, DSKV_HAS_INDEX, i);
        if (code)
            return code;
    }
    enum dskv_code code = dskv_task_promise(state, task, reply_bytes, n, error);
    if (!code)
        code = dskv_task_admit(state, task, error);
    for (int32_t i = 0; i < n && !code; i++)
        make_room(state, &forward->outputs[i]);
    return code;
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

static void send_rows(struct dskv_state *state, struct forward *forward, struct output *output)
{
    struct dskv_event event = {.kind = DSKV_EVENT_ROWS};
    event.rows.sequence = output->sequence->index;
    event.rows.start = output->rows_sent;
    event.rows.data =
        dskv_tensor_2d(output->logits, output->asked->want.logits_dtype, output->rows_kept, state->info->model.vocab);
    dskv_state_post(state, forward->task.ticket, &event);
    output->rows_sent += output->rows_kept;
    output->rows_kept = 0;
}

/* Returns 0 when a logit does not fit the wanted dtype. */
static int keep_logits(struct dskv_state *state, struct forward *forward, struct output *output, const float *logits)
{
    const struct dskv_want *want = &output->asked->want;
    size_t row_bytes = logits_row_bytes(state, want), vocab = (size_t)state->info->model.vocab;
    char *row = output->logits + (size_t)output->rows_kept * row_bytes;
    if (dskv_convert(row, want->logits_dtype, logits, DSKV_F32, vocab) != vocab)
        return 0;
    output->rows_kept++;
    int is_last = output->rows_sent + output->rows_kept == want->logits_stop - want->logits_start;
    if (!output->inline_logits && (output->rows_kept == output->rows_room || is_last))
        send_rows(state, forward, output);
    return 1;
}

static void forward_row(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence,
                        int32_t number, const struct dskv_row_result *result)
{
    struct forward *forward = (struct forward *)task;
    struct output *output = &forward->outputs[sequence->index];
    const struct dskv_want *want = &output->asked->want;
    int32_t row = number + output->row_offset;
    if (!result->finite || (row >= want->logits_start && row < want->logits_stop &&
                            !keep_logits(state, forward, output, result->logits))) {
        dskv_task_fail_row(state, task, sequence, number);
        return;
    }
    if (want->score && number + 1 < output->n_tokens)
        output->scores[number + 1] = result->score;
    if (row < 0) /* the re-run token, for the first score alone */
        return;
    if (want->argmax)
        output->argmax[row] = result->argmax;
    if (want->topk) {
        size_t at = (size_t)row * (size_t)want->topk, bytes = (size_t)want->topk * 4;
        memcpy(output->topk_ids + at, result->topk_ids, bytes);
        memcpy(output->topk_logprobs + at, result->topk_logprobs, bytes);
    }
}

/* ---- the end ---------------------------------------------------------------------------------------------------- */

static void fill_result(struct dskv_state *state, struct forward *forward, struct output *output,
                        struct dskv_forward_result *result)
{
    const struct dskv_want *want = &output->asked->want;
    struct dskv_sequence *sequence = output->sequence;
    result->cached = sequence->prefix_length - output->reruns;
    result->computed = sequence->n_computed;
    DSKV_ASSERT(result->cached + result->computed == sequence->prefix_length + output->n_tokens,
                "%d cached, %d computed, prefix %d, %d tokens", result->cached, result->computed,
                sequence->prefix_length, output->n_tokens);
    state->stats.tokens_cached += result->cached;
    if (output->n_tokens)
        dskv_task_make_cache(state, &forward->task, sequence, sequence->prefix_length + output->n_tokens,
                             output->foreign, &result->cache);
    if (want->logits_stop > want->logits_start) {
        result->logits = dskv_tensor_2d(output->inline_logits ? output->logits : NULL, want->logits_dtype,
                                        want->logits_stop - want->logits_start, state->info->model.vocab);
    }
    if (want->argmax)
        result->argmax = dskv_tensor_1d(output->argmax, DSKV_I32, output->n_rows);
    if (want->topk) {
        result->topk_ids = dskv_tensor_2d(output->topk_ids, DSKV_I32, output->n_rows, want->topk);
        result->topk_logprobs = dskv_tensor_2d(output->topk_logprobs, DSKV_F32, output->n_rows, want->topk);
    }
    if (want->score)
        result->scores = dskv_tensor_1d(output->scores, DSKV_F32, output->n_tokens);
}

static void forward_ran(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence)
{
    struct forward *forward = (struct forward *)task;
    (void)sequence;
    int32_t n = task->group.n_sequences;
    if (++forward->n_done < n)
        return;
    struct dskv_event event = {.kind = DSKV_EVENT_RESULT};
    event.forward.n = n;
    event.forward.sequences = dskv_calloc((size_t)n, sizeof *event.forward.sequences);
    for (int32_t i = 0; i < n; i++)
        fill_result(state, forward, &forward->outputs[i], &event.forward.sequences[i]);
    for (int32_t i = 0; i < n; i++)
        if (forward->outputs[i].asked->consume)
            dskv_task_consume(state, &forward->outputs[i].asked->prefix);
    dskv_task_succeed(state, task, &event);
    free(event.forward.sequences);
}

static void forward_close(struct dskv_state *state, struct dskv_task *task)
{
    struct forward *forward = (struct forward *)task;
    (void)state;
    for (int32_t i = task->group.n_sequences; i-- > 0;) {
        struct output *output = &forward->outputs[i];
        dskv_sequence_close(&output->sequence);
        free(output->logits);
        free(output->argmax);
        free(output->topk_ids);
        free(output->topk_logprobs);
        free(output->scores);
    }
    free(forward->outputs);
    free(task->group.sequences);
}

const struct dskv_task_kind dskv_task_forward = {
    .bytes = sizeof(struct forward),
    .needs_session = 1,
    .begin = forward_begin,
    .row = forward_row,
    .ran = forward_ran,
    .close = forward_close,
};
