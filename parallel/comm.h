/* Comm: what ranks exchange inside a step, behind one table of operations.
 *
 * Every rank writes its part into its slot, then all meet: an exchange lets everybody read all slots, a sum adds them
 * in rank order (in f32, rounded once), so that the bits are one function of the parts, whatever the size.  All ranks
 * make the same calls in the same order.  Slots are device memory.  Knows ranks, rows and bytes; no model, no plan.
 */
#ifndef DSKV_PARALLEL_COMM_H
#define DSKV_PARALLEL_COMM_H

#include "kernels/ops.h"
#include "parallel/flag.h"

struct dskv_comm;
struct dskv_nccl;

struct dskv_comm_options {
    struct dskv_device *device;     /* outlives the comm */
    const struct dskv_peers *peers; /* outlives the comm */
    size_t slot_bytes;              /* the largest part */
    void *shared;                   /* dskv_comm_shared_bytes of zeroed memory that all ranks share; null at one rank */
    const char *name;               /* which implementation; null: the first that serves */
    struct dskv_nccl *nccl;         /* dskv_comm_open's own */
};

/* Bytes of shared memory that n_ranks need, a multiple of 64; 0 at one rank. */
size_t dskv_comm_shared_bytes(int32_t n_ranks, size_t slot_bytes);
/* Collective: brings up the first implementation that serves these ranks and devices, the same on all of them.  One
 * that cannot be brought up on some rank is given up on all, and logged with its reason; one that was asked for by name
 * fails with it.  DSKV_EXIT_MEMORY, DSKV_EXIT_DEVICE; the same code and sentence on all ranks. */
enum dskv_exit dskv_comm_open(const struct dskv_comm_options *options, struct dskv_comm **comm,
                              struct dskv_error *error);
void dskv_comm_close(struct dskv_comm **comm);
/* "self", "shm", "peer", "nccl", "staged". */
const char *dskv_comm_name(const struct dskv_comm *comm);
/* What connects the GPUs, or null: for measurements. */
struct dskv_nccl *dskv_comm_nccl_link(const struct dskv_comm *comm);

/* This rank's slot for the next exchange or sum, slot_bytes long, 64-byte aligned; its content is undefined. */
void *dskv_comm_slot(struct dskv_comm *comm);
/* Meets all ranks; the first `bytes` of slots[n_ranks] can be read until this rank writes into its next slot.
 * DSKV_EXIT_RANK_LOST. */
enum dskv_exit dskv_comm_exchange(struct dskv_comm *comm, size_t bytes, const void *const **slots,
                                  struct dskv_error *error);
/* The same for slots that hold [rows, cols] of dtype: *sum is their sum over ranks, under the same rule. */
enum dskv_exit dskv_comm_sum(struct dskv_comm *comm, int64_t rows, int64_t cols, enum dskv_dtype dtype,
                             struct dskv_tensor *sum, struct dskv_error *error);
/* What a sum is mostly for: p->residual.y's shape and dtype say what the slots hold, its data is not looked at;
 * residual.x += their sum (+ bias), norm.out = its norm, rounding where the three operations do. */
enum dskv_exit dskv_comm_add(struct dskv_comm *comm, const struct dskv_residual_norm *p, struct dskv_error *error);
/* True when all of the above is queued on the device as operations are, and nothing waits on the host: it can be
 * recorded, and errors show at the next wait. */
int dskv_comm_is_queued(const struct dskv_comm *comm);

/* ---- between comm.c and the implementations ----------------------------------------------------- */

struct dskv_comm_table {
    const char *name;
    int is_queued;
    int (*serves)(const struct dskv_comm_options *options);
    enum dskv_exit (*open)(const struct dskv_comm_options *options, void **state, struct dskv_error *error);
    void (*close)(void *state);
    void *(*slot)(void *state);
    enum dskv_exit (*exchange)(void *state, size_t bytes, const void *const **slots, struct dskv_error *error);
    enum dskv_exit (*sum)(void *state, int64_t rows, int64_t cols, enum dskv_dtype dtype, struct dskv_tensor *sum,
                          struct dskv_error *error);
    /* Null: the sum, then the operation. */
    enum dskv_exit (*add)(void *state, const struct dskv_residual_norm *p, struct dskv_error *error);
};
extern const struct dskv_comm_table dskv_comm_self; /* one rank */
extern const struct dskv_comm_table dskv_comm_shm;  /* several ranks of one host, devices whose memory is host memory */
extern const struct dskv_comm_table dskv_comm_peer; /* several GPUs that reach each other's memory */
extern const struct dskv_comm_table dskv_comm_nccl; /* several GPUs */
extern const struct dskv_comm_table dskv_comm_staged; /* several ranks of one host, any devices: through host memory */

#endif
