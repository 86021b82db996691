#include "parallel/load.h"

#include "base/log.h"
#include "base/memory.h"
#include "parallel/dummy.h"
#include "parallel/path.h"

#include <stdlib.h>
#include <string.h>

/* Large enough that reading column ranges takes long segments, small beside any rank's memory. */
#define STAGE_BYTES ((size_t)8 << 20)
/* Below this, a line per tenth tells nobody anything. */
#define PROGRESS_BYTES ((uint64_t)1 << 30)

struct dskv_load {
    struct dskv_device *device;
    struct dskv_checkpoint *checkpoint;
    enum dskv_dtype dtype;
    uint64_t total_bytes, done_bytes;
    int next_percent;
    void *stage[2]; /* STAGE_BYTES each: rows as read or made, rows as turned or converted */
};

struct dskv_load *dskv_load_begin(struct dskv_device *device, struct dskv_checkpoint *checkpoint, enum dskv_dtype dtype,
                                  uint64_t total_bytes)
{
    struct dskv_load *load = dskv_calloc(1, sizeof *load);
    *load = (struct dskv_load){device, checkpoint, dtype, total_bytes, 0, 10, {NULL, NULL}};
    for (int i = 0; i < 2; i++)
        load->stage[i] = dskv_calloc(1, STAGE_BYTES);
    return load;
}

void dskv_load_end(struct dskv_load **load)
{
    if (!*load)
        return;
    for (int i = 0; i < 2; i++)
        free((*load)->stage[i]);
    free(*load);
    *load = NULL;
}

static void tell_progress(struct dskv_load *load, uint64_t bytes)
{
    load->done_bytes += bytes;
    if (load->total_bytes < PROGRESS_BYTES)
        return;
    int percent = (int)(load->done_bytes * 100 / load->total_bytes);
    if (percent < load->next_percent || percent >= 100)
        return;
    load->next_percent = percent / 10 * 10 + 10;
    dskv_log(DSKV_LOG_INFO, "weights", "%d %% of %.1f GB", percent, (double)load->total_bytes / 1e9);
}

/* dst [n, k] = transpose of src [k, n]; in squares, so that neither side walks through memory in long strides. */
static void turn(void *dst, const void *src, int64_t n, int64_t k, size_t size)
{
    enum { SQUARE = 32 };
    for (int64_t i0 = 0; i0 < n; i0 += SQUARE)
        for (int64_t j0 = 0; j0 < k; j0 += SQUARE)
            for (int64_t i = i0; i < n && i < i0 + SQUARE; i++)
                for (int64_t j = j0; j < k && j < j0 + SQUARE; j++) {
                    if (size == 2)
                        ((uint16_t *)dst)[i * k + j] = ((const uint16_t *)src)[j * n + i];
                    else
                        ((uint32_t *)dst)[i * k + j] = ((const uint32_t *)src)[j * n + i];
                }
}

/* Outputs [first, first + n) x the slice's inputs, as rows of their stored dtype in a stage; the stage's index, or -1.
 */
static int fetch_rows(struct dskv_load *load, const struct dskv_bound_tensor *tensor, const struct dskv_slice *slice,
                      int64_t first, int64_t n, struct dskv_error *error)
{
    int64_t k = slice->n_inputs;
    if (!load->checkpoint) {
        dskv_dummy_fill(tensor->name, first, n, slice->first_input, k, load->stage[0]);
        return 0;
    }
    if (!tensor->transposed)
        return dskv_checkpoint_read_matrix(load->checkpoint, tensor->stored, first, n, slice->first_input, k,
                                           load->stage[0], error) == DSKV_EXIT_OK
                   ? 0
                   : -1;
    if (dskv_checkpoint_read_matrix(load->checkpoint, tensor->stored, slice->first_input, k, first, n, load->stage[0],
                                    error) != DSKV_EXIT_OK)
        return -1;
    turn(load->stage[1], load->stage[0], n, k, dskv_dtype_bytes(tensor->stored->dtype));
    return 1;
}

/* f16 ends at 65504, and bf16 rounds the largest f32 away: a weight must not become infinite in silence. */
static enum dskv_exit check_held(const struct dskv_load *load, const struct dskv_bound_tensor *tensor, const void *rows,
                                 enum dskv_dtype dtype, void *held, size_t n, struct dskv_error *error)
{
    size_t bad = dskv_convert(held, load->dtype, rows, dtype, n);
    if (bad == n)
        return DSKV_EXIT_OK;
    return dskv_fail_exit(error, DSKV_EXIT_MODEL, "%s: tensor %.60s has a value that is not finite as %s",
                          tensor->stored ? dskv_path_tail(dskv_checkpoint_path(load->checkpoint, tensor->stored))
                                         : "dummy",
                          tensor->name, dskv_dtype_name(load->dtype));
}

/* Dummy weights where they will lie: 0 when the device leaves that to the host. */
static int make_on_device(struct dskv_load *load, const struct dskv_bound_tensor *tensor,
                          const struct dskv_slice *slice)
{
    return dskv_weight_fill_noise(load->device, slice->weight, slice->dst, slice->n_outputs,
                                  dskv_dummy_seed(tensor->name), slice->first_output, slice->first_input);
}

