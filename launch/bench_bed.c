#include "bench_bed.h"

#include "base/memory.h"

#include <math.h>
#include <stdlib.h>

enum { KV_LAYERS = 2, BLOCK_TOKENS = 64 };

static void *carve(const struct dskv_bench_bed *bed, size_t *at, size_t n, size_t element_bytes)
{
    void *place = bed->memory ? bed->memory + *at : NULL;
    *at += (n * element_bytes + 255) / 256 * 256;
    return place;
}

struct dskv_kv dskv_bench_bed_pool(const struct dskv_bench_bed *bed)
{
    struct dskv_kv kv = {.data = bed->kv,
                         .dtype = bed->kv_dtype,
                         .n_blocks = bed->batch * bed->blocks_each,
                         .block_tokens = BLOCK_TOKENS,
                         .n_layers = KV_LAYERS,
                         .n_kv_heads_local = bed->model->n_kv_heads,
                         .head_dim = bed->model->head_dim};
    kv.block_bytes = dskv_kv_block_bytes(&kv);
    return kv;
}

static size_t count_angles(const struct dskv_bench_bed *bed)
{
    return (size_t)(bed->context + bed->most_rows) * (size_t)bed->model->rotary_dim / 2;
}

static size_t place_buffers(struct dskv_bench_bed *bed)
{
    const struct dskv_model *m = bed->model;
    size_t rows = (size_t)bed->most_rows, element = dskv_dtype_bytes(bed->activation), at = 0;
    size_t width = (size_t)m->width, vocab = (size_t)m->vocab, n_blocks = (size_t)(bed->batch * bed->blocks_each);
    size_t qkv = (size_t)(bed->q_cols + 2 * bed->kv_cols), up = (size_t)bed->up_cols, mlp = (size_t)m->mlp;
    size_t heads = (size_t)bed->q_cols, n_works = (size_t)bed->batch;
    bed->x = carve(bed, &at, rows * width, element);
    bed->y = carve(bed, &at, rows * width, element);
    bed->h = carve(bed, &at, rows * width, element);
    bed->wide = carve(bed, &at, rows * (qkv > up ? qkv : up), element);
    bed->narrow = carve(bed, &at, rows * (heads > mlp ? heads : mlp), element);
    bed->kv = carve(bed, &at, n_blocks, dskv_bench_bed_pool(bed).block_bytes);
    bed->logits = carve(bed, &at, DSKV_BENCH_LOGIT_ROWS * vocab, sizeof(float));
    bed->norm_weight = carve(bed, &at, width, sizeof(float));
    bed->rope_cos = carve(bed, &at, count_angles(bed), sizeof(float));
    bed->rope_sin = carve(bed, &at, count_angles(bed), sizeof(float));
    bed->positions = carve(bed, &at, rows, sizeof(int32_t));
    bed->slots = carve(bed, &at, rows, sizeof(int32_t));
    bed->tables = carve(bed, &at, n_blocks, sizeof(int32_t));
    bed->kv_head_of_head = carve(bed, &at, (size_t)m->n_heads, sizeof(int32_t));
    bed->targets = carve(bed, &at, DSKV_BENCH_LOGIT_ROWS, sizeof(int32_t));
    bed->ids = carve(bed, &at, DSKV_BENCH_LOGIT_ROWS, sizeof(int32_t));
    bed->one = carve(bed, &at, n_works, sizeof *bed->one);
    bed->many = carve(bed, &at, n_works, sizeof *bed->many);
    bed->plain = carve(bed, &at, DSKV_BENCH_LOGIT_ROWS, sizeof *bed->plain);
    bed->filtered = carve(bed, &at, DSKV_BENCH_LOGIT_ROWS, sizeof *bed->filtered);
    bed->stats = carve(bed, &at, DSKV_BENCH_LOGIT_ROWS, sizeof *bed->stats);
    bed->scratch = carve(bed, &at, dskv_sample_scratch_bytes(m->vocab), 1);
    return at;
}

/* Random values between -most and most; zeros would be computed faster on some devices. */
static void fill(const struct dskv_bench_bed *bed, void *data, enum dskv_dtype dtype, size_t n, float most)
{
    static const float unit = 0x1p4f; /* of dskv_bench_fill_random */
    size_t element = dskv_dtype_bytes(dtype);
    float *values = dskv_calloc(DSKV_BENCH_PATTERN_ELEMENTS, sizeof *values);
    char *pattern = dskv_calloc(DSKV_BENCH_PATTERN_ELEMENTS, element);
    uint32_t state = 3;
    dskv_bench_fill_random(&state, values, DSKV_BENCH_PATTERN_ELEMENTS);
    for (size_t i = 0; i < DSKV_BENCH_PATTERN_ELEMENTS; i++)
        values[i] *= unit * most;
    dskv_convert(pattern, dtype, values, DSKV_F32, DSKV_BENCH_PATTERN_ELEMENTS);
    for (size_t i = 0; i < n; i += DSKV_BENCH_PATTERN_ELEMENTS)
        dskv_device_upload(bed->device, (char *)data + i * element, pattern,
                           (n - i < DSKV_BENCH_PATTERN_ELEMENTS ? n - i : DSKV_BENCH_PATTERN_ELEMENTS) * element);
    free(values);
    free(pattern);
}

