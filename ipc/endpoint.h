/* Endpoint: where the server listens.  Checks what was asked for, and owns the file of an ipc socket.  Knows no ZeroMQ.
 */
#ifndef DSKV_IPC_ENDPOINT_H
#define DSKV_IPC_ENDPOINT_H

#include "base/status.h"

#include <sys/types.h>

struct dskv_endpoint {
    char *address; /* as it is bound; numeric for tcp */
    char *path;    /* of an ipc socket, in address; null for tcp */
    int is_bound;
    dev_t device; /* of the socket's file, once bound */
    ino_t inode;
};

/* Takes "tcp://HOST:PORT" and "ipc:///PATH".  DSKV_EXIT_USAGE for anything else, and for an address that other machines
 * can reach unless insecure is set; DSKV_EXIT_ENDPOINT when the path is a file, or the socket of a server that listens.
 */
enum dskv_exit dskv_endpoint_open(const char *text, int insecure, struct dskv_endpoint *endpoint,
                                  struct dskv_error *error);
/* After it was bound: remembers the file.  DSKV_EXIT_ENDPOINT when there is none. */
enum dskv_exit dskv_endpoint_bound(struct dskv_endpoint *endpoint, struct dskv_error *error);
/* Removes the socket's file, if it is still ours, and frees. */
void dskv_endpoint_close(struct dskv_endpoint *endpoint);

#endif
