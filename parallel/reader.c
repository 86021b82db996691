#include "parallel/reader.h"

#include "parallel/path.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct dskv_named activations[] = {
    {"gelu_new", DSKV_GELU_TANH},   {"gelu_pytorch_tanh", DSKV_GELU_TANH},
    {"gelu_fast", DSKV_GELU_TANH},  {"gelu", DSKV_GELU_ERF},
    {"gelu_python", DSKV_GELU_ERF}, {"silu", DSKV_SILU},
    {"swish", DSKV_SILU},           {"relu", DSKV_RELU},
};

void dskv_reader_fail(struct dskv_reader *reader, const char *format, ...)
{
    if (reader->code != DSKV_EXIT_OK)
        return;
    char sentence[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    reader->code = dskv_fail_exit(reader->error, DSKV_EXIT_MODEL, "%s: %s", dskv_path_tail(reader->path), sentence);
}

/* The value of a key, or null when it is absent or null: configurations write both for "not set". */
static const struct dskv_json *find(const struct dskv_reader *reader, const char *key)
{
    const struct dskv_json *value = dskv_json_get(reader->root, key);
    return dskv_json_kind(value) == DSKV_JSON_NULL ? NULL : value;
}

int32_t dskv_reader_int_or(struct dskv_reader *reader, const char *key, int32_t min, int32_t max, int32_t fallback)
{
    const struct dskv_json *value = find(reader, key);
    if (!value)
        return fallback;
    if (dskv_json_kind(value) == DSKV_JSON_INTEGER && dskv_json_integer(value) >= min &&
        dskv_json_integer(value) <= max)
        return (int32_t)dskv_json_integer(value);
    dskv_reader_fail(reader, "%s is not a whole number of %d to %d", key, min, max);
    return fallback;
}

int32_t dskv_reader_int(struct dskv_reader *reader, const char *key, int32_t min, int32_t max)
{
    if (!find(reader, key))
        dskv_reader_fail(reader, "%s is missing", key);
    return dskv_reader_int_or(reader, key, min, max, min);
}

int dskv_reader_bool_or(struct dskv_reader *reader, const char *key, int fallback)
{
    const struct dskv_json *value = find(reader, key);
    if (!value)
        return fallback;
    if (dskv_json_kind(value) == DSKV_JSON_BOOL)
        return dskv_json_bool(value);
    dskv_reader_fail(reader, "%s is neither true nor false", key);
    return fallback;
}

double dskv_reader_number_of(struct dskv_reader *reader, const char *key, const struct dskv_json *value,
                             double fallback)
{
    enum dskv_json_kind kind = dskv_json_kind(value);
    if (kind == DSKV_JSON_ABSENT || kind == DSKV_JSON_NULL)
        return fallback;
    if ((kind == DSKV_JSON_INTEGER || kind == DSKV_JSON_REAL) && dskv_json_number(value) > 0 &&
        isfinite((float)dskv_json_number(value)))
        return dskv_json_number(value);
    dskv_reader_fail(reader, "%s is not a number above 0", key);
    return fallback;
}

double dskv_reader_number_or(struct dskv_reader *reader, const char *key, double fallback)
{
    return dskv_reader_number_of(reader, key, find(reader, key), fallback);
}

const char *dskv_reader_string(struct dskv_reader *reader, const char *key)
{
    const struct dskv_json *value = find(reader, key);
    if (!value)
        return NULL;
    if (dskv_json_kind(value) == DSKV_JSON_STRING)
        return dskv_json_string(value);
    dskv_reader_fail(reader, "%s is not a string", key);
    return NULL;
}

int dskv_reader_choose(struct dskv_reader *reader, const char *key, const char *name, const struct dskv_named *names,
                       size_t n_names)
{
    char known[128] = "";
    for (size_t i = 0; i < n_names; i++) {
        if (strcmp(name, names[i].name) == 0)
            return names[i].value;
        size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, "%s%s", i ? ", " : "", names[i].name);
    }
    dskv_reader_fail(reader, "%s \"%.32s\" is not known; known are %s", key, name, known);
    return names[0].value;
}

enum dskv_activation dskv_reader_activation(struct dskv_reader *reader, const char *key, const char *fallback)
{
    const char *name = dskv_reader_string(reader, key);
    return (enum dskv_activation)dskv_reader_choose(reader, key, name ? name : fallback, activations,
                                                    sizeof activations / sizeof *activations);
}

void dskv_reader_refuse(struct dskv_reader *reader, const char *key)
{
    const struct dskv_json *value = find(reader, key);
    enum dskv_json_kind kind = dskv_json_kind(value);
    if (!value || (kind == DSKV_JSON_BOOL && !dskv_json_bool(value)) ||
        ((kind == DSKV_JSON_ARRAY || kind == DSKV_JSON_OBJECT) && dskv_json_count(value) == 0))
        return;
    dskv_reader_fail(reader, "%s is set, which is not supported", key);
}
