/* The transport against clients that behave, that do not read, that vanish, and that send too much. */
#include "base/memory.h"
#include "ipc/transport.h"
#include "support/cunit_suite.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

static struct dskv_transport *open_server(const char *endpoint)
{
    struct dskv_transport *server = NULL;
    struct dskv_error error = {0};
    enum dskv_exit code = dskv_transport_open(&endpoint, 1, 0, &server, &error);
    if (code)
        printf("%s\n", error.message);
    CU_ASSERT_EQUAL_FATAL(code, DSKV_EXIT_OK);
    return server;
}

static struct dskv_link *open_link(const struct dskv_transport *server)
{
    struct dskv_link *link = NULL;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_link_open(dskv_transport_endpoint(server, 0), &link, &error), DSKV_OK);
    return link;
}

static struct dskv_frames make_frames(int32_t n, size_t bytes, uint8_t fill)
{
    struct dskv_frames frames = {dskv_calloc((size_t)n, sizeof *frames.frames), n};
    for (int32_t i = 0; i < n; i++) {
        frames.frames[i].bytes = bytes;
        frames.frames[i].data = dskv_calloc(bytes, 1);
        memset(frames.frames[i].data, fill + i, bytes);
    }
    return frames;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Serves until a message came. */
static int receive_within(struct dskv_transport *server, double limit_s, struct dskv_route *route,
                          struct dskv_frames *frames, struct dskv_error *error)
{
    double end = seconds() + limit_s;
    while (seconds() < end) {
        if (dskv_transport_receive(server, route, frames, error))
            return 1;
        dskv_transport_wait(server, -1, 50);
    }
    return 0;
}

static int lost_within(struct dskv_transport *server, double limit_s, struct dskv_route *route)
{
    double end = seconds() + limit_s;
    while (seconds() < end) {
        if (dskv_transport_lost(server, route))
            return 1;
        dskv_transport_wait(server, -1, 50);
    }
    return 0;
}

static void send_link(struct dskv_link *link, struct dskv_frames frames)
{
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_link_send(link, &frames, 5000, &error), DSKV_OK);
}

static void echoes(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct dskv_link *link = open_link(server);
    struct dskv_route route;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    const size_t sizes[] = {1, 0, 13, 100000, DSKV_PART_BYTES};
    for (int i = 0; i < 5; i++) {
        send_link(link, make_frames(3, sizes[i], 7));
        CU_ASSERT_FATAL(receive_within(server, 5, &route, &frames, &error));
        CU_ASSERT_EQUAL(error.code, DSKV_OK);
        CU_ASSERT_EQUAL(frames.n, 3);
        CU_ASSERT_EQUAL(dskv_transport_send(server, &route, &frames), DSKV_OK);
        CU_ASSERT_PTR_NULL(frames.frames);
        CU_ASSERT_EQUAL_FATAL(dskv_link_receive(link, &frames, 5000, &error), DSKV_OK);
        CU_ASSERT_EQUAL_FATAL(frames.n, 3);
        for (int f = 0; f < 3; f++) {
            CU_ASSERT_EQUAL(frames.frames[f].bytes, sizes[i]);
            for (size_t k = 0; k < sizes[i]; k += 4093)
                CU_ASSERT_EQUAL(((uint8_t *)frames.frames[f].data)[k], 7 + f);
        }
        dskv_frames_clear(&frames);
    }
    dskv_link_close(&link);
    dskv_transport_close(&server, 0);
    CU_ASSERT_PTR_NULL(server);
}

static void wakes_by_a_descriptor(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    int wake = eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC);
    double start = seconds();
    dskv_transport_wait(server, wake, 5000);
    CU_ASSERT(seconds() - start < 2);
    start = seconds();
    dskv_transport_wait(server, -1, 100);
    CU_ASSERT(seconds() - start >= 0.09);
    close(wake);
    dskv_transport_close(&server, 0);
}

/* A client that takes in four messages and no more until it is asked. */
struct slow_client {
    void *context, *socket;
};

static struct slow_client open_slow(const struct dskv_transport *server)
{
    struct slow_client client = {zmq_ctx_new(), NULL};
    client.socket = zmq_socket(client.context, ZMQ_DEALER);
    int rc = zmq_setsockopt(client.socket, ZMQ_RCVHWM, &(int){4}, sizeof(int)) |
             zmq_setsockopt(client.socket, ZMQ_LINGER, &(int){0}, sizeof(int)) |
             zmq_connect(client.socket, dskv_transport_endpoint(server, 0));
    CU_ASSERT_EQUAL_FATAL(rc, 0);
    CU_ASSERT_EQUAL_FATAL(zmq_send(client.socket, "x", 1, 0), 1);
    return client;
}

static void close_slow(struct slow_client *client)
{
    zmq_close(client->socket);
    zmq_ctx_term(client->context);
}

