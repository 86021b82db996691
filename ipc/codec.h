/* Codec: how a message's fields are described, read and written.
 *
 * A field is written down once, in codec_requests.c and codec_events.c: its name on the wire, its place in the struct,
 * its type, its range and its default.  codec_read.c turns a header frame into a struct by these tables, codec_write.c
 * does the opposite, codec.c puts envelopes and operations together.  The tables know no msgpack; the reader and the
 * writer know no operation.
 */
#ifndef DSKV_IPC_CODEC_H
#define DSKV_IPC_CODEC_H

#include "ipc/message.h"

/* ---- fields ----------------------------------------------------------------------------------------------------- */

enum dskv_field_type {
    DSKV_FIELD_BOOL,    /* int */
    DSKV_FIELD_INT32,   /* int32_t in min .. max; both 0: any */
    DSKV_FIELD_INT64,   /* int64_t, the same */
    DSKV_FIELD_UINT32,  /* uint32_t */
    DSKV_FIELD_UINT64,  /* uint64_t in min .. max */
    DSKV_FIELD_DOUBLE,  /* double in low .. high; both 0: any finite */
    DSKV_FIELD_STRING,  /* char [max + 1] */
    DSKV_FIELD_ID,      /* struct dskv_id */
    DSKV_FIELD_NAME,    /* an enum, by name_of(min .. max) */
    DSKV_FIELD_RANGE,   /* int32_t [2]: min <= first <= second <= max */
    DSKV_FIELD_TENSOR,  /* struct dskv_wire_tensor */
    DSKV_FIELD_MAP,     /* a struct described by `table` */
    DSKV_FIELD_INTS,    /* int32_t [max], n of them */
    DSKV_FIELD_IDS,     /* pointer to n ids, min .. max of them */
    DSKV_FIELD_TENSORS, /* pointer to n tensors, min .. max of them */
    DSKV_FIELD_MAPS,    /* pointer to n structs described by `table`, min .. max of them */
};

enum dskv_field_flag {
    DSKV_FIELD_REQUIRED = 1,  /* must be there; always written */
    DSKV_FIELD_NIL = 2,       /* nil is written and read for "not present" */
    DSKV_FIELD_OPEN = 4,      /* a name that is not known reads as the default */
    DSKV_FIELD_FRAMELESS = 8, /* a tensor may have no frame: its data came in other messages */
};

struct dskv_table {
    const struct dskv_field *fields;
    int n;
    size_t bytes; /* of the struct */
};

struct dskv_field {
    const char *name;
    enum dskv_field_type type;
    unsigned flags;
    size_t offset;             /* of the value in its struct */
    size_t offset_n;           /* of the count of a list */
    size_t present;            /* 1 + offset of the int (or bits) that says whether it is there; 0: the value says so */
    uint32_t present_bit;      /* the bit in it; 0: the whole int */
    enum dskv_code refusal;    /* of a name that is not known, where it is not DSKV_BAD_VALUE */
    int64_t min, max, initial; /* initial: the default, where it is not 0 */
    double low, high, initial_double;
    const char *valid; /* of a double, for people */
    const char *(*name_of)(int value);
    unsigned dtypes; /* of tensors: bits 1 << enum dskv_dtype */
    int32_t n_dims;  /* of tensors */
    const struct dskv_table *table;
};

/* The envelopes (head: its fields that are judged first), and the fields that an operation adds to a request, or an
 * event of this kind and operation to its own; null when there is no such event. */
extern const struct dskv_table dskv_request_head, dskv_request_envelope, dskv_event_envelope;
const struct dskv_table *dskv_request_table(enum dskv_op op);
const struct dskv_table *dskv_event_table(enum dskv_event_kind kind, enum dskv_op op);

/* Whether an integer, a name's number or a list's length is within the field's bounds. */
int dskv_field_allows(const struct dskv_field *field, int64_t value);
int dskv_field_allows_double(const struct dskv_field *field, double value);
/* What is allowed, for people: "0 .. 256", "k, v". */
void dskv_field_valid(const struct dskv_field *field, char *text, size_t text_bytes);
/* The optional fields that are not part of the value itself say in another member whether they are there. */
int dskv_field_is_marked(const struct dskv_field *field, const void *base);
void dskv_field_mark(const struct dskv_field *field, void *base);

/* ---- places ----------------------------------------------------------------------------------------------------- */

/* What is being read or written: errors name it. */
struct dskv_place {
    char path[160];   /* for people: "sequences[3].want.topk" */
    const char *leaf; /* for programs: "topk" */
    int64_t index;    /* of the outermost list entry: 3; -1: none */
    struct dskv_error *error;
};

/* Adds to the path what the format says, and returns its length before, to cut it back to. */
size_t dskv_place_descend(struct dskv_place *place, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Makes an error: the path, a space and what the format says.  All return its code. */
enum dskv_code dskv_place_refuse(const struct dskv_place *place, enum dskv_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
enum dskv_code dskv_place_wrong_type(const struct dskv_place *place, const char *expected);
enum dskv_code dskv_place_not_allowed(const struct dskv_place *place, const struct dskv_field *field,
                                      const char *found);
enum dskv_code dskv_place_int_not_allowed(const struct dskv_place *place, const struct dskv_field *field,
                                          int64_t value);
enum dskv_code dskv_place_double_not_allowed(const struct dskv_place *place, const struct dskv_field *field,
                                             double value);
enum dskv_code dskv_place_bad_length(const struct dskv_place *place, const struct dskv_field *field, int64_t n);
enum dskv_code dskv_place_bad_range(const struct dskv_place *place, int64_t first, int64_t second);

/* ---- memory of a decoded message -------------------------------------------------------------------------------- */

struct dskv_message_memory;

struct dskv_message_memory *dskv_message_memory_open(struct dskv_frames *frames);            /* takes the frames over */
void *dskv_message_memory_alloc(struct dskv_message_memory *memory, size_t n, size_t bytes); /* zeroed; never null */
const struct dskv_frames *dskv_message_memory_frames(const struct dskv_message_memory *memory);
void dskv_message_memory_close(struct dskv_message_memory **memory);

/* ---- reading ---------------------------------------------------------------------------------------------------- */

struct dskv_reader;

/* Takes the frames over (one or more), scans and unpacks the header.  On an error *reader is null. */
enum dskv_code dskv_reader_open(struct dskv_frames *frames, struct dskv_reader **reader, struct dskv_error *error);
/* A field of the header's map before the rest is believed: 1 when it is there and has this type. */
int dskv_reader_peek_int(const struct dskv_reader *reader, const char *name, int64_t *value);
int dskv_reader_peek_name(const struct dskv_reader *reader, const char *name, const char *(*name_of)(int), int n,
                          int *value);
/* Reads the header's map into *base, which is zeroed: every key is in one of the tables, once.  With pass_over, unknown
 * keys are passed over, and so are the frames that no known key names. */
enum dskv_code dskv_reader_read(struct dskv_reader *reader, const struct dskv_table *const *tables, int n_tables,
                                void *base, int pass_over);
/* Frees the reader; hands out what the message read points to, or with memory null frees it too. */
void dskv_reader_close(struct dskv_reader **reader, void **memory);

/* ---- writing ---------------------------------------------------------------------------------------------------- */

/* The message of a struct; every tensor's bytes are copied. */
enum dskv_code dskv_write(const struct dskv_table *const *tables, int n_tables, const void *base,
                          struct dskv_frames *frames, struct dskv_error *error);

#endif
