/* The server's requests over the fake engine, in this process: rows, counts, caches. */
#include "sim/local.h"
#include "sim/reference.h"
#include "support/cunit_suite.h"

#include <math.h>
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

static struct dskv_error refused(const struct dskv_request *request)
{
    struct dskv_event event = local_call(&client, request);
    struct dskv_error error = {.code = DSKV_OK};
    if (event.kind == DSKV_EVENT_ERROR)
        error = event.error;
    dskv_event_clear(&event);
    return error;
}

/* ---- forward ---------------------------------------------------------------------------------------------------- */

/* Every output of rows first .. of a result against the reference. */
static void check_rows(const struct dskv_forward_result *result, const struct reference *r, int32_t first, int32_t n)
{
    const float *logits = result->logits.data, *scores = result->scores.data, *logprobs = result->topk_logprobs.data;
    const int32_t *argmax = result->argmax.data, *ids = result->topk_ids.data;
    int wrong = 0;
    for (int32_t i = 0; i < n; i++) {
        float row[FAKE_VOCAB], previous[FAKE_VOCAB], top_logprobs[3];
        int32_t top_ids[3];
        reference_row(r, first + i, row);
        fake_topk(row, 3, top_ids, top_logprobs);
        wrong += memcmp(logits + (size_t)i * FAKE_VOCAB, row, sizeof row) != 0;
        wrong += argmax[i] != fake_argmax(row);
        wrong += memcmp(ids + 3 * i, top_ids, sizeof top_ids) != 0;
        wrong += memcmp(logprobs + 3 * i, top_logprobs, sizeof top_logprobs) != 0;
        if (first + i == 0) {
            wrong += !isnan(scores[i]);
            continue;
        }
        reference_row(r, first + i - 1, previous);
        float score = fake_score(previous, r->tokens[first + i]);
        wrong += memcmp(&scores[i], &score, sizeof score) != 0;
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void every_want_of_every_cut_equals_cold(void)
{
    enum { N = 45 };
    int32_t tokens[N];
    struct reference r = {0};
    begin_with(&(struct fake_engine_options){.n_blocks = 200});
    make_tokens(1, tokens, N);
    reference_append(&r, tokens, N);
    struct dskv_cache_ref whole = local_cache(&client, NULL, tokens, N);
    CU_ASSERT_STRING_EQUAL(whole.origin, dskv_engine_info(local.engine)->numerics_id);
    for (int32_t cut = 0; cut < N; cut++) {
        struct dskv_prefix prefix = local_prefix(&whole, cut);
        prefix.has_check = 1;
        prefix.check = dskv_tokens_check(0, tokens, (size_t)cut);
        int32_t n = N - cut;
        struct dskv_want want = {.logits_stop = n, .argmax = 1, .topk = 3, .score = 1};
        struct dskv_event event = local_forward(&client, &prefix, tokens + cut, n, want);
        struct dskv_forward_result *result = &event.forward.sequences[0];
        CU_ASSERT_EQUAL(result->cache.length, N);
        CU_ASSERT_EQUAL(result->cached, cut ? cut - 1 : 0); /* the first score needs the row before it */
        CU_ASSERT_EQUAL(result->computed, cut ? n + 1 : n);
        check_rows(result, &r, cut, n);
        dskv_event_clear(&event);
    }
    reference_free(&r);
    finish();
}

static void two_at_once_equal_two_steps(void)
{
    enum { N = 16 };
    static const int32_t pieces[] = {1, 2, 3, 7, 16};
    int32_t tokens[N];
    struct reference r = {0};
    begin();
    make_tokens(2, tokens, N);
    reference_append(&r, tokens, N);
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
        struct dskv_cache_ref cache = {0};
        for (int32_t at = 0; at < N; at += pieces[p]) {
            int32_t n = at + pieces[p] < N ? pieces[p] : N - at;
            struct dskv_prefix prefix = local_prefix(&cache, at);
            struct dskv_event event =
                local_forward(&client, at ? &prefix : NULL, tokens + at, n,
                              (struct dskv_want){.logits_stop = n, .argmax = 1, .topk = 3, .score = 1});
            check_rows(&event.forward.sequences[0], &r, at, n);
            cache = event.forward.sequences[0].cache;
            dskv_event_clear(&event);
        }
    }
    reference_free(&r);
    finish();
}

static void without_tokens_the_last_one_is_run_again(void)
{
    int32_t tokens[20];
    float row[FAKE_VOCAB];
    struct reference r = {0};
    begin();
    make_tokens(3, tokens, 20);
    reference_append(&r, tokens, 20);
    struct dskv_cache_ref cache = local_cache(&client, NULL, tokens, 20);
    int64_t used = local_stats(&local).blocks_used;
    for (int32_t length = 1; length <= 20; length++) {
        struct dskv_prefix prefix = local_prefix(&cache, length);
        struct dskv_event event = local_forward(
            &client, &prefix, NULL, 0, (struct dskv_want){.logits_stop = 1, .argmax = 1, .topk = 2, .score = 1});
        struct dskv_forward_result *result = &event.forward.sequences[0];
        reference_row(&r, length - 1, row);
        CU_ASSERT_EQUAL(result->cache.present, 0);
        CU_ASSERT_EQUAL(result->cached, length - 1);
        CU_ASSERT_EQUAL(result->computed, 1);
        CU_ASSERT_EQUAL(memcmp(result->logits.data, row, sizeof row), 0);
        CU_ASSERT_EQUAL(*(const int32_t *)result->argmax.data, fake_argmax(row));
        CU_ASSERT_EQUAL(result->topk_ids.shape[0], 1);
        CU_ASSERT_EQUAL(result->scores.shape[0], 0);
        dskv_event_clear(&event);
    }
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, used);
    CU_ASSERT_EQUAL(local_stats(&local).caches, 1);
    reference_free(&r);
    finish();
}

