/* Attention with tensor instructions: 16-bit activations on a pool of the same dtype, head sizes 64, 80, 96 and 128.
 *
 * A piece is DSKV_KEY_PIECE = 64 keys at absolute positions, computed from a fresh state for 16 pairs of (token, head)
 * by the steps of attention_tile.cuh; pieces merge in ascending order.  Tiles of 16 pairs share one piece among four
 * warps (decode), tiles of 64 pairs give each warp 16 (verify, prefill).  Where tiles are too few to fill the device, a
 * block takes some pieces of one into scratch, and a second kernel merges; else a block walks all pieces.  All ways use
 * the same steps and the same merge, so the bits are the same.
 *
 * Grid: (tiles, KV heads, groups of pieces or 1), 128 threads; a block takes every gridDim.x-th tile, since KV heads
 * may have unequal numbers of query heads.  Shared memory: keys and values of one or two pieces, rows padded by 16
 * bytes. Keys and values lie at multiples of 16 bytes; queries and results at any place.
 */
#include "cuda/attention_tile.cuh"

enum { WIDE = TILE * N_WARPS };
#define LOG2_E 1.44269504f /* scores are kept in units of it, for 2^x */

/* A pair's pieces in scratch, side by side: max, sum, two unused, D values. */
template <int D> constexpr int scratch_floats = D + 4;

template <int D>
__device__ __forceinline__ float *piece_place(float *scratch, const attention_grid &g, int row, int head, int piece)
{
    return scratch + (((int64_t)row * g.n_heads + head) * g.n_pieces + piece) * scratch_floats<D>;
}

/* Grid: (heads, rows), a thread a dimension.  The factors of 32 pieces are found by as many lanes, each warp for
 * itself: a running maximum is the same however it is found. */
template <typename T, int D>
__global__ void __launch_bounds__((D + 31) / 32 * 32)
    merge_pieces_kernel(attention_grid g, const float *scratch, T *out)
{
    int lane = (int)threadIdx.x % 32, d = (int)threadIdx.x, head = (int)blockIdx.x, row = (int)blockIdx.y, last;
    const int32_t *table;
    if (!find_row(g, row, &table, &last))
        return;
    int n = last / KEYS + 1;
    const float *pieces = piece_place<D>((float *)scratch, g, row, head, 0);
    float max = -INFINITY, sum = 0.0f, value = 0.0f, next[32];
    for (int first = 0; first < n; first += 32, pieces += 32 * scratch_floats<D>) {
        float2 mine =
            first + lane < n ? *(const float2 *)(pieces + lane * scratch_floats<D>) : make_float2(-INFINITY, 0.0f);
#pragma unroll
        for (int i = 0; i < 32; i++)
            next[i] = first + i < n && d < D ? pieces[i * scratch_floats<D> + 4 + d] : 0.0f;
        float running = fmaxf(max, mine.x);
        for (int offset = 1; offset < 32; offset <<= 1) {
            float other = __shfl_up_sync(~0u, running, offset);
            running = lane >= offset ? fmaxf(running, other) : running;
        }
        float before = __shfl_up_sync(~0u, running, 1);
        before = lane == 0 ? max : before;
        float keep = exp2_of(before - running), add = exp2_of(mine.x - running);
        max = __shfl_sync(~0u, running, 31);
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (first + i < n) {
                float k = __shfl_sync(~0u, keep, i), a = __shfl_sync(~0u, add, i);
                sum = merged(sum, k, __shfl_sync(~0u, mine.y, i), a);
                value = merged(value, k, next[i], a);
            }
    }
    if (d < D)
        out[row * g.out_stride + (int64_t)head * D + d] = from_float<T>(value / sum);
}

/* What a lane keeps of its two rows between pieces. */
struct rows_state {
    float max[2], sum[2];
};

/* Takes the next piece's maxima and sums in, and gives the factors for the values.  A row that sees nothing of the
 * piece keeps its state to the bit: x * 1 + 0 * -0. */
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

/* Where a lane's two rows of a piece go in scratch; null: the row sees nothing of the piece. */
template <int D>
__device__ __forceinline__ void find_places(float **place, float *scratch, const attention_grid &g, const tile &t,
                                            int pair, const int *last, int piece)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = pair + (int)threadIdx.x % 32 / 4 + half * 8;
        place[half] =
            piece * KEYS <= last[half] ? piece_place<D>(scratch, g, row_of(t, mine), head_of(t, mine), piece) : NULL;
    }
}

/* A row's maximum and sum, by the first of its lanes. */
__device__ __forceinline__ void store_sums(float *const *place, const float *max, const float *sum)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (place[half] && threadIdx.x % 4 == 0)
            *(float2 *)place[half] = make_float2(max[half], sum[half]);
}

