#include "kernels/kernel_test.h"

#include "base/memory.h"

static struct dskv_device *open_device(const char *path, int n_threads)
{
    struct dskv_device_options options = {.kind = "cpu", .n_threads = n_threads, .cpu_path = path};
    struct dskv_device *device = NULL;
    dskv_device_open(&options, &device, NULL);
    return device;
}

void test_devices_open(struct test_devices *devices)
{
    static const struct {
        const char *path;
        int n_threads;
    } wanted[] = {{"avx512", 1}, {"avx2", 1}, {"plain", 1}, {"avx512", 2}, {"avx2", 3}, {"plain", 2}, {"avx512", 3}};
    devices->n = 0;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        struct dskv_device *device = open_device(wanted[i].path, wanted[i].n_threads);
        if (device)
            devices->device[devices->n++] = device;
    }
    CU_ASSERT_FATAL(devices->n >= 2); /* "plain" runs everywhere */
}

void test_devices_close(struct test_devices *devices)
{
    for (int i = 0; i < devices->n; i++)
        dskv_device_close(&devices->device[i]);
}

int test_device_is_slow(const struct dskv_device *device)
{
    return strstr(dskv_device_name(device), "plain") != NULL;
}

struct dskv_device *test_device_open(void)
{
    struct dskv_device *device = open_device(NULL, 1);
    CU_ASSERT_PTR_NOT_NULL_FATAL(device);
    return device;
}

uint64_t test_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

int test_random_below(uint64_t *state, int n)
{
    return (int)(test_random(state) % (uint64_t)n);
}

float test_random_unit(uint64_t *state)
{
    return (float)((int64_t)(test_random(state) >> 40) - (1 << 23)) * 0x1p-23f;
}

float test_random_wide(uint64_t *state)
{
    return ldexpf(test_random_unit(state), test_random_below(state, 16) - 12);
}

float *test_random_floats(uint64_t *state, size_t n)
{
    float *floats = dskv_calloc(n, sizeof *floats);
    for (size_t i = 0; i < n; i++)
        floats[i] = test_random_wide(state);
    return floats;
}

float test_rounded(enum dskv_dtype dtype, float x)
{
    uint32_t stored = 0;
    dskv_convert(&stored, dtype, &x, DSKV_F32, 1);
    dskv_convert(&x, DSKV_F32, &stored, dtype, 1);
    return x;
}

struct dskv_weight *test_weight(struct dskv_device *device, int64_t n, int64_t k, enum dskv_dtype dtype,
                                const float *rows)
{
    struct dskv_weight *weight = dskv_weight_open(device, n, k, dtype);
    CU_ASSERT_PTR_NOT_NULL_FATAL(weight);
    dskv_weight_fill(device, weight, 0, n, rows, DSKV_F32);
    return weight;
}

int test_leaves_out(void)
{
    static int n_cases;
    const char *text = getenv("DSKV_TEST_EVERY");
    int every = text ? atoi(text) : 1;
    return every > 1 && n_cases++ % every != 0;
}

int test_same_bits(const char *what, const void *a, const void *b, size_t n_floats)
{
    if (memcmp(a, b, n_floats * sizeof(float)) == 0)
        return 1;
    size_t i = 0;
    while (memcmp((const float *)a + i, (const float *)b + i, sizeof(float)) == 0)
        i++;
    printf("\n    %s: element %zu of %zu is %a, expected %a ", what, i, n_floats, ((const float *)a)[i],
           ((const float *)b)[i]);
    return 0;
}
