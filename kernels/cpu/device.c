/* The CPU as a device: which vector path runs, its memory, and the layout of prepared weights. */
#include "kernels/cpu/cpu.h"

#include "base/memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
extern const struct dskv_op_table dskv_cpu_ops_avx512, dskv_cpu_ops_avx2;
#endif
extern const struct dskv_op_table dskv_cpu_ops_plain;

/* ---- vector paths ----------------------------------------------------------------------------------------------- */

static int always(void)
{
    return 1;
}

#if defined(__x86_64__)
static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f");
}

static int has_avx2(void)
{
    unsigned eax, ebx, ecx, edx;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (ecx & bit_F16C) != 0;
}
#endif

/* Best first. */
static const struct path {
    const char *name;
    const struct dskv_op_table *ops;
    int (*runs_here)(void);
} paths[] = {
#if defined(__x86_64__)
    {"avx512", &dskv_cpu_ops_avx512, has_avx512},
    {"avx2", &dskv_cpu_ops_avx2, has_avx2},
#endif
    {"plain", &dskv_cpu_ops_plain, always},
};

/* Null when no path has this name, or the processor cannot run it. */
static const struct path *find_path(const char *name)
{
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if ((!name || strcmp(name, paths[i].name) == 0) && paths[i].runs_here())
            return &paths[i];
    return NULL;
}

/* ---- memory ----------------------------------------------------------------------------------------------------- */

static int64_t read_number(const char *path, const char *format)
{
    char line[256];
    long long value = -1;
    FILE *file = fopen(path, "r");
    if (!file)
        return -1;
    while (value < 0 && fgets(line, sizeof line, file))
        sscanf(line, format, &value);
    fclose(file);
    return value;
}

/* Bytes that this host, or this container, can still give; -1 when the system does not tell. */
static int64_t cpu_available(struct dskv_device *device)
{
    (void)device;
    int64_t kib = read_number("/proc/meminfo", "MemAvailable: %lld");
    int64_t limit = read_number("/sys/fs/cgroup/memory.max", "%lld"); /* "max" is no number: no limit */
    int64_t used = read_number("/sys/fs/cgroup/memory.current", "%lld");
    int64_t host = kib < 0 ? -1 : kib * 1024;
    if (limit < 0 || used < 0 || (host >= 0 && limit - used >= host))
        return host;
    return limit > used ? limit - used : 0;
}

enum { HUGE_PAGE = 2 << 20 };

static size_t mapped_bytes(size_t bytes)
{
    return bytes ? bytes : 1;
}

