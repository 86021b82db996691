/* Flag: a number in shared memory that processes wait for.
 *
 * A waiter spins for a moment, then sleeps in the kernel; the one who sets the number makes a system call only when
 * somebody sleeps.  While waiting, it looks once a second whether its peers still live.  Knows nothing of what the
 * number means.
 */
#ifndef DSKV_PARALLEL_FLAG_H
#define DSKV_PARALLEL_FLAG_H

#include "base/limits.h"

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#define DSKV_CACHE_LINE 64

struct dskv_flag { /* zero: nothing was set */
    _Alignas(DSKV_CACHE_LINE) _Atomic uint32_t value;
    _Atomic uint32_t n_sleepers;
};

/* Who waits, and for whom. */
struct dskv_peers {
    int32_t rank, n_ranks;
    int32_t spin_us; /* 0 when there are more ranks than cores: spinning would keep the others from running */
    pid_t pids[DSKV_MAX_RANKS];
};

/* Without waiting: the lowest rank whose process has ended, or -1. */
int dskv_peers_first_lost(const struct dskv_peers *peers);

/* Publishes everything written before, and wakes all waiters. */
void dskv_flag_set(struct dskv_flag *flag, uint32_t value);
/* Returns -1 when the value is there (all that was written before it was set is then visible), or the rank that was
 * lost. */
int dskv_flag_wait(struct dskv_flag *flag, uint32_t value, const struct dskv_peers *peers);

/* Meeting: all ranks arrive, the last one lets everybody go on.  Count is 1 for the first meeting, then 2 ... */
struct dskv_meeting {
    struct dskv_flag complete;
    _Alignas(DSKV_CACHE_LINE) _Atomic uint32_t n_arrived;
};
/* Says that one more of n has arrived at this meeting, without waiting. */
void dskv_meeting_arrive(struct dskv_meeting *meeting, uint32_t count, uint32_t n);

#endif
