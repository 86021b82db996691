/* Attention with tensor instructions: 16-bit activations on a pool of the same dtype, head sizes 64, 80, 96 and 128.
 *
 * A piece is DSKV_KEY_PIECE = 64 keys at absolute positions, computed from a fresh state for 16 pairs of (token, head)
 * by the steps of attention_tile.cuh; pieces merge in ascending order.  Tiles of 16 pairs share one piece among four
 * warps (decode), tiles of 64 pairs give each warp 16 (verify, prefill).  Where tiles are too few to fill the device,
 * each piece is its own block and the last block of a tile to arrive merges all from scratch; else a block walks the
 * pieces.  All ways use the same steps and the same merge, so the bits are the same.
 *
 * Grid: (tiles, KV heads, pieces or 1), 128 threads; a block takes every gridDim.x-th tile, since KV heads may have
 * unequal numbers of query heads.  Shared memory: keys and values of one piece (tiles of 16) or two (of 64), rows padded
 * by 16 bytes.  Keys and values lie at multiples of 16 bytes; queries and results at any place.
 */
#include "cuda/attention_tile.cuh"

enum { WIDE = TILE * N_WARPS };
#ifndef MIN_NARROW
#define MIN_NARROW 4
#define MIN_WIDE 2
#endif

/* A pair's pieces in scratch, side by side: max, sum, two unused, D values. */
template <int D> constexpr int scratch_floats = D + 4;

template <int D>
__device__ __forceinline__ float *piece_place(float *scratch, const attention_grid &g, const tile &t, int pair,
                                              int piece)
{
    return scratch +
           (((int64_t)row_of(t, pair) * g.n_heads + head_of(t, pair)) * g.n_pieces + piece) * scratch_floats<D>;
}

/* A warp merges a pair's pieces.  The factors of 32 pieces are found by as many lanes: a running maximum is the same
 * however it is found. */
template <typename T, int D>
__device__ void merge_pair(const attention_grid &g, const tile &t, int pair, float *scratch, T *out)
{
    constexpr int N = (D + 31) / 32;
    int lane = (int)threadIdx.x % 32, n = last_of(t, pair) / KEYS + 1;
    const float *pieces = piece_place<D>(scratch, g, t, pair, 0);
    float max = -INFINITY, sum = 0.0f, values[N] = {};
    for (int first = 0; first < n; first += 32) {
        bool exists = first + lane < n;
        const float *mine = pieces + (int64_t)(first + lane) * scratch_floats<D>;
        float my_max = exists ? __ldcg(mine) : -INFINITY, my_sum = exists ? __ldcg(mine + 1) : 0.0f;
        float running = fmaxf(max, my_max);
        for (int offset = 1; offset < 32; offset <<= 1) {
            float other = __shfl_up_sync(~0u, running, offset);
            running = lane >= offset ? fmaxf(running, other) : running;
        }
        float before = __shfl_up_sync(~0u, running, 1);
        before = lane == 0 ? max : before;
        float keep = exp2_of(before - running), add = exp2_of(my_max - running);
        max = __shfl_sync(~0u, running, 31);
#pragma unroll 8
        for (int i = 0; i < min(32, n - first); i++) {
            const float *next = pieces + (int64_t)(first + i) * scratch_floats<D> + 4 + lane;
            float k = __shfl_sync(~0u, keep, i), a = __shfl_sync(~0u, add, i);
            sum = merged(sum, k, __shfl_sync(~0u, my_sum, i), a);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (lane + j * 32 < D)
                    values[j] = merged(values[j], k, __ldcg(next + j * 32), a);
        }
    }
    T *row = out + row_of(t, pair) * g.out_stride + (int64_t)head_of(t, pair) * D + lane;
#pragma unroll
    for (int j = 0; j < N; j++)
        if (lane + j * 32 < D)
            row[j * 32] = from_float<T>(values[j] / sum);
}

