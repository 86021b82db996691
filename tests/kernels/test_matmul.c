/* Matmul: bits against one chain of fmaf per output, at every number and place of rows, path, thread count and dtype.
 */
#include "kernels/kernel_test.h"

#include "base/memory.h"

enum { MAX_ROWS = 70, GAP = 3 }; /* strides are GAP wider than the tensors */

static const float untouched = 12345.0f;

struct problem {
    int64_t n, k;
    enum dskv_dtype dtype;
    float *x;        /* [MAX_ROWS, k + GAP] */
    float *w;        /* [n, k] */
    float *bias;     /* [n] or null */
    float *expected; /* [MAX_ROWS, n] */
};

static struct problem problem_open(int64_t n, int64_t k, enum dskv_dtype dtype, int has_bias, uint64_t seed)
{
    struct problem p = {.n = n, .k = k, .dtype = dtype};
    p.x = test_random_floats(&seed, (size_t)(MAX_ROWS * (k + GAP)));
    p.w = test_random_floats(&seed, (size_t)(n * k));
    p.bias = has_bias ? test_random_floats(&seed, (size_t)n) : NULL;
    p.expected = dskv_calloc((size_t)(MAX_ROWS * n), sizeof(float));
    float *w = dskv_calloc((size_t)(n * k), sizeof *w);
    for (int64_t i = 0; i < n * k; i++)
        w[i] = test_rounded(dtype, p.w[i]);
    for (int64_t m = 0; m < MAX_ROWS; m++)
        for (int64_t i = 0; i < n; i++) {
            float acc = 0;
            for (int64_t j = 0; j < k; j++)
                acc = fmaf(p.x[m * (k + GAP) + j], w[i * k + j], acc);
            p.expected[m * n + i] = has_bias ? acc + p.bias[i] : acc;
        }
    free(w);
    return p;
}

static void problem_close(struct problem *p)
{
    free(p->x);
    free(p->w);
    free(p->bias);
    free(p->expected);
}

/* Rows [first, first + rows): equal to the expected ones, and nothing beside them is written. */
static int rows_are_right(struct dskv_device *device, const struct problem *p, const struct dskv_weight *weight,
                          int64_t first, int64_t rows)
{
    const int64_t stride = p->n + GAP;
    float *y = dskv_calloc((size_t)(rows * stride), sizeof *y);
    for (int64_t i = 0; i < rows * stride; i++)
        y[i] = untouched;
    struct dskv_matmul matmul = {.w = weight, .bias = p->bias};
    matmul.x = (struct dskv_tensor){p->x + first * (p->k + GAP), DSKV_F32, rows, p->k, p->k + GAP};
    matmul.y = (struct dskv_tensor){y, DSKV_F32, rows, p->n, stride};
    dskv_op_matmul(device, &matmul);
    char what[120];
    snprintf(what, sizeof what, "%s, %s, n %d, k %d, rows %d at %d", dskv_device_name(device),
             dskv_dtype_name(p->dtype), (int)p->n, (int)p->k, (int)rows, (int)first);
    int right = 1;
    for (int64_t r = 0; r < rows && right; r++) {
        right = test_same_bits(what, y + r * stride, p->expected + (first + r) * p->n, (size_t)p->n);
        for (int64_t i = p->n; i < stride; i++)
            right = right && y[r * stride + i] == untouched;
    }
    free(y);
    return right;
}

static void every_row_is_one_chain(void)
{
    static const struct {
        int64_t n, k;
    } shapes[] = {{1, 1}, {7, 3}, {32, 16}, {33, 65}, {64, 128}, {100, 257}, {97, 520}, {288, 40}};
    struct test_devices devices;
    test_devices_open(&devices);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
            struct problem p = problem_open(shapes[s].n, shapes[s].k, dtype, s % 2 == 0, 100 + s);
            for (int d = 0; d < devices.n; d++) {
                struct dskv_weight *weight = test_weight(devices.device[d], p.n, p.k, dtype, p.w);
                int right = 1;
                for (int64_t rows = 1; rows <= MAX_ROWS && right; rows += rows < 20 ? 1 : 25)
                    if (!test_device_is_slow(devices.device[d]) || rows < 4 || rows % 9 == 0)
                        right = rows_are_right(devices.device[d], &p, weight, rows * 7 % (MAX_ROWS - rows + 1), rows);
                CU_ASSERT(right);
                dskv_weight_close(devices.device[d], &weight);
            }
            problem_close(&p);
        }
    test_devices_close(&devices);
}

