/* Attention of a batch: as many tiles of 8 pairs as fill the device, each by one block (compute capability 9.0 on).
 *
 * The steps, the order of every sum and the merge are those of attention_tile.cuh, so the bits are the same.  But keys
 * and dimensions are the 16 rows of the instruction and pairs its 8 columns: few pairs read one KV head, and rows that
 * nobody needs would cost as much as the others.
 *
 * One warp asks the copy engine for pieces, through a ring, across the ends of tiles.  Each of the others takes every
 * N_WARPS-th piece by itself, and merges it into the tile's state in shared memory when its turn comes: pieces merge in
 * ascending order.
 *
 * Grid: (tiles, KV heads); a block takes every gridDim.x-th tile, since KV heads may have unequal numbers of query
 * heads.  Shared memory: a ring of N_STAGES pieces, 1024-byte aligned, and the state; two blocks a multiprocessor.
 */
#include "cuda/attention_bulk.cuh"
#include "cuda/attention_tile.cuh"

enum { PAIRS = 8, RESIDENT = 2 };

template <int D> struct batch_shape {
    enum {
        PIECE_BYTES = 2 * half_bytes<D>,
        N_STAGES = (96 << 10) / PIECE_BYTES,
        N_WARPS = 3, /* that compute */
        N_THREADS = (N_WARPS + 1) * 32,
        UNITS = D / 16,
    };
    /* A tile's pieces so far, as the lanes of whichever warp comes next hold them. */
    struct state {
        rows_state pairs[32];
        float4 values[UNITS][32];
    };
    static constexpr int SHARED_BYTES = N_STAGES * PIECE_BYTES + (int)sizeof(state);
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <int D> struct batch_ring {
    using S = batch_shape<D>;
    unsigned char *stages;
    uint64_t full[S::N_STAGES], empty[S::N_STAGES];
    uint64_t turn[S::N_WARPS]; /* of a warp to merge */

    __device__ __forceinline__ void open(unsigned char *shared)
    {
        stages = shared;
        for (int i = 0; i < S::N_STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 1);
        }
        for (int i = 0; i < S::N_WARPS; i++)
            barrier_init(turn + i, 32);
        barriers_are_ready();
    }
};

/* The feeding warp: all pieces of a tile, of which n_before are ahead in the ring.  Where it would wait, it looks
 * ahead. */
template <typename T, int D, typename F>
__device__ __forceinline__ void feed(batch_ring<D> *ring, const CUtensorMap *map, int box_rows, const attention_grid &g,
                                     const tile &t, int n_pieces, int n_before, F look_ahead)
{
    using S = batch_shape<D>;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    auto ask = [&](int first_piece, int end) {
        for (int piece = first_piece; piece < end && is_first_lane; piece++) {
            int n = n_before + piece, slot = n % S::N_STAGES;
            unsigned char *keys = ring->stages + slot * S::PIECE_BYTES;
            barrier_wait(ring->empty + slot, n / S::N_STAGES % 2 ^ 1);
            barrier_expect(ring->full + slot, S::PIECE_BYTES);
            bring_half<D>(keys, map, box_rows, g.kv.block_tokens, t, piece * KEYS, 0, ring->full + slot);
            bring_half<D>(keys + half_bytes<D>, map, box_rows, g.kv.block_tokens, t, piece * KEYS, 1,
                          ring->full + slot);
        }
        __syncwarp();
    };
    if (is_first_lane && n_before == 0)
        prefetch_piece<T>(g.kv, (int)blockIdx.y, t.table, 0, t.last);
    wait_for_previous();
    ask(0, min(n_pieces, (int)S::N_STAGES));
    look_ahead();
    ask(S::N_STAGES, n_pieces);
}

/* Values behind the last key that a tile sees, whose weights are 0, become 0: what lies there may be no number. */
template <int D> __device__ __forceinline__ void clear_values(unsigned char *values, int n_seen)
{
    constexpr int CHUNKS = D / 8;
    for (int i = n_seen * CHUNKS + (int)threadIdx.x % 32; i < KEYS * CHUNKS; i += 32)
        *(uint4 *)(values + place_of(i / CHUNKS, i % CHUNKS * 8)) = make_uint4(0, 0, 0, 0);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); /* the copy engine is next to write there */
}

