/* Export and import over the fake engine: what goes out, what comes in, and everything that can be wrong with it. */
#include "sim/local.h"
#include "sim/reference.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <poll.h>
#include <string.h>

#define N 45 /* tokens; parts of 8, blocks of 16 */
#define N_PARTS (2 * FAKE_LAYERS * 6)

static struct local local;
static struct local_client client;
static int32_t tokens[N];
static struct reference reference;

static void begin(const struct fake_engine_options *options, int32_t lease_s)
{
    local_open(&local, options, lease_s);
    local_connect(&local, 1, &client);
    for (int32_t i = 0; i < N; i++)
        tokens[i] = 8 + i * 7 % 40;
    reference_append(&reference, tokens, N);
}

static void finish(void)
{
    reference_free(&reference);
    local_close(&local);
}

static struct dskv_event forward(const struct dskv_cache_ref *prefix, int32_t length, const int32_t *ids, int32_t n)
{
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(ids, n), .want = {.logits_stop = n ? n : 1}};
    if (prefix)
        sequence.prefix = local_prefix(prefix, length);
    struct dskv_event event =
        local_call(&client, &(struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {1, &sequence}});
    if (event.kind != DSKV_EVENT_RESULT)
        CU_FAIL_FATAL(event.error.message);
    return event;
}

static struct dskv_cache_ref make_cache(const struct dskv_cache_ref *prefix, int32_t length, const int32_t *ids,
                                        int32_t n)
{
    struct dskv_event event = forward(prefix, length, ids, n);
    struct dskv_cache_ref cache = event.forward.sequences[0].cache;
    dskv_event_clear(&event);
    return cache;
}

static void an_export_is_what_was_stored(void)
{
    int32_t out[N];
    struct fake_kv kv[N];
    begin(&(struct fake_engine_options){0}, 0);
    struct dskv_cache_ref cache = make_cache(NULL, 0, tokens, N);
    for (int32_t length = 0; length <= N; length += 9) {
        memset(kv, 0, sizeof kv);
        CU_ASSERT_EQUAL(local_export(&client, &cache.id, length, out, kv), DSKV_OK);
        CU_ASSERT_EQUAL(memcmp(out, tokens, (size_t)length * sizeof *out), 0);
        CU_ASSERT_EQUAL(memcmp(kv, reference.kv, (size_t)length * sizeof *kv), 0);
    }
    CU_ASSERT_EQUAL(local_export(&client, &cache.id, N + 1, out, kv), DSKV_CUT_PAST_END);
    cache.id.bytes[0] ^= 1;
    CU_ASSERT_EQUAL(local_export(&client, &cache.id, N, out, kv), DSKV_UNKNOWN_CACHE);
    finish();
}

