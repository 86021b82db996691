/* The pool's bytes: what is written is what is gathered, in the pool's dtype; scatter and block copies move exact bytes
 * and touch nothing else. */
#include "kernels/kernel_test.h"

#include "base/memory.h"

enum { LENGTH = 150, N_LAYERS = 2, N_HEADS = 3, POISON = 0xa5 };

static struct dskv_kv kv_open(struct dskv_device *device, enum dskv_dtype dtype, int block_tokens, int head_dim)
{
    struct dskv_kv kv = {.dtype = dtype,
                         .n_blocks = 14,
                         .block_tokens = block_tokens,
                         .n_layers = N_LAYERS,
                         .n_kv_heads_local = N_HEADS,
                         .head_dim = head_dim};
    kv.block_bytes = dskv_kv_block_bytes(&kv);
    kv.data = dskv_device_alloc(device, (size_t)kv.n_blocks * kv.block_bytes);
    CU_ASSERT_PTR_NOT_NULL_FATAL(kv.data);
    memset(kv.data, POISON, (size_t)kv.n_blocks * kv.block_bytes);
    return kv;
}

static void kv_close(struct dskv_device *device, struct dskv_kv *kv)
{
    dskv_device_free(device, kv->data, (size_t)kv->n_blocks * kv->block_bytes);
}

static void table_fill(int32_t *table, int first_block)
{
    for (int i = 0; i < 10; i++)
        table[i] = (first_block + 13 - i) % 14;
}

/* Tokens [start, stop), all heads, of one layer's keys or values. */
static void *gather(struct dskv_device *device, const struct dskv_kv *kv, const int32_t *table, int layer, int is_value,
                    int start, int stop)
{
    void *dense = dskv_calloc((size_t)(N_HEADS * (stop - start) * kv->head_dim), dskv_dtype_bytes(kv->dtype));
    dskv_op_kv_gather(device, &(struct dskv_kv_dense){.kv = *kv,
                                                      .layer = layer,
                                                      .is_value = is_value,
                                                      .n_heads = N_HEADS,
                                                      .table = table,
                                                      .start = start,
                                                      .stop = stop,
                                                      .dense = dense});
    return dense;
}

/* x [LENGTH, N_HEADS * dim] as the dense tensor [N_HEADS, LENGTH, dim] of dtype that a gather must give. */
static void *expected_dense(const float *x, enum dskv_dtype dtype, int dim)
{
    char *dense = dskv_calloc((size_t)(N_HEADS * LENGTH * dim), dskv_dtype_bytes(dtype));
    for (int h = 0; h < N_HEADS; h++)
        for (int t = 0; t < LENGTH; t++)
            dskv_convert(dense + (size_t)((h * LENGTH + t) * dim) * dskv_dtype_bytes(dtype), dtype,
                         x + (t * N_HEADS + h) * dim, DSKV_F32, (size_t)dim);
    return dense;
}

/* Both layers' keys and values, token by token in one order, in one call or in two. */
static void fill_pool(struct dskv_device *device, const struct dskv_kv *kv, const int32_t *table, float *const x[4],
                      int cut)
{
    const int cols = N_HEADS * kv->head_dim;
    int32_t slots[LENGTH];
    for (int t = 0; t < LENGTH; t++)
        slots[t] = table[t / kv->block_tokens] * kv->block_tokens + t % kv->block_tokens;
    for (int layer = 0; layer < N_LAYERS; layer++)
        for (int half = 0; half < 2; half++) {
            int first = half ? cut : 0, n = half ? LENGTH - cut : cut;
            dskv_op_kv_write(
                device, &(struct dskv_kv_write){.kv = *kv,
                                                .layer = layer,
                                                .slots = slots + first,
                                                .k = dskv_tensor(x[2 * layer] + first * cols, DSKV_F32, n, cols),
                                                .v = dskv_tensor(x[2 * layer + 1] + first * cols, DSKV_F32, n, cols)});
        }
}

static void round_trip(struct dskv_device *device, enum dskv_dtype dtype, int block_tokens, int dim)
{
    struct dskv_kv kv = kv_open(device, dtype, block_tokens, dim), other = kv_open(device, dtype, 48, dim);
    const size_t bytes = dskv_dtype_bytes(dtype), n = (size_t)(N_HEADS * LENGTH * dim);
    uint64_t seed = 8;
    float *x[4];
    for (int i = 0; i < 4; i++)
        x[i] = test_random_floats(&seed, n);
    int32_t table[10], other_table[10];
    table_fill(table, 0);
    table_fill(other_table, 5);
    fill_pool(device, &kv, table, x, 77);
    for (int i = 0; i < 4; i++) {
        void *expected = expected_dense(x[i], dtype, dim), *whole = gather(device, &kv, table, i / 2, i % 2, 0, LENGTH);
        CU_ASSERT(memcmp(whole, expected, n * bytes) == 0);
        /* Into another pool with other blocks, in pieces of some heads and tokens, and back. */
        for (int h = 0; h < N_HEADS; h++)
            for (int start = 0; start < LENGTH; start += 41) {
                int stop = start + 41 < LENGTH ? start + 41 : LENGTH;
                dskv_op_kv_scatter(
                    device,
                    &(struct dskv_kv_dense){.kv = other,
                                            .layer = i / 2,
                                            .is_value = i % 2,
                                            .first_head = h,
                                            .n_heads = 1,
                                            .table = other_table,
                                            .start = start,
                                            .stop = stop,
                                            .dense = (char *)expected + (size_t)((h * LENGTH + start) * dim) * bytes});
            }
        void *back = gather(device, &other, other_table, i / 2, i % 2, 0, LENGTH);
        CU_ASSERT(memcmp(back, expected, n * bytes) == 0);
        free(back);
        back = gather(device, &kv, table, i / 2, i % 2, 63, 64);
        CU_ASSERT(memcmp(back, (char *)expected + (size_t)(63 * dim) * bytes, (size_t)dim * bytes) == 0);
        free(back);
        free(expected);
        free(whole);
    }
    for (int i = 0; i < 4; i++)
        free(x[i]);
    kv_close(device, &kv);
    kv_close(device, &other);
}

