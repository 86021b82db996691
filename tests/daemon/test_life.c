/* The server over time: cancelled, late and lost requests, leases, crowding, the end; over the fake engine, whose steps
 * the tests hold back. */
#include "sim/local.h"
#include "sim/reference.h"
#include "support/cunit_suite.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct local local;
static struct local_client client, other;
static struct dskv_id nobodys; /* no cache has this id */
static const struct dskv_request no_effect = {.op = DSKV_OP_FREE, .free_caches = {.n = 1, .caches = &nobodys}};
static const int32_t prompt[200] = {[0 ... 199] = 11};

static void begin(const struct fake_engine_options *options, int32_t lease_s)
{
    local_open(&local, options, lease_s);
    local_connect(&local, 1, &client);
    local_connect(&local, 2, &other);
}

static void finish(void)
{
    local_close(&local);
}

static uint64_t send_generate(struct local_client *from, int32_t n_prompt, int32_t max_tokens, int32_t deadline_ms)
{
    struct dskv_request request = {.op = DSKV_OP_GENERATE,
                                   .deadline_ms = deadline_ms,
                                   .generate = {.tokens = local_tokens(prompt, n_prompt),
                                                .max_tokens = max_tokens,
                                                .top_p = 1,
                                                .ignore_eos = 1,
                                                .stream = 1}};
    return local_send(from, &request, NULL);
}

static uint64_t send_forward(struct local_client *from, int32_t n)
{
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(prompt, n)};
    return local_send(from, &(struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {1, &sequence}}, NULL);
}

/* The last event of a request. */
static struct dskv_event last_of(struct local_client *from, uint64_t id)
{
    struct dskv_event event = local_wait(from, id);
    while (!event.last) {
        dskv_event_clear(&event);
        event = local_wait(from, id);
    }
    return event;
}

static enum dskv_code code_of(struct local_client *from, uint64_t id)
{
    struct dskv_event event = last_of(from, id);
    enum dskv_code code = event.kind == DSKV_EVENT_ERROR ? event.error.code : DSKV_OK;
    dskv_event_clear(&event);
    return code;
}

static int queues_ahead(void)
{
    return dskv_engine_info(local.engine)->runs_queued;
}

/* Counters once the engine thread has gone round: a request without effect is behind all that came before. */
static struct dskv_stats_result settled(void)
{
    struct dskv_event event = local_call(&other, &no_effect);
    dskv_event_clear(&event);
    return local_stats(&local);
}

static void requests_of_several_clients_share_steps(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 0);
    uint64_t first = send_generate(&client, 20, 30, 0);
    fake_engine_await_step(local.engine);
    uint64_t second = send_generate(&other, 20, 30, 0);
    fake_engine_allow(local.engine, -1);
    struct dskv_event a = last_of(&client, first), b = last_of(&other, second);
    CU_ASSERT_EQUAL(a.generate.tokens.shape[0], 30);
    CU_ASSERT_EQUAL(memcmp(a.generate.tokens.data, b.generate.tokens.data, a.generate.tokens.bytes), 0);
    /* One behind the other; two, when the first one's next step was submitted before the second came. */
    CU_ASSERT_EQUAL(fake_engine_n_steps(local.engine), queues_ahead() ? 32 : 31);
    CU_ASSERT_EQUAL(fake_engine_most_runs(local.engine), 2);
    dskv_event_clear(&a);
    dskv_event_clear(&b);
    finish();
}

