/* verify and generate over the fake engine, in this process. */
#include "sim/local.h"
#include "sim/reference.h"
#include "support/cunit_suite.h"

#include <stdlib.h>
#include <string.h>

static struct local local;
static struct local_client client;

static void begin_with(const struct fake_engine_options *options)
{
    local_open(&local, options, 0);
    local_connect(&local, 1, &client);
}

static void begin(void)
{
    begin_with(&(struct fake_engine_options){0});
}

static void finish(void)
{
    local_close(&local);
}

/* Tokens 0, 1, 2 ... of a text of its own, none of them an end or a bad one. */
static void make_tokens(int32_t seed, int32_t *tokens, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        tokens[i] = 8 + (seed * 31 + i * 17 + i * i % 11) % 50;
}

/* ---- verify ----------------------------------------------------------------------------------------------------- */

static struct dskv_event verify(const struct dskv_prefix *prefix, const int32_t *tokens, int32_t n,
                                const int32_t *draft, int32_t n_draft)
{
    struct dskv_request request = {
        .op = DSKV_OP_VERIFY, .verify = {.tokens = local_tokens(tokens, n), .draft = local_tokens(draft, n_draft)}};
    if (prefix)
        request.verify.prefix = *prefix;
    return local_call(&client, &request);
}

static void a_draft_is_accepted_as_far_as_it_is_greedy(void)
{
    int32_t tokens[33], draft[8];
    begin_with(&(struct fake_engine_options){.n_blocks = 200});
    make_tokens(9, tokens, 33);
    struct dskv_cache_ref cache = local_cache(&client, NULL, tokens, 30);
    for (int32_t n = 0; n <= 3; n++)
        for (int32_t right = 0; right <= 8; right++) {
            struct reference r = {0};
            reference_append(&r, tokens, 30 + n);
            for (int32_t i = 0; i < 8; i++) {
                draft[i] = reference_next(&r, r.n - 1);
                if (i == right)
                    draft[i] = (draft[i] + 1) % FAKE_BAD_TOKEN;
                reference_append(&r, &draft[i], 1);
            }
            struct dskv_prefix prefix = local_prefix(&cache, 30);
            struct dskv_event event = verify(&prefix, tokens + 30, n, draft, 8);
            CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
            CU_ASSERT_EQUAL(event.verify.accepted, right);
            CU_ASSERT_EQUAL(event.verify.next, reference_next(&r, 30 + n + right - 1));
            CU_ASSERT_EQUAL(event.verify.cache.length, 30 + n + right);
            CU_ASSERT_EQUAL(event.verify.cached, n ? 30 : 29);
            CU_ASSERT_EQUAL(event.verify.computed, n ? n + 8 : 9);
            int32_t stored[41];
            struct fake_kv kv[41];
            CU_ASSERT_EQUAL(local_export(&client, &event.verify.cache.id, 30 + n + right, stored, kv), DSKV_OK);
            CU_ASSERT_EQUAL(memcmp(kv, r.kv, sizeof *kv * (size_t)(30 + n + right)), 0);
            dskv_event_clear(&event);
            reference_free(&r);
        }
    finish();
}

static void a_draft_needs_something_before_it(void)
{
    int32_t tokens[4];
    begin();
    make_tokens(10, tokens, 4);
    struct dskv_cache_ref cache = local_cache(&client, NULL, tokens, 4);
    struct dskv_prefix none = local_prefix(&cache, 0), some = local_prefix(&cache, 4);
    struct dskv_event event = verify(NULL, NULL, 0, tokens, 2);
    CU_ASSERT_EQUAL(event.error.code, DSKV_NO_ROW);
    dskv_event_clear(&event);
    event = verify(&none, NULL, 0, tokens, 2);
    CU_ASSERT_EQUAL(event.error.code, DSKV_NO_ROW);
    dskv_event_clear(&event);
    event = verify(NULL, NULL, 0, NULL, 0);
    CU_ASSERT_EQUAL(event.error.code, DSKV_EMPTY_REQUEST);
    dskv_event_clear(&event);
    event = verify(&some, NULL, 0, NULL, 0);
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    CU_ASSERT_EQUAL(event.verify.cache.length, 4);
    dskv_event_clear(&event);
    /* What follows from rejected tokens does not matter. */
    event = verify(&some, NULL, 0, (int32_t[]){FAKE_BAD_TOKEN, 3}, 2);
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    CU_ASSERT_EQUAL(event.verify.accepted, 0);
    dskv_event_clear(&event);
    event = verify(&some, (int32_t[]){FAKE_BAD_TOKEN}, 1, (int32_t[]){3}, 1);
    CU_ASSERT_EQUAL(event.error.code, DSKV_NOT_FINITE);
    dskv_event_clear(&event);
    finish();
}

/* ---- generate --------------------------------------------------------------------------------------------------- */

