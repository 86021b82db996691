/* The bed of dskv-bench --operations: a device, with all that an operation reads and writes, for one layer of a model.
 *
 * Owns the buffers' places and what they are filled with; knows no operation.
 */
#ifndef DSKV_LAUNCH_BENCH_BED_H
#define DSKV_LAUNCH_BENCH_BED_H

#include "bench.h"

#include "kernels/ops.h"

#define DSKV_BENCH_PATTERN_ELEMENTS ((size_t)1 << 20) /* of what buffers are filled with, again and again */
enum {
    DSKV_BENCH_MAX_COPIES = 128,
    DSKV_BENCH_LOGIT_ROWS = 64, /* the most that are selected from at a time */
};

struct dskv_bench_bed {
    struct dskv_device *device;
    const struct dskv_model *model;
    struct dskv_bench_report *report;
    enum dskv_dtype weight_dtype, activation, kv_dtype;
    int32_t context, batch, most_rows, blocks_each; /* blocks of one sequence */
    int64_t q_cols, kv_cols, up_cols;
    struct dskv_weight *copies[DSKV_BENCH_MAX_COPIES]; /* of the operation at hand */
    int n_copies;
    char *memory; /* all buffers below, one device allocation */
    size_t memory_bytes;
    char *x, *y, *h, *wide, *narrow, *kv;
    float *logits, *norm_weight, *rope_cos, *rope_sin;
    int32_t *positions, *slots, *tables, *kv_head_of_head, *targets, *ids;
    struct dskv_attention_work *one, *many; /* [batch]: runs of `rows` tokens of one sequence; a token of each */
    struct dskv_sampling *plain, *filtered; /* [DSKV_BENCH_LOGIT_ROWS] */
    struct dskv_row_stats *stats;
    char *scratch;
};

/* Places and fills the buffers; the fields up to up_cols are set.  DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_bench_bed_open(struct dskv_bench_bed *bed, struct dskv_error *error);
void dskv_bench_bed_close(struct dskv_bench_bed *bed);
/* What depends on the number of rows: positions, slots, runs of tokens. */
void dskv_bench_bed_set_rows(const struct dskv_bench_bed *bed, int32_t rows);
struct dskv_kv dskv_bench_bed_pool(const struct dskv_bench_bed *bed);

#endif
