/* Any bytes as a safetensors file: refused with a sentence, or tensors that cover the file to its last byte. */
#include "parallel/safetensors.h"

#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    DSKV_ASSERT(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size, "no file");
    struct dskv_stored *tensors = NULL;
    size_t n = 0;
    struct dskv_error error = {0};
    if (dskv_safetensors_read(fd, "file", size, &tensors, &n, &error) != DSKV_EXIT_OK) {
        DSKV_ASSERT(error.message[0] == 'f' && !tensors, "no sentence, or tensors left");
        return 0;
    }
    uint64_t end = n ? tensors[0].offset : size;
    for (size_t i = 0; i < n; i++) {
        DSKV_ASSERT(tensors[i].offset == end, "a hole or an overlap at tensor %zu", i);
        end += tensors[i].bytes;
    }
    DSKV_ASSERT(end == size, "%llu of %zu bytes", (unsigned long long)end, size);
    dskv_stored_free(&tensors, n);
    return 0;
}
