/* Matmul of few rows at the pace of memory: weights stream through a ring in shared memory (compute capability 9.0).
 *
 * Same order as matmul.cu: k ascending in steps of 16, one f32 accumulator per output, so the same bits.
 * Grid: (persistent blocks over tiles of outputs, groups of TOKENS rows).  Two warps feed: a thread of each asks the
 * copy engine for stages of weights and of x; the others are warpgroups that multiply 64 outputs each and leave the
 * operands where they are (wgmma.cuh; what a tile lacks of whole warpgroups is multiplied, too, and dropped).  Gated
 * outputs pair two far rows of weights: a warpgroup multiplies 64 gates and the 64 factors that belong to them.
 *
 * Shared memory: n_stages of n_boxes boxes of 64 k-values of weights and of x, 1024-byte aligned, 128-byte rows whose
 * 16-byte chunks are swizzled by the row's number modulo 8 (no bank conflicts), and three barriers a stage.  x must be
 * 16-byte aligned and k whole boxes.
 *
 * A launch may overlap its predecessor's end: weights, which no operation writes, are requested at once, x and y are
 * touched after the wait.
 */
#include "cuda/activation.cuh"
#include "cuda/bulk.cuh"
#include "cuda/matmul.h"
#include "cuda/wgmma.cuh"

#include <algorithm>
#include <climits>

enum {
    BOX_K = 64, /* 128 bytes: the widest swizzle */
    BOX_ROW_BYTES = 128,
    TILE_STEP = 8, /* outputs: the swizzle's period */
    GROUP_OUTPUTS = 64,
    GROUP_WARPS = 4,
    MAX_STAGES = 32,
    STAGE_WEIGHT_BYTES = 32 << 10, /* about: fewer, larger stages cost fewer waits */
    MIN_STAGES = 4,
    IN_FLIGHT_BYTES = 64 << 10, /* of weights, a block: the pace of memory, and no queue for others to wait in */
    SHARED_BYTES = 176 << 10,   /* more is no faster, and the rest lets the operation before end beside this one */
    SPARE_BYTES = (GROUP_OUTPUTS - TILE_STEP) * BOX_ROW_BYTES, /* what may be read behind the last stage */
};

/* What becomes of an output.  GATED: gates, each with the factor that belongs to it, whose weights come in boxes of
 * their own behind those of the gates. */
enum ending { PLAIN, ACTIVATED, GATED };
#define NO_ACTIVATION DSKV_N_ACTIVATIONS /* of plain outputs: not looked at */

template <ending ENDING> struct shape {
    enum {
        SUMS = ENDING == GATED ? 2 : 1, /* an output */
        MAX_TILE = 256 / SUMS,
        MAX_THREADS = (MAX_TILE / GROUP_OUTPUTS * GROUP_WARPS + 2) * 32
    };
};

struct stream_layout {
    int64_t n, y_stride;       /* n: outputs, GATED: gates, with as many factors behind them */
    int rows, n_k_boxes, tile; /* tile: outputs */
    int n_tiles, n_boxes, n_stages;
    enum dskv_activation activation;
};

static __host__ __device__ int consumers(int tile)
{
    return (tile + GROUP_OUTPUTS - 1) / GROUP_OUTPUTS * GROUP_WARPS;
}

#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

struct ring {
    unsigned char *stages;
    uint64_t *w_full, *x_full, *empty;
    int stage_bytes, w_bytes, w_box_bytes, x_box_bytes; /* of a stage: weights first, then x */
};

/* The slots of a ring in turn.  Counters instead of quotients: a step of the smallest tiles has few hundred cycles. */
struct turn {
    int slot, parity;
    __device__ __forceinline__ void next(int n_stages)
    {
        if (++slot == n_stages)
            slot = 0, parity ^= 1;
    }
};

/* Calls f(tile, box, slot) for every stage of this block's tiles, when its slot is empty. */
template <typename F>
__device__ __forceinline__ void for_empty_stages(const struct ring &ring, const struct stream_layout &layout, F f)
{
    struct turn turn = {0, 1}; /* a barrier that has never completed lets the other parity pass */
    for (int tile = (int)blockIdx.x; tile < layout.n_tiles; tile += (int)gridDim.x)
        for (int box = 0; box < layout.n_k_boxes; box += layout.n_boxes, turn.next(layout.n_stages)) {
            barrier_wait(ring.empty + turn.slot, turn.parity);
            f(tile, box, turn.slot);
        }
}