/* Of an accumulator c[4] of 16 x 8, a lane holds columns lane % 4 * 2 (c[0], c[2]) and the next one (c[1], c[3]), its
 * pairs; their rows, keys or dimensions, are lane / 4 (c[0], c[1]) and lane / 4 + 8. */
__device__ __forceinline__ int pair_of_column(const tile &t, int j)
{
    return t.first_pair + (int)threadIdx.x % 4 * 2 + j % 2;
}
__device__ __forceinline__ int row_of_lane(int j)
{
    return (int)threadIdx.x % 32 / 4 + j / 2 * 8;
}

/* The tile's queries as the right operand; zeros behind the run's end. */
template <typename T, int D>
__device__ __forceinline__ void load_columns(uint32_t (*b)[2], const attention_grid &g, const tile &t, const T *q)
{
    int pair = t.first_pair + (int)threadIdx.x % 32 / 4;
    bool exists = pair < t.n_pairs, aligned = are_pairs_aligned(q, g.q_stride);
    if (exists)
        q += row_of(t, pair) * g.q_stride + (int64_t)head_of(t, pair) * D + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < D / 8; i++, q += 8) {
        uint32_t two = 0;
        if (exists)
            two = aligned ? *(const uint32_t *)q : pack(q[0], q[1]);
        b[i / 2][i % 2] = two;
    }
}

/* Scores of a piece's keys, and the pairs' maxima, scaled. */
template <typename T, int D>
__device__ __forceinline__ void score_keys(float (*score)[4], float *max, const uint32_t (*queries)[2], uint32_t keys,
                                           const int *last, int first, float scale)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++)
        score[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < D / 16; step++)
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            uint32_t a[4];
            load_matrices(a, keys + i * 16 * ROW_BYTES + place_of(lane % 16, step * 16 + lane / 16 * 8));
            mma<T>(score[i], a, queries[step][0], queries[step][1]);
        }
    /* Behind the run's end nothing needs a mask. */
    if (first + KEYS - 1 > min(last[0] < 0 ? INT_MAX : last[0], last[1] < 0 ? INT_MAX : last[1]))
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
            score[i / 4][i % 4] =
                first + i / 4 * 16 + row_of_lane(i % 4) <= last[i % 2] ? score[i / 4][i % 4] : -INFINITY;
    max[0] = max[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++)
        max[i % 2] = fmaxf(max[i % 2], score[i / 4][i % 4]);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        for (int offset = 4; offset < 32; offset *= 2)
            max[j] = fmaxf(max[j], __shfl_xor_sync(~0u, max[j], offset));
        max[j] *= scale;
    }
}

/* An 8 x 8 matrix of 16-bit elements, two of a row a lane, transposed. */
__device__ __forceinline__ uint32_t transposed(uint32_t x)
{
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    return x;
}

/* Scores become weights, as the right operand, and the pairs' sums of them. */
template <typename T>
__device__ __forceinline__ void weigh_keys(uint32_t (*weights)[2], float *sum, const float (*score)[4],
                                           const float *max, float scale)
{
    const uint32_t one = pack(from_float<T>(1.0f), from_float<T>(1.0f)), ones[4] = {one, one, one, one};
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, minus[2];
    for (int j = 0; j < 2; j++)
        minus[j] = max[j] == -INFINITY ? 0.0f : -max[j];
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
        T weight[2];
        for (int j = 0; j < 2; j++)
            weight[j] = from_float<T>(exp2_of(fmaf(score[i / 2][i % 2 * 2 + j], scale, minus[j])));
        weights[i / 2][i % 2] = transposed(pack(weight[0], weight[1]));
    }
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        mma<T>(c, ones, weights[i][0], weights[i][1]);
    sum[0] = c[0];
    sum[1] = c[1];
}

/* Weights times values, of all dimensions. */
template <typename T, int D>
__device__ __forceinline__ void sum_values(float (*value)[4], const uint32_t (*weights)[2], uint32_t values)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < D / 4; i++)
        value[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t a[4];
            load_matrices_transposed(a, values + step * 16 * ROW_BYTES +
                                            place_of(lane % 8 + lane / 16 * 8, i * 16 + lane / 8 % 2 * 8));
            mma<T>(value[i], a, weights[step][0], weights[step][1]);
        }
}

