"""What only the operator can see becomes a condition and an event of the job: quota, image pull, unschedulable, pending volume.
What the schema refuses is in test_schema.py. (K6)"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import kube  # noqa: E402
from lib.kube import Namespace, Release, wait  # noqa: E402

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
    kube.main(seen_by_the_operator)
