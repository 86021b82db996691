/* Operations on rows: embedding, norms, activations, the residual, the sum of partials, the choice of rows.
 *
 * Grid: one block a row (norm: norm.cuh), else (neighbours of a row / 128, rows; gathered rows: 256, one at a time), a
 * thread takes N neighbours: 8 where all of an operation's rows lie at multiples of 16 bytes (activations: and are
 * many), else 1.  Which of the two changes no bit.  A sum is one row.
 */
#include "cuda/activation.cuh"
#include "cuda/norm.cuh"

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
    follow_previous();
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
                queue_kernel(device, "embed", embed_kernel<T, W, N>, grid_of(p->out.cols, p->out.rows, N),
                             dim3(THREADS), 0, p->ids, p->drawn, p->positions, (const W *)p->table->data,
                             dskv_cuda_padded(p->table->k), p->table->n, p->first, (const float *)positions->data,
                             positions->stride, (T *)p->out.data, p->out.stride, p->out.cols);
            });
        });
    });
}

/* Grid: a block a row.  HAS_RESIDUAL: x = x + (y + y_bias) first. */
template <typename T, int N, int STEPS, bool HAS_RESIDUAL>
__global__ void __launch_bounds__(NORM_MAX_THREADS)
    norm_kernel(norm_of_row p, T *x, int64_t x_stride, const T *y, int64_t y_stride, const float *y_bias, T *out,
                int64_t out_stride)
{
    __shared__ norm_shared shared;
    int64_t row = blockIdx.x;
    neighbours<T, 8> held[STEPS];
    norm_factors<STEPS> factors;
    let_next_begin();
    load_factors<N>(&factors, p);
    wait_for_previous();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        int column = norm_column(step);
        held[step] = load_8<T, N>(x + row * x_stride, column, p.width);
        if (HAS_RESIDUAL) {
            neighbours<T, 8> term = load_8<T, N>(y + row * y_stride, column, p.width);
            neighbours<float, 8> bias;
            if (y_bias)
                bias = load_8<float, N>(y_bias, column, p.width);
#pragma unroll
            for (int i = 0; i < 8; i++)
                held[step].at[i] = residual_of(held[step].at[i], term.at[i], y_bias, bias.at[i]);
            store_8<T, N>(x + row * x_stride, column, p.width, held[step]);
        }
    }
    norm_row(held, p, factors, &shared);
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        store_8<T, N>(out + row * out_stride, norm_column(step), p.width, held[step]);
}

/* residual null: only the norm. */
static void launch_norm(struct dskv_device *device, const struct dskv_norm *p, const struct dskv_residual *residual)
{
    bool by_8 = moves_by_8(p->x) && moves_by_8(p->out) && moves_by_8(p->weight, 0, 0) && moves_by_8(p->bias, 0, 0) &&
                (!residual || (moves_by_8(residual->y) && moves_by_8(residual->bias, 0, 0)));
    norm_of_row shape = {p->kind == DSKV_RMS_NORM, p->eps, p->weight, p->bias, (int)p->x.cols};
    with_dtype(p->x.dtype, [&](auto t) {
        with_neighbours(by_8, [&](auto n) {
            with_norm_steps(p->x.cols, [&](auto steps) {
                using T = decltype(t);
                constexpr int N = decltype(n)::value, STEPS = decltype(steps)::value;
                queue_kernel(
                    device, "norm", residual ? norm_kernel<T, N, STEPS, true> : norm_kernel<T, N, STEPS, false>,
                    dim3((unsigned)p->x.rows), dim3((unsigned)norm_threads(p->x.cols)), 0, shape, (T *)p->x.data,
                    p->x.stride, residual ? (const T *)residual->y.data : NULL, residual ? residual->y.stride : 0,
                    residual ? residual->bias : NULL, (T *)p->out.data, p->out.stride);
            });
        });
    });
}

extern "C" void dskv_cuda_norm(struct dskv_device *device, const struct dskv_norm *p)
{
    launch_norm(device, p, NULL);
}

extern "C" void dskv_cuda_residual_norm(struct dskv_device *device, const struct dskv_residual_norm *p)
{
    launch_norm(device, &p->norm, &p->residual);
}

