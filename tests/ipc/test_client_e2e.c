/* The C client against a running dskvd (DSKV_ENDPOINT, atlas-gpt2): bits, not tolerances. */
#include "dskv/client.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 16 };

static struct dskv_client *client;
static struct dskv_server_info *info;
static struct dskv_error error;
static int32_t prompt[N];

#define OK(call) succeed(call, #call)

static void succeed(enum dskv_code code, const char *call)
{
    if (code)
        fprintf(stderr, "%s: %s: %s\n", call, dskv_code_name(code), error.message);
    CU_ASSERT_EQUAL_FATAL(code, DSKV_OK);
}

static void begin(void)
{
    OK(dskv_connect(NULL, &client, &error));
    OK(dskv_info(client, 0, &info, &error));
    for (int i = 0; i < N; i++)
        prompt[i] = (i * 37 + 5) % info->vocab;
}

static void end(void)
{
    struct dskv_server_stats *stats = NULL;
    OK(dskv_flush(client, 0, &error));
    OK(dskv_stats(client, 0, &stats, &error));
    CU_ASSERT_EQUAL(stats->caches, 0); /* every test frees what it made */
    CU_ASSERT_EQUAL(stats->blocks_used, 0);
    dskv_stats_free(&stats);
    dskv_info_free(&info);
    dskv_close(&client);
}

/* tokens on a prefix, all logits. */
static struct dskv_output *forward(const int32_t *tokens, size_t n, struct dskv_cache *cache, int32_t length)
{
    struct dskv_forward_options options = {.size = sizeof options, .tokens = tokens, .n_tokens = n};
    struct dskv_output *output = NULL;
    options.prefix = (struct dskv_cache_prefix){cache, length};
    options.logits = DSKV_LOGITS_ALL;
    options.argmax = 1;
    options.score = !cache;
    OK(dskv_forward(client, &options, &output, &error));
    return output;
}

static int same_rows(const struct dskv_output *a, int first_a, const struct dskv_output *b, int first_b, int n)
{
    size_t vocab = (size_t)info->vocab;
    return memcmp(a->logits + (size_t)first_a * vocab, b->logits + (size_t)first_b * vocab,
                  (size_t)n * vocab * sizeof *a->logits) == 0;
}

static void cuts_in_pieces_are_the_same_as_cold(void)
{
    begin();
    struct dskv_output *cold = forward(prompt, N, NULL, 0);
    CU_ASSERT_EQUAL(cold->computed, N);
    CU_ASSERT_EQUAL(cold->vocab, info->vocab);
    for (int cut = 0; cut <= N; cut++) {
        struct dskv_output *rest = forward(prompt + cut, (size_t)(N - cut), cold->cache, cut);
        if (cut < N) {
            CU_ASSERT_EQUAL(rest->cached, cut);
            CU_ASSERT_EQUAL(rest->computed, N - cut);
            CU_ASSERT(same_rows(cold, cut, rest, 0, N - cut));
            CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(rest->cache), prompt, sizeof prompt), 0);
            CU_ASSERT_STRING_EQUAL(dskv_cache_origin(rest->cache), info->numerics_id);
        } else {
            CU_ASSERT_PTR_NULL(rest->cache); /* the last token again, without writing */
            CU_ASSERT_EQUAL(rest->cached, N - 1);
            CU_ASSERT(same_rows(cold, N - 1, rest, 0, 1));
        }
        dskv_output_free(&rest);
    }
    CU_ASSERT(isnan(cold->scores[0]));
    for (int i = 1; i < N; i++)
        CU_ASSERT(cold->scores[i] < 0);
    dskv_output_free(&cold);
    end();
}

static void many_are_the_same_as_alone(void)
{
    begin();
    struct dskv_forward_options sequences[3];
    struct dskv_outputs *outputs = NULL;
    for (int i = 0; i < 3; i++) {
        sequences[i] = (struct dskv_forward_options){
            .size = sizeof sequences[i], .tokens = prompt, .n_tokens = (size_t)(5 * i + 1)};
        sequences[i].logits = DSKV_LOGITS_LAST;
        sequences[i].topk = 4;
    }
    OK(dskv_forward_many(client, sequences, 3, 0, &outputs, &error));
    for (int i = 0; i < 3; i++) {
        const struct dskv_output *together = outputs->outputs[i];
        struct dskv_output *alone = forward(prompt, (size_t)(5 * i + 1), NULL, 0);
        CU_ASSERT(same_rows(together, 0, alone, 5 * i, 1));
        CU_ASSERT_EQUAL(together->topk_ids[4 * (5 * i)], alone->argmax[5 * i]);
        dskv_output_free(&alone);
    }
    dskv_outputs_free(&outputs);
    end();
}

