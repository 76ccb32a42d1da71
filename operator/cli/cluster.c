#include "operator/cli/cluster.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "operator/controller/controller.h"
#include "operator/kube/api.h"
#include "operator/reconcile/json.h"
#include "operator/reconcile/objects.h"

#define ANSWER_MS 5000
#define WAIT_NS (15 * DL_NS_PER_SECOND)

struct op_cluster {
    struct op_loop *loop;
    struct op_client *client;
    char space[DL_SPEC_NAME_MAX], job[DL_SPEC_NAME_MAX];
};

struct answer {
    bool is_there;
    enum dl_rc rc;
    struct dl_err err;
    char *text; /* Owned. */
    size_t size;
};

const char *op_cluster_job_name(const char *text)
{
    static const char *const kinds[] = {"ddj/", "decoupleddilocojob/", "decoupleddilocojobs/",
                                        "decoupleddilocojob.diloco.dev/"};
    for (size_t i = 0; text != NULL && i < DL_COUNT_OF(kinds); i++) {
        size_t length = strlen(kinds[i]);
        if (strncmp(text, kinds[i], length) == 0 && text[length] != 0) {
            return text + length;
        }
    }
    return NULL;
}

enum dl_rc op_cluster_open(const struct op_config *config, const char *space, const char *job, struct op_cluster **out,
                           struct dl_err *err)
{
    struct op_cluster *cluster = calloc(1, sizeof *cluster);
    if (cluster == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory");
    }
    const struct op_client_options options = {.user_agent = "kubectl-diloco"};
    snprintf(cluster->job, sizeof cluster->job, "%s", job);
    enum dl_rc rc = op_loop_new(&cluster->loop, err);
    rc = rc == DL_OK ? op_client_new(cluster->loop, config, &options, &cluster->client, err) : rc;
    if (rc != DL_OK) {
        op_cluster_close(cluster);
        return rc;
    }
    snprintf(cluster->space, sizeof cluster->space, "%s", space != NULL ? space : op_client_space(cluster->client));
    *out = cluster;
    return DL_OK;
}

void op_cluster_close(struct op_cluster *cluster)
{
    if (cluster != NULL) {
        op_client_free(cluster->client);
        op_loop_free(cluster->loop);
        free(cluster);
    }
}

/* --- asking --- */

static void on_answer(void *context, const struct op_result *result)
{
    struct answer *answer = context;
    answer->is_there = true;
    answer->rc = result->rc;
    answer->err = result->err;
    if (result->rc == DL_OK) {
        answer->text = strndup(result->body, result->size);
        answer->size = result->size;
        answer->rc = answer->text != NULL ? DL_OK : DL_ENOMEM;
    }
}

/* Until all have answered. Those that have not by the end of the bound are given up: `ids` are theirs. */
static void wait_for(struct op_cluster *cluster, struct answer *answers, const uint64_t *ids, uint32_t count)
{
    int64_t until_ns = dl_now_ns() + WAIT_NS;
    for (uint32_t i = 0; i < count; i++) {
        while (!answers[i].is_there && dl_now_ns() < until_ns) {
            op_loop_turn(cluster->loop, 50);
        }
        if (!answers[i].is_there) {
            op_client_cancel(cluster->client, ids[i]);
            answers[i].is_there = true;
            answers[i].rc =
                dl_err_set(&answers[i].err, DL_ETIMEOUT, "no answer from %s", op_client_server(cluster->client));
        }
    }
}

static enum dl_rc get_job(struct op_cluster *cluster, cJSON **out, struct dl_err *err)
{
    struct answer answer = {.rc = DL_AGAIN};
    uint64_t id = 0;
    struct op_ref ref = {.resource = &op_res_jobs, .space = cluster->space, .name = cluster->job};
    struct op_reply_to to = {.done = on_answer, .context = &answer, .id = &id};
    enum dl_rc rc = op_api_get(cluster->client, &ref, to, err);
    if (rc != DL_OK) {
        return rc;
    }
    wait_for(cluster, &answer, &id, 1);
    if (answer.rc == DL_OK) {
        rc = op_json_parse(answer.text, answer.size, out, err);
    } else {
        *err = answer.err;
        rc = answer.rc;
        if (rc == DL_ENOTFOUND) {
            dl_err_set(err, rc, "there is no job %s in namespace %s (kubectl get ddj -A; -n names another namespace)",
                       cluster->job, cluster->space);
        }
    }
    free(answer.text);
    return rc;
}

