/* Operations: all that the transformer needs of one device, as one table with two implementations (cpu/ and cuda/).
 *
 * Owns: device memory, prepared weights, and the order of every sum.  Never knows a rank, a sequence or a request: a
 * shard is just a smaller matrix here.  Each operation takes the device and one const parameter struct; the wrappers in
 * ops.c assert every shape for all devices and, when tracing is on, print a checksum of what was written.
 *
 * Operations on a CPU run when called; on a device with a queue they are queued in order, and dskv_device_sync waits.
 * No operation allocates.
 *
 * The rules of bits (the numbers are part of the contract; tests compare bits over rows, threads and vector paths):
 *
 * - matmul: y[m][n] is one f32 accumulator over k ascending, acc = fma(x[m][k], w[n][k], acc) from acc = 0; then
 *   + bias[n], rounded once to y's dtype.  The same for every number of rows and wherever a row stands.  (cuda, f16 and
 *   bf16: k in steps of 16, the products of each in the hardware's order.)
 * - attention: a score is one accumulator over the head's dimensions ascending, then * scale.  Keys are cut at absolute
 *   positions into pieces of DSKV_KEY_PIECE; each piece starts afresh (its maximum, weights exp(s - max), their sum in
 *   one fixed shape, values accumulated over keys ascending), a masked key's weight is selected to 0, a fully masked
 *   piece is skipped, and pieces merge in ascending order.
 * - norm: the shape of its sums depends on the width alone.
 * - exp, tanh, erf, rsqrt: on a CPU our own or exactly rounded ones, one formula for vector bodies and tails; on cuda
 *   those of CUDA's library, and 2^x of the hardware for weights of keys.
 * - what fuses several operations rounds where they do, one after the other.
 */
#ifndef DSKV_KERNELS_OPS_H
#define DSKV_KERNELS_OPS_H

#include "base/limits.h"
#include "base/status.h"
#include "kernels/tensor.h"

#include <stdint.h>

struct dskv_device; /* an open device: threads or streams, its operations */
struct dskv_weight; /* a prepared weight: opaque layout, [n, k] with n outputs */

/* ---- devices ---------------------------------------------------------------------------------------------------- */

struct dskv_device_options {
    const char *kind;     /* "auto", "cpu", "cuda" */
    int index;            /* which device of that kind (cuda) */
    int share;            /* ranks share devices: index counts round and round (cuda) */
    int n_threads;        /* cpu: threads of this rank, >= 1 */
    const char *cpu_path; /* cpu: null = best of this processor; "avx512", "avx2", "plain": for tests */
    int trace;            /* print a checksum per operation */
    int free_order;       /* benchmarks: matmuls may sum in any order, as is fastest, and promise no bits (cuda) */
};

enum dskv_exit dskv_device_open(const struct dskv_device_options *options, struct dskv_device **device,
                                struct dskv_error *error);
void dskv_device_close(struct dskv_device **device);
/* "cpu" or "cuda". */
const char *dskv_device_kind(const struct dskv_device *device);
/* A name for people: "cpu (avx512, 2 threads)". */
const char *dskv_device_name(const struct dskv_device *device);
/* What fixes this device's arithmetic, for the numerics id: "cpu-16x1", "cuda-mma16x1-9.0".  The same for all vector
 * paths that agree in bits. */
const char *dskv_device_numerics(const struct dskv_device *device);
/* The dtype of activations for weights held in this dtype (cpu: always f32). */
enum dskv_dtype dskv_device_activation_dtype(const struct dskv_device *device, enum dskv_dtype weights);
/* Waits for every queued operation; DSKV_INTERNAL with the device's first error, if it has had one. */
enum dskv_code dskv_device_sync(struct dskv_device *device, struct dskv_error *error);

