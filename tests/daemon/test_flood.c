/* Floods: what a client sends that costs no step neither piles up while a step holds the engine thread nor holds up who
 * decodes; over the fake engine, whose steps the tests hold back. */
#include "sim/local.h"
#include "support/cunit_suite.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FLOOD = 100000, MAX_GROWTH = 4 << 20 };

static struct local local;
static struct local_client client, flooder;
static const int32_t prompt[8] = {11, 12, 13, 14, 15, 16, 17, 18};

static void begin(void)
{
    local_open(&local, &(struct fake_engine_options){0}, 0);
    local_connect(&local, 1, &client);
    local_connect(&local, 2, &flooder);
}

static size_t bytes_in_use(void)
{
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static uint64_t send_generate(int32_t max_tokens)
{
    struct dskv_request request = {
        .op = DSKV_OP_GENERATE,
        .generate = {.tokens = local_tokens(prompt, 8), .max_tokens = max_tokens, .top_p = 1, .ignore_eos = 1}};
    return local_send(&client, &request, NULL);
}

/* A step stands on the engine; returns the id of the generation that made it. */
static uint64_t hold_a_step(int32_t max_tokens)
{
    fake_engine_allow(local.engine, 0);
    uint64_t id = send_generate(max_tokens);
    fake_engine_await_step(local.engine);
    return id;
}

static struct dskv_event release(uint64_t id)
{
    fake_engine_allow(local.engine, -1);
    return local_wait(&client, id);
}

static void end(uint64_t id)
{
    struct dskv_event event = release(id);
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    dskv_event_clear(&event);
    local_close(&local);
}

/* ---- nothing piles up ------------------------------------------------------------------------------------------- */

static void cancels_do_not_pile_up(void)
{
    begin();
    uint64_t id = hold_a_step(40);
    size_t before = bytes_in_use();
    int n_found = 0;
    for (int i = 0; i < FLOOD; i++)
        n_found += dskv_server_cancel(local.server, &client.route, id);
    CU_ASSERT_EQUAL(n_found, FLOOD);
    CU_ASSERT(bytes_in_use() < before + MAX_GROWTH);
    struct dskv_event event = release(id);
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    CU_ASSERT_EQUAL(event.generate.finish, DSKV_FINISH_CANCELLED);
    dskv_event_clear(&event);
    local_close(&local);
}

static void credits_do_not_pile_up(void)
{
    struct dskv_error error = {0};
    begin();
    struct dskv_cache_ref cache = local_cache(&flooder, NULL, prompt, 8);
    uint64_t id = hold_a_step(40);
    struct dskv_request export = {.op = DSKV_OP_EXPORT, .export_ = {.cache = cache.id, .length = 8, .credits = 1}};
    struct dskv_request credit = {.op = DSKV_OP_CREDIT};
    credit.credit.request = local_send(&flooder, &export, NULL);
    credit.credit.n = 1;
    size_t before = bytes_in_use();
    int n_taken = 0, n_busy = 0;
    for (int i = 0; i < FLOOD; i++)
        if (local_send(&flooder, &credit, &error))
            n_taken++;
        else
            n_busy += error.code == DSKV_BUSY && error.limit == DSKV_MAX_QUEUED_FOLLOWERS;
    CU_ASSERT(n_taken >= DSKV_MAX_CREDITS && n_taken <= DSKV_MAX_QUEUED_FOLLOWERS);
    CU_ASSERT_EQUAL(n_taken + n_busy, FLOOD);
    CU_ASSERT(bytes_in_use() < before + MAX_GROWTH);
    fake_engine_allow(local.engine, -1);
    for (int last = 0; !last;) { /* those that were taken are enough for it to end */
        struct dskv_event event = local_wait(&flooder, credit.credit.request);
        last = event.last;
        CU_ASSERT_NOT_EQUAL(event.kind, DSKV_EVENT_ERROR);
        dskv_event_clear(&event);
    }
    end(id);
}

/* Parts beyond the credits: dropped, and the import ends once. */
static void parts_do_not_pile_up(void)
{
    begin();
    struct dskv_request import = {.op = DSKV_OP_IMPORT,
                                  .import_ = {.tokens = local_tokens(prompt, 8),
                                              .dtype = DSKV_F32,
                                              .n_layers = FAKE_LAYERS,
                                              .n_kv_heads = FAKE_KV_HEADS,
                                              .head_dim = FAKE_HEAD_DIM,
                                              .convert = 1}};
    struct dskv_event event;
    struct dskv_request part = {.op = DSKV_OP_PART, .part = {.part = {.stop = 8}}};
    static const float zeros[FAKE_KV_HEADS * 8 * FAKE_HEAD_DIM];
    part.part.part.data = (struct dskv_wire_tensor){.data = zeros,
                                                    .dtype = DSKV_F32,
                                                    .n_dims = 3,
                                                    .shape = {FAKE_KV_HEADS, 8, FAKE_HEAD_DIM},
                                                    .bytes = sizeof zeros};
    uint64_t id = hold_a_step(40);
    part.part.request = local_send(&flooder, &import, NULL);
    size_t before = bytes_in_use();
    for (int i = 0; i < FLOOD; i++)
        local_send(&flooder, &part, NULL);
    CU_ASSERT(bytes_in_use() < before + MAX_GROWTH);
    fake_engine_allow(local.engine, -1);
    do {
        event = local_wait(&flooder, part.part.request);
        if (!event.last)
            dskv_event_clear(&event);
    } while (!event.last);
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_ERROR);
    CU_ASSERT_EQUAL(event.error.code, DSKV_BAD_VALUE);
    dskv_event_clear(&event);
    end(id);
}

