/* Peer recovery: server and fetcher of a learner's state over loopback, with every fault (J4), and J6 after each. */
#include "tests/unit/peer_rig.h"
#include "worker/link/get.h"

#define HEADS_MAX 4096 /* HTTP heads and the manifest, in what a relay passes on. */

static struct rig_peer a, b;
static struct rig_relay relay, other;
static struct rig_joiner joiner;
static struct rig_peer *const both[] = {&a, &b};

static uint64_t states_bytes(void)
{
    uint64_t bytes = 0;
    for (uint32_t s = 0; s < RIG_STATES; s++) {
        bytes += rig_state_bytes(s);
    }
    return bytes;
}

static uint64_t fragments_bytes(void)
{
    uint64_t bytes = 0;
    for (uint32_t p = 0; p < RIG_FRAGMENTS; p++) {
        bytes += dl_codec_bytes(joiner.codec, joiner.layout->fragments[p].padded_elements);
    }
    return bytes;
}

/* Two peers with the syncer's parameters and optimiser states of their own. */
static void start(enum dl_codec codec)
{
    rig_peer_start(&a, 1, 50, 1, codec, NULL);
    rig_peer_start(&b, 2, 50, 2, codec, NULL);
    rig_joiner_start(&joiner, 50, codec);
}

static void finish(void)
{
    rig_joiner_release(&joiner);
    rig_peer_release(&a);
    rig_peer_release(&b);
}

/* --- what works -------------------------------------------------------------------------------------------------- */

static void take_over(enum dl_codec codec)
{
    start(codec);
    rig_join(&joiner, both, NULL, 2);
    rig_run(&joiner, both, 2, NULL);
    rig_check(&joiner, &a);
    CU_ASSERT_EQUAL(joiner.sent, 0); /* All of it came from the peer. */
    CU_ASSERT_EQUAL(joiner.report.bytes, states_bytes() + fragments_bytes());
    CU_ASSERT_EQUAL(a.filled, 1);
    CU_ASSERT_EQUAL(b.filled, 0);
    finish();
}

static void test_state_and_fragments_are_taken_over(void)
{
    take_over(DL_CODEC_NONE);
    take_over(DL_CODEC_BF16);
}

static void test_no_peer_means_the_syncer_at_once(void)
{
    start(DL_CODEC_NONE);
    rig_join(&joiner, both, NULL, 0);
    rig_run(&joiner, both, 2, NULL);
    rig_check(&joiner, NULL);
    CU_ASSERT_EQUAL(joiner.sent, RIG_FRAGMENTS);
    CU_ASSERT_EQUAL(joiner.helds, 0);
    finish();
}

/* J6: of a version that the syncer does not hold, or holds otherwise, nothing is taken from a peer. */
static void test_what_differs_comes_from_the_syncer(void)
{
    start(DL_CODEC_NONE);
    a.offers[1].version--;         /* Older, */
    a.offers[2].version++;         /* ahead of a syncer that lost its state, */
    a.model.tensors[0][0] += 1.0f; /* and of other content: some fragment holds the first element. */
    wk_store_free(a.store);
    a.store = wk_store_new(a.model.tensors, RIG_TENSORS);
    CU_ASSERT_EQUAL_FATAL(wk_store_prepare(a.store, a.layout, NULL), DL_OK);
    a.source.store = a.store;
    wk_serve_open(a.serve, &a.source);
    rig_join(&joiner, both, NULL, 1);
    rig_run(&joiner, both, 1, NULL);
    rig_check(&joiner, &a);
    CU_ASSERT(joiner.sent >= 2 && joiner.sent <= 3);
    finish();
}

/* A round is committed while the state is fetched: the newer version wins, and is not fetched any more. */
static void commit_meanwhile(struct rig_joiner *who)
{
    if (who->helds == RIG_FRAGMENTS && who->current[3].version == 8) {
        who->current[3].version = 9;
        who->current[3].round = 40;
        rig_send_update(who, 3);
    }
}

