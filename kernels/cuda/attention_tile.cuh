/* One piece of keys against 16 queries with mma.sync m16n8k16: what the kernels of attention_tensor.cu are made of, and
 * in part those of attention_wgmma.cu and attention_batch.cu.
 *
 * The steps are one warp's, and each has one order: a score is one accumulator over the head's dimensions in steps of
 * 16, a row's sum and its values are each one accumulator over the piece's 64 keys in steps of 16.  Which warp does
 * which keys or dimensions changes no bit.
 *
 * Of an accumulator c[4] of 16 x 8, a lane holds rows lane / 4 (c[0], c[1]) and lane / 4 + 8 (c[2], c[3]), columns
 * lane % 4 * 2 and the next one. */
#ifndef DSKV_KERNELS_CUDA_ATTENTION_TILE_CUH
#define DSKV_KERNELS_CUDA_ATTENTION_TILE_CUH

#include "cuda/attention.cuh"
#include "cuda/bulk.cuh"
#include "cuda/mma.cuh"

#include <climits>

#define LOG2_E 1.44269504f /* scores are kept in units of it, for 2^x */

enum { TILE = 16, KEYS = DSKV_KEY_PIECE, N_WARPS = 4, N_THREADS = 32 * N_WARPS };

/* In shared memory, keys or values of a piece lie as the copy engine stores them and as warpgroup instructions read
 * them: boxes of 64 dimensions, in each a row of 128 bytes a key, whose chunks of 16 bytes are swizzled by the key's
 * number modulo 8, so that eight keys touch all banks. */
enum { BOX_DIMS = 64, ROW_BYTES = BOX_DIMS * 2, BOX_BYTES = KEYS * ROW_BYTES };
template <int D> constexpr int half_bytes = (D + BOX_DIMS - 1) / BOX_DIMS *BOX_BYTES; /* of a piece */

/* Where eight dimensions from `column` on of a key lie. */
__device__ __forceinline__ int place_of(int key, int column)
{
    return column / BOX_DIMS * BOX_BYTES + key * ROW_BYTES + (column % BOX_DIMS / 8 ^ key % 8) * 16;
}

