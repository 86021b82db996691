/* What the host could do at best: the ceilings that steps of the CPU device are measured against.
 *
 * Every rank streams and multiplies at the same time, with as many threads as it will have as an engine.  Ranks are
 * alike, so that the job's rate is this rank's times their number; a barrier before each measurement makes them
 * compete.
 */
#include "bench.h"

#include "base/memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define STREAM_BYTES ((size_t)1 << 30) /* over all ranks: more than caches hold */
#define N_PASSES 6

/* One source for each vector width; the default serves other processors. */
#if defined(__x86_64__) && !defined(__clang__)
#define EVERY_WIDTH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define FUSED __attribute__((optimize("fp-contract=fast")))
#else
#define EVERY_WIDTH
#define FUSED
#endif

typedef uint64_t words __attribute__((vector_size(64), aligned(64)));
typedef float floats __attribute__((vector_size(64)));

double dskv_bench_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- the work of one thread ------------------------------------------------------------------------------------- */

struct job {
    pthread_barrier_t *barrier;
    size_t n_words; /* streaming: of this thread's own buffer; 0: multiply on registers */
    size_t n_fma_loops;
    double begin_s[N_PASSES], end_s[N_PASSES];
    int failed;    /* no memory */
    uint64_t sink; /* so that nothing is optimised away */
};

EVERY_WIDTH static uint64_t stream(const words *data, size_t n)
{
    words sums[8] = {{0}};
    for (size_t i = 0; i + 8 <= n; i += 8)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            sums[j] += data[i + (size_t)j];
    words sum = sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

enum { FMA_CHAINS = 12 }; /* enough to hide the latency of one, few enough for the registers */

EVERY_WIDTH FUSED static float multiply(size_t n)
{
    floats sums[FMA_CHAINS], x, y;
    for (int j = 0; j < FMA_CHAINS; j++)
        sums[j] = (floats){0} + (float)j;
    x = (floats){0} + 0.999f;
    y = (floats){0} + 0.001f;
    for (size_t i = 0; i < n; i++)
#pragma GCC unroll 12
        for (int j = 0; j < FMA_CHAINS; j++)
            sums[j] = sums[j] * x + y;
    floats sum = sums[0];
    for (int j = 1; j < FMA_CHAINS; j++)
        sum += sums[j];
    return sum[0];
}

static void *work(void *argument)
{
    struct job *job = argument;
    words *data = NULL;
    if (job->n_words) {
        data = aligned_alloc(64, job->n_words * sizeof *data);
        if (data)
            memset(data, 1, job->n_words * sizeof *data); /* the pages are this thread's own */
        job->failed = !data;
    }
    for (int pass = 0; pass < N_PASSES; pass++) {
        pthread_barrier_wait(job->barrier);
        job->begin_s[pass] = dskv_bench_seconds();
        if (data)
            job->sink += stream(data, job->n_words);
        else if (!job->n_words)
            job->sink += (uint64_t)multiply(job->n_fma_loops);
        job->end_s[pass] = dskv_bench_seconds();
    }
    free(data);
    return NULL;
}

/* Seconds of the best pass, from the first thread's begin to the last one's end; 0 without memory. */
static double run(int32_t n_threads, size_t n_words, size_t n_fma_loops)
{
    struct job *jobs = dskv_calloc((size_t)n_threads, sizeof *jobs);
    pthread_t *threads = dskv_calloc((size_t)n_threads, sizeof *threads);
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, (unsigned)n_threads);
    for (int32_t i = 0; i < n_threads; i++) {
        jobs[i] = (struct job){.barrier = &barrier, .n_words = n_words, .n_fma_loops = n_fma_loops};
        int failed = pthread_create(&threads[i], NULL, work, &jobs[i]);
        DSKV_ASSERT(!failed, "no thread %d: %d", i, failed);
    }
    double best = 0;
    int failed = 0;
    for (int32_t i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
        failed |= jobs[i].failed;
    }
    for (int pass = 1; pass < N_PASSES && !failed; pass++) { /* the first one warms up */
        double begin = jobs[0].begin_s[pass], end = jobs[0].end_s[pass];
        for (int32_t i = 1; i < n_threads; i++) {
            begin = jobs[i].begin_s[pass] < begin ? jobs[i].begin_s[pass] : begin;
            end = jobs[i].end_s[pass] > end ? jobs[i].end_s[pass] : end;
        }
        best = best == 0 || end - begin < best ? end - begin : best;
    }
    pthread_barrier_destroy(&barrier);
    free(threads);
    free(jobs);
    return best;
}

/* ---- ceilings --------------------------------------------------------------------------------------------------- */

enum dskv_exit dskv_bench_host_measure(int n_ranks, int32_t n_threads, double weight_bytes,
                                       struct dskv_bench_machine *machine, struct dskv_error *error)
{
    double all = (double)n_ranks * n_threads;
    size_t big = STREAM_BYTES / 64 / (size_t)(n_ranks * n_threads) / 8 * 8;
    size_t small = (size_t)(weight_bytes / 64 / all) / 8 * 8 + 8;
    size_t n_loops = 4000000;
    double took[3];
    const size_t n_words[3] = {big, small, 0};
    enum dskv_exit code = DSKV_EXIT_OK; /* a rank that failed stays to the end: the others meet it at each barrier */
    for (int i = 0; i < 3; i++) {
        dskv_parallel_agree(DSKV_EXIT_OK, NULL);
        took[i] = run(n_threads, n_words[i], n_loops);
        if (took[i] == 0)
            code = dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes to stream",
                                  n_words[i] * sizeof(words));
    }
    dskv_parallel_agree(DSKV_EXIT_OK, NULL);
    if (code)
        return code;
    machine->read_bytes_s = all * (double)big * sizeof(words) / took[0];
    machine->reread_bytes_s = all * (double)small * sizeof(words) / took[1];
    machine->fma_flops_s = all * 2 * FMA_CHAINS * 16 * (double)n_loops / took[2];
    return DSKV_EXIT_OK;
}
