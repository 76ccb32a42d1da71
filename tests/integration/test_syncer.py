#!/usr/bin/env python3
"""The syncer as its peers see it: what it lets in, what it refuses, what it does with pushes, who may slow whom.

Clients here are scripted, so that they can do what an honest learner never does. Each test names what must hold."""
import contextlib
import os
import pathlib
import re
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
import client as c  # noqa: E402
from client import Client, Closed, Denied, Learner, drive  # noqa: E402
from ensemble import Ensemble, Failure, check, main, manifest  # noqa: E402

JOB = "test"
ROWS = 8  # Of 256 elements: a fragment is ROWS x 256.


def job(**sync):
    spec = dict(training={"tokenBudget": 10**9}, sync={
        "fragments": 2, "interval": 2, "overlap": 1, "quorum": 1, "grace": {"mode": "none"}, "heartbeatSeconds": 0.5,
        "timeoutSeconds": 10, "finishSeconds": 3, "compression": "int8",
        "merge": {"method": "mean", "embedding": "average", "weighting": "equal"}, "outerOptimizer": {"type": "sgd", "learningRate": "1"}})
    learners = sync.pop("learners", {"min": 1, "max": 8, "replicas": 2})
    spec["sync"].update(sync)
    return manifest("/dev/null", JOB, learners=learners, **spec)


def tensors(rows=ROWS):
    """Two tensors of one size, so that each fragment is exactly one of them."""
    return [("a", [rows, 256]), ("b", [rows, 256])]


def constant(value, rows=ROWS):
    return c.floats([value] * 256) * rows


def delta(value, rows=ROWS):
    return c.int8_blocks([value] * 256) * rows


def first(values):
    return struct.unpack_from("<f", values["data"])[0]


def learner(e, value=0.5, rows=ROWS, **options):
    options.setdefault("delta", lambda fragment: delta(value, rows))
    options.setdefault("seed", lambda fragment: constant(float(fragment + 1), rows))
    return Learner(e.addresses[0], e.token, JOB, tensors(rows), **options)


def seeded(e, rows=ROWS, **options):
    """A learner with both fragments at version 1."""
    one = learner(e, rows=rows, **options)
    drive([one], one.has_all, 20, "the first state")
    check([first(one.values[f]) for f in (0, 1)] == [1.0, 2.0], "the first state is the learner's own")
    one.results.clear()
    return one


# --- HTTP and the upgrade


def http(e, path, method="GET", token=None, headers=()):
    request = urllib.request.Request(f"http://{e.addresses[0]}{path}", method=method, headers=dict(headers))
    if token is not None:
        request.add_header("Authorization", "Bearer " + token)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_http(build):
    with Ensemble(build, job()) as e:
        e.start_syncers()
        check(http(e, "/healthz") == (200, "ok\n"), "/healthz")
        check(http(e, "/readyz")[0] == 200, "/readyz")
        check(http(e, "/no/such")[0] == 404, "404")
        check(http(e, "/v1/connect")[0] == 426, "a WebSocket is asked for")
        check(http(e, "/stop")[0] == 404 and http(e, "/stop", "POST")[0] == 401, "/stop wants POST and the token")
        check(http(e, "/stop", "POST", "wrong")[0] == 401, "/stop with a wrong token")
        check(http(e, "/status", "DELETE")[0] in (404, 405), "other methods")
        status = e.status()
        for key in ("job", "shard", "shards", "epoch", "phase", "message", "round", "step", "tokens", "tokensMerged", "tokenBudget",
                    "loss", "goodput", "quorum", "learnersWanted", "connected", "learners", "fragments", "verdicts", "joins",
                    "leaves", "refusals", "times", "graceSeconds", "bytesIn", "bytesOut", "residentBytes", "uptimeSeconds"):
            check(key in status, f"/status has {key}")
        check(status["phase"] == "WaitingForLearners" and status["message"] == "0/1 learners", status["message"])
        check(e.processes["syncer-0"].poll() is None, "still running")


