/* Status: how the parts of dskvd report failure.
 *
 * Two worlds.  An operating error is a value: a request's error is an `enum dskv_code` with a filled `struct
 * dskv_error`; a failed start or a lost device is an `enum dskv_exit`, the daemon's exit code, with its sentence in
 * `error->message`. It is made once, where it happens, and passed up unchanged.  A bug is an always-on assertion that
 * prints the values and ends the process with DSKV_EXIT_BUG.  This module knows nothing of requests, ranks or devices.
 */
#ifndef DSKV_BASE_STATUS_H
#define DSKV_BASE_STATUS_H

#include "dskv/error.h"

#include <stddef.h>

/* Exit codes of the daemon. */
enum dskv_exit {
    DSKV_EXIT_OK = 0,        /* drained, or a command such as --help */
    DSKV_EXIT_USAGE = 2,     /* command line */
    DSKV_EXIT_MODEL = 3,     /* model directory */
    DSKV_EXIT_ENDPOINT = 4,  /* cannot listen */
    DSKV_EXIT_MEMORY = 5,    /* weights or cache do not fit */
    DSKV_EXIT_DEVICE = 6,    /* device missing or failed */
    DSKV_EXIT_RANK_LOST = 7, /* a rank or its link was lost */
    DSKV_EXIT_BUG = 8,       /* an assertion failed */
};

/* The code of a name (the inverse of dskv_code_name); DSKV_N_CODES when there is none. */
enum dskv_code dskv_code_from_name(const char *name);

/* Fills *error (which may be null) with a code and a sentence, clears its details, and returns the code. */
enum dskv_code dskv_fail(struct dskv_error *error, enum dskv_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The same for a failed start: stores the sentence, code DSKV_INTERNAL, and returns the exit code. */
enum dskv_exit dskv_fail_exit(struct dskv_error *error, enum dskv_exit code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Adds a detail to a filled error (null: nothing). */
void dskv_error_set(struct dskv_error *error, enum dskv_detail detail, int64_t value);
void dskv_error_set_field(struct dskv_error *error, const char *field);
void dskv_error_set_valid(struct dskv_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A bug: prints where and what on standard error and ends the process with DSKV_EXIT_BUG. */
void dskv_bug(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((noreturn, format(printf, 4, 5)));

/* Always on.  The format prints the values that made the condition false. */
#define DSKV_ASSERT(condition, ...)                                                                                    \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            dskv_bug(__FILE__, __LINE__, #condition, __VA_ARGS__);                                                     \
    } while (0)

#endif
