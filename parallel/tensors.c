#include "parallel/tensors.h"

#include "base/memory.h"
#include "parallel/path.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Outputs and inputs of a part; k == 0 for a vector. */
static void part_shape(const struct dskv_model *model, enum dskv_part part, int64_t *n, int64_t *k)
{
    int64_t width = model->width, mlp = model->mlp;
    int64_t q = (int64_t)model->n_heads * model->head_dim, kv = (int64_t)model->n_kv_heads * model->head_dim;
    *k = 0;
    switch (part) {
    case DSKV_PART_EMBEDDING:
    case DSKV_PART_HEAD: *n = model->vocab, *k = width; break;
    case DSKV_PART_POSITIONS: *n = model->max_context, *k = width; break;
    case DSKV_PART_QKV: *n = q + 2 * kv, *k = width; break;
    case DSKV_PART_Q: *n = q, *k = width; break;
    case DSKV_PART_K:
    case DSKV_PART_V: *n = kv, *k = width; break;
    case DSKV_PART_QKV_BIAS: *n = q + 2 * kv; break;
    case DSKV_PART_Q_BIAS: *n = q; break;
    case DSKV_PART_K_BIAS:
    case DSKV_PART_V_BIAS: *n = kv; break;
    case DSKV_PART_O: *n = width, *k = q; break;
    case DSKV_PART_GATE:
    case DSKV_PART_UP: *n = mlp, *k = width; break;
    case DSKV_PART_GATE_BIAS:
    case DSKV_PART_UP_BIAS: *n = mlp; break;
    case DSKV_PART_DOWN: *n = width, *k = mlp; break;
    default: *n = width; break; /* norms and biases of the residual stream */
    }
}

/* The name in the files: the prefix belongs to all but the head.  The family's names hold one %d or none. */
static char *full_name(const char *prefix, const struct dskv_tensor_name *name, int32_t layer)
{
    char number[16];
    const char *percent = strstr(name->name, "%d");
    if (name->part == DSKV_PART_HEAD)
        prefix = "";
    if (!percent)
        return dskv_format("%s%s", prefix, name->name);
    snprintf(number, sizeof number, "%d", layer);
    return dskv_format("%s%.*s%s%s", prefix, (int)(percent - name->name), name->name, number, percent + 2);
}

struct binding {
    const struct dskv_model *model;
    const struct dskv_checkpoint *checkpoint;
    const char *prefix;
    struct dskv_tensors *tensors;
    char *known; /* [tensors of the checkpoint]: 1 when the family has a word for it */
};

static enum dskv_exit check_stored(const struct binding *binding, const struct dskv_bound_tensor *tensor,
                                   struct dskv_error *error)
{
    const struct dskv_stored *stored = tensor->stored;
    const char *path = dskv_path_tail(dskv_checkpoint_path(binding->checkpoint, stored));
    if (stored->dtype != DSKV_F32 && stored->dtype != DSKV_F16 && stored->dtype != DSKV_BF16)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s: tensor %.60s has dtype %s; supported are F32, F16 and BF16",
                              path, tensor->name, stored->dtype_name);
    int64_t rows = tensor->transposed ? tensor->k : tensor->n, cols = tensor->transposed ? tensor->n : tensor->k;
    int is_vector = tensor->k == 0;
    if (stored->n_dims == (is_vector ? 1 : 2) && stored->shape[0] == rows && (is_vector || stored->shape[1] == cols))
        return DSKV_EXIT_OK;
    char found[64] = "";
    for (int i = 0; i < stored->n_dims; i++) {
        size_t used = strlen(found);
        snprintf(found + used, sizeof found - used, "%s%lld", i ? ", " : "", (long long)stored->shape[i]);
    }
    if (is_vector)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s: tensor %.60s has shape [%s], not [%lld]", path, tensor->name,
                              found, (long long)rows);
    return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s: tensor %.60s has shape [%s], not [%lld, %lld]", path,
                          tensor->name, found, (long long)rows, (long long)cols);
}

/* A tied head that is stored all the same is compared, byte by byte, with the embedding, which is bound first. */
static enum dskv_exit check_tied(const struct binding *binding, const struct dskv_bound_tensor *head,
                                 struct dskv_error *error)
{
    const struct dskv_bound_tensor *embedding = &binding->tensors->list[0];
    if (head->stored->dtype == embedding->stored->dtype)
        return DSKV_EXIT_OK;
    return dskv_fail_exit(error, DSKV_EXIT_MODEL,
                          "%s: tensor %.60s is %s, but %.60s, to which config.json ties it, is %s",
                          dskv_path_tail(dskv_checkpoint_path(binding->checkpoint, head->stored)), head->name,
                          head->stored->dtype_name, embedding->name, embedding->stored->dtype_name);
}

static enum dskv_exit fail_missing(const struct binding *binding, const struct dskv_bound_tensor *tensor,
                                   struct dskv_error *error)
{
    return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s: tensor %.60s is missing%s",
                          dskv_path_tail(dskv_checkpoint_name(binding->checkpoint)), tensor->name,
                          tensor->part == DSKV_PART_HEAD ? ", and config.json does not say tie_word_embeddings" : "");
}

