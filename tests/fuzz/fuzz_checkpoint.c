/* Any bytes as a safetensors file, or, when they begin with '{', as a header's text with its data after the last '}':
 * refused with a sentence, or tensors that cover the data to its last byte. */
#include "parallel/safetensors.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static enum dskv_exit read_file(const uint8_t *data, size_t size, struct dskv_stored **tensors, size_t *n,
                                struct dskv_error *error)
{
    static int fd = -1;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    DSKV_ASSERT(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size, "no file");
    return dskv_safetensors_read(fd, "file", size, tensors, n, error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *brace = size && data[0] == '{' ? memrchr(data, '}', size) : NULL;
    size_t header_bytes = brace ? (size_t)(brace + 1 - data) : 0, n = 0;
    uint64_t file_bytes = brace ? 8 + size : size;
    struct dskv_stored *tensors = NULL;
    struct dskv_error error = {0};
    enum dskv_exit code = brace ? dskv_safetensors_parse("file", (const char *)data, header_bytes, size - header_bytes,
                                                         &tensors, &n, &error)
                                : read_file(data, size, &tensors, &n, &error);
    if (code != DSKV_EXIT_OK) {
        DSKV_ASSERT(error.message[0] == 'f' && !tensors, "no sentence, or tensors left");
        return 0;
    }
    uint64_t end = n ? tensors[0].offset : file_bytes;
    for (size_t i = 0; i < n; i++) {
        DSKV_ASSERT(tensors[i].offset == end, "a hole or an overlap at tensor %zu", i);
        end += tensors[i].bytes;
    }
    DSKV_ASSERT(end == file_bytes, "%llu of %llu bytes", (unsigned long long)end, (unsigned long long)file_bytes);
    dskv_stored_free(&tensors, n);
    return 0;
}
