/* The command stream between processes: order and content of many commands, how fast a sleeping rank wakes, what an
 * idle one costs, and that nobody waits for a rank that is gone. */
#include "base/memory.h"
#include "parallel/stream.h"
#include "support/cunit_suite.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAYLOAD_BYTES 4096
#define MAX_RANKS 4
enum kind { ADD, STOP, HANG };

struct job {
    struct dskv_peers *peers; /* shared, so that every rank sees all pids */
    void *memory;
    struct dskv_stream *stream; /* rank 0's */
    int n_ranks;
    int depth; /* commands that are posted before the first is collected, and taken before the first is answered */
};

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static void *share(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* A rank that adds up what it is sent: its answer is the sum so far, which depends on the order. */
static void work(const struct job *job, int rank)
{
    struct dskv_peers peers = *job->peers;
    peers.rank = rank;
    struct dskv_stream *stream = dskv_stream_open(job->memory, PAYLOAD_BYTES, &peers);
    const struct dskv_command *command;
    uint64_t sum = 0, sums[DSKV_STREAM_DEPTH];
    int exit_code = DSKV_EXIT_RANK_LOST, n_taken = 0;
    while ((command = dskv_stream_next(stream)) != NULL) {
        const uint32_t *payload = (const uint32_t *)dskv_stream_payload(stream) + command->offset / sizeof(uint32_t);
        if (command->kind == HANG)
            sleep(60);
        sums[n_taken++] = sum = sum * 31 + payload[0] + (uint64_t)rank;
        int is_stop = command->kind == STOP; /* it comes alone */
        if (n_taken < job->depth && !is_stop && (rank % 2 || dskv_stream_has_next(stream)))
            continue; /* odd ranks never answer before they have taken as many, even ones now and then */
        for (int i = 0; i < n_taken; i++) {
            memcpy(dskv_stream_answer(stream)->data, &sums[i], sizeof *sums);
            dskv_stream_done(stream);
        }
        n_taken = 0;
        if (is_stop) {
            exit_code = 0;
            break;
        }
    }
    dskv_stream_close(&stream);
    _exit(exit_code);
}

static struct job start(int n_ranks, int spin_us, int depth)
{
    struct job job = {.n_ranks = n_ranks, .depth = depth, .peers = share(sizeof *job.peers)};
    job.memory = share(dskv_stream_bytes(n_ranks, PAYLOAD_BYTES));
    *job.peers = (struct dskv_peers){.n_ranks = n_ranks, .spin_us = spin_us, .pids = {getpid()}};
    for (int rank = 1; rank < n_ranks; rank++) {
        pid_t pid = fork();
        if (pid == 0)
            work(&job, rank);
        job.peers->pids[rank] = pid;
    }
    job.stream = dskv_stream_open(job.memory, PAYLOAD_BYTES, job.peers);
    return job;
}

static int wait_for(pid_t pid)
{
    int status = 0;
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void end(struct job *job)
{
    struct dskv_command stop = {.kind = STOP};
    dskv_stream_post(job->stream, &stop);
    CU_ASSERT_PTR_NOT_NULL(dskv_stream_collect(job->stream, NULL));
    for (int rank = 1; rank < job->n_ranks; rank++)
        CU_ASSERT_EQUAL(wait_for(job->peers->pids[rank]), 0);
    dskv_stream_close(&job->stream);
    munmap(job->memory, dskv_stream_bytes(job->n_ranks, PAYLOAD_BYTES));
    munmap(job->peers, sizeof *job->peers);
}

static uint64_t answer_sum(const struct dskv_answer *answer)
{
    uint64_t sum;
    memcpy(&sum, answer->data, sizeof sum);
    return sum;
}

/* Commands in order, payloads whole, every rank's own answer to each. */
static void run_commands(int n_ranks, int spin_us, uint32_t n_commands)
{
    struct job job = start(n_ranks, spin_us, 1);
    uint32_t *payload = dskv_stream_payload(job.stream);
    uint64_t expected[MAX_RANKS] = {0};
    int wrong = 0;
    int64_t begin = now_us();
    for (uint32_t i = 0; i < n_commands; i++) {
        struct dskv_command command = {.kind = ADD, .offset = (i & 1) * 64};
        payload[(i & 1) * 16] = i;
        dskv_stream_post(job.stream, &command);
        const struct dskv_answer *answers = dskv_stream_collect(job.stream, NULL);
        for (int rank = 1; rank < n_ranks; rank++) {
            expected[rank] = expected[rank] * 31 + i + (uint64_t)rank;
            wrong += answer_sum(&answers[rank]) != expected[rank];
        }
    }
    printf("%d ranks, spin %d us: %.2f us a command ... ", n_ranks, spin_us, (double)(now_us() - begin) / n_commands);
    CU_ASSERT_EQUAL(wrong, 0);
    end(&job);
}

/* Two at a time: both are taken before one is answered, and the answers come in order. */
static void run_pairs(int n_ranks, int spin_us, uint32_t n_pairs)
{
    struct job job = start(n_ranks, spin_us, 2);
    uint32_t *payload = dskv_stream_payload(job.stream);
    uint64_t expected[MAX_RANKS] = {0};
    int wrong = 0;
    for (uint32_t i = 0; i < 2 * n_pairs; i++) {
        struct dskv_command command = {.kind = ADD, .offset = (i & 1) * 64};
        payload[(i & 1) * 16] = i;
        dskv_stream_post(job.stream, &command);
        for (uint32_t j = i - 1; i & 1 && j <= i; j++) {
            const struct dskv_answer *answers = dskv_stream_collect(job.stream, NULL);
            for (int rank = 1; rank < n_ranks; rank++) {
                expected[rank] = expected[rank] * 31 + j + (uint64_t)rank;
                wrong += answer_sum(&answers[rank]) != expected[rank];
            }
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    end(&job);
}

static void two_commands_are_under_way(void)
{
    run_pairs(2, 50, 20000);
    run_pairs(4, 0, 5000);
}

/* Ahead by one all the time: the next is posted before the last is collected, as steps are. */
static void commands_are_posted_ahead(void)
{
    struct job job = start(3, 0, 1);
    uint32_t *payload = dskv_stream_payload(job.stream);
    uint64_t expected[MAX_RANKS] = {0};
    int wrong = 0;
    for (uint32_t i = 0; i <= 20000; i++) {
        struct dskv_command command = {.kind = ADD, .offset = (i & 1) * 64};
        payload[(i & 1) * 16] = i;
        if (i < 20000)
            dskv_stream_post(job.stream, &command);
        if (i == 0)
            continue;
        const struct dskv_answer *answers = dskv_stream_collect(job.stream, NULL);
        for (int rank = 1; rank < 3; rank++) {
            expected[rank] = expected[rank] * 31 + i - 1 + (uint64_t)rank;
            wrong += answer_sum(&answers[rank]) != expected[rank];
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    end(&job);
}

static void two_ranks_keep_the_order(void)
{
    run_commands(2, 50, 100000);
}

static void more_ranks_than_cores_keep_the_order(void)
{
    run_commands(4, 0, 20000);
}

static int compare_times(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* The round trip to a rank that has gone to sleep. */
static void a_sleeping_rank_wakes_soon(void)
{
    enum { ROUNDS = 50 };
    struct job job = start(2, 50, 1);
    struct dskv_command command = {.kind = ADD};
    int64_t times[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        usleep(20000);
        int64_t posted = now_us();
        dskv_stream_post(job.stream, &command);
        dskv_stream_collect(job.stream, NULL);
        times[i] = now_us() - posted;
    }
    qsort(times, ROUNDS, sizeof *times, compare_times);
    end(&job);
    printf("round trip p50 %lld us, p90 %lld us ... ", (long long)times[ROUNDS / 2], (long long)times[ROUNDS * 9 / 10]);
    CU_ASSERT(times[ROUNDS / 2] < 1000);
}

static void an_idle_rank_sleeps(void)
{
    struct rusage before, after;
    getrusage(RUSAGE_CHILDREN, &before);
    struct job job = start(2, 50, 1);
    sleep(2); /* past one look at the peers */
    end(&job);
    getrusage(RUSAGE_CHILDREN, &after);
    double used =
        (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec + after.ru_stime.tv_sec - before.ru_stime.tv_sec) +
        1e-6 * (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec + after.ru_stime.tv_usec -
                        before.ru_stime.tv_usec);
    printf("%.2f %% of a core ... ", 100 * used / 2);
    CU_ASSERT(used / 2 < 0.02);
}

static void a_lost_rank_is_noticed(void)
{
    struct job job = start(3, 50, 1);
    struct dskv_command command = {.kind = HANG};
    struct dskv_error error;
    dskv_stream_post(job.stream, &command);
    kill(job.peers->pids[2], SIGKILL); /* stays a zombie: nobody has waited for it */
    int64_t begin = now_us();
    CU_ASSERT_PTR_NULL(dskv_stream_collect(job.stream, &error));
    CU_ASSERT(now_us() - begin < 3000000);
    CU_ASSERT(strncmp(error.message, "rank 2 is gone: ", 16) == 0);
    kill(job.peers->pids[1], SIGKILL);
    wait_for(job.peers->pids[1]);
    wait_for(job.peers->pids[2]);
    dskv_stream_close(&job.stream);
}

/* The test process plays a launcher: rank 0 is a child that dies without a word. */
static void a_rank_leaves_when_rank_0_is_gone(void)
{
    struct job job = {.n_ranks = 2, .depth = 1, .peers = share(sizeof *job.peers)};
    job.memory = share(dskv_stream_bytes(2, PAYLOAD_BYTES));
    pid_t rank0 = fork();
    if (rank0 == 0) {
        pause();
        _exit(0);
    }
    *job.peers = (struct dskv_peers){.n_ranks = 2, .spin_us = 50, .pids = {rank0}};
    pid_t rank1 = fork();
    if (rank1 == 0)
        work(&job, 1);
    kill(rank0, SIGKILL);
    int64_t begin = now_us();
    CU_ASSERT_EQUAL(wait_for(rank1), DSKV_EXIT_RANK_LOST);
    CU_ASSERT(now_us() - begin < 3000000);
    wait_for(rank0);
}

int main(void)
{
    return dskv_run_tests("parallel.stream",
                          (struct dskv_test[]){
                              {"two ranks keep the order", two_ranks_keep_the_order},
                              {"more ranks than cores keep the order", more_ranks_than_cores_keep_the_order},
                              {"two commands are under way", two_commands_are_under_way},
                              {"commands are posted ahead", commands_are_posted_ahead},
                              {"a sleeping rank wakes soon", a_sleeping_rank_wakes_soon},
                              {"an idle rank sleeps", an_idle_rank_sleeps},
                              {"a lost rank is noticed", a_lost_rank_is_noticed},
                              {"a rank leaves when rank 0 is gone", a_rank_leaves_when_rank_0_is_gone},
                              {NULL, NULL},
                          });
}