static void any_number_and_place_of_rows(void)
{
    struct test_devices devices;
    test_devices_open(&devices);
    for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++) {
        struct problem p = problem_open(75, 90, dtype, 1, 5);
        struct dskv_weight *weight = test_weight(devices.device[0], p.n, p.k, dtype, p.w);
        int right = 1;
        for (int64_t rows = 1; rows <= MAX_ROWS && right; rows++)
            for (int64_t first = 0; first + rows <= MAX_ROWS && right; first += 9)
                right = rows_are_right(devices.device[0], &p, weight, first, rows);
        CU_ASSERT(right);
        dskv_weight_close(devices.device[0], &weight);
        problem_close(&p);
    }
    test_devices_close(&devices);
}

/* More rows than a block of rows, more panels than threads: equal to the same rows one by one. */
static void many_rows_equal_single_rows(void)
{
    enum { ROWS = 300, N = 200, K = 300 };
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 11;
    float *x = test_random_floats(&seed, ROWS * K), *w = test_random_floats(&seed, N * K);
    float *single = dskv_calloc(ROWS * N, sizeof *single), *many = dskv_calloc(ROWS * N, sizeof *many);
    struct dskv_weight *weight = test_weight(devices.device[0], N, K, DSKV_BF16, w);
    for (int r = 0; r < ROWS; r++)
        dskv_op_matmul(devices.device[0], &(struct dskv_matmul){.x = dskv_tensor(x + r * K, DSKV_F32, 1, K),
                                                                .w = weight,
                                                                .y = dskv_tensor(single + r * N, DSKV_F32, 1, N)});
    dskv_weight_close(devices.device[0], &weight);
    for (int d = 0; d < devices.n; d++) {
        weight = test_weight(devices.device[d], N, K, DSKV_BF16, w);
        dskv_op_matmul(devices.device[d], &(struct dskv_matmul){.x = dskv_tensor(x, DSKV_F32, ROWS, K),
                                                                .w = weight,
                                                                .y = dskv_tensor(many, DSKV_F32, ROWS, N)});
        CU_ASSERT(test_same_bits(dskv_device_name(devices.device[d]), many, single, ROWS * N));
        dskv_weight_close(devices.device[d], &weight);
    }
    free(x);
    free(w);
    free(single);
    free(many);
    test_devices_close(&devices);
}

