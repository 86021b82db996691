/* config.json: what each family makes of it, and what it refuses. */
#include "base/log.h"
#include "base/memory.h"
#include "parallel/family.h"
#include "parallel/model_dir.h"
#include "parallel/weights.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GPT2                                                                                                           \
    "\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_embd\": 60, \"n_head\": 5, \"vocab_size\": 259, \"n_positions\": "  \
    "128"
#define LLAMA                                                                                                          \
    "\"model_type\": \"llama\", \"num_hidden_layers\": 3, \"hidden_size\": 120, \"num_attention_heads\": 6, "          \
    "\"intermediate_size\": 100, \"vocab_size\": 257"

/* Reads a directory that holds only a config.json of these members (the weights are dummies). */
static enum dskv_exit read_config(const char *members, const char *generation, struct dskv_model *model,
                                  struct dskv_error *error)
{
    char *dir = test_dir_make(), *text = dskv_format("{%s}", members);
    test_dir_write_text(dir, "config.json", text);
    if (generation)
        test_dir_write_text(dir, "generation_config.json", generation);
    enum dskv_exit code = dskv_model_read(dir, 1, model, error);
    free(text);
    test_dir_remove(&dir);
    return code;
}

static struct dskv_model accept(const char *members)
{
    struct dskv_model model;
    struct dskv_error error = {0};
    enum dskv_exit code = read_config(members, NULL, &model, &error);
    if (code != DSKV_EXIT_OK)
        printf("\n    refused: %s\n", error.message);
    CU_ASSERT_EQUAL(code, DSKV_EXIT_OK);
    return model;
}

static void refuse_with(const char *members, const char *generation, const char *file, const char *words)
{
    struct dskv_model model;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL(read_config(members, generation, &model, &error), DSKV_EXIT_MODEL);
    int told = strstr(error.message, file) && strstr(error.message, words);
    if (!told)
        printf("\n    \"%s\" does not say \"%s\" and \"%s\"\n", error.message, file, words);
    CU_ASSERT(told);
}

static void refuse(const char *members, const char *words)
{
    refuse_with(members, NULL, "config.json: ", words);
}

static void gpt2_defaults(void)
{
    struct dskv_model m = accept(GPT2);
    CU_ASSERT_STRING_EQUAL(m.family, "gpt2");
    CU_ASSERT(m.n_layers == 2 && m.width == 60 && m.n_heads == 5 && m.n_kv_heads == 5 && m.head_dim == 12);
    CU_ASSERT(m.mlp == 240 && m.vocab == 259 && m.max_context == 128 && m.tied && !m.gated && !m.scale_by_layer);
    CU_ASSERT(m.norm == DSKV_LAYER_NORM && m.norm_eps == 1e-5f && m.activation == DSKV_GELU_TANH);
    CU_ASSERT(m.positions == DSKV_POSITIONS_LEARNED && m.qkv_bias && m.o_bias && m.mlp_bias);
    CU_ASSERT(m.attention_scale == (float)(1 / sqrt(12.0)) && m.n_end_tokens == 0 && m.stored_dtype == DSKV_F32);
    CU_ASSERT_EQUAL(strlen(m.fingerprint), 32);
}

static void gpt2_options(void)
{
    struct dskv_model m =
        accept(GPT2 ", \"n_inner\": 100, \"activation_function\": \"gelu\", \"layer_norm_epsilon\": 1e-6, "
                    "\"tie_word_embeddings\": false, \"scale_attn_by_inverse_layer_idx\": true, "
                    "\"scale_attn_weights\": false, \"reorder_and_upcast_attn\": true, \"pruned_heads\": {}, "
                    "\"add_cross_attention\": false, \"torch_dtype\": \"float16\"");
    CU_ASSERT(m.mlp == 100 && m.activation == DSKV_GELU_ERF && m.norm_eps == 1e-6f && !m.tied && m.scale_by_layer);
    CU_ASSERT(m.attention_scale == 1.0f && m.stored_dtype == DSKV_F16);
    CU_ASSERT_EQUAL(accept(GPT2 ", \"n_inner\": null").mlp, 240);
    CU_ASSERT_EQUAL(accept(GPT2 ", \"activation_function\": \"relu\"").activation, DSKV_RELU);
    CU_ASSERT_EQUAL(accept(GPT2 ", \"activation_function\": \"gelu_pytorch_tanh\"").activation, DSKV_GELU_TANH);
    CU_ASSERT_EQUAL(accept(GPT2 ", \"activation_function\": \"silu\"").activation, DSKV_SILU);
}

