/* Select: what one shard of the vocabulary says of a row, and its best entries.
 *
 * The best k are kept in a heap whose root is the worst of them; a whole vector is skipped when no lane beats the root,
 * so that the usual cost is one pass.  Ids ascend, hence an equal value never displaces an earlier one.
 */
#include "kernels/cpu/names.h"
#include "kernels/cpu/vecmath.h"

/* ---- the heap: values[k], ids[k], the worst at 0 ---------------------------------------------------------------- */

static int is_worse(float a, int32_t a_id, float b, int32_t b_id)
{
    return a < b || (a == b && a_id > b_id);
}

/* Puts an entry at `hole` or below, in a heap of k. */
static void sift_down(float *values, int32_t *ids, int k, int hole, float value, int32_t id)
{
    for (;;) {
        int child = 2 * hole + 1;
        if (child + 1 < k && is_worse(values[child + 1], ids[child + 1], values[child], ids[child]))
            child++;
        if (child >= k || !is_worse(values[child], ids[child], value, id))
            break;
        values[hole] = values[child];
        ids[hole] = ids[child];
        hole = child;
    }
    values[hole] = value;
    ids[hole] = id;
}

/* The worst goes to the end, again and again: best first. */
static void sort_heap(float *values, int32_t *ids, int k)
{
    for (int n = k - 1; n > 0; n--) {
        float value = values[n];
        int32_t id = ids[n];
        values[n] = values[0];
        ids[n] = ids[0];
        sift_down(values, ids, n, 0, value, id);
    }
}

static struct vec load_logits(const float *x, int64_t i, int64_t n)
{
    return n - i >= VEC_LANES ? vec_load(x + i) : vec_load_first(x + i, (int)(n - i), -INFINITY);
}

static void best_of_row(const float *x, int64_t n, int32_t first, int k, float *values, int32_t *ids)
{
    for (int i = 0; i < k; i++) {
        values[i] = -INFINITY;
        ids[i] = INT32_MAX;
    }
    for (int64_t i = 0; i < n; i += VEC_LANES) {
        unsigned better = vec_mask_bits(vec_gt(load_logits(x, i, n), vec_set1(values[0])));
        for (; better; better &= better - 1) {
            int64_t at = i + __builtin_ctz(better);
            if (x[at] > values[0])
                sift_down(values, ids, k, 0, x[at], first + (int32_t)at);
        }
    }
    sort_heap(values, ids, k);
}

/* ---- statistics ------------------------------------------------------------------------------------------------- */

static struct dskv_row_stats stats_of_row(const float *x, int64_t n, int32_t first, int32_t target)
{
    struct dskv_row_stats stats = {.max = -INFINITY, .argmax = INT32_MAX, .target = -INFINITY, .finite = 1};
    struct vec max = vec_set1(-INFINITY), sum = vec_zero(), limit = vec_set1(INFINITY);
    for (int64_t i = 0; i < n; i += VEC_LANES) {
        int n_lanes = n - i < VEC_LANES ? (int)(n - i) : VEC_LANES;
        struct vec v = n_lanes == VEC_LANES ? vec_load(x + i) : vec_load_first(x + i, n_lanes, 0.0f);
        if (vec_mask_bits(vec_gt(limit, vec_abs(v))) != 0xffffu)
            stats.finite = 0;
        max = vec_max(load_logits(x, i, n), max);
    }
    stats.max = vec_max_lane(max);
    for (int64_t i = 0; i < n && stats.argmax == INT32_MAX; i++)
        if (x[i] == stats.max)
            stats.argmax = first + (int32_t)i;
    for (int64_t i = 0; i < n; i += VEC_LANES)
        sum = vec_add(sum, vec_exp(vec_sub(load_logits(x, i, n), vec_set1(stats.max))));
    stats.sum_exp = vec_sum(sum);
    if (target >= first && target < first + n)
        stats.target = x[target - first];
    return stats;
}

static void select_rows(void *context, int64_t first, int64_t last)
{
    const struct dskv_select *p = context;
    int64_t n = p->vocab - (int64_t)p->first;
    n = n < 0 ? 0 : n < p->logits.cols ? n : p->logits.cols;
    for (int64_t r = first; r < last; r++) {
        const float *x = (const float *)p->logits.data + r * p->logits.stride;
        p->stats[r] = stats_of_row(x, n, p->first, p->targets[r]);
        if (p->k > 0)
            best_of_row(x, n, p->first, p->k, p->top_values + r * p->k, p->top_ids + r * p->k);
    }
}

void dskv_cpu_choose(struct dskv_device *device, const struct dskv_choose *p)
{
    (void)device;
    for (int32_t r = 0; r < p->rows; r++) {
        const struct dskv_row_stats *best = &p->stats[0][r];
        for (int32_t i = 1; i < p->n; i++) {
            const struct dskv_row_stats *other = &p->stats[i][r];
            if (other->max > best->max || (other->max == best->max && other->argmax < best->argmax))
                best = other;
        }
        p->ids[r] = best->argmax;
    }
}

void dskv_cpu_select(struct dskv_device *device, const struct dskv_select *p)
{
    dskv_threads_for(dskv_cpu_threads(device), p->logits.rows, p->logits.cols / 2, select_rows, (void *)p);
}
