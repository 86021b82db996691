/* The server's transport: a ROUTER socket and its monitor.  What waits for whom is ipc/clients.c's. */
#include "ipc/transport.h"

#include "base/memory.h"
#include "clients.h"
#include "endpoint.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <zmq.h>

/* Messages that ZeroMQ itself may hold for one client; what is beyond waits here, where bytes are counted. */
#define RECEIVE_MESSAGES 8
#define SEND_MESSAGES 16
/* Heartbeats find a client that froze or whose host is gone. */
#define HEARTBEAT_MS 2000
#define HEARTBEAT_TIMEOUT_MS 10000
#define HANDSHAKE_MS 5000
/* While replies wait, sending is tried again at least this often. */
#define RETRY_MS 20

struct dskv_transport {
    void *context, *socket, *monitor;
    int n_endpoints;
    struct dskv_endpoint *endpoints;
    char (*bound)[256]; /* [n_endpoints]: as ZeroMQ says them */
    struct dskv_clients *clients;
    uint8_t *is_open; /* [n_open]: by descriptor, whether a connection has it */
    size_t n_open;
};

/* ---- connections ------------------------------------------------------------------------------------------------ */

static void note_connection(struct dskv_transport *transport, size_t fd, int is_open)
{
    if (fd >= transport->n_open) {
        size_t n = 2 * fd + 64;
        transport->is_open = dskv_realloc(transport->is_open, n, 1);
        memset(transport->is_open + transport->n_open, 0, n - transport->n_open);
        transport->n_open = n;
    }
    transport->is_open[fd] = (uint8_t)is_open;
}

/* ZeroMQ tells of connections by their descriptors: of a new one before its first message, of a lost one before it
 * closes the descriptor.  So when this was read after a message came, the descriptor that the message names is open, or
 * its connection is gone. */
static void read_monitor(struct dskv_transport *transport)
{
    struct {
        uint16_t event;
        uint32_t fd;
    } __attribute__((packed)) change;
    int is_first = 1, more = 0;
    size_t more_bytes = sizeof more;
    char buffer[512];
    for (int n; (n = zmq_recv(transport->monitor, buffer, sizeof buffer, ZMQ_DONTWAIT)) >= 0; is_first = !more) {
        zmq_getsockopt(transport->monitor, ZMQ_RCVMORE, &more, &more_bytes);
        if (!is_first || (size_t)n != sizeof change)
            continue;
        memcpy(&change, buffer, sizeof change);
        note_connection(transport, change.fd, change.event == ZMQ_EVENT_ACCEPTED);
        if (change.event == ZMQ_EVENT_DISCONNECTED)
            dskv_clients_lose_connection(transport->clients, (int)change.fd);
    }
}

/* ---- sending ---------------------------------------------------------------------------------------------------- */

static void free_data(void *data, void *hint)
{
    (void)hint;
    free(data);
}