/* Bytes that the device could still give, or -1 when it does not tell. */
int64_t dskv_device_available(struct dskv_device *device);
/* Zeroed device memory, 64-byte aligned (cpu: pages are taken on first touch); null when there is none left. */
void *dskv_device_alloc(struct dskv_device *device, size_t bytes);
void dskv_device_free(struct dskv_device *device, void *memory, size_t bytes);
/* Host to device and back; complete when they return. */
void dskv_device_upload(struct dskv_device *device, void *dst, const void *src, size_t bytes);
void dskv_device_download(struct dskv_device *device, void *dst, const void *src, size_t bytes);
/* Queues one pass that reads all bytes (a multiple of 16) and keeps nothing, to measure how fast; 0 when the device
 * leaves that to its host. */
int dskv_device_read(struct dskv_device *device, const void *memory, size_t bytes);
/* True when device memory is host memory: results can be read in place after a sync. */
int dskv_device_is_host(const struct dskv_device *device);
/* Equal for two processes of a host exactly when both use the same device; 0 where every process has its own. */
int32_t dskv_device_identity(const struct dskv_device *device);
/* The device's queue, for a library that queues there too (cuda: its cudaStream_t); null where there is none. */
void *dskv_device_queue(const struct dskv_device *device);

/* ---- the queue: for hosts that run ahead of their device --------------------------------------------------------- */

/* Zeroed host memory that the device can reach by itself, 64-byte aligned; null when there is none left. */
void *dskv_device_host_alloc(struct dskv_device *device, size_t bytes);
void dskv_device_host_free(struct dskv_device *device, void *memory, size_t bytes);
/* A queued copy from device memory to memory of dskv_device_host_alloc, which both leave alone until it is done. */
void dskv_device_fetch(struct dskv_device *device, void *dst, const void *src, size_t bytes);

/* A point in the queue: everything that was queued before it.  At most DSKV_MAX_MARKS are waited for at a time. */
#define DSKV_MAX_MARKS 8
typedef uint64_t dskv_mark;
dskv_mark dskv_device_mark(struct dskv_device *device);
/* Without waiting: whether all before the mark is done (or has failed: dskv_device_wait says so). */
int dskv_device_reached(struct dskv_device *device, dskv_mark mark);
/* Waits until all before the mark is done; DSKV_INTERNAL with the device's first error, if it has had one. */
enum dskv_code dskv_device_wait(struct dskv_device *device, dskv_mark mark, struct dskv_error *error);

/* A recording: operations and fetches that were called once and are queued again as one, with the parameters and
 * addresses that they had.  What they read from device memory may change in between. */
struct dskv_recording;
/* From here on calls are recorded and not queued, until dskv_device_record_end; sync, mark, wait and what completes
 * when it returns must not be called.  0, and nothing changes, when the device has no queue to save. */
int dskv_device_record_begin(struct dskv_device *device);
/* Null when the device failed: the next wait says why. */
struct dskv_recording *dskv_device_record_end(struct dskv_device *device);
void dskv_device_replay(struct dskv_device *device, const struct dskv_recording *recording);
void dskv_recording_close(struct dskv_device *device, struct dskv_recording **recording);

/* ---- weights ---------------------------------------------------------------------------------------------------- */

/* An all-zero weight of n outputs over k inputs, held as dtype; null when there is no memory.  n or k may be 0. */
struct dskv_weight *dskv_weight_open(struct dskv_device *device, int64_t n, int64_t k, enum dskv_dtype dtype);
void dskv_weight_close(struct dskv_device *device, struct dskv_weight **weight);
/* Stores outputs [first, first + n_rows), all inputs, from host rows [n_rows, k] of any float dtype, converting when
 * dtypes differ.  first and n_rows are free; rows that are never filled stay zero. */
void dskv_weight_fill(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                      const void *rows, enum dskv_dtype dtype);
/* The same from noise that the device makes where it lies (kernels/noise.h): row first + i is output first_output + i,
 * inputs from first_input on.  0, and nothing is written, when the device leaves that to its host. */
int dskv_weight_fill_noise(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                           uint64_t seed, int64_t first_output, int64_t first_input);
int64_t dskv_weight_n(const struct dskv_weight *weight);
int64_t dskv_weight_k(const struct dskv_weight *weight);
/* Bytes of device memory that it takes, padding included. */
size_t dskv_weight_bytes(const struct dskv_weight *weight);

