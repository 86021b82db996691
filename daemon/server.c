/* Server: the engine thread's loop.
 *
 * A round: take what the front sent, end what was cancelled or is too late, run one step, do one piece of every
 * transfer that can go on, then let the front see the events and counters.  The thread sleeps when there is nothing of
 * all that.
 */
#include "daemon/server.h"

#include "base/log.h"
#include "base/memory.h"
#include "base/version.h"
#include "daemon/describe.h"
#include "daemon/step.h"
#include "daemon/task.h"

#include <ctype.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Messages of one round while steps wait, so that a flood of parts does not hold up who decodes. */
#define MESSAGES_PER_ROUND 16
/* How often the ranks' counters are read while steps follow each other without a pause. */
#define RANK_STATS_US 1000000

struct dskv_server {
    struct dskv_state state;
    struct dskv_step step;
    struct dskv_message *messages; /* taken and not yet handled */
    enum dskv_phase phase;
    int64_t started_us;
    struct dskv_rank_stats *rank_stats; /* [n_ranks] */
    struct dskv_rank_counters *ranks;   /* [n_ranks]: the same, as they were last read */
    int64_t ranks_read_us;
    int64_t ranks_read_steps; /* state.stats.steps then; -1: never */
    pthread_t thread;
};

/* ---- messages --------------------------------------------------------------------------------------------------- */

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

static void handle(struct dskv_state *state, struct dskv_message *message)
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

/* ---- time ------------------------------------------------------------------------------------------------------- */

/* When a task has to end if nothing happens. */
static int64_t task_ends_us(const struct dskv_state *state, const struct dskv_task *task)
{
    int64_t ends = task->ticket->deadline_us;
    if (task->kind->is_transfer && state->lease_us && task->heard_us + state->lease_us < ends)
        ends = task->heard_us + state->lease_us;
    return ends;
}

static int64_t next_end_us(const struct dskv_state *state)
{
    int64_t next = dskv_sessions_next_us(state->sessions);
    for (const struct dskv_task *task = state->tasks; task; task = task->next) {
        int64_t ends = task_ends_us(state, task);
        next = ends < next ? ends : next;
    }
    return next;
}

static void end_late_tasks(struct dskv_state *state)
{
    for (struct dskv_task *task = state->tasks, *next; task; task = next) {
        next = task->next;
        if (task_ends_us(state, task) > state->now_us)
            continue;
        struct dskv_error error;
        if (task->ticket->deadline_us <= state->now_us)
            dskv_fail(&error, DSKV_DEADLINE, "the deadline of %d ms has passed", task->request.deadline_ms);
        else
            dskv_fail(&error, DSKV_DEADLINE, "the client was silent for %lld s in the middle of its %s",
                      (long long)(state->lease_us / 1000000), dskv_op_name(task->request.op));
        dskv_task_fail(state, task, &error);
    }
}

static void end_sessions(struct dskv_state *state)
{
    for (struct dskv_session *session; (session = dskv_sessions_expired(state->sessions, state->now_us));) {
        int32_t n = dskv_caches_free_session(state->caches, session);
        dskv_log(DSKV_LOG_DEBUG, "server", "a session was silent for its lease: its %d caches are freed", n);
        dskv_sessions_end(state->sessions, session);
    }
}

/* ---- counters --------------------------------------------------------------------------------------------------- */

/* The ranks' counters, when they may have changed: at every pause, and now and then while there is none. */
static void read_ranks(struct dskv_server *server, int pauses)
{
    struct dskv_state *state = &server->state;
    struct dskv_error error;
    int is_stale = server->ranks_read_steps != state->stats.steps;
    if (state->failed || !is_stale || !(pauses || state->now_us - server->ranks_read_us >= RANK_STATS_US))
        return;
    enum dskv_exit code = dskv_engine_stats(state->engine, server->rank_stats, &error);
    if (code) {
        dskv_state_break(state, code, &error);
        return;
    }
    server->ranks_read_us = state->now_us;
    server->ranks_read_steps = state->stats.steps;
    for (int32_t i = 0; i < state->info->n_ranks; i++) {
        const struct dskv_rank_stats *from = &server->rank_stats[i];
        server->ranks[i] = (struct dskv_rank_counters){
            .weight_bytes = (int64_t)from->weight_bytes,
            .replicated_bytes = (int64_t)from->replicated_bytes,
            .pool_bytes = (int64_t)from->pool_bytes,
            .resident_bytes = (int64_t)from->resident_bytes,
            .steps = (int64_t)from->steps,
            .rows_computed = (int64_t)from->rows_computed,
            .read_bytes = (int64_t)from->read_bytes,
        };
    }
}

