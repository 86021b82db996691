/* The codec: envelopes and operations, and what no single field can say. */
#include "codec_fields.h"

#include <string.h>

/* ---- frames ----------------------------------------------------------------------------------------------------- */

static enum dskv_code too_large(struct dskv_error *error, enum dskv_code code, const char *what, size_t found,
                                size_t limit)
{
    dskv_fail(error, code, "the message has %zu %s, the limit is %zu", found, what, limit);
    dskv_error_set(error, DSKV_HAS_LENGTH, (int64_t)found);
    dskv_error_set(error, DSKV_HAS_LIMIT, (int64_t)limit);
    return code;
}

/* What can be said of a message without reading it: `code` when it exceeds a limit, and the frames are cleared then. */
static enum dskv_code check_frames(struct dskv_frames *frames, size_t max_bytes, enum dskv_code code,
                                   struct dskv_error *error)
{
    size_t bytes = 0, largest = 0;
    for (int32_t i = 0; i < frames->n; i++) {
        bytes += frames->frames[i].bytes;
        largest = frames->frames[i].bytes > largest ? frames->frames[i].bytes : largest;
    }
    if (frames->n > DSKV_MAX_FRAMES)
        too_large(error, code, "frames", (size_t)frames->n, DSKV_MAX_FRAMES);
    else if (largest > DSKV_MAX_FRAME_BYTES)
        too_large(error, code, "bytes in one frame", largest, DSKV_MAX_FRAME_BYTES);
    else if (bytes > max_bytes)
        too_large(error, code, "bytes", bytes, max_bytes);
    else if (frames->n > 0 && frames->frames[0].bytes > DSKV_MAX_HEADER_BYTES)
        too_large(error, code, "bytes in its header", frames->frames[0].bytes, DSKV_MAX_HEADER_BYTES);
    else if (frames->n > 0)
        return DSKV_OK;
    else
        dskv_fail(error, code, "the message has no frame");
    dskv_frames_clear(frames);
    return code;
}

/* ---- checks over several fields --------------------------------------------------------------------------------- */

static enum dskv_code fail_field(struct dskv_error *error, enum dskv_code code, const char *field, const char *sentence)
{
    dskv_fail(error, code, "%s", sentence);
    dskv_error_set_field(error, field);
    return code;
}

static enum dskv_code check_part(const struct dskv_part *part, struct dskv_error *error)
{
    if (part->start >= part->stop)
        return fail_field(error, DSKV_BAD_VALUE, "stop", "stop must be beyond start");
    if (part->data.shape[1] != part->stop - part->start)
        return fail_field(error, DSKV_WRONG_SHAPE, "data", "data must hold the tokens from start to stop");
    return DSKV_OK;
}

static enum dskv_code check_stops(const struct dskv_generate *generate, struct dskv_error *error)
{
    for (int32_t i = 0; i < generate->n_stops; i++)
        if (generate->stops[i].shape[0] < 1 || generate->stops[i].shape[0] > DSKV_MAX_STOP_TOKENS) {
            dskv_fail(error, DSKV_BAD_VALUE, "stop[%d] has %lld tokens, must have 1 .. %d", i,
                      (long long)generate->stops[i].shape[0], DSKV_MAX_STOP_TOKENS);
            dskv_error_set_field(error, "stop");
            dskv_error_set(error, DSKV_HAS_INDEX, i);
            dskv_error_set(error, DSKV_HAS_LENGTH, generate->stops[i].shape[0]);
            dskv_error_set(error, DSKV_HAS_LIMIT, DSKV_MAX_STOP_TOKENS);
            return DSKV_BAD_VALUE;
        }
    return DSKV_OK;
}

