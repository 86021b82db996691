/* Attention over the pool, for one to thousands of query rows: the generic form, for every dtype and head size.
 *
 * Keys are cut at absolute positions into pieces of DSKV_KEY_PIECE = 64.  A warp computes one piece for one row and
 * head from a fresh state: two keys a lane, each score one fma chain over the head's dimensions ascending, then *
 * scale; the piece's maximum, weights exp(s - max) (a masked key's is selected to 0), their sum in one fixed tree,
 * values accumulated over keys ascending.  Pieces merge in ascending order.  Few rows: every piece is its own warp, and
 * a second kernel merges from scratch; many rows: one warp walks the pieces.  Both call the same two functions, so the
 * bits are the same.
 */
#include "cuda/attention.cuh"

enum { WARPS = 4, MAX_DIMS = DSKV_MAX_HEAD_DIM / 32 }; /* dimensions of a head per lane */

struct piece_state {
    float max, sum;
    float values[MAX_DIMS]; /* lane l holds dimensions l, l + 32, ... */
};

/* Keys [first, first + 64) of `table`, those past `last` masked; first <= last. */
template <typename K>
__device__ void compute_piece(piece_state *state, kv_layer kv, int kv_head, const int32_t *table, int first, int last,
                              const float *q, float scale, int lane)
{
    float score[2], weight[2];
    for (int half = 0; half < 2; half++) {
        int key = first + half * 32 + lane;
        score[half] = -INFINITY;
        if (key <= last) {
            const K *row = key_of_position<K>(kv, table, key, kv_head);
            float sum = 0.0f;
            for (int d = 0; d < kv.head_dim; d++)
                sum = fmaf(q[d], to_float(row[d]), sum);
            score[half] = sum * scale;
        }
    }
    float max = fmaxf(score[0], score[1]);
    for (int offset = 16; offset; offset >>= 1)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
    for (int half = 0; half < 2; half++)
        weight[half] = first + half * 32 + lane <= last ? expf(score[half] - max) : 0.0f;
    float sum = weight[0] + weight[1];
    for (int offset = 16; offset; offset >>= 1)
        sum = sum + __shfl_xor_sync(~0u, sum, offset);
    state->max = max;
    state->sum = sum;
    for (int i = 0; i < MAX_DIMS; i++)
        state->values[i] = 0.0f;
    int n_keys = min(DSKV_KEY_PIECE, last - first + 1);
    for (int i = 0; i < n_keys; i++) {
        float w = __shfl_sync(~0u, weight[i / 32], i % 32);
        int key = first + i;
        const K *row = key_of_position<K>(kv, table, key, kv_head) + value_offset(kv);
#pragma unroll
        for (int j = 0; j < MAX_DIMS; j++)
            if (lane + j * 32 < kv.head_dim)
                state->values[j] = fmaf(w, to_float(row[lane + j * 32]), state->values[j]);
    }
}

/* The pieces so far, and the next one: one formula. */
__device__ void merge_piece(piece_state *all, const piece_state *next)
{
    float max = fmaxf(all->max, next->max), keep = expf(all->max - max), add = expf(next->max - max);
    all->max = max;
    all->sum = all->sum * keep + next->sum * add;
    for (int i = 0; i < MAX_DIMS; i++)
        all->values[i] = all->values[i] * keep + next->values[i] * add;
}

__device__ void clear_state(piece_state *state)
{
    state->max = -INFINITY;
    state->sum = 0.0f;
    for (int i = 0; i < MAX_DIMS; i++)
        state->values[i] = 0.0f;
}

template <typename T> __device__ void store_row(T *out, const piece_state *state, int head_dim, int lane)
{
#pragma unroll
    for (int i = 0; i < MAX_DIMS; i++)
        if (lane + i * 32 < head_dim)
            out[lane + i * 32] = from_float<T>(state->values[i] / state->sum);
}

template <typename T> __device__ void load_query(float *q, const T *row, int head_dim, int lane)
{
    for (int d = lane; d < head_dim; d += 32)
        q[d] = to_float(row[d]);
    __syncwarp();
}

/* Grid: (row, head / WARPS); a warp walks all pieces of its row and head. */
template <typename T, typename K> __global__ void walk_kernel(attention_grid g, const T *q, T *out)
{
    __shared__ float queries[WARPS][DSKV_MAX_HEAD_DIM];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, row = (int)blockIdx.x,
        head = (int)blockIdx.y * WARPS + warp;
    const int32_t *table;
    int last;
    follow_previous();
    if (head >= g.n_heads || !find_row(g, row, &table, &last))
        return;
    load_query(queries[warp], q + row * g.q_stride + (int64_t)head * g.kv.head_dim, g.kv.head_dim, lane);
    piece_state all, piece;
    clear_state(&all);
    for (int first = 0; first <= last; first += DSKV_KEY_PIECE) {
        compute_piece<K>(&piece, g.kv, g.kv_head_of_head[head], table, first, last, queries[warp], g.scale, lane);
        merge_piece(&all, &piece);
    }
    store_row(out + row * g.out_stride + (int64_t)head * g.kv.head_dim, &all, g.kv.head_dim, lane);
}

