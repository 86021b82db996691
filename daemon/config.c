/* Config: the table of options, and the four things made from it: parsing, range errors, --help and --print-config.
 *
 * Every option is one entry: what kind of value it takes, which values are valid, where it goes in struct dskv_config,
 * and the words that --help says of it.  Nothing else in the daemon knows how an option is spelt.  Values are checked
 * here as far as they can be without a model, a device or a socket.
 */
#include "daemon/config.h"

#include "base/limits.h"

#include <ctype.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind {
    TEXT,      /* const char *: anything that is not empty */
    CHOICE,    /* const char *: one of `choices` */
    LEVEL,     /* enum dskv_log_level: the index in `choices` */
    WHOLE,     /* int32_t: one of `choices` when given, else least .. most */
    WHOLE_64,  /* int64_t: least .. most */
    BYTES,     /* int64_t: least .. most, with a suffix K, M, G or T */
    FRACTION,  /* double: above 0, at most 1 */
    ENDPOINTS, /* const char *[]: repeatable */
    FLAG,      /* int: no value */
    COMMAND,   /* enum dskv_command: no value */
    COMMAND_ON /* const char *: a file, and the command that reads it */
};

struct option {
    const char *name, *argument, *help;
    enum kind kind;
    size_t offset;          /* in struct dskv_config */
    const char *choices[8]; /* ended by null */
    int64_t least, most;
    const char *word; /* accepted and printed in place of word_value: "auto" */
    int64_t word_value;
    enum dskv_command command;
};

#define DEFAULT_ENDPOINT "tcp://127.0.0.1:5560"
#define AT(member) .offset = offsetof(struct dskv_config, member)

static const struct option options[] = {
    {"model", "DIR", "directory of a model in Hugging Face's format: config.json and safetensors files", TEXT,
     AT(model)},
    {"device", "KIND", "what computes; auto: cuda where there is one, else cpu", CHOICE, AT(device),
     .choices = {"auto", "cpu", "cuda"}},
    {"dtype", "TYPE", "weights as held; auto: as stored in the files", CHOICE, AT(dtype),
     .choices = {"auto", "f32", "f16", "bf16"}},
    {"kv-dtype", "TYPE", "keys and values as held; auto: f32 on a CPU, the weights' on CUDA", CHOICE, AT(kv_dtype),
     .choices = {"auto", "f32", "f16", "bf16"}},
    {"kv-cache-memory", "SIZE",
     "memory for keys and values on each rank, such as 512M or 4G; auto: by --memory-fraction, at most 64 whole "
     "contexts (on "
     "a CPU 1G)",
     BYTES, AT(kv_cache_memory), .least = 1, .most = (int64_t)1 << 50, .word = "auto", .word_value = 0},
    {"memory-fraction", "X", "share of the memory that is free after loading to use for keys and values", FRACTION,
     AT(memory_fraction)},
    {"max-model-len", "N",
     "most tokens of a sequence; dynamic and longrope positions are stretched for so many; auto: the model's own limit",
     WHOLE, AT(max_model_len), .least = 1, .most = DSKV_MAX_CONTEXT, .word = "auto", .word_value = 0},
    {"max-batch-tokens", "N", "tokens that one step computes at most", WHOLE, AT(max_batch_tokens), .least = 1,
     .most = DSKV_MAX_STEP_ROWS - 1},
    {"max-sequences", "N", "sequences that one step advances at most", WHOLE, AT(max_sequences), .least = 1,
     .most = 4096},
    {"block-tokens", "N", "tokens of a block of the cache; results do not depend on it", WHOLE, AT(block_tokens),
     .choices = {"16", "32", "64", "128", "256"}},
    {"queue-ahead", "WHEN",
     "submit a step before the last one has ended; auto: where the device computes by itself meanwhile", CHOICE,
     AT(queue_ahead), .choices = {"auto", "on", "off"}},
    {"cache-lease", "SECONDS", "how long the caches of a silent session are kept", WHOLE, AT(cache_lease), .least = 1,
     .most = INT32_MAX, .word = "forever", .word_value = 0},
    {"threads", "N", "threads of each rank; auto: this machine's cores divided by its ranks", WHOLE, AT(threads),
     .least = 1, .most = 1024, .word = "auto", .word_value = 0},
    {"tensor-parallel", "N", "number of ranks that is expected, a check; auto: as many as were started", WHOLE,
     AT(tensor_parallel), .least = 1, .most = DSKV_MAX_RANKS, .word = "auto", .word_value = 0},
    {"listen", "ENDPOINT", "where clients connect, tcp://ADDRESS:PORT or ipc://PATH; may be repeated", ENDPOINTS,
     AT(listen)},
    {"share-gpu", NULL, "ranks may share a GPU: to try several ranks where there is one", FLAG, AT(share_gpu)},
    {"insecure", NULL, "allow --listen beyond loopback, where anyone who can connect can use the server", FLAG,
     AT(insecure)},
    {"log-level", "LEVEL", "how much is logged on standard error", LEVEL, AT(log_level),
     .choices = {"error", "warning", "info", "debug"}},
    {"seed", "N", "where the seeds of requests that bring none come from; random: another one at each start", WHOLE_64,
     AT(seed), .least = 0, .most = INT64_MAX, .word = "random", .word_value = -1},
    {"trace-plans", "FILE", "record the plan of every step in this file", TEXT, AT(trace_plans)},
    {"replay", "FILE",
     "run recorded plans without a client, print a line for each (at the level debug all of it), and end", COMMAND_ON,
     AT(replay), .command = DSKV_REPLAY},
    {"check", NULL, "check the model's files, say what they are, and end", COMMAND, .command = DSKV_CHECK},
    {"print-config", NULL, "print the value of every option and end", COMMAND, .command = DSKV_PRINT_CONFIG},
    {"version", NULL, "print the version and end", COMMAND, .command = DSKV_PRINT_VERSION},
    {"help", NULL, "print this text and end", COMMAND, .command = DSKV_HELP},
};
#define N_OPTIONS (sizeof options / sizeof *options)

