/* The checks of weight files: every damage is refused with the file's name, before a weight is read. */
#include "base/memory.h"
#include "parallel/checkpoint.h"
#include "parallel/model_dir.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TWO_FILES "tests/golden/llama-14x2-bf16"
#define FIRST "model-00001-of-00002.safetensors"
#define SECOND "model-00002-of-00002.safetensors"
#define INDEX "model.safetensors.index.json"
#define SINGLE "model.safetensors"

static enum dskv_exit try_open(const char *dir, struct dskv_error *error)
{
    struct dskv_checkpoint *checkpoint;
    enum dskv_exit code = dskv_checkpoint_open(dir, &checkpoint, error);
    CU_ASSERT((code == DSKV_EXIT_OK) == (checkpoint != NULL));
    dskv_checkpoint_close(&checkpoint);
    CU_ASSERT_PTR_NULL(checkpoint);
    return code;
}

/* The directory is refused, and the sentence holds these words. */
static void expect_refusal(const char *dir, const char *file, const char *words)
{
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL(try_open(dir, &error), DSKV_EXIT_MODEL);
    int told = strstr(error.message, file) && strstr(error.message, words);
    if (!told)
        printf("\n    \"%s\" does not say \"%s\" and \"%s\"\n", error.message, file, words);
    CU_ASSERT(told);
}

static void all_models_are_read(void)
{
    for (int i = 0; test_models[i]; i++) {
        char *dir = dskv_format("%s/%s", DSKV_SOURCE_DIR, test_models[i]);
        struct dskv_checkpoint *checkpoint;
        struct dskv_error error = {0};
        CU_ASSERT_EQUAL_FATAL(dskv_checkpoint_open(dir, &checkpoint, &error), DSKV_EXIT_OK);
        CU_ASSERT(dskv_checkpoint_count(checkpoint) > 10);
        for (size_t t = 0; t < dskv_checkpoint_count(checkpoint); t++) {
            const struct dskv_stored *tensor = dskv_checkpoint_at(checkpoint, t);
            CU_ASSERT_PTR_EQUAL(dskv_checkpoint_find(checkpoint, tensor->name), tensor);
        }
        CU_ASSERT_PTR_NULL(dskv_checkpoint_find(checkpoint, "no such tensor"));
        dskv_checkpoint_close(&checkpoint);
        free(dir);
    }
}

static void parts_of_a_matrix(void)
{
    char *dir = test_dir_make();
    test_dir_write_safetensors(dir, SINGLE,
                               "{\"m\":{\"dtype\":\"F16\",\"shape\":[5,7],\"data_offsets\":[4,74]},"
                               "\"v\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}   ",
                               74);
    struct dskv_checkpoint *checkpoint;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL_FATAL(dskv_checkpoint_open(dir, &checkpoint, &error), DSKV_EXIT_OK);
    const struct dskv_stored *m = dskv_checkpoint_find(checkpoint, "m");
    CU_ASSERT(m->dtype == DSKV_F16 && m->n_dims == 2 && m->shape[0] == 5 && m->shape[1] == 7 && m->bytes == 70);
    uint64_t expected_read = 0;
    for (int row = 0; row <= 5; row++)
        for (int n_rows = 0; row + n_rows <= 5; n_rows++)
            for (int col = 0; col <= 7; col++)
                for (int n_cols = 0; col + n_cols <= 7; n_cols++) {
                    unsigned char got[70];
                    CU_ASSERT_EQUAL(dskv_checkpoint_read_matrix(checkpoint, m, row, n_rows, col, n_cols, got, &error),
                                    DSKV_EXIT_OK);
                    expected_read += (uint64_t)(2 * n_rows * n_cols);
                    for (int r = 0; r < n_rows; r++)
                        for (int b = 0; b < 2 * n_cols; b++) /* the data counts up from the first tensor's byte 0 */
                            CU_ASSERT_EQUAL(got[r * 2 * n_cols + b], 4 + (row + r) * 14 + 2 * col + b);
                }
    CU_ASSERT_EQUAL(dskv_checkpoint_n_read(checkpoint), expected_read);
    dskv_checkpoint_close(&checkpoint);
    test_dir_remove(&dir);
}

