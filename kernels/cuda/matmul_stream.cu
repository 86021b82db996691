/* Matmul of few rows at the pace of memory: weights stream through a ring in shared memory (compute capability 9.0 on).
 *
 * Same order as matmul.cu: k ascending in steps of 16, one f32 accumulator per output, so the same bits.
 * Grid: (persistent blocks over tiles of whole units of outputs, groups of TOKENS rows).  The last warp is the
 * producer: one thread asks the copy engine for boxes of 64 k-values; the others take a unit of outputs and up to 32
 * rows each. Shared memory: n_stages of n_boxes boxes of weights and of x, 1024-byte aligned, 128-byte rows whose
 * 16-byte chunks are swizzled by the row's number modulo 8 (no bank conflicts), and two barriers a stage.  x must be
 * 16-byte aligned.
 *
 * A launch may overlap its predecessor's end: weights, which no operation writes, are requested before the wait; x, y
 * are touched after it.
 */
#include "cuda/matmul.cuh"

#include <algorithm>
#include <climits>
#include <cuda.h>

enum {
    BOX_K = 64, /* 128 bytes: the widest swizzle */
    BOX_ROW_BYTES = 128,
    MAX_STAGES = 32,
    MAX_TILE_ROWS = 224,
    STAGE_WEIGHT_BYTES = 16 << 10, /* about; fewer, larger stages cost fewer waits */
    SHARED_BYTES = 220 << 10,
    MAX_THREADS = (MAX_TILE_ROWS / 16 + 1) * 32,
};

/* How TOKENS rows are dealt to warps. */
template <int TOKENS> struct deal {
    enum {
        BLOCKS = TOKENS / 8 < 4 ? TOKENS / 8 : 4, /* of 8 rows, a warp */
        GROUPS = TOKENS / 8 / BLOCKS,             /* warps that share a unit of outputs */
        HALVES = GROUPS > 1 ? 2 : 1,              /* of 16 outputs in a unit: more use of each row that is read */
        UNIT = 16 * HALVES,
    };
};

