/* Steps: how a step is submitted and collected, on rank 0 and inside a rank.
 *
 * Two may be under way, so that the device finds the next one queued when one ends.  Each rank runs them in the order
 * of their submits.  A token that the first draws is named in the second by the row that draws it: rank 0 submits the
 * second before it knows the token.
 */
#include "parallel/engine_parts.h"
#include "parallel/plan_layout.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

uint32_t dskv_engine_under_way(const struct dskv_engine *engine)
{
    return engine->n_submitted - engine->n_collected;
}

/* ---- inside a rank ----------------------------------------------------------------------------- */

static struct dskv_step_under_way *oldest_step(struct dskv_engine *engine)
{
    return &engine->steps_under_way[engine->n_collected % DSKV_STEPS_UNDER_WAY];
}

void dskv_rank_submit(struct dskv_engine *engine, const struct dskv_plan *plan)
{
    DSKV_ASSERT(dskv_engine_under_way(engine) < DSKV_STEPS_UNDER_WAY, "%u steps are under way",
                dskv_engine_under_way(engine));
    struct dskv_step_under_way *step = &engine->steps_under_way[engine->n_submitted++ % DSKV_STEPS_UNDER_WAY];
    step->plan = plan;
    step->code = dskv_passes_submit(engine->passes, plan, &step->error);
}

int dskv_rank_has_ended(const struct dskv_engine *engine)
{
    return engine->steps_under_way[engine->n_collected % DSKV_STEPS_UNDER_WAY].code ||
           dskv_passes_reached(engine->passes);
}

static void hash_step(const struct dskv_plan *plan, const struct dskv_row_result *results, struct dskv_answer *answer)
{
    struct dskv_step_hashes hashes = {.plan = dskv_plan_hash(plan)};
    for (int32_t r = 0; r < plan->used.n_rows; r++) {
        const int32_t drawn[] = {results[r].argmax, results[r].sampled};
        hashes.drawn = XXH3_64bits_withSeed(drawn, sizeof drawn, hashes.drawn);
    }
    memcpy(answer->data, &hashes, sizeof hashes);
}

enum dskv_exit dskv_rank_collect(struct dskv_engine *engine, struct dskv_answer *answer,
                                 const struct dskv_row_result **results, struct dskv_error *error)
{
    struct dskv_step_under_way *step = oldest_step(engine);
    enum dskv_exit code = step->code;
    engine->n_collected++;
    if (code)
        *error = step->error;
    else
        code = dskv_passes_collect(engine->passes, results, error);
    if (code)
        return code;
    engine->steps++;
    engine->rows_computed += (uint64_t)step->plan->used.n_tokens;
    if (engine->check_plans)
        hash_step(step->plan, *results, answer);
    return DSKV_EXIT_OK;
}

/* ---- rank 0: plans ----------------------------------------------------------------------------- */

struct dskv_plan *dskv_engine_plan(struct dskv_engine *engine, const struct dskv_plan_sizes *need)
{
    DSKV_ASSERT(dskv_engine_under_way(engine) < DSKV_STEPS_UNDER_WAY, "both plans' steps are under way, %u submitted",
                engine->n_submitted);
    char *memory = dskv_engine_payload(engine, engine->next_plan);
    engine->next_plan ^= 1;
    return dskv_plan_begin(memory, engine->plan_bytes, need, ++engine->n_plans);
}

/* The plan where all ranks see it: as it is when dskv_engine_plan gave its memory, else a copy. */
static const struct dskv_plan *shared_plan(struct dskv_engine *engine, const struct dskv_plan *plan)
{
    for (uint32_t which = 0; which < 2; which++)
        if ((const char *)plan == dskv_engine_payload(engine, which))
            return plan;
    struct dskv_plan *copy = dskv_engine_plan(engine, &plan->used);
    dskv_plan_copy(copy, plan);
    return copy;
}

static void check_sizes(const struct dskv_engine *engine, const struct dskv_plan *plan)
{
    const struct dskv_plan_bounds *bounds = &engine->info.bounds;
    DSKV_ASSERT(plan->used.n_tokens <= bounds->max_tokens && plan->used.n_work <= bounds->max_sequences,
                "%d tokens of %d, %d sequences of %d", (int)plan->used.n_tokens, (int)bounds->max_tokens,
                (int)plan->used.n_work, (int)bounds->max_sequences);
    DSKV_ASSERT(plan->used.n_rows <= plan->used.n_tokens, "%d rows of %d tokens", (int)plan->used.n_rows,
                (int)plan->used.n_tokens);
}

/* References name rows of the step before that draw a token. */
static void check_references(const struct dskv_engine *engine, const struct dskv_plan *plan)
{
    const int32_t *ids = dskv_plan_ids(plan);
    for (int32_t i = 0; i < plan->used.n_tokens; i++) {
        int32_t row = dskv_plan_reference_row(ids[i]);
        if (row < 0)
            continue;
        DSKV_ASSERT(engine->takes_references, "token %d names row %d of the step before: the engine was opened without",
                    (int)i, (int)row);
        DSKV_ASSERT(row < engine->n_drawn_rows && engine->has_drawn[row],
                    "token %d names row %d of the step before, which has %d rows", (int)i, (int)row,
                    (int)engine->n_drawn_rows);
    }
}

