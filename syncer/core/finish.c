#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/internal.h"

static void begin(struct sy_core *core, int64_t now_ns, enum dl_stop_result result, const char *text)
{
    core->stopping = true;
    core->stop_result = result;
    snprintf(core->stop_text, sizeof core->stop_text, "%s", text);
    core->finish_end_ns = now_ns + sy_ns(core->spec->sync.finish_seconds);
    sy_act_text(core, SY_ACT_NOTE, SY_NO_MEMBER, false, "finishing: %.200s", text);
}

static void end(struct sy_core *core, int64_t now_ns)
{
    core->ended = true;
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        struct sy_round *round = &core->fragments[f].open;
        for (uint32_t m = 0; round->state == SY_ROUND_PULLING && m < core->member_max; m++) {
            if (round->parts[m].state == SY_PART_HAVE) {
                sy_verdict(core, m, sy_global(core, f), round->id, DL_VERDICT_BELOW_QUORUM);
            }
        }
        if (round->state == SY_ROUND_PULLING) {
            round->state = SY_ROUND_IDLE;
        }
    }
    for (uint32_t m = 0; m < core->member_max; m++) {
        struct sy_member *member = &core->members[m];
        if (member->used && member->connected) {
            member->heard_ns = now_ns;
            sy_act(core, &(struct sy_queued){.type = SY_ACT_STOP, .member = m, .as.stop = (uint8_t)core->stop_result, .text = -1});
        }
    }
}

void sy_core_on_stop_request(struct sy_core *core, int64_t now_ns, enum dl_stop_result result, const char *text)
{
    if (core->ended) {
        return;
    }
    if (!core->stopping) {
        begin(core, now_ns, result, text);
    }
    if (result == DL_STOP_FAILED) {
        core->stop_result = result;
        snprintf(core->stop_text, sizeof core->stop_text, "%s", text);
        end(core, now_ns);
        return;
    }
    sy_finish_step(core, now_ns);
}

void sy_finish_check(struct sy_core *core, int64_t now_ns)
{
    if (core->stopping || core->ended) {
        return;
    }
    char text[DL_WIRE_TEXT_MAX];
    const struct dl_training_spec *training = &core->spec->training;
    int64_t deadline = core->spec->active_deadline_seconds;
    if (core->tokens >= training->token_budget) {
        snprintf(text, sizeof text, "token budget of %" PRIu64 " reached", training->token_budget);
        begin(core, now_ns, DL_STOP_SUCCEEDED, text);
    } else if (training->round_budget > 0 && core->rounds_merged >= training->round_budget) {
        snprintf(text, sizeof text, "round budget of %" PRIu64 " reached", training->round_budget);
        begin(core, now_ns, DL_STOP_SUCCEEDED, text);
    } else if (deadline > 0 && core->first_event_ns != INT64_MIN &&
               now_ns - core->first_event_ns >= deadline * INT64_C(1000000000)) {
        snprintf(text, sizeof text, "activeDeadlineSeconds of %" PRId64 " passed", deadline);
        begin(core, now_ns, DL_STOP_TIMEOUT, text);
    }
}

/* Every fragment is merged once more from whoever has trained since its last update; then STOP, after the last BROADCASTs. */
void sy_finish_step(struct sy_core *core, int64_t now_ns)
{
    if (!core->stopping || core->ended) {
        return;
    }
    bool is_over = now_ns >= core->finish_end_ns;
    bool all_done = true;
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        struct sy_fragment_state *fragment = &core->fragments[f];
        if (fragment->open.state == SY_ROUND_IDLE && !fragment->final_done && fragment->version > 0 && !is_over) {
            fragment->final_done = true;
            sy_round_open(core, now_ns, f, 1, false, true);
        }
        /* A commit that is under way is waited for as long again; then the last committed version stands. */
        bool is_busy = fragment->open.state == SY_ROUND_MERGING &&
                       now_ns < core->finish_end_ns + sy_ns(core->spec->sync.finish_seconds);
        all_done = all_done && !is_busy && (is_over || fragment->open.state == SY_ROUND_IDLE);
    }
    if (all_done) {
        end(core, now_ns);
    }
}
