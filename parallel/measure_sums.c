/* Measure sums: times the comm's sums beside NCCL's own. */
#include "parallel/sums.h"

#include "base/memory.h"
#include "parallel/comm.h"
#include "parallel/engine.h"
#include "parallel/job.h"
#include "parallel/nccl_link.h"
#include "parallel/segment.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_BYTES = 4 << 20, MIN_BYTES = 8 << 10, N_RECORDED = 200, N_CALLED = 20, N_REPLAYS = 3, N_MEASUREMENTS = 9 };

struct measure {
    struct dskv_device *device;
    struct dskv_segment segment;
    struct dskv_comm *comm;
    struct dskv_nccl *nccl;
    enum dskv_dtype dtype;
    int64_t width, max_rows;
    char *memory; /* device: x, out, what NCCL sums, where it goes, the norm's weight */
    struct dskv_nccl_window *window;
    void *window_memory; /* null where there is none */
    void *sums, *norms;  /* host: of the most rows */
};

/* ---- memory ------------------------------------------------------------------------------------- */

static void *buffer(const struct measure *m, int i)
{
    return m->memory + (size_t)i * MAX_BYTES;
}
enum { X, OUT, PART, NCCL_SUM, WEIGHT, N_BUFFERS };

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Noise of this seed, as the device's activations or, for weights, f32. */
static void fill(const struct measure *m, void *memory, enum dskv_dtype dtype, int64_t n, uint64_t seed)
{
    float *values = dskv_calloc((size_t)n, sizeof *values);
    void *converted = dskv_calloc((size_t)n, sizeof *values);
    uint32_t state = (uint32_t)seed * 2654435761u + 1;
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)((int32_t)(state >> 8) - (1 << 23)) * 0x1p-23f;
    }
    dskv_convert(converted, dtype, values, DSKV_F32, (size_t)n);
    dskv_device_upload(m->device, memory, converted, (size_t)n * dskv_dtype_bytes(dtype));
    free(values);
    free(converted);
}

static void fill_all(const struct measure *m)
{
    int64_t n = m->max_rows * m->width;
    uint64_t rank = (uint64_t)m->segment.peers.rank;
    fill(m, dskv_comm_slot(m->comm), m->dtype, n, 100 + rank);
    fill(m, buffer(m, PART), m->dtype, n, 100 + rank);
    if (m->window_memory)
        fill(m, m->window_memory, m->dtype, n, 100 + rank);
    fill(m, buffer(m, X), m->dtype, n, 1);
    fill(m, buffer(m, WEIGHT), DSKV_F32, m->width, 2);
}

/* ---- what is timed ------------------------------------------------------------------------------ */

typedef enum dskv_exit queue_function(const struct measure *m, int64_t rows, struct dskv_error *error);

static struct dskv_residual_norm then_of(const struct measure *m, int64_t rows, void *sum)
{
    struct dskv_tensor x = dskv_tensor(buffer(m, X), m->dtype, rows, m->width);
    return (struct dskv_residual_norm){.residual = {x, dskv_tensor(sum, m->dtype, rows, m->width), NULL},
                                       .norm = {DSKV_RMS_NORM, 1e-5f, x, buffer(m, WEIGHT), NULL,
                                                dskv_tensor(buffer(m, OUT), m->dtype, rows, m->width)}};
}

static enum dskv_exit queue_sum(const struct measure *m, int64_t rows, struct dskv_error *error)
{
    struct dskv_tensor sum;
    return dskv_comm_sum(m->comm, rows, m->width, m->dtype, &sum, error);
}

static enum dskv_exit queue_add(const struct measure *m, int64_t rows, struct dskv_error *error)
{
    struct dskv_residual_norm then = then_of(m, rows, NULL);
    return dskv_comm_add(m->comm, &then, error);
}

static enum dskv_exit queue_then(const struct measure *m, int64_t rows, struct dskv_error *error)
{
    struct dskv_residual_norm then = then_of(m, rows, buffer(m, PART));
    (void)error;
    dskv_op_residual_norm(m->device, &then);
    return DSKV_EXIT_OK;
}

#ifdef DSKV_WITH_NCCL
static enum dskv_exit queue_nccl(const struct measure *m, int64_t rows, struct dskv_error *error)
{
    return dskv_nccl_measured_sum(m->nccl, buffer(m, PART), buffer(m, NCCL_SUM), rows * m->width, m->dtype, error);
}

static enum dskv_exit queue_nccl_add(const struct measure *m, int64_t rows, struct dskv_error *error)
{
    struct dskv_residual_norm then = then_of(m, rows, buffer(m, NCCL_SUM));
    enum dskv_exit code = queue_nccl(m, rows, error);
    dskv_op_residual_norm(m->device, &then);
    return code;
}

static enum dskv_exit queue_window(const struct measure *m, int64_t rows, struct dskv_error *error)
{
    char *sum = (char *)m->window_memory + MAX_BYTES;
    return dskv_nccl_measured_sum(m->nccl, m->window_memory, sum, rows * m->width, m->dtype, error);
}

