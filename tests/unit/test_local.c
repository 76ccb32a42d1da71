/* Parts of the supervisor that can be looked at alone: chaos, pace, view, rendering, files, processes, estimates. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "operator/local/chaos.h"
#include "operator/local/checkpoints.h"
#include "operator/local/control.h"
#include "operator/local/estimate.h"
#include "operator/local/pace.h"
#include "operator/local/process.h"
#include "operator/local/render.h"
#include "operator/local/rundir.h"
#include "operator/local/view.h"
#include "tests/unit/unit.h"

#define S INT64_C(1000000000)

/* --- chaos --- */

static const struct dl_spec chaos_spec = {
    .training = {.token_budget = 1000}, .learners = {.max = 4, .replicas = 2}, .syncer = {.shards = 2}};

static void test_chaos_in_order_of_progress(void)
{
    struct op_chaos chaos;
    struct dl_err err = {.text = ""};
    CU_ASSERT_EQUAL_FATAL(op_chaos_parse("join@55%,kill@35%:2,kill-learner@35.5%,kill-syncer@90%:1,leave@100%:3",
                                         &chaos_spec, &chaos, &err),
                          DL_OK);
    static const struct {
        enum op_chaos_type type;
        double at;
        bool has_argument;
        uint32_t argument;
    } rows[] = {{OP_CHAOS_KILL, 0.35, true, 2},
                {OP_CHAOS_KILL, 0.355, false, 0},
                {OP_CHAOS_JOIN, 0.55, false, 0},
                {OP_CHAOS_KILL_SYNCER, 0.9, true, 1},
                {OP_CHAOS_LEAVE, 1, true, 3}};
    CU_ASSERT_EQUAL_FATAL(chaos.count, 5);
    CU_ASSERT_PTR_NULL(op_chaos_take(&chaos, 0.3));
    for (size_t i = 0; i < 5; i++) {
        CU_ASSERT_PTR_NULL(op_chaos_take(&chaos, rows[i].at - 0.001));
        const struct op_chaos_action *action = op_chaos_take(&chaos, rows[i].at);
        CU_ASSERT_PTR_NOT_NULL_FATAL(action);
        if (action == NULL) {
            abort(); /* Static analysis does not know that the assertion ends the test. */
        }
        CU_ASSERT_EQUAL(action->type, rows[i].type);
        CU_ASSERT_EQUAL(action->has_argument, rows[i].has_argument);
        CU_ASSERT_EQUAL(action->argument, rows[i].argument);
    }
    CU_ASSERT_PTR_NULL(op_chaos_take(&chaos, 1));
}

static void test_chaos_refuses(void)
{
    static const char *const bad[] = {"",
                                      "kill",
                                      "kill@",
                                      "kill@35",
                                      "kill@35%:",
                                      "kill@35%:x",
                                      "kill@101%",
                                      "kill@-1%",
                                      "kill@nan%",
                                      "kill@35%:4",
                                      "join@5%:0",
                                      "leave@5%:5",
                                      "burn@5%",
                                      "kill@5%,",
                                      "kill@5%:99999999999",
                                      "kill-syncer@5%:2",
                                      "kill@5%:1x",
                                      "@5%"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct op_chaos chaos;
        struct dl_err err = {.text = ""};
        enum dl_rc rc = op_chaos_parse(bad[i], &chaos_spec, &chaos, &err);
        if (rc != DL_EINVAL) {
            fprintf(stderr, "'%s' was taken\n", bad[i]);
        }
        CU_ASSERT_EQUAL(rc, DL_EINVAL);
        CU_ASSERT_NOT_EQUAL(err.text[0], 0);
    }
    struct dl_spec endless = chaos_spec;
    endless.training.token_budget = 0;
    struct op_chaos chaos;
    CU_ASSERT_EQUAL(op_chaos_parse("kill@5%", &endless, &chaos, NULL), DL_EINVAL);
    char many[OP_CHAOS_MAX * 8 + 16] = "kill@5%";
    size_t used = strlen(many);
    for (int i = 0; i < OP_CHAOS_MAX; i++) {
        used += (size_t)snprintf(many + used, sizeof many - used, ",kill@5%%");
    }
    CU_ASSERT_EQUAL(op_chaos_parse(many, &chaos_spec, &chaos, NULL), DL_EINVAL);
}

