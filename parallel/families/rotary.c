#include "parallel/families/rotary.h"

#include "base/limits.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Rotary parameters stand in rope_scaling (transformers 4) or rope_parameters (5). */
struct source {
    struct dskv_reader *reader;
    const char *key;
    const struct dskv_json *parameters;
};

static const struct dskv_named stretches[] = {
    {"default", DSKV_ROPE_PLAIN}, {"linear", DSKV_ROPE_LINEAR},   {"llama3", DSKV_ROPE_LLAMA3},
    {"yarn", DSKV_ROPE_YARN},     {"dynamic", DSKV_ROPE_DYNAMIC}, {"longrope", DSKV_ROPE_LONGROPE},
    {"su", DSKV_ROPE_LONGROPE}, /* its first name */
};

const char *dskv_rope_stretch_name(enum dskv_rope_stretch kind)
{
    size_t i = 0;
    while (stretches[i].value != (int)kind)
        i++;
    return stretches[i].name;
}

/* ---- values -------------------------------------------------------------------------------------- */

/* A number above 0. */
static double number_or(const struct source *from, const char *name, double fallback)
{
    char whole[96];
    snprintf(whole, sizeof whole, "%s.%s", from->key, name);
    return dskv_reader_number_of(from->reader, whole, dskv_json_get(from->parameters, name), fallback);
}

static double number_of(const struct source *from, const char *name)
{
    double number = number_or(from, name, 0);
    if (number <= 0)
        dskv_reader_fail(from->reader, "%s.%s is missing", from->key, name);
    return number;
}

static int32_t length_or_0(struct dskv_reader *reader, const char *whole, const struct dskv_json *value)
{
    double length = dskv_reader_number_of(reader, whole, value, 0);
    if (length == floor(length) && length <= DSKV_MAX_CONTEXT)
        return (int32_t)length;
    dskv_reader_fail(reader, "%s is %g, not a length of at most %d", whole, length, DSKV_MAX_CONTEXT);
    return 0;
}

/* The context before stretching, 0 where it is not given; Phi-3's line of models has it beside the parameters. */
static int32_t given_context(const struct source *from)
{
    static const char name[] = "original_max_position_embeddings";
    char whole[96];
    snprintf(whole, sizeof whole, "%s.%s", from->key, name);
    int32_t inside = length_or_0(from->reader, whole, dskv_json_get(from->parameters, name));
    int32_t beside = length_or_0(from->reader, name, dskv_json_get(from->reader->root, name));
    if (inside && beside && inside != beside)
        dskv_reader_fail(from->reader, "%s is %d, but %s is %d", name, beside, whole, inside);
    return inside ? inside : beside;
}

/* One number for each of n pairs of a head. */
static void read_factors(const struct source *from, const char *name, int32_t n, float *factors)
{
    const struct dskv_json *list = dskv_json_get(from->parameters, name);
    enum dskv_json_kind kind = dskv_json_kind(list);
    if (kind == DSKV_JSON_ABSENT || kind == DSKV_JSON_NULL)
        dskv_reader_fail(from->reader, "%s.%s is missing", from->key, name);
    else if (kind != DSKV_JSON_ARRAY)
        dskv_reader_fail(from->reader, "%s.%s is not a list", from->key, name);
    else if (dskv_json_count(list) != (size_t)n)
        dskv_reader_fail(from->reader, "%s.%s has %zu numbers; a head has %d pairs to rotate", from->key, name,
                         dskv_json_count(list), n);
    for (int32_t i = 0; from->reader->code == DSKV_EXIT_OK && i < n; i++) {
        char whole[96];
        snprintf(whole, sizeof whole, "%s.%s[%d]", from->key, name, i);
        factors[i] = (float)dskv_reader_number_of(from->reader, whole, dskv_json_at(list, (size_t)i), 0);
        if (factors[i] <= 0)
            dskv_reader_fail(from->reader, "%s is not a number above 0", whole);
    }
}

/* ---- kinds of stretching -------------------------------------------------------------------------- */

static void set_factor(const struct source *from, double factor, struct dskv_rope_scaling *scaling)
{
    if (factor < 1)
        dskv_reader_fail(from->reader, "%s.factor is %g, less than 1", from->key, factor);
    scaling->factor = (float)factor;
}

/* max_position_embeddings may still be what the model knew before it was stretched. */
static void raise_max_context(struct dskv_model *model, double factor)
{
    double reach = floor(model->rope_scaling.original_context * factor);
    if (reach > model->max_context)
        model->max_context = reach < DSKV_MAX_CONTEXT ? (int32_t)reach : DSKV_MAX_CONTEXT;
}

