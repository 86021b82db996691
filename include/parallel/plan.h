/* Plan: all that one step needs, in one contiguous buffer without pointers.
 *
 * Rank 0 fills it, every rank receives the same bytes, the device gets them in one copy, and the kernels read its
 * sections where they lie.  Section offsets depend on the size bucket alone (powers of two), so that a step allocates
 * nothing and a bucket can be recorded once.  A plan knows no request: only tokens, slots, tables and rows.  It can be
 * validated, hashed, printed, recorded and replayed without a client.
 */
#ifndef DSKV_PARALLEL_PLAN_H
#define DSKV_PARALLEL_PLAN_H

#include "base/status.h"
#include "kernels/ops.h"

#include <stdint.h>
#include <stdio.h>

/* What is wanted of a row (bits). */
enum dskv_row_want {
    DSKV_ROW_LOGITS = 1, /* the whole row, f32 */
    DSKV_ROW_ARGMAX = 2,
    DSKV_ROW_TOPK = 4,    /* `topk` best ids and log-probabilities */
    DSKV_ROW_SCORE = 8,   /* log-probability of `target` */
    DSKV_ROW_SAMPLE = 16, /* a token drawn with sampling[i] */
};
/* Of rows with one of these the next step can name the token; with both, it is the sampled one. */
#define DSKV_ROW_DRAWN (DSKV_ROW_ARGMAX | DSKV_ROW_SAMPLE)

/* One row of logits that is wanted: of the step's token `token`. */
struct dskv_plan_row {
    int32_t token;  /* index into the step's tokens */
    uint32_t want;  /* bits of enum dskv_row_want; not 0 */
    int32_t topk;   /* 1 .. DSKV_MAX_TOPK with DSKV_ROW_TOPK, else 0 */
    int32_t target; /* token id with DSKV_ROW_SCORE, else -1 */
};

/* How much a step needs; also the capacities of a bucket. */
struct dskv_plan_sizes {
    int32_t n_tokens; /* rows of the forward pass */
    int32_t n_work;   /* sequences: runs of tokens that share a block table */
    int32_t n_table;  /* block ids of all tables together */
    int32_t n_copies; /* block copies, done before the pass */
    int32_t n_rows;   /* rows of logits wanted */
};

enum dskv_plan_section {
    DSKV_PLAN_IDS,         /* int32 [n_tokens]: token id, or a reference (below) */
    DSKV_PLAN_POSITIONS,   /* int32 [n_tokens] */
    DSKV_PLAN_SLOTS,       /* int32 [n_tokens]: block * block_tokens + place, or -1: write nothing */
    DSKV_PLAN_WORK,        /* struct dskv_attention_work [n_work] */
    DSKV_PLAN_TABLES,      /* int32 [n_table] */
    DSKV_PLAN_COPIES,      /* struct dskv_block_copy [n_copies] */
    DSKV_PLAN_ROWS,        /* struct dskv_plan_row [n_rows] */
    DSKV_PLAN_ROW_TOKENS,  /* int32 [n_rows]: rows[i].token again, dense, as kernels want it */
    DSKV_PLAN_ROW_TARGETS, /* int32 [n_rows]: rows[i].target again, dense */
    DSKV_PLAN_SAMPLING,    /* struct dskv_sampling [n_rows]; zero where DSKV_ROW_SAMPLE is not set */
    DSKV_PLAN_RESERVED,    /* empty; masks, tree parents and adapters will live here */
    DSKV_PLAN_N_SECTIONS
};

/* A reference: an id of -1 - row stands for the token that this row (DSKV_ROW_DRAWN) of the step before draws. */
static inline int32_t dskv_plan_reference(int32_t row)
{
    return -1 - row;
}
/* The row that an id refers to; below 0 when it is a token's. */
static inline int32_t dskv_plan_reference_row(int32_t id)
{
    return -1 - id;
}

#define DSKV_PLAN_MAGIC 0x504b5344u /* "DSKP" */
#define DSKV_PLAN_VERSION 1

