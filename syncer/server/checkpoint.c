/* Checkpoints of this shard: when the core says so its versions are pinned in the store, in the merge thread's order, so that
 * it is durable before any later version is; once all channels are closed, what is known of the learners follows. */
#include <cjson/cJSON.h>
#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

struct sy_checkpoints {
    uint32_t count;
    struct sy_store_checkpoint list[SY_CHECKPOINTS_MAX]; /* In order of id. */
    bool durable[SY_CHECKPOINTS_MAX];
    uint64_t begun;               /* By this process. */
    char name[SY_STORE_NAME_MAX]; /* Of the one that is being begun. */
    /* Of the cut whose channels are open. */
    uint32_t learner_count, push_count, push_capacity;
    struct sy_store_cut_learner *learners; /* members_max */
    struct sy_store_cut_push *pushes;
};

void sy_checkpoint_id_text(uint64_t id, char out[SY_CHECKPOINT_ID_MAX])
{
    snprintf(out, SY_CHECKPOINT_ID_MAX, "%" PRIu64 ".%" PRIu64, id >> SY_CHECKPOINT_COUNTER_BITS,
             id & ((UINT64_C(1) << SY_CHECKPOINT_COUNTER_BITS) - 1));
}

bool sy_checkpoint_id_parse(const char *text, uint64_t *out)
{
    char *end = NULL;
    unsigned long long epoch = strtoull(text, &end, 10);
    if (!isdigit((unsigned char)text[0]) || *end != '.' || !isdigit((unsigned char)end[1])) {
        return false;
    }
    unsigned long long number = strtoull(end + 1, &end, 10);
    *out = (uint64_t)epoch << SY_CHECKPOINT_COUNTER_BITS | number;
    return *end == 0 && epoch > 0 && epoch < (UINT64_C(1) << 40) && number > 0 &&
           number < (UINT64_C(1) << SY_CHECKPOINT_COUNTER_BITS);
}

static bool is_name(const char *text)
{
    bool fine = strlen(text) < SY_STORE_NAME_MAX;
    for (const char *at = text; *at != 0; at++) {
        fine = fine && (isalnum((unsigned char)*at) || strchr("._-", *at) != NULL);
    }
    return fine;
}

/* --- life ------------------------------------------------------------------------------------------------------------ */

enum dl_rc sy_checkpoints_open(struct sy_server *server, struct dl_err *err)
{
    server->checkpoints = calloc(1, sizeof *server->checkpoints);
    struct sy_checkpoints *all = server->checkpoints;
    if (all != NULL) {
        all->learners = calloc(server->members_max, sizeof *all->learners);
    }
    if (all == NULL || all->learners == NULL) {
        return dl_err_set(err, DL_ENOMEM, "starting: no memory for checkpoints");
    }
    if (server->store == NULL) {
        return DL_OK;
    }
    enum dl_rc rc = sy_store_checkpoints(server->store, all->list, SY_CHECKPOINTS_MAX, &all->count, err);
    for (uint32_t i = 0; i < all->count / 2; i++) { /* The newest come first. */
        struct sy_store_checkpoint swap = all->list[i];
        all->list[i] = all->list[all->count - 1 - i];
        all->list[all->count - 1 - i] = swap;
    }
    for (uint32_t i = 0; i < all->count; i++) {
        all->durable[i] = true;
    }
    if (all->count > 0) {
        sy_core_restore_cut(server->core, all->list[all->count - 1].id);
    }
    return rc;
}

void sy_checkpoints_close(struct sy_server *server)
{
    if (server->checkpoints != NULL) {
        free(server->checkpoints->learners);
        free(server->checkpoints->pushes);
        free(dl_take(server->checkpoints));
    }
}

/* --- tasks of the merge thread --------------------------------------------------------------------------------------- */

static enum dl_rc pin(struct sy_store *store, const void *data, struct dl_err *err)
{
    return sy_store_pin(store, data, err);
}

static enum dl_rc unpin(struct sy_store *store, const void *data, struct dl_err *err)
{
    return sy_store_unpin(store, *(const uint64_t *)data, err);
}

