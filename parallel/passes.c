/* Passes: see passes.h.
 *
 * A pass depends on its shape and on the content of device memory alone, so that its recording serves every step of the
 * shape.  What varies from step to step (the plan, reports) goes through two places in host memory that take turns.
 */
#include "parallel/passes.h"

#include "base/memory.h"
#include "parallel/plan_layout.h"
#include "parallel/recorded.h"
#include "parallel/select.h"

#include <stdlib.h>
#include <string.h>

#define MAX_RECORDED_ROWS 128 /* above, computing takes longer than queueing operation by operation */

/* A step under way. */
struct under_way {
    const struct dskv_plan *plan;
    dskv_mark end;
};

struct dskv_passes {
    struct dskv_forward_parts parts;
    struct dskv_forward *forward;
    struct dskv_select_state *select;
    struct dskv_recorded *recorded; /* null where nothing can be recorded */
    struct dskv_plan *device_plan;  /* null, as its places are, where the device reads host memory */
    struct dskv_turns plans;        /* where it comes from; reports take the same turns */
    struct under_way steps[DSKV_STEPS_UNDER_WAY];
    uint32_t n_submitted, n_collected;
};

/* Sizes of a pass, and all else that its operations depend on but the content of device memory. */
struct shape {
    struct dskv_plan_sizes capacity; /* says where the plan's sections lie */
    int32_t n_copies, rows, n_work;
    int32_t max_keys; /* of the row that sees most */
    int32_t is_last;  /* there is no second chunk */
    struct dskv_select_chunk chunk;
};

/* What a pass runs on: its shape, and the plan's sections in device memory. */
struct pass {
    struct shape shape;
    size_t plan_bytes;
    const struct dskv_block_copy *copies;
    struct dskv_pass layers;
    struct dskv_select_rows rows;
};

size_t dskv_passes_slot_bytes(const struct dskv_model *model, const struct dskv_device *device,
                              enum dskv_dtype activation_dtype, int32_t n_ranks, int32_t max_tokens)
{
    size_t sums = (size_t)max_tokens * (size_t)model->width * dskv_dtype_bytes(activation_dtype);
    size_t rows = dskv_select_slot_bytes(model, device, n_ranks, max_tokens);
    return sums > rows ? sums : rows;
}

/* ---- open and close ----------------------------------------------------------------------------- */

static size_t largest_plan_bytes(const struct dskv_passes *s)
{
    struct dskv_plan_sizes largest = dskv_plan_largest(&s->parts.bounds);
    return dskv_plan_bytes(&largest);
}

/* Where plans come in: host memory from which they are sent while the host goes on. */
static enum dskv_exit open_queue(struct dskv_passes *s, struct dskv_error *error)
{
    struct dskv_device *device = s->parts.device;
    size_t bytes = largest_plan_bytes(s);
    s->plans.turn = dskv_device_alloc(device, sizeof *s->plans.turn);
    int has_all = s->plans.turn != NULL;
    if (has_all && !dskv_device_is_host(device)) {
        has_all = (s->device_plan = dskv_device_alloc(device, bytes)) != NULL;
        for (int i = 0; has_all && i < 2; i++)
            has_all = (s->plans.places[i] = dskv_device_host_alloc(device, bytes)) != NULL;
        if (dskv_comm_is_queued(s->parts.comm))
            s->recorded = dskv_recorded_open(device);
    }
    return has_all ? DSKV_EXIT_OK
                   : dskv_fail_exit(error, DSKV_EXIT_MEMORY,
                                    "no memory for %zu bytes of plans: lower --max-batch-tokens", 3 * bytes);
}

enum dskv_exit dskv_passes_open(const struct dskv_forward_parts *parts, struct dskv_passes **passes,
                                struct dskv_error *error)
{
    struct dskv_passes *s = dskv_calloc(1, sizeof *s);
    s->parts = *parts;
    enum dskv_exit code = dskv_forward_open(parts, &s->forward, error);
    if (!code)
        code = open_queue(s, error);
    if (!code)
        code = dskv_select_open(parts, s->plans.turn, &s->select, error);
    if (code) {
        dskv_passes_close(&s);
        return code;
    }
    *passes = s;
    return DSKV_EXIT_OK;
}