static void verify_and_generate_agree(void)
{
    begin();
    struct dskv_generate_options generate = {.size = sizeof generate, .tokens = prompt, .n_tokens = N};
    struct dskv_generated *generated = NULL, *streamed = NULL;
    struct dskv_stream *stream = NULL;
    generate.max_tokens = 8;
    generate.ignore_eos = 1;
    OK(dskv_generate(client, &generate, &generated, &error));
    CU_ASSERT_EQUAL_FATAL(generated->n_tokens, 8);
    CU_ASSERT_STRING_EQUAL(generated->finish_reason, "length");
    CU_ASSERT_EQUAL(dskv_cache_length(generated->cache), N + 7);

    size_t n, n_all = 0;
    const int32_t *tokens;
    OK(dskv_stream_open(client, &generate, &stream, &error));
    do {
        OK(dskv_stream_next(stream, &tokens, &n, &error));
        for (size_t i = 0; i < n && n_all < 8; i++)
            CU_ASSERT_EQUAL(tokens[i], generated->tokens[n_all++]);
    } while (n);
    CU_ASSERT_EQUAL(n_all, 8);
    OK(dskv_stream_result(stream, &streamed, &error));
    CU_ASSERT_EQUAL(streamed->steps, generated->steps);
    dskv_stream_close(&stream);

    int32_t draft[8];
    memcpy(draft, generated->tokens, sizeof draft);
    draft[5] = (draft[5] + 1) % info->vocab;
    struct dskv_verify_options verify = {.size = sizeof verify, .tokens = prompt, .n_tokens = N};
    struct dskv_verified *verified = NULL;
    verify.draft = draft;
    verify.n_draft = 8;
    OK(dskv_verify(client, &verify, &verified, &error));
    CU_ASSERT_EQUAL(verified->accepted, 5);
    CU_ASSERT_EQUAL(verified->next, generated->tokens[5]);
    CU_ASSERT_EQUAL(dskv_cache_length(verified->cache), N + 5);
    CU_ASSERT_EQUAL(memcmp(dskv_cache_tokens(verified->cache) + N, draft, 5 * sizeof *draft), 0);

    struct dskv_output *warm = forward(&verified->next, 1, verified->cache, DSKV_WHOLE);
    CU_ASSERT_EQUAL(warm->argmax[0], generated->tokens[6]);
    dskv_output_free(&warm);
    dskv_verified_free(&verified);
    dskv_generated_free(&generated);
    dskv_generated_free(&streamed);
    end();
}

