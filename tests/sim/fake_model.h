/* Fake model: a toy with a transformer's data flow and none of its arithmetic.
 *
 * Like a real one, the keys and values of a token are a function of the token, its position and the *stored* keys and
 * values before it, and its row of logits of all of them; unlike a real one, any change of any stored bit changes
 * everything after it.  So a slot that was overwritten, mixed up or forgotten shows in the next row.
 */
#ifndef DSKV_TESTS_SIM_FAKE_MODEL_H
#define DSKV_TESTS_SIM_FAKE_MODEL_H

#include "parallel/engine.h"

#include <stdint.h>

#define FAKE_VOCAB 61
#define FAKE_LAYERS 2
#define FAKE_KV_HEADS 2
#define FAKE_HEAD_DIM 2
#define FAKE_END_TOKEN 7
#define FAKE_BAD_TOKEN (FAKE_VOCAB - 1) /* its row is not finite */

/* What is stored for a token: [layer][k|v][head][dim]; all values are exact in f16. */
struct fake_kv {
    float values[FAKE_LAYERS][2][FAKE_KV_HEADS][FAKE_HEAD_DIM];
};

/* Extends a hash over stored tokens by one; the hash of none is 0. */
uint64_t fake_chain(uint64_t chain, const struct fake_kv *kv);
/* What is stored for a token at a position after stored tokens of this hash. */
void fake_store(uint64_t chain, int32_t token, int32_t position, struct fake_kv *kv);
/* The row after stored tokens of this hash, the last of them `token`; returns 0 when it is not finite. */
int fake_logits(uint64_t chain, int32_t token, float logits[FAKE_VOCAB]);

int32_t fake_argmax(const float logits[FAKE_VOCAB]);
float fake_score(const float logits[FAKE_VOCAB], int32_t target);
void fake_topk(const float logits[FAKE_VOCAB], int32_t k, int32_t *ids, float *logprobs);
int32_t fake_sample(const float logits[FAKE_VOCAB], const struct dskv_sampling *sampling);

#endif
