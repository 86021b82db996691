/* Steps that are queued ahead, over the fake engine: every way in which a sequence can end while its next row is under
 * way.  Each case runs without and with, computed as soon and as late as can be, and must come out the same: tokens,
 * counts, what the cache holds, what may be appended to it, and which blocks are used.
 */
#include "sim/local.h"
#include "sim/reference.h"
#include "support/cunit_suite.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_DRAWN 40
#define LONGEST 200

static const struct {
    int ahead, at_submit;
} modes[] = {{0, 0}, {1, 0}, {1, 1}};
#define N_MODES (int)(sizeof modes / sizeof *modes)

static struct local local;
static struct local_client client, other;

static void begin(int mode, struct fake_engine_options options)
{
    options.runs_queued = modes[mode].ahead;
    options.runs_at_submit = modes[mode].at_submit;
    local_open(&local, &options, 0);
    local_connect(&local, 1, &client);
    local_connect(&local, 2, &other);
}

static void finish(void)
{
    local_close(&local);
}

/* Tokens 0, 1, 2 ... of a text of its own, none of them an end or a bad one. */
static void make_tokens(int32_t seed, int32_t *tokens, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        tokens[i] = 8 + (seed * 31 + i * 17 + i * i % 11) % 50;
}

/* When no step is under way any more, the executor's counters are the server's. */
static struct dskv_stats_result settled(void)
{
    struct dskv_stats_result stats = local_stats(&local);
    for (int i = 0; i < 5000 && stats.rows_computed != stats.ranks[0].rows_computed; i++) {
        usleep(1000);
        stats = local_stats(&local);
    }
    CU_ASSERT_EQUAL(stats.rows_computed, stats.ranks[0].rows_computed);
    return stats;
}

/* ---- what must come out ------------------------------------------------------------------------------------------ */

/* A generation as the reference does it: one token after the other. */
struct expected {
    struct reference r; /* all tokens but the last */
    int32_t n, tokens[LONGEST];
    enum dskv_finish finish;
};

static int ends_with(const int32_t *tokens, int32_t n, const struct dskv_wire_tensor *stop)
{
    int32_t n_stop = (int32_t)stop->shape[0];
    return n_stop <= n && memcmp(tokens + n - n_stop, stop->data, (size_t)n_stop * sizeof *tokens) == 0;
}

static struct expected expect(const int32_t *prompt, int32_t n_prompt, const struct dskv_generate *asked,
                              int32_t context)
{
    struct expected e = {.finish = DSKV_N_FINISHES};
    struct dskv_sampling sampling = {.temperature = (float)asked->temperature, .top_p = 1, .seed = asked->seed};
    reference_append(&e.r, prompt, n_prompt);
    while (e.finish == DSKV_N_FINISHES) {
        float logits[FAKE_VOCAB];
        reference_row(&e.r, e.r.n - 1, logits);
        sampling.position = e.r.n;
        int32_t token = fake_sample(logits, &sampling);
        e.tokens[e.n++] = token;
        if (token == FAKE_END_TOKEN && !asked->ignore_eos)
            e.finish = DSKV_FINISH_STOP;
        for (int32_t i = 0; i < asked->n_stops; i++)
            if (ends_with(e.tokens, e.n, &asked->stops[i]))
                e.finish = DSKV_FINISH_STOP;
        if (e.finish == DSKV_N_FINISHES && e.n == asked->max_tokens)
            e.finish = DSKV_FINISH_LENGTH;
        if (e.finish == DSKV_N_FINISHES && e.r.n + 1 == context)
            e.finish = DSKV_FINISH_CONTEXT;
        if (e.finish == DSKV_N_FINISHES)
            reference_append(&e.r, &token, 1);
    }
    return e;
}

