#include "daemon/task.h"

#include "base/memory.h"
#include "daemon/step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- events ----------------------------------------------------------------------------------------------------- */

void dskv_state_post(struct dskv_state *state, struct dskv_ticket *ticket, struct dskv_event *event)
{
    event->id = ticket->id;
    event->op = ticket->op;
    event->last = event->kind == DSKV_EVENT_RESULT || event->kind == DSKV_EVENT_ERROR;
    struct dskv_frames frames = {0};
    struct dskv_error error;
    enum dskv_code code = dskv_event_encode(event, &frames, &error);
    DSKV_ASSERT(!code, "an event of %s cannot be encoded: %s", dskv_op_name(event->op), error.message);
    state->stats.requests += event->last;
    state->stats.errors += event->kind == DSKV_EVENT_ERROR;
    dskv_mailbox_post(state->mailbox, ticket, &frames, event->last);
}

void dskv_state_refuse(struct dskv_state *state, struct dskv_ticket *ticket, const struct dskv_error *error)
{
    struct dskv_event event = {.kind = DSKV_EVENT_ERROR, .error = *error};
    dskv_state_post(state, ticket, &event);
}

void dskv_state_break(struct dskv_state *state, enum dskv_exit code, const struct dskv_error *error)
{
    if (state->failed)
        return;
    state->failed = code;
    state->failure = *error;
    dskv_mailbox_fail(state->mailbox, code, error);
    struct dskv_error told;
    dskv_fail(&told, DSKV_INTERNAL, "the server is ending: %s", error->message);
    while (state->tasks)
        dskv_task_fail(state, state->tasks, &told);
}

/* ---- the life of a task ----------------------------------------------------------------------------------------- */

static void link_task(struct dskv_state *state, struct dskv_task *task)
{
    task->next = state->tasks;
    if (state->tasks)
        state->tasks->previous = task;
    state->tasks = task;
}

static void unlink_task(struct dskv_state *state, struct dskv_task *task)
{
    if (task->previous)
        task->previous->next = task->next;
    else
        state->tasks = task->next;
    if (task->next)
        task->next->previous = task->previous;
    task->previous = task->next = NULL;
}

void dskv_task_begin(struct dskv_state *state, const struct dskv_task_kind *kind, struct dskv_ticket *ticket,
                     struct dskv_session *session, struct dskv_request *request)
{
    struct dskv_task *task = dskv_calloc(1, kind->bytes);
    task->kind = kind;
    task->ticket = ticket;
    task->session = session;
    task->request = *request;
    task->heard_us = state->now_us;
    ticket->task = task;
    if (session)
        dskv_session_task_begin(state->sessions, session);
    link_task(state, task);
    struct dskv_error error;
    if (kind->begin(state, task, &error))
        dskv_task_fail(state, task, &error);
}

static void end_task(struct dskv_state *state, struct dskv_task *task, struct dskv_event *event)
{
    DSKV_ASSERT(!task->ended, "a %s ended twice", dskv_op_name(task->request.op));
    task->ended = 1;
    dskv_state_post(state, task->ticket, event);
    task->ticket->task = NULL;
    task->ticket = NULL;
    dskv_scheduler_remove(&task->group);
    dskv_step_forget(state->step, task);
    state->reply_bytes -= task->reply_bytes;
    state->n_promised_caches -= task->n_promised_caches;
    if (task->session)
        dskv_session_task_end(state->sessions, task->session, state->now_us);
    unlink_task(state, task);
    task->next = state->ended;
    state->ended = task;
}

void dskv_task_succeed(struct dskv_state *state, struct dskv_task *task, struct dskv_event *event)
{
    event->kind = DSKV_EVENT_RESULT;
    end_task(state, task, event);
}

void dskv_task_fail(struct dskv_state *state, struct dskv_task *task, const struct dskv_error *error)
{
    struct dskv_event event = {.kind = DSKV_EVENT_ERROR, .error = *error};
    end_task(state, task, &event);
}

void dskv_task_reap(struct dskv_state *state)
{
    while (state->ended) {
        struct dskv_task *task = state->ended;
        state->ended = task->next;
        task->kind->close(state, task);
        dskv_request_clear(&task->request);
        free(task);
    }
}