void dskv_passes_close(struct dskv_passes **passes)
{
    struct dskv_passes *s = *passes;
    if (!s)
        return;
    struct dskv_device *device = s->parts.device;
    dskv_recorded_close(&s->recorded);
    dskv_select_close(&s->select);
    for (int i = 0; i < 2; i++)
        dskv_device_host_free(device, s->plans.places[i], largest_plan_bytes(s));
    if (s->device_plan)
        dskv_device_free(device, s->device_plan, largest_plan_bytes(s));
    if (s->plans.turn)
        dskv_device_free(device, s->plans.turn, sizeof *s->plans.turn);
    dskv_forward_close(&s->forward);
    free(s);
    *passes = NULL;
}

/* ---- the pass ----------------------------------------------------------------------------------- */

/* A step but for its further chunks: the plan comes in, blocks are copied, the transformer runs over the rows, the
 * first chunk of what is wanted of them is computed and reported. */
static enum dskv_exit run_pass(const struct dskv_passes *s, const struct pass *pass, struct dskv_error *error)
{
    const struct shape *shape = &pass->shape;
    struct dskv_receive receive = {s->plans, s->device_plan, pass->plan_bytes};
    struct dskv_kv_copy copy = {s->parts.kv, pass->copies, shape->n_copies};
    enum dskv_exit code = DSKV_EXIT_OK;
    if (s->device_plan)
        dskv_op_receive(s->parts.device, &receive);
    dskv_op_kv_copy(s->parts.device, &copy);
    if (shape->rows)
        code = dskv_forward_run(s->forward, &pass->layers, error);
    if (!code && shape->chunk.n_rows)
        code = dskv_select_compute(s->select, &shape->chunk, &pass->rows, dskv_forward_result(s->forward, shape->rows),
                                   error);
    if (!code)
        dskv_select_report(s->select, &shape->chunk, shape->is_last);
    return code;
}

/* ---- steps -------------------------------------------------------------------------------------- */

static int32_t count_max_keys(const struct dskv_plan *plan)
{
    const struct dskv_attention_work *work = dskv_plan_work(plan);
    int32_t most = 0;
    for (int32_t i = 0; i < plan->used.n_work; i++)
        if (work[i].start + work[i].n_tokens > most)
            most = work[i].start + work[i].n_tokens;
    return most;
}

/* What the step uses; rounded up where passes are recorded, within the plan's bucket and the buffers. */
static struct shape shape_of(const struct dskv_passes *s, const struct dskv_plan *plan)
{
    struct shape shape;
    memset(&shape, 0, sizeof shape); /* a key is compared as bytes */
    shape.capacity = plan->capacity;
    shape.n_copies = plan->used.n_copies;
    shape.rows = plan->used.n_tokens;
    shape.n_work = plan->used.n_work;
    shape.max_keys = count_max_keys(plan);
    shape.chunk = dskv_select_chunk_at(s->select, plan, 0);
    shape.is_last = plan->used.n_rows <= dskv_select_chunk_rows(s->select);
    if (!s->recorded)
        return shape;
    int32_t rows = dskv_recorded_size(shape.rows), keys = DSKV_KEY_PIECE;
    while (keys < shape.max_keys)
        keys *= 2;
    shape.rows = rows <= s->parts.bounds.max_tokens ? rows : shape.rows;
    shape.max_keys = keys;
    return shape;
}

/* The plan where the device will read it: in place, or where the step begins with receiving it. */
static const struct dskv_plan *place_plan(const struct dskv_passes *s, const struct dskv_plan *plan)
{
    if (!s->device_plan)
        return plan;
    memcpy(s->plans.places[s->n_submitted % 2], plan, plan->bytes);
    return s->device_plan;
}

/* The head of the plan is read on the host, its sections lie at the same offsets on the device. */
static const void *section_at(const struct dskv_plan *device_plan, const struct dskv_plan *plan,
                              enum dskv_plan_section section)
{
    return (const char *)device_plan + plan->offset[section];
}

