/* Signals: what the outside wants of this process: go on, drain, or end.
 *
 * Until dskv_signals_serve, SIGINT and SIGTERM end the process at once (nothing has been promised to anyone yet) and
 * SIGUSR1 is kept for later.  Afterwards all three only make dskv_signals_fd readable; a second SIGINT ends the process
 * at once. Knows nothing of requests or ranks.
 */
#ifndef DSKV_DAEMON_SIGNALS_H
#define DSKV_DAEMON_SIGNALS_H

/* What was asked for so far, the strongest of it. */
enum dskv_wish { DSKV_GO_ON, DSKV_DRAIN, DSKV_END };

/* At the start of main, before there are threads. */
void dskv_signals_open(void);
/* From now on signals are wishes. */
void dskv_signals_serve(void);
/* From now on signals are ignored: for ranks that rank 0 tells what to do.  mpirun sends SIGTERM to all of them at
 * once. */
void dskv_signals_ignore(void);

/* Stays readable from the first signal on until dskv_signals_wish has told of it. */
int dskv_signals_fd(void);
enum dskv_wish dskv_signals_wish(void);

#endif