def test_upgrade_is_guarded(build):
    with Ensemble(build, job()) as e:
        e.start_syncers()
        cases = [(dict(token="wrong"), 401), (dict(token=None), 401), (dict(token=e.token + "x"), 401), (dict(token=""), 401),
                 (dict(token=e.token[:-1]), 401), (dict(token="x" * 5000), 401),
                 (dict(token=e.token, path="/"), 404), (dict(token=e.token, path="/v1/connect/more"), 404),
                 (dict(token=e.token, subprotocol=None), 400), (dict(token=e.token, subprotocol="diloco.v2"), 400)]
        for options, expected in cases:
            try:
                Client(e.addresses[0], **options)
                raise Failure(f"{options} was let in")
            except Denied as denied:
                # A header that is too long for the parser may be cut off without an answer; it is not let in.
                check(denied.status == expected or len(options["token"] or "") > 1000, f"{options}: {denied.status}")
            except OSError:
                check(len(options["token"] or "") > 1000, f"{options}: reset")
        check(e.metrics()["diloco_upgrades_denied_total"] >= len(cases) - 1, "counted")
        Client(e.addresses[0], e.token).close()


def test_metrics_are_well_formed(build):
    with Ensemble(build, job()) as e:
        e.start_syncers()
        one = seeded(e)
        drive([one], lambda: e.status()["round"] >= 3, 20, "rounds")
        text = e.get("/metrics")
        types, seen, order = {}, set(), []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                continue
            if line.startswith("# TYPE "):
                name, kind = line.split()[2:4]
                check(name not in types and kind in ("counter", "gauge", "histogram"), f"one TYPE a family: {line}")
                check((kind == "counter") == name.endswith("_total"), f"counters end in _total: {line}")
                types[name] = kind
                order.append(name)
                continue
            match = re.fullmatch(r'([a-z_:][a-z0-9_:]*)(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? (\S+)', line)
            check(match is not None, f"a sample: {line!r}")
            float(match.group(4))
            name = match.group(1)
            if name not in types:
                name = re.sub(r"_(bucket|sum|count)$", "", name)
            check(types.get(name) and name == order[-1], f"under its family: {line}")
            check(match.group(1) + (match.group(2) or "") not in seen, f"once: {line}")
            seen.add(match.group(1) + (match.group(2) or ""))
        values = e.metrics()
        check(values['diloco_pushes_total{verdict="accepted"}'] >= 3, "pushes are counted")
        check(values['diloco_round_seconds_count{stage="merge"}'] >= 3, "rounds are timed")
        check(values["diloco_learners_connected"] == 1, "learners are counted")
        check(values["diloco_received_bytes_total"] > 0 and values["diloco_sent_bytes_total"] > 0, "bytes are counted")


# --- HELLO


def expect_refusal(e, expected, text, **hello):
    one = Client(e.addresses[0], e.token)
    options = dict(job=JOB, tensors=tensors())
    options.update(hello)
    one.hello(options.pop("job"), options.pop("tensors"), **options)
    name, fields = one.receive()
    check(name == "refuse" and c.REFUSALS[fields["code"]] == expected, f"{hello}: {name} {fields}")
    check(text in fields["text"], f"{hello}: {fields['text']!r} does not say {text!r}")
    one.expect_close()


def test_hello_is_checked(build):
    """J2: another job or layout is refused by name."""
    with Ensemble(build, job(learners={"min": 1, "max": 2, "replicas": 2})) as e:
        e.start_syncers()
        one = seeded(e)
        expect_refusal(e, "job", "other", job="other")
        expect_refusal(e, "shard", "shard 0", shard=1)
        expect_refusal(e, "layout", "tensor b", tensors=[("a", [ROWS, 256]), ("b", [ROWS, 255])])
        expect_refusal(e, "layout", "c", tensors=tensors() + [("c", [1, 256])])
        expect_refusal(e, "layout", "b", tensors=[("a", [ROWS, 256]), ("x", [ROWS, 256])])
        expect_refusal(e, "version", "version 9", wrong={"version": 9})
        two = learner(e)
        expect_refusal(e, "full", "learners.max")
        drive([one, two], two.has_all, 10, "the second learner's state")
        e.wait(lambda: e.status()["refusals"] == 7, 5, "all are counted")
        log = e.log("syncer-0")
        check(log.count("refused peer=") == 7, "each is logged once")
        # A new process under the same id takes the id over; the old one is told when it comes back.
        newer = learner(e, hello={"learner": one.welcome["learner"], "uid": one.uid})
        check(newer.welcome["learner"] == one.welcome["learner"], "the id is taken over")
        check(newer.welcome["admission"] > two.welcome["admission"], "admissions grow")
        check(one.expect_close().code != 0, "the older incarnation is closed")
        expect_refusal(e, "superseded", "newer incarnation", learner=one.welcome["learner"], nonce=one.nonce,
                       uid=one.uid)


