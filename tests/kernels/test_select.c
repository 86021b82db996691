/* Select: statistics and best entries of a row, against a sort; uneven shards, merged, equal the whole. */
#include "kernels/kernel_test.h"

#include "base/limits.h"
#include "base/memory.h"

struct entry {
    float value;
    int32_t id;
};

static int by_rank(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    if (x->value != y->value)
        return x->value > y->value ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static struct entry *sorted(const float *x, int n)
{
    struct entry *entries = dskv_calloc((size_t)n, sizeof *entries);
    for (int i = 0; i < n; i++)
        entries[i] = (struct entry){x[i], i};
    qsort(entries, (size_t)n, sizeof *entries, by_rank);
    return entries;
}

static void select_shard(struct dskv_device *device, float *x, int64_t stride, int rows, int first, int cols, int vocab,
                         const int32_t *targets, int k, struct dskv_row_stats *stats, float *values, int32_t *ids)
{
    struct dskv_tensor logits = {x + first, DSKV_F32, rows, cols, stride};
    dskv_op_select(device, &(struct dskv_select){.logits = logits,
                                                 .first = first,
                                                 .vocab = vocab,
                                                 .targets = targets,
                                                 .k = k,
                                                 .stats = stats,
                                                 .top_values = values,
                                                 .top_ids = ids});
}

/* Many ties: few distinct values, zeros of both signs among them. */
static float tied_value(uint64_t *seed)
{
    float value = (float)(test_random_below(seed, 9) - 4) * 0.5f;
    return value == 0 && test_random_below(seed, 2) ? -0.0f : value;
}

static void whole_rows(void)
{
    static const int vocabs[] = {1, 5, 16, 257, 1000}, ks[] = {0, 1, 7, DSKV_MAX_TOPK};
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 1;
    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++)
        for (int tied = 0; tied < 2; tied++) {
            enum { ROWS = 3 };
            const int n = vocabs[v];
            float *x = test_random_floats(&seed, (size_t)(ROWS * n));
            struct dskv_row_stats *first = NULL;
            for (int i = 0; i < ROWS * n && tied; i++)
                x[i] = tied_value(&seed);
            const int32_t targets[ROWS] = {n - 1, -1, 0};
            for (int d = 0; d < devices.n; d++)
                for (size_t j = 0; j < sizeof ks / sizeof *ks; j++) {
                    const int k = ks[j];
                    struct dskv_row_stats stats[ROWS];
                    float values[ROWS * DSKV_MAX_TOPK];
                    int32_t ids[ROWS * DSKV_MAX_TOPK];
                    select_shard(devices.device[d], x, n, ROWS, 0, n, n, targets, k, stats, values, ids);
                    if (!first) {
                        first = dskv_calloc(ROWS, sizeof stats[0]);
                        memcpy(first, stats, sizeof stats);
                    }
                    CU_ASSERT(memcmp(stats, first, sizeof stats) == 0);
                    for (int r = 0; r < ROWS; r++) {
                        struct entry *entries = sorted(x + r * n, n);
                        double sum = 0;
                        for (int i = 0; i < n; i++)
                            sum += exp((double)x[r * n + i] - (double)entries[0].value);
                        CU_ASSERT_EQUAL(stats[r].argmax, entries[0].id);
                        CU_ASSERT_EQUAL(stats[r].max, entries[0].value);
                        CU_ASSERT(fabs((double)stats[r].sum_exp - sum) < 1e-6 * sum);
                        CU_ASSERT_EQUAL(stats[r].target, targets[r] < 0 ? -INFINITY : x[r * n + targets[r]]);
                        CU_ASSERT_EQUAL(stats[r].finite, 1);
                        for (int i = 0; i < k; i++) {
                            CU_ASSERT_EQUAL(ids[r * k + i], i < n ? entries[i].id : INT32_MAX);
                            CU_ASSERT_EQUAL(values[r * k + i], i < n ? entries[i].value : -INFINITY);
                        }
                        free(entries);
                    }
                }
            free(x);
            free(first);
        }
    test_devices_close(&devices);
}