static void llama_defaults(void)
{
    struct dskv_model m = accept(LLAMA);
    CU_ASSERT_STRING_EQUAL(m.family, "llama");
    CU_ASSERT(m.n_layers == 3 && m.width == 120 && m.n_heads == 6 && m.n_kv_heads == 6 && m.head_dim == 20);
    CU_ASSERT(m.mlp == 100 && m.vocab == 257 && m.max_context == 2048 && !m.tied && m.gated);
    CU_ASSERT(m.norm == DSKV_RMS_NORM && m.norm_eps == 1e-6f && m.activation == DSKV_SILU);
    CU_ASSERT(m.positions == DSKV_POSITIONS_ROTARY && m.rope_theta == 10000.0f && m.rotary_dim == 20);
    CU_ASSERT(m.rope_style == DSKV_ROPE_HALVES && !m.qkv_bias && !m.o_bias && !m.mlp_bias);
    CU_ASSERT(m.attention_scale == (float)(1 / sqrt(20.0)));
}

static void llama_options(void)
{
    struct dskv_model m = accept(LLAMA ", \"num_key_value_heads\": 2, \"head_dim\": 32, \"attention_bias\": true, "
                                       "\"mlp_bias\": true, \"rope_theta\": 500000, \"tie_word_embeddings\": true, "
                                       "\"hidden_act\": \"gelu_pytorch_tanh\", \"rms_norm_eps\": 1e-05, "
                                       "\"max_position_embeddings\": 4096, \"rope_scaling\": null, "
                                       "\"rope_interleaved\": false, \"pretraining_tp\": 1, "
                                       "\"torch_dtype\": \"bfloat16\", \"dtype\": \"bfloat16\"");
    CU_ASSERT(m.n_kv_heads == 2 && m.head_dim == 32 && m.qkv_bias && m.o_bias && m.mlp_bias && m.tied);
    CU_ASSERT(m.rope_theta == 500000.0f && m.rotary_dim == 32 && m.activation == DSKV_GELU_TANH && m.norm_eps == 1e-5f);
    CU_ASSERT(m.max_context == 4096 && m.stored_dtype == DSKV_BF16);
    m = accept(LLAMA ", \"rope_parameters\": {\"rope_theta\": 1e6, \"rope_type\": \"default\"}, \"head_dim\": null");
    CU_ASSERT(m.rope_theta == 1e6f && m.head_dim == 20);
    m = accept(LLAMA ", \"rope_theta\": 5000.0, \"rope_scaling\": {\"type\": \"default\", \"rope_type\": \"default\"}");
    CU_ASSERT_EQUAL(m.rope_theta, 5000.0f);
}

#define SHAPE                                                                                                          \
    "\"num_hidden_layers\": 3, \"hidden_size\": 128, \"num_attention_heads\": 8, \"intermediate_size\": 100, "         \
    "\"vocab_size\": 257, "
static void mistral_and_its_window(void)
{
    struct dskv_model m =
        accept(SHAPE "\"model_type\": \"mistral\", \"num_key_value_heads\": 2, \"sliding_window\": null");
    CU_ASSERT_STRING_EQUAL(m.family, "mistral");
    CU_ASSERT(m.n_kv_heads == 2 && m.head_dim == 16 && m.max_context == 131072 && m.gated && !m.tied);
    CU_ASSERT(m.norm == DSKV_RMS_NORM && !m.qkv_bias && !m.o_bias && !m.mlp_bias && m.rope_theta == 10000.0f);
    m = accept(SHAPE "\"model_type\": \"mistral\", \"sliding_window\": 512, \"attention_bias\": true");
    CU_ASSERT(m.n_kv_heads == 8 && m.max_context == 512 && !m.qkv_bias); /* it knows no such option */
    CU_ASSERT_EQUAL(accept(SHAPE "\"model_type\": \"mistral\"").max_context, 4096);
    CU_ASSERT_EQUAL(accept(SHAPE "\"model_type\": \"mistral\", \"max_position_embeddings\": 300").max_context, 300);
    refuse(SHAPE "\"model_type\": \"mistral\", \"sliding_window\": 0", "sliding_window");
    refuse(SHAPE "\"model_type\": \"mistral\", \"sliding_window\": \"no\"", "sliding_window");
}

