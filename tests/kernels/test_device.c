/* Devices and threads: opening, memory, and that every item of a job is computed once, under a pool that sleeps and
 * wakes. */
#include "kernels/cpu/threads.h"
#include "kernels/kernel_test.h"

#include "base/memory.h"

#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void kinds_and_names(void)
{
    struct dskv_error error;
    struct dskv_device *device = NULL;
    CU_ASSERT_EQUAL(dskv_device_open(&(struct dskv_device_options){.kind = "cpu", .n_threads = 2}, &device, &error),
                    DSKV_EXIT_OK);
    CU_ASSERT_STRING_EQUAL(dskv_device_kind(device), "cpu");
    CU_ASSERT_STRING_EQUAL(dskv_device_numerics(device), "cpu-16x1");
    CU_ASSERT_PTR_NOT_NULL(strstr(dskv_device_name(device), "2 threads"));
    CU_ASSERT_EQUAL(dskv_device_activation_dtype(device, DSKV_BF16), DSKV_F32);
    CU_ASSERT_EQUAL(dskv_device_is_host(device), 1);
    CU_ASSERT_EQUAL(dskv_device_sync(device, &error), DSKV_OK);
    CU_ASSERT(dskv_device_available(device) != 0);
    dskv_device_close(&device);
    CU_ASSERT_PTR_NULL(device);
    dskv_device_close(&device);
    /* "auto" is a GPU where there is one, else the CPU. */
    enum dskv_exit code =
        dskv_device_open(&(struct dskv_device_options){.kind = "cuda", .n_threads = 1}, &device, &error);
    const char *best = code == DSKV_EXIT_OK ? "cuda" : "cpu";
    CU_ASSERT(code == DSKV_EXIT_OK || (code == DSKV_EXIT_DEVICE && strstr(error.message, "no CUDA device")));
    dskv_device_close(&device);
    CU_ASSERT_EQUAL(dskv_device_open(&(struct dskv_device_options){.kind = "auto", .n_threads = 1}, &device, &error),
                    DSKV_EXIT_OK);
    CU_ASSERT_STRING_EQUAL(dskv_device_kind(device), best);
    dskv_device_close(&device);
    CU_ASSERT_EQUAL(dskv_device_open(&(struct dskv_device_options){.kind = "tpu", .n_threads = 1}, &device, &error),
                    DSKV_EXIT_DEVICE);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "tpu"));
    CU_ASSERT_EQUAL(dskv_device_open(&(struct dskv_device_options){.kind = "cpu", .n_threads = 1, .cpu_path = "vax"},
                                     &device, &error),
                    DSKV_EXIT_DEVICE);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "vax"));
    CU_ASSERT_PTR_NULL(device);
}

static void memory_is_zero_aligned_and_lazy(void)
{
    static const size_t sizes[] = {0, 1, 4096, 100000, (2 << 20) - 1, 2 << 20, (5 << 20) + 13};
    struct dskv_device *device = test_device_open();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *memory = dskv_device_alloc(device, sizes[i]), back[3] = "xy";
        CU_ASSERT_PTR_NOT_NULL_FATAL(memory);
        CU_ASSERT_EQUAL((uintptr_t)memory % 64, 0);
        size_t wrong = 0;
        for (size_t j = 0; j < sizes[i]; j++)
            wrong += memory[j] != 0;
        CU_ASSERT_EQUAL(wrong, 0);
        if (sizes[i] >= 3) {
            dskv_device_upload(device, memory + sizes[i] - 3, "ab", 3);
            dskv_device_download(device, back, memory + sizes[i] - 3, 3);
            CU_ASSERT_STRING_EQUAL(back, "ab");
        }
        dskv_device_free(device, memory, sizes[i]);
    }
    size_t before = dskv_resident_bytes();
    void *large = dskv_device_alloc(device, (size_t)1 << 32);
    CU_ASSERT_PTR_NOT_NULL(large);
    CU_ASSERT(dskv_resident_bytes() < before + (8 << 20));
    dskv_device_free(device, large, (size_t)1 << 32);
    CU_ASSERT_PTR_NULL(dskv_device_alloc(device, SIZE_MAX / 2));
    CU_ASSERT_PTR_NULL(dskv_weight_open(device, (int64_t)1 << 40, 1 << 16, DSKV_F32));
    dskv_device_free(device, NULL, 5);
    dskv_device_close(&device);
}

/* ---- threads ---------------------------------------------------------------------------------------------------- */

enum { MAX_ITEMS = 5000 };

struct counts {
    atomic_int of_item[MAX_ITEMS];
};

static void count_items(void *context, int64_t first, int64_t last)
{
    struct counts *counts = context;
    for (int64_t i = first; i < last; i++)
        counts->of_item[i]++;
}

