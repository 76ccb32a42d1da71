#!/usr/bin/env python3
"""The syncer as its peers see it: what it lets in, what it refuses, and messages that break the protocol.

Clients here are scripted, so that they can do what an honest learner never does. Each test names what must hold."""
import pathlib
import re
import socket
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
import client as c  # noqa: E402
from client import Client, Closed, Denied, drive  # noqa: E402
from ensemble import Ensemble, Failure, check, main  # noqa: E402
from scripted import JOB, ROWS, delta, expect_refusal, http, job, learner, seeded, tensors  # noqa: E402

# --- HTTP and the upgrade


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


def settle(one):
    """All that the only learner has pushed is merged, and it pushes nothing more."""
    one.delta = None

    def all_are_merged():
        accepted = sum(verdict == "accepted" for _, _, verdict in one.results)
        return one.transfer - 2 == len(one.results) and sum(one.versions.values()) == 2 + accepted  # Two: the first state.

    drive([one], all_are_merged, 20, "what was pushed", train=False)


def test_a_joiner_that_fetches_is_sent_nothing(build):
    """J3: what is merged while a joiner takes optimiser state from a peer passes it by; it then gets the last version, once."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        one = seeded(e, hello={"serve": "127.0.0.1:9"})
        drive([one], lambda: e.learner(0)["serves"], 20, "a peer")
        joiner = Client(e.addresses[0], e.token)
        joiner.join(JOB, tensors(), recover=1)
        peers = joiner.expect("peers")
        check(peers["count"] == 1 and peers["serve0"] == "127.0.0.1:9", f"a peer: {peers}")
        before = dict(one.versions)
        drive([one], lambda: all(one.versions[f] >= before[f] + 3 for f in before), 20, "three rounds of each fragment")
        settle(one)
        while joiner.has_data(0.1):
            name, fields = joiner.receive(heartbeats=True)
            check(name == "heartbeat", f"nothing but heartbeats: {name} {fields}")
        check(not joiner.updates, "no part of a version either")
        for fragment in (0, 1):
            joiner.send(c.HELD, fragment=fragment, version=0, content_hash=0)
        got = [joiner.expect("update") for _ in (0, 1)]
        check({update["fragment"]: update["version"] for update in got} == one.versions, f"the last versions: {joiner.versions}")


def test_what_is_lacked_comes_newest_first(build):
    """J3: one that joins gets the version that was made last first: those made before it are replaced sooner."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        one = seeded(e)
        drive([one], lambda: min(one.versions.values()) >= 3, 20, "rounds of both")
        one.delta = lambda fragment: delta(0.5) if fragment == 1 else None  # Another order than that of the fragments.
        alone = one.versions[1] + 3
        drive([one], lambda: one.versions[1] >= alone, 20, "three rounds of fragment 1")
        settle(one)
        watcher = Client(e.addresses[0], e.token)
        watcher.join(JOB, tensors(), role=1)
        got = [watcher.expect("update") for _ in (0, 1)]
        check([update["fragment"] for update in got] == [1, 0] and got[0]["round"] > got[1]["round"],
              f"the newest first: rounds {got[0]['round']} and {got[1]['round']}")


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


if __name__ == "__main__":
    main([value for name, value in sorted(globals().items()) if name.startswith("test_")])
