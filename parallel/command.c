/* Command: how rank 0 gives a command to all ranks and what it makes of the answers; and the other ranks' loop. */
#include "base/memory.h"
#include "parallel/engine_parts.h"

#include <stdio.h>
#include <string.h>

/* ---- giving and taking commands ---------------------------------------------------------------- */

enum dskv_exit dskv_engine_told(const struct dskv_answer *answer, int32_t rank, struct dskv_error *error)
{
    return dskv_fail_exit(error, (enum dskv_exit)answer->exit, "rank %d: %s", (int)rank, answer->message);
}

enum dskv_exit dskv_engine_told_by_own(const struct dskv_engine *engine, enum dskv_exit code, struct dskv_error *error)
{
    if (code != DSKV_EXIT_DEVICE || engine->info.n_ranks == 1)
        return code;
    struct dskv_error own = *error;
    return dskv_fail_exit(error, code, "rank 0: %s", own.message);
}

enum dskv_exit dskv_engine_gather(struct dskv_engine *engine, const struct dskv_answer **answers,
                                  struct dskv_error *error)
{
    const struct dskv_answer *all = dskv_stream_collect(engine->stream, error);
    if (!all)
        return DSKV_EXIT_RANK_LOST;
    for (int32_t r = 1; r < engine->info.n_ranks; r++)
        if (all[r].exit)
            return dskv_engine_told(&all[r], r, error);
    if (answers)
        *answers = all;
    return DSKV_EXIT_OK;
}

/* Posts a command that is no step, executes rank 0's own part, collects. */
static enum dskv_exit give(struct dskv_engine *engine, const struct dskv_command *command, void *out,
                           const struct dskv_answer **answers, struct dskv_error *error)
{
    DSKV_ASSERT(!dskv_engine_under_way(engine), "%u steps are under way", dskv_engine_under_way(engine));
    dskv_stream_post(engine->stream, command);
    enum dskv_exit code = dskv_execute(engine, command, out, dskv_stream_answer(engine->stream), error);
    if (code)
        return dskv_engine_told_by_own(engine, code, error); /* the job ends: nobody waits for the others */
    return dskv_engine_gather(engine, answers, error);
}

/* Answers the oldest command that was taken. */
static enum dskv_exit answer(struct dskv_engine *engine, enum dskv_exit code, const struct dskv_error *error)
{
    struct dskv_answer *own = dskv_stream_answer(engine->stream);
    own->exit = (int32_t)code;
    memcpy(own->message, error->message, sizeof own->message);
    dskv_stream_done(engine->stream);
    return code;
}

/* While steps run: answers each that has ended, until the next command is there.  A command is looked for first, so
 * that the device gets it before it has nothing to do. */
