#include "operator/local/pace.h"

#include <string.h>

#include "common/hash.h"
#include "common/mem.h"

static uint64_t oldest(const struct op_pace *pace)
{
    return pace->taken > OP_PACE_SAMPLES ? pace->taken - OP_PACE_SAMPLES : 0;
}

void op_pace_sample(struct op_pace *pace, const struct op_job_status *status, int64_t now_ns)
{
    uint64_t slot = pace->taken % OP_PACE_SAMPLES;
    pace->at_ns[slot] = now_ns;
    memset(pace->entries[slot], 0, sizeof pace->entries[slot]);
    for (uint32_t i = status->learner_count;
         i-- > 0;) { /* Backwards: the newest incarnation of an id is written last. */
        const struct op_learner_status *learner = &status->learners[i];
        if (learner->learner < OP_PACE_LEARNERS_MAX && learner->link == OP_LINK_CONNECTED) {
            pace->entries[slot][learner->learner] = (struct op_pace_entry){
                .step = learner->step, .who = dl_hash64(learner->uid, strlen(learner->uid), 0) | 1};
        }
    }
    pace->taken++;
}

bool op_pace_rate(const struct op_pace *pace, uint32_t learner, int64_t from_ns, int64_t to_ns, double *rate)
{
    uint64_t who = 0, last_step = 0, first_step = 0, last_change_step = 0;
    int64_t first_ns = -1, last_ns = -1;
    for (uint64_t i = oldest(pace); i < pace->taken; i++) {
        uint64_t slot = i % OP_PACE_SAMPLES;
        int64_t at_ns = pace->at_ns[slot];
        if (at_ns < from_ns || at_ns > to_ns) {
            continue;
        }
        const struct op_pace_entry *entry = &pace->entries[slot][learner];
        if (entry->who == 0 || (who != 0 && entry->who != who)) {
            return false;
        }
        bool has_changed = who != 0 && entry->step != last_step;
        who = entry->who;
        last_step = entry->step;
        if (has_changed && first_ns < 0) {
            first_ns = at_ns;
            first_step = entry->step;
        }
        if (has_changed) {
            last_ns = at_ns;
            last_change_step = entry->step;
        }
    }
    if (last_ns <= first_ns || last_change_step <= first_step) {
        return false;
    }
    *rate = (double)(last_change_step - first_step) * 1e9 / (double)(last_ns - first_ns);
    return true;
}

void op_pace_compare(const struct op_pace *pace, uint32_t except, int64_t from_ns, int64_t event_ns, int64_t to_ns,
                     struct op_pace_change *change)
{
    *change = (struct op_pace_change){.before_seconds = (double)(event_ns - from_ns) * 1e-9,
                                      .after_seconds = (double)(to_ns - event_ns) * 1e-9};
    for (uint32_t learner = 0; learner < OP_PACE_LEARNERS_MAX; learner++) {
        double before = 0, after = 0;
        if (learner == except || !op_pace_rate(pace, learner, from_ns, event_ns, &before) ||
            !op_pace_rate(pace, learner, event_ns, to_ns, &after)) {
            continue;
        }
        double ratio = after / before;
        change->worst = change->learners == 0 ? ratio : DL_MIN(change->worst, ratio);
        change->before += before;
        change->after += after;
        change->learners++;
    }
    change->ratio = change->learners > 0 ? change->after / change->before : 0;
}

int64_t op_pace_steady_since(const struct op_pace *pace, int64_t at_ns)
{
    const struct op_pace_entry *then = NULL;
    int64_t since_ns = at_ns;
    for (uint64_t i = pace->taken; i-- > oldest(pace);) {
        uint64_t slot = i % OP_PACE_SAMPLES;
        if (pace->at_ns[slot] > at_ns) {
            continue;
        }
        then = then != NULL ? then : pace->entries[slot];
        for (uint32_t learner = 0; learner < OP_PACE_LEARNERS_MAX; learner++) {
            const struct op_pace_entry *entry = &pace->entries[slot][learner];
            if (entry->who != then[learner].who || (entry->who != 0 && entry->step == 0)) {
                return since_ns;
            }
        }
        since_ns = pace->at_ns[slot];
    }
    return since_ns;
}
