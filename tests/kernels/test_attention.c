/* Attention: the bits of a row are one function of its query, its position and the stored keys and values before it,
 * whatever the block size, the way rows were cut into calls, what else is in the work list, the path and the threads.
 */
#include "kernels/kernel_test.h"

#include "base/limits.h"
#include "base/memory.h"

enum { MAX_GROUPS = 8, LAYER = 1, N_LAYERS = 2 };

struct shape {
    int head_dim, n_kv;
    int group[MAX_GROUPS]; /* query heads of each KV head */
    enum dskv_dtype dtype;
    int length;
};

/* One sequence: its inputs, and the pool that holds it among foreign blocks. */
struct sequence {
    struct shape shape;
    int n_heads;
    int32_t kv_head_of_head[64];
    float *q, *k, *v; /* [length, heads * head_dim]; k and v are already of the pool's dtype */
    struct dskv_kv kv;
    int32_t *table; /* scattered blocks */
    int32_t *slots;
};

static struct sequence sequence_open(struct dskv_device *device, const struct shape *shape, int block_tokens,
                                     uint64_t seed)
{
    struct sequence s = {.shape = *shape};
    for (int kv = 0; kv < shape->n_kv; kv++)
        for (int i = 0; i < shape->group[kv]; i++)
            s.kv_head_of_head[s.n_heads++] = kv;
    s.q = test_random_floats(&seed, (size_t)(shape->length * s.n_heads * shape->head_dim));
    s.k = test_random_floats(&seed, (size_t)(shape->length * shape->n_kv * shape->head_dim));
    s.v = test_random_floats(&seed, (size_t)(shape->length * shape->n_kv * shape->head_dim));
    for (int i = 0; i < shape->length * shape->n_kv * shape->head_dim; i++) {
        s.k[i] = test_rounded(shape->dtype, s.k[i]);
        s.v[i] = test_rounded(shape->dtype, s.v[i]);
    }
    int n_blocks = (shape->length + block_tokens - 1) / block_tokens;
    s.kv = (struct dskv_kv){.dtype = shape->dtype,
                            .n_blocks = n_blocks + 3,
                            .block_tokens = block_tokens,
                            .n_layers = N_LAYERS,
                            .n_kv_heads_local = shape->n_kv,
                            .head_dim = shape->head_dim};
    s.kv.block_bytes = dskv_kv_block_bytes(&s.kv);
    size_t bytes = (size_t)s.kv.n_blocks * s.kv.block_bytes;
    s.kv.data = dskv_device_alloc(device, bytes);
    CU_ASSERT_PTR_NOT_NULL_FATAL(s.kv.data);
    memset(s.kv.data, 0xff, bytes); /* a NaN in every dtype: whatever is not written must not be read into a result */
    s.table = dskv_calloc((size_t)n_blocks, sizeof *s.table);
    for (int i = 0; i < n_blocks; i++)
        s.table[i] = (n_blocks - 1 - i + 2) % s.kv.n_blocks;
    s.slots = dskv_calloc((size_t)shape->length, sizeof *s.slots);
    for (int t = 0; t < shape->length; t++)
        s.slots[t] = s.table[t / block_tokens] * block_tokens + t % block_tokens;
    return s;
}

static void sequence_close(struct dskv_device *device, struct sequence *s)
{
    dskv_device_free(device, s->kv.data, (size_t)s->kv.n_blocks * s->kv.block_bytes);
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->table);
    free(s->slots);
}

/* Stores tokens [first, first + n). */
static void store_tokens(struct dskv_device *device, const struct sequence *s, int first, int n)
{
    const int64_t cols = s->shape.n_kv * s->shape.head_dim;
    dskv_op_kv_write(device, &(struct dskv_kv_write){.kv = s->kv,
                                                     .layer = LAYER,
                                                     .slots = s->slots + first,
                                                     .k = dskv_tensor(s->k + first * cols, DSKV_F32, n, cols),
                                                     .v = dskv_tensor(s->v + first * cols, DSKV_F32, n, cols)});
}

