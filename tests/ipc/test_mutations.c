/* Ten thousand damaged messages: each is refused, or is a message that comes back the same.  A seed names each of them.
 */
#include "base/memory.h"
#include "ipc/make_message.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_ROUNDS 10000

static const uint8_t spicy[] = {0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc4, 0xc6, 0xc7, 0xca, 0xcb, 0xcc,
                                0xcf, 0xd3, 0xd4, 0xd9, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xff, 0x00, 0x7f, 0x01};

/* Changes, removes, doubles or moves some bytes of one frame; the memory is cut to its size, so that a sanitizer sees
 * what reads beyond it. */
static void damage_frame(struct dskv_frame *frame, uint64_t *state)
{
    size_t n = frame->bytes, at = n ? make_random(state) % n : 0, run = 1 + make_random(state) % 8;
    uint8_t *old = frame->data, *bytes = dskv_calloc(n + run, 1);
    memcpy(bytes, old, n);
    run = run < n - at ? run : n - at;
    switch (make_random(state) % 7) {
    case 0: bytes[at] = (uint8_t)make_random(state); break;
    case 1: bytes[at] = spicy[make_random(state) % sizeof spicy]; break;
    case 2: bytes[at] ^= (uint8_t)(1u << make_random(state) % 8); break;
    case 3: n = at; break;
    case 4:
        memmove(bytes + at, bytes + at + run, n - at - run);
        n -= run;
        break;
    case 5:
        memmove(bytes + at + run, bytes + at, n - at);
        n += run;
        break;
    default: memcpy(bytes + at, old + make_random(state) % (frame->bytes - run + 1), run); break;
    }
    frame->bytes = n;
    frame->data = malloc(n ? n : 1);
    memcpy(frame->data, bytes, n);
    free(bytes);
    free(old);
}

static void damage(struct dskv_frames *frames, uint64_t *state)
{
    uint64_t how = make_random(state) % 16;
    int32_t i = (int32_t)(make_random(state) % (uint64_t)frames->n);
    if (how == 0 && frames->n > 1) { /* a frame is missing */
        free(frames->frames[--frames->n].data);
    } else if (how == 1) { /* one too many */
        frames->frames = dskv_realloc(frames->frames, (size_t)frames->n + 1, sizeof *frames->frames);
        frames->frames[frames->n++] = (struct dskv_frame){dskv_calloc(4, 1), 4};
    } else if (how == 2) { /* in another order */
        struct dskv_frame first = frames->frames[0];
        frames->frames[0] = frames->frames[i];
        frames->frames[i] = first;
    } else {
        for (uint64_t n = 1 + make_random(state) % 3; n > 0; n--) {
            struct dskv_frame *frame = &frames->frames[how < 14 ? 0 : i];
            if (frame->bytes)
                damage_frame(frame, state);
        }
    }
}

/* What was taken can be written, and read again: the same. */
static int request_is_sound(const struct dskv_request *request)
{
    struct dskv_frames frames;
    struct dskv_request again;
    struct dskv_error error = {0};
    if (dskv_request_encode(request, &frames, &error) || dskv_request_decode(&frames, &again, &error)) {
        printf("%s\n", error.message);
        return 0;
    }
    const char *differs = compare_fields(&dskv_request_envelope, request, &again);
    if (!differs)
        differs = compare_fields(dskv_request_table(request->op), request, &again);
    dskv_request_clear(&again);
    return differs == NULL;
}

static int event_is_sound(const struct dskv_event *event)
{
    struct dskv_frames frames;
    struct dskv_event again;
    struct dskv_error error = {0};
    if (dskv_event_encode(event, &frames, &error) || dskv_event_decode(&frames, &again, &error)) {
        printf("%s\n", error.message);
        return 0;
    }
    const char *differs = compare_fields(dskv_event_table(event->kind, event->op), event, &again);
    dskv_event_clear(&again);
    return differs == NULL;
}

static void check_round(uint64_t seed, int *n_taken)
{
    uint64_t state = seed;
    enum dskv_op op = (enum dskv_op)(make_random(&state) % DSKV_N_OPS);
    enum dskv_event_kind kind = (enum dskv_event_kind)(make_random(&state) % DSKV_N_EVENT_KINDS);
    struct dskv_request request;
    struct dskv_event event;
    struct dskv_frames frames;
    struct dskv_error error = {0};
    int is_event = make_random(&state) % 2 && dskv_event_table(kind, op), sound = 1;
    if (is_event) {
        make_event(&event, kind, op, MAKE_SOME, seed);
        CU_ASSERT_EQUAL_FATAL(dskv_event_encode(&event, &frames, &error), DSKV_OK);
        dskv_event_clear(&event);
        damage(&frames, &state);
        if (!dskv_event_decode(&frames, &event, &error)) {
            sound = event_is_sound(&event);
            ++*n_taken;
            dskv_event_clear(&event);
        }
    } else {
        make_request(&request, op, MAKE_SOME, seed);
        CU_ASSERT_EQUAL_FATAL(dskv_request_encode(&request, &frames, &error), DSKV_OK);
        dskv_request_clear(&request);
        damage(&frames, &state);
        if (!dskv_request_decode(&frames, &request, &error)) {
            sound = request_is_sound(&request);
            ++*n_taken;
            dskv_request_clear(&request);
        }
    }
    if (!sound)
        printf("seed %llu\n", (unsigned long long)seed);
    CU_ASSERT(sound);
    CU_ASSERT_PTR_NULL(frames.frames);
}

static void damaged_messages_do_no_harm(void)
{
    int n_taken = 0;
    for (uint64_t seed = 1; seed <= N_ROUNDS; seed++)
        check_round(seed * 1000003, &n_taken);
    CU_ASSERT(n_taken > N_ROUNDS / 20); /* else the damage is too coarse to test anything */
    CU_ASSERT(n_taken < N_ROUNDS / 2);
}

static void noise_does_no_harm(void)
{
    uint64_t state = 5;
    for (int round = 0; round < N_ROUNDS; round++) {
        struct dskv_frames frames = {dskv_calloc(2, sizeof *frames.frames), 2};
        struct dskv_request request;
        struct dskv_error error = {0};
        for (int i = 0; i < 2; i++) {
            frames.frames[i].bytes = make_random(&state) % 64;
            uint8_t *bytes = frames.frames[i].data = malloc(frames.frames[i].bytes + 1);
            for (size_t k = 0; k < frames.frames[i].bytes; k++)
                bytes[k] =
                    make_random(&state) % 2 ? spicy[make_random(&state) % sizeof spicy] : (uint8_t)make_random(&state);
        }
        CU_ASSERT(dskv_request_decode(&frames, &request, &error));
        CU_ASSERT_PTR_NULL(frames.frames);
    }
}

int main(void)
{
    return dskv_run_tests("ipc.mutations", (struct dskv_test[]){
                                               {"damaged messages do no harm", damaged_messages_do_no_harm},
                                               {"noise does no harm", noise_does_no_harm},
                                               {NULL, NULL},
                                           });
}
