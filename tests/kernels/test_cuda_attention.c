/* Attention on the CUDA device: near the CPU's, and a row's bits are one function of its query, its position and the
 * stored keys and values before it, whatever the block size, the cuts into calls, and the rest of the batch. */
#include "kernels/test_cuda.h"

#include "base/limits.h"

enum { MAX_GROUPS = 8, LAYER = 1, N_LAYERS = 2 };

struct shape {
    int head_dim, n_kv;
    int group[MAX_GROUPS]; /* query heads of each KV head */
    int length;
};

static const struct shape shapes[] = {{64, 1, {3}, 200},    {20, 2, {7, 7}, 131},   {1, 1, {1}, 70},
                                      {80, 2, {1, 4}, 300}, {128, 1, {8}, 257},     {256, 1, {2}, 67},
                                      {128, 2, {4, 4}, 64}, {64, 3, {2, 1, 3}, 65}, {128, 1, {16}, 400}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* One sequence: its inputs as the device holds them, and the pool that holds it among foreign blocks. */
struct sequence {
    const struct shape *shape;
    struct dskv_device *device;
    enum dskv_dtype activation;
    int n_heads, n_blocks;
    float *q, *k, *v; /* [length, heads * head_dim] */
    struct dskv_kv kv;
    int32_t *table, *slots;                  /* host */
    int32_t *device_slots, *kv_head_of_head; /* device */
};

static float *rounded_floats(uint64_t *seed, enum dskv_dtype dtype, int n)
{
    float *values = test_random_floats(seed, (size_t)n);
    for (int i = 0; i < n; i++)
        values[i] = test_rounded(dtype, values[i]);
    return values;
}

/* dtype: of the values that the queries, keys and values can hold. */
static struct sequence sequence_open(struct dskv_device *device, const struct shape *shape, enum dskv_dtype dtype,
                                     enum dskv_dtype kv_dtype, int block_tokens, uint64_t seed)
{
    struct sequence s = {.shape = shape, .device = device, .activation = test_activation(device, dtype)};
    int32_t kv_head_of_head[64];
    for (int kv = 0; kv < shape->n_kv; kv++)
        for (int i = 0; i < shape->group[kv]; i++)
            kv_head_of_head[s.n_heads++] = kv;
    s.q = rounded_floats(&seed, dtype, shape->length * s.n_heads * shape->head_dim);
    s.k = rounded_floats(&seed, dtype, shape->length * shape->n_kv * shape->head_dim);
    s.v = rounded_floats(&seed, dtype, shape->length * shape->n_kv * shape->head_dim);
    s.n_blocks = (shape->length + block_tokens - 1) / block_tokens;
    s.kv = (struct dskv_kv){.dtype = kv_dtype,
                            .n_blocks = s.n_blocks + 3,
                            .block_tokens = block_tokens,
                            .n_layers = N_LAYERS,
                            .n_kv_heads_local = shape->n_kv,
                            .head_dim = shape->head_dim};
    s.kv.block_bytes = dskv_kv_block_bytes(&s.kv);
    size_t bytes = (size_t)s.kv.n_blocks * s.kv.block_bytes;
    char *poison = dskv_calloc(bytes, 1);
    memset(poison, 0xff, bytes); /* whatever is not written must not be read into a result */
    s.kv.data = test_put_bytes(device, poison, bytes);
    free(poison);
    s.table = dskv_calloc((size_t)s.n_blocks, sizeof *s.table);
    for (int i = 0; i < s.n_blocks; i++)
        s.table[i] = (s.n_blocks - 1 - i + 2) % s.kv.n_blocks;
    s.slots = dskv_calloc((size_t)shape->length, sizeof *s.slots);
    for (int t = 0; t < shape->length; t++)
        s.slots[t] = s.table[t / block_tokens] * block_tokens + t % block_tokens;
    s.device_slots = test_put_bytes(device, s.slots, (size_t)shape->length * sizeof *s.slots);
    s.kv_head_of_head = test_put_bytes(device, kv_head_of_head, (size_t)s.n_heads * sizeof *kv_head_of_head);
    return s;
}

static void sequence_close(struct sequence *s)
{
    dskv_device_sync(s->device, NULL);
    dskv_device_free(s->device, s->kv.data, (size_t)s->kv.n_blocks * s->kv.block_bytes);
    dskv_device_free(s->device, s->device_slots, (size_t)s->shape->length * sizeof *s->slots);
    dskv_device_free(s->device, s->kv_head_of_head, (size_t)s->n_heads * sizeof *s->kv_head_of_head);
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->table);
    free(s->slots);
}

