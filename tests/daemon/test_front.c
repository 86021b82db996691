/* The front's loop against a transport, a codec, a server and an engine that are played here: what it answers itself,
 * what it refuses, what it passes on, and how it ends.  A message is one frame that holds a struct dskv_request or
 * dskv_event. */
#include "daemon/front.h"
#include "daemon/signals.h"
#include "support/cunit_suite.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define MOST 4096

struct message {
    struct dskv_route route;
    struct dskv_request request;
};

static struct play {
    void (*on_wait)(int round); /* what happens outside while the front waits */
    int round;
    struct message incoming[MOST];
    int n_incoming, n_received;
    struct dskv_event sent[MOST];
    uint8_t sent_to[MOST];
    int n_sent;
    struct message submitted[MOST];
    int n_submitted;
    int n_cleared, n_noted, n_cancelled, n_lost, n_route_lost;
    int n_events; /* that the server has ready, for route 9 */
    int is_idle, is_draining, is_stopped;
    size_t backlog;
    enum dskv_code submit_code, note_code;
    enum dskv_exit failure, engine_failure;
} play;
static int event_fd;

/* ---- the played parts ------------------------------------------------------------------------------------------- */

void dskv_transport_wait(struct dskv_transport *transport, int wake_fd, int timeout_ms)
{
    (void)transport;
    (void)wake_fd;
    (void)timeout_ms;
    play.on_wait(++play.round);
}

const char *dskv_transport_endpoint(const struct dskv_transport *transport, int i)
{
    (void)transport;
    return i ? "ipc://b" : "ipc://a";
}

int dskv_transport_receive(struct dskv_transport *transport, struct dskv_route *route, struct dskv_frames *frames,
                           struct dskv_error *error)
{
    (void)transport;
    if (play.n_received == play.n_incoming)
        return 0;
    struct message *message = &play.incoming[play.n_received++];
    *route = message->route;
    *frames = (struct dskv_frames){0};
    if (message->request.op == DSKV_N_OPS) { /* larger than any message may be */
        dskv_fail(error, DSKV_BAD_MESSAGE, "too large");
        return 1;
    }
    frames->frames = malloc(sizeof *frames->frames);
    frames->frames[0] = (struct dskv_frame){malloc(sizeof message->request), sizeof message->request};
    memcpy(frames->frames[0].data, &message->request, sizeof message->request);
    frames->n = 1;
    return 1;
}

void dskv_frames_clear(struct dskv_frames *frames)
{
    for (int i = 0; i < frames->n; i++)
        free(frames->frames[i].data);
    free(frames->frames);
    *frames = (struct dskv_frames){0};
}

enum dskv_code dskv_transport_send(struct dskv_transport *transport, const struct dskv_route *route,
                                   struct dskv_frames *frames)
{
    (void)transport;
    play.sent_to[play.n_sent] = route->bytes[0];
    memcpy(&play.sent[play.n_sent++], frames->frames[0].data, sizeof *play.sent);
    dskv_frames_clear(frames);
    return DSKV_OK;
}

int dskv_transport_lost(struct dskv_transport *transport, struct dskv_route *route)
{
    (void)transport;
    (void)route;
    return play.n_lost > 0 ? play.n_lost-- : 0;
}

size_t dskv_transport_backlog_all(const struct dskv_transport *transport)
{
    (void)transport;
    return play.backlog;
}

enum dskv_code dskv_request_decode(struct dskv_frames *frames, struct dskv_request *request, struct dskv_error *error)
{
    memcpy(request, frames->frames[0].data, sizeof *request);
    dskv_frames_clear(frames);
    return request->version == 1 ? DSKV_OK : dskv_fail(error, DSKV_UNKNOWN_FIELD, "played");
}

void dskv_request_clear(struct dskv_request *request)
{
    (void)request;
    play.n_cleared++;
}

static void put_event(struct dskv_frames *frames, const struct dskv_event *event)
{
    frames->frames = malloc(sizeof *frames->frames);
    frames->frames[0] = (struct dskv_frame){malloc(sizeof *event), sizeof *event};
    memcpy(frames->frames[0].data, event, sizeof *event);
    frames->n = 1;
}

