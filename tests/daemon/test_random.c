#include "daemon/random.h"
#include "support/cunit_suite.h"

#define N 1000

/* How many of the first N seeds are beyond the wire's range or equal their predecessor. */
static int count_wrong(struct dskv_seeds seeds)
{
    int wrong = 0;
    uint64_t previous = 0;
    for (int i = 0; i < N; i++) {
        uint64_t seed = dskv_seeds_next(&seeds);
        wrong += seed >> 63 || seed == previous;
        previous = seed;
    }
    return wrong;
}

static void a_base_repeats_its_seeds(void)
{
    struct dskv_seeds a = {.base = 5}, b = {.base = 5}, other = {.base = 6};
    int same = 0, equal = 0;
    for (int i = 0; i < N; i++) {
        uint64_t seed = dskv_seeds_next(&a);
        same += seed == dskv_seeds_next(&b);
        equal += seed == dskv_seeds_next(&other);
    }
    CU_ASSERT_EQUAL(same, N);
    CU_ASSERT_EQUAL(equal, 0);
    CU_ASSERT_EQUAL(count_wrong((struct dskv_seeds){.base = 0}), 0);
}

static void without_a_base_nobody_can_guess(void)
{
    struct dskv_seeds a = {.base = -1}, b = {.base = -1};
    CU_ASSERT_NOT_EQUAL(dskv_seeds_next(&a), dskv_seeds_next(&b));
    CU_ASSERT_EQUAL(count_wrong(a), 0);
}

int main(void)
{
    return dskv_run_tests("daemon.random", (struct dskv_test[]){
                                               {"a base repeats its seeds", a_base_repeats_its_seeds},
                                               {"without a base nobody can guess", without_a_base_nobody_can_guess},
                                               {NULL, NULL},
                                           });
}
