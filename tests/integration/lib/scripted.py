"""A syncer and scripted learners for the tests of the syncer: two tensors of one size, each a fragment of its own.

A learner's first state is 1.0 in fragment 0 and 2.0 in fragment 1; its pushes are constant deltas."""
import struct
import urllib.error
import urllib.request

import client as c
from client import Client, Learner, drive
from ensemble import check, manifest

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


def http(e, path, method="GET", token=None, headers=()):
    request = urllib.request.Request(f"http://{e.addresses[0]}{path}", method=method, headers=dict(headers))
    if token is not None:
        request.add_header("Authorization", "Bearer " + token)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def expect_refusal(e, expected, text, **hello):
    one = Client(e.addresses[0], e.token)
    options = dict(job=JOB, tensors=tensors())
    options.update(hello)
    one.hello(options.pop("job"), options.pop("tensors"), **options)
    name, fields = one.receive()
    check(name == "refuse" and c.REFUSALS[fields["code"]] == expected, f"{hello}: {name} {fields}")
    check(text in fields["text"], f"{hello}: {fields['text']!r} does not say {text!r}")
    one.expect_close()
