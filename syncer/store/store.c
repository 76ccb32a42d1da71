#include "syncer/store/store.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/mem.h"
#include "syncer/store/internal.h"

static enum dl_rc make_dir(const char *dir, struct dl_err *err)
{
    if (mkdir(dir, 0750) != 0 && errno != EEXIST) {
        return dl_err_errno(err, errno == ENOSPC ? DL_EFULL : DL_EIO, errno, "making state folder %s", dir);
    }
    return DL_OK;
}

/* Files that no commit names are leftovers of a write that was interrupted, or of a removal that was. */
static void sweep(struct sy_store *store)
{
    DIR *dir = opendir(store->dir);
    if (dir == NULL) {
        return;
    }
    for (const struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        if (strncmp(entry->d_name, "fragment-", 9) != 0 || strlen(entry->d_name) >= SY_STORE_FILE_MAX) {
            continue;
        }
        if (sy_store_db_names(store, entry->d_name)) {
            store->bytes += sy_store_file_bytes(store, entry->d_name);
        } else {
            sy_store_file_remove(store, entry->d_name);
        }
    }
    closedir(dir);
}

enum dl_rc sy_store_open(const struct sy_store_options *options, struct sy_store **out, struct dl_err *err)
{
    if (strlen(options->dir) >= SY_STORE_DIR_MAX) {
        return dl_err_set(err, DL_EINVAL, "state folder: the path is longer than %d bytes", SY_STORE_DIR_MAX - 1);
    }
    enum dl_rc rc = make_dir(options->dir, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct sy_store *store = calloc(1, sizeof *store);
    if (store == NULL) {
        return dl_err_set(err, DL_ENOMEM, "opening the store: no memory");
    }
    pthread_mutex_init(&store->lock, NULL);
    pthread_mutex_init(&store->events_lock, NULL);
    snprintf(store->dir, sizeof store->dir, "%s", options->dir);
    snprintf(store->job, sizeof store->job, "%s", options->job);
    store->shard = options->shard;
    store->spec = options->spec;
    store->warmup_steps = options->warmup_steps;
    store->ops = options->ops != NULL ? options->ops : &sy_store_ops_real;
    rc = sy_store_db_open(store, options->vfs, err);
    if (rc == DL_OK) {
        rc = sy_store_db_begin_epoch(store, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_sync_dir(store, err);
    }
    if (rc != DL_OK) {
        store->event_count = 0;
        sy_store_close(store);
        return rc;
    }
    store->spec = NULL;
    sweep(store);
    *out = store;
    return DL_OK;
}

void sy_store_close(struct sy_store *store)
{
    if (store == NULL) {
        return;
    }
    if (store->event_count > 0 || store->traces.first != NULL) {
        /* The tape's last notes are worth an attempt, and nothing depends on it. */
        struct dl_err err;
        enum dl_rc rc = sy_store_db_save(store, NULL, NULL, 0, &err);
        (void)rc;
    }
    sqlite3_close(store->db);
    sy_store_trace_close(store);
    pthread_mutex_destroy(&store->lock);
    pthread_mutex_destroy(&store->events_lock);
    free(store->tensors);
    free(store);
}

uint64_t sy_store_epoch(const struct sy_store *store)
{
    return store->epoch;
}

uint32_t sy_store_warmup_steps(const struct sy_store *store)
{
    return store->warmup_steps;
}

void sy_store_get_totals(const struct sy_store *store, struct sy_store_totals *totals)
{
    *totals = store->totals;
}

enum dl_rc sy_store_get_layout(const struct sy_store *store, struct sy_store_layout *out)
{
    if (!store->has_layout) {
        return DL_ENOTFOUND;
    }
    *out = store->layout;
    return DL_OK;
}

enum dl_rc sy_store_set_layout(struct sy_store *store, const struct sy_store_layout *layout, struct dl_err *err)
{
    uint8_t *copy = malloc(layout->tensors_bytes == 0 ? 1 : layout->tensors_bytes);
    if (copy == NULL) {
        return dl_err_set(err, DL_ENOMEM, "keeping the layout: no memory");
    }
    memcpy(copy, layout->tensors, layout->tensors_bytes);
    pthread_mutex_lock(&store->lock);
    free(store->tensors);
    store->tensors = copy;
    store->layout = *layout;
    store->layout.tensors = copy;
    store->has_layout = true;
    store->layout_is_durable = false;
    pthread_mutex_unlock(&store->lock);
    return DL_OK;
}

enum dl_rc sy_store_newest(struct sy_store *store, uint32_t fragment, struct sy_store_version *out, struct dl_err *err)
{
    char file[SY_STORE_FILE_MAX];
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = sy_store_db_version(store, fragment, 0, out, file, err);
    pthread_mutex_unlock(&store->lock);
    return rc;
}

static enum dl_rc check_versions(struct sy_store *store, const struct sy_store_commit *commits, uint32_t count,
                                 struct dl_err *err)
{
    for (uint32_t i = 0; i < count; i++) {
        struct sy_store_version newest = {0};
        char file[SY_STORE_FILE_MAX];
        enum dl_rc rc = sy_store_db_version(store, commits[i].fragment, 0, &newest, file, err);
        if (rc != DL_OK && rc != DL_ENOTFOUND) {
            return rc;
        }
        if (commits[i].version < newest.version) {
            rc = sy_store_db_check_epoch(store, err); /* Whoever was overtaken by a successor hears of that. */
            return rc != DL_OK ? rc
                               : dl_err_set(err, DL_EINVAL, "it is older than the newest, %" PRIu64, newest.version);
        }
    }
    return DL_OK;
}

static enum dl_rc write_file(struct sy_store *store, const struct sy_store_commit *commit, struct sy_store_draft **out,
                             struct dl_err *err)
{
    const struct sy_store_content content = {.fragment = commit->fragment,
                                             .version = commit->version,
                                             .round = commit->round,
                                             .parameters_bytes = commit->parameters_bytes,
                                             .state_bytes = commit->state_bytes};
    enum dl_rc rc = sy_store_begin(store, &content, out, err);
    if (rc == DL_OK) {
        rc = sy_store_append(*out, commit->parameters, commit->parameters_bytes, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_append(*out, commit->state, commit->state_bytes, err);
    }
    return rc;
}

/* All are written before the first is synced, so that the file system has to settle once, not once a file. */
static enum dl_rc write_files(struct sy_store *store, const struct sy_store_commit *commits, uint32_t count,
                              struct sy_store_draft **drafts, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        if (drafts[i] == NULL) {
            rc = write_file(store, &commits[i], &drafts[i], err);
        }
        if (rc == DL_OK) {
            assert(sy_store_draft_content(drafts[i])->fragment == commits[i].fragment &&
                   sy_store_draft_content(drafts[i])->version == commits[i].version);
            rc = sy_store_draft_seal(drafts[i], err);
        }
    }
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        rc = sy_store_draft_sync(drafts[i], err);
    }
    return rc == DL_OK ? sy_store_sync_dir(store, err) : rc;
}

static void forget_doubtful(struct sy_store *store)
{
    for (uint32_t i = 0; i < store->doubtful_count; i++) {
        if (!sy_store_db_names(store, store->doubtful[i])) {
            sy_store_file_remove(store, store->doubtful[i]);
        }
    }
    store->doubtful_count = 0;
}

/* An I/O error does not say whether the transaction reached the disk. Should it turn up after a crash, it names these
 * files; the ones of an earlier attempt have been overwritten by then. */
static void keep_doubtful(struct sy_store *store, const struct sy_store_written *written, uint32_t count)
{
    forget_doubtful(store);
    for (uint32_t i = 0; i < count; i++) {
        memcpy(store->doubtful[i], written[i].file, SY_STORE_FILE_MAX);
    }
    store->doubtful_count = count;
}

void sy_store_remove_dropped(struct sy_store *store)
{
    for (uint32_t i = 0; i < store->dropped_count; i++) {
        store->bytes -= DL_MIN(store->bytes, sy_store_file_bytes(store, store->dropped[i]));
        sy_store_file_remove(store, store->dropped[i]);
    }
    store->dropped_count = 0;
}

static void settle_files(struct sy_store *store, const struct sy_store_written *written, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        store->bytes += sy_store_file_bytes(store, written[i].file);
    }
    forget_doubtful(store);
}

