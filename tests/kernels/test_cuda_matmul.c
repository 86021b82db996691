/* Matmul on the CUDA device: near the exact product, and a row's bits are one function of the row, whatever stands
 * beside it and whichever kernel serves that many rows. */
#include "kernels/test_cuda.h"

enum { MAX_ROWS = 200, GAP = 8 };

struct problem {
    int64_t n, k;
    enum dskv_dtype dtype, activation;
    struct dskv_weight *weight;
    float *x, *w, *bias; /* as they are held; bias null: none */
    float *device_bias;
};

static struct problem problem_open(int64_t n, int64_t k, enum dskv_dtype dtype, int has_bias, uint64_t seed)
{
    struct problem p = {.n = n, .k = k, .dtype = dtype, .activation = test_activation(gpu, dtype)};
    p.x = test_random_floats(&seed, (size_t)(MAX_ROWS * k));
    p.w = test_random_floats(&seed, (size_t)(n * k));
    for (int64_t i = 0; i < MAX_ROWS * k; i++)
        p.x[i] = test_rounded(p.activation, p.x[i]);
    for (int64_t i = 0; i < n * k; i++)
        p.w[i] = test_rounded(dtype, p.w[i]);
    p.weight = test_weight(gpu, n, k, dtype, p.w);
    if (has_bias) {
        p.bias = test_random_floats(&seed, (size_t)n);
        p.device_bias = test_put_bytes(gpu, p.bias, (size_t)n * sizeof(float));
    }
    return p;
}

static void problem_close(struct problem *p)
{
    dskv_weight_close(gpu, &p->weight);
    dskv_device_free(gpu, p->device_bias, (size_t)p->n * sizeof(float));
    free(p->x);
    free(p->w);
    free(p->bias);
}

/* Rows [first, first + rows) of x through the device; gap: what the rows of x and y are apart beyond their columns. */
static float *multiply(const struct problem *p, int64_t first, int64_t rows, enum dskv_dtype out, int64_t gap)
{
    struct dskv_tensor x = test_put(gpu, p->x + first * p->k, p->activation, rows, p->k, gap);
    struct dskv_tensor y = test_put(gpu, NULL, out, rows, p->n, gap);
    dskv_op_matmul(gpu, &(struct dskv_matmul){x, p->weight, p->device_bias, y});
    float *values = test_take(gpu, &y);
    free(test_take(gpu, &x));
    return values;
}

