/* Messages made by the field tables, from a seed: every field with a value that it allows. */
#ifndef DSKV_TESTS_IPC_MAKE_MESSAGE_H
#define DSKV_TESTS_IPC_MAKE_MESSAGE_H

#include "ipc/codec.h"

enum make_how {
    MAKE_LEAST, /* required fields alone */
    MAKE_ALL,   /* every field, with a value that is not its default */
    MAKE_SOME,  /* optional fields at random */
};

/* Released with dskv_request_clear, dskv_event_clear. */
void make_request(struct dskv_request *request, enum dskv_op op, enum make_how how, uint64_t seed);
void make_event(struct dskv_event *event, enum dskv_event_kind kind, enum dskv_op op, enum make_how how, uint64_t seed);
/* The first field in which two structs differ, or null. */
const char *compare_fields(const struct dskv_table *table, const void *a, const void *b);
/* A deterministic random number; changes *state. */
uint64_t make_random(uint64_t *state);
/* The same message once more, and whether two are the same. */
struct dskv_frames copy_frames(const struct dskv_frames *frames);
int same_frames(const struct dskv_frames *a, const struct dskv_frames *b);

#endif
