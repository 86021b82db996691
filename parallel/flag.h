/* Flag: a number in shared memory that only grows and that processes wait for.
 *
 * A waiter spins for a moment, then sleeps in the kernel; the one who sets the number makes a system call only when
 * somebody sleeps.  While waiting, it looks once a second whether its peers still live: rank 0 after all others, these
 * after rank 0 alone.  So a loss is found, and told, by one rank, before any other leaves because of it.  Knows nothing
 * of what the number means.
 */
#ifndef DSKV_PARALLEL_FLAG_H
#define DSKV_PARALLEL_FLAG_H

#include "base/limits.h"
#include "base/status.h"

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#define DSKV_CACHE_LINE 64

/* The bytes of as many whole lines as hold these. */
static inline size_t dskv_whole_lines(size_t bytes)
{
    return (bytes + DSKV_CACHE_LINE - 1) / DSKV_CACHE_LINE * DSKV_CACHE_LINE;
}

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

/* Without waiting, async-signal-safe: the lowest of the ranks that this one looks after whose process has ended, or -1.
 */
int dskv_peers_first_lost(const struct dskv_peers *peers);
/* "rank 2 is gone: its process 4711 was killed or has crashed"; async-signal-safe. */
void dskv_peers_describe_lost(const struct dskv_peers *peers, int lost, char text[DSKV_LOST_TEXT]);
/* DSKV_EXIT_RANK_LOST, with that sentence. */
enum dskv_exit dskv_peers_fail_lost(const struct dskv_peers *peers, int lost, struct dskv_error *error);

/* Publishes everything written before, and wakes all waiters. */
void dskv_flag_set(struct dskv_flag *flag, uint32_t value);
/* Without waiting: whether the value or a later one is there (numbers may wrap); all that was written before it was set
 * is then visible. */
int dskv_flag_reached(struct dskv_flag *flag, uint32_t value);
/* Waits for it: -1 when it is there, or a rank that was lost. */
int dskv_flag_wait(struct dskv_flag *flag, uint32_t value, const struct dskv_peers *peers);

/* Watch: a wait for what no flag tells, for a loop that looks again and again. */
struct dskv_watch {
    const struct dskv_peers *peers;
    int64_t spin_until_us, check_us;
};
struct dskv_watch dskv_watch_begin(const struct dskv_peers *peers);
/* Between two looks: spins for a moment, later gives the core to others that want it; sleeps shortly where ranks share
 * cores.  -1, or a rank that was lost. */
int dskv_watch_pause(struct dskv_watch *watch);

/* Meeting: all ranks arrive, the last one lets everybody go on.  Count is 1 for the first meeting, then 2 ... */
struct dskv_meeting {
    struct dskv_flag complete;
    _Alignas(DSKV_CACHE_LINE) _Atomic uint32_t n_arrived;
};
/* Says that one more of n has arrived at this meeting, without waiting. */
void dskv_meeting_arrive(struct dskv_meeting *meeting, uint32_t count, uint32_t n);

#endif
