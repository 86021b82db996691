/* Mistral: a Llama with a sliding window, none in later models. */
#include "parallel/families/llama.h"

static void read_mistral(struct dskv_reader *reader, struct dskv_model *model)
{
    dskv_llama_read(reader, model, &(struct dskv_llama_defaults){.n_kv_heads = 8, .max_context = 131072});
    dskv_llama_limit_to_window(reader, model, 4096);
}

const struct dskv_family dskv_family_mistral = {
    .model_type = "mistral",
    .prefix = "model.",
    .read = read_mistral,
    .names = dskv_llama_names,
    .n_names = DSKV_LLAMA_N_NAMES,
};
