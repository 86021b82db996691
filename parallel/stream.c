#include "parallel/stream.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

/* What lies in the shared memory, followed by n_ranks answers to each and the payloads.  Commands take turns at the
 * places: one that is posted finds the answers to the last one of its place collected. */
struct shared {
    struct dskv_flag posted;                     /* the number of the last command */
    struct dskv_meeting done[DSKV_STREAM_DEPTH]; /* of all but rank 0, counted for each place by itself */
    _Alignas(DSKV_CACHE_LINE) struct dskv_command commands[DSKV_STREAM_DEPTH];
    /* A rank whose answer tells of a failure; 0: none.  Nothing is given after one. */
    _Alignas(DSKV_CACHE_LINE) _Atomic int32_t failed[DSKV_STREAM_DEPTH];
};

struct answer_line { /* no two ranks write one cache line */
    _Alignas(DSKV_CACHE_LINE) struct dskv_answer answer;
};

struct dskv_stream {
    const struct dskv_peers *peers;
    struct shared *shared;
    struct answer_line *lines; /* [DSKV_STREAM_DEPTH][n_ranks] */
    void *payload;
    uint32_t n_begun;                       /* commands that were posted or taken */
    uint32_t n_ended;                       /* of them collected or answered */
    uint32_t n_meetings[DSKV_STREAM_DEPTH]; /* that ended, of each place */
    struct dskv_answer *answers;            /* rank 0: copies, together */
};

static size_t head_bytes(int32_t n_ranks)
{
    return sizeof(struct shared) + DSKV_STREAM_DEPTH * (size_t)n_ranks * sizeof(struct answer_line);
}

size_t dskv_stream_bytes(int32_t n_ranks, size_t payload_bytes)
{
    return head_bytes(n_ranks) + dskv_whole_lines(payload_bytes);
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

static struct answer_line *lines_of(const struct dskv_stream *stream, uint32_t number)
{
    return stream->lines + (size_t)(number % DSKV_STREAM_DEPTH) * (size_t)stream->peers->n_ranks;
}

/* The place of the next command, with this rank's answer to it empty. */
static struct dskv_command *begin_command(struct dskv_stream *stream)
{
    DSKV_ASSERT(stream->n_begun - stream->n_ended < DSKV_STREAM_DEPTH, "%u commands, %u of them ended", stream->n_begun,
                stream->n_ended);
    uint32_t number = stream->n_begun++;
    memset(&lines_of(stream, number)[stream->peers->rank].answer, 0, sizeof(struct dskv_answer));
    return &stream->shared->commands[number % DSKV_STREAM_DEPTH];
}

/* The place of the oldest command under way, which ends now; *count: how many have ended there. */
static uint32_t end_command(struct dskv_stream *stream, uint32_t *count)
{
    DSKV_ASSERT(stream->n_ended != stream->n_begun, "all %u commands have ended", stream->n_begun);
    uint32_t place = stream->n_ended++ % DSKV_STREAM_DEPTH;
    *count = ++stream->n_meetings[place];
    return place;
}

void dskv_stream_post(struct dskv_stream *stream, const struct dskv_command *command)
{
    DSKV_ASSERT(stream->peers->rank == 0, "rank %d", (int)stream->peers->rank);
    *begin_command(stream) = *command;
    if (stream->peers->n_ranks > 1)
        dskv_flag_set(&stream->shared->posted, stream->n_begun);
}

struct dskv_answer *dskv_stream_collect(struct dskv_stream *stream, struct dskv_error *error)
{
    const struct dskv_peers *peers = stream->peers;
    const struct answer_line *lines = lines_of(stream, stream->n_ended);
    uint32_t count, place = end_command(stream, &count);
    if (peers->n_ranks > 1) {
        int lost = dskv_flag_wait(&stream->shared->done[place].complete, count, peers);
        if (lost >= 0) {
            dskv_peers_fail_lost(peers, lost, error);
            return NULL;
        }
    }
    for (int32_t r = 0; r < peers->n_ranks; r++)
        stream->answers[r] = lines[r].answer;
    return stream->answers;
}

const struct dskv_answer *dskv_stream_failure(const struct dskv_stream *stream, int32_t *rank)
{
    uint32_t place = stream->n_ended % DSKV_STREAM_DEPTH;
    *rank = atomic_load_explicit(&stream->shared->failed[place], memory_order_acquire);
    return *rank ? &lines_of(stream, stream->n_ended)[*rank].answer : NULL;
}

int dskv_stream_has_next(const struct dskv_stream *stream)
{
    return dskv_flag_reached(&stream->shared->posted, stream->n_begun + 1);
}

const struct dskv_command *dskv_stream_next(struct dskv_stream *stream)
{
    DSKV_ASSERT(stream->peers->rank > 0, "rank %d", (int)stream->peers->rank);
    if (dskv_flag_wait(&stream->shared->posted, stream->n_begun + 1, stream->peers) >= 0)
        return NULL;
    return begin_command(stream);
}

struct dskv_answer *dskv_stream_answer(struct dskv_stream *stream)
{
    DSKV_ASSERT(stream->n_ended != stream->n_begun, "all %u commands have ended", stream->n_begun);
    return &lines_of(stream, stream->n_ended)[stream->peers->rank].answer;
}

void dskv_stream_done(struct dskv_stream *stream)
{
    int is_failure = dskv_stream_answer(stream)->exit != 0;
    uint32_t count, place = end_command(stream, &count);
    if (is_failure)
        atomic_store_explicit(&stream->shared->failed[place], stream->peers->rank, memory_order_release);
    dskv_meeting_arrive(&stream->shared->done[place], count, (uint32_t)stream->peers->n_ranks - 1);
}
