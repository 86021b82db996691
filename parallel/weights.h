/* Weights: this rank's part of every tensor, prepared on the device.
 *
 * Owns the binding of weight names to tensors (a family's table), the reading of this rank's bytes and no others, and
 * their place on the device.  Sizes with _local are of the shard; vectors that every rank needs whole are replicated.
 */
#ifndef DSKV_PARALLEL_WEIGHTS_H
#define DSKV_PARALLEL_WEIGHTS_H

#include "parallel/model.h"

struct dskv_layer_weights {
    const float *norm1_weight, *norm1_bias; /* f32 [width]; bias null without LayerNorm */
    struct dskv_weight *qkv; /* [(n_heads_local + 2 n_kv_heads_local) * head_dim, width]: q heads, then k, then v */
    const float *qkv_bias;   /* f32 [the same rows] or null */
    struct dskv_weight *o;   /* [width, n_heads_local * head_dim] */
    const float *o_bias;     /* f32 [width] or null; added once, after the sum over ranks */
    const float *norm2_weight, *norm2_bias;
    struct dskv_weight *up; /* gated: [2 n_mlp_local, width], gate rows first; else [n_mlp_local, width] */
    const float *up_bias;
    struct dskv_weight *down; /* [width, n_mlp_local] */
    const float *down_bias;   /* f32 [width] or null; added once, after the sum over ranks */
};

struct dskv_weights {
    struct dskv_weight *embedding;     /* [n_vocab_local, width] */
    struct dskv_tensor position_table; /* f32 [max_context, width], or data null */
    const float *rope_cos,
        *rope_sin; /* device f32 [max_model_len, rotary_dim / 2], or null; made once on the host (rope.h) */
    struct dskv_layer_weights *layers;    /* [n_layers] */
    const float *norm_weight, *norm_bias; /* the final norm */
    struct dskv_weight *head;             /* [n_vocab_local, width]; the same pointer as embedding when tied */
    uint64_t sharded_bytes; /* matrices as held, without padding: over all ranks, each matrix counts once (KV heads that
                               several ranks hold count at their lowest holder alone) */
    uint64_t replicated_bytes; /* all else: norms, biases, positions, rotary tables, KV heads that a lower rank holds */
    uint64_t read_bytes;       /* of weight files, by this rank */
};

struct dskv_weights_options {
    const char *model_dir;
    enum dskv_dtype dtype; /* as held */
    int32_t max_model_len; /* rows of the rotary table */
    int dummy;             /* random weights, the same at every number of ranks; no file is read */
};

/* Reads config.json, generation_config.json and the weight files' headers; all checks of names, dtypes, shapes, offsets
 * and sizes are made here, before a weight is read.  DSKV_EXIT_MODEL with a sentence that names the file.  With dummy,
 * only config.json is read.  (Public twin without dummy: dskv_model_check in parallel/engine.h.) */
enum dskv_exit dskv_model_read(const char *model_dir, int dummy, struct dskv_model *model, struct dskv_error *error);
/* The option --max-model-len, whose 0 becomes the model's context.  DSKV_EXIT_USAGE where the context is less. */
enum dskv_exit dskv_model_limit(const struct dskv_model *model, int32_t *max_model_len, struct dskv_error *error);

/* Reads this rank's part and logs progress (rank 0).  DSKV_EXIT_MODEL, DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_weights_open(struct dskv_device *device, const struct dskv_model *model,
                                 const struct dskv_shard *shard, const struct dskv_weights_options *options,
                                 struct dskv_weights **weights, struct dskv_error *error);
void dskv_weights_close(struct dskv_device *device, struct dskv_weights **weights);

#endif
