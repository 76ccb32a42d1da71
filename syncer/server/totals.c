/* The job's counters between core and store: what a commit carries, what a restart takes up, what the last word is. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

static struct sy_store_evaluation of_wire(bool known, const struct dl_wire_evaluation *from)
{
    return (struct sy_store_evaluation){
        .known = known, .loss = from->loss, .tokens = from->tokens, .round = from->round, .hash = from->parameter_hash};
}

static struct dl_wire_evaluation to_wire(const struct sy_store_evaluation *from)
{
    return (struct dl_wire_evaluation){
        .loss = from->loss, .tokens = from->tokens, .round = from->round, .parameter_hash = from->hash};
}

/* As they will be once everything submitted is committed. */
void sy_server_totals(const struct sy_server *server, struct sy_store_totals *out)
{
    struct sy_core_totals totals;
    assert(server->fragment_count > 0);
    sy_core_get_totals(server->core, &totals);
    *out = (struct sy_store_totals){
        .next_round = totals.next_round,
        .rounds_merged = totals.rounds_merged + server->pending_rounds,
        .tokens = totals.tokens,
        .tokens_merged = server->token_sum / server->fragment_count,
        .tokens_merged_sum = server->token_sum,
        .next_admission = totals.next_admission,
        .step = totals.step,
        .joins = totals.joins,
        .refusals = totals.refusals,
        .busy_ns = totals.busy_ns,
        .possible_ns = totals.possible_ns,
        .first_evaluation = of_wire(totals.evaluated, &totals.first_evaluation),
        .last_evaluation = of_wire(totals.evaluated, &totals.last_evaluation),
    };
    _Static_assert(sizeof out->leaves == sizeof totals.leaves, "every way to leave has its counter");
    memcpy(out->leaves, totals.leaves, sizeof out->leaves);
    memcpy(out->verdicts, totals.verdicts, sizeof out->verdicts);
}

static bool has_changed(const struct sy_saved_member *saved, const struct sy_core_incarnation *now)
{
    return saved->born != now->born || saved->admission != now->admission || saved->tokens != now->tokens ||
           saved->step != now->step || saved->merged != now->pushes_merged || saved->has_left != now->has_left;
}

uint32_t sy_server_changed_members(struct sy_server *server, struct sy_store_member **out)
{
    struct sy_store_member *members = calloc(server->members_max, sizeof *members);
    uint32_t count = 0;
    *out = members;
    for (uint32_t m = 0; members != NULL && m < server->members_max; m++) {
        struct sy_saved_member *saved = &server->saved[m];
        struct sy_core_incarnation now;
        if (!sy_core_incarnation(server->core, m, &now)) {
            continue;
        }
        now.pushes_merged += saved->pending;
        if (!has_changed(saved, &now)) {
            continue;
        }
        struct sy_store_member *to = &members[count++];
        *to = (struct sy_store_member){.nonce = now.nonce,
                                       .learner = now.learner,
                                       .born = now.born,
                                       .admission = now.admission,
                                       .step = now.step,
                                       .tokens = now.tokens,
                                       .pushes_merged = now.pushes_merged,
                                       .has_left = now.has_left};
        memcpy(to->uid, now.uid, sizeof to->uid);
        *saved = (struct sy_saved_member){.born = now.born,
                                          .admission = now.admission,
                                          .tokens = now.tokens,
                                          .step = now.step,
                                          .merged = now.pushes_merged,
                                          .pending = saved->pending,
                                          .has_left = now.has_left};
    }
    return count;
}

static enum dl_rc restore_members(struct sy_server *server, struct dl_err *err)
{
    DL_AUTO_FREE struct sy_store_member *members = calloc(server->members_max, sizeof *members);
    if (members == NULL) {
        return dl_err_set(err, DL_ENOMEM, "restoring members: no memory");
    }
    uint32_t count = 0;
    enum dl_rc rc = sy_store_members(server->store, members, server->members_max, &count, err);
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        const struct sy_store_member *from = &members[i];
        struct sy_core_incarnation incarnation = {.learner = from->learner,
                                                  .nonce = from->nonce,
                                                  .born = from->born,
                                                  .admission = from->admission,
                                                  .step = from->step,
                                                  .tokens = from->tokens,
                                                  .pushes_merged = from->pushes_merged,
                                                  .has_left = from->has_left};
        memcpy(incarnation.uid, from->uid, sizeof incarnation.uid);
        sy_core_restore_incarnation(server->core, &incarnation);
    }
    return rc;
}

enum dl_rc sy_server_restore_totals(struct sy_server *server, struct dl_err *err)
{
    struct sy_store_totals totals;
    sy_store_get_totals(server->store, &totals);
    struct sy_core_totals core = {
        .next_round = totals.next_round,
        .next_admission = totals.next_admission,
        .rounds_merged = totals.rounds_merged,
        .tokens = totals.tokens,
        .tokens_merged = DL_MAX(totals.tokens_merged_sum, totals.tokens_merged * server->fragment_count),
        .step = totals.step,
        .joins = totals.joins,
        .refusals = totals.refusals,
        .busy_ns = totals.busy_ns,
        .possible_ns = totals.possible_ns,
        .evaluated = totals.first_evaluation.known,
        .first_evaluation = to_wire(&totals.first_evaluation),
        .last_evaluation = to_wire(&totals.last_evaluation),
    };
    memcpy(core.leaves, totals.leaves, sizeof core.leaves);
    memcpy(core.verdicts, totals.verdicts, sizeof core.verdicts);
    sy_core_restore_totals(server->core, &core);
    server->token_sum = core.tokens_merged;
    return restore_members(server, err);
}

/* Only when nothing is under way that the core has not heard of. */
void sy_server_save(struct sy_server *server)
{
    bool is_busy = server->store == NULL || server->fatal.rc != DL_OK;
    for (uint32_t i = 0; i < server->fragment_count; i++) {
        is_busy = is_busy || server->fragments[i].busy;
    }
    if (is_busy) {
        return;
    }
    struct sy_store_totals totals;
    struct sy_store_member *members = NULL;
    struct dl_err err;
    sy_server_totals(server, &totals);
    uint32_t count = sy_server_changed_members(server, &members);
    if (sy_store_save(server->store, &totals, members, count, &err) != DL_OK) {
        dl_warn("the last counters are not saved: a restart goes on from those of the last round error=\"%s\"",
                err.text);
    }
    free(members);
}
