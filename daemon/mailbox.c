#include "daemon/mailbox.h"

#include "base/memory.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define N_BUCKETS 1024

struct posted {
    struct dskv_ticket *ticket;
    struct dskv_route route;
    struct dskv_frames frames;
    int last;
    struct posted *next;
};

struct posted_list {
    struct posted *first, **end;
};

struct dskv_mailbox {
    struct posted_list waiting; /* the engine thread's, for the next publish */
    int event_fd;
    pthread_mutex_t mutex; /* guards all that follows */
    pthread_cond_t wake;   /* of the engine thread */
    enum dskv_phase phase;
    struct dskv_message *inbox, **inbox_end;
    struct posted_list outbox;
    struct dskv_ticket *tickets[N_BUCKETS]; /* open ones */
    int32_t n_tickets;
    int32_t n_unbegun; /* requests in the inbox */
    int32_t n_notes;   /* there */
    size_t bytes;      /* of tickets, and of parts and notes in the inbox */
    struct dskv_stats_result stats;
    struct dskv_rank_counters *ranks; /* [stats.n_ranks] */
    enum dskv_exit failed;
    struct dskv_error failure;
};

int64_t dskv_mailbox_now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

struct dskv_mailbox *dskv_mailbox_open(int32_t n_ranks)
{
    struct dskv_mailbox *mailbox = dskv_calloc(1, sizeof *mailbox);
    mailbox->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    DSKV_ASSERT(mailbox->event_fd >= 0, "eventfd: %s", strerror(errno));
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&mailbox->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&mailbox->mutex, NULL);
    mailbox->inbox_end = &mailbox->inbox;
    mailbox->waiting.end = &mailbox->waiting.first;
    mailbox->outbox.end = &mailbox->outbox.first;
    mailbox->ranks = dskv_calloc((size_t)n_ranks, sizeof *mailbox->ranks);
    mailbox->stats.n_ranks = n_ranks;
    return mailbox;
}

static void free_posted(struct posted_list *list)
{
    for (struct posted *posted = list->first, *next; posted; posted = next) {
        next = posted->next;
        dskv_frames_clear(&posted->frames);
        free(posted);
    }
}

void dskv_mailbox_close(struct dskv_mailbox **mailbox)
{
    struct dskv_mailbox *m = *mailbox;
    if (!m)
        return;
    DSKV_ASSERT(!m->inbox && !m->n_tickets, "%d tickets are open", m->n_tickets);
    free_posted(&m->waiting);
    free_posted(&m->outbox);
    close(m->event_fd);
    pthread_cond_destroy(&m->wake);
    pthread_mutex_destroy(&m->mutex);
    free(m->ranks);
    free(m);
    *mailbox = NULL;
}

/* ---- tickets: all under the mutex ------------------------------------------------------------------------------- */

static struct dskv_ticket **bucket_of(struct dskv_mailbox *mailbox, const struct dskv_route *route, uint64_t id)
{
    uint64_t hash = id * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < route->n; i++)
        hash = (hash ^ route->bytes[i]) * 0x100000001b3u;
    return &mailbox->tickets[(hash >> 32) % N_BUCKETS];
}

static int same_route(const struct dskv_route *a, const struct dskv_route *b)
{
    return a->n == b->n && memcmp(a->bytes, b->bytes, a->n) == 0;
}

static struct dskv_ticket *find_ticket(struct dskv_mailbox *mailbox, const struct dskv_route *route, uint64_t id)
{
    struct dskv_ticket *ticket = *bucket_of(mailbox, route, id);
    while (ticket && !(ticket->id == id && same_route(&ticket->route, route)))
        ticket = ticket->next;
    return ticket;
}

static void unref(struct dskv_ticket *ticket)
{
    if (ticket && --ticket->n_refs == 0)
        free(ticket);
}

static void close_ticket(struct dskv_mailbox *mailbox, struct dskv_ticket *ticket)
{
    DSKV_ASSERT(ticket->open, "request %llu got two last events", (unsigned long long)ticket->id);
    struct dskv_ticket **link = bucket_of(mailbox, &ticket->route, ticket->id);
    while (*link != ticket)
        link = &(*link)->next;
    *link = ticket->next;
    mailbox->n_tickets--;
    mailbox->bytes -= ticket->bytes;
    ticket->open = 0;
    unref(ticket);
}