static void damaged_headers_are_refused(void)
{
    static const struct {
        const char *header, *words;
        size_t data_bytes;
    } cases[] = {
        {"", "header", 0},
        {"[]", "JSON object", 0},
        {"{", "not valid JSON", 0},
        {"{} x", "not valid JSON", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         "duplicate", 8},
        {"{\"a\":1}", "not described", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", "not described", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"more\":1}}", "not described", 4},
        {"{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", "unknown dtype", 4},
        {"{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", "unknown dtype", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", "whole numbers", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", "whole numbers", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", "no shape", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", "no shape", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", "too large", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387905],\"data_offsets\":[0,4]}}", "too large", 4},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", "whole byte", 2},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", "pair of data_offsets", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,\"4\"]}}", "pair of data_offsets", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", "backwards", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", "backwards", 4},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,5]}}", "do not fit", 5},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", "past the end", 7},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "its header names 4", 5},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", "hole", 8},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
         "overlaps", 6},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", "not valid JSON", 4},
        {"{\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "not valid JSON", 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *dir = test_dir_make();
        test_dir_write_safetensors(dir, SINGLE, cases[i].header, cases[i].data_bytes);
        expect_refusal(dir, SINGLE, cases[i].words);
        test_dir_remove(&dir);
    }
}

static void empty_tensors_have_no_bytes(void)
{
    char *dir = test_dir_make();
    test_dir_write_safetensors(dir, SINGLE,
                               "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                               "\"b\":{\"dtype\":\"F32\",\"shape\":[0,9],\"data_offsets\":[0,0]},"
                               "\"c\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[4,12]},"
                               "\"__metadata__\":{\"format\":\"pt\"}}",
                               12);
    CU_ASSERT_EQUAL(try_open(dir, NULL), DSKV_EXIT_OK);
    test_dir_remove(&dir);
}

static void damaged_files_are_refused(void)
{
    static const unsigned char huge[16] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
                               hundred[16] = {1, 0xe1, 0xf5, 5};
    char *dir = test_dir_make();
    expect_refusal(dir, SINGLE, "neither this file nor");
    test_dir_write(dir, SINGLE, "", 0);
    expect_refusal(dir, SINGLE, "0 bytes");
    test_dir_write(dir, SINGLE, huge, sizeof huge);
    expect_refusal(dir, SINGLE, "its header would have 18446744073709551615 bytes");
    test_dir_write(dir, SINGLE, hundred, sizeof hundred);
    expect_refusal(dir, SINGLE, "its header would have 100000001 bytes");
    test_dir_delete(dir, SINGLE);
    char *path = dskv_format("%s/%s", dir, SINGLE);
    CU_ASSERT_EQUAL(mkfifo(path, 0600), 0);
    expect_refusal(dir, SINGLE, "not a regular file");
    unlink(path);
    CU_ASSERT_EQUAL(symlink("nowhere", path), 0);
    expect_refusal(dir, SINGLE, "neither this file nor");
    unlink(path);
    free(path);
    test_dir_remove(&dir);
}

static void unreadable_files_are_refused(void)
{
    if (geteuid() == 0)
        return; /* root reads everything */
    char *dir = test_dir_copy(TWO_FILES), *path = dskv_format("%s/%s", dir, SECOND);
    CU_ASSERT_EQUAL(chmod(path, 0), 0);
    expect_refusal(dir, SECOND, "Permission denied");
    free(path);
    test_dir_remove(&dir);
}

static void deleted_and_truncated_files_are_refused(void)
{
    const char *const files[] = {FIRST, SECOND};
    for (int i = 0; i < 2; i++) {
        char *dir = test_dir_copy(TWO_FILES);
        size_t n;
        char *bytes = test_dir_read(dir, files[i], &n);
        const size_t keep[] = {n - 1, n / 2, 100, 8, 7, 0};
        for (size_t k = 0; k < sizeof keep / sizeof keep[0]; k++) {
            test_dir_truncate(dir, files[i], keep[k]);
            expect_refusal(dir, files[i], keep[k] < 8 ? "not a safetensors file" : "truncated");
            test_dir_write(dir, files[i], bytes, n);
        }
        char *longer = dskv_calloc(n + 1, 1);
        memcpy(longer, bytes, n);
        test_dir_write(dir, files[i], longer, n + 1);
        expect_refusal(dir, files[i], "bytes of tensors");
        test_dir_write(dir, files[i], bytes, n);
        CU_ASSERT_EQUAL(try_open(dir, NULL), DSKV_EXIT_OK);
        test_dir_delete(dir, files[i]);
        expect_refusal(dir, files[i], "No such file");
        free(longer);
        free(bytes);
        test_dir_remove(&dir);
    }
}

