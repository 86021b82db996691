/* Matmul of many rows by cuBLASLt, inside the family whose order is ours.
 *
 * Owns the library's handle and, for each shape, one algorithm: the heuristic's first that neither splits k nor needs a
 * workspace, for the number of rows rounded up to a power of two.  It is chosen by rule, never by a clock, and serves
 * only after its bits have been compared with the own kernels' on operands of wide range.  The library sees
 * column-major matrices: y^T [n, rows] = w^T^T [n, k] x^T [k, rows].
 *
 * A device that was opened with free_order keeps no order: there each number of rows is served by the fastest of all
 * that the library offers and of the exact kernels, by a clock.  It exists to measure what exactness costs.
 */
#include "cuda/matmul.h"

#include "base/log.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <math.h>
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

enum { MAX_SHAPES = 256, MIN_BUCKET = 64, MAX_BUCKET = 2048, MAX_OFFERED = 64, PROOF_ROWS = 256, PROOF_OUTPUTS = 2048 };

struct shape {
    int64_t n, k;
    enum dskv_dtype dtype, out;
    int bucket, serves;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace_bytes; /* of the device's own; only without an order */
};

struct shapes {
    int n;
    struct shape at[MAX_SHAPES];
};

struct dskv_cuda_lt {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    int n_serving;
    struct shapes exact, any_order;
    void *workspace; /* free_order: WORKSPACE_BYTES */
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
    cudaFree((*lt)->workspace);
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
    cublasStatus_t status =
        library.cublasLtMatmul(cuda->lt->handle, cuda->lt->product, &one, w, l.w, x->data, l.x, &zero, y, l.y, y, l.y,
                               &shape->algorithm, cuda->lt->workspace, shape->workspace_bytes, cuda->stream);
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

/* What the heuristic offers for the shape, best first, with at most this workspace and rows of y aligned so. */
static int ask(struct dskv_cuda *cuda, const struct shape *shape, uint64_t workspace_bytes, uint32_t y_alignment,
               cublasLtMatmulHeuristicResult_t offered[MAX_OFFERED])
{
    const uint32_t x_alignment = 16;
    cublasLtMatmulPreference_t preference = NULL;
    struct layouts l;
    int n_offered = 0;
    if (!layouts_open(&l, shape, shape->n, shape->bucket, shape->k, shape->n))
        return 0;
    if (library.cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS) {
        const struct {
            cublasLtMatmulPreferenceAttributes_t attribute;
            const void *value;
            size_t bytes;
        } wishes[] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &x_alignment, sizeof x_alignment},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &y_alignment, sizeof y_alignment},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &y_alignment, sizeof y_alignment}};
        for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++)
            library.cublasLtMatmulPreferenceSetAttribute(preference, wishes[i].attribute, wishes[i].value,
                                                         wishes[i].bytes);
        if (library.cublasLtMatmulAlgoGetHeuristic(cuda->lt->handle, cuda->lt->product, l.w, l.x, l.y, l.y, preference,
                                                   MAX_OFFERED, offered, &n_offered) != CUBLAS_STATUS_SUCCESS)
            n_offered = 0;
        library.cublasLtMatmulPreferenceDestroy(preference);
    }
    layouts_close(&l);
    return n_offered;
}

/* The first offer inside the family; 0 when there is none. */
static int choose(struct dskv_cuda *cuda, struct shape *shape)
{
    cublasLtMatmulHeuristicResult_t offered[MAX_OFFERED];
    int n_offered = ask(cuda, shape, 0, 16, offered);
    for (int i = 0; i < n_offered; i++)
        if (offered[i].state == CUBLAS_STATUS_SUCCESS && keeps_our_order(&offered[i].algo)) {
            shape->algorithm = offered[i].algo;
            return 1;
        }
    return 0;
}

