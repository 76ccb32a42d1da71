"""What the tests do with a cluster: kubectl and helm as processes, bounded waits, jobs, diagnostics.

A wait that fails raises with what was waited for; `scenario` then shows pods, events and logs of the namespace.
"""
import argparse
import contextlib
import gzip
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import traceback

from lib.settings import NODES, ROOT, tools

KIND = "decoupleddilocojobs.diloco.dev"
TEXT_SOURCE = pathlib.Path("/usr/share/dictd/gcide.dict.dz")  # Debian package dict-gcide: English prose.
IMAGE_PREFIX = os.environ.get("DILOCO_IMAGE_PREFIX", "localhost")
IMAGE_TAG = os.environ.get("DILOCO_IMAGE_TAG", "test")
OWN_CLUSTER = os.environ.get("DILOCO_CLUSTER_OWN") == "1"  # The nodes are ours to stop and to give capacity.
KEEP = os.environ.get("DILOCO_CLUSTER_KEEP") == "1"  # Namespaces of failed tests stay, to look at.


class Failed(AssertionError):
    pass


def check(condition, text):
    if not condition:
        raise Failed(text)


def image(program):
    return f"{IMAGE_PREFIX}/{program}:{IMAGE_TAG}"


def run(*command, text=None, timeout=120, ok=True):
    out = subprocess.run([str(part) for part in command], input=text, text=True, capture_output=True, timeout=timeout, check=False)
    if ok and out.returncode != 0:
        raise Failed(f"{' '.join(map(str, command))}: exit {out.returncode}\n{out.stdout[-2000:]}{out.stderr[-2000:]}")
    return out


def kubectl(*arguments, **options):
    return run(tools() / "kubectl", *arguments, **options)


def helm(*arguments, **options):
    return run(tools() / "helm", *arguments, **options)


def wait(what, seconds, condition, every=0.5):
    """Polls until `condition` gives something true, and gives that. `condition` may raise Failed meanwhile."""
    deadline = time.monotonic() + seconds
    last = None
    while True:
        try:
            value = condition()
            last = None
        except Failed as error:
            value, last = None, error
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {seconds} s" + (f" ({last})" if last else ""))
        time.sleep(every)


class Namespace:
    """A namespace with a job's text in it, restricted Pod Security enforced (K11), removed at the end of the `with`."""

    def __init__(self, name, text=True, labels=None):
        self.name = name
        self.text = text
        self.labels = {"pod-security.kubernetes.io/enforce": "restricted", **(labels or {})}
        self.failed = False

    def __enter__(self):
        self.delete()
        apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name, "labels": self.labels}})
        if self.text:
            apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "text", "namespace": self.name},
                   "data": {"text.txt": real_text()}})
        return self

    def __exit__(self, kind, value, trace):
        if kind:
            self.failed = True
            self.explain()
        if not (self.failed and KEEP):
            self.delete()
        return False

    def delete(self):
        kubectl("delete", "namespace", self.name, "--ignore-not-found", "--timeout=90s", timeout=100)

    def kubectl(self, *arguments, **options):
        return kubectl("-n", self.name, *arguments, **options)

    def get(self, kind, name):
        """The object, or None."""
        out = self.kubectl("get", kind, name, "-o", "json", ok=False)
        if out.returncode != 0:
            check("NotFound" in out.stderr or "not found" in out.stderr, f"get {kind} {name}: {out.stderr.strip()}")
            return None
        return json.loads(out.stdout)

    def list(self, kind, selector=None):
        return json.loads(self.kubectl("get", kind, *(["-l", selector] if selector else []), "-o", "json").stdout)["items"]

    def apply(self, obj, **options):
        obj.setdefault("metadata", {})["namespace"] = self.name
        return apply(obj, **options)

    def job(self, name):
        return self.get(KIND, name)

    def phase(self, name):
        job = self.job(name)
        return (job or {}).get("status", {}).get("phase")

    def condition(self, name, kind):
        """(status, reason, message) of a condition of the job; status is None when it has none of this type."""
        for condition in ((self.job(name) or {}).get("status") or {}).get("conditions", []):
            if condition["type"] == kind:
                return condition["status"], condition.get("reason"), condition.get("message", "")
        return None, None, ""

    def events(self, about=None):
        """(reason, message, kind/name) of the namespace's events."""
        items = json.loads(self.kubectl("get", "events.events.k8s.io", "-o", "json").stdout)["items"]
        found = [(item.get("reason", ""), item.get("note", ""),
                  f"{item.get('regarding', {}).get('kind')}/{item.get('regarding', {}).get('name')}") for item in items]
        return [event for event in found if about is None or event[2].split("/")[1] == about]

    def learners(self, job, living=True):
        """Learner pods by learner id; of several with one id the one that is not being deleted."""
        found = {}
        for pod in sorted(self.list("pods", f"diloco.dev/job={job},diloco.dev/role=learner"),
                          key=lambda pod: pod["metadata"]["creationTimestamp"]):
            if living and (pod["metadata"].get("deletionTimestamp") or pod["status"].get("phase") in ("Failed", "Succeeded")):
                continue
            found[int(pod["metadata"]["labels"]["diloco.dev/learner-id"])] = pod
        return found

    def running(self, job):
        return {key: pod for key, pod in self.learners(job).items() if ready(pod)}

    def explain(self):
        """What a person would look at first."""
        for arguments in (["get", "pods,pvc,statefulset,poddisruptionbudget,ddj", "-o", "wide"],
                          ["get", "ddj", "-o", "jsonpath={range .items[*]}{.metadata.name}{' '}{.status}{'\\n'}{end}"],
                          ["get", "events", "--sort-by=.lastTimestamp"]):
            out = self.kubectl(*arguments, ok=False)
            print(f"--- {self.name}: kubectl {' '.join(arguments)}\n{out.stdout[-6000:]}{out.stderr[-500:]}")
        for pod in self.kubectl("get", "pods", "-o", "name", ok=False).stdout.split():
            out = self.kubectl("logs", pod, "--all-containers", "--tail=12", ok=False)
            print(f"--- {pod}\n{out.stdout[-2500:]}{out.stderr[-300:]}")
        sys.stdout.flush()