static void qwen2_and_its_biases(void)
{
    struct dskv_model m =
        accept(SHAPE "\"model_type\": \"qwen2\", \"num_key_value_heads\": 4, \"sliding_window\": 4096, "
                     "\"use_sliding_window\": false, \"max_window_layers\": 2, \"rope_theta\": 1e6, "
                     "\"tie_word_embeddings\": true");
    CU_ASSERT_STRING_EQUAL(m.family, "qwen2");
    CU_ASSERT(m.n_kv_heads == 4 && m.max_context == 32768 && m.qkv_bias && !m.o_bias && !m.mlp_bias && m.tied);
    CU_ASSERT(m.rope_theta == 1e6f && m.norm_eps == 1e-6f && m.activation == DSKV_SILU);
    m = accept(SHAPE "\"model_type\": \"qwen2\", \"num_key_value_heads\": 4, \"sliding_window\": 512, "
                     "\"use_sliding_window\": true");
    CU_ASSERT_EQUAL(m.max_context, 512);
    m = accept(SHAPE "\"model_type\": \"qwen2\", \"num_key_value_heads\": 4, \"rope_scaling\": {\"type\": \"yarn\", "
                     "\"factor\": 4.0, \"original_max_position_embeddings\": 32768}");
    CU_ASSERT(m.rope_scaling.kind == DSKV_ROPE_YARN && m.max_context == 131072);
}

#define LLAMA3(low, high, context)                                                                                     \
    "{\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": " #low ", \"high_freq_factor\": " #high         \
    ", \"original_max_position_embeddings\": " #context "}"

static void llama_stretches(void)
{
    struct dskv_model m = accept(LLAMA);
    CU_ASSERT_EQUAL(m.rope_scaling.kind, DSKV_ROPE_PLAIN);
    m = accept(LLAMA ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.5}");
    CU_ASSERT(m.rope_scaling.kind == DSKV_ROPE_LINEAR && m.rope_scaling.factor == 2.5f);
    char plain[sizeof m.fingerprint];
    memcpy(plain, accept(LLAMA).fingerprint, sizeof plain);
    CU_ASSERT(strcmp(m.fingerprint, plain) != 0);
    static const char *const both[] = {LLAMA ", \"rope_scaling\": " LLAMA3(1.0, 4.0, 8192),
                                       LLAMA ", \"rope_parameters\": " LLAMA3(1, 4, 8192.0)};
    for (int i = 0; i < 2; i++) {
        m = accept(both[i]);
        CU_ASSERT(m.rope_scaling.kind == DSKV_ROPE_LLAMA3 && m.rope_scaling.factor == 8.0f);
        CU_ASSERT(m.rope_scaling.low_factor == 1.0f && m.rope_scaling.high_factor == 4.0f);
        CU_ASSERT_EQUAL(m.rope_scaling.original_context, 8192);
    }
    refuse(LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\"}", "rope_scaling.factor is missing");
    refuse(LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 0.5}", "less than 1");
    refuse(LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": \"2\"}", "rope_scaling.factor");
    refuse(LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\", \"type\": \"llama3\", \"factor\": 2}", "but type is");
    refuse(LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0}",
           "rope_scaling.original_max_position_embeddings is missing");
    refuse(LLAMA ", \"rope_scaling\": " LLAMA3(4.0, 4.0, 8192), "low_freq_factor 4 is not below");
    refuse(LLAMA ", \"rope_scaling\": " LLAMA3(1.0, 4.0, 8192.5), "not a length");
    refuse(LLAMA ", \"rope_scaling\": " LLAMA3(1.0, 4.0, 8192) ", \"rope_parameters\": " LLAMA3(1.0, 4.0, 8192),
           "both");
}

