/* Merging what shards of the vocabulary say of a row: ties, empty shards, probabilities, rows that are not finite. */
#include "parallel/merge.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <string.h>

#define K 3

/* Three shards of two rows; the second shard holds no ids. */
static struct dskv_row_stats stats[3][2] = {
    {{2.0f, 4, 1.5f, -INFINITY, 1}, {1.0f, 0, 1.0f, 1.0f, 1}},
    {{-INFINITY, INT32_MAX, 0, -INFINITY, 1}, {-INFINITY, INT32_MAX, 0, -INFINITY, 1}},
    {{2.0f, 70, 2.0f, 0.5f, 1}, {3.0f, 65, 1.25f, -INFINITY, 0}},
};
static float top_values[3][2 * K] = {
    {2.0f, 1.0f, 1.0f, 1.0f, 0.5f, -1.0f},
    {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY},
    {2.0f, 2.0f, 1.0f, 3.0f, 0.0f, -2.0f},
};
static int32_t top_ids[3][2 * K] = {
    {4, 1, 9, 0, 2, 3},
    {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX},
    {70, 71, 64, 65, 66, 67},
};

static struct dskv_row_result merge(int32_t n_shards, int32_t row, uint32_t want, int32_t topk, int32_t *ids,
                                    float *logprobs)
{
    struct dskv_shard_rows shards[3];
    struct dskv_plan_row wanted = {.want = want, .topk = topk, .target = want & DSKV_ROW_SCORE ? 66 : -1};
    struct dskv_row_result result;
    for (int32_t s = 0; s < 3; s++)
        shards[s] = (struct dskv_shard_rows){stats[s], top_values[s], top_ids[s]};
    dskv_merge_row(shards, n_shards, row, K, &wanted, ids, logprobs, &result);
    return result;
}

static void ties_go_to_the_lowest_id(void)
{
    int32_t ids[K];
    float logprobs[K];
    struct dskv_row_result r = merge(3, 0, DSKV_ROW_ARGMAX | DSKV_ROW_TOPK | DSKV_ROW_SAMPLE, K, ids, logprobs);
    static const int32_t best[K] = {4, 70, 71};
    CU_ASSERT_EQUAL(r.argmax, 4);
    CU_ASSERT_EQUAL(r.sampled, 4);
    CU_ASSERT_EQUAL(memcmp(r.topk_ids, best, sizeof best), 0);
    CU_ASSERT_PTR_EQUAL(r.topk_logprobs, logprobs);
}

static void probabilities_are_of_the_whole_vocabulary(void)
{
    int32_t ids[K];
    float logprobs[K];
    struct dskv_row_result r = merge(3, 0, DSKV_ROW_SCORE | DSKV_ROW_TOPK, 2, ids, logprobs);
    CU_ASSERT_EQUAL(r.score, (float)(0.5 - 2.0 - log(3.5)));
    CU_ASSERT_EQUAL(logprobs[0], (float)(0.0 - log(3.5)));
    CU_ASSERT_EQUAL(logprobs[1], (float)(0.0 - log(3.5)));
    r = merge(3, 1, DSKV_ROW_SCORE, 0, ids, logprobs);
    CU_ASSERT_EQUAL(r.score, (float)(1.0 - 3.0 - log(1.25 + exp(-2.0))));
}

static void a_shard_that_is_not_finite_taints_the_row(void)
{
    int32_t ids[K];
    float logprobs[K];
    CU_ASSERT_EQUAL(merge(3, 0, DSKV_ROW_ARGMAX, 0, ids, logprobs).finite, 1);
    CU_ASSERT_EQUAL(merge(3, 1, DSKV_ROW_ARGMAX, 0, ids, logprobs).finite, 0);
}

static void what_was_not_wanted_is_neutral(void)
{
    int32_t ids[K];
    float logprobs[K];
    struct dskv_row_result r = merge(1, 0, DSKV_ROW_LOGITS, 0, ids, logprobs);
    CU_ASSERT_EQUAL(r.argmax, -1);
    CU_ASSERT_EQUAL(r.sampled, -1);
    CU_ASSERT(isnan(r.score));
    CU_ASSERT_PTR_NULL(r.topk_ids);
    CU_ASSERT_PTR_NULL(r.logits);
}

/* More entries than the shards have: the rest says that there is none. */
static void lists_may_run_out(void)
{
    int32_t ids[K];
    float logprobs[K];
    top_values[0][1] = top_values[0][2] = -INFINITY;
    top_ids[0][1] = top_ids[0][2] = INT32_MAX;
    merge(2, 0, DSKV_ROW_TOPK, K, ids, logprobs);
    CU_ASSERT_EQUAL(ids[0], 4);
    CU_ASSERT_EQUAL(ids[1], INT32_MAX);
    CU_ASSERT_EQUAL(ids[2], INT32_MAX);
    CU_ASSERT_EQUAL(logprobs[2], -INFINITY);
}

int main(void)
{
    return dskv_run_tests("parallel.merge",
                          (struct dskv_test[]){
                              {"ties go to the lowest id", ties_go_to_the_lowest_id},
                              {"probabilities are of the whole vocabulary", probabilities_are_of_the_whole_vocabulary},
                              {"a shard that is not finite taints the row", a_shard_that_is_not_finite_taints_the_row},
                              {"what was not wanted is neutral", what_was_not_wanted_is_neutral},
                              {"lists may run out", lists_may_run_out},
                              {NULL, NULL},
                          });
}
