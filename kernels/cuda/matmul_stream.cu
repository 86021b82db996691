/* Matmul of few rows at the pace of memory: weights stream through a ring in shared memory (compute capability 9.0).
 *
 * Same order as matmul.cu: k ascending in steps of 16, one f32 accumulator per output, so the same bits.
 * Grid: (persistent blocks over tiles of whole units of outputs, groups of TOKENS rows).  Two warps feed: a thread of
 * each asks the copy engine for stages of weights and of x; the others multiply, in one of two ways.  Warpgroups take
 * four units each and leave the operands where they are (wgmma.cuh; what a tile lacks of whole warpgroups is
 * multiplied, too, and dropped).  Gated outputs pair two far rows of weights in one thread: warps load them into
 * registers and take 16 outputs and up to 16 rows each.
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
    UNIT = 16, /* outputs of a warp */
    GATED_UNIT = 8,
    MAX_STAGES = 32,
    STAGE_WEIGHT_BYTES = 32 << 10, /* about: fewer, larger stages cost fewer waits */
    MIN_STAGES = 4,
    IN_FLIGHT_BYTES = 64 << 10, /* of weights, a block: the pace of memory, and no queue for others to wait in */
    SHARED_BYTES = 176 << 10,   /* more is no faster, and the rest lets the operation before end beside this one */
    GROUP_UNITS = 4,            /* of a warpgroup */
    SPARE_BYTES = (GROUP_UNITS - 1) * UNIT * BOX_ROW_BYTES, /* what a warpgroup may read behind the last stage */
};

/* What becomes of an output.  GATED: a unit has eight outputs of the gate and the eight factors that belong to them, so
 * that a thread holds both; weights come in two boxes, of either kind. */
enum ending { PLAIN, ACTIVATED, GATED };
#define NO_ACTIVATION DSKV_N_ACTIVATIONS /* of plain outputs: not looked at */

/* How TOKENS rows and a tile's units are dealt to warps: by warpgroups. */
template <int TOKENS, ending ENDING> struct deal {
    enum { MAX_UNITS = 16, MAX_CONSUMERS = MAX_UNITS };
    static __host__ __device__ int consumers(int n_units)
    {
        return (n_units + GROUP_UNITS - 1) / GROUP_UNITS * GROUP_UNITS;
    }
};
template <int TOKENS> struct deal<TOKENS, GATED> { /* few rows a warp: many warps hide the latency of the products */
    enum {
        BLOCKS = TOKENS > 8 ? 2 : 1,     /* of 8 rows, a warp */
        GROUPS = TOKENS / 8 / BLOCKS,    /* warps that share a unit of outputs */
        MAX_UNITS = GROUPS > 1 ? 7 : 14, /* as many warps as have registers enough */
        MAX_CONSUMERS = MAX_UNITS * GROUPS
    };
    static __host__ __device__ int consumers(int n_units)
    {
        return n_units * GROUPS;
    }
};

struct stream_layout {
    int64_t n, y_stride;          /* n: outputs, GATED: gates, with as many factors behind them */
    int rows, n_k_boxes, n_units; /* units of outputs in a tile */
    int n_tiles, n_boxes, n_stages;
    enum dskv_activation activation;
};

#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)

/* n_boxes boxes of 64 k-values at once, as the map has it. */
__device__ __forceinline__ void copy_boxes(unsigned char *shared, const CUtensorMap *map, int row, int box,
                                           uint64_t *barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(shared_address(shared)),
        "l"(map), "r"(0), "r"(row), "r"(box), "r"(shared_address(barrier))
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

struct ring {
    unsigned char *stages;
    uint64_t *w_full, *x_full, *empty;
    int stage_bytes, w_box_bytes, x_box_bytes;
};

/* One thread: every stage of one operand, for all of this block's tiles.  further: from the rows of its first box to
 * those of its second, which lies behind it; 0: there is none.  in_flight: stages under way at a time.  Where k ends
 * inside a stage, the rest reads as zeros.  Counters instead of quotients: a step of the smallest tiles has few hundred
 * cycles. */
__device__ __forceinline__ void feed(const struct ring &ring, uint64_t *full, const struct stream_layout &layout,
                                     const CUtensorMap *map, int place, int bytes, int row, int row_step, int further,
                                     int in_flight)
{
    int slot = 0, parity = 1;                   /* a barrier that has never completed lets the other parity pass */
    int oldest = -in_flight, oldest_parity = 0; /* of those under way */
    for (int tile = (int)blockIdx.x; tile < layout.n_tiles; tile += (int)gridDim.x, row += row_step)
        for (int box = 0; box < layout.n_k_boxes; box += layout.n_boxes) {
            barrier_wait(ring.empty + slot, parity);
            if (oldest >= 0)
                barrier_wait(full + oldest, oldest_parity);
            if (++oldest == layout.n_stages)
                oldest = 0, oldest_parity ^= 1;
            barrier_expect(full + slot, bytes);
            unsigned char *stage = ring.stages + slot * ring.stage_bytes + place;
            copy_boxes(stage, map, row, box, full + slot);
            if (further)
                copy_boxes(stage + bytes / 2, map, row + further, box, full + slot);
            if (++slot == layout.n_stages)
                slot = 0, parity ^= 1;
        }
}

__device__ __forceinline__ void await_stage(const struct ring &ring, int slot, int parity)
{
    barrier_wait(ring.w_full + slot, parity);
    barrier_wait(ring.x_full + slot, parity);
}

template <typename Y, int TOKENS, ending ENDING>
__device__ __forceinline__ void store(const float (*c)[4], const struct stream_layout &layout, const float *bias, Y *y,
                                      int64_t first_output, int first_row)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int64_t output = first_output + i / 2 * 8;
        float shift = bias && output < layout.n ? bias[output] : 0.0f;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            int row = first_row + j * 8 + i % 2;
            Y value = from_float<Y>(bias ? c[j][i] + shift : c[j][i]);
            if (output < layout.n && row < layout.rows)
                y[row * layout.y_stride + output] = ENDING == PLAIN ? value : activated(layout.activation, value);
        }
    }
}

