/* The C client of dskvd: a language model whose key/value caches are values that a program can hold.
 *
 * Owns: the connection to one server and the handles of caches.  Never knows ranks, devices, blocks or how a row is
 * computed.  A cache is never changed by a call: forward() on a prefix makes a new cache; a cut is a shorter length of
 * the same one; a fork is a second use of it.
 *
 *     struct dskv_client *client = NULL;
 *     struct dskv_output *a = NULL;
 *     struct dskv_error error;
 *     if (dskv_connect(NULL, &client, &error))
 *         return fprintf(stderr, "%s: %s\n", dskv_code_name(error.code), error.message), 1;
 *     struct dskv_forward_options options = {sizeof options};
 *     options.tokens = prompt;
 *     options.n_tokens = n_prompt;
 *     options.logits = DSKV_LOGITS_LAST;
 *     if (!dskv_forward(client, &options, &a, &error))
 *         printf("%d cached, %d computed, first logit %g\n", a->cached, a->computed, a->logits[0]);
 *     dskv_output_free(&a);
 *     dskv_close(&client);
 *
 * Errors: a call returns DSKV_OK (0) or the code that is also in *error (which may be null); it has then changed
 * nothing and set its result to null.  Codes and details: dskv/error.h.
 *
 * Options: a struct of options begins with its size and is otherwise zero where the default is meant; null means all
 * defaults where a call can do without.  A library that is older than the caller's header refuses (unsupported) what it
 * does not know, instead of passing it over.
 *
 * Results: each is one allocation for the caller, released by one call that also nulls the pointer; nothing else is
 * freed.  Arrays inside live as long as the result.  A result owns the cache that it names: dskv_cache_take keeps it.
 *
 * Time: timeout_ms 0 is the client's own (dskv_connect), negative is for ever.  It counts from the last thing heard of
 * the call.  A call that times out is cancelled at the server.
 *
 * Threads: a client, its caches, results and streams are used by one thread at a time; several clients are independent.
 * While a stream is open, other calls may be made on its client.
 *
 * Leases: a server lets go of the caches of a client that it has not heard of for a while (info: cache_lease_ms): a
 * program that pauses for longer pings.  When that has happened, or when the server was started again, one call fails
 * with bad_value and the field "session": all caches are gone, and the next call begins anew.
 */
#ifndef DSKV_CLIENT_H
#define DSKV_CLIENT_H

#include "dskv/error.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct dskv_client; /* a connection */
struct dskv_cache;  /* a handle of a cache on the server */
struct dskv_stream; /* a generation that is being received */

/* ---- connection ------------------------------------------------------------------------------------------------- */

struct dskv_connect_options {
    size_t size;
    const char *endpoint;       /* null: the environment's DSKV_ENDPOINT, else "tcp://127.0.0.1:5560" */
    int32_t timeout_ms;         /* of every call that names none; 0: 30000, negative: for ever */
    int32_t connect_timeout_ms; /* to reach the server; 0: 5000, negative: for ever */
};

/* Errors: unreachable, timeout, version_mismatch, bad_value (endpoint). */
DSKV_API enum dskv_code dskv_connect(const struct dskv_connect_options *options, struct dskv_client **client,
                                     struct dskv_error *error);
/* Gives up every cache of this client and closes.  Handles, results and streams that are still held can be read and
 * must still be freed. */
DSKV_API void dskv_close(struct dskv_client **client);

/* ---- the server ------------------------------------------------------------------------------------------------- */

struct dskv_server_info {
    const char *server_version, *model_dir, *family; /* "0.1.0", "models/atlas-gpt2", "gpt2" */
    const char *fingerprint;                         /* of the model's files, and of what stretches its positions */
    const char *numerics_id;                         /* equal ids: equal bits */
    const char *device;
    const char *weight_dtype, *activation_dtype, *kv_dtype; /* "f32", "f16", "bf16" */
    int32_t protocol_version;
    int32_t n_ranks, n_layers, n_heads, n_kv_heads, head_dim, width, mlp, vocab;
    int32_t max_context;   /* of the model */
    int32_t max_model_len; /* of this server: most tokens of a cache */
    int32_t block_tokens, n_blocks;
    int64_t cache_lease_ms; /* silence after which this client's caches are let go; 0: never */
    int32_t n_end_tokens;
    const int32_t *end_tokens; /* [n_end_tokens] */
    /* limits of one request or reply */
    int64_t max_request_bytes, max_reply_bytes;
    int32_t max_sequences; /* of dskv_forward_many, not the server's --max-sequences */
    int32_t max_topk, max_stops, max_stop_tokens;
};
DSKV_API enum dskv_code dskv_info(struct dskv_client *client, int32_t timeout_ms, struct dskv_server_info **info,
                                  struct dskv_error *error);
