/* Transport: frames over ZeroMQ; the only user of zmq.h.
 *
 * The server side is used by one thread (the front thread).  Bytes that wait for a client are counted here: a client
 * that does not read costs at most DSKV_MAX_CLIENT_BACKLOG_BYTES, then it is dropped.  Knows frames and routes, no
 * messages.
 */
#ifndef DSKV_IPC_TRANSPORT_H
#define DSKV_IPC_TRANSPORT_H

#include "ipc/message.h"

/* Where a reply goes: a route, never an identity. */
struct dskv_route {
    uint8_t n;
    uint8_t bytes[DSKV_MAX_ROUTE_BYTES];
};

/* ---- server ----------------------------------------------------------------------------------------------------- */

struct dskv_transport;

/* Listens on every endpoint ("tcp://127.0.0.1:5560", "ipc:///path"; ipc sockets get mode 0600).  An address beyond
 * loopback is refused (DSKV_EXIT_USAGE) unless insecure is set. */
enum dskv_exit dskv_transport_open(const char *const *endpoints, int n, int insecure, struct dskv_transport **transport,
                                   struct dskv_error *error);
/* The endpoint that endpoints[i] was bound to, with the real port where it asked for any ("tcp://127.0.0.1:*"); the
 * transport's memory. */
const char *dskv_transport_endpoint(const struct dskv_transport *transport, int i);
/* Unlinks ipc sockets; gives waiting replies linger_ms to leave. */
void dskv_transport_close(struct dskv_transport **transport, int linger_ms);

/* Waits until a message came, a route was lost, wake_fd became readable (may be -1), a backlog may move, or timeout_ms
 * (-1: for ever) passed.  It returns at once while a message or a lost route waits to be taken. */
void dskv_transport_wait(struct dskv_transport *transport, int wake_fd, int timeout_ms);
/* The next message, without waiting: 1 with *route and *frames (owned by the caller), 0 when there is none.  A message
 * over the limits of base/limits.h is drained and reported as 1 with frames->n == 0 and *error filled. */
int dskv_transport_receive(struct dskv_transport *transport, struct dskv_route *route, struct dskv_frames *frames,
                           struct dskv_error *error);
/* Takes the frames over and sends or queues them.  DSKV_UNREACHABLE when the client is gone or its backlog was dropped.
 */
enum dskv_code dskv_transport_send(struct dskv_transport *transport, const struct dskv_route *route,
                                   struct dskv_frames *frames);
/* The next route that was lost (client gone or dropped) since the last call: 1 with *route, 0 when there is none. */
int dskv_transport_lost(struct dskv_transport *transport, struct dskv_route *route);
/* Bytes that wait for this client, and for all. */
size_t dskv_transport_backlog(const struct dskv_transport *transport, const struct dskv_route *route);
size_t dskv_transport_backlog_all(const struct dskv_transport *transport);

/* ---- client ----------------------------------------------------------------------------------------------------- */

struct dskv_link;

enum dskv_code dskv_link_open(const char *endpoint, struct dskv_link **link, struct dskv_error *error);
void dskv_link_close(struct dskv_link **link);
/* Takes the frames over. */
enum dskv_code dskv_link_send(struct dskv_link *link, struct dskv_frames *frames, int timeout_ms,
                              struct dskv_error *error);
/* DSKV_TIMEOUT when nothing came; DSKV_UNREACHABLE when the connection was lost (it is then made again for the next
 * call). */
enum dskv_code dskv_link_receive(struct dskv_link *link, struct dskv_frames *frames, int timeout_ms,
                                 struct dskv_error *error);

#endif