static void a_cancelled_generation_keeps_what_it_has(void)
{
    struct reference r = {0};
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 4);
    uint64_t id = send_generate(&client, 20, 100, 0);
    fake_engine_await_step(local.engine);
    CU_ASSERT_EQUAL(dskv_server_cancel(local.server, &client.route, id), 1);
    fake_engine_allow(local.engine, -1);
    struct dskv_event event = last_of(&client, id);
    CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
    CU_ASSERT_EQUAL(event.generate.finish, DSKV_FINISH_CANCELLED);
    /* The step that was waited for was finished: the fifth, or one before it where the fifth was queued ahead. */
    int n = local.runs_at_submit ? 4 : 5;
    CU_ASSERT_EQUAL(event.generate.tokens.shape[0], n);
    CU_ASSERT_EQUAL(event.generate.cache.length, 19 + n);
    reference_append(&r, prompt, 20);
    for (int i = 0; i < n; i++) {
        int32_t next = reference_next(&r, r.n - 1);
        CU_ASSERT_EQUAL(((const int32_t *)event.generate.tokens.data)[i], next);
        reference_append(&r, &next, 1);
    }
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(dskv_server_cancel(local.server, &client.route, id), 0);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, 2);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_reserved, 0);
    reference_free(&r);
    finish();
}

static void a_cancelled_forward_changes_nothing(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 1);
    uint64_t id = send_forward(&client, 200);
    fake_engine_await_step(local.engine);
    CU_ASSERT_EQUAL(dskv_server_cancel(local.server, &other.route, id), 0); /* it is not theirs */
    CU_ASSERT_EQUAL(dskv_server_cancel(local.server, &client.route, id), 1);
    CU_ASSERT_EQUAL(dskv_server_cancel(local.server, &client.route, id), 1); /* still under way */
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(code_of(&client, id), DSKV_CANCELLED);
    struct dskv_stats_result stats = settled();
    CU_ASSERT_EQUAL(stats.blocks_used, 0);
    CU_ASSERT_EQUAL(stats.blocks_reserved, 0);
    CU_ASSERT_EQUAL(stats.caches, 0);
    /* Where steps are queued ahead, the third was submitted before the second had ended. */
    CU_ASSERT_EQUAL(stats.rows_computed, queues_ahead() && !local.runs_at_submit ? 192 : 128);
    finish();
}

static void a_lost_client_leaves_no_cache(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 0);
    uint64_t generate = send_generate(&client, 20, 100, 0), forward = send_forward(&client, 20);
    uint64_t stays = send_forward(&other, 20);
    fake_engine_await_step(local.engine);
    fake_engine_allow(local.engine, 3);
    fake_engine_await_step(local.engine);
    dskv_server_route_lost(local.server, &client.route);
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(code_of(&client, generate), DSKV_CANCELLED);
    CU_ASSERT_EQUAL(code_of(&client, forward), DSKV_OK); /* was done before */
    CU_ASSERT_EQUAL(code_of(&other, stays), DSKV_OK);
    CU_ASSERT_EQUAL(settled().caches, 2);
    finish();
}

static void deadlines_end_what_is_late(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 1);
    uint64_t running = send_generate(&client, 20, 100, 30), roomy = send_generate(&other, 20, 3, 60000);
    fake_engine_await_step(local.engine);
    uint64_t waiting = send_generate(&client, 20, 100, 1);
    poll(NULL, 0, 40);
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(code_of(&client, running), DSKV_DEADLINE);
    CU_ASSERT_EQUAL(code_of(&client, waiting), DSKV_DEADLINE);
    CU_ASSERT_EQUAL(code_of(&other, roomy), DSKV_OK);
    CU_ASSERT_EQUAL(settled().caches, 1);
    finish();
}

static void an_id_in_flight_is_not_taken_twice(void)
{
    struct dskv_error error;
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 0);
    uint64_t id = send_forward(&client, 20);
    client.last_id--;
    struct dskv_request request = {.op = DSKV_OP_FREE, .free_caches = {.all = 1}};
    CU_ASSERT_EQUAL(local_send(&client, &request, &error), 0);
    CU_ASSERT_EQUAL(error.code, DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "id");
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(code_of(&client, id), DSKV_OK);
    client.last_id--;
    CU_ASSERT_EQUAL(code_of(&client, local_send(&client, &request, &error)), DSKV_OK); /* now it may be used again */
    finish();
}

