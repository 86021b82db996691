/* Errors of dskvd, as its protocol, the C client and every part of the daemon name them.
 *
 * An error is a value: a code, one sentence for a person, and details for a program.  A call that fails returns the
 * code, fills the error and has changed nothing.  The names on the wire are the ones in DSKV_CODES (see
 * ipc/PROTOCOL.md).
 */
#ifndef DSKV_ERROR_H
#define DSKV_ERROR_H

#include <stdint.h>

/* What libdskv exports. */
#define DSKV_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* X(constant, name on the wire, when) */
#define DSKV_CODES(X)                                                                                                  \
    X(DSKV_BAD_MESSAGE, "bad_message", "the message is not well-formed")                                               \
    X(DSKV_UNKNOWN_OPERATION, "unknown_operation", "no operation has this name")                                       \
    X(DSKV_UNKNOWN_FIELD, "unknown_field", "the operation has no such field")                                          \
    X(DSKV_BAD_TYPE, "bad_type", "a field has the wrong type")                                                         \
    X(DSKV_BAD_VALUE, "bad_value", "a field's value is not allowed")                                                   \
    X(DSKV_TOKEN_OUT_OF_RANGE, "token_out_of_range", "a token id is not in the vocabulary")                            \
    X(DSKV_EMPTY_REQUEST, "empty_request", "neither tokens nor a prefix")                                              \
    X(DSKV_NO_ROW, "no_row", "outputs were asked for, but there is no token to give them")                             \
    X(DSKV_TOO_LONG, "too_long", "prefix and tokens exceed the context limit")                                         \
    X(DSKV_UNKNOWN_CACHE, "unknown_cache", "the cache was freed or never existed")                                     \
    X(DSKV_CUT_PAST_END, "cut_past_end", "the prefix is longer than the cache")                                        \
    X(DSKV_POOL_FULL, "pool_full", "not enough free blocks")                                                           \
    X(DSKV_BUSY, "busy", "too much work is queued")                                                                    \
    X(DSKV_WRONG_DTYPE, "wrong_dtype", "a tensor has another dtype than the cache")                                    \
    X(DSKV_WRONG_SHAPE, "wrong_shape", "a tensor has the wrong shape")                                                 \
    X(DSKV_WRONG_MODEL, "wrong_model", "the tensors come from another model")                                          \
    X(DSKV_NOT_FINITE, "not_finite", "a value is infinite or not a number")                                            \
    X(DSKV_REPLY_TOO_LARGE, "reply_too_large", "the reply would exceed the limit")                                     \
    X(DSKV_UNSUPPORTED, "unsupported", "this server cannot do that")                                                   \
    X(DSKV_DRAINING, "draining", "the server takes no new work")                                                       \
    X(DSKV_DEADLINE, "deadline", "the request's deadline has passed")                                                  \
    X(DSKV_CANCELLED, "cancelled", "the request was cancelled")                                                        \
    X(DSKV_TIMEOUT, "timeout", "no reply within the client's time-out")                                                \
    X(DSKV_UNREACHABLE, "unreachable", "the server cannot be reached")                                                 \
    X(DSKV_VERSION_MISMATCH, "version_mismatch", "no protocol version in common")                                      \
    X(DSKV_INTERNAL, "internal", "a failure inside the server")

enum dskv_code {
    DSKV_OK = 0,
#define DSKV_CODE_ENUM(constant, name, when) constant,
    DSKV_CODES(DSKV_CODE_ENUM)
#undef DSKV_CODE_ENUM
        DSKV_N_CODES
};

/* The name on the wire ("pool_full"), "ok" for DSKV_OK.  Never null for a valid code. */
DSKV_API const char *dskv_code_name(enum dskv_code code);

/* Which details of an error are set. */
enum dskv_detail {
    DSKV_HAS_NEEDED = 1 << 0, /* blocks, bytes or rows that the request needs */
    DSKV_HAS_FREE = 1 << 1,   /* how many of them are free */
    DSKV_HAS_LIMIT = 1 << 2,  /* the limit that was exceeded */
    DSKV_HAS_LENGTH = 1 << 3, /* the length that was found */
    DSKV_HAS_INDEX = 1 << 4,  /* which sequence of the request, which token, which cache */
};

struct dskv_error {
    enum dskv_code code;
    uint32_t has; /* bits of enum dskv_detail; field and valid are set when not empty */
    int64_t needed, free, limit, length, index;
    char message[256]; /* one sentence, UTF-8 */
    char field[64];    /* the field at fault */
    char valid[128];   /* the values that are allowed */
};

#ifdef __cplusplus
}
#endif
#endif
