/* Plans: built, checked, hashed, recorded and read again; and no mutation of one is ever taken for an executable plan
 * that reaches outside the pool. */
#include "parallel/plan.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct dskv_plan_bounds bounds = {
    .vocab = 300, .max_context = 1024, .n_blocks = 40, .block_tokens = 16, .max_tokens = 96, .max_sequences = 8};

/* The slots of positions [start, start + n) in a table. */
static void fill_slots(int32_t *slots, const int32_t *table, int32_t start, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        slots[i] = table[(start + i) / 16] * 16 + (start + i) % 16;
}

/* Three sequences: a prefill, a decode step, a row that is run again without writing; every want. */
static struct dskv_plan *build(uint64_t step)
{
    struct dskv_plan_sizes need = {.n_tokens = 22, .n_work = 3, .n_table = 6, .n_copies = 1, .n_rows = 3};
    size_t bytes = dskv_plan_bytes(&need);
    struct dskv_plan *plan = dskv_plan_begin(aligned_alloc(64, bytes), bytes, &need, step);
    int32_t ids[20], slots[20], first[] = {5, 6}, second[] = {7, 8, 9}, third[] = {7};
    for (int32_t i = 0; i < 20; i++)
        ids[i] = 10 + i;
    fill_slots(slots, first, 3, 20);
    CU_ASSERT_EQUAL(dskv_plan_add_work(plan, ids, slots, 20, 3, first, 2), 0);
    fill_slots(slots, second, 33, 1);
    CU_ASSERT_EQUAL(dskv_plan_add_work(plan, ids, slots, 1, 33, second, 3), 20);
    CU_ASSERT_EQUAL(dskv_plan_add_work(plan, ids, NULL, 1, 15, third, 1), 21);
    dskv_plan_add_copy(plan, 3, 9, 2);
    struct dskv_sampling sampling = {
        .temperature = 0.5f, .top_p = 0.9f, .min_p = 0, .top_k = 5, .seed = 77, .position = 34};
    struct dskv_plan_row rows[] = {{19, DSKV_ROW_LOGITS | DSKV_ROW_TOPK, 4, -1},
                                   {20, DSKV_ROW_SAMPLE | DSKV_ROW_ARGMAX, 0, -1},
                                   {21, DSKV_ROW_SCORE, 0, 299}};
    for (int32_t r = 0; r < 3; r++)
        CU_ASSERT_EQUAL(dskv_plan_add_row(plan, &rows[r], r == 1 ? &sampling : NULL), r);
    return plan;
}

static void a_built_plan_says_what_was_added(void)
{
    struct dskv_plan *plan = build(9);
    CU_ASSERT_EQUAL(plan->used.n_tokens, 22);
    CU_ASSERT_EQUAL(plan->step, 9);
    CU_ASSERT_EQUAL(dskv_plan_ids(plan)[19], 29);
    CU_ASSERT_EQUAL(dskv_plan_positions(plan)[19], 22);
    CU_ASSERT_EQUAL(dskv_plan_slots(plan)[19], 6 * 16 + 6);
    CU_ASSERT_EQUAL(dskv_plan_slots(plan)[20], 9 * 16 + 1);
    CU_ASSERT_EQUAL(dskv_plan_slots(plan)[21], -1);
    CU_ASSERT_EQUAL(dskv_plan_work(plan)[1].first_block, 2);
    CU_ASSERT_EQUAL(dskv_plan_tables(plan)[5], 7);
    CU_ASSERT_EQUAL(dskv_plan_copies(plan)[0].dst, 9);
    CU_ASSERT_EQUAL(dskv_plan_row_tokens(plan)[2], 21);
    CU_ASSERT_EQUAL(dskv_plan_row_targets(plan)[2], 299);
    CU_ASSERT_EQUAL(dskv_plan_sampling(plan)[1].seed, 77);
    struct dskv_error error;
    CU_ASSERT_EQUAL(dskv_plan_validate(plan, plan->bytes, &bounds, NULL, &error), DSKV_OK);
    free(plan);
}

