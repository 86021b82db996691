/* Sums: what the ranks' sums cost, without a model.
 *
 * Opens a device and a comm as the engine does and times sums of [rows, width] over all ranks, alone and with the
 * residual and the norm behind them; where NCCL connects the GPUs, its own sums too.  Recorded where the device
 * records.
 */
#ifndef DSKV_PARALLEL_SUMS_H
#define DSKV_PARALLEL_SUMS_H

#include "base/dtype.h"
#include "base/status.h"

struct dskv_sums_options {
    const char *device; /* "auto", "cpu", "cuda" */
    const char *comm;   /* an implementation by its name; null: the first that serves */
    int share_gpu;
    enum dskv_dtype dtype; /* of activations; the CPU's are f32 whatever is asked */
    int32_t width;
};

/* One size; medians in microseconds of one of many in a row.  0: not measured here. */
struct dskv_sums_point {
    int64_t rows;
    size_t bytes;
    double sum_us;        /* the sum */
    double add_us;        /* the sum, the residual and the norm */
    double then_us;       /* the residual and the norm alone */
    double nccl_us;       /* ncclAllReduce */
    double nccl_add_us;   /* ... and the residual and the norm behind it */
    double window_us;     /* ncclAllReduce in memory that all ranks reach */
    double window_add_us; /* ... and the residual and the norm behind it */
    int64_t n_differing;  /* values of sum or norm that differ from the same rows' among the most rows, all ranks */
};

enum { DSKV_SUMS_POINTS = 10 };
struct dskv_sums_report {
    char comm[16], device[64];
    enum dskv_dtype dtype;
    int n_points;
    struct dskv_sums_point points[DSKV_SUMS_POINTS]; /* 8 KB, 16 KB ... 4 MB, those of whole rows */
};

/* Collective, between dskv_parallel_start and dskv_parallel_stop; every rank gets its own times. */
enum dskv_exit dskv_sums_measure(const struct dskv_sums_options *options, struct dskv_sums_report *report,
                                 struct dskv_error *error);

#endif
