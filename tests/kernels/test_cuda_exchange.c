/* Exchanges between 1 to 8 peers, which here are queues of one GPU: each has a region of its own, all reach all.
 *
 *     test_kernels_cuda_exchange [MOST]
 *
 * MOST: peers.  Their kernels wait for each other, so all must run at once: few blocks in flight, or a wait between
 * rounds; under racecheck, which runs one at a time, MOST is 1.  Exit code 77: there is no GPU here.
 */
#include "kernels/test_cuda.h"

#include "base/limits.h"

enum { SLOT_BYTES = 2 << 20, LARGEST_SUM = 1100 << 10 };

static struct dskv_device *peers[DSKV_MAX_PEERS];
static struct dskv_exchange exchanges[DSKV_MAX_PEERS]; /* as each peer has it */
static int n_peers;
static size_t region_bytes;

static const enum dskv_dtype dtypes[] = {DSKV_F32, DSKV_F16, DSKV_BF16};

static void open_peers(int n)
{
    n_peers = n;
    for (int i = 0; i < n; i++) {
        struct dskv_device_options options = {.kind = "cuda"};
        struct dskv_error error;
        DSKV_ASSERT(dskv_device_open(&options, &peers[i], &error) == DSKV_EXIT_OK, "%s", error.message);
    }
    region_bytes = dskv_exchange_region_bytes(peers[0], n, SLOT_BYTES);
    for (int i = 0; i < n; i++) {
        exchanges[i] = (struct dskv_exchange){.n = n, .self = i, .slot_bytes = SLOT_BYTES};
        void *region = dskv_device_alloc(peers[i], region_bytes);
        DSKV_ASSERT(region, "no memory for %zu bytes", region_bytes);
        dskv_device_sync(peers[i], NULL);
        for (int j = 0; j < n; j++)
            exchanges[j].regions[i] = region;
    }
    for (int i = 1; i < n; i++)
        for (int j = 0; j < i; j++)
            exchanges[i].regions[j] = exchanges[j].regions[j];
}

static void sync_peers(void)
{
    struct dskv_error error;
    for (int i = 0; i < n_peers; i++)
        DSKV_ASSERT(dskv_device_sync(peers[i], &error) == DSKV_OK, "%s", error.message);
}

static void close_peers(void)
{
    for (int i = 0; i < n_peers; i++) {
        dskv_device_free(peers[i], exchanges[i].regions[i], region_bytes);
        dskv_device_close(&peers[i]);
    }
}

/* Fills the peers' slots with values of dtype, whose sum in the peers' order goes to sum[n] of dtype. */
static void fill_slots(uint64_t seed, enum dskv_dtype dtype, size_t n, void *sum)
{
    size_t bytes = n * dskv_dtype_bytes(dtype);
    float *total = dskv_calloc(n, sizeof *total);
    void *part = dskv_calloc(n, sizeof(float));
    for (int i = 0; i < n_peers; i++) {
        float *values = test_random_floats(&seed, n);
        dskv_convert(part, dtype, values, DSKV_F32, n);
        dskv_device_upload(peers[i], dskv_exchange_slot(&exchanges[i]), part, bytes);
        for (size_t j = 0; j < n; j++)
            total[j] = i == 0 ? test_rounded(dtype, values[j]) : total[j] + test_rounded(dtype, values[j]);
        free(values);
    }
    dskv_convert(sum, dtype, total, DSKV_F32, n);
    free(total);
    free(part);
}

static int device_differs(struct dskv_device *device, const void *memory, const void *expected, size_t bytes)
{
    void *got = dskv_calloc(bytes, 1);
    dskv_device_download(device, got, memory, bytes);
    int differs = memcmp(got, expected, bytes) != 0;
    free(got);
    return differs;
}

