#!/usr/bin/env python3
"""The job's data: leased, counted once, given back (J8); over kills of learners and syncer, disconnects, restarts."""
import pathlib
import random
import signal
import sqlite3
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import TEXT, Ensemble, check, main, manifest  # noqa: E402
from lib.relay import Relay  # noqa: E402

BATCH = 4


def ledger(e):
    """Rows of coverage (what: positions), its faults, and all leases, as SQL has them."""
    database = sqlite3.connect(f"file:{e.folder}/state-0/tape.db?mode=ro", uri=True)
    database.row_factory = sqlite3.Row
    database.execute("BEGIN")  # All of it as of one moment.
    coverage = {row["what"]: row["n"] for row in
                database.execute("SELECT what, sum(count) AS n FROM coverage GROUP BY what")}
    faults = [tuple(row) for row in database.execute("SELECT * FROM coverage_faults")]
    leases = [dict(row) for row in database.execute("SELECT * FROM leases ORDER BY lease")]
    seen = [dict(row) for row in database.execute(
        "SELECT uid, nonce, step, lease, cursor, fragment, version FROM participants ORDER BY version, fragment")]
    data = [dict(row) for row in database.execute(
        "SELECT i.uid, i.nonce, t.step, t.a AS lease, t.b AS first, t.c AS count, t.text FROM trace t"
        " JOIN incarnations i ON i.id = t.incarnation WHERE t.kind = 'data' ORDER BY t.incarnation, t.seq")]
    database.close()
    return coverage, faults, leases, seen, data


def check_balance(e):
    """No position counted twice, none lost: told from the rows one by one, beside the view that says so."""
    coverage, faults, leases, seen, data = ledger(e)
    check(faults == [], f"coverage_faults: {faults[:5]}")
    end = max((row["first"] + row["count"] for row in leases), default=0)
    check(sum(coverage.values()) == end, f"{coverage} do not add up to {end}")
    counted = [0] * end
    for row in leases:
        for position in range(row["first"], row["first"] + row["counted"]):
            counted[position] += 1
    check(max(counted, default=0) <= 1, "a position was counted twice")
    check(sum(counted) == coverage.get("counted", 0), "counted positions")
    # What is counted of a lease is what the merged pushes of its holder say.
    most = {}
    for row in seen:
        who = (row["uid"], row["nonce"])
        most[who] = max(most.get(who, (0, 0)), (row["lease"], row["cursor"]))
    for row in leases:
        lease, cursor = most.get((row["uid"], row["nonce"]), (0, 0))
        expected = row["count"] if row["lease"] < lease else cursor if row["lease"] == lease else 0
        check(row["state"] == "returned" or row["counted"] == expected, f"{row}: pushes say {lease}, {cursor}")
        check(row["counted"] <= expected, f"{row}: pushes say {lease}, {cursor}")
    return coverage, leases, data


def check_tape(leases, data):
    """J9: from the tape each batch can be told: every lease was taken from its beginning on, in its order, by its holder."""
    by_number = {row["lease"]: row for row in leases}
    for row in data:
        if row["lease"] == 0:
            check(row["first"] >= 2**60, f"unleased data among the leased: {row}")
            continue
        lease = by_number[row["lease"]]
        check((lease["uid"], lease["nonce"]) == (row["uid"], row["nonce"]), f"{row} is another's: {lease}")
        check(row["first"] + row["count"] == lease["first"] + lease["count"], f"{row} is not of {lease}")
        check(row["text"] == f"taken={BATCH * row['step']}", f"{row}: a batch of {BATCH} a step")


def positions(e):
    status = e.status()["data"]
    check(status["counted"] + status["leased"] + status["queued"] == status["positions"], f"status {status}")
    return status