/* A warpgroup's units of outputs of each tile, over the stages as they come.  A stage is given back when the products
 * of the next one have been asked for, so that there is always one to do. */
template <typename T, typename Y, int TOKENS, ending ENDING>
__device__ __forceinline__ void consume(const struct ring &ring, const struct stream_layout &layout, const float *bias,
                                        Y *y, int warp, int lane)
{
    int slot = 0, parity = 0, held = -1; /* held: the slot that is still being read */
    const uint32_t stages = shared_address(ring.stages);
    const uint32_t w_place = (uint32_t)(warp / GROUP_UNITS * GROUP_UNITS * UNIT * BOX_ROW_BYTES);
    for (int tile = (int)blockIdx.x; tile < layout.n_tiles; tile += (int)gridDim.x) {
        float c[TOKENS / 8][4] = {};
        for (int box = 0; box < layout.n_k_boxes; box += layout.n_boxes) {
            uint32_t stage = stages + slot * ring.stage_bytes;
            uint64_t w = wgmma_operand(stage + w_place);
            uint64_t x = wgmma_operand(stage + layout.n_boxes * ring.w_box_bytes);
            int n = min(layout.n_boxes, layout.n_k_boxes - box);
            await_stage(ring, slot, parity);
            for (int i = 0; i < n; i++, w += ring.w_box_bytes >> 4, x += ring.x_box_bytes >> 4) {
                wgmma_begin();
#pragma unroll
                for (int kk = 0; kk < BOX_K / 16; kk++)
                    wgmma<T, TOKENS>(c, w + kk * 2, x + kk * 2);
            }
            wgmma_begin(); /* without it the compiler inserts one, and warns */
            wgmma_commit();
            wgmma_wait<1>();
            if (held >= 0 && lane == 0)
                barrier_arrive(ring.empty + held);
            held = slot;
            if (++slot == layout.n_stages)
                slot = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        wgmma_sums<TOKENS>(c);
        if (lane == 0)
            barrier_arrive(ring.empty + held);
        held = -1;
        if (warp < layout.n_units)
            store<Y, TOKENS, ENDING>(c, layout, bias, y, ((int64_t)tile * layout.n_units + warp) * UNIT + lane / 4,
                                     (int)blockIdx.y * TOKENS + lane % 4 * 2);
    }
}

/* The operands of 32 k-values, in registers. */
template <int TOKENS> struct operands {
    uint32_t w[2][4], x[2 * deal<TOKENS, GATED>::BLOCKS * 2];
};

/* w: the lane's row of a box, x: the warp's rows, half: which 32 of its 64 k-values. */
template <int TOKENS>
__device__ __forceinline__ void load_operands(struct operands<TOKENS> &o, uint32_t w, uint32_t x, int half, int lane)
{
    for (int kk = 0; kk < 2; kk++)
        load_matrices(o.w[kk], w + ((half * 4 + kk * 2 + lane / 16) ^ (lane & 7)) * 16);
    /* One load serves both steps of k, or one step of two blocks of rows. */
    if constexpr (deal<TOKENS, GATED>::BLOCKS == 1)
        load_matrices(o.x, x + lane % 8 * BOX_ROW_BYTES + ((half * 4 + lane / 8) ^ (lane & 7)) * 16);
    else
        for (int kk = 0; kk < 2; kk++)
            load_matrices(o.x + kk * 4, x + (lane / 16 * 8 + lane % 8) * BOX_ROW_BYTES +
                                            ((half * 4 + kk * 2 + lane / 8 % 2) ^ (lane & 7)) * 16);
}

template <typename T, int TOKENS>
__device__ __forceinline__ void multiply(float (*c)[4], const struct operands<TOKENS> &o)
{
    const int n = deal<TOKENS, GATED>::BLOCKS;
#pragma unroll
    for (int kk = 0; kk < 2; kk++)
#pragma unroll
        for (int j = 0; j < n; j++)
            mma<T>(c[j], o.w[kk], o.x[(kk * n + j) * 2], o.x[(kk * n + j) * 2 + 1]);
}

/* The lane's output of GATED units, each of all its rows. */
template <typename Y, int TOKENS>
__device__ __forceinline__ void store_gated(const float (*c)[4], const struct stream_layout &layout, const float *bias,
                                            Y *y, int64_t output, int first_row)
{
    if (output >= layout.n)
        return;
    float gate_shift = bias ? bias[output] : 0.0f, shift = bias ? bias[layout.n + output] : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < deal<TOKENS, GATED>::BLOCKS; j++) {
            int row = first_row + j * 8 + i;
            Y gate = from_float<Y>(bias ? c[j][i] + gate_shift : c[j][i]);
            Y factor = from_float<Y>(bias ? c[j][i + 2] + shift : c[j][i + 2]);
            if (row < layout.rows)
                y[row * layout.y_stride + output] = activated(layout.activation, gate, factor);
        }
}