/* Values of 16 dimensions from `column` on, of a lane's two rows. */
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

/* The same into the values so far. */
__device__ __forceinline__ void merge_values(float (*all)[4], const float (*value)[4], const float *keep,
                                             const float *add)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            all[i][j] = merged(all[i][j], keep[j / 2], value[i][j], add[j / 2]);
}

/* The same of finished rows, as results. */
template <typename T, int D>
__device__ __forceinline__ void store_results(const attention_grid &g, const tile &t, int pair, const float (*value)[4],
                                              const float *sum, int column, T *out, bool aligned)
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
            T low = from_float<T>(value[i][half * 2] / sum[half]),
              high = from_float<T>(value[i][half * 2 + 1] / sum[half]);
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

/* The pieces of a tile that a block takes. */
struct piece_range {
    int next, end;
};
template <bool SPLIT> __device__ __forceinline__ piece_range pieces_of(const tile &t, int per_block)
{
    int n = t.last / KEYS + 1, first = SPLIT ? (int)blockIdx.z * per_block : 0;
    return {first, SPLIT ? min(first + per_block, n) : n};
}

/* Waits for the stage that is asked for; with two, asks for the next piece in the other one, which is read by now. */
template <typename T, int D, int STAGES>
__device__ __forceinline__ void begin_piece(T *stages, int stage, const attention_grid &g, const tile &t, int kv_head,
                                            piece_range pieces)
{
    constexpr int PIECE = KEYS * pitch_of<D>;
    wait_copies<0>();
    __syncthreads();
    if (STAGES == 2 && pieces.next + 1 < pieces.end) {
        T *next = stages + (stage ^ 1) * 2 * PIECE;
        copy_piece<T, D>(next, next + PIECE, g.kv, kv_head, t.table, (pieces.next + 1) * KEYS, t.last);
    }
}

/* Where blocks take whole tiles there are many: four at a time on a multiprocessor, which has room for one piece of
 * large heads each. */
template <int D, bool SPLIT> constexpr int narrow_stages = SPLIT || D <= 96 ? 2 : 1;

/* Tiles of 16 pairs: in a piece, warp w takes keys [16 w, 16 w + 16), then dimensions in units of 16, every fourth. */
template <typename T, int D, bool SPLIT>
__global__ void __launch_bounds__(N_THREADS, SPLIT ? 3 : 4)
    narrow_kernel(attention_grid g, int per_block, const T *q, T *out, float *scratch)
{
    constexpr int STAGES = narrow_stages<D, SPLIT>;
    constexpr int UNITS = (D / 16 + N_WARPS - 1) / N_WARPS, STEP = 16 * N_WARPS, PIECE = KEYS * pitch_of<D>;
    constexpr int WEIGHT_PITCH = KEYS + 8;
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(16) T shared_weights[TILE * WEIGHT_PITCH];
    __shared__ float shared_max[N_WARPS][TILE];
    T *stages = (T *)shared;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, kv_head = (int)blockIdx.y, column = warp * 16;
    bool q_aligned = are_pairs_aligned(q, g.q_stride), out_aligned = are_pairs_aligned(out, g.out_stride);
    float scale = g.scale * LOG2_E;
    tile t;
    for (int index = (int)blockIdx.x; find_tile(g, kv_head, index, TILE, &t); index += (int)gridDim.x) {
        piece_range pieces = pieces_of<SPLIT>(t, per_block);
        if (pieces.next >= pieces.end)
            continue;
        int last[2] = {last_of(t, t.first_pair + lane / 4), last_of(t, t.first_pair + lane / 4 + 8)};
        uint32_t queries[D / 16][4];
        rows_state all;
        float all_values[UNITS][2][4] = {};
        clear_rows(&all);
        __syncthreads(); /* the tile before is read */
        copy_piece<T, D>(stages, stages + PIECE, g.kv, kv_head, t.table, pieces.next * KEYS, t.last);
        load_queries<T, D>(queries, g, t, t.first_pair, q, q_aligned);
        for (int stage = 0; pieces.next < pieces.end; pieces.next++, stage ^= STAGES - 1) {
            const T *keys = stages + stage * 2 * PIECE, *values = keys + PIECE;
            int first = pieces.next * KEYS;
            begin_piece<T, D, STAGES>(stages, stage, g, t, kv_head, pieces);
            float score[1][2][4], max[2], sum[2], value[UNITS][2][4];
            multiply_keys<T, D, 1>(score, queries, keys + warp * 16 * pitch_of<D>);
            mask_scores(score[0], first + warp * 16, last);
            for (int half = 0; half < 2; half++) {
                max[half] = max_of_row(max_of_lane(-INFINITY, score[0], half));
                if (lane % 4 == 0)
                    shared_max[warp][lane / 4 + half * 8] = max[half];
            }
            __syncthreads();
            for (int half = 0; half < 2; half++) {
                for (int i = 0; i < N_WARPS; i++)
                    max[half] = fmaxf(max[half], shared_max[i][lane / 4 + half * 8]);
                max[half] = max[half] * scale;
            }
            uint32_t weights[KEYS / 16][4];
            weigh<T>(weights[0], score[0], scale, max);
            for (int i = 0; i < 4; i++)
                *(uint32_t *)(shared_weights + (lane / 4 + i % 2 * 8) * WEIGHT_PITCH + warp * 16 + i / 2 * 8 +
                              lane % 4 * 2) = weights[0][i];
            __syncthreads();
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                load_matrices(weights[i], shared_weights + lane % 16 * WEIGHT_PITCH + i * 16 + lane / 16 * 8);
            sum_weights<T>(sum, weights);
            multiply_values<T, D, UNITS>(value, weights, values, column, STEP);
            if (SPLIT) {
                float *place[2];
                find_places<D>(place, scratch, g, t, t.first_pair, last, pieces.next);
                if (warp == 0)
                    store_sums(place, max, sum);
#pragma unroll
                for (int i = 0; i < UNITS; i++)
                    if (column + i * STEP < D)
                        store_values(place, value[i], column + i * STEP);
            } else {
                float keep[2], add[2];
                merge_rows(&all, max, sum, last, first, keep, add);
#pragma unroll
                for (int i = 0; i < UNITS; i++)
                    merge_values(all_values[i], value[i], keep, add);
                if (STAGES == 1 && pieces.next + 1 < pieces.end) {
                    __syncthreads(); /* this piece is read */
                    copy_piece<T, D>(stages, stages + PIECE, g.kv, kv_head, t.table, first + KEYS, t.last);
                }
            }
        }
        if (!SPLIT)
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                if (column + i * STEP < D)
                    store_results<T, D>(g, t, t.first_pair, all_values[i], all.sum, column + i * STEP, out,
                                        out_aligned);
    }
}