static const struct dskv_config defaults = {
    .command = DSKV_RUN,
    .device = "auto",
    .dtype = "auto",
    .kv_dtype = "auto",
    .memory_fraction = 0.8,
    .max_batch_tokens = 512,
    .max_sequences = 64,
    .block_tokens = 64,
    .queue_ahead = "auto",
    .cache_lease = 3600,
    .log_level = DSKV_LOG_INFO,
    .seed = -1,
    .n_listen = 1,
    .listen = {DEFAULT_ENDPOINT},
};

/* ---- what is valid, in words ------------------------------------------------------------------------------------ */

static void print_bytes(char *text, size_t room, int64_t bytes)
{
    static const char suffixes[] = {'\0', 'K', 'M', 'G', 'T'};
    size_t i = 0;
    for (; bytes && bytes % 1024 == 0 && i + 1 < sizeof suffixes; i++)
        bytes /= 1024;
    snprintf(text, room, "%lld%.1s", (long long)bytes, suffixes + i);
}

/* "16, 32, 64, 128 or 256", "auto or 1 to 1024". */
static void print_valid(char *text, size_t room, const struct option *option)
{
    size_t used = 0;
    for (int i = 0; option->choices[i]; i++) {
        const char *joint = i == 0 ? "" : option->choices[i + 1] ? ", " : " or ";
        used += (size_t)snprintf(text + used, room - used, "%s%s", joint, option->choices[i]);
    }
    if (used)
        return;
    const char *word = option->word ? option->word : "", *joint = option->word ? " or " : "";
    switch (option->kind) {
    case WHOLE:
    case WHOLE_64:
        snprintf(text, room, "%s%s%lld to %lld", word, joint, (long long)option->least, (long long)option->most);
        break;
    case BYTES: snprintf(text, room, "%s%sa size such as 512M or 4G", word, joint); break;
    case FRACTION: snprintf(text, room, "a number above 0, at most 1"); break;
    case ENDPOINTS: snprintf(text, room, "tcp://ADDRESS:PORT or ipc://PATH"); break;
    default: snprintf(text, room, "a path"); break;
    }
}