static enum dskv_exit load_matrix(struct dskv_load *load, const struct dskv_bound_tensor *tensor,
                                  const struct dskv_slice *slice, struct dskv_error *error)
{
    enum dskv_dtype dtype = load->checkpoint ? tensor->stored->dtype : DSKV_F32;
    size_t row_bytes = (size_t)slice->n_inputs * dskv_dtype_bytes(dtype);
    DSKV_ASSERT(row_bytes <= STAGE_BYTES, "%zu bytes in a row", row_bytes);
    int64_t most = (int64_t)(STAGE_BYTES / row_bytes);
    if (!load->checkpoint && make_on_device(load, tensor, slice)) {
        tell_progress(load, (uint64_t)slice->n_outputs * row_bytes);
        return DSKV_EXIT_OK;
    }
    for (int64_t done = 0, n; done < slice->n_outputs; done += n) {
        n = slice->n_outputs - done < most ? slice->n_outputs - done : most;
        int stage = fetch_rows(load, tensor, slice, slice->first_output + done, n, error);
        if (stage < 0)
            return DSKV_EXIT_MODEL;
        const void *rows = load->stage[stage];
        enum dskv_dtype rows_dtype = dtype;
        if (dtype != load->dtype && load->dtype != DSKV_F32) {
            enum dskv_exit code =
                check_held(load, tensor, rows, dtype, load->stage[!stage], (size_t)(n * slice->n_inputs), error);
            if (code != DSKV_EXIT_OK)
                return code;
            rows = load->stage[!stage];
            rows_dtype = load->dtype;
        }
        dskv_weight_fill(load->device, slice->weight, slice->dst + done, n, rows, rows_dtype);
        tell_progress(load, (uint64_t)n * row_bytes);
    }
    return DSKV_EXIT_OK;
}

static void dummy_vector(const struct dskv_bound_tensor *tensor, int64_t first, int64_t n, float *dst)
{
    switch (tensor->part) {
    case DSKV_PART_NORM1_WEIGHT:
    case DSKV_PART_NORM2_WEIGHT:
    case DSKV_PART_NORM_WEIGHT:
        for (int64_t i = 0; i < n; i++)
            dst[i] = 1.0f;
        break;
    default: dskv_dummy_fill(tensor->name, 0, 1, first, n, dst); break;
    }
}

/* Vectors and tables that are held as f32: elements [first_output, + n_outputs) in the order of the file. */
static enum dskv_exit load_vector(struct dskv_load *load, const struct dskv_bound_tensor *tensor,
                                  const struct dskv_slice *slice, struct dskv_error *error)
{
    const int64_t most = STAGE_BYTES / sizeof(float);
    for (int64_t done = 0, n; done < slice->n_outputs; done += n) {
        n = slice->n_outputs - done < most ? slice->n_outputs - done : most;
        int64_t first = slice->first_output + done;
        const float *values = load->stage[1];
        if (!load->checkpoint) {
            dummy_vector(tensor, first, n, load->stage[1]);
        } else {
            size_t size = dskv_dtype_bytes(tensor->stored->dtype);
            enum dskv_exit code = dskv_checkpoint_read_bytes(load->checkpoint, tensor->stored, (uint64_t)first * size,
                                                             (size_t)n * size, load->stage[0], error);
            if (code != DSKV_EXIT_OK)
                return code;
            dskv_convert(load->stage[1], DSKV_F32, load->stage[0], tensor->stored->dtype, (size_t)n);
            tell_progress(load, (uint64_t)n * size);
        }
        dskv_device_upload(load->device, slice->vector + slice->dst + done, values, (size_t)n * sizeof *values);
    }
    return DSKV_EXIT_OK;
}

enum dskv_exit dskv_load_slice(struct dskv_load *load, const struct dskv_bound_tensor *tensor,
                               const struct dskv_slice *slice, struct dskv_error *error)
{
    if (slice->n_inputs == 0 && !slice->weight)
        return load_vector(load, tensor, slice, error);
    if (slice->n_inputs == 0 || slice->n_outputs == 0) /* a rank without MLP columns or vocabulary */
        return DSKV_EXIT_OK;
    return load_matrix(load, tensor, slice, error);
}

enum dskv_exit dskv_load_compare(struct dskv_load *load, const struct dskv_bound_tensor *left,
                                 const struct dskv_bound_tensor *right, int64_t first, int64_t n,
                                 struct dskv_error *error)
{
    const struct dskv_bound_tensor *sides[2] = {left, right};
    size_t row_bytes = (size_t)left->k * dskv_dtype_bytes(left->stored->dtype);
    int64_t most = (int64_t)(STAGE_BYTES / row_bytes);
    DSKV_ASSERT(left->k == right->k && left->n == right->n && left->stored->dtype == right->stored->dtype,
                "%s and %s differ in kind", left->name, right->name);
    for (int64_t done = 0, rows; done < n; done += rows) {
        rows = n - done < most ? n - done : most;
        for (int i = 0; i < 2; i++) {
            enum dskv_exit code = dskv_checkpoint_read_matrix(load->checkpoint, sides[i]->stored, first + done, rows, 0,
                                                              left->k, load->stage[i], error);
            if (code != DSKV_EXIT_OK)
                return code;
        }
        if (memcmp(load->stage[0], load->stage[1], (size_t)rows * row_bytes) != 0)
            return dskv_fail_exit(
                error, DSKV_EXIT_MODEL, "%s: tensor %.60s differs from %.60s, to which config.json ties it",
                dskv_path_tail(dskv_checkpoint_path(load->checkpoint, right->stored)), right->name, left->name);
    }
    return DSKV_EXIT_OK;
}