struct closed { /* A cut with its arrays, in one block. */
    struct sy_store_cut cut;
    struct sy_store_cut_learner learners[];
};

static enum dl_rc complete(struct sy_store *store, const void *data, struct dl_err *err)
{
    return sy_store_complete(store, data, err);
}

static struct sy_store_checkpoint *find(struct sy_checkpoints *all, uint64_t id)
{
    for (uint32_t i = 0; i < all->count; i++) {
        if (all->list[i].id == id) {
            return &all->list[i];
        }
    }
    return NULL;
}

static void forget(struct sy_checkpoints *all, uint64_t id)
{
    struct sy_store_checkpoint *found = find(all, id);
    if (found != NULL) {
        size_t at = (size_t)(found - all->list), behind = all->count - at - 1;
        memmove(&all->list[at], &all->list[at + 1], behind * sizeof all->list[0]);
        memmove(&all->durable[at], &all->durable[at + 1], behind * sizeof all->durable[0]);
        all->count--;
    }
}

static void pinned(struct sy_server *server, const void *data, const struct dl_err *error)
{
    const struct sy_store_checkpoint *from = data;
    char text[SY_CHECKPOINT_ID_MAX];
    sy_checkpoint_id_text(from->id, text);
    struct sy_store_checkpoint *found = find(server->checkpoints, from->id);
    if (error->rc != DL_OK) {
        dl_warn("checkpoint failed id=%s error=\"%s\"", text, error->text);
        forget(server->checkpoints, from->id);
    } else if (found != NULL) {
        server->checkpoints->durable[found - server->checkpoints->list] = true;
        dl_info("checkpoint id=%s name=%s rounds=%" PRIu64 " tokens=%" PRIu64, text, from->name, from->rounds_merged,
                from->tokens);
    }
}

static void unpinned(struct sy_server *server, const void *data, const struct dl_err *error)
{
    (void)server;
    char text[SY_CHECKPOINT_ID_MAX];
    sy_checkpoint_id_text(*(const uint64_t *)data, text);
    if (error->rc != DL_OK) {
        dl_warn("checkpoint not removed id=%s error=\"%s\"", text, error->text);
    } else {
        dl_info("checkpoint removed id=%s", text);
    }
}

static void completed(struct sy_server *server, const void *data, const struct dl_err *error)
{
    const struct closed *closed = data;
    struct sy_store_checkpoint *found = find(server->checkpoints, closed->cut.id);
    if (found != NULL) {
        found->is_complete = error->rc == DL_OK;
    }
    if (error->rc != DL_OK) {
        dl_warn("checkpoint's learners are not kept error=\"%s\"", error->text);
    }
}

static bool submit(struct sy_server *server, const struct sy_job_task *task)
{
    struct sy_job *job = task->data == NULL ? NULL : sy_job_new(0);
    if (job == NULL) {
        free(task->data);
        dl_warn("checkpoint: no memory");
        return false;
    }
    job->task = *task;
    server->tasks_pending++;
    sy_jobs_submit(server->jobs, job);
    return true;
}

void sy_checkpoint_task_done(struct sy_server *server, struct sy_job *job)
{
    server->tasks_pending--;
    job->task.done(server, job->task.data, &job->error);
}

static void *copy_of(const void *from, size_t size)
{
    void *copy = malloc(size);
    if (copy != NULL) {
        memcpy(copy, from, size);
    }
    return copy;
}

/* --- what the core says ---------------------------------------------------------------------------------------------- */