enum dskv_code dskv_event_encode(const struct dskv_event *event, struct dskv_frames *frames, struct dskv_error *error)
{
    (void)error;
    put_event(frames, event);
    return DSKV_OK;
}

const char *dskv_op_name(enum dskv_op op)
{
    (void)op;
    return "played";
}

enum dskv_code dskv_server_submit(struct dskv_server *server, const struct dskv_route *route,
                                  struct dskv_request *request, struct dskv_error *error)
{
    (void)server;
    if (play.submit_code)
        return dskv_fail(error, play.submit_code, "played");
    play.submitted[play.n_submitted++] = (struct message){*route, *request};
    return DSKV_OK;
}

enum dskv_code dskv_server_note(struct dskv_server *server, const struct dskv_request *request,
                                struct dskv_error *error)
{
    (void)server;
    (void)request;
    play.n_noted++;
    return play.note_code ? dskv_fail(error, play.note_code, "played") : DSKV_OK;
}

int dskv_server_cancel(struct dskv_server *server, const struct dskv_route *route, uint64_t id)
{
    (void)server;
    (void)route;
    play.n_cancelled++;
    return id == 7;
}

void dskv_server_route_lost(struct dskv_server *server, const struct dskv_route *route)
{
    (void)server;
    (void)route;
    play.n_route_lost++;
}

int dskv_server_event_fd(const struct dskv_server *server)
{
    (void)server;
    return event_fd;
}

int dskv_server_next_event(struct dskv_server *server, struct dskv_route *route, struct dskv_frames *frames)
{
    struct dskv_event event = {.id = 99, .last = 1};
    (void)server;
    if (play.n_events == 0)
        return 0;
    play.n_events--;
    *route = (struct dskv_route){1, {9}};
    put_event(frames, &event);
    return 1;
}

void dskv_server_stats(struct dskv_server *server, struct dskv_stats_result *stats)
{
    (void)server;
    stats->requests = 42;
    stats->ranks[stats->n_ranks - 1].steps = 43;
}

void dskv_server_drain(struct dskv_server *server)
{
    (void)server;
    play.is_draining = 1;
}

void dskv_server_stop(struct dskv_server *server)
{
    (void)server;
    play.is_stopped = 1;
}

int dskv_server_idle(struct dskv_server *server)
{
    (void)server;
    return play.is_idle;
}

enum dskv_exit dskv_server_failed(struct dskv_server *server, struct dskv_error *error)
{
    (void)server;
    return play.failure ? dskv_fail_exit(error, play.failure, "played failure") : DSKV_EXIT_OK;
}

const struct dskv_engine_info *dskv_engine_info(const struct dskv_engine *engine)
{
    static const struct dskv_engine_info info = {.n_ranks = 3, .max_batch_tokens = 5, .model = {.family = "gpt2"}};
    (void)engine;
    return &info;
}

enum dskv_exit dskv_engine_check(const struct dskv_engine *engine, struct dskv_error *error)
{
    (void)engine;
    return play.engine_failure ? dskv_fail_exit(error, play.engine_failure, "played loss") : DSKV_EXIT_OK;
}

/* ---- the tests -------------------------------------------------------------------------------------------------- */

static void arrive(uint8_t from, enum dskv_op op, uint64_t id, int is_good)
{
    play.incoming[play.n_incoming++] =
        (struct message){{1, {from}}, {.version = is_good, .id = id, .op = op, .cancel.request = 7}};
}

static enum dskv_exit perform(void (*on_wait)(int round), struct dskv_error *error)
{
    static const struct dskv_config config = {.model = "/models/played", .n_listen = 2};
    play.on_wait = on_wait;
    return dskv_front_run(NULL, NULL, NULL, &config, error);
}

static void begin(void)
{
    memset(&play, 0, sizeof play);
}

/* The scene that most tests use: the messages that are there are handled in the first round, the second ends it. */
static void fail_in_second_round(int round)
{
    if (round == 2)
        play.failure = DSKV_EXIT_DEVICE;
}

