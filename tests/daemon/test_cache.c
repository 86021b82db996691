#include "base/memory.h"
#include "daemon/cache.h"
#include "support/cunit_suite.h"

#include <stdlib.h>
#include <string.h>

#define SECOND 1000000

static struct dskv_cache *add_cache(struct dskv_blocks *blocks, struct dskv_caches *caches,
                                    struct dskv_session *session, int32_t length)
{
    int32_t n_blocks = dskv_blocks_for(blocks, length), *table = dskv_calloc((size_t)n_blocks, sizeof *table);
    CU_ASSERT_EQUAL_FATAL(dskv_blocks_reserve(blocks, n_blocks, NULL), DSKV_OK);
    for (int32_t i = 0; i < n_blocks; i++) {
        table[i] = dskv_blocks_take(blocks);
        for (int32_t j = 0; j < 16; j++)
            dskv_blocks_tokens(blocks, table[i])[j] = 1000 * length + 16 * i + j;
    }
    return dskv_caches_add(caches, session, table, n_blocks, length, 0);
}

static void caches_are_found_until_they_are_freed(void)
{
    struct dskv_blocks *blocks = dskv_blocks_open(8, 16);
    struct dskv_caches *caches = dskv_caches_open(blocks);
    struct dskv_sessions *sessions = dskv_sessions_open(0);
    struct dskv_session *session = dskv_sessions_begin(sessions, 0);
    struct dskv_cache *a = add_cache(blocks, caches, session, 40), *empty = add_cache(blocks, caches, session, 0);
    struct dskv_id id = a->id, never = {{1, 2, 3}};
    CU_ASSERT_EQUAL(dskv_blocks_used(blocks), 3);
    CU_ASSERT_PTR_EQUAL(dskv_caches_find(caches, &id), a);
    CU_ASSERT_PTR_EQUAL(dskv_caches_find(caches, &empty->id), empty);
    CU_ASSERT_PTR_NULL(dskv_caches_find(caches, &never));
    dskv_caches_free(caches, a);
    CU_ASSERT_PTR_NULL(dskv_caches_find(caches, &id));
    CU_ASSERT_EQUAL(dskv_blocks_used(blocks), 0);
    CU_ASSERT_EQUAL(dskv_caches_free_session(caches, session), 1);
    CU_ASSERT_EQUAL(dskv_caches_count(caches), 0);
    dskv_caches_close(&caches);
    dskv_sessions_close(&sessions);
    dskv_blocks_close(&blocks);
}

static void thousands_of_caches_stay_apart(void)
{
    enum { N = 5000 };
    struct dskv_blocks *blocks = dskv_blocks_open(1, 16);
    struct dskv_caches *caches = dskv_caches_open(blocks);
    struct dskv_sessions *sessions = dskv_sessions_open(0);
    struct dskv_session *owners[2] = {dskv_sessions_begin(sessions, 0), dskv_sessions_begin(sessions, 0)};
    static struct dskv_id ids[N];
    for (int i = 0; i < N; i++)
        ids[i] = add_cache(blocks, caches, owners[i % 2], 0)->id;
    CU_ASSERT_EQUAL(dskv_caches_free_session(caches, owners[1]), N / 2);
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        struct dskv_cache *found = dskv_caches_find(caches, &ids[i]);
        wrong += i % 2 ? found != NULL : !found || memcmp(found->id.bytes, ids[i].bytes, 16) != 0;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    dskv_caches_close(&caches);
    CU_ASSERT_EQUAL(owners[0]->n_caches, 0);
    dskv_sessions_close(&sessions);
    dskv_blocks_close(&blocks);
}

static void tokens_and_their_check_are_read_from_the_blocks(void)
{
    struct dskv_blocks *blocks = dskv_blocks_open(8, 16);
    struct dskv_caches *caches = dskv_caches_open(blocks);
    struct dskv_sessions *sessions = dskv_sessions_open(0);
    struct dskv_cache *cache = add_cache(blocks, caches, dskv_sessions_begin(sessions, 0), 40);
    int32_t tokens[40];
    dskv_caches_tokens(blocks, cache->blocks, 40, tokens);
    int wrong = 0;
    for (int32_t i = 0; i < 40; i++)
        wrong += tokens[i] != 40000 + i;
    CU_ASSERT_EQUAL(wrong, 0);
    for (int32_t length = 0; length <= 40; length += 8)
        CU_ASSERT_EQUAL(dskv_cache_check(blocks, cache, length), dskv_tokens_check(0, tokens, (size_t)length));
    dskv_caches_close(&caches);
    dskv_sessions_close(&sessions);
    dskv_blocks_close(&blocks);
}

