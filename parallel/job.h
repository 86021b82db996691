/* Job: the ranks as MPI sees them, for the start and the end of a run.
 *
 * Owns MPI (start.c is the only user of mpi.h): all ranks meet here while the engine opens, and never during steps,
 * which travel through shared memory.  Without mpirun or srun there is one rank and MPI is never touched. The public
 * part (start, stop, abort, agree) is in parallel/engine.h.  Knows nothing of models or plans.
 */
#ifndef DSKV_PARALLEL_JOB_H
#define DSKV_PARALLEL_JOB_H

#include <stddef.h>
#include <stdint.h>

struct dskv_peers;

int dskv_job_rank(void);
int dskv_job_n_ranks(void);
/* Who the ranks are. */
const struct dskv_peers *dskv_job_peers(void);
/* Cores that this job may use on this host, at least 1. */
int dskv_job_n_cores(void);

/* Collective over all ranks; main thread only. */
void dskv_job_broadcast(void *bytes, size_t n_bytes); /* from rank 0 */
int64_t dskv_job_min(int64_t value);
/* all[n_ranks] gets every rank's value. */
void dskv_job_all_gather(int32_t value, int32_t *all);
void dskv_job_barrier(void);

#endif
