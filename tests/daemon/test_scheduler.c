#include "base/memory.h"
#include "daemon/scheduler.h"
#include "support/cunit_suite.h"

#include <stdlib.h>

#define MAX_GROUPS 40

/* Requests of one sequence each, but where a test says otherwise. */
struct fixture {
    struct dskv_blocks *blocks;
    struct dskv_scheduler scheduler;
    struct dskv_group groups[MAX_GROUPS];
    int n_groups;
    struct dskv_pick picks[64];
    int32_t n_picks;
};

static void begin(struct fixture *f, int32_t max_tokens, int32_t max_sequences, int32_t max_logit_rows)
{
    *f = (struct fixture){.blocks = dskv_blocks_open(1, 16)};
    dskv_scheduler_open(&f->scheduler, &(struct dskv_step_limits){max_tokens, max_sequences, max_logit_rows});
}

static struct dskv_sequence *add(struct fixture *f, int32_t n_sequences, int32_t n_tokens)
{
    static const int32_t tokens[4096];
    struct dskv_group *group = &f->groups[f->n_groups++];
    group->sequences = dskv_calloc((size_t)n_sequences, sizeof(struct dskv_sequence *));
    group->n_sequences = n_sequences;
    for (int32_t i = 0; i < n_sequences; i++) {
        group->sequences[i] = dskv_sequence_open(f->blocks, NULL, 0, tokens, n_tokens, n_tokens, 0);
        group->sequences[i]->index = f->n_groups - 1;
    }
    dskv_scheduler_add(&f->scheduler, group);
    return group->sequences[0];
}

static void finish(struct fixture *f)
{
    for (int i = 0; i < f->n_groups; i++) {
        for (int32_t j = 0; j < f->groups[i].n_sequences; j++)
            dskv_sequence_close(&f->groups[i].sequences[j]);
        free(f->groups[i].sequences);
    }
    dskv_blocks_close(&f->blocks);
}

/* One step; returns its tokens. */
static int32_t step(struct fixture *f)
{
    int32_t n = 0;
    f->n_picks = dskv_scheduler_pick(&f->scheduler, f->picks);
    for (int32_t i = 0; i < f->n_picks; i++) {
        n += f->picks[i].n_tokens;
        dskv_sequence_advance(f->picks[i].sequence, f->picks[i].n_tokens);
        dskv_sequence_complete(f->picks[i].sequence, f->picks[i].n_tokens);
    }
    return n;
}

static int32_t given(const struct fixture *f, const struct dskv_sequence *sequence)
{
    int32_t n = 0;
    for (int32_t i = 0; i < f->n_picks; i++)
        n += f->picks[i].sequence == sequence ? f->picks[i].n_tokens : 0;
    return n;
}

static void short_runs_come_first_and_long_ones_fill_the_step(void)
{
    struct fixture f;
    begin(&f, 64, 8, 64);
    struct dskv_sequence *prompt = add(&f, 1, 200), *decodes = add(&f, 1, 1), *verifies = add(&f, 1, 9);
    CU_ASSERT_EQUAL(dskv_scheduler_active(&f.scheduler), 3);
    CU_ASSERT_EQUAL(step(&f), 64);
    CU_ASSERT_EQUAL(given(&f, decodes), 1);
    CU_ASSERT_EQUAL(given(&f, verifies), 9);
    CU_ASSERT_EQUAL(given(&f, prompt), 54);
    CU_ASSERT_PTR_EQUAL(f.picks[2].sequence, prompt);
    CU_ASSERT_EQUAL(step(&f), 64);
    CU_ASSERT_EQUAL(step(&f), 64);
    CU_ASSERT_EQUAL(step(&f), 18);
    CU_ASSERT_EQUAL(step(&f), 0);
    CU_ASSERT_EQUAL(dskv_scheduler_active(&f.scheduler), 0);
    finish(&f);
}

static void a_request_of_many_sequences_does_not_crowd_out_one(void)
{
    struct fixture f;
    begin(&f, 32, 8, 64);
    add(&f, 100, 4);
    struct dskv_sequence *late = add(&f, 1, 4);
    CU_ASSERT_EQUAL(step(&f), 32);
    CU_ASSERT_EQUAL(given(&f, late), 0);
    CU_ASSERT_EQUAL(step(&f), 32);
    CU_ASSERT_EQUAL(given(&f, late), 4);
    finish(&f);
}

