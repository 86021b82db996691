#include "test_client_toy.h"

#include "base/memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int32_t toy_next(int32_t token, int32_t position)
{
    int32_t best = 0;
    for (int32_t i = 1; i < TOY_VOCAB; i++)
        if (toy_logit(token, position, i) > toy_logit(token, position, best))
            best = i;
    return best;
}

/* ---- replies ---------------------------------------------------------------------------------------------------- */

static void send_event(struct toy_server *server, struct dskv_event *event)
{
    struct dskv_frames frames = {0};
    struct dskv_error error;
    event->last = event->kind == DSKV_EVENT_RESULT || event->kind == DSKV_EVENT_ERROR;
    enum dskv_code code = dskv_event_encode(event, &frames, &error);
    DSKV_ASSERT(!code, "%s", error.message);
    dskv_transport_send(server->transport, &server->route, &frames);
}

void toy_send_error(struct toy_server *server, const struct dskv_request *request, enum dskv_code code,
                    const char *sentence)
{
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_ERROR, .op = request->op};
    dskv_fail(&event.error, code, "%s", sentence);
    if (code == DSKV_POOL_FULL) {
        dskv_error_set(&event.error, DSKV_HAS_NEEDED, 12);
        dskv_error_set(&event.error, DSKV_HAS_FREE, 3);
        dskv_error_set(&event.error, DSKV_HAS_INDEX, 1);
    }
    if (server->mood == TOY_NO_SESSION)
        dskv_error_set_field(&event.error, "session");
    send_event(server, &event);
}

static struct dskv_wire_tensor tensor(enum dskv_dtype dtype, const void *data, int64_t n, int64_t m)
{
    struct dskv_wire_tensor made = {.data = data, .dtype = dtype, .n_dims = m ? 2 : 1, .shape = {n, m}};
    made.bytes = (size_t)(n * (m ? m : 1)) * dskv_dtype_bytes(dtype);
    return made;
}

/* ---- caches ----------------------------------------------------------------------------------------------------- */

static struct toy_cache *find(struct toy_server *server, const struct dskv_id *id)
{
    for (int i = 0; i < TOY_CACHES; i++)
        if (server->caches[i].alive && memcmp(&server->caches[i].id, id, sizeof *id) == 0)
            return &server->caches[i];
    return NULL;
}

static void free_cache(struct toy_server *server, const struct dskv_id *id)
{
    struct toy_cache *cache = find(server, id);
    if (!cache)
        return;
    free(cache->tokens);
    *cache = (struct toy_cache){0};
}

static void make_cache(struct toy_server *server, const int32_t *tokens, int32_t length, int foreign,
                       struct dskv_cache_ref *ref)
{
    int at = 0;
    while (server->caches[at].alive)
        at++;
    DSKV_ASSERT(at < TOY_CACHES, "the toy has no room for cache %d", at);
    struct toy_cache *cache = &server->caches[at];
    *cache = (struct toy_cache){.alive = 1, .length = length, .foreign = foreign};
    uint32_t number = ++server->next_id;
    memcpy(cache->id.bytes, &number, sizeof number);
    cache->tokens = dskv_calloc((size_t)length, sizeof *tokens);
    memcpy(cache->tokens, tokens, (size_t)length * sizeof *tokens);
    *ref = (struct dskv_cache_ref){.present = 1, .id = cache->id, .length = length};
    snprintf(ref->origin, sizeof ref->origin, "%s", foreign ? "foreign" : "toy");
}

/* Prefix and tokens in one new array; null after an error was sent. */
static int32_t *gather(struct toy_server *server, const struct dskv_request *request, const struct dskv_prefix *prefix,
                       const struct dskv_wire_tensor *tokens, int32_t *length, int *foreign)
{
    struct toy_cache *cache = prefix->present ? find(server, &prefix->cache) : NULL;
    if (prefix->present && !cache) {
        toy_send_error(server, request, DSKV_UNKNOWN_CACHE, "no such cache");
        return NULL;
    }
    int32_t n = (int32_t)tokens->shape[0], n_prefix = cache ? prefix->length : 0;
    DSKV_ASSERT(!cache || n_prefix <= cache->length, "the client let a cut past the end through");
    DSKV_ASSERT(!cache || (prefix->has_check && prefix->check == dskv_tokens_check(0, cache->tokens, (size_t)n_prefix)),
                "the client's check of the prefix is wrong");
    int32_t *all = dskv_calloc((size_t)(n_prefix + n), sizeof *all);
    if (n_prefix)
        memcpy(all, cache->tokens, (size_t)n_prefix * sizeof *all);
    memcpy(all + n_prefix, tokens->data, (size_t)n * sizeof *all);
    *length = n_prefix + n;
    *foreign = cache && cache->foreign;
    return all;
}

