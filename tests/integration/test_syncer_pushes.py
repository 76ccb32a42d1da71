#!/usr/bin/env python3
"""What the syncer does with pushes, and who may slow whom: verdicts, bounds, observers, slow readers; by scripted learners."""
import pathlib
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
import client as c  # noqa: E402
from client import Client, drive  # noqa: E402
from ensemble import Ensemble, check, main  # noqa: E402
from scripted import JOB, ROWS, delta, first, job, learner, seeded, tensors  # noqa: E402

# --- pushes


def test_round_merges_what_was_pushed(build):
    with Ensemble(build, job(quorum=2)) as e:
        e.start_syncers()
        one = seeded(e, value=0.5)
        two = learner(e, value=0.25)
        drive([one, two], lambda: len(one.values) == 2 and all(v["version"] >= 2 for v in one.values.values()), 20, "a round each")
        for fragment, values in one.values.items():
            if values["version"] == 2:
                # Equal weights: the mean of both deltas, at learning rate 1.
                check(abs(first(values) - (fragment + 1 - 0.375)) < 1e-5, f"fragment {fragment}: {first(values)}")
                check(values["participants"] == 2, "both took part")
        check(one.values[0]["data"] == two.values[0]["data"] or one.values[0]["version"] != two.values[0]["version"],
              "all get the same")
        check(e.status()["verdicts"]["accepted"] >= 4, "counted")


def wait_for_pull(one, others, seconds=20):
    drive([one] + list(others), lambda: one.pulls, seconds, "a pull")
    return one.pulls.pop(0)


def test_pushes_are_judged(build):
    """Q1, Q9: each refusal has its reason: Every verdict a push can get on the wire; none of these reaches Theta, none ends the connection."""
    with Ensemble(build, job(quorum=2)) as e:
        e.start_syncers()
        one = seeded(e, delta=lambda fragment: None)
        # With a quorum of two, rounds stay open for the other learner while one tries out what is refused.
        two = learner(e, delta=lambda fragment: None)
        drive([one, two], two.has_all, 10, "state of the second")
        good = delta(0.5)
        cases = [
            ("malformed", dict(codec=c.BF16), c.floats([0.5] * 128) * ROWS),
            ("malformed", {}, good[:-260]),
            ("malformed", {}, good + good),
            ("malformed", dict(fragment=1000 % 512), good),
            ("malformed", dict(steps=0), good),
            ("malformed", dict(steps=1 << 31), good),
            ("unknown_round", dict(round=10**6), good),
            ("stale_base", dict(base_version=0), good),
            ("stale_base", dict(base_version=99), good),
            ("checksum", {}, good),
            ("not_finite", {}, good[:260] + struct.pack("<f", float("nan")) + good[264:]),
        ]
        for verdict, changes, data in cases:
            pull = wait_for_pull(one, [two])
            two.pulls.clear()
            values = dict(steps=1, tokens=32, step=max(one.step_count, 1), base_version=one.versions[pull["fragment"]])
            values.update(changes)
            codec = values.pop("codec", c.INT8)
            transfer = one.announce(pull, data, codec, **values)
            if verdict == "checksum":
                one.chunk(transfer, 0, data[:260])
                one.chunk(transfer, 260, data[260:], checksum=1)
            else:
                one.chunk(transfer, 0, data)
            drive([one, two], lambda: one.results, 10, f"the result of {changes}")
            result = one.results.pop()[2]
            check(result == verdict, f"{changes}: {result}, not {verdict}")
            one.results.clear()
            if verdict in ("malformed", "unknown_round", "stale_base"):
                one.pulls.append(pull)  # The question stands.
        e.wait(lambda: e.status()["verdicts"]["malformed"] == 6, 5, "all are counted")
        check(e.status()["round"] == 0, "nothing was merged")
        e.wait(lambda: e.metrics()["diloco_push_memory_bytes"] == 0, 5, "no push is held")
        check(one.closed is None, "and nobody was thrown out")


