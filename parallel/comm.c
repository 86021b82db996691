/* Comm: picks the first implementation that serves and asserts what all of them require. */
#include "parallel/comm.h"

#include "base/memory.h"
#include "parallel/nccl_link.h"

#include <stdlib.h>
#include <string.h>

struct dskv_comm {
    const struct dskv_comm_table *table;
    struct dskv_device *device;
    struct dskv_nccl *nccl;
    void *state;
    size_t slot_bytes;
};

/* The fastest first. */
static const struct dskv_comm_table *const tables[] = {
    &dskv_comm_self,   &dskv_comm_shm,
#ifdef DSKV_WITH_NCCL
    &dskv_comm_peer,   &dskv_comm_nccl,
#endif
    &dskv_comm_staged,
};

static const struct dskv_comm_table *find_table(const struct dskv_comm_options *options)
{
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if ((!options->name || strcmp(options->name, tables[i]->name) == 0) && tables[i]->serves(options))
            return tables[i];
    return NULL;
}

enum dskv_exit dskv_comm_open(const struct dskv_comm_options *options, struct dskv_comm **comm,
                              struct dskv_error *error)
{
    struct dskv_comm_options own = *options;
    void *state = NULL;
    enum dskv_exit code = dskv_nccl_open(own.device, own.peers, &own.nccl, error);
    if (code)
        return code;
    const struct dskv_comm_table *table = find_table(&own);
    DSKV_ASSERT(table || own.name, "%d ranks", (int)own.peers->n_ranks);
    code = table ? table->open(&own, &state, error)
                 : dskv_fail_exit(error, DSKV_EXIT_DEVICE, "\"%s\" does not serve these ranks", own.name);
    if (code) {
        dskv_nccl_close(&own.nccl);
        return code;
    }
    *comm = dskv_calloc(1, sizeof **comm);
    **comm = (struct dskv_comm){
        .table = table, .device = own.device, .nccl = own.nccl, .state = state, .slot_bytes = own.slot_bytes};
    return DSKV_EXIT_OK;
}

void dskv_comm_close(struct dskv_comm **comm)
{
    if (!*comm)
        return;
    (*comm)->table->close((*comm)->state);
    dskv_nccl_close(&(*comm)->nccl);
    free(*comm);
    *comm = NULL;
}

const char *dskv_comm_name(const struct dskv_comm *comm)
{
    return comm->table->name;
}

void *dskv_comm_slot(struct dskv_comm *comm)
{
    return comm->table->slot(comm->state);
}

enum dskv_exit dskv_comm_exchange(struct dskv_comm *comm, size_t bytes, const void *const **slots,
                                  struct dskv_error *error)
{
    DSKV_ASSERT(bytes <= comm->slot_bytes, "%zu bytes of a slot of %zu", bytes, comm->slot_bytes);
    return comm->table->exchange(comm->state, bytes, slots, error);
}

enum dskv_exit dskv_comm_sum(struct dskv_comm *comm, int64_t rows, int64_t cols, enum dskv_dtype dtype,
                             struct dskv_tensor *sum, struct dskv_error *error)
{
    size_t bytes = (size_t)rows * (size_t)cols * dskv_dtype_bytes(dtype);
    DSKV_ASSERT(bytes <= comm->slot_bytes, "%zu bytes in a slot of %zu", bytes, comm->slot_bytes);
    return comm->table->sum(comm->state, rows, cols, dtype, sum, error);
}

enum dskv_exit dskv_comm_add(struct dskv_comm *comm, const struct dskv_residual_norm *p, struct dskv_error *error)
{
    const struct dskv_tensor *y = &p->residual.y;
    DSKV_ASSERT(y->stride == y->cols, "stride %lld of %lld", (long long)y->stride, (long long)y->cols);
    if (comm->table->add)
        return comm->table->add(comm->state, p, error);
    struct dskv_residual_norm own = *p;
    enum dskv_exit code = dskv_comm_sum(comm, y->rows, y->cols, y->dtype, &own.residual.y, error);
    if (!code)
        dskv_op_residual_norm(comm->device, &own);
    return code;
}

int dskv_comm_is_queued(const struct dskv_comm *comm)
{
    return comm->table->is_queued;
}

struct dskv_nccl *dskv_comm_nccl_link(const struct dskv_comm *comm)
{
    return comm->nccl;
}
