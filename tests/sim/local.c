#include "sim/local.h"

#include "base/memory.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define WAIT_MS 10000

/* ---- the server ------------------------------------------------------------------------------------------------- */

static int32_t or_default(int32_t value, int32_t usual)
{
    return value ? value : usual;
}

/* Steps are queued ahead in all tests of a program when the environment says so, and run on the engine at that end. */
static void follow_environment(struct fake_engine_options *options)
{
    const char *when = getenv("DSKV_TEST_QUEUE_AHEAD");
    if (!when)
        return;
    options->runs_at_submit = strcmp(when, "submit") == 0;
    options->runs_queued = 1;
    DSKV_ASSERT(options->runs_at_submit || strcmp(when, "collect") == 0, "DSKV_TEST_QUEUE_AHEAD=%s", when);
}

void local_open(struct local *local, const struct fake_engine_options *options, int32_t lease_s)
{
    struct fake_engine_options all = *options;
    all.n_blocks = or_default(all.n_blocks, 64);
    all.block_tokens = or_default(all.block_tokens, 16);
    all.max_model_len = or_default(all.max_model_len, 512);
    all.max_batch_tokens = or_default(all.max_batch_tokens, 64);
    all.max_sequences = or_default(all.max_sequences, 8);
    all.max_logit_rows = or_default(all.max_logit_rows, 16);
    all.piece_tokens = or_default(all.piece_tokens, 8);
    follow_environment(&all);
    *local = (struct local){.config = {.cache_lease = lease_s, .seed = -1}};
    local->runs_at_submit = all.runs_at_submit;
    local->engine = fake_engine_open(&all);
    struct dskv_error error;
    enum dskv_exit code = dskv_server_open(local->engine, &local->config, &local->server, &error);
    DSKV_ASSERT(!code, "%s", error.message);
}

void local_close(struct local *local)
{
    dskv_server_close(&local->server);
    fake_engine_close(&local->engine);
    while (local->events) {
        struct local_event *event = local->events;
        local->events = event->next;
        dskv_event_clear(&event->event);
        free(event);
    }
}

struct dskv_stats_result local_stats(struct local *local)
{
    struct dskv_stats_result stats = {.n_ranks = 1, .ranks = local->ranks};
    dskv_server_stats(local->server, &stats);
    return stats;
}

/* ---- messages --------------------------------------------------------------------------------------------------- */

uint64_t local_send(struct local_client *client, const struct dskv_request *request, struct dskv_error *error)
{
    struct dskv_request sent = *request, received;
    struct dskv_frames frames = {0};
    struct dskv_error own;
    sent.version = DSKV_PROTOCOL_VERSION;
    sent.id = ++client->last_id;
    if (client->has_session) {
        sent.has_session = 1;
        sent.session = client->session;
    }
    enum dskv_code code = dskv_request_encode(&sent, &frames, &own);
    DSKV_ASSERT(!code, "%s", own.message);
    code = dskv_request_decode(&frames, &received, &own);
    DSKV_ASSERT(!code, "%s", own.message);
    code = dskv_server_submit(client->local->server, &client->route, &received, error ? error : &own);
    if (!code)
        return sent.id;
    dskv_request_clear(&received);
    return 0;
}

static int same_route(const struct dskv_route *a, const struct dskv_route *b)
{
    return a->n == b->n && memcmp(a->bytes, b->bytes, a->n) == 0;
}

/* Takes all that has come. */
static void collect(struct local *local)
{
    struct dskv_route route;
    struct dskv_frames frames;
    struct local_event **end = &local->events;
    while (*end)
        end = &(*end)->next;
    while (dskv_server_next_event(local->server, &route, &frames)) {
        struct dskv_error error;
        *end = dskv_calloc(1, sizeof **end);
        (*end)->route = route;
        enum dskv_code code = dskv_event_decode(&frames, &(*end)->event, &error);
        DSKV_ASSERT(!code, "%s", error.message);
        end = &(*end)->next;
    }
}

static struct local_event **find(struct local_client *client, uint64_t id)
{
    struct local_event **link = &client->local->events;
    while (*link && !((*link)->event.id == id && same_route(&(*link)->route, &client->route)))
        link = &(*link)->next;
    return link;
}