/* The cache holds just what it should, now and when others have appended to it, twice, each in its own way. */
static void check_cache(const struct dskv_cache_ref *cache, const struct reference *r)
{
    int32_t tokens[512], more[5];
    struct fake_kv kv[512];
    CU_ASSERT_EQUAL_FATAL(cache->length, r->n);
    struct dskv_prefix prefix = local_prefix(cache, cache->length);
    for (int32_t seed = 0; seed < 2; seed++) {
        make_tokens(90 + seed, more, 5);
        struct reference longer = reference_of(r, r->n);
        reference_append(&longer, more, 5);
        struct dskv_event event = local_forward(&client, &prefix, more, 5, (struct dskv_want){.argmax = 1});
        for (int32_t i = 0; i < 5; i++)
            CU_ASSERT_EQUAL(((const int32_t *)event.forward.sequences[0].argmax.data)[i],
                            reference_next(&longer, r->n + i));
        struct dskv_id made = event.forward.sequences[0].cache.id;
        CU_ASSERT_EQUAL(local_export(&client, &made, longer.n, tokens, kv), DSKV_OK);
        CU_ASSERT_EQUAL(memcmp(tokens, longer.tokens, sizeof *tokens * (size_t)longer.n), 0);
        CU_ASSERT_EQUAL(memcmp(kv, longer.kv, sizeof *kv * (size_t)longer.n), 0);
        dskv_event_clear(&event);
        reference_free(&longer);
    }
    CU_ASSERT_EQUAL(local_export(&client, &cache->id, cache->length, tokens, kv), DSKV_OK);
    CU_ASSERT_EQUAL(memcmp(tokens, r->tokens, sizeof *tokens * (size_t)r->n), 0);
    CU_ASSERT_EQUAL(memcmp(kv, r->kv, sizeof *kv * (size_t)r->n), 0);
}

static void check_result(const struct dskv_event *event, const struct expected *e, int32_t n_cached)
{
    CU_ASSERT_EQUAL_FATAL(event->kind, DSKV_EVENT_RESULT);
    CU_ASSERT_EQUAL(event->generate.finish, e->finish);
    CU_ASSERT_EQUAL_FATAL(event->generate.tokens.shape[0], e->n);
    CU_ASSERT_EQUAL(memcmp(event->generate.tokens.data, e->tokens, sizeof *e->tokens * (size_t)e->n), 0);
    CU_ASSERT_EQUAL(event->generate.steps, e->n - 1);
    CU_ASSERT_EQUAL(event->generate.cached, n_cached);
    CU_ASSERT_EQUAL(event->generate.computed, e->r.n - n_cached);
}

static uint64_t send(struct local_client *from, const struct dskv_generate *asked)
{
    return local_send(from, &(struct dskv_request){.op = DSKV_OP_GENERATE, .generate = *asked}, NULL);
}

static struct dskv_event last_of(struct local_client *from, uint64_t id)
{
    struct dskv_event event = local_wait(from, id);
    while (!event.last) {
        dskv_event_clear(&event);
        event = local_wait(from, id);
    }
    return event;
}

/* One generation from a prompt, alone; and that its last row, if one was under way, is counted where it is computed. */
static void check_alone(int mode, const int32_t *prompt, int32_t n, const struct dskv_generate *asked, int32_t context)
{
    struct expected e = expect(prompt, n, asked, context);
    int64_t before = settled().rows_computed;
    struct dskv_event event = last_of(&client, send(&client, asked));
    check_result(&event, &e, 0);
    int64_t rows = settled().rows_computed - before;
    CU_ASSERT_EQUAL(rows, e.r.n + (modes[mode].ahead && e.finish == DSKV_FINISH_STOP && e.n < asked->max_tokens));
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, (e.r.n + 15) / 16);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_reserved, 0);
    check_cache(&event.generate.cache, &e.r);
    dskv_event_clear(&event);
    event = local_call(&client, &(struct dskv_request){.op = DSKV_OP_FREE, .free_caches = {.all = 1}});
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(settled().blocks_used, 0);
    reference_free(&e.r);
}

static struct dskv_generate generate_of(const int32_t *prompt, int32_t n, int32_t max_tokens)
{
    return (struct dskv_generate){
        .tokens = local_tokens(prompt, n), .max_tokens = max_tokens, .top_p = 1, .ignore_eos = 1, .has_seed = 1};
}

