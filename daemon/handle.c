/* Handle: what each message of the front does.
 *
 * Small requests (hello, free) are answered here; the others become tasks, or go to the task that they name.
 */
#include "base/log.h"
#include "base/version.h"
#include "daemon/describe.h"
#include "daemon/task.h"

#include <ctype.h>
#include <stdio.h>

static int32_t free_caches(struct dskv_state *state, const struct dskv_id *ids, int32_t n)
{
    int32_t n_freed = 0;
    for (int32_t i = 0; i < n; i++) {
        struct dskv_cache *cache = dskv_caches_find(state->caches, &ids[i]);
        if (!cache)
            continue;
        dskv_caches_free(state->caches, cache);
        n_freed++;
    }
    return n_freed;
}

/* The name is the client's: it must not be able to forge lines. */
static void log_session(const char *client)
{
    char name[sizeof((struct dskv_request *)0)->hello.client];
    size_t n = 0;
    for (; client[n] && n < sizeof name - 1; n++)
        name[n] = isprint((unsigned char)client[n]) ? client[n] : '?';
    name[n] = 0;
    dskv_log(DSKV_LOG_DEBUG, "server", "a session begins for \"%s\"", name);
}

static void answer_hello(struct dskv_state *state, struct dskv_ticket *ticket, const struct dskv_request *request)
{
    struct dskv_error error;
    int speaks = request->hello.n_versions == 0;
    for (int32_t i = 0; i < request->hello.n_versions; i++)
        speaks |= request->hello.versions[i] == DSKV_PROTOCOL_VERSION;
    if (!speaks) {
        dskv_fail(&error, DSKV_VERSION_MISMATCH, "the server speaks version %d of the protocol alone",
                  DSKV_PROTOCOL_VERSION);
        dskv_error_set_field(&error, "versions");
        dskv_error_set_valid(&error, "%d", DSKV_PROTOCOL_VERSION);
        dskv_state_refuse(state, ticket, &error);
        return;
    }
    struct dskv_session *session = dskv_sessions_begin(state->sessions, state->now_us);
    if (!session) {
        dskv_fail(&error, DSKV_BUSY, "there are %d sessions with caches, no more are opened", DSKV_MAX_SESSIONS);
        dskv_error_set(&error, DSKV_HAS_LIMIT, DSKV_MAX_SESSIONS);
        dskv_state_refuse(state, ticket, &error);
        return;
    }
    struct dskv_event event = {.kind = DSKV_EVENT_RESULT};
    event.hello.version = DSKV_PROTOCOL_VERSION;
    event.hello.session = session->id;
    event.hello.lease_ms = state->lease_us / 1000;
    snprintf(event.hello.server_version, sizeof event.hello.server_version, "%s", DSKV_VERSION);
    dskv_describe_limits(state->info, &event.hello.limits);
    log_session(request->hello.client);
    dskv_state_post(state, ticket, &event);
}

static enum dskv_code find_session(struct dskv_state *state, const struct dskv_request *request,
                                   struct dskv_session **session, struct dskv_error *error)
{
    *session = request->has_session ? dskv_sessions_find(state->sessions, &request->session) : NULL;
    if (*session)
        return DSKV_OK;
    dskv_fail(error, DSKV_BAD_VALUE,
              request->has_session ? "the session ended or never existed: say hello again"
                                   : "%s needs a session: say hello first",
              dskv_op_name(request->op));
    dskv_error_set_field(error, "session");
    return DSKV_BAD_VALUE;
}

static void answer_free(struct dskv_state *state, struct dskv_ticket *ticket, const struct dskv_request *request)
{
    struct dskv_event event = {.kind = DSKV_EVENT_RESULT};
    struct dskv_session *session;
    struct dskv_error error;
    if (!request->free_caches.all) {
        event.free_caches.n_freed = free_caches(state, request->free_caches.caches, request->free_caches.n);
    } else if (find_session(state, request, &session, &error)) {
        dskv_state_refuse(state, ticket, &error);
        return;
    } else {
        event.free_caches.n_freed = dskv_caches_free_session(state->caches, session);
    }
    dskv_state_post(state, ticket, &event);
}