/* A warp's unit of gated outputs of each tile, over the stages as they come.  The next operands are on their way while
 * the last ones are multiplied: a chain of dependent products is what bounds the smallest tiles. */
template <typename T, typename Y, int TOKENS>
__device__ __forceinline__ void consume_gated(const struct ring &ring, const struct stream_layout &layout,
                                              const float *bias, Y *y, int warp, int lane)
{
    using D = deal<TOKENS, GATED>;
    int unit = warp / D::GROUPS, group = warp % D::GROUPS, slot = 0, parity = 0;
    const int w_bytes = layout.n_boxes * layout.n_units * UNIT * BOX_ROW_BYTES;
    const uint32_t w_rows =
        shared_address(ring.stages) + (unit * 8 + lane % 8) * BOX_ROW_BYTES + (lane & 8 ? w_bytes / 2 : 0);
    const uint32_t x_rows = shared_address(ring.stages) + w_bytes + group * D::BLOCKS * 8 * BOX_ROW_BYTES;
    for (int tile = (int)blockIdx.x; tile < layout.n_tiles; tile += (int)gridDim.x) {
        float c[D::BLOCKS][4] = {};
        struct operands<TOKENS> first, second;
        int box_of_stage = 0;
        uint32_t w = 0, x = 0;
        auto enter_box = [&]() {
            if (box_of_stage == 0) {
                await_stage(ring, slot, parity);
                w = w_rows + slot * ring.stage_bytes;
                x = x_rows + slot * ring.stage_bytes;
            }
        };
        auto leave_box = [&](bool last) {
            w += ring.w_box_bytes;
            x += ring.x_box_bytes;
            if (++box_of_stage == layout.n_boxes || last) {
                __syncwarp(); /* all lanes have read it */
                if (lane == 0)
                    barrier_arrive(ring.empty + slot);
                box_of_stage = 0;
                if (++slot == layout.n_stages)
                    slot = 0, parity ^= 1;
            }
        };
        enter_box();
        load_operands<TOKENS>(first, w, x, 0, lane);
        for (int box = 0; box < layout.n_k_boxes; box++) {
            load_operands<TOKENS>(second, w, x, 1, lane);
            leave_box(box + 1 == layout.n_k_boxes);
            multiply<T, TOKENS>(c, first);
            if (box + 1 < layout.n_k_boxes) {
                enter_box();
                load_operands<TOKENS>(first, w, x, 0, lane);
            }
            multiply<T, TOKENS>(c, second);
        }
        store_gated<Y, TOKENS>(c, layout, bias, y, ((int64_t)tile * layout.n_units + unit) * 8 + lane / 4,
                               (int)blockIdx.y * TOKENS + group * D::BLOCKS * 8 + lane % 4 * 2);
    }
}

#endif

