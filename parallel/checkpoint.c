#include "parallel/checkpoint.h"

#include "base/limits.h"
#include "base/memory.h"
#include "parallel/json.h"
#include "parallel/path.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SINGLE_FILE "model.safetensors"
#define INDEX_FILE "model.safetensors.index.json"
#define SUFFIX ".safetensors"

struct weight_file {
    char *name, *path;
    struct stat status; /* when its header was read: what is read later must be the same file */
};

struct dskv_checkpoint {
    char *directory, *name;    /* name: the path of the index, or of the only file */
    struct weight_file *files; /* [n_files] in the order of their names */
    size_t n_files;
    struct dskv_stored *tensors; /* [n_tensors] in the order of their names */
    size_t n_tensors;
    int open_file, fd; /* the file that is open for reading, one at a time; -1: none */
    uint64_t n_read;
};

static int exists(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 || errno != ENOENT;
}

static int has_suffix(const char *name)
{
    size_t n = strlen(name), n_suffix = strlen(SUFFIX);
    return n > n_suffix && strcmp(name + n - n_suffix, SUFFIX) == 0;
}

static void add_file(struct dskv_checkpoint *checkpoint, const char *name)
{
    for (size_t i = 0; i < checkpoint->n_files; i++)
        if (strcmp(checkpoint->files[i].name, name) == 0)
            return;
    checkpoint->files = dskv_realloc(checkpoint->files, checkpoint->n_files + 1, sizeof *checkpoint->files);
    checkpoint->files[checkpoint->n_files++] = (struct weight_file){
        .name = dskv_strdup(name),
        .path = dskv_format("%s/%s", checkpoint->directory, name),
    };
}

static int by_file_name(const void *left, const void *right)
{
    return strcmp(((const struct weight_file *)left)->name, ((const struct weight_file *)right)->name);
}

static int by_tensor_name(const void *left, const void *right)
{
    return strcmp(((const struct dskv_stored *)left)->name, ((const struct dskv_stored *)right)->name);
}

/* Files that the index names; every value must be a plain file name. */
static enum dskv_exit list_index(struct dskv_checkpoint *checkpoint, const char *path, const struct dskv_json *map,
                                 struct dskv_error *error)
{
    if (dskv_json_kind(map) != DSKV_JSON_OBJECT || dskv_json_count(map) == 0)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s has no weight_map", dskv_path_tail(path));
    for (void *member = dskv_json_begin(map); member; member = dskv_json_next(map, member)) {
        const struct dskv_json *value = dskv_json_member_value(member);
        if (dskv_json_kind(value) != DSKV_JSON_STRING || !has_suffix(dskv_json_string(value)) ||
            strchr(dskv_json_string(value), '/'))
            return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s: tensor %.60s is not mapped to a *" SUFFIX " file's name",
                                  dskv_path_tail(path), dskv_json_member_key(member));
        add_file(checkpoint, dskv_json_string(value));
        if (checkpoint->n_files > DSKV_MAX_WEIGHT_FILES)
            return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s names more than %d files", dskv_path_tail(path),
                                  DSKV_MAX_WEIGHT_FILES);
    }
    qsort(checkpoint->files, checkpoint->n_files, sizeof *checkpoint->files, by_file_name);
    return DSKV_EXIT_OK;
}

static int is_listed(const struct dskv_checkpoint *checkpoint, const char *name)
{
    struct weight_file key = {.name = (char *)(uintptr_t)name};
    return bsearch(&key, checkpoint->files, checkpoint->n_files, sizeof key, by_file_name) != NULL;
}