int local_peek(struct local_client *client, uint64_t id)
{
    collect(client->local);
    return *find(client, id) != NULL;
}

struct dskv_event local_wait(struct local_client *client, uint64_t id)
{
    DSKV_ASSERT(id, "the request was refused");
    while (!local_peek(client, id)) {
        struct pollfd fd = {.fd = dskv_server_event_fd(client->local->server), .events = POLLIN};
        int n = poll(&fd, 1, WAIT_MS);
        DSKV_ASSERT(n > 0 || (n < 0 && errno == EINTR), "no event of request %llu", (unsigned long long)id);
    }
    struct local_event **link = find(client, id), *found = *link;
    struct dskv_event event = found->event;
    *link = found->next;
    free(found);
    return event;
}

struct dskv_event local_call(struct local_client *client, const struct dskv_request *request)
{
    uint64_t id = local_send(client, request, NULL);
    struct dskv_event event = local_wait(client, id);
    while (!event.last) {
        dskv_event_clear(&event);
        event = local_wait(client, id);
    }
    return event;
}

void local_connect(struct local *local, uint8_t name, struct local_client *client)
{
    *client = (struct local_client){.local = local, .route = {.n = 1, .bytes = {name}}};
    struct dskv_event event = local_call(client, &(struct dskv_request){.op = DSKV_OP_HELLO});
    DSKV_ASSERT(event.kind == DSKV_EVENT_RESULT, "%s", event.error.message);
    client->session = event.hello.session;
    client->has_session = 1;
    dskv_event_clear(&event);
}

struct dskv_wire_tensor local_tokens(const int32_t *ids, int32_t n)
{
    static const int32_t none;
    return (struct dskv_wire_tensor){
        .data = n ? ids : &none, .dtype = DSKV_I32, .n_dims = 1, .shape = {n}, .bytes = (size_t)n * sizeof *ids};
}

struct dskv_prefix local_prefix(const struct dskv_cache_ref *cache, int32_t length)
{
    return (struct dskv_prefix){.present = 1, .cache = cache->id, .length = length};
}

struct dskv_event local_forward(struct local_client *client, const struct dskv_prefix *prefix, const int32_t *tokens,
                                int32_t n, struct dskv_want want)
{
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(tokens, n), .want = want};
    if (prefix)
        sequence.prefix = *prefix;
    struct dskv_event event =
        local_call(client, &(struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {1, &sequence}});
    DSKV_ASSERT(event.kind == DSKV_EVENT_RESULT, "%s", event.error.message);
    return event;
}

struct dskv_cache_ref local_cache(struct local_client *client, const struct dskv_prefix *prefix, const int32_t *tokens,
                                  int32_t n)
{
    struct dskv_event event = local_forward(client, prefix, tokens, n, (struct dskv_want){0});
    struct dskv_cache_ref cache = event.forward.sequences[0].cache;
    dskv_event_clear(&event);
    return cache;
}

/* ---- keys and values -------------------------------------------------------------------------------------------- */

static float *value_of(struct fake_kv *kv, int32_t layer, int is_value, int32_t head)
{
    return kv->values[layer][is_value][head];
}

/* Part's data <-> kv, in f32. */
static void unpack(const struct dskv_part *part, struct fake_kv *kv)
{
    const float *next = part->data.data;
    for (int32_t head = 0; head < FAKE_KV_HEADS; head++)
        for (int32_t token = part->start; token < part->stop; token++, next += FAKE_HEAD_DIM)
            memcpy(value_of(&kv[token], part->layer, part->is_value, head), next, FAKE_HEAD_DIM * sizeof *next);
}