static void ask_shards(struct op_cluster *cluster, uint32_t shards, struct answer *answers)
{
    uint64_t ids[DL_SPEC_SHARDS_MAX] = {0};
    for (uint32_t i = 0; i < shards; i++) {
        char pod[OP_CHILD_NAME_MAX];
        snprintf(pod, sizeof pod, "%s-syncer-%u", cluster->job, i);
        struct op_reply_to to = {.done = on_answer, .context = &answers[i], .id = &ids[i]};
        answers[i].rc = op_api_pod_proxy(cluster->client, cluster->space, pod, OP_HEALTH_PORT, "status", ANSWER_MS, to,
                                         &answers[i].err);
        answers[i].is_there = answers[i].rc != DL_OK;
    }
    wait_for(cluster, answers, ids, shards);
}

/* --- what it means --- */

/* Of what the operator wrote last. `why`: why the syncers' own word is not there; told of a job that should have some. */
static enum dl_rc view_of_object(const cJSON *job, const char *why, struct op_view *view, struct dl_err *err)
{
    const cJSON *status = cJSON_GetObjectItemCaseSensitive(job, "status");
    const cJSON *syncer = cJSON_GetObjectItemCaseSensitive(status, "syncer");
    const cJSON *learners = cJSON_GetObjectItemCaseSensitive(status, "learners");
    struct op_job_status said;
    op_status_init(&said);
    said.round = op_json_u64(syncer, "round", 0);
    said.step = op_json_u64(syncer, "step", 0);
    said.tokens = op_json_u64(syncer, "tokens", 0);
    said.learners_wanted = op_json_u32(learners, "desired", 0);
    const char *loss = op_json_text(syncer, "loss", "");
    said.loss = loss[0] != 0 ? strtod(loss, NULL) : said.loss;
    enum dl_rc rc = op_view_from_status(view, &said, err);
    op_status_release(&said);
    if (rc != DL_OK) {
        return rc;
    }
    const char *phase = op_json_text(status, "phase", "Pending");
    view->is_over = strcmp(phase, "Succeeded") == 0 || strcmp(phase, "Stopped") == 0 || strcmp(phase, "Failed") == 0;
    bool is_silent = !view->is_over && strcmp(phase, "Suspended") != 0;
    snprintf(view->phase, sizeof view->phase, "%s", phase);
    snprintf(view->message, sizeof view->message, "%s%s%.120s", op_json_text(status, "message", ""),
             is_silent ? "; no syncer answers: " : "", is_silent ? why : "");
    return DL_OK;
}

static enum dl_rc combine(const struct answer *answers, uint32_t shards, struct op_job_status *out, struct dl_err *err)
{
    struct op_job_status views[DL_SPEC_SHARDS_MAX];
    const struct op_job_status *heard[DL_SPEC_SHARDS_MAX] = {NULL};
    for (uint32_t i = 0; i < shards; i++) {
        op_status_init(&views[i]);
        struct dl_err ignored;
        bool is_heard =
            answers[i].rc == DL_OK && op_status_parse(answers[i].text, answers[i].size, &views[i], &ignored) == DL_OK;
        heard[i] = is_heard ? &views[i] : NULL;
    }
    enum dl_rc rc = op_status_combine(heard, shards, out, err);
    for (uint32_t i = 0; i < shards; i++) {
        op_status_release(&views[i]);
    }
    return rc;
}

enum dl_rc op_cluster_read(struct op_cluster *cluster, struct op_view *view, struct dl_err *err)
{
    cJSON *job = NULL;
    enum dl_rc rc = get_job(cluster, &job, err);
    if (rc != DL_OK) {
        return rc;
    }
    const cJSON *spec = cJSON_GetObjectItemCaseSensitive(job, "spec");
    uint32_t shards = op_json_u32(cJSON_GetObjectItemCaseSensitive(spec, "syncer"), "shards", 1);
    shards = DL_MIN(DL_MAX(shards, 1u), (uint32_t)DL_SPEC_SHARDS_MAX);
    DL_AUTO_FREE struct answer *answers = calloc(shards, sizeof *answers);
    struct op_job_status combined;
    op_status_init(&combined);
    if (answers == NULL) {
        rc = dl_err_set(err, DL_ENOMEM, "no memory");
    } else {
        ask_shards(cluster, shards, answers);
        rc = combine(answers, shards, &combined, err);
    }
    if (rc == DL_OK && combined.shards_heard > 0) {
        rc = op_view_from_status(view, &combined, err);
    } else if (rc == DL_OK) {
        rc = view_of_object(job, answers[0].err.text, view, err);
    }
    snprintf(view->job, sizeof view->job, "%s", cluster->job);
    for (uint32_t i = 0; answers != NULL && i < shards; i++) {
        free(answers[i].text);
    }
    op_status_release(&combined);
    cJSON_Delete(job);
    return rc;
}
