/* Connections within a machine do not pace, on either end, and no other connection's congestion control is touched. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/socket.h"
#include "syncer/server/listen.h"
#include "tests/unit/trainer_rig.h"
#include "tests/unit/unit.h"
#include "worker/link/get.h"
#include "worker/link/serve_listen.h"

#define NAME_MAX_BYTES 16 /* TCP_CA_NAME_MAX */

static void algorithm_of(int fd, char name[NAME_MAX_BYTES + 1])
{
    socklen_t size = NAME_MAX_BYTES;
    memset(name, 0, NAME_MAX_BYTES + 1);
    CU_ASSERT_EQUAL_FATAL(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
}

static bool paces_not(int fd)
{
    char name[NAME_MAX_BYTES + 1];
    algorithm_of(fd, name);
    return strcmp(name, "reno") == 0;
}

static struct sockaddr_storage address_of(const char *text)
{
    struct sockaddr_storage address = {.ss_family = strchr(text, ':') != NULL ? AF_INET6 : AF_INET};
    void *at = address.ss_family == AF_INET6 ? (void *)&((struct sockaddr_in6 *)&address)->sin6_addr
                                             : (void *)&((struct sockaddr_in *)&address)->sin_addr;
    CU_ASSERT_EQUAL_FATAL(inet_pton(address.ss_family, text, at), 1);
    return address;
}

/* --- addresses ------------------------------------------------------------------------------------------------------ */

/* Another algorithm than ours that this user may choose, so that both outcomes can be seen; "" where there is none. */
static void another_algorithm(char name[NAME_MAX_BYTES + 1])
{
    char allowed[256] = "", *rest = NULL;
    FILE *file = fopen("/proc/sys/net/ipv4/tcp_allowed_congestion_control", "r");
    if (file != NULL && fgets(allowed, sizeof allowed, file) == NULL) {
        allowed[0] = 0;
    }
    if (file != NULL) {
        fclose(file);
    }
    name[0] = 0;
    for (char *word = strtok_r(allowed, " \n", &rest); word != NULL; word = strtok_r(NULL, " \n", &rest)) {
        if (strcmp(word, "reno") != 0) {
            snprintf(name, NAME_MAX_BYTES + 1, "%.16s", word);
        }
    }
}

static void test_only_loopback_is_touched(void)
{
    static const char *const here[] = {"127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1", "::ffff:127.9.9.9"};
    static const char *const elsewhere[] = {"0.0.0.0",   "126.255.255.255", "128.0.0.1", "10.0.0.1",
                                            "::",        "::ffff:10.0.0.1", "fe80::1",   "2001:db8::127",
                                            "127::1",    "::ffff:0.0.0.0",  "::2",       "::127.0.0.1",
                                            "192.0.2.1", "::fffe:127.0.0.1"};
    char other[NAME_MAX_BYTES + 1], name[NAME_MAX_BYTES + 1];
    another_algorithm(other);
    for (size_t i = 0; i < DL_COUNT_OF(here) + DL_COUNT_OF(elsewhere); i++) {
        bool local = i < DL_COUNT_OF(here);
        struct sockaddr_storage address = address_of(local ? here[i] : elsewhere[i - DL_COUNT_OF(here)]);
        const struct sockaddr *at = (const struct sockaddr *)&address;
        CU_ASSERT_EQUAL(dl_socket_is_loopback(at), local);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CU_ASSERT_FATAL(fd >= 0);
        if (other[0] != 0) {
            CU_ASSERT_EQUAL(setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, other, (socklen_t)strlen(other)), 0);
        }
        algorithm_of(fd, other);
        dl_socket_prepare(fd, at);
        algorithm_of(fd, name);
        CU_ASSERT_STRING_EQUAL(name, local ? "reno" : other);
        close(fd);
    }
    struct sockaddr unix_address = {.sa_family = AF_UNIX};
    CU_ASSERT_FALSE(dl_socket_is_loopback(&unix_address));
    dl_socket_prepare(-1, (const struct sockaddr *)&(struct sockaddr_in){
                              .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}); /* No harm. */
}

/* --- both ends of the ways to connect ------------------------------------------------------------------------------- */

static uint8_t *no_place(void *context, uint64_t offset, uint64_t *room)
{
    (void)context;
    (void)offset;
    (void)room;
    return NULL;
}

static void no_progress(void *context, uint64_t offset, uint64_t bytes)
{
    (void)context;
    (void)offset;
    (void)bytes;
}

