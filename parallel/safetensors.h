/* Safetensors: the header of one file, checked before anything in it is believed.
 *
 * Owns the format: 8 bytes of length, a JSON header, then the tensors' bytes.  Knows no directory, model or rank.
 */
#ifndef DSKV_PARALLEL_SAFETENSORS_H
#define DSKV_PARALLEL_SAFETENSORS_H

#include "base/dtype.h"
#include "base/status.h"

#include <stdint.h>

#define DSKV_MAX_STORED_DIMS 8

/* A tensor as a file has it. */
struct dskv_stored {
    char *name;
    const char *dtype_name; /* the format's word: "F16" */
    enum dskv_dtype dtype;  /* DSKV_N_DTYPES when the daemon does not compute with it */
    int32_t n_dims;
    int64_t shape[DSKV_MAX_STORED_DIMS];
    uint64_t offset; /* from the file's start */
    uint64_t bytes;
    int32_t file; /* which file of the checkpoint; 0 from the functions here */
};

/* Reads an open file's header and checks it against the file's size: length, JSON, dtypes, shapes, products without
 * overflow, and offsets that cover the rest of the file from its first to its last byte without a hole or an overlap.
 * Gives tensors[*n] in the order of their bytes.  DSKV_EXIT_MODEL with a sentence that begins with `path`. */
enum dskv_exit dskv_safetensors_read(int fd, const char *path, uint64_t file_bytes, struct dskv_stored **tensors,
                                     size_t *n, struct dskv_error *error);
/* The same from a header's text and the number of bytes after it. */
enum dskv_exit dskv_safetensors_parse(const char *path, const char *header, size_t header_bytes, uint64_t data_bytes,
                                      struct dskv_stored **tensors, size_t *n, struct dskv_error *error);
/* Frees the array and its names, and nulls it. */
void dskv_stored_free(struct dskv_stored **tensors, size_t n);

/* pread until `bytes` are there: 1; 0 when the file ends before or cannot be read (errno 0: it ended). */
int dskv_pread_all(int fd, void *dst, size_t bytes, uint64_t offset);

#endif
