/* Operations on rows, and on the pool's bytes, on both devices. */
#include "kernels/test_cuda.h"

#include "base/limits.h"

enum { GAP = 3 };

static const enum dskv_dtype dtypes[] = {DSKV_F32, DSKV_F16, DSKV_BF16};
static const int row_counts[] = {1, 3, 70}, widths[] = {1, 20, 64, 257, 576, 4096};
enum { N_DTYPES = 3, N_ROW_COUNTS = 3, N_WIDTHS = 6 };

/* Random values that dtype can hold, so that both devices start from the same ones. */
static float *random_values(uint64_t *seed, enum dskv_dtype dtype, size_t n)
{
    float *values = test_random_floats(seed, n);
    for (size_t i = 0; i < n; i++)
        values[i] = test_rounded(dtype, values[i]);
    return values;
}

/* Calls run(dtype, rows, width, seed) for every combination. */
static void for_all(void (*run)(enum dskv_dtype dtype, int rows, int width, uint64_t seed))
{
    for (int t = 0; t < N_DTYPES; t++)
        for (int r = 0; r < N_ROW_COUNTS; r++)
            for (int w = 0; w < N_WIDTHS; w++)
                run(dtypes[t], row_counts[r], widths[w], (uint64_t)(t * 100 + r * 10 + w));
}

static int32_t *device_ids(struct dskv_device *device, const int32_t *ids, int n)
{
    return test_put_bytes(device, ids, (size_t)n * sizeof *ids);
}

/* ---- embedding -------------------------------------------------------------------------------------------------- */

struct embed_case {
    enum dskv_dtype dtype;
    int rows, width, has_positions;
    const float *table, *positions;
    const int32_t *ids, *places;
};
enum { VOCAB_LOCAL = 37, FIRST_ID = 11, N_PLACES = 9 };

static float *embed_on(struct dskv_device *device, const struct embed_case *c)
{
    enum dskv_dtype dtype = test_activation(device, c->dtype);
    struct dskv_weight *table = test_weight(device, VOCAB_LOCAL, c->width, c->dtype, c->table);
    struct dskv_tensor positions = test_put(device, c->positions, DSKV_F32, N_PLACES, c->width, 0);
    int32_t *ids = device_ids(device, c->ids, c->rows), *places = device_ids(device, c->places, c->rows);
    struct dskv_tensor out = test_put(device, NULL, dtype, c->rows, c->width, GAP);
    struct dskv_embed p = {.ids = ids, .positions = places, .table = table, .first = FIRST_ID, .out = out};
    if (c->has_positions)
        p.position_table = positions;
    dskv_op_embed(device, &p);
    float *values = test_take(device, &out);
    free(test_take(device, &positions));
    dskv_device_free(device, ids, (size_t)c->rows * sizeof *ids);
    dskv_device_free(device, places, (size_t)c->rows * sizeof *places);
    dskv_weight_close(device, &table);
    return values;
}

static void embed_case(enum dskv_dtype dtype, int rows, int width, uint64_t seed)
{
    float *table = random_values(&seed, dtype, (size_t)(VOCAB_LOCAL * width));
    float *positions = test_random_floats(&seed, (size_t)(N_PLACES * width));
    int32_t ids[128], places[128];
    for (int i = 0; i < rows; i++) {
        ids[i] = test_random_below(&seed, FIRST_ID + VOCAB_LOCAL + 10); /* some belong to other shards */
        places[i] = test_random_below(&seed, N_PLACES);
    }
    for (int has_positions = 0; has_positions < 2; has_positions++) {
        struct embed_case c = {dtype, rows, width, has_positions, table, positions, ids, places};
        float *got = embed_on(gpu, &c), *expected = embed_on(cpu, &c);
        CU_ASSERT(test_near("embed", got, expected, (size_t)(rows * width), dtype, 1, 0));
        free(got);
        free(expected);
    }
    free(table);
    free(positions);
}

