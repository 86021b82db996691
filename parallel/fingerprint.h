/* Fingerprint: 128 bits that are equal for equal models.
 *
 * XXH3-128 over a canonical text of the model's shape (what decides the arithmetic: no end tokens, no paths) and then,
 * for every tensor of the checkpoint in the order of their names: name, dtype, shape, and its first and last 64 KiB
 * (all of it up to 128 KiB).  So neither the split over files nor the order inside them matters, and reading it costs
 * little at any size.
 */
#ifndef DSKV_PARALLEL_FINGERPRINT_H
#define DSKV_PARALLEL_FINGERPRINT_H

#include "parallel/checkpoint.h"
#include "parallel/model.h"

/* Fills model->fingerprint; checkpoint null: of the shape alone. */
enum dskv_exit dskv_fingerprint_of(struct dskv_model *model, struct dskv_checkpoint *checkpoint,
                                   struct dskv_error *error);

/* Where the rotary table depends on the longest sequence that is served, so does what keys mean: the fingerprint of a
 * model that is served takes that length in. */
void dskv_fingerprint_serve(struct dskv_model *model, int32_t max_model_len);

#endif