/* ---- the KV pool's bytes ---------------------------------------------------------------------------------------- */

/* A rank's pool: n_blocks runs of block_bytes; a block holds keys and values of block_tokens tokens for all layers and
 * local KV heads.  The layout inside a block is the device's own; only operations read it. */
struct dskv_kv {
    void *data;
    enum dskv_dtype dtype; /* f32, f16, bf16 */
    int32_t n_blocks, block_tokens, n_layers, n_kv_heads_local, head_dim;
    size_t block_bytes; /* dskv_kv_block_bytes(...) */
};
size_t dskv_kv_block_bytes(const struct dskv_kv *shape);

/* ---- operations ------------------------------------------------------------------------------------------------- */

/* out[r] = table row (ids[r] - first) where first <= ids[r] < first + table rows, else zeros; then + position_table[
 * positions[r]] where its data is not null.  `table` is a prepared weight [n_local, width].
 * An id below 0 stands for drawn[-1 - id]: a token that the device chose itself. */
struct dskv_embed {
    const int32_t *ids, *positions; /* device [rows] */
    const int32_t *drawn;           /* device; may be null when no id is below 0 */
    const struct dskv_weight *table;
    int32_t first;
    struct dskv_tensor position_table; /* f32 [max_positions, width], or data == null */
    struct dskv_tensor out;            /* activation [rows, width] */
};
void dskv_op_embed(struct dskv_device *device, const struct dskv_embed *p);

enum dskv_norm_kind { DSKV_LAYER_NORM, DSKV_RMS_NORM };
/* LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias; RMSNorm: x / sqrt(mean(x^2) + eps) * weight. */
struct dskv_norm {
    enum dskv_norm_kind kind;
    float eps;
    struct dskv_tensor x;       /* activation [rows, width] */
    const float *weight, *bias; /* device f32 [width]; bias null: none */
    struct dskv_tensor out;     /* activation [rows, width]; may be x */
};
void dskv_op_norm(struct dskv_device *device, const struct dskv_norm *p);

/* y[m][n] = sum_k x[m][k] w[n][k] (+ bias[n]).  y may be f32 whatever the activations are (logits). */
struct dskv_matmul {
    struct dskv_tensor x;        /* activation [rows, k] */
    const struct dskv_weight *w; /* [n, k] */
    const float *bias;           /* device f32 [n] or null */
    struct dskv_tensor y;        /* [rows, n] */
};
void dskv_op_matmul(struct dskv_device *device, const struct dskv_matmul *p);

enum dskv_rope_style {
    DSKV_ROPE_HALVES /* pairs (i, i + rotary/2), Llama */,
    DSKV_ROPE_PAIRS /* (2i, 2i + 1), GPT-J */
};
/* Rotates the first rotary_dim dimensions of every head in place, unfused: a*cos - b*sin, b*cos + a*sin. */
struct dskv_rope {
    enum dskv_rope_style style;
    const int32_t *positions;              /* device [rows] */
    const float *cos, *sin;                /* device f32 [max_positions, rotary_dim / 2] */
    int32_t rotary_dim, head_dim, n_heads; /* heads in x */
    struct dskv_tensor x;                  /* activation [rows, n_heads * head_dim] */
};
void dskv_op_rope(struct dskv_device *device, const struct dskv_rope *p);

/* Stores row r's keys and values in slot slots[r] = block * block_tokens + place of `layer`, rounded to the pool's
 * dtype; slot -1 stores nothing. */
struct dskv_kv_write {
    struct dskv_kv kv;
    int32_t layer;
    const int32_t *slots;    /* device [rows] */
    struct dskv_tensor k, v; /* activation [rows, n_kv_heads_local * head_dim] */
};
void dskv_op_kv_write(struct dskv_device *device, const struct dskv_kv_write *p);

