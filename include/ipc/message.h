/* Messages: requests and events as plain structs, between the wire (ipc/codec.c) and those who decide or call.
 *
 * One struct serves both ends: the daemon decodes requests and encodes events, the C client does the opposite.  A
 * message on the wire is one msgpack map (the header frame), then raw little-endian tensor frames that it describes;
 * this file gives the wire's field names, ipc/PROTOCOL.md explains them.  Knows nothing of sequences, blocks or ZeroMQ.
 *
 * Ownership: a decoded message owns all memory that it points to (tensors lie in the frames it took over, or in an
 * aligned copy where a frame starts at an odd address) and is released with dskv_request_clear / dskv_event_clear.  A
 * message that is only encoded may point anywhere; clear must then not be called.
 */
#ifndef DSKV_IPC_MESSAGE_H
#define DSKV_IPC_MESSAGE_H

#include "base/dtype.h"
#include "base/limits.h"
#include "base/status.h"

#include <stdint.h>

#define DSKV_PROTOCOL_VERSION 1
#define DSKV_MAX_VERSIONS 16 /* in one hello */

struct dskv_id { /* 128 random bits: a cache, a session (msgpack bin of 16 bytes) */
    uint8_t bytes[16];
};

/* A tensor in a frame: {dtype: "f32", shape: [..], frame: n}; n counts from 1, the header frame is 0. */
struct dskv_wire_tensor {
    const void *data; /* null: absent; an empty tensor that was decoded has data */
    enum dskv_dtype dtype;
    int32_t n_dims; /* 1 .. 3 */
    int64_t shape[3];
    size_t bytes;
};

/* ---- requests --------------------------------------------------------------------------------------------------- */

enum dskv_op {
    DSKV_OP_HELLO,
    DSKV_OP_INFO,
    DSKV_OP_STATS,
    DSKV_OP_PING,
    DSKV_OP_CANCEL,
    DSKV_OP_FORWARD,
    DSKV_OP_VERIFY,
    DSKV_OP_GENERATE,
    DSKV_OP_EXPORT,
    DSKV_OP_CREDIT,
    DSKV_OP_IMPORT,
    DSKV_OP_PART,
    DSKV_OP_COMMIT,
    DSKV_OP_FREE,
    DSKV_N_OPS
};
/* "hello", "info", ...; null past the end. */
const char *dskv_op_name(enum dskv_op op);

/* prefix: {cache: bin16, length: int, check?: uint32}.  check is the CRC-32 (zlib's) of the int32 token ids of the
 * prefix. */
struct dskv_prefix {
    int present;
    struct dskv_id cache;
    int32_t length;
    int has_check;
    uint32_t check;
};

/* want: {logits?: [start, stop], logits_dtype?: "f32"|"f16", argmax?: bool, topk?: int, score?: bool}.  The range
 * counts new tokens (with none, row 0 is the prefix's last token).  n_logits is stop - start; 0: no logits. */
struct dskv_want {
    int32_t logits_start, logits_stop;
    enum dskv_dtype logits_dtype; /* DSKV_F32 or DSKV_F16 */
    int argmax, score;
    int32_t topk;
};

/* forward: {sequences: [{prefix?, tokens, want?, consume?: bool}, ...]} */
struct dskv_forward_sequence {
    struct dskv_prefix prefix;
    struct dskv_wire_tensor tokens; /* i32 [n], n >= 0 */
    struct dskv_want want;
    int consume;
};

/* verify: {prefix?, tokens, draft, consume?} */
struct dskv_verify {
    struct dskv_prefix prefix;
    struct dskv_wire_tensor tokens, draft; /* i32 [n] */
    int consume;
};

/* generate: {prefix?, tokens, max_tokens?, temperature?, top_k?, top_p?, min_p?, seed?, stop?: [tensor], ignore_eos?,
 * stream?, consume?} */
struct dskv_generate {
    struct dskv_prefix prefix;
    struct dskv_wire_tensor tokens;
    int32_t max_tokens;  /* default 128, at least 1 */
    double temperature;  /* 0 .. 100, default 0 */
    int32_t top_k;       /* 0: all */
    double top_p, min_p; /* (0, 1], [0, 1] */
    int has_seed;
    uint64_t seed; /* 0 .. 2^63 - 1 on the wire */
    int32_t n_stops;
    struct dskv_wire_tensor *stops; /* each i32 [n], n >= 1 */
    int ignore_eos, stream, consume;
};

/* export: {cache, length, credits?}: parts flow while there are credits; credit: {request, n} gives more. */
struct dskv_export {
    struct dskv_id cache;
    int32_t length;
    int32_t credits; /* 1 .. DSKV_MAX_CREDITS, default 4 */
};

