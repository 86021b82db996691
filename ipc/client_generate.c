/* The C client: verify, generate, and generation as a stream.
 *
 * A generation is always received as a stream, so that its time-out measures silence, not length.
 */
#include "ipc/client_inside.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

/* A reply that does not fit its request is no reply; the cache that it names is not left behind. */
static enum dskv_code refuse_reply(struct dskv_client *client, struct dskv_event *event,
                                   const struct dskv_cache_ref *cache, struct dskv_error *error)
{
    enum dskv_code code = dskv_fail(error, DSKV_BAD_MESSAGE, "the server's reply to %s does not fit the request",
                                    dskv_op_name(event->op));
    if (cache->present)
        dskv_client_give_up(client, &cache->id);
    dskv_event_clear(event);
    return code;
}

/* ---- verify ----------------------------------------------------------------------------------------------------- */

enum dskv_code dskv_verify(struct dskv_client *client, const struct dskv_verify_options *options,
                           struct dskv_verified **verified, struct dskv_error *error)
{
    *verified = NULL;
    struct dskv_verify_options own = {0};
    struct dskv_request request = {.op = DSKV_OP_VERIFY};
    struct dskv_verify *verify = &request.verify;
    enum dskv_code code = dskv_client_check_open(client, error);
    if (!code)
        code = dskv_options_read(options, &own, sizeof own, error);
    if (!code)
        code = dskv_tokens_read(own.tokens, own.n_tokens, "tokens", &verify->tokens, error);
    if (!code)
        code = dskv_tokens_read(own.draft, own.n_draft, "draft", &verify->draft, error);
    if (!code)
        code = dskv_prefix_read(client, own.prefix, &verify->prefix, error);
    verify->consume = own.consume != 0;
    struct dskv_event event;
    if (!code)
        code = dskv_call_run(client, &request, own.timeout_ms, &event, error);
    if (code)
        return code;
    int64_t accepted = event.verify.accepted, length = verify->prefix.length + verify->tokens.shape[0] + accepted;
    if (accepted < 0 || accepted > verify->draft.shape[0] || event.verify.cache.length != length)
        return refuse_reply(client, &event, &event.verify.cache, error);
    struct dskv_verified *made = dskv_calloc(1, sizeof *made);
    made->accepted = event.verify.accepted;
    made->next = event.verify.next;
    made->cached = event.verify.cached;
    made->computed = event.verify.computed;
    made->cache = dskv_cache_open(client, &event.verify.cache, own.prefix,
                                  (struct dskv_wire_tensor[]){verify->tokens, verify->draft}, 2);
    dskv_prefix_mark_consumed(own.prefix, own.consume);
    dskv_event_clear(&event);
    *verified = made;
    return DSKV_OK;
}

void dskv_verified_free(struct dskv_verified **verified)
{
    if (*verified)
        dskv_cache_free(&(*verified)->cache);
    free(*verified);
    *verified = NULL;
}

/* ---- streams ---------------------------------------------------------------------------------------------------- */

struct dskv_stream {
    struct dskv_call call;
    struct dskv_client *client; /* a reference */
    int32_t *before;            /* prefix and prompt: the caller's arrays may be gone when the cache is made */
    size_t n_before;
    struct dskv_cache_prefix prefix;
    int consume;             /* the server takes the prefix's cache with the result */
    struct dskv_event event; /* the last one that was handed out */
    int has_event;
    struct dskv_generated *result; /* until it is taken */
    int failed, taken;
};

static enum dskv_code read_stops(const struct dskv_generate_options *options, struct dskv_wire_tensor *stops,
                                 struct dskv_error *error)
{
    for (size_t i = 0; i < options->n_stops; i++) {
        enum dskv_code code =
            dskv_tokens_read(options->stops[i].tokens, options->stops[i].n_tokens, "stop", &stops[i], error);
        if (code) {
            dskv_error_set(error, DSKV_HAS_INDEX, (int64_t)i);
            return code;
        }
    }
    return DSKV_OK;
}

