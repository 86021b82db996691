/* Matmul: one summation order for every number of rows, whichever kernel serves.
 *
 * f16, bf16: mma.sync m16n8k16, weights as the 16 rows and tokens as the 8 columns, k ascending in steps of 16 into one
 * f32 accumulator: the order of cuBLASLt's family without split-K.  Few rows stream (matmul_stream.cu), so do batches
 * (matmul_batch.cu), many go to cuBLASLt (matmul_lt.c); what neither takes (older GPUs, rows of x that are not aligned,
 * k or n of no whole eights) is served here. Grid: (tiles of 64 outputs, tiles of TOKENS tokens), 4 warps, each 16
 * outputs; shared memory: STAGES tiles of 64 k-values, rows padded by 16 bytes against bank conflicts; x may stand
 * anywhere. f32: one fma chain over k ascending per output (no TF32).  Grid: tiles of 32 outputs x 8 tokens.  Weights
 * are padded to whole tiles with zeros; a zero product leaves an accumulator as it is.
 */
#include "cuda/bulk.cuh"
#include "cuda/common.cuh"
#include "cuda/matmul.h"
#include "cuda/mma.cuh"

enum { TILE_N = 64, TILE_K = 64, ROW = TILE_K + 8, STAGES = 4 };

/* Brings one k-tile: 64 weight rows and TOKENS rows of x.  x is copied element by element where its rows are not
 * aligned or k ends inside the tile; rows past the last token are zeros. */
template <typename T, int TOKENS>
__device__ void load_stage(T *w_tile, T *x_tile, const T *w, int64_t w_stride, const T *x, int64_t x_stride, int rows,
                           int64_t k0, int64_t k, bool aligned)
{
    for (int i = (int)threadIdx.x; i < TILE_N * TILE_K / 8; i += 128)
        copy_16(w_tile + i / 8 * ROW + i % 8 * 8, w + i / 8 * w_stride + k0 + i % 8 * 8);
    for (int i = (int)threadIdx.x; i < TOKENS * TILE_K / 8; i += 128) {
        int row = i / 8, column = i % 8 * 8;
        T *place = x_tile + row * ROW + column;
        if (row < rows && aligned && k0 + column + 8 <= k)
            copy_16(place, x + row * x_stride + k0 + column);
        else
            for (int j = 0; j < 8; j++)
                place[j] =
                    row < rows && k0 + column + j < k ? x[row * x_stride + k0 + column + j] : from_float<T>(0.0f);
    }
}

template <typename T, typename Y, int TOKENS>
__global__ void __launch_bounds__(128)
    matmul_kernel(const T *w, int64_t w_stride, const T *x, int64_t x_stride, bool aligned, const float *bias, Y *y,
                  int64_t y_stride, int64_t n, int64_t k, int rows)
{
    extern __shared__ __align__(16) unsigned char memory[];
    T *tiles = (T *)memory;
    const int stage_elements = (TILE_N + TOKENS) * ROW;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int64_t first_n = (int64_t)blockIdx.x * TILE_N;
    int first_row = (int)blockIdx.y * TOKENS;
    w += first_n * w_stride;
    x += first_row * x_stride;
    rows -= first_row;
    int n_tiles = (int)((k + TILE_K - 1) / TILE_K);
    float c[TOKENS / 8][4] = {};

    for (int s = 0; s < STAGES - 1; s++) {
        if (s < n_tiles)
            load_stage<T, TOKENS>(tiles + s * stage_elements, tiles + s * stage_elements + TILE_N * ROW, w, w_stride, x,
                                  x_stride, rows, (int64_t)s * TILE_K, k, aligned);
        commit_copies();
    }
    for (int tile = 0; tile < n_tiles; tile++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        int next = tile + STAGES - 1;
        if (next < n_tiles) {
            T *stage = tiles + next % STAGES * stage_elements;
            load_stage<T, TOKENS>(stage, stage + TILE_N * ROW, w, w_stride, x, x_stride, rows, (int64_t)next * TILE_K,
                                  k, aligned);
        }
        commit_copies();
        const T *w_tile = tiles + tile % STAGES * stage_elements, *x_tile = w_tile + TILE_N * ROW;
        for (int kk = 0; kk < TILE_K; kk += 16) {
            uint32_t a[4];
            load_matrices(a, shared_address(w_tile + (warp * 16 + lane % 16) * ROW + kk + lane / 16 * 8));
#pragma unroll
            for (int b = 0; b < TOKENS / 8; b++) {
                const T *column = x_tile + (b * 8 + lane / 4) * ROW + kk + lane % 4 * 2;
                mma<T>(c[b], a, *(const uint32_t *)column, *(const uint32_t *)(column + 8));
            }
        }
    }
    for (int b = 0; b < TOKENS / 8; b++)
        for (int i = 0; i < 4; i++) {
            int64_t output = first_n + warp * 16 + lane / 4 + (i / 2) * 8;
            int row = b * 8 + lane % 4 * 2 + i % 2;
            if (output < n && row < rows)
                y[(first_row + row) * y_stride + output] = from_float<Y>(bias ? c[b][i] + bias[output] : c[b][i]);
        }
}

