/* Select: from normed hidden states to the rows that a step wants: the head, what the vocabulary's shards say of each
 * row, the tokens that are chosen.  Works through the rows in chunks, so that its memory does not grow with their
 * number.
 *
 * A chunk is computed and reported to the host (both queued on the device, and can be recorded); whole rows that are
 * wanted are fetched.  When the device has done all that, the rows are merged in rank order.  Ids travel to rank 0 in a
 * few bytes per row; whole rows are gathered only for those who want logits or a drawn token.  Chosen and drawn tokens
 * stay on the device for the next step.
 */
#ifndef DSKV_PARALLEL_SELECT_H
#define DSKV_PARALLEL_SELECT_H

#include "parallel/forward.h"

struct dskv_select_state;

size_t dskv_select_slot_bytes(const struct dskv_model *model, const struct dskv_device *device, int32_t n_ranks,
                              int32_t max_tokens);
/* turn: whose the places that steps report to are (struct dskv_turns).  DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_select_open(const struct dskv_forward_parts *parts, struct dskv_turn *turn,
                                struct dskv_select_state **state, struct dskv_error *error);
void dskv_select_close(struct dskv_select_state **state);

/* Rows of a chunk. */
int32_t dskv_select_chunk_rows(const struct dskv_select_state *state);
/* Tokens that rows of the last step chose or drew: device [max_tokens]. */
const int32_t *dskv_select_drawn(const struct dskv_select_state *state);

/* A chunk of a plan's rows, and all that its computing depends on. */
struct dskv_select_chunk {
    int32_t first, n_rows; /* rows [first, first + n_rows); n_rows may be rounded up, beyond the plan's */
    int32_t k;             /* largest top-k among them */
    int32_t is_whole;      /* somebody wants whole rows: logits, or a token that is drawn */
    int32_t is_drawn;      /* somebody wants a token that is drawn */
};
/* The chunk that begins with row `first`. */
struct dskv_select_chunk dskv_select_chunk_at(const struct dskv_select_state *state, const struct dskv_plan *plan,
                                              int32_t first);

/* The plan's sections in device memory. */
struct dskv_select_rows {
    const int32_t *tokens, *targets;
    const struct dskv_sampling *sampling;
};
/* h: the final norm of the last layer's activations [tokens, width]. */
enum dskv_exit dskv_select_compute(struct dskv_select_state *state, const struct dskv_select_chunk *chunk,
                                   const struct dskv_select_rows *rows, struct dskv_tensor h, struct dskv_error *error);

/* Tells the host of the chunk.  Every step reports, in the order of its chunks; one without rows reports an empty
 * chunk.
 */
void dskv_select_report(struct dskv_select_state *state, const struct dskv_select_chunk *chunk, int is_last);
/* Queues the copies of whole rows that are wanted: right after the chunk's report, before the next is computed. */
void dskv_select_fetch(struct dskv_select_state *state, const struct dskv_plan *plan,
                       const struct dskv_select_chunk *chunk);
/* When the device began and ended the last step that reported to a place. */
struct dskv_turn_times dskv_select_times(const struct dskv_select_state *state, int place);
/* When the device has done it all: results[used.n_rows] of the plan where rows are selected, else null.  place: 0 for
 * the first step, then 1, 0 ... */
const struct dskv_row_result *dskv_select_results(struct dskv_select_state *state, const struct dskv_plan *plan,
                                                  int place);

#endif
