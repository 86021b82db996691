/* Model: from a model directory to its checked shape; no weight is read but for the fingerprint. */
#include "parallel/model.h"

#include "base/log.h"
#include "base/memory.h"
#include "parallel/engine.h"
#include "parallel/family.h"
#include "parallel/fingerprint.h"
#include "parallel/path.h"
#include "parallel/tensors.h"
#include "parallel/weights.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Options that any model's config.json may carry and that change the arithmetic in a way that is not computed here. */
static const char *const refused[] = {
    "quantization_config",     "compression_config", "add_cross_attention",  "cross_attention_hidden_size",
    "is_encoder_decoder",      "pruned_heads",       "attention_chunk_size", "attn_logit_softcapping",
    "final_logit_softcapping", "num_local_experts",
};

static void check_limits(struct dskv_reader *reader, const struct dskv_model *model)
{
    if (model->head_dim < 1 || model->head_dim > DSKV_MAX_HEAD_DIM)
        dskv_reader_fail(reader, "a head size of %d is not supported; it must be 1 to %d", model->head_dim,
                         DSKV_MAX_HEAD_DIM);
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        dskv_reader_refuse(reader, refused[i]);
}

static void read_family(struct dskv_reader *reader, struct dskv_model *model)
{
    const char *model_type = dskv_reader_string(reader, "model_type");
    const struct dskv_family *family = model_type ? dskv_family_find(model_type) : NULL;
    if (!family) {
        char known[128];
        dskv_family_list(known, sizeof known);
        dskv_reader_fail(reader, "model_type \"%.32s\" is not known; known are %s", model_type ? model_type : "",
                         known);
        return;
    }
    snprintf(model->family, sizeof model->family, "%s", family->model_type);
    family->read(reader, model);
    check_limits(reader, model);
}

/* For weights that no file stores: transformers' word for their dtype. */
static enum dskv_dtype config_dtype(struct dskv_reader *reader)
{
    const char *name = dskv_reader_string(reader, "dtype"); /* transformers 5 */
    if (!name)
        name = dskv_reader_string(reader, "torch_dtype");
    if (name && strcmp(name, "float16") == 0)
        return DSKV_F16;
    if (name && strcmp(name, "bfloat16") == 0)
        return DSKV_BF16;
    return DSKV_F32;
}

static void add_end_token(struct dskv_reader *reader, const struct dskv_json *value, struct dskv_model *model)
{
    if (dskv_json_kind(value) != DSKV_JSON_INTEGER) {
        dskv_reader_fail(reader, "eos_token_id is neither a token id nor a list of them");
        return;
    }
    int64_t id = dskv_json_integer(value);
    if (id < 0 || id >= model->vocab) { /* configurations of shortened models keep the old one: it can never be drawn */
        dskv_log(DSKV_LOG_WARNING, "model", "%s: eos_token_id %lld is not in the vocabulary of %d", reader->path,
                 (long long)id, model->vocab);
        return;
    }
    for (int32_t i = 0; i < model->n_end_tokens; i++)
        if (model->end_tokens[i] == id)
            return;
    if (model->n_end_tokens == DSKV_MAX_END_TOKENS) {
        dskv_reader_fail(reader, "eos_token_id has more than %d ids", DSKV_MAX_END_TOKENS);
        return;
    }
    model->end_tokens[model->n_end_tokens++] = (int32_t)id;
}

/* 0 when the file says nothing of it. */
static int read_end_tokens(struct dskv_reader *reader, struct dskv_model *model)
{
    const struct dskv_json *value = dskv_json_get(reader->root, "eos_token_id");
    enum dskv_json_kind kind = dskv_json_kind(value);
    if (kind == DSKV_JSON_ABSENT || kind == DSKV_JSON_NULL)
        return 0;
    if (kind != DSKV_JSON_ARRAY)
        add_end_token(reader, value, model);
    for (size_t i = 0; kind == DSKV_JSON_ARRAY && i < dskv_json_count(value); i++)
        add_end_token(reader, dskv_json_at(value, i), model);
    return 1;
}

