/* Plan: as text for people, and as a trace file that can be replayed.  A trace is plans, one after the other, as they
 * are. */
#include "parallel/plan.h"

#include "parallel/plan_layout.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PLAN_BYTES (1u << 30)

static void print_work(const struct dskv_plan *plan, int32_t w, FILE *out)
{
    const struct dskv_attention_work *work = &dskv_plan_work(plan)[w];
    const int32_t *table = dskv_plan_tables(plan) + work->first_block;
    fprintf(out, "  work %d: tokens %d..%d at position %d, blocks", (int)w, (int)work->first,
            (int)(work->first + work->n_tokens - 1), (int)work->start);
    for (int32_t b = 0; b < work->n_blocks; b++)
        fprintf(out, " %d", (int)table[b]);
    fputc('\n', out);
    for (int32_t i = work->first; i < work->first + work->n_tokens; i++) {
        int32_t id = dskv_plan_ids(plan)[i], row = dskv_plan_reference_row(id);
        fprintf(out, "    token %d: ", (int)i);
        if (row >= 0)
            fprintf(out, "what row %d of the step before draws", (int)row);
        else
            fprintf(out, "id %d", (int)id);
        fprintf(out, " position %d slot %d\n", (int)dskv_plan_positions(plan)[i], (int)dskv_plan_slots(plan)[i]);
    }
}

static void print_row(const struct dskv_plan *plan, int32_t r, FILE *out)
{
    const struct dskv_plan_row *row = &dskv_plan_rows(plan)[r];
    fprintf(out, "  row %d: token %d:%s%s", (int)r, (int)row->token, row->want & DSKV_ROW_LOGITS ? " logits" : "",
            row->want & DSKV_ROW_ARGMAX ? " argmax" : "");
    if (row->want & DSKV_ROW_TOPK)
        fprintf(out, " topk %d", (int)row->topk);
    if (row->want & DSKV_ROW_SCORE)
        fprintf(out, " score of %d", (int)row->target);
    if (row->want & DSKV_ROW_SAMPLE) {
        const struct dskv_sampling *s = &dskv_plan_sampling(plan)[r];
        fprintf(out, " sample temperature %g top_k %d top_p %g min_p %g seed %llu position %d", s->temperature,
                (int)s->top_k, s->top_p, s->min_p, (unsigned long long)s->seed, (int)s->position);
    }
    fputc('\n', out);
}

void dskv_plan_print(const struct dskv_plan *plan, FILE *out)
{
    const struct dskv_plan_sizes *used = &plan->used, *capacity = &plan->capacity;
    fprintf(out,
            "plan of step %llu: %llu bytes, hash %016llx, tokens %d/%d, work %d/%d, table %d/%d, copies %d/%d, rows "
            "%d/%d\n",
            (unsigned long long)plan->step, (unsigned long long)plan->bytes, (unsigned long long)dskv_plan_hash(plan),
            (int)used->n_tokens, (int)capacity->n_tokens, (int)used->n_work, (int)capacity->n_work, (int)used->n_table,
            (int)capacity->n_table, (int)used->n_copies, (int)capacity->n_copies, (int)used->n_rows,
            (int)capacity->n_rows);
    for (int32_t c = 0; c < used->n_copies; c++)
        fprintf(out, "  copy %d tokens of block %d to block %d\n", (int)dskv_plan_copies(plan)[c].n_tokens,
                (int)dskv_plan_copies(plan)[c].src, (int)dskv_plan_copies(plan)[c].dst);
    for (int32_t w = 0; w < used->n_work; w++)
        print_work(plan, w, out);
    for (int32_t r = 0; r < used->n_rows; r++)
        print_row(plan, r, out);
}

enum dskv_code dskv_plan_record(const struct dskv_plan *plan, FILE *out, struct dskv_error *error)
{
    if (fwrite(plan, plan->bytes, 1, out) != 1 || fflush(out) != 0)
        return dskv_fail(error, DSKV_INTERNAL, "cannot write a plan to the trace: %s", strerror(errno));
    return DSKV_OK;
}

/* The trace gave less than was wanted. */
static enum dskv_code fail_short(FILE *in, const char *inside, unsigned long long n, struct dskv_error *error)
{
    if (ferror(in))
        return dskv_fail(error, DSKV_BAD_VALUE, "the trace cannot be read: %s", strerror(errno));
    return dskv_fail(error, DSKV_BAD_VALUE, "the trace ends inside %s %llu bytes", inside, n);
}

enum dskv_code dskv_plan_read(FILE *in, struct dskv_plan **plan, struct dskv_error *error)
{
    struct dskv_plan head;
    size_t n = fread(&head, 1, sizeof head, in);
    *plan = NULL;
    if (n == 0 && feof(in))
        return DSKV_OK;
    if (n != sizeof head)
        return fail_short(in, "a plan's head, after", n, error);
    if (head.magic != DSKV_PLAN_MAGIC || head.version != DSKV_PLAN_VERSION)
        return dskv_fail(error, DSKV_BAD_VALUE, "the trace has no plan of version %d here", DSKV_PLAN_VERSION);
    if (head.bytes < sizeof head || head.bytes > MAX_PLAN_BYTES || head.bytes % DSKV_PLAN_ALIGNMENT != 0)
        return dskv_fail(error, DSKV_BAD_VALUE, "the trace has a plan of %llu bytes", (unsigned long long)head.bytes);
    struct dskv_plan *whole = aligned_alloc(DSKV_PLAN_ALIGNMENT, head.bytes);
    if (!whole)
        return dskv_fail(error, DSKV_INTERNAL, "no memory for a plan of %llu bytes", (unsigned long long)head.bytes);
    *whole = head;
    if (fread(whole + 1, head.bytes - sizeof head, 1, in) != 1) {
        free(whole);
        return fail_short(in, "a plan of", head.bytes, error);
    }
    *plan = whole;
    return DSKV_OK;
}
