/* Devices, their memory and their weights: picks a device of the wanted kind and forwards to its table. */
#include "kernels/device.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

static int cpu_present(void)
{
    return 1;
}

/* "auto" takes the first that is present; open is null for a kind that this build lacks. */
static const struct {
    const char *kind, *name;
    int (*present)(void);
    enum dskv_exit (*open)(const struct dskv_device_options *options, struct dskv_device **device,
                           struct dskv_error *error);
} kinds[] = {
#ifdef DSKV_WITH_CUDA
    {"cuda", "CUDA", dskv_cuda_present, dskv_cuda_open},
#else
    {"cuda", "CUDA", NULL, NULL},
#endif
    {"cpu", "CPU", cpu_present, dskv_cpu_open},
};

enum dskv_exit dskv_device_open(const struct dskv_device_options *options, struct dskv_device **device,
                                struct dskv_error *error)
{
    const char *kind = options->kind ? options->kind : "auto";
    int is_auto = strcmp(kind, "auto") == 0;
    *device = NULL;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (is_auto ? !kinds[i].open || !kinds[i].present() : strcmp(kind, kinds[i].kind) != 0)
            continue;
        if (!kinds[i].open)
            return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "this build has no %s device", kinds[i].name);
        enum dskv_exit code = kinds[i].open(options, device, error);
        if (code == DSKV_EXIT_OK)
            (*device)->trace = options->trace;
        return code;
    }
    return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "there is no device \"%s\"; valid are auto, cpu and cuda", kind);
}

void dskv_device_close(struct dskv_device **device)
{
    if (*device)
        (*device)->table->close(*device);
    *device = NULL;
}

const char *dskv_device_kind(const struct dskv_device *device)
{
    return device->table->kind;
}

const char *dskv_device_name(const struct dskv_device *device)
{
    return device->name;
}

const char *dskv_device_numerics(const struct dskv_device *device)
{
    return device->table->numerics;
}

enum dskv_dtype dskv_device_activation_dtype(const struct dskv_device *device, enum dskv_dtype weights)
{
    return device->table->activation_dtype(weights);
}

enum dskv_code dskv_device_sync(struct dskv_device *device, struct dskv_error *error)
{
    return device->table->sync(device, error);
}

int64_t dskv_device_available(struct dskv_device *device)
{
    return device->table->available(device);
}

void *dskv_device_alloc(struct dskv_device *device, size_t bytes)
{
    return device->table->alloc(device, bytes);
}

void dskv_device_free(struct dskv_device *device, void *memory, size_t bytes)
{
    if (memory)
        device->table->free(device, memory, bytes);
}

void dskv_device_upload(struct dskv_device *device, void *dst, const void *src, size_t bytes)
{
    if (bytes)
        device->table->upload(device, dst, src, bytes);
}

void dskv_device_download(struct dskv_device *device, void *dst, const void *src, size_t bytes)
{
    if (bytes)
        device->table->download(device, dst, src, bytes);
}

int dskv_device_read(struct dskv_device *device, const void *memory, size_t bytes)
{
    DSKV_ASSERT(bytes % 16 == 0, "%zu bytes", bytes);
    if (!device->table->read)
        return 0;
    if (bytes)
        device->table->read(device, memory, bytes);
    return 1;
}

int dskv_device_is_host(const struct dskv_device *device)
{
    return device->table->is_host;
}

int32_t dskv_device_identity(const struct dskv_device *device)
{
    return device->table->identity ? device->table->identity(device) : 0;
}

void *dskv_device_queue(const struct dskv_device *device)
{
    return device->table->queue ? device->table->queue(device) : NULL;
}

size_t dskv_exchange_region_bytes(const struct dskv_device *device, int32_t n, size_t slot_bytes)
{
    DSKV_ASSERT(n >= 1 && n <= DSKV_MAX_PEERS && slot_bytes % 256 == 0, "%d peers, slots of %zu bytes", (int)n,
                slot_bytes);
    return device->table->exchange_bytes ? (size_t)(1 + n) * slot_bytes + device->table->exchange_bytes(n) : 0;
}

/* ---- the queue ---------------------------------------------------------------------------------- */