DSKV_API void dskv_info_free(struct dskv_server_info **info);

struct dskv_rank_usage {
    int64_t weight_bytes, replicated_bytes, pool_bytes,
        resident_bytes; /* sharded weights; what every rank holds; KV; process */
    int64_t read_bytes; /* of weight files */
    int64_t steps, rows_computed;
};
struct dskv_server_stats {
    double uptime_s;
    int64_t requests, errors, steps, rows_computed, tokens_cached, tokens_generated; /* since the start */
    int64_t blocks_total, blocks_used, blocks_reserved;
    int64_t caches, sessions, sequences_active, requests_queued, backlog_bytes; /* now */
    int32_t n_ranks;
    const struct dskv_rank_usage *ranks; /* [n_ranks] */
};
DSKV_API enum dskv_code dskv_stats(struct dskv_client *client, int32_t timeout_ms, struct dskv_server_stats **stats,
                                   struct dskv_error *error);
DSKV_API void dskv_stats_free(struct dskv_server_stats **stats);

/* Answered at once, also while a long request runs; renews the lease. */
DSKV_API enum dskv_code dskv_ping(struct dskv_client *client, int32_t timeout_ms, struct dskv_error *error);

/* ---- caches ----------------------------------------------------------------------------------------------------- */

/* The first `length` tokens of a cache; cache null: no prefix.  Naming a shorter length is a cut; it costs nothing.
 * {cache} alone names no token of it: a length of 0 is the empty prefix, as [:0] is; for all of it write DSKV_WHOLE. */
struct dskv_cache_prefix {
    struct dskv_cache *cache;
    int32_t length; /* 0 (the empty prefix) .. dskv_cache_length; DSKV_WHOLE: all of it */
};
#define DSKV_WHOLE (-1)

/* 32 hexadecimal digits, for people and logs: no call takes one.  Lives as long as the handle. */
DSKV_API const char *dskv_cache_id(const struct dskv_cache *cache);
DSKV_API int32_t dskv_cache_length(const struct dskv_cache *cache);
/* The tokens that it stands for: [dskv_cache_length]; live as long as the handle. */
DSKV_API const int32_t *dskv_cache_tokens(const struct dskv_cache *cache);
/* The numerics id that it was computed under, or "foreign": an import, or an extension of one. */
DSKV_API const char *dskv_cache_origin(const struct dskv_cache *cache);
/* Moves a handle out of a result: dskv_cache_take(&output->cache).  Null when there was none. */
DSKV_API struct dskv_cache *dskv_cache_take(struct dskv_cache **cache);
/* Gives a cache up and nulls the handle; null is harmless.  Never waits: the server hears of it with the client's next
 * forward, verify, generate, export or import, or by dskv_flush. */
DSKV_API void dskv_cache_free(struct dskv_cache **cache);
/* Tells the server now which caches were given up. */
DSKV_API enum dskv_code dskv_flush(struct dskv_client *client, int32_t timeout_ms, struct dskv_error *error);

/* ---- forward ---------------------------------------------------------------------------------------------------- */

enum dskv_logits {
    DSKV_LOGITS_NONE,
    DSKV_LOGITS_LAST,  /* the last row */
    DSKV_LOGITS_ALL,   /* every new row */
    DSKV_LOGITS_RANGE, /* rows [logits_start, logits_stop) of the new tokens */
};

/* Row i predicts the token after new token i.  Without tokens there is one row, that of the prefix's last token, which
 * is run again without making a cache.  Scores on a prefix run that token again too, for entry 0: one less is cached.
 */
