/* Plan: the layout of the buffer, and its builder. */
#include "parallel/plan.h"

#include "parallel/plan_layout.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static const size_t element_bytes[DSKV_PLAN_N_SECTIONS] = {
    [DSKV_PLAN_IDS] = sizeof(int32_t),
    [DSKV_PLAN_POSITIONS] = sizeof(int32_t),
    [DSKV_PLAN_SLOTS] = sizeof(int32_t),
    [DSKV_PLAN_WORK] = sizeof(struct dskv_attention_work),
    [DSKV_PLAN_TABLES] = sizeof(int32_t),
    [DSKV_PLAN_COPIES] = sizeof(struct dskv_block_copy),
    [DSKV_PLAN_ROWS] = sizeof(struct dskv_plan_row),
    [DSKV_PLAN_ROW_TOKENS] = sizeof(int32_t),
    [DSKV_PLAN_ROW_TARGETS] = sizeof(int32_t),
    [DSKV_PLAN_SAMPLING] = sizeof(struct dskv_sampling),
    [DSKV_PLAN_RESERVED] = 0,
};

static int32_t section_elements(const struct dskv_plan_sizes *sizes, enum dskv_plan_section section)
{
    switch (section) {
    case DSKV_PLAN_IDS:
    case DSKV_PLAN_POSITIONS:
    case DSKV_PLAN_SLOTS: return sizes->n_tokens;
    case DSKV_PLAN_WORK: return sizes->n_work;
    case DSKV_PLAN_TABLES: return sizes->n_table;
    case DSKV_PLAN_COPIES: return sizes->n_copies;
    case DSKV_PLAN_ROWS:
    case DSKV_PLAN_ROW_TOKENS:
    case DSKV_PLAN_ROW_TARGETS:
    case DSKV_PLAN_SAMPLING: return sizes->n_rows;
    case DSKV_PLAN_RESERVED:
    case DSKV_PLAN_N_SECTIONS: break;
    }
    return 0;
}

size_t dskv_plan_section_bytes(const struct dskv_plan_sizes *sizes, enum dskv_plan_section section)
{
    return (size_t)section_elements(sizes, section) * element_bytes[section];
}

/* The smallest power of two that holds n, and never so few that every second step would have another bucket. */
static int32_t bucket_of(int32_t n)
{
    DSKV_ASSERT(n >= 0 && n <= DSKV_PLAN_MAX_COUNT, "%d", (int)n);
    int32_t bucket = DSKV_PLAN_MIN_BUCKET;
    while (bucket < n)
        bucket *= 2;
    return bucket;
}

static struct dskv_plan_sizes bucket_sizes(const struct dskv_plan_sizes *need)
{
    return (struct dskv_plan_sizes){bucket_of(need->n_tokens), bucket_of(need->n_work), bucket_of(need->n_table),
                                    bucket_of(need->n_copies), bucket_of(need->n_rows)};
}

size_t dskv_plan_layout(const struct dskv_plan_sizes *capacity, uint32_t offset[DSKV_PLAN_N_SECTIONS])
{
    size_t at = sizeof(struct dskv_plan);
    for (int s = 0; s < DSKV_PLAN_N_SECTIONS; s++) {
        at = (at + DSKV_PLAN_ALIGNMENT - 1) / DSKV_PLAN_ALIGNMENT * DSKV_PLAN_ALIGNMENT;
        if (offset)
            offset[s] = (uint32_t)at;
        at += dskv_plan_section_bytes(capacity, (enum dskv_plan_section)s);
    }
    return (at + DSKV_PLAN_ALIGNMENT - 1) / DSKV_PLAN_ALIGNMENT * DSKV_PLAN_ALIGNMENT;
}

struct dskv_plan_sizes dskv_plan_largest(const struct dskv_plan_bounds *bounds)
{
    int64_t blocks_of_context = (bounds->max_context + bounds->block_tokens - 1) / bounds->block_tokens;
    int64_t n_table = blocks_of_context * bounds->max_sequences;
    return (struct dskv_plan_sizes){.n_tokens = bounds->max_tokens,
                                    .n_work = bounds->max_sequences,
                                    .n_table = n_table < DSKV_PLAN_MAX_COUNT ? (int32_t)n_table : DSKV_PLAN_MAX_COUNT,
                                    .n_copies = bounds->max_tokens,
                                    .n_rows = bounds->max_tokens};
}

size_t dskv_plan_bytes(const struct dskv_plan_sizes *need)
{
    struct dskv_plan_sizes capacity = bucket_sizes(need);
    return dskv_plan_layout(&capacity, NULL);
}

struct dskv_plan *dskv_plan_begin(void *memory, size_t memory_bytes, const struct dskv_plan_sizes *need, uint64_t step)
{
    struct dskv_plan *plan = memory;
    struct dskv_plan_sizes capacity = bucket_sizes(need);
    size_t bytes = dskv_plan_layout(&capacity, NULL);
    DSKV_ASSERT((uintptr_t)memory % DSKV_PLAN_ALIGNMENT == 0, "%p", memory);
    DSKV_ASSERT(bytes <= memory_bytes && bytes <= UINT32_MAX, "%zu bytes for %zu", memory_bytes, bytes);
    memset(memory, 0, bytes);
    plan->magic = DSKV_PLAN_MAGIC;
    plan->version = DSKV_PLAN_VERSION;
    plan->step = step;
    plan->bytes = bytes;
    plan->capacity = capacity;
    dskv_plan_layout(&capacity, plan->offset);
    memset(dskv_plan_section(plan, DSKV_PLAN_SLOTS), 0xff, (size_t)capacity.n_tokens * sizeof(int32_t)); /* -1 */
    return plan;
}