static void publish(struct dskv_server *server)
{
    struct dskv_state *state = &server->state;
    struct dskv_stats_result stats = state->stats;
    stats.blocks_total = dskv_blocks_total(state->blocks);
    stats.blocks_used = dskv_blocks_used(state->blocks);
    stats.blocks_reserved = dskv_blocks_reserved(state->blocks);
    stats.caches = dskv_caches_count(state->caches);
    stats.sessions = dskv_sessions_count(state->sessions);
    stats.sequences_active = dskv_scheduler_waiting(&state->scheduler);
    stats.n_ranks = state->info->n_ranks;
    stats.ranks = server->ranks;
    dskv_mailbox_publish(state->mailbox, &stats);
}

/* ---- the loop --------------------------------------------------------------------------------------------------- */

static int any_ready(const struct dskv_state *state)
{
    for (const struct dskv_task *task = state->tasks; task; task = task->next)
        if (task->kind->ready && task->kind->ready(task))
            return 1;
    return 0;
}

static void take_messages(struct dskv_server *server, int is_busy)
{
    struct dskv_state *state = &server->state;
    int64_t until_us = is_busy || server->messages ? 0 : next_end_us(state);
    struct dskv_message **end = &server->messages;
    while (*end)
        end = &(*end)->next;
    *end = dskv_mailbox_take(state->mailbox, until_us, &server->phase);
    state->now_us = dskv_mailbox_now_us();
    int all = !is_busy || server->phase >= DSKV_PHASE_STOP;
    for (int n = 0; server->messages && (all || n < MESSAGES_PER_ROUND); n++) {
        struct dskv_message *message = server->messages;
        server->messages = message->next;
        handle(state, message);
        dskv_mailbox_discard(state->mailbox, &message);
    }
}

static void end_all(struct dskv_state *state)
{
    struct dskv_error error;
    dskv_fail(&error, DSKV_DRAINING, "the server is ending");
    while (state->tasks)
        dskv_task_fail(state, state->tasks, &error);
}

static void work(struct dskv_state *state)
{
    for (struct dskv_task *task = state->tasks, *next; task && !state->failed; task = next) {
        next = task->next;
        if (task->kind->ready && task->kind->ready(task))
            task->kind->work(state, task);
    }
}

/* One round.  Returns 1 when there is more to do at once. */
static int run_round(struct dskv_server *server, int is_busy)
{
    struct dskv_state *state = &server->state;
    take_messages(server, is_busy);
    end_late_tasks(state);
    if (server->phase >= DSKV_PHASE_STOP)
        end_all(state);
    dskv_task_reap(state);
    if (!state->failed)
        dskv_step_run(&server->step, state);
    work(state);
    dskv_task_reap(state);
    end_sessions(state);
    is_busy = dskv_scheduler_waiting(&state->scheduler) || any_ready(state) || server->messages;
    read_ranks(server, !is_busy);
    publish(server);
    return is_busy;
}

static void *run(void *argument)
{
    struct dskv_server *server = argument;
    int is_busy = 0;
    while (server->phase < DSKV_PHASE_CLOSE)
        is_busy = run_round(server, is_busy);
    return NULL;
}

/* ---- the front thread's side ------------------------------------------------------------------------------------ */

static void open_state(struct dskv_server *server, struct dskv_engine *engine, const struct dskv_config *config)
{
    struct dskv_state *state = &server->state;
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    struct dskv_step_limits limits = {info->max_batch_tokens, info->max_sequences, info->max_logit_rows};
    state->engine = engine;
    state->info = info;
    state->mailbox = dskv_mailbox_open(info->n_ranks);
    state->blocks = dskv_blocks_open(info->n_blocks, info->block_tokens);
    state->sessions = dskv_sessions_open(config->cache_lease);
    state->caches = dskv_caches_open(state->blocks);
    state->seeds.base = config->seed;
    state->lease_us = (int64_t)config->cache_lease * 1000000;
    state->now_us = dskv_mailbox_now_us();
    dskv_scheduler_open(&state->scheduler, &limits);
    server->started_us = state->now_us;
    server->rank_stats = dskv_calloc((size_t)info->n_ranks, sizeof *server->rank_stats);
    server->ranks = dskv_calloc((size_t)info->n_ranks, sizeof *server->ranks);
    server->ranks_read_steps = -1;
}

