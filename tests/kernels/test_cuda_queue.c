/* The queue of a device: places that take turns, marks, recordings, and tokens that are chosen where they lie. */
#include "kernels/test_cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS = 3000, STEPS = 7 };

static struct dskv_turns open_places(struct dskv_turn *turn, size_t bytes)
{
    struct dskv_turns turns = {.turn = turn};
    for (int i = 0; i < 2; i++)
        turns.places[i] = dskv_device_host_alloc(gpu, bytes);
    return turns;
}

static void close_places(const struct dskv_turns *turns, size_t bytes)
{
    for (int i = 0; i < 2; i++)
        dskv_device_host_free(gpu, turns->places[i], bytes);
}

/* Receives WORDS words and reports two parts of them, behind a gap. */
struct relay {
    struct dskv_turns in, out;
    uint32_t *words;
};

static void relay(const struct relay *r)
{
    dskv_op_receive(gpu, &(struct dskv_receive){r->in, r->words, WORDS * sizeof *r->words});
    dskv_op_report(gpu, &(struct dskv_report){r->out, 16, {r->words + 1}, {4}, 1, 0});
    dskv_op_report(gpu, &(struct dskv_report){r->out, 24, {r->words + 7, r->words}, {40, (WORDS - 5) * 4}, 2, 1});
}

