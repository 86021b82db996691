#include "clients.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

/* What a waiting frame costs beside its bytes. */
#define FRAME_OVERHEAD 64
#define N_BUCKETS 256

struct lost {
    struct lost *next;
    struct dskv_route route;
};

struct dskv_clients {
    struct dskv_peer *buckets[N_BUCKETS];
    size_t bytes;
    struct lost *lost_first, *lost_last;
};

struct dskv_clients *dskv_clients_open(void)
{
    return dskv_calloc(1, sizeof(struct dskv_clients));
}

void dskv_clients_close(struct dskv_clients **clients)
{
    struct dskv_route route;
    if (!*clients)
        return;
    for (struct dskv_peer *peer; (peer = dskv_clients_first(*clients));)
        dskv_clients_lose(*clients, peer);
    while (dskv_clients_next_lost(*clients, &route))
        continue;
    free(*clients);
    *clients = NULL;
}

/* ---- finding ---------------------------------------------------------------------------------------------------- */

static size_t bucket_of(const struct dskv_route *route)
{
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (int i = 0; i < route->n; i++)
        hash = (hash ^ route->bytes[i]) * 16777619u;
    return hash % N_BUCKETS;
}

struct dskv_peer *dskv_clients_find(const struct dskv_clients *clients, const struct dskv_route *route)
{
    struct dskv_peer *peer = clients->buckets[bucket_of(route)];
    while (peer && (peer->route.n != route->n || memcmp(peer->route.bytes, route->bytes, route->n) != 0))
        peer = peer->next;
    return peer;
}

struct dskv_peer *dskv_clients_hear(struct dskv_clients *clients, const struct dskv_route *route, int fd)
{
    struct dskv_peer *peer = dskv_clients_find(clients, route);
    if (!peer) {
        struct dskv_peer **bucket = &clients->buckets[bucket_of(route)];
        peer = dskv_calloc(1, sizeof *peer);
        peer->route = *route;
        peer->next = *bucket;
        *bucket = peer;
    }
    peer->fd = fd;
    return peer;
}

static struct dskv_peer *first_from(const struct dskv_clients *clients, size_t bucket)
{
    while (bucket < N_BUCKETS && !clients->buckets[bucket])
        bucket++;
    return bucket < N_BUCKETS ? clients->buckets[bucket] : NULL;
}

struct dskv_peer *dskv_clients_first(const struct dskv_clients *clients)
{
    return first_from(clients, 0);
}

struct dskv_peer *dskv_clients_next(const struct dskv_clients *clients, const struct dskv_peer *peer)
{
    return peer->next ? peer->next : first_from(clients, bucket_of(&peer->route) + 1);
}

/* ---- losing ----------------------------------------------------------------------------------------------------- */

void dskv_clients_lose(struct dskv_clients *clients, struct dskv_peer *peer)
{
    struct dskv_peer **link = &clients->buckets[bucket_of(&peer->route)];
    while (*link != peer)
        link = &(*link)->next;
    *link = peer->next;
    while (peer->first)
        dskv_clients_drop_first(clients, peer);
    struct lost *lost = dskv_calloc(1, sizeof *lost);
    lost->route = peer->route;
    if (clients->lost_first)
        clients->lost_last->next = lost;
    else
        clients->lost_first = lost;
    clients->lost_last = lost;
    free(peer);
}

void dskv_clients_lose_connection(struct dskv_clients *clients, int fd)
{
    for (struct dskv_peer *next, *peer = dskv_clients_first(clients); peer; peer = next) {
        next = dskv_clients_next(clients, peer);
        if (peer->fd == fd)
            dskv_clients_lose(clients, peer);
    }
}

int dskv_clients_next_lost(struct dskv_clients *clients, struct dskv_route *route)
{
    struct lost *lost = clients->lost_first;
    if (!lost)
        return 0;
    *route = lost->route;
    clients->lost_first = lost->next;
    free(lost);
    return 1;
}

int dskv_clients_has_lost(const struct dskv_clients *clients)
{
    return clients->lost_first != NULL;
}

/* ---- waiting ---------------------------------------------------------------------------------------------------- */

static struct dskv_peer *most_waiting(const struct dskv_clients *clients)
{
    struct dskv_peer *most = dskv_clients_first(clients);
    for (struct dskv_peer *peer = most; peer; peer = dskv_clients_next(clients, peer))
        most = peer->bytes > most->bytes ? peer : most;
    return most;
}

void dskv_clients_queue(struct dskv_clients *clients, struct dskv_peer *peer, struct dskv_frames *frames)
{
    struct dskv_waiting *waiting = dskv_calloc(1, sizeof *waiting);
    waiting->frames = *frames;
    memset(frames, 0, sizeof *frames);
    for (int32_t i = 0; i < waiting->frames.n; i++)
        waiting->bytes += waiting->frames.frames[i].bytes + FRAME_OVERHEAD;
    if (peer->first)
        peer->last->next = waiting;
    else
        peer->first = waiting;
    peer->last = waiting;
    peer->bytes += waiting->bytes;
    clients->bytes += waiting->bytes;
    if (peer->bytes > DSKV_MAX_CLIENT_BACKLOG_BYTES)
        dskv_clients_lose(clients, peer);
    while (clients->bytes > DSKV_MAX_BACKLOG_BYTES)
        dskv_clients_lose(clients, most_waiting(clients));
}

void dskv_clients_drop_first(struct dskv_clients *clients, struct dskv_peer *peer)
{
    struct dskv_waiting *waiting = peer->first;
    DSKV_ASSERT(waiting, "nothing waits of %zu bytes", peer->bytes);
    peer->first = waiting->next;
    peer->bytes -= waiting->bytes;
    clients->bytes -= waiting->bytes;
    dskv_frames_clear(&waiting->frames);
    free(waiting);
}

size_t dskv_clients_bytes(const struct dskv_clients *clients)
{
    return clients->bytes;
}
