/* Exchanges and sums over ranks: every rank gets the same bits, those of a plain loop in rank order, at every size, by
 * every implementation that serves here.
 *
 *     DSKV_TEST_DEVICE=cuda [DSKV_TEST_SHARE_GPU=1] mpirun -np 2 test_parallel_comm
 */
#include "parallel/comm.h"
#include "parallel/engine.h"
#include "parallel/job.h"
#include "parallel/segment.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FLOATS = 1 << 20, LOG_FLOATS = 6 << 20, SLOW_FLOATS = 16 << 20 };
#define SLOT_BYTES (MAX_FLOATS * sizeof(float))

static struct dskv_device *device;
static struct dskv_segment segment;
static struct dskv_comm *comm;
static const char *name; /* of the implementation; null: the first that serves */

/* Values of very different sizes, so that the order of a sum shows; sums over eight ranks fit f16. */
static float value_of(int rank, int round, int64_t i)
{
    uint64_t x = (uint64_t)(rank + 1) * 0x9e3779b97f4a7c15u ^ (uint64_t)(round + 1) * 0xbf58476d1ce4e5b9u ^ (uint64_t)i;
    x = x * 6364136223846793005u + 1442695040888963407u;
    x ^= x >> 29;
    return ((float)(x >> 40) - 8388608.0f) * (x & 64 ? 0x1p-11f : 1e-3f);
}

/* ---- memory ------------------------------------------------------------------------------------- */

static void *alloc_device(size_t bytes)
{
    void *memory = dskv_device_alloc(device, bytes);
    DSKV_ASSERT(memory, "no memory for %zu bytes", bytes);
    return memory;
}

static void *alloc_host(size_t bytes)
{
    void *memory = calloc(1, bytes);
    DSKV_ASSERT(memory, "no memory for %zu bytes", bytes);
    return memory;
}