/* Queries and keys rotated in place, then keys and values stored, as the two operations would. */
struct dskv_rope_kv_write {
    struct dskv_rope rope;      /* x: [rows, q and k]; its last columns are write.k */
    struct dskv_kv_write write; /* write.v may stand anywhere */
};
void dskv_op_rope_kv_write(struct dskv_device *device, const struct dskv_rope_kv_write *p);

/* One run of query rows that share a block table: rows [first, first + n_tokens), row i at position start + i, reading
 * keys 0 .. start + i (its own included) through table[first_block ...]. */
struct dskv_attention_work {
    int32_t first, n_tokens, start, first_block, n_blocks;
    int32_t reserved[3]; /* zero; masks and tree parents will be named here */
};
/* out[r][h] = softmax(q[r][h] . keys * scale) values; every key and value comes from the pool.  A recorded pass may
 * have room to spare: runs of no tokens behind the last one, rows of no run, whose results are left alone, and more
 * keys in max_keys than any row has. */
struct dskv_attention {
    struct dskv_kv kv;
    int32_t layer;
    float scale;
    int32_t n_heads_local;
    const int32_t *kv_head_of_head; /* device [n_heads_local]: local KV head of each local query head, ascending */
    const struct dskv_attention_work *work; /* device [n_work] */
    int32_t n_work;
    int32_t max_keys;          /* keys of the longest row, so that a grid can be sized; 0: not known */
    const int32_t *tables;     /* device: block ids */
    struct dskv_tensor q, out; /* activation [rows, n_heads_local * head_dim] */
};
void dskv_op_attention(struct dskv_device *device, const struct dskv_attention *p);

enum dskv_activation { DSKV_GELU_TANH, DSKV_GELU_ERF, DSKV_SILU, DSKV_RELU, DSKV_N_ACTIVATIONS };
/* gated: out = act(x[:, :n]) * x[:, n:2n]; else out = act(x).  out may be x when not gated. */
struct dskv_activate {
    enum dskv_activation kind;
    int gated;
    struct dskv_tensor x;   /* activation [rows, gated ? 2n : n] */
    struct dskv_tensor out; /* activation [rows, n] */
};
void dskv_op_activate(struct dskv_device *device, const struct dskv_activate *p);

/* The matmul, then the activation of what it gives, as the two operations would; matmul.y is left undefined. */
struct dskv_matmul_activate {
    struct dskv_matmul matmul;
    struct dskv_activate activate; /* activate.x is matmul.y */
};
void dskv_op_matmul_activate(struct dskv_device *device, const struct dskv_matmul_activate *p);

/* x += (y + bias), y + bias rounded first: the residual after the sum over ranks. */
struct dskv_residual {
    struct dskv_tensor x, y; /* activation [rows, width] */
    const float *bias;       /* device f32 [width] or null */
};
void dskv_op_residual(struct dskv_device *device, const struct dskv_residual *p);

/* The residual, then the norm of what it gives, as the two operations would. */
struct dskv_residual_norm {
    struct dskv_residual residual;
    struct dskv_norm norm; /* norm.x is residual.x */
};
void dskv_op_residual_norm(struct dskv_device *device, const struct dskv_residual_norm *p);

/* out = partials[0] + partials[1] + ... in this order, in f32, rounded once: the sum over ranks of gathered partials.
 */
struct dskv_sum {
    const void *const *partials; /* host array of n device pointers, each [rows, cols] contiguous of out's dtype */
    int32_t n;
    struct dskv_tensor out; /* activation [rows, cols], contiguous; must not be a partial unless it is partials[0] */
};
void dskv_op_sum(struct dskv_device *device, const struct dskv_sum *p);

/* out[i] = x[index[i]]: the rows that are wanted. */
struct dskv_gather_rows {
    struct dskv_tensor x;
    const int32_t *index; /* device [out.rows] */
    struct dskv_tensor out;
};
void dskv_op_gather_rows(struct dskv_device *device, const struct dskv_gather_rows *p);

