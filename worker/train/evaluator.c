#include "worker/train/evaluator.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "worker/model/export.h"
#include "worker/model/memory.h"
#include "worker/train/session.h"
#include "worker/train/stop.h"

/* Where learners compute on the same machine, an evaluation takes its time from theirs. It is in no hurry and they are,
 * so it steps back: at 5 it gets a third of a learner's share of a contended core, and all of an idle one. (At 19 it
 * would starve beside a few learners, and its figures would come minutes late.) */
#define NICENESS 5
#define POLL_SECONDS 0.5
#define RECORD "evaluations.jsonl"

struct evaluator {
    struct wk_session session;
    struct wk_dataset *dataset;
    struct wk_model *model;
    uint32_t *tokens, *targets; /* A batch of the model. */
    uint32_t sequences;
    struct diloco_info info;
    int64_t start_ns, evaluated_ns;
    bool has_evaluated;
    uint64_t evaluated_updates; /* updates_total at the last evaluation. */
};

static enum dl_exit give_up(const char *doing, const struct dl_err *err)
{
    dl_error("%s failed: %s", doing, err->text);
    return wk_exit_of_rc(err->rc);
}

enum dl_rc wk_validation_loss(struct wk_model *model, const struct wk_dataset *dataset, uint32_t *tokens,
                              uint32_t *targets, bool (*is_stopped)(void), double *loss, struct dl_err *err)
{
    struct wk_dataset_view view;
    wk_dataset_view(dataset, &view);
    double sum = 0;
    uint32_t batch = wk_model_batch_sequences(model), count;
    for (uint32_t first = 0; first < view.validation_sequences; first += count) {
        count = DL_MIN(batch, view.validation_sequences - first);
        for (uint32_t i = 0; i < count; i++) {
            size_t at = (size_t)i * view.sequence_length;
            enum dl_rc rc = wk_dataset_validation(dataset, first + i, tokens + at, targets + at, err);
            if (rc != DL_OK) {
                return rc;
            }
        }
        double mean;
        enum dl_rc rc = wk_model_loss(model, tokens, targets, count, &mean, err);
        if (rc != DL_OK) {
            return rc;
        }
        sum += mean * count;
        if (is_stopped != NULL && is_stopped()) {
            return DL_AGAIN;
        }
    }
    *loss = sum / view.validation_sequences;
    return DL_OK;
}

/* --- making --- */

static enum dl_rc make_folder(const char *path, struct dl_err *err)
{
    if (mkdir(path, 0755) != 0 && errno != EEXIST) {
        return dl_err_errno(err, errno == EACCES ? DL_EDENIED : DL_ENOTFOUND, errno,
                            "--export %s: cannot make the folder", path);
    }
    if (access(path, W_OK | X_OK) != 0) {
        return dl_err_errno(err, DL_EDENIED, errno, "--export %s: cannot write there", path);
    }
    return DL_OK;
}

