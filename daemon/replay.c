/* Replay: reads, checks, rebuilds and executes one recorded plan after the other; hashes what the wanted rows gave.
 * Tokens that a plan names by the rows of the one before are drawn again, and are the same.
 */
#include "daemon/replay.h"

#include "base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* FNV-1a over the values' bytes: it need not be strong, only the same everywhere. */
static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static uint64_t hash_results(const struct dskv_plan *plan, const struct dskv_row_result *results, int32_t vocab)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    const struct dskv_plan_row *rows = dskv_plan_rows(plan);
    for (int32_t i = 0; i < plan->used.n_rows; i++) {
        const struct dskv_row_result *row = &results[i];
        size_t topk = (size_t)rows[i].topk;
        hash = hash_bytes(hash, &row->finite, sizeof row->finite);
        if (rows[i].want & DSKV_ROW_LOGITS)
            hash = hash_bytes(hash, row->logits, (size_t)vocab * sizeof *row->logits);
        if (rows[i].want & DSKV_ROW_ARGMAX)
            hash = hash_bytes(hash, &row->argmax, sizeof row->argmax);
        if (rows[i].want & DSKV_ROW_SAMPLE)
            hash = hash_bytes(hash, &row->sampled, sizeof row->sampled);
        if (rows[i].want & DSKV_ROW_SCORE)
            hash = hash_bytes(hash, &row->score, sizeof row->score);
        if (rows[i].want & DSKV_ROW_TOPK) {
            hash = hash_bytes(hash, row->topk_ids, topk * sizeof *row->topk_ids);
            hash = hash_bytes(hash, row->topk_logprobs, topk * sizeof *row->topk_logprobs);
        }
    }
    return hash;
}

static int32_t count_logit_rows(const struct dskv_plan *plan)
{
    int32_t n = 0;
    for (int32_t i = 0; i < plan->used.n_rows; i++)
        n += (dskv_plan_rows(plan)[i].want & DSKV_ROW_LOGITS) != 0;
    return n;
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* Builds the plan again in the engine's own memory: the recorded bucket may be larger than this engine's.  Every row
 * that is wanted gives its logits too, as far as a step has room, so that the hash tells more than the token that was
 * drawn. */
static struct dskv_plan *rebuild(struct dskv_engine *engine, const struct dskv_plan *recorded)
{
    const struct dskv_plan_sizes *used = &recorded->used;
    struct dskv_plan *plan = dskv_engine_plan(engine, used);
    for (int32_t i = 0; i < used->n_copies; i++) {
        const struct dskv_block_copy *copy = &dskv_plan_copies(recorded)[i];
        dskv_plan_add_copy(plan, copy->src, copy->dst, copy->n_tokens);
    }
    for (int32_t i = 0; i < used->n_work; i++) {
        const struct dskv_attention_work *work = &dskv_plan_work(recorded)[i];
        dskv_plan_add_work(plan, dskv_plan_ids(recorded) + work->first, dskv_plan_slots(recorded) + work->first,
                           work->n_tokens, work->start, dskv_plan_tables(recorded) + work->first_block, work->n_blocks);
    }
    int32_t n_room = dskv_engine_info(engine)->max_logit_rows - count_logit_rows(recorded);
    for (int32_t i = 0; i < used->n_rows; i++) {
        struct dskv_plan_row row = dskv_plan_rows(recorded)[i];
        if (!(row.want & DSKV_ROW_LOGITS) && n_room-- > 0)
            row.want |= DSKV_ROW_LOGITS;
        dskv_plan_add_row(plan, &row, &dskv_plan_sampling(recorded)[i]);
    }
    return plan;
}

static enum dskv_exit run_plan(struct dskv_engine *engine, const struct dskv_plan *recorded, FILE *out,
                               struct dskv_error *error)
{
    const struct dskv_row_result *results;
    int32_t n_computed;
    struct dskv_plan *plan = rebuild(engine, recorded);
    if (dskv_log_enabled(DSKV_LOG_DEBUG))
        dskv_plan_print(plan, out);
    double begin_ms = now_ms();
    enum dskv_exit code = dskv_engine_step(engine, plan, &results, &n_computed, error);
    if (code)
        return code;
    dskv_log(DSKV_LOG_DEBUG, "replay", "step %" PRIu64 " took %.3f ms", recorded->step, now_ms() - begin_ms);
    uint64_t hash = hash_results(plan, results, dskv_engine_info(engine)->model.vocab);
    fprintf(out, "step %" PRIu64 " tokens %d rows %d results %016" PRIx64 "\n", recorded->step, n_computed,
            plan->used.n_rows, hash);
    return DSKV_EXIT_OK;
}

/* What a plan must be to run here, after the one before (null: none): all that it names is there, and its rows of
 * logits find room. */
static enum dskv_code check(const struct dskv_engine *engine, const struct dskv_plan *plan,
                            const struct dskv_plan *before, struct dskv_error *error)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    enum dskv_code code = dskv_plan_validate(plan, plan->bytes, &info->bounds, before, error);
    if (code)
        return code;
    int32_t n_logit_rows = count_logit_rows(plan);
    if (n_logit_rows > info->max_logit_rows)
        return dskv_fail(error, DSKV_BAD_VALUE, "it wants %d rows of logits, one step gives %d", n_logit_rows,
                         info->max_logit_rows);
    return DSKV_OK;
}

enum dskv_exit dskv_replay(struct dskv_engine *engine, const char *path, FILE *out, struct dskv_error *error)
{
    FILE *in = fopen(path, "rb");
    if (!in)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--replay: cannot read %.160s: %s", path, strerror(errno));
    enum dskv_exit code = DSKV_EXIT_OK;
    struct dskv_plan *before = NULL, *plan = NULL;
    for (int n = 1; !code; n++) {
        struct dskv_error reason;
        int is_bad = dskv_plan_read(in, &plan, &reason) != DSKV_OK;
        if (!is_bad && !plan)
            break;
        is_bad = is_bad || check(engine, plan, before, &reason);
        code = is_bad ? dskv_fail_exit(error, DSKV_EXIT_USAGE, "--replay: plan %d: %.200s", n, reason.message)
                      : run_plan(engine, plan, out, error);
        free(before);
        before = plan;
    }
    free(before);
    fclose(in);
    if (fflush(out) != 0 && !code) /* a failure ends the job without flushing */
        code = dskv_fail_exit(error, DSKV_EXIT_USAGE, "--replay: the results cannot be written: %s", strerror(errno));
    return code;
}