static void every_item_once(void)
{
    static struct counts counts;
    uint64_t seed = 1;
    for (int n_threads = 1; n_threads <= 4; n_threads++) {
        struct dskv_threads *threads = dskv_threads_open(n_threads);
        CU_ASSERT_PTR_NOT_NULL_FATAL(threads);
        for (int round = 0; round < 400; round++) {
            int n = round < 10 ? round : test_random_below(&seed, round % 10 ? 100 : MAX_ITEMS);
            memset(&counts, 0, sizeof counts);
            dskv_threads_for(threads, n, round % 3 ? 1000 : 0, count_items, &counts);
            int wrong = 0;
            for (int i = 0; i < MAX_ITEMS; i++)
                wrong += counts.of_item[i] != (i < n);
            CU_ASSERT_EQUAL(wrong, 0);
            if (round % 100 == 0) /* the workers fall asleep, and are woken by the next job */
                nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        }
        dskv_threads_close(&threads);
        CU_ASSERT_PTR_NULL(threads);
    }
}

static double process_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void idle_threads_cost_nothing(void)
{
    static struct counts counts;
    struct dskv_threads *threads = dskv_threads_open(4);
    CU_ASSERT_PTR_NOT_NULL_FATAL(threads);
    dskv_threads_for(threads, 100, 10000, count_items, &counts);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    double before = process_seconds();
    nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
    CU_ASSERT(process_seconds() - before < 0.003);
    dskv_threads_close(&threads);
}

/* ---- checks ----------------------------------------------------------------------------------------------------- */

/* A wrong shape ends the process with the bug code and names the operation. */
static void wrong_shapes_are_bugs(void)
{
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(1);
        struct dskv_device_options options = {.kind = "cpu", .n_threads = 1};
        struct dskv_device *device;
        float x[4] = {0}, y[4];
        dskv_device_open(&options, &device, NULL);
        struct dskv_weight *weight = dskv_weight_open(device, 2, 2, DSKV_F32);
        dskv_op_matmul(device, &(struct dskv_matmul){.x = dskv_tensor(x, DSKV_F32, 1, 3),
                                                     .w = weight,
                                                     .y = dskv_tensor(y, DSKV_F32, 1, 2)});
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CU_ASSERT(WIFEXITED(status) && WEXITSTATUS(status) == DSKV_EXIT_BUG);
}

/* Trace lines of two runs are equal where the results are, and differ from the first one that differs. */
static void traces_show_the_first_difference(void)
{
    char *text[2] = {NULL, NULL};
    for (int run = 0; run < 2; run++) {
        FILE *file = tmpfile();
        CU_ASSERT_PTR_NOT_NULL_FATAL(file);
        fflush(stderr);
        int saved = dup(2);
        dup2(fileno(file), 2);
        struct dskv_device_options options = {.kind = "cpu", .n_threads = 1, .trace = 1};
        struct dskv_device *device = NULL;
        dskv_device_open(&options, &device, NULL);
        float x[4] = {1, 2, 3, 4}, y[4] = {1, 1, 1, run ? 2.0f : 1.0f};
        struct dskv_tensor a = dskv_tensor(x, DSKV_F32, 2, 2), b = dskv_tensor(y, DSKV_F32, 2, 2);
        dskv_op_activate(device, &(struct dskv_activate){.kind = DSKV_RELU, .x = a, .out = a});
        dskv_op_residual(device, &(struct dskv_residual){.x = a, .y = b});
        dskv_device_close(&device);
        fflush(stderr);
        dup2(saved, 2);
        close(saved);
        text[run] = dskv_calloc(1, 400);
        rewind(file);
        CU_ASSERT(fread(text[run], 1, 399, file) > 0);
        fclose(file);
    }
    size_t line = strcspn(text[0], "\n");
    CU_ASSERT_PTR_NOT_NULL(strstr(text[0], "activate f32 [2, 2]"));
    CU_ASSERT_PTR_NOT_NULL(strstr(text[0], "residual f32 [2, 2]"));
    CU_ASSERT(strncmp(text[0], text[1], line) == 0);
    CU_ASSERT(strcmp(text[0], text[1]) != 0);
    free(text[0]);
    free(text[1]);
}

int main(void)
{
    return dskv_run_tests("kernels.device", (struct dskv_test[]){
                                                {"kinds and names", kinds_and_names},
                                                {"memory is zero, aligned and lazy", memory_is_zero_aligned_and_lazy},
                                                {"every item once", every_item_once},
                                                {"idle threads cost nothing", idle_threads_cost_nothing},
                                                {"wrong shapes are bugs", wrong_shapes_are_bugs},
                                                {"traces show the first difference", traces_show_the_first_difference},
                                                {NULL, NULL},
                                            });
}