/* import: {tokens, dtype, n_layers, n_kv_heads, head_dim, model?: str, convert?: bool} */
struct dskv_import {
    struct dskv_wire_tensor tokens; /* i32 [length], length >= 0 */
    enum dskv_dtype dtype;          /* of the parts */
    int32_t n_layers, n_kv_heads, head_dim;
    char model[33]; /* fingerprint that the parts come from; empty: not said */
    int convert;    /* convert to the pool's dtype instead of refusing another */
};

/* part: {request, layer, which: "k"|"v", start, stop, data}: tokens [start, stop) of one layer's keys or values, data
 * is [n_kv_heads, stop - start, head_dim].  The same map, as an event, carries an export's parts. */
struct dskv_part {
    int32_t layer, is_value, start, stop;
    struct dskv_wire_tensor data;
};

struct dskv_request {
    int32_t version; /* v */
    uint64_t id;     /* id: chosen by the client, unique among its requests in flight */
    enum dskv_op op;
    int32_t deadline_ms; /* 0: none; counts from arrival */
    int has_session;
    struct dskv_id session; /* session?: from hello; owns what the request makes and renews the lease */
    int32_t n_free;
    struct dskv_id *free; /* free?: caches to free first; unknown ids are passed over */
    union {
        struct {
            char client[64];
            int32_t n_versions;
            int32_t versions[DSKV_MAX_VERSIONS];
        } hello; /* client?, versions? */
        struct {
            uint64_t request;
        } cancel; /* request: of the same route */
        struct {
            int32_t n;
            struct dskv_forward_sequence *sequences;
        } forward;
        struct dskv_verify verify;
        struct dskv_generate generate;
        struct dskv_export export_;
        struct {
            uint64_t request;
            int32_t n;
        } credit;
        struct dskv_import import_;
        struct {
            uint64_t request;
            struct dskv_part part;
        } part;
        struct {
            uint64_t request;
        } commit;
        struct {
            int32_t n;
            struct dskv_id *caches;
            int all;
        } free_caches; /* {caches: [bin16]} or {all: true} */
    };
    void *memory; /* the codec's */
};
void dskv_request_clear(struct dskv_request *request);

/* ---- events ----------------------------------------------------------------------------------------------------- */

/* kind on the wire: "result", "error", "begin", "part", "rows", "tokens", "credit".  result and error are last. */
enum dskv_event_kind {
    DSKV_EVENT_RESULT, /* the request is done; what it made */
    DSKV_EVENT_ERROR,  /* the request failed and changed nothing */
    DSKV_EVENT_BEGIN,  /* export: what follows; import: credits */
    DSKV_EVENT_PART,   /* export: a piece of KV */
    DSKV_EVENT_ROWS,   /* forward: rows of logits of one sequence, in order, before the result */
    DSKV_EVENT_TOKENS, /* generate with stream: new tokens */
    DSKV_EVENT_CREDIT, /* import: n more parts may come */
    DSKV_N_EVENT_KINDS
};
/* "result", "error", ...; null past the end. */
const char *dskv_event_kind_name(enum dskv_event_kind kind);

/* What a cache is: fields cache, length, origin.  cache is nil (present = 0) when none was made. */
struct dskv_cache_ref {
    int present;
    struct dskv_id id;
    int32_t length;
    char origin[33]; /* the numerics id it was computed under, or "foreign" */
};

/* One sequence of a forward's result.  Logits of up to DSKV_PART_BYTES come here; larger ones came before, as `rows`
 * events, and logits.data is then null with its shape set (n_dims 2). */
struct dskv_forward_result {
    struct dskv_cache_ref cache;
    int32_t cached, computed;
    struct dskv_wire_tensor logits;        /* f32 or f16 [rows, vocab] */
    struct dskv_wire_tensor argmax;        /* i32 [n] */
    struct dskv_wire_tensor topk_ids;      /* i32 [n, k] */
    struct dskv_wire_tensor topk_logprobs; /* f32 [n, k] */
    struct dskv_wire_tensor scores;        /* f32 [n] */
};

struct dskv_limits {
    int64_t header_bytes, frame_bytes, request_bytes, reply_bytes, part_bytes;
    int32_t sequences, topk, stops, stop_tokens, free_ids, credits;
    int32_t max_model_len, max_batch_tokens, max_sequences;
};

struct dskv_info_result {
    char server_version[32];
    int32_t protocol_version;
    char model_dir[256], family[32], fingerprint[33], numerics_id[33], device[64];
    int32_t n_ranks, n_layers, n_heads, n_kv_heads, head_dim, width, mlp, vocab, max_context;
    enum dskv_dtype weight_dtype, activation_dtype, kv_dtype;
    int32_t n_end_tokens;
    int32_t end_tokens[DSKV_MAX_END_TOKENS];
    int32_t block_tokens, n_blocks;
    struct dskv_limits limits;
};

