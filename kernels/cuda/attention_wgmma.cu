/* Attention of many rows with warpgroup instructions (compiled for 9.0a alone): head sizes 64 and 128.
 *
 * The steps, the order of every sum and the merge are those of attention_tile.cuh, so the bits are the same; only the
 * instruction is wider.  A piece's values start afresh, so while those of one piece are summed the weights of the next
 * are found.
 *
 * Grid: (persistent blocks, KV heads).  A block walks tiles of N_GROUPS * 64 pairs, late ones first.  In its last
 * warpgroup one thread asks the copy engine for keys and values, and a warp for each other group fetches its queries;
 * the others compute 64 pairs each.  Shared memory: each group's queries, a ring of stages of keys and values as
 * [D / 64][64 keys][64 dimensions], all swizzled as wgmma.cuh has it; 1024-byte aligned.  Queries are
 * 16-byte aligned.
 */
#include "cuda/attention_bulk.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/wgmma.cuh"

#include <algorithm>

/* Pairs and threads of a warpgroup. */
enum { GROUP_PAIRS = 64, GROUP_THREADS = 128 };

template <int D> struct shape {
    enum {
        N_GROUPS = D == 64 ? 3 : 2, /* that compute */
        N_PAIRS = N_GROUPS * GROUP_PAIRS,
        N_THREADS = (N_GROUPS + 1) * GROUP_THREADS,
        N_STAGES = 4,
        PIECE_BYTES = half_bytes<D>, /* keys, or values; a group's queries take as much */
        SHARED_BYTES = (N_GROUPS + 2 * N_STAGES) * PIECE_BYTES,
        /* All registers of a multiprocessor, dealt anew by what each has to do. */
        COMPUTE_REGISTERS = N_GROUPS == 3 ? 160 : 240,
        FEED_REGISTERS = N_GROUPS == 3 ? 32 : 24,
    };
};

#ifdef DSKV_HAS_WGMMA

struct barriers_of_stage {
    uint64_t keys_full, keys_empty, values_full, values_empty;
};
struct barriers_of_group {
    uint64_t full, empty; /* queries, and the tile they belong to */
};

/* A place in the ring; a barrier that has never completed lets the other parity pass. */
template <int D> struct place_in_ring {
    int slot, parity;

    __device__ __forceinline__ place_in_ring(unsigned n_pieces)
        : slot((int)(n_pieces % shape<D>::N_STAGES)), parity((int)(n_pieces / shape<D>::N_STAGES % 2))
    {
    }
};

template <int N> __device__ __forceinline__ void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void leave_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- which tiles ------------------------------------------------------------------------------------------------ */

__device__ int count_tiles(const attention_grid &g, int kv_head, int pairs_per_tile)
{
    int lane = (int)threadIdx.x % 32, group = 0, n = 0;
    for (int i = lane; i < g.n_heads; i += 32)
        group += g.kv_head_of_head[i] == kv_head;
    group = (int)__reduce_add_sync(~0u, (unsigned)group);
    for (int i = lane; i < g.n_work; i += 32)
        n += (g.work[i].n_tokens * group + pairs_per_tile - 1) / pairs_per_tile;
    return (int)__reduce_add_sync(~0u, (unsigned)n);
}

/* The block's tile of a round: late tiles, which see most keys, come first, and every other round deals them the other
 * way round, so that blocks have about the same to do.  All lanes of a warp call it. */
__device__ __forceinline__ bool tile_of_round(const attention_grid &g, int n_tiles, int round, int pairs_per_tile,
                                              tile *t)
{
    int n_blocks = (int)gridDim.x, block = (int)blockIdx.x;
    int place = round * n_blocks + (round % 2 ? n_blocks - 1 - block : block);
    return place < n_tiles && find_tile(g, (int)blockIdx.y, n_tiles - 1 - place, pairs_per_tile, t);
}

/* ---- what comes in ---------------------------------------------------------------------------------------------- */