static void store_tokens(const struct sequence *s, int first, int n)
{
    const int cols = s->shape->n_kv * s->shape->head_dim;
    struct dskv_tensor k = test_put(s->device, s->k + first * cols, s->activation, n, cols, 0),
                       v = test_put(s->device, s->v + first * cols, s->activation, n, cols, 0);
    dskv_op_kv_write(s->device, &(struct dskv_kv_write){s->kv, LAYER, s->device_slots + first, k, v});
    free(test_take(s->device, &k));
    free(test_take(s->device, &v));
}

/* Queries [rows, heads * head_dim] through one call; tables: host [n_table]. */
static float *attend(const struct sequence *s, const struct dskv_attention_work *work, int n_work, int max_keys,
                     const int32_t *tables, int n_table, const float *q, int rows)
{
    const int cols = s->n_heads * s->shape->head_dim;
    size_t work_bytes = (size_t)n_work * sizeof *work, table_bytes = (size_t)n_table * sizeof *tables;
    struct dskv_attention_work *device_work = test_put_bytes(s->device, work, work_bytes);
    int32_t *device_tables = test_put_bytes(s->device, tables, table_bytes);
    struct dskv_tensor in = test_put(s->device, q, s->activation, rows, cols, 8),
                       out = test_put(s->device, NULL, s->activation, rows, cols, 1);
    dskv_op_attention(s->device, &(struct dskv_attention){.kv = s->kv,
                                                          .layer = LAYER,
                                                          .scale = 1.0f / sqrtf((float)s->shape->head_dim),
                                                          .n_heads_local = s->n_heads,
                                                          .kv_head_of_head = s->kv_head_of_head,
                                                          .work = device_work,
                                                          .n_work = n_work,
                                                          .max_keys = max_keys,
                                                          .tables = device_tables,
                                                          .q = in,
                                                          .out = out});
    float *values = test_take(s->device, &out);
    free(test_take(s->device, &in));
    dskv_device_free(s->device, device_work, work_bytes);
    dskv_device_free(s->device, device_tables, table_bytes);
    return values;
}

static int blocks_of(const struct sequence *s, int n_tokens)
{
    return (n_tokens + s->kv.block_tokens - 1) / s->kv.block_tokens;
}

/* Runs the sequence in pieces of n_piece tokens: each is stored, then attends; nothing behind it has been stored. */
static float *run_in_pieces(const struct sequence *s, int n_piece, int tell_max_keys)
{
    const int cols = s->n_heads * s->shape->head_dim, length = s->shape->length;
    float *out = dskv_calloc((size_t)(length * cols), sizeof *out);
    for (int first = 0; first < length; first += n_piece) {
        int n = length - first < n_piece ? length - first : n_piece;
        store_tokens(s, first, n);
        struct dskv_attention_work work = {.n_tokens = n, .start = first, .n_blocks = blocks_of(s, first + n)};
        float *part = attend(s, &work, 1, tell_max_keys ? first + n : 0, s->table, s->n_blocks, s->q + first * cols, n);
        memcpy(out + first * cols, part, (size_t)(n * cols) * sizeof *out);
        free(part);
    }
    return out;
}

