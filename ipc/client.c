/* The C client: connecting, closing, and the lifetime that a client shares with its handles.
 *
 * Knows the session and its limits, and the reading of option structs; what the operations mean is in the client_*.c
 * files.
 */
#include "ipc/client_inside.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

#define DEFAULT_ENDPOINT "tcp://127.0.0.1:5560"
#define DEFAULT_TIMEOUT_MS 30000
#define DEFAULT_CONNECT_TIMEOUT_MS 5000
#define CLOSE_TIMEOUT_MS 1000

/* ---- options ---------------------------------------------------------------------------------------------------- */

enum dskv_code dskv_options_read(const void *options, void *own, size_t own_bytes, struct dskv_error *error)
{
    memset(own, 0, own_bytes);
    size_t size = 0;
    if (options)
        memcpy(&size, options, sizeof size);
    if (size < sizeof size) {
        dskv_fail(error, DSKV_BAD_VALUE, "the options' size is %zu: set it to their sizeof", size);
        dskv_error_set_field(error, "size");
        return DSKV_BAD_VALUE;
    }
    for (size_t i = own_bytes; i < size; i++)
        if (((const char *)options)[i])
            return dskv_fail(error, DSKV_UNSUPPORTED, "an option is set that this version of libdskv does not know");
    memcpy(own, options, size < own_bytes ? size : own_bytes);
    return DSKV_OK;
}

enum dskv_code dskv_tokens_read(const int32_t *tokens, size_t n, const char *field, struct dskv_wire_tensor *tensor,
                                struct dskv_error *error)
{
    static const int32_t none[1];
    if ((!tokens && n) || n > INT32_MAX) {
        dskv_fail(error, DSKV_BAD_VALUE,
                  tokens ? "%s: %zu of them are too many" : "%s are null, and %zu are said to be there", field, n);
        dskv_error_set_field(error, field);
        return DSKV_BAD_VALUE;
    }
    *tensor = (struct dskv_wire_tensor){
        .data = n ? tokens : none, .dtype = DSKV_I32, .n_dims = 1, .shape = {(int64_t)n}, .bytes = n * sizeof *tokens};
    return DSKV_OK;
}

void *dskv_tensor_copy(const struct dskv_wire_tensor *tensor)
{
    if (!tensor->data)
        return NULL;
    void *copy = dskv_calloc(tensor->bytes, 1);
    memcpy(copy, tensor->data, tensor->bytes);
    return copy;
}

/* ---- lifetime --------------------------------------------------------------------------------------------------- */

void dskv_client_hold(struct dskv_client *client)
{
    client->n_references++;
}

void dskv_client_release(struct dskv_client *client)
{
    if (--client->n_references)
        return;
    DSKV_ASSERT(!client->calls, "a call is in flight on a client that is closed");
    dskv_link_close(&client->link);
    free(client->freed);
    free(client);
}

void dskv_client_give_up(struct dskv_client *client, const struct dskv_id *id)
{
    if (!client->link)
        return;
    if (client->n_freed == client->freed_capacity) {
        client->freed_capacity = client->freed_capacity * 2 + 16;
        client->freed = dskv_realloc(client->freed, client->freed_capacity, sizeof *client->freed);
    }
    client->freed[client->n_freed++] = *id;
}

size_t dskv_client_next_freed(const struct dskv_client *client)
{
    size_t most = client->limits.free_ids > 0 ? (size_t)client->limits.free_ids : 1;
    return client->n_freed < most ? client->n_freed : most;
}

void dskv_client_forget_freed(struct dskv_client *client, size_t n)
{
    DSKV_ASSERT(n <= client->n_freed, "%zu of %zu", n, client->n_freed);
    client->n_freed -= n;
    if (n)
        memmove(client->freed, client->freed + n, client->n_freed * sizeof *client->freed);
}

enum dskv_code dskv_client_check_open(const struct dskv_client *client, struct dskv_error *error)
{
    if (client && client->link)
        return DSKV_OK;
    return dskv_fail(error, DSKV_UNREACHABLE, "the client is closed");
}

enum dskv_code dskv_client_hello(struct dskv_client *client, struct dskv_error *error)
{
    struct dskv_request request = {
        .op = DSKV_OP_HELLO, .hello = {.client = "libdskv", .n_versions = 1, .versions = {DSKV_PROTOCOL_VERSION}}};
    struct dskv_event event;
    enum dskv_code code = dskv_call_run(client, &request, client->connect_timeout_ms, &event, error);
    if (code)
        return code;
    client->session = event.hello.session;
    client->has_session = 1;
    client->lease_ms = event.hello.lease_ms;
    client->limits = event.hello.limits;
    dskv_event_clear(&event);
    return DSKV_OK;
}

enum dskv_code dskv_connect(const struct dskv_connect_options *options, struct dskv_client **client,
                            struct dskv_error *error)
{
    *client = NULL;
    struct dskv_connect_options own = {0};
    enum dskv_code code = options ? dskv_options_read(options, &own, sizeof own, error) : DSKV_OK;
    if (code)
        return code;
    const char *endpoint = own.endpoint ? own.endpoint : getenv("DSKV_ENDPOINT");
    if (!endpoint || !*endpoint)
        endpoint = DEFAULT_ENDPOINT;
    struct dskv_client *made = dskv_calloc(1, sizeof *made);
    made->n_references = 1;
    made->next_id = 1;
    made->timeout_ms = own.timeout_ms ? own.timeout_ms : DEFAULT_TIMEOUT_MS;
    made->connect_timeout_ms = own.connect_timeout_ms ? own.connect_timeout_ms : DEFAULT_CONNECT_TIMEOUT_MS;
    code = dskv_link_open(endpoint, &made->link, error);
    if (!code)
        code = dskv_client_hello(made, error);
    if (code) {
        dskv_client_release(made);
        return code;
    }
    *client = made;
    return DSKV_OK;
}

void dskv_close(struct dskv_client **client)
{
    struct dskv_client *closing = *client;
    *client = NULL;
    if (!closing)
        return;
    struct dskv_request request = {.op = DSKV_OP_FREE, .free_caches = {.all = 1}};
    struct dskv_event event;
    closing->n_freed = 0; /* all of them go */
    if (closing->has_session && !dskv_call_run(closing, &request, CLOSE_TIMEOUT_MS, &event, NULL))
        dskv_event_clear(&event);
    dskv_link_close(&closing->link);
    dskv_client_release(closing);
}
