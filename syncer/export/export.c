#include "syncer/export/export.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/buf.h"
#include "common/layout.h"
#include "common/mem.h"
#include "common/model_config.h"
#include "common/safetensors.h"
#include "syncer/store/store.h"

#define PATH_BYTES 4096
#define TRIES 20 /* For a newest version that is replaced while it is read. */
#define BUSY_MS 5000
#define CLOCK_BYTES_MAX (DL_SPEC_FRAGMENTS_MAX * 24)
#define COUNTER_BITS 20 /* Of a checkpoint's id, as the server makes it. */

struct part { /* Of one fragment: what is to be read. */
    uint64_t version;
    char file[96];
};

struct job {
    const struct sy_export_options *options;
    sqlite3 *dbs[DL_SPEC_SHARDS_MAX];
    char name[DL_SPEC_NAME_MAX];
    struct dl_layout *layout;
    enum dl_layout_kind kind;
    uint32_t fragments;
    struct part parts[DL_SPEC_FRAGMENTS_MAX];
};

/* --- databases -------------------------------------------------------------------------------------------------------- */

static void finalize(sqlite3_stmt **statement)
{
    sqlite3_finalize(*statement);
}
#define AUTO_STATEMENT __attribute__((cleanup(finalize))) sqlite3_stmt

static enum dl_rc fail(const struct job *job, uint32_t shard, struct dl_err *err)
{
    return dl_err_set(err, DL_EIO, "reading %s/tape.db: %s", job->options->dirs[shard],
                      sqlite3_errmsg(job->dbs[shard]));
}

static enum dl_rc prepare(const struct job *job, uint32_t shard, const char *sql, sqlite3_stmt **out,
                          struct dl_err *err)
{
    return sqlite3_prepare_v2(job->dbs[shard], sql, -1, out, NULL) == SQLITE_OK ? DL_OK : fail(job, shard, err);
}

static enum dl_rc open_all(struct job *job, struct dl_err *err)
{
    for (uint32_t s = 0; s < job->options->dir_count; s++) {
        char path[PATH_BYTES];
        snprintf(path, sizeof path, "%s/tape.db", job->options->dirs[s]);
        /* Not read-only: a database in WAL mode that nobody has open needs its index made. Nothing is written. */
        if (sqlite3_open_v2(path, &job->dbs[s], SQLITE_OPEN_READWRITE, NULL) != SQLITE_OK) {
            return dl_err_set(err, DL_ENOTFOUND, "%s holds no state of a syncer (%s)", job->options->dirs[s],
                              job->dbs[s] == NULL ? "no memory" : sqlite3_errmsg(job->dbs[s]));
        }
        sqlite3_busy_timeout(job->dbs[s], BUSY_MS);
    }
    return DL_OK;
}

static void close_all(struct job *job)
{
    for (uint32_t s = 0; job->options != NULL && s < job->options->dir_count; s++) {
        sqlite3_close(job->dbs[s]);
    }
    dl_layout_free(job->layout);
}