def test_same_process_reconnects(build):
    with Ensemble(build, job()) as e:
        e.start_syncers()
        one = seeded(e)
        again = learner(e, hello={"nonce": one.nonce, "uid": one.uid, "fragments": [(0, 1, 0, 0, 0), (1, 1, 0, 0, 0)]})
        check(again.welcome["learner"] == one.welcome["learner"], "the same slot")
        check(one.expect_close().code == 1000, "the old connection is closed")
        again.handle(0.3)
        check(again.values == {}, "versions that it holds are not sent again")
        again.versions = {0: 1, 1: 1}
        drive([again], lambda: len(again.values) == 2, 20, "both fragments merged")
        status = e.status()
        check(status["connected"] == 1 and len(status["learners"]) == 1, "one learner")


# --- messages that break the protocol


def push_fields(pull, **changes):
    values = dict(transfer=1, round=pull["round"], fragment=pull["fragment"], base_version=pull["version"], step=1, steps=1,
                  tokens=32, codec=c.INT8, bytes=len(delta(0.5)), lease=0, cursor=0)
    values.update(changes)
    return values


def hostile_messages():
    """(name, before HELLO, what to do)"""
    heartbeat = c.encode_fields(c.HEARTBEAT, dict(sequence=1, step=0, tokens=0))

    def raw(data):
        return lambda one, pull: one.send_frame(data)

    yield "no magic", True, raw(c.frame(c.HEARTBEAT, heartbeat, magic=b"HTTP"))
    yield "an unknown type", True, raw(c.frame(99, heartbeat))
    yield "a heartbeat before hello", True, raw(c.frame(c.HEARTBEAT, heartbeat))
    yield "an empty message", True, raw(b"")
    yield "half a header", True, raw(c.frame(c.HEARTBEAT, heartbeat)[:13])
    yield "a text frame", True, lambda one, pull: one.send_frame(b"hello", opcode=1)
    yield "a hello of 4 GiB", True, raw(c.frame(c.HELLO, b"x" * 100, claimed=0xffffffff))
    yield "a hello that promises more", True, raw(c.frame(c.HELLO, b"x" * 100, claimed=1000))
    yield "a hello of nonsense", True, raw(c.frame(c.HELLO, b"x" * 100))
    yield "a hello with damaged tensors", True, lambda one, pull: one.send(
        c.HELLO, role=0, learner=-1, nonce=1, uid="u", job=JOB, shard=0, step=0, tokens=0, fragments=[],
        tensors=c.encode_tensors(tensors())[:-3])
    yield "a hello with a role that is not there", True, lambda one, pull: one.hello(JOB, tensors(), role=7)
    yield "a second hello", False, lambda one, pull: one.hello(JOB, tensors())
    yield "a wrong checksum", False, raw(c.frame(c.HEARTBEAT, heartbeat, checksum=1))
    yield "a byte too many", False, raw(c.frame(c.HEARTBEAT, heartbeat) + b"x")
    yield "a byte too few", False, raw(c.frame(c.HEARTBEAT, heartbeat)[:-1])
    yield "a payload of another size", False, raw(c.frame(c.HEARTBEAT, heartbeat + b"12345678"))
    yield "a control message of 1 MiB", False, raw(c.frame(c.META, b"\0" * (1 << 20)))
    yield "the syncer's own message", False, lambda one, pull: one.send(c.STOP, result=0, text="stop")
    yield "an evaluation from a learner", False, lambda one, pull: one.send(
        c.EVALUATION, round=1, tokens=1, loss=1.0, sequences=1, parameter_hash=0)
    yield "a chunk of no transfer", False, lambda one, pull: one.chunk(77, 0, delta(0.5))
    yield "an empty chunk", False, raw(c.frame(c.CHUNK, struct.pack("<QQ", 1, 0)))
    yield "a chunk of 2 MiB", False, raw(c.frame(c.CHUNK, struct.pack("<QQ", 1, 0) + b"\0" * (2 << 20)))

    def with_push(act):
        def run(one, pull):
            one.send(c.PUSH, **push_fields(pull))
            act(one, delta(0.5))
        return run

    yield "a chunk out of order", False, with_push(lambda one, data: one.chunk(1, 260, data[260:]))
    yield "a chunk twice", False, with_push(lambda one, data: (one.chunk(1, 0, data[:260]), one.chunk(1, 0, data[:260])))
    yield "a chunk beyond the end", False, with_push(lambda one, data: one.chunk(1, 0, data + data))
    yield "a chunk of half a block", False, with_push(lambda one, data: one.chunk(1, 0, data[:130]))
    yield "one transfer twice", False, lambda one, pull: [one.send(c.PUSH, **push_fields(pull)) for _ in range(2)]
    yield "a push that was finished and goes on", False, with_push(
        lambda one, data: (one.chunk(1, 0, data), one.chunk(1, len(data), data)))


