/* The C client: forward with one or many sequences.
 *
 * Knows how outputs travel: small rows of logits in the result, large ones before it in pieces.
 */
#include "ipc/client_inside.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

/* Logits that come in pieces before the result. */
struct rows {
    float *data;
    int64_t vocab, n, n_wanted;
};

struct outputs_box {
    struct dskv_outputs outputs;
    struct dskv_output *items[];
};

/* ---- the request ------------------------------------------------------------------------------------------------ */

static enum dskv_code read_logits(const struct dskv_forward_options *options, struct dskv_want *want,
                                  struct dskv_error *error)
{
    int32_t n_rows = options->n_tokens ? (int32_t)options->n_tokens : 1; /* the prefix's last one */
    want->logits_dtype = DSKV_F32;
    switch (options->logits) {
    case DSKV_LOGITS_NONE: return DSKV_OK;
    case DSKV_LOGITS_LAST: want->logits_start = n_rows - 1, want->logits_stop = n_rows; return DSKV_OK;
    case DSKV_LOGITS_ALL: want->logits_stop = n_rows; return DSKV_OK;
    case DSKV_LOGITS_RANGE:
        want->logits_start = options->logits_start;
        want->logits_stop = options->logits_stop;
        if (want->logits_start >= 0 && want->logits_start <= want->logits_stop && want->logits_stop <= n_rows)
            return DSKV_OK;
        dskv_fail(error, DSKV_BAD_VALUE, "the rows [%d, %d) of logits are not among the %d new ones",
                  want->logits_start, want->logits_stop, n_rows);
        break;
    default: dskv_fail(error, DSKV_BAD_VALUE, "logits is %d", (int)options->logits);
    }
    dskv_error_set_field(error, "logits");
    return DSKV_BAD_VALUE;
}

static enum dskv_code read_sequence(const struct dskv_client *client, const struct dskv_forward_options *options,
                                    struct dskv_forward_sequence *sequence, struct dskv_error *error)
{
    enum dskv_code code = dskv_tokens_read(options->tokens, options->n_tokens, "tokens", &sequence->tokens, error);
    if (!code)
        code = dskv_prefix_read(client, options->prefix, &sequence->prefix, error);
    if (!code)
        code = read_logits(options, &sequence->want, error);
    sequence->want.argmax = options->argmax != 0;
    sequence->want.topk = options->topk;
    sequence->want.score = options->score != 0;
    sequence->consume = options->consume != 0;
    return code;
}

/* ---- the reply -------------------------------------------------------------------------------------------------- */

static enum dskv_code bad_reply(struct dskv_error *error, const char *what)
{
    return dskv_fail(error, DSKV_BAD_MESSAGE, "the server's reply to forward does not fit the request: %s", what);
}

static enum dskv_code take_rows(const struct dskv_event *event, struct rows *rows, int32_t n, struct dskv_error *error)
{
    if (event->rows.sequence < 0 || event->rows.sequence >= n)
        return bad_reply(error, "rows of no sequence");
    struct rows *to = &rows[event->rows.sequence];
    const struct dskv_wire_tensor *data = &event->rows.data;
    if (!data->data || data->dtype != DSKV_F32 || data->n_dims != 2 || data->shape[1] < 1)
        return bad_reply(error, "rows of another kind");
    if (!to->data) {
        to->vocab = data->shape[1];
        to->data = malloc((size_t)to->n_wanted * (size_t)to->vocab * sizeof *to->data);
        if (!to->data && to->n_wanted)
            return dskv_fail(error, DSKV_INTERNAL, "no memory for %lld rows of logits", (long long)to->n_wanted);
    }
    if (data->shape[1] != to->vocab || event->rows.start != to->n || data->shape[0] > to->n_wanted - to->n)
        return bad_reply(error, "rows out of order");
    memcpy(to->data + to->n * to->vocab, data->data, data->bytes);
    to->n += data->shape[0];
    return DSKV_OK;
}

static int is_shape(const struct dskv_wire_tensor *tensor, enum dskv_dtype dtype, int n_dims, int64_t n, int64_t m)
{
    return tensor->dtype == dtype && tensor->n_dims == n_dims && tensor->shape[0] == n &&
           (n_dims == 1 || tensor->shape[1] == m);
}

