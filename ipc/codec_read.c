/* The reader: a header frame into a struct, by the tables of codec_fields.c. */
#include "base/memory.h"
#include "codec.h"
#include "scan.h"

#include <msgpack.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct dskv_reader {
    struct dskv_message_memory *memory;
    const struct dskv_frames *frames;
    msgpack_unpacked unpacked;
    uint8_t *named;          /* [frames->n]: whether a tensor has named the frame */
    int pass_over;           /* unknown keys are no error */
    int n_passed;            /* how many there were */
    struct dskv_place place; /* what is being read */
};

/* ---- values ----------------------------------------------------------------------------------------------------- */

static int string_is(const msgpack_object *object, const char *string)
{
    return object->type == MSGPACK_OBJECT_STR && object->via.str.size == strlen(string) &&
           memcmp(object->via.str.ptr, string, object->via.str.size) == 0;
}

/* An integer of any width; beyond int64 it becomes INT64_MAX with *too_large set. */
static int as_int(const msgpack_object *object, int64_t *value, int *too_large)
{
    *too_large = 0;
    if (object->type == MSGPACK_OBJECT_POSITIVE_INTEGER) {
        *too_large = object->via.u64 > INT64_MAX;
        *value = *too_large ? INT64_MAX : (int64_t)object->via.u64;
        return 1;
    }
    *value = object->type == MSGPACK_OBJECT_NEGATIVE_INTEGER ? object->via.i64 : 0;
    return object->type == MSGPACK_OBJECT_NEGATIVE_INTEGER;
}

static enum dskv_code read_int(struct dskv_reader *reader, const struct dskv_field *field, const msgpack_object *object,
                               int64_t *value)
{
    int too_large = 0;
    if (!as_int(object, value, &too_large))
        return dskv_place_wrong_type(&reader->place, "an integer");
    if (too_large)
        return dskv_place_not_allowed(&reader->place, field, "beyond 63 bits");
    return dskv_field_allows(field, *value) ? DSKV_OK : dskv_place_int_not_allowed(&reader->place, field, *value);
}

static enum dskv_code read_double(struct dskv_reader *reader, const struct dskv_field *field,
                                  const msgpack_object *object, double *value)
{
    int too_large = 0;
    int64_t integer = 0;
    if (object->type == MSGPACK_OBJECT_FLOAT32 || object->type == MSGPACK_OBJECT_FLOAT64)
        *value = object->via.f64;
    else if (as_int(object, &integer, &too_large))
        *value = (double)integer;
    else
        return dskv_place_wrong_type(&reader->place, "a number");
    if (dskv_field_allows_double(field, *value))
        return DSKV_OK;
    return dskv_place_double_not_allowed(&reader->place, field, *value);
}

static enum dskv_code read_string(struct dskv_reader *reader, const struct dskv_field *field,
                                  const msgpack_object *object, char *string)
{
    if (object->type != MSGPACK_OBJECT_STR)
        return dskv_place_wrong_type(&reader->place, "a string");
    size_t n = object->via.str.size;
    if (n > (size_t)field->max) {
        dskv_place_refuse(&reader->place, DSKV_BAD_VALUE, "has %zu bytes, must have at most %lld", n,
                          (long long)field->max);
        dskv_error_set(reader->place.error, DSKV_HAS_LENGTH, (int64_t)n);
        dskv_error_set(reader->place.error, DSKV_HAS_LIMIT, field->max);
        return DSKV_BAD_VALUE;
    }
    if (memchr(object->via.str.ptr, 0, n))
        return dskv_place_refuse(&reader->place, DSKV_BAD_VALUE, "holds a zero byte");
    memcpy(string, object->via.str.ptr, n);
    string[n] = 0;
    return DSKV_OK;
}

static enum dskv_code read_id(struct dskv_reader *reader, const msgpack_object *object, struct dskv_id *id)
{
    if (object->type != MSGPACK_OBJECT_BIN)
        return dskv_place_wrong_type(&reader->place, "an id: 16 bytes");
    if (object->via.bin.size != sizeof id->bytes)
        return dskv_place_refuse(&reader->place, DSKV_BAD_VALUE, "has %u bytes, an id has 16", object->via.bin.size);
    memcpy(id->bytes, object->via.bin.ptr, sizeof id->bytes);
    return DSKV_OK;
}