/* Far more than pipes and sockets hold, to a client that reads it all only later: in order, and none missing. */
static void queues_for_a_slow_client(void)
{
    enum { N = 150 };
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct slow_client client = open_slow(server);
    struct dskv_route route;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    uint8_t *bytes = dskv_calloc(DSKV_PART_BYTES, 1);
    CU_ASSERT_FATAL(receive_within(server, 5, &route, &frames, &error));
    dskv_frames_clear(&frames);
    for (int i = 0; i < N; i++) {
        frames = make_frames(1, DSKV_PART_BYTES, (uint8_t)i);
        CU_ASSERT_EQUAL(dskv_transport_send(server, &route, &frames), DSKV_OK);
    }
    CU_ASSERT(dskv_transport_backlog(server, &route) > (50u << 20));
    CU_ASSERT_EQUAL(dskv_transport_backlog(server, &route), dskv_transport_backlog_all(server));
    double start = seconds();
    for (int i = 0; i < N; i++) {
        int n;
        while ((n = zmq_recv(client.socket, bytes, DSKV_PART_BYTES, ZMQ_DONTWAIT)) < 0 && seconds() - start < 30)
            dskv_transport_wait(server, -1, 5);
        CU_ASSERT_EQUAL_FATAL(n, DSKV_PART_BYTES);
        CU_ASSERT_EQUAL_FATAL(bytes[77], (uint8_t)i);
    }
    CU_ASSERT_EQUAL(dskv_transport_backlog_all(server), 0);
    free(bytes);
    close_slow(&client);
    dskv_transport_close(&server, 0);
}

/* A client that never reads costs its limit and is then dropped; another one is served all the while. */
static void drops_a_client_that_never_reads(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct slow_client deaf = open_slow(server);
    struct dskv_route route, other_route, lost;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    CU_ASSERT_FATAL(receive_within(server, 5, &route, &frames, &error));
    dskv_frames_clear(&frames);
    struct dskv_link *other = open_link(server);
    int n_sent = 0;
    enum dskv_code code = DSKV_OK;
    size_t most = 0;
    while (!code && n_sent < 2000) {
        frames = make_frames(1, DSKV_PART_BYTES, 1);
        code = dskv_transport_send(server, &route, &frames);
        size_t backlog = dskv_transport_backlog(server, &route);
        most = backlog > most ? backlog : most;
        if (n_sent++ == 100) {
            send_link(other, make_frames(1, 5, 3));
            CU_ASSERT_FATAL(receive_within(server, 5, &other_route, &frames, &error));
            CU_ASSERT_EQUAL(dskv_transport_send(server, &other_route, &frames), DSKV_OK);
            CU_ASSERT_EQUAL(dskv_link_receive(other, &frames, 5000, &error), DSKV_OK);
            dskv_frames_clear(&frames);
        }
    }
    CU_ASSERT_EQUAL(code, DSKV_UNREACHABLE);
    CU_ASSERT(most <= DSKV_MAX_CLIENT_BACKLOG_BYTES);
    CU_ASSERT(n_sent < DSKV_MAX_CLIENT_BACKLOG_BYTES / DSKV_PART_BYTES + 100);
    CU_ASSERT_EQUAL(dskv_transport_backlog_all(server), 0);
    CU_ASSERT_FATAL(dskv_transport_lost(server, &lost));
    CU_ASSERT(lost.n == route.n && memcmp(lost.bytes, route.bytes, route.n) == 0);
    CU_ASSERT_FALSE(dskv_transport_lost(server, &lost));
    frames = make_frames(1, 1, 1);
    CU_ASSERT_EQUAL(dskv_transport_send(server, &route, &frames), DSKV_UNREACHABLE);
    /* It goes on with its next request. */
    CU_ASSERT_EQUAL(zmq_send(deaf.socket, "x", 1, 0), 1);
    CU_ASSERT_FATAL(receive_within(server, 5, &route, &frames, &error));
    CU_ASSERT_EQUAL(dskv_transport_send(server, &route, &frames), DSKV_OK);
    close_slow(&deaf);
    dskv_link_close(&other);
    dskv_transport_close(&server, 0);
}