/* 2^x: one instruction, of one error for all; 2^-inf is 0. */
__device__ __forceinline__ float exp2_of(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <typename T> __device__ __forceinline__ uint32_t pack(T low, T high)
{
    return (uint32_t) __builtin_bit_cast(uint16_t, high) << 16 | __builtin_bit_cast(uint16_t, low);
}

/* ---- which queries ---------------------------------------------------------------------------------------------- */

/* Pairs of (token, query head) that read one KV head, token by token: pair i of a run is token i / group and head
 * first_head + i % group.  A tile is up to some number of them. */
struct tile {
    const int32_t *table;
    int first_row, start;    /* of the run */
    int first_head, group;   /* the KV head's query heads */
    int first_pair, n_pairs; /* the tile's first, and the run's number */
    int last;                /* last key that any of the tile's pairs sees */
};

__device__ __forceinline__ int row_of(const tile &t, int pair)
{
    return t.first_row + pair / t.group;
}
__device__ __forceinline__ int head_of(const tile &t, int pair)
{
    return t.first_head + pair % t.group;
}
/* The last key that a pair sees; -1 behind the run's end. */
__device__ __forceinline__ int last_of(const tile &t, int pair)
{
    return pair < t.n_pairs ? t.start + pair / t.group : -1;
}

/* The pair of a lane's first or second row (half: 0, 1) of the 16 from `first` on. */
__device__ __forceinline__ int pair_of_lane(int first, int half)
{
    return first + (int)threadIdx.x % 32 / 4 + half * 8;
}

/* What a warp's 16 pairs from `first` on see. */
struct rows_seen {
    int last[2]; /* last keys of the lane's two rows */
    int least;   /* the least last key of all; behind the run's end nothing needs a mask */
};
__device__ __forceinline__ rows_seen seen_from(const tile &t, int first)
{
    return {{last_of(t, pair_of_lane(first, 0)), last_of(t, pair_of_lane(first, 1))},
            first < t.n_pairs ? last_of(t, first) : INT_MAX};
}

struct run {
    int first, n_tokens, start, first_block;
};
/* Run i, one of no tokens behind the last. */
__device__ __forceinline__ run run_at(const attention_grid &g, int i)
{
    if (i >= g.n_work)
        return {0, 0, 0, 0};
    const struct dskv_attention_work &w = g.work[i];
    return {w.first, w.n_tokens, w.start, w.first_block};
}

/* Tile `index` of a KV head, counted run by run; false behind the last one.  All lanes of a warp call it, and each has
 * a run: those of the first two rounds are on their way together with what heads read. */
static __device__ bool find_tile(const attention_grid &g, int kv_head, int index, int pairs_per_tile, tile *t)
{
    const int lane = (int)threadIdx.x % 32;
    run mine = run_at(g, lane), next = run_at(g, lane + 32);
    t->first_head = t->group = 0;
    for (int i = 0; i < g.n_heads; i += 32) {
        int owner = i + lane < g.n_heads ? g.kv_head_of_head[i + lane] : INT_MAX;
        t->first_head += __popc(__ballot_sync(~0u, owner < kv_head));
        t->group += __popc(__ballot_sync(~0u, owner == kv_head));
    }
    for (int i = 0; i < g.n_work; i += 32) {
        int n = (mine.n_tokens * t->group + pairs_per_tile - 1) / pairs_per_tile, end = n;
        for (int offset = 1; offset < 32; offset <<= 1) {
            int before = __shfl_up_sync(~0u, end, offset);
            end += lane >= offset ? before : 0;
        }
        unsigned found = __ballot_sync(~0u, index < end);
        if (found) {
            int which = __ffs((int)found) - 1;
            t->table = g.tables + __shfl_sync(~0u, mine.first_block, which);
            t->first_row = __shfl_sync(~0u, mine.first, which);
            t->start = __shfl_sync(~0u, mine.start, which);
            t->n_pairs = __shfl_sync(~0u, mine.n_tokens, which) * t->group;
            t->first_pair = (index - __shfl_sync(~0u, end - n, which)) * pairs_per_tile;
            t->last = last_of(*t, min(t->first_pair + pairs_per_tile, t->n_pairs) - 1);
            return true;
        }
        index -= __shfl_sync(~0u, end, 31);
        mine = next;
        next = run_at(g, i + 64 + lane);
    }
    return false;
}

/* What a block computes next: whole tiles, or one of a tile's tokens alone. */
enum { ALL_TOKENS = -1 };
struct tile_walk {
    int index, token;
};
struct piece_range {
    int next, end;
};

/* The pieces of a tile that a block takes: all or, in groups as even as they go, its share. */
template <bool SPLIT> __device__ __forceinline__ piece_range pieces_of(const tile &t)
{
    int n = t.last / KEYS + 1, n_groups = SPLIT ? (int)gridDim.z : 1, n_each = (n + n_groups - 1) / n_groups;
    int first = SPLIT ? (int)blockIdx.z * n_each : 0;
    return {first, min(first + n_each, n)};
}

/* Leaves only the pairs of one token in the tile; false when it has none. */
__device__ __forceinline__ bool keep_token(tile *t, int token, int pairs_per_tile)
{
    int end = min(min(t->first_pair + pairs_per_tile, (token + 1) * t->group), t->n_pairs);
    t->first_pair = max(t->first_pair, token * t->group);
    t->n_pairs = end;
    t->last = t->start + token;
    return t->first_pair < end;
}

/* The next tile with pieces for this block; false behind the last one.  All threads of a block call it.  find:
 * find_tile of an index. */
template <bool SPLIT, typename F>
__device__ bool next_tile(F find, int pairs_per_tile, tile_walk *walk, tile *t, piece_range *pieces)
{
    for (; find(walk->index, t); walk->index += (int)gridDim.x) {
        *pieces = pieces_of<SPLIT>(*t);
        if (walk->token == ALL_TOKENS) {
            if (pieces->next < pieces->end)
                return true;
            continue;
        }
        if (keep_token(t, walk->token, pairs_per_tile)) {
            pieces->end = min(pieces->end, t->last / KEYS + 1); /* may be none: the loops over pieces allow it */
            return true;
        }
        walk->token = ALL_TOKENS;
    }
    return false;
}

/* After a tile.  A weight of 0 times a value that is not finite is no number: where a later token of the tile has
 * stored such a value, earlier rows are spoilt.  Then each token is computed alone, as if nothing stood behind it. */
__device__ __forceinline__ void leave_tile(tile_walk *walk, const tile &t, bool is_spoilt)
{
    if (walk->token != ALL_TOKENS)
        walk->token++;
    else if (t.last != last_of(t, t.first_pair) && __syncthreads_or(is_spoilt))
        walk->token = t.first_pair / t.group;
    else
        walk->index += (int)gridDim.x;
}

/* Blocks without a tile end at once.  Should all be such blocks, one waits, for the sake of what is queued behind. */
__device__ __forceinline__ void end_blocks()
{
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
        wait_for_previous();
}

/* ---- a piece ---------------------------------------------------------------------------------------------------- */

/* The block's threads ask for keys and values [first, first + 64); those past `last` become zeros. */
template <typename T, int D>
__device__ __forceinline__ void copy_piece(unsigned char *keys, unsigned char *values, kv_layer kv, int kv_head,
                                           const int32_t *table, int first, int last)
{
    constexpr int CHUNKS = D / 8; /* of 16 bytes in a row */
    bool one_block = kv.block_tokens % KEYS == 0;
    const T *start = one_block ? key_of_position<T>(kv, table, first, kv_head) : (const T *)kv.data;
#pragma unroll
    for (int step = 0; step < KEYS * CHUNKS / N_THREADS; step++) {
        int i = step * N_THREADS + (int)threadIdx.x, key = i / CHUNKS, column = i % CHUNKS * 8, position = first + key;
        bool seen = position <= last;
        const T *row = start;
        if (one_block)
            row = start + (seen ? key * D : 0);
        else if (seen)
            row = key_of_position<T>(kv, table, position, kv_head);
        copy_or_clear(keys + place_of(key, column), row + column, seen ? 16 : 0);
        copy_or_clear(values + place_of(key, column), row + value_offset(kv) + column, seen ? 16 : 0);
    }
}

/* One thread brings the same nearer, into the second-level cache, which sees whatever is written later. */
template <typename T>
__device__ __forceinline__ void prefetch_piece(kv_layer kv, int kv_head, const int32_t *table, int first, int last)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (kv.block_tokens % KEYS == 0) {
        const T *keys = key_of_position<T>(kv, table, first, kv_head);
        int bytes = min(KEYS, last - first + 1) * kv.head_dim * (int)sizeof(T);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(keys), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(keys + value_offset(kv)), "r"(bytes)
                     : "memory");
    }
