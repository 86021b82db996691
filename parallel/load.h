/* Load: carries the rows of one rank's shard from the weight files to the device, a few MiB at a time.
 *
 * Owns the staging memory, the turning of matrices that are stored [inputs, outputs], the conversion to the dtype that
 * is held and the progress that is told.  Where a tensor's part goes is weights.c's choice.
 */
#ifndef DSKV_PARALLEL_LOAD_H
#define DSKV_PARALLEL_LOAD_H

#include "parallel/tensors.h"

/* A rectangle of one tensor and its place on the device. */
struct dskv_slice {
    struct dskv_weight *weight;                             /* a matrix's destination ... */
    float *vector;                                          /* ... or a vector's, on the device: f32 */
    int64_t dst;                                            /* first row of the weight, first element of the vector */
    int64_t first_output, n_outputs, first_input, n_inputs; /* n_inputs 0: a vector, or a table held whole as f32 */
};

struct dskv_load;

/* checkpoint null: dummy weights.  dtype: as matrices are held.  total_bytes: what will be read, for the progress. */
struct dskv_load *dskv_load_begin(struct dskv_device *device, struct dskv_checkpoint *checkpoint, enum dskv_dtype dtype,
                                  uint64_t total_bytes);
void dskv_load_end(struct dskv_load **load);
/* DSKV_EXIT_MODEL: a file fails, or holds a value that dtype cannot hold. */
enum dskv_exit dskv_load_slice(struct dskv_load *load, const struct dskv_bound_tensor *tensor,
                               const struct dskv_slice *slice, struct dskv_error *error);
/* DSKV_EXIT_MODEL when outputs [first, + n) of two matrices of one shape differ in the files. */
enum dskv_exit dskv_load_compare(struct dskv_load *load, const struct dskv_bound_tensor *left,
                                 const struct dskv_bound_tensor *right, int64_t first, int64_t n,
                                 struct dskv_error *error);

#endif
