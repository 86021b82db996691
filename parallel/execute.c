/* Execute: what each command but a step does on a rank, the same function everywhere. */
#include "base/memory.h"
#include "parallel/engine_parts.h"

#include <string.h>

size_t dskv_piece_data_offset(int32_t n_blocks)
{
    size_t bytes = sizeof(struct dskv_piece_head) + (size_t)n_blocks * sizeof(int32_t);
    return dskv_whole_lines(bytes);
}

size_t dskv_piece_heads_bytes(const struct dskv_engine *engine, const struct dskv_piece_head *piece, int32_t n_heads)
{
    return (size_t)n_heads * (size_t)(piece->stop - piece->start) * (size_t)engine->info.model.head_dim *
           dskv_dtype_bytes(engine->kv.dtype);
}

/* The piece on this rank: `dense` at the start of its slot, the table behind it, both in device memory. */
static struct dskv_kv_dense dense_piece(const struct dskv_engine *engine, const struct dskv_piece_head *piece,
                                        int32_t first_head, int32_t n_heads)
{
    char *slot = dskv_comm_slot(engine->comm);
    size_t at = dskv_whole_lines(dskv_piece_heads_bytes(engine, piece, n_heads));
    dskv_device_upload(engine->device, slot + at, piece + 1, (size_t)piece->n_blocks * sizeof(int32_t));
    return (struct dskv_kv_dense){.kv = engine->kv,
                                  .layer = piece->layer,
                                  .is_value = piece->is_value,
                                  .first_head = first_head,
                                  .n_heads = n_heads,
                                  .table = (const int32_t *)(slot + at),
                                  .start = piece->start,
                                  .stop = piece->stop,
                                  .dense = slot};
}

/* Each head from its lowest holder; shards are in head order, so rank 0 puts them one after the other. */
static enum dskv_exit execute_copy_out(struct dskv_engine *engine, const struct dskv_piece_head *piece, char *out,
                                       struct dskv_error *error)
{
    const void *const *slots;
    const struct dskv_shard *own = &engine->shard;
    if (own->n_export_heads) {
        struct dskv_kv_dense p =
            dense_piece(engine, piece, own->first_export_head - own->first_kv_head, own->n_export_heads);
        dskv_op_kv_gather(engine->device, &p);
    }
    enum dskv_exit code = dskv_comm_exchange(
        engine->comm, dskv_piece_heads_bytes(engine, piece, engine->kv.n_kv_heads_local), &slots, error);
    for (int32_t r = 0; !code && out && r < own->n_ranks; r++) {
        struct dskv_shard shard;
        code = dskv_shard_of(&engine->info.model, r, own->n_ranks, &shard, error);
        dskv_device_download(engine->device, out + dskv_piece_heads_bytes(engine, piece, shard.first_export_head),
                             slots[r], dskv_piece_heads_bytes(engine, piece, shard.n_export_heads));
    }
    return code;
}

static void execute_copy_in(struct dskv_engine *engine, const struct dskv_piece_head *piece)
{
    const struct dskv_shard *own = &engine->shard;
    const char *data = (const char *)piece + dskv_piece_data_offset(piece->n_blocks);
    struct dskv_kv_dense p = dense_piece(engine, piece, 0, own->n_kv_heads_local);
    dskv_device_upload(engine->device, p.dense, data + dskv_piece_heads_bytes(engine, piece, own->first_kv_head),
                       dskv_piece_heads_bytes(engine, piece, own->n_kv_heads_local));
    dskv_op_kv_scatter(engine->device, &p);
}

static void execute_stats(const struct dskv_engine *engine, struct dskv_answer *answer)
{
    struct dskv_rank_stats stats = {.weight_bytes = engine->weights->sharded_bytes,
                                    .replicated_bytes = engine->weights->replicated_bytes,
                                    .pool_bytes = (uint64_t)engine->kv.n_blocks * engine->kv.block_bytes,
                                    .resident_bytes = dskv_resident_bytes(),
                                    .steps = engine->steps,
                                    .rows_computed = engine->rows_computed,
                                    .read_bytes = engine->weights->read_bytes};
    _Static_assert(sizeof stats <= DSKV_ANSWER_BYTES, "stats fit an answer");
    memcpy(answer->data, &stats, sizeof stats);
}

enum dskv_exit dskv_execute(struct dskv_engine *engine, const struct dskv_command *command, void *out,
                            struct dskv_answer *answer, struct dskv_error *error)
{
    DSKV_ASSERT(command->kind != DSKV_COMMAND_STEP, "a step is submitted and collected, kind %d", (int)command->kind);
    const void *payload = (const char *)dskv_stream_payload(engine->stream) + command->offset;
    enum dskv_exit code = DSKV_EXIT_OK;
    switch ((enum dskv_command_kind)command->kind) {
    case DSKV_COMMAND_COPY_OUT: code = execute_copy_out(engine, payload, out, error); break;
    case DSKV_COMMAND_COPY_IN: execute_copy_in(engine, payload); break;
    case DSKV_COMMAND_STATS: execute_stats(engine, answer); break;
    case DSKV_COMMAND_STEP:
    case DSKV_COMMAND_STOP: break;
    }
    if (!code && dskv_device_sync(engine->device, error))
        code = DSKV_EXIT_DEVICE;
    return code;
}