/* ---- checks ----------------------------------------------------------------------------------------------------- */

int32_t dskv_tensor_count(const struct dskv_wire_tensor *tensor)
{
    return tensor->n_dims ? (int32_t)tensor->shape[0] : 0;
}

struct dskv_wire_tensor dskv_tensor_1d(const void *data, enum dskv_dtype dtype, int64_t n)
{
    return (struct dskv_wire_tensor){
        .data = data, .dtype = dtype, .n_dims = 1, .shape = {n}, .bytes = (size_t)n * dskv_dtype_bytes(dtype)};
}

struct dskv_wire_tensor dskv_tensor_2d(const void *data, enum dskv_dtype dtype, int64_t rows, int64_t cols)
{
    return (struct dskv_wire_tensor){.data = data,
                                     .dtype = dtype,
                                     .n_dims = 2,
                                     .shape = {rows, cols},
                                     .bytes = (size_t)rows * (size_t)cols * dskv_dtype_bytes(dtype)};
}

enum dskv_code dskv_task_find_prefix(struct dskv_state *state, const struct dskv_prefix *prefix, const char *field,
                                     struct dskv_cache **cache, struct dskv_error *error)
{
    *cache = NULL;
    if (!prefix->present)
        return DSKV_OK;
    struct dskv_cache *found = dskv_caches_find(state->caches, &prefix->cache);
    if (!found) {
        dskv_fail(error, DSKV_UNKNOWN_CACHE,
                  "the cache was freed, its session was silent for longer than --cache-lease, the server was started "
                  "again, or it never existed here");
        dskv_error_set_field(error, field);
        return DSKV_UNKNOWN_CACHE;
    }
    if (prefix->length > found->length) {
        dskv_fail(error, DSKV_CUT_PAST_END, "%d tokens of a cache were named that has %d", prefix->length,
                  found->length);
        dskv_error_set(error, DSKV_HAS_LENGTH, prefix->length);
        dskv_error_set(error, DSKV_HAS_LIMIT, found->length);
        dskv_error_set_field(error, field);
        return DSKV_CUT_PAST_END;
    }
    if (prefix->has_check && prefix->check != dskv_cache_check(state->blocks, found, prefix->length)) {
        dskv_fail(error, DSKV_BAD_VALUE, "the cache's first %d tokens are not those that the check was made of",
                  prefix->length);
        dskv_error_set_field(error, "check");
        return DSKV_BAD_VALUE;
    }
    *cache = found;
    return DSKV_OK;
}

enum dskv_code dskv_task_check_tokens(struct dskv_state *state, const struct dskv_wire_tensor *tokens, const char *name,
                                      struct dskv_error *error)
{
    const char *dot = strrchr(name, '.');
    const int32_t *ids = tokens->data;
    int32_t vocab = state->info->model.vocab;
    for (int32_t i = 0; i < dskv_tensor_count(tokens); i++)
        if (ids[i] < 0 || ids[i] >= vocab) {
            dskv_fail(error, DSKV_TOKEN_OUT_OF_RANGE, "%s[%d] is %d, the vocabulary's ids are 0 .. %d", name, i, ids[i],
                      vocab - 1);
            dskv_error_set(error, DSKV_HAS_INDEX, i);
            dskv_error_set(error, DSKV_HAS_LIMIT, vocab);
            dskv_error_set_field(error, dot ? dot + 1 : name);
            return DSKV_TOKEN_OUT_OF_RANGE;
        }
    return DSKV_OK;
}

enum dskv_code dskv_task_check_length(struct dskv_state *state, int64_t length, struct dskv_error *error)
{
    if (length <= state->info->max_model_len)
        return DSKV_OK;
    dskv_fail(error, DSKV_TOO_LONG, "%lld tokens, prefix included, exceed the limit of %d", (long long)length,
              state->info->max_model_len);
    dskv_error_set(error, DSKV_HAS_LENGTH, length);
    dskv_error_set(error, DSKV_HAS_LIMIT, state->info->max_model_len);
    return DSKV_TOO_LONG;
}

