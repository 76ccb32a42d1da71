#!/usr/bin/env python3
"""The custom resource against the real API server: it accepts and refuses what `diloco check` accepts and refuses, names the
field, fills in the same defaults, and freezes only what may not change (K7, K8).

    test_schema.py [--build build/release]      with KUBECONFIG set and kubectl in PATH
    bench/plane.py -- tests/cluster/test_schema.py      the same without a cluster

Three parts: a table of manifests by `kubectl apply --dry-run=server`, as a person would; every field of the schema at, inside and
beyond its bounds and with values of other types, by the API itself; and changes of a job that exists."""
import argparse
import copy
import http.client
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
GROUP = "diloco.dev/v1alpha1"
CRD = ROOT / "crds" / "decoupleddilocojobs.yaml"
SPACE = "diloco-schema-test"

HEAD = "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: a}\n"
LEAST = HEAD + "spec:\n  training: {tokenBudget: 1000000, data: {paths: [/x.txt]}}\n"

ACCEPTED = {
    "least": LEAST,
    "defaults said": LEAST + "  suspend: false\n  sync: {fragments: 24, interval: 24}\n",
    "null is absent": LEAST + "  suspend: null\n  sync: {interval: null}\n  syncer: null\n",
    "no data": HEAD + "spec: {training: {tokenBudget: 1}}\n",
    "quoted numbers": LEAST + '  sync: {grace: {margin: "0.7"}, outerOptimizer: {learningRate: "0.7", momentum: "0.9"}}\n',
    "exponents": LEAST.replace(", data:", ", innerOptimizer: {epsilon: 1e-9, learningRate: 2.5e-3}, data:"),
    "quorum of all": LEAST + '  sync: {quorum: "100%"}\n',
    "quorum as a count": LEAST + "  sync: {quorum: 16}\n",
    "no learner wanted": LEAST + "  learners: {min: 0, replicas: 0}\n",
    "replicas at max": LEAST + "  learners: {max: 3, replicas: 3}\n",
    "sum over pools": LEAST + "  learners: {min: 5, pools: [{name: a, replicas: 2}, {name: b, replicas: 3}]}\n",
    "template of a pool": LEAST + "  learners: {pools: [{name: a, replicas: 1, template: {spec: {any: [thing]}}}]}\n",
    "no overlap": LEAST + "  sync: {interval: 1, overlap: 0, warmup: {steps: 0}}\n",
    "warm-up by the run's length": LEAST + "  sync: {warmup: {steps: -1}}\n",
    "synchronous": LEAST + '  sync: {mode: synchronous, interval: 1, overlap: 0, quorum: "100%"}\n',
    "as many shards as fragments": LEAST + "  sync: {fragments: 2}\n  syncer: {shards: 2}\n",
    "last port": LEAST + "  syncer: {port: 65534, shards: 2}\n",
    "half a unit": LEAST + "  syncer: {storage: {size: 0.5Ti}}\n",
    "longest name": LEAST.replace("name: a}", f"name: {'a' * 45}}}"),
}