/* Greedy tokens after a prompt, by the reference. */
static void greedy(const int32_t *prompt, int32_t n, int32_t *tokens, int32_t n_tokens)
{
    struct reference r = {0};
    reference_append(&r, prompt, n);
    for (int32_t i = 0; i < n_tokens; i++) {
        tokens[i] = reference_next(&r, r.n - 1);
        reference_append(&r, &tokens[i], 1);
    }
    reference_free(&r);
}

static struct dskv_event generate(struct dskv_generate asked)
{
    return local_call(&client, &(struct dskv_request){.op = DSKV_OP_GENERATE, .generate = asked});
}

static void check_generated(const struct dskv_event *event, const int32_t *tokens, int32_t n,
                            enum dskv_finish finish_reason)
{
    CU_ASSERT_EQUAL_FATAL(event->kind, DSKV_EVENT_RESULT);
    CU_ASSERT_EQUAL(event->generate.finish, finish_reason);
    CU_ASSERT_EQUAL_FATAL(event->generate.tokens.shape[0], n);
    CU_ASSERT_EQUAL(memcmp(event->generate.tokens.data, tokens, (size_t)n * sizeof *tokens), 0);
    CU_ASSERT_EQUAL(event->generate.steps, n - 1);
}

static void generation_is_the_greedy_loop(void)
{
    int32_t prompt[20], tokens[40];
    begin();
    make_tokens(11, prompt, 20);
    greedy(prompt, 20, tokens, 40);
    struct dskv_generate asked = {.tokens = local_tokens(prompt, 20), .max_tokens = 40, .top_p = 1, .ignore_eos = 1};
    struct dskv_event event = generate(asked);
    check_generated(&event, tokens, 40, DSKV_FINISH_LENGTH);
    CU_ASSERT_EQUAL(event.generate.cache.length, 59);
    CU_ASSERT_EQUAL(event.generate.computed, 59);
    struct dskv_cache_ref cache = event.generate.cache;
    dskv_event_clear(&event);
    struct dskv_prefix cut = local_prefix(&cache, 30); /* goes on from a cut, without tokens */
    asked = (struct dskv_generate){
        .prefix = cut, .tokens = local_tokens(NULL, 0), .max_tokens = 10, .top_p = 1, .ignore_eos = 1};
    event = generate(asked);
    check_generated(&event, tokens + 10, 10, DSKV_FINISH_LENGTH);
    CU_ASSERT_EQUAL(event.generate.cached, 29);
    CU_ASSERT_EQUAL(event.generate.computed, 10);
    CU_ASSERT_EQUAL(event.generate.cache.length, 39);
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_reserved, 0);
    finish();
}

static void more_drawn_tokens_than_a_frame_holds_are_refused(void)
{
    enum { MOST = DSKV_MAX_FRAME_BYTES / 4 };
    int32_t prompt[20];
    begin_with(&(struct fake_engine_options){.max_model_len = 2 * MOST, .n_blocks = 2 * MOST / 16});
    make_tokens(3, prompt, 20);
    struct dskv_generate asked = {.tokens = local_tokens(prompt, 20), .max_tokens = MOST + 1, .top_p = 1};
    struct dskv_event event = generate(asked);
    CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_ERROR);
    CU_ASSERT_EQUAL(event.error.code, DSKV_REPLY_TOO_LARGE);
    CU_ASSERT(event.error.needed == 4 * (MOST + 1) && event.error.limit == DSKV_MAX_FRAME_BYTES);
    dskv_event_clear(&event);
    asked.max_tokens = MOST;
    event = generate(asked); /* an end token comes soon */
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    dskv_event_clear(&event);
    finish();
}

static void generation_stops_where_it_should(void)
{
    int32_t prompt[20], tokens[40], n_end = 0;
    begin_with(&(struct fake_engine_options){.max_model_len = 50});
    for (int32_t seed = 0; !n_end; seed++) { /* a prompt whose text has an end token, not too soon */
        make_tokens(seed, prompt, 20);
        greedy(prompt, 20, tokens, 30);
        for (int32_t i = 5; i < 25 && !n_end; i++)
            n_end = tokens[i] == FAKE_END_TOKEN ? i + 1 : 0;
        for (int32_t i = 0; i < 5; i++)
            n_end = tokens[i] == FAKE_END_TOKEN ? 0 : n_end;
    }
    struct dskv_generate asked = {.tokens = local_tokens(prompt, 20), .max_tokens = 128, .top_p = 1};
    struct dskv_event event = generate(asked);
    check_generated(&event, tokens, n_end, DSKV_FINISH_STOP);
    dskv_event_clear(&event);
    asked.ignore_eos = 1;
    event = generate(asked); /* prompt and drawn tokens fill the context */
    check_generated(&event, tokens, 30, DSKV_FINISH_CONTEXT);
    CU_ASSERT_EQUAL(event.generate.cache.length, 49);
    dskv_event_clear(&event);
    asked.max_tokens = 30;
    event = generate(asked);
    check_generated(&event, tokens, 30, DSKV_FINISH_LENGTH);
    dskv_event_clear(&event);
    struct dskv_wire_tensor stops[2] = {local_tokens((int32_t[]){0, 1, 2, 3}, 4), local_tokens(tokens + 2, 2)};
    asked.stops = stops;
    asked.n_stops = 2;
    event = generate(asked);
    check_generated(&event, tokens, 4, DSKV_FINISH_STOP);
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(local_stats(&local).tokens_generated, n_end + 30 + 30 + 4);
    finish();
}