/* ---- one sequence -------------------------------------------------------------------------------------------------
 */

/* Prompts around a block's end, so that the row too many is the first, a middle or the last of a block. */
static void it_stops_at_every_token(void)
{
    int32_t prompt[40];
    make_tokens(1, prompt, 40);
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){0});
        for (int32_t n = 13; n <= 17; n++)
            for (int32_t at = 0; at < 20; at++) {
                struct dskv_generate asked = generate_of(prompt, n, MAX_DRAWN);
                asked.temperature = n % 2 ? 0.5 : 0;
                asked.seed = (uint64_t)n;
                struct expected whole = expect(prompt, n, &asked, 512);
                struct dskv_wire_tensor stop = local_tokens(whole.tokens + at, 1);
                asked.stops = &stop;
                asked.n_stops = 1;
                asked.stream = at % 2;
                check_alone(mode, prompt, n, &asked, 512);
                reference_free(&whole.r);
            }
        finish();
    }
}

static void it_stops_where_several_tokens_make_a_stop(void)
{
    int32_t prompt[20];
    make_tokens(2, prompt, 20);
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){0});
        struct dskv_generate asked = generate_of(prompt, 20, MAX_DRAWN);
        struct expected whole = expect(prompt, 20, &asked, 512);
        for (int32_t length = 2; length <= 4; length++)
            for (int32_t at = 0; at < 14; at++) {
                struct dskv_wire_tensor stops[2] = {local_tokens(whole.tokens + at, length),
                                                    local_tokens((int32_t[]){1, 2, 3}, 3)};
                asked.stops = stops;
                asked.n_stops = 2;
                check_alone(mode, prompt, 20, &asked, 512);
            }
        reference_free(&whole.r);
        finish();
    }
}

static void it_ends_with_the_last_token_that_was_asked_for(void)
{
    int32_t prompt[20];
    make_tokens(3, prompt, 20);
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){0});
        for (int32_t most = 1; most <= 16; most++) {
            struct dskv_generate asked = generate_of(prompt, 20, most);
            check_alone(mode, prompt, 20, &asked, 512); /* no row too many: it was known to be the last */
            asked.ignore_eos = 0;
            check_alone(mode, prompt, 20, &asked, 512);
        }
        finish();
    }
}

static void it_ends_with_the_context(void)
{
    int32_t prompt[60];
    make_tokens(4, prompt, 60);
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){.max_model_len = 60, .n_blocks = 24});
        for (int32_t n = 40; n < 54; n++) { /* room is left for five more after it */
            struct dskv_generate asked = generate_of(prompt, n, MAX_DRAWN);
            struct expected e = expect(prompt, n, &asked, 60);
            struct dskv_event event = last_of(&client, send(&client, &asked));
            check_result(&event, &e, 0);
            CU_ASSERT_EQUAL(e.finish, DSKV_FINISH_CONTEXT);
            int32_t tokens[60];
            struct fake_kv kv[60];
            CU_ASSERT_EQUAL(local_export(&client, &event.generate.cache.id, 59, tokens, kv), DSKV_OK);
            CU_ASSERT_EQUAL(memcmp(kv, e.r.kv, sizeof *kv * 59), 0);
            struct dskv_id id = event.generate.cache.id;
            dskv_event_clear(&event);
            event =
                local_call(&client, &(struct dskv_request){.op = DSKV_OP_FREE, .free_caches = {.n = 1, .caches = &id}});
            dskv_event_clear(&event);
            reference_free(&e.r);
        }
        finish();
    }
}

/* Without tokens: the first draw follows from the prefix's last token, run again.  A whole cache's last block is
 * appended to in place; a cut's would have to be copied, which a first token that ends it all must not cost. */