static void test_own_answers(void)
{
    struct dskv_error error = {0};
    begin();
    arrive(1, DSKV_OP_PING, 10, 1);
    arrive(2, DSKV_OP_INFO, 11, 1);
    arrive(1, DSKV_OP_STATS, 12, 1);
    arrive(1, DSKV_OP_CANCEL, 13, 1);
    CU_ASSERT_EQUAL(perform(fail_in_second_round, &error), DSKV_EXIT_DEVICE);
    CU_ASSERT_STRING_EQUAL(error.message, "played failure");
    CU_ASSERT_EQUAL_FATAL(play.n_sent, 4);
    for (int i = 0; i < 4; i++) {
        CU_ASSERT_EQUAL(play.sent[i].id, (uint64_t)(10 + i));
        CU_ASSERT_EQUAL(play.sent[i].kind, DSKV_EVENT_RESULT);
        CU_ASSERT_EQUAL(play.sent[i].last, 1);
        CU_ASSERT_EQUAL(play.sent_to[i], i == 1 ? 2 : 1);
    }
    CU_ASSERT_EQUAL(play.sent[1].info.n_ranks, 3);
    CU_ASSERT_EQUAL(play.sent[1].info.limits.max_batch_tokens, 5);
    CU_ASSERT_STRING_EQUAL(play.sent[1].info.model_dir, "/models/played");
    CU_ASSERT_EQUAL(play.sent[2].stats.requests, 42);
    CU_ASSERT_EQUAL(play.sent[3].cancel.cancelled, 1);
    CU_ASSERT_EQUAL(play.n_noted, 4);
    CU_ASSERT_EQUAL(play.n_cleared, 4);
    CU_ASSERT_EQUAL(play.n_submitted, 0);
}

static void test_rest_is_submitted(void)
{
    begin();
    arrive(1, DSKV_OP_FORWARD, 20, 1);
    arrive(2, DSKV_OP_HELLO, 21, 1);
    perform(fail_in_second_round, NULL);
    CU_ASSERT_EQUAL_FATAL(play.n_submitted, 2);
    CU_ASSERT_EQUAL(play.submitted[1].request.id, 21);
    CU_ASSERT_EQUAL(play.submitted[1].route.bytes[0], 2);
    CU_ASSERT_EQUAL(play.n_sent, 0);
    CU_ASSERT_EQUAL(play.n_cleared, 0); /* they are the server's now */
}

static void test_errors_are_answered(void)
{
    begin();
    arrive(1, DSKV_OP_FORWARD, 30, 0);
    arrive(2, DSKV_N_OPS, 31, 1);
    perform(fail_in_second_round, NULL);
    CU_ASSERT_EQUAL_FATAL(play.n_sent, 2);
    CU_ASSERT_EQUAL(play.sent[0].id, 30);
    CU_ASSERT_EQUAL(play.sent[0].kind, DSKV_EVENT_ERROR);
    CU_ASSERT_EQUAL(play.sent[0].error.code, DSKV_UNKNOWN_FIELD);
    CU_ASSERT_EQUAL(play.sent[1].id, 0);
    CU_ASSERT_EQUAL(play.sent[1].op, DSKV_N_OPS);
    CU_ASSERT_EQUAL(play.sent[1].error.code, DSKV_BAD_MESSAGE);
    CU_ASSERT_EQUAL(play.n_cleared, 0); /* a request that was not decoded owns nothing */
}

static void test_refusals_are_answered(void)
{
    begin();
    play.submit_code = DSKV_BUSY;
    arrive(1, DSKV_OP_GENERATE, 40, 1);
    perform(fail_in_second_round, NULL);
    CU_ASSERT_EQUAL_FATAL(play.n_sent, 1);
    CU_ASSERT_EQUAL(play.sent[0].error.code, DSKV_BUSY);
    CU_ASSERT_EQUAL(play.n_cleared, 1);
    begin();
    play.note_code = DSKV_BUSY; /* what a ping carries is not dropped in silence */
    arrive(1, DSKV_OP_PING, 41, 1);
    arrive(1, DSKV_OP_CANCEL, 42, 1);
    perform(fail_in_second_round, NULL);
    CU_ASSERT_EQUAL_FATAL(play.n_sent, 2);
    CU_ASSERT_EQUAL(play.sent[0].error.code, DSKV_BUSY);
    CU_ASSERT_EQUAL(play.sent[1].error.code, DSKV_BUSY);
    CU_ASSERT_EQUAL(play.n_cancelled, 0);
    CU_ASSERT_EQUAL(play.n_cleared, 2);
}

