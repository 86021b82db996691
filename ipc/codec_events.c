/* The fields of every event. */
#include "codec_fields.h"

/* ---- maps inside events ----------------------------------------------------------------------------------------- */

/* A cache: three fields in the map that they belong to. */
/* A cache in an event: three fields in the map that they belong to. */
#define CACHE(of, member)                                                                                              \
    {.name = "cache",                                                                                                  \
     .type = DSKV_FIELD_ID,                                                                                            \
     .flags = DSKV_FIELD_REQUIRED | DSKV_FIELD_NIL,                                                                    \
     AT(of, member.id),                                                                                                \
     MARK(of, member.present)},                                                                                        \
        {.name = "length", .type = DSKV_FIELD_INT32, MUST, AT(of, member.length), WITHIN(0, DSKV_MAX_CONTEXT)},        \
    {                                                                                                                  \
        .name = "origin", MUST, CHARS(of, member.origin)                                                               \
    }
#define COUNTS(of, path)                                                                                               \
    {.name = "cached", .type = DSKV_FIELD_INT32, MUST, AT(of, path cached)},                                           \
    {                                                                                                                  \
        .name = "computed", .type = DSKV_FIELD_INT32, MUST, AT(of, path computed)                                      \
    }
#define NOTHING

static const struct dskv_field forward_result_fields[] = {
    CACHE(dskv_forward_result, cache),
    COUNTS(dskv_forward_result, NOTHING),
    {.name = "logits",
     TENSOR(1u << DSKV_F32 | 1u << DSKV_F16, 2),
     .flags = DSKV_FIELD_FRAMELESS,
     AT(dskv_forward_result, logits)},
    {.name = "argmax", TOKENS, AT(dskv_forward_result, argmax)},
    {.name = "topk_ids", TENSOR(1u << DSKV_I32, 2), AT(dskv_forward_result, topk_ids)},
    {.name = "topk_logprobs", TENSOR(1u << DSKV_F32, 2), AT(dskv_forward_result, topk_logprobs)},
    {.name = "scores", TENSOR(1u << DSKV_F32, 1), AT(dskv_forward_result, scores)},
};
TABLE(forward_result_table, dskv_forward_result, forward_result_fields);

#define INT64(of, member)                                                                                              \
    {                                                                                                                  \
        .name = #member, .type = DSKV_FIELD_INT64, MUST, AT(of, member)                                                \
    }
#define INT32(of, member)                                                                                              \
    {                                                                                                                  \
        .name = #member, .type = DSKV_FIELD_INT32, MUST, AT(of, member)                                                \
    }

static const struct dskv_field limits_fields[] = {
    INT64(dskv_limits, header_bytes),
    INT64(dskv_limits, frame_bytes),
    INT64(dskv_limits, request_bytes),
    INT64(dskv_limits, reply_bytes),
    INT64(dskv_limits, part_bytes),
    INT32(dskv_limits, sequences),
    INT32(dskv_limits, topk),
    INT32(dskv_limits, stops),
    INT32(dskv_limits, stop_tokens),
    INT32(dskv_limits, free_ids),
    INT32(dskv_limits, credits),
    INT32(dskv_limits, max_model_len),
    INT32(dskv_limits, max_batch_tokens),
    INT32(dskv_limits, max_sequences),
};
TABLE(limits_table, dskv_limits, limits_fields);

static const struct dskv_field rank_fields[] = {
    INT64(dskv_rank_counters, weight_bytes), INT64(dskv_rank_counters, replicated_bytes),
    INT64(dskv_rank_counters, pool_bytes),   INT64(dskv_rank_counters, resident_bytes),
    INT64(dskv_rank_counters, steps),        INT64(dskv_rank_counters, rows_computed),
    INT64(dskv_rank_counters, read_bytes),
};
TABLE(rank_table, dskv_rank_counters, rank_fields);

#define DETAIL(member, bit)                                                                                            \
    {                                                                                                                  \
        .name = #member, .type = DSKV_FIELD_INT64, AT(dskv_error, member), MARK(dskv_error, has), .present_bit = (bit) \
    }