static void an_export_describes_itself_and_waits_for_credit(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    struct dskv_cache_ref cache = make_cache(NULL, 0, tokens, N);
    struct dskv_request request = {.op = DSKV_OP_EXPORT, .export_ = {.cache = cache.id, .length = N, .credits = 3}};
    uint64_t id = local_send(&client, &request, NULL);
    struct dskv_event event = local_wait(&client, id);
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_BEGIN);
    CU_ASSERT_EQUAL(event.export_begin.n_parts, N_PARTS);
    CU_ASSERT_EQUAL(event.export_begin.n_layers, FAKE_LAYERS);
    CU_ASSERT_EQUAL(event.export_begin.length, N);
    CU_ASSERT_STRING_EQUAL(event.export_begin.model, dskv_engine_info(local.engine)->model.fingerprint);
    CU_ASSERT_STRING_EQUAL(event.export_begin.origin, cache.origin);
    dskv_event_clear(&event);
    /* The cache may go, its blocks be wanted by others: what is exported does not change. */
    struct dskv_event freed =
        local_call(&client, &(struct dskv_request){.op = DSKV_OP_FREE, .free_caches = {.all = 1}});
    dskv_event_clear(&freed);
    make_cache(NULL, 0, (int32_t[N]){[0 ... N - 1] = 9}, N);
    int n_parts = 0, credits = 3, wrong = 0;
    for (; n_parts < N_PARTS; n_parts++) {
        if (credits == 0) {
            poll(NULL, 0, 2);
            CU_ASSERT_EQUAL(local_peek(&client, id), 0);
            local_send(&client, &(struct dskv_request){.op = DSKV_OP_CREDIT, .credit = {.request = id, .n = 5}}, NULL);
            credits = 5;
        }
        event = local_wait(&client, id);
        credits--;
        CU_ASSERT_EQUAL_FATAL(event.kind, DSKV_EVENT_PART);
        CU_ASSERT_EQUAL(event.part.layer, n_parts / 12);
        CU_ASSERT_EQUAL(event.part.is_value, n_parts / 6 % 2);
        CU_ASSERT_EQUAL(event.part.start, n_parts % 6 * 8);
        const float *next = event.part.data.data;
        for (int32_t head = 0; head < FAKE_KV_HEADS; head++)
            for (int32_t i = event.part.start; i < event.part.stop; i++, next += FAKE_HEAD_DIM)
                wrong += memcmp(next, reference.kv[i].values[event.part.layer][event.part.is_value][head],
                                FAKE_HEAD_DIM * sizeof *next) != 0;
        dskv_event_clear(&event);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    event = local_wait(&client, id);
    CU_ASSERT_EQUAL(event.kind, DSKV_EVENT_RESULT);
    dskv_event_clear(&event);
    struct dskv_error error;
    CU_ASSERT_EQUAL(
        local_send(&client, &(struct dskv_request){.op = DSKV_OP_CREDIT, .credit = {.request = id, .n = 1}}, &error),
        0);
    CU_ASSERT_EQUAL(error.code, DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "request");
    finish();
}

static void an_import_is_continued_as_given(void)
{
    int32_t out[N];
    struct fake_kv kv[N], back[N];
    struct reference changed = {0};
    struct dskv_cache_ref cache;
    begin(&(struct fake_engine_options){0}, 0);
    memcpy(kv, reference.kv, sizeof kv);
    CU_ASSERT_EQUAL_FATAL(local_import(&client, tokens, N, kv, -1, &cache, NULL), DSKV_OK);
    CU_ASSERT_STRING_EQUAL(cache.origin, "foreign");
    CU_ASSERT_EQUAL(cache.length, N);
    CU_ASSERT_EQUAL(local_export(&client, &cache.id, N, out, back), DSKV_OK);
    CU_ASSERT_EQUAL(memcmp(out, tokens, sizeof out) | memcmp(back, kv, sizeof kv), 0);
    memset(kv[20].values[1], 0, sizeof kv[20].values[1]); /* one layer of one token */
    CU_ASSERT_EQUAL_FATAL(local_import(&client, tokens, N, kv, -1, &cache, NULL), DSKV_OK);
    for (int32_t i = 0; i < N; i++)
        reference_append_stored(&changed, tokens[i], &kv[i]);
    for (int32_t length = N; length > 10; length -= 15) { /* the last one before the change */
        float row[FAKE_VOCAB];
        struct reference r = reference_of(&changed, length);
        reference_append(&r, tokens, 1);
        reference_row(&r, length, row);
        struct dskv_event event = forward(&cache, length, tokens, 1);
        CU_ASSERT_EQUAL(memcmp(event.forward.sequences[0].logits.data, row, sizeof row), 0);
        CU_ASSERT_STRING_EQUAL(event.forward.sequences[0].cache.origin, "foreign"); /* inherited */
        dskv_event_clear(&event);
        reference_free(&r);
    }
    struct dskv_event event = forward(&cache, 0, tokens, 1);
    CU_ASSERT_STRING_EQUAL(event.forward.sequences[0].cache.origin, dskv_engine_info(local.engine)->numerics_id);
    dskv_event_clear(&event);
    reference_free(&changed);
    finish();
}

static void an_empty_cache_travels_too(void)
{
    struct dskv_cache_ref cache;
    begin(&(struct fake_engine_options){0}, 0);
    CU_ASSERT_EQUAL_FATAL(local_import(&client, tokens, 0, NULL, -1, &cache, NULL), DSKV_OK);
    CU_ASSERT_EQUAL(cache.length, 0);
    CU_ASSERT_EQUAL(local_export(&client, &cache.id, 0, tokens, NULL), DSKV_OK);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, 0);
    struct dskv_cache_ref longer = make_cache(&cache, 0, tokens, 20);
    CU_ASSERT_EQUAL(longer.length, 20);
    finish();
}

