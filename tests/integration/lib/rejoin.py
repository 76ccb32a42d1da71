"""Measures rejoins over a shaped link: a learner that serves, one beside it, and a joiner in another network namespace that takes
over parameters and optimiser state (J3). Used by the integration test at a small size and by the benchmark at full size.

All processes share this machine, which a cluster's would not. So times by the clock hold what the joiner, the yardsticks and
strangers take of the processors; processor time (CLOCK_THREAD_CPUTIME_ID, /proc/PID/task) does not. Windows in which nobody joins
and windows in which somebody does alternate; every figure compares neighbours and is the median over them."""
import os
import pathlib
import re
import socket
import sqlite3
import statistics
import subprocess
import sys
import threading
import time

from lib.ensemble import Ensemble, check, manifest
from lib.shaped import Link

CHUNK = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")
SINK = """
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
left = int(sys.argv[3])
while left > 0:
    left -= len(s.recv(min(left, 1 << 20))) or sys.exit(1)
s.sendall(b"k")
"""
STEPS = re.compile(r"steps \d+ of (\d+) work (\S+) cpu (\S+) longest (\S+)")


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

    def __init__(self, e, build, address, learner, elements, work_ms, rest_ms, link=None, low=False):
        command = [build / "tools" / "state_learner", f"ws://{address}", e.token, e.job["metadata"]["name"], learner, elements,
                   work_ms, rest_ms]
        if low:
            command = ["nice", "-n", 19, *command]
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

    def leave(self):
        self.process.stdin.close()
        self.process.wait(60)

    def steps(self, since, until):
        """Mean milliseconds of a step in a window by the clock and of processor time, and the longest step."""
        found = [[float(value) for value in match.groups()] for at, line in list(self.lines) if since <= at <= until
                 for match in [STEPS.match(line)] if match]
        count = sum(row[0] for row in found)
        check(count > 0, f"steps of a learner in {until - since:.1f} s")
        return {"work": sum(row[0] * row[1] for row in found) / count, "cpu": sum(row[0] * row[2] for row in found) / count,
                "longest": max(row[3] for row in found)}