void *dskv_plan_section(const struct dskv_plan *plan, enum dskv_plan_section section)
{
    return (char *)(uintptr_t)plan + plan->offset[section];
}

static void assert_room(int32_t used, int32_t more, int32_t capacity, const char *what)
{
    DSKV_ASSERT(more >= 0 && more <= capacity - used, "%s: %d used, %d more, room for %d", what, (int)used, (int)more,
                (int)capacity);
}

int32_t dskv_plan_add_work(struct dskv_plan *plan, const int32_t *ids, const int32_t *slots, int32_t n_tokens,
                           int32_t start, const int32_t *table, int32_t n_blocks)
{
    assert_room(plan->used.n_tokens, n_tokens, plan->capacity.n_tokens, "tokens");
    assert_room(plan->used.n_work, 1, plan->capacity.n_work, "work");
    assert_room(plan->used.n_table, n_blocks, plan->capacity.n_table, "table");
    int32_t first = plan->used.n_tokens, first_block = plan->used.n_table;
    int32_t *plan_ids = dskv_plan_section(plan, DSKV_PLAN_IDS), *plan_slots = dskv_plan_section(plan, DSKV_PLAN_SLOTS);
    int32_t *positions = dskv_plan_section(plan, DSKV_PLAN_POSITIONS);
    for (int32_t i = 0; i < n_tokens; i++) {
        plan_ids[first + i] = ids[i];
        positions[first + i] = start + i;
        plan_slots[first + i] = slots ? slots[i] : -1;
    }
    memcpy((int32_t *)dskv_plan_section(plan, DSKV_PLAN_TABLES) + first_block, table, (size_t)n_blocks * sizeof *table);
    struct dskv_attention_work *work = dskv_plan_section(plan, DSKV_PLAN_WORK);
    work[plan->used.n_work] = (struct dskv_attention_work){
        .first = first, .n_tokens = n_tokens, .start = start, .first_block = first_block, .n_blocks = n_blocks};
    plan->used.n_tokens += n_tokens;
    plan->used.n_table += n_blocks;
    plan->used.n_work++;
    return first;
}

void dskv_plan_add_copy(struct dskv_plan *plan, int32_t src, int32_t dst, int32_t n_tokens)
{
    assert_room(plan->used.n_copies, 1, plan->capacity.n_copies, "copies");
    struct dskv_block_copy *copies = dskv_plan_section(plan, DSKV_PLAN_COPIES);
    copies[plan->used.n_copies++] = (struct dskv_block_copy){.src = src, .dst = dst, .n_tokens = n_tokens};
}

int32_t dskv_plan_add_row(struct dskv_plan *plan, const struct dskv_plan_row *row, const struct dskv_sampling *sampling)
{
    int32_t index = plan->used.n_rows;
    assert_room(index, 1, plan->capacity.n_rows, "rows");
    DSKV_ASSERT(sampling || !(row->want & DSKV_ROW_SAMPLE), "row %d wants a token drawn", (int)index);
    ((struct dskv_plan_row *)dskv_plan_section(plan, DSKV_PLAN_ROWS))[index] = *row;
    ((int32_t *)dskv_plan_section(plan, DSKV_PLAN_ROW_TOKENS))[index] = row->token;
    ((int32_t *)dskv_plan_section(plan, DSKV_PLAN_ROW_TARGETS))[index] = row->target;
    if (row->want & DSKV_ROW_SAMPLE) /* elsewhere the temperature stays 0: devices draw by it alone */
        ((struct dskv_sampling *)dskv_plan_section(plan, DSKV_PLAN_SAMPLING))[index] = *sampling;
    plan->used.n_rows++;
    return index;
}

void dskv_plan_copy(struct dskv_plan *dst, const struct dskv_plan *src)
{
    const int32_t *room = &dst->capacity.n_tokens, *used = &src->used.n_tokens;
    for (size_t i = 0; i < sizeof src->used / sizeof *used; i++)
        assert_room(0, used[i], room[i], "copy");
    for (int s = 0; s < DSKV_PLAN_N_SECTIONS; s++)
        memcpy(dskv_plan_section(dst, s), dskv_plan_section(src, s), dskv_plan_section_bytes(&src->used, s));
    dst->used = src->used;
    dst->step = src->step;
}

uint64_t dskv_plan_hash(const struct dskv_plan *plan)
{
    uint64_t hash = XXH3_64bits_withSeed(&plan->used, sizeof plan->used, plan->step);
    for (int s = 0; s < DSKV_PLAN_N_SECTIONS; s++)
        hash = XXH3_64bits_withSeed(dskv_plan_section(plan, (enum dskv_plan_section)s),
                                    dskv_plan_section_bytes(&plan->used, (enum dskv_plan_section)s), hash);
    return hash;
}

const int32_t *dskv_plan_ids(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_IDS);
}

const int32_t *dskv_plan_positions(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_POSITIONS);
}

const int32_t *dskv_plan_slots(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_SLOTS);
}

const struct dskv_attention_work *dskv_plan_work(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_WORK);
}

const int32_t *dskv_plan_tables(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_TABLES);
}

const struct dskv_block_copy *dskv_plan_copies(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_COPIES);
}

const struct dskv_plan_row *dskv_plan_rows(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_ROWS);
}

const int32_t *dskv_plan_row_tokens(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_ROW_TOKENS);
}

const int32_t *dskv_plan_row_targets(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_ROW_TARGETS);
}

const struct dskv_sampling *dskv_plan_sampling(const struct dskv_plan *plan)
{
    return dskv_plan_section(plan, DSKV_PLAN_SAMPLING);
}
