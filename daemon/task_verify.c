/* Verify: how many tokens of a draft greedy decoding agrees with, in one pass.
 *
 * A draft token that is an end token is accepted like any other: what ends a text is the client's to say.  Rows after
 * the first disagreement follow from rejected tokens; nothing about them matters, not even that they are finite.
 */
#include "base/memory.h"
#include "daemon/task.h"

#include <stdlib.h>
#include <string.h>

#define NOT_FINITE (-1) /* in place of a prediction; agrees with no token */

struct verify {
    struct dskv_task task;
    struct dskv_sequence *sequence;
    int32_t n_certain, n_draft;
    int foreign;
    int32_t *predictions; /* [n_draft + 1]: the token after the certain ones and i draft tokens */
};

static enum dskv_code check_tokens(struct dskv_state *state, const struct dskv_verify *asked, struct dskv_error *error)
{
    if (!dskv_tensor_count(&asked->tokens) && !(asked->prefix.present && asked->prefix.length)) {
        if (!asked->prefix.present && !dskv_tensor_count(&asked->draft))
            return dskv_fail(error, DSKV_EMPTY_REQUEST, "there are neither tokens nor a prefix");
        return dskv_fail(error, DSKV_NO_ROW, "no token stands before the draft, so nothing predicts it");
    }
    enum dskv_code code = dskv_task_check_tokens(state, &asked->tokens, "tokens", error);
    return code ? code : dskv_task_check_tokens(state, &asked->draft, "draft", error);
}

static enum dskv_code verify_begin(struct dskv_state *state, struct dskv_task *task, struct dskv_error *error)
{
    struct verify *verify = (struct verify *)task;
    const struct dskv_verify *asked = &task->request.verify;
    int32_t length = asked->prefix.present ? asked->prefix.length : 0;
    verify->n_certain = dskv_tensor_count(&asked->tokens);
    verify->n_draft = dskv_tensor_count(&asked->draft);
    int32_t n = verify->n_certain + verify->n_draft;
    struct dskv_cache *prefix;
    enum dskv_code code = check_tokens(state, asked, error);
    if (!code)
        code = dskv_task_find_prefix(state, &asked->prefix, "prefix", &prefix, error);
    if (!code)
        code = dskv_task_check_length(state, (int64_t)length + n, error);
    if (!code)
        code = dskv_task_promise(state, task, 0, 1, error);
    if (code)
        return code;
    verify->foreign = length > 0 && prefix->foreign;
    verify->predictions = dskv_calloc((size_t)verify->n_draft + 1, sizeof *verify->predictions);
    verify->sequence = dskv_sequence_open(state->blocks, prefix, length, asked->tokens.data, verify->n_certain, n,
                                          verify->n_certain == 0);
    for (int32_t i = 0; i < verify->n_draft; i++)
        dskv_sequence_push(verify->sequence, ((const int32_t *)asked->draft.data)[i]);
    verify->sequence->owner = verify;
    verify->sequence->wants.bits = DSKV_ROW_ARGMAX;
    verify->sequence->wants.bits_from = verify->n_certain - 1;
    task->group.sequences = &verify->sequence;
    task->group.n_sequences = 1;
    return dskv_task_admit(state, task, error);
}

static void verify_row(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence, int32_t number,
                       const struct dskv_row_result *result)
{
    struct verify *verify = (struct verify *)task;
    (void)state;
    (void)sequence;
    verify->predictions[number - (verify->n_certain - 1)] = result->finite ? result->argmax : NOT_FINITE;
}

static void verify_ran(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence)
{
    struct verify *verify = (struct verify *)task;
    const int32_t *draft = task->request.verify.draft.data;
    int32_t accepted = 0;
    while (accepted < verify->n_draft && verify->predictions[accepted] == draft[accepted])
        accepted++;
    if (verify->predictions[accepted] == NOT_FINITE) {
        dskv_task_fail_row(state, task, sequence, verify->n_certain - 1 + accepted);
        return;
    }
    struct dskv_event event = {.kind = DSKV_EVENT_RESULT};
    event.verify.accepted = accepted;
    event.verify.next = verify->predictions[accepted];
    event.verify.cached = sequence->prefix_length - (verify->n_certain == 0);
    event.verify.computed = sequence->n_computed;
    state->stats.tokens_cached += event.verify.cached;
    dskv_task_make_cache(state, task, sequence, sequence->prefix_length + verify->n_certain + accepted, verify->foreign,
                         &event.verify.cache);
    if (task->request.verify.consume)
        dskv_task_consume(state, &task->request.verify.prefix);
    dskv_task_succeed(state, task, &event);
}

static void verify_close(struct dskv_state *state, struct dskv_task *task)
{
    struct verify *verify = (struct verify *)task;
    (void)state;
    dskv_sequence_close(&verify->sequence);
    free(verify->predictions);
}

const struct dskv_task_kind dskv_task_verify = {
    .bytes = sizeof(struct verify),
    .needs_session = 1,
    .begin = verify_begin,
    .row = verify_row,
    .ran = verify_ran,
    .close = verify_close,
};