/* Takes the drafts. What is kept no longer stays in store->dropped: removing a large file takes the disk a while. */
static enum dl_rc commit_locked(struct sy_store *store, const struct sy_store_commit *commits, uint32_t count,
                                struct dl_err *err)
{
    struct sy_store_written written[SY_STORE_COMMITS_MAX];
    struct sy_store_draft *drafts[SY_STORE_COMMITS_MAX];
    sy_store_remove_dropped(store); /* Of the commit before. */
    for (uint32_t i = 0; i < count; i++) {
        drafts[i] = commits[i].draft;
    }
    enum dl_rc rc = check_versions(store, commits, count, err);
    if (rc == DL_OK) {
        rc = write_files(store, commits, count, drafts, err);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (rc == DL_OK) {
            sy_store_draft_release(drafts[i], &written[i]);
        } else {
            sy_store_abandon(drafts[i]);
        }
    }
    if (rc != DL_OK) {
        return rc;
    }
    rc = sy_store_db_commit(store, commits, written, count, err);
    store->dropped_count = rc == DL_OK ? store->dropped_count : 0; /* They are kept after all. */
    if (rc == DL_OK) {
        settle_files(store, written, count);
    } else if (rc == DL_EFULL || rc == DL_ECONFLICT) {
        for (uint32_t i = 0; i < count; i++) {
            sy_store_file_remove(store, written[i].file);
        }
    } else {
        keep_doubtful(store, written, count);
    }
    return rc;
}

