/* Signals: handlers that set a flag and make a descriptor readable, and the clock that ends an end that takes too long.
 */
#include "daemon/signals.h"

#include "base/status.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define LONGEST_END_S 2 /* then a step that still runs, or a rank that does not answer, is left behind */

static int wake_fd = -1;
static volatile sig_atomic_t serving, interrupted, ended_by, wish;

/* Async-signal-safe: flags, write and _exit only. */
static void on_signal(int signal_number)
{
    int saved = errno;
    if (signal_number == SIGUSR1) {
        if (wish < DSKV_DRAIN)
            wish = DSKV_DRAIN;
    } else {
        if (!serving || (signal_number == SIGINT && interrupted))
            _exit(128 + signal_number); /* as a shell tells it */
        interrupted |= signal_number == SIGINT;
        ended_by = signal_number;
        wish = DSKV_END;
        alarm(LONGEST_END_S);
    }
    uint64_t one = 1;
    ssize_t n =
        write(wake_fd, &one, sizeof one); /* fails only when the counter is full, and then it is readable already */
    (void)n;
    errno = saved;
}

static void on_alarm(int signal_number)
{
    static const char sentence[] = "dskvd: ended by a signal while a rank was still busy\n";
    (void)signal_number;
    ssize_t n = write(STDERR_FILENO, sentence, sizeof sentence - 1);
    (void)n;
    _exit(128 + ended_by);
}

static void set_handler(void (*handler)(int))
{
    static const int signals[] = {SIGINT, SIGTERM, SIGUSR1};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &action, NULL);
}

void dskv_signals_open(void)
{
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    DSKV_ASSERT(wake_fd >= 0, "eventfd: %s", strerror(errno));
    set_handler(on_signal);
    signal(SIGALRM, on_alarm);
    signal(SIGPIPE, SIG_IGN); /* a reader of our standard output or a socket may go away at any time */
}

void dskv_signals_serve(void)
{
    serving = 1;
}

void dskv_signals_ignore(void)
{
    set_handler(SIG_IGN);
}

int dskv_signals_fd(void)
{
    return wake_fd;
}

enum dskv_wish dskv_signals_wish(void)
{
    uint64_t n_signals;
    ssize_t n = read(wake_fd, &n_signals, sizeof n_signals); /* before the flag is read: no signal is missed */
    (void)n;
    return (enum dskv_wish)wish;
}
