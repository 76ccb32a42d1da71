#include "operator/kube/reflector.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/mem.h"
#include "common/rng.h"
#include "operator/kube/lines.h"
#include "operator/kube/map.h"
#include "operator/kube/slice.h"
#include "operator/reconcile/json.h"

#define BACKOFF_FIRST_MS 500
#define LIST_TIMEOUT_MS 60000
#define WATCH_GRACE_MS 30000 /* Beyond timeoutSeconds. */
#define VANISHED_AT_ONCE 512
#define SHORT_WATCH_NS (5 * DL_NS_PER_SECOND)

/* What is known of an object fits a pointer: a fingerprint of uid and resourceVersion, the list that saw it last, and a
 * bit that keeps it from being NULL. */
#define GENERATION_BITS 16
#define GENERATION_MASK ((uint64_t)0xffff)

enum stop_reason {
    STOP_NONE,
    STOP_EXPIRED, /* List again. */
    STOP_BROKEN,  /* The stream makes no sense: list again after a pause. */
    STOP_PAUSE,   /* The server asks for patience: resume after a pause. */
};

struct op_reflector {
    struct op_client *client;
    struct op_reflector_options options;
    char *space, *label_selector, *field_selector;
    struct op_map known; /* "space/name" -> fingerprint. */
    uint64_t generation; /* Of the list under way, or the last one. */
    char *resource_version;
    char *continue_token; /* NULL: the first page is next. */
    bool wants_list, is_synced;
    bool was_freed; /* Within a callback: the outermost frame frees. */
    int calls;      /* Frames of ours on the stack that call back. */
    uint64_t request;
    struct op_timer next; /* Next list or watch. */
    struct op_lines lines;
    enum stop_reason stop;
    char stop_text[256];
    int64_t watch_started_ns;
    uint32_t failures;
    struct dl_rng rng;
    struct op_reflector_stats stats;
};

static void destroy(struct op_reflector *reflector)
{
    op_map_release(&reflector->known);
    op_lines_release(&reflector->lines);
    free(reflector->resource_version);
    free(reflector->continue_token);
    free(reflector->space);
    free(reflector->label_selector);
    free(reflector->field_selector);
    free(reflector);
}

static void enter(struct op_reflector *reflector)
{
    reflector->calls++;
}

/* False when the user freed it meanwhile: nothing of it may be touched any more. */
static bool leave(struct op_reflector *reflector)
{
    if (--reflector->calls == 0 && reflector->was_freed) {
        destroy(reflector);
        return false;
    }
    return true;
}

void op_reflector_free(struct op_reflector *reflector)
{
    if (reflector == NULL || reflector->was_freed) {
        return;
    }
    op_client_cancel(reflector->client, reflector->request);
    op_timer_stop(op_client_loop(reflector->client), &reflector->next);
    reflector->request = 0;
    reflector->was_freed = true;
    if (reflector->calls == 0) {
        destroy(reflector);
    }
}

static void schedule(struct op_reflector *reflector, int64_t wait_ns)
{
    struct op_loop *loop = op_client_loop(reflector->client);
    op_timer_start(loop, &reflector->next, op_loop_now_ns(loop) + wait_ns);
}

/* Doubles with every failure in a row; anywhere between a half and the whole of that. */
static int64_t backoff_ns(struct op_reflector *reflector)
{
    int64_t first_ms = reflector->options.backoff_first_ms, max_ms = reflector->options.backoff_max_ms;
    int64_t wait_ns = DL_MIN(first_ms << DL_MIN(reflector->failures, 16u), max_ms) * DL_NS_PER_MS;
    reflector->failures += reflector->failures < UINT32_MAX;
    return wait_ns / 2 + (int64_t)dl_rng_below(&reflector->rng, (uint64_t)wait_ns / 2 + 1);
}

static void report(struct op_reflector *reflector, const struct dl_err *err)
{
    reflector->stats.failures++;
    if (reflector->options.failed != NULL) {
        reflector->options.failed(reflector->options.context, err);
    }
}

/* --- objects --- */

static bool remember(struct op_reflector *reflector, const char *key, const struct op_object *object, bool *is_news)
{
    uint64_t print = dl_hash64(object->uid, strlen(object->uid), 0);
    print = dl_hash64(object->resource_version, strlen(object->resource_version), print);
    uint64_t value = print << (GENERATION_BITS + 1) | (reflector->generation & GENERATION_MASK) << 1 | 1;
    uint64_t before = (uint64_t)(uintptr_t)op_map_get(&reflector->known, key);
    *is_news = before == 0 || before >> (GENERATION_BITS + 1) != value >> (GENERATION_BITS + 1);
    return op_map_put(&reflector->known, key, (void *)(uintptr_t)value, NULL) == DL_OK;
}

