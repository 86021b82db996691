/* Configuration and weight files against each other: all models of the tree fit, and every misfit is refused by name.
 */
#include "base/memory.h"
#include "parallel/checkpoint.h"
#include "parallel/model_dir.h"
#include "parallel/weights.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect_fit(const char *dir, struct dskv_model *model)
{
    struct dskv_error error = {0};
    enum dskv_exit code = dskv_model_read(dir, 0, model, &error);
    if (code != DSKV_EXIT_OK)
        printf("\n    refused: %s\n", error.message);
    CU_ASSERT_EQUAL_FATAL(code, DSKV_EXIT_OK);
}

static void expect_misfit(const char *dir, const char *words)
{
    struct dskv_model model;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL(dskv_model_read(dir, 0, &model, &error), DSKV_EXIT_MODEL);
    int told = strstr(error.message, "safetensors") && strstr(error.message, words);
    if (!told)
        printf("\n    \"%s\" does not say \"%s\"\n", error.message, words);
    CU_ASSERT(told);
}

/* A copy of a model with one place of one file changed. */
static void expect_misfit_after(const char *source, const char *file, const char *from, const char *to,
                                const char *words)
{
    char *dir = test_dir_copy(source);
    test_dir_edit(dir, file, from, to);
    expect_misfit(dir, words);
    test_dir_remove(&dir);
}

/* The same with places of equal length in the header of model.safetensors, which is no text. */
static void edit_header(const char *dir, const char *from, const char *to)
{
    size_t n, length = strlen(from);
    char *bytes = test_dir_read(dir, "model.safetensors", &n), *at = memmem(bytes, n, from, length);
    DSKV_ASSERT(at && strlen(to) == length, "\"%s\" is not there", from);
    memcpy(at, to, length);
    test_dir_write(dir, "model.safetensors", bytes, n);
    free(bytes);
}

static void expect_misfit_with_header(const char *source, const char *from, const char *to, const char *words)
{
    char *dir = test_dir_copy(source);
    edit_header(dir, from, to);
    expect_misfit(dir, words);
    test_dir_remove(&dir);
}

static void all_models_fit(void)
{
    static const enum dskv_dtype stored[] = {DSKV_F16, DSKV_F16, DSKV_F32, DSKV_BF16, DSKV_F16,  DSKV_F32, DSKV_F32,
                                             DSKV_F32, DSKV_F32, DSKV_F32, DSKV_F16,  DSKV_BF16, DSKV_F32, DSKV_BF16};
    char seen[16][33];
    for (int i = 0; test_models[i]; i++) {
        char *dir = dskv_format("%s/%s", DSKV_SOURCE_DIR, test_models[i]);
        struct dskv_model model;
        expect_fit(dir, &model);
        CU_ASSERT_EQUAL(model.stored_dtype, stored[i]);
        CU_ASSERT(model.n_end_tokens >= 1);
        for (int j = 0; j < i; j++)
            CU_ASSERT_STRING_NOT_EQUAL(seen[j], model.fingerprint);
        memcpy(seen[i], model.fingerprint, sizeof seen[i]);
        free(dir);
    }
}

static void shapes_and_names_must_fit(void)
{
    const char *llama = "tests/golden/llama-6x2-f32", *mqa = "tests/golden/llama-mqa-f16",
               *gpt2 = "tests/golden/gpt2-odd-f32";
    expect_misfit_after(llama, "config.json", "\"vocab_size\": 257", "\"vocab_size\": 256",
                        "has shape [257, 120], not [256, 120]");
    expect_misfit_after(llama, "config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", "layers.1.");
    expect_misfit_after(llama, "config.json", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "layers.2.");
    expect_misfit_after(llama, "config.json", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3",
                        "k_proj.weight has shape");
    expect_misfit_after(llama, "config.json", "\"intermediate_size\": 100", "\"intermediate_size\": 101", "has shape");
    expect_misfit_after(llama, "config.json", "\"attention_bias\": false", "\"attention_bias\": true",
                        "q_proj.bias is missing");
    expect_misfit_after(mqa, "config.json", "\"attention_bias\": true", "\"attention_bias\": false",
                        "bias has no place");
    expect_misfit_after(gpt2, "config.json", "\"n_positions\": 128", "\"n_positions\": 64", "wpe.weight has shape");
    expect_misfit_after(gpt2, "config.json", "\"n_inner\": 100", "\"n_inner\": 60", "has shape");
    expect_misfit_with_header(llama, "model.norm.weight", "model.worm.weight", "model.norm.weight is missing");
    expect_misfit_with_header(gpt2, "h.0.ln_1.bias", "h.9.ln_1.bias", "h.0.ln_1.bias is missing");
    expect_misfit_with_header(gpt2, "h.0.attn.masked_bias", "h.0.attn.basked_bias", "has no place");
}

