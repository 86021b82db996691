/* Weights as a rank holds them: one rank's against the files, several ranks' against one rank's, element by element. */
#include "base/log.h"
#include "base/memory.h"
#include "parallel/model_dir.h"
#include "parallel/tensors.h"
#include "parallel/weights.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct dskv_device *device;

/* A rank's weights and what is needed to look at them. */
struct rank {
    struct dskv_model model;
    struct dskv_shard shard;
    struct dskv_weights_options options;
    struct dskv_weights *weights;
};

static enum dskv_exit open_rank(struct rank *r, const char *dir, int dummy, enum dskv_dtype dtype, int index,
                                int n_ranks, struct dskv_error *error)
{
    enum dskv_exit code = dskv_model_read(dir, dummy, &r->model, error);
    if (code == DSKV_EXIT_OK)
        code = dskv_shard_of(&r->model, index, n_ranks, &r->shard, error);
    if (code != DSKV_EXIT_OK)
        return code;
    r->options = (struct dskv_weights_options){.model_dir = dir,
                                               .dtype = dtype == DSKV_N_DTYPES ? r->model.stored_dtype : dtype,
                                               .max_model_len = 50,
                                               .dummy = dummy};
    return dskv_weights_open(device, &r->model, &r->shard, &r->options, &r->weights, error);
}

static void must_open(struct rank *r, const char *dir, int dummy, enum dskv_dtype dtype, int index, int n_ranks)
{
    struct dskv_error error = {0};
    enum dskv_exit code = open_rank(r, dir, dummy, dtype, index, n_ranks, &error);
    if (code != DSKV_EXIT_OK)
        printf("\n    %s\n", error.message);
    CU_ASSERT_EQUAL_FATAL(code, DSKV_EXIT_OK);
}

/* A prepared weight is opaque: its product with one-hot rows gives every element back, exactly. */
static float *read_back(const struct dskv_weight *weight)
{
    enum { ROWS = 32 };
    int64_t n = dskv_weight_n(weight), k = dskv_weight_k(weight);
    float *out = dskv_calloc((size_t)(n * k), sizeof *out);
    if (n == 0 || k == 0)
        return out;
    size_t x_bytes = (size_t)(ROWS * k) * sizeof(float), y_bytes = (size_t)(ROWS * n) * sizeof(float);
    float *x = dskv_device_alloc(device, x_bytes), *y = dskv_device_alloc(device, y_bytes);
    for (int64_t first = 0; first < k; first += ROWS) {
        int64_t rows = k - first < ROWS ? k - first : ROWS;
        memset(x, 0, x_bytes);
        for (int64_t i = 0; i < rows; i++)
            x[i * k + first + i] = 1;
        struct dskv_matmul matmul = {dskv_tensor(x, DSKV_F32, rows, k), weight, NULL,
                                     dskv_tensor(y, DSKV_F32, rows, n)};
        dskv_op_matmul(device, &matmul);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < n; j++)
                out[j * k + first + i] = y[i * n + j];
    }
    dskv_device_free(device, x, x_bytes);
    dskv_device_free(device, y, y_bytes);
    return out;
}

/* ---- one rank against the files ---------------------------------------------------------------------------------- */

/* A stored tensor as f32 [n, k], by way of the dtype that is held. */
static float *expected_of(struct dskv_checkpoint *checkpoint, const struct dskv_bound_tensor *tensor,
                          enum dskv_dtype held)
{
    size_t n = (size_t)tensor->n, k = tensor->k ? (size_t)tensor->k : 1;
    char *raw = dskv_calloc(n * k, 4);
    float *wide = dskv_calloc(n * k, 4), *out = dskv_calloc(n * k, 4);
    CU_ASSERT_EQUAL_FATAL(
        dskv_checkpoint_read_bytes(checkpoint, tensor->stored, 0, (size_t)tensor->stored->bytes, raw, NULL),
        DSKV_EXIT_OK);
    dskv_convert(wide, DSKV_F32, raw, tensor->stored->dtype, n * k);
    if (tensor->k && tensor->part != DSKV_PART_POSITIONS) {
        dskv_convert(raw, held, wide, DSKV_F32, n * k);
        dskv_convert(wide, DSKV_F32, raw, held, n * k);
    }
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < k; j++)
            out[i * k + j] = (tensor->transposed ? wide[j * n + i] : wide[i * k + j]) + 0.0f; /* a product has no -0 */
    free(raw);
    free(wide);
    return out;
}

/* Where one rank holds a part: the weight or vector and its first row there. */
struct place {
    const struct dskv_weight *weight;
    const float *vector;
    int64_t row;
};

