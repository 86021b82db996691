#include "base/memory.h"

#include "base/status.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __GLIBC__ /* known once a header was read */
#include <malloc.h>
#endif

static void *or_end(void *memory, size_t n, size_t size)
{
    if (memory)
        return memory;
    fprintf(stderr, "dskvd: out of memory: %zu elements of %zu bytes\n", n, size);
    _exit(DSKV_EXIT_MEMORY);
}

void *dskv_calloc(size_t n, size_t size)
{
    return or_end(calloc(n ? n : 1, size ? size : 1), n, size);
}

void *dskv_realloc(void *memory, size_t n, size_t size)
{
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes))
        return or_end(NULL, n, size);
    return or_end(realloc(memory, bytes ? bytes : 1), n, size);
}

char *dskv_strdup(const char *string)
{
    return or_end(strdup(string), strlen(string) + 1, 1);
}

char *dskv_format(const char *format, ...)
{
    char *result = NULL;
    va_list arguments;
    va_start(arguments, format);
    int n = vasprintf(&result, format, arguments);
    va_end(arguments);
    return or_end(n < 0 ? NULL : result, 1, 1);
}

void dskv_memory_trim(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

size_t dskv_resident_bytes(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file)
        return 0;
    long total = 0, resident = 0;
    int n = fscanf(file, "%ld %ld", &total, &resident);
    fclose(file);
    return n == 2 ? (size_t)resident * (size_t)sysconf(_SC_PAGESIZE) : 0;
}
