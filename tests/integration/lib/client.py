"""A client of the syncer for tests, standard library only: WebSocket, protocol diloco.v1, and what it takes to break them.

    client = Client(address, token)                   upgrades; Denied(status) when the syncer does not want it
    client.hello("test", tensors=[("a", [4, 256])])
    kind, fields = client.receive()                   next message, as a name and a dict

It can do what no honest learner does: send cut, damaged or contradictory messages, or stop reading.
"""
import base64
import ctypes
import itertools
import math
import os
import select
import socket
import ssl
import struct
import time

HELLO, WELCOME, REFUSE, META, PULL, PUSH, PUSH_NONE, CHUNK, RESULT, UPDATE, EVALUATION, HEARTBEAT, GOODBYE, STOP, TRACE = \
    range(1, 16)
LEASE_REQUEST, LEASE, MARKER = 16, 17, 18
PEERS, HELD, RECOVERED = 19, 20, 21
NAMES = ["", "hello", "welcome", "refuse", "meta", "pull", "push", "push_none", "chunk", "result", "update", "evaluation",
         "heartbeat", "goodbye", "stop", "trace", "lease_request", "lease", "marker", "peers", "held", "recovered"]
VERDICTS = ["accepted", "late", "duplicate", "stale_base", "not_finite", "norm", "checksum", "malformed", "unknown_round",
            "layout_mismatch", "below_quorum", "aborted", "nothing", "lease_lost"]
REFUSALS = {1: "version", 2: "job", 3: "layout", 4: "full", 5: "shard", 6: "superseded", 7: "finished", 8: "malformed"}
NONE, BF16, INT8, INT4 = range(4)
BLOCK_BYTES = {NONE: 1024, BF16: 512, INT8: 260, INT4: 132}
PULL_SEED = 1
LEAF_BYTES = 16384
VERSION = 3

_counter = itertools.count()
_xxhash = ctypes.CDLL("libxxhash.so.0")
_xxhash.XXH3_64bits_withSeed.restype = ctypes.c_uint64
_xxhash.XXH3_64bits_withSeed.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]


def hash64(data, seed=0):
    return _xxhash.XXH3_64bits_withSeed(bytes(data), len(data), seed)


def leaves(data):
    """The hashes of the 16 KiB leaves of a content, or of a chunk's data (common/content.h)."""
    return b"".join(struct.pack("<Q", hash64(data[at:at + LEAF_BYTES])) for at in range(0, len(data), LEAF_BYTES))


def content_hash(data):
    return hash64(leaves(data) + struct.pack("<Q", len(data)))