static void embedding(void)
{
    for_all(embed_case);
}

/* ---- norms ------------------------------------------------------------------------------------------------------ */

static float *norm_on(struct dskv_device *device, enum dskv_dtype dtype, int rows, int width, enum dskv_norm_kind kind,
                      const float *x, const float *weight, const float *bias, int in_place)
{
    enum dskv_dtype activation = test_activation(device, dtype);
    size_t bytes = (size_t)width * sizeof(float);
    float *w = test_put_bytes(device, weight, bytes), *b = bias ? test_put_bytes(device, bias, bytes) : NULL;
    struct dskv_tensor in = test_put(device, x, activation, rows, width, GAP);
    struct dskv_tensor out = in_place ? in : test_put(device, NULL, activation, rows, width, 2 * GAP);
    dskv_op_norm(device, &(struct dskv_norm){kind, 1e-5f, in, w, b, out});
    float *values = test_take(device, &out);
    if (!in_place)
        free(test_take(device, &in));
    dskv_device_free(device, w, bytes);
    dskv_device_free(device, b, bytes);
    return values;
}

static void norm_case(enum dskv_dtype dtype, int rows, int width, uint64_t seed)
{
    size_t n = (size_t)(rows * width);
    float *x = random_values(&seed, dtype, n), *weight = test_random_floats(&seed, (size_t)width),
          *bias = test_random_floats(&seed, (size_t)width);
    for (int i = 0; i < 4; i++) {
        enum dskv_norm_kind kind = i % 2 ? DSKV_RMS_NORM : DSKV_LAYER_NORM;
        const float *b = i / 2 ? bias : NULL;
        float *got = norm_on(gpu, dtype, rows, width, kind, x, weight, b, i == 3);
        float *expected = norm_on(cpu, dtype, rows, width, kind, x, weight, b, i == 3);
        CU_ASSERT(test_near("norm", got, expected, n, dtype, 1, 4e-5f)); /* normalised values reach 8 * 8 */
        float *alone = norm_on(gpu, dtype, 1, width, kind, x + n - (size_t)width, weight, b, 0);
        CU_ASSERT(test_same_bits("the last row alone", got + n - (size_t)width, alone, (size_t)width));
        free(got);
        free(expected);
        free(alone);
    }
    free(x);
    free(weight);
    free(bias);
}

static void norms(void)
{
    for_all(norm_case);
}

/* ---- rotary ----------------------------------------------------------------------------------------------------- */

enum { MAX_POSITIONS = 50 };

static float *rope_on(struct dskv_device *device, enum dskv_dtype dtype, const struct dskv_rope *shape, int rows,
                      const float *x, const float *cosines, const float *sines, const int32_t *positions)
{
    size_t table_bytes = (size_t)(MAX_POSITIONS * shape->rotary_dim / 2) * sizeof(float);
    float *c = test_put_bytes(device, cosines, table_bytes), *s = test_put_bytes(device, sines, table_bytes);
    int32_t *places = device_ids(device, positions, rows);
    struct dskv_tensor in =
        test_put(device, x, test_activation(device, dtype), rows, shape->n_heads * shape->head_dim, GAP);
    struct dskv_rope p = *shape;
    p.positions = places;
    p.cos = c;
    p.sin = s;
    p.x = in;
    dskv_op_rope(device, &p);
    dskv_device_sync(device, NULL);
    dskv_device_free(device, c, table_bytes);
    dskv_device_free(device, s, table_bytes);
    dskv_device_free(device, places, (size_t)rows * sizeof *places);
    return test_take(device, &in);
}

