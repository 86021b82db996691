/* Operations on rows: embedding, norms, rotary, activations, the residual, the sum of partials, the choice of rows.
 *
 * Grid: one block of 256 threads a row (norm), else one thread an element over a flat grid.  No alignment is asked for.
 */
#include "cuda/common.cuh"

template <typename T, typename W>
__global__ void embed_kernel(const int32_t *ids, const int32_t *positions, const W *table, int64_t table_stride,
                             int64_t table_rows, int32_t first, const float *position_table, int64_t position_stride,
                             T *out, int64_t out_stride, int64_t width)
{
    int64_t row = blockIdx.y, column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width)
        return;
    int64_t local = (int64_t)ids[row] - first;
    float x = local >= 0 && local < table_rows ? to_float(table[local * table_stride + column]) : 0.0f;
    if (position_table)
        x = x + position_table[(int64_t)positions[row] * position_stride + column];
    out[row * out_stride + column] = from_float<T>(x);
}

extern "C" void dskv_cuda_embed(struct dskv_device *device, const struct dskv_embed *p)
{
    dim3 grid(blocks_for(p->out.cols, 256), (unsigned)p->out.rows);
    with_dtype(p->out.dtype, [&](auto t) {
        with_dtype(p->table->dtype, [&](auto w) {
            using T = decltype(t);
            using W = decltype(w);
            embed_kernel<<<grid, 256, 0, dskv_cuda_of(device)->stream>>>(
                p->ids, p->positions, (const W *)p->table->data, dskv_cuda_padded(p->table->k), p->table->n, p->first,
                (const float *)p->position_table.data, p->position_table.stride, (T *)p->out.data, p->out.stride,
                p->out.cols);
        });
    });
    launched(device, "embed");
}

template <typename T>
__global__ void norm_kernel(int rms, float eps, const T *x, int64_t x_stride, const float *weight, const float *bias,
                            T *out, int64_t out_stride, int width)
{
    __shared__ float shared[8];
    const T *row = x + blockIdx.x * x_stride;
    float mean = 0.0f;
    if (!rms) {
        float sum = 0.0f;
        for (int i = (int)threadIdx.x; i < width; i += 256)
            sum = sum + to_float(row[i]);
        mean = block_sum(sum, shared) / (float)width;
    }
    float squares = 0.0f;
    for (int i = (int)threadIdx.x; i < width; i += 256) {
        float d = to_float(row[i]) - mean;
        squares = fmaf(d, d, squares);
    }
    float scale = 1.0f / sqrtf(block_sum(squares, shared) / (float)width + eps);
    for (int i = (int)threadIdx.x; i < width; i += 256) {
        float y = (to_float(row[i]) - mean) * scale * weight[i];
        if (bias)
            y = y + bias[i];
        out[blockIdx.x * out_stride + i] = from_float<T>(y);
    }
}

extern "C" void dskv_cuda_norm(struct dskv_device *device, const struct dskv_norm *p)
{
    with_dtype(p->x.dtype, [&](auto t) {
        using T = decltype(t);
        norm_kernel<<<(unsigned)p->x.rows, 256, 0, dskv_cuda_of(device)->stream>>>(
            p->kind == DSKV_RMS_NORM, p->eps, (const T *)p->x.data, p->x.stride, p->weight, p->bias, (T *)p->out.data,
            p->out.stride, (int)p->x.cols);
    });
    launched(device, "norm");
}

template <typename T>
__global__ void rope_kernel(int pairs, const int32_t *positions, const float *cosines, const float *sines, int half,
                            int head_dim, int n_heads, T *x, int64_t stride)
{
    int64_t row = blockIdx.y;
    int index = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= n_heads * half)
        return;
    int head = index / half, i = index % half;
    T *base = x + row * stride + (int64_t)head * head_dim;
    T *first = base + (pairs ? 2 * i : i), *second = base + (pairs ? 2 * i + 1 : i + half);
    float c = cosines[(int64_t)positions[row] * half + i], s = sines[(int64_t)positions[row] * half + i];
    float a = to_float(*first), b = to_float(*second);
    *first = from_float<T>(a * c - b * s);
    *second = from_float<T>(b * c + a * s);
}

extern "C" void dskv_cuda_rope(struct dskv_device *device, const struct dskv_rope *p)
{
    int half = p->rotary_dim / 2;
    dim3 grid(blocks_for((int64_t)p->n_heads * half, 128), (unsigned)p->x.rows);
    with_dtype(p->x.dtype, [&](auto t) {
        using T = decltype(t);
        rope_kernel<<<grid, 128, 0, dskv_cuda_of(device)->stream>>>(p->style == DSKV_ROPE_PAIRS, p->positions, p->cos,
                                                                    p->sin, half, p->head_dim, p->n_heads,
                                                                    (T *)p->x.data, p->x.stride);
    });
    launched(device, "rope");
}

