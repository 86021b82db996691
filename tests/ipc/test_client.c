/* Every call of the C client against a toy server (test_client_server.h): what it sends, what it makes of the replies,
 * and how it fails. */
#include "test_client_server.h"

#include "dskv/client.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct toy_server *server;
static struct dskv_client *client;
static struct dskv_error error;

#define OK(call) CU_ASSERT_EQUAL_FATAL((call), DSKV_OK)

static void begin(void)
{
    server = toy_server_open();
    struct dskv_connect_options options = {.size = sizeof options, .endpoint = toy_server_endpoint(server)};
    options.timeout_ms = 5000;
    OK(dskv_connect(&options, &client, &error));
}

static void end(void)
{
    dskv_close(&client);
    CU_ASSERT_PTR_NULL(client);
    toy_server_close(&server);
}

static const int32_t counting[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

static struct dskv_forward_options new_tokens(const int32_t *tokens, size_t n)
{
    struct dskv_forward_options options = {.size = sizeof options, .tokens = tokens, .n_tokens = n};
    return options;
}

/* A cache of the first n counting tokens. */
static struct dskv_cache *make_cache(size_t n)
{
    struct dskv_forward_options options = new_tokens(counting, n);
    struct dskv_output *output = NULL;
    OK(dskv_forward(client, &options, &output, &error));
    struct dskv_cache *cache = dskv_cache_take(&output->cache);
    dskv_output_free(&output);
    return cache;
}

static int is_row(const float *row, int32_t token, int32_t position)
{
    for (int32_t id = 0; id < TOY_VOCAB; id++)
        if (row[id] != toy_logit(token, position, id))
            return 0;
    return 1;
}

static void connects_and_describes(void)
{
    begin();
    struct dskv_server_info *info = NULL;
    struct dskv_server_stats *stats = NULL;
    OK(dskv_ping(client, 0, &error));
    OK(dskv_info(client, 0, &info, &error));
    CU_ASSERT_STRING_EQUAL(info->family, "toy");
    CU_ASSERT_STRING_EQUAL(info->weight_dtype, "bf16");
    CU_ASSERT_STRING_EQUAL(info->kv_dtype, "f32");
    CU_ASSERT_EQUAL(info->vocab, TOY_VOCAB);
    CU_ASSERT_EQUAL(info->n_end_tokens, 2);
    CU_ASSERT_EQUAL(info->end_tokens[1], 9);
    CU_ASSERT_EQUAL(info->max_model_len, 4096);
    CU_ASSERT_EQUAL(info->cache_lease_ms, 5000);
    OK(dskv_stats(client, 0, &stats, &error));
    CU_ASSERT_EQUAL(stats->n_ranks, 2);
    CU_ASSERT_EQUAL(stats->uptime_s, 1.5);
    CU_ASSERT_EQUAL(stats->ranks[0].rows_computed, 5);
    CU_ASSERT_EQUAL(stats->ranks[1].weight_bytes, 1001);
    dskv_info_free(&info);
    dskv_stats_free(&stats);
    CU_ASSERT_PTR_NULL(info);
    dskv_info_free(&info);
    end();
}

static void forward_extends_forks_and_cuts(void)
{
    begin();
    struct dskv_forward_options options = new_tokens(counting, 5);
    struct dskv_output *a = NULL, *b = NULL, *c = NULL;
    options.logits = DSKV_LOGITS_LAST;
    OK(dskv_forward(client, &options, &a, &error));
    CU_ASSERT_EQUAL(a->cached, 0);
    CU_ASSERT_EQUAL(a->computed, 5);
    CU_ASSERT_EQUAL(a->n_logits, 1);
    CU_ASSERT_EQUAL(a->vocab, TOY_VOCAB);
    CU_ASSERT(is_row(a->logits, 4, 4));
    CU_ASSERT_EQUAL(dskv_cache_length(a->cache), 5);
    CU_ASSERT_EQUAL(strlen(dskv_cache_id(a->cache)), 32);
    CU_ASSERT_STRING_EQUAL(dskv_cache_origin(a->cache), "toy");
    CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(a->cache), counting, 5 * sizeof *counting), 0);

    options = new_tokens((const int32_t[]){50, 51}, 2);
    options.prefix = (struct dskv_cache_prefix){a->cache, DSKV_WHOLE};
    OK(dskv_forward(client, &options, &b, &error));
    CU_ASSERT_EQUAL(b->cached, 5);
    CU_ASSERT_EQUAL(b->computed, 2);
    CU_ASSERT_PTR_NULL(b->logits);
    CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(b->cache), (const int32_t[]){0, 1, 2, 3, 4, 50, 51}, 28), 0);

    options = new_tokens((const int32_t[]){60}, 1);
    options.prefix = (struct dskv_cache_prefix){b->cache, 6};
    OK(dskv_forward(client, &options, &c, &error));
    CU_ASSERT_EQUAL(c->cached, 6);
    CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(c->cache), (const int32_t[]){0, 1, 2, 3, 4, 50, 60}, 28), 0);

    int n = toy_server_requests(server);
    struct dskv_output *none = (struct dskv_output *)&options;
    options.prefix.length = 8;
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &none, &error), DSKV_CUT_PAST_END);
    CU_ASSERT_PTR_NULL(none);
    CU_ASSERT_EQUAL(error.code, DSKV_CUT_PAST_END);
    CU_ASSERT_EQUAL(error.has, DSKV_HAS_LENGTH | DSKV_HAS_LIMIT);
    CU_ASSERT(error.length == 8 && error.limit == 7);
    options.prefix.length = -2;
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &none, NULL), DSKV_BAD_VALUE);
    CU_ASSERT_EQUAL(toy_server_requests(server), n);
    CU_ASSERT_EQUAL(toy_server_caches(server), 3);
    dskv_output_free(&a);
    dskv_output_free(&b);
    dskv_output_free(&c);
    dskv_output_free(&none);
    end();
}

