/* Every way in which a message is refused: the code, the field and the entry that the error names. */
#include "base/memory.h"
#include "ipc/diag.h"
#include "ipc/make_message.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define ID "h'000102030405060708090a0b0c0d0e0f'"
#define T(frame, n) "{\"dtype\": \"i32\", \"shape\": [" #n "], \"frame\": " #frame "}"
#define T1 T(1, 3)
#define HEAD(op) "{\"v\": 1, \"id\": 5, \"op\": \"" op "\""
#define SEQUENCE(fields) HEAD("forward") ", \"sequences\": [{\"tokens\": " T1 "}, {\"tokens\": " T(2, 3) fields "}]}"
#define GENERATE(fields) HEAD("generate") ", \"tokens\": " T1 fields "}"
#define PART(fields) HEAD("part") ", \"request\": 4, " fields "}"
#define DATA(shape) "\"data\": {\"dtype\": \"f32\", \"shape\": " shape ", \"frame\": 1}"

struct refusal {
    const char *header;
    int n_frames; /* of three ids each */
    enum dskv_code code;
    const char *field;
    int index;
};

static const struct refusal refusals[] = {
    /* the envelope */
    {"{\"id\": 5, \"op\": \"ping\"}", 0, DSKV_BAD_VALUE, "v", -1},
    {"{\"v\": 2, \"id\": 5, \"op\": \"dance\", \"new\": 1}", 0, DSKV_VERSION_MISMATCH, "v", -1},
    {"{\"v\": \"1\", \"id\": 5, \"op\": \"ping\"}", 0, DSKV_BAD_TYPE, "v", -1},
    {"{\"v\": true, \"id\": 5, \"op\": \"ping\"}", 0, DSKV_BAD_TYPE, "v", -1},
    {"{\"v\": 1.0, \"id\": 5, \"op\": \"ping\"}", 0, DSKV_BAD_TYPE, "v", -1},
    {"{\"v\": 1, \"op\": \"ping\"}", 0, DSKV_BAD_VALUE, "id", -1},
    {"{\"v\": 1, \"id\": 0, \"op\": \"ping\"}", 0, DSKV_BAD_VALUE, "id", -1},
    {"{\"v\": 1, \"id\": -5, \"op\": \"ping\"}", 0, DSKV_BAD_VALUE, "id", -1},
    {"{\"v\": 1, \"id\": 9223372036854775808, \"op\": \"ping\"}", 0, DSKV_BAD_VALUE, "id", -1},
    {"{\"v\": 1, \"id\": \"5\", \"op\": \"ping\"}", 0, DSKV_BAD_TYPE, "id", -1},
    {"{\"v\": 1, \"id\": 5}", 0, DSKV_BAD_VALUE, "op", -1},
    {"{\"v\": 1, \"id\": 5, \"op\": 3}", 0, DSKV_BAD_TYPE, "op", -1},
    {HEAD("dance") "}", 0, DSKV_UNKNOWN_OPERATION, "op", -1},
    {HEAD("PING") "}", 0, DSKV_UNKNOWN_OPERATION, "op", -1},
    {HEAD("pin") "}", 0, DSKV_UNKNOWN_OPERATION, "op", -1},
    {HEAD("ping") ", \"speed\": 1}", 0, DSKV_UNKNOWN_FIELD, "speed", -1},
    {HEAD("ping") ", \"tokens\": 1}", 0, DSKV_UNKNOWN_FIELD, "tokens", -1},
    {HEAD("ping") ", \"id\": 5}", 0, DSKV_BAD_MESSAGE, "id", -1},
    {HEAD("ping") ", \"deadline_ms\": -1}", 0, DSKV_BAD_VALUE, "deadline_ms", -1},
    {HEAD("ping") ", \"deadline_ms\": 2147483648}", 0, DSKV_BAD_VALUE, "deadline_ms", -1},
    {HEAD("ping") ", \"deadline_ms\": nil}", 0, DSKV_BAD_TYPE, "deadline_ms", -1},
    {HEAD("ping") ", \"session\": \"0123456789abcdef\"}", 0, DSKV_BAD_TYPE, "session", -1},
    {HEAD("ping") ", \"session\": h'0001'}", 0, DSKV_BAD_VALUE, "session", -1},
    {HEAD("ping") ", \"free\": " ID "}", 0, DSKV_BAD_TYPE, "free", -1},
    {HEAD("ping") ", \"free\": [" ID ", 7]}", 0, DSKV_BAD_TYPE, "free", 1},
    {HEAD("ping") ", \"free\": [" ID ", " ID ", h'']}", 0, DSKV_BAD_VALUE, "free", 2},
    {HEAD("ping") "}", 1, DSKV_BAD_MESSAGE, "", -1},
    /* operations of single fields */
    {HEAD("hello") ", \"client\": 5}", 0, DSKV_BAD_TYPE, "client", -1},
    {HEAD("hello") ", \"client\": \"0123456789012345678901234567890123456789012345678901234567890123\"}", 0,
     DSKV_BAD_VALUE, "client", -1},
    {HEAD("hello") ", \"versions\": [1, 2, \"3\"]}", 0, DSKV_BAD_TYPE, "versions", 2},
    {HEAD("hello") ", \"versions\": [1, 3000000000]}", 0, DSKV_BAD_VALUE, "versions", 1},
    {HEAD("hello") ", \"versions\": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}", 0, DSKV_BAD_VALUE,
     "versions", -1},
    {HEAD("cancel") "}", 0, DSKV_BAD_VALUE, "request", -1},
    {HEAD("cancel") ", \"request\": 0}", 0, DSKV_BAD_VALUE, "request", -1},
    {HEAD("credit") ", \"request\": 4}", 0, DSKV_BAD_VALUE, "n", -1},
    {HEAD("credit") ", \"request\": 4, \"n\": 17}", 0, DSKV_BAD_VALUE, "n", -1},
    {HEAD("commit") ", \"request\": \"4\"}", 0, DSKV_BAD_TYPE, "request", -1},
    {HEAD("free") "}", 0, DSKV_BAD_VALUE, "caches", -1},
    {HEAD("free") ", \"all\": false}", 0, DSKV_BAD_VALUE, "caches", -1},
    {HEAD("free") ", \"all\": true, \"caches\": []}", 0, DSKV_BAD_VALUE, "caches", -1},
    {HEAD("free") ", \"all\": 1}", 0, DSKV_BAD_TYPE, "all", -1},
    {HEAD("export") ", \"length\": 3}", 0, DSKV_BAD_VALUE, "cache", -1},
    {HEAD("export") ", \"cache\": " ID ", \"length\": -1}", 0, DSKV_BAD_VALUE, "length", -1},
    {HEAD("export") ", \"cache\": " ID ", \"length\": 3, \"credits\": 0}", 0, DSKV_BAD_VALUE, "credits", -1},
    /* forward */
    {HEAD("forward") "}", 0, DSKV_BAD_VALUE, "sequences", -1},
    {HEAD("forward") ", \"sequences\": []}", 0, DSKV_BAD_VALUE, "sequences", -1},
    {HEAD("forward") ", \"sequences\": {}}", 0, DSKV_BAD_TYPE, "sequences", -1},
    {HEAD("forward") ", \"sequences\": [{\"tokens\": " T1 "}, 5]}", 1, DSKV_BAD_TYPE, "sequences", 1},
    {HEAD("forward") ", \"sequences\": [{}]}", 0, DSKV_BAD_VALUE, "tokens", 0},
    {SEQUENCE(", \"logits\": true"), 2, DSKV_UNKNOWN_FIELD, "logits", 1},
    {SEQUENCE(", \"consume\": nil"), 2, DSKV_BAD_TYPE, "consume", 1},
    {SEQUENCE(", \"consume\": true, \"consume\": true"), 2, DSKV_BAD_MESSAGE, "consume", 1},
    {SEQUENCE(", \"prefix\": " ID), 2, DSKV_BAD_TYPE, "prefix", 1},
    {SEQUENCE(", \"prefix\": {\"cache\": " ID "}"), 2, DSKV_BAD_VALUE, "length", 1},
    {SEQUENCE(", \"prefix\": {\"length\": 1}"), 2, DSKV_BAD_VALUE, "cache", 1},
    {SEQUENCE(", \"prefix\": {\"cache\": " ID ", \"length\": 16777217}"), 2, DSKV_BAD_VALUE, "length", 1},
    {SEQUENCE(", \"prefix\": {\"cache\": " ID ", \"length\": 1, \"check\": 4294967296}"), 2, DSKV_BAD_VALUE, "check",
     1},
    {SEQUENCE(", \"prefix\": {\"cache\": " ID ", \"length\": 1, \"check\": -1}"), 2, DSKV_BAD_VALUE, "check", 1},
    {SEQUENCE(", \"want\": true"), 2, DSKV_BAD_TYPE, "want", 1},
    {SEQUENCE(", \"want\": {\"topk\": 257}"), 2, DSKV_BAD_VALUE, "topk", 1},
    {SEQUENCE(", \"want\": {\"topk\": true}"), 2, DSKV_BAD_TYPE, "topk", 1},
    {SEQUENCE(", \"want\": {\"logit\": [0, 1]}"), 2, DSKV_UNKNOWN_FIELD, "logit", 1},
    {SEQUENCE(", \"want\": {\"logits\": [2, 1]}"), 2, DSKV_BAD_VALUE, "logits", 1},
    {SEQUENCE(", \"want\": {\"logits\": [-1, 1]}"), 2, DSKV_BAD_VALUE, "logits", 1},
    {SEQUENCE(", \"want\": {\"logits\": [0]}"), 2, DSKV_BAD_TYPE, "logits", 1},
    {SEQUENCE(", \"want\": {\"logits\": [0, 1.0]}"), 2, DSKV_BAD_TYPE, "logits", 1},
    {SEQUENCE(", \"want\": {\"logits\": \"last\"}"), 2, DSKV_BAD_TYPE, "logits", 1},
    {SEQUENCE(", \"want\": {\"logits_dtype\": \"bf16\"}"), 2, DSKV_BAD_VALUE, "logits_dtype", 1},
    {SEQUENCE(", \"want\": {\"logits_dtype\": 1}"), 2, DSKV_BAD_TYPE, "logits_dtype", 1},
    /* tensors and frames */
    {SEQUENCE(""), 1, DSKV_BAD_VALUE, "tokens", 1},
    {SEQUENCE(""), 3, DSKV_BAD_MESSAGE, "", -1},
    {GENERATE(", \"stop\": [" T1 "]"), 1, DSKV_BAD_MESSAGE, "stop", 0},
    {HEAD("generate") ", \"tokens\": [1, 2]}", 0, DSKV_BAD_TYPE, "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"f32\", \"shape\": [3], \"frame\": 1}}", 1, DSKV_BAD_TYPE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i64\", \"shape\": [3], \"frame\": 1}}", 1, DSKV_BAD_TYPE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": 3, \"shape\": [3], \"frame\": 1}}", 1, DSKV_BAD_TYPE, "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [1, 3], \"frame\": 1}}", 1, DSKV_BAD_TYPE,
     "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [], \"frame\": 1}}", 1, DSKV_BAD_TYPE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": 3, \"frame\": 1}}", 1, DSKV_BAD_TYPE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [3.0], \"frame\": 1}}", 1, DSKV_BAD_TYPE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [-3], \"frame\": 1}}", 1, DSKV_BAD_VALUE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [4611686018427387907], \"frame\": 1}}", 1,
     DSKV_BAD_VALUE, "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [4], \"frame\": 1}}", 1, DSKV_WRONG_SHAPE,
     "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [0], \"frame\": 1}}", 1, DSKV_WRONG_SHAPE,
     "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [3], \"frame\": 0}}", 1, DSKV_BAD_VALUE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [3], \"frame\": 2}}", 1, DSKV_BAD_VALUE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [3], \"frame\": -1}}", 1, DSKV_BAD_VALUE, "tokens",
     -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [3], \"frame\": true}}", 1, DSKV_BAD_TYPE,
     "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [3]}}", 1, DSKV_BAD_VALUE, "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"frame\": 1}}", 1, DSKV_BAD_VALUE, "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"shape\": [3], \"frame\": 1}}", 1, DSKV_BAD_VALUE, "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [3], \"frame\": 1, \"frame\": 1}}", 1,
     DSKV_BAD_MESSAGE, "tokens", -1},
    {HEAD("generate") ", \"tokens\": {\"dtype\": \"i32\", \"shape\": [3], \"frame\": 1, \"strides\": [1]}}", 1,
     DSKV_UNKNOWN_FIELD, "tokens", -1},
    /* generate */
    {GENERATE(", \"max_tokens\": 0"), 1, DSKV_BAD_VALUE, "max_tokens", -1},
    {GENERATE(", \"temperature\": -0.5"), 1, DSKV_BAD_VALUE, "temperature", -1},
    {GENERATE(", \"temperature\": 100.5"), 1, DSKV_BAD_VALUE, "temperature", -1},
    {GENERATE(", \"temperature\": nan"), 1, DSKV_BAD_VALUE, "temperature", -1},
    {GENERATE(", \"temperature\": inf"), 1, DSKV_BAD_VALUE, "temperature", -1},
    {GENERATE(", \"temperature\": \"hot\""), 1, DSKV_BAD_TYPE, "temperature", -1},
    {GENERATE(", \"temperature\": false"), 1, DSKV_BAD_TYPE, "temperature", -1},
    {GENERATE(", \"top_k\": -1"), 1, DSKV_BAD_VALUE, "top_k", -1},
    {GENERATE(", \"top_p\": 0.0"), 1, DSKV_BAD_VALUE, "top_p", -1},
    {GENERATE(", \"top_p\": 0"), 1, DSKV_BAD_VALUE, "top_p", -1},
    {GENERATE(", \"top_p\": 1.5"), 1, DSKV_BAD_VALUE, "top_p", -1},
    {GENERATE(", \"min_p\": 2"), 1, DSKV_BAD_VALUE, "min_p", -1},
    {GENERATE(", \"seed\": -1"), 1, DSKV_BAD_VALUE, "seed", -1},
    {GENERATE(", \"seed\": 9223372036854775808"), 1, DSKV_BAD_VALUE, "seed", -1},
    {GENERATE(", \"seed\": 1.5"), 1, DSKV_BAD_TYPE, "seed", -1},
    {GENERATE(", \"stop\": [\"end\"]"), 1, DSKV_BAD_TYPE, "stop", 0},
    {GENERATE(", \"speculate\": 4"), 1, DSKV_UNKNOWN_FIELD, "speculate", -1},
    /* import and its parts */
    {HEAD("import") ", \"tokens\": " T1 "}", 1, DSKV_BAD_VALUE, "dtype", -1},
    {HEAD("import") ", \"tokens\": " T1 ", \"dtype\": \"i32\", \"n_layers\": 1, \"n_kv_heads\": 1, \"head_dim\": 4}", 1,
     DSKV_BAD_VALUE, "dtype", -1},
    {HEAD("import") ", \"tokens\": " T1 ", \"dtype\": \"f32\", \"n_layers\": 0, \"n_kv_heads\": 1, \"head_dim\": 4}", 1,
     DSKV_BAD_VALUE, "n_layers", -1},
    {HEAD("import") ", \"tokens\": " T1 ", \"dtype\": \"f32\", \"n_layers\": 1, \"n_kv_heads\": 1, \"head_dim\": 257}",
     1, DSKV_BAD_VALUE, "head_dim", -1},
    {PART("\"layer\": 1024, \"which\": \"k\", \"start\": 0, \"stop\": 3, " DATA("[1, 3, 1]")), 1, DSKV_BAD_VALUE,
     "layer", -1},
    {PART("\"layer\": 0, \"which\": \"q\", \"start\": 0, \"stop\": 3, " DATA("[1, 3, 1]")), 1, DSKV_BAD_VALUE, "which",
     -1},
    {PART("\"layer\": 0, \"which\": \"k\", \"start\": 3, \"stop\": 3, " DATA("[1, 3, 1]")), 1, DSKV_BAD_VALUE, "stop",
     -1},
    {PART("\"layer\": 0, \"which\": \"k\", \"start\": 3, \"stop\": 0, " DATA("[1, 3, 1]")), 1, DSKV_BAD_VALUE, "stop",
     -1},
    {PART("\"layer\": 0, \"which\": \"k\", \"start\": 0, \"stop\": 1, " DATA("[1, 3, 1]")), 1, DSKV_WRONG_SHAPE, "data",
     -1},
    {PART("\"layer\": 0, \"which\": \"k\", \"start\": 0, \"stop\": 3, " DATA("[1, 3]")), 1, DSKV_WRONG_SHAPE, "data",
     -1},
    {PART("\"layer\": 0, \"which\": \"k\", \"start\": 0, \"stop\": 3, " DATA("[2, 3, 1]")), 1, DSKV_WRONG_SHAPE, "data",
     -1},
    {PART("\"layer\": 0, \"which\": \"k\", \"start\": 0, \"stop\": 3, " DATA("[268435456, 268435456, 268435456]")), 1,
     DSKV_BAD_VALUE, "data", -1},
    {PART("\"layer\": 0, \"which\": \"k\", \"start\": 0, \"stop\": 3, \"data\": " T1), 1, DSKV_BAD_TYPE, "data", -1},
};

