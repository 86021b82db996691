/* Threads: a small pool that splits independent items of one operation; knows nothing of what they compute.
 *
 * Items are handed out as threads come free, so results must not depend on who computes what.  Workers spin a moment
 * after an operation, since the next one is usually near, and then sleep: an idle pool costs nothing.
 */
#ifndef DSKV_CPU_THREADS_H
#define DSKV_CPU_THREADS_H

#include <stdint.h>

struct dskv_threads;

/* Computes items [first, last). */
typedef void dskv_threads_part(void *context, int64_t first, int64_t last);

/* n_threads counts the caller; null when a thread cannot be started. */
struct dskv_threads *dskv_threads_open(int n_threads);
/* Ends and joins the workers. */
void dskv_threads_close(struct dskv_threads **threads);

/* Calls part until [0, n_items) is done; returns when all is.  item_ns is a rough cost of one item: work that is not
 * worth waking anyone is done by the caller alone.  One caller at a time. */
void dskv_threads_for(struct dskv_threads *threads, int64_t n_items, int64_t item_ns, dskv_threads_part *part,
                      void *context);

#endif
