/* Operations on rows: embedding, norms, rotary, activations, the residual, the sum of partials, the choice of rows.
 *
 * Grid: one block of 256 threads a row (norm), else (neighbours of a row / 128, rows), a thread takes N neighbours: 8
 * where all of an operation's rows lie at multiples of 16 bytes, else 1.  Which of the two changes no bit.
 */
#include "cuda/common.cuh"

enum { THREADS = 128 };

static dim3 grid_of(int64_t cols, int64_t rows, int n)
{
    return dim3(blocks_for(cols / n, THREADS), (unsigned)rows);
}
template <int N> __device__ __forceinline__ int64_t my_column()
{
    return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
}

template <typename T, typename W, int N>
__global__ void embed_kernel(const int32_t *ids, const int32_t *drawn, const int32_t *positions, const W *table,
                             int64_t table_stride, int64_t table_rows, int32_t first, const float *position_table,
                             int64_t position_stride, T *out, int64_t out_stride, int64_t width)
{
    int64_t row = blockIdx.y, column = my_column<N>();
    if (column >= width)
        return;
    int32_t id = ids[row];
    if (id < 0)
        id = drawn[-1 - id];
    int64_t local = (int64_t)id - first;
    bool is_mine = local >= 0 && local < table_rows;
    neighbours<W, N> x;
    neighbours<float, N> position;
    if (is_mine)
        x = load<W, N>(table + local * table_stride + column);
    if (position_table)
        position = load<float, N>(position_table + (int64_t)positions[row] * position_stride + column);
    neighbours<T, N> y;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float sum = is_mine ? to_float(x.at[i]) : 0.0f;
        if (position_table)
            sum = sum + position.at[i];
        y.at[i] = from_float<T>(sum);
    }
    store<T, N>(out + row * out_stride + column, y);
}

extern "C" void dskv_cuda_embed(struct dskv_device *device, const struct dskv_embed *p)
{
    const struct dskv_tensor *positions = &p->position_table;
    bool by_8 =
        moves_by_8(p->out) && moves_by_8(positions->data, positions->data ? positions->stride : 0, sizeof(float));
    with_dtype(p->out.dtype, [&](auto t) {
        with_dtype(p->table->dtype, [&](auto w) {
            with_neighbours(by_8, [&](auto n) {
                using T = decltype(t);
                using W = decltype(w);
                constexpr int N = decltype(n)::value;
                embed_kernel<T, W, N>
                    <<<grid_of(p->out.cols, p->out.rows, N), THREADS, 0, dskv_cuda_of(device)->stream>>>(
                        p->ids, p->drawn, p->positions, (const W *)p->table->data, dskv_cuda_padded(p->table->k),
                        p->table->n, p->first, (const float *)positions->data, positions->stride, (T *)p->out.data,
                        p->out.stride, p->out.cols);
            });
        });
    });
    launched(device, "embed");
}

enum { NORM_THREADS = 256, NORM_STEP = NORM_THREADS * 8, NORM_HELD = 4 };

/* Eight neighbours of a row as floats, zeros from `width` on. */
template <typename T, int N> __device__ __forceinline__ void load_8(float *x, const T *row, int column, int width)
{
    if (N == 8 && column < width) {
        neighbours<T, 8> eight = load<T, 8>(row + column);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = to_float(eight.at[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = N == 1 && column + i < width ? to_float(row[column + i]) : 0.0f;
    }
}

/* A thread sums eight neighbours of every 2048 columns, in order; then the block's tree.  STEPS: how many such groups a
 * row has when they fit into registers, else 0 and the row is read again. */
template <typename T, int N, int STEPS>
__global__ void __launch_bounds__(NORM_THREADS)
    norm_kernel(int rms, float eps, const T *x, int64_t x_stride, const float *weight, const float *bias, T *out,
                int64_t out_stride, int width)
{
    __shared__ float shared[8];
    const T *row = x + blockIdx.x * x_stride;
    T *row_out = out + blockIdx.x * out_stride;
    int mine = (int)threadIdx.x * 8, n_steps = STEPS ? STEPS : (width + NORM_STEP - 1) / NORM_STEP;
    float held[STEPS ? STEPS : 1][8], w[STEPS ? STEPS : 1][8], b[STEPS ? STEPS : 1][8];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        load_8<T, N>(held[step], row, step * NORM_STEP + mine, width);
        load_8<float, N>(w[step], weight, step * NORM_STEP + mine,
                         width); /* asked for before the sums are waited for */
        if (bias)
            load_8<float, N>(b[step], bias, step * NORM_STEP + mine, width);
    }
    float mean = 0.0f;
    if (!rms) {
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < n_steps; step++) {
            if (!STEPS)
                load_8<T, N>(held[0], row, step * NORM_STEP + mine, width);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum = sum + held[STEPS ? step : 0][i];
        }
        mean = block_sum(sum, shared) / (float)width;
    }
    float squares = 0.0f;
#pragma unroll
    for (int step = 0; step < n_steps; step++) {
        if (!STEPS)
            load_8<T, N>(held[0], row, step * NORM_STEP + mine, width);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float d = step * NORM_STEP + mine + i < width ? held[STEPS ? step : 0][i] - mean : 0.0f;
            squares = fmaf(d, d, squares);
        }
    }
    float scale = 1.0f / sqrtf(block_sum(squares, shared) / (float)width + eps);
