#include "worker/train/learner.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"
#include "worker/train/session.h"
#include "worker/train/stop.h"
#include "worker/train/trainer.h"

#define LOG_EVERY_NS (5 * DL_NS_PER_SECOND)
/* Of the grace period, kept for what comes after the goodbye. */
#define LEAVE_SHARE 0.8

struct progress { /* Since the last line of the log. */
    int64_t since_ns;
    uint64_t steps, tokens, updates;
    double waited_seconds, loss_sum;
    uint64_t losses;
};

struct learner {
    struct wk_session session;
    struct wk_trainer *trainer;
    struct diloco_info info;
    struct progress progress;
};

static enum dl_exit give_up(const char *doing, const struct dl_err *err)
{
    dl_error("%s failed: %s", doing, err->text);
    return wk_exit_of_rc(err->rc);
}

static enum dl_exit ended(int code, const struct diloco_error *error)
{
    if (code == DILOCO_DONE || code == DILOCO_STOPPED) {
        dl_info("over: %s", error->text);
    } else {
        dl_error("over: %s", error->text);
    }
    return wk_exit_of_diloco(code);
}

/* In the tape, so that the run can be replayed. */
static void note(struct learner *l, const char *kind, uint64_t a, uint64_t b, uint64_t c, const char *text)
{
    struct diloco_error error;
    if (diloco_note(l->session.diloco, kind, a, b, c, text, &error) != DILOCO_CONTINUE) {
        dl_warn("not in the tape kind=%s error=\"%s\"", kind, error.text);
    }
}

/* What the first step depends on, beside the parameters. */
static void note_start(struct learner *l)
{
    char text[DL_ERR_TEXT_MAX];
    DL_AUTO_FREE char *spec = NULL;
    struct dl_err err;
    struct wk_dataset_view data;
    wk_dataset_view(wk_trainer_dataset(l->trainer), &data);
    uint64_t hash = dl_spec_to_json(l->session.spec, &spec, &err) == DL_OK ? dl_hash64(spec, strlen(spec), 0) : 0;
    snprintf(text, sizeof text, "spec=%016" PRIx64 " sequences=%" PRIu64 " place=%" PRIu64, hash,
             data.training_sequences, wk_trainer_place(l->trainer));
    note(l, "start", l->info.learner, l->info.tokens_all, l->info.ensemble_step, text);
}

