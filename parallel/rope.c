#include "parallel/rope.h"

#include <math.h>

static float stretched(const struct dskv_rope_scaling *scaling, float frequency)
{
    if (scaling->kind == DSKV_ROPE_PLAIN)
        return frequency;
    float slow = frequency / scaling->factor;
    if (scaling->kind == DSKV_ROPE_LINEAR)
        return slow;
    float context = (float)scaling->original_context, wavelength = 6.283185307179586f / frequency;
    if (wavelength > context / scaling->low_factor)
        return slow;
    if (wavelength < context / scaling->high_factor)
        return frequency;
    float smooth = (context / wavelength - scaling->low_factor) / (scaling->high_factor - scaling->low_factor);
    return (1.0f - smooth) * frequency / scaling->factor + smooth * frequency;
}

void dskv_rope_fill(const struct dskv_model *model, int32_t first, int32_t n, float *cosines, float *sines)
{
    int32_t half = model->rotary_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        float exponent = (float)(2 * i) / (float)model->rotary_dim;
        float frequency =
            stretched(&model->rope_scaling, 1.0f / (float)pow((double)model->rope_theta, (double)exponent));
        for (int32_t row = 0; row < n; row++) {
            float angle = (float)(first + row) * frequency;
            cosines[(int64_t)row * half + i] = (float)cos((double)angle);
            sines[(int64_t)row * half + i] = (float)sin((double)angle);
        }
    }
}
