/* Handles of caches: what a client remembers of a value that lives on the server.
 *
 * A handle keeps id, length, origin and tokens.  Giving one up never waits; the id travels with the client's next
 * request.
 */
#include "ipc/client_inside.h"

#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum dskv_code dskv_prefix_read(const struct dskv_client *client, struct dskv_cache_prefix prefix,
                                struct dskv_prefix *wire, struct dskv_error *error)
{
    *wire = (struct dskv_prefix){0};
    struct dskv_cache *cache = prefix.cache;
    if (!cache)
        return DSKV_OK;
    if (cache->client != client) {
        dskv_fail(error, DSKV_UNKNOWN_CACHE, "the cache %s belongs to another client", cache->name);
        dskv_error_set_field(error, "prefix");
        return DSKV_UNKNOWN_CACHE;
    }
    int32_t length = prefix.length == DSKV_WHOLE ? cache->length : prefix.length;
    if (length < 0) {
        dskv_fail(error, DSKV_BAD_VALUE, "the prefix's length is %d", length);
        dskv_error_set_field(error, "prefix.length");
        dskv_error_set_valid(error, "0 to %d, or DSKV_WHOLE", cache->length);
        return DSKV_BAD_VALUE;
    }
    if (length > cache->length) {
        dskv_fail(error, DSKV_CUT_PAST_END, "a prefix of %d tokens is longer than its cache of %d", length,
                  cache->length);
        dskv_error_set(error, DSKV_HAS_LENGTH, length);
        dskv_error_set(error, DSKV_HAS_LIMIT, cache->length);
        dskv_error_set_field(error, "prefix.length");
        return DSKV_CUT_PAST_END;
    }
    *wire = (struct dskv_prefix){.present = 1, .cache = cache->id, .length = length, .has_check = 1};
    wire->check = length == cache->length ? cache->check : dskv_tokens_check(0, cache->tokens, (size_t)length);
    return DSKV_OK;
}

void dskv_prefix_mark_consumed(struct dskv_cache_prefix prefix, int consume)
{
    if (consume && prefix.cache)
        prefix.cache->consumed = 1;
}

static void name_id(const struct dskv_id *id, char name[33])
{
    for (int i = 0; i < 16; i++)
        snprintf(name + 2 * i, 3, "%02x", id->bytes[i]);
}

struct dskv_cache *dskv_cache_open(struct dskv_client *client, const struct dskv_cache_ref *ref,
                                   struct dskv_cache_prefix prefix, const struct dskv_wire_tensor *more, size_t n_more)
{
    if (!ref->present)
        return NULL;
    struct dskv_cache *cache = dskv_calloc(1, sizeof *cache);
    cache->client = client;
    dskv_client_hold(client);
    cache->id = ref->id;
    cache->length = ref->length;
    name_id(&ref->id, cache->name);
    memcpy(cache->origin, ref->origin, sizeof cache->origin);
    cache->tokens = dskv_calloc((size_t)cache->length, sizeof *cache->tokens);

    /* The server's word on the length is final; the tokens are ours.  What it cuts off (a rejected draft) is not
     * copied. */
    size_t room = (size_t)cache->length, used = 0;
    if (prefix.cache) {
        used = (size_t)(prefix.length == DSKV_WHOLE ? prefix.cache->length : prefix.length);
        used = used < room ? used : room;
        memcpy(cache->tokens, prefix.cache->tokens, used * sizeof *cache->tokens);
    }
    int whole = prefix.cache && used == (size_t)prefix.cache->length;
    cache->check = whole ? prefix.cache->check : dskv_tokens_check(0, cache->tokens, used);
    size_t prefix_used = used;
    for (size_t i = 0; i < n_more && used < room; i++) {
        size_t n = (size_t)more[i].shape[0];
        n = n < room - used ? n : room - used;
        memcpy(cache->tokens + used, more[i].data, n * sizeof *cache->tokens);
        used += n;
    }
    cache->check = dskv_tokens_check(cache->check, cache->tokens + prefix_used, used - prefix_used);
    return cache;
}

const char *dskv_cache_id(const struct dskv_cache *cache)
{
    return cache->name;
}

int32_t dskv_cache_length(const struct dskv_cache *cache)
{
    return cache->length;
}

const int32_t *dskv_cache_tokens(const struct dskv_cache *cache)
{
    return cache->tokens;
}

const char *dskv_cache_origin(const struct dskv_cache *cache)
{
    return cache->origin;
}

struct dskv_cache *dskv_cache_take(struct dskv_cache **cache)
{
    struct dskv_cache *taken = *cache;
    *cache = NULL;
    return taken;
}

void dskv_cache_free(struct dskv_cache **cache)
{
    struct dskv_cache *freed = dskv_cache_take(cache);
    if (!freed)
        return;
    if (!freed->consumed)
        dskv_client_give_up(freed->client, &freed->id);
    dskv_client_release(freed->client);
    free(freed->tokens);
    free(freed);
}

enum dskv_code dskv_flush(struct dskv_client *client, int32_t timeout_ms, struct dskv_error *error)
{
    enum dskv_code code = dskv_client_check_open(client, error);
    if (!code && client->n_freed && !client->has_session) /* first: what comes meanwhile may move the list */
        code = dskv_client_hello(client, error);
    while (!code && client->n_freed) {
        size_t n = dskv_client_next_freed(client);
        struct dskv_request request = {.op = DSKV_OP_FREE, .free_caches = {.n = (int32_t)n, .caches = client->freed}};
        struct dskv_event event;
        code = dskv_call_run(client, &request, timeout_ms, &event, error);
        if (code)
            break;
        dskv_event_clear(&event);
        dskv_client_forget_freed(client, n);
    }
    return code;
}
