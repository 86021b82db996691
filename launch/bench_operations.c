/* dskv-bench --operations: each operation of a layer, and those on logits, alone on the device.
 *
 * A matmul goes round over copies of its weight and attention over sequences, more of them than any cache holds, as a
 * step does; what the operation before would just have written is near, as it is in a step.  Calls are recorded where
 * the device can, so that its time is measured and not its host's.
 */
#include "bench_bed.h"

#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_COLD_BYTES ((size_t)512 << 20) /* ten times what a GPU's cache holds */
#define HOST_COLD_BYTES ((size_t)128 << 20)
enum { N_REPLAYS = 4 }; /* before each wait */

struct cost {
    double bytes, flops; /* that it must move, and compute as products */
};

struct operation {
    const char *name;
    int32_t most_rows; /* 0: any */
    /* Of its weight; null: it has none. */
    void (*weight)(const struct dskv_bench_bed *bed, int64_t *n, int64_t *k);
    /* Queues call number i. */
    void (*queue)(struct dskv_bench_bed *bed, int32_t rows, int i);
    struct cost (*cost)(const struct dskv_bench_bed *bed, int32_t rows);
};

/* ---- products ---------------------------------------------------------------------------------------------------- */

static struct dskv_tensor rows_of(const struct dskv_bench_bed *bed, void *data, int32_t rows, int64_t cols)
{
    return dskv_tensor(data, bed->activation, rows, cols);
}

static void multiply(struct dskv_bench_bed *bed, int32_t rows, int i, char *x, struct dskv_tensor y)
{
    const struct dskv_weight *w = bed->copies[i % bed->n_copies];
    dskv_op_matmul(bed->device, &(struct dskv_matmul){.x = rows_of(bed, x, rows, dskv_weight_k(w)), .w = w, .y = y});
}

static struct cost cost_of_matmul(const struct dskv_bench_bed *bed, int32_t rows, int64_t n, int64_t k,
                                  enum dskv_dtype out)
{
    double element = (double)dskv_dtype_bytes(bed->activation), cells = (double)n * (double)k;
    return (struct cost){cells * (double)dskv_dtype_bytes(bed->weight_dtype) +
                             rows * ((double)k * element + (double)n * (double)dskv_dtype_bytes(out)),
                         2 * rows * cells};
}

/* name_weight, name_queue and name_cost of a product of the layer. */
#define PRODUCT(name, outputs, inputs, from, to)                                                                       \
    static void name##_weight(const struct dskv_bench_bed *bed, int64_t *n, int64_t *k)                                \
    {                                                                                                                  \
        *n = outputs;                                                                                                  \
        *k = inputs;                                                                                                   \
    }                                                                                                                  \
    static void name##_queue(struct dskv_bench_bed *bed, int32_t rows, int i)                                          \
    {                                                                                                                  \
        multiply(bed, rows, i, from, rows_of(bed, to, rows, outputs));                                                 \
    }                                                                                                                  \
    static struct cost name##_cost(const struct dskv_bench_bed *bed, int32_t rows)                                     \
    {                                                                                                                  \
        return cost_of_matmul(bed, rows, outputs, inputs, bed->activation);                                            \
    }
PRODUCT(qkv, bed->q_cols + 2 * bed->kv_cols, bed->model->width, bed->h, bed->wide)
PRODUCT(o, bed->model->width, bed->q_cols, bed->narrow, bed->y)
PRODUCT(down, bed->model->width, bed->model->mlp, bed->narrow, bed->y)

static void head_weight(const struct dskv_bench_bed *bed, int64_t *n, int64_t *k)
{
    *n = bed->model->vocab;
    *k = bed->model->width;
}
static void head_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    multiply(bed, rows, i, bed->h, dskv_tensor(bed->logits, DSKV_F32, rows, bed->model->vocab));
}
static struct cost head_cost(const struct dskv_bench_bed *bed, int32_t rows)
{
    return cost_of_matmul(bed, rows, bed->model->vocab, bed->model->width, DSKV_F32);
}