/* A computing warp: its pieces of a tile.  True where the result is spoilt (leave_tile). */
template <typename T, int D, typename F>
__device__ __forceinline__ bool attend(batch_ring<D> *ring, typename batch_shape<D>::state *state,
                                       const attention_grid &g, const tile &t, int n_pieces, int n_before, const T *q,
                                       T *out, int warp, F look_ahead)
{
    using S = batch_shape<D>;
    const int lane = (int)threadIdx.x % 32,
              last[2] = {last_of(t, pair_of_column(t, 0)), last_of(t, pair_of_column(t, 1))};
    const float scale = g.scale * LOG2_E;
    uint32_t queries[D / 16][2];
    wait_for_previous();
    load_columns<T, D>(queries, g, t, q);
    look_ahead();
    for (int piece = (warp + S::N_WARPS - n_before % S::N_WARPS) % S::N_WARPS; piece < n_pieces; piece += S::N_WARPS) {
        float score[KEYS / 16][4], value[S::UNITS][4], max[2], sum[2], keep[2], add[2];
        uint32_t weights[KEYS / 16][2];
        rows_state all;
        int n = n_before + piece, slot = n % S::N_STAGES, first = piece * KEYS;
        bool is_last = piece + 1 == n_pieces;
        unsigned char *keys = ring->stages + slot * S::PIECE_BYTES, *values = keys + half_bytes<D>;
        barrier_wait(ring->full + slot, n / S::N_STAGES % 2);
        if (is_last && first + KEYS - 1 > t.last) {
            clear_values<D>(values, t.last - first + 1);
            __syncwarp();
        }
        score_keys<T, D>(score, max, queries, shared_address(keys), last, first, scale);
        weigh_keys<T>(weights, sum, score, max, scale);
        sum_values<T, D>(value, weights, shared_address(values));
        __syncwarp(); /* all lanes have read it */
        if (lane == 0)
            barrier_arrive(ring->empty + slot);
        barrier_wait(ring->turn + warp, n / S::N_WARPS % 2);
        clear_rows(&all);
        if (piece > 0)
            all = state->pairs[lane];
        merge_rows(&all, max, sum, last, first, keep, add);
#pragma unroll
        for (int i = 0; i < S::UNITS; i++) {
            float4 before = piece > 0 ? state->values[i][lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float *next = value[i];
            next[0] = merged(before.x, keep[0], next[0], add[0]);
            next[1] = merged(before.y, keep[1], next[1], add[1]);
            next[2] = merged(before.z, keep[0], next[2], add[0]);
            next[3] = merged(before.w, keep[1], next[3], add[1]);
            if (!is_last)
                state->values[i][lane] = make_float4(next[0], next[1], next[2], next[3]);
        }
        if (!is_last)
            state->pairs[lane] = all;
        barrier_arrive(ring->turn + (warp + 1) % S::N_WARPS); /* each lane, of what it has written */
        if (is_last) {
            bool is_spoilt = false;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int pair = pair_of_column(t, j);
                if (pair >= t.n_pairs)
                    continue;
                T *row = out + row_of(t, pair) * g.out_stride + (int64_t)head_of(t, pair) * D + row_of_lane(j);
#pragma unroll
                for (int i = 0; i < S::UNITS; i++) {
                    row[i * 16] = from_float<T>(value[i][j] / all.sum[j % 2]);
                    is_spoilt |= value[i][j] != value[i][j];
                }
            }
            return is_spoilt;
        }
    }
    return false;
}

#endif

template <typename T, int D>
__global__ void __launch_bounds__(batch_shape<D>::N_THREADS, RESIDENT)
    batch_kernel(const __grid_constant__ CUtensorMap map, attention_grid g, int box_rows, const T *q, T *out)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    using S = batch_shape<D>;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ batch_ring<D> ring;
    auto *state = (typename S::state *)(shared + S::N_STAGES * S::PIECE_BYTES);
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int kv_head = (int)blockIdx.y;
    int n_before = 0;
    tile t, ahead;
    int index_ahead = -1; /* of the tile that has been looked for already */
    bool exists_ahead = false;
    piece_range pieces;
    if (threadIdx.x == 0)
        ring.open(shared);
    __syncthreads();
    if (warp == S::N_WARPS)
        barrier_arrive(ring.turn + 0); /* nothing is ahead of the first piece */
    let_next_begin();
    auto find = [&](int index, tile *found) {
        if (index != index_ahead)
            return find_tile(g, kv_head, index, PAIRS, found);
        *found = ahead;
        return exists_ahead;
    };
    tile_walk walk = {(int)blockIdx.x, ALL_TOKENS};
    auto look_ahead = [&]() {
        index_ahead = walk.index + (int)gridDim.x;
        exists_ahead = find_tile(g, kv_head, index_ahead, PAIRS, &ahead);
    };
    for (; next_tile<false>(find, PAIRS, &walk, &t, &pieces); n_before += pieces.end) {
        bool is_spoilt = false;
        if (warp == S::N_WARPS)
            feed<T, D>(&ring, &map, box_rows, g, t, pieces.end, n_before, look_ahead);
        else
            is_spoilt = attend<T, D>(&ring, state, g, t, pieces.end, n_before, q, out, warp, look_ahead);
        leave_tile(&walk, t, is_spoilt);
    }
    end_blocks();
