/* Shard: which heads, MLP columns and ids of the vocabulary belong to a rank.  Pure arithmetic. */
#include "parallel/model.h"

/* Part `index` of n things over n_parts, contiguous, as evenly as it goes: the first n % n_parts parts have one more.
 */
static void split(int32_t n, int32_t n_parts, int32_t index, int32_t *first, int32_t *count)
{
    int32_t each = n / n_parts, more = n % n_parts;
    *first = index * each + (index < more ? index : more);
    *count = each + (index < more);
}

/* The same in units of DSKV_SPLIT_UNIT, so that a prepared weight's tiles are not torn; the last unit may be shorter.
 */
static void split_units(int32_t n, int32_t n_parts, int32_t index, int32_t *first, int32_t *count)
{
    int32_t first_unit, n_units;
    split((n + DSKV_SPLIT_UNIT - 1) / DSKV_SPLIT_UNIT, n_parts, index, &first_unit, &n_units);
    int32_t end = (first_unit + n_units) * DSKV_SPLIT_UNIT;
    *first = first_unit * DSKV_SPLIT_UNIT;
    if (*first > n)
        *first = n;
    *count = (end < n ? end : n) - *first;
}

enum dskv_exit dskv_shard_of(const struct dskv_model *model, int rank, int n_ranks, struct dskv_shard *shard,
                             struct dskv_error *error)
{
    DSKV_ASSERT(n_ranks >= 1 && rank >= 0 && rank < n_ranks, "rank %d of %d", rank, n_ranks);
    DSKV_ASSERT(model->n_kv_heads >= 1 && model->n_heads % model->n_kv_heads == 0, "%d query heads over %d KV heads",
                model->n_heads, model->n_kv_heads);
    int32_t most = model->n_heads < DSKV_MAX_RANKS ? model->n_heads : DSKV_MAX_RANKS;
    if (n_ranks > most) {
        enum dskv_exit code = dskv_fail_exit(
            error, DSKV_EXIT_USAGE, "%d ranks are too many: the model has %d query heads, so 1 to %d ranks are valid",
            n_ranks, model->n_heads, most);
        dskv_error_set_valid(error, "1 to %d", most);
        return code;
    }
    *shard = (struct dskv_shard){.rank = rank, .n_ranks = n_ranks};
    split(model->n_heads, n_ranks, rank, &shard->first_head, &shard->n_heads_local);

    int32_t group = model->n_heads / model->n_kv_heads; /* query heads that share a KV head */
    int32_t end_kv_head = (shard->first_head + shard->n_heads_local - 1) / group + 1;
    shard->first_kv_head = shard->first_head / group;
    shard->n_kv_heads_local = end_kv_head - shard->first_kv_head;
    /* Lower ranks hold every KV head of the query heads before ours: the one that our first head shares, too. */
    shard->first_export_head = (shard->first_head + group - 1) / group;
    shard->n_export_heads = end_kv_head - shard->first_export_head;

    split_units(model->mlp, n_ranks, rank, &shard->first_mlp, &shard->n_mlp_local);
    split_units(model->vocab, n_ranks, rank, &shard->first_vocab, &shard->n_vocab_local);
    return DSKV_EXIT_OK;
}
