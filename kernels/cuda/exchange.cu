/* Exchanges with peers: devices that reach each other's memory.  Kernels wait for each other's, the host for none.
 *
 * A small part is told from its place by itself: a block writes its own into a box of every peer, whose block of the
 * same number reads a line as soon as it has come.  Nothing is asked of the peer, so one way through the link is all
 * that it takes.  Parts of sums travel inverted and are what is not 0: a word whose bits are all 1, which is no number,
 * becomes another that is none, and who has read a line puts zeros back.  What may hold any bits travels with flags:
 * two lines of {4 bytes, epoch, 4 bytes, epoch} for 16 bytes.  A large part is read, or written, where it lies, between
 * two meetings of all blocks of one number.
 *
 * Epochs count in device memory, one counter for each box and each meeting place, so that a recording can be replayed.
 * Two sets of boxes take turns: whoever writes epoch e + 2 into a set has read epoch e + 1 of every peer, and a peer
 * sends e + 1 only when its kernel that read e, and put zeros back, is over.  (A line with flags holds the epoch of its
 * last use; to be taken for a new one it would have to lie unused while its box counts all 2^32 of them.)
 *
 * A region: the slot, the parts of n peers, and here struct words and two sets of boxes, of n senders each, first those
 * with flags.  A unit is 16 bytes.  Sums run in the peers' order, in f32, on every path alike.
 */
#include "cuda/norm.cuh"

#include <string.h>
#include <type_traits>

enum { UNIT_BYTES = 16, MAX_BOXES = 128, FLAT_THREADS = 512, MEETING_BLOCKS = 64, GROUP = 4 };
#define SMALL_BYTES                                                                                                    \
    ((size_t)1 << 20) /* of a sum or a gather that a device sends at most; above, a second meeting costs less */

struct words {
    unsigned box_epochs[MAX_BOXES];
    unsigned meetings[MEETING_BLOCKS];
    unsigned arrived[MEETING_BLOCKS][DSKV_MAX_PEERS]; /* written by the peers */
};
static_assert(sizeof(words) % 256 == 0, "boxes begin at a whole line");

typedef neighbours<uint32_t, 4> unit;

__device__ __forceinline__ words *words_of(const dskv_exchange &x, int peer)
{
    return (words *)((char *)x.regions[peer] + (1 + x.n) * x.slot_bytes);
}
__device__ __forceinline__ unit *slot_of(const dskv_exchange &x, int peer)
{
    return (unit *)x.regions[peer];
}
/* Where `from`'s part arrives at a peer; see dskv_exchange_part. */
__device__ __forceinline__ unit *part_of(const dskv_exchange &x, int peer, int from)
{
    return (unit *)((char *)x.regions[peer] + (1 + from) * x.slot_bytes);
}

/* ---- small parts: boxes ------------------------------------------------------------------------- */

/* A line of 16 bytes; its words come one by one. */
__device__ __forceinline__ void post_line(uint4 *line, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(line), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ uint4 read_line(const uint4 *line)
{
    uint4 x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(line)
                 : "memory");
    return x;
}

/* A unit of any bits, on its way. */
struct flagged {
    enum { BOX_UNITS = FLAT_THREADS, LINES = 2 };
    uint4 a, b;

    static __device__ __forceinline__ void post(uint4 *lines, const unit &x, unsigned epoch)
    {
        post_line(lines, x.at[0], epoch, x.at[1], epoch);
        post_line(lines + BOX_UNITS, x.at[2], epoch, x.at[3], epoch);
    }
    __device__ __forceinline__ void look(const uint4 *lines)
    {
        a = read_line(lines);
        b = read_line(lines + BOX_UNITS);
    }
    __device__ __forceinline__ bool has_come(unsigned epoch) const
    {
        return a.y == epoch && a.w == epoch && b.y == epoch && b.w == epoch;
    }
    __device__ __forceinline__ unit get() const
    {
        return {{a.x, a.z, b.x, b.z}};
    }
    static __device__ __forceinline__ void clear(uint4 *)
    {
    }
};

/* A unit of numbers, on its way. */
struct inverted {
    enum { BOX_UNITS = NORM_MAX_THREADS, LINES = 1 };
    uint4 a;