static void attend(struct dskv_device *device, const struct sequence *s, const struct dskv_attention_work *work,
                   int n_work, const int32_t *tables, float *q, float *out, int rows)
{
    const int64_t cols = s->n_heads * s->shape.head_dim;
    dskv_op_attention(device, &(struct dskv_attention){.kv = s->kv,
                                                       .layer = LAYER,
                                                       .scale = 1.0f / sqrtf((float)s->shape.head_dim),
                                                       .n_heads_local = s->n_heads,
                                                       .kv_head_of_head = s->kv_head_of_head,
                                                       .work = work,
                                                       .n_work = n_work,
                                                       .tables = tables,
                                                       .q = dskv_tensor(q, DSKV_F32, rows, cols),
                                                       .out = dskv_tensor(out, DSKV_F32, rows, cols)});
}

static int blocks_of(const struct sequence *s, int n_tokens)
{
    return (n_tokens + s->kv.block_tokens - 1) / s->kv.block_tokens;
}

/* Runs the sequence in pieces of n_piece tokens: each is stored, then attends; nothing behind it has been stored. */
static void run_in_pieces(struct dskv_device *device, const struct sequence *s, int n_piece, float *out)
{
    const int cols = s->n_heads * s->shape.head_dim;
    for (int first = 0; first < s->shape.length; first += n_piece) {
        int n = s->shape.length - first < n_piece ? s->shape.length - first : n_piece;
        store_tokens(device, s, first, n);
        struct dskv_attention_work work = {.n_tokens = n, .start = first, .n_blocks = blocks_of(s, first + n)};
        attend(device, s, &work, 1, s->table, s->q + first * cols, out + first * cols, n);
    }
}

/* out[head_dim] in double, of the values as they are stored. */
static void reference(const struct sequence *s, int position, int head, double *out)
{
    const int dim = s->shape.head_dim, kv_cols = s->shape.n_kv * dim, from = s->kv_head_of_head[head] * dim;
    const float *q = s->q + (position * s->n_heads + head) * dim;
    double *weights = dskv_calloc((size_t)position + 1, sizeof *weights), max = -INFINITY, sum = 0;
    for (int t = 0; t <= position; t++) {
        for (int d = 0; d < dim; d++)
            weights[t] += (double)q[d] * (double)s->k[t * kv_cols + from + d];
        weights[t] /= sqrt(dim);
        max = weights[t] > max ? weights[t] : max;
    }
    memset(out, 0, (size_t)dim * sizeof *out);
    for (int t = 0; t <= position; t++) {
        double weight = exp(weights[t] - max);
        sum += weight;
        for (int d = 0; d < dim; d++)
            out[d] += weight * (double)s->v[t * kv_cols + from + d];
    }
    for (int d = 0; d < dim; d++)
        out[d] /= sum;
    free(weights);
}

