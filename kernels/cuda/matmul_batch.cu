/* Matmul of a batch, up to 64 rows, by weights of so few outputs that each multiprocessor has some of its own: at the
 * pace of memory through a ring (matmul_ring.cuh).
 *
 * Here x is the left operand, whose rows the instruction has 64 of, and weights are the right one, which may be as
 * narrow as a multiprocessor's share: no product is made to be dropped, and shared memory, where x takes more than the
 * weights, is read half as much as with the operands the other way round.
 *
 * Grid: (tiles of OUTPUTS outputs); two warps feed, a warpgroup multiplies.
 */
#include "cuda/matmul_ring.cuh"

#include <algorithm>

enum {
    MAX_ROWS = 64,
    ROWS_STEP = 8, /* the swizzle's period */
    MIN_OUTPUTS = 16,
    MAX_OUTPUTS = DSKV_CUDA_BATCH_OUTPUTS,
    THREADS = (GROUP_WARPS + 2) * 32,
    SHARED_BYTES = 224 << 10,
    SPARE_BYTES = (MAX_ROWS - ROWS_STEP) * BOX_ROW_BYTES, /* what may be read behind the last stage */
};

/* What lies outside of a matrix takes the copy engine several times as long as what lies in it, so boxes of x have no
 * more rows than they need.  The instruction reads 64 all the same, and makes sums of whatever follows. */
static __host__ __device__ int rows_of_box(int rows)
{
    return (rows + ROWS_STEP - 1) / ROWS_STEP * ROWS_STEP;
}

template <int OUTPUTS> struct tile_shape {
    enum {
        N_BOXES = OUTPUTS < 56 ? 2 : 1, /* a stage: about 20 KB, so that there are enough of them */
        W_BOX_BYTES = OUTPUTS * BOX_ROW_BYTES,
    };
};

#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)

/* Sums become outputs, rounded where operations would round.  c: of 16 rows a warp and all outputs of the tile; a lane
 * has two rows, eight apart, of pairs of outputs. */
template <typename T, int OUTPUTS, ending ENDING>
__device__ __forceinline__ void store_tile(const float (*c)[4], const ring_layout &layout, const float *bias, T *y)
{
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
    const int64_t first = (int64_t)blockIdx.x * OUTPUTS + lane % 4 * 2;
    const bool in_pairs = (size_t)y % (2 * sizeof(T)) == 0 && layout.y_stride % 2 == 0;
    T out[OUTPUTS / 8][4];
    auto finish = [&](auto value) {
#pragma unroll
        for (int j = 0; j < OUTPUTS / 8; j++) {
            float shift[2] = {0.0f, 0.0f};
            for (int i = 0; i < 2 && bias; i++)
                if (first + j * 8 + i < layout.n)
                    shift[i] = bias[first + j * 8 + i];
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[j][i] = value(from_float<T>(bias ? c[j][i] + shift[i % 2] : c[j][i]));
        }
    };
    if constexpr (ENDING == PLAIN)
        finish([](T x) { return x; });
    else
        with_activation(layout.activation,
                        [&](auto kind) { finish([](T x) { return activated<decltype(kind)::value>(x); }); });
    y += row * layout.y_stride + first;
#pragma unroll
    for (int half = 0; half < 2; half++, y += 8 * layout.y_stride) {
        if (row + half * 8 >= layout.rows)
            break;
#pragma unroll
        for (int j = 0; j < OUTPUTS / 8; j++) {
            if (in_pairs && first + j * 8 + 1 < layout.n)
                store<T, 2>(y + j * 8, {out[j][half * 2], out[j][half * 2 + 1]});
            else
                for (int i = 0; i < 2; i++)
                    if (first + j * 8 + i < layout.n)
                        y[j * 8 + i] = out[j][half * 2 + i];
        }
    }
}

/* The warpgroup: all products of a stage are one run, so that there is always one to do; a stage is given back when
 * the next one's have been asked for. */
template <typename T, int OUTPUTS>
__device__ __forceinline__ void consume(const ring &r, const ring_layout &layout, float (*c)[4])
{
    using S = tile_shape<OUTPUTS>;
    const int n_k_boxes = (int)kept(layout.n_k_boxes), x_box = (int)kept(r.x_bytes / S::N_BOXES >> 4),
              lane = (int)threadIdx.x % 32;
    stage_of_ring stage(r, 0);
    uint32_t held = 0; /* the barriers of the stage that is still being read */
    for (int box = 0; box < n_k_boxes; box += S::N_BOXES, stage.next(r)) {
        const uint64_t w = wgmma_operand(stage.memory), x = wgmma_operand(stage.memory + S::N_BOXES * S::W_BOX_BYTES);
        barrier_wait(stage.barriers + W_FULL, stage.parity);
        barrier_wait(stage.barriers + X_FULL, stage.parity);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < S::N_BOXES; i++)
#pragma unroll
            for (int kk = 0; kk < BOX_K / 16; kk++)
                wgmma<T, OUTPUTS>(c, x + i * x_box + kk * 2, w + (i * S::W_BOX_BYTES >> 4) + kk * 2);
        wgmma_commit();
        wgmma_wait<1>();
        if (held && lane == 0)
            barrier_arrive(held + EMPTY);
        held = stage.barriers;
    }
    wgmma_wait<0>();
    wgmma_sums<OUTPUTS>(c);
}

#endif

