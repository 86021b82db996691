/* dskvd: options, then the engine on every rank, then rank 0 serves (or replays) and the others work; the end in
 * reverse.
 *
 * Failures: each rank may fail to start, all of them agree on one code, and rank 0 prints the one sentence.  Before MPI
 * is up, the launcher's environment tells who is rank 0, so that a wrong option is told once, too.
 */
#include "base/version.h"
#include "daemon/config.h"
#include "daemon/describe.h"
#include "daemon/front.h"
#include "daemon/replay.h"
#include "daemon/server.h"
#include "daemon/signals.h"
#include "ipc/transport.h"
#include "parallel/engine.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LINGER_MS 500 /* for replies that are on their way when the transport closes */

/* Tells a failure that every rank met alike: rank 0 says it, the others wait for the launcher to end them, since their
 * own exit could end rank 0 before it has spoken. */
static enum dskv_exit fail(enum dskv_exit code, int rank, const struct dskv_error *error)
{
    if (rank == 0)
        fprintf(stderr, "dskvd: %s\n", error->message);
    else
        sleep(2);
    return code;
}

/* What needs no engine and no other rank. */
static enum dskv_exit run_alone(const struct dskv_config *config, struct dskv_error *error)
{
    struct dskv_model model;
    int32_t max_model_len = config->max_model_len;
    char text[512];
    enum dskv_exit code;
    switch (config->command) {
    case DSKV_HELP: dskv_config_help(); break;
    case DSKV_PRINT_VERSION: puts("dskvd " DSKV_VERSION); break;
    case DSKV_PRINT_CONFIG: dskv_config_print(config); break;
    default:
        code = dskv_model_check(config->model, &max_model_len, &model, error);
        if (code)
            return fail(code, 0, error);
        dskv_describe_model(&model, max_model_len, config->model, text, sizeof text);
        puts(text);
    }
    if (fflush(stdout))
        return fail(dskv_fail_exit(error, DSKV_EXIT_USAGE, "standard output cannot be written: %s", strerror(errno)), 0,
                    error);
    return DSKV_EXIT_OK;
}

static struct dskv_engine_options engine_options(const struct dskv_config *config)
{
    return (struct dskv_engine_options){
        .model_dir = config->model,
        .device = config->device,
        .dtype = config->dtype,
        .kv_dtype = config->kv_dtype,
        .kv_cache_bytes = config->kv_cache_memory,
        .memory_fraction = config->memory_fraction,
        .max_model_len = config->max_model_len,
        .max_batch_tokens = config->max_batch_tokens,
        .max_sequences = config->max_sequences,
        .block_tokens = config->block_tokens,
        .n_threads = config->threads,
        .tensor_parallel = config->tensor_parallel,
        .share_gpu = config->share_gpu,
        .takes_references = config->command == DSKV_REPLAY || strcmp(config->queue_ahead, "on") == 0,
        .check_plans = config->log_level == DSKV_LOG_DEBUG,
    };
}

/* Rank 0, between the opening and the closing of the engine. */
static enum dskv_exit serve(struct dskv_engine *engine, struct dskv_transport *transport,
                            const struct dskv_config *config, struct dskv_error *error)
{
    struct dskv_server *server = NULL;
    enum dskv_exit code = dskv_server_open(engine, config, &server, error);
    if (code)
        return code;
    code = dskv_front_run(transport, server, engine, config, error);
    if (!code) /* else the engine thread may wait for a rank that is gone; the job is then ended as it stands */
        dskv_server_close(&server);
    return code;
}

/* Rank 0's work or another's.  A failure after the start ends the job here: other ranks may not listen any more. */
static void run(struct dskv_engine *engine, int rank, struct dskv_transport **transport,
                const struct dskv_config *config, struct dskv_error *error)
{
    enum dskv_exit code;
    if (rank != 0) {
        code = dskv_engine_work(engine);
        if (code == DSKV_EXIT_RANK_LOST)
            dskv_signals_end_if_lost();
        if (code) /* rank 0 has it from this rank's answer */
            dskv_parallel_abort(fail(code, rank, error));
        return;
    }
    code = config->command == DSKV_REPLAY ? dskv_replay(engine, config->replay, stdout, error)
                                          : serve(engine, *transport, config, error);
    dskv_transport_close(transport, LINGER_MS);
    if (code) {
        fail(code, 0, error);
        dskv_parallel_abort(code);
    }
}

int main(int argc, char **argv)
{
    struct dskv_config config;
    struct dskv_error error = {0};
    enum dskv_exit code = dskv_config_parse(argc, argv, &config, &error);
    int rank = dskv_parallel_launched_rank(), n_ranks;
    if (code)
        return fail(code, rank, &error);
    if (config.command != DSKV_RUN && config.command != DSKV_REPLAY)
        return rank == 0 ? run_alone(&config, &error) : DSKV_EXIT_OK;

    struct dskv_transport *transport = NULL;
    struct dskv_engine *engine = NULL;
    dskv_log_open(config.log_level, rank);
    dskv_signals_open(rank);
    code = dskv_parallel_start(&rank, &n_ranks, &error);
    if (code)
        return fail(code, rank, &error);
    if (rank == 0 && config.command == DSKV_RUN) /* before the weights are read: a port that is taken is told at once */
        code = dskv_transport_open(config.listen, config.n_listen, config.insecure, &transport, &error);
    code = dskv_parallel_agree(code, &error);
    if (!code) {
        struct dskv_engine_options options = engine_options(&config);
        code = dskv_engine_open(&options, &engine, &error);
    }
    if (code && rank == 0)
        fail(code, rank, &error);
    if (!code) {
        run(engine, rank, &transport, &config, &error);
        dskv_engine_close(&engine);
    }
    dskv_transport_close(&transport, 0);
    dskv_parallel_stop();
    return code;
}
