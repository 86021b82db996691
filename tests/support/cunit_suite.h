/* CUnit, with the exit code that ctest needs: the number of failures, and not 0 when no test ran. */
#ifndef DSKV_TESTS_CUNIT_SUITE_H
#define DSKV_TESTS_CUNIT_SUITE_H

#include <CUnit/CUnit.h>

struct dskv_test {
    const char *name;
    void (*run)(void);
};

/* Runs the tests (ended by a null name) as one suite; prints each, its failures and their places. */
int dskv_run_tests(const char *suite, const struct dskv_test *tests);

#endif