struct dskv_plan {
    uint32_t magic, version;
    uint64_t step;                         /* counts from 1 */
    uint64_t bytes;                        /* of the whole buffer in this bucket */
    struct dskv_plan_sizes used, capacity; /* capacity: the bucket */
    uint32_t offset[DSKV_PLAN_N_SECTIONS]; /* bytes from the plan's start, multiples of 64 */
    uint32_t reserved[3];
};

/* Bytes of the bucket that holds `need`. */
size_t dskv_plan_bytes(const struct dskv_plan_sizes *need);
/* Makes `memory` (64-byte aligned, at least dskv_plan_bytes(need)) an empty plan: used is 0, all sections zero. */
struct dskv_plan *dskv_plan_begin(void *memory, size_t memory_bytes, const struct dskv_plan_sizes *need, uint64_t step);

/* Appends; asserts that the bucket holds it.  dskv_plan_add_work takes tokens [used.n_tokens, + n_tokens) which it
 * appends itself: ids[n_tokens] at positions start, start + 1, ...; slots[n_tokens] or null for all -1; the table of
 * n_blocks ids covers keys 0 .. start + n_tokens - 1.  Returns the index of its first token. */
int32_t dskv_plan_add_work(struct dskv_plan *plan, const int32_t *ids, const int32_t *slots, int32_t n_tokens,
                           int32_t start, const int32_t *table, int32_t n_blocks);
void dskv_plan_add_copy(struct dskv_plan *plan, int32_t src, int32_t dst, int32_t n_tokens);
/* sampling is looked at when want has DSKV_ROW_SAMPLE, else it may be null.  Returns the row's index. */
int32_t dskv_plan_add_row(struct dskv_plan *plan, const struct dskv_plan_row *row,
                          const struct dskv_sampling *sampling);

/* Sections; memory is the plan's own. */
const int32_t *dskv_plan_ids(const struct dskv_plan *plan);
const int32_t *dskv_plan_positions(const struct dskv_plan *plan);
const int32_t *dskv_plan_slots(const struct dskv_plan *plan);
const struct dskv_attention_work *dskv_plan_work(const struct dskv_plan *plan);
const int32_t *dskv_plan_tables(const struct dskv_plan *plan);
const struct dskv_block_copy *dskv_plan_copies(const struct dskv_plan *plan);
const struct dskv_plan_row *dskv_plan_rows(const struct dskv_plan *plan);
const int32_t *dskv_plan_row_tokens(const struct dskv_plan *plan);
const int32_t *dskv_plan_row_targets(const struct dskv_plan *plan);
const struct dskv_sampling *dskv_plan_sampling(const struct dskv_plan *plan);

/* What a plan may name on this engine. */
struct dskv_plan_bounds {
    int32_t vocab, max_context, n_blocks, block_tokens;
    int32_t max_tokens,
        max_sequences; /* the engine's --max-batch-tokens (+ one re-run row per sequence) and --max-sequences */
};
/* Checks magic, sizes, offsets and every index; for plans that come from a file.  before: the plan of the step before,
 * valid itself, whose rows references may name; null: there is none.  DSKV_BAD_VALUE with a sentence. */
enum dskv_code dskv_plan_validate(const void *memory, size_t bytes, const struct dskv_plan_bounds *bounds,
                                  const struct dskv_plan *before, struct dskv_error *error);
/* 64-bit hash of the used parts. */
uint64_t dskv_plan_hash(const struct dskv_plan *plan);
/* Readable text, every section. */
void dskv_plan_print(const struct dskv_plan *plan, FILE *out);
/* Appends the plan to a trace file, or reads the next one into memory that it allocates (*plan null at the end of the
 * file). */
enum dskv_code dskv_plan_record(const struct dskv_plan *plan, FILE *out, struct dskv_error *error);
enum dskv_code dskv_plan_read(FILE *in, struct dskv_plan **plan, struct dskv_error *error);

#endif