def test_late_and_duplicate(build):
    """Q1, Q2: late and repeated pushes are counted, never merged."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        one = seeded(e, delta=lambda fragment: None)
        two = learner(e, value=0.25)
        drive([one, two], two.has_all, 10, "state of the second")
        pull = wait_for_pull(one, [two])
        # Announced and begun, but the round is merged without it (quorum 1, no grace).
        transfer = one.announce(pull, delta(0.5), c.INT8, steps=1, step=1, base_version=1)
        one.chunk(transfer, 0, delta(0.5)[:260])
        drive([two], lambda: two.versions.get(pull["fragment"], 0) > pull["version"], 20, "the merge without it")
        one.chunk(transfer, 260, delta(0.5)[260:])
        drive([one], lambda: one.results, 10, "its result", train=False)
        result = one.results.pop()[2]
        check(result == "late", f"{result} {one.results} {e.status()['verdicts']}")
        # The same once more, announced after the merge.
        one.push_round(pull, delta(0.5), base_version=1)
        drive([one], lambda: one.results, 10, "its result", train=False)
        result = one.results.pop()[2]
        check(result == "late", f"{result} {one.results} {e.status()['verdicts']}")
        e.wait(lambda: e.status()["verdicts"]["late"] == 2, 5, "both are counted")
        e.wait(lambda: e.metrics()["diloco_push_memory_bytes"] == 0, 5, "no push is held")
    with Ensemble(build, job(quorum=2)) as e:
        e.start_syncers()
        one = seeded(e, delta=lambda fragment: None)
        two = learner(e, delta=lambda fragment: None)
        drive([one, two], two.has_all, 10, "state of the second")
        pull = wait_for_pull(one, [two])
        one.push_round(pull, delta(0.5))
        one.push_round(pull, delta(0.25))  # A repeat: ignored, the first stands.
        drive([one], lambda: one.results, 10, "the result of the repeat", train=False)
        check([result[2] for result in one.results] == ["duplicate"], f"{one.results}")
        two.pulls = [p for p in two.pulls if p["fragment"] == pull["fragment"]]
        two_pull = two.pulls.pop(0) if two.pulls else wait_for_pull(two, [])
        two.push_round(two_pull, delta(0.5))
        drive([one, two], lambda: one.versions[pull["fragment"]] == 2, 10, "the merge", train=False)
        check(one.results[-1][2] == "accepted", f"{one.results}")
        check(abs(first(one.values[pull["fragment"]]) - (pull["fragment"] + 1 - 0.5)) < 1e-5, "the first push counted")


def test_lost_in_the_middle_of_a_push(build):
    with Ensemble(build, job(quorum=2, timeoutSeconds=4)) as e:
        e.start_syncers()
        one = seeded(e)
        two = learner(e, delta=lambda fragment: None)
        drive([one, two], two.has_all, 10, "state of the second")
        pull = wait_for_pull(two, [one])
        transfer = two.announce(pull, delta(0.5), c.INT8, step=1, base_version=1)
        two.chunk(transfer, 0, delta(0.5)[:260])
        two.close()
        e.wait(lambda: e.status()["verdicts"]["aborted"] == 1, 10, "the push counts as aborted")
        three = learner(e)
        drive([one, three], lambda: e.status()["round"] >= 2, 20, "rounds with another learner")


def test_push_that_stands_still(build):
    """One that stops sending in the middle, but is heard: the push has a deadline of its own while its round needs it."""
    with Ensemble(build, job(quorum=2, timeoutSeconds=4)) as e:
        e.start_syncers()
        one = seeded(e)
        four = learner(e, delta=lambda fragment: None)
        drive([one, four], lambda: four.pulls, 20, "a pull")
        pull = four.pulls.pop(0)
        four.announce(pull, delta(0.5), c.INT8, step=1, base_version=four.versions[pull["fragment"]])
        drive([one, four], lambda: four.closed is not None, 20, "the end of the one that stands still")
        check("stands still" in four.closed.reason, f"{four.closed}")


def test_bound_of_push_memory(build):
    with Ensemble(build, job(quorum=2)) as e:
        e.start_syncer(extra=["--push-bytes-max", 3 * len(delta(0.5)) + 10])
        one = seeded(e, delta=lambda fragment: None)
        two = learner(e, delta=lambda fragment: None)
        three = learner(e, delta=lambda fragment: None)
        all_three = [one, two, three]
        drive(all_three, lambda: all(x.has_all() for x in all_three), 20, "state of all")
        drive(all_three, lambda: sum(len(x.pulls) for x in all_three) >= 4, 20, "pulls of two fragments")
        # Room for three pushes and no more (the first state does not count): announce more than that.
        sent = 0
        for x in all_three:
            for pull in list(x.pulls):
                x.announce(pull, delta(0.5), c.INT8, step=1, base_version=1)
                sent += 1
        check(sent >= 4, f"{sent} pushes announced")
        drive(all_three, lambda: sum(r[2] == "aborted" for x in all_three for r in x.results) >= sent - 3, 10,
              "those without room are turned away", train=False)
        metrics = e.metrics()
        check(metrics["diloco_push_memory_refused_total"] == sent - 3, f"{metrics['diloco_push_memory_refused_total']} of {sent}")
        check(metrics["diloco_push_memory_bytes"] <= 3 * len(delta(0.5)) + 10, "the bound holds")
        check("no memory for a push" in e.log("syncer-0"), "logged")
        check(all(x.closed is None for x in all_three), "nobody is closed for it")


# --- observers, slow readers


def test_observers(build):
    """J7: observers never count and disturb nobody."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        watcher = Client(e.addresses[0], e.token)
        watcher.join(JOB, tensors(), role=1)
        status = e.wait(lambda: e.status() if e.status()["evaluators"] == 1 else None, 5, "the evaluator")
        check(status["connected"] == 0 and status["phase"] == "WaitingForLearners", "an observer is no learner and never seeds")
        one = seeded(e)
        check([watcher.expect("update")["version"] for _ in range(2)] == [1, 1], "it gets what all get")
        watcher.send(c.EVALUATION, round=0, tokens=5, loss=2.5, sequences=16, parameter_hash=9)
        drive([one], lambda: e.status()["round"] >= 4, 20, "rounds")
        status = e.status()
        check(status["validation"]["last"]["loss"] == 2.5, "its evaluation is shown")
        check(status["quorum"]["have"] == 1 and len(status["learners"]) == 1, "it counts for nothing")
        names = set()
        while watcher.has_data(0.2):
            names.add(watcher.receive(heartbeats=True)[0])
        check("pull" not in names and "update" in names, f"{names}")
        watcher.meta(1, 1, [])
        check("observer" in watcher.expect_close().reason, "it may not act as a learner")
        one.handle(0)
        check(one.closed is None, "the learner is not disturbed")