static void append(struct dskv_mailbox *mailbox, enum dskv_message_kind kind, struct dskv_ticket *ticket,
                   struct dskv_message *message)
{
    message->kind = kind;
    message->ticket = ticket;
    if (ticket)
        ticket->n_refs++;
    *mailbox->inbox_end = message;
    mailbox->inbox_end = &message->next;
    pthread_cond_signal(&mailbox->wake);
}

/* ---- the front thread's side ------------------------------------------------------------------------------------ */

/* What a request makes the server hold. */
static size_t held_bytes(const struct dskv_request *request)
{
    size_t bytes = (size_t)request->n_free * sizeof *request->free;
    switch (request->op) {
    case DSKV_OP_FORWARD:
        for (int32_t i = 0; i < request->forward.n; i++)
            bytes += request->forward.sequences[i].tokens.bytes;
        return bytes;
    case DSKV_OP_VERIFY: return bytes + request->verify.tokens.bytes + request->verify.draft.bytes;
    case DSKV_OP_GENERATE: return bytes + request->generate.tokens.bytes;
    case DSKV_OP_IMPORT: return bytes + request->import_.tokens.bytes;
    case DSKV_OP_PART: return bytes + request->part.part.data.bytes;
    case DSKV_OP_FREE: return bytes + (size_t)request->free_caches.n * sizeof *request->free_caches.caches;
    default: return bytes;
    }
}

static int is_follower(enum dskv_op op)
{
    return op == DSKV_OP_PART || op == DSKV_OP_CREDIT || op == DSKV_OP_COMMIT;
}

static enum dskv_code fail_busy(struct dskv_error *error, int32_t limit, const char *what)
{
    dskv_fail(error, DSKV_BUSY, "%d %s wait, no more are taken", (int)limit, what);
    dskv_error_set(error, DSKV_HAS_LIMIT, limit);
    return DSKV_BUSY;
}

static enum dskv_code check_room(const struct dskv_mailbox *mailbox, size_t bytes, struct dskv_error *error)
{
    if (mailbox->bytes + bytes <= DSKV_MAX_QUEUED_BYTES)
        return DSKV_OK;
    dskv_fail(error, DSKV_BUSY, "requests of %zu bytes wait, %zu more exceed the limit", mailbox->bytes, bytes);
    dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_QUEUED_BYTES);
    return DSKV_BUSY;
}

static enum dskv_code check_request(struct dskv_mailbox *mailbox, const struct dskv_route *route,
                                    const struct dskv_request *request, size_t bytes, struct dskv_error *error)
{
    if (mailbox->failed)
        return dskv_fail(error, DSKV_INTERNAL, "the server is ending: %s", mailbox->failure.message);
    if (mailbox->phase != DSKV_PHASE_SERVE)
        return dskv_fail(error, DSKV_DRAINING, "the server is ending and takes no new work");
    if (find_ticket(mailbox, route, request->id)) {
        dskv_fail(error, DSKV_BAD_VALUE, "a request with the id %llu is in flight", (unsigned long long)request->id);
        dskv_error_set_field(error, "id");
        return DSKV_BAD_VALUE;
    }
    if (mailbox->n_tickets >= DSKV_MAX_QUEUED_REQUESTS)
        return fail_busy(error, DSKV_MAX_QUEUED_REQUESTS, "requests");
    return check_room(mailbox, bytes, error);
}

static enum dskv_code submit_request(struct dskv_mailbox *mailbox, const struct dskv_route *route,
                                     struct dskv_message *message, size_t bytes, struct dskv_error *error)
{
    const struct dskv_request *request = &message->request;
    enum dskv_code code = check_request(mailbox, route, request, bytes, error);
    if (code)
        return code;
    struct dskv_ticket *ticket = dskv_calloc(1, sizeof *ticket);
    ticket->route = *route;
    ticket->id = request->id;
    ticket->op = request->op;
    ticket->deadline_us = INT64_MAX;
    if (request->deadline_ms)
        ticket->deadline_us = dskv_mailbox_now_us() + (int64_t)request->deadline_ms * 1000;
    ticket->bytes = bytes;
    ticket->credits = DSKV_MAX_CREDITS / 2;
    ticket->n_refs = ticket->open = 1;
    struct dskv_ticket **bucket = bucket_of(mailbox, route, request->id);
    ticket->next = *bucket;
    *bucket = ticket;
    mailbox->n_tickets++;
    mailbox->n_unbegun++;
    mailbox->bytes += bytes;
    append(mailbox, DSKV_MESSAGE_REQUEST, ticket, message);
    return DSKV_OK;
}

