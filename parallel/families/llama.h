/* Llama and the families that differ from it by a few words of config.json: what their readers share. */
#ifndef DSKV_PARALLEL_FAMILIES_LLAMA_H
#define DSKV_PARALLEL_FAMILIES_LLAMA_H

#include "parallel/family.h"

/* What a family's config.json means where it says nothing. */
struct dskv_llama_defaults {
    int32_t n_kv_heads; /* 0: as many as query heads */
    int32_t max_context;
};
/* All but biases and windows. */
void dskv_llama_read(struct dskv_reader *reader, struct dskv_model *model, const struct dskv_llama_defaults *defaults);
/* Where no context is longer than the sliding window, it hides nothing: contexts are limited to it.  fallback: the
 * window when sliding_window is absent; null is none. */
void dskv_llama_limit_to_window(struct dskv_reader *reader, struct dskv_model *model, int32_t fallback);

#define DSKV_LLAMA_N_NAMES 20
extern const struct dskv_tensor_name dskv_llama_names[DSKV_LLAMA_N_NAMES];

#endif