def test_kills_disconnects_and_restarts(build):
    """J8, J5, J9: twelve kills of learners, eight of the syncer, forty disconnects."""
    chance = random.Random(11)
    job = manifest(TEXT, training={"tokenBudget": 10**9, "data": {"leaseSequences": 12 * BATCH}},
                   learners={"replicas": 4, "max": 4}, sync={"quorum": 2})
    with Ensemble(build, job) as e:
        e.start_syncers()
        relay = Relay(e.addresses[0])

        def start(n):
            e.start_learner(n, endpoints=f"ws://{relay.address}", extra=["--step-seconds", 0.02])

        for n in range(4):
            start(n)
        e.wait(lambda: e.status()["round"] >= 4, 60, "four rounds")
        faults = ["cut"] * 40 + ["learner"] * 12 + ["syncer"] * 8
        chance.shuffle(faults)
        for fault in faults:
            if fault == "cut":
                e.wait(relay.cut_one, 20, "a connection to cut", every=0.01)
            elif fault == "learner":
                n = chance.randrange(4)
                e.signal(f"learner-{n}", signal.SIGKILL)
                e.wait_exit(f"learner-{n}", 5, code=-signal.SIGKILL)
                start(n)
            else:
                e.signal("syncer-0", signal.SIGKILL)
                e.wait_exit("syncer-0", 5, code=-signal.SIGKILL)
                check_balance(e)  # Also as a kill leaves it.
                e.start_syncer()
            time.sleep(chance.random() * 0.3)  # The instants are random on purpose.
        before = e.wait(lambda: positions(e), 20, "the status of the data")
        e.wait(lambda: positions(e)["counted"] > before["counted"] + 200 * BATCH, 60, "data that counts")
        for n in range(4):
            check(e.processes[f"learner-{n}"].poll() is None, f"learner {n} ended")
        # Learners that leave give back what they have not used.
        for n in (2, 3):
            e.signal(f"learner-{n}", signal.SIGTERM)
        e.wait_exit("learner-2", 20)
        e.wait_exit("learner-3", 20)
        end = e.status()["round"]
        e.wait(lambda: e.status()["round"] > end + 8, 60, "rounds of the two that are left")
        coverage, leases, data = check_balance(e)
        left = {row["uid"] for row in leases if row["state"] == "held"}
        check(len(left) <= 2, f"held by {left}")
        check(any(row["state"] == "returned" for row in leases), "nothing was ever returned")
        check_tape(leases, data)
        positions(e)
        relay.close()
        print(f"{coverage}, {len(leases)} leases, {sum(r['state'] == 'returned' for r in leases)} returned, "
              f"{sum(r['lease'] == 0 for r in data)} times without")


def test_two_restarts_in_a_row_with_other_learners(build):
    """J8: the ledger goes on over two restarts, and one with another number of learners."""
    job = manifest(TEXT, training={"tokenBudget": 10**9, "data": {"leaseSequences": 25 * BATCH}},
                   learners={"replicas": 3, "max": 8}, sync={"timeoutSeconds": 1, "heartbeatSeconds": 0.2})
    with Ensemble(build, job) as e:
        e.start_syncers()
        for n in range(3):
            e.start_learner(n, extra=["--step-seconds", 0.02])
        e.wait(lambda: e.status()["round"] >= 12 and positions(e)["counted"] > 100, 60, "data that counts")
        for _ in range(2):
            e.signal("syncer-0", signal.SIGKILL)
            e.wait_exit("syncer-0", 5, code=-signal.SIGKILL)
            counted = check_balance(e)[0].get("counted", 0)
            e.start_syncer()
            restored = [line for line in e.log("syncer-0").splitlines() if "data restored" in line][-1]
            check(f"counted={counted} " in restored, f"{counted} were counted: {restored}")
        e.wait(lambda: e.status()["connected"] == 3, 30, "all to come back")
        check(not any(row["state"] == "returned" for row in check_balance(e)[1]), "nobody was gone for good")
        # All die with the syncer; two others come, under other ids.
        for name in ("learner-0", "learner-1", "learner-2", "syncer-0"):
            e.signal(name, signal.SIGKILL)
            e.wait_exit(name, 5, code=-signal.SIGKILL)
        check(check_balance(e)[0].get("leased", 0) > 0, "the three held nothing")
        e.start_syncer()
        for n in (5, 6):
            e.start_learner(n, extra=["--step-seconds", 0.02])
        # Ten times the timeout later their data is taken up.
        e.wait(lambda: sum(row["state"] == "returned" for row in check_balance(e)[1]) >= 3, 40, "the data of the lost")
        mark = positions(e)["positions"]
        e.wait(lambda: positions(e)["queued"] == 0, 60, "the queue to be leased out")
        held = {row["uid"] for row in check_balance(e)[1] if row["state"] == "held"}
        check(all(uid.startswith(("uid-5", "uid-6")) for uid in held), f"held by {held}")
        e.wait(lambda: sum(row["count"] for row in _below(e, mark)) == mark, 60, "everything below the mark to count")
        check_balance(e)