static const struct dskv_field details_fields[] = {
    DETAIL(needed, DSKV_HAS_NEEDED),
    DETAIL(free, DSKV_HAS_FREE),
    DETAIL(limit, DSKV_HAS_LIMIT),
    DETAIL(length, DSKV_HAS_LENGTH),
    DETAIL(index, DSKV_HAS_INDEX),
    {.name = "field", CHARS(dskv_error, field)},
    {.name = "valid", CHARS(dskv_error, valid)},
};
TABLE(details_table, dskv_error, details_fields);

/* ---- events ----------------------------------------------------------------------------------------------------- */

static const struct dskv_field event_fields[] = {
    {.name = "id", .type = DSKV_FIELD_UINT64, MUST, AT(dskv_event, id), WITHIN(0, INT64_MAX)},
    {.name = "kind", NAMES(dskv_field_kind, 0, DSKV_N_EVENT_KINDS - 1), MUST, AT(dskv_event, kind)},
    {.name = "last", .type = DSKV_FIELD_BOOL, MUST, AT(dskv_event, last)},
    {.name = "op",
     NAMES(dskv_field_op, 0, DSKV_N_OPS - 1),
     .flags = DSKV_FIELD_OPEN,
     AT(dskv_event, op),
     .initial = DSKV_N_OPS},
};
const struct dskv_table dskv_event_envelope = {event_fields, sizeof event_fields / sizeof event_fields[0],
                                               sizeof(struct dskv_event)};

static const struct dskv_field error_fields[] = {
    {.name = "code",
     NAMES(dskv_field_code, DSKV_OK + 1, DSKV_N_CODES - 1),
     .flags = DSKV_FIELD_REQUIRED | DSKV_FIELD_OPEN,
     AT(dskv_event, error.code),
     .initial = DSKV_INTERNAL},
    {.name = "message", MUST, CHARS(dskv_event, error.message)},
    {.name = "details", .type = DSKV_FIELD_MAP, MUST, AT(dskv_event, error), .table = &details_table},
};
TABLE(error_table, dskv_event, error_fields);

#define LIMITS(member)                                                                                                 \
    {                                                                                                                  \
        .name = "limits", .type = DSKV_FIELD_MAP, MUST, AT(dskv_event, member), .table = &limits_table                 \
    }

static const struct dskv_field hello_result_fields[] = {
    {.name = "version", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, hello.version)},
    {.name = "session", .type = DSKV_FIELD_ID, MUST, AT(dskv_event, hello.session)},
    {.name = "lease_ms", .type = DSKV_FIELD_INT64, MUST, AT(dskv_event, hello.lease_ms)},
    {.name = "server_version", MUST, CHARS(dskv_event, hello.server_version)},
    LIMITS(hello.limits),
};
TABLE(hello_result_table, dskv_event, hello_result_fields);

#define INFO_INT(member)                                                                                               \
    {                                                                                                                  \
        .name = #member, .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, info.member)                                   \
    }
#define INFO_CHARS(member)                                                                                             \
    {                                                                                                                  \
        .name = #member, MUST, CHARS(dskv_event, info.member)                                                          \
    }
#define INFO_DTYPE(member)                                                                                             \
    {                                                                                                                  \
        .name = #member, NAMES(dskv_field_dtype, DSKV_F32, DSKV_BF16), MUST, AT(dskv_event, info.member)               \
    }

static const struct dskv_field info_result_fields[] = {
    INFO_CHARS(server_version),
    INFO_INT(protocol_version),
    INFO_CHARS(model_dir),
    INFO_CHARS(family),
    INFO_CHARS(fingerprint),
    INFO_CHARS(numerics_id),
    INFO_CHARS(device),
    INFO_INT(n_ranks),
    INFO_INT(n_layers),
    INFO_INT(n_heads),
    INFO_INT(n_kv_heads),
    INFO_INT(head_dim),
    INFO_INT(width),
    INFO_INT(mlp),
    INFO_INT(vocab),
    INFO_INT(max_context),
    INFO_DTYPE(weight_dtype),
    INFO_DTYPE(activation_dtype),
    INFO_DTYPE(kv_dtype),
    {.name = "end_tokens",
     .type = DSKV_FIELD_INTS,
     MUST,
     AT(dskv_event, info.end_tokens),
     COUNT(dskv_event, info.n_end_tokens),
     WITHIN(0, DSKV_MAX_END_TOKENS)},
    INFO_INT(block_tokens),
    INFO_INT(n_blocks),
    LIMITS(info.limits),
};
TABLE(info_result_table, dskv_event, info_result_fields);

