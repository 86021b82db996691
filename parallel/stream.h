/* Stream: the ordered commands that rank 0 gives to all ranks of a host, and their answers.
 *
 * Two commands may be under way: rank 0 posts one, may post the next, and collects the others' answers in order; every
 * other rank takes them in order and answers in order, and may take one before it has answered the last.  Payloads
 * (plans, tables, pieces of KV) lie in one region that rank 0 writes and all read, named by offset.  A waiting rank
 * spins for a moment and then sleeps.  Knows what a command costs to deliver, not what it means.
 */
#ifndef DSKV_PARALLEL_STREAM_H
#define DSKV_PARALLEL_STREAM_H

#include "base/status.h"
#include "parallel/flag.h"

struct dskv_command {
    int32_t kind;
    uint64_t offset, bytes; /* of its payload */
};

#define DSKV_ANSWER_BYTES 128

struct dskv_answer {
    int32_t exit; /* enum dskv_exit */
    char message[sizeof((struct dskv_error *)0)->message];
    _Alignas(8) uint8_t data[DSKV_ANSWER_BYTES]; /* what the command asked for */
};

/* Commands that are posted and not collected, at most. */
#define DSKV_STREAM_DEPTH 2

struct dskv_stream;

/* Bytes of shared memory that a stream needs, a multiple of 64. */
size_t dskv_stream_bytes(int32_t n_ranks, size_t payload_bytes);
/* `memory` is shared by all ranks, zeroed, 64-byte aligned, and outlives the stream; peers too. */
struct dskv_stream *dskv_stream_open(void *memory, size_t payload_bytes, const struct dskv_peers *peers);
void dskv_stream_close(struct dskv_stream **stream);
void *dskv_stream_payload(const struct dskv_stream *stream);

/* Rank 0: publishes the command and its payload. */
void dskv_stream_post(struct dskv_stream *stream, const struct dskv_command *command);
/* Rank 0: waits until all others have answered the oldest command that is not collected; its answers[n_ranks] (entry 0
 * is rank 0's own to use), valid until the next collect, or null with DSKV_EXIT_RANK_LOST's sentence in error. */
struct dskv_answer *dskv_stream_collect(struct dskv_stream *stream, struct dskv_error *error);

/* Rank 0, without waiting: an answer to that command that tells of a failure, and whose; null when none has come. */
const struct dskv_answer *dskv_stream_failure(const struct dskv_stream *stream, int32_t *rank);

/* Other ranks, without waiting: whether the next command is there. */
int dskv_stream_has_next(const struct dskv_stream *stream);
/* Other ranks: the next command, valid until it is answered, or null when a rank was lost. */
const struct dskv_command *dskv_stream_next(struct dskv_stream *stream);
/* This rank's answer, zeroed, to the oldest command that was taken and not answered (rank 0: posted and not collected);
 * then tells rank 0. */
struct dskv_answer *dskv_stream_answer(struct dskv_stream *stream);
void dskv_stream_done(struct dskv_stream *stream);

#endif
