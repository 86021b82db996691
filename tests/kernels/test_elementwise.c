/* Norms, rotary positions, activations, residuals, sums, picked rows, embeddings: near double precision, and the same
 * bits on every path, thread count, and wherever a row or an element stands. */
#include "kernels/kernel_test.h"

#include "base/memory.h"

enum { ROWS = 9, GAP = 5 };

/* Tensors of ROWS rows with a stride wider than the row. */
static struct dskv_tensor padded(float *data, int64_t cols)
{
    return (struct dskv_tensor){data, DSKV_F32, ROWS, cols, cols + GAP};
}

static double relative(double value, double expected)
{
    return fabs(value - expected) / fmax(fabs(expected), 1e-30);
}

/* ---- norm ------------------------------------------------------------------------------------------------------- */

static double norm_reference(enum dskv_norm_kind kind, const float *x, int width, double eps, int i)
{
    double mean = 0, square = 0;
    for (int j = 0; j < width && kind == DSKV_LAYER_NORM; j++)
        mean += (double)x[j] / width;
    for (int j = 0; j < width; j++)
        square += ((double)x[j] - mean) * ((double)x[j] - mean) / width;
    return ((double)x[i] - mean) / sqrt(square + eps);
}

static void norms(void)
{
    static const int widths[] = {1, 15, 16, 64, 100, 577};
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 1;
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (int kind = DSKV_LAYER_NORM; kind <= DSKV_RMS_NORM; kind++) {
            const int width = widths[w], stride = width + GAP;
            float *x = test_random_floats(&seed, (size_t)(ROWS * stride)),
                  *weight = test_random_floats(&seed, (size_t)width);
            float *bias = kind == DSKV_LAYER_NORM ? test_random_floats(&seed, (size_t)width) : NULL;
            float *first = NULL;
            for (int d = 0; d < devices.n; d++) {
                float *out = dskv_calloc((size_t)(ROWS * stride), sizeof *out);
                struct dskv_norm norm = {
                    .kind = (enum dskv_norm_kind)kind, .eps = 1e-5f, .weight = weight, .bias = bias};
                norm.x = padded(x, width);
                norm.out = padded(out, width);
                dskv_op_norm(devices.device[d], &norm);
                for (int r = 0; r < ROWS && d == 0; r++)
                    for (int i = 0; i < width; i++) {
                        double normal = norm_reference(norm.kind, x + r * stride, width, 1e-5, i);
                        double expected = normal * (double)weight[i] + (bias ? (double)bias[i] : 0);
                        CU_ASSERT(fabs((double)out[r * stride + i] - expected) <
                                  4e-6 * (1 + fabs(normal)) * (1 + fabs((double)weight[i])));
                    }
                if (!first) {
                    first = out;
                    continue;
                }
                CU_ASSERT(test_same_bits(dskv_device_name(devices.device[d]), out, first, (size_t)(ROWS * stride)));
                free(out);
            }
            /* In place, one row at a time. */
            for (int r = 0; r < ROWS; r++) {
                struct dskv_tensor row = dskv_tensor(x + r * stride, DSKV_F32, 1, width);
                dskv_op_norm(devices.device[0], &(struct dskv_norm){.kind = (enum dskv_norm_kind)kind,
                                                                    .eps = 1e-5f,
                                                                    .x = row,
                                                                    .weight = weight,
                                                                    .bias = bias,
                                                                    .out = row});
                CU_ASSERT(test_same_bits("in place", x + r * stride, first + r * stride, (size_t)width));
            }
            free(x);
            free(weight);
            free(bias);
            free(first);
        }
    test_devices_close(&devices);
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

static double activation_reference(enum dskv_activation kind, double x)
{
    switch (kind) {
    case DSKV_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case DSKV_GELU_ERF: return 0.5 * x * (1 + erf(x / sqrt(2)));
    case DSKV_SILU: return x / (1 + exp(-x));
    default: return x > 0 ? x : 0;
    }
}

/* A dense grid over all that matters: 0.5 x (1 + t) loses what 1 + t cancels, so the bound is absolute there. */
static void activations_are_accurate(void)
{
    enum { N = 40001 };
    struct dskv_device *device = test_device_open();
    float *x = dskv_calloc(N, sizeof *x), *y = dskv_calloc(N, sizeof *y);
    for (int i = 0; i < N; i++)
        x[i] = (float)(i - N / 2) * 0.0005f;
    for (int kind = 0; kind < DSKV_N_ACTIVATIONS; kind++) {
        double worst = 0;
        dskv_op_activate(device, &(struct dskv_activate){.kind = (enum dskv_activation)kind,
                                                         .x = dskv_tensor(x, DSKV_F32, 1, N),
                                                         .out = dskv_tensor(y, DSKV_F32, 1, N)});
        for (int i = 0; i < N; i++) {
            double error = fabs((double)y[i] - activation_reference((enum dskv_activation)kind, (double)x[i]));
            worst = fmax(worst, error / (1e-30 + fabs((double)x[i])));
            CU_ASSERT_FALSE(isnan(y[i]));
        }
        CU_ASSERT(worst < 2.5e-7);
    }
    /* Limits: silu(x) is x * (e^x rounded once) far out on the left, and never a NaN. */
    float far[6] = {-104, -1000, 1000, -88, 0, -3e38f}, out[6];
    dskv_op_activate(device, &(struct dskv_activate){.kind = DSKV_SILU,
                                                     .x = dskv_tensor(far, DSKV_F32, 1, 6),
                                                     .out = dskv_tensor(out, DSKV_F32, 1, 6)});
    CU_ASSERT(out[0] == 0 && out[1] == 0 && out[2] == 1000 && out[4] == 0 && out[5] == 0);
    CU_ASSERT(relative((double)out[3], -88 * exp(-88)) < 1e-6);
    free(x);
    free(y);
    dskv_device_close(&device);
}

static void activations_agree(void)
{
    enum { N = 53 };
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 2;
    float *x = test_random_floats(&seed, ROWS * (2 * N + GAP));
    for (int kind = 0; kind < DSKV_N_ACTIVATIONS; kind++)
        for (int gated = 0; gated < 2; gated++) {
            float first[ROWS * (N + GAP)] = {0};
            for (int d = 0; d < devices.n; d++) {
                float out[ROWS * (N + GAP)] = {0}, single[N];
                struct dskv_activate activate = {.kind = (enum dskv_activation)kind, .gated = gated};
                activate.x = padded(x, gated ? 2 * N : N);
                activate.out = padded(out, N);
                dskv_op_activate(devices.device[d], &activate);
                if (d == 0)
                    memcpy(first, out, sizeof first);
                CU_ASSERT(test_same_bits(dskv_device_name(devices.device[d]), out, first, ROWS * (N + GAP)));
                for (int i = 0; i < N && !gated; i++) { /* one element alone: the tail's bits are the body's */
                    activate.x = dskv_tensor(x + i, DSKV_F32, 1, 1);
                    activate.out = dskv_tensor(single + i, DSKV_F32, 1, 1);
                    dskv_op_activate(devices.device[d], &activate);
                }
                CU_ASSERT(gated || test_same_bits("alone", single, out, N));
                for (int i = 0; i < N && gated; i++) /* the gate is one product, rounded */
                    single[i] = x[N + i];
                activate = (struct dskv_activate){.kind = activate.kind};
                float plain[N];
                activate.x = dskv_tensor(x, DSKV_F32, 1, N);
                activate.out = dskv_tensor(plain, DSKV_F32, 1, N);
                dskv_op_activate(devices.device[d], &activate);
                for (int i = 0; i < N && gated; i++)
                    CU_ASSERT(plain[i] * single[i] == out[i]);
            }
        }
    free(x);
    test_devices_close(&devices);
}

/* ---- rotary positions ------------------------------------------------------------------------------------------- */

static void rope(void)
{
    enum { HEADS = 3, DIM = 22, ROTARY = 14, HALF = ROTARY / 2, COLS = HEADS * DIM, POSITIONS = 40 };
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 3;
    float *x = test_random_floats(&seed, ROWS * (COLS + GAP)), *cos = test_random_floats(&seed, POSITIONS * HALF);
    float *sin = test_random_floats(&seed, POSITIONS * HALF);
    int32_t positions[ROWS];
    for (int r = 0; r < ROWS; r++)
        positions[r] = test_random_below(&seed, POSITIONS);
    for (int style = DSKV_ROPE_HALVES; style <= DSKV_ROPE_PAIRS; style++) {
        float expected[ROWS * (COLS + GAP)];
        memcpy(expected, x, sizeof expected);
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < HEADS; h++)
                for (int i = 0; i < HALF; i++) {
                    const float *in = x + r * (COLS + GAP) + h * DIM;
                    float *out = expected + r * (COLS + GAP) + h * DIM;
                    int a = style == DSKV_ROPE_HALVES ? i : 2 * i, b = style == DSKV_ROPE_HALVES ? i + HALF : 2 * i + 1;
                    float c = cos[positions[r] * HALF + i], s = sin[positions[r] * HALF + i];
                    float ac = in[a] * c, bs = in[b] * s, bc = in[b] * c, as = in[a] * s;
                    out[a] = ac - bs;
                    out[b] = bc + as;
                }
        for (int d = 0; d < devices.n; d++) {
            float out[ROWS * (COLS + GAP)];
            memcpy(out, x, sizeof out);
            dskv_op_rope(devices.device[d], &(struct dskv_rope){.style = (enum dskv_rope_style)style,
                                                                .positions = positions,
                                                                .cos = cos,
                                                                .sin = sin,
                                                                .rotary_dim = ROTARY,
                                                                .head_dim = DIM,
                                                                .n_heads = HEADS,
                                                                .x = padded(out, COLS)});
            CU_ASSERT(test_same_bits(dskv_device_name(devices.device[d]), out, expected, ROWS * (COLS + GAP)));
        }
    }
    free(x);
    free(cos);
    free(sin);
    test_devices_close(&devices);
}

