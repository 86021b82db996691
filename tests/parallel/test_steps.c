/* Steps under way, between processes, on a device that takes its time: a forward pass that only lets a clock run stands
 * in for the real one, so that commands come while steps run.  The device is kept busy, errors come with the step that
 * made them, and nobody waits for a rank that is gone, whatever its device does. */
#include "base/memory.h"
#include "parallel/engine_parts.h"
#include "parallel/plan_layout.h"
#include "support/cunit_suite.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 3
#define FOR_EVER INT64_MAX

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* ---- the forward pass ---------------------------------------------------------------------------------------------
 */

/* What a rank's device does, and what was seen of it; shared. */
struct script {
    int64_t step_us;                      /* FOR_EVER: a step never ends */
    uint64_t fails_submit, fails_collect; /* the step's number; 0: none */
    int32_t n_submitted, n_gaps;          /* n_gaps: submits that found the device idle, but for the first */
};

struct dskv_passes {
    struct script *script;
    const struct dskv_plan *plans[2];
    int64_t ends_us[2], last_us;
    uint32_t n_submitted, n_collected;
    struct dskv_row_result results[1];
};

enum dskv_exit dskv_passes_submit(struct dskv_passes *f, const struct dskv_plan *plan, struct dskv_error *error)
{
    int64_t now = now_us();
    if (plan->step == f->script->fails_submit)
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "step %llu cannot be queued", (unsigned long long)plan->step);
    f->script->n_gaps += f->script->n_submitted > 0 && now > f->last_us;
    f->script->n_submitted++;
    f->last_us = f->script->step_us == FOR_EVER ? FOR_EVER : (now > f->last_us ? now : f->last_us) + f->script->step_us;
    f->plans[f->n_submitted % 2] = plan;
    f->ends_us[f->n_submitted++ % 2] = f->last_us;
    return DSKV_EXIT_OK;
}

int dskv_passes_reached(struct dskv_passes *f)
{
    return now_us() >= f->ends_us[f->n_collected % 2];
}

enum dskv_exit dskv_passes_collect(struct dskv_passes *f, const struct dskv_row_result **results,
                                   struct dskv_error *error)
{
    while (!dskv_passes_reached(f))
        usleep(50);
    uint64_t step = f->plans[f->n_collected++ % 2]->step;
    if (step == f->script->fails_collect)
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "step %llu went wrong", (unsigned long long)step);
    f->results[0] = (struct dskv_row_result){.argmax = (int32_t)step, .sampled = -1, .finite = 1};
    *results = f->results;
    return DSKV_EXIT_OK;
}

struct dskv_turn_times dskv_passes_times(const struct dskv_passes *f)
{
    return (struct dskv_turn_times){.ended_ns = (uint64_t)f->ends_us[(f->n_collected + 1) % 2] * 1000};
}

/* ---- ranks --------------------------------------------------------------------------------------------------------
 */

struct job {
    int n_ranks;
    struct dskv_peers *peers; /* shared, as all below is */
    struct script *scripts;   /* [n_ranks] */
    void *memory;
    struct dskv_engine *engine; /* this rank's */
};

static const struct dskv_plan_bounds bounds = {
    .vocab = 300, .max_context = 64, .n_blocks = 4, .block_tokens = 16, .max_tokens = 8, .max_sequences = 2};

static size_t plan_bytes(void)
{
    struct dskv_plan_sizes largest = dskv_plan_largest(&bounds);
    return dskv_plan_bytes(&largest);
}

static void *share(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    DSKV_ASSERT(memory != MAP_FAILED, "%zu bytes", bytes);
    return memory;
}

