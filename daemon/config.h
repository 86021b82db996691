/* Config: the command line of dskvd, from one table that drives parsing, range errors, --help and --print-config. */
#ifndef DSKV_DAEMON_CONFIG_H
#define DSKV_DAEMON_CONFIG_H

#include "base/log.h"
#include "base/status.h"

#include <stdint.h>

#define DSKV_MAX_ENDPOINTS 8

/* What dskvd was asked to do. */
enum dskv_command { DSKV_RUN, DSKV_HELP, DSKV_PRINT_VERSION, DSKV_PRINT_CONFIG, DSKV_CHECK, DSKV_REPLAY };

struct dskv_config {
    enum dskv_command command;
    const char *model;
    const char *device, *dtype, *kv_dtype;
    const char *queue_ahead; /* null is "auto", too */
    int64_t kv_cache_memory; /* bytes per rank, 0: by memory_fraction */
    double memory_fraction;
    int32_t max_model_len, max_batch_tokens, max_sequences, block_tokens, threads, tensor_parallel;
    int32_t cache_lease; /* seconds a silent session keeps its caches; 0: for ever */
    int32_t n_listen;
    const char *listen[DSKV_MAX_ENDPOINTS];
    int share_gpu; /* more ranks than GPUs */
    int insecure;  /* listen beyond loopback without encryption */
    enum dskv_log_level log_level;
    int64_t seed;            /* -1: from the system */
    const char *trace_plans; /* file to record plans to, or null */
    const char *replay;      /* file of plans to run, or null */
};

/* Fills *config with defaults, then argv; strings point into argv or are constant.  DSKV_EXIT_USAGE with one sentence
 * that names the option and its valid values. */
enum dskv_exit dskv_config_parse(int argc, char **argv, struct dskv_config *config, struct dskv_error *error);
/* The text of --help, and one "name = value" line per option. */
void dskv_config_help(void);
void dskv_config_print(const struct dskv_config *config);

#endif