struct dskv_rank_counters {
    int64_t weight_bytes, replicated_bytes, pool_bytes, resident_bytes, steps, rows_computed, read_bytes;
};

struct dskv_stats_result {
    double uptime_s;
    int64_t requests, errors, steps, rows_computed, tokens_cached, tokens_generated;
    int64_t blocks_total, blocks_used, blocks_reserved, caches, sessions, sequences_active, requests_queued;
    int64_t backlog_bytes;
    int32_t n_ranks;
    struct dskv_rank_counters *ranks; /* [n_ranks]; rows_computed above is rank 0's */
};

/* finish_reason of a generate. */
enum dskv_finish { DSKV_FINISH_STOP, DSKV_FINISH_LENGTH, DSKV_FINISH_CONTEXT, DSKV_FINISH_CANCELLED, DSKV_N_FINISHES };
/* "stop", "length", "context", "cancelled"; null past the end. */
const char *dskv_finish_name(enum dskv_finish finish);

struct dskv_event {
    uint64_t id; /* of the request */
    enum dskv_event_kind kind;
    int last;
    enum dskv_op op; /* whose result this is; on the wire too, so that an event can be read alone */
    union {
        struct dskv_error error; /* {code, message, details: {needed, free, limit, length, index, field, valid}} */
        struct {
            int32_t version;
            struct dskv_id session;
            int64_t lease_ms;
            char server_version[32];
            struct dskv_limits limits;
        } hello;
        struct dskv_info_result info;
        struct dskv_stats_result stats;
        struct {
            int cancelled;
        } cancel; /* 0: nothing in flight had this id */
        struct {
            int32_t n;
            struct dskv_forward_result *sequences;
        } forward;
        struct {
            int32_t accepted, next;
            struct dskv_cache_ref cache;
            int32_t cached, computed;
        } verify;
        struct {
            struct dskv_wire_tensor tokens;
            int32_t steps;
            enum dskv_finish finish;
            uint64_t seed;
            struct dskv_cache_ref cache;
            int32_t cached, computed;
        } generate;
        struct {
            int32_t n_freed;
        } free_caches;
        struct dskv_cache_ref import_; /* result of an import */
        struct {
            struct dskv_wire_tensor tokens;
            enum dskv_dtype dtype;
            int32_t n_layers, n_kv_heads, head_dim, length;
            char model[33], origin[33];
            int32_t n_parts;
        } export_begin;
        struct {
            int32_t credits;
            int32_t part_tokens;
        } import_begin; /* part_tokens: most tokens of one part */
        struct dskv_part part;
        struct {
            int32_t sequence, start;
            struct dskv_wire_tensor data;
        } rows;                         /* data [n, vocab]; start counts from the range's start */
        struct dskv_wire_tensor tokens; /* i32 [n] */
        struct {
            int32_t n;
        } credit;
    };
    void *memory; /* the codec's */
};
void dskv_event_clear(struct dskv_event *event);

/* ---- frames and codec (ipc/codec.c: the only user of msgpack) --------------------------------------------------- */

struct dskv_frame {
    void *data;
    size_t bytes;
};
/* A message as it travels: header frame, then tensor frames. */
struct dskv_frames {
    struct dskv_frame *frames; /* malloc'ed array of malloc'ed data, owned */
    int32_t n;
};
void dskv_frames_clear(struct dskv_frames *frames);

/* Takes the frames over (clears *frames) and checks everything before it is believed: depth, counts and lengths against
 * the bytes that are there, types, ranges, duplicate and unknown keys, UTF-8, trailing bytes, every frame named exactly
 * once, dtype and shape against the frame's size.  On an error, request->id and op are filled when they could be read
 * (id 0 otherwise) and nothing needs clearing. */
enum dskv_code dskv_request_decode(struct dskv_frames *frames, struct dskv_request *request, struct dskv_error *error);
enum dskv_code dskv_event_decode(struct dskv_frames *frames, struct dskv_event *event, struct dskv_error *error);
/* New frames from a message; fails only when the message exceeds a limit (DSKV_BAD_VALUE). */
enum dskv_code dskv_request_encode(const struct dskv_request *request, struct dskv_frames *frames,
                                   struct dskv_error *error);
enum dskv_code dskv_event_encode(const struct dskv_event *event, struct dskv_frames *frames, struct dskv_error *error);

/* CRC-32 (zlib's polynomial) of n int32 token ids in little-endian bytes; previous 0 to begin, or the CRC so far. */
uint32_t dskv_tokens_check(uint32_t previous, const int32_t *ids, size_t n);

#endif