/* --- pace --- */

static void pace_sample(struct op_pace *pace, int64_t now, const uint64_t *steps, const char *const *uids,
                        uint32_t count)
{
    struct op_learner_status learners[8] = {{0}};
    struct op_job_status status = {.learners = learners, .learner_count = count};
    for (uint32_t i = 0; i < count; i++) {
        learners[i].learner = i;
        learners[i].step = steps[i];
        learners[i].link = uids[i] != NULL ? OP_LINK_CONNECTED : OP_LINK_LOST;
        snprintf(learners[i].uid, sizeof learners[i].uid, "%s", uids[i] != NULL ? uids[i] : "x");
    }
    op_pace_sample(pace, &status, now);
}

/* Three learners at 4, 2 and 4 steps a second, sampled at 10 Hz; at 10 s the last dies, and the second slows to half.
 */
static void test_pace_before_and_after(void)
{
    struct op_pace *pace = calloc(1, sizeof *pace);
    CU_ASSERT_PTR_NOT_NULL_FATAL(pace);
    for (int i = 1; i <= 200; i++) {
        int64_t now = i * S / 10;
        double t = i / 10.0;
        uint64_t steps[] = {(uint64_t)(1 + t * 4), (uint64_t)(1 + (t <= 10 ? t * 2 : 20 + (t - 10))),
                            (uint64_t)(1 + t * 4)};
        const char *uids[] = {"a", "b", t <= 10 ? "c" : NULL};
        if (t > 12) { /* Its replacement. */
            uids[2] = "c2";
            steps[2] = (uint64_t)((t - 12) * 4);
        }
        pace_sample(pace, now, steps, uids, 3);
    }
    double rate = 0;
    CU_ASSERT(op_pace_rate(pace, 0, 2 * S, 10 * S, &rate));
    CU_ASSERT_DOUBLE_EQUAL(rate, 4, 0.1);
    CU_ASSERT_FALSE(op_pace_rate(pace, 2, 5 * S, 15 * S, &rate)); /* Not the same process all the time. */
    CU_ASSERT_FALSE(op_pace_rate(pace, 5, 2 * S, 10 * S, &rate)); /* Never there. */
    struct op_pace_change change;
    op_pace_compare(pace, 2, 2 * S, 10 * S, 18 * S, &change);
    CU_ASSERT_EQUAL(change.learners, 2);
    CU_ASSERT_DOUBLE_EQUAL(change.before, 6, 0.15);
    CU_ASSERT_DOUBLE_EQUAL(change.after, 5, 0.15);
    CU_ASSERT_DOUBLE_EQUAL(change.ratio, 5.0 / 6, 0.03);
    CU_ASSERT_DOUBLE_EQUAL(change.worst, 0.5, 0.03);
    /* The replacement's first step came at 12.3 s: steady from the sample after it. */
    int64_t steady = op_pace_steady_since(pace, 20 * S);
    CU_ASSERT(steady > 12 * S && steady < 13 * S);
    op_pace_compare(pace, 0, 30 * S, 31 * S, 32 * S, &change);
    CU_ASSERT_EQUAL(change.learners, 0);
    free(pace);
}

static void test_pace_forgets_the_oldest(void)
{
    struct op_pace *pace = calloc(1, sizeof *pace);
    CU_ASSERT_PTR_NOT_NULL_FATAL(pace);
    for (int i = 1; i <= 3 * OP_PACE_SAMPLES; i++) {
        uint64_t steps[] = {(uint64_t)i};
        const char *uids[] = {"a"};
        pace_sample(pace, i * S, steps, uids, 1);
    }
    double rate = 0;
    CU_ASSERT_FALSE(op_pace_rate(pace, 0, S, OP_PACE_SAMPLES * S, &rate));
    CU_ASSERT(op_pace_rate(pace, 0, 2 * OP_PACE_SAMPLES * S, 3 * OP_PACE_SAMPLES * S, &rate));
    CU_ASSERT_DOUBLE_EQUAL(rate, 1, 1e-9);
    free(pace);
}

/* --- formats, view, frames --- */

