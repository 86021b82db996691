/* Caches: the values that clients hold.
 *
 * A cache is an id, a length and the blocks that its tokens fill; nothing ever changes it.  Cutting is naming a shorter
 * length, forking is using it twice; neither comes here.  Whoever knows the id may use the cache; the session that made
 * it owns its lease.  Knows blocks as numbers with holders, of which every cache is one; knows no sequence and no
 * bytes.
 */
#ifndef DSKV_DAEMON_CACHE_H
#define DSKV_DAEMON_CACHE_H

#include "daemon/blocks.h"
#include "daemon/session.h"

struct dskv_cache {
    struct dskv_id id;
    int32_t length;                          /* tokens */
    int32_t n_blocks;                        /* dskv_blocks_for(length) */
    int32_t *blocks;                         /* [n_blocks], each held by this cache */
    int foreign;                             /* some of its keys and values were imported */
    struct dskv_session *session;            /* the owner */
    struct dskv_cache *previous, *following; /* of the same session */
    struct dskv_cache *next;                 /* of the hash bucket */
};

struct dskv_caches;

/* blocks must outlive the caches. */
struct dskv_caches *dskv_caches_open(struct dskv_blocks *blocks);
/* Frees every cache. */
void dskv_caches_close(struct dskv_caches **caches);
int32_t dskv_caches_count(const struct dskv_caches *caches);

/* A new cache with a new random id.  Takes over the array and its holds. */
struct dskv_cache *dskv_caches_add(struct dskv_caches *caches, struct dskv_session *owner, int32_t *blocks,
                                   int32_t n_blocks, int32_t length, int foreign);
/* Null when there is none: freed and never issued are the same. */
struct dskv_cache *dskv_caches_find(const struct dskv_caches *caches, const struct dskv_id *id);
void dskv_caches_free(struct dskv_caches *caches, struct dskv_cache *cache);
/* Frees all that a session owns; returns how many. */
int32_t dskv_caches_free_session(struct dskv_caches *caches, struct dskv_session *session);

/* Copies the first `length` token ids of a block table. */
void dskv_caches_tokens(struct dskv_blocks *blocks, const int32_t *table, int32_t length, int32_t *tokens);
/* dskv_tokens_check over the first `length` tokens. */
uint32_t dskv_cache_check(struct dskv_blocks *blocks, const struct dskv_cache *cache, int32_t length);

#endif