static enum dskv_code read_name(struct dskv_reader *reader, const struct dskv_field *field,
                                const msgpack_object *object, int32_t *value)
{
    if (object->type != MSGPACK_OBJECT_STR)
        return dskv_place_wrong_type(&reader->place, "a name");
    for (int64_t i = field->min; i <= field->max; i++)
        if (string_is(object, field->name_of((int)i))) {
            *value = (int32_t)i;
            return DSKV_OK;
        }
    if (field->flags & DSKV_FIELD_OPEN) {
        *value = (int32_t)field->initial;
        return DSKV_OK;
    }
    char found[64];
    size_t n = object->via.str.size < 60 ? object->via.str.size : dskv_scan_utf8(object->via.str.ptr, 60);
    snprintf(found, sizeof found, "\"%.*s\"", (int)n, object->via.str.ptr);
    return dskv_place_not_allowed(&reader->place, field, found);
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

enum { TENSOR_DTYPE, TENSOR_SHAPE, TENSOR_FRAME, N_TENSOR_KEYS };
static const char *const tensor_keys[N_TENSOR_KEYS] = {"dtype", "shape", "frame"};

static enum dskv_code read_tensor_dtype(struct dskv_reader *reader, const struct dskv_field *field,
                                        const msgpack_object *object, struct dskv_wire_tensor *tensor)
{
    char valid[64] = "";
    for (int dtype = 0; dtype < DSKV_N_DTYPES; dtype++)
        if (field->dtypes & 1u << dtype) {
            const char *name = dskv_dtype_name((enum dskv_dtype)dtype);
            if (string_is(object, name)) {
                tensor->dtype = (enum dskv_dtype)dtype;
                return DSKV_OK;
            }
            size_t n = strlen(valid);
            snprintf(valid + n, sizeof valid - n, "%s%s", n ? ", " : "", name);
        }
    dskv_place_refuse(&reader->place, DSKV_BAD_TYPE, "must be a tensor of %s", valid);
    dskv_error_set_valid(reader->place.error, "%s", valid);
    return DSKV_BAD_TYPE;
}

/* Token ids of another shape are another type; any other tensor has a wrong shape. */
static enum dskv_code wrong_dims(struct dskv_reader *reader, const struct dskv_field *field, size_t found)
{
    enum dskv_code code = field->dtypes == 1u << DSKV_I32 ? DSKV_BAD_TYPE : DSKV_WRONG_SHAPE;
    return dskv_place_refuse(&reader->place, code, "must have %d dimension%s, not %zu", field->n_dims,
                             field->n_dims > 1 ? "s" : "", found);
}

static enum dskv_code read_tensor_shape(struct dskv_reader *reader, const struct dskv_field *field,
                                        const msgpack_object *object, struct dskv_wire_tensor *tensor)
{
    if (object->type != MSGPACK_OBJECT_ARRAY)
        return dskv_place_refuse(&reader->place, DSKV_BAD_TYPE, "must have a shape: a list of integers");
    if ((int64_t)object->via.array.size != field->n_dims)
        return wrong_dims(reader, field, object->via.array.size);
    uint64_t bytes = dskv_dtype_bytes(tensor->dtype);
    tensor->n_dims = field->n_dims;
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        int too_large = 0;
        if (!as_int(&object->via.array.ptr[i], &tensor->shape[i], &too_large))
            return dskv_place_refuse(&reader->place, DSKV_BAD_TYPE, "must have a shape: a list of integers");
        if (tensor->shape[i] < 0 || tensor->shape[i] > DSKV_MAX_REPLY_BYTES)
            return dskv_place_refuse(&reader->place, DSKV_BAD_VALUE, "has a size of %lld in its shape",
                                     (long long)tensor->shape[i]);
        /* Both factors are below 2^29, and the product is looked at before it can grow further. */
        bytes = bytes > DSKV_MAX_REPLY_BYTES ? bytes : bytes * (uint64_t)tensor->shape[i];
    }
    for (int32_t i = 0; i < tensor->n_dims; i++)
        bytes = tensor->shape[i] ? bytes : 0;
    if (bytes > DSKV_MAX_REPLY_BYTES)
        return dskv_place_refuse(&reader->place, DSKV_BAD_VALUE, "has a shape of more than %d bytes",
                                 DSKV_MAX_REPLY_BYTES);
    tensor->bytes = bytes;
    return DSKV_OK;
}