static void offsets_depend_on_the_bucket_alone(void)
{
    struct dskv_plan_sizes small = {9, 1, 9, 0, 1}, large = {16, 8, 16, 8, 8}, next = {17, 8, 16, 8, 8};
    CU_ASSERT_EQUAL(dskv_plan_bytes(&small), dskv_plan_bytes(&large));
    CU_ASSERT(dskv_plan_bytes(&next) > dskv_plan_bytes(&large));
    size_t bytes = dskv_plan_bytes(&large);
    void *memory[2] = {aligned_alloc(64, bytes), aligned_alloc(64, bytes)};
    struct dskv_plan *a = dskv_plan_begin(memory[0], bytes, &small, 1),
                     *b = dskv_plan_begin(memory[1], bytes, &large, 2);
    CU_ASSERT_EQUAL(memcmp(a->offset, b->offset, sizeof a->offset), 0);
    for (int s = 0; s < DSKV_PLAN_N_SECTIONS; s++)
        CU_ASSERT_EQUAL(a->offset[s] % 64, 0);
    free(memory[0]);
    free(memory[1]);
}

static void the_hash_covers_what_is_used(void)
{
    struct dskv_plan *a = build(1), *b = build(1), *c = build(2);
    CU_ASSERT_EQUAL(dskv_plan_hash(a), dskv_plan_hash(b));
    CU_ASSERT_NOT_EQUAL(dskv_plan_hash(a), dskv_plan_hash(c));
    ((int32_t *)dskv_plan_ids(b))[22] = 1; /* past what is used */
    CU_ASSERT_EQUAL(dskv_plan_hash(a), dskv_plan_hash(b));
    ((int32_t *)dskv_plan_ids(b))[21] ^= 1;
    CU_ASSERT_NOT_EQUAL(dskv_plan_hash(a), dskv_plan_hash(b));
    free(a);
    free(b);
    free(c);
}

struct view { /* a plan's sections, writable */
    struct dskv_plan *plan;
    size_t bytes;
    struct dskv_attention_work *work;
    struct dskv_plan_row *rows;
    struct dskv_block_copy *copies;
    struct dskv_sampling *sampling;
    int32_t *ids, *slots, *tables;
};

/* Makes the n-th lie; 0 when there is none. */
static int lie(int n, struct view *v)
{
    switch (n) {
    case 0: v->plan->magic ^= 1; return 1;
    case 1: v->plan->version = 99; return 1;
    case 2: v->plan->bytes += 64; return 1;
    case 3: v->bytes -= 64; return 1;
    case 4: v->bytes = 8; return 1;
    case 5: v->plan->used.n_tokens = 23; return 1;
    case 6: v->plan->used.n_tokens = -1; return 1;
    case 7: v->plan->capacity.n_tokens = 1 << 30; return 1;
    case 8: v->plan->capacity.n_rows = 9; return 1;
    case 9: v->plan->offset[DSKV_PLAN_WORK] += 64; return 1;
    case 10: v->plan->used.n_table = 5; return 1;
    case 11: v->plan->used.n_work = 2; return 1;
    case 12: v->ids[3] = 300; return 1;
    case 13: v->ids[3] = -1; return 1;
    case 14: v->slots[0] = 40 * 16; return 1;
    case 15: v->slots[1] = v->slots[0]; return 1;
    case 16: v->tables[2] = 40; return 1;
    case 17: v->tables[2] = -1; return 1;
    case 18: v->work[0].n_tokens = 19; return 1;
    case 19: v->work[1].start = 1024; return 1;
    case 20: v->work[1].n_blocks = 2; return 1;
    case 21: v->work[1].first_block = 1; return 1;
    case 22: v->work[1].reserved[1] = 1; return 1;
    case 23: v->copies[0].dst = 40; return 1;
    case 24: v->copies[0].src = 9; return 1;
    case 25: v->copies[0].n_tokens = 17; return 1;
    case 26: v->rows[0].token = 22; return 1;
    case 27: v->rows[0].want = 0; return 1;
    case 28: v->rows[0].want |= 64; return 1;
    case 29: v->rows[0].topk = 257; return 1;
    case 30: v->rows[2].target = 300; return 1;
    case 31: v->rows[1].target = 5; return 1;
    case 32: v->sampling[1].temperature = -1; return 1;
    case 33: v->sampling[1].top_p = 0; return 1;
    case 34: v->sampling[1].min_p = 2; return 1;
    case 35: v->sampling[0].temperature = 1; return 1;
    default: return 0;
    }
}

