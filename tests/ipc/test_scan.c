/* The look at a header before msgpack-c sees it. */
#include "base/limits.h"
#include "base/memory.h"
#include "ipc/diag.h"
#include "ipc/scan.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum dskv_code scan_hex(const char *hex)
{
    struct dskv_error error = {0};
    struct dskv_frame frame = diag_hex(hex);
    uint8_t *exact = malloc(frame.bytes); /* so that a sanitizer sees a read beyond the end */
    if (frame.bytes)
        memcpy(exact, frame.data, frame.bytes);
    enum dskv_code code = dskv_scan_header(exact, frame.bytes, &error);
    CU_ASSERT_EQUAL(!code, error.message[0] == 0);
    free(exact);
    free(frame.data);
    return code;
}

static void good_headers_pass(void)
{
    const char *good[] = {
        "80",                                                        /* {} */
        "81 a1 61 c0",                                               /* nil */
        "82 a1 61 c2 a1 62 c3",                                      /* bools */
        "81 a1 61 93 00 ff e0",                                      /* small integers */
        "81 a1 61 94 cc ff cd ffff ce ffffffff cf ffffffffffffffff", /* unsigned */
        "81 a1 61 94 d0 80 d1 8000 d2 80000000 d3 8000000000000000", /* signed */
        "81 a1 61 92 ca 7fc00000 cb 3ff0000000000000",               /* floats, of any value */
        "81 a1 61 93 c4 01 ff c5 0001 ff c6 00000001 ff",            /* bins */
        "81 d9 01 61 92 da 0001 62 db 00000001 63",                  /* strings of every width, a key too */
        "de 0001 a1 61 dc 0001 dd 00000001 df 00000000",             /* wide maps and arrays */
        "81 a4 f09f9880 a3 e282ac",                                  /* UTF-8 of four and three bytes */
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        enum dskv_code code = scan_hex(good[i]);
        if (code)
            printf("%s\n", good[i]);
        CU_ASSERT_EQUAL(code, DSKV_OK);
    }
}

static void bad_headers_are_refused(void)
{
    const char *bad[] = {
        "", /* nothing */
        "c0",
        "01",
        "90",
        "a1 61",
        "c4 01 00", /* no map */
        "81",
        "81 a1",
        "81 a1 61", /* cut off */
        "80 00",
        "81 a1 61 c0 80", /* something follows */
        "81 00 c0",
        "81 c4 01 61 c0",
        "81 90 c0",
        "81 c0 c0",          /* keys that are no strings */
        "81 a1 61 81 01 02", /* the same inside */
        "81 a1 61 c1",       /* never used */
        "81 a1 61 d4 01 00",
        "81 a1 61 c7 01 01 00",
        "81 a1 61 c8 0001 01 00",
        "81 a1 61 d8 01 00000000000000000000000000000000",
        "81 a1 61 c4 05 00",
        "81 a1 61 c5 ffff 00",
        "81 a1 61 c6 ffffffff 00", /* bins beyond the end */
        "81 a1 61 a5 61",
        "81 a1 61 d9 ff 61",
        "81 a1 61 da ffff 61",
        "81 a1 61 db ffffffff 61",
        "81 a1 61 d9",
        "81 a1 61 da 00",
        "81 a1 61 db 000000",
        "81 a1 61 c6 000000",
        "81 a1 61 dd 000000",
        "81 a1 61 cc",
        "81 a1 61 cd 00",
        "81 a1 61 cf 00000000000000",
        "81 a1 61 ca 000000",
        "dd ffffffff",
        "df ffffffff",
        "81 a1 61 dd ffffffff",
        "81 a1 61 df 7fffffff",
        "81 a1 61 dc ffff",
        "81 a1 61 df ffffffff 00",
        "81 a1 61 92 93 c0 c0", /* each count fits, their sum does not */
        "81 a1 80 c0",
        "81 a1 61 a1 ff",
        "81 a1 61 a2 c080",
        "81 a1 61 a2 c1bf",
        "81 a1 61 a3 e08080", /* not UTF-8 */
        "81 a1 61 a3 eda080",
        "81 a1 61 a4 f08080 80",
        "81 a1 61 a4 f4908080",
        "81 a1 61 a2 e282",
        "81 a1 61 a3 e28261",
        "81 a1 61 a4 f8888080",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        enum dskv_code code = scan_hex(bad[i]);
        if (!code)
            printf("%s\n", bad[i]);
        CU_ASSERT_EQUAL(code, DSKV_BAD_MESSAGE);
    }
}