static void swapped_and_stray_files_are_refused(void)
{
    char *dir = test_dir_copy(TWO_FILES);
    test_dir_rename(dir, FIRST, "kept");
    test_dir_rename(dir, SECOND, FIRST);
    test_dir_rename(dir, "kept", SECOND);
    expect_refusal(dir, FIRST, "which the index places");
    size_t n;
    char *bytes = test_dir_read(dir, FIRST, &n);
    test_dir_write(dir, SECOND, bytes, n); /* one file twice */
    expect_refusal(dir, SECOND, "has, too");
    test_dir_remove(&dir);

    dir = test_dir_copy(TWO_FILES);
    test_dir_write(dir, "model-00003-of-00003.safetensors", bytes, n);
    expect_refusal(dir, "model-00003-of-00003.safetensors", "not one of the model's weight files");
    test_dir_delete(dir, "model-00003-of-00003.safetensors");
    test_dir_write(dir, SINGLE, bytes, n);
    expect_refusal(dir, SINGLE, "not one of the model's weight files");
    test_dir_delete(dir, INDEX);
    expect_refusal(dir, FIRST, "not one of the model's weight files");
    free(bytes);
    test_dir_remove(&dir);
}

static void wrong_indexes_are_refused(void)
{
    static const struct {
        const char *from, *to, *words;
    } cases[] = {
        {"\"weight_map\"", "\"other_map\"", "no weight_map"},
        {"\"model.norm.weight\": \"" SECOND "\"", "\"model.norm.weight\": \"../" SECOND "\"", "not mapped"},
        {"\"model.norm.weight\": \"" SECOND "\"", "\"model.norm.weight\": \"model.bin\"", "not mapped"},
        {"\"model.norm.weight\": \"" SECOND "\"", "\"model.norm.weight\": 2", "not mapped"},
        {"\"model.norm.weight\": \"" SECOND "\"", "\"model.norm.weight\": \"" FIRST "\"", "index places"},
        {"\"model.norm.weight\": \"" SECOND "\"", "\"model.norm.wait\": \"" SECOND "\"", "index places nowhere"},
        {"\"model.norm.weight\": \"" SECOND "\"",
         "\"model.norm.weight\": \"" SECOND "\", \"model.norm.bias\": \"" SECOND "\"", "has no such tensor"},
        {"\"model.norm.weight\": \"" SECOND "\"",
         "\"model.norm.weight\": \"" SECOND "\", \"model.norm.weight\": \"" SECOND "\"", "duplicate"},
        {"\"weight_map\": {", "\"weight_map\": {{", "not valid JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *dir = test_dir_copy(TWO_FILES);
        test_dir_edit(dir, INDEX, cases[i].from, cases[i].to);
        expect_refusal(dir, strstr(cases[i].words, "index places") ? SECOND : INDEX, cases[i].words);
        test_dir_remove(&dir);
    }
}

static void files_that_change_meanwhile_are_refused(void)
{
    char *dir = test_dir_copy(TWO_FILES);
    struct dskv_checkpoint *checkpoint;
    struct dskv_error error = {0};
    char byte;
    CU_ASSERT_EQUAL_FATAL(dskv_checkpoint_open(dir, &checkpoint, &error), DSKV_EXIT_OK);
    const struct dskv_stored *norm = dskv_checkpoint_find(checkpoint, "model.norm.weight");
    const struct dskv_stored *embedding = dskv_checkpoint_find(checkpoint, "model.embed_tokens.weight");
    CU_ASSERT_EQUAL(dskv_checkpoint_read_bytes(checkpoint, norm, 0, 1, &byte, &error), DSKV_EXIT_OK);
    test_dir_truncate(dir, SECOND, (size_t)norm->offset); /* while it is open */
    CU_ASSERT_EQUAL(dskv_checkpoint_read_bytes(checkpoint, norm, 0, 1, &byte, &error), DSKV_EXIT_MODEL);
    CU_ASSERT(strstr(error.message, SECOND) && strstr(error.message, "truncated"));
    test_dir_truncate(dir, FIRST, 100000); /* before it is opened again */
    CU_ASSERT_EQUAL(dskv_checkpoint_read_bytes(checkpoint, embedding, 0, 1, &byte, &error), DSKV_EXIT_MODEL);
    CU_ASSERT(strstr(error.message, FIRST) && strstr(error.message, "changed"));
    dskv_checkpoint_close(&checkpoint);
    test_dir_remove(&dir);
}

/* Splitmix: the mutations are the same on every run. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static size_t mutate(char *text, size_t n, size_t capacity, uint64_t *random)
{
    static const char interesting[] = "{}[]\",:0123456789-eE.\\u FBI\0\xff";
    for (uint64_t edits = 1 + next_random(random) % 4; edits > 0; edits--) {
        size_t at = next_random(random) % n;
        char byte = interesting[next_random(random) % (sizeof interesting - 1)];
        switch (next_random(random) % 3) {
        case 0: text[at] = byte; break;
        case 1: /* insert */
            if (n < capacity) {
                memmove(text + at + 1, text + at, n - at);
                text[at] = byte;
                n++;
            }
            break;
        default: /* delete */
            if (n > 1) {
                memmove(text + at, text + at + 1, n - at - 1);
                n--;
            }
            break;
        }
    }
    return n;
}

