/* The writer: a struct into frames, by the tables of codec_fields.c.  Optional fields with their default are left out.
 */
#include "base/memory.h"
#include "codec.h"
#include "scan.h"

#include <msgpack.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct writer {
    msgpack_packer packer; /* appends to the header */
    char *header;
    size_t header_bytes, header_capacity;
    struct dskv_frames *frames;
    int32_t capacity;
    struct dskv_place place; /* what is being written */
};

/* msgpack-c's own buffer can fail, and a header must not miss a piece. */
static int append_header(void *data, const char *bytes, size_t n)
{
    struct writer *writer = data;
    if (writer->header_bytes + n > writer->header_capacity) {
        writer->header_capacity = 2 * (writer->header_bytes + n) + 256;
        writer->header = dskv_realloc(writer->header, writer->header_capacity, 1);
    }
    memcpy(writer->header + writer->header_bytes, bytes, n);
    writer->header_bytes += n;
    return 0;
}

static enum dskv_code write_map(struct writer *writer, const struct dskv_table *const *tables, int n_tables,
                                const void *base);

/* ---- which fields there are ------------------------------------------------------------------------------------- */

static int64_t load_int(const struct dskv_field *field, const void *at)
{
    if (field->type == DSKV_FIELD_INT64 || field->type == DSKV_FIELD_UINT64) {
        int64_t value; /* a uint64_t beyond int64_t turns negative and is refused by its range */
        memcpy(&value, at, sizeof value);
        return value;
    }
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return field->type == DSKV_FIELD_UINT32 ? (int64_t)value : (int64_t)(int32_t)value;
}

static int32_t list_length(const struct dskv_field *field, const void *base)
{
    int32_t n;
    memcpy(&n, (const char *)base + field->offset_n, sizeof n);
    return n;
}

static int tensor_is_there(const struct dskv_field *field, const struct dskv_wire_tensor *tensor)
{
    return tensor->data || ((field->flags & DSKV_FIELD_FRAMELESS) && tensor->n_dims > 0);
}

static int map_has_fields(const struct dskv_table *table, const void *base);

static int is_there(const struct dskv_field *field, const void *base)
{
    const char *at = (const char *)base + field->offset;
    double number;
    if (field->flags & DSKV_FIELD_REQUIRED)
        return 1;
    if (field->present)
        return dskv_field_is_marked(field, base);
    switch (field->type) {
    case DSKV_FIELD_DOUBLE: memcpy(&number, at, sizeof number); return number != field->initial_double;
    case DSKV_FIELD_STRING: return *at != 0;
    case DSKV_FIELD_RANGE: return ((const int32_t *)at)[0] != ((const int32_t *)at)[1];
    case DSKV_FIELD_TENSOR: return tensor_is_there(field, (const struct dskv_wire_tensor *)at);
    case DSKV_FIELD_MAP: return map_has_fields(field->table, at);
    case DSKV_FIELD_INTS:
    case DSKV_FIELD_IDS:
    case DSKV_FIELD_TENSORS:
    case DSKV_FIELD_MAPS: return list_length(field, base) != 0;
    default: return load_int(field, at) != field->initial;
    }
}

static int count_fields(const struct dskv_table *table, const void *base)
{
    int n = 0;
    for (int i = 0; i < table->n; i++)
        n += is_there(&table->fields[i], base);
    return n;
}