static void read_llama3(const struct source *from, struct dskv_rope_scaling *scaling)
{
    scaling->original_context = given_context(from);
    if (!scaling->original_context)
        dskv_reader_fail(from->reader, "%s.original_max_position_embeddings is missing", from->key);
    scaling->low_factor = (float)number_of(from, "low_freq_factor");
    scaling->high_factor = (float)number_of(from, "high_freq_factor");
    if (scaling->low_factor >= scaling->high_factor)
        dskv_reader_fail(from->reader, "%s.low_freq_factor %g is not below high_freq_factor %g", from->key,
                         (double)scaling->low_factor, (double)scaling->high_factor);
}

static void read_yarn(const struct source *from, double factor, struct dskv_model *model)
{
    struct dskv_rope_scaling *scaling = &model->rope_scaling;
    int32_t given = given_context(from);
    scaling->original_context = given ? given : model->max_context;
    scaling->low_factor = (float)number_or(from, "beta_slow", 1);
    scaling->high_factor = (float)number_or(from, "beta_fast", 32);
    if (scaling->high_factor < scaling->low_factor)
        dskv_reader_fail(from->reader, "%s.beta_fast %g is less than beta_slow %g", from->key,
                         (double)scaling->high_factor, (double)scaling->low_factor);
    scaling->attention_factor = (float)number_or(from, "attention_factor", 0.1 * log(factor) + 1);
    if (model->rope_theta <= 1)
        dskv_reader_fail(from->reader, "rope_theta is %g; yarn needs more than 1", (double)model->rope_theta);
    static const char *const others[] = {"mscale", "mscale_all_dim", "truncate"};
    for (int i = 0; i < 3; i++) { /* some versions and models have them, and other arithmetic by them */
        enum dskv_json_kind kind = dskv_json_kind(dskv_json_get(from->parameters, others[i]));
        if (kind != DSKV_JSON_ABSENT && kind != DSKV_JSON_NULL)
            dskv_reader_fail(from->reader, "%s.%s is set, which is not supported", from->key, others[i]);
    }
    raise_max_context(model, factor);
}

static void read_dynamic(const struct source *from, double factor, struct dskv_model *model)
{
    int32_t given = given_context(from);
    model->rope_scaling.original_context = model->max_context;
    if (given && given != model->max_context)
        dskv_reader_fail(from->reader,
                         "original_max_position_embeddings is %d, but dynamic begins at max_position_embeddings, %d",
                         given, model->max_context);
    if (model->rotary_dim <= 2)
        dskv_reader_fail(from->reader, "a head size of %d cannot be stretched by %s.rope_type \"dynamic\"",
                         model->rotary_dim, from->key);
    raise_max_context(model, factor);
}

static void read_longrope(const struct source *from, struct dskv_model *model)
{
    struct dskv_rope_scaling *scaling = &model->rope_scaling;
    int32_t given = given_context(from);
    scaling->original_context = given ? given : model->max_context;
    double factor = number_or(from, "factor", 0);
    if (factor == 0 && !given)
        dskv_reader_fail(from->reader, "%s.factor is missing, and so is original_max_position_embeddings", from->key);
    if (factor == 0 && given > model->max_context)
        dskv_reader_fail(from->reader, "max_position_embeddings, %d, is less than original_max_position_embeddings, %d",
                         model->max_context, given);
    if (factor == 0 && given)
        factor = (double)model->max_context / given;
    set_factor(from, factor, scaling);
    if (scaling->original_context < 2)
        dskv_reader_fail(from->reader, "%s of %d cannot be stretched",
                         given ? "original_max_position_embeddings" : "max_position_embeddings",
                         scaling->original_context);
    double usual = sqrt(1 + log(factor) / log(scaling->original_context));
    scaling->attention_factor = (float)number_or(from, "attention_factor", usual);
    read_factors(from, "short_factor", model->rotary_dim / 2, scaling->short_factors);
    read_factors(from, "long_factor", model->rotary_dim / 2, scaling->long_factors);
    raise_max_context(model, factor);
}