# Field lists as in the wire table: (name, struct code), "s" a text, "F" fragments, "T" tensors, "E" entries of the tape.
FIELDS = {
    HELLO: [("role", "B"), ("learner", "i"), ("nonce", "Q"), ("uid", "s"), ("job", "s"), ("trainer", "s"),
            ("shard", "I"), ("step", "Q"), ("tokens", "Q"), ("recover", "B"), ("serve", "s"),
            ("fragments", "F"), ("tensors", "T")],
    WELCOME: [("learner", "I"), ("admission", "Q"), ("epoch", "Q"), ("shard", "I"), ("shards", "I"), ("fragments_total", "I"),
              ("layout", "B"), ("layout_hash", "Q"), ("compression", "B"), ("broadcast_compression", "B"), ("apply", "B"),
              ("apply_alpha", "f"), ("heartbeat_ms", "I"), ("timeout_ms", "I"), ("step", "Q"), ("tokens", "Q"),
              ("token_budget", "Q"), ("learners", "I"), ("pull_within_steps", "I"), ("update_within_steps", "I"),
              ("wait_ms", "I"), ("trace_acked", "Q"), ("fragments", "F")],
    REFUSE: [("code", "H"), ("text", "s")],
    META: [("step", "Q"), ("tokens", "Q"), ("loss", "f"), ("step_ns", "Q"), ("busy_ns", "Q"), ("waited_ns", "Q"),
           ("fragments", "F")],
    PULL: [("round", "Q"), ("fragment", "I"), ("version", "Q"), ("flags", "I"), ("pull_within_steps", "I"),
           ("update_within_steps", "I"), ("wait_ms", "I"), ("trace_acked", "Q")],
    PUSH: [("transfer", "Q"), ("round", "Q"), ("fragment", "I"), ("base_version", "Q"), ("step", "Q"), ("steps", "I"),
           ("tokens", "Q"), ("codec", "B"), ("bytes", "Q"), ("trace", "Q"), ("lease", "Q"), ("cursor", "Q")],
    PUSH_NONE: [("round", "Q"), ("fragment", "I"), ("reason", "B")],
    RESULT: [("round", "Q"), ("fragment", "I"), ("verdict", "B")],
    UPDATE: [("transfer", "Q"), ("fragment", "I"), ("version", "Q"), ("round", "Q"), ("codec", "B"), ("bytes", "Q"),
             ("content_hash", "Q"), ("participants", "I")],
    EVALUATION: [("round", "Q"), ("tokens", "Q"), ("loss", "d"), ("sequences", "I"), ("parameter_hash", "Q")],
    HEARTBEAT: [("sequence", "Q"), ("step", "Q"), ("tokens", "Q")],
    GOODBYE: [("preempted", "B"), ("text", "s")],
    STOP: [("result", "B"), ("text", "s")],
    MARKER: [("id", "Q"), ("step", "Q"), ("tokens", "Q")],
    TRACE: [("position", "Q"), ("nonce", "Q"), ("uid", "s"), ("entries", "E")],
    LEASE_REQUEST: [("last", "Q"), ("batch", "I"), ("want", "B")],
    LEASE: [("lease", "Q"), ("first", "Q"), ("count", "I"), ("revoked", "B")],
    PEERS: [("count", "B")] + [(f"{name}{i}", code) for i in range(4)
                               for name, code in (("learner", "I"), ("nonce", "Q"), ("uid", "s"), ("serve", "s"), ("step_ms", "I"))],
    HELD: [("fragment", "I"), ("version", "Q"), ("content_hash", "Q")],
    RECOVERED: [("learner", "I"), ("nonce", "Q"), ("uid", "s"), ("step", "Q"), ("bytes", "Q"), ("ns", "Q")],
}
ENTRY = [("seq", "Q"), ("step", "Q"), ("fragment", "I"), ("a", "Q"), ("b", "Q"), ("c", "Q"), ("kind", "s"), ("text", "s")]
DEFAULTS = {"recover": 0, "serve": "", "trainer": "", "trace": 0, "lease": 0, "cursor": 0, "trace_acked": 0, "text": "", "fragment": 0xffffffff, "a": 0, "b": 0, "c": 0}


def encode_tensors(tensors):
    """[(name, shape)] or [(name, shape, role)]"""
    out = struct.pack("<BI", 1, len(tensors))
    for entry in tensors:
        name, shape = entry[0].encode(), entry[1]
        role = entry[2] if len(entry) > 2 else 0
        out += struct.pack("<B", len(name)) + name + struct.pack("<BBI", role, len(shape), 0)
        out += b"".join(struct.pack("<Q", extent) for extent in shape)
    return out


def encode_fields(kind, values):
    return encode_list(FIELDS[kind], values)


def encode_list(fields, values):
    out = b""
    for name, code in fields:
        value = values[name] if name in values else DEFAULTS[name]
        if code == "s":
            out += struct.pack("<H", len(value.encode())) + value.encode()
        elif code == "F":
            out += struct.pack("<I", len(value))
            out += b"".join(struct.pack("<IQQIQ", *fragment) for fragment in value)
        elif code == "E":
            out += struct.pack("<I", len(value)) + b"".join(encode_list(ENTRY, entry) for entry in value)
        elif code == "T":
            out += struct.pack("<I", len(value)) + value
        else:
            out += struct.pack("<" + code, value)
    return out


