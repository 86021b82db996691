/* Signals: handlers that set a flag and make a descriptor readable, and the clock that ends an end that takes too long.
 */
#include "daemon/signals.h"

#include "base/status.h"
#include "parallel/engine.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define LONGEST_END_S 2 /* then a step that still runs, or a rank that does not answer, is left behind */

static int wake_fd = -1;
static volatile sig_atomic_t serving, interrupted, ended_by, wish;

/* Async-signal-safe, as all below. */
static void say(const char *sentence)
{
    char line[DSKV_LOST_TEXT + 16] = "dskvd: ";
    size_t n = strlen(line), room = sizeof line - 1 - n, length = strnlen(sentence, room);
    memcpy(line + n, sentence, length);
    line[n + length] = '\n';
    ssize_t written = write(STDERR_FILENO, line, n + length + 1); /* at once: lines of several ranks stay whole */
    (void)written;
}

static void end_if_lost(void)
{
    char sentence[DSKV_LOST_TEXT];
    if (!dskv_parallel_lost(sentence))
        return;
    if (sentence[0])
        say(sentence);
    dskv_parallel_abort(DSKV_EXIT_RANK_LOST);
}

static void on_signal_of_worker(int signal_number)
{
    int saved = errno;
    (void)signal_number;
    end_if_lost();
    errno = saved;
}

static void on_signal(int signal_number)
{
    int saved = errno;
    if (signal_number == SIGUSR1) {
        if (wish < DSKV_DRAIN)
            wish = DSKV_DRAIN;
    } else {
        if (!serving)
            end_if_lost();
        if (!serving || (signal_number == SIGINT && interrupted))
            dskv_parallel_abort((enum dskv_exit)(128 + signal_number)); /* as a shell tells it */
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
    (void)signal_number;
    say("ended by a signal while a rank was still busy");
    dskv_parallel_abort((enum dskv_exit)(128 + ended_by));
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

void dskv_signals_open(int rank)
{
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    DSKV_ASSERT(wake_fd >= 0, "eventfd: %s", strerror(errno));
    set_handler(rank == 0 ? on_signal : on_signal_of_worker);
    signal(SIGALRM, on_alarm);
    signal(SIGPIPE, SIG_IGN); /* a reader of our standard output or a socket may go away at any time */
}

void dskv_signals_serve(void)
{
    serving = 1;
}

void dskv_signals_end_if_lost(void)
{
    set_handler(SIG_IGN); /* it is said once */
    end_if_lost();
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
