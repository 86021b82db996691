#include "parallel/select.h"

#include "base/memory.h"
#include "parallel/merge.h"
#include "parallel/recorded.h"

#include <stdlib.h>
#include <string.h>

#define HOST_CHUNK_BYTES (8 << 20) /* of one shard's logits: enough rows that the head's weights are read seldom */
#define CHUNK_MIN_ROWS 8
#define CHUNK_MAX_ROWS 64

struct dskv_select_state {
    struct dskv_forward_parts parts;
    int32_t chunk_rows;
    void *memory; /* device: all buffers of the first group, one allocation */
    size_t memory_bytes;
    void *hidden;      /* activation [chunk_rows, width] */
    int32_t *drawn;    /* [max_tokens], until the next step's rows are chosen */
    float *full;       /* [chunk_rows, vocab]: whole rows, gathered from several shards */
    int32_t *in_order; /* [chunk_rows]: 0, 1, 2 ... */
    void *scratch;     /* of dskv_op_sample */
    int selects; /* this rank chooses and draws; elsewhere scratch, full, in_order, logits, results and top-k are null
                  */
    /* Places: times, then of each chunk every shard's word and the tokens that were drawn. */
    struct dskv_turns reports;
    size_t reported; /* bytes of the step that is being queued */
    float *logits;   /* host [max_logit_rows, vocab]: rows of the last step that wanted whole ones */
    int32_t n_logits;
    struct dskv_row_result *results; /* [max_tokens] */
    int32_t *topk_ids;               /* [max_tokens, DSKV_MAX_TOPK] */
    float *topk_logprobs;            /* [max_tokens, DSKV_MAX_TOPK] */
    const void *const *slots;        /* of the last chunk */
};

/* ---- a chunk's slot: stats, best values, best ids, then the shard's logits ---------------------- */

struct slot_layout {
    size_t top_values, top_ids, logits; /* offsets; stats at 0 */
};

/* A shard's word on the chunk: stats, best values, best ids; all that lies before the logits. */
static struct slot_layout slot_layout(int64_t rows, int32_t k)
{
    struct slot_layout layout;
    layout.top_values = dskv_whole_lines((size_t)rows * sizeof(struct dskv_row_stats));
    layout.top_ids = layout.top_values + dskv_whole_lines((size_t)rows * (size_t)k * sizeof(float));
    layout.logits = layout.top_ids + dskv_whole_lines((size_t)rows * (size_t)k * sizeof(int32_t));
    return layout;
}

/* Ids of the largest shard; the same on every rank. */
static int64_t largest_shard(const struct dskv_model *model, int32_t n_ranks)
{
    int64_t units = (model->vocab + DSKV_SPLIT_UNIT - 1) / DSKV_SPLIT_UNIT;
    return (units + n_ranks - 1) / n_ranks * DSKV_SPLIT_UNIT;
}

static int32_t chunk_rows_of(const struct dskv_model *model, const struct dskv_device *device, int32_t n_ranks,
                             int32_t max_tokens)
{
    int64_t rows = CHUNK_MAX_ROWS;
    if (dskv_device_is_host(device))
        rows = HOST_CHUNK_BYTES / (largest_shard(model, n_ranks) * (int64_t)sizeof(float));
    rows = rows < CHUNK_MIN_ROWS ? CHUNK_MIN_ROWS : rows > CHUNK_MAX_ROWS ? CHUNK_MAX_ROWS : rows;
    return rows < max_tokens ? (int32_t)rows : max_tokens;
}

size_t dskv_select_slot_bytes(const struct dskv_model *model, const struct dskv_device *device, int32_t n_ranks,
                              int32_t max_tokens)
{
    int32_t rows = chunk_rows_of(model, device, n_ranks, max_tokens);
    return slot_layout(rows, DSKV_MAX_TOPK).logits +
           (size_t)rows * (size_t)largest_shard(model, n_ranks) * sizeof(float);
}

int32_t dskv_select_chunk_rows(const struct dskv_select_state *state)
{
    return state->chunk_rows;
}

const int32_t *dskv_select_drawn(const struct dskv_select_state *state)
{
    return state->drawn;
}

/* ---- open and close ----------------------------------------------------------------------------- */

static void *carve(const struct dskv_select_state *s, size_t *at, size_t bytes)
{
    void *place = s->memory ? (char *)s->memory + *at : NULL;
    *at += dskv_whole_lines(bytes);
    return place;
}