/* One warp: keys and values of every piece of every tile, by its first lane. */
template <int D>
__device__ __forceinline__ void feed(const attention_grid &g, const CUtensorMap *map, int box_rows, int n_tiles,
                                     unsigned char *stages, barriers_of_stage *barriers)
{
    tile t;
    int n_asked = 0;
    for (int round = 0; tile_of_round(g, n_tiles, round, shape<D>::N_PAIRS, &t); round++) {
        for (int first = 0; first <= t.last && threadIdx.x % 32 == 0; first += KEYS, n_asked++) {
            place_in_ring<D> place(n_asked);
            unsigned char *stage = stages + place.slot * 2 * shape<D>::PIECE_BYTES;
            barriers_of_stage *b = barriers + place.slot;
            barrier_wait(&b->keys_empty, place.parity ^ 1);
            barrier_expect(&b->keys_full, shape<D>::PIECE_BYTES);
            bring_half<D>(stage, map, box_rows, g.kv.block_tokens, t, first, 0, &b->keys_full);
            barrier_wait(&b->values_empty, place.parity ^ 1);
            barrier_expect(&b->values_full, shape<D>::PIECE_BYTES);
            bring_half<D>(stage + shape<D>::PIECE_BYTES, map, box_rows, g.kv.block_tokens, t, first, 1,
                          &b->values_full);
        }
        __syncwarp();
    }
}

/* One warp: the queries of a group, tile by tile, and which tile it is; one of no pairs is the end. */
template <typename T, int D>
__device__ __forceinline__ void fetch(const attention_grid &g, const T *q, int n_tiles, int group,
                                      unsigned char *queries, barriers_of_group *barrier, tile *tiles)
{
    constexpr int CHUNKS = D / 8; /* of 16 bytes in a row */
    int lane = (int)threadIdx.x % 32;
    bool found = true;
    for (int round = 0; found; round++) {
        tile t = {};
        found = tile_of_round(g, n_tiles, round, shape<D>::N_PAIRS, &t);
        barrier_wait(&barrier->empty, round % 2 ^ 1);
        if (found) {
            t.first_pair += group * GROUP_PAIRS;
            for (int i = lane; i < GROUP_PAIRS * CHUNKS; i += 32) {
                int row = i / CHUNKS, chunk = i % CHUNKS, pair = t.first_pair + row;
                bool exists = pair < t.n_pairs;
                const T *from =
                    exists ? q + row_of(t, pair) * g.q_stride + (int64_t)head_of(t, pair) * D + chunk * 8 : q;
                copy_or_clear(queries + place_of(row, chunk * 8), from, exists ? 16 : 0);
            }
            commit_copies();
        } else {
            t.n_pairs = 0;
        }
        if (lane == 0)
            tiles[round % 2] = t;
        wait_copies<0>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(&barrier->full);
    }
}

/* ---- what is made of it ----------------------------------------------------------------------------------------- */

template <typename T, int D>
__device__ __forceinline__ void begin_keys(float (*score)[4], uint64_t queries, uint64_t keys)
{
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        int offset = (step / 4 * BOX_BYTES + step % 4 * 32) >> 4;
        if (step == 0)
            wgmma<T, KEYS, false>(score, queries, keys);
        else
            wgmma<T, KEYS>(score, queries + offset, keys + offset);
    }
    wgmma_commit();
}

template <typename T, int D>
__device__ __forceinline__ void begin_values(float (*value)[4], const uint32_t (*weights)[4], uint64_t values)
{
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        if (step == 0)
            wgmma_transposed<T, D, false>(value, weights[step], values);
        else
            wgmma_transposed<T, D, true>(value, weights[step], values + (step * 16 * ROW_BYTES >> 4));
    wgmma_commit();
}

/* A piece's scores become weights, still as floats; maxima and factors. */
__device__ __forceinline__ void weigh_piece(float (*score)[2][4], rows_state *all, float *keep, float *add,
                                            const rows_seen &seen, int first, float scale)
{
    float max[2];
    mask_piece(max, score, seen, first, scale);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        raise_scores(score[i], scale, max);
    merge_max(all, max, seen.last, first, keep, add);
}

__device__ __forceinline__ uint32_t load_16_bits(uint32_t shared)
{
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(shared) : "memory");
    return x;
}

