/* op_reflector: lists in pages, watches, and what goes wrong with both (the traps that other clients fell into). */
#include "operator/kube/lines.h"
#include "operator/kube/reflector.h"
#include "operator/kube/slice.h"
#include "tests/unit/kube_rig.h"

/* A user of a reflector: keeps for each object what it says of `n`. */
struct follower {
    struct op_map seen; /* "space/name" -> n + 1. */
    int changed, gone, synced, failed;
    char last_error[DL_ERR_TEXT_MAX];
    char last_text[4096];
    struct op_reflector *reflector;
    int free_at; /* Frees the reflector at this many changes. */
};

static uint64_t n_of(const struct op_object *object)
{
    const cJSON *spec = cJSON_GetObjectItemCaseSensitive(object->json, "spec");
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(spec, "n"));
    return text != NULL ? strtoull(text, NULL, 10) : 0;
}

static void on_changed(void *context, const struct op_object *object)
{
    struct follower *follower = context;
    char key[600];
    snprintf(key, sizeof key, "%s/%s", object->space, object->name);
    CU_ASSERT(object->uid[0] != 0 && object->resource_version[0] != 0);
    CU_ASSERT(object->text[0] == '{' && object->text[object->size - 1] == '}');
    snprintf(follower->last_text, sizeof follower->last_text, "%.*s", (int)object->size, object->text);
    enum dl_rc rc = op_map_put(&follower->seen, key, (void *)(uintptr_t)(n_of(object) + 1), NULL);
    CU_ASSERT_EQUAL(rc, DL_OK);
    if (++follower->changed == follower->free_at) {
        op_reflector_free(follower->reflector);
        follower->reflector = NULL;
    }
}

static void on_gone(void *context, const char *space, const char *name)
{
    struct follower *follower = context;
    char key[600];
    snprintf(key, sizeof key, "%s/%s", space, name);
    CU_ASSERT_PTR_NOT_NULL(op_map_remove(&follower->seen, key));
    follower->gone++;
}

static void on_synced(void *context)
{
    ((struct follower *)context)->synced++;
}

static void on_failed(void *context, const struct dl_err *err)
{
    struct follower *follower = context;
    follower->failed++;
    snprintf(follower->last_error, sizeof follower->last_error, "%s", err->text);
}

static struct op_reflector_options follow_options(struct follower *follower)
{
    return (struct op_reflector_options){
        .resource = &op_res_pods,
        .context = follower,
        .changed = on_changed,
        .gone = on_gone,
        .synced = on_synced,
        .failed = on_failed,
        .idle_ms = 5000,
        .backoff_first_ms = 2,
        .backoff_max_ms = 20,
        .page = 7,
    };
}

static void follow(struct rig *rig, struct follower *follower)
{
    struct op_reflector_options options = follow_options(follower);
    CU_ASSERT_EQUAL_FATAL(op_reflector_new(rig->client, &options, &follower->reflector, NULL), DL_OK);
}

static void unfollow(struct follower *follower)
{
    op_reflector_free(follower->reflector);
    op_map_release(&follower->seen);
}

static uint64_t seen(const struct follower *follower, const char *key)
{
    return (uint64_t)(uintptr_t)op_map_get(&follower->seen, key);
}

static void put_pod(struct rig *rig, int number, int n)
{
    char path[128], text[256];
    snprintf(path, sizeof path, "/api/v1/namespaces/a/pods/p%d", number);
    snprintf(text, sizeof text, "{\"kind\":\"Pod\",\"metadata\":{\"labels\":{\"app\":\"x\"}},\"spec\":{\"n\":%d}}", n);
    fake_api_put(rig->api, path, text);
}

static void remove_pod(struct rig *rig, int number)
{
    char path[128];
    snprintf(path, sizeof path, "/api/v1/namespaces/a/pods/p%d", number);
    CU_ASSERT_TRUE(fake_api_remove(rig->api, path));
}

/* The watch has begun. */
static bool is_watching(struct rig *rig, size_t watches)
{
    return RIG_UNTIL(rig, fake_api_requests(rig->api, "GET", "watch=true") >= watches);
}