/* A weight file that nothing names is a sign of two models in one directory, or of an index that is too short. */
static enum dskv_exit check_strays(const struct dskv_checkpoint *checkpoint, struct dskv_error *error)
{
    DIR *directory = opendir(checkpoint->directory);
    if (!directory)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s cannot be listed: %s", dskv_path_tail(checkpoint->directory),
                              strerror(errno));
    enum dskv_exit code = DSKV_EXIT_OK;
    for (struct dirent *entry; code == DSKV_EXIT_OK && (entry = readdir(directory));)
        if (has_suffix(entry->d_name) && !is_listed(checkpoint, entry->d_name))
            code =
                dskv_fail_exit(error, DSKV_EXIT_MODEL, "%.80s lies in %s, but is not one of the model's weight files",
                               entry->d_name, dskv_path_tail(checkpoint->directory));
    closedir(directory);
    return code;
}

static int open_regular(const struct weight_file *file, struct stat *status, struct dskv_error *error)
{
    int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang the start */
    if (fd < 0) {
        dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s cannot be opened: %s", dskv_path_tail(file->path), strerror(errno));
        return -1;
    }
    if (fstat(fd, status) != 0 || !S_ISREG(status->st_mode)) {
        close(fd);
        dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s is not a regular file", dskv_path_tail(file->path));
        return -1;
    }
    return fd;
}

static enum dskv_exit read_headers(struct dskv_checkpoint *checkpoint, struct dskv_error *error)
{
    for (size_t i = 0; i < checkpoint->n_files; i++) {
        struct weight_file *file = &checkpoint->files[i];
        int fd = open_regular(file, &file->status, error);
        if (fd < 0)
            return DSKV_EXIT_MODEL;
        struct dskv_stored *tensors = NULL;
        size_t n = 0;
        enum dskv_exit code =
            dskv_safetensors_read(fd, file->path, (uint64_t)file->status.st_size, &tensors, &n, error);
        close(fd);
        if (code != DSKV_EXIT_OK)
            return code;
        checkpoint->tensors = dskv_realloc(checkpoint->tensors, checkpoint->n_tensors + n, sizeof *checkpoint->tensors);
        for (size_t t = 0; t < n; t++) {
            tensors[t].file = (int32_t)i;
            checkpoint->tensors[checkpoint->n_tensors++] = tensors[t]; /* the name moves with it */
        }
        free(tensors);
    }
    return DSKV_EXIT_OK;
}

static enum dskv_exit check_names(struct dskv_checkpoint *checkpoint, struct dskv_error *error)
{
    struct dskv_stored *tensors = checkpoint->tensors;
    qsort(tensors, checkpoint->n_tensors, sizeof *tensors, by_tensor_name);
    for (size_t i = 1; i < checkpoint->n_tensors; i++)
        if (strcmp(tensors[i - 1].name, tensors[i].name) == 0)
            return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s has tensor %.60s, which %.80s has, too",
                                  dskv_path_tail(dskv_checkpoint_path(checkpoint, &tensors[i])), tensors[i].name,
                                  checkpoint->files[tensors[i - 1].file].name);
    return DSKV_EXIT_OK;
}

/* Every tensor lies where the index says, and the index names no more and no fewer. */
static enum dskv_exit check_index(const struct dskv_checkpoint *checkpoint, const char *path,
                                  const struct dskv_json *map, struct dskv_error *error)
{
    for (size_t i = 0; i < checkpoint->n_tensors; i++) {
        const struct dskv_stored *tensor = &checkpoint->tensors[i];
        const struct dskv_json *file = dskv_json_get(map, tensor->name);
        if (!file || strcmp(dskv_json_string(file), checkpoint->files[tensor->file].name) != 0)
            return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s has tensor %.60s, which the index places %.80s",
                                  dskv_path_tail(dskv_checkpoint_path(checkpoint, tensor)), tensor->name,
                                  file ? dskv_json_string(file) : "nowhere");
    }
    for (void *member = dskv_json_begin(map); member; member = dskv_json_next(map, member))
        if (!dskv_checkpoint_find(checkpoint, dskv_json_member_key(member)))
            return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s places tensor %.60s in %.80s, which has no such tensor",
                                  dskv_path_tail(path), dskv_json_member_key(member),
                                  dskv_json_string(dskv_json_member_value(member)));
    return DSKV_EXIT_OK;
}