static void too_much_work_is_refused(void)
{
    struct dskv_error error = {.code = DSKV_OK};
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 0);
    send_forward(&client, 20);
    fake_engine_await_step(local.engine);
    int n = 1;
    uint64_t id = 0;
    for (uint64_t sent; (sent = local_send(&client, &no_effect, &error)) != 0; n++)
        id = sent;
    CU_ASSERT_EQUAL(error.code, DSKV_BUSY);
    CU_ASSERT_EQUAL(error.limit, DSKV_MAX_QUEUED_REQUESTS);
    CU_ASSERT_EQUAL(n, DSKV_MAX_QUEUED_REQUESTS);
    CU_ASSERT_EQUAL(local_stats(&local).requests_queued, DSKV_MAX_QUEUED_REQUESTS - 1);
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(code_of(&client, id), DSKV_OK);
    CU_ASSERT_EQUAL(settled().requests_queued, 0);
    finish();
}

static void silence_frees_the_caches_of_a_session(void)
{
    struct dskv_request note = {.op = DSKV_OP_PING};
    begin(&(struct fake_engine_options){0}, 1);
    CU_ASSERT_EQUAL(code_of(&client, send_forward(&client, 40)), DSKV_OK);
    CU_ASSERT_EQUAL(code_of(&other, send_forward(&other, 40)), DSKV_OK);
    note.has_session = 1;
    note.session = other.session;
    for (int i = 0; i < 4; i++) {
        poll(NULL, 0, 400);
        dskv_server_note(local.server, &note, NULL); /* a ping renews as well */
    }
    struct dskv_stats_result stats = settled();
    CU_ASSERT_EQUAL(stats.sessions, 1);
    CU_ASSERT_EQUAL(stats.caches, 1);
    CU_ASSERT_EQUAL(stats.blocks_used, 3);
    struct dskv_event event = last_of(&client, send_forward(&client, 4));
    CU_ASSERT_EQUAL(event.error.code, DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(event.error.field, "session");
    dskv_event_clear(&event);
    finish();
}

static void a_lease_does_not_end_while_work_is_under_way(void)
{
    begin(&(struct fake_engine_options){0}, 1);
    fake_engine_allow(local.engine, 2);
    uint64_t id = send_generate(&client, 20, 10, 0);
    fake_engine_await_step(local.engine);
    poll(NULL, 0, 1200);
    fake_engine_allow(local.engine, -1);
    struct dskv_event event = last_of(&client, id);
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(code_of(&client, send_forward(&client, 4)), DSKV_OK);
    finish();
}

static void what_an_envelope_frees_is_free_before_its_request(void)
{
    begin(&(struct fake_engine_options){.n_blocks = 3}, 0);
    struct dskv_event event = last_of(&client, send_forward(&client, 40));
    struct dskv_id ids[2] = {event.forward.sequences[0].cache.id, {{1}}};
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(code_of(&client, send_forward(&client, 40)), DSKV_POOL_FULL);
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(prompt, 40)};
    struct dskv_request request = {.op = DSKV_OP_FORWARD, .n_free = 2, .free = ids, .forward = {1, &sequence}};
    event = local_call(&client, &request);
    CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
    ids[0] = event.forward.sequences[0].cache.id;
    dskv_event_clear(&event);
    dskv_server_note(local.server, &(struct dskv_request){.op = DSKV_OP_STATS, .n_free = 2, .free = ids}, NULL);
    CU_ASSERT_EQUAL(settled().blocks_used, 0);
    finish();
}

