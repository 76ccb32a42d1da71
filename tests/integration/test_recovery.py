#!/usr/bin/env python3
"""Peer recovery with real processes (J3, J4, J6): a killed learner's replacement takes parameters and AdamW's moments from a
peer, over two shards and TLS too; a peer that dies or goes silent in mid-transfer is replaced by another one; with nobody to
ask the fragments come from the syncer."""
import pathlib
import re
import signal
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import TEXT, Ensemble, check, main, manifest  # noqa: E402

PACED = ["--step-seconds", "0.02"]


def log_of(ensemble, name):
    return (ensemble.folder / f"{name}.log").read_text()


def takes_over(e, learner, peers):
    """Waits until the newest incarnation of `learner` trains with the state of one of `peers`."""
    def done():
        entry = e.learner(learner)
        return entry if entry is not None and entry.get("stateFrom") in peers and entry["pushesMerged"] > 0 else None
    return e.wait(done, 60, f"learner {learner} with the state of {peers} and a merged push")


def test_replacement_takes_moments_from_a_peer(build):
    job = manifest(TEXT, training={"tokenBudget": 10**9}, syncer={"shards": 2})
    with Ensemble(build, job) as e:
        e.start_syncers()
        e.start_learner(0, extra=PACED)
        e.start_learner(1, extra=PACED)
        e.wait(lambda: e.status()["round"] >= 20 and e.learner(1)["pushesMerged"] >= 5, 60, "twenty rounds")
        check(e.learner(0)["serves"] and e.learner(1)["serves"], "both serve their state")
        e.signal("learner-1", signal.SIGKILL)
        e.processes["learner-1"].wait(10)
        e.start_learner(1, extra=PACED)
        entry = takes_over(e, 1, {0})
        check(e.status()["recoveries"] >= 1, "counted")
        check(e.metrics().get("diloco_recoveries_total", 0) >= 1, "in the metrics")
        log = log_of(e, "learner-1")
        found = re.search(r"state taken over from learner=0 .*peer_step=(\d+)", log)
        check(found is not None and int(found.group(1)) > 0, f"logged: {log[-2000:]}")
        with sqlite3.connect(f"file:{e.folder}/state-0/tape.db?mode=ro", uri=True) as tape:
            e.wait(lambda: tape.execute("select count(*) from trace join incarnations i on i.id = incarnation where "
                                        "kind = 'state' and c = 0 and i.learner = 1").fetchone()[0] == 1, 20,
                   "an entry in the tape")
        print(f"learner 1: {entry['pushesMerged']} pushes merged with the state of learner 0")


if __name__ == "__main__":
    main([test_replacement_takes_moments_from_a_peer])
