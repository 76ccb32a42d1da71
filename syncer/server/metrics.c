#include <stdio.h>

#include "common/buf.h"
#include "common/mem.h"
#include "common/metrics.h"
#include "syncer/server/internal.h"

#define TEXT_BYTES_MAX (4u * 1024 * 1024)

static void plain(struct dl_metrics *m, const char *name, const char *type, const char *help, double value)
{
    dl_metrics_family(m, name, type, help);
    dl_metrics_value(m, value, (char *)NULL);
}

static void counter(struct dl_metrics *m, const char *name, const char *help, uint64_t value)
{
    plain(m, name, "counter", help, (double)value);
}

static void gauge(struct dl_metrics *m, const char *name, const char *help, double value)
{
    plain(m, name, "gauge", help, value);
}

static void write_progress(const struct sy_server *server, struct dl_metrics *m, const struct sy_core_view *view)
{
    counter(m, "diloco_rounds_merged_total", "Rounds merged and committed.", view->rounds_merged);
    counter(m, "diloco_tokens_total", "Tokens trained by all learners, as they report.", view->tokens);
    counter(m, "diloco_tokens_merged_total", "Tokens carried by merged pushes, averaged over fragments.",
            view->tokens_merged);
    gauge(m, "diloco_token_budget", "Tokens at which the job is done.", (double)server->spec->training.token_budget);
    gauge(m, "diloco_step", "The furthest learner's inner step.", (double)view->step);
    gauge(m, "diloco_loss", "Mean of the learners' last losses, token-weighted.", (double)view->loss);
    if (view->evaluated) {
        gauge(m, "diloco_validation_loss", "Last validation loss of the global model.", view->last_evaluation.loss);
    }
    gauge(m, "diloco_goodput_ratio", "Learner time spent computing over replicas times elapsed time.", view->goodput);
    gauge(m, "diloco_merge_agreement_ratio", "Mean cosine between deltas and merged delta, last merge.",
          server->agreement);
    dl_metrics_family(m, "diloco_phase", "gauge", "1 for the phase the shard is in.");
    for (int i = SY_WAITING_FOR_LEARNERS; i <= SY_ENDED; i++) {
        dl_metrics_value(m, (int)view->phase == i ? 1 : 0, "phase", sy_phase_name((enum sy_phase)i), (char *)NULL);
    }
    dl_metrics_family(m, "diloco_fragment_version", "gauge", "Committed version.");
    for (uint32_t i = 0; i < server->fragment_count; i++) {
        char label[16];
        struct sy_fragment_view fragment;
        snprintf(label, sizeof label, "%u", server->fragments[i].fragment);
        if (sy_core_fragment(server->core, server->fragments[i].fragment, &fragment)) {
            dl_metrics_value(m, (double)fragment.version, "fragment", label, (char *)NULL);
        }
    }
}

static void write_members(const struct sy_server *server, struct dl_metrics *m, const struct sy_core_view *view)
{
    static const char *const leaves[] = {"goodbye", "preempted", "lost", "superseded", "protocol"};
    gauge(m, "diloco_learners_connected", "Learners connected.", view->connected);
    gauge(m, "diloco_learners_wanted", "learners.replicas of the job.", server->spec->learners.replicas);
    gauge(m, "diloco_quorum_have", "Learners that count towards the quorum.", view->quorum_have);
    gauge(m, "diloco_quorum_need", "Learners a round needs.", view->quorum_need);
    counter(m, "diloco_joins_total", "Admissions.", view->joins);
    dl_metrics_family(m, "diloco_leaves_total", "counter", "Members that left, by reason.");
    for (size_t i = 0; i < DL_COUNT_OF(leaves); i++) {
        dl_metrics_value(m, (double)view->leaves[i], "reason", leaves[i], (char *)NULL);
    }
    counter(m, "diloco_recoveries_total", "Joiners that took over the state of a peer.", view->recoveries);
    counter(m, "diloco_refusals_total", "HELLOs refused.", view->refusals + server->counters.refusals);
    dl_metrics_family(m, "diloco_pushes_total", "counter", "Pushes by verdict.");
    for (int i = 0; i < DL_VERDICT_COUNT; i++) {
        dl_metrics_value(m, (double)view->verdicts[i], "verdict", dl_verdict_name((enum dl_verdict)i), (char *)NULL);
    }
}

static void write_learners(const struct sy_server *server, struct dl_metrics *m)
{
    static const struct {
        const char *name, *help;
    } families[] = {{"diloco_learner_step", "Inner step of a connected learner."},
                    {"diloco_learner_tokens_per_second", "Its rate of training."},
                    {"diloco_learner_versions_behind", "Most versions it is behind, over the shard's fragments."},
                    {"diloco_learner_waited_seconds", "Time its steps were held up by synchronisation."}};
    for (size_t f = 0; f < DL_COUNT_OF(families); f++) {
        dl_metrics_family(m, families[f].name, "gauge", families[f].help);
        for (uint32_t i = 0; i < sy_core_members(server->core); i++) {
            struct sy_member_view view;
            char label[16];
            if (!sy_core_member(server->core, i, &view) || !view.connected || view.role != DL_ROLE_LEARNER) {
                continue;
            }
            const double values[] = {(double)view.step, view.tokens_per_second, (double)view.versions_behind,
                                     (double)view.waited_ns / 1e9};
            snprintf(label, sizeof label, "%u", view.learner);
            dl_metrics_value(m, values[f], "learner", label, (char *)NULL);
        }
    }
}