def test_slow_reader(build):
    """T3: One that stops reading costs bounded memory, delays nobody, and later gets the newest version, not all of them."""
    rows = 4096  # 4 MiB a fragment
    with Ensemble(build, job(timeoutSeconds=60)) as e:
        e.start_syncers()
        one = seeded(e, rows=rows, value=0.001)

        def rounds(count):
            start, begin = time.monotonic(), e.status()["round"]
            drive([one], lambda: e.status()["round"] >= begin + count, 60, f"{count} rounds")
            return (time.monotonic() - start) / count

        rounds(4)
        alone = rounds(12)
        resident = e.status()["residentBytes"]
        slow = [Client(e.addresses[0], e.token, receive_buffer=65536) for _ in range(3)]
        for x in slow:
            x.join(JOB, tensors(rows), role=1)
        with_slow = rounds(24)
        grown = e.status()["residentBytes"] - resident
        # Each holds at most one version of 4 MiB and one partly written chunk; 24 rounds would be 96 MiB a reader.
        check(grown < 3 * (5 << 20) + (16 << 20), f"memory grew by {grown >> 20} MiB")
        check(with_slow < 3 * alone + 0.05, f"a round took {with_slow:.3f} s with slow readers, {alone:.3f} s without")
        check(e.metrics()["diloco_versions_skipped_total"] > 20, "old versions are not queued")
        newest = {f["fragment"]: f["version"] for f in e.status()["fragments"]}
        got = {0: [], 1: []}
        deadline = time.monotonic() + 30
        while any(not v or v[-1] < newest[f] for f, v in got.items()) and time.monotonic() < deadline:
            name, fields = slow[0].receive(heartbeats=True)
            if name == "update":
                got[fields["fragment"]].append(fields["version"])
        check(all(v and v[-1] >= newest[f] for f, v in got.items()), f"{got} newest {newest}")
        check(sum(len(v) for v in got.values()) <= 6, f"few versions were sent: {got}")
        print(f"     round {alone * 1e3:.1f} ms alone, {with_slow * 1e3:.1f} ms with three slow readers, grew {grown >> 20} MiB")


def test_reader_that_never_reads(build):
    """T3."""
    rows = 8192
    with Ensemble(build, job(timeoutSeconds=3)) as e:
        e.start_syncers()
        one = seeded(e, rows=rows, value=0.001)
        dead = Client(e.addresses[0], e.token, receive_buffer=65536)
        dead.join(JOB, tensors(rows), role=1)

        def beat():
            one.handle(0.01)
            one.train()
            dead.send(c.HEARTBEAT, sequence=1, step=0, tokens=0)
            return "takes no data" in e.log("syncer-0")
        e.wait(beat, 30, "the reader is closed")
        e.wait(lambda: e.metrics()["diloco_slow_connections_closed_total"] == 1, 5, "it is counted")
        check(one.closed is None, "the other one stays")


if __name__ == "__main__":
    main([value for name, value in sorted(globals().items()) if name.startswith("test_")])