/* ---- one rounding per element ----------------------------------------------------------------------------------- */

static void residual_and_sum(void)
{
    enum { N = 37 };
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 4;
    float *a = test_random_floats(&seed, ROWS * N), *b = test_random_floats(&seed, ROWS * N);
    float *c = test_random_floats(&seed, ROWS * N), *bias = test_random_floats(&seed, N);
    for (int d = 0; d < devices.n; d++) {
        float with[ROWS * N], without[ROWS * N], sum[ROWS * N];
        memcpy(with, a, sizeof with);
        memcpy(without, a, sizeof without);
        memcpy(sum, a, sizeof sum);
        struct dskv_residual residual = {.y = dskv_tensor(b, DSKV_F32, ROWS, N), .bias = bias};
        residual.x = dskv_tensor(with, DSKV_F32, ROWS, N);
        dskv_op_residual(devices.device[d], &residual);
        residual.bias = NULL;
        residual.x = dskv_tensor(without, DSKV_F32, ROWS, N);
        dskv_op_residual(devices.device[d], &residual);
        const void *partials[3] = {sum, b, c}; /* the first may be the result */
        dskv_op_sum(devices.device[d],
                    &(struct dskv_sum){.partials = partials, .n = 3, .out = dskv_tensor(sum, DSKV_F32, ROWS, N)});
        int wrong = 0;
        for (int i = 0; i < ROWS * N; i++) {
            float biased = b[i] + bias[i % N], partial = a[i] + b[i];
            wrong += with[i] != a[i] + biased;
            wrong += without[i] != a[i] + b[i];
            wrong += sum[i] != partial + c[i];
        }
        CU_ASSERT_EQUAL(wrong, 0);
    }
    free(a);
    free(b);
    free(c);
    free(bias);
    test_devices_close(&devices);
}