static enum dskv_exit invalid(const struct option *option, const char *value, struct dskv_error *error)
{
    char valid[128];
    print_valid(valid, sizeof valid, option);
    dskv_fail_exit(error, DSKV_EXIT_USAGE, "--%s cannot be '%.48s'; valid: %s", option->name, value, valid);
    dskv_error_set_field(error, option->name);
    dskv_error_set_valid(error, "%s", valid);
    return DSKV_EXIT_USAGE;
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

static int parse_whole(const char *text, int64_t least, int64_t most, int64_t *value)
{
    char *end;
    if (!isdigit((unsigned char)*text))
        return 0;
    errno = 0;
    *value = strtoll(text, &end, 10);
    return !errno && !*end && *value >= least && *value <= most;
}

/* "4G", "512M", "1.5G", "4096": units of 1024. */
static int parse_bytes(const char *text, int64_t least, int64_t most, int64_t *value)
{
    static const char suffixes[] = "KMGT";
    size_t n_digits = strspn(text, "0123456789.");
    char *end;
    double number = strtod(text, &end);
    if (n_digits == 0 || end != text + n_digits)
        return 0;
    if (*end) {
        const char *suffix = strchr(suffixes, toupper((unsigned char)*end));
        if (!suffix || end[1])
            return 0;
        number *= (double)((int64_t)1024 << 10 * (suffix - suffixes));
    }
    if (!(number >= (double)least && number <= (double)most))
        return 0;
    *value = (int64_t)number;
    return 1;
}

static int parse_fraction(const char *text, double *value)
{
    char *end;
    size_t n_digits = strspn(text, "0123456789.");
    *value = strtod(text, &end);
    return n_digits > 0 && end == text + n_digits && !*end && *value > 0 && *value <= 1;
}

static int choice_index(const struct option *option, const char *text)
{
    int i = 0;
    while (option->choices[i] && strcmp(option->choices[i], text) != 0)
        i++;
    return option->choices[i] ? i : -1;
}

static int store_number(const struct option *option, const char *text, void *place)
{
    int64_t value;
    if (option->word && strcmp(text, option->word) == 0)
        value = option->word_value;
    else if (option->choices[0] && choice_index(option, text) < 0)
        return 0;
    else if (option->kind == BYTES && !parse_bytes(text, option->least, option->most, &value))
        return 0;
    else if (option->kind != BYTES &&
             !parse_whole(text, option->least, option->choices[0] ? INT32_MAX : option->most, &value))
        return 0;
    if (option->kind == WHOLE)
        *(int32_t *)place = (int32_t)value;
    else
        *(int64_t *)place = value;
    return 1;
}

static int is_endpoint(const char *text)
{
    const char *port;
    if (strncmp(text, "ipc://", 6) == 0)
        return text[6] != '\0';
    if (strncmp(text, "tcp://", 6) != 0)
        return 0;
    port = strrchr(text + 6, ':');
    int64_t number;
    return port && port > text + 6 && (strcmp(port + 1, "*") == 0 || parse_whole(port + 1, 0, 65535, &number));
}

/* The first --listen replaces the default. */
static enum dskv_exit add_endpoint(struct dskv_config *config, int is_first, const char *value,
                                   struct dskv_error *error)
{
    if (is_first)
        config->n_listen = 0;
    if (config->n_listen == DSKV_MAX_ENDPOINTS)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--listen was given more than %d times", DSKV_MAX_ENDPOINTS);
    config->listen[config->n_listen++] = value;
    return DSKV_EXIT_OK;
}

static enum dskv_exit set_command(struct dskv_config *config, const struct option *option, struct dskv_error *error)
{
    if (config->command != DSKV_RUN)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "only one of --check, --print-config and --replay can be given");
    config->command = option->command;
    return DSKV_EXIT_OK;
}