/* What the parser accepts covers the data from its first to its last byte: nothing else may pass. */
static int covers(const struct dskv_stored *tensors, size_t n, uint64_t header_bytes, uint64_t data_bytes)
{
    uint64_t end = 8 + header_bytes;
    for (size_t i = 0; i < n; i++) {
        if (tensors[i].offset != end || tensors[i].n_dims < 0 || tensors[i].n_dims > DSKV_MAX_STORED_DIMS)
            return 0;
        end += tensors[i].bytes;
    }
    return end == 8 + header_bytes + data_bytes;
}

static void mutated_headers_are_refused_or_whole(void)
{
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
                                 "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]},"
                                 "\"c\":{\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[32,33]}}";
    char text[sizeof header + 8];
    int accepted = 0;
    for (uint64_t seed = 0; seed < 50000; seed++) {
        uint64_t random = seed;
        memcpy(text, header, sizeof header - 1);
        size_t n = mutate(text, sizeof header - 1, sizeof text, &random), n_tensors;
        struct dskv_stored *tensors;
        struct dskv_error error;
        if (dskv_safetensors_parse("f", text, n, 33, &tensors, &n_tensors, &error) != DSKV_EXIT_OK) {
            CU_ASSERT(error.message[0] == 'f');
            continue;
        }
        accepted++;
        if (!covers(tensors, n_tensors, n, 33))
            printf("\n    seed %llu passed: %.*s\n", (unsigned long long)seed, (int)n, text);
        CU_ASSERT(covers(tensors, n_tensors, n, 33));
        dskv_stored_free(&tensors, n_tensors);
    }
    CU_ASSERT(accepted > 100); /* names and spaces may change: the mutations reach beyond the first check */
}

int main(void)
{
    return dskv_run_tests("parallel.checkpoint",
                          (struct dskv_test[]){
                              {"all models are read", all_models_are_read},
                              {"parts of a matrix", parts_of_a_matrix},
                              {"damaged headers are refused", damaged_headers_are_refused},
                              {"empty tensors have no bytes", empty_tensors_have_no_bytes},
                              {"damaged files are refused", damaged_files_are_refused},
                              {"unreadable files are refused", unreadable_files_are_refused},
                              {"deleted and truncated files are refused", deleted_and_truncated_files_are_refused},
                              {"swapped and stray files are refused", swapped_and_stray_files_are_refused},
                              {"wrong indexes are refused", wrong_indexes_are_refused},
                              {"files that change meanwhile are refused", files_that_change_meanwhile_are_refused},
                              {"mutated headers are refused or whole", mutated_headers_are_refused_or_whole},
                              {NULL, NULL},
                          });
}