#endif
}

/* Two neighbours can be accessed as one in every row. */
template <typename T> __host__ __device__ __forceinline__ bool are_pairs_aligned(const T *rows, int64_t stride)
{
    return (size_t)rows % 4 == 0 && stride % 2 == 0;
}

/* The 16 queries from `pair` on as the left operand; zeros behind the run's end. */
template <typename T, int D>
__device__ __forceinline__ void load_queries(uint32_t (*a)[4], const attention_grid &g, const tile &t, int pair,
                                             const T *q, bool aligned)
{
    int column = (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = pair_of_lane(pair, half);
        bool exists = mine < t.n_pairs;
        const T *row = exists ? q + row_of(t, mine) * g.q_stride + (int64_t)head_of(t, mine) * D + column : q;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const T *at = row + i * 16 + side * 8;
                uint32_t two = 0;
                if (exists)
                    two = aligned ? *(const uint32_t *)at : pack(at[0], at[1]);
                a[i][half + side * 2] = two;
            }
    }
}

/* Products of the queries with N * 16 keys, of which the first lies at `keys`. */
template <typename T, int D, int N>
__device__ __forceinline__ void multiply_keys(float (*score)[2][4], const uint32_t (*q)[4], uint32_t keys)
{
    int lane = (int)threadIdx.x % 32, key = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < N * 8; i++)
        score[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < D / 16; step++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            uint32_t b[4];
            load_matrices(b, keys + i * 16 * ROW_BYTES + place_of(key, step * 16 + lane / 8 % 2 * 8));
            mma<T>(score[i][0], q[step], b[0], b[1]);
            mma<T>(score[i][1], q[step], b[2], b[3]);
        }
}

/* Of 16 keys from `first_key` on, those past the rows' last keys become minus infinity. */
__device__ __forceinline__ void mask_scores(float (*score)[4], int first_key, const int *last)
{
    int column = first_key + (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            score[i][j] = column + i * 8 + j % 2 <= last[j / 2] ? score[i][j] : -INFINITY;
}

/* The largest of each of a lane's two rows' scores, of N * 16 keys, over all of the row's lanes. */
template <int N> __device__ __forceinline__ void max_of_rows(float *max, const float (*score)[2][4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        max[half] = -INFINITY;
#pragma unroll
        for (int i = 0; i < N * 2; i++)
            max[half] = fmaxf(max[half], fmaxf(score[i / 2][i % 2][half * 2], score[i / 2][i % 2][half * 2 + 1]));
        max[half] = fmaxf(max[half], __shfl_xor_sync(~0u, max[half], 1));
        max[half] = fmaxf(max[half], __shfl_xor_sync(~0u, max[half], 2));
    }
}

/* Masks the scores of the piece that begins at key `first`, if any need it, and finds the rows' maxima, scaled. */
__device__ __forceinline__ void mask_piece(float *max, float (*score)[2][4], const rows_seen &seen, int first,
                                           float scale)
{
    if (first + KEYS - 1 > seen.least)
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            mask_scores(score[i], first + i * 16, seen.last);
    max_of_rows<KEYS / 16>(max, score);
    max[0] *= scale;
    max[1] *= scale;
}

/* Scores of 16 keys become weights 2^(score * scale - max).  A masked key's is 0, also where all are masked and the
 * maximum, which is scaled, is minus infinity. */
__device__ __forceinline__ void raise_scores(float (*score)[4], float scale, const float *max)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float minus = max[half] == -INFINITY ? 0.0f : -max[half];
#pragma unroll
        for (int i = 0; i < 4; i++)
            score[i / 2][half * 2 + i % 2] = exp2_of(fmaf(score[i / 2][half * 2 + i % 2], scale, minus));
    }
}
/* They in the pool's dtype, as a left operand. */
template <typename T> __device__ __forceinline__ void pack_weights(uint32_t *a, const float (*weight)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = pack(from_float<T>(weight[i / 2][i % 2 * 2]), from_float<T>(weight[i / 2][i % 2 * 2 + 1]));
}
template <typename T>
__device__ __forceinline__ void weigh(uint32_t *a, float (*score)[4], float scale, const float *max)
{
    raise_scores(score, scale, max);
    pack_weights<T>(a, score);
}