static bool make_key(const char *space, const char *name, char key[static 2 * OP_NAME_MAX + 2])
{
    int size = snprintf(key, 2 * OP_NAME_MAX + 2, "%s/%s", space, name);
    return name[0] != 0 && size > 0 && size < 2 * OP_NAME_MAX + 2;
}

/* One object of a list or an event. False: it makes no sense, `stop_text` says why. */
static bool take_object(struct op_reflector *reflector, struct op_slice slice, bool is_gone)
{
    cJSON *json = NULL;
    struct dl_err err;
    if (op_json_parse(slice.text, slice.size, &json, &err) != DL_OK) {
        snprintf(reflector->stop_text, sizeof reflector->stop_text, "%.200s", err.text);
        return false;
    }
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(json, "metadata");
    struct op_object object = {
        .space = op_json_text(metadata, "namespace", ""),
        .name = op_json_text(metadata, "name", ""),
        .uid = op_json_text(metadata, "uid", ""),
        .resource_version = op_json_text(metadata, "resourceVersion", ""),
        .text = slice.text,
        .size = slice.size,
        .json = json,
    };
    char key[2 * OP_NAME_MAX + 2];
    bool is_news = false, is_taken = make_key(object.space, object.name, key);
    if (!is_taken) {
        snprintf(reflector->stop_text, sizeof reflector->stop_text, "an object without a name");
    } else if (is_gone) {
        if (op_map_remove(&reflector->known, key) != NULL) {
            reflector->options.gone(reflector->options.context, object.space, object.name);
        }
    } else if (!remember(reflector, key, &object, &is_news)) {
        is_taken = false;
        snprintf(reflector->stop_text, sizeof reflector->stop_text, "no memory for %.200s", key);
    } else if (is_news) {
        reflector->options.changed(reflector->options.context, &object);
    }
    cJSON_Delete(json);
    return is_taken;
}

/* False without memory: the old one stands. */
static bool set_version(struct op_reflector *reflector, const char *version)
{
    if (version[0] != 0 && (reflector->resource_version == NULL || strcmp(reflector->resource_version, version) != 0)) {
        char *copy = strdup(version);
        if (copy == NULL) {
            return false;
        }
        free(reflector->resource_version);
        reflector->resource_version = copy;
    }
    return true;
}

/* --- list --- */

/* Copies of up to `max` keys that this list did not show; false without memory. */
static bool collect_vanished(const struct op_reflector *reflector, char **keys, size_t max, size_t *count)
{
    size_t place = 0;
    const char *key;
    void *value;
    *count = 0;
    while (*count < max && op_map_next(&reflector->known, &place, &key, &value)) {
        if (((uint64_t)(uintptr_t)value >> 1 & GENERATION_MASK) != (reflector->generation & GENERATION_MASK)) {
            if ((keys[*count] = strdup(key)) == NULL) {
                return false;
            }
            (*count)++;
        }
    }
    return true;
}

/* Tells of all that this list did not show; false without memory: the list is not complete then. */
static bool drop_vanished(struct op_reflector *reflector)
{
    char *keys[VANISHED_AT_ONCE];
    size_t count;
    bool is_complete;
    do {
        is_complete = collect_vanished(reflector, keys, DL_COUNT_OF(keys), &count);
        for (size_t i = 0; i < count; i++) {
            op_map_remove(&reflector->known, keys[i]);
            char *name = strchr(keys[i], '/');
            *name = 0;
            if (!reflector->was_freed) {
                reflector->options.gone(reflector->options.context, keys[i], name + 1);
            }
            free(keys[i]);
        }
    } while (is_complete && count == DL_COUNT_OF(keys) && !reflector->was_freed);
    return is_complete;
}