#define COUNTER(member)                                                                                                \
    {                                                                                                                  \
        .name = #member, .type = DSKV_FIELD_INT64, MUST, AT(dskv_event, stats.member)                                  \
    }

static const struct dskv_field stats_result_fields[] = {
    {.name = "uptime_s", .type = DSKV_FIELD_DOUBLE, MUST, AT(dskv_event, stats.uptime_s)},
    COUNTER(requests),
    COUNTER(errors),
    COUNTER(steps),
    COUNTER(rows_computed),
    COUNTER(tokens_cached),
    COUNTER(tokens_generated),
    COUNTER(blocks_total),
    COUNTER(blocks_used),
    COUNTER(blocks_reserved),
    COUNTER(caches),
    COUNTER(sessions),
    COUNTER(sequences_active),
    COUNTER(requests_queued),
    COUNTER(backlog_bytes),
    {.name = "ranks",
     .type = DSKV_FIELD_MAPS,
     MUST,
     AT(dskv_event, stats.ranks),
     COUNT(dskv_event, stats.n_ranks),
     WITHIN(0, DSKV_MAX_RANKS),
     .table = &rank_table},
};
TABLE(stats_result_table, dskv_event, stats_result_fields);

static const struct dskv_field cancel_result_fields[] = {
    {.name = "cancelled", .type = DSKV_FIELD_BOOL, MUST, AT(dskv_event, cancel.cancelled)},
};
TABLE(cancel_result_table, dskv_event, cancel_result_fields);

static const struct dskv_field forward_event_fields[] = {
    {.name = "sequences",
     .type = DSKV_FIELD_MAPS,
     MUST,
     AT(dskv_event, forward.sequences),
     COUNT(dskv_event, forward.n),
     WITHIN(1, DSKV_MAX_SEQUENCES_PER_REQUEST),
     .table = &forward_result_table},
};
TABLE(forward_event_table, dskv_event, forward_event_fields);

static const struct dskv_field verify_result_fields[] = {
    {.name = "accepted", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, verify.accepted)},
    {.name = "next", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, verify.next)},
    CACHE(dskv_event, verify.cache),
    COUNTS(dskv_event, verify.),
};
TABLE(verify_result_table, dskv_event, verify_result_fields);

static const struct dskv_field generate_result_fields[] = {
    {.name = "tokens", TOKENS, MUST, AT(dskv_event, generate.tokens)},
    {.name = "steps", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, generate.steps)},
    {.name = "finish_reason", NAMES(dskv_field_finish, 0, DSKV_N_FINISHES - 1), MUST, AT(dskv_event, generate.finish)},
    {.name = "seed", .type = DSKV_FIELD_UINT64, MUST, AT(dskv_event, generate.seed), WITHIN(0, INT64_MAX)},
    CACHE(dskv_event, generate.cache),
    COUNTS(dskv_event, generate.),
};
TABLE(generate_result_table, dskv_event, generate_result_fields);

static const struct dskv_field import_result_fields[] = {CACHE(dskv_event, import_)};
TABLE(import_result_table, dskv_event, import_result_fields);

static const struct dskv_field free_result_fields[] = {
    {.name = "n_freed", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, free_caches.n_freed)},
};
TABLE(free_result_table, dskv_event, free_result_fields);

