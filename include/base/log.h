/* Log: one line per event on standard error, "time rank subsystem level: sentence".
 *
 * Logged once, at the origin.  Rank 0 speaks for the job; the others log warnings and errors of their own only.
 */
#ifndef DSKV_BASE_LOG_H
#define DSKV_BASE_LOG_H

enum dskv_log_level { DSKV_LOG_ERROR, DSKV_LOG_WARNING, DSKV_LOG_INFO, DSKV_LOG_DEBUG };

/* Sets the level and the rank that lines carry.  Before the first call: DSKV_LOG_INFO, rank 0. */
void dskv_log_open(enum dskv_log_level level, int rank);
/* True when a line of this level would be written. */
int dskv_log_enabled(enum dskv_log_level level);
/* Writes a line; safe from any thread; keeps errno. */
void dskv_log(enum dskv_log_level level, const char *subsystem, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
