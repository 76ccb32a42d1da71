/* What is left of a run for people (report.md, validation.svg) and for programs (report.json, --results). */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "operator/local/estimate.h"
#include "operator/local/report_chart.h"
#include "operator/local/supervisor_internal.h"
#include "operator/reconcile/json.h"

#define TIMELINE_MAX 200
#define EVALUATIONS_BYTES_MAX (16u * 1024 * 1024)

struct summary {
    struct op_estimate estimate;
    struct op_view_point *points; /* Of evaluations.jsonl where the evaluator has written it, else as polled. */
    uint32_t point_count;
    double wall_seconds, training_seconds;
    uint64_t tokens;
    double tokens_per_second;
    const struct op_drill *drill; /* The first one that could be measured, or NULL. */
};

/* --- gathering --- */

/* The evaluator's own record is complete; what was polled may lack the last ones. */
static bool read_evaluations(struct op_supervisor *s, struct summary *summary)
{
    char path[OP_PATH_MAX];
    DL_AUTO_FREE char *text = NULL;
    size_t size = 0;
    struct dl_err err;
    op_rundir_path(&s->dir, "final/evaluations.jsonl", path);
    if (op_file_read(path, EVALUATIONS_BYTES_MAX, &text, &size, &err) != DL_OK) {
        return false;
    }
    uint32_t lines = 0;
    for (const char *at = text; *at != 0; at++) {
        lines += *at == '\n' ? 1 : 0;
    }
    struct op_view_point *points = calloc(lines + 1, sizeof *points);
    uint32_t count = 0;
    for (char *line = text, *end; points != NULL && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        cJSON *tree = NULL;
        if (op_json_parse(line, (size_t)(end - line), &tree, &err) != DL_OK) {
            continue; /* Torn by a crash of the evaluator. */
        }
        struct op_view_point point = {.seconds = op_json_double(tree, "seconds", NAN),
                                      .tokens = op_json_u64(tree, "tokens", 0),
                                      .round = op_json_u64(tree, "round", 0),
                                      .loss = op_json_double(tree, "loss", NAN)};
        cJSON_Delete(tree);
        if (isfinite(point.loss)) {
            points[count++] = point;
        }
    }
    if (count == 0) {
        free(points);
        return false;
    }
    summary->points = points;
    summary->point_count = count;
    return true;
}

static bool gather(struct op_supervisor *s, struct summary *summary)
{
    *summary = (struct summary){.tokens = s->view->status.tokens};
    op_estimate_make(s->spec, &summary->estimate);
    if (!read_evaluations(s, summary)) {
        summary->points = calloc(s->view->point_count + 1, sizeof *summary->points);
        if (summary->points == NULL) {
            return false;
        }
        memcpy(summary->points, s->view->points, s->view->point_count * sizeof *summary->points);
        summary->point_count = s->view->point_count;
    }
    summary->wall_seconds = (double)(s->end_ns - s->start_ns) * 1e-9;
    summary->training_seconds = s->first_step_ns != 0 ? (double)(s->end_ns - s->first_step_ns) * 1e-9 : 0;
    summary->tokens_per_second = summary->wall_seconds > 0 ? (double)summary->tokens / summary->wall_seconds : 0;
    for (uint32_t i = 0; i < s->drill_count && summary->drill == NULL; i++) {
        summary->drill = s->drills[i].change.learners > 0 ? &s->drills[i] : NULL;
    }
    return true;
}

static double first_loss(const struct summary *summary)
{
    return summary->point_count > 0 ? summary->points[0].loss : NAN;
}

static double last_loss(const struct summary *summary)
{
    return summary->point_count > 0 ? summary->points[summary->point_count - 1].loss : NAN;
}

static uint64_t steps_of(const struct op_tally *tally)
{
    return tally->steps + tally->current.step;
}

static uint64_t tokens_of(const struct op_tally *tally)
{
    return tally->tokens + tally->current.tokens;
}

static uint64_t merged_of(const struct op_tally *tally)
{
    return tally->merged + tally->current.pushes_merged;
}

/* --- report.md --- */