static enum dl_rc prepare(struct evaluator *e, struct dl_err *err)
{
    const struct dl_training_spec *training = &e->session.spec->training;
    enum dl_rc rc = make_folder(e->session.args->export_folder, err);
    if (rc == DL_OK) {
        rc = wk_dataset_open(&training->data, &training->model, wk_memory_available() / 2, &e->dataset, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_dataset_view data;
    wk_dataset_view(e->dataset, &data);
    e->sequences = data.validation_sequences;
    if (e->sequences < training->data.validation_sequences) {
        dl_warn("held-out data is short: validation_sequences=%u wanted=%u held_out_tokens=%" PRIu64, e->sequences,
                training->data.validation_sequences, data.validation_tokens);
    }
    struct wk_model_options options = {.batch_sequences = DL_MIN(training->batch_sequences, e->sequences),
                                       .threads = DL_MAX(e->session.args->threads, 1u),
                                       .seed = training->seed,
                                       .forward_only = true};
    rc = wk_model_new(&training->model, &options, &e->model, err);
    if (rc != DL_OK) {
        return rc;
    }
    size_t batch_tokens = (size_t)options.batch_sequences * training->model.sequence_length;
    e->tokens = calloc(batch_tokens, sizeof *e->tokens);
    e->targets = calloc(batch_tokens, sizeof *e->targets);
    if (e->tokens == NULL || e->targets == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a batch of %zu tokens", batch_tokens);
    }
    return DL_OK;
}

/* --- evaluating --- */

/* One JSON object a line. A line that cannot be written is no reason to stop following the model. */
static void record(const struct evaluator *e, double loss)
{
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/" RECORD, e->session.args->export_folder);
    DL_AUTO_FILE FILE *file = length < (int)sizeof path ? fopen(path, "ae") : NULL;
    double seconds = (double)(dl_now_ns() - e->start_ns) / (double)DL_NS_PER_SECOND;
    if (file == NULL ||
        fprintf(file,
                "{\"seconds\":%.3f,\"tokens\":%" PRIu64 ",\"round\":%" PRIu64 ",\"loss\":%.6f,\"step\":%" PRIu64 "}\n",
                seconds, e->info.tokens_all, e->info.last_round, loss, e->info.ensemble_step) < 0 ||
        fflush(file) != 0) {
        dl_warn("cannot write %s: %s", path, strerror(errno));
    }
}

/* DL_AGAIN: a notice came meanwhile. */
static enum dl_rc evaluate(struct evaluator *e, struct dl_err *err)
{
    double loss;
    int64_t start_ns = dl_now_ns();
    enum dl_rc rc = wk_validation_loss(e->model, e->dataset, e->tokens, e->targets, wk_stop_asked, &loss, err);
    if (rc == DL_EINVAL) {
        /* A model that has diverged is a result like any other; it may yet recover. */
        dl_warn("evaluation impossible round=%" PRIu64 ": %s", e->info.last_round, err->text);
        rc = DL_OK;
    } else if (rc == DL_OK) {
        struct diloco_error error;
        dl_info("evaluated round=%" PRIu64 " loss=%.4f tokens_all=%" PRIu64 " sequences=%u seconds=%.2f",
                e->info.last_round, loss, e->info.tokens_all, e->sequences,
                (double)(dl_now_ns() - start_ns) / (double)DL_NS_PER_SECOND);
        if (diloco_report(e->session.diloco, loss, e->sequences, &error) != DILOCO_CONTINUE) {
            dl_warn("evaluation not reported: %s", error.text);
        }
        record(e, loss);
    }
    e->has_evaluated = true;
    e->evaluated_ns = dl_now_ns();
    e->evaluated_updates = e->info.updates_total;
    return rc;
}

static bool is_due(const struct evaluator *e)
{
    double every = e->session.spec->training.evaluation_seconds;
    if (every <= 0) {
        return false;
    }
    if (!e->has_evaluated) {
        return true;
    }
    double passed = (double)(dl_now_ns() - e->evaluated_ns) / (double)DL_NS_PER_SECOND;
    return e->info.updates_total > e->evaluated_updates && passed >= every;
}

/* Until the job is over (DILOCO_DONE and so on), or DILOCO_CONTINUE: a notice came. */
static int follow(struct evaluator *e, struct diloco_error *error, struct dl_err *err)
{
    while (!wk_stop_asked()) {
        if (is_due(e) && evaluate(e, err) == DL_AGAIN) {
            break;
        }
        int code = diloco_poll(e->session.diloco, POLL_SECONDS, &e->info, error);
        if (code != DILOCO_CONTINUE) {
            return code;
        }
    }
    return DILOCO_CONTINUE;
}

static enum dl_exit finish(struct evaluator *e, int code, const struct diloco_error *error)
{
    struct dl_err err;
    if (code == DILOCO_CONTINUE) {
        struct diloco_error leave_error;
        dl_info("asked to leave round=%" PRIu64, e->info.last_round);
        (void)diloco_leave(e->session.diloco, 1, 1, "signal", &leave_error);
    } else if (code == DILOCO_DONE || code == DILOCO_STOPPED) {
        dl_info("over: %s", error->text);
        if (evaluate(e, &err) == DL_AGAIN) {
            dl_info("asked to leave in the last evaluation");
        }
    } else {
        dl_error("over: %s", error->text);
        if (code != DILOCO_EFAILED) {
            return wk_exit_of_diloco(code);
        }
    }
    if (wk_model_export(e->model, e->session.args->export_folder, &err) != DL_OK) {
        return give_up("export", &err);
    }
    dl_info("exported folder=%s round=%" PRIu64, e->session.args->export_folder, e->info.last_round);
    return wk_exit_of_diloco(code);
}

static enum dl_exit run(struct evaluator *e)
{
    struct dl_err err;
    struct diloco_error error;
    e->start_ns = dl_now_ns();
    if (prepare(e, &err) != DL_OK) {
        return give_up("start", &err);
    }
    errno = 0;
    if (nice(NICENESS) == -1 && errno != 0) { /* Only now: learners may have waited for what it has unpacked. */
        dl_debug("cannot step back behind learners: %s", strerror(errno));
    }
    int code = wk_session_join(&e->session, DILOCO_EVALUATOR, e->model, NULL, &e->info, &error);
    if (code != DILOCO_CONTINUE) {
        /* Nothing was received, so that there is nothing to measure or export. */
        dl_log(code > 0 ? DL_LOG_INFO : DL_LOG_ERROR, "over: %s", error.text);
        return wk_exit_of_diloco(code);
    }
    dl_info("joined round=%" PRIu64 " tokens_all=%" PRIu64, e->info.last_round, e->info.tokens_all);
    code = follow(e, &error, &err);
    return finish(e, code, &error);
}

enum dl_exit wk_evaluate(const struct wk_args *args)
{
    struct evaluator e = {0};
    struct dl_err err;
    enum dl_exit code = wk_session_load(&e.session, args, &err) != DL_OK ? give_up("start", &err) : run(&e);
    wk_session_close(&e.session); /* Before the tensors go that it works on. */
    wk_model_free(e.model);
    wk_dataset_close(e.dataset);
    free(e.tokens);
    free(e.targets);
    return code;
}
