/* Sampling: which ids may be drawn, how often, and that the draw is a function of its inputs alone. */
#include "kernels/kernel_test.h"
#include "kernels/philox.h"

#include "base/memory.h"

static int32_t sample(struct dskv_device *device, float *x, int vocab, struct dskv_sampling sampling)
{
    int32_t id = -1;
    void *scratch = dskv_calloc(1, dskv_sample_scratch_bytes(vocab));
    dskv_op_sample(device, &(struct dskv_sample){.logits = dskv_tensor(x, DSKV_F32, 1, vocab),
                                                 .sampling = &sampling,
                                                 .ids = &id,
                                                 .scratch = scratch});
    free(scratch);
    return id;
}

enum { DRAWS = 4000, MAX_VOCAB = 64 };

/* How often each id is drawn over DRAWS positions. */
static void count_draws(struct dskv_device *device, float *x, int vocab, struct dskv_sampling sampling, int *counts)
{
    memset(counts, 0, MAX_VOCAB * sizeof *counts);
    for (int i = 0; i < DRAWS; i++) {
        sampling.position = i;
        int32_t id = sample(device, x, vocab, sampling);
        CU_ASSERT_FATAL(id >= 0 && id < vocab);
        counts[id]++;
    }
}

/* Only the allowed ids are drawn, as often as exp(x / temperature) says, within 4 standard deviations. */
static void check_counts(const int *counts, const float *x, const int32_t *allowed, int n_allowed, double temperature)
{
    double sum = 0;
    int n_drawn = 0;
    for (int i = 0; i < n_allowed; i++)
        sum += exp((double)x[allowed[i]] / temperature);
    for (int i = 0; i < n_allowed; i++) {
        double p = exp((double)x[allowed[i]] / temperature) / sum;
        CU_ASSERT(fabs(counts[allowed[i]] - DRAWS * p) < 4 * sqrt(DRAWS * p * (1 - p)) + 1);
        n_drawn += counts[allowed[i]];
    }
    CU_ASSERT_EQUAL(n_drawn, DRAWS);
}

/* Five likely ids with ties, among unlikely ones. */
static void fill_row(float *x, int vocab)
{
    for (int i = 0; i < vocab; i++)
        x[i] = -30;
    x[7] = 2;
    x[3] = 1;
    x[40] = 1;
    x[12] = 1;
    x[20] = 0.5f;
}

static const struct dskv_sampling plain = {.temperature = 1, .top_p = 1, .seed = 99};

static void frequencies_follow_the_row(void)
{
    struct dskv_device *device = test_device_open();
    float x[50];
    int counts[MAX_VOCAB];
    const int32_t all[] = {7, 3, 12, 40, 20};
    fill_row(x, 50);
    const float temperatures[] = {1, 0.5f, 2};
    for (int i = 0; i < 3; i++) {
        struct dskv_sampling sampling = plain;
        sampling.temperature = temperatures[i];
        count_draws(device, x, 50, sampling, counts);
        check_counts(counts, x, all, 5, (double)temperatures[i]);
    }
    dskv_device_close(&device);
}

