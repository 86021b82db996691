/* The examples of ipc/PROTOCOL.md: their text is their bytes, the codec reads them, and writes the same bytes again. */
#include "base/memory.h"
#include "ipc/diag.h"
#include "ipc/make_message.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct example {
    int line, is_event;
    char text[4096], header[8192]; /* as written: the fields, the hexadecimal digits */
    struct dskv_frames frames;
};

static int n_requests[DSKV_N_OPS], n_events[DSKV_N_EVENT_KINDS][DSKV_N_OPS + 1];

static void append(char *text, size_t size, const char *more)
{
    size_t n = strlen(text);
    DSKV_ASSERT(n + strlen(more) < size, "an example of more than %zu bytes", size);
    memcpy(text + n, more, strlen(more) + 1);
}

/* Reads the next example; 0 at the end of the file. */
static int next_example(FILE *file, int *line, struct example *example)
{
    char text[512];
    enum { OUTSIDE, FIELDS, HEADER, FRAMES } part = OUTSIDE;
    memset(example, 0, sizeof *example);
    while (fgets(text, sizeof text, file)) {
        ++*line;
        if (part == OUTSIDE) {
            if (strcmp(text, "```request\n") != 0 && strcmp(text, "```event\n") != 0)
                continue;
            example->line = *line;
            example->is_event = text[3] == 'e';
            part = FIELDS;
        } else if (strcmp(text, "```\n") == 0) {
            return 1;
        } else if (strncmp(text, "header: ", 8) == 0) {
            append(example->header, sizeof example->header, text + 8);
            diag_add(&example->frames, (struct dskv_frame){0}); /* filled when the header is whole */
            part = HEADER;
        } else if (strncmp(text, "frame ", 6) == 0) {
            CU_ASSERT_EQUAL(atoi(text + 6), example->frames.n);
            diag_add(&example->frames, diag_hex(strchr(text, ':') + 1));
            part = FRAMES;
        } else if (part == FIELDS) {
            append(example->text, sizeof example->text, text);
        } else {
            append(example->header, sizeof example->header, text);
        }
    }
    return 0;
}

/* Reads the frames and writes them again into *again. */
static enum dskv_code pass_through(const struct example *example, struct dskv_frames *frames, struct dskv_frames *again,
                                   struct dskv_error *error)
{
    struct dskv_request request;
    struct dskv_event event;
    enum dskv_code code =
        example->is_event ? dskv_event_decode(frames, &event, error) : dskv_request_decode(frames, &request, error);
    if (code)
        return code;
    if (example->is_event) {
        n_events[event.kind][event.op]++;
        code = dskv_event_encode(&event, again, error);
        dskv_event_clear(&event);
    } else {
        n_requests[request.op]++;
        code = dskv_request_encode(&request, again, error);
        dskv_request_clear(&request);
    }
    return code;
}

static void check_example(struct example *example)
{
    struct dskv_frames again = {0}, frames;
    struct dskv_frame written = diag_header(example->text);
    struct dskv_error error = {0};
    CU_ASSERT_FATAL(example->frames.n > 0);
    example->frames.frames[0] = diag_hex(example->header);
    int same_text = written.bytes == example->frames.frames[0].bytes &&
                    memcmp(written.data, example->frames.frames[0].data, written.bytes) == 0;
    frames = copy_frames(&example->frames);
    enum dskv_code code = pass_through(example, &frames, &again, &error);
    int same_bytes = !code && same_frames(&example->frames, &again);
    if (!same_text || !same_bytes)
        printf("PROTOCOL.md, line %d: the text is %sits bytes; the codec says: %s\n", example->line,
               same_text ? "" : "not ",
               code         ? error.message
               : same_bytes ? "the same"
                            : "other bytes");
    CU_ASSERT(same_text);
    CU_ASSERT(same_bytes);
    dskv_frames_clear(&again);
    free(written.data);
}