/* A weight of 0 times a stored value that is not finite is no number: such a value of a key that a row does not see
 * has spoilt it.  Here a warp computes its rows one by one, from values that are 0 where the row does not see them.
 * This is rare, so it runs through local memory and leaves the registers to those that wait for it. */
template <typename T, int D>
__device__ __forceinline__ void mend_values(float (*value)[2][4], const uint32_t (*weights)[4], uint32_t values,
                                            const int *last, int first)
{
    int lane = (int)threadIdx.x % 32;
    float mended[D / 8][4];
#pragma unroll 1
    for (int i = 0; i < TILE * D / 8; i++) {
        int row = i % TILE, block = i / TILE; /* of 8 dimensions: lane / 4 is the right operand's column */
        int end = __shfl_sync(~0u, row < 8 ? last[0] : last[1], row % 8 * 4) - first + 1;
        float c[4] = {};
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            uint32_t b[2] = {};
            for (int j = 0; j < 4; j++) {
                int key = step * 16 + j / 2 * 8 + lane % 4 * 2 + j % 2;
                uint32_t at = values + place_of(key, block * 8);
                b[j / 2] |= (key < end ? load_16_bits(at + lane / 4 * 2) : 0) << j % 2 * 16;
            }
            mma<T>(c, weights[step], b[0], b[1]);
        }
        if (lane / 4 == row % 8) {
            mended[block][row / 8 * 2] = c[row / 8 * 2];
            mended[block][row / 8 * 2 + 1] = c[row / 8 * 2 + 1];
        }
    }
#pragma unroll
    for (int i = 0; i < D / 2; i++)
        value[i / 8][i / 4 % 2][i % 4] = mended[i / 4][i % 4];
}

/* A group's pairs of one tile over the pieces [0, n), of which the first is the ring's n_before-th. */
template <typename T, int D>
__device__ __forceinline__ void attend(float (*all_values)[2][4], rows_state *all, const rows_seen &seen, int n,
                                       float scale, uint32_t queries, unsigned char *stages,
                                       barriers_of_stage *barriers, int n_before, uint64_t *queries_empty)
{
    constexpr int UNITS = D / 16, PIECE_BYTES = shape<D>::PIECE_BYTES;
    bool is_first_lane = threadIdx.x % 32 == 0;
    uint32_t base = shared_address(stages);
    uint64_t query_operand = wgmma_operand(queries);
    float score[KEYS / 16][2][4], value[UNITS][2][4], sum[2], keep[2], add[2], next_keep[2], next_add[2];
    uint32_t weights[KEYS / 16][4];
    auto wait_for_keys = [&](int piece) {
        place_in_ring<D> place(n_before + piece);
        barrier_wait(&barriers[place.slot].keys_full, place.parity);
    };
    auto ask_scores = [&](int piece) {
        place_in_ring<D> place(n_before + piece);
        begin_keys<T, D>(score[0], query_operand, wgmma_operand(base + place.slot * 2 * PIECE_BYTES));
    };
    auto take_scores = [&](int piece) {
        wgmma_sums<KEYS>(score[0]);
        if (is_first_lane)
            barrier_arrive(&barriers[place_in_ring<D>(n_before + piece).slot].keys_empty);
    };
    auto ask_values = [&](int piece) {
        place_in_ring<D> place(n_before + piece);
        barrier_wait(&barriers[place.slot].values_full, place.parity);
        begin_values<T, D>(value[0], weights,
                           wgmma_operand(base + place.slot * 2 * PIECE_BYTES + PIECE_BYTES, BOX_BYTES));
    };
    auto take_values = [&](int piece) {
        wgmma_sums<D>(value[0]);
        int slot = place_in_ring<D>(n_before + piece).slot, first = piece * KEYS;
        if (first + KEYS - 1 > seen.least && __any_sync(~0u, has_nan<UNITS>(value)))
            mend_values<T, D>(value, weights, base + slot * 2 * PIECE_BYTES + PIECE_BYTES, seen.last, first);
        __syncwarp();
        if (is_first_lane)
            barrier_arrive(&barriers[slot].values_empty);
    };
    auto pack = [&]() {
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++)
            pack_weights<T>(weights[i], score[i]);
        sum_weights<T>(sum, weights);
        for (int i = 0; i < 2; i++) {
            keep[i] = next_keep[i];
            add[i] = next_add[i];
        }
    };
    auto merge = [&]() {
        merge_sum(all, sum, keep, add);
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            merge_values(all_values[i], value[i], keep, add);
    };

    wait_for_keys(0);
    ask_scores(0);
    wgmma_wait<0>();
    take_scores(0);
    weigh_piece(score, all, next_keep, next_add, seen, 0, scale);
    pack();
    if (n > 1)
        wait_for_keys(1);
    for (int piece = 0; piece + 1 < n; piece++) {
        ask_scores(piece + 1);
        ask_values(piece);
        wgmma_wait<1>();
        take_scores(piece + 1);
        weigh_piece(score, all, next_keep, next_add, seen, (piece + 1) * KEYS, scale);
        if (piece + 2 < n)
            wait_for_keys(piece + 2); /* here, so that the compiler leaves the weights ahead of the next wait */
        wgmma_wait<0>();
        take_values(piece);
        merge();
        pack();
    }
    barrier_arrive(queries_empty); /* nor does this lane need the tile before */
    ask_values(n - 1);
    wgmma_wait<0>();
    take_values(n - 1);
    merge();
}