def decode_fields(kind, payload):
    values = {}
    at = 0
    for name, code in FIELDS[kind]:
        if code == "s":
            size = struct.unpack_from("<H", payload, at)[0]
            values[name] = payload[at + 2:at + 2 + size].decode()
            at += 2 + size
        elif code == "F":
            count = struct.unpack_from("<I", payload, at)[0]
            values[name] = [struct.unpack_from("<IQQIQ", payload, at + 4 + 32 * i) for i in range(count)]
            at += 4 + 32 * count
        else:
            values[name] = struct.unpack_from("<" + code, payload, at)[0]
            at += struct.calcsize("<" + code)
    assert at == len(payload), f"{NAMES[kind]}: {len(payload) - at} bytes too many"
    return values


def frame(kind, payload, version=VERSION, magic=b"DLC1", claimed=None, checksum=None):
    """One protocol message; the arguments after `payload` make it a wrong one."""
    head = magic + struct.pack("<BBHII", version, kind, 0, len(payload) if claimed is None else claimed, 0)
    seed = hash64(head)
    if checksum is None:
        checksum = hash64(leaves(payload[16:]), hash64(payload[:16], seed)) if kind == CHUNK else hash64(payload, seed)
    return head + struct.pack("<Q", checksum) + payload


class Denied(Exception):
    def __init__(self, status, text):
        super().__init__(f"{status} {text}")
        self.status = status
        self.text = text


class Closed(Exception):
    def __init__(self, code, reason):
        super().__init__(f"closed {code} {reason}")
        self.code = code
        self.reason = reason


