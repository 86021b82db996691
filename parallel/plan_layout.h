/* The plan's layout, between plan.c (which builds), plan_check.c (which believes nothing) and plan_file.c (which
 * reads). */
#ifndef DSKV_PARALLEL_PLAN_LAYOUT_H
#define DSKV_PARALLEL_PLAN_LAYOUT_H

#include "parallel/plan.h"

#define DSKV_PLAN_ALIGNMENT 64
#define DSKV_PLAN_MIN_BUCKET 8
/* Elements of one section at most; with 40 bytes for the largest element, every offset fits its 32 bits. */
#define DSKV_PLAN_MAX_COUNT (1 << 24)

/* Offsets of the sections (may be null) of a bucket, and its size. */
size_t dskv_plan_layout(const struct dskv_plan_sizes *capacity, uint32_t offset[DSKV_PLAN_N_SECTIONS]);
/* Bytes that these sizes fill of a section. */
size_t dskv_plan_section_bytes(const struct dskv_plan_sizes *sizes, enum dskv_plan_section section);
/* Where a section begins, writable. */
void *dskv_plan_section(const struct dskv_plan *plan, enum dskv_plan_section section);
/* The most that a step of an engine with these bounds needs. */
struct dskv_plan_sizes dskv_plan_largest(const struct dskv_plan_bounds *bounds);
/* Copies what src uses into dst, a begun plan that holds it. */
void dskv_plan_copy(struct dskv_plan *dst, const struct dskv_plan *src);

#endif