/* The bytes stay in the frame, unless it starts at an address that its elements cannot be read from. */
static const void *aligned_data(struct dskv_reader *reader, const struct dskv_frame *frame)
{
    static const int32_t nothing;
    if (frame->bytes == 0)
        return &nothing;
    if ((uintptr_t)frame->data % sizeof(int64_t) == 0)
        return frame->data;
    return memcpy(dskv_message_memory_alloc(reader->memory, frame->bytes, 1), frame->data, frame->bytes);
}

static enum dskv_code read_tensor_frame(struct dskv_reader *reader, const msgpack_object *object,
                                        struct dskv_wire_tensor *tensor)
{
    int64_t number = 0;
    int too_large = 0;
    if (!as_int(object, &number, &too_large))
        return dskv_place_refuse(&reader->place, DSKV_BAD_TYPE, "must have a frame: an integer");
    if (number < 1 || number >= reader->frames->n)
        return dskv_place_refuse(&reader->place, DSKV_BAD_VALUE,
                                 "is in frame %lld, the message has %d after the header", (long long)number,
                                 reader->frames->n - 1);
    if (reader->named[number]++)
        return dskv_place_refuse(&reader->place, DSKV_BAD_MESSAGE, "is in frame %lld, which is another tensor's",
                                 (long long)number);
    const struct dskv_frame *frame = &reader->frames->frames[number];
    if (frame->bytes != tensor->bytes) {
        dskv_place_refuse(&reader->place, DSKV_WRONG_SHAPE, "has a shape of %zu bytes, but its frame has %zu",
                          tensor->bytes, frame->bytes);
        dskv_error_set(reader->place.error, DSKV_HAS_NEEDED, (int64_t)tensor->bytes);
        dskv_error_set(reader->place.error, DSKV_HAS_LENGTH, (int64_t)frame->bytes);
        return DSKV_WRONG_SHAPE;
    }
    tensor->data = aligned_data(reader, frame);
    return DSKV_OK;
}

static enum dskv_code read_tensor(struct dskv_reader *reader, const struct dskv_field *field,
                                  const msgpack_object *object, struct dskv_wire_tensor *tensor)
{
    const msgpack_object *found[N_TENSOR_KEYS] = {NULL};
    if (object->type != MSGPACK_OBJECT_MAP)
        return dskv_place_wrong_type(&reader->place, "a tensor: a map of dtype, shape, frame");
    for (uint32_t i = 0; i < object->via.map.size; i++) {
        const msgpack_object_kv *kv = &object->via.map.ptr[i];
        int which = 0;
        while (which < N_TENSOR_KEYS && !string_is(&kv->key, tensor_keys[which]))
            which++;
        if (which == N_TENSOR_KEYS)
            return dskv_place_refuse(&reader->place, DSKV_UNKNOWN_FIELD,
                                     "is a tensor, which has only dtype, shape and frame");
        if (found[which])
            return dskv_place_refuse(&reader->place, DSKV_BAD_MESSAGE, "has its %s twice", tensor_keys[which]);
        found[which] = &kv->val;
    }
    int frameless = (field->flags & DSKV_FIELD_FRAMELESS) && !found[TENSOR_FRAME];
    for (int which = 0; which < N_TENSOR_KEYS; which++)
        if (!found[which] && !(which == TENSOR_FRAME && frameless))
            return dskv_place_refuse(&reader->place, DSKV_BAD_VALUE, "is a tensor whose %s is missing",
                                     tensor_keys[which]);
    enum dskv_code code = read_tensor_dtype(reader, field, found[TENSOR_DTYPE], tensor);
    if (!code)
        code = read_tensor_shape(reader, field, found[TENSOR_SHAPE], tensor);
    return code || frameless ? code : read_tensor_frame(reader, found[TENSOR_FRAME], tensor);
}

/* ---- maps and lists --------------------------------------------------------------------------------------------- */

static enum dskv_code read_map(struct dskv_reader *reader, const msgpack_object *object,
                               const struct dskv_table *const *tables, int n_tables, void *base);

static enum dskv_code list_length(struct dskv_reader *reader, const struct dskv_field *field,
                                  const msgpack_object *object, void *base, size_t *n)
{
    if (object->type != MSGPACK_OBJECT_ARRAY)
        return dskv_place_wrong_type(&reader->place, "a list");
    *n = object->via.array.size;
    if (!dskv_field_allows(field, (int64_t)*n))
        return dskv_place_bad_length(&reader->place, field, (int64_t)*n);
    int32_t count = (int32_t)*n;
    memcpy((char *)base + field->offset_n, &count, sizeof count);
    return DSKV_OK;
}