static void test_formats(void)
{
    static const struct {
        double value;
        const char *text;
    } counts[] = {{0, "0"},         {7, "7"},         {999, "999"},   {999.6, "1.00k"}, {1234, "1.23k"},
                  {12345, "12.3k"}, {123456, "123k"}, {5e6, "5.00M"}, {2.5e9, "2.50G"}, {NAN, "-"}};
    char text[64];
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        op_format_count(counts[i].value, text, sizeof text);
        CU_ASSERT_STRING_EQUAL(text, counts[i].text);
    }
    op_format_seconds(59.7, text, sizeof text);
    CU_ASSERT_STRING_EQUAL(text, "1:00");
    op_format_seconds(3723, text, sizeof text);
    CU_ASSERT_STRING_EQUAL(text, "1:02:03");
    op_format_seconds(INFINITY, text, sizeof text);
    CU_ASSERT_STRING_EQUAL(text, "-");
    struct op_view_point points[] = {{.loss = 4}, {.loss = 3}, {.loss = 2}, {.loss = 1}};
    op_format_spark(points, 4, 4, false, text, sizeof text);
    CU_ASSERT_STRING_EQUAL(text, "#+-_");
    op_format_spark(points, 4, 2, false, text, sizeof text);
    CU_ASSERT_STRING_EQUAL(text, "#_");
    op_format_spark(points, 4, 4, true, text, 8); /* No room for all: never half a character. */
    CU_ASSERT_EQUAL(strlen(text) % 3, 0);
}

static char *json_of(const struct op_view *view)
{
    char *text = op_view_to_json(view);
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    if (text == NULL) {
        abort(); /* Static analysis does not know that the assertion ends the test. */
    }
    return text;
}

static struct op_view *full_view(uint32_t learners)
{
    struct op_view *view = NULL;
    CU_ASSERT_EQUAL_FATAL(op_view_new(&view, NULL), DL_OK);
    snprintf(view->job, sizeof view->job, "a-job");
    snprintf(view->phase, sizeof view->phase, "Training");
    snprintf(view->message, sizeof view->message, "evil \033[2Jtext\n");
    view->progress = 0.5;
    view->seconds = 61;
    view->tokens_per_second = 1000;
    view->status.tokens = 500;
    view->status.token_budget = 1000;
    for (uint32_t i = 0; i < learners; i++) {
        view->learners[i] =
            (struct op_view_learner){.learner = i, .step = 10 * i, .loss = 2.5, .pid = 77, .incarnation = 1};
        snprintf(view->learners[i].state, sizeof view->learners[i].state, "training");
    }
    view->learner_count = learners;
    for (uint32_t i = 0; i < OP_VIEW_EVENTS_MAX; i++) {
        view->events[i].seconds = i;
        snprintf(view->events[i].text, sizeof view->events[i].text,
                 "event number %u that is longer than a narrow terminal", i);
    }
    view->event_count = OP_VIEW_EVENTS_MAX;
    for (uint32_t i = 0; i < 20; i++) {
        struct op_validation validation = {.known = true, .loss = 5 - 0.1 * i, .tokens = 10 * i, .round = i};
        CU_ASSERT(op_view_add_point(view, &validation, i));
        CU_ASSERT_FALSE(op_view_add_point(view, &validation, i)); /* The same again. */
    }
    return view;
}

static struct op_frame *new_frame(void)
{
    struct op_frame *frame = malloc(sizeof *frame);
    CU_ASSERT_PTR_NOT_NULL_FATAL(frame);
    if (frame == NULL) {
        abort(); /* See json_of. */
    }
    return frame;
}

/* Columns that a line takes on the screen; escape sequences take none. */
static uint32_t columns(const char *line)
{
    uint32_t count = 0;
    for (const char *at = line; *at != 0; at++) {
        if (*at == '\033') {
            at += strcspn(at, "m");
            continue;
        }
        CU_ASSERT_FATAL((unsigned char)*at >= 0x20);
        count += (*at & 0xC0) != 0x80 ? 1 : 0;
    }
    return count;
}

static void test_frames_fit_every_terminal(void)
{
    struct op_frame *frame = new_frame();
    for (uint32_t learners = 0; learners <= 40; learners += 20) {
        struct op_view *view = full_view(learners);
        for (uint32_t width = 1; width <= 200; width += 7) {
            for (uint32_t height = 1; height <= 60; height += 3) {
                struct op_render_options options = {
                    .width = width, .height = height, .color = width % 2 == 0, .unicode = height % 2 == 0};
                op_render_frame(view, &options, frame);
                /* Four head lines are always drawn; beyond them nothing that would scroll. */
                CU_ASSERT_FATAL(frame->line_count <= (height > 5 ? height - 1 : 4));
                for (uint32_t i = 0; i < frame->line_count; i++) {
                    CU_ASSERT_FATAL(columns(frame->text + frame->lines[i]) <= width);
                }
            }
        }
        op_view_free(view);
    }
    free(frame);
}