static void read_stretch(const struct source *from, enum dskv_rope_stretch kind, struct dskv_model *model)
{
    struct dskv_rope_scaling *scaling = &model->rope_scaling;
    if (kind == DSKV_ROPE_PLAIN)
        return;
    if (scaling->kind != DSKV_ROPE_PLAIN)
        dskv_reader_fail(from->reader, "both rope_parameters and rope_scaling stretch the rotary table");
    scaling->kind = kind;
    if (kind == DSKV_ROPE_LONGROPE) {
        read_longrope(from, model);
        return;
    }
    double factor = number_of(from, "factor");
    set_factor(from, factor, scaling);
    if (kind == DSKV_ROPE_LLAMA3)
        read_llama3(from, scaling);
    else if (kind == DSKV_ROPE_YARN)
        read_yarn(from, factor, model);
    else if (kind == DSKV_ROPE_DYNAMIC)
        read_dynamic(from, factor, model);
}

/* ---- config.json ---------------------------------------------------------------------------------- */

/* The type by its name or, in older files, its other name; "default" where neither is there. */
static const char *rope_type(const struct source *from)
{
    static const char *const names[] = {"rope_type", "type"};
    const char *found = NULL;
    for (int i = 0; i < 2; i++) {
        const struct dskv_json *type = dskv_json_get(from->parameters, names[i]);
        if (type && dskv_json_kind(type) != DSKV_JSON_STRING)
            dskv_reader_fail(from->reader, "%s.%s is not a string", from->key, names[i]);
        else if (type && found && strcmp(found, dskv_json_string(type)) != 0)
            dskv_reader_fail(from->reader, "%s.rope_type is \"%.32s\", but type is \"%.32s\"", from->key, found,
                             dskv_json_string(type));
        else if (type)
            found = dskv_json_string(type);
    }
    if (!found && dskv_json_get(from->parameters, "factor"))
        dskv_reader_fail(from->reader, "%s has a factor, but no rope_type", from->key);
    return found ? found : "default";
}

static enum dskv_rope_stretch stretch_of(const struct source *from, const char *type)
{
    char whole[96];
    snprintf(whole, sizeof whole, "%s.rope_type", from->key);
    return (enum dskv_rope_stretch)dskv_reader_choose(from->reader, whole, type, stretches,
                                                      sizeof stretches / sizeof *stretches);
}

static void read_parameters(const struct source *from, struct dskv_model *model)
{
    const struct dskv_json *parameters = from->parameters;
    if (dskv_json_kind(parameters) == DSKV_JSON_ABSENT || dskv_json_kind(parameters) == DSKV_JSON_NULL)
        return;
    if (dskv_json_kind(parameters) != DSKV_JSON_OBJECT) {
        dskv_reader_fail(from->reader, "%s is not an object", from->key);
        return;
    }
    read_stretch(from, stretch_of(from, rope_type(from)), model);
    if (number_or(from, "partial_rotary_factor", 1) != 1)
        dskv_reader_fail(from->reader, "%s.partial_rotary_factor other than 1 is not supported", from->key);
    for (void *member = dskv_json_begin(parameters); member; member = dskv_json_next(parameters, member))
        if (dskv_json_kind(dskv_json_member_value(member)) == DSKV_JSON_OBJECT)
            dskv_reader_fail(from->reader, "%s.%.32s: parameters per kind of layer are not supported", from->key,
                             dskv_json_member_key(member));
}

void dskv_rope_read(struct dskv_reader *reader, struct dskv_model *model)
{
    struct source parameters = {reader, "rope_parameters", dskv_json_get(reader->root, "rope_parameters")};
    struct source scaling = {reader, "rope_scaling", dskv_json_get(reader->root, "rope_scaling")};
    double outside = dskv_reader_number_or(reader, "rope_theta", 0), inside = number_or(&parameters, "rope_theta", 0);
    if (outside > 0 && inside > 0 && outside != inside)
        dskv_reader_fail(reader, "rope_theta is %g, but rope_parameters.rope_theta is %g", outside, inside);
    model->positions = DSKV_POSITIONS_ROTARY;
    model->rope_theta = (float)(inside > 0 ? inside : outside > 0 ? outside : 10000);
    model->rope_style = DSKV_ROPE_HALVES;
    model->rotary_dim = model->head_dim;
    if (model->rotary_dim % 2 != 0)
        dskv_reader_fail(reader, "a head size of %d cannot be rotated in halves", model->head_dim);
    if (model->rotary_dim > DSKV_MAX_HEAD_DIM)
        return; /* refused with all families' limits */
    read_parameters(&parameters, model);
    read_parameters(&scaling, model);
    dskv_reader_refuse(reader, "rope_interleaved");
    if (dskv_reader_number_or(reader, "partial_rotary_factor", 1) != 1)
        dskv_reader_fail(reader, "partial_rotary_factor other than 1 is not supported");
}
