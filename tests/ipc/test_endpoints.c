/* Where the server may listen, and what it says when it may not. */
#include "base/memory.h"
#include "ipc/transport.h"
#include "support/cunit_suite.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char directory[] = "/tmp/dskv-endpoints-XXXXXX";

static enum dskv_exit try_open(const char *endpoint, int insecure, struct dskv_transport **transport,
                               struct dskv_error *error)
{
    memset(error, 0, sizeof *error);
    return dskv_transport_open(&endpoint, 1, insecure, transport, error);
}

static void odd_endpoints_are_usage(void)
{
    const char *odd[] = {"",
                         "5560",
                         "127.0.0.1:5560",
                         "tcp://",
                         "tcp://127.0.0.1",
                         "tcp://127.0.0.1:",
                         "tcp://:5560",
                         "tcp://127.0.0.1:65536",
                         "tcp://127.0.0.1:5560x",
                         "tcp://127.0.0.1:-1",
                         "udp://127.0.0.1:5560",
                         "inproc://a",
                         "ipc://",
                         "ipc://*",
                         "ipc://@abstract"};
    struct dskv_transport *transport;
    struct dskv_error error;
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        enum dskv_exit code = try_open(odd[i], 1, &transport, &error);
        if (code != DSKV_EXIT_USAGE)
            printf("%s: %d %s\n", odd[i], (int)code, error.message);
        CU_ASSERT_EQUAL(code, DSKV_EXIT_USAGE);
        CU_ASSERT_PTR_NULL(transport);
        CU_ASSERT_PTR_NOT_NULL(strstr(error.message, odd[i]));
        CU_ASSERT_PTR_NOT_NULL(strstr(error.valid, "tcp://127.0.0.1:PORT"));
    }
}

static void only_loopback_without_insecure(void)
{
    const char *far[] = {"tcp://*:0",         "tcp://0.0.0.0:0",   "tcp://[::]:0",
                         "tcp://192.0.2.1:0", "tcp://128.0.0.1:0", "tcp://eth0:0"};
    const char *near[] = {"tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://127.1.2.3:0", "tcp://localhost:0"};
    struct dskv_transport *transport;
    struct dskv_error error;
    for (size_t i = 0; i < sizeof far / sizeof far[0]; i++) {
        CU_ASSERT_EQUAL(try_open(far[i], 0, &transport, &error), DSKV_EXIT_USAGE);
        CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "--insecure"));
    }
    for (size_t i = 0; i < sizeof near / sizeof near[0]; i++) {
        CU_ASSERT_EQUAL_FATAL(try_open(near[i], 0, &transport, &error), DSKV_EXIT_OK);
        CU_ASSERT(strncmp(dskv_transport_endpoint(transport, 0), "tcp://127.", 10) == 0);
        CU_ASSERT(atoi(strrchr(dskv_transport_endpoint(transport, 0), ':') + 1) > 0);
        dskv_transport_close(&transport, 0);
    }
    CU_ASSERT_EQUAL_FATAL(try_open("tcp://0.0.0.0:0", 1, &transport, &error), DSKV_EXIT_OK);
    dskv_transport_close(&transport, 0);
}

static int has_ipv6_loopback(void)
{
    struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    int works = fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return works;
}

static void ipv6_loopback_works(void)
{
    struct dskv_transport *transport;
    struct dskv_error error;
    if (!has_ipv6_loopback())
        return;
    CU_ASSERT_EQUAL_FATAL(try_open("tcp://[::1]:0", 0, &transport, &error), DSKV_EXIT_OK);
    CU_ASSERT(strncmp(dskv_transport_endpoint(transport, 0), "tcp://[::1]:", 12) == 0);
    dskv_transport_close(&transport, 0);
}

static void several_endpoints_at_once(void)
{
    struct dskv_transport *transport;
    struct dskv_error error = {0};
    char *path = dskv_format("ipc://%s/several", directory);
    const char *endpoints[] = {"tcp://127.0.0.1:*", path, "tcp://127.0.0.1:*"};
    CU_ASSERT_EQUAL_FATAL(dskv_transport_open(endpoints, 3, 0, &transport, &error), DSKV_EXIT_OK);
    CU_ASSERT_STRING_EQUAL(dskv_transport_endpoint(transport, 1), path);
    CU_ASSERT_STRING_NOT_EQUAL(dskv_transport_endpoint(transport, 0), dskv_transport_endpoint(transport, 2));
    for (int i = 0; i < 3; i++) {
        struct dskv_link *link;
        struct dskv_route route;
        struct dskv_frames frames = {dskv_calloc(1, sizeof *frames.frames), 1};
        frames.frames[0] = (struct dskv_frame){dskv_calloc(1, 1), 1};
        CU_ASSERT_EQUAL_FATAL(dskv_link_open(dskv_transport_endpoint(transport, i), &link, &error), DSKV_OK);
        CU_ASSERT_EQUAL_FATAL(dskv_link_send(link, &frames, 5000, &error), DSKV_OK);
        for (int k = 0; k < 100 && !dskv_transport_receive(transport, &route, &frames, &error); k++)
            dskv_transport_wait(transport, -1, 50);
        CU_ASSERT_EQUAL(frames.n, 1);
        dskv_frames_clear(&frames);
        dskv_link_close(&link);
        for (int k = 0; k < 100 && !dskv_transport_lost(transport, &route); k++)
            dskv_transport_wait(transport, -1, 50);
    }
    dskv_transport_close(&transport, 0);
    free(path);
}

