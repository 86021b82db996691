/* Server: the engine thread's loop.
 *
 * A round: take what the front sent, end what was cancelled or is too late, collect one step (with the next one already
 * submitted, where steps are queued ahead), do one piece of every transfer that can go on, then let the front see the
 * events and counters.  The thread sleeps when there is nothing of all that.
 */
#include "daemon/server.h"

#include "base/log.h"
#include "base/memory.h"
#include "daemon/step.h"
#include "daemon/task.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* While steps wait, messages get a part of the time that steps get, one for each of so many, so that no flood of them
 * holds up who decodes; and never more than this in a round. */
#define STEPS_PER_MESSAGES 4
#define MESSAGES_US_PER_ROUND 2000
/* How often the ranks' counters are read while steps follow each other without a pause. */
#define RANK_STATS_US 1000000

struct dskv_server {
    struct dskv_state state;
    struct dskv_step step;
    struct dskv_message *messages; /* taken and not yet handled */
    int64_t worked_us;             /* what steps and transfers took in the last round */
    enum dskv_phase phase;
    int64_t started_us;
    struct dskv_rank_stats *rank_stats; /* [n_ranks] */
    struct dskv_rank_counters *ranks;   /* [n_ranks]: the same, as they were last read */
    int64_t ranks_read_us;
    int64_t ranks_read_steps; /* state.stats.steps then; -1: never */
    pthread_t thread;
};

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
    dskv_step_settle(&server->step, state);
    dskv_task_reap(state); /* what ended just now gives its blocks back before its reply and the counters leave */
    if (state->failed)
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
    stats.sequences_active = dskv_scheduler_active(&state->scheduler);
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

/* Pieces of an import are written to the pool at once; other messages leave the engine alone. */
static int writes_pool(const struct dskv_message *message)
{
    return message->kind == DSKV_MESSAGE_FOLLOW && message->request.op == DSKV_OP_PART;
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
    int all = !is_busy || server->phase >= DSKV_PHASE_STOP, n_handled = 0;
    int64_t most_us = server->worked_us / STEPS_PER_MESSAGES;
    int64_t enough_us = state->now_us + (most_us < MESSAGES_US_PER_ROUND ? most_us : MESSAGES_US_PER_ROUND);
    while (server->messages && (all || !n_handled++ || dskv_mailbox_now_us() < enough_us)) {
        struct dskv_message *message = server->messages;
        server->messages = message->next;
        if (writes_pool(message))
            dskv_step_settle(&server->step, state);
        dskv_state_handle(state, message);
        dskv_task_reap(state); /* what has ended gives its blocks back before the next message asks for some */
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

static void do_transfers(struct dskv_state *state)
{
    if (any_ready(state)) /* pieces are copied between steps */
        dskv_step_settle(state->step, state);
    for (struct dskv_task *task = state->tasks, *next; task && !state->failed; task = next) {
        next = task->next;
        if (task->kind->ready && task->kind->ready(task))
            task->kind->work(state, task);
    }
}

static void work(struct dskv_server *server)
{
    struct dskv_state *state = &server->state;
    int64_t begin_us = dskv_mailbox_now_us();
    if (!state->failed)
        dskv_step_run(&server->step, state);
    do_transfers(state);
    server->worked_us = dskv_mailbox_now_us() - begin_us;
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
    work(server);
    dskv_task_reap(state);
    end_sessions(state);
    is_busy =
        dskv_scheduler_active(&state->scheduler) || any_ready(state) || server->messages || server->step.n_submitted;
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
    dskv_step_settle(&server->step, &server->state);
    return NULL;
}

/* ---- the front thread's side ------------------------------------------------------------------------------------ */

static void open_state(struct dskv_server *server, struct dskv_engine *engine, const struct dskv_config *config)
{
    struct dskv_state *state = &server->state;
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    struct dskv_step_limits limits = {info->max_batch_tokens, info->max_sequences, info->max_logit_rows};
    state->engine = engine;
    state->step = &server->step;
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

/* What computes while it is submitted gains nothing from it. */
static int queues_ahead(const struct dskv_engine_info *info, const struct dskv_config *config)
{
    int is_auto = !config->queue_ahead || strcmp(config->queue_ahead, "auto") == 0;
    return is_auto ? info->runs_queued : strcmp(config->queue_ahead, "on") == 0;
}

enum dskv_exit dskv_server_open(struct dskv_engine *engine, const struct dskv_config *config,
                                struct dskv_server **server, struct dskv_error *error)
{
    struct dskv_server *s = dskv_calloc(1, sizeof *s);
    open_state(s, engine, config);
    enum dskv_exit code = dskv_step_open(&s->state.scheduler.limits, queues_ahead(s->state.info, config),
                                         config->trace_plans, &s->step, error);
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

enum dskv_code dskv_server_note(struct dskv_server *server, const struct dskv_request *request,
                                struct dskv_error *error)
{
    return dskv_mailbox_note(server->state.mailbox, request, error);
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