static void test_a_newer_version_wins(void)
{
    start(DL_CODEC_NONE);
    rig_join(&joiner, both, NULL, 2);
    rig_run(&joiner, both, 2, commit_meanwhile);
    rig_check(&joiner, &a);
    CU_ASSERT_EQUAL(joiner.sent, 1);
    struct dl_wire_fragment fragment;
    wk_link_fragment(joiner.hub.link, 3, &fragment);
    CU_ASSERT_EQUAL(fragment.version, 9);
    uint64_t third = dl_codec_bytes(DL_CODEC_NONE, joiner.layout->fragments[3].padded_elements);
    CU_ASSERT_EQUAL(joiner.report.bytes, states_bytes() + fragments_bytes() - third);
    finish();
}

/* J3: while optimiser state is fetched the syncer is asked for nothing, so that its link carries no version that is soon replaced;
 * what was merged meanwhile comes from it, once. */
static void merge_while_states_come(struct rig_joiner *who)
{
    bool states_are_here = strstr(who->log, "optimiser state of learner") != NULL;
    CU_ASSERT(who->helds == 0 || states_are_here);
    if (a.filled == 1 && who->current[3].version < 20 && !states_are_here) {
        who->current[3].version++;
        who->current[3].round++;
    }
}

static void test_nothing_is_asked_for_before_the_states_are_here(void)
{
    start(DL_CODEC_NONE);
    rig_join(&joiner, both, NULL, 2);
    rig_run(&joiner, both, 2, merge_while_states_come);
    rig_check(&joiner, &a);
    CU_ASSERT(joiner.current[3].version > 8);
    CU_ASSERT_EQUAL(joiner.helds, RIG_FRAGMENTS);
    CU_ASSERT_EQUAL(joiner.sent, 1);
    uint64_t third = dl_codec_bytes(DL_CODEC_NONE, joiner.layout->fragments[3].padded_elements);
    CU_ASSERT_EQUAL(joiner.report.bytes, states_bytes() + fragments_bytes() - third);
    finish();
}

/* J3: a peer is asked for its state before this learner makes its base copy, and makes its snapshot meanwhile. */
static void test_a_peer_is_asked_first(void)
{
    start(DL_CODEC_NONE);
    struct wk_step step;
    rig_be_welcome(&joiner);
    int64_t now_ns = dl_now_ns(), patience_ns = WK_PEERS_MS * DL_NS_PER_MS;
    wk_link_next_step(joiner.hub.link, now_ns, &step);
    CU_ASSERT_EQUAL(step.type, WK_STEP_WAIT); /* PEERS is on its way, */
    CU_ASSERT(step.until_ns <= now_ns + patience_ns);
    wk_link_next_step(joiner.hub.link, now_ns + patience_ns, &step);
    CU_ASSERT_EQUAL(step.type, WK_STEP_PREPARE); /* but is not waited for in vain. */
    rig_name_peers(&joiner, both, NULL, 2);
    wk_link_next_step(joiner.hub.link, now_ns, &step);
    CU_ASSERT_EQUAL(step.type, WK_STEP_FETCH);
    wk_fetch_turn(joiner.fetch);
    wk_link_next_step(joiner.hub.link, now_ns, &step);
    CU_ASSERT_EQUAL(step.type, WK_STEP_PREPARE);
    int64_t until_ns = dl_now_ns() + RIG_BOUND_NS;
    while (!wk_serve_wants(a.serve) && dl_now_ns() < until_ns) {
        (void)poll(NULL, 0, 1);
    }
    CU_ASSERT(wk_serve_wants(a.serve));
    rig_run(&joiner, both, 2, NULL);
    rig_check(&joiner, &a);
    finish();
}

static void test_without_peers_nothing_is_waited_for(void)
{
    start(DL_CODEC_NONE);
    struct wk_step step;
    rig_be_welcome(&joiner);
    rig_name_peers(&joiner, both, NULL, 0);
    wk_link_next_step(joiner.hub.link, dl_now_ns(), &step);
    CU_ASSERT_EQUAL(step.type, WK_STEP_PREPARE);
    finish();
}

