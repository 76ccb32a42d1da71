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
SLOWER = 4.13  # No whole number: else its steps might end just after each round for good.
STEP_SECONDS = 0.1  # Paced, so that eight learners fit two cores and a rate means something.
STOP_SECONDS = float(os.environ.get("STOP_SECONDS", "60"))


def steps(ensemble, learners):
    entries = {e["learner"]: e for e in ensemble.status()["learners"] if e["state"] == "connected"}
    return {n: entries[n]["step"] for n in learners}


def rate(ensemble, learners, seconds):
    """Steps a second of each learner over a window."""
    first, start = steps(ensemble, learners), time.monotonic()
    time.sleep(seconds)  # The window that is measured.
    last, elapsed = steps(ensemble, learners), time.monotonic() - start
    return {n: (last[n] - first[n]) / elapsed for n in learners}


def test_fast_learners_never_wait(build):
    """Q6: nobody waits for a slow or silent learner."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        for n in (*FAST, SLOW, STOPPED):
            e.start_learner(n, extra=["--step-seconds", STEP_SECONDS * (SLOWER if n == SLOW else 1)])
        e.wait(lambda: all(v > 20 for v in steps(e, FAST).values()), 60, "twenty steps of the fast learners")
        before = rate(e, FAST, 10)
        rounds_before = e.status()["round"]
        e.signal(f"learner-{STOPPED}", signal.SIGSTOP)
        during = rate(e, FAST, STOP_SECONDS)
        status = e.status()
        slow_step = e.learner(SLOW)["step"]
        e.signal(f"learner-{STOPPED}", signal.SIGCONT)
        ratio = sum(during.values()) / sum(before.values())
        worst = min(during[n] / before[n] for n in FAST)
        print(f"fast learners' step rate with one slow and one stopped: {ratio:.3f} of before, worst {worst:.3f}")
        check(ratio > 0.95 and worst > 0.9, f"fast learners slowed down to {ratio:.3f} (worst {worst:.3f})")
        check(status["round"] > rounds_before + 10, "rounds did not go on while a learner was stopped")
        check(status["connected"] == 7, f"{status['connected']} connected, expected 7 while one is stopped")
        check(slow_step > 0, "the slow learner never stepped")
        # The stopped learner comes back by itself and takes part again.
        merged = e.learner(STOPPED)["pushesMerged"]
        e.wait(lambda: e.status()["connected"] == 8 and e.learner(STOPPED)["pushesMerged"] > merged, 30,
               "the stopped learner's next merged push")
        check(e.learner(SLOW)["pushesMerged"] > 0, "the slow learner never contributed")
        e.stop_job()
        e.wait_exit("syncer-0", 30)
        for n in (*FAST, SLOW, STOPPED):
            e.wait_exit(f"learner-{n}", 15)


def job():
    return manifest(TEXT, training={"tokenBudget": 10**9, "evaluationSeconds": 0},
                    sync={"interval": 16, "overlap": 2, "warmup": {"steps": 8, "interval": 2}},
                    learners={"replicas": 8, "max": 8})


if __name__ == "__main__":
    main([test_fast_learners_never_wait])
