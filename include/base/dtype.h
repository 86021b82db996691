/* Dtype: the types of tensor elements, on the wire, in files and in memory, and their conversion on the host. */
#ifndef DSKV_BASE_DTYPE_H
#define DSKV_BASE_DTYPE_H

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

#endif
