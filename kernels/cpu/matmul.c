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
    BLOCK_K = 256,   /* inputs of a panel converted at a time: 32 KiB of f32 */
    BLOCK_ROWS = 128 /* rows that share a converted block; also a unit of work */
};

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

/* The same for any number of rows up to VEC_TILE_ROWS; each case is a function of its own. */
#define TILE_ROWS(n, dtype)                                                                                            \
    case n:                                                                                                            \
        if (n <= VEC_TILE_ROWS)                                                                                        \
            tile(n <= VEC_TILE_ROWS ? n : 0, 1, dtype, x, x_stride, w, 0, n_k, acc, acc_stride, fresh);                \
        break
#define DEFINE_TILES(name, dtype)                                                                                      \
    static void name(int rows, const float *x, int64_t x_stride, const char *w, int64_t n_k, float *acc,               \
                     int64_t acc_stride, int fresh)                                                                    \
    {                                                                                                                  \
        switch (rows) {                                                                                                \
            TILE_ROWS(1, dtype);                                                                                       \
            TILE_ROWS(2, dtype);                                                                                       \
            TILE_ROWS(3, dtype);                                                                                       \
            TILE_ROWS(4, dtype);                                                                                       \
            TILE_ROWS(5, dtype);                                                                                       \
            TILE_ROWS(6, dtype);                                                                                       \
            TILE_ROWS(7, dtype);                                                                                       \
            TILE_ROWS(8, dtype);                                                                                       \
        }                                                                                                              \
    }
DEFINE_TILES(tile_f32, DSKV_F32)
DEFINE_TILES(tile_f16, DSKV_F16)
DEFINE_TILES(tile_bf16, DSKV_BF16)

/* One row of two neighbouring panels: two streams of memory, four chains. */
static void tile_pair(enum dskv_dtype dtype, const float *x, const char *w, int64_t panel_bytes, int64_t n_k,
                      float *acc)
{
    if (dtype == DSKV_F32)
        tile(1, 2, DSKV_F32, x, 0, w, panel_bytes, n_k, acc, 0, 1);
    else if (dtype == DSKV_F16)
        tile(1, 2, DSKV_F16, x, 0, w, panel_bytes, n_k, acc, 0, 1);
    else
        tile(1, 2, DSKV_BF16, x, 0, w, panel_bytes, n_k, acc, 0, 1);
}

static void tile_rows(enum dskv_dtype dtype, int rows, const float *x, int64_t x_stride, const char *w, int64_t n_k,
                      float *acc, int64_t acc_stride, int fresh)
{
    if (dtype == DSKV_F32)
        tile_f32(rows, x, x_stride, w, n_k, acc, acc_stride, fresh);
    else if (dtype == DSKV_F16)
        tile_f16(rows, x, x_stride, w, n_k, acc, acc_stride, fresh);
    else
        tile_bf16(rows, x, x_stride, w, n_k, acc, acc_stride, fresh);
}

struct job {
    const struct dskv_matmul *p;
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

/* Few rows: one tile. */
static void few_rows(void *context, int64_t first, int64_t last)
{
    const struct job *job = context;
    const struct dskv_matmul *p = job->p;
    const int rows = (int)p->x.rows;
    const enum dskv_dtype dtype = p->w->dtype;
    float acc[VEC_TILE_ROWS * DSKV_PANEL > 2 * DSKV_PANEL ? VEC_TILE_ROWS * DSKV_PANEL : 2 * DSKV_PANEL];
    for (int64_t panel = first; panel < last;) {
        const char *w = job->weights + panel * job->panel_bytes;
        const int panels = rows == 1 && last - panel >= 2 ? 2 : 1;
        if (panels == 2)
            tile_pair(dtype, p->x.data, w, job->panel_bytes, p->x.cols, acc);
        else
            tile_rows(dtype, rows, p->x.data, p->x.stride, w, p->x.cols, acc, DSKV_PANEL, 1);
        int64_t n0 = panel * DSKV_PANEL,
                n = p->y.cols - n0 < panels * DSKV_PANEL ? p->y.cols - n0 : panels * DSKV_PANEL;
        for (int r = 0; r < rows; r++)
            finish(p, r, n0, n, acc + r * DSKV_PANEL);
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

/* Rows [r0, r1) of one panel.  A panel that y cuts keeps its accumulators in `narrow`. */
static void panel_rows(const struct job *job, int64_t panel, int64_t r0, int64_t r1)
{
    const struct dskv_matmul *p = job->p;
    const int64_t n0 = panel * DSKV_PANEL, n = p->y.cols - n0 < DSKV_PANEL ? p->y.cols - n0 : DSKV_PANEL;
    const int64_t k_bytes = DSKV_PANEL * (int64_t)dskv_dtype_bytes(p->w->dtype);
    _Alignas(64) float scratch[BLOCK_K * DSKV_PANEL], narrow[BLOCK_ROWS * DSKV_PANEL];
    float *acc = n == DSKV_PANEL ? (float *)p->y.data + r0 * p->y.stride + n0 : narrow;
    const int64_t acc_stride = n == DSKV_PANEL ? p->y.stride : DSKV_PANEL;
    for (int64_t k = 0; k < p->x.cols || k == 0; k += BLOCK_K) {
        int64_t n_k = p->x.cols - k < BLOCK_K ? p->x.cols - k : BLOCK_K;
        const char *w = panel_f32(p->w->dtype, job->weights + panel * job->panel_bytes + k * k_bytes, n_k, scratch);
        for (int64_t r = r0; r < r1; r += job->rows_per_tile) {
            int rows = r1 - r < job->rows_per_tile ? (int)(r1 - r) : job->rows_per_tile;
            tile_f32(rows, (const float *)p->x.data + r * p->x.stride + k, p->x.stride, w, n_k,
                     acc + (r - r0) * acc_stride, acc_stride, k == 0);
        }
    }
    if (p->bias || n != DSKV_PANEL)
        for (int64_t r = r0; r < r1; r++)
            finish(p, r, n0, n, acc + (r - r0) * acc_stride);
}

/* Many rows: items are panels of one block of rows after the other, so that a block's inputs stay in the cache. */
static void many_rows(void *context, int64_t first, int64_t last)
{
    const struct job *job = context;
    for (int64_t i = first; i < last; i++) {
        int64_t r0 = i / job->n_panels * BLOCK_ROWS, r1 = r0 + BLOCK_ROWS;
        panel_rows(job, i % job->n_panels, r0, r1 < job->p->x.rows ? r1 : job->p->x.rows);
    }
}

void dskv_cpu_matmul(struct dskv_device *device, const struct dskv_matmul *p)
{
    struct job job = {.p = p, .weights = p->w->data};
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