static const struct {
    int64_t n, k;
} shapes[] = {{1, 1}, {7, 3}, {64, 64}, {33, 65}, {100, 257}, {128, 520}, {288, 40}, {512, 256}, {257, 1024}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* The rounding of a sum of k products, in f32: a few units of the sum of their magnitudes. */
static void near_the_exact_product(void)
{
    for (int s = 0; s < N_SHAPES; s++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
            struct problem p = problem_open(shapes[s].n, shapes[s].k, dtype, s % 2, 30 + (uint64_t)s);
            float *got = multiply(&p, 0, MAX_ROWS, DSKV_F32, 1);
            int64_t wrong = 0;
            for (int64_t m = 0; m < MAX_ROWS; m++)
                for (int64_t i = 0; i < p.n; i++) {
                    double sum = p.bias ? (double)p.bias[i] : 0, magnitude = fabs(sum);
                    for (int64_t j = 0; j < p.k; j++) {
                        double product = (double)p.x[m * p.k + j] * (double)p.w[i * p.k + j];
                        sum += product;
                        magnitude += fabs(product);
                    }
                    wrong += !(fabs((double)got[m * p.n + i] - sum) <= magnitude * 4e-6);
                }
            CU_ASSERT_EQUAL(wrong, 0);
            free(got);
            problem_close(&p);
        }
}

/* f32 is one chain of fused multiply-adds per output on every device. */
static void f32_has_the_bits_of_the_cpu(void)
{
    for (int s = 0; s < N_SHAPES; s++) {
        struct problem p = problem_open(shapes[s].n, shapes[s].k, DSKV_F32, s % 2, 60 + (uint64_t)s);
        struct dskv_weight *weight = test_weight(cpu, p.n, p.k, DSKV_F32, p.w);
        struct dskv_tensor x = test_put(cpu, p.x, DSKV_F32, MAX_ROWS, p.k, 0),
                           y = test_put(cpu, NULL, DSKV_F32, MAX_ROWS, p.n, 0);
        dskv_op_matmul(cpu, &(struct dskv_matmul){x, weight, p.bias, y});
        float *expected = test_take(cpu, &y), *got = multiply(&p, 0, MAX_ROWS, DSKV_F32, GAP);
        CU_ASSERT(test_same_bits("f32", got, expected, (size_t)(MAX_ROWS * p.n)));
        free(test_take(cpu, &x));
        dskv_weight_close(cpu, &weight);
        free(expected);
        free(got);
        problem_close(&p);
    }
}

/* 1 .. 70 and 200 rows, at any place, with aligned and odd strides, rounded or not: the bits of the same rows alone. */
static void any_number_and_place_of_rows(void)
{
    for (int s = 3; s < N_SHAPES; s++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
            if (test_leaves_out())
                continue;
            struct problem p = problem_open(shapes[s].n, shapes[s].k, dtype, s % 2, 90 + (uint64_t)s);
            size_t n = (size_t)p.n;
            float *all = dskv_calloc(MAX_ROWS * n, sizeof *all), *rounded = dskv_calloc(MAX_ROWS * n, sizeof *all);
            for (int64_t m = 0; m < MAX_ROWS; m++) {
                float *row = multiply(&p, m, 1, DSKV_F32, 0);
                memcpy(all + (size_t)m * n, row, n * sizeof *row);
                free(row);
            }
            for (size_t i = 0; i < MAX_ROWS * n; i++)
                rounded[i] = test_rounded(p.activation, all[i]);
            int right = 1;
            for (int64_t rows = 1; rows <= MAX_ROWS && right; rows = rows == 70 ? MAX_ROWS : rows + 1) {
                int64_t first = rows * 7 % (MAX_ROWS - rows + 1), gap = rows % 3 == 0 ? GAP : rows % 3 == 1 ? 0 : 1;
                float *got = multiply(&p, first, rows, DSKV_F32, gap);
                right = test_same_bits("rows", got, all + (size_t)first * n, (size_t)rows * n);
                free(got);
                got = multiply(&p, first, rows, p.activation, gap);
                right = right && test_same_bits("rounded rows", got, rounded + (size_t)first * n, (size_t)rows * n);
                free(got);
            }
            CU_ASSERT(right);
            free(all);
            free(rounded);
            problem_close(&p);
        }
}

/* Shapes of real models, where other kernels may serve: single rows, few, and many agree. */
static void large_shapes_agree(void)
{
    static const struct {
        int64_t n, k;
    } large[] = {{1536, 1024}, {1024, 3584}, {6144, 512}, {1600, 1600}};
    static const int64_t counts[] = {2, 8, 16, 17, 32, 64, 65, 128, 200};
    for (size_t s = 0; s < sizeof large / sizeof *large; s++)
        for (enum dskv_dtype dtype = DSKV_F16; dtype <= DSKV_BF16; dtype++) {
            struct problem p = problem_open(large[s].n, large[s].k, dtype, s == 3, 7 + (uint64_t)s);
            size_t n = (size_t)p.n;
            float *all = multiply(&p, 0, MAX_ROWS, DSKV_F32, 0);
            for (int64_t m = 0; m < MAX_ROWS; m += 23) {
                if (test_leaves_out())
                    continue;
                float *row = multiply(&p, m, 1, DSKV_F32, 0);
                CU_ASSERT(test_same_bits("a row alone", row, all + (size_t)m * n, n));
                free(row);
            }
            for (size_t i = 0; i < MAX_ROWS * n; i++)
                all[i] = test_rounded(p.activation, all[i]);
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                if (test_leaves_out())
                    continue;
                int64_t first = (MAX_ROWS - counts[c]) / 2;
                float *got = multiply(&p, first, counts[c], p.activation, 0);
                CU_ASSERT(test_same_bits("some rows", got, all + (size_t)first * n, (size_t)counts[c] * n));
                free(got);
            }
            free(all);
            problem_close(&p);
        }
}

