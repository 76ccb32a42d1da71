#!/usr/bin/env python3
"""The syncer's start, stop, restart and state: arguments, signals, the end of the job, damage, a full disk, a successor."""
import contextlib
import os
import pathlib
import signal
import socket
import sqlite3
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
from client import drive  # noqa: E402
from ensemble import Ensemble, check, main  # noqa: E402
from scripted import expect_refusal, http, job, learner, seeded  # noqa: E402

# --- start, stop, restart


def run_syncer(e, *arguments):
    return subprocess.run([str(e.bin / "diloco-syncer"), *map(str, arguments)], capture_output=True, text=True, timeout=20)


def test_wrong_arguments(build):
    with Ensemble(build, job()) as e:
        good = {"--job": e.job_file, "--shard": 0, "--listen": "127.0.0.1:0", "--token-file": e.token_file}
        empty = e.folder / "empty"
        empty.write_text("")
        taken = socket.create_server(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        cases = [({"--job": "/no/such.yaml"}, "/no/such.yaml"), ({"--shard": 1}, "shard 1"), ({"--shard": "x"}, "--shard"),
                 ({"--listen": "127.0.0.1"}, "HOST:PORT"), ({"--listen": f"127.0.0.1:{port}"}, "another process has this port"),
                 ({"--listen": "203.0.113.9:0"}, "203.0.113.9"), ({"--token-file": "/no/such"}, "/no/such"),
                 ({"--token-file": empty}, "empty"), ({"--threads": "-1"}, "--threads"), ({"--log-level": "loud"}, "loud"),
                 ({"--tls-cert": "x"}, "--tls-key"), ({"--tls-cert": "/no/c.pem", "--tls-key": "/no/k.pem"}, "/no/c.pem"),
                 ({"--port-file": "/no/such/folder/x"}, "/no/such/folder/x"), ({"--no-such": 1}, "--help"),
                 ({"--state-dir": "/no/such/folder/state"}, "/no/such/folder/state")]
        for changes, text in cases:
            arguments = [part for pair in {**good, **changes}.items() for part in pair]
            done = run_syncer(e, *arguments)
            expected = 1 if "--state-dir" in changes else 2
            check(done.returncode == expected, f"{changes}: {done.returncode} {done.stderr}")
            check(text in done.stderr, f"{changes}: {done.stderr!r} does not say {text!r}")
        for name in good:
            arguments = [part for pair in good.items() if pair[0] != name for part in pair]
            check(run_syncer(e, *arguments).returncode == 2, f"without {name}")
        shown = run_syncer(e, "--help")
        check(shown.returncode == 0 and all(name in shown.stdout for name in good), "--help")
        taken.close()


def listening(port):
    """Local addresses (hex) of sockets that listen on `port`."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = pathlib.Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, number = fields[1].split(":")
            if fields[3] == "0A" and int(number, 16) == port:
                found.append(address)
    return found


def test_loopback_means_loopback(build):
    with Ensemble(build, job()) as e:
        e.start_syncers()
        check(listening(int(e.addresses[0].rsplit(":", 1)[1])) == ["0100007F"], "127.0.0.1 alone is bound")
    with Ensemble(build, job()) as e:
        e.start_syncer(listen="*:0")
        port = int(e.addresses[0].rsplit(":", 1)[1])
        check(e.addresses[0].startswith("*:") and len(listening(port)) == 1, "all interfaces, by one socket")
        e.addresses[0] = f"127.0.0.1:{port}"
        check(http(e, "/healthz")[0] == 200, "reached over IPv4")


def test_stop(build):
    for how, result, code in (("/stop", 1, "requested"), ("/finish", 0, "succeeded")):
        with Ensemble(build, job()) as e:
            e.start_syncers()
            one = seeded(e)
            drive([one], lambda: e.status()["round"] >= 2, 20, "rounds")
            check(http(e, how, "POST", e.token)[0] == 202, "accepted")
            drive([one], lambda: one.stop is not None, 10, "STOP")
            check(one.stop["result"] == result, f"{code}: {one.stop}")
            e.wait(lambda: e.status()["result"] == code, 5, "the result in /status")
            expect_refusal(e, "finished", "over")
            one.close()
            e.wait_exit("syncer-0", 10, 0)
            check(len(one.values) == 2 and one.values[0]["version"] > 1, "the last versions came before STOP")
    with Ensemble(build, job()) as e:  # Nobody there: ends at once.
        e.start_syncers()
        e.stop_job()
        e.wait_exit("syncer-0", 5, 0)
    with Ensemble(build, job()) as e:  # Somebody who does not go: bounded; a signal then: at once.
        e.start_syncers()
        one = seeded(e)
        e.stop_job()
        drive([one], lambda: one.stop is not None, 10, "STOP")
        e.signal("syncer-0", signal.SIGTERM)
        e.wait_exit("syncer-0", 3, 0)


SAVED = 5


def test_leaving_saves(build):
    """Asked to leave, a syncer saves, says no STOP and exits with a code of its own; started again, the job goes on."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        one = seeded(e)
        drive([one], lambda: e.status()["round"] >= 2, 20, "rounds")
        for how in (signal.SIGTERM, signal.SIGINT, "/drain"):
            before = e.status()
            if how == "/drain":
                check(http(e, how, "POST", "wrong")[0] == 401 and http(e, how, "POST", e.token)[0] == 202, "POST /drain")
            else:
                e.signal("syncer-0", how)
            e.wait_exit("syncer-0", 10, SAVED)
            check(one.stop is None, f"{how}: the job was ended")
            e.start_syncer()
            after = e.status()
            check(after["round"] >= before["round"] and after["epoch"] == before["epoch"] + 1 and "result" not in after,
                  f"{how}: {before} then {after}")
            for key in ("tokens", "step", "joins", "refusals"):  # Exactly, not as of the last round.
                check(after[key] == before[key], f"{how}: {key} was {before[key]}, is {after[key]}")
            check(after["tokensMerged"] >= before["tokensMerged"] and
                  all(after["verdicts"][v] >= n for v, n in before["verdicts"].items()), f"{how}: verdicts")
            one.close()
            one = learner(e, hello={"step": one.step_count})
            drive([one], lambda: e.status()["round"] >= after["round"] + 2, 20, f"rounds after {how}")
        e.signal("syncer-0", signal.SIGTERM)
        e.signal("syncer-0", signal.SIGTERM)
        e.wait_exit("syncer-0", 5, SAVED)


def test_end_of_the_job(build):
    spec = job()
    spec["spec"]["training"]["tokenBudget"] = 320
    with Ensemble(build, spec) as e:
        e.start_syncers()
        one = seeded(e)
        drive([one], lambda: one.stop is not None, 20, "STOP")
        check(one.stop["result"] == 0 and "budget" in one.stop["text"], f"{one.stop}")
        one.close()
        e.wait_exit("syncer-0", 10, 0)
    spec = job()
    spec["spec"]["activeDeadlineSeconds"] = 1
    with Ensemble(build, spec) as e:
        e.start_syncers()
        one = seeded(e)
        drive([one], lambda: one.stop is not None, 20, "STOP")
        check(one.stop["result"] == 2, f"{one.stop}")
        one.close()
        e.wait_exit("syncer-0", 10, 4)


def test_restart_goes_on(build):
    """S1: goes on from the last committed round: Killed at any time and started again: the last committed versions, bit for bit, and nothing counted twice."""
    with Ensemble(build, job(outerOptimizer={"type": "nesterov", "learningRate": "0.7", "momentum": "0.9"})) as e:
        e.start_syncers()
        seen = {}  # (fragment, version) -> content hash: one version never has two contents
        one = seeded(e)
        admissions = []
        for kill in range(4):
            admissions.append(one.welcome["admission"])
            target = e.status()["round"] + 3

            def advanced():
                for values in one.values.values():
                    key = (values["fragment"], values["version"])
                    check(seen.setdefault(key, values["content_hash"]) == values["content_hash"], f"{key} has two contents")
                return e.status()["round"] >= target
            drive([one], advanced, 20, "rounds")
            before = e.status()
            e.processes["syncer-0"].kill()
            e.wait_exit("syncer-0", 5, None)
            held = dict(one.versions)
            one.close()
            e.start_syncer()
            after = e.status()
            check(after["epoch"] == before["epoch"] + 1, "the epoch grows")
            check(after["round"] >= before["round"], f"no committed round is missing: {before['round']} {after['round']}")
            check(after["tokensMerged"] >= before["tokensMerged"], "nor tokens")
            restored = {f["fragment"]: f["version"] for f in after["fragments"]}
            check(all(restored[f] >= held[f] for f in held), f"what a learner was told is durable: {held} {restored}")
            one = learner(e, hello={"step": one.step_count})
            drive([one], one.has_all, 10, "the state")
            check(one.welcome["admission"] > admissions[-1], "admissions grow over restarts")
            advanced()
        check(len(seen) > 8, "many versions were seen")


def test_without_state_folder(build):
    with Ensemble(build, job()) as e:
        e.start_syncer(extra=["--state-dir", ""])
        one = seeded(e)
        drive([one], lambda: e.status()["round"] >= 2, 20, "rounds")
        check("memory only" in e.log("syncer-0"), "said in the log")
        check(not list((e.folder / "state-0").iterdir()), "nothing is written")


def test_damaged_state(build):
    """S3: damage is named, the previous good state is used."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        one = seeded(e)
        drive([one], lambda: e.status()["round"] >= 6, 20, "rounds")
        e.processes["syncer-0"].kill()
        e.wait_exit("syncer-0", 5, None)
        one.close()
        # A file beyond the last commit may be there too, and does not count.
        with contextlib.closing(sqlite3.connect(e.folder / "state-0" / "tape.db")) as base:
            query = "select file, version from commits where fragment = 0 order by version desc limit 1"
            name, version = base.execute(query).fetchone()
        newest = e.folder / "state-0" / name
        data = bytearray(newest.read_bytes())
        data[len(data) // 2] ^= 1
        newest.write_bytes(data)
        e.start_syncer()
        log = e.log("syncer-0")
        check(newest.name in log and "damaged" in log, "the file is named")
        check({f["fragment"]: f["version"] for f in e.status()["fragments"]}[0] == version + 1, "under a new number")
        again = learner(e)
        drive([again], lambda: again.has_all() and e.status()["round"] > 8, 20, "rounds go on")


def test_full_disk(build):
    """S4: a full disk stops commits and loses nothing: Commits stop with a clear condition, nothing is told that is not durable, and it goes on once there is room."""
    try:
        subprocess.run(["unshare", "-m", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        print("     (left out: no mount namespaces here)")
        return
    rows = 1024  # 1 MiB a fragment; two files each are kept
    with Ensemble(build, job()) as e:
        state = e.folder / "state-0"
        state.mkdir()
        port_file = e.folder / "port-0"
        script = f"mount -t tmpfs -o size=12m tmpfs '{state}' && exec \"$@\""
        process = e.start("syncer-0", [
            "unshare", "-m", "sh", "-c", script, "sh", e.bin / "diloco-syncer", "--job", e.job_file, "--shard", 0, "--listen",
            "127.0.0.1:0", "--token-file", e.token_file, "--state-dir", state, "--port-file", port_file])
        e.wait(lambda: port_file.exists() or process.poll() is not None, 10, "the port")
        if process.poll() is not None:
            print("     (left out: no tmpfs can be mounted here)")
            return
        e.addresses[0] = port_file.read_text().strip()
        one = seeded(e, rows=rows, value=0.001)
        drive([one], lambda: e.status()["round"] >= 4, 20, "rounds")
        filler = pathlib.Path(f"/proc/{process.pid}/root{state}/filler")
        descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            while os.write(descriptor, b"\0" * 65536):
                pass
        except OSError:
            os.close(descriptor)
        drive([one], lambda: e.metrics()["diloco_commit_failures_total"] >= 2, 20, "failing commits")
        status = e.status()
        # Of a file; or of the database, in SQLite's words.
        full = any(words in status["message"] for words in ("No space", "disk is full"))
        check("cannot be stored" in status["message"] and full, status["message"])
        stuck = dict(one.versions)
        drive([one], lambda: e.metrics()["diloco_commit_failures_total"] >= 3, 20, "another attempt")
        check(one.versions == stuck, "nothing is told meanwhile")
        check(http(e, "/healthz")[0] == 200, "the process is well")
        filler.unlink()
        drive([one], lambda: e.status()["round"] >= status["round"] + 4, 60, "rounds once there is room")
        check("cannot be stored" not in e.status()["message"], e.status()["message"])
        check({f["fragment"]: f["version"] for f in e.status()["fragments"]}[0] > stuck[0], "versions grow on")


def test_paused_process_is_fenced(build):
    """Q7: a paused process cannot commit over its successor: A syncer that slept while a successor took over its state must not commit over it."""
    with Ensemble(build, job()) as e:
        old = e.start_syncer()
        one = seeded(e)
        drive([one], lambda: e.status()["round"] >= 3, 20, "rounds")
        def settled():  # Nothing is being merged or committed, so that it sleeps with no lock in its hands.
            one.handle(0.05)
            return not any(f["open"] for f in e.status()["fragments"]) and e.metrics()["diloco_push_memory_bytes"] == 0
        e.wait(settled, 10, "a moment between two rounds", every=0.3)
        os.kill(old.pid, signal.SIGSTOP)
        old_address = e.addresses[0]
        e.processes["old"] = e.processes.pop("syncer-0")
        e.addresses[0] = None
        e.start_syncer()
        two = learner(e)
        drive([two], lambda: two.has_all() and e.status()["round"] >= 6, 20, "rounds at the successor")
        os.kill(old.pid, signal.SIGCONT)
        deadline = time.monotonic() + 20
        while old.poll() is None and time.monotonic() < deadline:
            if one.closed is None:
                try:
                    one.handle(0.01)
                    one.train()
                except OSError:
                    break
        check(old.wait(20) == 1, f"it ends by itself: {old.returncode} ({old_address})")
        check("later syncer" in e.log("syncer-0"), "and says why")
        rounds = e.status()["round"]
        drive([two], lambda: e.status()["round"] >= rounds + 2, 20, "the successor goes on")


if __name__ == "__main__":
    main([value for name, value in sorted(globals().items()) if name.startswith("test_")])
