/* Select: from hidden states to the rows that a step wants: final norm, head, and what the vocabulary's shards say of
 * each row, merged in rank order.  Works through the rows in chunks, so that its memory does not grow with their
 * number.
 *
 * Ids travel to rank 0 in a few bytes per row; whole rows are gathered only for those who want logits or a drawn token.
 */
#ifndef DSKV_PARALLEL_SELECT_H
#define DSKV_PARALLEL_SELECT_H

#include "parallel/forward.h"

struct dskv_select_state;

size_t dskv_select_slot_bytes(const struct dskv_model *model, int32_t n_ranks, int32_t max_tokens);
/* DSKV_EXIT_MEMORY. */
enum dskv_exit dskv_select_open(const struct dskv_forward_parts *parts, struct dskv_select_state **state,
                                struct dskv_error *error);
void dskv_select_close(struct dskv_select_state **state);

/* x: the last layer's activations [used.n_tokens, width]; row_tokens and row_targets: the plan's, in device memory. */
enum dskv_exit dskv_select_rows(struct dskv_select_state *state, const struct dskv_plan *plan,
                                const int32_t *row_tokens, const int32_t *row_targets, struct dskv_tensor x,
                                const struct dskv_row_result **results, struct dskv_error *error);

#endif