/* Fresh pages of the system: zero, and taken when first touched. */
static void *cpu_alloc(struct dskv_device *device, size_t bytes)
{
    (void)device;
    void *memory = mmap(NULL, mapped_bytes(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* A large weight begins on a huge page's border and asks for huge pages, so that streaming it costs few page-table
 * walks. Other memory does not: a pool that is touched bit by bit should hold the pages that were touched. */
static void *cpu_weight_alloc(struct dskv_device *device, size_t bytes)
{
    if (bytes < HUGE_PAGE || bytes > SIZE_MAX / 2)
        return cpu_alloc(device, bytes);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (bytes + page - 1) / page * page;
    char *mapped = cpu_alloc(device, used + HUGE_PAGE);
    if (!mapped)
        return NULL;
    const size_t before = (HUGE_PAGE - (uintptr_t)mapped % HUGE_PAGE) % HUGE_PAGE, after = HUGE_PAGE - before;
    char *memory = mapped + before;
    if (before)
        munmap(mapped, before);
    if (after)
        munmap(memory + used, after);
    madvise(memory, used, MADV_HUGEPAGE); /* where it is refused, plain pages serve */
    return memory;
}

static void cpu_free(struct dskv_device *device, void *memory, size_t bytes)
{
    (void)device;
    int result = munmap(memory, mapped_bytes(bytes));
    DSKV_ASSERT(result == 0, "munmap(%p, %zu): %s", memory, bytes, strerror(errno));
}

static void cpu_copy(struct dskv_device *device, void *dst, const void *src, size_t bytes)
{
    (void)device;
    memcpy(dst, src, bytes);
}

/* ---- weights ---------------------------------------------------------------------------------------------------- */

static size_t cpu_weight_bytes(int64_t n, int64_t k, enum dskv_dtype dtype)
{
    return (size_t)((n + DSKV_PANEL - 1) / DSKV_PANEL * DSKV_PANEL) * (size_t)k * dskv_dtype_bytes(dtype);
}

struct fill {
    struct dskv_weight *weight;
    int64_t first, n_rows;
    const char *rows; /* [n_rows, k] */
    enum dskv_dtype dtype;
};

enum { FILL_K = 64 }; /* inputs turned at a time: 32 rows of 64 stay in the first cache */

/* Stores inputs [k0, k0 + n_k) of weight rows [low, high), which lie in one panel. */
static void fill_tile(const struct fill *fill, int64_t low, int64_t high, int64_t k0, int64_t n_k)
{
    const struct dskv_weight *weight = fill->weight;
    const size_t bytes = dskv_dtype_bytes(weight->dtype), source_bytes = dskv_dtype_bytes(fill->dtype);
    uint32_t words[FILL_K];
    uint16_t *halves = (uint16_t *)words;
    int64_t panel = low / DSKV_PANEL;
    char *target = (char *)weight->data + (size_t)(panel * dskv_panel_stride(weight) + k0 * DSKV_PANEL) * bytes;
    for (int64_t row = low; row < high; row++) {
        const char *source = fill->rows + (size_t)((row - fill->first) * weight->k + k0) * source_bytes;
        if (weight->dtype == fill->dtype)
            memcpy(words, source, (size_t)n_k * bytes);
        else
            dskv_convert(words, weight->dtype, source, fill->dtype, (size_t)n_k);
        int place = dskv_panel_place(weight->dtype, (int)(row - panel * DSKV_PANEL));
        if (bytes == 4)
            for (int64_t k = 0; k < n_k; k++)
                ((uint32_t *)target)[k * DSKV_PANEL + place] = words[k];
        else
            for (int64_t k = 0; k < n_k; k++)
                ((uint16_t *)target)[k * DSKV_PANEL + place] = halves[k];
    }
}

/* Panels [first, last), counted from the first one that is touched. */
static void fill_panels(void *context, int64_t first, int64_t last)
{
    const struct fill *fill = context;
    int64_t end = fill->first + fill->n_rows;
    for (int64_t panel = fill->first / DSKV_PANEL + first; panel < fill->first / DSKV_PANEL + last; panel++) {
        int64_t low = panel * DSKV_PANEL, high = low + DSKV_PANEL;
        low = low > fill->first ? low : fill->first;
        high = high < end ? high : end;
        for (int64_t k = 0; k < fill->weight->k; k += FILL_K)
            fill_tile(fill, low, high, k, fill->weight->k - k < FILL_K ? fill->weight->k - k : FILL_K);
    }
}

static void cpu_weight_fill(struct dskv_device *device, struct dskv_weight *weight, int64_t first, int64_t n_rows,
                            const void *rows, enum dskv_dtype dtype)
{
    struct fill fill = {weight, first, n_rows, rows, dtype};
    int64_t n_panels = (first + n_rows - 1) / DSKV_PANEL - first / DSKV_PANEL + 1;
    dskv_threads_for(dskv_cpu_threads(device), n_panels, weight->k * DSKV_PANEL, fill_panels, &fill);
}

/* ---- the device ------------------------------------------------------------------------------------------------- */

static enum dskv_dtype cpu_activation_dtype(enum dskv_dtype weights)
{
    (void)weights;
    return DSKV_F32;
}

static enum dskv_code cpu_sync(struct dskv_device *device, struct dskv_error *error)
{
    (void)device;
    (void)error;
    return DSKV_OK; /* operations run when they are called */
}

static void cpu_close(struct dskv_device *device)
{
    struct dskv_cpu *cpu = (struct dskv_cpu *)device;
    dskv_threads_close(&cpu->threads);
    if (cpu->scratch)
        cpu_free(device, cpu->scratch, DSKV_SCRATCH_BYTES);
    free(cpu);
}

static const struct dskv_device_table cpu_table = {
    .kind = "cpu",
    .numerics = "cpu-16x1", /* 16 lanes, one accumulator: what every vector path computes */
    .is_host = 1,
    .activation_dtype = cpu_activation_dtype,
    .close = cpu_close,
    .sync = cpu_sync,
    .available = cpu_available,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .weight_bytes = cpu_weight_bytes,
    .weight_alloc = cpu_weight_alloc,
    .weight_fill = cpu_weight_fill,
};

enum dskv_exit dskv_cpu_open(const struct dskv_device_options *options, struct dskv_device **device,
                             struct dskv_error *error)
{
    const struct path *path = find_path(options->cpu_path);
    if (!path)
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "this processor or build has no vector path \"%s\"",
                              options->cpu_path);
    struct dskv_cpu *cpu = dskv_calloc(1, sizeof *cpu);
    cpu->base.table = &cpu_table;
    cpu->base.ops = path->ops;
    snprintf(cpu->base.name, sizeof cpu->base.name, "cpu (%s, %d thread%s)", path->name, options->n_threads,
             options->n_threads == 1 ? "" : "s");
    cpu->n_threads = options->n_threads;
    cpu->threads = dskv_threads_open(options->n_threads);
    cpu->scratch = cpu_alloc(&cpu->base, DSKV_SCRATCH_BYTES);
    if (!cpu->threads || !cpu->scratch) {
        cpu_close(&cpu->base);
        return dskv_fail_exit(error, DSKV_EXIT_DEVICE, "cannot start %d threads", options->n_threads);
    }
    *device = &cpu->base;
    return DSKV_EXIT_OK;
}
