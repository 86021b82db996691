/* Blocks, caches, sequences and the scheduler under random work, against a model that knows every holder and every
 * slot.
 *
 * No thread, no engine: a seed repeats a run exactly.  After every move: each block has as many holders as tables name
 * it, reservations add up, and each cache reads back the very writes that made it.  Steps stay under way for a while,
 * up to two of them; what is read is what a step would read that is submitted next.  Usage: test_bookkeeping [seed
 * [n_moves]].
 */
#include "base/memory.h"
#include "daemon/scheduler.h"
#include "sim/rng.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_BLOCKS 40
#define BLOCK_TOKENS 16
#define MAX_CACHES 40
#define MAX_RUNNING 10
#define MAX_HELD 4
#define MAX_TOKENS 24 /* of a step */
#define MOST 120      /* tokens of a cache */

/* What stands behind a cache or a sequence: a stamp per token, which depends on all tokens before it. */
struct history {
    int32_t n;
    uint64_t stamps[MOST];
};

struct running {
    struct dskv_sequence *sequence;
    struct dskv_group group;
    struct history history; /* of prefix and all input */
    int32_t expected[2];    /* input tokens that the sequence does not know yet */
    int n_expected;
    struct dskv_cache *consumes;
};

/* A step under way: whose tokens it runs. */
struct submitted {
    struct {
        struct running *running; /* null: it has ended */
        int32_t n_tokens;
    } runs[MAX_RUNNING];
    int32_t n_runs;
};

struct held {
    int32_t n_blocks, table[MOST / BLOCK_TOKENS + 1];
    struct history history;
};

struct world {
    struct rng rng;
    struct dskv_blocks *blocks;
    struct dskv_caches *caches;
    struct dskv_sessions *sessions;
    struct dskv_session *session;
    struct dskv_scheduler scheduler;
    struct dskv_cache *cache[MAX_CACHES];
    struct history cache_history[MAX_CACHES];
    struct running running[MAX_RUNNING];
    struct held held[MAX_HELD];               /* exports */
    uint64_t memory[N_BLOCKS * BLOCK_TOKENS]; /* what the ranks' pools hold when all that is submitted has run */
    struct submitted submitted[2];            /* the oldest first */
    int n_submitted;
    int n_full, n_made, n_cut; /* n_cut: ended with tokens under way */
};

static uint64_t stamp_of(const struct history *history, int32_t token)
{
    struct rng rng = {(history->n ? history->stamps[history->n - 1] : 0) ^ (uint64_t)token << 32};
    return rng_next(&rng);
}

static void remember(struct history *history, int32_t token)
{
    history->stamps[history->n] = stamp_of(history, token);
    history->n++;
}

/* ---- checks ----------------------------------------------------------------------------------------------------- */

static void check_reads(const struct world *w, const int32_t *table, const struct history *history, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        uint64_t found = w->memory[table[i / BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS];
        DSKV_ASSERT(found == history->stamps[i], "token %d of %d was overwritten", i, n);
    }
}