static enum dskv_code submit_follower(struct dskv_mailbox *mailbox, const struct dskv_route *route,
                                      struct dskv_message *message, size_t bytes, struct dskv_error *error)
{
    const struct dskv_request *request = &message->request;
    uint64_t id = request->op == DSKV_OP_PART     ? request->part.request
                  : request->op == DSKV_OP_CREDIT ? request->credit.request
                                                  : request->commit.request;
    enum dskv_op wanted = request->op == DSKV_OP_CREDIT ? DSKV_OP_EXPORT : DSKV_OP_IMPORT;
    struct dskv_ticket *ticket = find_ticket(mailbox, route, id);
    if (!ticket || ticket->op != wanted) {
        dskv_fail(error, DSKV_BAD_VALUE, "no %s with the id %llu is in flight", dskv_op_name(wanted),
                  (unsigned long long)id);
        dskv_error_set_field(error, "request");
        return DSKV_BAD_VALUE;
    }
    if (request->op == DSKV_OP_PART && ticket->credits <= 0) { /* what is beyond the credits is not even kept */
        dskv_request_clear(&message->request);
        if (ticket->credits-- == 0)
            append(mailbox, DSKV_MESSAGE_OVERRUN, ticket, message);
        else
            free(message);
        return DSKV_OK;
    }
    if (ticket->n_refs > DSKV_MAX_QUEUED_FOLLOWERS)
        return fail_busy(error, DSKV_MAX_QUEUED_FOLLOWERS, "messages for this request");
    enum dskv_code code = check_room(mailbox, bytes, error);
    if (code)
        return code;
    ticket->credits -= request->op == DSKV_OP_PART;
    message->bytes = bytes;
    mailbox->bytes += bytes;
    append(mailbox, DSKV_MESSAGE_FOLLOW, ticket, message);
    return DSKV_OK;
}

enum dskv_code dskv_mailbox_submit(struct dskv_mailbox *mailbox, const struct dskv_route *route,
                                   struct dskv_request *request, struct dskv_error *error)
{
    struct dskv_message *message = dskv_calloc(1, sizeof *message);
    message->request = *request;
    size_t bytes = held_bytes(request);
    pthread_mutex_lock(&mailbox->mutex);
    enum dskv_code code = is_follower(request->op) ? submit_follower(mailbox, route, message, bytes, error)
                                                   : submit_request(mailbox, route, message, bytes, error);
    pthread_mutex_unlock(&mailbox->mutex);
    if (code)
        free(message);
    return code;
}

int dskv_mailbox_cancel(struct dskv_mailbox *mailbox, const struct dskv_route *route, uint64_t id)
{
    pthread_mutex_lock(&mailbox->mutex);
    struct dskv_ticket *ticket = find_ticket(mailbox, route, id);
    if (ticket && !ticket->cancelled) {
        append(mailbox, DSKV_MESSAGE_CANCEL, ticket, dskv_calloc(1, sizeof(struct dskv_message)));
        ticket->cancelled = 1;
    }
    pthread_mutex_unlock(&mailbox->mutex);
    return ticket != NULL;
}

/* The last message that waits renews the same session: one note says all that many pings say. */
static int is_noted(const struct dskv_mailbox *mailbox, const struct dskv_request *request)
{
    if (!mailbox->inbox || request->n_free)
        return 0;
    const struct dskv_message *last =
        (const void *)((const char *)mailbox->inbox_end - offsetof(struct dskv_message, next));
    return last->kind == DSKV_MESSAGE_NOTE && last->request.has_session &&
           memcmp(&last->request.session, &request->session, sizeof request->session) == 0;
}