struct stream_plan {
    int64_t n, y_stride;
    int rows, n_k_boxes, n_units; /* units of outputs in a tile */
    int n_tiles, n_boxes, n_stages;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ void barrier_init(uint64_t *barrier, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t *barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t *barrier, int parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

__device__ __forceinline__ void copy_box(unsigned char *shared, const CUtensorMap *map, int k, int row,
                                         uint64_t *barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
                 "[%4];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

struct ring {
    unsigned char *stages;
    uint64_t *full, *empty;
    int stage_bytes, w_box_bytes, x_box_bytes, n_steps; /* steps of a tile */
};

__device__ __forceinline__ int boxes_of_step(const struct stream_plan &plan, int step)
{
    return min(plan.n_boxes, plan.n_k_boxes - step * plan.n_boxes);
}

/* One thread: weights of as many stages as there are before the wait, then x of these, then the rest in order. */
template <int TOKENS>
__device__ __forceinline__ void produce(const struct ring &ring, const struct stream_plan &plan,
                                        const CUtensorMap *w_map, const CUtensorMap *x_map)
{
    int n_mine = (plan.n_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    int total = n_mine * ring.n_steps, n_early = min(total, plan.n_stages);
    int tile_rows = plan.n_units * deal<TOKENS>::UNIT, first_row = (int)blockIdx.y * TOKENS;
    auto ask_weights = [&](int i) {
        int slot = i % plan.n_stages, step = i % ring.n_steps, boxes = boxes_of_step(plan, step);
        int tile = (int)blockIdx.x + i / ring.n_steps * (int)gridDim.x;
        barrier_expect(ring.full + slot, boxes * (ring.w_box_bytes + ring.x_box_bytes));
        for (int b = 0; b < boxes; b++)
            copy_box(ring.stages + slot * ring.stage_bytes + b * ring.w_box_bytes, w_map,
                     (step * plan.n_boxes + b) * BOX_K, tile * tile_rows, ring.full + slot);
    };
    auto ask_x = [&](int i) {
        int slot = i % plan.n_stages, step = i % ring.n_steps, boxes = boxes_of_step(plan, step);
        unsigned char *place = ring.stages + slot * ring.stage_bytes + plan.n_boxes * ring.w_box_bytes;
        for (int b = 0; b < boxes; b++)
            copy_box(place + b * ring.x_box_bytes, x_map, (step * plan.n_boxes + b) * BOX_K, first_row,
                     ring.full + slot);
    };
    for (int i = 0; i < n_early; i++)
        ask_weights(i);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = 0; i < n_early; i++)
        ask_x(i);
    for (int i = n_early; i < total; i++) {
        barrier_wait(ring.empty + i % plan.n_stages, (i / plan.n_stages - 1) & 1);
        ask_weights(i);
        ask_x(i);
    }
}

/* 64 k-values: all operands first, so that their latencies overlap.  w, x: the warp's rows of the boxes. */
template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_box(float (*c)[deal<TOKENS>::BLOCKS][4], uint32_t w, uint32_t x, int lane)
{
    using D = deal<TOKENS>;
    uint32_t a[4][D::HALVES][4], b[4 * D::BLOCKS * 2];
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
#pragma unroll
        for (int h = 0; h < D::HALVES; h++)
            load_matrices(a[kk][h],
                          w + (h * 16 + lane % 16) * BOX_ROW_BYTES + ((kk * 2 + lane / 16) ^ (lane & 7)) * 16);
#pragma unroll
    for (int i = 0; i < 4 * D::BLOCKS; i += 2) { /* one load serves two blocks of rows, or two steps of k */
        int row = D::BLOCKS == 1 ? 0 : i % D::BLOCKS * 8 + lane / 16 * 8;
        int chunk = D::BLOCKS == 1 ? i * 2 + lane / 8 : i / D::BLOCKS * 2 + lane / 8 % 2;
        load_matrices(b + i * 2, x + (row + lane % 8) * BOX_ROW_BYTES + (chunk ^ (lane & 7)) * 16);
    }
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
#pragma unroll
        for (int h = 0; h < D::HALVES; h++)
#pragma unroll
            for (int j = 0; j < D::BLOCKS; j++)
                mma<T>(c[h][j], a[kk][h], b[(kk * D::BLOCKS + j) * 2], b[(kk * D::BLOCKS + j) * 2 + 1]);
}

/* A warp's unit of outputs of each tile, over the stages as they come. */
template <typename T, typename Y, int TOKENS>
__device__ __forceinline__ void consume(const struct ring &ring, const struct stream_plan &plan, const float *bias,
                                        Y *y, int warp, int lane)
{
    using D = deal<TOKENS>;
    int unit = warp / D::GROUPS, group = warp % D::GROUPS, slot = 0, parity = 0;
    uint32_t w_rows = shared_address(ring.stages) + unit * D::UNIT * BOX_ROW_BYTES;
    uint32_t x_rows =
        shared_address(ring.stages) + plan.n_boxes * ring.w_box_bytes + group * D::BLOCKS * 8 * BOX_ROW_BYTES;
    for (int tile = (int)blockIdx.x; tile < plan.n_tiles; tile += (int)gridDim.x) {
        float c[D::HALVES][D::BLOCKS][4] = {};
        for (int step = 0; step < ring.n_steps; step++) {
            int boxes = boxes_of_step(plan, step), place = slot * ring.stage_bytes;
            barrier_wait(ring.full + slot, parity);
            for (int box = 0; box < boxes; box++)
                multiply_box<T, TOKENS>(c, w_rows + place + box * ring.w_box_bytes,
                                        x_rows + place + box * ring.x_box_bytes, lane);
            __syncwarp();
            if (lane == 0)
                barrier_arrive(ring.empty + slot);
            if (++slot == plan.n_stages)
                slot = 0, parity ^= 1;
        }
        int64_t first_output = ((int64_t)tile * plan.n_units + unit) * D::UNIT + lane / 4;
        int first_row = (int)blockIdx.y * TOKENS + group * D::BLOCKS * 8 + lane % 4 * 2;
#pragma unroll
        for (int h = 0; h < D::HALVES; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int64_t output = first_output + h * 16 + i / 2 * 8;
                float shift = bias && output < plan.n ? bias[output] : 0.0f;
#pragma unroll
                for (int j = 0; j < D::BLOCKS; j++) {
                    int row = first_row + j * 8 + i % 2;
                    if (output < plan.n && row < plan.rows)
                        y[row * plan.y_stride + output] = from_float<Y>(bias ? c[h][j][i] + shift : c[h][j][i]);
                }
            }
    }
}

#endif

template <typename T, typename Y, int TOKENS>
__global__ void __launch_bounds__(MAX_THREADS, 1)
    stream_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                  const float *bias, Y *y, const struct stream_plan plan)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    using D = deal<TOKENS>;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n_consumers = plan.n_units * D::GROUPS;
    struct ring ring = {memory, full, empty};
    ring.w_box_bytes = plan.n_units * D::UNIT * BOX_ROW_BYTES;
    ring.x_box_bytes = TOKENS * BOX_ROW_BYTES;
    ring.stage_bytes = plan.n_boxes * (ring.w_box_bytes + ring.x_box_bytes);
    ring.n_steps = (plan.n_k_boxes + plan.n_boxes - 1) / plan.n_boxes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < plan.n_stages; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, n_consumers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (warp < n_consumers) {
        asm volatile("griddepcontrol.wait;" ::: "memory"); /* y may still be read by the operation before */
        consume<T, Y, TOKENS>(ring, plan, bias, y, warp, lane);
    } else if (lane == 0) {
        produce<TOKENS>(ring, plan, &w_map, &x_map);
    }
#endif
}

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function, found without linking to the driver: a host without one runs this build too. */
static encode_function find_encode(void)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
        function = NULL;
    return (encode_function)function;
}