void sy_checkpoint_cut(struct sy_server *server, uint64_t id)
{
    struct sy_checkpoints *all = server->checkpoints;
    struct sy_core_view view;
    sy_core_view(server->core, server->now_ns, &view);
    all->learner_count = all->push_count = 0;
    bool has_state = server->store != NULL;
    struct sy_store_checkpoint *made = &all->list[all->count];
    if (all->count == SY_CHECKPOINTS_MAX) {
        dl_warn("checkpoint not kept: there are %d already, remove some", SY_CHECKPOINTS_MAX);
        return;
    }
    *made = (struct sy_store_checkpoint){.id = id,
                                         .wall_ns = dl_wall_ns(),
                                         .rounds_merged = view.rounds_merged,
                                         .tokens = view.tokens,
                                         .fragment_count = server->fragment_count};
    snprintf(made->name, sizeof made->name, "%s", all->name);
    for (uint32_t i = 0; i < server->fragment_count; i++) {
        uint32_t fragment = server->fragments[i].fragment;
        made->fragments[i] = (struct sy_store_pinned){fragment, sy_core_cut_version(server->core, fragment)};
        has_state = has_state && made->fragments[i].version > 0;
    }
    if (!has_state) {
        dl_warn("checkpoint not kept: this shard has nothing durable yet");
        return;
    }
    const struct sy_job_task task = {.run = pin, .done = pinned, .data = copy_of(made, sizeof *made)};
    if (submit(server, &task)) {
        all->durable[all->count++] = false;
    }
}

void sy_checkpoint_learner(struct sy_server *server, uint32_t member, const struct dl_wire_marker *marker)
{
    struct sy_checkpoints *all = server->checkpoints;
    struct sy_core_incarnation who;
    if (all->learner_count < server->members_max && sy_core_incarnation(server->core, member, &who)) {
        struct sy_store_cut_learner *to = &all->learners[all->learner_count++];
        *to = (struct sy_store_cut_learner){
            .nonce = who.nonce, .learner = who.learner, .step = marker->step, .tokens = marker->tokens};
        memcpy(to->uid, who.uid, sizeof to->uid);
    }
}

void sy_checkpoint_in_flight(struct sy_server *server, const struct sy_incoming *push, uint64_t tokens)
{
    struct sy_checkpoints *all = server->checkpoints;
    if (!sy_core_is_channel_open(server->core, push->member) || all->push_count == SY_CUT_PUSHES_MAX) {
        return;
    }
    if (all->push_count == all->push_capacity) {
        uint32_t capacity = DL_MAX(2 * all->push_capacity, 64u);
        struct sy_store_cut_push *grown = realloc(all->pushes, capacity * sizeof *grown);
        if (grown == NULL) {
            return;
        }
        all->pushes = grown;
        all->push_capacity = capacity;
    }
    struct sy_store_cut_push *to = &all->pushes[all->push_count++];
    *to = (struct sy_store_cut_push){.nonce = push->nonce,
                                     .fragment = push->fragment,
                                     .round = push->round,
                                     .base_version = push->base_version,
                                     .tokens = tokens};
    memcpy(to->uid, push->uid, sizeof to->uid);
}

void sy_checkpoint_closed(struct sy_server *server, uint64_t id)
{
    struct sy_checkpoints *all = server->checkpoints;
    if (find(all, id) == NULL) {
        return;
    }
    size_t learner_bytes = all->learner_count * sizeof *all->learners;
    size_t push_bytes = all->push_count * sizeof *all->pushes;
    struct closed *closed = malloc(sizeof *closed + learner_bytes + push_bytes);
    if (closed != NULL) {
        struct sy_store_cut_push *pushes = (struct sy_store_cut_push *)(void *)(closed->learners + all->learner_count);
        memcpy(closed->learners, all->learners, learner_bytes);
        if (push_bytes > 0) {
            memcpy(pushes, all->pushes, push_bytes);
        }
        closed->cut = (struct sy_store_cut){.id = id,
                                            .learner_count = all->learner_count,
                                            .push_count = all->push_count,
                                            .learners = closed->learners,
                                            .pushes = pushes};
    }
    const struct sy_job_task task = {.run = complete, .done = completed, .data = closed};
    (void)submit(server, &task);
}

/* --- what people ask for --------------------------------------------------------------------------------------------- */

