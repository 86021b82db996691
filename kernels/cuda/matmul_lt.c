/* Matmul of many rows by cuBLASLt, inside the family whose order is ours.
 *
 * Owns the library's handle and, for each shape, one algorithm: the heuristic's first that neither splits k nor needs a
 * workspace, for the number of rows rounded up to a power of two.  It is chosen by rule, never by a clock, and serves
 * only after its bits have been compared with the own kernels' on operands of wide range.  The library sees
 * column-major matrices: y^T [n, rows] = w^T^T [n, k] x^T [k, rows].
 */
#include "cuda/matmul.h"

#include "base/log.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>

/* The library takes 200 MB of memory as soon as it is loaded, so it is loaded only where a GPU is opened. */
#define STRING_OF(x) #x
#define SONAME(major) "libcublasLt.so." STRING_OF(major)
#define FUNCTIONS(X)                                                                                                   \
    X(cublasLtCreate)                                                                                                  \
    X(cublasLtDestroy)                                                                                                 \
    X(cublasLtMatmulDescCreate)                                                                                        \
    X(cublasLtMatmulDescDestroy)                                                                                       \
    X(cublasLtMatmulDescSetAttribute)                                                                                  \
    X(cublasLtMatrixLayoutCreate)                                                                                      \
    X(cublasLtMatrixLayoutDestroy)                                                                                     \
    X(cublasLtMatmul)                                                                                                  \
    X(cublasLtMatmulAlgoConfigGetAttribute)                                                                            \
    X(cublasLtMatmulPreferenceCreate)                                                                                  \
    X(cublasLtMatmulPreferenceDestroy)                                                                                 \
    X(cublasLtMatmulPreferenceSetAttribute)                                                                            \
    X(cublasLtMatmulAlgoGetHeuristic)

static struct {
    void *handle;
#define FIELD(name) __typeof__(name) *name;
    FUNCTIONS(FIELD)
#undef FIELD
} library;