static size_t place_buffers(struct dskv_select_state *s)
{
    size_t rows = (size_t)s->chunk_rows, vocab = (size_t)s->parts.model->vocab, at = 0;
    s->hidden = carve(s, &at, rows * (size_t)s->parts.model->width * dskv_dtype_bytes(s->parts.activation_dtype));
    s->drawn = carve(s, &at, (size_t)s->parts.bounds.max_tokens * sizeof *s->drawn);
    if (!s->selects)
        return at;
    s->scratch = carve(s, &at, dskv_sample_scratch_bytes(s->parts.model->vocab));
    if (s->parts.shard->n_ranks == 1)
        return at;
    s->full = carve(s, &at, rows * vocab * sizeof *s->full);
    s->in_order = carve(s, &at, rows * sizeof *s->in_order);
    return at;
}

static void fill_in_order(const struct dskv_select_state *s)
{
    int32_t order[CHUNK_MAX_ROWS];
    for (int32_t r = 0; r < s->chunk_rows; r++)
        order[r] = r;
    if (s->in_order)
        dskv_device_upload(s->parts.device, s->in_order, order, (size_t)s->chunk_rows * sizeof *order);
}

/* What a chunk reports. */
static size_t report_bytes(const struct dskv_select_state *s, int32_t n_rows, int32_t k)
{
    return (size_t)s->parts.shard->n_ranks * slot_layout(n_rows, k).logits + (size_t)n_rows * sizeof(int32_t);
}

/* Of a place: every rank reports, if only when a step began and ended. */
static size_t place_bytes(const struct dskv_select_state *s)
{
    size_t rows = (size_t)s->parts.bounds.max_tokens, n_chunks = s->selects ? rows / (size_t)s->chunk_rows + 1 : 0;
    return sizeof(struct dskv_turn_times) + n_chunks * report_bytes(s, s->chunk_rows, DSKV_MAX_TOPK);
}

static int alloc_places(struct dskv_select_state *s)
{
    for (int i = 0; i < 2; i++)
        s->reports.places[i] = dskv_device_host_alloc(s->parts.device, place_bytes(s));
    return s->reports.places[0] && s->reports.places[1];
}

static size_t logits_bytes(const struct dskv_select_state *s)
{
    return (size_t)s->parts.max_logit_rows * (size_t)s->parts.model->vocab * sizeof *s->logits;
}

static int alloc_results(struct dskv_select_state *s)
{
    size_t rows = (size_t)s->parts.bounds.max_tokens;
    s->logits = dskv_device_host_alloc(s->parts.device, logits_bytes(s));
    s->results = calloc(rows, sizeof *s->results);
    s->topk_ids = calloc(rows * DSKV_MAX_TOPK, sizeof *s->topk_ids);
    s->topk_logprobs = calloc(rows * DSKV_MAX_TOPK, sizeof *s->topk_logprobs);
    return s->logits && s->results && s->topk_ids && s->topk_logprobs;
}

enum dskv_exit dskv_select_open(const struct dskv_forward_parts *parts, struct dskv_turn *turn,
                                struct dskv_select_state **state, struct dskv_error *error)
{
    struct dskv_select_state *s = dskv_calloc(1, sizeof *s);
    s->parts = *parts;
    s->reports.turn = turn;
    s->chunk_rows = chunk_rows_of(parts->model, parts->device, parts->shard->n_ranks, parts->bounds.max_tokens);
    s->selects = parts->shard->rank == 0 || parts->every_rank_selects;
    s->memory_bytes = place_buffers(s);
    s->memory = dskv_device_alloc(parts->device, s->memory_bytes);
    if (!s->memory || !alloc_places(s) || (s->selects && !alloc_results(s))) {
        dskv_select_close(&s);
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %d rows of logits: lower --max-batch-tokens",
                              (int)parts->max_logit_rows);
    }
    place_buffers(s);
    fill_in_order(s);
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
    for (int i = 0; i < 2; i++)
        dskv_device_host_free(s->parts.device, s->reports.places[i], place_bytes(s));
    dskv_device_host_free(s->parts.device, s->logits, logits_bytes(s));
    free(s->results);
    free(s->topk_ids);
    free(s->topk_logprobs);
    free(s);
    *state = NULL;
}

/* ---- computing a chunk -------------------------------------------------------------------------- */

struct dskv_select_chunk dskv_select_chunk_at(const struct dskv_select_state *s, const struct dskv_plan *plan,
                                              int32_t first)
{
    struct dskv_select_chunk c = {.first = first, .n_rows = plan->used.n_rows - first};
    const struct dskv_plan_row *wanted = dskv_plan_rows(plan) + first;
    const struct dskv_sampling *sampling = dskv_plan_sampling(plan) + first;
    if (c.n_rows > s->chunk_rows)
        c.n_rows = s->chunk_rows;
    int32_t n_wanted = c.n_rows, rounded = dskv_recorded_size(c.n_rows);
    if (first == 0 && !dskv_device_is_host(s->parts.device) && rounded <= s->chunk_rows)
        c.n_rows = rounded; /* the plan's bucket holds as many */
    for (int32_t r = 0; r < n_wanted; r++) {
        if (wanted[r].topk > c.k)
            c.k = wanted[r].topk;
        c.is_drawn |= (wanted[r].want & DSKV_ROW_SAMPLE) && sampling[r].temperature > 0;
        c.is_whole |= c.is_drawn || (wanted[r].want & DSKV_ROW_LOGITS);
    }
    return c;
}