static struct place place_of(const struct rank *r, const struct dskv_bound_tensor *tensor)
{
    const struct dskv_weights *w = r->weights;
    const struct dskv_layer_weights *l = tensor->layer >= 0 ? &w->layers[tensor->layer] : NULL;
    int64_t q = r->model.n_heads * r->model.head_dim, kv = r->model.n_kv_heads * r->model.head_dim;
    int64_t up = r->model.gated ? r->model.mlp : 0;
    switch (tensor->part) {
    case DSKV_PART_EMBEDDING: return (struct place){w->embedding, NULL, 0};
    case DSKV_PART_HEAD: return (struct place){w->head, NULL, 0};
    case DSKV_PART_POSITIONS: return (struct place){NULL, w->position_table.data, 0};
    case DSKV_PART_NORM_WEIGHT: return (struct place){NULL, w->norm_weight, 0};
    case DSKV_PART_NORM_BIAS: return (struct place){NULL, w->norm_bias, 0};
    case DSKV_PART_NORM1_WEIGHT: return (struct place){NULL, l->norm1_weight, 0};
    case DSKV_PART_NORM1_BIAS: return (struct place){NULL, l->norm1_bias, 0};
    case DSKV_PART_NORM2_WEIGHT: return (struct place){NULL, l->norm2_weight, 0};
    case DSKV_PART_NORM2_BIAS: return (struct place){NULL, l->norm2_bias, 0};
    case DSKV_PART_QKV:
    case DSKV_PART_Q: return (struct place){l->qkv, NULL, 0};
    case DSKV_PART_K: return (struct place){l->qkv, NULL, q};
    case DSKV_PART_V: return (struct place){l->qkv, NULL, q + kv};
    case DSKV_PART_QKV_BIAS:
    case DSKV_PART_Q_BIAS: return (struct place){NULL, l->qkv_bias, 0};
    case DSKV_PART_K_BIAS: return (struct place){NULL, l->qkv_bias, q};
    case DSKV_PART_V_BIAS: return (struct place){NULL, l->qkv_bias, q + kv};
    case DSKV_PART_O: return (struct place){l->o, NULL, 0};
    case DSKV_PART_O_BIAS: return (struct place){NULL, l->o_bias, 0};
    case DSKV_PART_GATE: return (struct place){l->up, NULL, 0};
    case DSKV_PART_UP: return (struct place){l->up, NULL, up};
    case DSKV_PART_GATE_BIAS: return (struct place){NULL, l->up_bias, 0};
    case DSKV_PART_UP_BIAS: return (struct place){NULL, l->up_bias, up};
    case DSKV_PART_DOWN: return (struct place){l->down, NULL, 0};
    case DSKV_PART_DOWN_BIAS: return (struct place){NULL, l->down_bias, 0};
    default: dskv_bug(__FILE__, __LINE__, "part", "%d", (int)tensor->part);
    }
}

