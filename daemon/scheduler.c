#include "daemon/scheduler.h"

void dskv_scheduler_open(struct dskv_scheduler *scheduler, const struct dskv_step_limits *limits)
{
    DSKV_ASSERT(limits->max_tokens > 0 && limits->max_sequences > 0 && limits->max_logit_rows > 0,
                "%d tokens, %d sequences, %d rows", limits->max_tokens, limits->max_sequences, limits->max_logit_rows);
    *scheduler = (struct dskv_scheduler){.limits = *limits};
    scheduler->ring.previous = scheduler->ring.next = &scheduler->ring;
}

void dskv_scheduler_add(struct dskv_scheduler *scheduler, struct dskv_group *group)
{
    group->previous = scheduler->ring.previous;
    group->next = &scheduler->ring;
    group->previous->next = group->next->previous = group;
}

void dskv_scheduler_remove(struct dskv_group *group)
{
    if (!group->next)
        return;
    group->previous->next = group->next;
    group->next->previous = group->previous;
    group->previous = group->next = NULL;
}

/* What a step may still take. */
struct budget {
    int32_t tokens, sequences, logit_rows;
};

/* The longest run of a sequence that the budget allows; takes its rows from the budget. */
static int32_t take_run(const struct dskv_sequence *sequence, struct budget *budget)
{
    int32_t most = dskv_sequence_waiting(sequence), n = 0;
    if (most > budget->tokens)
        most = budget->tokens;
    for (; n < most; n++) {
        struct dskv_plan_row row;
        struct dskv_sampling sampling;
        dskv_sequence_row(sequence, sequence->next + n, &row, &sampling);
        if (!(row.want & DSKV_ROW_LOGITS))
            continue;
        if (!budget->logit_rows)
            break;
        budget->logit_rows--;
    }
    budget->tokens -= n;
    budget->sequences -= n > 0;
    return n;
}

static int is_short(const struct dskv_sequence *sequence)
{
    return dskv_sequence_waiting(sequence) <= DSKV_SHORT_RUN;
}

/* Gives runs to all short, or all long sequences, in the ring's order. */
static int32_t pick_kind(struct dskv_scheduler *scheduler, int short_ones, struct budget *budget,
                         struct dskv_pick *picks)
{
    int32_t n = 0;
    for (struct dskv_group *group = scheduler->ring.next; group != &scheduler->ring; group = group->next)
        for (int32_t i = 0; i < group->n_sequences; i++) {
            struct dskv_sequence *sequence = group->sequences[i];
            if (!sequence || !dskv_sequence_waiting(sequence) || is_short(sequence) != short_ones)
                continue;
            if (!budget->tokens || !budget->sequences)
                return n;
            int32_t n_tokens = take_run(sequence, budget);
            if (!n_tokens)
                continue;
            picks[n++] = (struct dskv_pick){sequence, n_tokens};
            group->served = 1;
        }
    return n;
}

static int any_long(const struct dskv_scheduler *scheduler)
{
    for (const struct dskv_group *group = scheduler->ring.next; group != &scheduler->ring; group = group->next)
        for (int32_t i = 0; i < group->n_sequences; i++)
            if (group->sequences[i] && dskv_sequence_waiting(group->sequences[i]) && !is_short(group->sequences[i]))
                return 1;
    return 0;
}

/* Groups that were served go to the end, in their order. */
static void rotate(struct dskv_scheduler *scheduler)
{
    struct dskv_group *last = scheduler->ring.previous;
    for (struct dskv_group *group = scheduler->ring.next, *next; group != &scheduler->ring; group = next) {
        next = group == last ? &scheduler->ring : group->next;
        if (!group->served)
            continue;
        group->served = 0;
        dskv_scheduler_remove(group);
        dskv_scheduler_add(scheduler, group);
    }
}

int32_t dskv_scheduler_pick(struct dskv_scheduler *scheduler, struct dskv_pick *picks)
{
    struct budget budget = {scheduler->limits.max_tokens, scheduler->limits.max_sequences,
                            scheduler->limits.max_logit_rows};
    int long_waits = any_long(scheduler);
    int32_t n = 0, n_long = 0;
    if (long_waits && scheduler->long_waited)
        n = n_long = pick_kind(scheduler, 0, &budget, picks);
    struct budget kept = {0, 0, 0}; /* from short runs, for long ones */
    if (long_waits && !n_long)
        kept = (struct budget){budget.tokens / 4, budget.sequences > 1, budget.logit_rows / 4};
    budget.tokens -= kept.tokens;
    budget.sequences -= kept.sequences;
    budget.logit_rows -= kept.logit_rows;
    n += pick_kind(scheduler, 1, &budget, picks + n);
    budget.tokens += kept.tokens;
    budget.sequences += kept.sequences;
    budget.logit_rows += kept.logit_rows;
    if (long_waits && !n_long) {
        n_long = pick_kind(scheduler, 0, &budget, picks + n);
        n += n_long;
    }
    scheduler->long_waited = long_waits && !n_long;
    rotate(scheduler);
    return n;
}

int64_t dskv_scheduler_active(const struct dskv_scheduler *scheduler)
{
    int64_t n = 0;
    for (const struct dskv_group *group = scheduler->ring.next; group != &scheduler->ring; group = group->next)
        for (int32_t i = 0; i < group->n_sequences; i++)
            n += group->sequences[i] && group->sequences[i]->completed < group->sequences[i]->n_input;
    return n;
}
