/* Start: is there an MPI job, and what does it need to come up?
 *
 * Owns every call to MPI.  The ranks use it to find each other, to agree on the outcome of each part of the start, and
 * to end together; no activation and no plan passes here.  So Open MPI is asked for its plainest transport (loopback
 * TCP): it comes up fastest, needs no ptrace permission in containers, and leaves nothing in /dev/shm however the job
 * ends.
 */
#include "parallel/job.h"

#include "base/limits.h"
#include "base/status.h"
#include "parallel/engine.h"
#include "parallel/flag.h"

#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    int rank, n_ranks, n_cores;
    int has_mpi;             /* MPI_Init was called and MPI_Finalize was not */
    struct dskv_peers peers; /* n_ranks is 0 until all are known */
} job = {.n_ranks = 1, .n_cores = 1};

/* From rank 0, which ends the job of its own will and has said why: its end is no loss then.  All threads block it, so
 * that once sent it stays pending, and nothing runs where it arrives. */
#define LEAVE_SIGNAL SIGUSR2

static void block_leave_signal(void)
{
    sigset_t leave;
    sigemptyset(&leave);
    sigaddset(&leave, LEAVE_SIGNAL);
    pthread_sigmask(SIG_BLOCK, &leave, NULL);
}

static int rank0_has_left(void)
{
    sigset_t pending;
    return sigpending(&pending) == 0 && sigismember(&pending, LEAVE_SIGNAL) == 1;
}

static long environment_number(const char *name, long otherwise)
{
    const char *value = getenv(name);
    return value && *value ? strtol(value, NULL, 10) : otherwise;
}

/* Which rank the launcher says this is, and of how many; 0 of 0 when this process was not launched as a rank. */
static void read_launcher(long *rank, long *n_ranks)
{
    static const struct {
        const char *rank, *size;
    } launchers[] = {
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
        {"PMI_RANK", "PMI_SIZE"},
        {"PMIX_RANK", "SLURM_STEP_NUM_TASKS"}, /* srun with PMIx */
    };
    *rank = *n_ranks = 0;
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++)
        if (getenv(launchers[i].rank)) {
            *rank = environment_number(launchers[i].rank, 0);
            *n_ranks = environment_number(launchers[i].size, 1);
            return;
        }
}

int dskv_parallel_launched_rank(void)
{
    long rank, n_ranks;
    read_launcher(&rank, &n_ranks);
    return (int)rank;
}

static long launched_hosts(void)
{
    if (environment_number("OMPI_COMM_WORLD_LOCAL_SIZE", 0) < environment_number("OMPI_COMM_WORLD_SIZE", 0))
        return 2; /* at least */
    return getenv("OMPI_COMM_WORLD_SIZE") ? 1 : environment_number("SLURM_STEP_NUM_NODES", 1);
}

/* Never overrides what a user chose with --mca or in the environment. */
static void set_mpi_defaults(void)
{
    setenv("OMPI_MCA_pml", "ob1", 0);
    setenv("OMPI_MCA_btl", "self,tcp", 0);
    setenv("OMPI_MCA_btl_tcp_if_include", "127.0.0.1/8", 0);
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0); /* for those who choose vader without ptrace */
}

/* mpirun binds two ranks to one core each unless told otherwise; a rank's threads would then all share it.  Unless a
 * policy was asked for, take the cores that mpirun itself may use. */
static void widen_binding(void)
{
    cpu_set_t launcher;
    if (!getenv("OMPI_COMM_WORLD_SIZE") || getenv("OMPI_MCA_hwloc_base_binding_policy"))
        return;
    if (sched_getaffinity(getppid(), sizeof launcher, &launcher) == 0)
        sched_setaffinity(0, sizeof launcher, &launcher);
}

/* The processor quota of this container, rounded up; otherwise when there is none. */
static int quota_cores(int otherwise)
{
    long quota, period;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (!file)
        return otherwise;
    int n = fscanf(file, "%ld %ld", &quota, &period); /* "max 100000" reads no number */
    fclose(file);
    if (n != 2 || quota < 1 || period < 1)
        return otherwise;
    long cores = (quota + period - 1) / period;
    return cores < otherwise ? (int)cores : otherwise;
}

static int count_cores(void)
{
    cpu_set_t own;
    int n = sched_getaffinity(0, sizeof own, &own) == 0 ? CPU_COUNT(&own) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    return quota_cores(n < 1 ? 1 : n);
}

static enum dskv_exit start_mpi(long n_launched, struct dskv_error *error)
{
    int provided = 0, n_connected = 0;
    set_mpi_defaults();
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS)
        return dskv_fail_exit(error, DSKV_EXIT_RANK_LOST, "MPI could not be started");
    job.has_mpi = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &n_connected);
    if (n_connected != n_launched)
        return dskv_fail_exit(
            error, DSKV_EXIT_USAGE,
            "the launcher started %ld ranks but MPI connects %d: use the mpirun of the MPI that dskvd was "
            "built with",
            n_launched, n_connected);
    return DSKV_EXIT_OK;
}