static void forward_without_tokens_gives_the_last_row(void)
{
    begin();
    struct dskv_cache *cache = make_cache(5);
    struct dskv_forward_options options = new_tokens(NULL, 0);
    struct dskv_output *output = NULL;
    options.prefix = (struct dskv_cache_prefix){cache, 3};
    options.logits = DSKV_LOGITS_ALL;
    options.argmax = 1;
    OK(dskv_forward(client, &options, &output, &error));
    CU_ASSERT_PTR_NULL(output->cache);
    CU_ASSERT_EQUAL(output->cached, 2);
    CU_ASSERT_EQUAL(output->computed, 1);
    CU_ASSERT_EQUAL_FATAL(output->n_logits, 1);
    CU_ASSERT(is_row(output->logits, 2, 2));
    CU_ASSERT_EQUAL(output->n_rows, 1);
    CU_ASSERT_EQUAL(output->argmax[0], toy_next(2, 2));
    dskv_output_free(&output);
    dskv_cache_free(&cache);
    end();
}

static void every_output_comes_through(void)
{
    begin();
    struct dskv_forward_options options = new_tokens(counting, 10);
    struct dskv_output *output = NULL;
    options.logits = DSKV_LOGITS_ALL; /* 1.6 MB: in pieces */
    options.argmax = 1;
    options.topk = 3;
    options.score = 1;
    OK(dskv_forward(client, &options, &output, &error));
    CU_ASSERT_EQUAL_FATAL(output->n_logits, 10);
    CU_ASSERT_EQUAL_FATAL(output->n_rows, 10);
    CU_ASSERT_EQUAL_FATAL(output->topk, 3);
    for (int32_t i = 0; i < 10; i++) {
        CU_ASSERT(is_row(output->logits + (size_t)i * TOY_VOCAB, i, i));
        CU_ASSERT_EQUAL(output->argmax[i], toy_next(i, i));
        CU_ASSERT_EQUAL(output->topk_ids[3 * i + 2], i * 100 + 2);
        CU_ASSERT_EQUAL(output->topk_logprobs[3 * i + 1], -1 - (float)i / 100);
    }
    CU_ASSERT(isnan(output->scores[0]));
    CU_ASSERT_EQUAL(output->scores[9], -9);
    dskv_output_free(&output);

    options = new_tokens(counting, 10);
    options.logits = DSKV_LOGITS_RANGE;
    options.logits_start = 2;
    options.logits_stop = 4;
    OK(dskv_forward(client, &options, &output, &error));
    CU_ASSERT_EQUAL_FATAL(output->n_logits, 2);
    CU_ASSERT(is_row(output->logits, 2, 2));
    CU_ASSERT(is_row(output->logits + TOY_VOCAB, 3, 3));
    CU_ASSERT_PTR_NULL(output->argmax);
    dskv_output_free(&output);

    options.logits_stop = 11;
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &output, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "logits");
    end();
}

