/* Attention: every key and value comes from the pool, in pieces of DSKV_KEY_PIECE keys at absolute positions.
 *
 * A tile is up to TILE queries (pairs of row and head) that read one KV head, so that they share its loads; a query's
 * own chain of operations never depends on its tile.  Per piece: scores (one chain over dimensions, lanes over keys),
 * their maximum, weights exp(s - max), the weights' sum in 16 lanes, and values accumulated over keys ascending; then
 * the piece is merged into the query's running state.  Keys behind a query's position are never read into a result:
 * their scores are selected away, their values not touched.
 */
#include "kernels/cpu/names.h"
#include "kernels/cpu/vecmath.h"

#include "base/limits.h"

enum {
    TILE = 4,
    PIECE_VECS = DSKV_KEY_PIECE / VEC_LANES,
    MAX_DIM = (DSKV_MAX_HEAD_DIM + VEC_LANES - 1) / VEC_LANES * VEC_LANES
};

/* One query's running softmax over the pieces so far, and the piece at hand. */
struct query {
    const float *q;   /* [head_dim] */
    float *out;       /* [head_dim] */
    int32_t position; /* reads keys 0 .. position */
    int n_valid;      /* keys of this piece that it reads */
    float max, sum;   /* of all pieces so far */
    float piece_max, piece_sum;
    float weights[DSKV_KEY_PIECE];
    float acc[MAX_DIM], piece_acc[MAX_DIM];
};

struct job {
    const struct dskv_attention *p;
    const int32_t *head_of_kv; /* first query head of each KV head and the end: [n_kv_heads_local + 1] */
    int32_t n_kv, group;       /* KV heads; most query heads that share one */
};

/* ---- one piece -------------------------------------------------------------------------------------------------- */

/* Scores of n queries against n_vecs vectors of 16 keys, whose dimension d lies at keys[v] + d * block_tokens. */
static inline __attribute__((always_inline)) void scores(const int n, const int n_vecs, const enum dskv_dtype dtype,
                                                         struct query *queries, const char *const *keys,
                                                         int64_t block_tokens, int head_dim, float scale, int first_vec)
{
    struct vec sum[TILE][PIECE_VECS];
    for (int i = 0; i < n; i++)
        for (int v = 0; v < n_vecs; v++)
            sum[i][v] = vec_zero();
    for (int d = 0; d < head_dim; d++) {
        struct vec key[PIECE_VECS];
        for (int v = 0; v < n_vecs; v++)
            key[v] = vec_load_as(dtype, keys[v], d * block_tokens);
        for (int i = 0; i < n; i++) {
            struct vec q = vec_set1(queries[i].q[d]);
            for (int v = 0; v < n_vecs; v++)
                sum[i][v] = vec_fma(q, key[v], sum[i][v]);
        }
    }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < n_vecs; v++)
            vec_store(queries[i].weights + (first_vec + v) * VEC_LANES, vec_mul(sum[i][v], vec_set1(scale)));
}

/* piece_acc[d .. d + 16 n_vecs) of n queries over keys [first, last): values + key * stride. */
static inline __attribute__((always_inline)) void values(const int n, const int n_vecs, const enum dskv_dtype dtype,
                                                         struct query *queries, const char *values, int64_t stride,
                                                         int d, int first, int last)
{
    struct vec sum[TILE][4];
    for (int i = 0; i < n; i++)
        for (int v = 0; v < n_vecs; v++)
            sum[i][v] = vec_load(queries[i].piece_acc + d + v * VEC_LANES);
    for (int key = first; key < last; key++) {
        struct vec value[4];
        for (int v = 0; v < n_vecs; v++)
            value[v] = vec_load_as(dtype, values, (key - first) * stride + d + v * VEC_LANES);
        for (int i = 0; i < n; i++) {
            struct vec weight = vec_set1(queries[i].weights[key]);
            for (int v = 0; v < n_vecs; v++)
                sum[i][v] = vec_fma(weight, value[v], sum[i][v]);
        }
    }
    for (int i = 0; i < n; i++)
        for (int v = 0; v < n_vecs; v++)
            vec_store(queries[i].piece_acc + d + v * VEC_LANES, sum[i][v]);
}