__device__ __forceinline__ float activation(enum dskv_activation kind, float x)
{
    switch (kind) {
    case DSKV_GELU_TANH: return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * (x * x * x))));
    case DSKV_GELU_ERF: return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    case DSKV_SILU: return x / (1.0f + expf(-x));
    default: return x > 0.0f ? x : 0.0f; /* DSKV_RELU */
    }
}

template <typename T>
__global__ void activate_kernel(enum dskv_activation kind, int gated, const T *x, int64_t x_stride, T *out,
                                int64_t out_stride, int64_t n)
{
    int64_t row = blockIdx.y, column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n)
        return;
    float y = activation(kind, to_float(x[row * x_stride + column]));
    if (gated) /* rounded where two operations would round */
        y = to_float(from_float<T>(y)) * to_float(x[row * x_stride + n + column]);
    out[row * out_stride + column] = from_float<T>(y);
}

extern "C" void dskv_cuda_activate(struct dskv_device *device, const struct dskv_activate *p)
{
    dim3 grid(blocks_for(p->out.cols, 256), (unsigned)p->out.rows);
    with_dtype(p->x.dtype, [&](auto t) {
        using T = decltype(t);
        activate_kernel<<<grid, 256, 0, dskv_cuda_of(device)->stream>>>(
            p->kind, p->gated, (const T *)p->x.data, p->x.stride, (T *)p->out.data, p->out.stride, p->out.cols);
    });
    launched(device, "activate");
}

template <typename T>
__global__ void residual_kernel(T *x, int64_t x_stride, const T *y, int64_t y_stride, const float *bias, int64_t width)
{
    int64_t row = blockIdx.y, column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width)
        return;
    float add = to_float(y[row * y_stride + column]);
    if (bias)
        add = to_float(from_float<T>(add + bias[column]));
    T *place = x + row * x_stride + column;
    *place = from_float<T>(to_float(*place) + add);
}

extern "C" void dskv_cuda_residual(struct dskv_device *device, const struct dskv_residual *p)
{
    dim3 grid(blocks_for(p->x.cols, 256), (unsigned)p->x.rows);
    with_dtype(p->x.dtype, [&](auto t) {
        using T = decltype(t);
        residual_kernel<<<grid, 256, 0, dskv_cuda_of(device)->stream>>>(
            (T *)p->x.data, p->x.stride, (const T *)p->y.data, p->y.stride, p->bias, p->x.cols);
    });
    launched(device, "residual");
}

struct partials {
    const void *data[DSKV_MAX_RANKS];
};

template <typename T> __global__ void sum_kernel(partials from, int n, T *out, int64_t n_elements)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_elements)
        return;
    float sum = to_float(((const T *)from.data[0])[i]);
    for (int rank = 1; rank < n; rank++)
        sum = sum + to_float(((const T *)from.data[rank])[i]);
    out[i] = from_float<T>(sum);
}

extern "C" void dskv_cuda_sum(struct dskv_device *device, const struct dskv_sum *p)
{
    partials from;
    for (int i = 0; i < p->n; i++)
        from.data[i] = p->partials[i];
    int64_t n = p->out.rows * p->out.cols;
    with_dtype(p->out.dtype, [&](auto t) {
        using T = decltype(t);
        sum_kernel<<<blocks_for(n, 256), 256, 0, dskv_cuda_of(device)->stream>>>(from, p->n, (T *)p->out.data, n);
    });
    launched(device, "sum");
}

template <typename T>
__global__ void gather_rows_kernel(const T *x, int64_t x_stride, const int32_t *index, T *out, int64_t out_stride,
                                   int64_t width)
{
    int64_t row = blockIdx.y, column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (column < width)
        out[row * out_stride + column] = x[(int64_t)index[row] * x_stride + column];
}

extern "C" void dskv_cuda_gather_rows(struct dskv_device *device, const struct dskv_gather_rows *p)
{
    dim3 grid(blocks_for(p->out.cols, 256), (unsigned)p->out.rows);
    with_dtype(p->x.dtype, [&](auto t) {
        using T = decltype(t);
        gather_rows_kernel<<<grid, 256, 0, dskv_cuda_of(device)->stream>>>(
            (const T *)p->x.data, p->x.stride, p->index, (T *)p->out.data, p->out.stride, p->out.cols);
    });
    launched(device, "gather_rows");
}