static const struct dskv_task_kind *kind_of(enum dskv_op op)
{
    switch (op) {
    case DSKV_OP_FORWARD: return &dskv_task_forward;
    case DSKV_OP_VERIFY: return &dskv_task_verify;
    case DSKV_OP_GENERATE: return &dskv_task_generate;
    case DSKV_OP_EXPORT: return &dskv_task_export;
    case DSKV_OP_IMPORT: return &dskv_task_import;
    default: return NULL;
    }
}

static void begin_task(struct dskv_state *state, struct dskv_message *message, const struct dskv_task_kind *kind)
{
    struct dskv_session *session;
    struct dskv_error error;
    enum dskv_code code = find_session(state, &message->request, &session, &error);
    if (code && kind->needs_session) {
        dskv_state_refuse(state, message->ticket, &error);
        return;
    }
    message->taken = 1;
    dskv_task_begin(state, kind, message->ticket, session, &message->request);
}

static void begin_request(struct dskv_state *state, struct dskv_message *message)
{
    const struct dskv_request *request = &message->request;
    struct dskv_ticket *ticket = message->ticket;
    const struct dskv_task_kind *kind = kind_of(request->op);
    struct dskv_error error;
    if (state->failed) {
        dskv_fail(&error, DSKV_INTERNAL, "the server is ending: %s", state->failure.message);
        dskv_state_refuse(state, ticket, &error);
    } else if (ticket->deadline_us <= state->now_us) {
        dskv_fail(&error, DSKV_DEADLINE, "the deadline of %d ms passed before the request began", request->deadline_ms);
        dskv_state_refuse(state, ticket, &error);
    } else if (request->op == DSKV_OP_HELLO) {
        answer_hello(state, ticket, request);
    } else if (request->op == DSKV_OP_FREE) {
        answer_free(state, ticket, request);
    } else {
        DSKV_ASSERT(kind, "%s is no request for the engine thread", dskv_op_name(request->op));
        begin_task(state, message, kind);
    }
}

static void cancel_task(struct dskv_state *state, struct dskv_task *task, const char *why)
{
    struct dskv_error error;
    dskv_fail(&error, DSKV_CANCELLED, "%s", why);
    dskv_task_fail(state, task, &error);
}

static void overrun(struct dskv_state *state, struct dskv_task *task)
{
    struct dskv_error error;
    dskv_fail(&error, DSKV_BAD_VALUE, "a part came although there was no credit for it");
    dskv_error_set_field(&error, "part");
    dskv_error_set(&error, DSKV_HAS_LIMIT, DSKV_MAX_CREDITS / 2);
    dskv_task_fail(state, task, &error);
}

/* What every request may carry: caches to free first, and a session that it renews. */
static void take_envelope(struct dskv_state *state, const struct dskv_request *request)
{
    free_caches(state, request->free, request->n_free);
    struct dskv_session *session = request->has_session ? dskv_sessions_find(state->sessions, &request->session) : NULL;
    if (session)
        dskv_session_renew(state->sessions, session, state->now_us);
}

void dskv_state_handle(struct dskv_state *state, struct dskv_message *message)
{
    struct dskv_task *task = message->ticket ? message->ticket->task : NULL; /* null when it has ended meanwhile */
    take_envelope(state, &message->request);
    switch (message->kind) {
    case DSKV_MESSAGE_NOTE: break;
    case DSKV_MESSAGE_REQUEST: begin_request(state, message); break;
    case DSKV_MESSAGE_FOLLOW:
        if (task) {
            task->heard_us = state->now_us;
            task->kind->follow(state, task, &message->request);
        }
        break;
    case DSKV_MESSAGE_OVERRUN:
        if (task)
            overrun(state, task);
        break;
    case DSKV_MESSAGE_CANCEL:
        if (task && task->kind->cancel)
            task->kind->cancel(state, task);
        else if (task)
            cancel_task(state, task, "the request was cancelled");
        break;
    case DSKV_MESSAGE_LOST:
        if (task)
            cancel_task(state, task, "the client is gone");
        break;
    }
}