/* Whether a result holds exactly what was asked for, so that a caller may index it without looking. */
static const char *misfit(const struct dskv_forward_sequence *asked, const struct dskv_forward_result *got,
                          const struct rows *rows)
{
    const struct dskv_want *want = &asked->want;
    int64_t n_tokens = asked->tokens.shape[0], n_rows = n_tokens ? n_tokens : 1;
    int64_t length = asked->prefix.present ? asked->prefix.length : 0;
    if (got->cache.present != (n_tokens > 0))
        return "a cache";
    if (got->cache.present && got->cache.length != length + n_tokens)
        return "the cache's length";
    if (want->logits_stop > want->logits_start) {
        int64_t n = want->logits_stop - want->logits_start;
        if (got->logits.n_dims != 2 || got->logits.dtype != DSKV_F32 || got->logits.shape[0] != n)
            return "logits";
        if (!got->logits.data && (rows->n != n || rows->vocab != got->logits.shape[1]))
            return "rows of logits are missing";
    }
    if (want->argmax && !(got->argmax.data && is_shape(&got->argmax, DSKV_I32, 1, n_rows, 0)))
        return "argmax";
    if (want->topk && !(got->topk_ids.data && is_shape(&got->topk_ids, DSKV_I32, 2, n_rows, want->topk)))
        return "topk_ids";
    if (want->topk && !(got->topk_logprobs.data && is_shape(&got->topk_logprobs, DSKV_F32, 2, n_rows, want->topk)))
        return "topk_logprobs";
    if (want->score && !(got->scores.data && is_shape(&got->scores, DSKV_F32, 1, n_tokens, 0)))
        return "scores";
    return NULL;
}

static struct dskv_output *make_output(struct dskv_client *client, const struct dskv_forward_options *options,
                                       const struct dskv_forward_sequence *asked, const struct dskv_forward_result *got,
                                       struct rows *rows)
{
    const struct dskv_want *want = &asked->want;
    struct dskv_output *output = dskv_calloc(1, sizeof *output);
    output->cache = dskv_cache_open(client, &got->cache, options->prefix, &asked->tokens, 1);
    output->cached = got->cached;
    output->computed = got->computed;
    int32_t n_tokens = (int32_t)asked->tokens.shape[0];
    if (want->argmax || want->topk || want->score)
        output->n_rows = n_tokens ? n_tokens : 1;
    output->topk = want->topk;
    output->n_logits = want->logits_stop - want->logits_start;
    if (output->n_logits) {
        output->vocab = (int32_t)got->logits.shape[1];
        output->logits = got->logits.data ? dskv_tensor_copy(&got->logits) : rows->data;
        if (!got->logits.data)
            rows->data = NULL;
    }
    if (want->argmax)
        output->argmax = dskv_tensor_copy(&got->argmax);
    if (want->topk) {
        output->topk_ids = dskv_tensor_copy(&got->topk_ids);
        output->topk_logprobs = dskv_tensor_copy(&got->topk_logprobs);
    }
    if (want->score && n_tokens)
        output->scores = dskv_tensor_copy(&got->scores);
    dskv_prefix_mark_consumed(options->prefix, options->consume);
    return output;
}

/* ---- the call --------------------------------------------------------------------------------------------------- */

static enum dskv_code receive_result(struct dskv_call *call, struct rows *rows, int32_t n, struct dskv_event *event,
                                     struct dskv_error *error)
{
    for (;;) {
        enum dskv_code code = dskv_call_wait(call, event, error);
        if (code)
            return code;
        if (event->kind == DSKV_EVENT_RESULT && event->op == DSKV_OP_FORWARD && event->forward.n == n)
            return DSKV_OK;
        if (event->kind == DSKV_EVENT_ROWS)
            code = take_rows(event, rows, n, error);
        else
            code = dskv_call_unexpected(event, error);
        dskv_event_clear(event);
        if (code)
            return code;
    }
}

/* Everything is checked before the first output is made, so that a reply counts as a whole or not at all. */
static enum dskv_code finish(struct dskv_client *client, const struct dskv_forward_options *options,
                             const struct dskv_forward_sequence *sequences, struct dskv_event *event, struct rows *rows,
                             struct dskv_output **items, struct dskv_error *error)
{
    int32_t n = event->forward.n;
    const char *what = NULL;
    for (int32_t i = 0; i < n && !what; i++)
        what = misfit(&sequences[i], &event->forward.sequences[i], &rows[i]);
    if (what) {
        for (int32_t i = 0; i < n; i++)
            if (event->forward.sequences[i].cache.present)
                dskv_client_give_up(client, &event->forward.sequences[i].cache.id);
        return bad_reply(error, what);
    }
    for (int32_t i = 0; i < n; i++)
        items[i] = make_output(client, &options[i], &sequences[i], &event->forward.sequences[i], &rows[i]);
    return DSKV_OK;
}