/* A peer's fetch is under way to `listen_fd`: what is accepted, and the fetching end. */
static void check_fetch(int listen_fd, int (*accept_one)(int))
{
    struct sockaddr_in bound = {0};
    socklen_t size = sizeof bound;
    char address[64];
    struct dl_err err;
    struct wk_get get;
    CU_ASSERT_EQUAL_FATAL(getsockname(listen_fd, (struct sockaddr *)&bound, &size), 0);
    snprintf(address, sizeof address, "127.0.0.1:%u", ntohs(bound.sin_port));
    wk_get_init(&get, NULL, NULL);
    enum dl_rc rc = wk_get_begin(&get, address, "/x", 0, 0, PATIENCE_NS, no_place, no_progress, NULL, &err);
    for (int64_t end_ns = dl_now_ns() + PATIENCE_NS; (rc == DL_OK || rc == DL_AGAIN) && dl_now_ns() < end_ns;) {
        rc = wk_get_pump(&get, 10, &err);
        if (get.state >= WK_GET_ASKING) {
            break;
        }
    }
    CU_ASSERT_FATAL(get.state >= WK_GET_ASKING);
    CU_ASSERT(paces_not(get.stream.fd));
    int fd = accept_one(listen_fd);
    CU_ASSERT_FATAL(fd >= 0);
    CU_ASSERT(paces_not(fd));
    close(fd);
    wk_get_close(&get);
}

static int accept_plain(int listen_fd)
{
    return accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
}

static int accept_at_syncer(int listen_fd)
{
    struct dl_err err;
    int fd = -1;
    return sy_listen_accept(listen_fd, &fd, &err) == DL_OK ? fd : -1;
}

static void test_listeners_and_fetches(void)
{
    struct dl_err err;
    char address[SY_ADDRESS_MAX];
    int fd = -1;
    CU_ASSERT_EQUAL_FATAL(sy_listen("127.0.0.1:0", &fd, address, &err), DL_OK);
    check_fetch(fd, accept_at_syncer);
    close(fd);
    CU_ASSERT_EQUAL_FATAL(wk_serve_listen("127.0.0.1:0", &fd, &err), DL_OK);
    check_fetch(fd, accept_plain);
    close(fd);
}

/* On all interfaces: the system's choice stays. */
static void test_listeners_on_all_interfaces(void)
{
    char of_system[NAME_MAX_BYTES + 1], name[NAME_MAX_BYTES + 1], address[SY_ADDRESS_MAX];
    struct dl_err err;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CU_ASSERT_FATAL(fd >= 0);
    algorithm_of(fd, of_system);
    close(fd);
    CU_ASSERT_EQUAL_FATAL(sy_listen("*:0", &fd, address, &err), DL_OK);
    algorithm_of(fd, name);
    CU_ASSERT_STRING_EQUAL(name, of_system);
    close(fd);
    CU_ASSERT_EQUAL_FATAL(wk_serve_listen("*:0", &fd, &err), DL_OK);
    algorithm_of(fd, name);
    CU_ASSERT_STRING_EQUAL(name, of_system);
    close(fd);
}

/* The descriptor of this process whose own address is the one that `accepted` is connected to. */
static int other_end(int accepted)
{
    struct sockaddr_in wanted = {0};
    socklen_t size = sizeof wanted;
    if (getpeername(accepted, (struct sockaddr *)&wanted, &size) != 0) {
        return -1;
    }
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in own = {0};
        size = sizeof own;
        if (getsockname(fd, (struct sockaddr *)&own, &size) == 0 && own.sin_family == AF_INET &&
            own.sin_port == wanted.sin_port && own.sin_addr.s_addr == wanted.sin_addr.s_addr) {
            return fd;
        }
    }
    return -1;
}

static void test_a_learner(void)
{
    struct fake_syncer *syncer = fake_new(1);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    pthread_mutex_lock(&syncer->lock);
    int end = syncer->conns[0].fd >= 0 ? other_end(syncer->conns[0].fd) : -1;
    pthread_mutex_unlock(&syncer->lock);
    CU_ASSERT_FATAL(end >= 0);
    CU_ASSERT(paces_not(end));
    close_trainer(&trainer);
    fake_free(syncer);
}

UNIT_MAIN("socket", {"only loopback addresses are touched", test_only_loopback_is_touched},
          {"both ends of a fetch, from a syncer's and a peer's listening socket", test_listeners_and_fetches},
          {"listening on all interfaces leaves the system's choice", test_listeners_on_all_interfaces},
          {"a learner's connection to its syncer", test_a_learner})
