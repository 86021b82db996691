/* Family: what the members of a line of models (GPT-2, Llama ...) have in common, as data.
 *
 * A family is a reader of config.json that fills struct dskv_model, and a table of the names that its weight files use.
 * The forward pass is written once, over the model's shape; a family adds no code to it.  Adding one: families/NAME.c
 * with a reader and a table, and its lines here, in family.c and in CMakeLists.txt.
 */
#ifndef DSKV_PARALLEL_FAMILY_H
#define DSKV_PARALLEL_FAMILY_H

#include "parallel/model.h"
#include "parallel/reader.h"

/* What a tensor is to the forward pass.  Matrices are [n outputs, k inputs]; vectors have n elements. */
enum dskv_part {
    DSKV_PART_EMBEDDING, /* [vocab, width] */
    DSKV_PART_POSITIONS, /* [max_context, width] */
    DSKV_PART_NORM1_WEIGHT,
    DSKV_PART_NORM1_BIAS, /* width */
    DSKV_PART_QKV,        /* [(n_heads + 2 n_kv_heads) * head_dim, width]: all of q, then k, then v */
    DSKV_PART_Q,          /* [n_heads * head_dim, width] */
    DSKV_PART_K,
    DSKV_PART_V, /* [n_kv_heads * head_dim, width] */
    DSKV_PART_QKV_BIAS,
    DSKV_PART_Q_BIAS,
    DSKV_PART_K_BIAS,
    DSKV_PART_V_BIAS,
    DSKV_PART_O, /* [width, n_heads * head_dim] */
    DSKV_PART_O_BIAS,
    DSKV_PART_NORM2_WEIGHT,
    DSKV_PART_NORM2_BIAS,
    DSKV_PART_GATE, /* [mlp, width] */
    DSKV_PART_GATE_BIAS,
    DSKV_PART_UP, /* [mlp, width] */
    DSKV_PART_UP_BIAS,
    DSKV_PART_DOWN, /* [width, mlp] */
    DSKV_PART_DOWN_BIAS,
    DSKV_PART_NORM_WEIGHT, /* of the final norm */
    DSKV_PART_NORM_BIAS,
    DSKV_PART_HEAD,    /* [vocab, width] */
    DSKV_PART_IGNORED, /* may be there; follows from the configuration */
    DSKV_N_PARTS
};

struct dskv_tensor_name {
    enum dskv_part part;
    const char *name; /* with %d: one per layer */
    int transposed;   /* stored [k, n] */
};

struct dskv_family {
    const char *model_type; /* config.json's word */
    const char *prefix;     /* of all names but the head's; files of the bare model lack it */
    void (*read)(struct dskv_reader *reader, struct dskv_model *model);
    const struct dskv_tensor_name *names;
    size_t n_names;
};

extern const struct dskv_family dskv_family_gpt2, dskv_family_llama, dskv_family_mistral, dskv_family_qwen2;

/* Null when there is none of this model_type. */
const struct dskv_family *dskv_family_find(const char *model_type);
/* "gpt2, llama, ...". */
void dskv_family_list(char *text, size_t bytes);
/* Whether a model of this shape has such a tensor (a bias, a gate ...). */
int dskv_part_present(const struct dskv_model *model, enum dskv_part part);

#endif