static void one_event_in_each_round(int round)
{
    play.n_events = 1;
    if (round == 4)
        play.failure = DSKV_EXIT_DEVICE;
}

static void test_flood_delays_no_event(void)
{
    begin();
    for (int i = 0; i < 1000; i++)
        arrive(1, DSKV_OP_PING, 1, 1);
    perform(one_event_in_each_round, NULL);
    int at = 0, n_events = 0, furthest = 0;
    for (int i = 0; i < play.n_sent; i++)
        if (play.sent_to[i] == 9) {
            n_events++;
            furthest = i - at > furthest ? i - at : furthest;
            at = i;
        }
    CU_ASSERT_EQUAL(n_events, 4);
    CU_ASSERT(furthest <= 100);
}

static void test_lost_routes_are_told(void)
{
    begin();
    play.n_lost = 3;
    perform(fail_in_second_round, NULL);
    CU_ASSERT_EQUAL(play.n_route_lost, 3);
}

static void lose_a_rank(int round)
{
    (void)round;
    play.engine_failure = DSKV_EXIT_RANK_LOST;
}

static void test_lost_rank_ends_it(void)
{
    struct dskv_error error = {0};
    begin();
    play.n_events = 2;
    CU_ASSERT_EQUAL(perform(lose_a_rank, &error), DSKV_EXIT_RANK_LOST);
    CU_ASSERT_STRING_EQUAL(error.message, "played loss");
    CU_ASSERT_EQUAL(play.n_sent, 2);
}

/* The last two: wishes stay, so these are in the order of their strength. */
static void drain(int round)
{
    if (round == 1)
        raise(SIGUSR1);
    if (round == 3) { /* the last request ends, its reply takes a while to leave */
        play.is_idle = 1;
        play.n_events = 1;
        play.backlog = 100;
    }
    if (round == 5)
        play.backlog = 0;
}

static void test_drain(void)
{
    begin();
    CU_ASSERT_EQUAL(perform(drain, NULL), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(play.is_draining, 1);
    CU_ASSERT_EQUAL(play.is_stopped, 0);
    CU_ASSERT_EQUAL(play.round, 5);
    CU_ASSERT_EQUAL(play.n_sent, 1);
}

static void end_while_busy(int round)
{
    if (round == 1)
        raise(SIGTERM);
    usleep(5000);
}

static void test_end_has_a_limit(void)
{
    struct timespec then, now;
    begin();
    clock_gettime(CLOCK_MONOTONIC, &then);
    CU_ASSERT_EQUAL(perform(end_while_busy, NULL), DSKV_EXIT_OK);
    clock_gettime(CLOCK_MONOTONIC, &now);
    alarm(0);
    CU_ASSERT_EQUAL(play.is_stopped, 1);
    CU_ASSERT(now.tv_sec - then.tv_sec <= 2);
}

int main(void)
{
    static const struct dskv_test tests[] = {
        {"own answers", test_own_answers},
        {"the rest is submitted", test_rest_is_submitted},
        {"errors are answered", test_errors_are_answered},
        {"refusals are answered", test_refusals_are_answered},
        {"flood delays no event", test_flood_delays_no_event},
        {"lost routes are told", test_lost_routes_are_told},
        {"lost rank ends it", test_lost_rank_ends_it},
        {"drain", test_drain},
        {"end has a limit", test_end_has_a_limit},
        {0},
    };
    event_fd = eventfd(0, EFD_CLOEXEC);
    dskv_log_open(DSKV_LOG_WARNING, 0);
    dskv_signals_open(0);
    return dskv_run_tests("daemon.front", tests);
}
