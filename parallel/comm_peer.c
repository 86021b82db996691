/* Comm of several ranks whose GPUs reach each other's memory: the device's own exchanges do all of it.
 *
 * A region holds the slot, what came of the others, and the device's boxes; all ranks' regions are one window.
 * Nothing waits on the host: a rank that is gone shows as a device that does not finish, which whoever waits for it
 * looks after. */
#include "parallel/comm.h"

#include "base/memory.h"
#include "parallel/nccl_link.h"

#include <stdlib.h>

struct peer {
    struct dskv_device *device;
    struct dskv_nccl *nccl;
    struct dskv_nccl_window *window;
    struct dskv_exchange exchange;
    const void *parts[DSKV_MAX_PEERS];
};

static size_t slot_stride(const struct dskv_comm_options *options)
{
    return (options->slot_bytes + 255) / 256 * 256;
}

static int serves(const struct dskv_comm_options *options)
{
    int32_t n = options->peers->n_ranks;
    return options->nccl && n <= DSKV_MAX_PEERS &&
           dskv_exchange_region_bytes(options->device, n, slot_stride(options)) > 0;
}

static enum dskv_exit peer_open(const struct dskv_comm_options *options, void **state, struct dskv_error *error)
{
    struct peer *peer = dskv_calloc(1, sizeof *peer);
    *peer = (struct peer){
        .device = options->device,
        .nccl = options->nccl,
        .exchange = {.n = options->peers->n_ranks, .self = options->peers->rank, .slot_bytes = slot_stride(options)}};
    size_t bytes = dskv_exchange_region_bytes(options->device, peer->exchange.n, peer->exchange.slot_bytes);
    enum dskv_exit code = dskv_nccl_window_open(options->nccl, bytes, &peer->window, peer->exchange.regions, error);
    if (code) {
        free(peer);
        return code;
    }
    for (int32_t i = 0; i < peer->exchange.n; i++)
        peer->parts[i] = dskv_exchange_part(&peer->exchange, i);
    *state = peer;
    return DSKV_EXIT_OK;
}

static void peer_close(void *state)
{
    struct peer *peer = state;
    dskv_device_sync(peer->device, NULL); /* a failed device has been told of elsewhere */
    dskv_nccl_window_close(peer->nccl, &peer->window);
    free(peer);
}

static void *peer_slot(void *state)
{
    return dskv_exchange_slot(&((struct peer *)state)->exchange);
}

static enum dskv_exit peer_exchange(void *state, size_t bytes, const void *const **slots, struct dskv_error *error)
{
    struct peer *peer = state;
    struct dskv_exchange_gather p = {&peer->exchange, bytes};
    (void)error;
    dskv_op_exchange_gather(peer->device, &p);
    *slots = peer->parts;
    return DSKV_EXIT_OK;
}

static enum dskv_exit peer_sum(void *state, int64_t rows, int64_t cols, enum dskv_dtype dtype, struct dskv_tensor *sum,
                               struct dskv_error *error)
{
    struct peer *peer = state;
    (void)error;
    *sum = dskv_tensor(dskv_exchange_sum(&peer->exchange), dtype, rows, cols);
    struct dskv_exchange_add p = {&peer->exchange, *sum};
    dskv_op_exchange_add(peer->device, &p);
    return DSKV_EXIT_OK;
}

static enum dskv_exit peer_add(void *state, const struct dskv_residual_norm *then, struct dskv_error *error)
{
    struct peer *peer = state;
    struct dskv_exchange_residual_norm p = {&peer->exchange, *then};
    (void)error;
    p.then.residual.y.data = dskv_exchange_sum(&peer->exchange);
    dskv_op_exchange_residual_norm(peer->device, &p);
    return DSKV_EXIT_OK;
}

const struct dskv_comm_table dskv_comm_peer = {
    .name = "peer",
    .is_queued = 1,
    .serves = serves,
    .open = peer_open,
    .close = peer_close,
    .slot = peer_slot,
    .exchange = peer_exchange,
    .sum = peer_sum,
    .add = peer_add,
};
