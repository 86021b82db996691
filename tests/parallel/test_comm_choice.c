/* Which comm is brought up: played implementations that serve or fail on some ranks only.  All ranks end with the same
 * one, or with the same error. */
#include "base/log.h"
#include "parallel/comm.h"
#include "parallel/engine.h"
#include "parallel/job.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SELF, SHM, PEER, NCCL, STAGED, N_TABLES };

/* By rank, one bit each. */
static struct play {
    uint32_t serves[N_TABLES], fails[N_TABLES];
    int n_opened[N_TABLES], n_closed[N_TABLES];
} play;

static int is_set(uint32_t ranks)
{
    return (int)(ranks >> dskv_job_rank() & 1);
}

static void none(void *state)
{
    play.n_closed[*(int *)state]++;
}

#define PLAYED(which, variable, name_)                                                                                 \
    static int serves_##variable(const struct dskv_comm_options *options)                                              \
    {                                                                                                                  \
        (void)options;                                                                                                 \
        return is_set(play.serves[which]);                                                                             \
    }                                                                                                                  \
    static enum dskv_exit open_##variable(const struct dskv_comm_options *options, void **state,                       \
                                          struct dskv_error *error)                                                    \
    {                                                                                                                  \
        static int which_one = which;                                                                                  \
        (void)options;                                                                                                 \
        if (is_set(play.fails[which]))                                                                                 \
            return dskv_fail_exit(error, DSKV_EXIT_DEVICE, name_ " played dead on rank %d", dskv_job_rank());          \
        play.n_opened[which]++;                                                                                        \
        *state = &which_one;                                                                                           \
        return DSKV_EXIT_OK;                                                                                           \
    }                                                                                                                  \
    const struct dskv_comm_table variable = {                                                                          \
        .name = name_, .serves = serves_##variable, .open = open_##variable, .close = none};

PLAYED(SELF, dskv_comm_self, "self")
PLAYED(SHM, dskv_comm_shm, "shm")
PLAYED(PEER, dskv_comm_peer, "peer")
PLAYED(NCCL, dskv_comm_nccl, "nccl")
PLAYED(STAGED, dskv_comm_staged, "staged")

static struct dskv_device *device;
static char logged[4096];

/* What dskv_comm_open picks; its log is in `logged`. */
static const char *open_one(const char *asked_for, struct dskv_error *error)
{
    struct dskv_comm_options options = {.device = device, .peers = dskv_job_peers(), .name = asked_for};
    struct dskv_comm *comm = NULL;
    int log = memfd_create("log", 0), kept = dup(STDERR_FILENO);
    dup2(log, STDERR_FILENO);
    enum dskv_exit code = dskv_comm_open(&options, &comm, error);
    dup2(kept, STDERR_FILENO);
    ssize_t n = pread(log, logged, sizeof logged - 1, 0);
    logged[n < 0 ? 0 : n] = 0;
    close(log);
    close(kept);
    CU_ASSERT_EQUAL(code, comm ? DSKV_EXIT_OK : DSKV_EXIT_DEVICE);
    const char *name = comm ? dskv_comm_name(comm) : "none";
    dskv_comm_close(&comm);
    for (int i = 0; i < N_TABLES; i++)
        CU_ASSERT_EQUAL(play.n_opened[i], play.n_closed[i]);
    return name;
}

static uint32_t last_rank(void)
{
    return 1u << (dskv_job_n_ranks() - 1);
}

static struct play all_serve(void)
{
    return (struct play){.serves = {[SHM] = UINT32_MAX, [STAGED] = UINT32_MAX}};
}

static void the_first_that_serves_is_taken(void)
{
    play = all_serve();
    CU_ASSERT_STRING_EQUAL(open_one(NULL, NULL), "shm");
    CU_ASSERT_STRING_EQUAL(logged, "");
    CU_ASSERT_STRING_EQUAL(open_one("staged", NULL), "staged");
}

/* One that a single rank cannot bring up is given up by all, and rank 0 says why. */
static void the_next_is_taken_when_one_fails(void)
{
    char why[64];
    struct dskv_error error = {0};
    play = all_serve();
    play.fails[SHM] = last_rank();
    CU_ASSERT_STRING_EQUAL(open_one(NULL, &error), "staged");
    CU_ASSERT_EQUAL(play.n_opened[SHM], !is_set(last_rank()));
    snprintf(why, sizeof why, "\"shm\": shm played dead on rank %d\n", dskv_job_n_ranks() - 1);
    CU_ASSERT_EQUAL(strstr(logged, why) != NULL, dskv_job_rank() == 0);
}

static void what_serves_some_ranks_serves_none(void)
{
    play = all_serve();
    play.serves[SHM] = ~last_rank();
    CU_ASSERT_STRING_EQUAL(open_one(NULL, NULL), "staged");
    CU_ASSERT_EQUAL(play.n_opened[SHM], 0);
}

/* The one that was asked for and no other; all ranks have the reason. */
static void what_was_asked_for_is_not_replaced(void)
{
    char why[64];
    struct dskv_error error = {0};
    play = all_serve();
    play.fails[SHM] = last_rank();
    CU_ASSERT_STRING_EQUAL(open_one("shm", &error), "none");
    snprintf(why, sizeof why, "\"shm\": shm played dead on rank %d", dskv_job_n_ranks() - 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, why));
    CU_ASSERT_EQUAL(play.n_opened[STAGED], 0);
    play.serves[SHM] = 0;
    CU_ASSERT_STRING_EQUAL(open_one("shm", &error), "none");
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "\"shm\": it does not serve these ranks"));
    CU_ASSERT_STRING_EQUAL(open_one("carrier-pigeon", &error), "none");
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "carrier-pigeon"));
}

static void when_all_fail_the_last_reason_is_told(void)
{
    struct dskv_error error = {0};
    play = all_serve();
    play.fails[SHM] = 1;
    play.fails[STAGED] = last_rank();
    CU_ASSERT_STRING_EQUAL(open_one(NULL, &error), "none");
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "\"staged\": staged played dead"));
}

int main(void)
{
    int rank, n_ranks, failures = 1;
    struct dskv_error error = {0};
    struct dskv_device_options options = {.kind = "cpu", .n_threads = 1};
    if (dskv_parallel_start(&rank, &n_ranks, &error) || dskv_device_open(&options, &device, &error)) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    dskv_log_open(DSKV_LOG_INFO, rank);
    if (rank == 0 || freopen("/dev/null", "w", stdout)) /* every rank checks, one prints; exit codes tell of all */
        failures = dskv_run_tests("parallel.comm_choice",
                                  (struct dskv_test[]){
                                      {"the first that serves is taken", the_first_that_serves_is_taken},
                                      {"the next is taken when one fails", the_next_is_taken_when_one_fails},
                                      {"what serves some ranks serves none", what_serves_some_ranks_serves_none},
                                      {"what was asked for is not replaced", what_was_asked_for_is_not_replaced},
                                      {"when all fail the last reason is told", when_all_fail_the_last_reason_is_told},
                                      {NULL, NULL},
                                  });
    dskv_device_close(&device);
    dskv_parallel_stop();
    return failures;
}
