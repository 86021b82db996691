/* Attention with tensor instructions: 16-bit activations on a pool of the same dtype, head sizes 64, 80, 96 and 128.
 *
 * A piece is DSKV_KEY_PIECE = 64 keys at absolute positions, computed from a fresh state for 16 pairs of (token, head)
 * by the steps of attention_tile.cuh; pieces merge in ascending order.  Tiles of 16 pairs share one piece among four
 * warps (decode), tiles of 64 pairs give each warp 16 (verify, prefill).  Where tiles are too few to fill the device, a
 * block takes some pieces of one into scratch, and a second kernel merges; else a block walks all pieces.  Many rows
 * and, of a batch, whole tiles are served by the files beside this one where the GPU has a copy engine.  All ways use
 * the same steps and the same merge, so the bits are the same.
 *
 * Grid: (tiles, KV heads, groups of pieces or 1), 128 threads; a block takes every gridDim.x-th tile, since KV heads
 * may have unequal numbers of query heads.  Shared memory: keys and values of one or two pieces.  Keys and values lie
 * at multiples of 16 bytes; queries and results at any place.
 */
#include "cuda/attention_tile.cuh"

enum { WIDE = TILE * N_WARPS, WEIGHTS_PITCH = KEYS + 8 /* so that eight rows touch all banks */ };

/* A pair's pieces in scratch, side by side: max, sum, two unused, D values. */
template <int D> constexpr int scratch_floats = D + 4;

/* Grid: (heads, rows), a thread a dimension.  The factors of 32 pieces are found by as many lanes, each warp for
 * itself: a running maximum is the same however it is found. */
template <typename T, int D>
__global__ void __launch_bounds__((D + 31) / 32 * 32)
    merge_pieces_kernel(attention_grid g, const float *scratch, T *out)
{
    int lane = (int)threadIdx.x % 32, d = (int)threadIdx.x, head = (int)blockIdx.x, row = (int)blockIdx.y, last;
    const int32_t *table;
    let_next_begin();
    bool exists = find_row(g, row, &table, &last);
    wait_for_previous();
    if (!exists)
        return;
    int n = last / KEYS + 1;
    const float *pieces = piece_place<scratch_floats<D>>(scratch, g, row, head, 0);
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

/* Where a lane's two rows of a piece go in scratch; null: the row sees nothing of the piece. */
template <int D>
__device__ __forceinline__ void find_places(float **place, float *scratch, const attention_grid &g, const tile &t,
                                            int pair, const int *last, int piece)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = pair_of_lane(pair, half);
        place[half] = piece * KEYS <= last[half]
                          ? piece_place<scratch_floats<D>>(scratch, g, row_of(t, mine), head_of(t, mine), piece)
                          : NULL;
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

/* Blocks that a multiprocessor holds. */
enum { NARROW_RESIDENT = 3, WIDE_RESIDENT = 2 };

/* A block's pieces on their way through two places. */
template <typename T, int D> struct piece_stages {
    unsigned char *shared;
    kv_layer kv;
    int kv_head;
    const tile &t;
    const piece_range &pieces;

    __device__ __forceinline__ unsigned char *place(int piece) const
    {
        return shared + (piece - pieces.next) % 2 * 2 * half_bytes<D>;
    }
    __device__ __forceinline__ uint32_t keys(int piece) const
    {
        return shared_address(place(piece));
    }
    __device__ __forceinline__ uint32_t values(int piece) const
    {
        return keys(piece) + half_bytes<D>;
    }
    __device__ __forceinline__ void ask(int piece) const
    {
        if (piece < pieces.end)
            copy_piece<T, D>(place(piece), place(piece) + half_bytes<D>, kv, kv_head, t.table, piece * KEYS, t.last);
        commit_copies();
    }
    __device__ __forceinline__ void begin() const
    {
        __syncthreads(); /* the tile before is read */
        ask(pieces.next);
    }
    /* The piece is there, and the one before is read. */
    __device__ __forceinline__ void wait(int piece) const
    {
        wait_copies<0>();
        __syncthreads();
        ask(piece + 1);
    }
};

/* The head of a tile: its first piece is asked for, and a warp has what it needs of its 16 pairs from `pair` on. */
template <typename T, int D>
__device__ __forceinline__ void begin_tile(const piece_stages<T, D> &stages, const attention_grid &g, int pair,
                                           const T *q, bool q_aligned, rows_seen *seen, uint32_t (*queries)[4],
                                           rows_state *all)
{
    const tile &t = stages.t;
    *seen = seen_from(t, pair);
    clear_rows(all);
    if (threadIdx.x == 0 && stages.pieces.next < stages.pieces.end)
        prefetch_piece<T>(g.kv, stages.kv_head, t.table, stages.pieces.next * KEYS, t.last);
    wait_for_previous();
    stages.begin();
    load_queries<T, D>(queries, g, t, pair, q, q_aligned);
}

/* The weights of a tile of 16 pairs in one piece, which four warps share: warp w finds those of keys [16 w, 16 w + 16),
 * all get all of them.  Threads meet before the weights are read. */
template <typename T, int D>
__device__ __forceinline__ void weigh_together(uint32_t (*weights)[4], float *max, const uint32_t (*queries)[4],
                                               uint32_t keys, int first, const int *last, float scale,
                                               T *shared_weights, float (*shared_max)[TILE])
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float score[1][2][4];
    multiply_keys<T, D, 1>(score, queries, keys + warp * 16 * ROW_BYTES);
    mask_scores(score[0], first + warp * 16, last);
    max_of_rows<1>(max, score);
    for (int half = 0; half < 2; half++)
        if (lane % 4 == 0)
            shared_max[warp][lane / 4 + half * 8] = max[half];
    __syncthreads();
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < N_WARPS; i++)
            max[half] = fmaxf(max[half], shared_max[i][lane / 4 + half * 8]);
        max[half] = max[half] * scale;
    }
    weigh<T>(weights[0], score[0], scale, max);
    for (int i = 0; i < 4; i++)
        *(uint32_t *)(shared_weights + (lane / 4 + i % 2 * 8) * WEIGHTS_PITCH + warp * 16 + i / 2 * 8 + lane % 4 * 2) =
            weights[0][i];
}

