/* Shapes of models without files: a config.json in a directory of its own, for the engine's random weights. */
#include "bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct dskv_bench_shape shapes[] = {
    {.name = "llama-135m",
     .dtype = DSKV_F16,
     .n_layers = 30,
     .width = 576,
     .n_heads = 9,
     .n_kv_heads = 3,
     .head_dim = 64,
     .mlp = 1536,
     .vocab = 49152,
     .max_context = 2048,
     .tied = 1},
    {.name = "llama-1b",
     .dtype = DSKV_F16,
     .n_layers = 16,
     .width = 2048,
     .n_heads = 32,
     .n_kv_heads = 8,
     .head_dim = 64,
     .mlp = 8192,
     .vocab = 128256,
     .max_context = 8192,
     .tied = 1},
    {.name = "llama-8b",
     .dtype = DSKV_BF16,
     .n_layers = 32,
     .width = 4096,
     .n_heads = 32,
     .n_kv_heads = 8,
     .head_dim = 128,
     .mlp = 14336,
     .vocab = 128256,
     .max_context = 8192},
    {.name = "llama-8b-half", /* what one of two ranks holds of it */
     .dtype = DSKV_BF16,
     .n_layers = 32,
     .width = 4096,
     .n_heads = 16,
     .n_kv_heads = 4,
     .head_dim = 128,
     .mlp = 7168,
     .vocab = 64128,
     .max_context = 8192},
    {.name = "gpt2-xl",
     .is_gpt2 = 1,
     .dtype = DSKV_BF16,
     .n_layers = 48,
     .width = 1600,
     .n_heads = 25,
     .n_kv_heads = 25,
     .head_dim = 64,
     .mlp = 6400,
     .vocab = 50257,
     .max_context = 1024,
     .tied = 1},
    {.name = "llama-70b", /* for two GPUs and more */
     .dtype = DSKV_BF16,
     .n_layers = 80,
     .width = 8192,
     .n_heads = 64,
     .n_kv_heads = 8,
     .head_dim = 128,
     .mlp = 28672,
     .vocab = 128256,
     .max_context = 8192},
    {.name = "llama-70b-quarter", /* what one of four ranks holds of it */
     .dtype = DSKV_BF16,
     .n_layers = 80,
     .width = 8192,
     .n_heads = 16,
     .n_kv_heads = 2,
     .head_dim = 128,
     .mlp = 7168,
     .vocab = 32064,
     .max_context = 8192},
};

const struct dskv_bench_shape *dskv_bench_shape_find(const char *name, const char **names)
{
    if (names)
        *names = DSKV_BENCH_SHAPES;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(shapes[i].name, name) == 0)
            return &shapes[i];
    return NULL;
}

static const char *torch_name(enum dskv_dtype dtype)
{
    return dtype == DSKV_F32 ? "float32" : dtype == DSKV_F16 ? "float16" : "bfloat16";
}

static void print_gpt2(const struct dskv_bench_shape *shape, FILE *file)
{
    fprintf(
        file,
        "{\"model_type\": \"gpt2\", \"architectures\": [\"GPT2LMHeadModel\"], \"torch_dtype\": \"%s\",\n"
        " \"n_layer\": %d, \"n_embd\": %d, \"n_head\": %d, \"n_inner\": %d, \"vocab_size\": %d, \"n_positions\": %d,\n"
        " \"activation_function\": \"gelu_new\", \"layer_norm_epsilon\": 1e-5, \"tie_word_embeddings\": %s}\n",
        torch_name(shape->dtype), shape->n_layers, shape->width, shape->n_heads, shape->mlp, shape->vocab,
        shape->max_context, shape->tied ? "true" : "false");
}

static void print_llama(const struct dskv_bench_shape *shape, FILE *file)
{
    fprintf(
        file,
        "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForCausalLM\"], \"torch_dtype\": \"%s\",\n"
        " \"num_hidden_layers\": %d, \"hidden_size\": %d, \"num_attention_heads\": %d, \"num_key_value_heads\": %d,\n"
        " \"head_dim\": %d, \"intermediate_size\": %d, \"vocab_size\": %d, \"max_position_embeddings\": %d,\n"
        " \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"tie_word_embeddings\": %s}\n",
        torch_name(shape->dtype), shape->n_layers, shape->width, shape->n_heads, shape->n_kv_heads, shape->head_dim,
        shape->mlp, shape->vocab, shape->max_context, shape->tied ? "true" : "false");
}

static int write_config(const struct dskv_bench_shape *shape, const char *path)
{
    FILE *file = fopen(path, "w");
    if (!file)
        return 0;
    if (shape->is_gpt2)
        print_gpt2(shape, file);
    else
        print_llama(shape, file);
    return fclose(file) == 0;
}

enum dskv_exit dskv_bench_shape_write(const struct dskv_bench_shape *shape, char directory[64],
                                      struct dskv_error *error)
{
    char path[96];
    const char *base = getenv("TMPDIR");
    int n = snprintf(directory, 64, "%s/dskv-bench-XXXXXX", base && *base ? base : "/tmp");
    if (n >= 64)
        snprintf(directory, 64, "/tmp/dskv-bench-XXXXXX");
    if (!mkdtemp(directory)) {
        enum dskv_exit code =
            dskv_fail_exit(error, DSKV_EXIT_MODEL, "no directory %s can be made: %s", directory, strerror(errno));
        directory[0] = 0;
        return code;
    }
    snprintf(path, sizeof path, "%s/config.json", directory);
    if (!write_config(shape, path))
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s cannot be written: %s", path, strerror(errno));
    return DSKV_EXIT_OK;
}

void dskv_bench_shape_remove(const char *directory)
{
    char path[96];
    if (!*directory)
        return;
    snprintf(path, sizeof path, "%s/config.json", directory);
    unlink(path);
    rmdir(directory);
}