static void rows_are_picked(void)
{
    struct dskv_device *device = test_device_open();
    uint64_t seed = 5;
    float *x = test_random_floats(&seed, ROWS * (7 + GAP)), out[4 * 7];
    const int32_t index[4] = {8, 0, 8, 3};
    dskv_op_gather_rows(
        device, &(struct dskv_gather_rows){.x = padded(x, 7), .index = index, .out = dskv_tensor(out, DSKV_F32, 4, 7)});
    for (int i = 0; i < 4; i++)
        CU_ASSERT(test_same_bits("row", out + i * 7, x + index[i] * (7 + GAP), 7));
    free(x);
    dskv_device_close(&device);
}

static void embeddings_come_from_prepared_weights(void)
{
    enum { N = 70, WIDTH = 45, FIRST = 100 };
    struct test_devices devices;
    test_devices_open(&devices);
    uint64_t seed = 6;
    float *rows = test_random_floats(&seed, N * WIDTH), *positions = test_random_floats(&seed, 30 * WIDTH);
    const int32_t ids[ROWS] = {100, 131, 132, 169, 99, 170, 0, 117, 116}, at[ROWS] = {0, 29, 3, 4, 5, 6, 7, 8, 9};
    for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
        for (int d = 0; d < devices.n; d++) {
            struct dskv_weight *table = test_weight(devices.device[d], N, WIDTH, dtype, rows);
            float out[ROWS * (WIDTH + GAP)], expected[WIDTH];
            struct dskv_embed embed = {.ids = ids, .positions = at, .table = table, .first = FIRST};
            embed.out = padded(out, WIDTH);
            for (int with_positions = 0; with_positions < 2; with_positions++) {
                if (with_positions)
                    embed.position_table = dskv_tensor(positions, DSKV_F32, 30, WIDTH);
                dskv_op_embed(devices.device[d], &embed);
                for (int r = 0; r < ROWS; r++) {
                    for (int i = 0; i < WIDTH; i++) {
                        int here = ids[r] >= FIRST && ids[r] < FIRST + N;
                        expected[i] = here ? test_rounded(dtype, rows[(ids[r] - FIRST) * WIDTH + i]) : 0;
                        expected[i] += with_positions ? positions[at[r] * WIDTH + i] : 0;
                    }
                    CU_ASSERT(test_same_bits("embedding", out + r * (WIDTH + GAP), expected, WIDTH));
                }
            }
            dskv_weight_close(devices.device[d], &table);
        }
    free(rows);
    free(positions);
    test_devices_close(&devices);
}

int main(void)
{
    return dskv_run_tests("kernels.elementwise",
                          (struct dskv_test[]){
                              {"norms", norms},
                              {"activations are accurate", activations_are_accurate},
                              {"activations agree", activations_agree},
                              {"rope", rope},
                              {"residual and sum", residual_and_sum},
                              {"rows are picked", rows_are_picked},
                              {"embeddings come from prepared weights", embeddings_come_from_prepared_weights},
                              {NULL, NULL},
                          });
}