/* Shards of 64 ids as ranks hold them, the last one padded, one of them all padding: the merged answer is the whole
 * row's. */
static void uneven_shards_merge_to_the_whole(void)
{
    enum { VOCAB = 257, PADDED = 448, K = 20, N_SHARDS = 4 };
    static const int first[N_SHARDS] = {0, 128, 192, 320}, cols[N_SHARDS] = {128, 64, 128, 128};
    struct dskv_device *device = test_device_open();
    uint64_t seed = 2;
    for (int round = 0; round < 40; round++) {
        float x[PADDED];
        for (int i = 0; i < PADDED; i++)
            x[i] = i >= VOCAB ? NAN : round % 2 ? test_random_wide(&seed) : tied_value(&seed);
        const int32_t target = test_random_below(&seed, VOCAB);
        struct dskv_row_stats whole, best = {.max = -INFINITY, .argmax = INT32_MAX, .target = -INFINITY};
        float values[K], shard_values[K];
        int32_t ids[K], shard_ids[K];
        select_shard(device, x, PADDED, 1, 0, PADDED, VOCAB, &target, K, &whole, values, ids);
        struct entry merged[N_SHARDS * K];
        for (int s = 0; s < N_SHARDS; s++) {
            struct dskv_row_stats stats;
            select_shard(device, x, PADDED, 1, first[s], cols[s], VOCAB, &target, K, &stats, shard_values, shard_ids);
            CU_ASSERT_EQUAL(stats.finite, 1);
            if (first[s] >= VOCAB)
                CU_ASSERT(stats.argmax == INT32_MAX && stats.max == -INFINITY && stats.sum_exp == 0);
            if (stats.max > best.max || (stats.max == best.max && stats.argmax < best.argmax)) {
                best.max = stats.max;
                best.argmax = stats.argmax;
            }
            best.target = fmaxf(best.target, stats.target);
            for (int i = 0; i < K; i++)
                merged[s * K + i] = (struct entry){shard_values[i], shard_ids[i]};
        }
        qsort(merged, N_SHARDS * K, sizeof *merged, by_rank);
        CU_ASSERT(best.max == whole.max && best.argmax == whole.argmax && best.target == whole.target);
        for (int i = 0; i < K; i++)
            CU_ASSERT(merged[i].id == ids[i] && merged[i].value == values[i]);
    }
    dskv_device_close(&device);
}

static void what_is_not_finite_is_told(void)
{
    struct test_devices devices;
    test_devices_open(&devices);
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    const int32_t target = 3;
    for (int d = 0; d < devices.n; d++)
        for (int n = 1; n < 40; n += 4)
            for (size_t b = 0; b < sizeof bad / sizeof *bad; b++)
                for (int at = 0; at < n; at++) {
                    float x[40] = {0}, values[2];
                    struct dskv_row_stats stats;
                    int32_t ids[2];
                    x[at] = bad[b];
                    select_shard(devices.device[d], x, 40, 1, 0, n, n, &target, 2, &stats, values, ids);
                    CU_ASSERT_EQUAL(stats.finite, 0);
                    x[at] = 0;
                    x[n] = bad[b]; /* padding */
                    select_shard(devices.device[d], x, 40, 1, 0, n + 1, n, &target, 2, &stats, values, ids);
                    CU_ASSERT_EQUAL(stats.finite, 1);
                }
    test_devices_close(&devices);
}

int main(void)
{
    return dskv_run_tests("kernels.select", (struct dskv_test[]){
                                                {"whole rows", whole_rows},
                                                {"uneven shards merge to the whole", uneven_shards_merge_to_the_whole},
                                                {"what is not finite is told", what_is_not_finite_is_told},
                                                {NULL, NULL},
                                            });
}
