/* Tensors: every tensor that a model needs, by its family's names, bound to where a checkpoint stores it.
 *
 * Owns the agreement of configuration and files: nothing is missing, nothing is left over, every shape and dtype fits.
 * Knows no rank: weights.c cuts.
 */
#ifndef DSKV_PARALLEL_TENSORS_H
#define DSKV_PARALLEL_TENSORS_H

#include "parallel/checkpoint.h"
#include "parallel/family.h"

struct dskv_bound_tensor {
    enum dskv_part part;
    int32_t layer;  /* -1: of no layer */
    int64_t n, k;   /* outputs and inputs; k == 0: a vector of n */
    int transposed; /* stored [k, n] */
    char *name;
    const struct dskv_stored *stored; /* the checkpoint's; null without one */
};

struct dskv_tensors {
    struct dskv_bound_tensor *list; /* [n]: those of no layer, then layer after layer */
    size_t n;
};

/* Lists the tensors and, with a checkpoint, finds and checks them.  A tied model whose files hold a head has that head
 * in the list, too (it must equal the embedding; weights.c compares).  DSKV_EXIT_MODEL with a sentence that names file
 * and tensor. */
enum dskv_exit dskv_tensors_open(const struct dskv_model *model, const struct dskv_checkpoint *checkpoint,
                                 struct dskv_tensors *tensors, struct dskv_error *error);
void dskv_tensors_close(struct dskv_tensors *tensors);
/* The dtype of all matrices; f32 when they differ or none is stored. */
enum dskv_dtype dskv_tensors_dtype(const struct dskv_tensors *tensors);

#endif