static void sizes_of_zero(void)
{
    struct dskv_device *device = test_device_open();
    float bias[3] = {1, 2, 3}, y[6] = {9, 9, 9, 9, 9, 9};
    struct dskv_weight *no_inputs = dskv_weight_open(device, 3, 0, DSKV_F16);
    struct dskv_weight *no_outputs = dskv_weight_open(device, 0, 3, DSKV_F16);
    CU_ASSERT_PTR_NOT_NULL_FATAL(no_inputs);
    CU_ASSERT_PTR_NOT_NULL_FATAL(no_outputs);
    dskv_weight_fill(device, no_inputs, 0, 3, NULL, DSKV_F32);
    dskv_op_matmul(device, &(struct dskv_matmul){.x = dskv_tensor(NULL, DSKV_F32, 2, 0),
                                                 .w = no_inputs,
                                                 .bias = bias,
                                                 .y = dskv_tensor(y, DSKV_F32, 2, 3)});
    const float with_bias[6] = {1, 2, 3, 1, 2, 3}, zeros[6] = {0};
    CU_ASSERT(test_same_bits("bias alone", y, with_bias, 6));
    dskv_op_matmul(device, &(struct dskv_matmul){.x = dskv_tensor(NULL, DSKV_F32, 2, 0),
                                                 .w = no_inputs,
                                                 .y = dskv_tensor(y, DSKV_F32, 2, 3)});
    CU_ASSERT(test_same_bits("no inputs", y, zeros, 6));
    dskv_op_matmul(device, &(struct dskv_matmul){.x = dskv_tensor(y, DSKV_F32, 2, 3),
                                                 .w = no_outputs,
                                                 .y = dskv_tensor(NULL, DSKV_F32, 2, 0)});
    dskv_op_matmul(device, &(struct dskv_matmul){.x = dskv_tensor(NULL, DSKV_F32, 0, 0),
                                                 .w = no_inputs,
                                                 .y = dskv_tensor(NULL, DSKV_F32, 0, 3)});
    CU_ASSERT_EQUAL(dskv_weight_bytes(no_outputs), 0);
    dskv_weight_close(device, &no_inputs);
    dskv_weight_close(device, &no_outputs);
    CU_ASSERT_PTR_NULL(no_outputs);
    dskv_device_close(&device);
}

/* Rows filled in odd pieces from every dtype; rows never filled stay zero. */
static void weights_fill_in_pieces(void)
{
    enum { N = 70, K = 130, FILLED = 61 };
    struct dskv_device *device = test_device_open();
    uint64_t seed = 3;
    float *rows = test_random_floats(&seed, N * K);
    uint32_t *source = dskv_calloc(N * K, sizeof *source);
    float *x = dskv_calloc(K * K, sizeof *x),
          *y = dskv_calloc(K * N, sizeof *y); /* the unit matrix reads a weight back */
    for (int i = 0; i < K; i++)
        x[i * K + i] = 1;
    for (enum dskv_dtype from = DSKV_F32; from <= DSKV_BF16; from++)
        for (enum dskv_dtype to = DSKV_F32; to <= DSKV_BF16; to++) {
            dskv_convert(source, from, rows, DSKV_F32, N * K);
            struct dskv_weight *weight = dskv_weight_open(device, N, K, to);
            CU_ASSERT_PTR_NOT_NULL_FATAL(weight);
            static const int cuts[] = {0, 1, 5, 31, 32, 40, FILLED};
            for (size_t i = 0; i + 1 < sizeof cuts / sizeof *cuts; i++)
                dskv_weight_fill(device, weight, cuts[i], cuts[i + 1] - cuts[i],
                                 (char *)source + (size_t)(cuts[i] * K) * dskv_dtype_bytes(from), from);
            dskv_op_matmul(device, &(struct dskv_matmul){.x = dskv_tensor(x, DSKV_F32, K, K),
                                                         .w = weight,
                                                         .y = dskv_tensor(y, DSKV_F32, K, N)});
            int wrong = 0;
            for (int k = 0; k < K; k++)
                for (int n = 0; n < N; n++)
                    wrong += y[k * N + n] != (n < FILLED ? test_rounded(to, test_rounded(from, rows[n * K + k])) : 0);
            CU_ASSERT_EQUAL(wrong, 0);
            CU_ASSERT_EQUAL(dskv_weight_n(weight), N);
            CU_ASSERT_EQUAL(dskv_weight_k(weight), K);
            dskv_weight_close(device, &weight);
        }
    free(rows);
    free(source);
    free(x);
    free(y);
    dskv_device_close(&device);
}

int main(void)
{
    return dskv_run_tests("kernels.matmul", (struct dskv_test[]){
                                                {"every row is one chain", every_row_is_one_chain},
                                                {"any number and place of rows", any_number_and_place_of_rows},
                                                {"many rows equal single rows", many_rows_equal_single_rows},
                                                {"sizes of zero", sizes_of_zero},
                                                {"weights fill in pieces", weights_fill_in_pieces},
                                                {NULL, NULL},
                                            });
}
