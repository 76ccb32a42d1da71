/* What a job's status says: K6 (problems), K7 (conditions, phases), K8 (suspension), K10 (ends). */
#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "operator/reconcile/conditions.h"
#include "operator/reconcile/json.h"
#include "tests/unit/unit.h"

#define S INT64_C(1000000000)

/* A job of one shard and four learners as it should be; rows change it. */
struct scene {
    struct op_wanted wanted;
    struct op_plan plan;
    struct op_job_status view;
    struct op_problem problem;
    struct op_facts facts;
};

static void scene_init(struct scene *s)
{
    memset(s, 0, sizeof *s);
    op_status_init(&s->view);
    s->view.phase = OP_STATUS_TRAINING;
    s->view.quorum_have = 4;
    s->view.quorum_need = 2;
    s->view.step = 120;
    s->view.tokens = UINT64_C(9007199254740993);
    s->view.loss = 2.5;
    s->wanted.shards = 1;
    s->wanted.pool_count = 1;
    snprintf(s->wanted.pools[0].name, sizeof s->wanted.pools[0].name, "default");
    s->plan.phase = OP_JOB_RUNNING;
    s->plan.desired = s->plan.running = s->plan.connected = 4;
    s->plan.pools[0] = (struct op_plan_pool){.desired = 4, .running = 4, .connected = 4};
    s->plan.syncers_ready = 1;
    snprintf(s->plan.message, sizeof s->plan.message, "4/4 learners connected");
    s->facts = (struct op_facts){.job = "demo",
                                 .wanted = &s->wanted,
                                 .plan = &s->plan,
                                 .view = &s->view,
                                 .problem = &s->problem,
                                 .learners_min = 2,
                                 .active = 6,
                                 .generation = 3,
                                 .started_ns = 100 * S,
                                 .now_ns = 1000 * S};
}

/* --- verdicts --- */

static void as_it_should_be(struct scene *s)
{
    (void)s;
}
static void no_syncer_yet(struct scene *s)
{
    s->plan.phase = OP_JOB_PENDING;
    s->plan.syncers_ready = 0;
    s->plan.connected = s->plan.running = 0;
    s->facts.view = NULL;
}
static void quota_is_used_up(struct scene *s)
{
    no_syncer_yet(s);
    op_problem_of_refusal(OP_REFUSED_QUOTA, "Pod demo-learner-0-1", "exceeded quota", &s->problem);
}
static void below_minimum(struct scene *s)
{
    s->plan.connected = 1;
    s->view.quorum_have = 2;
}
static void below_quorum(struct scene *s)
{
    s->plan.connected = s->view.quorum_have = 1;
    s->view.phase = OP_STATUS_WAITING_FOR_QUORUM;
}
static void one_given_up(struct scene *s)
{
    s->plan.given_up = 1;
    s->plan.connected = 3;
}
static void a_syncer_is_away(struct scene *s)
{
    s->plan.syncers_ready = 0;
}
static void image_cannot_be_pulled(struct scene *s)
{
    op_problem_set(&s->problem, "ImagePullFailed", "pod x: ErrImagePull");
}
static void suspending(struct scene *s)
{
    s->wanted.suspend = true;
    s->plan.phase = OP_JOB_SUSPENDED; /* The planner is done, but a pod of a lost node is still there. */
    s->facts.active = 1;
}
static void suspended(struct scene *s)
{
    suspending(s);
    s->facts.active = 0;
}
static void succeeded(struct scene *s)
{
    s->plan.phase = OP_JOB_SUCCEEDED;
    s->plan.reason = OP_REASON_COMPLETED;
}
static void stopped(struct scene *s)
{
    s->plan.phase = OP_JOB_STOPPED;
    s->plan.reason = OP_REASON_STOP_REQUESTED;
}
static void too_late(struct scene *s)
{
    s->plan.phase = OP_JOB_FAILED;
    s->plan.reason = OP_REASON_DEADLINE_EXCEEDED;
}
static void finishing(struct scene *s)
{
    s->plan.phase = OP_JOB_FINISHING;
    s->plan.connected = 0;
    s->plan.reason = OP_REASON_COMPLETED;
}

struct row {
    const char *name;
    void (*change)(struct scene *);
    const char *phase;
    const char *truths; /* Ready, Progressing, Degraded, Suspended, Succeeded, Failed: T or F. */
    enum dl_condition which;
    const char *reason; /* Of that one. */
};

