/* Model directories for tests: made in a temporary folder, copied, spoiled. */
#ifndef DSKV_TESTS_PARALLEL_MODEL_DIR_H
#define DSKV_TESTS_PARALLEL_MODEL_DIR_H

#include <stddef.h>

/* A new folder; test_dir_remove deletes it with the files in it. */
char *test_dir_make(void);
void test_dir_remove(char **dir);

/* DIR/NAME with this content. */
void test_dir_write(const char *dir, const char *name, const void *bytes, size_t n);
void test_dir_write_text(const char *dir, const char *name, const char *text);
/* The content, with a null byte after it; freed by the caller. */
char *test_dir_read(const char *dir, const char *name, size_t *n);
void test_dir_delete(const char *dir, const char *name);
void test_dir_rename(const char *dir, const char *from, const char *to);
/* Keeps the first n bytes. */
void test_dir_truncate(const char *dir, const char *name, size_t n);
/* Replaces the one place where `from` stands in a text file; asserted to be there. */
void test_dir_edit(const char *dir, const char *name, const char *from, const char *to);
/* A new folder with the files of a directory of the source tree ("tests/golden/..."). */
char *test_dir_copy(const char *source);

/* DIR/NAME as a safetensors file: this header, data_bytes of data that count up. */
void test_dir_write_safetensors(const char *dir, const char *name, const char *header, size_t data_bytes);

/* The directories of all models of the source tree, ended by null. */
extern const char *const test_models[];

#endif
