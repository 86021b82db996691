/* Front: the front thread of rank 0, between the transport and the server.
 *
 * Receives, decodes and checks; answers ping, info, stats and cancel itself and at once; hands the rest to the server;
 * sends what the server has to say.  Nothing here waits for a step, so that a ping is answered during a long prefill.
 * Knows no sequence, no cache and no step.
 */
#ifndef DSKV_DAEMON_FRONT_H
#define DSKV_DAEMON_FRONT_H

#include "daemon/config.h"
#include "daemon/server.h"
#include "ipc/transport.h"
#include "parallel/engine.h"

/* Serves until a signal wants the end or the server fails.  Prints the line that says so when it is ready.  The
 * transport is open; requests that came before now wait in it.  Returns DSKV_EXIT_OK when it ended in order. */
enum dskv_exit dskv_front_run(struct dskv_transport *transport, struct dskv_server *server,
                              const struct dskv_engine *engine, const struct dskv_config *config,
                              struct dskv_error *error);

#endif
