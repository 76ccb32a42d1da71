#include "sim/replay/record.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/replay/record_db.h"

const struct sim_commit *sim_record_commit(const struct sim_record *record, uint32_t fragment, uint64_t version)
{
    if (fragment >= record->layout->fragment_count || record->version_count[fragment] == 0) {
        return NULL;
    }
    const struct sim_commit *first = &record->commits[record->first_commit[fragment]];
    uint64_t index = version - first->version;
    return version >= first->version && index < record->version_count[fragment] ? first + index : NULL;
}

const struct dl_spec *sim_record_spec(const struct sim_record *record, uint32_t shard, uint64_t epoch)
{
    const struct sim_spec_record *best = &record->specs[0]; /* Every shard's tape has at least one. */
    for (uint32_t i = 0; i < record->spec_count; i++) {
        const struct sim_spec_record *spec = &record->specs[i];
        if (spec->shard == shard && (best->shard != shard || spec->epoch <= epoch)) {
            best = spec;
        }
    }
    return best->spec;
}

const struct dl_spec *sim_record_spec_by_hash(const struct sim_record *record, uint64_t hash, bool *found)
{
    for (uint32_t i = 0; i < record->spec_count; i++) {
        if (record->specs[i].hash == hash) {
            *found = true;
            return record->specs[i].spec;
        }
    }
    *found = false;
    return record->specs[record->spec_count - 1].spec;
}

/* --- order --- */

static const struct sim_commit *sorted_commits; /* For qsort, which takes no context. */

static int by_time(const void *a, const void *b)
{
    const struct sim_commit *left = &sorted_commits[*(const uint32_t *)a],
                            *right = &sorted_commits[*(const uint32_t *)b];
    if (left->wall_ns != right->wall_ns) {
        return left->wall_ns < right->wall_ns ? -1 : 1;
    }
    return *(const uint32_t *)a < *(const uint32_t *)b ? -1 : 1;
}

static enum dl_rc make_order(struct sim_record *record, struct dl_err *err)
{
    record->order = malloc((record->commit_count + 1) * sizeof *record->order);
    if (record->order == NULL) {
        return dl_err_set(err, DL_ENOMEM, "reading the tapes: no memory");
    }
    for (uint32_t i = 0; i < record->commit_count; i++) {
        record->order[i] = i;
    }
    sorted_commits = record->commits;
    qsort(record->order, record->commit_count, sizeof *record->order, by_time);
    return DL_OK;
}

/* --- pushes and their snapshots --- */

/* A push becomes part of the version after its base or, when it missed that round, of one of the next few. */
static void match_snapshot(struct sim_record *record, uint32_t incarnation, uint32_t index)
{
    struct sim_entry *entry = &record->incarnations[incarnation].entries[index];
    uint64_t last = entry->a + 1;
    for (uint32_t i = 0; i < record->spec_count; i++) {
        last = DL_MAX(last, entry->a + 1 + record->specs[i].spec->sync.merge.staleness_max);
    }
    for (uint64_t version = entry->a + 1; version <= last && entry->push == SIM_NO_ENTRY; version++) {
        const struct sim_commit *commit = sim_record_commit(record, entry->fragment, version);
        for (uint32_t i = 0; commit != NULL && i < commit->push_count; i++) {
            struct sim_push *push = &record->pushes[commit->first_push + i];
            if (push->incarnation == incarnation && push->step == entry->step && push->base_version == entry->a) {
                push->entry = index;
                entry->commit = (uint32_t)(commit - record->commits);
                entry->push = commit->first_push + i;
            }
        }
    }
}

static void match(struct sim_record *record)
{
    for (uint32_t i = 0; i < record->incarnation_count; i++) {
        const struct sim_incarnation_record *who = &record->incarnations[i];
        for (uint32_t k = 0; k < who->count; k++) {
            if (strcmp(who->entries[k].kind, "snapshot") == 0) {
                match_snapshot(record, i, k);
            }
        }
    }
}

