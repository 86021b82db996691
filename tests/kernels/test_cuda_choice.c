/* Choosing from logits on the CUDA device: statistics, the k best, draws. */
#include "kernels/test_cuda.h"

#include "base/limits.h"

enum { MAX_K = DSKV_MAX_TOPK, N_ROWS = 6 };

struct selection {
    struct dskv_row_stats *stats;
    float *values;
    int32_t *ids;
};

/* Columns [first, first + n) of rows [rows, vocab], as a shard of `held` >= n columns of which the rest is padding. */
static struct selection select_on(struct dskv_device *device, const float *logits, int rows, int vocab, int first,
                                  int n, int held, const int32_t *targets, int k)
{
    float *shard = dskv_calloc((size_t)(rows * held), sizeof *shard);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < held; i++)
            shard[r * held + i] = i < n ? logits[r * vocab + first + i] : NAN;
    struct dskv_tensor x = test_put(device, shard, DSKV_F32, rows, held, 3);
    size_t stats_bytes = (size_t)rows * sizeof(struct dskv_row_stats), k_bytes = (size_t)(rows * k) * sizeof(float);
    int32_t *device_targets = test_put_bytes(device, targets, (size_t)rows * sizeof *targets);
    struct dskv_row_stats *stats = dskv_device_alloc(device, stats_bytes);
    float *values = dskv_device_alloc(device, k_bytes);
    int32_t *ids = dskv_device_alloc(device, k_bytes);
    dskv_op_select(device, &(struct dskv_select){x, first, vocab, device_targets, k, stats, values, ids});
    free(test_take(device, &x));
    free(shard);
    dskv_device_free(device, device_targets, (size_t)rows * sizeof *targets);
    return (struct selection){test_take_bytes(device, stats, stats_bytes), test_take_bytes(device, values, k_bytes),
                              test_take_bytes(device, ids, k_bytes)};
}

static void selection_close(struct selection *s)
{
    free(s->stats);
    free(s->values);
    free(s->ids);
}

/* Random rows; odd ones are full of ties, of both zeros too. */
static float *random_rows(uint64_t *seed, int rows, int vocab)
{
    float *x = dskv_calloc((size_t)(rows * vocab), sizeof *x);
    for (int i = 0; i < rows * vocab; i++)
        x[i] = i / vocab % 2 ? (float)(test_random_below(seed, 5) - 2) * (test_random_below(seed, 2) ? 1.0f : -1.0f)
                             : 8 * test_random_unit(seed);
    return x;
}

static int same_selection(const struct selection *got, const struct selection *expected, int rows, int k)
{
    int right = 1;
    for (int r = 0; r < rows && right; r++) {
        const struct dskv_row_stats *a = &got->stats[r], *b = &expected->stats[r];
        right = a->finite == b->finite;
        if (!b->finite)
            continue; /* nothing else may be used */
        right = right && a->max == b->max && a->argmax == b->argmax && a->target == b->target &&
                fabsf(a->sum_exp - b->sum_exp) <= 1e-5f * b->sum_exp;
        for (int i = r * k; i < (r + 1) * k && right; i++)
            right = got->ids[i] == expected->ids[i] && got->values[i] == expected->values[i];
        if (!right)
            printf("\n    row %d: max %g at %d, sum %g; expected %g at %d, sum %g ", r, (double)a->max, a->argmax,
                   (double)a->sum_exp, (double)b->max, b->argmax, (double)b->sum_exp);
    }
    return right;
}

static void selections_equal_the_cpu(void)
{
    static const int vocabs[] = {1, 50, 257, 5000}, ks[] = {0, 1, 20, MAX_K};
    for (int v = 0; v < 4; v++)
        for (int i = 0; i < 4; i++) {
            uint64_t seed = (uint64_t)(v * 4 + i);
            float *x = random_rows(&seed, N_ROWS, vocabs[v]);
            int32_t targets[N_ROWS];
            for (int r = 0; r < N_ROWS; r++)
                targets[r] = test_random_below(&seed, vocabs[v] + 1) - 1;
            if (i == 2) {
                x[2 * vocabs[v]] = NAN;
                x[3 * vocabs[v] + vocabs[v] / 2] = INFINITY;
                x[5 * vocabs[v] - 1] = -INFINITY;
            }
            struct selection got = select_on(gpu, x, N_ROWS, vocabs[v], 0, vocabs[v], vocabs[v] + 7, targets, ks[i]);
            struct selection expected =
                select_on(cpu, x, N_ROWS, vocabs[v], 0, vocabs[v], vocabs[v] + 7, targets, ks[i]);
            CU_ASSERT(same_selection(&got, &expected, N_ROWS, ks[i]));
            selection_close(&got);
            selection_close(&expected);
            free(x);
        }
}