/* As much of an engine as steps need. */
static void open_engine(struct job *job, int rank)
{
    struct dskv_engine *engine = dskv_calloc(1, sizeof *engine);
    struct dskv_device_options options = {.kind = "cpu", .n_threads = 1}; /* for the stop alone */
    struct dskv_error error;
    enum dskv_exit code = dskv_device_open(&options, &engine->device, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    engine->info.n_ranks = job->n_ranks;
    engine->info.bounds = bounds;
    engine->segment.peers = *job->peers;
    engine->segment.peers.rank = rank;
    engine->plan_bytes = plan_bytes();
    engine->stream = dskv_stream_open(job->memory, 2 * plan_bytes(), &engine->segment.peers);
    engine->has_drawn = dskv_calloc((size_t)bounds.max_tokens, 1);
    engine->takes_references = engine->check_plans = 1;
    engine->passes = dskv_calloc(1, sizeof *engine->passes);
    engine->passes->script = &job->scripts[rank];
    job->engine = engine;
}

static void close_engine(struct job *job)
{
    dskv_device_close(&job->engine->device);
    dskv_stream_close(&job->engine->stream);
    free(job->engine->has_drawn);
    free(job->engine->passes);
    free(job->engine);
}

static struct job start(int n_ranks, int spin_us, const struct script *scripts)
{
    struct job job = {.n_ranks = n_ranks,
                      .peers = share(sizeof *job.peers),
                      .scripts = share(MAX_RANKS * sizeof *scripts),
                      .memory = share(dskv_stream_bytes(n_ranks, 2 * plan_bytes()))};
    memcpy(job.scripts, scripts, (size_t)n_ranks * sizeof *scripts);
    *job.peers = (struct dskv_peers){.n_ranks = n_ranks, .spin_us = spin_us, .pids = {getpid()}};
    for (int rank = 1; rank < n_ranks; rank++) {
        pid_t pid = fork();
        if (pid == 0) {
            while (!((const volatile struct dskv_peers *)job.peers)->pids[n_ranks - 1]) /* all are known then */
                usleep(100);
            open_engine(&job, rank);
            _exit((int)dskv_engine_work(job.engine));
        }
        job.peers->pids[rank] = pid;
    }
    open_engine(&job, 0);
    return job;
}

static int wait_for(pid_t pid)
{
    int status = 0;
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* How every other rank left. */
static void finish(struct job *job, const int *codes)
{
    for (int rank = 1; rank < job->n_ranks; rank++)
        CU_ASSERT_EQUAL(wait_for(job->peers->pids[rank]), codes[rank]);
    close_engine(job);
}

/* A plan of one token and its row; it names the row of the step before, if there is one. */
static struct dskv_plan *next_plan(struct dskv_engine *engine)
{
    struct dskv_plan_sizes need = {.n_tokens = 1, .n_work = 1, .n_table = 1, .n_rows = 1};
    struct dskv_plan *plan = dskv_engine_plan(engine, &need);
    int32_t id = engine->n_submitted ? dskv_plan_reference(0) : 5, block = 1;
    struct dskv_plan_row row = {.want = DSKV_ROW_ARGMAX, .target = -1};
    dskv_plan_add_work(plan, &id, NULL, 1, 0, &block, 1);
    dskv_plan_add_row(plan, &row, NULL);
    return plan;
}

/* Submits one ahead and collects, until that many are collected or one fails; *collected says how many went well. */
static enum dskv_exit run_steps(struct job *job, int n, int *collected, struct dskv_error *error)
{
    enum dskv_exit code = DSKV_EXIT_OK;
    const struct dskv_row_result *results;
    int32_t n_computed;
    *collected = 0;
    for (int i = 0; i <= n; i++) {
        if (i < n && (code = dskv_engine_submit(job->engine, next_plan(job->engine), error)))
            return code;
        if (i == 0)
            continue;
        if ((code = dskv_engine_collect(job->engine, &results, &n_computed, error)))
            return code;
        CU_ASSERT_EQUAL(results[0].argmax, i); /* the rows of this step, in order */
        CU_ASSERT_EQUAL(n_computed, 1);
        ++*collected;
    }
    return code;
}

/* ---- tests --------------------------------------------------------------------------------------------------------
 */

/* Every rank's device finds the next step when one ends; the answers' hashes are compared, too. */
static void devices_are_kept_busy(void)
{
    enum { STEPS = 100, STEP_US = 5000 };
    static const struct {
        int n_ranks, spin_us;
    } cases[] = {{2, 50}, {3, 0}};
    for (int i = 0; i < 2; i++) {
        struct script scripts[MAX_RANKS] = {{.step_us = STEP_US}, {.step_us = STEP_US}, {.step_us = STEP_US}};
        struct job job = start(cases[i].n_ranks, cases[i].spin_us, scripts);
        struct dskv_error error;
        int n;
        int64_t begin = now_us();
        CU_ASSERT_EQUAL(run_steps(&job, STEPS, &n, &error), DSKV_EXIT_OK);
        int64_t took = now_us() - begin;
        printf("%d ranks, spin %d us: %.0f us a step of %d, gaps:", job.n_ranks, cases[i].spin_us, (double)took / STEPS,
               STEP_US);
        for (int rank = 0; rank < job.n_ranks; rank++) {
            CU_ASSERT_EQUAL(job.scripts[rank].n_submitted, STEPS);
            CU_ASSERT(job.scripts[rank].n_gaps <
                      STEPS * 3 / 4); /* few; all, were they one by one; others use this machine */
            printf(" %d", job.scripts[rank].n_gaps);
        }
        printf(" ... ");
        dskv_engine_stop(job.engine);
        finish(&job, (const int[]){0, 0, 0});
    }
}

/* What another rank's device says comes as the answer of that step, after those before it went well. */
static void an_error_comes_with_its_step(void)
{
    static const struct {
        struct script script;
        const char *message;
    } cases[] = {{{.step_us = 1000, .fails_collect = 4}, "rank 1: step 4 went wrong"},
                 {{.step_us = 1000, .fails_submit = 4}, "rank 1: step 4 cannot be queued"},
                 {{.step_us = 1000, .fails_submit = 4, .fails_collect = 3}, "rank 1: step 3 went wrong"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct script scripts[MAX_RANKS] = {{.step_us = 1000}, cases[i].script};
        struct job job = start(2, 50, scripts);
        struct dskv_error error = {0};
        int n;
        CU_ASSERT_EQUAL(run_steps(&job, 20, &n, &error), DSKV_EXIT_DEVICE);
        CU_ASSERT_STRING_EQUAL(error.message, cases[i].message);
        CU_ASSERT_EQUAL(n, i == 2 ? 2 : 3);
        finish(&job, (const int[]){0, DSKV_EXIT_DEVICE});
    }
}

/* Another rank's device fails, for which rank 0's own waits: the reason is told, not that the rank left. */
static void an_error_ends_the_wait_for_a_device(void)
{
    struct script scripts[MAX_RANKS] = {
        {.step_us = FOR_EVER}, {.step_us = FOR_EVER}, {.step_us = 1000, .fails_collect = 1}};
    struct job job = start(3, 0, scripts);
    struct dskv_error error = {0};
    int n;
    int64_t begin = now_us();
    CU_ASSERT_EQUAL(run_steps(&job, 2, &n, &error), DSKV_EXIT_DEVICE);
    CU_ASSERT_STRING_EQUAL(error.message, "rank 2: step 1 went wrong");
    CU_ASSERT(now_us() - begin < 900000); /* sooner than anybody looks for the dead */
    kill(job.peers->pids[1], SIGKILL);
    finish(&job, (const int[]){0, -1, DSKV_EXIT_DEVICE});
}

/* Rank 0's own device fails: no rank is waited for. */
static void an_error_of_rank_0_is_told_at_once(void)
{
    for (int at_submit = 0; at_submit < 2; at_submit++) {
        struct script scripts[MAX_RANKS] = {{.step_us = 1000}, {.step_us = FOR_EVER}};
        if (at_submit)
            scripts[0].fails_submit = 2;
        else
            scripts[0].fails_collect = 1;
        struct job job = start(2, 50, scripts);
        struct dskv_error error = {0};
        int n;
        CU_ASSERT_EQUAL(run_steps(&job, 20, &n, &error), DSKV_EXIT_DEVICE);
        CU_ASSERT_STRING_EQUAL(error.message,
                               at_submit ? "rank 0: step 2 cannot be queued" : "rank 0: step 1 went wrong");
        kill(job.peers->pids[1], SIGKILL);
        finish(&job, (const int[]){0, -1});
    }
}

/* Its device waits for a rank that is gone and never ends; so do the others'. */
static void a_lost_rank_is_noticed_while_devices_wait(void)
{
    static const int spins[] = {50, 0};
    for (int i = 0; i < 2; i++) {
        struct script scripts[MAX_RANKS] = {{.step_us = FOR_EVER}, {.step_us = FOR_EVER}, {.step_us = FOR_EVER}};
        struct job job = start(3, spins[i], scripts);
        struct dskv_error error = {0};
        int n;
        kill(job.peers->pids[2], SIGKILL);
        int64_t begin = now_us();
        CU_ASSERT_EQUAL(run_steps(&job, 2, &n, &error), DSKV_EXIT_RANK_LOST);
        CU_ASSERT(strncmp(error.message, "rank 2 is gone: ", 16) == 0); /* and no other that left because of it */
        CU_ASSERT(now_us() - begin < 3000000);
        kill(job.peers->pids[1], SIGKILL);
        finish(&job, (const int[]){0, -1, -1});
    }
}

static void a_rank_leaves_when_rank_0_is_gone(void)
{
    struct script *scripts = share(MAX_RANKS * sizeof *scripts);
    pid_t *pids = share(sizeof *pids);
    scripts[0] = scripts[1] = (struct script){.step_us = FOR_EVER};
    pid_t rank0 = fork();
    if (rank0 == 0) {
        struct job job = start(2, 50, scripts);
        struct dskv_error error;
        int n;
        *pids = job.peers->pids[1];
        run_steps(&job, 2, &n, &error);
        _exit(0);
    }
    usleep(200000);
    kill(rank0, SIGKILL);
    wait_for(rank0);
    int64_t begin = now_us();
    while (*pids > 0 && kill(*pids, 0) == 0 && now_us() - begin < 5000000) /* an orphan is reaped by init */
        usleep(1000);
    CU_ASSERT(*pids > 0);
    CU_ASSERT(now_us() - begin < 3000000);
}

int main(void)
{
    return dskv_run_tests("parallel.steps",
                          (struct dskv_test[]){
                              {"devices are kept busy", devices_are_kept_busy},
                              {"an error comes with its step", an_error_comes_with_its_step},
                              {"an error ends the wait for a device", an_error_ends_the_wait_for_a_device},
                              {"an error of rank 0 is told at once", an_error_of_rank_0_is_told_at_once},
                              {"a lost rank is noticed while devices wait", a_lost_rank_is_noticed_while_devices_wait},
                              {"a rank leaves when rank 0 is gone", a_rank_leaves_when_rank_0_is_gone},
                              {NULL, NULL},
                          });
}
