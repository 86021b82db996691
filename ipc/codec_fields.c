#include "codec_fields.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const struct dskv_table dskv_no_fields = {NULL, 0, 0};

const char *dskv_field_op(int value)
{
    return dskv_op_name((enum dskv_op)value);
}

const char *dskv_field_code(int value)
{
    return dskv_code_name((enum dskv_code)value);
}

const char *dskv_field_dtype(int value)
{
    return dskv_dtype_name((enum dskv_dtype)value);
}

const char *dskv_field_finish(int value)
{
    return dskv_finish_name((enum dskv_finish)value);
}

const char *dskv_field_kind(int value)
{
    return dskv_event_kind_name((enum dskv_event_kind)value);
}

const char *dskv_field_which(int value)
{
    return value ? "v" : "k";
}

/* ---- what a field allows ---------------------------------------------------------------------------------------- */

static void bounds_of(const struct dskv_field *field, int64_t *min, int64_t *max)
{
    *min = field->min;
    *max = field->max;
    if (field->min == 0 && field->max == 0) {
        *min = field->type == DSKV_FIELD_INT32 ? INT32_MIN : field->type == DSKV_FIELD_INT64 ? INT64_MIN : 0;
        *max = field->type == DSKV_FIELD_INT32 ? INT32_MAX : field->type == DSKV_FIELD_UINT32 ? UINT32_MAX : INT64_MAX;
    }
}

int dskv_field_allows(const struct dskv_field *field, int64_t value)
{
    int64_t min = 0, max = 0;
    bounds_of(field, &min, &max);
    return value >= min && value <= max;
}

int dskv_field_allows_double(const struct dskv_field *field, double value)
{
    if (field->low == 0 && field->high == 0)
        return isfinite(value);
    return value >= field->low && value <= field->high; /* false for NaN */
}

void dskv_field_valid(const struct dskv_field *field, char *text, size_t text_bytes)
{
    if (field->valid || field->type == DSKV_FIELD_DOUBLE) {
        snprintf(text, text_bytes, "%s", field->valid ? field->valid : "a finite number");
        return;
    }
    if (field->type != DSKV_FIELD_NAME) {
        int64_t min = 0, max = 0;
        bounds_of(field, &min, &max);
        snprintf(text, text_bytes, "%lld .. %lld", (long long)min, (long long)max);
        return;
    }
    size_t n = 0;
    text[0] = 0;
    for (int64_t value = field->min; value <= field->max && n < text_bytes; value++)
        n += (size_t)snprintf(text + n, text_bytes - n, "%s%s", n ? ", " : "", field->name_of((int)value));
}

int dskv_field_is_marked(const struct dskv_field *field, const void *base)
{
    uint32_t bits = 0;
    memcpy(&bits, (const char *)base + field->present - 1, sizeof bits);
    return field->present_bit ? (bits & field->present_bit) != 0 : bits != 0;
}

void dskv_field_mark(const struct dskv_field *field, void *base)
{
    uint32_t bits = 0;
    char *at = (char *)base + field->present - 1;
    memcpy(&bits, at, sizeof bits);
    bits |= field->present_bit ? field->present_bit : 1;
    memcpy(at, &bits, sizeof bits);
}
