"""Everything that a cluster does to pods, done to one job: it finishes, survivors keep UID and restart count, no disruption
consumes a restart budget, and the conditions tell the truth meanwhile. (K1, K2, K3, K9)"""
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import daemons, kube  # noqa: E402
from lib.kube import Failed, Namespace, Release, check, kubectl, restarts, uid, wait  # noqa: E402
from lib.settings import CGROUP, NODES  # noqa: E402

JOB = "rough"
LEARNERS = 4


def incarnation(pod):
    return int(pod["metadata"]["labels"]["diloco.dev/incarnation"])


class Watch:
    """Who is who before a disruption; afterwards exactly the victims are others."""

    def __init__(self, namespace):
        self.namespace = namespace
        self.before = wait(f"{LEARNERS} learners run", 120, self.all_running)

    def all_running(self):
        learners = self.namespace.running(JOB)
        return learners if len(learners) == LEARNERS else None

    def replaced(self, victims, seconds=60):
        """Waits until each of the victims' ids is taken by another pod that is Ready; all others are untouched (K1)."""
        def done():
            now = self.all_running()
            return now if now and all(uid(now[victim]) != uid(self.before[victim]) for victim in victims) else None
        now = wait(f"learners {victims} replaced", seconds, done)
        check(sorted(now) == sorted(self.before), f"ids {sorted(self.before)} became {sorted(now)}")
        for learner, pod in now.items():
            if learner not in victims:
                check(uid(pod) == uid(self.before[learner]), f"learner {learner} was replaced, though nothing happened to it")
                check(restarts(pod) == restarts(self.before[learner]), f"learner {learner} restarted")
        for victim in victims:
            check(incarnation(now[victim]) > incarnation(self.before[victim]), f"learner {victim}: no newer incarnation")
        return now


def start(namespace):
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
              "nodeTaintsPolicy": "Honor", "labelSelector": {"matchLabels": {"diloco.dev/job": JOB, "diloco.dev/role": "learner"}}}
    template = kube.pod_template(cpu="100m", memory="700Mi", topologySpreadConstraints=[spread])  # Some on each node.
    pools = [{"name": "steady", "replicas": LEARNERS, "template": template}]
    # More tokens than can be trained until the disruptions are over; the budget is set to what has been trained afterwards.
    namespace.apply(kube.job(JOB, replicas=LEARNERS, shards=2, pools=pools, training={"tokenBudget": 10**9},
                             sync={"quorum": 3}, learners={"min": LEARNERS},
                             # The node that is lost takes learners with it, not the syncers.
                             syncer={"template": {"spec": {"nodeSelector": {"kubernetes.io/hostname": NODES[0]}}}}))
    wait("rounds are merged", 120, lambda: rounds(namespace) > 0)


def rounds(namespace):
    return (namespace.job(JOB).get("status") or {}).get("syncer", {}).get("round", 0)


def goes_on(namespace, what):
    """Rounds are still merged."""
    before = rounds(namespace)
    wait(f"rounds go on after {what}", 60, lambda: rounds(namespace) > before)


def degraded(namespace):
    return namespace.condition(JOB, "Degraded")[0]


def deleted_and_evicted(namespace):
    watch = Watch(namespace)
    namespace.kubectl("delete", "pod", watch.before[0]["metadata"]["name"], "--wait=false")
    kube.evict(namespace.name, watch.before[2]["metadata"]["name"])
    wait("Degraded while learners are fewer than min", 40, lambda: degraded(namespace) == "True")
    watch.replaced([0, 2])
    wait("not Degraded any more", 40, lambda: degraded(namespace) == "False")
    goes_on(namespace, "a deletion and an eviction")


def container_cgroup(pod, container):
    """The memory cgroup of a pod's container on this machine."""
    status = next(s for s in pod["status"]["containerStatuses"] if s["name"] == container)
    identity = status["containerID"].split("://")[1]
    for root in (f"/sys/fs/cgroup/memory/{CGROUP}", f"/sys/fs/cgroup/{CGROUP}"):
        for folder, _, _ in os.walk(root):
            if folder.endswith(identity):
                return folder
    raise Failed(f"no memory cgroup of {pod['metadata']['name']}")


def processes(pod, container):
    procs = os.path.join(container_cgroup(pod, container), "cgroup.procs")
    with open(procs, encoding="ascii") as lines:
        return [int(line) for line in lines]


HOG = """
import os, sys, time
open(sys.argv[1], "w").write("0")
blocks = []
for _ in range(64):  # Many small processes: none of them is as large as the one that is to be killed.
    if os.fork() == 0:
        while True:
            blocks.append(bytearray(b"x" * 1048576))
            time.sleep(0.01 if len(blocks) < 64 else 1)
time.sleep(60)
"""


def use_up_memory(pod, container):
    """Takes the rest of the container's memory from within its cgroup until the kernel has killed the container's process."""
    procs = os.path.join(container_cgroup(pod, container), "cgroup.procs")
    victims = processes(pod, container)
    hog = subprocess.Popen([sys.executable, "-c", HOG, procs], start_new_session=True)
    try:
        wait(f"{container} of {pod['metadata']['name']} is killed for memory", 60,
             lambda: not any(daemons.alive(victim) for victim in victims), every=0.05)
    finally:
        os.killpg(hog.pid, signal.SIGKILL)
        hog.wait()