/* 1 when the library and all that is used of it are there. */
static int load_library(void)
{
    if (library.handle)
        return 1;
    void *handle = dlopen(SONAME(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        dskv_log(DSKV_LOG_WARNING, "cuda", "many rows are multiplied by the own kernels: %s", dlerror());
        return 0;
    }
#define LOAD(name)                                                                                                     \
    if (!(library.name = (__typeof__(name) *)dlsym(handle, #name)))                                                    \
        return 0;
    FUNCTIONS(LOAD)
#undef LOAD
    library.handle = handle;
    return 1;
}

enum { MAX_SHAPES = 256, MIN_BUCKET = 64, MAX_BUCKET = 2048, MAX_OFFERED = 32, PROOF_ROWS = 256, PROOF_OUTPUTS = 2048 };

struct shape {
    int64_t n, k;
    enum dskv_dtype dtype, out;
    int bucket, serves;
    cublasLtMatmulAlgo_t algorithm;
};

struct dskv_cuda_lt {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    int n_shapes, n_serving;
    struct shape shapes[MAX_SHAPES];
};

static cudaDataType_t data_type(enum dskv_dtype dtype)
{
    return dtype == DSKV_F32 ? CUDA_R_32F : dtype == DSKV_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

void dskv_cuda_matmul_lt_close(struct dskv_cuda_lt **lt)
{
    if (!*lt)
        return;
    if ((*lt)->product)
        library.cublasLtMatmulDescDestroy((*lt)->product);
    if ((*lt)->handle)
        library.cublasLtDestroy((*lt)->handle);
    free(*lt);
    *lt = NULL;
}

/* Null when the library cannot be used here. */
static struct dskv_cuda_lt *lt_open(void)
{
    const cublasOperation_t transposed = CUBLAS_OP_T;
    struct dskv_cuda_lt *lt = load_library() ? calloc(1, sizeof *lt) : NULL;
    if (lt &&
        (library.cublasLtCreate(&lt->handle) != CUBLAS_STATUS_SUCCESS ||
         library.cublasLtMatmulDescCreate(&lt->product, CUBLAS_COMPUTE_32F, CUDA_R_32F) != CUBLAS_STATUS_SUCCESS ||
         library.cublasLtMatmulDescSetAttribute(lt->product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                                sizeof transposed) != CUBLAS_STATUS_SUCCESS))
        dskv_cuda_matmul_lt_close(&lt);
    return lt;
}

/* The layouts of one product. */
struct layouts {
    cublasLtMatrixLayout_t w, x, y;
};

static void layouts_close(struct layouts *l)
{
    if (l->w)
        library.cublasLtMatrixLayoutDestroy(l->w);
    if (l->x)
        library.cublasLtMatrixLayoutDestroy(l->x);
    if (l->y)
        library.cublasLtMatrixLayoutDestroy(l->y);
}

static int layouts_open(struct layouts *l, const struct shape *shape, int64_t n, int64_t rows, int64_t x_stride,
                        int64_t y_stride)
{
    *l = (struct layouts){NULL, NULL, NULL};
    uint64_t k = (uint64_t)shape->k;
    if (library.cublasLtMatrixLayoutCreate(&l->w, data_type(shape->dtype), k, (uint64_t)n,
                                           dskv_cuda_padded(shape->k)) == CUBLAS_STATUS_SUCCESS &&
        library.cublasLtMatrixLayoutCreate(&l->x, data_type(shape->dtype), k, (uint64_t)rows, x_stride) ==
            CUBLAS_STATUS_SUCCESS &&
        library.cublasLtMatrixLayoutCreate(&l->y, data_type(shape->out), (uint64_t)n, (uint64_t)rows, y_stride) ==
            CUBLAS_STATUS_SUCCESS)
        return 1;
    layouts_close(l);
    return 0;
}

/* Queues y = x w by the shape's algorithm; 0 when the library refuses. */
static int multiply(struct dskv_cuda *cuda, const struct shape *shape, int64_t n, const void *w,
                    const struct dskv_tensor *x, void *y, int64_t y_stride)
{
    const float one = 1, zero = 0;
    struct layouts l;
    if (!layouts_open(&l, shape, n, x->rows, x->stride, y_stride))
        return 0;
    cublasStatus_t status = library.cublasLtMatmul(cuda->lt->handle, cuda->lt->product, &one, w, l.w, x->data, l.x,
                                                   &zero, y, l.y, y, l.y, &shape->algorithm, NULL, 0, cuda->stream);
    layouts_close(&l);
    return status == CUBLAS_STATUS_SUCCESS;
}

static int keeps_our_order(const cublasLtMatmulAlgo_t *algorithm)
{
    int32_t n_splits = 0;
    uint32_t reduction = 0;
    return library.cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &n_splits,
                                                        sizeof n_splits, NULL) == CUBLAS_STATUS_SUCCESS &&
           library.cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &reduction,
                                                        sizeof reduction, NULL) == CUBLAS_STATUS_SUCCESS &&
           n_splits <= 1 && reduction == CUBLASLT_REDUCTION_SCHEME_NONE;
}

/* The first offer inside the family; 0 when there is none. */
static int choose(struct dskv_cuda *cuda, struct shape *shape)
{
    const uint64_t no_workspace = 0;
    const uint32_t alignment = 16;
    cublasLtMatmulHeuristicResult_t offered[MAX_OFFERED];
    cublasLtMatmulPreference_t preference = NULL;
    struct layouts l;
    int n_offered = 0, chosen = 0;
    if (!layouts_open(&l, shape, shape->n, shape->bucket, shape->k, shape->n))
        return 0;
    if (library.cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS) {
        library.cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &no_workspace, sizeof no_workspace);
        static const cublasLtMatmulPreferenceAttributes_t aligned[] = {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                                                       CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                                                       CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
        for (size_t i = 0; i < sizeof aligned / sizeof *aligned; i++)
            library.cublasLtMatmulPreferenceSetAttribute(preference, aligned[i], &alignment, sizeof alignment);
        if (library.cublasLtMatmulAlgoGetHeuristic(cuda->lt->handle, cuda->lt->product, l.w, l.x, l.y, l.y, preference,
                                                   MAX_OFFERED, offered, &n_offered) != CUBLAS_STATUS_SUCCESS)
            n_offered = 0;
        library.cublasLtMatmulPreferenceDestroy(preference);
    }
    for (int i = 0; i < n_offered && !chosen; i++)
        if (offered[i].state == CUBLAS_STATUS_SUCCESS && keeps_our_order(&offered[i].algo)) {
            shape->algorithm = offered[i].algo;
            chosen = 1;
        }
    layouts_close(&l);
    return chosen;
}

/* 1 when the algorithm has the own kernels' bits on wide operands, of the shape's k and as many outputs and rows as the
 * scratch memory holds. */
static int prove(struct dskv_device *device, const struct shape *shape)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    int64_t n = shape->n < PROOF_OUTPUTS ? shape->n : PROOF_OUTPUTS, rows = PROOF_ROWS, k = dskv_cuda_padded(shape->k);
    size_t scratch_bytes = dskv_cuda_scratch_bytes(cuda), element = dskv_dtype_bytes(shape->dtype),
           out_element = dskv_dtype_bytes(shape->out);
    size_t x_bytes = (size_t)(rows * k) * element, row_bytes = (size_t)k * element + 2 * (size_t)rows * out_element;
    if (scratch_bytes < x_bytes + 64 * row_bytes)
        return 0;
    int64_t most = (int64_t)((scratch_bytes - x_bytes) / row_bytes) / 64 * 64;
    if (n > most)
        n = most;
    char *x = (char *)dskv_cuda_scratch(cuda), *w = x + x_bytes, *got = w + (size_t)(dskv_cuda_padded(n) * k) * element;
    size_t y_bytes = (size_t)(rows * n) * out_element;
    if (got + 2 * y_bytes > x + scratch_bytes)
        return 0;
    dskv_cuda_fill_wide(device, x, shape->dtype, rows * k, 1);
    dskv_cuda_fill_wide(device, w, shape->dtype, dskv_cuda_padded(n) * k, 2);
    struct dskv_weight weight = {.n = n, .k = shape->k, .dtype = shape->dtype, .data = w};
    struct dskv_tensor columns = {x, shape->dtype, rows, shape->k, k};
    if (!multiply(cuda, shape, n, w, &columns, got, n))
        return 0;
    dskv_cuda_matmul_own(device, &(struct dskv_matmul){
                                     .x = columns, .w = &weight, .y = dskv_tensor(got + y_bytes, shape->out, rows, n)});
    return dskv_cuda_count_differences(device, got, got + y_bytes, y_bytes) == 0;
}

static const struct shape *find_shape(const struct dskv_cuda_lt *lt, const struct shape *wanted)
{
    for (int i = 0; lt && i < lt->n_shapes; i++) {
        const struct shape *s = &lt->shapes[i];
        if (s->n == wanted->n && s->k == wanted->k && s->dtype == wanted->dtype && s->out == wanted->out &&
            s->bucket == wanted->bucket)
            return s;
    }
    return NULL;
}

/* Whether the library may be asked for this weight at all: its operands must be aligned. */
static int is_for_lt(const struct dskv_weight *w)
{
    return w->dtype != DSKV_F32 && w->k && w->k % 8 == 0 && w->n && w->n % 8 == 0;
}

void dskv_cuda_matmul_lt_prepare(struct dskv_device *device, const struct dskv_weight *w)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    struct shape shape = {.n = w->n, .k = w->k, .dtype = w->dtype, .out = w->dtype, .bucket = MIN_BUCKET};
    if (!is_for_lt(w) || find_shape(cuda->lt, &shape) || (!cuda->lt && !(cuda->lt = lt_open())))
        return;
    int n_before = cuda->lt->n_serving, n_asked = 0;
    for (; shape.bucket <= MAX_BUCKET && cuda->lt->n_shapes + 2 <= MAX_SHAPES; shape.bucket *= 2)
        for (int to_f32 = 0; to_f32 < 2; to_f32++, n_asked++) {
            shape.out = to_f32 ? DSKV_F32 : w->dtype;
            shape.serves = choose(cuda, &shape) && prove(device, &shape);
            cuda->lt->n_serving += shape.serves;
            cuda->lt->shapes[cuda->lt->n_shapes++] = shape;
        }
    int n_proved = cuda->lt->n_serving - n_before;
    enum dskv_log_level level = n_before == 0 || n_proved < n_asked ? DSKV_LOG_INFO : DSKV_LOG_DEBUG;
    dskv_log(level, "cuda",
             "many rows by %lld x %lld: cuBLASLt was proved to have the own kernels' bits in %d of %d cases",
             (long long)w->n, (long long)w->k, n_proved, n_asked);
}

/* With a bias, sums go to scratch memory in f32, as many rows at a time as it holds. */
static int multiply_with_bias(struct dskv_device *device, const struct dskv_matmul *p, const struct shape *shape)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    int64_t most = (int64_t)(dskv_cuda_scratch_bytes(cuda) / ((size_t)shape->n * sizeof(float)));
    for (int64_t first = 0; first < p->x.rows; first += most) {
        int64_t rows = p->x.rows - first < most ? p->x.rows - first : most;
        struct dskv_tensor x = p->x, y = p->y;
        x.rows = y.rows = rows;
        x.data = (char *)x.data + (size_t)(first * x.stride) * dskv_dtype_bytes(x.dtype);
        y.data = (char *)y.data + (size_t)(first * y.stride) * dskv_dtype_bytes(y.dtype);
        if (!multiply(cuda, shape, shape->n, p->w->data, &x, dskv_cuda_scratch(cuda), shape->n))
            return 0;
        dskv_cuda_add_bias(device, dskv_cuda_scratch(cuda), p->bias, &y);
    }
    return 1;
}