static enum dl_rc prepare(struct learner *l, struct dl_err *err)
{
    const struct dl_spec *spec = l->session.spec;
    uint32_t threads = wk_session_threads(&l->session);
    uint64_t bytes;
    if (l->session.args->learner >= (int32_t)spec->learners.max) {
        return dl_err_set(err, DL_EINVAL, "--learner %d: ids are below spec.learners.max %u", l->session.args->learner,
                          spec->learners.max);
    }
    enum dl_rc rc = wk_trainer_plan(spec, threads, &bytes, err);
    if (rc == DL_OK) {
        rc = wk_trainer_new(spec, threads, &l->trainer, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_dataset_view data;
    wk_dataset_view(wk_trainer_dataset(l->trainer), &data);
    dl_info("data files=%u tokens=%" PRIu64 " training_sequences=%" PRIu64 " held_out_tokens=%" PRIu64
            " unpacked_mib=%" PRIu64,
            data.files, data.tokens, data.training_sequences, data.validation_tokens, data.unpacked_bytes >> 20);
    dl_info("model parameters=%" PRIu64 " batch_tokens=%u threads=%u memory_mib=%" PRIu64,
            wk_model_elements(wk_trainer_model(l->trainer)),
            spec->training.batch_sequences * spec->training.model.sequence_length, threads, bytes >> 20);
    return DL_OK;
}

static void log_progress(struct learner *l, const struct wk_trainer_step *step)
{
    struct progress *p = &l->progress;
    int64_t now_ns = dl_now_ns();
    double seconds = (double)(now_ns - p->since_ns) / (double)DL_NS_PER_SECOND;
    if (now_ns - p->since_ns < LOG_EVERY_NS || p->steps == 0) {
        return;
    }
    dl_info("training step=%" PRIu64
            " loss=%.4f tokens_per_second=%.0f step_ms=%.1f rate=%.3g norm=%.3g updates=%" PRIu64
            " waited_s=%.2f tokens_all=%" PRIu64 " shards=%u/%u",
            l->info.step, p->losses > 0 ? p->loss_sum / (double)p->losses : NAN, (double)p->tokens / seconds,
            seconds * 1e3 / (double)p->steps, step->learning_rate, step->gradient_norm, p->updates, p->waited_seconds,
            l->info.tokens_all, l->info.connected_shards, l->info.shards);
    *p = (struct progress){.since_ns = now_ns};
}

static void count(struct learner *l, const struct wk_trainer_step *step)
{
    struct progress *p = &l->progress;
    p->steps++;
    p->tokens += step->tokens;
    p->updates += l->info.updates_applied;
    p->waited_seconds += l->info.waited_seconds;
    if (step->skipped) {
        dl_warn("step skipped step=%" PRIu64 " because=loss_or_gradient_not_finite skipped=%" PRIu64, l->info.step,
                wk_trainer_skipped(l->trainer));
    } else {
        p->loss_sum += step->loss;
        p->losses++;
    }
    if (wk_trainer_hear(l->trainer, l->info.tokens_all)) {
        note(l, "schedule", wk_trainer_place(l->trainer), l->info.tokens_all, 0, NULL);
        dl_info("schedule moved step=%" PRIu64 " place=%" PRIu64 " tokens_all=%" PRIu64, l->info.step,
                wk_trainer_place(l->trainer), l->info.tokens_all);
    }
}

static enum dl_exit leave(struct learner *l)
{
    struct diloco_error error;
    dl_info("asked to leave step=%" PRIu64, l->info.step);
    note(l, "uncounted", 1, 0, 0, NULL); /* The step that was just made: what is pushed now holds it. */
    if (diloco_leave(l->session.diloco, 1, l->session.args->grace_seconds * LEAVE_SHARE, "signal", &error) < 0) {
        dl_warn("goodbye incomplete: %s", error.text);
    }
    return DL_EXIT_OK;
}

/* The batch of the coming step, from the job's data: leased where possible. */
static enum dl_rc feed(struct learner *l, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    for (uint32_t lacks = wk_trainer_lacks(l->trainer); rc == DL_OK && lacks > 0;
         lacks = wk_trainer_lacks(l->trainer)) {
        struct diloco_range range;
        struct diloco_error error;
        if (diloco_data(l->session.diloco, lacks, &range, &error) != DILOCO_CONTINUE) {
            return dl_err_set(err, DL_EINVAL, "%s", error.text);
        }
        rc = wk_trainer_feed(l->trainer, range.first, (uint32_t)range.count, err);
    }
    return rc;
}

static enum dl_exit train(struct learner *l)
{
    int64_t step_ns = (int64_t)(l->session.args->step_seconds * (double)DL_NS_PER_SECOND);
    l->progress.since_ns = dl_now_ns();
    for (;;) {
        struct wk_trainer_step step;
        struct dl_err err;
        int64_t start_ns = dl_now_ns();
        if (feed(l, &err) != DL_OK || wk_trainer_step(l->trainer, &step, &err) != DL_OK) {
            return give_up("training", &err);
        }
        if (wk_stop_wait_until(start_ns + step_ns)) {
            return leave(l);
        }
        struct diloco_error error;
        int code = diloco_step(l->session.diloco, step.tokens, (float)step.loss, &l->info, &error);
        if (code != DILOCO_CONTINUE) {
            return ended(code, &error);
        }
        count(l, &step);
        log_progress(l, &step);
    }
}

static enum dl_exit run(struct learner *l)
{
    struct dl_err err;
    struct diloco_error error;
    if (prepare(l, &err) != DL_OK) {
        return give_up("start", &err);
    }
    int code = wk_session_join(&l->session, DILOCO_LEARNER, wk_trainer_model(l->trainer), l->trainer, &l->info, &error);
    if (code != DILOCO_CONTINUE) {
        return ended(code, &error);
    }
    if (l->info.recovered_from >= 0) {
        wk_trainer_take_state(l->trainer);
    }
    wk_trainer_start(l->trainer, l->info.tokens_all);
    dl_info("joined learner=%u ensemble_step=%" PRIu64 " tokens_all=%" PRIu64 " place=%" PRIu64, l->info.learner,
            l->info.ensemble_step, l->info.tokens_all, wk_trainer_place(l->trainer));
    note_start(l);
    return train(l);
}

enum dl_exit wk_learn(const struct wk_args *args)
{
    struct learner l = {0};
    struct dl_err err;
    enum dl_exit code = wk_session_load(&l.session, args, &err) != DL_OK ? give_up("start", &err) : run(&l);
    wk_session_close(&l.session); /* Before the tensors go that it works on. */
    wk_trainer_free(l.trainer);
    return code;
}
