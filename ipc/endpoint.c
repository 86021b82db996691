#include "endpoint.h"

#include "base/memory.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static const char expected[] = "tcp://127.0.0.1:PORT, tcp://[::1]:PORT or ipc:///PATH";

static enum dskv_exit not_an_endpoint(const char *text, const char *why, struct dskv_error *error)
{
    dskv_fail_exit(error, DSKV_EXIT_USAGE, "cannot listen on \"%.100s\": %s; valid are %s", text, why, expected);
    dskv_error_set_valid(error, "%s", expected);
    return DSKV_EXIT_USAGE;
}

/* ---- tcp -------------------------------------------------------------------------------------------------------- */

static int is_loopback(const char *host)
{
    struct in_addr v4;
    struct in6_addr v6;
    if (inet_pton(AF_INET, host, &v4) == 1)
        return ntohl(v4.s_addr) >> 24 == 127;
    return inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

static int is_port(const char *text)
{
    char *end = NULL;
    if (strcmp(text, "*") == 0)
        return 1;
    if (*text < '0' || *text > '9')
        return 0;
    return strtoul(text, &end, 10) <= 65535 && *end == 0;
}

static enum dskv_exit open_tcp(const char *text, int insecure, struct dskv_endpoint *endpoint, struct dskv_error *error)
{
    char host[256];
    const char *rest = text + strlen("tcp://"), *colon = strrchr(rest, ':');
    size_t n = colon ? (size_t)(colon - rest) : 0;
    if (!colon || n == 0 || n >= sizeof host || !is_port(colon + 1))
        return not_an_endpoint(text, "it is not a host and a port", error);
    int bracketed = rest[0] == '[' && rest[n - 1] == ']';
    n -= bracketed ? 2 : 0;
    memcpy(host, rest + bracketed, n);
    host[n] = 0;
    if (strcmp(host, "localhost") == 0)
        strncpy(host, "127.0.0.1", sizeof host - 1);
    if (!insecure && !is_loopback(host))
        return not_an_endpoint(text, "other machines could reach it, and nothing is encrypted (--insecure allows it)",
                               error);
    int is_v6 = strchr(host, ':') != NULL;
    endpoint->address = dskv_format("tcp://%s%s%s:%s", is_v6 ? "[" : "", host, is_v6 ? "]" : "", colon + 1);
    return DSKV_EXIT_OK;
}

/* ---- ipc -------------------------------------------------------------------------------------------------------- */

/* Whether a server listens on the socket: 1, 0, or -1 with errno when that cannot be told. */
static int somebody_listens(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int result = connect(fd, (struct sockaddr *)&address, sizeof address) == 0 || errno == EAGAIN ? 1
                 : errno == ECONNREFUSED || errno == ENOENT                                       ? 0
                                                                                                  : -1;
    int saved = errno;
    close(fd);
    errno = saved;
    return result;
}

static enum dskv_exit check_path(const char *text, const char *path, struct dskv_error *error)
{
    struct stat file;
    if (lstat(path, &file) != 0)
        return errno == ENOENT
                   ? DSKV_EXIT_OK
                   : dskv_fail_exit(error, DSKV_EXIT_ENDPOINT, "cannot listen on %s: %s", text, strerror(errno));
    if (!S_ISSOCK(file.st_mode))
        return dskv_fail_exit(error, DSKV_EXIT_ENDPOINT, "cannot listen on %s: there is a file that is not a socket",
                              text);
    int listens = somebody_listens(path);
    if (listens < 0)
        return dskv_fail_exit(error, DSKV_EXIT_ENDPOINT, "cannot listen on %s: %s", text, strerror(errno));
    if (listens)
        return dskv_fail_exit(error, DSKV_EXIT_ENDPOINT, "cannot listen on %s: another server listens there", text);
    return DSKV_EXIT_OK;
}

static enum dskv_exit open_ipc(const char *text, struct dskv_endpoint *endpoint, struct dskv_error *error)
{
    const char *path = text + strlen("ipc://");
    if (*path == '@')
        return not_an_endpoint(text, "any user could open an abstract socket", error);
    if (*path == 0 || strcmp(path, "*") == 0)
        return not_an_endpoint(text, "it names no path", error);
    if (strlen(path) >= sizeof((struct sockaddr_un *)0)->sun_path)
        return not_an_endpoint(text, "its path is too long for a socket", error);
    enum dskv_exit code = check_path(text, path, error);
    if (code)
        return code;
    endpoint->address = dskv_strdup(text);
    endpoint->path = endpoint->address + strlen("ipc://");
    return DSKV_EXIT_OK;
}

/* ---- both ------------------------------------------------------------------------------------------------------- */

enum dskv_exit dskv_endpoint_open(const char *text, int insecure, struct dskv_endpoint *endpoint,
                                  struct dskv_error *error)
{
    memset(endpoint, 0, sizeof *endpoint);
    if (strncmp(text, "tcp://", strlen("tcp://")) == 0)
        return open_tcp(text, insecure, endpoint, error);
    if (strncmp(text, "ipc://", strlen("ipc://")) == 0)
        return open_ipc(text, endpoint, error);
    return not_an_endpoint(text, "it is neither tcp nor ipc", error);
}

enum dskv_exit dskv_endpoint_bound(struct dskv_endpoint *endpoint, struct dskv_error *error)
{
    struct stat file = {0};
    if (endpoint->path && lstat(endpoint->path, &file) != 0)
        return dskv_fail_exit(error, DSKV_EXIT_ENDPOINT, "the socket of %s vanished: %s", endpoint->address,
                              strerror(errno));
    endpoint->device = file.st_dev;
    endpoint->inode = file.st_ino;
    endpoint->is_bound = 1;
    return DSKV_EXIT_OK;
}

void dskv_endpoint_close(struct dskv_endpoint *endpoint)
{
    struct stat file;
    if (endpoint->path && endpoint->is_bound && lstat(endpoint->path, &file) == 0 && file.st_dev == endpoint->device &&
        file.st_ino == endpoint->inode)
        unlink(endpoint->path);
    free(endpoint->address);
    memset(endpoint, 0, sizeof *endpoint);
}