static enum dskv_exit store(struct dskv_config *config, const struct option *option, int is_first, const char *value,
                            struct dskv_error *error)
{
    void *place = (char *)config + option->offset;
    int index, good = 1;
    switch (option->kind) {
    case COMMAND_ON:
    case TEXT:
        good = *value != '\0';
        *(const char **)place = value;
        break;
    case CHOICE:
        good = choice_index(option, value) >= 0;
        *(const char **)place = value;
        break;
    case LEVEL:
        index = choice_index(option, value);
        good = index >= 0;
        *(enum dskv_log_level *)place = (enum dskv_log_level)index;
        break;
    case WHOLE:
    case WHOLE_64:
    case BYTES: good = store_number(option, value, place); break;
    case FRACTION: good = parse_fraction(value, place); break;
    case ENDPOINTS:
        if (is_endpoint(value))
            return add_endpoint(config, is_first, value, error);
        good = 0;
        break;
    case FLAG: *(int *)place = 1; break;
    case COMMAND: break;
    }
    if (!good)
        return invalid(option, value, error);
    return option->kind == COMMAND || option->kind == COMMAND_ON ? set_command(config, option, error) : DSKV_EXIT_OK;
}

/* ---- names ------------------------------------------------------------------------------------------------------ */

/* Levenshtein's distance of the first n characters of a to b. */
static int distance(const char *a, size_t n, const char *b)
{
    int row[64];
    size_t m = strlen(b);
    for (size_t j = 0; j <= m; j++)
        row[j] = (int)j;
    for (size_t i = 1; i <= n; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            best = row[j] + 1 < best ? row[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[m];
}

/* The option that was probably meant: one is the other's beginning, or few letters differ; null when none is near. */
static const char *nearest_name(const char *name, size_t n)
{
    const char *nearest = NULL;
    int least = (int)(n / 3 < 2 ? 2 : n / 3) + 1;
    for (size_t i = 0; i < N_OPTIONS; i++) {
        size_t length = strlen(options[i].name), common = n < length ? n : length;
        int d = common >= 3 && strncmp(name, options[i].name, common) == 0 ? 0 : distance(name, n, options[i].name);
        if (d < least) {
            least = d;
            nearest = options[i].name;
        }
    }
    return nearest;
}

static enum dskv_exit unknown(const char *argument, struct dskv_error *error)
{
    if (argument[0] != '-')
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "'%.48s' is not an option; options begin with --, see --help",
                              argument);
    const char *name = argument + strspn(argument, "-");
    size_t n = strcspn(name, "=");
    const char *near = n < 48 ? nearest_name(name, n) : NULL;
    if (near)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "there is no option '%.48s'; did you mean --%s?", argument, near);
    return dskv_fail_exit(error, DSKV_EXIT_USAGE, "there is no option '%.48s'; see --help", argument);
}

/* The index of --name or --name=..., N_OPTIONS when there is none. */
static size_t find_option(const char *argument)
{
    size_t i = N_OPTIONS;
    if (strncmp(argument, "--", 2) == 0) {
        size_t n = strcspn(argument + 2, "=");
        for (i = 0; i < N_OPTIONS; i++)
            if (strlen(options[i].name) == n && strncmp(options[i].name, argument + 2, n) == 0)
                break;
    }
    return i;
}

static int takes_value(const struct option *option)
{
    return option->kind != FLAG && option->kind != COMMAND;
}

/* The option's value: after '=', or the next argument, which is then taken; null when there is none. */
static const char *take_value(char **argv, int argc, int *i)
{
    const char *equals = strchr(argv[*i], '=');
    if (equals)
        return equals + 1;
    if (*i + 1 < argc && strncmp(argv[*i + 1], "--", 2) != 0)
        return argv[++*i];
    return NULL;
}

