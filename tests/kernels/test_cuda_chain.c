/* Chains of operations: the next kernel begins while the one ahead still runs, so that one which does not wait for what
 * it reads or overwrites shows here.  And operations that fuse a pair, beside the pair. */
#include "kernels/test_cuda.h"

#include "base/limits.h"

enum { GAP = 8 };

static float *random_values(uint64_t *seed, enum dskv_dtype dtype, size_t n)
{
    float *values = test_random_floats(seed, n);
    for (size_t i = 0; i < n; i++)
        values[i] = test_rounded(dtype, values[i]);
    return values;
}

/* ---- pairs ------------------------------------------------------------------------------------------------------ */

static void residual_norm_case(enum dskv_dtype asked, int rows, int width, int gap, uint64_t seed)
{
    enum dskv_dtype dtype = test_activation(gpu, asked);
    size_t n = (size_t)(rows * width), bytes = (size_t)width * sizeof(float);
    float *x = random_values(&seed, dtype, n), *y = random_values(&seed, dtype, n);
    float *factors = test_random_floats(&seed, 3 * (size_t)width);
    float *weight = test_put_bytes(gpu, factors, bytes), *bias = test_put_bytes(gpu, factors + width, bytes),
          *y_bias = test_put_bytes(gpu, factors + 2 * width, bytes);
    for (int i = 0; i < 4; i++) {
        float *results[2][2];
        for (int fused = 0; fused < 2; fused++) {
            struct dskv_tensor sum = test_put(gpu, x, dtype, rows, width, gap),
                               add = test_put(gpu, y, dtype, rows, width, 2 * gap),
                               out = test_put(gpu, NULL, dtype, rows, width, gap);
            struct dskv_residual_norm p = {
                {sum, add, i / 2 ? y_bias : NULL},
                {i % 2 ? DSKV_RMS_NORM : DSKV_LAYER_NORM, 1e-5f, sum, weight, i % 2 ? NULL : bias, out}};
            if (fused) {
                dskv_op_residual_norm(gpu, &p);
            } else {
                dskv_op_residual(gpu, &p.residual);
                dskv_op_norm(gpu, &p.norm);
            }
            results[fused][0] = test_take(gpu, &sum);
            results[fused][1] = test_take(gpu, &out);
            free(test_take(gpu, &add));
        }
        for (int j = 0; j < 2; j++) {
            CU_ASSERT(test_same_bits(j ? "norm of a residual" : "residual", results[1][j], results[0][j], n));
            free(results[0][j]);
            free(results[1][j]);
        }
    }
    dskv_device_free(gpu, weight, bytes);
    dskv_device_free(gpu, bias, bytes);
    dskv_device_free(gpu, y_bias, bytes);
    free(factors);
    free(x);
    free(y);
}

static void residual_and_norm(void)
{
    static const int widths[] = {1, 20, 257, 576, 1600, 4096, 8200, 17000};
    for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
            for (int rows = 1; rows < 90; rows += 68) {
                residual_norm_case(dtype, rows, widths[w], GAP, w);
                residual_norm_case(dtype, rows, widths[w], 3, w);
            }
}