# What is refused, and what the refusals of both must name.
REFUSED = {
    "no budget": (HEAD + "spec: {training: {data: {paths: [x]}}}\n", "tokenBudget"),
    "no training": (HEAD + "spec: {suspend: true}\n", "training"),
    "no spec": (HEAD, "spec"),
    "unknown field": (LEAST + "  sync: {intervall: 3}\n", "spec.sync.intervall"),
    "unknown branch": (LEAST + "  sink: {a: 1}\n", "spec.sink"),
    "unknown field of a pool": (LEAST + "  learners: {pools: [{name: a, size: 3}]}\n", "pools[0].size"),
    "scalar for mapping": (LEAST + "  sync: 3\n", "spec.sync"),
    "mapping for scalar": (LEAST + "  sync: {interval: {a: 1}}\n", "spec.sync.interval"),
    "word for number": (LEAST + "  sync: {interval: many}\n", "spec.sync.interval"),
    "quoted integer": (LEAST + '  sync: {interval: "3"}\n', "spec.sync.interval"),
    "fraction": (LEAST + "  sync: {interval: 2.5}\n", "spec.sync.interval"),
    "too small": (LEAST + "  sync: {interval: 0}\n", "spec.sync.interval"),
    "negative": (LEAST + "  sync: {fragments: -1}\n", "spec.sync.fragments"),
    "too many fragments": (LEAST + "  sync: {fragments: 513}\n", "spec.sync.fragments"),
    "rate beyond": (LEAST + "  sync: {outerOptimizer: {learningRate: 11}}\n", "spec.sync.outerOptimizer.learningRate"),
    "quoted beyond": (LEAST + '  sync: {grace: {margin: "1.5"}}\n', "spec.sync.grace.margin"),
    "quoted below": (LEAST + '  sync: {merge: {normLimit: "0.9"}}\n', "spec.sync.merge.normLimit"),
    "quoted word": (LEAST + '  sync: {grace: {margin: "half"}}\n', "spec.sync.grace.margin"),
    "quoted nothing": (LEAST + '  sync: {grace: {margin: ""}}\n', "spec.sync.grace.margin"),
    "quoted seconds": (LEAST + '  sync: {timeoutSeconds: "15"}\n', "spec.sync.timeoutSeconds"),
    "codec": (LEAST + "  sync: {compression: int2}\n", "spec.sync.compression"),
    "broadcast codec": (LEAST + "  sync: {broadcastCompression: int8}\n", "spec.sync.broadcastCompression"),
    "yes for true": (LEAST + '  suspend: "yes"\n', "spec.suspend"),
    "quorum 101%": (LEAST + '  sync: {quorum: "101%"}\n', "spec.sync.quorum"),
    "quorum 0%": (LEAST + '  sync: {quorum: "0%"}\n', "spec.sync.quorum"),
    "quorum 0": (LEAST + "  sync: {quorum: 0}\n", "spec.sync.quorum"),
    "quorum quoted": (LEAST + '  sync: {quorum: "3"}\n', "spec.sync.quorum"),
    "quorum beyond max": (LEAST + "  sync: {quorum: 5}\n  learners: {max: 4}\n", "sync.quorum"),
    "warm-up quorum beyond max": (LEAST + "  sync: {warmup: {quorum: 5}}\n  learners: {max: 4}\n", "sync.warmup.quorum"),
    "min beyond replicas": (LEAST + "  learners: {min: 3, replicas: 2}\n", "min"),
    "replicas beyond max": (LEAST + "  learners: {max: 3, replicas: 4}\n", "replicas"),
    "pools beyond max": (LEAST + "  learners: {max: 3, pools: [{name: a, replicas: 2}, {name: b, replicas: 2}]}\n", "replicas"),
    "two pools of one name": (LEAST + "  learners: {pools: [{name: a, replicas: 1}, {name: a, replicas: 1}]}\n", "pools[1]"),
    "pool without name": (LEAST + "  learners: {pools: [{replicas: 1}]}\n", "pools[0]"),
    "pool's name": (LEAST + "  learners: {pools: [{name: A_b}]}\n", "pools[0].name"),
    "17 pools": (LEAST + "  learners: {pools: [" + ", ".join(f"{{name: p{i}}}" for i in range(17)) + "]}\n", "pools"),
    "overlap at interval": (LEAST + "  sync: {interval: 4, overlap: 4}\n", "overlap"),
    "warm-up steps below -1": (LEAST + "  sync: {warmup: {steps: -2}}\n", "spec.sync.warmup.steps"),
    "warm-up beyond interval": (LEAST + "  sync: {interval: 1, overlap: 0, warmup: {interval: 2}}\n", "warmup.interval"),
    "heartbeat against timeout": (LEAST + "  sync: {heartbeatSeconds: 5, timeoutSeconds: 10}\n", "timeoutSeconds"),
    "heartbeat beyond": (LEAST + "  sync: {heartbeatSeconds: 21, timeoutSeconds: 60}\n", "spec.sync.heartbeatSeconds"),
    "rebase with alpha": (LEAST + "  sync: {apply: rebase, applyAlpha: 0.5}\n", "applyAlpha"),
    "shards beyond fragments": (LEAST + "  sync: {fragments: 2}\n  syncer: {shards: 3}\n", "shards"),
    "ports beyond": (LEAST + "  syncer: {port: 65535, shards: 2}\n", "port"),
    "storage": (LEAST + "  syncer: {storage: {size: 20 GB}}\n", "spec.syncer.storage.size"),
    "heads and width": (LEAST.replace(", data:", ", model: {width: 100, heads: 3}, data:"), "width"),
    "odd head": (LEAST.replace(", data:", ", model: {width: 36, heads: 4}, data:"), "model"),
    "kv heads": (LEAST.replace(", data:", ", model: {heads: 4, kvHeads: 3}, data:"), "heads"),
    "bytes in a small vocabulary": (LEAST.replace("{paths: [/x.txt]}", "{paths: [/x.txt], format: text}, model: {vocabSize: 100}"),
                                    "vocabSize"),
    "path is a number": (LEAST.replace("/x.txt", "7"), "data.paths"),
    "path is empty": (LEAST.replace("/x.txt", '""'), "data.paths"),
    "name of 46": (LEAST.replace("name: a}", f"name: {'a' * 46}}}"), "name"),
    "name with a dot": (LEAST.replace("name: a}", "name: a.b}"), "name"),
    "name that begins with a digit": (LEAST.replace("name: a}", "name: 1a}"), "name"),
    "no name": (LEAST.replace("metadata: {name: a}", "metadata: {}"), "name"),
}

