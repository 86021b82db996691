/* The whole server over the fake engine, under random requests of several clients at once.
 *
 * Every result is compared with the reference, bit for bit; every error must have a reason that the simulator knows.
 * After each wave of requests, when nothing is in flight, the counters must agree with the caches that are alive, and
 * some of these are read back; at the end everything is freed and no block may be left.  In two of three seeds steps
 * are queued ahead, and computed as soon or as late as can be.  A seed fixes what is asked for, not how threads
 * interleave.  Usage: test_simulator [seed [n_waves]].
 */
#include "base/memory.h"
#include "sim/local.h"
#include "sim/reference.h"
#include "sim/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define N_CLIENTS 3
#define MAX_VALUES 60
#define MAX_FLIGHTS 24 /* of a wave */
#define MAX_SEQUENCES 4
#define CONTEXT 200

/* A cache that some client holds. */
struct value {
    int alive;
    int consumers; /* in flight: it may vanish any moment */
    struct dskv_cache_ref ref;
    struct reference r;
};

/* One sequence that was asked for. */
struct asked {
    struct reference r;   /* prefix, then the new tokens (for generate: also those that will be drawn) */
    int32_t prefix, n;    /* lengths of both */
    struct value *parent; /* null: none */
    int consume, foreign;
    int bad; /* one of the rows is not finite */
    struct dskv_want want;
};

struct flight {
    uint64_t id;
    struct local_client *client;
    enum dskv_op op;
    enum dskv_code expected; /* the error that it was made for; DSKV_OK: none */
    int cancelled, doubtful; /* doubtful: a parent may have vanished */
    int n;
    struct asked asked[MAX_SEQUENCES];
    int32_t accepted, max_tokens; /* verify, generate */
    enum dskv_finish finish;
};

struct simulation {
    struct rng rng;
    struct local local;
    struct local_client clients[N_CLIENTS];
    struct value values[MAX_VALUES];
    struct flight flights[MAX_FLIGHTS];
    int n_flights;
    int queues_ahead;
    int n_results, n_errors, n_full, n_cancelled;
};

/* ---- values ----------------------------------------------------------------------------------------------------- */

static struct value *pick_value(struct simulation *s)
{
    struct value *value = &s->values[rng_below(&s->rng, MAX_VALUES)];
    return value->alive ? value : NULL;
}

/* Notes a cache that came back, with what it must hold; takes the reference over. */
static void keep_value(struct simulation *s, const struct dskv_cache_ref *ref, struct reference *r, int foreign)
{
    struct value *value = s->values;
    DSKV_ASSERT(ref->present && ref->length == r->n, "a cache of %d tokens, not %d", ref->length, r->n);
    DSKV_ASSERT((strcmp(ref->origin, "foreign") == 0) == foreign, "origin %s", ref->origin);
    while (value->alive || value->r.capacity)
        value++;
    *value = (struct value){.alive = 1, .ref = *ref, .r = *r};
    *r = (struct reference){0};
}

static void drop_value(struct value *value)
{
    value->alive = 0;
    if (!value->consumers)
        reference_free(&value->r);
}

static int n_alive(const struct simulation *s)
{
    int n = 0;
    for (int i = 0; i < MAX_VALUES; i++)
        n += s->values[i].alive;
    return n;
}

static int32_t pick_token(struct simulation *s)
{
    return rng_one_in(&s->rng, 600) ? FAKE_BAD_TOKEN : rng_below(&s->rng, FAKE_BAD_TOKEN);
}

/* ---- asking ----------------------------------------------------------------------------------------------------- */

/* A random prefix and random tokens after it. */
static void ask_sequence(struct simulation *s, struct flight *flight, struct asked *asked, struct dskv_prefix *prefix,
                         int32_t most)
{
    *asked = (struct asked){0};
    *prefix = (struct dskv_prefix){0};
    struct value *parent = rng_one_in(&s->rng, 5) ? NULL : pick_value(s);
    if (parent) {
        asked->prefix = rng_one_in(&s->rng, 2) ? parent->r.n : rng_below(&s->rng, parent->r.n + 1);
        asked->r = reference_of(&parent->r, asked->prefix);
        asked->foreign = asked->prefix && !strcmp(parent->ref.origin, "foreign");
        asked->parent = parent;
        *prefix = local_prefix(&parent->ref, asked->prefix);
        prefix->has_check = rng_one_in(&s->rng, 2);
        prefix->check = dskv_tokens_check(0, asked->r.tokens, (size_t)asked->prefix);
        flight->doubtful |= parent->consumers > 0;
    }
    most = most < CONTEXT - asked->prefix ? most : CONTEXT - asked->prefix;
    asked->n = most ? rng_below(&s->rng, most) : 0;
    if (!asked->n && !asked->prefix)
        asked->n = 1;
    for (int32_t i = 0; i < asked->n; i++) {
        int32_t token = pick_token(s);
        reference_append(&asked->r, &token, 1);
    }
    asked->consume = parent && rng_one_in(&s->rng, 8);
    if (asked->consume)
        parent->consumers++;
}