static void check_against_files(const char *dir, enum dskv_dtype dtype)
{
    struct rank r;
    must_open(&r, dir, 0, dtype, 0, 1);
    struct dskv_checkpoint *checkpoint;
    struct dskv_tensors tensors;
    CU_ASSERT_EQUAL_FATAL(dskv_checkpoint_open(dir, &checkpoint, NULL), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL_FATAL(dskv_tensors_open(&r.model, checkpoint, &tensors, NULL), DSKV_EXIT_OK);
    uint64_t matrix_bytes = 0, vector_elements = 0;
    for (size_t i = 0; i < tensors.n; i++) {
        const struct dskv_bound_tensor *tensor = &tensors.list[i];
        if (tensor->part == DSKV_PART_HEAD && r.model.tied)
            continue;
        struct place place = place_of(&r, tensor);
        float *expected = expected_of(checkpoint, tensor, r.options.dtype);
        size_t n = (size_t)(tensor->n * (tensor->k ? tensor->k : 1));
        float *held = place.weight ? read_back(place.weight) : NULL;
        const float *got = held ? held + place.row * tensor->k : place.vector + place.row;
        int same = memcmp(expected, got, n * sizeof *expected) == 0;
        if (!same)
            printf("\n    %s: %s differs\n", dir, tensor->name);
        CU_ASSERT(same);
        matrix_bytes += place.weight ? n * dskv_dtype_bytes(r.options.dtype) : 0;
        vector_elements += place.weight ? 0 : n;
        free(held);
        free(expected);
    }
    CU_ASSERT_EQUAL(r.weights->sharded_bytes, matrix_bytes);
    uint64_t rope_elements = r.weights->rope_cos ? 50u * (uint64_t)r.model.rotary_dim : 0;
    CU_ASSERT_EQUAL(r.weights->replicated_bytes, (vector_elements + rope_elements) * sizeof(float));
    dskv_tensors_close(&tensors);
    dskv_checkpoint_close(&checkpoint);
    dskv_weights_close(device, &r.weights);
    CU_ASSERT_PTR_NULL(r.weights);
}

static void one_rank_holds_the_files(void)
{
    for (int i = 0; test_models[i]; i++) {
        char *dir = dskv_format("%s/%s", DSKV_SOURCE_DIR, test_models[i]);
        check_against_files(dir, DSKV_N_DTYPES);
        if (i >= 2) {
            check_against_files(dir, DSKV_F32);
            check_against_files(dir, DSKV_BF16);
            check_against_files(dir, DSKV_F16);
        }
        free(dir);
    }
}

/* ---- several ranks against one ------------------------------------------------------------------------------------
 */

static int check_rows(const char *what, const float *part, const float *whole, int64_t part_row, int64_t whole_row,
                      int64_t n, int64_t k)
{
    int same = memcmp(part + part_row * k, whole + whole_row * k, (size_t)(n * k) * sizeof *part) == 0;
    if (!same)
        printf("\n    %s: rows %lld + %lld differ from the whole's\n", what, (long long)part_row, (long long)n);
    CU_ASSERT(same);
    return same;
}

/* q, k and v heads of a rank's rows of `k` floats among those of one rank. */
static void check_heads(const struct rank *part, const struct rank *whole, const float *got, const float *all,
                        int64_t k)
{
    const struct dskv_shard *s = &part->shard;
    int64_t d = part->model.head_dim, q = s->n_heads_local * d, kv = s->n_kv_heads_local * d;
    int64_t all_q = whole->model.n_heads * d, all_kv = whole->model.n_kv_heads * d;
    check_rows("q", got, all, 0, s->first_head * d, q, k);
    check_rows("k", got, all, q, all_q + s->first_kv_head * d, kv, k);
    check_rows("v", got, all, q + kv, all_q + all_kv + s->first_kv_head * d, kv, k);
}

static void check_mlp_rows(const struct rank *part, const float *got, const float *all, int64_t k)
{
    const struct dskv_shard *s = &part->shard;
    for (int half = 0; half <= part->model.gated; half++)
        check_rows("up", got, all, half * s->n_mlp_local, half * part->model.mlp + s->first_mlp, s->n_mlp_local, k);
}

static void check_columns(const char *what, const float *part, const float *whole, int64_t rows, int64_t first,
                          int64_t n, int64_t all)
{
    for (int64_t i = 0; i < rows; i++) {
        int same = memcmp(part + i * n, whole + i * all + first, (size_t)n * sizeof *part) == 0;
        CU_ASSERT(same);
        if (!same) {
            printf("\n    %s: row %lld differs from the whole's\n", what, (long long)i);
            return;
        }
    }
}

static void check_vector(const char *what, const float *part, const float *whole, int64_t n)
{
    CU_ASSERT((part == NULL) == (whole == NULL));
    if (part)
        check_rows(what, part, whole, 0, 0, n, 1);
}

enum { QKV, O, UP, DOWN, N_MATRICES };

static void read_layer(const struct dskv_layer_weights *l, float **matrices)
{
    matrices[QKV] = read_back(l->qkv);
    matrices[O] = read_back(l->o);
    matrices[UP] = read_back(l->up);
    matrices[DOWN] = read_back(l->down);
}

static void check_layer(const struct rank *part, const struct rank *whole, int32_t layer)
{
    const struct dskv_layer_weights *p = &part->weights->layers[layer], *w = &whole->weights->layers[layer];
    const struct dskv_model *m = &part->model;
    const struct dskv_shard *s = &part->shard;
    float *got[N_MATRICES], *all[N_MATRICES];
    read_layer(p, got);
    read_layer(w, all);
    int64_t d = m->head_dim;
    check_heads(part, whole, got[QKV], all[QKV], m->width);
    check_columns("o", got[O], all[O], m->width, s->first_head * d, s->n_heads_local * d, m->n_heads * d);
    check_mlp_rows(part, got[UP], all[UP], m->width);
    check_columns("down", got[DOWN], all[DOWN], m->width, s->first_mlp, s->n_mlp_local, m->mlp);
    if (p->qkv_bias)
        check_heads(part, whole, p->qkv_bias, w->qkv_bias, 1);
    if (p->up_bias)
        check_mlp_rows(part, p->up_bias, w->up_bias, 1);
    check_vector("norm1", p->norm1_weight, w->norm1_weight, m->width);
    check_vector("norm1 bias", p->norm1_bias, w->norm1_bias, m->width);
    check_vector("o bias", p->o_bias, w->o_bias, m->width);
    check_vector("norm2", p->norm2_weight, w->norm2_weight, m->width);
    check_vector("norm2 bias", p->norm2_bias, w->norm2_bias, m->width);
    check_vector("down bias", p->down_bias, w->down_bias, m->width);
    for (int i = 0; i < N_MATRICES; i++) {
        free(got[i]);
        free(all[i]);
    }
}

static void check_vocabulary(const struct rank *part, const struct dskv_weight *got, const struct dskv_weight *all)
{
    float *rows = read_back(got), *whole = read_back(all);
    check_rows("vocabulary", rows, whole, 0, part->shard.first_vocab, part->shard.n_vocab_local, part->model.width);
    free(rows);
    free(whole);
}

static void check_shards(const char *dir, int dummy, int n_ranks)
{
    struct rank whole, part;
    uint64_t sharded = 0;
    must_open(&whole, dir, dummy, DSKV_N_DTYPES, 0, 1);
    for (int index = 0; index < n_ranks; index++) {
        must_open(&part, dir, dummy, DSKV_N_DTYPES, index, n_ranks);
        struct dskv_weights *p = part.weights, *w = whole.weights;
        check_vocabulary(&part, p->embedding, w->embedding);
        CU_ASSERT((p->head == p->embedding) == (part.model.tied != 0));
        if (!part.model.tied)
            check_vocabulary(&part, p->head, w->head);
        for (int32_t layer = 0; layer < part.model.n_layers; layer++)
            check_layer(&part, &whole, layer);
        check_vector("norm", p->norm_weight, w->norm_weight, part.model.width);
        check_vector("norm bias", p->norm_bias, w->norm_bias, part.model.width);
        check_vector("positions", p->position_table.data, w->position_table.data,
                     p->position_table.rows * p->position_table.cols);
        check_vector("cosines", p->rope_cos, w->rope_cos, 50 * (part.model.rotary_dim / 2));
        check_vector("sines", p->rope_sin, w->rope_sin, 50 * (part.model.rotary_dim / 2));
        sharded += p->sharded_bytes;
        dskv_weights_close(device, &part.weights);
    }
    CU_ASSERT_EQUAL(sharded, whole.weights->sharded_bytes);
    dskv_weights_close(device, &whole.weights);
}

static void shards_are_parts_of_the_whole(void)
{
    for (int i = 2; test_models[i]; i++) {
        char *dir = dskv_format("%s/%s", DSKV_SOURCE_DIR, test_models[i]);
        for (int n_ranks = 2; n_ranks <= 4; n_ranks++)
            check_shards(dir, 0, n_ranks);
        free(dir);
    }
    check_shards(DSKV_SOURCE_DIR "/launch/models/atlas-llama", 0, 8);
}

static void dummies_are_the_same_at_every_number_of_ranks(void)
{
    check_shards(DSKV_SOURCE_DIR "/tests/golden/llama-14x2-bf16", 1, 3);
    check_shards(DSKV_SOURCE_DIR "/tests/golden/gpt2-scaled-bf16", 1, 4);
    struct rank r;
    must_open(&r, DSKV_SOURCE_DIR "/tests/golden/llama-mqa-f16", 1, DSKV_F32, 0, 1);
    CU_ASSERT_EQUAL(r.weights->read_bytes, 0);
    float *values = read_back(r.weights->layers[0].qkv);
    int64_t n = dskv_weight_n(r.weights->layers[0].qkv) * dskv_weight_k(r.weights->layers[0].qkv);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += values[i];
        squares += (double)values[i] * values[i];
    }
    CU_ASSERT(fabs(sum / (double)n) < 0.001);
    CU_ASSERT(fabs(sqrt(squares / (double)n) - 0.02) < 0.001);
    CU_ASSERT_EQUAL(r.weights->norm_weight[5], 1.0f);
    free(values);
    dskv_weights_close(device, &r.weights);
}