/* The k best of the whole are the k best of the shards' k best, and the largest is the shards' largest. */
static void shards_make_the_whole(void)
{
    enum { VOCAB = 1000, K = 33 };
    static const int cuts[] = {0, 64, 64, 700, VOCAB}; /* one shard is empty */
    uint64_t seed = 8;
    float *x = random_rows(&seed, N_ROWS, VOCAB);
    int32_t targets[N_ROWS] = {-1, 0, 63, 64, 999, 700};
    struct selection whole = select_on(gpu, x, N_ROWS, VOCAB, 0, VOCAB, VOCAB, targets, K), part[4];
    for (int s = 0; s < 4; s++) /* the last one is padded */
        part[s] = select_on(gpu, x, N_ROWS, VOCAB, cuts[s], cuts[s + 1] - cuts[s], cuts[s + 1] - cuts[s] + (s == 3),
                            targets, K);
    for (int r = 0; r < N_ROWS; r++) {
        int at[4] = {0};
        float max = -INFINITY, target = -INFINITY;
        double sum = 0;
        for (int s = 0; s < 4; s++) {
            max = part[s].stats[r].max > max ? part[s].stats[r].max : max;
            target = part[s].stats[r].target > target ? part[s].stats[r].target : target;
        }
        for (int s = 0; s < 4; s++)
            if (part[s].stats[r].sum_exp > 0)
                sum += (double)part[s].stats[r].sum_exp * exp((double)(part[s].stats[r].max - max));
        CU_ASSERT(max == whole.stats[r].max && target == whole.stats[r].target);
        CU_ASSERT(fabs(sum - (double)whole.stats[r].sum_exp) <= 1e-5 * sum);
        for (int i = 0; i < K; i++) {
            int best = 0;
            for (int s = 1; s < 4; s++) {
                int a = r * K + at[s], b = r * K + at[best];
                if (part[s].values[a] > part[best].values[b] ||
                    (part[s].values[a] == part[best].values[b] && part[s].ids[a] < part[best].ids[b]))
                    best = s;
            }
            CU_ASSERT(part[best].ids[r * K + at[best]] == whole.ids[r * K + i]);
            at[best] = at[best] < K - 1 ? at[best] + 1 : at[best];
        }
        CU_ASSERT(whole.ids[r * K] == whole.stats[r].argmax);
    }
    CU_ASSERT(part[1].stats[0].argmax == INT32_MAX && part[1].stats[0].sum_exp == 0 && part[1].stats[0].finite);
    for (int s = 0; s < 4; s++)
        selection_close(&part[s]);
    selection_close(&whole);
    free(x);
}

/* ---- draws ------------------------------------------------------------------------------------------------------ */

static int32_t *sample_on(struct dskv_device *device, const float *logits, int rows, int vocab,
                          const struct dskv_sampling *sampling)
{
    struct dskv_tensor x = test_put(device, logits, DSKV_F32, rows, vocab, 1);
    size_t bytes = (size_t)rows * sizeof *sampling, id_bytes = (size_t)rows * sizeof(int32_t);
    struct dskv_sampling *device_sampling = test_put_bytes(device, sampling, bytes);
    int32_t *ids = dskv_device_alloc(device, id_bytes);
    void *scratch = dskv_device_alloc(device, dskv_sample_scratch_bytes(vocab));
    dskv_op_sample(device, &(struct dskv_sample){x, device_sampling, ids, scratch});
    int32_t *drawn = test_take_bytes(device, ids, id_bytes);
    free(test_take(device, &x));
    dskv_device_free(device, device_sampling, bytes);
    dskv_device_free(device, scratch, dskv_sample_scratch_bytes(vocab));
    return drawn;
}

static const struct dskv_sampling kinds[] = {{.temperature = 0, .top_p = 1},
                                             {.temperature = 1, .top_p = 1},
                                             {.temperature = 0.5f, .top_p = 0.9f},
                                             {.temperature = 1, .top_p = 1, .top_k = 7},
                                             {.temperature = 2, .top_p = 1, .min_p = 0.1f},
                                             {.temperature = 1, .top_p = 0.7f, .top_k = 20, .min_p = 0.01f},
                                             {.temperature = 1, .top_p = 0}};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

