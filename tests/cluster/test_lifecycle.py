"""From nothing to trained weights: Helm install, a job of two syncer shards and three learners on real text, its weights on the
volume; then `helm uninstall` leaves nothing behind but what was asked to stay. (K7, K10, K11)"""
import json
import os
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import kube  # noqa: E402
from lib.kube import KIND, Namespace, Release, check, kubectl, wait  # noqa: E402
from lib.settings import VOLUMES_DIR  # noqa: E402

JOB = "first"
LEFT_OUT = ("events", "events.events.k8s.io", "endpoints", "endpointslices.discovery.k8s.io", "nodes", "componentstatuses",
            "leases.coordination.k8s.io/kube-node-lease", "pods.metrics.k8s.io", "nodes.metrics.k8s.io")


def everything():
    """Names of all objects of all kinds, namespaced or not, those that come and go by themselves aside."""
    kinds = [kind for kind in kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split() if kind not in LEFT_OUT]
    out = kubectl("get", ",".join(kinds), "-A", "--ignore-not-found", "-o",
                  "jsonpath={range .items[*]}{.kind}{'/'}{.metadata.namespace}{'/'}{.metadata.name}{'\\n'}{end}").stdout
    return {line for line in out.splitlines() if "/kube-node-lease/" not in line and not line.startswith("PersistentVolume/")}


def check_children(namespace):
    """Names, labels, owners and endpoints of what the operator makes (K11)."""
    job = namespace.job(JOB)
    check(len(namespace.list("secrets", f"diloco.dev/job={JOB}")) == 1, "no secret with the job's token")
    for kind, name in (("configmap", f"{JOB}-spec"), ("service", f"{JOB}-syncer"),
                       ("statefulset", f"{JOB}-syncer"), ("poddisruptionbudget", f"{JOB}-syncer"),
                       ("networkpolicy", f"{JOB}-syncer")):
        obj = namespace.get(kind, name)
        check(obj, f"no {kind} {name}")
        labels = obj["metadata"].get("labels", {})
        check(labels.get("app.kubernetes.io/managed-by") == "diloco-operator", f"{kind} {name}: labels {labels}")
        owners = obj["metadata"].get("ownerReferences", [])
        check([owner["uid"] for owner in owners] == [job["metadata"]["uid"]], f"{kind} {name}: owners {owners}")
    learners = namespace.learners(JOB)
    check(sorted(learners) == [0, 1, 2], f"learner ids {sorted(learners)}")
    for pod in learners.values():
        container = next(c for c in pod["spec"]["containers"] if c["name"] == "learner")
        text = json.dumps(container.get("args", [])) + json.dumps(container.get("env", []))
        for shard in range(2):  # By DNS: the names of the headless service's pods.
            check(f"{JOB}-syncer-{shard}.{JOB}-syncer" in text, f"{pod['metadata']['name']}: no DNS name of shard {shard} in {text}")
        check(pod["spec"]["securityContext"].get("runAsNonRoot"), "learner may run as root")
        check(container["securityContext"].get("readOnlyRootFilesystem"), "learner's root is writable")


def check_weights(namespace):
    """The exported weights are on the claim's volume, whole, and the model has learnt."""
    claim = namespace.get("pvc", f"{JOB}-output")
    check(claim and claim["status"]["phase"] == "Bound", f"claim {JOB}-output: {claim and claim['status']}")
    if not kube.OWN_CLUSTER:
        return
    folder = VOLUMES_DIR / claim["spec"]["volumeName"].rsplit("-", 1)[1]
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    weights = next((folder / path for path in found if path.name == "model.safetensors"), None)
    check(weights, f"no model.safetensors on the volume, only {found}")
    data = weights.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + header_bytes])
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    check(len(ends) > 10 and max(ends) == len(data) - 8 - header_bytes, "model.safetensors is not whole")
    config = json.loads((weights.parent / "config.json").read_text())
    check(config["hidden_size"] == 32, f"config.json: {config}")
    losses = [json.loads(line)["loss"] for line in (weights.parent / "evaluations.jsonl").read_text().splitlines()]
    check(losses[-1] < 4.0, f"validation losses {losses}")  # ln 256 = 5.5 untrained.


def helm_install_to_finished_job_and_back():
    before = everything()
    check(KIND not in kubectl("get", "crd", "-o", "name").stdout or not kube.OWN_CLUSTER, "the custom resource is there already")
    with Namespace("lifecycle") as namespace:
        with Release("diloco", "diloco-system", **{"crds.keep": "true"}) as release:
            namespace.apply(kube.job(JOB, replicas=3, shards=2))
            wait("three learners run", 90, lambda: len(namespace.running(JOB)) == 3)
            check_children(namespace)
            wait("a round is told", 60, lambda: namespace.job(JOB)["status"].get("syncer", {}).get("round", 0) > 0)
            phase = wait("the job's end", 180, lambda: namespace.phase(JOB) in ("Succeeded", "Failed") and namespace.phase(JOB))
            check(phase == "Succeeded", f"phase {phase}: {namespace.job(JOB)['status']}")
            job = namespace.job(JOB)
            status, _, message = namespace.condition(JOB, "Succeeded")
            check(status == "True", f"condition Succeeded is {status}: {message}")
            check(job["status"]["observedGeneration"] == job["metadata"]["generation"], "observedGeneration is behind")
            check(job["status"].get("completionTime"), "no completionTime")
            for condition in job["status"]["conditions"]:
                check("observedGeneration" in condition, f"condition without observedGeneration: {condition}")
            check("Succeeded" in namespace.kubectl("get", "ddj", JOB).stdout, "no phase in the printed columns")
            check_weights(namespace)
            check(not namespace.running(JOB), "learners still run after the end")
        wait("operator pods are gone after helm uninstall", 30, lambda: not release.pods())
        check(namespace.job(JOB), "the job went with the operator")  # crds.keep: what was asked to stay.
        namespace.kubectl("delete", "ddj", JOB, "--timeout=60s")
        wait("children are collected", 60, lambda: not namespace.list("pods,statefulsets,secrets,services,configmaps",
                                                                      f"diloco.dev/job={JOB}"))
        claims = [claim["metadata"]["name"] for claim in namespace.list("pvc")
                  if not claim["metadata"].get("deletionTimestamp")]
        check(claims == [f"{JOB}-output"], f"claims after the job's deletion: {claims}")
    # What was asked to stay, and only that.
    stayed = {line for line in everything() - before if not line.startswith("Namespace/")}
    asked = {f"CustomResourceDefinition//{KIND}", "APIService//v1alpha1.diloco.dev", "Secret/diloco-system/diloco-operator-key"}
    made_by_cluster = {"ConfigMap/diloco-system/kube-root-ca.crt", "ServiceAccount/diloco-system/default"}
    check(asked <= stayed <= asked | made_by_cluster, f"stayed: {sorted(stayed)}, asked for: {sorted(asked)}")
    kubectl("delete", "crd", KIND, "--timeout=60s")
    kubectl("delete", "namespace", "diloco-system", "--timeout=60s")

    def left():
        return everything() - before
    try:
        wait("nothing left", 45, lambda: not left(), every=2)
    except kube.Failed:
        raise kube.Failed(f"left behind: {sorted(left())}") from None


if __name__ == "__main__":
    kube.main(helm_install_to_finished_job_and_back)
