/* Calls of the C client: requests out, events in, each event to the call that it answers.
 *
 * Owns ids, the time-outs and what becomes of late events.  Knows operations only so far as a late result may name a
 * cache, which nobody will ever free but us.
 */
#include "ipc/client_inside.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- out -------------------------------------------------------------------------------------------------------- */

static enum dskv_code check_size(const struct dskv_client *client, const struct dskv_frames *frames,
                                 struct dskv_error *error)
{
    if (!client->has_session) /* the limits are not known yet */
        return DSKV_OK;
    int64_t bytes = 0;
    for (int i = 0; i < frames->n; i++) {
        int64_t limit = i ? client->limits.frame_bytes : client->limits.header_bytes;
        int64_t n = (int64_t)frames->frames[i].bytes;
        bytes += n;
        if (n > limit) {
            dskv_fail(error, DSKV_BAD_VALUE, "a part of the request takes %lld bytes, the server's limit is %lld",
                      (long long)n, (long long)limit);
            dskv_error_set(error, DSKV_HAS_LIMIT, limit);
            return DSKV_BAD_VALUE;
        }
    }
    if (bytes <= client->limits.request_bytes)
        return DSKV_OK;
    dskv_fail(error, DSKV_BAD_VALUE, "the request takes %lld bytes, the server's limit is %lld", (long long)bytes,
              (long long)client->limits.request_bytes);
    dskv_error_set(error, DSKV_HAS_LIMIT, client->limits.request_bytes);
    dskv_error_set(error, DSKV_HAS_NEEDED, bytes);
    return DSKV_BAD_VALUE;
}

/* The server passes over, in silence, what exceeds its limits: so nothing leaves unmeasured. */
static enum dskv_code send_request(struct dskv_client *client, struct dskv_request *request, int32_t timeout_ms,
                                   struct dskv_error *error)
{
    request->version = DSKV_PROTOCOL_VERSION;
    request->has_session = client->has_session;
    request->session = client->session;
    struct dskv_frames frames = {0};
    enum dskv_code code = dskv_request_encode(request, &frames, error);
    if (!code)
        code = check_size(client, &frames, error);
    if (!code)
        code = dskv_link_send(client->link, &frames, timeout_ms, error);
    dskv_frames_clear(&frames);
    return code;
}

/* Not with what is answered at once, beside the work. */
static int carries_free_list(enum dskv_op op)
{
    return op == DSKV_OP_FORWARD || op == DSKV_OP_VERIFY || op == DSKV_OP_GENERATE || op == DSKV_OP_EXPORT ||
           op == DSKV_OP_IMPORT;
}

static void carry(struct dskv_call *call, size_t n)
{
    if (!n)
        return;
    call->carried = dskv_calloc(n, sizeof *call->carried);
    call->n_carried = n;
    memcpy(call->carried, call->client->freed, n * sizeof *call->carried);
    dskv_client_forget_freed(call->client, n);
}

/* A request that was refused, or lost, may not have been looked at: what it carried goes with a later one. */
static void carry_later(struct dskv_call *call)
{
    for (size_t i = 0; i < call->n_carried; i++)
        dskv_client_give_up(call->client, &call->carried[i]);
    free(call->carried);
    call->carried = NULL;
    call->n_carried = 0;
}

/* Not inlined: a call on its owner's stack leaves the list before its owner returns, which gcc 12 warns it cannot see.
 */
__attribute__((noinline)) enum dskv_code dskv_call_begin(struct dskv_client *client, struct dskv_request *request,
                                                         int32_t timeout_ms, struct dskv_call *call,
                                                         struct dskv_error *error)
{
    enum dskv_code code = dskv_client_check_open(client, error);
    if (!code && !client->has_session && request->op != DSKV_OP_HELLO)
        code = dskv_client_hello(client, error);
    if (code)
        return code;
    timeout_ms = timeout_ms ? timeout_ms : client->timeout_ms;
    *call =
        (struct dskv_call){.client = client, .id = client->next_id++, .timeout_ms = timeout_ms < 0 ? -1 : timeout_ms};
    size_t n_freed = carries_free_list(request->op) ? dskv_client_next_freed(client) : 0;
    request->id = call->id;
    request->n_free = (int32_t)n_freed;
    request->free = client->freed;
    code = send_request(client, request, call->timeout_ms, error);
    if (code)
        return code;
    carry(call, n_freed);
    call->last = &call->first;
    call->next = client->calls;
    client->calls = call;
    return DSKV_OK;
}

