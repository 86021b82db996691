/* Tensor: a view of rows in device memory.
 *
 * A tensor owns nothing and knows nothing of ranks or requests.  All sizes are in elements unless they end in _bytes.
 */
#ifndef DSKV_KERNELS_TENSOR_H
#define DSKV_KERNELS_TENSOR_H

#include "base/dtype.h"

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
#endif