static enum dskv_code submit_note(struct dskv_mailbox *mailbox, struct dskv_message *message, struct dskv_error *error)
{
    if (mailbox->n_notes >= DSKV_MAX_QUEUED_NOTES)
        return fail_busy(error, DSKV_MAX_QUEUED_NOTES, "sessions to renew and lists of caches to free");
    enum dskv_code code = check_room(mailbox, message->bytes, error);
    if (code)
        return code;
    mailbox->n_notes++;
    mailbox->bytes += message->bytes;
    append(mailbox, DSKV_MESSAGE_NOTE, NULL, message);
    return DSKV_OK;
}

enum dskv_code dskv_mailbox_note(struct dskv_mailbox *mailbox, const struct dskv_request *request,
                                 struct dskv_error *error)
{
    if (!request->has_session && !request->n_free)
        return DSKV_OK;
    size_t ids_bytes = (size_t)request->n_free * sizeof *request->free;
    struct dskv_message *message = dskv_calloc(1, sizeof *message + ids_bytes);
    message->request = (struct dskv_request){.op = request->op,
                                             .has_session = request->has_session,
                                             .session = request->session,
                                             .n_free = request->n_free,
                                             .free = message->ids};
    message->bytes = ids_bytes;
    if (ids_bytes)
        memcpy(message->ids, request->free, ids_bytes);
    pthread_mutex_lock(&mailbox->mutex);
    int is_needless = is_noted(mailbox, request);
    enum dskv_code code = is_needless ? DSKV_OK : submit_note(mailbox, message, error);
    pthread_mutex_unlock(&mailbox->mutex);
    if (is_needless || code)
        free(message);
    return code;
}

void dskv_mailbox_route_lost(struct dskv_mailbox *mailbox, const struct dskv_route *route)
{
    pthread_mutex_lock(&mailbox->mutex);
    for (int i = 0; i < N_BUCKETS; i++)
        for (struct dskv_ticket *ticket = mailbox->tickets[i]; ticket; ticket = ticket->next)
            if (same_route(&ticket->route, route))
                append(mailbox, DSKV_MESSAGE_LOST, ticket, dskv_calloc(1, sizeof(struct dskv_message)));
    pthread_mutex_unlock(&mailbox->mutex);
}

int dskv_mailbox_event_fd(const struct dskv_mailbox *mailbox)
{
    return mailbox->event_fd;
}

int dskv_mailbox_next_event(struct dskv_mailbox *mailbox, struct dskv_route *route, struct dskv_frames *frames)
{
    pthread_mutex_lock(&mailbox->mutex);
    struct posted *posted = mailbox->outbox.first;
    if (posted) {
        mailbox->outbox.first = posted->next;
        if (!posted->next)
            mailbox->outbox.end = &mailbox->outbox.first;
    } else {
        uint64_t count;
        ssize_t got = read(mailbox->event_fd, &count, sizeof count);
        DSKV_ASSERT(got == sizeof count || errno == EAGAIN, "eventfd: %s", strerror(errno));
    }
    pthread_mutex_unlock(&mailbox->mutex);
    if (!posted)
        return 0;
    *route = posted->route;
    *frames = posted->frames;
    free(posted);
    return 1;
}

void dskv_mailbox_stats(struct dskv_mailbox *mailbox, struct dskv_stats_result *stats)
{
    struct dskv_rank_counters *ranks = stats->ranks;
    pthread_mutex_lock(&mailbox->mutex);
    int64_t backlog_bytes = stats->backlog_bytes;
    *stats = mailbox->stats;
    stats->backlog_bytes = backlog_bytes;
    stats->requests_queued += mailbox->n_unbegun;
    stats->ranks = ranks;
    memcpy(ranks, mailbox->ranks, (size_t)stats->n_ranks * sizeof *ranks);
    pthread_mutex_unlock(&mailbox->mutex);
}

int dskv_mailbox_idle(struct dskv_mailbox *mailbox)
{
    pthread_mutex_lock(&mailbox->mutex);
    int idle = mailbox->n_tickets == 0;
    pthread_mutex_unlock(&mailbox->mutex);
    return idle;
}

void dskv_mailbox_set_phase(struct dskv_mailbox *mailbox, enum dskv_phase phase)
{
    pthread_mutex_lock(&mailbox->mutex);
    if (phase > mailbox->phase)
        mailbox->phase = phase;
    pthread_cond_signal(&mailbox->wake);
    pthread_mutex_unlock(&mailbox->mutex);
}