#define SCORES(n, n_vecs, dtype) scores(n, n_vecs, dtype, queries, keys, block_tokens, head_dim, scale, first_vec)
#define VALUES(n, n_vecs, dtype) values(n, n_vecs, dtype, queries, base, stride, d, first, last)
#define DEFINE_PIECE(suffix, dtype)                                                                                    \
    static void scores_##suffix(int n, int n_vecs, struct query *queries, const char *const *keys,                     \
                                int64_t block_tokens, int head_dim, float scale, int first_vec)                        \
    {                                                                                                                  \
        if (n_vecs == PIECE_VECS) {                                                                                    \
            switch (n) {                                                                                               \
            case 1: SCORES(1, PIECE_VECS, dtype); break;                                                               \
            case 2: SCORES(2, PIECE_VECS, dtype); break;                                                               \
            case 3: SCORES(3, PIECE_VECS, dtype); break;                                                               \
            case 4: SCORES(4, PIECE_VECS, dtype); break;                                                               \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        for (int i = 0; i < n_vecs; i++, keys++, first_vec++)                                                          \
            switch (n) {                                                                                               \
            case 1: SCORES(1, 1, dtype); break;                                                                        \
            case 2: SCORES(2, 1, dtype); break;                                                                        \
            case 3: SCORES(3, 1, dtype); break;                                                                        \
            case 4: SCORES(4, 1, dtype); break;                                                                        \
            }                                                                                                          \
    }                                                                                                                  \
    static void values_##suffix(int n, struct query *queries, const char *base, int64_t stride, int first, int last)   \
    {                                                                                                                  \
        int d = 0;                                                                                                     \
        for (; d + 4 * VEC_LANES <= stride; d += 4 * VEC_LANES)                                                        \
            switch (n) {                                                                                               \
            case 1: VALUES(1, 4, dtype); break;                                                                        \
            case 2: VALUES(2, 4, dtype); break;                                                                        \
            case 3: VALUES(3, 4, dtype); break;                                                                        \
            case 4: VALUES(4, 4, dtype); break;                                                                        \
            }                                                                                                          \
        for (; d < stride; d += VEC_LANES)                                                                             \
            switch (n) {                                                                                               \
            case 1: VALUES(1, 1, dtype); break;                                                                        \
            case 2: VALUES(2, 1, dtype); break;                                                                        \
            case 3: VALUES(3, 1, dtype); break;                                                                        \
            case 4: VALUES(4, 1, dtype); break;                                                                        \
            }                                                                                                          \
    }
DEFINE_PIECE(f32, DSKV_F32)
DEFINE_PIECE(f16, DSKV_F16)
DEFINE_PIECE(bf16, DSKV_BF16)

/* Scores to weights: masked ones are selected to 0; the piece's maximum and the sum of its weights. */
static void softmax_piece(struct query *query)
{
    struct vec none = vec_set1(-INFINITY), max = none, sum = vec_zero();
    int n_vecs = (query->n_valid + VEC_LANES - 1) / VEC_LANES;
    for (int v = 0; v < n_vecs; v++) {
        int n = query->n_valid - v * VEC_LANES;
        struct vec s = vec_load(query->weights + v * VEC_LANES);
        s = vec_select(vec_first(n < VEC_LANES ? n : VEC_LANES), s, none);
        vec_store(query->weights + v * VEC_LANES, s);
        max = vec_max(s, max);
    }
    query->piece_max = vec_max_lane(max);
    for (int v = 0; v < n_vecs; v++) {
        struct vec s = vec_load(query->weights + v * VEC_LANES);
        int n = query->n_valid - v * VEC_LANES;
        struct vec e = vec_exp(vec_sub(s, vec_set1(query->piece_max)));
        e = vec_select(vec_first(n < VEC_LANES ? n : VEC_LANES), e, vec_zero());
        vec_store(query->weights + v * VEC_LANES, e);
        sum = vec_add(sum, e);
    }
    query->piece_sum = vec_sum(sum);
}

static void merge_piece(struct query *query, int64_t n_dims)
{
    float max = query->max > query->piece_max ? query->max : query->piece_max;
    float both[VEC_LANES] = {query->max - max, query->piece_max - max};
    vec_store(both, vec_exp(vec_load(both)));
    struct vec old = vec_set1(both[0]), new = vec_set1(both[1]);
    float sum[VEC_LANES];
    vec_store(sum, vec_fma(vec_set1(query->sum), old, vec_mul(vec_set1(query->piece_sum), new)));
    query->sum = sum[0];
    query->max = max;
    for (int64_t d = 0; d < n_dims; d += VEC_LANES) {
        struct vec piece = vec_mul(vec_load(query->piece_acc + d), new);
        vec_store(query->acc + d, vec_fma(vec_load(query->acc + d), old, piece));
    }
}

/* ---- one tile of queries ---------------------------------------------------------------------------------------- */

struct reader {
    const struct dskv_kv *kv;
    const int32_t *table; /* of this sequence */
    int32_t layer, head;
};

/* Address of the keys (values) of token `token`: its block's plane, at the token's place. */
static const char *token_keys(const struct reader *reader, int32_t token)
{
    const struct dskv_kv *kv = reader->kv;
    const char *plane = dskv_kv_plane(kv, reader->table[token / kv->block_tokens], reader->layer, reader->head, 0);
    return plane + (size_t)(token % kv->block_tokens) * dskv_dtype_bytes(kv->dtype);
}

static const char *token_values(const struct reader *reader, int32_t token)
{
    const struct dskv_kv *kv = reader->kv;
    const char *plane = dskv_kv_plane(kv, reader->table[token / kv->block_tokens], reader->layer, reader->head, 1);
    size_t row = (size_t)(token % kv->block_tokens) * (size_t)dskv_kv_value_stride(kv);
    return plane + row * dskv_dtype_bytes(kv->dtype);
}

static void score_piece(const struct reader *reader, struct query *queries, int n, int32_t piece, int n_keys,
                        float scale)
{
    const struct dskv_kv *kv = reader->kv;
    const char *keys[PIECE_VECS];
    int n_vecs = (n_keys + VEC_LANES - 1) / VEC_LANES;
    for (int v = 0; v < n_vecs; v++)
        keys[v] = token_keys(reader, piece * DSKV_KEY_PIECE + v * VEC_LANES);
    if (kv->dtype == DSKV_F32)
        scores_f32(n, n_vecs, queries, keys, kv->block_tokens, kv->head_dim, scale, 0);
    else if (kv->dtype == DSKV_F16)
        scores_f16(n, n_vecs, queries, keys, kv->block_tokens, kv->head_dim, scale, 0);
    else
        scores_bf16(n, n_vecs, queries, keys, kv->block_tokens, kv->head_dim, scale, 0);
}

/* Keys [first, last) of a piece, for n queries that all read them; 16 keys never cross a block. */
static void add_values(const struct reader *reader, struct query *queries, int n, int32_t piece, int first, int last)
{
    const struct dskv_kv *kv = reader->kv;
    const int64_t stride = dskv_kv_value_stride(kv);
    while (first < last) {
        int end = first / VEC_LANES * VEC_LANES + VEC_LANES;
        end = end < last ? end : last;
        const char *base = token_values(reader, piece * DSKV_KEY_PIECE + first);
        if (kv->dtype == DSKV_F32)
            values_f32(n, queries, base, stride, first, end);
        else if (kv->dtype == DSKV_F16)
            values_f16(n, queries, base, stride, first, end);
        else
            values_bf16(n, queries, base, stride, first, end);
        first = end;
    }
}

/* Queries of a tile stand in order of their positions. */
static void attend(const struct reader *reader, struct query *queries, int n, float scale)
{
    const int64_t n_dims = dskv_kv_value_stride(reader->kv);
    for (int i = 0; i < n; i++) {
        queries[i].max = -INFINITY;
        queries[i].sum = 0;
        memset(queries[i].acc, 0, (size_t)n_dims * sizeof *queries[i].acc);
    }
    int32_t n_pieces = queries[n - 1].position / DSKV_KEY_PIECE + 1;
    int first = 0; /* queries before it have read all their keys */
    for (int32_t piece = 0; piece < n_pieces; piece++) {
        while (queries[first].position < piece * DSKV_KEY_PIECE)
            first++;
        struct query *active = queries + first;
        int n_active = n - first;
        for (int i = 0; i < n_active; i++) {
            int32_t n_valid = active[i].position + 1 - piece * DSKV_KEY_PIECE;
            active[i].n_valid = n_valid < DSKV_KEY_PIECE ? n_valid : DSKV_KEY_PIECE;
            memset(active[i].piece_acc, 0, (size_t)n_dims * sizeof *active[i].piece_acc);
        }
        score_piece(reader, active, n_active, piece, active[n_active - 1].n_valid, scale);
        for (int i = 0; i < n_active; i++)
            softmax_piece(&active[i]);
        add_values(reader, active, n_active, piece, 0, active[0].n_valid);
        for (int i = 1; i < n_active; i++)
            add_values(reader, &active[i], 1, piece, active[0].n_valid, active[i].n_valid);
        for (int i = 0; i < n_active; i++)
            merge_piece(&active[i], n_dims);
    }
    for (int i = 0; i < n; i++)
        for (int d = 0; d < reader->kv->head_dim; d++)
            queries[i].out[d] = queries[i].acc[d] / queries[i].sum;
}

/* ---- the work list ---------------------------------------------------------------------------------------------- */

static int64_t tiles_of(const struct job *job, const struct dskv_attention_work *work)
{
    return ((int64_t)work->n_tokens * job->group + TILE - 1) / TILE;
}

/* Tile `tile` of a sequence and KV head: pairs of row and head, row by row; nothing when it lies past the last pair. */
static void run_tile(const struct job *job, const struct dskv_attention_work *work, int32_t kv_head, int64_t tile)
{
    const struct dskv_attention *p = job->p;
    const int32_t first_head = job->head_of_kv[kv_head], n_heads = job->head_of_kv[kv_head + 1] - first_head;
    const int32_t head_dim = p->kv.head_dim;
    struct query queries[TILE];
    int n = 0;
    for (int64_t pair = tile * TILE; pair < (tile + 1) * TILE && pair < (int64_t)work->n_tokens * n_heads; pair++) {
        int64_t token = pair / n_heads, row = work->first + token, head = first_head + pair % n_heads;
        queries[n].q = (const float *)p->q.data + row * p->q.stride + head * head_dim;
        queries[n].out = (float *)p->out.data + row * p->out.stride + head * head_dim;
        queries[n].position = work->start + (int32_t)token;
        n++;
    }
    if (n == 0)
        return;
    struct reader reader = {&p->kv, p->tables + work->first_block, p->layer, kv_head};
    attend(&reader, queries, n, p->scale);
}

/* Items are tiles: of one sequence after the other, of one KV head after the other. */
static void run_items(void *context, int64_t first, int64_t last)
{
    const struct job *job = context;
    const struct dskv_attention_work *work = job->p->work;
    int64_t item = 0; /* first of this sequence */
    for (; item + tiles_of(job, work) * job->n_kv <= first; work++)
        item += tiles_of(job, work) * job->n_kv;
    for (int64_t i = first; i < last; i++) {
        while (i - item >= tiles_of(job, work) * job->n_kv) {
            item += tiles_of(job, work) * job->n_kv;
            work++;
        }
        int64_t n_tiles = tiles_of(job, work);
        run_tile(job, work, (int32_t)((i - item) / n_tiles), (i - item) % n_tiles);
    }
}

void dskv_cpu_attention(struct dskv_device *device, const struct dskv_attention *p)
{
    int32_t head_of_kv[DSKV_MAX_HEADS + 1];
    struct job job = {.p = p, .head_of_kv = head_of_kv, .n_kv = p->kv.n_kv_heads_local};
    int32_t head = 0;
    for (int32_t kv = 0; kv < job.n_kv; kv++) {
        head_of_kv[kv] = head;
        while (head < p->n_heads_local && p->kv_head_of_head[head] == kv)
            head++;
        job.group = head - head_of_kv[kv] > job.group ? head - head_of_kv[kv] : job.group;
    }
    head_of_kv[job.n_kv] = head;
    DSKV_ASSERT(head == p->n_heads_local, "head %d of %d reads KV head %d", head, p->n_heads_local,
                p->kv_head_of_head[head]);
    int64_t n_items = 0, n_keys = 0;
    for (int32_t i = 0; i < p->n_work; i++) {
        const struct dskv_attention_work *work = &p->work[i];
        int64_t end = (int64_t)work->start + work->n_tokens;
        DSKV_ASSERT(work->n_tokens >= 0 && work->start >= 0 && work->first >= 0 &&
                        work->first + (int64_t)work->n_tokens <= p->q.rows &&
                        end <= (int64_t)work->n_blocks * p->kv.block_tokens,
                    "work %d: rows [%d, + %d) of %lld at position %d, %d blocks of %d", i, work->first, work->n_tokens,
                    (long long)p->q.rows, work->start, work->n_blocks, p->kv.block_tokens);
        n_items += tiles_of(&job, work) * job.n_kv;
        n_keys += tiles_of(&job, work) * job.n_kv * (work->start + work->n_tokens / 2 + 1);
    }
    if (n_items == 0)
        return;
    int64_t key_ns = p->kv.head_dim / 16 + 1; /* of one tile and key */
    dskv_threads_for(dskv_cpu_threads(device), n_items, n_keys * key_ns / n_items, run_items, &job);
}
