/* Llama: rotary positions, RMSNorm, grouped queries, a gated MLP. */
#include "parallel/families/llama.h"

#include "base/limits.h"
#include "base/log.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What `name` of these parameters says, a number above 0 that must be there. */
static double rope_number(struct dskv_reader *reader, const char *key, const struct dskv_json *parameters,
                          const char *name)
{
    char whole[96];
    snprintf(whole, sizeof whole, "%s.%s", key, name);
    double number = dskv_reader_number_of(reader, whole, dskv_json_get(parameters, name), 0);
    if (number <= 0)
        dskv_reader_fail(reader, "%s is missing", whole);
    return number;
}

static void read_stretch(struct dskv_reader *reader, const char *key, const struct dskv_json *parameters,
                         enum dskv_rope_stretch kind, struct dskv_rope_scaling *scaling)
{
    if (scaling->kind != DSKV_ROPE_PLAIN)
        dskv_reader_fail(reader, "both rope_parameters and rope_scaling stretch the rotary table");
    scaling->kind = kind;
    scaling->factor = (float)rope_number(reader, key, parameters, "factor");
    if (scaling->factor < 1)
        dskv_reader_fail(reader, "%s.factor is %g, less than 1", key, (double)scaling->factor);
    if (kind == DSKV_ROPE_LINEAR)
        return;
    double context = rope_number(reader, key, parameters, "original_max_position_embeddings");
    scaling->low_factor = (float)rope_number(reader, key, parameters, "low_freq_factor");
    scaling->high_factor = (float)rope_number(reader, key, parameters, "high_freq_factor");
    if (context != floor(context) || context > DSKV_MAX_CONTEXT)
        dskv_reader_fail(reader, "%s.original_max_position_embeddings is %g, not a length of at most %d", key, context,
                         DSKV_MAX_CONTEXT);
    else
        scaling->original_context = (int32_t)context;
    if (scaling->low_factor >= scaling->high_factor)
        dskv_reader_fail(reader, "%s.low_freq_factor %g is not below high_freq_factor %g", key,
                         (double)scaling->low_factor, (double)scaling->high_factor);
}

/* The type by its name or, in older files, its other name; "default" where neither is there. */
static const char *rope_type(struct dskv_reader *reader, const char *key, const struct dskv_json *parameters)
{
    static const char *const names[] = {"rope_type", "type"};
    const char *found = NULL;
    for (int i = 0; i < 2; i++) {
        const struct dskv_json *type = dskv_json_get(parameters, names[i]);
        if (type && dskv_json_kind(type) != DSKV_JSON_STRING)
            dskv_reader_fail(reader, "%s.%s is not a string", key, names[i]);
        else if (type && found && strcmp(found, dskv_json_string(type)) != 0)
            dskv_reader_fail(reader, "%s.rope_type is \"%.32s\", but type is \"%.32s\"", key, found,
                             dskv_json_string(type));
        else if (type)
            found = dskv_json_string(type);
    }
    if (!found && dskv_json_get(parameters, "factor"))
        dskv_reader_fail(reader, "%s has a factor, but no rope_type", key);
    return found ? found : "default";
}

/* Rotary parameters stand in rope_scaling (transformers 4) or rope_parameters (5). */
static void read_rope_parameters(struct dskv_reader *reader, const char *key, const struct dskv_json *parameters,
                                 struct dskv_rope_scaling *scaling)
{
    if (dskv_json_kind(parameters) == DSKV_JSON_ABSENT || dskv_json_kind(parameters) == DSKV_JSON_NULL)
        return;
    if (dskv_json_kind(parameters) != DSKV_JSON_OBJECT) {
        dskv_reader_fail(reader, "%s is not an object", key);
        return;
    }
    const char *type = rope_type(reader, key, parameters);
    if (strcmp(type, "linear") == 0)
        read_stretch(reader, key, parameters, DSKV_ROPE_LINEAR, scaling);
    else if (strcmp(type, "llama3") == 0)
        read_stretch(reader, key, parameters, DSKV_ROPE_LLAMA3, scaling);
    else if (strcmp(type, "default") != 0)
        dskv_reader_fail(reader, "%s.rope_type \"%.32s\" is not computed; known are default, linear, llama3", key,
                         type);
    if (dskv_reader_number_of(reader, "partial_rotary_factor", dskv_json_get(parameters, "partial_rotary_factor"), 1) !=
        1)
        dskv_reader_fail(reader, "%s.partial_rotary_factor other than 1 is not supported", key);
    for (void *member = dskv_json_begin(parameters); member; member = dskv_json_next(parameters, member))
        if (dskv_json_kind(dskv_json_member_value(member)) == DSKV_JSON_OBJECT)
            dskv_reader_fail(reader, "%s.%.32s: parameters per kind of layer are not supported", key,
                             dskv_json_member_key(member));
}

static void read_rope(struct dskv_reader *reader, struct dskv_model *model)
{
    const struct dskv_json *parameters = dskv_json_get(reader->root, "rope_parameters");
    read_rope_parameters(reader, "rope_parameters", parameters, &model->rope_scaling);
    read_rope_parameters(reader, "rope_scaling", dskv_json_get(reader->root, "rope_scaling"), &model->rope_scaling);
    double outside = dskv_reader_number_or(reader, "rope_theta", 0);
    double inside =
        dskv_reader_number_of(reader, "rope_parameters.rope_theta", dskv_json_get(parameters, "rope_theta"), 0);
    if (outside > 0 && inside > 0 && outside != inside)
        dskv_reader_fail(reader, "rope_theta is %g, but rope_parameters.rope_theta is %g", outside, inside);
    dskv_reader_refuse(reader, "rope_interleaved");
    if (dskv_reader_number_or(reader, "partial_rotary_factor", 1) != 1)
        dskv_reader_fail(reader, "partial_rotary_factor other than 1 is not supported");
    model->positions = DSKV_POSITIONS_ROTARY;
    model->rope_theta = (float)(inside > 0 ? inside : outside > 0 ? outside : 10000);
    model->rope_style = DSKV_ROPE_HALVES;
    model->rotary_dim = model->head_dim;
    if (model->rotary_dim % 2 != 0)
        dskv_reader_fail(reader, "a head size of %d cannot be rotated in halves", model->head_dim);
}

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
    read_rope(reader, model);
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
