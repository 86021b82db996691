/* What the device could do at best: its own product of large matrices, and, where it has memory of its own, one pass of
 * reads over more of it than any cache holds. */
#include "bench.h"

#include "base/memory.h"
#include "kernels/ops.h"

#include <stdlib.h>

enum { N_MEASUREMENTS = 6 }; /* the best counts */

/* Sizes that keep a device of each kind busy for some milliseconds. */
struct load {
    int64_t rows, side; /* of the matmul */
    int n_repeats;      /* queued before each wait */
};
static const struct load host_load = {512, 2048, 1}, device_load = {4096, 8192, 4};

#define READ_BYTES ((size_t)4 << 30)
#define PATTERN_BYTES ((size_t)16 << 20)

/* Seconds of one of n repeats of work(context), waiting included; the best of some measurements, the first of which
 * warms up. */
static double best_time(struct dskv_device *device, void (*work)(struct dskv_device *device, const void *context),
                        const void *context, int n_repeats)
{
    double best = 0;
    for (int i = 0; i < N_MEASUREMENTS; i++) {
        dskv_device_sync(device, NULL);
        double begin = dskv_bench_seconds();
        for (int j = 0; j < n_repeats; j++)
            work(device, context);
        dskv_device_sync(device, NULL); /* a failed device shows at the end */
        double took = (dskv_bench_seconds() - begin) / n_repeats;
        best = i <= 1 || took < best ? took : best;
    }
    return best;
}

/* Never zeros, which some devices multiply faster. */
void dskv_bench_fill_random(uint32_t *state, float *values, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        *state = *state * 1664525u + 1013904223u;
        values[i] = (float)((int32_t)(*state >> 8) - (1 << 23)) * 0x1p-27f;
    }
}

static void multiply(struct dskv_device *device, const void *context)
{
    dskv_op_matmul(device, context);
}

static enum dskv_exit measure_matmul(struct dskv_device *device, enum dskv_dtype dtype,
                                     struct dskv_bench_machine *machine, struct dskv_error *error)
{
    const struct load *load = machine->is_host ? &host_load : &device_load;
    size_t side = (size_t)load->side, n = (size_t)load->rows * side;
    machine->matmul_dtype = dskv_device_activation_dtype(device, dtype);
    size_t bytes = n * dskv_dtype_bytes(machine->matmul_dtype);
    struct dskv_weight *weight = dskv_weight_open(device, load->side, load->side, dtype);
    float *values = dskv_calloc(n, sizeof *values);
    void *x = dskv_device_alloc(device, bytes), *y = dskv_device_alloc(device, bytes);
    void *host = dskv_calloc(bytes, 1);
    enum dskv_exit code = DSKV_EXIT_OK;
    if (weight && x && y) {
        uint32_t state = 1;
        for (int64_t first = 0; first < load->side; first += load->rows) {
            dskv_bench_fill_random(&state, values, n);
            int64_t rows = load->side - first < load->rows ? load->side - first : load->rows;
            dskv_weight_fill(device, weight, first, rows, values, DSKV_F32);
        }
        dskv_convert(host, machine->matmul_dtype, values, DSKV_F32, n);
        dskv_device_upload(device, x, host, bytes);
        struct dskv_matmul p = {.x = dskv_tensor(x, machine->matmul_dtype, load->rows, load->side),
                                .w = weight,
                                .y = dskv_tensor(y, machine->matmul_dtype, load->rows, load->side)};
        machine->matmul_flops_s = 2.0 * (double)n * (double)side / best_time(device, multiply, &p, load->n_repeats);
    } else {
        code = dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for a matmul of %zu", side);
    }
    free(values);
    free(host);
    if (weight)
        dskv_weight_close(device, &weight);
    dskv_device_free(device, x, bytes);
    dskv_device_free(device, y, bytes);
    return code;
}

static void read_all(struct dskv_device *device, const void *context)
{
    dskv_device_read(device, context, READ_BYTES);
}

static enum dskv_exit measure_reads(struct dskv_device *device, struct dskv_bench_machine *machine,
                                    struct dskv_error *error)
{
    char *memory = dskv_device_alloc(device, READ_BYTES);
    if (!memory)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes to read", READ_BYTES);
    float *pattern = dskv_calloc(PATTERN_BYTES, 1);
    uint32_t state = 2;
    dskv_bench_fill_random(&state, pattern, PATTERN_BYTES / sizeof *pattern);
    for (size_t at = 0; at < READ_BYTES; at += PATTERN_BYTES)
        dskv_device_upload(device, memory + at, pattern, PATTERN_BYTES);
    machine->read_bytes_s = (double)READ_BYTES / best_time(device, read_all, memory, device_load.n_repeats);
    free(pattern);
    dskv_device_free(device, memory, READ_BYTES);
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_bench_device_measure(const struct dskv_device_options *options, int n_ranks, enum dskv_dtype dtype,
                                         struct dskv_bench_machine *machine, struct dskv_error *error)
{
    struct dskv_device *device = NULL;
    enum dskv_exit code = dskv_device_open(options, &device, error);
    dskv_parallel_agree(DSKV_EXIT_OK, NULL); /* all ranks at once */
    if (code)
        return code;
    machine->is_host = dskv_device_is_host(device);
    code = measure_matmul(device, machine->is_host ? DSKV_F32 : dtype, machine, error);
    if (!code && !machine->is_host)
        code = measure_reads(device, machine, error);
    if (!code && dskv_device_sync(device, error))
        code = DSKV_EXIT_DEVICE;
    dskv_device_close(&device);
    machine->matmul_flops_s *= n_ranks;
    machine->read_bytes_s *= n_ranks;
    return code;
}
