#!/usr/bin/env python3
"""A hundred forced disconnects at random instants and twenty kill -9 of learners in one run: no push is merged twice, the
counters add up, the run finishes by its token budget."""
import pathlib
import random
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import TEXT, Ensemble, check, main, manifest  # noqa: E402
from lib.relay import Relay  # noqa: E402
from lib.tape import read_tape  # noqa: E402

LEARNERS = 4
DISCONNECTS, KILLS = 100, 20


def test_disconnects_and_kills(build):
    """J5, Q2: forced disconnects lose no update and count none twice."""
    chance = random.Random(7)
    job = manifest(TEXT, training={"tokenBudget": 4 * 128 * 2000},
                   learners={"replicas": LEARNERS, "max": LEARNERS})
    with Ensemble(build, job) as e:
        e.start_syncers()
        relay = Relay(e.addresses[0])
        endpoint = f"ws://{relay.address}"

        def start(n):
            e.start_learner(n, endpoints=endpoint, extra=["--step-seconds", 0.02])

        for n in range(LEARNERS):
            start(n)
        e.wait(lambda: e.status()["round"] >= 4, 60, "four rounds")
        faults = ["cut"] * DISCONNECTS + ["kill"] * KILLS
        chance.shuffle(faults)
        kills = 0
        for fault in faults:
            if fault == "cut":
                e.wait(relay.cut_one, 20, "a connection to cut", every=0.01)
            else:
                n = chance.randrange(LEARNERS)
                e.signal(f"learner-{n}", signal.SIGKILL)
                e.wait_exit(f"learner-{n}", 5, code=-signal.SIGKILL)
                kills += 1
                start(n)
            time.sleep(chance.random() * 0.25)  # The instants are random on purpose.
            check(e.processes["syncer-0"].poll() is None, "the syncer ended")
        middle = e.status()
        check(middle["phase"] not in ("Ended", "Finishing"), "the job ended before all faults were injected: lengthen it")
        for n in range(LEARNERS):
            e.wait_exit(f"learner-{n}", 240)
        e.wait_exit("syncer-0", 30)
        relay.close()
        print(f"{relay.cuts} disconnects, {kills} kills, {middle['joins']} joins, {middle['verdicts']}")
        check(relay.cuts >= DISCONNECTS and kills == KILLS, "not all faults were injected")

        tape = read_tape(e.folder / "state-0")
        check(len(tape.rounds) > 50, f"only {len(tape.rounds)} rounds in the tape")
        seen = set()
        for p in tape.participants:
            key = (p.uid, p.nonce, p.fragment, p.base_version)
            check(key not in seen, f"merged twice: {key}")
            seen.add(key)
            check(p.tokens == p.steps * 128, f"{p.tokens} tokens in {p.steps} steps of 128")
        # Versions of a fragment grow by one, and each round made exactly one.
        versions = {}
        for r in tape.rounds:
            check(r.version == versions.get(r.fragment, 1) + 1, f"round {r.round}: version {r.version} of {r.fragment}")
            versions[r.fragment] = r.version
        # What one incarnation got merged for one fragment never exceeds what it had trained by then.
        totals = {}
        for p in sorted(tape.participants, key=lambda p: p.round):
            key = (p.uid, p.nonce, p.fragment)
            totals[key] = totals.get(key, 0) + p.steps
            check(totals[key] <= p.step, f"{key}: {totals[key]} steps merged, {p.step} trained")


if __name__ == "__main__":
    main([test_disconnects_and_kills])