static void filters_keep_the_head(void)
{
    struct dskv_device *device = test_device_open();
    float x[50];
    int counts[MAX_VOCAB];
    const int32_t head[] = {7, 3, 12, 40, 20}; /* by logit, then id */
    fill_row(x, 50);
    for (int k = 1; k <= 4; k++) { /* ties are cut by id: top-3 keeps 3 and 12, not 40 */
        struct dskv_sampling sampling = plain;
        sampling.top_k = k;
        count_draws(device, x, 50, sampling, counts);
        check_counts(counts, x, head, k, 1);
    }
    /* e^2 = 7.39, 3 e = 8.15, e^0.5 = 1.65: of 17.2 in all, the head's shares are 0.43, 0.59, 0.75, 0.90, 1. */
    const struct {
        float top_p;
        int n;
    } nuclei[] = {{0, 1}, {0.4f, 1}, {0.5f, 2}, {0.7f, 3}, {0.8f, 4}, {0.95f, 5}};
    for (size_t i = 0; i < sizeof nuclei / sizeof *nuclei; i++) {
        struct dskv_sampling sampling = plain;
        sampling.top_p = nuclei[i].top_p;
        count_draws(device, x, 50, sampling, counts);
        check_counts(counts, x, head, nuclei[i].n, 1);
    }
    /* Relative to the best: e^-1 = 0.368, e^-1.5 = 0.223. */
    const struct {
        float min_p;
        int n;
    } least[] = {{0.4f, 1}, {0.36f, 4}, {0.22f, 5}};
    for (size_t i = 0; i < sizeof least / sizeof *least; i++) {
        struct dskv_sampling sampling = plain;
        sampling.min_p = least[i].min_p;
        count_draws(device, x, 50, sampling, counts);
        check_counts(counts, x, head, least[i].n, 1);
    }
    /* Top-p counts within what top-k kept: of the first two (0.73, 0.27), 0.7 keeps one. */
    struct dskv_sampling both = plain;
    both.top_k = 2;
    both.top_p = 0.7f;
    count_draws(device, x, 50, both, counts);
    check_counts(counts, x, head, 1, 1);
    dskv_device_close(&device);
}

static void temperature_zero_is_the_lowest_best(void)
{
    struct dskv_device *device = test_device_open();
    struct dskv_row_stats first[] = {{.max = 2, .argmax = 7}, {.max = 1, .argmax = 3}, {.max = -INFINITY, .argmax = 0}};
    struct dskv_row_stats second[] = {
        {.max = 2, .argmax = 41}, {.max = 3, .argmax = 40}, {.max = -INFINITY, .argmax = INT32_MAX}};
    const struct dskv_row_stats *shards[] = {first, second}, *turned[] = {second, first};
    int32_t ids[3];
    struct dskv_choose choose = {shards, 2, 3, ids};
    dskv_op_choose(device, &choose);
    CU_ASSERT(ids[0] == 7 && ids[1] == 40 && ids[2] == 0);
    choose.stats = turned;
    dskv_op_choose(device, &choose);
    CU_ASSERT(ids[0] == 7 && ids[1] == 40 && ids[2] == 0);

    float x[50];
    fill_row(x, 50);
    char scratch[50 * 8];
    int32_t id = 31;
    struct dskv_sampling greedy = {.top_p = 1};
    struct dskv_sample p = {dskv_tensor(x, DSKV_F32, 1, 50), &greedy, &id, scratch};
    dskv_op_sample(device, &p);
    CU_ASSERT_EQUAL(id, 31); /* left as it was chosen */
    CU_ASSERT_EQUAL(sample(device, x, 1, plain), 0);
    dskv_device_close(&device);
}

/* Random rows and parameters: every path and thread count draws the same id, filters that keep all change nothing, and
 * a row among others draws as alone. */
static void draws_are_reproducible(void)
{
    enum { ROWS = 4, VOCAB = 3001 };
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 5;
    float *x = dskv_calloc(ROWS * VOCAB, sizeof *x);
    void *scratch = dskv_calloc(1, dskv_sample_scratch_bytes(VOCAB));
    for (int round = 0; round < 30; round++) {
        for (int i = 0; i < ROWS * VOCAB; i++)
            x[i] = round % 3 ? 4 * test_random_unit(&seed) : (float)test_random_below(&seed, 5);
        struct dskv_sampling sampling[ROWS];
        int32_t ids[ROWS], first[ROWS] = {0};
        for (int r = 0; r < ROWS; r++)
            sampling[r] = (struct dskv_sampling){.temperature = 0.3f + (float)test_random_below(&seed, 3),
                                                 .top_p = r == 0 ? 1 : 0.5f + 0.2f * test_random_unit(&seed),
                                                 .min_p = r == 2 ? 0.1f : 0,
                                                 .top_k = r == 3 ? 1 + test_random_below(&seed, VOCAB + 5) : 0,
                                                 .seed = test_random(&seed),
                                                 .position = test_random_below(&seed, 1000)};
        for (int d = 0; d < devices.n; d++) {
            dskv_op_sample(devices.device[d], &(struct dskv_sample){.logits = dskv_tensor(x, DSKV_F32, ROWS, VOCAB),
                                                                    .sampling = sampling,
                                                                    .ids = ids,
                                                                    .scratch = scratch});
            if (d == 0)
                memcpy(first, ids, sizeof first);
            CU_ASSERT(memcmp(ids, first, sizeof ids) == 0);
        }
        for (int r = 0; r < ROWS; r++)
            CU_ASSERT_EQUAL(sample(devices.device[0], x + r * VOCAB, VOCAB, sampling[r]), first[r]);
        sampling[0].top_k = VOCAB;
        sampling[0].min_p = 1e-30f;
        sampling[0].top_p = 1.5f;
        CU_ASSERT_EQUAL(sample(devices.device[0], x, VOCAB, sampling[0]), first[0]);
    }
    free(x);
    free(scratch);
    test_devices_close(&devices);
}

