/* Signals: what the outside wants of this process: go on, drain, or end.
 *
 * Rank 0: until dskv_signals_serve, SIGINT and SIGTERM end the process at once (nothing has been promised to anyone
 * yet) and SIGUSR1 is kept for later.  Afterwards all three only make dskv_signals_fd readable; a second SIGINT ends
 * the process at once.  The other ranks pay no heed: rank 0 tells them what to do.
 *
 * mpirun answers the loss of a rank with SIGTERM to all others, and with SIGKILL a second later.  So SIGTERM is also
 * when a rank looks whether one is gone, and says so where nobody else will.  Knows nothing of requests.
 */
#ifndef DSKV_DAEMON_SIGNALS_H
#define DSKV_DAEMON_SIGNALS_H

/* What was asked for so far, the strongest of it. */
enum dskv_wish { DSKV_GO_ON, DSKV_DRAIN, DSKV_END };

/* At the start of main, before there are threads. */
void dskv_signals_open(int rank);
/* Rank 0: from now on signals are wishes. */
void dskv_signals_serve(void);
/* Ends this process if a rank is gone that it looks after, with a sentence where no other rank says it. */
void dskv_signals_end_if_lost(void);

/* Stays readable from the first signal on until dskv_signals_wish has told of it. */
int dskv_signals_fd(void);
enum dskv_wish dskv_signals_wish(void);

#endif