enum dskv_code local_export(struct local_client *client, const struct dskv_id *cache, int32_t length, int32_t *tokens,
                            struct fake_kv *kv)
{
    struct dskv_request request = {.op = DSKV_OP_EXPORT, .export_ = {.cache = *cache, .length = length, .credits = 2}};
    uint64_t id = local_send(client, &request, NULL);
    for (;;) {
        struct dskv_event event = local_wait(client, id);
        enum dskv_code code = event.kind == DSKV_EVENT_ERROR ? event.error.code : DSKV_OK;
        int last = event.last;
        if (event.kind == DSKV_EVENT_BEGIN)
            memcpy(tokens, event.export_begin.tokens.data, event.export_begin.tokens.bytes);
        if (event.kind == DSKV_EVENT_PART) {
            unpack(&event.part, kv);
            local_send(client, &(struct dskv_request){.op = DSKV_OP_CREDIT, .credit = {.request = id, .n = 1}}, NULL);
        }
        dskv_event_clear(&event);
        if (last)
            return code;
    }
}

/* Sends one part of an import, if it is not the one to be skipped. */
static void send_part(struct local_client *client, uint64_t import, struct dskv_part part, const struct fake_kv *kv)
{
    float data[FAKE_KV_HEADS * 512 * FAKE_HEAD_DIM], *next = data;
    int32_t n = part.stop - part.start;
    DSKV_ASSERT(n <= 512, "%d tokens", n);
    for (int32_t head = 0; head < FAKE_KV_HEADS; head++)
        for (int32_t token = part.start; token < part.stop; token++, next += FAKE_HEAD_DIM)
            memcpy(next, kv[token].values[part.layer][part.is_value][head], FAKE_HEAD_DIM * sizeof *next);
    part.data = (struct dskv_wire_tensor){.data = data,
                                          .dtype = DSKV_F32,
                                          .n_dims = 3,
                                          .shape = {FAKE_KV_HEADS, n, FAKE_HEAD_DIM},
                                          .bytes = (size_t)(next - data) * sizeof *data};
    local_send(client, &(struct dskv_request){.op = DSKV_OP_PART, .part = {.request = import, .part = part}}, NULL);
}

/* Waits for the next event and adds up the credits; returns 0 at the last one, which is left in *event. */
static int take_credit(struct local_client *client, uint64_t import, int *credits, struct dskv_event *event)
{
    *event = local_wait(client, import);
    if (event->last)
        return 0;
    *credits += event->kind == DSKV_EVENT_BEGIN ? event->import_begin.credits : event->credit.n;
    dskv_event_clear(event);
    return 1;
}

enum dskv_code local_import(struct local_client *client, const int32_t *tokens, int32_t length,
                            const struct fake_kv *kv, int skip_part, struct dskv_cache_ref *cache,
                            struct dskv_error *error)
{
    struct dskv_request request = {.op = DSKV_OP_IMPORT,
                                   .import_ = {.tokens = local_tokens(tokens, length),
                                               .dtype = DSKV_F32,
                                               .n_layers = FAKE_LAYERS,
                                               .n_kv_heads = FAKE_KV_HEADS,
                                               .head_dim = FAKE_HEAD_DIM,
                                               .convert = 1}};
    uint64_t id = local_send(client, &request, NULL);
    struct dskv_event event;
    int credits = 0, n_part = 0, goes_on = take_credit(client, id, &credits, &event);
    int32_t most = dskv_engine_kv_piece_tokens(client->local->engine);
    for (int32_t plane = 0; plane < 2 * FAKE_LAYERS && goes_on; plane++)
        for (int32_t start = 0; start < length && goes_on; start += most) {
            int32_t stop = start + most < length ? start + most : length;
            if (n_part++ == skip_part)
                continue;
            while (!credits && goes_on)
                goes_on = take_credit(client, id, &credits, &event);
            if (!goes_on)
                break;
            credits--;
            send_part(client, id,
                      (struct dskv_part){.layer = plane / 2, .is_value = plane % 2, .start = start, .stop = stop}, kv);
        }
    if (goes_on)
        local_send(client, &(struct dskv_request){.op = DSKV_OP_COMMIT, .commit = {.request = id}}, NULL);
    while (goes_on)
        goes_on = take_credit(client, id, &credits, &event);
    enum dskv_code code = event.kind == DSKV_EVENT_ERROR ? event.error.code : DSKV_OK;
    if (code && error)
        *error = event.error;
    if (!code)
        *cache = event.import_;
    dskv_event_clear(&event);
    return code;
}