/* The host fills one place while the device works with the other; a recording serves both. */
static void places_take_turns(void)
{
    struct dskv_turn *turn = dskv_device_alloc(gpu, sizeof *turn);
    struct relay r = {open_places(turn, WORDS * 4), open_places(turn, (WORDS + 20) * 4),
                      dskv_device_alloc(gpu, WORDS * 4)};
    struct dskv_recording *recording = NULL;
    dskv_mark marks[STEPS];
    uint64_t ended_ns = 0;
    int wrong = 0;
    for (int step = 0; step < STEPS; step++) {
        uint32_t *place = r.in.places[step % 2];
        if (step >= 2)
            CU_ASSERT_EQUAL(dskv_device_wait(gpu, marks[step - 2], NULL), DSKV_OK);
        for (uint32_t i = 0; i < WORDS; i++)
            place[i] = (uint32_t)step * 100000 + i;
        if (step == 2 && dskv_device_record_begin(gpu)) {
            relay(&r);
            recording = dskv_device_record_end(gpu);
            CU_ASSERT_PTR_NOT_NULL_FATAL(recording);
        }
        if (recording)
            dskv_device_replay(gpu, recording);
        else
            relay(&r);
        marks[step] = dskv_device_mark(gpu);
        CU_ASSERT_EQUAL(dskv_device_wait(gpu, marks[step], NULL), DSKV_OK);
        CU_ASSERT_EQUAL(dskv_device_reached(gpu, marks[step]), 1);
        const uint32_t *got = (const uint32_t *)r.out.places[step % 2] + 4, base = (uint32_t)step * 100000;
        wrong += got[0] != base + 1 || got[1] != 0;
        for (uint32_t i = 0; i < 10; i++)
            wrong += got[2 + i] != base + 7 + i;
        for (uint32_t i = 0; i < WORDS - 5; i++)
            wrong += got[12 + i] != base + i;
        wrong += got[12 + WORDS - 5] != 0;
        const struct dskv_turn_times *times = r.out.places[step % 2];
        wrong += times->begun_ns == 0 || times->ended_ns < times->begun_ns || times->begun_ns < ended_ns;
        ended_ns = times->ended_ns;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    dskv_recording_close(gpu, &recording);
    dskv_device_free(gpu, r.words, WORDS * 4);
    dskv_device_free(gpu, turn, sizeof *turn);
    close_places(&r.in, WORDS * 4);
    close_places(&r.out, (WORDS + 20) * 4);
}

/* The largest over all shards, lowest id of equals, whatever the shards' order; empty shards say nothing. */
static void choices_agree(void)
{
    enum { ROWS = 300, SHARDS = 5 };
    uint64_t seed = 3;
    static struct dskv_row_stats stats[SHARDS][ROWS];
    const struct dskv_row_stats *on_cpu[SHARDS], *on_gpu[SHARDS];
    int32_t expected[ROWS], *ids = dskv_device_alloc(gpu, sizeof expected);
    for (int s = 0; s < SHARDS; s++) {
        for (int r = 0; r < ROWS; r++)
            stats[s][r] = s == 3 ? (struct dskv_row_stats){.max = -INFINITY, .argmax = INT32_MAX}
                                 : (struct dskv_row_stats){.max = (float)test_random_below(&seed, 4),
                                                           .argmax = (SHARDS - s) * 1000 + r};
        on_cpu[s] = stats[s];
        on_gpu[s] = test_put_bytes(gpu, stats[s], sizeof stats[s]);
    }
    dskv_op_choose(cpu, &(struct dskv_choose){on_cpu, SHARDS, ROWS, expected});
    dskv_op_choose(gpu, &(struct dskv_choose){on_gpu, SHARDS, ROWS, ids});
    int32_t *got = test_take_bytes(gpu, ids, sizeof expected);
    CU_ASSERT(memcmp(got, expected, sizeof expected) == 0);
    for (int r = 0; r < ROWS; r++)
        for (int s = 0; s < SHARDS; s++)
            CU_ASSERT(stats[s][r].max < stats[SHARDS - expected[r] / 1000][r].max || stats[s][r].argmax >= expected[r]);
    free(got);
    for (int s = 0; s < SHARDS; s++)
        free(test_take_bytes(gpu, (void *)(uintptr_t)on_gpu[s], sizeof stats[s]));
}

/* A token that the device chose is embedded as if the host had named it. */
static void drawn_tokens_are_embedded(void)
{
    enum { VOCAB = 90, WIDTH = 64, ROWS = 6 };
    uint64_t seed = 8;
    static float rows[VOCAB * WIDTH];
    for (int i = 0; i < VOCAB * WIDTH; i++)
        rows[i] = (float)test_random_below(&seed, 1000);
    const int32_t named[ROWS] = {5, 89, 0, 33, 33, 7}, drawn[4] = {7, 33, 0, 89}, mixed[ROWS] = {5, -4, -3, 33, -2, -1};
    struct dskv_weight *table = dskv_weight_open(gpu, VOCAB, WIDTH, DSKV_F32);
    dskv_weight_fill(gpu, table, 0, VOCAB, rows, DSKV_F32);
    int32_t *device_named = test_put_bytes(gpu, named, sizeof named);
    int32_t *device_mixed = test_put_bytes(gpu, mixed, sizeof mixed);
    int32_t *device_drawn = test_put_bytes(gpu, drawn, sizeof drawn);
    struct dskv_tensor a = test_put(gpu, NULL, DSKV_F32, ROWS, WIDTH, 0),
                       b = test_put(gpu, NULL, DSKV_F32, ROWS, WIDTH, 0);
    dskv_op_embed(gpu, &(struct dskv_embed){.ids = device_named, .table = table, .out = a});
    dskv_op_embed(gpu, &(struct dskv_embed){.ids = device_mixed, .drawn = device_drawn, .table = table, .out = b});
    float *expected = test_take(gpu, &a), *got = test_take(gpu, &b);
    CU_ASSERT(memcmp(expected, got, ROWS * WIDTH * sizeof *got) == 0);
    CU_ASSERT(memcmp(got, rows + 5 * WIDTH, WIDTH * sizeof *got) == 0);
    free(expected);
    free(got);
    free(test_take_bytes(gpu, device_named, sizeof named));
    free(test_take_bytes(gpu, device_mixed, sizeof mixed));
    free(test_take_bytes(gpu, device_drawn, sizeof drawn));
    dskv_weight_close(gpu, &table);
}

const struct dskv_test test_cuda_queue[] = {
    {"places take turns", places_take_turns},
    {"choices agree", choices_agree},
    {"drawn tokens are embedded", drawn_tokens_are_embedded},
    {NULL, NULL},
};