def ready(pod):
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def uid(pod):
    return pod["metadata"]["uid"]


def restarts(pod):
    return sum(status.get("restartCount", 0) for status in pod["status"].get("containerStatuses", []))


def apply(obj, ok=True, server_side=True):
    return kubectl("apply", *(["--server-side", "--force-conflicts"] if server_side else []), "-f", "-", text=json.dumps(obj), ok=ok)


def real_text(kilobytes=600):
    """English prose of the dictionary; fits into a ConfigMap."""
    check(TEXT_SOURCE.exists(), f"no {TEXT_SOURCE}; install dict-gcide")
    with gzip.open(TEXT_SOURCE, "rb") as source:
        source.read(4096)
        return re.sub(rb"[^\x20-\x7e\n]", b"", source.read(kilobytes * 1024)).decode("ascii")


def merge(base, changes):
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
    return base


def pod_template(cpu="300m", memory="512Mi", **extra):
    """A learner's or syncer's template: the text, and a bound on the processor so that the cluster itself stays awake."""
    return {"spec": merge({
        "containers": [{"name": "learner", "resources": {"requests": {"cpu": "20m", "memory": "64Mi"},
                                                         "limits": {"cpu": cpu, "memory": memory}},
                        "volumeMounts": [{"name": "text", "mountPath": "/data", "readOnly": True}]}],
        "volumes": [{"name": "text", "configMap": {"name": "text"}}]}, extra)}


def job(name, replicas=3, shards=1, **spec):
    """A job with a tiny model on real text; keyword arguments override parts of its spec, deeply."""
    pools = spec.pop("pools", None) or [{"name": "steady", "replicas": replicas, "template": pod_template()}]
    return {"apiVersion": "diloco.dev/v1alpha1", "kind": "DecoupledDiLoCoJob", "metadata": {"name": name}, "spec": merge({
        "training": {
            "tokenBudget": 300000, "seed": 1, "batchSequences": 4, "threads": 1, "evaluationSeconds": 2,
            "model": {"width": 32, "layers": 2, "heads": 2, "sequenceLength": 32},
            "data": {"paths": ["/data/text.txt"], "validationSequences": 32},
            "innerOptimizer": {"learningRate": 0.005, "warmupSteps": 20}},
        "sync": {"fragments": 4, "interval": 8, "overlap": 1, "warmup": {"steps": 0}, "heartbeatSeconds": 1, "timeoutSeconds": 4,
                 "finishSeconds": 10},
        "syncer": {"shards": shards, "storage": {"size": "1Gi"}},
        "learners": {"min": 1, "max": 8, "replicas": replicas, "pools": pools}}, spec)}


