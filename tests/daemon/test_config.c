/* The command line: every kind of option, its limits on both sides, and the sentence for what is wrong. */
#include "daemon/config.h"
#include "support/cunit_suite.h"

#include <stdio.h>
#include <string.h>

#define MAX_ARGUMENTS 24

static struct dskv_config config;
static struct dskv_error error;

/* Parses a line of arguments separated by single spaces. */
static enum dskv_exit parse(const char *line)
{
    static char text[1024];
    char *argv[MAX_ARGUMENTS] = {"dskvd"}, *rest = text, *word;
    int argc = 1;
    strncpy(text, line, sizeof text - 1);
    while ((word = strsep(&rest, " ")) && argc < MAX_ARGUMENTS)
        if (*word)
            argv[argc++] = word;
    memset(&error, 0, sizeof error);
    return dskv_config_parse(argc, argv, &config, &error);
}

static void assert_refused(const char *line, const char *words)
{
    CU_ASSERT_EQUAL(parse(line), DSKV_EXIT_USAGE);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, words));
    if (!strstr(error.message, words))
        printf("\n    %s\n    gave: %s\n    not:  %s\n", line, error.message, words);
}

static void test_defaults(void)
{
    CU_ASSERT_EQUAL(parse("--model m"), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(config.command, DSKV_RUN);
    CU_ASSERT_STRING_EQUAL(config.model, "m");
    CU_ASSERT_STRING_EQUAL(config.device, "auto");
    CU_ASSERT_STRING_EQUAL(config.kv_dtype, "auto");
    CU_ASSERT_EQUAL(config.kv_cache_memory, 0);
    CU_ASSERT_EQUAL(config.block_tokens, 64);
    CU_ASSERT_EQUAL(config.max_model_len, 0);
    CU_ASSERT_EQUAL(config.tensor_parallel, 0);
    CU_ASSERT_EQUAL(config.seed, -1);
    CU_ASSERT_EQUAL(config.insecure, 0);
    CU_ASSERT_EQUAL(config.log_level, DSKV_LOG_INFO);
    CU_ASSERT_EQUAL(config.n_listen, 1);
    CU_ASSERT_STRING_EQUAL(config.listen[0], "tcp://127.0.0.1:5560");
    CU_ASSERT_PTR_NULL(config.trace_plans);
}

static void test_every_option(void)
{
    CU_ASSERT_EQUAL(
        parse("--model=dir --device cpu --dtype=bf16 --kv-dtype f16 --kv-cache-memory 1.5G --memory-fraction=0.25 "
              "--max-model-len 100 --max-batch-tokens=7"),
        DSKV_EXIT_OK);
    CU_ASSERT_STRING_EQUAL(config.model, "dir");
    CU_ASSERT_STRING_EQUAL(config.device, "cpu");
    CU_ASSERT_STRING_EQUAL(config.dtype, "bf16");
    CU_ASSERT_STRING_EQUAL(config.kv_dtype, "f16");
    CU_ASSERT_EQUAL(config.kv_cache_memory, INT64_C(1610612736));
    CU_ASSERT_EQUAL(config.memory_fraction, 0.25);
    CU_ASSERT_EQUAL(config.max_model_len, 100);
    CU_ASSERT_EQUAL(config.max_batch_tokens, 7);
    CU_ASSERT_EQUAL(
        parse("--model m --max-sequences 5 --block-tokens 16 --cache-lease forever --threads 3 --tensor-parallel 4 "
              "--insecure --log-level debug --seed 9223372036854775807 --trace-plans t --queue-ahead off"),
        DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(config.max_sequences, 5);
    CU_ASSERT_EQUAL(config.block_tokens, 16);
    CU_ASSERT_EQUAL(config.cache_lease, 0);
    CU_ASSERT_EQUAL(config.threads, 3);
    CU_ASSERT_EQUAL(config.tensor_parallel, 4);
    CU_ASSERT_EQUAL(config.insecure, 1);
    CU_ASSERT_EQUAL(config.log_level, DSKV_LOG_DEBUG);
    CU_ASSERT_EQUAL(config.seed, INT64_MAX);
    CU_ASSERT_STRING_EQUAL(config.trace_plans, "t");
    CU_ASSERT_STRING_EQUAL(config.queue_ahead, "off");
}

static void test_endpoints(void)
{
    CU_ASSERT_EQUAL(parse("--model m --listen ipc:///tmp/x --listen=tcp://127.0.0.1:* --listen tcp://[::1]:5560"),
                    DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(config.n_listen, 3);
    CU_ASSERT_STRING_EQUAL(config.listen[0], "ipc:///tmp/x");
    CU_ASSERT_STRING_EQUAL(config.listen[2], "tcp://[::1]:5560");
    assert_refused("--model m --listen 5560", "--listen cannot be '5560'; valid: tcp://ADDRESS:PORT or ipc://PATH");
    assert_refused("--model m --listen tcp://127.0.0.1", "--listen cannot be");
    assert_refused("--model m --listen tcp://127.0.0.1:65536", "--listen cannot be");
    assert_refused("--model m --listen ipc://", "--listen cannot be");
    assert_refused("--model m --listen inproc://x", "--listen cannot be");
    assert_refused("--model m --listen ipc://1 --listen ipc://2 --listen ipc://3 --listen ipc://4 --listen ipc://5 "
                   "--listen ipc://6 --listen ipc://7 --listen ipc://8 --listen ipc://9",
                   "--listen was given more than 8 times");
}

static void test_sizes(void)
{
    static const struct {
        const char *text;
        int64_t bytes;
    } sizes[] = {{"1", 1},
                 {"4096", 4096},
                 {"2K", 2048},
                 {"3m", 3 << 20},
                 {"4G", INT64_C(4) << 30},
                 {"1T", INT64_C(1) << 40},
                 {"0.5M", 512 << 10},
                 {"auto", 0}};
    static const char *const wrong[] = {"0",   "-1",  "4GB", "G",     "4 G",    "1e3",  "0x10",
                                        "inf", "nan", "",    "1.2.3", "99999T", "auto4"};
    char line[128];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        snprintf(line, sizeof line, "--model m --kv-cache-memory=%s", sizes[i].text);
        CU_ASSERT_EQUAL(parse(line), DSKV_EXIT_OK);
        CU_ASSERT_EQUAL(config.kv_cache_memory, sizes[i].bytes);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *argv[] = {"dskvd", "--model", "m", line};
        snprintf(line, sizeof line, "--kv-cache-memory=%s", wrong[i]);
        CU_ASSERT_EQUAL(dskv_config_parse(4, argv, &config, &error), DSKV_EXIT_USAGE);
        CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "valid: auto or a size such as 512M or 4G"));
    }
}