static void it_goes_on_from_a_prefix_without_tokens(void)
{
    int32_t tokens[40];
    make_tokens(5, tokens, 40);
    for (int cut = 0; cut < 2; cut++)
        for (int32_t at = 0; at < 4; at++) {
            int64_t used[N_MODES];
            for (int mode = 0; mode < N_MODES; mode++) {
                begin(mode, (struct fake_engine_options){0});
                struct dskv_cache_ref cache = local_cache(&other, NULL, tokens, 40);
                int32_t length = cut ? 37 : 40;
                struct dskv_generate asked = generate_of(NULL, 0, MAX_DRAWN);
                struct expected whole = expect(tokens, length, &asked, 512);
                struct dskv_wire_tensor stop = local_tokens(whole.tokens + at, 1);
                asked.prefix = local_prefix(&cache, length);
                asked.stops = &stop;
                asked.n_stops = 1;
                struct expected e = expect(tokens, length, &asked, 512);
                struct dskv_event event = last_of(&client, send(&client, &asked));
                check_result(&event, &e, length - 1);
                used[mode] = settled().blocks_used;
                CU_ASSERT_EQUAL(used[mode], used[0]);
                check_cache(&event.generate.cache, &e.r);
                dskv_event_clear(&event);
                reference_free(&whole.r);
                reference_free(&e.r);
                whole = (struct expected){0};
                reference_append(&whole.r, tokens, 40);
                check_cache(&cache, &whole.r); /* and the one that it came from */
                reference_free(&whole.r);
                finish();
            }
        }
}

/* The first row is not finite, and the next one was submitted with whatever it drew. */
static void a_row_that_is_not_finite_ends_it(void)
{
    int32_t prompt[20], good[20];
    make_tokens(6, good, 20);
    memcpy(prompt, good, sizeof prompt);
    prompt[19] = FAKE_BAD_TOKEN;
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){0});
        struct dskv_generate bad = generate_of(prompt, 20, 10), fine = generate_of(good, 20, 10);
        struct expected e = expect(good, 20, &fine, 512);
        fake_engine_allow(local.engine, 0);
        uint64_t first = send(&client, &bad), second = send(&other, &fine);
        fake_engine_await_step(local.engine);
        fake_engine_allow(local.engine, -1);
        struct dskv_event event = last_of(&client, first);
        CU_ASSERT_EQUAL(event.error.code, DSKV_NOT_FINITE);
        dskv_event_clear(&event);
        event = last_of(&other, second);
        check_result(&event, &e, 0);
        check_cache(&event.generate.cache, &e.r);
        dskv_event_clear(&event);
        reference_free(&e.r);
        finish();
    }
}

/* ---- several ------------------------------------------------------------------------------------------------------
 */

/* Sequences that share steps and end one after the other; a forward and a draft come in between. */
static void one_of_several_ends(void)
{
    enum { N = 4 };
    int32_t prompts[N][20], draft[3] = {1, 2, 3};
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){.n_blocks = 128});
        struct dskv_generate asked[N];
        struct dskv_wire_tensor stops[N];
        struct expected e[N];
        uint64_t ids[N];
        fake_engine_allow(local.engine, 0);
        for (int32_t i = 0; i < N; i++) {
            make_tokens(20 + i, prompts[i], 20);
            asked[i] = generate_of(prompts[i], 14 + i, MAX_DRAWN - i);
            asked[i].temperature = i % 2;
            asked[i].seed = 5;
            asked[i].stream = 1;
            struct expected whole = expect(prompts[i], 14 + i, &asked[i], 512);
            int32_t copy[1] = {whole.tokens[3 * i + 2]};
            reference_free(&whole.r);
            stops[i] = local_tokens(memcpy(&prompts[i][19], copy, sizeof copy), 1); /* behind the prompt */
            asked[i].stops = &stops[i];
            asked[i].n_stops = i > 0;
            e[i] = expect(prompts[i], 14 + i, &asked[i], 512);
            ids[i] = send(i % 2 ? &client : &other, &asked[i]);
        }
        fake_engine_await_step(local.engine);
        fake_engine_allow(local.engine, -1);
        struct dskv_request verify = {
            .op = DSKV_OP_VERIFY, .verify = {.tokens = local_tokens(prompts[0], 10), .draft = local_tokens(draft, 3)}};
        struct dskv_event event = local_call(&client, &verify);
        CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
        dskv_event_clear(&event);
        event = local_forward(&client, NULL, prompts[1], 10, (struct dskv_want){.logits_stop = 10});
        dskv_event_clear(&event);
        for (int32_t i = 0; i < N; i++) {
            int32_t n = 0;
            struct local_client *from = i % 2 ? &client : &other;
            for (event = local_wait(from, ids[i]); event.kind == DSKV_EVENT_TOKENS; event = local_wait(from, ids[i])) {
                CU_ASSERT_EQUAL(*(const int32_t *)event.tokens.data, e[i].tokens[n]);
                n++;
                dskv_event_clear(&event);
            }
            CU_ASSERT_EQUAL(n, e[i].n);
            check_result(&event, &e[i], 0);
            check_cache(&event.generate.cache, &e[i].r);
            dskv_event_clear(&event);
            reference_free(&e[i].r);
        }
        finish();
    }
}

