/* Replay: runs recorded plans on an open engine, without a client. */
#ifndef DSKV_DAEMON_REPLAY_H
#define DSKV_DAEMON_REPLAY_H

#include "parallel/engine.h"

#include <stdio.h>

/* Rank 0.  Checks and executes every plan of the file in turn and prints one line for each on out: the step, its tokens
 * and rows, a hash of its results, its time; at the level debug the whole plan, too.  Two runs that print the same
 * hashes gave the same bits.  A file that cannot be read or a plan that does not fit this engine: DSKV_EXIT_USAGE, with
 * the plan's number. */
enum dskv_exit dskv_replay(struct dskv_engine *engine, const char *path, FILE *out, struct dskv_error *error);

#endif
