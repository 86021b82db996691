/* Operations between the device and two places in host memory that take turns.  The device reads and writes host memory
 * by itself: a copy engine's start and end would cost a decode step several microseconds more.
 */
#include "cuda/common.cuh"

enum { TURN_THREADS = 512 };

__device__ __forceinline__ uint64_t clock_ns()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/* Grid: 16 bytes a thread. */
__global__ void receive_kernel(struct dskv_turns from, uint4 *dst, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * TURN_THREADS + threadIdx.x;
    wait_for_previous();
    if (i == 0)
        from.turn->begun_ns = clock_ns();
    if (i < n)
        dst[i] = ((const uint4 *)from.places[from.turn->count % 2])[i];
}

extern "C" void dskv_cuda_receive(struct dskv_device *device, const struct dskv_receive *p)
{
    int64_t n = (int64_t)(p->bytes / sizeof(uint4));
    queue_kernel(device, "receive", receive_kernel, dim3(blocks_for(n, TURN_THREADS)), dim3(TURN_THREADS), 0, p->from,
                 (uint4 *)p->dst, n);
    dskv_cuda_of(device)->next_waits = 1; /* kernels may read a plan ahead of their turn */
}

struct report_parts {
    const uint32_t *data[DSKV_MAX_REPORT_PARTS];
    int end[DSKV_MAX_REPORT_PARTS]; /* words up to the part's end */
    int n;
};

/* One block: a report is short, and the turn passes after all of it. */
__global__ void __launch_bounds__(TURN_THREADS)
    report_kernel(struct dskv_turns to, int64_t offset, const report_parts parts, int passes_turn)
{
    follow_previous();
    uint32_t turn = to.turn->count, *start = (uint32_t *)to.places[turn % 2], *place = start + offset;
    for (int i = 0, first = 0; i < parts.n; first = parts.end[i++])
        for (int word = first + (int)threadIdx.x; word < parts.end[i]; word += TURN_THREADS)
            place[word] = parts.data[i][word - first];
    __syncthreads();
    if (threadIdx.x == 0 && passes_turn) {
        *(struct dskv_turn_times *)start = {to.turn->begun_ns, clock_ns()};
        to.turn->count = turn + 1;
    }
}

extern "C" void dskv_cuda_report(struct dskv_device *device, const struct dskv_report *p)
{
    report_parts parts = {};
    parts.n = p->n_parts;
    for (int i = 0, end = 0; i < p->n_parts; i++) {
        parts.data[i] = (const uint32_t *)p->parts[i];
        parts.end[i] = end += (int)(p->bytes[i] / 4);
    }
    queue_kernel(device, "report", report_kernel, dim3(1), dim3(TURN_THREADS), 0, p->to, (int64_t)(p->offset / 4),
                 parts, p->passes_turn);
}