/* A trainer that registers something else takes over parameters only. */
static void test_other_optimiser_state_is_left_alone(void)
{
    start(DL_CODEC_NONE);
    snprintf(a.model.registered[1].name, sizeof a.model.registered[1].name, "sgd.momentum");
    wk_serve_open(a.serve, &a.source);
    rig_join(&joiner, both, NULL, 1);
    rig_run(&joiner, both, 1, NULL);
    rig_check(&joiner, NULL);
    CU_ASSERT_EQUAL(joiner.sent, 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(joiner.log, "other optimiser state"));
    finish();
}

/* --- faults of the connection, J4 -------------------------------------------------------------------------------- */

static void run_with(enum rig_fault fault, uint64_t at, const struct rig_peer *expected)
{
    rig_relay_start(&relay, &a, fault, at, NULL, 0);
    rig_relay_start(&other, &b, RIG_PASS, 0, NULL, 0);
    const char *const addresses[] = {relay.address, other.address};
    rig_join(&joiner, both, addresses, 2);
    rig_run(&joiner, both, 2, NULL);
    CU_ASSERT(__atomic_load_n(&relay.happened, __ATOMIC_ACQUIRE));
    rig_relay_stop(&relay);
    rig_relay_stop(&other);
    rig_check(&joiner, expected);
}

/* A connection that breaks anywhere is resumed at the byte where it broke. */
static void test_a_broken_connection_is_resumed_by_byte_range(void)
{
    uint64_t all = 0;
    for (int i = 0; i < 12; i++) {
        start(DL_CODEC_NONE);
        all = states_bytes() + fragments_bytes();
        uint64_t at = 300 + (all - 300) * (uint64_t)i / 12 + (uint64_t)i * 7;
        run_with(RIG_CUT, at, &a);
        CU_ASSERT_EQUAL(joiner.report.bytes, all);
        CU_ASSERT(relay.connections == 2 && other.connections == 0);
        CU_ASSERT(relay.passed >= all && relay.passed < all + HEADS_MAX);
        finish();
    }
}

/* The peer dies in the middle of its optimiser state: the next peer's is taken, all of it. */
static void test_a_peer_that_dies_in_its_state_is_replaced(void)
{
    start(DL_CODEC_NONE);
    run_with(RIG_DIE, states_bytes() / 2, &b);
    CU_ASSERT_EQUAL(joiner.sent, 0);
    finish();
}

/* It dies in the middle of a fragment: that goes on from the other peer, at the byte where it broke. */
static void test_a_peer_that_dies_in_a_fragment_is_replaced_at_the_byte(void)
{
    start(DL_CODEC_NONE);
    uint64_t first = dl_codec_bytes(DL_CODEC_NONE, joiner.layout->fragments[0].padded_elements);
    run_with(RIG_DIE, states_bytes() + first * 3 / 2, &a);
    uint64_t all = states_bytes() + fragments_bytes();
    CU_ASSERT_EQUAL(joiner.sent, 0);
    CU_ASSERT_EQUAL(joiner.report.bytes, all); /* Not a byte twice. */
    CU_ASSERT(other.passed < fragments_bytes() - first + HEADS_MAX);
    finish();
}

/* A peer that goes silent costs the progress deadline, twice, not the join. */
static void test_a_stalled_peer_is_given_up(void)
{
    start(DL_CODEC_NONE);
    int64_t begun_ns = dl_now_ns();
    rig_joiner_hurry(&joiner);
    run_with(RIG_STALL, states_bytes() / 3, &a); /* The second connection goes on where the first one stalled. */
    CU_ASSERT(dl_now_ns() - begun_ns >= RIG_PROGRESS_NS);
    CU_ASSERT_EQUAL(joiner.report.bytes, states_bytes() + fragments_bytes());
    finish();
}

static void test_damaged_bytes_are_never_taken(void)
{
    start(DL_CODEC_NONE);
    run_with(RIG_FLIP, 250, &b); /* In the manifest, or the head before it. */
    finish();
    start(DL_CODEC_NONE);
    run_with(RIG_FLIP, states_bytes() / 2, &b);
    finish();
    start(DL_CODEC_NONE);
    run_with(RIG_FLIP, states_bytes() + fragments_bytes() / 2, &a); /* The fragment comes from the other peer. */
    CU_ASSERT_EQUAL(joiner.sent, 0);
    finish();
}

