/* Events, as a client reads them: what is taken can be written, and read again to the same. */
#include "frames_of.h"

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    enum dskv_event_kind kind = (enum dskv_event_kind)(seed / 64 % DSKV_N_EVENT_KINDS);
    enum dskv_op op = (enum dskv_op)(seed / 512 % DSKV_N_OPS);
    if (seed % 64 || !dskv_event_table(kind, op))
        return LLVMFuzzerMutate(data, size, max_size);
    struct dskv_event event;
    struct dskv_frames frames;
    make_event(&event, kind, op, MAKE_SOME, seed);
    enum dskv_code code = dskv_event_encode(&event, &frames, NULL);
    DSKV_ASSERT(!code, "seed %u", seed);
    dskv_event_clear(&event);
    size_t made = bytes_of(&frames, data, max_size);
    return made ? made : LLVMFuzzerMutate(data, size, max_size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dskv_frames frames = frames_of(data, size);
    struct dskv_event event, again;
    struct dskv_error error = {0};
    enum dskv_code code = dskv_event_decode(&frames, &event, &error);
    DSKV_ASSERT(!frames.frames && !code == !error.code && (code == 0 || error.message[0]), "%s", dskv_code_name(code));
    if (code)
        return 0;
    code = dskv_event_encode(&event, &frames, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    code = dskv_event_decode(&frames, &again, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    const char *differs = compare_fields(dskv_event_table(event.kind, event.op), &event, &again);
    DSKV_ASSERT(!differs, "%s", differs);
    dskv_event_clear(&event);
    dskv_event_clear(&again);
    return 0;
}