static enum dskv_code forward(struct dskv_client *client, const struct dskv_forward_options *options, int32_t n,
                              int32_t timeout_ms, int many, struct dskv_output **items, struct dskv_error *error)
{
    struct dskv_forward_sequence *sequences = dskv_calloc((size_t)n, sizeof *sequences);
    struct rows *rows = dskv_calloc((size_t)n, sizeof *rows);
    struct dskv_call call;
    struct dskv_event event;
    enum dskv_code code = DSKV_OK;
    for (int32_t i = 0; i < n && !code; i++) {
        code = read_sequence(client, &options[i], &sequences[i], error);
        if (code && many)
            dskv_error_set(error, DSKV_HAS_INDEX, i);
        rows[i].n_wanted = sequences[i].want.logits_stop - sequences[i].want.logits_start;
    }
    struct dskv_request request = {.op = DSKV_OP_FORWARD, .forward = {.n = n, .sequences = sequences}};
    if (!code)
        code = dskv_call_begin(client, &request, timeout_ms, &call, error);
    if (!code) {
        code = receive_result(&call, rows, n, &event, error);
        if (!code) {
            code = finish(client, options, sequences, &event, rows, items, error);
            dskv_event_clear(&event);
        }
        dskv_call_end(&call);
    }
    for (int32_t i = 0; i < n; i++)
        free(rows[i].data);
    free(rows);
    free(sequences);
    return code;
}

enum dskv_code dskv_forward(struct dskv_client *client, const struct dskv_forward_options *options,
                            struct dskv_output **output, struct dskv_error *error)
{
    *output = NULL;
    struct dskv_forward_options own;
    enum dskv_code code = dskv_client_check_open(client, error);
    if (!code)
        code = dskv_options_read(options, &own, sizeof own, error);
    return code ? code : forward(client, &own, 1, own.timeout_ms, 0, output, error);
}

void dskv_output_free(struct dskv_output **output)
{
    struct dskv_output *freed = *output;
    *output = NULL;
    if (!freed)
        return;
    dskv_cache_free(&freed->cache);
    free((void *)freed->logits);
    free((void *)freed->argmax);
    free((void *)freed->topk_ids);
    free((void *)freed->topk_logprobs);
    free((void *)freed->scores);
    free(freed);
}

static enum dskv_code read_many(const struct dskv_client *client, const struct dskv_forward_options *sequences,
                                size_t n, struct dskv_forward_options *own, struct dskv_error *error)
{
    for (size_t i = 0; i < n; i++) {
        const char *at =
            sequences ? (const char *)sequences + i * sequences->size : NULL; /* the caller's size, not ours */
        enum dskv_code code = dskv_options_read(at, &own[i], sizeof own[i], error);
        if (!code && own[i].size != sequences->size)
            code = dskv_fail(error, DSKV_BAD_VALUE, "the options of the sequences differ in size");
        if (code) {
            dskv_error_set(error, DSKV_HAS_INDEX, (int64_t)i);
            return code;
        }
    }
    return dskv_client_check_open(client, error);
}

enum dskv_code dskv_forward_many(struct dskv_client *client, const struct dskv_forward_options *sequences, size_t n,
                                 int32_t timeout_ms, struct dskv_outputs **outputs, struct dskv_error *error)
{
    *outputs = NULL;
    if (n > DSKV_MAX_SEQUENCES_PER_REQUEST) {
        dskv_fail(error, DSKV_BAD_VALUE, "%zu sequences in one request, the limit is %d", n,
                  DSKV_MAX_SEQUENCES_PER_REQUEST);
        dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_SEQUENCES_PER_REQUEST);
        return DSKV_BAD_VALUE;
    }
    struct dskv_forward_options *own = dskv_calloc(n, sizeof *own);
    struct outputs_box *box = dskv_calloc(1, sizeof *box + n * sizeof box->items[0]);
    enum dskv_code code = read_many(client, sequences, n, own, error);
    if (!code)
        code = forward(client, own, (int32_t)n, timeout_ms, 1, box->items, error);
    free(own);
    if (code) {
        free(box);
        return code;
    }
    box->outputs = (struct dskv_outputs){.n = (int32_t)n, .outputs = box->items};
    *outputs = &box->outputs;
    return DSKV_OK;
}

void dskv_outputs_free(struct dskv_outputs **outputs)
{
    struct outputs_box *box = (struct outputs_box *)*outputs; /* its first member */
    *outputs = NULL;
    if (!box)
        return;
    for (int32_t i = 0; i < box->outputs.n; i++)
        dskv_output_free(&box->items[i]);
    free(box);
}