static bool frame_has(const struct op_frame *frame, const char *text)
{
    for (uint32_t i = 0; i < frame->line_count; i++) {
        if (strstr(frame->text + frame->lines[i], text) != NULL) {
            return true;
        }
    }
    return false;
}

static void test_frame_shows_what_matters(void)
{
    struct op_frame *frame = new_frame();
    struct op_view *view = full_view(40);
    struct op_render_options options = {.width = 120, .height = 24};
    op_render_frame(view, &options, frame);
    CU_ASSERT(frame_has(frame, "50 %"));
    CU_ASSERT(frame_has(frame, "0:01 left")); /* 500 tokens left at 1000 a second: half a second, rounded. */
    CU_ASSERT(frame_has(frame, "validation loss 5.000 -> 3.100"));
    CU_ASSERT(frame_has(frame, " more"));
    CU_ASSERT(frame_has(frame, "event number 11"));
    CU_ASSERT(frame_has(frame, "evil ?[2Jtext?"));
    char line[512];
    op_render_line(view, line, sizeof line);
    CU_ASSERT_PTR_NOT_NULL(strstr(line, "validation 5.000 -> 3.100"));
    op_view_free(view);
    free(frame);
}

static void test_view_round_trips_as_json(void)
{
    struct op_view *view = full_view(3), *again = NULL;
    CU_ASSERT_EQUAL_FATAL(op_view_new(&again, NULL), DL_OK);
    char *text = json_of(view);
    CU_ASSERT_EQUAL_FATAL(op_view_from_json(again, text, strlen(text), NULL), DL_OK);
    char *second = json_of(again);
    CU_ASSERT_STRING_EQUAL(text, second);
    CU_ASSERT_EQUAL(again->learner_count, 3);
    CU_ASSERT_EQUAL(again->point_count, 20);
    free(text);
    free(second);
    static const char shard[] =
        "{\"job\":\"j\",\"phase\":\"Training\",\"tokens\":5,\"tokenBudget\":10,\"connected\":1,\"learners\":["
        "{\"learner\":0,\"uid\":\"new\",\"admission\":2,\"state\":\"connected\",\"tokensPerSecond\":9},"
        "{\"learner\":0,\"uid\":\"old\",\"admission\":1,\"state\":\"lost\"}]}";
    CU_ASSERT_EQUAL_FATAL(op_view_from_json(again, shard, sizeof shard - 1, NULL), DL_OK);
    CU_ASSERT_EQUAL(again->learner_count, 1);
    CU_ASSERT_EQUAL(again->learners[0].restarts, 1);
    CU_ASSERT_STRING_EQUAL(again->learners[0].state, "connected");
    CU_ASSERT_EQUAL(again->progress, 0.5);
    op_view_free(view);
    op_view_free(again);
}

static void test_view_keeps_first_and_last_of_many_points(void)
{
    struct op_view *view = NULL;
    CU_ASSERT_EQUAL_FATAL(op_view_new(&view, NULL), DL_OK);
    for (uint32_t i = 0; i < 10 * OP_VIEW_POINTS_MAX; i++) {
        struct op_validation validation = {.known = true, .loss = i, .tokens = i, .round = i};
        CU_ASSERT_FATAL(op_view_add_point(view, &validation, i));
        CU_ASSERT_FATAL(view->point_count <= OP_VIEW_POINTS_MAX);
        CU_ASSERT_EQUAL(view->points[0].tokens, 0);
        CU_ASSERT_EQUAL(view->points[view->point_count - 1].tokens, i);
        CU_ASSERT(view->point_count < 2 || view->points[view->point_count - 2].tokens < i);
    }
    op_view_free(view);
}

/* --- files and processes --- */

static char base[64];

static void enter_folder(void)
{
    snprintf(base, sizeof base, "/tmp/diloco-unit-XXXXXX");
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(base));
    CU_ASSERT_EQUAL_FATAL(chdir(base), 0);
}

