/* Checksums of what operations wrote. */
#include "kernels/trace.h"

#include <inttypes.h>
#include <stdio.h>

enum { STAGE = 4096 };

/* FNV-1a over device memory, staged through the host. */
static uint64_t hash_bytes(struct dskv_device *device, uint64_t hash, const void *data, size_t bytes)
{
    unsigned char stage[STAGE];
    for (size_t done = 0; done < bytes; done += STAGE) {
        size_t n = bytes - done < STAGE ? bytes - done : STAGE;
        dskv_device_download(device, stage, (const char *)data + done, n);
        for (size_t i = 0; i < n; i++)
            hash = (hash ^ stage[i]) * 0x100000001b3u;
    }
    return hash;
}

static const uint64_t hash_start = 0xcbf29ce484222325u;

void dskv_trace_tensor(struct dskv_device *device, const char *operation, const struct dskv_tensor *t)
{
    dskv_device_sync(device, NULL); /* a failed device shows in the caller's own sync */
    uint64_t hash = hash_start;
    size_t bytes = dskv_dtype_bytes(t->dtype);
    for (int64_t r = 0; r < t->rows; r++)
        hash =
            hash_bytes(device, hash, (const char *)t->data + (size_t)(r * t->stride) * bytes, (size_t)t->cols * bytes);
    fprintf(stderr, "trace %06" PRIu64 " %s %s [%" PRId64 ", %" PRId64 "] %016" PRIx64 "\n", device->n_traced++,
            operation, dskv_dtype_name(t->dtype), t->rows, t->cols, hash);
}

void dskv_trace_bytes(struct dskv_device *device, const char *operation, const void *data, size_t bytes)
{
    dskv_device_sync(device, NULL);
    fprintf(stderr, "trace %06" PRIu64 " %s [%zu bytes] %016" PRIx64 "\n", device->n_traced++, operation, bytes,
            hash_bytes(device, hash_start, data, bytes));
}
