#include "test_client_toy.h"

#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void mumble(struct toy_server *server)
{
    struct dskv_frames frames = {.frames = dskv_calloc(1, sizeof(struct dskv_frame)), .n = 1};
    frames.frames[0] = (struct dskv_frame){.data = dskv_strdup("no event"), .bytes = 8};
    dskv_transport_send(server->transport, &server->route, &frames);
}

/* Answers now, or does what its mood is.  Owns the request. */
static void react(struct toy_server *server, struct dskv_request *request)
{
    server->n_requests++;
    if (server->has_late) {
        server->has_late = 0;
        toy_answer(server, &server->late);
        dskv_request_clear(&server->late);
    }
    if (server->mood == TOY_LATE && request->op != DSKV_OP_CANCEL) {
        server->late = *request;
        server->has_late = 1;
        server->mood = TOY_WELL;
        return;
    }
    if (server->mood == TOY_MUMBLES && request->op != DSKV_OP_CANCEL)
        mumble(server);
    else if (server->mood == TOY_NO_SESSION && request->op != DSKV_OP_HELLO)
        toy_send_error(server, request, DSKV_BAD_VALUE, "no such session");
    else if (server->mood != TOY_SILENT || request->op == DSKV_OP_CANCEL)
        toy_answer(server, request);
    dskv_request_clear(request);
}

static void *serve(void *argument)
{
    struct toy_server *server = argument;
    for (;;) {
        dskv_transport_wait(server->transport, server->wake, -1);
        pthread_mutex_lock(&server->lock);
        int stopping = server->stop;
        struct dskv_frames frames = {0};
        struct dskv_error error;
        while (!stopping && dskv_transport_receive(server->transport, &server->route, &frames, &error)) {
            struct dskv_request request;
            enum dskv_code code = dskv_request_decode(&frames, &request, &error);
            DSKV_ASSERT(!code, "the client sent what cannot be read: %s", error.message);
            react(server, &request);
        }
        pthread_mutex_unlock(&server->lock);
        if (stopping)
            return NULL;
    }
}

static void start(struct toy_server *server)
{
    struct dskv_error error = {0};
    const char *endpoint = server->endpoint;
    server->stop = 0;
    server->wake = eventfd(0, EFD_CLOEXEC);
    enum dskv_exit code = dskv_transport_open(&endpoint, 1, 0, &server->transport, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    int failed = pthread_create(&server->thread, NULL, serve, server);
    DSKV_ASSERT(!failed, "no thread: %d", failed);
}

static void stop(struct toy_server *server)
{
    pthread_mutex_lock(&server->lock);
    server->stop = 1;
    pthread_mutex_unlock(&server->lock);
    uint64_t one = 1;
    ssize_t n = write(server->wake, &one, sizeof one);
    DSKV_ASSERT(n == sizeof one, "%zd", n);
    pthread_join(server->thread, NULL);
    dskv_transport_close(&server->transport, 0);
    close(server->wake);
}

struct toy_server *toy_server_open(void)
{
    struct toy_server *server = dskv_calloc(1, sizeof *server);
    pthread_mutex_init(&server->lock, NULL);
    snprintf(server->directory, sizeof server->directory, "/tmp/dskv-client-XXXXXX");
    DSKV_ASSERT(mkdtemp(server->directory), "no directory %s", server->directory);
    snprintf(server->endpoint, sizeof server->endpoint, "ipc://%s/s", server->directory);
    start(server);
    return server;
}

void toy_server_restart(struct toy_server *server)
{
    stop(server);
    start(server);
}

void toy_server_close(struct toy_server **server)
{
    struct toy_server *closing = *server;
    *server = NULL;
    stop(closing);
    for (int i = 0; i < TOY_CACHES; i++)
        free(closing->caches[i].tokens);
    free(closing->import.tokens);
    if (closing->has_late)
        dskv_request_clear(&closing->late);
    rmdir(closing->directory);
    pthread_mutex_destroy(&closing->lock);
    free(closing);
}

const char *toy_server_endpoint(const struct toy_server *server)
{
    return server->endpoint;
}

void toy_server_set(struct toy_server *server, enum toy_mood mood)
{
    pthread_mutex_lock(&server->lock);
    server->mood = mood;
    pthread_mutex_unlock(&server->lock);
}

static int read_count(struct toy_server *server, const int *count)
{
    pthread_mutex_lock(&server->lock);
    int value = *count;
    pthread_mutex_unlock(&server->lock);
    return value;
}

int toy_server_caches(struct toy_server *server)
{
    int n = 0;
    pthread_mutex_lock(&server->lock);
    for (int i = 0; i < TOY_CACHES; i++)
        n += server->caches[i].alive;
    pthread_mutex_unlock(&server->lock);
    return n;
}

int toy_server_cancels(struct toy_server *server)
{
    return read_count(server, &server->n_cancels);
}

int toy_server_requests(struct toy_server *server)
{
    return read_count(server, &server->n_requests);
}

int toy_server_hellos(struct toy_server *server)
{
    return read_count(server, &server->n_hellos);
}
