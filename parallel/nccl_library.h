/* NCCL (private): its functions as found at run time, between nccl_link.c and nccl_window.cu. */
#ifndef DSKV_PARALLEL_NCCL_LIBRARY_H
#define DSKV_PARALLEL_NCCL_LIBRARY_H

#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "parallel/nccl_link.h"

#define DSKV_NCCL_FUNCTIONS(X)                                                                                         \
    X(ncclGetVersion)                                                                                                  \
    X(ncclGetErrorString)                                                                                              \
    X(ncclGetUniqueId)                                                                                                 \
    X(ncclCommInitRank)                                                                                                \
    X(ncclCommDestroy)                                                                                                 \
    X(ncclCommAbort)                                                                                                   \
    X(ncclAllGather)                                                                                                   \
    X(ncclAllReduce)                                                                                                   \
    X(ncclMemAlloc)                                                                                                    \
    X(ncclMemFree)                                                                                                     \
    X(ncclCommWindowRegister)                                                                                          \
    X(ncclCommWindowDeregister)

struct dskv_nccl_library {
    void *handle;
#define DSKV_NCCL_FIELD(name) __typeof__(name) *name;
    DSKV_NCCL_FUNCTIONS(DSKV_NCCL_FIELD)
#undef DSKV_NCCL_FIELD
};
extern struct dskv_nccl_library dskv_nccl_library;

struct dskv_nccl {
    struct dskv_device *device;
    ncclComm_t comm;
    int rank, n_ranks;
    void *team; /* nccl_window.cu's own; null until a window was asked for, and where none can be had */
};

/* DSKV_EXIT_OK, or DSKV_EXIT_DEVICE with what NCCL says of it. */
enum dskv_exit dskv_nccl_result(ncclResult_t result, const char *what, struct dskv_error *error);

/* nccl_window.cu */
void dskv_nccl_team_close(struct dskv_nccl *nccl);

#ifdef __cplusplus
}
#endif
#endif
