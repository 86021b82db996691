/* Comm of several ranks of one host, for devices whose memory is host memory: slots lie in shared memory.
 *
 * Two sets of slots alternate.  A rank that writes its next part cannot disturb one that still reads the last: it would
 * need to be two meetings ahead, and nobody passes a meeting before all have arrived.
 *
 * A small sum is made by every rank for itself (one meeting).  A large one in two shots: rank r adds the r-th slice of
 * all parts into the first slot, they meet again, and everybody reads the whole there.  Each element is the same sum in
 * the same order either way.
 */
#include "parallel/comm.h"

#include "base/memory.h"

#include <stdlib.h>

#define ONE_SHOT_BYTES (16 << 10) /* of a part; where a second meeting costs more than the repeated additions */
#define SLICE_ALIGNMENT 64        /* elements: no two ranks write one cache line */

struct shm {
    struct dskv_device *device;
    const struct dskv_peers *peers;
    struct dskv_meeting *meeting;
    uint32_t n_meetings;
    uint32_t set; /* the set that dskv_comm_slot gives next */
    const void *slots[2][DSKV_MAX_RANKS];
    void *small_sum; /* ONE_SHOT_BYTES of this rank's own */
};

size_t dskv_comm_shared_bytes(int32_t n_ranks, size_t slot_bytes)
{
    return n_ranks == 1 ? 0 : sizeof(struct dskv_meeting) + 2 * (size_t)n_ranks * dskv_whole_lines(slot_bytes);
}

static int serves(const struct dskv_comm_options *options)
{
    return options->peers->n_ranks > 1 && dskv_device_is_host(options->device);
}

static enum dskv_exit shm_open_comm(const struct dskv_comm_options *options, void **state, struct dskv_error *error)
{
    void *small_sum = dskv_device_alloc(options->device, ONE_SHOT_BYTES);
    if (!small_sum)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %d bytes of partial sums", ONE_SHOT_BYTES);
    struct shm *shm = dskv_calloc(1, sizeof *shm);
    shm->device = options->device;
    shm->peers = options->peers;
    shm->meeting = options->shared;
    shm->small_sum = small_sum;
    char *next = (char *)(shm->meeting + 1);
    for (int set = 0; set < 2; set++)
        for (int32_t r = 0; r < shm->peers->n_ranks; r++, next += dskv_whole_lines(options->slot_bytes))
            shm->slots[set][r] = next;
    *state = shm;
    return DSKV_EXIT_OK;
}

static void shm_close(void *state)
{
    struct shm *shm = state;
    dskv_device_free(shm->device, shm->small_sum, ONE_SHOT_BYTES);
    free(shm);
}

static void *shm_slot(void *state)
{
    struct shm *shm = state;
    return (void *)shm->slots[shm->set][shm->peers->rank];
}

static enum dskv_exit meet(struct shm *shm, struct dskv_error *error)
{
    dskv_meeting_arrive(shm->meeting, ++shm->n_meetings, (uint32_t)shm->peers->n_ranks);
    int lost = dskv_flag_wait(&shm->meeting->complete, shm->n_meetings, shm->peers);
    return lost < 0 ? DSKV_EXIT_OK : dskv_peers_fail_lost(shm->peers, lost, error);
}

static enum dskv_exit shm_exchange(void *state, size_t bytes, const void *const **slots, struct dskv_error *error)
{
    (void)bytes; /* they lie where all can read them */
    struct shm *shm = state;
    *slots = shm->slots[shm->set];
    shm->set ^= 1;
    return meet(shm, error);
}

/* out = the sum of elements [first, first + n) of all slots. */
static void sum_slice(struct shm *shm, const void *const *slots, void *out, enum dskv_dtype dtype, int64_t first,
                      int64_t n)
{
    const void *partials[DSKV_MAX_RANKS];
    size_t offset = (size_t)first * dskv_dtype_bytes(dtype);
    for (int32_t r = 0; r < shm->peers->n_ranks; r++)
        partials[r] = (const char *)slots[r] + offset;
    struct dskv_sum sum = {partials, shm->peers->n_ranks, dskv_tensor((char *)out + offset, dtype, 1, n)};
    dskv_op_sum(shm->device, &sum);
}

static enum dskv_exit shm_sum(void *state, int64_t rows, int64_t cols, enum dskv_dtype dtype, struct dskv_tensor *sum,
                              struct dskv_error *error)
{
    struct shm *shm = state;
    const void *const *slots;
    int64_t n = rows * cols;
    enum dskv_exit code = shm_exchange(shm, 0, &slots, error);
    if (code)
        return code;
    if ((size_t)n * dskv_dtype_bytes(dtype) <= ONE_SHOT_BYTES) {
        *sum = dskv_tensor(shm->small_sum, dtype, rows, cols);
        sum_slice(shm, slots, shm->small_sum, dtype, 0, n);
        return DSKV_EXIT_OK;
    }
    int64_t units = (n + SLICE_ALIGNMENT - 1) / SLICE_ALIGNMENT, r = shm->peers->rank, n_ranks = shm->peers->n_ranks;
    int64_t first = units * r / n_ranks * SLICE_ALIGNMENT, end = units * (r + 1) / n_ranks * SLICE_ALIGNMENT;
    if (end > n)
        end = n;
    *sum = dskv_tensor((void *)slots[0], dtype, rows, cols);
    if (first < end)
        sum_slice(shm, slots, (void *)slots[0], dtype, first, end - first);
    return meet(shm, error);
}

const struct dskv_comm_table dskv_comm_shm = {
    .name = "shm",
    .serves = serves,
    .open = shm_open_comm,
    .close = shm_close,
    .slot = shm_slot,
    .exchange = shm_exchange,
    .sum = shm_sum,
};