/* Nobody is left in the middle of the optimiser state: what came of it is not kept. */
static void test_half_a_state_becomes_zeros(void)
{
    start(DL_CODEC_NONE);
    rig_relay_start(&relay, &a, RIG_DIE, states_bytes() / 2, NULL, 0);
    const char *const addresses[] = {relay.address};
    rig_join(&joiner, both, addresses, 1);
    rig_run(&joiner, both, 1, NULL);
    rig_relay_stop(&relay);
    rig_check(&joiner, NULL);
    CU_ASSERT_EQUAL(joiner.sent, RIG_FRAGMENTS);
    finish();
}

/* A peer whose trainer computes for longer than anyone waits. */
static void test_a_busy_peer_is_not_waited_for(void)
{
    start(DL_CODEC_NONE);
    a.busy = true;
    rig_joiner_hurry(&joiner);
    rig_join(&joiner, both, NULL, 2);
    rig_run(&joiner, both, 2, NULL);
    rig_check(&joiner, &b);
    CU_ASSERT_EQUAL(joiner.sent, RIG_FRAGMENTS); /* After so long the syncer was told not to hold them back. */
    CU_ASSERT_EQUAL(joiner.report.bytes, states_bytes());
    finish();
}

/* The syncer is not there to confirm anything: the state is taken, the fragments are its own to send. */
static void test_a_wrong_token_is_refused(void)
{
    start(DL_CODEC_NONE);
    joiner.hub.token[0] = 'x';
    rig_joiner_hurry(&joiner); /* A fetcher that knows this token. */
    rig_join(&joiner, both, NULL, 2);
    rig_run(&joiner, both, 2, NULL);
    rig_check(&joiner, NULL);
    CU_ASSERT_EQUAL(a.filled + b.filled, 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(joiner.log, "status 401"));
    finish();
}

/* --- hostile answers --------------------------------------------------------------------------------------------- */

static void expect_useless(const char *canned, size_t bytes)
{
    start(DL_CODEC_NONE);
    rig_joiner_hurry(&joiner);
    rig_relay_start(&relay, NULL, RIG_PASS, 0, canned, bytes);
    const char *const addresses[] = {relay.address};
    rig_join(&joiner, both, addresses, 1);
    rig_run(&joiner, both, 0, NULL);
    rig_relay_stop(&relay);
    rig_check(&joiner, NULL);
    CU_ASSERT_EQUAL(joiner.sent, RIG_FRAGMENTS);
    finish();
}

static void test_hostile_answers_are_refused(void)
{
    static const char *const answers[] = {
        "",
        "HTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nDLS1",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nmore than announced",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        "HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/9\r\n\r\nabcd",
        "HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        "SSH-2.0-OpenSSH_9.2\r\n\r\n",
    };
    for (size_t i = 0; i < DL_COUNT_OF(answers); i++) {
        expect_useless(answers[i], strlen(answers[i]));
    }
    static char endless[3 * WK_HTTP_HEAD_MAX];
    memset(endless, 'x', sizeof endless);
    expect_useless(endless, sizeof endless);
}

/* --- the server -------------------------------------------------------------------------------------------------- */

static uint16_t port_of(const struct rig_peer *peer)
{
    return (uint16_t)strtoul(strrchr(peer->address, ':') + 1, NULL, 10);
}

/* One request over a connection of its own; the answer's status, 0: none. */
static int ask(struct rig_peer *peer, const char *request, char *answer, size_t answer_bytes)
{
    int fd = rig_connect(port_of(peer));
    CU_ASSERT_FATAL(fd >= 0);
    rig_send(fd, request, strlen(request));
    size_t have = 0;
    int64_t until_ns = dl_now_ns() + RIG_BOUND_NS;
    while (have + 1 < answer_bytes && dl_now_ns() < until_ns) {
        rig_peer_boundary(peer);
        struct pollfd polls = {.fd = fd, .events = POLLIN};
        if (poll(&polls, 1, 10) <= 0) {
            continue;
        }
        ssize_t got = recv(fd, answer + have, answer_bytes - 1 - have, 0);
        if (got <= 0) {
            break;
        }
        have += (size_t)got;
        answer[have] = 0;
        struct wk_http_answer parsed;
        size_t head = wk_http_head_bytes(answer, have);
        if (head > 0 && wk_http_answer_parse(answer, head, &parsed) && have - head >= parsed.length) {
            break;
        }
    }
    answer[have] = 0;
    close(fd);
    return have > 12 ? (int)strtol(answer + 9, NULL, 10) : 0;
}