/* ---- the rest of a layer ----------------------------------------------------------------------------------------- */

static struct cost moves(double elements, enum dskv_dtype dtype)
{
    return (struct cost){elements * (double)dskv_dtype_bytes(dtype), 0};
}

static void write_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    const struct dskv_model *m = bed->model;
    struct dskv_tensor qkv = rows_of(bed, bed->wide, rows, bed->q_cols + 2 * bed->kv_cols);
    struct dskv_kv_write write = {.kv = dskv_bench_bed_pool(bed),
                                  .layer = i % dskv_bench_bed_pool(bed).n_layers,
                                  .slots = bed->slots,
                                  .k = dskv_tensor_cols(qkv, bed->q_cols, bed->kv_cols),
                                  .v = dskv_tensor_cols(qkv, bed->q_cols + bed->kv_cols, bed->kv_cols)};
    struct dskv_rope rope = {.style = m->rope_style,
                             .positions = bed->positions,
                             .cos = bed->rope_cos,
                             .sin = bed->rope_sin,
                             .rotary_dim = m->rotary_dim,
                             .head_dim = m->head_dim,
                             .n_heads = m->n_heads + m->n_kv_heads,
                             .x = dskv_tensor_cols(qkv, 0, bed->q_cols + bed->kv_cols)};
    if (m->positions == DSKV_POSITIONS_ROTARY)
        dskv_op_rope_kv_write(bed->device, &(struct dskv_rope_kv_write){rope, write});
    else
        dskv_op_kv_write(bed->device, &write);
}
static struct cost write_cost(const struct dskv_bench_bed *bed, int32_t rows)
{
    int is_rotated = bed->model->positions == DSKV_POSITIONS_ROTARY;
    double rotated = is_rotated ? 2 * (double)(bed->q_cols + bed->kv_cols) : (double)bed->kv_cols;
    double read = moves(rows * (rotated + (double)bed->kv_cols), bed->activation).bytes;
    return (struct cost){read + moves(rows * 2.0 * (double)bed->kv_cols, bed->kv_dtype).bytes, 0};
}

static void attend(struct dskv_bench_bed *bed, int32_t rows, int layer, const struct dskv_attention_work *work,
                   int32_t n_work)
{
    const struct dskv_model *m = bed->model;
    struct dskv_attention p = {.kv = dskv_bench_bed_pool(bed),
                               .layer = layer,
                               .scale = 0.088f,
                               .n_heads_local = m->n_heads,
                               .kv_head_of_head = bed->kv_head_of_head,
                               .work = work,
                               .n_work = n_work,
                               .max_keys = bed->context + rows / n_work,
                               .tables = bed->tables,
                               .q = rows_of(bed, bed->wide, rows, bed->q_cols),
                               .out = rows_of(bed, bed->narrow, rows, bed->q_cols)};
    dskv_op_attention(bed->device, &p);
}
static struct cost attention_cost(const struct dskv_bench_bed *bed, double rows_each, double n_sequences)
{
    double q = (double)bed->q_cols, keys = rows_each * (bed->context + (rows_each + 1) / 2);
    double kv = moves(2.0 * (double)bed->kv_cols * (bed->context + rows_each), bed->kv_dtype).bytes;
    return (struct cost){n_sequences * (kv + moves(2 * q * rows_each, bed->activation).bytes),
                         n_sequences * 4 * q * keys};
}

/* The next sequence, or group of as many as there are rows, each time; on the other layer when all had their turn. */
static void one_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    attend(bed, rows, i / bed->batch % dskv_bench_bed_pool(bed).n_layers, bed->one + i % bed->batch, 1);
}
static struct cost one_cost(const struct dskv_bench_bed *bed, int32_t rows)
{
    return attention_cost(bed, rows, 1);
}
static void many_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    int32_t n_groups = bed->batch / rows;
    attend(bed, rows, i / n_groups % dskv_bench_bed_pool(bed).n_layers, bed->many + i % n_groups * rows, rows);
}
static struct cost many_cost(const struct dskv_bench_bed *bed, int32_t rows)
{
    return attention_cost(bed, 1, rows);
}

