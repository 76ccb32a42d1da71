#!/usr/bin/env python3
"""Peer recovery with real processes (J3, J4, J6): a killed learner's replacement takes parameters and AdamW's moments from a
peer, over two shards, over TLS, and over a link of bounded speed; a peer killed in mid-transfer is replaced by another one;
where nobody serves, everything comes from the syncer. Runs in network namespaces of its own."""
import pathlib
import re
import signal
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.durable import note_figures  # noqa: E402
from lib.ensemble import TEXT, Ensemble, check, main, manifest  # noqa: E402
from lib.rejoin import Learner, measure, rejoin_job  # noqa: E402
from lib.shaped import Link, enter  # noqa: E402
from test_tls import authority, certificate  # noqa: E402

PACED = ["--step-seconds", "0.02"]
TAKEN = r"state taken over from learner=(\d+) .*peer_step=(\d+)"


def wait_taken(e, learner, seconds=60):
    """The peer and its step, once the learner's log says that its state was taken over."""
    found = e.wait(lambda: re.search(TAKEN, e.log(f"learner-{learner}")), seconds, f"learner {learner} with a peer's state")
    return int(found[1]), int(found[2])


def replace(e, learner, extra=(), endpoints=None):
    e.signal(f"learner-{learner}", signal.SIGKILL)
    e.processes[f"learner-{learner}"].wait(10)
    (e.folder / f"learner-{learner}.log").rename(e.folder / f"learner-{learner}-before.log")
    e.start_learner(learner, endpoints=endpoints, extra=[*PACED, *extra])


def test_replacement_takes_moments_from_a_peer(build):
    job = manifest(TEXT, training={"tokenBudget": 10**9}, syncer={"shards": 2})
    with Ensemble(build, job) as e:
        e.start_syncers()
        e.start_learner(0, extra=PACED)
        e.start_learner(1, extra=PACED)
        e.wait(lambda: e.status()["round"] >= 20 and e.learner(1)["pushesMerged"] >= 5, 60, "twenty rounds")
        check(e.learner(0)["serves"] and e.learner(1)["serves"], "both serve their state")
        replace(e, 1)
        peer, step = wait_taken(e, 1)
        check(peer == 0 and step > 0, f"the state of learner 0: {peer} at {step}")
        for shard in (0, 1):
            e.wait(lambda s=shard: e.learner(1, s).get("stateFrom") == 0 and e.learner(1, s)["pushesMerged"] > 0, 60,
                   "a merged push, and the status")
        check(e.metrics()["diloco_recoveries_total"] >= 1, "in the metrics")
        with sqlite3.connect(f"file:{e.folder}/state-0/tape.db?mode=ro", uri=True) as tape:
            e.wait(lambda: tape.execute("select count(*) from trace join incarnations i on i.id = incarnation where "
                                        "kind = 'state' and c = 0 and i.id = (select max(id) from incarnations where learner = 1)"
                                       ).fetchone()[0] == 1, 20,
                   "an entry in the tape")


def test_without_a_server_the_syncer_gives_all(build):
    job = manifest(TEXT, training={"tokenBudget": 10**9})
    with Ensemble(build, job) as e:
        e.start_syncers()
        for n in (0, 1):
            e.start_learner(n, extra=[*PACED, "--serve-listen", "off"])
        e.wait(lambda: e.status()["round"] >= 8 and e.learner(1)["pushesMerged"] > 0, 60, "eight rounds")
        check(not e.learner(0)["serves"], "learner 0 does not serve")
        replace(e, 1, ["--serve-listen", "off"])
        e.wait(lambda: e.learner(1)["admission"] > 2 and e.learner(1)["pushesMerged"] > 0, 60, "a merged push")
        check("stateFrom" not in e.learner(1) and e.status()["recoveries"] == 0, f"nobody's state: {e.learner(1)}")


def test_over_tls(build):
    job = manifest(TEXT, training={"tokenBudget": 10**9})
    with Ensemble(build, job) as e:
        ca = authority(e.folder, "ca")
        key, cert = certificate(e.folder, "all", ca, "subjectAltName=IP:127.0.0.1")
        e.start_syncer(extra=["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca[1]])
        endpoint = f"wss://{e.addresses[0]}"
        tls = ["--tls-ca", ca[1], "--tls-cert", cert, "--tls-key", key]
        for n in (0, 1):
            e.start_learner(n, endpoints=endpoint, extra=[*PACED, *tls])
        for n in (0, 1):
            e.wait(lambda m=n: "training step=" in e.log(f"learner-{m}"), 60, f"learner {n} trains")
        replace(e, 1, tls, endpoint)
        peer, step = wait_taken(e, 1)
        check(peer == 0 and step > 0, f"the state of learner 0: {peer} at {step}")


def test_over_a_shaped_link(build):
    """J3's measure at a small size; its thresholds are the benchmark's, this machine may be busy."""
    figures = measure(pathlib.Path(build).resolve(), 24 << 20, "100mbit", 5)
    check(figures["rejoin_bytes"] <= figures["rejoin_state_bytes"] * 1.02, f"not a byte twice: {figures}")
    note_figures(build, **{f"{key}_small": value for key, value in figures.items() if key.endswith("ratio")})


def test_peer_killed_in_mid_transfer(build):
    """J4: the joiner goes on with another peer."""
    build = pathlib.Path(build).resolve()
    elements = (48 << 20) // 12
    with Link("100mbit") as link, Ensemble(build, rejoin_job(3), text=False) as e:
        e.start_syncer(listen="0.0.0.0:0")
        e.addresses[0] = near = f"{link.near}:{e.addresses[0].rsplit(':', 1)[1]}"
        others = [Learner(e, build, near, n, elements, 5, 60) for n in (0, 1, 2)]
        e.wait(lambda: e.status()["round"] >= 8 and all(e.learner(n)["pushesMerged"] > 0 for n in (0, 1, 2)), 120,
               "eight rounds")
        joiner = Learner(e, build, near, 3, elements, 5, 60, link)
        offer = e.wait(lambda: re.search(r"learner (\d) offers its state", joiner.log()), 60, "an offer", every=0.02)
        others[int(offer[1])].process.kill()
        found = e.wait(joiner.joined, 90, "the joiner")
        check(found["from"] in (0, 1, 2) and found["from"] != int(offer[1]), f"another's state than {offer[1]}'s: {found}")
        check(found["updates"] == found["step"] > 0, f"its moments are of that peer's step: {found}")
        e.wait(lambda: e.learner(3)["pushesMerged"] > 0, 60, "a merged push")


if __name__ == "__main__":
    enter()
    main([test_replacement_takes_moments_from_a_peer, test_without_a_server_the_syncer_gives_all, test_over_tls,
          test_over_a_shaped_link, test_peer_killed_in_mid_transfer])
