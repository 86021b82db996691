/* Attention: every key and value comes from the pool, in pieces of DSKV_KEY_PIECE keys at absolute positions, merged in
 * ascending order.
 *
 * A tile is up to TILE queries (pairs of row and head) that read one KV head, so that they share its loads.  Threads
 * split tiles; where these are too few for the threads (a long sequence that decodes), they split the pieces too: each
 * piece's result is kept, and a second pass merges them in the same order, so the bits are the same.
 */
#include "kernels/cpu/attention_piece.h"

enum {
    PART_PIECES = 4,      /* pieces that a split tile computes at a time */
    SPLIT_PIECES = 8,     /* a sequence shorter than this is not split */
    TILES_PER_THREAD = 4, /* with so many tiles nothing is split */
    ASK_TOKENS = 4        /* sequences of more new tokens find most of their keys in the cache */
};

struct job {
    const struct dskv_attention *p;
    const int32_t *head_of_kv; /* first query head of each KV head, and the end: [n_kv_heads_local + 1] */
    int32_t n_kv, group;       /* KV heads; most query heads that share one */
    int64_t n_tiles;
    int64_t n_pieces; /* of the longest sequence */
    char *pieces;     /* when split: [n_tiles][n_pieces][TILE] softmaxes of softmax_bytes */
    int64_t softmax_bytes;
};

/* ---- tiles ------------------------------------------------------------------------------------------------------ */

static int64_t tiles_of(const struct job *job, const struct dskv_attention_work *work)
{
    return ((int64_t)work->n_tokens * job->group + TILE - 1) / TILE;
}

struct tile {
    const struct dskv_attention_work *work; /* the sequence it belongs to */
    int64_t first_tile;                     /* of that sequence */
    struct reader reader;
    int n; /* queries; 0 where a KV head has fewer query heads than another */
    struct query queries[TILE];
};

static void begin_tiles(const struct job *job, struct tile *tile)
{
    tile->work = job->p->work;
    tile->first_tile = 0;
}

/* Goes on to tile `index`, at or behind the last one.  Tiles are counted sequence by sequence, KV head by KV head, then
 * pairs of row and head, row by row. */
static void find_tile(const struct job *job, int64_t index, struct tile *tile)
{
    const struct dskv_attention *p = job->p;
    while (index - tile->first_tile >= tiles_of(job, tile->work) * job->n_kv) {
        tile->first_tile += tiles_of(job, tile->work) * job->n_kv;
        tile->work++;
    }
    const struct dskv_attention_work *work = tile->work;
    index -= tile->first_tile;
    const int32_t kv_head = (int32_t)(index / tiles_of(job, work)), first_head = job->head_of_kv[kv_head];
    const int32_t n_heads = job->head_of_kv[kv_head + 1] - first_head, head_dim = p->kv.head_dim;
    const int64_t first = index % tiles_of(job, work) * TILE, end = (int64_t)work->n_tokens * n_heads;
    tile->reader = (struct reader){.kv = &p->kv,
                                   .table = p->tables + work->first_block,
                                   .layer = p->layer,
                                   .head = kv_head,
                                   .n_keys = work->start + work->n_tokens,
                                   .asks = work->n_tokens <= ASK_TOKENS};
    tile->n = 0;
    for (int64_t pair = first; pair < first + TILE && pair < end; pair++) {
        struct query *query = &tile->queries[tile->n++];
        int64_t row = work->first + pair / n_heads, head = first_head + pair % n_heads;
        query->q = (const float *)p->q.data + row * p->q.stride + head * head_dim;
        query->out = (float *)p->out.data + row * p->out.stride + head * head_dim;
        query->position = work->start + (int32_t)(pair / n_heads);
    }
}

static int32_t pieces_of(const struct query *query)
{
    return query->position / DSKV_KEY_PIECE + 1;
}

static void begin_query(struct query *query, int64_t n_dims)
{
    query->all.max = -INFINITY;
    query->all.sum = 0;
    memset(query->all.acc, 0, (size_t)n_dims * sizeof *query->all.acc);
}

static void end_query(struct query *query, int32_t head_dim)
{
    for (int32_t d = 0; d < head_dim; d++)
        query->out[d] = query->all.acc[d] / query->all.sum;
}

/* Whole tiles: each piece is merged as it comes. */
static void run_tiles(void *context, int64_t first, int64_t last)
{
    const struct job *job = context;
    const int64_t n_dims = dskv_kv_value_stride(&job->p->kv);
    struct tile tile;
    begin_tiles(job, &tile);
    for (int64_t index = first; index < last; index++) {
        find_tile(job, index, &tile);
        for (int i = 0; i < tile.n; i++)
            begin_query(&tile.queries[i], n_dims);
        int done = 0; /* queries whose keys are all read */
        for (int32_t piece = 0; done < tile.n; piece++) {
            run_piece(&tile.reader, tile.queries + done, tile.n - done, piece, job->p->scale);
            for (int i = done; i < tile.n; i++)
                merge_piece(&tile.queries[i].all, &tile.queries[i].piece, n_dims);
            while (done < tile.n && pieces_of(&tile.queries[done]) == piece + 1)
                end_query(&tile.queries[done++], job->p->kv.head_dim);
        }
    }
}

/* ---- split tiles ------------------------------------------------------------------------------------------------ */

static struct softmax *kept_piece(const struct job *job, int64_t tile, int64_t piece, int query)
{
    return (struct softmax *)(job->pieces + ((tile * job->n_pieces + piece) * TILE + query) * job->softmax_bytes);
}

