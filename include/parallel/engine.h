/* Engine: opens a model over all ranks and executes plans and pool commands on it.
 *
 * Steps are submitted and collected: one may be submitted before the last is collected, so that a device goes from one
 * to the next without a gap.  All ranks execute steps and commands in the order in which they were given.
 *
 * Owns: MPI, the comm, the device, this rank's weights and pool bytes.  Knows nothing of requests, sequences or
 * caches: it is told block ids.  Rank 0 decides and calls the functions below; every other rank is in dskv_engine_work,
 * executes the same ordered stream of commands and answers each with a status word.  A command returns when every rank
 * has finished it.  An error of a step or command on any rank (not of its arguments) ends the job.
 */
#ifndef DSKV_PARALLEL_ENGINE_H
#define DSKV_PARALLEL_ENGINE_H

#include "base/limits.h"
#include "base/status.h"
#include "parallel/model.h"
#include "parallel/plan.h"

#include <stdint.h>

struct dskv_engine;

struct dskv_engine_options {
    const char *model_dir;
    const char *device;   /* "auto", "cpu", "cuda" */
    const char *dtype;    /* weights as held: "auto" (as stored), "f32", "f16", "bf16" */
    const char *kv_dtype; /* "auto", "f32", "f16", "bf16" */
    int64_t
        kv_cache_bytes; /* per rank; 0: memory_fraction of what is free, for 64 whole contexts at most (cpu: 1 GiB) */
    double memory_fraction;
    int share_gpu;            /* ranks may share a GPU */
    int32_t max_model_len;    /* 0: the model's context */
    int32_t max_batch_tokens; /* rows of one step */
    int32_t max_sequences;    /* runs of tokens of one step */
    int32_t block_tokens;     /* 16, 32, 64, 128, 256 */
    int32_t n_threads;        /* per rank; 0: this host's cores divided by its ranks */
    int32_t tensor_parallel;  /* 0, or the number of ranks that is expected */
    int dummy_weights;        /* random weights at config.json's shape: no weight file is read (benchmarks) */
    int free_order;           /* benchmarks: results promise no bits (cuda) */
    int takes_references;     /* plans may name tokens that the step before draws; always where runs_queued */
    int check_plans;          /* debug: ranks hash what they executed and what they drew; rank 0 compares */
    int trace_ops;            /* debug: a checksum per operation */
};

/* This process's rank as mpirun or srun tells it to every child, before MPI is up; 0 when it was started by hand. */
int dskv_parallel_launched_rank(void);
/* Before dskv_engine_open, on every rank: decides whether there is an MPI job (mpirun, srun) or just this process, sets
 * what Open MPI needs, starts it, tells rank and size.  Never called by --help, --version, --print-config, --check. */
enum dskv_exit dskv_parallel_start(int *rank, int *n_ranks, struct dskv_error *error);
/* After everything, on every rank: ends MPI in order. */
void dskv_parallel_stop(void);
/* Async-signal-safe, any time: 1 when a rank has ended that this one looks after (rank 0 after all others, these after
 * rank 0).  text gets the sentence where this rank is to say it (rank 0, or rank 1 when rank 0 could not), else "". */
int dskv_parallel_lost(char text[DSKV_LOST_TEXT]);
/* Ends the whole job at once with this exit code; safe before start, from any thread, in a signal's handler. */
void dskv_parallel_abort(enum dskv_exit code) __attribute__((noreturn));
/* Largest of every rank's exit code, agreed by all: one rank's failed start stops all, rank 0 prints its sentence. */
enum dskv_exit dskv_parallel_agree(enum dskv_exit code, struct dskv_error *error);

/* Reads config.json and the headers of all weight files and checks all that can be checked without weights; no MPI.
 * max_model_len: what is to be served, 0: the model's context, which then comes back.  DSKV_EXIT_MODEL, _USAGE. */
enum dskv_exit dskv_model_check(const char *model_dir, int32_t *max_model_len, struct dskv_model *model,
                                struct dskv_error *error);

/* Collective.  On failure every rank returns the same code and rank 0 has the sentence of the first rank that failed.
 */
enum dskv_exit dskv_engine_open(const struct dskv_engine_options *options, struct dskv_engine **engine,
                                struct dskv_error *error);
/* Rank 0 sends stop; collective with the others' dskv_engine_work.  Nulls *engine. */
void dskv_engine_close(struct dskv_engine **engine);
/* Ranks other than 0: executes commands until stop; sleeps while there are none (under 2 % of a core). */
enum dskv_exit dskv_engine_work(struct dskv_engine *engine);

/* Rank 0, any thread, without waiting: looks whether every other rank still lives; DSKV_EXIT_RANK_LOST with a sentence
 * when one has ended that was not told to. */
enum dskv_exit dskv_engine_check(const struct dskv_engine *engine, struct dskv_error *error);

