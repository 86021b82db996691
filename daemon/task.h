/* Task: a request under way on the engine thread, from its beginning to its last event.
 *
 * state: all that the engine thread owns.  A task kind is a table of what happens to it; kinds are task_forward.c,
 * task_verify.c, task_generate.c, task_export.c and task_import.c.  Every task ends in exactly one of dskv_task_succeed
 * and dskv_task_fail, and changes nothing before it: caches are made, and consumed ones freed, in the moment of
 * success. Knows no thread and no frame; the encoded events go to the mailbox.
 */
#ifndef DSKV_DAEMON_TASK_H
#define DSKV_DAEMON_TASK_H

#include "daemon/cache.h"
#include "daemon/config.h"
#include "daemon/mailbox.h"
#include "daemon/random.h"
#include "daemon/scheduler.h"
#include "parallel/engine.h"

struct dskv_step;

struct dskv_state {
    struct dskv_engine *engine;
    struct dskv_step *step; /* the steps under way */
    const struct dskv_engine_info *info;
    struct dskv_mailbox *mailbox;
    struct dskv_blocks *blocks;
    struct dskv_sessions *sessions;
    struct dskv_caches *caches;
    struct dskv_scheduler scheduler;
    struct dskv_seeds seeds;
    struct dskv_task *tasks;        /* those that have not ended */
    struct dskv_task *ended;        /* to be freed when nothing refers to them any more */
    int64_t reply_bytes;            /* that running tasks have promised to hold */
    int32_t n_promised_caches;      /* that running tasks will make */
    int64_t lease_us;               /* 0: none */
    int64_t now_us;                 /* at the start of this round */
    struct dskv_stats_result stats; /* counters that only grow; the rest is filled in before it is published */
    enum dskv_exit failed;          /* a step or command failed: the job ends */
    struct dskv_error failure;
};

struct dskv_task_kind {
    size_t bytes; /* of the kind's struct, whose first member is struct dskv_task */
    int needs_session;
    int is_transfer; /* moves at the client's pace: when it is silent for a lease, the task fails */
    /* Checks everything and takes what it will need, or fails and leaves the rest to close. */
    enum dskv_code (*begin)(struct dskv_state *state, struct dskv_task *task, struct dskv_error *error);
    /* Results of the row of token `number` of a sequence, in order. */
    void (*row)(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence, int32_t number,
                const struct dskv_row_result *result);
    /* A sequence has no more tokens that wait. */
    void (*ran)(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence);
    /* All tokens of a sequence are submitted: whether the one that its last row draws follows them unless its value
     * ends the sequence, so that it can be submitted before it is known.  Null: never. */
    int (*draws_on)(const struct dskv_task *task, const struct dskv_sequence *sequence);
    /* The client cancels; null: fails with DSKV_CANCELLED. */
    void (*cancel)(struct dskv_state *state, struct dskv_task *task);
    /* Part, credit or commit. */
    void (*follow)(struct dskv_state *state, struct dskv_task *task, const struct dskv_request *request);
    /* A bounded piece of work besides steps, done when none is under way; ready says whether there is any.  Null: none
     * ever. */
    int (*ready)(const struct dskv_task *task);
    void (*work)(struct dskv_state *state, struct dskv_task *task);
    /* Frees what the kind owns, its sequences included. */
    void (*close)(struct dskv_state *state, struct dskv_task *task);
};

struct dskv_task {
    const struct dskv_task_kind *kind;
    struct dskv_ticket *ticket;   /* null when ended */
    struct dskv_session *session; /* null: none named */
    struct dskv_request request;
    struct dskv_group group;
    int64_t reply_bytes; /* promised */
    int32_t n_promised_caches;
    int64_t heard_us; /* a transfer's last sign of life */
    int ended;
    struct dskv_task *previous, *next;
};

extern const struct dskv_task_kind dskv_task_forward, dskv_task_verify, dskv_task_generate, dskv_task_export,
    dskv_task_import;