static void examples_are_true(void)
{
    static struct example example;
    int line = 0, n = 0;
    FILE *file = fopen(DSKV_SOURCE_DIR "/ipc/PROTOCOL.md", "r");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    for (; next_example(file, &line, &example); n++) {
        check_example(&example);
        dskv_frames_clear(&example.frames);
    }
    fclose(file);
    CU_ASSERT(n > 30);
}

static void every_message_has_an_example(void)
{
    for (int op = 0; op < DSKV_N_OPS; op++) {
        if (!n_requests[op])
            printf("no request of %s\n", dskv_op_name((enum dskv_op)op));
        CU_ASSERT(n_requests[op] > 0);
        for (int kind = 0; kind < DSKV_N_EVENT_KINDS; kind++)
            if (kind != DSKV_EVENT_ERROR && dskv_event_table((enum dskv_event_kind)kind, (enum dskv_op)op)) {
                if (!n_events[kind][op])
                    printf("no %s of %s\n", dskv_event_kind_name((enum dskv_event_kind)kind),
                           dskv_op_name((enum dskv_op)op));
                CU_ASSERT(n_events[kind][op] > 0);
            }
    }
    CU_ASSERT(n_events[DSKV_EVENT_ERROR][DSKV_OP_FORWARD] > 0 && n_events[DSKV_EVENT_ERROR][DSKV_N_OPS] > 0);
}

static void check_names(const char *page, const struct dskv_table *table, const char *what)
{
    for (int i = 0; i < table->n; i++) {
        int is_optional = !(table->fields[i].flags & DSKV_FIELD_REQUIRED);
        char *quoted = dskv_format("`%s%s`", table->fields[i].name, is_optional ? "?" : "");
        char *in_map = dskv_format("%s%s: ", table->fields[i].name, is_optional ? "?" : "");
        int is_detail = strcmp(what, "details") == 0; /* all optional, so the page says that once */
        char *bare = dskv_format("`%s`", table->fields[i].name);
        int is_named = strstr(page, quoted) || strstr(page, in_map) || (is_detail && strstr(page, bare));
        if (!is_named)
            printf("%s: %s\n", what, quoted);
        CU_ASSERT(is_named);
        free(quoted);
        free(in_map);
        free(bare);
        if (table->fields[i].table)
            check_names(page, table->fields[i].table, table->fields[i].name);
    }
}

/* Every field, error, kind and operation stands on the page, between backquotes or in a map; optional ones with their
 * ?. */
static void the_page_names_everything(void)
{
    FILE *file = fopen(DSKV_SOURCE_DIR "/ipc/PROTOCOL.md", "r");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    char *page = dskv_calloc(1 << 20, 1);
    size_t n = fread(page, 1, (1 << 20) - 1, file);
    CU_ASSERT(n > 0);
    fclose(file);
    *strstr(page, "## 11.") = 0;
    for (int code = 1; code < DSKV_N_CODES; code++)
        CU_ASSERT_PTR_NOT_NULL(strstr(page, dskv_code_name((enum dskv_code)code)));
    for (int op = 0; op < DSKV_N_OPS; op++) {
        char *heading = dskv_format("\n### %s\n", dskv_op_name((enum dskv_op)op));
        CU_ASSERT_PTR_NOT_NULL_FATAL(strstr(page, heading));
        check_names(page, dskv_request_table((enum dskv_op)op), dskv_op_name((enum dskv_op)op));
        for (int kind = 0; kind < DSKV_N_EVENT_KINDS; kind++) {
            const struct dskv_table *table = dskv_event_table((enum dskv_event_kind)kind, (enum dskv_op)op);
            if (table)
                check_names(page, table, dskv_event_kind_name((enum dskv_event_kind)kind));
        }
        free(heading);
    }
    free(page);
}

int main(void)
{
    return dskv_run_tests("ipc.protocol", (struct dskv_test[]){
                                              {"examples are true", examples_are_true},
                                              {"every message has an example", every_message_has_an_example},
                                              {"the page names everything", the_page_names_everything},
                                              {NULL, NULL},
                                          });
}