/* ---- what can be wrong ------------------------------------------------------------------------------------------ */

static const struct dskv_import right = {
    .dtype = DSKV_F32, .n_layers = FAKE_LAYERS, .n_kv_heads = FAKE_KV_HEADS, .head_dim = FAKE_HEAD_DIM};

static uint64_t begin_import(struct dskv_import import)
{
    import.tokens = local_tokens(tokens, N);
    return local_send(&client, &(struct dskv_request){.op = DSKV_OP_IMPORT, .import_ = import}, NULL);
}

/* The last event of a request, as an error. */
static struct dskv_error error_of(uint64_t id)
{
    struct dskv_event event = local_wait(&client, id);
    while (!event.last) {
        dskv_event_clear(&event);
        event = local_wait(&client, id);
    }
    struct dskv_error error = {.code = DSKV_OK};
    if (event.kind == DSKV_EVENT_ERROR)
        error = event.error;
    dskv_event_clear(&event);
    return error;
}

static void strangers_are_refused_at_once(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    struct dskv_import layers = right, heads = right, dim = right, dtype = right, model = right;
    layers.n_layers++;
    heads.n_kv_heads = 1;
    dim.head_dim = 64;
    dtype.dtype = DSKV_F16;
    strcpy(model.model, "0123");
    const struct {
        struct dskv_import import;
        enum dskv_code code;
        const char *field, *valid;
    } cases[] = {
        {layers, DSKV_WRONG_SHAPE, "n_layers", "2"},
        {heads, DSKV_WRONG_SHAPE, "n_kv_heads", "2"},
        {dim, DSKV_WRONG_SHAPE, "head_dim", "2"},
        {dtype, DSKV_WRONG_DTYPE, "dtype", "f32"},
        {model, DSKV_WRONG_MODEL, "model", dskv_engine_info(local.engine)->model.fingerprint},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dskv_error error = error_of(begin_import(cases[i].import));
        CU_ASSERT_EQUAL(error.code, cases[i].code);
        CU_ASSERT_STRING_EQUAL(error.field, cases[i].field);
        CU_ASSERT_STRING_EQUAL(error.valid, cases[i].valid);
    }
    tokens[7] = FAKE_VOCAB;
    struct dskv_error error = error_of(begin_import(right));
    CU_ASSERT_EQUAL(error.code, DSKV_TOKEN_OUT_OF_RANGE);
    CU_ASSERT_EQUAL(error.index, 7);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, 0);
    finish();
}

/* Sends one part; data of zeros but for the value at `bad` (-1: none). */
static void send_part(uint64_t id, struct dskv_part part, int32_t n_heads, int bad, float value)
{
    static float data[FAKE_KV_HEADS * N * FAKE_HEAD_DIM];
    int32_t n = part.stop > part.start ? part.stop - part.start : 1;
    memset(data, 0, sizeof data);
    if (bad >= 0)
        data[bad] = value;
    part.data = (struct dskv_wire_tensor){.data = data,
                                          .dtype = DSKV_F32,
                                          .n_dims = 3,
                                          .shape = {n_heads, n, FAKE_HEAD_DIM},
                                          .bytes = (size_t)(n_heads * n * FAKE_HEAD_DIM) * sizeof *data};
    local_send(&client, &(struct dskv_request){.op = DSKV_OP_PART, .part = {.request = id, .part = part}}, NULL);
}