static enum dskv_code read_entry(struct dskv_reader *reader, const struct dskv_field *field,
                                 const msgpack_object *object, void *entry)
{
    if (field->type == DSKV_FIELD_IDS)
        return read_id(reader, object, entry);
    if (field->type == DSKV_FIELD_TENSORS)
        return read_tensor(reader, field, object, entry);
    if (field->type == DSKV_FIELD_MAPS)
        return object->type == MSGPACK_OBJECT_MAP ? read_map(reader, object, &field->table, 1, entry)
                                                  : dskv_place_wrong_type(&reader->place, "a map");
    const struct dskv_field any = {.type = DSKV_FIELD_INT32};
    int64_t value = 0;
    enum dskv_code code = read_int(reader, &any, object, &value);
    *(int32_t *)entry = (int32_t)value;
    return code;
}

static enum dskv_code read_list(struct dskv_reader *reader, const struct dskv_field *field,
                                const msgpack_object *object, void *base)
{
    size_t n = 0, entry_bytes = field->type == DSKV_FIELD_IDS       ? sizeof(struct dskv_id)
                                : field->type == DSKV_FIELD_TENSORS ? sizeof(struct dskv_wire_tensor)
                                : field->type == DSKV_FIELD_MAPS    ? field->table->bytes
                                                                    : sizeof(int32_t);
    enum dskv_code code = list_length(reader, field, object, base, &n);
    if (code)
        return code;
    char *entries = (char *)base + field->offset; /* an array in the struct, or memory that a pointer in it is set to */
    if (field->type != DSKV_FIELD_INTS) {
        entries = dskv_message_memory_alloc(reader->memory, n, entry_bytes);
        memcpy((char *)base + field->offset, &entries, sizeof entries);
    }
    int outermost = reader->place.index < 0;
    for (size_t i = 0; i < n && !code; i++) {
        size_t path = dskv_place_descend(&reader->place, "[%zu]", i);
        if (outermost)
            reader->place.index = (int64_t)i;
        code = read_entry(reader, field, &object->via.array.ptr[i], entries + i * entry_bytes);
        reader->place.path[path] = 0;
    }
    if (outermost)
        reader->place.index = -1;
    return code;
}

static enum dskv_code read_range(struct dskv_reader *reader, const struct dskv_field *field,
                                 const msgpack_object *object, int32_t *range)
{
    if (object->type != MSGPACK_OBJECT_ARRAY || object->via.array.size != 2)
        return dskv_place_wrong_type(&reader->place, "a list of two integers");
    int64_t ends[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        enum dskv_code code = read_int(reader, field, &object->via.array.ptr[i], &ends[i]);
        if (code)
            return code;
        range[i] = (int32_t)ends[i];
    }
    if (ends[0] > ends[1])
        return dskv_place_bad_range(&reader->place, ends[0], ends[1]);
    return DSKV_OK;
}

static void store_int(const struct dskv_field *field, void *at, int64_t value)
{
    if (field->type == DSKV_FIELD_INT64 || field->type == DSKV_FIELD_UINT64)
        memcpy(at, &value, sizeof value);
    else
        memcpy(at, &(uint32_t){(uint32_t)value}, sizeof(uint32_t));
}

static enum dskv_code read_value(struct dskv_reader *reader, const struct dskv_field *field,
                                 const msgpack_object *object, void *base)
{
    void *at = (char *)base + field->offset;
    int64_t value = 0;
    enum dskv_code code = DSKV_OK;
    switch (field->type) {
    case DSKV_FIELD_BOOL:
        *(int *)at = object->type == MSGPACK_OBJECT_BOOLEAN && object->via.boolean;
        return object->type == MSGPACK_OBJECT_BOOLEAN ? DSKV_OK
                                                      : dskv_place_wrong_type(&reader->place, "true or false");
    case DSKV_FIELD_INT32:
    case DSKV_FIELD_INT64:
    case DSKV_FIELD_UINT32:
    case DSKV_FIELD_UINT64:
        code = read_int(reader, field, object, &value);
        if (!code)
            store_int(field, at, value);
        return code;
    case DSKV_FIELD_DOUBLE: return read_double(reader, field, object, at);
    case DSKV_FIELD_STRING: return read_string(reader, field, object, at);
    case DSKV_FIELD_ID: return read_id(reader, object, at);
    case DSKV_FIELD_NAME: return read_name(reader, field, object, at);
    case DSKV_FIELD_RANGE: return read_range(reader, field, object, at);
    case DSKV_FIELD_TENSOR: return read_tensor(reader, field, object, at);
    case DSKV_FIELD_MAP:
        return object->type == MSGPACK_OBJECT_MAP ? read_map(reader, object, &field->table, 1, at)
                                                  : dskv_place_wrong_type(&reader->place, "a map");
    default: return read_list(reader, field, object, base);
    }
}

