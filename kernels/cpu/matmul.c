/* Matmul: y[m][n] is one f32 accumulator over k ascending, whatever the number of rows, the tile or the path.
 *
 * Lanes run over the outputs of a panel; a tile holds up to VEC_TILE_ROWS rows of one panel's accumulators in
 * registers. Few rows stream a panel once, converting weights as they are loaded.  Many rows go through k in blocks: a
 * block of the panel is made f32 once for all rows, and accumulators wait in y (f32, so no bit is lost) between blocks.
 * Threads split panels and blocks of rows, never k.
 */
#include "kernels/cpu/names.h"
#include "kernels/cpu/vector.h"

enum {
    BLOCK_K = 256,     /* inputs of a panel converted at a time: 32 KiB of f32 */
    BLOCK_ROWS = 128,  /* rows that share a converted block; also a unit of work */
    CONVERT_TILES = 2, /* up to so many tiles of rows convert weights as they load them */
    NEAR = 512,        /* bytes between a weight that is used and one that is asked into the first cache */
    FAR = 16384        /* ... and one that is asked into the second */
};

/* Asks for weights that come later; a hint, so they may lie past the end.  One core's loads alone cannot keep enough
 * lines in flight when there is arithmetic to do between them. */
static inline __attribute__((always_inline)) void ask_for(const char *p, const enum dskv_dtype dtype)
{
    __builtin_prefetch(p + FAR, 0, 2);
    __builtin_prefetch(p + NEAR);
    if (dtype == DSKV_F32) {
        __builtin_prefetch(p + FAR + 64, 0, 2);
        __builtin_prefetch(p + NEAR + 64);
    }
}

