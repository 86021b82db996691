/* Diag: messages as people write them, for tests.
 *
 * A header is written as in ipc/PROTOCOL.md: JSON with h'...' for bytes and nil for nil.  A number with a point or an
 * exponent is a float 64, any other the shortest integer.
 */
#ifndef DSKV_TESTS_IPC_DIAG_H
#define DSKV_TESTS_IPC_DIAG_H

#include "ipc/message.h"

/* A frame of the msgpack bytes of a header; ends the process when the text is not one. */
struct dskv_frame diag_header(const char *text);
/* A frame of bytes written as hexadecimal digits and spaces. */
struct dskv_frame diag_hex(const char *text);
/* A message of this header and of n tensor frames of i32, each with n_ids[i] ids that count from 0. */
struct dskv_frames diag_message(const char *header, int n, const int *n_ids);
/* Appends a frame, which the message owns then. */
void diag_add(struct dskv_frames *frames, struct dskv_frame frame);

#endif