/* In f32 files every byte that is held is a byte of the file, but for the rotary table: so nothing else was read. */
static void ranks_read_their_shard_only(void)
{
    const char *const dirs[] = {DSKV_SOURCE_DIR "/tests/golden/llama-8x4-f32",
                                DSKV_SOURCE_DIR "/tests/golden/gpt2-odd-f32"};
    for (int i = 0; i < 2; i++)
        for (int index = 0; index < 3; index++) {
            struct rank r;
            must_open(&r, dirs[i], 0, DSKV_N_DTYPES, index, 3);
            uint64_t rope_bytes = r.weights->rope_cos ? 50 * sizeof(float) * (uint64_t)r.model.rotary_dim : 0;
            CU_ASSERT_EQUAL(r.weights->read_bytes, r.weights->sharded_bytes + r.weights->replicated_bytes - rope_bytes);
            dskv_weights_close(device, &r.weights);
        }
}

/* ---- refusals -----------------------------------------------------------------------------------------------------
 */

/* Overwrites the last bytes of a tensor. */
static void poke(const char *dir, const char *tensor, const void *bytes, size_t n)
{
    struct dskv_checkpoint *checkpoint;
    CU_ASSERT_EQUAL_FATAL(dskv_checkpoint_open(dir, &checkpoint, NULL), DSKV_EXIT_OK);
    const struct dskv_stored *stored = dskv_checkpoint_find(checkpoint, tensor);
    CU_ASSERT_PTR_NOT_NULL_FATAL(stored);
    FILE *file = fopen(dskv_checkpoint_path(checkpoint, stored), "r+b");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fseek(file, (long)(stored->offset + stored->bytes - n), SEEK_SET);
    CU_ASSERT_EQUAL(fwrite(bytes, 1, n, file), n);
    fclose(file);
    dskv_checkpoint_close(&checkpoint);
}

