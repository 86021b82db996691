#include "daemon/blocks.h"

#include "base/limits.h"
#include "base/memory.h"

#include <stdlib.h>

struct block {
    int32_t n_holders;
    int32_t mark;
};

struct dskv_blocks {
    int32_t n_blocks, block_tokens;
    int32_t n_free, n_reserved;
    int32_t *free_list;   /* [n_free], the next one last */
    struct block *blocks; /* [n_blocks] */
    int32_t *tokens;      /* [n_blocks, block_tokens]; pages are touched as blocks are */
};

struct dskv_blocks *dskv_blocks_open(int32_t n_blocks, int32_t block_tokens)
{
    DSKV_ASSERT(n_blocks > 0 && n_blocks <= DSKV_MAX_BLOCKS && block_tokens > 0, "%d blocks of %d tokens", n_blocks,
                block_tokens);
    struct dskv_blocks *blocks = dskv_calloc(1, sizeof *blocks);
    blocks->n_blocks = blocks->n_free = n_blocks;
    blocks->block_tokens = block_tokens;
    blocks->free_list = dskv_calloc((size_t)n_blocks, sizeof *blocks->free_list);
    blocks->blocks = dskv_calloc((size_t)n_blocks, sizeof *blocks->blocks);
    blocks->tokens = dskv_calloc((size_t)n_blocks * (size_t)block_tokens, sizeof *blocks->tokens);
    for (int32_t i = 0; i < n_blocks; i++)
        blocks->free_list[i] = n_blocks - 1 - i; /* block 0 is taken first */
    return blocks;
}

void dskv_blocks_close(struct dskv_blocks **blocks)
{
    if (!*blocks)
        return;
    free((*blocks)->free_list);
    free((*blocks)->blocks);
    free((*blocks)->tokens);
    free(*blocks);
    *blocks = NULL;
}

int32_t dskv_blocks_total(const struct dskv_blocks *blocks)
{
    return blocks->n_blocks;
}

int32_t dskv_blocks_block_tokens(const struct dskv_blocks *blocks)
{
    return blocks->block_tokens;
}

int32_t dskv_blocks_used(const struct dskv_blocks *blocks)
{
    return blocks->n_blocks - blocks->n_free;
}

int32_t dskv_blocks_reserved(const struct dskv_blocks *blocks)
{
    return blocks->n_reserved;
}

int32_t dskv_blocks_for(const struct dskv_blocks *blocks, int32_t n_tokens)
{
    return (int32_t)(((int64_t)n_tokens + blocks->block_tokens - 1) / blocks->block_tokens);
}

enum dskv_code dskv_blocks_reserve(struct dskv_blocks *blocks, int64_t n, struct dskv_error *error)
{
    int32_t available = blocks->n_free - blocks->n_reserved;
    DSKV_ASSERT(n >= 0 && available >= 0, "%lld blocks, %d free, %d reserved", (long long)n, blocks->n_free,
                blocks->n_reserved);
    if (n > available) {
        dskv_fail(error, DSKV_POOL_FULL, "the request needs %lld blocks of %d tokens, %d of %d are free", (long long)n,
                  blocks->block_tokens, available, blocks->n_blocks);
        dskv_error_set(error, DSKV_HAS_NEEDED, n);
        dskv_error_set(error, DSKV_HAS_FREE, available);
        return DSKV_POOL_FULL;
    }
    blocks->n_reserved += (int32_t)n;
    return DSKV_OK;
}

void dskv_blocks_unreserve(struct dskv_blocks *blocks, int32_t n)
{
    DSKV_ASSERT(n >= 0 && n <= blocks->n_reserved, "%d of %d reserved blocks", n, blocks->n_reserved);
    blocks->n_reserved -= n;
}

int32_t dskv_blocks_take(struct dskv_blocks *blocks)
{
    DSKV_ASSERT(blocks->n_reserved > 0 && blocks->n_free >= blocks->n_reserved, "%d reserved, %d free",
                blocks->n_reserved, blocks->n_free);
    int32_t block = blocks->free_list[--blocks->n_free];
    blocks->n_reserved--;
    DSKV_ASSERT(blocks->blocks[block].n_holders == 0, "free block %d has %d holders", block,
                blocks->blocks[block].n_holders);
    blocks->blocks[block] = (struct block){.n_holders = 1, .mark = blocks->block_tokens};
    return block;
}

static struct block *held(const struct dskv_blocks *blocks, int32_t block)
{
    DSKV_ASSERT(block >= 0 && block < blocks->n_blocks, "block %d of %d", block, blocks->n_blocks);
    DSKV_ASSERT(blocks->blocks[block].n_holders > 0, "block %d has %d holders", block, blocks->blocks[block].n_holders);
    return &blocks->blocks[block];
}

void dskv_blocks_hold(struct dskv_blocks *blocks, int32_t block)
{
    held(blocks, block)->n_holders++;
}

void dskv_blocks_release(struct dskv_blocks *blocks, int32_t block)
{
    if (--held(blocks, block)->n_holders == 0)
        blocks->free_list[blocks->n_free++] = block;
}

int32_t dskv_blocks_holders(const struct dskv_blocks *blocks, int32_t block)
{
    DSKV_ASSERT(block >= 0 && block < blocks->n_blocks, "block %d of %d", block, blocks->n_blocks);
    return blocks->blocks[block].n_holders;
}

int dskv_blocks_claim(struct dskv_blocks *blocks, int32_t block, int32_t used, int holder_ends)
{
    struct block *b = held(blocks, block);
    DSKV_ASSERT(used > 0 && used < blocks->block_tokens && used <= b->mark, "%d tokens of block %d, mark %d", used,
                block, b->mark);
    if (b->mark != used && !(holder_ends && b->n_holders == 1))
        return 0;
    b->mark = blocks->block_tokens;
    return 1;
}

void dskv_blocks_set_mark(struct dskv_blocks *blocks, int32_t block, int32_t used)
{
    struct block *b = held(blocks, block);
    DSKV_ASSERT(used > 0 && used <= b->mark && b->mark == blocks->block_tokens, "block %d: mark %d from %d", block,
                used, b->mark);
    b->mark = used;
}

int32_t dskv_blocks_mark(const struct dskv_blocks *blocks, int32_t block)
{
    return held(blocks, block)->mark;
}

int32_t *dskv_blocks_tokens(struct dskv_blocks *blocks, int32_t block)
{
    held(blocks, block);
    return blocks->tokens + (size_t)block * (size_t)blocks->block_tokens;
}
