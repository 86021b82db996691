/* Every message there and back, and what its bytes are. */
#include "ipc/diag.h"
#include "ipc/make_message.h"
#include "support/cunit_suite.h"

#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_SEEDS 60

static void check_request(enum dskv_op op, enum make_how how, uint64_t seed)
{
    struct dskv_request made, read;
    struct dskv_frames frames, copy, again;
    struct dskv_error error = {0};
    make_request(&made, op, how, seed);
    CU_ASSERT_EQUAL_FATAL(dskv_request_encode(&made, &frames, &error), DSKV_OK);
    copy = copy_frames(&frames);
    if (dskv_request_decode(&frames, &read, &error)) {
        printf("%s, seed %llu: %s\n", dskv_op_name(op), (unsigned long long)seed, error.message);
        CU_FAIL_FATAL("decode");
    }
    CU_ASSERT_PTR_NULL(frames.frames);
    const char *differs = compare_fields(&dskv_request_envelope, &made, &read);
    if (!differs)
        differs = compare_fields(dskv_request_table(op), &made, &read);
    if (differs)
        printf("%s, seed %llu: %s\n", dskv_op_name(op), (unsigned long long)seed, differs);
    CU_ASSERT_PTR_NULL(differs);
    CU_ASSERT_EQUAL(dskv_request_encode(&read, &again, &error), DSKV_OK);
    CU_ASSERT(same_frames(&copy, &again));
    dskv_frames_clear(&copy);
    dskv_frames_clear(&again);
    dskv_request_clear(&made);
    dskv_request_clear(&read);
}

static void requests_come_back(void)
{
    for (int op = 0; op < DSKV_N_OPS; op++)
        for (uint64_t seed = 0; seed < N_SEEDS; seed++)
            check_request((enum dskv_op)op, seed < 10 ? MAKE_LEAST : seed < 30 ? MAKE_ALL : MAKE_SOME, seed);
}

static void check_event(enum dskv_event_kind kind, enum dskv_op op, enum make_how how, uint64_t seed)
{
    struct dskv_event made, read;
    struct dskv_frames frames, copy, again;
    struct dskv_error error = {0};
    make_event(&made, kind, op, how, seed);
    CU_ASSERT_EQUAL_FATAL(dskv_event_encode(&made, &frames, &error), DSKV_OK);
    copy = copy_frames(&frames);
    if (dskv_event_decode(&frames, &read, &error)) {
        printf("%s %s, seed %llu: %s\n", dskv_op_name(op), dskv_event_kind_name(kind), (unsigned long long)seed,
               error.message);
        CU_FAIL_FATAL("decode");
    }
    const char *differs = compare_fields(&dskv_event_envelope, &made, &read);
    if (!differs)
        differs = compare_fields(dskv_event_table(kind, op), &made, &read);
    if (differs)
        printf("%s %s, seed %llu: %s\n", dskv_op_name(op), dskv_event_kind_name(kind), (unsigned long long)seed,
               differs);
    CU_ASSERT_PTR_NULL(differs);
    CU_ASSERT_EQUAL(dskv_event_encode(&read, &again, &error), DSKV_OK);
    CU_ASSERT(same_frames(&copy, &again));
    dskv_frames_clear(&copy);
    dskv_frames_clear(&again);
    dskv_event_clear(&made);
    dskv_event_clear(&read);
}

static void events_come_back(void)
{
    int n = 0;
    for (int kind = 0; kind < DSKV_N_EVENT_KINDS; kind++)
        for (int op = 0; op < DSKV_N_OPS; op++) {
            if (!dskv_event_table((enum dskv_event_kind)kind, (enum dskv_op)op))
                continue;
            n++;
            for (uint64_t seed = 0; seed < N_SEEDS; seed++)
                check_event((enum dskv_event_kind)kind, (enum dskv_op)op,
                            seed < 10   ? MAKE_LEAST
                            : seed < 30 ? MAKE_ALL
                                        : MAKE_SOME,
                            seed);
        }
    CU_ASSERT_EQUAL(n, 11 + 14 + 2 + 4); /* results, errors, begins, and the other four kinds */
}