#pragma unroll
    for (int step = 0; step < n_steps; step++) {
        int column = step * NORM_STEP + mine, at = STEPS ? step : 0;
        if (!STEPS) {
            load_8<T, N>(held[0], row, column, width);
            load_8<float, N>(w[0], weight, column, width);
            if (bias)
                load_8<float, N>(b[0], bias, column, width);
        }
        neighbours<T, 8> y;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float normed = (held[at][i] - mean) * scale * w[at][i];
            y.at[i] = from_float<T>(bias ? normed + b[at][i] : normed);
            if (N == 1 && column + i < width)
                row_out[column + i] = y.at[i];
        }
        if (N == 8 && column < width)
            store<T, 8>(row_out + column, y);
    }
}

extern "C" void dskv_cuda_norm(struct dskv_device *device, const struct dskv_norm *p)
{
    bool by_8 = moves_by_8(p->x) && moves_by_8(p->out) && moves_by_8(p->weight, 0, 0) && moves_by_8(p->bias, 0, 0);
    int64_t steps = (p->x.cols + NORM_STEP - 1) / NORM_STEP;
    with_dtype(p->x.dtype, [&](auto t) {
        with_neighbours(by_8, [&](auto n) {
            using T = decltype(t);
            constexpr int N = decltype(n)::value;
            auto kernel = steps == 1           ? norm_kernel<T, N, 1>
                          : steps == 2         ? norm_kernel<T, N, 2>
                          : steps <= NORM_HELD ? norm_kernel<T, N, NORM_HELD>
                                               : norm_kernel<T, N, 0>;
            kernel<<<(unsigned)p->x.rows, NORM_THREADS, 0, dskv_cuda_of(device)->stream>>>(
                p->kind == DSKV_RMS_NORM, p->eps, (const T *)p->x.data, p->x.stride, p->weight, p->bias,
                (T *)p->out.data, p->out.stride, (int)p->x.cols);
        });
    });
    launched(device, "norm");
}

/* A thread rotates N pairs, of neighbouring numbers where a pair lies in two halves. */
template <typename T, int N>
__global__ void rope_kernel(int pairs, const int32_t *positions, const float *cosines, const float *sines, int half,
                            int head_dim, int n_heads, T *x, int64_t stride)
{
    int64_t row = blockIdx.y;
    int index = (int)my_column<N>();
    if (index >= n_heads * half)
        return;
    int head = index / half, i = index % half;
    T *base = x + row * stride + (int64_t)head * head_dim;
    T *first = base + (pairs ? 2 * i : i), *second = base + (pairs ? 2 * i + 1 : i + half);
    int64_t angle = (int64_t)positions[row] * half + i;
    neighbours<float, N> c = load<float, N>(cosines + angle), s = load<float, N>(sines + angle);
    neighbours<T, N> a = load<T, N>(first), b = load<T, N>(second);
#pragma unroll
    for (int j = 0; j < N; j++) {
        float from = to_float(a.at[j]), to = to_float(b.at[j]);
        a.at[j] = from_float<T>(from * c.at[j] - to * s.at[j]);
        b.at[j] = from_float<T>(to * c.at[j] + from * s.at[j]);
    }
    store<T, N>(first, a);
    store<T, N>(second, b);
}

