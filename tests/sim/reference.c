#include "sim/reference.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

void reference_free(struct reference *r)
{
    free(r->tokens);
    free(r->kv);
    free(r->chains);
    *r = (struct reference){0};
}

static void make_room(struct reference *r, int32_t n)
{
    if (n <= r->capacity)
        return;
    r->capacity = n * 2;
    r->tokens = dskv_realloc(r->tokens, (size_t)r->capacity, sizeof *r->tokens);
    r->kv = dskv_realloc(r->kv, (size_t)r->capacity, sizeof *r->kv);
    r->chains = dskv_realloc(r->chains, (size_t)r->capacity + 1, sizeof *r->chains);
    r->chains[0] = 0;
}

struct reference reference_of(const struct reference *from, int32_t length)
{
    struct reference r = {0};
    DSKV_ASSERT(length >= 0 && length <= from->n, "%d of %d", length, from->n);
    make_room(&r, length + 1);
    r.n = length;
    if (length) {
        memcpy(r.tokens, from->tokens, (size_t)length * sizeof *r.tokens);
        memcpy(r.kv, from->kv, (size_t)length * sizeof *r.kv);
        memcpy(r.chains, from->chains, ((size_t)length + 1) * sizeof *r.chains);
    }
    return r;
}

void reference_append_stored(struct reference *r, int32_t token, const struct fake_kv *kv)
{
    make_room(r, r->n + 1);
    r->tokens[r->n] = token;
    r->kv[r->n] = *kv;
    r->chains[r->n + 1] = fake_chain(r->chains[r->n], kv);
    r->n++;
}

void reference_append(struct reference *r, const int32_t *tokens, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        struct fake_kv kv;
        make_room(r, r->n + 1);
        fake_store(r->chains[r->n], tokens[i], r->n, &kv);
        reference_append_stored(r, tokens[i], &kv);
    }
}

int reference_row(const struct reference *r, int32_t i, float logits[FAKE_VOCAB])
{
    DSKV_ASSERT(i >= 0 && i < r->n, "row %d of %d", i, r->n);
    return fake_logits(r->chains[i + 1], r->tokens[i], logits);
}

int32_t reference_next(const struct reference *r, int32_t i)
{
    float logits[FAKE_VOCAB];
    reference_row(r, i, logits);
    return fake_argmax(logits);
}
