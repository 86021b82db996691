/* CUDA device: one GPU, one stream.  Owns device memory, prepared weights' layout and the first error; operations are
 * queued in order.  Knows nothing of ranks: which GPU is whose is decided by parallel. */
#include "cuda/cuda.h"

#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SCRATCH_BYTES ((size_t)64 << 20)
#define WAIT_QUERIES 20000 /* about 10 ms */

void dskv_cuda_note(struct dskv_cuda *cuda, cudaError_t error, const char *place)
{
    if (error == cudaSuccess || cuda->error != cudaSuccess)
        return;
    cuda->error = error;
    snprintf(cuda->error_place, sizeof cuda->error_place, "%s", place);
}

static enum dskv_dtype cuda_activation_dtype(enum dskv_dtype weights)
{
    return weights;
}

static enum dskv_code report_error(const struct dskv_cuda *cuda, struct dskv_error *error)
{
    if (cuda->error == cudaSuccess)
        return DSKV_OK;
    return dskv_fail(error, DSKV_INTERNAL, "%s failed in %s: %s", cuda->base.name, cuda->error_place,
                     cudaGetErrorString(cuda->error));
}

static enum dskv_code cuda_sync(struct dskv_device *device, struct dskv_error *error)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "sync");
    return report_error(cuda, error);
}

static int64_t cuda_available(struct dskv_device *device)
{
    size_t free_bytes = 0, total = 0;
    cudaError_t failed = cudaMemGetInfo(&free_bytes, &total);
    dskv_cuda_note(dskv_cuda_of(device), failed, "asking for free memory");
    return failed ? -1 : (int64_t)free_bytes;
}

static void *cuda_alloc(struct dskv_device *device, size_t bytes)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes ? bytes : 1) != cudaSuccess) {
        (void)cudaGetLastError(); /* no memory is the caller's answer, not the device's state */
        return NULL;
    }
    dskv_cuda_note(cuda, cudaMemsetAsync(memory, 0, bytes, cuda->stream), "clearing memory");
    return memory;
}

static void cuda_free(struct dskv_device *device, void *memory, size_t bytes)
{
    (void)bytes;
    dskv_cuda_note(dskv_cuda_of(device), cudaFree(memory), "freeing memory");
}

static void cuda_upload(struct dskv_device *device, void *dst, const void *src, size_t bytes)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_cuda_note(cuda, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, cuda->stream), "upload");
    dskv_cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "upload");
}

static void cuda_download(struct dskv_device *device, void *dst, const void *src, size_t bytes)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_cuda_note(cuda, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, cuda->stream), "download");
    dskv_cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "download");
}

static int32_t cuda_identity(const struct dskv_device *device)
{
    return ((const struct dskv_cuda *)device)->identity;
}

/* The GPU's UUID, folded; 0 means "its own", so never that. */
static int32_t identity_of(const struct cudaDeviceProp *properties)
{
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof properties->uuid; i++)
        hash = (hash ^ ((const unsigned char *)&properties->uuid)[i]) * 16777619u;
    return (int32_t)(hash | 1);
}

static void *cuda_queue(const struct dskv_device *device)
{
    return ((const struct dskv_cuda *)device)->stream;
}

/* ---- the queue ---------------------------------------------------------------------------------- */

static void *cuda_host_alloc(struct dskv_device *device, size_t bytes)
{
    void *memory = NULL;
    (void)device;
    if (cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocDefault) != cudaSuccess) {
        (void)cudaGetLastError(); /* as in cuda_alloc */
        return NULL;
    }
    return memset(memory, 0, bytes);
}

static void cuda_host_free(struct dskv_device *device, void *memory)
{
    dskv_cuda_note(dskv_cuda_of(device), cudaFreeHost(memory), "freeing memory");
}

static void cuda_fetch(struct dskv_device *device, void *dst, const void *src, size_t bytes)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_cuda_note(cuda, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, cuda->stream), "fetching");
}

static cudaEvent_t event_of(const struct dskv_cuda *cuda, dskv_mark mark)
{
    DSKV_ASSERT(mark < cuda->n_marks && mark + DSKV_MAX_MARKS >= cuda->n_marks, "mark %llu of %llu",
                (unsigned long long)mark, (unsigned long long)cuda->n_marks);
    return cuda->marks[mark % DSKV_MAX_MARKS];
}

static dskv_mark cuda_mark(struct dskv_device *device)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_mark mark = cuda->n_marks++;
    dskv_cuda_note(cuda, cudaEventRecord(event_of(cuda, mark), cuda->stream), "marking");
    return mark;
}