static const struct row rows[] = {
    {"as it should be", as_it_should_be, "Running", "TTFFFF", DL_CONDITION_READY, "Training"},
    {"no syncer yet", no_syncer_yet, "Pending", "FTTFFF", DL_CONDITION_PROGRESSING, "Starting"},
    {"K6 quota", quota_is_used_up, "Pending", "FFTFFF", DL_CONDITION_DEGRADED, "QuotaExceeded"},
    {"below the minimum", below_minimum, "Running", "FTTFFF", DL_CONDITION_DEGRADED, "BelowMinimum"},
    {"below the quorum", below_quorum, "Running", "FFTFFF", DL_CONDITION_DEGRADED, "WaitingForQuorum"},
    {"a learner given up", one_given_up, "Running", "TTTFFF", DL_CONDITION_DEGRADED, "LearnersGivenUp"},
    {"a syncer is away", a_syncer_is_away, "Running", "FTTFFF", DL_CONDITION_DEGRADED, "SyncersNotReady"},
    {"K6 image", image_cannot_be_pulled, "Running", "TTTFFF", DL_CONDITION_DEGRADED, "ImagePullFailed"},
    {"K8 suspending: a pod is left", suspending, "Suspending", "FFFFFF", DL_CONDITION_SUSPENDED, "Suspending"},
    {"K8 suspended", suspended, "Suspended", "FFFTFF", DL_CONDITION_SUSPENDED, "Suspended"},
    {"finishing", finishing, "Finishing", "FTFFFF", DL_CONDITION_PROGRESSING, "Finishing"},
    {"K10 succeeded", succeeded, "Succeeded", "FFFFTF", DL_CONDITION_SUCCEEDED, "Completed"},
    {"K10 stopped as asked", stopped, "Stopped", "FFFFTF", DL_CONDITION_SUCCEEDED, "StopRequested"},
    {"K10 deadline", too_late, "Failed", "FFFFFT", DL_CONDITION_FAILED, "DeadlineExceeded"},
};

static void test_verdicts(void)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct scene s;
        struct op_conditions conditions = {0};
        char truths[DL_CONDITION_COUNT + 1] = {0};
        scene_init(&s);
        rows[i].change(&s);
        op_conditions_update(&conditions, &s.facts);
        for (int c = 0; c < DL_CONDITION_COUNT; c++) {
            truths[c] = "UFT"[conditions.items[c].status];
            CU_ASSERT_NOT_EQUAL(conditions.items[c].reason[0], 0);
        }
        bool ok = strcmp(truths, rows[i].truths) == 0 &&
                  strcmp(conditions.items[rows[i].which].reason, rows[i].reason) == 0 &&
                  strcmp(op_job_phase_name(op_facts_phase(&s.facts)), rows[i].phase) == 0;
        if (!ok) {
            printf("\nrow '%s': %s %s %s\n", rows[i].name, truths, conditions.items[rows[i].which].reason,
                   op_job_phase_name(op_facts_phase(&s.facts)));
        }
        CU_ASSERT(ok);
    }
}

/* K7: a transition is a change of the status, not of reason or message. */
static void test_transition_times(void)
{
    struct scene s;
    struct op_conditions conditions = {0};
    scene_init(&s);
    op_conditions_update(&conditions, &s.facts);
    const struct op_condition *ready = &conditions.items[DL_CONDITION_READY];
    CU_ASSERT_EQUAL(ready->since_ns, 1000 * S);
    s.facts.now_ns = 1010 * S;
    s.plan.connected = 3;
    op_conditions_update(&conditions, &s.facts);
    CU_ASSERT_EQUAL(ready->since_ns, 1000 * S);
    CU_ASSERT_STRING_EQUAL(ready->message, "3/4 learners connected");
    s.facts.now_ns = 1020 * S;
    s.plan.connected = 0;
    op_conditions_update(&conditions, &s.facts);
    CU_ASSERT_EQUAL(ready->since_ns, 1020 * S);
}

/* --- the object --- */

