/* Plan: the check of a plan that comes from a file.  Nothing of it is believed before it was compared with the bytes
 * that are there; after it, executing the plan reads and writes inside the pool, the tables and the vocabulary alone.
 */
#include "parallel/plan.h"

#include "base/limits.h"
#include "parallel/plan_layout.h"

#include <math.h>
#include <string.h>

static enum dskv_code bad(struct dskv_error *error, const char *what, int64_t index, int64_t value)
{
    return dskv_fail(error, DSKV_BAD_VALUE, "not an executable plan: %s (%lld at %lld)", what, (long long)value,
                     (long long)index);
}

static enum dskv_code check_frame(const struct dskv_plan *plan, size_t bytes, struct dskv_error *error)
{
    uint32_t offset[DSKV_PLAN_N_SECTIONS];
    const int32_t *used = &plan->used.n_tokens, *capacity = &plan->capacity.n_tokens;
    if (plan->magic != DSKV_PLAN_MAGIC || plan->version != DSKV_PLAN_VERSION)
        return bad(error, "another magic or version", plan->magic, plan->version);
    for (int32_t i = 0; i < (int32_t)(sizeof plan->used / sizeof *used); i++) {
        if (capacity[i] < DSKV_PLAN_MIN_BUCKET || capacity[i] > DSKV_PLAN_MAX_COUNT ||
            (capacity[i] & (capacity[i] - 1)))
            return bad(error, "a capacity is not a bucket's", i, capacity[i]);
        if (used[i] < 0 || used[i] > capacity[i])
            return bad(error, "more is used than its bucket holds", i, used[i]);
    }
    if (plan->bytes != bytes || dskv_plan_layout(&plan->capacity, offset) != bytes)
        return bad(error, "its size is not its bucket's", (int64_t)bytes, (int64_t)plan->bytes);
    if (memcmp(offset, plan->offset, sizeof offset) != 0)
        return bad(error, "its offsets are not its bucket's", 0, plan->offset[0]);
    return DSKV_OK;
}

static enum dskv_code check_bounds(const struct dskv_plan *plan, const struct dskv_plan_bounds *bounds,
                                   struct dskv_error *error)
{
    struct dskv_plan_sizes largest = dskv_plan_largest(bounds);
    if (plan->used.n_tokens > largest.n_tokens)
        return bad(error, "more tokens than a step may have", largest.n_tokens, plan->used.n_tokens);
    if (plan->used.n_work > largest.n_work)
        return bad(error, "more sequences than a step may have", largest.n_work, plan->used.n_work);
    if (plan->used.n_copies > largest.n_copies)
        return bad(error, "more block copies than a step may have", largest.n_copies, plan->used.n_copies);
    if (plan->used.n_table > largest.n_table)
        return bad(error, "more blocks than its sequences can have", largest.n_table, plan->used.n_table);
    if (plan->used.n_rows > plan->used.n_tokens)
        return bad(error, "more rows than tokens", plan->used.n_tokens, plan->used.n_rows);
    return DSKV_OK;
}

/* Token i is in the vocabulary, or is drawn by a row of the step before. */
static enum dskv_code check_id(const struct dskv_plan *plan, const struct dskv_plan_bounds *bounds,
                               const struct dskv_plan *before, int32_t i, struct dskv_error *error)
{
    int32_t id = dskv_plan_ids(plan)[i], row = dskv_plan_reference_row(id);
    if (id >= bounds->vocab)
        return bad(error, "a token id is not in the vocabulary", i, id);
    if (row < 0)
        return DSKV_OK;
    if (!before || row >= before->used.n_rows || !(dskv_plan_rows(before)[row].want & DSKV_ROW_DRAWN))
        return bad(error, "a token is drawn by no row of the plan before", i, id);
    return DSKV_OK;
}

/* One run: its tokens follow the last run's, its table covers them, and slots are their positions' places in it. */
static enum dskv_code check_run(const struct dskv_plan *plan, const struct dskv_plan_bounds *bounds,
                                const struct dskv_plan *before, int32_t w, int32_t first, int32_t first_block,
                                struct dskv_error *error)
{
    const struct dskv_attention_work *work = dskv_plan_work(plan) + w;
    const int32_t *positions = dskv_plan_positions(plan), *slots = dskv_plan_slots(plan);
    const int32_t *table = dskv_plan_tables(plan) + first_block, block_tokens = bounds->block_tokens;
    if (work->first != first || work->n_tokens < 1 || work->n_tokens > plan->used.n_tokens - first)
        return bad(error, "a sequence's tokens do not follow the last one's", w, work->first);
    if (work->start < 0 || work->start > bounds->max_context - work->n_tokens)
        return bad(error, "a sequence is past the context", w, work->start);
    if (work->first_block != first_block || work->n_blocks < 1 || work->n_blocks > plan->used.n_table - first_block ||
        (int64_t)work->n_blocks * block_tokens < (int64_t)work->start + work->n_tokens)
        return bad(error, "a sequence's table does not cover it", w, work->n_blocks);
    if (work->reserved[0] || work->reserved[1] || work->reserved[2])
        return bad(error, "a reserved field is used", w, work->reserved[0]);
    for (int32_t b = 0; b < work->n_blocks; b++)
        if (table[b] < 0 || table[b] >= bounds->n_blocks)
            return bad(error, "a block is not in the pool", first_block + b, table[b]);
    for (int32_t i = first; i < first + work->n_tokens; i++) {
        int32_t position = work->start + (i - first);
        enum dskv_code code = check_id(plan, bounds, before, i, error);
        if (code)
            return code;
        if (positions[i] != position)
            return bad(error, "a position is not its sequence's", i, positions[i]);
        if (slots[i] != -1 && slots[i] != table[position / block_tokens] * block_tokens + position % block_tokens)
            return bad(error, "a slot is not its position's", i, slots[i]);
    }
    return DSKV_OK;
}

