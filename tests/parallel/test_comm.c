/* Exchanges and sums over ranks: every rank gets the same bits, those of a plain loop in rank order, at every size. */
#include "parallel/comm.h"
#include "parallel/engine.h"
#include "parallel/job.h"
#include "parallel/segment.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SLOT_BYTES (600 * 256 * sizeof(float))

static struct dskv_device *device;
static struct dskv_segment segment;
static struct dskv_comm *comm;

/* Values of very different sizes, so that the order of a sum shows. */
static float value_of(int rank, int round, int64_t i)
{
    uint64_t x = (uint64_t)(rank + 1) * 0x9e3779b97f4a7c15u ^ (uint64_t)(round + 1) * 0xbf58476d1ce4e5b9u ^ (uint64_t)i;
    x = x * 6364136223846793005u + 1442695040888963407u;
    x ^= x >> 29;
    return ((float)(x >> 40) - 8388608.0f) * (x & 64 ? 1.0f : 1e-6f);
}

static void fill(float *slot, int round, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        slot[i] = value_of(segment.peers.rank, round, i);
}

static void a_sum_has_the_bits_of_rank_order(void)
{
    static const int64_t rows[] = {1, 2, 3, 16, 17, 64, 129, 600};
    static const int64_t cols[] = {1, 20, 250, 256};
    int round = 0, wrong = 0, reversed_differs = 0;
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (size_t c = 0; c < sizeof cols / sizeof *cols; c++, round++) {
            int64_t n = rows[r] * cols[c];
            struct dskv_tensor sum;
            fill(dskv_comm_slot(comm), round, n);
            CU_ASSERT_EQUAL(dskv_comm_sum(comm, rows[r], cols[c], DSKV_F32, &sum, NULL), DSKV_EXIT_OK);
            CU_ASSERT(sum.rows == rows[r] && sum.cols == cols[c] && sum.stride == cols[c]);
            for (int64_t i = 0; i < n; i++) {
                float expected = value_of(0, round, i), reversed = value_of(segment.peers.n_ranks - 1, round, i);
                for (int rank = 1; rank < segment.peers.n_ranks; rank++) {
                    expected += value_of(rank, round, i);
                    reversed += value_of(segment.peers.n_ranks - 1 - rank, round, i);
                }
                wrong += memcmp(&expected, (const float *)sum.data + i, sizeof expected) != 0;
                reversed_differs += expected != reversed;
            }
        }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT(segment.peers.n_ranks < 3 || reversed_differs > 0); /* else the data would prove nothing */
}

/* Exchanges and sums in turn: a slow reader is never overtaken by a writer. */
static void slots_last_until_the_next_is_written(void)
{
    int wrong = 0;
    for (int round = 0; round < 300; round++) {
        const void *const *slots;
        struct dskv_tensor sum;
        int64_t n = 1 + (round * 37) % 5000;
        fill(dskv_comm_slot(comm), round, n);
        CU_ASSERT_EQUAL(dskv_comm_exchange(comm, (size_t)n * sizeof(float), &slots, NULL), DSKV_EXIT_OK);
        for (int rank = 0; rank < segment.peers.n_ranks; rank++)
            for (int64_t i = 0; i < n; i += 11)
                wrong += ((const float *)slots[rank])[i] != value_of(rank, round, i);
        if (round % 3)
            continue;
        fill(dskv_comm_slot(comm), round + 1000, n);
        CU_ASSERT_EQUAL(dskv_comm_sum(comm, 1, n, DSKV_F32, &sum, NULL), DSKV_EXIT_OK);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void sums_are_timed(void)
{
    static const int64_t rows[] = {1, 8, 64, 512};
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        struct dskv_tensor sum;
        double begin = now_us();
        for (int round = 0; round < 200; round++) {
            dskv_comm_slot(comm);
            CU_ASSERT_EQUAL(dskv_comm_sum(comm, rows[r], 256, DSKV_F32, &sum, NULL), DSKV_EXIT_OK);
        }
        printf("%d x 256: %.1f us, ", (int)rows[r], (now_us() - begin) / 200);
    }
}

static void the_name_says_what_was_picked(void)
{
    CU_ASSERT_STRING_EQUAL(dskv_comm_name(comm), segment.peers.n_ranks == 1 ? "self" : "shm");
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

static int open_all(void)
{
    struct dskv_device_options options = {.kind = "cpu", .n_threads = 1};
    if (dskv_device_open(&options, &device, NULL) ||
        dskv_segment_open(4096 + dskv_comm_shared_bytes(dskv_job_n_ranks(), SLOT_BYTES), &segment, NULL))
        return 0;
    struct dskv_comm_options comm_options = {device, &segment.peers, SLOT_BYTES, (char *)segment.memory + 4096};
    return dskv_comm_open(&comm_options, &comm, NULL) == DSKV_EXIT_OK;
}

int main(void)
{
    int rank, n_ranks, failures = 1;
    if (dskv_parallel_start(&rank, &n_ranks, NULL) == DSKV_EXIT_OK && open_all()) {
        if (rank > 0 && !freopen("/dev/null", "w", stdout)) /* every rank checks, one prints; exit codes tell of all */
            return 1;
        failures = dskv_run_tests("parallel.comm",
                                  (struct dskv_test[]){
                                      {"a sum has the bits of rank order", a_sum_has_the_bits_of_rank_order},
                                      {"slots last until the next is written", slots_last_until_the_next_is_written},
                                      {"sums are timed", sums_are_timed},
                                      {"the name says what was picked", the_name_says_what_was_picked},
                                      {"ranks agree", ranks_agree},
                                      {NULL, NULL},
                                  });
        dskv_comm_close(&comm);
        dskv_segment_close(&segment);
        dskv_device_close(&device);
    }
    dskv_parallel_stop();
    return failures;
}