static void reports_a_client_that_left(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct dskv_link *links[3] = {open_link(server), open_link(server), open_link(server)};
    struct dskv_route routes[3], lost;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    for (int i = 0; i < 3; i++) {
        send_link(links[i], make_frames(1, 1, 0));
        CU_ASSERT_FATAL(receive_within(server, 5, &routes[i], &frames, &error));
        dskv_frames_clear(&frames);
    }
    dskv_link_close(&links[1]);
    CU_ASSERT_FATAL(lost_within(server, 5, &lost));
    CU_ASSERT(lost.n == routes[1].n && memcmp(lost.bytes, routes[1].bytes, lost.n) == 0);
    dskv_transport_wait(server, -1, 50);
    CU_ASSERT_FALSE(dskv_transport_lost(server, &lost));
    frames = make_frames(1, 1, 0);
    CU_ASSERT_EQUAL(dskv_transport_send(server, &routes[1], &frames), DSKV_UNREACHABLE);
    /* The next client may get the same descriptor; it is another one, and stays. */
    links[1] = open_link(server);
    send_link(links[1], make_frames(1, 1, 0));
    CU_ASSERT_FATAL(receive_within(server, 5, &routes[1], &frames, &error));
    CU_ASSERT_EQUAL(dskv_transport_send(server, &routes[1], &frames), DSKV_OK);
    CU_ASSERT_EQUAL(dskv_link_receive(links[1], &frames, 5000, &error), DSKV_OK);
    dskv_frames_clear(&frames);
    CU_ASSERT_FALSE(dskv_transport_lost(server, &lost));
    for (int i = 0; i < 3; i++)
        dskv_link_close(&links[i]);
    dskv_transport_close(&server, 0);
}

/* It sends and leaves before anybody looks: its message comes, and right after it that it is lost. */
static void reports_a_client_that_left_at_once(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct dskv_route route, lost;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    for (int i = 0; i < 3; i++) {
        struct slow_client client = open_slow(server);
        zmq_setsockopt(client.socket, ZMQ_LINGER, &(int){2000}, sizeof(int));
        close_slow(&client);
        usleep(50000);
        CU_ASSERT_FATAL(receive_within(server, 5, &route, &frames, &error));
        dskv_frames_clear(&frames);
        CU_ASSERT_FATAL(lost_within(server, 5, &lost));
        CU_ASSERT(lost.n == route.n && memcmp(lost.bytes, route.bytes, lost.n) == 0);
        CU_ASSERT_FALSE(dskv_transport_lost(server, &lost));
    }
    dskv_transport_close(&server, 0);
}

static void tells_a_client_that_the_server_left(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct dskv_link *link = open_link(server);
    char *endpoint = dskv_strdup(dskv_transport_endpoint(server, 0));
    struct dskv_route route;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    send_link(link, make_frames(1, 1, 0));
    CU_ASSERT_FATAL(receive_within(server, 5, &route, &frames, &error));
    CU_ASSERT_EQUAL(dskv_transport_send(server, &route, &frames), DSKV_OK);
    dskv_transport_close(&server, 1000);
    CU_ASSERT_EQUAL(dskv_link_receive(link, &frames, 5000, &error), DSKV_OK); /* it came before the end */
    dskv_frames_clear(&frames);
    double start = seconds();
    CU_ASSERT_EQUAL(dskv_link_receive(link, &frames, 5000, &error), DSKV_UNREACHABLE);
    CU_ASSERT(seconds() - start < 2);
    CU_ASSERT(strstr(error.message, endpoint) != NULL);
    frames = make_frames(1, 1, 0);
    CU_ASSERT_EQUAL(dskv_link_send(link, &frames, 200, &error), DSKV_UNREACHABLE);
    CU_ASSERT_PTR_NULL(frames.frames);
    server = open_server(endpoint);
    send_link(link, make_frames(1, 1, 0)); /* the same link, to the new server */
    CU_ASSERT(receive_within(server, 5, &route, &frames, &error));
    dskv_frames_clear(&frames);
    dskv_link_close(&link);
    dskv_transport_close(&server, 0);
    free(endpoint);
}

static void a_silent_server_times_out(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct dskv_link *link = open_link(server);
    struct dskv_frames frames;
    struct dskv_error error = {0};
    send_link(link, make_frames(1, 1, 0));
    double start = seconds();
    CU_ASSERT_EQUAL(dskv_link_receive(link, &frames, 200, &error), DSKV_TIMEOUT);
    CU_ASSERT(seconds() - start >= 0.19 && seconds() - start < 3);
    dskv_link_close(&link);
    dskv_transport_close(&server, 0);
}

static void drains_what_is_over_the_limits(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct dskv_link *link = open_link(server);
    struct dskv_route route;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    size_t before = dskv_resident_bytes();
    send_link(link, make_frames(200000, 0, 0)); /* empty frames without end */
    send_link(link, make_frames(5, DSKV_MAX_FRAME_BYTES, 0));
    send_link(link, make_frames(2, 3, 9));
    for (int i = 0; i < 2; i++) {
        CU_ASSERT_FATAL(receive_within(server, 20, &route, &frames, &error));
        CU_ASSERT_EQUAL(frames.n, 0);
        CU_ASSERT_EQUAL(error.code, DSKV_BAD_MESSAGE);
        CU_ASSERT_EQUAL(error.limit, i ? DSKV_MAX_REQUEST_BYTES : DSKV_MAX_FRAMES);
        CU_ASSERT_EQUAL(error.length, i ? 5 * DSKV_MAX_FRAME_BYTES : 0);
    }
    CU_ASSERT_FATAL(receive_within(server, 5, &route, &frames, &error));
    CU_ASSERT(frames.n == 2 && frames.frames[1].bytes == 3 && error.code == DSKV_OK);
    dskv_frames_clear(&frames);
    CU_ASSERT(dskv_resident_bytes() < before + (100u << 20));
    dskv_link_close(&link);
    dskv_transport_close(&server, 0);
}

