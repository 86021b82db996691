#include "parallel/fingerprint.h"

#include "base/memory.h"
#include "parallel/rope.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define EDGE_BYTES ((size_t)64 << 10)

static void add_text(XXH3_state_t *state, char *text)
{
    XXH3_128bits_update(state, text, strlen(text) + 1); /* with its end, so that two texts never run together */
    free(text);
}

static void add_rope_scaling(XXH3_state_t *state, const struct dskv_model *model)
{
    const struct dskv_rope_scaling *scaling = &model->rope_scaling;
    if (scaling->kind == DSKV_ROPE_PLAIN)
        return;
    add_text(state, dskv_format("stretched %d %a %a %a %d", (int)scaling->kind, (double)scaling->factor,
                                (double)scaling->low_factor, (double)scaling->high_factor, scaling->original_context));
    if (scaling->kind == DSKV_ROPE_YARN || scaling->kind == DSKV_ROPE_LONGROPE)
        add_text(state, dskv_format("attention factor %a", (double)scaling->attention_factor));
    for (int32_t i = 0; scaling->kind == DSKV_ROPE_LONGROPE && i < model->rotary_dim / 2; i++)
        add_text(state, dskv_format("%a %a", (double)scaling->short_factors[i], (double)scaling->long_factors[i]));
}

static void add_shape(XXH3_state_t *state, const struct dskv_model *model)
{
    add_text(state, dskv_format("%s layers %d width %d heads %d/%d x %d mlp %d vocab %d context %d", model->family,
                                model->n_layers, model->width, model->n_heads, model->n_kv_heads, model->head_dim,
                                model->mlp, model->vocab, model->max_context));
    add_text(state, dskv_format("norm %d %a positions %d theta %a rotary %d style %d", (int)model->norm,
                                (double)model->norm_eps, (int)model->positions, (double)model->rope_theta,
                                model->rotary_dim, (int)model->rope_style));
    add_rope_scaling(state, model);
    add_text(state, dskv_format("activation %d gated %d tied %d biases %d %d %d scale %a by layer %d",
                                (int)model->activation, model->gated, model->tied, model->qkv_bias, model->o_bias,
                                model->mlp_bias, (double)model->attention_scale, model->scale_by_layer));
}

static enum dskv_exit add_bytes(XXH3_state_t *state, struct dskv_checkpoint *checkpoint,
                                const struct dskv_stored *tensor, uint64_t first, size_t bytes, char *buffer,
                                struct dskv_error *error)
{
    enum dskv_exit code = dskv_checkpoint_read_bytes(checkpoint, tensor, first, bytes, buffer, error);
    if (code == DSKV_EXIT_OK)
        XXH3_128bits_update(state, buffer, bytes);
    return code;
}

static enum dskv_exit add_tensor(XXH3_state_t *state, struct dskv_checkpoint *checkpoint,
                                 const struct dskv_stored *tensor, char *buffer, struct dskv_error *error)
{
    add_text(state, dskv_strdup(tensor->name));
    add_text(state, dskv_strdup(tensor->dtype_name));
    for (int i = 0; i < tensor->n_dims; i++)
        add_text(state, dskv_format("%lld", (long long)tensor->shape[i]));
    if (tensor->bytes <= 2 * EDGE_BYTES)
        return add_bytes(state, checkpoint, tensor, 0, (size_t)tensor->bytes, buffer, error);
    enum dskv_exit code = add_bytes(state, checkpoint, tensor, 0, EDGE_BYTES, buffer, error);
    if (code == DSKV_EXIT_OK)
        code = add_bytes(state, checkpoint, tensor, tensor->bytes - EDGE_BYTES, EDGE_BYTES, buffer, error);
    return code;
}

static void write_digest(XXH3_state_t *state, struct dskv_model *model)
{
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, XXH3_128bits_digest(state));
    for (size_t i = 0; i < sizeof bytes.digest; i++)
        snprintf(model->fingerprint + 2 * i, 3, "%02x", bytes.digest[i]);
    XXH3_freeState(state);
}

static XXH3_state_t *new_state(void)
{
    XXH3_state_t *state = XXH3_createState();
    DSKV_ASSERT(state && XXH3_128bits_reset(state) == XXH_OK, "no hash state");
    return state;
}

enum dskv_exit dskv_fingerprint_of(struct dskv_model *model, struct dskv_checkpoint *checkpoint,
                                   struct dskv_error *error)
{
    XXH3_state_t *state = new_state();
    add_shape(state, model);
    enum dskv_exit code = DSKV_EXIT_OK;
    char *buffer = dskv_calloc(2, EDGE_BYTES);
    for (size_t i = 0; checkpoint && code == DSKV_EXIT_OK && i < dskv_checkpoint_count(checkpoint); i++)
        code = add_tensor(state, checkpoint, dskv_checkpoint_at(checkpoint, i), buffer, error);
    free(buffer);
    write_digest(state, model);
    return code;
}

void dskv_fingerprint_serve(struct dskv_model *model, int32_t max_model_len)
{
    int32_t length = dskv_rope_length(model, max_model_len);
    if (!length)
        return;
    XXH3_state_t *state = new_state();
    add_text(state, dskv_format("%s served to %d", model->fingerprint, length));
    write_digest(state, model);
}