template <typename T, int N>
__global__ void activate_kernel(enum dskv_activation kind, int gated, const T *x, int64_t x_stride, T *out,
                                int64_t out_stride, int64_t n)
{
    int64_t row = blockIdx.y, column = my_column<N>();
    follow_previous();
    if (column >= n)
        return;
    const T *place = x + row * x_stride + column;
    neighbours<T, N> in = load<T, N>(place), gate;
    if (gated)
        gate = load<T, N>(place + n);
    with_activation(kind, [&](auto k) {
        constexpr enum dskv_activation KIND = decltype(k)::value;
#pragma unroll
        for (int i = 0; i < N; i++)
            in.at[i] = gated ? activated<KIND>(in.at[i], gate.at[i]) : activated<KIND>(in.at[i]);
    });
    store<T, N>(out + row * out_stride + column, in);
}

extern "C" void dskv_cuda_activate(struct dskv_device *device, const struct dskv_activate *p)
{
    bool is_large = p->out.rows * p->out.cols >= 1 << 18; /* few: the time is that of one thread's arithmetic */
    with_dtype(p->x.dtype, [&](auto t) {
        with_neighbours(is_large && moves_by_8(p->x) && moves_by_8(p->out), [&](auto n) {
            using T = decltype(t);
            constexpr int N = decltype(n)::value;
            queue_kernel(device, "activate", activate_kernel<T, N>, grid_of(p->out.cols, p->out.rows, N), dim3(THREADS),
                         0, p->kind, p->gated, (const T *)p->x.data, p->x.stride, (T *)p->out.data, p->out.stride,
                         p->out.cols);
        });
    });
}

template <typename T, int N>
__global__ void residual_kernel(T *x, int64_t x_stride, const T *y, int64_t y_stride, const float *bias, int64_t width)
{
    int64_t row = blockIdx.y, column = my_column<N>();
    follow_previous();
    if (column >= width)
        return;
    T *place = x + row * x_stride + column;
    neighbours<T, N> sum = load<T, N>(place), add = load<T, N>(y + row * y_stride + column);
    neighbours<float, N> b;
    if (bias)
        b = load<float, N>(bias + column);
#pragma unroll
    for (int i = 0; i < N; i++)
        sum.at[i] = residual_of(sum.at[i], add.at[i], bias, b.at[i]);
    store<T, N>(place, sum);
}

extern "C" void dskv_cuda_residual(struct dskv_device *device, const struct dskv_residual *p)
{
    with_dtype(p->x.dtype, [&](auto t) {
        with_neighbours(moves_by_8(p->x) && moves_by_8(p->y) && moves_by_8(p->bias, 0, 0), [&](auto n) {
            using T = decltype(t);
            constexpr int N = decltype(n)::value;
            queue_kernel(device, "residual", residual_kernel<T, N>, grid_of(p->x.cols, p->x.rows, N), dim3(THREADS), 0,
                         (T *)p->x.data, p->x.stride, (const T *)p->y.data, p->y.stride, p->bias, p->x.cols);
        });
    });
}

struct partials {
    const void *data[DSKV_MAX_RANKS];
};

template <typename T, int N> __global__ void sum_kernel(partials from, int n, T *out, int64_t n_elements)
{
    int64_t column = my_column<N>();
    follow_previous();
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
            queue_kernel(device, "sum", sum_kernel<T, N>, grid_of(n_elements, 1, N), dim3(THREADS), 0, from, p->n,
                         (T *)p->out.data, n_elements);
        });
    });
}

template <typename T>
__global__ void gather_rows_kernel(const T *x, int64_t x_stride, const int32_t *index, T *out, int64_t out_stride,
                                   int64_t width)
{
    int64_t row = blockIdx.y, column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    follow_previous();
    if (column < width)
        out[row * out_stride + column] = x[(int64_t)index[row] * x_stride + column];
}

extern "C" void dskv_cuda_gather_rows(struct dskv_device *device, const struct dskv_gather_rows *p)
{
    dim3 grid(blocks_for(p->out.cols, 256), (unsigned)p->out.rows);
    with_dtype(p->x.dtype, [&](auto t) {
        using T = decltype(t);
        queue_kernel(device, "gather_rows", gather_rows_kernel<T>, grid, dim3(256), 0, (const T *)p->x.data,
                     p->x.stride, p->index, (T *)p->out.data, p->out.stride, p->out.cols);
    });
}
