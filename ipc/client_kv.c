/* The C client: export and import, keys and values in parts of about 1 MiB at the pace of the receiver's credits. */
#include "ipc/client_inside.h"

#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT_CREDITS 4 /* parts in flight: enough to keep the server busy, few enough to bound memory */

/* Where the parts of one cache stand: arrays of [n_kv_heads, length, head_dim] per layer. */
struct layout {
    int32_t n_layers, n_kv_heads, length, head_dim;
    enum dskv_dtype dtype;
};

static size_t layer_bytes(const struct layout *layout)
{
    return (size_t)layout->n_kv_heads * (size_t)layout->length * (size_t)layout->head_dim *
           dskv_dtype_bytes(layout->dtype);
}

/* Copies tokens [start, stop) of all heads between a layer's array and a part's; both are dense. */
static void copy_tokens(const struct layout *layout, char *layer, char *part, int32_t start, int32_t stop, int to_layer)
{
    size_t row = (size_t)layout->head_dim * dskv_dtype_bytes(layout->dtype);
    size_t n = (size_t)(stop - start) * row;
    for (int32_t head = 0; head < layout->n_kv_heads; head++) {
        char *in_layer = layer + ((size_t)head * (size_t)layout->length + (size_t)start) * row;
        char *in_part = part + (size_t)head * n;
        if (to_layer)
            memcpy(in_layer, in_part, n);
        else
            memcpy(in_part, in_layer, n);
    }
}

/* ---- export ----------------------------------------------------------------------------------------------------- */

struct exported_box {
    struct dskv_exported exported;
    struct layout layout;
    int32_t n_parts;
    char model[33], origin[33];
    char *bytes; /* all layers: k and v in turn */
    const void **arrays;
};

static enum dskv_code bad_export(struct dskv_error *error, const char *what)
{
    return dskv_fail(error, DSKV_BAD_MESSAGE, "the server's export cannot be read: %s", what);
}

static enum dskv_code open_box(const struct dskv_event *event, int32_t length, struct exported_box **box,
                               struct dskv_error *error)
{
    struct layout layout = {event->export_begin.n_layers, event->export_begin.n_kv_heads, event->export_begin.length,
                            event->export_begin.head_dim, event->export_begin.dtype};
    const struct dskv_wire_tensor *tokens = &event->export_begin.tokens;
    if (layout.n_layers < 1 || layout.n_kv_heads < 1 || layout.head_dim < 1 || layout.n_layers > DSKV_MAX_LAYERS ||
        layout.n_kv_heads > DSKV_MAX_HEADS || layout.head_dim > DSKV_MAX_HEAD_DIM || layout.dtype > DSKV_BF16)
        return bad_export(error, "its shape");
    if (layout.length != length || !tokens->data || tokens->shape[0] != length)
        return bad_export(error, "its length");
    size_t one = layer_bytes(&layout), n = (size_t)layout.n_layers;
    char *bytes = malloc(2 * n * one + 1);
    if (!bytes)
        return dskv_fail(error, DSKV_INTERNAL, "no memory for %zu bytes of keys and values", 2 * n * one);
    struct exported_box *made = dskv_calloc(1, sizeof *made);
    made->layout = layout;
    made->n_parts = event->export_begin.n_parts;
    made->bytes = bytes;
    made->arrays = dskv_calloc(2 * n, sizeof *made->arrays);
    for (size_t i = 0; i < n; i++) {
        made->arrays[i] = bytes + 2 * i * one;
        made->arrays[n + i] = bytes + (2 * i + 1) * one;
    }
    snprintf(made->model, sizeof made->model, "%s", event->export_begin.model);
    snprintf(made->origin, sizeof made->origin, "%s", event->export_begin.origin);
    made->exported = (struct dskv_exported){
        .n_layers = layout.n_layers,
        .n_kv_heads = layout.n_kv_heads,
        .length = layout.length,
        .head_dim = layout.head_dim,
        .dtype = dskv_dtype_name(layout.dtype),
        .model = made->model,
        .origin = made->origin,
        .layer_bytes = one,
        .k = made->arrays,
        .v = made->arrays + n,
        .tokens = dskv_tensor_copy(tokens),
    };
    *box = made;
    return DSKV_OK;
}

/* Stores a part; the sum of tokens over parts shows at the end whether any is missing. */
static enum dskv_code take_part(struct exported_box *box, const struct dskv_part *part, int64_t *n_missing,
                                struct dskv_error *error)
{
    const struct layout *layout = &box->layout;
    const struct dskv_wire_tensor *data = &part->data;
    if (part->layer < 0 || part->layer >= layout->n_layers || part->start < 0 || part->start >= part->stop ||
        part->stop > layout->length)
        return bad_export(error, "a part of no layer or token");
    if (!data->data || data->dtype != layout->dtype || data->n_dims != 3 || data->shape[0] != layout->n_kv_heads ||
        data->shape[1] != part->stop - part->start || data->shape[2] != layout->head_dim)
        return bad_export(error, "a part of another shape");
    const void *array = box->arrays[part->is_value ? layout->n_layers + part->layer : part->layer];
    copy_tokens(layout, (char *)array, (char *)data->data, part->start, part->stop, 1);
    *n_missing -= part->stop - part->start;
    return DSKV_OK;
}

