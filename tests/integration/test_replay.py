#!/usr/bin/env python3
"""Recorded runs with kills, joins, cut connections and restarts of the syncer are executed again to the bit; a tape in which
one thing was altered is caught at exactly that round."""
import json
import pathlib
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.client import content_hash, hash64  # noqa: E402
from lib.durable import FILE_BLOCK_BYTES, note_figures  # noqa: E402
from lib.ensemble import TEXT, Ensemble, check, main, manifest  # noqa: E402
from lib.relay import Relay  # noqa: E402

STEP_TOKENS = 4 * 32


def replay(e, *arguments, code=0, seconds=120):
    """Runs `diloco replay` on the ensemble's tapes (or on `folders`) and returns its JSON."""
    folders = [a for a in arguments if isinstance(a, pathlib.Path)]
    options = [a for a in arguments if not isinstance(a, pathlib.Path)]
    folders = folders or [e.folder / f"state-{s}" for s in range(e.shards)]
    run = subprocess.run([e.bin / "diloco", "replay", *folders, "--json", "--quiet", *options], capture_output=True, text=True,
                         timeout=seconds)
    check(run.returncode == code, f"replay ended with {run.returncode}, expected {code}: {run.stdout} {run.stderr}")
    return json.loads(run.stdout)


def rows(e, query, shard=0, *values):
    with sqlite3.connect(e.folder / f"state-{shard}" / "tape.db") as base:
        return base.execute(query, values).fetchall()


class Faults:
    """Kills, joins, cuts and restarts at random instants while an ensemble runs."""

    def __init__(self, e, relays, seed):
        self.e, self.relays, self.random = e, relays, random.Random(seed)
        self.learners = []
        self.kills = self.leaves = self.joins = self.cuts = self.restarts = 0

    def start(self, n):
        self.e.start_learner(n, endpoints=",".join(f"ws://{relay.address}" for relay in self.relays),
                             extra=["--step-seconds", 0.006])
        self.learners = sorted({*self.learners, n})

    def kill(self):
        n = self.random.choice(self.learners)
        self.e.signal(f"learner-{n}", signal.SIGKILL)
        self.e.wait_exit(f"learner-{n}", 5, code=-signal.SIGKILL)
        self.kills += 1
        self.start(n)

    def leave(self):
        """A notice of preemption in the middle of whatever it does; another process follows."""
        n = self.random.choice(self.learners)
        self.e.signal(f"learner-{n}", signal.SIGTERM)
        self.e.wait_exit(f"learner-{n}", 30)
        self.leaves += 1
        self.start(n)

    def join(self):
        self.start(max(self.learners) + 1)
        self.joins += 1

    def cut(self):
        self.e.wait(self.random.choice(self.relays).cut_one, 20, "a connection to cut", every=0.01)
        self.cuts += 1

    def restart(self):
        shard = self.random.randrange(self.e.shards)
        self.e.signal(f"syncer-{shard}", signal.SIGKILL)
        self.e.wait_exit(f"syncer-{shard}", 5, code=-signal.SIGKILL)
        self.e.start_syncer(shard)
        self.restarts += 1

    def rounds(self):
        return sum(self.e.status(shard)["round"] for shard in range(self.e.shards))

    def inject(self, plan, every_rounds):
        """One fault after the other, each `every_rounds` rounds after the one before, give or take."""
        self.random.shuffle(plan)
        for fault in plan:
            goal = self.rounds() + self.random.randrange(2 * every_rounds)
            self.e.wait(lambda g=goal: self.rounds() >= g, 60, f"round {goal}", every=0.02)
            getattr(self, fault)()

    def finish(self):
        """Ends the job as an operator does, however far it is, and waits for everybody."""
        for shard in range(self.e.shards):
            self.e.post("/stop", shard)
        for n in self.learners:
            self.e.wait_exit(f"learner-{n}", 60)
        for shard in range(self.e.shards):
            self.e.wait_exit(f"syncer-{shard}", 30)
        for relay in self.relays:
            relay.close()


def record(e, learners, plan, every_rounds, rounds, seed):
    """A run with faults; leaves its tapes in the ensemble's folder."""
    e.start_syncers()
    faults = Faults(e, [Relay(address) for address in e.addresses], seed)
    for n in range(learners):
        faults.start(n)
    e.wait(lambda: faults.rounds() >= 8, 60, "the first rounds")
    faults.inject(plan, every_rounds)
    e.wait(lambda: faults.rounds() >= rounds, 120, f"{rounds} rounds", every=0.05)
    faults.finish()
    return faults


def job(**spec):
    training = {"tokenBudget": 10**9} | spec.pop("training", {})
    return manifest(TEXT, **({"training": training, "learners": {"replicas": 3, "max": 12}} | spec))