/* ---- operations ------------------------------------------------------------------------------------------------- */

static void do_hello(struct toy_server *server, const struct dskv_request *request)
{
    server->n_hellos++;
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_HELLO};
    event.hello.version = DSKV_PROTOCOL_VERSION;
    event.hello.session.bytes[0] = (uint8_t)server->n_hellos;
    event.hello.lease_ms = 5000;
    snprintf(event.hello.server_version, sizeof event.hello.server_version, "toy");
    event.hello.limits = (struct dskv_limits){.header_bytes = 1 << 20,
                                              .frame_bytes = 1 << 20,
                                              .request_bytes = 1 << 21,
                                              .reply_bytes = 1 << 28,
                                              .part_bytes = 1 << 20,
                                              .sequences = 16,
                                              .topk = 8,
                                              .stops = 4,
                                              .stop_tokens = 4,
                                              .free_ids = TOY_FREE_IDS,
                                              .credits = 4,
                                              .max_model_len = 4096,
                                              .max_batch_tokens = 512,
                                              .max_sequences = 16};
    send_event(server, &event);
}

static void do_info(struct toy_server *server, const struct dskv_request *request)
{
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_INFO};
    event.info = (struct dskv_info_result){.server_version = "toy",
                                           .protocol_version = 1,
                                           .model_dir = "models/toy",
                                           .family = "toy",
                                           .fingerprint = "00ff",
                                           .numerics_id = "abcd",
                                           .device = "paper",
                                           .n_ranks = 2,
                                           .n_layers = TOY_LAYERS,
                                           .n_heads = 6,
                                           .n_kv_heads = TOY_HEADS,
                                           .head_dim = TOY_HEAD_DIM,
                                           .width = 24,
                                           .mlp = 96,
                                           .vocab = TOY_VOCAB,
                                           .max_context = 8192,
                                           .weight_dtype = DSKV_BF16,
                                           .activation_dtype = DSKV_F32,
                                           .kv_dtype = DSKV_F32,
                                           .n_end_tokens = 2,
                                           .end_tokens = {7, 9},
                                           .block_tokens = 64,
                                           .n_blocks = 100};
    event.info.limits.max_model_len = 4096;
    send_event(server, &event);
}

static void do_stats(struct toy_server *server, const struct dskv_request *request)
{
    struct dskv_rank_counters ranks[2] = {{.weight_bytes = 1000, .rows_computed = 5},
                                          {.weight_bytes = 1001, .steps = 6}};
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_STATS};
    event.stats =
        (struct dskv_stats_result){.uptime_s = 1.5, .blocks_total = 100, .caches = 4, .n_ranks = 2, .ranks = ranks};
    send_event(server, &event);
}

static void send_logits(struct toy_server *server, const struct dskv_request *request, int32_t index,
                        const struct dskv_want *want, const int32_t *all, int32_t first, int32_t n,
                        struct dskv_forward_result *result)
{
    int32_t n_logits = want->logits_stop - want->logits_start;
    float *rows = dskv_calloc((size_t)n_logits * TOY_VOCAB, sizeof *rows);
    DSKV_ASSERT(want->logits_stop <= n, "rows %d of %d", want->logits_stop, n);
    for (int32_t i = 0; i < n_logits; i++)
        for (int32_t id = 0; id < TOY_VOCAB; id++) {
            int32_t position = first + want->logits_start + i;
            rows[(size_t)i * TOY_VOCAB + (size_t)id] = toy_logit(all[position], position, id);
        }
    result->logits = tensor(DSKV_F32, rows, n_logits, TOY_VOCAB);
    if (result->logits.bytes <= DSKV_PART_BYTES)
        return; /* goes with the result, which frees it */
    int32_t n_sent = server->mood == TOY_SHORT_CHANGES ? n_logits - 1 : n_logits;
    for (int32_t i = 0; i < n_sent; i++) {
        struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_ROWS, .op = DSKV_OP_FORWARD};
        event.rows.sequence = index;
        event.rows.start = i;
        event.rows.data = tensor(DSKV_F32, rows + (size_t)i * TOY_VOCAB, 1, TOY_VOCAB);
        send_event(server, &event);
    }
    free(rows);
    result->logits.data = NULL;
}

