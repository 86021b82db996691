/* Requests: what is taken can be written, and read again to the same; nothing else happens. */
#include "frames_of.h"

/* Mostly the fuzzer's own changes; now and then a whole new request to begin from. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    if (seed % 64)
        return LLVMFuzzerMutate(data, size, max_size);
    struct dskv_request request;
    struct dskv_frames frames;
    make_request(&request, (enum dskv_op)(seed / 64 % DSKV_N_OPS), MAKE_SOME, seed);
    enum dskv_code code = dskv_request_encode(&request, &frames, NULL);
    DSKV_ASSERT(!code, "seed %u", seed);
    dskv_request_clear(&request);
    size_t made = bytes_of(&frames, data, max_size);
    return made ? made : LLVMFuzzerMutate(data, size, max_size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dskv_frames frames = frames_of(data, size);
    struct dskv_request request, again;
    struct dskv_error error = {0};
    enum dskv_code code = dskv_request_decode(&frames, &request, &error);
    DSKV_ASSERT(!frames.frames && !code == !error.code && (code == 0 || error.message[0]), "%s", dskv_code_name(code));
    if (code)
        return 0;
    code = dskv_request_encode(&request, &frames, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    code = dskv_request_decode(&frames, &again, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    const char *differs = compare_fields(&dskv_request_envelope, &request, &again);
    if (!differs)
        differs = compare_fields(dskv_request_table(request.op), &request, &again);
    DSKV_ASSERT(!differs, "%s", differs);
    dskv_request_clear(&request);
    dskv_request_clear(&again);
    return 0;
}
