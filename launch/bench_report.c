/* What dskv-bench says: a table for people, JSON for programs. */
#include "bench.h"
#include "bench_common.h"

#include "base/version.h"

#include <stdio.h>
#include <string.h>

static const char *model_name(const struct dskv_bench_report *report)
{
    return report->options->model ? report->options->model : report->options->shape;
}

/* What one decode step of a batch costs over the plain one. */
static double over_decode(const struct dskv_bench_report *report, int step)
{
    return report->steps[step].median_s / report->steps[0].median_s;
}

static void print_machine(const struct dskv_bench_machine *machine)
{
    printf("this machine: reads %.1f GB/s", machine->read_bytes_s / 1e9);
    if (machine->is_host)
        printf(" (as many bytes as the weights, again and again: %.1f GB/s)", machine->reread_bytes_s / 1e9);
    printf(", multiplies at %.0f GFLOP/s (%s matmul", machine->matmul_flops_s / 1e9,
           dskv_dtype_name(machine->matmul_dtype));
    if (machine->is_host)
        printf("; registers alone: %.0f", machine->fma_flops_s / 1e9);
    printf(")\n\n");
}

static void print_operations(const struct dskv_bench_report *report)
{
    int is_host = report->machine.is_host;
    printf("%-27s %6s %11s %11s %9s %9s %9s\n", "operation", "rows", "us", "floor us", "x floor", "GB/s",
           is_host ? "GFLOP/s" : "TFLOP/s");
    for (int i = 0; i < report->n_operations; i++) {
        const struct dskv_bench_operation *operation = &report->operations[i];
        printf("%-27s %6d %11.2f %11.2f %9.2f %9.1f %9.1f\n", operation->name, operation->rows,
               operation->median_s * 1e6, operation->floor_s * 1e6, operation->median_s / operation->floor_s,
               operation->bytes / operation->median_s / 1e9,
               operation->flops / operation->median_s / (is_host ? 1e9 : 1e12));
    }
    printf("\ncontext %d; the floor is the longer of moving all operands once, as if none were near, and of the "
           "multiplications\n",
           report->context);
}

static void print_steps(const struct dskv_bench_report *report)
{
    int is_host = report->machine.is_host;
    printf("%-20s %7s %11s %11s %11s %9s %9s %9s %9s %9s\n", "step", "tokens", "median ms", "best ms", "floor ms",
           "x floor", "of floor", "GB/s", is_host ? "GFLOP/s" : "TFLOP/s", "x decode");
    for (int i = 0; i < report->n_steps; i++) {
        const struct dskv_bench_step *step = &report->steps[i];
        printf("%-20s %7d %11.3f %11.3f %11.3f %9.2f %8.0f%% %9.1f %9.1f %9.2f\n", step->name, step->n_tokens,
               step->median_s * 1e3, step->best_s * 1e3, step->floor_s * 1e3, step->median_s / step->floor_s,
               100 * step->floor_s / step->median_s, step->bytes / step->median_s / 1e9,
               step->flops / step->median_s / (is_host ? 1e9 : 1e12), over_decode(report, i));
    }
    for (int i = 0; i < report->n_steps; i++)
        if (report->steps[i].idle_median_s > 0)
            printf("\nbetween two steps of \"%s\" the device is idle for %.1f us (median; at most %.1f)\n",
                   report->steps[i].name, report->steps[i].idle_median_s * 1e6, report->steps[i].idle_longest_s * 1e6);
    printf(
        "\ncontext %d, prefill %d; the floor is the longer of reading weights and KV once and of the multiplications\n",
        report->context, report->prefill);
}

void dskv_bench_report_print(const struct dskv_bench_report *report)
{
    const struct dskv_engine_info *info = report->info;
    printf("%s, weights %s", model_name(report), dskv_dtype_name(info->weight_dtype));
    if (report->weight_bytes > 0)
        printf(" (%.1f MB)", report->weight_bytes / 1e6);
    printf(", KV %s, %d rank%s of %d thread%s, %s%s\n", dskv_dtype_name(info->kv_dtype), info->n_ranks,
           info->n_ranks == 1 ? "" : "s", report->options->threads, report->options->threads == 1 ? "" : "s",
           info->device, report->options->any_order ? ", matmuls in any order" : "");
    print_machine(&report->machine);
    if (report->options->operations)
        print_operations(report);
    else
        print_steps(report);
}

