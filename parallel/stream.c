#include "parallel/stream.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

/* What lies in the shared memory, followed by n_ranks answers and the payloads. */
struct shared {
    struct dskv_flag posted;  /* the number of the last command */
    struct dskv_meeting done; /* of all but rank 0 */
    _Alignas(DSKV_CACHE_LINE) struct dskv_command command;
};

struct answer_line { /* no two ranks write one cache line */
    _Alignas(DSKV_CACHE_LINE) struct dskv_answer answer;
};

struct dskv_stream {
    const struct dskv_peers *peers;
    struct shared *shared;
    struct answer_line *lines;
    void *payload;
    uint32_t number;             /* of the command under way */
    struct dskv_answer *answers; /* rank 0: copies, together */
};

static size_t head_bytes(int32_t n_ranks)
{
    return sizeof(struct shared) + (size_t)n_ranks * sizeof(struct answer_line);
}

size_t dskv_stream_bytes(int32_t n_ranks, size_t payload_bytes)
{
    return head_bytes(n_ranks) + (payload_bytes + DSKV_CACHE_LINE - 1) / DSKV_CACHE_LINE * DSKV_CACHE_LINE;
}

struct dskv_stream *dskv_stream_open(void *memory, size_t payload_bytes, const struct dskv_peers *peers)
{
    DSKV_ASSERT((uintptr_t)memory % DSKV_CACHE_LINE == 0 && payload_bytes > 0, "memory %p, payload %zu", memory,
                payload_bytes);
    struct dskv_stream *stream = dskv_calloc(1, sizeof *stream);
    stream->peers = peers;
    stream->shared = memory;
    stream->lines = (struct answer_line *)(stream->shared + 1);
    stream->payload = (char *)memory + head_bytes(peers->n_ranks);
    stream->answers = dskv_calloc((size_t)peers->n_ranks, sizeof *stream->answers);
    return stream;
}

void dskv_stream_close(struct dskv_stream **stream)
{
    if (!*stream)
        return;
    free((*stream)->answers);
    free(*stream);
    *stream = NULL;
}

void *dskv_stream_payload(const struct dskv_stream *stream)
{
    return stream->payload;
}

void dskv_stream_post(struct dskv_stream *stream, const struct dskv_command *command)
{
    DSKV_ASSERT(stream->peers->rank == 0, "rank %d", (int)stream->peers->rank);
    stream->number++;
    stream->shared->command = *command;
    memset(&stream->lines[0].answer, 0, sizeof stream->lines[0].answer);
    if (stream->peers->n_ranks > 1)
        dskv_flag_set(&stream->shared->posted, stream->number);
}

struct dskv_answer *dskv_stream_collect(struct dskv_stream *stream, struct dskv_error *error)
{
    const struct dskv_peers *peers = stream->peers;
    if (peers->n_ranks > 1) {
        int lost = dskv_flag_wait(&stream->shared->done.complete, stream->number, peers);
        if (lost >= 0) {
            dskv_fail_exit(error, DSKV_EXIT_RANK_LOST, "rank %d is gone", lost);
            return NULL;
        }
    }
    for (int32_t r = 0; r < peers->n_ranks; r++)
        stream->answers[r] = stream->lines[r].answer;
    return stream->answers;
}

const struct dskv_command *dskv_stream_next(struct dskv_stream *stream)
{
    DSKV_ASSERT(stream->peers->rank > 0, "rank %d", (int)stream->peers->rank);
    if (dskv_flag_wait(&stream->shared->posted, ++stream->number, stream->peers) >= 0)
        return NULL;
    struct dskv_answer *answer = dskv_stream_answer(stream);
    memset(answer, 0, sizeof *answer);
    return &stream->shared->command;
}

struct dskv_answer *dskv_stream_answer(struct dskv_stream *stream)
{
    return &stream->lines[stream->peers->rank].answer;
}

void dskv_stream_done(struct dskv_stream *stream)
{
    dskv_meeting_arrive(&stream->shared->done, stream->number, (uint32_t)stream->peers->n_ranks - 1);
}