/* The matmul with its activation against the two operations one after the other. */
static void activated_rows(const struct problem *p, int64_t rows, int gated, enum dskv_activation kind, int64_t gap)
{
    int64_t n = gated ? p->n / 2 : p->n;
    float *values[2];
    for (int fused = 0; fused < 2; fused++) {
        struct dskv_tensor x = test_put(gpu, p->x, p->activation, rows, p->k, gap);
        struct dskv_tensor y = test_put(gpu, NULL, p->activation, rows, p->n, gap);
        struct dskv_tensor out = test_put(gpu, NULL, p->activation, rows, n, gap);
        struct dskv_matmul_activate both = {{x, p->weight, p->device_bias, y}, {kind, gated, y, out}};
        if (fused) {
            dskv_op_matmul_activate(gpu, &both);
        } else {
            dskv_op_matmul(gpu, &both.matmul);
            dskv_op_activate(gpu, &both.activate);
        }
        values[fused] = test_take(gpu, &out);
        free(test_take(gpu, &y));
        free(test_take(gpu, &x));
    }
    CU_ASSERT(test_same_bits("activated rows", values[1], values[0], (size_t)(rows * n)));
    free(values[0]);
    free(values[1]);
}

static void matmul_and_activation(void)
{
    static const struct {
        int64_t n, k;
    } sizes[] = {{64, 64}, {200, 128}, {2 * 1000, 576}, {2 * 1344, 320}, {2 * 14336, 128}};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
            struct problem p = problem_open(sizes[s].n, sizes[s].k, dtype, s % 2, 40 + (uint64_t)s);
            for (int64_t rows = 1; rows <= 40; rows += rows < 3 ? 1 : 6)
                for (int gated = 0; gated < 2; gated++)
                    if (rows > 32 || !test_leaves_out()) /* which are the last kernel's */
                        activated_rows(&p, rows, gated, (enum dskv_activation)(rows % DSKV_N_ACTIVATIONS),
                                       rows % 2 * GAP);
            problem_close(&p);
        }
}

/* From 16 to 64 outputs, or nearly, for each of 132 multiprocessors: batches have the bits of few rows. */
static void any_width_of_batches(void)
{
    enum { EACH = 132, K = 192, FEW = 7, N_ROWS = 64 };
    static const int64_t counts[] = {17, 33, 50, N_ROWS};
    for (int64_t width = 16; width <= 64; width += 8)
        for (enum dskv_dtype dtype = DSKV_F16; dtype <= DSKV_BF16; dtype++) {
            struct problem p = problem_open(width * EACH - 5, K, dtype, width % 16, 70 + (uint64_t)width);
            size_t n = (size_t)p.n;
            float *all = dskv_calloc(N_ROWS * n, sizeof *all);
            for (int64_t m = 0; m < N_ROWS; m += FEW) {
                int64_t rows = N_ROWS - m < FEW ? N_ROWS - m : FEW;
                float *some = multiply(&p, m, rows, p.activation, 0);
                memcpy(all + (size_t)m * n, some, (size_t)rows * n * sizeof *all);
                free(some);
            }
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                if (test_leaves_out())
                    continue;
                int64_t first = N_ROWS - counts[c], gap = c % 2 * GAP;
                float *got = multiply(&p, first, counts[c], p.activation, gap);
                CU_ASSERT(test_same_bits("a batch", got, all + (size_t)first * n, (size_t)counts[c] * n));
                free(got);
                activated_rows(&p, counts[c], 0, (enum dskv_activation)(c % DSKV_N_ACTIVATIONS), gap);
            }
            free(all);
            problem_close(&p);
        }
}

