#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "common/mem.h"
#include "syncer/server/internal.h"

/* cJSON keeps numbers in doubles, which end at 2^53: counters go in as text. */
static void add_u64(cJSON *object, const char *name, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, value);
    cJSON_AddRawToObject(object, name, text);
}

/* Six significant digits; what is not a number is null. */
static void add_number(cJSON *object, const char *name, double value)
{
    char text[32];
    if (isfinite(value)) {
        snprintf(text, sizeof text, "%.6g", value);
        cJSON_AddRawToObject(object, name, text);
    } else {
        cJSON_AddNullToObject(object, name);
    }
}

uint64_t sy_resident_bytes(void)
{
    FILE *file = fopen("/proc/self/statm", "re");
    unsigned long size = 0;
    unsigned long resident = 0;
    if (file == NULL) {
        return 0;
    }
    if (fscanf(file, "%lu %lu", &size, &resident) != 2) {
        resident = 0;
    }
    fclose(file);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

const char *sy_stop_result_name(enum dl_stop_result result)
{
    switch (result) {
    case DL_STOP_SUCCEEDED: return "succeeded";
    case DL_STOP_REQUESTED: return "requested";
    case DL_STOP_TIMEOUT: return "timeout";
    case DL_STOP_FAILED: return "failed";
    }
    return "failed";
}

static void add_evaluation(cJSON *parent, const char *name, const struct dl_wire_evaluation *evaluation)
{
    cJSON *object = cJSON_AddObjectToObject(parent, name);
    add_number(object, "loss", evaluation->loss);
    add_u64(object, "tokens", evaluation->tokens);
    add_u64(object, "round", evaluation->round);
    char hash[20];
    snprintf(hash, sizeof hash, "%016" PRIx64, evaluation->parameter_hash);
    cJSON_AddStringToObject(object, "parameterHash", hash);
}

static void add_learner(const struct sy_server *server, cJSON *array, uint32_t member,
                        const struct sy_member_view *view)
{
    cJSON *object = cJSON_CreateObject();
    cJSON_AddItemToArray(array, object);
    const char *state = view->connected ? "connected" : server->left_by_goodbye[member] ? "left" : "lost";
    add_u64(object, "learner", view->learner);
    cJSON_AddStringToObject(object, "uid", view->uid);
    add_u64(object, "admission", view->admission);
    cJSON_AddStringToObject(object, "state", state);
    add_u64(object, "step", view->step);
    add_u64(object, "tokens", view->tokens);
    add_number(object, "tokensPerSecond", view->tokens_per_second);
    add_number(object, "stepSeconds", view->step_seconds);
    add_number(object, "loss", (double)view->loss);
    add_u64(object, "behind", view->versions_behind);
    add_number(object, "heardSecondsAgo", (double)(server->now_ns - view->heard_ns) / 1e9);
    add_u64(object, "pushesMerged", view->pushes_merged);
    add_number(object, "waitedSeconds", (double)view->waited_ns / 1e9);
    cJSON_AddBoolToObject(object, "serves", view->serves);
    if (view->recovered_from >= 0) {
        add_u64(object, "stateFrom", (uint64_t)view->recovered_from);
    }
}

static void add_members(const struct sy_server *server, cJSON *root)
{
    cJSON *learners = cJSON_AddArrayToObject(root, "learners");
    uint32_t evaluators = 0;
    for (uint32_t i = 0; i < sy_core_members(server->core); i++) {
        struct sy_member_view view;
        if (!sy_core_member(server->core, i, &view)) {
            continue;
        }
        if (view.role == DL_ROLE_LEARNER) {
            add_learner(server, learners, i, &view);
        } else {
            evaluators += view.connected ? 1 : 0;
        }
    }
    add_u64(root, "evaluators", evaluators);
}

static void add_fragments(const struct sy_server *server, cJSON *root)
{
    cJSON *array = cJSON_AddArrayToObject(root, "fragments");
    for (uint32_t i = 0; i < server->fragment_count; i++) {
        struct sy_fragment_view view;
        if (!sy_core_fragment(server->core, server->fragments[i].fragment, &view)) {
            continue;
        }
        cJSON *object = cJSON_CreateObject();
        cJSON_AddItemToArray(array, object);
        add_u64(object, "fragment", server->fragments[i].fragment);
        add_u64(object, "version", view.version);
        add_u64(object, "round", view.round);
        cJSON_AddBoolToObject(object, "open", view.round_open);
        add_u64(object, "have", view.have);
        add_u64(object, "need", view.need);
        add_u64(object, "asked", view.asked);
        cJSON *seconds = cJSON_AddObjectToObject(object, "seconds");
        for (int stage = 0; stage < SY_STAGE_COUNT; stage++) {
            add_number(seconds, sy_stage_name((enum sy_stage)stage), server->fragments[i].stage_seconds[stage]);
        }
    }
}

static void add_counts(const struct sy_server *server, cJSON *root, const struct sy_core_view *view)
{
    static const char *const leaves[] = {"goodbye", "preempted", "lost", "superseded", "protocol"};
    cJSON *verdicts = cJSON_AddObjectToObject(root, "verdicts");
    for (int i = 0; i < DL_VERDICT_COUNT; i++) {
        add_u64(verdicts, dl_verdict_name((enum dl_verdict)i), view->verdicts[i]);
    }
    add_u64(root, "joins", view->joins);
    cJSON *object = cJSON_AddObjectToObject(root, "leaves");
    for (size_t i = 0; i < DL_COUNT_OF(leaves); i++) {
        add_u64(object, leaves[i], view->leaves[i]);
    }
    add_u64(root, "recoveries", view->recoveries);
    add_u64(root, "refusals", view->refusals + server->counters.refusals);
}

static void add_times(cJSON *root, const struct sy_core_view *view)
{
    cJSON *times = cJSON_AddObjectToObject(root, "times");
    add_number(times, "wait", view->times.wait);
    add_number(times, "transfer", view->times.transfer);
    add_number(times, "grace", view->times.grace);
    add_number(times, "merge", view->times.merge);
    add_number(times, "commit", view->times.commit);
    add_number(times, "total", view->times.total);
    add_number(root, "graceSeconds", view->grace_seconds);
}

static void add_recent(const struct sy_server *server, cJSON *root)
{
    cJSON *recent = cJSON_AddObjectToObject(root, "recent");
    for (int stage = 0; stage < SY_STAGE_COUNT; stage++) {
        struct sy_spread spread;
        if (sy_times_recent(server, (enum sy_stage)stage, &spread)) {
            cJSON *object = cJSON_AddObjectToObject(recent, sy_stage_name((enum sy_stage)stage));
            add_number(object, "min", spread.min);
            add_number(object, "median", spread.median);
            add_number(object, "max", spread.max);
        }
    }
}

/* The ledger of the job's data, in sequences; only where it is kept, on shard 0. */
static void add_data(const struct sy_server *server, cJSON *root, const struct sy_core_view *view)
{
    if (server->options->shard != 0) {
        return;
    }
    cJSON *data = cJSON_AddObjectToObject(root, "data");
    add_u64(data, "positions", view->data.positions);
    add_u64(data, "counted", view->data.counted);
    add_u64(data, "leased", view->data.leased);
    add_u64(data, "queued", view->data.queued);
}

static void add_head(const struct sy_server *server, cJSON *root, const struct sy_core_view *view)
{
    cJSON_AddStringToObject(root, "job", server->spec->name);
    add_u64(root, "shard", server->options->shard);
    add_u64(root, "shards", server->spec->syncer.shards);
    add_u64(root, "epoch", server->epoch);
    cJSON_AddStringToObject(root, "phase", sy_phase_name(view->phase));
    cJSON_AddStringToObject(root, "message", view->message);
    add_u64(root, "round", view->rounds_merged);
    add_u64(root, "step", view->step);
    add_u64(root, "tokens", view->tokens);
    add_u64(root, "tokensMerged", view->tokens_merged);
    add_u64(root, "tokenBudget", server->spec->training.token_budget);
    add_number(root, "loss", (double)view->loss);
    add_number(root, "goodput", view->goodput);
    cJSON *quorum = cJSON_AddObjectToObject(root, "quorum");
    add_u64(quorum, "have", view->quorum_have);
    add_u64(quorum, "need", view->quorum_need);
    add_u64(root, "learnersWanted", server->spec->learners.replicas);
    add_u64(root, "connected", view->connected);
    if (view->evaluated) {
        cJSON *validation = cJSON_AddObjectToObject(root, "validation");
        add_evaluation(validation, "first", &view->first_evaluation);
        add_evaluation(validation, "last", &view->last_evaluation);
    }
}

char *sy_status_json(struct sy_server *server)
{
    struct sy_core_view view;
    sy_core_view(server->core, server->now_ns, &view);
    cJSON *root = cJSON_CreateObject();
    if (root == NULL) {
        return NULL;
    }
    add_head(server, root, &view);
    add_members(server, root);
    add_fragments(server, root);
    add_counts(server, root, &view);
    add_times(root, &view);
    add_recent(server, root);
    add_data(server, root, &view);
    add_u64(root, "bytesIn", server->counters.bytes_in);
    add_u64(root, "bytesOut", server->counters.bytes_out);
    add_u64(root, "pushBytes", server->push_bytes);
    add_u64(root, "storeBytes", server->store == NULL ? 0 : sy_store_bytes(server->store));
    add_u64(root, "residentBytes", sy_resident_bytes());
    add_number(root, "uptimeSeconds", (double)(server->now_ns - server->started_ns) / 1e9);
    if (view.phase == SY_ENDED) {
        cJSON_AddStringToObject(root, "result", sy_stop_result_name(view.stop_result));
    }
    char *text = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    return text;
}