static void write_times(const struct sy_server *server, struct dl_metrics *m, const struct sy_core_view *view)
{
    const struct {
        const char *stage;
        const struct dl_histogram *histogram;
    } stages[] = {{"collect", &server->seconds.collect},
                  {"merge", &server->seconds.merge},
                  {"commit", &server->seconds.commit},
                  {"total", &server->seconds.total}};
    dl_metrics_family(m, "diloco_round_seconds", "histogram",
                      "A round by stage: pull to close, merge with encoding, end of merge to durable; total is "
                      "pull to broadcast.");
    for (size_t i = 0; i < DL_COUNT_OF(stages); i++) {
        dl_metrics_histogram(m, stages[i].histogram, "stage", stages[i].stage);
    }
    dl_metrics_family(m, "diloco_transfer_seconds", "histogram",
                      "Transfers; a push, from its announcement to its last byte.");
    dl_metrics_histogram(m, &server->seconds.push, "direction", "push");
    dl_metrics_family(m, "diloco_round_mean_seconds", "gauge", "Running mean of a round's stages.");
    dl_metrics_value(m, view->times.wait, "stage", "wait", (char *)NULL);
    dl_metrics_value(m, view->times.transfer, "stage", "transfer", (char *)NULL);
    dl_metrics_value(m, view->times.grace, "stage", "grace", (char *)NULL);
    dl_metrics_value(m, view->times.merge, "stage", "merge", (char *)NULL);
    dl_metrics_value(m, view->times.commit, "stage", "commit", (char *)NULL);
    dl_metrics_value(m, view->times.total, "stage", "total", (char *)NULL);
    gauge(m, "diloco_grace_seconds", "Last computed grace window.", view->grace_seconds);
}

static void write_recent(const struct sy_server *server, struct dl_metrics *m)
{
    dl_metrics_family(m, "diloco_round_recent_seconds", "gauge",
                      "The last 64 rounds by stage: wait, transfer, merge, commit, held (of it), broadcast.");
    for (int stage = 0; stage < SY_STAGE_COUNT; stage++) {
        struct sy_spread spread;
        const char *name = sy_stage_name((enum sy_stage)stage);
        if (sy_times_recent(server, (enum sy_stage)stage, &spread)) {
            dl_metrics_value(m, spread.min, "stage", name, "of", "min", (char *)NULL);
            dl_metrics_value(m, spread.median, "stage", name, "of", "median", (char *)NULL);
            dl_metrics_value(m, spread.max, "stage", name, "of", "max", (char *)NULL);
        }
    }
}

static void write_server(const struct sy_server *server, struct dl_metrics *m)
{
    const struct sy_counters *c = &server->counters;
    gauge(m, "diloco_connections", "WebSocket connections now.", server->conn_count);
    counter(m, "diloco_connections_total", "WebSocket connections accepted.", c->connections);
    counter(m, "diloco_upgrades_denied_total", "Upgrades and stops denied: token, path, subprotocol, limit.",
            c->upgrades_denied);
    counter(m, "diloco_protocol_errors_total", "Connections closed for breaking the protocol.", c->protocol_errors);
    counter(m, "diloco_slow_connections_closed_total", "Connections closed because they took no data.", c->slow_closed);
    counter(m, "diloco_versions_skipped_total", "Versions a slow reader never got, a newer one being there first.",
            c->versions_skipped);
    counter(m, "diloco_received_bytes_total", "Bytes of messages received.", c->bytes_in);
    counter(m, "diloco_sent_bytes_total", "Bytes of messages sent.", c->bytes_out);
    counter(m, "diloco_received_messages_total", "Messages received.", c->messages_in);
    counter(m, "diloco_sent_messages_total", "Messages sent.", c->messages_out);
    gauge(m, "diloco_push_memory_bytes", "Held by pushes.", (double)server->push_bytes);
    gauge(m, "diloco_push_memory_peak_bytes", "Most that pushes have held.", (double)server->push_bytes_peak);
    gauge(m, "diloco_idle_memory_bytes", "Kept for the next push or version.",
          (double)sy_buffers_idle_bytes(server->buffers));
    gauge(m, "diloco_push_memory_limit_bytes", "Most that pushes may hold.", (double)server->push_bytes_max);
    counter(m, "diloco_push_memory_refused_total", "Pushes turned away at that limit.", c->push_memory_refused);
    counter(m, "diloco_commits_total", "Versions committed.", c->commits);
    counter(m, "diloco_commit_failures_total", "Attempts to commit that failed and were made again.",
            c->commit_failures);
    gauge(m, "diloco_store_bytes", "Bytes of stored versions.",
          server->store == NULL ? 0 : (double)sy_store_bytes(server->store));
    gauge(m, "process_resident_memory_bytes", "Resident memory.", (double)sy_resident_bytes());
    gauge(m, "diloco_uptime_seconds", "Since the process started.",
          (double)(server->now_ns - server->started_ns) / 1e9);
    gauge(m, "diloco_epoch", "Opening of the state, counted.", (double)server->epoch);
}

char *sy_metrics_text(struct sy_server *server)
{
    struct dl_buf buf;
    struct dl_metrics metrics;
    struct sy_core_view view;
    dl_buf_init(&buf, TEXT_BYTES_MAX);
    dl_metrics_begin(&metrics, &buf);
    sy_core_view(server->core, server->now_ns, &view);
    write_progress(server, &metrics, &view);
    write_members(server, &metrics, &view);
    write_learners(server, &metrics);
    write_times(server, &metrics, &view);
    write_recent(server, &metrics);
    write_server(server, &metrics);
    return dl_buf_take(&buf);
}