enum dskv_exit dskv_config_parse(int argc, char **argv, struct dskv_config *config, struct dskv_error *error)
{
    unsigned char n_given[N_OPTIONS] = {0};
    *config = defaults;
    for (int i = 1; i < argc; i++) {
        size_t index = find_option(argv[i]);
        if (index == N_OPTIONS)
            return unknown(argv[i], error);
        const struct option *option = &options[index];
        if (option->command == DSKV_HELP || option->command == DSKV_PRINT_VERSION) {
            config->command = option->command; /* whatever else is said, or said wrongly, this is what was asked for */
            return DSKV_EXIT_OK;
        }
        if (n_given[index] && option->kind != ENDPOINTS)
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--%s was given twice", option->name);
        const char *value = NULL;
        char valid[128];
        if (!takes_value(option) && strchr(argv[i], '='))
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--%s takes no value", option->name);
        if (takes_value(option) && !(value = take_value(argv, argc, &i))) {
            print_valid(valid, sizeof valid, option);
            return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--%s needs a value; valid: %s", option->name, valid);
        }
        enum dskv_exit code = store(config, option, !n_given[index], value, error);
        if (code)
            return code;
        n_given[index] = 1;
    }
    if (!config->model && config->command != DSKV_PRINT_CONFIG)
        return dskv_fail_exit(error, DSKV_EXIT_USAGE, "--model is missing; it names the directory of a model");
    return DSKV_EXIT_OK;
}

/* ---- --help and --print-config ---------------------------------------------------------------------------------- */

/* The option's value in config, as it could be given. */
static void print_value(char *text, size_t room, const struct option *option, const struct dskv_config *config)
{
    const void *place = (const char *)config + option->offset;
    int64_t number = option->kind == WHOLE ? *(const int32_t *)place : 0;
    if (option->kind == WHOLE_64 || option->kind == BYTES)
        number = *(const int64_t *)place;
    text[0] = '\0';
    switch (option->kind) {
    case TEXT:
    case CHOICE:
    case COMMAND_ON:
        if (*(const char *const *)place)
            snprintf(text, room, "%s", *(const char *const *)place);
        break;
    case LEVEL: snprintf(text, room, "%s", option->choices[*(const enum dskv_log_level *)place]); break;
    case WHOLE:
    case WHOLE_64:
    case BYTES:
        if (option->word && number == option->word_value)
            snprintf(text, room, "%s", option->word);
        else if (option->kind == BYTES)
            print_bytes(text, room, number);
        else
            snprintf(text, room, "%lld", (long long)number);
        break;
    case FRACTION: snprintf(text, room, "%g", *(const double *)place); break;
    case FLAG: snprintf(text, room, "%s", *(const int *)place ? "yes" : "no"); break;
    case ENDPOINTS:
    case COMMAND: break;
    }
}

void dskv_config_help(void)
{
    puts("dskvd serves a language model over MPI ranks, with key/value caches that clients hold.\n\n"
         "  mpirun -np 2 dskvd --model DIR [options]\n\n"
         "Options, as --name value or --name=value:\n");
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct option *option = &options[i];
        char left[64], valid[128], value[128];
        snprintf(left, sizeof left, "--%s %s", option->name, option->argument ? option->argument : "");
        printf("  %-24s %s\n", left, option->help);
        if (!takes_value(option) || option->kind == TEXT || option->kind == COMMAND_ON)
            continue;
        print_valid(valid, sizeof valid, option);
        print_value(value, sizeof value, option, &defaults);
        printf("  %-24s valid: %s; default: %s\n", "", valid, option->kind == ENDPOINTS ? DEFAULT_ENDPOINT : value);
    }
    puts("\nExit codes: 0 drained or done, 2 command line, 3 model, 4 endpoint, 5 memory, 6 device, 7 a rank was lost, "
         "8 bug.\n"
         "Signals: SIGUSR1 drains, at most 30 s; SIGINT and SIGTERM end within 3 s. Send them to mpirun or dskvd-run, "
         "which\n"
         "pass them on; mpirun itself kills amid work after SIGTERM and returns 1: drain it, or use dskvd-run.");
}

void dskv_config_print(const struct dskv_config *config)
{
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct option *option = &options[i];
        char value[4096];
        if (option->kind == COMMAND)
            continue;
        for (int j = 0; option->kind == ENDPOINTS && j < config->n_listen; j++)
            printf("%s = %s\n", option->name, config->listen[j]);
        print_value(value, sizeof value, option, config);
        if (option->kind != ENDPOINTS)
            printf("%s = %s\n", option->name, value);
    }
}