static const struct shape shapes[] = {{64, 1, {3}, DSKV_F32, 200},     {20, 2, {7, 7}, DSKV_F16, 131},
                                      {1, 1, {1}, DSKV_BF16, 70},      {80, 2, {1, 4}, DSKV_BF16, 96},
                                      {128, 1, {8}, DSKV_F16, 65},     {256, 1, {2}, DSKV_F32, 67},
                                      {33, 3, {2, 1, 3}, DSKV_F32, 64}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* The larger one, and a NaN if either is one. */
static double larger(double a, double b)
{
    return a > b || isnan(a) ? a : b;
}

static void close_to_double_precision(void)
{
    struct dskv_device *device = test_device_open();
    for (int i = 0; i < N_SHAPES; i++) {
        struct sequence s = sequence_open(device, &shapes[i], 64, 40 + (uint64_t)i);
        const int dim = s.shape.head_dim;
        float *out = dskv_calloc((size_t)(s.shape.length * s.n_heads * dim), sizeof *out);
        run_in_pieces(device, &s, s.shape.length, out);
        double expected[DSKV_MAX_HEAD_DIM], worst = 0;
        for (int position = 0; position < s.shape.length; position++)
            for (int head = 0; head < s.n_heads; head++) {
                reference(&s, position, head, expected);
                for (int d = 0; d < dim; d++)
                    worst = larger(worst, fabs((double)out[(position * s.n_heads + head) * dim + d] - expected[d]));
            }
        CU_ASSERT(worst < 2e-5); /* values reach 8 */
        free(out);
        sequence_close(device, &s);
    }
    dskv_device_close(&device);
}

static void pieces_blocks_paths_and_threads_agree(void)
{
    static const int block_sizes[] = {64, 16, 48, 256}, pieces[] = {1 << 20, 1, 2, 3, 7, 16, 65};
    struct test_devices devices;
    test_devices_open(&devices);
    for (int i = 0; i < N_SHAPES; i++) {
        size_t n = 0;
        float *first = NULL, *out = NULL;
        for (int b = 0; b < 4; b++)
            for (int c = 0; c < 7; c++)
                for (int d = 0; d < devices.n; d++) {
                    if (d > 0 && (b + c + d) % (test_device_is_slow(devices.device[d]) ? 9 : 4) != 0)
                        continue; /* all devices, but not all in every combination */
                    struct dskv_device *device = devices.device[d];
                    struct sequence s = sequence_open(device, &shapes[i], block_sizes[b], 40 + (uint64_t)i);
                    if (!out) {
                        n = (size_t)(s.shape.length * s.n_heads * s.shape.head_dim);
                        out = dskv_calloc(n, sizeof *out);
                    }
                    int n_piece = pieces[c] < s.shape.length ? pieces[c] : s.shape.length;
                    run_in_pieces(device, &s, n_piece, out);
                    if (!first) {
                        first = dskv_calloc(n, sizeof *first);
                        memcpy(first, out, n * sizeof *first);
                    }
                    char what[120];
                    snprintf(what, sizeof what, "%s, shape %d, blocks of %d, pieces of %d", dskv_device_name(device), i,
                             block_sizes[b], n_piece);
                    CU_ASSERT(test_same_bits(what, out, first, n));
                    sequence_close(device, &s);
                }
        free(first);
        free(out);
    }
    test_devices_close(&devices);
}

/* Random work lists of pieces of one sequence, in any order, beside each other, with tables of their own. */
static void a_batch_equals_each_alone(void)
{
    struct test_devices devices;
    test_devices_open(&devices);
    const struct shape shape = {64, 2, {3, 2}, DSKV_BF16, 200};
    uint64_t seed = 77;
    for (int d = 0; d < devices.n; d++) {
        struct sequence s = sequence_open(devices.device[d], &shape, 16, 9);
        const int cols = s.n_heads * shape.head_dim;
        float *alone = dskv_calloc((size_t)(shape.length * cols), sizeof *alone);
        run_in_pieces(devices.device[d], &s, shape.length, alone);
        for (int round = 0; round < (test_device_is_slow(devices.device[d]) ? 1 : 5); round++) {
            struct dskv_attention_work work[6];
            int32_t tables[6 * 13];
            int rows = 0, n_tables = 0;
            for (int w = 0; w < 6; w++) {
                int start = test_random_below(&seed, shape.length),
                    n = 1 + test_random_below(&seed, shape.length - start);
                n = w % 2 ? 1 : n;
                work[w] = (struct dskv_attention_work){.first = rows,
                                                       .n_tokens = n,
                                                       .start = start,
                                                       .first_block = n_tables,
                                                       .n_blocks = blocks_of(&s, start + n)};
                memcpy(tables + n_tables, s.table, (size_t)work[w].n_blocks * sizeof *tables);
                n_tables += work[w].n_blocks;
                rows += n;
            }
            float *q = dskv_calloc((size_t)(rows * cols), sizeof *q),
                  *out = dskv_calloc((size_t)(rows * cols), sizeof *out);
            for (int w = 0; w < 6; w++)
                memcpy(q + work[w].first * cols, s.q + work[w].start * cols,
                       (size_t)(work[w].n_tokens * cols) * sizeof *q);
            attend(devices.device[d], &s, work, 6, tables, q, out, rows);
            for (int w = 0; w < 6; w++)
                CU_ASSERT(test_same_bits(dskv_device_name(devices.device[d]), out + work[w].first * cols,
                                         alone + work[w].start * cols, (size_t)(work[w].n_tokens * cols)));
            free(q);
            free(out);
        }
        free(alone);
        sequence_close(devices.device[d], &s);
    }
    test_devices_close(&devices);
}

/* Few rows of a long sequence, which threads share piece by piece, equal the same rows in one long call. */
static void long_sequences_agree_however_they_are_shared(void)
{
    static const struct {
        int start, n;
    } rows[] = {{749, 1}, {511, 1}, {512, 2}, {700, 5}, {445, 4}};
    static const struct shape long_shapes[] = {{64, 1, {3}, DSKV_F16, 750}, {36, 2, {1, 5}, DSKV_F32, 750}};
    struct test_devices devices;
    test_devices_open(&devices);
    for (int i = 0; i < 2; i++) {
        struct sequence s = sequence_open(devices.device[0], &long_shapes[i], 32, 31);
        const int cols = s.n_heads * s.shape.head_dim;
        float *whole = dskv_calloc((size_t)(s.shape.length * cols), sizeof *whole);
        float *out = dskv_calloc((size_t)(5 * cols), sizeof *out);
        run_in_pieces(devices.device[0], &s, s.shape.length, whole);
        for (int d = 0; d < devices.n; d++)
            for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
                struct dskv_attention_work work = {.n_tokens = rows[r].n, .start = rows[r].start};
                work.n_blocks = blocks_of(&s, work.start + work.n_tokens);
                attend(devices.device[d], &s, &work, 1, s.table, s.q + work.start * cols, out, work.n_tokens);
                CU_ASSERT(test_same_bits(dskv_device_name(devices.device[d]), out, whole + work.start * cols,
                                         (size_t)(work.n_tokens * cols)));
            }
        free(whole);
        free(out);
        sequence_close(devices.device[0], &s);
    }
    test_devices_close(&devices);
}