static enum dl_rc read_job(struct job *job, uint32_t shard, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(job, shard,
                            "SELECT (SELECT value FROM meta WHERE key = 'job'),"
                            " (SELECT value FROM meta WHERE key = 'shard'), kind, fragments, tensors FROM layout",
                            &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (sqlite3_step(statement) != SQLITE_ROW) {
        return dl_err_set(err, DL_ENOTFOUND, "%s has no committed version yet", job->options->dirs[shard]);
    }
    if (strtoul((const char *)sqlite3_column_text(statement, 1), NULL, 10) != shard) {
        return dl_err_set(err, DL_EINVAL, "%s is of shard %s, not %u: name the folders in the order of their shards",
                          job->options->dirs[shard], (const char *)sqlite3_column_text(statement, 1), shard);
    }
    snprintf(job->name, sizeof job->name, "%s", (const char *)sqlite3_column_text(statement, 0));
    job->kind = (enum dl_layout_kind)sqlite3_column_int(statement, 2);
    job->fragments = (uint32_t)sqlite3_column_int(statement, 3);
    if (job->layout != NULL) {
        return DL_OK;
    }
    struct dl_tensor *tensors = NULL;
    uint32_t count = 0;
    rc = dl_tensors_decode(sqlite3_column_blob(statement, 4), (size_t)sqlite3_column_bytes(statement, 4), &tensors,
                           &count, err);
    if (rc == DL_OK) {
        rc = dl_layout_new(tensors, count, job->fragments, job->kind, &job->layout, err);
    }
    free(tensors);
    return rc;
}

static enum dl_rc open_job(struct job *job, const struct sy_export_options *options, struct dl_err *err)
{
    *job = (struct job){.options = options};
    enum dl_rc rc = open_all(job, err);
    for (uint32_t s = 0; rc == DL_OK && s < options->dir_count; s++) {
        rc = read_job(job, s, err);
    }
    return rc;
}

/* --- checkpoints ------------------------------------------------------------------------------------------------------ */

static enum dl_rc add_row(const struct job *job, uint32_t shard, sqlite3_stmt *statement,
                          struct sy_export_checkpoint *all, uint32_t *count)
{
    uint64_t id = (uint64_t)sqlite3_column_int64(statement, 0);
    uint32_t at = 0;
    while (at < *count && all[at].id != id) {
        at++;
    }
    (void)job;
    if (at == *count) {
        if (at == SY_EXPORT_CHECKPOINTS_MAX) {
            return DL_AGAIN;
        }
        all[(*count)++] = (struct sy_export_checkpoint){.id = id, .is_complete = true};
        snprintf(all[at].id_text, sizeof all[at].id_text, "%" PRIu64 ".%" PRIu64, id >> COUNTER_BITS,
                 id & ((UINT64_C(1) << COUNTER_BITS) - 1));
    }
    struct sy_export_checkpoint *to = &all[at];
    to->shards++;
    to->rounds += (uint64_t)sqlite3_column_int64(statement, 3);
    to->tokens = DL_MAX(to->tokens, (uint64_t)sqlite3_column_int64(statement, 4));
    to->is_complete = to->is_complete && sqlite3_column_int(statement, 5) != 0;
    if (shard == 0) {
        to->wall_ns = sqlite3_column_int64(statement, 2);
        snprintf(to->name, sizeof to->name, "%s", (const char *)sqlite3_column_text(statement, 1));
    }
    return DL_OK;
}

static enum dl_rc read_list(const struct job *job, struct sy_export_checkpoint *all, uint32_t *count,
                            struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    for (uint32_t s = 0; rc == DL_OK && s < job->options->dir_count; s++) {
        AUTO_STATEMENT *statement = NULL;
        rc = prepare(job, s,
                     "SELECT id, name, wall_ns, rounds_merged, tokens, complete FROM checkpoints ORDER BY id DESC",
                     &statement, err);
        while (rc == DL_OK && sqlite3_step(statement) == SQLITE_ROW &&
               add_row(job, s, statement, all, count) == DL_OK) {
        }
    }
    return rc;
}

static char *clock_text(const struct job *job)
{
    struct dl_buf text;
    dl_buf_init(&text, CLOCK_BYTES_MAX);
    for (uint32_t p = 0; p < job->fragments; p++) {
        dl_buf_puts(&text, p == 0 ? "v" : ".");
        if (job->parts[p].version > 0) {
            dl_buf_printf(&text, "%" PRIu64, job->parts[p].version);
        } else {
            dl_buf_puts(&text, "?");
        }
    }
    return dl_buf_take(&text);
}

static enum dl_rc read_parts(struct job *job, uint64_t id, struct dl_err *err)
{
    memset(job->parts, 0, sizeof job->parts);
    enum dl_rc rc = DL_OK;
    for (uint32_t s = 0; rc == DL_OK && s < job->options->dir_count; s++) {
        AUTO_STATEMENT *statement = NULL;
        rc = id == 0
                 ? prepare(job, s, "SELECT fragment, max(version), file FROM commits WHERE kept = 1 GROUP BY fragment",
                           &statement, err)
                 : prepare(job, s,
                           "SELECT c.fragment, c.version, c.file FROM checkpoint_fragments p JOIN commits c"
                           " ON c.fragment = p.fragment AND c.version = p.version AND c.kept = 1 WHERE p.id = ?",
                           &statement, err);
        if (rc == DL_OK && id != 0) {
            sqlite3_bind_int64(statement, 1, (sqlite3_int64)id);
        }
        while (rc == DL_OK && sqlite3_step(statement) == SQLITE_ROW) {
            uint32_t fragment = (uint32_t)sqlite3_column_int(statement, 0);
            if (fragment < job->fragments) {
                job->parts[fragment].version = (uint64_t)sqlite3_column_int64(statement, 1);
                snprintf(job->parts[fragment].file, sizeof job->parts[0].file, "%s",
                         (const char *)sqlite3_column_text(statement, 2));
            }
        }
    }
    return rc;
}

enum dl_rc sy_export_list(const struct sy_export_options *options, struct sy_export_checkpoint **out, uint32_t *count,
                          struct dl_err *err)
{
    struct job *job = calloc(1, sizeof *job);
    struct sy_export_checkpoint *all = calloc(SY_EXPORT_CHECKPOINTS_MAX, sizeof *all);
    *count = 0;
    enum dl_rc rc = job == NULL || all == NULL ? dl_err_set(err, DL_ENOMEM, "listing checkpoints: no memory")
                                               : open_job(job, options, err);
    rc = rc == DL_OK ? read_list(job, all, count, err) : rc;
    for (uint32_t i = 0; rc == DL_OK && i < *count; i++) {
        rc = read_parts(job, all[i].id, err);
        all[i].clock = clock_text(job);
    }
    if (job != NULL) {
        close_all(job);
    }
    free(job);
    if (rc != DL_OK) {
        sy_export_free(all, *count);
        return rc;
    }
    *out = all;
    return DL_OK;
}

void sy_export_free(struct sy_export_checkpoint *checkpoints, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        free(checkpoints[i].clock);
    }
    free(checkpoints);
}