def copies(e, name):
    """Copies of all tapes, to be altered."""
    folders = []
    for shard in range(e.shards):
        folder = e.folder / f"{name}-{shard}"
        shutil.copytree(e.folder / f"state-{shard}", folder)
        folders.append(folder)
    return folders


def alter(folder, statement, *values):
    with sqlite3.connect(folder / "tape.db") as base:
        changed = base.execute(statement, values).rowcount
    check(changed == 1, f"{statement} changed {changed} rows")


def expect_difference(e, folders, code=1, **expected):
    found = replay(e, *folders, code=code)["difference"]
    for key, value in expected.items():
        check(found.get(key) == value, f"{key} is {found.get(key)!r}, expected {value!r}: {found}")
    return found


def check_altered_tapes(e):
    """One altered number each; every one is found where it is, and nowhere else."""
    middle = rows(e, "select c.round, p.fragment, p.version, p.learner, p.weight from participants p join commits c"
                     " using(fragment, version) where c.round > 0 order by c.round limit 1 offset (select count(*)/6 from participants)")
    number, fragment, version, learner, weight = middle[0]
    where = (fragment, version, learner)
    folders = copies(e, "weight")
    alter(folders[0], "update participants set weight = ? where fragment = ? and version = ? and learner = ?",
          weight * (1 + 2**-40), *where)
    found = expect_difference(e, folders, round=number, fragment=fragment, version=version,
                              what=f"weight of learner {learner}'s push")
    check(float(found["replay"]) == weight and float(found["tape"]) == weight * (1 + 2**-40), f"values: {found}")

    folders = copies(e, "hash")
    alter(folders[0], "update commits set hash = 'ffffffffffffffff' where fragment = ? and version = ?", fragment, version)
    expect_difference(e, folders, round=number, fragment=fragment, version=version, what=f"values of version {version}")

    folders = copies(e, "tokens")
    alter(folders[0], "update participants set tokens = tokens + 1 where fragment = ? and version = ? and learner = ?", *where)
    expect_difference(e, folders, round=number, fragment=fragment, what=f"tokens of learner {learner}")


def check_altered_value(e):
    """One parameter of a version whose file is kept, with all checksums right: tensor, element and both values are named."""
    round_, fragment, version, name = rows(e, "select round, fragment, version, file from commits where kept = 1"
                                              " order by round desc limit 1")[0]
    folder = copies(e, "value")[0]
    data = bytearray((folder / name).read_bytes())
    count = struct.unpack_from("<Q", data, 40)[0] // 4
    values = list(struct.unpack_from(f"<{count}f", data, FILE_BLOCK_BYTES))
    at = next(i for i in range(700, count) if values[i] != 0)
    struct.pack_into("<f", data, FILE_BLOCK_BYTES + 4 * at, values[at] * 1.5)
    parameters = content_hash(data[FILE_BLOCK_BYTES:FILE_BLOCK_BYTES + 4 * count])
    struct.pack_into("<Q", data, 56, parameters)
    struct.pack_into("<Q", data, 120, hash64(data[:120]))
    (folder / name).write_bytes(data)
    alter(folder, "update commits set hash = ? where fragment = ? and version = ?", f"{parameters:016x}", fragment, version)
    found = expect_difference(e, [folder], round=round_, fragment=fragment, version=version)
    check("tensor" in found and abs(float(found["tape"]) - values[at] * 1.5) < 1e-6 and
          abs(float(found["replay"]) - values[at]) < 1e-6, f"{found}, {values[at]}")


def check_merges_alone(e, made):
    """With the pushes that were kept: all merges without a step; what is damaged or gone is said, and spoils nothing else."""
    result = replay(e, "--verify-only")
    check(result["replayedRounds"] == made and result["steps"] == 0 and result["unverified"] == 0, f"{result}, {made} rounds")
    folders = copies(e, "kept")
    last = rows(e, "select max(version) from commits where fragment = 0")[0][0]
    data = folders[0] / f"pushes-000-v{last - 3:010d}.bin"
    data.write_bytes(data.read_bytes()[:-5])
    result = replay(e, *folders, "--verify-only")
    # The version cannot be checked, nor what builds on it, until one whose predecessor's file is kept: the last.
    check(result["unverified"] == 3 and result["replayedRounds"] == made - 3, f"{result}, {made} rounds")
    fragment, version, learner = rows(e, "select fragment, version, learner from participants where version > 3 limit 1")[0]
    folders = copies(e, "kept-weight")
    alter(folders[0], "update participants set weight = weight * 2 where fragment = ? and version = ? and learner = ?",
          fragment, version, learner)
    found = replay(e, *folders, "--verify-only", code=1)["difference"]
    check(found["fragment"] == fragment and found["version"] == version, f"{found}")


