/* How shards' views become one: the rules stand in status.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "operator/reconcile/status.h"

static double least(double a, double b)
{
    return isnan(a) ? b : (isnan(b) ? a : DL_MIN(a, b));
}

/* Succeeded only when all have; the enum's order is that of the harm. */
static int worse_result(int a, int b)
{
    return a == OP_STATUS_RESULT_NONE || b == OP_STATUS_RESULT_NONE ? OP_STATUS_RESULT_NONE : DL_MAX(a, b);
}

static void combine_scalars(struct op_job_status *all, const struct op_job_status *one, bool is_first)
{
    if (is_first) {
        snprintf(all->job, sizeof all->job, "%s", one->job);
        all->connected = one->connected;
        all->quorum_have = one->quorum_have;
        all->uptime_seconds = one->uptime_seconds;
        all->result = one->result;
        all->token_budget = one->token_budget;
    }
    all->round += one->round;
    all->step = DL_MAX(all->step, one->step);
    all->token_budget = DL_MAX(all->token_budget, one->token_budget);
    all->connected = DL_MIN(all->connected, one->connected);
    all->quorum_have = DL_MIN(all->quorum_have, one->quorum_have);
    all->quorum_need = DL_MAX(all->quorum_need, one->quorum_need);
    all->learners_wanted = DL_MAX(all->learners_wanted, one->learners_wanted);
    all->goodput = least(all->goodput, one->goodput);
    all->joins = DL_MAX(all->joins, one->joins);
    all->refusals = DL_MAX(all->refusals, one->refusals);
    all->grace_seconds = DL_MAX(all->grace_seconds, one->grace_seconds);
    all->bytes_in += one->bytes_in;
    all->bytes_out += one->bytes_out;
    all->resident_bytes += one->resident_bytes;
    all->uptime_seconds = DL_MIN(all->uptime_seconds, one->uptime_seconds);
    all->result = worse_result(all->result, one->result);
    for (int i = 0; i < DL_VERDICT_COUNT; i++) {
        all->verdicts[i] += one->verdicts[i];
    }
    for (int i = 0; i < OP_LEAVE_KINDS; i++) {
        all->leaves[i] = DL_MAX(all->leaves[i], one->leaves[i]);
    }
    for (int i = 0; i < OP_TIME_KINDS; i++) {
        all->times[i] = DL_MAX(all->times[i], one->times[i]);
    }
    const struct op_validation *first = &one->validation_first, *last = &one->validation_last;
    if (first->known && (!all->validation_first.known || first->tokens < all->validation_first.tokens)) {
        all->validation_first = *first;
    }
    if (last->known && (!all->validation_last.known || last->tokens > all->validation_last.tokens)) {
        all->validation_last = *last;
    }
}

/* What is not a sum or an extreme by itself: taken from the shard that decides. Ties go to the lower shard number. */
static void combine_choices(struct op_job_status *all, const struct op_job_status *one, bool is_first)
{
    bool knows_more = one->tokens > all->tokens || (isnan(all->loss) && !isnan(one->loss));
    if (is_first || one->phase < all->phase || (one->phase == all->phase && knows_more)) {
        snprintf(all->message, sizeof all->message, "%s", one->message);
    }
    all->phase = is_first ? one->phase : DL_MIN(all->phase, one->phase);
    if ((is_first || knows_more) && !isnan(one->loss)) {
        all->loss = one->loss;
    }
    all->tokens = DL_MAX(all->tokens, one->tokens);
    all->data = one->data.known ? one->data : all->data;
}

static void combine_learner(struct op_learner_status *all, const struct op_learner_status *one)
{
    all->link = DL_MIN(all->link, one->link);
    if (one->step > all->step) {
        all->step = one->step;
        all->loss = one->loss;
    }
    all->admission = 0;
    all->tokens = DL_MAX(all->tokens, one->tokens);
    all->tokens_per_second = DL_MAX(all->tokens_per_second, one->tokens_per_second);
    all->step_seconds = DL_MAX(all->step_seconds, one->step_seconds);
    all->behind = DL_MAX(all->behind, one->behind);
    all->heard_seconds_ago = DL_MIN(all->heard_seconds_ago, one->heard_seconds_ago);
    all->waited_seconds = DL_MAX(all->waited_seconds, one->waited_seconds);
    all->pushes_merged += one->pushes_merged;
    all->state_from = DL_MAX(all->state_from, one->state_from);
    all->shards += one->shards;
}