/* argmax, top-2-like lists and scores: made of simple numbers that name row and place. */
static void fill_outputs(const struct dskv_want *want, const int32_t *all, int32_t first, int32_t n,
                         struct dskv_forward_result *result)
{
    int32_t *argmax = dskv_calloc((size_t)n, sizeof *argmax);
    int32_t *ids = dskv_calloc((size_t)(n * want->topk), sizeof *ids);
    float *logprobs = dskv_calloc((size_t)(n * want->topk), sizeof *logprobs);
    float *scores = dskv_calloc((size_t)n, sizeof *scores);
    for (int32_t i = 0; i < n; i++) {
        argmax[i] = toy_next(all[first + i], first + i);
        scores[i] = first + i ? (float)-(first + i) : NAN;
        for (int32_t k = 0; k < want->topk; k++) {
            ids[i * want->topk + k] = (first + i) * 100 + k;
            logprobs[i * want->topk + k] = (float)-k - (float)(first + i) / 100;
        }
    }
    if (want->argmax)
        result->argmax = tensor(DSKV_I32, argmax, n, 0);
    if (want->topk) {
        result->topk_ids = tensor(DSKV_I32, ids, n, want->topk);
        result->topk_logprobs = tensor(DSKV_F32, logprobs, n, want->topk);
    }
    if (want->score)
        result->scores = tensor(DSKV_F32, scores, n, 0);
    if (!want->argmax)
        free(argmax);
    if (!want->topk)
        free(ids), free(logprobs);
    if (!want->score)
        free(scores);
}

static void free_outputs(struct dskv_forward_result *result)
{
    free((void *)result->logits.data);
    free((void *)result->argmax.data);
    free((void *)result->topk_ids.data);
    free((void *)result->topk_logprobs.data);
    free((void *)result->scores.data);
}

static void do_forward(struct toy_server *server, const struct dskv_request *request)
{
    int32_t n = request->forward.n;
    struct dskv_forward_result *results = dskv_calloc((size_t)n, sizeof *results);
    int failed = server->mood == TOY_FULL;
    if (failed)
        toy_send_error(server, request, DSKV_POOL_FULL, "not enough free blocks");
    for (int32_t i = 0; i < n && !failed; i++) {
        const struct dskv_forward_sequence *sequence = &request->forward.sequences[i];
        int32_t length, n_new = (int32_t)sequence->tokens.shape[0];
        int foreign;
        int32_t *all = gather(server, request, &sequence->prefix, &sequence->tokens, &length, &foreign);
        failed = !all;
        if (failed)
            break;
        results[i].cached = length - (n_new ? n_new : 1);
        results[i].computed = n_new ? n_new : 1;
        if (sequence->want.logits_stop > sequence->want.logits_start)
            send_logits(server, request, i, &sequence->want, all, results[i].cached, results[i].computed, &results[i]);
        fill_outputs(&sequence->want, all, results[i].cached, results[i].computed, &results[i]);
        if (n_new)
            make_cache(server, all, length, foreign, &results[i].cache);
        if (sequence->consume)
            free_cache(server, &sequence->prefix.cache);
        free(all);
    }
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_FORWARD};
    event.forward.n = n;
    event.forward.sequences = results;
    if (!failed)
        send_event(server, &event);
    for (int32_t i = 0; i < n; i++)
        free_outputs(&results[i]);
    free(results);
}