static void rope_kv_write_case(enum dskv_dtype asked, struct dskv_kv kv, struct dskv_rope rope, int rows, int gap)
{
    enum { N_POSITIONS = 40 };
    enum dskv_dtype dtype = test_activation(gpu, asked);
    uint64_t seed = (uint64_t)(rows + gap);
    int64_t kv_cols = (int64_t)kv.n_kv_heads_local * kv.head_dim, qk_cols = (int64_t)rope.n_heads * kv.head_dim;
    int64_t cols = qk_cols + kv_cols;
    kv.block_bytes = dskv_kv_block_bytes(&kv);
    size_t pool_bytes = kv.block_bytes * (size_t)kv.n_blocks, n = (size_t)(rows * cols);
    size_t n_angles = (size_t)(N_POSITIONS * rope.rotary_dim / 2);
    float *values = random_values(&seed, dtype, n), *angles = test_random_floats(&seed, 2 * n_angles);
    char *pool = dskv_calloc(pool_bytes, 1), *written[2];
    memset(pool, 0xff, pool_bytes);
    int32_t places[2][128];
    for (int i = 0; i < rows; i++) {
        places[0][i] = test_random_below(&seed, N_POSITIONS);
        places[1][i] = i % 5 == 3 ? -1 : i * 7 % (kv.n_blocks * kv.block_tokens); /* 7 shares no factor */
    }
    int32_t *device_places = test_put_bytes(gpu, places, sizeof places);
    float *device_angles = test_put_bytes(gpu, angles, 2 * n_angles * sizeof *angles), *rotated[2];
    for (int fused = 0; fused < 2; fused++) {
        struct dskv_tensor qkv = test_put(gpu, values, dtype, rows, cols, gap);
        kv.data = test_put_bytes(gpu, pool, pool_bytes);
        rope.positions = device_places;
        rope.cos = device_angles;
        rope.sin = device_angles + n_angles;
        rope.x = dskv_tensor_cols(qkv, 0, qk_cols);
        struct dskv_rope_kv_write p = {rope,
                                       {kv, 1, device_places + 128, dskv_tensor_cols(qkv, qk_cols - kv_cols, kv_cols),
                                        dskv_tensor_cols(qkv, qk_cols, kv_cols)}};
        if (fused) {
            dskv_op_rope_kv_write(gpu, &p);
        } else {
            dskv_op_rope(gpu, &p.rope);
            dskv_op_kv_write(gpu, &p.write);
        }
        rotated[fused] = test_take(gpu, &qkv);
        written[fused] = test_take_bytes(gpu, kv.data, pool_bytes);
    }
    CU_ASSERT(test_same_bits("rotated rows", rotated[1], rotated[0], n));
    CU_ASSERT(memcmp(written[1], written[0], pool_bytes) == 0);
    CU_ASSERT(memcmp(written[0], pool, pool_bytes) != 0);
    for (int fused = 0; fused < 2; fused++) {
        free(rotated[fused]);
        free(written[fused]);
    }
    dskv_device_free(gpu, device_places, sizeof places);
    dskv_device_free(gpu, device_angles, 2 * n_angles * sizeof *angles);
    free(pool);
    free(values);
    free(angles);
}