/* Tiles of 64 pairs, a warp takes 16. */
template <typename T, int D, bool SPLIT>
__global__ void __launch_bounds__(N_THREADS, 2)
    wide_kernel(attention_grid g, int per_block, const T *q, T *out, float *scratch)
{
    constexpr int UNITS = D / 16, AT_ONCE = 4, PIECE = KEYS * pitch_of<D>; /* units that are computed side by side */
    extern __shared__ __align__(16) char shared[];
    T *stages = (T *)shared;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, kv_head = (int)blockIdx.y;
    bool q_aligned = are_pairs_aligned(q, g.q_stride), out_aligned = are_pairs_aligned(out, g.out_stride);
    float scale = g.scale * LOG2_E;
    tile t;
    /* Late tiles see most keys and come first. */
    for (int index = (int)(gridDim.x - 1 - blockIdx.x); find_tile(g, kv_head, index, WIDE, &t);
         index += (int)gridDim.x) {
        piece_range pieces = pieces_of<SPLIT>(t, per_block);
        if (pieces.next >= pieces.end)
            continue;
        int pair = t.first_pair + warp * TILE, last[2] = {last_of(t, pair + lane / 4), last_of(t, pair + lane / 4 + 8)};
        int least = last_of(t, pair), most = least < 0 ? -1 : last_of(t, min(pair + TILE, t.n_pairs) - 1);
        uint32_t queries[D / 16][4];
        rows_state all;
        float all_values[UNITS][2][4] = {};
        clear_rows(&all);
        __syncthreads(); /* the tile before is read */
        copy_piece<T, D>(stages, stages + PIECE, g.kv, kv_head, t.table, pieces.next * KEYS, t.last);
        load_queries<T, D>(queries, g, t, pair, q, q_aligned);
        for (int stage = 0; pieces.next < pieces.end; pieces.next++, stage ^= 1) {
            const T *keys = stages + stage * 2 * PIECE, *values = keys + PIECE;
            int first = pieces.next * KEYS;
            begin_piece<T, D, 2>(stages, stage, g, t, kv_head, pieces);
            if (first > most)
                continue; /* nobody in this warp sees the piece */
            float score[KEYS / 16][2][4], max[2], sum[2], keep[2], add[2], *place[2];
            multiply_keys<T, D, KEYS / 16>(score, queries, keys);
            if (first + KEYS - 1 > least)
#pragma unroll
                for (int i = 0; i < KEYS / 16; i++)
                    mask_scores(score[i], first + i * 16, last);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                max[half] = -INFINITY;
#pragma unroll
                for (int i = 0; i < KEYS / 16; i++)
                    max[half] = max_of_lane(max[half], score[i], half);
                max[half] = max_of_row(max[half]) * scale;
            }
            uint32_t weights[KEYS / 16][4];
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                weigh<T>(weights[i], score[i], scale, max);
            sum_weights<T>(sum, weights);
            if (SPLIT) {
                find_places<D>(place, scratch, g, t, pair, last, pieces.next);
                store_sums(place, max, sum);
            } else {
                merge_rows(&all, max, sum, last, first, keep, add);
            }
#pragma unroll
            for (int unit = 0; unit < UNITS; unit += AT_ONCE) {
                float value[AT_ONCE][2][4];
                multiply_values<T, D, AT_ONCE>(value, weights, values, unit * 16, 16);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (unit + i < UNITS) {
                        if (SPLIT)
                            store_values(place, value[i], (unit + i) * 16);
                        else
                            merge_values(all_values[unit + i], value[i], keep, add);
                    }
            }
        }
        if (!SPLIT)
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                store_results<T, D>(g, t, pair, all_values[i], all.sum, i * 16, out, out_aligned);
    }
}