static enum dskv_code read_field(struct dskv_reader *reader, const struct dskv_field *field,
                                 const msgpack_object *object, void *base)
{
    if (object->type == MSGPACK_OBJECT_NIL && (field->flags & DSKV_FIELD_NIL))
        return DSKV_OK;
    enum dskv_code code = read_value(reader, field, object, base);
    if (!code && field->present)
        dskv_field_mark(field, base);
    return code;
}

static enum dskv_code unknown_key(struct dskv_reader *reader, const struct dskv_table *const *tables, int n_tables)
{
    char valid[128] = "";
    size_t n = 0;
    for (int t = n_tables - 1; t >= 0; t--) /* the operation's own first */
        for (int i = 0; i < tables[t]->n && n < sizeof valid; i++)
            n += (size_t)snprintf(valid + n, sizeof valid - n, "%s%s", n ? ", " : "", tables[t]->fields[i].name);
    dskv_place_refuse(&reader->place, DSKV_UNKNOWN_FIELD, "is not a field that is known here");
    dskv_error_set_valid(reader->place.error, "%s", valid);
    return DSKV_UNKNOWN_FIELD;
}

/* What is missing has its default, or must not be missing. */
static enum dskv_code finish_table(struct dskv_reader *reader, const struct dskv_table *table, uint64_t seen,
                                   void *base)
{
    for (int i = 0; i < table->n; i++) {
        const struct dskv_field *field = &table->fields[i];
        char *at = (char *)base + field->offset;
        if (seen >> i & 1)
            continue;
        if (field->flags & DSKV_FIELD_REQUIRED) {
            size_t path = dskv_place_descend(&reader->place, "%s%s", reader->place.path[0] ? "." : "", field->name);
            reader->place.leaf = field->name;
            dskv_place_refuse(&reader->place, DSKV_BAD_VALUE, "is missing");
            reader->place.path[path] = 0;
            return DSKV_BAD_VALUE;
        }
        if (field->type == DSKV_FIELD_DOUBLE)
            memcpy(at, &field->initial_double, sizeof(double));
        else if (field->initial)
            store_int(field, at, field->initial);
    }
    return DSKV_OK;
}

static const struct dskv_field *find_field(const struct dskv_table *const *tables, int n_tables,
                                           const msgpack_object *key, int *table)
{
    for (*table = 0; *table < n_tables; ++*table)
        for (int i = 0; i < tables[*table]->n; i++)
            if (string_is(key, tables[*table]->fields[i].name))
                return &tables[*table]->fields[i];
    return NULL;
}

static enum dskv_code read_entry_of_map(struct dskv_reader *reader, const msgpack_object_kv *kv,
                                        const struct dskv_table *const *tables, int n_tables, uint64_t *seen,
                                        void *base)
{
    char key[64]; /* lives as long as the error is being made */
    int n_key = (int)dskv_scan_utf8(kv->key.via.str.ptr, kv->key.via.str.size < 60 ? kv->key.via.str.size : 60);
    snprintf(key, sizeof key, "%.*s", n_key, kv->key.via.str.ptr);
    size_t path = dskv_place_descend(&reader->place, "%s%s", reader->place.path[0] ? "." : "", key);
    int table = 0;
    const struct dskv_field *field = find_field(tables, n_tables, &kv->key, &table);
    enum dskv_code code = DSKV_OK;
    const char *outer = reader->place.leaf;
    reader->place.leaf = field ? field->name : key;
    if (!field && reader->pass_over) {
        reader->n_passed++;
    } else if (!field) {
        code = unknown_key(reader, tables, n_tables);
    } else {
        uint64_t bit = UINT64_C(1) << (field - tables[table]->fields);
        if (seen[table] & bit)
            code = dskv_place_refuse(&reader->place, DSKV_BAD_MESSAGE, "is there twice");
        else
            code = read_field(reader, field, &kv->val, base);
        seen[table] |= bit;
    }
    reader->place.leaf = outer;
    reader->place.path[path] = 0;
    return code;
}