# A change of a job that exists: what is merged into its spec, and the field that the refusal names (None: accepted).
CHANGES = [
    ("replicas", {"learners": {"replicas": 3}}, None),
    ("learners' bounds", {"learners": {"min": 2, "max": 8}}, None),
    ("token budget", {"training": {"tokenBudget": 5000000}}, None),
    ("batch", {"training": {"batchSequences": 4}}, None),
    ("inner rate", {"training": {"innerOptimizer": {"learningRate": 0.002}}}, None),
    ("outer rate", {"sync": {"outerOptimizer": {"learningRate": "0.5"}}}, None),
    ("quorum", {"sync": {"quorum": "50%"}}, None),
    ("grace", {"sync": {"grace": {"margin": 0.2}}}, None),
    ("time limits", {"sync": {"timeoutSeconds": 30}, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 5}, None),
    ("resume", {"suspend": False}, None),
    ("scheduling while suspended", {"learners": {"pools": [{"name": "a", "replicas": 2, "template": {
        "spec": {"nodeSelector": {"zone": "b"}, "tolerations": [{"operator": "Exists"}]}}}]}}, None),
    ("syncer's scheduling while suspended", {"syncer": {"template": {"spec": {"nodeSelector": {"zone": "b"}}}}}, None),
    ("width", {"training": {"model": {"width": 256}}}, "spec.training.model"),
    ("rope", {"training": {"model": {"ropeTheta": 20000}}}, "spec.training.model"),
    ("seed", {"training": {"seed": 2}}, "spec.training.seed"),
    ("fragments", {"sync": {"fragments": 12}}, "spec.sync.fragments"),
    ("layout", {"sync": {"layout": "layer"}}, "spec.sync.layout"),
    ("interval", {"sync": {"interval": 48}}, "spec.sync.interval"),
    ("overlap", {"sync": {"overlap": 3}}, "spec.sync.overlap"),
    ("warm-up", {"sync": {"warmup": {"steps": 10}}}, "spec.sync.warmup"),
    ("mode", {"sync": {"mode": "synchronous"}}, "spec.sync.mode"),
    ("merge", {"sync": {"merge": {"method": "mean"}}}, "spec.sync.merge.method"),
    ("outer optimiser", {"sync": {"outerOptimizer": {"type": "nesterov"}}}, "spec.sync.outerOptimizer.type"),
    ("compression", {"sync": {"compression": "int4"}}, "spec.sync.compression"),
    ("compression to its default", {"sync": {"compression": None}}, None),
    ("apply", {"sync": {"apply": "rebase"}}, "spec.sync.apply"),
    ("shards", {"syncer": {"shards": 2}}, "spec.syncer.shards"),
]