static void rotary(void)
{
    static const struct dskv_rope shapes[] = {
        {.style = DSKV_ROPE_HALVES, .rotary_dim = 64, .head_dim = 64, .n_heads = 5},
        {.style = DSKV_ROPE_PAIRS, .rotary_dim = 20, .head_dim = 20, .n_heads = 3},
        {.style = DSKV_ROPE_HALVES, .rotary_dim = 16, .head_dim = 80, .n_heads = 2},
        {.style = DSKV_ROPE_PAIRS, .rotary_dim = 64, .head_dim = 256, .n_heads = 1},
        {.style = DSKV_ROPE_HALVES, .rotary_dim = 128, .head_dim = 128, .n_heads = 40}};
    for (int t = 0; t < N_DTYPES; t++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            for (int r = 0; r < N_ROW_COUNTS; r++) {
                uint64_t seed = i * 10 + (uint64_t)r;
                int rows = row_counts[r];
                size_t n = (size_t)(rows * shapes[i].n_heads * shapes[i].head_dim);
                size_t n_table = (size_t)(MAX_POSITIONS * shapes[i].rotary_dim / 2);
                float *x = random_values(&seed, dtypes[t], n), *cosines = dskv_calloc(n_table, sizeof(float)),
                      *sines = dskv_calloc(n_table, sizeof(float));
                int32_t positions[128];
                for (size_t j = 0; j < n_table; j++) {
                    cosines[j] = test_random_unit(&seed);
                    sines[j] = test_random_unit(&seed);
                }
                for (int j = 0; j < rows; j++)
                    positions[j] = test_random_below(&seed, MAX_POSITIONS);
                float *got = rope_on(gpu, dtypes[t], &shapes[i], rows, x, cosines, sines, positions);
                float *expected = rope_on(cpu, dtypes[t], &shapes[i], rows, x, cosines, sines, positions);
                CU_ASSERT(test_near("rope", got, expected, n, dtypes[t], 0.75f, 1e-7f));
                if (dtypes[t] == DSKV_F32)
                    CU_ASSERT(test_same_bits("rope", got, expected, n)); /* unfused on both */
                free(x);
                free(cosines);
                free(sines);
                free(got);
                free(expected);
            }
}

/* ---- activations, residual, sums, gathered rows ----------------------------------------------------------------- */

static float *activate_on(struct dskv_device *device, enum dskv_dtype dtype, int rows, int width,
                          enum dskv_activation kind, int gated, const float *x)
{
    enum dskv_dtype activation = test_activation(device, dtype);
    struct dskv_tensor in = test_put(device, x, activation, rows, gated ? 2 * width : width, GAP);
    struct dskv_tensor out = gated ? test_put(device, NULL, activation, rows, width, GAP) : in;
    dskv_op_activate(device, &(struct dskv_activate){kind, gated, in, out});
    float *values = test_take(device, &out);
    if (gated)
        free(test_take(device, &in));
    return values;
}

static void activate_case(enum dskv_dtype dtype, int rows, int width, uint64_t seed)
{
    float *x = random_values(&seed, dtype, (size_t)(rows * 2 * width));
    for (int kind = 0; kind < DSKV_N_ACTIVATIONS; kind++)
        for (int gated = 0; gated < 2; gated++) {
            float *got = activate_on(gpu, dtype, rows, width, (enum dskv_activation)kind, gated, x);
            float *expected = activate_on(cpu, dtype, rows, width, (enum dskv_activation)kind, gated, x);
            /* gelu's tail is a difference of nearly equal numbers: an error of 1 + tanh or 1 + erf shows there */
            CU_ASSERT(test_near("activate", got, expected, (size_t)(rows * width), dtype, dtype == DSKV_F32 ? 8 : 1.1f,
                                8e-6f));
            free(got);
            free(expected);
        }
    free(x);
}

static void activations(void)
{
    for_all(activate_case);
}

static float *residual_on(struct dskv_device *device, enum dskv_dtype dtype, int rows, int width, const float *x,
                          const float *y, const float *bias)
{
    enum dskv_dtype activation = test_activation(device, dtype);
    size_t bytes = (size_t)width * sizeof(float);
    float *b = bias ? test_put_bytes(device, bias, bytes) : NULL;
    struct dskv_tensor sum = test_put(device, x, activation, rows, width, GAP),
                       add = test_put(device, y, activation, rows, width, 2 * GAP);
    dskv_op_residual(device, &(struct dskv_residual){sum, add, b});
    float *values = test_take(device, &sum);
    free(test_take(device, &add));
    dskv_device_free(device, b, bytes);
    return values;
}

static void residual_case(enum dskv_dtype dtype, int rows, int width, uint64_t seed)
{
    size_t n = (size_t)(rows * width);
    float *x = random_values(&seed, dtype, n), *y = random_values(&seed, dtype, n),
          *bias = test_random_floats(&seed, (size_t)width), *expected = dskv_calloc(n, sizeof *expected);
    for (int has_bias = 0; has_bias < 2; has_bias++) {
        for (size_t i = 0; i < n; i++) {
            float add = has_bias ? test_rounded(dtype, y[i] + bias[i % (size_t)width]) : y[i];
            expected[i] = test_rounded(dtype, x[i] + add);
        }
        float *got = residual_on(gpu, dtype, rows, width, x, y, has_bias ? bias : NULL);
        if (test_activation(gpu, dtype) == dtype) /* its rounding points are part of the contract */
            CU_ASSERT(test_same_bits("residual", got, expected, n));
        free(got);
    }
    free(x);
    free(y);
    free(bias);
    free(expected);
}

static void residuals(void)
{
    for_all(residual_case);
}

static void sum_case(enum dskv_dtype dtype, int rows, int width, uint64_t seed)
{
    enum { MAX_PARTIALS = 5 };
    enum dskv_dtype activation = test_activation(gpu, dtype);
    size_t n = (size_t)(rows * width);
    float *expected = dskv_calloc(n, sizeof *expected);
    struct dskv_tensor parts[MAX_PARTIALS];
    const void *data[MAX_PARTIALS];
    for (int i = 0; i < MAX_PARTIALS; i++) {
        float *part = random_values(&seed, dtype, n);
        for (size_t j = 0; j < n; j++)
            expected[j] = i ? expected[j] + part[j] : part[j];
        parts[i] = test_put(gpu, part, activation, rows, width, 0);
        data[i] = parts[i].data;
        free(part);
    }
    dskv_op_sum(gpu, &(struct dskv_sum){data, MAX_PARTIALS, parts[0]});
    float *got = test_take(gpu, &parts[0]);
    for (size_t j = 0; j < n; j++)
        expected[j] = test_rounded(activation, expected[j]);
    CU_ASSERT(test_same_bits("sum", got, expected, n));
    for (int i = 1; i < MAX_PARTIALS; i++)
        free(test_take(gpu, &parts[i]));
    free(got);
    free(expected);
}

static void sums_in_rank_order(void)
{
    for_all(sum_case);
}

static void gathered_rows(void)
{
    enum { ROWS = 70, WIDTH = 257, N = 9 };
    static const int32_t index[N] = {3, 69, 0, 3, 12, 55, 1, 68, 3};
    for (int t = 0; t < N_DTYPES; t++) {
        enum dskv_dtype dtype = test_activation(gpu, dtypes[t]);
        uint64_t seed = 9;
        float *x = random_values(&seed, dtype, ROWS * WIDTH);
        int32_t *rows = device_ids(gpu, index, N);
        struct dskv_tensor in = test_put(gpu, x, dtype, ROWS, WIDTH, GAP),
                           out = test_put(gpu, NULL, dtype, N, WIDTH, 1);
        dskv_op_gather_rows(gpu, &(struct dskv_gather_rows){in, rows, out});
        float *got = test_take(gpu, &out);
        for (int i = 0; i < N; i++)
            CU_ASSERT(test_same_bits("gather_rows", got + i * WIDTH, x + index[i] * WIDTH, WIDTH));
        free(test_take(gpu, &in));
        dskv_device_free(gpu, rows, sizeof index);
        free(got);
        free(x);
    }
}

/* ---- the pool's bytes ------------------------------------------------------------------------------------------- */

enum { POOL_LAYERS = 2, POOL_BLOCKS = 5, POOL_TOKENS = 30 };

/* Writes tokens of layer 1 into poisoned blocks, copies part of a block, gathers both kinds of bytes of every block. */
static void *pool_bytes(struct dskv_device *device, struct dskv_kv kv, enum dskv_dtype dtype, const float *k,
                        const float *v, size_t *n_bytes)
{
    int cols = kv.n_kv_heads_local * kv.head_dim, n_tokens = POOL_BLOCKS * kv.block_tokens;
    kv.block_bytes = dskv_kv_block_bytes(&kv);
    size_t bytes = kv.block_bytes * POOL_BLOCKS;
    char *poison = dskv_calloc(bytes, 1);
    memset(poison, 0xff, bytes);
    kv.data = test_put_bytes(device, poison, bytes);
    free(poison);
    int32_t slots[POOL_TOKENS], table[POOL_BLOCKS] = {0, 1, 2, 3, 4};
    for (int i = 0; i < POOL_TOKENS; i++) /* every seventh is not written */
        slots[i] = i % 7 == 6 ? -1 : (i * 11) % (2 * kv.block_tokens) + kv.block_tokens;
    const struct dskv_block_copy copies[] = {{1, 3, 13, 0}, {2, 0, kv.block_tokens, 0}, {0, 4, 0, 0}};
    int32_t *device_slots = device_ids(device, slots, POOL_TOKENS),
            *device_table = device_ids(device, table, POOL_BLOCKS);
    struct dskv_block_copy *device_copies = test_put_bytes(device, copies, sizeof copies);
    enum dskv_dtype activation = test_activation(device, dtype);
    struct dskv_tensor kt = test_put(device, k, activation, POOL_TOKENS, cols, GAP),
                       vt = test_put(device, v, activation, POOL_TOKENS, cols, 0);
    dskv_op_kv_write(device, &(struct dskv_kv_write){kv, 1, device_slots, kt, vt});
    dskv_op_kv_copy(device, &(struct dskv_kv_copy){kv, device_copies, 3});
    size_t piece = (size_t)(n_tokens * cols) * dskv_dtype_bytes(kv.dtype);
    *n_bytes = 2 * POOL_LAYERS * piece;
    char *dense = dskv_device_alloc(device, *n_bytes);
    for (int i = 0; i < 2 * POOL_LAYERS; i++)
        dskv_op_kv_gather(device, &(struct dskv_kv_dense){kv, i / 2, i % 2, 0, kv.n_kv_heads_local, device_table, 0,
                                                          n_tokens, dense + (size_t)i * piece});
    free(test_take(device, &kt));
    free(test_take(device, &vt));
    dskv_device_free(device, device_slots, sizeof slots);
    dskv_device_free(device, device_table, sizeof table);
    dskv_device_free(device, device_copies, sizeof copies);
    dskv_device_free(device, kv.data, bytes);
    return test_take_bytes(device, dense, *n_bytes);
}

static const int head_dims[] = {20, 64, 128, 256}, block_sizes[] = {16, 64, 256};

static void pool_holds_the_same_bytes(void)
{
    for (int t = 0; t < N_DTYPES; t++)
        for (int e = 0; e < N_DTYPES; e++)
            for (int d = 0; d < 4; d++)
                for (int b = 0; b < 3; b++) {
                    struct dskv_kv kv = {.dtype = dtypes[e],
                                         .n_blocks = POOL_BLOCKS,
                                         .block_tokens = block_sizes[b],
                                         .n_layers = POOL_LAYERS,
                                         .n_kv_heads_local = 3,
                                         .head_dim = head_dims[d]};
                    uint64_t seed = (uint64_t)(d * 10 + b);
                    size_t n = (size_t)(POOL_TOKENS * 3 * kv.head_dim), n_got, n_expected;
                    float *k = random_values(&seed, dtypes[t], n), *v = random_values(&seed, dtypes[t], n);
                    void *got = pool_bytes(gpu, kv, dtypes[t], k, v, &n_got);
                    void *expected = pool_bytes(cpu, kv, dtypes[t], k, v, &n_expected);
                    CU_ASSERT(n_got == n_expected && memcmp(got, expected, n_got) == 0);
                    free(k);
                    free(v);
                    free(got);
                    free(expected);
                }
}

/* A piece that is scattered and gathered again comes back, and nothing beside it changes. */
static void pieces_come_back(void)
{
    enum { START = 13, STOP = 140, HEADS = 2 };
    for (int e = 0; e < N_DTYPES; e++)
        for (int b = 0; b < 3; b++)
            for (int is_value = 0; is_value < 2; is_value++) {
                struct dskv_kv kv = {.dtype = dtypes[e],
                                     .n_blocks = 12,
                                     .block_tokens = block_sizes[b],
                                     .n_layers = POOL_LAYERS,
                                     .n_kv_heads_local = 3,
                                     .head_dim = 20};
                kv.block_bytes = dskv_kv_block_bytes(&kv);
                kv.data = dskv_device_alloc(gpu, kv.block_bytes * 12);
                int32_t table[12];
                for (int i = 0; i < 12; i++)
                    table[i] = (i * 5 + 2) % 12;
                int32_t *device_table = device_ids(gpu, table, 12);
                uint64_t seed = 77;
                struct dskv_tensor in, out;
                float *x = random_values(&seed, dtypes[e], HEADS * (STOP - START) * 20);
                in = test_put(gpu, x, dtypes[e], HEADS * (STOP - START), 20, 0);
                out = test_put(gpu, NULL, dtypes[e], HEADS * (STOP - START), 20, 0);
                dskv_op_kv_scatter(
                    gpu, &(struct dskv_kv_dense){kv, 1, is_value, 1, HEADS, device_table, START, STOP, in.data});
                dskv_op_kv_gather(
                    gpu, &(struct dskv_kv_dense){kv, 1, is_value, 1, HEADS, device_table, START, STOP, out.data});
                float *got = test_take(gpu, &out);
                CU_ASSERT(test_same_bits("a piece", got, x, HEADS * (STOP - START) * 20));
                free(got);
                for (int other = 0; other < 2 * POOL_LAYERS;
                     other++) { /* head 0 everywhere, and the other places of 1, 2 */
                    struct dskv_tensor rest = test_put(gpu, NULL, dtypes[e], 3 * 160, 20, 0);
                    dskv_op_kv_gather(
                        gpu, &(struct dskv_kv_dense){kv, other / 2, other % 2, 0, 3, device_table, 0, 160, rest.data});
                    float *all = test_take(gpu, &rest);
                    int wrong = 0;
                    for (int i = 0; i < 3 * 160 * 20; i++) {
                        int head = i / (160 * 20), token = i / 20 % 160;
                        int inside = other == 2 + is_value && head >= 1 && token >= START && token < STOP;
                        wrong += !inside && all[i] != 0.0f;
                    }
                    CU_ASSERT_EQUAL(wrong, 0);
                    free(all);
                }
                free(test_take(gpu, &in));
                dskv_device_free(gpu, device_table, sizeof table);
                dskv_device_free(gpu, kv.data, kv.block_bytes * 12);
                free(x);
            }
}

const struct dskv_test test_cuda_rows[] = {
    {"embedding", embedding},
    {"norms", norms},
    {"rotary", rotary},
    {"activations", activations},
    {"residuals", residuals},
    {"sums in rank order", sums_in_rank_order},
    {"gathered rows", gathered_rows},
    {"the pool holds the same bytes", pool_holds_the_same_bytes},
    {"pieces come back", pieces_come_back},
    {NULL, NULL},
};
