/* The fields of every request. */
#include "codec_fields.h"

#include <float.h>

/* ---- maps inside requests --------------------------------------------------------------------------------------- */

static const struct dskv_field prefix_fields[] = {
    {.name = "cache", .type = DSKV_FIELD_ID, MUST, AT(dskv_prefix, cache)},
    {.name = "length", .type = DSKV_FIELD_INT32, MUST, AT(dskv_prefix, length), WITHIN(0, DSKV_MAX_CONTEXT)},
    {.name = "check", .type = DSKV_FIELD_UINT32, AT(dskv_prefix, check), MARK(dskv_prefix, has_check)},
};
TABLE(prefix_table, dskv_prefix, prefix_fields);

static const struct dskv_field want_fields[] = {
    {.name = "logits", .type = DSKV_FIELD_RANGE, AT(dskv_want, logits_start), WITHIN(0, DSKV_MAX_CONTEXT)},
    {.name = "logits_dtype", NAMES(dskv_field_dtype, DSKV_F32, DSKV_F16), AT(dskv_want, logits_dtype)},
    {.name = "argmax", .type = DSKV_FIELD_BOOL, AT(dskv_want, argmax)},
    {.name = "topk", .type = DSKV_FIELD_INT32, AT(dskv_want, topk), WITHIN(0, DSKV_MAX_TOPK)},
    {.name = "score", .type = DSKV_FIELD_BOOL, AT(dskv_want, score)},
};
TABLE(want_table, dskv_want, want_fields);

#define PREFIX(of, member)                                                                                             \
    {                                                                                                                  \
        .name = "prefix", .type = DSKV_FIELD_MAP, AT(of, member), MARK(of, member.present), .table = &prefix_table     \
    }
#define CONSUME(of, member)                                                                                            \
    {                                                                                                                  \
        .name = "consume", .type = DSKV_FIELD_BOOL, AT(of, member)                                                     \
    }

static const struct dskv_field sequence_fields[] = {
    PREFIX(dskv_forward_sequence, prefix),
    {.name = "tokens", TOKENS, MUST, AT(dskv_forward_sequence, tokens)},
    {.name = "want", .type = DSKV_FIELD_MAP, AT(dskv_forward_sequence, want), .table = &want_table},
    CONSUME(dskv_forward_sequence, consume),
};
TABLE(sequence_table, dskv_forward_sequence, sequence_fields);

/* ---- requests --------------------------------------------------------------------------------------------------- */

#define ID_RANGE WITHIN(1, INT64_MAX)

static const struct dskv_field request_fields[] = {
    {.name = "v", .type = DSKV_FIELD_INT32, MUST, AT(dskv_request, version)},
    {.name = "id", .type = DSKV_FIELD_UINT64, MUST, AT(dskv_request, id), ID_RANGE},
    {.name = "op",
     NAMES(dskv_field_op, 0, DSKV_N_OPS - 1),
     MUST,
     AT(dskv_request, op),
     .refusal = DSKV_UNKNOWN_OPERATION}, /* the last field of the head */
    {.name = "deadline_ms", .type = DSKV_FIELD_INT32, AT(dskv_request, deadline_ms), WITHIN(0, INT32_MAX)},
    {.name = "session", .type = DSKV_FIELD_ID, AT(dskv_request, session), MARK(dskv_request, has_session)},
    {.name = "free",
     .type = DSKV_FIELD_IDS,
     AT(dskv_request, free),
     COUNT(dskv_request, n_free),
     WITHIN(0, DSKV_MAX_FREE_IDS)},
};
const struct dskv_table dskv_request_head = {request_fields, 3, sizeof(struct dskv_request)};
const struct dskv_table dskv_request_envelope = {request_fields, sizeof request_fields / sizeof request_fields[0],
                                                 sizeof(struct dskv_request)};

static const struct dskv_field hello_fields[] = {
    {.name = "client", CHARS(dskv_request, hello.client)},
    {.name = "versions",
     .type = DSKV_FIELD_INTS,
     AT(dskv_request, hello.versions),
     COUNT(dskv_request, hello.n_versions),
     WITHIN(0, DSKV_MAX_VERSIONS)},
};
TABLE(hello_table, dskv_request, hello_fields);

#define FOLLOWED(member)                                                                                               \
    {                                                                                                                  \
        .name = "request", .type = DSKV_FIELD_UINT64, MUST, AT(dskv_request, member), ID_RANGE                         \
    }

static const struct dskv_field cancel_fields[] = {FOLLOWED(cancel.request)};
TABLE(cancel_table, dskv_request, cancel_fields);

static const struct dskv_field forward_fields[] = {
    {.name = "sequences",
     .type = DSKV_FIELD_MAPS,
     MUST,
     AT(dskv_request, forward.sequences),
     COUNT(dskv_request, forward.n),
     WITHIN(1, DSKV_MAX_SEQUENCES_PER_REQUEST),
     .table = &sequence_table},
};
TABLE(forward_table, dskv_request, forward_fields);

static const struct dskv_field verify_fields[] = {
    PREFIX(dskv_request, verify.prefix),
    {.name = "tokens", TOKENS, MUST, AT(dskv_request, verify.tokens)},
    {.name = "draft", TOKENS, MUST, AT(dskv_request, verify.draft)},
    CONSUME(dskv_request, verify.consume),
};
TABLE(verify_table, dskv_request, verify_fields);