static void test_ranges(void)
{
    assert_refused("--model m --block-tokens 17", "--block-tokens cannot be '17'; valid: 16, 32, 64, 128 or 256");
    assert_refused("--model m --queue-ahead yes", "--queue-ahead cannot be 'yes'; valid: auto, on or off");
    assert_refused("--model m --block-tokens 016", "--block-tokens cannot be '016'");
    assert_refused("--model m --threads 0", "--threads cannot be '0'; valid: auto or 1 to 1024");
    assert_refused("--model m --threads 1025", "valid: auto or 1 to 1024");
    assert_refused("--model m --threads 2x", "--threads cannot be '2x'");
    assert_refused("--model m --threads=-1", "--threads cannot be '-1'");
    assert_refused("--model m --threads=+1", "--threads cannot be '+1'");
    assert_refused("--model m --max-batch-tokens 99999999999999999999", "--max-batch-tokens cannot be");
    assert_refused("--model m --memory-fraction 0", "valid: a number above 0, at most 1");
    assert_refused("--model m --memory-fraction 1.01", "valid: a number above 0, at most 1");
    assert_refused("--model m --memory-fraction nan", "valid: a number above 0, at most 1");
    assert_refused("--model m --seed -2", "--seed cannot be '-2'; valid: random or 0 to 9223372036854775807");
    assert_refused("--model m --dtype fp16", "--dtype cannot be 'fp16'; valid: auto, f32, f16 or bf16");
    assert_refused("--model m --log-level loud", "valid: error, warning, info or debug");
}

static void test_wrong_lines(void)
{
    assert_refused("", "--model is missing");
    assert_refused("--check", "--model is missing");
    assert_refused("--model", "--model needs a value; valid: a path");
    assert_refused("--model --device cpu", "--model needs a value");
    assert_refused("--model m --model n", "--model was given twice");
    assert_refused("--model m --insecure --insecure", "--insecure was given twice");
    assert_refused("--model m --insecure=yes", "--insecure takes no value");
    assert_refused("--model m --check --replay f", "only one of --check, --print-config and --replay can be given");
    assert_refused("m", "'m' is not an option");
    assert_refused("-model m", "there is no option '-model'; did you mean --model?");
    assert_refused("--modle m", "there is no option '--modle'; did you mean --model?");
    assert_refused("--tensor-parallel-size 2", "did you mean --tensor-parallel?");
    assert_refused("--max-num-batched-tokens=3", "there is no option '--max-num-batched-tokens=3'");
    assert_refused("--quite-unlike-anything", "there is no option '--quite-unlike-anything'; see --help");
    assert_refused("--", "there is no option '--'; see --help");
}

/* Text of any length is cut in the sentence, not in memory. */
static void test_long_words(void)
{
    static char option[4096], value[4096];
    char *argv[] = {"dskvd", option, value};
    memset(option, 'a', sizeof option - 1);
    memset(value, '9', sizeof value - 1);
    memcpy(option, "--", 2);
    CU_ASSERT_EQUAL(dskv_config_parse(3, argv, &config, &error), DSKV_EXIT_USAGE);
    CU_ASSERT(strlen(error.message) < 120);
    strncpy(option, "--threads", sizeof option - 1);
    CU_ASSERT_EQUAL(dskv_config_parse(3, argv, &config, &error), DSKV_EXIT_USAGE);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "valid: auto or 1 to 1024"));
}

static void test_commands(void)
{
    CU_ASSERT_EQUAL(parse("--help"), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(config.command, DSKV_HELP);
    CU_ASSERT_EQUAL(parse("--device cpu --version --nonsense"), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(config.command, DSKV_PRINT_VERSION);
    CU_ASSERT_EQUAL(parse("--print-config"), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(config.command, DSKV_PRINT_CONFIG);
    CU_ASSERT_EQUAL(parse("--check --model m"), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(config.command, DSKV_CHECK);
    CU_ASSERT_EQUAL(parse("--model m --replay plans"), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL(config.command, DSKV_REPLAY);
    CU_ASSERT_STRING_EQUAL(config.replay, "plans");
}

int main(void)
{
    static const struct dskv_test tests[] = {
        {"defaults", test_defaults},
        {"every option", test_every_option},
        {"endpoints", test_endpoints},
        {"sizes", test_sizes},
        {"ranges", test_ranges},
        {"wrong lines", test_wrong_lines},
        {"long words", test_long_words},
        {"commands", test_commands},
        {0},
    };
    return dskv_run_tests("daemon.config", tests);
}