template <typename T, typename Y, int TOKENS>
static void launch_tiles(struct dskv_device *device, const struct dskv_matmul *p)
{
    auto kernel = matmul_kernel<T, Y, TOKENS>;
    int bytes = STAGES * (TILE_N + TOKENS) * ROW * (int)sizeof(T);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    dim3 grid(blocks_for(p->w->n, TILE_N), blocks_for(p->x.rows, TOKENS));
    bool aligned = p->x.stride % 8 == 0 && (uintptr_t)p->x.data % 16 == 0;
    kernel<<<grid, 128, bytes, dskv_cuda_of(device)->stream>>>(
        (const T *)p->w->data, dskv_cuda_padded(p->w->k), (const T *)p->x.data, p->x.stride, aligned, p->bias,
        (Y *)p->y.data, p->y.stride, p->w->n, p->w->k, (int)p->x.rows);
}

template <typename T, typename Y> static void launch_half(struct dskv_device *device, const struct dskv_matmul *p)
{
    if (p->x.rows <= 8)
        launch_tiles<T, Y, 8>(device, p);
    else if (p->x.rows <= 16)
        launch_tiles<T, Y, 16>(device, p);
    else if (p->x.rows <= 32)
        launch_tiles<T, Y, 32>(device, p);
    else
        launch_tiles<T, Y, 64>(device, p);
}

enum { F32_N = 32, F32_ROWS = 8, F32_K = 32 };

__global__ void matmul_f32_kernel(const float *w, int64_t w_stride, const float *x, int64_t x_stride, const float *bias,
                                  float *y, int64_t y_stride, int64_t n, int64_t k, int64_t rows)
{
    __shared__ float w_tile[F32_K][F32_N + 1], x_tile[F32_ROWS][F32_K];
    int column = (int)threadIdx.x, line = (int)threadIdx.y;
    int64_t output = (int64_t)blockIdx.x * F32_N + column, row = (int64_t)blockIdx.y * F32_ROWS + line;
    float sum = 0.0f;
    for (int64_t k0 = 0; k0 < k; k0 += F32_K) {
        for (int i = line; i < F32_N; i += F32_ROWS) /* rows are padded to 64: no bounds */
            w_tile[column][i] = w[((int64_t)blockIdx.x * F32_N + i) * w_stride + k0 + column];
        x_tile[line][column] = row < rows && k0 + column < k ? x[row * x_stride + k0 + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < F32_K; i++)
            sum = fmaf(x_tile[line][i], w_tile[i][column], sum);
        __syncthreads();
    }
    if (output < n && row < rows)
        y[row * y_stride + output] = bias ? sum + bias[output] : sum;
}

/* A row a block, four columns a thread: 16-byte loads, rows of y aligned to four elements. */
template <typename Y>
__global__ void __launch_bounds__(256) bias_kernel(const float *x, int64_t n, const float *bias, Y *y, int64_t y_stride)
{
    struct alignas(4 * sizeof(Y)) four {
        Y y[4];
    };
    follow_previous();
    for (int64_t i = (int64_t)threadIdx.x * 4; i < n; i += 256 * 4) {
        float4 sum = *(const float4 *)(x + blockIdx.x * n + i);
        *(struct four *)(y + blockIdx.x * y_stride +
                         i) = {{from_float<Y>(sum.x + bias[i]), from_float<Y>(sum.y + bias[i + 1]),
                                from_float<Y>(sum.z + bias[i + 2]), from_float<Y>(sum.w + bias[i + 3])}};
    }
}