template <typename T, typename Y, int TOKENS, ending ENDING>
__global__ void __launch_bounds__((deal<TOKENS, ENDING>::MAX_CONSUMERS + 2) * 32, 1)
    stream_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                  const float *bias, Y *y, const struct stream_layout layout)
{
#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)
    extern __shared__ __align__(1024) unsigned char stages[];
    __shared__ uint64_t w_full[MAX_STAGES], x_full[MAX_STAGES], empty[MAX_STAGES];
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32; /* one for all lanes */
    int n_consumers = deal<TOKENS, ENDING>::consumers(layout.n_units);
    struct ring ring = {stages, w_full, x_full, empty};
    int tile_rows = layout.n_units * (ENDING == GATED ? GATED_UNIT : UNIT); /* of a box */
    int w_bytes = layout.n_boxes * layout.n_units * UNIT * BOX_ROW_BYTES,
        x_bytes = layout.n_boxes * TOKENS * BOX_ROW_BYTES;
    ring.w_box_bytes = tile_rows * BOX_ROW_BYTES;
    ring.x_box_bytes = TOKENS * BOX_ROW_BYTES;
    ring.stage_bytes = w_bytes + x_bytes;
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
        if constexpr (ENDING == GATED)
            consume_gated<T, Y, TOKENS>(ring, layout, bias, y, warp, lane);
        else
            consume<T, Y, TOKENS, ENDING>(ring, layout, bias, y, warp, lane);
    } else if (warp == n_consumers && lane == 0) {
        prefetch_map(&w_map);
        feed(ring, w_full, layout, &w_map, 0, w_bytes, (int)blockIdx.x * tile_rows, (int)gridDim.x * tile_rows,
             ENDING == GATED ? (int)layout.n : 0, min(max(IN_FLIGHT_BYTES / w_bytes, 1), layout.n_stages));
    } else if (warp > n_consumers && lane == 0) {
        prefetch_map(&x_map);
        wait_for_previous(); /* x may still be written */
        feed(ring, x_full, layout, &x_map, w_bytes, x_bytes, (int)blockIdx.y * TOKENS, 0, 0, layout.n_stages);
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
static struct stream_layout lay_out(const struct dskv_matmul *p, int n_multiprocessors)
{
    struct stream_layout layout = {};
    int unit = ENDING == GATED ? GATED_UNIT : UNIT, least = INT_MAX;
    layout.n = ENDING == GATED ? p->w->n / 2 : p->w->n;
    layout.y_stride = p->y.stride;
    layout.rows = (int)p->x.rows;
    layout.n_k_boxes = (int)(p->w->k / BOX_K);
    int n_units = (int)((layout.n + unit - 1) / unit);
    for (int tile = 2; tile <= deal<TOKENS, ENDING>::MAX_UNITS; tile++) {
        int n_tiles = (n_units + tile - 1) / tile;
        int rows = (n_tiles + n_multiprocessors - 1) / n_multiprocessors * (tile * UNIT + TOKENS / 2);
        if (rows < least) {
            least = rows;
            layout.n_units = tile;
            layout.n_tiles = n_tiles;
        }
    }
    int w_box_bytes = layout.n_units * UNIT * BOX_ROW_BYTES, box_bytes = w_box_bytes + TOKENS * BOX_ROW_BYTES;
    int ring_bytes = ENDING == GATED ? SHARED_BYTES : SHARED_BYTES - SPARE_BYTES;
    layout.n_boxes = std::min(
        {std::max(STAGE_WEIGHT_BYTES / w_box_bytes, 1), ring_bytes / MIN_STAGES / box_bytes, layout.n_k_boxes});
    layout.n_stages = std::min(ring_bytes / (layout.n_boxes * box_bytes), (int)MAX_STAGES);
    return layout;
}

/* p->y: where the ending writes. */
template <typename T, typename Y, int TOKENS, ending ENDING>
static cudaError_t launch(struct dskv_cuda *cuda, const struct dskv_matmul *p, enum dskv_activation activation)
{
    struct stream_layout layout = lay_out<TOKENS, ENDING>(p, cuda->n_multiprocessors);
    layout.activation = activation;
    CUtensorMap w_map, x_map;
    int64_t k_padded = dskv_cuda_padded(p->w->k);
    if (encode(&w_map, p->w->dtype, p->w->data, dskv_cuda_padded(p->w->n), k_padded, k_padded,
               layout.n_units * (ENDING == GATED ? GATED_UNIT : UNIT), layout.n_boxes) != CUDA_SUCCESS ||
        encode(&x_map, p->x.dtype, p->x.data, p->x.rows, p->w->k, p->x.stride, TOKENS, layout.n_boxes) != CUDA_SUCCESS)
        return cudaErrorInvalidValue;
    dim3 grid((unsigned)std::min(layout.n_tiles, cuda->n_multiprocessors), blocks_for(p->x.rows, TOKENS));
    dim3 block((unsigned)(deal<TOKENS, ENDING>::consumers(layout.n_units) + 2) * 32);
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
    return launch<T, Y, 32, ENDING>(cuda, p, activation);
}

template <typename T, typename Y, ending ENDING> static bool allow_shared(void)
{
    auto allow = [](auto kernel) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES) == cudaSuccess;
    };
    return allow(stream_kernel<T, Y, 8, ENDING>) && allow(stream_kernel<T, Y, 16, ENDING>) &&
           allow(stream_kernel<T, Y, 32, ENDING>);
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
