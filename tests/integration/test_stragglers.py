#!/usr/bin/env python3
"""Eight learners, one four times slower, one stopped (SIGSTOP) for a minute: the fast ones' step rate is unaffected."""
import os
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import TEXT, Ensemble, check, main, manifest  # noqa: E402

FAST = range(6)
SLOW, STOPPED = 6, 7
SLOWER = 4
STEP_SECONDS = 0.1  # Paced, so that eight learners fit two cores and a rate means something.
STOP_SECONDS = float(os.environ.get("STOP_SECONDS", "60"))
WINDOWS = 6


def learners(ensemble):
    return {e["learner"]: e for e in ensemble.status()["learners"] if e["state"] == "connected"}


def progress(ensemble, seconds):
    """Over a window: steps a second of the fast learners, and how long they waited at boundaries in it."""
    first, start = learners(ensemble), time.monotonic()
    time.sleep(seconds)  # The window that is measured.
    last, elapsed = learners(ensemble), time.monotonic() - start
    steps = sum(last[n]["step"] - first[n]["step"] for n in FAST)
    return steps / elapsed, sum(last[n]["waitedSeconds"] - first[n]["waitedSeconds"] for n in FAST)


def test_fast_learners_never_wait(build):
    """Q6: nobody waits for a slow or silent learner, and a slow learner's work counts, at the interval that one would take."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        for n in (*FAST, SLOW, STOPPED):
            e.start_learner(n, extra=["--step-seconds", STEP_SECONDS * (SLOWER if n == SLOW else 1)])
        e.wait(lambda: all(learners(e)[n]["step"] > 20 for n in FAST) and learners(e)[SLOW]["step"] > 4, 120,
               "twenty steps of the fast learners")
        before, _ = progress(e, 10)
        rounds_before, slow_before = e.status()["round"], e.learner(SLOW)
        e.signal(f"learner-{STOPPED}", signal.SIGSTOP)
        during = [progress(e, STOP_SECONDS / WINDOWS) for _ in range(WINDOWS)]
        status, slow = e.status(), e.learner(SLOW)
        e.signal(f"learner-{STOPPED}", signal.SIGCONT)
        # Another program may take the machine for a while: who waits for somebody would be slow in every window.
        ratio = max(rate for rate, _ in during) / before
        waited = sum(seconds for _, seconds in during)
        print(f"fast learners' step rate with one slow and one stopped: {ratio:.3f} of before; they waited {waited:.3f} s")
        check(waited == 0, f"fast learners waited {waited:.3f} s at boundaries")
        check(ratio > 0.9, f"fast learners slowed down to {ratio:.3f}")
        rounds = status["round"] - rounds_before
        check(rounds > 10, "rounds did not go on while a learner was stopped")
        check(status["connected"] == 7, f"{status['connected']} connected, expected 7 while one is stopped")
        # Two of its steps are one interval: it has something for nearly every round.
        merged, steps = slow["pushesMerged"] - slow_before["pushesMerged"], slow["step"] - slow_before["step"]
        print(f"slow learner: {steps} steps, {merged} pushes merged in {rounds} rounds")
        check(merged > rounds / 2, f"only {merged} pushes of the slow learner were merged in {rounds} rounds")
        # The stopped learner comes back by itself and takes part again.
        merged = e.learner(STOPPED)["pushesMerged"]
        e.wait(lambda: e.status()["connected"] == 8 and e.learner(STOPPED)["pushesMerged"] > merged, 60,
               "the stopped learner's next merged push")
        e.stop_job()
        e.wait_exit("syncer-0", 60)
        for n in (*FAST, SLOW, STOPPED):
            e.wait_exit(f"learner-{n}", 30)


def job():
    return manifest(TEXT, training={"tokenBudget": 10**9, "evaluationSeconds": 0},
                    sync={"interval": 8, "overlap": 2, "warmup": {"steps": 8, "interval": 2}},
                    learners={"replicas": 8, "max": 8})


if __name__ == "__main__":
    main([test_fast_learners_never_wait])