static void test_list_then_watch(void)
{
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    for (int i = 0; i < 23; i++) {
        put_pod(&rig, i, i);
    }
    follow(&rig, &follower);
    CU_ASSERT_FALSE(op_reflector_is_synced(follower.reflector));
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, follower.synced == 1));
    CU_ASSERT_EQUAL(follower.changed, 23);
    CU_ASSERT_EQUAL(fake_api_requests(rig.api, "GET", "limit=7"), 4); /* Pages of 7. */
    CU_ASSERT_EQUAL(op_reflector_count(follower.reflector), 23);
    CU_ASSERT_TRUE(is_watching(&rig, 1));
    CU_ASSERT_EQUAL(fake_api_requests(rig.api, "GET", "allowWatchBookmarks=true&timeoutSeconds="), 1);
    put_pod(&rig, 3, 100);
    put_pod(&rig, 50, 50);
    remove_pod(&rig, 4);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, follower.gone == 1));
    CU_ASSERT_EQUAL(seen(&follower, "a/p3"), 101);
    CU_ASSERT_EQUAL(seen(&follower, "a/p50"), 51);
    CU_ASSERT_EQUAL(seen(&follower, "a/p4"), 0);
    CU_ASSERT_EQUAL(follower.changed, 25);
    CU_ASSERT_EQUAL(follower.failed, 0);
    unfollow(&follower);
    rig_stop(&rig);
}

/* Numbers beyond 2^53 and fields that nobody knows reach the user as they were sent. */
static void test_text_is_exact(void)
{
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    follow(&rig, &follower);
    CU_ASSERT_TRUE(is_watching(&rig, 1));
    static const char body[] =
        "{\"kind\":\"List\",\"items\":[{\"metadata\":{\"name\":\"big\",\"namespace\":\"a\",\"uid\":\"u\","
        "\"resourceVersion\":\"7\"},\"spec\":{\"n\":9007199254740993,\"odd\\\"]}\":[{\"}\":\"\\\\\"}]}}],"
        "\"metadata\":{\"resourceVersion\":\"5\"}}";
    fake_api_fault(rig.api, (struct fake_fault){.part = "limit=", .kind = FAKE_RAW, .message = body});
    fake_api_expire(rig.api);
    fake_api_cut_watches(rig.api);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, follower.changed == 1));
    CU_ASSERT_EQUAL(seen(&follower, "a/big"), UINT64_C(9007199254740994));
    CU_ASSERT_PTR_NOT_NULL(strstr(follower.last_text, "\"odd\\\"]}\":[{\"}\":\"\\\\\"}]"));
    unfollow(&follower);
    rig_stop(&rig);
}

/* A watch that the server ends is resumed from the last version: nothing is told twice, nothing is lost, nothing is listed. */
static void test_resume(void)
{
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    put_pod(&rig, 1, 1);
    follow(&rig, &follower);
    for (size_t i = 1; i <= 20; i++) {
        CU_ASSERT_TRUE(is_watching(&rig, i));
        put_pod(&rig, 1, (int)i * 10);
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, seen(&follower, "a/p1") == i * 10 + 1));
        fake_api_cut_watches(rig.api);
        put_pod(&rig, 2, (int)i); /* While nobody watches. */
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, seen(&follower, "a/p2") == i + 1));
    }
    CU_ASSERT_EQUAL(follower.changed, 41);
    CU_ASSERT_EQUAL(op_reflector_stats(follower.reflector).lists, 1);
    unfollow(&follower);
    rig_stop(&rig);
}

/* A bookmark moves the point to resume from, so that a quiet resource does not expire. */
static void test_bookmarks(void)
{
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    follow(&rig, &follower);
    CU_ASSERT_TRUE(is_watching(&rig, 1));
    fake_api_expire(rig.api); /* From here the version of the list is too old. */
    fake_api_bookmark(rig.api);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, op_reflector_stats(follower.reflector).bookmarks == 1));
    fake_api_cut_watches(rig.api);
    CU_ASSERT_TRUE(is_watching(&rig, 2));
    put_pod(&rig, 1, 5);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, seen(&follower, "a/p1") == 6));
    CU_ASSERT_EQUAL(op_reflector_stats(follower.reflector).lists, 1);
    CU_ASSERT_EQUAL(op_reflector_stats(follower.reflector).expired, 0);
    unfollow(&follower);
    rig_stop(&rig);
}