/* generation_config.json has the last word, where it is and says something. */
static enum dskv_exit read_generation(const char *model_dir, struct dskv_reader *config, struct dskv_model *model,
                                      struct dskv_error *error)
{
    char *path = dskv_format("%s/generation_config.json", model_dir);
    struct dskv_json *root = NULL;
    struct dskv_reader reader = {NULL, path, DSKV_EXIT_OK, error};
    int found = 0;
    if (access(path, F_OK) == 0 || errno != ENOENT)
        reader.code = dskv_json_read(path, &root, error);
    if (root) {
        reader.root = root;
        found = read_end_tokens(&reader, model);
    }
    if (!found && reader.code == DSKV_EXIT_OK) {
        read_end_tokens(config, model);
        reader.code = config->code;
    }
    dskv_json_close(&root);
    free(path);
    return reader.code;
}

static enum dskv_exit check_directory(const char *model_dir, struct dskv_error *error)
{
    struct stat found = {0};
    if (!stat(model_dir, &found) && S_ISDIR(found.st_mode))
        return DSKV_EXIT_OK;
    return dskv_fail_exit(error, DSKV_EXIT_MODEL,
                          "%s cannot be opened: %s; a model is a local directory, none is downloaded",
                          dskv_path_tail(model_dir), strerror(found.st_mode ? ENOTDIR : errno));
}

static enum dskv_exit read_config(const char *model_dir, struct dskv_model *model, struct dskv_error *error)
{
    char *path = dskv_format("%s/config.json", model_dir);
    struct dskv_json *root = NULL;
    struct dskv_reader reader = {NULL, path, dskv_json_read(path, &root, error), error};
    if (reader.code == DSKV_EXIT_OK) {
        reader.root = root;
        read_family(&reader, model);
        model->stored_dtype = config_dtype(&reader);
    }
    if (reader.code == DSKV_EXIT_OK)
        reader.code = read_generation(model_dir, &reader, model, error);
    dskv_json_close(&root);
    free(path);
    return reader.code;
}

static enum dskv_exit read_files(const char *model_dir, struct dskv_model *model, struct dskv_error *error)
{
    struct dskv_checkpoint *checkpoint = NULL;
    enum dskv_exit code = dskv_checkpoint_open(model_dir, &checkpoint, error);
    if (code != DSKV_EXIT_OK)
        return code;
    struct dskv_tensors tensors;
    code = dskv_tensors_open(model, checkpoint, &tensors, error);
    if (code == DSKV_EXIT_OK) {
        model->stored_dtype = dskv_tensors_dtype(&tensors);
        code = dskv_fingerprint_of(model, checkpoint, error);
        dskv_tensors_close(&tensors);
    }
    dskv_checkpoint_close(&checkpoint);
    return code;
}

enum dskv_exit dskv_model_read(const char *model_dir, int dummy, struct dskv_model *model, struct dskv_error *error)
{
    *model = (struct dskv_model){0};
    enum dskv_exit code = check_directory(model_dir, error);
    if (code == DSKV_EXIT_OK)
        code = read_config(model_dir, model, error);
    if (code != DSKV_EXIT_OK)
        return code;
    return dummy ? dskv_fingerprint_of(model, NULL, error) : read_files(model_dir, model, error);
}

enum dskv_exit dskv_model_limit(const struct dskv_model *model, int32_t *max_model_len, struct dskv_error *error)
{
    if (*max_model_len == 0)
        *max_model_len = model->max_context;
    if (*max_model_len >= 1 && *max_model_len <= model->max_context)
        return DSKV_EXIT_OK;
    return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--max-model-len is %d, but the model's context is %d",
                          (int)*max_model_len, (int)model->max_context);
}

enum dskv_exit dskv_model_check(const char *model_dir, int32_t *max_model_len, struct dskv_model *model,
                                struct dskv_error *error)
{
    enum dskv_exit code = dskv_model_read(model_dir, 0, model, error);
    return code ? code : dskv_model_limit(model, max_model_len, error);
}