/* After a block has stored its piece of a tile: the last one to come merges the tile. */
template <typename T, int D>
__device__ void merge_if_last(const attention_grid &g, const tile &t, int n_pairs, float *scratch, unsigned *counters,
                              T *out)
{
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) { /* a tile's counter is that of its first pair, which no other tile has */
        unsigned *counter = counters + (int64_t)row_of(t, t.first_pair) * g.n_heads + head_of(t, t.first_pair);
        is_last = atomicAdd(counter, 1) == (unsigned)(t.last / KEYS);
        if (is_last)
            *counter = 0;
    }
    __syncthreads();
    if (!is_last)
        return;
    __threadfence();
    int end = min(t.first_pair + n_pairs, t.n_pairs);
    for (int pair = t.first_pair + (int)threadIdx.x / 32; pair < end; pair += N_WARPS)
        merge_pair<T, D>(g, t, pair, scratch, out);
}

/* What a lane keeps of its two rows between pieces. */
struct rows_state {
    float max[2], sum[2];
};

/* Takes the next piece's maxima and sums in, and gives the factors for the values.  A row that sees nothing of the piece
 * keeps its state to the bit: x * 1 + 0 * -0. */
__device__ __forceinline__ void merge_rows(rows_state *all, const float *max, const float *sum, const int *last,
                                           int first, float *keep, float *add)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float larger = fmaxf(all->max[i], max[i]);
        bool sees = first <= last[i];
        keep[i] = sees ? exp2_of(all->max[i] - larger) : 1.0f;
        add[i] = sees ? exp2_of(max[i] - larger) : -0.0f;
        all->max[i] = sees ? larger : all->max[i];
        all->sum[i] = merged(all->sum[i], keep[i], sum[i], add[i]);
    }
}

__device__ __forceinline__ void clear_rows(rows_state *all)
{
    all->max[0] = all->max[1] = -INFINITY;
    all->sum[0] = all->sum[1] = 0.0f;
}

/* The maxima and sums of a lane's two rows, of which the first lane of a row stores them. */
template <int D>
__device__ __forceinline__ void store_sums(float *const *place, const float *max, const float *sum)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (place[half] && threadIdx.x % 4 == 0)
            *(float2 *)place[half] = make_float2(max[half], sum[half]);
}

/* Values of 16 dimensions from `column` on, of a lane's two rows; a row that is not to be stored has no place. */
__device__ __forceinline__ void store_values(float *const *place, const float (*value)[4], int column)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (place[half])
#pragma unroll
            for (int i = 0; i < 2; i++)
                *(float2 *)(place[half] + 4 + column + i * 8 + threadIdx.x % 4 * 2) =
                    make_float2(value[i][half * 2], value[i][half * 2 + 1]);
}

/* The same of finished rows, as results. */
template <typename T, int D>
__device__ __forceinline__ void store_results(const attention_grid &g, const tile &t, int pair,
                                              const float (*value)[4], const float *sum, int column, T *out,
                                              bool aligned)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = pair + lane / 4 + half * 8;
        if (mine >= t.n_pairs)
            continue;
        T *row = out + row_of(t, mine) * g.out_stride + (int64_t)head_of(t, mine) * D + column + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            T low = from_float<T>(value[i][half * 2] / sum[half]), high = from_float<T>(value[i][half * 2 + 1] / sum[half]);
            if (aligned) {
                *(uint32_t *)(row + i * 8) = pack(low, high);
            } else {
                row[i * 8] = low;
                row[i * 8 + 1] = high;
            }
        }
    }
}

/* Two neighbours can be accessed as one in every row. */
template <typename T> __device__ __forceinline__ bool are_pairs_aligned(const T *rows, int64_t stride)
{
    return (size_t)rows % 4 == 0 && stride % 2 == 0;
}