/* 410, as an event within the stream and as an answer: list again; what vanished meanwhile is told as gone. */
static void test_expired(void)
{
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    put_pod(&rig, 1, 1);
    put_pod(&rig, 2, 2);
    put_pod(&rig, 3, 3);
    follow(&rig, &follower);
    CU_ASSERT_TRUE(is_watching(&rig, 1));
    fake_api_fault(rig.api, (struct fake_fault){.part = "watch=true", .status = 503, .times = -1});
    fake_api_cut_watches(rig.api);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, follower.failed > 0));
    remove_pod(&rig, 2);
    put_pod(&rig, 3, 33);
    fake_api_expire(rig.api);
    fake_api_clear_faults(rig.api);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, follower.synced == 2));
    CU_ASSERT_EQUAL(follower.gone, 1);
    CU_ASSERT_EQUAL(seen(&follower, "a/p2"), 0);
    CU_ASSERT_EQUAL(seen(&follower, "a/p3"), 34);
    CU_ASSERT_EQUAL(follower.changed, 4); /* p1 did not change: it is not told again. */
    CU_ASSERT_EQUAL(op_reflector_stats(follower.reflector).expired, 1);

    fake_api_fault(rig.api, (struct fake_fault){.part = "watch=true", .status = 410, .reason = "Expired"});
    fake_api_cut_watches(rig.api);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, follower.synced == 3));
    CU_ASSERT_EQUAL(op_reflector_stats(follower.reflector).expired, 2);
    /* A list whose pages expire half way begins again. */
    for (int i = 10; i < 30; i++) {
        put_pod(&rig, i, i);
    }
    fake_api_fault(rig.api, (struct fake_fault){.part = "continue=", .status = 410, .reason = "Expired"});
    fake_api_expire(rig.api);
    fake_api_cut_watches(rig.api);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, op_reflector_count(follower.reflector) == 22 && follower.synced >= 4));
    unfollow(&follower);
    rig_stop(&rig);
}

static bool silent_hook(void *context, struct fake_conn *conn, const struct fake_request *request)
{
    int *left = context;
    if (strstr(request->query, "watch=true") == NULL || *left == 0) {
        return false;
    }
    (*left)--;
    const char *head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    fake_conn_write(conn, head, strlen(head));
    struct fake_fault stall = {.kind = FAKE_STALL};
    return !fake_play_fault(conn, &stall); /* Never a byte, never an end. */
}

/* A half-open connection: the server is silent and does not close. Both bounds are ours. */
static void test_half_open(void)
{
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    int left = 2;
    rig.api->hook = silent_hook;
    rig.api->hook_context = &left;
    struct op_reflector_options options = follow_options(&follower);
    options.idle_ms = 150;
    CU_ASSERT_EQUAL_FATAL(op_reflector_new(rig.client, &options, &follower.reflector, NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, op_reflector_stats(follower.reflector).idle_breaks == 2));
    put_pod(&rig, 1, 1);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, seen(&follower, "a/p1") == 2));
    CU_ASSERT_EQUAL(op_reflector_stats(follower.reflector).lists, 1); /* Resumed, not listed. */
    CU_ASSERT_PTR_NOT_NULL(strstr(follower.last_error, "silent"));
    unfollow(&follower);
    rig_stop(&rig);
}

/* Ends watches until all faults have struck. */
static bool faults_are_over(struct rig *rig)
{
    bool is_over = true;
    pthread_mutex_lock(&rig->api->lock);
    for (size_t i = 0; i < FAKE_API_FAULTS_MAX; i++) {
        is_over = is_over && rig->api->faults[i].times == 0;
    }
    pthread_mutex_unlock(&rig->api->lock);
    if (!is_over) {
        fake_api_cut_watches(rig->api);
    }
    return is_over;
}

