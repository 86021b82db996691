/* What the tests of the CUDA device share: the device under test beside the CPU device as reference, tensors that live
 * on either, poison, and comparisons within a few units in the last place. */
#ifndef DSKV_TESTS_TEST_CUDA_H
#define DSKV_TESTS_TEST_CUDA_H

#include "kernels/kernel_test.h"

#include "base/memory.h"

/* Open while the tests run.  The reference computes in f32. */
extern struct dskv_device *gpu, *cpu;

/* The dtype that the device keeps its activations in, when asked for dtype. */
enum dskv_dtype test_activation(struct dskv_device *device, enum dskv_dtype dtype);

/* A tensor of floats [rows, cols], rounded to dtype, in device memory; its rows are `gap` elements apart, poisoned as
 * everything is that no value was given for.  values null: all of it is poison. */
struct dskv_tensor test_put(struct dskv_device *device, const float *values, enum dskv_dtype dtype, int64_t rows,
                            int64_t cols, int64_t gap);
/* Its elements [rows, cols] as f32, freed with free(); fails when a gap has been written to, and frees the tensor. */
float *test_take(struct dskv_device *device, struct dskv_tensor *tensor);
/* A copy of host bytes in device memory. */
void *test_put_bytes(struct dskv_device *device, const void *bytes, size_t n);
void *test_take_bytes(struct dskv_device *device, void *memory, size_t n);

/* Units in the last place of a dtype at 1. */
float test_unit(enum dskv_dtype dtype);
/* 1 when |got - expected| <= units * test_unit(dtype) * |expected| + absolute everywhere; else prints the first that is
 * not. */
int test_near(const char *what, const float *got, const float *expected, size_t n, enum dskv_dtype dtype, float units,
              float absolute);

void test_cuda_open(const char *kind);
void test_cuda_close(void);

/* Each file's tests. */
extern const struct dskv_test test_cuda_rows[], test_cuda_matmul[], test_cuda_attention[], test_cuda_choice[],
    test_cuda_chain[], test_cuda_queue[];

#endif