/* Begins a task for a ticket; takes over the request.  An error is posted as the ticket's last event. */
void dskv_task_begin(struct dskv_state *state, const struct dskv_task_kind *kind, struct dskv_ticket *ticket,
                     struct dskv_session *session, struct dskv_request *request);
/* Frees tasks that have ended. */
void dskv_task_reap(struct dskv_state *state);

/* Does what a message asks for (handle.c); the message stays the caller's, but for a request that became a task's. */
void dskv_state_handle(struct dskv_state *state, struct dskv_message *message);

/* Posts an event of a ticket: id, op and last are filled in. */
void dskv_state_post(struct dskv_state *state, struct dskv_ticket *ticket, struct dskv_event *event);
/* Posts an error as a ticket's last event. */
void dskv_state_refuse(struct dskv_state *state, struct dskv_ticket *ticket, const struct dskv_error *error);
/* A command of the engine failed: all tasks fail, nothing more is accepted. */
void dskv_state_break(struct dskv_state *state, enum dskv_exit code, const struct dskv_error *error);

/* ---- for the kinds ---------------------------------------------------------------------------------------------- */

/* The last event; the task is over, but stays in memory until the reap. */
void dskv_task_succeed(struct dskv_state *state, struct dskv_task *task, struct dskv_event *event);
void dskv_task_fail(struct dskv_state *state, struct dskv_task *task, const struct dskv_error *error);

/* The cache that a prefix names (null: none), checked: DSKV_UNKNOWN_CACHE, DSKV_CUT_PAST_END, DSKV_BAD_VALUE (check).
 */
enum dskv_code dskv_task_find_prefix(struct dskv_state *state, const struct dskv_prefix *prefix, const char *field,
                                     struct dskv_cache **cache, struct dskv_error *error);
/* DSKV_TOKEN_OUT_OF_RANGE with index, limit and field: what follows the last dot of the name ("sequences[1].tokens").
 */
enum dskv_code dskv_task_check_tokens(struct dskv_state *state, const struct dskv_wire_tensor *tokens, const char *name,
                                      struct dskv_error *error);
/* DSKV_TOO_LONG with limit and length. */
enum dskv_code dskv_task_check_length(struct dskv_state *state, int64_t length, struct dskv_error *error);
/* DSKV_REPLY_TOO_LARGE when so many 32-bit ids ("the drawn tokens") do not fit one frame. */
enum dskv_code dskv_task_check_ids(const char *what, int64_t n, struct dskv_error *error);
/* DSKV_BUSY when all running tasks would hold too many bytes of replies or make too many caches; else counted until the
 * end. */
enum dskv_code dskv_task_promise(struct dskv_state *state, struct dskv_task *task, int64_t reply_bytes,
                                 int32_t n_caches, struct dskv_error *error);
/* Reserves what the group's sequences need, all or nothing (DSKV_POOL_FULL), and lets them run. */
enum dskv_code dskv_task_admit(struct dskv_state *state, struct dskv_task *task, struct dskv_error *error);
/* Ends a sequence as a cache of this length, and tells what it is. */
void dskv_task_make_cache(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence,
                          int32_t length, int foreign, struct dskv_cache_ref *ref);
void dskv_task_describe_cache(const struct dskv_state *state, const struct dskv_cache *cache,
                              struct dskv_cache_ref *ref);
/* Gives up the prefix's cache, if it still is there. */
void dskv_task_consume(struct dskv_state *state, const struct dskv_prefix *prefix);
/* DSKV_NOT_FINITE for a row. */
void dskv_task_fail_row(struct dskv_state *state, struct dskv_task *task, const struct dskv_sequence *sequence,
                        int32_t number);
int32_t dskv_tensor_count(const struct dskv_wire_tensor *tensor);
struct dskv_wire_tensor dskv_tensor_1d(const void *data, enum dskv_dtype dtype, int64_t n);
struct dskv_wire_tensor dskv_tensor_2d(const void *data, enum dskv_dtype dtype, int64_t rows, int64_t cols);

#endif