struct dskv_forward_options {
    size_t size;
    const int32_t *tokens; /* [n_tokens] */
    size_t n_tokens;       /* may be 0 with a prefix */
    struct dskv_cache_prefix prefix;
    enum dskv_logits logits;
    int32_t logits_start, logits_stop;
    int32_t argmax; /* not 0: the most likely id of every row */
    int32_t topk;   /* this many most likely ids and log-probabilities of every row */
    int32_t score;  /* not 0: log-probability of every new token given all before it */
    int32_t
        consume; /* not 0: success gives the prefix's cache up; its handle is then of use for dskv_cache_free alone */
    int32_t timeout_ms; /* dskv_forward only */
};

struct dskv_output {
    struct dskv_cache *cache; /* prefix and new tokens; null when there were no new tokens */
    int32_t cached, computed; /* tokens taken from the prefix, tokens run */
    int32_t vocab;            /* floats of a row of logits; 0 without logits */
    int32_t n_logits;         /* rows of logits */
    int32_t n_rows;           /* rows of argmax, topk and scores */
    int32_t topk;
    const float *logits;        /* [n_logits, vocab] or null */
    const int32_t *argmax;      /* [n_rows] or null */
    const int32_t *topk_ids;    /* [n_rows, topk] best first, or null */
    const float *topk_logprobs; /* [n_rows, topk] or null */
    const float *scores;        /* [n_rows], entry 0 without a prefix is NaN; or null, as without new tokens */
};

/* Errors: empty_request, no_row, token_out_of_range, too_long, unknown_cache, cut_past_end, pool_full, busy,
 * reply_too_large, not_finite, draining, and those of every call: timeout, unreachable, bad_value, bad_message,
 * unsupported, internal. */
DSKV_API enum dskv_code dskv_forward(struct dskv_client *client, const struct dskv_forward_options *options,
                                     struct dskv_output **output, struct dskv_error *error);
DSKV_API void dskv_output_free(struct dskv_output **output);

struct dskv_outputs {
    int32_t n;
    struct dskv_output *const *outputs; /* [n], in the order of the sequences */
};
/* Several sequences in one request, all or none; an error's `index` says which one failed.  sequences[n] have one size.
 */
DSKV_API enum dskv_code dskv_forward_many(struct dskv_client *client, const struct dskv_forward_options *sequences,
                                          size_t n, int32_t timeout_ms, struct dskv_outputs **outputs,
                                          struct dskv_error *error);
DSKV_API void dskv_outputs_free(struct dskv_outputs **outputs);

/* ---- verify ----------------------------------------------------------------------------------------------------- */

struct dskv_verify_options {
    size_t size;
    const int32_t *tokens; /* certain tokens; may be none on a prefix: its last token is then run again */
    size_t n_tokens;
    const int32_t *draft;
    size_t n_draft;
    struct dskv_cache_prefix prefix;
    int32_t timeout_ms;
    int32_t consume; /* as of dskv_forward */
};
struct dskv_verified {
    int32_t accepted;         /* how many draft tokens greedy decoding agrees with */
    int32_t next;             /* the token after them; not in the cache */
    struct dskv_cache *cache; /* prefix, tokens and the accepted draft */
    int32_t cached, computed;
};
/* Errors: as dskv_forward. */
DSKV_API enum dskv_code dskv_verify(struct dskv_client *client, const struct dskv_verify_options *options,
                                    struct dskv_verified **verified, struct dskv_error *error);
DSKV_API void dskv_verified_free(struct dskv_verified **verified);

/* ---- generate --------------------------------------------------------------------------------------------------- */