/* Cancelled while steps are under way; what it leaves is at once extended, in the same block, by somebody else. */
static void it_is_cancelled_in_the_middle(void)
{
    int32_t prompt[20];
    make_tokens(7, prompt, 20);
    for (int mode = 0; mode < N_MODES; mode++)
        for (int n_allowed = 0; n_allowed < 16; n_allowed++) {
            begin(mode, (struct fake_engine_options){.max_batch_tokens = 8});
            struct dskv_generate asked = generate_of(prompt, 20, MAX_DRAWN); /* its prompt alone takes three steps */
            struct expected e = expect(prompt, 20, &asked, 512);
            fake_engine_allow(local.engine, n_allowed);
            uint64_t id = send(&client, &asked);
            fake_engine_await_step(local.engine);
            CU_ASSERT_EQUAL(dskv_server_cancel(local.server, &client.route, id), 1);
            fake_engine_allow(local.engine, -1);
            struct dskv_event event = last_of(&client, id);
            CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
            CU_ASSERT_EQUAL(event.generate.finish, DSKV_FINISH_CANCELLED);
            int32_t n = (int32_t)event.generate.tokens.shape[0], length = event.generate.cache.length;
            CU_ASSERT_EQUAL(memcmp(event.generate.tokens.data, e.tokens, sizeof *e.tokens * (size_t)n), 0);
            CU_ASSERT_EQUAL(length, n ? 19 + n : event.generate.computed);
            struct reference r = reference_of(&e.r, length);
            check_cache(&event.generate.cache, &r);
            reference_free(&r);
            dskv_event_clear(&event);
            reference_free(&e.r);
            finish();
        }
}

/* A pool that one generation fills: others are refused, and served when it has given back what it did not need. */
static void the_pool_is_full_meanwhile(void)
{
    int32_t prompt[33];
    make_tokens(8, prompt, 33);
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){.n_blocks = 4});
        struct dskv_generate asked = generate_of(prompt, 20, MAX_DRAWN), same = generate_of(prompt, 33, 1);
        struct expected whole = expect(prompt, 20, &asked, 512);
        struct dskv_wire_tensor stop = local_tokens(whole.tokens + 9, 1);
        asked.stops = &stop;
        asked.n_stops = 1;
        struct expected e = expect(prompt, 20, &asked, 512);
        fake_engine_allow(local.engine, 4);
        uint64_t id = send(&client, &asked);
        fake_engine_await_step(local.engine);
        uint64_t refused = send(&other, &same);
        fake_engine_allow(local.engine, -1);
        struct dskv_event event = last_of(&other, refused);
        CU_ASSERT_EQUAL(event.error.code, DSKV_POOL_FULL);
        CU_ASSERT_EQUAL(event.error.free, 0);
        dskv_event_clear(&event);
        event = last_of(&client, id);
        check_result(&event, &e, 0);
        struct dskv_id cache = event.generate.cache.id;
        dskv_event_clear(&event);
        event =
            local_call(&client, &(struct dskv_request){.op = DSKV_OP_FREE, .free_caches = {.n = 1, .caches = &cache}});
        CU_ASSERT_EQUAL(event.free_caches.n_freed, 1);
        dskv_event_clear(&event);
        event = last_of(&other, send(&other, &same));
        CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
        dskv_event_clear(&event);
        reference_free(&whole.r);
        reference_free(&e.r);
        finish();
    }
}

