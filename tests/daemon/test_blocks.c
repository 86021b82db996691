#include "daemon/blocks.h"
#include "daemon/sequence.h"
#include "support/cunit_suite.h"

#include <stdlib.h>

static void a_full_pool_says_so_and_changes_nothing(void)
{
    struct dskv_blocks *blocks = dskv_blocks_open(4, 16);
    struct dskv_error error;
    CU_ASSERT_EQUAL(dskv_blocks_reserve(blocks, 3, &error), DSKV_OK);
    CU_ASSERT_EQUAL(dskv_blocks_reserve(blocks, 2, &error), DSKV_POOL_FULL);
    CU_ASSERT_EQUAL(error.has, DSKV_HAS_NEEDED | DSKV_HAS_FREE);
    CU_ASSERT_EQUAL(error.needed, 2);
    CU_ASSERT_EQUAL(error.free, 1);
    CU_ASSERT_EQUAL(dskv_blocks_reserved(blocks), 3);
    CU_ASSERT_EQUAL(dskv_blocks_used(blocks), 0);
    CU_ASSERT_EQUAL(dskv_blocks_reserve(blocks, 1, &error), DSKV_OK);
    dskv_blocks_unreserve(blocks, 4);
    CU_ASSERT_EQUAL(dskv_blocks_reserve(blocks, 4, &error), DSKV_OK);
    dskv_blocks_unreserve(blocks, 4);
    dskv_blocks_close(&blocks);
    CU_ASSERT_PTR_NULL(blocks);
}

static void the_last_one_freed_is_taken_first(void)
{
    struct dskv_blocks *blocks = dskv_blocks_open(8, 16);
    dskv_blocks_reserve(blocks, 8, NULL);
    int32_t a = dskv_blocks_take(blocks), b = dskv_blocks_take(blocks);
    CU_ASSERT_NOT_EQUAL(a, b);
    dskv_blocks_hold(blocks, a);
    dskv_blocks_release(blocks, a);
    CU_ASSERT_EQUAL(dskv_blocks_holders(blocks, a), 1);
    CU_ASSERT_EQUAL(dskv_blocks_used(blocks), 2);
    dskv_blocks_release(blocks, b);
    dskv_blocks_release(blocks, a);
    CU_ASSERT_EQUAL(dskv_blocks_used(blocks), 0);
    CU_ASSERT_EQUAL(dskv_blocks_take(blocks), a);
    CU_ASSERT_EQUAL(dskv_blocks_take(blocks), b);
    dskv_blocks_unreserve(blocks, 4);
    dskv_blocks_release(blocks, a);
    dskv_blocks_release(blocks, b);
    dskv_blocks_close(&blocks);
}

static void the_first_extender_at_the_mark_writes_in_place(void)
{
    struct dskv_blocks *blocks = dskv_blocks_open(2, 16);
    dskv_blocks_reserve(blocks, 1, NULL);
    int32_t block = dskv_blocks_take(blocks);
    dskv_blocks_set_mark(blocks, block, 5);
    CU_ASSERT(dskv_blocks_claim(blocks, block, 5, 0));
    CU_ASSERT(!dskv_blocks_claim(blocks, block, 5, 0)); /* the second one copies */
    dskv_blocks_set_mark(blocks, block, 9);
    CU_ASSERT(!dskv_blocks_claim(blocks, block, 5, 0)); /* below the mark */
    CU_ASSERT(dskv_blocks_claim(blocks, block, 9, 0));
    dskv_blocks_set_mark(blocks, block, 9);
    dskv_blocks_hold(blocks, block);
    CU_ASSERT(!dskv_blocks_claim(blocks, block, 5, 1)); /* another holder may end later */
    dskv_blocks_release(blocks, block);
    CU_ASSERT(!dskv_blocks_claim(blocks, block, 5, 0)); /* a cut: the holder itself reads on */
    CU_ASSERT(dskv_blocks_claim(blocks, block, 5, 1));  /* the only holder ends here: what follows is nobody's */
    dskv_blocks_release(blocks, block);
    dskv_blocks_close(&blocks);
}