struct dskv_stop {
    const int32_t *tokens; /* [n_tokens]: generation ends when these have come */
    size_t n_tokens;
};
struct dskv_generate_options {
    size_t size;
    const int32_t *tokens; /* the prompt */
    size_t n_tokens;
    struct dskv_cache_prefix prefix;
    int32_t max_tokens; /* 0: 128 */
    int32_t top_k;      /* 0: all */
    double temperature; /* 0: greedy */
    double top_p;       /* 0: 1 */
    double min_p;
    int32_t has_seed; /* 0: the server draws a seed and tells it */
    int32_t ignore_eos;
    uint64_t seed;
    const struct dskv_stop *stops; /* [n_stops] */
    size_t n_stops;
    int32_t timeout_ms; /* of dskv_generate, or of each dskv_stream_next */
    /* As of dskv_forward; a generation that is cancelled consumes nothing.  The prefix's handle must live until the
     * stream is closed. */
    int32_t consume;
};
struct dskv_generated {
    const int32_t *tokens; /* [n_tokens], an end token included */
    int32_t n_tokens;
    int32_t steps;             /* passes after the prompt's */
    const char *finish_reason; /* "stop", "length", "context", "cancelled" */
    uint64_t seed;
    struct dskv_cache *cache; /* all but the last token: pass that one first to go on */
    int32_t cached, computed;
};
/* Errors: as dskv_forward. */
DSKV_API enum dskv_code dskv_generate(struct dskv_client *client, const struct dskv_generate_options *options,
                                      struct dskv_generated **generated, struct dskv_error *error);
DSKV_API void dskv_generated_free(struct dskv_generated **generated);

/* The same, token by token.  The options' arrays are not needed after dskv_stream_open. */
DSKV_API enum dskv_code dskv_stream_open(struct dskv_client *client, const struct dskv_generate_options *options,
                                         struct dskv_stream **stream, struct dskv_error *error);
/* Waits for the next tokens: *tokens [*n_tokens], valid until the next call on the stream; *n_tokens 0 at the end. */
DSKV_API enum dskv_code dskv_stream_next(struct dskv_stream *stream, const int32_t **tokens, size_t *n_tokens,
                                         struct dskv_error *error);
/* Asks the server to stop; the stream then ends soon with finish_reason "cancelled".  Does not wait. */
DSKV_API enum dskv_code dskv_stream_cancel(struct dskv_stream *stream, struct dskv_error *error);
/* Reads to the end and hands over the whole result, once. */
DSKV_API enum dskv_code dskv_stream_result(struct dskv_stream *stream, struct dskv_generated **generated,
                                           struct dskv_error *error);
/* Cancels what has not ended. */
DSKV_API void dskv_stream_close(struct dskv_stream **stream);

/* ---- export and import ------------------------------------------------------------------------------------------ */

/* Keys (after rotary) and values of a cache, per layer [1, n_kv_heads, length, head_dim] dense, with the model's own
 * heads whatever the number of ranks. */
struct dskv_exported {
    int32_t n_layers, n_kv_heads, length, head_dim;
    const char *dtype;     /* "f32", "f16", "bf16" */
    const char *model;     /* fingerprint */
    const char *origin;    /* numerics id, or "foreign" */
    size_t layer_bytes;    /* of one k[layer] or v[layer] */
    const void *const *k;  /* [n_layers] */
    const void *const *v;  /* [n_layers] */
    const int32_t *tokens; /* [length] */
};
/* Errors: unknown_cache, cut_past_end, and those of every call. */
DSKV_API enum dskv_code dskv_export(struct dskv_client *client, struct dskv_cache_prefix prefix, int32_t timeout_ms,
                                    struct dskv_exported **exported, struct dskv_error *error);
DSKV_API void dskv_exported_free(struct dskv_exported **exported);

struct dskv_import_options {
    size_t size;
    int32_t n_layers, n_kv_heads, length, head_dim;
    const char *dtype;     /* of k and v */
    const char *model;     /* fingerprint that they come from; null: not said */
    const void *const *k;  /* [n_layers], each [1, n_kv_heads, length, head_dim] */
    const void *const *v;  /* [n_layers] */
    const int32_t *tokens; /* [length] */
    int32_t convert;       /* not 0: convert to the server's dtype; 0: refuse another one */
    int32_t timeout_ms;
};
/* A cache again, on any number of ranks; its origin is "foreign".  Errors: wrong_dtype, wrong_shape, wrong_model,
 * not_finite, token_out_of_range, too_long, pool_full, and those of every call. */
DSKV_API enum dskv_code dskv_import(struct dskv_client *client, const struct dskv_import_options *options,
                                    struct dskv_cache **cache, struct dskv_error *error);

#ifdef __cplusplus
}
#endif
#endif