static void lies_are_refused(void)
{
    for (int n = 0;; n++) {
        struct dskv_plan *plan = build(1);
        struct view v = {.plan = plan,
                         .bytes = plan->bytes,
                         .work = (void *)(uintptr_t)dskv_plan_work(plan),
                         .rows = (void *)(uintptr_t)dskv_plan_rows(plan),
                         .copies = (void *)(uintptr_t)dskv_plan_copies(plan),
                         .sampling = (void *)(uintptr_t)dskv_plan_sampling(plan),
                         .ids = (void *)(uintptr_t)dskv_plan_ids(plan),
                         .slots = (void *)(uintptr_t)dskv_plan_slots(plan),
                         .tables = (void *)(uintptr_t)dskv_plan_tables(plan)};
        struct dskv_error error = {0};
        int more = lie(n, &v);
        enum dskv_code code = dskv_plan_validate(plan, v.bytes, &bounds, NULL, &error);
        free(plan);
        if (!more)
            break;
        if (code != DSKV_BAD_VALUE || !error.message[0]) {
            printf("lie %d was taken\n", n);
            CU_FAIL("a lie was taken");
        }
    }
}

/* An id may name a row of the plan before that draws a token, and nothing else that is not there. */
static void references_name_rows_that_draw(void)
{
    struct dskv_plan *before = build(1), *plan = build(2);
    int32_t *ids = (void *)(uintptr_t)dskv_plan_ids(plan);
    struct dskv_plan_row *rows = (void *)(uintptr_t)dskv_plan_rows(before);
    struct dskv_error error;
    static char text[1 << 14];
    FILE *out = fmemopen(text, sizeof text, "w");
    CU_ASSERT_EQUAL(dskv_plan_reference(1), -2);
    CU_ASSERT_EQUAL(dskv_plan_reference_row(-2), 1);
    CU_ASSERT(dskv_plan_reference_row(0) < 0 && dskv_plan_reference_row(INT32_MAX) < 0);
    uint64_t hash = dskv_plan_hash(plan);
    ids[20] = dskv_plan_reference(1);
    CU_ASSERT_NOT_EQUAL(dskv_plan_hash(plan), hash);
    CU_ASSERT_EQUAL(dskv_plan_validate(plan, plan->bytes, &bounds, before, &error), DSKV_OK);
    CU_ASSERT_EQUAL(dskv_plan_validate(plan, plan->bytes, &bounds, NULL, &error), DSKV_BAD_VALUE);
    static const struct {
        uint32_t want;
        enum dskv_code code;
    } wants[] = {{DSKV_ROW_SAMPLE, DSKV_OK},
                 {DSKV_ROW_ARGMAX | DSKV_ROW_LOGITS, DSKV_OK},
                 {DSKV_ROW_LOGITS | DSKV_ROW_SCORE | DSKV_ROW_TOPK, DSKV_BAD_VALUE}};
    for (size_t i = 0; i < sizeof wants / sizeof *wants; i++) {
        rows[1].want = wants[i].want;
        CU_ASSERT_EQUAL(dskv_plan_validate(plan, plan->bytes, &bounds, before, &error), wants[i].code);
    }
    rows[1].want = DSKV_ROW_ARGMAX;
    static const int32_t wrong[] = {-1, -3, -4, -1000000, INT32_MIN, 300, INT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ids[0] = wrong[i];
        CU_ASSERT_EQUAL(dskv_plan_validate(plan, plan->bytes, &bounds, before, &error), DSKV_BAD_VALUE);
    }
    dskv_plan_print(plan, out);
    fclose(out);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "token 20: what row 1 of the step before draws position 33 slot 145\n"));
    free(before);
    free(plan);
}

/* A plan that passes after random damage must still name only what exists; of the plan before, row 1 alone. */
static void assert_is_inside(const struct dskv_plan *plan, int32_t least_id)
{
    for (int32_t i = 0; i < plan->used.n_tokens; i++)
        if (dskv_plan_slots(plan)[i] < -1 || dskv_plan_slots(plan)[i] >= bounds.n_blocks * bounds.block_tokens ||
            dskv_plan_ids(plan)[i] < least_id || dskv_plan_ids(plan)[i] == dskv_plan_reference(0) ||
            dskv_plan_ids(plan)[i] >= bounds.vocab)
            CU_FAIL("outside");
    for (int32_t w = 0; w < plan->used.n_work; w++)
        for (int32_t b = 0; b < dskv_plan_work(plan)[w].n_blocks; b++)
            if ((uint32_t)dskv_plan_tables(plan)[dskv_plan_work(plan)[w].first_block + b] >= (uint32_t)bounds.n_blocks)
                CU_FAIL("outside");
}

