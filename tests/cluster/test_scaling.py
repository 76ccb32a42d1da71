"""The ensemble grows onto capacity and shrinks without it: scavenging by an extended resource, `kubectl scale`, an autoscaling/v2
HorizontalPodAutoscaler; beside it a second job that none of this disturbs. (E-lines of elasticity, K4, K5, K8)"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import kube  # noqa: E402
from lib.kube import RESOURCE, Failed, Namespace, Release, check, restarts, uid, wait  # noqa: E402
from lib.metric import Metric  # noqa: E402
from lib.settings import NODES  # noqa: E402

FOREVER = {"tokenBudget": 10**9}


def desired(namespace, job):
    return (namespace.job(job).get("status") or {}).get("learners", {}).get("desired")


def rounds(namespace, job):
    return (namespace.job(job).get("status") or {}).get("syncer", {}).get("round", 0)


def count(namespace, job, number):
    """Exactly `number` learners run and no pod more exists, those that are leaving aside."""
    def settled():
        return len(namespace.running(job)) == number and len(namespace.learners(job)) == number
    return settled


def scavenging(namespace):
    """One steady learner; capacity for two more appears, later it is one less, then none."""
    slot = kube.pod_template(cpu="100m")
    slot["spec"]["containers"][0]["resources"]["requests"][RESOURCE] = "1"
    slot["spec"]["containers"][0]["resources"]["limits"][RESOURCE] = "1"
    pools = [{"name": "steady", "replicas": 1, "template": kube.pod_template(cpu="100m")},
             {"name": "spot", "replicas": 0, "scavenge": {"max": 5, "pendingSeconds": 5, "cooldownSeconds": 2}, "template": slot}]
    kube.set_capacity(NODES[0], 0)
    namespace.apply(kube.job("gather", replicas=1, pools=pools, training=FOREVER))
    wait("the steady learner trains", 120, lambda: rounds(namespace, "gather") > 0)
    steady = uid(namespace.learners("gather")[0])
    check(len(namespace.running("gather")) == 1, "more learners than there is room for")
    kube.set_capacity(NODES[0], 2)
    wait("grown by two", 90, lambda: len(namespace.running("gather")) == 3)
    # It stops asking: what does not find a place is taken back, and no new one is made while nothing changes.
    wait("no learner waits for room", 60, count(namespace, "gather", 3))
    asked = highest_learner(namespace)
    wait("rounds with three learners", 60, lambda: connected(namespace) == 3)
    check(highest_learner(namespace) <= asked + 1, "it keeps asking for room that is not there")
    grown = {key: uid(pod) for key, pod in namespace.running("gather").items()}
    # One slot less: the node's owner takes a pod away. It goes on with what is left, and the others do not notice.
    kube.set_capacity(NODES[0], 1)
    victim = next(pod for pod in namespace.running("gather").values() if pod["metadata"]["labels"]["diloco.dev/pool"] == "spot")
    kube.evict(namespace.name, victim["metadata"]["name"])
    wait("shrunk by one", 60, count(namespace, "gather", 2))
    before = rounds(namespace, "gather")
    wait("rounds go on", 60, lambda: rounds(namespace, "gather") > before)
    for learner, pod in namespace.running("gather").items():
        check(grown.get(learner) == uid(pod), f"learner {learner} was replaced")
    check(uid(namespace.learners("gather")[0]) == steady, "the steady learner was replaced")
    namespace.kubectl("delete", "ddj", "gather", "--timeout=60s")
    kube.set_capacity(NODES[0], None)


def highest_learner(namespace):
    """The newest incarnation of the newest learner: grows with every pod that is made."""
    return max(int(pod["metadata"]["labels"]["diloco.dev/incarnation"]) for pod in namespace.learners("gather").values())


def connected(namespace):
    return (namespace.job("gather").get("status") or {}).get("learners", {}).get("connected")


def scaled_by_hand(namespace, job):
    """`kubectl scale` within min and max; beyond max the API server refuses."""
    namespace.kubectl("scale", "ddj", job, "--replicas=3")
    wait("three learners", 90, count(namespace, job, 3))
    first = {key: uid(pod) for key, pod in namespace.running(job).items()}
    namespace.kubectl("scale", "ddj", job, "--replicas=2")
    wait("two learners", 60, count(namespace, job, 2))
    for learner, pod in namespace.running(job).items():
        check(first[learner] == uid(pod), f"learner {learner} was replaced by a scale-down")
    out = namespace.kubectl("scale", "ddj", job, "--replicas=99", ok=False)
    check(out.returncode != 0 and "learners.max" in out.stderr, f"replicas beyond max: {out.stderr}")


def autoscaled(namespace, job, metric):
    """An autoscaling/v2 object drives the scale subresource, down as well as up, never beyond the bounds."""
    namespace.apply({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": job}, "spec": {
        "scaleTargetRef": {"apiVersion": "diloco.dev/v1alpha1", "kind": "DecoupledDiLoCoJob", "name": job},
        "minReplicas": 1, "maxReplicas": 4,
        "metrics": [{"type": "External", "external": {"metric": {"name": "wanted"}, "target": {"type": "AverageValue",
                                                                                             "averageValue": "1"}}}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}, "scaleUp": {"stabilizationWindowSeconds": 0}}}})
    metric.value = 4
    wait("the autoscaler has grown it to four", 120, count(namespace, job, 4))
    metric.value = 1
    wait("the autoscaler has shrunk it to one", 120, count(namespace, job, 1))
    namespace.kubectl("delete", "hpa", job)


def growing_and_shrinking():
    if not kube.OWN_CLUSTER:
        raise Failed("needs nodes whose capacity it may change")
    with Release("diloco", "diloco-system"), Namespace("scaling") as namespace, Namespace("aside") as aside, Metric() as metric:
        quiet = kube.job("quiet", replicas=2, training=FOREVER,
                         pools=[{"name": "steady", "replicas": 2, "template": kube.pod_template(cpu="60m")}])
        aside.apply(quiet)
        namespace.apply(kube.job("elastic", replicas=1, training=FOREVER, learners={"min": 1, "max": 4},
                                 pools=[{"name": "steady", "replicas": 1, "template": kube.pod_template(cpu="60m")}]))
        wait("both jobs train", 120, lambda: rounds(aside, "quiet") > 0 and rounds(namespace, "elastic") > 0)
        before = {key: (uid(pod), restarts(pod)) for key, pod in aside.running("quiet").items()}
        scaled_by_hand(namespace, "elastic")
        autoscaled(namespace, "elastic", metric)
        scavenging(namespace)
        after = {key: (uid(pod), restarts(pod)) for key, pod in aside.running("quiet").items()}
        check(before == after, f"the job beside it was disturbed: {before} became {after}")
        check(aside.condition("quiet", "Degraded")[0] == "False", f"the job beside it is degraded: {aside.job('quiet')['status']}")


if __name__ == "__main__":
    kube.main(growing_and_shrinking)
