#include "parallel/select.h"

#include "base/memory.h"
#include "parallel/merge.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK_LOGIT_BYTES (8 << 20) /* of one shard's logits: enough rows that the head's weights are read seldom */
#define CHUNK_MIN_ROWS 8
#define CHUNK_MAX_ROWS 64

struct dskv_select_state {
    struct dskv_forward_parts parts;
    int32_t chunk_rows;
    void *memory; /* device: all buffers of the first group, one allocation */
    size_t memory_bytes;
    void *hidden;                    /* activation [chunk_rows, width] */
    float *full;                     /* [chunk_rows, vocab]: whole rows, gathered */
    int32_t *full_index;             /* [chunk_rows]: which rows of the chunk they are */
    struct dskv_sampling *sampling;  /* [chunk_rows] */
    int32_t *drawn;                  /* [chunk_rows] */
    void *scratch;                   /* of dskv_op_sample */
    int selects;                     /* this rank merges and draws; the rest is null elsewhere */
    char *words;                     /* [n_ranks][chunk's word]: what the shards say, on the host */
    struct dskv_row_result *results; /* [max_tokens] */
    int32_t *topk_ids;               /* [max_tokens, DSKV_MAX_TOPK] */
    float *topk_logprobs;            /* [max_tokens, DSKV_MAX_TOPK] */
    float *logits;                   /* [max_logit_rows, vocab] */
    int32_t n_logits;                /* rows of it that this step filled */
};

/* ---- a chunk's slot: stats, best values, best ids, then the shard's logits ---------------------- */

struct slot_layout {
    size_t top_values, top_ids, logits; /* offsets; stats at 0 */
};

static size_t aligned(size_t bytes)
{
    return (bytes + DSKV_CACHE_LINE - 1) / DSKV_CACHE_LINE * DSKV_CACHE_LINE;
}

static struct slot_layout slot_layout(int64_t rows, int32_t k)
{
    struct slot_layout layout;
    layout.top_values = aligned((size_t)rows * sizeof(struct dskv_row_stats));
    layout.top_ids = layout.top_values + aligned((size_t)rows * (size_t)k * sizeof(float));
    layout.logits = layout.top_ids + aligned((size_t)rows * (size_t)k * sizeof(int32_t));
    return layout;
}

/* Ids of the largest shard; the same on every rank. */
static int64_t largest_shard(const struct dskv_model *model, int32_t n_ranks)
{
    int64_t units = (model->vocab + DSKV_SPLIT_UNIT - 1) / DSKV_SPLIT_UNIT;
    return (units + n_ranks - 1) / n_ranks * DSKV_SPLIT_UNIT;
}

static int32_t chunk_rows_of(const struct dskv_model *model, int32_t n_ranks, int32_t max_tokens)
{
    int64_t rows = CHUNK_LOGIT_BYTES / (largest_shard(model, n_ranks) * (int64_t)sizeof(float));
    rows = rows < CHUNK_MIN_ROWS ? CHUNK_MIN_ROWS : rows > CHUNK_MAX_ROWS ? CHUNK_MAX_ROWS : rows;
    return rows < max_tokens ? (int32_t)rows : max_tokens;
}

size_t dskv_select_slot_bytes(const struct dskv_model *model, int32_t n_ranks, int32_t max_tokens)
{
    int32_t rows = chunk_rows_of(model, n_ranks, max_tokens);
    return slot_layout(rows, DSKV_MAX_TOPK).logits +
           (size_t)rows * (size_t)largest_shard(model, n_ranks) * sizeof(float);
}

/* ---- open and close ----------------------------------------------------------------------------- */

static void *carve(const struct dskv_select_state *s, size_t *at, size_t bytes)
{
    void *place = s->memory ? (char *)s->memory + *at : NULL;
    *at += aligned(bytes);
    return place;
}

static size_t place_buffers(struct dskv_select_state *s)
{
    size_t rows = (size_t)s->chunk_rows, vocab = (size_t)s->parts.model->vocab, at = 0;
    s->hidden = carve(s, &at, rows * (size_t)s->parts.model->width * dskv_dtype_bytes(s->parts.activation_dtype));
    if (!s->selects)
        return at;
    s->full = carve(s, &at, rows * vocab * sizeof *s->full);
    s->full_index = carve(s, &at, rows * sizeof *s->full_index);
    s->sampling = carve(s, &at, rows * sizeof *s->sampling);
    s->drawn = carve(s, &at, rows * sizeof *s->drawn);
    s->scratch = carve(s, &at, dskv_sample_scratch_bytes(s->parts.model->vocab));
    return at;
}

/* Host memory that is taken page by page as it is used. */
static int alloc_results(struct dskv_select_state *s)
{
    size_t rows = (size_t)s->parts.bounds.max_tokens, vocab = (size_t)s->parts.model->vocab;
    s->words = calloc((size_t)s->parts.shard->n_ranks, slot_layout(s->chunk_rows, DSKV_MAX_TOPK).logits);
    s->results = calloc(rows, sizeof *s->results);
    s->topk_ids = calloc(rows * DSKV_MAX_TOPK, sizeof *s->topk_ids);
    s->topk_logprobs = calloc(rows * DSKV_MAX_TOPK, sizeof *s->topk_logprobs);
    s->logits = calloc((size_t)s->parts.max_logit_rows * vocab, sizeof *s->logits);
    return s->words && s->results && s->topk_ids && s->topk_logprobs && s->logits;
}