    /* Never 0.  What is no number in any type stays none. */
    static __device__ __forceinline__ uint32_t word_of(uint32_t x)
    {
        return x == ~0u ? ~0x7fff7fffu : ~x;
    }
    static __device__ __forceinline__ void post(uint4 *line, const unit &x, unsigned)
    {
        post_line(line, word_of(x.at[0]), word_of(x.at[1]), word_of(x.at[2]), word_of(x.at[3]));
    }
    __device__ __forceinline__ void look(const uint4 *line)
    {
        a = read_line(line);
    }
    __device__ __forceinline__ bool has_come(unsigned) const
    {
        return a.x && a.y && a.z && a.w;
    }
    __device__ __forceinline__ unit get() const
    {
        return {{~a.x, ~a.y, ~a.z, ~a.w}};
    }
    static __device__ __forceinline__ void clear(uint4 *line)
    {
        post_line(line, 0, 0, 0, 0);
    }
};

/* Lines of the boxes of n senders. */
template <typename L> __host__ __device__ constexpr size_t lines_in(int32_t n)
{
    return (size_t)2 * n * MAX_BOXES * L::LINES * L::BOX_UNITS;
}

/* Where a unit's first line is in the box of `peer` that takes what `from` sends; the second is BOX_UNITS further. */
template <typename L>
__device__ __forceinline__ uint4 *lines_of(const dskv_exchange &x, int peer, int from, unsigned epoch, int box, int at)
{
    uint4 *boxes = (uint4 *)(words_of(x, peer) + 1);
    if (std::is_same<L, inverted>::value)
        boxes += lines_in<flagged>(x.n);
    return boxes + (((size_t)(epoch & 1) * x.n + from) * MAX_BOXES + box) * (L::LINES * L::BOX_UNITS) + at;
}

template <typename L>
__device__ __forceinline__ void post(const dskv_exchange &x, unsigned epoch, int box, int at, const unit &mine)
{
    for (int i = 1; i < x.n; i++) {
        int peer = x.self + i < x.n ? x.self + i : x.self + i - x.n; /* not all to the same one at a time */
        L::post(lines_of<L>(x, peer, x.self, epoch, box, at), mine, epoch);
    }
}
/* Calls use(peer, unit) for every peer in order, this one included, with what it sent.  G: how many are looked for at a
 * time, since each look takes its time. */
template <typename L, int G, typename F>
__device__ __forceinline__ void receive(const dskv_exchange &x, unsigned epoch, int box, int at, const unit &mine,
                                        F use)
{
    for (int first = 0; first < x.n; first += G) {
        L theirs[G];
        auto sends = [&](int i) { return first + i < x.n && first + i != x.self; };
        bool is_complete;
        do {
#pragma unroll
            for (int i = 0; i < G; i++)
                if (sends(i))
                    theirs[i].look(lines_of<L>(x, x.self, first + i, epoch, box, at));
            is_complete = true;
#pragma unroll
            for (int i = 0; i < G; i++)
                if (sends(i))
                    is_complete = is_complete && theirs[i].has_come(epoch);
        } while (!is_complete);
#pragma unroll
        for (int i = 0; i < G; i++)
            if (sends(i))
                L::clear(lines_of<L>(x, x.self, first + i, epoch, box, at));
#pragma unroll
        for (int i = 0; i < G; i++)
            if (first + i < x.n)
                use(first + i, first + i == x.self ? mine : theirs[i].get());
    }
}

__device__ __forceinline__ unsigned begin_epoch(const dskv_exchange &x)
{
    return words_of(x, x.self)->box_epochs[blockIdx.x] + 1;
}
/* Only after all threads of the block have read the last one: a barrier lies between. */
__device__ __forceinline__ void end_epoch(const dskv_exchange &x, unsigned epoch)
{
    if (threadIdx.x == 0)
        words_of(x, x.self)->box_epochs[blockIdx.x] = epoch;
}

