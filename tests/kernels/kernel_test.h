/* What the kernel tests share: every vector path and several thread counts, seeded random data, comparisons of bits. */
#ifndef DSKV_TESTS_KERNEL_TEST_H
#define DSKV_TESTS_KERNEL_TEST_H

#include "kernels/ops.h"
#include "support/cunit_suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TEST_DEVICES = 8 };

/* Opens each vector path that this processor has, with one and with more threads; the first is the best path, one
 * thread. */
struct test_devices {
    int n;
    struct dskv_device *device[MAX_TEST_DEVICES];
};
void test_devices_open(struct test_devices *devices);
void test_devices_close(struct test_devices *devices);
/* True for the path without vectors: tests give it less to do. */
int test_device_is_slow(const struct dskv_device *device);
/* The best path with one thread. */
struct dskv_device *test_device_open(void);

uint64_t test_random(uint64_t *state);
/* [0, n). */
int test_random_below(uint64_t *state, int n);
/* In [-1, 1). */
float test_random_unit(uint64_t *state);
/* Any sign, magnitudes over 16 powers of two. */
float test_random_wide(uint64_t *state);
/* n floats of test_random_wide; freed with free(). */
float *test_random_floats(uint64_t *state, size_t n);

/* A float as it is after storage in dtype. */
float test_rounded(enum dskv_dtype dtype, float x);
/* An open weight filled with rows [n, k] of f32. */
struct dskv_weight *test_weight(struct dskv_device *device, int64_t n, int64_t k, enum dskv_dtype dtype,
                                const float *rows);

/* True for a case that a test with many leaves out: with DSKV_TEST_EVERY=n in the environment, for all but every n-th,
 * since a sanitizer makes each take a hundred times as long. */
int test_leaves_out(void);

/* 1 when the bits are equal; else prints the first difference and returns 0. */
int test_same_bits(const char *what, const void *a, const void *b, size_t n_floats);

#endif