/* Items are parts: PART_PIECES pieces of one tile after the other. */
static void run_parts(void *context, int64_t first, int64_t last)
{
    const struct job *job = context;
    const int64_t n_parts = (job->n_pieces + PART_PIECES - 1) / PART_PIECES;
    struct tile tile;
    begin_tiles(job, &tile);
    for (int64_t item = first; item < last; item++) {
        const int64_t index = item / n_parts;
        const int32_t begin = (int32_t)(item % n_parts) * PART_PIECES;
        find_tile(job, index, &tile);
        for (int32_t piece = begin; piece < begin + PART_PIECES; piece++) {
            int done = 0;
            while (done < tile.n && pieces_of(&tile.queries[done]) <= piece)
                done++;
            if (done == tile.n)
                break;
            run_piece(&tile.reader, tile.queries + done, tile.n - done, piece, job->p->scale);
            for (int i = done; i < tile.n; i++)
                memcpy(kept_piece(job, index, piece, i), &tile.queries[i].piece, (size_t)job->softmax_bytes);
        }
    }
}

static void merge_tiles(void *context, int64_t first, int64_t last)
{
    const struct job *job = context;
    const int64_t n_dims = dskv_kv_value_stride(&job->p->kv);
    struct tile tile;
    begin_tiles(job, &tile);
    for (int64_t index = first; index < last; index++) {
        find_tile(job, index, &tile);
        for (int i = 0; i < tile.n; i++) {
            begin_query(&tile.queries[i], n_dims);
            for (int32_t piece = 0; piece < pieces_of(&tile.queries[i]); piece++)
                merge_piece(&tile.queries[i].all, kept_piece(job, index, piece, i), n_dims);
            end_query(&tile.queries[i], job->p->kv.head_dim);
        }
    }
}

/* True when tiles are few, sequences long, and there is room for every piece. */
static int is_split(const struct dskv_cpu *cpu, const struct job *job)
{
    return cpu->n_threads > 1 && job->n_tiles < (int64_t)cpu->n_threads * TILES_PER_THREAD &&
           job->n_pieces >= SPLIT_PIECES &&
           job->n_tiles * job->n_pieces * TILE <= (int64_t)DSKV_SCRATCH_BYTES / job->softmax_bytes;
}

/* ---- the operation ---------------------------------------------------------------------------------------------- */

static void group_heads(struct job *job, int32_t *head_of_kv)
{
    const struct dskv_attention *p = job->p;
    int32_t head = 0;
    for (int32_t kv = 0; kv < job->n_kv; kv++) {
        head_of_kv[kv] = head;
        while (head < p->n_heads_local && p->kv_head_of_head[head] == kv)
            head++;
        job->group = head - head_of_kv[kv] > job->group ? head - head_of_kv[kv] : job->group;
    }
    head_of_kv[job->n_kv] = head;
    job->head_of_kv = head_of_kv;
    DSKV_ASSERT(head == p->n_heads_local, "head %d of %d reads KV head %d", head, p->n_heads_local,
                p->kv_head_of_head[head]);
}

static void check_work(const struct dskv_attention *p, int32_t i)
{
    const struct dskv_attention_work *work = &p->work[i];
    DSKV_ASSERT(work->n_tokens >= 0 && work->start >= 0 && work->first >= 0 &&
                    work->first + (int64_t)work->n_tokens <= p->q.rows &&
                    (int64_t)work->start + work->n_tokens <= (int64_t)work->n_blocks * p->kv.block_tokens,
                "work %d: rows [%d, + %d) of %lld at position %d, %d blocks of %d", i, work->first, work->n_tokens,
                (long long)p->q.rows, work->start, work->n_blocks, p->kv.block_tokens);
}

void dskv_cpu_attention(struct dskv_device *device, const struct dskv_attention *p)
{
    struct dskv_cpu *cpu = (struct dskv_cpu *)device;
    int32_t head_of_kv[DSKV_MAX_HEADS + 1];
    struct job job = {.p = p, .n_kv = p->kv.n_kv_heads_local, .pieces = cpu->scratch};
    job.softmax_bytes = (int64_t)offsetof(struct softmax, acc) + dskv_kv_value_stride(&p->kv) * (int64_t)sizeof(float);
    group_heads(&job, head_of_kv);
    int64_t n_keys = 0; /* over all tiles */
    for (int32_t i = 0; i < p->n_work; i++) {
        check_work(p, i);
        const int64_t n_tiles = tiles_of(&job, &p->work[i]) * job.n_kv, end = p->work[i].start + p->work[i].n_tokens;
        const int64_t n_pieces = (end + DSKV_KEY_PIECE - 1) / DSKV_KEY_PIECE;
        job.n_tiles += n_tiles;
        n_keys += n_tiles * (p->work[i].start + p->work[i].n_tokens / 2 + 1);
        job.n_pieces = n_tiles > 0 && n_pieces > job.n_pieces ? n_pieces : job.n_pieces;
    }
    if (job.n_tiles == 0)
        return;
    const int64_t tile_ns = n_keys * (p->kv.head_dim / 16 + 1) / job.n_tiles;
    if (!is_split(cpu, &job)) {
        dskv_threads_for(cpu->threads, job.n_tiles, tile_ns, run_tiles, &job);
        return;
    }
    const int64_t n_parts = (job.n_pieces + PART_PIECES - 1) / PART_PIECES;
    dskv_threads_for(cpu->threads, job.n_tiles * n_parts, tile_ns / n_parts, run_parts, &job);
    dskv_threads_for(cpu->threads, job.n_tiles, job.n_pieces * job.softmax_bytes / 8, merge_tiles, &job);
}