static int cuda_reached(struct dskv_device *device, dskv_mark mark)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    if (cuda->error != cudaSuccess || cudaEventQuery(event_of(cuda, mark)) != cudaErrorNotReady)
        return 1;
    (void)cudaGetLastError(); /* an answer, and no failure of what is launched next */
    return 0;
}

/* Asks without rest for as long as a decode step may take: to sleep costs up to 50 us.  Then sleeps. */
static enum dskv_code cuda_wait(struct dskv_device *device, dskv_mark mark, struct dskv_error *error)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    for (int i = 0; i < WAIT_QUERIES; i++)
        if (cuda_reached(device, mark))
            break;
    dskv_cuda_note(cuda, cudaEventSynchronize(event_of(cuda, mark)), "waiting");
    return report_error(cuda, error);
}

struct dskv_recording {
    cudaGraphExec_t graph;
};

static void cuda_record_begin(struct dskv_device *device)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_cuda_note(cuda, cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal), "recording");
}

static struct dskv_recording *cuda_record_end(struct dskv_device *device)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    struct dskv_recording *recording = dskv_calloc(1, sizeof *recording);
    cudaGraph_t graph = NULL;
    dskv_cuda_note(cuda, cudaStreamEndCapture(cuda->stream, &graph), "recording");
    if (graph) {
        dskv_cuda_note(cuda, cudaGraphInstantiate(&recording->graph, graph, 0), "making a graph");
        dskv_cuda_note(cuda, cudaGraphDestroy(graph), "making a graph");
    }
    if (recording->graph)
        return recording;
    free(recording);
    return NULL;
}

static void cuda_replay(struct dskv_device *device, const struct dskv_recording *recording)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_cuda_note(cuda, cudaGraphLaunch(recording->graph, cuda->stream), "launching a graph");
}

static void cuda_recording_close(struct dskv_device *device, struct dskv_recording *recording)
{
    dskv_cuda_note(dskv_cuda_of(device), cudaGraphExecDestroy(recording->graph), "freeing a graph");
    free(recording);
}

/* ---- weights ------------------------------------------------------------------------------------ */

static size_t cuda_weight_bytes(int64_t n, int64_t k, enum dskv_dtype dtype)
{
    return (size_t)dskv_cuda_padded(n) * (size_t)dskv_cuda_padded(k) * dskv_dtype_bytes(dtype);
}

static void cuda_weight_fill(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                             const void *rows, enum dskv_dtype dtype)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_cuda_matmul_lt_prepare(device, weight);
    size_t element = dskv_dtype_bytes(weight->dtype), row_bytes = (size_t)weight->k * element;
    size_t stride = (size_t)dskv_cuda_padded(weight->k) * element;
    void *converted = NULL;
    if (dtype != weight->dtype) {
        converted = malloc((size_t)n_rows * row_bytes + 1);
        DSKV_ASSERT(converted, "no memory for %lld rows", (long long)n_rows);
        dskv_convert(converted, weight->dtype, rows, dtype, (size_t)(n_rows * weight->k));
        rows = converted;
    }
    dskv_cuda_note(cuda,
                   cudaMemcpy2DAsync((char *)weight->data + (size_t)first * stride, stride, rows, row_bytes, row_bytes,
                                     (size_t)n_rows, cudaMemcpyHostToDevice, cuda->stream),
                   "filling a weight");
    dskv_cuda_note(cuda, cudaStreamSynchronize(cuda->stream), "filling a weight");
    free(converted);
}

static void cuda_close(struct dskv_device *device)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    dskv_cuda_matmul_lt_close(&cuda->lt);
    for (int i = 0; i < DSKV_MAX_MARKS; i++)
        if (cuda->marks[i])
            cudaEventDestroy(cuda->marks[i]);
    cudaFree(cuda->scratch);
    if (cuda->stream)
        cudaStreamDestroy(cuda->stream);
    free(cuda);
}

static const struct dskv_device_table cuda_table = {
    .kind = "cuda",
    .is_host = 0,
    .activation_dtype = cuda_activation_dtype,
    .close = cuda_close,
    .sync = cuda_sync,
    .available = cuda_available,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .identity = cuda_identity,
    .queue = cuda_queue,
    .exchange_bytes = dskv_cuda_exchange_bytes,
    .weight_bytes = cuda_weight_bytes,
    .weight_alloc = cuda_alloc,
    .weight_fill = cuda_weight_fill,
    .weight_fill_noise = dskv_cuda_weight_fill_noise,
    .read = dskv_cuda_read,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .fetch = cuda_fetch,
    .mark = cuda_mark,
    .reached = cuda_reached,
    .wait = cuda_wait,
    .record_begin = cuda_record_begin,
    .record_end = cuda_record_end,
    .replay = cuda_replay,
    .recording_close = cuda_recording_close,
};

