#include "parallel/family.h"

#include <stdio.h>
#include <string.h>

static const struct dskv_family *const families[] = {&dskv_family_gpt2, &dskv_family_llama, &dskv_family_mistral,
                                                     &dskv_family_qwen2};

const struct dskv_family *dskv_family_find(const char *model_type)
{
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
        if (strcmp(families[i]->model_type, model_type) == 0)
            return families[i];
    return NULL;
}

void dskv_family_list(char *text, size_t bytes)
{
    size_t used = 0;
    for (size_t i = 0; i < sizeof families / sizeof families[0] && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", i ? ", " : "", families[i]->model_type);
}

int dskv_part_present(const struct dskv_model *model, enum dskv_part part)
{
    switch (part) {
    case DSKV_PART_POSITIONS: return model->positions == DSKV_POSITIONS_LEARNED;
    case DSKV_PART_NORM1_BIAS:
    case DSKV_PART_NORM2_BIAS:
    case DSKV_PART_NORM_BIAS: return model->norm == DSKV_LAYER_NORM;
    case DSKV_PART_QKV_BIAS:
    case DSKV_PART_Q_BIAS:
    case DSKV_PART_K_BIAS:
    case DSKV_PART_V_BIAS: return model->qkv_bias;
    case DSKV_PART_O_BIAS: return model->o_bias;
    case DSKV_PART_GATE: return model->gated;
    case DSKV_PART_GATE_BIAS: return model->gated && model->mlp_bias;
    case DSKV_PART_UP_BIAS:
    case DSKV_PART_DOWN_BIAS: return model->mlp_bias;
    case DSKV_PART_HEAD: return !model->tied;
    case DSKV_PART_IGNORED: return 0;
    default: return 1;
    }
}