static bool take_page(struct op_reflector *reflector, const struct op_result *result)
{
    struct op_slice body = {result->body, result->size}, metadata, items, item;
    bool is_broken = true;
    size_t place = 0;
    snprintf(reflector->stop_text, sizeof reflector->stop_text, "the list is not one");
    if (!op_slice_member(body, "metadata", &metadata)) {
        return false;
    }
    cJSON *json = NULL;
    if (op_json_parse(metadata.text, metadata.size, &json, NULL) != DL_OK) {
        return false;
    }
    DL_AUTO_FREE char *version = strdup(op_json_text(json, "resourceVersion", ""));
    const char *more = op_json_text(json, "continue", "");
    bool is_first = reflector->continue_token == NULL;
    free(reflector->continue_token);
    reflector->continue_token = more[0] != 0 ? strdup(more) : NULL;
    bool has_token = more[0] == 0 || reflector->continue_token != NULL; /* Else the list would seem to end here. */
    cJSON_Delete(json);
    if (!op_slice_member(body, "items", &items) || version == NULL || !has_token) {
        return false;
    }
    if (items.size == 4 && memcmp(items.text, "null", 4) == 0) {
        is_broken = false;
    } else {
        while (!reflector->was_freed && op_slice_next(items, &place, &item, &is_broken)) {
            if (!take_object(reflector, item, false)) {
                return false;
            }
        }
    }
    /* The watch begins where the first page was: what changed while others were read comes again. */
    return !is_broken && (reflector->was_freed || !is_first || set_version(reflector, version));
}

static bool end_list(struct op_reflector *reflector)
{
    if (!drop_vanished(reflector)) {
        snprintf(reflector->stop_text, sizeof reflector->stop_text, "no memory");
        return false;
    }
    if (reflector->was_freed) {
        return true;
    }
    reflector->wants_list = false;
    reflector->is_synced = true;
    reflector->failures = 0;
    malloc_trim(0); /* Pages of a large list are given back. */
    if (reflector->options.synced != NULL) {
        reflector->options.synced(reflector->options.context);
    }
    return true;
}

static void on_list(void *context, const struct op_result *result)
{
    struct op_reflector *reflector = context;
    reflector->request = 0;
    enter(reflector);
    int64_t wait_ns = 0;
    bool is_taken = result->rc == DL_OK && take_page(reflector, result);
    if (is_taken && !reflector->was_freed && reflector->continue_token == NULL) {
        is_taken = end_list(reflector);
    }
    if (!is_taken && !reflector->was_freed) {
        struct dl_err err = result->err;
        if (result->rc == DL_OK) {
            dl_err_set(&err, DL_EPROTO, "list of %s: %s", reflector->options.resource->plural, reflector->stop_text);
        }
        /* A continue token that expired is no failure worth a pause the first time. */
        bool was_in_pages = reflector->continue_token != NULL;
        free(dl_take(reflector->continue_token));
        wait_ns = result->rc == DL_EGONE && was_in_pages && reflector->failures == 0 ? 0 : backoff_ns(reflector);
        wait_ns = DL_MAX(wait_ns, result->retry_after_ns);
        reflector->failures += wait_ns == 0;
        report(reflector, &err);
    }
    if (leave(reflector)) {
        schedule(reflector, wait_ns);
    }
}

static void put_selectors(const struct op_reflector *reflector, struct op_path *path)
{
    op_path_init(path);
    op_path_collection(path, reflector->options.resource, reflector->space);
    op_path_query(path, "labelSelector", reflector->label_selector);
    op_path_query(path, "fieldSelector", reflector->field_selector);
}

static enum dl_rc send_to(struct op_reflector *reflector, struct op_path *path, struct op_request *request,
                          struct dl_err *err)
{
    request->method = "GET";
    request->context = reflector;
    enum dl_rc rc = op_path_text(path, &request->path, err);
    if (rc == DL_OK) {
        rc = op_client_send(reflector->client, request, &reflector->request, err);
    }
    op_path_release(path);
    return rc;
}

static enum dl_rc send_list(struct op_reflector *reflector, struct dl_err *err)
{
    struct op_path path;
    char page[16];
    if (reflector->continue_token == NULL) {
        reflector->generation++;
        reflector->stats.lists++;
    }
    snprintf(page, sizeof page, "%u", reflector->options.page);
    put_selectors(reflector, &path);
    op_path_query(&path, "limit", page);
    op_path_query(&path, "continue", reflector->continue_token);
    struct op_request request = {.done = on_list, .timeout_ms = LIST_TIMEOUT_MS};
    return send_to(reflector, &path, &request, err);
}

/* --- watch --- */

static void stop_watch(struct op_reflector *reflector, enum stop_reason why, const char *text, size_t size)
{
    reflector->stop = why;
    snprintf(reflector->stop_text, sizeof reflector->stop_text, "%.*s",
             (int)DL_MIN(size, sizeof reflector->stop_text - 1), text);
}

static void take_error(struct op_reflector *reflector, struct op_slice object)
{
    cJSON *json = NULL;
    reflector->stop = STOP_BROKEN;
    if (op_json_parse(object.text, object.size, &json, NULL) == DL_OK) {
        uint32_t code = op_json_u32(json, "code", 0);
        bool is_expired = code == 410 || strcmp(op_json_text(json, "reason", ""), "Expired") == 0;
        reflector->stop = is_expired ? STOP_EXPIRED : code == 429 || code >= 500 ? STOP_PAUSE : STOP_BROKEN;
        cJSON_Delete(json);
    }
    stop_watch(reflector, reflector->stop, object.text, object.size);
}

