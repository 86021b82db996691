/* The rotary table: plain, and stretched as transformers stretches it. */
#include "parallel/rope.h"

#include "base/memory.h"
#include "parallel/fingerprint.h"
#include "parallel/model_dir.h"
#include "parallel/rope_tables.h"
#include "parallel/weights.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void the_plain_table(void)
{
    struct dskv_model model = {.rope_theta = 10000.0f, .rotary_dim = 8};
    float cosines[3 * 4], sines[3 * 4], last_cosines[4], last_sines[4];
    dskv_rope_fill(&model, 3, 0, 3, cosines, sines);
    dskv_rope_fill(&model, 3, 2, 1, last_cosines, last_sines);
    CU_ASSERT(memcmp(last_cosines, cosines + 8, sizeof last_cosines) == 0);
    CU_ASSERT(memcmp(last_sines, sines + 8, sizeof last_sines) == 0);
    const double frequencies[] = {1, 0.1, 0.01, 0.001};
    for (int position = 0; position < 3; position++)
        for (int i = 0; i < 4; i++) {
            CU_ASSERT(fabs(cosines[position * 4 + i] - cos(position * frequencies[i])) < 1e-7);
            CU_ASSERT(fabs(sines[position * 4 + i] - sin(position * frequencies[i])) < 1e-7);
        }
}

/* A model of this config.json; its weights are dummies. */
static struct dskv_model read_model(const char *members)
{
    struct dskv_model model;
    struct dskv_error error = {0};
    char *dir = test_dir_make();
    char *text = dskv_format("{\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"hidden_size\": 96, "
                             "\"num_attention_heads\": 6, \"intermediate_size\": 100, \"vocab_size\": 201, %s}",
                             members);
    test_dir_write_text(dir, "config.json", text);
    enum dskv_exit code = dskv_model_read(dir, 1, &model, &error);
    if (code != DSKV_EXIT_OK)
        printf("\n    refused: %s\n", error.message);
    CU_ASSERT_EQUAL_FATAL(code, DSKV_EXIT_OK);
    free(text);
    test_dir_remove(&dir);
    return model;
}

static int is_near(double value, double wanted)
{
    return fabs(value - wanted) <= 4e-7 * fabs(wanted); /* powers may be rounded otherwise than by torch */
}

static void the_tables_of_transformers(void)
{
    for (size_t t = 0; t < sizeof rope_tables / sizeof rope_tables[0]; t++) {
        struct dskv_model model = read_model(rope_tables[t].members);
        float cosines[16], sines[16];
        CU_ASSERT_EQUAL_FATAL(model.rotary_dim, 2 * rope_tables[t].n_pairs);
        CU_ASSERT(model.max_context >= rope_tables[t].max_model_len);
        dskv_rope_fill(&model, rope_tables[t].max_model_len, 1, 1, cosines, sines);
        for (int i = 0; i < rope_tables[t].n_pairs; i++) {
            double frequency = rope_tables[t].frequencies[i], factor = rope_tables[t].factor;
            int same = is_near(cosines[i], factor * cos(frequency)) && is_near(sines[i], factor * sin(frequency));
            if (!same)
                printf("\n    pair %d of %s: %g and %g\n", i, rope_tables[t].members, cosines[i], sines[i]);
            CU_ASSERT(same);
        }
    }
}

#define DYNAMIC "\"max_position_embeddings\": 32, \"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 4}"
#define LONGROPE                                                                                                       \
    "\"max_position_embeddings\": 128, \"original_max_position_embeddings\": 32, \"head_dim\": 4, "                    \
    "\"rope_scaling\": {\"rope_type\": \"longrope\", \"short_factor\": [1, 2], \"long_factor\": [1, 4]}"

static void the_served_length_is_part_of_the_model_where_it_makes_the_table(void)
{
    static const struct {
        const char *members;
        int32_t one, other;
        int same;
    } cases[] = {
        {"\"max_position_embeddings\": 128", 7, 128, 1},
        {DYNAMIC, 7, 32, 1},
        {DYNAMIC, 32, 33, 0},
        {DYNAMIC, 33, 128, 0},
        {LONGROPE, 7, 32, 1},
        {LONGROPE, 32, 33, 0},
        {LONGROPE, 33, 128, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct dskv_model one = read_model(cases[i].members), other = one;
        float tables[4][8];
        dskv_rope_fill(&one, cases[i].one, 6, 1, tables[0], tables[1]);
        dskv_rope_fill(&other, cases[i].other, 6, 1, tables[2], tables[3]);
        size_t bytes = (size_t)one.rotary_dim / 2 * sizeof(float);
        CU_ASSERT_EQUAL(!memcmp(tables[0], tables[2], bytes) && !memcmp(tables[1], tables[3], bytes), cases[i].same);
        dskv_fingerprint_serve(&one, cases[i].one);
        dskv_fingerprint_serve(&other, cases[i].other);
        CU_ASSERT_EQUAL(strcmp(one.fingerprint, other.fingerprint) == 0, cases[i].same);
    }
}

int main(void)
{
    return dskv_run_tests("parallel.rope", (struct dskv_test[]){
                                               {"the plain table", the_plain_table},
                                               {"the tables of transformers", the_tables_of_transformers},
                                               {"the served length is part of the model where it makes the table",
                                                the_served_length_is_part_of_the_model_where_it_makes_the_table},
                                               {NULL, NULL},
                                           });
}