def kubectl(*arguments, text=None):
    """Exit code, and both outputs."""
    done = subprocess.run(["kubectl", "--request-timeout=30s", *arguments], input=text, text=True, capture_output=True, check=False,
                          timeout=60)
    return done.returncode, done.stdout, done.stderr


def must(*arguments, text=None):
    code, out, errors = kubectl(*arguments, text=text)
    if code != 0:
        raise AssertionError(f"kubectl {' '.join(arguments)}: {errors.strip()}")
    return out


class Api:
    """Requests by way of `kubectl proxy`, which knows the credentials."""

    def __init__(self):
        self.proxy = subprocess.Popen(["kubectl", "proxy", "--port=0"], stdout=subprocess.PIPE, text=True)
        line = self.proxy.stdout.readline()
        self.port = int(re.search(r":(\d+)\s*$", line).group(1))
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def close(self):
        self.connection.close()
        self.proxy.terminate()
        self.proxy.wait(10)

    def request(self, method, path, body=None, kind="application/json"):
        self.connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": kind})
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")

    def jobs(self, name="", query=""):
        return f"/apis/{GROUP}/namespaces/{SPACE}/decoupleddilocojobs{'/' + name if name else ''}{query}"


class Checker:
    def __init__(self, build, folder):
        self.diloco, self.file = build / "bin" / "diloco", pathlib.Path(folder) / "job.yaml"
        self.faults, self.accepted, self.refused = [], 0, 0

    def check(self, text):
        """Whether `diloco check` takes it, and what it says."""
        self.file.write_text(text, encoding="utf-8")
        done = subprocess.run([self.diloco, "check", "--cluster", self.file], text=True, capture_output=True, check=False, timeout=30)
        if done.returncode not in (0, 2):
            raise AssertionError(f"diloco check ended with {done.returncode}: {done.stderr}")
        return done.returncode == 0, done.stderr

    def expect(self, name, wanted, field, takes, says, server_takes, server_says):
        """`wanted` None: whatever, but both the same."""
        self.accepted += server_takes
        self.refused += not server_takes
        if takes != server_takes or (wanted is not None and takes != wanted):
            self.faults.append(f"{name}: diloco check {'accepts' if takes else 'refuses'}, the API server "
                               f"{'accepts' if server_takes else 'refuses'} it\n    {says.strip()}\n    {server_says.strip()}")
        elif not takes and field:
            for who, text in (("diloco check", says), ("the API server", server_says)):
                if field not in text:
                    self.faults.append(f"{name}: {who} does not name {field}: {text.strip()}")


def table(checker):
    for name, text in ACCEPTED.items():
        code, _, errors = kubectl("apply", "--dry-run=server", "-n", SPACE, "-f", "-", text=text)
        checker.expect(name, True, None, *checker.check(text), code == 0, errors)
    for name, (text, field) in REFUSED.items():
        code, _, errors = kubectl("apply", "--dry-run=server", "-n", SPACE, "-f", "-", text=text)
        checker.expect(name, False, field, *checker.check(text), code == 0, errors)
    samples = sorted((ROOT / "crds" / "samples").glob("*.yaml"))
    if len(samples) < 13:
        checker.faults.append(f"only {len(samples)} samples found")
    for sample in samples:
        code, _, errors = kubectl("apply", "--dry-run=server", "-n", SPACE, "-f", str(sample))
        checker.expect(sample.name, True, None, *checker.check(sample.read_text(encoding="utf-8")), code == 0, errors)


def leaves(schema, path=()):
    """Every field of a schema with its path; items of a list stand under 0."""
    if "properties" in schema:
        for key, below in schema["properties"].items():
            yield from leaves(below, path + (key,))
    elif schema.get("type") == "array" and "properties" in schema.get("items", {}):
        yield from leaves(schema["items"], path + (0,))
        yield path, schema
    else:
        yield path, schema