static void forward_many_is_one_request(void)
{
    begin();
    struct dskv_cache *cache = make_cache(4);
    struct dskv_forward_options sequences[3];
    struct dskv_outputs *outputs = NULL;
    for (int i = 0; i < 3; i++)
        sequences[i] = new_tokens(counting + 4 + i, (size_t)i + 1);
    sequences[1].prefix = (struct dskv_cache_prefix){cache, 2};
    sequences[1].logits = DSKV_LOGITS_LAST;
    sequences[2].argmax = 1;
    OK(dskv_forward_many(client, sequences, 3, 0, &outputs, &error));
    CU_ASSERT_EQUAL_FATAL(outputs->n, 3);
    CU_ASSERT_EQUAL(toy_server_requests(server), 3); /* hello, make_cache, this */
    CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(outputs->outputs[1]->cache), (const int32_t[]){0, 1, 5, 6}, 16), 0);
    CU_ASSERT(is_row(outputs->outputs[1]->logits, 6, 3));
    CU_ASSERT_EQUAL(outputs->outputs[2]->argmax[2], toy_next(8, 2));
    CU_ASSERT_EQUAL(toy_server_caches(server), 4);
    dskv_outputs_free(&outputs);
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_caches(server), 1);

    sequences[1].prefix.length = 5;
    CU_ASSERT_EQUAL(dskv_forward_many(client, sequences, 3, 0, &outputs, &error), DSKV_CUT_PAST_END);
    CU_ASSERT_EQUAL(error.index, 1);
    CU_ASSERT_PTR_NULL(outputs);
    sequences[1].prefix.length = 0;
    sequences[2].size = 0;
    CU_ASSERT_EQUAL(dskv_forward_many(client, sequences, 3, 0, &outputs, &error), DSKV_BAD_VALUE);
    CU_ASSERT_EQUAL(error.index, 2);
    CU_ASSERT_EQUAL(dskv_forward_many(client, sequences, 0, 0, &outputs, &error), DSKV_BAD_VALUE);
    CU_ASSERT_EQUAL(dskv_forward_many(client, NULL, 2, 0, &outputs, &error), DSKV_BAD_VALUE);
    sequences[2].size = sizeof sequences[2];
    toy_server_set(server, TOY_FULL);
    CU_ASSERT_EQUAL(dskv_forward_many(client, sequences, 3, 0, &outputs, &error), DSKV_POOL_FULL);
    CU_ASSERT_EQUAL(error.has, DSKV_HAS_NEEDED | DSKV_HAS_FREE | DSKV_HAS_INDEX);
    CU_ASSERT_EQUAL(error.needed, 12);
    CU_ASSERT_EQUAL(error.free, 3);
    CU_ASSERT_EQUAL(error.index, 1);
    dskv_cache_free(&cache);
    end();
}

/* Its handle has nothing to tell. */
static void expect_consumed(struct dskv_cache **cache)
{
    struct dskv_forward_options options = new_tokens(counting, 1);
    struct dskv_output *none = NULL;
    options.prefix = (struct dskv_cache_prefix){*cache, DSKV_WHOLE};
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &none, &error), DSKV_UNKNOWN_CACHE);
    int n = toy_server_requests(server);
    dskv_cache_free(cache);
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_requests(server), n);
}

static void consume_gives_the_parent_up(void)
{
    begin();
    struct dskv_cache *cache = make_cache(4);
    struct dskv_forward_options options = new_tokens(counting + 4, 1);
    struct dskv_output *output = NULL;
    options.prefix = (struct dskv_cache_prefix){cache, DSKV_WHOLE};
    options.consume = 1;
    OK(dskv_forward(client, &options, &output, &error));
    CU_ASSERT_EQUAL(dskv_cache_length(output->cache), 5);
    CU_ASSERT_EQUAL(toy_server_caches(server), 1);
    expect_consumed(&cache);
    dskv_output_free(&output);
    end();
}

static void verify_and_generate_consume(void)
{
    begin();
    struct dskv_cache *cache = make_cache(4);
    struct dskv_verify_options verify = {.size = sizeof verify, .tokens = counting + 4, .n_tokens = 1, .consume = 1};
    struct dskv_verified *verified = NULL;
    verify.prefix = (struct dskv_cache_prefix){cache, DSKV_WHOLE};
    OK(dskv_verify(client, &verify, &verified, &error));
    CU_ASSERT_EQUAL(toy_server_caches(server), 1);
    expect_consumed(&cache);

    struct dskv_generate_options generate = {.size = sizeof generate, .tokens = counting + 5, .n_tokens = 1};
    struct dskv_generated *generated = NULL;
    generate.prefix = (struct dskv_cache_prefix){verified->cache, DSKV_WHOLE};
    generate.max_tokens = 3;
    generate.consume = 1;
    OK(dskv_generate(client, &generate, &generated, &error));
    CU_ASSERT_EQUAL(toy_server_caches(server), 1);
    expect_consumed(&verified->cache);
    dskv_verified_free(&verified);
    dskv_generated_free(&generated);
    end();
}