static enum dskv_exit answer_steps(struct dskv_engine *engine)
{
    struct dskv_watch watch = dskv_watch_begin(&engine->segment.peers);
    while (dskv_engine_under_way(engine) && !dskv_stream_has_next(engine->stream)) {
        if (!dskv_rank_has_ended(engine)) {
            if (dskv_watch_pause(&watch) >= 0)
                return DSKV_EXIT_RANK_LOST;
            continue;
        }
        const struct dskv_row_result *results;
        struct dskv_error error = {0};
        enum dskv_exit code = dskv_rank_collect(engine, dskv_stream_answer(engine->stream), &results, &error);
        if (answer(engine, code, &error))
            return code;
        watch = dskv_watch_begin(&engine->segment.peers);
    }
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_engine_work(struct dskv_engine *engine)
{
    for (;;) {
        enum dskv_exit code = answer_steps(engine);
        const struct dskv_command *command = code ? NULL : dskv_stream_next(engine->stream);
        struct dskv_error error = {0};
        if (!command)
            return code ? code : DSKV_EXIT_RANK_LOST;
        if (command->kind == DSKV_COMMAND_STEP) {
            dskv_rank_submit(engine, (const void *)(dskv_engine_payload(engine, 0) + command->offset));
            continue;
        }
        int last = command->kind == DSKV_COMMAND_STOP;
        code = dskv_execute(engine, command, NULL, dskv_stream_answer(engine->stream), &error);
        if (answer(engine, code, &error) || last)
            return code;
    }
}

void dskv_engine_stop(struct dskv_engine *engine)
{
    struct dskv_command stop = {.kind = DSKV_COMMAND_STOP};
    struct dskv_error error; /* a rank that is lost needs no stop */
    give(engine, &stop, NULL, NULL, &error);
}

enum dskv_exit dskv_engine_check(const struct dskv_engine *engine, struct dskv_error *error)
{
    int lost = dskv_peers_first_lost(&engine->segment.peers);
    return lost < 0 ? DSKV_EXIT_OK : dskv_peers_fail_lost(&engine->segment.peers, lost, error);
}

enum dskv_exit dskv_engine_stats(struct dskv_engine *engine, struct dskv_rank_stats *stats, struct dskv_error *error)
{
    const struct dskv_answer *answers;
    struct dskv_command command = {.kind = DSKV_COMMAND_STATS};
    enum dskv_exit code = give(engine, &command, NULL, &answers, error);
    for (int32_t r = 0; !code && r < engine->info.n_ranks; r++)
        memcpy(&stats[r], answers[r].data, sizeof stats[r]);
    return code;
}

char *dskv_engine_payload(const struct dskv_engine *engine, uint32_t which)
{
    return (char *)dskv_stream_payload(engine->stream) + which * engine->plan_bytes;
}

/* ---- pieces of KV ------------------------------------------------------------------------------ */

size_t dskv_engine_kv_piece_bytes(const struct dskv_engine *engine, const struct dskv_kv_piece *piece,
                                  enum dskv_dtype dtype)
{
    return (size_t)engine->info.model.n_kv_heads * (size_t)(piece->stop - piece->start) *
           (size_t)engine->info.model.head_dim * dskv_dtype_bytes(dtype);
}

int32_t dskv_engine_kv_piece_tokens(const struct dskv_engine *engine)
{
    size_t token_bytes =
        (size_t)engine->info.model.n_kv_heads * (size_t)engine->info.model.head_dim * dskv_dtype_bytes(DSKV_F32);
    int32_t tokens = (int32_t)(DSKV_PART_BYTES / token_bytes);
    tokens = tokens < engine->info.max_model_len ? tokens : engine->info.max_model_len;
    return tokens < 1 ? 1 : tokens;
}

/* Writes head and table of the piece into the stream's payload; only the blocks up to its end travel. */
static struct dskv_piece_head *place_piece(const struct dskv_engine *engine, const struct dskv_kv_piece *piece)
{
    int32_t n_blocks = (piece->stop + engine->kv.block_tokens - 1) / engine->kv.block_tokens;
    DSKV_ASSERT(piece->layer >= 0 && piece->layer < engine->kv.n_layers, "layer %d", (int)piece->layer);
    DSKV_ASSERT(piece->start >= 0 && piece->start < piece->stop && n_blocks <= piece->n_blocks &&
                    piece->stop <= engine->info.max_model_len,
                "tokens [%d, %d) of %d blocks", (int)piece->start, (int)piece->stop, (int)piece->n_blocks);
    DSKV_ASSERT(piece->stop - piece->start <= dskv_engine_kv_piece_tokens(engine), "%d tokens",
                (int)(piece->stop - piece->start));
    for (int32_t b = 0; b < n_blocks; b++)
        DSKV_ASSERT(piece->table[b] >= 0 && piece->table[b] < engine->kv.n_blocks, "block %d", (int)piece->table[b]);
    struct dskv_piece_head *head = (struct dskv_piece_head *)dskv_engine_payload(engine, 2);
    *head = (struct dskv_piece_head){piece->layer, piece->is_value, piece->start, piece->stop, n_blocks};
    memcpy(head + 1, piece->table, (size_t)n_blocks * sizeof *piece->table);
    return head;
}

static struct dskv_command piece_command(const struct dskv_engine *engine, enum dskv_command_kind kind)
{
    return (struct dskv_command){.kind = kind, .offset = 2 * engine->plan_bytes, .bytes = engine->piece_bytes};
}

enum dskv_exit dskv_engine_copy_out(struct dskv_engine *engine, const struct dskv_kv_piece *piece, void *bytes,
                                    struct dskv_error *error)
{
    place_piece(engine, piece);
    struct dskv_command command = piece_command(engine, DSKV_COMMAND_COPY_OUT);
    return give(engine, &command, bytes, NULL, error);
}

enum dskv_exit dskv_engine_copy_in(struct dskv_engine *engine, const struct dskv_kv_piece *piece, enum dskv_dtype dtype,
                                   const void *bytes, struct dskv_error *error)
{
    struct dskv_piece_head *head = place_piece(engine, piece);
    char *data = (char *)head + dskv_piece_data_offset(head->n_blocks);
    size_t n = dskv_engine_kv_piece_bytes(engine, piece, dtype) / dskv_dtype_bytes(dtype);
    dskv_convert(data, engine->kv.dtype, bytes, dtype, n);
    struct dskv_command command = piece_command(engine, DSKV_COMMAND_COPY_IN);
    return give(engine, &command, NULL, NULL, error);
}

#define FINITE_CHUNK 1024

int dskv_engine_kv_finite(const struct dskv_engine *engine, enum dskv_dtype dtype, const void *bytes, size_t n,
                          size_t *index)
{
    float converted[FINITE_CHUNK]; /* room for any dtype */
    for (size_t at = 0; at < n; at += FINITE_CHUNK) {
        size_t m = n - at < FINITE_CHUNK ? n - at : FINITE_CHUNK;
        size_t first =
            dskv_convert(converted, engine->kv.dtype, (const char *)bytes + at * dskv_dtype_bytes(dtype), dtype, m);
        if (first < m) {
            *index = at + first;
            return 0;
        }
    }
    return 1;
}