/* Weights of 64 keys times values, N times 16 dimensions, `step` apart, from `column` on; none from D on. */
template <typename T, int D, int N>
__device__ __forceinline__ void multiply_values(float (*sum)[2][4], const uint32_t (*weights)[4], uint32_t values,
                                                int column, int step)
{
    int lane = (int)threadIdx.x % 32, place = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < N * 8; i++)
        sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int key = 0; key < KEYS / 16; key++)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (column + i * step < D) {
                uint32_t b[4];
                load_matrices_transposed(b, values + key * 16 * ROW_BYTES +
                                                place_of(place, column + i * step + lane / 16 * 8));
                mma<T>(sum[i][0], weights[key], b[0], b[1]);
                mma<T>(sum[i][1], weights[key], b[2], b[3]);
            }
}

/* Whether any of a lane's values is no number. */
template <int N> __device__ __forceinline__ bool has_nan(const float (*value)[2][4])
{
    bool found = false;
#pragma unroll
    for (int i = 0; i < N * 8; i++)
        found |= value[i / 8][i / 4 % 2][i % 4] != value[i / 8][i / 4 % 2][i % 4];
    return found;
}

/* The two rows' sums of weights. */
template <typename T> __device__ __forceinline__ void sum_weights(float *sum, const uint32_t (*weights)[4])
{
    const uint32_t ones = pack(from_float<T>(1.0f), from_float<T>(1.0f));
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        mma<T>(c, weights[i], ones, ones);
    sum[0] = c[0];
    sum[1] = c[2];
}

/* ---- the merge -------------------------------------------------------------------------------------------------- */

/* The pieces so far and the next one: x = x * keep + next * add, in this form everywhere. */
__device__ __forceinline__ float merged(float x, float keep, float next, float add)
{
    return fmaf(x, keep, next * add);
}

/* What a lane keeps of its two rows between pieces. */
struct rows_state {
    float max[2], sum[2];
};

/* Takes the next piece's maxima in, and gives the factors for sums and values.  A row that sees nothing of the piece
 * keeps its state to the bit: x * 1 + 0 * -0. */
__device__ __forceinline__ void merge_max(rows_state *all, const float *max, const int *last, int first, float *keep,
                                          float *add)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float larger = fmaxf(all->max[i], max[i]);
        bool sees = first <= last[i];
        keep[i] = sees ? exp2_of(all->max[i] - larger) : 1.0f;
        add[i] = sees ? exp2_of(max[i] - larger) : -0.0f;
        all->max[i] = sees ? larger : all->max[i];
    }
}

__device__ __forceinline__ void merge_sum(rows_state *all, const float *sum, const float *keep, const float *add)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        all->sum[i] = merged(all->sum[i], keep[i], sum[i], add[i]);
}

__device__ __forceinline__ void merge_rows(rows_state *all, const float *max, const float *sum, const int *last,
                                           int first, float *keep, float *add)
{
    merge_max(all, max, last, first, keep, add);
    merge_sum(all, sum, keep, add);
}

__device__ __forceinline__ void clear_rows(rows_state *all)
{
    all->max[0] = all->max[1] = -INFINITY;
    all->sum[0] = all->sum[1] = 0.0f;
}

/* Takes a piece's values of 16 dimensions into the values so far. */
__device__ __forceinline__ void merge_values(float (*all)[4], const float (*value)[4], const float *keep,
                                             const float *add)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            all[i][j] = merged(all[i][j], keep[j / 2], value[i][j], add[j / 2]);
}

/* Those of finished rows, from dimension `column` on, as results. */
template <typename T, int D>
__device__ __forceinline__ void store_results(const attention_grid &g, const tile &t, int pair, const float (*value)[4],
                                              const float *sum, int column, T *out, bool aligned)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int mine = pair_of_lane(pair, half);
        if (mine >= t.n_pairs)
            continue;
        T *row =
            out + row_of(t, mine) * g.out_stride + (int64_t)head_of(t, mine) * D + column + (int)threadIdx.x % 4 * 2;
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

#endif
