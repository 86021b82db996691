/* Mailbox: where the front thread and the engine thread meet.
 *
 * Owns the two queues, their mutex, and the tickets: one per accepted request, from its acceptance until its last event
 * has been published.  Neither thread ever waits for the other's work.  Knows requests only by their envelope, events
 * only as frames.  Parts, credits and commits carry no ticket of their own: they travel with the ticket of the request
 * they name.
 */
#ifndef DSKV_DAEMON_MAILBOX_H
#define DSKV_DAEMON_MAILBOX_H

#include "ipc/message.h"
#include "ipc/transport.h"

#include <stddef.h>
#include <stdint.h>

struct dskv_task;

struct dskv_ticket {
    struct dskv_route route;
    uint64_t id;
    enum dskv_op op;
    int64_t deadline_us;    /* of the monotonic clock; INT64_MAX: none */
    struct dskv_task *task; /* the engine thread's; null before it begins and after it has ended */
    /* The mailbox's, under its mutex. */
    size_t bytes;    /* of the request's tensors and ids */
    int32_t credits; /* import: parts that may still come unasked; below 0: parts that came all the same */
    int cancelled;   /* the engine thread was told so, or will be */
    int32_t n_refs;  /* messages that name it, and its being open */
    int open;
    struct dskv_ticket *next;
};

enum dskv_message_kind {
    DSKV_MESSAGE_REQUEST, /* begin it */
    DSKV_MESSAGE_FOLLOW,  /* part, credit or commit of the ticket's request */
    DSKV_MESSAGE_OVERRUN, /* a part of the ticket's request came without credit and was dropped */
    DSKV_MESSAGE_CANCEL,
    DSKV_MESSAGE_LOST, /* its client is gone */
    DSKV_MESSAGE_NOTE, /* no ticket: a session to renew and caches to free */
};

struct dskv_message {
    enum dskv_message_kind kind;
    struct dskv_ticket *ticket;
    struct dskv_request request; /* REQUEST, FOLLOW, NOTE; who takes it over marks it with taken */
    int taken;
    size_t bytes; /* FOLLOW: of its tensor; NOTE: of its ids */
    struct dskv_message *next;
    struct dskv_id ids[]; /* NOTE: request.free points here */
};

/* How far the end of the server has come: each includes the ones before. */
enum dskv_phase { DSKV_PHASE_SERVE, DSKV_PHASE_DRAIN, DSKV_PHASE_STOP, DSKV_PHASE_CLOSE };

struct dskv_mailbox;

struct dskv_mailbox *dskv_mailbox_open(int32_t n_ranks);
void dskv_mailbox_close(struct dskv_mailbox **mailbox);
/* Now, of the clock that deadlines and waits are measured by. */
int64_t dskv_mailbox_now_us(void);

/* ---- the front thread's side ------------------------------------------------------------------------------------ */

/* Takes the request over unless it fails: DSKV_BUSY, DSKV_DRAINING, DSKV_BAD_VALUE (its id is in flight). */
enum dskv_code dskv_mailbox_submit(struct dskv_mailbox *mailbox, const struct dskv_route *route,
                                   struct dskv_request *request, struct dskv_error *error);
int dskv_mailbox_cancel(struct dskv_mailbox *mailbox, const struct dskv_route *route, uint64_t id);
/* DSKV_BUSY. */
enum dskv_code dskv_mailbox_note(struct dskv_mailbox *mailbox, const struct dskv_request *request,
                                 struct dskv_error *error);
void dskv_mailbox_route_lost(struct dskv_mailbox *mailbox, const struct dskv_route *route);
int dskv_mailbox_event_fd(const struct dskv_mailbox *mailbox);
int dskv_mailbox_next_event(struct dskv_mailbox *mailbox, struct dskv_route *route, struct dskv_frames *frames);
void dskv_mailbox_stats(struct dskv_mailbox *mailbox, struct dskv_stats_result *stats);
/* Every accepted request's last event has been published. */
int dskv_mailbox_idle(struct dskv_mailbox *mailbox);
/* Moves on; never back. */
void dskv_mailbox_set_phase(struct dskv_mailbox *mailbox, enum dskv_phase phase);
enum dskv_exit dskv_mailbox_failed(struct dskv_mailbox *mailbox, struct dskv_error *error);

/* ---- the engine thread's side ----------------------------------------------------------------------------------- */

/* Waits until there is a message, the phase changes from *phase, or the clock reaches until_us (0: does not wait).
 * Returns the messages in order, null when there are none. */
struct dskv_message *dskv_mailbox_take(struct dskv_mailbox *mailbox, int64_t until_us, enum dskv_phase *phase);
/* Frees a message and its hold on the ticket. */
void dskv_mailbox_discard(struct dskv_mailbox *mailbox, struct dskv_message **message);
/* Queues an event for the next publish; takes the frames over.  With `last`, the ticket is closed then, and not to be
 * used any more. */
void dskv_mailbox_post(struct dskv_mailbox *mailbox, struct dskv_ticket *ticket, struct dskv_frames *frames, int last);
/* Lets the front see what was posted, and these counters (ranks: n_ranks of them; requests_queued is counted here). */
void dskv_mailbox_publish(struct dskv_mailbox *mailbox, const struct dskv_stats_result *stats);
/* One more part may come for this import. */
void dskv_mailbox_give_credit(struct dskv_mailbox *mailbox, struct dskv_ticket *ticket);
/* A step failed: nothing is accepted any more. */
void dskv_mailbox_fail(struct dskv_mailbox *mailbox, enum dskv_exit code, const struct dskv_error *error);

#endif