static void sampling_follows_its_seed(void)
{
    begin();
    struct dskv_generate_options options = {.size = sizeof options, .tokens = prompt, .n_tokens = N};
    struct dskv_generated *a = NULL, *b = NULL;
    options.max_tokens = 12;
    options.temperature = 1;
    options.ignore_eos = 1;
    OK(dskv_generate(client, &options, &a, &error));
    options.has_seed = 1;
    options.seed = a->seed;
    OK(dskv_generate(client, &options, &b, &error));
    CU_ASSERT_EQUAL(a->n_tokens, b->n_tokens);
    CU_ASSERT_EQUAL(memcmp(a->tokens, b->tokens, (size_t)a->n_tokens * sizeof *a->tokens), 0);
    dskv_generated_free(&a);
    dskv_generated_free(&b);
    end();
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

static int same_kv(const struct dskv_exported *a, const struct dskv_exported *b)
{
    int same = a->n_layers == b->n_layers && a->layer_bytes == b->layer_bytes;
    for (int i = 0; i < a->n_layers && same; i++)
        same = memcmp(a->k[i], b->k[i], a->layer_bytes) == 0 && memcmp(a->v[i], b->v[i], a->layer_bytes) == 0;
    return same;
}

static void an_import_is_the_cache_again(void)
{
    begin();
    struct dskv_output *cold = forward(prompt, N, NULL, 0);
    struct dskv_exported *kv = NULL, *again = NULL;
    struct dskv_cache *imported = NULL, *zeroed = NULL;
    OK(dskv_export(client, (struct dskv_cache_prefix){cold->cache, N - 1}, 0, &kv, &error));
    CU_ASSERT_EQUAL(kv->n_layers, info->n_layers);
    CU_ASSERT_EQUAL(kv->n_kv_heads, info->n_kv_heads);
    CU_ASSERT_EQUAL(kv->length, N - 1);
    CU_ASSERT_STRING_EQUAL(kv->origin, info->numerics_id);
    struct dskv_import_options options = as_import(kv);
    OK(dskv_import(client, &options, &imported, &error));
    CU_ASSERT_STRING_EQUAL(dskv_cache_origin(imported), "foreign");
    struct dskv_output *next = forward(prompt + N - 1, 1, imported, DSKV_WHOLE);
    CU_ASSERT(same_rows(cold, N - 1, next, 0, 1));
    OK(dskv_export(client, (struct dskv_cache_prefix){imported, DSKV_WHOLE}, 0, &again, &error));
    CU_ASSERT(same_kv(kv, again));

    memset((void *)again->v[0], 0, again->layer_bytes); /* the cache is read, not computed again from its tokens */
    options = as_import(again);
    OK(dskv_import(client, &options, &zeroed, &error));
    struct dskv_output *other = forward(prompt + N - 1, 1, zeroed, DSKV_WHOLE);
    CU_ASSERT(!same_rows(cold, N - 1, other, 0, 1));
    dskv_output_free(&other);
    dskv_output_free(&next);
    dskv_output_free(&cold);
    dskv_cache_free(&imported);
    dskv_cache_free(&zeroed);
    dskv_exported_free(&kv);
    dskv_exported_free(&again);
    end();
}

static void refusals_change_nothing(void)
{
    begin();
    struct dskv_output *cold = forward(prompt, N, NULL, 0), *none = NULL;
    struct dskv_cache *no_cache = NULL;
    struct dskv_exported *kv = NULL;
    struct dskv_forward_options options = {.size = sizeof options, .tokens = prompt, .n_tokens = 1};
    const int32_t bad[1] = {info->vocab};
    OK(dskv_export(client, (struct dskv_cache_prefix){cold->cache, 4}, 0, &kv, &error));
    options.prefix = (struct dskv_cache_prefix){cold->cache, N + 1};
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &none, &error), DSKV_CUT_PAST_END);
    options.prefix.length = 4;
    options.tokens = bad;
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &none, &error), DSKV_TOKEN_OUT_OF_RANGE);
    options = (struct dskv_forward_options){.size = sizeof options};
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &none, &error), DSKV_EMPTY_REQUEST);
    size_t n = (size_t)info->max_model_len + 1;
    int32_t *tokens = calloc(n, sizeof *tokens);
    options = (struct dskv_forward_options){.size = sizeof options, .tokens = tokens, .n_tokens = n};
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &none, &error), DSKV_TOO_LONG);
    CU_ASSERT_EQUAL(error.limit, info->max_model_len);
    free(tokens);
    struct dskv_import_options import = as_import(kv);
    import.model = "00112233445566778899aabbccddeeff";
    CU_ASSERT_EQUAL(dskv_import(client, &import, &no_cache, &error), DSKV_WRONG_MODEL);
    import = as_import(kv);
    import.n_layers--;
    CU_ASSERT_EQUAL(dskv_import(client, &import, &no_cache, &error), DSKV_WRONG_SHAPE);
    import = as_import(kv);
    const float infinite = INFINITY;
    memcpy((void *)kv->k[1], &infinite, sizeof infinite);
    CU_ASSERT_EQUAL(dskv_import(client, &import, &no_cache, &error), DSKV_NOT_FINITE);
    CU_ASSERT_PTR_NULL(no_cache);
    CU_ASSERT_PTR_NULL(none);

    struct dskv_output *canary = forward(prompt + 4, N - 4, cold->cache, 4);
    CU_ASSERT(same_rows(cold, 4, canary, 0, N - 4));
    dskv_output_free(&canary);
    options = (struct dskv_forward_options){.size = sizeof options, .tokens = prompt, .n_tokens = 1, .consume = 1};
    options.prefix = (struct dskv_cache_prefix){cold->cache, 4};
    OK(dskv_forward(client, &options, &canary, &error));
    CU_ASSERT_EQUAL(dskv_forward(client, &options, &none, &error), DSKV_UNKNOWN_CACHE);
    dskv_output_free(&canary);
    dskv_output_free(&cold);
    dskv_exported_free(&kv);
    end();
}

int main(void)
{
    static const struct dskv_test tests[] = {
        {"cuts in pieces are the same as cold", cuts_in_pieces_are_the_same_as_cold},
        {"many are the same as alone", many_are_the_same_as_alone},
        {"verify and generate agree", verify_and_generate_agree},
        {"sampling follows its seed", sampling_follows_its_seed},
        {"an import is the cache again", an_import_is_the_cache_again},
        {"refusals change nothing", refusals_change_nothing},
        {NULL, NULL},
    };
    return dskv_run_tests("ipc.client_e2e", tests);
}