static void written_is_gathered_is_scattered(void)
{
    static const int block_tokens[] = {16, 64, 256}, dims[] = {20, 64};
    struct test_devices devices;
    test_devices_open(&devices);
    for (int d = 0; d < devices.n; d++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_BF16; dtype++)
            for (int b = 0; b < 3; b++)
                round_trip(devices.device[d], dtype, block_tokens[b], dims[(d + b) % 2]);
    test_devices_close(&devices);
}

static void slot_minus_one_writes_nothing(void)
{
    struct dskv_device *device = test_device_open();
    struct dskv_kv kv = kv_open(device, DSKV_F16, 16, 8);
    float x[3 * N_HEADS * 8] = {1, 2, 3};
    const int32_t slots[3] = {-1, -1, -1};
    dskv_op_kv_write(device, &(struct dskv_kv_write){.kv = kv,
                                                     .slots = slots,
                                                     .k = dskv_tensor(x, DSKV_F32, 3, N_HEADS * 8),
                                                     .v = dskv_tensor(x, DSKV_F32, 3, N_HEADS * 8)});
    size_t wrong = 0;
    for (size_t i = 0; i < (size_t)kv.n_blocks * kv.block_bytes; i++)
        wrong += ((unsigned char *)kv.data)[i] != POISON;
    CU_ASSERT_EQUAL(wrong, 0);
    kv_close(device, &kv);
    dskv_device_close(&device);
}

/* Tokens below the mark are copied, those at and past it keep their bytes; copies run in their order. */
static void blocks_are_copied_up_to_the_mark(void)
{
    enum { DIM = 20, BLOCK = 16, MARK = 11 };
    struct test_devices devices;
    test_devices_open(&devices);
    for (int d = 0; d < devices.n; d++)
        for (enum dskv_dtype dtype = DSKV_F32; dtype <= DSKV_F16; dtype++) {
            struct dskv_kv kv = kv_open(devices.device[d], dtype, BLOCK, DIM);
            const size_t bytes = dskv_dtype_bytes(dtype);
            uint64_t seed = 12;
            float *x[4];
            for (int i = 0; i < 4; i++)
                x[i] = test_random_floats(&seed, (size_t)(N_HEADS * LENGTH * DIM));
            int32_t table[10];
            table_fill(table, 0); /* blocks 13 down to 4 */
            fill_pool(devices.device[d], &kv, table, x, 3);
            const struct dskv_block_copy copies[3] = {
                {.src = 13, .dst = 0, .n_tokens = MARK}, {.src = 0, .dst = 1, .n_tokens = BLOCK}, {.src = 5, .dst = 2}};
            dskv_op_kv_copy(devices.device[d], &(struct dskv_kv_copy){.kv = kv, .copies = copies, .n = 3});
            for (int i = 0; i < 4; i++)
                for (int block = 0; block < 3; block++) {
                    const int32_t source = 13, target = block;
                    char *from = gather(devices.device[d], &kv, &source, i / 2, i % 2, 0, BLOCK);
                    char *to = gather(devices.device[d], &kv, &target, i / 2, i % 2, 0, BLOCK);
                    const int mark = block < 2 ? MARK : 0;
                    unsigned char poison[DIM * 4];
                    memset(poison, POISON, sizeof poison);
                    for (int row = 0; row < N_HEADS * BLOCK; row++) {
                        size_t at = (size_t)(row * DIM) * bytes;
                        const void *expected = row % BLOCK < mark ? (void *)(from + at) : (void *)poison;
                        CU_ASSERT(memcmp(to + at, expected, DIM * bytes) == 0);
                    }
                    free(from);
                    free(to);
                }
            for (int i = 0; i < 4; i++)
                free(x[i]);
            kv_close(devices.device[d], &kv);
        }
    test_devices_close(&devices);
}

int main(void)
{
    return dskv_run_tests("kernels.kv", (struct dskv_test[]){
                                            {"written is gathered is scattered", written_is_gathered_is_scattered},
                                            {"slot -1 writes nothing", slot_minus_one_writes_nothing},
                                            {"blocks are copied up to the mark", blocks_are_copied_up_to_the_mark},
                                            {NULL, NULL},
                                        });
}
