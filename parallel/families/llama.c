/* Llama: rotary positions, RMSNorm, grouped queries, a gated MLP. */
#include "parallel/families/llama.h"

#include "base/limits.h"
#include "base/log.h"
#include "parallel/families/rotary.h"

#include <math.h>

void dskv_llama_read(struct dskv_reader *reader, struct dskv_model *model, const struct dskv_llama_defaults *defaults)
{
    model->n_layers = dskv_reader_int(reader, "num_hidden_layers", 1, DSKV_MAX_LAYERS);
    model->width = dskv_reader_int(reader, "hidden_size", 1, DSKV_MAX_WIDTH);
    model->n_heads = dskv_reader_int(reader, "num_attention_heads", 1, DSKV_MAX_HEADS);
    model->n_kv_heads = dskv_reader_int_or(reader, "num_key_value_heads", 1, DSKV_MAX_HEADS,
                                           defaults->n_kv_heads ? defaults->n_kv_heads : model->n_heads);
    if (model->n_heads % model->n_kv_heads != 0)
        dskv_reader_fail(reader, "num_attention_heads %d is not a multiple of num_key_value_heads %d", model->n_heads,
                         model->n_kv_heads);
    model->head_dim = dskv_reader_int_or(reader, "head_dim", 1, DSKV_MAX_HEAD_DIM, 0);
    if (model->head_dim == 0) {
        if (model->width % model->n_heads != 0)
            dskv_reader_fail(reader,
                             "hidden_size %d is not a multiple of num_attention_heads %d, and there is no head_dim",
                             model->width, model->n_heads);
        model->head_dim = model->width / model->n_heads;
    }
    model->mlp = dskv_reader_int(reader, "intermediate_size", 1, 4 * DSKV_MAX_WIDTH);
    model->vocab = dskv_reader_int(reader, "vocab_size", 1, DSKV_MAX_VOCAB);
    model->max_context =
        dskv_reader_int_or(reader, "max_position_embeddings", 1, DSKV_MAX_CONTEXT, defaults->max_context);
    model->norm = DSKV_RMS_NORM;
    model->norm_eps = (float)dskv_reader_number_or(reader, "rms_norm_eps", 1e-6);
    dskv_rope_read(reader, model);
    model->activation = dskv_reader_activation(reader, "hidden_act", "silu");
    model->gated = 1;
    model->tied = dskv_reader_bool_or(reader, "tie_word_embeddings", 0);
    model->attention_scale = (float)(1 / sqrt((double)model->head_dim));
}

void dskv_llama_limit_to_window(struct dskv_reader *reader, struct dskv_model *model, int32_t fallback)
{
    if (dskv_json_kind(dskv_json_get(reader->root, "sliding_window")) == DSKV_JSON_NULL)
        return;
    int32_t window = dskv_reader_int_or(reader, "sliding_window", 1, DSKV_MAX_CONTEXT, fallback);
    if (window >= model->max_context)
        return;
    dskv_log(DSKV_LOG_INFO, "model", "contexts are limited to the sliding window of %d tokens", (int)window);
    model->max_context = window;
}

static void read_llama(struct dskv_reader *reader, struct dskv_model *model)
{
    dskv_llama_read(reader, model, &(struct dskv_llama_defaults){.max_context = 2048});
    model->qkv_bias = model->o_bias = dskv_reader_bool_or(reader, "attention_bias", 0);
    model->mlp_bias = dskv_reader_bool_or(reader, "mlp_bias", 0);
    dskv_reader_refuse(reader, "sliding_window");
    if (dskv_reader_int_or(reader, "pretraining_tp", 0, 1 << 20, 1) > 1)
        dskv_reader_fail(reader, "pretraining_tp above 1 is not supported: set it to 1 for the plain order of sums");
}

const struct dskv_tensor_name dskv_llama_names[DSKV_LLAMA_N_NAMES] = {
    {DSKV_PART_EMBEDDING, "embed_tokens.weight", 0},
    {DSKV_PART_NORM1_WEIGHT, "layers.%d.input_layernorm.weight", 0},
    {DSKV_PART_Q, "layers.%d.self_attn.q_proj.weight", 0},
    {DSKV_PART_K, "layers.%d.self_attn.k_proj.weight", 0},
    {DSKV_PART_V, "layers.%d.self_attn.v_proj.weight", 0},
    {DSKV_PART_Q_BIAS, "layers.%d.self_attn.q_proj.bias", 0},
    {DSKV_PART_K_BIAS, "layers.%d.self_attn.k_proj.bias", 0},
    {DSKV_PART_V_BIAS, "layers.%d.self_attn.v_proj.bias", 0},
    {DSKV_PART_O, "layers.%d.self_attn.o_proj.weight", 0},
    {DSKV_PART_O_BIAS, "layers.%d.self_attn.o_proj.bias", 0},
    {DSKV_PART_NORM2_WEIGHT, "layers.%d.post_attention_layernorm.weight", 0},
    {DSKV_PART_GATE, "layers.%d.mlp.gate_proj.weight", 0},
    {DSKV_PART_GATE_BIAS, "layers.%d.mlp.gate_proj.bias", 0},
    {DSKV_PART_UP, "layers.%d.mlp.up_proj.weight", 0},
    {DSKV_PART_UP_BIAS, "layers.%d.mlp.up_proj.bias", 0},
    {DSKV_PART_DOWN, "layers.%d.mlp.down_proj.weight", 0},
    {DSKV_PART_DOWN_BIAS, "layers.%d.mlp.down_proj.bias", 0},
    {DSKV_PART_NORM_WEIGHT, "norm.weight", 0},
    {DSKV_PART_HEAD, "lm_head.weight", 0},
    {DSKV_PART_IGNORED, "layers.%d.self_attn.rotary_emb.inv_freq", 0}, /* theta again */
};

const struct dskv_family dskv_family_llama = {
    .model_type = "llama",
    .prefix = "model.",
    .read = read_llama,
    .names = dskv_llama_names,
    .n_names = DSKV_LLAMA_N_NAMES,
};