static void residual_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    int64_t width = bed->model->width;
    (void)i;
    struct dskv_residual residual = {rows_of(bed, bed->x, rows, width), rows_of(bed, bed->y, rows, width), NULL};
    struct dskv_norm norm = {.kind = bed->model->norm,
                             .eps = 1e-5f,
                             .x = residual.x,
                             .weight = bed->norm_weight,
                             .bias = bed->model->norm == DSKV_LAYER_NORM ? bed->norm_weight : NULL,
                             .out = rows_of(bed, bed->h, rows, width)};
    dskv_op_residual_norm(bed->device, &(struct dskv_residual_norm){residual, norm});
}
static struct cost residual_cost(const struct dskv_bench_bed *bed, int32_t rows)
{
    return moves(4.0 * rows * bed->model->width, bed->activation);
}

static void up_weight(const struct dskv_bench_bed *bed, int64_t *n, int64_t *k)
{
    *n = bed->up_cols;
    *k = bed->model->width;
}
static void up_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    struct dskv_tensor up = rows_of(bed, bed->wide, rows, bed->up_cols);
    struct dskv_matmul_activate p = {
        .matmul = {rows_of(bed, bed->h, rows, bed->model->width), bed->copies[i % bed->n_copies], NULL, up},
        .activate = {bed->model->activation, bed->model->gated, up, rows_of(bed, bed->narrow, rows, bed->model->mlp)}};
    dskv_op_matmul_activate(bed->device, &p);
}
/* Its inner result need not move. */
static struct cost up_cost(const struct dskv_bench_bed *bed, int32_t rows)
{
    struct cost cost = cost_of_matmul(bed, rows, bed->up_cols, bed->model->width, bed->activation);
    cost.bytes -= moves((double)rows * (double)(bed->up_cols - bed->model->mlp), bed->activation).bytes;
    return cost;
}

/* ---- logits ------------------------------------------------------------------------------------------------------ */

static struct dskv_tensor logits_of(const struct dskv_bench_bed *bed, int32_t rows)
{
    return dskv_tensor(bed->logits, DSKV_F32, rows, bed->model->vocab);
}
static struct cost logits_cost(const struct dskv_bench_bed *bed, int32_t rows)
{
    return moves((double)rows * bed->model->vocab, DSKV_F32);
}
static void select_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    (void)i;
    dskv_op_select(bed->device, &(struct dskv_select){.logits = logits_of(bed, rows),
                                                      .vocab = bed->model->vocab,
                                                      .targets = bed->targets,
                                                      .stats = bed->stats});
}
static void plain_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    (void)i;
    dskv_op_sample(bed->device, &(struct dskv_sample){logits_of(bed, rows), bed->plain, bed->ids, bed->scratch});
}
static void filtered_queue(struct dskv_bench_bed *bed, int32_t rows, int i)
{
    (void)i;
    dskv_op_sample(bed->device, &(struct dskv_sample){logits_of(bed, rows), bed->filtered, bed->ids, bed->scratch});
}

static const struct operation operations[] = {
    {"qkv", 0, qkv_weight, qkv_queue, qkv_cost},
    {"rotary, kv write", 0, NULL, write_queue, write_cost},
    {"attention, one sequence", 0, NULL, one_queue, one_cost},
    {"attention, a sequence a row", DSKV_BENCH_LOGIT_ROWS, NULL, many_queue, many_cost},
    {"o", 0, o_weight, o_queue, o_cost},
    {"residual, norm", 0, NULL, residual_queue, residual_cost},
    {"up, activate", 0, up_weight, up_queue, up_cost},
    {"down", 0, down_weight, down_queue, down_cost},
    {"head", DSKV_BENCH_LOGIT_ROWS, head_weight, head_queue, head_cost},
    {"select", DSKV_BENCH_LOGIT_ROWS, NULL, select_queue, logits_cost},
    {"sample", DSKV_BENCH_LOGIT_ROWS, NULL, plain_queue, logits_cost},
    {"sample, top-k and top-p", DSKV_BENCH_LOGIT_ROWS, NULL, filtered_queue, logits_cost},
};

