/* What keeps a job from running, for its conditions and events. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "operator/reconcile/conditions.h"

#define CREATING_NS INT64_C(60000000000) /* A container that is being made for so long waits for a volume or network. */

void op_problem_set(struct op_problem *problem, const char *reason, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    snprintf(problem->reason, sizeof problem->reason, "%s", reason);
    vsnprintf(problem->message, sizeof problem->message, fmt, args);
    va_end(args);
}

/* Servers quote the whole object that they do not take before they say why. */
#define QUOTED_MAX 48

static size_t quoted(const char *text)
{
    size_t depth = 0, i = 0;
    do {
        depth += text[i] == '{' ? 1 : 0;
        depth -= text[i] == '}' ? 1 : 0;
        i++;
    } while (depth > 0 && text[i] != 0);
    return i;
}

/* On one line, and without long objects, so that the reason is not what is cut off. */
static void tidy(const char *text, char *out, size_t size)
{
    size_t used = 0;
    for (size_t i = 0; text[i] != 0 && used + 1 < size;) {
        bool is_space = strchr(" \t\r\n", text[i]) != NULL;
        size_t object = text[i] == '{' ? quoted(text + i) : 0;
        if (object > QUOTED_MAX) {
            used += (size_t)snprintf(out + used, size - used, "{...}");
            used = DL_MIN(used, size - 1);
            i += object;
            continue;
        }
        if (!is_space || (used > 0 && out[used - 1] != ' ')) {
            out[used++] = is_space ? ' ' : text[i];
        }
        i++;
    }
    while (used > 0 && out[used - 1] == ' ') {
        used--;
    }
    out[used] = 0;
}

void op_problem_of_refusal(enum op_refusal refusal, const char *what, const char *text, struct op_problem *out)
{
    static const struct {
        const char *reason, *advice;
    } table[] = {
        [OP_REFUSED_QUOTA] = {"QuotaExceeded", "raise the namespace's ResourceQuota or ask for less"},
        [OP_REFUSED_FORBIDDEN] = {"Forbidden", "give the operator's service account this right, or see the admission "
                                               "policy named"},
        [OP_REFUSED_CONFLICT] = {"Conflict", "an object of that name stands in the way; it is tried again"},
        [OP_REFUSED_INVALID] = {"InvalidObject", "correct the job's templates or fields"},
        [OP_REFUSED_OTHER] = {"RequestFailed", "it is tried again"},
    };
    char said[OP_CONDITION_MESSAGE_MAX];
    tidy(text, said, sizeof said);
    bool is_missing = refusal == OP_REFUSED_FORBIDDEN && strstr(said, " not found") != NULL;
    const char *advice = is_missing ? "make it, or correct the template that names it" : table[refusal].advice;
    op_problem_set(out, table[refusal].reason, "%s: %s (%s)", what, said, advice);
}

static const struct {
    const char *waiting, *reason, *advice;
} waits[] = {
    {"ErrImagePull", "ImagePullFailed", "check the image's name and pull secrets"},
    {"ImagePullBackOff", "ImagePullFailed", "check the image's name and pull secrets"},
    {"ErrImageNeverPull", "ImagePullFailed", "the image is not on the node and must not be pulled"},
    {"InvalidImageName", "ImagePullFailed", "correct the image's name"},
    {"CreateContainerConfigError", "ContainerConfigError", "check user, secrets and config maps of the template"},
    {"CreateContainerError", "ContainerConfigError", "check command and mounts of the template"},
    {"RunContainerError", "ContainerConfigError", "check command and mounts of the template"},
    {"CrashLoopBackOff", "CrashLoop", "see the pod's log"},
};

/* Higher is worse; what concerns a syncer is worse than the same of a learner. */
static int weight_of(const char *reason)
{
    static const char *const order[] = {"Unschedulable", "CrashLoop",       "StartSlow",
                                        "VolumePending", "ImagePullFailed", "ContainerConfigError"};
    for (int i = 0; i < (int)DL_COUNT_OF(order); i++) {
        if (strcmp(reason, order[i]) == 0) {
            return i + 1;
        }
    }
    return 0;
}

static bool is_of_volume(const char *message)
{
    return strstr(message, "PersistentVolumeClaim") != NULL || strstr(message, "persistentvolumeclaim") != NULL ||
           strstr(message, "volume node affinity") != NULL || strstr(message, "persistent volumes to bind") != NULL;
}

void op_problem_of_pod(const struct op_pod *pod, const char *name, bool is_extra, int64_t now_ns,
                       struct op_problem *worst)
{
    struct op_problem found = {.reason = ""};
    if (pod->is_leaving || pod->phase == OP_POD_SUCCEEDED || pod->phase == OP_POD_FAILED || pod->is_up) {
        return;
    }
    if (pod->is_unschedulable && !is_extra) {
        bool is_volume = is_of_volume(pod->message);
        op_problem_set(&found, is_volume ? "VolumePending" : "Unschedulable", "pod %s: %s", name, pod->message);
    }
    for (size_t i = 0; i < DL_COUNT_OF(waits); i++) {
        if (strcmp(pod->waiting, waits[i].waiting) == 0) {
            op_problem_set(&found, waits[i].reason, "pod %s: %s: %s (%s)", name, pod->waiting, pod->message,
                           waits[i].advice);
        }
    }
    if (found.reason[0] == 0 && strcmp(pod->waiting, "ContainerCreating") == 0 &&
        now_ns - pod->created_ns >= CREATING_NS) {
        op_problem_set(&found, "StartSlow",
                       "pod %s: its container is being made for over a minute: a large image, or a config map, secret "
                       "or volume that is not there (kubectl describe pod %s)",
                       name, name);
    }
    if (weight_of(found.reason) > weight_of(worst->reason)) {
        *worst = found;
    }
}