static struct dskv_wire_tensor new_tokens(const struct asked *asked)
{
    return local_tokens(asked->r.tokens + asked->prefix, asked->n);
}

/* Whether a row that is wanted is not finite: rows first .. last of the reference. */
static int has_bad_row(const struct reference *r, int32_t first, int32_t last)
{
    for (int32_t i = first < 0 ? 0 : first; i <= last; i++)
        if (r->tokens[i] == FAKE_BAD_TOKEN)
            return 1;
    return 0;
}

static void send_forward(struct simulation *s, struct flight *flight)
{
    struct dskv_forward_sequence sequences[MAX_SEQUENCES] = {0};
    flight->n = rng_one_in(&s->rng, 2) ? 1 : 1 + rng_below(&s->rng, MAX_SEQUENCES);
    for (int i = 0; i < flight->n; i++) {
        struct asked *asked = &flight->asked[i];
        ask_sequence(s, flight, asked, &sequences[i].prefix, rng_one_in(&s->rng, 4) ? 100 : 8);
        int32_t rows = asked->n ? asked->n : 1;
        asked->want.logits_start = rng_below(&s->rng, rows + 1);
        asked->want.logits_stop = asked->want.logits_start + rng_below(&s->rng, rows - asked->want.logits_start + 1);
        asked->want.argmax = rng_one_in(&s->rng, 3);
        asked->want.topk = rng_one_in(&s->rng, 3) ? 1 + rng_below(&s->rng, 5) : 0;
        asked->want.score = rng_one_in(&s->rng, 3);
        int32_t first = asked->prefix + asked->n - rows, last = asked->r.n - 1;
        if (asked->want.argmax || asked->want.topk)
            asked->bad = has_bad_row(&asked->r, first, last);
        if (asked->want.logits_stop > asked->want.logits_start)
            asked->bad |= has_bad_row(&asked->r, first + asked->want.logits_start, first + asked->want.logits_stop - 1);
        if (asked->want.score && asked->n)
            asked->bad |= has_bad_row(&asked->r, asked->prefix - 1, last - 1);
        sequences[i].want = asked->want;
        sequences[i].tokens = new_tokens(asked);
        sequences[i].consume = asked->consume;
    }
    struct dskv_request request = {.op = DSKV_OP_FORWARD, .forward = {flight->n, sequences}};
    if (rng_one_in(&s->rng, 6)) { /* a request that must be refused */
        static const int32_t outside[] = {1, FAKE_VOCAB};
        flight->expected = DSKV_TOKEN_OUT_OF_RANGE;
        sequences[flight->n - 1].tokens = local_tokens(outside, 2);
    }
    flight->id = local_send(flight->client, &request, NULL);
}

static void send_verify(struct simulation *s, struct flight *flight)
{
    struct asked *asked = &flight->asked[0];
    struct dskv_prefix prefix;
    flight->n = 1;
    ask_sequence(s, flight, asked, &prefix, 20);
    int32_t draft[12], n_draft = rng_below(&s->rng, 12), right = rng_below(&s->rng, n_draft + 1);
    if (asked->r.n + n_draft > CONTEXT)
        n_draft = CONTEXT - asked->r.n;
    asked->bad = has_bad_row(&asked->r, asked->r.n - 1, asked->r.n - 1);
    struct reference r = reference_of(&asked->r, asked->r.n);
    for (int32_t i = 0; i < n_draft; i++) {
        draft[i] = reference_next(&r, r.n - 1);
        if (i >= right)
            draft[i] = (draft[i] + 1 + rng_below(&s->rng, 5)) % FAKE_BAD_TOKEN;
        reference_append(&r, &draft[i], 1);
    }
    flight->accepted = right < n_draft ? right : n_draft;
    reference_free(&r);
    struct dskv_request request = {.op = DSKV_OP_VERIFY,
                                   .verify = {.prefix = prefix,
                                              .tokens = new_tokens(asked),
                                              .draft = local_tokens(draft, n_draft),
                                              .consume = asked->consume}};
    flight->id = local_send(flight->client, &request, NULL);
    reference_append(&asked->r, draft, asked->bad ? 0 : flight->accepted);
}

