/* The inside of libdskv: the connection, calls in flight, and what its files share.
 *
 * A call is one request and the events that answer it.  Calls of one client share its link: whoever waits receives for
 * all, and what belongs to another call is kept there, so that a stream can stay open beside other calls.  Ids of
 * caches that were given up wait in the client and travel with the next request.
 */
#ifndef DSKV_IPC_CLIENT_INSIDE_H
#define DSKV_IPC_CLIENT_INSIDE_H

#include "dskv/client.h"
#include "ipc/message.h"
#include "ipc/transport.h"

struct dskv_arrived { /* an event that waits for its call */
    struct dskv_event event;
    struct dskv_arrived *next;
};

struct dskv_call {
    struct dskv_client *client;
    uint64_t id;
    uint64_t last_follower; /* credits, parts and a commit have ids of their own, id + 1 .. last_follower; 0: none */
    int32_t timeout_ms;     /* resolved: negative is for ever */
    int ended;              /* its last event was taken, or none will come */
    int lost;               /* the connection broke: `error` says how */
    struct dskv_error error;
    struct dskv_arrived *first, **last;
    struct dskv_id *carried; /* [n_carried] of its free list, until an event shows that the server looked at it */
    size_t n_carried;
    struct dskv_call *next;
};

struct dskv_client {
    struct dskv_link *link; /* null once closed */
    int32_t timeout_ms, connect_timeout_ms;
    int32_t n_references; /* the caller's, and one for each handle and stream: the memory lives until the last */
    struct dskv_id session;
    int has_session;
    int64_t lease_ms;
    struct dskv_limits limits;
    uint64_t next_id;
    struct dskv_id *freed; /* [n_freed] caches that were given up and not yet told */
    size_t n_freed, freed_capacity;
    struct dskv_call *calls; /* in flight */
};

struct dskv_cache {
    struct dskv_client *client; /* a reference */
    struct dskv_id id;
    char name[33];
    char origin[33];
    int consumed; /* the server knows it no more: nothing to tell at the end */
    int32_t length;
    uint32_t check; /* dskv_tokens_check of all tokens */
    int32_t *tokens;
};

/* ---- calls (ipc/client_call.c) ---------------------------------------------------------------------------------- */

/* Sends a request: fills its version, id, session and free list.  On success dskv_call_end must follow. */
enum dskv_code dskv_call_begin(struct dskv_client *client, struct dskv_request *request, int32_t timeout_ms,
                               struct dskv_call *call, struct dskv_error *error);
/* Waits for the call's next event; an error event becomes the returned error.  The caller clears the event. */
enum dskv_code dskv_call_wait(struct dskv_call *call, struct dskv_event *event, struct dskv_error *error);
/* Sends a credit, part or commit of a call: no other call may begin before this one has ended.  An error that it brings
 * is the call's. */
enum dskv_code dskv_call_follow(struct dskv_call *call, struct dskv_request *request, struct dskv_error *error);
/* Asks the server to end it; its last event is still to come. */
enum dskv_code dskv_call_cancel(struct dskv_call *call, struct dskv_error *error);
/* Cancels what has not ended and forgets the call; late events of it are passed over, their caches given up.  Twice is
 * harmless. */
void dskv_call_end(struct dskv_call *call);
/* begin, wait for the result, end. */
enum dskv_code dskv_call_run(struct dskv_client *client, struct dskv_request *request, int32_t timeout_ms,
                             struct dskv_event *event, struct dskv_error *error);
/* The event is not what this call can get. */
enum dskv_code dskv_call_unexpected(const struct dskv_event *event, struct dskv_error *error);

/* ---- client and caches (ipc/client.c, ipc/client_cache.c) -------------------------------------------------------- */

/* Opens a session. */
enum dskv_code dskv_client_hello(struct dskv_client *client, struct dskv_error *error);
void dskv_client_hold(struct dskv_client *client);
void dskv_client_release(struct dskv_client *client);
/* Queues an id to be given up with the next request. */
void dskv_client_give_up(struct dskv_client *client, const struct dskv_id *id);
/* How many of them, from the first, one request may carry; and forgets the first n, which were sent. */
size_t dskv_client_next_freed(const struct dskv_client *client);
void dskv_client_forget_freed(struct dskv_client *client, size_t n);
/* DSKV_UNREACHABLE when the client was closed. */
enum dskv_code dskv_client_check_open(const struct dskv_client *client, struct dskv_error *error);

/* Copies a struct of options into `own` (zeroed first); bytes that this library does not know must be zero. */
enum dskv_code dskv_options_read(const void *options, void *own, size_t own_bytes, struct dskv_error *error);
/* Tokens as a tensor of a request.  DSKV_BAD_VALUE when they are too many or not there. */
enum dskv_code dskv_tokens_read(const int32_t *tokens, size_t n, const char *field, struct dskv_wire_tensor *tensor,
                                struct dskv_error *error);
/* DSKV_BAD_VALUE, DSKV_CUT_PAST_END. */
enum dskv_code dskv_prefix_read(const struct dskv_client *client, struct dskv_cache_prefix prefix,
                                struct dskv_prefix *wire, struct dskv_error *error);
/* The server took the prefix's cache with its result, where it was asked to consume it. */
void dskv_prefix_mark_consumed(struct dskv_cache_prefix prefix, int consume);
/* A handle of what a reply made: null when it made none.  Its tokens are the prefix's and then `more`, cut at its
 * length. */
struct dskv_cache *dskv_cache_open(struct dskv_client *client, const struct dskv_cache_ref *ref,
                                   struct dskv_cache_prefix prefix, const struct dskv_wire_tensor *more, size_t n_more);
/* A copy of a tensor's bytes; null when it is absent. */
void *dskv_tensor_copy(const struct dskv_wire_tensor *tensor);

#endif