/* What was taken is done, what was refused is not. */
static void notes_do_not_pile_up(void)
{
    struct dskv_error error = {0};
    begin();
    struct dskv_cache_ref first = local_cache(&flooder, NULL, prompt, 8), late = local_cache(&flooder, NULL, prompt, 7);
    uint64_t id = hold_a_step(40);
    struct dskv_request note = {.op = DSKV_OP_PING, .n_free = 1, .free = &first.id};
    size_t before = bytes_in_use();
    int n_taken = 0, n_busy = 0;
    for (int i = 0; i < FLOOD; i++)
        if (!dskv_server_note(local.server, &note, &error))
            n_taken++;
        else
            n_busy += error.code == DSKV_BUSY && error.limit == DSKV_MAX_QUEUED_NOTES;
    CU_ASSERT_EQUAL(n_taken, DSKV_MAX_QUEUED_NOTES);
    CU_ASSERT_EQUAL(n_taken + n_busy, FLOOD);
    note.free = &late.id;
    CU_ASSERT_EQUAL(dskv_server_note(local.server, &note, &error), DSKV_BUSY);
    CU_ASSERT(bytes_in_use() < before + MAX_GROWTH);
    struct dskv_event event = release(id);
    dskv_event_clear(&event);
    struct dskv_request is_there = {.op = DSKV_OP_FREE, .free_caches = {.n = 1, .caches = &first.id}};
    event = local_call(&flooder, &is_there);
    CU_ASSERT_EQUAL(event.free_caches.n_freed, 0);
    dskv_event_clear(&event);
    is_there.free_caches.caches = &late.id;
    event = local_call(&flooder, &is_there);
    CU_ASSERT_EQUAL(event.free_caches.n_freed, 1);
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(dskv_server_note(local.server, &note, &error), DSKV_OK); /* there is room again */
    local_close(&local);
}

/* Many ids are many bytes, wherever they wait. */
static void lists_of_ids_are_counted(void)
{
    static struct dskv_id ids[DSKV_MAX_FREE_IDS];
    struct dskv_error error = {0};
    begin();
    uint64_t id = hold_a_step(40);
    struct dskv_request request = {.op = DSKV_OP_FREE,
                                   .n_free = DSKV_MAX_FREE_IDS,
                                   .free = ids,
                                   .free_caches = {.n = DSKV_MAX_FREE_IDS, .caches = ids}};
    int n_taken = 0;
    while (local_send(&flooder, &request, &error))
        n_taken++;
    CU_ASSERT_EQUAL(error.code, DSKV_BUSY);
    CU_ASSERT(n_taken <= DSKV_MAX_QUEUED_BYTES / (2 * DSKV_MAX_FREE_IDS * (int)sizeof *ids));
    end(id);
}

/* ---- nobody is held up ------------------------------------------------------------------------------------------ */

/* Of 2000 requests that wait, few are answered before a generation of 100 steps ends. */
static void a_flood_does_not_hold_up_steps(void)
{
    enum { REQUESTS = 2000, STEPS = 100 };
    static struct dskv_id ids[1000];
    begin();
    uint64_t id = hold_a_step(STEPS);
    struct dskv_request request = {.op = DSKV_OP_FREE, .free_caches = {.n = 1000, .caches = ids}};
    for (int i = 0; i < REQUESTS; i++)
        CU_ASSERT(local_send(&flooder, &request, NULL) != 0);
    fake_engine_allow(local.engine, -1);
    while (!local_peek(&client, id))
        usleep(1000);
    int n_answered = 0;
    for (const struct local_event *e = local.events; e->event.op != DSKV_OP_GENERATE; e = e->next)
        n_answered++;
    printf("%d of %d answered before ... ", n_answered, REQUESTS);
    CU_ASSERT(n_answered < REQUESTS / 2);
    end(id);
}

int main(void)
{
    return dskv_run_tests("daemon.flood", (struct dskv_test[]){
                                              {"cancels do not pile up", cancels_do_not_pile_up},
                                              {"credits do not pile up", credits_do_not_pile_up},
                                              {"parts do not pile up", parts_do_not_pile_up},
                                              {"notes do not pile up", notes_do_not_pile_up},
                                              {"lists of ids are counted", lists_of_ids_are_counted},
                                              {"a flood does not hold up steps", a_flood_does_not_hold_up_steps},
                                              {NULL, NULL},
                                          });
}
