#include "parallel/rope.h"

#include <math.h>

void dskv_rope_fill(const struct dskv_model *model, int32_t first, int32_t n, float *cosines, float *sines)
{
    int32_t half = model->rotary_dim / 2;
    for (int32_t i = 0; i < half; i++) {
        float exponent = (float)(2 * i) / (float)model->rotary_dim;
        float frequency = 1.0f / (float)pow((double)model->rope_theta, (double)exponent);
        for (int32_t row = 0; row < n; row++) {
            float angle = (float)(first + row) * frequency;
            cosines[(int64_t)row * half + i] = (float)cos((double)angle);
            sines[(int64_t)row * half + i] = (float)sin((double)angle);
        }
    }
}