static enum dskv_code read_generate(const struct dskv_client *client, const struct dskv_generate_options *options,
                                    struct dskv_generate *generate, struct dskv_wire_tensor *stops,
                                    struct dskv_error *error)
{
    *generate = (struct dskv_generate){
        .max_tokens = options->max_tokens ? options->max_tokens : 128,
        .temperature = options->temperature,
        .top_k = options->top_k,
        .top_p = options->top_p == 0 ? 1 : options->top_p,
        .min_p = options->min_p,
        .has_seed = options->has_seed != 0,
        .seed = options->seed,
        .n_stops = (int32_t)options->n_stops,
        .stops = stops,
        .ignore_eos = options->ignore_eos != 0,
        .stream = 1,
        .consume = options->consume != 0,
    };
    enum dskv_code code = dskv_tokens_read(options->tokens, options->n_tokens, "tokens", &generate->tokens, error);
    if (!code)
        code = dskv_prefix_read(client, options->prefix, &generate->prefix, error);
    return code ? code : read_stops(options, stops, error);
}

static void remember_before(struct dskv_stream *stream, const struct dskv_generate_options *options,
                            const struct dskv_generate *generate)
{
    size_t n_prefix = generate->prefix.present ? (size_t)generate->prefix.length : 0;
    stream->n_before = n_prefix + options->n_tokens;
    stream->before = dskv_calloc(stream->n_before, sizeof *stream->before);
    if (n_prefix)
        memcpy(stream->before, options->prefix.cache->tokens, n_prefix * sizeof *stream->before);
    if (options->n_tokens)
        memcpy(stream->before + n_prefix, options->tokens, options->n_tokens * sizeof *stream->before);
}

enum dskv_code dskv_stream_open(struct dskv_client *client, const struct dskv_generate_options *options,
                                struct dskv_stream **stream, struct dskv_error *error)
{
    *stream = NULL;
    struct dskv_generate_options own;
    enum dskv_code code = dskv_client_check_open(client, error);
    if (!code)
        code = dskv_options_read(options, &own, sizeof own, error);
    if (code)
        return code;
    if (own.n_stops > DSKV_MAX_STOPS) {
        dskv_fail(error, DSKV_BAD_VALUE, "%zu stop sequences, the limit is %d", own.n_stops, DSKV_MAX_STOPS);
        dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_STOPS);
        dskv_error_set_field(error, "stop");
        return DSKV_BAD_VALUE;
    }
    struct dskv_wire_tensor stops[DSKV_MAX_STOPS];
    struct dskv_request request = {.op = DSKV_OP_GENERATE};
    struct dskv_stream *made = dskv_calloc(1, sizeof *made);
    code = read_generate(client, &own, &request.generate, stops, error);
    if (!code)
        code = dskv_call_begin(client, &request, own.timeout_ms, &made->call, error);
    if (code) {
        free(made);
        return code;
    }
    remember_before(made, &own, &request.generate);
    made->prefix = own.prefix;
    made->consume = own.consume;
    made->client = client;
    dskv_client_hold(client);
    *stream = made;
    return DSKV_OK;
}

/* A cache cannot be longer than the tokens that it is said to stand for. */
static int is_more_than_known(const struct dskv_stream *stream, const struct dskv_event *event)
{
    const struct dskv_wire_tensor *tokens = &event->generate.tokens;
    return !tokens->data || event->generate.cache.length > (int64_t)stream->n_before + tokens->shape[0];
}