static void send_generate(struct simulation *s, struct flight *flight)
{
    struct asked *asked = &flight->asked[0];
    struct dskv_prefix prefix;
    flight->n = 1;
    ask_sequence(s, flight, asked, &prefix, 20);
    struct dskv_generate generate = {.prefix = prefix,
                                     .max_tokens = 1 + rng_below(&s->rng, 30),
                                     .temperature = rng_one_in(&s->rng, 2) ? 0.75 : 0,
                                     .top_p = 1,
                                     .has_seed = 1,
                                     .seed = rng_next(&s->rng) >> 1,
                                     .ignore_eos = rng_one_in(&s->rng, 2),
                                     .stream = rng_one_in(&s->rng, 2),
                                     .consume = asked->consume};
    struct dskv_sampling sampling = {.temperature = (float)generate.temperature, .top_p = 1, .seed = generate.seed};
    int32_t prompt = asked->r.n, last = prompt - 1;
    struct dskv_wire_tensor tokens = new_tokens(asked);
    int32_t copy[CONTEXT]; /* the reference moves as it grows */
    memcpy(copy, tokens.data, tokens.bytes);
    generate.tokens = local_tokens(copy, asked->n);
    asked->bad = has_bad_row(&asked->r, last, last);
    flight->expected = prompt == CONTEXT ? DSKV_TOO_LONG : DSKV_OK;
    flight->finish = DSKV_N_FINISHES;
    for (flight->max_tokens = 0; flight->finish == DSKV_N_FINISHES && !asked->bad && !flight->expected;) {
        float logits[FAKE_VOCAB];
        reference_row(&asked->r, asked->r.n - 1, logits);
        sampling.position = asked->r.n;
        int32_t token = fake_sample(logits, &sampling);
        reference_append(&asked->r, &token, 1);
        flight->max_tokens++;
        if (token == FAKE_END_TOKEN && !generate.ignore_eos)
            flight->finish = DSKV_FINISH_STOP;
        else if (flight->max_tokens == generate.max_tokens)
            flight->finish = DSKV_FINISH_LENGTH;
        else if (asked->r.n == CONTEXT)
            flight->finish = DSKV_FINISH_CONTEXT;
    }
    flight->id = local_send(flight->client, &(struct dskv_request){.op = DSKV_OP_GENERATE, .generate = generate}, NULL);
}

