/* Sessions: who owns caches, and for how long.
 *
 * A session is a random secret that `hello` gives out.  Every request that names it renews its lease; after `lease_s`
 * seconds of silence (0: never) it ends.  A session with tasks under way is not silent.  The list of what a session
 * owns hangs here, but only caches.c knows what caches are.
 */
#ifndef DSKV_DAEMON_SESSION_H
#define DSKV_DAEMON_SESSION_H

#include "ipc/message.h"

#include <stdint.h>

struct dskv_cache;

struct dskv_session {
    struct dskv_id id;
    int64_t heard_us; /* of the monotonic clock */
    int32_t n_tasks;  /* requests under way */
    int32_t n_caches;
    struct dskv_cache *caches;          /* of daemon/cache.c */
    struct dskv_session *older, *newer; /* among the silent ones, by heard_us */
    struct dskv_session *next;          /* of the hash bucket */
};

struct dskv_sessions;

struct dskv_sessions *dskv_sessions_open(int64_t lease_s);
/* The sessions must own nothing any more. */
void dskv_sessions_close(struct dskv_sessions **sessions);
int32_t dskv_sessions_count(const struct dskv_sessions *sessions);

/* A new session.  When the table is full, the longest silent session that owns nothing gives way; null when there is
 * none. */
struct dskv_session *dskv_sessions_begin(struct dskv_sessions *sessions, int64_t now_us);
/* Null when there is none of this id. */
struct dskv_session *dskv_sessions_find(const struct dskv_sessions *sessions, const struct dskv_id *id);
void dskv_session_renew(struct dskv_sessions *sessions, struct dskv_session *session, int64_t now_us);
/* A task of this session begins, or ends and renews it. */
void dskv_session_task_begin(struct dskv_sessions *sessions, struct dskv_session *session);
void dskv_session_task_end(struct dskv_sessions *sessions, struct dskv_session *session, int64_t now_us);

/* The longest silent session if its lease is over, else null; the caller frees its caches, then ends it. */
struct dskv_session *dskv_sessions_expired(const struct dskv_sessions *sessions, int64_t now_us);
void dskv_sessions_end(struct dskv_sessions *sessions, struct dskv_session *session);
/* When the next lease ends; INT64_MAX: none will. */
int64_t dskv_sessions_next_us(const struct dskv_sessions *sessions);
/* Any session, or null when there is none: for the end of the server. */
struct dskv_session *dskv_sessions_any(const struct dskv_sessions *sessions);

#endif