static enum dskv_exit bind_one(struct binding *binding, const struct dskv_tensor_name *name, int32_t layer,
                               struct dskv_error *error)
{
    struct dskv_bound_tensor tensor = {.part = name->part, .layer = layer, .transposed = name->transposed};
    int present = dskv_part_present(binding->model, name->part);
    int tied_head = name->part == DSKV_PART_HEAD && !present;
    part_shape(binding->model, name->part, &tensor.n, &tensor.k);
    tensor.name = full_name(binding->prefix, name, layer);
    enum dskv_exit code = DSKV_EXIT_OK;
    if (binding->checkpoint) {
        tensor.stored = dskv_checkpoint_find(binding->checkpoint, tensor.name);
        if (tensor.stored && (present || tied_head || name->part == DSKV_PART_IGNORED))
            binding->known[tensor.stored - dskv_checkpoint_at(binding->checkpoint, 0)] = 1;
        if (present && !tensor.stored)
            code = fail_missing(binding, &tensor, error);
        else if (tensor.stored && (present || tied_head))
            code = check_stored(binding, &tensor, error);
        if (code == DSKV_EXIT_OK && tensor.stored && tied_head)
            code = check_tied(binding, &tensor, error);
    }
    if (code == DSKV_EXIT_OK && (present || (tied_head && tensor.stored)))
        binding->tensors->list[binding->tensors->n++] = tensor;
    else
        free(tensor.name);
    return code;
}

/* A tensor without a word in the family means an arithmetic that the configuration does not tell. */
static enum dskv_exit check_left_over(const struct binding *binding, struct dskv_error *error)
{
    for (size_t i = 0; i < dskv_checkpoint_count(binding->checkpoint); i++) {
        const struct dskv_stored *stored = dskv_checkpoint_at(binding->checkpoint, i);
        if (!binding->known[i])
            return dskv_fail_exit(error, DSKV_EXIT_MODEL,
                                  "%s: tensor %.60s has no place in the %s model of config.json",
                                  dskv_path_tail(dskv_checkpoint_path(binding->checkpoint, stored)), stored->name,
                                  binding->model->family);
    }
    return DSKV_EXIT_OK;
}

static enum dskv_exit bind_all(struct binding *binding, const struct dskv_family *family, struct dskv_error *error)
{
    enum dskv_exit code = DSKV_EXIT_OK;
    for (int32_t layer = -1; layer < binding->model->n_layers; layer++)
        for (size_t i = 0; i < family->n_names && code == DSKV_EXIT_OK; i++) {
            int per_layer = strstr(family->names[i].name, "%d") != NULL;
            if (per_layer == (layer >= 0))
                code = bind_one(binding, &family->names[i], layer, error);
        }
    if (code == DSKV_EXIT_OK && binding->checkpoint)
        code = check_left_over(binding, error);
    return code;
}

enum dskv_exit dskv_tensors_open(const struct dskv_model *model, const struct dskv_checkpoint *checkpoint,
                                 struct dskv_tensors *tensors, struct dskv_error *error)
{
    const struct dskv_family *family = dskv_family_find(model->family);
    DSKV_ASSERT(family, "no family %s", model->family);
    *tensors = (struct dskv_tensors){
        .list = dskv_calloc(family->n_names * ((size_t)model->n_layers + 1), sizeof *tensors->list)};
    struct binding binding = {model, checkpoint, family->prefix, tensors, NULL};
    if (checkpoint) {
        char *first = full_name(family->prefix, &family->names[0], 0);
        if (!dskv_checkpoint_find(checkpoint, first))
            binding.prefix = "";
        free(first);
        binding.known = dskv_calloc(dskv_checkpoint_count(checkpoint), 1);
    }
    enum dskv_exit code = bind_all(&binding, family, error);
    free(binding.known);
    if (code != DSKV_EXIT_OK)
        dskv_tensors_close(tensors);
    return code;
}

void dskv_tensors_close(struct dskv_tensors *tensors)
{
    for (size_t i = 0; i < tensors->n; i++)
        free(tensors->list[i].name);
    free(tensors->list);
    *tensors = (struct dskv_tensors){0};
}

enum dskv_dtype dskv_tensors_dtype(const struct dskv_tensors *tensors)
{
    enum dskv_dtype dtype = DSKV_N_DTYPES;
    for (size_t i = 0; i < tensors->n; i++) {
        const struct dskv_bound_tensor *tensor = &tensors->list[i];
        if (tensor->k == 0 || tensor->part == DSKV_PART_POSITIONS || !tensor->stored)
            continue;
        if (dtype != DSKV_N_DTYPES && dtype != tensor->stored->dtype)
            return DSKV_F32;
        dtype = tensor->stored->dtype;
    }
    return dtype == DSKV_N_DTYPES ? DSKV_F32 : dtype;
}
