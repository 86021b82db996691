/* dskv-bench-exchange: what the ranks' sums cost on this machine, beside NCCL's own where it connects the GPUs.
 *
 *     mpirun -np 2 dskv-bench-exchange --json exchange.json
 */
#include "bench_common.h"

#include "base/log.h"
#include "base/version.h"
#include "parallel/sums.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct options {
    struct dskv_sums_options measure;
    const char *json;
    int help;
};

static void print_help(void)
{
    puts("usage: mpirun -np N dskv-bench-exchange [options]\n\n"
         "Times sums of 8 KB to 4 MB over all ranks, alone and with the residual and the norm of rows behind them.\n\n"
         "  --device NAME  auto (default), cpu, cuda\n"
         "  --comm NAME    self, shm, peer, nccl, staged; default: the first that serves\n"
         "  --share-gpu    ranks may share GPUs\n"
         "  --dtype NAME   of activations: f32, f16, bf16 (default); on the CPU always f32\n"
         "  --width N      values of a row, a power of two of at most 16384 (4096)\n"
         "  --json FILE    also writes the figures to this file\n"
         "  --help");
}

static enum dskv_exit set(struct options *options, const char *name, const char *value, struct dskv_error *error)
{
    if (strcmp(name, "--device") == 0) {
        options->measure.device = value;
    } else if (strcmp(name, "--comm") == 0) {
        options->measure.comm = value;
    } else if (strcmp(name, "--json") == 0) {
        options->json = value;
        return dskv_bench_json_check(value, error);
    } else if (strcmp(name, "--dtype") == 0) {
        options->measure.dtype = dskv_dtype_from_name(value);
        if (options->measure.dtype > DSKV_BF16)
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--dtype is %s; it must be f32, f16 or bf16", value);
    } else if (strcmp(name, "--width") == 0) {
        char *end = NULL;
        long width = strtol(value, &end, 10);
        if (*end || width < 64 || width > 16384 || (width & (width - 1)))
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--width is %s; it must be a power of two, 64 .. 16384",
                                  value);
        options->measure.width = (int32_t)width;
    } else {
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "there is no option %s; see --help", name);
    }
    return DSKV_EXIT_OK;
}

static enum dskv_exit parse(int argc, char **argv, struct options *options, struct dskv_error *error)
{
    *options = (struct options){.measure = {.device = "auto", .dtype = DSKV_BF16, .width = 4096}};
    enum dskv_exit code = DSKV_EXIT_OK;
    for (int i = 1; i < argc && !code; i++) {
        if (strcmp(argv[i], "--help") == 0)
            options->help = 1;
        else if (strcmp(argv[i], "--share-gpu") == 0)
            options->measure.share_gpu = 1;
        else if (i + 1 == argc)
            code = dskv_fail_exit(error, DSKV_EXIT_USAGE, "%s is no option or needs a value; see --help", argv[i]);
        else
            code = set(options, argv[i], argv[i + 1], error), i++;
    }
    return code;
}

/* A time, or a dash where there is none. */
static void print_us(double us)
{
    if (us > 0)
        printf(" %9.2f", us);
    else
        printf(" %9s", "-");
}

static void print_report(const struct dskv_sums_report *report, int n_ranks, int32_t width)
{
    printf("%d rank%s, comm %s, %s, rows of %d %s; us, medians\n\n", n_ranks, n_ranks == 1 ? "" : "s", report->comm,
           report->device, width, dskv_dtype_name(report->dtype));
    printf("%8s %6s %9s %9s %9s %9s %9s %9s %9s %8s\n", "KB", "rows", "sum", "+ norm", "norm", "nccl", "+ norm",
           "window", "+ norm", "differ");
    for (int i = 0; i < report->n_points; i++) {
        const struct dskv_sums_point *p = &report->points[i];
        const double times[] = {p->sum_us,      p->add_us,    p->then_us,      p->nccl_us,
                                p->nccl_add_us, p->window_us, p->window_add_us};
        printf("%8zu %6lld", p->bytes >> 10, (long long)p->rows);
        for (size_t j = 0; j < sizeof times / sizeof *times; j++)
            print_us(times[j]);
        printf(" %8lld\n", (long long)p->n_differing);
    }
    puts("\nnorm: the residual and the norm; nccl: ncclAllReduce; window: the same in memory that all GPUs reach");
}

static enum dskv_exit write_report(const struct dskv_sums_report *report, int n_ranks, int32_t width, const char *path,
                                   struct dskv_error *error)
{
    FILE *file;
    enum dskv_exit code = dskv_bench_json_open(path, "w", &file, error);
    if (code)
        return code;
    fprintf(file,
            "{\n  \"version\": \"%s\",\n  \"ranks\": %d,\n  \"comm\": \"%s\",\n  \"device\": \"%s\",\n"
            "  \"dtype\": \"%s\",\n  \"width\": %d,\n  \"points\": [\n",
            DSKV_VERSION, n_ranks, report->comm, report->device, dskv_dtype_name(report->dtype), width);
    for (int i = 0; i < report->n_points; i++) {
        const struct dskv_sums_point *p = &report->points[i];
        fprintf(file,
                "    {\"bytes\": %zu, \"rows\": %lld, \"sum_us\": %.3f, \"add_us\": %.3f, \"then_us\": %.3f, "
                "\"nccl_us\": %.3f, \"nccl_add_us\": %.3f, \"window_us\": %.3f, \"window_add_us\": %.3f, "
                "\"n_differing\": %lld}%s\n",
                p->bytes, (long long)p->rows, p->sum_us, p->add_us, p->then_us, p->nccl_us, p->nccl_add_us,
                p->window_us, p->window_add_us, (long long)p->n_differing, i + 1 < report->n_points ? "," : "");
    }
    fprintf(file, "  ]\n}\n");
    int failed = ferror(file);
    if (fclose(file) || failed)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--json %s cannot be written", path);
    return DSKV_EXIT_OK;
}

static enum dskv_exit bench(const struct options *options, struct dskv_error *error)
{
    int rank = 0, n_ranks = 1;
    struct dskv_sums_report report;
    enum dskv_exit code = dskv_parallel_start(&rank, &n_ranks, error);
    if (code)
        return code;
    dskv_log_open(DSKV_LOG_WARNING, rank);
    code = dskv_sums_measure(&options->measure, &report, error);
    if (!code && rank == 0) {
        print_report(&report, n_ranks, options->measure.width);
        if (options->json)
            code = write_report(&report, n_ranks, options->measure.width, options->json, error);
        for (int i = 0; i < report.n_points && !code; i++)
            if (report.points[i].n_differing)
                code = dskv_fail_exit(error, DSKV_EXIT_BUG, "sums of %zu bytes differ from those of larger ones",
                                      report.points[i].bytes);
    }
    if (code && rank == 0)
        fprintf(stderr, "dskv-bench-exchange: %s\n", error->message);
    dskv_parallel_stop();
    return code;
}

int main(int argc, char **argv)
{
    struct options options;
    struct dskv_error error = {0};
    enum dskv_exit code = parse(argc, argv, &options, &error);
    if (code && dskv_bench_speaks())
        fprintf(stderr, "dskv-bench-exchange: %s\n", error.message);
    if (!code && options.help && dskv_bench_speaks())
        print_help();
    return code || options.help ? code : bench(&options, &error);
}