static void no_inputs_and_no_outputs(void)
{
    const float bias[3] = {1, 2, 3};
    float *device_bias = test_put_bytes(gpu, bias, sizeof bias);
    for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
        struct dskv_weight *weight = dskv_weight_open(gpu, 3, 0, dtype);
        CU_ASSERT_PTR_NOT_NULL_FATAL(weight);
        enum dskv_dtype activation = test_activation(gpu, dtype);
        struct dskv_tensor y = test_put(gpu, NULL, DSKV_F32, 2, 3, 0);
        dskv_op_matmul(gpu, &(struct dskv_matmul){dskv_tensor(NULL, activation, 2, 0), weight, device_bias, y});
        float *got = test_take(gpu, &y);
        const float expected[6] = {1, 2, 3, 1, 2, 3};
        CU_ASSERT(test_same_bits("bias alone", got, expected, 6));
        free(got);
        dskv_weight_close(gpu, &weight);
    }
    dskv_device_free(gpu, device_bias, sizeof bias);
}

/* Rows filled in odd pieces from every dtype; rows never filled stay zero.  The unit matrix reads a weight back. */
static void weights_fill_in_pieces(void)
{
    enum { N = 70, K = 130, FILLED = 61 };
    static const int cuts[] = {0, 1, 5, 31, 32, 40, FILLED};
    uint64_t seed = 3;
    float *rows = test_random_floats(&seed, N * K), *unit = dskv_calloc(K * K, sizeof *unit);
    uint32_t *source = dskv_calloc(N * K, sizeof *source);
    for (int i = 0; i < K; i++)
        unit[i * K + i] = 1;
    for (enum dskv_dtype from = DSKV_F32; from <= DSKV_BF16; from++)
        for (enum dskv_dtype to = DSKV_F32; to <= DSKV_BF16; to++) {
            dskv_convert(source, from, rows, DSKV_F32, N * K);
            struct dskv_weight *weight = dskv_weight_open(gpu, N, K, to);
            CU_ASSERT_PTR_NOT_NULL_FATAL(weight);
            for (size_t i = 0; i + 1 < sizeof cuts / sizeof *cuts; i++)
                dskv_weight_fill(gpu, weight, cuts[i], cuts[i + 1] - cuts[i],
                                 (char *)source + (size_t)(cuts[i] * K) * dskv_dtype_bytes(from), from);
            struct dskv_tensor x = test_put(gpu, unit, test_activation(gpu, to), K, K, 0),
                               y = test_put(gpu, NULL, DSKV_F32, K, N, 0);
            dskv_op_matmul(gpu, &(struct dskv_matmul){.x = x, .w = weight, .y = y});
            float *got = test_take(gpu, &y);
            int wrong = 0;
            for (int k = 0; k < K; k++)
                for (int n = 0; n < N; n++)
                    wrong += got[k * N + n] != (n < FILLED ? test_rounded(to, test_rounded(from, rows[n * K + k])) : 0);
            CU_ASSERT_EQUAL(wrong, 0);
            free(got);
            free(test_take(gpu, &x));
            dskv_weight_close(gpu, &weight);
        }
    free(rows);
    free(unit);
    free(source);
}

const struct dskv_test test_cuda_matmul[] = {
    {"matmul: near the exact product", near_the_exact_product},
    {"matmul: f32 has the bits of the CPU", f32_has_the_bits_of_the_cpu},
    {"matmul: any number and place of rows", any_number_and_place_of_rows},
    {"matmul: large shapes agree", large_shapes_agree},
    {"matmul: with its activation", matmul_and_activation},
    {"matmul: any width of batches", any_width_of_batches},
    {"matmul: no inputs and no outputs", no_inputs_and_no_outputs},
    {"weights fill in pieces", weights_fill_in_pieces},
    {NULL, NULL},
};