/* One thread: all weights.  Where k ends inside a stage, the rest reads as zeros. */
template <int SUMS>
__device__ __forceinline__ void feed_weights(const struct ring &ring, const struct stream_layout &layout,
                                             const CUtensorMap *map)
{
    const int in_flight = min(max(IN_FLIGHT_BYTES / ring.w_bytes, 1), layout.n_stages); /* stages at a time */
    int n_before = 0;
    struct turn oldest = {0, 0}; /* of those under way */
    for_empty_stages(ring, layout, [&](int tile, int box, int slot) {
        if (n_before < in_flight) {
            n_before++;
        } else {
            barrier_wait(ring.w_full + oldest.slot, oldest.parity);
            oldest.next(layout.n_stages);
        }
        barrier_expect(ring.w_full + slot, ring.w_bytes);
        unsigned char *stage = ring.stages + slot * ring.stage_bytes;
        copy_box(stage, map, 0, tile * layout.tile, box, ring.w_full + slot);
        if (SUMS == 2)
            copy_box(stage + ring.w_bytes / 2, map, 0, (int)layout.n + tile * layout.tile, box, ring.w_full + slot);
    });
}

/* One thread: all of x. */
template <int TOKENS>
__device__ __forceinline__ void feed_x(const struct ring &ring, const struct stream_layout &layout,
                                       const CUtensorMap *map)
{
    for_empty_stages(ring, layout, [&](int, int box, int slot) {
        barrier_expect(ring.x_full + slot, layout.n_boxes * ring.x_box_bytes);
        copy_box(ring.stages + slot * ring.stage_bytes + ring.w_bytes, map, 0, (int)blockIdx.y * TOKENS, box,
                 ring.x_full + slot);
    });
}

/* Sums become outputs, rounded where operations would round. */
template <typename Y, int TOKENS, ending ENDING>
__device__ __forceinline__ void finish(const float (*c)[TOKENS / 8][4], const struct stream_layout &layout,
                                       const float (*shift)[2], bool has_bias, Y (*out)[4])
{
    auto rounded = [&](int sum, int j, int i) {
        return from_float<Y>(has_bias ? c[sum][j][i] + shift[sum][i / 2] : c[sum][j][i]);
    };
    auto for_each = [&](auto value) {
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[j][i] = value(j, i);
    };
    if constexpr (ENDING == PLAIN)
        for_each([&](int j, int i) { return rounded(0, j, i); });
    else
        with_activation(layout.activation, [&](auto kind) {
            constexpr enum dskv_activation KIND = decltype(kind)::value;
            for_each([&](int j, int i) {
                if constexpr (ENDING == ACTIVATED)
                    return activated<KIND>(rounded(0, j, i));
                else
                    return activated<KIND>(rounded(0, j, i), rounded(1, j, i));
            });
        });
}

/* c: of the warp's 16 outputs, those from place on of the tile, and TOKENS rows. */
template <typename Y, int TOKENS, ending ENDING>
__device__ __forceinline__ void store(const float (*c)[TOKENS / 8][4], const struct stream_layout &layout,
                                      const float *bias, Y *y, int tile, int place, int first_row)
{
    constexpr int SUMS = ENDING == GATED ? 2 : 1;
    const int64_t output = (int64_t)tile * layout.tile + place;
    bool exists[2];
    float shift[SUMS][2] = {};
    Y out[TOKENS / 8][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        exists[half] = place + half * 8 < layout.tile && output + half * 8 < layout.n;
        for (int s = 0; s < SUMS && bias && exists[half]; s++)
            shift[s][half] = bias[s * layout.n + output + half * 8];
    }
    finish<Y, TOKENS, ENDING>(c, layout, shift, bias, out);
    y += first_row * layout.y_stride + output;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (exists[i / 2] && first_row + j * 8 + i % 2 < layout.rows)
                y[(j * 8 + i % 2) * layout.y_stride + i / 2 * 8] = out[j][i];
}