def test_from_a_checkpoint(build):
    """J9, S4: learners that joined after a checkpoint are executed from its versions on; what older ones pushed is merged as it was
    kept, and when it was not, how many they are is told."""
    with Ensemble(build, job(syncer={"shards": 2, "keepPushes": True})) as e:
        e.start_syncers()
        faults = Faults(e, [Relay(address) for address in e.addresses], 1)

        def checkpoint(name):
            number = e.post(f"/checkpoint?name={name}").strip()
            e.post(f"/checkpoint?id={number}", 1)

            def is_saved():
                listed = [json.loads(e.get("/checkpoints", shard))["checkpoints"] for shard in range(2)]
                return all(any(c["id"] == number and c["state"] != "saving" for c in shard) for shard in listed)
            e.wait(is_saved, 30, f"checkpoint {name}")
            return number

        def go_on(rounds):
            goal = faults.rounds() + rounds
            e.wait(lambda: faults.rounds() >= goal, 60, f"round {goal}")

        for n in range(2):
            faults.start(n)
        go_on(40)
        for n in range(2):
            e.signal(f"learner-{n}", signal.SIGKILL)
            e.wait_exit(f"learner-{n}", 5, code=-signal.SIGKILL)
        # What they had pushed completely is still merged: until nothing has been for a second.
        seen = [(0, 0)]

        def is_quiet():
            now = (faults.rounds(), time.monotonic())
            if now[0] != seen[0][0]:
                seen[0] = now
            return now[1] - seen[0][1] > 1
        e.wait(is_quiet, 30, "the last merges")
        gone = checkpoint("all-gone")
        for n in range(2):
            faults.start(n)
        go_on(20)
        training = checkpoint("training")
        go_on(20)
        faults.finish()

        def after(number):
            epoch, count = map(int, number.split("."))
            return sum(rows(e, "select count(*) from commits c join checkpoint_fragments f using(fragment) where f.id = ?"
                               " and c.version > f.version and c.round > 0", shard, epoch << 20 | count)[0][0]
                       for shard in range(2))

        whole = replay(e)
        young = replay(e, "--from", "all-gone")
        print(whole, young)
        check(young["replayMismatches"] == 0 and young["replayedRounds"] == after(gone) >= 30, f"{young}")
        check(young["processes"] == 2 and whole["processes"] == 4, f"{young['processes']} of {whole['processes']} processes")
        check(whole["leftOut"] == young["leftOut"] == 0, f"{whole} {young}")
        across = replay(e, "--from", "training")
        check(across["replayMismatches"] == 0 and across["replayedRounds"] == after(training) >= 10, f"{across}")
        check(across["leftOut"] == 2 and across["processes"] == across["steps"] == 0, f"{across}")
        bare = copies(e, "bare")
        for folder in bare:
            for file in folder.glob("pushes-*"):
                file.unlink()
        refused = replay(e, *bare, "--from", "training", code=2)
        check("2 learner processes lived across the checkpoint" in refused["error"], f"{refused}")
        check(replay(e, *bare, "--from", "all-gone")["replayedRounds"] == after(gone), "young learners' pushes are not needed")
        altered = copies(e, "altered")
        alter(altered[0], "update participants set weight = weight + 1 where (fragment, version, learner, admission) = (select "
                          "fragment, version, learner, admission from participants order by version desc limit 1)")
        check(replay(e, *altered, "--from", "training", code=1)["replayMismatches"] == 1, "an altered weight is not caught")
        merges = replay(e, "--from", training, "--verify-only")
        check(merges["replayedRounds"] == after(training) >= 10 and merges["unverified"] == 0, f"{merges}")


def test_what_cannot_be_executed_says_why(build):
    """J9: no tape, half of the shards, no pushes, entries that are gone: a text that says so, and status 2."""
    with Ensemble(build, job(syncer={"shards": 2})) as e:
        record(e, 2, [], every_rounds=1, rounds=30, seed=1)

        def refused(text, *arguments):
            run = subprocess.run([e.bin / "diloco", "replay", "--quiet", *arguments], capture_output=True, text=True, timeout=60)
            check(run.returncode == 2 and text in run.stderr, f"status {run.returncode}, {run.stderr!r}: expected {text!r}")

        folders = [e.folder / "state-0", e.folder / "state-1"]
        refused("neither a run folder", e.folder / "nothing")
        refused("give every shard's", folders[1])
        refused("both shard 0", folders[0], folders[0])
        refused("no pushes were kept", *folders, "--verify-only")
        refused("there is no checkpoint", *folders, "--from", "nothing")
        gone = copies(e, "gone")
        for folder in gone:
            alter(folder, "delete from trace where incarnation = 1 and kind = 'start'")
        refused("missing in the tape", *gone)
        other = copies(e, "other")
        for folder in other:
            with sqlite3.connect(folder / "tape.db") as base:
                base.execute("update trace set b = b + 1 where kind = 'data'")
        run = replay(e, *other, code=1)
        check(run["difference"]["round"] == min(rows(e, "select min(round) from commits where round > 0", s)[0][0]
                                                for s in range(2)), f"other data: {run}")