static void dtypes_must_be_known(void)
{
    const char *gpt2 = "tests/golden/gpt2-odd-f32"; /* it carries BOOL buffers, which are not used and so pass */
    char *dir = test_dir_copy(gpt2);
    struct dskv_model model;
    expect_fit(dir, &model);
    edit_header(dir, "\"h.0.attn.c_attn.bias\":{\"dtype\":\"F32\"", "\"h.0.attn.c_attn.bias\":{\"dtype\":\"I32\"");
    expect_misfit(dir, "c_attn.bias has dtype I32");
    test_dir_remove(&dir);
}

static void tied_and_untied_heads(void)
{
    const char *tied_with_head = "tests/golden/llama-6x2-f32", *tied = "tests/golden/llama-8x4-f32",
               *untied = "tests/golden/gpt2-scaled-bf16";
    expect_misfit_after(tied, "config.json", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false",
                        "lm_head.weight is missing, and config.json does not say tie_word_embeddings");
    char *dir = test_dir_copy(tied_with_head);
    struct dskv_model model;
    expect_fit(dir, &model);
    CU_ASSERT(model.tied);
    test_dir_edit(dir, "config.json", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    expect_fit(dir, &model);
    CU_ASSERT(!model.tied);
    test_dir_remove(&dir);
    dir = test_dir_copy(untied);
    test_dir_edit(dir, "config.json", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    expect_fit(dir, &model); /* that its head differs is found when both are read: parallel.weights */
    edit_header(dir, "\"lm_head.weight\":{\"dtype\":\"BF16\"", "\"lm_head.weight\":{\"dtype\": \"F16\"");
    expect_misfit(dir, "lm_head.weight is F16, but transformer.wte.weight, to which config.json ties it, is BF16");
    test_dir_remove(&dir);
    expect_misfit_with_header(tied_with_head, "\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[257,120]",
                              "\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[120,257]", "lm_head.weight has shape");
}

static void damage_is_found_before_weights_are_read(void)
{
    const char *source = "tests/golden/llama-14x2-bf16", *second = "model-00002-of-00002.safetensors";
    char *dir = test_dir_copy(source);
    test_dir_delete(dir, second);
    expect_misfit(dir, second);
    test_dir_remove(&dir);
    dir = test_dir_copy(source);
    test_dir_truncate(dir, second, 200000);
    expect_misfit(dir, second);
    test_dir_write_text(dir, "stray.safetensors", "");
    expect_misfit(dir, "stray.safetensors");
    test_dir_remove(&dir);
}

/* Makes model.safetensors the only file of an index. */
static void index_single_file(const char *dir)
{
    const char *file = "model-00001-of-00001.safetensors";
    struct dskv_checkpoint *checkpoint;
    CU_ASSERT_EQUAL_FATAL(dskv_checkpoint_open(dir, &checkpoint, NULL), DSKV_EXIT_OK);
    char *text = dskv_strdup("{\"metadata\": {}, \"weight_map\": {");
    for (size_t i = 0; i < dskv_checkpoint_count(checkpoint); i++) {
        char *more =
            dskv_format("%s%s\"%s\": \"%s\"", text, i ? ", " : "", dskv_checkpoint_at(checkpoint, i)->name, file);
        free(text);
        text = more;
    }
    char *whole = dskv_format("%s}}", text);
    test_dir_write_text(dir, "model.safetensors.index.json", whole);
    test_dir_rename(dir, "model.safetensors", file);
    free(whole);
    free(text);
    dskv_checkpoint_close(&checkpoint);
}

static void fingerprints_follow_the_weights(void)
{
    char *dir = test_dir_copy("tests/golden/llama-mqa-f16");
    struct dskv_model before, after;
    expect_fit(dir, &before);
    size_t n;
    char *bytes = test_dir_read(dir, "model.safetensors", &n);
    bytes[n - 1] ^= 1;
    test_dir_write(dir, "model.safetensors", bytes, n);
    expect_fit(dir, &after);
    CU_ASSERT_STRING_NOT_EQUAL(before.fingerprint, after.fingerprint);
    bytes[n - 1] ^= 1;
    test_dir_write(dir, "model.safetensors", bytes, n);
    expect_fit(dir, &after);
    CU_ASSERT_STRING_EQUAL(before.fingerprint, after.fingerprint);
    free(bytes);

    index_single_file(dir); /* cut into files or not, it is the same model */
    expect_fit(dir, &after);
    CU_ASSERT_STRING_EQUAL(before.fingerprint, after.fingerprint);
    test_dir_remove(&dir);
}

int main(void)
{
    return dskv_run_tests("parallel.tensors",
                          (struct dskv_test[]){
                              {"all models fit", all_models_fit},
                              {"shapes and names must fit", shapes_and_names_must_fit},
                              {"dtypes must be known", dtypes_must_be_known},
                              {"tied and untied heads", tied_and_untied_heads},
                              {"damage is found before weights are read", damage_is_found_before_weights_are_read},
                              {"fingerprints follow the weights", fingerprints_follow_the_weights},
                              {NULL, NULL},
                          });
}