#define ALLOWED "Authorization: Bearer " RIG_TOKEN "\r\n"

static void test_requests(void)
{
    static char answer[65536];
    static const struct {
        int status;
        const char *request;
    } cases[] = {
        {401, "GET /v1/state HTTP/1.1\r\nHost: x\r\n\r\n"},
        {401, "GET /v1/state HTTP/1.1\r\nAuthorization: Bearer token-of-the-rih\r\n\r\n"},
        {401, "GET /v1/state HTTP/1.1\r\nAuthorization: Bearer \r\n\r\n"},
        {401, "GET /v1/state HTTP/1.1\r\nAuthorization: Basic " RIG_TOKEN "\r\n\r\n"},
        {401, "POST /v1/state HTTP/1.1\r\n\r\n"},
        {405, "POST /v1/state HTTP/1.1\r\n" ALLOWED "\r\n"},
        {405, "DELETE /v1/state HTTP/1.1\r\n" ALLOWED "\r\n"},
        {400, "POST /v1/state HTTP/1.1\r\n" ALLOWED "Content-Length: 3\r\n\r\nabc"},
        {400, "GET /v1/state HTTP/1.0\r\n" ALLOWED "\r\n"},
        {400, "\r\n\r\n"},
        {404, "GET / HTTP/1.1\r\n" ALLOWED "\r\n"},
        {404, "GET /v1/states HTTP/1.1\r\n" ALLOWED "\r\n"},
        {404, "GET /v1/state/../../etc/passwd HTTP/1.1\r\n" ALLOWED "\r\n"},
        {404, "GET /v1/state/00000000000000zz HTTP/1.1\r\n" ALLOWED "\r\n"},
        {410, "GET /v1/state/0000000000000001 HTTP/1.1\r\n" ALLOWED "\r\n"},
        {200, "GET /v1/state HTTP/1.1\r\n" ALLOWED "\r\n"},
        {200, "GET /v1/state HTTP/1.1\r\nauthorization:   Bearer " RIG_TOKEN "  \r\n\r\n"},
    };
    rig_peer_start(&a, 1, 50, 1, DL_CODEC_NONE, NULL);
    for (size_t i = 0; i < DL_COUNT_OF(cases); i++) {
        int status = ask(&a, cases[i].request, answer, sizeof answer);
        if (status != cases[i].status) {
            printf("\n%s -> %d\n", cases[i].request, status);
        }
        CU_ASSERT_EQUAL(status, cases[i].status);
        CU_ASSERT_PTR_NULL(strstr(answer, RIG_TOKEN));
    }
    CU_ASSERT_EQUAL(a.filled, 1); /* The second asker got the same snapshot. */
    rig_peer_release(&a);
}

/* The manifest that the server gives, decoded. */
static void fetch_manifest(struct rig_peer *peer, struct wk_manifest *manifest)
{
    static char answer[65536];
    CU_ASSERT_EQUAL_FATAL(ask(peer, "GET /v1/state HTTP/1.1\r\n" ALLOWED "\r\n", answer, sizeof answer), 200);
    struct wk_http_answer parsed;
    size_t head = wk_http_head_bytes(answer, sizeof answer);
    CU_ASSERT_FATAL(wk_http_answer_parse(answer, head, &parsed));
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(wk_manifest_decode((uint8_t *)answer + head, parsed.length, manifest, &err), DL_OK);
}