static void each_error_names_what_is_wrong(void)
{
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        const struct refusal *r = &refusals[i];
        struct dskv_frames frames = diag_message(r->header, r->n_frames, (int[]){3, 3, 3});
        struct dskv_request request;
        struct dskv_error error = {0};
        enum dskv_code code = dskv_request_decode(&frames, &request, &error);
        int index = error.has & DSKV_HAS_INDEX ? (int)error.index : -1;
        int right = code == r->code && error.code == code && strcmp(error.field, r->field) == 0 && index == r->index &&
                    strlen(error.message) > 10 && frames.frames == NULL && request.memory == NULL;
        if (!right)
            printf("%s\n  -> %s, field \"%s\", index %d: %s\n", r->header, dskv_code_name(code), error.field, index,
                   error.message);
        CU_ASSERT(right);
        if (!code)
            dskv_request_clear(&request);
    }
}

static void errors_can_be_answered(void)
{
    const struct {
        const char *header;
        uint64_t id;
        enum dskv_op op;
    } cases[] = {
        {"{\"v\": 1, \"id\": 77, \"op\": \"verify\"}", 77, DSKV_OP_VERIFY},
        {"{\"v\": 3, \"id\": 77, \"op\": \"verify\"}", 77, DSKV_OP_VERIFY},
        {"{\"op\": \"verify\", \"id\": 77, \"new\": 1}", 77, DSKV_OP_VERIFY},
        {"{\"v\": 1, \"id\": 77, \"op\": \"dance\"}", 77, DSKV_N_OPS},
        {"{\"v\": 1, \"id\": -1, \"op\": \"ping\"}", 0, DSKV_OP_PING},
        {"{\"v\": 1}", 0, DSKV_N_OPS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct dskv_frames frames = diag_message(cases[i].header, 0, NULL);
        struct dskv_request request;
        struct dskv_error error = {0};
        CU_ASSERT(dskv_request_decode(&frames, &request, &error));
        CU_ASSERT_EQUAL(request.id, cases[i].id);
        CU_ASSERT_EQUAL(request.op, cases[i].op);
        struct dskv_event event = {.id = request.id, .kind = DSKV_EVENT_ERROR, .op = request.op, .error = error}, read;
        CU_ASSERT_EQUAL_FATAL(dskv_event_encode(&event, &frames, NULL), DSKV_OK);
        CU_ASSERT_EQUAL_FATAL(dskv_event_decode(&frames, &read, NULL), DSKV_OK);
        CU_ASSERT(read.id == request.id && read.op == request.op && read.last && read.error.code == error.code);
        CU_ASSERT_STRING_EQUAL(read.error.message, error.message);
        CU_ASSERT_STRING_EQUAL(read.error.field, error.field);
        dskv_event_clear(&read);
    }
}

static void sentences_are_for_people(void)
{
    struct dskv_frames frames = diag_message(SEQUENCE(", \"want\": {\"topk\": 1000}"), 2, (int[]){3, 3});
    struct dskv_request request;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.message, "sequences[1].want.topk is 1000, must be 0 .. 256");
    CU_ASSERT_STRING_EQUAL(error.valid, "0 .. 256");
    frames = diag_message(HEAD("import") ", \"tokens\": " T1 ", \"dtype\": \"f64\"}", 1, (int[]){3});
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_VALUE);
    CU_ASSERT_STRING_EQUAL(error.message, "dtype is \"f64\", must be f32, f16, bf16");
    frames = diag_message(HEAD("cancel") ", \"reqest\": 1}", 0, NULL);
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_UNKNOWN_FIELD);
    CU_ASSERT_STRING_EQUAL(error.valid, "request, v, id, op, deadline_ms, session, free");
}