/* Tiles of 16 pairs: in a piece, warp w takes keys [16 w, 16 w + 16), then dimensions in units of 16, every fourth. */
template <typename T, int D, bool SPLIT>
__global__ void __launch_bounds__(N_THREADS, MIN_NARROW)
    narrow_kernel(attention_grid g, const T *q, T *out, float *scratch, unsigned *counters)
{
    constexpr int UNITS = (D / 16 + N_WARPS - 1) / N_WARPS, WEIGHT_PITCH = KEYS + 8;
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(16) T shared_weights[TILE * WEIGHT_PITCH];
    __shared__ float shared_max[N_WARPS][TILE];
    T *keys = (T *)shared, *values = keys + KEYS * pitch_of<D>;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, kv_head = (int)blockIdx.y;
    bool q_aligned = are_pairs_aligned(q, g.q_stride), out_aligned = are_pairs_aligned(out, g.out_stride);
    float scale = g.scale * 1.44269504f; /* log2(e) */
    tile t;
    for (int index = (int)blockIdx.x; find_tile(g, kv_head, index, TILE, &t); index += (int)gridDim.x) {
        int last[2] = {last_of(t, t.first_pair + lane / 4), last_of(t, t.first_pair + lane / 4 + 8)};
        int n_pieces = t.last / KEYS + 1, piece = SPLIT ? (int)blockIdx.z : 0, end = SPLIT ? piece + 1 : n_pieces;
        if (piece >= n_pieces)
            continue;
        uint32_t queries[D / 16][4];
        rows_state all;
        float all_values[UNITS][2][4] = {};
        clear_rows(&all);
        for (; piece < end; piece++) {
            int first = piece * KEYS;
            __syncthreads(); /* the piece before is read */
            copy_piece<T, D>(keys, values, g.kv, kv_head, t.table, first, t.last);
            if (SPLIT || piece == 0)
                load_queries<T, D>(queries, g, t, t.first_pair, q, q_aligned);
            wait_copies<0>();
            __syncthreads();
            float score[2][4], max[2], sum[2], keep[2], add[2];
            multiply_keys<T, D>(score, queries, keys + warp * 16 * pitch_of<D>);
            mask_scores(score, scale, first + warp * 16, last);
            for (int half = 0; half < 2; half++) {
                max[half] = max_of_row(fmaxf(fmaxf(score[0][half * 2], score[0][half * 2 + 1]),
                                             fmaxf(score[1][half * 2], score[1][half * 2 + 1])));
                if (lane % 4 == 0)
                    shared_max[warp][lane / 4 + half * 8] = max[half];
            }
            __syncthreads();
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < N_WARPS; i++)
                    max[half] = fmaxf(max[half], shared_max[i][lane / 4 + half * 8]);
            uint32_t weights[KEYS / 16][4];
            weigh<T>(weights[0], score, max);
            for (int i = 0; i < 4; i++)
                *(uint32_t *)(shared_weights + (lane / 4 + i % 2 * 8) * WEIGHT_PITCH + warp * 16 + i / 2 * 8 +
                              lane % 4 * 2) = weights[0][i];
            __syncthreads();
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                load_matrices(weights[i], shared_weights + lane % 16 * WEIGHT_PITCH + i * 16 + lane / 16 * 8);
            sum_weights<T>(sum, weights);
            float *place[2] = {NULL, NULL};
            if (SPLIT) {
                for (int half = 0; half < 2; half++)
                    if (first <= last[half])
                        place[half] = piece_place<D>(scratch, g, t, t.first_pair + lane / 4 + half * 8, piece);
                if (warp == 0)
                    store_sums<D>(place, max, sum);
            } else {
                merge_rows(&all, max, sum, last, first, keep, add);
            }
#pragma unroll
            for (int i = 0; i < UNITS; i++) {
                int column = (i * N_WARPS + warp) * 16;
                if (column >= D)
                    continue;
                float value[2][4];
                multiply_values<T, D>(value, weights, values, column);
                if (SPLIT) {
                    store_values(place, value, column);
                } else {
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        all_values[i][j / 4][j % 4] = merged(all_values[i][j / 4][j % 4], keep[j / 2 % 2],
                                                             value[j / 4][j % 4], add[j / 2 % 2]);
                }
            }
        }
        if (SPLIT) {
            merge_if_last<T, D>(g, t, TILE, scratch, counters, out);
        } else {
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                if ((i * N_WARPS + warp) * 16 < D)
                    store_results<T, D>(g, t, t.first_pair, all_values[i], all.sum, (i * N_WARPS + warp) * 16, out,
                                        out_aligned);
        }
    }
}

