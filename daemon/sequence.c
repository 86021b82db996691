#include "daemon/sequence.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

struct dskv_sequence *dskv_sequence_open(struct dskv_blocks *blocks, const struct dskv_cache *prefix,
                                         int32_t prefix_length, const int32_t *tokens, int32_t n_tokens, int32_t n_most,
                                         int rerun)
{
    DSKV_ASSERT(prefix_length >= 0 && prefix_length <= (prefix ? prefix->length : 0) && n_most >= n_tokens &&
                    !(rerun && !prefix_length),
                "prefix %d, %d tokens, at most %d, rerun %d", prefix_length, n_tokens, n_most, rerun);
    struct dskv_sequence *sequence = dskv_calloc(1, sizeof *sequence);
    sequence->blocks = blocks;
    sequence->prefix_length = prefix_length;
    sequence->n_blocks = sequence->table_capacity = dskv_blocks_for(blocks, prefix_length);
    sequence->table = dskv_calloc((size_t)sequence->n_blocks, sizeof *sequence->table);
    sequence->n_needed = dskv_blocks_for(blocks, prefix_length + n_most) - sequence->n_blocks;
    int32_t used = prefix_length % dskv_blocks_block_tokens(blocks);
    if (used && n_most) {
        int32_t last = prefix->blocks[sequence->n_blocks - 1];
        sequence->speaks_for_last = dskv_blocks_claim(blocks, last, used, prefix->length == prefix_length);
        sequence->copies_last = !sequence->speaks_for_last;
        sequence->n_needed += sequence->copies_last;
    }
    for (int32_t i = 0; i < sequence->n_blocks; i++) {
        sequence->table[i] = prefix->blocks[i];
        dskv_blocks_hold(blocks, sequence->table[i]);
    }
    sequence->n_input = sequence->n_known = sequence->input_capacity = n_tokens;
    sequence->input = dskv_calloc((size_t)n_tokens, sizeof *sequence->input);
    if (n_tokens)
        memcpy(sequence->input, tokens, (size_t)n_tokens * sizeof *tokens);
    sequence->next = sequence->completed = rerun ? -1 : 0;
    return sequence;
}

/* Gives back the claims and reservations, not the blocks. */
static void give_up_promises(struct dskv_sequence *sequence)
{
    dskv_blocks_unreserve(sequence->blocks, sequence->n_reserved);
    sequence->n_reserved = 0;
}

void dskv_sequence_close(struct dskv_sequence **sequence)
{
    struct dskv_sequence *s = *sequence;
    if (!s)
        return;
    give_up_promises(s);
    if (s->speaks_for_last)
        dskv_blocks_set_mark(s->blocks, s->table[dskv_blocks_for(s->blocks, s->prefix_length) - 1],
                             s->prefix_length % dskv_blocks_block_tokens(s->blocks));
    for (int32_t i = s->n_blocks; i-- > 0;)
        dskv_blocks_release(s->blocks, s->table[i]);
    free(s->table);
    free(s->input);
    free(s);
    *sequence = NULL;
}

static void append_input(struct dskv_sequence *sequence, int32_t id)
{
    if (sequence->n_input == sequence->input_capacity) {
        sequence->input_capacity = sequence->input_capacity * 2 + 16;
        sequence->input = dskv_realloc(sequence->input, (size_t)sequence->input_capacity, sizeof *sequence->input);
    }
    sequence->input[sequence->n_input++] = id;
}

/* Where the blocks note the token of an input number (-1: of the prefix's last). */
static int32_t *noted_token(const struct dskv_sequence *sequence, int32_t number)
{
    int32_t block_tokens = dskv_blocks_block_tokens(sequence->blocks);
    int32_t position = sequence->prefix_length + number;
    return &dskv_blocks_tokens(sequence->blocks, sequence->table[position / block_tokens])[position % block_tokens];
}

void dskv_sequence_expect(struct dskv_sequence *sequence, int32_t reference)
{
    DSKV_ASSERT(reference < 0 && !dskv_sequence_waiting(sequence), "%d is expected after %d tokens, %d wait", reference,
                sequence->n_input, dskv_sequence_waiting(sequence));
    append_input(sequence, reference);
}

void dskv_sequence_push(struct dskv_sequence *sequence, int32_t token)
{
    if (sequence->n_known == sequence->n_input)
        append_input(sequence, token);
    else if (sequence->n_known < sequence->next) /* submitted by its reference */
        *noted_token(sequence, sequence->n_known) = token;
    sequence->input[sequence->n_known++] = token;
}

int32_t dskv_sequence_waiting(const struct dskv_sequence *sequence)
{
    return sequence->n_input - sequence->next;
}

int dskv_sequence_row(const struct dskv_sequence *sequence, int32_t number, struct dskv_plan_row *row,
                      struct dskv_sampling *sampling)
{
    const struct dskv_sequence_wants *wants = &sequence->wants;
    *row = (struct dskv_plan_row){.target = -1};
    if (number >= wants->logits_from && number < wants->logits_to)
        row->want |= DSKV_ROW_LOGITS;
    if (number >= wants->bits_from)
        row->want |= wants->bits;
    if (wants->score && number + 1 < sequence->n_input) {
        row->want |= DSKV_ROW_SCORE;
        row->target = sequence->input[number + 1];
    }
    if (row->want & DSKV_ROW_TOPK)
        row->topk = wants->topk;
    *sampling = wants->sampling;
    sampling->position = sequence->prefix_length + number + 1; /* of the token that the row predicts */
    return row->want != 0;
}