static void a_frame_over_the_limit_ends_the_connection(void)
{
    struct dskv_transport *server = open_server("tcp://127.0.0.1:*");
    struct dskv_link *link = open_link(server);
    struct dskv_frames frames;
    struct dskv_error error = {0};
    send_link(link, make_frames(1, DSKV_MAX_FRAME_BYTES + 1, 0));
    CU_ASSERT_EQUAL(dskv_link_receive(link, &frames, 5000, &error), DSKV_UNREACHABLE);
    dskv_link_close(&link);
    dskv_transport_close(&server, 0);
}

static void a_killed_client_is_found(void)
{
    int ready[2];
    struct dskv_route route, lost;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    char directory[] = "/tmp/dskv-transport-XXXXXX";
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(directory));
    CU_ASSERT_EQUAL_FATAL(pipe(ready), 0);
    char *endpoint = dskv_format("ipc://%s/socket", directory);
    pid_t child = fork(); /* before this process has threads of ZeroMQ's that matter to it */
    if (child == 0) {
        struct dskv_link *link = NULL;
        close(ready[1]);
        if (read(ready[0], &(char){0}, 1) != 0 || dskv_link_open(endpoint, &link, &error))
            _exit(1);
        frames = make_frames(1, 1, 0);
        if (dskv_link_send(link, &frames, 5000, &error))
            _exit(1);
        pause();
    }
    close(ready[0]);
    struct dskv_transport *server = open_server(endpoint);
    close(ready[1]);
    CU_ASSERT_FATAL(receive_within(server, 10, &route, &frames, &error));
    dskv_frames_clear(&frames);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CU_ASSERT(lost_within(server, 3, &lost));
    dskv_transport_close(&server, 0);
    rmdir(directory);
    free(endpoint);
}

/* More clients than a process may have descriptors to begin with; they only connect. */
static void takes_many_clients(void)
{
    enum { CLIENTS = 200, DESCRIPTORS = 100 };
    struct rlimit limit;
    CU_ASSERT_EQUAL_FATAL(getrlimit(RLIMIT_NOFILE, &limit), 0);
    CU_ASSERT_FATAL(limit.rlim_max > 3 * CLIENTS);
    limit.rlim_cur = DESCRIPTORS;
    CU_ASSERT_EQUAL_FATAL(setrlimit(RLIMIT_NOFILE, &limit), 0);
    char directory[] = "/tmp/dskv-transport-XXXXXX";
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(directory));
    char *endpoint = dskv_format("ipc://%s/socket", directory);
    struct dskv_transport *server = open_server(endpoint);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", endpoint + strlen("ipc://"));
    int fds[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = socket(AF_UNIX, SOCK_STREAM, 0);
        CU_ASSERT_EQUAL(connect(fds[i], (struct sockaddr *)&address, sizeof address), 0);
    }
    struct dskv_link *link = open_link(server);
    struct dskv_route route;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    send_link(link, make_frames(1, 1, 0));
    CU_ASSERT(receive_within(server, 5, &route, &frames, &error));
    dskv_frames_clear(&frames);
    for (int i = 0; i < CLIENTS; i++)
        close(fds[i]);
    dskv_link_close(&link);
    dskv_transport_close(&server, 0);
    rmdir(directory);
    free(endpoint);
}

int main(void)
{
    return dskv_run_tests(
        "ipc.transport", (struct dskv_test[]){
                             {"a killed client is found", a_killed_client_is_found},
                             {"echoes", echoes},
                             {"wakes by a descriptor", wakes_by_a_descriptor},
                             {"queues for a slow client", queues_for_a_slow_client},
                             {"drops a client that never reads", drops_a_client_that_never_reads},
                             {"reports a client that left", reports_a_client_that_left},
                             {"reports a client that left at once", reports_a_client_that_left_at_once},
                             {"tells a client that the server left", tells_a_client_that_the_server_left},
                             {"a silent server times out", a_silent_server_times_out},
                             {"drains what is over the limits", drains_what_is_over_the_limits},
                             {"a frame over the limit ends the connection", a_frame_over_the_limit_ends_the_connection},
                             {"takes many clients", takes_many_clients},
                             {NULL, NULL},
                         });
}
