/* dskv-bench: how fast this machine runs a model, as fractions of what it could.
 *
 *     dskv-bench --dtype f16 --threads 2
 *     mpirun -np 2 dskv-bench --dtype f16 --threads 1
 *
 * Runs plans on the engine directly, without a client or a scheduler.  The ceilings (read bandwidth, matmul rate) are
 * measured in the same run by the same ranks and threads, before the model is opened.
 */
#include "bench.h"

#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What to run: a model's directory, or one made for a shape. */
struct source {
    const char *directory;
    char made[64];
    double weight_bytes; /* about: to stream as many */
};

static enum dskv_exit open_source(const struct dskv_bench_options *options, struct source *source,
                                  struct dskv_error *error)
{
    struct dskv_model model = {.stored_dtype = DSKV_F16, .gated = 1};
    enum dskv_exit code;
    if (options->model) {
        source->directory = options->model;
        code = dskv_model_check(options->model, &model, error);
    } else {
        const struct dskv_bench_shape *shape = dskv_bench_shape_find(options->shape, NULL);
        model.n_layers = shape->n_layers;
        model.width = shape->width;
        model.n_heads = shape->n_heads;
        model.n_kv_heads = shape->n_kv_heads;
        model.head_dim = shape->head_dim;
        model.mlp = shape->mlp;
        model.vocab = shape->vocab;
        source->directory = source->made;
        code = dskv_bench_shape_write(shape, source->made, error);
    }
    double attention = (double)model.width * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads);
    double mlp = (double)model.width * model.mlp * (model.gated ? 3 : 2);
    double n_weights = (double)model.vocab * model.width + model.n_layers * (attention + mlp);
    enum dskv_dtype dtype = dskv_dtype_from_name(options->dtype);
    source->weight_bytes = n_weights * (double)dskv_dtype_bytes(dtype < DSKV_N_DTYPES ? dtype : model.stored_dtype);
    return code;
}

/* On all ranks: rank 0 measures, the others work for it. */
static enum dskv_exit run_engine(const struct source *source, int rank, struct dskv_bench_report *report,
                                 struct dskv_error *error)
{
    const struct dskv_bench_options *options = report->options;
    struct dskv_engine_options engine_options = {
        .model_dir = source->directory,
        .device = "cpu",
        .dtype = options->dtype,
        .kv_dtype = options->kv_dtype,
        .kv_cache_bytes = (int64_t)1 << 29,
        .max_batch_tokens = options->prefill > 64 ? options->prefill : 64, /* other steps have a few */
        .max_sequences = 8,
        .block_tokens = 64,
        .n_threads = options->threads,
        .dummy_weights = options->model == NULL,
    };
    struct dskv_engine *engine = NULL;
    enum dskv_exit code = dskv_engine_open(&engine_options, &engine, error);
    if (code)
        return code;
    if (rank == 0) {
        report->info = dskv_engine_info(engine);
        code = dskv_bench_steps_run(engine, report, error);
        if (!code)
            dskv_bench_report_print(report);
        if (!code && options->json)
            code = dskv_bench_report_write(report, options->json, error);
    } else {
        code = dskv_engine_work(engine);
    }
    dskv_engine_close(&engine);
    return code;
}

static enum dskv_exit bench(struct dskv_bench_options *options, struct dskv_error *error)
{
    int rank = 0, n_ranks = 1;
    enum dskv_exit code = dskv_parallel_start(&rank, &n_ranks, error);
    if (code)
        return code;
    dskv_log_open(DSKV_LOG_WARNING, rank);
    if (!options->threads) {
        int32_t cores = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
        options->threads = cores > n_ranks ? cores / n_ranks : 1;
    }
    struct source source = {0};
    struct dskv_bench_report report = {.options = options};
    code = dskv_parallel_agree(open_source(options, &source, error), error);
    if (!code)
        code = dskv_bench_machine_measure(n_ranks, options->threads, source.weight_bytes, &report.machine, error);
    code = dskv_parallel_agree(code, error);
    if (!code)
        code = run_engine(&source, rank, &report, error);
    dskv_bench_shape_remove(source.made);
    if (code && rank == 0)
        fprintf(stderr, "dskv-bench: %s\n", error->message);
    dskv_parallel_stop();
    return code;
}

/* Every rank reads the same command line; one of them tells what is wrong with it. */
static int speaks(void)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    return !rank || strcmp(rank, "0") == 0;
}

int main(int argc, char **argv)
{
    struct dskv_bench_options options;
    struct dskv_error error;
    int help = 0;
    enum dskv_exit code = dskv_bench_options_parse(argc, argv, &options, &help, &error);
    if (code) {
        if (speaks())
            fprintf(stderr, "dskv-bench: %s\n", error.message);
        return code;
    }
    if (help) {
        if (speaks())
            dskv_bench_options_help();
        return DSKV_EXIT_OK;
    }
    return bench(&options, &error);
}