enum dskv_code dskv_task_check_ids(const char *what, int64_t n, struct dskv_error *error)
{
    int64_t bytes = n * (int64_t)sizeof(int32_t);
    if (bytes <= DSKV_MAX_FRAME_BYTES)
        return DSKV_OK;
    dskv_fail(error, DSKV_REPLY_TOO_LARGE, "%s alone would take %lld bytes, the limit is %d", what, (long long)bytes,
              DSKV_MAX_FRAME_BYTES);
    dskv_error_set(error, DSKV_HAS_NEEDED, bytes);
    dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_FRAME_BYTES);
    return DSKV_REPLY_TOO_LARGE;
}

enum dskv_code dskv_task_promise(struct dskv_state *state, struct dskv_task *task, int64_t reply_bytes,
                                 int32_t n_caches, struct dskv_error *error)
{
    if (state->reply_bytes + reply_bytes > DSKV_MAX_BACKLOG_BYTES) {
        dskv_fail(error, DSKV_BUSY, "running requests hold %lld bytes of replies, %lld more exceed the limit",
                  (long long)state->reply_bytes, (long long)reply_bytes);
        dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_BACKLOG_BYTES);
        return DSKV_BUSY;
    }
    int64_t all_caches = (int64_t)dskv_caches_count(state->caches) + state->n_promised_caches + n_caches;
    if (all_caches > DSKV_MAX_CACHES) {
        dskv_fail(error, DSKV_BUSY, "there would be %lld caches, the limit is %d", (long long)all_caches,
                  DSKV_MAX_CACHES);
        dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_CACHES);
        return DSKV_BUSY;
    }
    state->reply_bytes += task->reply_bytes = reply_bytes;
    state->n_promised_caches += task->n_promised_caches = n_caches;
    return DSKV_OK;
}

enum dskv_code dskv_task_admit(struct dskv_state *state, struct dskv_task *task, struct dskv_error *error)
{
    int64_t n_needed = 0;
    for (int32_t i = 0; i < task->group.n_sequences; i++)
        n_needed += task->group.sequences[i]->n_needed;
    enum dskv_code code = dskv_blocks_reserve(state->blocks, n_needed, error);
    if (code)
        return code;
    for (int32_t i = 0; i < task->group.n_sequences; i++)
        task->group.sequences[i]->n_reserved = task->group.sequences[i]->n_needed;
    dskv_scheduler_add(&state->scheduler, &task->group);
    return DSKV_OK;
}

/* ---- ends ------------------------------------------------------------------------------------------------------- */

void dskv_task_describe_cache(const struct dskv_state *state, const struct dskv_cache *cache,
                              struct dskv_cache_ref *ref)
{
    *ref = (struct dskv_cache_ref){.present = 1, .id = cache->id, .length = cache->length};
    snprintf(ref->origin, sizeof ref->origin, "%s", cache->foreign ? "foreign" : state->info->numerics_id);
}

void dskv_task_make_cache(struct dskv_state *state, struct dskv_task *task, struct dskv_sequence *sequence,
                          int32_t length, int foreign, struct dskv_cache_ref *ref)
{
    int32_t n_blocks;
    int32_t *blocks = dskv_sequence_end(sequence, length, &n_blocks);
    struct dskv_cache *cache = dskv_caches_add(state->caches, task->session, blocks, n_blocks, length, foreign);
    dskv_task_describe_cache(state, cache, ref);
}

void dskv_task_consume(struct dskv_state *state, const struct dskv_prefix *prefix)
{
    struct dskv_cache *cache = prefix->present ? dskv_caches_find(state->caches, &prefix->cache) : NULL;
    if (cache)
        dskv_caches_free(state->caches, cache);
}

void dskv_task_fail_row(struct dskv_state *state, struct dskv_task *task, const struct dskv_sequence *sequence,
                        int32_t number)
{
    struct dskv_error error;
    dskv_fail(&error, DSKV_NOT_FINITE, "the logits at position %d are infinite or not numbers",
              sequence->prefix_length + number);
    dskv_error_set(&error, DSKV_HAS_INDEX, sequence->index);
    dskv_task_fail(state, task, &error);
}
