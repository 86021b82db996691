/* Recorded: passes that were queued once and are queued again as one, found by what they depend on.
 *
 * A pass is recorded when its key comes the second time; the least recently used recording makes room for a new one.
 * Knows nothing of what a pass does.
 */
#ifndef DSKV_PARALLEL_RECORDED_H
#define DSKV_PARALLEL_RECORDED_H

#include "kernels/ops.h"

#define DSKV_RECORDED_KEY_BYTES 60

struct dskv_recorded;

/* Rounds a size up so that few different ones occur, where a little more work costs nothing: exact to 8, then whole
 * eights to 64; larger ones stay as they are.  Never more than the next power of two from 8 on. */
static inline int32_t dskv_recorded_size(int32_t n)
{
    return n <= 8 || n > 64 ? n : (n + 7) / 8 * 8;
}

struct dskv_recorded *dskv_recorded_open(struct dskv_device *device);
void dskv_recorded_close(struct dskv_recorded **recorded);

/* key: DSKV_RECORDED_KEY_BYTES, compared as bytes.  The recording, or null; then *is_due says whether it is time to
 * record. */
const struct dskv_recording *dskv_recorded_find(struct dskv_recorded *recorded, const void *key, int *is_due);
/* Keeps what was recorded for the key that was looked for last. */
void dskv_recorded_keep(struct dskv_recorded *recorded, struct dskv_recording *recording);

#endif
