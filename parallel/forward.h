/* Forward: this rank's shard of the transformer, and the rows of logits that a step wants.
 *
 * Owns the activations, sized at open for the largest step, so that a step allocates nothing.  Where the device and the
 * comm only queue, a step of a size that was seen before is queued as one recording.  Knows plans, weights and the
 * comm; no request.  Every rank runs the same calls in the same order.
 */
#ifndef DSKV_PARALLEL_FORWARD_H
#define DSKV_PARALLEL_FORWARD_H

#include "parallel/comm.h"
#include "parallel/engine.h"
#include "parallel/weights.h"

/* What a step runs on; all outlive it. */
struct dskv_forward_parts {
    const struct dskv_model *model;
    const struct dskv_shard *shard;
    struct dskv_weights *weights;
    struct dskv_device *device;
    struct dskv_comm *comm; /* slots of at least dskv_forward_slot_bytes */
    struct dskv_kv kv;
    enum dskv_dtype activation_dtype;
    struct dskv_plan_bounds bounds;
    int32_t max_logit_rows;
    int every_rank_selects; /* not only rank 0 chooses, draws and merges: a next step may name what was drawn */
};

/* Bytes of a comm slot that steps with these bounds need; the same on every rank. */
size_t dskv_forward_slot_bytes(const struct dskv_model *model, const struct dskv_device *device,
                               enum dskv_dtype activation_dtype, int32_t n_ranks, int32_t max_tokens);

struct dskv_forward;

/* DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_forward_open(const struct dskv_forward_parts *parts, struct dskv_forward **forward,
                                 struct dskv_error *error);
void dskv_forward_close(struct dskv_forward **forward);

/* Queues the plan on the device (computes it, where the device does so when called).  The plan's memory stays as it is
 * until the step is collected.  At most two steps are under way, and the first of them wants no row of logits. */
enum dskv_exit dskv_forward_submit(struct dskv_forward *forward, const struct dskv_plan *plan,
                                   struct dskv_error *error);
/* Without waiting: whether the oldest step under way has ended, or the device failed. */
int dskv_forward_reached(struct dskv_forward *forward);
/* When the device began and ended the step that was collected last, by its clock; begun 0 where plans are not received.
 */
struct dskv_turn_times dskv_forward_times(const struct dskv_forward *forward);
/* Waits for the oldest step under way.  Where rows are selected *results gets [used.n_rows], valid until the next
 * collect; elsewhere null. */
enum dskv_exit dskv_forward_collect(struct dskv_forward *forward, const struct dskv_row_result **results,
                                    struct dskv_error *error);

#endif