enum dl_rc sy_export_job(const struct sy_export_options *options, char name[DL_SPEC_NAME_MAX],
                         struct dl_layout **layout, struct dl_err *err)
{
    DL_AUTO_FREE struct job *job = calloc(1, sizeof *job);
    if (job == NULL) {
        return dl_err_set(err, DL_ENOMEM, "reading the job: no memory");
    }
    enum dl_rc rc = open_job(job, options, err);
    if (rc == DL_OK) {
        memcpy(name, job->name, sizeof job->name);
        *layout = dl_take(job->layout);
    }
    close_all(job);
    return rc;
}

enum dl_rc sy_export_find(const struct sy_export_options *options, bool whole, uint64_t *id,
                          char name[SY_EXPORT_TEXT_MAX], struct dl_err *err)
{
    struct sy_export_checkpoint *all = NULL;
    uint32_t count = 0;
    enum dl_rc rc = sy_export_list(options, &all, &count, err);
    if (rc != DL_OK) {
        return rc;
    }
    bool is_whole = false;
    *id = 0;
    for (uint32_t i = 0; i < count && *id == 0; i++) {
        const char *wanted = options->checkpoint;
        if (strcmp(all[i].id_text, wanted) == 0 || strcmp(all[i].name, wanted) == 0 ||
            (all[i].clock != NULL && strcmp(all[i].clock, wanted) == 0)) {
            *id = all[i].id;
            is_whole = all[i].shards == options->dir_count;
            snprintf(name, SY_EXPORT_TEXT_MAX, "%s", all[i].id_text);
        }
    }
    sy_export_free(all, count);
    if (*id != 0 && whole && !is_whole) {
        return dl_err_set(err, DL_ENOTFOUND, "checkpoint %s is not in every shard", name);
    }
    return *id != 0
               ? DL_OK
               : dl_err_set(err, DL_ENOTFOUND, "there is no checkpoint '%s': `diloco checkpoint RUN --list` says which",
                            options->checkpoint);
}

/* --- weights ---------------------------------------------------------------------------------------------------------- */

static enum dl_rc read_fragment(struct job *job, uint32_t p, float *fragment, struct dl_err *err)
{
    const struct part *part = &job->parts[p];
    if (part->version == 0) {
        return dl_err_set(err, DL_ENOTFOUND, "%s has no version of fragment %u there",
                          job->options->dirs[p % job->options->dir_count], p);
    }
    return sy_store_read_file(job->options->dirs[p % job->options->dir_count], part->file, p, part->version, fragment,
                              job->layout->fragments[p].padded_elements * sizeof(float), NULL, 0, err);
}

static enum dl_rc read_all(struct job *job, uint64_t id, float *const *tensors, float *fragment, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    for (int tries = 0; tries < TRIES; tries++) {
        rc = read_parts(job, id, err);
        for (uint32_t p = 0; rc == DL_OK && p < job->fragments; p++) {
            rc = read_fragment(job, p, fragment, err);
            if (rc == DL_OK) {
                dl_layout_scatter(job->layout, p, fragment, tensors);
            }
        }
        if (rc != DL_ECORRUPT || id != 0) {
            break; /* Of the newest versions, one may just have given way to the next. */
        }
    }
    return rc;
}