/* Tiles of 16 pairs: in a piece, warp w takes keys [16 w, 16 w + 16), then dimensions in units of 16, every fourth. */
template <typename T, int D, bool IS_SPLIT>
__global__ void __launch_bounds__(N_THREADS, NARROW_RESIDENT)
    narrow_kernel(attention_grid g, const T *q, T *out, float *scratch)
{
    constexpr int UNITS = (D / 16 + N_WARPS - 1) / N_WARPS, STEP = 16 * N_WARPS;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ __align__(16) T shared_weights[TILE * WEIGHTS_PITCH];
    __shared__ float shared_max[N_WARPS][TILE];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, column = warp * 16;
    bool q_aligned = are_pairs_aligned(q, g.q_stride), out_aligned = are_pairs_aligned(out, g.out_stride);
    float scale = g.scale * LOG2_E;
    tile t;
    piece_range pieces;
    piece_stages<T, D> stages = {shared, g.kv, (int)blockIdx.y, t, pieces};
    auto find = [&](int index, tile *found) { return find_tile(g, stages.kv_head, index, TILE, found); };
    let_next_begin();
    for (tile_walk walk = {(int)blockIdx.x, ALL_TOKENS}; next_tile<IS_SPLIT>(find, TILE, &walk, &t, &pieces);) {
        bool is_spoilt = false;
        rows_seen seen;
        uint32_t queries[D / 16][4];
        rows_state all;
        float all_values[UNITS][2][4] = {};
        begin_tile(stages, g, t.first_pair, q, q_aligned, &seen, queries, &all);
        for (int piece = pieces.next; piece < pieces.end; piece++) {
            int first = piece * KEYS;
            float max[2], sum[2], value[UNITS][2][4];
            uint32_t weights[KEYS / 16][4];
            stages.wait(piece);
            weigh_together<T, D>(weights, max, queries, stages.keys(piece), first, seen.last, scale, shared_weights,
                                 shared_max);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                load_matrices(weights[i],
                              shared_address(shared_weights + lane % 16 * WEIGHTS_PITCH + i * 16 + lane / 16 * 8));
            sum_weights<T>(sum, weights);
            multiply_values<T, D, UNITS>(value, weights, stages.values(piece), column, STEP);
            if (IS_SPLIT) {
                float *place[2];
                find_places<D>(place, scratch, g, t, t.first_pair, seen.last, piece);
                if (warp == 0)
                    store_sums(place, max, sum);
#pragma unroll
                for (int i = 0; i < UNITS; i++)
                    if (column + i * STEP < D)
                        store_values(place, value[i], column + i * STEP);
                is_spoilt |= has_nan<UNITS>(value);
            } else {
                float keep[2], add[2];
                merge_rows(&all, max, sum, seen.last, first, keep, add);
#pragma unroll
                for (int i = 0; i < UNITS; i++)
                    merge_values(all_values[i], value[i], keep, add);
            }
        }
        if (!IS_SPLIT) {
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                if (column + i * STEP < D)
                    store_results<T, D>(g, t, t.first_pair, all_values[i], all.sum, column + i * STEP, out,
                                        out_aligned);
            is_spoilt = has_nan<UNITS>(all_values);
        }
        leave_tile(&walk, t, is_spoilt);
    }
    end_blocks();
}

