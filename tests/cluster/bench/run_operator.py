#!/usr/bin/env python3
"""The operator against 1,000 jobs and 10,000 pods in a real API server (etcd and kube-apiserver; nodes, kubelets, StatefulSets and
syncers are faked through the API). Figures in build/results/operator.json.

    make bench-operator
    run_operator.py --build build/release [--jobs 1000] [--learners 8] [--yardstick]

With --yardstick a controller as it is usually written in Go (yardstick/main.go) does the same to the same objects afterwards.

event_to_action: from the watch event of a learner's pod that is gone to the watch event of its replacement, both as another
client of the API server sees them. Runs with a network and processes of its own, so that no port is taken from others and nothing stays."""
import argparse
import asyncio
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import api as api_module  # noqa: E402
import fake  # noqa: E402
import plane as plane_module  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
SPACES = 10
BIG = 40  # Learners of the one large job.
METRICS_PORT, PROBE_PORT = 8080, 8081


class Operator:
    """The process that is measured."""

    def __init__(self, options, plane, log):
        self.command = [str(options.build / "bin" / "diloco-operator"), f"--kubeconfig={plane.kubeconfig}", "--leader-elect",
                        "--lease-namespace=default", "--lease-name=bench", f"--metrics-listen=127.0.0.1:{METRICS_PORT}",
                        f"--health-listen=127.0.0.1:{PROBE_PORT}", "--syncer-image=diloco-syncer:bench",
                        "--worker-image=diloco-worker:bench", "--qps=2000", "--burst=4000", "--log-level=warn",
                        "--status-via=direct"]
        self.log, self.process = log, None

    def start(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        return time.monotonic()

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def check(self):
        if self.process.poll() is not None:
            raise RuntimeError(f"the operator ended with {self.process.returncode}")

    def status(self, key):
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{key}:\s+(\d+) kB", text, re.M).group(1)) / 1024

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_ready(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PROBE_PORT}/readyz", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def metric(self, name):
        """The sum over all series of a metric; 0 when there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))


async def until(what, seconds, condition, world=None, operator=None, pause=0.05):
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds} s: {what}")
        if world:
            world.check()
        if operator:
            operator.check()
        await asyncio.sleep(pause)
    return time.monotonic()


def say(text):
    print(text, flush=True)


def job(number, learners):
    space, name = f"bench-{number % SPACES}", f"job-{number}"
    return space, name, {"apiVersion": "diloco.dev/v1alpha1", "kind": "DecoupledDiLoCoJob", "metadata": {"name": name, "namespace": space},
                         "spec": {"training": {"tokenBudget": 10**15, "data": {"paths": ["/data/text.txt"]}},
                                  "learners": {"min": 1, "max": max(learners, 16), "replicas": learners}}}


async def populate(api, world, operator, jobs):
    started = time.monotonic()
    pending = asyncio.Queue()
    for space, _, body in jobs:
        pending.put_nowait((space, body))

    async def maker():
        while not pending.empty():
            space, body = pending.get_nowait()
            await api.must("POST", f"/apis/diloco.dev/v1alpha1/namespaces/{space}/decoupleddilocojobs", body)

    await asyncio.gather(*(maker() for _ in range(8)))
    wanted = {(space, name): body["spec"]["learners"]["replicas"] for space, name, body in jobs}

    def complete():
        return all(sum(pod.get("status", {}).get("phase") == "Running" and "diloco.dev/learner-id" in pod["metadata"]["labels"]
                       for pod in list(world.by_job[key].values())) >= count for key, count in wanted.items())

    last = time.monotonic()

    def progress():
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            say(f"  {len(world.pods)} pods, operator {operator.status('VmRSS'):.1f} MB")
        return complete()

    await until("all learners run", 900, progress, world, operator, 0.5)
    return time.monotonic() - started


def learner_pods(world, key):
    return [pod for pod in world.by_job[key].values() if "diloco.dev/learner-id" in pod["metadata"]["labels"] and
            pod.get("status", {}).get("phase") == "Running"]


async def delete_pod(api, pod):
    await api.must("DELETE", f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}",
                   {"gracePeriodSeconds": 0})


async def latencies(api, world, operator, jobs, count):
    """Deletes single learners of different jobs, twenty a second."""
    picked = random.Random(1).sample(jobs, min(count, len(jobs)))
    keys = []
    for space, name, _ in picked:
        pod = learner_pods(world, (space, name))[0]
        key = (space, name, pod["metadata"]["labels"]["diloco.dev/learner-id"])
        world.added.pop(key, None)
        world.deleted.pop(key, None)
        keys.append(key)
        await delete_pod(api, pod)
        await asyncio.sleep(0.05)
    await until("deleted learners are replaced", 60, lambda: all(key in world.added and key in world.deleted for key in keys), world,
                operator)
    return sorted((world.added[key] - world.deleted[key]) * 1e3 for key in keys)


async def recreate(api, world, operator, big, count=30):
    key = big[:2]
    victims = learner_pods(world, key)[:count]
    keys = [(*key, pod["metadata"]["labels"]["diloco.dev/learner-id"]) for pod in victims]
    for one in keys:
        world.added.pop(one, None)
    started = time.monotonic()
    await asyncio.gather(*(delete_pod(api, pod) for pod in victims))
    await until("thirty learners are there again", 60, lambda: all(one in world.added for one in keys), world, operator, 0.01)
    return max(world.added[one] for one in keys) - started


async def resync(operator, world, jobs):
    """A new operator on what is there: until every job has been looked at, and nothing waits."""
    operator.stop()
    pods = len(world.pods)
    started = operator.start()
    ended = await until("a new operator has looked at every job", 300, lambda: operator.is_ready() and
                        operator.metric("controller_runtime_reconcile_total") >= jobs and operator.metric("workqueue_depth") == 0,
                        world, operator)
    if abs(len(world.pods) - pods) > pods // 100:
        raise RuntimeError(f"a restart of the operator changed {pods} pods to {len(world.pods)}")
    return ended - started


class Yardstick(Operator):
    def __init__(self, options, plane, log):
        super().__init__(options, plane, log)
        self.command = [str(options.yardstick), str(plane.kubeconfig), f"127.0.0.1:{PROBE_PORT}"]


async def measure_yardstick(options, plane, log, api, world, jobs, figures):
    other = Yardstick(options, plane, log)
    try:
        started = other.start()
        ended = await until("the yardstick is ready", 120, other.is_ready, world, other)
        say(f"yardstick ready after {ended - started:.1f} s")
        await asyncio.sleep(5)
        values = await latencies(api, world, other, jobs[1:], options.events)
        figures["yardstick_go_event_to_action_p50_ms"] = percentile(values, 0.5), "ms"
        figures["yardstick_go_event_to_action_p99_ms"] = percentile(values, 0.99), "ms"
        figures["yardstick_go_rss_mb"] = other.status("VmHWM"), "MB"
    finally:
        other.stop()


def percentile(values, share):
    return values[min(len(values) - 1, int(len(values) * share))]


async def measure(options, plane, log):
    figures = {}
    api = api_module.Api(plane.port, plane.token)
    world = fake.World(api)
    await world.start()
    operator = Operator(options, plane, log)
    try:
        operator.start()
        await until("the operator is ready", 60, operator.is_ready, world, operator)
        await asyncio.sleep(5)
        figures["operator_idle_rss_mb"] = operator.status("VmRSS"), "MB"
        say(f"idle: {operator.status('VmRSS'):.1f} MB")
        jobs = [job(i, BIG if i == 0 else options.learners) for i in range(options.jobs)]
        seconds = await populate(api, world, operator, jobs)
        figures["populate_seconds"] = seconds, "s"
        say(f"{len(jobs)} jobs, {len(world.pods)} pods after {seconds:.0f} s: {operator.status('VmRSS'):.1f} MB, "
            f"{operator.cpu_seconds():.1f} s of processor")
        await asyncio.sleep(10)
        before, requests, began = operator.cpu_seconds(), world.requests, time.monotonic()
        await asyncio.sleep(15)
        span = time.monotonic() - began
        figures["operator_steady_cpu_percent"] = (operator.cpu_seconds() - before) / span * 100, "%"
        figures["status_polls_per_second"] = (world.requests - requests) / span, "1/s"
        values = await latencies(api, world, operator, jobs[1:], options.events)
        figures["event_to_action_p50_ms"] = percentile(values, 0.5), "ms"
        figures["event_to_action_p99_ms"] = percentile(values, 0.99), "ms"
        figures["recreate_30_pods_seconds"] = await recreate(api, world, operator, jobs[0]), "s"
        peak = operator.status("VmHWM")
        figures["resync_1000_jobs_seconds"] = await resync(operator, world, options.jobs), "s"
        figures["operator_rss_mb"] = max(peak, operator.status("VmHWM")), "MB"
        figures["pods"] = len(world.pods), "pods"
        if options.yardstick:
            operator.stop()
            await measure_yardstick(options, plane, log, api, world, jobs, figures)
    finally:
        operator.stop()
        await world.stop()
    return figures


GOALS = {"event_to_action_p99_ms": 200, "operator_rss_mb": 64, "operator_idle_rss_mb": 10, "recreate_30_pods_seconds": 5}


def run(options):
    log_path = options.build / "log" / "bench-operator.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with plane_module.Plane() as plane, open(log_path, "wb") as log:
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "decoupleddilocojobs.yaml"))
        for what in ("jsonpath={.status.acceptedNames.kind}=DecoupledDiLoCoJob", "condition=Established"):
            plane.kubectl("wait", f"--for={what}", "--timeout=30s", "crd/decoupleddilocojobs.diloco.dev")
        for i in range(SPACES):
            plane.kubectl("create", "namespace", f"bench-{i}")
        try:
            figures = asyncio.run(measure(options, plane, log))
        except BaseException:
            log.flush()
            say(f"the operator's last lines ({log_path}):\n" + log_path.read_text(errors="replace")[-3000:])
            raise
    entries = []
    for name, (value, unit) in figures.items():
        yardstick = "yardstick_go_" + name.removeprefix("operator_")
        ratio = float(f"{value / figures[yardstick][0]:.4g}") if yardstick in figures else None
        entries.append({"name": name, "value": float(f"{value:.6g}"), "unit": unit, "ratio_to": yardstick if ratio else None,
                        "ratio": ratio})
    results = ROOT / "build" / "results"
    results.mkdir(parents=True, exist_ok=True)
    (results / "operator.json").write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n]\n")
    for name, (value, unit) in figures.items():
        goal = f"   goal: under {GOALS[name]}" if name in GOALS else ""
        say(f"{name:32s} {value:10.4g} {unit}{goal}")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    options.add_argument("--jobs", type=int, default=1000)
    options.add_argument("--learners", type=int, default=8, help="of each job; a syncer and an evaluator come on top")
    options.add_argument("--events", type=int, default=300, help="learners deleted one by one")
    options.add_argument("--yardstick", nargs="?", const="", help="compare with a Go controller (the program, else it is built)")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = options.parse_args()
    if not options.inside:
        plane_module.tools()  # Built here, where there is a network.
        arguments = [f"--build={options.build}", f"--jobs={options.jobs}", f"--learners={options.learners}", f"--events={options.events}"]
        if options.yardstick is not None:
            program = pathlib.Path(options.yardstick or ROOT / "build" / "tools" / "yardstick")
            if not options.yardstick:
                program.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run([pathlib.Path(__file__).parent / "yardstick" / "build.sh", program], check=True)
            arguments.append(f"--yardstick={program}")
        os.execvp("unshare", ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child=TERM", sys.executable, __file__, "--inside",
                              *arguments])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that it clears up; whatever runs ends with this process.
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    run(options)


if __name__ == "__main__":
    main()
