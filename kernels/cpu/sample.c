/* Sample: draws a token from a full row of logits.
 *
 * Ids are ordered by logit, descending, then by id.  Top-k and top-p each keep a head of this order, so a filter is one
 * pair, the last (logit, id) that is kept.  The pair is found without sorting: logits become integers of the same
 * order, whose digits are decided from the highest down by how much (ids, or probability) lies above each.  The draw
 * walks the kept ids in ascending order, so a filter that keeps everything changes nothing.  Sums are in double, in one
 * order.
 */
#include "kernels/cpu/names.h"
#include "kernels/cpu/vecmath.h"

#include "kernels/philox.h"

enum { BINS = 2048 };

/* The integer of the same order as the logit: larger for larger; equal for equal ones, zeros of both signs included. */
static inline uint32_t order_of(float logit)
{
    uint32_t bits = dskv_float_bits(logit + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The last entry that is kept. */
struct cut {
    uint32_t order;
    int32_t id;
};

static inline int is_kept(const struct cut *cut, uint32_t order, int32_t id)
{
    return order > cut->order || (order == cut->order && id <= cut->id);
}

struct row {
    const float *logits;
    int32_t vocab;
    float *weights; /* exp((logit - max) / temperature) [vocab] */
    int32_t *ids;   /* candidates [vocab] */
};

/* The highest bin such that it and those above hold at least `goal` beyond *above; *above grows by the bins above it.
 * When rounding lets none reach the goal: the lowest bin that holds anything. */
static int find_bin(const double *mass, const int32_t *counts, double goal, double *above)
{
    int found = -1;
    double before = *above, sum = *above;
    for (int bin = BINS - 1; bin >= 0; bin--) {
        if (counts[bin] == 0)
            continue;
        found = bin;
        before = sum;
        sum += mass[bin];
        if (sum >= goal)
            break;
    }
    *above = before;
    return found;
}

/* Tightens `cut` so that what is kept just reaches `goal`: entries (by_weight == 0), or weight. */
static void tighten(const struct row *row, struct cut *cut, int by_weight, double goal)
{
    static const struct {
        int shift, bits;
    } digits[] = {{21, 11}, {10, 11}, {0, 10}};
    double above = 0;
    int32_t n = 0;
    for (int32_t id = 0; id < row->vocab; id++)
        if (is_kept(cut, order_of(row->logits[id]), id))
            row->ids[n++] = id;
    for (int digit = 0; digit < 3; digit++) {
        double mass[BINS] = {0};
        int32_t counts[BINS] = {0}, n_left = 0;
        const uint32_t mask = (1u << digits[digit].bits) - 1u;
        for (int32_t i = 0; i < n; i++) {
            uint32_t bin = order_of(row->logits[row->ids[i]]) >> digits[digit].shift & mask;
            mass[bin] += by_weight ? (double)row->weights[row->ids[i]] : 1.0;
            counts[bin]++;
        }
        int bin = find_bin(mass, counts, goal, &above);
        for (int32_t i = 0; i < n; i++)
            if ((int)(order_of(row->logits[row->ids[i]]) >> digits[digit].shift & mask) == bin)
                row->ids[n_left++] = row->ids[i];
        n = n_left;
    }
    /* Equal logits are left, ids ascending. */
    int32_t last = 0;
    for (; last < n - 1; last++) {
        above += by_weight ? (double)row->weights[row->ids[last]] : 1.0;
        if (above >= goal)
            break;
    }
    cut->order = order_of(row->logits[row->ids[last]]);
    cut->id = row->ids[last];
}

/* Sum of the kept weights in order of ids; with `goal` >= 0 stops at the id where the sum exceeds it, and stores the
 * last id that was added. */
static double walk(const struct row *row, const struct cut *cut, float min_weight, double goal, int32_t *last)
{
    double sum = 0;
    for (int32_t id = 0; id < row->vocab; id++) {
        float weight = row->weights[id];
        if (!(weight > 0.0f) || weight < min_weight || !is_kept(cut, order_of(row->logits[id]), id))
            continue;
        sum += (double)weight;
        *last = id;
        if (goal >= 0 && sum > goal)
            break;
    }
    return sum;
}

/* Lowest id of the largest logit; 0 when there is none that compares. */
static int32_t best_id(const struct row *row)
{
    int32_t best = 0;
    for (int32_t id = 1; id < row->vocab; id++)
        if (row->logits[id] > row->logits[best])
            best = id;
    return best;
}

static void weigh(const struct row *row, float max, float temperature)
{
    struct vec shift = vec_set1(max), scale = vec_set1(temperature);
    for (int32_t i = 0; i < row->vocab; i += VEC_LANES) {
        int n = row->vocab - i < VEC_LANES ? row->vocab - i : VEC_LANES;
        struct vec v = n == VEC_LANES ? vec_load(row->logits + i) : vec_load_first(row->logits + i, n, max);
        v = vec_exp(vec_div(vec_sub(v, shift), scale));
        if (n == VEC_LANES)
            vec_store(row->weights + i, v);
        else
            vec_store_first(row->weights + i, n, v);
    }
}

static int32_t draw(const struct row *row, const struct dskv_sampling *sampling)
{
    int32_t best = best_id(row);
    weigh(row, row->logits[best], sampling->temperature);
    struct cut cut = {0, INT32_MAX};
    int32_t drawn = best;
    if (sampling->top_k > 0 && sampling->top_k < row->vocab)
        tighten(row, &cut, 0, sampling->top_k);
    if (sampling->top_p < 1.0f)
        tighten(row, &cut, 1, (double)sampling->top_p * walk(row, &cut, 0.0f, -1, &drawn));
    double total = walk(row, &cut, sampling->min_p, -1, &drawn);
    walk(row, &cut, sampling->min_p, dskv_philox_uniform(sampling->seed, (uint32_t)sampling->position) * total, &drawn);
    return drawn;
}

void dskv_cpu_sample(struct dskv_device *device, const struct dskv_sample *p)
{
    (void)device; /* one scratch: rows one after the other */
    struct row row = {.vocab = (int32_t)p->logits.cols, .weights = p->scratch};
    row.ids = (int32_t *)(row.weights + row.vocab);
    for (int64_t r = 0; r < p->logits.rows; r++) {
        row.logits = (const float *)p->logits.data + r * p->logits.stride;
        if (p->sampling[r].temperature > 0.0f)
            p->ids[r] = draw(&row, &p->sampling[r]);
    }
}