/* Scratch of (row, head, piece): max, sum, then MAX_DIMS * 32 values. */
enum { SCRATCH_FLOATS = 2 + MAX_DIMS * 32 };

/* Grid: (row, head, piece / WARPS). */
template <typename T, typename K> __global__ void pieces_kernel(attention_grid g, const T *q, float *scratch)
{
    __shared__ float queries[WARPS][DSKV_MAX_HEAD_DIM];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, row = (int)blockIdx.x, head = (int)blockIdx.y;
    int piece = (int)blockIdx.z * WARPS + warp;
    const int32_t *table;
    int last;
    follow_previous();
    if (!find_row(g, row, &table, &last) || piece * DSKV_KEY_PIECE > last)
        return;
    load_query(queries[warp], q + row * g.q_stride + (int64_t)head * g.kv.head_dim, g.kv.head_dim, lane);
    piece_state state;
    compute_piece<K>(&state, g.kv, g.kv_head_of_head[head], table, piece * DSKV_KEY_PIECE, last, queries[warp], g.scale,
                     lane);
    float *place = piece_place<SCRATCH_FLOATS>(scratch, g, row, head, piece);
    if (lane == 0) {
        place[0] = state.max;
        place[1] = state.sum;
    }
    for (int i = 0; i < MAX_DIMS; i++)
        if (lane + i * 32 < g.kv.head_dim)
            place[2 + lane + i * 32] = state.values[i];
}

/* Grid: (row, head / WARPS). */
template <typename T> __global__ void merge_kernel(attention_grid g, const float *scratch, T *out)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, row = (int)blockIdx.x,
        head = (int)blockIdx.y * WARPS + warp;
    const int32_t *table;
    int last;
    follow_previous();
    if (head >= g.n_heads || !find_row(g, row, &table, &last))
        return;
    piece_state all, piece;
    clear_state(&all);
    for (int i = 0; i * DSKV_KEY_PIECE <= last; i++) {
        const float *place = piece_place<SCRATCH_FLOATS>(scratch, g, row, head, i);
        piece.max = place[0];
        piece.sum = place[1];
        for (int j = 0; j < MAX_DIMS; j++)
            piece.values[j] = lane + j * 32 < g.kv.head_dim ? place[2 + lane + j * 32] : 0.0f;
        merge_piece(&all, &piece);
    }
    store_row(out + row * g.out_stride + (int64_t)head * g.kv.head_dim, &all, g.kv.head_dim, lane);
}

template <typename T, typename K>
static void launch_generic(struct dskv_device *device, const struct dskv_attention *p, const attention_grid &g)
{
    unsigned rows = (unsigned)p->q.rows, heads = (unsigned)g.n_heads;
    float *scratch = dskv_cuda_scratch(dskv_cuda_of(device));
    size_t needed = (size_t)rows * heads * (size_t)g.n_pieces * SCRATCH_FLOATS * sizeof(float);
    dim3 block(32 * WARPS), head_groups(rows, blocks_for(heads, WARPS));
    if (g.n_pieces > 1 && needed <= dskv_cuda_scratch_bytes(dskv_cuda_of(device))) {
        queue_kernel(device, "attention", pieces_kernel<T, K>, dim3(rows, heads, blocks_for(g.n_pieces, WARPS)), block,
                     0, g, (const T *)p->q.data, scratch);
        queue_kernel(device, "attention", merge_kernel<T>, head_groups, block, 0, g, (const float *)scratch,
                     (T *)p->out.data);
    } else {
        queue_kernel(device, "attention", walk_kernel<T, K>, head_groups, block, 0, g, (const T *)p->q.data,
                     (T *)p->out.data);
    }
}

extern "C" void dskv_cuda_attention(struct dskv_device *device, const struct dskv_attention *p)
{
    attention_grid g = {kv_layer_of(&p->kv, p->layer),
                        p->scale,
                        p->n_heads_local,
                        p->kv_head_of_head,
                        p->work,
                        p->n_work,
                        p->tables,
                        p->q.stride,
                        p->out.stride,
                        (p->max_keys + DSKV_KEY_PIECE - 1) / DSKV_KEY_PIECE};
    if (!attention_with_tensor_instructions(device, p, g))
        with_dtype(p->q.dtype, [&](auto t) {
            with_dtype(p->kv.dtype, [&](auto e) { launch_generic<decltype(t), decltype(e)>(device, p, g); });
        });
}