static void a_cancelled_generation_consumes_nothing(void)
{
    begin();
    struct dskv_cache *cache = make_cache(4);
    struct dskv_generate_options options = {.size = sizeof options, .tokens = counting + 4, .n_tokens = 1};
    struct dskv_stream *stream = NULL;
    struct dskv_generated *generated = NULL;
    options.prefix = (struct dskv_cache_prefix){cache, DSKV_WHOLE};
    options.max_tokens = 1000;
    options.consume = 1;
    OK(dskv_stream_open(client, &options, &stream, &error));
    OK(dskv_stream_cancel(stream, &error));
    OK(dskv_stream_result(stream, &generated, &error));
    CU_ASSERT_STRING_EQUAL(generated->finish_reason, "cancelled");
    dskv_stream_close(&stream);
    dskv_generated_free(&generated);
    int n = toy_server_requests(server);
    dskv_cache_free(&cache);
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_requests(server), n + 1); /* it was still there to be given up */
    end();
}

static void caches_are_given_up_with_later_calls(void)
{
    begin();
    struct dskv_cache *caches[20];
    for (int i = 0; i < 20; i++)
        caches[i] = make_cache(3);
    int n = toy_server_requests(server);
    for (int i = 0; i < 20; i++) {
        dskv_cache_free(&caches[i]);
        dskv_cache_free(&caches[i]); /* twice is harmless */
    }
    CU_ASSERT_EQUAL(toy_server_requests(server), n);
    CU_ASSERT_EQUAL(toy_server_caches(server), 20);
    caches[0] = make_cache(1);
    CU_ASSERT_EQUAL(toy_server_caches(server), 20 - TOY_FREE_IDS + 1); /* as many as the server takes at once */
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_caches(server), 1);
    struct dskv_client *other = NULL;
    struct dskv_connect_options connect = {.size = sizeof connect, .endpoint = toy_server_endpoint(server)};
    OK(dskv_connect(&connect, &other, &error));
    struct dskv_forward_options options = new_tokens(counting, 1);
    struct dskv_output *output = NULL;
    options.prefix = (struct dskv_cache_prefix){caches[0], DSKV_WHOLE};
    CU_ASSERT_EQUAL(dskv_forward(other, &options, &output, &error), DSKV_UNKNOWN_CACHE);
    dskv_close(&other);
    CU_ASSERT_EQUAL(toy_server_caches(server), 0); /* the toy has one session */
    dskv_close(&client);
    CU_ASSERT_EQUAL(dskv_cache_tokens(caches[0])[0], 0); /* a handle outlives its client */
    dskv_cache_free(&caches[0]);
    end();
}

static void expect_given_up_again(enum toy_mood mood, enum dskv_code code)
{
    begin();
    struct dskv_cache *cache = make_cache(3);
    dskv_cache_free(&cache);
    struct dskv_forward_options options = new_tokens(counting, 1);
    struct dskv_output *output = NULL;
    options.timeout_ms = 50;
    toy_server_set(server, mood);
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &output, &error), code);
    CU_ASSERT_EQUAL(toy_server_caches(server), 1);
    toy_server_set(server, TOY_WELL);
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_caches(server), 0);
    int n = toy_server_requests(server);
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_requests(server), n);
    end();
}

static void what_a_failed_call_carried_goes_with_a_later_one(void)
{
    expect_given_up_again(TOY_SILENT, DSKV_TIMEOUT);
    expect_given_up_again(TOY_NO_SESSION, DSKV_BAD_VALUE);
}

static void verify_cuts_at_the_first_difference(void)
{
    begin();
    struct dskv_cache *cache = make_cache(4);
    int32_t first = toy_next(9, 4), second = toy_next(first, 5);
    const int32_t draft[3] = {first, second, -1};
    struct dskv_verify_options options = {.size = sizeof options, .tokens = (const int32_t[]){9}, .n_tokens = 1};
    struct dskv_verified *verified = NULL;
    options.draft = draft;
    options.n_draft = 3;
    options.prefix = (struct dskv_cache_prefix){cache, 4};
    OK(dskv_verify(client, &options, &verified, &error));
    CU_ASSERT_EQUAL(verified->accepted, 2);
    CU_ASSERT_EQUAL(verified->next, toy_next(second, 6));
    CU_ASSERT_EQUAL(verified->cached, 4);
    CU_ASSERT_EQUAL(verified->computed, 4);
    const int32_t tokens[7] = {0, 1, 2, 3, 9, first, second};
    CU_ASSERT_EQUAL_FATAL(dskv_cache_length(verified->cache), 7);
    CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(verified->cache), tokens, sizeof tokens), 0);
    dskv_verified_free(&verified);
    dskv_verified_free(&verified);
    dskv_cache_free(&cache);
    end();
}

