#include "parallel/segment.h"

#include "parallel/engine.h"
#include "parallel/job.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Longer than the next command takes while clients wait, shorter than anybody notices on an idle core. */
#define SPIN_US 50

static int open_own(size_t bytes)
{
    int fd = memfd_create("dskvd", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Rank 0's file through /proc: a file without a name can be opened by its owner's other processes, and by no one
 * else's. */
static int open_of(pid_t pid, int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

static enum dskv_exit map(int fd, struct dskv_segment *segment, struct dskv_error *error)
{
    void *memory = fd < 0 ? MAP_FAILED : mmap(NULL, segment->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return dskv_fail_exit(error, DSKV_EXIT_MEMORY, "cannot share %zu bytes of memory between the ranks: %s",
                              segment->bytes, strerror(errno));
    segment->memory = memory;
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_segment_open(size_t bytes, struct dskv_segment *segment, struct dskv_error *error)
{
    *segment = (struct dskv_segment){.bytes = bytes, .peers = *dskv_job_peers()};
    struct dskv_peers *peers = &segment->peers;
    peers->spin_us = peers->n_ranks <= dskv_job_n_cores() ? SPIN_US : 0;

    int own = peers->rank == 0 ? open_own(bytes) : -1, rank0_fd = own;
    dskv_job_broadcast(&rank0_fd, sizeof rank0_fd);
    int fd = peers->rank == 0 ? own : open_of(peers->pids[0], rank0_fd);
    enum dskv_exit code =
        dskv_parallel_agree(map(fd, segment, error), error); /* all have opened it: rank 0 may close it */
    if (fd >= 0)
        close(fd);
    if (code)
        dskv_segment_close(segment);
    return code;
}

void dskv_segment_close(struct dskv_segment *segment)
{
    if (segment->memory)
        munmap(segment->memory, segment->bytes);
    segment->memory = NULL;
}
