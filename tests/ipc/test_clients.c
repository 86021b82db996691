/* Who is heard of, who is lost, and the limits of what waits. */
#include "base/memory.h"
#include "ipc/clients.h"
#include "support/cunit_suite.h"

#include <string.h>

static struct dskv_route route_of(int number)
{
    struct dskv_route route = {.n = 5};
    memcpy(route.bytes + 1, &number, sizeof number);
    return route;
}

/* Frames that claim a size; only the count is looked at. */
static struct dskv_frames frames_of(size_t bytes)
{
    struct dskv_frames frames = {dskv_calloc(1, sizeof *frames.frames), 1};
    frames.frames[0] = (struct dskv_frame){dskv_calloc(1, 1), bytes};
    return frames;
}

static void queue(struct dskv_clients *clients, int number, size_t bytes)
{
    struct dskv_route route = route_of(number);
    struct dskv_frames frames = frames_of(bytes);
    dskv_clients_queue(clients, dskv_clients_find(clients, &route), &frames);
    CU_ASSERT_PTR_NULL(frames.frames);
}

static struct dskv_clients *hear(int n)
{
    struct dskv_clients *clients = dskv_clients_open();
    for (int i = 0; i < n; i++) {
        struct dskv_route route = route_of(i);
        dskv_clients_hear(clients, &route, i % 10);
    }
    return clients;
}

static void all_are_found(void)
{
    struct dskv_clients *clients = hear(1000);
    struct dskv_route route = route_of(1000);
    int n = 0;
    CU_ASSERT_PTR_NULL(dskv_clients_find(clients, &route));
    for (int i = 0; i < 1000; i++) {
        route = route_of(i);
        struct dskv_peer *peer = dskv_clients_find(clients, &route);
        CU_ASSERT(peer && memcmp(&peer->route, &route, sizeof route) == 0);
        CU_ASSERT_PTR_EQUAL(dskv_clients_hear(clients, &route, i % 10), peer);
    }
    for (struct dskv_peer *peer = dskv_clients_first(clients); peer; peer = dskv_clients_next(clients, peer))
        n++;
    CU_ASSERT_EQUAL(n, 1000);
    dskv_clients_close(&clients);
    CU_ASSERT_PTR_NULL(clients);
}

static void a_connection_takes_its_routes_along(void)
{
    struct dskv_clients *clients = hear(1000);
    struct dskv_route route;
    int n = 0;
    dskv_clients_lose_connection(clients, 3);
    CU_ASSERT(dskv_clients_has_lost(clients));
    for (; dskv_clients_next_lost(clients, &route); n++) {
        int number;
        memcpy(&number, route.bytes + 1, sizeof number);
        CU_ASSERT_EQUAL(number % 10, 3);
        CU_ASSERT_PTR_NULL(dskv_clients_find(clients, &route));
    }
    CU_ASSERT_EQUAL(n, 100);
    CU_ASSERT_FALSE(dskv_clients_has_lost(clients));
    dskv_clients_close(&clients);
}

static void bytes_are_counted(void)
{
    struct dskv_clients *clients = hear(2);
    struct dskv_route route = route_of(0);
    struct dskv_peer *peer = dskv_clients_find(clients, &route);
    queue(clients, 0, 1000);
    queue(clients, 0, 0);
    queue(clients, 1, 500);
    CU_ASSERT(peer->bytes >= 1000 && dskv_clients_bytes(clients) >= peer->bytes + 500);
    CU_ASSERT_EQUAL(peer->first->frames.frames[0].bytes, 1000);
    dskv_clients_drop_first(clients, peer);
    CU_ASSERT(peer->bytes > 0 && peer->bytes < 1000); /* an empty frame is not free either */
    dskv_clients_drop_first(clients, peer);
    CU_ASSERT(peer->bytes == 0 && !peer->first);
    dskv_clients_lose_connection(clients, 1);
    CU_ASSERT_EQUAL(dskv_clients_bytes(clients), 0);
    dskv_clients_close(&clients);
}

static void one_client_has_a_limit(void)
{
    struct dskv_clients *clients = hear(2);
    struct dskv_route lost, route = route_of(0);
    queue(clients, 0, DSKV_MAX_CLIENT_BACKLOG_BYTES - 1000);
    CU_ASSERT_FALSE(dskv_clients_has_lost(clients));
    queue(clients, 0, 1000);
    CU_ASSERT_FATAL(dskv_clients_next_lost(clients, &lost));
    CU_ASSERT_EQUAL(memcmp(&lost, &route, sizeof lost), 0);
    CU_ASSERT_EQUAL(dskv_clients_bytes(clients), 0);
    dskv_clients_close(&clients);
}

static void all_together_have_a_limit(void)
{
    struct dskv_clients *clients = hear(8);
    struct dskv_route lost, greedy = route_of(5);
    const size_t share = DSKV_MAX_BACKLOG_BYTES / 8;
    queue(clients, 5, share + 5000);
    for (int i = 0; i < 8; i++)
        if (i != 5)
            queue(clients, i, share - 1000);
    CU_ASSERT_FALSE(dskv_clients_has_lost(clients));
    queue(clients, 2, 4000);
    CU_ASSERT_FATAL(
        dskv_clients_next_lost(clients, &lost)); /* not the one that came last, but the one that holds most */
    CU_ASSERT(memcmp(&lost, &greedy, sizeof lost) == 0);
    CU_ASSERT_FALSE(dskv_clients_has_lost(clients));
    CU_ASSERT(dskv_clients_bytes(clients) <= DSKV_MAX_BACKLOG_BYTES);
    dskv_clients_close(&clients);
}

int main(void)
{
    return dskv_run_tests("ipc.clients",
                          (struct dskv_test[]){
                              {"all are found", all_are_found},
                              {"a connection takes its routes along", a_connection_takes_its_routes_along},
                              {"bytes are counted", bytes_are_counted},
                              {"one client has a limit", one_client_has_a_limit},
                              {"all together have a limit", all_together_have_a_limit},
                              {NULL, NULL},
                          });
}