def threads(pid):
    """{name of a thread: processor seconds} of a process, and how long its first thread has waited for a processor."""
    used = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
        used[name] = used.get(name, 0) + nanoseconds / 1e9
    waited = int(pathlib.Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return used, waited


def processors():
    """Processor seconds that this machine has spent on anything."""
    fields = [int(field) for field in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS


def rejoin_job(learners):
    return manifest("none.txt", training={"tokenBudget": 10**12},
                    sync={"fragments": 16, "interval": 64, "quorum": 2, "timeoutSeconds": 30, "heartbeatSeconds": 2,
                          "grace": {"maxSeconds": 0.2}},
                    learners={"replicas": learners, "max": 8, "min": 1})


class Bench:
    """The ensemble, and what was seen in one window after the other."""

    def __init__(self, e, build, link, state_bytes, work_ms, rest_ms):
        self.e, self.build, self.link = e, build, link
        self.elements, self.work_ms, self.rest_ms = state_bytes // 12, work_ms, rest_ms
        e.start_syncer(listen="0.0.0.0:0", timeout=30)
        self.near = e.addresses[0] = f"{link.near}:{e.addresses[0].rsplit(':', 1)[1]}"
        self.others = [Learner(e, build, self.near, n, self.elements, work_ms, rest_ms) for n in (0, 1)]
        e.wait(lambda: e.status()["round"] >= 8 and e.learner(1)["pushesMerged"] > 0, 120, "eight rounds")

    def sample(self):
        used = {n: threads(other.process.pid) for n, other in enumerate(self.others)}
        ours = sum(sum(of.values()) for of, _ in used.values()) + sum(threads(self.e.processes["syncer-0"].pid)[0].values())
        return {"at": time.monotonic(), "wall": time.time(), "threads": used, "ours": ours, "all": processors()}

    def rounds(self, begin, end):
        """Rounds a second, from the first to the last commit of a window."""
        with sqlite3.connect(f"file:{self.e.folder}/state-0/tape.db?mode=ro", uri=True) as tape:
            first, last, count = tape.execute(
                "SELECT min(wall_ns), max(wall_ns), count(*) FROM commits WHERE wall_ns BETWEEN ? AND ?",
                (int(begin["wall"] * 1e9), int(end["wall"] * 1e9))).fetchone()
        check(count >= 3, f"{count} rounds in a window")
        return (count - 1) / (last - first) * 1e9

    def window(self, begin, end):
        seconds = end["at"] - begin["at"]
        of = {"seconds": seconds, "rounds": self.rounds(begin, end)}
        for n, other in enumerate(self.others):
            # A second's line belongs to the window that holds most of it.
            of[n] = other.steps(begin["at"] + 0.5, end["at"] + 0.5)
            before, after = begin["threads"][n], end["threads"][n]
            of[n]["serving"] = (after[0].get("diloco-serve", 0) - before[0].get("diloco-serve", 0)) / seconds
            of[n]["waited"] = (after[1] - before[1]) / seconds
        of["strangers"] = (end["all"] - begin["all"] - (end["ours"] - begin["ours"])) / seconds
        return of

    def quiet(self, seconds):
        begin = self.sample()
        self.e.wait(lambda: time.monotonic() - begin["at"] >= seconds, seconds + 5, "a window")
        return self.window(begin, self.sample())

    def rejoin(self, transfer, low):
        e, begin = self.e, self.sample()
        before = (e.learner(2) or {}).get("admission", 0)
        joiner = Learner(e, self.build, self.near, 2, self.elements, self.work_ms, self.rest_ms, self.link, low)
        e.wait(lambda: joiner.process.poll() is not None or joiner.joined(), 60 + 10 * transfer, "the joiner", every=0.02)
        own = sum(threads(joiner.process.pid)[0].values())
        entry = e.wait(lambda: (e.learner(2) or {}).get("admission", 0) > before and e.learner(2)["pushesMerged"] > 0 and
                       e.learner(2), 60 + 2 * transfer, "its first merged push", every=0.02)
        end, found = self.sample(), joiner.joined()
        check(found["from"] in (0, 1) and entry["stateFrom"] == found["from"], f"state of a peer: {found} {entry}\n{joiner.log()}")
        check(found["updates"] == found["step"] > 0, f"its moments are of the peer's step: {found}")
        joiner.leave()
        return {**self.window(begin, end), "peer": found["from"], "join": found["seconds"], "rejoin": end["at"] - joiner.begun,
                "joiner": own, "bytes": int(re.search(r"state taken over .* bytes=(\d+)", joiner.log())[1])}


def median_ratio(pairs, value):
    """Median over (rejoin, the quiet windows beside it) of a value's ratio."""
    return round(statistics.median(value(busy, busy) / statistics.mean([value(quiet, busy) for quiet in beside])
                                   for busy, beside in pairs), 3)


def measure(build, state_bytes, rate, window_seconds, cycles=1, work_ms=20, rest_ms=60):
    """A dict of figures; J3's are rejoin_ratio (at most 2), others_round_rate_ratio (at least 0.95) and serving_step_ratio (at most
    1.05). Of `cycles` rejoins every second one is of a joiner that runs beside all others (`_shared`); the first, third, ... of one
    at the lowest priority (unless there is only one), so that it takes what is left over, since a cluster has it on a machine of its own."""
    with Link(rate) as link, Ensemble(build, rejoin_job(2), text=False) as e:
        transfer = raw_seconds(link, state_bytes)
        bench = Bench(e, build, link, state_bytes, work_ms, rest_ms)
        windows = [bench.quiet(window_seconds)]
        for cycle in range(cycles):
            windows.append(bench.rejoin(transfer, low=cycles > 1 and cycle % 2 == 0))
            windows.append(bench.quiet(window_seconds))
        for learner in bench.others:
            learner.leave()
    figures = {"rejoin_state_bytes": state_bytes, "rejoin_link": rate, "rejoin_cycles": cycles, "transfer_seconds": round(transfer, 3)}
    for kind, first in (("", 0), ("_shared", 1)):
        pairs = [(windows[2 * i + 1], (windows[2 * i], windows[2 * i + 2])) for i in range(first, cycles, 2)]
        if pairs:
            figures.update({name + kind: value for name, value in figures_of(pairs, transfer).items()})
    for window in windows:
        print(window, flush=True)
    print(" ".join(f"{key}={value}" for key, value in figures.items()), flush=True)
    return figures


def figures_of(pairs, transfer):
    def middle(value, digits=3):
        return round(statistics.median(value(busy) for busy, _ in pairs), digits)

    return {
        "rejoin_ratio": middle(lambda busy: busy["rejoin"] / transfer),
        "rejoin_seconds": middle(lambda busy: busy["rejoin"]),
        "rejoin_join_seconds": middle(lambda busy: busy["join"]),
        "rejoin_bytes": middle(lambda busy: busy["bytes"], 0),
        "others_round_rate": round(statistics.median(quiet["rounds"] for _, beside in pairs for quiet in beside), 3),
        "others_round_rate_ratio": median_ratio(pairs, lambda window, busy: window["rounds"]),
        # A step of the learner that serves, by the clock: with what all others on this machine take of its processor.
        "serving_step_ratio": median_ratio(pairs, lambda window, busy: window[busy["peer"]]["work"]),
        # The same by its own thread's processor time: what serving makes the step itself do.
        "serving_step_cpu_ratio": median_ratio(pairs, lambda window, busy: window[busy["peer"]]["cpu"]),
        # The other learner's steps, by the clock: what sharing the machine alone does.
        "beside_step_ratio": median_ratio(pairs, lambda window, busy: window[1 - busy["peer"]]["work"]),
        # Of one core, while somebody joins: the thread that serves; the joiner and all that is not ours (before: strangers alone).
        "serving_cpu_share": middle(lambda busy: busy[busy["peer"]]["serving"], 4),
        "serving_longest_step_ms": middle(lambda busy: busy[busy["peer"]]["longest"], 1),
        "quiet_longest_step_ms": round(statistics.median(quiet[busy["peer"]]["longest"] for busy, beside in pairs
                                                         for quiet in beside), 1),
        "joiner_cpu_seconds": middle(lambda busy: busy["joiner"]),
        "strangers_cpu_share": round(statistics.median(quiet["strangers"] for _, beside in pairs for quiet in beside), 3),
    }
