#include "parallel/safetensors.h"

#include "base/limits.h"
#include "base/memory.h"
#include "parallel/json.h"
#include "parallel/path.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LENGTH_BYTES 8

static const struct {
    const char *name;
    int bits;
    enum dskv_dtype dtype;
} known_dtypes[] = {
    {"F32", 32, DSKV_F32},         {"F16", 16, DSKV_F16},         {"BF16", 16, DSKV_BF16},
    {"I32", 32, DSKV_I32},         {"F64", 64, DSKV_N_DTYPES},    {"I64", 64, DSKV_N_DTYPES},
    {"U64", 64, DSKV_N_DTYPES},    {"U32", 32, DSKV_N_DTYPES},    {"I16", 16, DSKV_N_DTYPES},
    {"U16", 16, DSKV_N_DTYPES},    {"I8", 8, DSKV_N_DTYPES},      {"U8", 8, DSKV_N_DTYPES},
    {"BOOL", 8, DSKV_N_DTYPES},    {"F8_E4M3", 8, DSKV_N_DTYPES}, {"F8_E5M2", 8, DSKV_N_DTYPES},
    {"F8_E8M0", 8, DSKV_N_DTYPES}, {"C64", 64, DSKV_N_DTYPES},    {"F4", 4, DSKV_N_DTYPES},
};

int dskv_pread_all(int fd, void *dst, size_t bytes, uint64_t offset)
{
    char *at = dst;
    while (bytes > 0) {
        ssize_t got = pread(fd, at, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            errno = got < 0 ? errno : 0;
            return 0;
        }
        at += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return 1;
}

void dskv_stored_free(struct dskv_stored **tensors, size_t n)
{
    for (size_t i = 0; *tensors && i < n; i++)
        free((*tensors)[i].name);
    free(*tensors);
    *tensors = NULL;
}

/* What is wrong with a tensor's entry, or null.  Names are bounded where they are printed: they come from the file. */
static const char *parse_shape(const struct dskv_json *shape, struct dskv_stored *tensor, int bits)
{
    if (dskv_json_kind(shape) != DSKV_JSON_ARRAY || dskv_json_count(shape) > DSKV_MAX_STORED_DIMS)
        return "has no shape of at most 8 dimensions";
    uint64_t total_bits = (uint64_t)bits;
    tensor->n_dims = (int32_t)dskv_json_count(shape);
    for (int32_t i = 0; i < tensor->n_dims; i++) {
        const struct dskv_json *dim = dskv_json_at(shape, (size_t)i);
        if (dskv_json_kind(dim) != DSKV_JSON_INTEGER || dskv_json_integer(dim) < 0)
            return "has a shape that is not made of whole numbers";
        tensor->shape[i] = dskv_json_integer(dim);
        if (__builtin_mul_overflow(total_bits, (uint64_t)tensor->shape[i], &total_bits))
            return "has a shape too large to be true";
    }
    if (total_bits % 8 != 0)
        return "does not end at a whole byte";
    tensor->bytes = total_bits / 8;
    return NULL;
}

static const char *parse_tensor(const struct dskv_json *entry, uint64_t data_bytes, struct dskv_stored *tensor)
{
    if (dskv_json_kind(entry) != DSKV_JSON_OBJECT || dskv_json_count(entry) != 3)
        return "is not described by dtype, shape and data_offsets";
    const struct dskv_json *dtype = dskv_json_get(entry, "dtype");
    const struct dskv_json *offsets = dskv_json_get(entry, "data_offsets");
    size_t known = 0, n_known = sizeof known_dtypes / sizeof known_dtypes[0];
    while (known < n_known && (dskv_json_kind(dtype) != DSKV_JSON_STRING ||
                               strcmp(dskv_json_string(dtype), known_dtypes[known].name) != 0))
        known++;
    if (known == n_known)
        return "has an unknown dtype";
    tensor->dtype_name = known_dtypes[known].name;
    tensor->dtype = known_dtypes[known].dtype;
    const char *wrong = parse_shape(dskv_json_get(entry, "shape"), tensor, known_dtypes[known].bits);
    if (wrong)
        return wrong;
    if (dskv_json_count(offsets) != 2 || dskv_json_kind(dskv_json_at(offsets, 0)) != DSKV_JSON_INTEGER ||
        dskv_json_kind(dskv_json_at(offsets, 1)) != DSKV_JSON_INTEGER)
        return "has no pair of data_offsets";
    int64_t begin = dskv_json_integer(dskv_json_at(offsets, 0)), end = dskv_json_integer(dskv_json_at(offsets, 1));
    if (begin < 0 || end < begin)
        return "has data_offsets that run backwards";
    if ((uint64_t)end > data_bytes)
        return "ends past the end of the file, which is truncated or damaged";
    if ((uint64_t)(end - begin) != tensor->bytes)
        return "has data_offsets that do not fit its dtype and shape";
    tensor->offset = (uint64_t)begin; /* from the data's start until the header's length is added */
    return NULL;
}

static int by_offset(const void *left, const void *right)
{
    const struct dskv_stored *a = left, *b = right;
    if (a->offset != b->offset)
        return a->offset < b->offset ? -1 : 1;
    return a->bytes < b->bytes ? -1 : a->bytes > b->bytes; /* empty tensors come before the one at the same place */
}

static enum dskv_exit check_cover(const char *path, const struct dskv_stored *tensors, size_t n, uint64_t data_bytes,
                                  struct dskv_error *error)
{
    uint64_t end = 0;
    for (size_t i = 0; i < n; i++) {
        if (tensors[i].offset != end)
            return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s: tensor %.60s %s the one before it", path,
                                  tensors[i].name, tensors[i].offset < end ? "overlaps" : "leaves a hole after");
        end += tensors[i].bytes;
    }
    if (end != data_bytes)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s has %llu bytes of tensors, but its header names %llu", path,
                              (unsigned long long)data_bytes, (unsigned long long)end);
    return DSKV_EXIT_OK;
}

