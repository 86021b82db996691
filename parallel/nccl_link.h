/* NCCL link: the library that connects the ranks' GPUs.
 *
 * Owns NCCL, which is loaded and connected when several ranks have a GPU each; nccl.h is included by nccl_library.h
 * alone.  Gives two things: gathers that are queued on the devices, and memory that all ranks reach.  Sums are not the
 * library's: the order of its own depends on their size.  Knows no slot and no tensor.
 */
#ifndef DSKV_PARALLEL_NCCL_LINK_H
#define DSKV_PARALLEL_NCCL_LINK_H

#include "kernels/ops.h"

struct dskv_peers;
struct dskv_nccl;
struct dskv_nccl_window;

#ifdef DSKV_WITH_NCCL
/* Collective.  *nccl stays null where it has nothing to connect: one rank, ranks that share a GPU or compute on the
 * CPU; and where it fails.  DSKV_EXIT_DEVICE when the library is missing on some rank or cannot connect the GPUs; the
 * same code and sentence on all ranks. */
enum dskv_exit dskv_nccl_open(struct dskv_device *device, const struct dskv_peers *peers, struct dskv_nccl **nccl,
                              struct dskv_error *error);
/* Collective; null: nothing. */
void dskv_nccl_close(struct dskv_nccl **nccl);
#else
static inline enum dskv_exit dskv_nccl_open(struct dskv_device *device, const struct dskv_peers *peers,
                                            struct dskv_nccl **nccl, struct dskv_error *error)
{
    (void)device;
    (void)peers;
    (void)error;
    *nccl = NULL;
    return DSKV_EXIT_OK;
}
static inline void dskv_nccl_close(struct dskv_nccl **nccl)
{
    *nccl = NULL;
}
#endif

/* Queues: all[n_ranks][bytes] = every rank's `own`, device memory. */
enum dskv_exit dskv_nccl_all_gather(struct dskv_nccl *nccl, const void *own, void *all, size_t bytes,
                                    struct dskv_error *error);
/* The library's own sum, for measurements: no promise of bits.  sum may be own. */
enum dskv_exit dskv_nccl_measured_sum(struct dskv_nccl *nccl, const void *own, void *sum, int64_t n,
                                      enum dskv_dtype dtype, struct dskv_error *error);

/* Collective: as many bytes of zeroed memory on every rank, which this one reaches at pointers[n_ranks], at multiples
 * of 4096.  DSKV_EXIT_MEMORY, DSKV_EXIT_DEVICE (some GPU does not reach another's memory); the same on all ranks. */
enum dskv_exit dskv_nccl_window_open(struct dskv_nccl *nccl, size_t bytes, struct dskv_nccl_window **window,
                                     void **pointers, struct dskv_error *error);
/* Collective; null: nothing. */
void dskv_nccl_window_close(struct dskv_nccl *nccl, struct dskv_nccl_window **window);

#endif
