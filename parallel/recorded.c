#include "parallel/recorded.h"

#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

/* More than the sizes that a server sees in a while; far more than can be under way when one makes room. */
#define N_ENTRIES 64

struct entry {
    char key[DSKV_RECORDED_KEY_BYTES];
    uint64_t last_use; /* 0: empty */
    struct dskv_recording *recording;
};

struct dskv_recorded {
    struct dskv_device *device;
    uint64_t n_uses;
    struct entry *last; /* looked for */
    struct entry entries[N_ENTRIES];
};

struct dskv_recorded *dskv_recorded_open(struct dskv_device *device)
{
    struct dskv_recorded *recorded = dskv_calloc(1, sizeof *recorded);
    recorded->device = device;
    return recorded;
}

void dskv_recorded_close(struct dskv_recorded **recorded)
{
    if (!*recorded)
        return;
    for (int i = 0; i < N_ENTRIES; i++)
        dskv_recording_close((*recorded)->device, &(*recorded)->entries[i].recording);
    free(*recorded);
    *recorded = NULL;
}

/* The key's entry, or else the one that was not used for longest. */
static struct entry *find_entry(struct dskv_recorded *recorded, const void *key)
{
    struct entry *oldest = recorded->entries;
    for (struct entry *e = recorded->entries; e < recorded->entries + N_ENTRIES; e++) {
        if (e->last_use && memcmp(e->key, key, sizeof e->key) == 0)
            return e;
        if (e->last_use < oldest->last_use)
            oldest = e;
    }
    return oldest;
}

const struct dskv_recording *dskv_recorded_find(struct dskv_recorded *recorded, const void *key, int *is_due)
{
    struct entry *entry = recorded->last = find_entry(recorded, key);
    int is_known = entry->last_use && memcmp(entry->key, key, sizeof entry->key) == 0;
    entry->last_use = ++recorded->n_uses;
    *is_due = is_known && !entry->recording;
    if (is_known)
        return entry->recording;
    dskv_recording_close(recorded->device, &entry->recording);
    memcpy(entry->key, key, sizeof entry->key);
    return NULL;
}

void dskv_recorded_keep(struct dskv_recorded *recorded, struct dskv_recording *recording)
{
    recorded->last->recording = recording;
}
