#include "parallel/merge.h"

#include <math.h>

/* The largest logit and its lowest id, over the whole vocabulary. */
static void merge_max(const struct dskv_shard_rows *shards, int32_t n_shards, int32_t row, float *max, int32_t *argmax)
{
    *max = -INFINITY;
    *argmax = INT32_MAX;
    for (int32_t s = 0; s < n_shards; s++) {
        const struct dskv_row_stats *stats = &shards[s].stats[row];
        if (stats->max > *max || (stats->max == *max && stats->argmax < *argmax)) {
            *max = stats->max;
            *argmax = stats->argmax;
        }
    }
}

/* log of the sum over the vocabulary of exp(logit - max). */
static double merge_log_sum(const struct dskv_shard_rows *shards, int32_t n_shards, int32_t row, float max)
{
    double sum = 0;
    for (int32_t s = 0; s < n_shards; s++)
        if (shards[s].stats[row].sum_exp > 0)
            sum += (double)shards[s].stats[row].sum_exp * exp((double)shards[s].stats[row].max - (double)max);
    return log(sum);
}

/* The best of the shards' best: each list is sorted, so only its next entry competes. */
static void merge_top(const struct dskv_shard_rows *shards, int32_t n_shards, int32_t row, int32_t k, int32_t n_wanted,
                      int32_t *ids, float *values)
{
    int32_t next[DSKV_MAX_RANKS] = {0};
    for (int32_t i = 0; i < n_wanted; i++) {
        int32_t best = 0;
        ids[i] = INT32_MAX;
        values[i] = -INFINITY;
        for (int32_t s = 0; s < n_shards; s++) {
            if (next[s] >= k)
                continue;
            float value = shards[s].top_values[(int64_t)row * k + next[s]];
            int32_t id = shards[s].top_ids[(int64_t)row * k + next[s]];
            if (value > values[i] || (value == values[i] && id < ids[i])) {
                values[i] = value;
                ids[i] = id;
                best = s;
            }
        }
        next[best]++;
    }
}

void dskv_merge_row(const struct dskv_shard_rows *shards, int32_t n_shards, int32_t row, int32_t k,
                    const struct dskv_plan_row *wanted, int32_t *topk_ids, float *topk_logprobs,
                    struct dskv_row_result *result)
{
    float max;
    int32_t argmax;
    *result = (struct dskv_row_result){.argmax = -1, .sampled = -1, .score = NAN, .finite = 1};
    for (int32_t s = 0; s < n_shards; s++)
        result->finite &= shards[s].stats[row].finite != 0;
    merge_max(shards, n_shards, row, &max, &argmax);
    double log_sum = wanted->want & (DSKV_ROW_SCORE | DSKV_ROW_TOPK) ? merge_log_sum(shards, n_shards, row, max) : 0;
    if (wanted->want & DSKV_ROW_ARGMAX)
        result->argmax = argmax;
    if (wanted->want & DSKV_ROW_SAMPLE)
        result->sampled = argmax; /* what temperature 0 takes; other rows are drawn later */
    if (wanted->want & DSKV_ROW_SCORE) {
        float target = -INFINITY;
        for (int32_t s = 0; s < n_shards; s++)
            target = fmaxf(target, shards[s].stats[row].target);
        result->score = (float)((double)target - (double)max - log_sum);
    }
    if (wanted->want & DSKV_ROW_TOPK) {
        merge_top(shards, n_shards, row, k, wanted->topk, topk_ids, topk_logprobs);
        for (int32_t i = 0; i < wanted->topk; i++)
            topk_logprobs[i] = (float)((double)topk_logprobs[i] - (double)max - log_sum);
        result->topk_ids = topk_ids;
        result->topk_logprobs = topk_logprobs;
    }
}