/* 0 when the frames are ZeroMQ's now (*frames is cleared), else errno: EAGAIN when the client's pipe is full. */
static int try_send(struct dskv_transport *transport, const struct dskv_route *route, struct dskv_frames *frames)
{
    if (zmq_send(transport->socket, route->bytes, route->n, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        return errno;
    for (int32_t i = 0; i < frames->n; i++) {
        zmq_msg_t message;
        struct dskv_frame *frame = &frames->frames[i];
        int rc = zmq_msg_init_data(&message, frame->data, frame->bytes, free_data, NULL);
        DSKV_ASSERT(rc == 0, "%s", zmq_strerror(errno));
        frame->data = NULL;
        /* The pipe takes a message whole once it took its route; if it is gone by now, the rest falls into nothing. */
        do
            rc = zmq_msg_send(&message, transport->socket, ZMQ_DONTWAIT | (i + 1 < frames->n ? ZMQ_SNDMORE : 0));
        while (rc < 0 && errno == EINTR);
        DSKV_ASSERT(rc >= 0, "frame %d of %d: %s", i, frames->n, zmq_strerror(errno));
    }
    dskv_frames_clear(frames);
    return 0;
}

/* Sends what waits for a client, as much as goes; it may be lost then. */
static void flush_peer(struct dskv_transport *transport, struct dskv_peer *peer)
{
    while (peer->first) {
        int reason = try_send(transport, &peer->route, &peer->first->frames);
        if (reason == EAGAIN || reason == EINTR)
            return;
        if (reason) {
            dskv_clients_lose(transport->clients, peer);
            return;
        }
        dskv_clients_drop_first(transport->clients, peer);
    }
}

static void flush_all(struct dskv_transport *transport)
{
    if (!dskv_clients_bytes(transport->clients))
        return;
    for (struct dskv_peer *next, *peer = dskv_clients_first(transport->clients); peer; peer = next) {
        next = dskv_clients_next(transport->clients, peer);
        flush_peer(transport, peer);
    }
}

enum dskv_code dskv_transport_send(struct dskv_transport *transport, const struct dskv_route *route,
                                   struct dskv_frames *frames)
{
    DSKV_ASSERT(frames->n > 0, "%d frames", frames->n);
    struct dskv_peer *peer = dskv_clients_find(transport->clients, route);
    if (peer) {
        int reason = peer->first ? EAGAIN : try_send(transport, route, frames); /* in order */
        if (reason == 0)
            return DSKV_OK;
        if (reason == EAGAIN || reason == EINTR)
            dskv_clients_queue(transport->clients, peer, frames);
        else
            dskv_clients_lose(transport->clients, peer);
    }
    dskv_frames_clear(frames);
    return dskv_clients_find(transport->clients, route) ? DSKV_OK : DSKV_UNREACHABLE;
}

/* ---- receiving -------------------------------------------------------------------------------------------------- */

/* A message being taken in: past a limit nothing is kept any more, but it is read to its end. */
struct intake {
    struct dskv_frames frames;
    int32_t n_frames, capacity;
    size_t bytes;
    int is_over;
};

static void take_frame(struct intake *intake, zmq_msg_t *message)
{
    size_t bytes = zmq_msg_size(message);
    intake->bytes += bytes;
    intake->n_frames += intake->n_frames <= DSKV_MAX_FRAMES;
    if (intake->bytes > DSKV_MAX_REQUEST_BYTES || intake->n_frames > DSKV_MAX_FRAMES)
        intake->is_over = 1;
    if (intake->is_over) {
        dskv_frames_clear(&intake->frames);
        return;
    }
    if (intake->n_frames > intake->capacity) {
        intake->capacity = intake->capacity ? 2 * intake->capacity : 4;
        intake->frames.frames =
            dskv_realloc(intake->frames.frames, (size_t)intake->capacity, sizeof *intake->frames.frames);
    }
    /* Copied, since a message may start at an odd address. */
    struct dskv_frame *frame = &intake->frames.frames[intake->frames.n++];
    frame->bytes = bytes;
    frame->data = dskv_realloc(NULL, bytes ? bytes : 1, 1);
    memcpy(frame->data, zmq_msg_data(message), bytes);
}

/* The next frame: 1, or 0 when there is none; *more says whether another one of the same message follows. */
static int receive_frame(struct dskv_transport *transport, zmq_msg_t *message, int *more)
{
    int rc;
    zmq_msg_init(message);
    do
        rc = zmq_msg_recv(message, transport->socket, ZMQ_DONTWAIT);
    while (rc < 0 && errno == EINTR);
    if (rc < 0) {
        zmq_msg_close(message);
        return 0;
    }
    *more = zmq_msg_more(message);
    return 1;
}

static void report_over(const struct intake *intake, struct dskv_error *error)
{
    if (intake->bytes <= DSKV_MAX_REQUEST_BYTES) { /* they were not counted to their end */
        dskv_fail(error, DSKV_BAD_MESSAGE, "the message has more than %d frames", DSKV_MAX_FRAMES);
        dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_FRAMES);
        return;
    }
    dskv_fail(error, DSKV_BAD_MESSAGE, "the message takes %zu bytes, the limit is %d", intake->bytes,
              DSKV_MAX_REQUEST_BYTES);
    dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_REQUEST_BYTES);
    dskv_error_set(error, DSKV_HAS_LENGTH, (int64_t)intake->bytes);
}

