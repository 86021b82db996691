#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *const code_names[DSKV_N_CODES] = {[DSKV_OK] = "ok",
#define CODE_NAME(constant, name, when) [constant] = name,
                                                     DSKV_CODES(CODE_NAME)
#undef CODE_NAME
};

const char *dskv_code_name(enum dskv_code code)
{
    DSKV_ASSERT((unsigned)code < DSKV_N_CODES, "code %d", (int)code);
    return code_names[code];
}

enum dskv_code dskv_code_from_name(const char *name)
{
    int code = DSKV_OK;
    while (code < DSKV_N_CODES && strcmp(code_names[code], name) != 0)
        code++;
    return (enum dskv_code)code;
}

static void set_message(struct dskv_error *error, enum dskv_code code, const char *format, va_list arguments)
{
    if (!error)
        return;
    *error = (struct dskv_error){.code = code};
    vsnprintf(error->message, sizeof error->message, format, arguments);
}

enum dskv_code dskv_fail(struct dskv_error *error, enum dskv_code code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    set_message(error, code, format, arguments);
    va_end(arguments);
    return code;
}

enum dskv_exit dskv_fail_exit(struct dskv_error *error, enum dskv_exit code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    set_message(error, DSKV_INTERNAL, format, arguments);
    va_end(arguments);
    return code;
}

void dskv_error_set(struct dskv_error *error, enum dskv_detail detail, int64_t value)
{
    if (!error)
        return;
    error->has |= (uint32_t)detail;
    switch (detail) {
    case DSKV_HAS_NEEDED: error->needed = value; break;
    case DSKV_HAS_FREE: error->free = value; break;
    case DSKV_HAS_LIMIT: error->limit = value; break;
    case DSKV_HAS_LENGTH: error->length = value; break;
    case DSKV_HAS_INDEX: error->index = value; break;
    }
}

void dskv_error_set_field(struct dskv_error *error, const char *field)
{
    if (error)
        snprintf(error->field, sizeof error->field, "%s", field);
}

void dskv_error_set_valid(struct dskv_error *error, const char *format, ...)
{
    if (!error)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->valid, sizeof error->valid, format, arguments);
    va_end(arguments);
}

void dskv_bug(const char *file, int line, const char *condition, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "dskvd: bug at %s:%d: %s: ", file, line, condition);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    fflush(stderr);
    va_end(arguments);
    _exit(DSKV_EXIT_BUG);
}
