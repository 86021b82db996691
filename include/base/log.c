#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

static enum dskv_log_level current_level = DSKV_LOG_INFO;
static int current_rank;

void dskv_log_open(enum dskv_log_level level, int rank)
{
    current_level = level;
    current_rank = rank;
}

int dskv_log_enabled(enum dskv_log_level level)
{
    enum dskv_log_level most = current_level;
    if (current_rank != 0 && most == DSKV_LOG_INFO)
        most = DSKV_LOG_WARNING;
    return level <= most;
}

void dskv_log(enum dskv_log_level level, const char *subsystem, const char *format, ...)
{
    static const char *const level_names[] = {"error", "warning", "info", "debug"};
    if (!dskv_log_enabled(level))
        return;
    int saved = errno;
    struct timespec now;
    struct tm local;
    clock_gettime(CLOCK_REALTIME, &now);
    localtime_r(&now.tv_sec, &local);
    char line[1024];
    int used = snprintf(line, sizeof line, "%02d:%02d:%02d.%03d rank %d %s %s: ", local.tm_hour, local.tm_min,
                        local.tm_sec, (int)(now.tv_nsec / 1000000), current_rank, subsystem, level_names[level]);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + used, sizeof line - (size_t)used, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s\n", line); /* one call: lines of several ranks and threads stay whole */
    errno = saved;
}