static enum dl_rc write_weights(const struct job *job, const float *const *tensors, char *clock, char *checkpoint,
                                struct dl_err *err)
{
    char path[PATH_BYTES], name[DL_SPEC_NAME_MAX];
    static char format[] = "format", pt[] = "pt", job_key[] = "job", checkpoint_key[] = "checkpoint",
                versions[] = "versions";
    snprintf(name, sizeof name, "%s", job->name);
    const struct dl_safetensors_pair metadata[] = {
        {format, pt}, {job_key, name}, {versions, clock}, {checkpoint_key, checkpoint}};
    if (mkdir(job->options->out, 0755) != 0 && errno != EEXIST) {
        return dl_err_errno(err, DL_EIO, errno, "making the folder %s", job->options->out);
    }
    snprintf(path, sizeof path, "%s/model.safetensors", job->options->out);
    return dl_safetensors_write(path, job->layout->tensors, tensors, job->layout->tensor_count, metadata,
                                checkpoint[0] != 0 ? 4 : 3, err);
}

/* Of the model that the job names, when the tensors are that model's. */
static enum dl_rc write_config(const struct job *job, bool *is_written, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    struct dl_spec *spec = NULL;
    enum dl_rc rc = prepare(job, 0, "SELECT spec FROM specs ORDER BY epoch DESC LIMIT 1", &statement, err);
    if (rc == DL_OK && sqlite3_step(statement) == SQLITE_ROW) {
        const char *text = (const char *)sqlite3_column_text(statement, 0);
        rc = dl_spec_parse_stored(text, (size_t)sqlite3_column_bytes(statement, 0), "the job in tape.db", &spec, err);
    }
    if (rc == DL_OK && spec != NULL &&
        dl_model_config_fits(&spec->training.model, job->layout->tensors, job->layout->tensor_count)) {
        char path[PATH_BYTES];
        snprintf(path, sizeof path, "%s/config.json", job->options->out);
        rc = dl_model_config_write(&spec->training.model, path, err);
        *is_written = rc == DL_OK;
    }
    dl_spec_free(spec);
    return rc;
}

static enum dl_rc export_job(struct job *job, uint64_t id, char *checkpoint, char **clock, bool *has_config,
                             struct dl_err *err)
{
    assert(job->layout != NULL);
    float **tensors = calloc(job->layout->tensor_count, sizeof *tensors);
    float *fragment = dl_alloc_aligned(job->layout->padded_elements_max * sizeof(float));
    bool has_memory = tensors != NULL && fragment != NULL;
    for (uint32_t i = 0; has_memory && i < job->layout->tensor_count; i++) {
        tensors[i] = dl_alloc_aligned(dl_tensor_elements(&job->layout->tensors[i]) * sizeof(float));
        has_memory = tensors[i] != NULL;
    }
    enum dl_rc rc = has_memory
                        ? read_all(job, id, tensors, fragment, err)
                        : dl_err_set(err, DL_ENOMEM, "no memory for %" PRIu64 " parameters", job->layout->elements);
    if (rc == DL_OK) {
        *clock = clock_text(job);
        rc = *clock == NULL ? dl_err_set(err, DL_ENOMEM, "no memory")
                            : write_weights(job, (const float *const *)tensors, *clock, checkpoint, err);
    }
    rc = rc == DL_OK ? write_config(job, has_config, err) : rc;
    for (uint32_t i = 0; tensors != NULL && i < job->layout->tensor_count; i++) {
        free(tensors[i]);
    }
    free(tensors);
    free(fragment);
    return rc;
}

enum dl_rc sy_export_weights(const struct sy_export_options *options, char **clock, bool *has_config,
                             struct dl_err *err)
{
    uint64_t id = 0;
    char checkpoint[SY_EXPORT_TEXT_MAX] = "";
    *clock = NULL;
    *has_config = false;
    enum dl_rc rc = options->checkpoint == NULL ? DL_OK : sy_export_find(options, false, &id, checkpoint, err);
    struct job *job = calloc(1, sizeof *job);
    if (rc != DL_OK || job == NULL) {
        free(job);
        return rc != DL_OK ? rc : dl_err_set(err, DL_ENOMEM, "exporting: no memory");
    }
    rc = open_job(job, options, err);
    rc = rc == DL_OK ? export_job(job, id, checkpoint, clock, has_config, err) : rc;
    close_all(job);
    free(job);
    return rc;
}