static enum dskv_code send_further(struct dskv_call *call, struct dskv_request *request, int32_t timeout_ms,
                                   struct dskv_error *error)
{
    struct dskv_client *client = call->client;
    enum dskv_code code = dskv_client_check_open(client, error);
    if (code)
        return code;
    request->id = client->next_id++;
    return send_request(client, request, timeout_ms, error);
}

enum dskv_code dskv_call_follow(struct dskv_call *call, struct dskv_request *request, struct dskv_error *error)
{
    call->last_follower = call->client->next_id;
    return send_further(call, request, call->timeout_ms, error);
}

enum dskv_code dskv_call_cancel(struct dskv_call *call, struct dskv_error *error)
{
    struct dskv_request cancel = {.op = DSKV_OP_CANCEL, .cancel = {.request = call->id}};
    return send_further(call, &cancel, call->timeout_ms, error);
}

/* ---- in --------------------------------------------------------------------------------------------------------- */

/* A result that nobody waits for any more: the caches that it names are known to us alone. */
static void pass_over(struct dskv_client *client, struct dskv_event *event)
{
    const struct dskv_cache_ref *ref = NULL;
    if (event->kind == DSKV_EVENT_RESULT && event->op == DSKV_OP_FORWARD)
        for (int i = 0; i < event->forward.n; i++)
            if (event->forward.sequences[i].cache.present)
                dskv_client_give_up(client, &event->forward.sequences[i].cache.id);
    if (event->kind == DSKV_EVENT_RESULT && event->op == DSKV_OP_VERIFY)
        ref = &event->verify.cache;
    if (event->kind == DSKV_EVENT_RESULT && event->op == DSKV_OP_GENERATE)
        ref = &event->generate.cache;
    if (event->kind == DSKV_EVENT_RESULT && event->op == DSKV_OP_IMPORT)
        ref = &event->import_;
    if (ref && ref->present)
        dskv_client_give_up(client, &ref->id);
    dskv_event_clear(event);
}

static void lose_calls(struct dskv_client *client, const struct dskv_error *why)
{
    for (struct dskv_call *call = client->calls; call; call = call->next)
        if (!call->ended) {
            call->lost = 1;
            call->error = *why;
        }
}

static int is_for(const struct dskv_call *call, const struct dskv_event *event)
{
    return event->id == call->id ||
           (event->kind == DSKV_EVENT_ERROR && event->id > call->id && event->id <= call->last_follower);
}

static void hand_over(struct dskv_client *client, struct dskv_event *event)
{
    struct dskv_call *call = client->calls;
    while (call && !is_for(call, event))
        call = call->next;
    if (!call) {
        pass_over(client, event);
        return;
    }
    if (event->kind != DSKV_EVENT_ERROR)
        call->n_carried = 0;
    struct dskv_arrived *arrived = dskv_calloc(1, sizeof *arrived);
    arrived->event = *event;
    *call->last = arrived;
    call->last = &arrived->next;
}

/* Receives one message for whichever call it is. */
static enum dskv_code receive(struct dskv_client *client, int timeout_ms, struct dskv_error *error)
{
    struct dskv_frames frames = {0};
    enum dskv_code code = dskv_link_receive(client->link, &frames, timeout_ms, error);
    if (code == DSKV_UNREACHABLE)
        lose_calls(client, error);
    if (code)
        return code;
    struct dskv_event event = {0};
    struct dskv_error why;
    code = dskv_event_decode(&frames, &event, &why);
    dskv_frames_clear(&frames);
    if (code)
        return dskv_fail(error, DSKV_BAD_MESSAGE, "the server sent what this client cannot read: %.160s", why.message);
    hand_over(client, &event);
    return DSKV_OK;
}

static enum dskv_code pass_on(struct dskv_error *error, const struct dskv_error *why)
{
    if (error)
        *error = *why;
    return why->code;
}