enum dskv_exit dskv_select_open(const struct dskv_forward_parts *parts, struct dskv_select_state **state,
                                struct dskv_error *error)
{
    struct dskv_select_state *s = dskv_calloc(1, sizeof *s);
    s->parts = *parts;
    s->chunk_rows = chunk_rows_of(parts->model, parts->shard->n_ranks, parts->bounds.max_tokens);
    s->selects = parts->shard->rank == 0 || parts->every_rank_selects;
    s->memory_bytes = place_buffers(s);
    s->memory = dskv_device_alloc(parts->device, s->memory_bytes);
    if (!s->memory || (s->selects && !alloc_results(s))) {
        dskv_select_close(&s);
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %d rows of logits", (int)parts->max_logit_rows);
    }
    place_buffers(s);
    *state = s;
    return DSKV_EXIT_OK;
}

void dskv_select_close(struct dskv_select_state **state)
{
    struct dskv_select_state *s = *state;
    if (!s)
        return;
    if (s->memory)
        dskv_device_free(s->parts.device, s->memory, s->memory_bytes);
    free(s->words);
    free(s->results);
    free(s->topk_ids);
    free(s->topk_logprobs);
    free(s->logits);
    free(s);
    *state = NULL;
}

/* ---- one chunk ---------------------------------------------------------------------------------- */

struct chunk {
    int32_t first, rows;                /* rows [first, first + rows) of the plan */
    int32_t k;                          /* largest top-k among them */
    const struct dskv_plan_row *wanted; /* [rows] */
    struct slot_layout layout;
};

static struct chunk chunk_at(const struct dskv_select_state *s, const struct dskv_plan *plan, int32_t first)
{
    struct chunk c = {.first = first, .rows = plan->used.n_rows - first, .wanted = dskv_plan_rows(plan) + first};
    if (c.rows > s->chunk_rows)
        c.rows = s->chunk_rows;
    for (int32_t r = 0; r < c.rows; r++)
        if (c.wanted[r].topk > c.k)
            c.k = c.wanted[r].topk;
    c.layout = slot_layout(c.rows, c.k);
    return c;
}

/* This rank's word on the chunk, and its logits, into its slot. */
static void compute_chunk(const struct dskv_select_state *s, const struct chunk *c, const int32_t *row_tokens,
                          const int32_t *row_targets, struct dskv_tensor x)
{
    const struct dskv_forward_parts *p = &s->parts;
    char *slot = dskv_comm_slot(p->comm);
    struct dskv_tensor hidden = dskv_tensor(s->hidden, p->activation_dtype, c->rows, p->model->width);
    struct dskv_tensor logits = dskv_tensor(slot + c->layout.logits, DSKV_F32, c->rows, p->shard->n_vocab_local);
    struct dskv_gather_rows gather = {x, row_tokens + c->first, hidden};
    dskv_op_gather_rows(p->device, &gather);
    struct dskv_norm norm = {p->model->norm,          p->model->norm_eps,    hidden,
                             p->weights->norm_weight, p->weights->norm_bias, hidden};
    dskv_op_norm(p->device, &norm);
    struct dskv_matmul head = {hidden, p->weights->head, NULL, logits};
    dskv_op_matmul(p->device, &head);
    struct dskv_select select = {.logits = logits,
                                 .first = p->shard->first_vocab,
                                 .vocab = p->model->vocab,
                                 .targets = row_targets + c->first,
                                 .k = c->k,
                                 .stats = (struct dskv_row_stats *)slot,
                                 .top_values = (float *)(slot + c->layout.top_values),
                                 .top_ids = (int32_t *)(slot + c->layout.top_ids)};
    dskv_op_select(p->device, &select);
}

static void merge_chunk(struct dskv_select_state *s, const struct chunk *c, const void *const *slots)
{
    struct dskv_shard_rows shards[DSKV_MAX_RANKS];
    int32_t n_ranks = s->parts.shard->n_ranks;
    for (int32_t r = 0; r < n_ranks; r++) {
        const char *word = s->words + (size_t)r * c->layout.logits;
        dskv_device_download(s->parts.device, (char *)(uintptr_t)word, slots[r], c->layout.logits);
        shards[r] = (struct dskv_shard_rows){.stats = (const struct dskv_row_stats *)word,
                                             .top_values = (const float *)(word + c->layout.top_values),
                                             .top_ids = (const int32_t *)(word + c->layout.top_ids)};
    }
    for (int32_t r = 0; r < c->rows; r++) {
        size_t top = (size_t)(c->first + r) * DSKV_MAX_TOPK;
        dskv_merge_row(shards, n_ranks, r, c->k, &c->wanted[r], s->topk_ids + top, s->topk_logprobs + top,
                       &s->results[c->first + r]);
    }
}