static void near_the_cpu(void)
{
    for (int i = 0; i < N_SHAPES; i++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
            for (enum dskv_dtype kv = DSKV_F32; kv <= DSKV_BF16; kv++) {
                struct sequence device = sequence_open(gpu, &shapes[i], dtype, kv, 64, 40 + (uint64_t)i),
                                reference = sequence_open(cpu, &shapes[i], dtype, kv, 64, 40 + (uint64_t)i);
                float *got = run_in_pieces(&device, shapes[i].length, 1),
                      *expected = run_in_pieces(&reference, shapes[i].length, 1);
                size_t n = (size_t)(shapes[i].length * device.n_heads * shapes[i].head_dim);
                /* Values reach 8; weights may be rounded to the pool's dtype. */
                float absolute = 8 * (test_unit(dtype) > test_unit(kv) ? test_unit(dtype) : test_unit(kv));
                CU_ASSERT(test_near("attention", got, expected, n, dtype, 1, absolute < 2e-5f ? 2e-5f : absolute));
                free(got);
                free(expected);
                sequence_close(&device);
                sequence_close(&reference);
            }
}

static void decode_equals_prefill(void)
{
    static const int block_sizes[] = {64, 16, 256}, pieces[] = {1, 2, 3, 7, 16, 65};
    for (int i = 0; i < N_SHAPES; i++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
            for (enum dskv_dtype kv = DSKV_F32; kv <= DSKV_BF16; kv++) {
                struct sequence whole = sequence_open(gpu, &shapes[i], dtype, kv, 64, 50 + (uint64_t)i);
                float *expected = run_in_pieces(&whole, shapes[i].length, 1);
                size_t n = (size_t)(shapes[i].length * whole.n_heads * shapes[i].head_dim);
                for (int c = 0; c < 6; c++) { /* all cuts and sizes, but not all combinations */
                    int block_tokens = block_sizes[(c + i) % 3];
                    /* few tokens a call: a third of them, under a sanitizer fewer still */
                    if (c < 2 && ((i + (int)dtype + (int)kv) % 3 || test_leaves_out()))
                        continue;
                    if (test_leaves_out())
                        continue;
                    struct sequence s = sequence_open(gpu, &shapes[i], dtype, kv, block_tokens, 50 + (uint64_t)i);
                    float *got = run_in_pieces(&s, pieces[c], (c + i) % 4 != 0);
                    char what[100];
                    snprintf(what, sizeof what, "head_dim %d, %s on %s, blocks of %d, pieces of %d", shapes[i].head_dim,
                             dskv_dtype_name(dtype), dskv_dtype_name(kv), block_tokens, pieces[c]);
                    CU_ASSERT(test_same_bits(what, got, expected, n));
                    free(got);
                    sequence_close(&s);
                }
                free(expected);
                sequence_close(&whole);
            }
}

/* Runs of the stored sequence in one call have the bits of their rows in `expected`.  longest: tokens of a run; the
 * last one may have none. */
static void expect_same_in_batch(const struct sequence *s, const float *expected, int n_work, int longest,
                                 int last_is_empty, uint64_t *seed, const char *what)
{
    const int cols = s->n_heads * s->shape->head_dim, length = s->shape->length;
    struct dskv_attention_work *work = dskv_calloc((size_t)n_work, sizeof *work);
    int rows = 0, max_keys = 0;
    for (int w = 0; w < n_work; w++) {
        int n = last_is_empty && w == n_work - 1 ? 0 : 1 + test_random_below(seed, longest),
            start = test_random_below(seed, length - n + 1);
        work[w] = (struct dskv_attention_work){
            .first = rows, .n_tokens = n, .start = start, .n_blocks = blocks_of(s, start + n)};
        rows += n;
        max_keys = start + n > max_keys ? start + n : max_keys;
    }
    size_t row_bytes = (size_t)cols * sizeof(float);
    float *q = dskv_calloc((size_t)rows, row_bytes), *wanted = dskv_calloc((size_t)rows, row_bytes);
    for (int w = 0; w < n_work; w++) {
        size_t bytes = (size_t)work[w].n_tokens * row_bytes;
        memcpy(q + work[w].first * cols, s->q + work[w].start * cols, bytes);
        memcpy(wanted + work[w].first * cols, expected + work[w].start * cols, bytes);
    }
    float *got = attend(s, work, n_work, max_keys, s->table, s->n_blocks, q, rows);
    CU_ASSERT(test_same_bits(what, got, wanted, (size_t)(rows * cols)));
    free(q);
    free(wanted);
    free(got);
    free(work);
}

/* A call of thousands of pairs may take another kernel than calls of few: the whole sequence at once, and runs of it in
 * one call, give the bits of short calls. */
static void many_rows_equal_few(void)
{
    enum { ROUNDS = 24, MAX_RUNS = 6, FEW = 31, ENOUGH = 20000 };
    static const int head_dims[] = {64, 128}, block_sizes[] = {16, 48, 64, 32, 128, 80, 256};
    uint64_t seed = 11;
    for (int round = 0; round < ROUNDS; round++) {
        if (test_leaves_out())
            continue;
        enum dskv_dtype dtype = round / 2 % 2 ? DSKV_F16 : DSKV_BF16;
        struct shape shape = {.head_dim = head_dims[round % 2], .n_kv = 3 + test_random_below(&seed, MAX_GROUPS - 2)};
        int n_heads = 0;
        for (int kv = 0; kv < shape.n_kv; kv++)
            n_heads += shape.group[kv] = 1 + test_random_below(&seed, 8);
        shape.length = ENOUGH / n_heads < 5000 ? ENOUGH / n_heads : 5000;
        struct sequence s = sequence_open(gpu, &shape, dtype, dtype, block_sizes[round % 7], 80 + (uint64_t)round);
        const int cols = n_heads * shape.head_dim, length = shape.length;
        char what[100];
        snprintf(what, sizeof what, "%d rows of %d on %d heads of %d, %s, blocks of %d", length, n_heads, shape.n_kv,
                 shape.head_dim, dskv_dtype_name(dtype), s.kv.block_tokens);
        float *got = run_in_pieces(&s, length, 1), *expected = run_in_pieces(&s, FEW, 1);
        CU_ASSERT(test_same_bits(what, got, expected, (size_t)(length * cols)));
        free(got);

        expect_same_in_batch(&s, expected, 2 + test_random_below(&seed, MAX_RUNS - 1), length, 1, &seed, what);
        free(expected);
        sequence_close(&s);
    }
}

/* Values that are not finite, of a token in the middle: many rows at once, and none before it knows. */
static void many_rows_know_nothing_of_later_ones(void)
{
    for (int round = 0; round < 4; round++) {
        struct shape shape = {.head_dim = round % 2 ? 64 : 128, .n_kv = 4, .group = {4, 4, 3, 5}, .length = 1300};
        enum dskv_dtype dtype = round / 2 ? DSKV_F16 : DSKV_BF16;
        struct sequence s = sequence_open(gpu, &shape, dtype, dtype, 64, 90);
        const int kv_cols = shape.n_kv * shape.head_dim, cols = s.n_heads * shape.head_dim, bad = 700 + round * 37;
        float *expected = run_in_pieces(&s, shape.length, 1);
        for (int i = 0; i < kv_cols; i++) {
            s.v[bad * kv_cols + i] = i % 3 ? NAN : INFINITY;
            s.k[(bad + 5) * kv_cols + i] = NAN;
        }
        float *got = run_in_pieces(&s, shape.length, 1);
        CU_ASSERT(test_same_bits("the rows before", got, expected, (size_t)(bad * cols)));
        int n_finite = 0;
        for (int i = bad * cols; i < shape.length * cols; i++)
            n_finite += isfinite(got[i]) != 0;
        CU_ASSERT_EQUAL(n_finite, 0);
        free(got);
        free(expected);
        sequence_close(&s);
    }
}

/* Runs of random lengths at random places of one stored sequence, in one call: the bits of each row in a cold run. */
static void batches_equal_alone(void)
{
    enum { MAX_WORK = 40, ROUNDS = 12 };
    uint64_t seed = 4;
    for (int i = 0; i < N_SHAPES; i++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
            struct sequence s = sequence_open(gpu, &shapes[i], dtype, dtype, 16, 60 + (uint64_t)i);
            const int length = s.shape->length;
            float *expected = run_in_pieces(&s, length, 1);
            for (int round = 0; round < ROUNDS; round++) {
                if (test_leaves_out())
                    continue;
                int longest = round % 3 == 0 ? 1 : round % 3 == 1 ? 9 : length;
                expect_same_in_batch(&s, expected, 1 + test_random_below(&seed, round % 2 ? MAX_WORK : 3), longest, 0,
                                     &seed, "a batch");
            }
            free(expected);
            sequence_close(&s);
        }
}

/* Batches that fill the device, of one token a run or of few, may take yet another kernel.  In every other round the
 * values of one token are not finite, which no run may see that ends before it. */
static void large_batches_equal_alone(void)
{
    enum { ROUNDS = 32, FEW = 5, MORE = 31, ENOUGH = 132 };
    static const int head_dims[] = {128, 64, 96, 80}, block_sizes[] = {64, 16, 48, 32, 128};
    uint64_t seed = 12;
    for (int round = 0; round < ROUNDS; round++) {
        if (round >= 8 && test_leaves_out()) /* the first are all sizes of heads and dtypes */
            continue;
        enum dskv_dtype dtype = round / 4 % 2 ? DSKV_F16 : DSKV_BF16;
        struct shape shape = {.head_dim = head_dims[round % 4], .n_kv = 2 + test_random_below(&seed, MAX_GROUPS - 1)};
        int largest = round / 2 % 2 ? 8 : 4, longest = round % 3 ? 1 : 3;
        for (int kv = 0; kv < shape.n_kv; kv++)
            shape.group[kv] = 1 + test_random_below(&seed, largest);
        shape.length = 65 + test_random_below(&seed, 800);
        struct sequence s = sequence_open(gpu, &shape, dtype, dtype, block_sizes[round % 5], 100 + (uint64_t)round);
        const int kv_cols = shape.n_kv * shape.head_dim, bad = shape.length / 2;
        for (int i = 0; i < kv_cols && round % 2; i++)
            s.v[bad * kv_cols + i] = i % 3 ? NAN : INFINITY;
        char what[100];
        snprintf(what, sizeof what, "a large batch, %d heads on %d of %d, %s, blocks of %d", s.n_heads, shape.n_kv,
                 shape.head_dim, dskv_dtype_name(dtype), s.kv.block_tokens);
        float *expected = run_in_pieces(&s, test_leaves_out() ? MORE : FEW, 1);
        for (int times = 1; times <= 9; times += 4)
            expect_same_in_batch(&s, expected, times * ENOUGH / shape.n_kv + 1, longest, round % 5 == 0, &seed, what);
        free(expected);
        sequence_close(&s);
    }
}

/* A recorded pass has room for more rows, more runs and longer ones than a step has: runs of no tokens follow the last
 * one, the rows behind it belong to none and stay as they are, and only the bits of the others count. */
static void padding_changes_nothing(void)
{
    enum { MAX_WORK = 6, PADDED_WORK = 16, PADDED_ROWS = 64, MAX_TOKENS = 9 };
    uint64_t seed = 5;
    for (int i = 0; i < N_SHAPES; i++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
            struct sequence s = sequence_open(gpu, &shapes[i], dtype, dtype, 64, 70 + (uint64_t)i);
            const int cols = s.n_heads * s.shape->head_dim, length = s.shape->length;
            free(run_in_pieces(&s, length, 1)); /* stores it */
            for (int n_work = 0; n_work <= MAX_WORK; n_work++) {
                struct dskv_attention_work work[PADDED_WORK] = {{0}};
                int rows = 0, max_keys = 1;
                float *q = dskv_calloc((size_t)(PADDED_ROWS * cols), sizeof *q);
                memset(q, 0xff, (size_t)(PADDED_ROWS * cols) * sizeof *q);
                for (int w = 0; w < n_work; w++) {
                    int n = 1 + test_random_below(&seed, MAX_TOKENS), start = test_random_below(&seed, length - n + 1);
                    work[w] = (struct dskv_attention_work){
                        .first = rows, .n_tokens = n, .start = start, .n_blocks = blocks_of(&s, start + n)};
                    memcpy(q + rows * cols, s.q + start * cols, (size_t)(n * cols) * sizeof *q);
                    rows += n;
                    max_keys = start + n > max_keys ? start + n : max_keys;
                }
                int rounded = DSKV_KEY_PIECE;
                while (rounded < max_keys)
                    rounded *= 2;
                float *expected = attend(&s, work, n_work, max_keys, s.table, s.n_blocks, q, rows);
                float *got = attend(&s, work, PADDED_WORK, 4 * rounded, s.table, s.n_blocks, q, PADDED_ROWS);
                CU_ASSERT(test_same_bits("padded", got, expected, (size_t)(rows * cols)));
                for (int j = rows * cols; j < PADDED_ROWS * cols; j++)
                    if (!isnan(got[j])) {
                        CU_FAIL("a row of no run was written");
                        break;
                    }
                free(q);
                free(got);
                free(expected);
            }
            sequence_close(&s);
        }
}

/* What a later token has stored does not reach an earlier row, not even where it is not finite. */
static void later_tokens_stay_out(void)
{
    static const int pieces[] = {1, 3, 16, 65};
    for (int i = 0; i < N_SHAPES; i++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
            const int length = shapes[i].length, head_dim = shapes[i].head_dim, kv_cols = shapes[i].n_kv * head_dim;
            const float worst[] = {INFINITY, -INFINITY, NAN};
            float *expected = NULL;
            size_t n = 0;
            for (int c = -1; c < 4; c++) { /* first all tokens in one call */
                if (c >= 0 && test_leaves_out())
                    continue;
                struct sequence s = sequence_open(gpu, &shapes[i], dtype, dtype, 64, 80 + (uint64_t)i);
                for (int j = 0; j < 3; j++) { /* three tokens in the last quarter */
                    int token = length - 1 - j * length / 12;
                    s.v[token * kv_cols + (j * 5) % kv_cols] = worst[j];
                    s.k[token * kv_cols + (j * 3) % kv_cols] *= j == 1 ? INFINITY : 1;
                }
                n = (size_t)(length * s.n_heads * head_dim);
                float *got = run_in_pieces(&s, c < 0 ? length : pieces[c], 1);
                if (c < 0) {
                    size_t n_finite = (size_t)(length / 2 * s.n_heads * head_dim), wrong = 0;
                    for (size_t j = 0; j < n_finite; j++)
                        wrong += !isfinite(got[j]);
                    CU_ASSERT_EQUAL(wrong, 0);
                    expected = got;
                } else {
                    CU_ASSERT(test_same_bits("beside values that are not finite", got, expected, n));
                    free(got);
                }
                sequence_close(&s);
            }
            free(expected);
        }
}

const struct dskv_test test_cuda_attention[] = {
    {"attention: near the CPU", near_the_cpu},
    {"attention: decode equals prefill", decode_equals_prefill},
    {"attention: many rows equal few", many_rows_equal_few},
    {"attention: many rows know nothing of later ones", many_rows_know_nothing_of_later_ones},
    {"attention: batches equal alone", batches_equal_alone},
    {"attention: large batches equal alone", large_batches_equal_alone},
    {"attention: padding changes nothing", padding_changes_nothing},
    {"attention: later tokens stay out", later_tokens_stay_out},
    {NULL, NULL},
};