/* Against the plain definition: sort, cut, and add up. */
static void large_rows_keep_what_a_sort_keeps(void)
{
    enum { VOCAB = 2000 };
    struct dskv_device *device = test_device_open();
    uint64_t seed = 6;
    float x[VOCAB];
    for (int round = 0; round < 60; round++) {
        for (int i = 0; i < VOCAB; i++)
            x[i] = round % 2 ? 3 * test_random_unit(&seed) : (float)test_random_below(&seed, 4);
        struct dskv_sampling sampling = plain;
        sampling.top_k = 1 + test_random_below(&seed, VOCAB);
        sampling.position = round;
        int32_t id = sample(device, x, VOCAB, sampling);
        int better = 0; /* ids that rank before the drawn one */
        for (int i = 0; i < VOCAB; i++)
            better += x[i] > x[id] || (x[i] == x[id] && i < id);
        CU_ASSERT(better < sampling.top_k);
        sampling.top_k = 0;
        sampling.top_p = 0.5f + 0.4f * test_random_unit(&seed);
        id = sample(device, x, VOCAB, sampling);
        double before = 0, all = 0; /* probability that ranks before the drawn id must not reach top_p */
        for (int i = 0; i < VOCAB; i++) {
            all += exp((double)x[i]);
            before += x[i] > x[id] || (x[i] == x[id] && i < id) ? exp((double)x[i]) : 0;
        }
        CU_ASSERT(before / all < (double)sampling.top_p + 1e-6);
    }
    dskv_device_close(&device);
}

/* The generator's published answers for zero and for all ones. */
static void philox_is_philox(void)
{
    const uint32_t zero[4] = {0}, ones[4] = {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX};
    uint32_t out[4];
    dskv_philox(zero, 0, out);
    CU_ASSERT(out[0] == 0x6627e8d5 && out[1] == 0xe169c58d && out[2] == 0xbc57ac4c && out[3] == 0x9b00dbd8);
    dskv_philox(ones, UINT64_MAX, out);
    CU_ASSERT(out[0] == 0x408f276d && out[1] == 0x41c83b0e && out[2] == 0xa20bc7c6 && out[3] == 0x6d5451fd);
    double sum = 0;
    for (uint32_t i = 0; i < 10000; i++) {
        double u = dskv_philox_uniform(7, i);
        CU_ASSERT(u >= 0 && u < 1);
        sum += u;
    }
    CU_ASSERT(fabs(sum / 10000 - 0.5) < 0.012);
}

int main(void)
{
    return dskv_run_tests("kernels.sample",
                          (struct dskv_test[]){
                              {"frequencies follow the row", frequencies_follow_the_row},
                              {"filters keep the head", filters_keep_the_head},
                              {"temperature zero is the lowest best", temperature_zero_is_the_lowest_best},
                              {"draws are reproducible", draws_are_reproducible},
                              {"large rows keep what a sort keeps", large_rows_keep_what_a_sort_keeps},
                              {"philox is philox", philox_is_philox},
                              {NULL, NULL},
                          });
}