static void events_are_checked_too(void)
{
    const struct {
        const char *header;
        enum dskv_code code;
    } cases[] = {
        {"{\"id\": 1, \"kind\": \"song\", \"last\": true, \"op\": \"ping\"}", DSKV_BAD_VALUE},
        {"{\"id\": 1, \"kind\": \"result\", \"last\": false, \"op\": \"ping\"}", DSKV_BAD_VALUE},
        {"{\"id\": 1, \"kind\": \"begin\", \"last\": true, \"op\": \"import\", \"credits\": 1, \"part_tokens\": 1}",
         DSKV_BAD_VALUE},
        {"{\"id\": 1, \"kind\": \"rows\", \"last\": false, \"op\": \"ping\"}", DSKV_BAD_VALUE},
        {"{\"id\": 1, \"kind\": \"result\", \"last\": true}", DSKV_BAD_VALUE},
        {"{\"id\": 1, \"kind\": \"result\", \"last\": true, \"op\": \"commit\"}", DSKV_BAD_VALUE},
        {"{\"id\": 1, \"kind\": \"result\", \"last\": true, \"op\": \"cancel\"}", DSKV_BAD_VALUE},
        {"{\"id\": 1, \"kind\": \"result\", \"last\": true, \"op\": \"cancel\", \"cancelled\": 1}", DSKV_BAD_TYPE},
        {"{\"kind\": \"result\", \"last\": true, \"op\": \"ping\"}", DSKV_BAD_VALUE},
        {"{\"id\": 1, \"id\": 1, \"kind\": \"result\", \"last\": true, \"op\": \"ping\"}", DSKV_BAD_MESSAGE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct dskv_frames frames = diag_message(cases[i].header, 0, NULL);
        struct dskv_event event;
        struct dskv_error error = {0};
        enum dskv_code code = dskv_event_decode(&frames, &event, &error);
        if (code != cases[i].code)
            printf("%s\n  -> %s %s\n", cases[i].header, dskv_code_name(code), error.message);
        CU_ASSERT_EQUAL(code, cases[i].code);
        if (!code)
            dskv_event_clear(&event);
    }
}

static void stop_sequences_have_a_length(void)
{
    for (int n = 0; n <= DSKV_MAX_STOP_TOKENS + 1; n++) {
        char *header =
            dskv_format(GENERATE(", \"stop\": [" T(2, 3) ", {\"dtype\": \"i32\", \"shape\": [%d], \"frame\": 3}]"), n);
        struct dskv_frames frames = diag_message(header, 3, (int[]){3, 3, n});
        struct dskv_request request;
        struct dskv_error error = {0};
        enum dskv_code code = dskv_request_decode(&frames, &request, &error);
        if (n >= 1 && n <= DSKV_MAX_STOP_TOKENS) {
            CU_ASSERT_EQUAL_FATAL(code, DSKV_OK);
            dskv_request_clear(&request);
        } else {
            CU_ASSERT(code == DSKV_BAD_VALUE && error.index == 1 && error.length == n);
            CU_ASSERT_STRING_EQUAL(error.field, "stop");
        }
        free(header);
    }
}

static void messages_have_limits(void)
{
    struct dskv_request request;
    struct dskv_error error = {0};
    struct dskv_frames frames = {0};
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_MESSAGE);
    frames = diag_message(HEAD("ping") "}", 0, NULL);
    for (int i = 0; i < DSKV_MAX_FRAMES; i++)
        diag_add(&frames, (struct dskv_frame){dskv_calloc(1, 1), 0});
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_MESSAGE);
    CU_ASSERT(error.limit == DSKV_MAX_FRAMES && frames.frames == NULL);
    frames = diag_message(HEAD("ping") "}", 0, NULL);
    diag_add(&frames, (struct dskv_frame){dskv_calloc(DSKV_MAX_FRAME_BYTES + 1, 1), DSKV_MAX_FRAME_BYTES + 1});
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_MESSAGE);
    CU_ASSERT_EQUAL(error.limit, DSKV_MAX_FRAME_BYTES);
    frames = diag_message(HEAD("ping") "}", 0, NULL);
    for (int i = 0; i < 4; i++)
        diag_add(&frames, (struct dskv_frame){dskv_calloc(DSKV_MAX_FRAME_BYTES, 1), DSKV_MAX_FRAME_BYTES});
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_MESSAGE);
    CU_ASSERT_EQUAL(error.limit, DSKV_MAX_REQUEST_BYTES);
    diag_add(&frames, (struct dskv_frame){dskv_calloc(DSKV_MAX_HEADER_BYTES + 1, 1), DSKV_MAX_HEADER_BYTES + 1});
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_MESSAGE);
    CU_ASSERT_EQUAL(error.limit, DSKV_MAX_HEADER_BYTES);
    char *header = dskv_calloc(1, 64 + 40 * (DSKV_MAX_FREE_IDS + 1));
    int n = snprintf(header, 64, "%s", HEAD("ping") ", \"free\": [");
    for (int i = 0; i <= DSKV_MAX_FREE_IDS; i++)
        n += snprintf(header + n, 48, "%s" ID, i ? "," : "");
    memcpy(header + n, "]}", 3);
    frames = diag_message(header, 0, NULL);
    CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_VALUE);
    CU_ASSERT(error.limit == DSKV_MAX_FREE_IDS && error.length == DSKV_MAX_FREE_IDS + 1);
    free(header);
}

