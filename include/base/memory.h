/* Memory: allocation that cannot return null.  Small host structures only: running out of them is the end of the
 * process (DSKV_EXIT_MEMORY); pools, weights and buffers are allocated by their owners with calls that report failure.
 */
#ifndef DSKV_BASE_MEMORY_H
#define DSKV_BASE_MEMORY_H

#include <stddef.h>

/* Zeroed array of n elements of size bytes; never null, also for n == 0.  Freed with free(). */
void *dskv_calloc(size_t n, size_t size);
/* Grows or shrinks an array; new bytes are not zeroed. */
void *dskv_realloc(void *memory, size_t n, size_t size);
char *dskv_strdup(const char *string);
/* printf into a new string, freed with free(). */
char *dskv_format(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Gives free heap memory back to the system, where the C library can: after a burst, not in a loop. */
void dskv_memory_trim(void);
/* This process's resident memory now, bytes; 0 where the system does not tell. */
size_t dskv_resident_bytes(void);

#endif