/* One function of logits, seed and position: nearly always the CPU's choice, always the same again and alone. */
static void draws_agree(void)
{
    enum { ROWS = 200, VOCAB = 1500 };
    uint64_t seed = 21;
    float *x = random_rows(&seed, ROWS, VOCAB);
    for (int kind = 0; kind < N_KINDS; kind++) {
        struct dskv_sampling sampling[ROWS];
        for (int r = 0; r < ROWS; r++) {
            sampling[r] = kinds[kind];
            sampling[r].seed = test_random(&seed);
            sampling[r].position = r * 31;
        }
        int32_t *got = sample_on(gpu, x, ROWS, VOCAB, sampling), *again = sample_on(gpu, x, ROWS, VOCAB, sampling);
        int32_t *expected = sample_on(cpu, x, ROWS, VOCAB, sampling);
        int n_other = 0;
        for (int r = 0; r < ROWS; r++)
            n_other += got[r] != expected[r];
        CU_ASSERT(n_other <= (kinds[kind].temperature > 0 && kinds[kind].top_p > 0 ? ROWS / 50 : 0));
        CU_ASSERT(memcmp(got, again, ROWS * sizeof *got) == 0);
        for (int r = 0; r < ROWS; r += 17) {
            if (test_leaves_out())
                continue;
            int32_t *alone = sample_on(gpu, x + r * VOCAB, 1, VOCAB, &sampling[r]);
            CU_ASSERT_EQUAL(alone[0], got[r]);
            free(alone);
        }
        free(got);
        free(again);
        free(expected);
    }
    free(x);
}

/* Five likely ids with ties, among unlikely ones: each is drawn as often as it should, within 4 standard deviations. */
static void draws_follow_the_row(void)
{
    enum { DRAWS = 4000, VOCAB = 50, N = 5 };
    static const int32_t head[N] = {7, 3, 12, 40, 20}; /* by logit, then id */
    static const float logits[N] = {2, 1, 1, 1, 0.5f};
    static const struct {
        struct dskv_sampling sampling;
        int n_kept;
    } cases[] = {{{.temperature = 1, .top_p = 1}, 5},
                 {{.temperature = 0.5f, .top_p = 1}, 5},
                 {{.temperature = 1, .top_p = 1, .top_k = 3}, 3},
                 {{.temperature = 1, .top_p = 0.5f}, 2},
                 {{.temperature = 1, .top_p = 0.8f}, 4},
                 {{.temperature = 1, .top_p = 1, .min_p = 0.36f}, 4}};
    float *x = dskv_calloc(DRAWS * VOCAB, sizeof *x);
    struct dskv_sampling *sampling = dskv_calloc(DRAWS, sizeof *sampling);
    for (int i = 0; i < DRAWS * VOCAB; i++)
        x[i] = -30;
    for (int r = 0; r < DRAWS; r++)
        for (int i = 0; i < N; i++)
            x[r * VOCAB + head[i]] = logits[i];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        if (test_leaves_out())
            continue;
        int counts[VOCAB] = {0};
        double sum = 0;
        for (int r = 0; r < DRAWS; r++) {
            sampling[r] = cases[c].sampling;
            sampling[r].seed = 99;
            sampling[r].position = r;
        }
        int32_t *ids = sample_on(gpu, x, DRAWS, VOCAB, sampling);
        for (int r = 0; r < DRAWS; r++)
            counts[ids[r] >= 0 && ids[r] < VOCAB ? ids[r] : 0]++;
        int n_drawn = 0;
        for (int i = 0; i < cases[c].n_kept; i++)
            sum += exp((double)(logits[i] / cases[c].sampling.temperature));
        for (int i = 0; i < cases[c].n_kept; i++) {
            double p = exp((double)(logits[i] / cases[c].sampling.temperature)) / sum;
            CU_ASSERT(fabs(counts[head[i]] - DRAWS * p) < 4 * sqrt(DRAWS * p * (1 - p)) + 1);
            n_drawn += counts[head[i]];
        }
        CU_ASSERT_EQUAL(n_drawn, DRAWS);
        free(ids);
    }
    free(sampling);
    free(x);
}

/* Rows that are hard to cut: ties all over, two values, masks far below, values that differ in their last bits or by
 * octaves.  A whole vocabulary, so that several blocks of a GPU share a row. */
static void fill_hard_row(uint64_t *seed, int kind, float *x, int vocab)
{
    for (int i = 0; i < vocab; i++) {
        float unit = test_random_unit(seed);
        switch (kind) {
        case 0: x[i] = 6 * unit; break;
        case 1: x[i] = 3; break;
        case 2: x[i] = test_random_below(seed, 3) ? -1 : 2; break;
        case 3: x[i] = i % 7 ? -1e9f : 4 * unit; break;
        case 4: x[i] = 1 + (float)test_random_below(seed, 5) * 0x1p-23f; break;
        case 5: x[i] = -ldexpf(1 + unit / 2, -test_random_below(seed, 140)); break;
        case 6: x[i] = i == vocab / 2 ? 1e38f : -1e38f; break;
        default: x[i] = (float)test_random_below(seed, 40) * 0.25f; break;
        }
    }
}