static enum dskv_exit queue_window_add(const struct measure *m, int64_t rows, struct dskv_error *error)
{
    struct dskv_residual_norm then = then_of(m, rows, (char *)m->window_memory + MAX_BYTES);
    enum dskv_exit code = queue_window(m, rows, error);
    dskv_op_residual_norm(m->device, &then);
    return code;
}
#endif

static enum dskv_exit sync(const struct measure *m, struct dskv_error *error)
{
    return dskv_device_sync(m->device, error) ? DSKV_EXIT_DEVICE : DSKV_EXIT_OK;
}

static enum dskv_exit queue_many(const struct measure *m, queue_function *queue, int64_t rows, int n,
                                 struct dskv_error *error)
{
    enum dskv_exit code = DSKV_EXIT_OK;
    for (int i = 0; i < n && !code; i++)
        code = queue(m, rows, error);
    return code;
}

static int ascending(const void *a, const void *b)
{
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

/* The median of some measurements of many in a row, all ranks at once; the first warms up. */
static enum dskv_exit time_queue(const struct measure *m, queue_function *queue, int64_t rows, double *us,
                                 struct dskv_error *error)
{
    double times[N_MEASUREMENTS + 1];
    struct dskv_recording *recording = NULL;
    int n_replays = 1, n_each = N_CALLED;
    enum dskv_exit code = queue(m, rows, error); /* whatever is made at a first call is made here */
    if (!code)
        code = sync(m, error);
    if (!code && dskv_comm_is_queued(m->comm) && dskv_device_record_begin(m->device)) {
        n_replays = N_REPLAYS;
        n_each = N_RECORDED;
        code = queue_many(m, queue, rows, n_each, error);
        recording = dskv_device_record_end(m->device);
    }
    for (int i = 0; i <= N_MEASUREMENTS && !code; i++) {
        dskv_job_barrier();
        double begin = seconds();
        for (int j = 0; j < n_replays && !code; j++)
            if (recording)
                dskv_device_replay(m->device, recording);
            else
                code = queue_many(m, queue, rows, n_each, error);
        if (!code)
            code = sync(m, error);
        times[i] = (seconds() - begin) * 1e6 / (n_replays * n_each);
    }
    dskv_recording_close(m->device, &recording);
    qsort(times + 1, N_MEASUREMENTS, sizeof *times, ascending);
    *us = times[1 + N_MEASUREMENTS / 2];
    return code;
}

/* ---- bits --------------------------------------------------------------------------------------- */

static int64_t count_differing(const struct measure *m, const void *device_memory, const void *expected, int64_t n)
{
    size_t element = dskv_dtype_bytes(m->dtype);
    char *got = dskv_calloc((size_t)n, element);
    int64_t n_differing = 0;
    dskv_device_download(m->device, got, device_memory, (size_t)n * element);
    for (int64_t i = 0; i < n; i++)
        n_differing += memcmp(got + (size_t)i * element, (const char *)expected + (size_t)i * element, element) != 0;
    free(got);
    return n_differing;
}

/* One sum and one addition of fresh values: where they lie. */
static enum dskv_exit compute_once(const struct measure *m, int64_t rows, struct dskv_tensor *sum,
                                   struct dskv_error *error)
{
    enum dskv_exit code;
    fill_all(m);
    if ((code = queue_add(m, rows, error)))
        return code;
    if ((code = sync(m, error)))
        return code;
    fill(m, dskv_comm_slot(m->comm), m->dtype, m->max_rows * m->width, 100 + (uint64_t)m->segment.peers.rank);
    if ((code = dskv_comm_sum(m->comm, rows, m->width, m->dtype, sum, error)))
        return code;
    return sync(m, error);
}

static enum dskv_exit keep_bits(struct measure *m, struct dskv_error *error)
{
    struct dskv_tensor sum;
    size_t bytes = (size_t)(m->max_rows * m->width) * dskv_dtype_bytes(m->dtype);
    enum dskv_exit code = compute_once(m, m->max_rows, &sum, error);
    if (code)
        return code;
    m->sums = dskv_calloc(1, bytes);
    m->norms = dskv_calloc(1, bytes);
    dskv_device_download(m->device, m->sums, sum.data, bytes);
    dskv_device_download(m->device, m->norms, buffer(m, OUT), bytes);
    return DSKV_EXIT_OK;
}

static enum dskv_exit compare_bits(const struct measure *m, struct dskv_sums_point *point, struct dskv_error *error)
{
    struct dskv_tensor sum;
    int32_t all[DSKV_MAX_RANKS];
    int64_t n = point->rows * m->width;
    enum dskv_exit code = compute_once(m, point->rows, &sum, error);
    if (code)
        return code;
    int64_t own = count_differing(m, sum.data, m->sums, n) + count_differing(m, buffer(m, OUT), m->norms, n);
    dskv_job_all_gather((int32_t)own, all);
    for (int32_t r = 0; r < m->segment.peers.n_ranks; r++)
        point->n_differing += all[r];
    return DSKV_EXIT_OK;
}

/* ---- all of it ---------------------------------------------------------------------------------- */

static enum dskv_exit time_point(const struct measure *m, struct dskv_sums_point *point, struct dskv_error *error)
{
    enum dskv_exit code = compare_bits(m, point, error);
    fill_all(m);
    if (!code)
        code = time_queue(m, queue_sum, point->rows, &point->sum_us, error);
    if (!code)
        code = time_queue(m, queue_add, point->rows, &point->add_us, error);
    if (!code)
        code = time_queue(m, queue_then, point->rows, &point->then_us, error);
#ifdef DSKV_WITH_NCCL
    if (!code && m->nccl)
        code = time_queue(m, queue_nccl, point->rows, &point->nccl_us, error);
    if (!code && m->nccl)
        code = time_queue(m, queue_nccl_add, point->rows, &point->nccl_add_us, error);
    if (!code && m->window_memory)
        code = time_queue(m, queue_window, point->rows, &point->window_us, error);
    if (!code && m->window_memory)
        code = time_queue(m, queue_window_add, point->rows, &point->window_add_us, error);
#endif
    return code;
}

static enum dskv_exit open_memory(struct measure *m, struct dskv_error *error)
{
    m->memory = dskv_device_alloc(m->device, (size_t)N_BUFFERS * MAX_BYTES);
    enum dskv_exit code = DSKV_EXIT_OK;
    if (!m->memory)
        code = dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %d bytes", N_BUFFERS * MAX_BYTES);
    if ((code = dskv_parallel_agree(code, error)))
        return code;
#ifdef DSKV_WITH_NCCL
    void *pointers[DSKV_MAX_RANKS];
    if (m->nccl && !dskv_nccl_window_open(m->nccl, (size_t)2 * MAX_BYTES, &m->window, pointers, error))
        m->window_memory = pointers[m->segment.peers.rank]; /* else it is not measured here */
#endif
    return code;
}

static enum dskv_exit open_measure(const struct dskv_sums_options *options, struct measure *m, struct dskv_error *error)
{
    struct dskv_device_options device = {
        .kind = options->device, .index = dskv_job_rank(), .share = options->share_gpu, .n_threads = 1};
    enum dskv_exit code = dskv_parallel_agree(dskv_device_open(&device, &m->device, error), error);
    if (code)
        return code;
    m->dtype = dskv_device_activation_dtype(m->device, options->dtype);
    m->width = options->width;
    m->max_rows = MAX_BYTES / (options->width * (int64_t)dskv_dtype_bytes(m->dtype));
    if ((code = dskv_segment_open(dskv_comm_shared_bytes(dskv_job_n_ranks(), MAX_BYTES) + 64, &m->segment, error)))
        return code;
    struct dskv_comm_options comm = {.device = m->device,
                                     .peers = &m->segment.peers,
                                     .slot_bytes = MAX_BYTES,
                                     .shared = m->segment.memory,
                                     .name = options->comm};
    if ((code = dskv_parallel_agree(dskv_comm_open(&comm, &m->comm, error), error)))
        return code;
    m->nccl = dskv_comm_nccl_link(m->comm);
    return open_memory(m, error);
}

static void close_measure(struct measure *m)
{
    free(m->sums);
    free(m->norms);
#ifdef DSKV_WITH_NCCL
    dskv_nccl_window_close(m->nccl, &m->window);
#endif
    if (m->memory)
        dskv_device_free(m->device, m->memory, (size_t)N_BUFFERS * MAX_BYTES);
    dskv_comm_close(&m->comm);
    dskv_segment_close(&m->segment);
    dskv_device_close(&m->device);
}

enum dskv_exit dskv_sums_measure(const struct dskv_sums_options *options, struct dskv_sums_report *report,
                                 struct dskv_error *error)
{
    struct measure m = {0};
    enum dskv_exit code = open_measure(options, &m, error);
    *report = (struct dskv_sums_report){.dtype = m.dtype};
    if (!code) {
        snprintf(report->comm, sizeof report->comm, "%s", dskv_comm_name(m.comm));
        snprintf(report->device, sizeof report->device, "%s", dskv_device_name(m.device));
        code = keep_bits(&m, error);
    }
    for (size_t bytes = MIN_BYTES; bytes <= MAX_BYTES && !code; bytes *= 2) {
        size_t row_bytes = (size_t)m.width * dskv_dtype_bytes(m.dtype);
        if (bytes % row_bytes)
            continue;
        struct dskv_sums_point *point = &report->points[report->n_points++];
        *point = (struct dskv_sums_point){.rows = (int64_t)(bytes / row_bytes), .bytes = bytes};
        code = time_point(&m, point, error);
    }
    close_measure(&m);
    return code;
}
