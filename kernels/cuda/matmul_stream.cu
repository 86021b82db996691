/* Matmul of few rows at the pace of memory: weights stream through a ring (matmul_ring.cuh).
 *
 * Grid: (persistent blocks over tiles of outputs, groups of TOKENS rows).  Two warps feed: a thread of each asks the
 * copy engine for stages of weights and of x; the others are warpgroups that multiply 64 outputs each and leave the
 * operands where they are (wgmma.cuh; what a tile lacks of whole warpgroups is multiplied, too, and dropped).  Gated
 * outputs pair two far rows of weights: a warpgroup multiplies 64 gates and the 64 factors that belong to them.
 */
#include "cuda/matmul_ring.cuh"

#include <algorithm>
#include <climits>

enum {
    GROUP_OUTPUTS = 64,
    STAGE_WEIGHT_BYTES = 32 << 10, /* about: fewer, larger stages cost fewer waits */
    MIN_STAGES = 4,
    SPARE_BYTES = (GROUP_OUTPUTS - TILE_STEP) * BOX_ROW_BYTES, /* what may be read behind the last stage */
};

/* More is no faster for few rows, and the rest lets the operation before end beside this one. */
template <int TOKENS> constexpr int shared_bytes = TOKENS == 64 ? 224 << 10 : 176 << 10;

template <ending ENDING> struct shape {
    enum {
        SUMS = ENDING == GATED ? 2 : 1, /* an output */
        MAX_TILE = 256 / SUMS,
        MAX_THREADS = (MAX_TILE / GROUP_OUTPUTS * GROUP_WARPS + 2) * 32
    };
};

static __host__ __device__ int consumers(int tile)
{
    return (tile + GROUP_OUTPUTS - 1) / GROUP_OUTPUTS * GROUP_WARPS;
}

#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)

/* Sums become outputs, rounded where operations would round. */
template <typename Y, int TOKENS, ending ENDING>
__device__ __forceinline__ void finish(const float (*c)[TOKENS / 8][4], const ring_layout &layout,
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
__device__ __forceinline__ void store(const float (*c)[TOKENS / 8][4], const ring_layout &layout, const float *bias,
                                      Y *y, int tile, int place, int first_row)
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

/* A warpgroup's outputs and rows of each tile, over the stages as they come: a run of instructions a box, so that there
 * is always one to do.  A stage is given back when the first of the next one has been asked for. */
template <typename T, typename Y, int TOKENS, ending ENDING>
__device__ __forceinline__ void consume(const ring &r, const ring_layout &layout, const float *bias, Y *y, int warp,
                                        int lane)
{
    using S = shape<ENDING>;
    const uint32_t group_place = (uint32_t)(warp / GROUP_WARPS * GROUP_OUTPUTS * BOX_ROW_BYTES);
    const uint64_t factors = kept(r.w_bytes / 2 >> 4);
    const int n_tiles = (int)kept(layout.n_tiles), n_k_boxes = (int)kept(layout.n_k_boxes),
              n_boxes = (int)kept(layout.n_boxes), w_box = (int)kept(layout.tile * BOX_ROW_BYTES >> 4);
    constexpr int X_BOX = TOKENS * BOX_ROW_BYTES >> 4;
    stage_of_ring stage(r, 0);
    for (int tile = (int)blockIdx.x; tile < n_tiles; tile += (int)gridDim.x) {
        float c[S::SUMS][TOKENS / 8][4] = {};
        uint32_t held = 0; /* the barriers of the stage that is still being read */
        for (int box = 0; box < n_k_boxes; box += n_boxes, stage.next(r)) {
            uint64_t w = wgmma_operand(stage.memory + group_place), x = wgmma_operand(stage.memory + r.w_bytes);
            const int n = min(n_boxes, n_k_boxes - box);
            barrier_wait(stage.barriers + W_FULL, stage.parity);
            barrier_wait(stage.barriers + X_FULL, stage.parity);
            for (int i = 0; i < n; i++, w += w_box, x += X_BOX) {
                wgmma_begin();
#pragma unroll
                for (int kk = 0; kk < BOX_K / 16; kk++)
#pragma unroll
                    for (int s = 0; s < S::SUMS; s++)
                        wgmma<T, TOKENS>(c[s], w + s * factors + kk * 2, x + kk * 2);
                wgmma_commit();
                wgmma_wait<1>();
                if (i == 0 && held && lane == 0)
                    barrier_arrive(held + EMPTY);
            }
            held = stage.barriers;
        }
        wgmma_wait<0>();
        for (int s = 0; s < S::SUMS; s++)
            wgmma_sums<TOKENS>(c[s]);
        if (lane == 0)
            barrier_arrive(held + EMPTY);
        store<Y, TOKENS, ENDING>(c, layout, bias, y, tile, warp * 16 + lane / 4,
                                 (int)blockIdx.y * TOKENS + lane % 4 * 2);
    }
}

#endif

template <typename T, typename Y, int TOKENS, ending ENDING>
__global__ void __launch_bounds__((shape<ENDING>::MAX_THREADS), 1)
    stream_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                  const float *bias, Y *y, const ring_layout layout)
{
#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)
    using S = shape<ENDING>;
    extern __shared__ __align__(1024) unsigned char stages[];
    __shared__ uint64_t barriers[MAX_STAGES * BARRIERS_BYTES / sizeof(uint64_t)];
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32; /* one for all lanes */
    int n_consumers = consumers(layout.tile);
    ring r(stages, barriers, layout.n_stages, layout.n_boxes * S::SUMS * layout.tile * BOX_ROW_BYTES,
           layout.n_boxes * TOKENS * BOX_ROW_BYTES);
    r.open(n_consumers);
    let_next_begin();
    if (warp < n_consumers) {
        wait_for_previous(); /* y may still be read by the operation before */
        consume<T, Y, TOKENS, ENDING>(r, layout, bias, y, warp, lane);
    } else if (warp == n_consumers && lane == 0) {
        feed_weights<S::SUMS>(r, layout, &w_map);
    } else if (warp > n_consumers && lane == 0) {
        feed_x(r, layout, &x_map, (int)blockIdx.y * TOKENS);
    }
#endif
}

