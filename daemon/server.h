/* Server: the engine thread of rank 0.  Turns requests into sequences, steps and events; owns caches, blocks and
 * leases.
 *
 * The front thread submits decoded requests and collects events; both sides meet in two mutex-guarded queues, each with
 * an eventfd, so that neither ever waits for the other's work.  Only the engine thread calls the engine (and so MPI).
 * Knows no bytes, no ZeroMQ; sees no tensor but rows of results and opaque pieces of KV.
 */
#ifndef DSKV_DAEMON_SERVER_H
#define DSKV_DAEMON_SERVER_H

#include "daemon/config.h"
#include "ipc/message.h"
#include "ipc/transport.h"
#include "parallel/engine.h"

struct dskv_server;

/* Starts the engine thread.  The engine and the config must outlive the server. */
enum dskv_exit dskv_server_open(struct dskv_engine *engine, const struct dskv_config *config,
                                struct dskv_server **server, struct dskv_error *error);
/* Ends the engine thread after its current step and frees everything, events that were not collected included. */
void dskv_server_close(struct dskv_server **server);

/* Front thread: hands a request over (the server owns and clears it).  Every request that does not fail here gets
 * exactly one last event, DSKV_EVENT_RESULT or DSKV_EVENT_ERROR; part, credit and commit get none, what they bring
 * about comes under the id that they name.  Refused, so that the caller answers and clears: DSKV_BUSY, DSKV_DRAINING,
 * DSKV_INTERNAL (a step failed), DSKV_BAD_VALUE (the id is in flight, or what a part, credit or commit names is not).
 */
enum dskv_code dskv_server_submit(struct dskv_server *server, const struct dskv_route *route,
                                  struct dskv_request *request, struct dskv_error *error);
/* Front thread: marks a request of this route for cancellation; 1 when one was in flight. */
int dskv_server_cancel(struct dskv_server *server, const struct dskv_route *route, uint64_t id);
/* Front thread: what every request carries, for one that the front answers itself (ping, info, stats, cancel): renews
 * the lease of its session and frees the caches of its `free` list, before anything that is submitted later.  Never
 * waits for a step; the request stays the caller's.  DSKV_BUSY when too many of these wait; nothing is done then. */
enum dskv_code dskv_server_note(struct dskv_server *server, const struct dskv_request *request,
                                struct dskv_error *error);
/* Front thread: the client is gone; its requests are cancelled (its caches stay until their lease ends). */
void dskv_server_route_lost(struct dskv_server *server, const struct dskv_route *route);

/* Readable when events wait. */
int dskv_server_event_fd(const struct dskv_server *server);
/* The next event, already encoded, for a route: 1, or 0 when there is none. */
int dskv_server_next_event(struct dskv_server *server, struct dskv_route *route, struct dskv_frames *frames);

/* Counters as they stand; safe from any thread.  stats->ranks must be the caller's array of engine_info.n_ranks
 * entries; all but stats->backlog_bytes (the front's) is filled. */
void dskv_server_stats(struct dskv_server *server, struct dskv_stats_result *stats);

/* No new work from now on; dskv_server_idle is 1 when all accepted work has been answered: its last events can be
 * collected with dskv_server_next_event.  stop is drain, but what is unfinished after the current step is answered with
 * `draining`. */
void dskv_server_drain(struct dskv_server *server);
void dskv_server_stop(struct dskv_server *server);
int dskv_server_idle(struct dskv_server *server);
/* Not 0 when a step failed: the exit code for the job, with its sentence. */
enum dskv_exit dskv_server_failed(struct dskv_server *server, struct dskv_error *error);

#endif