/* The API server is down, slow, overloaded, refuses us, or breaks off: keep going, lose nothing, say so. */
static void test_bad_weather(void)
{
    static const struct fake_fault faults[] = {
        {.status = 429, .reason = "TooManyRequests", .times = 2},
        {.status = 500, .reason = "InternalError", .times = 2},
        {.status = 503, .reason = "ServiceUnavailable", .times = 2},
        {.status = 504, .reason = "Timeout", .times = 2},
        {.status = 401, .reason = "Unauthorized", .times = 3},
        {.status = 403, .reason = "Forbidden", .times = 2},
        {.status = 404, .reason = "NotFound", .times = 2},
        {.kind = FAKE_CLOSE, .times = 3},
        {.kind = FAKE_SHORT, .times = 2},
        {.kind = FAKE_RAW, .message = "", .times = 2},
        {.kind = FAKE_RAW, .message = "not json at all", .times = 2},
        {.kind = FAKE_RAW,
         .message = "{\"items\":[{\"metadata\":{}}],\"metadata\":{\"resourceVersion\":\"1\"}}",
         .times = 2},
        {.kind = FAKE_RAW,
         .message = "{\"metadata\":{\"resourceVersion\":\"1\"},\"items\":[{\"metadata\":{\"name\":\"x\"",
         .times = 2},
    };
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    for (int i = 0; i < 10; i++) {
        put_pod(&rig, i, 0);
    }
    follow(&rig, &follower);
    CU_ASSERT_TRUE(is_watching(&rig, 1));
    for (size_t i = 0; i < DL_COUNT_OF(faults); i++) {
        for (int of_lists = 0; of_lists < 2; of_lists++) {
            struct fake_fault fault = faults[i];
            fault.part = of_lists ? "limit=" : "watch=true";
            fake_api_fault(rig.api, fault);
            if (of_lists) {
                fake_api_expire(rig.api);
            }
            put_pod(&rig, (int)i % 10, 1000 + (int)i * 2 + of_lists);
            fake_api_cut_watches(rig.api);
            char key[16];
            snprintf(key, sizeof key, "a/p%d", (int)i % 10);
            CU_ASSERT_TRUE(RIG_UNTIL(&rig, seen(&follower, key) == 1001 + i * 2 + (uint64_t)of_lists));
            CU_ASSERT_TRUE(of_lists || RIG_UNTIL(&rig, faults_are_over(&rig)));
            fake_api_clear_faults(rig.api);
        }
    }
    CU_ASSERT(follower.failed >= (int)DL_COUNT_OF(faults));
    CU_ASSERT_EQUAL(op_reflector_count(follower.reflector), 10);
    CU_ASSERT_EQUAL(follower.gone, 0);
    unfollow(&follower);
    rig_stop(&rig);
}

/* Lines that make no sense within a stream. */
static void test_broken_streams(void)
{
    static const char *const streams[] = {
        "{\"type\":\"ADDED\"}\n",
        "nonsense\n",
        "{\"type\":\"ADDED\",\"object\":{\"metadata\":{}}}\n",
        "{\"type\":\"MODIFIED\",\"object\":{\"metadata\":{\"name\":\"x\"\n",
        "{\"type\":\"ERROR\",\"object\":{\"code\":500}}\n",
        "{\"type\":\"ERROR\",\"object\":{\"code\":410}}\n",
        "{\"type\":\"ERROR\",\"object\":7}\n",
        "{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"name\":\"half\"",
    };
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    put_pod(&rig, 1, 0);
    follow(&rig, &follower);
    CU_ASSERT_TRUE(is_watching(&rig, 1));
    for (size_t i = 0; i < DL_COUNT_OF(streams); i++) {
        fake_api_fault(rig.api, (struct fake_fault){.part = "watch=true", .kind = FAKE_RAW, .message = streams[i]});
        fake_api_cut_watches(rig.api);
        put_pod(&rig, 1, (int)i + 1);
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, seen(&follower, "a/p1") == i + 2));
    }
    CU_ASSERT_EQUAL(op_reflector_count(follower.reflector), 1);
    unfollow(&follower);
    rig_stop(&rig);
}