template <typename T, int OUTPUTS, ending ENDING>
__global__ void __launch_bounds__(THREADS, 1)
    batch_matmul_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                        const float *bias, T *y, const ring_layout layout)
{
#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)
    using S = tile_shape<OUTPUTS>;
    extern __shared__ __align__(1024) unsigned char stages[];
    __shared__ uint64_t barriers[MAX_STAGES * BARRIERS_BYTES / sizeof(uint64_t)];
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32; /* one for all lanes */
    ring r(stages, barriers, layout.n_stages, S::N_BOXES * S::W_BOX_BYTES,
           S::N_BOXES * rows_of_box(layout.rows) * BOX_ROW_BYTES);
    r.open(GROUP_WARPS);
    let_next_begin();
    if (warp < GROUP_WARPS) {
        float c[OUTPUTS / 8][4] = {};
        wait_for_previous(); /* y may still be read by the operation before */
        consume<T, OUTPUTS>(r, layout, c);
        store_tile<T, OUTPUTS, ENDING>(c, layout, bias, y);
    } else if (warp == GROUP_WARPS && lane == 0) {
        feed_weights<1>(r, layout, &w_map);
    } else if (warp > GROUP_WARPS && lane == 0) {
        feed_x(r, layout, &x_map, 0);
    }
#endif
}

template <typename T, int OUTPUTS, ending ENDING>
static cudaError_t launch(struct dskv_cuda *cuda, const struct dskv_matmul *p, enum dskv_activation activation)
{
    using S = tile_shape<OUTPUTS>;
    const int x_rows = rows_of_box((int)p->x.rows);
    ring_layout layout = {};
    layout.n = p->w->n;
    layout.y_stride = p->y.stride;
    layout.rows = (int)p->x.rows;
    layout.n_k_boxes = (int)(p->w->k / BOX_K);
    layout.tile = OUTPUTS;
    layout.n_tiles = (int)((layout.n + OUTPUTS - 1) / OUTPUTS);
    layout.n_boxes = S::N_BOXES;
    layout.n_stages = std::min((SHARED_BYTES - SPARE_BYTES) / (S::N_BOXES * (S::W_BOX_BYTES + x_rows * BOX_ROW_BYTES)),
                               (int)MAX_STAGES);
    layout.activation = activation;
    CUtensorMap w_map, x_map;
    if (!describe_operands(&w_map, &x_map, p, layout, x_rows))
        return cudaErrorInvalidValue;
    queue_kernel(&cuda->base, "matmul", batch_matmul_kernel<T, OUTPUTS, ENDING>, dim3((unsigned)layout.n_tiles),
                 dim3(THREADS), SHARED_BYTES, w_map, x_map, p->bias, (T *)p->y.data, layout);
    return cudaSuccess;
}

/* The narrowest tile by which each multiprocessor has one at most. */
static int outputs_of_tile(const struct dskv_cuda *cuda, int64_t n)
{
    int each = (int)((n + cuda->n_multiprocessors - 1) / cuda->n_multiprocessors);
    return std::max((each + TILE_STEP - 1) / TILE_STEP * TILE_STEP, (int)MIN_OUTPUTS);
}

/* Calls f with the outputs of a tile. */
template <typename F> static cudaError_t with_outputs(int outputs, F f)
{
    switch (outputs) {
    case 16: return f(std::integral_constant<int, 16>());
    case 24: return f(std::integral_constant<int, 24>());
    case 32: return f(std::integral_constant<int, 32>());
    case 40: return f(std::integral_constant<int, 40>());
    case 48: return f(std::integral_constant<int, 48>());
    case 56: return f(std::integral_constant<int, 56>());
    default: return f(std::integral_constant<int, MAX_OUTPUTS>());
    }
}

template <typename T, ending ENDING> static bool allow(void)
{
    auto allow_outputs = [](auto outputs) {
        return cudaFuncSetAttribute(batch_matmul_kernel<T, decltype(outputs)::value, ENDING>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    };
    for (int outputs = MIN_OUTPUTS; outputs <= MAX_OUTPUTS; outputs += TILE_STEP)
        if (with_outputs(outputs, allow_outputs) != cudaSuccess)
            return false;
    return true;
}

extern "C" int dskv_cuda_matmul_batch_open(void)
{
    return allow<__half, PLAIN>() && allow<__half, ACTIVATED>() && allow<__nv_bfloat16, PLAIN>() &&
           allow<__nv_bfloat16, ACTIVATED>();
}

static bool fits(const struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    return dskv_cuda_matmul_streams(cuda, p) && p->x.rows <= MAX_ROWS &&
           p->w->n <= (int64_t)MAX_OUTPUTS * cuda->n_multiprocessors && p->y.dtype == p->w->dtype;
}

template <ending ENDING>
static int launch_batch(struct dskv_cuda *cuda, const struct dskv_matmul *p, enum dskv_activation activation)
{
    if (!fits(cuda, p))
        return 0;
    cudaError_t error = with_outputs(outputs_of_tile(cuda, p->w->n), [&](auto outputs) {
        constexpr int OUTPUTS = decltype(outputs)::value;
        return p->w->dtype == DSKV_F16 ? launch<__half, OUTPUTS, ENDING>(cuda, p, activation)
                                       : launch<__nv_bfloat16, OUTPUTS, ENDING>(cuda, p, activation);
    });
    dskv_cuda_note(cuda, error, "matmul");
    return 1;
}

extern "C" int dskv_cuda_matmul_batch(struct dskv_device *device, const struct dskv_matmul *p)
{
    return launch_batch<PLAIN>(dskv_cuda_of(device), p, NO_ACTIVATION);
}

extern "C" int dskv_cuda_matmul_batch_activate(struct dskv_device *device, const struct dskv_matmul_activate *p)
{
    struct dskv_matmul matmul = p->matmul;
    matmul.y = p->activate.out;
    return !p->activate.gated && launch_batch<ACTIVATED>(dskv_cuda_of(device), &matmul, p->activate.kind);
}