def test_hostile_messages(build):
    """S5: wrong length, version, checksum, size: refused."""
    with Ensemble(build, job(quorum=2)) as e:  # So that rounds stay open for the hostile one.
        e.start_syncers()
        honest = seeded(e)
        cases = list(hostile_messages())
        for name, before_hello, act in cases:
            pull = {"round": 1, "fragment": 0, "version": 1}
            if before_hello:
                one = Client(e.addresses[0], e.token)
            else:
                one = learner(e, delta=lambda fragment: None)
                drive([honest, one], lambda: one.pulls, 20, f"{name}: a pull")
                pull = one.pulls[0]
            try:
                act(one, pull)
                closed = one.expect_close(10)
            except (BrokenPipeError, ConnectionResetError) as error:
                closed = Closed(1002, str(error))
            except Denied as denied:
                closed = denied
            check(closed.code in (0, 1002, 1003, 1000, 1009), f"{name}: {closed}")
            one.close()
            honest.handle(0)
            check(honest.closed is None, f"{name}: the honest learner is still there")
        before = e.status()["round"]
        other = learner(e)
        drive([honest, other], lambda: e.status()["round"] >= before + 3, 20, "rounds after all that")
        e.wait(lambda: e.metrics()["diloco_protocol_errors_total"] >= len(cases) - 1, 5, "all are counted")
        check(e.metrics()["diloco_push_memory_bytes"] <= 4 * len(delta(0.5)), "no push is left behind")
        check(e.processes["syncer-0"].poll() is None, "still running")


def test_connections_that_say_nothing(build):
    """Half an upgrade, a dropped connection in a message: no effect on others."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        host, port = e.addresses[0].split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(40)]
        for one in idle[:20]:
            one.sendall(b"GET /v1/connect HTTP/1.1\r\nUpgrade: websock")
        honest = seeded(e)
        half = Client(e.addresses[0], e.token)
        half.socket.sendall(bytes([0x82, 0x80 | 127]) + struct.pack(">Q", 1 << 40) + b"\0\0\0\0DLC1")
        cut = Client(e.addresses[0], e.token)
        cut.join(JOB, tensors())
        cut.socket.sendall(bytes([0x82, 0x80 | 100]) + b"\0\0\0\0" + b"DLC1")
        cut.close()
        drive([honest], lambda: e.status()["round"] >= 3, 20, "rounds")
        e.wait(lambda: e.status()["leaves"]["lost"] == 1, 10, "the cut learner is counted as lost")
        for one in idle:
            one.close()


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
