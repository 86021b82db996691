/* The inside of the toy server: its state, and the answers to requests (test_client_toy.c), which know no thread. */
#ifndef DSKV_TESTS_TEST_CLIENT_TOY_H
#define DSKV_TESTS_TEST_CLIENT_TOY_H

#include "test_client_server.h"

#include "ipc/transport.h"

#include <pthread.h>

enum { TOY_CACHES = 256 };

struct toy_cache {
    int alive;
    struct dskv_id id;
    int32_t length;
    int32_t *tokens;
    int foreign;
};

struct toy_import { /* the one in flight */
    int active;
    uint64_t id;
    int32_t length, n_parts, n_missing;
    int32_t *tokens;
};

struct toy_export { /* the one in flight */
    int active;
    uint64_t id;
    int32_t length, next, n_parts, credits;
};

struct toy_server {
    char directory[64], endpoint[96];
    struct dskv_transport *transport;
    pthread_t thread;
    pthread_mutex_t lock; /* of everything below */
    int wake, stop;
    enum toy_mood mood;
    int n_cancels, n_requests, n_hellos;
    uint32_t next_id;
    struct dskv_route route; /* of the request in hand */
    struct toy_cache caches[TOY_CACHES];
    struct toy_import import;
    struct toy_export export;
    uint64_t generating; /* a generate that waits for its cancel */
    struct dskv_request late;
    int has_late;
};

/* Sends what answers the request in hand to server->route. */
void toy_answer(struct toy_server *server, const struct dskv_request *request);
void toy_send_error(struct toy_server *server, const struct dskv_request *request, enum dskv_code code,
                    const char *sentence);

#endif
