/* A small server for tests of the C client: the protocol's other side, with a toy in the model's place.
 *
 * Owns a thread, a transport on an ipc endpoint of its own, and caches as lists of tokens.  The row after position p is
 * toy_logit(token, p, i); the keys and values are toy_kv(...): a client can tell a right answer from a wrong one by
 * hand.
 */
#ifndef DSKV_TESTS_TEST_CLIENT_SERVER_H
#define DSKV_TESTS_TEST_CLIENT_SERVER_H

#include "ipc/message.h"

#include <stdint.h>

enum { TOY_VOCAB = 40000, TOY_LAYERS = 2, TOY_HEADS = 3, TOY_HEAD_DIM = 4, TOY_PART_TOKENS = 5, TOY_FREE_IDS = 8 };

static inline float toy_logit(int32_t token, int32_t position, int32_t id)
{
    return (float)((token * 7 + position * 3 + id * 11) % 1009);
}
/* The lowest id of the largest logit. */
int32_t toy_next(int32_t token, int32_t position);
static inline float toy_kv(int32_t layer, int is_value, int32_t head, int32_t position, int32_t dim)
{
    return (float)(layer * 10000 + is_value * 5000 + head * 1000 + position * 10 + dim);
}

/* What the server does instead of answering properly. */
enum toy_mood {
    TOY_WELL,
    TOY_SILENT,        /* takes requests in and says nothing */
    TOY_LATE,          /* answers only when the next request has come */
    TOY_MUMBLES,       /* sends bytes that are no event */
    TOY_SHORT_CHANGES, /* forward: fewer rows than were asked for */
    TOY_SKIPS_PARTS,   /* export: leaves one part out */
    TOY_REFUSES_PART,  /* import: answers the second part with an error of the part's own id */
    TOY_ENDS_IMPORT,   /* import: refuses the second part as too late, then tells the import's own error */
    TOY_NO_SESSION,    /* has forgotten the session */
    TOY_FULL,          /* forward: pool_full with numbers, index 1 */
};

struct toy_server;

struct toy_server *toy_server_open(void);
/* Ends every connection and listens again at the same place. */
void toy_server_restart(struct toy_server *server);
void toy_server_close(struct toy_server **server);
const char *toy_server_endpoint(const struct toy_server *server);
void toy_server_set(struct toy_server *server, enum toy_mood mood);
/* Counts, for the tests' own checks. */
int toy_server_caches(struct toy_server *server);   /* alive */
int toy_server_cancels(struct toy_server *server);  /* cancel requests */
int toy_server_requests(struct toy_server *server); /* of any kind */
int toy_server_hellos(struct toy_server *server);

#endif
