#!/usr/bin/env python3
"""The syncer's end of RFC 6455, which it reads itself: frames cut anywhere, pings, closes and faults, plain and over TLS."""
import pathlib
import socket
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
import client as c  # noqa: E402
from client import Client, Closed, Learner, drive  # noqa: E402
from ensemble import Ensemble, Failure, check, main  # noqa: E402
from test_tls import ROWS, job, learner, start  # noqa: E402

JOB = "test"
TENSORS = [("a", [ROWS, 256]), ("b", [ROWS, 256])]
HEARTBEAT = c.frame(c.HEARTBEAT, c.encode_fields(c.HEARTBEAT, {"sequence": 1, "step": 0, "tokens": 0}))
MASK = b"\x9a\x00\xff\x31"


def joined(e):
    one = Client(e.addresses[0], e.token)
    one.join(JOB, TENSORS)
    return one


def next_frame(one):
    """(opcode, data) of the next frame, whatever it is."""
    first, second = one._exactly(2)
    size = second & 0x7f
    if size >= 126:
        size = int.from_bytes(one._exactly(2 if size == 126 else 8), "big")
    return first & 0xf, one._exactly(size)


def expect_frame(one, opcode, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        got, data = next_frame(one)
        if got == opcode:
            return data
    raise Failure(f"no frame of opcode {opcode} within {seconds} s")


def test_pings_and_closes(build):
    """A ping gets its payload back, also in the middle of a message; a close gets its own code back, and the stream ends."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        for payload in (b"", b"x", bytes(range(125))):
            one = joined(e)
            one.send_frame(HEARTBEAT[:7], final=False, mask=MASK)
            one.send_frame(payload, 9, mask=MASK)
            check(expect_frame(one, 10) == payload, "the pong holds what the ping held")
            one.send_frame(b"", 0, final=False)
            one.send_frame(HEARTBEAT[7:], 0, mask=MASK)
            one.send_frame(b"again", 9)
            check(expect_frame(one, 10) == b"again", "the message in pieces was taken")
            one.close()
        e.wait(lambda: e.status()["leaves"]["lost"] == 3, 20, "a socket that just ends is a loss")
        for code in (b"", b"\x03\xe8", b"\x03\xe9going away", b"\x0f\xa0", b"\x0b\xb8private"):
            one = joined(e)
            one.send_frame(code, 8, mask=MASK)
            check(expect_frame(one, 8) == code[:2], f"close {code!r} is echoed")
            check(one.socket.recv(1) == b"", "then the syncer closes")
        e.wait(lambda: e.status()["connected"] == 0, 10, "all are gone")


def faults():
    """name, bytes, code, whether they come before HELLO."""
    def head(first, size, masked=True):
        return bytes([first, size | (0x80 if masked else 0)]) + (MASK if masked else b"")

    yield "no mask", head(0x82, 5, False) + b"hello", 1002
    yield "a reserved bit", head(0xc2, 0), 1002
    yield "text", head(0x81, 0), 1003
    yield "an unknown opcode", head(0x83, 0), 1002
    yield "an unknown control opcode", head(0x8b, 0), 1002
    yield "a split ping", head(0x09, 0), 1002
    yield "a long ping", bytes([0x89, 0xfe, 0, 126]) + MASK + bytes(126), 1002
    yield "a continuation of nothing", head(0x80, 0), 1002
    yield "a message inside another", head(0x02, 0) + head(0x82, 0), 1002
    yield "half a code", head(0x88, 1) + b"x", 1002
    yield "a code that nobody may send", head(0x88, 2) + bytes([0x03 ^ MASK[0], 0xed ^ MASK[1]]), 1002
    yield "a reason that is no text", head(0x88, 3) + bytes([0x03 ^ MASK[0], 0xe8 ^ MASK[1], 0xff ^ MASK[2]]), 1007
    yield "a long length", bytes([0x82, 0xfe, 0, 5]) + MASK, 1002
    yield "a longer length", bytes([0x82, 0xff]) + struct.pack(">Q", 65535) + MASK, 1002
    yield "a negative length", bytes([0x82, 0xff]) + struct.pack(">Q", 1 << 63) + MASK, 1002
    yield "an endless length", bytes([0x82, 0xff]) + struct.pack(">Q", 1 << 40) + MASK, 1009
    yield "two messages in one", head(0x82, 0), 1002


def test_faults_close_with_their_code(build):
    """S5: every fault of framing ends its own connection, with a code, a reason and a line in the log; nobody else's."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        honest = learner(e, None)
        drive([honest], lambda: honest.has_all(), 20, "the first state")
        for name, data, code in faults():
            for has_joined in (False, True):
                one = joined(e) if has_joined else Client(e.addresses[0], e.token)
                for i in range(len(data) if has_joined else 1):  # At once, or byte by byte.
                    try:
                        one.socket.sendall(data[i:i + 1] if has_joined else data)
                    except OSError:
                        break
                one.socket.settimeout(20)
                closed = one.expect_close(10)
                check(closed.code == code and closed.reason, f"{name}: {closed}")
                check(closed.reason[:60] in e.log("syncer-0"), f"{name}: the log says why")
                one.close()
            honest.heartbeat()
            honest.handle()
        drive([honest], lambda: honest.versions[0] >= 3, 20, "rounds go on")
        check(honest.closed is None, "the honest one is still there")


def test_no_frames_before_the_answer(build):
    with Ensemble(build, job()) as e:
        e.start_syncers()
        host, port = e.addresses[0].split(":")
        with socket.create_connection((host, int(port)), timeout=20) as raw:
            raw.sendall((f"GET /v1/connect HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                         "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
                         f"Sec-WebSocket-Protocol: diloco.v1\r\nAuthorization: Bearer {e.token}\r\n\r\n").encode()
                        + b"\x82\x85\0\0\0\0hello")
            answer = b""
            while data := raw.recv(4096):
                answer += data
                if b"before the upgrade" in answer:
                    break
            check(b"\x03\xeaframes came before" in answer, f"closed with 1002: {answer!r}")
        one = joined(e)
        one.send_frame(b"x", 9)
        check(expect_frame(one, 10) == b"x", "others are served")


class Cut(Learner):
    """Its frames go out in pieces that fit nothing, each message in several frames; masked like any client's but a learner's."""
    def send_frame(self, data, opcode=2, final=True, mask=b"\0\0\0\0"):
        if opcode != 2 or len(data) < 3000:
            super().send_frame(data, opcode, final, mask)
            return
        cuts = [0, 1, 30, 1500, len(data) // 2 + 1, len(data)]
        for i in range(len(cuts) - 1):
            if i == 3:
                super().send_frame(b"ping", 9)
            super().send_frame(data[cuts[i]:cuts[i + 1]], 2 if i == 0 else 0, i == len(cuts) - 2, mask if i == 2 else MASK)


def test_pushes_in_pieces(build):
    """Chunks in several frames, with pings between them, merge as whole ones do; plain and over TLS."""
    for tls in (False, True):
        with Ensemble(build, job()) as e:
            context = None
            if tls:
                context = c.client_tls(start(e, mutual=False)[1])
            else:
                e.start_syncers()
            one = Cut(e.addresses[0], e.token, JOB, TENSORS, tls=context, delta=lambda fragment: c.int8_blocks([0.5] * 256) * ROWS,
                      seed=lambda fragment: c.floats([float(fragment)] * 256) * ROWS)
            drive([one], lambda: one.has_all() and min(one.versions.values()) >= 3, 30, "rounds")
            value = c.struct.unpack_from("<f", one.values[1]["data"])[0]
            check(abs(value - (1 - 0.5 * (one.values[1]["version"] - 1))) < 1e-4, f"tls {tls}: they merge: {value}")


def test_goodbye_before_a_reset(build):
    """What a learner said before its connection was reset is heard."""
    with Ensemble(build, job()) as e:
        e.start_syncers()
        for _ in range(5):
            one = joined(e)
            one.goodbye(text="and gone")
            one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        e.wait(lambda: e.status()["leaves"]["goodbye"] == 5, 10, f"five goodbyes: {e.status()['leaves']}")


if __name__ == "__main__":
    main([value for name, value in sorted(globals().items()) if name.startswith("test_")])