static void write_figures(FILE *out, const struct op_supervisor *s, const struct summary *summary)
{
    const struct op_job_status *status = &s->view->status;
    char wall[32], parameters[32], tokens[32], rate[32], moved_in[32], moved_out[32];
    op_format_seconds(summary->wall_seconds, wall, sizeof wall);
    op_format_count((double)summary->estimate.parameters, parameters, sizeof parameters);
    op_format_count((double)summary->tokens, tokens, sizeof tokens);
    op_format_count(summary->tokens_per_second, rate, sizeof rate);
    op_format_count((double)status->bytes_in, moved_in, sizeof moved_in);
    op_format_count((double)status->bytes_out, moved_out, sizeof moved_out);
    fprintf(out, "| | |\n| --- | --- |\n");
    fprintf(out, "| result | %s (%s) |\n", op_job_phase_name(s->plan.phase), op_reason_name(s->plan.reason));
    if (summary->point_count > 0) {
        fprintf(out, "| validation loss (nats a token) | %.4f at first, **%.4f** at last, %u evaluations |\n",
                first_loss(summary), last_loss(summary), summary->point_count);
    }
    fprintf(out, "| wall time | %s (%.1f s) |\n", wall, summary->wall_seconds);
    fprintf(out, "| tokens | %s (%llu of a budget of %llu), %s a second |\n", tokens,
            (unsigned long long)summary->tokens, (unsigned long long)s->spec->training.token_budget, rate);
    fprintf(out, "| model | %s parameters (%llu) |\n", parameters, (unsigned long long)summary->estimate.parameters);
    fprintf(out, "| learners | %u wanted at the end, quorum %u, %llu joins (of learners and the evaluator) |\n",
            s->replicas, status->quorum_need, (unsigned long long)status->joins);
    fprintf(out, "| rounds merged | %llu on %u syncer shard%s, %u fragments |\n", (unsigned long long)status->round,
            s->spec->syncer.shards, s->spec->syncer.shards == 1 ? "" : "s", s->spec->sync.fragments);
    if (isfinite(status->goodput)) {
        fprintf(out, "| goodput (learner time spent computing, of learners.replicas) | %.1f %% |\n",
                100 * status->goodput);
    }
    fprintf(out, "| bytes pushed, broadcast | %sB, %sB |\n\n", moved_in, moved_out);
}

static void write_learners(FILE *out, const struct op_supervisor *s)
{
    fprintf(out, "## Learners\n\n| learner | starts | disruptions | crashes | steps | tokens | tokens/s at last | "
                 "pushes merged |\n"
                 "| --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (uint32_t id = 0; id < DL_SPEC_LEARNERS_MAX; id++) {
        const struct op_tally *tally = &s->tallies[id];
        if (tally->starts == 0) {
            continue;
        }
        fprintf(out, "| %u | %u | %u | %u | %llu | %llu | %.0f | %llu |\n", id, tally->starts, tally->disruptions,
                tally->crashes, (unsigned long long)steps_of(tally), (unsigned long long)tokens_of(tally),
                tally->tokens_per_second, (unsigned long long)merged_of(tally));
    }
    fprintf(out, "\nWhat became of pushes:");
    for (int i = 0; i < DL_VERDICT_COUNT; i++) {
        if (s->view->status.verdicts[i] > 0) {
            fprintf(out, " %s %llu;", dl_verdict_name((enum dl_verdict)i),
                    (unsigned long long)s->view->status.verdicts[i]);
        }
    }
    fprintf(out, "\n\n");
}

static void write_drills(FILE *out, const struct op_supervisor *s)
{
    if (s->drill_count == 0) {
        return;
    }
    fprintf(out, "## Learners killed on purpose\n\n");
    for (uint32_t i = 0; i < s->drill_count; i++) {
        const struct op_drill *drill = &s->drills[i];
        fprintf(out, "- learner %u at %.1f s", drill->victim, drill->at_seconds);
        if (drill->change.learners > 0) {
            fprintf(
                out,
                ": the other %u learners made %.2f steps a second in the %.1f s before and %.2f in the %.1f s after, "
                "**%.3f of before** (worst single learner %.3f)",
                drill->change.learners, drill->change.before, drill->change.before_seconds, drill->change.after,
                drill->change.after_seconds, drill->change.ratio, drill->change.worst);
        } else {
            fprintf(out, ": too few steps around it to compare the others' step rates");
        }
        if (drill->back_seconds > 0) {
            fprintf(out, "; its replacement was connected %.1f s after the kill", drill->back_seconds);
        }
        fprintf(out, "\n");
    }
    fprintf(out, "\n");
}

