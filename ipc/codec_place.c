/* Where the reader or the writer of a message stands, and the errors that are made there. */
#include "codec.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

size_t dskv_place_descend(struct dskv_place *place, const char *format, ...)
{
    size_t n = strlen(place->path);
    va_list args;
    va_start(args, format);
    vsnprintf(place->path + n, sizeof place->path - n, format, args);
    va_end(args);
    return n;
}

enum dskv_code dskv_place_refuse(const struct dskv_place *place, enum dskv_code code, const char *format, ...)
{
    char what[160];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    dskv_fail(place->error, code, "%s %s", place->path, what);
    dskv_error_set_field(place->error, place->leaf);
    if (place->index >= 0)
        dskv_error_set(place->error, DSKV_HAS_INDEX, place->index);
    return code;
}

enum dskv_code dskv_place_wrong_type(const struct dskv_place *place, const char *expected)
{
    return dskv_place_refuse(place, DSKV_BAD_TYPE, "must be %s", expected);
}

enum dskv_code dskv_place_not_allowed(const struct dskv_place *place, const struct dskv_field *field, const char *found)
{
    char valid[128];
    enum dskv_code code = field->refusal ? field->refusal : DSKV_BAD_VALUE;
    dskv_field_valid(field, valid, sizeof valid);
    dskv_place_refuse(place, code, "is %s, must be %s", found, valid);
    dskv_error_set_valid(place->error, "%s", valid);
    return code;
}

enum dskv_code dskv_place_int_not_allowed(const struct dskv_place *place, const struct dskv_field *field, int64_t value)
{
    char found[32];
    snprintf(found, sizeof found, "%lld", (long long)value);
    return dskv_place_not_allowed(place, field, found);
}

enum dskv_code dskv_place_double_not_allowed(const struct dskv_place *place, const struct dskv_field *field,
                                             double value)
{
    char found[32];
    snprintf(found, sizeof found, "%g", value);
    return dskv_place_not_allowed(place, field, found);
}

enum dskv_code dskv_place_bad_length(const struct dskv_place *place, const struct dskv_field *field, int64_t n)
{
    dskv_place_refuse(place, DSKV_BAD_VALUE, "has %lld entries, must have %lld .. %lld", (long long)n,
                      (long long)field->min, (long long)field->max);
    dskv_error_set(place->error, DSKV_HAS_LENGTH, n);
    dskv_error_set(place->error, DSKV_HAS_LIMIT, field->max);
    return DSKV_BAD_VALUE;
}

enum dskv_code dskv_place_bad_range(const struct dskv_place *place, int64_t first, int64_t second)
{
    return dskv_place_refuse(place, DSKV_BAD_VALUE, "is a range from %lld back to %lld", (long long)first,
                             (long long)second);
}
