/* The client's link: a DEALER socket to one server. */
#include "ipc/transport.h"

#include "base/memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

#define HEARTBEAT_MS 2000
#define HEARTBEAT_TIMEOUT_MS 10000
#define RECONNECT_MS 20
#define RECONNECT_MAX_MS 500

struct dskv_link {
    char *endpoint;
    void *context, *socket, *monitor; /* the sockets are null after a loss, until the next send */
    int is_connected;                 /* the server has answered the handshake */
    int is_lost;                      /* and the connection broke off since */
    unsigned n_opened;                /* names the monitors */
};

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* What is left of a time-out; -1: for ever. */
static int left_ms(int64_t end, int timeout_ms)
{
    int64_t left = end - now_ms();
    return timeout_ms < 0 ? -1 : left > 0 ? (int)left : 0;
}

/* ---- sockets ---------------------------------------------------------------------------------------------------- */

static int set_int(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof value);
}

static void close_sockets(struct dskv_link *link)
{
    if (link->socket) {
        zmq_socket_monitor(link->socket, NULL, 0);
        zmq_close(link->socket);
    }
    if (link->monitor)
        zmq_close(link->monitor);
    link->socket = link->monitor = NULL;
    link->is_connected = link->is_lost = 0;
}

static enum dskv_code open_sockets(struct dskv_link *link, struct dskv_error *error)
{
    char *monitor_address = dskv_format("inproc://monitor-%u", link->n_opened++);
    link->socket = zmq_socket(link->context, ZMQ_DEALER);
    link->monitor = link->socket ? zmq_socket(link->context, ZMQ_PAIR) : NULL;
    if (!link->monitor) {
        free(monitor_address);
        close_sockets(link);
        return dskv_fail(error, DSKV_UNREACHABLE, "cannot make a socket: %s", zmq_strerror(errno));
    }
    /* RCVHWM 0: the client holds what it asked for.  With a limit, a program that is slow to read would leave
     * heartbeats unread too, and be taken for frozen. Not ZMQ_IMMEDIATE: with it, what was received and not yet taken
     * is lost with the connection. */
    int64_t max_frame = DSKV_MAX_FRAME_BYTES;
    int rc = set_int(link->socket, ZMQ_RCVHWM, 0) | set_int(link->socket, ZMQ_IPV6, 1) |
             set_int(link->socket, ZMQ_LINGER, 0) | set_int(link->socket, ZMQ_RECONNECT_IVL, RECONNECT_MS) |
             set_int(link->socket, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS) |
             set_int(link->socket, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS) |
             set_int(link->socket, ZMQ_HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS) |
             set_int(link->socket, ZMQ_HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS);
    rc |= zmq_setsockopt(link->socket, ZMQ_MAXMSGSIZE, &max_frame, sizeof max_frame);
    rc |= zmq_socket_monitor(link->socket, monitor_address, ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED);
    rc |= set_int(link->monitor, ZMQ_RCVHWM, 0) | set_int(link->monitor, ZMQ_LINGER, 0) |
          zmq_connect(link->monitor, monitor_address);
    DSKV_ASSERT(rc == 0, "%s", zmq_strerror(errno));
    free(monitor_address);
    if (zmq_connect(link->socket, link->endpoint) == 0)
        return DSKV_OK;
    int reason = errno;
    close_sockets(link);
    dskv_fail(error, DSKV_BAD_VALUE, "\"%.150s\" is not an endpoint that can be connected to: %s", link->endpoint,
              zmq_strerror(reason));
    dskv_error_set_field(error, "endpoint");
    return DSKV_BAD_VALUE;
}

enum dskv_code dskv_link_open(const char *endpoint, struct dskv_link **link, struct dskv_error *error)
{
    *link = NULL;
    struct dskv_link *l = dskv_calloc(1, sizeof *l);
    l->endpoint = dskv_strdup(endpoint);
    l->context = zmq_ctx_new();
    enum dskv_code code = open_sockets(l, error);
    if (code)
        dskv_link_close(&l);
    else
        *link = l;
    return code;
}

void dskv_link_close(struct dskv_link **link)
{
    if (!*link)
        return;
    close_sockets(*link);
    zmq_ctx_term((*link)->context);
    free((*link)->endpoint);
    free(*link);
    *link = NULL;
}

/* ---- the connection's state ------------------------------------------------------------------------------------- */

static enum dskv_code connection_lost(struct dskv_link *link, struct dskv_error *error)
{
    close_sockets(link); /* with all that was sent and not answered: a new connection knows nothing of it */
    return dskv_fail(error, DSKV_UNREACHABLE, "the connection to %s was lost", link->endpoint);
}