static void write_timeline(FILE *out, const struct op_supervisor *s)
{
    fprintf(out, "## What happened when\n\n```\n");
    uint64_t first = op_events_first(&s->events);
    uint32_t written = 0;
    for (uint64_t i = first; i < s->events.count; i++) {
        const struct op_event *event = op_events_get(&s->events, i);
        if (strcmp(event->kind, "validation") == 0) {
            continue;
        }
        if (written++ == TIMELINE_MAX) {
            fprintf(out, "... (all of it: events.jsonl)\n");
            break;
        }
        fprintf(out, "%8.2f s  %s%s%s\n", event->seconds, event->who, event->who[0] != 0 ? " " : "", event->text);
    }
    fprintf(out, "```\n\n");
}

static void write_files(FILE *out, const struct op_supervisor *s)
{
    const char *dir = s->dir.path;
    fprintf(out,
            "## Files\n\n"
            "- weights: `%s/final/model.safetensors`, architecture: `%s/final/config.json` (opens in transformers)\n"
            "- a sample: `diloco generate %s --prompt \"The word \"`\n"
            "- the job as run: `job.json`; validation losses: `final/evaluations.jsonl`; logs: `logs/`; events: "
            "`events.jsonl`; this report for programs: `report.json`\n\n",
            dir, dir, dir);
}

static void write_markdown(FILE *out, const struct op_supervisor *s, const struct summary *summary, const char *sample)
{
    fprintf(out, "# Run of job %s\n\n", s->spec->name);
    if (s->plan.phase == OP_JOB_FAILED) {
        fprintf(out, "**Failed: %s.** %s\n\n", s->plan.message, s->failure);
    }
    write_figures(out, s, summary);
    if (summary->point_count > 1) {
        fprintf(out, "![validation loss over tokens](validation.svg)\n\n```\n");
        op_chart_text(out, summary->points, summary->point_count);
        fprintf(out, "```\n\n");
    }
    write_drills(out, s);
    write_learners(out, s);
    for (uint32_t i = 0; s->options->warnings != NULL && i < s->options->warnings->count; i++) {
        fprintf(out, "%s- warning: %s\n", i == 0 ? "## Warnings about the job\n\n" : "", s->options->warnings->text[i]);
    }
    if (sample != NULL) {
        fprintf(out, "\n## Sample\n\n```\n%s\n```\n\n", sample);
    }
    write_timeline(out, s);
    write_files(out, s);
}

/* --- report.json and results --- */

static void put_learners(struct op_json_out *out, const struct op_supervisor *s)
{
    op_json_array_begin(out, "learners");
    for (uint32_t id = 0; id < DL_SPEC_LEARNERS_MAX; id++) {
        const struct op_tally *tally = &s->tallies[id];
        if (tally->starts == 0) {
            continue;
        }
        op_json_object_begin(out, NULL);
        op_json_put_u64(out, "learner", id);
        op_json_put_u64(out, "starts", tally->starts);
        op_json_put_u64(out, "disruptions", tally->disruptions);
        op_json_put_u64(out, "crashes", tally->crashes);
        op_json_put_u64(out, "steps", steps_of(tally));
        op_json_put_u64(out, "tokens", tokens_of(tally));
        op_json_put_u64(out, "pushesMerged", merged_of(tally));
        op_json_object_end(out);
    }
    op_json_array_end(out);
}

static void put_drills(struct op_json_out *out, const struct op_supervisor *s)
{
    op_json_array_begin(out, "kills");
    for (uint32_t i = 0; i < s->drill_count; i++) {
        const struct op_drill *drill = &s->drills[i];
        bool is_known = drill->change.learners > 0;
        op_json_object_begin(out, NULL);
        op_json_put_u64(out, "learner", drill->victim);
        op_json_put_double(out, "seconds", drill->at_seconds);
        op_json_put_u64(out, "learnersCompared", drill->change.learners);
        op_json_put_double(out, "stepsPerSecondBefore", is_known ? drill->change.before : NAN);
        op_json_put_double(out, "stepsPerSecondAfter", is_known ? drill->change.after : NAN);
        op_json_put_double(out, "ratio", is_known ? drill->change.ratio : NAN);
        op_json_put_double(out, "worstRatio", is_known ? drill->change.worst : NAN);
        op_json_put_double(out, "replacedAfterSeconds", drill->back_seconds > 0 ? drill->back_seconds : NAN);
        op_json_object_end(out);
    }
    op_json_array_end(out);
}

