/* Comm: brings up the first implementation that serves and asserts what all of them require. */
#include "parallel/comm.h"

#include "base/log.h"
#include "base/memory.h"
#include "parallel/engine.h"
#include "parallel/job.h"
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

/* Opens `table` on all ranks or on none; one code for all. */
static enum dskv_exit open_table(const struct dskv_comm_table *table, const struct dskv_comm_options *options,
                                 void **state, struct dskv_error *error)
{
    enum dskv_exit own = table->open(options, state, error), code = dskv_parallel_agree(own, error);
    if (code && !own)
        table->close(*state);
    return code;
}

/* Ranks decide alike, from what all of them have: the first that serves and can be brought up, or the one that was
 * asked for and no other. */
static enum dskv_exit open_first(const struct dskv_comm_options *options, const struct dskv_comm_table **table,
                                 void **state, struct dskv_error *error)
{
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if ((options->name && strcmp(options->name, tables[i]->name) != 0) || !dskv_job_min(tables[i]->serves(options)))
            continue;
        *table = tables[i];
        enum dskv_exit code = open_table(*table, options, state, error);
        if (!code || options->name)
            return code;
        if (options->peers->rank == 0)
            dskv_log(DSKV_LOG_WARNING, "comm", "ranks cannot exchange by \"%s\": %s", (*table)->name, error->message);
    }
    return DSKV_EXIT_DEVICE;
}

/* NCCL, where there is something for it to connect.  Without it the others serve; what it says is told once, or is why
 * the one that was asked for does not. */
static void open_nccl(struct dskv_comm_options *options, struct dskv_error *error)
{
    if (dskv_nccl_open(options->device, options->peers, &options->nccl, error) && !options->name &&
        options->peers->rank == 0)
        dskv_log(DSKV_LOG_WARNING, "comm", "GPUs exchange through host memory: %s", error->message);
}

enum dskv_exit dskv_comm_open(const struct dskv_comm_options *options, struct dskv_comm **comm,
                              struct dskv_error *error)
{
    struct dskv_comm_options own = *options;
    const struct dskv_comm_table *table = NULL;
    void *state = NULL;
    struct dskv_error why = {0};
    open_nccl(&own, &why);
    enum dskv_exit code = open_first(&own, &table, &state, &why);
    if (code) {
        dskv_nccl_close(&own.nccl);
        const char *name = table ? table->name : own.name ? own.name : "any way";
        return dskv_fail_exit(error, code, "ranks cannot exchange by \"%s\": %s", name,
                              why.message[0] ? why.message : "it does not serve these ranks and devices");
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