static void a_wrong_part_ends_its_import_alone(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    struct dskv_cache_ref canary = make_cache(NULL, 0, tokens, N);
    const struct {
        struct dskv_part part;
        int32_t n_heads;
        int bad;
        enum dskv_code code;
        const char *field;
        int64_t index;
    } cases[] = {
        {{.layer = 2, .start = 0, .stop = 8}, 2, -1, DSKV_BAD_VALUE, "layer", 0},
        {{.layer = 0, .start = 40, .stop = 46}, 2, -1, DSKV_BAD_VALUE, "stop", 0},
        {{.layer = 0, .start = 0, .stop = 9}, 2, -1, DSKV_BAD_VALUE, "stop", 0},
        {{.layer = 1, .start = 10, .stop = 12}, 2, -1, DSKV_BAD_VALUE, "start", 10},
        {{.layer = 1, .start = 14, .stop = 17}, 2, -1, DSKV_BAD_VALUE, "start", 14},
        {{.layer = 0, .start = 0, .stop = 8}, 1, -1, DSKV_WRONG_SHAPE, "data", 0},
        {{.layer = 0, .start = 0, .stop = 8}, 2, 21, DSKV_NOT_FINITE, "data", 21},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t id = begin_import(right);
        send_part(id, (struct dskv_part){.layer = 1, .start = 8, .stop = 16}, 2, -1, 0);
        send_part(id, (struct dskv_part){.layer = 1, .is_value = 1, .start = 8, .stop = 16}, 2, -1, 0);
        send_part(id, cases[i].part, cases[i].n_heads, cases[i].bad, i % 2 ? INFINITY : NAN);
        struct dskv_error error = error_of(id);
        CU_ASSERT_EQUAL(error.code, cases[i].code);
        CU_ASSERT_STRING_EQUAL(error.field, cases[i].field);
        CU_ASSERT_EQUAL(error.index, cases[i].index);
        int32_t out[N];
        struct fake_kv kv[N];
        CU_ASSERT_EQUAL(local_export(&client, &canary.id, N, out, kv), DSKV_OK);
        CU_ASSERT_EQUAL(memcmp(kv, reference.kv, sizeof kv), 0);
        CU_ASSERT_EQUAL(local_stats(&local).blocks_used, 3);
        CU_ASSERT_EQUAL(local_stats(&local).caches, 1);
    }
    finish();
}

static void a_commit_wants_every_part(void)
{
    struct dskv_cache_ref cache;
    begin(&(struct fake_engine_options){0}, 0);
    for (int skip = 0; skip < N_PARTS; skip += 5) {
        struct dskv_error error;
        CU_ASSERT_EQUAL(local_import(&client, tokens, N, reference.kv, skip, &cache, &error), DSKV_BAD_VALUE);
        CU_ASSERT_STRING_EQUAL(error.field, "part");
        CU_ASSERT_EQUAL(error.index, skip % 6 * 8);
        CU_ASSERT_EQUAL(local_stats(&local).blocks_used, 0);
    }
    finish();
}

static void parts_beyond_the_credits_are_not_kept(void)
{
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 0); /* the engine thread is busy: no part is taken in */
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(tokens, N)};
    uint64_t busy = local_send(&client, &(struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {1, &sequence}}, NULL);
    fake_engine_await_step(local.engine);
    uint64_t id = begin_import(right);
    for (int32_t i = 0; i < 9; i++)
        send_part(id, (struct dskv_part){.start = i, .stop = i + 1}, 2, -1, 0);
    fake_engine_allow(local.engine, -1);
    struct dskv_error error = error_of(id);
    CU_ASSERT_EQUAL(error.code, DSKV_BAD_VALUE);
    CU_ASSERT_EQUAL(error.limit, 8);
    CU_ASSERT_EQUAL(error_of(busy).code, DSKV_OK);
    finish();
}

static void an_import_needs_its_blocks_from_the_start(void)
{
    struct dskv_cache_ref cache;
    struct dskv_error error;
    begin(&(struct fake_engine_options){.n_blocks = 5}, 0);
    CU_ASSERT_EQUAL(local_import(&client, tokens, N, reference.kv, -1, &cache, &error), DSKV_OK);
    CU_ASSERT_EQUAL(local_import(&client, tokens, N, reference.kv, -1, &cache, &error), DSKV_POOL_FULL);
    CU_ASSERT_EQUAL(error.needed, 3);
    CU_ASSERT_EQUAL(error.free, 2);
    finish();
}