static void free_server(struct dskv_server *server)
{
    struct dskv_state *state = &server->state;
    dskv_step_close(&server->step);
    dskv_caches_close(&state->caches);
    dskv_sessions_close(&state->sessions);
    dskv_blocks_close(&state->blocks);
    dskv_mailbox_close(&state->mailbox);
    free(server->rank_stats);
    free(server->ranks);
    free(server);
}

/* Signals are the front thread's. */
static int start_thread(struct dskv_server *server)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int status = pthread_create(&server->thread, NULL, run, server);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return status;
}

enum dskv_exit dskv_server_open(struct dskv_engine *engine, const struct dskv_config *config,
                                struct dskv_server **server, struct dskv_error *error)
{
    struct dskv_server *s = dskv_calloc(1, sizeof *s);
    open_state(s, engine, config);
    enum dskv_exit code = dskv_step_open(&s->state.scheduler.limits, config->trace_plans, &s->step, error);
    if (!code) {
        read_ranks(s, 1); /* so that the first stats tell of the weights */
        if (s->state.failed) {
            code = s->state.failed;
            *error = s->state.failure;
        }
        publish(s);
    }
    if (!code) {
        int status = start_thread(s);
        if (status)
            code = dskv_fail_exit(error, DSKV_EXIT_MEMORY, "cannot start the engine thread: %s", strerror(status));
    }
    if (code) {
        free_server(s);
        return code;
    }
    *server = s;
    return DSKV_EXIT_OK;
}

void dskv_server_close(struct dskv_server **server)
{
    struct dskv_server *s = *server;
    if (!s)
        return;
    dskv_mailbox_set_phase(s->state.mailbox, DSKV_PHASE_CLOSE);
    pthread_join(s->thread, NULL);
    free_server(s);
    *server = NULL;
}

enum dskv_code dskv_server_submit(struct dskv_server *server, const struct dskv_route *route,
                                  struct dskv_request *request, struct dskv_error *error)
{
    return dskv_mailbox_submit(server->state.mailbox, route, request, error);
}

int dskv_server_cancel(struct dskv_server *server, const struct dskv_route *route, uint64_t id)
{
    return dskv_mailbox_cancel(server->state.mailbox, route, id);
}

void dskv_server_note(struct dskv_server *server, const struct dskv_request *request)
{
    dskv_mailbox_note(server->state.mailbox, request);
}

void dskv_server_route_lost(struct dskv_server *server, const struct dskv_route *route)
{
    dskv_mailbox_route_lost(server->state.mailbox, route);
}

int dskv_server_event_fd(const struct dskv_server *server)
{
    return dskv_mailbox_event_fd(server->state.mailbox);
}

int dskv_server_next_event(struct dskv_server *server, struct dskv_route *route, struct dskv_frames *frames)
{
    return dskv_mailbox_next_event(server->state.mailbox, route, frames);
}

void dskv_server_stats(struct dskv_server *server, struct dskv_stats_result *stats)
{
    dskv_mailbox_stats(server->state.mailbox, stats);
    stats->uptime_s = (double)(dskv_mailbox_now_us() - server->started_us) * 1e-6;
}

void dskv_server_drain(struct dskv_server *server)
{
    dskv_mailbox_set_phase(server->state.mailbox, DSKV_PHASE_DRAIN);
}

void dskv_server_stop(struct dskv_server *server)
{
    dskv_mailbox_set_phase(server->state.mailbox, DSKV_PHASE_STOP);
}

int dskv_server_idle(struct dskv_server *server)
{
    return dskv_mailbox_idle(server->state.mailbox);
}

enum dskv_exit dskv_server_failed(struct dskv_server *server, struct dskv_error *error)
{
    return dskv_mailbox_failed(server->state.mailbox, error);
}