static void random_damage_is_survived(void)
{
    uint64_t state = 1;
    int taken = 0, refused = 0;
    struct dskv_plan *before = build(1);
    for (int round = 0; round < 20000; round++) {
        struct dskv_plan *plan = build(2);
        size_t bytes = plan->bytes;
        int has_before = round / 2 % 2;
        if (has_before)
            ((int32_t *)(uintptr_t)dskv_plan_ids(plan))[20] = dskv_plan_reference(1);
        struct dskv_error error;
        for (int hit = 0; hit < 1 + round % 3; hit++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            size_t at = (size_t)(state >> 33) % (round % 2 ? bytes : sizeof *plan);
            ((uint8_t *)plan)[at] ^= (uint8_t)(1u << (state >> 20 & 7));
        }
        if (dskv_plan_validate(plan, bytes, &bounds, has_before ? before : NULL, &error) == DSKV_OK) {
            assert_is_inside(plan, has_before ? dskv_plan_reference(1) : 0);
            taken++;
        } else {
            refused++;
        }
        free(plan);
    }
    free(before);
    CU_ASSERT(taken > 0); /* damage to what is not used */
    CU_ASSERT(refused > 10000);
}

static void a_trace_is_read_back(void)
{
    struct dskv_plan *first = build(1), *second = build(2), *read;
    struct dskv_error error;
    FILE *trace = tmpfile();
    CU_ASSERT_EQUAL(dskv_plan_record(first, trace, &error), DSKV_OK);
    CU_ASSERT_EQUAL(dskv_plan_record(second, trace, &error), DSKV_OK);
    rewind(trace);
    CU_ASSERT_EQUAL(dskv_plan_read(trace, &read, &error), DSKV_OK);
    CU_ASSERT_EQUAL(memcmp(read, first, first->bytes), 0);
    free(read);
    CU_ASSERT_EQUAL(dskv_plan_read(trace, &read, &error), DSKV_OK);
    CU_ASSERT_EQUAL(dskv_plan_hash(read), dskv_plan_hash(second));
    CU_ASSERT_EQUAL(dskv_plan_validate(read, read->bytes, &bounds, NULL, &error), DSKV_OK);
    free(read);
    CU_ASSERT_EQUAL(dskv_plan_read(trace, &read, &error), DSKV_OK);
    CU_ASSERT_PTR_NULL(read);
    for (long cut = 1; cut < (long)first->bytes; cut += 37) { /* a truncated trace */
        FILE *part = tmpfile();
        fwrite(first, (size_t)cut, 1, part);
        rewind(part);
        CU_ASSERT_EQUAL(dskv_plan_read(part, &read, &error), DSKV_BAD_VALUE);
        CU_ASSERT_PTR_NULL(read);
        fclose(part);
    }
    fclose(trace);
    free(first);
    free(second);
}

static void print_shows_every_section(void)
{
    struct dskv_plan *plan = build(3);
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    dskv_plan_print(plan, out);
    fclose(out);
    const char *const parts[] = {"plan of step 3",
                                 "copy 2 tokens of block 3 to block 9",
                                 "work 1: tokens 20..20 at position 33, blocks 7 8 9",
                                 "token 21: id 10 position 15 slot -1",
                                 "row 0: token 19: logits topk 4",
                                 "argmax sample temperature 0.5",
                                 "score of 299"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strstr(text, parts[i])) {
            printf("not printed: %s\n", parts[i]);
            CU_FAIL("not printed");
        }
    free(text);
    free(plan);
}

int main(void)
{
    return dskv_run_tests("parallel.plan",
                          (struct dskv_test[]){
                              {"a built plan says what was added", a_built_plan_says_what_was_added},
                              {"offsets depend on the bucket alone", offsets_depend_on_the_bucket_alone},
                              {"the hash covers what is used", the_hash_covers_what_is_used},
                              {"lies are refused", lies_are_refused},
                              {"references name rows that draw", references_name_rows_that_draw},
                              {"random damage is survived", random_damage_is_survived},
                              {"a trace is read back", a_trace_is_read_back},
                              {"print shows every section", print_shows_every_section},
                              {NULL, NULL},
                          });
}