enum dl_rc sy_store_commit(struct sy_store *store, const struct sy_store_commit *commits, uint32_t count,
                           struct dl_err *err)
{
    assert(count >= 1 && count <= SY_STORE_COMMITS_MAX);
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = commit_locked(store, commits, count, err);
    pthread_mutex_unlock(&store->lock);
    if (rc == DL_OK) {
        return DL_OK;
    }
    return count == 1 ? dl_err_wrap(err, "committing fragment %" PRIu32 " version %" PRIu64, commits[0].fragment,
                                    commits[0].version)
                      : dl_err_wrap(err, "committing fragments %" PRIu32 " to %" PRIu32, commits[0].fragment,
                                    commits[count - 1].fragment);
}

void sy_store_tidy(struct sy_store *store)
{
    pthread_mutex_lock(&store->lock);
    sy_store_remove_dropped(store);
    pthread_mutex_unlock(&store->lock);
}

enum dl_rc sy_store_save(struct sy_store *store, const struct sy_store_totals *totals,
                         const struct sy_store_member *members, uint32_t count, struct dl_err *err)
{
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = sy_store_db_save(store, totals, members, count, err);
    pthread_mutex_unlock(&store->lock);
    return rc == DL_OK ? DL_OK : dl_err_wrap(err, "saving counters");
}

/* The newest file is damaged: the version before it lives on under a new number. */
static enum dl_rc load_older(struct sy_store *store, uint32_t fragment, void *parameters, uint64_t parameters_bytes,
                             void *state, uint64_t state_bytes, struct sy_store_version *newest, struct dl_err *err)
{
    for (uint32_t skip = 1; skip < SY_STORE_KEEP; skip++) {
        struct sy_store_version older;
        char file[SY_STORE_FILE_MAX];
        struct dl_err fault;
        enum dl_rc rc = sy_store_db_version(store, fragment, skip, &older, file, &fault);
        if (rc == DL_OK) {
            rc = sy_store_file_read(store, file, fragment, older.version, parameters, parameters_bytes, state,
                                    state_bytes, &fault);
        }
        if (rc != DL_OK) {
            continue;
        }
        struct sy_store_commit again = {.fragment = fragment,
                                        .version = newest->version + 1,
                                        .round = older.round,
                                        .parameters = parameters,
                                        .parameters_bytes = parameters_bytes,
                                        .state = state,
                                        .state_bytes = state_bytes,
                                        .totals = store->totals,
                                        .recovered = true};
        rc = commit_locked(store, &again, 1, err);
        sy_store_remove_dropped(store);
        if (rc == DL_OK) {
            *newest = older;
            newest->version = again.version;
            newest->participants = 0;
        }
        return rc;
    }
    return dl_err_wrap(err,
                       "no good copy of fragment %" PRIu32 " is left (restore %s from a copy, or start anew with an "
                       "empty one)",
                       fragment, store->dir);
}

static enum dl_rc load_locked(struct sy_store *store, uint32_t fragment, void *parameters, uint64_t parameters_bytes,
                              void *state, uint64_t state_bytes, struct sy_store_version *out, char *damage,
                              struct dl_err *err)
{
    struct sy_store_version newest;
    char file[SY_STORE_FILE_MAX];
    enum dl_rc rc = sy_store_db_version(store, fragment, 0, &newest, file, err);
    if (rc == DL_OK) {
        rc = sy_store_file_read(store, file, fragment, newest.version, parameters, parameters_bytes, state, state_bytes,
                                err);
    }
    if (rc == DL_ECORRUPT) {
        snprintf(damage, DL_ERR_TEXT_MAX, "%s", err->text);
        rc = load_older(store, fragment, parameters, parameters_bytes, state, state_bytes, &newest, err);
    }
    if (rc == DL_OK) {
        *out = newest;
    }
    return rc;
}

enum dl_rc sy_store_load(struct sy_store *store, uint32_t fragment, void *parameters, uint64_t parameters_bytes,
                         void *state, uint64_t state_bytes, struct sy_store_version *out, char *damage,
                         struct dl_err *err)
{
    damage[0] = '\0';
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = load_locked(store, fragment, parameters, parameters_bytes, state, state_bytes, out, damage, err);
    pthread_mutex_unlock(&store->lock);
    return rc;
}

void sy_store_note(struct sy_store *store, const char *kind, uint32_t learner, uint64_t admission, const char *uid,
                   uint64_t step, const char *text)
{
    pthread_mutex_lock(&store->events_lock);
    if (store->event_count == SY_STORE_EVENTS_MAX) {
        store->events_dropped++;
    } else {
        struct sy_store_event *event = &store->events[store->event_count++];
        event->wall_ns = dl_wall_ns();
        event->learner = learner;
        event->admission = admission;
        event->step = step;
        snprintf(event->kind, sizeof event->kind, "%s", kind);
        snprintf(event->uid, sizeof event->uid, "%s", uid);
        snprintf(event->text, sizeof event->text, "%s", text);
    }
    pthread_mutex_unlock(&store->events_lock);
}

uint64_t sy_store_bytes(const struct sy_store *store)
{
    return store->bytes;
}