static void silence_ends_a_session_and_work_does_not(void)
{
    struct dskv_sessions *sessions = dskv_sessions_open(10);
    struct dskv_session *a = dskv_sessions_begin(sessions, 0), *b = dskv_sessions_begin(sessions, 1 * SECOND);
    CU_ASSERT_EQUAL(dskv_sessions_next_us(sessions), 10 * SECOND);
    CU_ASSERT_PTR_NULL(dskv_sessions_expired(sessions, 10 * SECOND - 1));
    dskv_session_renew(sessions, a, 5 * SECOND);
    CU_ASSERT_PTR_NULL(dskv_sessions_expired(sessions, 10 * SECOND));
    CU_ASSERT_PTR_EQUAL(dskv_sessions_expired(sessions, 11 * SECOND), b);
    dskv_session_task_begin(sessions, b);
    dskv_session_task_begin(sessions, b);
    CU_ASSERT_PTR_NULL(dskv_sessions_expired(sessions, 11 * SECOND));
    CU_ASSERT_PTR_EQUAL(dskv_sessions_expired(sessions, 100 * SECOND), a);
    struct dskv_id id = a->id;
    dskv_sessions_end(sessions, a);
    CU_ASSERT_PTR_NULL(dskv_sessions_find(sessions, &id));
    CU_ASSERT_EQUAL(dskv_sessions_next_us(sessions), INT64_MAX);
    dskv_session_renew(sessions, b, 101 * SECOND);
    dskv_session_task_end(sessions, b, 102 * SECOND);
    CU_ASSERT_EQUAL(dskv_sessions_next_us(sessions), INT64_MAX);
    dskv_session_task_end(sessions, b, 103 * SECOND);
    CU_ASSERT_EQUAL(dskv_sessions_next_us(sessions), 113 * SECOND);
    dskv_sessions_close(&sessions);
}

static void sessions_without_end_give_way_when_they_own_nothing(void)
{
    struct dskv_blocks *blocks = dskv_blocks_open(1, 16);
    struct dskv_caches *caches = dskv_caches_open(blocks);
    struct dskv_sessions *sessions = dskv_sessions_open(0);
    struct dskv_session *first = dskv_sessions_begin(sessions, 0), *second = dskv_sessions_begin(sessions, 0);
    struct dskv_id first_id = first->id, second_id = second->id;
    add_cache(blocks, caches, first, 0);
    for (int i = 2; i < DSKV_MAX_SESSIONS; i++)
        dskv_sessions_begin(sessions, i);
    CU_ASSERT_PTR_NOT_NULL(dskv_sessions_begin(sessions, DSKV_MAX_SESSIONS));
    CU_ASSERT_EQUAL(dskv_sessions_count(sessions), DSKV_MAX_SESSIONS);
    CU_ASSERT_PTR_NOT_NULL(dskv_sessions_find(sessions, &first_id));
    CU_ASSERT_PTR_NULL(dskv_sessions_find(sessions, &second_id));
    CU_ASSERT_EQUAL(dskv_sessions_next_us(sessions), INT64_MAX);
    dskv_caches_close(&caches);
    dskv_sessions_close(&sessions);
    dskv_blocks_close(&blocks);
}

int main(void)
{
    return dskv_run_tests(
        "daemon.cache",
        (struct dskv_test[]){
            {"caches are found until they are freed", caches_are_found_until_they_are_freed},
            {"thousands of caches stay apart", thousands_of_caches_stay_apart},
            {"tokens and their check are read from the blocks", tokens_and_their_check_are_read_from_the_blocks},
            {"silence ends a session and work does not", silence_ends_a_session_and_work_does_not},
            {"sessions without end give way when they own nothing",
             sessions_without_end_give_way_when_they_own_nothing},
            {NULL, NULL},
        });
}