/* The version that an object of the stream carries is where the watch resumes. */
static void move_version(struct op_reflector *reflector, struct op_slice object)
{
    struct op_slice metadata, version;
    char text[128];
    if (op_slice_member(object, "metadata", &metadata) && op_slice_member(metadata, "resourceVersion", &version) &&
        version.size > 2 && version.size < sizeof text && version.text[0] == '"') {
        snprintf(text, sizeof text, "%.*s", (int)version.size - 2, version.text + 1);
        (void)set_version(reflector, text); /* From an older one events come again, that is all. */
    }
}

static bool on_line(void *context, const char *line, size_t size)
{
    struct op_reflector *reflector = context;
    struct op_slice whole = {line, size}, type, object;
    if (!op_slice_member(whole, "type", &type) || !op_slice_member(whole, "object", &object)) {
        stop_watch(reflector, STOP_BROKEN, line, size);
        return false;
    }
    if (op_slice_is_text(type, "ERROR")) {
        take_error(reflector, object);
        return false;
    }
    if (op_slice_is_text(type, "BOOKMARK")) {
        reflector->stats.bookmarks++;
    } else {
        reflector->stats.events++;
        if (!take_object(reflector, object, op_slice_is_text(type, "DELETED"))) {
            reflector->stop = STOP_BROKEN;
            return false;
        }
        if (reflector->was_freed) {
            return false;
        }
    }
    reflector->failures = 0;
    move_version(reflector, object);
    return true;
}

static bool on_stream(void *context, const char *bytes, size_t size)
{
    struct op_reflector *reflector = context;
    struct dl_err err;
    enter(reflector);
    enum dl_rc rc = op_lines_feed(&reflector->lines, bytes, size, on_line, reflector, &err);
    if (rc != DL_OK && rc != DL_AGAIN && !reflector->was_freed) {
        stop_watch(reflector, STOP_BROKEN, err.text, strlen(err.text));
    }
    return leave(reflector) && rc == DL_OK;
}

/* What a watch's end means: the wait until the next try, and whether to list. */
static int64_t after_watch(struct op_reflector *reflector, const struct op_result *result)
{
    struct op_loop *loop = op_client_loop(reflector->client);
    struct dl_err err = result->err;
    const char *plural = reflector->options.resource->plural;
    bool was_short = op_loop_now_ns(loop) - reflector->watch_started_ns < SHORT_WATCH_NS;
    bool is_expired = reflector->stop == STOP_EXPIRED || (reflector->stop == STOP_NONE && result->rc == DL_EGONE);
    if (is_expired) {
        reflector->stats.expired++;
        reflector->wants_list = true;
        return was_short ? backoff_ns(reflector) : 0;
    }
    if (reflector->stop != STOP_NONE) {
        dl_err_set(&err, DL_EPROTO, "watch of %s: %s", plural, reflector->stop_text);
        reflector->wants_list = reflector->stop == STOP_BROKEN;
    } else if (result->rc == DL_OK) {
        return was_short ? backoff_ns(reflector) : 0; /* The server ends watches now and then. */
    } else if (result->rc == DL_ETIMEOUT && result->status == 0) {
        reflector->stats.idle_breaks++;
        if (!was_short) {
            return 0; /* Most likely a quiet resource of a server that sends no bookmarks: nobody should look away. */
        }
    } else if (result->rc == DL_ENOTFOUND || result->rc == DL_EINVAL || result->rc == DL_EDENIED) {
        reflector->wants_list = true;
    }
    report(reflector, &err);
    return reflector->was_freed ? 0 : DL_MAX(backoff_ns(reflector), result->retry_after_ns);
}

static void on_watch(void *context, const struct op_result *result)
{
    struct op_reflector *reflector = context;
    reflector->request = 0;
    op_lines_clear(&reflector->lines);
    enter(reflector);
    int64_t wait_ns = after_watch(reflector, result);
    if (leave(reflector)) {
        schedule(reflector, wait_ns);
    }
}