/* What one shard of the vocabulary says of one row of logits. */
struct dskv_row_stats {
    float max;      /* -inf when the shard is empty */
    int32_t argmax; /* global id, lowest of equals; INT32_MAX when the shard is empty */
    float sum_exp;  /* sum over the shard of exp(logit - max), in one fixed order; 0 when empty */
    float target;   /* logit of the row's target id, when it lies in this shard; else -inf */
    int32_t finite; /* 0 when any logit is infinite or not a number */
};
/* Statistics of every row, and its k best (logit descending, id ascending; missing ones are -inf, INT32_MAX). */
struct dskv_select {
    struct dskv_tensor logits;    /* f32 [rows, n_local]; columns at or past vocab - first are padding, not read */
    int32_t first, vocab;         /* global id of column 0; size of the whole vocabulary */
    const int32_t *targets;       /* device [rows]: global id or -1 */
    int32_t k;                    /* 0 .. DSKV_MAX_TOPK */
    struct dskv_row_stats *stats; /* device [rows] */
    float *top_values;            /* device [rows, k] */
    int32_t *top_ids;             /* device [rows, k] */
};
void dskv_op_select(struct dskv_device *device, const struct dskv_select *p);

/* ids[r] = the lowest id of the largest logit over all shards, of what they say of row r. */
struct dskv_choose {
    const struct dskv_row_stats *const *stats; /* host array of n device pointers, each [rows] */
    int32_t n, rows;
    int32_t *ids; /* device [rows] */
};
void dskv_op_choose(struct dskv_device *device, const struct dskv_choose *p);

/* How a token is drawn.  temperature 0: the lowest id of the largest logit, which dskv_op_choose finds. */
struct dskv_sampling {
    float temperature, top_p, min_p;
    int32_t top_k; /* 0: all */
    uint64_t seed;
    int32_t position; /* of the token that is drawn: the counter of the random number */
    int32_t reserved; /* zero */
};
/* ids[i] drawn from full rows of logits: temperature, then top-k, top-p, min-p; ties by lowest id; the number is
 * Philox4x32-10 with key = seed, counter = position.  One function of its inputs' bits on every rank.  Where the
 * temperature is 0, ids[i] is left as dskv_op_choose made it. */
struct dskv_sample {
    struct dskv_tensor logits;            /* f32 [rows, vocab] */
    const struct dskv_sampling *sampling; /* device [rows] */
    int32_t *ids;                         /* device [rows] */
    void *scratch;                        /* device, dskv_sample_scratch_bytes(vocab) (cuda: not used) */
};
void dskv_op_sample(struct dskv_device *device, const struct dskv_sample *p);
size_t dskv_sample_scratch_bytes(int64_t vocab);

/* Copies the first n_tokens of block src to block dst, all layers and heads. */
struct dskv_block_copy {
    int32_t src, dst, n_tokens;
    int32_t reserved; /* zero */
};
struct dskv_kv_copy {
    struct dskv_kv kv;
    const struct dskv_block_copy *copies; /* device [n] */
    int32_t n;
};
void dskv_op_kv_copy(struct dskv_device *device, const struct dskv_kv_copy *p);

/* Two places in host memory (of dskv_device_host_alloc) that take turns: the host fills or reads one while the device
 * works with the other.  Whose turn it is is counted on the device, so that a recording serves both. */
struct dskv_turn {     /* device memory, zeroed at the start */
    uint64_t begun_ns; /* the device's clock when the last receive began */
    uint32_t count;    /* places[count % 2] */
};
struct dskv_turns {
    void *places[2];
    struct dskv_turn *turn;
};
/* dst = the first bytes (a multiple of 16, dst 16-byte aligned) of the place whose turn it is. */
struct dskv_receive {
    struct dskv_turns from;
    void *dst; /* device */
    size_t bytes;
};
void dskv_op_receive(struct dskv_device *device, const struct dskv_receive *p);

/* When a turn began (where something was received) and ended, by the device's clock: what a report that ends one
 * leaves at the start of its place. */
struct dskv_turn_times {
    uint64_t begun_ns, ended_ns;
};
/* The parts, one after the other, to the place whose turn it is, from `offset` on; then, if asked for, the times, and
 * the turn passes. */
