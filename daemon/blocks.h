/* Blocks: the bookkeeping of the pool.
 *
 * Owns, per block: how many hold it, the tokens that it stands for, and its mark.  Slots below the mark are spoken for:
 * somebody may read them, so nobody writes them again; slots from the mark on belong to nobody.  Knows neither caches
 * nor sequences (both are just holders) nor the bytes, which lie on the ranks.
 *
 * Nothing fails midway: whoever will write reserves all blocks that it may ever need at once, or is refused, and then
 * takes them one by one as it goes.  Free blocks are reused last in, first out, so that the pool touches as little
 * memory as it can.
 */
#ifndef DSKV_DAEMON_BLOCKS_H
#define DSKV_DAEMON_BLOCKS_H

#include "base/status.h"

#include <stdint.h>

struct dskv_blocks;

struct dskv_blocks *dskv_blocks_open(int32_t n_blocks, int32_t block_tokens);
void dskv_blocks_close(struct dskv_blocks **blocks);

int32_t dskv_blocks_total(const struct dskv_blocks *blocks);
int32_t dskv_blocks_block_tokens(const struct dskv_blocks *blocks);
/* Held by somebody. */
int32_t dskv_blocks_used(const struct dskv_blocks *blocks);
/* Promised and not yet taken. */
int32_t dskv_blocks_reserved(const struct dskv_blocks *blocks);
/* Blocks that n_tokens fill. */
int32_t dskv_blocks_for(const struct dskv_blocks *blocks, int32_t n_tokens);

/* Promises n blocks.  DSKV_POOL_FULL {needed, free}: nothing was promised. */
enum dskv_code dskv_blocks_reserve(struct dskv_blocks *blocks, int64_t n, struct dskv_error *error);
void dskv_blocks_unreserve(struct dskv_blocks *blocks, int32_t n);
/* Takes one promised block: held once, all its slots spoken for by the taker, who lowers the mark when it knows its
 * end. */
int32_t dskv_blocks_take(struct dskv_blocks *blocks);

void dskv_blocks_hold(struct dskv_blocks *blocks, int32_t block);
/* The last release frees the block. */
void dskv_blocks_release(struct dskv_blocks *blocks, int32_t block);
int32_t dskv_blocks_holders(const struct dskv_blocks *blocks, int32_t block);

/* May the slots of this block from `used` on be written in place by one who extends its first `used` tokens?  Yes when
 * they belong to nobody: the mark stands there, or the only holder says that it ends there (holder_ends).  Then all of
 * them are spoken for.  Otherwise the extender must copy the first `used` tokens to a block of its own. */
int dskv_blocks_claim(struct dskv_blocks *blocks, int32_t block, int32_t used, int holder_ends);
/* The one who spoke for the slots ends at `used`: the rest belongs to nobody again. */
void dskv_blocks_set_mark(struct dskv_blocks *blocks, int32_t block, int32_t used);
int32_t dskv_blocks_mark(const struct dskv_blocks *blocks, int32_t block);

/* The tokens that a block stands for: [block_tokens], valid as far as the holder knows. */
int32_t *dskv_blocks_tokens(struct dskv_blocks *blocks, int32_t block);

#endif