static void append_block(struct dskv_sequence *sequence)
{
    if (sequence->n_blocks == sequence->table_capacity) {
        sequence->table_capacity = sequence->table_capacity * 2 + 4;
        sequence->table = dskv_realloc(sequence->table, (size_t)sequence->table_capacity, sizeof *sequence->table);
    }
    DSKV_ASSERT(sequence->n_reserved > 0, "a sequence of %d blocks has none left", sequence->n_blocks);
    sequence->n_reserved--;
    sequence->table[sequence->n_blocks++] = dskv_blocks_take(sequence->blocks);
}

/* Puts a copy of the prefix's last block in its place. */
static void copy_last(struct dskv_sequence *sequence, struct dskv_block_copy *copy)
{
    int32_t used = sequence->prefix_length % dskv_blocks_block_tokens(sequence->blocks);
    int32_t source = sequence->table[--sequence->n_blocks];
    append_block(sequence);
    int32_t target = sequence->table[sequence->n_blocks - 1];
    memcpy(dskv_blocks_tokens(sequence->blocks, target), dskv_blocks_tokens(sequence->blocks, source),
           (size_t)used * sizeof(int32_t));
    *copy = (struct dskv_block_copy){.src = source, .dst = target, .n_tokens = used};
    sequence->copies_last = 0;
    sequence->speaks_for_last = 1; /* the copy is its own */
}

int dskv_sequence_grow(struct dskv_sequence *sequence, int32_t n, struct dskv_block_copy *copy)
{
    DSKV_ASSERT(n > 0 && n <= dskv_sequence_waiting(sequence), "%d tokens of %d", n, dskv_sequence_waiting(sequence));
    int32_t n_written = sequence->next + n; /* after the prefix, when these are done */
    int copied = n_written > 0 && sequence->copies_last;
    if (copied)
        copy_last(sequence, copy);
    while (sequence->n_blocks < dskv_blocks_for(sequence->blocks, sequence->prefix_length + n_written))
        append_block(sequence);
    return copied;
}

void dskv_sequence_fill(struct dskv_sequence *sequence, int32_t n, int32_t *ids, int32_t *slots)
{
    int32_t block_tokens = dskv_blocks_block_tokens(sequence->blocks);
    for (int32_t i = 0; i < n; i++) {
        int32_t number = sequence->next + i;
        int32_t position = sequence->prefix_length + number, place = position % block_tokens;
        int32_t block = sequence->table[position / block_tokens];
        int32_t *noted = noted_token(sequence, number);
        if (number < 0) {
            ids[i] = *noted;
            slots[i] = -1;
        } else {
            *noted = ids[i] = sequence->input[number];
            slots[i] = block * block_tokens + place;
        }
    }
}

int32_t dskv_sequence_position(const struct dskv_sequence *sequence)
{
    return sequence->prefix_length + sequence->next;
}

void dskv_sequence_advance(struct dskv_sequence *sequence, int32_t n)
{
    sequence->next += n;
}

void dskv_sequence_complete(struct dskv_sequence *sequence, int32_t n)
{
    DSKV_ASSERT(n <= sequence->next - sequence->completed, "%d tokens, %d are under way", n,
                sequence->next - sequence->completed);
    sequence->completed += n;
    sequence->n_computed += n;
}

int32_t dskv_sequence_stored(const struct dskv_sequence *sequence)
{
    return sequence->completed > 0 ? sequence->completed : 0;
}

int32_t *dskv_sequence_end(struct dskv_sequence *sequence, int32_t length, int32_t *n_blocks)
{
    int32_t n_stored = dskv_sequence_stored(sequence);
    DSKV_ASSERT(length >= sequence->prefix_length && length <= sequence->prefix_length + n_stored,
                "a cache of %d tokens from a prefix of %d and %d more", length, sequence->prefix_length, n_stored);
    give_up_promises(sequence);
    int32_t n = dskv_blocks_for(sequence->blocks, length);
    while (sequence->n_blocks > n)
        dskv_blocks_release(sequence->blocks, sequence->table[--sequence->n_blocks]);
    int32_t used = length - (n - 1) * dskv_blocks_block_tokens(sequence->blocks); /* of the last block */
    int own_last = n > dskv_blocks_for(sequence->blocks, sequence->prefix_length);
    if (n && (own_last || sequence->speaks_for_last))
        dskv_blocks_set_mark(sequence->blocks, sequence->table[n - 1], used);
    int32_t *table = dskv_realloc(sequence->table, (size_t)n, sizeof *table);
    *n_blocks = n;
    sequence->table = NULL;
    sequence->n_blocks = sequence->table_capacity = 0;
    sequence->speaks_for_last = 0;
    return table;
}
