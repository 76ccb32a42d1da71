#!/usr/bin/env python3
"""The operator's Kubernetes client against a real API server of its own (bench/plane.py), which is then frozen, killed and started
again, and whose history is compacted: nothing is lost, nothing is told twice without need.

    test_client.py [--build build/san-address]"""
import argparse
import base64
import json
import pathlib
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE / "bench"))
from plane import Plane  # noqa: E402

MAPS = "/api/v1/namespaces/kube-client/configmaps"
BOUND = 120


def find_tool(build):
    found = [pathlib.Path(build)] if build else sorted(ROOT.glob("build/*"))
    tools = [folder / "tools" / "kube_api" for folder in found if (folder / "tools" / "kube_api").exists()]
    if not tools:
        sys.exit("test_client: no build/*/tools/kube_api; make it first")
    return max(tools, key=lambda path: path.stat().st_mtime)


class Maps:
    """What the server should have, changed through its API."""

    def __init__(self, plane):
        self.plane, self.names = plane, set()
        self.context = ssl.create_default_context()
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE

    def call(self, method, path, body=None):
        request = urllib.request.Request(f"https://127.0.0.1:{self.plane.port}{path}", method=method,
                                         data=json.dumps(body).encode() if body else None,
                                         headers={"Authorization": f"Bearer {self.plane.token}", "Content-Type": "application/json"})
        with urllib.request.urlopen(request, context=self.context, timeout=30) as answer:
            return json.load(answer)

    def add(self, *names):
        for name in names:
            self.call("POST", MAPS, {"metadata": {"name": name, "labels": {"tool": "follow"}}, "data": {"text": "x" * 500}})
            self.names.add(name)

    def remove(self, *names):
        for name in names:
            self.call("DELETE", f"{MAPS}/{name}")
            self.names.discard(name)

    def revision(self):
        return int(self.call("GET", MAPS + "?limit=1")["metadata"]["resourceVersion"])


def run_tool(tool, plane, *arguments):
    done = subprocess.run([tool, *arguments], env=plane.environment(), capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0 and " 0 faults" in done.stdout, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout.strip().splitlines()[-1]


def restart(plane, meanwhile):
    """Kills the API server, compacts its history and starts it again on the same port."""
    plane.apiserver.kill()
    plane.apiserver.wait()
    plane.processes.remove(plane.apiserver)
    time.sleep(1)  # Refused connections meanwhile.
    meanwhile()
    plane.apiserver = plane.start("apiserver-again", plane.apiserver.args)
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    plane.wait("API server", BOUND, f"https://127.0.0.1:{plane.port}/readyz", unchecked)


def compact(plane, revision):
    server = next(word for word in plane.apiserver.args if word.startswith("--etcd-servers="))
    body = json.dumps({"revision": str(revision), "physical": True}).encode()
    urllib.request.urlopen(urllib.request.Request(server.split("=", 1)[1] + "/v3/kv/compaction", data=body), timeout=30).read()


def write_behind(plane, name):
    """Deletes an object in etcd while no API server runs: only a new list can show it."""
    server = next(word for word in plane.apiserver.args if word.startswith("--etcd-servers=")).split("=", 1)[1]
    key = base64.b64encode(f"/registry/configmaps/kube-client/{name}".encode()).decode()
    body = json.dumps({"key": key}).encode()
    answer = json.load(urllib.request.urlopen(urllib.request.Request(server + "/v3/kv/deleterange", data=body), timeout=30))
    assert answer.get("deleted") == "1", answer


def follow(tool, plane):
    maps = Maps(plane)
    maps.add(*(f"early-{i}" for i in range(120)))
    process = subprocess.Popen([tool, "follow", "0"], env=plane.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    told, errors = [], []
    readers = [threading.Thread(target=lambda: told.extend(process.stdout)), threading.Thread(target=lambda: errors.extend(process.stderr))]
    for reader in readers:
        reader.start()
    try:
        deadline = time.monotonic() + BOUND
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
        assert told == ["synced\n"], f"{told} {errors}"
        maps.remove(*(f"early-{i}" for i in range(10)))
        maps.add(*(f"later-{i}" for i in range(10)))
        plane.apiserver.send_signal(signal.SIGSTOP)
        time.sleep(2)  # The server is frozen, not gone.
        plane.apiserver.send_signal(signal.SIGCONT)
        maps.add("after-the-freeze")
        revision = maps.revision()

        def behind():
            write_behind(plane, "early-50")
            compact(plane, revision + 1)
        restart(plane, behind)
        maps.names.discard("early-50")
        maps.add(*(f"again-{i}" for i in range(5)))
        maps.remove("later-3")
        maps.add("end")
        process.wait(BOUND)
    finally:
        process.kill()
        process.wait()
    for reader in readers:
        reader.join(BOUND)
    assert process.returncode == 0, f"follow ended with {process.returncode}: {told} {''.join(errors[-20:])}"
    return next(line.strip() for line in told if line.startswith("known")), maps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build")
    tool = find_tool(parser.parse_args().build)
    with Plane() as plane:
        print(run_tool(tool, plane, "verbs"))
        print(run_tool(tool, plane, "lease"))
        line, maps = follow(tool, plane)
    print(f"{line}; server has {len(maps.names)}")
    assert line.startswith(f"known {len(maps.names)},"), f"{line}: the server has {len(maps.names)}"
    print("client: verbs, lease, and a watch through a freeze, a kill and a compaction held")


main()