/* Tiles of 64 pairs, a warp takes 16; the next piece is on its way while one is computed. */
template <typename T, int D, bool SPLIT>
__global__ void __launch_bounds__(N_THREADS, MIN_WIDE)
    wide_kernel(attention_grid g, const T *q, T *out, float *scratch, unsigned *counters)
{
    constexpr int UNITS = D / 16, PIECE = KEYS * pitch_of<D>;
    extern __shared__ __align__(16) char shared[];
    T *stages = (T *)shared; /* keys and values, one after the other, of two pieces */
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, kv_head = (int)blockIdx.y;
    bool q_aligned = are_pairs_aligned(q, g.q_stride), out_aligned = are_pairs_aligned(out, g.out_stride);
    float scale = g.scale * 1.44269504f; /* log2(e) */
    tile t;
    /* Late tiles see most keys and come first. */
    for (int index = (int)(gridDim.x - 1 - blockIdx.x); find_tile(g, kv_head, index, WIDE, &t); index += (int)gridDim.x) {
        int pair = t.first_pair + warp * TILE;
        int last[2] = {last_of(t, pair + lane / 4), last_of(t, pair + lane / 4 + 8)};
        int warp_last = last_of(t, min(pair + TILE, t.n_pairs) - 1), warp_seen = last_of(t, pair);
        int n_pieces = t.last / KEYS + 1, piece = SPLIT ? (int)blockIdx.z : 0, end = SPLIT ? piece + 1 : n_pieces;
        if (piece >= n_pieces)
            continue;
        uint32_t queries[D / 16][4];
        rows_state all;
        float all_values[UNITS][2][4] = {};
        clear_rows(&all);
        __syncthreads(); /* the tile before is read */
        copy_piece<T, D>(stages, stages + PIECE, g.kv, kv_head, t.table, piece * KEYS, t.last);
        load_queries<T, D>(queries, g, t, pair, q, q_aligned);
        for (int stage = 0; piece < end; piece++, stage ^= 1) {
            int first = piece * KEYS;
            const T *keys = stages + stage * 2 * PIECE, *values = keys + PIECE;
            wait_copies<0>();
            __syncthreads();
            if (piece + 1 < end) {
                T *next = stages + (stage ^ 1) * 2 * PIECE;
                copy_piece<T, D>(next, next + PIECE, g.kv, kv_head, t.table, first + KEYS, t.last);
            }
            if (pair >= t.n_pairs || first > warp_last)
                continue; /* nobody in this warp sees the piece */
            float score[KEYS / 16][2][4], max[2] = {-INFINITY, -INFINITY}, sum[2], keep[2], add[2];
            int limit[2] = {first + KEYS <= warp_seen ? INT_MAX : last[0], first + KEYS <= warp_seen ? INT_MAX : last[1]};
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                multiply_keys<T, D>(score[i], queries, keys + i * 16 * pitch_of<D>);
                mask_scores(score[i], scale, first + i * 16, limit);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    max[half] = fmaxf(max[half], fmaxf(fmaxf(score[i][0][half * 2], score[i][0][half * 2 + 1]),
                                                       fmaxf(score[i][1][half * 2], score[i][1][half * 2 + 1])));
            }
            max[0] = max_of_row(max[0]);
            max[1] = max_of_row(max[1]);
            uint32_t weights[KEYS / 16][4];
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                weigh<T>(weights[i], score[i], max);
            sum_weights<T>(sum, weights);
            float *place[2] = {NULL, NULL};
            if (SPLIT) {
                for (int half = 0; half < 2; half++)
                    if (first <= last[half])
                        place[half] = piece_place<D>(scratch, g, t, pair + lane / 4 + half * 8, piece);
                store_sums<D>(place, max, sum);
            } else {
                merge_rows(&all, max, sum, last, first, keep, add);
            }
#pragma unroll
            for (int i = 0; i < UNITS; i++) {
                float value[2][4];
                multiply_values<T, D>(value, weights, values, i * 16);
                if (SPLIT) {
                    store_values(place, value, i * 16);
                } else {
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        all_values[i][j / 4][j % 4] = merged(all_values[i][j / 4][j % 4], keep[j / 2 % 2],
                                                             value[j / 4][j % 4], add[j / 2 % 2]);
                }
            }
        }
        if (SPLIT) {
            merge_if_last<T, D>(g, t, WIDE, scratch, counters, out);
        } else {
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                store_results<T, D>(g, t, pair, all_values[i], all.sum, i * 16, out, out_aligned);
        }
    }
}

