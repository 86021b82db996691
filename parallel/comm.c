/* Comm: picks the first implementation that serves and asserts what all of them require. */
#include "parallel/comm.h"

#include "base/memory.h"

#include <stdlib.h>

struct dskv_comm {
    const struct dskv_comm_table *table;
    struct dskv_device *device;
    void *state;
    size_t slot_bytes;
};

enum dskv_exit dskv_comm_open(const struct dskv_comm_options *options, struct dskv_comm **comm,
                              struct dskv_error *error)
{
    static const struct dskv_comm_table *const tables[] = {&dskv_comm_self, &dskv_comm_shm, &dskv_comm_staged};
    const struct dskv_comm_table *table = NULL;
    for (size_t i = 0; !table && i < sizeof tables / sizeof *tables; i++)
        if (tables[i]->serves(options))
            table = tables[i];
    DSKV_ASSERT(table, "%d ranks", (int)options->peers->n_ranks);
    void *state = NULL;
    enum dskv_exit code = table->open(options, &state, error);
    if (code)
        return code;
    *comm = dskv_calloc(1, sizeof **comm);
    **comm = (struct dskv_comm){
        .table = table, .device = options->device, .state = state, .slot_bytes = options->slot_bytes};
    return DSKV_EXIT_OK;
}

void dskv_comm_close(struct dskv_comm **comm)
{
    if (!*comm)
        return;
    (*comm)->table->close((*comm)->state);
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
