/* Model: the shape of a transformer and how it is cut over ranks.  Pure data; knows no file, device or request.
 *
 * A family (GPT-2, Llama) is a reader of config.json that fills this, plus a table of weight names (parallel/family.h).
 * Sizes of a rank's part end in _local (struct dskv_shard); all others are global.
 */
#ifndef DSKV_PARALLEL_MODEL_H
#define DSKV_PARALLEL_MODEL_H

#include "base/limits.h"
#include "kernels/ops.h"

enum dskv_positions { DSKV_POSITIONS_LEARNED, DSKV_POSITIONS_ROTARY };

/* How a model that was trained on short contexts stretches its rotary frequencies to longer ones.
 *
 * transformers lets DYNAMIC and LONGROPE change with each sequence's length, under keys that are cached already.  Here
 * the longest sequence that is served (--max-model-len) decides for all: a model served to two lengths may be two
 * models.
 *
 * Where transformers' versions differ, the later ones (5) are followed: original_context is
 * original_max_position_embeddings where that is given, else max_position_embeddings (which 4.45 takes for YARN in any
 * case, and all take for DYNAMIC); a LONGROPE's factor is `factor`, else the ratio of these two. */
enum dskv_rope_stretch {
    DSKV_ROPE_PLAIN,
    DSKV_ROPE_LINEAR,  /* all are divided by factor */
    DSKV_ROPE_LLAMA3,  /* what turns less than low_factor times over original_context is divided by factor, what turns
                          more than high_factor times is kept; a smooth passage between, by how often they turn */
    DSKV_ROPE_YARN,    /* the same with a passage by their index; cosines and sines times attention_factor */
    DSKV_ROPE_DYNAMIC, /* theta grows with the length beyond original_context */
    DSKV_ROPE_LONGROPE /* each is divided by its own of short_factors, beyond original_context of long_factors; cosines
                          and sines times attention_factor */
};
struct dskv_rope_scaling {
    enum dskv_rope_stretch kind;
    float factor;                  /* all but PLAIN: at least 1 */
    float low_factor, high_factor; /* LLAMA3: low_factor < high_factor; YARN (beta_slow, beta_fast): or equal */
    int32_t original_context;      /* all but PLAIN and LINEAR */
    float attention_factor;        /* YARN, LONGROPE */
    float short_factors[DSKV_MAX_HEAD_DIM / 2], long_factors[DSKV_MAX_HEAD_DIM / 2]; /* LONGROPE, [rotary_dim / 2] */
};

struct dskv_model {
    char family[32]; /* "gpt2", "llama": config.json's model_type */
    int32_t n_layers;
    int32_t width;       /* hidden size: floats of the residual stream per token */
    int32_t n_heads;     /* query heads */
    int32_t n_kv_heads;  /* KV heads; n_heads is a multiple of it */
    int32_t head_dim;    /* floats per head; n_heads * head_dim need not be width */
    int32_t mlp;         /* intermediate size */
    int32_t vocab;       /* ids are 0 .. vocab - 1; a row of logits has vocab floats */
    int32_t max_context; /* positions that the model knows */
    enum dskv_norm_kind norm;
    float norm_eps;
    enum dskv_positions positions;
    float rope_theta;
    struct dskv_rope_scaling rope_scaling;
    int32_t rotary_dim; /* dimensions of a head that are rotated */
    enum dskv_rope_style rope_style;
    enum dskv_activation activation;
    int gated; /* act(gate) * up, with two matrices; else act(up) */
    int tied;  /* the head is the embedding */
    int qkv_bias, o_bias, mlp_bias;
    int scale_by_layer;                      /* GPT-2's scale_attn_by_inverse_layer_idx */
    float attention_scale;                   /* 1 / sqrt(head_dim), or 1 */
    int32_t end_tokens[DSKV_MAX_END_TOKENS]; /* of generation_config.json, else config.json */
    int32_t n_end_tokens;
    enum dskv_dtype stored_dtype; /* of the weight files' matrices */
    char fingerprint[33];         /* hex of 128 bits over config and weight files: equal for equal models; of an engine
                                     also over the length that fixes its rotary table, if one does */
};

/* The length of sequences whose rotary positions all sequences get: one table serves them all.  0: positions do not
 * depend on a length.  Equal where two max_model_len share a table. */
int32_t dskv_rope_length(const struct dskv_model *model, int32_t max_model_len);
/* As config.json names it: "yarn"; "default" where nothing is stretched. */
const char *dskv_rope_stretch_name(enum dskv_rope_stretch kind);

/* A rank's part.  Query heads are split contiguously, as evenly as they go; a rank holds every KV head that its heads
 * use, and exports those that no lower rank holds; MLP columns and vocabulary are split in units of DSKV_SPLIT_UNIT. */
struct dskv_shard {
    int32_t rank, n_ranks;
    int32_t first_head, n_heads_local;
    int32_t first_kv_head, n_kv_heads_local;
    int32_t first_export_head, n_export_heads; /* global KV heads that this rank gives to an export */
    int32_t first_mlp,
        n_mlp_local; /* n_mlp_local counts real columns; weights are zero-padded to units by their owner */
    int32_t first_vocab, n_vocab_local; /* real ids; may be 0 */
};

/* Pure.  DSKV_EXIT_USAGE with the valid counts when n_ranks > n_heads. */
enum dskv_exit dskv_shard_of(const struct dskv_model *model, int rank, int n_ranks, struct dskv_shard *shard,
                             struct dskv_error *error);

#endif