_Static_assert(sizeof operations / sizeof *operations * DSKV_BENCH_N_ROWS <= DSKV_BENCH_MAX_OPERATIONS,
               "a report holds every operation");

/* ---- measuring --------------------------------------------------------------------------------------------------- */

static void close_copies(struct dskv_bench_bed *bed)
{
    for (int i = 0; i < bed->n_copies; i++)
        dskv_weight_close(bed->device, &bed->copies[i]);
    bed->n_copies = 0;
}

static void fill_weight(const struct dskv_bench_bed *bed, struct dskv_weight *weight, int copy)
{
    int64_t n = dskv_weight_n(weight), k = dskv_weight_k(weight), step = (int64_t)DSKV_BENCH_PATTERN_ELEMENTS / k;
    if (dskv_weight_fill_noise(bed->device, weight, 0, n, (uint64_t)copy, 0, 0))
        return;
    float *rows = dskv_calloc((size_t)(step * k), sizeof *rows);
    uint32_t state = (uint32_t)copy;
    dskv_bench_fill_random(&state, rows, (size_t)(step * k));
    for (int64_t first = 0; first < n; first += step)
        dskv_weight_fill(bed->device, weight, first, n - first < step ? n - first : step, rows, DSKV_F32);
    free(rows);
}

static enum dskv_exit open_copies(struct dskv_bench_bed *bed, const struct operation *operation,
                                  struct dskv_error *error)
{
    int64_t n, k;
    if (!operation->weight)
        return DSKV_EXIT_OK;
    operation->weight(bed, &n, &k);
    size_t cold_bytes = bed->report->machine.is_host ? HOST_COLD_BYTES : DEVICE_COLD_BYTES;
    size_t bytes = (size_t)n * (size_t)k * dskv_dtype_bytes(bed->weight_dtype);
    size_t n_copies = (cold_bytes + bytes - 1) / bytes;
    for (; bed->n_copies < (int)n_copies && bed->n_copies < DSKV_BENCH_MAX_COPIES; bed->n_copies++) {
        struct dskv_weight *weight = dskv_weight_open(bed->device, n, k, bed->weight_dtype);
        if (!weight)
            return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes of weights", bytes);
        fill_weight(bed, weight, bed->n_copies);
        bed->copies[bed->n_copies] = weight;
    }
    return DSKV_EXIT_OK;
}

/* Some calls, in order, as they are timed together. */
struct calls {
    struct dskv_bench_bed *bed;
    const struct operation *operation;
    int32_t rows;
    int n;
    struct dskv_recording *recording; /* null: the device has none */
};

static void queue(const struct calls *calls)
{
    for (int i = 0; i < calls->n; i++)
        calls->operation->queue(calls->bed, calls->rows, i);
}

/* Seconds of one call. */
static double time_once(const struct calls *calls)
{
    struct dskv_device *device = calls->bed->device;
    int n_replays = calls->recording ? N_REPLAYS : 1;
    double begin = dskv_bench_seconds();
    for (int i = 0; i < n_replays; i++)
        if (calls->recording)
            dskv_device_replay(device, calls->recording);
        else
            queue(calls);
    dskv_device_sync(device, NULL); /* a failed device shows at the end */
    return (dskv_bench_seconds() - begin) / n_replays / calls->n;
}

