#include "parallel/json.h"

#include "base/limits.h"
#include "base/memory.h"
#include "parallel/path.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static json_t *json_of(const struct dskv_json *value)
{
    return (json_t *)(uintptr_t)value; /* jansson's readers take pointers that are not const */
}

static enum dskv_exit read_text(int fd, const char *path, char **text, size_t *n, struct dskv_error *error)
{
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode))
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s is not a regular file", path);
    if (status.st_size > DSKV_MAX_JSON_BYTES)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s has %lld bytes; at most %d are read", path,
                              (long long)status.st_size, DSKV_MAX_JSON_BYTES);
    size_t size = (size_t)status.st_size;
    *text = dskv_calloc(size + 1, 1);
    for (*n = 0; *n < size;) {
        ssize_t got = read(fd, *text + *n, size - *n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s cannot be read: %s", path,
                                  got < 0 ? strerror(errno) : "it ends too early");
        *n += (size_t)got;
    }
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_json_read(const char *path, struct dskv_json **document, struct dskv_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang the start */
    if (fd < 0)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s cannot be opened: %s", dskv_path_tail(path), strerror(errno));
    char *text = NULL;
    size_t n = 0;
    enum dskv_exit code = read_text(fd, dskv_path_tail(path), &text, &n, error);
    close(fd);
    if (code == DSKV_EXIT_OK)
        code = dskv_json_parse(path, text, n, document, error);
    free(text);
    return code;
}

enum dskv_exit dskv_json_parse(const char *path, const char *text, size_t n, struct dskv_json **document,
                               struct dskv_error *error)
{
    json_error_t where;
    path = dskv_path_tail(path);
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &where);
    if (!root)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s is not valid JSON: line %d: %.100s", path, where.line,
                              where.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s is not a JSON object", path);
    }
    *document = (struct dskv_json *)root;
    return DSKV_EXIT_OK;
}

void dskv_json_close(struct dskv_json **document)
{
    if (*document)
        json_decref(json_of(*document));
    *document = NULL;
}

enum dskv_json_kind dskv_json_kind(const struct dskv_json *value)
{
    if (!value)
        return DSKV_JSON_ABSENT;
    switch (json_typeof(json_of(value))) {
    case JSON_NULL: return DSKV_JSON_NULL;
    case JSON_TRUE:
    case JSON_FALSE: return DSKV_JSON_BOOL;
    case JSON_INTEGER: return DSKV_JSON_INTEGER;
    case JSON_REAL: return DSKV_JSON_REAL;
    case JSON_STRING: return DSKV_JSON_STRING;
    case JSON_ARRAY: return DSKV_JSON_ARRAY;
    case JSON_OBJECT: return DSKV_JSON_OBJECT;
    }
    dskv_bug(__FILE__, __LINE__, "kind", "%d", (int)json_typeof(json_of(value)));
}

const struct dskv_json *dskv_json_get(const struct dskv_json *object, const char *key)
{
    return (const struct dskv_json *)json_object_get(json_of(object), key);
}

static void expect(const struct dskv_json *value, enum dskv_json_kind kind)
{
    DSKV_ASSERT(dskv_json_kind(value) == kind, "kind %d instead of %d", (int)dskv_json_kind(value), (int)kind);
}

int dskv_json_bool(const struct dskv_json *value)
{
    expect(value, DSKV_JSON_BOOL);
    return json_is_true(json_of(value));
}

int64_t dskv_json_integer(const struct dskv_json *value)
{
    expect(value, DSKV_JSON_INTEGER);
    return json_integer_value(json_of(value));
}

double dskv_json_number(const struct dskv_json *value)
{
    DSKV_ASSERT(json_is_number(json_of(value)), "kind %d", (int)dskv_json_kind(value));
    return json_number_value(json_of(value));
}

const char *dskv_json_string(const struct dskv_json *value)
{
    expect(value, DSKV_JSON_STRING);
    return json_string_value(json_of(value));
}

size_t dskv_json_count(const struct dskv_json *value)
{
    return json_is_object(json_of(value)) ? json_object_size(json_of(value)) : json_array_size(json_of(value));
}

const struct dskv_json *dskv_json_at(const struct dskv_json *array, size_t index)
{
    return (const struct dskv_json *)json_array_get(json_of(array), index);
}

void *dskv_json_begin(const struct dskv_json *object)
{
    return json_object_iter(json_of(object));
}

void *dskv_json_next(const struct dskv_json *object, void *member)
{
    return json_object_iter_next(json_of(object), member);
}

const char *dskv_json_member_key(void *member)
{
    return json_object_iter_key(member);
}

const struct dskv_json *dskv_json_member_value(void *member)
{
    return (const struct dskv_json *)json_object_iter_value(member);
}
