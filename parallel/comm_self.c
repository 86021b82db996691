/* Comm of one rank: its part is the sum. */
#include "parallel/comm.h"

#include "base/memory.h"

#include <stdlib.h>

struct self {
    struct dskv_device *device;
    void *slot;
    size_t slot_bytes;
    const void *slots[1];
};

static int serves(const struct dskv_comm_options *options)
{
    return options->peers->n_ranks == 1;
}

static enum dskv_exit self_open(const struct dskv_comm_options *options, void **state, struct dskv_error *error)
{
    void *slot = dskv_device_alloc(options->device, options->slot_bytes);
    if (!slot)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes of partial sums", options->slot_bytes);
    struct self *self = dskv_calloc(1, sizeof *self);
    *self = (struct self){options->device, slot, options->slot_bytes, {slot}};
    *state = self;
    return DSKV_EXIT_OK;
}

static void self_close(void *state)
{
    struct self *self = state;
    dskv_device_free(self->device, self->slot, self->slot_bytes);
    free(self);
}

static void *self_slot(void *state)
{
    return ((struct self *)state)->slot;
}

static enum dskv_exit self_exchange(void *state, size_t bytes, const void *const **slots, struct dskv_error *error)
{
    (void)bytes;
    (void)error;
    *slots = ((struct self *)state)->slots;
    return DSKV_EXIT_OK;
}

static enum dskv_exit self_sum(void *state, int64_t rows, int64_t cols, enum dskv_dtype dtype, struct dskv_tensor *sum,
                               struct dskv_error *error)
{
    (void)error;
    *sum = dskv_tensor(((struct self *)state)->slot, dtype, rows, cols);
    return DSKV_EXIT_OK;
}

const struct dskv_comm_table dskv_comm_self = {
    .name = "self",
    .is_queued = 1,
    .serves = serves,
    .open = self_open,
    .close = self_close,
    .slot = self_slot,
    .exchange = self_exchange,
    .sum = self_sum,
};
