/* The engine's insides, between engine.c (open and close), execute.c (what a command does on a rank), steps.c (steps,
 * of which two may be under way) and command.c (how rank 0 gives the other commands, and the other ranks' loop). */
#ifndef DSKV_PARALLEL_ENGINE_PARTS_H
#define DSKV_PARALLEL_ENGINE_PARTS_H

#include "parallel/comm.h"
#include "parallel/engine.h"
#include "parallel/passes.h"
#include "parallel/segment.h"
#include "parallel/stream.h"
#include "parallel/weights.h"

/* Steps that are submitted and not collected, at most. */
_Static_assert(DSKV_STEPS_UNDER_WAY == DSKV_STREAM_DEPTH, "every step under way has its place in the stream");

/* A step that was submitted on this rank and not yet collected. */
struct dskv_step_under_way {
    const struct dskv_plan *plan;
    enum dskv_exit code;     /* of the submit: what failed there is told when its turn comes */
    struct dskv_error error; /* then */
};

struct dskv_engine {
    struct dskv_engine_info info;
    struct dskv_shard shard;
    struct dskv_device *device;
    struct dskv_weights *weights;
    struct dskv_kv kv;
    struct dskv_segment segment;
    struct dskv_stream *stream;
    struct dskv_comm *comm;
    struct dskv_passes *passes;
    int check_plans, takes_references;
    /* The stream's payload: two plans that alternate, then a piece of KV. */
    size_t plan_bytes, piece_bytes;
    uint32_t next_plan;
    uint64_t n_plans;
    /* Counted here, where steps are executed. */
    uint64_t steps, rows_computed;
    struct dskv_step_under_way steps_under_way[DSKV_STEPS_UNDER_WAY]; /* a ring */
    uint32_t n_submitted, n_collected;
    /* Rank 0: what the last step that was submitted left for the next one to name. */
    uint8_t *has_drawn;   /* [max_tokens]: row r draws a token */
    int32_t n_drawn_rows; /* rows of it */
    int wants_logits;     /* it wants whole rows: nothing is submitted before it is collected */
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
    uint64_t plan, drawn;
};

size_t dskv_piece_data_offset(int32_t n_blocks);
/* Bytes of n_heads heads of a piece in the pool's dtype. */
size_t dskv_piece_heads_bytes(const struct dskv_engine *engine, const struct dskv_piece_head *piece, int32_t n_heads);

uint32_t dskv_engine_under_way(const struct dskv_engine *engine);

/* Any rank: queues a step on this rank's device.  What fails here is told by the collect. */
void dskv_rank_submit(struct dskv_engine *engine, const struct dskv_plan *plan);
/* Without waiting: whether the oldest step under way has ended on this rank, well or not. */
int dskv_rank_has_ended(const struct dskv_engine *engine);
/* Waits until it has, counts it, and fills in this rank's answer; *results gets its rows, where rows are selected. */
enum dskv_exit dskv_rank_collect(struct dskv_engine *engine, struct dskv_answer *answer,
                                 const struct dskv_row_result **results, struct dskv_error *error);

/* Rank 0: a failure that another rank's answer tells of. */
enum dskv_exit dskv_engine_told(const struct dskv_answer *answer, int32_t rank, struct dskv_error *error);
/* Rank 0, of its own part: what its device says of a failure is told with the rank, as another's is. */
enum dskv_exit dskv_engine_told_by_own(const struct dskv_engine *engine, enum dskv_exit code, struct dskv_error *error);
/* Rank 0: the others' answers to the oldest command, when all are well; answers (may be null) get [n_ranks]. */
enum dskv_exit dskv_engine_gather(struct dskv_engine *engine, const struct dskv_answer **answers,
                                  struct dskv_error *error);
/* Where plan 0 or 1 lies in the stream's payload; 2: the piece of KV. */
char *dskv_engine_payload(const struct dskv_engine *engine, uint32_t which);

/* Executes a command that is no step on this rank; out: rank 0's destination of a copy out. */
enum dskv_exit dskv_execute(struct dskv_engine *engine, const struct dskv_command *command, void *out,
                            struct dskv_answer *answer, struct dskv_error *error);

#endif