static char *report_json(const struct op_supervisor *s, const struct summary *summary)
{
    struct op_json_out out;
    op_json_out_init(&out);
    op_json_object_begin(&out, NULL);
    op_json_put_text(&out, "job", s->spec->name);
    op_json_put_text(&out, "phase", op_job_phase_name(s->plan.phase));
    op_json_put_text(&out, "reason", op_reason_name(s->plan.reason));
    op_json_put_text(&out, "failure", s->failure[0] != 0 ? s->failure : NULL);
    op_json_put_double(&out, "wallSeconds", summary->wall_seconds);
    op_json_put_double(&out, "secondsFromFirstStep", summary->training_seconds);
    op_json_put_u64(&out, "parameters", summary->estimate.parameters);
    op_json_put_u64(&out, "tokens", summary->tokens);
    op_json_put_double(&out, "tokensPerSecond", summary->tokens_per_second);
    op_json_put_double(&out, "validationLossFirst", first_loss(summary));
    op_json_put_double(&out, "validationLossLast", last_loss(summary));
    op_json_put_u64(&out, "evaluations", summary->point_count);
    put_learners(&out, s);
    put_drills(&out, s);
    op_json_object_begin(&out, "status");
    op_status_put(&s->view->status, &out);
    op_json_object_end(&out);
    op_json_object_end(&out);
    return op_json_finish(&out);
}

static void put_measure(struct op_json_out *out, const char *name, double value, const char *unit, const char *ratio_to,
                        double ratio)
{
    op_json_object_begin(out, NULL);
    op_json_put_text(out, "name", name);
    op_json_put_double(out, "value", value);
    op_json_put_text(out, "unit", unit);
    if (ratio_to != NULL) {
        op_json_put_text(out, "ratio_to", ratio_to);
        op_json_put_double(out, "ratio", ratio);
    }
    op_json_object_end(out);
}

static char *results_json(const struct op_supervisor *s, const struct summary *summary)
{
    struct op_json_out out;
    op_json_out_init(&out);
    op_json_array_begin(&out, NULL);
    double first = first_loss(summary), last = last_loss(summary);
    put_measure(&out, "val_loss_first", first, "nats/token", NULL, 0);
    put_measure(&out, "val_loss_last", last, "nats/token", "val_loss_first", last / first);
    put_measure(&out, "wall_seconds", summary->wall_seconds, "s", NULL, 0);
    if (summary->drill != NULL) {
        put_measure(&out, "kill_step_rate_ratio", summary->drill->change.ratio, "ratio",
                    "the other learners' step rate before the kill", summary->drill->change.ratio);
    }
    put_measure(&out, "tokens_per_second", summary->tokens_per_second, "tokens/s", NULL, 0);
    put_measure(&out, "rounds", (double)s->view->status.round, "rounds", NULL, 0);
    op_json_array_end(&out);
    return op_json_finish(&out);
}

/* --- all of it --- */

static enum dl_rc write_results(const struct op_supervisor *s, const struct summary *summary, struct dl_err *err)
{
    DL_AUTO_FREE char *text = results_json(s, summary);
    DL_AUTO_FILE FILE *file = text != NULL ? fopen(s->options->results, "we") : NULL;
    if (file == NULL || fprintf(file, "%s\n", text) < 0 || fflush(file) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "write the results to %s", s->options->results);
    }
    return DL_OK;
}

static enum dl_rc write_report_files(struct op_supervisor *s, const struct summary *summary, const char *sample,
                                     struct dl_err *err)
{
    char path[OP_PATH_MAX];
    op_rundir_path(&s->dir, "report.md", path);
    DL_AUTO_FILE FILE *report = fopen(path, "we");
    if (report == NULL) {
        return dl_err_errno(err, DL_EIO, errno, "write %s", path);
    }
    write_markdown(report, s, summary, sample);
    if (ferror(report) || fflush(report) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "write %s", path);
    }
    if (summary->point_count > 1) {
        op_rundir_path(&s->dir, "validation.svg", path);
        DL_AUTO_FILE FILE *chart = fopen(path, "we");
        if (chart == NULL) {
            return dl_err_errno(err, DL_EIO, errno, "write %s", path);
        }
        op_chart_svg(chart, summary->points, summary->point_count);
    }
    DL_AUTO_FREE char *json = report_json(s, summary);
    if (json == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for report.json");
    }
    return op_rundir_write(&s->dir, "report.json", json, 0666, err);
}

enum dl_rc op_report_write(struct op_supervisor *s, const char *sample, struct dl_err *err)
{
    struct summary summary;
    if (!gather(s, &summary)) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the report");
    }
    enum dl_rc rc = write_report_files(s, &summary, sample, err);
    if (rc == DL_OK && s->options->results != NULL) {
        rc = write_results(s, &summary, err);
    }
    free(summary.points);
    return rc;
}