/* What was opened; constant. */
struct dskv_engine_info {
    struct dskv_model model;
    int32_t n_ranks;
    int32_t max_model_len, max_batch_tokens, max_sequences, block_tokens, n_blocks;
    enum dskv_dtype weight_dtype, activation_dtype, kv_dtype;
    char device[64];        /* dskv_device_name of rank 0 */
    char numerics_id[33];   /* hex of 128 bits */
    size_t kv_block_bytes;  /* of all ranks together */
    int32_t max_logit_rows; /* rows of one step that may want DSKV_ROW_LOGITS: bounds the engine's memory */
    int runs_queued; /* a submit returns before its step has ended: submitting the next one meanwhile gains time */
    struct dskv_plan_bounds bounds;
};
const struct dskv_engine_info *dskv_engine_info(const struct dskv_engine *engine);

/* Counters of one rank. */
struct dskv_rank_stats {
    uint64_t weight_bytes;         /* of sharded tensors, as held, without padding */
    uint64_t replicated_bytes;     /* norms, biases, position tables and the like that each rank holds whole */
    uint64_t pool_bytes;           /* reserved for KV */
    uint64_t resident_bytes;       /* of the process, now */
    uint64_t steps, rows_computed; /* counted by the executor */
    uint64_t read_bytes;           /* of weight files */
};
/* Rank 0, while no step is under way; fills stats[n_ranks]. */
enum dskv_exit dskv_engine_stats(struct dskv_engine *engine, struct dskv_rank_stats *stats, struct dskv_error *error);

/* One row's results; what was not wanted is null or its neutral value.  Valid until the next step is collected. */
struct dskv_row_result {
    const float *logits;        /* [vocab] */
    int32_t argmax, sampled;    /* -1 when not wanted */
    float score;                /* NaN when not wanted */
    const int32_t *topk_ids;    /* [topk] best first, ties by lowest id */
    const float *topk_logprobs; /* [topk] */
    int32_t finite;             /* 0: some logit is infinite or NaN; the other fields are then not to be used */
};

/* Steps that may be submitted and not collected. */
#define DSKV_STEPS_UNDER_WAY 2

/* Memory for the next plan: two buffers alternate, so that the last plan can still be printed.  Sizes may be up to the
 * engine's bounds (n_rows <= n_tokens).  Valid until the second next call, which must not come before its step is
 * collected. */
struct dskv_plan *dskv_engine_plan(struct dskv_engine *engine, const struct dskv_plan_sizes *need);
/* Begins to execute a plan on all ranks, after all that was submitted before; the plan stays as it is until its step is
 * collected.  At most two steps are submitted and not collected, and no step follows one that wants DSKV_ROW_LOGITS
 * before that is collected.  An error of another rank is told by the collect. */
enum dskv_exit dskv_engine_submit(struct dskv_engine *engine, const struct dskv_plan *plan, struct dskv_error *error);
/* Waits for the oldest step that was not collected; results[used.n_rows] is the engine's own memory.  n_computed: rows
 * that the executor ran. */
enum dskv_exit dskv_engine_collect(struct dskv_engine *engine, const struct dskv_row_result **results,
                                   int32_t *n_computed, struct dskv_error *error);
/* When rank 0's device began and ended the step that was collected last, by its clock; begun_ns is 0 where the device
 * reads plans in host memory. */
struct dskv_turn_times dskv_engine_device_times(const struct dskv_engine *engine);
/* Both, when no step is under way.  All commands below ask for that, too. */
enum dskv_exit dskv_engine_step(struct dskv_engine *engine, const struct dskv_plan *plan,
                                const struct dskv_row_result **results, int32_t *n_computed, struct dskv_error *error);

/* A piece of keys (is_value 0) or values of one layer: all KV heads of the model, tokens [start, stop) of a block
 * table. Layout of bytes: [n_kv_heads, stop - start, head_dim], dense. */
struct dskv_kv_piece {
    int32_t layer, is_value, start, stop;
    const int32_t *table; /* block ids from token 0; n_blocks of them */
    int32_t n_blocks;
};
size_t dskv_engine_kv_piece_bytes(const struct dskv_engine *engine, const struct dskv_kv_piece *piece,
                                  enum dskv_dtype dtype);
/* Most tokens of one piece: its bytes in the pool's dtype (or f32, if larger) stay within about DSKV_PART_BYTES, at
 * least 1. */
int32_t dskv_engine_kv_piece_tokens(const struct dskv_engine *engine);
/* Reads a piece in the pool's dtype. */
enum dskv_exit dskv_engine_copy_out(struct dskv_engine *engine, const struct dskv_kv_piece *piece, void *bytes,
                                    struct dskv_error *error);
/* Writes a piece given in dtype, converted to the pool's (round to nearest even).  The caller checks finiteness before
 * with dskv_engine_kv_finite. */
enum dskv_exit dskv_engine_copy_in(struct dskv_engine *engine, const struct dskv_kv_piece *piece, enum dskv_dtype dtype,
                                   const void *bytes, struct dskv_error *error);
/* True when all n elements are finite after conversion to the pool's dtype; *index gets the first that is not. */
int dskv_engine_kv_finite(const struct dskv_engine *engine, enum dskv_dtype dtype, const void *bytes, size_t n,
                          size_t *index);

#endif