static struct dskv_generated *make_generated(struct dskv_stream *stream, const struct dskv_event *event)
{
    struct dskv_generated *made = dskv_calloc(1, sizeof *made);
    struct dskv_wire_tensor before = {
        .data = stream->before, .dtype = DSKV_I32, .n_dims = 1, .shape = {(int64_t)stream->n_before}};
    made->tokens = dskv_tensor_copy(&event->generate.tokens);
    made->n_tokens = (int32_t)event->generate.tokens.shape[0];
    made->steps = event->generate.steps;
    made->finish_reason = dskv_finish_name(event->generate.finish);
    made->seed = event->generate.seed;
    made->cached = event->generate.cached;
    made->computed = event->generate.computed;
    made->cache = dskv_cache_open(stream->client, &event->generate.cache, (struct dskv_cache_prefix){0},
                                  (struct dskv_wire_tensor[]){before, event->generate.tokens}, 2);
    dskv_prefix_mark_consumed(stream->prefix, stream->consume && event->generate.finish != DSKV_FINISH_CANCELLED);
    return made;
}

enum dskv_code dskv_stream_next(struct dskv_stream *stream, const int32_t **tokens, size_t *n_tokens,
                                struct dskv_error *error)
{
    *tokens = NULL;
    *n_tokens = 0;
    if (stream->has_event)
        dskv_event_clear(&stream->event);
    stream->has_event = 0;
    if (stream->result || stream->taken)
        return DSKV_OK;
    if (stream->failed)
        return dskv_fail(error, DSKV_BAD_VALUE, "the stream has failed before: close it");
    enum dskv_code code = dskv_call_wait(&stream->call, &stream->event, error);
    if (!code) {
        stream->has_event = 1;
        if (stream->event.kind == DSKV_EVENT_TOKENS) {
            *tokens = stream->event.tokens.data;
            *n_tokens = (size_t)stream->event.tokens.shape[0];
        } else if (stream->event.kind != DSKV_EVENT_RESULT || stream->event.op != DSKV_OP_GENERATE) {
            code = dskv_call_unexpected(&stream->event, error);
        } else if (is_more_than_known(stream, &stream->event)) {
            stream->has_event = 0;
            code = refuse_reply(stream->client, &stream->event, &stream->event.generate.cache, error);
        } else {
            stream->result = make_generated(stream, &stream->event);
        }
    }
    if (code) {
        stream->failed = 1;
        dskv_call_end(&stream->call); /* cancels, where the server is still at it */
    }
    return code;
}

enum dskv_code dskv_stream_cancel(struct dskv_stream *stream, struct dskv_error *error)
{
    return stream->call.ended ? DSKV_OK : dskv_call_cancel(&stream->call, error);
}

enum dskv_code dskv_stream_result(struct dskv_stream *stream, struct dskv_generated **generated,
                                  struct dskv_error *error)
{
    *generated = NULL;
    if (stream->taken)
        return dskv_fail(error, DSKV_BAD_VALUE, "the stream's result was taken before");
    while (!stream->result) {
        const int32_t *tokens;
        size_t n_tokens;
        enum dskv_code code = dskv_stream_next(stream, &tokens, &n_tokens, error);
        if (code)
            return code;
    }
    *generated = stream->result;
    stream->result = NULL;
    stream->taken = 1;
    return DSKV_OK;
}

void dskv_stream_close(struct dskv_stream **stream)
{
    struct dskv_stream *closing = *stream;
    *stream = NULL;
    if (!closing)
        return;
    dskv_call_end(&closing->call);
    if (closing->has_event)
        dskv_event_clear(&closing->event);
    dskv_generated_free(&closing->result);
    dskv_client_release(closing->client);
    free(closing->before);
    free(closing);
}

/* ---- generate --------------------------------------------------------------------------------------------------- */

enum dskv_code dskv_generate(struct dskv_client *client, const struct dskv_generate_options *options,
                             struct dskv_generated **generated, struct dskv_error *error)
{
    *generated = NULL;
    struct dskv_stream *stream = NULL;
    enum dskv_code code = dskv_stream_open(client, options, &stream, error);
    if (!code)
        code = dskv_stream_result(stream, generated, error);
    dskv_stream_close(&stream);
    return code;
}

void dskv_generated_free(struct dskv_generated **generated)
{
    struct dskv_generated *freed = *generated;
    *generated = NULL;
    if (!freed)
        return;
    dskv_cache_free(&freed->cache);
    free((void *)freed->tokens);
    free(freed);
}
