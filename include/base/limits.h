/* Maxima that users or several rooms meet.  What clients must know of them is announced by `info` and `hello`. */
#ifndef DSKV_BASE_LIMITS_H
#define DSKV_BASE_LIMITS_H

/* Model shapes: what a config.json may say at most. */
#define DSKV_MAX_LAYERS 1024
#define DSKV_MAX_WIDTH 65536
#define DSKV_MAX_HEADS 1024
#define DSKV_MAX_HEAD_DIM 256
#define DSKV_MAX_VOCAB (1 << 22)
#define DSKV_MAX_CONTEXT (1 << 24)
#define DSKV_MAX_END_TOKENS 32

/* The job. */
#define DSKV_MAX_RANKS 64
#define DSKV_LOST_TEXT 96        /* what is said of a rank that is lost */
#define DSKV_MAX_STEP_ROWS 65535 /* tokens and sequences of a step together; a GPU's grid has no more rows */

/* MLP columns and vocabulary are split over ranks in units of this many. */
#define DSKV_SPLIT_UNIT 64

/* Files. */
#define DSKV_MAX_JSON_BYTES (64 << 20)
#define DSKV_MAX_SAFETENSORS_HEADER_BYTES 100000000
#define DSKV_MAX_WEIGHT_FILES 1024

/* The pool. */
#define DSKV_MIN_BLOCK_TOKENS 16
#define DSKV_MAX_BLOCK_TOKENS 256
#define DSKV_MAX_BLOCKS (1 << 22)

/* Keys are split into pieces of this many at fixed absolute positions; see kernels/ops.h. */
#define DSKV_KEY_PIECE 64

/* Messages. */
#define DSKV_MAX_HEADER_BYTES (1 << 20)           /* the msgpack frame of a message */
#define DSKV_MAX_HEADER_DEPTH 8                   /* nesting of maps and arrays in it */
#define DSKV_MAX_HEADER_VALUES (1 << 17)          /* values in it, keys included */
#define DSKV_MAX_FRAME_BYTES (8 << 20)            /* one frame of a message, either direction */
#define DSKV_MAX_FRAMES 5200                      /* frames of one message: 1024 sequences with five outputs each */
#define DSKV_MAX_REQUEST_BYTES (32 << 20)         /* all frames of one request */
#define DSKV_MAX_REPLY_BYTES (256 << 20)          /* all tensors of one reply, over its messages */
#define DSKV_PART_BYTES (1 << 20)                 /* large tensors travel in parts of about this many bytes */
#define DSKV_MAX_SEQUENCES_PER_REQUEST 1024       /* forward with many sequences */
#define DSKV_MAX_TOPK 256                         /* `topk` of a forward */
#define DSKV_MAX_STOPS 64                         /* stop sequences of a generate */
#define DSKV_MAX_STOP_TOKENS 64                   /* tokens of one stop sequence */
#define DSKV_MAX_FREE_IDS 4096                    /* ids in one free list */
#define DSKV_MAX_CREDITS 16                       /* parts in flight of one export or import */
#define DSKV_MAX_ROUTE_BYTES 255                  /* a ZeroMQ routing id */
#define DSKV_MAX_CLIENT_BACKLOG_BYTES (320 << 20) /* replies that wait for one client that does not read */
#define DSKV_MAX_BACKLOG_BYTES (1 << 30)          /* replies that wait for all clients together */
#define DSKV_MAX_QUEUED_BYTES (256 << 20) /* tensors and ids of requests accepted and not finished; more are `busy` */
#define DSKV_MAX_QUEUED_REQUESTS 4096     /* requests accepted and not finished; more are `busy` */
#define DSKV_MAX_QUEUED_FOLLOWERS 64      /* messages that wait for one request; more are `busy` */
#define DSKV_MAX_QUEUED_NOTES 4096        /* what pings and the like leave to be done; more are `busy` */
#define DSKV_MAX_SESSIONS 4096
#define DSKV_MAX_CACHES (1 << 20)

#endif