/* This rank's word on the chunk, and its logits, into its slot. */
static void compute_word(const struct dskv_select_state *s, const struct dskv_select_chunk *c,
                         const struct dskv_select_rows *rows, struct dskv_tensor h)
{
    const struct dskv_forward_parts *p = &s->parts;
    struct slot_layout layout = slot_layout(c->n_rows, c->k);
    char *slot = dskv_comm_slot(p->comm);
    struct dskv_tensor hidden = dskv_tensor(s->hidden, p->activation_dtype, c->n_rows, p->model->width);
    struct dskv_tensor logits = dskv_tensor(slot + layout.logits, DSKV_F32, c->n_rows, p->shard->n_vocab_local);
    struct dskv_gather_rows gather = {h, rows->tokens + c->first, hidden};
    dskv_op_gather_rows(p->device, &gather);
    struct dskv_matmul head = {hidden, p->weights->head, NULL, logits};
    dskv_op_matmul(p->device, &head);
    struct dskv_select select = {.logits = logits,
                                 .first = p->shard->first_vocab,
                                 .vocab = p->model->vocab,
                                 .targets = rows->targets + c->first,
                                 .k = c->k,
                                 .stats = (struct dskv_row_stats *)slot,
                                 .top_values = (float *)(slot + layout.top_values),
                                 .top_ids = (int32_t *)(slot + layout.top_ids)};
    dskv_op_select(p->device, &select);
}

/* A shard's logits in its slot. */
static struct dskv_tensor slot_logits(const struct dskv_select_state *s, const struct dskv_select_chunk *c,
                                      int32_t rank, int32_t *first_vocab)
{
    struct dskv_shard shard;
    DSKV_ASSERT(dskv_shard_of(s->parts.model, rank, s->parts.shard->n_ranks, &shard, NULL) == DSKV_EXIT_OK, "rank %d",
                (int)rank);
    const char *logits = (const char *)s->slots[rank] + slot_layout(c->n_rows, c->k).logits;
    *first_vocab = shard.first_vocab;
    return dskv_tensor((void *)(uintptr_t)logits, DSKV_F32, c->n_rows, shard.n_vocab_local);
}

/* The chunk's whole rows: in the slot of the only shard, or gathered from all. */
static struct dskv_tensor whole_rows(const struct dskv_select_state *s, const struct dskv_select_chunk *c)
{
    int32_t first;
    if (s->parts.shard->n_ranks == 1)
        return slot_logits(s, c, 0, &first);
    return dskv_tensor(s->full, DSKV_F32, c->n_rows, s->parts.model->vocab);
}

static void gather_whole_rows(const struct dskv_select_state *s, const struct dskv_select_chunk *c)
{
    for (int32_t r = 0; s->parts.shard->n_ranks > 1 && r < s->parts.shard->n_ranks; r++) {
        int32_t first;
        struct dskv_gather_rows gather = {.x = slot_logits(s, c, r, &first), .index = s->in_order};
        gather.out = dskv_tensor_cols(whole_rows(s, c), first, gather.x.cols);
        if (gather.x.cols)
            dskv_op_gather_rows(s->parts.device, &gather);
    }
}

static void choose(const struct dskv_select_state *s, const struct dskv_select_chunk *c,
                   const struct dskv_select_rows *rows)
{
    struct dskv_choose choose = {(const struct dskv_row_stats *const *)s->slots, s->parts.shard->n_ranks, c->n_rows,
                                 s->drawn + c->first};
    dskv_op_choose(s->parts.device, &choose);
    if (!c->is_drawn)
        return;
    struct dskv_sample sample = {whole_rows(s, c), rows->sampling + c->first, s->drawn + c->first, s->scratch};
    dskv_op_sample(s->parts.device, &sample);
}

enum dskv_exit dskv_select_compute(struct dskv_select_state *s, const struct dskv_select_chunk *c,
                                   const struct dskv_select_rows *rows, struct dskv_tensor h, struct dskv_error *error)
{
    size_t bytes = slot_layout(c->n_rows, c->k).logits;
    if (c->is_whole)
        bytes += (size_t)c->n_rows * (size_t)largest_shard(s->parts.model, s->parts.shard->n_ranks) * sizeof(float);
    compute_word(s, c, rows, h);
    enum dskv_exit code = dskv_comm_exchange(s->parts.comm, bytes, &s->slots, error);
    if (code || !s->selects)
        return code;
    if (c->is_whole)
        gather_whole_rows(s, c);
    choose(s, c, rows);
    return DSKV_EXIT_OK;
}