static enum dskv_code check_work(const struct dskv_plan *plan, const struct dskv_plan_bounds *bounds,
                                 const struct dskv_plan *before, struct dskv_error *error)
{
    int32_t n_tokens = 0, n_table = 0;
    for (int32_t w = 0; w < plan->used.n_work; w++) {
        enum dskv_code code = check_run(plan, bounds, before, w, n_tokens, n_table, error);
        if (code)
            return code;
        n_tokens += dskv_plan_work(plan)[w].n_tokens;
        n_table += dskv_plan_work(plan)[w].n_blocks;
    }
    if (n_tokens != plan->used.n_tokens || n_table != plan->used.n_table)
        return bad(error, "tokens or blocks belong to no sequence", n_tokens, plan->used.n_tokens);
    return DSKV_OK;
}

static enum dskv_code check_copies(const struct dskv_plan *plan, const struct dskv_plan_bounds *bounds,
                                   struct dskv_error *error)
{
    const struct dskv_block_copy *copies = dskv_plan_copies(plan);
    for (int32_t c = 0; c < plan->used.n_copies; c++) {
        if (copies[c].src < 0 || copies[c].src >= bounds->n_blocks || copies[c].dst < 0 ||
            copies[c].dst >= bounds->n_blocks || copies[c].src == copies[c].dst)
            return bad(error, "a block copy is not inside the pool", c, copies[c].dst);
        if (copies[c].n_tokens < 1 || copies[c].n_tokens > bounds->block_tokens || copies[c].reserved)
            return bad(error, "a block copy is not of a block's tokens", c, copies[c].n_tokens);
    }
    return DSKV_OK;
}

static int sampling_is_valid(const struct dskv_sampling *s)
{
    return isfinite(s->temperature) && s->temperature >= 0 && s->top_p > 0 && s->top_p <= 1 && s->min_p >= 0 &&
           s->min_p <= 1 && s->top_k >= 0 && s->position >= 0 && s->reserved == 0;
}

static enum dskv_code check_rows(const struct dskv_plan *plan, const struct dskv_plan_bounds *bounds,
                                 struct dskv_error *error)
{
    const uint32_t all_wants = DSKV_ROW_LOGITS | DSKV_ROW_ARGMAX | DSKV_ROW_TOPK | DSKV_ROW_SCORE | DSKV_ROW_SAMPLE;
    const struct dskv_plan_row *rows = dskv_plan_rows(plan);
    for (int32_t r = 0; r < plan->used.n_rows; r++) {
        const struct dskv_plan_row *row = &rows[r];
        if (row->token < 0 || row->token >= plan->used.n_tokens || dskv_plan_row_tokens(plan)[r] != row->token)
            return bad(error, "a row is not of a token", r, row->token);
        if (row->want == 0 || (row->want & ~all_wants))
            return bad(error, "a row wants what does not exist", r, row->want);
        if (row->want & DSKV_ROW_TOPK ? row->topk < 1 || row->topk > DSKV_MAX_TOPK : row->topk != 0)
            return bad(error, "a row's top-k is out of range", r, row->topk);
        if (row->want & DSKV_ROW_SCORE ? row->target < 0 || row->target >= bounds->vocab : row->target != -1)
            return bad(error, "a row's target is not in the vocabulary", r, row->target);
        if (dskv_plan_row_targets(plan)[r] != row->target)
            return bad(error, "a row has two targets", r, row->target);
        if ((row->want & DSKV_ROW_SAMPLE) && !sampling_is_valid(&dskv_plan_sampling(plan)[r]))
            return bad(error, "a row's sampling is out of range", r, dskv_plan_sampling(plan)[r].top_k);
        if (!(row->want & DSKV_ROW_SAMPLE) && dskv_plan_sampling(plan)[r].temperature != 0)
            return bad(error, "a row has a temperature and draws nothing", r, row->want);
    }
    return DSKV_OK;
}

enum dskv_code dskv_plan_validate(const void *memory, size_t bytes, const struct dskv_plan_bounds *bounds,
                                  const struct dskv_plan *before, struct dskv_error *error)
{
    const struct dskv_plan *plan = memory;
    enum dskv_code code;
    if (bytes < sizeof *plan || (uintptr_t)memory % DSKV_PLAN_ALIGNMENT != 0)
        return bad(error, "too short for a plan", (int64_t)sizeof *plan, (int64_t)bytes);
    if ((code = check_frame(plan, bytes, error)) || (code = check_bounds(plan, bounds, error)) ||
        (code = check_work(plan, bounds, before, error)) || (code = check_copies(plan, bounds, error)))
        return code;
    return check_rows(plan, bounds, error);
}