static void do_verify(struct toy_server *server, const struct dskv_request *request)
{
    const struct dskv_verify *verify = &request->verify;
    int32_t length, n_draft = (int32_t)verify->draft.shape[0], accepted = 0;
    int foreign;
    int32_t *all = gather(server, request, &verify->prefix, &verify->tokens, &length, &foreign);
    if (!all)
        return;
    const int32_t *draft = verify->draft.data;
    all = dskv_realloc(all, (size_t)(length + n_draft), sizeof *all);
    while (accepted < n_draft && draft[accepted] == toy_next(all[length - 1], length - 1))
        all[length++] = draft[accepted++];
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_VERIFY};
    event.verify.accepted = accepted;
    event.verify.next = toy_next(all[length - 1], length - 1);
    event.verify.cached = verify->prefix.present ? verify->prefix.length : 0;
    event.verify.computed = (int32_t)verify->tokens.shape[0] + n_draft;
    make_cache(server, all, length, foreign, &event.verify.cache);
    if (verify->consume)
        free_cache(server, &verify->prefix.cache);
    send_event(server, &event);
    free(all);
}

static void end_generate(struct toy_server *server, uint64_t id, int32_t *all, int32_t n_before, int32_t n_new,
                         enum dskv_finish finish, uint64_t seed)
{
    struct dskv_event event = {.id = id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_GENERATE};
    event.generate.tokens = tensor(DSKV_I32, all + n_before, n_new, 0);
    event.generate.steps = n_new - 1;
    event.generate.finish = finish;
    event.generate.seed = seed;
    event.generate.computed = n_before + n_new - 1;
    make_cache(server, all, n_before + n_new - 1, 0, &event.generate.cache);
    send_event(server, &event);
}

/* max_tokens of 1000 and more: goes on until it is cancelled. */
static void do_generate(struct toy_server *server, const struct dskv_request *request)
{
    const struct dskv_generate *generate = &request->generate;
    int32_t length, n = generate->max_tokens < 1000 ? generate->max_tokens : 2;
    int foreign;
    int32_t *all = gather(server, request, &generate->prefix, &generate->tokens, &length, &foreign);
    if (!all)
        return;
    all = dskv_realloc(all, (size_t)(length + n), sizeof *all);
    for (int32_t i = 0; i < n; i++) {
        all[length + i] = toy_next(all[length + i - 1], length + i - 1) + (generate->temperature > 0 ? 1 : 0);
        struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_TOKENS, .op = DSKV_OP_GENERATE};
        event.tokens = tensor(DSKV_I32, &all[length + i], 1, 0);
        if (generate->stream)
            send_event(server, &event);
    }
    if (generate->max_tokens >= 1000) {
        server->generating = request->id;
    } else {
        if (generate->consume)
            free_cache(server, &generate->prefix.cache);
        end_generate(server, request->id, all, length, n, generate->n_stops ? DSKV_FINISH_STOP : DSKV_FINISH_LENGTH,
                     generate->has_seed ? generate->seed : 77);
    }
    free(all);
}

/* ---- keys and values -------------------------------------------------------------------------------------------- */

static int32_t parts_of(int32_t length)
{
    return 2 * TOY_LAYERS * ((length + TOY_PART_TOKENS - 1) / TOY_PART_TOKENS);
}

static void send_part(struct toy_server *server, struct toy_export *export)
{
    int32_t per_array = parts_of(export->length) / (2 * TOY_LAYERS), array = export->next / per_array;
    int32_t start = export->next % per_array * TOY_PART_TOKENS, stop = start + TOY_PART_TOKENS;
    stop = stop < export->length ? stop : export->length;
    float data[TOY_HEADS * TOY_PART_TOKENS * TOY_HEAD_DIM];
    int at = 0;
    for (int32_t head = 0; head < TOY_HEADS; head++)
        for (int32_t p = start; p < stop; p++)
            for (int32_t d = 0; d < TOY_HEAD_DIM; d++)
                data[at++] = toy_kv(array / 2, array % 2, head, p, d);
    struct dskv_event event = {.id = export->id, .kind = DSKV_EVENT_PART, .op = DSKV_OP_EXPORT};
    event.part = (struct dskv_part){.layer = array / 2, .is_value = array % 2, .start = start, .stop = stop};
    event.part.data = (struct dskv_wire_tensor){.data = data,
                                                .dtype = DSKV_F32,
                                                .n_dims = 3,
                                                .shape = {TOY_HEADS, stop - start, TOY_HEAD_DIM},
                                                .bytes = (size_t)at * sizeof data[0]};
    if (server->mood != TOY_SKIPS_PARTS || export->next != 1)
        send_event(server, &event);
    export->next++;
    export->credits--;
}

