#include "parallel/flag.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPINS_PER_LOOK 32 /* looks at the clock are dearer than looks at the value */
#define SECONDS_PER_CHECK 1
#define SHARED_CORE_SLEEP_NS 20000 /* between two looks where the core is needed by the one who is looked for */

static void pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static int lives(pid_t pid)
{
    /* A killed process that nobody has waited for still takes kill(pid, 0); its pidfd tells the truth. */
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0)
        return errno != ESRCH && kill(pid, 0) == 0;
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    int n = poll(&ended, 1, 0);
    close(fd);
    return n <= 0;
}

int dskv_peers_first_lost(const struct dskv_peers *peers)
{
    for (int32_t r = 0; r < peers->n_ranks; r++)
        if ((r == 0) != (peers->rank == 0) && !lives(peers->pids[r]))
            return r;
    return -1;
}

static char *append_text(char *end, const char *text)
{
    size_t n = strlen(text);
    memcpy(end, text, n + 1);
    return end + n;
}

static char *append_number(char *end, int number)
{
    char digits[16], *first = digits + sizeof digits - 1;
    *first = 0;
    do
        *--first = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    return append_text(end, first);
}

void dskv_peers_describe_lost(const struct dskv_peers *peers, int lost, char text[DSKV_LOST_TEXT])
{
    char *end = append_number(append_text(text, "rank "), lost); /* a signal's handler may not call snprintf */
    end = append_number(append_text(end, " is gone: its process "), (int)peers->pids[lost]);
    append_text(end, " was killed or has crashed");
}

enum dskv_exit dskv_peers_fail_lost(const struct dskv_peers *peers, int lost, struct dskv_error *error)
{
    char text[DSKV_LOST_TEXT];
    dskv_peers_describe_lost(peers, lost, text);
    return dskv_fail_exit(error, DSKV_EXIT_RANK_LOST, "%s", text);
}

static int is_at_least(uint32_t seen, uint32_t value)
{
    return (int32_t)(seen - value) >= 0;
}

int dskv_flag_reached(struct dskv_flag *flag, uint32_t value)
{
    return is_at_least(atomic_load_explicit(&flag->value, memory_order_acquire), value);
}

static int spin(struct dskv_flag *flag, uint32_t value, int32_t spin_us)
{
    if (dskv_flag_reached(flag, value))
        return 1;
    for (int64_t end = spin_us ? now_us() + spin_us : 0; end;) {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (dskv_flag_reached(flag, value))
                return 1;
            pause_core();
        }
        if (now_us() >= end)
            break;
        sched_yield(); /* where others wait for this core, the peer may be one of them */
    }
    return 0;
}

int dskv_flag_wait(struct dskv_flag *flag, uint32_t value, const struct dskv_peers *peers)
{
    if (spin(flag, value, peers->spin_us))
        return -1;
    int lost = -1;
    /* Sleepers are counted before the value is read again, and the setter writes the value before it reads the count
     * (both sequentially consistent): either the sleeper sees the value or the setter sees the sleeper. */
    atomic_fetch_add(&flag->n_sleepers, 1);
    for (uint32_t seen; !is_at_least(seen = atomic_load(&flag->value), value) && lost < 0;) {
        struct timespec timeout = {.tv_sec = SECONDS_PER_CHECK};
        if (syscall(SYS_futex, &flag->value, FUTEX_WAIT, seen, &timeout, NULL, 0) != 0 && errno == ETIMEDOUT)
            lost = dskv_peers_first_lost(peers);
    }
    atomic_fetch_sub(&flag->n_sleepers, 1);
    return lost;
}

void dskv_flag_set(struct dskv_flag *flag, uint32_t value)
{
    atomic_store(&flag->value, value);
    if (atomic_load(&flag->n_sleepers))
        syscall(SYS_futex, &flag->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

struct dskv_watch dskv_watch_begin(const struct dskv_peers *peers)
{
    int64_t now = now_us();
    return (struct dskv_watch){peers, now + peers->spin_us, now + SECONDS_PER_CHECK * 1000000};
}

int dskv_watch_pause(struct dskv_watch *watch)
{
    struct timespec sleep = {.tv_nsec = SHARED_CORE_SLEEP_NS};
    int64_t now = now_us();
    if (!watch->peers->spin_us)
        nanosleep(&sleep, NULL);
    else if (now >= watch->spin_until_us)
        sched_yield();
    else
        for (int i = 0; i < SPINS_PER_LOOK; i++)
            pause_core();
    if (now < watch->check_us)
        return -1;
    watch->check_us = now + SECONDS_PER_CHECK * 1000000;
    return dskv_peers_first_lost(watch->peers);
}

void dskv_meeting_arrive(struct dskv_meeting *meeting, uint32_t count, uint32_t n)
{
    /* Counts run on and wrap; the order makes every rank's writes visible to the last, who publishes them to all. */
    if (atomic_fetch_add_explicit(&meeting->n_arrived, 1, memory_order_acq_rel) + 1 == count * n)
        dskv_flag_set(&meeting->complete, count);
}