/* ---- the choice of a kernel: any choice gives the same bits ------------------------------------------------------ */

template <typename T> using tensor_kernel = void (*)(attention_grid, const T *, T *, float *, unsigned *);

struct kernel_choice {
    bool is_wide, is_split;
    unsigned n_tiles; /* of a KV head with the mean number of query heads, at most */
};

static kernel_choice choose_kernel(const struct dskv_cuda *cuda, const struct dskv_attention *p,
                                   const attention_grid &g, size_t scratch_row)
{
    int64_t rows = p->q.rows, kv_heads = p->kv.n_kv_heads_local, group = (g.n_heads + kv_heads - 1) / kv_heads;
    kernel_choice c = {};
    c.is_wide = rows * group > (int64_t)TILE * g.n_work;
    int64_t pairs = c.is_wide ? (int64_t)WIDE : (int64_t)TILE, of_row = (group + pairs - 1) / pairs;
    int64_t of_runs = (rows * group + g.n_work * (pairs - 1)) / pairs;
    c.n_tiles = (unsigned)(of_runs < rows * of_row ? of_runs : rows * of_row);
    size_t scratch = (size_t)(rows * g.n_heads * g.n_pieces) * scratch_row;
    c.is_split = g.n_pieces > 1 && scratch <= dskv_cuda_scratch_bytes(cuda) &&
                 (size_t)(rows * g.n_heads) <= DSKV_CUDA_COUNTERS &&
                 (int64_t)c.n_tiles * kv_heads < (c.is_wide ? 1 : 2) * (int64_t)cuda->n_multiprocessors;
    return c;
}

template <typename T, int D>
static void launch_tensor(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g)
{
    kernel_choice c = choose_kernel(cuda, p, g, scratch_floats<D> * sizeof(float));
    size_t shared = (c.is_wide ? 4 : 2) * KEYS * pitch_of<D> * sizeof(T);
    tensor_kernel<T> kernel = c.is_wide ? (c.is_split ? wide_kernel<T, D, true> : wide_kernel<T, D, false>)
                                        : (c.is_split ? narrow_kernel<T, D, true> : narrow_kernel<T, D, false>);
    if (c.is_wide)
        dskv_cuda_note(cuda, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                       "attention");
    dim3 grid(c.n_tiles, (unsigned)p->kv.n_kv_heads_local, c.is_split ? (unsigned)g.n_pieces : 1);
    kernel<<<grid, N_THREADS, shared, cuda->stream>>>(g, (const T *)p->q.data, (T *)p->out.data,
                                                      dskv_cuda_scratch(cuda), dskv_cuda_counters(cuda));
}

int attention_with_tensor_instructions(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g)
{
    int size = g.kv.head_dim;
    if (p->q.dtype != p->kv.dtype || p->q.dtype == DSKV_F32 || (size != 64 && size != 80 && size != 96 && size != 128))
        return 0;
    if (p->q.rows == 0 || p->n_work == 0)
        return 1;
    auto launch = [&](auto t) {
        using T = decltype(t);
        if (size == 64)
            launch_tensor<T, 64>(cuda, p, g);
        else if (size == 80)
            launch_tensor<T, 80>(cuda, p, g);
        else if (size == 96)
            launch_tensor<T, 96>(cuda, p, g);
        else
            launch_tensor<T, 128>(cuda, p, g);
    };
    if (p->q.dtype == DSKV_F16)
        launch(__half());
    else
        launch(__nv_bfloat16());
    return 1;
}