static void rope_and_kv_write(void)
{
    static const struct dskv_rope ropes[] = {
        {.style = DSKV_ROPE_HALVES, .rotary_dim = 128, .head_dim = 128, .n_heads = 10},
        {.style = DSKV_ROPE_HALVES, .rotary_dim = 32, .head_dim = 80, .n_heads = 4},
        {.style = DSKV_ROPE_HALVES, .rotary_dim = 24, .head_dim = 64, .n_heads = 3},
        {.style = DSKV_ROPE_PAIRS, .rotary_dim = 20, .head_dim = 20, .n_heads = 4},
        {.style = DSKV_ROPE_PAIRS, .rotary_dim = 64, .head_dim = 256, .n_heads = 5}};
    for (size_t i = 0; i < sizeof ropes / sizeof *ropes; i++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
            for (enum dskv_dtype kv_dtype = DSKV_F32; kv_dtype <= DSKV_BF16; kv_dtype++)
                for (int rows = 1; rows <= 70; rows += 23) {
                    struct dskv_kv kv = {.dtype = kv_dtype,
                                         .n_blocks = 8,
                                         .block_tokens = 16,
                                         .n_layers = 2,
                                         .n_kv_heads_local = 2,
                                         .head_dim = ropes[i].head_dim};
                    rope_kv_write_case(dtype, kv, ropes[i], rows, rows % 2 ? GAP : 3);
                }
}

/* ---- a chain ---------------------------------------------------------------------------------------------------- */

/* A transformer of few layers, all of them alike: what one leaves in the buffers is wrong for the next. */
enum {
    WIDTH = 512,
    HEAD_DIM = 128,
    N_HEADS = 8,
    N_KV = 2,
    MLP = 1024,
    VOCAB = 5000,
    N_LAYERS = 4,
    CONTEXT = 500,
    BLOCK_TOKENS = 64,
    MAX_ROWS = 80
};
enum { Q_COLS = N_HEADS * HEAD_DIM, KV_COLS = N_KV * HEAD_DIM, QKV_COLS = Q_COLS + 2 * KV_COLS };

enum way { ONE_BY_ONE, QUEUED, RECORDED };

struct chain {
    enum dskv_dtype dtype;
    int rows;
    enum way way;
    struct dskv_weight *qkv, *o, *up, *down, *head;
    float *norm_weight, *angles;
    int32_t *integers; /* positions, slots, the table, local KV heads, wanted rows, targets; ids follow */
    struct dskv_attention_work *work;
    struct dskv_kv kv;
    char *pool; /* host: as it is before the chain */
    size_t pool_bytes;
    struct dskv_tensor x0, x, h, wide, narrow, part, wanted, logits;
    struct dskv_row_stats *stats;
};
enum {
    POSITIONS = 0,
    SLOTS = 128,
    TABLE = 256,
    KV_HEADS = 384,
    WANTED = 512,
    TARGETS = 640,
    IDS = 768,
    N_INTEGERS = 896
};

static void chain_step(const struct chain *c)
{
    if (c->way == ONE_BY_ONE)
        dskv_device_sync(gpu, NULL);
}

static void multiply(const struct chain *c, struct dskv_tensor x, const struct dskv_weight *w, struct dskv_tensor y)
{
    dskv_op_matmul(gpu, &(struct dskv_matmul){x, w, NULL, y});
    chain_step(c);
}

/* The pair as two operations where all are one by one, else as one. */
static void add_and_norm(const struct chain *c, struct dskv_tensor y)
{
    struct dskv_residual_norm p = {{c->x, y, NULL}, {DSKV_RMS_NORM, 1e-5f, c->x, c->norm_weight, NULL, c->h}};
    if (c->way == ONE_BY_ONE) {
        dskv_op_residual(gpu, &p.residual);
        chain_step(c);
        dskv_op_norm(gpu, &p.norm);
    } else {
        dskv_op_residual_norm(gpu, &p);
    }
    chain_step(c);
}

static void attend(const struct chain *c, int layer)
{
    struct dskv_tensor qk = dskv_tensor_cols(c->wide, 0, Q_COLS + KV_COLS);
    struct dskv_rope_kv_write p = {{DSKV_ROPE_HALVES, c->integers + POSITIONS, c->angles,
                                    c->angles + (CONTEXT + MAX_ROWS) * HEAD_DIM / 2, HEAD_DIM, HEAD_DIM, N_HEADS + N_KV,
                                    qk},
                                   {c->kv, layer, c->integers + SLOTS, dskv_tensor_cols(c->wide, Q_COLS, KV_COLS),
                                    dskv_tensor_cols(c->wide, Q_COLS + KV_COLS, KV_COLS)}};
    if (c->way == ONE_BY_ONE) {
        dskv_op_rope(gpu, &p.rope);
        chain_step(c);
        dskv_op_kv_write(gpu, &p.write);
    } else {
        dskv_op_rope_kv_write(gpu, &p);
    }
    chain_step(c);
    dskv_op_attention(gpu, &(struct dskv_attention){.kv = c->kv,
                                                    .layer = layer,
                                                    .scale = 0.09f,
                                                    .n_heads_local = N_HEADS,
                                                    .kv_head_of_head = c->integers + KV_HEADS,
                                                    .work = c->work,
                                                    .n_work = 1,
                                                    .max_keys = CONTEXT + c->rows,
                                                    .tables = c->integers + TABLE,
                                                    .q = dskv_tensor_cols(c->wide, 0, Q_COLS),
                                                    .out = dskv_tensor_cols(c->narrow, 0, Q_COLS)});
    chain_step(c);
}

static void chain_queue(const struct chain *c)
{
    const void *const whole[] = {c->x0.data};
    struct dskv_tensor qkv = dskv_tensor_cols(c->wide, 0, QKV_COLS);
    dskv_op_sum(gpu, &(struct dskv_sum){whole, 1, c->x});
    chain_step(c);
    dskv_op_norm(gpu, &(struct dskv_norm){DSKV_RMS_NORM, 1e-5f, c->x, c->norm_weight, NULL, c->h});
    chain_step(c);
    for (int layer = 0; layer < N_LAYERS; layer++) {
        multiply(c, c->h, c->qkv, qkv);
        attend(c, layer);
        multiply(c, dskv_tensor_cols(c->narrow, 0, Q_COLS), c->o, c->part);
        add_and_norm(c, c->part);
        multiply(c, c->h, c->up, c->wide);
        dskv_op_activate(gpu, &(struct dskv_activate){DSKV_SILU, 1, c->wide, c->narrow});
        chain_step(c);
        multiply(c, c->narrow, c->down, c->part);
        add_and_norm(c, c->part);
    }
    dskv_op_gather_rows(gpu, &(struct dskv_gather_rows){c->h, c->integers + WANTED, c->wanted});
    chain_step(c);
    multiply(c, c->wanted, c->head, c->logits);
    dskv_op_select(gpu, &(struct dskv_select){c->logits, 0, VOCAB, c->integers + TARGETS, 0, c->stats, NULL, NULL});
    chain_step(c);
    const struct dskv_row_stats *const stats[] = {c->stats};
    dskv_op_choose(gpu, &(struct dskv_choose){stats, 1, c->rows, c->integers + IDS});
    chain_step(c);
}

/* Poison everywhere that the chain writes to; the pool as it was. */
static void chain_clear(struct chain *c)
{
    struct dskv_tensor *written[] = {&c->x, &c->h, &c->wide, &c->narrow, &c->part, &c->wanted, &c->logits};
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
        size_t bytes = (size_t)(written[i]->rows * written[i]->stride) * dskv_dtype_bytes(written[i]->dtype);
        char *poison = dskv_calloc(bytes, 1);
        memset(poison, 0xff, bytes);
        dskv_device_upload(gpu, written[i]->data, poison, bytes);
        free(poison);
    }
    dskv_device_upload(gpu, c->kv.data, c->pool, c->pool_bytes);
}