/* Queues the pass: again as it was recorded, or recording it, or operation by operation. */
static enum dskv_exit queue_pass(struct dskv_passes *s, const struct pass *pass, struct dskv_error *error)
{
    _Static_assert(sizeof pass->shape == DSKV_RECORDED_KEY_BYTES, "a shape is the key of a recording");
    const struct dskv_recording *known = NULL;
    int is_due = 0;
    if (s->recorded && pass->shape.rows <= MAX_RECORDED_ROWS)
        known = dskv_recorded_find(s->recorded, &pass->shape, &is_due);
    if (!known && is_due && dskv_device_record_begin(s->parts.device)) {
        enum dskv_exit code = run_pass(s, pass, error);
        struct dskv_recording *recording = dskv_device_record_end(s->parts.device);
        if (code)
            return code;
        if (!recording && dskv_device_sync(s->parts.device, error))
            return DSKV_EXIT_DEVICE;
        if (!recording)
            return dskv_fail_exit(error, DSKV_EXIT_BUG,
                                  "a step's pass was not recorded, and the device knows no reason");
        dskv_recorded_keep(s->recorded, recording);
        known = recording;
    }
    if (!known)
        return run_pass(s, pass, error);
    dskv_device_replay(s->parts.device, known);
    return DSKV_EXIT_OK;
}

/* What is wanted of rows beyond the first chunk, and rows that are wanted whole. */
static enum dskv_exit queue_further(const struct dskv_passes *s, const struct dskv_plan *plan, const struct pass *pass,
                                    struct dskv_error *error)
{
    struct dskv_tensor h = dskv_forward_result(s->forward, pass->shape.rows);
    int32_t chunk_rows = dskv_select_chunk_rows(s->select);
    dskv_select_fetch(s->select, plan, &pass->shape.chunk);
    for (int32_t first = chunk_rows; first < plan->used.n_rows; first += chunk_rows) {
        struct dskv_select_chunk chunk = dskv_select_chunk_at(s->select, plan, first);
        enum dskv_exit code = dskv_select_compute(s->select, &chunk, &pass->rows, h, error);
        if (code)
            return code;
        dskv_select_report(s->select, &chunk, first + chunk_rows >= plan->used.n_rows);
        dskv_select_fetch(s->select, plan, &chunk);
    }
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_passes_submit(struct dskv_passes *s, const struct dskv_plan *plan, struct dskv_error *error)
{
    DSKV_ASSERT(s->n_submitted - s->n_collected < DSKV_STEPS_UNDER_WAY, "%u steps are under way",
                s->n_submitted - s->n_collected);
    const struct dskv_plan *device_plan = place_plan(s, plan);
    const struct shape shape = shape_of(s, plan);
    const struct pass pass = {.shape = shape,
                              .plan_bytes = plan->bytes,
                              .copies = section_at(device_plan, plan, DSKV_PLAN_COPIES),
                              .layers = {.rows = shape.rows,
                                         .ids = section_at(device_plan, plan, DSKV_PLAN_IDS),
                                         .positions = section_at(device_plan, plan, DSKV_PLAN_POSITIONS),
                                         .slots = section_at(device_plan, plan, DSKV_PLAN_SLOTS),
                                         .drawn = dskv_select_drawn(s->select),
                                         .work = section_at(device_plan, plan, DSKV_PLAN_WORK),
                                         .n_work = shape.n_work,
                                         .max_keys = shape.max_keys,
                                         .tables = section_at(device_plan, plan, DSKV_PLAN_TABLES)},
                              .rows = {.tokens = section_at(device_plan, plan, DSKV_PLAN_ROW_TOKENS),
                                       .targets = section_at(device_plan, plan, DSKV_PLAN_ROW_TARGETS),
                                       .sampling = section_at(device_plan, plan, DSKV_PLAN_SAMPLING)}};
    enum dskv_exit code = queue_pass(s, &pass, error);
    if (!code)
        code = queue_further(s, plan, &pass, error);
    s->steps[s->n_submitted++ % 2] = (struct under_way){plan, dskv_device_mark(s->parts.device)};
    return code;
}

int dskv_passes_reached(struct dskv_passes *s)
{
    return dskv_device_reached(s->parts.device, s->steps[s->n_collected % 2].end);
}

enum dskv_exit dskv_passes_collect(struct dskv_passes *s, const struct dskv_row_result **results,
                                   struct dskv_error *error)
{
    DSKV_ASSERT(s->n_submitted != s->n_collected, "no step is under way");
    int place = s->n_collected++ % 2;
    if (dskv_device_wait(s->parts.device, s->steps[place].end, error))
        return DSKV_EXIT_DEVICE;
    *results = dskv_select_results(s->select, s->steps[place].plan, place);
    return DSKV_EXIT_OK;
}

struct dskv_turn_times dskv_passes_times(const struct dskv_passes *s)
{
    DSKV_ASSERT(s->n_collected > 0, "no step was collected");
    return dskv_select_times(s->select, (s->n_collected - 1) % 2);
}