static void a_stream_gives_the_same_tokens(void)
{
    int32_t prompt[20], tokens[12], n = 0;
    begin();
    make_tokens(12, prompt, 20);
    greedy(prompt, 20, tokens, 12);
    struct dskv_generate asked = {
        .tokens = local_tokens(prompt, 20), .max_tokens = 12, .top_p = 1, .ignore_eos = 1, .stream = 1};
    uint64_t id = local_send(&client, &(struct dskv_request){.op = DSKV_OP_GENERATE, .generate = asked}, NULL);
    struct dskv_event event;
    for (event = local_wait(&client, id); event.kind == DSKV_EVENT_TOKENS; event = local_wait(&client, id)) {
        for (int32_t i = 0; i < event.tokens.shape[0]; i++)
            CU_ASSERT_EQUAL(((const int32_t *)event.tokens.data)[i], tokens[n++]);
        dskv_event_clear(&event);
    }
    CU_ASSERT_EQUAL(n, 12);
    check_generated(&event, tokens, 12, DSKV_FINISH_LENGTH);
    dskv_event_clear(&event);
    finish();
}

static void a_seed_repeats_and_no_seed_is_told(void)
{
    int32_t prompt[20], first[16], last[16];
    begin();
    make_tokens(13, prompt, 20);
    struct dskv_generate asked = {
        .tokens = local_tokens(prompt, 20), .max_tokens = 16, .temperature = 1, .top_p = 0.9, .ignore_eos = 1};
    struct dskv_event event = generate(asked);
    CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
    memcpy(first, event.generate.tokens.data, sizeof first);
    asked.has_seed = 1;
    asked.seed = event.generate.seed;
    dskv_event_clear(&event);
    event = generate(asked);
    check_generated(&event, first, 16, DSKV_FINISH_LENGTH);
    CU_ASSERT_EQUAL(event.generate.seed, asked.seed);
    dskv_event_clear(&event);
    asked.has_seed = 0;
    event = generate(asked);
    memcpy(last, event.generate.tokens.data, sizeof last);
    CU_ASSERT_NOT_EQUAL(memcmp(first, last, sizeof last), 0);
    dskv_event_clear(&event);
    finish();
}

static void the_limit_itself_works(void)
{
    static int32_t tokens[512];
    begin();
    make_tokens(15, tokens, 512);
    struct dskv_cache_ref cache = local_cache(&client, NULL, tokens, 511);
    struct dskv_prefix prefix = local_prefix(&cache, 511);
    struct dskv_cache_ref full = local_cache(&client, &prefix, tokens + 511, 1);
    CU_ASSERT_EQUAL(full.length, 512);
    prefix = local_prefix(&full, 512);
    struct dskv_event event = generate(
        (struct dskv_generate){.prefix = prefix, .tokens = local_tokens(NULL, 0), .max_tokens = 1, .top_p = 1});
    CU_ASSERT_EQUAL(event.error.code, DSKV_TOO_LONG); /* the drawn token would be number 513 */
    CU_ASSERT_EQUAL(event.error.length, 513);
    dskv_event_clear(&event);
    prefix = local_prefix(&full, 511);
    event = generate((struct dskv_generate){
        .prefix = prefix, .tokens = local_tokens(NULL, 0), .max_tokens = 9, .top_p = 1, .ignore_eos = 1});
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    CU_ASSERT_EQUAL(event.generate.finish, DSKV_FINISH_CONTEXT);
    CU_ASSERT_EQUAL(event.generate.tokens.shape[0], 1);
    dskv_event_clear(&event);
    finish();
}

int main(void)
{
    return dskv_run_tests(
        "daemon.generate",
        (struct dskv_test[]){
            {"a draft is accepted as far as it is greedy", a_draft_is_accepted_as_far_as_it_is_greedy},
            {"a draft needs something before it", a_draft_needs_something_before_it},
            {"generation is the greedy loop", generation_is_the_greedy_loop},
            {"more drawn tokens than a frame holds are refused", more_drawn_tokens_than_a_frame_holds_are_refused},
            {"generation stops where it should", generation_stops_where_it_should},
            {"a stream gives the same tokens", a_stream_gives_the_same_tokens},
            {"a seed repeats and no seed is told", a_seed_repeats_and_no_seed_is_told},
            {"the limit itself works", the_limit_itself_works},
            {NULL, NULL},
        });
}