/* A count is not even walked along when the bytes cannot hold it. */
static void promises_are_not_believed(void)
{
    const char *promises[] = {"dd ffffffff", "df ffffffff", "81 a1 61 dd 00000003 c0 c0", "81 a1 61 92 93 c0 c0 c0"};
    for (size_t i = 0; i < sizeof promises / sizeof promises[0]; i++) {
        struct dskv_error error = {0};
        struct dskv_frame frame = diag_hex(promises[i]);
        CU_ASSERT_EQUAL(dskv_scan_header(frame.data, frame.bytes, &error), DSKV_BAD_MESSAGE);
        CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "promises more values"));
        free(frame.data);
    }
}

static void nesting_is_bounded(void)
{
    uint8_t header[64] = {0x81, 0xa1, 'a'};
    struct dskv_error error = {0};
    for (int depth = 1; depth < 60; depth++) { /* the map, and arrays in it */
        memset(header + 3, 0x91, (size_t)depth - 1);
        header[3 + depth - 1] = 0xc0;
        enum dskv_code expected = depth <= DSKV_MAX_HEADER_DEPTH ? DSKV_OK : DSKV_BAD_MESSAGE;
        CU_ASSERT_EQUAL(dskv_scan_header(header, 3 + (size_t)depth, &error), expected);
    }
}

static void values_are_bounded(void)
{
    for (int over = 0; over < 2; over++) {
        uint32_t n = DSKV_MAX_HEADER_VALUES - 3 + (uint32_t)over; /* beside the map, the key and the array */
        uint8_t *header = dskv_calloc(n + 8, 1);
        struct dskv_error error = {0};
        memcpy(header,
               "\x81\xa1"
               "a\xdd",
               4);
        for (int i = 0; i < 4; i++)
            header[4 + i] = (uint8_t)(n >> (24 - 8 * i));
        CU_ASSERT_EQUAL(dskv_scan_header(header, n + 8, &error), over ? DSKV_BAD_MESSAGE : DSKV_OK);
        free(header);
    }
}

/* Every cut of a header that uses every form is refused, whatever was cut off. */
static void every_cut_is_refused(void)
{
    struct dskv_frame whole =
        diag_hex("84 a1 61 94 cc ff d1 8000 cb 3ff0000000000000 c4 02 0102 a1 62 82 d9 02 6162 c0 a1 63 dc 0002 "
                 "c2 c3 a1 64 df 00000001 a1 65 dd 00000001 00 a1 66 db 00000003 e282ac");
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL(dskv_scan_header(whole.data, whole.bytes, &error), DSKV_OK);
    for (size_t n = 0; n < whole.bytes; n++) {
        uint8_t *cut = malloc(n);
        if (n)
            memcpy(cut, whole.data, n);
        CU_ASSERT_EQUAL(dskv_scan_header(cut, n, &error), DSKV_BAD_MESSAGE);
        free(cut);
    }
    free(whole.data);
}

int main(void)
{
    return dskv_run_tests("ipc.scan", (struct dskv_test[]){
                                          {"good headers pass", good_headers_pass},
                                          {"bad headers are refused", bad_headers_are_refused},
                                          {"promises are not believed", promises_are_not_believed},
                                          {"nesting is bounded", nesting_is_bounded},
                                          {"values are bounded", values_are_bounded},
                                          {"every cut is refused", every_cut_is_refused},
                                          {NULL, NULL},
                                      });
}