static const struct dskv_op_table cuda_ops = {
    .embed = dskv_cuda_embed,
    .norm = dskv_cuda_norm,
    .matmul = dskv_cuda_matmul,
    .rope = dskv_cuda_rope,
    .kv_write = dskv_cuda_kv_write,
    .rope_kv_write = dskv_cuda_rope_kv_write,
    .attention = dskv_cuda_attention,
    .activate = dskv_cuda_activate,
    .matmul_activate = dskv_cuda_matmul_activate,
    .residual = dskv_cuda_residual,
    .residual_norm = dskv_cuda_residual_norm,
    .sum = dskv_cuda_sum,
    .gather_rows = dskv_cuda_gather_rows,
    .select = dskv_cuda_select,
    .choose = dskv_cuda_choose,
    .sample = dskv_cuda_sample,
    .kv_copy = dskv_cuda_kv_copy,
    .receive = dskv_cuda_receive,
    .report = dskv_cuda_report,
    .kv_gather = dskv_cuda_kv_gather,
    .kv_scatter = dskv_cuda_kv_scatter,
    .exchange_gather = dskv_cuda_exchange_gather,
    .exchange_add = dskv_cuda_exchange_add,
    .exchange_residual_norm = dskv_cuda_exchange_residual_norm,
};

int dskv_cuda_present(void)
{
    int n_devices = 0;
    return cudaGetDeviceCount(&n_devices) == cudaSuccess && n_devices > 0;
}

enum dskv_exit dskv_cuda_open(const struct dskv_device_options *options, struct dskv_device **device,
                              struct dskv_error *error)
{
    int n_devices = 0;
    cudaError_t failed = cudaGetDeviceCount(&n_devices);
    if (failed != cudaSuccess)
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "no CUDA device can be used: %s", cudaGetErrorString(failed));
    int index = options->share && n_devices ? options->index % n_devices : options->index;
    if (index >= n_devices)
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE,
                              "rank %d has no GPU of its own, this host has %d: start fewer ranks or --share-gpu",
                              options->index, n_devices);
    struct dskv_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for a device");
    cuda->table = cuda_table;
    cuda->table.numerics = cuda->numerics;
    cuda->base.table = &cuda->table;
    cuda->base.ops = &cuda_ops;
    cuda->scratch_bytes = SCRATCH_BYTES;
    cuda->free_order = options->free_order;
    struct cudaDeviceProp properties;
    if ((failed = cudaSetDevice(index)) != cudaSuccess ||
        (failed = cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync)) != cudaSuccess ||
        (failed = cudaGetDeviceProperties(&properties, index)) != cudaSuccess ||
        (failed = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking)) != cudaSuccess ||
        (failed = cudaMalloc((void **)&cuda->scratch, cuda->scratch_bytes)) != cudaSuccess ||
        (failed = cudaMemsetAsync(cuda->scratch, 0, cuda->scratch_bytes, cuda->stream)) != cudaSuccess) {
        cuda_close(&cuda->base);
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "GPU %d cannot be opened: %s", index,
                              cudaGetErrorString(failed));
    }
    for (int i = 0; i < DSKV_MAX_MARKS; i++)
        dskv_cuda_note(cuda, cudaEventCreateWithFlags(&cuda->marks[i], cudaEventDisableTiming | cudaEventBlockingSync),
                       "opening");
    /* How a step of 16 products is summed differs between generations; with free_order nothing fixes it. */
    snprintf(cuda->numerics, sizeof cuda->numerics, "cuda-%s-%d.%d", cuda->free_order ? "any-order" : "mma16x1",
             properties.major, properties.minor);
    cuda->n_multiprocessors = properties.multiProcessorCount;
    cuda->begins_early = dskv_cuda_begins_early();
    cuda->identity = identity_of(&properties);
    cuda->has_stream_matmul = dskv_cuda_matmul_stream_open();
    cuda->has_warpgroups = dskv_cuda_attention_wgmma_open();
    cuda->has_batch_attention = dskv_cuda_attention_batch_open();
    snprintf(cuda->base.name, sizeof cuda->base.name, "cuda %d (%.40s)", index, properties.name);
    *device = &cuda->base;
    return DSKV_EXIT_OK;
}
