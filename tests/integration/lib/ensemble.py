"""Real syncer and worker processes on loopback, for integration tests. Standard library only.

    with Ensemble(build, manifest(...)) as e:
        e.start_syncers()
        e.start_learner(0)
        e.wait(lambda: e.status()["round"] > 10, 60, "ten rounds")

Every wait is bounded; leaving the block ends all processes. A failed wait raises with the tails of all logs.
"""
import http.client
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request


def corpus(path, kilobytes=400, seed=1):
    """Writes English-like text that a small model learns quickly: words of a fixed list in a seeded order."""
    words = ("the learner sends a fragment and the syncer merges what came within the grace window so that nobody waits "
             "for a machine that is not there because capacity comes and goes").split()
    state = seed
    size = 0
    with open(path, "w", encoding="ascii") as out:
        while size < kilobytes * 1024:
            sentence = []
            for _ in range(12):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                sentence.append(words[(state >> 33) % len(words)])
            line = " ".join(sentence).capitalize() + ".\n"
            out.write(line)
            size += len(line)
    return path


TEXT = "text.txt"  # The name under which every ensemble's folder holds a corpus.


def wait(condition, seconds, what, every=0.05, also=()):
    """Polls until `condition()` is true and returns its value; raises after `seconds`. Refused connections and missing keys
    count as not yet, and so do the exceptions in `also`."""
    end = time.monotonic() + seconds
    last = None
    while time.monotonic() < end:
        try:
            last = condition()
            if last:
                return last
        except (OSError, KeyError, TypeError, ValueError, *also) as error:
            last = error
        time.sleep(every)
    raise Failure(f"waited {seconds} s in vain for {what} (last: {last!r})")


def merge(base, changes):
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
    return base


def manifest(data, name="test", **spec):
    """A job that runs a tiny model; keyword arguments override parts of `spec`, deeply."""
    job = {
        "apiVersion": "diloco.dev/v1alpha1", "kind": "DecoupledDiLoCoJob", "metadata": {"name": name},
        "spec": {
            "training": {
                "tokenBudget": 400000, "seed": 1, "batchSequences": 4, "threads": 1, "evaluationSeconds": 1,
                "model": {"width": 32, "layers": 2, "heads": 2, "sequenceLength": 32},
                "data": {"paths": [str(data)], "validationSequences": 16},
                "innerOptimizer": {"learningRate": 0.004, "warmupSteps": 20},
            },
            "sync": {"fragments": 4, "interval": 8, "overlap": 1, "warmup": {"steps": 0}, "quorum": 1,
                     "heartbeatSeconds": 0.5, "timeoutSeconds": 3, "finishSeconds": 10},
            "syncer": {"shards": 1},
            "learners": {"min": 1, "max": 16, "replicas": 2},
        },
    }
    merge(job["spec"], spec)
    return job


class Failure(AssertionError):
    pass


