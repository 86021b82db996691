/* Rotary: how config.json describes rotary positions, for the families that have them. */
#ifndef DSKV_PARALLEL_FAMILIES_ROTARY_H
#define DSKV_PARALLEL_FAMILIES_ROTARY_H

#include "parallel/family.h"

/* Fills positions, rope_theta, rope_scaling, rope_style and rotary_dim.  head_dim and max_context
 * (max_position_embeddings) are known; yarn, dynamic and longrope raise max_context to factor times the original
 * context. */
void dskv_rope_read(struct dskv_reader *reader, struct dskv_model *model);

#endif