/* Rotations, and not just any numbers: what is rotated in place again and again must neither grow nor vanish. */
static void fill_angles(const struct dskv_bench_bed *bed)
{
    size_t n = count_angles(bed), bytes = n * sizeof(float);
    float *cosines = dskv_calloc(n + 1, sizeof *cosines), *sines = dskv_calloc(n + 1, sizeof *sines);
    for (size_t i = 0; i < n; i++) {
        cosines[i] = cosf((float)(i % 6283) * 0.001f);
        sines[i] = sinf((float)(i % 6283) * 0.001f);
    }
    dskv_device_upload(bed->device, bed->rope_cos, cosines, bytes);
    dskv_device_upload(bed->device, bed->rope_sin, sines, bytes);
    free(cosines);
    free(sines);
}

static void fill_ids(const struct dskv_bench_bed *bed)
{
    int32_t n_blocks = bed->batch * bed->blocks_each, n_heads = bed->model->n_heads;
    int32_t *tables = dskv_calloc((size_t)n_blocks, sizeof *tables);
    int32_t *map = dskv_calloc((size_t)n_heads, sizeof *map), targets[DSKV_BENCH_LOGIT_ROWS];
    struct dskv_sampling plain[DSKV_BENCH_LOGIT_ROWS], filtered[DSKV_BENCH_LOGIT_ROWS];
    for (int32_t i = 0; i < n_blocks; i++)
        tables[i] = i;
    for (int32_t h = 0; h < n_heads; h++)
        map[h] = h / (n_heads / bed->model->n_kv_heads);
    for (int32_t r = 0; r < DSKV_BENCH_LOGIT_ROWS; r++) {
        targets[r] = -1;
        plain[r] = (struct dskv_sampling){.temperature = 1, .top_p = 1, .seed = 1, .position = r};
        filtered[r] = plain[r];
        filtered[r].top_k = 50;
        filtered[r].top_p = 0.9f;
    }
    dskv_device_upload(bed->device, bed->tables, tables, (size_t)n_blocks * sizeof *tables);
    dskv_device_upload(bed->device, bed->kv_head_of_head, map, (size_t)n_heads * sizeof *map);
    dskv_device_upload(bed->device, bed->targets, targets, sizeof targets);
    dskv_device_upload(bed->device, bed->plain, plain, sizeof plain);
    dskv_device_upload(bed->device, bed->filtered, filtered, sizeof filtered);
    free(tables);
    free(map);
}

enum dskv_exit dskv_bench_bed_open(struct dskv_bench_bed *bed, struct dskv_error *error)
{
    const struct dskv_model *m = bed->model;
    bed->blocks_each = (bed->context + bed->most_rows + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    bed->memory_bytes = place_buffers(bed);
    bed->memory = dskv_device_alloc(bed->device, bed->memory_bytes);
    if (!bed->memory)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes of activations and keys",
                              bed->memory_bytes);
    place_buffers(bed);
    size_t rows = (size_t)bed->most_rows, width = (size_t)m->width;
    struct dskv_kv kv = dskv_bench_bed_pool(bed);
    fill(bed, bed->x, bed->activation, (size_t)(bed->wide - bed->x) / dskv_dtype_bytes(bed->activation), 1);
    fill(bed, bed->wide, bed->activation, rows * (size_t)bed->up_cols, 1);
    fill(bed, bed->narrow, bed->activation, rows * (size_t)m->mlp, 1);
    fill(bed, bed->kv, bed->kv_dtype, (size_t)kv.n_blocks * kv.block_bytes / dskv_dtype_bytes(bed->kv_dtype), 1);
    fill(bed, bed->logits, DSKV_F32, (size_t)DSKV_BENCH_LOGIT_ROWS * (size_t)m->vocab, 8);
    fill(bed, bed->norm_weight, DSKV_F32, width, 1);
    fill_angles(bed);
    fill_ids(bed);
    return DSKV_EXIT_OK;
}

void dskv_bench_bed_set_rows(const struct dskv_bench_bed *bed, int32_t rows)
{
    int32_t *positions = dskv_calloc((size_t)rows, sizeof *positions),
            *slots = dskv_calloc((size_t)rows, sizeof *slots);
    struct dskv_attention_work *one = dskv_calloc((size_t)bed->batch, sizeof *one);
    struct dskv_attention_work *many = dskv_calloc((size_t)bed->batch, sizeof *many);
    for (int32_t r = 0; r < rows; r++)
        positions[r] = slots[r] = bed->context + r;
    for (int32_t i = 0; i < bed->batch; i++) {
        one[i] = (struct dskv_attention_work){
            .n_tokens = rows, .start = bed->context, .first_block = i * bed->blocks_each, .n_blocks = bed->blocks_each};
        many[i] = one[i];
        many[i].first = i % rows;
        many[i].n_tokens = 1;
    }
    dskv_device_upload(bed->device, bed->positions, positions, (size_t)rows * sizeof *positions);
    dskv_device_upload(bed->device, bed->slots, slots, (size_t)rows * sizeof *slots);
    dskv_device_upload(bed->device, bed->one, one, (size_t)bed->batch * sizeof *one);
    dskv_device_upload(bed->device, bed->many, many, (size_t)bed->batch * sizeof *many);
    free(positions);
    free(slots);
    free(one);
    free(many);
}

void dskv_bench_bed_close(struct dskv_bench_bed *bed)
{
    dskv_device_free(bed->device, bed->memory, bed->memory_bytes);
}
