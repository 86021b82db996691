/* Path: how files are named in sentences. */
#ifndef DSKV_PARALLEL_PATH_H
#define DSKV_PARALLEL_PATH_H

#include <string.h>

/* The end of a path that is too long for a sentence (an error's message has 256 bytes, and the reason follows the
 * name). */
static inline const char *dskv_path_tail(const char *path)
{
    size_t n = strlen(path);
    return n > 120 ? path + n - 120 : path;
}

#endif