/* A changed value changes the rows that may see it, and no other. */
static void rows_see_what_is_before_them(void)
{
    enum { CHANGED = 70 };
    struct dskv_device *device = test_device_open();
    const struct shape shape = {32, 1, {2}, DSKV_F32, 140};
    struct sequence s = sequence_open(device, &shape, 64, 21);
    const int cols = s.n_heads * shape.head_dim;
    float *before = dskv_calloc((size_t)(shape.length * cols), sizeof *before);
    float *after = dskv_calloc((size_t)(shape.length * cols), sizeof *after);
    run_in_pieces(device, &s, shape.length, before);
    s.v[CHANGED * shape.head_dim] += 1;
    run_in_pieces(device, &s, shape.length, after);
    CU_ASSERT(test_same_bits("rows before the change", after, before, (size_t)(CHANGED * cols)));
    for (int t = CHANGED; t < shape.length; t++)
        CU_ASSERT(memcmp(before + t * cols, after + t * cols, (size_t)cols * sizeof *before) != 0);
    free(before);
    free(after);
    sequence_close(device, &s);
    dskv_device_close(&device);
}

/* Scores far apart: the largest wins alone, and nothing overflows. */
static void large_scores_stay_finite(void)
{
    struct dskv_device *device = test_device_open();
    const struct shape shape = {16, 1, {1}, DSKV_F32, 130};
    struct sequence s = sequence_open(device, &shape, 16, 22);
    for (int t = 0; t < shape.length; t++)
        for (int d = 0; d < shape.head_dim; d++) {
            s.q[t * shape.head_dim + d] = 300;
            s.k[t * shape.head_dim + d] = (float)(t % 7) - 3;
        }
    float *out = dskv_calloc((size_t)(shape.length * shape.head_dim), sizeof *out);
    run_in_pieces(device, &s, 1, out);
    int finite = 1;
    for (int i = 0; i < shape.length * shape.head_dim; i++)
        finite = finite && isfinite(out[i]);
    CU_ASSERT(finite);
    CU_ASSERT(
        test_same_bits("the last of rising scores alone", out + 6 * shape.head_dim, s.v + 6 * shape.head_dim, 16));
    free(out);
    sequence_close(device, &s);
    dskv_device_close(&device);
}

int main(void)
{
    return dskv_run_tests(
        "kernels.attention",
        (struct dskv_test[]){
            {"close to double precision", close_to_double_precision},
            {"pieces, blocks, paths and threads agree", pieces_blocks_paths_and_threads_agree},
            {"a batch equals each alone", a_batch_equals_each_alone},
            {"long sequences agree however they are shared", long_sequences_agree_however_they_are_shared},
            {"rows see what is before them", rows_see_what_is_before_them},
            {"large scores stay finite", large_scores_stay_finite},
            {NULL, NULL},
        });
}
