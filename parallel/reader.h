/* Reader: takes a model's config.json apart, key by key.
 *
 * The first thing that is wrong is kept (code, error) and later calls do nothing, so that a family reads like a table.
 * Every sentence begins with the file and names the key.
 */
#ifndef DSKV_PARALLEL_READER_H
#define DSKV_PARALLEL_READER_H

#include "kernels/ops.h"
#include "parallel/json.h"

struct dskv_reader {
    const struct dskv_json *root;
    const char *path;
    enum dskv_exit code;
    struct dskv_error *error;
};

/* Keeps a sentence, unless there is one: "PATH: ...". */
void dskv_reader_fail(struct dskv_reader *reader, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A whole number of min .. max that must be there; min when it is not. */
int32_t dskv_reader_int(struct dskv_reader *reader, const char *key, int32_t min, int32_t max);
/* The same; fallback when the key is absent or null. */
int32_t dskv_reader_int_or(struct dskv_reader *reader, const char *key, int32_t min, int32_t max, int32_t fallback);
int dskv_reader_bool_or(struct dskv_reader *reader, const char *key, int fallback);
/* A finite number above 0. */
double dskv_reader_number_or(struct dskv_reader *reader, const char *key, double fallback);
/* The same of a value found elsewhere; `key` is its name in a sentence. */
double dskv_reader_number_of(struct dskv_reader *reader, const char *key, const struct dskv_json *value,
                             double fallback);
/* Null when absent or null. */
const char *dskv_reader_string(struct dskv_reader *reader, const char *key);
/* What a name means; `key` is where it was found, for a sentence that tells all known ones. */
struct dskv_named {
    const char *name;
    int value;
};
int dskv_reader_choose(struct dskv_reader *reader, const char *key, const char *name, const struct dskv_named *names,
                       size_t n_names);
/* An activation function by transformers' name. */
enum dskv_activation dskv_reader_activation(struct dskv_reader *reader, const char *key, const char *fallback);
/* Refuses any value but absent, null, false, an empty list or an empty object: the option would change the arithmetic.
 */
void dskv_reader_refuse(struct dskv_reader *reader, const char *key);

#endif