/* out[n] of dtype = the values of a rank in a round. */
static void make_values(void *out, enum dskv_dtype dtype, int rank, int round, int64_t n)
{
    float *values = alloc_host((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++)
        values[i] = value_of(rank, round, i);
    dskv_convert(out, dtype, values, DSKV_F32, (size_t)n);
    free(values);
}

static void fill_slot(enum dskv_dtype dtype, int round, int64_t n)
{
    size_t bytes = (size_t)n * dskv_dtype_bytes(dtype);
    void *values = alloc_host(bytes);
    make_values(values, dtype, segment.peers.rank, round, n);
    dskv_device_upload(device, dskv_comm_slot(comm), values, bytes);
    free(values);
}

/* The sum by a plain loop; descending: over the ranks from the last to the first. */
static void make_sum(void *out, enum dskv_dtype dtype, int round, int64_t n, int descending)
{
    size_t bytes = (size_t)n * dskv_dtype_bytes(dtype);
    float *sum = alloc_host((size_t)n * sizeof *sum), *part = alloc_host((size_t)n * sizeof *part);
    void *rounded = alloc_host(bytes);
    for (int r = 0; r < segment.peers.n_ranks; r++) {
        make_values(rounded, dtype, descending ? segment.peers.n_ranks - 1 - r : r, round, n);
        dskv_convert(part, DSKV_F32, rounded, dtype, (size_t)n);
        for (int64_t i = 0; i < n; i++)
            sum[i] = r == 0 ? part[i] : sum[i] + part[i];
    }
    dskv_convert(out, dtype, sum, DSKV_F32, (size_t)n);
    free(sum);
    free(part);
    free(rounded);
}

/* 1 when device memory holds other bytes. */
static int differs(const void *device_memory, const void *expected, size_t bytes)
{
    void *got = alloc_host(bytes);
    dskv_device_download(device, got, device_memory, bytes);
    int result = memcmp(got, expected, bytes) != 0;
    free(got);
    return result;
}

static int computes_in(enum dskv_dtype dtype)
{
    return dskv_device_activation_dtype(device, dtype) == dtype;
}

/* ---- sums --------------------------------------------------------------------------------------- */

static void a_sum_has_the_bits_of_rank_order(void)
{
    static const int64_t rows[] = {1, 2, 3, 16, 17, 64, 129, 600};
    static const int64_t cols[] = {1, 20, 250, 256, 4096};
    int round = 0, wrong = 0, reversed_differs = 0;
    void *expected = alloc_host(SLOT_BYTES), *reversed = alloc_host(SLOT_BYTES);
    for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
        for (size_t r = 0; computes_in(dtype) && r < sizeof rows / sizeof *rows; r++)
            for (size_t c = 0; c < sizeof cols / sizeof *cols; c++, round++) {
                int64_t n = rows[r] * cols[c];
                size_t bytes = (size_t)n * dskv_dtype_bytes(dtype);
                struct dskv_tensor sum;
                if (bytes > SLOT_BYTES)
                    continue;
                fill_slot(dtype, round, n);
                CU_ASSERT_EQUAL(dskv_comm_sum(comm, rows[r], cols[c], dtype, &sum, NULL), DSKV_EXIT_OK);
                CU_ASSERT(sum.rows == rows[r] && sum.cols == cols[c] && sum.stride == cols[c]);
                make_sum(expected, dtype, round, n, 0);
                make_sum(reversed, dtype, round, n, 1);
                wrong += differs(sum.data, expected, bytes);
                reversed_differs += memcmp(expected, reversed, bytes) != 0;
            }
    free(expected);
    free(reversed);
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT(segment.peers.n_ranks < 3 || reversed_differs > 0); /* else the data would prove nothing */
}

/* ---- the sum, the residual and the norm --------------------------------------------------------- */

struct add_case {
    enum dskv_dtype dtype;
    enum dskv_norm_kind kind;
    int64_t rows, cols, stride;
    int has_bias;
};

static float *upload_floats(int round, int64_t n)
{
    float *values = alloc_host((size_t)n * sizeof *values), *memory = alloc_device((size_t)n * sizeof *memory);
    for (int64_t i = 0; i < n; i++)
        values[i] = value_of(99, round, i) * 0x1p-9f;
    dskv_device_upload(device, memory, values, (size_t)n * sizeof *values);
    free(values);
    return memory;
}

static void free_floats(float *memory, int64_t n)
{
    dskv_device_free(device, memory, (size_t)n * sizeof *memory);
}

static void queue_plain(const struct dskv_residual_norm *p)
{
    dskv_op_residual(device, &p->residual);
    dskv_op_norm(device, &p->norm);
}

static int add_case_differs(const struct add_case *c, int round)
{
    int64_t n = c->rows * c->cols, n_strided = c->rows * c->stride;
    size_t bytes = (size_t)n * dskv_dtype_bytes(c->dtype), x_bytes = (size_t)n_strided * dskv_dtype_bytes(c->dtype);
    void *host = alloc_host(bytes > x_bytes ? bytes : x_bytes);
    float *bias = upload_floats(round, c->cols), *weight = upload_floats(round + 1, c->cols),
          *norm_bias = upload_floats(round + 2, c->cols);
    void *x[2], *out[2], *y = alloc_device(bytes);
    for (int i = 0; i < 2; i++) {
        x[i] = alloc_device(x_bytes);
        out[i] = alloc_device(bytes);
        make_values(host, c->dtype, 98, round, n_strided); /* replicated: the same on all ranks */
        dskv_device_upload(device, x[i], host, x_bytes);
    }
    make_sum(host, c->dtype, round, n, 0);
    dskv_device_upload(device, y, host, bytes);
    fill_slot(c->dtype, round, n);
    int result = 0;
    for (int i = 0; i < 2; i++) {
        struct dskv_tensor residual = {x[i], c->dtype, c->rows, c->cols, c->stride};
        struct dskv_residual_norm p = {
            .residual = {residual, dskv_tensor(i ? y : NULL, c->dtype, c->rows, c->cols), c->has_bias ? bias : NULL},
            .norm = {c->kind, 1e-5f, residual, weight, c->has_bias ? norm_bias : NULL,
                     dskv_tensor(out[i], c->dtype, c->rows, c->cols)}};
        if (i)
            queue_plain(&p);
        else
            result = dskv_comm_add(comm, &p, NULL) != DSKV_EXIT_OK;
    }
    dskv_device_download(device, host, x[1], x_bytes);
    result |= differs(x[0], host, x_bytes);
    dskv_device_download(device, host, out[1], bytes);
    result |= differs(out[0], host, bytes);
    for (int i = 0; i < 2; i++) {
        dskv_device_free(device, x[i], x_bytes);
        dskv_device_free(device, out[i], bytes);
    }
    dskv_device_free(device, y, bytes);
    free_floats(bias, c->cols);
    free_floats(weight, c->cols);
    free_floats(norm_bias, c->cols);
    free(host);
    return result;
}

static void an_addition_is_its_three_operations(void)
{
    static const int64_t rows[] = {1, 3, 64, 130}, cols[] = {20, 250, 768, 4096, 8192, 16384};
    int round = 5000, wrong = 0, n_cases = 0;
    for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
        for (size_t r = 0; computes_in(dtype) && r < sizeof rows / sizeof *rows; r++)
            for (size_t c = 0; c < sizeof cols / sizeof *cols; c++)
                for (int variant = 0; variant < 4; variant++, round += 3) {
                    struct add_case one = {
                        dtype, variant & 1 ? DSKV_LAYER_NORM : DSKV_RMS_NORM, rows[r], cols[c], cols[c], variant & 2};
                    if (variant == 3)
                        one.stride += 8;
                    if ((size_t)(rows[r] * cols[c]) * dskv_dtype_bytes(dtype) > SLOT_BYTES)
                        continue;
                    int is_wrong = add_case_differs(&one, round);
                    if (is_wrong && wrong < 5)
                        printf("%s, %d x %d, variant %d differs; ", dskv_dtype_name(dtype), (int)rows[r], (int)cols[c],
                               variant);
                    wrong += is_wrong;
                    n_cases++;
                }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT(n_cases > 50);
}

/* ---- many rounds, nothing waited for ------------------------------------------------------------ */

/* One exchange or sum of n floats.  Its inputs and results lie in the logs, so that a whole batch can be queued. */
struct round {
    int number, is_sum;
    int64_t n, log_at;
};

static uint32_t random_of(uint32_t *state, uint32_t n)
{
    *state = *state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)*state * n) >> 32);
}