static void leave_folder(void)
{
    CU_ASSERT_EQUAL_FATAL(chdir("/"), 0);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", base);
    CU_ASSERT_EQUAL(system(command), 0);
}

static void test_run_folders_are_numbered_and_never_overwritten(void)
{
    enter_folder();
    struct op_rundir dir;
    struct dl_err err = {.text = ""};
    char wanted[128];
    CU_ASSERT_EQUAL(op_rundir_open(NULL, &dir, &err), DL_ENOTFOUND);
    for (int i = 1; i <= 3; i++) {
        CU_ASSERT_EQUAL_FATAL(op_rundir_create(NULL, "a-job", 2, &dir, &err), DL_OK);
        snprintf(wanted, sizeof wanted, "%s/runs/a-job-%d", base, i);
        CU_ASSERT_STRING_EQUAL(dir.path, wanted);
    }
    CU_ASSERT_EQUAL(access("runs/a-job-3/state/shard-1", W_OK), 0);
    /* A gap is not filled: numbers only grow. */
    CU_ASSERT_EQUAL(system("rm -r runs/a-job-2 && mkdir runs/a-job-9 runs/a-job-9x runs/b-job-50"), 0);
    CU_ASSERT_EQUAL_FATAL(op_rundir_create(NULL, "a-job", 1, &dir, &err), DL_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(dir.path, "/runs/a-job-10"));
    CU_ASSERT_EQUAL(op_rundir_create("runs/a-job-1", "a-job", 1, &dir, &err), DL_EEXISTS);
    CU_ASSERT_EQUAL(op_rundir_create("missing/folder", "a-job", 1, &dir, &err), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(mkdir("empty", 0777), 0);
    CU_ASSERT_EQUAL(op_rundir_create("empty", "a-job", 1, &dir, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(op_rundir_write(&dir, "job.json", "{}", 0666, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(op_rundir_make_token(&dir, &err), DL_OK);
    struct stat info;
    CU_ASSERT_EQUAL(stat("empty/token", &info), 0);
    CU_ASSERT_EQUAL(info.st_mode & 0777, 0600);
    CU_ASSERT_EQUAL(info.st_size, 65);
    leave_folder();
}

static void test_logs_stay_bounded_and_complaints_are_found(void)
{
    enter_folder();
    char line[128];
    CU_ASSERT_EQUAL(
        system("yes 'aaaaaaaaa' | head -c 100000 > log; echo '12:00 error x lost it' >> log; echo bye >> log"), 0);
    op_log_last_complaint("log", line, sizeof line);
    CU_ASSERT_STRING_EQUAL(line, "12:00 error x lost it");
    op_log_bound("log", 1000000);
    struct stat info;
    CU_ASSERT_EQUAL(stat("log", &info), 0);
    CU_ASSERT(info.st_size > 100000);
    op_log_bound("log", 1000);
    CU_ASSERT_EQUAL(stat("log", &info), 0);
    CU_ASSERT_EQUAL(info.st_size, 0);
    CU_ASSERT_EQUAL(stat("log.1", &info), 0);
    CU_ASSERT(info.st_size > 100000);
    op_log_last_complaint("missing", line, sizeof line);
    CU_ASSERT_STRING_EQUAL(line, "");
    leave_folder();
}

static void test_processes_start_or_say_why_not(void)
{
    enter_folder();
    struct dl_err err = {.text = ""};
    pid_t pid = 0;
    int status = 0;
    char *good[] = {(char[]){"/bin/sh"}, (char[]){"-c"}, (char[]){"echo out; echo err >&2; exit 7"}, NULL};
    CU_ASSERT_EQUAL_FATAL(op_process_start(good, "out", "err", &pid, &err), DL_OK);
    CU_ASSERT_EQUAL(waitpid(pid, &status, 0), pid);
    CU_ASSERT_EQUAL(WEXITSTATUS(status), 7);
    char *text = NULL;
    size_t size = 0;
    CU_ASSERT_EQUAL_FATAL(op_file_read("out", 100, &text, &size, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(text, "out\n");
    free(text);
    CU_ASSERT_EQUAL(op_file_read("err", 2, &text, &size, &err), DL_EINVAL); /* Larger than allowed. */
    char *missing[] = {(char[]){"/nowhere/program"}, NULL};
    CU_ASSERT_EQUAL(op_process_start(missing, "out", "out", &pid, &err), DL_ENOTFOUND);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "/nowhere/program"));
    char *folder[] = {(char[]){"/tmp"}, NULL};
    CU_ASSERT_EQUAL(op_process_start(folder, "out", "out", &pid, &err), DL_EDENIED);
    CU_ASSERT_EQUAL(op_process_start(good, "nowhere/log", "out", &pid, &err), DL_EIO);
    CU_ASSERT_EQUAL(waitpid(-1, &status, WNOHANG), -1); /* Nothing is left behind. */
    CU_ASSERT_EQUAL(errno, ECHILD);
    leave_folder();
}

static char *echo(void *context, const char *line)
{
    (*(int *)context)++;
    char *answer = NULL;
    return asprintf(&answer, "ok: %s\n", line) < 0 ? NULL : answer;
}

static void test_control_answers_even_in_a_deep_folder(void)
{
    enter_folder();
    struct dl_err err = {.text = ""};
    struct op_rundir dir;
    char deep[300];
    snprintf(deep, sizeof deep, "%s/%0120d", base, 7); /* Longer than a socket's address may be. */
    CU_ASSERT_EQUAL_FATAL(op_rundir_create(deep, "a-job", 1, &dir, &err), DL_OK);
    char *text = NULL;
    CU_ASSERT_EQUAL(op_control_ask(&dir, "status", &text, &err), DL_ENOTFOUND);
    struct op_control control;
    CU_ASSERT_EQUAL_FATAL(op_control_open(&control, &dir, &err), DL_OK);
    pid_t child = fork();
    if (child == 0) {
        bool fine = op_control_ask(&dir, "scale 3", &text, &err) == DL_OK && strcmp(text, "ok: scale 3\n") == 0;
        _exit(fine ? 0 : 1);
    }
    int calls = 0, status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        struct curl_waitfd fds[1 + OP_CONTROL_CLIENTS_MAX];
        CU_ASSERT(op_control_fds(&control, fds) >= 1);
        op_control_turn(&control, 0, echo, &calls);
        usleep(1000);
    }
    CU_ASSERT_EQUAL(status, 0);
    CU_ASSERT_EQUAL(calls, 1);
    op_control_close(&control, &dir);
    CU_ASSERT_EQUAL(op_control_ask(&dir, "status", &text, &err), DL_ENOTFOUND);
    leave_folder();
}

static void test_signal_names(void)
{
    CU_ASSERT_EQUAL(op_signal_parse("KILL"), SIGKILL);
    CU_ASSERT_EQUAL(op_signal_parse("SIGTERM"), SIGTERM);
    CU_ASSERT_EQUAL(op_signal_parse("15"), SIGTERM);
    static const char *const bad[] = {"", "0", "99", "9x", "BANG", "SIG"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CU_ASSERT_EQUAL(op_signal_parse(bad[i]), 0);
    }
}

/* Counted by hand: embedding 256x96; a layer 4x96x96 + 3x96x256 + 2x96; final norm 96. */
static void test_estimate(void)
{
    struct dl_spec spec = {
        .training = {.token_budget = 409600,
                     .batch_sequences = 8,
                     .model = {.vocab_size = 256,
                               .width = 96,
                               .layers = 3,
                               .heads = 4,
                               .kv_heads = 4,
                               .ffn_width = 256,
                               .sequence_length = 128,
                               .tied_embeddings = true}},
        .sync = {.fragments = 8, .interval = 20, .warmup = {.steps = 20, .interval = 2}, .compression = DL_CODEC_INT8},
        .syncer = {.shards = 1},
        .learners = {.replicas = 4, .max = 8}};
    struct op_estimate estimate;
    op_estimate_make(&spec, &estimate);
    uint64_t layer = 4 * 96 * 96 + 3 * 96 * 256 + 2 * 96;
    CU_ASSERT_EQUAL(estimate.parameters, 256 * 96 + 3 * layer + 96);
    CU_ASSERT_EQUAL(estimate.tokens_per_step, 1024);
    CU_ASSERT_EQUAL(estimate.tokens_per_learner_step_all, 4096);
    CU_ASSERT_EQUAL(estimate.steps_per_learner, 100);
    CU_ASSERT_EQUAL(estimate.warmup_steps, 24); /* 20 every 2 steps, 4 every 4. */
    CU_ASSERT_EQUAL(estimate.warmup_syncs, 11);
    CU_ASSERT_EQUAL(estimate.rounds, (11 + 76 / 20) * 8);
    CU_ASSERT_EQUAL(estimate.learner_bytes_least, 5 * 4 * estimate.parameters);
    CU_ASSERT(estimate.total_bytes_least > 4 * estimate.learner_bytes_least);
    spec.sync.warmup.steps = DL_WARMUP_BY_LENGTH;
    op_estimate_make(&spec, &estimate);
    CU_ASSERT_EQUAL(estimate.warmup_steps, 37 + 8 + 8);
    CU_ASSERT_EQUAL(estimate.rounds, (19 + 2 + 1 + 47 / 20) * 8);
    spec.sync.mode = DL_SYNC_SYNCHRONOUS;
    op_estimate_make(&spec, &estimate);
    CU_ASSERT_EQUAL(estimate.warmup_steps, 0);
    CU_ASSERT_EQUAL(estimate.rounds, 100 / 20 * 8);
    spec.training.model.tied_embeddings = false;
    spec.training.model.kv_heads = 2;
    uint64_t before = estimate.parameters;
    op_estimate_make(&spec, &estimate);
    CU_ASSERT_EQUAL(estimate.parameters, before + 256 * 96 - 3 * 2 * 96 * 48);
    spec.training.token_budget = 0;
    op_estimate_make(&spec, &estimate);
    CU_ASSERT_EQUAL(estimate.steps_per_learner + estimate.rounds, 0);
}

static void expect_checkpoint(const char *json, const char *wanted, enum dl_rc rc, const char *says)
{
    struct dl_err err = {0};
    char id[OP_CHECKPOINT_ID_BYTES] = "none";
    CU_ASSERT_EQUAL(op_checkpoint_find(json, wanted, id, &err), rc);
    CU_ASSERT_PTR_NOT_NULL(strstr(rc == DL_OK ? id : err.text, says));
    CU_ASSERT(rc == DL_OK || strcmp(id, "none") == 0);
}

static void test_which_checkpoint_is_meant(void)
{
    static const char json[] =
        "{\"checkpoints\":[{\"id\":\"3.2\",\"name\":\"a\"},{\"id\":\"3.1\",\"name\":\"b\"},"
        "{\"id\":\"2.7\",\"name\":\"a\"},{\"id\":\"2.1\",\"name\":\"3.1\"},{\"id\":\"1.1\",\"name\":\"\"}]}";
    expect_checkpoint(json, "b", DL_OK, "3.1");
    expect_checkpoint(json, "2.7", DL_OK, "2.7");
    expect_checkpoint(json, "3.1", DL_OK, "3.1"); /* An id goes before a name. */
    expect_checkpoint(json, "a", DL_EINVAL, "3.2, 2.7");
    expect_checkpoint(json, "c", DL_ENOTFOUND, "'c'");
    expect_checkpoint(json, "", DL_ENOTFOUND, "no such"); /* Not the one without a name. */
    expect_checkpoint("{\"checkpoints\":[]}", "a", DL_ENOTFOUND, "'a'");
    expect_checkpoint("{}", "a", DL_EPROTO, "cannot be read");
    expect_checkpoint("[", "a", DL_EPROTO, "cannot be read");
}

UNIT_MAIN("local", {"which checkpoint is meant", test_which_checkpoint_is_meant},
          {"chaos in order of progress", test_chaos_in_order_of_progress}, {"chaos refuses", test_chaos_refuses},
          {"pace before and after", test_pace_before_and_after},
          {"pace forgets the oldest", test_pace_forgets_the_oldest}, {"formats", test_formats},
          {"frames fit every terminal", test_frames_fit_every_terminal},
          {"frame shows what matters", test_frame_shows_what_matters},
          {"view round-trips as JSON", test_view_round_trips_as_json},
          {"view keeps first and last", test_view_keeps_first_and_last_of_many_points},
          {"run folders", test_run_folders_are_numbered_and_never_overwritten},
          {"logs stay bounded", test_logs_stay_bounded_and_complaints_are_found},
          {"processes start or say why not", test_processes_start_or_say_why_not},
          {"control", test_control_answers_even_in_a_deep_folder}, {"signal names", test_signal_names},
          {"estimate", test_estimate})
