/* Memory that all ranks reach, through NCCL's windows and the pointers that its device interface makes of them.
 *
 * The interface is C++ for kernels, so it is used once, here: a kernel asks for the pointers, and nobody else needs to
 * know where they came from.  What it reads is laid out as the headers of one minor version say; with another library
 * there are no windows. */
#include "parallel/nccl_library.h"

extern "C" {
#include "base/memory.h"
#include "parallel/engine.h"
}

#include <dlfcn.h>
#include <nccl_device.h>
#include <stdlib.h>

struct dskv_nccl_window {
    void *memory;
    ncclWindow_t window;
};

/* A registered window may silently be none; to make a device communicator is what fails where there can be none. */
static enum dskv_exit open_team(struct dskv_nccl *nccl, struct dskv_error *error)
{
    auto create = (decltype(&ncclDevCommCreate))dlsym(dskv_nccl_library.handle, "ncclDevCommCreate");
    int version = 0;
    enum dskv_exit code = dskv_nccl_result(dskv_nccl_library.ncclGetVersion(&version), "telling its version", error);
    if (code || nccl->team)
        return code;
    if (version / 100 != NCCL_VERSION_CODE / 100 || !create)
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE,
                              "the NCCL that was loaded is %d.%d, dskvd was built for the windows of %d.%d",
                              version / 10000, version / 100 % 100, NCCL_MAJOR, NCCL_MINOR);
    ncclDevCommRequirements needs = {}; /* no multicast */
    ncclDevComm *team = (ncclDevComm *)calloc(1, sizeof *team);
    if (!team)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for a device communicator");
    if ((code = dskv_nccl_result(create(nccl->comm, &needs, team), "making a device communicator", error))) {
        free(team);
        return code;
    }
    nccl->team = team;
    if (team->lsaRank != nccl->rank || team->lsaSize != nccl->n_ranks)
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "not every GPU reaches every other's memory");
    return DSKV_EXIT_OK;
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
    cudaGetLastError(); /* told here: what is tried instead must not find it */
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
    if (dskv_nccl_library.ncclMemAlloc(memory, bytes) != ncclSuccess) {
        *memory = NULL;
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "no memory for %zu bytes that all GPUs reach", bytes);
    }
    cudaError_t failed = cudaMemset(*memory, 0, bytes);
    if (failed == cudaSuccess)
        failed = cudaDeviceSynchronize(); /* before any peer writes into it */
    return cuda_result(failed, error);
}

static enum dskv_exit register_memory(struct dskv_nccl *nccl, size_t bytes, struct dskv_nccl_window *window,
                                      void **pointers, struct dskv_error *error)
{
    ncclResult_t result = dskv_nccl_library.ncclCommWindowRegister(nccl->comm, window->memory, bytes, &window->window,
                                                                   NCCL_WIN_COLL_SYMMETRIC);
    enum dskv_exit code = dskv_nccl_result(result, "registering a window", error);
    if (!code && !window->window)
        code = dskv_fail_exit(error, DSKV_EXIT_DEVICE, "NCCL made no window of memory that all GPUs reach");
    if (!code)
        code = find_pointers(nccl, window->window, pointers, error);
    pointers[nccl->rank] = window->memory; /* by this address NCCL itself knows the window again */
    return code;
}

enum dskv_exit dskv_nccl_window_open(struct dskv_nccl *nccl, size_t bytes, struct dskv_nccl_window **window,
                                     void **pointers, struct dskv_error *error)
{
    struct dskv_nccl_window *w = (struct dskv_nccl_window *)dskv_calloc(1, sizeof *w);
    enum dskv_exit code = dskv_parallel_agree(open_team(nccl, error), error);
    if (code)
        dskv_nccl_team_close(nccl);
    if (!code)
        code = dskv_parallel_agree(take_memory(bytes, &w->memory, error), error);
    if (!code)
        code = dskv_parallel_agree(register_memory(nccl, bytes, w, pointers, error), error);
    if (code)
        dskv_nccl_window_close(nccl, &w);
    *window = w;
    return code;
}

void dskv_nccl_window_close(struct dskv_nccl *nccl, struct dskv_nccl_window **window)
{
    if (!*window)
        return;
    if ((*window)->window)
        dskv_nccl_library.ncclCommWindowDeregister(nccl->comm, (*window)->window);
    if ((*window)->memory)
        dskv_nccl_library.ncclMemFree((*window)->memory);
    free(*window);
    *window = NULL;
}
