"""What the API server refuses by itself, saying which field and why; and what only the operator can see, which becomes a
condition and an event. (J3, K6, K8)"""
import copy
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import kube  # noqa: E402
from lib.kube import Namespace, Release, check, merge, wait  # noqa: E402

# (what is wrong, what the refusal must name)
WRONG = (
    ({"training": {"tokenBudget": 0}}, ("spec.training.tokenBudget", "greater than or equal to 1")),
    ({"training": {"model": {"heads": 3}}}, ("training", "model.width must be a multiple of model.heads")),
    ({"sync": {"mode": "sometimes"}}, ("spec.sync.mode", "decoupled")),
    ({"sync": {"fragments": "many"}}, ("spec.sync.fragments", "integer")),
    ({"sync": {"overlap": 8}}, ("sync", "sync.overlap must be below sync.interval")),
    ({"sync": {"timeoutSeconds": 1}}, ("sync", "sync.timeoutSeconds must be above twice sync.heartbeatSeconds")),
    ({"sync": {"quorum": 9}}, ("spec", "sync.quorum must not exceed learners.max")),
    ({"sync": {"fragmints": 4}}, ("fragmints", "unknown field")),
    ({"learners": {"min": 5}}, ("spec", "learners.min must not exceed learners.replicas")),
    ({"learners": {"replicas": 9}}, ("spec", "learners.replicas must not exceed learners.max")),
    ({"syncer": {"shards": 5}}, ("spec", "syncer.shards must not exceed sync.fragments")),
)
FROZEN = ({"training": {"model": {"width": 64}}}, {"sync": {"fragments": 8}}, {"sync": {"compression": "int4"}},
          {"syncer": {"shards": 2}})
CHANGEABLE = ({"training": {"tokenBudget": 400000}}, {"learners": {"replicas": 4}}, {"suspend": False},
              {"sync": {"grace": {"maxSeconds": 2}}})


def changed(base, change):
    return merge(copy.deepcopy(base), {"spec": copy.deepcopy(change)})


def refused_at_apply():
    with Namespace("refusals", text=False) as namespace:
        good = kube.job("refused", suspend=True)
        for change, words in WRONG:
            for server_side in (True, False):  # Both ways to apply give the same answer.
                out = namespace.apply(changed(good, change), ok=False, server_side=server_side)
                check(out.returncode != 0, f"{change} was accepted")
                for word in words:
                    check(word in out.stderr or word in out.stderr.replace("field not declared in schema", "unknown field"),
                          f"{change}: no word of '{word}' in: {out.stderr}")
        check(not namespace.list("ddj"), "a refused job exists")
        namespace.apply(good)
        for change in FROZEN:  # K8
            out = namespace.apply(changed(good, change), ok=False)
            check(out.returncode != 0 and "spec" in out.stderr, f"{change} on a job that exists was accepted")
        for change in CHANGEABLE:
            out = namespace.apply(changed(good, change), ok=False)
            check(out.returncode == 0, f"{change} on a job that exists was refused: {out.stderr}")


def told(namespace, job, words):
    """Whether a condition and an event of the job (or a warning about its objects) carry each of the words."""
    conditions = [f"{c['type']}={c['status']} {c.get('reason')} {c.get('message')}" for c in
                  ((namespace.job(job) or {}).get("status") or {}).get("conditions", [])]
    events = [f"{reason} {note}" for reason, note, about in namespace.events() if about == f"DecoupledDiLoCoJob/{job}"]
    return all(any(word.lower() in text.lower() for text in conditions) and any(word.lower() in text.lower() for text in events)
               for word in words)


def seen_by_the_operator():
    """Quota, image pull, unschedulable, pending volume: four jobs at once, each with its own fault."""
    with Release("diloco", "diloco-system"), Namespace("faults") as namespace:
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"},
                 "spec": {"hard": {"count/pods": "0"}}}
        with Namespace("quota") as limited:
            limited.apply(quota)
            limited.apply(kube.job("quota", replicas=2))
            template = kube.pod_template()
            template["spec"]["containers"][0]["image"] = "localhost/absent:1"
            namespace.apply(kube.job("image", pools=[{"name": "steady", "replicas": 1, "template": template}], replicas=1))
            nowhere = kube.pod_template(nodeSelector={"diloco.dev/nowhere": "true"})
            namespace.apply(kube.job("place", pools=[{"name": "steady", "replicas": 1, "template": nowhere}], replicas=1))
            namespace.apply(kube.job("volume", replicas=1, syncer={"storage": {"size": "1Gi", "storageClassName": "absent"}}))
            for where, job, words in ((limited, "quota", ("quota",)), (namespace, "image", ("image",)),
                                      (namespace, "place", ("unschedulable",)), (namespace, "volume", ("volume",))):
                wait(f"job {job}: a condition and an event say {words}", 60, lambda w=where, j=job, x=words: told(w, j, x))
            # A quota that is lifted is noticed without anybody's help.
            limited.kubectl("delete", "resourcequota", "small")
            wait("learners run once the quota is gone", 90, lambda: len(limited.running("quota")) == 2)


if __name__ == "__main__":
    kube.main(refused_at_apply, seen_by_the_operator)