static void test_ranges(void)
{
    static char answer[65536];
    char request[256];
    struct wk_manifest manifest;
    rig_peer_start(&a, 1, 50, 1, DL_CODEC_NONE, NULL);
    fetch_manifest(&a, &manifest);
    uint64_t total = wk_manifest_total(&manifest), states = wk_manifest_states_offset(&manifest);
    const struct {
        int status;
        uint64_t first, last;
        bool open;
    } cases[] = {
        {206, 0, 0, false},
        {206, states, states + 99, false},
        {206, total - 8, total - 1, false},
        {206, total - 3, 0, true},
        {416, total, total, false},
        {416, 0, total, false},
        {416, 5, 4, false},
        {416, UINT64_MAX - 1, UINT64_MAX, false},
    };
    for (size_t i = 0; i < DL_COUNT_OF(cases); i++) {
        char last[24] = "";
        if (!cases[i].open) {
            snprintf(last, sizeof last, "%llu", (unsigned long long)cases[i].last);
        }
        snprintf(request, sizeof request, "GET /v1/state/%016llx HTTP/1.1\r\n" ALLOWED "Range: bytes=%llu-%s\r\n\r\n",
                 (unsigned long long)manifest.id, (unsigned long long)cases[i].first, last);
        CU_ASSERT_EQUAL(ask(&a, request, answer, sizeof answer), cases[i].status);
        if (cases[i].status == 206 && cases[i].first == states) {
            const char *body = answer + wk_http_head_bytes(answer, sizeof answer);
            CU_ASSERT(unit_same_bits(body, a.model.states[0], 100));
        }
    }
    CU_ASSERT_EQUAL(manifest.states[0].hash, dl_content_hash(a.model.states[0], rig_state_bytes(0)));
    wk_manifest_release(&manifest);
    rig_peer_release(&a);
}

/* More connections than it takes: those beyond wait, and nothing that is there suffers. */
static void test_a_crowd(void)
{
    int fds[2 * WK_SERVE_CLIENTS];
    struct wk_manifest manifest;
    rig_peer_start(&a, 1, 50, 1, DL_CODEC_NONE, NULL);
    for (size_t i = 0; i < DL_COUNT_OF(fds); i++) {
        fds[i] = rig_connect(port_of(&a));
        CU_ASSERT(fds[i] >= 0);
    }
    for (size_t i = 0; i < DL_COUNT_OF(fds); i++) {
        close(fds[i]);
    }
    fetch_manifest(&a, &manifest);
    CU_ASSERT_EQUAL(manifest.fragment_count, RIG_FRAGMENTS);
    wk_manifest_release(&manifest);
    rig_peer_release(&a);
}

static void test_addresses(void)
{
    static const struct {
        const char *listen, *address, *told;
    } fine[] = {
        {NULL, NULL, "127.0.0.1:"},           {"127.0.0.1:0", NULL, "127.0.0.1:"},
        {"*:0", "10.1.2.3", "10.1.2.3:"},     {"*", "gpu-7.example:70", "gpu-7.example:70"},
        {NULL, "[fd00::7]:4", "[fd00::7]:4"}, {NULL, "fd00::7", "[fd00::7]:"},
    };
    for (size_t i = 0; i < DL_COUNT_OF(fine); i++) {
        struct wk_serve_config config = {.token = RIG_TOKEN, .listen = fine[i].listen, .address = fine[i].address};
        rig_peer_start(&a, 1, 50, 1, DL_CODEC_NONE, &config);
        CU_ASSERT_EQUAL(strncmp(a.address, fine[i].told, strlen(fine[i].told)), 0);
        rig_peer_release(&a);
    }
    static const char *const wrong[] = {"nowhere.invalid:0", "127.0.0.1:99999", "127.0.0.1:x", "[::1", "a b:1", ""};
    for (size_t i = 0; i < DL_COUNT_OF(wrong); i++) {
        struct wk_serve_config config = {.token = RIG_TOKEN, .listen = wrong[i][0] == 0 ? "@" : wrong[i]};
        struct wk_serve *serve = NULL;
        struct dl_err err;
        CU_ASSERT_NOT_EQUAL(wk_serve_new(&config, &serve, &err), DL_OK);
        CU_ASSERT_PTR_NULL(serve);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "serve state"));
    }
}

/* --- the manifest ------------------------------------------------------------------------------------------------ */