struct chain_result {
    float *logits, *pool;
    int32_t *ids;
};

static void result_free(struct chain_result *r)
{
    free(r->logits);
    free(r->pool);
    free(r->ids);
}

static struct chain_result chain_run(struct chain *c, enum way way)
{
    struct dskv_recording *recording = NULL;
    struct dskv_error error;
    chain_clear(c);
    c->way = way;
    if (way == RECORDED && dskv_device_record_begin(gpu)) {
        chain_queue(c);
        recording = dskv_device_record_end(gpu);
        CU_ASSERT_PTR_NOT_NULL_FATAL(recording);
        for (int i = 0; i < 3; i++)
            dskv_device_replay(gpu, recording);
    } else {
        chain_queue(c);
    }
    CU_ASSERT(dskv_device_sync(gpu, &error) == DSKV_OK);
    if (recording)
        dskv_recording_close(gpu, &recording);
    size_t n = (size_t)c->rows * VOCAB, id_bytes = (size_t)c->rows * sizeof(int32_t);
    struct chain_result r = {dskv_calloc(n, sizeof(float)), dskv_calloc(c->pool_bytes, 1), dskv_calloc(id_bytes, 1)};
    dskv_device_download(gpu, r.logits, c->logits.data, n * sizeof(float));
    dskv_device_download(gpu, r.pool, c->kv.data, c->pool_bytes);
    dskv_device_download(gpu, r.ids, c->integers + IDS, id_bytes);
    return r;
}

static struct dskv_weight *weight_of(uint64_t *seed, enum dskv_dtype dtype, int64_t n, int64_t k)
{
    float *rows = test_random_floats(seed, (size_t)(n * k));
    for (int64_t i = 0; i < n * k; i++)
        rows[i] *= 0x1p-4f;
    struct dskv_weight *weight = test_weight(gpu, n, k, dtype, rows);
    free(rows);
    return weight;
}

static struct dskv_tensor poison_of(enum dskv_dtype dtype, int64_t rows, int64_t cols)
{
    return test_put(gpu, NULL, dtype, rows, cols, 0);
}

static void chain_place(struct chain *c, uint64_t *seed)
{
    enum { N_ANGLES = (CONTEXT + MAX_ROWS) * HEAD_DIM };
    enum dskv_dtype dtype = test_activation(gpu, c->dtype);
    float *values = random_values(seed, dtype, (size_t)c->rows * WIDTH),
          *angles = dskv_calloc(N_ANGLES, sizeof *angles), *factors = test_random_floats(seed, WIDTH);
    for (int i = 0; i < N_ANGLES; i++)
        angles[i] = test_random_unit(seed);
    c->x0 = test_put(gpu, values, dtype, c->rows, WIDTH, 0);
    c->x = poison_of(dtype, c->rows, WIDTH);
    c->h = poison_of(dtype, c->rows, WIDTH);
    c->part = poison_of(dtype, c->rows, WIDTH);
    c->wanted = poison_of(dtype, c->rows, WIDTH);
    c->wide = poison_of(dtype, c->rows, 2 * MLP);
    c->narrow = poison_of(dtype, c->rows, MLP);
    c->logits = poison_of(DSKV_F32, c->rows, VOCAB);
    c->angles = test_put_bytes(gpu, angles, N_ANGLES * sizeof *angles);
    c->norm_weight = test_put_bytes(gpu, factors, WIDTH * sizeof *factors);
    c->stats = dskv_device_alloc(gpu, (size_t)c->rows * sizeof *c->stats);
    free(values);
    free(angles);
    free(factors);
}