int dskv_transport_receive(struct dskv_transport *transport, struct dskv_route *route, struct dskv_frames *frames,
                           struct dskv_error *error)
{
    zmq_msg_t message;
    struct intake intake = {0};
    int more = 0, fd = -1;
    memset(frames, 0, sizeof *frames);
    memset(error, 0, sizeof *error);
    if (!receive_frame(transport, &message, &more))
        return 0;
    memset(route, 0, sizeof *route);
    route->n = (uint8_t)zmq_msg_size(&message);
    memcpy(route->bytes, zmq_msg_data(&message), route->n);
    zmq_msg_close(&message);
    while (more) { /* the whole message is there: ZeroMQ delivers it at once */
        int rc = receive_frame(transport, &message, &more);
        DSKV_ASSERT(rc, "a message broke off: %s", zmq_strerror(errno));
        take_frame(&intake, &message);
        fd = zmq_msg_get(&message, ZMQ_SRCFD);
        zmq_msg_close(&message);
    }
    read_monitor(transport);
    struct dskv_peer *peer = dskv_clients_hear(transport->clients, route, fd);
    if (fd >= 0 && !((size_t)fd < transport->n_open && transport->is_open[fd]))
        dskv_clients_lose(transport->clients, peer); /* gone while its message waited */
    if (intake.is_over)
        report_over(&intake, error);
    else if (intake.n_frames == 0)
        dskv_fail(error, DSKV_BAD_MESSAGE, "the message has no frame");
    *frames = intake.frames;
    return 1;
}

static int can_receive(struct dskv_transport *transport)
{
    int events = 0;
    size_t bytes = sizeof events;
    zmq_getsockopt(transport->socket, ZMQ_EVENTS, &events, &bytes);
    return (events & ZMQ_POLLIN) != 0;
}

static int descriptor_of(void *socket)
{
    int fd = -1;
    size_t bytes = sizeof fd;
    zmq_getsockopt(socket, ZMQ_FD, &fd, &bytes);
    return fd;
}

void dskv_transport_wait(struct dskv_transport *transport, int wake_fd, int timeout_ms)
{
    /* ZeroMQ's descriptors tell of changes only.  Asking for the events takes the changes in, so that is the last thing
     * before the sleep; a change that was taken in by a send in between is found after RETRY_MS. */
    can_receive(transport);
    flush_all(transport);
    read_monitor(transport);
    if (can_receive(transport) || dskv_clients_has_lost(transport->clients))
        return;
    if (dskv_clients_bytes(transport->clients) && (timeout_ms < 0 || timeout_ms > RETRY_MS))
        timeout_ms = RETRY_MS;
    struct pollfd fds[] = {
        {.fd = descriptor_of(transport->socket), .events = POLLIN},
        {.fd = descriptor_of(transport->monitor), .events = POLLIN},
        {.fd = wake_fd, .events = POLLIN}, /* -1 is passed over */
    };
    poll(fds, sizeof fds / sizeof fds[0], timeout_ms);
    can_receive(transport);
    flush_all(transport);
    read_monitor(transport);
}

int dskv_transport_lost(struct dskv_transport *transport, struct dskv_route *route)
{
    read_monitor(transport);
    return dskv_clients_next_lost(transport->clients, route);
}

size_t dskv_transport_backlog(const struct dskv_transport *transport, const struct dskv_route *route)
{
    const struct dskv_peer *peer = dskv_clients_find(transport->clients, route);
    return peer ? peer->bytes : 0;
}

size_t dskv_transport_backlog_all(const struct dskv_transport *transport)
{
    return dskv_clients_bytes(transport->clients);
}

/* ---- opening and closing ---------------------------------------------------------------------------------------- */

static int set_int(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof value);
}

/* Where a client comes over ipc and no descriptor is left for it, ZeroMQ ends this process: take all that there may be,
 * not the thousand that most processes begin with. */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static enum dskv_exit open_sockets(struct dskv_transport *transport, struct dskv_error *error)
{
    static const char monitor_address[] = "inproc://monitor";
    int64_t max_frame = DSKV_MAX_FRAME_BYTES;
    transport->context = zmq_ctx_new();
    transport->socket = transport->context ? zmq_socket(transport->context, ZMQ_ROUTER) : NULL;
    transport->monitor = transport->socket ? zmq_socket(transport->context, ZMQ_PAIR) : NULL;
    if (!transport->monitor)
        return dskv_fail_exit(error, DSKV_EXIT_ENDPOINT, "cannot make a socket: %s", zmq_strerror(errno));
    void *socket = transport->socket;
    int rc = zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &max_frame, sizeof max_frame);
    rc |= set_int(socket, ZMQ_ROUTER_MANDATORY, 1) | set_int(socket, ZMQ_LINGER, 0) |
          set_int(socket, ZMQ_RCVHWM, RECEIVE_MESSAGES) | set_int(socket, ZMQ_SNDHWM, SEND_MESSAGES) |
          set_int(socket, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS) |
          set_int(socket, ZMQ_HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS) |
          set_int(socket, ZMQ_HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS) | set_int(socket, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS);
    rc |= zmq_socket_monitor(socket, monitor_address, ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED);
    /* Without a limit: ZeroMQ's thread must never wait for this one to read. */
    rc |= set_int(transport->monitor, ZMQ_RCVHWM, 0) | set_int(transport->monitor, ZMQ_LINGER, 0) |
          zmq_connect(transport->monitor, monitor_address);
    DSKV_ASSERT(rc == 0, "%s", zmq_strerror(errno));
    return DSKV_EXIT_OK;
}