static void sums_have_the_order_of_the_peers(void)
{
    static const int64_t shapes[][2] = {{1, 1},    {1, 20},    {3, 250},    {1, 4096},
                                        {5, 4096}, {2, 16384}, {100, 2048}, {130, 4001}};
    int wrong = 0;
    for (int t = 0; t < 3; t++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            size_t n = (size_t)(shapes[s][0] * shapes[s][1]), bytes = n * dskv_dtype_bytes(dtypes[t]);
            if (bytes > LARGEST_SUM && n_peers > 2) /* blocks of more peers would not all be in flight */
                continue;
            void *expected = dskv_calloc(n, sizeof(float));
            fill_slots(s * 10 + (uint64_t)t, dtypes[t], n, expected);
            for (int i = 0; i < n_peers; i++) {
                struct dskv_exchange_add p = {&exchanges[i], dskv_tensor(dskv_exchange_sum(&exchanges[i]), dtypes[t],
                                                                         shapes[s][0], shapes[s][1])};
                dskv_op_exchange_add(peers[i], &p);
            }
            sync_peers();
            for (int i = 0; i < n_peers; i++)
                wrong += device_differs(peers[i], dskv_exchange_sum(&exchanges[i]), expected, bytes);
            free(expected);
        }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Whatever the bits: zeros of both signs, infinities, and what is no number, all bits 1 among them. */
static void sums_of_any_bits(void)
{
    enum { N_WORDS = 40000, BYTES = N_WORDS * 4 };
    static const uint32_t rare[] = {~0u,         0,           0x80000000u, 0x80008000u,
                                    0xffff0000u, 0x0000ffffu, 0x7f800000u, 0xfc007c00u};
    uint64_t seed = 31;
    uint32_t *words = dskv_calloc(N_WORDS, sizeof *words);
    void *partials[DSKV_MAX_PEERS], *sum = dskv_device_alloc(peers[0], BYTES);
    int wrong = 0;
    for (int i = 0; i < n_peers; i++) {
        for (int j = 0; j < N_WORDS; j++)
            words[j] = test_random_below(&seed, 3) ? (uint32_t)test_random(&seed) : rare[test_random_below(&seed, 8)];
        partials[i] = test_put_bytes(peers[0], words, BYTES);
        dskv_device_upload(peers[i], dskv_exchange_slot(&exchanges[i]), words, BYTES);
    }
    sync_peers();
    for (int t = 0; t < 3; t++) {
        int64_t n = BYTES / (int64_t)dskv_dtype_bytes(dtypes[t]);
        dskv_op_sum(peers[0],
                    &(struct dskv_sum){(const void *const *)partials, n_peers, dskv_tensor(sum, dtypes[t], 1, n)});
        dskv_device_download(peers[0], words, sum, BYTES);
        for (int i = 0; i < n_peers; i++)
            dskv_op_exchange_add(
                peers[i], &(struct dskv_exchange_add){&exchanges[i],
                                                      dskv_tensor(dskv_exchange_sum(&exchanges[i]), dtypes[t], 1, n)});
        sync_peers();
        for (int i = 0; i < n_peers; i++)
            wrong += device_differs(peers[i], dskv_exchange_sum(&exchanges[i]), words, BYTES);
    }
    for (int i = 0; i < n_peers; i++)
        dskv_device_free(peers[0], partials[i], BYTES);
    dskv_device_free(peers[0], sum, BYTES);
    free(words);
    CU_ASSERT_EQUAL(wrong, 0);
}

static void parts_arrive_whole(void)
{
    static const size_t sizes[] = {1, 16, 100, 4096, 50000, 300000, SLOT_BYTES};
    int wrong = 0;
    char *expected = dskv_calloc(1, SLOT_BYTES), *ignored = dskv_calloc(1, SLOT_BYTES);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        fill_slots(900 + s, DSKV_F32, (sizes[s] + 3) / 4, ignored);
        for (int i = 0; i < n_peers; i++) {
            struct dskv_exchange_gather p = {&exchanges[i], sizes[s]};
            dskv_op_exchange_gather(peers[i], &p);
        }
        sync_peers();
        for (int from = 0; from < n_peers; from++) {
            dskv_device_download(peers[from], expected, dskv_exchange_slot(&exchanges[from]), sizes[s]);
            for (int i = 0; i < n_peers; i++)
                wrong += device_differs(peers[i], dskv_exchange_part(&exchanges[i], from), expected, sizes[s]);
        }
    }
    free(expected);
    free(ignored);
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Rounds of fused additions and sums, queued without a wait: boxes are used again and again, by rows of other numbers
 * and widths.  x runs on from round to round; the plain operations follow it on the first peer's device. */
static void rounds_follow_each_other(void)
{
    enum { ROUNDS = 200, WIDTH = 4096, MAX_ROWS = 3 };
    static const int64_t widths[] = {768, 4096, 1024, 2048};
    size_t bytes = (size_t)MAX_ROWS * WIDTH * 2;
    void *x[DSKV_MAX_PEERS + 1], *out[DSKV_MAX_PEERS + 1], *sum = dskv_calloc(bytes, 2),
                                                           *y = dskv_device_alloc(peers[0], bytes);
    uint64_t seed = 5;
    float *values = test_random_floats(&seed, WIDTH),
          *weight = test_put_bytes(peers[0], values, WIDTH * sizeof *values);
    for (int i = 0; i <= n_peers; i++) { /* the last: the plain operations' */
        x[i] = dskv_device_alloc(peers[i % n_peers], bytes);
        out[i] = dskv_device_alloc(peers[i % n_peers], bytes);
    }
    fill_slots(77, DSKV_BF16, MAX_ROWS * WIDTH, sum);
    dskv_device_upload(peers[0], y, sum, bytes);
    sync_peers();
    for (int round = 0; round < ROUNDS; round++) {
        int64_t width = widths[round % 4], rows = 1 + round % MAX_ROWS;
        for (int i = 0; i <= n_peers; i++) {
            struct dskv_tensor residual = dskv_tensor(x[i], DSKV_BF16, rows, width);
            struct dskv_residual_norm then = {
                .residual = {residual,
                             dskv_tensor(i < n_peers ? dskv_exchange_sum(&exchanges[i]) : y, DSKV_BF16, rows, width),
                             weight},
                .norm = {round % 2 ? DSKV_RMS_NORM : DSKV_LAYER_NORM, 1e-5f, residual, weight, NULL,
                         dskv_tensor(out[i], DSKV_BF16, rows, width)}};
            if (i == n_peers) {
                dskv_op_residual_norm(peers[0], &then);
                continue;
            }
            struct dskv_exchange_residual_norm p = {&exchanges[i], then};
            dskv_op_exchange_residual_norm(peers[i], &p);
            if (round % 5 == i) { /* one is late; the next round writes over this */
                then.residual.x.data = then.norm.x.data = out[i];
                dskv_op_residual_norm(peers[i], &then);
            }
        }
        for (int i = 0; i < n_peers && round % 7 == 0; i++) {
            struct dskv_exchange_add p = {&exchanges[i],
                                          dskv_tensor(dskv_exchange_sum(&exchanges[i]), DSKV_BF16, rows, 500)};
            dskv_op_exchange_add(peers[i], &p);
        }
        if (round % 16 == 15)
            sync_peers();
    }
    sync_peers();
    void *expected_x = test_take_bytes(peers[0], x[n_peers], bytes),
         *expected_out = test_take_bytes(peers[0], out[n_peers], bytes);
    size_t last_bytes = (size_t)(1 + (ROUNDS - 1) % MAX_ROWS) * (size_t)widths[(ROUNDS - 1) % 4] * 2;
    int wrong = 0;
    for (int i = 0; i < n_peers; i++) {
        wrong += device_differs(peers[i], x[i], expected_x, bytes);
        wrong += (ROUNDS - 1) % 5 != i && device_differs(peers[i], out[i], expected_out, last_bytes);
        dskv_device_free(peers[i], x[i], bytes);
        dskv_device_free(peers[i], out[i], bytes);
    }
    dskv_device_free(peers[0], y, bytes);
    dskv_device_free(peers[0], weight, WIDTH * sizeof *values);
    free(expected_x);
    free(expected_out);
    free(values);
    free(sum);
    CU_ASSERT_EQUAL(wrong, 0);
}

int main(int argc, char **argv)
{
    struct dskv_error error;
    struct dskv_device_options options = {.kind = "cuda"};
    int most = argc > 1 ? atoi(argv[1]) : DSKV_MAX_PEERS;
    DSKV_ASSERT(most >= 1 && most <= DSKV_MAX_PEERS, "1 to %d peers, not %s", DSKV_MAX_PEERS, argv[1]);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); /* a queue of the GPU's for each of ours */
    if (dskv_device_open(&options, &peers[0], &error)) {
        printf("skipped: %s\n", error.message);
        return 77;
    }
    dskv_device_close(&peers[0]);
    int failures = 0;
    for (int n = 1; n <= most; n++) {
        printf("%d peers", n);
        open_peers(n);
        failures += dskv_run_tests("kernels.cuda_exchange",
                                   (struct dskv_test[]){
                                       {"sums have the order of the peers", sums_have_the_order_of_the_peers},
                                       {"sums of any bits", sums_of_any_bits},
                                       {"parts arrive whole", parts_arrive_whole},
                                       {"rounds follow each other", rounds_follow_each_other},
                                       {NULL, NULL},
                                   });
        close_peers();
    }
    return failures;
}
