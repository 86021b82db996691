/* Device (private): what a device must bring, as two tables.  ops.c and device.c are the only callers.
 *
 * A device is its functions (memory, weights, waiting) and its operations.  The CPU has one table of functions and one
 * table of operations per vector path; a CUDA device brings one of each.  The wrappers have checked every shape before
 * a table is called, and never call one for an operation with nothing to write.
 */
#ifndef DSKV_KERNELS_DEVICE_H
#define DSKV_KERNELS_DEVICE_H

#include "kernels/ops.h"

struct dskv_op_table {
    void (*embed)(struct dskv_device *device, const struct dskv_embed *p);
    void (*norm)(struct dskv_device *device, const struct dskv_norm *p);
    void (*matmul)(struct dskv_device *device, const struct dskv_matmul *p);
    void (*rope)(struct dskv_device *device, const struct dskv_rope *p);
    void (*kv_write)(struct dskv_device *device, const struct dskv_kv_write *p);
    void (*attention)(struct dskv_device *device, const struct dskv_attention *p);
    void (*rope_kv_write)(struct dskv_device *device, const struct dskv_rope_kv_write *p); /* null: the two */
    void (*activate)(struct dskv_device *device, const struct dskv_activate *p);
    void (*matmul_activate)(struct dskv_device *device, const struct dskv_matmul_activate *p); /* null: the two */
    void (*residual)(struct dskv_device *device, const struct dskv_residual *p);
    void (*residual_norm)(struct dskv_device *device, const struct dskv_residual_norm *p); /* null: the two */
    void (*sum)(struct dskv_device *device, const struct dskv_sum *p);
    void (*gather_rows)(struct dskv_device *device, const struct dskv_gather_rows *p);
    void (*select)(struct dskv_device *device, const struct dskv_select *p);
    void (*choose)(struct dskv_device *device, const struct dskv_choose *p);
    void (*sample)(struct dskv_device *device, const struct dskv_sample *p);
    void (*kv_copy)(struct dskv_device *device, const struct dskv_kv_copy *p);
    void (*receive)(struct dskv_device *device, const struct dskv_receive *p);
    void (*report)(struct dskv_device *device, const struct dskv_report *p);
    void (*kv_gather)(struct dskv_device *device, const struct dskv_kv_dense *p);
    void (*kv_scatter)(struct dskv_device *device, const struct dskv_kv_dense *p);
    /* Between devices; all null where they cannot reach each other's memory. */
    void (*exchange_gather)(struct dskv_device *device, const struct dskv_exchange_gather *p);
    void (*exchange_add)(struct dskv_device *device, const struct dskv_exchange_add *p);
    int (*exchange_residual_norm)(struct dskv_device *device,
                                  const struct dskv_exchange_residual_norm *p); /* 0: the two serve this shape */
};

struct dskv_device_table {
    const char *kind;     /* "cpu" */
    const char *numerics; /* see dskv_device_numerics */
    int is_host;          /* device memory is host memory */
    enum dskv_dtype (*activation_dtype)(enum dskv_dtype weights);
    void (*close)(struct dskv_device *device);
    enum dskv_code (*sync)(struct dskv_device *device, struct dskv_error *error);
    int64_t (*available)(struct dskv_device *device);
    void *(*alloc)(struct dskv_device *device, size_t bytes);
    void (*free)(struct dskv_device *device, void *memory, size_t bytes);
    void (*upload)(struct dskv_device *device, void *dst, const void *src, size_t bytes);
    void (*download)(struct dskv_device *device, void *dst, const void *src, size_t bytes);
    size_t (*weight_bytes)(int64_t n, int64_t k, enum dskv_dtype dtype);
    void *(*weight_alloc)(struct dskv_device *device, size_t bytes); /* as alloc; freed with free */
    void (*weight_fill)(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                        const void *rows, enum dskv_dtype dtype);
    /* Of several processes' devices; null where every process has its own. */
    int32_t (*identity)(const struct dskv_device *device);
    void *(*queue)(const struct dskv_device *device);
    size_t (*exchange_bytes)(int32_t n); /* of a region, behind slot and parts */
    /* For measurements; null where the host is as good. */
    void (*weight_fill_noise)(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                              uint64_t seed, int64_t first_output, int64_t first_input);
    void (*read)(struct dskv_device *device, const void *memory, size_t bytes);
    /* The queue; all null when operations run as they are called. */
    void *(*host_alloc)(struct dskv_device *device, size_t bytes);
    void (*host_free)(struct dskv_device *device, void *memory);
    void (*fetch)(struct dskv_device *device, void *dst, const void *src, size_t bytes);
    dskv_mark (*mark)(struct dskv_device *device);
    int (*reached)(struct dskv_device *device, dskv_mark mark);
    enum dskv_code (*wait)(struct dskv_device *device, dskv_mark mark, struct dskv_error *error);
    void (*record_begin)(struct dskv_device *device);
    struct dskv_recording *(*record_end)(struct dskv_device *device);
    void (*replay)(struct dskv_device *device, const struct dskv_recording *recording);
    void (*recording_close)(struct dskv_device *device, struct dskv_recording *recording);
};

/* A device's own struct begins with this. */
struct dskv_device {
    const struct dskv_device_table *table;
    const struct dskv_op_table *ops;
    char name[64];
    int trace;
    uint64_t n_traced; /* operations printed so far */
};

struct dskv_weight {
    int64_t n, k;
    enum dskv_dtype dtype;
    size_t bytes;
    void *data; /* device memory in the device's own layout; zeroed when made */
};

/* cpu/device.c.  The caller fills `trace`. */
enum dskv_exit dskv_cpu_open(const struct dskv_device_options *options, struct dskv_device **device,
                             struct dskv_error *error);

/* cuda/device.c, in builds with CUDA.  Present: a driver and at least one GPU. */
int dskv_cuda_present(void);
enum dskv_exit dskv_cuda_open(const struct dskv_device_options *options, struct dskv_device **device,
                              struct dskv_error *error);

#endif