class Ensemble:
    def __init__(self, build, job, keep=False, text=True):
        self.bin = pathlib.Path(build).resolve() / "bin"
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="diloco-test-"))
        self.keep = keep
        self.job = job
        if text:
            corpus(self.folder / TEXT)
        self.job_file = self.folder / "job.json"
        self.job_file.write_text(json.dumps(job))
        self.token = "token-of-the-test"
        self.token_file = self.folder / "token"
        self.token_file.write_text(self.token)
        self.shards = job["spec"]["syncer"]["shards"]
        self.addresses = [None] * self.shards
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes.values():
            process.wait(10)
        if kind is not None:
            self.print_logs()
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def print_logs(self, lines=25):
        for log in sorted(self.folder.glob("*.log")):
            print(f"--- {log.name}")
            print("\n".join(log.read_text(errors="replace").splitlines()[-lines:]))
        sys.stdout.flush()

    # -- processes

    def start(self, name, arguments):
        log = open(self.folder / f"{name}.log", "ab")
        with log:
            process = subprocess.Popen([str(a) for a in arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes[name] = process
        return process

    def start_syncer(self, shard=0, listen=None, timeout=15, extra=()):
        """Starts shard `shard`; started again after its end it gets the same port."""
        port_file = self.folder / f"port-{shard}"
        if listen is None:
            listen = self.addresses[shard] or "127.0.0.1:0"
        port_file.unlink(missing_ok=True)
        state = self.folder / f"state-{shard}"
        state.mkdir(exist_ok=True)
        process = self.start(f"syncer-{shard}", [
            self.bin / "diloco-syncer", "--job", self.job_file, "--shard", shard, "--listen", listen, "--token-file",
            self.token_file, "--state-dir", state, "--port-file", port_file, *extra])
        self.wait(lambda: port_file.exists() or process.poll() is not None, timeout, f"port of syncer {shard}")
        if process.poll() is not None:
            raise Failure(f"syncer {shard} ended with {process.returncode}")
        self.addresses[shard] = port_file.read_text().strip()
        return process

    def start_syncers(self):
        for shard in range(self.shards):
            self.start_syncer(shard)

    def endpoints(self, addresses=None):
        return ",".join(f"ws://{address}" for address in addresses or self.addresses)

    def start_learner(self, learner, endpoints=None, uid=None, extra=(), prefix=()):
        return self.start(f"learner-{learner}", [
            *prefix, self.bin / "diloco-worker", "learn", "--job", self.job_file, "--endpoints",
            endpoints or self.endpoints(), "--token-file", self.token_file, "--learner", learner, "--uid",
            uid or f"uid-{learner}-{time.monotonic_ns()}", *extra])

    def start_evaluator(self, export=None, extra=()):
        return self.start("evaluator", [
            self.bin / "diloco-worker", "evaluate", "--job", self.job_file, "--endpoints", self.endpoints(),
            "--token-file", self.token_file, "--export", export or self.folder / "final", *extra])

    def signal(self, name, number):
        self.processes[name].send_signal(number)

    def post(self, path, shard=0, timeout=10):
        request = urllib.request.Request(f"http://{self.addresses[shard]}{path}", method="POST", data=b"",
                                         headers={"Authorization": "Bearer " + self.token})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read().decode()

    def stop_job(self):
        for shard in range(self.shards):
            self.post("/stop", shard)

    # -- what is

    def get(self, path, shard=0, timeout=5):
        try:
            with urllib.request.urlopen(f"http://{self.addresses[shard]}{path}", timeout=timeout) as answer:
                return answer.read().decode()
        except http.client.HTTPException as error:  # A process that ends cuts its answer short.
            raise OSError(f"{path}: {error!r}") from error

    def status(self, shard=0):
        return json.loads(self.get("/status", shard))

    def learner(self, number, shard=0):
        """Status of the learner's newest incarnation, or None."""
        found = [entry for entry in self.status(shard)["learners"] if entry["learner"] == number]
        return max(found, key=lambda entry: entry["admission"]) if found else None

    def metrics(self, shard=0):
        """{'name{labels}': value}"""
        values = {}
        for line in self.get("/metrics", shard).splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values

    @staticmethod
    def wait(condition, seconds, what, every=0.05):
        return wait(condition, seconds, what, every)

    def wait_exit(self, name, seconds, code=0):
        process = self.processes[name]
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failure(f"{name} still runs after {seconds} s") from None
        if code is not None and process.returncode != code:
            raise Failure(f"{name} ended with {process.returncode}, expected {code}")
        return process.returncode

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")


def check(condition, what):
    if not condition:
        raise Failure(what)


def main(tests):
    """Runs the tests named on the command line (default: all): PROGRAM --build DIR [NAME...]."""
    arguments = sys.argv[1:]
    build = "build/release"
    if "--build" in arguments:
        at = arguments.index("--build")
        build = arguments[at + 1]
        del arguments[at:at + 2]
    passed = failed = 0
    for test in tests:
        name = test.__name__
        if arguments and name not in arguments:
            continue
        start = time.monotonic()
        try:
            test(build)
            passed += 1
            print(f"ok   {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except (Failure, OSError, KeyError, TypeError, ValueError, subprocess.SubprocessError) as error:
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)
    program = os.path.basename(sys.argv[0]).removesuffix(".py")
    print(f"{program}: {passed} passed, {failed} failed")
    sys.exit(0 if failed == 0 and passed > 0 else 1)
