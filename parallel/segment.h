/* Segment: the memory that all ranks of a host share, and who they are.
 *
 * Owns one anonymous memory file that rank 0 makes and the others map before the start ends; it has no name anywhere,
 * so nothing stays behind however the ranks end.  Pages are taken on first touch.  Knows nothing of what lies in it.
 */
#ifndef DSKV_PARALLEL_SEGMENT_H
#define DSKV_PARALLEL_SEGMENT_H

#include "base/status.h"
#include "parallel/flag.h"

struct dskv_segment {
    void *memory; /* zeroed, page-aligned */
    size_t bytes;
    struct dskv_peers peers;
};

/* Collective; every rank gives the same size, and all return the same code.  DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_segment_open(size_t bytes, struct dskv_segment *segment, struct dskv_error *error);
void dskv_segment_close(struct dskv_segment *segment);

#endif