static void forks_take_their_tails_alone(void)
{
    int32_t tokens[168];
    begin();
    make_tokens(4, tokens, 168);
    struct dskv_cache_ref trunk = local_cache(&client, NULL, tokens, 160);
    struct dskv_stats_result before = local_stats(&local);
    CU_ASSERT_EQUAL(before.blocks_used, 10);
    for (int i = 0; i < 40; i++)
        local_cache(&client, &(struct dskv_prefix){.present = 1, .cache = trunk.id, .length = 160}, tokens + i, 3);
    struct dskv_stats_result after = local_stats(&local);
    CU_ASSERT_EQUAL(after.blocks_used, 50);
    CU_ASSERT_EQUAL(after.rows_computed - before.rows_computed, 120);
    CU_ASSERT_EQUAL(after.ranks[0].rows_computed, 160 + 120);
    CU_ASSERT_EQUAL(after.tokens_cached - before.tokens_cached, 40 * 160);
    CU_ASSERT_EQUAL(after.blocks_reserved, 0);
    finish();
}

static void many_sequences_are_all_or_none(void)
{
    enum { N = 12 };
    int32_t tokens[N][40];
    struct dskv_forward_sequence sequences[N] = {0};
    begin();
    for (int32_t i = 0; i < N; i++) {
        make_tokens(i, tokens[i], 40);
        sequences[i].tokens = local_tokens(tokens[i], 1 + 3 * i);
        sequences[i].want = (struct dskv_want){.logits_stop = 1 + 3 * i, .argmax = 1, .topk = 3, .score = 1};
    }
    struct dskv_request request = {.op = DSKV_OP_FORWARD, .forward = {N, sequences}};
    struct dskv_event event = local_call(&client, &request);
    CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
    for (int32_t i = 0; i < N; i++) {
        struct reference r = {0};
        reference_append(&r, tokens[i], 1 + 3 * i);
        check_rows(&event.forward.sequences[i], &r, 0, 1 + 3 * i);
        reference_free(&r);
    }
    dskv_event_clear(&event);
    struct dskv_stats_result before = local_stats(&local);
    tokens[7][5] = FAKE_VOCAB;
    struct dskv_error error = refused(&request);
    CU_ASSERT_EQUAL(error.code, DSKV_TOKEN_OUT_OF_RANGE);
    CU_ASSERT_EQUAL(error.index, 7);
    CU_ASSERT_STRING_EQUAL(error.field, "tokens");
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "sequences[7].tokens[5] is "));
    tokens[7][5] = FAKE_BAD_TOKEN;
    error = refused(&request);
    CU_ASSERT_EQUAL(error.code, DSKV_NOT_FINITE);
    CU_ASSERT_EQUAL(error.index, 7);
    tokens[7][5] = 9;
    for (int32_t i = 0; i < N; i++)
        sequences[i].tokens = local_tokens(tokens[0], 40);
    sequences[3].tokens = local_tokens(tokens[0], 1);
    for (int32_t i = 0; i < N; i++)
        sequences[i].want = (struct dskv_want){0};
    error = refused(&request); /* 11 * 3 + 1 blocks; 64 less 12 to 18 are free */
    CU_ASSERT_EQUAL(error.code, DSKV_OK);
    error = refused(&request);
    CU_ASSERT_EQUAL(error.code, DSKV_POOL_FULL);
    CU_ASSERT_EQUAL(error.needed, 34);
    CU_ASSERT_EQUAL(error.free, 64 - before.blocks_used - 34);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, before.blocks_used + 34);
    finish();
}

