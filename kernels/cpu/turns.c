/* Operations between device memory, which is host memory here, and two places that take turns. */
#include "kernels/cpu/names.h"

#include <string.h>
#include <time.h>

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void dskv_cpu_receive(struct dskv_device *device, const struct dskv_receive *p)
{
    struct dskv_turn *turn = p->from.turn;
    (void)device;
    turn->begun_ns = now_ns();
    memcpy(p->dst, p->from.places[turn->count % 2], p->bytes);
}

void dskv_cpu_report(struct dskv_device *device, const struct dskv_report *p)
{
    struct dskv_turn *turn = p->to.turn;
    char *start = p->to.places[turn->count % 2], *place = start + p->offset;
    (void)device;
    for (int32_t i = 0; i < p->n_parts; place += p->bytes[i++])
        memcpy(place, p->parts[i], p->bytes[i]);
    if (!p->passes_turn)
        return;
    struct dskv_turn_times times = {turn->begun_ns, now_ns()};
    memcpy(start, &times, sizeof times);
    turn->count++;
}