/* A group: its 64 pairs of each tile, over the pieces as they come; those that none of them sees are let go. */
template <typename T, int D>
__device__ __forceinline__ void compute(const attention_grid &g, T *out, bool out_aligned, uint32_t queries,
                                        unsigned char *stages, barriers_of_stage *barriers, barriers_of_group *own,
                                        const tile *tiles)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x % GROUP_THREADS / 32, n_before = 0;
    for (int round = 0;; round++) {
        const tile &t = tiles[round % 2];
        barrier_wait(&own->full, round % 2);
        int n_pairs = t.n_pairs, first_pair = t.first_pair, pair = first_pair + warp * TILE,
            n_asked = t.last / KEYS + 1;
        if (n_pairs == 0)
            break;
        int n = first_pair < n_pairs ? last_of(t, min(first_pair + GROUP_PAIRS, n_pairs) - 1) / KEYS + 1 : 0;
        if (n > 0) {
            rows_seen seen = seen_from(t, pair);
            rows_state all;
            float all_values[D / 16][2][4] = {};
            clear_rows(&all);
            attend<T, D>(all_values, &all, seen, n, g.scale * LOG2_E, queries, stages, barriers, n_before, &own->empty);
#pragma unroll
            for (int i = 0; i < D / 16; i++)
                store_results<T, D>(g, t, pair, all_values[i], all.sum, i * 16, out, out_aligned);
        } else {
            barrier_arrive(&own->empty);
        }
        for (; n < n_asked; n++) {
            place_in_ring<D> place(n_before + n);
            barrier_wait(&barriers[place.slot].keys_full, place.parity);
            barrier_wait(&barriers[place.slot].values_full, place.parity);
            __syncwarp(); /* all lanes have seen both */
            if (lane == 0) {
                barrier_arrive(&barriers[place.slot].keys_empty);
                barrier_arrive(&barriers[place.slot].values_empty);
            }
        }
        n_before += n_asked;
    }
}

#endif