/* The tile that gives the busiest multiprocessor the least to read: weights, and for each tile x, which counts half
 * since it is near. */
template <int TOKENS, ending ENDING>
static ring_layout lay_out(const struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    using S = shape<ENDING>;
    ring_layout layout = {};
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
    int ring_bytes = shared_bytes<TOKENS> - SPARE_BYTES;
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
    ring_layout layout = lay_out<TOKENS, ENDING>(cuda, p);
    layout.activation = activation;
    CUtensorMap w_map, x_map;
    if (!describe_operands(&w_map, &x_map, p, layout, TOKENS))
        return cudaErrorInvalidValue;
    dim3 grid((unsigned)std::min(layout.n_tiles, cuda->n_multiprocessors), blocks_for(p->x.rows, TOKENS));
    dim3 block((unsigned)(consumers(layout.tile) + 2) * 32);
    queue_kernel(&cuda->base, "matmul", stream_kernel<T, Y, TOKENS, ENDING>, grid, block, shared_bytes<TOKENS>, w_map,
                 x_map, p->bias, (Y *)p->y.data, layout);
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
    auto allow = [](auto kernel, int bytes) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess;
    };
    return allow(stream_kernel<T, Y, 8, ENDING>, shared_bytes<8>) &&
           allow(stream_kernel<T, Y, 16, ENDING>, shared_bytes<16>) &&
           allow(stream_kernel<T, Y, 32, ENDING>, shared_bytes<32>) &&
           allow(stream_kernel<T, Y, 64, ENDING>, shared_bytes<64>);
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
    bool can = has_body() && find_encode() && allow_all<__half>() && allow_all<__nv_bfloat16>() &&
               dskv_cuda_matmul_batch_open();
    (void)cudaGetLastError(); /* a refusal is an answer */
    return can;
}

extern "C" int dskv_cuda_matmul_streams(const struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    return cuda->has_stream_matmul && p->w->dtype != DSKV_F32 && p->w->k > 0 && p->w->k % BOX_K == 0 &&
           p->x.stride % 8 == 0 && (uintptr_t)p->x.data % 16 == 0;
}

extern "C" int dskv_cuda_matmul_stream(struct dskv_device *device, const struct dskv_matmul *p)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    if (!dskv_cuda_matmul_streams(cuda, p))
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
    if (!dskv_cuda_matmul_streams(cuda, &matmul))
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
