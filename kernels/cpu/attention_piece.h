/* One piece of attention: DSKV_KEY_PIECE keys at an absolute position, for a tile of queries that read one KV head.
 *
 * Scores are one chain over dimensions, lanes over keys; then the piece's maximum, weights exp(s - max), the weights'
 * sum in 16 lanes, and values accumulated over keys ascending.  A query's own chain of operations never depends on its
 * tile.  Keys behind a query's position never reach a result: their scores are selected away, their values not touched.
 * Private to attention.c.
 */
#ifndef DSKV_CPU_ATTENTION_PIECE_H
#define DSKV_CPU_ATTENTION_PIECE_H

#include "kernels/cpu/names.h"
#include "kernels/cpu/vecmath.h"

#include "base/limits.h"

enum {
    TILE = 4,
    PIECE_VECS = DSKV_KEY_PIECE / VEC_LANES,
    MAX_DIM = (DSKV_MAX_HEAD_DIM + VEC_LANES - 1) / VEC_LANES * VEC_LANES
};

/* A softmax over some keys: the weighted sum of values, not yet divided by the weights' sum. */
struct softmax {
    float max, sum;
    float acc[MAX_DIM];
};

struct query {
    const float *q;   /* [head_dim] */
    float *out;       /* [head_dim] */
    int32_t position; /* reads keys 0 .. position */
    int n_valid;      /* keys of the piece at hand that it reads */
    float weights[DSKV_KEY_PIECE];
    struct softmax piece, all; /* of the piece at hand; of the pieces merged so far */
};

/* Where one KV head of one sequence lies. */
struct reader {
    const struct dskv_kv *kv;
    const int32_t *table; /* of this sequence */
    int32_t layer, head;
    int32_t n_keys; /* that the sequence's last query reads */
    int asks;       /* for memory ahead: worth it where few queries share a piece */
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

/* ---- scores and values ------------------------------------------------------------------------------------------ */

/* Sixteen keys and their values. */
struct keys16 {
    const char *keys;   /* dimension d lies at d * block_tokens elements */
    const char *values; /* sixteen rows of dskv_kv_value_stride elements; null: do not ask for them */
};

/* What the values' loop asks for: dimension d of keys to come lies at keys + d * step_bytes; null: nothing. */
struct later {
    const char *keys;
    int64_t step_bytes;
};

/* Scores of n queries against n_vecs vectors of 16 keys. */
static inline __attribute__((always_inline)) void scores(const int n, const int n_vecs, const enum dskv_dtype dtype,
                                                         struct query *queries, const struct keys16 *k16,
                                                         int64_t block_tokens, int head_dim, float scale, int first_vec)
{
    struct vec sum[TILE][PIECE_VECS];
    for (int i = 0; i < n; i++)
        for (int v = 0; v < n_vecs; v++)
            sum[i][v] = vec_zero();
    for (int d = 0; d < head_dim; d++) {
        struct vec key[PIECE_VECS];
        for (int v = 0; v < n_vecs && k16->values; v++)
            __builtin_prefetch(k16[v].values + (int64_t)d * VEC_LANES * (dtype == DSKV_F32 ? 4 : 2));
        for (int v = 0; v < n_vecs; v++)
            key[v] = vec_load_as(dtype, k16[v].keys, d * block_tokens);
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
                                                         struct later later, int d, int first, int last)
{
    struct vec sum[TILE][4];
    for (int i = 0; i < n; i++)
        for (int v = 0; v < n_vecs; v++)
            sum[i][v] = vec_load(queries[i].piece.acc + d + v * VEC_LANES);
    for (int key = first; key < last; key++) {
        struct vec value[4];
        for (int v = 0; v < n_vecs && later.keys; v++)
            __builtin_prefetch(later.keys + (d + n_vecs * (key % VEC_LANES) + v) * later.step_bytes);
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
            vec_store(queries[i].piece.acc + d + v * VEC_LANES, sum[i][v]);
}

#define SCORES(n, n_vecs, dtype) scores(n, n_vecs, dtype, queries, k16, block_tokens, head_dim, scale, first_vec)
#define VALUES(n, n_vecs, dtype) values(n, n_vecs, dtype, queries, base, stride, later, d, first, last)
#define DEFINE_PIECE(suffix, dtype)                                                                                    \
    static void scores_##suffix(int n, int n_vecs, struct query *queries, const struct keys16 *k16,                    \
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
        for (int i = 0; i < n_vecs; i++, k16++, first_vec++)                                                           \
            switch (n) {                                                                                               \
            case 1: SCORES(1, 1, dtype); break;                                                                        \
            case 2: SCORES(2, 1, dtype); break;                                                                        \
            case 3: SCORES(3, 1, dtype); break;                                                                        \
            case 4: SCORES(4, 1, dtype); break;                                                                        \
            }                                                                                                          \
    }                                                                                                                  \
    static void values_##suffix(int n, struct query *queries, const char *base, int64_t stride, struct later later,    \
                                int first, int last)                                                                   \
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

static void score_piece(const struct reader *reader, struct query *queries, int n, int32_t piece, int n_keys,
                        float scale)
{
    const struct dskv_kv *kv = reader->kv;
    struct keys16 k16[PIECE_VECS];
    int n_vecs = (n_keys + VEC_LANES - 1) / VEC_LANES;
    for (int v = 0; v < n_vecs; v++) {
        const int32_t token = piece * DSKV_KEY_PIECE + v * VEC_LANES;
        k16[v] = (struct keys16){token_keys(reader, token), reader->asks ? token_values(reader, token) : NULL};
    }
    if (kv->dtype == DSKV_F32)
        scores_f32(n, n_vecs, queries, k16, kv->block_tokens, kv->head_dim, scale, 0);
    else if (kv->dtype == DSKV_F16)
        scores_f16(n, n_vecs, queries, k16, kv->block_tokens, kv->head_dim, scale, 0);
    else
        scores_bf16(n, n_vecs, queries, k16, kv->block_tokens, kv->head_dim, scale, 0);
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
        const int32_t next = (piece + 1) * DSKV_KEY_PIECE + first / VEC_LANES * VEC_LANES;
        struct later later = {NULL, 0};
        if (reader->asks && next < reader->n_keys)
            later = (struct later){token_keys(reader, next), kv->block_tokens * (int64_t)dskv_dtype_bytes(kv->dtype)};
        if (kv->dtype == DSKV_F32)
            values_f32(n, queries, base, stride, later, first, end);
        else if (kv->dtype == DSKV_F16)
            values_f16(n, queries, base, stride, later, first, end);
        else
            values_bf16(n, queries, base, stride, later, first, end);
        first = end;
    }
}

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
    query->piece.max = vec_max_lane(max);
    for (int v = 0; v < n_vecs; v++) {
        struct vec s = vec_load(query->weights + v * VEC_LANES);
        int n = query->n_valid - v * VEC_LANES;
        struct vec e = vec_exp(vec_sub(s, vec_set1(query->piece.max)));
        e = vec_select(vec_first(n < VEC_LANES ? n : VEC_LANES), e, vec_zero());
        vec_store(query->weights + v * VEC_LANES, e);
        sum = vec_add(sum, e);
    }
    query->piece.sum = vec_sum(sum);
}