/* A block that is reserved and never taken is not touched, and a sequence that gives up leaves everything as it was. */
static void a_sequence_that_gives_up_leaves_no_trace(void)
{
    struct dskv_blocks *blocks = dskv_blocks_open(8, 16);
    dskv_blocks_reserve(blocks, 2, NULL);
    int32_t table[2] = {dskv_blocks_take(blocks), dskv_blocks_take(blocks)};
    dskv_blocks_set_mark(blocks, table[1], 4);
    struct dskv_cache cache = {.length = 20, .n_blocks = 2, .blocks = table};
    int32_t tokens[40] = {0}, ids[40], slots[40];
    for (int run = 0; run < 2; run++) { /* given up before it ran, and in the middle */
        struct dskv_sequence *sequence = dskv_sequence_open(blocks, &cache, 20, tokens, 40, 40, 0);
        CU_ASSERT_EQUAL(sequence->n_needed, 2);
        CU_ASSERT(sequence->speaks_for_last);
        dskv_blocks_reserve(blocks, sequence->n_needed, NULL);
        sequence->n_reserved = sequence->n_needed;
        if (run) {
            struct dskv_block_copy copy;
            CU_ASSERT_EQUAL(dskv_sequence_grow(sequence, 20, &copy), 0);
            dskv_sequence_fill(sequence, 20, ids, slots);
            CU_ASSERT_EQUAL(slots[0], table[1] * 16 + 4);
            CU_ASSERT_EQUAL(slots[12], sequence->table[2] * 16);
            dskv_sequence_advance(sequence, 20);
            dskv_sequence_complete(sequence, 20);
            CU_ASSERT_EQUAL(dskv_blocks_used(blocks), 3);
        }
        dskv_sequence_close(&sequence);
        CU_ASSERT_EQUAL(dskv_blocks_mark(blocks, table[1]), 4);
        CU_ASSERT_EQUAL(dskv_blocks_holders(blocks, table[0]), 1);
        CU_ASSERT_EQUAL(dskv_blocks_used(blocks), 2);
        CU_ASSERT_EQUAL(dskv_blocks_reserved(blocks), 0);
    }
    dskv_blocks_close(&blocks);
}

static void a_cut_copies_the_tokens_of_one_block(void)
{
    struct dskv_blocks *blocks = dskv_blocks_open(8, 16);
    dskv_blocks_reserve(blocks, 2, NULL);
    int32_t table[2] = {dskv_blocks_take(blocks), dskv_blocks_take(blocks)}, n_blocks;
    for (int32_t i = 0; i < 16; i++)
        dskv_blocks_tokens(blocks, table[1])[i] = 100 + i;
    struct dskv_cache cache = {.length = 32, .n_blocks = 2, .blocks = table};
    struct dskv_sequence *sequence = dskv_sequence_open(blocks, &cache, 20, (int32_t[]){7, 8}, 2, 2, 1);
    CU_ASSERT_EQUAL(sequence->n_needed, 1);
    dskv_blocks_reserve(blocks, 1, NULL);
    sequence->n_reserved = 1;
    struct dskv_block_copy copy = {.src = -1};
    int32_t ids[3], slots[3];
    CU_ASSERT_EQUAL(dskv_sequence_grow(sequence, 1, &copy),
                    0); /* the re-run token writes nothing: nothing to copy yet */
    dskv_sequence_fill(sequence, 1, ids, slots);
    CU_ASSERT_EQUAL(ids[0], 103);
    CU_ASSERT_EQUAL(slots[0], -1);
    dskv_sequence_advance(sequence, 1);
    dskv_sequence_complete(sequence, 1);
    CU_ASSERT_EQUAL(dskv_sequence_grow(sequence, 2, &copy), 1);
    CU_ASSERT_EQUAL(copy.src, table[1]);
    CU_ASSERT_EQUAL(copy.n_tokens, 4);
    dskv_sequence_fill(sequence, 2, ids, slots);
    dskv_sequence_advance(sequence, 2);
    dskv_sequence_complete(sequence, 2);
    CU_ASSERT_EQUAL(slots[1], copy.dst * 16 + 5);
    CU_ASSERT_EQUAL(dskv_blocks_holders(blocks, table[1]), 2); /* held until the step is submitted */
    dskv_blocks_release(blocks, copy.src);
    int32_t *made = dskv_sequence_end(sequence, 21, &n_blocks);
    CU_ASSERT_EQUAL(n_blocks, 2);
    CU_ASSERT_EQUAL(made[0], table[0]);
    CU_ASSERT_EQUAL(made[1], copy.dst);
    CU_ASSERT_EQUAL(dskv_blocks_mark(blocks, made[1]), 5); /* ended one token earlier than it ran */
    CU_ASSERT_EQUAL(dskv_blocks_tokens(blocks, made[1])[3], 103);
    CU_ASSERT_EQUAL(dskv_blocks_tokens(blocks, made[1])[4], 7);
    dskv_sequence_close(&sequence);
    CU_ASSERT_EQUAL(dskv_blocks_used(blocks), 3);
    free(made);
    dskv_blocks_close(&blocks);
}

int main(void)
{
    return dskv_run_tests(
        "daemon.blocks",
        (struct dskv_test[]){
            {"a full pool says so and changes nothing", a_full_pool_says_so_and_changes_nothing},
            {"the last one freed is taken first", the_last_one_freed_is_taken_first},
            {"the first extender at the mark writes in place", the_first_extender_at_the_mark_writes_in_place},
            {"a sequence that gives up leaves no trace", a_sequence_that_gives_up_leaves_no_trace},
            {"a cut copies the tokens of one block", a_cut_copies_the_tokens_of_one_block},
            {NULL, NULL},
        });
}
