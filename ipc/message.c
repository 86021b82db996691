#include "ipc/message.h"

#include "base/memory.h"
#include "codec.h"

#include <stdlib.h>
#include <string.h>

const char *dskv_op_name(enum dskv_op op)
{
    static const char *const names[DSKV_N_OPS] = {
        [DSKV_OP_HELLO] = "hello",   [DSKV_OP_INFO] = "info",         [DSKV_OP_STATS] = "stats",
        [DSKV_OP_PING] = "ping",     [DSKV_OP_CANCEL] = "cancel",     [DSKV_OP_FORWARD] = "forward",
        [DSKV_OP_VERIFY] = "verify", [DSKV_OP_GENERATE] = "generate", [DSKV_OP_EXPORT] = "export",
        [DSKV_OP_CREDIT] = "credit", [DSKV_OP_IMPORT] = "import",     [DSKV_OP_PART] = "part",
        [DSKV_OP_COMMIT] = "commit", [DSKV_OP_FREE] = "free",
    };
    return (unsigned)op < DSKV_N_OPS ? names[op] : NULL;
}

const char *dskv_event_kind_name(enum dskv_event_kind kind)
{
    static const char *const names[DSKV_N_EVENT_KINDS] = {
        [DSKV_EVENT_RESULT] = "result", [DSKV_EVENT_ERROR] = "error", [DSKV_EVENT_BEGIN] = "begin",
        [DSKV_EVENT_PART] = "part",     [DSKV_EVENT_ROWS] = "rows",   [DSKV_EVENT_TOKENS] = "tokens",
        [DSKV_EVENT_CREDIT] = "credit",
    };
    return (unsigned)kind < DSKV_N_EVENT_KINDS ? names[kind] : NULL;
}

const char *dskv_finish_name(enum dskv_finish finish)
{
    static const char *const names[DSKV_N_FINISHES] = {
        [DSKV_FINISH_STOP] = "stop",
        [DSKV_FINISH_LENGTH] = "length",
        [DSKV_FINISH_CONTEXT] = "context",
        [DSKV_FINISH_CANCELLED] = "cancelled",
    };
    return (unsigned)finish < DSKV_N_FINISHES ? names[finish] : NULL;
}

void dskv_frames_clear(struct dskv_frames *frames)
{
    for (int32_t i = 0; i < frames->n; i++)
        free(frames->frames[i].data);
    free(frames->frames);
    memset(frames, 0, sizeof *frames);
}

void dskv_request_clear(struct dskv_request *request)
{
    struct dskv_message_memory *memory = request->memory;
    dskv_message_memory_close(&memory);
    memset(request, 0, sizeof *request);
}

void dskv_event_clear(struct dskv_event *event)
{
    struct dskv_message_memory *memory = event->memory;
    dskv_message_memory_close(&memory);
    memset(event, 0, sizeof *event);
}

/* ---- memory of a decoded message: its frames, and a chain of allocations -------------------------------------- */

struct allocation {
    struct allocation *next;
    _Alignas(16) char bytes[];
};

struct dskv_message_memory {
    struct dskv_frames frames;
    struct allocation *allocations;
};

struct dskv_message_memory *dskv_message_memory_open(struct dskv_frames *frames)
{
    struct dskv_message_memory *memory = dskv_calloc(1, sizeof *memory);
    memory->frames = *frames;
    memset(frames, 0, sizeof *frames);
    return memory;
}

void *dskv_message_memory_alloc(struct dskv_message_memory *memory, size_t n, size_t bytes)
{
    DSKV_ASSERT(bytes == 0 || n <= DSKV_MAX_REPLY_BYTES / bytes, "%zu of %zu bytes", n, bytes);
    struct allocation *allocation = dskv_calloc(1, sizeof *allocation + n * bytes);
    allocation->next = memory->allocations;
    memory->allocations = allocation;
    return allocation->bytes;
}

const struct dskv_frames *dskv_message_memory_frames(const struct dskv_message_memory *memory)
{
    return &memory->frames;
}

void dskv_message_memory_close(struct dskv_message_memory **memory)
{
    if (!*memory)
        return;
    dskv_frames_clear(&(*memory)->frames);
    for (struct allocation *next, *allocation = (*memory)->allocations; allocation; allocation = next) {
        next = allocation->next;
        free(allocation);
    }
    free(*memory);
    *memory = NULL;
}

/* ---- the check of a prefix's tokens --------------------------------------------------------------------------- */

static uint32_t crc_byte(uint32_t crc, uint32_t byte)
{
    /* Four bits at a time: the table is small enough to be read here. */
    static const uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    crc ^= byte;
    crc = crc >> 4 ^ table[crc & 15];
    return crc >> 4 ^ table[crc & 15];
}

uint32_t dskv_tokens_check(uint32_t previous, const int32_t *ids, size_t n)
{
    uint32_t crc = ~previous;
    for (size_t i = 0; i < n; i++)
        for (int shift = 0; shift < 32; shift += 8)
            crc = crc_byte(crc, (uint32_t)ids[i] >> shift & 0xff);
    return ~crc;
}