/* 1 when the algorithm has the own kernels' bits on wide operands, of the shape's k and up to PROOF_OUTPUTS outputs, as
 * scratch memory allows, for many rows and for the fewest that it serves. */
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
    for (; rows; rows = rows == PROOF_ROWS ? DSKV_CUDA_MANY_ROWS_OF_LONG_CHAINS : 0) {
        struct dskv_tensor columns = {x, shape->dtype, rows, shape->k, k};
        if (!multiply(cuda, shape, n, w, &columns, got, n))
            return 0;
        dskv_cuda_matmul_own(
            device,
            &(struct dskv_matmul){.x = columns, .w = &weight, .y = dskv_tensor(got + y_bytes, shape->out, rows, n)});
        if (dskv_cuda_count_differences(device, got, got + y_bytes, (size_t)(rows * n) * out_element))
            return 0;
    }
    return 1;
}

static const struct shape *find_shape(const struct shapes *shapes, const struct shape *wanted)
{
    for (int i = 0; i < shapes->n; i++) {
        const struct shape *s = &shapes->at[i];
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

static void prepare_exact(struct dskv_device *device, const struct dskv_weight *w)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    struct shapes *known = &cuda->lt->exact;
    struct shape shape = {.n = w->n, .k = w->k, .dtype = w->dtype, .out = w->dtype, .bucket = MIN_BUCKET};
    if (find_shape(known, &shape))
        return;
    int n_before = cuda->lt->n_serving, n_asked = 0;
    for (; shape.bucket <= MAX_BUCKET && known->n + 2 <= MAX_SHAPES; shape.bucket *= 2)
        for (int to_f32 = 0; to_f32 < 2; to_f32++, n_asked++) {
            shape.out = to_f32 ? DSKV_F32 : w->dtype;
            shape.serves = choose(cuda, &shape) && prove(device, &shape);
            cuda->lt->n_serving += shape.serves;
            known->at[known->n++] = shape;
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
    const struct shape *shape = cuda->lt ? find_shape(&cuda->lt->exact, &wanted) : NULL;
    if (!shape || !shape->serves)
        return 0;
    if (p->bias)
        return multiply_with_bias(device, p, shape);
    return multiply(cuda, shape, shape->n, p->w->data, &p->x, p->y.data, p->y.stride);
}

/* ---- any order: for the benchmark alone --------------------------------------------------------- */

#define WORKSPACE_BYTES ((size_t)32 << 20)
#define TRIAL_WEIGHT_BYTES ((size_t)512 << 20) /* ten times what caches hold */
#define TRIAL_RESULT_BYTES ((size_t)1 << 30)
enum { MIN_CALLS = 4, MAX_COPIES = 128, N_REPLAYS = 3, N_TURNS = 3 };

/* Where products of one weight's shape are timed as a step has them: each on a weight that no cache holds, after a
 * small kernel that has just written x. */
struct trial {
    struct dskv_weight weight;
    char *w, *x, *y; /* w: n_copies weights */
    int n_copies;
    cudaEvent_t begin, end;
};

static void trial_close(struct trial *trial)
{
    cudaFree(trial->w);
    cudaFree(trial->x);
    cudaFree(trial->y);
    cudaEventDestroy(trial->begin);
    cudaEventDestroy(trial->end);
}

static size_t result_bytes(const struct dskv_weight *w, int rows)
{
    return (size_t)rows * (size_t)w->n * sizeof(float);
}

/* 0 when there is no memory for it. */
static int trial_open(struct dskv_device *device, const struct dskv_weight *w, struct trial *trial)
{
    size_t bytes = (size_t)(dskv_cuda_padded(w->n) * dskv_cuda_padded(w->k)) * dskv_dtype_bytes(w->dtype);
    size_t y_bytes =
        result_bytes(w, MAX_BUCKET) < TRIAL_RESULT_BYTES ? result_bytes(w, MAX_BUCKET) : TRIAL_RESULT_BYTES;
    *trial = (struct trial){.weight = *w, .n_copies = (int)((TRIAL_WEIGHT_BYTES + bytes - 1) / bytes)};
    if (trial->n_copies > MAX_COPIES)
        trial->n_copies = MAX_COPIES;
    size_t x_bytes = (size_t)(MAX_BUCKET * w->k) * dskv_dtype_bytes(w->dtype);
    if (cudaEventCreate(&trial->begin) != cudaSuccess || cudaEventCreate(&trial->end) != cudaSuccess ||
        cudaMalloc((void **)&trial->w, bytes * (size_t)trial->n_copies) != cudaSuccess ||
        cudaMalloc((void **)&trial->x, x_bytes) != cudaSuccess ||
        cudaMalloc((void **)&trial->y, y_bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        trial_close(trial);
        return 0;
    }
    dskv_cuda_fill_wide(device, trial->w, w->dtype, (int64_t)(bytes / dskv_dtype_bytes(w->dtype)) * trial->n_copies, 3);
    return 1;
}

/* Queues calls on one weight after the other; shape null: by the exact kernels.  0 when the library refuses. */
static int queue_calls(struct dskv_device *device, struct trial *trial, const struct shape *shape, int rows,
                       enum dskv_dtype out, int n_calls)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    struct dskv_weight weight = trial->weight;
    struct dskv_tensor x = dskv_tensor(trial->x, weight.dtype, rows, weight.k);
    struct dskv_matmul p = {x, &weight, NULL, dskv_tensor(trial->y, out, rows, weight.n)};
    int fine = 1;
    for (int i = 0; i < n_calls && fine; i++) {
        weight.data = trial->w + (size_t)(i % trial->n_copies) * weight.bytes;
        dskv_cuda_fill_wide(device, x.data, x.dtype, rows * weight.k, 4);
        if (shape)
            fine = multiply(cuda, shape, shape->n, weight.data, &x, p.y.data, p.y.stride);
        else
            dskv_cuda_matmul_exact(device, &p);
    }
    return fine;
}

/* Microseconds of one call, of the best of some replays of a recording; infinite when it cannot be run. */
static float time_calls(struct dskv_device *device, struct trial *trial, const struct shape *shape, int rows,
                        enum dskv_dtype out)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    int n_calls = trial->n_copies > MIN_CALLS ? trial->n_copies : MIN_CALLS;
    float best = HUGE_VALF, took = 0;
    device->table->record_begin(device);
    int fine = queue_calls(device, trial, shape, rows, out, n_calls);
    struct dskv_recording *recording = device->table->record_end(device);
    for (int i = 0; i <= N_REPLAYS && recording && fine; i++) { /* the first one warms up */
        cudaEventRecord(trial->begin, cuda->stream);
        device->table->replay(device, recording);
        cudaEventRecord(trial->end, cuda->stream);
        dskv_cuda_note(cuda, cudaEventSynchronize(trial->end), "timing a matmul");
        cudaEventElapsedTime(&took, trial->begin, trial->end);
        best = i && took < best ? took : best;
    }
    if (recording)
        device->table->recording_close(device, recording);
    return best * 1000.0f / (float)n_calls;
}

/* The fastest offer for a number of rows, unless the exact kernels are faster.  All are timed in turns: a GPU that has
 * just worked hard is slower for a while. */
static struct shape fastest(struct dskv_device *device, struct trial *trial, int rows, enum dskv_dtype out)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    const struct dskv_weight *w = &trial->weight;
    struct shape shapes[1 + MAX_OFFERED] = {{.n = w->n, .k = w->k, .dtype = w->dtype, .out = out, .bucket = rows}};
    cublasLtMatmulHeuristicResult_t offered[MAX_OFFERED];
    float least_us[1 + MAX_OFFERED] = {HUGE_VALF};
    uint32_t y_alignment = w->n % 8 ? (uint32_t)dskv_dtype_bytes(out) : 16;
    int n_offered = ask(cuda, &shapes[0], WORKSPACE_BYTES, y_alignment, offered), n = 1, best = 0;
    for (int i = 0; i < n_offered; i++) {
        if (offered[i].state != CUBLAS_STATUS_SUCCESS || offered[i].workspaceSize > WORKSPACE_BYTES)
            continue;
        shapes[n] = shapes[0];
        shapes[n].serves = 1;
        shapes[n].algorithm = offered[i].algo;
        shapes[n].workspace_bytes = offered[i].workspaceSize;
        least_us[n++] = HUGE_VALF;
    }
    for (int turn = 0; turn < N_TURNS; turn++)
        for (int i = 0; i < n; i++) {
            float us = time_calls(device, trial, i ? &shapes[i] : NULL, rows, out);
            least_us[i] = us < least_us[i] ? us : least_us[i];
        }
    for (int i = 1; i < n; i++)
        best = least_us[i] < least_us[best] ? i : best;
    dskv_log(DSKV_LOG_INFO, "cuda",
             "any order, %d rows by %lld x %lld to %s: exact %.1f us, best of %d offers %.1f us%s", rows,
             (long long)w->n, (long long)w->k, dskv_dtype_name(out), (double)least_us[0], n - 1, (double)least_us[best],
             !best                                      ? " (exact)"
             : keeps_our_order(&shapes[best].algorithm) ? ""
                                                        : " (split)");
    return shapes[best];
}

