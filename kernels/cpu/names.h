/* Names: every kernel source is compiled once per vector path, with the path's name at the end of its functions.
 *
 * CMake defines DSKV_PATH (avx512, avx2 or plain) and DSKV_PATH_AVX512 or DSKV_PATH_AVX2 where they apply.
 */
#ifndef DSKV_CPU_NAMES_H
#define DSKV_CPU_NAMES_H

#include "kernels/cpu/cpu.h"

#define DSKV_NAME_JOIN(name, path) name##_##path
#define DSKV_NAME_WITH(name, path) DSKV_NAME_JOIN(name, path)
#define DSKV_NAME(name) DSKV_NAME_WITH(name, DSKV_PATH)

#define dskv_cpu_ops DSKV_NAME(dskv_cpu_ops)
#define dskv_cpu_embed DSKV_NAME(dskv_cpu_embed)
#define dskv_cpu_norm DSKV_NAME(dskv_cpu_norm)
#define dskv_cpu_matmul DSKV_NAME(dskv_cpu_matmul)
#define dskv_cpu_rope DSKV_NAME(dskv_cpu_rope)
#define dskv_cpu_kv_write DSKV_NAME(dskv_cpu_kv_write)
#define dskv_cpu_attention DSKV_NAME(dskv_cpu_attention)
#define dskv_cpu_activate DSKV_NAME(dskv_cpu_activate)
#define dskv_cpu_residual DSKV_NAME(dskv_cpu_residual)
#define dskv_cpu_sum DSKV_NAME(dskv_cpu_sum)
#define dskv_cpu_gather_rows DSKV_NAME(dskv_cpu_gather_rows)
#define dskv_cpu_select DSKV_NAME(dskv_cpu_select)
#define dskv_cpu_choose DSKV_NAME(dskv_cpu_choose)
#define dskv_cpu_sample DSKV_NAME(dskv_cpu_sample)
#define dskv_cpu_kv_copy DSKV_NAME(dskv_cpu_kv_copy)
#define dskv_cpu_receive DSKV_NAME(dskv_cpu_receive)
#define dskv_cpu_report DSKV_NAME(dskv_cpu_report)
#define dskv_cpu_kv_gather DSKV_NAME(dskv_cpu_kv_gather)
#define dskv_cpu_kv_scatter DSKV_NAME(dskv_cpu_kv_scatter)

extern const struct dskv_op_table dskv_cpu_ops;

void dskv_cpu_embed(struct dskv_device *device, const struct dskv_embed *p);
void dskv_cpu_norm(struct dskv_device *device, const struct dskv_norm *p);
void dskv_cpu_matmul(struct dskv_device *device, const struct dskv_matmul *p);
void dskv_cpu_rope(struct dskv_device *device, const struct dskv_rope *p);
void dskv_cpu_kv_write(struct dskv_device *device, const struct dskv_kv_write *p);
void dskv_cpu_attention(struct dskv_device *device, const struct dskv_attention *p);
void dskv_cpu_activate(struct dskv_device *device, const struct dskv_activate *p);
void dskv_cpu_residual(struct dskv_device *device, const struct dskv_residual *p);
void dskv_cpu_sum(struct dskv_device *device, const struct dskv_sum *p);
void dskv_cpu_gather_rows(struct dskv_device *device, const struct dskv_gather_rows *p);
void dskv_cpu_select(struct dskv_device *device, const struct dskv_select *p);
void dskv_cpu_choose(struct dskv_device *device, const struct dskv_choose *p);
void dskv_cpu_sample(struct dskv_device *device, const struct dskv_sample *p);
void dskv_cpu_kv_copy(struct dskv_device *device, const struct dskv_kv_copy *p);
void dskv_cpu_receive(struct dskv_device *device, const struct dskv_receive *p);
void dskv_cpu_report(struct dskv_device *device, const struct dskv_report *p);
void dskv_cpu_kv_gather(struct dskv_device *device, const struct dskv_kv_dense *p);
void dskv_cpu_kv_scatter(struct dskv_device *device, const struct dskv_kv_dense *p);

#endif
