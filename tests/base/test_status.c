#include "base/memory.h"
#include "base/status.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void names_are_unique_and_reversible(void)
{
    for (int code = 0; code < DSKV_N_CODES; code++)
        CU_ASSERT_EQUAL(dskv_code_from_name(dskv_code_name((enum dskv_code)code)), code);
    CU_ASSERT_EQUAL(dskv_code_from_name("no such code"), DSKV_N_CODES);
}

static void fail_fills_and_clears(void)
{
    struct dskv_error error;
    memset(&error, 0x5a, sizeof error);
    CU_ASSERT_EQUAL(dskv_fail(&error, DSKV_POOL_FULL, "%d of %d", 3, 2), DSKV_POOL_FULL);
    CU_ASSERT_STRING_EQUAL(error.message, "3 of 2");
    CU_ASSERT_EQUAL(error.has, 0);
    CU_ASSERT_EQUAL(error.field[0], 0);
    dskv_error_set(&error, DSKV_HAS_NEEDED, 3);
    dskv_error_set(&error, DSKV_HAS_FREE, 2);
    CU_ASSERT_EQUAL(error.has, DSKV_HAS_NEEDED | DSKV_HAS_FREE);
    CU_ASSERT_EQUAL(error.needed, 3);
    CU_ASSERT_EQUAL(error.free, 2);
    CU_ASSERT_EQUAL(dskv_fail(NULL, DSKV_BUSY, "nobody reads it"), DSKV_BUSY);
}

static void a_bug_ends_with_its_code(void)
{
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(1);
        DSKV_ASSERT(1 + 1 == 3, "%d", 2);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CU_ASSERT(WIFEXITED(status));
    CU_ASSERT_EQUAL(WEXITSTATUS(status), DSKV_EXIT_BUG);
}

static void memory_is_never_null(void)
{
    void *nothing = dskv_calloc(0, 8);
    CU_ASSERT_PTR_NOT_NULL(nothing);
    free(nothing);
    char *text = dskv_format("%s-%d", "a", 1);
    CU_ASSERT_STRING_EQUAL(text, "a-1");
    free(text);
    CU_ASSERT(dskv_resident_bytes() > 0);
}

int main(void)
{
    return dskv_run_tests("base.status", (struct dskv_test[]){
                                             {"names are unique and reversible", names_are_unique_and_reversible},
                                             {"fail fills and clears", fail_fills_and_clears},
                                             {"a bug ends with its code", a_bug_ends_with_its_code},
                                             {"memory is never null", memory_is_never_null},
                                             {NULL, NULL},
                                         });
}