static void an_unfinished_import_holds_nothing_for_long(void)
{
    begin(&(struct fake_engine_options){0}, 1);
    uint64_t stalled = begin_import(right), cancelled = begin_import(right);
    uint64_t exported = 0;
    struct dskv_event event = local_wait(&client, stalled);
    dskv_event_clear(&event);
    event = local_wait(&client, cancelled);
    dskv_event_clear(&event);
    CU_ASSERT_EQUAL(local_stats(&local).blocks_used, 6);
    CU_ASSERT_EQUAL(dskv_server_cancel(local.server, &client.route, cancelled), 1);
    CU_ASSERT_EQUAL(error_of(cancelled).code, DSKV_CANCELLED);
    struct dskv_cache_ref cache = make_cache(NULL, 0, tokens, N);
    exported = local_send(
        &client,
        &(struct dskv_request){.op = DSKV_OP_EXPORT, .export_ = {.cache = cache.id, .length = N, .credits = 1}}, NULL);
    CU_ASSERT_EQUAL(error_of(stalled).code, DSKV_DEADLINE); /* silent for a lease */
    CU_ASSERT_EQUAL(error_of(exported).code, DSKV_DEADLINE);
    finish();
}

static void other_dtypes_are_converted_when_asked(void)
{
    begin(&(struct fake_engine_options){.kv_dtype = DSKV_F16}, 0);
    struct dskv_cache_ref cache;
    struct dskv_error error;
    CU_ASSERT_EQUAL_FATAL(local_import(&client, tokens, N, reference.kv, -1, &cache, &error),
                          DSKV_OK); /* f32, converted */
    float row[FAKE_VOCAB];
    struct reference r = reference_of(&reference, N);
    reference_append(&r, tokens, 1);
    reference_row(&r, N, row);
    struct dskv_event event = forward(&cache, N, tokens, 1); /* the fake model's values are exact in f16 */
    CU_ASSERT_EQUAL(memcmp(event.forward.sequences[0].logits.data, row, sizeof row), 0);
    dskv_event_clear(&event);
    struct dskv_import import = right;
    import.convert = 1;
    uint64_t id = begin_import(import);
    send_part(id, (struct dskv_part){.start = 0, .stop = 8}, 2, 3, 1e6f); /* finite, but not in f16 */
    error = error_of(id);
    CU_ASSERT_EQUAL(error.code, DSKV_NOT_FINITE);
    CU_ASSERT_EQUAL(error.index, 3);
    reference_free(&r);
    finish();
}

static void followers_of_nothing_are_refused(void)
{
    struct dskv_error error;
    begin(&(struct fake_engine_options){0}, 0);
    fake_engine_allow(local.engine, 0);
    struct dskv_forward_sequence sequence = {.tokens = local_tokens(tokens, N)};
    uint64_t forwarding =
        local_send(&client, &(struct dskv_request){.op = DSKV_OP_FORWARD, .forward = {1, &sequence}}, NULL);
    for (uint64_t request = forwarding; request < forwarding + 2; request++) { /* not an import, and nothing at all */
        CU_ASSERT_EQUAL(
            local_send(&client, &(struct dskv_request){.op = DSKV_OP_COMMIT, .commit = {.request = request}}, &error),
            0);
        CU_ASSERT_EQUAL(error.code, DSKV_BAD_VALUE);
        CU_ASSERT_STRING_EQUAL(error.field, "request");
    }
    fake_engine_allow(local.engine, -1);
    CU_ASSERT_EQUAL(error_of(forwarding).code, DSKV_OK);
    finish();
}

int main(void)
{
    return dskv_run_tests(
        "daemon.transfer",
        (struct dskv_test[]){
            {"an export is what was stored", an_export_is_what_was_stored},
            {"an export describes itself and waits for credit", an_export_describes_itself_and_waits_for_credit},
            {"an import is continued as given", an_import_is_continued_as_given},
            {"an empty cache travels too", an_empty_cache_travels_too},
            {"strangers are refused at once", strangers_are_refused_at_once},
            {"a wrong part ends its import alone", a_wrong_part_ends_its_import_alone},
            {"a commit wants every part", a_commit_wants_every_part},
            {"parts beyond the credits are not kept", parts_beyond_the_credits_are_not_kept},
            {"an import needs its blocks from the start", an_import_needs_its_blocks_from_the_start},
            {"an unfinished import holds nothing for long", an_unfinished_import_holds_nothing_for_long},
            {"other dtypes are converted when asked", other_dtypes_are_converted_when_asked},
            {"followers of nothing are refused", followers_of_nothing_are_refused},
            {NULL, NULL},
        });
}
