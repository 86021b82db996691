/* The engine's insides, between engine.c (open and close), execute.c (what a command does on a rank) and command.c (how
 * rank 0 gives it). */
#ifndef DSKV_PARALLEL_ENGINE_PARTS_H
#define DSKV_PARALLEL_ENGINE_PARTS_H

#include "parallel/comm.h"
#include "parallel/engine.h"
#include "parallel/forward.h"
#include "parallel/segment.h"
#include "parallel/stream.h"
#include "parallel/weights.h"

struct dskv_engine {
    struct dskv_engine_info info;
    struct dskv_shard shard;
    struct dskv_device *device;
    struct dskv_weights *weights;
    struct dskv_kv kv;
    struct dskv_segment segment;
    struct dskv_stream *stream;
    struct dskv_comm *comm;
    struct dskv_forward *forward;
    int check_plans;
    /* The stream's payload: two plans that alternate, then a piece of KV. */
    size_t plan_bytes, piece_bytes;
    uint32_t next_plan;
    uint64_t n_plans;
    /* Counted here, where steps are executed. */
    uint64_t steps, rows_computed;
    const struct dskv_row_result *results; /* of the last step, where rows are selected */
};

/* On rank 0: tells the others to leave dskv_engine_work. */
void dskv_engine_stop(struct dskv_engine *engine);

enum dskv_command_kind {
    DSKV_COMMAND_STEP,
    DSKV_COMMAND_COPY_OUT,
    DSKV_COMMAND_COPY_IN,
    DSKV_COMMAND_STATS,
    DSKV_COMMAND_STOP
};

/* Payload of a copy: this, then the block table, then (copy in) the piece's bytes in the pool's dtype at a multiple
 * of 64. */
struct dskv_piece_head {
    int32_t layer, is_value, start, stop, n_blocks;
};

/* Answer to a step in debug mode. */
struct dskv_step_hashes {
    uint64_t plan, sampled;
};

size_t dskv_piece_data_offset(int32_t n_blocks);
/* Bytes of n_heads heads of a piece in the pool's dtype. */
size_t dskv_piece_heads_bytes(const struct dskv_engine *engine, const struct dskv_piece_head *piece, int32_t n_heads);

/* Executes a command on this rank; out: rank 0's destination of a copy out. */
enum dskv_exit dskv_execute(struct dskv_engine *engine, const struct dskv_command *command, void *out,
                            struct dskv_answer *answer, struct dskv_error *error);

#endif
