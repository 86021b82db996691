/* The steps that are timed: plans made by hand, as a scheduler would make them, run on the engine of all ranks.
 *
 * Sequence i has its own run of blocks; the context is prefilled once and copied to the others.  A step is repeated at
 * the same place, so that every repetition does the same work.
 */
#include "bench.h"

#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_VERIFY_TOKENS = 32, MAX_BATCH = 1024 };

struct dskv_bench_run {
    struct dskv_engine *engine;
    const struct dskv_engine_info *info;
    int32_t context, prefill, batch;
    int32_t n_blocks_each; /* of a sequence: context and a verify */
    int32_t *ids, *slots, *table;
};

static int32_t blocks_of(const struct dskv_bench_run *run, int32_t n_tokens)
{
    return (n_tokens + run->info->block_tokens - 1) / run->info->block_tokens;
}

/* One run of tokens of the step that is being made. */
struct piece {
    int32_t first_block; /* the sequence's blocks are contiguous from here */
    int32_t start, n_tokens;
    int all_rows; /* else the last row is wanted */
    int is_drawn; /* its token is what the step before drew in its first row */
};

static void add_piece(const struct dskv_bench_run *run, struct dskv_plan *plan, const struct piece *piece)
{
    int32_t block_tokens = run->info->block_tokens, n_blocks = blocks_of(run, piece->start + piece->n_tokens);
    for (int32_t i = 0; i < n_blocks; i++)
        run->table[i] = piece->first_block + i;
    for (int32_t i = 0; i < piece->n_tokens; i++) {
        int32_t position = piece->start + i;
        run->ids[i] = piece->is_drawn
                          ? dskv_plan_reference(0)
                          : (int32_t)(((int64_t)position * 7919 + piece->first_block) % run->info->model.vocab);
        run->slots[i] = run->table[position / block_tokens] * block_tokens + position % block_tokens;
    }
    int32_t first = dskv_plan_add_work(plan, run->ids, run->slots, piece->n_tokens, piece->start, run->table, n_blocks);
    for (int32_t i = piece->all_rows ? 0 : piece->n_tokens - 1; i < piece->n_tokens; i++)
        dskv_plan_add_row(plan, &(struct dskv_plan_row){.token = first + i, .want = DSKV_ROW_ARGMAX, .target = -1},
                          NULL);
}

static struct dskv_plan *make_plan(const struct dskv_bench_run *run, const struct piece *pieces, int32_t n)
{
    struct dskv_plan_sizes need = {.n_work = n};
    for (int32_t i = 0; i < n; i++) {
        need.n_tokens += pieces[i].n_tokens;
        need.n_rows += pieces[i].all_rows ? pieces[i].n_tokens : 1;
        need.n_table += blocks_of(run, pieces[i].start + pieces[i].n_tokens);
    }
    struct dskv_plan *plan = dskv_engine_plan(run->engine, &need);
    for (int32_t i = 0; i < n; i++)
        add_piece(run, plan, &pieces[i]);
    return plan;
}

static enum dskv_exit collect(const struct dskv_bench_run *run, int32_t n_rows, struct dskv_error *error)
{
    const struct dskv_row_result *results;
    int32_t n_computed;
    enum dskv_exit code = dskv_engine_collect(run->engine, &results, &n_computed, error);
    for (int32_t i = 0; !code && i < n_rows; i++)
        if (!results[i].finite)
            code = dskv_fail_exit(error, DSKV_EXIT_MODEL, "the model's logits are not finite");
    return code;
}

/* Makes and runs one step of n pieces. */
static enum dskv_exit step(const struct dskv_bench_run *run, const struct piece *pieces, int32_t n,
                           struct dskv_error *error)
{
    const struct dskv_plan *plan = make_plan(run, pieces, n);
    enum dskv_exit code = dskv_engine_submit(run->engine, plan, error);
    return code ? code : collect(run, plan->used.n_rows, error);
}

