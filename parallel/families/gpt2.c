/* GPT-2: learned positions, LayerNorm, one fused projection for q, k and v, matrices stored [inputs, outputs]. */
#include "parallel/family.h"

#include <math.h>

static void read_gpt2(struct dskv_reader *reader, struct dskv_model *model)
{
    model->n_layers = dskv_reader_int(reader, "n_layer", 1, DSKV_MAX_LAYERS);
    model->width = dskv_reader_int(reader, "n_embd", 1, DSKV_MAX_WIDTH);
    model->n_heads = dskv_reader_int(reader, "n_head", 1, DSKV_MAX_HEADS);
    model->n_kv_heads = model->n_heads;
    if (model->width % model->n_heads != 0)
        dskv_reader_fail(reader, "n_embd %d is not a multiple of n_head %d", model->width, model->n_heads);
    model->head_dim = model->width / model->n_heads;
    model->mlp = dskv_reader_int_or(reader, "n_inner", 1, 4 * DSKV_MAX_WIDTH, 4 * model->width);
    model->vocab = dskv_reader_int(reader, "vocab_size", 1, DSKV_MAX_VOCAB);
    model->max_context = dskv_reader_int(reader, "n_positions", 1, DSKV_MAX_CONTEXT);
    model->norm = DSKV_LAYER_NORM;
    model->norm_eps = (float)dskv_reader_number_or(reader, "layer_norm_epsilon", 1e-5);
    model->positions = DSKV_POSITIONS_LEARNED;
    model->activation = dskv_reader_activation(reader, "activation_function", "gelu_new");
    model->tied = dskv_reader_bool_or(reader, "tie_word_embeddings", 1);
    model->qkv_bias = model->o_bias = model->mlp_bias = 1;
    dskv_reader_refuse(reader, "sliding_window");
    model->scale_by_layer = dskv_reader_bool_or(reader, "scale_attn_by_inverse_layer_idx", 0);
    model->attention_scale =
        dskv_reader_bool_or(reader, "scale_attn_weights", 1) ? (float)(1 / sqrt((double)model->head_dim)) : 1.0f;
}

static const struct dskv_tensor_name names[] = {
    {DSKV_PART_EMBEDDING, "wte.weight", 0},          {DSKV_PART_POSITIONS, "wpe.weight", 0},
    {DSKV_PART_NORM1_WEIGHT, "h.%d.ln_1.weight", 0}, {DSKV_PART_NORM1_BIAS, "h.%d.ln_1.bias", 0},
    {DSKV_PART_QKV, "h.%d.attn.c_attn.weight", 1},   {DSKV_PART_QKV_BIAS, "h.%d.attn.c_attn.bias", 0},
    {DSKV_PART_O, "h.%d.attn.c_proj.weight", 1},     {DSKV_PART_O_BIAS, "h.%d.attn.c_proj.bias", 0},
    {DSKV_PART_NORM2_WEIGHT, "h.%d.ln_2.weight", 0}, {DSKV_PART_NORM2_BIAS, "h.%d.ln_2.bias", 0},
    {DSKV_PART_UP, "h.%d.mlp.c_fc.weight", 1},       {DSKV_PART_UP_BIAS, "h.%d.mlp.c_fc.bias", 0},
    {DSKV_PART_DOWN, "h.%d.mlp.c_proj.weight", 1},   {DSKV_PART_DOWN_BIAS, "h.%d.mlp.c_proj.bias", 0},
    {DSKV_PART_NORM_WEIGHT, "ln_f.weight", 0},       {DSKV_PART_NORM_BIAS, "ln_f.bias", 0},
    {DSKV_PART_HEAD, "lm_head.weight", 0},           {DSKV_PART_IGNORED, "h.%d.attn.bias", 0}, /* the causal mask */
    {DSKV_PART_IGNORED, "h.%d.attn.masked_bias", 0},                                           /* its value */
};

const struct dskv_family dskv_family_gpt2 = {
    .model_type = "gpt2",
    .prefix = "transformer.",
    .read = read_gpt2,
    .names = names,
    .n_names = sizeof names / sizeof names[0],
};
