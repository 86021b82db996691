#include "kernels/test_cuda.h"

struct dskv_device *gpu, *cpu;

void test_cuda_open(const char *kind)
{
    struct dskv_device_options options = {.kind = kind, .n_threads = 1}, reference = {.kind = "cpu", .n_threads = 2};
    struct dskv_error error;
    DSKV_ASSERT(dskv_device_open(&options, &gpu, &error) == DSKV_EXIT_OK, "%s", error.message);
    DSKV_ASSERT(dskv_device_open(&reference, &cpu, &error) == DSKV_EXIT_OK, "%s", error.message);
}

void test_cuda_close(void)
{
    dskv_device_close(&gpu);
    dskv_device_close(&cpu);
}

enum dskv_dtype test_activation(struct dskv_device *device, enum dskv_dtype dtype)
{
    return dskv_device_activation_dtype(device, dtype);
}

void *test_put_bytes(struct dskv_device *device, const void *bytes, size_t n)
{
    void *memory = dskv_device_alloc(device, n);
    DSKV_ASSERT(memory, "no memory for %zu bytes", n);
    dskv_device_upload(device, memory, bytes, n);
    return memory;
}

void *test_take_bytes(struct dskv_device *device, void *memory, size_t n)
{
    struct dskv_error error;
    DSKV_ASSERT(dskv_device_sync(device, &error) == DSKV_OK, "%s", error.message);
    void *bytes = dskv_calloc(n, 1);
    dskv_device_download(device, bytes, memory, n);
    dskv_device_free(device, memory, n);
    return bytes;
}

struct dskv_tensor test_put(struct dskv_device *device, const float *values, enum dskv_dtype dtype, int64_t rows,
                            int64_t cols, int64_t gap)
{
    int64_t stride = cols + gap;
    size_t size = dskv_dtype_bytes(dtype), bytes = (size_t)(rows * stride) * size;
    char *host = dskv_calloc(bytes, 1);
    memset(host, 0xff, bytes); /* a NaN in every dtype */
    for (int64_t r = 0; values && r < rows; r++)
        dskv_convert(host + (size_t)(r * stride) * size, dtype, values + r * cols, DSKV_F32, (size_t)cols);
    struct dskv_tensor tensor = {test_put_bytes(device, host, bytes), dtype, rows, cols, stride};
    free(host);
    return tensor;
}

float *test_take(struct dskv_device *device, struct dskv_tensor *tensor)
{
    size_t size = dskv_dtype_bytes(tensor->dtype), row_bytes = (size_t)tensor->stride * size;
    char *host = test_take_bytes(device, tensor->data, (size_t)tensor->rows * row_bytes);
    float *values = dskv_calloc((size_t)(tensor->rows * tensor->cols), sizeof *values);
    int gaps_are_whole = 1;
    for (int64_t r = 0; r < tensor->rows; r++) {
        const char *row = host + (size_t)r * row_bytes;
        dskv_convert(values + r * tensor->cols, DSKV_F32, row, tensor->dtype, (size_t)tensor->cols);
        for (size_t i = (size_t)tensor->cols * size; i < row_bytes; i++)
            gaps_are_whole &= row[i] == (char)0xff;
    }
    CU_ASSERT(gaps_are_whole);
    free(host);
    tensor->data = NULL;
    return values;
}

float test_unit(enum dskv_dtype dtype)
{
    return dtype == DSKV_F32 ? 0x1p-23f : dtype == DSKV_F16 ? 0x1p-10f : 0x1p-7f;
}

int test_near(const char *what, const float *got, const float *expected, size_t n, enum dskv_dtype dtype, float units,
              float absolute)
{
    float unit = units * test_unit(dtype), least = dtype == DSKV_F16 ? 0x1p-24f : 0.0f;
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(got[i] - expected[i]) <= unit * fabsf(expected[i]) + absolute + least)) {
            printf("\n    %s, %s: element %zu of %zu is %.9g, expected %.9g ", what, dskv_dtype_name(dtype), i, n,
                   (double)got[i], (double)expected[i]);
            return 0;
        }
    return 1;
}