static void go_on_with_export(struct toy_server *server)
{
    struct toy_export *export = &server->export;
    while (export->credits > 0 && export->next < export->n_parts)
        send_part(server, export);
    if (export->next < export->n_parts)
        return;
    struct dskv_event event = {.id = export->id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_EXPORT};
    send_event(server, &event);
    export->active = 0;
}

static void do_export(struct toy_server *server, const struct dskv_request *request)
{
    struct toy_cache *cache = find(server, &request->export_.cache);
    if (!cache) {
        toy_send_error(server, request, DSKV_UNKNOWN_CACHE, "no such cache");
        return;
    }
    int32_t length = request->export_.length;
    server->export = (struct toy_export){.active = 1,
                                         .id = request->id,
                                         .length = length,
                                         .n_parts = parts_of(length),
                                         .credits = request->export_.credits};
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_BEGIN, .op = DSKV_OP_EXPORT};
    event.export_begin.tokens = tensor(DSKV_I32, cache->tokens, length, 0);
    event.export_begin.dtype = DSKV_F32;
    event.export_begin.n_layers = TOY_LAYERS;
    event.export_begin.n_kv_heads = TOY_HEADS;
    event.export_begin.head_dim = TOY_HEAD_DIM;
    event.export_begin.length = length;
    event.export_begin.n_parts = server->export.n_parts;
    snprintf(event.export_begin.model, sizeof event.export_begin.model, "00ff");
    snprintf(event.export_begin.origin, sizeof event.export_begin.origin, "toy");
    send_event(server, &event);
    go_on_with_export(server);
}

static void do_credit(struct toy_server *server, const struct dskv_request *request)
{
    DSKV_ASSERT(server->export.active && request->credit.request == server->export.id, "a credit for no export");
    server->export.credits += request->credit.n;
    DSKV_ASSERT(server->export.credits <= 4, "%d credits", server->export.credits);
    go_on_with_export(server);
}

static void do_import(struct toy_server *server, const struct dskv_request *request)
{
    const struct dskv_import *import = &request->import_;
    if (import->n_layers != TOY_LAYERS || import->n_kv_heads != TOY_HEADS || import->head_dim != TOY_HEAD_DIM) {
        toy_send_error(server, request, DSKV_WRONG_SHAPE, "another shape");
        return;
    }
    int32_t length = (int32_t)import->tokens.shape[0];
    server->import =
        (struct toy_import){.active = 1, .id = request->id, .length = length, .n_missing = 2 * TOY_LAYERS * length};
    server->import.tokens = dskv_calloc((size_t)length, sizeof(int32_t));
    memcpy(server->import.tokens, import->tokens.data, import->tokens.bytes);
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_BEGIN, .op = DSKV_OP_IMPORT};
    event.import_begin.credits = 2;
    event.import_begin.part_tokens = TOY_PART_TOKENS;
    send_event(server, &event);
}

static void end_import(struct toy_server *server, enum dskv_code code, const char *sentence)
{
    struct dskv_request import = {.id = server->import.id, .op = DSKV_OP_IMPORT};
    toy_send_error(server, &import, code, sentence);
    free(server->import.tokens);
    server->import = (struct toy_import){0};
}

