/* Memory that all ranks reach, through NCCL's windows and the pointers that its device interface makes of them.
 *
 * The interface is C++ for kernels, so it is used once, here: a kernel asks for the pointers, and nobody else needs to
 * know where they came from.  What it reads is laid out as the headers of one minor version say; with another library
 * there are no windows. */
#include "parallel/nccl_library.h"

extern "C" {
#include "parallel/engine.h"
}

#include <dlfcn.h>
#include <nccl_device.h>
#include <stdlib.h>

struct dskv_nccl_window {
    void *memory;
    ncclWindow_t window;
};

static bool has_same_interface(void)
{
    int version = 0;
    return dskv_nccl_library.ncclGetVersion(&version) == ncclSuccess && version / 100 == NCCL_VERSION_CODE / 100;
}

/* A registered window may silently be none; to make a device communicator is what fails where there can be none. */
int dskv_nccl_team_open(struct dskv_nccl *nccl)
{
    auto create = (decltype(&ncclDevCommCreate))dlsym(dskv_nccl_library.handle, "ncclDevCommCreate");
    if (!has_same_interface() || !create)
        return 0;
    ncclDevCommRequirements needs = {}; /* no multicast */
    ncclDevComm *team = (ncclDevComm *)calloc(1, sizeof *team);
    if (!team || create(nccl->comm, &needs, team) != ncclSuccess) {
        free(team);
        return 0;
    }
    nccl->team = team;
    return team->lsaRank == nccl->rank ? team->lsaSize : 0;
}

void dskv_nccl_team_close(struct dskv_nccl *nccl)
{
    auto destroy = (decltype(&ncclDevCommDestroy))dlsym(dskv_nccl_library.handle, "ncclDevCommDestroy");
    if (nccl->team && destroy)
        destroy(nccl->comm, (const ncclDevComm *)nccl->team);
    free(nccl->team);
    nccl->team = NULL;
}

static __global__ void resolve(ncclWindow_t window, void **pointers)
{
    pointers[threadIdx.x] = ncclGetLsaPointer(window, 0, (int)threadIdx.x);
}

static enum dskv_exit cuda_result(cudaError_t result, struct dskv_error *error)
{
    if (result == cudaSuccess)
        return DSKV_EXIT_OK;
    return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "memory that all GPUs reach cannot be had: %s",
                          cudaGetErrorString(result));
}

static enum dskv_exit find_pointers(const struct dskv_nccl *nccl, ncclWindow_t window, void **pointers,
                                    struct dskv_error *error)
{
    void **found = NULL;
    size_t bytes = (size_t)nccl->n_ranks * sizeof *found;
    cudaError_t failed = cudaMalloc((void **)&found, bytes);
    if (failed == cudaSuccess) {
        resolve<<<1, nccl->n_ranks>>>(window, found);
        if ((failed = cudaGetLastError()) == cudaSuccess)
            failed = cudaMemcpy(pointers, found, bytes, cudaMemcpyDeviceToHost);
        cudaFree(found);
    }
    return cuda_result(failed, error);
}

static enum dskv_exit take_memory(size_t bytes, void **memory, struct dskv_error *error)
{
    if (dskv_nccl_library.ncclMemAlloc(memory, bytes) != ncclSuccess)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes that all GPUs reach", bytes);
    cudaError_t failed = cudaMemset(*memory, 0, bytes);
    if (failed == cudaSuccess)
        failed = cudaDeviceSynchronize(); /* before any peer writes into it */
    return cuda_result(failed, error);
}

enum dskv_exit dskv_nccl_window_open(struct dskv_nccl *nccl, size_t bytes, struct dskv_nccl_window **window,
                                     void **pointers, struct dskv_error *error)
{
    void *memory = NULL;
    ncclWindow_t registered = NULL;
    enum dskv_exit code = dskv_parallel_agree(take_memory(bytes, &memory, error), error);
    if (!code) {
        ncclResult_t result =
            dskv_nccl_library.ncclCommWindowRegister(nccl->comm, memory, bytes, &registered, NCCL_WIN_COLL_SYMMETRIC);
        code = dskv_nccl_result(result, "registering a window", error);
        if (!code && !registered)
            code = dskv_fail_exit(error, DSKV_EXIT_DEVICE, "NCCL made no window of memory that all GPUs reach");
        if (!code)
            code = find_pointers(nccl, registered, pointers, error);
        pointers[nccl->rank] = memory; /* by this address NCCL itself knows the window again */
        code = dskv_parallel_agree(code, error);
    }
    if (!code)
        *window = (struct dskv_nccl_window *)calloc(1, sizeof **window);
    if (!code && *window) {
        **window = {memory, registered};
        return DSKV_EXIT_OK;
    }
    if (memory)
        dskv_nccl_library.ncclMemFree(memory);
    return code ? code : dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for a window");
}

void dskv_nccl_window_close(struct dskv_nccl *nccl, struct dskv_nccl_window **window)
{
    if (!*window)
        return;
    dskv_nccl_library.ncclCommWindowDeregister(nccl->comm, (*window)->window);
    dskv_nccl_library.ncclMemFree((*window)->memory);
    free(*window);
    *window = NULL;
}
