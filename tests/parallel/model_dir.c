#include "parallel/model_dir.h"

#include "base/memory.h"
#include "base/status.h"

#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *const test_models[] = {
    "launch/models/atlas-gpt2",         "launch/models/atlas-llama",     "tests/golden/llama-6x2-f32",
    "tests/golden/llama-14x2-bf16",     "tests/golden/llama-mqa-f16",    "tests/golden/llama-8x4-f32",
    "tests/golden/llama-stretched-f32", "tests/golden/llama-yarn-f32",   "tests/golden/llama-dynamic-f32",
    "tests/golden/llama-longrope-f32",  "tests/golden/mistral-6x2-f16",  "tests/golden/qwen2-8x2-bf16",
    "tests/golden/gpt2-odd-f32",        "tests/golden/gpt2-scaled-bf16", NULL,
};

#define MUST(condition, name) DSKV_ASSERT(condition, "%s: %s", name, strerror(errno))

char *test_dir_make(void)
{
    const char *parent = getenv("TMPDIR");
    char *dir = dskv_format("%s/dskv-test-XXXXXX", parent ? parent : "/tmp");
    MUST(mkdtemp(dir), dir);
    return dir;
}

/* Calls visit(dir, name) for every file. */
static void each_file(const char *dir, void (*visit)(const char *dir, const char *name, void *context), void *context)
{
    DIR *directory = opendir(dir);
    MUST(directory, dir);
    for (struct dirent *entry; (entry = readdir(directory));)
        if (entry->d_name[0] != '.')
            visit(dir, entry->d_name, context);
    closedir(directory);
}

static void delete_visited(const char *dir, const char *name, void *context)
{
    (void)context;
    test_dir_delete(dir, name);
}

void test_dir_remove(char **dir)
{
    each_file(*dir, delete_visited, NULL);
    MUST(rmdir(*dir) == 0, *dir);
    free(*dir);
    *dir = NULL;
}

void test_dir_write(const char *dir, const char *name, const void *bytes, size_t n)
{
    char *path = dskv_format("%s/%s", dir, name);
    FILE *file = fopen(path, "wb");
    MUST(file && fwrite(bytes, 1, n, file) == n && fclose(file) == 0, path);
    free(path);
}

void test_dir_write_text(const char *dir, const char *name, const char *text)
{
    test_dir_write(dir, name, text, strlen(text));
}

char *test_dir_read(const char *dir, const char *name, size_t *n)
{
    char *path = dskv_format("%s/%s", dir, name);
    FILE *file = fopen(path, "rb");
    MUST(file && fseek(file, 0, SEEK_END) == 0, path);
    *n = (size_t)ftell(file);
    rewind(file);
    char *bytes = dskv_calloc(*n + 1, 1);
    MUST(fread(bytes, 1, *n, file) == *n && fclose(file) == 0, path);
    free(path);
    return bytes;
}

void test_dir_delete(const char *dir, const char *name)
{
    char *path = dskv_format("%s/%s", dir, name);
    MUST(remove(path) == 0, path);
    free(path);
}

void test_dir_rename(const char *dir, const char *from, const char *to)
{
    char *old = dskv_format("%s/%s", dir, from), *new = dskv_format("%s/%s", dir, to);
    MUST(rename(old, new) == 0, old);
    free(old);
    free(new);
}

void test_dir_truncate(const char *dir, const char *name, size_t n)
{
    char *path = dskv_format("%s/%s", dir, name);
    MUST(truncate(path, (off_t)n) == 0, path);
    free(path);
}

void test_dir_edit(const char *dir, const char *name, const char *from, const char *to)
{
    size_t n;
    char *text = test_dir_read(dir, name, &n), *at = strstr(text, from);
    DSKV_ASSERT(at && !strstr(at + 1, from), "%s: \"%s\" is not there once", name, from);
    char *edited = dskv_format("%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    test_dir_write_text(dir, name, edited);
    free(edited);
    free(text);
}

static void copy_visited(const char *dir, const char *name, void *context)
{
    size_t n;
    char *bytes = test_dir_read(dir, name, &n);
    test_dir_write(context, name, bytes, n);
    free(bytes);
}

char *test_dir_copy(const char *source)
{
    char *from = dskv_format("%s/%s", DSKV_SOURCE_DIR, source), *dir = test_dir_make();
    each_file(from, copy_visited, dir);
    free(from);
    return dir;
}

void test_dir_write_safetensors(const char *dir, const char *name, const char *header, size_t data_bytes)
{
    uint64_t length = strlen(header);
    char *bytes = dskv_calloc(8 + length + data_bytes, 1);
    for (int i = 0; i < 8; i++)
        bytes[i] = (char)(length >> 8 * i & 255);
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < data_bytes; i++)
        bytes[8 + length + i] = (char)i;
    test_dir_write(dir, name, bytes, 8 + length + data_bytes);
    free(bytes);
}