static enum dskv_exit open_indexed(struct dskv_checkpoint *checkpoint, const char *path, struct dskv_error *error)
{
    struct dskv_json *index = NULL;
    enum dskv_exit code = dskv_json_read(path, &index, error);
    const struct dskv_json *map = index ? dskv_json_get(index, "weight_map") : NULL;
    if (code == DSKV_EXIT_OK)
        code = list_index(checkpoint, path, map, error);
    if (code == DSKV_EXIT_OK)
        code = check_strays(checkpoint, error);
    if (code == DSKV_EXIT_OK)
        code = read_headers(checkpoint, error);
    if (code == DSKV_EXIT_OK)
        code = check_names(checkpoint, error);
    if (code == DSKV_EXIT_OK)
        code = check_index(checkpoint, path, map, error);
    dskv_json_close(&index);
    return code;
}

static enum dskv_exit open_single(struct dskv_checkpoint *checkpoint, const char *path, struct dskv_error *error)
{
    if (!exists(path))
        return dskv_fail_exit(error, DSKV_EXIT_MODEL,
                              "%s: there is neither this file nor " INDEX_FILE
                              "; weights are read from safetensors only",
                              dskv_path_tail(path));
    add_file(checkpoint, SINGLE_FILE);
    enum dskv_exit code = check_strays(checkpoint, error);
    if (code == DSKV_EXIT_OK)
        code = read_headers(checkpoint, error);
    if (code == DSKV_EXIT_OK)
        code = check_names(checkpoint, error);
    return code;
}

enum dskv_exit dskv_checkpoint_open(const char *directory, struct dskv_checkpoint **checkpoint,
                                    struct dskv_error *error)
{
    struct dskv_checkpoint *self = dskv_calloc(1, sizeof *self);
    self->directory = dskv_strdup(directory);
    self->open_file = self->fd = -1;
    self->name = dskv_format("%s/" INDEX_FILE, directory);
    enum dskv_exit code;
    if (exists(self->name)) {
        code = open_indexed(self, self->name, error);
    } else {
        free(self->name);
        self->name = dskv_format("%s/" SINGLE_FILE, directory);
        code = open_single(self, self->name, error);
    }
    if (code != DSKV_EXIT_OK)
        dskv_checkpoint_close(&self);
    *checkpoint = self;
    return code;
}

void dskv_checkpoint_close(struct dskv_checkpoint **checkpoint)
{
    struct dskv_checkpoint *self = *checkpoint;
    if (!self)
        return;
    if (self->fd >= 0)
        close(self->fd);
    for (size_t i = 0; i < self->n_files; i++) {
        free(self->files[i].name);
        free(self->files[i].path);
    }
    free(self->files);
    dskv_stored_free(&self->tensors, self->n_tensors);
    free(self->directory);
    free(self->name);
    free(self);
    *checkpoint = NULL;
}

size_t dskv_checkpoint_count(const struct dskv_checkpoint *checkpoint)
{
    return checkpoint->n_tensors;
}

const struct dskv_stored *dskv_checkpoint_at(const struct dskv_checkpoint *checkpoint, size_t index)
{
    DSKV_ASSERT(index < checkpoint->n_tensors, "%zu of %zu", index, checkpoint->n_tensors);
    return &checkpoint->tensors[index];
}

const struct dskv_stored *dskv_checkpoint_find(const struct dskv_checkpoint *checkpoint, const char *name)
{
    struct dskv_stored key = {.name = (char *)(uintptr_t)name};
    if (checkpoint->n_tensors == 0)
        return NULL;
    return bsearch(&key, checkpoint->tensors, checkpoint->n_tensors, sizeof key, by_tensor_name);
}

const char *dskv_checkpoint_path(const struct dskv_checkpoint *checkpoint, const struct dskv_stored *tensor)
{
    return checkpoint->files[tensor->file].path;
}