static enum dskv_code receive_parts(struct dskv_call *call, struct exported_box *box, struct dskv_error *error)
{
    int64_t n_missing = 2 * (int64_t)box->layout.n_layers * box->layout.length;
    int32_t n_granted = EXPORT_CREDITS;
    for (;;) {
        struct dskv_event event;
        enum dskv_code code = dskv_call_wait(call, &event, error);
        if (code)
            return code;
        int ended = event.kind == DSKV_EVENT_RESULT;
        if (ended && n_missing)
            code = bad_export(error, "parts are missing");
        else if (!ended && event.kind == DSKV_EVENT_PART)
            code = take_part(box, &event.part, &n_missing, error);
        else if (!ended)
            code = dskv_call_unexpected(&event, error);
        dskv_event_clear(&event);
        if (code || ended)
            return code;
        if (n_granted < box->n_parts) {
            n_granted++;
            struct dskv_request credit = {.op = DSKV_OP_CREDIT, .credit = {.request = call->id, .n = 1}};
            code = dskv_call_follow(call, &credit, error);
            if (code)
                return code;
        }
    }
}

static enum dskv_code receive_export(struct dskv_call *call, int32_t length, struct exported_box **box,
                                     struct dskv_error *error)
{
    struct dskv_event event;
    enum dskv_code code = dskv_call_wait(call, &event, error);
    if (code)
        return code;
    if (event.kind == DSKV_EVENT_BEGIN && event.op == DSKV_OP_EXPORT)
        code = open_box(&event, length, box, error);
    else
        code = dskv_call_unexpected(&event, error);
    dskv_event_clear(&event);
    return code ? code : receive_parts(call, *box, error);
}

enum dskv_code dskv_export(struct dskv_client *client, struct dskv_cache_prefix prefix, int32_t timeout_ms,
                           struct dskv_exported **exported, struct dskv_error *error)
{
    *exported = NULL;
    struct dskv_prefix wire;
    enum dskv_code code = dskv_client_check_open(client, error);
    if (!code)
        code = dskv_prefix_read(client, prefix, &wire, error);
    if (!code && !wire.present) {
        code = dskv_fail(error, DSKV_BAD_VALUE, "there is no cache to export");
        dskv_error_set_field(error, "cache");
    }
    if (code)
        return code;
    struct dskv_request request = {.op = DSKV_OP_EXPORT,
                                   .export_ = {.cache = wire.cache, .length = wire.length, .credits = EXPORT_CREDITS}};
    struct dskv_call call;
    code = dskv_call_begin(client, &request, timeout_ms, &call, error);
    if (code)
        return code;
    struct exported_box *box = NULL;
    code = receive_export(&call, wire.length, &box, error);
    dskv_call_end(&call);
    struct dskv_exported *made = box ? &box->exported : NULL;
    if (code)
        dskv_exported_free(&made);
    *exported = made;
    return code;
}

void dskv_exported_free(struct dskv_exported **exported)
{
    struct exported_box *box = (struct exported_box *)*exported; /* its first member */
    *exported = NULL;
    if (!box)
        return;
    free((void *)box->exported.tokens);
    free(box->arrays);
    free(box->bytes);
    free(box);
}

/* ---- import ----------------------------------------------------------------------------------------------------- */

static enum dskv_code read_import(const struct dskv_import_options *options, struct dskv_import *import,
                                  struct dskv_error *error)
{
    *import = (struct dskv_import){
        .dtype = options->dtype ? dskv_dtype_from_name(options->dtype) : DSKV_N_DTYPES,
        .n_layers = options->n_layers,
        .n_kv_heads = options->n_kv_heads,
        .head_dim = options->head_dim,
        .convert = options->convert != 0,
    };
    const char *field = NULL;
    if (import->dtype > DSKV_BF16)
        field = "dtype";
    else if (options->n_layers < 1 || options->n_layers > DSKV_MAX_LAYERS)
        field = "n_layers";
    else if (options->n_kv_heads < 1 || options->n_kv_heads > DSKV_MAX_HEADS)
        field = "n_kv_heads";
    else if (options->head_dim < 1 || options->head_dim > DSKV_MAX_HEAD_DIM)
        field = "head_dim";
    else if (options->length < 0)
        field = "length";
    else if (!options->k)
        field = "k";
    else if (!options->v)
        field = "v";
    else if (options->model && strlen(options->model) >= sizeof import->model)
        field = "model";
    if (field) {
        dskv_fail(error, DSKV_BAD_VALUE, "the import's %s is missing or not allowed", field);
        dskv_error_set_field(error, field);
        return DSKV_BAD_VALUE;
    }
    snprintf(import->model, sizeof import->model, "%s", options->model ? options->model : "");
    return dskv_tokens_read(options->tokens, (size_t)options->length, "tokens", &import->tokens, error);
}