static void prepare_any_order(struct dskv_device *device, const struct dskv_weight *w)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    struct shapes *known = &cuda->lt->any_order;
    struct shape shape = {.n = w->n, .k = w->k, .dtype = w->dtype, .out = w->dtype, .bucket = 1};
    struct trial trial;
    if (find_shape(known, &shape) ||
        (!cuda->lt->workspace && cudaMalloc(&cuda->lt->workspace, WORKSPACE_BYTES) != cudaSuccess) ||
        !trial_open(device, w, &trial)) {
        (void)cudaGetLastError();
        return;
    }
    for (int rows = 1; rows <= MAX_BUCKET && known->n + 2 <= MAX_SHAPES; rows *= 2)
        for (int to_f32 = 0; to_f32 < 2 && result_bytes(w, rows) <= TRIAL_RESULT_BYTES; to_f32++)
            known->at[known->n++] = fastest(device, &trial, rows, to_f32 ? DSKV_F32 : w->dtype);
    trial_close(&trial);
}

int dskv_cuda_matmul_any_order(struct dskv_device *device, const struct dskv_matmul *p)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    struct shape wanted = {.n = p->w->n, .k = p->w->k, .dtype = p->w->dtype, .bucket = 1};
    wanted.out = p->bias ? DSKV_F32 : p->y.dtype;
    while (wanted.bucket < p->x.rows && wanted.bucket < MAX_BUCKET)
        wanted.bucket *= 2;
    const struct shape *shape = cuda->lt ? find_shape(&cuda->lt->any_order, &wanted) : NULL;
    if (!shape || !shape->serves || (uintptr_t)p->x.data % 16 || (uintptr_t)p->y.data % 16 || p->x.stride % 8 ||
        (shape->n % 8 == 0 && p->y.stride % 8) ||
        (p->bias && (shape->n % 8 || dskv_cuda_scratch_bytes(cuda) < MIN_BUCKET * (size_t)shape->n * sizeof(float))))
        return 0;
    if (p->bias)
        return multiply_with_bias(device, p, shape);
    return multiply(cuda, shape, shape->n, p->w->data, &p->x, p->y.data, p->y.stride);
}

void dskv_cuda_matmul_lt_prepare(struct dskv_device *device, const struct dskv_weight *w)
{
    struct dskv_cuda *cuda = dskv_cuda_of(device);
    int is_any = cuda->free_order && w->dtype != DSKV_F32 && w->n && w->k && w->k % 8 == 0;
    if ((!is_for_lt(w) && !is_any) || (!cuda->lt && !(cuda->lt = lt_open())))
        return;
    if (is_for_lt(w))
        prepare_exact(device, w);
    if (is_any)
        prepare_any_order(device, w);
}