static void large_logits_come_in_rows(void)
{
    enum { N = 5000 };
    static int32_t tokens[N];
    struct reference r = {0};
    begin_with(&(struct fake_engine_options){
        .n_blocks = 320, .max_model_len = N, .max_batch_tokens = 512, .max_logit_rows = 512});
    make_tokens(5, tokens, N);
    reference_append(&r, tokens, N);
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(tokens, N),
                                             .want = {.logits_start = 10, .logits_stop = N - 5}};
    uint64_t id = local_send(&client, &(struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {1, &sequence}}, NULL);
    int32_t row = 10, wrong = 0, n_events = 0;
    struct dskv_event event;
    for (event = local_wait(&client, id); event.kind == DSKV_EVENT_ROWS; event = local_wait(&client, id), n_events++) {
        CU_ASSERT_EQUAL(event.rows.sequence, 0);
        CU_ASSERT_EQUAL(event.rows.start, row - 10);
        CU_ASSERT(event.rows.data.bytes <= DSKV_PART_BYTES);
        for (int32_t i = 0; i < event.rows.data.shape[0]; i++, row++) {
            float expected[FAKE_VOCAB];
            reference_row(&r, row, expected);
            wrong +=
                memcmp((const float *)event.rows.data.data + (size_t)i * FAKE_VOCAB, expected, sizeof expected) != 0;
        }
        dskv_event_clear(&event);
    }
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    CU_ASSERT_PTR_NULL(event.forward.sequences[0].logits.data);
    CU_ASSERT_EQUAL(event.forward.sequences[0].logits.shape[0], N - 15);
    CU_ASSERT_EQUAL(row, N - 5);
    CU_ASSERT_EQUAL(n_events, 2);
    CU_ASSERT_EQUAL(wrong, 0);
    dskv_event_clear(&event);
    reference_free(&r);
    finish();
}

static void f16_logits_are_the_rounded_ones(void)
{
    int32_t tokens[5];
    float row[FAKE_VOCAB];
    uint16_t halves[FAKE_VOCAB];
    struct reference r = {0};
    begin();
    make_tokens(6, tokens, 5);
    reference_append(&r, tokens, 5);
    struct dskv_event event = local_forward(
        &client, NULL, tokens, 5, (struct dskv_want){.logits_start = 4, .logits_stop = 5, .logits_dtype = DSKV_F16});
    reference_row(&r, 4, row);
    dskv_convert(halves, DSKV_F16, row, DSKV_F32, FAKE_VOCAB);
    CU_ASSERT_EQUAL(event.forward.sequences[0].logits.dtype, DSKV_F16);
    CU_ASSERT_EQUAL(memcmp(event.forward.sequences[0].logits.data, halves, sizeof halves), 0);
    dskv_event_clear(&event);
    reference_free(&r);
    finish();
}

static void consume_gives_the_parent_up_at_success_alone(void)
{
    int32_t tokens[20];
    begin();
    make_tokens(7, tokens, 20);
    struct dskv_cache_ref parent = local_cache(&client, NULL, tokens, 20);
    struct dskv_forward_sequence sequence = {.prefix = local_prefix(&parent, 18),
                                             .tokens = local_tokens((int32_t[]){FAKE_BAD_TOKEN}, 1),
                                             .want = {.argmax = 1},
                                             .consume = 1};
    struct dskv_request request = {.op = DSKV_OP_FORWARD, .forward = {1, &sequence}};
    CU_ASSERT_EQUAL(refused(&request).code, DSKV_NOT_FINITE);
    struct dskv_prefix whole = local_prefix(&parent, 20);
    struct dskv_event event = local_forward(&client, &whole, NULL, 0, (struct dskv_want){0}); /* it still stands */
    dskv_event_clear(&event);
    sequence.tokens = local_tokens(tokens, 4);
    CU_ASSERT_EQUAL(refused(&request).code, DSKV_OK);
    CU_ASSERT_EQUAL(refused(&request).code, DSKV_UNKNOWN_CACHE);
    CU_ASSERT_EQUAL(local_stats(&local).caches, 1);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, 2);
    finish();
}