static void check_world(const struct world *w)
{
    int32_t holders[N_BLOCKS] = {0}, used = 0, reserved = 0;
    for (int i = 0; i < MAX_CACHES; i++) {
        if (!w->cache[i])
            continue;
        for (int32_t b = 0; b < w->cache[i]->n_blocks; b++)
            holders[w->cache[i]->blocks[b]]++;
        check_reads(w, w->cache[i]->blocks, &w->cache_history[i], w->cache[i]->length);
    }
    for (int i = 0; i < MAX_RUNNING; i++) {
        const struct dskv_sequence *s = w->running[i].sequence;
        if (!s)
            continue;
        reserved += s->n_reserved;
        for (int32_t b = 0; b < s->n_blocks; b++)
            holders[s->table[b]]++;
        check_reads(w, s->table, &w->running[i].history, s->prefix_length + dskv_sequence_stored(s));
    }
    for (int i = 0; i < MAX_HELD; i++) {
        for (int32_t b = 0; b < w->held[i].n_blocks; b++)
            holders[w->held[i].table[b]]++;
        check_reads(w, w->held[i].table, &w->held[i].history, w->held[i].history.n);
    }
    for (int32_t b = 0; b < N_BLOCKS; b++) {
        DSKV_ASSERT(dskv_blocks_holders(w->blocks, b) == holders[b], "block %d has %d holders, %d name it", b,
                    dskv_blocks_holders(w->blocks, b), holders[b]);
        used += holders[b] > 0;
    }
    DSKV_ASSERT(dskv_blocks_used(w->blocks) == used, "%d used, %d named", dskv_blocks_used(w->blocks), used);
    DSKV_ASSERT(dskv_blocks_reserved(w->blocks) == reserved, "%d reserved, %d promised",
                dskv_blocks_reserved(w->blocks), reserved);
    DSKV_ASSERT(used + reserved <= N_BLOCKS, "%d used, %d reserved", used, reserved);
}

/* ---- moves ------------------------------------------------------------------------------------------------------ */

static int pick_cache(struct world *w)
{
    int i = rng_below(&w->rng, MAX_CACHES);
    return w->cache[i] ? i : -1;
}

static void begin_sequence(struct world *w)
{
    struct running *r = &w->running[rng_below(&w->rng, MAX_RUNNING)];
    if (r->sequence)
        return;
    int from = rng_one_in(&w->rng, 4) ? -1 : pick_cache(w);
    struct dskv_cache *prefix = from < 0 ? NULL : w->cache[from];
    int32_t length = !prefix ? 0 : rng_one_in(&w->rng, 2) ? prefix->length : rng_below(&w->rng, prefix->length + 1);
    int32_t tokens[MOST], n = rng_below(&w->rng, rng_one_in(&w->rng, 3) ? MOST - length : 8);
    if (length + n >= MOST || (!n && !length))
        return;
    int32_t n_most = n + (rng_one_in(&w->rng, 2) ? rng_below(&w->rng, MOST - length - n) : 0);
    int rerun = length && (n == 0 || rng_one_in(&w->rng, 4));
    *r = (struct running){0};
    if (prefix) {
        r->history = w->cache_history[from];
        r->history.n = length;
        r->consumes = rng_one_in(&w->rng, 3) ? prefix : NULL;
    }
    for (int32_t i = 0; i < n; i++) {
        tokens[i] = rng_below(&w->rng, 1000);
        remember(&r->history, tokens[i]);
    }
    r->sequence = dskv_sequence_open(w->blocks, prefix, length, tokens, n, n_most, rerun);
    r->group = (struct dskv_group){.sequences = &r->sequence, .n_sequences = 1};
    if (dskv_blocks_reserve(w->blocks, r->sequence->n_needed, NULL)) {
        w->n_full++;
        dskv_sequence_close(&r->sequence);
        return;
    }
    r->sequence->n_reserved = r->sequence->n_needed;
    r->sequence->owner = r;
    dskv_scheduler_add(&w->scheduler, &r->group);
}

static void write_run(struct world *w, const struct dskv_pick *pick)
{
    struct dskv_sequence *s = pick->sequence;
    const struct running *r = s->owner;
    int32_t ids[MAX_TOKENS], slots[MAX_TOKENS];
    dskv_sequence_fill(s, pick->n_tokens, ids, slots);
    for (int32_t i = 0; i < pick->n_tokens; i++)
        if (slots[i] >= 0)
            w->memory[slots[i]] = r->history.stamps[dskv_sequence_position(s) + i];
}

static void write_copies(struct world *w, const struct dskv_block_copy *copies, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        memcpy(w->memory + copies[i].dst * BLOCK_TOKENS, w->memory + copies[i].src * BLOCK_TOKENS,
               (size_t)copies[i].n_tokens * sizeof *w->memory);
    for (int32_t i = 0; i < n; i++)
        dskv_blocks_release(w->blocks, copies[i].src);
}