def evict(namespace, pod):
    """What `kubectl drain` does to one pod."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    return kubectl("create", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", "-f", "-", text=json.dumps(body))


def cluster_command(*arguments):
    return run(sys.executable, ROOT / "tests" / "cluster" / "cluster.py", *arguments)


def node_ready(node):
    obj = json.loads(kubectl("get", "node", node, "-o", "json").stdout)
    return ready(obj)


@contextlib.contextmanager
def node_stopped(node=NODES[1]):
    """The node is frozen within the block, its kubelet and its containers; it is Ready again after it."""
    cluster_command("stop", node)
    try:
        yield
    finally:
        cluster_command("continue", node)
        wait(f"{node} Ready again", 60, lambda: node_ready(node))


RESOURCE = "diloco.dev/slot"


def set_capacity(node, count):
    """Gives a node `count` of an extended resource, which the scheduler sees when this returns; None takes it away."""
    path = f"/status/capacity/{RESOURCE.replace('/', '~1')}"
    patch = [{"op": "remove", "path": path}] if count is None else [{"op": "add", "path": path, "value": str(count)}]
    kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(patch))
    # The scheduler goes by what is allocatable, which the kubelet takes over from there a little later.
    wait(f"{node} has {count} of {RESOURCE} to give", 60, lambda: json.loads(kubectl("get", "node", node, "-o", "json").stdout)[
        "status"]["allocatable"].get(RESOURCE, "0") == str(count or 0))

    def allocatable():  # The kubelet makes it from the capacity at its next report.
        status = json.loads(kubectl("get", "node", node, "-o", "json").stdout)["status"]
        return count is None or status["allocatable"].get(RESOURCE) == str(count)
    wait(f"{node} offers {count} of {RESOURCE}", 60, allocatable)


class Release:
    """The chart, installed within the `with`."""

    def __init__(self, name, namespace, **values):
        self.name, self.namespace = name, namespace
        self.values = {"images.registry": IMAGE_PREFIX, "images.tag": IMAGE_TAG, "resources.limits.memory": "512Mi",
                       "crds.keep": "false", **values}

    def install(self):
        arguments = [f"--set={key}={value}" for key, value in self.values.items()]
        helm("upgrade", "--install", self.name, ROOT / "helm" / "diloco", "--namespace", self.namespace, "--create-namespace",
             "--wait", "--timeout", "120s", *arguments, timeout=150)

    def uninstall(self):
        return helm("uninstall", self.name, "--namespace", self.namespace, "--ignore-not-found", "--wait", timeout=150).stdout

    def pods(self):
        return json.loads(kubectl("-n", self.namespace, "get", "pods", "-l", f"app.kubernetes.io/instance={self.name}", "-o",
                                  "json").stdout)["items"]

    def holder(self):
        """Who holds the operators' lease; empty: nobody."""
        leases = json.loads(kubectl("-n", self.namespace, "get", "leases", "-o", "json").stdout)["items"]
        return next((lease["spec"].get("holderIdentity") or "" for lease in leases if "diloco" in lease["metadata"]["name"]), "")

    def leader(self):
        """Name of the operator pod that holds the lease, or None."""
        holder = self.holder()
        return next((pod["metadata"]["name"] for pod in self.pods() if pod["metadata"]["name"] in holder), None)

    def logs(self, tail=60):
        for pod in self.pods():
            name = pod["metadata"]["name"]
            out = kubectl("-n", self.namespace, "logs", name, f"--tail={tail}", ok=False)
            print(f"--- operator {name}\n{out.stdout}{out.stderr}", flush=True)

    def __enter__(self):
        try:
            self.install()
        except Failed:
            self.explain()
            raise
        return self

    def explain(self):
        out = kubectl("-n", self.namespace, "get", "all,events", "-o", "wide", ok=False)
        print(out.stdout[-4000:])
        self.logs()

    def __exit__(self, kind, value, trace):
        if kind:
            self.logs()
        if not (kind and KEEP):
            self.uninstall()
        return False


def main(*scenarios):
    """Runs the scenarios of a test program; those named as arguments, else all. The last line says what held."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", help="as all tests take it; here the images say what is tested")
    parser.add_argument("scenarios", nargs="*")
    names = parser.parse_args().scenarios
    wanted = [scenario for scenario in scenarios if not names or scenario.__name__ in names]
    if not wanted:
        sys.exit(f"no such scenario; there are: {', '.join(s.__name__ for s in scenarios)}")
    held, failed = [], []
    for scenario in wanted:
        started = time.monotonic()
        try:
            scenario()
            held.append(scenario.__name__)
            print(f"ok   {scenario.__name__} {time.monotonic() - started:.1f} s", flush=True)
        except Exception:  # One failed scenario does not hide what the others would have shown.
            traceback.print_exc()
            failed.append(scenario.__name__)
            print(f"FAIL {scenario.__name__} {time.monotonic() - started:.1f} s", flush=True)
    print(f"{len(held)} of {len(wanted)} scenarios" + (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)