static void values_that_do_not_fit_are_refused(void)
{
    char *dir = test_dir_copy("tests/golden/llama-8x4-f32");
    const float large = 70000;
    struct rank r;
    struct dskv_error error = {0};
    poke(dir, "model.layers.1.mlp.down_proj.weight", &large, sizeof large);
    CU_ASSERT_EQUAL(open_rank(&r, dir, 0, DSKV_F16, 0, 1, &error), DSKV_EXIT_MODEL);
    CU_ASSERT(strstr(error.message, "model.safetensors") && strstr(error.message, "down_proj") &&
              strstr(error.message, "f16"));
    CU_ASSERT_PTR_NULL(r.weights);
    must_open(&r, dir, 0, DSKV_BF16, 0, 1);
    dskv_weights_close(device, &r.weights);
    test_dir_remove(&dir);
}

static void a_tied_head_must_equal_the_embedding(void)
{
    char *dir = test_dir_copy("tests/golden/llama-6x2-f32");
    struct rank r;
    struct dskv_error error = {0};
    must_open(&r, dir, 0, DSKV_N_DTYPES, 1, 2);
    dskv_weights_close(device, &r.weights);
    const float other = 0.25f;
    poke(dir, "lm_head.weight", &other, sizeof other); /* of the last id: the last rank finds it */
    CU_ASSERT_EQUAL(open_rank(&r, dir, 0, DSKV_N_DTYPES, 1, 2, &error), DSKV_EXIT_MODEL);
    CU_ASSERT(strstr(error.message, "lm_head.weight") && strstr(error.message, "model.embed_tokens.weight"));
    CU_ASSERT_EQUAL(open_rank(&r, dir, 0, DSKV_N_DTYPES, 0, 1, &error), DSKV_EXIT_MODEL);
    test_dir_edit(dir, "config.json", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    must_open(&r, dir, 0, DSKV_N_DTYPES, 0, 1);
    CU_ASSERT_PTR_NOT_EQUAL(r.weights->head, r.weights->embedding);
    dskv_weights_close(device, &r.weights);
    test_dir_remove(&dir);
}

int main(void)
{
    dskv_log_open(DSKV_LOG_WARNING, 0);
    struct dskv_device_options options = {.kind = "cpu", .n_threads = 1};
    struct dskv_error error;
    if (dskv_device_open(&options, &device, &error) != DSKV_EXIT_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    int failed = dskv_run_tests(
        "parallel.weights",
        (struct dskv_test[]){
            {"one rank holds the files", one_rank_holds_the_files},
            {"shards are parts of the whole", shards_are_parts_of_the_whole},
            {"dummies are the same at every number of ranks", dummies_are_the_same_at_every_number_of_ranks},
            {"ranks read their shard only", ranks_read_their_shard_only},
            {"values that do not fit are refused", values_that_do_not_fit_are_refused},
            {"a tied head must equal the embedding", a_tied_head_must_equal_the_embedding},
            {NULL, NULL},
        });
    dskv_device_close(&device);
    return failed;
}
