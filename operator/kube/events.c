#include "operator/kube/events.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/time_text.h"
#include "operator/kube/api.h"
#include "operator/kube/map.h"

#define NAME_MAX_PART 200 /* Of the object's name within an event's name. */

/* What was told about one thing, and repeats of it. */
struct series {
    TAILQ_ENTRY(series) all; /* In the order of their last event. */
    struct op_recorder *recorder;
    char *key, *space, *name;
    uint32_t count; /* Events in all. */
    uint32_t told;  /* Count that the server knows. */
    int64_t last_ns, last_wall_ns, sent_ns;
    bool is_sending, is_there; /* The server has the event. */
    struct op_timer flush;
    uint64_t request;
};

struct op_recorder {
    struct op_client *client;
    struct op_loop *loop;
    char *controller, *instance;
    struct op_map by_key;
    TAILQ_HEAD(series_list, series) all;
    uint32_t in_flight;
    uint64_t serial, sent, dropped;
};

static void free_series(struct series *series)
{
    free(series->key);
    free(series->space);
    free(series->name);
    free(series);
}

static void forget(struct series *series)
{
    struct op_recorder *recorder = series->recorder;
    op_client_cancel(recorder->client, series->request);
    recorder->in_flight -= series->is_sending;
    op_timer_stop(recorder->loop, &series->flush);
    op_map_remove(&recorder->by_key, series->key);
    TAILQ_REMOVE(&recorder->all, series, all);
    free_series(series);
}

static void on_sent(void *context, const struct op_result *result)
{
    struct series *series = context;
    struct op_recorder *recorder = series->recorder;
    series->is_sending = false;
    series->request = 0;
    recorder->in_flight--;
    if (result->rc == DL_OK || result->rc == DL_EEXISTS) {
        series->is_there = true;
        recorder->sent++;
    } else {
        recorder->dropped++;
        dl_debug("event dropped: %s", result->err.text);
    }
    if (!series->is_there || result->rc == DL_ENOTFOUND) {
        forget(series); /* The next one begins anew. */
    } else if (series->count > series->told && !series->flush.is_running) {
        op_timer_start(recorder->loop, &series->flush, series->sent_ns + OP_RECORDER_FLUSH_MS * DL_NS_PER_MS);
    }
}

static bool claim_place(struct series *series)
{
    struct op_recorder *recorder = series->recorder;
    if (recorder->in_flight >= OP_RECORDER_IN_FLIGHT_MAX) {
        recorder->dropped++;
        return false;
    }
    recorder->in_flight++;
    series->is_sending = true;
    series->told = series->count;
    series->sent_ns = op_loop_now_ns(recorder->loop);
    return true;
}

static void send_failed(struct series *series)
{
    series->recorder->in_flight--;
    series->recorder->dropped++;
    series->is_sending = false;
}

static void on_flush(void *context, int64_t now_ns)
{
    struct series *series = context;
    (void)now_ns;
    if (series->is_sending || !series->is_there || series->count == series->told || !claim_place(series)) {
        return;
    }
    char text[160], when[DL_TIME_TEXT_MAX];
    snprintf(text, sizeof text, "{\"series\":{\"count\":%u,\"lastObservedTime\":\"%s\"}}", series->count,
             dl_time_text(series->last_wall_ns, 6, when));
    struct op_ref ref = {&op_res_events, series->space, series->name, NULL};
    struct op_reply_to to = {on_sent, series, &series->request};
    if (op_api_merge_patch(series->recorder->client, &ref, text, to, NULL) != DL_OK) {
        send_failed(series);
    }
}

static bool add_texts(cJSON *object, const char *const pairs[][2], size_t count)
{
    bool is_built = object != NULL;
    for (size_t i = 0; i < count && is_built; i++) {
        is_built = pairs[i][1] == NULL || cJSON_AddStringToObject(object, pairs[i][0], pairs[i][1]) != NULL;
    }
    return is_built;
}

static char *event_text(const struct series *series, const struct op_subject *about, const char *type,
                        const char *reason, const char *action, const char *note)
{
    const struct op_recorder *recorder = series->recorder;
    char when[DL_TIME_TEXT_MAX];
    dl_time_text(series->last_wall_ns, 6, when);
    const char *const top[][2] = {
        {"apiVersion", "events.k8s.io/v1"},
        {"kind", "Event"},
        {"eventTime", when},
        {"type", type},
        {"reason", reason},
        {"action", action},
        {"note", note},
        {"reportingController", recorder->controller},
        {"reportingInstance", recorder->instance},
    };
    const char *const names[][2] = {{"name", series->name}, {"namespace", series->space}};
    const char *const regarding[][2] = {{"apiVersion", about->api_version},
                                        {"kind", about->kind},
                                        {"namespace", about->space},
                                        {"name", about->name},
                                        {"uid", about->uid}};
    cJSON *event = cJSON_CreateObject();
    bool is_built = add_texts(event, top, DL_COUNT_OF(top)) &&
                    add_texts(cJSON_AddObjectToObject(event, "metadata"), names, DL_COUNT_OF(names)) &&
                    add_texts(cJSON_AddObjectToObject(event, "regarding"), regarding, DL_COUNT_OF(regarding));
    char *text = is_built ? cJSON_PrintUnformatted(event) : NULL;
    cJSON_Delete(event);
    return text;
}