/* Written and read by the same tables, a value in the wrong member would come back all the same: so here by hand. */
static void fields_mean_what_they_say(void)
{
    struct dskv_frames frames = diag_message(
        "{\"v\": 1, \"id\": 9, \"op\": \"generate\", \"deadline_ms\": 250, \"session\": "
        "h'000102030405060708090a0b0c0d0e0f', "
        "\"free\": [h'101112131415161718191a1b1c1d1e1f'], \"prefix\": {\"cache\": h'202122232425262728292a2b2c2d2e2f', "
        "\"length\": 17, \"check\": 4000000000}, \"tokens\": {\"dtype\": \"i32\", \"shape\": [3], \"frame\": 1}, "
        "\"max_tokens\": "
        "5, \"temperature\": 0.5, \"top_k\": 40, \"top_p\": 0.75, \"min_p\": 0.125, \"seed\": 7, \"stop\": "
        "[{\"dtype\": "
        "\"i32\", \"shape\": [2], \"frame\": 2}], \"ignore_eos\": true, \"stream\": true, \"consume\": true}",
        2, (int[]){3, 2});
    struct dskv_request request;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_request_decode(&frames, &request, &error), DSKV_OK);
    const struct dskv_generate *g = &request.generate;
    CU_ASSERT(request.version == 1 && request.id == 9 && request.op == DSKV_OP_GENERATE && request.deadline_ms == 250);
    CU_ASSERT(request.has_session && request.session.bytes[15] == 0x0f);
    CU_ASSERT(request.n_free == 1 && request.free[0].bytes[0] == 0x10);
    CU_ASSERT(g->prefix.present && g->prefix.cache.bytes[1] == 0x21 && g->prefix.length == 17);
    CU_ASSERT(g->prefix.has_check && g->prefix.check == 4000000000u);
    CU_ASSERT(g->tokens.dtype == DSKV_I32 && g->tokens.n_dims == 1 && g->tokens.shape[0] == 3 && g->tokens.bytes == 12);
    CU_ASSERT(memcmp(g->tokens.data, (int32_t[]){0, 1, 2}, 12) == 0);
    CU_ASSERT(g->max_tokens == 5 && g->temperature == 0.5 && g->top_k == 40 && g->top_p == 0.75 && g->min_p == 0.125);
    CU_ASSERT(g->has_seed && g->seed == 7 && g->n_stops == 1 && g->stops[0].shape[0] == 2);
    CU_ASSERT(g->ignore_eos == 1 && g->stream == 1 && g->consume == 1);
    dskv_request_clear(&request);
}

static void what_is_left_out_has_its_default(void)
{
    struct dskv_frames frames = diag_message(
        "{\"v\": 1, \"id\": 9, \"op\": \"generate\", \"tokens\": {\"dtype\": \"i32\", \"shape\": [0], \"frame\": 1}}",
        1, (int[]){0});
    struct dskv_request request;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_request_decode(&frames, &request, &error), DSKV_OK);
    const struct dskv_generate *g = &request.generate;
    CU_ASSERT(!request.has_session && request.n_free == 0 && request.deadline_ms == 0);
    CU_ASSERT(!g->prefix.present && !g->has_seed && g->n_stops == 0);
    CU_ASSERT(g->max_tokens == 128 && g->temperature == 0 && g->top_k == 0 && g->top_p == 1 && g->min_p == 0);
    CU_ASSERT(!g->ignore_eos && !g->stream && !g->consume);
    CU_ASSERT(g->tokens.data && g->tokens.bytes == 0);
    dskv_request_clear(&request);
    frames = diag_message("{\"v\": 1, \"id\": 9, \"op\": \"export\", \"length\": 2, \"cache\": "
                          "h'202122232425262728292a2b2c2d2e2f'}",
                          0, NULL);
    CU_ASSERT_EQUAL_FATAL(dskv_request_decode(&frames, &request, &error), DSKV_OK);
    CU_ASSERT_EQUAL(request.export_.credits, 4);
    dskv_request_clear(&request);
}

static void wants_mean_what_they_say(void)
{
    struct dskv_frames frames = diag_message(
        "{\"v\": 1, \"id\": 1, \"op\": \"forward\", \"sequences\": [{\"tokens\": {\"dtype\": \"i32\", \"shape\": [3], "
        "\"frame\": 1}, \"want\": {\"logits\": [1, 3], \"logits_dtype\": \"f16\", \"argmax\": true, \"topk\": 5, "
        "\"score\": "
        "true}, \"consume\": true}, {\"tokens\": {\"dtype\": \"i32\", \"shape\": [1], \"frame\": 2}}]}",
        2, (int[]){3, 1});
    struct dskv_request request;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_request_decode(&frames, &request, &error), DSKV_OK);
    CU_ASSERT_EQUAL(request.forward.n, 2);
    const struct dskv_forward_sequence *s = request.forward.sequences;
    CU_ASSERT(s[0].want.logits_start == 1 && s[0].want.logits_stop == 3 && s[0].want.logits_dtype == DSKV_F16);
    CU_ASSERT(s[0].want.argmax == 1 && s[0].want.topk == 5 && s[0].want.score == 1 && s[0].consume == 1);
    CU_ASSERT(s[1].want.logits_stop == 0 && s[1].want.topk == 0 && !s[1].want.argmax && !s[1].consume);
    dskv_request_clear(&request);
}

