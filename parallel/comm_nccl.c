/* Comm of several ranks with a GPU each that do not all reach each other's memory: NCCL gathers the parts, by whatever
 * way there is, and each rank adds them in rank order. */
#include "parallel/comm.h"

#include "base/memory.h"
#include "parallel/nccl_link.h"

#include <stdlib.h>

struct gathered {
    struct dskv_device *device;
    struct dskv_nccl *nccl;
    int32_t n_ranks;
    size_t stride;                     /* of a slot */
    char *memory;                      /* device: this rank's slot, then everybody's part of the last exchange */
    const void *slots[DSKV_MAX_RANKS]; /* into it */
};

static int serves(const struct dskv_comm_options *options)
{
    return options->nccl != NULL;
}

static size_t memory_bytes(const struct gathered *gathered)
{
    return (size_t)(1 + gathered->n_ranks) * gathered->stride;
}

static enum dskv_exit gathered_open(const struct dskv_comm_options *options, void **state, struct dskv_error *error)
{
    struct gathered *gathered = dskv_calloc(1, sizeof *gathered);
    *gathered = (struct gathered){.device = options->device,
                                  .nccl = options->nccl,
                                  .n_ranks = options->peers->n_ranks,
                                  .stride = dskv_whole_lines(options->slot_bytes)};
    gathered->memory = dskv_device_alloc(options->device, memory_bytes(gathered));
    if (!gathered->memory) {
        enum dskv_exit code =
            dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes of partial sums", memory_bytes(gathered));
        free(gathered);
        return code;
    }
    *state = gathered;
    return DSKV_EXIT_OK;
}

static void gathered_close(void *state)
{
    struct gathered *gathered = state;
    dskv_device_sync(gathered->device, NULL); /* a failed device has been told of elsewhere */
    dskv_device_free(gathered->device, gathered->memory, memory_bytes(gathered));
    free(gathered);
}

static void *gathered_slot(void *state)
{
    return ((struct gathered *)state)->memory;
}

static enum dskv_exit gathered_exchange(void *state, size_t bytes, const void *const **slots, struct dskv_error *error)
{
    struct gathered *gathered = state;
    bytes = dskv_whole_lines(bytes); /* parts lie one after the other */
    for (int32_t r = 0; r < gathered->n_ranks; r++)
        gathered->slots[r] = gathered->memory + gathered->stride + (size_t)r * bytes;
    *slots = gathered->slots;
    return dskv_nccl_all_gather(gathered->nccl, gathered->memory, gathered->memory + gathered->stride, bytes, error);
}

static enum dskv_exit gathered_sum(void *state, int64_t rows, int64_t cols, enum dskv_dtype dtype,
                                   struct dskv_tensor *sum, struct dskv_error *error)
{
    struct gathered *gathered = state;
    const void *const *slots;
    enum dskv_exit code =
        gathered_exchange(state, (size_t)rows * (size_t)cols * dskv_dtype_bytes(dtype), &slots, error);
    if (code)
        return code;
    *sum = dskv_tensor((void *)(uintptr_t)slots[0], dtype, rows, cols); /* each element is read before it is written */
    struct dskv_sum add = {slots, gathered->n_ranks, *sum};
    dskv_op_sum(gathered->device, &add);
    return DSKV_EXIT_OK;
}

const struct dskv_comm_table dskv_comm_nccl = {
    .name = "nccl",
    .is_queued = 1,
    .serves = serves,
    .open = gathered_open,
    .close = gathered_close,
    .slot = gathered_slot,
    .exchange = gathered_exchange,
    .sum = gathered_sum,
};