static void generate_gives_tokens_and_a_cache(void)
{
    begin();
    struct dskv_cache *cache = make_cache(4);
    const int32_t stop_ids[2] = {3, 4};
    const struct dskv_stop stop = {stop_ids, 2};
    struct dskv_generate_options options = {.size = sizeof options, .tokens = (const int32_t[]){9}, .n_tokens = 1};
    struct dskv_generated *generated = NULL;
    options.prefix = (struct dskv_cache_prefix){cache, DSKV_WHOLE};
    options.max_tokens = 3;
    OK(dskv_generate(client, &options, &generated, &error));
    CU_ASSERT_EQUAL_FATAL(generated->n_tokens, 3);
    int32_t first = toy_next(9, 4), second = toy_next(first, 5);
    CU_ASSERT_EQUAL(generated->tokens[0], first);
    CU_ASSERT_EQUAL(generated->tokens[1], second);
    CU_ASSERT_EQUAL(generated->steps, 2);
    CU_ASSERT_STRING_EQUAL(generated->finish_reason, "length");
    CU_ASSERT_EQUAL(generated->seed, 77);
    const int32_t tokens[7] = {0, 1, 2, 3, 9, first, second}; /* all but the last */
    CU_ASSERT_EQUAL_FATAL(dskv_cache_length(generated->cache), 7);
    CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(generated->cache), tokens, sizeof tokens), 0);
    dskv_generated_free(&generated);

    options.temperature = 0.5;
    options.has_seed = 1;
    options.seed = 123456789012345;
    options.stops = &stop;
    options.n_stops = 1;
    OK(dskv_generate(client, &options, &generated, &error));
    CU_ASSERT_EQUAL(generated->tokens[0], first + 1);
    CU_ASSERT_EQUAL(generated->seed, 123456789012345);
    CU_ASSERT_STRING_EQUAL(generated->finish_reason, "stop");
    dskv_generated_free(&generated);

    options.n_stops = 1000;
    CU_ASSERT_EQUAL(dskv_generate(client, &options, &generated, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "stop");
    options.n_stops = 0;
    options.top_p = 2;
    CU_ASSERT_EQUAL(dskv_generate(client, &options, &generated, &error), DSKV_BAD_VALUE);
    dskv_cache_free(&cache);
    end();
}

static void a_stream_stands_beside_other_calls(void)
{
    begin();
    struct dskv_generate_options options = {.size = sizeof options, .tokens = counting, .n_tokens = 2, .max_tokens = 4};
    struct dskv_stream *stream = NULL;
    struct dskv_generated *generated = NULL;
    const int32_t *tokens;
    size_t n, n_all = 0;
    int32_t all[4], last = 1;
    OK(dskv_stream_open(client, &options, &stream, &error));
    OK(dskv_ping(client, 0, &error)); /* the stream's events come first, and are kept */
    struct dskv_cache *cache = make_cache(3);
    for (;;) {
        OK(dskv_stream_next(stream, &tokens, &n, &error));
        if (!n)
            break;
        for (size_t i = 0; i < n; i++)
            all[n_all++] = tokens[i];
    }
    CU_ASSERT_EQUAL(n_all, 4);
    for (int32_t i = 0; i < 4; i++) {
        last = toy_next(last, 1 + i);
        CU_ASSERT_EQUAL(all[i], last);
    }
    OK(dskv_stream_next(stream, &tokens, &n, &error));
    CU_ASSERT_EQUAL(n, 0);
    OK(dskv_stream_result(stream, &generated, &error));
    CU_ASSERT_EQUAL(memcmp(generated->tokens, all, sizeof all), 0);
    CU_ASSERT_EQUAL(dskv_cache_length(generated->cache), 5);
    struct dskv_generated *again = NULL;
    CU_ASSERT_EQUAL(dskv_stream_result(stream, &again, &error), DSKV_BAD_VALUE);
    dskv_stream_close(&stream);
    dskv_stream_close(&stream);
    dskv_generated_free(&generated);
    dskv_cache_free(&cache);
    end();
}

static void a_stream_can_be_cancelled(void)
{
    begin();
    struct dskv_generate_options options = {
        .size = sizeof options, .tokens = counting, .n_tokens = 1, .max_tokens = 1000};
    struct dskv_stream *stream = NULL;
    struct dskv_generated *generated = NULL;
    const int32_t *tokens;
    size_t n;
    OK(dskv_stream_open(client, &options, &stream, &error));
    OK(dskv_stream_next(stream, &tokens, &n, &error));
    OK(dskv_stream_cancel(stream, &error));
    OK(dskv_stream_result(stream, &generated, &error));
    CU_ASSERT_STRING_EQUAL(generated->finish_reason, "cancelled");
    OK(dskv_stream_cancel(stream, &error)); /* nothing to cancel */
    dskv_stream_close(&stream);
    dskv_generated_free(&generated);
    CU_ASSERT_EQUAL(toy_server_cancels(server), 1);

    /* Closing cancels too; the cache of the result that nobody took is given up. */
    OK(dskv_flush(client, 0, &error));
    OK(dskv_stream_open(client, &options, &stream, &error));
    OK(dskv_stream_next(stream, &tokens, &n, &error));
    dskv_stream_close(&stream);
    OK(dskv_ping(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_cancels(server), 2);
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_caches(server), 0);
    end();
}