/* ---- its results -------------------------------------------------------------------------------- */

void dskv_select_report(struct dskv_select_state *s, const struct dskv_select_chunk *c, int is_last)
{
    struct dskv_report report = {.to = s->reports, .passes_turn = is_last};
    if (c->first == 0)
        s->reported = sizeof(struct dskv_turn_times);
    report.offset = s->reported;
    for (int32_t r = 0; s->selects && c->n_rows && r < s->parts.shard->n_ranks; r++) {
        report.parts[report.n_parts] = s->slots[r];
        report.bytes[report.n_parts++] = slot_layout(c->n_rows, c->k).logits;
    }
    if (report.n_parts) {
        report.parts[report.n_parts] = s->drawn + c->first;
        report.bytes[report.n_parts++] = (size_t)c->n_rows * sizeof *s->drawn;
        s->reported += report_bytes(s, c->n_rows, c->k);
    }
    dskv_op_report(s->parts.device, &report);
}

void dskv_select_fetch(struct dskv_select_state *s, const struct dskv_plan *plan, const struct dskv_select_chunk *c)
{
    size_t vocab = (size_t)s->parts.model->vocab;
    if (c->first == 0)
        s->n_logits = 0;
    for (int32_t r = 0; s->selects && r < c->n_rows && c->first + r < plan->used.n_rows; r++) {
        if (!(dskv_plan_rows(plan)[c->first + r].want & DSKV_ROW_LOGITS))
            continue;
        struct dskv_tensor whole = whole_rows(s, c);
        DSKV_ASSERT(s->n_logits < s->parts.max_logit_rows, "%d rows of logits", (int)s->parts.max_logit_rows);
        dskv_device_fetch(s->parts.device, s->logits + (size_t)s->n_logits++ * vocab,
                          (const float *)whole.data + r * whole.stride, vocab * sizeof(float));
    }
}

/* report: what the chunk reported. */
static void merge_chunk(struct dskv_select_state *s, const struct dskv_plan *plan, const struct dskv_select_chunk *c,
                        const char *report)
{
    struct dskv_shard_rows shards[DSKV_MAX_RANKS];
    int32_t n_ranks = s->parts.shard->n_ranks;
    struct slot_layout layout = slot_layout(c->n_rows, c->k);
    for (int32_t r = 0; r < n_ranks; r++, report += layout.logits)
        shards[r] = (struct dskv_shard_rows){.stats = (const struct dskv_row_stats *)report,
                                             .top_values = (const float *)(report + layout.top_values),
                                             .top_ids = (const int32_t *)(report + layout.top_ids)};
    const int32_t *drawn = (const int32_t *)report;
    for (int32_t r = 0; r < c->n_rows && c->first + r < plan->used.n_rows; r++) {
        const struct dskv_plan_row *wanted = &dskv_plan_rows(plan)[c->first + r];
        struct dskv_row_result *result = &s->results[c->first + r];
        size_t top = (size_t)(c->first + r) * DSKV_MAX_TOPK;
        dskv_merge_row(shards, n_ranks, r, c->k, wanted, s->topk_ids + top, s->topk_logprobs + top, result);
        if (wanted->want & DSKV_ROW_SAMPLE)
            result->sampled = drawn[r];
    }
}

struct dskv_turn_times dskv_select_times(const struct dskv_select_state *s, int place)
{
    struct dskv_turn_times times;
    memcpy(&times, s->reports.places[place], sizeof times);
    return times;
}

const struct dskv_row_result *dskv_select_results(struct dskv_select_state *s, const struct dskv_plan *plan, int place)
{
    const char *report = (const char *)s->reports.places[place] + sizeof(struct dskv_turn_times);
    const float *logits = s->logits;
    if (!s->selects)
        return NULL;
    for (int32_t first = 0; first < plan->used.n_rows; first += s->chunk_rows) {
        struct dskv_select_chunk c = dskv_select_chunk_at(s, plan, first);
        merge_chunk(s, plan, &c, report);
        report += report_bytes(s, c.n_rows, c.k);
    }
    for (int32_t r = 0; r < plan->used.n_rows; r++)
        if (dskv_plan_rows(plan)[r].want & DSKV_ROW_LOGITS) {
            s->results[r].logits = logits;
            logits += s->parts.model->vocab;
        }
    return s->results;
}
