/* dskv-bench: how fast this machine runs a model, as fractions of what it could.
 *
 *     dskv-bench --dtype f16 --threads 2
 *     mpirun -np 2 dskv-bench --dtype f16 --threads 1
 *
 * Runs plans on the engine directly, without a client or a scheduler.  The ceilings (read bandwidth, matmul rate) are
 * measured in the same run by the same ranks and threads, before the model is opened.
 */
#include "bench.h"
#include "bench_common.h"

#include "base/log.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* What to run: a model's directory, or one made for a shape. */
struct source {
    const char *directory;
    char made[64];
    struct dskv_model model;
    enum dskv_dtype dtype;  /* of the weights as held */
    double weight_bytes;    /* about: to stream as many */
    int64_t kv_token_bytes; /* at most, of all layers */
};

static struct dskv_model shaped_model(const struct dskv_bench_shape *shape)
{
    return (struct dskv_model){.stored_dtype = shape->dtype,
                               .gated = !shape->is_gpt2,
                               .norm = shape->is_gpt2 ? DSKV_LAYER_NORM : DSKV_RMS_NORM,
                               .activation = shape->is_gpt2 ? DSKV_GELU_TANH : DSKV_SILU,
                               .positions = shape->is_gpt2 ? DSKV_POSITIONS_LEARNED : DSKV_POSITIONS_ROTARY,
                               .rotary_dim = shape->is_gpt2 ? 0 : shape->head_dim,
                               .n_layers = shape->n_layers,
                               .width = shape->width,
                               .n_heads = shape->n_heads,
                               .n_kv_heads = shape->n_kv_heads,
                               .head_dim = shape->head_dim,
                               .mlp = shape->mlp,
                               .vocab = shape->vocab};
}

static enum dskv_exit open_source(const struct dskv_bench_options *options, struct source *source,
                                  struct dskv_error *error)
{
    struct dskv_model model = {0};
    int32_t max_model_len = 0;
    enum dskv_exit code;
    if (options->model) {
        source->directory = options->model;
        code = dskv_model_check(options->model, &max_model_len, &model, error);
    } else {
        const struct dskv_bench_shape *shape = dskv_bench_shape_find(options->shape, NULL);
        model = shaped_model(shape);
        source->directory = source->made;
        code = dskv_bench_shape_write(shape, source->made, error);
    }
    source->model = model;
    enum dskv_dtype dtype = dskv_dtype_from_name(options->dtype);
    source->dtype = dtype < DSKV_N_DTYPES ? dtype : model.stored_dtype;
    double attention = (double)model.width * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads);
    double mlp = (double)model.width * model.mlp * (model.gated ? 3 : 2);
    double n_weights = (double)model.vocab * model.width + model.n_layers * (attention + mlp);
    source->weight_bytes = n_weights * (double)dskv_dtype_bytes(source->dtype);
    source->kv_token_bytes =
        (int64_t)model.n_layers * model.n_kv_heads * (2 * (int64_t)model.head_dim + 16) * (int64_t)sizeof(float);
    return code;
}

/* What was not asked for depends on the device: a GPU has room for more, and needs more to be busy. */
static void fill_defaults(const struct dskv_bench_machine *machine, struct dskv_bench_options *options)
{
    if (!options->context)
        options->context = machine->is_host ? 256 : 1024;
    if (!options->prefill)
        options->prefill = machine->is_host ? 512 : 2048;
    if (!options->batch)
        options->batch = machine->is_host ? 8 : 64;
}

/* Collective: the ceilings of whichever device the engine will take. */
static enum dskv_exit measure_machine(const struct dskv_bench_options *options, const struct source *source, int rank,
                                      int n_ranks, struct dskv_bench_machine *machine, struct dskv_error *error)
{
    struct dskv_device_options device = {.kind = options->device, .index = rank, .n_threads = options->threads};
    enum dskv_exit code =
        dskv_parallel_agree(dskv_bench_device_measure(&device, n_ranks, source->dtype, machine, error), error);
    if (!code && machine->is_host)
        code = dskv_parallel_agree(
            dskv_bench_host_measure(n_ranks, options->threads, source->weight_bytes, machine, error), error);
    return code;
}

static enum dskv_exit tell(const struct dskv_bench_report *report, struct dskv_error *error)
{
    dskv_bench_report_print(report);
    return report->options->json ? dskv_bench_report_write(report, report->options->json, error) : DSKV_EXIT_OK;
}