/* A warpgroup's outputs and rows of each tile, over the stages as they come.  A stage is given back when the products
 * of the next one have been asked for, so that there is always one to do. */
template <typename T, typename Y, int TOKENS, ending ENDING>
__device__ __forceinline__ void consume(const struct ring &ring, const struct stream_layout &layout, const float *bias,
                                        Y *y, int warp, int lane)
{
    using S = shape<ENDING>;
    struct turn turn = {0, 0};
    int held = -1; /* the slot that is still being read */
    const uint32_t stages = shared_address(ring.stages);
    const uint32_t group_place = (uint32_t)(warp / GROUP_WARPS * GROUP_OUTPUTS * BOX_ROW_BYTES);
    const uint64_t factors = (uint64_t)(ring.w_bytes / 2 >> 4);
    for (int tile = (int)blockIdx.x; tile < layout.n_tiles; tile += (int)gridDim.x) {
        float c[S::SUMS][TOKENS / 8][4] = {};
        for (int box = 0; box < layout.n_k_boxes; box += layout.n_boxes, turn.next(layout.n_stages)) {
            uint32_t stage = stages + turn.slot * ring.stage_bytes;
            uint64_t w = wgmma_operand(stage + group_place), x = wgmma_operand(stage + ring.w_bytes);
            int n = min(layout.n_boxes, layout.n_k_boxes - box);
            barrier_wait(ring.w_full + turn.slot, turn.parity);
            barrier_wait(ring.x_full + turn.slot, turn.parity);
            for (int i = 0; i < n; i++, w += ring.w_box_bytes >> 4, x += ring.x_box_bytes >> 4) {
                wgmma_begin();
#pragma unroll
                for (int kk = 0; kk < BOX_K / 16; kk++)
#pragma unroll
                    for (int s = 0; s < S::SUMS; s++)
                        wgmma<T, TOKENS>(c[s], w + s * factors + kk * 2, x + kk * 2);
            }
            wgmma_begin(); /* without it the compiler inserts one, and warns */
            wgmma_commit();
            wgmma_wait<1>();
            if (held >= 0 && lane == 0)
                barrier_arrive(ring.empty + held);
            held = turn.slot;
        }
        wgmma_wait<0>();
        for (int s = 0; s < S::SUMS; s++)
            wgmma_sums<TOKENS>(c[s]);
        if (lane == 0)
            barrier_arrive(ring.empty + held);
        held = -1;
        store<Y, TOKENS, ENDING>(c, layout, bias, y, tile, warp * 16 + lane / 4,
                                 (int)blockIdx.y * TOKENS + lane % 4 * 2);
    }
}

#endif