static const struct dskv_field export_begin_fields[] = {
    {.name = "tokens", TOKENS, MUST, AT(dskv_event, export_begin.tokens)},
    {.name = "dtype", NAMES(dskv_field_dtype, DSKV_F32, DSKV_BF16), MUST, AT(dskv_event, export_begin.dtype)},
    {.name = "n_layers", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, export_begin.n_layers)},
    {.name = "n_kv_heads", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, export_begin.n_kv_heads)},
    {.name = "head_dim", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, export_begin.head_dim)},
    {.name = "length", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, export_begin.length)},
    {.name = "model", MUST, CHARS(dskv_event, export_begin.model)},
    {.name = "origin", MUST, CHARS(dskv_event, export_begin.origin)},
    {.name = "n_parts", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, export_begin.n_parts)},
};
TABLE(export_begin_table, dskv_event, export_begin_fields);

static const struct dskv_field import_begin_fields[] = {
    {.name = "credits", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, import_begin.credits), CREDITS},
    {.name = "part_tokens",
     .type = DSKV_FIELD_INT32,
     MUST,
     AT(dskv_event, import_begin.part_tokens),
     WITHIN(1, DSKV_MAX_CONTEXT)},
};
TABLE(import_begin_table, dskv_event, import_begin_fields);

static const struct dskv_field part_event_fields[] = {PART(part., dskv_event)};
TABLE(part_event_table, dskv_event, part_event_fields);

static const struct dskv_field rows_fields[] = {
    {.name = "sequence", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, rows.sequence)},
    {.name = "start", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, rows.start)},
    {.name = "data", TENSOR(1u << DSKV_F32 | 1u << DSKV_F16, 2), MUST, AT(dskv_event, rows.data)},
};
TABLE(rows_table, dskv_event, rows_fields);

static const struct dskv_field tokens_fields[] = {{.name = "tokens", TOKENS, MUST, AT(dskv_event, tokens)}};
TABLE(tokens_table, dskv_event, tokens_fields);

static const struct dskv_field credit_event_fields[] = {
    {.name = "n", .type = DSKV_FIELD_INT32, MUST, AT(dskv_event, credit.n), CREDITS},
};
TABLE(credit_event_table, dskv_event, credit_event_fields);

/* Rows by kind, columns by operation; followers have no event of their own but errors. */
const struct dskv_table *dskv_event_table(enum dskv_event_kind kind, enum dskv_op op)
{
    static const struct dskv_table *const results[DSKV_N_OPS] = {
        [DSKV_OP_HELLO] = &hello_result_table,   [DSKV_OP_INFO] = &info_result_table,
        [DSKV_OP_STATS] = &stats_result_table,   [DSKV_OP_PING] = &dskv_no_fields,
        [DSKV_OP_CANCEL] = &cancel_result_table, [DSKV_OP_FORWARD] = &forward_event_table,
        [DSKV_OP_VERIFY] = &verify_result_table, [DSKV_OP_GENERATE] = &generate_result_table,
        [DSKV_OP_EXPORT] = &dskv_no_fields,      [DSKV_OP_IMPORT] = &import_result_table,
        [DSKV_OP_FREE] = &free_result_table,
    };
    static const struct {
        const struct dskv_table *table;
        enum dskv_op op;
    } others[DSKV_N_EVENT_KINDS] = {
        [DSKV_EVENT_ROWS] = {&rows_table, DSKV_OP_FORWARD},
        [DSKV_EVENT_PART] = {&part_event_table, DSKV_OP_EXPORT},
        [DSKV_EVENT_TOKENS] = {&tokens_table, DSKV_OP_GENERATE},
        [DSKV_EVENT_CREDIT] = {&credit_event_table, DSKV_OP_IMPORT},
    };
    if (kind == DSKV_EVENT_ERROR)
        return &error_table;
    if ((unsigned)op >= DSKV_N_OPS)
        return NULL;
    if (kind == DSKV_EVENT_RESULT)
        return results[op];
    if (kind == DSKV_EVENT_BEGIN)
        return op == DSKV_OP_EXPORT ? &export_begin_table : op == DSKV_OP_IMPORT ? &import_begin_table : NULL;
    return others[kind].op == op ? others[kind].table : NULL;
}