/* A process that came back under the same uid is listed several times by one shard, newest admission first. */
static bool is_superseded(const struct op_learner_status *entries, uint32_t index)
{
    const struct op_learner_status *entry = &entries[index];
    for (uint32_t i = index; i > 0 && entries[i - 1].learner == entry->learner; i--) {
        if (strcmp(entries[i - 1].uid, entry->uid) == 0) {
            return true;
        }
    }
    return false;
}

/* One entry a (learner id, uid). */
static void combine_learners(struct op_job_status *all, const struct op_job_status *one)
{
    uint32_t before = all->learner_count;
    for (uint32_t i = 0; i < one->learner_count; i++) {
        const struct op_learner_status *entry = &one->learners[i];
        if (is_superseded(one->learners, i)) {
            continue;
        }
        uint32_t at = 0;
        while (at < before &&
               (all->learners[at].learner != entry->learner || strcmp(all->learners[at].uid, entry->uid) != 0)) {
            at++;
        }
        if (at < before) {
            combine_learner(&all->learners[at], entry);
        } else {
            all->learners[all->learner_count++] = *entry;
        }
    }
}

/* A connected incarnation stands before those that are gone; then the one that more is known of. */
static int compare_combined(const void *left, const void *right)
{
    const struct op_learner_status *a = left, *b = right;
    if (a->learner != b->learner) {
        return a->learner < b->learner ? -1 : 1;
    }
    if (a->admission != b->admission) {
        return a->admission > b->admission ? -1 : 1;
    }
    if (a->link != b->link) {
        return a->link > b->link ? -1 : 1;
    }
    if (a->heard_seconds_ago < b->heard_seconds_ago || a->heard_seconds_ago > b->heard_seconds_ago) {
        return a->heard_seconds_ago < b->heard_seconds_ago ? -1 : 1;
    }
    return strcmp(a->uid, b->uid);
}

static int compare_fragments(const void *left, const void *right)
{
    const struct op_fragment_status *a = left, *b = right;
    return a->fragment == b->fragment ? 0 : (a->fragment < b->fragment ? -1 : 1);
}

/* Everyone that some shard counts as connected but not all list is not yet (or no longer) part of the ensemble. */
static void mark_partly_connected(struct op_job_status *all)
{
    for (uint32_t i = 0; i < all->learner_count; i++) {
        if (all->learners[i].link == OP_LINK_CONNECTED && all->learners[i].shards < all->shards_heard) {
            all->learners[i].link = OP_LINK_LOST;
        }
    }
}

enum dl_rc op_status_combine(const struct op_job_status *const *shards, uint32_t count, struct op_job_status *out,
                             struct dl_err *err)
{
    struct op_job_status all;
    op_status_init(&all);
    all.shards = count;
    size_t learners = 0, fragments = 0;
    for (uint32_t i = 0; i < count; i++) {
        learners += shards[i] != NULL ? shards[i]->learner_count : 0;
        fragments += shards[i] != NULL ? shards[i]->fragment_count : 0;
    }
    all.learners = calloc(learners + 1, sizeof *all.learners);
    all.fragments = calloc(fragments + 1, sizeof *all.fragments);
    if (all.learners == NULL || all.fragments == NULL) {
        op_status_release(&all);
        return dl_err_set(err, DL_ENOMEM, "no memory to combine the status of %u shards", count);
    }
    double weight = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct op_job_status *one = shards[i];
        if (one == NULL) {
            continue;
        }
        bool is_first = all.shards_heard == 0;
        combine_choices(&all, one, is_first);
        combine_scalars(&all, one, is_first);
        combine_learners(&all, one);
        memcpy(all.fragments + all.fragment_count, one->fragments, one->fragment_count * sizeof *one->fragments);
        all.fragment_count += one->fragment_count;
        all.tokens_merged += one->tokens_merged * (double)one->fragment_count;
        weight += (double)one->fragment_count;
        all.shards_heard++;
    }
    all.tokens_merged = weight > 0 ? all.tokens_merged / weight : 0;
    mark_partly_connected(&all);
    qsort(all.learners, all.learner_count, sizeof *all.learners, compare_combined);
    qsort(all.fragments, all.fragment_count, sizeof *all.fragments, compare_fragments);
    if (all.shards_heard > 0 && all.shards_heard < count) {
        all.result = OP_STATUS_RESULT_NONE;
        all.phase = OP_STATUS_UNREACHABLE;
        snprintf(all.message, sizeof all.message, "%u of %u syncers answer", all.shards_heard, count);
    }
    op_status_release(out);
    *out = all;
    return DL_OK;
}
