/* Scan: looks over a header frame before msgpack-c sees it.
 *
 * msgpack-c believes a count before it has seen the values, recurses over what is nested, and passes bad UTF-8 and
 * trailing bytes.  A frame that passed this scan holds exactly one map whose counts and lengths fit the bytes that are
 * there. Knows the encoding alone, no field.
 */
#ifndef DSKV_IPC_SCAN_H
#define DSKV_IPC_SCAN_H

#include "base/status.h"

#include <stddef.h>

/* DSKV_BAD_MESSAGE with a sentence unless the bytes are one msgpack map, at most DSKV_MAX_HEADER_DEPTH deep and
 * DSKV_MAX_HEADER_VALUES values, with string keys, UTF-8 strings and no ext types. */
enum dskv_code dskv_scan_header(const void *header, size_t bytes, struct dskv_error *error);
/* How many of the n bytes are whole UTF-8 characters, from the first on. */
size_t dskv_scan_utf8(const void *string, size_t n);

#endif
