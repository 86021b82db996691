#include "ipc/diag.h"

#include "base/memory.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

struct diag {
    const char *at;
    uint8_t *bytes;
    size_t n, capacity;
};

static void put(struct diag *diag, const void *bytes, size_t n)
{
    if (!diag->bytes || diag->n + n > diag->capacity) {
        diag->capacity = 2 * (diag->n + n) + 16;
        diag->bytes = dskv_realloc(diag->bytes, diag->capacity, 1);
    }
    memcpy(diag->bytes + diag->n, bytes, n);
    diag->n += n;
}

static void put_byte(struct diag *diag, unsigned byte)
{
    put(diag, &(uint8_t){(uint8_t)byte}, 1);
}

static void put_big_endian(struct diag *diag, uint64_t value, int n)
{
    while (n-- > 0)
        put_byte(diag, (unsigned)(value >> (8 * n)) & 0xff);
}

static void put_int(struct diag *diag, uint64_t magnitude, int negative)
{
    uint64_t value = negative ? 0 - magnitude : magnitude;
    if (!negative && magnitude < 128)
        put_byte(diag, (unsigned)magnitude);
    else if (negative && magnitude <= 32)
        put_byte(diag, 256 - (unsigned)magnitude);
    else
        for (int i = 0; i < 4; i++) {
            int bits = 8 << i;
            if (bits == 64 || magnitude < (UINT64_C(1) << (bits - negative)) + (unsigned)negative) {
                put_byte(diag, (negative ? 0xd0 : 0xcc) + (unsigned)i);
                put_big_endian(diag, value, bits / 8);
                return;
            }
        }
}

static void skip_space(struct diag *diag)
{
    while (isspace((unsigned char)*diag->at))
        diag->at++;
}

static void expect(struct diag *diag, char character)
{
    skip_space(diag);
    DSKV_ASSERT(*diag->at == character, "expected '%c' at \"%.30s\"", character, diag->at);
    diag->at++;
}

static int accept(struct diag *diag, const char *word)
{
    size_t n = strlen(word);
    skip_space(diag);
    if (strncmp(diag->at, word, n) != 0)
        return 0;
    diag->at += n;
    return 1;
}

/* fix_max: the most that the fixed form holds; -1: there is none. */
static void put_length(struct diag *diag, size_t n, unsigned fix, int64_t fix_max, unsigned first)
{
    int wide = n > 0xffff ? 2 : n > 0xff ? 1 : 0;
    if ((int64_t)n <= fix_max) {
        put_byte(diag, fix | (unsigned)n);
        return;
    }
    if (first == 0xdc || first == 0xde) /* arrays and maps have no form with 8 bits */
        wide = wide > 1;
    put_byte(diag, first + (unsigned)wide);
    put_big_endian(diag, n, first == 0xdc || first == 0xde ? 2 << wide : 1 << wide);
}

static void put_string(struct diag *diag)
{
    expect(diag, '"');
    const char *end = strchr(diag->at, '"');
    DSKV_ASSERT(end, "no end of \"%.30s", diag->at);
    size_t n = (size_t)(end - diag->at);
    put_length(diag, n, 0xa0, 31, 0xd9);
    put(diag, diag->at, n);
    diag->at = end + 1;
}

static void put_hex(struct diag *diag)
{
    struct diag bytes = {0};
    for (; *diag->at && *diag->at != '\''; diag->at++) {
        if (isspace((unsigned char)*diag->at))
            continue;
        char digits[3] = {diag->at[0], diag->at[1], 0};
        DSKV_ASSERT(isxdigit((unsigned char)digits[0]) && isxdigit((unsigned char)digits[1]), "\"%.10s\"", diag->at);
        put_byte(&bytes, (unsigned)strtoul(digits, NULL, 16));
        diag->at++;
    }
    if (*diag->at) {
        diag->at++;
        put_length(diag, bytes.n, 0, -1, 0xc4);
    }
    put(diag, bytes.bytes ? bytes.bytes : (uint8_t *)"", bytes.n);
    free(bytes.bytes);
}

static void put_number(struct diag *diag)
{
    size_t n = strcspn(diag->at, ",]} \n\t");
    char text[64];
    DSKV_ASSERT(n > 0 && n < sizeof text, "\"%.30s\" is no value", diag->at);
    memcpy(text, diag->at, n);
    text[n] = 0;
    diag->at += n;
    if (strpbrk(text, ".en")) {
        double value = strtod(text, NULL);
        uint64_t bits;
        memcpy(&bits, &value, sizeof bits);
        put_byte(diag, 0xcb);
        put_big_endian(diag, bits, 8);
        return;
    }
    char *end = NULL;
    uint64_t magnitude = strtoull(text + (text[0] == '-'), &end, 10);
    DSKV_ASSERT(*end == 0, "\"%s\" is no value", text);
    put_int(diag, magnitude, text[0] == '-' && magnitude > 0);
}

static void put_value(struct diag *diag);

/* The entries come first, into a buffer of their own, since the count is written before them. */
static void put_container(struct diag *diag, int is_map)
{
    struct diag entries = {.at = diag->at};
    size_t n = 0;
    const char *end = is_map ? "}" : "]";
    while (!accept(&entries, end)) {
        if (n++)
            expect(&entries, ',');
        put_value(&entries);
        if (is_map) {
            expect(&entries, ':');
            put_value(&entries);
        }
    }
    diag->at = entries.at;
    put_length(diag, n, is_map ? 0x80 : 0x90, 15, is_map ? 0xde : 0xdc);
    put(diag, entries.bytes ? entries.bytes : (uint8_t *)"", entries.n);
    free(entries.bytes);
}

static void put_value(struct diag *diag)
{
    skip_space(diag);
    if (accept(diag, "{"))
        put_container(diag, 1);
    else if (accept(diag, "["))
        put_container(diag, 0);
    else if (accept(diag, "h'"))
        put_hex(diag);
    else if (*diag->at == '"')
        put_string(diag);
    else if (accept(diag, "true"))
        put_byte(diag, 0xc3);
    else if (accept(diag, "false"))
        put_byte(diag, 0xc2);
    else if (accept(diag, "nil"))
        put_byte(diag, 0xc0);
    else
        put_number(diag);
}

struct dskv_frame diag_header(const char *text)
{
    struct diag diag = {.at = text};
    put_value(&diag);
    skip_space(&diag);
    DSKV_ASSERT(*diag.at == 0, "\"%.30s\" follows the header", diag.at);
    return (struct dskv_frame){diag.bytes, diag.n};
}

struct dskv_frame diag_hex(const char *text)
{
    struct diag diag = {.at = text};
    put(&diag, "", 0);
    put_hex(&diag);
    return (struct dskv_frame){diag.bytes, diag.n};
}

void diag_add(struct dskv_frames *frames, struct dskv_frame frame)
{
    frames->frames = dskv_realloc(frames->frames, (size_t)frames->n + 1, sizeof frame);
    frames->frames[frames->n++] = frame;
}

struct dskv_frames diag_message(const char *header, int n, const int *n_ids)
{
    struct dskv_frames frames = {0};
    diag_add(&frames, diag_header(header));
    for (int i = 0; i < n; i++) {
        int32_t *ids = dskv_calloc((size_t)n_ids[i], sizeof *ids);
        for (int32_t id = 0; id < n_ids[i]; id++)
            ids[id] = id;
        diag_add(&frames, (struct dskv_frame){ids, (size_t)n_ids[i] * sizeof *ids});
    }
    return frames;
}