/* Tiles of 64 pairs, a warp takes 16. */
template <typename T, int D, bool IS_SPLIT>
__global__ void __launch_bounds__(N_THREADS, WIDE_RESIDENT)
    wide_kernel(attention_grid g, const T *q, T *out, float *scratch)
{
    constexpr int UNITS = D / 16, AT_ONCE = 4; /* units that are computed side by side */
    extern __shared__ __align__(16) unsigned char shared[];
    int warp = (int)threadIdx.x / 32;
    bool q_aligned = are_pairs_aligned(q, g.q_stride), out_aligned = are_pairs_aligned(out, g.out_stride);
    float scale = g.scale * LOG2_E;
    tile t;
    piece_range pieces;
    piece_stages<T, D> stages = {shared, g.kv, (int)blockIdx.y, t, pieces};
    auto find = [&](int index, tile *found) { return find_tile(g, stages.kv_head, index, WIDE, found); };
    let_next_begin();
    /* Late tiles see most keys and come first. */
    for (tile_walk walk = {(int)(gridDim.x - 1 - blockIdx.x), ALL_TOKENS};
         next_tile<IS_SPLIT>(find, WIDE, &walk, &t, &pieces);) {
        bool is_spoilt = false;
        int pair = t.first_pair + warp * TILE;
        int most = pair < t.n_pairs ? last_of(t, min(pair + TILE, t.n_pairs) - 1) : -1;
        rows_seen seen;
        uint32_t queries[D / 16][4];
        rows_state all;
        float all_values[UNITS][2][4] = {};
        begin_tile(stages, g, pair, q, q_aligned, &seen, queries, &all);
        for (int piece = pieces.next; piece < pieces.end; piece++) {
            uint32_t values = stages.values(piece);
            int first = piece * KEYS;
            stages.wait(piece);
            if (first > most)
                continue; /* nobody in this warp sees the piece */
            float score[KEYS / 16][2][4], max[2], sum[2], keep[2], add[2], *place[2];
            multiply_keys<T, D, KEYS / 16>(score, queries, stages.keys(piece));
            mask_piece(max, score, seen, first, scale);
            uint32_t weights[KEYS / 16][4];
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++)
                weigh<T>(weights[i], score[i], scale, max);
            sum_weights<T>(sum, weights);
            if (IS_SPLIT) {
                find_places<D>(place, scratch, g, t, pair, seen.last, piece);
                store_sums(place, max, sum);
            } else {
                merge_rows(&all, max, sum, seen.last, first, keep, add);
            }
#pragma unroll
            for (int unit = 0; unit < UNITS; unit += AT_ONCE) {
                float value[AT_ONCE][2][4];
                multiply_values<T, D, AT_ONCE>(value, weights, values, unit * 16, 16);
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (unit + i < UNITS) {
                        if (IS_SPLIT)
                            store_values(place, value[i], (unit + i) * 16);
                        else
                            merge_values(all_values[unit + i], value[i], keep, add);
                    }
                if (IS_SPLIT)
                    is_spoilt |= has_nan<AT_ONCE>(value);
            }
        }
        if (!IS_SPLIT) {
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                store_results<T, D>(g, t, pair, all_values[i], all.sum, i * 16, out, out_aligned);
            is_spoilt = has_nan<UNITS>(all_values);
        }
        leave_tile(&walk, t, is_spoilt);
    }
    end_blocks();
}