static enum dskv_exit bind_endpoint(struct dskv_transport *transport, int i, struct dskv_error *error)
{
    struct dskv_endpoint *endpoint = &transport->endpoints[i];
    size_t bytes = sizeof transport->bound[i];
    /* Only where it is wanted: it turns the name of an IPv4 address into a mapped one. */
    set_int(transport->socket, ZMQ_IPV6, strchr(endpoint->address, '[') != NULL);
    mode_t mask = umask(S_IRWXG | S_IRWXO | S_IXUSR); /* the socket's file is 0600 from its first moment */
    int rc = zmq_bind(transport->socket, endpoint->address);
    int reason = errno;
    umask(mask);
    if (rc != 0)
        return dskv_fail_exit(error, DSKV_EXIT_ENDPOINT, "cannot listen on %s: %s", endpoint->address,
                              reason == EADDRINUSE ? "the port is taken" : zmq_strerror(reason));
    rc = zmq_getsockopt(transport->socket, ZMQ_LAST_ENDPOINT, transport->bound[i], &bytes);
    DSKV_ASSERT(rc == 0, "%s", zmq_strerror(errno));
    return dskv_endpoint_bound(endpoint, error);
}

enum dskv_exit dskv_transport_open(const char *const *endpoints, int n, int insecure, struct dskv_transport **transport,
                                   struct dskv_error *error)
{
    struct dskv_transport *t = dskv_calloc(1, sizeof *t);
    t->clients = dskv_clients_open();
    t->endpoints = dskv_calloc((size_t)n, sizeof *t->endpoints);
    t->bound = dskv_calloc((size_t)n, sizeof *t->bound);
    t->n_endpoints = n;
    *transport = NULL;
    raise_descriptor_limit();
    enum dskv_exit code = open_sockets(t, error);
    for (int i = 0; i < n && !code; i++) {
        code = dskv_endpoint_open(endpoints[i], insecure, &t->endpoints[i], error);
        if (!code)
            code = bind_endpoint(t, i, error);
    }
    if (code)
        dskv_transport_close(&t, 0);
    else
        *transport = t;
    return code;
}

const char *dskv_transport_endpoint(const struct dskv_transport *transport, int i)
{
    DSKV_ASSERT(i >= 0 && i < transport->n_endpoints, "endpoint %d of %d", i, transport->n_endpoints);
    return transport->bound[i];
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void dskv_transport_close(struct dskv_transport **transport, int linger_ms)
{
    struct dskv_transport *t = *transport;
    if (!t)
        return;
    int64_t end = now_ms() + linger_ms, left = linger_ms;
    while (dskv_clients_bytes(t->clients) && left > 0) {
        struct pollfd fd = {.fd = descriptor_of(t->socket), .events = POLLIN};
        poll(&fd, 1, left < RETRY_MS ? (int)left : RETRY_MS);
        can_receive(t);
        flush_all(t);
        left = end - now_ms();
    }
    if (t->socket) {
        set_int(t->socket, ZMQ_LINGER, left > 0 ? (int)left : 0);
        zmq_socket_monitor(t->socket, NULL, 0);
        zmq_close(t->socket);
    }
    if (t->monitor)
        zmq_close(t->monitor);
    if (t->context)
        zmq_ctx_term(t->context);
    for (int i = 0; i < t->n_endpoints; i++)
        dskv_endpoint_close(&t->endpoints[i]);
    dskv_clients_close(&t->clients);
    free(t->endpoints);
    free(t->bound);
    free(t->is_open);
    free(t);
    *transport = NULL;
}