static enum dskv_exit collect(const char *path, const struct dskv_json *root, size_t header_bytes, uint64_t data_bytes,
                              struct dskv_stored *tensors, size_t *n, struct dskv_error *error)
{
    for (void *member = dskv_json_begin(root); member; member = dskv_json_next(root, member)) {
        const char *name = dskv_json_member_key(member);
        if (strcmp(name, "__metadata__") == 0)
            continue;
        const char *wrong = parse_tensor(dskv_json_member_value(member), data_bytes, &tensors[*n]);
        if (wrong)
            return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s: tensor %.60s %s", path, name, wrong);
        tensors[(*n)++].name = dskv_strdup(name);
    }
    qsort(tensors, *n, sizeof *tensors, by_offset);
    enum dskv_exit code = check_cover(path, tensors, *n, data_bytes, error);
    for (size_t i = 0; i < *n; i++)
        tensors[i].offset += LENGTH_BYTES + header_bytes;
    return code;
}

enum dskv_exit dskv_safetensors_parse(const char *path, const char *header, size_t header_bytes, uint64_t data_bytes,
                                      struct dskv_stored **tensors, size_t *n, struct dskv_error *error)
{
    struct dskv_json *root = NULL;
    path = dskv_path_tail(path);
    if (header_bytes == 0 || header[0] != '{')
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s is not a safetensors file: its header is not a JSON object",
                              path);
    enum dskv_exit code = dskv_json_parse(path, header, header_bytes, &root, error);
    if (code != DSKV_EXIT_OK)
        return code;
    *n = 0;
    *tensors = dskv_calloc(dskv_json_count(root), sizeof **tensors);
    code = collect(path, root, header_bytes, data_bytes, *tensors, n, error);
    dskv_json_close(&root);
    if (code != DSKV_EXIT_OK)
        dskv_stored_free(tensors, *n);
    return code;
}

enum dskv_exit dskv_safetensors_read(int fd, const char *path, uint64_t file_bytes, struct dskv_stored **tensors,
                                     size_t *n, struct dskv_error *error)
{
    unsigned char length[LENGTH_BYTES];
    path = dskv_path_tail(path);
    if (file_bytes < LENGTH_BYTES)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s is not a safetensors file: it has %llu bytes", path,
                              (unsigned long long)file_bytes);
    if (!dskv_pread_all(fd, length, sizeof length, 0))
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s cannot be read: %s", path, strerror(errno));
    uint64_t header_bytes = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        header_bytes = header_bytes << 8 | length[i];
    if (header_bytes > DSKV_MAX_SAFETENSORS_HEADER_BYTES || header_bytes > file_bytes - LENGTH_BYTES)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL,
                              "%s is truncated or not a safetensors file: its header would have %llu bytes", path,
                              (unsigned long long)header_bytes);
    char *header = dskv_calloc(header_bytes + 1, 1);
    enum dskv_exit code;
    if (!dskv_pread_all(fd, header, header_bytes, LENGTH_BYTES))
        code = dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s cannot be read: %s", path,
                              errno ? strerror(errno) : "it ends too early");
    else
        code = dskv_safetensors_parse(path, header, header_bytes, file_bytes - LENGTH_BYTES - header_bytes, tensors, n,
                                      error);
    free(header);
    return code;
}