static void write_string(FILE *file, const char *text)
{
    fputc('"', file);
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            fprintf(file, "\\%c", *text);
        else if ((unsigned char)*text < 32)
            fprintf(file, "\\u%04x", (unsigned)*text);
        else
            fputc(*text, file);
    fputc('"', file);
}

static void write_step(FILE *file, const struct dskv_bench_step *step, int is_last)
{
    fprintf(file,
            "    {\"name\": \"%s\", \"tokens\": %d, \"iterations\": %d, \"median_s\": %.9g, \"best_s\": %.9g, "
            "\"floor_s\": %.9g, \"bytes\": %.0f, \"flops\": %.0f, \"idle_median_s\": %.9g, "
            "\"idle_longest_s\": %.9g}%s\n",
            step->name, step->n_tokens, step->n_iterations, step->median_s, step->best_s, step->floor_s, step->bytes,
            step->flops, step->idle_median_s, step->idle_longest_s, is_last ? "" : ",");
}

static void write_operation(FILE *file, const struct dskv_bench_operation *operation, int is_last)
{
    fprintf(file,
            "    {\"name\": \"%s\", \"rows\": %d, \"median_s\": %.9g, \"floor_s\": %.9g, \"bytes\": %.0f, "
            "\"flops\": %.0f}%s\n",
            operation->name, operation->rows, operation->median_s, operation->floor_s, operation->bytes,
            operation->flops, is_last ? "" : ",");
}

enum dskv_exit dskv_bench_report_write(const struct dskv_bench_report *report, const char *path,
                                       struct dskv_error *error)
{
    const struct dskv_bench_machine *machine = &report->machine;
    const struct dskv_engine_info *info = report->info;
    FILE *file;
    enum dskv_exit code = dskv_bench_json_open(path, "w", &file, error);
    if (code)
        return code;
    fprintf(file, "{\n  \"version\": \"%s\",\n  \"model\": ", DSKV_VERSION);
    write_string(file, model_name(report));
    fprintf(file, ",\n  \"device\": ");
    write_string(file, info->device);
    fprintf(file,
            ",\n  \"numerics_id\": \"%s\",\n  \"any_order\": %s,\n  \"weight_dtype\": \"%s\",\n  \"kv_dtype\": "
            "\"%s\",\n  \"ranks\": %d,\n"
            "  \"threads\": %d,\n  \"context\": %d,\n  \"prefill\": %d,\n  \"weight_bytes\": %.0f,\n",
            info->numerics_id, report->options->any_order ? "true" : "false", dskv_dtype_name(info->weight_dtype),
            dskv_dtype_name(info->kv_dtype), info->n_ranks, report->options->threads, report->context, report->prefill,
            report->weight_bytes);
    fprintf(file, "  \"machine\": {\"read_bytes_s\": %.6g, \"matmul_flops_s\": %.6g", machine->read_bytes_s,
            machine->matmul_flops_s);
    if (machine->is_host)
        fprintf(file, ", \"reread_bytes_s\": %.6g, \"fma_flops_s\": %.6g", machine->reread_bytes_s,
                machine->fma_flops_s);
    fprintf(file, "},\n  \"steps\": [\n");
    for (int i = 0; i < report->n_steps; i++)
        write_step(file, &report->steps[i], i + 1 == report->n_steps);
    fprintf(file, "  ],\n  \"operations\": [\n");
    for (int i = 0; i < report->n_operations; i++)
        write_operation(file, &report->operations[i], i + 1 == report->n_operations);
    fprintf(file, "  ]\n}\n");
    int failed = ferror(file);
    if (fclose(file) || failed)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--json %s cannot be written", path);
    return DSKV_EXIT_OK;
}
