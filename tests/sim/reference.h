/* Reference: what a cache must hold and which rows must follow from it, by the fake model alone: no blocks, no steps.
 */
#ifndef DSKV_TESTS_SIM_REFERENCE_H
#define DSKV_TESTS_SIM_REFERENCE_H

#include "sim/fake_model.h"

struct reference {
    int32_t n, capacity;
    int32_t *tokens;    /* [n] */
    struct fake_kv *kv; /* [n] */
    uint64_t *chains;   /* [n + 1]: the hash over the first i stored tokens */
};

/* {0} is the empty one. */
void reference_free(struct reference *r);
/* The first `length` of `from`. */
struct reference reference_of(const struct reference *from, int32_t length);
void reference_append(struct reference *r, const int32_t *tokens, int32_t n);
/* One token with given keys and values instead of computed ones. */
void reference_append_stored(struct reference *r, int32_t token, const struct fake_kv *kv);
/* The row of token i; returns 0 when it is not finite. */
int reference_row(const struct reference *r, int32_t i, float logits[FAKE_VOCAB]);
/* The best token after token i. */
int32_t reference_next(const struct reference *r, int32_t i);

#endif