int dskv_cuda_matmul_lt(struct dskv_device *device, const struct dskv_matmul *p)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    int64_t in_bytes = (int64_t)dskv_dtype_bytes(p->x.dtype), out_bytes = (int64_t)dskv_dtype_bytes(p->y.dtype);
    if (!is_for_lt(p->w) || (uintptr_t)p->x.data % 16 || p->x.stride * in_bytes % 16 || (uintptr_t)p->y.data % 16 ||
        p->y.stride * out_bytes % 16 ||
        (p->bias && dskv_cuda_scratch_bytes(cuda) < MIN_BUCKET * (size_t)p->w->n * sizeof(float)))
        return 0;
    struct shape wanted = {.n = p->w->n, .k = p->w->k, .dtype = p->w->dtype, .bucket = MIN_BUCKET};
    wanted.out = p->bias ? DSKV_F32 : p->y.dtype;
    while (wanted.bucket < p->x.rows && wanted.bucket < MAX_BUCKET)
        wanted.bucket *= 2;
    const struct shape *shape = find_shape(cuda->lt, &wanted);
    if (!shape || !shape->serves)
        return 0;
    if (p->bias)
        return multiply_with_bias(device, p, shape);
    return multiply(cuda, shape, shape->n, p->w->data, &p->x, p->y.data, p->y.stride);
}