/* --- who has to be executed how far --- */

uint32_t sim_record_peer(const struct sim_record *record, const struct sim_entry *entry)
{
    for (uint32_t i = 0; i < record->incarnation_count; i++) {
        if (record->incarnations[i].nonce == entry->a &&
            strcmp(record->incarnations[i].uid, entry->text == NULL ? "" : entry->text) == 0) {
            return i;
        }
    }
    return SIM_NO_INCARNATION;
}

struct sim_capture *sim_record_capture(const struct sim_record *record, uint32_t incarnation, uint64_t step)
{
    for (uint32_t i = 0; i < record->capture_count; i++) {
        if (record->captures[i].incarnation == incarnation && record->captures[i].step == step) {
            return &record->captures[i];
        }
    }
    return NULL;
}

/* The peer is needed up to the step at which its state was taken. */
static enum dl_rc need_peer(struct sim_record *record, const struct sim_entry *entry, struct dl_err *err)
{
    uint32_t peer = sim_record_peer(record, entry);
    if (peer == SIM_NO_INCARNATION) {
        return dl_err_set(err, DL_EINVAL,
                          "the tape holds nothing of %s, whose optimiser state another learner took over",
                          entry->text == NULL ? "a learner" : entry->text);
    }
    struct sim_capture *capture = sim_record_capture(record, peer, entry->b);
    if (capture == NULL) {
        capture = sim_record_grow((void **)&record->captures, &record->capture_count, sizeof *capture);
        if (capture == NULL) {
            return dl_err_set(err, DL_ENOMEM, "reading the tapes: no memory");
        }
        capture->incarnation = peer;
        capture->step = entry->b;
    }
    capture->uses++;
    struct sim_incarnation_record *who = &record->incarnations[peer];
    who->needed_steps = DL_MAX(who->needed_steps, entry->b);
    while (who->needed < who->count && who->entries[who->needed].step < entry->b) {
        who->needed++;
    }
    return DL_OK;
}

/* Its own first state, an update from before, or the state of one that is left out itself. */
static bool depends_on_older(const struct sim_record *record, const struct sim_incarnation_record *who,
                             const uint64_t *from)
{
    for (uint32_t k = 0; k < who->count; k++) {
        const struct sim_entry *entry = &who->entries[k];
        uint32_t peer = strcmp(entry->kind, "state") == 0 ? sim_record_peer(record, entry) : SIM_NO_INCARNATION;
        bool is_older = strcmp(entry->kind, "apply") == 0 && entry->fragment < record->layout->fragment_count &&
                        entry->a < from[entry->fragment];
        if (is_older || (peer != SIM_NO_INCARNATION && record->incarnations[peer].left_out)) {
            return true;
        }
    }
    return false;
}

uint32_t sim_record_leave_out(struct sim_record *record, const uint64_t *from)
{
    for (bool more = true; more;) {
        more = false;
        for (uint32_t i = 0; i < record->incarnation_count; i++) {
            struct sim_incarnation_record *who = &record->incarnations[i];
            if (!who->left_out && depends_on_older(record, who, from)) {
                who->left_out = more = true;
            }
        }
    }
    uint32_t count = 0;
    for (uint32_t i = 0; i < record->incarnation_count; i++) {
        bool has_part = false;
        for (uint32_t c = 0; c < record->commit_count && record->incarnations[i].left_out && !has_part; c++) {
            const struct sim_commit *commit = &record->commits[c];
            for (uint32_t k = 0; k < commit->push_count && commit->wanted; k++) {
                has_part = has_part || record->pushes[commit->first_push + k].incarnation == i;
            }
        }
        count += has_part ? 1 : 0;
    }
    return count;
}

