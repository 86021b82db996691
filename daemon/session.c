#include "daemon/session.h"

#include "base/memory.h"
#include "daemon/random.h"

#include <stdlib.h>
#include <string.h>

#define N_BUCKETS 1024

struct dskv_sessions {
    int64_t lease_us; /* 0: for ever */
    int32_t n;
    struct dskv_session *oldest, *newest; /* the silent ones */
    struct dskv_session *buckets[N_BUCKETS];
};

static size_t bucket_of(const struct dskv_id *id)
{
    uint64_t hash; /* ids are random: their first bytes are a hash */
    memcpy(&hash, id->bytes, sizeof hash);
    return hash % N_BUCKETS;
}

static void link_newest(struct dskv_sessions *sessions, struct dskv_session *session)
{
    session->older = sessions->newest;
    session->newer = NULL;
    if (sessions->newest)
        sessions->newest->newer = session;
    else
        sessions->oldest = session;
    sessions->newest = session;
}

static void unlink_silent(struct dskv_sessions *sessions, struct dskv_session *session)
{
    if (session->older)
        session->older->newer = session->newer;
    else
        sessions->oldest = session->newer;
    if (session->newer)
        session->newer->older = session->older;
    else
        sessions->newest = session->older;
    session->older = session->newer = NULL;
}

struct dskv_sessions *dskv_sessions_open(int64_t lease_s)
{
    struct dskv_sessions *sessions = dskv_calloc(1, sizeof *sessions);
    sessions->lease_us = lease_s * 1000000;
    return sessions;
}

void dskv_sessions_close(struct dskv_sessions **sessions)
{
    if (!*sessions)
        return;
    for (struct dskv_session *session; (session = dskv_sessions_any(*sessions));)
        dskv_sessions_end(*sessions, session);
    free(*sessions);
    *sessions = NULL;
}

int32_t dskv_sessions_count(const struct dskv_sessions *sessions)
{
    return sessions->n;
}

struct dskv_session *dskv_sessions_begin(struct dskv_sessions *sessions, int64_t now_us)
{
    if (sessions->n >= DSKV_MAX_SESSIONS) {
        struct dskv_session *idle = sessions->oldest;
        while (idle && idle->n_caches)
            idle = idle->newer;
        if (!idle)
            return NULL;
        dskv_sessions_end(sessions, idle);
    }
    struct dskv_session *session = dskv_calloc(1, sizeof *session);
    dskv_random_bytes(session->id.bytes, sizeof session->id.bytes);
    session->heard_us = now_us;
    size_t bucket = bucket_of(&session->id);
    session->next = sessions->buckets[bucket];
    sessions->buckets[bucket] = session;
    sessions->n++;
    link_newest(sessions, session);
    return session;
}

struct dskv_session *dskv_sessions_find(const struct dskv_sessions *sessions, const struct dskv_id *id)
{
    struct dskv_session *session = sessions->buckets[bucket_of(id)];
    while (session && memcmp(session->id.bytes, id->bytes, sizeof id->bytes) != 0)
        session = session->next;
    return session;
}

void dskv_session_renew(struct dskv_sessions *sessions, struct dskv_session *session, int64_t now_us)
{
    session->heard_us = now_us;
    if (session->n_tasks)
        return;
    unlink_silent(sessions, session);
    link_newest(sessions, session);
}

void dskv_session_task_begin(struct dskv_sessions *sessions, struct dskv_session *session)
{
    if (session->n_tasks++ == 0)
        unlink_silent(sessions, session);
}

void dskv_session_task_end(struct dskv_sessions *sessions, struct dskv_session *session, int64_t now_us)
{
    DSKV_ASSERT(session->n_tasks > 0, "%d tasks", session->n_tasks);
    session->heard_us = now_us;
    if (--session->n_tasks == 0)
        link_newest(sessions, session);
}

struct dskv_session *dskv_sessions_expired(const struct dskv_sessions *sessions, int64_t now_us)
{
    return dskv_sessions_next_us(sessions) <= now_us ? sessions->oldest : NULL;
}

void dskv_sessions_end(struct dskv_sessions *sessions, struct dskv_session *session)
{
    DSKV_ASSERT(session->n_tasks == 0 && session->n_caches == 0, "%d tasks, %d caches", session->n_tasks,
                session->n_caches);
    struct dskv_session **link = &sessions->buckets[bucket_of(&session->id)];
    while (*link != session)
        link = &(*link)->next;
    *link = session->next;
    unlink_silent(sessions, session);
    sessions->n--;
    free(session);
}

int64_t dskv_sessions_next_us(const struct dskv_sessions *sessions)
{
    return sessions->lease_us && sessions->oldest ? sessions->oldest->heard_us + sessions->lease_us : INT64_MAX;
}

struct dskv_session *dskv_sessions_any(const struct dskv_sessions *sessions)
{
    return sessions->oldest;
}