def test_faulty_run_replays_to_the_bit(build):
    """J9: 500 rounds with kills, joins, cut connections and a syncer that was killed."""
    plan = ["kill"] * 6 + ["leave"] * 2 + ["join"] * 3 + ["cut"] * 24 + ["restart"]
    with Ensemble(build, job()) as e:
        faults = record(e, 3, plan, every_rounds=12, rounds=510, seed=11)
        check(faults.kills >= 5 and faults.joins >= 3 and faults.cuts >= 20 and faults.restarts >= 1, "not all faults")
        made = rows(e, "select count(*) from commits where round > 0")[0][0]
        result = replay(e)
        print(f"{faults.kills} kills, {faults.joins} joins, {faults.cuts} cuts, {faults.restarts} restarts: {result}")
        check(result["replayMismatches"] == 0, f"differs: {result}")
        check(result["replayedRounds"] == made and made >= 500, f"{result['replayedRounds']} of {made} rounds replayed")
        uncounted = rows(e, "select count(*) from trace where kind = 'uncounted'")[0][0]
        print(f"{faults.leaves} leaves, {uncounted} of them pushed once more")
        check(result["processes"] >= 3 + 3 + 4, f"only {result['processes']} processes were executed again")
        quarter = rows(e, "select max(round) from commits")[0][0] // 4
        until = replay(e, "--until", str(quarter), "--threads", "1")
        expected = rows(e, "select count(*) from commits where round between 1 and ?", 0, quarter)[0][0]
        check(until["replayedRounds"] == expected and until["replayMismatches"] == 0, f"until {quarter}: {until}")
        check_altered_tapes(e)
        check_altered_value(e)
        size = (e.folder / "state-0" / "tape.db").stat().st_size / made
        print(f"{size:.0f} bytes of tape a round")
        note_figures(build, replayed_rounds=result["replayedRounds"], replay_mismatches=result["replayMismatches"],
                     tape_bytes_per_round=size)


def test_two_shards_rebase_and_bf16(build):
    """J9: a merge depends on fragments of both shards, on snapshots that rebase subtracts, on what bf16 leaves."""
    spec = job(training={"threads": 2}, sync={"apply": "rebase", "broadcastCompression": "bf16", "compression": "int4",
                     "merge": {"stalenessDecay": 0.1}, "outerOptimizer": {"type": "nesterov", "learningRate": 0.7, "momentum": 0.6}},
               syncer={"shards": 2, "keepPushes": True})
    with Ensemble(build, spec) as e:
        faults = record(e, 3, ["kill"] * 2 + ["cut"] * 6 + ["restart"] * 2 + ["join"], every_rounds=8, rounds=160, seed=5)
        result = replay(e, "--threads", "1")
        print(f"{faults.kills} kills, {faults.joins} joins, {faults.cuts} cuts, {faults.restarts} restarts: {result}")
        made = sum(rows(e, "select count(*) from commits where round > 0", shard)[0][0] for shard in range(2))
        check(result["replayMismatches"] == 0 and result["replayedRounds"] == made, f"{result}, {made} rounds")
        rebased = rows(e, "select count(*) from trace where kind = 'apply' and b > 0")[0][0]
        check(rebased > 20, f"only {rebased} updates were rebased")
        check_merges_alone(e, made)


def test_forms_that_wait(build):
    """J9: synchronous rounds after interval warm-up, AdamW as the outer optimiser, alpha."""
    spec = job(sync={"mode": "synchronous", "applyAlpha": 0.25, "interval": 4, "fragments": 2,
                     "outerOptimizer": {"type": "adamw", "learningRate": 0.01}})
    with Ensemble(build, spec) as e:
        record(e, 2, ["kill", "cut", "cut"], every_rounds=6, rounds=60, seed=3)
        result = replay(e)
        made = rows(e, "select count(*) from commits where round > 0")[0][0]
        check(result["replayMismatches"] == 0 and result["replayedRounds"] == made, f"{result}, {made} rounds")
        print(result)


if __name__ == "__main__":
    main([test_faulty_run_replays_to_the_bit, test_two_shards_rebase_and_bf16, test_forms_that_wait,
          test_from_a_checkpoint, test_what_cannot_be_executed_says_why])