#define DSKV_MAX_REPORT_PARTS (DSKV_MAX_RANKS + 1)
struct dskv_report {
    struct dskv_turns to;
    size_t offset;                            /* at least that of the times' end */
    const void *parts[DSKV_MAX_REPORT_PARTS]; /* device */
    size_t bytes[DSKV_MAX_REPORT_PARTS];      /* multiples of 4; all together below 2^31 */
    int32_t n_parts;                          /* may be 0 */
    int32_t passes_turn;
};
void dskv_op_report(struct dskv_device *device, const struct dskv_report *p);

/* Pool <-> a dense host-visible buffer: head h of `heads` (local indices), tokens [start, stop) of the block table,
 * keys or values of one layer.  dense: [n_heads, stop - start, head_dim] in the pool's dtype, device memory. */
struct dskv_kv_dense {
    struct dskv_kv kv;
    int32_t layer, is_value;
    int32_t first_head, n_heads; /* local KV heads [first_head, first_head + n_heads) */
    const int32_t *table;        /* device: block ids, from token 0 */
    int32_t start, stop;
    void *dense;
};
void dskv_op_kv_gather(struct dskv_device *device, const struct dskv_kv_dense *p);  /* pool -> dense */
void dskv_op_kv_scatter(struct dskv_device *device, const struct dskv_kv_dense *p); /* dense -> pool */

/* ---- between devices that reach each other's memory -------------------------------------------------------------- */

/* What n peers exchange through.  Each brings a region of its own memory that all can read and write, zeroed before any
 * of them begins; a device writes its part into its slot, and all queue the same operations in the same order.
 * Kernels wait for each other, nothing waits on the host, and all of it can be recorded.  What came of the others lies
 * there until the same device's next exchange. */
#define DSKV_MAX_PEERS 8
struct dskv_exchange {
    void *regions[DSKV_MAX_PEERS]; /* of each peer as this device reaches it, at a multiple of 256 bytes */
    int32_t n, self;
    size_t slot_bytes; /* a multiple of 256 */
};
/* 0: this device cannot. */
size_t dskv_exchange_region_bytes(const struct dskv_device *device, int32_t n, size_t slot_bytes);
/* Where this device writes its part, and where peer i's part arrives (its own stays in its slot). */
static inline void *dskv_exchange_slot(const struct dskv_exchange *exchange)
{
    return exchange->regions[exchange->self];
}
static inline void *dskv_exchange_part(const struct dskv_exchange *exchange, int32_t i)
{
    size_t place = i == exchange->self ? 0 : (size_t)(1 + i) * exchange->slot_bytes;
    return (char *)exchange->regions[exchange->self] + place;
}
/* Where a sum arrives. */
static inline void *dskv_exchange_sum(const struct dskv_exchange *exchange)
{
    return (char *)exchange->regions[exchange->self] + exchange->slot_bytes;
}

/* The first `bytes` of all slots, whole 16 bytes, come to dskv_exchange_part. */
struct dskv_exchange_gather {
    const struct dskv_exchange *exchange;
    size_t bytes;
};
void dskv_op_exchange_gather(struct dskv_device *device, const struct dskv_exchange_gather *p);

/* out = the sum of all slots, which hold [rows, cols] of its dtype, as dskv_op_sum adds partials in the peers' order.
 */
struct dskv_exchange_add {
    const struct dskv_exchange *exchange;
    struct dskv_tensor out; /* activation [rows, cols], contiguous; its data is dskv_exchange_sum */
};
void dskv_op_exchange_add(struct dskv_device *device, const struct dskv_exchange_add *p);

/* The same, then the residual and the norm of what it gives, as the three operations would. */
struct dskv_exchange_residual_norm {
    const struct dskv_exchange *exchange;
    struct dskv_residual_norm then; /* residual.y says what the slots hold; its data is dskv_exchange_sum */
};
void dskv_op_exchange_residual_norm(struct dskv_device *device, const struct dskv_exchange_residual_norm *p);

#endif