static enum dl_rc check_begin(struct sy_server *server, const char *name, uint64_t id, struct dl_err *err)
{
    if (server->store == NULL) {
        return dl_err_set(err, DL_EINVAL, "versions are kept in memory only: start the syncer with --state-dir");
    }
    if (id == 0 && server->options->shard != 0) {
        return dl_err_set(err, DL_EINVAL, "shard 0 names checkpoints: ask it, or say which (?id=)");
    }
    if (!is_name(name)) {
        return dl_err_set(err, DL_EINVAL, "a name has at most %d of A-Z a-z 0-9 . _ -", SY_STORE_NAME_MAX - 1);
    }
    uint64_t as_id;
    if (sy_checkpoint_id_parse(name, &as_id)) {
        return dl_err_set(err, DL_EINVAL, "'%s' looks like a checkpoint's id; choose another name", name);
    }
    for (uint32_t i = 0; i < server->checkpoints->count && name[0] != 0 && id == 0; i++) {
        if (strcmp(server->checkpoints->list[i].name, name) == 0) {
            return dl_err_set(err, DL_EINVAL, "there is a checkpoint of this name; choose another, or remove it first");
        }
    }
    for (uint32_t i = 0; i < server->fragment_count; i++) {
        if (server->fragments[i].blob == NULL) {
            return dl_err_set(err, DL_EINVAL, "this shard has no state yet: wait for the first round");
        }
    }
    if (server->checkpoints->count == SY_CHECKPOINTS_MAX) {
        return dl_err_set(err, DL_EINVAL, "there are %d checkpoints already: remove some", SY_CHECKPOINTS_MAX);
    }
    return server->leaving || server->ended ? dl_err_set(err, DL_EINVAL, "the syncer is about to leave") : DL_OK;
}

enum dl_rc sy_checkpoint_begin(struct sy_server *server, const char *name, uint64_t *id, struct dl_err *err)
{
    enum dl_rc rc = check_begin(server, name, *id, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (*id == 0) {
        *id = server->epoch << SY_CHECKPOINT_COUNTER_BITS | ++server->checkpoints->begun;
    }
    snprintf(server->checkpoints->name, sizeof server->checkpoints->name, "%s", name);
    (void)sy_core_on_cut(server->core, server->now_ns, *id);
    sy_server_actions(server);
    server->checkpoints->name[0] = 0;
    return DL_OK;
}

enum dl_rc sy_checkpoint_remove(struct sy_server *server, uint64_t id, struct dl_err *err)
{
    if (find(server->checkpoints, id) == NULL) {
        return dl_err_set(err, DL_ENOTFOUND, "there is no such checkpoint");
    }
    if (!submit(server, &(struct sy_job_task){.run = unpin, .done = unpinned, .data = copy_of(&id, sizeof id)})) {
        return dl_err_set(err, DL_ENOMEM, "no memory");
    }
    forget(server->checkpoints, id);
    return DL_OK;
}

static void add_u64(cJSON *object, const char *name, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, value);
    cJSON_AddRawToObject(object, name, text);
}

char *sy_checkpoints_json(struct sy_server *server)
{
    const struct sy_checkpoints *all = server->checkpoints;
    cJSON *root = cJSON_CreateObject();
    cJSON *array = root == NULL ? NULL : cJSON_AddArrayToObject(root, "checkpoints");
    for (uint32_t i = 0; array != NULL && i < all->count; i++) {
        const struct sy_store_checkpoint *one = &all->list[i];
        cJSON *object = cJSON_CreateObject();
        char id[SY_CHECKPOINT_ID_MAX];
        sy_checkpoint_id_text(one->id, id);
        cJSON_AddItemToArray(array, object);
        cJSON_AddStringToObject(object, "id", id);
        cJSON_AddStringToObject(object, "name", one->name);
        cJSON_AddStringToObject(object, "state", !all->durable[i] ? "saving" : one->is_complete ? "complete" : "saved");
        add_u64(object, "seconds", (uint64_t)(one->wall_ns / DL_NS_PER_SECOND));
        add_u64(object, "round", one->rounds_merged);
        add_u64(object, "tokens", one->tokens);
        cJSON *versions = cJSON_AddArrayToObject(object, "fragments");
        for (uint32_t p = 0; p < one->fragment_count; p++) {
            cJSON *fragment = cJSON_CreateObject();
            cJSON_AddItemToArray(versions, fragment);
            add_u64(fragment, "fragment", one->fragments[p].fragment);
            add_u64(fragment, "version", one->fragments[p].version);
        }
    }
    char *text = root == NULL ? NULL : cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    return text;
}