#ifdef __SANITIZE_ADDRESS__
static const int sanitized = 1; /* whose own memory cannot be limited */
#else
static const int sanitized = 0;
#endif

/* Five bytes that promise four billion values, in a process that could not hold them. */
static void bombs_cost_nothing(void)
{
    const char *bombs[] = {"dd ffffffff",          "df ffffffff",          "81 a1 61 dd ffffffff",
                           "81 a1 61 df ffffffff", "81 a1 61 c6 ffffffff", "81 a1 61 db ffffffff",
                           "81 a1 61 dd 10000000", "81 dd ffffffff",       "81 a1 61 c9 ffffffff 01"};
    struct rlimit before;
    size_t resident = dskv_resident_bytes();
    CU_ASSERT_EQUAL_FATAL(getrlimit(RLIMIT_DATA, &before), 0);
    struct rlimit tight = {256u << 20, before.rlim_max};
    if (!sanitized)
        CU_ASSERT_EQUAL(setrlimit(RLIMIT_DATA, &tight), 0);
    for (size_t i = 0; i < sizeof bombs / sizeof bombs[0]; i++) {
        struct dskv_frames frames = {0};
        struct dskv_request request;
        struct dskv_error error = {0};
        diag_add(&frames, diag_hex(bombs[i]));
        CU_ASSERT_EQUAL(dskv_request_decode(&frames, &request, &error), DSKV_BAD_MESSAGE);
    }
    setrlimit(RLIMIT_DATA, &before);
    CU_ASSERT(sanitized || dskv_resident_bytes() < resident + (8u << 20));
}

int main(void)
{
    return dskv_run_tests("ipc.refusals", (struct dskv_test[]){
                                              {"each error names what is wrong", each_error_names_what_is_wrong},
                                              {"errors can be answered", errors_can_be_answered},
                                              {"sentences are for people", sentences_are_for_people},
                                              {"events are checked too", events_are_checked_too},
                                              {"stop sequences have a length", stop_sequences_have_a_length},
                                              {"messages have limits", messages_have_limits},
                                              {"bombs cost nothing", bombs_cost_nothing},
                                              {NULL, NULL},
                                          });
}
