/* Qwen2: a Llama with biases at q, k and v; its sliding window is used where use_sliding_window says so. */
#include "parallel/families/llama.h"

static void read_qwen2(struct dskv_reader *reader, struct dskv_model *model)
{
    dskv_llama_read(reader, model, &(struct dskv_llama_defaults){.n_kv_heads = 32, .max_context = 32768});
    model->qkv_bias = 1;
    if (dskv_reader_bool_or(reader, "use_sliding_window", 0))
        dskv_llama_limit_to_window(reader, model, 4096);
}

const struct dskv_family dskv_family_qwen2 = {
    .model_type = "qwen2",
    .prefix = "model.",
    .read = read_qwen2,
    .names = dskv_llama_names,
    .n_names = DSKV_LLAMA_N_NAMES,
};
