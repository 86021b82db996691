#include "ipc/make_message.h"

#include "base/memory.h"

#include <stdio.h>
#include <string.h>

struct maker {
    struct dskv_message_memory *memory;
    uint64_t state;
    enum make_how how;
};

uint64_t make_random(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    uint64_t z = *state;
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static int64_t random_within(struct maker *maker, int64_t low, int64_t high)
{
    uint64_t span = (uint64_t)high - (uint64_t)low + 1;
    uint64_t value = make_random(&maker->state);
    if (value % 8 == 0) /* the bounds themselves, often */
        return value & 8 ? low : high;
    return (int64_t)((uint64_t)low + (span ? value % span : value));
}

static void random_bytes(struct maker *maker, void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)make_random(&maker->state);
}

/* ---- making ----------------------------------------------------------------------------------------------------- */

static void make_fields(struct maker *maker, const struct dskv_table *table, void *base);

static int64_t random_int(struct maker *maker, const struct dskv_field *field)
{
    int64_t low = field->min, high = field->max;
    if (low == 0 && high == 0) {
        low = field->type == DSKV_FIELD_INT32 ? INT32_MIN : field->type == DSKV_FIELD_INT64 ? INT64_MIN : 0;
        high = field->type == DSKV_FIELD_INT32 ? INT32_MAX : field->type == DSKV_FIELD_UINT32 ? UINT32_MAX : INT64_MAX;
    }
    int64_t value = random_within(maker, low, high);
    while (maker->how == MAKE_ALL && value == field->initial)
        value = random_within(maker, low, high);
    return value;
}

static void store(const struct dskv_field *field, void *at, int64_t value)
{
    if (field->type == DSKV_FIELD_INT64 || field->type == DSKV_FIELD_UINT64)
        memcpy(at, &value, 8);
    else
        memcpy(at, &(int32_t){(int32_t)value}, 4);
}

static void make_string(struct maker *maker, const struct dskv_field *field, char *string)
{
    int64_t n = random_within(maker, maker->how == MAKE_ALL, field->max);
    for (int64_t i = 0; i < n; i++)
        string[i] = (char)random_within(maker, ' ', '~');
    if (n > 2)
        memcpy(string, "\xc3\xa4", 2);
}

static void make_tensor(struct maker *maker, const struct dskv_field *field, struct dskv_wire_tensor *tensor)
{
    do
        tensor->dtype = (enum dskv_dtype)random_within(maker, 0, DSKV_N_DTYPES - 1);
    while (!(field->dtypes & 1u << tensor->dtype));
    tensor->n_dims = field->n_dims;
    tensor->bytes = dskv_dtype_bytes(tensor->dtype);
    for (int i = 0; i < tensor->n_dims; i++) {
        tensor->shape[i] = random_within(maker, 0, 6);
        tensor->bytes *= (size_t)tensor->shape[i];
    }
    if ((field->flags & DSKV_FIELD_FRAMELESS) && make_random(&maker->state) % 2)
        return;
    void *data = dskv_message_memory_alloc(maker->memory, tensor->bytes, 1);
    random_bytes(maker, data, tensor->bytes);
    tensor->data = data;
}

static size_t entry_bytes(const struct dskv_field *field)
{
    return field->type == DSKV_FIELD_INTS      ? sizeof(int32_t)
           : field->type == DSKV_FIELD_IDS     ? sizeof(struct dskv_id)
           : field->type == DSKV_FIELD_TENSORS ? sizeof(struct dskv_wire_tensor)
                                               : field->table->bytes;
}

static void make_list(struct maker *maker, const struct dskv_field *field, char *base)
{
    int64_t least = field->min > 0 || maker->how == MAKE_ALL, most = field->max < 5 ? field->max : 5;
    int32_t n = (int32_t)random_within(maker, least, most);
    char *entries = base + field->offset;
    memcpy(base + field->offset_n, &n, sizeof n);
    if (field->type != DSKV_FIELD_INTS) {
        entries = dskv_message_memory_alloc(maker->memory, (size_t)n, entry_bytes(field));
        memcpy(base + field->offset, &entries, sizeof entries);
    }
    for (int32_t i = 0; i < n; i++) {
        char *entry = entries + (size_t)i * entry_bytes(field);
        if (field->type == DSKV_FIELD_TENSORS)
            make_tensor(maker, field, (struct dskv_wire_tensor *)entry);
        else if (field->type == DSKV_FIELD_MAPS)
            make_fields(maker, field->table, entry);
        else
            random_bytes(maker, entry, entry_bytes(field));
    }
}