template <typename T, int D>
__global__ void __launch_bounds__(shape<D>::N_THREADS, 1)
    wgmma_kernel(const __grid_constant__ CUtensorMap map, attention_grid g, int box_rows, const T *q, T *out,
                 bool out_aligned)
{
#ifdef DSKV_HAS_WGMMA
    constexpr int N_GROUPS = shape<D>::N_GROUPS, N_STAGES = shape<D>::N_STAGES, PIECE_BYTES = shape<D>::PIECE_BYTES;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ barriers_of_stage of_stage[N_STAGES];
    __shared__ barriers_of_group of_group[N_GROUPS];
    __shared__ tile tiles[N_GROUPS][2];
    unsigned char *stages = shared + N_GROUPS * PIECE_BYTES;
    int group = __shfl_sync(~0u, (int)threadIdx.x / GROUP_THREADS, 0), warp = (int)threadIdx.x % GROUP_THREADS / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < N_STAGES; i++) {
            barrier_init(&of_stage[i].keys_full, 1);
            barrier_init(&of_stage[i].values_full, 1);
            barrier_init(&of_stage[i].keys_empty, N_GROUPS * 4); /* each warp for itself */
            barrier_init(&of_stage[i].values_empty, N_GROUPS * 4);
        }
        for (int i = 0; i < N_GROUPS; i++) {
            barrier_init(&of_group[i].full, 32);
            barrier_init(&of_group[i].empty, GROUP_THREADS); /* each lane for itself: all read the tile */
        }
        barriers_are_ready();
    }
    __syncthreads();
    follow_previous(); /* queries, keys and values may still be written */
    if (group == N_GROUPS) {
        leave_registers<shape<D>::FEED_REGISTERS>();
        int n_tiles = count_tiles(g, (int)blockIdx.y, shape<D>::N_PAIRS);
        if (warp == 0)
            feed<D>(g, &map, box_rows, n_tiles, stages, of_stage);
        else if (warp <= N_GROUPS)
            fetch<T, D>(g, q, n_tiles, warp - 1, shared + (warp - 1) * PIECE_BYTES, &of_group[warp - 1],
                        tiles[warp - 1]);
    } else {
        take_registers<shape<D>::COMPUTE_REGISTERS>();
        compute<T, D>(g, out, out_aligned, shared_address(shared + group * PIECE_BYTES), stages, of_stage,
                      &of_group[group], tiles[group]);
    }
#endif
}

/* ---- the launch ------------------------------------------------------------------------------------------------- */

/* What was compiled counts, not the GPU: elsewhere the kernel is empty and has no barriers. */
template <typename T, int D> static bool is_compiled()
{
    struct cudaFuncAttributes compiled;
    return cudaFuncGetAttributes(&compiled, wgmma_kernel<T, D>) == cudaSuccess && compiled.sharedSizeBytes > 0 &&
           cudaFuncSetAttribute(wgmma_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shape<D>::SHARED_BYTES) == cudaSuccess;
}

extern "C" int dskv_cuda_attention_wgmma_open(void)
{
    bool can = find_encode() && is_compiled<__half, 64>() && is_compiled<__half, 128>() &&
               is_compiled<__nv_bfloat16, 64>() && is_compiled<__nv_bfloat16, 128>();
    (void)cudaGetLastError(); /* a refusal is an answer */
    return can;
}

template <typename T, int D>
static int launch_wgmma(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g)
{
    /* Half of the multiprocessors with a tile each are faster than all with the smaller ones; tiles are then full. */
    int64_t kv_heads = p->kv.n_kv_heads_local, n_pairs = p->q.rows * g.n_heads;
    if (n_pairs < shape<D>::N_PAIRS * std::max<int64_t>(cuda->n_multiprocessors / 2, p->n_work * kv_heads))
        return 0;
    CUtensorMap map;
    int box_rows = describe_layer(&map, &p->kv, g.kv);
    if (!box_rows)
        return 0;
    T *out = (T *)p->out.data;
    dim3 grid((unsigned)std::max<int64_t>(cuda->n_multiprocessors / kv_heads, 1), (unsigned)kv_heads);
    queue_kernel(&cuda->base, "attention", wgmma_kernel<T, D>, grid, dim3(shape<D>::N_THREADS), shape<D>::SHARED_BYTES,
                 map, g, box_rows, (const T *)p->q.data, out, are_pairs_aligned(out, g.out_stride));
    return 1;
}

int attention_with_warpgroups(struct dskv_cuda *cuda, const struct dskv_attention *p, const attention_grid &g)
{
    int size = g.kv.head_dim;
    if (!cuda->has_warpgroups || (size != 64 && size != 128) || g.q_stride % 8 || (size_t)p->q.data % 16)
        return 0;
    if (p->q.dtype == DSKV_F16)
        return size == 64 ? launch_wgmma<__half, 64>(cuda, p, g) : launch_wgmma<__half, 128>(cuda, p, g);
    return size == 64 ? launch_wgmma<__nv_bfloat16, 64>(cuda, p, g) : launch_wgmma<__nv_bfloat16, 128>(cuda, p, g);
}
