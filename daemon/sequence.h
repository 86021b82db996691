/* Sequence: a run of tokens that is appended to a prefix, over as many steps as it takes.
 *
 * Owns its block table (each block held), its input tokens and how far they have been run.  Input tokens are counted
 * from 0; number -1 is the prefix's last token, run again without writing when its row is needed.  Knows blocks, no
 * requests and no plans: a step asks it to grow, then to say what its next rows are.
 *
 * Tokens are submitted, then completed when their step has ended; what is told of a sequence, and the cache that it
 * becomes, are of completed ones.  A sequence may end while a step with its tokens is under way: their slots lie past
 * its end and so are nobody's, and whoever writes there next does so in a later step.
 */
#ifndef DSKV_DAEMON_SEQUENCE_H
#define DSKV_DAEMON_SEQUENCE_H

#include "daemon/cache.h"
#include "parallel/plan.h"

/* Which rows are wanted; numbers count like input tokens, ranges are [from, to). */
struct dskv_sequence_wants {
    int32_t logits_from, logits_to; /* whole rows of logits */
    uint32_t bits;                  /* DSKV_ROW_ARGMAX, _TOPK, _SAMPLE: wanted of every row from bits_from on */
    int32_t bits_from;
    int32_t topk;
    int score;                     /* the row before each input token scores it */
    struct dskv_sampling sampling; /* position is filled in per row */
};

struct dskv_sequence {
    struct dskv_blocks *blocks;
    int32_t *table; /* [n_blocks] */
    int32_t n_blocks, table_capacity;
    int32_t prefix_length;
    int32_t n_needed;    /* blocks that it may take at most; to be reserved before its first step */
    int32_t n_reserved;  /* of them still promised */
    int speaks_for_last; /* the partly filled block at the prefix's end is written in place ... */
    int copies_last;     /* ... or is to be copied before the first write */
    int32_t *input;      /* [n_input] token ids; from n_known on references to rows of the step before */
    int32_t n_input, n_known, input_capacity;
    int32_t next;       /* number of the first token that was not submitted: -1 .. n_input */
    int32_t completed;  /* number of the first token whose step has not ended: -1 .. next */
    int32_t n_computed; /* tokens completed, number -1 included */
    struct dskv_sequence_wants wants;
    int32_t index; /* of the request's sequences */
    void *owner;   /* whoever takes its rows */
};

/* A sequence over the first prefix_length tokens of `prefix` (null: none), which must hold as many.  n_most is the most
 * tokens that it will ever store after the prefix; rerun: number -1 is run first.  Tokens are copied.  The caller
 * reserves n_needed blocks, sets n_reserved to it, and fills wants, index, owner. */
struct dskv_sequence *dskv_sequence_open(struct dskv_blocks *blocks, const struct dskv_cache *prefix,
                                         int32_t prefix_length, const int32_t *tokens, int32_t n_tokens, int32_t n_most,
                                         int rerun);
/* Gives up what is left: blocks, claims and reservations. */
void dskv_sequence_close(struct dskv_sequence **sequence);
/* One more input token that is not known yet: a reference to the row, of the step submitted last, that draws it.  It is
 * known before the second next step is submitted. */
void dskv_sequence_expect(struct dskv_sequence *sequence, int32_t reference);
/* One more input token is known: the first that was expected, else a new one. */
void dskv_sequence_push(struct dskv_sequence *sequence, int32_t token);

/* Tokens that wait to be submitted. */
int32_t dskv_sequence_waiting(const struct dskv_sequence *sequence);
/* What is wanted of row `number`; its `token` is left to the step.  Returns 0 when nothing is. */
int dskv_sequence_row(const struct dskv_sequence *sequence, int32_t number, struct dskv_plan_row *row,
                      struct dskv_sampling *sampling);

/* Makes room in the table for the next n tokens.  Returns 1 when a block copy has to come before them: its source stays
 * held until the caller releases it when the step is submitted: what is submitted later reuses it later. */
int dskv_sequence_grow(struct dskv_sequence *sequence, int32_t n, struct dskv_block_copy *copy);
/* The next n tokens after grow: their ids, and the slots that they are written to; notes the tokens in the blocks. */
void dskv_sequence_fill(struct dskv_sequence *sequence, int32_t n, int32_t *ids, int32_t *slots);
/* Position of the next token. */
int32_t dskv_sequence_position(const struct dskv_sequence *sequence);
/* A step with the next n tokens was submitted. */
void dskv_sequence_advance(struct dskv_sequence *sequence, int32_t n);
/* It has ended. */
void dskv_sequence_complete(struct dskv_sequence *sequence, int32_t n);
/* Tokens that were appended to the prefix, as far as steps have ended. */
int32_t dskv_sequence_stored(const struct dskv_sequence *sequence);

/* Ends it as a cache of `length` tokens (prefix_length .. with all that is stored): hands over the table with its
 * holds, gives up the rest. */
int32_t *dskv_sequence_end(struct dskv_sequence *sequence, int32_t length, int32_t *n_blocks);

#endif