/* On all ranks: rank 0 measures, the others work for it. */
static enum dskv_exit run_engine(const struct source *source, int rank, struct dskv_bench_report *report,
                                 struct dskv_error *error)
{
    const struct dskv_bench_options *options = report->options;
    /* Whole blocks: the context, a verify and a block more for each sequence. */
    int64_t n_kv_tokens = (int64_t)options->batch * (options->context + 128) + options->prefill + 128;
    int32_t largest = options->prefill > 64 ? options->prefill : 64; /* a verify has a few tokens */
    struct dskv_engine_options engine_options = {
        .model_dir = source->directory,
        .device = options->device,
        .dtype = options->dtype,
        .kv_dtype = options->kv_dtype,
        .kv_cache_bytes = n_kv_tokens * source->kv_token_bytes,
        .max_batch_tokens = largest > options->batch ? largest : options->batch,
        .max_sequences = options->batch > 8 ? options->batch : 8,
        .block_tokens = 64,
        .n_threads = options->threads,
        .dummy_weights = options->model == NULL,
        .takes_references = 1,
        .free_order = options->any_order,
    };
    struct dskv_engine *engine = NULL;
    enum dskv_exit code = dskv_engine_open(&engine_options, &engine, error);
    if (code)
        return code;
    if (rank == 0) {
        report->info = dskv_engine_info(engine);
        code = dskv_bench_steps_run(engine, report, error);
        if (!code)
            code = tell(report, error);
    } else {
        code = dskv_engine_work(engine);
    }
    dskv_engine_close(&engine);
    return code;
}

static enum dskv_exit run_operations(const struct source *source, struct dskv_bench_report *report,
                                     struct dskv_error *error)
{
    const struct dskv_bench_options *options = report->options;
    struct dskv_device_options device = {
        .kind = options->device, .n_threads = options->threads, .free_order = options->any_order};
    struct dskv_engine_info info;
    enum dskv_exit code = dskv_bench_operations_run(&device, &source->model, source->dtype, report, &info, error);
    return code ? code : tell(report, error);
}

/* What can be refused only now that ranks and device are known. */
static enum dskv_exit check_place(const struct dskv_bench_options *options, const struct dskv_bench_machine *machine,
                                  int n_ranks, struct dskv_error *error)
{
    if (options->operations && n_ranks > 1)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--operations measures one rank, not %d", n_ranks);
    if (options->any_order && machine->is_host)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--any-order: a CPU's matmuls have one order only");
    return DSKV_EXIT_OK;
}

static enum dskv_exit bench(struct dskv_bench_options *options, struct dskv_error *error)
{
    int rank = 0, n_ranks = 1;
    enum dskv_exit code = dskv_parallel_start(&rank, &n_ranks, error);
    if (code)
        return code;
    dskv_log_open(options->any_order ? DSKV_LOG_INFO : DSKV_LOG_WARNING, rank); /* which orders were taken */
    if (!options->threads) {
        int32_t cores = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
        options->threads = cores > n_ranks ? cores / n_ranks : 1;
    }
    struct source source = {0};
    struct dskv_bench_report report = {.options = options};
    code = dskv_parallel_agree(open_source(options, &source, error), error);
    if (!code)
        code = measure_machine(options, &source, rank, n_ranks, &report.machine, error);
    fill_defaults(&report.machine, options);
    if (!code)
        code = check_place(options, &report.machine, n_ranks, error);
    if (!code && options->operations)
        code = run_operations(&source, &report, error);
    else if (!code)
        code = run_engine(&source, rank, &report, error);
    dskv_bench_shape_remove(source.made);
    if (code && rank == 0)
        fprintf(stderr, "dskv-bench: %s\n", error->message);
    dskv_parallel_stop();
    return code;
}

int main(int argc, char **argv)
{
    struct dskv_bench_options options;
    struct dskv_error error;
    int help = 0;
    enum dskv_exit code = dskv_bench_options_parse(argc, argv, &options, &help, &error);
    if (code) {
        if (dskv_bench_speaks())
            fprintf(stderr, "dskv-bench: %s\n", error.message);
        return code;
    }
    if (help) {
        if (dskv_bench_speaks())
            dskv_bench_options_help();
        return DSKV_EXIT_OK;
    }
    return bench(&options, &error);
}
