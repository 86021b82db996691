/* What the two streaming matmuls share (matmul_stream.cu, matmul_batch.cu): weights and x come through a ring in shared
 * memory, asked for by a thread each, and warpgroups multiply them where they lie (compute capability 9.0).
 *
 * The order of matmul.cu: k ascending in steps of 16, one f32 accumulator per output, so the same bits.
 *
 * Shared memory: n_stages of n_boxes boxes of 64 k-values of weights, then of x, 1024-byte aligned, 128-byte rows whose
 * 16-byte chunks are swizzled by the row's number modulo 8 (no bank conflicts), and three barriers a stage.  x must be
 * 16-byte aligned and k whole boxes; where k ends inside a stage, the rest reads as zeros.
 *
 * A launch may overlap its predecessor's end: weights, which no operation writes, are requested at once, x and y are
 * touched after the wait.
 */
#ifndef DSKV_KERNELS_CUDA_MATMUL_RING_CUH
#define DSKV_KERNELS_CUDA_MATMUL_RING_CUH

#include "cuda/activation.cuh"
#include "cuda/bulk.cuh"
#include "cuda/matmul.h"
#include "cuda/wgmma.cuh"

enum {
    BOX_K = 64, /* 128 bytes: the widest swizzle */
    BOX_ROW_BYTES = 128,
    TILE_STEP = 8, /* outputs: the swizzle's period */
    GROUP_WARPS = 4,
    MAX_STAGES = 32,
    IN_FLIGHT_BYTES = 64 << 10, /* of weights, a block: the pace of memory, and no queue for others to wait in */
};

/* What becomes of an output.  GATED: gates, each with the factor that belongs to it, whose weights come in boxes of
 * their own behind those of the gates. */
enum ending { PLAIN, ACTIVATED, GATED };
#define NO_ACTIVATION DSKV_N_ACTIVATIONS /* of plain outputs: not looked at */

struct ring_layout {
    int64_t n, y_stride;       /* n: outputs, GATED: gates, with as many factors behind them */
    int rows, n_k_boxes, tile; /* tile: outputs */
    int n_tiles, n_boxes, n_stages;
    enum dskv_activation activation;
};

#if !defined(__CUDA_ARCH__) || defined(DSKV_HAS_WGMMA)

/* A stage's barriers, by their place in bytes. */
enum { W_FULL = 0, X_FULL = 8, EMPTY = 16, BARRIERS_BYTES = 24 };

/* All in registers. */
struct ring {
    uint32_t stages, barriers, end; /* of the barriers */
    uint32_t stage_bytes, w_bytes, x_bytes;

    __device__ __forceinline__ ring(const unsigned char *memory, const uint64_t *memory_of_barriers, int n_stages,
                                    int w_bytes_of_stage, int x_bytes_of_stage)
        : stages(kept(shared_address(memory))), barriers(kept(shared_address(memory_of_barriers))),
          end(kept(barriers + n_stages * BARRIERS_BYTES)), stage_bytes(kept(w_bytes_of_stage + x_bytes_of_stage)),
          w_bytes(kept(w_bytes_of_stage)), x_bytes(kept(x_bytes_of_stage))
    {
    }

    /* All threads, once. */
    __device__ __forceinline__ void open(int n_consumers)
    {
        if (threadIdx.x == 0) {
            for (uint32_t at = barriers; at != end; at += BARRIERS_BYTES) {
                barrier_init(at + W_FULL, 1);
                barrier_init(at + X_FULL, 1);
                barrier_init(at + EMPTY, n_consumers);
            }
            barriers_are_ready();
        }
        __syncthreads();
    }
};

/* A ring's stages in turn.  Whoever fills begins with parity 1: a barrier that has never completed lets it pass. */
struct stage_of_ring {
    uint32_t memory, barriers;
    int parity;

