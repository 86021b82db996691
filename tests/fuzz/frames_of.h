/* The message that a fuzzer's bytes stand for: each frame is its size in two bytes, little-endian, and its bytes; a
 * size beyond the end is what is left.  The other way round, the seeds that the codec makes become such bytes. */
#ifndef DSKV_TESTS_FUZZ_FRAMES_OF_H
#define DSKV_TESTS_FUZZ_FRAMES_OF_H

#include "base/memory.h"
#include "ipc/diag.h"
#include "ipc/make_message.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static inline struct dskv_frames frames_of(const uint8_t *data, size_t size)
{
    struct dskv_frames frames = {0};
    for (size_t at = 0; at + 2 <= size && frames.n < 64;) {
        size_t n = data[at] | (size_t)data[at + 1] << 8;
        at += 2;
        n = n < size - at ? n : size - at;
        struct dskv_frame frame = {malloc(n ? n : 1), n}; /* exact, so that a read beyond it is seen */
        memcpy(frame.data, data + at, n);
        diag_add(&frames, frame);
        at += n;
    }
    return frames;
}

/* Takes the frames over.  Returns the number of bytes written, 0 when they do not fit. */
static inline size_t bytes_of(struct dskv_frames *frames, uint8_t *data, size_t max_size)
{
    size_t at = 0;
    for (int32_t i = 0; i < frames->n; i++) {
        size_t n = frames->frames[i].bytes;
        if (n > 0xffff || at + 2 + n > max_size) {
            at = 0;
            break;
        }
        data[at++] = n & 0xff;
        data[at++] = (uint8_t)(n >> 8);
        memcpy(data + at, frames->frames[i].data, n);
        at += n;
    }
    dskv_frames_clear(frames);
    return at;
}

#endif