static enum dskv_code check_request(const struct dskv_request *request, struct dskv_error *error)
{
    switch (request->op) {
    case DSKV_OP_PART: return check_part(&request->part.part, error);
    case DSKV_OP_GENERATE: return check_stops(&request->generate, error);
    case DSKV_OP_FREE:
        if (request->free_caches.all && request->free_caches.caches)
            return fail_field(error, DSKV_BAD_VALUE, "caches", "caches must not be given together with all");
        if (!request->free_caches.all && !request->free_caches.caches)
            return fail_field(error, DSKV_BAD_VALUE, "caches", "caches is missing, and all is not true");
        return DSKV_OK;
    default: return DSKV_OK;
    }
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

/* What a reply needs, as far as it can be read at all; and another version is not judged by this one's rules. */
static enum dskv_code peek_request(const struct dskv_reader *reader, struct dskv_request *request,
                                   struct dskv_error *error)
{
    int64_t version = DSKV_PROTOCOL_VERSION, id = 0;
    int op = 0;
    if (dskv_reader_peek_int(reader, "id", &id) && id > 0)
        request->id = (uint64_t)id;
    if (dskv_reader_peek_name(reader, "op", dskv_field_op, DSKV_N_OPS, &op))
        request->op = (enum dskv_op)op;
    if (!dskv_reader_peek_int(reader, "v", &version) || version == DSKV_PROTOCOL_VERSION)
        return DSKV_OK;
    dskv_fail(error, DSKV_VERSION_MISMATCH, "this server speaks version %d of the protocol, not %lld",
              DSKV_PROTOCOL_VERSION, (long long)version);
    dskv_error_set_field(error, "v");
    dskv_error_set_valid(error, "%d", DSKV_PROTOCOL_VERSION);
    return DSKV_VERSION_MISMATCH;
}

static enum dskv_code read_request(struct dskv_reader *reader, struct dskv_request *request, struct dskv_error *error)
{
    const struct dskv_table *tables[2] = {&dskv_request_head, NULL};
    enum dskv_code code = peek_request(reader, request, error);
    if (!code)
        code = dskv_reader_read(reader, tables, 1, request, 1);
    if (code)
        return code;
    tables[0] = &dskv_request_envelope;
    tables[1] = dskv_request_table(request->op);
    code = dskv_reader_read(reader, tables, 2, request, 0);
    return code ? code : check_request(request, error);
}

enum dskv_code dskv_request_decode(struct dskv_frames *frames, struct dskv_request *request, struct dskv_error *error)
{
    struct dskv_reader *reader = NULL;
    memset(request, 0, sizeof *request);
    request->op = DSKV_N_OPS;
    enum dskv_code code = check_frames(frames, DSKV_MAX_REQUEST_BYTES, DSKV_BAD_MESSAGE, error);
    if (!code)
        code = dskv_reader_open(frames, &reader, error);
    if (code)
        return code;
    code = read_request(reader, request, error);
    if (!code) {
        dskv_reader_close(&reader, &request->memory);
        return DSKV_OK;
    }
    uint64_t id = request->id;
    enum dskv_op op = request->op;
    dskv_reader_close(&reader, NULL);
    memset(request, 0, sizeof *request); /* it points to nothing that is left */
    request->id = id;
    request->op = op;
    return code;
}

enum dskv_code dskv_request_encode(const struct dskv_request *request, struct dskv_frames *frames,
                                   struct dskv_error *error)
{
    DSKV_ASSERT((unsigned)request->op < DSKV_N_OPS, "operation %d", (int)request->op);
    const struct dskv_table *const tables[2] = {&dskv_request_envelope, dskv_request_table(request->op)};
    struct dskv_request copy = *request;
    copy.version = DSKV_PROTOCOL_VERSION;
    enum dskv_code code = check_request(&copy, error);
    if (!code)
        code = dskv_write(tables, 2, &copy, frames, error);
    return code ? code : check_frames(frames, DSKV_MAX_REQUEST_BYTES, DSKV_BAD_VALUE, error);
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

static int is_last(enum dskv_event_kind kind)
{
    return kind == DSKV_EVENT_RESULT || kind == DSKV_EVENT_ERROR;
}

static enum dskv_code read_event(struct dskv_reader *reader, struct dskv_event *event, struct dskv_error *error)
{
    const struct dskv_table *tables[2] = {&dskv_event_envelope, NULL};
    enum dskv_code code = dskv_reader_read(reader, tables, 1, event, 1);
    if (code)
        return code;
    tables[1] = dskv_event_table(event->kind, event->op);
    if (!tables[1])
        return fail_field(error, DSKV_BAD_VALUE, "kind", "there is no event of this kind for this operation");
    if (event->last != is_last(event->kind))
        return fail_field(error, DSKV_BAD_VALUE, "last",
                          "last must be true for result and error, and for no other kind");
    code = dskv_reader_read(reader, tables, 2, event, 1);
    return code || event->kind != DSKV_EVENT_PART ? code : check_part(&event->part, error);
}

enum dskv_code dskv_event_decode(struct dskv_frames *frames, struct dskv_event *event, struct dskv_error *error)
{
    struct dskv_reader *reader = NULL;
    memset(event, 0, sizeof *event);
    enum dskv_code code = check_frames(frames, DSKV_MAX_REPLY_BYTES, DSKV_BAD_MESSAGE, error);
    if (!code)
        code = dskv_reader_open(frames, &reader, error);
    if (code)
        return code;
    code = read_event(reader, event, error);
    if (!code) {
        dskv_reader_close(&reader, &event->memory);
        return DSKV_OK;
    }
    uint64_t id = event->id;
    dskv_reader_close(&reader, NULL);
    memset(event, 0, sizeof *event);
    event->id = id;
    return code;
}

enum dskv_code dskv_event_encode(const struct dskv_event *event, struct dskv_frames *frames, struct dskv_error *error)
{
    const struct dskv_table *const tables[2] = {&dskv_event_envelope, dskv_event_table(event->kind, event->op)};
    DSKV_ASSERT(tables[1], "no event of kind %d for operation %d", (int)event->kind, (int)event->op);
    struct dskv_event copy = *event;
    copy.last = is_last(event->kind);
    enum dskv_code code = event->kind == DSKV_EVENT_PART ? check_part(&copy.part, error) : DSKV_OK;
    if (!code)
        code = dskv_write(tables, 2, &copy, frames, error);
    return code ? code : check_frames(frames, DSKV_MAX_REPLY_BYTES, DSKV_BAD_VALUE, error);
}