static void make_value(struct maker *maker, const struct dskv_field *field, char *base)
{
    char *at = base + field->offset;
    double number;
    switch (field->type) {
    case DSKV_FIELD_BOOL: *(int *)at = maker->how == MAKE_ALL || make_random(&maker->state) % 2; break;
    case DSKV_FIELD_DOUBLE:
        number = (double)random_within(maker, 1, 1 << 20) / (1 << 20) * (field->high > 0 ? field->high : 1e9);
        memcpy(at, &number, sizeof number);
        break;
    case DSKV_FIELD_STRING: make_string(maker, field, at); break;
    case DSKV_FIELD_ID: random_bytes(maker, at, sizeof(struct dskv_id)); break;
    case DSKV_FIELD_RANGE:
        ((int32_t *)at)[0] = (int32_t)random_within(maker, field->min, field->max - 1);
        ((int32_t *)at)[1] = (int32_t)random_within(maker, ((int32_t *)at)[0] + 1, field->max);
        break;
    case DSKV_FIELD_TENSOR: make_tensor(maker, field, (struct dskv_wire_tensor *)at); break;
    case DSKV_FIELD_MAP: make_fields(maker, field->table, at); break;
    case DSKV_FIELD_INTS:
    case DSKV_FIELD_IDS:
    case DSKV_FIELD_TENSORS:
    case DSKV_FIELD_MAPS: make_list(maker, field, base); break;
    default: store(field, at, random_int(maker, field)); break;
    }
}

static void make_fields(struct maker *maker, const struct dskv_table *table, void *base)
{
    for (int i = 0; i < table->n; i++) {
        const struct dskv_field *field = &table->fields[i];
        int required = (field->flags & DSKV_FIELD_REQUIRED) && !(field->flags & DSKV_FIELD_NIL);
        if (required || maker->how == MAKE_ALL || (maker->how == MAKE_SOME && make_random(&maker->state) % 2)) {
            make_value(maker, field, base);
            if (field->present)
                dskv_field_mark(field, base);
        } else if (field->type == DSKV_FIELD_DOUBLE) {
            memcpy((char *)base + field->offset, &field->initial_double, sizeof(double));
        } else if (field->initial) {
            store(field, (char *)base + field->offset, field->initial);
        }
    }
}

/* ---- what no single field says ---------------------------------------------------------------------------------- */

static void make_part(struct maker *maker, struct dskv_part *part)
{
    struct dskv_wire_tensor *data = &part->data;
    part->start = (int32_t)random_within(maker, 0, 1000);
    data->shape[1] = random_within(maker, 1, 5);
    part->stop = part->start + (int32_t)data->shape[1];
    data->bytes = dskv_dtype_bytes(data->dtype) * (size_t)(data->shape[0] * data->shape[1] * data->shape[2]);
    data->data = dskv_message_memory_alloc(maker->memory, data->bytes, 1);
}

void make_request(struct dskv_request *request, enum dskv_op op, enum make_how how, uint64_t seed)
{
    struct dskv_frames none = {0};
    struct maker maker = {dskv_message_memory_open(&none), seed, how};
    memset(request, 0, sizeof *request);
    make_fields(&maker, &dskv_request_envelope, request);
    make_fields(&maker, dskv_request_table(op), request);
    request->version = DSKV_PROTOCOL_VERSION;
    request->op = op;
    request->memory = maker.memory;
    if (op == DSKV_OP_PART)
        make_part(&maker, &request->part.part);
    if (op == DSKV_OP_GENERATE)
        for (int32_t i = 0; i < request->generate.n_stops; i++) {
            struct dskv_wire_tensor *stop = &request->generate.stops[i];
            stop->shape[0] = random_within(&maker, 1, DSKV_MAX_STOP_TOKENS);
            stop->bytes = (size_t)stop->shape[0] * sizeof(int32_t);
            stop->data = dskv_message_memory_alloc(maker.memory, stop->bytes, 1);
        }
    if (op == DSKV_OP_FREE) {
        request->free_caches.all = request->free_caches.n == 0 || how == MAKE_LEAST;
        if (request->free_caches.all)
            request->free_caches.caches = NULL, request->free_caches.n = 0;
    }
}