/* The next piece of a query into what it has so far. */
static void merge_piece(struct softmax *all, const struct softmax *piece, int64_t n_dims)
{
    float max = all->max > piece->max ? all->max : piece->max;
    float factors[VEC_LANES] = {all->max - max, piece->max - max};
    vec_store(factors, vec_exp(vec_load(factors)));
    struct vec old = vec_set1(factors[0]), new = vec_set1(factors[1]);
    all->sum = fmaf(all->sum, factors[0], piece->sum * factors[1]);
    all->max = max;
    for (int64_t d = 0; d < n_dims; d += VEC_LANES) {
        struct vec scaled = vec_mul(vec_load(piece->acc + d), new);
        vec_store(all->acc + d, vec_fma(vec_load(all->acc + d), old, scaled));
    }
}

/* Computes queries[i].piece of n queries in order of their positions, all of which read some key of it. */
static void run_piece(const struct reader *reader, struct query *queries, int n, int32_t piece, float scale)
{
    const size_t acc_bytes = (size_t)dskv_kv_value_stride(reader->kv) * sizeof(float);
    for (int i = 0; i < n; i++) {
        int32_t n_valid = queries[i].position + 1 - piece * DSKV_KEY_PIECE;
        queries[i].n_valid = n_valid < DSKV_KEY_PIECE ? n_valid : DSKV_KEY_PIECE;
        memset(queries[i].piece.acc, 0, acc_bytes);
    }
    score_piece(reader, queries, n, piece, queries[n - 1].n_valid, scale);
    for (int i = 0; i < n; i++)
        softmax_piece(&queries[i]);
    add_values(reader, queries, n, piece, 0, queries[0].n_valid);
    for (int i = 1; i < n; i++)
        add_values(reader, &queries[i], 1, piece, queries[0].n_valid, queries[i].n_valid);
}

#endif
