#include "sim/fake_model.h"

#include <math.h>
#include <string.h>

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

uint64_t fake_chain(uint64_t chain, const struct fake_kv *kv)
{
    uint32_t bits[sizeof *kv / 4];
    memcpy(bits, kv, sizeof bits);
    for (size_t i = 0; i < sizeof bits / sizeof *bits; i++)
        chain = mix(chain + bits[i] + 1);
    return chain;
}

void fake_store(uint64_t chain, int32_t token, int32_t position, struct fake_kv *kv)
{
    uint64_t seed = mix(chain + (uint64_t)token * 1000003u + (uint64_t)position * 7919u);
    float *values = &kv->values[0][0][0][0];
    for (size_t i = 0; i < sizeof *kv / sizeof *values; i++)
        values[i] = (float)(mix(seed + i) % 1023 + 1) / 512.0f - 1.0f; /* never 0 */
}

int fake_logits(uint64_t chain, int32_t token, float logits[FAKE_VOCAB])
{
    for (int32_t i = 0; i < FAKE_VOCAB; i++)
        logits[i] = (float)(mix(chain ^ (uint64_t)i * 0x9e3779b97f4a7c15u) % 65536) / 4096.0f - 8.0f;
    logits[FAKE_BAD_TOKEN] = -9.0f; /* never drawn */
    if (token == FAKE_BAD_TOKEN)
        logits[3] = INFINITY;
    return token != FAKE_BAD_TOKEN;
}

int32_t fake_argmax(const float logits[FAKE_VOCAB])
{
    int32_t best = 0;
    for (int32_t i = 1; i < FAKE_VOCAB; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

float fake_score(const float logits[FAKE_VOCAB], int32_t target)
{
    double sum = 0;
    for (int32_t i = 0; i < FAKE_VOCAB; i++)
        sum += exp((double)logits[i]);
    return (float)((double)logits[target] - log(sum));
}

void fake_topk(const float logits[FAKE_VOCAB], int32_t k, int32_t *ids, float *logprobs)
{
    char taken[FAKE_VOCAB] = {0};
    for (int32_t rank = 0; rank < k; rank++) {
        int32_t best = -1;
        for (int32_t i = 0; i < FAKE_VOCAB; i++)
            if (!taken[i] && (best < 0 || logits[i] > logits[best]))
                best = i;
        taken[best] = 1;
        ids[rank] = best;
        logprobs[rank] = fake_score(logits, best);
    }
}

int32_t fake_sample(const float logits[FAKE_VOCAB], const struct dskv_sampling *sampling)
{
    uint64_t hash = sampling->seed;
    uint32_t bits;
    if (sampling->temperature == 0)
        return fake_argmax(logits);
    memcpy(&bits, &sampling->temperature, sizeof bits);
    for (int32_t i = 0; i < FAKE_VOCAB; i++)
        hash = mix(hash + (uint64_t)(int64_t)(logits[i] * 4096));
    return (int32_t)(mix(hash + bits + (uint64_t)sampling->position) % FAKE_BAD_TOKEN);
}