static enum dskv_code wait_for_any(struct dskv_call *call, struct dskv_error *error)
{
    struct dskv_error why;
    int64_t end_ms = now_ms() + call->timeout_ms;
    while (!call->first) {
        if (call->lost)
            return pass_on(error, &call->error);
        int64_t left_ms = call->timeout_ms < 0 ? -1 : end_ms - now_ms();
        if (call->timeout_ms >= 0 && left_ms <= 0)
            return dskv_fail(error, DSKV_TIMEOUT, "no reply within %d ms", call->timeout_ms);
        enum dskv_code code = receive(call->client, (int)left_ms, &why);
        if (code && code != DSKV_TIMEOUT && code != DSKV_UNREACHABLE)
            return pass_on(error, &why);
    }
    return DSKV_OK;
}

/* The next event, whatever it is. */
static enum dskv_code take(struct dskv_call *call, struct dskv_event *event, struct dskv_error *error)
{
    enum dskv_code code = dskv_client_check_open(call->client, error);
    if (!code)
        code = wait_for_any(call, error);
    if (code)
        return code;
    struct dskv_arrived *arrived = call->first;
    call->first = arrived->next;
    if (!call->first)
        call->last = &call->first;
    *event = arrived->event;
    free(arrived);
    call->ended = event->last && event->id == call->id;
    return DSKV_OK;
}

/* An error of a follower (a part, say) means that the call has failed or will not succeed: the call is cancelled, and
 * its own last event tells which, since a follower that came too late is refused for that alone. */
enum dskv_code dskv_call_wait(struct dskv_call *call, struct dskv_event *event, struct dskv_error *error)
{
    struct dskv_error followers = {DSKV_OK}, own;
    for (;;) {
        enum dskv_code code = take(call, event, &own);
        if (code)
            return pass_on(error, followers.code ? &followers : &own);
        if (event->kind != DSKV_EVENT_ERROR && (event->last || !followers.code))
            return DSKV_OK;
        if (event->kind == DSKV_EVENT_ERROR)
            own = event->error;
        int is_error = event->kind == DSKV_EVENT_ERROR;
        dskv_event_clear(event);
        if (call->ended)
            break;
        if (is_error && !followers.code) {
            followers = own;
            dskv_call_cancel(call, NULL);
        }
    }
    if (own.code == DSKV_BAD_VALUE && strcmp(own.field, "session") == 0)
        call->client->has_session = 0; /* it has ended, and its caches with it: the next call opens another */
    return pass_on(error, followers.code && own.code == DSKV_CANCELLED ? &followers : &own);
}

void dskv_call_end(struct dskv_call *call)
{
    struct dskv_client *client = call->client;
    for (struct dskv_call **at = &client->calls; *at; at = &(*at)->next)
        if (*at == call) {
            *at = call->next;
            break;
        }
    while (call->first) {
        struct dskv_arrived *arrived = call->first;
        call->first = arrived->next;
        call->ended |= arrived->event.last && arrived->event.id == call->id;
        pass_over(client, &arrived->event);
        free(arrived);
    }
    if (!call->ended && !call->lost && client->link) {
        call->timeout_ms = 0; /* a courtesy: not worth a wait */
        dskv_call_cancel(call, NULL);
    }
    carry_later(call);
    call->ended = 1;
}

enum dskv_code dskv_call_run(struct dskv_client *client, struct dskv_request *request, int32_t timeout_ms,
                             struct dskv_event *event, struct dskv_error *error)
{
    struct dskv_call call;
    enum dskv_code code = dskv_call_begin(client, request, timeout_ms, &call, error);
    if (code)
        return code;
    code = dskv_call_wait(&call, event, error);
    if (!code && (event->kind != DSKV_EVENT_RESULT || event->op != request->op)) {
        code = dskv_call_unexpected(event, error);
        dskv_event_clear(event);
    }
    dskv_call_end(&call);
    return code;
}

enum dskv_code dskv_call_unexpected(const struct dskv_event *event, struct dskv_error *error)
{
    return dskv_fail(error, DSKV_BAD_MESSAGE, "the server sent an event out of place (kind %d of operation %d)",
                     event->kind, event->op);
}