def values(schema):
    """Values at, inside and beyond the bounds of a field, and of other types."""
    tried = [True, "", "x", "0x10", " 1", -1, 0, 1, 2.5, 1e30, {}, {"a": 1}, [], [1], ["x"], None, "null", "true", "1e3", "50%"]
    for bound in (schema.get("minimum"), schema.get("maximum")):
        if bound is not None:
            tried += [bound, bound - 1, bound + 1, str(bound), bound * 0.5, bound * 1.5, bound * 2, repr(bound * 1.001),
                      f"{bound * 0.999:.12f}", f"{bound:.12f}"]
    tried += schema.get("enum", [])
    if "default" in schema:
        tried.append(schema["default"])
    return [int(v) if isinstance(v, float) and v.is_integer() and abs(v) < 1e18 else v for v in tried]


def put(job, path, value):
    """`value` at `path` of a copy of `job`, making what lies between."""
    job = copy.deepcopy(job)
    place = job["spec"]
    for key, following in zip(path, path[1:] + (None,)):
        if following is None:
            place[key] = value
        elif key == 0:
            place = place[0]
        else:
            place = place.setdefault(key, [{"name": "a", "replicas": 1}] if following == 0 else {})
    return job


def every_field(checker, api):
    definition = json.loads(must("get", "crd", "decoupleddilocojobs.diloco.dev", "-o", "json"))
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    least = {"apiVersion": GROUP, "kind": "DecoupledDiLoCoJob", "metadata": {"name": "a"},
             "spec": {"training": {"tokenBudget": 1000000, "data": {"paths": ["/x.txt"]}}}}
    fields = 0
    for path, schema in leaves(spec):
        fields += 1
        for value in values(schema):
            job = put(least, path, value)
            status, answer = api.request("POST", api.jobs(query="?dryRun=All&fieldValidation=Strict"), job)
            if status not in (201, 400, 422):
                raise AssertionError(f"{path} = {value!r}: {status} {answer}")
            name = f"{'.'.join(map(str, path))} = {json.dumps(value)}"
            checker.expect(name, None, None, *checker.check(json.dumps(job)), status == 201, answer.get("message", ""))
    if fields < 80:
        checker.faults.append(f"only {fields} fields found")
    return fields


def merge(into, patch):
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    into = dict(into) if isinstance(into, dict) else {}
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        else:
            into[key] = merge(into.get(key), value)
    return into


def changes(checker, api):
    job = {"apiVersion": GROUP, "kind": "DecoupledDiLoCoJob", "metadata": {"name": "kept"},
           "spec": {"suspend": True, "training": {"tokenBudget": 1000000, "data": {"paths": ["/x.txt"]}},
                    "learners": {"max": 6, "pools": [{"name": "a", "replicas": 2}]}}}
    status, made = api.request("POST", api.jobs(), job)
    if status != 201:
        raise AssertionError(f"cannot make a job: {made}")
    # Defaults are the parser's.
    if made["spec"]["sync"]["interval"] != 24 or made["spec"]["syncer"]["storage"]["size"] != "20Gi":
        checker.faults.append(f"defaults are not filled in: {made['spec']}")
    if "replicas" in made["spec"]["learners"]:
        checker.faults.append("learners.replicas has a default, which would hide the sum over the pools")
    for name, patch, field in CHANGES:
        status, answer = api.request("PATCH", api.jobs("kept", "?dryRun=All&fieldValidation=Strict"), {"spec": patch},
                                     "application/merge-patch+json")
        says = answer.get("message", "")
        if field is None and status != 200:
            checker.faults.append(f"change of {name} is refused: {says}")
        elif field is not None and (status != 422 or field not in says or "fixed once the job exists" not in says):
            checker.faults.append(f"change of {name}: {status}, should name {field}: {says}")
    return made


