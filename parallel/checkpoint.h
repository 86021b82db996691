/* Checkpoint: the weight files of a model directory as one set of named tensors.
 *
 * Owns: which files there are (model.safetensors, or those of model.safetensors.index.json), the agreement of index,
 * files and tensors, and reading.  Knows nothing of models or ranks.  Reads with pread, never by a mapping: a file that
 * shrinks gives a sentence, not a signal.
 */
#ifndef DSKV_PARALLEL_CHECKPOINT_H
#define DSKV_PARALLEL_CHECKPOINT_H

#include "parallel/safetensors.h"

struct dskv_checkpoint;

/* Reads and checks all headers; every name is in one file only, index, files and tensors name the same set, and no
 * other
 * *.safetensors file lies beside them.  DSKV_EXIT_MODEL with a sentence that begins with the file. */
enum dskv_exit dskv_checkpoint_open(const char *directory, struct dskv_checkpoint **checkpoint,
                                    struct dskv_error *error);
void dskv_checkpoint_close(struct dskv_checkpoint **checkpoint);

/* Tensors in the order of their names (strcmp). */
size_t dskv_checkpoint_count(const struct dskv_checkpoint *checkpoint);
const struct dskv_stored *dskv_checkpoint_at(const struct dskv_checkpoint *checkpoint, size_t index);
/* Null when there is none. */
const struct dskv_stored *dskv_checkpoint_find(const struct dskv_checkpoint *checkpoint, const char *name);
/* The path of the file that a tensor lies in. */
const char *dskv_checkpoint_path(const struct dskv_checkpoint *checkpoint, const struct dskv_stored *tensor);

/* Reads bytes [first, first + bytes) of a tensor. */
enum dskv_exit dskv_checkpoint_read_bytes(struct dskv_checkpoint *checkpoint, const struct dskv_stored *tensor,
                                          uint64_t first, size_t bytes, void *dst, struct dskv_error *error);
/* Reads rows [row, row + n_rows) and columns [col, col + n_cols) of a matrix of a known dtype into a dense dst. */
enum dskv_exit dskv_checkpoint_read_matrix(struct dskv_checkpoint *checkpoint, const struct dskv_stored *tensor,
                                           int64_t row, int64_t n_rows, int64_t col, int64_t n_cols, void *dst,
                                           struct dskv_error *error);
/* The path that stands for the whole checkpoint in a sentence: its index, or its only file. */
const char *dskv_checkpoint_name(const struct dskv_checkpoint *checkpoint);

/* Bytes of tensors read so far. */
uint64_t dskv_checkpoint_n_read(const struct dskv_checkpoint *checkpoint);

#endif