static int64_t padded(int64_t n)
{
    return (n + 63) / 64 * 64;
}

/* Queued: out = in. */
static void copy(float *out, const float *in, int64_t n)
{
    const void *partials[] = {in};
    struct dskv_sum p = {partials, 1, dskv_tensor(out, DSKV_F32, 1, n)};
    dskv_op_sum(device, &p);
}

/* What a slow rank's device, or host, does before it reads. */
static void be_slow(float *slow)
{
    if (dskv_device_is_host(device))
        usleep(300);
    else
        for (int i = 0; i < 3; i++)
            copy(slow + SLOW_FLOATS / 2, slow, SLOW_FLOATS / 2);
}

static void run_round(const struct round *round, const float *in, float *log, float *slow, uint32_t *own_state)
{
    int n_ranks = segment.peers.n_ranks;
    if (random_of(own_state, 8) == 0)
        be_slow(slow);
    copy(dskv_comm_slot(comm), in + round->log_at, round->n);
    if (round->is_sum) {
        struct dskv_tensor sum;
        CU_ASSERT_EQUAL(dskv_comm_sum(comm, 1, round->n, DSKV_F32, &sum, NULL), DSKV_EXIT_OK);
        if (random_of(own_state, 8) == 0)
            be_slow(slow);
        copy(log + round->log_at, sum.data, round->n);
        return;
    }
    const void *const *slots;
    CU_ASSERT_EQUAL(dskv_comm_exchange(comm, (size_t)round->n * sizeof(float), &slots, NULL), DSKV_EXIT_OK);
    if (random_of(own_state, 8) == 0)
        be_slow(slow);
    for (int r = 0; r < n_ranks; r++)
        copy(log + round->log_at + r * padded(round->n), slots[r], round->n);
}

static int64_t round_floats(const struct round *round)
{
    return padded(round->n) * (round->is_sum ? 1 : segment.peers.n_ranks);
}

static int count_wrong(const struct round *round, const float *log)
{
    int wrong = 0;
    size_t bytes = (size_t)round->n * sizeof(float);
    float *expected = alloc_host(bytes);
    for (int r = 0; r < (round->is_sum ? 1 : segment.peers.n_ranks); r++) {
        if (round->is_sum)
            make_sum(expected, DSKV_F32, round->number, round->n, 0);
        else
            make_values(expected, DSKV_F32, r, round->number, round->n);
        wrong += memcmp(expected, log + round->log_at + r * padded(round->n), bytes) != 0;
    }
    free(expected);
    return wrong;
}

enum { BATCH = 64, N_ROUNDS = 3000, N_HOST_ROUNDS = 1000 };
struct batch {
    struct round rounds[BATCH];
    int n;
    int64_t n_floats;
    float *host, *in, *log, *slow;
};

static struct batch open_batch(void)
{
    size_t bytes = LOG_FLOATS * sizeof(float);
    return (struct batch){.host = alloc_host(bytes),
                          .in = alloc_device(bytes),
                          .log = alloc_device(bytes),
                          .slow = alloc_device(SLOW_FLOATS * sizeof(float))};
}

static void close_batch(struct batch *batch)
{
    dskv_device_free(device, batch->in, LOG_FLOATS * sizeof(float));
    dskv_device_free(device, batch->log, LOG_FLOATS * sizeof(float));
    dskv_device_free(device, batch->slow, SLOW_FLOATS * sizeof(float));
    free(batch->host);
}