/* Fills the context of sequence 0 in steps that fit, and copies its blocks to the others. */
static enum dskv_exit fill(const struct dskv_bench_run *run, struct dskv_error *error)
{
    enum dskv_exit code = DSKV_EXIT_OK;
    int32_t most = run->info->max_batch_tokens;
    for (int32_t start = 0; start < run->context && !code; start += most) {
        int32_t n = run->context - start < most ? run->context - start : most;
        code = step(run, &(struct piece){.start = start, .n_tokens = n}, 1, error);
    }
    if (code)
        return code;
    int32_t n_filled = blocks_of(run, run->context);
    struct dskv_plan_sizes need = {
        .n_tokens = 1, .n_work = 1, .n_table = n_filled, .n_rows = 1, .n_copies = (run->batch - 1) * n_filled};
    struct dskv_plan *plan = dskv_engine_plan(run->engine, &need);
    for (int32_t i = 1; i < run->batch; i++)
        for (int32_t j = 0; j < n_filled; j++)
            dskv_plan_add_copy(plan, j, i * run->n_blocks_each + j, run->info->block_tokens);
    add_piece(run, plan,
              &(struct piece){.start = run->context - 1, .n_tokens = 1}); /* a step has tokens: the last one again */
    const struct dskv_row_result *results;
    int32_t n_computed;
    return dskv_engine_step(run->engine, plan, &results, &n_computed, error);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static enum dskv_exit time_step(const struct dskv_bench_run *run, const struct piece *pieces, int32_t n,
                                int32_t n_iterations, struct dskv_bench_step *measured, struct dskv_error *error)
{
    double *times = dskv_calloc((size_t)n_iterations, sizeof *times);
    enum dskv_exit code = step(run, pieces, n, error); /* warms up */
    for (int32_t i = 0; i < n_iterations && !code; i++) {
        double begin = dskv_bench_seconds();
        code = step(run, pieces, n, error);
        times[i] = dskv_bench_seconds() - begin;
    }
    qsort(times, (size_t)n_iterations, sizeof *times, by_size);
    measured->n_iterations = n_iterations;
    measured->median_s = times[n_iterations / 2];
    measured->best_s = times[0];
    free(times);
    return code;
}

/* The same with every step submitted before the last is collected, as a server does that queues ahead; and for how long
 * the device had nothing to do in between. */
static enum dskv_exit time_chain(const struct dskv_bench_run *run, const struct piece *piece, int32_t n_iterations,
                                 struct dskv_bench_step *measured, struct dskv_error *error)
{
    double *times = dskv_calloc((size_t)n_iterations, sizeof *times), last = 0;
    double *idle = dskv_calloc((size_t)n_iterations, sizeof *idle);
    uint64_t ended_ns = 0;
    struct piece drawn = *piece;
    drawn.is_drawn = 1;
    enum dskv_exit code = step(run, piece, 1, error);
    if (!code)
        code = dskv_engine_submit(run->engine, make_plan(run, &drawn, 1), error);
    for (int32_t i = -1; i < n_iterations && !code; i++) { /* the first one has none before it */
        if (!(code = dskv_engine_submit(run->engine, make_plan(run, &drawn, 1), error)))
            code = collect(run, 1, error);
        double now = dskv_bench_seconds();
        struct dskv_turn_times device = dskv_engine_device_times(run->engine);
        if (i >= 0) {
            times[i] = now - last;
            idle[i] = device.begun_ns ? (double)(device.begun_ns - ended_ns) * 1e-9 : 0;
        }
        last = now;
        ended_ns = device.ended_ns;
    }
    if (!code)
        code = collect(run, 1, error);
    qsort(times, (size_t)n_iterations, sizeof *times, by_size);
    qsort(idle, (size_t)n_iterations, sizeof *idle, by_size);
    measured->n_iterations = n_iterations;
    measured->median_s = times[n_iterations / 2];
    measured->best_s = times[0];
    measured->idle_median_s = idle[n_iterations / 2];
    measured->idle_longest_s = idle[n_iterations - 1];
    free(times);
    free(idle);
    return code;
}

/* What a step must read and multiply at least, and so how long it must take here. */
static void fill_floor(const struct dskv_bench_run *run, const struct dskv_bench_report *report,
                       const struct piece *pieces, int32_t n, struct dskv_bench_step *measured)
{
    const struct dskv_model *model = &run->info->model;
    double heads = model->head_dim * (double)model->n_heads, kv_heads = model->head_dim * (double)model->n_kv_heads;
    double per_layer =
        model->width * (2 * heads + 2 * kv_heads) + (double)model->width * model->mlp * (model->gated ? 3 : 2);
    double kv_token_bytes = (double)run->info->kv_block_bytes / run->info->block_tokens;
    measured->bytes = report->weight_bytes;
    measured->flops = 0;
    for (int32_t i = 0; i < n; i++) {
        double tokens = pieces[i].n_tokens, rows = pieces[i].all_rows ? tokens : 1;
        double keys = tokens * (pieces[i].start + (tokens + 1) / 2); /* that all its tokens look at */
        measured->n_tokens += pieces[i].n_tokens;
        measured->bytes += kv_token_bytes * (pieces[i].start + tokens);
        measured->flops +=
            model->n_layers * (2 * per_layer * tokens + 4 * heads * keys) + 2 * rows * model->width * model->vocab;
    }
    const struct dskv_bench_machine *machine = &report->machine;
    double read_s = machine->read_bytes_s > machine->reread_bytes_s ? machine->read_bytes_s : machine->reread_bytes_s;
    double reading = measured->bytes / read_s, multiplying = measured->flops / machine->matmul_flops_s;
    measured->floor_s = reading > multiplying ? reading : multiplying;
}

/* A kind of step: the pieces that make it, and how many of the iterations it gets: one in `share`. */
struct kind {
    char name[64];
    const struct piece *pieces;
    int32_t n, share;
    int is_chained;
};

static enum dskv_exit time_kind(const struct dskv_bench_run *run, struct dskv_bench_report *report,
                                const struct kind *kind, struct dskv_error *error)
{
    struct dskv_bench_step *measured = &report->steps[report->n_steps++];
    int32_t n_iterations = (report->options->iterations + kind->share - 1) / kind->share;
    memcpy(measured->name, kind->name, sizeof measured->name);
    fill_floor(run, report, kind->pieces, kind->n, measured);
    return kind->is_chained ? time_chain(run, kind->pieces, n_iterations, measured, error)
                            : time_step(run, kind->pieces, kind->n, n_iterations, measured, error);
}

static enum dskv_exit run_steps(const struct dskv_bench_run *run, struct dskv_bench_report *report,
                                struct dskv_error *error)
{
    int32_t n_verifies = report->machine.is_host ? 1 : 3, n = 2;
    struct piece decode[MAX_BATCH], verify[3];
    struct piece prefill = {.first_block = run->batch * run->n_blocks_each, .n_tokens = run->prefill};
    struct kind kinds[DSKV_BENCH_MAX_STEPS] = {{"decode", decode, 1, 1, 0}, {"decode, chained", decode, 1, 1, 1}};
    for (int32_t i = 0; i < run->batch; i++)
        decode[i] = (struct piece){.first_block = i * run->n_blocks_each, .start = run->context, .n_tokens = 1};
    for (int32_t i = 0; i < n_verifies; i++, n++) {
        verify[i] = (struct piece){.start = run->context, .n_tokens = 8 << i, .all_rows = 1};
        kinds[n] = (struct kind){.pieces = &verify[i], .n = 1, .share = 1};
        snprintf(kinds[n].name, sizeof kinds[n].name, "verify %d tokens", verify[i].n_tokens);
    }
    kinds[n] = (struct kind){.pieces = decode, .n = run->batch, .share = 1};
    snprintf(kinds[n++].name, sizeof kinds[0].name, "decode %d sequences", run->batch);
    kinds[n++] = (struct kind){"prefill", &prefill, 1, 4, 0};
    enum dskv_exit code = fill(run, error);
    for (int32_t i = 0; i < n && !code; i++)
        code = time_kind(run, report, &kinds[i], error);
    return code;
}

/* Every step reads all matrices, but of an untied embedding a few rows only. */
static enum dskv_exit count_weights(struct dskv_engine *engine, const struct dskv_engine_info *info, double *bytes,
                                    struct dskv_error *error)
{
    struct dskv_rank_stats *stats = dskv_calloc((size_t)info->n_ranks, sizeof *stats);
    enum dskv_exit code = dskv_engine_stats(engine, stats, error);
    *bytes = 0;
    for (int32_t i = 0; i < info->n_ranks && !code; i++)
        *bytes += (double)stats[i].weight_bytes;
    if (!info->model.tied)
        *bytes -= (double)info->model.vocab * info->model.width * (double)dskv_dtype_bytes(info->weight_dtype);
    free(stats);
    return code;
}

enum dskv_exit dskv_bench_steps_run(struct dskv_engine *engine, struct dskv_bench_report *report,
                                    struct dskv_error *error)
{
    const struct dskv_engine_info *info = dskv_engine_info(engine);
    struct dskv_bench_run run = {.engine = engine,
                                 .info = info,
                                 .context = report->options->context,
                                 .prefill = report->options->prefill,
                                 .batch = report->options->batch};
    if (run.context > info->max_model_len - MAX_VERIFY_TOKENS)
        run.context = info->max_model_len - MAX_VERIFY_TOKENS;
    if (run.prefill > info->max_model_len)
        run.prefill = info->max_model_len;
    run.n_blocks_each = blocks_of(&run, run.context + MAX_VERIFY_TOKENS);
    int32_t n_needed = run.batch * run.n_blocks_each + blocks_of(&run, run.prefill);
    if (run.context < 1 || n_needed > info->n_blocks)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "a context of %d tokens needs %d blocks, there are %d",
                              run.context, n_needed, info->n_blocks);
    enum dskv_exit code = count_weights(engine, info, &report->weight_bytes, error);
    if (code)
        return code;
    report->context = run.context;
    report->prefill = run.prefill;
    size_t n = (size_t)(run.context + run.prefill + MAX_VERIFY_TOKENS);
    run.ids = dskv_calloc(n, sizeof *run.ids);
    run.slots = dskv_calloc(n, sizeof *run.slots);
    run.table = dskv_calloc(n, sizeof *run.table);
    code = run_steps(&run, report, error);
    free(run.ids);
    free(run.slots);
    free(run.table);
    return code;
}