/* ---- keys and values -------------------------------------------------------------------------------------------- */

static int is_exported(const struct dskv_exported *kv, int32_t length)
{
    if (kv->n_layers != TOY_LAYERS || kv->n_kv_heads != TOY_HEADS || kv->length != length ||
        kv->head_dim != TOY_HEAD_DIM)
        return 0;
    if (kv->layer_bytes != (size_t)TOY_HEADS * (size_t)length * TOY_HEAD_DIM * sizeof(float))
        return 0;
    for (int32_t i = 0; i < 2 * TOY_LAYERS; i++) {
        const float *at = i % 2 ? kv->v[i / 2] : kv->k[i / 2];
        for (int32_t head = 0; head < TOY_HEADS; head++)
            for (int32_t p = 0; p < length; p++)
                for (int32_t d = 0; d < TOY_HEAD_DIM; d++)
                    if (*at++ != toy_kv(i / 2, i % 2, head, p, d))
                        return 0;
    }
    return memcmp(kv->tokens, counting, (size_t)length * sizeof *counting) == 0;
}

static struct dskv_import_options as_import(const struct dskv_exported *kv)
{
    struct dskv_import_options options = {.size = sizeof options};
    options.n_layers = kv->n_layers;
    options.n_kv_heads = kv->n_kv_heads;
    options.length = kv->length;
    options.head_dim = kv->head_dim;
    options.dtype = kv->dtype;
    options.model = kv->model;
    options.k = kv->k;
    options.v = kv->v;
    options.tokens = kv->tokens;
    return options;
}

static void exports_and_imports(void)
{
    begin();
    struct dskv_cache *cache = make_cache(23);
    static const int32_t lengths[] = {23, 20, 1, 0, DSKV_WHOLE};
    for (int i = 0; i < 5; i++) {
        struct dskv_exported *kv = NULL;
        struct dskv_cache *again = NULL;
        OK(dskv_export(client, (struct dskv_cache_prefix){cache, lengths[i]}, 0, &kv, &error));
        int32_t length = lengths[i] == DSKV_WHOLE ? 23 : lengths[i];
        CU_ASSERT(is_exported(kv, length));
        CU_ASSERT_STRING_EQUAL(kv->dtype, "f32");
        CU_ASSERT_STRING_EQUAL(kv->model, "00ff");
        CU_ASSERT_STRING_EQUAL(kv->origin, "toy");
        struct dskv_import_options options = as_import(kv);
        OK(dskv_import(client, &options, &again, &error));
        CU_ASSERT_EQUAL(dskv_cache_length(again), length);
        CU_ASSERT_STRING_EQUAL(dskv_cache_origin(again), "foreign");
        CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(again), counting, (size_t)length * sizeof *counting), 0);
        dskv_cache_free(&again);
        dskv_exported_free(&kv);
        dskv_exported_free(&kv);
    }
    dskv_cache_free(&cache);
    end();
}