static int is_drawn(const struct dskv_plan *plan, int32_t row)
{
    return (dskv_plan_rows(plan)[row].want & DSKV_ROW_SAMPLE) && dskv_plan_sampling(plan)[row].temperature > 0;
}

/* Whole rows of those that want them into `full`: first rows that are drawn from, then those that only want logits. */
static int32_t gather_full(const struct dskv_select_state *s, const struct dskv_plan *plan, const struct chunk *c,
                           const void *const *slots, int32_t index[CHUNK_MAX_ROWS], int32_t *n_drawn)
{
    int32_t n = 0, vocab = s->parts.model->vocab, n_ranks = s->parts.shard->n_ranks;
    for (int32_t r = 0; r < c->rows; r++)
        if (is_drawn(plan, c->first + r))
            index[n++] = r;
    *n_drawn = n;
    for (int32_t r = 0; r < c->rows; r++)
        if ((c->wanted[r].want & DSKV_ROW_LOGITS) && !is_drawn(plan, c->first + r))
            index[n++] = r;
    if (n == 0)
        return 0;
    dskv_device_upload(s->parts.device, s->full_index, index, (size_t)n * sizeof *index);
    for (int32_t r = 0; r < n_ranks; r++) {
        struct dskv_shard shard;
        DSKV_ASSERT(dskv_shard_of(s->parts.model, r, n_ranks, &shard, NULL) == DSKV_EXIT_OK, "rank %d", (int)r);
        const char *logits = (const char *)slots[r] + c->layout.logits;
        struct dskv_gather_rows gather = {
            .x = dskv_tensor((void *)(uintptr_t)logits, DSKV_F32, c->rows, shard.n_vocab_local),
            .index = s->full_index,
            .out = dskv_tensor_cols(dskv_tensor(s->full, DSKV_F32, n, vocab), shard.first_vocab, shard.n_vocab_local)};
        if (shard.n_vocab_local)
            dskv_op_gather_rows(s->parts.device, &gather);
    }
    return n;
}

static void draw(const struct dskv_select_state *s, const struct dskv_plan *plan, const struct chunk *c,
                 const int32_t *index, int32_t n_drawn)
{
    struct dskv_sampling sampling[CHUNK_MAX_ROWS];
    int32_t ids[CHUNK_MAX_ROWS];
    for (int32_t i = 0; i < n_drawn; i++)
        sampling[i] = dskv_plan_sampling(plan)[c->first + index[i]];
    dskv_device_upload(s->parts.device, s->sampling, sampling, (size_t)n_drawn * sizeof *sampling);
    struct dskv_sample sample = {.logits = dskv_tensor(s->full, DSKV_F32, n_drawn, s->parts.model->vocab),
                                 .sampling = s->sampling,
                                 .ids = s->drawn,
                                 .scratch = s->scratch};
    dskv_op_sample(s->parts.device, &sample);
    dskv_device_download(s->parts.device, ids, s->drawn, (size_t)n_drawn * sizeof *ids);
    for (int32_t i = 0; i < n_drawn; i++)
        s->results[c->first + index[i]].sampled = ids[i];
}

static void keep_logits(struct dskv_select_state *s, const struct chunk *c, const int32_t *index, int32_t n_full)
{
    size_t vocab = (size_t)s->parts.model->vocab;
    for (int32_t i = 0; i < n_full; i++) {
        if (!(c->wanted[index[i]].want & DSKV_ROW_LOGITS))
            continue;
        DSKV_ASSERT(s->n_logits < s->parts.max_logit_rows, "%d rows of logits", (int)s->parts.max_logit_rows);
        float *row = s->logits + (size_t)s->n_logits++ * vocab;
        dskv_device_download(s->parts.device, row, s->full + (size_t)i * vocab, vocab * sizeof *row);
        s->results[c->first + index[i]].logits = row;
    }
}

enum dskv_exit dskv_select_rows(struct dskv_select_state *s, const struct dskv_plan *plan, const int32_t *row_tokens,
                                const int32_t *row_targets, struct dskv_tensor x,
                                const struct dskv_row_result **results, struct dskv_error *error)
{
    s->n_logits = 0;
    *results = s->results;
    for (int32_t first = 0; first < plan->used.n_rows; first += s->chunk_rows) {
        struct chunk c = chunk_at(s, plan, first);
        const void *const *slots;
        int32_t index[CHUNK_MAX_ROWS], n_drawn;
        compute_chunk(s, &c, row_tokens, row_targets, x);
        enum dskv_exit code = dskv_comm_exchange(
            s->parts.comm,
            c.layout.logits + (size_t)c.rows * largest_shard(s->parts.model, s->parts.shard->n_ranks) * sizeof(float),
            &slots, error);
        if (code)
            return code;
        if (!s->selects)
            continue;
        merge_chunk(s, &c, slots);
        int32_t n_full = gather_full(s, plan, &c, slots, index, &n_drawn);
        if (n_drawn)
            draw(s, plan, &c, index, n_drawn);
        keep_logits(s, &c, index, n_full);
    }
    return DSKV_EXIT_OK;
}
