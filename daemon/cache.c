#include "daemon/cache.h"

#include "base/memory.h"
#include "daemon/random.h"

#include <stdlib.h>
#include <string.h>

struct dskv_caches {
    struct dskv_blocks *blocks;
    int32_t n;
    size_t n_buckets; /* a power of two, at least n */
    struct dskv_cache **buckets;
};

static struct dskv_cache **bucket_of(const struct dskv_caches *caches, const struct dskv_id *id)
{
    uint64_t hash; /* ids are random: their first bytes are a hash */
    memcpy(&hash, id->bytes, sizeof hash);
    return &caches->buckets[hash & (caches->n_buckets - 1)];
}

struct dskv_caches *dskv_caches_open(struct dskv_blocks *blocks)
{
    struct dskv_caches *caches = dskv_calloc(1, sizeof *caches);
    caches->blocks = blocks;
    caches->n_buckets = 1024;
    caches->buckets = dskv_calloc(caches->n_buckets, sizeof *caches->buckets);
    return caches;
}

void dskv_caches_close(struct dskv_caches **caches)
{
    if (!*caches)
        return;
    for (size_t i = 0; i < (*caches)->n_buckets; i++)
        while ((*caches)->buckets[i])
            dskv_caches_free(*caches, (*caches)->buckets[i]);
    free((*caches)->buckets);
    free(*caches);
    *caches = NULL;
}

int32_t dskv_caches_count(const struct dskv_caches *caches)
{
    return caches->n;
}

static void grow(struct dskv_caches *caches)
{
    struct dskv_cache **old = caches->buckets;
    size_t n_old = caches->n_buckets;
    caches->n_buckets *= 2;
    caches->buckets = dskv_calloc(caches->n_buckets, sizeof *caches->buckets);
    for (size_t i = 0; i < n_old; i++)
        for (struct dskv_cache *cache = old[i], *next; cache; cache = next) {
            next = cache->next;
            struct dskv_cache **bucket = bucket_of(caches, &cache->id);
            cache->next = *bucket;
            *bucket = cache;
        }
    free(old);
}

struct dskv_cache *dskv_caches_add(struct dskv_caches *caches, struct dskv_session *owner, int32_t *blocks,
                                   int32_t n_blocks, int32_t length, int foreign)
{
    DSKV_ASSERT(length >= 0 && n_blocks == dskv_blocks_for(caches->blocks, length), "%d tokens in %d blocks", length,
                n_blocks);
    struct dskv_cache *cache = dskv_calloc(1, sizeof *cache);
    dskv_random_bytes(cache->id.bytes, sizeof cache->id.bytes);
    cache->length = length;
    cache->n_blocks = n_blocks;
    cache->blocks = blocks;
    cache->foreign = foreign;
    cache->session = owner;
    cache->following = owner->caches;
    if (owner->caches)
        owner->caches->previous = cache;
    owner->caches = cache;
    owner->n_caches++;
    if ((size_t)caches->n == caches->n_buckets)
        grow(caches);
    struct dskv_cache **bucket = bucket_of(caches, &cache->id);
    cache->next = *bucket;
    *bucket = cache;
    caches->n++;
    return cache;
}

struct dskv_cache *dskv_caches_find(const struct dskv_caches *caches, const struct dskv_id *id)
{
    struct dskv_cache *cache = *bucket_of(caches, id);
    while (cache && memcmp(cache->id.bytes, id->bytes, sizeof id->bytes) != 0)
        cache = cache->next;
    return cache;
}

void dskv_caches_free(struct dskv_caches *caches, struct dskv_cache *cache)
{
    struct dskv_cache **link = bucket_of(caches, &cache->id);
    while (*link != cache)
        link = &(*link)->next;
    *link = cache->next;
    if (cache->previous)
        cache->previous->following = cache->following;
    else
        cache->session->caches = cache->following;
    if (cache->following)
        cache->following->previous = cache->previous;
    cache->session->n_caches--;
    caches->n--;
    for (int32_t i = cache->n_blocks; i-- > 0;) /* backwards, so that the next one to take them gets them in order */
        dskv_blocks_release(caches->blocks, cache->blocks[i]);
    free(cache->blocks);
    free(cache);
}

int32_t dskv_caches_free_session(struct dskv_caches *caches, struct dskv_session *session)
{
    int32_t n = session->n_caches;
    while (session->caches)
        dskv_caches_free(caches, session->caches);
    return n;
}

void dskv_caches_tokens(struct dskv_blocks *blocks, const int32_t *table, int32_t length, int32_t *tokens)
{
    int32_t block_tokens = dskv_blocks_block_tokens(blocks);
    for (int32_t done = 0; done < length; done += block_tokens) {
        int32_t n = length - done < block_tokens ? length - done : block_tokens;
        memcpy(tokens + done, dskv_blocks_tokens(blocks, table[done / block_tokens]), (size_t)n * sizeof *tokens);
    }
}

uint32_t dskv_cache_check(struct dskv_blocks *blocks, const struct dskv_cache *cache, int32_t length)
{
    int32_t block_tokens = dskv_blocks_block_tokens(blocks);
    uint32_t check = dskv_tokens_check(0, NULL, 0);
    for (int32_t done = 0; done < length; done += block_tokens) {
        int32_t n = length - done < block_tokens ? length - done : block_tokens;
        check = dskv_tokens_check(check, dskv_blocks_tokens(blocks, cache->blocks[done / block_tokens]), (size_t)n);
    }
    return check;
}