/* A line of caches that are consumed at once runs in place: no block more than its tokens need. */
static void a_consumed_line_needs_no_copies(void)
{
    int32_t tokens[100];
    begin_with(&(struct fake_engine_options){.n_blocks = 7});
    make_tokens(8, tokens, 100);
    struct dskv_cache_ref cache = local_cache(&client, NULL, tokens, 1);
    for (int32_t i = 1; i < 100; i++) {
        struct dskv_forward_sequence sequence = {.prefix = local_prefix(&cache, i),
                                                 .tokens = local_tokens(tokens + i, 1),
                                                 .want = {.argmax = 1},
                                                 .consume = 1};
        struct dskv_event event =
            local_call(&client, &(struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {1, &sequence}});
        CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
        cache = event.forward.sequences[0].cache;
        dskv_event_clear(&event);
    }
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, 7);
    finish();
}

/* ---- errors ----------------------------------------------------------------------------------------------------- */

static struct dskv_request one(struct dskv_forward_sequence *sequence)
{
    return (struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {1, sequence}};
}

static void every_refusal_names_its_reason_and_changes_nothing(void)
{
    static int32_t tokens[600];
    float row[FAKE_VOCAB];
    struct reference r = {0};
    begin();
    make_tokens(14, tokens, 600);
    reference_append(&r, tokens, 20);
    reference_row(&r, 19, row);
    struct dskv_cache_ref cache = local_cache(&client, NULL, tokens, 20);
    struct dskv_stats_result before = local_stats(&local);
    struct dskv_prefix whole = local_prefix(&cache, 20), past = local_prefix(&cache, 21),
                       none = local_prefix(&cache, 0);
    struct dskv_prefix wrong = whole, unknown = whole;
    wrong.has_check = 1;
    unknown.cache.bytes[3] ^= 1;
    struct dskv_wire_tensor two = local_tokens(tokens, 2), empty = local_tokens(tokens, 0);
    int32_t negative[] = {5, -1};
    struct {
        struct dskv_forward_sequence sequence;
        enum dskv_code code;
        const char *field;
        uint32_t has;
        int64_t length, limit;
    } cases[] = {
        {{.tokens = empty}, DSKV_EMPTY_REQUEST, "", 0, 0, 0},
        {{.prefix = none, .tokens = empty}, DSKV_NO_ROW, "", 0, 0, 0},
        {{.prefix = past, .tokens = two}, DSKV_CUT_PAST_END, "prefix", DSKV_HAS_LENGTH | DSKV_HAS_LIMIT, 21, 20},
        {{.prefix = unknown, .tokens = two}, DSKV_UNKNOWN_CACHE, "prefix", 0, 0, 0},
        {{.prefix = wrong, .tokens = two}, DSKV_BAD_VALUE, "check", 0, 0, 0},
        {{.tokens = local_tokens(negative, 2)}, DSKV_TOKEN_OUT_OF_RANGE, "tokens", DSKV_HAS_LIMIT, 0, FAKE_VOCAB},
        {{.prefix = whole, .tokens = local_tokens(tokens, 493)},
         DSKV_TOO_LONG,
         "",
         DSKV_HAS_LENGTH | DSKV_HAS_LIMIT,
         513,
         512},
        {{.tokens = two, .want = {.logits_stop = 3}}, DSKV_BAD_VALUE, "logits", 0, 0, 0},
        {{.tokens = two, .want = {.topk = FAKE_VOCAB + 1}}, DSKV_BAD_VALUE, "topk", 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dskv_request request = one(&cases[i].sequence);
        struct dskv_error error = refused(&request);
        CU_ASSERT_EQUAL(error.code, cases[i].code);
        CU_ASSERT_STRING_EQUAL(error.field, cases[i].field);
        CU_ASSERT_EQUAL(error.has & cases[i].has, cases[i].has);
        CU_ASSERT(error.has & DSKV_HAS_INDEX);
        CU_ASSERT_EQUAL(error.length, cases[i].length);
        CU_ASSERT_EQUAL(error.limit, cases[i].limit);
        struct dskv_event event = local_forward(&client, &whole, NULL, 0, (struct dskv_want){.logits_stop = 1});
        CU_ASSERT_EQUAL(memcmp(event.forward.sequences[0].logits.data, row, sizeof row), 0);
        dskv_event_clear(&event);
    }
    struct dskv_stats_result after = local_stats(&local);
    CU_ASSERT_EQUAL(after.blocks_used, before.blocks_used);
    CU_ASSERT_EQUAL(after.blocks_reserved, 0);
    CU_ASSERT_EQUAL(after.caches, 1);
    CU_ASSERT_EQUAL(after.errors - before.errors, (int64_t)(sizeof cases / sizeof *cases));
    reference_free(&r);
    finish();
}

static void a_reply_beyond_the_limit_is_refused(void)
{
    enum { N = 300 };
    static int32_t tokens[4000];
    static struct dskv_forward_sequence sequences[N];
    begin_with(&(struct fake_engine_options){.max_model_len = 4000});
    make_tokens(16, tokens, 4000);
    for (int i = 0; i < N; i++)
        sequences[i] =
            (struct dskv_forward_sequence){.tokens = local_tokens(tokens, 4000), .want = {.logits_stop = 4000}};
    struct dskv_error error = refused(&(struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {N, sequences}});
    CU_ASSERT_EQUAL(error.code, DSKV_REPLY_TOO_LARGE);
    CU_ASSERT_EQUAL(error.limit, DSKV_MAX_REPLY_BYTES);
    CU_ASSERT(error.needed > DSKV_MAX_REPLY_BYTES);
    CU_ASSERT_EQUAL(error.index, DSKV_MAX_REPLY_BYTES / (4000 * FAKE_VOCAB * 4));
    finish();
}

static void what_makes_caches_needs_a_session(void)
{
    int32_t tokens[4];
    begin();
    make_tokens(17, tokens, 4);
    struct dskv_cache_ref cache = local_cache(&client, NULL, tokens, 4);
    struct local_client stranger = {.local = &local, .route = {.n = 1, .bytes = {9}}};
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(tokens, 4)};
    struct dskv_request requests[] = {
        one(&sequence),
        {.op = DSKV_OP_VERIFY, .verify = {.tokens = local_tokens(tokens, 4), .draft = local_tokens(tokens, 1)}},
        {.op = DSKV_OP_GENERATE, .generate = {.tokens = local_tokens(tokens, 4), .max_tokens = 1, .top_p = 1}},
        {.op = DSKV_OP_IMPORT,
         .import_ = {.tokens = local_tokens(tokens, 4), .n_layers = 1, .n_kv_heads = 1, .head_dim = 1}},
        {.op = DSKV_OP_FREE, .free_caches = {.all = 1}},
    };
    for (int known = 0; known < 2; known++, stranger.has_session = 1) /* none, then one that never existed */
        for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
            struct dskv_event event = local_call(&stranger, &requests[i]);
            CU_ASSERT_EQUAL(event.error.code, DSKV_BAD_VALUE);
            CU_ASSERT_STRING_EQUAL(event.error.field, "session");
            dskv_event_clear(&event);
        }
    /* Knowing an id suffices to use it and to free it. */
    stranger.has_session = 0;
    struct dskv_request free_it = {.op = DSKV_OP_FREE, .free_caches = {.n = 1, .caches = &cache.id}};
    for (int n = 1; n >= 0; n--) {
        struct dskv_event event = local_call(&stranger, &free_it);
        CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
        CU_ASSERT_EQUAL(event.free_caches.n_freed, n);
        dskv_event_clear(&event);
    }
    finish();
}

int main(void)
{
    return dskv_run_tests(
        "daemon.server",
        (struct dskv_test[]){
            {"every want of every cut equals cold", every_want_of_every_cut_equals_cold},
            {"two at once equal two steps", two_at_once_equal_two_steps},
            {"without tokens the last one is run again", without_tokens_the_last_one_is_run_again},
            {"forks take their tails alone", forks_take_their_tails_alone},
            {"many sequences are all or none", many_sequences_are_all_or_none},
            {"large logits come in rows", large_logits_come_in_rows},
            {"f16 logits are the rounded ones", f16_logits_are_the_rounded_ones},
            {"consume gives the parent up at success alone", consume_gives_the_parent_up_at_success_alone},
            {"a consumed line needs no copies", a_consumed_line_needs_no_copies},
            {"every refusal names its reason and changes nothing", every_refusal_names_its_reason_and_changes_nothing},
            {"a reply beyond the limit is refused", a_reply_beyond_the_limit_is_refused},
            {"what makes caches needs a session", what_makes_caches_needs_a_session},
            {NULL, NULL},
        });
}