static int map_has_fields(const struct dskv_table *table, const void *base)
{
    return count_fields(table, base) > 0;
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

static void write_text(struct writer *writer, const char *text, size_t n)
{
    msgpack_pack_str(&writer->packer, n);
    msgpack_pack_str_body(&writer->packer, text, n);
}

static enum dskv_code write_int(struct writer *writer, const struct dskv_field *field, int64_t value)
{
    if (!dskv_field_allows(field, value))
        return dskv_place_int_not_allowed(&writer->place, field, value);
    if (field->type == DSKV_FIELD_NAME)
        write_text(writer, field->name_of((int)value), strlen(field->name_of((int)value)));
    else
        msgpack_pack_int64(&writer->packer, value);
    return DSKV_OK;
}

static enum dskv_code write_double(struct writer *writer, const struct dskv_field *field, const void *at)
{
    double value;
    memcpy(&value, at, sizeof value);
    if (!dskv_field_allows_double(field, value))
        return dskv_place_double_not_allowed(&writer->place, field, value);
    msgpack_pack_double(&writer->packer, value);
    return DSKV_OK;
}

/* Paths and sentences cut to a buffer's size need not be UTF-8: what is not becomes a question mark. */
static void write_string(struct writer *writer, const struct dskv_field *field, const char *string)
{
    size_t n = strnlen(string, (size_t)field->max);
    char *text = dskv_calloc(n + 1, 1);
    memcpy(text, string, n);
    for (size_t good = 0; (good += dskv_scan_utf8(text + good, n - good)) < n;)
        text[good] = '?';
    write_text(writer, text, n);
    free(text);
}

static void write_id(struct writer *writer, const struct dskv_id *id)
{
    msgpack_pack_bin(&writer->packer, sizeof id->bytes);
    msgpack_pack_bin_body(&writer->packer, id->bytes, sizeof id->bytes);
}

static enum dskv_code write_range(struct writer *writer, const struct dskv_field *field, const int32_t *range)
{
    msgpack_pack_array(&writer->packer, 2);
    for (int i = 0; i < 2; i++) {
        enum dskv_code code = write_int(writer, field, range[i]);
        if (code)
            return code;
    }
    return range[0] <= range[1] ? DSKV_OK : dskv_place_bad_range(&writer->place, range[0], range[1]);
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

static void add_frame(struct writer *writer, const void *data, size_t bytes)
{
    struct dskv_frames *frames = writer->frames;
    if (frames->n == writer->capacity) {
        writer->capacity = writer->capacity ? 2 * writer->capacity : 4;
        frames->frames = dskv_realloc(frames->frames, (size_t)writer->capacity, sizeof *frames->frames);
    }
    struct dskv_frame *frame = &frames->frames[frames->n++];
    frame->bytes = bytes;
    frame->data = dskv_realloc(NULL, bytes ? bytes : 1, 1);
    if (bytes)
        memcpy(frame->data, data, bytes);
}

/* A tensor that does not fit its field is a bug of the one who filled the struct. */
static void check_tensor(const struct dskv_field *field, const struct dskv_wire_tensor *tensor)
{
    DSKV_ASSERT((unsigned)tensor->dtype < DSKV_N_DTYPES && field->dtypes & 1u << tensor->dtype, "%s: dtype %d",
                field->name, (int)tensor->dtype);
    DSKV_ASSERT(tensor->n_dims == field->n_dims, "%s: %d dimensions", field->name, tensor->n_dims);
    size_t bytes = dskv_dtype_bytes(tensor->dtype);
    for (int32_t i = 0; i < tensor->n_dims; i++)
        bytes *= (size_t)tensor->shape[i];
    DSKV_ASSERT(!tensor->data || bytes == tensor->bytes, "%s: %zu bytes, shape says %zu", field->name, tensor->bytes,
                bytes);
}

static void write_tensor(struct writer *writer, const struct dskv_field *field, const struct dskv_wire_tensor *tensor)
{
    const struct dskv_wire_tensor empty = {.dtype = DSKV_I32, .n_dims = 1};
    if (!tensor_is_there(field, tensor) && tensor->bytes == 0 && field->dtypes == 1u << DSKV_I32)
        tensor = &empty; /* no tokens: nothing need be pointed to */
    check_tensor(field, tensor);
    int frameless = !tensor->data && (field->flags & DSKV_FIELD_FRAMELESS);
    msgpack_pack_map(&writer->packer, frameless ? 2 : 3);
    write_text(writer, "dtype", 5);
    write_text(writer, dskv_dtype_name(tensor->dtype), strlen(dskv_dtype_name(tensor->dtype)));
    write_text(writer, "shape", 5);
    msgpack_pack_array(&writer->packer, (size_t)tensor->n_dims);
    for (int32_t i = 0; i < tensor->n_dims; i++)
        msgpack_pack_int64(&writer->packer, tensor->shape[i]);
    if (frameless)
        return;
    write_text(writer, "frame", 5);
    msgpack_pack_int64(&writer->packer, writer->frames->n);
    add_frame(writer, tensor->data, tensor->bytes);
}

/* ---- lists and maps --------------------------------------------------------------------------------------------- */

static enum dskv_code write_entry(struct writer *writer, const struct dskv_field *field, const char *entries, size_t i)
{
    if (field->type == DSKV_FIELD_MAPS)
        return write_map(writer, &field->table, 1, entries + i * field->table->bytes);
    if (field->type == DSKV_FIELD_INTS)
        msgpack_pack_int64(&writer->packer, ((const int32_t *)entries)[i]);
    else if (field->type == DSKV_FIELD_IDS)
        write_id(writer, (const struct dskv_id *)entries + i);
    else
        write_tensor(writer, field, (const struct dskv_wire_tensor *)entries + i);
    return DSKV_OK;
}

static enum dskv_code write_list(struct writer *writer, const struct dskv_field *field, const void *base)
{
    const char *entries = (const char *)base + field->offset;
    int32_t n = list_length(field, base);
    if (!dskv_field_allows(field, n))
        return dskv_place_bad_length(&writer->place, field, n);
    if (field->type != DSKV_FIELD_INTS) /* not an array in the struct, but a pointer to one */
        memcpy(&entries, (const char *)base + field->offset, sizeof entries);
    msgpack_pack_array(&writer->packer, (size_t)n);
    int outermost = writer->place.index < 0;
    enum dskv_code code = DSKV_OK;
    for (int32_t i = 0; i < n && !code; i++) {
        size_t path = dskv_place_descend(&writer->place, "[%d]", i);
        if (outermost)
            writer->place.index = i;
        code = write_entry(writer, field, entries, (size_t)i);
        writer->place.path[path] = 0;
    }
    if (outermost)
        writer->place.index = -1;
    return code;
}

static enum dskv_code write_value(struct writer *writer, const struct dskv_field *field, const void *base)
{
    const void *at = (const char *)base + field->offset;
    if ((field->flags & DSKV_FIELD_NIL) && !dskv_field_is_marked(field, base)) {
        msgpack_pack_nil(&writer->packer);
        return DSKV_OK;
    }
    switch (field->type) {
    case DSKV_FIELD_BOOL:
        *(const int *)at ? msgpack_pack_true(&writer->packer) : msgpack_pack_false(&writer->packer);
        break;
    case DSKV_FIELD_DOUBLE: return write_double(writer, field, at);
    case DSKV_FIELD_STRING: write_string(writer, field, at); break;
    case DSKV_FIELD_ID: write_id(writer, at); break;
    case DSKV_FIELD_RANGE: return write_range(writer, field, at);
    case DSKV_FIELD_TENSOR: write_tensor(writer, field, at); break;
    case DSKV_FIELD_MAP: return write_map(writer, &field->table, 1, at);
    case DSKV_FIELD_INTS:
    case DSKV_FIELD_IDS:
    case DSKV_FIELD_TENSORS:
    case DSKV_FIELD_MAPS: return write_list(writer, field, base);
    default: return write_int(writer, field, load_int(field, at));
    }
    return DSKV_OK;
}

static enum dskv_code write_map(struct writer *writer, const struct dskv_table *const *tables, int n_tables,
                                const void *base)
{
    int n = 0;
    for (int table = 0; table < n_tables; table++)
        n += count_fields(tables[table], base);
    msgpack_pack_map(&writer->packer, (size_t)n);
    for (int table = 0; table < n_tables; table++)
        for (int i = 0; i < tables[table]->n; i++) {
            const struct dskv_field *field = &tables[table]->fields[i];
            if (!is_there(field, base))
                continue;
            size_t path = dskv_place_descend(&writer->place, "%s%s", writer->place.path[0] ? "." : "", field->name);
            const char *outer = writer->place.leaf;
            writer->place.leaf = field->name;
            write_text(writer, field->name, strlen(field->name));
            enum dskv_code code = write_value(writer, field, base);
            if (code)
                return code;
            writer->place.leaf = outer;
            writer->place.path[path] = 0;
        }
    return DSKV_OK;
}

enum dskv_code dskv_write(const struct dskv_table *const *tables, int n_tables, const void *base,
                          struct dskv_frames *frames, struct dskv_error *error)
{
    struct writer writer = {.frames = frames, .place = {.index = -1, .error = error}};
    memset(frames, 0, sizeof *frames);
    msgpack_packer_init(&writer.packer, &writer, append_header);
    add_frame(&writer, NULL, 0); /* the header's place */
    enum dskv_code code = write_map(&writer, tables, n_tables, base);
    if (code) {
        free(writer.header);
        dskv_frames_clear(frames);
        return code;
    }
    free(frames->frames[0].data);
    frames->frames[0] = (struct dskv_frame){writer.header, writer.header_bytes};
    return DSKV_OK;
}
