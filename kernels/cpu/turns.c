/* Operations between device memory, which is host memory here, and two places that take turns. */
#include "kernels/cpu/names.h"

#include <string.h>

void dskv_cpu_receive(struct dskv_device *device, const struct dskv_receive *p)
{
    (void)device;
    memcpy(p->dst, p->from.places[*p->from.turn % 2], p->bytes);
}

void dskv_cpu_report(struct dskv_device *device, const struct dskv_report *p)
{
    (void)device;
    char *place = (char *)p->to.places[*p->to.turn % 2] + p->offset;
    for (int32_t i = 0; i < p->n_parts; place += p->bytes[i++])
        memcpy(place, p->parts[i], p->bytes[i]);
    if (p->passes_turn)
        ++*p->to.turn;
}
