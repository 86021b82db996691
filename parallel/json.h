/* JSON: reading files of the model directory as a tree of values.
 *
 * Owns: the parser and its hardness (duplicate keys, sizes, depth, trailing text).  Knows nothing of what a file means.
 * The only user of jansson is json.c.  Values belong to the document that they come from and live as long as it does.
 */
#ifndef DSKV_PARALLEL_JSON_H
#define DSKV_PARALLEL_JSON_H

#include "base/status.h"

#include <stdint.h>

struct dskv_json; /* a value; the one that dskv_json_parse gives is the document */

enum dskv_json_kind {
    DSKV_JSON_ABSENT, /* of a null pointer */
    DSKV_JSON_NULL,
    DSKV_JSON_BOOL,
    DSKV_JSON_INTEGER,
    DSKV_JSON_REAL,
    DSKV_JSON_STRING,
    DSKV_JSON_ARRAY,
    DSKV_JSON_OBJECT
};

/* Reads a regular file of at most DSKV_MAX_JSON_BYTES.  DSKV_EXIT_MODEL with a sentence that begins with `path`. */
enum dskv_exit dskv_json_read(const char *path, struct dskv_json **document, struct dskv_error *error);
/* Parses n bytes, which must be one object; `path` is for the sentence. */
enum dskv_exit dskv_json_parse(const char *path, const char *text, size_t n, struct dskv_json **document,
                               struct dskv_error *error);
void dskv_json_close(struct dskv_json **document);

enum dskv_json_kind dskv_json_kind(const struct dskv_json *value);
/* Null when object is no object or has no such key. */
const struct dskv_json *dskv_json_get(const struct dskv_json *object, const char *key);
/* The values themselves; asserted to be of that kind (number: integer or real). */
int dskv_json_bool(const struct dskv_json *value);
int64_t dskv_json_integer(const struct dskv_json *value);
double dskv_json_number(const struct dskv_json *value);
const char *dskv_json_string(const struct dskv_json *value);
/* Elements of an array or members of an object; 0 for anything else. */
size_t dskv_json_count(const struct dskv_json *value);
const struct dskv_json *dskv_json_at(const struct dskv_json *array, size_t index);

/* Members of an object in the file's order: begin, then next until null. */
void *dskv_json_begin(const struct dskv_json *object);
void *dskv_json_next(const struct dskv_json *object, void *member);
const char *dskv_json_member_key(void *member);
const struct dskv_json *dskv_json_member_value(void *member);

#endif
