#!/usr/bin/env python3
"""Nothing is lost: the syncer is killed 200 times at any instant while four learners train; on a disk that fails, is full, or
loses what was not synced; twice in a row; with more and with fewer learners. Figures: build/results/durable.json."""
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
from client import Learner, content_hash, drive, floats, int8_blocks  # noqa: E402
from durable import FILE_BLOCK_BYTES, note_figures  # noqa: E402
from lib.ensemble import TEXT, Ensemble, Failure, check, main, manifest  # noqa: E402

KILLS = int(os.environ.get("DURABLE_KILLS", "200"))
PACED = ["--step-seconds", "0.02"]


def job(**spec):
    return manifest(TEXT, training={"tokenBudget": 10**9, "evaluationSeconds": 0}, sync={"interval": 4, "overlap": 1, **spec},
                    learners={"replicas": 4, "max": 8})


class Tape:
    """What a dead syncer's folder says, read from a copy: opening the original would tidy it up for its successor."""

    def __init__(self, folder):
        self.folder = folder
        with tempfile.TemporaryDirectory() as copy:
            for file in folder.glob("tape.db*"):
                shutil.copy(file, copy)
            with sqlite3.connect(f"{copy}/tape.db") as db:
                self.commits = {(f, v): (h, file, kept) for f, v, h, file, kept in
                                db.execute("SELECT fragment, version, hash, file, kept FROM commits")}
                self.totals = db.execute("SELECT rounds_merged, tokens, tokens_merged FROM totals").fetchone() or (0, 0, 0)
                self.twice = db.execute("SELECT count(*) FROM (SELECT 1 FROM participants GROUP BY uid, nonce, fragment,"
                                        " base_version HAVING count(*) > 1)").fetchone()[0]
                self.trained = db.execute("SELECT coalesce(sum(tokens), 0) FROM members").fetchone()[0]
                self.faults = db.execute("SELECT count(*) FROM coverage_faults").fetchone()[0]
                self.sound = db.execute("PRAGMA integrity_check").fetchone()[0]
            db.close()
        self.newest = {}
        for fragment, version in self.commits:
            self.newest[fragment] = max(version, self.newest.get(fragment, 0))

    def check_files(self):
        """Outer state equal to the bit to the last committed hash: parameters and their optimiser state."""
        for fragment, version in self.newest.items():
            digest, file, kept = self.commits[fragment, version]
            content = (self.folder / file).read_bytes()
            size = int.from_bytes(content[40:48], "little")
            state = int.from_bytes(content[48:56], "little")
            begin = FILE_BLOCK_BYTES + -(-size // FILE_BLOCK_BYTES) * FILE_BLOCK_BYTES
            check(kept == 1 and len(content) == begin + -(-state // FILE_BLOCK_BYTES) * FILE_BLOCK_BYTES, f"{file}: {len(content)} bytes")
            check(f"{content_hash(content[FILE_BLOCK_BYTES:FILE_BLOCK_BYTES + size]):016x}" == digest, f"{file} is not what was committed")
            check(content_hash(content[begin:begin + state]) == int.from_bytes(content[64:72], "little"), f"{file}: its state")


class Witness:
    """Holds every tape against the ones before it."""

    def __init__(self):
        self.seen = {}
        self.totals = (0, 0, 0)
        self.lost = self.twice = 0

    def look(self, folder):
        tape = Tape(folder)
        check(tape.sound == "ok", f"the database: {tape.sound}")
        tape.check_files()
        for key, digest in self.seen.items():
            self.lost += key not in tape.commits
            check(key not in tape.commits or tape.commits[key][0] == digest, f"{key} has another content now")
        for fragment, version in tape.newest.items():
            missing = [v for v in range(1, version + 1) if (fragment, v) not in tape.commits]
            check(not missing, f"fragment {fragment}: versions {missing} of {version} are missing")
        self.seen.update({key: value[0] for key, value in tape.commits.items()})
        self.twice = max(self.twice, tape.twice)
        check(all(a >= b for a, b in zip(tape.totals, self.totals)), f"totals fell from {self.totals} to {tape.totals}")
        check(tape.trained == tape.totals[1], f"{tape.totals[1]} tokens counted, members have {tape.trained}")
        check(tape.faults == 0, f"{tape.faults} faults in the ledger of the data")
        check(self.lost == 0 and self.twice == 0, f"{self.lost} committed rounds lost, {self.twice} pushes merged twice")
        self.totals = tape.totals
        return tape


def start(e, environment=None, tries=1):
    """Starts the syncer; on a failing disk that may take several tries, each bounded and with a fate of its own."""
    try:
        for n in range(tries):
            os.environ.update(environment or {})
            if environment:
                os.environ["FAULT_SEED"] = f"{int(environment['FAULT_SEED']) * 1000 + n}"
            try:
                return e.start_syncer(timeout=20)
            except Failure:
                if n == tries - 1:
                    raise
    finally:
        for name in environment or {}:
            os.environ.pop(name)


def restored(e, tape):
    """The syncer goes on from exactly what the tape said."""
    status = e.status()
    got = {f["fragment"]: f["version"] for f in status["fragments"]}
    check(all(got[f] >= v for f, v in tape.newest.items()) and status["round"] >= tape.totals[0], f"{got} after {tape.newest}")


def kill_again_and_again(e, witness, kills, seed):
    """Each at a random instant: mostly once rounds flow again, now and then in the midst of starting (twice in a row)."""
    rng = random.Random(seed)
    for n in range(kills):
        process = e.processes["syncer-0"]
        if rng.random() < 0.85:
            before = witness.totals[0]
            e.wait(lambda: e.status()["round"] > before, 60, f"rounds after kill {n}", every=0.002)
            time.sleep(rng.uniform(0, 0.12))
        else:
            time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.wait(10)
        tape = witness.look(e.folder / "state-0")
        start(e)
        if n % 10 == 0:
            restored(e, tape)


def test_two_hundred_kills(build):
    """S1, S2, J5, J8: bit for bit, no committed round missing, no push merged twice, the ledger balanced; learners train on."""
    witness = Witness()
    with Ensemble(build, job()) as e:
        e.start_syncers()
        for n in range(4):
            e.start_learner(n, extra=PACED)
        e.wait(lambda: e.status()["round"] > 4, 60, "rounds")
        begin = time.monotonic()
        try:
            kill_again_and_again(e, witness, KILLS, seed=1)
        finally:
            note_figures(build, kills=KILLS, rounds_lost=witness.lost, pushes_merged_twice=witness.twice)
        seconds = time.monotonic() - begin
        check(all(e.processes[f"learner-{n}"].poll() is None for n in range(4)), "a learner has ended")
        steps = [int(e.log(f"learner-{n}").rsplit("step=", 1)[1].split()[0]) for n in range(4)]
        rounds = e.wait(lambda: e.status()["round"], 10, "status")
        print(f"{KILLS} kills in {seconds:.0f} s, {rounds} rounds, learners at steps {steps}")
        check(rounds > KILLS / 2 and min(steps) > KILLS, f"{rounds} rounds, steps {steps}")
        e.stop_job()
        for name in ("syncer-0", "learner-0", "learner-1", "learner-2", "learner-3"):
            e.wait_exit(name, 30)
        witness.look(e.folder / "state-0")


def fault_library(folder):
    library = folder / "faulty.so"
    source = pathlib.Path(__file__).parent / "lib" / "faulty.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def on_a_bad_disk(build, mode, rate, kills):
    """The syncer runs on it, and is killed all the same (or dies of it); in the end the disk is good again."""
    witness = Witness()
    rng = random.Random(mode)
    with Ensemble(build, job()) as e:
        bad = {"LD_PRELOAD": str(fault_library(e.folder)), "FAULT_MODE": mode, "FAULT_RATE": str(rate),
               "FAULT_DIR": str(e.folder / "state-0")}
        e.start_syncers()
        for n in range(4):
            e.start_learner(n, extra=PACED)
        e.wait(lambda: e.status()["round"] > 4, 60, "rounds")
        deaths = failures = 0
        for n in range(kills):
            process = e.processes["syncer-0"]
            if process.poll() is None:
                if n > 0 and mode != "cut":
                    e.wait(lambda: process.poll() is not None or "diloco_commit_failures_total" in e.get("/metrics"), 20, "metrics")
                    failures += sum(v for k, v in e.metrics().items() if k.startswith("diloco_commit_failures_total"))
                process.kill()
            else:
                deaths += 1
            process.wait(10)
            witness.look(e.folder / "state-0")
            process = start(e, {**bad, "FAULT_SEED": str(n)}, tries=40)
            until = time.monotonic() + rng.uniform(0.2, 0.8)
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
        e.processes["syncer-0"].kill()
        e.wait_exit("syncer-0", 10, None)
        tape = witness.look(e.folder / "state-0")
        start(e)
        restored(e, tape)
        e.wait(lambda: e.status()["round"] > tape.totals[0] + 8, 60, "rounds on a good disk")
        print(f"{mode}: {kills} restarts, {deaths} deaths of it, {failures:.0f} failed commits, {tape.totals[0]} rounds")
        return deaths, failures, tape.totals[0]


def test_failing_sync(build):
    """S1, S4: a sync that fails is a commit that is made again, from memory, to a new file."""
    _, failures, rounds = on_a_bad_disk(build, "fsync", 0.1, 30)
    check(failures > 0 and rounds > 10, f"{failures} failures, {rounds} rounds")


def test_full_disk_now_and_then(build):
    """S4: no room stops commits, and loses nothing."""
    _, failures, rounds = on_a_bad_disk(build, "full", 0.03, 30)
    check(failures > 0 and rounds > 10, f"{failures} failures, {rounds} rounds")


def test_torn_writes(build):
    """S3: the power fails in a write; what was not synced is lost or torn."""
    deaths, _, rounds = on_a_bad_disk(build, "cut", 0.004, 40)
    check(deaths > 5 and rounds > 10, f"{deaths} deaths, {rounds} rounds")


def test_more_and_fewer_learners(build):
    """S2: two restarts in a row, then with other numbers of learners than before."""
    witness = Witness()
    with Ensemble(build, job()) as e:
        e.start_syncers()
        numbers = iter(range(100))
        for count in (4, 2, 6, 1):
            for n in range(count):
                e.start_learner(n, uid=f"uid-{next(numbers)}", extra=PACED)
            before = witness.totals[0]
            e.wait(lambda: e.status()["round"] > before + 8 and e.status()["connected"] == count, 60, f"{count} learners")
            for _ in range(2):
                e.processes["syncer-0"].kill()
                e.wait_exit("syncer-0", 5, None)
                tape = witness.look(e.folder / "state-0")
                start(e)
                restored(e, tape)
            for n in range(count):
                e.signal(f"learner-{n}", signal.SIGKILL)
                e.wait_exit(f"learner-{n}", 5, None)


ROWS = 4096  # 4 MiB a fragment: four chunks.
LAST = 1 << 20


def scripted_learner(e):
    return Learner(e.addresses[0], e.token, "test", [("a", [ROWS, 256]), ("b", [ROWS, 256])],
                   delta=lambda fragment: int8_blocks([0.001] * 256) * ROWS,
                   seed=lambda fragment: floats([float(fragment + 1)] * 256) * ROWS)


def versions(e):
    return {f["fragment"]: f["version"] for f in e.status()["fragments"]}


def check_standstill(one, seconds, held):
    """Time passes, messages pass: no more of a version that is not durable."""
    beats = []
    receive = one.receive

    def listen(**options):
        got = receive(**options)
        beats.append(got[0])
        return got
    one.receive = listen
    end = time.monotonic() + seconds
    drive([one], lambda: time.monotonic() > end and beats.count("heartbeat") > 2, 20, "heartbeats")
    one.receive = receive
    check({u["version"]: len(u["data"]) for u in one.updates.values()} == {u["version"]: len(u["data"]) for u in held}, "it went on")


def test_last_chunk_waits(build):
    """Q7, S1: a version is sent while it becomes durable, but for its last chunk: nobody has it before, others' chunks and messages
    pass by, whoever joins gets the durable one; and after a kill in that window it was never there."""
    spec = {"fragments": 2, "interval": 2, "quorum": 1, "grace": {"mode": "none"}, "heartbeatSeconds": 0.2, "compression": "int8",
            "merge": {"method": "mean", "embedding": "average", "weighting": "equal"}}
    with Ensemble(build, job(**spec)) as e:
        gate = e.folder / "gate"
        start(e, {"LD_PRELOAD": str(fault_library(e.folder)), "FAULT_MODE": "stall", "FAULT_GATE": str(gate), "FAULT_SEED": "1",
                  "FAULT_DIR": str(e.folder / "state-0")})
        one = scripted_learner(e)
        drive([one], lambda: one.has_all() and min(one.versions.values()) >= 2, 30, "rounds")

        def stall():
            gate.touch()
            drive([one], lambda: len(one.updates) == 2 and all(len(u["data"]) == u["bytes"] - LAST for u in one.updates.values()), 30,
                  "all of both fragments but the last chunk")
            held = [dict(u) for u in one.updates.values()]
            check(all(u["version"] == one.versions[u["fragment"]] + 1 == versions(e)[u["fragment"]] + 1 for u in held),
                  f"{one.versions} {versions(e)}")
            check_standstill(one, 0.5, held)
            return held

        held, before = stall(), dict(one.versions)
        two = scripted_learner(e)
        drive([one, two], two.has_all, 20, "what a joiner gets")
        check(two.versions == before == one.versions, f"{two.versions}, {before} is durable")
        check(two.values[0]["content_hash"] == one.values[0]["content_hash"], "of the same content")
        gate.unlink()
        drive([one, two], lambda: all(x.versions[f] > before[f] for x in (one, two) for f in (0, 1)), 20, "the rest, and all of it")
        two.close()
        seconds = e.status()["recent"]["held"]["max"]
        check(seconds >= 0.5, f"held up for {seconds} s")

        held, before, durable = stall(), dict(one.versions), dict(one.values)
        e.signal("syncer-0", signal.SIGKILL)
        e.wait_exit("syncer-0", 10, None)
        gate.unlink()
        drive([one], lambda: one.closed is not None, 10, "the end of the connection")
        check(one.versions == before, "nothing came after")
        tape = Tape(e.folder / "state-0")
        check(tape.newest == before, f"{tape.newest} is durable, learners have {before}")
        start(e)
        three = scripted_learner(e)
        drive([three], three.has_all, 20, "the durable state")
        check(all(three.values[f]["version"] >= before[f] for f in (0, 1)), f"{three.versions} after {before}")
        same = [three.values[f]["content_hash"] == durable[f]["content_hash"] for f in (0, 1) if three.versions[f] == before[f]]
        check(same and all(same), f"{three.versions}: not what was served before")
        drive([three], lambda: all(three.versions[f] > before[f] + 1 for f in (0, 1)), 20, "rounds")


if __name__ == "__main__":
    main([test_two_hundred_kills, test_failing_sync, test_full_disk_now_and_then, test_torn_writes, test_more_and_fewer_learners,
          test_last_chunk_waits])