/* ROWS rows of PANELS panels, n_k inputs: acc[r][0 .. 32 PANELS) continues from its content, or from 0 when fresh. */
static inline __attribute__((always_inline)) void tile(const int rows, const int panels, const enum dskv_dtype dtype,
                                                       const float *x, int64_t x_stride, const char *w,
                                                       int64_t panel_bytes, int64_t n_k, float *acc, int64_t acc_stride,
                                                       int fresh)
{
    struct vec sum[VEC_TILE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2 * panels; v++)
            sum[r][v] = fresh ? vec_zero() : vec_load(acc + r * acc_stride + v * VEC_LANES);
    const int64_t k_bytes = DSKV_PANEL * (dtype == DSKV_F32 ? 4 : 2);
    for (int64_t k = 0; k < n_k; k++) {
        struct vec weights[4];
        for (int i = 0; i < panels; i++) {
            const char *p = w + i * panel_bytes + k * k_bytes;
            ask_for(p, dtype);
            if (dtype == DSKV_BF16) {
                vec_load_bf16_pairs((const uint16_t *)p, &weights[2 * i], &weights[2 * i + 1]);
            } else {
                weights[2 * i] = vec_load_as(dtype, p, 0);
                weights[2 * i + 1] = vec_load_as(dtype, p, VEC_LANES);
            }
        }
        for (int r = 0; r < rows; r++) {
            struct vec input = vec_set1(x[r * x_stride + k]);
            for (int v = 0; v < 2 * panels; v++)
                sum[r][v] = vec_fma(input, weights[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2 * panels; v++)
            vec_store(acc + r * acc_stride + v * VEC_LANES, sum[r][v]);
}

/* tile for any number of rows up to VEC_TILE_ROWS (half as many of two panels); each case is code of its own. */
#define TILE_CASE(rows_, panels_, dtype)                                                                               \
    case 2 * (rows_) + (panels_):                                                                                      \
        if ((rows_) * (panels_) <= VEC_TILE_ROWS)                                                                      \
            tile((rows_) * (panels_) <= VEC_TILE_ROWS ? rows_ : 0, panels_, dtype, x, x_stride, w, panel_bytes, n_k,   \
                 acc, acc_stride, fresh);                                                                              \
        break
#define DEFINE_TILES(name, dtype)                                                                                      \
    static void name(int rows, int panels, const float *x, int64_t x_stride, const char *w, int64_t panel_bytes,       \
                     int64_t n_k, float *acc, int64_t acc_stride, int fresh)                                           \
    {                                                                                                                  \
        switch (2 * rows + panels) {                                                                                   \
            TILE_CASE(1, 1, dtype);                                                                                    \
            TILE_CASE(2, 1, dtype);                                                                                    \
            TILE_CASE(3, 1, dtype);                                                                                    \
            TILE_CASE(4, 1, dtype);                                                                                    \
            TILE_CASE(5, 1, dtype);                                                                                    \
            TILE_CASE(6, 1, dtype);                                                                                    \
            TILE_CASE(7, 1, dtype);                                                                                    \
            TILE_CASE(8, 1, dtype);                                                                                    \
            TILE_CASE(1, 2, dtype);                                                                                    \
            TILE_CASE(2, 2, dtype);                                                                                    \
            TILE_CASE(3, 2, dtype);                                                                                    \
            TILE_CASE(4, 2, dtype);                                                                                    \
        }                                                                                                              \
    }
DEFINE_TILES(tile_f32, DSKV_F32)
DEFINE_TILES(tile_f16, DSKV_F16)
DEFINE_TILES(tile_bf16, DSKV_BF16)

typedef void tile_of_dtype(int rows, int panels, const float *x, int64_t x_stride, const char *w, int64_t panel_bytes,
                           int64_t n_k, float *acc, int64_t acc_stride, int fresh);

struct job {
    const struct dskv_matmul *p;
    tile_of_dtype *tile;
    const char *weights;
    int64_t n_panels, panel_bytes;
    int rows_per_tile;
};

/* Stores acc (+ bias) of outputs [n0, n0 + n) in row r. */
static void finish(const struct dskv_matmul *p, int64_t r, int64_t n0, int64_t n, const float *acc)
{
    float *y = (float *)p->y.data + r * p->y.stride + n0;
    if (p->bias)
        for (int64_t i = 0; i < n; i++)
            y[i] = acc[i] + p->bias[n0 + i];
    else
        memmove(y, acc, (size_t)n * sizeof *y);
}

/* Few rows: one tile each of two neighbouring panels where the registers hold it, else of one. */
static void few_rows(void *context, int64_t first, int64_t last)
{
    const struct job *job = context;
    const struct dskv_matmul *p = job->p;
    const int rows = (int)p->x.rows;
    float acc[VEC_TILE_ROWS * DSKV_PANEL];
    for (int64_t panel = first; panel < last;) {
        const int panels = 2 * rows <= VEC_TILE_ROWS && last - panel >= 2 ? 2 : 1;
        const int64_t n0 = panel * DSKV_PANEL, stride = panels * DSKV_PANEL;
        job->tile(rows, panels, p->x.data, p->x.stride, job->weights + panel * job->panel_bytes, job->panel_bytes,
                  p->x.cols, acc, stride, 1);
        for (int r = 0; r < rows; r++)
            finish(p, r, n0, p->y.cols - n0 < stride ? p->y.cols - n0 : stride, acc + r * stride);
        panel += panels;
    }
}

/* n_k inputs of a panel as f32: where they lie when they are, else converted into scratch. */
static const char *panel_f32(enum dskv_dtype dtype, const char *w, int64_t n_k, float *scratch)
{
    if (dtype == DSKV_F32)
        return w;
    for (int64_t k = 0; k < n_k; k++) {
        const uint16_t *p = (const uint16_t *)w + k * DSKV_PANEL;
        struct vec low, high;
        if (dtype == DSKV_F16) {
            low = vec_load_f16(p);
            high = vec_load_f16(p + VEC_LANES);
        } else {
            vec_load_bf16_pairs(p, &low, &high);
        }
        vec_store(scratch + k * DSKV_PANEL, low);
        vec_store(scratch + k * DSKV_PANEL + VEC_LANES, high);
    }
    return (const char *)scratch;
}

/* n_k inputs from k on, of one panel and rows [r0, r1): acc[r - r0] goes on, or starts when k is 0. */
static void panel_block(const struct job *job, const char *w, int64_t r0, int64_t r1, int64_t k, int64_t n_k,
                        float *acc, int64_t acc_stride)
{
    const struct dskv_matmul *p = job->p;
    _Alignas(64) float scratch[BLOCK_K * DSKV_PANEL];
    tile_of_dtype *tile_here = job->tile;
    if (r1 - r0 > CONVERT_TILES * job->rows_per_tile) {
        w = panel_f32(p->w->dtype, w, n_k, scratch);
        tile_here = tile_f32;
    }
    for (int64_t r = r0; r < r1; r += job->rows_per_tile) {
        int rows = r1 - r < job->rows_per_tile ? (int)(r1 - r) : job->rows_per_tile;
        tile_here(rows, 1, (const float *)p->x.data + r * p->x.stride + k, p->x.stride, w, 0, n_k,
                  acc + (r - r0) * acc_stride, acc_stride, k == 0);
    }
}

/* Panels [first, last) of rows [r0, r1): one block of k after the other, whose inputs stay in the cache for all panels.
 * Accumulators wait in y; the last panel's, where y cuts it, in `narrow`. */
static void panels_of_rows(const struct job *job, int64_t first, int64_t last, int64_t r0, int64_t r1)
{
    const struct dskv_matmul *p = job->p;
    const int64_t k_bytes = DSKV_PANEL * (int64_t)dskv_dtype_bytes(p->w->dtype);
    float narrow[BLOCK_ROWS * DSKV_PANEL];
    for (int64_t k = 0; k < p->x.cols || k == 0; k += BLOCK_K) {
        const int64_t n_k = p->x.cols - k < BLOCK_K ? p->x.cols - k : BLOCK_K;
        const int is_last = k + n_k == p->x.cols;
        for (int64_t panel = first; panel < last; panel++) {
            const int64_t n0 = panel * DSKV_PANEL, n = p->y.cols - n0 < DSKV_PANEL ? p->y.cols - n0 : DSKV_PANEL;
            float *acc = n == DSKV_PANEL ? (float *)p->y.data + r0 * p->y.stride + n0 : narrow;
            const int64_t acc_stride = n == DSKV_PANEL ? p->y.stride : DSKV_PANEL;
            panel_block(job, job->weights + panel * job->panel_bytes + k * k_bytes, r0, r1, k, n_k, acc, acc_stride);
            for (int64_t r = r0; r < r1 && is_last && (p->bias || acc == narrow); r++)
                finish(p, r, n0, n, acc + (r - r0) * acc_stride);
        }
    }
}

/* Many rows: items are panels of one block of rows after the other. */
static void many_rows(void *context, int64_t first, int64_t last)
{
    const struct job *job = context;
    while (first < last) {
        const int64_t block = first / job->n_panels, r0 = block * BLOCK_ROWS, r1 = r0 + BLOCK_ROWS;
        const int64_t begin = first - block * job->n_panels, end = last - block * job->n_panels;
        const int64_t stop = end < job->n_panels ? end : job->n_panels;
        panels_of_rows(job, begin, stop, r0, r1 < job->p->x.rows ? r1 : job->p->x.rows);
        first += stop - begin;
    }
}

void dskv_cpu_matmul(struct dskv_device *device, const struct dskv_matmul *p)
{
    static tile_of_dtype *const tiles[] = {[DSKV_F32] = tile_f32, [DSKV_F16] = tile_f16, [DSKV_BF16] = tile_bf16};
    struct job job = {.p = p, .tile = tiles[p->w->dtype], .weights = p->w->data};
    job.n_panels = (p->y.cols + DSKV_PANEL - 1) / DSKV_PANEL;
    job.panel_bytes = dskv_panel_stride(p->w) * (int64_t)dskv_dtype_bytes(p->w->dtype);
    if (p->x.rows <= VEC_TILE_ROWS) {
        dskv_threads_for(dskv_cpu_threads(device), job.n_panels, job.panel_bytes / 16 + p->x.cols * p->x.rows / 4,
                         few_rows, &job);
        return;
    }
    /* Tiles as even as they go: 9 rows are 5 and 4, not 8 and 1. */
    int64_t block = p->x.rows < BLOCK_ROWS ? p->x.rows : BLOCK_ROWS;
    int64_t n_tiles = (block + VEC_TILE_ROWS - 1) / VEC_TILE_ROWS, n_blocks = (p->x.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    job.rows_per_tile = (int)((block + n_tiles - 1) / n_tiles);
    dskv_threads_for(dskv_cpu_threads(device), job.n_panels * n_blocks, block * p->x.cols / 2, many_rows, &job);
}