/* A running sum of the elements of one unit. */
template <typename T> struct unit_sum {
    static constexpr int N = UNIT_BYTES / sizeof(T);
    float at[N];

    __device__ __forceinline__ void add(const unit &x, bool is_first)
    {
        neighbours<T, N> e;
        memcpy(&e, &x, sizeof e);
#pragma unroll
        for (int i = 0; i < N; i++)
            at[i] = is_first ? to_float(e.at[i]) : __fadd_rn(at[i], to_float(e.at[i]));
    }
    __device__ __forceinline__ neighbours<T, N> rounded() const
    {
        neighbours<T, N> e;
#pragma unroll
        for (int i = 0; i < N; i++)
            e.at[i] = from_float<T>(at[i]);
        return e;
    }
};

/* Sends this thread's unit and adds everybody's. */
template <typename T, int G>
__device__ __forceinline__ neighbours<T, UNIT_BYTES / sizeof(T)> add_units(const dskv_exchange &x, unsigned epoch,
                                                                           int box, int at, const unit &mine)
{
    unit_sum<T> sum;
    post<inverted>(x, epoch, box, at, mine);
    receive<inverted, G>(x, epoch, box, at, mine, [&](int peer, const unit &theirs) { sum.add(theirs, peer == 0); });
    return sum.rounded();
}

/* Grid: a box for every FLAT_THREADS units, a thread has one. */
template <typename T, int G>
__global__ void __launch_bounds__(FLAT_THREADS) small_add_kernel(const __grid_constant__ dskv_exchange x, int n_units)
{
    int at = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    follow_previous();
    unsigned epoch = begin_epoch(x);
    if (at < n_units)
        store<T, UNIT_BYTES / sizeof(T)>(
            (T *)(part_of(x, x.self, 0) + at),
            add_units<T, G>(x, epoch, (int)blockIdx.x, (int)threadIdx.x, slot_of(x, x.self)[at]));
    __syncthreads();
    end_epoch(x, epoch);
}

/* The same grid. */
template <int G>
__global__ void __launch_bounds__(FLAT_THREADS)
    small_gather_kernel(const __grid_constant__ dskv_exchange x, int n_units)
{
    int at = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    follow_previous();
    unsigned epoch = begin_epoch(x);
    if (at < n_units) {
        unit mine = slot_of(x, x.self)[at];
        post<flagged>(x, epoch, (int)blockIdx.x, (int)threadIdx.x, mine);
        receive<flagged, G>(x, epoch, (int)blockIdx.x, (int)threadIdx.x, mine, [&](int peer, const unit &theirs) {
            if (peer != x.self)
                part_of(x, x.self, peer)[at] = theirs;
        });
    }
    __syncthreads();
    end_epoch(x, epoch);
}

/* Grid: a block and a box a row of at most 8192 columns, threads as norm.cuh has them.  T: of two bytes, so that a
 * thread's eight columns are one unit. */
template <typename T, int G, int THREADS>
__global__ void __launch_bounds__(THREADS)
    add_residual_norm_kernel(const __grid_constant__ dskv_exchange x, norm_of_row norm, T *residual,
                             int64_t residual_stride, const float *bias, T *out, int64_t out_stride)
{
    __shared__ norm_shared shared;
    int64_t row = blockIdx.x;
    int column = norm_column(0);
    norm_factors<1> factors;
    neighbours<float, 8> term_bias;
    neighbours<T, 8> held;
    let_next_begin();
    load_factors<8>(&factors, norm);
    if (bias)
        term_bias = load_8<float, 8>(bias, column, norm.width);
    wait_for_previous();
    unsigned epoch = begin_epoch(x);
    held = load_8<T, 8>(residual + row * residual_stride, column, norm.width);
    if (column < norm.width) {
        unit mine = slot_of(x, x.self)[(row * norm.width + column) / 8];
        neighbours<T, 8> sum = add_units<T, G>(x, epoch, (int)row, (int)threadIdx.x, mine);
#pragma unroll
        for (int i = 0; i < 8; i++)
            held.at[i] = residual_of(held.at[i], sum.at[i], bias, term_bias.at[i]);
        store<T, 8>(residual + row * residual_stride + column, held);
    }
    norm_row(&held, norm, factors, &shared); /* all threads meet in it */
    end_epoch(x, epoch);
    store_8<T, 8>(out + row * out_stride, column, norm.width, held);
}

/* ---- large parts: meetings ---------------------------------------------------------------------- */

