/* Describe: what dskvd tells of itself: the limits and the facts that hold from start to end.  Pure. */
#ifndef DSKV_DAEMON_DESCRIBE_H
#define DSKV_DAEMON_DESCRIBE_H

#include "ipc/message.h"
#include "parallel/engine.h"

/* The limits that `hello` and `info` announce. */
void dskv_describe_limits(const struct dskv_engine_info *engine, struct dskv_limits *limits);
/* The result of `info`. */
void dskv_describe_server(const struct dskv_engine_info *engine, const char *model_dir, struct dskv_info_result *info);
/* The last part of a model directory's real path: "atlas-gpt2". */
void dskv_describe_model_name(const char *model_dir, char *name, size_t room);
/* Parameters of a model, counted from its shape. */
int64_t dskv_describe_parameters(const struct dskv_model *model);
/* A model in some lines for --check: what it is, its size, its positions when so many are served, how many ranks can
 * serve it. */
void dskv_describe_model(const struct dskv_model *model, int32_t max_model_len, const char *model_dir, char *text,
                         size_t room);

#endif
