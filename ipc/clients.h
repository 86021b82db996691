/* Clients: those whom the server has heard of, the replies that wait for them, and who was lost.
 *
 * Owns the count of waiting bytes and what happens at its limits: the client with too many is lost, and all that waited
 * for it is freed.  Knows routes, descriptors and frames, no ZeroMQ.
 */
#ifndef DSKV_IPC_CLIENTS_H
#define DSKV_IPC_CLIENTS_H

#include "ipc/transport.h"

struct dskv_waiting {
    struct dskv_waiting *next;
    struct dskv_frames frames;
    size_t bytes;
};

struct dskv_peer {
    struct dskv_peer *next; /* in its bucket */
    struct dskv_route route;
    int fd; /* of its connection */
    struct dskv_waiting *first, *last;
    size_t bytes; /* of its waiting frames */
};

struct dskv_clients;

struct dskv_clients *dskv_clients_open(void);
void dskv_clients_close(struct dskv_clients **clients);

/* Null when this route was never heard of, or lost since. */
struct dskv_peer *dskv_clients_find(const struct dskv_clients *clients, const struct dskv_route *route);
/* Notes that a message came from this route over this connection. */
struct dskv_peer *dskv_clients_hear(struct dskv_clients *clients, const struct dskv_route *route, int fd);
/* All of them, in no order; a peer may be lost once its next one is known. */
struct dskv_peer *dskv_clients_first(const struct dskv_clients *clients);
struct dskv_peer *dskv_clients_next(const struct dskv_clients *clients, const struct dskv_peer *peer);

/* Forgets a peer, frees what waits for it, and keeps its route for next_lost. */
void dskv_clients_lose(struct dskv_clients *clients, struct dskv_peer *peer);
/* The same for whoever came over this connection. */
void dskv_clients_lose_connection(struct dskv_clients *clients, int fd);
/* 1 with the next lost route, 0 when there is none. */
int dskv_clients_next_lost(struct dskv_clients *clients, struct dskv_route *route);
int dskv_clients_has_lost(const struct dskv_clients *clients);

/* Takes the frames over, behind what waits already.  At a limit it loses peers, this one or those with the most bytes.
 */
void dskv_clients_queue(struct dskv_clients *clients, struct dskv_peer *peer, struct dskv_frames *frames);
/* Frees the first waiting message of a peer, which has one. */
void dskv_clients_drop_first(struct dskv_clients *clients, struct dskv_peer *peer);
/* Bytes that wait, for all. */
size_t dskv_clients_bytes(const struct dskv_clients *clients);

#endif