def _below(e, mark):
    """What is counted below a position, as the view has it."""
    database = sqlite3.connect(f"file:{e.folder}/state-0/tape.db?mode=ro", uri=True)
    rows = [{"count": min(first + count, mark) - first} for first, count in database.execute(
        "SELECT first, count FROM coverage WHERE what = 'counted' AND first < ?", (mark,))]
    database.close()
    return rows


def test_syncer_away_for_longer_than_a_lease(build):
    """J5, J8: learners train on without the syncer, first on what they hold, then on data that never counts."""
    job = manifest(TEXT, training={"tokenBudget": 10**9, "data": {"leaseSequences": 10 * BATCH}}, learners={"replicas": 2})
    with Ensemble(build, job) as e:
        e.start_syncers()
        for n in range(2):
            e.start_learner(n, extra=["--step-seconds", 0.02])
        e.wait(lambda: e.status()["round"] >= 8, 60, "rounds")
        e.signal("syncer-0", signal.SIGKILL)
        e.wait_exit("syncer-0", 5, code=-signal.SIGKILL)
        e.wait(lambda: all("without a lease" in e.log(f"learner-{n}") for n in range(2)), 30, "leases to run out")
        check(all(e.processes[f"learner-{n}"].poll() is None for n in range(2)), "a learner ended")
        e.start_syncer()
        counted = positions(e)["counted"]
        e.wait(lambda: positions(e)["counted"] > counted + 20 * BATCH, 60, "leased data to count again")
        _, leases, data = check_balance(e)
        check_tape(leases, data)
        check(any(row["lease"] == 0 for row in data), "the tape does not say that there was no lease")
        check(not any(row["state"] == "returned" for row in leases), "a lease was taken away")


def test_away_for_too_long(build):
    """J8: a learner that stood still for ten timeouts finds its data given to others, takes the global state, and goes on."""
    job = manifest(TEXT, training={"tokenBudget": 10**9, "data": {"leaseSequences": 25 * BATCH}}, learners={"replicas": 2},
                   syncer={"shards": 2}, sync={"timeoutSeconds": 0.5, "heartbeatSeconds": 0.1})
    with Ensemble(build, job) as e:
        e.start_syncers()
        for n in range(2):
            e.start_learner(n, extra=["--step-seconds", 0.02])
        e.wait(lambda: e.status()["round"] >= 8 and e.learner(1)["step"] > 40, 60, "rounds")
        e.signal("learner-1", signal.SIGSTOP)
        e.wait(lambda: any(row["state"] == "returned" for row in check_balance(e)[1]), 30, "its data to come back")
        e.wait(lambda: positions(e)["queued"] == 0, 30, "the other one to take it")
        e.signal("learner-1", signal.SIGCONT)
        e.wait(lambda: "given to others" in e.log("learner-1"), 30, "the learner to be told")
        merged = e.wait(lambda: e.learner(1)["pushesMerged"], 30, "the learner's status")
        e.wait(lambda: e.learner(1)["pushesMerged"] > merged + 4, 60, "pushes of it")
        _, leases, _ = check_balance(e)
        uid = e.learner(1)["uid"]
        own = [row for row in leases if row["uid"] == uid]
        check(any(row["state"] == "returned" for row in own) and own[-1]["state"] != "returned", f"its leases: {own}")
        e.wait(lambda: sum(row["counted"] for row in check_balance(e)[1] if row["lease"] >= own[-1]["lease"]) > 0, 30,
               "its new data to count")
        check(e.processes["learner-1"].poll() is None, "the learner ended")


if __name__ == "__main__":
    main([test_away_for_too_long, test_kills_disconnects_and_restarts, test_two_restarts_in_a_row_with_other_learners,
          test_syncer_away_for_longer_than_a_lease])
