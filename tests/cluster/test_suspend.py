"""Suspend and resume keep the state; suspended means that every pod is gone. (K8, S2)"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import kube  # noqa: E402
from lib.kube import Namespace, Release, check, wait  # noqa: E402

JOB = "pausing"


def progress(namespace):
    status = (namespace.job(JOB).get("status") or {})
    return status.get("syncer", {}).get("round", 0), status.get("syncer", {}).get("tokens", 0)


def pods(namespace):
    return namespace.list("pods", f"diloco.dev/job={JOB}")


def suspend(namespace, wanted):
    namespace.kubectl("patch", "ddj", JOB, "--type=merge", "-p", f'{{"spec":{{"suspend":{str(wanted).lower()}}}}}')


def suspended_and_resumed_twice():
    with Release("diloco", "diloco-system"), Namespace("pausing") as namespace:
        namespace.apply(kube.job(JOB, replicas=2, shards=2, training={"tokenBudget": 10**9}))
        wait("it trains", 120, lambda: progress(namespace)[0] > 3)
        for _ in range(2):
            suspend(namespace, True)
            left = []

            def is_suspended():
                told = namespace.phase(JOB) == "Suspended"
                left.extend(pod["metadata"]["name"] for pod in (pods(namespace) if told else []))
                return told
            wait("Suspended", 90, is_suspended)
            check(not left, f"told Suspended while there were pods: {left}")  # K8
            check(namespace.condition(JOB, "Suspended")[0] == "True", f"conditions: {namespace.job(JOB)['status']}")
            check(namespace.job(JOB)["status"]["learners"].get("running", 0) == 0, "running learners while suspended")
            claims = sorted(claim["metadata"]["name"] for claim in namespace.list("pvc"))
            check({f"state-{JOB}-syncer-0", f"state-{JOB}-syncer-1"} <= set(claims), f"claims while suspended: {claims}")
            before = progress(namespace)
            suspend(namespace, False)
            wait("it goes on", 120, lambda before=before: progress(namespace)[0] > before[0] and
                 progress(namespace)[1] >= before[1])
            check(namespace.condition(JOB, "Suspended")[0] == "False", "still told to be suspended")
            # The first rounds after a resume follow those before it: nothing began anew.
            log = namespace.kubectl("logs", f"{JOB}-syncer-0").stdout
            check("state restored" in log, f"syncer 0 did not go on from its state:\n{log[:1500]}")


if __name__ == "__main__":
    kube.main(suspended_and_resumed_twice)