extern "C" void dskv_cuda_add_bias(struct dskv_device *device, const float *x, const float *bias,
                                   const struct dskv_tensor *y)
{
    with_dtype(y->dtype, [&](auto element) {
        using Y = decltype(element);
        queue_kernel(device, "adding a bias", bias_kernel<Y>, dim3((unsigned)y->rows), dim3(256), 0, x, y->cols, bias,
                     (Y *)y->data, y->stride);
    });
}

extern "C" void dskv_cuda_matmul_own(struct dskv_device *device, const struct dskv_matmul *p)
{
    bool to_f32 = p->y.dtype == DSKV_F32;
    if (dskv_cuda_matmul_stream(device, p))
        return;
    if (p->w->dtype == DSKV_F32) {
        dim3 grid(blocks_for(p->w->n, F32_N), blocks_for(p->x.rows, F32_ROWS));
        matmul_f32_kernel<<<grid, dim3(F32_N, F32_ROWS), 0, dskv_cuda_of(device)->stream>>>(
            (const float *)p->w->data, dskv_cuda_padded(p->w->k), (const float *)p->x.data, p->x.stride, p->bias,
            (float *)p->y.data, p->y.stride, p->w->n, p->w->k, p->x.rows);
    } else if (p->w->dtype == DSKV_F16) {
        to_f32 ? launch_half<__half, float>(device, p) : launch_half<__half, __half>(device, p);
    } else {
        to_f32 ? launch_half<__nv_bfloat16, float>(device, p) : launch_half<__nv_bfloat16, __nv_bfloat16>(device, p);
    }
    launched(device, "matmul");
}

static bool is_long_chain(const struct dskv_cuda *cuda, const struct dskv_weight *w)
{
    return w->n < 16 * cuda->n_multiprocessors && w->k >= 2 * w->n;
}

static bool is_for_stream(const struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    bool is_wide = p->w->n > (int64_t)DSKV_CUDA_BATCH_OUTPUTS * cuda->n_multiprocessors;
    return p->x.rows < (is_long_chain(cuda, p->w) ? DSKV_CUDA_MANY_ROWS_OF_LONG_CHAINS
                        : is_wide                 ? DSKV_CUDA_MANY_ROWS_OF_WIDE
                                                  : DSKV_CUDA_MANY_ROWS);
}

static bool is_for_batch(const struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    return p->x.rows >= (is_long_chain(cuda, p->w) ? DSKV_CUDA_MANY_ROWS_OF_LONG_CHAINS : DSKV_CUDA_BATCH_ROWS);
}

extern "C" void dskv_cuda_matmul_exact(struct dskv_device *device, const struct dskv_matmul *p)
{
    const struct dskv_cuda *cuda = dskv_cuda_of(device);
    if (is_for_batch(cuda, p) && dskv_cuda_matmul_batch(device, p))
        return;
    if (is_for_stream(cuda, p) || !dskv_cuda_matmul_lt(device, p))
        dskv_cuda_matmul_own(device, p);
}

extern "C" void dskv_cuda_matmul(struct dskv_device *device, const struct dskv_matmul *p)
{
    if (!dskv_cuda_of(device)->free_order || !dskv_cuda_matmul_any_order(device, p))
        dskv_cuda_matmul_exact(device, p);
}

extern "C" void dskv_cuda_matmul_activate(struct dskv_device *device, const struct dskv_matmul_activate *p)
{
    const struct dskv_cuda *cuda = dskv_cuda_of(device);
    if (!cuda->free_order && ((is_for_batch(cuda, &p->matmul) && dskv_cuda_matmul_batch_activate(device, p)) ||
                              (is_for_stream(cuda, &p->matmul) && dskv_cuda_matmul_stream_activate(device, p))))
        return;
    dskv_cuda_matmul(device, &p->matmul);
    dskv_cuda_activate(device, &p->activate);
}
