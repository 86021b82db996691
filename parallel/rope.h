/* Rope: the rotary table, made once on the host, the same for every device and rank.
 *
 * Frequencies and angles are rounded to f32 as the models' own training code has them (at position 2000 an exact angle
 * would differ from theirs by 1e-4); cosine and sine of those angles are taken in double and rounded once.
 */
#ifndef DSKV_PARALLEL_ROPE_H
#define DSKV_PARALLEL_ROPE_H

#include "parallel/model.h"

/* Rows of positions first, first + 1, ... of a table for sequences of at most max_model_len: cosines, sines
 * [n, rotary_dim / 2]. */
void dskv_rope_fill(const struct dskv_model *model, int32_t max_model_len, int32_t first, int32_t n, float *cosines,
                    float *sines);

#endif