def columns(checker, api, made):
    """K7: the status as the operator writes it, its columns, and the scale subresource."""
    written = {"phase": "Running", "observedGeneration": made["metadata"]["generation"], "message": "Training",
               "selector": "diloco.dev/job=kept,diloco.dev/role=learner",
               "learners": {"desired": 2, "running": 2, "connected": 2, "pools": [{"name": "a", "desired": 2, "running": 2}]},
               "syncer": {"readyShards": 1, "step": 120, "loss": "2.31", "goodput": "0.97", "quorum": "2/1"},
               "conditions": [{"type": "Ready", "status": "True", "reason": "Training", "message": "",
                               "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}]}
    merge_patch = "application/merge-patch+json"
    status, answer = api.request("PATCH", api.jobs("kept/status"), {"status": written}, merge_patch)
    if status != 200 or answer["status"] != written:
        checker.faults.append(f"the status is not kept as written: {status} {answer.get('message')} {answer.get('status')}")
    for name, wrong in {"phase": {"phase": "Sleeping"}, "condition without reason": {"conditions": [{"type": "Ready"}]},
                        "two conditions of one type": {"conditions": written["conditions"] * 2}}.items():
        status, answer = api.request("PATCH", api.jobs("kept/status", "?dryRun=All"), {"status": wrong}, merge_patch)
        if status != 422:
            checker.faults.append(f"status with a wrong {name} is taken: {status}")
    lines = must("get", "ddj", "-n", SPACE).splitlines()
    if lines[0].split() != ["NAME", "PHASE", "LEARNERS", "QUORUM", "STEP", "LOSS", "GOODPUT", "AGE"] or \
            lines[1].split()[:7] != ["kept", "Running", "2", "2/1", "120", "2.31", "0.97"]:
        checker.faults.append(f"kubectl get ddj prints {lines}")
    if "kept" not in must("get", "diloco", "-n", SPACE):
        checker.faults.append("category diloco does not list the job")
    must("scale", "ddj/kept", "-n", SPACE, "--replicas=4")
    scale = json.loads(must("get", "--raw", api.jobs("kept/scale")))
    if scale["spec"]["replicas"] != 4 or scale["status"] != {"replicas": 2, "selector": written["selector"]}:
        checker.faults.append(f"scale subresource: {scale}")
    code, _, errors = kubectl("scale", "ddj/kept", "-n", SPACE, "--replicas=7")
    if code == 0 or "learners.max" not in errors:
        checker.faults.append(f"scaled beyond max: {errors}")


def built():
    """The build whose programs are the newest."""
    programs = sorted(ROOT.glob("build/*/bin/diloco"), key=lambda path: path.stat().st_mtime)
    return programs[-1].parents[1] if programs else ROOT / "build" / "release"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--build", type=pathlib.Path, default=built())
    build = options.parse_args().build
    is_there = kubectl("get", "crd", "decoupleddilocojobs.diloco.dev")[0] == 0  # Of a chart that is installed; it stays.
    if not is_there:
        must("apply", "--server-side", "-f", str(CRD))
    for what in ("jsonpath={.status.acceptedNames.kind}=DecoupledDiLoCoJob", "condition=Established"):
        must("wait", f"--for={what}", "--timeout=30s", "crd/decoupleddilocojobs.diloco.dev")  # At first there are no conditions.
    conditions = json.loads(must("get", "crd", "decoupleddilocojobs.diloco.dev", "-o", "json"))["status"]["conditions"]
    structural = [c for c in conditions if c["type"] == "NonStructuralSchema" and c["status"] == "True"]
    kubectl("create", "namespace", SPACE)
    api = Api()
    try:
        with tempfile.TemporaryDirectory() as folder:
            checker = Checker(build, folder)
            checker.faults += [f"schema is not structural: {c['message']}" for c in structural]
            table(checker)
            fields = every_field(checker, api)
            columns(checker, api, changes(checker, api))
    finally:
        api.request("DELETE", api.jobs("kept"))
        api.close()
        kubectl("delete", "namespace", SPACE, "--wait=false")
        if not is_there:
            kubectl("delete", "crd", "decoupleddilocojobs.diloco.dev", "--timeout=60s")
    for fault in checker.faults:
        print(fault)
    if checker.accepted < 300 or checker.refused < 300:
        checker.faults.append("too few manifests were tried")
    print(f"schema: {fields} fields, {checker.accepted} manifests accepted and {checker.refused} refused by both, "
          f"{len(CHANGES)} changes, {len(checker.faults)} faults")
    return 1 if checker.faults else 0


if __name__ == "__main__":
    sys.exit(main())