#endif
}

/* What was compiled counts, not the GPU: elsewhere the kernel is empty and has no barriers. */
template <typename T, int D> static bool is_compiled()
{
    struct cudaFuncAttributes compiled;
    return cudaFuncGetAttributes(&compiled, batch_kernel<T, D>) == cudaSuccess && compiled.sharedSizeBytes > 0 &&
           cudaFuncSetAttribute(batch_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                batch_shape<D>::SHARED_BYTES) == cudaSuccess;
}
template <typename T> static bool are_compiled()
{
    return is_compiled<T, 64>() && is_compiled<T, 80>() && is_compiled<T, 96>() && is_compiled<T, 128>();
}

extern "C" int dskv_cuda_attention_batch_open(void)
{
    bool can = find_encode() && are_compiled<__half>() && are_compiled<__nv_bfloat16>();
    (void)cudaGetLastError(); /* a refusal is an answer */
    return can;
}

template <typename T, int D>
static int launch_batch(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g,
                        unsigned n_blocks)
{
    CUtensorMap map;
    int box_rows = describe_layer(&map, &p->kv, g.kv);
    if (!box_rows)
        return 0;
    queue_kernel(&cuda->base, "attention", batch_kernel<T, D>, dim3(n_blocks, (unsigned)p->kv.n_kv_heads_local),
                 dim3(batch_shape<D>::N_THREADS), batch_shape<D>::SHARED_BYTES, map, g, box_rows, (const T *)p->q.data,
                 (T *)p->out.data);
    return 1;
}

/* Blocks of a KV head; 0: too few tiles to fill the device, which does better with parts of them.  Blocks that take
 * several tiles have the next one on its way when one ends, but nobody fills in for the last. */
static unsigned count_blocks(const struct dskv_cuda *cuda, int64_t n_tiles, int64_t kv_heads)
{
    int64_t n = n_tiles * kv_heads, room = (int64_t)cuda->n_multiprocessors * RESIDENT;
    if (n * 3 < (int64_t)cuda->n_multiprocessors * 2)
        return 0;
    int64_t n_rounds = (n + room - 1) / room, n_blocks = (n_tiles + n_rounds - 1) / n_rounds;
    bool is_even = n_blocks * kv_heads <= room && n * 10 >= n_rounds * room * 9;
    return (unsigned)(is_even ? n_blocks : n_tiles);
}

int attention_of_batch(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g)
{
    int64_t kv_heads = p->kv.n_kv_heads_local, group = (g.n_heads + kv_heads - 1) / kv_heads, rows = p->q.rows;
    if (!cuda->has_batch_attention || rows * group > PAIRS * g.n_work)
        return 0;
    int64_t of_runs = (rows * group + g.n_work * (PAIRS - 1)) / PAIRS, of_rows = rows * ((group + PAIRS - 1) / PAIRS);
    unsigned n_blocks = count_blocks(cuda, of_runs < of_rows ? of_runs : of_rows, kv_heads);
    if (n_blocks == 0)
        return 0;
    auto choose_size = [&](auto t) {
        using T = decltype(t);
        switch (g.kv.head_dim) {
        case 64: return launch_batch<T, 64>(cuda, p, g, n_blocks);
        case 80: return launch_batch<T, 80>(cuda, p, g, n_blocks);
        case 96: return launch_batch<T, 96>(cuda, p, g, n_blocks);
        default: return launch_batch<T, 128>(cuda, p, g, n_blocks);
        }
    };
    return p->q.dtype == DSKV_F16 ? choose_size(__half()) : choose_size(__nv_bfloat16());
}