/* As many calls as take some milliseconds. */
static int count_calls(struct calls *calls, int is_host)
{
    calls->n = 2;
    time_once(calls); /* warms up */
    double most = is_host ? 0.02 : 0.004, n = most / time_once(calls);
    return n < (is_host ? 1 : 8) ? (is_host ? 1 : 8) : n > 256 ? 256 : (int)n;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct dskv_bench_bed *bed, const struct operation *operation, int32_t rows)
{
    struct dskv_bench_report *report = bed->report;
    struct dskv_bench_operation *measured = &report->operations[report->n_operations++];
    const struct dskv_bench_machine *machine = &report->machine;
    int n_iterations = report->options->iterations;
    double *times = dskv_calloc((size_t)n_iterations, sizeof *times);
    struct calls calls = {bed, operation, rows, 0, NULL};
    calls.n = count_calls(&calls, machine->is_host);
    if (dskv_device_record_begin(bed->device)) {
        queue(&calls);
        calls.recording = dskv_device_record_end(bed->device);
    }
    time_once(&calls);
    for (int i = 0; i < n_iterations; i++)
        times[i] = time_once(&calls);
    dskv_recording_close(bed->device, &calls.recording);
    qsort(times, (size_t)n_iterations, sizeof *times, by_size);
    struct cost cost = operation->cost(bed, rows);
    double reading = cost.bytes / machine->read_bytes_s, multiplying = cost.flops / machine->matmul_flops_s;
    *measured = (struct dskv_bench_operation){.name = operation->name,
                                              .rows = rows,
                                              .median_s = times[n_iterations / 2],
                                              .bytes = cost.bytes,
                                              .flops = cost.flops,
                                              .floor_s = reading > multiplying ? reading : multiplying};
    free(times);
}

static enum dskv_exit measure_all(struct dskv_bench_bed *bed, struct dskv_error *error)
{
    const int32_t rows[DSKV_BENCH_N_ROWS] = {1, 8, 16, 32, 64, bed->most_rows};
    enum dskv_exit code = DSKV_EXIT_OK;
    for (size_t i = 0; i < sizeof operations / sizeof *operations && !code; i++) {
        const struct operation *operation = &operations[i];
        int32_t most = operation->queue == many_queue ? bed->batch : operation->most_rows;
        code = open_copies(bed, operation, error);
        for (int r = 0; r < DSKV_BENCH_N_ROWS && !code; r++) {
            if ((most && rows[r] > most) || rows[r] > bed->most_rows || (r && rows[r] <= rows[r - 1]))
                continue;
            dskv_bench_bed_set_rows(bed, rows[r]);
            measure(bed, operation, rows[r]);
            if (dskv_device_sync(bed->device, error))
                code = DSKV_EXIT_DEVICE;
        }
        close_copies(bed);
    }
    return code;
}

enum dskv_exit dskv_bench_operations_run(const struct dskv_device_options *options, const struct dskv_model *model,
                                         enum dskv_dtype dtype, struct dskv_bench_report *report,
                                         struct dskv_engine_info *info, struct dskv_error *error)
{
    struct dskv_bench_bed bed = {.model = model,
                                 .report = report,
                                 .weight_dtype = dtype,
                                 .context = report->options->context,
                                 .batch = report->options->batch,
                                 .most_rows = report->options->prefill,
                                 .q_cols = (int64_t)model->n_heads * model->head_dim,
                                 .kv_cols = (int64_t)model->n_kv_heads * model->head_dim,
                                 .up_cols = (int64_t)model->mlp * (model->gated ? 2 : 1)};
    enum dskv_exit code = dskv_device_open(options, &bed.device, error);
    if (code)
        return code;
    enum dskv_dtype kv = dskv_dtype_from_name(report->options->kv_dtype);
    bed.activation = dskv_device_activation_dtype(bed.device, dtype);
    bed.kv_dtype = kv < DSKV_N_DTYPES ? kv : dskv_device_is_host(bed.device) ? DSKV_F32 : dtype;
    *info = (struct dskv_engine_info){.model = *model,
                                      .n_ranks = 1,
                                      .weight_dtype = dtype,
                                      .activation_dtype = bed.activation,
                                      .kv_dtype = bed.kv_dtype};
    snprintf(info->device, sizeof info->device, "%s", dskv_device_name(bed.device));
    report->info = info;
    report->context = bed.context;
    report->prefill = bed.most_rows;
    code = dskv_bench_bed_open(&bed, error);
    if (!code)
        code = measure_all(&bed, error);
    dskv_bench_bed_close(&bed);
    dskv_device_close(&bed.device);
    return code;
}