class Client:
    def __init__(self, address, token, path="/v1/connect", subprotocol="diloco.v1", timeout=20, tls=None, receive_buffer=None):
        host, port = address.rsplit(":", 1)
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout)
        self.socket.connect((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        self.timeout = timeout
        self.buffer = b""
        self.transfer = 0
        self.updates = {}
        self.versions = {}
        self._upgrade(host, path, subprotocol, token)

    def _upgrade(self, host, path, subprotocol, token):
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade",
                 "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: " + base64.b64encode(os.urandom(16)).decode()]
        if subprotocol is not None:
            lines.append("Sec-WebSocket-Protocol: " + subprotocol)
        if token is not None:
            lines.append("Authorization: Bearer " + token)
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        while b"\r\n\r\n" not in self.buffer:
            data = self.socket.recv(4096)
            if not data:
                raise Denied(0, "closed without an answer")
            self.buffer += data
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        status = int(head.split()[1])
        if status != 101:
            raise Denied(status, head.decode(errors="replace"))
        if subprotocol is not None:
            assert b"sec-websocket-protocol: " + subprotocol.encode() in head.lower(), head

    # -- WebSocket

    def send_frame(self, data, opcode=2, final=True, mask=b"\0\0\0\0"):
        """A mask of zeros leaves the data as they are, and is as valid as any."""
        head = bytes([(0x80 if final else 0) | opcode])
        if len(data) < 126:
            head += bytes([0x80 | len(data)])
        elif len(data) < 65536:
            head += bytes([0x80 | 126]) + struct.pack(">H", len(data))
        else:
            head += bytes([0x80 | 127]) + struct.pack(">Q", len(data))
        if mask != b"\0\0\0\0":
            stretched = (mask * (len(data) // 4 + 1))[:len(data)]
            data = (int.from_bytes(data, "big") ^ int.from_bytes(stretched, "big")).to_bytes(len(data), "big")
        self.socket.sendall(head + mask + data)

    def _exactly(self, size):
        while len(self.buffer) < size:
            data = self.socket.recv(max(65536, size - len(self.buffer)))
            if not data:
                raise Closed(0, "end of stream")
            self.buffer += data
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def receive_frame(self):
        while True:
            first, second = self._exactly(2)
            size = second & 0x7f
            if size == 126:
                size = struct.unpack(">H", self._exactly(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self._exactly(8))[0]
            data = self._exactly(size)
            opcode = first & 0xf
            if opcode == 8:
                code = struct.unpack(">H", data[:2])[0] if len(data) >= 2 else 0
                try:
                    self.send_frame(data[:2], 8)
                except OSError:
                    pass
                raise Closed(code, data[2:].decode(errors="replace"))
            if opcode == 9:
                self.send_frame(data, 10)
            elif opcode == 2:
                assert first & 0x80, "the syncer sends whole messages"
                return data

    # -- messages

    def send(self, kind, wrong=None, **values):
        self.send_frame(frame(kind, encode_fields(kind, values), **(wrong or {})))

    def receive(self, heartbeats=False):
        """(name, fields); chunks of updates are gathered and come as ("update", fields with `data`)."""
        while True:
            data = self.receive_frame()
            kind, size = data[5], struct.unpack_from("<I", data, 8)[0]
            payload = data[24:]
            assert data[:5] == b"DLC1" + bytes([VERSION]) and size == len(payload)
            if kind == CHUNK:
                assert data == frame(CHUNK, payload), "chunk checksum"
                update = self._chunk(payload)
                if update is not None:
                    return "update", update
                continue
            fields = decode_fields(kind, payload)
            if kind == UPDATE:
                self.updates[fields["transfer"]] = dict(fields, data=b"")
                continue
            if kind != HEARTBEAT or heartbeats:
                return NAMES[kind], fields

    def _chunk(self, payload):
        transfer, offset = struct.unpack_from("<QQ", payload)
        update = self.updates[transfer]
        assert offset == len(update["data"]), "chunks come in order"
        update["data"] += payload[16:]
        if len(update["data"]) < update["bytes"]:
            return None
        del self.updates[transfer]
        assert content_hash(update["data"]) == update["content_hash"], "content hash"
        assert update["version"] > self.versions.get(update["fragment"], 0), "versions only grow"
        self.versions[update["fragment"]] = update["version"]
        return update

    def expect(self, name, seconds=20):
        """Skips to the next message of this name."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            got, fields = self.receive()
            if got == name:
                return fields
        raise TimeoutError(f"no {name} within {seconds} s")

    def hello(self, job, tensors=None, **changes):
        values = dict(role=0, learner=-1, nonce=int.from_bytes(os.urandom(8), "little"), uid=f"test:{os.getpid()}:{next(_counter)}", job=job,
                      shard=0, step=0, tokens=0, fragments=[], tensors=b"" if tensors is None else encode_tensors(tensors))
        wrong = changes.pop("wrong", None)
        values.update(changes)
        self.nonce, self.uid = values["nonce"], values["uid"]
        self.send(HELLO, wrong, **values)

    def join(self, job, tensors, **changes):
        self.hello(job, tensors, **changes)
        name, fields = self.receive()
        if name != "welcome":
            raise Denied(fields.get("code", 0), fields.get("text", name))
        self.welcome = fields
        return fields

    def meta(self, step, tokens, fragments, loss=1.0):
        """fragments: [(index, version, applied_step, c_steps, c_tokens)]"""
        self.send(META, step=step, tokens=tokens, loss=loss, step_ns=10_000_000, busy_ns=step * 10_000_000, waited_ns=0,
                  fragments=fragments)

    def announce(self, pull, data, codec, steps=1, tokens=32, step=1, **changes):
        self.transfer += 1
        values = dict(transfer=self.transfer, round=pull["round"], fragment=pull["fragment"], base_version=pull["version"],
                      step=step, steps=steps, tokens=tokens, codec=codec, bytes=len(data))
        values.update(changes)
        self.send(PUSH, **values)
        return values["transfer"]

    def chunk(self, transfer, offset, data, **wrong):
        self.send_frame(frame(CHUNK, struct.pack("<QQ", transfer, offset) + data, **wrong))

    def push(self, pull, data, codec, **changes):
        transfer = self.announce(pull, data, codec, **changes)
        size = (1 << 20) // BLOCK_BYTES[codec] * BLOCK_BYTES[codec]
        for offset in range(0, len(data), size):
            self.chunk(transfer, offset, data[offset:offset + size])

    def expect_close(self, seconds=20):
        """Reads on until the syncer closes; returns the Closed."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self.receive()
        except Closed as closed:
            return closed
        except OSError as error:
            return Closed(0, str(error))
        raise TimeoutError("the syncer did not close")

    def has_data(self, seconds):
        return bool(self.buffer) or bool(select.select([self.socket], [], [], seconds)[0])

    def goodbye(self, preempted=0, text=""):
        self.send(GOODBYE, preempted=preempted, text=text)

    def close(self):
        self.socket.close()


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


def int8_blocks(values):
    """The int8 codec: blocks of 256, scale = largest magnitude / 127."""
    out = b""
    for at in range(0, len(values), 256):
        block = values[at:at + 256]
        scale = max(abs(v) for v in block) / 127
        out += struct.pack("<f", scale)
        out += bytes((int(math.floor(v / scale + 0.5)) & 0xff) if scale else 0 for v in block)
    return out


def client_tls(ca, cert=None, key=None):
    context = ssl.create_default_context(cafile=str(ca))
    if cert is not None:
        context.load_cert_chain(str(cert), str(key))
    return context


class Learner(Client):
    """A learner that trains nothing: it counts steps, answers pulls with what it is told to, applies updates.

    `delta(fragment)` gives the encoded push; None: the pull stays unanswered, in `pulls`."""

    def __init__(self, address, token, job, tensors, codec=INT8, delta=None, seed=None, **options):
        changes = options.pop("hello", {})
        super().__init__(address, token, **options)
        self.codec = codec
        self.delta = delta
        self.seed = seed
        self.join(job, tensors, **changes)
        self.step_count = changes.get("step", 0)
        self.fragments = [fragment[0] for fragment in self.welcome["fragments"]]
        self.steps = dict.fromkeys(self.fragments, 0)
        self.pulls = []
        self.results = []
        self.values = {}
        self.stop = None
        self.closed = None

    def handle(self, seconds=0.0):
        """Takes what has come, waiting up to `seconds` for the first message."""
        while self.closed is None and self.has_data(seconds):
            seconds = 0.0
            try:
                name, fields = self.receive(heartbeats=True)
            except Closed as closed:
                self.closed = closed
                return
            except OSError as error:
                self.closed = Closed(0, str(error))
                return
            if name == "update":
                self.steps[fields["fragment"]] = 0
                self.values[fields["fragment"]] = fields
            elif name == "pull":
                self.answer(fields)
            elif name == "result":
                self.results.append((fields["round"], fields["fragment"], VERDICTS[fields["verdict"]]))
            elif name == "stop":
                self.stop = fields

    def answer(self, pull):
        if pull["flags"] & PULL_SEED:
            if self.seed is not None:
                self.push(pull, self.seed(pull["fragment"]), NONE)
            else:
                self.pulls.append(pull)
            return
        data = self.delta(pull["fragment"]) if self.delta is not None else None
        if data is None:
            self.pulls.append(pull)
        else:
            self.push_round(pull, data)

    def push_round(self, pull, data, **changes):
        values = dict(steps=max(self.steps[pull["fragment"]], 1), step=max(self.step_count, 1))
        values["tokens"] = 32 * values["steps"]
        values["base_version"] = self.versions.get(pull["fragment"], 0)
        values.update(changes)
        self.push(pull, data, self.codec, **values)

    def train(self):
        """One step: counters, META."""
        self.step_count += 1
        for fragment in self.fragments:
            if self.versions.get(fragment):
                self.steps[fragment] += 1
        self.meta(self.step_count, 32 * self.step_count,
                  [(f, self.versions.get(f, 0), 0, self.steps[f], 32 * self.steps[f]) for f in self.fragments])

    def has_all(self):
        return all(self.versions.get(f, 0) > 0 for f in self.fragments)

    def heartbeat(self):
        self.send(HEARTBEAT, sequence=1, step=self.step_count, tokens=0)


def drive(learners, until, seconds, what, train=True, pause=0.005):
    """Lets all learners step and answer until `until()`; bounded."""
    end = time.monotonic() + seconds
    while not until():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds} s in vain for {what}")
        for learner in learners:
            if learner.closed is not None:
                continue
            learner.handle(pause)
            try:
                if learner.closed is None and learner.has_all() and train:
                    learner.train()
                elif learner.closed is None:
                    learner.heartbeat()
            except OSError as error:
                learner.handle()  # What the syncer said before it closed.
                learner.closed = learner.closed or Closed(0, str(error))