void make_event(struct dskv_event *event, enum dskv_event_kind kind, enum dskv_op op, enum make_how how, uint64_t seed)
{
    struct dskv_frames none = {0};
    struct maker maker = {dskv_message_memory_open(&none), seed, how};
    memset(event, 0, sizeof *event);
    make_fields(&maker, &dskv_event_envelope, event);
    make_fields(&maker, dskv_event_table(kind, op), event);
    event->kind = kind;
    event->op = op;
    event->last = kind == DSKV_EVENT_RESULT || kind == DSKV_EVENT_ERROR;
    event->memory = maker.memory;
    if (kind == DSKV_EVENT_PART)
        make_part(&maker, &event->part);
}

/* ---- comparing -------------------------------------------------------------------------------------------------- */

static int same_tensor(const struct dskv_wire_tensor *a, const struct dskv_wire_tensor *b)
{
    if (!a->data != !b->data || a->n_dims != b->n_dims || a->dtype != b->dtype || a->bytes != b->bytes)
        return 0;
    return memcmp(a->shape, b->shape, sizeof a->shape) == 0 && (!a->data || memcmp(a->data, b->data, a->bytes) == 0);
}

static int same_list(const struct dskv_field *field, const char *a, const char *b)
{
    int32_t n;
    const char *entries[2] = {a + field->offset, b + field->offset};
    if (memcmp(a + field->offset_n, b + field->offset_n, sizeof n) != 0)
        return 0;
    memcpy(&n, a + field->offset_n, sizeof n);
    if (field->type != DSKV_FIELD_INTS) {
        memcpy(&entries[0], a + field->offset, sizeof entries[0]);
        memcpy(&entries[1], b + field->offset, sizeof entries[1]);
    }
    for (int32_t i = 0; i < n; i++) {
        const char *x = entries[0] + (size_t)i * entry_bytes(field), *y = entries[1] + (size_t)i * entry_bytes(field);
        if (field->type == DSKV_FIELD_TENSORS
                ? !same_tensor((const struct dskv_wire_tensor *)x, (const struct dskv_wire_tensor *)y)
            : field->type == DSKV_FIELD_MAPS ? compare_fields(field->table, x, y) != NULL
                                             : memcmp(x, y, entry_bytes(field)) != 0)
            return 0;
    }
    return 1;
}

static int same_value(const struct dskv_field *field, const char *a, const char *b)
{
    const char *x = a + field->offset, *y = b + field->offset;
    switch (field->type) {
    case DSKV_FIELD_INT64:
    case DSKV_FIELD_UINT64:
    case DSKV_FIELD_DOUBLE:
    case DSKV_FIELD_RANGE: return memcmp(x, y, 8) == 0;
    case DSKV_FIELD_STRING: return strcmp(x, y) == 0;
    case DSKV_FIELD_ID: return memcmp(x, y, sizeof(struct dskv_id)) == 0;
    case DSKV_FIELD_TENSOR: return same_tensor((const struct dskv_wire_tensor *)x, (const struct dskv_wire_tensor *)y);
    case DSKV_FIELD_MAP: return compare_fields(field->table, x, y) == NULL;
    case DSKV_FIELD_INTS:
    case DSKV_FIELD_IDS:
    case DSKV_FIELD_TENSORS:
    case DSKV_FIELD_MAPS: return same_list(field, a, b);
    default: return memcmp(x, y, 4) == 0;
    }
}

const char *compare_fields(const struct dskv_table *table, const void *a, const void *b)
{
    for (int i = 0; i < table->n; i++) {
        const struct dskv_field *field = &table->fields[i];
        if (field->present && dskv_field_is_marked(field, a) != dskv_field_is_marked(field, b))
            return field->name;
        if (!same_value(field, a, b))
            return field->name;
    }
    return NULL;
}

struct dskv_frames copy_frames(const struct dskv_frames *frames)
{
    struct dskv_frames copy = {dskv_calloc((size_t)frames->n, sizeof *frames->frames), frames->n};
    for (int32_t i = 0; i < frames->n; i++) {
        copy.frames[i].bytes = frames->frames[i].bytes;
        copy.frames[i].data = dskv_calloc(frames->frames[i].bytes, 1);
        memcpy(copy.frames[i].data, frames->frames[i].data, frames->frames[i].bytes);
    }
    return copy;
}

int same_frames(const struct dskv_frames *a, const struct dskv_frames *b)
{
    for (int32_t i = 0; a->n == b->n && i < a->n; i++)
        if (a->frames[i].bytes != b->frames[i].bytes ||
            memcmp(a->frames[i].data, b->frames[i].data, a->frames[i].bytes) != 0)
            return 0;
    return a->n == b->n;
}
