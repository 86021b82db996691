/* The pool hands out chunks of a job through one 64-bit ticket: the job's number above, the next chunk below.
 *
 * A worker reads the ticket, then the job's fields, then takes a chunk by compare-and-swap.  Before the caller
 * overwrites the fields it closes the ticket, so that a worker that wakes late and reads fields of two jobs fails to
 * take anything.  Thus nobody ever waits for a sleeping worker, only for chunks that were taken.  All atomics are
 * sequentially consistent: a job is microseconds long, and the order closed ticket, fields, open ticket, job is what
 * the argument rests on.
 */
#include "kernels/cpu/threads.h"

#include "base/memory.h"
#include "base/status.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SPIN_NS = 50000, /* how long a worker looks for the next job before it sleeps */
    WORTH_NS = 6000, /* jobs shorter than this are done by the caller alone */
    CHUNK_NS = 3000, /* chunks are not cut shorter than this */
    CHUNKS_PER_THREAD = 6
};

#define CLOSED UINT32_MAX /* no job has so many chunks */

struct dskv_threads {
    int n_workers;
    pthread_t *workers;
    _Atomic uint64_t ticket;           /* job << 32 | next chunk; closed: CLOSED below */
    _Atomic(dskv_threads_part *) part; /* the job's fields */
    _Atomic(void *) context;
    _Atomic int64_t n_items, chunk_items;
    _Atomic uint32_t n_chunks;
    _Atomic uint32_t n_done; /* chunks of this job */
    _Atomic uint32_t job;    /* what workers wait on: changes with every job and at the end */
    _Atomic uint32_t n_asleep;
    _Atomic int stop;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Takes and computes chunks of the current job until none is left. */
static void work(struct dskv_threads *threads)
{
    for (;;) {
        uint64_t ticket = threads->ticket;
        dskv_threads_part *part = threads->part;
        void *context = threads->context;
        int64_t n_items = threads->n_items, chunk_items = threads->chunk_items;
        uint32_t chunk = (uint32_t)ticket;
        if (chunk >= threads->n_chunks)
            return;
        if (!atomic_compare_exchange_strong(&threads->ticket, &ticket, ticket + 1))
            continue;
        int64_t first = chunk * chunk_items, last = first + chunk_items;
        part(context, first, last < n_items ? last : n_items);
        threads->n_done++;
    }
}

/* Returns when the job is no longer `seen`: spins, then sleeps. */
static void wait_for_job(struct dskv_threads *threads, uint32_t seen)
{
    int64_t start = now_ns();
    do {
        for (int i = 0; i < 32; i++) {
            if (threads->job != seen)
                return;
            pause_cpu();
        }
    } while (now_ns() - start < SPIN_NS);
    threads->n_asleep++; /* either the caller sees this sleeper, or the system sees the new job */
    while (threads->job == seen)
        syscall(SYS_futex, &threads->job, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    threads->n_asleep--;
}

static void announce(struct dskv_threads *threads)
{
    threads->job++;
    if (threads->n_asleep > 0)
        syscall(SYS_futex, &threads->job, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void *worker(void *argument)
{
    struct dskv_threads *threads = argument;
    uint32_t seen = 0; /* the pool's first job is 1; a job announced before this thread ran is seen at once */
    for (;;) {
        wait_for_job(threads, seen);
        seen = threads->job;
        if (threads->stop)
            return NULL;
        work(threads);
    }
}

struct dskv_threads *dskv_threads_open(int n_threads)
{
    DSKV_ASSERT(n_threads >= 1, "%d threads", n_threads);
    struct dskv_threads *threads = dskv_calloc(1, sizeof *threads);
    threads->workers = dskv_calloc((size_t)n_threads, sizeof *threads->workers);
    sigset_t all, before; /* signals are for the process's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (threads->n_workers < n_threads - 1 &&
           pthread_create(&threads->workers[threads->n_workers], NULL, worker, threads) == 0)
        threads->n_workers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (threads->n_workers < n_threads - 1)
        dskv_threads_close(&threads);
    return threads;
}

void dskv_threads_close(struct dskv_threads **self)
{
    struct dskv_threads *threads = *self;
    if (!threads)
        return;
    threads->stop = 1;
    announce(threads);
    for (int i = 0; i < threads->n_workers; i++)
        pthread_join(threads->workers[i], NULL);
    free(threads->workers);
    free(threads);
    *self = NULL;
}

void dskv_threads_for(struct dskv_threads *threads, int64_t n_items, int64_t item_ns, dskv_threads_part *part,
                      void *context)
{
    if (n_items <= 0)
        return;
    if (threads->n_workers == 0 || n_items == 1 || n_items * item_ns < WORTH_NS) {
        part(context, 0, n_items);
        return;
    }
    int64_t n_chunks = (int64_t)(threads->n_workers + 1) * CHUNKS_PER_THREAD;
    int64_t chunk_items = (n_items + n_chunks - 1) / n_chunks;
    if (chunk_items * item_ns < CHUNK_NS)
        chunk_items = CHUNK_NS / (item_ns > 0 ? item_ns : 1) + 1;
    n_chunks = (n_items + chunk_items - 1) / chunk_items;
    uint64_t next_job = ((threads->ticket >> 32) + 1) << 32;
    threads->ticket = next_job | CLOSED;
    threads->part = part;
    threads->context = context;
    threads->n_items = n_items;
    threads->chunk_items = chunk_items;
    threads->n_chunks = (uint32_t)n_chunks;
    threads->n_done = 0;
    threads->ticket = next_job;
    announce(threads);
    work(threads);
    /* The others' last chunks are short; but a worker may have lost its core, so do not hold this one for long. */
    for (int i = 0; threads->n_done != (uint32_t)n_chunks; i++) {
        pause_cpu();
        if (i > 200)
            sched_yield();
    }
}
