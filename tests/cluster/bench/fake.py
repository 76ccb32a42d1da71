"""Nodes, kubelets, the StatefulSet controller and syncers, as far as the operator can see them: objects get the status that they
would have, and every syncer pod answers /status on its own loopback address."""
import asyncio
import collections
import contextlib
import json
import time

MERGE = "application/merge-patch+json"
HEALTH_PORT = 7001  # Where the operator asks a syncer for its status.


class World:
    def __init__(self, api, nodes=100):
        self.api, self.nodes = api, [f"node-{i}" for i in range(nodes)]
        self.pods, self.by_job = {}, collections.defaultdict(dict)  # uid -> pod; (space, job) -> {uid: pod}
        self.addresses, self.sets, self.work, self.tasks = {}, {}, asyncio.Queue(), []
        self.next_address = 1
        self.added, self.deleted = {}, {}  # (space, job, learner id) -> when last seen, by the monotonic clock
        self.answers = {}
        self.requests = 0

    async def start(self, workers=16):
        for name in self.nodes:
            await self.api.must("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {
                "name": name, "labels": {"kubernetes.io/os": "linux", "kubernetes.io/hostname": name}}})
            amounts = {"cpu": "64", "memory": "256Gi", "pods": "200"}
            await self.api.must("PATCH", f"/api/v1/nodes/{name}/status", {"status": {
                "capacity": amounts, "allocatable": amounts,
                "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
                                "lastHeartbeatTime": stamp(), "lastTransitionTime": stamp()}]}}, MERGE)
        self.server = await asyncio.start_server(self.answer, "0.0.0.0", HEALTH_PORT, backlog=2048)
        self.tasks = [asyncio.create_task(self.worker()) for _ in range(workers)]
        self.tasks += [asyncio.create_task(self.api.watch("/api/v1/pods", self.on_pod)),
                       asyncio.create_task(self.api.watch("/apis/apps/v1/statefulsets", self.on_set))]

    async def stop(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.server.close()

    def check(self):
        """Raises what a task of the world failed with."""
        for task in self.tasks:
            if task.done() and not task.cancelled() and task.exception():
                raise task.exception()

    async def worker(self):
        while True:
            what, *arguments = await self.work.get()
            await what(*arguments)

    # --- pods

    def on_pod(self, kind, pod):
        meta, now = pod["metadata"], time.monotonic()
        labels, uid = meta.get("labels", {}), meta["uid"]
        if "diloco.dev/job" not in labels:
            return
        job = (meta["namespace"], labels["diloco.dev/job"])
        learner = (*job, labels.get("diloco.dev/learner-id"))
        if kind == "DELETED":
            self.pods.pop(uid, None)
            self.by_job[job].pop(uid, None)
            self.addresses.pop(pod.get("status", {}).get("podIP"), None)
            self.answers.pop(job, None)
            self.deleted[learner] = now
            owner = meta.get("ownerReferences", [{}])[0]
            if owner.get("kind") == "StatefulSet":
                self.work.put_nowait((self.fill_set, meta["namespace"], owner["name"]))
            return
        if uid not in self.pods:
            self.added[learner] = now
            self.work.put_nowait((self.run_pod, meta["namespace"], meta["name"], len(self.pods), job))
        elif meta.get("deletionTimestamp") and not self.pods[uid]["metadata"].get("deletionTimestamp"):
            self.work.put_nowait((self.end_pod, meta["namespace"], meta["name"]))
        self.pods[uid] = self.by_job[job][uid] = pod
        self.answers.pop(job, None)

    async def run_pod(self, space, name, number, job):
        path = f"/api/v1/namespaces/{space}/pods/{name}"
        await self.api.must("POST", f"{path}/binding", {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self.nodes[number % len(self.nodes)]}}, fine=(404, 409))
        address = f"127.{1 + (self.next_address >> 16)}.{self.next_address >> 8 & 255}.{self.next_address & 255}"
        self.next_address += 1
        self.addresses[address] = job
        container = {"syncer": "syncer", "evaluator": "evaluator"}.get(name.rsplit("-", 2)[-2], "learner")
        ready = [{"type": kind, "status": "True", "lastTransitionTime": stamp()}
                 for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")]
        await self.api.must("PATCH", f"{path}/status", {"status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "startTime": stamp(), "conditions": ready,
            "containerStatuses": [{"name": container, "ready": True, "started": True, "restartCount": 0, "image": "x",
                                   "imageID": "x", "state": {"running": {"startedAt": stamp()}}}]}}, MERGE, fine=(404,))

    async def end_pod(self, space, name):
        await self.api.must("DELETE", f"/api/v1/namespaces/{space}/pods/{name}", {"gracePeriodSeconds": 0}, fine=(404,))

    # --- StatefulSets

    def on_set(self, kind, found):
        key = (found["metadata"]["namespace"], found["metadata"]["name"])
        if kind == "DELETED":
            self.sets.pop(key, None)
            return
        is_new = self.sets.get(key, {}).get("metadata", {}).get("generation") != found["metadata"]["generation"]
        self.sets[key] = found
        if is_new:
            self.work.put_nowait((self.fill_set, *key))

    async def fill_set(self, space, name):
        found = self.sets.get((space, name))
        if found is None:
            return
        template, wanted = found["spec"]["template"], found["spec"].get("replicas", 1)
        for i in range(wanted):
            labels = {**template["metadata"]["labels"], "apps.kubernetes.io/pod-index": str(i)}
            owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": found["metadata"]["uid"], "controller": True}
            await self.api.must("POST", f"/api/v1/namespaces/{space}/pods", {
                "apiVersion": "v1", "kind": "Pod", "spec": {**template["spec"], "volumes": [
                    *template["spec"].get("volumes", []), {"name": "state", "emptyDir": {}}]},
                "metadata": {"name": f"{name}-{i}", "labels": labels, "annotations": template["metadata"].get("annotations", {}),
                             "ownerReferences": [owner]}}, fine=(409,))
        for pod in list(self.by_job[(space, template["metadata"]["labels"]["diloco.dev/job"])].values()):
            owner = pod["metadata"].get("ownerReferences", [{}])[0]
            if owner.get("name") == name and int(pod["metadata"]["name"].rsplit("-", 1)[1]) >= wanted:
                await self.end_pod(space, pod["metadata"]["name"])
        await self.api.must("PATCH", f"/apis/apps/v1/namespaces/{space}/statefulsets/{name}/status", {"status": {
            "observedGeneration": found["metadata"]["generation"], "replicas": wanted, "readyReplicas": wanted,
            "currentReplicas": wanted, "updatedReplicas": wanted, "availableReplicas": wanted}}, MERGE, fine=(404,))

    # --- syncers

    def status_of(self, job):
        """As a syncer writes it: all learners that run are connected."""
        learners = []
        for uid, pod in self.by_job[job].items():
            number = pod["metadata"]["labels"].get("diloco.dev/learner-id")
            if number is not None and pod.get("status", {}).get("phase") == "Running":
                learners.append({"learner": int(number), "uid": uid, "admission": 1, "state": "connected", "step": 100,
                                 "tokens": 100000, "tokensPerSecond": 1000, "stepSeconds": 0.1, "loss": 2.5, "behind": 0,
                                 "heardSecondsAgo": 0.1, "pushesMerged": 10, "waitedSeconds": 0})
        return json.dumps({"job": job[1], "shard": 0, "shards": 1, "epoch": 1, "phase": "Training", "message": "", "round": 50,
                           "step": 100, "tokens": 1000000, "tokensMerged": 900000, "tokenBudget": 10**15, "loss": 2.5,
                           "goodput": 0.95, "quorum": {"have": len(learners), "need": 1}, "learnersWanted": len(learners),
                           "connected": len(learners), "learners": learners, "evaluators": 1, "fragments": [], "verdicts": {},
                           "leaves": {}, "times": {}, "uptimeSeconds": 100}).encode()

    async def answer(self, reader, writer):
        job = self.addresses.get(writer.get_extra_info("sockname")[0])
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                if job not in self.answers:
                    self.answers[job] = self.status_of(job)
                body = self.answers[job]
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()


def stamp():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