    __device__ __forceinline__ stage_of_ring(const ring &r, int first_parity)
        : memory(r.stages), barriers(r.barriers), parity(first_parity)
    {
    }
    __device__ __forceinline__ void next(const ring &r)
    {
        memory += r.stage_bytes;
        barriers += BARRIERS_BYTES;
        if (barriers == r.end) {
            memory = r.stages;
            barriers = r.barriers;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Calls f(stage, tile, box) for every stage of this block's tiles, when it is empty. */
template <typename F> __device__ __forceinline__ void for_empty_stages(const ring &r, const ring_layout &layout, F f)
{
    const int n_tiles = (int)kept(layout.n_tiles), n_k_boxes = (int)kept(layout.n_k_boxes),
              n_boxes = (int)kept(layout.n_boxes);
    stage_of_ring stage(r, 1);
    for (int tile = (int)blockIdx.x; tile < n_tiles; tile += (int)gridDim.x)
        for (int box = 0; box < n_k_boxes; box += n_boxes, stage.next(r)) {
            barrier_wait(stage.barriers + EMPTY, stage.parity);
            f(stage, tile, box);
        }
}

/* One thread: all weights. */
template <int SUMS>
__device__ __forceinline__ void feed_weights(const ring &r, const ring_layout &layout, const CUtensorMap *map)
{
    const int in_flight =
                  (int)kept(min(max(IN_FLIGHT_BYTES / (int)r.w_bytes, 1), layout.n_stages)), /* stages at a time */
        outputs = (int)kept(layout.tile), first_factor = (int)kept((uint32_t)layout.n);
    int n_before = 0;
    stage_of_ring oldest(r, 0); /* of those under way */
    prefetch_map(map);
    for_empty_stages(r, layout, [&](const stage_of_ring &stage, int tile, int box) {
        if (n_before < in_flight) {
            n_before++;
        } else {
            barrier_wait(oldest.barriers + W_FULL, oldest.parity);
            oldest.next(r);
        }
        barrier_expect(stage.barriers + W_FULL, (int)r.w_bytes);
        copy_box(stage.memory, map, 0, tile * outputs, box, stage.barriers + W_FULL);
        if (SUMS == 2)
            copy_box(stage.memory + r.w_bytes / 2, map, 0, first_factor + tile * outputs, box, stage.barriers + W_FULL);
    });
}

/* One thread: all of x, from a row on. */
__device__ __forceinline__ void feed_x(const ring &r, const ring_layout &layout, const CUtensorMap *map, int first_row)
{
    prefetch_map(map);
    wait_for_previous(); /* x may still be written */
    for_empty_stages(r, layout, [&](const stage_of_ring &stage, int, int box) {
        barrier_expect(stage.barriers + X_FULL, (int)r.x_bytes);
        copy_box(stage.memory + r.w_bytes, map, 0, first_row, box, stage.barriers + X_FULL);
    });
}

#endif

/* A row-major matrix of whole boxes as [cols / 64][rows][64]; what lies outside reads as zeros. */
static inline bool describe_matrix(CUtensorMap *map, enum dskv_dtype dtype, const void *data, int64_t rows,
                                   int64_t cols, int64_t stride, int box_rows, int n_boxes)
{
    static const encode_function function = find_encode();
    cuuint64_t sizes[3] = {BOX_K, (cuuint64_t)rows, (cuuint64_t)(cols / BOX_K)};
    cuuint64_t strides[2] = {(cuuint64_t)stride * 2, BOX_ROW_BYTES};
    cuuint32_t box[3] = {BOX_K, (cuuint32_t)box_rows, (cuuint32_t)n_boxes}, steps[3] = {1, 1, 1};
    return function &&
           function(map, dtype == DSKV_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                    (void *)data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Both operands of a product, as its layout cuts them; rows: of x, in a box. */
static inline bool describe_operands(CUtensorMap *w_map, CUtensorMap *x_map, const struct dskv_matmul *p,
                                     const struct ring_layout &layout, int rows)
{
    int64_t k_padded = dskv_cuda_padded(p->w->k);
    return describe_matrix(w_map, p->w->dtype, p->w->data, dskv_cuda_padded(p->w->n), k_padded, k_padded, layout.tile,
                           layout.n_boxes) &&
           describe_matrix(x_map, p->x.dtype, p->x.data, p->x.rows, p->w->k, p->x.stride, rows, layout.n_boxes);
}

#endif