static void submit_step(struct world *w)
{
    struct dskv_pick picks[MAX_RUNNING];
    struct dskv_block_copy copies[MAX_RUNNING];
    int32_t n_copies = 0, n = w->n_submitted < 2 ? dskv_scheduler_pick(&w->scheduler, picks) : 0;
    if (!n)
        return;
    struct submitted *submitted = &w->submitted[w->n_submitted++];
    submitted->n_runs = n;
    for (int32_t i = 0; i < n; i++)
        n_copies += dskv_sequence_grow(picks[i].sequence, picks[i].n_tokens, &copies[n_copies]);
    write_copies(w, copies, n_copies);
    for (int32_t i = 0; i < n; i++) {
        write_run(w, &picks[i]);
        submitted->runs[i].running = picks[i].sequence->owner;
        submitted->runs[i].n_tokens = picks[i].n_tokens;
        dskv_sequence_advance(picks[i].sequence, picks[i].n_tokens);
    }
}

/* What a sequence expected is known when the step before has ended. */
static void complete_step(struct world *w)
{
    if (!w->n_submitted)
        return;
    struct submitted *submitted = &w->submitted[0];
    for (int32_t i = 0; i < submitted->n_runs; i++) {
        struct running *r = submitted->runs[i].running;
        if (!r)
            continue;
        dskv_sequence_complete(r->sequence, submitted->runs[i].n_tokens);
        if (r->sequence->completed < r->sequence->n_known || !r->n_expected)
            continue;
        dskv_sequence_push(r->sequence, r->expected[0]);
        r->expected[0] = r->expected[1];
        r->n_expected--;
    }
    w->submitted[0] = w->submitted[1];
    w->n_submitted--;
}

static void forget_running(struct world *w, const struct running *r)
{
    for (int i = 0; i < w->n_submitted; i++)
        for (int32_t j = 0; j < w->submitted[i].n_runs; j++)
            if (w->submitted[i].runs[j].running == r)
                w->submitted[i].runs[j].running = NULL;
}

/* Draws one more token, while there is room for it; it is known at once when no step is under way with the last one. */
static void push_token(struct world *w)
{
    struct running *r = &w->running[rng_below(&w->rng, MAX_RUNNING)];
    if (!r->sequence || dskv_sequence_waiting(r->sequence))
        return;
    const struct dskv_sequence *s = r->sequence;
    int32_t room = (s->n_blocks + s->n_reserved) * BLOCK_TOKENS, n = s->prefix_length + s->n_input;
    if (s->copies_last || n >= room || n >= MOST - 1 || !s->n_needed)
        return;
    int32_t token = rng_below(&w->rng, 1000);
    remember(&r->history, token);
    if (s->completed == s->next) {
        dskv_sequence_push(r->sequence, token);
        return;
    }
    r->expected[r->n_expected++] = token;
    dskv_sequence_expect(r->sequence, -1);
}

static void forget_cache(struct world *w, int i)
{
    for (int j = 0; j < MAX_RUNNING; j++)
        if (w->running[j].consumes == w->cache[i])
            w->running[j].consumes = NULL;
    dskv_caches_free(w->caches, w->cache[i]);
    w->cache[i] = NULL;
}

static void end_sequence(struct world *w)
{
    struct running *r = &w->running[rng_below(&w->rng, MAX_RUNNING)];
    int to = rng_below(&w->rng, MAX_CACHES);
    if (!r->sequence || w->cache[to])
        return;
    dskv_scheduler_remove(&r->group);
    w->n_cut += r->sequence->completed < r->sequence->next;
    forget_running(w, r);
    if (!rng_one_in(&w->rng, 5)) {
        int32_t n_stored = dskv_sequence_stored(r->sequence), n_blocks;
        int32_t length =
            r->sequence->prefix_length + (rng_one_in(&w->rng, 2) ? n_stored : rng_below(&w->rng, n_stored + 1));
        int32_t *table = dskv_sequence_end(r->sequence, length, &n_blocks);
        w->cache[to] = dskv_caches_add(w->caches, w->session, table, n_blocks, length, 0);
        w->cache_history[to] = r->history;
        w->cache_history[to].n = length;
        w->n_made++;
        for (int i = 0; i < MAX_CACHES && r->consumes; i++)
            if (w->cache[i] == r->consumes)
                forget_cache(w, i);
    }
    dskv_sequence_close(&r->sequence);
}