static void a_taken_port_is_an_error(void)
{
    struct dskv_transport *first, *second;
    struct dskv_error error;
    CU_ASSERT_EQUAL_FATAL(try_open("tcp://127.0.0.1:*", 0, &first, &error), DSKV_EXIT_OK);
    const char *endpoint = dskv_transport_endpoint(first, 0);
    CU_ASSERT_EQUAL(try_open(endpoint, 0, &second, &error), DSKV_EXIT_ENDPOINT);
    CU_ASSERT_PTR_NULL(second);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, endpoint));
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "taken"));
    dskv_transport_close(&first, 0);
}

static void ipc_sockets_are_private_and_removed(void)
{
    struct dskv_transport *first, *second;
    struct dskv_error error;
    struct stat file;
    char *endpoint = dskv_format("ipc://%s/socket", directory);
    const char *path = endpoint + strlen("ipc://");
    mode_t mask = umask(0);
    CU_ASSERT_EQUAL_FATAL(try_open(endpoint, 0, &first, &error), DSKV_EXIT_OK);
    CU_ASSERT_EQUAL_FATAL(lstat(path, &file), 0);
    CU_ASSERT_EQUAL(file.st_mode & 0777, 0600);
    CU_ASSERT_EQUAL(umask(mask), 0); /* left as it was */
    CU_ASSERT_EQUAL(try_open(endpoint, 0, &second, &error), DSKV_EXIT_ENDPOINT);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, "another server"));
    CU_ASSERT_EQUAL(lstat(path, &file), 0); /* the refused one left it alone */
    dskv_transport_close(&first, 0);
    CU_ASSERT_NOT_EQUAL(lstat(path, &file), 0);
    free(endpoint);
}

static void a_dead_servers_socket_is_taken_over(void)
{
    struct dskv_transport *transport;
    struct dskv_error error;
    char *endpoint = dskv_format("ipc://%s/dead", directory);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, endpoint + strlen("ipc://"), sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    CU_ASSERT_EQUAL_FATAL(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd); /* the file stays, as after kill -9 */
    CU_ASSERT_EQUAL(try_open(endpoint, 0, &transport, &error), DSKV_EXIT_OK);
    dskv_transport_close(&transport, 0);
    free(endpoint);
}

static void files_are_left_alone(void)
{
    struct dskv_transport *transport;
    struct dskv_error error;
    struct stat file;
    char *endpoint = dskv_format("ipc://%s/letter", directory);
    const char *path = endpoint + strlen("ipc://");
    FILE *letter = fopen(path, "w");
    fputs("dear", letter);
    fclose(letter);
    CU_ASSERT_EQUAL(try_open(endpoint, 0, &transport, &error), DSKV_EXIT_ENDPOINT);
    CU_ASSERT(lstat(path, &file) == 0 && file.st_size == 4);
    unlink(path);
    free(endpoint);
    endpoint = dskv_format("ipc://%s/no/such/place", directory);
    CU_ASSERT_EQUAL(try_open(endpoint, 0, &transport, &error), DSKV_EXIT_ENDPOINT);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, endpoint));
    free(endpoint);
    char long_path[300] = "ipc://";
    memset(long_path + 6, 'a', 200);
    CU_ASSERT_EQUAL(try_open(long_path, 0, &transport, &error), DSKV_EXIT_USAGE);
}

static void clients_say_what_they_cannot_reach(void)
{
    struct dskv_link *link;
    struct dskv_error error = {0};
    CU_ASSERT_EQUAL(dskv_link_open("nonsense", &link, &error), DSKV_BAD_VALUE);
    CU_ASSERT_PTR_NULL(link);
    CU_ASSERT_STRING_EQUAL(error.field, "endpoint");
    char *endpoint = dskv_format("ipc://%s/nobody", directory);
    struct dskv_frames frames = {dskv_calloc(1, sizeof *frames.frames), 1};
    frames.frames[0] = (struct dskv_frame){dskv_calloc(1, 1), 1};
    CU_ASSERT_EQUAL_FATAL(dskv_link_open(endpoint, &link, &error), DSKV_OK);
    CU_ASSERT_EQUAL(dskv_link_send(link, &frames, 150, &error), DSKV_UNREACHABLE);
    CU_ASSERT_PTR_NULL(frames.frames);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.message, endpoint));
    dskv_link_close(&link);
    free(endpoint);
}

int main(void)
{
    if (!mkdtemp(directory))
        return 1;
    int n_failed = dskv_run_tests("ipc.endpoints",
                                  (struct dskv_test[]){
                                      {"odd endpoints are usage", odd_endpoints_are_usage},
                                      {"only loopback without insecure", only_loopback_without_insecure},
                                      {"IPv6 loopback works", ipv6_loopback_works},
                                      {"several endpoints at once", several_endpoints_at_once},
                                      {"a taken port is an error", a_taken_port_is_an_error},
                                      {"ipc sockets are private and removed", ipc_sockets_are_private_and_removed},
                                      {"a dead server's socket is taken over", a_dead_servers_socket_is_taken_over},
                                      {"files are left alone", files_are_left_alone},
                                      {"clients say what they cannot reach", clients_say_what_they_cannot_reach},
                                      {NULL, NULL},
                                  });
    return n_failed + (rmdir(directory) != 0);
}