static void a_freed_cache_stays_for_who_reads_it(void)
{
    struct reference r = {0};
    begin(&(struct fake_engine_options){.n_blocks = 8}, 0);
    struct dskv_event event = last_of(&client, send_forward(&client, 40));
    struct dskv_cache_ref cache = event.forward.sequences[0].cache;
    dskv_event_clear(&event);
    fake_engine_allow(local.engine, 0);
    struct dskv_request request = {.op = DSKV_OP_GENERATE,
                                   .generate = {.prefix = local_prefix(&cache, 40),
                                                .tokens = local_tokens(NULL, 0),
                                                .max_tokens = 20,
                                                .top_p = 1,
                                                .ignore_eos = 1}};
    uint64_t id = local_send(&client, &request, NULL);
    fake_engine_await_step(local.engine);
    local_send(&client, &(struct dskv_request){.op = DSKV_OP_FREE, .free_caches = {.all = 1}}, NULL);
    uint64_t intruder = send_forward(&other, 60); /* would take the blocks */
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(code_of(&other, intruder), DSKV_OK);
    event = last_of(&client, id);
    CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
    reference_append(&r, prompt, 40);
    for (int i = 0; i < 20; i++) {
        int32_t next = reference_next(&r, r.n - 1);
        CU_ASSERT_EQUAL(((const int32_t *)event.generate.tokens.data)[i], next);
        reference_append(&r, &next, 1);
    }
    dskv_event_clear(&event);
    reference_free(&r);
    finish();
}

static void hello_says_what_holds(void)
{
    begin(&(struct fake_engine_options){0}, 7);
    struct dskv_request request = {.op = DSKV_OP_HELLO, .hello = {.n_versions = 2, .versions = {9, 1}}};
    struct dskv_event event = local_call(&client, &request);
    CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_RESULT);
    CU_ASSERT_EQUAL(event.hello.version, 1);
    CU_ASSERT_EQUAL(event.hello.lease_ms, 7000);
    CU_ASSERT_EQUAL(event.hello.limits.max_model_len, 512);
    CU_ASSERT_NOT_EQUAL(memcmp(&event.hello.session, &client.session, sizeof client.session), 0);
    dskv_event_clear(&event);
    request.hello.versions[1] = 2;
    event = local_call(&client, &request);
    CU_ASSERT_EQUAL(event.error.code, DSKV_VERSION_MISMATCH);
    CU_ASSERT_STRING_EQUAL(event.error.valid, "1");
    dskv_event_clear(&event);
    finish();
}

static void a_drain_finishes_what_was_accepted(void)
{
    struct dskv_error error;
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 2);
    uint64_t id = send_generate(&client, 20, 10, 0);
    fake_engine_await_step(local.engine);
    dskv_server_drain(local.server);
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(prompt, 4)};
    struct dskv_request request = {.op = DSKV_OP_FORWARD, .forward = {1, &sequence}};
    CU_ASSERT_EQUAL(local_send(&client, &request, &error), 0);
    CU_ASSERT_EQUAL(error.code, DSKV_DRAINING);
    CU_ASSERT_EQUAL(dskv_server_idle(local.server), 0);
    fake_engine_allow(local.engine, -1);
    struct dskv_event event = last_of(&client, id);
    CU_ASSERT_EQUAL(event.generate.tokens.shape[0], 10);
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(dskv_server_idle(local.server), 1);
    finish();
}

static void a_stop_answers_what_is_unfinished(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 2);
    uint64_t id = send_generate(&client, 20, 100, 0);
    fake_engine_await_step(local.engine);
    uint64_t queued = send_forward(&other, 20);
    dskv_server_stop(local.server);
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(code_of(&client, id), DSKV_DRAINING);
    CU_ASSERT_EQUAL(code_of(&other, queued), DSKV_DRAINING);
    CU_ASSERT_EQUAL(dskv_server_idle(local.server), 1);
    finish();
}

static void a_close_in_the_middle_of_work_is_clean(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 2);
    for (int i = 0; i < 40; i++)
        send_generate(&client, 20, 3, 0);
    fake_engine_await_step(local.engine);
    for (int i = 0; i < 40; i++)
        send_forward(&other, 20);
    fake_engine_allow(local.engine, -1);
    finish();
}