/* Every cut and every flipped bit is refused, and so are counts that promise more than there is. */
static void test_manifests_are_checked(void)
{
    struct wk_manifest manifest, got;
    uint8_t *bytes = NULL;
    size_t size = 0;
    struct dl_err err;
    rig_peer_start(&a, 1, 50, 1, DL_CODEC_NONE, NULL);
    fetch_manifest(&a, &manifest);
    CU_ASSERT_EQUAL_FATAL(wk_manifest_encode(&manifest, &bytes, &size, &err), DL_OK);
    for (size_t cut = 0; cut < size; cut++) {
        CU_ASSERT_NOT_EQUAL(wk_manifest_decode(bytes, cut, &got, &err), DL_OK);
    }
    for (size_t bit = 0; bit < 8 * size; bit++) {
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
        CU_ASSERT_NOT_EQUAL(wk_manifest_decode(bytes, size, &got, &err), DL_OK);
        bytes[bit / 8] = (uint8_t)(bytes[bit / 8] ^ (1u << bit % 8));
    }
    /* The same with a checksum that is right again: whatever it says then, it is bounded or refused. */
    unsigned refused = 0;
    for (size_t at = 8; at < size; at++) {
        uint8_t before = bytes[at];
        bytes[at] = 0xff;
        uint64_t sum =
            dl_hash64(bytes + WK_MANIFEST_HEADER_BYTES, size - WK_MANIFEST_HEADER_BYTES, dl_hash64(bytes, 16, 0));
        uint8_t sums[8];
        memcpy(sums, bytes + 16, 8);
        memcpy(bytes + 16, &sum, 8);
        if (wk_manifest_decode(bytes, size, &got, &err) == DL_OK) {
            CU_ASSERT(got.fragment_count <= DL_SPEC_FRAGMENTS_MAX && got.state_count <= WK_STATES_MAX);
            wk_manifest_release(&got);
        } else {
            refused++;
        }
        memcpy(bytes + 16, sums, 8);
        bytes[at] = before;
    }
    CU_ASSERT(refused > 20);
    CU_ASSERT_EQUAL(wk_manifest_decode(bytes, size, &got, &err), DL_OK);
    CU_ASSERT_EQUAL(got.step, 77);
    CU_ASSERT_STRING_EQUAL(got.uid, "peer-1");
    wk_manifest_release(&got);
    wk_manifest_release(&manifest);
    free(bytes);
    rig_peer_release(&a);
}

UNIT_MAIN("peers", {"state and fragments are taken over (J3, J6)", test_state_and_fragments_are_taken_over},
          {"no peer means the syncer at once", test_no_peer_means_the_syncer_at_once},
          {"what differs comes from the syncer (J6)", test_what_differs_comes_from_the_syncer},
          {"a newer version wins", test_a_newer_version_wins}, {"J3 a peer is asked first", test_a_peer_is_asked_first},
          {"without peers nothing is waited for", test_without_peers_nothing_is_waited_for},
          {"J3 states before fragments", test_nothing_is_asked_for_before_the_states_are_here},
          {"other optimiser state is left alone", test_other_optimiser_state_is_left_alone},
          {"a broken connection is resumed by byte range (J4)", test_a_broken_connection_is_resumed_by_byte_range},
          {"a peer that dies in its state is replaced", test_a_peer_that_dies_in_its_state_is_replaced},
          {"a peer that dies in a fragment is replaced at the byte (J4)",
           test_a_peer_that_dies_in_a_fragment_is_replaced_at_the_byte},
          {"a stalled peer is given up (J4)", test_a_stalled_peer_is_given_up},
          {"damaged bytes are never taken", test_damaged_bytes_are_never_taken},
          {"half a state becomes zeros", test_half_a_state_becomes_zeros},
          {"a busy peer is not waited for", test_a_busy_peer_is_not_waited_for},
          {"a wrong token is refused", test_a_wrong_token_is_refused},
          {"hostile answers are refused (S5)", test_hostile_answers_are_refused}, {"requests", test_requests},
          {"ranges", test_ranges}, {"a crowd", test_a_crowd}, {"addresses", test_addresses},
          {"manifests are checked (S5)", test_manifests_are_checked})