enum dskv_exit dskv_mailbox_failed(struct dskv_mailbox *mailbox, struct dskv_error *error)
{
    pthread_mutex_lock(&mailbox->mutex);
    enum dskv_exit failed = mailbox->failed;
    if (failed && error)
        *error = mailbox->failure;
    pthread_mutex_unlock(&mailbox->mutex);
    return failed;
}

/* ---- the engine thread's side ----------------------------------------------------------------------------------- */

struct dskv_message *dskv_mailbox_take(struct dskv_mailbox *mailbox, int64_t until_us, enum dskv_phase *phase)
{
    struct timespec until = {.tv_sec = until_us / 1000000, .tv_nsec = until_us % 1000000 * 1000};
    int status = until_us ? 0 : ETIMEDOUT;
    pthread_mutex_lock(&mailbox->mutex);
    while (!mailbox->inbox && mailbox->phase == *phase && status != ETIMEDOUT)
        status = until_us == INT64_MAX ? pthread_cond_wait(&mailbox->wake, &mailbox->mutex)
                                       : pthread_cond_timedwait(&mailbox->wake, &mailbox->mutex, &until);
    struct dskv_message *messages = mailbox->inbox;
    mailbox->inbox = NULL;
    mailbox->inbox_end = &mailbox->inbox;
    *phase = mailbox->phase;
    pthread_mutex_unlock(&mailbox->mutex);
    return messages;
}

void dskv_mailbox_discard(struct dskv_mailbox *mailbox, struct dskv_message **message)
{
    struct dskv_message *m = *message;
    if (m->kind != DSKV_MESSAGE_NOTE && !m->taken)
        dskv_request_clear(&m->request);
    pthread_mutex_lock(&mailbox->mutex);
    mailbox->n_unbegun -= m->kind == DSKV_MESSAGE_REQUEST;
    mailbox->n_notes -= m->kind == DSKV_MESSAGE_NOTE;
    mailbox->bytes -= m->bytes;
    unref(m->ticket);
    pthread_mutex_unlock(&mailbox->mutex);
    free(m);
    *message = NULL;
}

void dskv_mailbox_post(struct dskv_mailbox *mailbox, struct dskv_ticket *ticket, struct dskv_frames *frames, int last)
{
    struct posted *posted = dskv_calloc(1, sizeof *posted);
    posted->ticket = ticket;
    posted->route = ticket->route;
    posted->frames = *frames;
    posted->last = last;
    *frames = (struct dskv_frames){0};
    *mailbox->waiting.end = posted;
    mailbox->waiting.end = &posted->next;
}

void dskv_mailbox_publish(struct dskv_mailbox *mailbox, const struct dskv_stats_result *stats)
{
    pthread_mutex_lock(&mailbox->mutex);
    memcpy(mailbox->ranks, stats->ranks, (size_t)stats->n_ranks * sizeof *mailbox->ranks);
    mailbox->stats = *stats;
    int had_none = !mailbox->outbox.first;
    if (mailbox->waiting.first) {
        for (struct posted *posted = mailbox->waiting.first; posted; posted = posted->next) {
            if (posted->last)
                close_ticket(mailbox, posted->ticket);
            posted->ticket = NULL;
        }
        *mailbox->outbox.end = mailbox->waiting.first;
        mailbox->outbox.end = mailbox->waiting.end;
        mailbox->waiting.first = NULL;
        mailbox->waiting.end = &mailbox->waiting.first;
    }
    int wake = (had_none && mailbox->outbox.first) || mailbox->failed;
    pthread_mutex_unlock(&mailbox->mutex);
    uint64_t one = 1;
    if (wake && write(mailbox->event_fd, &one, sizeof one) != sizeof one)
        DSKV_ASSERT(errno == EAGAIN, "eventfd: %s", strerror(errno));
}

void dskv_mailbox_give_credit(struct dskv_mailbox *mailbox, struct dskv_ticket *ticket)
{
    pthread_mutex_lock(&mailbox->mutex);
    ticket->credits++;
    pthread_mutex_unlock(&mailbox->mutex);
}

void dskv_mailbox_fail(struct dskv_mailbox *mailbox, enum dskv_exit code, const struct dskv_error *error)
{
    pthread_mutex_lock(&mailbox->mutex);
    mailbox->failed = code;
    mailbox->failure = *error;
    pthread_mutex_unlock(&mailbox->mutex);
}