/* Takes in what the monitor tells. */
static void read_monitor(struct dskv_link *link)
{
    int is_first = 1, more = 0;
    size_t more_bytes = sizeof more;
    char buffer[512];
    for (int n; (n = zmq_recv(link->monitor, buffer, sizeof buffer, ZMQ_DONTWAIT)) >= 0; is_first = !more) {
        uint16_t event = 0;
        zmq_getsockopt(link->monitor, ZMQ_RCVMORE, &more, &more_bytes);
        if (!is_first || n < (int)sizeof event)
            continue;
        memcpy(&event, buffer, sizeof event);
        if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
            link->is_connected = 1;
        else
            link->is_lost |= link->is_connected; /* before the handshake it is one more vain attempt */
    }
}

/* Waits for an event of the socket (0: for none) or for news of the connection.  1: the socket is ready. */
static int wait_for(struct dskv_link *link, short events, int timeout_ms)
{
    zmq_pollitem_t items[] = {{.socket = link->socket, .events = events},
                              {.socket = link->monitor, .events = ZMQ_POLLIN}};
    return zmq_poll(items, 2, timeout_ms) > 0 && items[0].revents & events;
}

/* ---- messages --------------------------------------------------------------------------------------------------- */

static void free_data(void *data, void *hint)
{
    (void)hint;
    free(data);
}

static void send_frames(struct dskv_link *link, struct dskv_frames *frames)
{
    for (int32_t i = 0; i < frames->n; i++) {
        zmq_msg_t message;
        struct dskv_frame *frame = &frames->frames[i];
        int rc = zmq_msg_init_data(&message, frame->data, frame->bytes, free_data, NULL);
        DSKV_ASSERT(rc == 0, "%s", zmq_strerror(errno));
        frame->data = NULL;
        do
            rc = zmq_msg_send(&message, link->socket, ZMQ_DONTWAIT | (i + 1 < frames->n ? ZMQ_SNDMORE : 0));
        while (rc < 0 && errno == EINTR);
        if (rc < 0)
            zmq_msg_close(&message); /* the connection broke off: the next receive reports it */
    }
}

enum dskv_code dskv_link_send(struct dskv_link *link, struct dskv_frames *frames, int timeout_ms,
                              struct dskv_error *error)
{
    int64_t end = now_ms() + timeout_ms;
    enum dskv_code code = link->socket ? DSKV_OK : open_sockets(link, error);
    for (int ready = 0; !code && !ready;) {
        int left = left_ms(end, timeout_ms);
        /* Before the handshake the socket would queue for a server that may never come. */
        ready = wait_for(link, link->is_connected ? ZMQ_POLLOUT : 0, left);
        read_monitor(link);
        if (link->is_lost)
            code = connection_lost(link, error);
        else if (!ready && left == 0)
            code = link->is_connected
                       ? dskv_fail(error, DSKV_TIMEOUT, "%s took no request within %d ms", link->endpoint, timeout_ms)
                       : dskv_fail(error, DSKV_UNREACHABLE, "no server answers at %s (tried for %d ms)", link->endpoint,
                                   timeout_ms);
    }
    if (!code)
        send_frames(link, frames);
    dskv_frames_clear(frames);
    return code;
}

/* Takes a message in: 1, or 0 when there is none. */
static int take_message(struct dskv_link *link, struct dskv_frames *frames)
{
    int32_t capacity = 0;
    for (int more = 1; more;) {
        zmq_msg_t message;
        int rc;
        zmq_msg_init(&message);
        do
            rc = zmq_msg_recv(&message, link->socket, ZMQ_DONTWAIT);
        while (rc < 0 && errno == EINTR);
        if (rc < 0) {
            zmq_msg_close(&message);
            return 0; /* only before the first frame: a message is there as a whole */
        }
        more = zmq_msg_more(&message);
        if (frames->n == capacity) {
            capacity = capacity ? 2 * capacity : 4;
            frames->frames = dskv_realloc(frames->frames, (size_t)capacity, sizeof *frames->frames);
        }
        struct dskv_frame *frame = &frames->frames[frames->n++];
        frame->bytes = zmq_msg_size(&message);
        frame->data = dskv_realloc(NULL, frame->bytes ? frame->bytes : 1, 1);
        memcpy(frame->data, zmq_msg_data(&message), frame->bytes);
        zmq_msg_close(&message);
    }
    return 1;
}

enum dskv_code dskv_link_receive(struct dskv_link *link, struct dskv_frames *frames, int timeout_ms,
                                 struct dskv_error *error)
{
    int64_t end = now_ms() + timeout_ms;
    memset(frames, 0, sizeof *frames);
    if (!link->socket)
        return dskv_fail(error, DSKV_UNREACHABLE, "there is no connection to %s", link->endpoint);
    for (;;) {
        read_monitor(link); /* before the look at the socket: what came before the loss is still received */
        if (take_message(link, frames))
            return DSKV_OK;
        if (link->is_lost)
            return connection_lost(link, error);
        int left = left_ms(end, timeout_ms);
        if (left == 0)
            return dskv_fail(error, DSKV_TIMEOUT, "no reply from %s within %d ms", link->endpoint, timeout_ms);
        wait_for(link, ZMQ_POLLIN, left);
    }
}
