/* A first session in C: a prompt, a fork, a cut, a refused cut, and a generation that goes on from a cache.
 *
 *     cc -o fork fork.c $(pkg-config --cflags --libs dskv)
 *     ./fork [ENDPOINT]
 *
 * Token ids stand in for text here; a tokenizer of the model's gives better ones.
 */
#include <dskv/client.h>

#include <stdio.h>

static int fail(const char *what, const struct dskv_error *error)
{
    fprintf(stderr, "%s: %s: %s\n", what, dskv_code_name(error->code), error->message);
    return 1;
}

/* Runs tokens on a prefix and says how much of it was computed. */
static enum dskv_code extend(struct dskv_client *client, const char *name, struct dskv_cache_prefix prefix,
                             const int32_t *tokens, size_t n_tokens, struct dskv_output **output,
                             struct dskv_error *error)
{
    struct dskv_forward_options options = {.size = sizeof options};
    options.tokens = tokens;
    options.n_tokens = n_tokens;
    options.prefix = prefix;
    options.logits = DSKV_LOGITS_LAST;
    options.argmax = 1;
    enum dskv_code code = dskv_forward(client, &options, output, error);
    if (!code)
        printf("%s: %d tokens (%d cached, %d computed), then comes %d\n", name, dskv_cache_length((*output)->cache),
               (*output)->cached, (*output)->computed, (*output)->argmax[(*output)->n_rows - 1]);
    return code;
}

static int run(struct dskv_client *client)
{
    static const int32_t prompt[] = {9, 8, 7, 6, 5, 4, 3, 2, 1}, left[] = {10, 11}, right[] = {12, 13}, other[] = {14};
    struct dskv_error error;
    struct dskv_output *base = NULL, *a = NULL, *b = NULL, *c = NULL, *refused = NULL;
    struct dskv_generated *generated = NULL;
    int status = 1;

    if (extend(client, "prompt", (struct dskv_cache_prefix){NULL, 0}, prompt, 9, &base, &error)) {
        fail("prompt", &error);
        goto end;
    }
    /* A fork is a second use of the same cache, a cut is a shorter length of it: neither copies nor changes anything.
     */
    struct dskv_cache_prefix whole = {base->cache, DSKV_WHOLE}, cut = {base->cache, 4}, past_end = {base->cache, 10};
    if (extend(client, "fork a", whole, left, 2, &a, &error) || extend(client, "fork b", whole, right, 2, &b, &error) ||
        extend(client, "cut", cut, other, 1, &c, &error)) {
        fail("extend", &error);
        goto end;
    }
    if (extend(client, "cut past the end", past_end, other, 1, &refused, &error) != DSKV_CUT_PAST_END) {
        fprintf(stderr, "a cut past the end was not refused\n");
        goto end;
    }
    printf("refused: %s: %s\n", dskv_code_name(error.code), error.message);

    /* The best next token was not run yet: it comes first. */
    struct dskv_generate_options options = {.size = sizeof options};
    options.tokens = &a->argmax[a->n_rows - 1];
    options.n_tokens = 1;
    options.prefix.cache = a->cache;
    options.prefix.length = DSKV_WHOLE;
    options.max_tokens = 8;
    if (dskv_generate(client, &options, &generated, &error)) {
        fail("generate", &error);
        goto end;
    }
    printf("generated (%s):", generated->finish_reason);
    for (int i = 0; i < generated->n_tokens; i++)
        printf(" %d", generated->tokens[i]);
    printf("\n");
    status = 0;
end:
    dskv_output_free(&base);
    dskv_output_free(&a);
    dskv_output_free(&b);
    dskv_output_free(&c);
    dskv_output_free(&refused);
    dskv_generated_free(&generated);
    return status;
}

int main(int argc, char **argv)
{
    struct dskv_client *client = NULL;
    struct dskv_error error;
    struct dskv_connect_options options = {.size = sizeof options};
    options.endpoint = argc > 1 ? argv[1] : NULL;
    options.timeout_ms = 10000;
    if (dskv_connect(&options, &client, &error))
        return fail("connect", &error);
    int status = run(client);
    dskv_close(&client);
    return status;
}