#define SCALING(members) LLAMA ", \"max_position_embeddings\": 512, \"rope_scaling\": {" members "}"
#define YARN "\"rope_type\": \"yarn\""
static void llama_stretched_by_yarn(void)
{
    struct dskv_model m = accept(SCALING(YARN ", \"factor\": 4"));
    const struct dskv_rope_scaling *s = &m.rope_scaling;
    CU_ASSERT(s->kind == DSKV_ROPE_YARN && s->factor == 4.0f && s->low_factor == 1.0f && s->high_factor == 32.0f);
    CU_ASSERT(s->original_context == 512 && m.max_context == 2048);
    CU_ASSERT(s->attention_factor == (float)(1 + 0.1 * log(4)));
    char usual[sizeof m.fingerprint];
    memcpy(usual, m.fingerprint, sizeof usual);
    m = accept(SCALING(YARN ", \"factor\": 4, \"attention_factor\": 1.5"));
    CU_ASSERT(s->attention_factor == 1.5f && strcmp(m.fingerprint, usual) != 0);
    m = accept(SCALING(YARN
                       ", \"factor\": 4, \"original_max_position_embeddings\": 64, \"beta_fast\": 2, \"beta_slow\": 2, "
                       "\"mscale\": null"));
    CU_ASSERT(s->original_context == 64 && m.max_context == 512 && s->low_factor == 2.0f && s->high_factor == 2.0f);
    m = accept(SCALING(YARN ", \"factor\": 4") ", \"original_max_position_embeddings\": 256");
    CU_ASSERT(s->original_context == 256 && m.max_context == 1024);
    m = accept(SCALING(YARN ", \"factor\": 1e30"));
    CU_ASSERT_EQUAL(m.max_context, DSKV_MAX_CONTEXT);
    refuse(SCALING(YARN), "rope_scaling.factor is missing");
    refuse(SCALING(YARN ", \"factor\": 0.5"), "rope_scaling.factor is 0.5, less than 1");
    refuse(SCALING(YARN ", \"factor\": true"), "rope_scaling.factor is not a number");
    refuse(SCALING(YARN ", \"factor\": 4, \"beta_fast\": 1, \"beta_slow\": 2"),
           "rope_scaling.beta_fast 1 is less than");
    refuse(SCALING(YARN ", \"factor\": 4, \"beta_slow\": 33"), "rope_scaling.beta_fast 32 is less than beta_slow 33");
    refuse(SCALING(YARN ", \"factor\": 4, \"beta_fast\": \"32\""), "rope_scaling.beta_fast is not a number");
    refuse(SCALING(YARN ", \"factor\": 4, \"attention_factor\": -1"), "rope_scaling.attention_factor is not a number");
    refuse(SCALING(YARN ", \"factor\": 4, \"mscale\": 1.0"), "rope_scaling.mscale is set");
    refuse(SCALING(YARN ", \"factor\": 4, \"truncate\": false"), "rope_scaling.truncate is set");
    refuse(SCALING(YARN ", \"factor\": 4, \"original_max_position_embeddings\": 64.5"), "64.5, not a length");
    refuse(
        SCALING(
            YARN
            ", \"factor\": 4, \"original_max_position_embeddings\": 64") ", \"original_max_position_embeddings\": 65",
        "original_max_position_embeddings is 65, but rope_scaling.original_max_position_embeddings is 64");
    refuse(SCALING(YARN ", \"factor\": 4") ", \"rope_theta\": 1", "rope_theta is 1; yarn");
}