/* All blocks of this number, of all peers, have come; what their devices wrote before can be read. */
__device__ __forceinline__ void meet(const dskv_exchange &x, unsigned epoch)
{
    __syncthreads();
    if ((int)threadIdx.x < x.n) {
        unsigned *theirs = &words_of(x, (int)threadIdx.x)->arrived[blockIdx.x][x.self];
        const unsigned *mine = &words_of(x, x.self)->arrived[blockIdx.x][threadIdx.x];
        unsigned seen;
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(epoch) : "memory");
        do /* a peer may be one meeting further already */
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
        while ((int)(seen - epoch) < 0);
    }
    __syncthreads();
}

/* The first of the two meetings; end_meetings holds the second. */
__device__ __forceinline__ unsigned begin_meetings(const dskv_exchange &x)
{
    unsigned epoch = words_of(x, x.self)->meetings[blockIdx.x] + 1;
    meet(x, epoch);
    return epoch;
}
__device__ __forceinline__ void end_meetings(const dskv_exchange &x, unsigned epoch)
{
    meet(x, epoch + 1);
    if (threadIdx.x == 0)
        words_of(x, x.self)->meetings[blockIdx.x] = epoch + 1;
}

/* Grid: blocks stride over this device's n-th of the units, which they add and write to everybody. */
template <typename T>
__global__ void __launch_bounds__(FLAT_THREADS)
    large_add_kernel(const __grid_constant__ dskv_exchange x, int64_t n_units)
{
    int64_t first = n_units * x.self / x.n, end = n_units * (x.self + 1) / x.n;
    int64_t stride = (int64_t)gridDim.x * blockDim.x;
    follow_previous();
    unsigned epoch = begin_meetings(x);
    for (int64_t at = first + (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < end; at += GROUP * stride) {
        unit_sum<T> sums[GROUP];
        for (int peer = 0; peer < x.n; peer++) {
            unit parts[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++)
                if (at + i * stride < end)
                    parts[i] = slot_of(x, peer)[at + i * stride];
#pragma unroll
            for (int i = 0; i < GROUP; i++)
                sums[i].add(parts[i], peer == 0);
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            for (int peer = 0; peer < x.n; peer++)
                if (at + i * stride < end)
                    store<T, UNIT_BYTES / sizeof(T)>((T *)(part_of(x, peer, 0) + at + i * stride), sums[i].rounded());
    }
    end_meetings(x, epoch);
}

/* Grid: blocks stride over the units. */
__global__ void __launch_bounds__(FLAT_THREADS)
    large_gather_kernel(const __grid_constant__ dskv_exchange x, int64_t n_units)
{
    follow_previous();
    unsigned epoch = begin_meetings(x);
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < n_units;
         at += (int64_t)gridDim.x * blockDim.x) {
        unit mine = slot_of(x, x.self)[at];
        for (int peer = 0; peer < x.n; peer++)
            if (peer != x.self)
                part_of(x, peer, x.self)[at] = mine;
    }
    end_meetings(x, epoch);
}

/* ---- operations --------------------------------------------------------------------------------- */

extern "C" size_t dskv_cuda_exchange_bytes(int32_t n)
{
    return sizeof(words) + (lines_in<flagged>(n) + lines_in<inverted>(n)) * UNIT_BYTES;
}

static bool is_small(const dskv_exchange &x, size_t bytes)
{
    return bytes * (size_t)(x.n > 2 ? x.n - 1 : 1) <= SMALL_BYTES;
}
static int64_t units_of(size_t bytes)
{
    return (int64_t)((bytes + UNIT_BYTES - 1) / UNIT_BYTES);
}
/* Calls f with how many of n peers a thread looks for at a time. */
template <typename F> static void with_looks(int32_t n, F f)
{
    if (n <= 2)
        f(std::integral_constant<int, 1>());
    else
        f(std::integral_constant<int, 4>());
}
static dim3 small_grid(int64_t n_units)
{
    return dim3(blocks_for(n_units, FLAT_THREADS));
}
/* Of work for n_units; the same on all peers. */
static dim3 large_grid(int64_t n_units)
{
    unsigned n = blocks_for(n_units, FLAT_THREADS);
    return dim3(n < MEETING_BLOCKS ? n : MEETING_BLOCKS);
}

extern "C" void dskv_cuda_exchange_gather(struct dskv_device *device, const struct dskv_exchange_gather *p)
{
    const dskv_exchange &x = *p->exchange;
    int64_t n_units = units_of(p->bytes);
    if (!is_small(x, p->bytes)) {
        queue_kernel(device, "exchange_gather", large_gather_kernel, large_grid(n_units), dim3(FLAT_THREADS), 0, x,
                     n_units);
        return;
    }
    with_looks(x.n, [&](auto g) {
        queue_kernel(device, "exchange_gather", small_gather_kernel<decltype(g)::value>, small_grid(n_units),
                     dim3(FLAT_THREADS), 0, x, (int)n_units);
    });
}

extern "C" void dskv_cuda_exchange_add(struct dskv_device *device, const struct dskv_exchange_add *p)
{
    const dskv_exchange &x = *p->exchange;
    size_t bytes = (size_t)(p->out.rows * p->out.cols) * dskv_dtype_bytes(p->out.dtype);
    int64_t n_units = units_of(bytes);
    with_dtype(p->out.dtype, [&](auto t) {
        using T = decltype(t);
        if (!is_small(x, bytes)) {
            queue_kernel(device, "exchange_add", large_add_kernel<T>, large_grid((n_units + x.n - 1) / x.n),
                         dim3(FLAT_THREADS), 0, x, n_units);
            return;
        }
        with_looks(x.n, [&](auto g) {
            queue_kernel(device, "exchange_add", small_add_kernel<T, decltype(g)::value>, small_grid(n_units),
                         dim3(FLAT_THREADS), 0, x, (int)n_units);
        });
    });
}

/* All of a row's eights can move as one, a row's threads have one each, and a unit is eight columns. */
static bool fits_one_kernel(const dskv_exchange &x, const struct dskv_residual_norm *p)
{
    const struct dskv_tensor *t = &p->residual.x;
    return t->dtype != DSKV_F32 && norm_steps(t->cols) == 1 && t->rows <= MAX_BOXES &&
           is_small(x, (size_t)(t->rows * t->cols) * dskv_dtype_bytes(t->dtype)) && moves_by_8(*t) &&
           moves_by_8(p->norm.out) && moves_by_8(p->residual.bias, 0, 0) && moves_by_8(p->norm.weight, 0, 0) &&
           moves_by_8(p->norm.bias, 0, 0);
}

template <typename T, int THREADS>
static void queue_residual_norm(struct dskv_device *device, const dskv_exchange &x, const struct dskv_residual_norm *p)
{
    const struct dskv_tensor *t = &p->residual.x;
    norm_of_row norm = {p->norm.kind == DSKV_RMS_NORM, p->norm.eps, p->norm.weight, p->norm.bias, (int)t->cols};
    with_looks(x.n, [&](auto g) {
        queue_kernel(device, "exchange_residual_norm", add_residual_norm_kernel<T, decltype(g)::value, THREADS>,
                     dim3((unsigned)t->rows), dim3((unsigned)norm_threads(t->cols)), 0, x, norm, (T *)t->data,
                     t->stride, p->residual.bias, (T *)p->norm.out.data, p->norm.out.stride);
    });
}

extern "C" int dskv_cuda_exchange_residual_norm(struct dskv_device *device, const struct dskv_exchange_residual_norm *p)
{
    const dskv_exchange &x = *p->exchange;
    if (!fits_one_kernel(x, &p->then))
        return 0;
    bool is_wide = norm_threads(p->then.residual.x.cols) > NORM_MAX_THREADS / 2; /* half as many registers */
    if (p->then.residual.x.dtype == DSKV_F16)
        (is_wide ? queue_residual_norm<__half, NORM_MAX_THREADS>
                 : queue_residual_norm<__half, NORM_MAX_THREADS / 2>)(device, x, &p->then);
    else
        (is_wide ? queue_residual_norm<__nv_bfloat16, NORM_MAX_THREADS>
                 : queue_residual_norm<__nv_bfloat16, NORM_MAX_THREADS / 2>)(device, x, &p->then);
    return 1;
}