/* As many rounds of mixed sizes as the logs hold, the same on all ranks. */
static void plan_batch(struct batch *batch, int number, uint32_t *state)
{
    static const int64_t sizes[] = {1, 7, 61, 500, 2048, 4096, 30000, 300000};
    batch->n = 0;
    batch->n_floats = 0;
    while (batch->n < BATCH) {
        uint32_t size = random_of(state, 8 * 8);
        size = size / 8 > 5 && size % 8 > 1 ? size % 6 : size / 8; /* large ones seldom */
        struct round round = {number + batch->n, (int)random_of(state, 2), sizes[size] + random_of(state, 40),
                              batch->n_floats};
        if (batch->n_floats + round_floats(&round) > LOG_FLOATS)
            break;
        batch->n_floats += round_floats(&round);
        batch->rounds[batch->n++] = round;
    }
}

static void upload_inputs(const struct batch *batch, int first_number)
{
    for (int i = 0; i < batch->n; i++)
        make_values(batch->host + batch->rounds[i].log_at, DSKV_F32, segment.peers.rank, first_number + i,
                    batch->rounds[i].n);
    dskv_device_upload(device, batch->in, batch->host, (size_t)batch->n_floats * sizeof(float));
}

static int check_batch(struct batch *batch, int first_number)
{
    int wrong = 0;
    CU_ASSERT_EQUAL(dskv_device_sync(device, NULL), DSKV_OK);
    dskv_device_download(device, batch->host, batch->log, (size_t)batch->n_floats * sizeof(float));
    for (int i = 0; i < batch->n; i++) {
        batch->rounds[i].number = first_number + i;
        wrong += count_wrong(&batch->rounds[i], batch->host);
    }
    return wrong;
}

/* Exchanges and sums in turn, one rank or the other late: a slow reader is never overtaken by a writer. */
static void parts_last_until_the_next_is_written(void)
{
    struct batch batch = open_batch();
    uint32_t state = 7, own_state = 1000u + (uint32_t)segment.peers.rank;
    int wrong = 0, n_rounds = dskv_device_is_host(device) ? N_HOST_ROUNDS : N_ROUNDS;
    for (int done = 0; done < n_rounds; done += batch.n) {
        plan_batch(&batch, done, &state);
        upload_inputs(&batch, done);
        for (int i = 0; i < batch.n; i++)
            run_round(&batch.rounds[i], batch.in, batch.log, batch.slow, &own_state);
        wrong += check_batch(&batch, done);
    }
    close_batch(&batch);
    CU_ASSERT_EQUAL(wrong, 0);
}

/* What was queued once can be replayed over other inputs, with other calls in between. */
static void a_recording_exchanges_again(void)
{
    struct batch batch = open_batch();
    uint32_t state = 77, own_state = 2000u + (uint32_t)segment.peers.rank;
    int wrong = 0;
    plan_batch(&batch, 0, &state);
    if (dskv_comm_is_queued(comm) && dskv_device_record_begin(device)) {
        for (int i = 0; i < batch.n; i++)
            run_round(&batch.rounds[i], batch.in, batch.log, batch.slow, &own_state);
        struct dskv_recording *recording = dskv_device_record_end(device);
        CU_ASSERT_PTR_NOT_NULL(recording);
        for (int replay = 0; recording && replay < 20; replay++) {
            upload_inputs(&batch, 100000 + replay * BATCH);
            for (int again = 0; again <= replay % 3; again++)
                dskv_device_replay(device, recording);
            wrong += check_batch(&batch, 100000 + replay * BATCH);
            if (replay % 4 == 0)
                run_round(&batch.rounds[replay % batch.n], batch.in, batch.log, batch.slow, &own_state);
        }
        dskv_recording_close(device, &recording);
    }
    close_batch(&batch);
    CU_ASSERT_EQUAL(wrong, 0);
}

/* ---- time, names -------------------------------------------------------------------------------- */

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void sums_are_timed(void)
{
    static const int64_t rows[] = {1, 8, 64, 512};
    printf("%s: ", dskv_comm_name(comm));
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct dskv_tensor sum;
        double begin = now_us();
        for (int round = 0; round < 200; round++) {
            dskv_comm_slot(comm);
            CU_ASSERT_EQUAL(dskv_comm_sum(comm, rows[r], 256, DSKV_F32, &sum, NULL), DSKV_EXIT_OK);
        }
        CU_ASSERT_EQUAL(dskv_device_sync(device, NULL), DSKV_OK);
        printf("%d x 256: %.1f us, ", (int)rows[r], (now_us() - begin) / 200);
    }
}

