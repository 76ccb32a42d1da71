#include "operator/reconcile/labels.h"

#include <inttypes.h>
#include <stdio.h>

const struct op_part_kind op_part_kinds[OP_PART_COUNT] = {
    [OP_PART_TOKEN] = {"v1", "secrets", "Secret", "-token-"},
    [OP_PART_SPEC] = {"v1", "configmaps", "ConfigMap", "-spec"},
    [OP_PART_SERVICE] = {"v1", "services", "Service", "-syncer"},
    [OP_PART_SET] = {"apps/v1", "statefulsets", "StatefulSet", "-syncer"},
    [OP_PART_BUDGET] = {"policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", "-syncer"},
    [OP_PART_POLICY] = {"networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", "-syncer"},
    [OP_PART_OUTPUT] = {"v1", "persistentvolumeclaims", "PersistentVolumeClaim", "-output"},
};

void op_part_name(enum op_part part, const char *job, const char *job_uid, char out[OP_CHILD_NAME_MAX])
{
    snprintf(out, OP_CHILD_NAME_MAX, "%s%s%.8s", job, op_part_kinds[part].suffix, part == OP_PART_TOKEN ? job_uid : "");
}

void op_pod_name(const char *job, enum op_kind kind, uint32_t id, uint64_t incarnation, char out[OP_CHILD_NAME_MAX])
{
    switch (kind) {
    case OP_SYNCER: snprintf(out, OP_CHILD_NAME_MAX, "%s-syncer-%u", job, id); break;
    case OP_LEARNER: snprintf(out, OP_CHILD_NAME_MAX, "%s-learner-%u-%" PRIu64, job, id, incarnation); break;
    case OP_EVALUATOR: snprintf(out, OP_CHILD_NAME_MAX, "%s-evaluator-%" PRIu64, job, incarnation); break;
    }
}

void op_learner_selector(const char *job, char *out, size_t size)
{
    snprintf(out, size, OP_LABEL_JOB "=%s," OP_LABEL_ROLE "=learner", job);
}