static void draws_from_hard_rows_agree(void)
{
    enum { N_ROWS_HARD = 8, VOCAB = 128256, N_DRAWS = 6 };
    static const struct dskv_sampling hard[] = {{.temperature = 1, .top_p = 1},
                                                {.temperature = 1, .top_p = 0.9f},
                                                {.temperature = 0.7f, .top_p = 0.3f, .top_k = 5000},
                                                {.temperature = 3, .top_p = 1, .top_k = 1},
                                                {.temperature = 0.01f, .top_p = 1, .top_k = 100000},
                                                {.temperature = 1e-30f, .top_p = 0.99f},
                                                {.temperature = 1, .top_p = 0.95f, .top_k = 50, .min_p = 0.02f},
                                                {.temperature = 1, .top_p = 0, .min_p = 1}};
    enum { N_HARD = sizeof hard / sizeof *hard, N_ALL = N_HARD * N_DRAWS };
    uint64_t seed = 77;
    float *x = dskv_calloc((size_t)N_ROWS_HARD * VOCAB, sizeof *x),
          *rows = dskv_calloc((size_t)N_ALL * VOCAB, sizeof *x);
    for (int r = 0; r < N_ROWS_HARD; r++)
        fill_hard_row(&seed, r, x + (size_t)r * VOCAB, VOCAB);
    for (int r = 0; r < N_ROWS_HARD; r++) {
        if (test_leaves_out())
            continue;
        struct dskv_sampling sampling[N_ALL];
        for (int i = 0; i < N_ALL; i++) {
            memcpy(rows + (size_t)i * VOCAB, x + (size_t)r * VOCAB, VOCAB * sizeof *x);
            sampling[i] = hard[i % N_HARD];
            sampling[i].seed = test_random(&seed);
            sampling[i].position = i;
        }
        int32_t *got = sample_on(gpu, rows, N_ALL, VOCAB, sampling);
        int32_t *expected = sample_on(cpu, rows, N_ALL, VOCAB, sampling);
        int n_other = 0;
        for (int i = 0; i < N_ALL; i++) {
            if (!test_leaves_out()) {
                int32_t *alone = sample_on(gpu, rows, 1, VOCAB, &sampling[i]);
                CU_ASSERT_EQUAL(alone[0], got[i]);
                free(alone);
            }
            if (got[i] != expected[i] && ++n_other > 1)
                printf("\n    row %d, parameters %d: drew %d (%g), the CPU %d (%g) ", r, i % N_HARD, got[i],
                       (double)rows[got[i]], expected[i], (double)rows[expected[i]]);
        }
        CU_ASSERT(n_other <= 1); /* a draw may fall next to a border */
        free(got);
        free(expected);
    }
    free(rows);
    free(x);
}

/* Where the temperature is 0, ids stay as they were. */
static void greedy_rows_are_left_alone(void)
{
    enum { ROWS = 3, VOCAB = 1000 };
    uint64_t seed = 5;
    float *x = random_rows(&seed, ROWS, VOCAB);
    struct dskv_sampling sampling[ROWS] = {
        {.temperature = 0, .top_p = 1}, {.temperature = 1, .top_p = 1}, {.top_p = 1}};
    int32_t before[ROWS] = {-7, -8, -9};
    struct dskv_tensor logits = test_put(gpu, x, DSKV_F32, ROWS, VOCAB, 1);
    struct dskv_sampling *device_sampling = test_put_bytes(gpu, sampling, sizeof sampling);
    int32_t *ids = test_put_bytes(gpu, before, sizeof before);
    void *scratch = dskv_device_alloc(gpu, dskv_sample_scratch_bytes(VOCAB));
    dskv_op_sample(gpu, &(struct dskv_sample){logits, device_sampling, ids, scratch});
    int32_t *after = test_take_bytes(gpu, ids, sizeof before);
    CU_ASSERT(after[0] == -7 && after[1] >= 0 && after[1] < VOCAB && after[2] == -9);
    free(after);
    free(test_take(gpu, &logits));
    dskv_device_free(gpu, device_sampling, sizeof sampling);
    dskv_device_free(gpu, scratch, dskv_sample_scratch_bytes(VOCAB));
    free(x);
}

const struct dskv_test test_cuda_choice[] = {
    {"selections equal the CPU", selections_equal_the_cpu},
    {"shards make the whole", shards_make_the_whole},
    {"draws agree", draws_agree},
    {"draws follow the row", draws_follow_the_row},
    {"draws from hard rows agree", draws_from_hard_rows_agree},
    {"greedy rows are left alone", greedy_rows_are_left_alone},
    {NULL, NULL},
};
