/* NCCL link: finds the library, connects the GPUs by the ranks' own job, queues gathers. */
#include "parallel/nccl_library.h"

#include "base/memory.h"
#include "parallel/engine.h"
#include "parallel/flag.h"
#include "parallel/job.h"

#include <dlfcn.h>
#include <stdlib.h>

/* Loaded where there is something to connect, so that a host without the library runs the same program. */
struct dskv_nccl_library dskv_nccl_library;

static enum dskv_exit load_library(struct dskv_error *error)
{
    struct dskv_nccl_library *library = &dskv_nccl_library;
    if (library->handle)
        return DSKV_EXIT_OK;
    /* Multicast between GPUs stays off: it sums in an order of its own. */
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    void *handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "NCCL cannot be loaded: %s", dlerror());
#define LOAD(name)                                                                                                     \
    if (!(library->name = (__typeof__(name) *)dlsym(handle, #name)))                                                   \
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "libnccl.so.2 has no " #name);
    DSKV_NCCL_FUNCTIONS(LOAD)
#undef LOAD
    library->handle = handle;
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_nccl_result(ncclResult_t result, const char *what, struct dskv_error *error)
{
    if (result == ncclSuccess)
        return DSKV_EXIT_OK;
    return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "NCCL failed in %s: %s", what,
                          dskv_nccl_library.ncclGetErrorString(result));
}

/* Collective: every rank has a GPU, and no two the same. */
static int has_gpu_each(const struct dskv_device *device, int n_ranks)
{
    int32_t all[DSKV_MAX_RANKS], n_shared = 0;
    dskv_job_all_gather(dskv_device_identity(device), all);
    for (int i = 0; i < n_ranks; i++)
        for (int j = 0; j < i; j++)
            n_shared += all[i] == all[j];
    return n_shared == 0;
}

static enum dskv_exit connect_ranks(struct dskv_nccl *nccl, struct dskv_error *error)
{
    ncclUniqueId id = {0};
    enum dskv_exit code = DSKV_EXIT_OK;
    if (nccl->rank == 0)
        code = dskv_nccl_result(dskv_nccl_library.ncclGetUniqueId(&id), "making an id", error);
    if ((code = dskv_parallel_agree(code, error)))
        return code;
    dskv_job_broadcast(&id, sizeof id);
    code = dskv_nccl_result(dskv_nccl_library.ncclCommInitRank(&nccl->comm, nccl->n_ranks, id, nccl->rank),
                            "connecting the ranks", error);
    if (code)
        nccl->comm = NULL;
    return dskv_parallel_agree(code, error);
}

enum dskv_exit dskv_nccl_open(struct dskv_device *device, const struct dskv_peers *peers, struct dskv_nccl **nccl,
                              struct dskv_error *error)
{
    *nccl = NULL;
    if (peers->n_ranks == 1 || !has_gpu_each(device, peers->n_ranks))
        return DSKV_EXIT_OK;
    enum dskv_exit code = dskv_parallel_agree(load_library(error), error);
    if (code)
        return code;
    struct dskv_nccl *link = dskv_calloc(1, sizeof *link);
    *link = (struct dskv_nccl){.device = device, .rank = peers->rank, .n_ranks = peers->n_ranks};
    if ((code = connect_ranks(link, error))) {
        if (link->comm) /* on this rank it was connected; abort waits for nobody */
            dskv_nccl_library.ncclCommAbort(link->comm);
        free(link);
        return code;
    }
    *nccl = link;
    return DSKV_EXIT_OK;
}

void dskv_nccl_close(struct dskv_nccl **nccl)
{
    if (!*nccl)
        return;
    dskv_nccl_team_close(*nccl);
    dskv_nccl_library.ncclCommDestroy((*nccl)->comm);
    free(*nccl);
    *nccl = NULL;
}

enum dskv_exit dskv_nccl_all_gather(struct dskv_nccl *nccl, const void *own, void *all, size_t bytes,
                                    struct dskv_error *error)
{
    return dskv_nccl_result(
        dskv_nccl_library.ncclAllGather(own, all, bytes, ncclUint8, nccl->comm, dskv_device_queue(nccl->device)),
        "a gather", error);
}

enum dskv_exit dskv_nccl_measured_sum(struct dskv_nccl *nccl, const void *own, void *sum, int64_t n,
                                      enum dskv_dtype dtype, struct dskv_error *error)
{
    ncclDataType_t type = dtype == DSKV_F32 ? ncclFloat32 : dtype == DSKV_F16 ? ncclFloat16 : ncclBfloat16;
    return dskv_nccl_result(dskv_nccl_library.ncclAllReduce(own, sum, (size_t)n, type, ncclSum, nccl->comm,
                                                            dskv_device_queue(nccl->device)),
                            "a sum", error);
}