/* Lets one step after the other run, slowly. */
static void *drip(void *stopped)
{
    while (!atomic_load((atomic_int *)stopped)) {
        fake_engine_allow(local.engine, 1);
        usleep(300);
    }
    fake_engine_allow(local.engine, -1);
    return NULL;
}

/* Pieces of KV go in and out while a generation runs: they are copied between steps. */
static void caches_are_exported_and_imported_meanwhile(void)
{
    int32_t prompt[30], tokens[30];
    struct fake_kv kv[30];
    make_tokens(9, prompt, 30);
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){0});
        struct dskv_cache_ref cache = local_cache(&other, NULL, prompt, 30), back;
        struct dskv_generate asked = generate_of(prompt, 20, LONGEST);
        struct expected e = expect(prompt, 20, &asked, 512);
        struct reference r = {0};
        atomic_int stopped = 0;
        pthread_t thread;
        reference_append(&r, prompt, 30);
        fake_engine_allow(local.engine, 0);
        uint64_t id = send(&client, &asked);
        fake_engine_await_step(local.engine);
        CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, drip, &stopped), 0);
        CU_ASSERT_EQUAL(local_export(&other, &cache.id, 30, tokens, kv), DSKV_OK);
        CU_ASSERT_EQUAL(memcmp(kv, r.kv, sizeof kv), 0);
        CU_ASSERT_EQUAL(local_import(&other, prompt, 30, kv, -1, &back, NULL), DSKV_OK);
        CU_ASSERT_EQUAL(local_peek(&client, id), 0); /* it still runs */
        atomic_store(&stopped, 1);
        pthread_join(thread, NULL);
        struct dskv_event event = last_of(&client, id);
        check_result(&event, &e, 0);
        check_cache(&event.generate.cache, &e.r);
        check_cache(&back, &r);
        dskv_event_clear(&event);
        reference_free(&e.r);
        reference_free(&r);
        finish();
    }
}

/* That all of the above was about something: one after the other, each step but the first follows one under way. */
static void steps_are_queued_ahead_where_they_can_be(void)
{
    int32_t prompt[20];
    make_tokens(10, prompt, 20);
    for (int mode = 0; mode < N_MODES; mode++) {
        begin(mode, (struct fake_engine_options){0});
        struct dskv_generate asked = generate_of(prompt, 20, 12);
        struct dskv_event event = last_of(&client, send(&client, &asked));
        dskv_event_clear(&event);
        CU_ASSERT_EQUAL(settled().steps, 12);
        CU_ASSERT_EQUAL(fake_engine_n_chained(local.engine), modes[mode].ahead ? 11 : 0);
        finish();
    }
}

int main(void)
{
    return dskv_run_tests(
        "daemon.ahead",
        (struct dskv_test[]){
            {"steps are queued ahead where they can be", steps_are_queued_ahead_where_they_can_be},
            {"it stops at every token", it_stops_at_every_token},
            {"it stops where several tokens make a stop", it_stops_where_several_tokens_make_a_stop},
            {"it ends with the last token that was asked for", it_ends_with_the_last_token_that_was_asked_for},
            {"it ends with the context", it_ends_with_the_context},
            {"it goes on from a prefix without tokens", it_goes_on_from_a_prefix_without_tokens},
            {"a row that is not finite ends it", a_row_that_is_not_finite_ends_it},
            {"one of several ends", one_of_several_ends},
            {"it is cancelled in the middle", it_is_cancelled_in_the_middle},
            {"the pool is full meanwhile", the_pool_is_full_meanwhile},
            {"caches are exported and imported meanwhile", caches_are_exported_and_imported_meanwhile},
            {NULL, NULL},
        });
}
