/* Front: one loop over the transport, the server's events and the signals, and the few answers that need no step.
 *
 * The order inside a round matters.  Events go first, so that replies leave before more work comes in; both events and
 * messages are bounded, so that neither a flood of requests nor a long reply delays anybody's ping.  What may wait in
 * memory is bounded elsewhere: requests and their replies by the server, unread bytes by the transport.  All replies of
 * a request go through one queue of the server or come from here, never both: a request has exactly one last event.
 */
#include "daemon/front.h"

#include "base/memory.h"
#include "daemon/describe.h"
#include "daemon/signals.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define MESSAGES_PER_ROUND 64
#define EVENTS_PER_ROUND 256
#define DRAIN_MS 30000 /* for what was accepted before SIGUSR1 */
#define END_MS 800     /* for the last replies after SIGTERM; about 1 s after it mpirun kills what is left */
#define ENDING_POLL_MS 20
#define CHECK_MS 1000 /* how often it is looked whether all ranks live, when nothing else happens */

enum phase { SERVING, DRAINING, ENDING };

struct front {
    struct dskv_transport *transport;
    struct dskv_server *server;
    const struct dskv_engine *engine;
    const struct dskv_engine_info *opened;
    struct dskv_info_result info;
    struct dskv_rank_counters *ranks; /* [n_ranks] */
    int wake_fd;                      /* an epoll of the server's events and the signals: the transport waits for one */
    enum phase phase;
    int64_t check_ms; /* when to look for lost ranks next */
    int64_t end_ms;   /* when DRAINING and ENDING give up */
};

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- replies ---------------------------------------------------------------------------------------------------- */

/* A client that has gone is no error of ours: its route is then reported as lost. */
static void reply(struct front *front, const struct dskv_route *route, const struct dskv_event *event)
{
    struct dskv_frames frames = {0};
    struct dskv_error error;
    enum dskv_code code = dskv_event_encode(event, &frames, &error);
    DSKV_ASSERT(!code, "an answer to %s cannot be encoded: %s", dskv_op_name(event->op), error.message);
    dskv_transport_send(front->transport, route, &frames);
}

static void reply_error(struct front *front, const struct dskv_route *route, const struct dskv_request *request,
                        const struct dskv_error *error)
{
    struct dskv_event event = {
        .id = request->id, .kind = DSKV_EVENT_ERROR, .last = 1, .op = request->op, .error = *error};
    reply(front, route, &event);
}

static void fill_stats(struct front *front, struct dskv_stats_result *stats)
{
    *stats = (struct dskv_stats_result){.n_ranks = front->opened->n_ranks, .ranks = front->ranks};
    dskv_server_stats(front->server, stats);
    stats->backlog_bytes = (int64_t)dskv_transport_backlog_all(front->transport);
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static int is_answered_here(enum dskv_op op)
{
    return op == DSKV_OP_PING || op == DSKV_OP_INFO || op == DSKV_OP_STATS || op == DSKV_OP_CANCEL;
}

static void answer(struct front *front, const struct dskv_route *route, const struct dskv_request *request)
{
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_RESULT, .last = 1, .op = request->op};
    struct dskv_error error;
    if (dskv_server_note(front->server, request, &error)) {
        reply_error(front, route, request, &error);
        return;
    }
    if (request->op == DSKV_OP_INFO)
        event.info = front->info;
    else if (request->op == DSKV_OP_STATS)
        fill_stats(front, &event.stats);
    else if (request->op == DSKV_OP_CANCEL)
        event.cancel.cancelled = dskv_server_cancel(front->server, route, request->cancel.request);
    reply(front, route, &event);
}

static void handle(struct front *front, const struct dskv_route *route, struct dskv_frames *frames)
{
    struct dskv_request request = {0};
    struct dskv_error error;
    if (dskv_request_decode(frames, &request, &error)) {
        reply_error(front, route, &request, &error);
        return;
    }
    if (is_answered_here(request.op)) {
        answer(front, route, &request);
        dskv_request_clear(&request);
        return;
    }
    if (dskv_server_submit(front->server, route, &request, &error)) {
        reply_error(front, route, &request, &error);
        dskv_request_clear(&request);
    }
}

static void take_messages(struct front *front)
{
    struct dskv_route route;
    struct dskv_frames frames;
    struct dskv_error error;
    for (int i = 0; i < MESSAGES_PER_ROUND && dskv_transport_receive(front->transport, &route, &frames, &error); i++) {
        static const struct dskv_request unreadable = {.op = DSKV_N_OPS};
        if (frames.n == 0)
            reply_error(front, &route, &unreadable, &error);
        else
            handle(front, &route, &frames);
    }
    while (dskv_transport_lost(front->transport, &route)) {
        dskv_server_route_lost(front->server, &route);
        dskv_memory_trim(); /* a client that did not read may have left much */
    }
}