/* ---- the choice of a kernel: any choice gives the same bits ------------------------------------------------------ */

template <typename T> using tensor_kernel = void (*)(attention_grid, const T *, T *, float *);

struct kernel_choice {
    bool is_wide, is_split;
    int64_t n_tiles;   /* of a KV head with the mean number of query heads, at most */
    int64_t per_block; /* SPLIT: pieces that a block takes */
};

static kernel_choice choose_kernel(const struct dskv_cuda *cuda, const struct dskv_attention *p,
                                   const attention_grid &g, size_t scratch_row)
{
    int64_t rows = p->q.rows, kv_heads = p->kv.n_kv_heads_local, group = (g.n_heads + kv_heads - 1) / kv_heads;
    kernel_choice c = {};
    c.is_wide = rows * group > (int64_t)TILE * g.n_work;
    int64_t pairs = TILE * (c.is_wide ? N_WARPS : 1), of_row = (group + pairs - 1) / pairs;
    int64_t of_runs = (rows * group + g.n_work * (pairs - 1)) / pairs;
    c.n_tiles = of_runs < rows * of_row ? of_runs : rows * of_row;
    int64_t resident = (int64_t)cuda->n_multiprocessors * (int)(c.is_wide ? WIDE_RESIDENT : NARROW_RESIDENT);
    int64_t n_blocks = c.n_tiles * kv_heads, per_block = (n_blocks * g.n_pieces + resident - 1) / resident;
    size_t scratch = (size_t)(rows * g.n_heads * g.n_pieces) * scratch_row;
    c.is_split =
        n_blocks < cuda->n_multiprocessors && per_block < g.n_pieces && scratch <= dskv_cuda_scratch_bytes(cuda);
    c.per_block = per_block;
    return c;
}

template <typename T, int D>
static void launch_tensor(struct dskv_device *device, const struct dskv_attention *p, const attention_grid &g)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    kernel_choice c = choose_kernel(cuda, p, g, scratch_floats<D> * sizeof(float));
    size_t shared = (size_t)(c.is_split && c.per_block == 1 ? 1 : 2) * 2 * half_bytes<D>;
    tensor_kernel<T> kernel = c.is_wide ? (c.is_split ? wide_kernel<T, D, true> : wide_kernel<T, D, false>)
                                        : (c.is_split ? narrow_kernel<T, D, true> : narrow_kernel<T, D, false>);
    dskv_cuda_note(cuda, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                   "attention");
    float *scratch = dskv_cuda_scratch(cuda);
    T *out = (T *)p->out.data;
    dim3 grid((unsigned)c.n_tiles, (unsigned)p->kv.n_kv_heads_local,
              c.is_split ? blocks_for(g.n_pieces, (int)c.per_block) : 1);
    queue_kernel(device, "attention", kernel, grid, dim3(N_THREADS), shared, g, (const T *)p->q.data, out, scratch);
    if (c.is_split)
        queue_kernel(device, "attention", merge_pieces_kernel<T, D>, dim3((unsigned)g.n_heads, (unsigned)p->q.rows),
                     dim3((D + 31) / 32 * 32), 0, g, (const float *)scratch, out);
}

int attention_with_tensor_instructions(struct dskv_device *device, const struct dskv_attention *p,
                                       const attention_grid &g)
{
    int size = g.kv.head_dim;
    if (p->q.dtype != p->kv.dtype || p->q.dtype == DSKV_F32 || !(p->scale > 0.0f) ||
        (size != 64 && size != 80 && size != 96 && size != 128))
        return 0;
    if (p->q.rows == 0 || p->n_work == 0 || attention_with_warpgroups(dskv_cuda_of(device), p, g) ||
        attention_of_batch(dskv_cuda_of(device), p, g))
        return 1;
    auto choose_size = [&](auto t) {
        using T = decltype(t);
        if (size == 64)
            launch_tensor<T, 64>(device, p, g);
        else if (size == 80)
            launch_tensor<T, 80>(device, p, g);
        else if (size == 96)
            launch_tensor<T, 96>(device, p, g);
        else
            launch_tensor<T, 128>(device, p, g);
    };
    if (p->q.dtype == DSKV_F16)
        choose_size(__half());
    else
        choose_size(__nv_bfloat16());
    return 1;
}