/* Where GPUs do not reach each other "peer" does not serve, and "nccl" is right to be the first. */
static void the_name_says_what_was_picked(void)
{
    const char *first = getenv("DSKV_TEST_SHARE_GPU") ? "staged" : "peer", *got = dskv_comm_name(comm);
    if (segment.peers.n_ranks == 1)
        first = "self";
    else if (dskv_device_is_host(device))
        first = "shm";
    else if (strcmp(got, "nccl") == 0)
        first = "nccl";
    CU_ASSERT_STRING_EQUAL(got, name ? name : first);
}

/* The worst code and the sentence of the first rank that had it, on every rank. */
static void ranks_agree(void)
{
    int rank = segment.peers.rank, n = segment.peers.n_ranks;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL(dskv_parallel_agree(DSKV_EXIT_OK, &error), DSKV_EXIT_OK);
    enum dskv_exit code = rank == n - 1 ? dskv_fail_exit(&error, DSKV_EXIT_MEMORY, "told by rank %d", rank)
                          : rank == 0   ? dskv_fail_exit(&error, DSKV_EXIT_MODEL, "told by rank 0")
                                        : DSKV_EXIT_OK;
    char expected[32];
    snprintf(expected, sizeof expected, "told by rank %d", n - 1);
    CU_ASSERT_EQUAL(dskv_parallel_agree(code, &error), DSKV_EXIT_MEMORY);
    CU_ASSERT_STRING_EQUAL(error.message, expected);
    CU_ASSERT_EQUAL(dskv_job_min(10 - rank), 10 - (n - 1));
}

static int run_tests(void)
{
    return dskv_run_tests("parallel.comm",
                          (struct dskv_test[]){
                              {"a sum has the bits of rank order", a_sum_has_the_bits_of_rank_order},
                              {"an addition is its three operations", an_addition_is_its_three_operations},
                              {"parts last until the next is written", parts_last_until_the_next_is_written},
                              {"a recording exchanges again", a_recording_exchanges_again},
                              {"sums are timed", sums_are_timed},
                              {"the name says what was picked", the_name_says_what_was_picked},
                              {"ranks agree", ranks_agree},
                              {NULL, NULL},
                          });
}

/* ---- implementations ---------------------------------------------------------------------------- */

/* The first that serves, then those that it hides; each has a part of the segment of its own. */
static const char *const names[] = {NULL, "nccl", "staged"};
enum { N_NAMES = sizeof names / sizeof *names };

static size_t shared_bytes(void)
{
    return (dskv_comm_shared_bytes(dskv_job_n_ranks(), SLOT_BYTES) + 4095) / 4096 * 4096;
}

static int open_all(struct dskv_error *error)
{
    const char *kind = getenv("DSKV_TEST_DEVICE");
    struct dskv_device_options options = {.kind = kind ? kind : "cpu",
                                          .index = dskv_job_rank(),
                                          .share = getenv("DSKV_TEST_SHARE_GPU") != NULL,
                                          .n_threads = 1};
    return dskv_device_open(&options, &device, error) == DSKV_EXIT_OK &&
           dskv_segment_open(4096 + N_NAMES * shared_bytes(), &segment, error) == DSKV_EXIT_OK;
}

static int run_all(struct dskv_error *error)
{
    int failures = 0, n_run = 0;
    for (size_t i = 0; i < N_NAMES; i++) {
        struct dskv_comm_options options = {.device = device,
                                            .peers = &segment.peers,
                                            .slot_bytes = SLOT_BYTES,
                                            .shared = (char *)segment.memory + 4096 + i * shared_bytes(),
                                            .name = name = names[i]};
        if (dskv_comm_open(&options, &comm, error)) {
            printf("%s\n", error->message);
            failures += i == 0; /* one that is not for these ranks is refused by name */
            continue;
        }
        failures += run_tests();
        n_run++;
        dskv_comm_close(&comm);
    }
    return failures + (n_run < (segment.peers.n_ranks > 1 ? 2 : 1)); /* staged serves any ranks that are several */
}

int main(void)
{
    int rank, n_ranks, failures = 1;
    struct dskv_error error = {0};
    if (dskv_parallel_start(&rank, &n_ranks, NULL) == DSKV_EXIT_OK && open_all(&error)) {
        if (rank > 0 && !freopen("/dev/null", "w", stdout)) /* every rank checks, one prints; exit codes tell of all */
            return 1;
        failures = run_all(&error);
        dskv_segment_close(&segment);
    } else {
        fprintf(stderr, "%s\n", error.message);
    }
    dskv_device_close(&device);
    dskv_parallel_stop();
    return failures;
}