static void do_part(struct toy_server *server, const struct dskv_request *request)
{
    const struct dskv_part *part = &request->part.part;
    if (!server->import.active || request->part.request != server->import.id) {
        toy_send_error(server, request, DSKV_BAD_VALUE, "no import of this id is in flight");
        return;
    }
    server->import.n_parts++;
    if (server->mood == TOY_REFUSES_PART && server->import.n_parts == 2) {
        toy_send_error(server, request, DSKV_WRONG_SHAPE, "this part is refused");
        return;
    }
    if (server->mood == TOY_ENDS_IMPORT && server->import.n_parts == 2) {
        toy_send_error(server, request, DSKV_BAD_VALUE, "no import of this id is in flight");
        end_import(server, DSKV_NOT_FINITE, "the first part was not finite");
        return;
    }
    float values[TOY_PART_TOKENS * TOY_HEADS * TOY_HEAD_DIM];
    DSKV_ASSERT(part->data.bytes <= sizeof values, "%zu bytes in a part", part->data.bytes);
    memcpy(values, part->data.data, part->data.bytes);
    int at = 0;
    for (int32_t head = 0; head < TOY_HEADS; head++)
        for (int32_t p = part->start; p < part->stop; p++)
            for (int32_t d = 0; d < TOY_HEAD_DIM; d++, at++)
                DSKV_ASSERT(values[at] == toy_kv(part->layer, part->is_value, head, p, d),
                            "layer %d head %d position %d: %g", part->layer, head, p, values[at]);
    server->import.n_missing -= part->stop - part->start;
    struct dskv_event event = {.id = server->import.id, .kind = DSKV_EVENT_CREDIT, .op = DSKV_OP_IMPORT};
    event.credit.n = 1;
    send_event(server, &event);
}

static void do_commit(struct toy_server *server, const struct dskv_request *request)
{
    if (!server->import.active || request->commit.request != server->import.id) {
        toy_send_error(server, request, DSKV_BAD_VALUE, "no import of this id is in flight");
        return;
    }
    struct dskv_event event = {.id = server->import.id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_IMPORT};
    DSKV_ASSERT(server->import.n_missing == 0, "%d tokens of an import are missing", server->import.n_missing);
    make_cache(server, server->import.tokens, server->import.length, 1, &event.import_);
    send_event(server, &event);
    free(server->import.tokens);
    server->import = (struct toy_import){0};
}

static void do_cancel(struct toy_server *server, const struct dskv_request *request)
{
    server->n_cancels++;
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_CANCEL};
    event.cancel.cancelled = server->generating == request->cancel.request;
    send_event(server, &event);
    if (server->generating == request->cancel.request)
        end_generate(server, request->cancel.request, (int32_t[]){1, 2, 3}, 1, 2, DSKV_FINISH_CANCELLED, 77);
    server->generating = 0;
    if (server->import.active && server->import.id == request->cancel.request)
        end_import(server, DSKV_CANCELLED, "the import was cancelled");
}

static void do_free(struct toy_server *server, const struct dskv_request *request)
{
    struct dskv_event event = {.id = request->id, .kind = DSKV_EVENT_RESULT, .op = DSKV_OP_FREE};
    for (int32_t i = 0; i < request->free_caches.n; i++)
        free_cache(server, &request->free_caches.caches[i]);
    for (int i = 0; i < TOY_CACHES && request->free_caches.all; i++)
        if (server->caches[i].alive)
            free_cache(server, &server->caches[i].id);
    send_event(server, &event);
}

/* ---- all of them
 * ------------------------------------------------------------------------------------------------------- */

void toy_answer(struct toy_server *server, const struct dskv_request *request)
{
    DSKV_ASSERT(request->n_free <= TOY_FREE_IDS, "%d ids in a free list", request->n_free);
    for (int32_t i = 0; i < request->n_free; i++)
        free_cache(server, &request->free[i]);
    switch (request->op) {
    case DSKV_OP_HELLO: do_hello(server, request); break;
    case DSKV_OP_INFO: do_info(server, request); break;
    case DSKV_OP_STATS: do_stats(server, request); break;
    case DSKV_OP_CANCEL: do_cancel(server, request); break;
    case DSKV_OP_FORWARD: do_forward(server, request); break;
    case DSKV_OP_VERIFY: do_verify(server, request); break;
    case DSKV_OP_GENERATE: do_generate(server, request); break;
    case DSKV_OP_EXPORT: do_export(server, request); break;
    case DSKV_OP_CREDIT: do_credit(server, request); break;
    case DSKV_OP_IMPORT: do_import(server, request); break;
    case DSKV_OP_PART: do_part(server, request); break;
    case DSKV_OP_COMMIT: do_commit(server, request); break;
    case DSKV_OP_FREE: do_free(server, request); break;
    default: send_event(server, &(struct dskv_event){.id = request->id, .kind = DSKV_EVENT_RESULT, .op = request->op});
    }
}