static enum dl_rc send_watch(struct op_reflector *reflector, struct dl_err *err)
{
    struct op_path path;
    char seconds[16];
    uint32_t span = OP_REFLECTOR_WATCH_SECONDS + (uint32_t)dl_rng_below(&reflector->rng, OP_REFLECTOR_WATCH_SECONDS);
    snprintf(seconds, sizeof seconds, "%u", span);
    put_selectors(reflector, &path);
    op_path_query(&path, "watch", "true");
    op_path_query(&path, "allowWatchBookmarks", "true");
    op_path_query(&path, "timeoutSeconds", seconds);
    op_path_query(&path, "resourceVersion", reflector->resource_version);
    reflector->stats.watches++;
    reflector->stop = STOP_NONE;
    reflector->watch_started_ns = op_loop_now_ns(op_client_loop(reflector->client));
    struct op_request request = {
        .done = on_watch,
        .stream = on_stream,
        .timeout_ms = (int64_t)span * 1000 + WATCH_GRACE_MS,
        .idle_ms = reflector->options.idle_ms,
    };
    return send_to(reflector, &path, &request, err);
}

static void go_on(struct op_reflector *reflector)
{
    struct dl_err err;
    enum dl_rc rc = reflector->wants_list ? send_list(reflector, &err) : send_watch(reflector, &err);
    if (rc != DL_OK) {
        enter(reflector);
        report(reflector, &err);
        if (leave(reflector)) {
            schedule(reflector, backoff_ns(reflector));
        }
    }
}

static void on_next(void *context, int64_t now_ns)
{
    (void)now_ns;
    go_on(context);
}

/* --- the reflector --- */

static bool copy_text(const char *text, char **out)
{
    *out = text != NULL ? strdup(text) : NULL;
    return text == NULL || *out != NULL;
}

enum dl_rc op_reflector_new(struct op_client *client, const struct op_reflector_options *options,
                            struct op_reflector **out, struct dl_err *err)
{
    struct op_reflector *reflector = calloc(1, sizeof *reflector);
    if (reflector == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to watch %s", options->resource->plural);
    }
    reflector->client = client;
    reflector->options = *options;
    reflector->wants_list = true;
    reflector->next = (struct op_timer){.fire = on_next, .context = reflector};
    struct op_reflector_options *own = &reflector->options;
    own->idle_ms = own->idle_ms > 0 ? own->idle_ms : OP_REFLECTOR_IDLE_MS;
    own->backoff_first_ms = own->backoff_first_ms > 0 ? own->backoff_first_ms : BACKOFF_FIRST_MS;
    own->backoff_max_ms = own->backoff_max_ms > 0 ? own->backoff_max_ms : OP_REFLECTOR_BACKOFF_MAX_MS;
    own->page = own->page > 0 ? own->page : OP_REFLECTOR_PAGE;
    op_lines_init(&reflector->lines, OP_REFLECTOR_LINE_MAX);
    dl_rng_init(&reflector->rng, (uint64_t)dl_wall_ns(), dl_rng_stream("reflector", (uint64_t)getpid(), 0));
    if (!copy_text(options->space, &reflector->space) ||
        !copy_text(options->label_selector, &reflector->label_selector) ||
        !copy_text(options->field_selector, &reflector->field_selector)) {
        destroy(reflector);
        return dl_err_set(err, DL_ENOMEM, "no memory to watch %s", options->resource->plural);
    }
    schedule(reflector, 0);
    *out = reflector;
    return DL_OK;
}

bool op_reflector_is_synced(const struct op_reflector *reflector)
{
    return reflector->is_synced;
}

size_t op_reflector_count(const struct op_reflector *reflector)
{
    return reflector->known.count;
}

struct op_reflector_stats op_reflector_stats(const struct op_reflector *reflector)
{
    return reflector->stats;
}

void op_reflector_metrics(struct op_reflector *const *reflectors, size_t count, struct dl_metrics *metrics)
{
    static const struct {
        const char *family, *type, *help;
    } rows[] = {
        {"reflector_lists_total", "counter", "Lists begun."},
        {"reflector_watches_total", "counter", "Watches begun."},
        {"diloco_watch_events_total", "counter", "Events received."},
        {"diloco_watch_failures_total", "counter", "Lists and watches that failed."},
        {"diloco_watched_objects", "gauge", "Objects known."},
    };
    for (size_t row = 0; row < DL_COUNT_OF(rows); row++) {
        dl_metrics_family(metrics, rows[row].family, rows[row].type, rows[row].help);
        for (size_t i = 0; i < count; i++) {
            const struct op_reflector *reflector = reflectors[i];
            const uint64_t values[] = {reflector->stats.lists, reflector->stats.watches, reflector->stats.events,
                                       reflector->stats.failures, reflector->known.count};
            dl_metrics_value(metrics, (double)values[row], "resource", reflector->options.resource->plural, "namespace",
                             reflector->space != NULL ? reflector->space : "", (char *)NULL);
        }
    }
}