static struct chain chain_open(enum dskv_dtype dtype, int rows)
{
    struct chain c = {.dtype = dtype, .rows = rows};
    uint64_t seed = (uint64_t)rows;
    c.qkv = weight_of(&seed, dtype, QKV_COLS, WIDTH);
    c.o = weight_of(&seed, dtype, WIDTH, Q_COLS);
    c.up = weight_of(&seed, dtype, 2 * MLP, WIDTH);
    c.down = weight_of(&seed, dtype, WIDTH, MLP);
    c.head = weight_of(&seed, dtype, VOCAB, WIDTH);
    chain_place(&c, &seed);
    c.kv = (struct dskv_kv){.dtype = dtype,
                            .n_blocks = (CONTEXT + MAX_ROWS) / BLOCK_TOKENS + 1,
                            .block_tokens = BLOCK_TOKENS,
                            .n_layers = N_LAYERS,
                            .n_kv_heads_local = N_KV,
                            .head_dim = HEAD_DIM};
    c.kv.block_bytes = dskv_kv_block_bytes(&c.kv);
    c.pool_bytes = c.kv.block_bytes * (size_t)c.kv.n_blocks;
    size_t n = c.pool_bytes / dskv_dtype_bytes(dtype);
    float *keys = test_random_floats(&seed, n);
    c.pool = dskv_calloc(c.pool_bytes, 1);
    dskv_convert(c.pool, dtype, keys, DSKV_F32, n);
    free(keys);
    c.kv.data = test_put_bytes(gpu, c.pool, c.pool_bytes);
    int32_t integers[N_INTEGERS] = {0};
    for (int i = 0; i < rows; i++) {
        integers[POSITIONS + i] = integers[SLOTS + i] = CONTEXT + i; /* block i is the table's i-th */
        integers[WANTED + i] = rows - 1 - i;
        integers[TARGETS + i] = -1;
    }
    for (int i = 0; i < c.kv.n_blocks; i++)
        integers[TABLE + i] = i;
    for (int i = 0; i < N_HEADS; i++)
        integers[KV_HEADS + i] = i / (N_HEADS / N_KV);
    c.integers = test_put_bytes(gpu, integers, sizeof integers);
    struct dskv_attention_work work = {.n_tokens = rows, .start = CONTEXT, .n_blocks = c.kv.n_blocks};
    c.work = test_put_bytes(gpu, &work, sizeof work);
    return c;
}

static void chain_close(struct chain *c)
{
    struct dskv_weight **weights[] = {&c->qkv, &c->o, &c->up, &c->down, &c->head};
    struct dskv_tensor *tensors[] = {&c->x0, &c->x, &c->h, &c->wide, &c->narrow, &c->part, &c->wanted, &c->logits};
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        dskv_weight_close(gpu, weights[i]);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        free(test_take(gpu, tensors[i]));
    dskv_device_free(gpu, c->angles, (CONTEXT + MAX_ROWS) * HEAD_DIM * sizeof *c->angles);
    dskv_device_free(gpu, c->norm_weight, WIDTH * sizeof *c->norm_weight);
    dskv_device_free(gpu, c->stats, (size_t)c->rows * sizeof *c->stats);
    dskv_device_free(gpu, c->integers, N_INTEGERS * sizeof *c->integers);
    dskv_device_free(gpu, c->work, sizeof *c->work);
    dskv_device_free(gpu, c->kv.data, c->pool_bytes);
    free(c->pool);
}

static void chains_equal_single_steps(void)
{
    static const int row_counts[] = {1, 7, 16, 30, MAX_ROWS};
    for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
        for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
            if (test_leaves_out())
                continue;
            struct chain c = chain_open(test_activation(gpu, dtype), row_counts[i]);
            struct chain_result expected = chain_run(&c, ONE_BY_ONE);
            CU_ASSERT(isfinite(expected.logits[0]) && isfinite(expected.logits[VOCAB - 1]));
            for (int round = 0; round < 6; round++) {
                struct chain_result got = chain_run(&c, round % 2 ? RECORDED : QUEUED);
                CU_ASSERT(test_same_bits("logits", got.logits, expected.logits, (size_t)c.rows * VOCAB));
                CU_ASSERT(memcmp(got.pool, expected.pool, c.pool_bytes) == 0);
                CU_ASSERT(memcmp(got.ids, expected.ids, (size_t)c.rows * sizeof *got.ids) == 0);
                result_free(&got);
            }
            result_free(&expected);
            chain_close(&c);
        }
}

const struct dskv_test test_cuda_chain[] = {
    {"chain: residual and norm", residual_and_norm},
    {"chain: rotary and the store of keys", rope_and_kv_write},
    {"chain: equals single steps", chains_equal_single_steps},
    {NULL, NULL},
};