static cJSON *written(const struct scene *s, const struct op_conditions *conditions)
{
    char *text = NULL;
    cJSON *tree = NULL;
    struct dl_err err = {.text = ""};
    CU_ASSERT_EQUAL_FATAL(op_status_patch(&s->facts, conditions, "uid-1", &text, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(op_json_parse(text, strlen(text), &tree, &err), DL_OK);
    free(text);
    return tree;
}

static void test_status_object(void)
{
    struct scene s;
    struct op_conditions conditions = {0}, again;
    scene_init(&s);
    s.plan.pools[0].scavenged = 2;
    op_conditions_update(&conditions, &s.facts);
    cJSON *tree = written(&s, &conditions);
    const cJSON *status = cJSON_GetObjectItem(tree, "status"), *learners = cJSON_GetObjectItem(status, "learners");
    const cJSON *syncer = cJSON_GetObjectItem(status, "syncer");
    CU_ASSERT_STRING_EQUAL(op_json_text(cJSON_GetObjectItem(tree, "metadata"), "uid", ""), "uid-1");
    CU_ASSERT_STRING_EQUAL(op_json_text(status, "phase", ""), "Running");
    CU_ASSERT_EQUAL(op_json_u64(status, "observedGeneration", 0), 3);
    CU_ASSERT_EQUAL(op_json_u64(status, "active", 0), 6);
    CU_ASSERT_STRING_EQUAL(op_json_text(status, "selector", ""), "diloco.dev/job=demo,diloco.dev/role=learner");
    CU_ASSERT_STRING_EQUAL(op_json_text(status, "startTime", ""), "1970-01-01T00:01:40Z");
    CU_ASSERT(cJSON_IsNull(cJSON_GetObjectItem(status, "completionTime")));
    CU_ASSERT_EQUAL(op_json_u64(learners, "connected", 0), 4);
    const cJSON *pool = cJSON_GetArrayItem(cJSON_GetObjectItem(learners, "pools"), 0);
    CU_ASSERT_STRING_EQUAL(op_json_text(pool, "name", ""), "default");
    CU_ASSERT_EQUAL(op_json_u64(pool, "scavenged", 0), 2);
    CU_ASSERT(op_json_u64(syncer, "tokens", 0) == UINT64_C(9007199254740993));
    CU_ASSERT_STRING_EQUAL(op_json_text(syncer, "loss", ""), "2.5000");
    CU_ASSERT_STRING_EQUAL(op_json_text(syncer, "quorum", ""), "4/2");
    CU_ASSERT(cJSON_IsNull(cJSON_GetObjectItem(syncer, "validationLoss")));
    const cJSON *ready = cJSON_GetArrayItem(cJSON_GetObjectItem(status, "conditions"), 0);
    CU_ASSERT_STRING_EQUAL(op_json_text(ready, "type", ""), "Ready");
    CU_ASSERT_EQUAL(op_json_u64(ready, "observedGeneration", 0), 3);

    /* Another operator takes over: what it writes is the same. */
    op_conditions_read(status, &again);
    s.facts.now_ns += 100 * S;
    op_conditions_update(&again, &s.facts);
    for (int i = 0; i < DL_CONDITION_COUNT; i++) {
        CU_ASSERT_EQUAL(again.items[i].since_ns, conditions.items[i].since_ns);
        CU_ASSERT_STRING_EQUAL(again.items[i].reason, conditions.items[i].reason);
    }
    cJSON_Delete(tree);

    s.facts.view = NULL; /* Nobody answers: what was said last stays. */
    tree = written(&s, &conditions);
    syncer = cJSON_GetObjectItem(cJSON_GetObjectItem(tree, "status"), "syncer");
    CU_ASSERT_PTR_NULL(cJSON_GetObjectItem(syncer, "step"));
    cJSON_Delete(tree);
}

static void test_message(void)
{
    static const struct {
        const char *name;
        void (*change)(struct scene *);
        const char *message;
    } messages[] = {
        {"running", as_it_should_be, "4/4 learners connected"},
        {"Q5 below the quorum", below_quorum, "WaitingForQuorum 1/2 learners"},
        {"problem", image_cannot_be_pulled, "ImagePullFailed: pod x: ErrImagePull"},
        {"suspending", suspending, "1 pods are still there"},
    };
    for (size_t i = 0; i < sizeof messages / sizeof messages[0]; i++) {
        struct scene s;
        struct op_conditions conditions = {0};
        scene_init(&s);
        messages[i].change(&s);
        op_conditions_update(&conditions, &s.facts);
        cJSON *tree = written(&s, &conditions);
        CU_ASSERT_STRING_EQUAL(op_json_text(cJSON_GetObjectItem(tree, "status"), "message", ""), messages[i].message);
        cJSON_Delete(tree);
    }
}

/* --- problems --- */

struct problem_row {
    const char *name;
    struct op_pod pod;
    bool is_extra;
    const char *reason;
};

static const struct problem_row problem_rows[] = {
    {"runs", {.is_up = true, .phase = OP_POD_RUNNING}, false, ""},
    {"image pull fails", {.waiting = "ErrImagePull"}, false, "ImagePullFailed"},
    {"image pull backs off", {.waiting = "ImagePullBackOff"}, false, "ImagePullFailed"},
    {"image must not be pulled", {.waiting = "ErrImageNeverPull"}, false, "ImagePullFailed"},
    {"runs as root", {.waiting = "CreateContainerConfigError"}, false, "ContainerConfigError"},
    {"crashes again and again", {.waiting = "CrashLoopBackOff"}, false, "CrashLoop"},
    {"no room", {.is_unschedulable = true, .message = "0/2 nodes are available"}, false, "Unschedulable"},
    {"no room for one more is no problem", {.is_unschedulable = true, .message = "0/2 nodes"}, true, ""},
    {"volume is pending",
     {.is_unschedulable = true, .message = "pod has unbound immediate PersistentVolumeClaims"},
     false,
     "VolumePending"},
    {"no volume fits",
     {.is_unschedulable = true,
      .message = "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind"},
     false,
     "VolumePending"},
    {"being made for a short time", {.waiting = "ContainerCreating", .created_ns = 990 * S}, false, ""},
    {"being made for long", {.waiting = "ContainerCreating", .created_ns = 900 * S}, false, "StartSlow"},
    {"leaves", {.is_leaving = true, .waiting = "ErrImagePull"}, false, ""},
};

static void test_problems(void)
{
    for (size_t i = 0; i < sizeof problem_rows / sizeof problem_rows[0]; i++) {
        struct op_problem worst = {.reason = ""};
        op_problem_of_pod(&problem_rows[i].pod, "demo-learner-0-1", problem_rows[i].is_extra, 1000 * S, &worst);
        bool ok = strcmp(worst.reason, problem_rows[i].reason) == 0 &&
                  (worst.reason[0] == 0 || strstr(worst.message, "demo-learner-0-1") != NULL);
        if (!ok) {
            printf("\nrow '%s': %s %s\n", problem_rows[i].name, worst.reason, worst.message);
        }
        CU_ASSERT(ok);
    }
    /* The worst stays. */
    struct op_problem worst = {.reason = ""};
    op_problem_of_pod(&problem_rows[1].pod, "a", false, 1000 * S, &worst);
    op_problem_of_pod(&problem_rows[6].pod, "b", false, 1000 * S, &worst);
    CU_ASSERT_STRING_EQUAL(worst.reason, "ImagePullFailed");
}

/* What a server says at length is told on one line, with the reason at its end and the advice that fits. */
static void test_refusals_are_readable(void)
{
    static const struct {
        enum op_refusal refusal;
        const char *text, *reason, *message;
    } refusals[] = {
        {OP_REFUSED_INVALID,
         "Pod \"x\" is invalid: spec.containers[0].securityContext: Invalid value: {\"Capabilities\":{\"Add\":null,"
         "\"Drop\":[\"ALL\"]},\"Privileged\":true,\"SELinuxOptions\":null}: cannot set both",
         "InvalidObject",
         "Pod x: Pod \"x\" is invalid: spec.containers[0].securityContext: Invalid value: {...}: cannot set both "
         "(correct "
         "the job's templates or fields)"},
        {OP_REFUSED_INVALID, "errors:\n  .spec.a: no\n  .spec.b: {\"c\":1} no\n", "InvalidObject",
         "Pod x: errors: .spec.a: no .spec.b: {\"c\":1} no (correct the job's templates or fields)"},
        {OP_REFUSED_FORBIDDEN, "error looking up service account a/b: serviceaccount \"b\" not found", "Forbidden",
         "Pod x: error looking up service account a/b: serviceaccount \"b\" not found (make it, or correct the "
         "template "
         "that names it)"},
        {OP_REFUSED_FORBIDDEN, "{{{{", "Forbidden",
         "Pod x: {{{{ (give the operator's service account this right, or see the admission policy named)"},
    };
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        struct op_problem problem;
        op_problem_of_refusal(refusals[i].refusal, "Pod x", refusals[i].text, &problem);
        if (strcmp(problem.message, refusals[i].message) != 0) {
            printf("\nrow %zu: '%s'\n", i, problem.message);
        }
        CU_ASSERT_STRING_EQUAL(problem.reason, refusals[i].reason);
        CU_ASSERT_STRING_EQUAL(problem.message, refusals[i].message);
    }
}

UNIT_MAIN("conditions", {"K7 K8 K10 verdicts", test_verdicts}, {"K7 transition times", test_transition_times},
          {"status object", test_status_object}, {"message", test_message}, {"K6 problems of pods", test_problems},
          {"K6 refusals are readable", test_refusals_are_readable})