static void test_free_within_callback(void)
{
    for (int where = 0; where < 2; where++) {
        struct rig rig;
        struct follower follower = {.free_at = 3};
        rig_start(&rig);
        for (int i = 0; i < (where == 0 ? 10 : 2); i++) {
            put_pod(&rig, i, i);
        }
        follow(&rig, &follower);
        if (where == 1) { /* Within the stream. */
            CU_ASSERT_TRUE(is_watching(&rig, 1));
            for (int i = 5; i < 9; i++) {
                put_pod(&rig, i, i);
            }
        }
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, follower.reflector == NULL));
        for (int i = 0; i < 5; i++) {
            op_loop_turn(rig.loop, 5);
        }
        CU_ASSERT_EQUAL(follower.changed, 3);
        unfollow(&follower);
        rig_stop(&rig);
    }
}

/* Selectors and namespaces reach the server. */
static void test_selectors(void)
{
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    put_pod(&rig, 1, 1);
    fake_api_put(rig.api, "/api/v1/namespaces/b/pods/other", "{\"metadata\":{\"labels\":{\"app\":\"x\"}}}");
    fake_api_put(rig.api, "/api/v1/namespaces/a/pods/unlabelled", "{\"metadata\":{}}");
    struct op_reflector_options options = follow_options(&follower);
    options.space = "a";
    options.label_selector = "app=x";
    CU_ASSERT_EQUAL_FATAL(op_reflector_new(rig.client, &options, &follower.reflector, NULL), DL_OK);
    CU_ASSERT_TRUE(is_watching(&rig, 1));
    CU_ASSERT_EQUAL(op_reflector_count(follower.reflector), 1);
    fake_api_put(rig.api, "/api/v1/namespaces/b/pods/third", "{\"metadata\":{\"labels\":{\"app\":\"x\"}}}");
    put_pod(&rig, 2, 2);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, seen(&follower, "a/p2") == 3));
    CU_ASSERT_EQUAL(op_reflector_count(follower.reflector), 2);
    CU_ASSERT_EQUAL(fake_api_requests(rig.api, "GET", "labelSelector=app%3Dx"), 2);
    unfollow(&follower);
    rig_stop(&rig);
}

/* Many events through one watch: all are told, the heap stays where it was. (A million of them: bench/watch.) */
static void test_many_events(void)
{
    enum { COUNT = 20000, PODS = 10 };
    struct rig rig;
    struct follower follower = {.changed = 0};
    rig_start(&rig);
    for (int i = 0; i < PODS; i++) {
        put_pod(&rig, i, 0);
    }
    follow(&rig, &follower);
    CU_ASSERT_TRUE(is_watching(&rig, 1));
    for (int i = 0; i < COUNT; i++) {
        put_pod(&rig, i % PODS, i + 1);
    }
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, seen(&follower, "a/p9") == COUNT + 1));
    CU_ASSERT_EQUAL(op_reflector_stats(follower.reflector).events, COUNT);
    CU_ASSERT_EQUAL(op_reflector_stats(follower.reflector).watches, 1);
    unfollow(&follower);
    rig_stop(&rig);
}

/* --- the splitter --- */

struct lines_seen {
    struct dl_buf text; /* Lines joined by '|'. */
};

static bool take_line(void *context, const char *line, size_t size)
{
    struct lines_seen *seen_lines = context;
    dl_buf_append(&seen_lines->text, line, size);
    dl_buf_append(&seen_lines->text, "|", 1);
    return true;
}

static const char stream[] = "{\"a\":1}\n\n{\"b\":\"two\"}\r\n{}\nlast one\n\r\nbegun";
static const char stream_lines[] = "{\"a\":1}|{\"b\":\"two\"}|{}|last one|";

static void test_lines_at_every_split(void)
{
    size_t size = sizeof stream - 1;
    for (size_t first = 0; first <= size; first++) {
        for (size_t second = first; second <= size; second++) {
            struct op_lines lines;
            struct lines_seen seen_lines;
            const size_t ends[] = {first, second, size};
            op_lines_init(&lines, 64);
            dl_buf_init(&seen_lines.text, 4096);
            for (size_t i = 0, at = 0; i < 3; at = ends[i++]) {
                enum dl_rc rc = op_lines_feed(&lines, stream + at, ends[i] - at, take_line, &seen_lines, NULL);
                CU_ASSERT_EQUAL(rc, DL_OK);
            }
            CU_ASSERT_STRING_EQUAL(seen_lines.text.data, stream_lines);
            CU_ASSERT_EQUAL(lines.part.size, 5);
            op_lines_release(&lines);
            dl_buf_release(&seen_lines.text);
        }
    }
}