/* Boxes of 64 columns of a row-major matrix; what lies outside reads as zeros. */
static CUresult encode(CUtensorMap *map, enum dskv_dtype dtype, const void *data, int64_t rows, int64_t cols,
                       int64_t stride, int box_rows)
{
    static encode_function function;
    if (!function && !(function = find_encode()))
        return CUDA_ERROR_NOT_FOUND;
    cuuint64_t sizes[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
    cuuint32_t box[2] = {BOX_K, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    return function(map, dtype == DSKV_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                    (void *)data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* The tile that leaves the busiest multiprocessor the fewest units; of equals the larger, which reads x less often. */
static struct stream_plan make_plan(const struct dskv_matmul *p, int n_multiprocessors, int tokens, int unit)
{
    struct stream_plan plan = {p->w->n, p->y.stride, (int)p->x.rows, (int)(dskv_cuda_padded(p->w->k) / BOX_K)};
    int n_units = (int)((p->w->n + unit - 1) / unit), best = INT_MAX;
    for (int tile = 1; tile * unit <= MAX_TILE_ROWS; tile++) {
        int n_tiles = (n_units + tile - 1) / tile;
        int busiest = (n_tiles + n_multiprocessors - 1) / n_multiprocessors * tile;
        if (busiest <= best) {
            best = busiest;
            plan.n_units = tile;
            plan.n_tiles = n_tiles;
        }
    }
    int w_box_bytes = plan.n_units * unit * BOX_ROW_BYTES, box_bytes = w_box_bytes + tokens * BOX_ROW_BYTES;
    plan.n_boxes = std::min(std::max(STAGE_WEIGHT_BYTES / w_box_bytes, 1), plan.n_k_boxes);
    plan.n_stages = std::min(SHARED_BYTES / (plan.n_boxes * box_bytes), (int)MAX_STAGES);
    return plan;
}

template <typename T, typename Y, int TOKENS>
static cudaError_t launch(struct dskv_cuda *cuda, const struct dskv_matmul *p, const struct stream_plan *plan)
{
    using D = deal<TOKENS>;
    CUtensorMap w_map, x_map;
    int64_t k_padded = dskv_cuda_padded(p->w->k);
    if (encode(&w_map, p->w->dtype, p->w->data, dskv_cuda_padded(p->w->n), k_padded, k_padded,
               plan->n_units * D::UNIT) != CUDA_SUCCESS ||
        encode(&x_map, p->x.dtype, p->x.data, p->x.rows, p->w->k, p->x.stride, TOKENS) != CUDA_SUCCESS)
        return cudaErrorInvalidValue;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)std::min(plan->n_tiles, cuda->n_multiprocessors), blocks_for(p->x.rows, TOKENS));
    config.blockDim = dim3((unsigned)(plan->n_units * D::GROUPS + 1) * 32);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = cuda->stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, stream_kernel<T, Y, TOKENS>, w_map, x_map, p->bias, (Y *)p->y.data, *plan);
}

template <typename T, typename Y, int TOKENS>
static cudaError_t plan_and_launch(struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    struct stream_plan plan = make_plan(p, cuda->n_multiprocessors, TOKENS, deal<TOKENS>::UNIT);
    return launch<T, Y, TOKENS>(cuda, p, &plan);
}

template <typename T, typename Y> static cudaError_t launch_rows(struct dskv_cuda *cuda, const struct dskv_matmul *p)
{
    if (p->x.rows <= 8)
        return plan_and_launch<T, Y, 8>(cuda, p);
    if (p->x.rows <= 16)
        return plan_and_launch<T, Y, 16>(cuda, p);
    if (p->x.rows <= 32)
        return plan_and_launch<T, Y, 32>(cuda, p);
    return plan_and_launch<T, Y, 64>(cuda, p);
}

template <typename T, typename Y> static bool allow_shared(void)
{
    auto allow = [](auto kernel) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES) == cudaSuccess;
    };
    return allow(stream_kernel<T, Y, 8>) && allow(stream_kernel<T, Y, 16>) && allow(stream_kernel<T, Y, 32>) &&
           allow(stream_kernel<T, Y, 64>);
}