static void refused_exports_and_imports(void)
{
    begin();
    struct dskv_cache *cache = make_cache(23), *none = NULL;
    struct dskv_cache_prefix prefix = {cache, DSKV_WHOLE};
    struct dskv_exported *kv = NULL, *nothing = NULL;
    OK(dskv_export(client, prefix, 0, &kv, &error));
    CU_ASSERT_EQUAL(dskv_export(client, (struct dskv_cache_prefix){cache, 24}, 0, &nothing, &error), DSKV_CUT_PAST_END);
    CU_ASSERT_EQUAL(dskv_export(client, (struct dskv_cache_prefix){NULL, 0}, 0, &nothing, &error), DSKV_BAD_VALUE);
    toy_server_set(server, TOY_SKIPS_PARTS);
    CU_ASSERT_EQUAL(dskv_export(client, prefix, 0, &nothing, &error), DSKV_BAD_MESSAGE);
    CU_ASSERT_PTR_NULL(nothing);
    toy_server_set(server, TOY_WELL);

    struct dskv_import_options options = as_import(kv);
    options.head_dim++;
    CU_ASSERT_EQUAL(dskv_import(client, &options, &none, &error), DSKV_WRONG_SHAPE);
    options = as_import(kv);
    options.dtype = "f8";
    CU_ASSERT_EQUAL(dskv_import(client, &options, &none, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "dtype");
    options = as_import(kv);
    options.v = NULL;
    CU_ASSERT_EQUAL(dskv_import(client, &options, &none, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "v");
    options = as_import(kv);
    toy_server_set(server, TOY_REFUSES_PART); /* under the part's id: still the import's error */
    int n = toy_server_cancels(server);
    CU_ASSERT_EQUAL(dskv_import(client, &options, &none, &error), DSKV_WRONG_SHAPE);
    CU_ASSERT_PTR_NULL(none);
    toy_server_set(server, TOY_WELL);
    OK(dskv_ping(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_cancels(server), n + 1);
    toy_server_set(server, TOY_ENDS_IMPORT); /* what ended the import counts, not what came after */
    CU_ASSERT_EQUAL(dskv_import(client, &options, &none, &error), DSKV_NOT_FINITE);
    toy_server_set(server, TOY_WELL);
    dskv_exported_free(&kv);
    dskv_cache_free(&cache);
    end();
}

/* ---- failures --------------------------------------------------------------------------------------------------- */

static void a_silent_server_times_out(void)
{
    begin();
    toy_server_set(server, TOY_SILENT);
    CU_ASSERT_EQUAL(dskv_ping(client, 50, &error), DSKV_TIMEOUT);
    toy_server_set(server, TOY_WELL);
    OK(dskv_ping(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_cancels(server), 1);
    end();
}

static void a_late_result_is_given_up(void)
{
    begin();
    struct dskv_forward_options options = new_tokens(counting, 3);
    struct dskv_output *output = NULL;
    options.timeout_ms = 50;
    toy_server_set(server, TOY_LATE);
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &output, &error), DSKV_TIMEOUT);
    OK(dskv_ping(client, 0, &error)); /* brings the late result */
    CU_ASSERT_EQUAL(toy_server_caches(server), 1);
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_caches(server), 0);
    end();
}

static void what_cannot_be_read_is_an_error(void)
{
    begin();
    struct dskv_forward_options options = new_tokens(counting, 10);
    struct dskv_output *output = NULL;
    toy_server_set(server, TOY_MUMBLES);
    CU_ASSERT_EQUAL(dskv_ping(client, 0, &error), DSKV_BAD_MESSAGE);
    toy_server_set(server, TOY_SHORT_CHANGES);
    options.logits = DSKV_LOGITS_ALL;
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &output, &error), DSKV_BAD_MESSAGE);
    CU_ASSERT_PTR_NULL(output);
    OK(dskv_flush(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_caches(server), 0);
    end();
}

static void an_ended_session_is_told_once(void)
{
    begin();
    struct dskv_forward_options options = new_tokens(counting, 1);
    struct dskv_output *output = NULL;
    toy_server_set(server, TOY_NO_SESSION);
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &output, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "session");
    toy_server_set(server, TOY_WELL);
    OK(dskv_forward(client, &options, &output, &error));
    CU_ASSERT_EQUAL(toy_server_hellos(server), 2);
    dskv_output_free(&output);
    end();
}

static void a_lost_server_is_unreachable(void)
{
    begin();
    struct dskv_cache *cache = make_cache(2);
    struct dskv_generate_options options = {
        .size = sizeof options, .tokens = counting, .n_tokens = 1, .max_tokens = 1000};
    struct dskv_stream *stream = NULL;
    const int32_t *tokens;
    size_t n;
    OK(dskv_stream_open(client, &options, &stream, &error));
    OK(dskv_stream_next(stream, &tokens, &n, &error));
    OK(dskv_stream_next(stream, &tokens, &n, &error));
    toy_server_close(&server);
    CU_ASSERT_EQUAL(dskv_stream_next(stream, &tokens, &n, &error), DSKV_UNREACHABLE);
    CU_ASSERT_EQUAL(dskv_ping(client, 200, &error), DSKV_UNREACHABLE);
    dskv_stream_close(&stream);
    dskv_cache_free(&cache);
    dskv_close(&client);
    dskv_close(&client);
    CU_ASSERT_EQUAL(dskv_ping(client, 0, &error), DSKV_UNREACHABLE); /* null: closed */

    struct dskv_connect_options nowhere = {.size = sizeof nowhere, .endpoint = "ipc:///tmp/dskv-nobody-is-here"};
    nowhere.connect_timeout_ms = 200;
    CU_ASSERT_EQUAL(dskv_connect(&nowhere, &client, &error), DSKV_UNREACHABLE);
    CU_ASSERT_PTR_NULL(client);
    nowhere.endpoint = "carrier pigeon";
    CU_ASSERT_NOT_EQUAL(dskv_connect(&nowhere, &client, &error), DSKV_OK);
}

