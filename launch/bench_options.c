/* The command line of dskv-bench. */
#include "bench.h"
#include "bench_common.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { TEXT, NUMBER, FLAG };

struct option {
    const char *name;
    enum kind kind;
    size_t offset;
    int32_t least, most;
    const char *help;
};

static const struct option table[] = {
    {"--model", TEXT, offsetof(struct dskv_bench_options, model), 0, 0,
     "a model's directory; else random weights of --shape"},
    {"--shape", TEXT, offsetof(struct dskv_bench_options, shape), 0, 0, DSKV_BENCH_SHAPES " (default: the first)"},
    {"--device", TEXT, offsetof(struct dskv_bench_options, device), 0, 0, "auto (default), cpu, cuda"},
    {"--dtype", TEXT, offsetof(struct dskv_bench_options, dtype), 0, 0,
     "weights as held: auto (default: the model's own), f32, f16, bf16"},
    {"--kv-dtype", TEXT, offsetof(struct dskv_bench_options, kv_dtype), 0, 0, "auto (default), f32, f16, bf16"},
    {"--threads", NUMBER, offsetof(struct dskv_bench_options, threads), 0, 1024,
     "of each rank; 0 (default): cores / ranks"},
    {"--context", NUMBER, offsetof(struct dskv_bench_options, context), 1, 1 << 20,
     "tokens in the cache before a step (256; 1024 on a GPU)"},
    {"--prefill", NUMBER, offsetof(struct dskv_bench_options, prefill), 1, 1 << 16,
     "tokens of the prefill (512; 2048 on a GPU)"},
    {"--batch", NUMBER, offsetof(struct dskv_bench_options, batch), 1, 1024,
     "sequences of the larger decode step (8; 64 on a GPU)"},
    {"--iterations", NUMBER, offsetof(struct dskv_bench_options, iterations), 1, 100000, "of each step (20)"},
    {"--operations", FLAG, offsetof(struct dskv_bench_options, operations), 0, 0,
     "times each operation of a layer by itself, instead of steps (one rank)"},
    {"--any-order", FLAG, offsetof(struct dskv_bench_options, any_order), 0, 0,
     "matmuls in whatever order is fastest: what exactness costs (on a GPU)"},
    {"--json", TEXT, offsetof(struct dskv_bench_options, json), 0, 0, "also writes the figures to this file"},
};
enum { N_OPTIONS = sizeof table / sizeof *table };

void dskv_bench_options_help(void)
{
    puts("usage: dskv-bench [options], or mpirun -np N dskv-bench [options]\n\n"
         "Times a decode step, alone and queued one ahead, a verify of 8 tokens (on a GPU of 16 and 32 too), a\n"
         "decode of some sequences and a prefill, against what the read bandwidth and matmul rate, measured in the\n"
         "same run, would allow.\n");
    for (int i = 0; i < N_OPTIONS; i++)
        printf("  %-13s %s\n", table[i].name, table[i].help);
    puts("  --help");
}

static enum dskv_exit set(const struct option *option, const char *value, struct dskv_bench_options *options,
                          struct dskv_error *error)
{
    void *field = (char *)options + option->offset;
    if (option->kind == TEXT) {
        *(const char **)field = value;
        return DSKV_EXIT_OK;
    }
    char *end = NULL;
    errno = 0;
    long number = strtol(value, &end, 10);
    if (errno || end == value || *end || number < option->least || number > option->most)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "%s takes %d .. %d, not \"%s\"", option->name, option->least,
                              option->most, value);
    *(int32_t *)field = (int32_t)number;
    return DSKV_EXIT_OK;
}

static enum dskv_exit check(struct dskv_bench_options *options, struct dskv_error *error)
{
    const char *names;
    if (!options->model && !dskv_bench_shape_find(options->shape, &names))
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "no shape is called \"%s\"; there are %s", options->shape, names);
    if (strcmp(options->dtype, "auto") != 0 && dskv_dtype_from_name(options->dtype) > DSKV_BF16)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--dtype takes auto, f32, f16 or bf16, not \"%s\"",
                              options->dtype);
    enum dskv_exit code = options->json ? dskv_bench_json_check(options->json, error) : DSKV_EXIT_OK;
    if (code)
        return code;
    if (strcmp(options->kv_dtype, "auto") != 0 && dskv_dtype_from_name(options->kv_dtype) > DSKV_BF16)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--kv-dtype takes auto, f32, f16 or bf16, not \"%s\"",
                              options->kv_dtype);
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_bench_options_parse(int argc, char **argv, struct dskv_bench_options *options, int *help,
                                        struct dskv_error *error)
{
    *options = (struct dskv_bench_options){
        .shape = "llama-135m", .device = "auto", .dtype = "auto", .kv_dtype = "auto", .iterations = 20};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            *help = 1;
            return DSKV_EXIT_OK;
        }
        const char *equals = strchr(argv[i], '=');
        size_t n = equals ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        int at = 0;
        while (at < N_OPTIONS && !(strlen(table[at].name) == n && strncmp(table[at].name, argv[i], n) == 0))
            at++;
        if (at == N_OPTIONS)
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "no option is called \"%.*s\"; see --help", (int)n, argv[i]);
        if (table[at].kind == FLAG) {
            if (equals)
                return dskv_fail_exit(error, DSKV_EXIT_USAGE, "%s takes no value", table[at].name);
            *(int *)((char *)options + table[at].offset) = 1;
            continue;
        }
        const char *value = equals ? equals + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (!value)
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "%s needs a value", table[at].name);
        enum dskv_exit code = set(&table[at], value, options, error);
        if (code)
            return code;
    }
    return check(options, error);
}
