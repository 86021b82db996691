#include "support/cunit_suite.h"

#include <CUnit/Basic.h>
#include <stdio.h>

int dskv_run_tests(const char *suite_name, const struct dskv_test *tests)
{
    if (CU_initialize_registry() != CUE_SUCCESS)
        return 1;
    CU_pSuite suite = CU_add_suite(suite_name, NULL, NULL);
    for (; tests->name; tests++)
        if (!CU_add_test(suite, tests->name, tests->run)) {
            fprintf(stderr, "%s: cannot add %s\n", suite_name, tests->name);
            return 1;
        }
    CU_basic_set_mode(CU_BRM_VERBOSE);
    CU_basic_run_tests();
    unsigned failures = CU_get_number_of_failures(), ran = CU_get_number_of_tests_run();
    CU_cleanup_registry();
    if (ran == 0)
        return 1;
    return failures > 100 ? 100 : (int)failures;
}
