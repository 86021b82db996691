#include "scan.h"

#include "base/limits.h"

#include <stdint.h>

struct scan {
    const uint8_t *at, *end;
    size_t n_pending; /* values that containers have promised and that are still to come: each takes a byte or more */
    size_t n_values;
    int depth;
    struct {
        size_t n_left; /* values, keys included */
        int is_map;
    } open[DSKV_MAX_HEADER_DEPTH];
    struct dskv_error *error;
};

static size_t bytes_left(const struct scan *scan)
{
    return (size_t)(scan->end - scan->at);
}

static enum dskv_code truncated(struct scan *scan)
{
    return dskv_fail(scan->error, DSKV_BAD_MESSAGE, "the header ends in the middle of a value");
}

size_t dskv_scan_utf8(const void *string, size_t n)
{
    const uint8_t *s = string;
    size_t i = 0;
    while (i < n) {
        uint32_t c = s[i];
        size_t more = c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        if ((c >= 0x80 && c < 0xc2) || c > 0xf4 || n - i <= more)
            return i;
        if (more)
            c &= 0x3fu >> more;
        for (size_t k = 1; k <= more; k++) {
            if ((s[i + k] & 0xc0) != 0x80)
                return i;
            c = c << 6 | (s[i + k] & 0x3fu);
        }
        int overlong = (more == 2 && c < 0x800) || (more == 3 && c < 0x10000);
        if (overlong || (c >= 0xd800 && c <= 0xdfff) || c > 0x10ffff)
            return i;
        i += more + 1;
    }
    return n;
}

/* Reads a big-endian count of 1, 2, 4 or 8 bytes; 0 when it is cut off. */
static int take_count(struct scan *scan, size_t n, uint64_t *value)
{
    if (bytes_left(scan) < n)
        return 0;
    *value = 0;
    for (size_t i = 0; i < n; i++)
        *value = *value << 8 | *scan->at++;
    return 1;
}

static enum dskv_code skip(struct scan *scan, uint64_t n)
{
    if (bytes_left(scan) < n)
        return truncated(scan);
    scan->at += n;
    return DSKV_OK;
}

static enum dskv_code skip_string(struct scan *scan, uint64_t n)
{
    if (bytes_left(scan) < n)
        return truncated(scan);
    if (dskv_scan_utf8(scan->at, n) != n)
        return dskv_fail(scan->error, DSKV_BAD_MESSAGE, "the header holds a string that is not UTF-8");
    scan->at += n;
    return DSKV_OK;
}

/* Begins a map or array of n entries.  The count is believed only when a byte is left for every value. */
static enum dskv_code open_container(struct scan *scan, uint64_t n, int is_map)
{
    uint64_t n_values = is_map ? 2 * n : n;
    if (n_values + scan->n_pending > bytes_left(scan))
        return dskv_fail(scan->error, DSKV_BAD_MESSAGE, "the header promises more values than it has bytes");
    if (scan->depth == DSKV_MAX_HEADER_DEPTH)
        return dskv_fail(scan->error, DSKV_BAD_MESSAGE, "the header is nested more than %d deep",
                         DSKV_MAX_HEADER_DEPTH);
    scan->open[scan->depth].n_left = n_values;
    scan->open[scan->depth].is_map = is_map;
    scan->depth++;
    scan->n_pending += n_values;
    return DSKV_OK;
}

/* The types whose first byte alone tells the length. */
static enum dskv_code scan_fixed(struct scan *scan, uint8_t type)
{
    if (type <= 0x7f || type >= 0xe0 || type == 0xc0 || type == 0xc2 || type == 0xc3)
        return DSKV_OK;
    if (type <= 0x8f)
        return open_container(scan, type & 0x0f, 1);
    if (type <= 0x9f)
        return open_container(scan, type & 0x0f, 0);
    if (type <= 0xbf)
        return skip_string(scan, type & 0x1f);
    if (type == 0xca || type == 0xcb) /* floats */
        return skip(scan, type == 0xca ? 4 : 8);
    if (type >= 0xcc && type <= 0xd3) /* unsigned and signed integers */
        return skip(scan, 1u << (type & 3));
    return dskv_fail(scan->error, DSKV_BAD_MESSAGE, "the header holds a value of the ext type or of none");
}

static enum dskv_code scan_value(struct scan *scan)
{
    uint8_t type = *scan->at++;
    uint64_t n = 0;
    if (type >= 0xc4 && type <= 0xc6)
        return take_count(scan, 1u << (type - 0xc4), &n) ? skip(scan, n) : truncated(scan);
    if (type >= 0xd9 && type <= 0xdb)
        return take_count(scan, 1u << (type - 0xd9), &n) ? skip_string(scan, n) : truncated(scan);
    if (type >= 0xdc && type <= 0xdf)
        return take_count(scan, type & 1 ? 4 : 2, &n) ? open_container(scan, n, type >= 0xde) : truncated(scan);
    return scan_fixed(scan, type);
}

/* Whether the next value is a map's key, and is a string then. */
static int key_is_string(const struct scan *scan)
{
    if (!scan->depth || !scan->open[scan->depth - 1].is_map || scan->open[scan->depth - 1].n_left % 2)
        return 1;
    uint8_t type = *scan->at;
    return (type >= 0xa0 && type <= 0xbf) || (type >= 0xd9 && type <= 0xdb);
}

static enum dskv_code scan_next(struct scan *scan)
{
    if (scan->at == scan->end)
        return truncated(scan);
    if (++scan->n_values > DSKV_MAX_HEADER_VALUES)
        return dskv_fail(scan->error, DSKV_BAD_MESSAGE, "the header holds more than %d values", DSKV_MAX_HEADER_VALUES);
    if (!key_is_string(scan))
        return dskv_fail(scan->error, DSKV_BAD_MESSAGE, "the header holds a map with a key that is not a string");
    if (scan->depth) {
        scan->open[scan->depth - 1].n_left--;
        scan->n_pending--;
    }
    return scan_value(scan);
}

enum dskv_code dskv_scan_header(const void *header, size_t bytes, struct dskv_error *error)
{
    struct scan scan = {.at = header, .end = (const uint8_t *)header + bytes, .error = error};
    do {
        enum dskv_code code = scan_next(&scan);
        if (code)
            return code;
        if (scan.n_values == 1 && !(scan.depth && scan.open[0].is_map))
            return dskv_fail(error, DSKV_BAD_MESSAGE, "the header is not a map");
        while (scan.depth && scan.open[scan.depth - 1].n_left == 0)
            scan.depth--;
    } while (scan.depth);
    if (scan.at != scan.end)
        return dskv_fail(error, DSKV_BAD_MESSAGE, "%zu bytes follow the header's map", bytes_left(&scan));
    return DSKV_OK;
}