extern "C" int dskv_cuda_matmul_stream_open(void)
{
    /* What was compiled counts, not the GPU: code for an older one, compiled anew for a newer, has no copies in it. */
    struct cudaFuncAttributes compiled;
    bool can = cudaFuncGetAttributes(&compiled, stream_kernel<__half, __half, 8>) == cudaSuccess &&
               compiled.ptxVersion >= 90 && find_encode() && allow_shared<__half, __half>() &&
               allow_shared<__half, float>() && allow_shared<__nv_bfloat16, __nv_bfloat16>() &&
               allow_shared<__nv_bfloat16, float>();
    (void)cudaGetLastError(); /* a refusal is an answer */
    return can;
}

extern "C" int dskv_cuda_matmul_stream(struct dskv_device *device, const struct dskv_matmul *p)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    if (!cuda->has_stream_matmul || p->w->dtype == DSKV_F32 || p->w->k == 0 || p->x.stride % 8 ||
        (uintptr_t)p->x.data % 16)
        return 0;
    bool to_f32 = p->y.dtype == DSKV_F32;
    cudaError_t error;
    if (p->w->dtype == DSKV_F16)
        error = to_f32 ? launch_rows<__half, float>(cuda, p) : launch_rows<__half, __half>(cuda, p);
    else
        error =
            to_f32 ? launch_rows<__nv_bfloat16, float>(cuda, p) : launch_rows<__nv_bfloat16, __nv_bfloat16>(cuda, p);
    dskv_cuda_note(cuda, error, "matmul");
    return 1;
}