static void free_cache(struct world *w)
{
    int i = pick_cache(w);
    if (i >= 0)
        forget_cache(w, i);
}

static void toggle_held(struct world *w)
{
    struct held *held = &w->held[rng_below(&w->rng, MAX_HELD)];
    for (int32_t b = 0; b < held->n_blocks; b++)
        dskv_blocks_release(w->blocks, held->table[b]);
    int was_held = held->n_blocks, from = pick_cache(w);
    *held = (struct held){0};
    if (was_held || from < 0)
        return;
    held->history = w->cache_history[from];
    held->history.n = rng_below(&w->rng, w->cache[from]->length + 1);
    held->n_blocks = dskv_blocks_for(w->blocks, held->history.n);
    for (int32_t b = 0; b < held->n_blocks; b++) {
        held->table[b] = w->cache[from]->blocks[b];
        dskv_blocks_hold(w->blocks, held->table[b]);
    }
}

/* ---- a run ------------------------------------------------------------------------------------------------------ */

static void clean_up(struct world *w)
{
    for (int i = 0; i < MAX_RUNNING; i++) {
        dskv_scheduler_remove(&w->running[i].group);
        dskv_sequence_close(&w->running[i].sequence);
    }
    for (int i = 0; i < MAX_HELD; i++)
        for (int32_t b = 0; b < w->held[i].n_blocks; b++)
            dskv_blocks_release(w->blocks, w->held[i].table[b]);
    dskv_caches_close(&w->caches);
    DSKV_ASSERT(dskv_blocks_used(w->blocks) == 0 && dskv_blocks_reserved(w->blocks) == 0, "%d used, %d reserved",
                dskv_blocks_used(w->blocks), dskv_blocks_reserved(w->blocks));
    dskv_sessions_close(&w->sessions);
    dskv_blocks_close(&w->blocks);
}

static void run(uint64_t seed, int n_moves)
{
    static void (*const moves[])(struct world *) = {
        begin_sequence, begin_sequence, submit_step, submit_step,  submit_step, complete_step, complete_step,
        complete_step,  push_token,     push_token,  end_sequence, free_cache,  toggle_held};
    struct world *w = dskv_calloc(1, sizeof *w);
    w->rng.state = seed;
    w->blocks = dskv_blocks_open(N_BLOCKS, BLOCK_TOKENS);
    w->caches = dskv_caches_open(w->blocks);
    w->sessions = dskv_sessions_open(0);
    w->session = dskv_sessions_begin(w->sessions, 0);
    dskv_scheduler_open(&w->scheduler, &(struct dskv_step_limits){MAX_TOKENS, MAX_RUNNING - 2, MAX_TOKENS});
    for (int i = 0; i < n_moves; i++) {
        moves[rng_below(&w->rng, (int32_t)(sizeof moves / sizeof *moves))](w);
        check_world(w);
    }
    DSKV_ASSERT(w->n_made > n_moves / 60 && w->n_full > 0 && w->n_cut > 0,
                "%d caches made, %d refused, %d cut: too little happened", w->n_made, w->n_full, w->n_cut);
    clean_up(w);
    free(w);
}

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, last = argc > 1 ? first : 40;
    int n_moves = argc > 2 ? atoi(argv[2]) : 5000;
    for (uint64_t seed = first; seed <= last; seed++) {
        printf("seed %llu, %d moves\n", (unsigned long long)seed,
               n_moves); /* the last one printed is the one that failed */
        fflush(stdout);
        run(seed, n_moves);
    }
    return 0;
}
