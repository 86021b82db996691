/* The inside of dskv-bench: what its files hand to each other. */
#ifndef DSKV_LAUNCH_BENCH_H
#define DSKV_LAUNCH_BENCH_H

#include "parallel/engine.h"

struct dskv_bench_options {
    const char *model; /* directory, or null: random weights of `shape` */
    const char *shape;
    const char *device;
    const char *dtype, *kv_dtype;
    const char *json;   /* file, or null */
    int32_t threads;    /* of each rank */
    int32_t context;    /* tokens that stand in the cache before a step */
    int32_t prefill;    /* tokens of the prefill */
    int32_t batch;      /* sequences of the larger decode step */
    int32_t iterations; /* of each step */
    int operations;     /* measure operations instead of steps */
    int any_order;      /* matmuls need not be exact */
};

/* Ceilings of this machine, all ranks and threads at work.  0: not measured on this kind of device. */
struct dskv_bench_machine {
    int is_host;           /* the device computes in host memory */
    double read_bytes_s;   /* streaming reads of more than any cache holds */
    double reread_bytes_s; /* host: the same over as many bytes as the weights take: caches help where they can */
    double fma_flops_s;    /* host: fused multiply-adds on registers alone */
    double matmul_flops_s; /* the device's own product of large matrices of this dtype */
    enum dskv_dtype matmul_dtype; /* as activations are */
};

/* One kind of step. */
struct dskv_bench_step {
    char name[64];
    int32_t n_tokens;
    int32_t n_iterations;
    double median_s, best_s;
    double bytes; /* weights and KV that it must read */
    double flops;
    double floor_s;                       /* the larger of both at this machine's rates */
    double idle_median_s, idle_longest_s; /* of the device between steps that follow each other; 0: not measured */
};

/* One operation at one number of rows. */
struct dskv_bench_operation {
    const char *name;
    int32_t rows;
    double median_s; /* of one call among many */
    double bytes, flops, floor_s;
};

enum { DSKV_BENCH_MAX_STEPS = 7, DSKV_BENCH_N_ROWS = 6, DSKV_BENCH_MAX_OPERATIONS = 13 * DSKV_BENCH_N_ROWS };
struct dskv_bench_report {
    const struct dskv_bench_options *options;
    const struct dskv_engine_info *info;
    struct dskv_bench_machine machine;
    double weight_bytes;      /* read by every step, all ranks */
    int32_t context, prefill; /* as run: at most what the model allows */
    struct dskv_bench_step steps[DSKV_BENCH_MAX_STEPS];
    int n_steps;
    struct dskv_bench_operation operations[DSKV_BENCH_MAX_OPERATIONS];
    int n_operations;
};

/* DSKV_EXIT_USAGE with a sentence; *help is set when only the text of --help is wanted. */
enum dskv_exit dskv_bench_options_parse(int argc, char **argv, struct dskv_bench_options *options, int *help,
                                        struct dskv_error *error);
void dskv_bench_options_help(void);

/* Shapes of models that need no files: random weights of this shape. */
struct dskv_bench_shape {
    const char *name;
    int is_gpt2; /* else a Llama */
    enum dskv_dtype dtype;
    int32_t n_layers, width, n_heads, n_kv_heads, head_dim, mlp, vocab, max_context;
    int tied;
};
#define DSKV_BENCH_SHAPES "llama-135m, llama-1b, llama-8b, llama-8b-half, gpt2-xl, llama-70b, llama-70b-quarter"
/* Null when there is none of this name; *names (may be null) gets all names. */
const struct dskv_bench_shape *dskv_bench_shape_find(const char *name, const char **names);
/* A directory with nothing but the shape's config.json; DSKV_EXIT_MODEL when it cannot be written. */
enum dskv_exit dskv_bench_shape_write(const struct dskv_bench_shape *shape, char directory[64],
                                      struct dskv_error *error);
/* Removes it; an empty name is none. */
void dskv_bench_shape_remove(const char *directory);

/* Collective: every rank calls them at the same time and gets what all n_ranks of them together do, if they are alike.
 * What the device does: its product of matrices whose weights are held in dtype and, unless it is the host, its reads.
 */
enum dskv_exit dskv_bench_device_measure(const struct dskv_device_options *options, int n_ranks, enum dskv_dtype dtype,
                                         struct dskv_bench_machine *machine, struct dskv_error *error);
/* What the host's threads do. */
enum dskv_exit dskv_bench_host_measure(int n_ranks, int32_t n_threads, double weight_bytes,
                                       struct dskv_bench_machine *machine, struct dskv_error *error);
double dskv_bench_seconds(void);
/* Random values within 2^-4, about a weight's size. */
void dskv_bench_fill_random(uint32_t *state, float *values, size_t n);

/* Rank 0: the steps, on an engine of its own. */
enum dskv_exit dskv_bench_steps_run(struct dskv_engine *engine, struct dskv_bench_report *report,
                                    struct dskv_error *error);

/* One rank: the operations of a model of this shape, on a device of their own; *info gets what the report says of it.
 */
enum dskv_exit dskv_bench_operations_run(const struct dskv_device_options *options, const struct dskv_model *model,
                                         enum dskv_dtype dtype, struct dskv_bench_report *report,
                                         struct dskv_engine_info *info, struct dskv_error *error);

/* A table for people, and a file for programs (DSKV_EXIT_USAGE when it cannot be written). */
void dskv_bench_report_print(const struct dskv_bench_report *report);
enum dskv_exit dskv_bench_report_write(const struct dskv_bench_report *report, const char *path,
                                       struct dskv_error *error);

#endif