static void long_prompts_take_turns(void)
{
    struct fixture f;
    begin(&f, 32, 8, 64);
    struct dskv_sequence *prompts[3] = {add(&f, 1, 1000), add(&f, 1, 1000), add(&f, 1, 1000)};
    for (int i = 0; i < 9; i++) {
        CU_ASSERT_EQUAL(step(&f), 32);
        CU_ASSERT_EQUAL(given(&f, prompts[i % 3]), 32);
    }
    finish(&f);
}

/* Decoding sequences that never run dry, more than a step takes, beside a prompt. */
static void nobody_starves(const int32_t limits[3], int32_t n_decodes, int32_t most_steps)
{
    struct fixture f;
    begin(&f, limits[0], limits[1], limits[2]);
    struct dskv_sequence *decodes[MAX_GROUPS], *prompt;
    int last_run[MAX_GROUPS] = {0}, worst = 0, n_steps = 0;
    for (int32_t i = 0; i < n_decodes; i++) {
        decodes[i] = add(&f, 1, 1);
        decodes[i]->wants.logits_to = INT32_MAX;
    }
    prompt = add(&f, 1, 100);
    prompt->wants.logits_to = INT32_MAX;
    while (dskv_sequence_waiting(prompt) > DSKV_SHORT_RUN && n_steps <= most_steps) {
        n_steps++;
        CU_ASSERT(step(&f) > 0);
        CU_ASSERT(f.n_picks <= limits[1]);
        for (int32_t i = 0; i < n_decodes; i++) {
            if (given(&f, decodes[i])) {
                last_run[i] = n_steps;
                dskv_sequence_push(decodes[i], 0);
            }
            worst = n_steps - last_run[i] > worst ? n_steps - last_run[i] : worst;
        }
    }
    CU_ASSERT(n_steps <= most_steps);
    CU_ASSERT(worst <= 2 * n_decodes + 2);
    finish(&f);
}

static void nobody_starves_at_any_limit(void)
{
    nobody_starves((const int32_t[3]){64, 8, 64}, 30, 20);
    nobody_starves((const int32_t[3]){64, 1, 64}, 5, 8);   /* one run a step: turns */
    nobody_starves((const int32_t[3]){1, 1, 1}, 3, 200);   /* one token a step */
    nobody_starves((const int32_t[3]){64, 64, 1}, 5, 200); /* one row of logits a step */
    nobody_starves((const int32_t[3]){64, 64, 4}, 30, 200);
}

static void rows_of_logits_are_bounded(void)
{
    struct fixture f;
    begin(&f, 64, 8, 10);
    struct dskv_sequence *all = add(&f, 1, 50), *last = add(&f, 1, 40);
    all->wants.logits_to = 50;
    last->wants.logits_from = 39;
    last->wants.logits_to = 40;
    CU_ASSERT_EQUAL(step(&f), 10 + 39); /* the row that `last` wants has to wait */
    CU_ASSERT_EQUAL(given(&f, all), 10);
    CU_ASSERT_EQUAL(given(&f, last), 39);
    int n_steps = 1;
    for (int32_t n; (n = step(&f)) != 0; n_steps++)
        CU_ASSERT(n <= 10);
    CU_ASSERT_EQUAL(n_steps, 6);
    finish(&f);
}

static void what_is_taken_out_runs_no_more(void)
{
    struct fixture f;
    begin(&f, 64, 8, 10);
    struct dskv_sequence *a = add(&f, 1, 4), *b = add(&f, 1, 4);
    dskv_scheduler_remove(&f.groups[0]);
    dskv_scheduler_remove(&f.groups[0]);
    CU_ASSERT_EQUAL(step(&f), 4);
    CU_ASSERT_EQUAL(given(&f, a), 0);
    CU_ASSERT_EQUAL(given(&f, b), 4);
    finish(&f);
}

int main(void)
{
    return dskv_run_tests(
        "daemon.scheduler",
        (struct dskv_test[]){
            {"short runs come first and long ones fill the step", short_runs_come_first_and_long_ones_fill_the_step},
            {"a request of many sequences does not crowd out one", a_request_of_many_sequences_does_not_crowd_out_one},
            {"long prompts take turns", long_prompts_take_turns},
            {"nobody starves at any limit", nobody_starves_at_any_limit},
            {"rows of logits are bounded", rows_of_logits_are_bounded},
            {"what is taken out runs no more", what_is_taken_out_runs_no_more},
            {NULL, NULL},
        });
}
