/* Numerics id: a name for everything that fixes the bits of a result. */
#ifndef DSKV_PARALLEL_NUMERICS_H
#define DSKV_PARALLEL_NUMERICS_H

#include "parallel/engine.h"

/* id gets 32 hex digits; equal for equal model, version, device arithmetic, number of ranks and dtypes. */
void dskv_numerics_id(const struct dskv_engine_info *info, const char *device_numerics, char id[33]);

#endif