static void no_tokens_need_no_pointer(void)
{
    struct dskv_request request = {.id = 1, .op = DSKV_OP_VERIFY}, read;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_request_encode(&request, &frames, &error), DSKV_OK);
    CU_ASSERT_EQUAL(frames.n, 3);
    CU_ASSERT_EQUAL_FATAL(dskv_request_decode(&frames, &read, &error), DSKV_OK);
    CU_ASSERT(read.verify.tokens.n_dims == 1 && read.verify.tokens.shape[0] == 0 && read.verify.tokens.data);
    dskv_request_clear(&read);
}

/* Frames need not start where numbers may: then they are copied. */
static void odd_addresses_are_aligned(void)
{
    struct dskv_frames frames = diag_message(
        "{\"v\": 1, \"id\": 1, \"op\": \"forward\", \"sequences\": [{\"tokens\": {\"dtype\": \"i32\", \"shape\": [3], "
        "\"frame\": 1}}]}",
        1, (int[]){3});
    char *block = dskv_calloc(64, 1), *taken = frames.frames[1].data;
    struct dskv_request request;
    struct dskv_error error = {0};
    memcpy(block + 1, taken, 12);
    frames.frames[1].data = block + 1;
    CU_ASSERT_EQUAL_FATAL(dskv_request_decode(&frames, &request, &error), DSKV_OK);
    const struct dskv_wire_tensor *tokens = &request.forward.sequences[0].tokens;
    CU_ASSERT_EQUAL((uintptr_t)tokens->data % sizeof(int64_t), 0);
    CU_ASSERT(memcmp(tokens->data, taken, 12) == 0);
    /* The frame's address is not malloc's own: give that back before all is freed. */
    struct dskv_frames *held = (struct dskv_frames *)dskv_message_memory_frames(request.memory);
    held->frames[1].data = block;
    dskv_request_clear(&request);
    free(taken);
}

static void bytes_of_numbers_are_not_judged(void)
{
    uint32_t bits[] = {0x7fc00001, 0xff800000, 0x7f800000, 0x80000000};
    struct dskv_forward_result result = {.scores = {bits, DSKV_F32, 1, {4}, sizeof bits}};
    struct dskv_event event = {.id = 1, .op = DSKV_OP_FORWARD, .forward = {1, &result}}, read;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_event_encode(&event, &frames, &error), DSKV_OK);
    CU_ASSERT_EQUAL_FATAL(dskv_event_decode(&frames, &read, &error), DSKV_OK);
    CU_ASSERT(memcmp(read.forward.sequences[0].scores.data, bits, sizeof bits) == 0);
    CU_ASSERT(!read.forward.sequences[0].cache.present && read.last);
    dskv_event_clear(&read);
}

static void sentences_become_utf8(void)
{
    struct dskv_event event = {.id = 1, .kind = DSKV_EVENT_ERROR, .op = DSKV_OP_PING}, read;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    dskv_fail(&event.error, DSKV_INTERNAL, "%s", "\xc3\xa4 \xff cut: \xe2\x82");
    CU_ASSERT_EQUAL_FATAL(dskv_event_encode(&event, &frames, &error), DSKV_OK);
    CU_ASSERT_EQUAL_FATAL(dskv_event_decode(&frames, &read, &error), DSKV_OK);
    CU_ASSERT_STRING_EQUAL(read.error.message, "\xc3\xa4 ? cut: ??");
    dskv_event_clear(&read);
}

static void clients_pass_over_what_is_new(void)
{
    struct dskv_frames frames =
        diag_message("{\"id\": 4, \"kind\": \"tokens\", \"last\": false, \"op\": \"generate\", \"tokens\": {\"dtype\": "
                     "\"i32\", \"shape\": [2], "
                     "\"frame\": 2}, \"news\": {\"dtype\": \"i32\", \"shape\": [5], \"frame\": 1}}",
                     2, (int[]){5, 2});
    struct dskv_event event;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_event_decode(&frames, &event, &error), DSKV_OK);
    CU_ASSERT(event.tokens.shape[0] == 2 && ((const int32_t *)event.tokens.data)[1] == 1);
    dskv_event_clear(&event);
    frames = diag_message(
        "{\"id\": 4, \"kind\": \"error\", \"last\": true, \"code\": \"tired\", \"message\": \"no\", \"details\": {}}",
        0, NULL);
    CU_ASSERT_EQUAL_FATAL(dskv_event_decode(&frames, &event, &error), DSKV_OK);
    CU_ASSERT(event.error.code == DSKV_INTERNAL && event.op == DSKV_N_OPS);
    dskv_event_clear(&event);
}

