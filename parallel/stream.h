/* Stream: the ordered commands that rank 0 gives to all ranks of a host, and their answers.
 *
 * One command is under way at a time: rank 0 posts it, executes it itself, and collects the others' answers.  Payloads
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

struct dskv_stream;

/* Bytes of shared memory that a stream needs, a multiple of 64. */
size_t dskv_stream_bytes(int32_t n_ranks, size_t payload_bytes);
/* `memory` is shared by all ranks, zeroed, 64-byte aligned, and outlives the stream; peers too. */
struct dskv_stream *dskv_stream_open(void *memory, size_t payload_bytes, const struct dskv_peers *peers);
void dskv_stream_close(struct dskv_stream **stream);
void *dskv_stream_payload(const struct dskv_stream *stream);

/* Rank 0: publishes the command and its payload. */
void dskv_stream_post(struct dskv_stream *stream, const struct dskv_command *command);
/* Rank 0: waits until all others have answered; answers[n_ranks] of the command (entry 0 is rank 0's own to use), or
 * null with DSKV_EXIT_RANK_LOST's sentence in error. */
struct dskv_answer *dskv_stream_collect(struct dskv_stream *stream, struct dskv_error *error);

/* Other ranks: the next command, or null when a rank was lost. */
const struct dskv_command *dskv_stream_next(struct dskv_stream *stream);
/* This rank's answer to the command under way, zeroed; then tells rank 0. */
struct dskv_answer *dskv_stream_answer(struct dskv_stream *stream);
void dskv_stream_done(struct dskv_stream *stream);

#endif
