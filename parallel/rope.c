#include "parallel/rope.h"

#include <math.h>

int32_t dskv_rope_length(const struct dskv_model *model, int32_t max_model_len)
{
    const struct dskv_rope_scaling *scaling = &model->rope_scaling;
    if (scaling->kind != DSKV_ROPE_DYNAMIC && scaling->kind != DSKV_ROPE_LONGROPE)
        return 0;
    if (max_model_len <= scaling->original_context)
        return scaling->original_context;
    return scaling->kind == DSKV_ROPE_DYNAMIC ? max_model_len : model->max_context;
}

/* What the served length makes of it: at the original context theta itself. */
static float dynamic_theta(const struct dskv_model *model, int32_t max_model_len)
{
    const struct dskv_rope_scaling *scaling = &model->rope_scaling;
    double factor = (double)scaling->factor, dim = model->rotary_dim;
    double longer = factor * dskv_rope_length(model, max_model_len) / scaling->original_context - (factor - 1);
    return (float)((double)model->rope_theta * pow(longer, dim / (dim - 2)));
}

static float llama3_frequency(const struct dskv_rope_scaling *scaling, float frequency)
{
    float context = (float)scaling->original_context, wavelength = 6.283185307179586f / frequency;
    if (wavelength > context / scaling->low_factor)
        return frequency / scaling->factor;
    if (wavelength < context / scaling->high_factor)
        return frequency;
    float smooth = (context / wavelength - scaling->low_factor) / (scaling->high_factor - scaling->low_factor);
    return (1.0f - smooth) * frequency / scaling->factor + smooth * frequency;
}

/* Where in a head the pair would stand that turns so often over the original context. */
static double pair_that_turns(const struct dskv_model *model, double times)
{
    double context = model->rope_scaling.original_context;
    return model->rotary_dim * log(context / (times * 2 * 3.141592653589793)) / (2 * log((double)model->rope_theta));
}

/* power: theta ^ (2 pair / rotary_dim), one over the plain frequency. */
static float yarn_frequency(const struct dskv_model *model, int32_t pair, float power)
{
    const struct dskv_rope_scaling *scaling = &model->rope_scaling;
    double first = fmax(floor(pair_that_turns(model, (double)scaling->high_factor)), 0);
    double last = fmin(ceil(pair_that_turns(model, (double)scaling->low_factor)), model->rotary_dim - 1);
    if (first == last)
        last += 0.001; /* a passage of no length */
    float passed = ((float)pair - (float)first) / (float)(last - first);
    float kept = 1.0f - fminf(fmaxf(passed, 0.0f), 1.0f);
    return 1.0f / (scaling->factor * power) * (1.0f - kept) + 1.0f / power * kept;
}

static float frequency_of(const struct dskv_model *model, int32_t max_model_len, int32_t pair)
{
    const struct dskv_rope_scaling *scaling = &model->rope_scaling;
    float theta = scaling->kind == DSKV_ROPE_DYNAMIC ? dynamic_theta(model, max_model_len) : model->rope_theta;
    float exponent = (float)(2 * pair) / (float)model->rotary_dim;
    float power = (float)pow((double)theta, (double)exponent);
    int is_long = max_model_len > scaling->original_context;
    switch (scaling->kind) {
    case DSKV_ROPE_LINEAR: return 1.0f / power / scaling->factor;
    case DSKV_ROPE_LLAMA3: return llama3_frequency(scaling, 1.0f / power);
    case DSKV_ROPE_YARN: return yarn_frequency(model, pair, power);
    case DSKV_ROPE_LONGROPE: return 1.0f / ((is_long ? scaling->long_factors : scaling->short_factors)[pair] * power);
    case DSKV_ROPE_PLAIN:
    case DSKV_ROPE_DYNAMIC: break;
    }
    return 1.0f / power;
}

void dskv_rope_fill(const struct dskv_model *model, int32_t max_model_len, int32_t first, int32_t n, float *cosines,
                    float *sines)
{
    const struct dskv_rope_scaling *scaling = &model->rope_scaling;
    int has_factor = scaling->kind == DSKV_ROPE_YARN || scaling->kind == DSKV_ROPE_LONGROPE;
    float scale = has_factor ? scaling->attention_factor : 1.0f;
    int32_t half = model->rotary_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        float frequency = frequency_of(model, max_model_len, i);
        for (int32_t row = 0; row < n; row++) {
            float angle = (float)(first + row) * frequency;
            cosines[(int64_t)row * half + i] = (float)cos((double)angle) * scale;
            sines[(int64_t)row * half + i] = (float)sin((double)angle) * scale;
        }
    }
}