def killed_for_memory(namespace):
    """The kernel kills a learner; its container restarts in place (K1)."""
    watch = Watch(namespace)
    victim = watch.before[1]
    use_up_memory(victim, "learner")

    def restarted():
        pod = namespace.learners(JOB).get(1)
        check(pod and uid(pod) == uid(victim), "learner 1's pod was replaced; a crashed container restarts in place first")
        status = next(s for s in pod["status"]["containerStatuses"] if s["name"] == "learner")
        end = status.get("lastState", {}).get("terminated") or {}
        return end.get("reason") == "OOMKilled" and restarts(pod) == restarts(victim) + 1 and kube.ready(pod)
    wait("learner 1 is OOMKilled and restarts in place", 60, restarted)
    for learner, pod in wait("all run again", 60, watch.all_running).items():
        check(uid(pod) == uid(watch.before[learner]), f"learner {learner} was replaced")
    goes_on(namespace, "a container killed for memory")


def syncer_killed(namespace):
    watch = Watch(namespace)
    before = namespace.get("pod", f"{JOB}-syncer-0")
    namespace.kubectl("delete", "pod", f"{JOB}-syncer-0", "--grace-period=0", "--force", "--wait=false")

    def back():
        pod = namespace.get("pod", f"{JOB}-syncer-0")
        return pod and uid(pod) != uid(before) and kube.ready(pod)
    wait("the syncer is back", 60, back)
    goes_on(namespace, "a syncer's death")
    now = wait("learners run", 30, watch.all_running)
    for learner, pod in now.items():  # Nobody but the syncer.
        check(uid(pod) == uid(watch.before[learner]) and restarts(pod) == restarts(watch.before[learner]),
              f"learner {learner} did not survive the syncer's death")


def operator_killed(namespace, release):
    """In the middle of replacing three learners the leading operator gets SIGKILL; the other takes over within the lease (K9)."""
    watch = Watch(namespace)
    leader = wait("a leader", 30, release.leader)
    pod = next(pod for pod in release.pods() if pod["metadata"]["name"] == leader)
    holder = release.holder()
    namespace.kubectl("delete", "pod", *(watch.before[i]["metadata"]["name"] for i in (0, 1, 2)), "--wait=false")
    if kube.OWN_CLUSTER:
        for process in processes(pod, "operator"):
            os.kill(process, signal.SIGKILL)
    else:
        kubectl("-n", release.namespace, "delete", "pod", leader, "--grace-period=0", "--force", "--wait=false")
    killed = time.monotonic()
    wait("another holds the lease", 30, lambda: release.holder() not in ("", holder))
    print(f"  taken over after {time.monotonic() - killed:.1f} s")
    watch.replaced([0, 1, 2], 60)
    names = [pod["metadata"]["labels"]["diloco.dev/learner-id"] for pod in namespace.list(
        "pods", f"diloco.dev/job={JOB},diloco.dev/role=learner") if not pod["metadata"].get("deletionTimestamp")]
    check(sorted(names) == [str(i) for i in range(LEARNERS)], f"learner ids {sorted(names)}: twins")
    goes_on(namespace, "the operator's death")


def node_not_ready(namespace):
    """Learners on a lost node are replaced elsewhere without waiting for the old pods to vanish (K3)."""
    watch = Watch(namespace)
    victims = [i for i, pod in watch.before.items() if pod["spec"]["nodeName"] == NODES[1]]
    check(victims and len(victims) < LEARNERS, f"learners on {NODES[1]}: {victims}; the test needs some on both nodes")
    with kube.node_stopped():
        wait("node NotReady", 40, lambda: not kube.node_ready(NODES[1]))
        now = watch.replaced(victims, 60)
        for victim in victims:
            check(now[victim]["spec"]["nodeName"] == NODES[0], f"learner {victim} runs on {now[victim]['spec']['nodeName']}")
        status, _, message = namespace.condition(JOB, "Degraded")
        print(f"meanwhile Degraded={status}: {message}")
    wait("the old pods vanish once the node is back", 60, lambda: len(namespace.list(
        "pods", f"diloco.dev/job={JOB},diloco.dev/role=learner")) == LEARNERS)
    check({i: uid(p) for i, p in namespace.learners(JOB).items()} == {i: uid(p) for i, p in now.items()},
          "a replacement was deleted when the node came back")


def no_budget_consumed(namespace):
    job = namespace.job(JOB)
    failed = namespace.condition(JOB, "Failed")
    check(failed[0] in (None, "False"), f"condition Failed: {failed}")
    text = [f"{reason} {note}" for reason, note, _ in namespace.events(JOB)]
    check(not any("CrashLoop" in line for line in text), f"a disruption counted as a crash: {text}")
    return job


def finished(namespace):
    """The budget is lowered to somewhat more than what has been trained; the job ends well."""
    trained = namespace.job(JOB)["status"]["syncer"].get("tokens", 0)
    namespace.kubectl("patch", "ddj", JOB, "--type=merge", "-p", f'{{"spec":{{"training":{{"tokenBudget":{trained + 100000}}}}}}}')
    phase = wait("the job's end", 240, lambda: namespace.phase(JOB) in ("Succeeded", "Failed") and namespace.phase(JOB))
    check(phase == "Succeeded", f"{phase}: {namespace.job(JOB)['status']}")


def rough_times():
    with Release("diloco", "diloco-system") as release, Namespace("rough") as namespace:
        timed(start, namespace)
        for step in (deleted_and_evicted, syncer_killed):
            timed(step, namespace)
        if kube.OWN_CLUSTER:
            timed(killed_for_memory, namespace)
        timed(operator_killed, namespace, release)
        if kube.OWN_CLUSTER:
            timed(node_not_ready, namespace)
        no_budget_consumed(namespace)
        timed(finished, namespace)


def timed(step, *arguments):
    started = time.monotonic()
    step(*arguments)
    print(f"  {step.__name__}: {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kube.main(rough_times)