/* Tensors are read file by file, so one descriptor is enough, however many files there are. */
static enum dskv_exit select_file(struct dskv_checkpoint *checkpoint, int index, struct dskv_error *error)
{
    if (checkpoint->open_file == index)
        return DSKV_EXIT_OK;
    if (checkpoint->fd >= 0)
        close(checkpoint->fd);
    const struct weight_file *file = &checkpoint->files[index];
    struct stat now;
    checkpoint->open_file = -1;
    checkpoint->fd = open_regular(file, &now, error);
    if (checkpoint->fd < 0)
        return DSKV_EXIT_MODEL;
    if (now.st_ino != file->status.st_ino || now.st_dev != file->status.st_dev || now.st_size != file->status.st_size ||
        now.st_mtim.tv_sec != file->status.st_mtim.tv_sec || now.st_mtim.tv_nsec != file->status.st_mtim.tv_nsec)
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s was changed after its header was read",
                              dskv_path_tail(file->path));
    checkpoint->open_file = index;
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_checkpoint_read_bytes(struct dskv_checkpoint *checkpoint, const struct dskv_stored *tensor,
                                          uint64_t first, size_t bytes, void *dst, struct dskv_error *error)
{
    DSKV_ASSERT(first <= tensor->bytes && bytes <= tensor->bytes - first, "bytes %llu + %zu of %llu",
                (unsigned long long)first, bytes, (unsigned long long)tensor->bytes);
    enum dskv_exit code = select_file(checkpoint, tensor->file, error);
    if (code != DSKV_EXIT_OK)
        return code;
    if (!dskv_pread_all(checkpoint->fd, dst, bytes, tensor->offset + first))
        return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s cannot be read at tensor %.60s: %s",
                              dskv_path_tail(dskv_checkpoint_path(checkpoint, tensor)), tensor->name,
                              errno ? strerror(errno) : "the file was truncated");
    checkpoint->n_read += bytes;
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_checkpoint_read_matrix(struct dskv_checkpoint *checkpoint, const struct dskv_stored *tensor,
                                           int64_t row, int64_t n_rows, int64_t col, int64_t n_cols, void *dst,
                                           struct dskv_error *error)
{
    DSKV_ASSERT(tensor->n_dims == 2 && tensor->dtype < DSKV_N_DTYPES, "%d dimensions of %s", tensor->n_dims,
                tensor->dtype_name);
    DSKV_ASSERT(row >= 0 && n_rows >= 0 && row + n_rows <= tensor->shape[0] && col >= 0 && n_cols >= 0 &&
                    col + n_cols <= tensor->shape[1],
                "rows %lld + %lld, columns %lld + %lld of [%lld, %lld]", (long long)row, (long long)n_rows,
                (long long)col, (long long)n_cols, (long long)tensor->shape[0], (long long)tensor->shape[1]);
    uint64_t size = dskv_dtype_bytes(tensor->dtype), stride = (uint64_t)tensor->shape[1] * size;
    uint64_t first = (uint64_t)row * stride + (uint64_t)col * size;
    size_t segment = (size_t)n_cols * size;
    if (n_cols == tensor->shape[1]) /* whole rows are one segment */
        return dskv_checkpoint_read_bytes(checkpoint, tensor, first, (size_t)n_rows * segment, dst, error);
    enum dskv_exit code = DSKV_EXIT_OK;
    for (int64_t i = 0; code == DSKV_EXIT_OK && i < n_rows; i++)
        code = dskv_checkpoint_read_bytes(checkpoint, tensor, first + (uint64_t)i * stride, segment,
                                          (char *)dst + (size_t)i * segment, error);
    return code;
}

const char *dskv_checkpoint_name(const struct dskv_checkpoint *checkpoint)
{
    return checkpoint->name;
}

uint64_t dskv_checkpoint_n_read(const struct dskv_checkpoint *checkpoint)
{
    return checkpoint->n_read;
}