enum dl_rc sim_record_plan(struct sim_record *record, struct dl_err *err)
{
    for (uint32_t i = 0; i < record->commit_count; i++) {
        const struct sim_commit *commit = &record->commits[i];
        for (uint32_t k = 0; k < commit->push_count && commit->wanted; k++) {
            const struct sim_push *push = &record->pushes[commit->first_push + k];
            struct sim_incarnation_record *who = &record->incarnations[push->incarnation];
            who->needed =
                push->entry == SIM_NO_ENTRY || who->left_out ? who->needed : DL_MAX(who->needed, push->entry + 1);
        }
    }
    /* A peer that is needed further may itself have taken over a state there. */
    DL_AUTO_FREE uint32_t *seen = calloc(record->incarnation_count + 1, sizeof *seen);
    bool more = seen != NULL;
    while (more) {
        more = false;
        for (uint32_t i = 0; i < record->incarnation_count; i++) {
            const struct sim_incarnation_record *who = &record->incarnations[i];
            for (; seen[i] < who->needed; seen[i]++) {
                const struct sim_entry *entry = &who->entries[seen[i]];
                more = true;
                if (strcmp(entry->kind, "state") == 0 && need_peer(record, entry, err) != DL_OK) {
                    return err->rc;
                }
            }
        }
    }
    return seen == NULL ? dl_err_set(err, DL_ENOMEM, "reading the tapes: no memory") : DL_OK;
}

/* --- life --- */

static enum dl_rc check_versions(const struct sim_record *record, struct dl_err *err)
{
    assert(record->layout != NULL); /* Reading a tape gives one, or fails. */
    for (uint32_t f = 0; f < record->layout->fragment_count; f++) {
        const struct sim_commit *first = &record->commits[record->first_commit[f]];
        if (record->version_count[f] == 0) {
            return dl_err_set(err, DL_EINVAL, "the tapes hold no version of fragment %u: is a shard's folder missing?",
                              f);
        }
        for (uint32_t i = 0; i < record->version_count[f]; i++) {
            if (first[i].version != first->version + i) {
                return dl_err_set(err, DL_ECORRUPT, "fragment %u: version %llu is missing in the tape", f,
                                  (unsigned long long)(first->version + i));
            }
        }
    }
    return DL_OK;
}

enum dl_rc sim_record_open(const char *const *folders, uint32_t count, struct sim_record **out, struct dl_err *err)
{
    assert(count > 0);
    struct sim_record *record = calloc(1, sizeof *record);
    if (record != NULL) {
        record->shards = count;
        record->folders = calloc(count + 1, sizeof *record->folders);
    }
    if (record == NULL || record->folders == NULL) {
        free(record);
        return dl_err_set(err, DL_ENOMEM, "reading the tapes: no memory");
    }
    enum dl_rc rc = DL_OK;
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        rc = sim_record_read(record, folders[i], err);
    }
    if (rc == DL_OK) {
        rc = check_versions(record, err);
    }
    if (rc == DL_OK) {
        rc = make_order(record, err);
    }
    if (rc != DL_OK) {
        sim_record_free(record);
        return rc;
    }
    match(record);
    *out = record;
    return DL_OK;
}

void sim_record_free(struct sim_record *record)
{
    if (record == NULL) {
        return;
    }
    for (uint32_t i = 0; i < record->incarnation_count; i++) {
        for (uint32_t k = 0; k < record->incarnations[i].count; k++) {
            free(record->incarnations[i].entries[k].text);
        }
        free(record->incarnations[i].entries);
    }
    for (uint32_t i = 0; i < record->push_count; i++) {
        free(record->pushes[i].encoded);
    }
    for (uint32_t i = 0; i < record->commit_count; i++) {
        free(record->commits[i].file);
    }
    for (uint32_t i = 0; i < record->spec_count; i++) {
        dl_spec_free(record->specs[i].spec);
    }
    for (uint32_t i = 0; i < record->capture_count; i++) {
        free(record->captures[i].bytes);
    }
    dl_layout_free(record->layout);
    free(record->captures);
    free(record->specs);
    free(record->commits);
    free(record->order);
    free(record->pushes);
    free(record->incarnations);
    free(record->folders);
    free(record);
}