/* From here on every rank knows whom it may lose. */
static void meet_peers(void)
{
    int32_t pids[DSKV_MAX_RANKS];
    dskv_job_all_gather((int32_t)getpid(), pids);
    for (int r = 0; r < job.n_ranks; r++)
        job.peers.pids[r] = pids[r];
    job.peers.rank = job.rank;
    job.peers.n_ranks = job.n_ranks;
}

enum dskv_exit dskv_parallel_start(int *rank, int *n_ranks, struct dskv_error *error)
{
    enum dskv_exit code = DSKV_EXIT_OK;
    long launched_rank, n_launched;
    read_launcher(&launched_rank, &n_launched);
    block_leave_signal(); /* before MPI has threads */
    if (n_launched > DSKV_MAX_RANKS)
        code = dskv_fail_exit(error, DSKV_EXIT_USAGE, "%ld ranks are more than the %d that dskvd supports", n_launched,
                              DSKV_MAX_RANKS);
    else if (n_launched > 1 && launched_hosts() > 1)
        code = dskv_fail_exit(error, DSKV_EXIT_USAGE, "the ranks are on several hosts; all ranks must run on one host");
    else if (n_launched > 0)
        code = start_mpi(n_launched, error);
    job.rank = (int)launched_rank;
    job.n_ranks = code == DSKV_EXIT_OK && n_launched > 0 ? (int)n_launched : 1;
    if (!code)
        meet_peers();
    widen_binding();
    job.n_cores = count_cores();
    *rank = job.rank;
    *n_ranks = job.n_ranks;
    return code;
}

void dskv_parallel_stop(void)
{
    if (!job.has_mpi)
        return;
    job.peers.n_ranks = 0; /* from here on ranks end in any order, and none is missed */
    MPI_Finalize();
    job.has_mpi = 0;
}

int dskv_parallel_lost(char text[DSKV_LOST_TEXT])
{
    int lost = dskv_peers_first_lost(&job.peers);
    text[0] = 0;
    if (lost >= 0 && job.rank <= 1 && !rank0_has_left())
        dskv_peers_describe_lost(&job.peers, lost, text);
    return lost >= 0;
}

void dskv_parallel_abort(enum dskv_exit code)
{
    for (int r = 1; job.rank == 0 && r < job.peers.n_ranks; r++)
        kill(job.peers.pids[r], LEAVE_SIGNAL);
    /* A rank that leaves without MPI_Finalize makes the launcher end the others and return its code; MPI_Abort may only
     * be called from one thread, and can wait for peers that are gone. */
    _exit(code);
}

enum dskv_exit dskv_parallel_agree(enum dskv_exit code, struct dskv_error *error)
{
    struct verdict {
        int32_t code;
        struct dskv_error error;
    } own = {.code = code}, all[DSKV_MAX_RANKS];
    if (job.n_ranks == 1)
        return code;
    if (error && code)
        own.error = *error;
    MPI_Allgather(&own, sizeof own, MPI_BYTE, all, sizeof own, MPI_BYTE, MPI_COMM_WORLD);
    int worst = 0;
    for (int r = 1; r < job.n_ranks; r++)
        if (all[r].code > all[worst].code)
            worst = r;
    if (error && all[worst].code)
        *error = all[worst].error;
    return (enum dskv_exit)all[worst].code;
}

int dskv_job_rank(void)
{
    return job.rank;
}

int dskv_job_n_ranks(void)
{
    return job.n_ranks;
}

const struct dskv_peers *dskv_job_peers(void)
{
    return &job.peers;
}

int dskv_job_n_cores(void)
{
    return job.n_cores;
}

void dskv_job_broadcast(void *bytes, size_t n_bytes)
{
    if (job.has_mpi)
        MPI_Bcast(bytes, (int)n_bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
}

int64_t dskv_job_min(int64_t value)
{
    int64_t all[DSKV_MAX_RANKS], least = value;
    if (job.has_mpi)
        MPI_Allgather(&value, 1, MPI_INT64_T, all, 1, MPI_INT64_T, MPI_COMM_WORLD);
    for (int r = 0; job.has_mpi && r < job.n_ranks; r++)
        least = all[r] < least ? all[r] : least;
    return least;
}

void dskv_job_all_gather(int32_t value, int32_t *all)
{
    all[0] = value;
    if (job.has_mpi)
        MPI_Allgather(&value, 1, MPI_INT32_T, all, 1, MPI_INT32_T, MPI_COMM_WORLD);
}

void dskv_job_barrier(void)
{
    if (job.has_mpi)
        MPI_Barrier(MPI_COMM_WORLD);
}