static struct series *new_series(struct op_recorder *recorder, const char *key, const struct op_subject *about)
{
    struct series *series = calloc(1, sizeof *series);
    if (series == NULL) {
        return NULL;
    }
    series->recorder = recorder;
    series->flush = (struct op_timer){.fire = on_flush, .context = series};
    series->key = strdup(key);
    series->space = strdup(about->space != NULL && about->space[0] != 0 ? about->space : "default");
    int size = asprintf(&series->name, "%.*s.%llx", NAME_MAX_PART, about->name,
                        (unsigned long long)dl_wall_ns() + recorder->serial++);
    if (size < 0) {
        series->name = NULL;
    }
    bool is_built = series->key != NULL && series->space != NULL && series->name != NULL &&
                    op_map_put(&recorder->by_key, key, series, NULL) == DL_OK;
    if (!is_built) {
        free_series(series);
        return NULL;
    }
    TAILQ_INSERT_TAIL(&recorder->all, series, all);
    return series;
}

static void forget_old(struct op_recorder *recorder, int64_t now_ns)
{
    for (struct series *oldest; (oldest = TAILQ_FIRST(&recorder->all)) != NULL;) {
        bool is_over = now_ns - oldest->last_ns > OP_RECORDER_SERIES_MS * DL_NS_PER_MS;
        if (!is_over && recorder->by_key.count < OP_RECORDER_KEYS_MAX) {
            return;
        }
        forget(oldest);
    }
}

static void begin(struct op_recorder *recorder, const char *key, const struct op_subject *about, const char *type,
                  const char *reason, const char *action, const char *note)
{
    struct series *series = new_series(recorder, key, about);
    if (series == NULL) {
        recorder->dropped++;
        return;
    }
    series->count = 1;
    series->last_ns = op_loop_now_ns(recorder->loop);
    series->last_wall_ns = dl_wall_ns();
    char *text = event_text(series, about, type, reason, action, note);
    struct op_ref ref = {&op_res_events, series->space, series->name, NULL};
    struct op_reply_to to = {on_sent, series, &series->request};
    bool has_place = text != NULL && claim_place(series);
    if (has_place && op_api_create(recorder->client, &ref, text, to, NULL) != DL_OK) {
        send_failed(series);
    }
    cJSON_free(text);
    if (!series->is_sending) {
        forget(series);
    }
}

void op_record(struct op_recorder *recorder, const struct op_subject *about, const char *type, const char *reason,
               const char *action, const char *note_format, ...)
{
    char note[OP_RECORDER_NOTE_MAX + 1], key[1024];
    va_list args;
    va_start(args, note_format);
    vsnprintf(note, sizeof note, note_format, args);
    va_end(args);
    snprintf(key, sizeof key, "%s|%s|%s|%s|%s|%s", about->uid != NULL ? about->uid : about->name, about->kind, type,
             reason, action, recorder->instance);
    int64_t now_ns = op_loop_now_ns(recorder->loop);
    forget_old(recorder, now_ns);
    struct series *series = op_map_get(&recorder->by_key, key);
    if (series == NULL) {
        begin(recorder, key, about, type, reason, action, note);
        return;
    }
    series->count++;
    series->last_ns = now_ns;
    series->last_wall_ns = dl_wall_ns();
    TAILQ_REMOVE(&recorder->all, series, all);
    TAILQ_INSERT_TAIL(&recorder->all, series, all);
    if (!series->is_sending && !series->flush.is_running) {
        op_timer_start(recorder->loop, &series->flush, series->sent_ns + OP_RECORDER_FLUSH_MS * DL_NS_PER_MS);
    }
}

enum dl_rc op_recorder_new(struct op_client *client, const char *controller, const char *instance,
                           struct op_recorder **out, struct dl_err *err)
{
    struct op_recorder *recorder = calloc(1, sizeof *recorder);
    if (recorder == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for events");
    }
    recorder->client = client;
    recorder->loop = op_client_loop(client);
    recorder->controller = strdup(controller);
    recorder->instance = strdup(instance);
    TAILQ_INIT(&recorder->all);
    if (recorder->controller == NULL || recorder->instance == NULL) {
        op_recorder_free(recorder);
        return dl_err_set(err, DL_ENOMEM, "no memory for events");
    }
    *out = recorder;
    return DL_OK;
}

void op_recorder_free(struct op_recorder *recorder)
{
    if (recorder == NULL) {
        return;
    }
    while (!TAILQ_EMPTY(&recorder->all)) {
        forget(TAILQ_FIRST(&recorder->all));
    }
    op_map_release(&recorder->by_key);
    free(recorder->controller);
    free(recorder->instance);
    free(recorder);
}

void op_recorder_metrics(const struct op_recorder *recorder, struct dl_metrics *metrics)
{
    dl_metrics_family(metrics, "diloco_events_sent_total", "counter", "Kubernetes events sent.");
    dl_metrics_value(metrics, (double)recorder->sent, (char *)NULL);
    dl_metrics_family(metrics, "diloco_events_dropped_total", "counter", "Kubernetes events that could not be sent.");
    dl_metrics_value(metrics, (double)recorder->dropped, (char *)NULL);
}
