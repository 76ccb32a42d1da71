"""Measures a rejoin over a shaped link: a learner that serves, one beside it, and a joiner in another network namespace that takes
over parameters and optimiser state (J3). Used by the integration test at a small size and by the benchmark at full size."""
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

from lib.ensemble import Ensemble, check, manifest
from lib.shaped import Link

CHUNK = 1 << 20
SINK = """
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
left = int(sys.argv[3])
while left > 0:
    left -= len(s.recv(min(left, 1 << 20))) or sys.exit(1)
s.sendall(b"k")
"""


def raw_seconds(link, size):
    """What `size` bytes take over the link with nothing but TCP: the yardstick."""
    with socket.create_server((link.near, 0)) as server:
        sink = link.run([sys.executable, "-c", SINK, link.near, server.getsockname()[1], size])
        server.settimeout(20)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(60)
            begun = time.monotonic()
            block = bytes(CHUNK)
            left = size
            while left > 0:
                left -= connection.send(block[:min(left, CHUNK)])
            check(connection.recv(1) == b"k", "the yardstick's bytes arrived")
            seconds = time.monotonic() - begun
        sink.wait(10)
    return seconds


class Learner:
    """A tool_state_learner; its lines as they come, with when."""

    def __init__(self, e, build, address, learner, elements, work_ms, rest_ms, link=None):
        command = [build / "tools" / "state_learner", f"ws://{address}", e.token, e.job["metadata"]["name"], learner, elements,
                   work_ms, rest_ms]
        self.errors = open(e.folder / f"state-{learner}-{time.monotonic_ns()}.log", "wb")
        start = link.run if link else lambda arguments, **options: subprocess.Popen([str(a) for a in arguments], **options)
        self.begun = time.monotonic()
        self.process = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        e.processes[f"state-{learner}-{self.begun}"] = self.process
        self.lines = []
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.strip()))

    def log(self):
        return pathlib.Path(self.errors.name).read_text(errors="replace")

    def joined(self):
        """{seconds, from, step, hash, updates} once it has."""
        for _, line in self.lines:
            found = re.match(r"joined (\S+) from (\S+) step (\d+) hash (\w+) updates (\d+)", line)
            if found:
                return {"seconds": float(found[1]), "from": int(found[2]), "step": int(found[3]), "hash": found[4],
                        "updates": int(found[5])}
        return None

    def work_ms(self, since, until):
        """Mean milliseconds a step between two times."""
        found = [float(line.split()[3]) for at, line in self.lines if line.startswith("steps") and since <= at <= until]
        return sum(found) / len(found) if found else None


def rejoin_job(learners):
    return manifest("none.txt", training={"tokenBudget": 10**12},
                    sync={"fragments": 16, "interval": 64, "quorum": 2, "timeoutSeconds": 30, "heartbeatSeconds": 2,
                          "grace": {"maxSeconds": 0.2}},
                    learners={"replicas": learners, "max": 8, "min": 1})


def measure(build, state_bytes, rate, before_seconds, work_ms=20, rest_ms=60):
    """A dict of figures; J3's are rejoin_ratio (at most 2) and others_round_rate_ratio (at least 0.95)."""
    elements = state_bytes // 12
    with Link(rate) as link, Ensemble(build, rejoin_job(2), text=False) as e:
        transfer = raw_seconds(link, state_bytes)
        e.start_syncer(listen="0.0.0.0:0", timeout=30)
        port = e.addresses[0].rsplit(":", 1)[1]
        near = f"{link.near}:{port}"
        e.addresses[0] = near
        others = [Learner(e, build, near, n, elements, work_ms, rest_ms) for n in (0, 1)]
        e.wait(lambda: e.status()["round"] >= 8 and e.learner(1)["pushesMerged"] > 0, 120, "eight rounds")
        start_round, start = e.status()["round"], time.monotonic()
        e.wait(lambda: time.monotonic() - start >= before_seconds, before_seconds + 5, "rounds before")
        middle_round, middle = e.status()["round"], time.monotonic()

        joiner = Learner(e, build, near, 2, elements, work_ms, rest_ms, link)
        e.wait(lambda: joiner.joined(), 20 + 6 * transfer, "the joiner", every=0.02)
        entry = e.wait(lambda: (e.learner(2) or {}).get("pushesMerged", 0) > 0 and e.learner(2), 20 + 2 * transfer,
                       "its first merged push", every=0.02)
        end_round, end = e.status()["round"], time.monotonic()
        found = joiner.joined()
        check(found["from"] in (0, 1) and entry["stateFrom"] == found["from"], f"state of a peer: {found} {entry}\n{joiner.log()}")
        check(found["updates"] == found["step"] > 0, f"its moments are of the peer's step: {found}")
        before = (middle_round - start_round) / (middle - start)
        during = (end_round - middle_round) / (end - middle)
        peer = others[found["from"]]
        quiet, busy = peer.work_ms(start, middle), peer.work_ms(middle, end + 1)
        for learner in (*others, joiner):
            learner.process.stdin.close()
        fetched = int(re.search(r"state taken over .* bytes=(\d+)", joiner.log())[1])
        figures = {"rejoin_state_bytes": state_bytes, "rejoin_link": rate, "transfer_seconds": round(transfer, 3),
                   "rejoin_seconds": round(end - joiner.begun, 3), "rejoin_ratio": round((end - joiner.begun) / transfer, 3),
                   "rejoin_join_seconds": found["seconds"], "rejoin_bytes": fetched, "others_round_rate": round(before, 3),
                   "others_round_rate_ratio": round(during / before, 3),
                   "serving_step_ratio": round(busy / quiet, 3) if quiet and busy else None}
        print(" ".join(f"{key}={value}" for key, value in figures.items()), flush=True)
        return figures
