/* What the benchmarks' programs share. */
#ifndef DSKV_LAUNCH_BENCH_COMMON_H
#define DSKV_LAUNCH_BENCH_COMMON_H

#include "base/status.h"
#include "parallel/engine.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Every rank reads the same command line; one of them tells what is wrong with it. */
static inline int dskv_bench_speaks(void)
{
    return dskv_parallel_launched_rank() == 0;
}

/* The file that --json names, to be closed: null with DSKV_EXIT_USAGE. */
static inline enum dskv_exit dskv_bench_json_open(const char *path, const char *mode, FILE **file,
                                                  struct dskv_error *error)
{
    *file = fopen(path, mode);
    return *file ? DSKV_EXIT_OK
                 : dskv_fail_exit(error, DSKV_EXIT_USAGE, "--json %s cannot be written: %s", path, strerror(errno));
}
/* Before minutes are spent on what goes into it: whether it can be written. */
static inline enum dskv_exit dskv_bench_json_check(const char *path, struct dskv_error *error)
{
    FILE *file;
    enum dskv_exit code = dskv_bench_json_open(path, "a", &file, error);
    if (!code)
        fclose(file);
    return code;
}

#endif
