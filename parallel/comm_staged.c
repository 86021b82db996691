/* Comm of several ranks of one host for devices with memory of their own, through host memory that all ranks share.
 *
 * A rank copies its slot to the shared segment, all meet, and each copies everybody's to its device and adds them there
 * in rank order.  It asks nothing of the devices, so that ranks may even share one; where peers can reach each other's
 * memory a faster comm gives the same bits.
 *
 * Two sets of shared slots alternate, as in comm_shm.c.  On the device one set is enough: copies and operations are in
 * order.
 */
#include "parallel/comm.h"

#include "base/memory.h"

#include <stdlib.h>

struct staged {
    struct dskv_device *device;
    const struct dskv_peers *peers;
    struct dskv_meeting *meeting;
    uint32_t n_meetings;
    uint32_t set;
    size_t stride;
    char *shared;                      /* [2 sets][n_ranks] slots of stride bytes */
    void *memory;                      /* device [n_ranks] slots; this rank's is what it writes to */
    const void *slots[DSKV_MAX_RANKS]; /* into memory */
};

static int serves(const struct dskv_comm_options *options)
{
    return options->peers->n_ranks > 1;
}

static enum dskv_exit staged_open(const struct dskv_comm_options *options, void **state, struct dskv_error *error)
{
    size_t stride = dskv_whole_lines(options->slot_bytes);
    size_t n_ranks = (size_t)options->peers->n_ranks;
    void *memory = dskv_device_alloc(options->device, n_ranks * stride);
    if (!memory)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes of partial sums", n_ranks * stride);
    struct staged *staged = dskv_calloc(1, sizeof *staged);
    *staged = (struct staged){.device = options->device,
                              .peers = options->peers,
                              .meeting = options->shared,
                              .stride = stride,
                              .shared = (char *)options->shared + sizeof(struct dskv_meeting),
                              .memory = memory};
    for (size_t r = 0; r < n_ranks; r++)
        staged->slots[r] = (char *)memory + r * stride;
    *state = staged;
    return DSKV_EXIT_OK;
}

static void staged_close(void *state)
{
    struct staged *staged = state;
    dskv_device_free(staged->device, staged->memory, (size_t)staged->peers->n_ranks * staged->stride);
    free(staged);
}

static void *staged_slot(void *state)
{
    struct staged *staged = state;
    return (char *)staged->memory + (size_t)staged->peers->rank * staged->stride;
}

/* Brings the first `bytes` of every rank's slot to this device. */
static enum dskv_exit bring(struct staged *staged, size_t bytes, struct dskv_error *error)
{
    int32_t n_ranks = staged->peers->n_ranks, self = staged->peers->rank;
    char *set = staged->shared + (size_t)staged->set * (size_t)n_ranks * staged->stride;
    staged->set ^= 1;
    dskv_device_download(staged->device, set + (size_t)self * staged->stride, staged->slots[self], bytes);
    dskv_meeting_arrive(staged->meeting, ++staged->n_meetings, (uint32_t)n_ranks);
    int lost = dskv_flag_wait(&staged->meeting->complete, staged->n_meetings, staged->peers);
    if (lost >= 0)
        return dskv_peers_fail_lost(staged->peers, lost, error);
    for (int32_t r = 0; r < n_ranks; r++)
        if (r != self)
            dskv_device_upload(staged->device, (void *)(uintptr_t)staged->slots[r], set + (size_t)r * staged->stride,
                               bytes);
    return DSKV_EXIT_OK;
}

static enum dskv_exit staged_exchange(void *state, size_t bytes, const void *const **slots, struct dskv_error *error)
{
    struct staged *staged = state;
    *slots = staged->slots;
    return bring(staged, bytes, error);
}

static enum dskv_exit staged_sum(void *state, int64_t rows, int64_t cols, enum dskv_dtype dtype,
                                 struct dskv_tensor *sum, struct dskv_error *error)
{
    struct staged *staged = state;
    enum dskv_exit code = bring(staged, (size_t)rows * (size_t)cols * dskv_dtype_bytes(dtype), error);
    if (code)
        return code;
    *sum = dskv_tensor(staged->memory, dtype, rows,
                       cols); /* over rank 0's part: each element is read before it is written */
    struct dskv_sum add = {staged->slots, staged->peers->n_ranks, *sum};
    dskv_op_sum(staged->device, &add);
    return DSKV_EXIT_OK;
}

const struct dskv_comm_table dskv_comm_staged = {
    .name = "staged",
    .serves = serves,
    .open = staged_open,
    .close = staged_close,
    .slot = staged_slot,
    .exchange = staged_exchange,
    .sum = staged_sum,
};