extern "C" void dskv_cuda_rope(struct dskv_device *device, const struct dskv_rope *p)
{
    int half = p->rotary_dim / 2;
    bool by_8 = p->style == DSKV_ROPE_HALVES && half % 8 == 0 && p->head_dim % 8 == 0 && moves_by_8(p->x) &&
                moves_by_8(p->cos, 0, 0) && moves_by_8(p->sin, 0, 0);
    with_dtype(p->x.dtype, [&](auto t) {
        with_neighbours(by_8, [&](auto n) {
            using T = decltype(t);
            constexpr int N = decltype(n)::value;
            rope_kernel<T, N>
                <<<grid_of((int64_t)p->n_heads * half, p->x.rows, N), THREADS, 0, dskv_cuda_of(device)->stream>>>(
                    p->style == DSKV_ROPE_PAIRS, p->positions, p->cos, p->sin, half, p->head_dim, p->n_heads,
                    (T *)p->x.data, p->x.stride);
        });
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

template <typename T, int N>
__global__ void activate_kernel(enum dskv_activation kind, int gated, const T *x, int64_t x_stride, T *out,
                                int64_t out_stride, int64_t n)
{
    int64_t row = blockIdx.y, column = my_column<N>();
    if (column >= n)
        return;
    const T *place = x + row * x_stride + column;
    neighbours<T, N> in = load<T, N>(place), gate;
    if (gated)
        gate = load<T, N>(place + n);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float y = activation(kind, to_float(in.at[i]));
        if (gated) /* rounded where two operations would round */
            y = to_float(from_float<T>(y)) * to_float(gate.at[i]);
        in.at[i] = from_float<T>(y);
    }
    store<T, N>(out + row * out_stride + column, in);
}

extern "C" void dskv_cuda_activate(struct dskv_device *device, const struct dskv_activate *p)
{
    bool is_large = p->out.rows * p->out.cols >= 1 << 18; /* few: the time is that of one thread's arithmetic */
    with_dtype(p->x.dtype, [&](auto t) {
        with_neighbours(is_large && moves_by_8(p->x) && moves_by_8(p->out), [&](auto n) {
            using T = decltype(t);
            constexpr int N = decltype(n)::value;
            activate_kernel<T, N><<<grid_of(p->out.cols, p->out.rows, N), THREADS, 0, dskv_cuda_of(device)->stream>>>(
                p->kind, p->gated, (const T *)p->x.data, p->x.stride, (T *)p->out.data, p->out.stride, p->out.cols);
        });
    });
    launched(device, "activate");
}

template <typename T, int N>
__global__ void residual_kernel(T *x, int64_t x_stride, const T *y, int64_t y_stride, const float *bias, int64_t width)
{
    int64_t row = blockIdx.y, column = my_column<N>();
    if (column >= width)
        return;
    T *place = x + row * x_stride + column;
    neighbours<T, N> sum = load<T, N>(place), add = load<T, N>(y + row * y_stride + column);
    neighbours<float, N> b;
    if (bias)
        b = load<float, N>(bias + column);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float term = to_float(add.at[i]);
        if (bias)
            term = to_float(from_float<T>(term + b.at[i]));
        sum.at[i] = from_float<T>(to_float(sum.at[i]) + term);
    }
    store<T, N>(place, sum);
}

extern "C" void dskv_cuda_residual(struct dskv_device *device, const struct dskv_residual *p)
{
    with_dtype(p->x.dtype, [&](auto t) {
        with_neighbours(moves_by_8(p->x) && moves_by_8(p->y) && moves_by_8(p->bias, 0, 0), [&](auto n) {
            using T = decltype(t);
            constexpr int N = decltype(n)::value;
            residual_kernel<T, N><<<grid_of(p->x.cols, p->x.rows, N), THREADS, 0, dskv_cuda_of(device)->stream>>>(
                (T *)p->x.data, p->x.stride, (const T *)p->y.data, p->y.stride, p->bias, p->x.cols);
        });
    });
    launched(device, "residual");
}

struct partials {
    const void *data[DSKV_MAX_RANKS];
};

template <typename T, int N> __global__ void sum_kernel(partials from, int n, T *out, int64_t n_elements)
{
    int64_t column = my_column<N>();
    if (column >= n_elements)
        return;
    float sum[N];
    for (int rank = 0; rank < n; rank++) {
        neighbours<T, N> x = load<T, N>((const T *)from.data[rank] + column);
#pragma unroll
        for (int i = 0; i < N; i++)
            sum[i] = rank == 0 ? to_float(x.at[i]) : sum[i] + to_float(x.at[i]);
    }
    neighbours<T, N> y;
#pragma unroll
    for (int i = 0; i < N; i++)
        y.at[i] = from_float<T>(sum[i]);
    store<T, N>(out + column, y);
}

extern "C" void dskv_cuda_sum(struct dskv_device *device, const struct dskv_sum *p)
{
    partials from;
    int64_t n_elements = p->out.rows * p->out.cols;
    bool by_8 = moves_by_8(p->out.data, 0, 0) && n_elements % 8 == 0;
    for (int i = 0; i < p->n; i++) {
        from.data[i] = p->partials[i];
        by_8 = by_8 && moves_by_8(p->partials[i], 0, 0);
    }
    with_dtype(p->out.dtype, [&](auto t) {
        with_neighbours(by_8, [&](auto n) {
            using T = decltype(t);
            constexpr int N = decltype(n)::value;
            sum_kernel<T, N><<<grid_of(n_elements, 1, N), THREADS, 0, dskv_cuda_of(device)->stream>>>(
                from, p->n, (T *)p->out.data, n_elements);
        });
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