#define DYNAMIC "\"rope_type\": \"dynamic\""
static void llama_stretched_as_dynamic(void)
{
    struct dskv_model m = accept(SCALING(DYNAMIC ", \"factor\": 2.5"));
    CU_ASSERT(m.rope_scaling.kind == DSKV_ROPE_DYNAMIC && m.rope_scaling.factor == 2.5f);
    CU_ASSERT(m.rope_scaling.original_context == 512 && m.max_context == 1280);
    accept(SCALING("\"type\": \"dynamic\", \"factor\": 2, \"original_max_position_embeddings\": 512"));
    refuse(SCALING(DYNAMIC), "rope_scaling.factor is missing");
    refuse(SCALING(DYNAMIC ", \"factor\": 0.99"), "rope_scaling.factor is 0.99, less than 1");
    refuse(SCALING(DYNAMIC ", \"factor\": [2]"), "rope_scaling.factor is not a number");
    refuse(SCALING(DYNAMIC ", \"factor\": 2, \"original_max_position_embeddings\": 64"),
           "original_max_position_embeddings is 64, but dynamic begins at max_position_embeddings, 512");
    refuse(SCALING(DYNAMIC ", \"factor\": 2") ", \"head_dim\": 2", "a head size of 2 cannot be stretched");
}

#define LONGROPE(short_factor, long_factor)                                                                            \
    "\"rope_type\": \"longrope\", \"short_factor\": " short_factor ", \"long_factor\": " long_factor
#define OF_4 ", \"head_dim\": 4, \"original_max_position_embeddings\": "
static void llama_stretched_as_longrope(void)
{
    struct dskv_model m = accept(SCALING(LONGROPE("[1, 1.5]", "[1.25, 4]")) OF_4 "128");
    const struct dskv_rope_scaling *s = &m.rope_scaling;
    CU_ASSERT(s->kind == DSKV_ROPE_LONGROPE && s->factor == 4.0f && s->original_context == 128 && m.max_context == 512);
    CU_ASSERT(s->short_factors[1] == 1.5f && s->long_factors[0] == 1.25f && s->long_factors[1] == 4.0f);
    CU_ASSERT(s->attention_factor == (float)sqrt(1 + log(4) / log(128)));
    char other[sizeof m.fingerprint];
    memcpy(other, m.fingerprint, sizeof other);
    m = accept(SCALING(LONGROPE("[1, 1.5]", "[1.5, 4]")) OF_4 "128");
    CU_ASSERT_STRING_NOT_EQUAL(m.fingerprint, other);
    m = accept(SCALING(LONGROPE("[1, 1]", "[1, 1]") ", \"factor\": 2, \"attention_factor\": 1.5") ", \"head_dim\": 4");
    CU_ASSERT(s->factor == 2.0f && s->original_context == 512 && m.max_context == 1024 && s->attention_factor == 1.5f);
    m = accept(SCALING(LONGROPE("[1, 1]", "[1, 1]") ", \"factor\": 2") OF_4 "128"); /* before the ratio, 4 */
    CU_ASSERT(s->factor == 2.0f && m.max_context == 512);
    CU_ASSERT_EQUAL(accept(SCALING(LONGROPE("[1, 1]", "[1, 1]")) OF_4 "512").rope_scaling.attention_factor, 1.0f);
    refuse(SCALING(LONGROPE("[1, 1]", "[1, 1]")) ", \"head_dim\": 4",
           "rope_scaling.factor is missing, and so is original_max_position_embeddings");
    refuse(SCALING(LONGROPE("[1, 1]", "[1, 1]")) OF_4 "513",
           "max_position_embeddings, 512, is less than original_max_position_embeddings, 513");
    refuse(SCALING(LONGROPE("[1, 1]", "[1, 1]")) OF_4 "1", "original_max_position_embeddings of 1");
    refuse(SCALING("\"type\": \"su\", \"short_factor\": [1, 1]") OF_4 "128", "rope_scaling.long_factor is missing");
    refuse(SCALING(LONGROPE("null", "[1, 1]")) OF_4 "128", "rope_scaling.short_factor is missing");
    refuse(SCALING(LONGROPE("[1, 1]", "4")) OF_4 "128", "rope_scaling.long_factor is not a list");
    refuse(SCALING(LONGROPE("[1, 1]", "[1, 1, 1]")) OF_4 "128",
           "rope_scaling.long_factor has 3 numbers; a head has 2 pairs to rotate");
    refuse(SCALING(LONGROPE("[1, \"1\"]", "[1, 1]")) OF_4 "128", "rope_scaling.short_factor[1] is not a number");
    refuse(SCALING(LONGROPE("[null, 1]", "[1, 1]")) OF_4 "128", "rope_scaling.short_factor[0] is not a number");
    refuse(SCALING(LONGROPE("[1, 1]", "[1, 0]")) OF_4 "128", "rope_scaling.long_factor[1] is not a number above 0");
    refuse(SCALING(LONGROPE("[1, 1]", "[1, 1]")) OF_4 "-5", "original_max_position_embeddings is not a number above 0");
}

