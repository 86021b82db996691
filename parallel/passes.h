/* Passes: a step's way over this rank's device.  The plan comes in, blocks are copied, the transformer runs over the
 * rows, what is wanted of them is selected and reported.
 *
 * Where the device and the comm only queue, a step of a size that was seen before is queued as one recording.  Knows
 * plans; no request.  Every rank runs the same calls in the same order.
 */
#ifndef DSKV_PARALLEL_PASSES_H
#define DSKV_PARALLEL_PASSES_H

#include "parallel/forward.h"

/* Bytes of a comm slot that steps with these bounds need; the same on every rank. */
size_t dskv_passes_slot_bytes(const struct dskv_model *model, const struct dskv_device *device,
                              enum dskv_dtype activation_dtype, int32_t n_ranks, int32_t max_tokens);

struct dskv_passes;

/* DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_passes_open(const struct dskv_forward_parts *parts, struct dskv_passes **passes,
                                struct dskv_error *error);
void dskv_passes_close(struct dskv_passes **passes);

/* Queues the plan on the device (computes it, where the device does so when called).  The plan's memory stays as it is
 * until the step is collected.  At most two steps are under way, and the first of them wants no row of logits. */
enum dskv_exit dskv_passes_submit(struct dskv_passes *passes, const struct dskv_plan *plan, struct dskv_error *error);
/* Without waiting: whether the oldest step under way has ended, or the device failed. */
int dskv_passes_reached(struct dskv_passes *passes);
/* When the device began and ended the step that was collected last, by its clock; begun 0 where plans are not received.
 */
struct dskv_turn_times dskv_passes_times(const struct dskv_passes *passes);
/* Waits for the oldest step under way.  Where rows are selected *results gets [used.n_rows], valid until the next
 * collect; elsewhere null. */
enum dskv_exit dskv_passes_collect(struct dskv_passes *passes, const struct dskv_row_result **results,
                                   struct dskv_error *error);

#endif