template <typename T, typename Y, int TOKENS, ending ENDING>
__global__ void __launch_bounds__((shape<ENDING>::MAX_THREADS), 1)
    stream_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                  const float *bias, Y *y, const struct stream_layout layout)
{
#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)
    using S = shape<ENDING>;
    extern __shared__ __align__(1024) unsigned char stages[];
    __shared__ uint64_t w_full[MAX_STAGES], x_full[MAX_STAGES], empty[MAX_STAGES];
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32; /* one for all lanes */
    int n_consumers = consumers(layout.tile);
    struct ring ring = {stages, w_full, x_full, empty};
    ring.w_box_bytes = layout.tile * BOX_ROW_BYTES;
    ring.x_box_bytes = TOKENS * BOX_ROW_BYTES;
    ring.w_bytes = layout.n_boxes * S::SUMS * ring.w_box_bytes;
    ring.stage_bytes = ring.w_bytes + layout.n_boxes * ring.x_box_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < layout.n_stages; i++) {
            barrier_init(w_full + i, 1);
            barrier_init(x_full + i, 1);
            barrier_init(empty + i, n_consumers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_begin();
    if (warp < n_consumers) {
        wait_for_previous(); /* y may still be read by the operation before */
        consume<T, Y, TOKENS, ENDING>(ring, layout, bias, y, warp, lane);
    } else if (warp == n_consumers && lane == 0) {
        prefetch_map(&w_map);
        feed_weights<S::SUMS>(ring, layout, &w_map);
    } else if (warp > n_consumers && lane == 0) {
        prefetch_map(&x_map);
        wait_for_previous(); /* x may still be written */
        feed_x<TOKENS>(ring, layout, &x_map);
    }
#endif
}

/* A row-major matrix of whole boxes as [cols / 64][rows][64]; what lies outside reads as zeros. */
static CUresult encode(CUtensorMap *map, enum dskv_dtype dtype, const void *data, int64_t rows, int64_t cols,
                       int64_t stride, int box_rows, int n_boxes)
{
    static encode_function function;
    if (!function && !(function = find_encode()))
        return CUDA_ERROR_NOT_FOUND;
    cuuint64_t sizes[3] = {BOX_K, (cuuint64_t)rows, (cuuint64_t)(cols / BOX_K)};
    cuuint64_t strides[2] = {(cuuint64_t)stride * 2, BOX_ROW_BYTES};
    cuuint32_t box[3] = {BOX_K, (cuuint32_t)box_rows, (cuuint32_t)n_boxes}, steps[3] = {1, 1, 1};
    return function(map, dtype == DSKV_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                    (void *)data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* The tile that gives the busiest multiprocessor the least to read: weights, and for each tile x, which counts half
 * since it is near. */
template <int TOKENS, ending ENDING>
static struct stream_layout lay_out(const struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    using S = shape<ENDING>;
    struct stream_layout layout = {};
    int least = INT_MAX;
    layout.n = p->w->n / S::SUMS;
    layout.y_stride = p->y.stride;
    layout.rows = (int)p->x.rows;
    layout.n_k_boxes = (int)(p->w->k / BOX_K);
    for (int tile = TILE_STEP; tile <= S::MAX_TILE; tile += TILE_STEP) {
        int n_tiles = (int)((layout.n + tile - 1) / tile);
        int rows = (n_tiles + cuda->n_multiprocessors - 1) / cuda->n_multiprocessors * (tile * S::SUMS + TOKENS / 2);
        if (rows < least) {
            least = rows;
            layout.tile = tile;
            layout.n_tiles = n_tiles;
        }
    }
    int w_bytes = layout.tile * S::SUMS * BOX_ROW_BYTES, bytes = w_bytes + TOKENS * BOX_ROW_BYTES; /* of a box */
    int ring_bytes = SHARED_BYTES - SPARE_BYTES;
    layout.n_boxes =
        std::min({std::max(STAGE_WEIGHT_BYTES / w_bytes, 1), ring_bytes / MIN_STAGES / bytes, layout.n_k_boxes});
    layout.n_stages = std::min(ring_bytes / (layout.n_boxes * bytes), (int)MAX_STAGES);
    return layout;
}

/* p->y: where the ending writes. */
template <typename T, typename Y, int TOKENS, ending ENDING>
static cudaError_t launch(struct dskv_cuda *cuda, const struct dskv_matmul *p, enum dskv_activation activation)
{
    using S = shape<ENDING>;
    struct stream_layout layout = lay_out<TOKENS, ENDING>(cuda, p);
    layout.activation = activation;
    CUtensorMap w_map, x_map;
    int64_t k_padded = dskv_cuda_padded(p->w->k);
    if (encode(&w_map, p->w->dtype, p->w->data, dskv_cuda_padded(p->w->n), k_padded, k_padded, layout.tile,
               layout.n_boxes) != CUDA_SUCCESS ||
        encode(&x_map, p->x.dtype, p->x.data, p->x.rows, p->w->k, p->x.stride, TOKENS, layout.n_boxes) != CUDA_SUCCESS)
        return cudaErrorInvalidValue;
    dim3 grid((unsigned)std::min(layout.n_tiles, cuda->n_multiprocessors), blocks_for(p->x.rows, TOKENS));
    dim3 block((unsigned)(consumers(layout.tile) + 2) * 32);
    queue_kernel(&cuda->base, "matmul", stream_kernel<T, Y, TOKENS, ENDING>, grid, block, SHARED_BYTES, w_map, x_map,
                 p->bias, (Y *)p->y.data, layout);
    return cudaSuccess;
}

template <typename T, typename Y, ending ENDING>
static cudaError_t launch_rows(struct dskv_cuda *cuda, const struct dskv_matmul *p, enum dskv_activation activation)
{
    if (p->x.rows <= 8)
        return launch<T, Y, 8, ENDING>(cuda, p, activation);
    if (p->x.rows <= 16)
        return launch<T, Y, 16, ENDING>(cuda, p, activation);
    if (p->x.rows <= 32)
        return launch<T, Y, 32, ENDING>(cuda, p, activation);
    return launch<T, Y, 64, ENDING>(cuda, p, activation);
}

template <typename T, typename Y, ending ENDING> static bool allow_shared(void)
{
    auto allow = [](auto kernel) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES) == cudaSuccess;
    };
    return allow(stream_kernel<T, Y, 8, ENDING>) && allow(stream_kernel<T, Y, 16, ENDING>) &&
           allow(stream_kernel<T, Y, 32, ENDING>) && allow(stream_kernel<T, Y, 64, ENDING>);
}
template <typename T> static bool allow_all(void)
{
    return allow_shared<T, float, PLAIN>() && allow_shared<T, T, PLAIN>() && allow_shared<T, T, ACTIVATED>() &&
           allow_shared<T, T, GATED>();
}

/* What was compiled counts, not the GPU: code for an older one, compiled anew for a newer, does not wait for the kernel
 * ahead. */
extern "C" int dskv_cuda_begins_early(void)
{
    struct cudaFuncAttributes compiled;
    bool can = cudaFuncGetAttributes(&compiled, stream_kernel<__half, __half, 8, PLAIN>) == cudaSuccess &&
               compiled.ptxVersion >= 90;
    (void)cudaGetLastError(); /* a refusal is an answer */
    return can;
}

/* The kernel's body is compiled for 9.0 itself alone; elsewhere it is empty and has no barriers. */
static bool has_body(void)
{
    struct cudaFuncAttributes compiled;
    return cudaFuncGetAttributes(&compiled, stream_kernel<__half, __half, 8, PLAIN>) == cudaSuccess &&
           compiled.sharedSizeBytes > 0;
}

extern "C" int dskv_cuda_matmul_stream_open(void)
{
    bool can = has_body() && find_encode() && allow_all<__half>() && allow_all<__nv_bfloat16>();
    (void)cudaGetLastError(); /* a refusal is an answer */
    return can;
}

static bool streams(const struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    return cuda->has_stream_matmul && p->w->dtype != DSKV_F32 && p->w->k > 0 && p->w->k % BOX_K == 0 &&
           p->x.stride % 8 == 0 && (uintptr_t)p->x.data % 16 == 0;
}

extern "C" int dskv_cuda_matmul_stream(struct dskv_device *device, const struct dskv_matmul *p)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    if (!streams(cuda, p))
        return 0;
    auto launch_plain = [&](auto t) {
        using T = decltype(t);
        return p->y.dtype == DSKV_F32 ? launch_rows<T, float, PLAIN>(cuda, p, NO_ACTIVATION)
                                      : launch_rows<T, T, PLAIN>(cuda, p, NO_ACTIVATION);
    };
    cudaError_t error = p->w->dtype == DSKV_F16 ? launch_plain(__half()) : launch_plain(__nv_bfloat16());
    dskv_cuda_note(cuda, error, "matmul");
    return 1;
}

extern "C" int dskv_cuda_matmul_stream_activate(struct dskv_device *device, const struct dskv_matmul_activate *p)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    struct dskv_matmul matmul = p->matmul;
    if (!streams(cuda, &matmul))
        return 0;
    matmul.y = p->activate.out;
    auto launch_activated = [&](auto t) {
        using T = decltype(t);
        return p->activate.gated ? launch_rows<T, T, GATED>(cuda, &matmul, p->activate.kind)
                                 : launch_rows<T, T, ACTIVATED>(cuda, &matmul, p->activate.kind);
    };
    cudaError_t error = matmul.w->dtype == DSKV_F16 ? launch_activated(__half()) : launch_activated(__nv_bfloat16());
    dskv_cuda_note(cuda, error, "matmul");
    return 1;
}