static void too_much_is_not_written(void)
{
    struct dskv_request request = {.id = 1, .op = DSKV_OP_CREDIT, .credit = {5, DSKV_MAX_CREDITS + 1}};
    struct dskv_frames frames;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL(dskv_request_encode(&request, &frames, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.field, "n");
    CU_ASSERT_STRING_EQUAL(error.valid, "1 .. 16");
    void *large = dskv_calloc(DSKV_MAX_FRAME_BYTES + 4, 1);
    struct dskv_request verify = {.id = 1, .op = DSKV_OP_VERIFY};
    verify.verify.tokens =
        (struct dskv_wire_tensor){large, DSKV_I32, 1, {DSKV_MAX_FRAME_BYTES / 4 + 1}, DSKV_MAX_FRAME_BYTES + 4};
    CU_ASSERT_EQUAL(dskv_request_encode(&verify, &frames, &error), DSKV_BAD_VALUE);
    CU_ASSERT_EQUAL(error.limit, DSKV_MAX_FRAME_BYTES);
    free(large);
    void *frame = dskv_calloc(DSKV_MAX_FRAME_BYTES, 1);
    struct dskv_forward_sequence sequences[5] = {0};
    for (int i = 0; i < 5; i++)
        sequences[i].tokens =
            (struct dskv_wire_tensor){frame, DSKV_I32, 1, {DSKV_MAX_FRAME_BYTES / 4}, DSKV_MAX_FRAME_BYTES};
    struct dskv_request forward = {.id = 1, .op = DSKV_OP_FORWARD, .forward = {5, sequences}};
    CU_ASSERT_EQUAL(dskv_request_encode(&forward, &frames, &error), DSKV_BAD_VALUE);
    CU_ASSERT_EQUAL(error.limit, DSKV_MAX_REQUEST_BYTES);
    CU_ASSERT_PTR_NULL(frames.frames);
    free(frame);
}

static void the_largest_result_fits(void)
{
    static struct dskv_forward_result results[DSKV_MAX_SEQUENCES_PER_REQUEST];
    int32_t value = 1;
    struct dskv_wire_tensor one = {&value, DSKV_I32, 1, {1}, 4}, two = {&value, DSKV_I32, 2, {1, 1}, 4};
    struct dskv_wire_tensor floats = {&value, DSKV_F32, 2, {1, 1}, 4}, scores = {&value, DSKV_F32, 1, {1}, 4};
    for (int i = 0; i < DSKV_MAX_SEQUENCES_PER_REQUEST; i++) {
        results[i] = (struct dskv_forward_result){{1, {{0}}, 1 << 24, "0123456789abcdef0123456789abcdef"},
                                                  1 << 24,
                                                  1 << 24,
                                                  floats,
                                                  one,
                                                  two,
                                                  floats,
                                                  scores};
    }
    struct dskv_event event = {.id = INT64_MAX,
                               .op = DSKV_OP_FORWARD,
                               .forward = {DSKV_MAX_SEQUENCES_PER_REQUEST, results}},
                      read;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_event_encode(&event, &frames, &error), DSKV_OK);
    CU_ASSERT_EQUAL(frames.n, 1 + 5 * DSKV_MAX_SEQUENCES_PER_REQUEST);
    CU_ASSERT_EQUAL(dskv_event_decode(&frames, &read, &error), DSKV_OK);
    dskv_event_clear(&read);
}

static void the_check_is_zlibs(void)
{
    /* zlib.crc32 of the same bytes */
    CU_ASSERT_EQUAL(dskv_tokens_check(0, NULL, 0), 0);
    CU_ASSERT_EQUAL(dskv_tokens_check(0, (int32_t[]){0, 1, 2}, 3), 0x1d760e7au);
    uint32_t first = dskv_tokens_check(0, (int32_t[]){0}, 1);
    CU_ASSERT_EQUAL(dskv_tokens_check(first, (int32_t[]){1, 2}, 2), 0x1d760e7au);
}

int main(void)
{
    return dskv_run_tests("ipc.codec", (struct dskv_test[]){
                                           {"requests come back", requests_come_back},
                                           {"events come back", events_come_back},
                                           {"fields mean what they say", fields_mean_what_they_say},
                                           {"what is left out has its default", what_is_left_out_has_its_default},
                                           {"wants mean what they say", wants_mean_what_they_say},
                                           {"no tokens need no pointer", no_tokens_need_no_pointer},
                                           {"odd addresses are aligned", odd_addresses_are_aligned},
                                           {"bytes of numbers are not judged", bytes_of_numbers_are_not_judged},
                                           {"sentences become UTF-8", sentences_become_utf8},
                                           {"clients pass over what is new", clients_pass_over_what_is_new},
                                           {"too much is not written", too_much_is_not_written},
                                           {"the largest result fits", the_largest_result_fits},
                                           {"the check is zlib's", the_check_is_zlibs},
                                           {NULL, NULL},
                                       });
}
