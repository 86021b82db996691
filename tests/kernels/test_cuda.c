/* The CUDA device against the CPU device, operation by operation, and the promises about bits on it.
 *
 *     test_kernels_cuda [KIND [PART]]
 *     test_kernels_cuda --list
 *
 * KIND is the device under test, "cuda" unless said otherwise; PART: only tests whose names have it in them, for a
 * sanitizer (sanitize.py).  Exit code 77: there is no such device here.
 */
#include "kernels/test_cuda.h"

enum { MAX_TESTS = 64 };

static const struct dskv_test *const parts[] = {test_cuda_rows,   test_cuda_matmul, test_cuda_attention,
                                                test_cuda_choice, test_cuda_chain,  test_cuda_queue};

static int list(void)
{
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (const struct dskv_test *test = parts[i]; test->name; test++)
            puts(test->name);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--list") == 0)
        return list();
    struct dskv_error error;
    struct dskv_device_options options = {.kind = argc > 1 ? argv[1] : "cuda", .n_threads = 1};
    struct dskv_device *device = NULL;
    if (dskv_device_open(&options, &device, &error)) {
        printf("skipped: %s\n", error.message);
        return 77;
    }
    dskv_device_close(&device);
    struct dskv_test all[MAX_TESTS] = {{0}};
    size_t n = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (const struct dskv_test *test = parts[i]; test->name; test++) {
            DSKV_ASSERT(n < MAX_TESTS - 1, "%zu tests", n);
            if (argc <= 2 || strstr(test->name, argv[2]))
                all[n++] = *test;
        }
    test_cuda_open(options.kind);
    int failures = dskv_run_tests("kernels.cuda", all);
    test_cuda_close();
    return failures;
}
