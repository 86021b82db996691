/* Local: a server over the fake engine in this process, and clients of it without a socket.
 *
 * Requests go through the codec both ways, as they would over the wire, so a test says only what a client can say.
 */
#ifndef DSKV_TESTS_SIM_LOCAL_H
#define DSKV_TESTS_SIM_LOCAL_H

#include "daemon/server.h"
#include "sim/fake_engine.h"

struct local_event {
    struct dskv_route route;
    struct dskv_event event;
    struct local_event *next;
};

struct local {
    struct dskv_engine *engine;
    int runs_at_submit; /* what the options or the environment say */
    struct dskv_config config;
    struct dskv_server *server;
    struct local_event *events; /* that nobody has asked for yet, oldest first */
    struct dskv_rank_counters ranks[1];
};

struct local_client {
    struct local *local;
    struct dskv_route route;
    uint64_t last_id;
    int has_session;
    struct dskv_id session;
};

/* Zeros in the options mean: 64 blocks of 16, context 512, 64 tokens and 8 sequences a step, 16 rows of logits, parts
 * of 8 tokens, f32.  Steps are queued ahead where the options say runs_queued, or the environment. */
void local_open(struct local *local, const struct fake_engine_options *options, int32_t lease_s);
void local_close(struct local *local);
struct dskv_stats_result local_stats(struct local *local);

/* Says hello. */
void local_connect(struct local *local, uint8_t name, struct local_client *client);
/* Sends a request whose version, id and session are filled in; 0 when it was refused (*error says why). */
uint64_t local_send(struct local_client *client, const struct dskv_request *request, struct dskv_error *error);
/* The next event of a request; ends the program when none comes in 10 s.  The caller clears it. */
struct dskv_event local_wait(struct local_client *client, uint64_t id);
/* 1 when an event of the request is there, without waiting. */
int local_peek(struct local_client *client, uint64_t id);
/* Sends, passes over all but the last event, and returns that. */
struct dskv_event local_call(struct local_client *client, const struct dskv_request *request);

struct dskv_wire_tensor local_tokens(const int32_t *ids, int32_t n);
struct dskv_prefix local_prefix(const struct dskv_cache_ref *cache, int32_t length);

/* A forward of one sequence, and the cache alone that it makes; an error ends the program.  prefix may be null. */
struct dskv_event local_forward(struct local_client *client, const struct dskv_prefix *prefix, const int32_t *tokens,
                                int32_t n, struct dskv_want want);
struct dskv_cache_ref local_cache(struct local_client *client, const struct dskv_prefix *prefix, const int32_t *tokens,
                                  int32_t n);

/* Reads a cache's keys and values by an export; returns the error's code. */
enum dskv_code local_export(struct local_client *client, const struct dskv_id *cache, int32_t length, int32_t *tokens,
                            struct fake_kv *kv);
/* Makes a cache of them; skip_part: this part is left out (-1: none). */
enum dskv_code local_import(struct local_client *client, const int32_t *tokens, int32_t length,
                            const struct fake_kv *kv, int skip_part, struct dskv_cache_ref *cache,
                            struct dskv_error *error);

#endif