static void send_free(struct simulation *s, struct flight *flight)
{
    struct value *value = pick_value(s);
    struct dskv_id id = value ? value->ref.id : (struct dskv_id){{7}};
    flight->id = local_send(flight->client,
                            &(struct dskv_request){.op = DSKV_OP_FREE, .free_caches = {.n = 1, .caches = &id}}, NULL);
    if (value)
        drop_value(value);
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

static void check_forward_rows(const struct asked *asked, const struct dskv_forward_result *result)
{
    int32_t rows = asked->n ? asked->n : 1, first = asked->prefix + asked->n - rows;
    for (int32_t i = 0; i < rows; i++) {
        float row[FAKE_VOCAB], logprobs[5], score;
        int32_t ids[5], k = asked->want.topk;
        reference_row(&asked->r, first + i, row);
        fake_topk(row, k, ids, logprobs);
        int in_range = i >= asked->want.logits_start && i < asked->want.logits_stop;
        const float *logits = result->logits.data;
        DSKV_ASSERT(!in_range || !memcmp(logits + (size_t)(i - asked->want.logits_start) * FAKE_VOCAB, row, sizeof row),
                    "row %d of %d after %d: logits", i, rows, asked->prefix);
        DSKV_ASSERT(!asked->want.argmax || ((const int32_t *)result->argmax.data)[i] == fake_argmax(row), "row %d", i);
        DSKV_ASSERT(!k ||
                        (!memcmp((const int32_t *)result->topk_ids.data + (size_t)(i * k), ids, (size_t)k * 4) &&
                         !memcmp((const float *)result->topk_logprobs.data + (size_t)(i * k), logprobs, (size_t)k * 4)),
                    "row %d: the %d best", i, k);
        if (!asked->want.score || i + 1 >= asked->n)
            continue;
        score = fake_score(row, asked->r.tokens[first + i + 1]);
        DSKV_ASSERT(!memcmp((const float *)result->scores.data + i + 1, &score, sizeof score), "score %d", i + 1);
    }
}

static void check_forward(struct simulation *s, struct flight *flight, const struct dskv_event *event)
{
    DSKV_ASSERT(event->forward.n == flight->n, "%d sequences of %d", event->forward.n, flight->n);
    for (int i = 0; i < flight->n; i++) {
        struct asked *asked = &flight->asked[i];
        const struct dskv_forward_result *result = &event->forward.sequences[i];
        int reruns = asked->n == 0 || (asked->want.score && asked->prefix);
        DSKV_ASSERT(result->cached == asked->prefix - reruns && result->computed == asked->n + reruns,
                    "%d cached, %d computed, prefix %d, %d tokens", result->cached, result->computed, asked->prefix,
                    asked->n);
        check_forward_rows(asked, result);
        if (asked->n)
            keep_value(s, &result->cache, &asked->r, asked->foreign);
        else
            DSKV_ASSERT(!result->cache.present, "a cache of no new tokens, %d", i);
    }
}

static void check_verify(struct simulation *s, struct flight *flight, const struct dskv_event *event)
{
    struct asked *asked = &flight->asked[0];
    DSKV_ASSERT(event->verify.accepted == flight->accepted, "%d accepted, not %d", event->verify.accepted,
                flight->accepted);
    DSKV_ASSERT(event->verify.next == reference_next(&asked->r, asked->r.n - 1), "next is %d", event->verify.next);
    keep_value(s, &event->verify.cache, &asked->r, asked->foreign && asked->r.n);
}

static void check_generate(struct simulation *s, struct flight *flight, const struct dskv_event *event)
{
    struct asked *asked = &flight->asked[0];
    int32_t n = (int32_t)event->generate.tokens.shape[0], prompt = asked->prefix + asked->n;
    int was_cancelled = event->generate.finish == DSKV_FINISH_CANCELLED;
    DSKV_ASSERT(was_cancelled ? flight->cancelled && n <= flight->max_tokens
                              : n == flight->max_tokens && event->generate.finish == flight->finish,
                "%d tokens of %d, finish %d", n, flight->max_tokens, event->generate.finish);
    DSKV_ASSERT(!memcmp(event->generate.tokens.data, asked->r.tokens + prompt, (size_t)n * 4), "%d tokens differ", n);
    int32_t length = n ? prompt + n - 1 : event->generate.cache.length; /* cancelled in the prompt: as far as it came */
    DSKV_ASSERT(length >= asked->prefix && length <= asked->r.n, "length %d, prefix %d", length, asked->prefix);
    struct reference r = reference_of(&asked->r, length);
    keep_value(s, &event->generate.cache, &r, asked->foreign);
    if (was_cancelled && asked->consume) { /* then the parent stands */
        asked->parent->consumers--;
        asked->consume = 0;
    }
}

static void check_error(struct simulation *s, const struct flight *flight, const struct dskv_error *error)
{
    int bad = 0;
    for (int i = 0; i < flight->n; i++)
        bad |= flight->asked[i].bad;
    int allowed = error->code == DSKV_POOL_FULL       ? error->needed > error->free
                  : error->code == DSKV_CANCELLED     ? flight->cancelled
                  : error->code == DSKV_UNKNOWN_CACHE ? flight->doubtful
                  : error->code == DSKV_NOT_FINITE    ? bad
                                                      : error->code == flight->expected;
    DSKV_ASSERT(allowed, "%s: %s", dskv_code_name(error->code), error->message);
    s->n_errors++;
    s->n_full += error->code == DSKV_POOL_FULL;
    s->n_cancelled += error->code == DSKV_CANCELLED;
}

static void check_result(struct simulation *s, struct flight *flight, const struct dskv_event *event)
{
    DSKV_ASSERT(!flight->expected, "%s was expected", dskv_code_name(flight->expected));
    for (int i = 0; i < flight->n; i++)
        DSKV_ASSERT(!flight->asked[i].bad || event->op == DSKV_OP_GENERATE, "row of sequence %d is not finite", i);
    s->n_results++;
    if (flight->op == DSKV_OP_FORWARD)
        check_forward(s, flight, event);
    else if (flight->op == DSKV_OP_VERIFY)
        check_verify(s, flight, event);
    else if (flight->op == DSKV_OP_GENERATE)
        check_generate(s, flight, event);
}

static void land(struct simulation *s, struct flight *flight)
{
    struct dskv_event event = local_wait(flight->client, flight->id);
    while (!event.last) {
        dskv_event_clear(&event);
        event = local_wait(flight->client, flight->id);
    }
    int failed = event.kind == DSKV_EVENT_ERROR;
    if (failed)
        check_error(s, flight, &event.error);
    else
        check_result(s, flight, &event);
    dskv_event_clear(&event);
    for (int i = 0; i < flight->n; i++) {
        struct asked *asked = &flight->asked[i];
        if (asked->consume) {
            asked->parent->consumers--;
            if (!failed || !asked->parent->alive)
                drop_value(asked->parent);
        }
        reference_free(&asked->r);
    }
}

/* ---- waves ------------------------------------------------------------------------------------------------------ */

static void launch(struct simulation *s)
{
    static void (*const kinds[])(struct simulation *, struct flight *) = {send_forward, send_forward,  send_forward,
                                                                          send_verify,  send_generate, send_free};
    static const enum dskv_op ops[] = {DSKV_OP_FORWARD, DSKV_OP_FORWARD,  DSKV_OP_FORWARD,
                                       DSKV_OP_VERIFY,  DSKV_OP_GENERATE, DSKV_OP_FREE};
    int kind = rng_below(&s->rng, (int32_t)(sizeof ops / sizeof *ops));
    struct flight *flight = &s->flights[s->n_flights++];
    *flight = (struct flight){.client = &s->clients[rng_below(&s->rng, N_CLIENTS)], .op = ops[kind]};
    kinds[kind](s, flight);
    if (rng_one_in(&s->rng, 10) && flight->op != DSKV_OP_FREE) {
        flight->cancelled = 1;
        dskv_server_cancel(s->local.server, &flight->client->route, flight->id);
    }
}

/* Reads one cache back, and now and then makes a foreign one of it. */
static void read_back(struct simulation *s, struct value *value)
{
    int32_t tokens[CONTEXT];
    struct fake_kv kv[CONTEXT];
    struct local_client *client = &s->clients[rng_below(&s->rng, N_CLIENTS)];
    enum dskv_code code = local_export(client, &value->ref.id, value->r.n, tokens, kv);
    DSKV_ASSERT(!code, "%s", dskv_code_name(code));
    DSKV_ASSERT(!memcmp(tokens, value->r.tokens, (size_t)value->r.n * sizeof *tokens), "tokens of %d", value->r.n);
    DSKV_ASSERT(!memcmp(kv, value->r.kv, (size_t)value->r.n * sizeof *kv), "keys and values of %d tokens", value->r.n);
    if (!rng_one_in(&s->rng, 4) || n_alive(s) > MAX_VALUES / 2)
        return;
    struct reference r = {0};
    struct dskv_cache_ref ref;
    for (int32_t i = 0; i < value->r.n; i++) {
        kv[i].values[0][1][0][0] += rng_one_in(&s->rng, 8) ? 0.25f : 0.0f;
        reference_append_stored(&r, tokens[i], &kv[i]);
    }
    int skip = rng_one_in(&s->rng, 3) && value->r.n ? rng_below(&s->rng, 4) : -1;
    code = local_import(client, tokens, value->r.n, kv, skip, &ref, NULL);
    DSKV_ASSERT(code == DSKV_POOL_FULL || (skip < 0 ? code == DSKV_OK : code == DSKV_BAD_VALUE), "%s",
                dskv_code_name(code));
    if (!code)
        keep_value(s, &ref, &r, 1);
    reference_free(&r);
}

/* The last answer may leave a step under way, whose rows nobody wants any more; then the counters still move. */
static struct dskv_stats_result settled_stats(struct simulation *s)
{
    struct dskv_stats_result stats = local_stats(&s->local);
    for (int i = 0; i < 10000 && stats.rows_computed != stats.ranks[0].rows_computed; i++) {
        usleep(1000);
        stats = local_stats(&s->local);
    }
    return stats;
}

static void check_quiet(struct simulation *s)
{
    struct dskv_stats_result stats = s->queues_ahead ? settled_stats(s) : local_stats(&s->local);
    int64_t most = 0;
    for (int i = 0; i < MAX_VALUES; i++)
        most += s->values[i].alive ? (s->values[i].r.n + 15) / 16 : 0;
    DSKV_ASSERT(stats.caches == n_alive(s), "%lld caches, %d are known", (long long)stats.caches, n_alive(s));
    DSKV_ASSERT(stats.blocks_reserved == 0 && stats.sequences_active == 0 && stats.requests_queued == 0,
                "%lld blocks reserved, %lld sequences, %lld requests", (long long)stats.blocks_reserved,
                (long long)stats.sequences_active, (long long)stats.requests_queued);
    DSKV_ASSERT(stats.blocks_used <= most, "%lld blocks used for at most %lld", (long long)stats.blocks_used,
                (long long)most);
    DSKV_ASSERT(stats.rows_computed == stats.ranks[0].rows_computed, "%lld rows, the executor counts %lld",
                (long long)stats.rows_computed, (long long)stats.ranks[0].rows_computed);
}

static void wave(struct simulation *s)
{
    int n = 1 + rng_below(&s->rng, MAX_FLIGHTS);
    s->n_flights = 0;
    /* Each request may make MAX_SEQUENCES caches; there must be room to know them. */
    while (s->n_flights < n && n_alive(s) + (s->n_flights + 1) * MAX_SEQUENCES < MAX_VALUES)
        launch(s);
    for (int i = 0; i < s->n_flights; i++)
        land(s, &s->flights[i]);
    check_quiet(s);
    for (int i = 0; i < 3; i++) {
        struct value *value = pick_value(s);
        if (value)
            read_back(s, value);
    }
    while (n_alive(s) > MAX_VALUES / 2) { /* the envelope of an innocent request frees some */
        struct value *value = pick_value(s);
        struct dskv_request request = {.op = DSKV_OP_STATS, .n_free = 1};
        if (!value)
            continue;
        request.free = &value->ref.id;
        dskv_server_note(s->local.server, &request, NULL);
        drop_value(value);
    }
}

static void clean_up(struct simulation *s)
{
    for (int i = 0; i < N_CLIENTS; i++) {
        struct dskv_event event =
            local_call(&s->clients[i], &(struct dskv_request){.op = DSKV_OP_FREE, .free_caches = {.all = 1}});
        DSKV_ASSERT(event.kind == DSKV_EVENT_RESULT, "%s", event.error.message);
        dskv_event_clear(&event);
    }
    for (int i = 0; i < MAX_VALUES; i++)
        reference_free(&s->values[i].r);
    struct dskv_stats_result stats = local_stats(&s->local);
    DSKV_ASSERT(stats.blocks_used == 0 && stats.caches == 0, "%lld blocks, %lld caches are left",
                (long long)stats.blocks_used, (long long)stats.caches);
    local_close(&s->local);
}

static void run(uint64_t seed, int n_waves)
{
    struct simulation *s = dskv_calloc(1, sizeof *s);
    s->rng.state = seed;
    s->queues_ahead = seed % 3 > 0;
    local_open(&s->local,
               &(struct fake_engine_options){.n_blocks = 30 + rng_below(&s->rng, 60),
                                             .max_model_len = CONTEXT,
                                             .max_batch_tokens = 16 + rng_below(&s->rng, 60),
                                             .max_sequences = 1 + rng_below(&s->rng, 8),
                                             .max_logit_rows = 1 + rng_below(&s->rng, 20),
                                             .runs_queued = s->queues_ahead,
                                             .runs_at_submit = seed % 3 == 1},
               0);
    for (int i = 0; i < N_CLIENTS; i++)
        local_connect(&s->local, (uint8_t)(i + 1), &s->clients[i]);
    for (int i = 0; i < n_waves; i++)
        wave(s);
    printf("  %d results, %d errors, %d of them of a full pool, %d cancelled\n", s->n_results, s->n_errors, s->n_full,
           s->n_cancelled);
    clean_up(s);
    free(s);
}

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, last = argc > 1 ? first : 12;
    int n_waves = argc > 2 ? atoi(argv[2]) : 60;
    for (uint64_t seed = first; seed <= last; seed++) {
        printf("seed %llu, %d waves\n", (unsigned long long)seed,
               n_waves); /* the last one printed is the one that failed */
        fflush(stdout);
        run(seed, n_waves);
    }
    return 0;
}
