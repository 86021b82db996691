#include "parallel/numerics.h"

#include "base/memory.h"
#include "base/version.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

void dskv_numerics_id(const struct dskv_engine_info *info, const char *device_numerics, char id[33])
{
    char *text = dskv_format("model %s\ndskvd %s\ndevice %s\nranks %d\nweights %s\nactivations %s\nkv %s\n",
                             info->model.fingerprint, DSKV_VERSION, device_numerics, (int)info->n_ranks,
                             dskv_dtype_name(info->weight_dtype), dskv_dtype_name(info->activation_dtype),
                             dskv_dtype_name(info->kv_dtype));
    XXH128_hash_t hash = XXH3_128bits(text, strlen(text));
    snprintf(id, 33, "%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
    free(text);
}