static void a_server_that_came_back_is_used_again(void)
{
    begin();
    struct dskv_cache *cache = make_cache(2);
    toy_server_set(server, TOY_SILENT);
    struct dskv_generate_options options = {.size = sizeof options, .tokens = counting, .n_tokens = 1};
    struct dskv_stream *stream = NULL;
    struct dskv_generated *generated = NULL;
    OK(dskv_stream_open(client, &options, &stream, &error));
    toy_server_restart(server);
    toy_server_set(server, TOY_WELL);
    CU_ASSERT_EQUAL(dskv_stream_result(stream, &generated, &error), DSKV_UNREACHABLE); /* what was in flight is lost */
    CU_ASSERT_PTR_NULL(generated);
    dskv_stream_close(&stream);
    struct dskv_forward_options more = new_tokens(counting, 1);
    struct dskv_output *output = NULL;
    more.prefix = (struct dskv_cache_prefix){cache, DSKV_WHOLE};
    OK(dskv_forward(client, &more, &output, &error)); /* a cache is known by its id, not by the connection */
    CU_ASSERT_EQUAL(toy_server_hellos(server), 1);
    dskv_output_free(&output);
    dskv_cache_free(&cache);
    end();
}

static void options_carry_their_size(void)
{
    begin();
    struct {
        struct dskv_forward_options options;
        int32_t unknown;
    } newer = {.options = new_tokens(counting, 1)};
    struct dskv_output *output = NULL;
    newer.options.size = sizeof newer;
    OK(dskv_forward(client, &newer.options, &output, &error)); /* unknown and zero: the default */
    dskv_output_free(&output);
    newer.unknown = 1;
    CU_ASSERT_EQUAL(dskv_forward(client, &newer.options, &output, &error), DSKV_UNSUPPORTED);
    newer.options.size = offsetof(struct dskv_forward_options, prefix); /* an older caller's */
    newer.options.topk = 5;
    OK(dskv_forward(client, &newer.options, &output, &error));
    CU_ASSERT_EQUAL(output->topk, 0);
    dskv_output_free(&output);
    newer.options.size = 0;
    CU_ASSERT_EQUAL(dskv_forward(client, &newer.options, &output, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "size");
    CU_ASSERT_EQUAL(dskv_forward(client, NULL, &output, &error), DSKV_BAD_VALUE);
    newer.options = new_tokens(NULL, 3);
    CU_ASSERT_EQUAL(dskv_forward(client, &newer.options, &output, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "tokens");
    end();
}

static void large_requests_stay_at_home(void)
{
    begin();
    size_t n = 300000; /* 1.2 MB in one frame, the toy takes 1 MiB */
    int32_t *tokens = calloc(n, sizeof *tokens);
    struct dskv_forward_options options = new_tokens(tokens, n);
    struct dskv_output *output = NULL;
    int n_requests = toy_server_requests(server);
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &output, &error), DSKV_BAD_VALUE);
    CU_ASSERT_EQUAL(error.limit, 1 << 20);
    OK(dskv_ping(client, 0, &error));
    CU_ASSERT_EQUAL(toy_server_requests(server), n_requests + 1);
    free(tokens);
    end();
}

static void error_names_are_public(void)
{
    CU_ASSERT_STRING_EQUAL(dskv_code_name(DSKV_OK), "ok");
    CU_ASSERT_STRING_EQUAL(dskv_code_name(DSKV_POOL_FULL), "pool_full");
}

int main(void)
{
    static const struct dskv_test tests[] = {
        {"connects and describes", connects_and_describes},
        {"forward extends, forks and cuts", forward_extends_forks_and_cuts},
        {"forward without tokens gives the last row", forward_without_tokens_gives_the_last_row},
        {"every output comes through", every_output_comes_through},
        {"forward_many is one request", forward_many_is_one_request},
        {"consume gives the parent up", consume_gives_the_parent_up},
        {"verify and generate consume", verify_and_generate_consume},
        {"a cancelled generation consumes nothing", a_cancelled_generation_consumes_nothing},
        {"caches are given up with later calls", caches_are_given_up_with_later_calls},
        {"what a failed call carried goes with a later one", what_a_failed_call_carried_goes_with_a_later_one},
        {"verify cuts at the first difference", verify_cuts_at_the_first_difference},
        {"generate gives tokens and a cache", generate_gives_tokens_and_a_cache},
        {"a stream stands beside other calls", a_stream_stands_beside_other_calls},
        {"a stream can be cancelled", a_stream_can_be_cancelled},
        {"exports and imports", exports_and_imports},
        {"refused exports and imports", refused_exports_and_imports},
        {"a silent server times out", a_silent_server_times_out},
        {"a late result is given up", a_late_result_is_given_up},
        {"what cannot be read is an error", what_cannot_be_read_is_an_error},
        {"an ended session is told once", an_ended_session_is_told_once},
        {"a lost server is unreachable", a_lost_server_is_unreachable},
        {"a server that came back is used again", a_server_that_came_back_is_used_again},
        {"options carry their size", options_carry_their_size},
        {"large requests stay at home", large_requests_stay_at_home},
        {"error names are public", error_names_are_public},
        {NULL, NULL},
    };
    return dskv_run_tests("ipc.client", tests);
}