static const struct dskv_field generate_fields[] = {
    PREFIX(dskv_request, generate.prefix),
    {.name = "tokens", TOKENS, MUST, AT(dskv_request, generate.tokens)},
    {.name = "max_tokens",
     .type = DSKV_FIELD_INT32,
     AT(dskv_request, generate.max_tokens),
     WITHIN(1, DSKV_MAX_CONTEXT),
     .initial = 128},
    {.name = "temperature",
     .type = DSKV_FIELD_DOUBLE,
     AT(dskv_request, generate.temperature),
     .high = 100,
     .valid = "0 .. 100"},
    {.name = "top_k", .type = DSKV_FIELD_INT32, AT(dskv_request, generate.top_k), WITHIN(0, DSKV_MAX_VOCAB)},
    {.name = "top_p",
     .type = DSKV_FIELD_DOUBLE,
     AT(dskv_request, generate.top_p),
     .low = DBL_TRUE_MIN,
     .high = 1,
     .initial_double = 1,
     .valid = "above 0, at most 1"},
    {.name = "min_p", .type = DSKV_FIELD_DOUBLE, AT(dskv_request, generate.min_p), .high = 1, .valid = "0 .. 1"},
    {.name = "seed",
     .type = DSKV_FIELD_UINT64,
     AT(dskv_request, generate.seed),
     MARK(dskv_request, generate.has_seed),
     WITHIN(0, INT64_MAX)},
    {.name = "stop",
     .type = DSKV_FIELD_TENSORS,
     .dtypes = 1u << DSKV_I32,
     .n_dims = 1,
     AT(dskv_request, generate.stops),
     COUNT(dskv_request, generate.n_stops),
     WITHIN(0, DSKV_MAX_STOPS)},
    {.name = "ignore_eos", .type = DSKV_FIELD_BOOL, AT(dskv_request, generate.ignore_eos)},
    {.name = "stream", .type = DSKV_FIELD_BOOL, AT(dskv_request, generate.stream)},
    CONSUME(dskv_request, generate.consume),
};
TABLE(generate_table, dskv_request, generate_fields);

static const struct dskv_field export_fields[] = {
    {.name = "cache", .type = DSKV_FIELD_ID, MUST, AT(dskv_request, export_.cache)},
    {.name = "length", .type = DSKV_FIELD_INT32, MUST, AT(dskv_request, export_.length), WITHIN(0, DSKV_MAX_CONTEXT)},
    {.name = "credits", .type = DSKV_FIELD_INT32, AT(dskv_request, export_.credits), CREDITS, .initial = 4},
};
TABLE(export_table, dskv_request, export_fields);

static const struct dskv_field credit_fields[] = {
    FOLLOWED(credit.request),
    {.name = "n", .type = DSKV_FIELD_INT32, MUST, AT(dskv_request, credit.n), CREDITS},
};
TABLE(credit_table, dskv_request, credit_fields);

static const struct dskv_field import_fields[] = {
    {.name = "tokens", TOKENS, MUST, AT(dskv_request, import_.tokens)},
    {.name = "dtype", NAMES(dskv_field_dtype, DSKV_F32, DSKV_BF16), MUST, AT(dskv_request, import_.dtype)},
    {.name = "n_layers",
     .type = DSKV_FIELD_INT32,
     MUST,
     AT(dskv_request, import_.n_layers),
     WITHIN(1, DSKV_MAX_LAYERS)},
    {.name = "n_kv_heads",
     .type = DSKV_FIELD_INT32,
     MUST,
     AT(dskv_request, import_.n_kv_heads),
     WITHIN(1, DSKV_MAX_HEADS)},
    {.name = "head_dim",
     .type = DSKV_FIELD_INT32,
     MUST,
     AT(dskv_request, import_.head_dim),
     WITHIN(1, DSKV_MAX_HEAD_DIM)},
    {.name = "model", CHARS(dskv_request, import_.model)},
    {.name = "convert", .type = DSKV_FIELD_BOOL, AT(dskv_request, import_.convert)},
};
TABLE(import_table, dskv_request, import_fields);

static const struct dskv_field part_fields[] = {FOLLOWED(part.request), PART(part.part., dskv_request)};
TABLE(part_table, dskv_request, part_fields);

static const struct dskv_field commit_fields[] = {FOLLOWED(commit.request)};
TABLE(commit_table, dskv_request, commit_fields);

static const struct dskv_field free_fields[] = {
    {.name = "caches",
     .type = DSKV_FIELD_IDS,
     AT(dskv_request, free_caches.caches),
     COUNT(dskv_request, free_caches.n),
     WITHIN(0, DSKV_MAX_FREE_IDS)},
    {.name = "all", .type = DSKV_FIELD_BOOL, AT(dskv_request, free_caches.all)},
};
TABLE(free_table, dskv_request, free_fields);

const struct dskv_table *dskv_request_table(enum dskv_op op)
{
    static const struct dskv_table *const tables[DSKV_N_OPS] = {
        [DSKV_OP_HELLO] = &hello_table,   [DSKV_OP_INFO] = &dskv_no_fields,     [DSKV_OP_STATS] = &dskv_no_fields,
        [DSKV_OP_PING] = &dskv_no_fields, [DSKV_OP_CANCEL] = &cancel_table,     [DSKV_OP_FORWARD] = &forward_table,
        [DSKV_OP_VERIFY] = &verify_table, [DSKV_OP_GENERATE] = &generate_table, [DSKV_OP_EXPORT] = &export_table,
        [DSKV_OP_CREDIT] = &credit_table, [DSKV_OP_IMPORT] = &import_table,     [DSKV_OP_PART] = &part_table,
        [DSKV_OP_COMMIT] = &commit_table, [DSKV_OP_FREE] = &free_table,
    };
    return tables[op];
}