/* Waits for an event of one kind. */
static enum dskv_code expect(struct dskv_call *call, enum dskv_event_kind kind, struct dskv_event *event,
                             struct dskv_error *error)
{
    enum dskv_code code = dskv_call_wait(call, event, error);
    if (!code && (event->kind != kind || (kind != DSKV_EVENT_CREDIT && event->op != DSKV_OP_IMPORT))) {
        code = dskv_call_unexpected(event, error);
        dskv_event_clear(event);
    }
    return code;
}

static enum dskv_code send_part(struct dskv_call *call, const struct dskv_import_options *options,
                                const struct layout *layout, struct dskv_part *part, char *buffer,
                                struct dskv_error *error)
{
    const void *array = part->is_value ? options->v[part->layer] : options->k[part->layer];
    copy_tokens(layout, (char *)array, buffer, part->start, part->stop, 0);
    part->data = (struct dskv_wire_tensor){
        .data = buffer,
        .dtype = layout->dtype,
        .n_dims = 3,
        .shape = {layout->n_kv_heads, part->stop - part->start, layout->head_dim},
        .bytes = layer_bytes(layout) / (size_t)layout->length * (size_t)(part->stop - part->start),
    };
    struct dskv_request request = {.op = DSKV_OP_PART, .part = {.request = call->id, .part = *part}};
    return dskv_call_follow(call, &request, error);
}

/* All parts, each for one credit. */
static enum dskv_code send_parts(struct dskv_call *call, const struct dskv_import_options *options,
                                 const struct layout *layout, int32_t credits, int32_t part_tokens,
                                 struct dskv_error *error)
{
    int32_t step = part_tokens < layout->length ? part_tokens : layout->length;
    char *buffer =
        dskv_calloc((size_t)(layout->n_kv_heads * layout->head_dim) * (size_t)step, dskv_dtype_bytes(layout->dtype));
    enum dskv_code code = DSKV_OK;
    struct dskv_part part;
    for (part.layer = 0; part.layer < layout->n_layers && !code; part.layer++)
        for (part.is_value = 0; part.is_value < 2 && !code; part.is_value++)
            for (part.start = 0; part.start < layout->length && !code; part.start = part.stop) {
                part.stop = part.start + step < layout->length ? part.start + step : layout->length;
                while (!credits && !code) {
                    struct dskv_event event;
                    code = expect(call, DSKV_EVENT_CREDIT, &event, error);
                    if (!code) {
                        credits += event.credit.n;
                        dskv_event_clear(&event);
                    }
                }
                if (!code)
                    code = send_part(call, options, layout, &part, buffer, error);
                credits--;
            }
    free(buffer);
    return code;
}

static enum dskv_code send_import(struct dskv_call *call, const struct dskv_import_options *options,
                                  const struct dskv_import *import, struct dskv_event *event, struct dskv_error *error)
{
    enum dskv_code code = expect(call, DSKV_EVENT_BEGIN, event, error);
    if (code)
        return code;
    int32_t credits = event->import_begin.credits, part_tokens = event->import_begin.part_tokens;
    dskv_event_clear(event);
    if (credits < 0 || part_tokens < 1)
        return dskv_fail(error, DSKV_BAD_MESSAGE, "the server takes %d parts of %d tokens", credits, part_tokens);
    struct layout layout = {import->n_layers, import->n_kv_heads, options->length, import->head_dim, import->dtype};
    code = send_parts(call, options, &layout, credits, part_tokens, error);
    struct dskv_request commit = {.op = DSKV_OP_COMMIT, .commit = {.request = call->id}};
    if (!code)
        code = dskv_call_follow(call, &commit, error);
    while (!code) { /* credits for the last parts come before the result */
        code = dskv_call_wait(call, event, error);
        if (code || event->kind != DSKV_EVENT_CREDIT)
            break;
        dskv_event_clear(event);
    }
    if (!code && (event->kind != DSKV_EVENT_RESULT || event->op != DSKV_OP_IMPORT)) {
        code = dskv_call_unexpected(event, error);
        dskv_event_clear(event);
    }
    return code;
}

enum dskv_code dskv_import(struct dskv_client *client, const struct dskv_import_options *options,
                           struct dskv_cache **cache, struct dskv_error *error)
{
    *cache = NULL;
    struct dskv_import_options own;
    struct dskv_request request = {.op = DSKV_OP_IMPORT};
    enum dskv_code code = dskv_client_check_open(client, error);
    if (!code)
        code = dskv_options_read(options, &own, sizeof own, error);
    if (!code)
        code = read_import(&own, &request.import_, error);
    struct dskv_call call;
    if (!code)
        code = dskv_call_begin(client, &request, own.timeout_ms, &call, error);
    if (code)
        return code;
    struct dskv_event event;
    code = send_import(&call, &own, &request.import_, &event, error);
    if (!code) {
        if (event.import_.present && event.import_.length == own.length)
            *cache = dskv_cache_open(client, &event.import_, (struct dskv_cache_prefix){0}, &request.import_.tokens, 1);
        else
            code = dskv_fail(error, DSKV_BAD_MESSAGE, "the server's import made another cache than was sent");
        dskv_event_clear(&event);
    }
    dskv_call_end(&call);
    return code;
}
