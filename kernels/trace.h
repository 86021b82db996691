/* Trace: one line per operation with a checksum of what it wrote, so that two devices, or one rank and four, can be
 * compared to the first operation that differs. */
#ifndef DSKV_KERNELS_TRACE_H
#define DSKV_KERNELS_TRACE_H

#include "kernels/device.h"

/* Waits for the device and prints the operation, the tensor's shape and a hash of its elements on standard error. */
void dskv_trace_tensor(struct dskv_device *device, const char *operation, const struct dskv_tensor *t);
/* The same for plain device memory. */
void dskv_trace_bytes(struct dskv_device *device, const char *operation, const void *data, size_t bytes);

#endif
