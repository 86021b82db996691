/* This vector path's operations. */
#include "kernels/cpu/names.h"

const struct dskv_op_table dskv_cpu_ops = {
    .embed = dskv_cpu_embed,
    .norm = dskv_cpu_norm,
    .matmul = dskv_cpu_matmul,
    .rope = dskv_cpu_rope,
    .kv_write = dskv_cpu_kv_write,
    .attention = dskv_cpu_attention,
    .activate = dskv_cpu_activate,
    .residual = dskv_cpu_residual,
    .sum = dskv_cpu_sum,
    .gather_rows = dskv_cpu_gather_rows,
    .select = dskv_cpu_select,
    .choose = dskv_cpu_choose,
    .sample = dskv_cpu_sample,
    .kv_copy = dskv_cpu_kv_copy,
    .receive = dskv_cpu_receive,
    .report = dskv_cpu_report,
    .kv_gather = dskv_cpu_kv_gather,
    .kv_scatter = dskv_cpu_kv_scatter,
};