/* ---- the choice of a kernel: any choice gives the same bits ------------------------------------------------------ */

template <typename T> using tensor_kernel = void (*)(attention_grid, int, const T *, T *, float *);

struct kernel_choice {
    bool is_wide;
    int64_t n_tiles;   /* of a KV head with the mean number of query heads, at most */
    int64_t per_block; /* pieces that a block takes; 0: all of its tile */
};

/* Blocks of some pieces each that a multiprocessor holds. */
enum { NARROW_RESIDENT = 3, WIDE_RESIDENT = 2 };

static kernel_choice choose_kernel(const struct dskv_cuda *cuda, const struct dskv_attention *p,
                                   const attention_grid &g, size_t scratch_row)
{
    int64_t rows = p->q.rows, kv_heads = p->kv.n_kv_heads_local, group = (g.n_heads + kv_heads - 1) / kv_heads;
    kernel_choice c = {};
    c.is_wide = rows * group > (int64_t)TILE * g.n_work;
    int64_t pairs = TILE * (c.is_wide ? N_WARPS : 1), of_row = (group + pairs - 1) / pairs;
    int64_t of_runs = (rows * group + g.n_work * (pairs - 1)) / pairs;
    c.n_tiles = of_runs < rows * of_row ? of_runs : rows * of_row;
    int64_t resident = (int64_t)cuda->n_multiprocessors * (c.is_wide ? WIDE_RESIDENT : NARROW_RESIDENT);
    int64_t n_blocks = c.n_tiles * kv_heads, per_block = (n_blocks * g.n_pieces + resident - 1) / resident;
    size_t scratch = (size_t)(rows * g.n_heads * g.n_pieces) * scratch_row;
    if (n_blocks < cuda->n_multiprocessors && per_block < g.n_pieces && scratch <= dskv_cuda_scratch_bytes(cuda))
        c.per_block = per_block;
    return c;
}

template <typename T, int D>
static void launch_tensor(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g)
{
    kernel_choice c = choose_kernel(cuda, p, g, scratch_floats<D> * sizeof(float));
    bool is_split = c.per_block > 0;
    int n_stages = c.per_block == 1 ? 1 : c.is_wide || is_split ? 2 : narrow_stages<D, false>;
    size_t shared = (size_t)n_stages * 2 * KEYS * pitch_of<D> * sizeof(T);
    tensor_kernel<T> kernel = c.is_wide ? (is_split ? wide_kernel<T, D, true> : wide_kernel<T, D, false>)
                                        : (is_split ? narrow_kernel<T, D, true> : narrow_kernel<T, D, false>);
    dskv_cuda_note(cuda, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                   "attention");
    dim3 grid((unsigned)c.n_tiles, (unsigned)p->kv.n_kv_heads_local,
              is_split ? blocks_for(g.n_pieces, (int)c.per_block) : 1);
    kernel<<<grid, N_THREADS, shared, cuda->stream>>>(g, (int)c.per_block, (const T *)p->q.data, (T *)p->out.data,
                                                      dskv_cuda_scratch(cuda));
    if (is_split)
        merge_pieces_kernel<T, D>
            <<<dim3((unsigned)g.n_heads, (unsigned)p->q.rows), (D + 31) / 32 * 32, 0, cuda->stream>>>(
                g, dskv_cuda_scratch(cuda), (T *)p->out.data);
}

int attention_with_tensor_instructions(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g)
{
    int size = g.kv.head_dim;
    if (p->q.dtype != p->kv.dtype || p->q.dtype == DSKV_F32 || !(p->scale > 0.0f) ||
        (size != 64 && size != 80 && size != 96 && size != 128))
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