void *dskv_device_host_alloc(struct dskv_device *device, size_t bytes)
{
    return device->table->host_alloc ? device->table->host_alloc(device, bytes) : dskv_device_alloc(device, bytes);
}

void dskv_device_host_free(struct dskv_device *device, void *memory, size_t bytes)
{
    if (!device->table->host_free)
        dskv_device_free(device, memory, bytes);
    else if (memory)
        device->table->host_free(device, memory);
}

void dskv_device_fetch(struct dskv_device *device, void *dst, const void *src, size_t bytes)
{
    if (bytes && device->table->fetch)
        device->table->fetch(device, dst, src, bytes);
    else if (bytes)
        memcpy(dst, src, bytes);
}

dskv_mark dskv_device_mark(struct dskv_device *device)
{
    return device->table->mark ? device->table->mark(device) : 0;
}

int dskv_device_reached(struct dskv_device *device, dskv_mark mark)
{
    return device->table->reached ? device->table->reached(device, mark) : 1;
}

enum dskv_code dskv_device_wait(struct dskv_device *device, dskv_mark mark, struct dskv_error *error)
{
    return device->table->wait ? device->table->wait(device, mark, error) : DSKV_OK;
}

int dskv_device_record_begin(struct dskv_device *device)
{
    if (!device->table->record_begin || device->trace) /* a trace reads after every operation */
        return 0;
    device->table->record_begin(device);
    return 1;
}

struct dskv_recording *dskv_device_record_end(struct dskv_device *device)
{
    return device->table->record_end(device);
}

void dskv_device_replay(struct dskv_device *device, const struct dskv_recording *recording)
{
    device->table->replay(device, recording);
}

void dskv_recording_close(struct dskv_device *device, struct dskv_recording **recording)
{
    if (*recording)
        device->table->recording_close(device, *recording);
    *recording = NULL;
}

/* ---- weights ------------------------------------------------------------------------------------ */

struct dskv_weight *dskv_weight_open(struct dskv_device *device, int64_t n, int64_t k, enum dskv_dtype dtype)
{
    DSKV_ASSERT(n >= 0 && k >= 0 && dtype <= DSKV_BF16, "n %lld, k %lld, dtype %d", (long long)n, (long long)k,
                (int)dtype);
    struct dskv_weight *weight = dskv_calloc(1, sizeof *weight);
    *weight = (struct dskv_weight){.n = n, .k = k, .dtype = dtype, .bytes = device->table->weight_bytes(n, k, dtype)};
    weight->data = device->table->weight_alloc(device, weight->bytes);
    if (!weight->data) {
        free(weight);
        return NULL;
    }
    return weight;
}

void dskv_weight_close(struct dskv_device *device, struct dskv_weight **weight)
{
    if (*weight)
        dskv_device_free(device, (*weight)->data, (*weight)->bytes);
    free(*weight);
    *weight = NULL;
}

void dskv_weight_fill(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                      const void *rows, enum dskv_dtype dtype)
{
    DSKV_ASSERT(first >= 0 && n_rows >= 0 && first <= weight->n - n_rows, "rows [%lld, + %lld) of %lld",
                (long long)first, (long long)n_rows, (long long)weight->n);
    DSKV_ASSERT(dtype <= DSKV_BF16, "dtype %d", (int)dtype);
    if (n_rows > 0 && weight->k > 0)
        device->table->weight_fill(device, weight, first, n_rows, rows, dtype);
}

int dskv_weight_fill_noise(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                           uint64_t seed, int64_t first_output, int64_t first_input)
{
    DSKV_ASSERT(first >= 0 && n_rows >= 0 && first <= weight->n - n_rows, "rows [%lld, + %lld) of %lld",
                (long long)first, (long long)n_rows, (long long)weight->n);
    if (!device->table->weight_fill_noise)
        return 0;
    if (n_rows > 0 && weight->k > 0)
        device->table->weight_fill_noise(device, weight, first, n_rows, seed, first_output, first_input);
    return 1;
}

int64_t dskv_weight_n(const struct dskv_weight *weight)
{
    return weight->n;
}

int64_t dskv_weight_k(const struct dskv_weight *weight)
{
    return weight->k;
}

size_t dskv_weight_bytes(const struct dskv_weight *weight)
{
    return weight->bytes;
}
