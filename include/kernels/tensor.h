/* Tensor: a view of rows in device memory, and the types of its elements.
 *
 * A tensor owns nothing and knows nothing of ranks or requests.  All sizes are in elements unless they end in _bytes.
 */
#ifndef DSKV_KERNELS_TENSOR_H
#define DSKV_KERNELS_TENSOR_H

#include <stddef.h>
#include <stdint.h>

enum dskv_dtype { DSKV_F32, DSKV_F16, DSKV_BF16, DSKV_I32, DSKV_N_DTYPES };

/* "f32", "f16", "bf16", "i32". */
const char *dskv_dtype_name(enum dskv_dtype dtype);
/* DSKV_N_DTYPES when there is no such name. */
enum dskv_dtype dskv_dtype_from_name(const char *name);
size_t dskv_dtype_bytes(enum dskv_dtype dtype);

/* Host conversions of n elements, to nearest, ties to even; src and dst may have any alignment and must not overlap.
 * f32, f16 and bf16 only.  Returns the index of the first result that is not finite, or n. */
size_t dskv_convert(void *dst, enum dskv_dtype dst_dtype, const void *src, enum dskv_dtype src_dtype, size_t n);

/* [rows, cols], row-major; stride >= cols is the distance of two rows.  rows or cols may be 0. */
struct dskv_tensor {
    void *data;
    enum dskv_dtype dtype;
    int64_t rows, cols, stride;
};

/* A view with stride == cols. */
static inline struct dskv_tensor dskv_tensor(void *data, enum dskv_dtype dtype, int64_t rows, int64_t cols)
{
    struct dskv_tensor tensor = {data, dtype, rows, cols, cols};
    return tensor;
}
/* Columns [first, first + cols) of a view. */
static inline struct dskv_tensor dskv_tensor_cols(struct dskv_tensor t, int64_t first, int64_t cols)
{
    t.data = (char *)t.data + (size_t)first * dskv_dtype_bytes(t.dtype);
    t.cols = cols;
    return t;
}
/* The first rows of a view. */
static inline struct dskv_tensor dskv_tensor_head(struct dskv_tensor t, int64_t rows)
{
    t.rows = rows;
    return t;
}

#endif
