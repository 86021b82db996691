/* Forward: this rank's shard of the transformer.
 *
 * Owns the activations, sized at open for the largest step, so that a step allocates nothing.  Knows weights and the
 * comm; no plan and no request.  Every rank runs the same calls in the same order.
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
    struct dskv_comm *comm; /* slots of at least dskv_passes_slot_bytes */
    struct dskv_kv kv;
    enum dskv_dtype activation_dtype;
    struct dskv_plan_bounds bounds;
    int32_t max_logit_rows;
    int every_rank_selects; /* not only rank 0 chooses, draws and merges: a next step may name what was drawn */
};

struct dskv_forward;

/* DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_forward_open(const struct dskv_forward_parts *parts, struct dskv_forward **forward,
                                 struct dskv_error *error);
void dskv_forward_close(struct dskv_forward **forward);

/* The rows of one pass over the layers.  Pointers are into device memory. */
struct dskv_pass {
    int32_t rows;                           /* at least 1 */
    const int32_t *ids, *positions, *slots; /* [rows] */
    const int32_t *drawn;                   /* what ids below 0 stand for, see struct dskv_embed */
    const struct dskv_attention_work *work; /* [n_work] */
    int32_t n_work, max_keys;               /* max_keys: of the row that sees most, or more */
    const int32_t *tables;
};
/* Queues it: keys and values go to their slots, the final norm of the last layer's activations to the result. */
enum dskv_exit dskv_forward_run(const struct dskv_forward *forward, const struct dskv_pass *pass,
                                struct dskv_error *error);
/* Activations [rows, width], until the next pass. */
struct dskv_tensor dskv_forward_result(const struct dskv_forward *forward, int32_t rows);

#endif