static void send_events(struct front *front, int most)
{
    struct dskv_route route;
    struct dskv_frames frames;
    for (int i = 0; i < most && dskv_server_next_event(front->server, &route, &frames); i++)
        dskv_transport_send(front->transport, &route, &frames);
}

/* ---- the end ---------------------------------------------------------------------------------------------------- */

static void follow_signals(struct front *front)
{
    enum dskv_wish wish = dskv_signals_wish();
    if (wish == DSKV_DRAIN && front->phase == SERVING) {
        dskv_log(DSKV_LOG_INFO, "front", "draining: no new work, at most %d s", DRAIN_MS / 1000);
        dskv_server_drain(front->server);
        front->phase = DRAINING;
        front->end_ms = now_ms() + DRAIN_MS;
    }
    int is_late = front->phase == DRAINING && now_ms() >= front->end_ms;
    if ((wish == DSKV_END || is_late) && front->phase != ENDING) {
        dskv_log(DSKV_LOG_INFO, "front", is_late ? "ending: the time to drain is over" : "ending on a signal");
        dskv_server_stop(front->server);
        front->phase = ENDING;
        front->end_ms = now_ms() + END_MS;
    }
}

/* True when every reply has left, or when there is no more time for it. */
static int is_over(struct front *front)
{
    if (front->phase == SERVING)
        return 0;
    if (front->phase == ENDING && now_ms() >= front->end_ms)
        return 1;
    if (!dskv_server_idle(front->server))
        return 0;
    send_events(front, INT_MAX); /* those of the request that was the last to end */
    return dskv_transport_backlog_all(front->transport) == 0;
}

/* ---- the loop --------------------------------------------------------------------------------------------------- */

static void watch(int epoll_fd, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    int status = epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    DSKV_ASSERT(status == 0, "epoll_ctl for %d: %s", fd, strerror(errno));
}

static void print_ready(const struct front *front, const struct dskv_config *config)
{
    char name[64];
    int n_ranks = front->opened->n_ranks;
    dskv_describe_model_name(config->model, name, sizeof name);
    printf("dskvd: ready on %s", dskv_transport_endpoint(front->transport, 0));
    for (int i = 1; i < config->n_listen; i++)
        printf(", %s", dskv_transport_endpoint(front->transport, i));
    printf(" (%s, %d %s)\n", name, n_ranks, n_ranks == 1 ? "rank" : "ranks");
    fflush(stdout);
}

/* A step that failed, or a rank that ended while there was no step.  mpirun answers a lost rank with SIGTERM to the
 * others: looking at both here tells it from an operator's. */
static enum dskv_exit find_failure(struct front *front, struct dskv_error *error)
{
    enum dskv_exit code = dskv_server_failed(front->server, error);
    int64_t now = now_ms();
    if (code || (front->phase == SERVING && now < front->check_ms))
        return code;
    front->check_ms = now + CHECK_MS;
    return dskv_engine_check(front->engine, error);
}

static void open_front(struct front *front, const struct dskv_config *config)
{
    dskv_describe_server(front->opened, config->model, &front->info);
    front->ranks = dskv_calloc((size_t)front->opened->n_ranks, sizeof *front->ranks);
    front->wake_fd = epoll_create1(EPOLL_CLOEXEC);
    DSKV_ASSERT(front->wake_fd >= 0, "epoll_create1: %s", strerror(errno));
    watch(front->wake_fd, dskv_server_event_fd(front->server));
    watch(front->wake_fd, dskv_signals_fd());
}

static void close_front(struct front *front)
{
    close(front->wake_fd);
    free(front->ranks);
}

enum dskv_exit dskv_front_run(struct dskv_transport *transport, struct dskv_server *server,
                              const struct dskv_engine *engine, const struct dskv_config *config,
                              struct dskv_error *error)
{
    struct front front = {
        .transport = transport, .server = server, .engine = engine, .opened = dskv_engine_info(engine)};
    enum dskv_exit code = DSKV_EXIT_OK;
    open_front(&front, config);
    dskv_signals_serve();
    print_ready(&front, config);
    while (!code && !is_over(&front)) {
        dskv_transport_wait(transport, front.wake_fd, front.phase == SERVING ? CHECK_MS : ENDING_POLL_MS);
        send_events(&front, EVENTS_PER_ROUND);
        take_messages(&front);
        follow_signals(&front);
        code = find_failure(&front, error);
    }
    send_events(&front, INT_MAX);
    close_front(&front);
    return code;
}