static void test_lines_maximum(void)
{
    struct op_lines lines;
    struct lines_seen seen_lines;
    struct dl_err err;
    for (size_t piece = 1; piece <= 20; piece++) {
        op_lines_init(&lines, 8);
        dl_buf_init(&seen_lines.text, 4096);
        CU_ASSERT_EQUAL(op_lines_feed(&lines, "12345678\n", 9, take_line, &seen_lines, &err), DL_OK);
        enum dl_rc rc = DL_OK;
        const char *text = "123456789\nxxxxxxxxxx";
        for (size_t at = 0; at < 20 && rc == DL_OK; at += piece) {
            rc = op_lines_feed(&lines, text + at, DL_MIN(piece, 20 - at), take_line, &seen_lines, &err);
        }
        CU_ASSERT_EQUAL(rc, DL_EPROTO);
        CU_ASSERT_STRING_EQUAL(seen_lines.text.data, "12345678|");
        op_lines_clear(&lines);
        CU_ASSERT_EQUAL(op_lines_feed(&lines, "ok\n", 3, take_line, &seen_lines, &err), DL_OK);
        op_lines_release(&lines);
        dl_buf_release(&seen_lines.text);
    }
}

/* --- slices --- */

static void test_slices(void)
{
    static const char text[] = " {\"a\" : [1, {\"x\":\"]}\\\"\"} ,\"two\", [] ] , \"b\":{\"c\":null},\"d\":-1.5e3}";
    struct op_slice whole = {text, sizeof text - 1}, value, element;
    CU_ASSERT_TRUE(op_slice_member(whole, "b", &value));
    CU_ASSERT_EQUAL(value.size, 10);
    CU_ASSERT_TRUE(op_slice_member(whole, "d", &value));
    CU_ASSERT_EQUAL(strncmp(value.text, "-1.5e3", value.size), 0);
    CU_ASSERT_FALSE(op_slice_member(whole, "c", &value)); /* Not directly within. */
    CU_ASSERT_TRUE(op_slice_member(whole, "a", &value));
    size_t place = 0, count = 0;
    bool is_broken = false;
    while (op_slice_next(value, &place, &element, &is_broken)) {
        count++;
        if (count == 3) {
            CU_ASSERT_TRUE(op_slice_is_text(element, "two"));
        }
    }
    CU_ASSERT_EQUAL(count, 4);
    CU_ASSERT_FALSE(is_broken);
    const size_t array_end = (size_t)(strstr(text, "] ,") - text) + 1;
    /* Cut anywhere, it is never read beyond its end, and never taken for whole. */
    for (size_t size = 0; size < sizeof text - 1; size++) {
        char *cut = malloc(size > 0 ? size : 1);
        memcpy(cut, text, size);
        struct op_slice part = {cut, size};
        if (op_slice_member(part, "a", &value)) {
            place = 0;
            while (op_slice_next(value, &place, &element, &is_broken)) {
            }
            CU_ASSERT_FALSE(is_broken);
        }
        place = 0;
        struct op_slice array = {cut + DL_MIN(size, (size_t)8), size - DL_MIN(size, (size_t)8)};
        while (op_slice_next(array, &place, &element, &is_broken)) {
        }
        CU_ASSERT_EQUAL(is_broken, size < array_end);
        free(cut);
    }
}

UNIT_MAIN("kube_watch", {"list then watch", test_list_then_watch}, {"text is exact", test_text_is_exact},
          {"resume", test_resume}, {"bookmarks", test_bookmarks}, {"410", test_expired},
          {"half-open connection", test_half_open}, {"bad weather", test_bad_weather},
          {"broken streams", test_broken_streams}, {"free within a callback", test_free_within_callback},
          {"selectors", test_selectors}, {"many events", test_many_events},
          {"lines at every split", test_lines_at_every_split}, {"longest line", test_lines_maximum},
          {"slices", test_slices})
