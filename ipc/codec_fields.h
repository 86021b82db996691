/* Rows of the field tables: how codec_requests.c and codec_events.c write them. */
#ifndef DSKV_IPC_CODEC_FIELDS_H
#define DSKV_IPC_CODEC_FIELDS_H

#include "codec.h"

#include <stddef.h>

/* Names on the wire by number, for fields of type DSKV_FIELD_NAME. */
const char *dskv_field_op(int value);
const char *dskv_field_kind(int value);
const char *dskv_field_code(int value);
const char *dskv_field_dtype(int value);
const char *dskv_field_finish(int value);
const char *dskv_field_which(int value); /* "k", "v" */

extern const struct dskv_table dskv_no_fields;

#define AT(of, member) .offset = offsetof(struct of, member)
#define COUNT(of, member) .offset_n = offsetof(struct of, member)
#define MARK(of, member) .present = offsetof(struct of, member) + 1
#define MUST .flags = DSKV_FIELD_REQUIRED
#define WITHIN(low_, high_) .min = (low_), .max = (high_)
#define CHARS(of, member) .type = DSKV_FIELD_STRING, AT(of, member), .max = sizeof(((struct of *)0)->member) - 1
#define NAMES(names, first, last) .type = DSKV_FIELD_NAME, .name_of = (names), .min = (first), .max = (last)
#define FLOATS (1u << DSKV_F32 | 1u << DSKV_F16 | 1u << DSKV_BF16)
#define TENSOR(dtypes_, dims) .type = DSKV_FIELD_TENSOR, .dtypes = (dtypes_), .n_dims = (dims)
#define TOKENS TENSOR(1u << DSKV_I32, 1)
#define TABLE(name_, of, rows)                                                                                         \
    static const struct dskv_table name_ = {(rows), sizeof(rows) / sizeof(rows)[0], sizeof(struct of)}
#define CREDITS WITHIN(1, DSKV_MAX_CREDITS)

/* A piece of KV, in a request and in an event. */
#define PART(path, of)                                                                                                 \
    {.name = "layer", .type = DSKV_FIELD_INT32, MUST, AT(of, path layer), WITHIN(0, DSKV_MAX_LAYERS - 1)},             \
        {.name = "which", NAMES(dskv_field_which, 0, 1), MUST, AT(of, path is_value)},                                 \
        {.name = "start", .type = DSKV_FIELD_INT32, MUST, AT(of, path start), WITHIN(0, DSKV_MAX_CONTEXT)},            \
        {.name = "stop", .type = DSKV_FIELD_INT32, MUST, AT(of, path stop), WITHIN(0, DSKV_MAX_CONTEXT)},              \
    {                                                                                                                  \
        .name = "data", TENSOR(FLOATS, 3), MUST, AT(of, path data)                                                     \
    }

#endif
