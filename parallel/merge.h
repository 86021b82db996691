/* Merge: one row's results from what every shard of the vocabulary says of it, in rank order.  Pure, on the host. */
#ifndef DSKV_PARALLEL_MERGE_H
#define DSKV_PARALLEL_MERGE_H

#include "parallel/engine.h"

/* One shard's word on a chunk of rows, as dskv_op_select writes it. */
struct dskv_shard_rows {
    const struct dskv_row_stats *stats; /* [rows] */
    const float *top_values;            /* [rows, k] */
    const int32_t *top_ids;             /* [rows, k] */
};

/* Fills everything of *result but logits and sampled.  topk_ids and topk_logprobs have room for wanted->topk, which is
 * at most k.  Probabilities are computed in double and rounded once. */
void dskv_merge_row(const struct dskv_shard_rows *shards, int32_t n_shards, int32_t row, int32_t k,
                    const struct dskv_plan_row *wanted, int32_t *topk_ids, float *topk_logprobs,
                    struct dskv_row_result *result);

#endif
