/* Scheduler: which sequences run in the next step, and how many of their tokens.
 *
 * Requests wait in a ring of groups, one per request, so that a request with many sequences cannot crowd out one with
 * few: groups that were served go to the ring's end.  Short runs (decode, verification, the end of a prompt) come
 * first, because somebody waits for each of their tokens; what is left of the step's budget goes to long ones.  While
 * long ones wait, short ones leave them a part of it, and where it is too small to be parted the two kinds take turns.
 * Knows sequences only by what waits in them; knows no plan, no engine and no request.
 */
#ifndef DSKV_DAEMON_SCHEDULER_H
#define DSKV_DAEMON_SCHEDULER_H

#include "daemon/sequence.h"

/* A run of at most this many tokens is short. */
#define DSKV_SHORT_RUN 16

struct dskv_group {
    struct dskv_sequence **sequences; /* [n_sequences], the owner's; finished ones may stay */
    int32_t n_sequences;
    struct dskv_group *previous, *next; /* of the ring; null when not in it */
    int served;                         /* by the step being picked */
};

struct dskv_step_limits {
    int32_t max_tokens;     /* rows of the pass */
    int32_t max_sequences;  /* runs */
    int32_t max_logit_rows; /* rows that want whole logits */
};

struct dskv_pick {
    struct dskv_sequence *sequence;
    int32_t n_tokens;
};

struct dskv_scheduler {
    struct dskv_step_limits limits;
    struct dskv_group ring; /* its head */
    int long_waited;        /* the last step gave long runs nothing although some waited */
};

void dskv_scheduler_open(struct dskv_scheduler *scheduler, const struct dskv_step_limits *limits);
void dskv_scheduler_add(struct dskv_scheduler *scheduler, struct dskv_group *group);
/* Harmless when it is in no ring. */
void dskv_scheduler_remove(struct dskv_group *group);
/* Fills picks[limits.max_sequences]; returns how many, 0 when nothing waits. */
int32_t dskv_scheduler_pick(struct dskv_scheduler *scheduler, struct dskv_pick *picks);
/* Sequences in the ring with tokens that wait or whose step has not ended. */
int64_t dskv_scheduler_active(const struct dskv_scheduler *scheduler);

#endif