static void meaningful_options_are_refused(void)
{
    refuse("\"model_type\": \"bloom\"", "model_type \"bloom\" is not known; known are gpt2, llama, mistral, qwen2");
    refuse("\"hidden_size\": 3", "model_type \"\"");
    refuse("\"model_type\": 3", "model_type is not a string");
    refuse(GPT2 ", \"add_cross_attention\": true", "add_cross_attention");
    refuse(GPT2 ", \"pruned_heads\": {\"0\": [1]}", "pruned_heads");
    refuse(GPT2 ", \"activation_function\": \"quick_gelu\"",
           "activation_function \"quick_gelu\" is not known; known are gelu_new");
    refuse_with(GPT2 ", \"n_head\": 7", NULL, "config.json", "duplicate");
    refuse(LLAMA ", \"quantization_config\": {\"quant_method\": \"gptq\"}", "quantization_config");
    refuse(LLAMA ", \"pretraining_tp\": 2", "pretraining_tp");
    refuse(LLAMA ", \"sliding_window\": 4096", "sliding_window");
    refuse(LLAMA ", \"rope_interleaved\": true", "rope_interleaved");
    refuse(LLAMA ", \"rope_parameters\": {\"rope_type\": \"spiral\"}",
           "rope_parameters.rope_type \"spiral\" is not known; known are default, linear, llama3, yarn, dynamic, "
           "longrope, su");
    refuse(LLAMA ", \"rope_parameters\": {\"rope_type\": 1}", "not a string");
    refuse(LLAMA ", \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}", "per kind of layer");
    refuse(LLAMA ", \"rope_parameters\": 7", "not an object");
    refuse(LLAMA ", \"rope_scaling\": {\"factor\": 8.0}", "no rope_type");
    refuse(LLAMA ", \"rope_theta\": 1e4, \"rope_parameters\": {\"rope_theta\": 5e5}", "rope_theta is 10000, but");
    refuse(LLAMA ", \"partial_rotary_factor\": 0.5", "partial_rotary_factor");
    refuse(LLAMA ", \"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "partial_rotary_factor");
}

static void impossible_values_are_refused(void)
{
    refuse("\"model_type\": \"gpt2\", \"n_layer\": 2", "n_embd is missing");
    refuse("\"model_type\": \"llama\", \"num_hidden_layers\": null", "num_hidden_layers is missing");
    refuse("\"model_type\": \"gpt2\", \"n_layer\": 0", "n_layer is not a whole number of 1 to 1024");
    refuse("\"model_type\": \"gpt2\", \"n_layer\": \"2\"", "n_layer is not");
    refuse("\"model_type\": \"gpt2\", \"n_layer\": 2.0", "n_layer is not");
    refuse("\"model_type\": \"gpt2\", \"n_layer\": 4294967298", "n_layer is not");
    refuse("\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 10, \"n_head\": 3", "not a multiple");
    refuse(GPT2 ", \"layer_norm_epsilon\": 0", "layer_norm_epsilon is not a number above 0");
    refuse(GPT2 ", \"layer_norm_epsilon\": 1e300", "layer_norm_epsilon is not");
    refuse(GPT2 ", \"tie_word_embeddings\": 1", "tie_word_embeddings is neither true nor false");
    refuse("\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 514, \"n_head\": 2, \"vocab_size\": 3, "
           "\"n_positions\": 4",
           "head size of 257");
    refuse(LLAMA ", \"num_key_value_heads\": 4", "not a multiple of num_key_value_heads");
    refuse(LLAMA ", \"num_key_value_heads\": 0", "num_key_value_heads is not");
    refuse(LLAMA ", \"head_dim\": 15", "head size of 15");
    refuse(LLAMA ", \"head_dim\": 512", "head_dim is not a whole number of 1 to 256");
    refuse(LLAMA ", \"rope_theta\": -1", "rope_theta is not a number above 0");
    refuse("\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"hidden_size\": 100, \"num_attention_heads\": 6",
           "head_dim");
}

static void end_tokens(void)
{
    struct dskv_model m = accept(GPT2 ", \"eos_token_id\": 258");
    CU_ASSERT(m.n_end_tokens == 1 && m.end_tokens[0] == 258);
    CU_ASSERT_EQUAL(accept(GPT2 ", \"eos_token_id\": null").n_end_tokens, 0);
    CU_ASSERT_EQUAL(read_config(GPT2 ", \"eos_token_id\": 1", "{\"eos_token_id\": [2, 7, 2]}", &m, NULL), DSKV_EXIT_OK);
    CU_ASSERT(m.n_end_tokens == 2 && m.end_tokens[0] == 2 && m.end_tokens[1] == 7);
    CU_ASSERT_EQUAL(read_config(GPT2 ", \"eos_token_id\": 1", "{\"bos_token_id\": 3}", &m, NULL), DSKV_EXIT_OK);
    CU_ASSERT(m.n_end_tokens == 1 && m.end_tokens[0] == 1);
    CU_ASSERT_EQUAL(accept(GPT2 ", \"eos_token_id\": 50256").n_end_tokens, 0); /* cannot be drawn: told, not refused */
    refuse(GPT2 ", \"eos_token_id\": \"end\"", "eos_token_id");
    refuse_with(GPT2, "{\"eos_token_id\": [1.5]}", "generation_config.json: ", "eos_token_id");
    refuse_with(GPT2, "{", "generation_config.json", "not valid JSON");
}

static void fingerprints_tell_shapes_apart(void)
{
    struct dskv_model a = accept(LLAMA), b = accept(LLAMA ", \"eos_token_id\": 3"),
                      c = accept(LLAMA ", \"rope_theta\": 10001");
    CU_ASSERT_STRING_EQUAL(a.fingerprint, b.fingerprint);
    CU_ASSERT_STRING_NOT_EQUAL(a.fingerprint, c.fingerprint);
}

static void families_are_found(void)
{
    CU_ASSERT_PTR_EQUAL(dskv_family_find("llama"), &dskv_family_llama);
    CU_ASSERT_PTR_EQUAL(dskv_family_find("gpt2"), &dskv_family_gpt2);
    CU_ASSERT_PTR_NULL(dskv_family_find("GPT2"));
}

int main(void)
{
    dskv_log_open(DSKV_LOG_ERROR, 0); /* the warning of "end tokens" is expected */
    return dskv_run_tests("parallel.family", (struct dskv_test[]){
                                                 {"gpt2: defaults", gpt2_defaults},
                                                 {"gpt2: options", gpt2_options},
                                                 {"llama: defaults", llama_defaults},
                                                 {"llama: options", llama_options},
                                                 {"llama: stretched rotary tables", llama_stretches},
                                                 {"llama: stretched by yarn", llama_stretched_by_yarn},
                                                 {"llama: stretched as dynamic", llama_stretched_as_dynamic},
                                                 {"llama: stretched as longrope", llama_stretched_as_longrope},
                                                 {"mistral and its window", mistral_and_its_window},
                                                 {"qwen2 and its biases", qwen2_and_its_biases},
                                                 {"meaningful options are refused", meaningful_options_are_refused},
                                                 {"impossible values are refused", impossible_values_are_refused},
                                                 {"end tokens", end_tokens},
                                                 {"fingerprints tell shapes apart", fingerprints_tell_shapes_apart},
                                                 {"families are found", families_are_found},
                                                 {NULL, NULL},
                                             });
}