static enum dskv_code read_map(struct dskv_reader *reader, const msgpack_object *object,
                               const struct dskv_table *const *tables, int n_tables, void *base)
{
    uint64_t seen[2] = {0, 0};
    DSKV_ASSERT(n_tables <= 2 && tables[0]->n <= 64 && tables[n_tables - 1]->n <= 64, "%d tables", n_tables);
    enum dskv_code code = DSKV_OK;
    for (uint32_t i = 0; i < object->via.map.size && !code; i++)
        code = read_entry_of_map(reader, &object->via.map.ptr[i], tables, n_tables, seen, base);
    for (int table = 0; table < n_tables && !code; table++)
        code = finish_table(reader, tables[table], seen[table], base);
    return code;
}

/* ---- the reader ------------------------------------------------------------------------------------------------- */

enum dskv_code dskv_reader_open(struct dskv_frames *frames, struct dskv_reader **reader, struct dskv_error *error)
{
    *reader = NULL;
    enum dskv_code code = dskv_scan_header(frames->frames[0].data, frames->frames[0].bytes, error);
    if (code) {
        dskv_frames_clear(frames);
        return code;
    }
    struct dskv_reader *r = dskv_calloc(1, sizeof *r);
    r->memory = dskv_message_memory_open(frames);
    r->frames = dskv_message_memory_frames(r->memory);
    r->named = dskv_message_memory_alloc(r->memory, (size_t)r->frames->n, 1);
    r->place.index = -1;
    r->place.error = error;
    msgpack_unpacked_init(&r->unpacked);
    size_t end = 0;
    const struct dskv_frame *header = &r->frames->frames[0];
    if (msgpack_unpack_next(&r->unpacked, header->data, header->bytes, &end) != MSGPACK_UNPACK_SUCCESS ||
        end != header->bytes || r->unpacked.data.type != MSGPACK_OBJECT_MAP) {
        dskv_reader_close(&r, NULL);
        return dskv_fail(error, DSKV_BAD_MESSAGE, "the header is not one msgpack map");
    }
    *reader = r;
    return DSKV_OK;
}

static const msgpack_object *find_value(const struct dskv_reader *reader, const char *name)
{
    const msgpack_object_map *map = &reader->unpacked.data.via.map;
    for (uint32_t i = 0; i < map->size; i++)
        if (string_is(&map->ptr[i].key, name))
            return &map->ptr[i].val;
    return NULL;
}

int dskv_reader_peek_int(const struct dskv_reader *reader, const char *name, int64_t *value)
{
    int too_large = 0;
    const msgpack_object *object = find_value(reader, name);
    return object && as_int(object, value, &too_large) && !too_large;
}

int dskv_reader_peek_name(const struct dskv_reader *reader, const char *name, const char *(*name_of)(int), int n,
                          int *value)
{
    const msgpack_object *object = find_value(reader, name);
    for (int i = 0; object && i < n; i++)
        if (string_is(object, name_of(i))) {
            *value = i;
            return 1;
        }
    return 0;
}

enum dskv_code dskv_reader_read(struct dskv_reader *reader, const struct dskv_table *const *tables, int n_tables,
                                void *base, int pass_over)
{
    reader->pass_over = pass_over;
    reader->n_passed = 0;
    enum dskv_code code = read_map(reader, &reader->unpacked.data, tables, n_tables, base);
    if (code || reader->n_passed)
        return code;
    for (int32_t i = 1; i < reader->frames->n; i++)
        if (!reader->named[i])
            return dskv_fail(reader->place.error, DSKV_BAD_MESSAGE, "no tensor of the header is in frame %d", i);
    return DSKV_OK;
}

void dskv_reader_close(struct dskv_reader **reader, void **memory)
{
    struct dskv_reader *r = *reader;
    msgpack_unpacked_destroy(&r->unpacked);
    if (memory)
        *memory = r->memory;
    else
        dskv_message_memory_close(&r->memory);
    free(r);
    *reader = NULL;
}