static void a_failed_step_ends_the_job_and_everyone_is_told(void)
{
    struct dskv_error error;
    begin(&(struct fake_engine_options){0}, 0);
    CU_ASSERT_EQUAL(dskv_server_failed(local.server, &error), DSKV_EXIT_OK);
    fake_engine_allow(local.engine, 2);
    uint64_t id = send_generate(&client, 20, 100, 0), second = send_forward(&other, 200);
    fake_engine_await_step(local.engine);
    fake_engine_fail_next(local.engine);
    uint64_t queued = send_forward(&other, 20);
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(code_of(&client, id), DSKV_INTERNAL);
    CU_ASSERT_EQUAL(code_of(&other, second), DSKV_INTERNAL);
    CU_ASSERT_EQUAL(code_of(&other, queued), DSKV_INTERNAL);
    CU_ASSERT_EQUAL(dskv_server_failed(local.server, &error), DSKV_EXIT_RANK_LOST);
    CU_ASSERT_STRING_EQUAL(error.message, "rank 1 was lost");
    CU_ASSERT_EQUAL(send_forward(&client, 20), 0);
    finish();
}

static void plans_are_recorded_as_they_run(void)
{
    char path[] = "/tmp/dskv-plans-XXXXXX";
    int fd = mkstemp(path);
    CU_ASSERT_FATAL(fd >= 0);
    close(fd);
    begin(&(struct fake_engine_options){0}, 0);
    struct dskv_config config = {.seed = -1, .trace_plans = path};
    struct dskv_error error;
    dskv_server_close(&local.server);
    CU_ASSERT_EQUAL_FATAL(dskv_server_open(local.engine, &config, &local.server, &error), DSKV_EXIT_OK);
    local_connect(&local, 1, &client);
    CU_ASSERT_EQUAL(code_of(&client, send_generate(&client, 100, 5, 0)), DSKV_OK);
    FILE *file = fopen(path, "rb");
    struct dskv_plan *plan;
    int32_t n_plans = 0, n_tokens = 0;
    while (dskv_plan_read(file, &plan, &error) == DSKV_OK && plan) {
        n_plans++;
        n_tokens += plan->used.n_tokens;
        free(plan);
    }
    fclose(file);
    CU_ASSERT_EQUAL(n_plans, fake_engine_n_steps(local.engine));
    CU_ASSERT_EQUAL(n_tokens, 104);
    unlink(path);
    dskv_server_close(&local.server);
    config.trace_plans = "/nowhere/plans";
    CU_ASSERT_EQUAL(dskv_server_open(local.engine, &config, &local.server, &error), DSKV_EXIT_USAGE);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "/nowhere/plans"));
    fake_engine_close(&local.engine);
}

int main(void)
{
    return dskv_run_tests(
        "daemon.life",
        (struct dskv_test[]){
            {"requests of several clients share steps", requests_of_several_clients_share_steps},
            {"a cancelled generation keeps what it has", a_cancelled_generation_keeps_what_it_has},
            {"a cancelled forward changes nothing", a_cancelled_forward_changes_nothing},
            {"a lost client leaves no cache", a_lost_client_leaves_no_cache},
            {"deadlines end what is late", deadlines_end_what_is_late},
            {"an id in flight is not taken twice", an_id_in_flight_is_not_taken_twice},
            {"too much work is refused", too_much_work_is_refused},
            {"silence frees the caches of a session", silence_frees_the_caches_of_a_session},
            {"a lease does not end while work is under way", a_lease_does_not_end_while_work_is_under_way},
            {"what an envelope frees is free before its request", what_an_envelope_frees_is_free_before_its_request},
            {"a freed cache stays for who reads it", a_freed_cache_stays_for_who_reads_it},
            {"hello says what holds", hello_says_what_holds},
            {"a drain finishes what was accepted", a_drain_finishes_what_was_accepted},
            {"a stop answers what is unfinished", a_stop_answers_what_is_unfinished},
            {"a close in the middle of work is clean", a_close_in_the_middle_of_work_is_clean},
            {"a failed step ends the job and everyone is told", a_failed_step_ends_the_job_and_everyone_is_told},
            {"plans are recorded as they run", plans_are_recorded_as_they_run},
            {NULL, NULL},
        });
}