static void note_rows(struct dskv_engine *engine, const struct dskv_plan *plan)
{
    engine->wants_logits = 0;
    engine->n_drawn_rows = plan->used.n_rows;
    for (int32_t r = 0; r < plan->used.n_rows; r++) {
        uint32_t want = dskv_plan_rows(plan)[r].want;
        engine->has_drawn[r] = (want & DSKV_ROW_DRAWN) != 0;
        engine->wants_logits |= (want & DSKV_ROW_LOGITS) != 0;
    }
}

/* ---- rank 0: submit and collect ---------------------------------------------------------------- */

enum dskv_exit dskv_engine_submit(struct dskv_engine *engine, const struct dskv_plan *plan, struct dskv_error *error)
{
    uint32_t n_under_way = dskv_engine_under_way(engine);
    DSKV_ASSERT(n_under_way < DSKV_STEPS_UNDER_WAY && !(n_under_way && engine->wants_logits),
                "%u steps are under way, the last %s rows of logits", n_under_way,
                engine->wants_logits ? "wants" : "wants no");
    check_sizes(engine, plan);
    check_references(engine, plan);
    const struct dskv_plan *shared = shared_plan(engine, plan);
    note_rows(engine, shared);
    struct dskv_command command = {.kind = DSKV_COMMAND_STEP,
                                   .offset = (uint64_t)((const char *)shared - dskv_engine_payload(engine, 0)),
                                   .bytes = shared->bytes};
    dskv_stream_post(engine->stream, &command);
    dskv_rank_submit(engine, shared);
    const struct dskv_step_under_way *step = &engine->steps_under_way[(engine->n_submitted - 1) % DSKV_STEPS_UNDER_WAY];
    if (!step->code)
        return DSKV_EXIT_OK;
    *error = step->error;
    return dskv_engine_told_by_own(engine, step->code, error);
}

/* Waits for this rank's device as long as all ranks live and are well: it may itself wait, for ever, for one that is
 * not.
 */
static enum dskv_exit await_step(struct dskv_engine *engine, struct dskv_error *error)
{
    if (engine->info.n_ranks == 1)
        return DSKV_EXIT_OK; /* the collect waits */
    struct dskv_watch watch = dskv_watch_begin(&engine->segment.peers);
    while (!dskv_rank_has_ended(engine)) {
        int32_t failed;
        const struct dskv_answer *failure = dskv_stream_failure(engine->stream, &failed);
        if (failure)
            return dskv_engine_told(failure, failed, error);
        int lost = dskv_watch_pause(&watch);
        if (lost >= 0)
            return dskv_peers_fail_lost(watch.peers, lost, error);
    }
    return DSKV_EXIT_OK;
}

static enum dskv_exit compare_hashes(const struct dskv_engine *engine, const struct dskv_answer *answers,
                                     struct dskv_error *error)
{
    struct dskv_step_hashes first, other;
    memcpy(&first, answers[0].data, sizeof first);
    for (int32_t r = 1; r < engine->info.n_ranks; r++) {
        memcpy(&other, answers[r].data, sizeof other);
        if (other.plan != first.plan || other.drawn != first.drawn)
            return dskv_fail_exit(error, DSKV_EXIT_BUG, "rank %d %s than rank 0", (int)r,
                                  other.plan != first.plan ? "executed another plan" : "drew other tokens");
    }
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_engine_collect(struct dskv_engine *engine, const struct dskv_row_result **results,
                                   int32_t *n_computed, struct dskv_error *error)
{
    DSKV_ASSERT(dskv_engine_under_way(engine), "none of %u steps is under way", engine->n_submitted);
    const struct dskv_answer *answers;
    uint64_t rows_before = engine->rows_computed;
    enum dskv_exit code = await_step(engine, error);
    if (!code)
        code = dskv_engine_told_by_own(
            engine, dskv_rank_collect(engine, dskv_stream_answer(engine->stream), results, error), error);
    if (!code)
        code = dskv_engine_gather(engine, &answers, error);
    if (!code && engine->check_plans)
        code = compare_hashes(engine, answers, error);
    *n_computed = (int32_t)(engine->rows_computed - rows_before);
    return code;
}

struct dskv_turn_times dskv_engine_device_times(const struct dskv_engine *engine)
{
    return dskv_passes_times(engine->passes);
}

enum dskv_exit dskv_engine_step(struct dskv_engine *engine, const struct dskv_plan *plan,
                                const struct dskv_row_result **results, int32_t *n_computed, struct dskv_error *error)
{
    DSKV_ASSERT(!dskv_engine_under_way(engine), "%u steps are under way", dskv_engine_under_way(engine));
    enum dskv_exit code = dskv_engine_submit(engine, plan, error);
    return code ? code : dskv_engine_collect(engine, results, n_computed, error);
}
