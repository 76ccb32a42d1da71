#!/usr/bin/env python3
"""`diloco run` and its companions with real processes: finish, kills, stops, scaling, bad input, what is shown."""
import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib import ensemble  # noqa: E402
from lib.ensemble import TEXT, Failure, check, corpus, main, manifest  # noqa: E402

PACED = ["--learner-arg", "--step-seconds", "--learner-arg", "0.02"]  # So that a run lasts long enough to be disturbed.
ENDLESS = {"training": {"tokenBudget": 10**12}}


def wait(condition, seconds, what):
    """Unfinished files count as not yet, too."""
    return ensemble.wait(condition, seconds, what, every=0.02, also=(Failure, IndexError))


class Run:
    """A `diloco run` in a folder of its own."""

    def __init__(self, build, job, arguments=(), bin_dir=None):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="diloco-run-"))
        self.diloco = str(pathlib.Path(build).resolve() / "bin" / "diloco")
        corpus(self.folder / TEXT)
        (self.folder / "job.json").write_text(json.dumps(job))
        self.dir = self.folder / "run"
        self.output = self.folder / "output"
        self.command = [self.diloco, "run", "job.json", "--dir", "run", *arguments]
        if bin_dir:
            self.command += ["--bin-dir", str(bin_dir)]
        self.process = None

    def __enter__(self):
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(self.command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        return self

    def __exit__(self, kind, value, trace):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if kind is not None:
            print(self.text()[-3000:])
            for log in sorted(self.dir.glob("logs/*.log")):
                print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]))
            sys.stdout.flush()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def text(self):
        return self.output.read_text(errors="replace")

    def ask(self, *arguments, code=0):
        done = subprocess.run([self.diloco, *arguments], cwd=self.folder, capture_output=True, text=True, errors="replace",
                              timeout=20, check=False)  # A young model's text need not be UTF-8.
        check(done.returncode == code, f"{arguments}: exit code {done.returncode}, expected {code}: {done.stderr}")
        return done.stdout if code == 0 else done.stderr

    def status(self):
        return json.loads(self.ask("status", "run", "--json"))

    def learners(self):
        return {entry["learner"]: entry for entry in self.status()["run"]["learners"]}

    def training(self, count, seconds=30):
        """Waits until `count` learners train, and returns them."""
        def condition():
            found = self.learners()
            return found if sum(e["state"] == "training" for e in found.values()) == count else None
        return wait(condition, seconds, f"{count} training learners")

    def events(self):
        return [json.loads(line) for line in (self.dir / "events.jsonl").read_text().splitlines()]

    def has_event(self, text, who=None):
        return any(text in e["text"] and who in (None, e["who"]) for e in self.events())

    def report(self):
        return json.loads((self.dir / "report.json").read_text())

    def pids(self):
        """Processes whose command line names this run's folder, the supervisor aside."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if str(self.dir).encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
        return found

    def exit(self, seconds, code=0):
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failure(f"diloco run still runs after {seconds} s") from None
        check(self.process.returncode == code, f"diloco run ended with {self.process.returncode}, expected {code}")
        check(not self.pids(), f"processes are left: {self.pids()}")


def test_runs_to_the_end_and_reports(build):
    """U1: one command, a whole ensemble, progress."""
    job = manifest(TEXT, training={"tokenBudget": 60000}, learners={"replicas": 3, "max": 4})
    arguments = ["--results", "results.json", "--sample", "The word "]
    with Run(build, job, arguments) as run:
        run.exit(90)
        report = run.report()
        check(report["phase"] == "Succeeded" and report["reason"] == "Completed", f"{report['phase']} {report['reason']}")
        check(report["tokens"] >= 60000, f"only {report['tokens']} tokens")
        check(report["status"]["round"] > 0, "no round was merged")
        check(report["validationLossLast"] < report["validationLossFirst"], "the validation loss did not fall")
        check([e["learner"] for e in report["learners"]] == [0, 1, 2], "not three learners in the report")
        check(all(e["starts"] == 1 and e["steps"] > 0 for e in report["learners"]), "a learner was restarted or idle")
        for name in ("final/model.safetensors", "final/config.json", "report.md", "validation.svg", "status.json", "job.json"):
            check((run.dir / name).stat().st_size > 0, f"{name} is empty")
        check((run.dir / "token").stat().st_mode & 0o777 == 0o600, "others may read the token")
        results = {e["name"]: e for e in json.loads((run.folder / "results.json").read_text())}
        for name in ("val_loss_first", "val_loss_last", "wall_seconds", "tokens_per_second", "rounds"):
            check(results[name]["value"] > 0, f"result {name} is {results[name]}")
        check("sample:" in run.text() and f"report: {run.dir}/report.md" in run.text(), "sample or report path not printed")
        check(xml.etree.ElementTree.parse(run.dir / "validation.svg").getroot().tag.endswith("svg"), "no SVG")
        check(run.status()["run"]["over"], "status does not say that the run is over")
        joined = [e["seconds"] for e in run.events() if e["event"] == "joined"]
        print(f"learners joined {min(joined):.2f} to {max(joined):.2f} s after the start of the run")


def test_first_step_comes_soon(build):
    with Run(build, manifest(TEXT, **ENDLESS), PACED) as run:
        start = time.monotonic()
        wait(lambda: any(e["step"] > 0 for e in run.learners().values()), 30, "the first step")
        elapsed = time.monotonic() - start
        launched = max(e["seconds"] for e in run.events() if e["event"] == "started")
        print(f"all processes started after {launched:.2f} s, first step seen {elapsed:.2f} s after the start of diloco run")
        # The supervisor's own share is far below a second; the rest is the learner's, and the load's of the machine.
        check(launched < 1.5, f"the last process was started only after {launched:.2f} s")
        check(elapsed < 15, f"the first step took {elapsed:.2f} s")


def test_deadline_ends_the_job(build):
    job = manifest(TEXT, activeDeadlineSeconds=3, **ENDLESS)
    with Run(build, job, PACED) as run:
        run.exit(40, code=4)
        report = run.report()
        check(report["phase"] == "Failed" and report["reason"] in ("DeadlineExceeded", "TimedOut"), f"{report['reason']}")
        check(2.5 < report["wallSeconds"] < 30, f"ended after {report['wallSeconds']} s")
        check(report["tokens"] > 0, "nothing was trained before the deadline")


def test_killed_learner_is_replaced_alone(build):
    with Run(build, manifest(TEXT, learners={"replicas": 3}, **ENDLESS), PACED) as run:
        before = run.training(3)
        check("SIGKILL sent to learner-1" in run.ask("kill", "run", "learner", "1"), "the kill was not confirmed")
        wait(lambda: run.learners()[1]["incarnation"] == 2, 20, "the replacement of learner 1")
        after = run.training(3)
        for other in (0, 2):
            check(after[other]["pid"] == before[other]["pid"], f"learner {other} was restarted, too")
            check(after[other]["step"] > before[other]["step"], f"learner {other} made no step meanwhile")
        # J3: it went on with the state of one that had stayed.
        wait(lambda: run.has_event("took over the state of learner", "learner-1"), 20, "the event that says so")
        run.process.send_signal(signal.SIGINT)
        run.exit(40)
        tally = {e["learner"]: e for e in run.report()["learners"]}
        check(tally[1]["starts"] == 2 and tally[1]["disruptions"] == 1 and tally[1]["crashes"] == 0, f"tally {tally[1]}")


def test_nothing_outlives_a_killed_supervisor(build):
    with Run(build, manifest(TEXT, **ENDLESS), PACED) as run:
        run.training(2)
        children = run.pids()
        check(len(children) == 4, f"expected a syncer, two learners, an evaluator: {children}")
        run.process.kill()
        run.process.wait(5)
        wait(lambda: not run.pids(), 5, "the end of all processes")


def test_interrupt_ends_in_order(build):
    with Run(build, manifest(TEXT, **ENDLESS), PACED) as run:
        run.training(2)
        wait(lambda: run.status()["round"] > 3, 30, "some rounds")
        start = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        run.exit(30)
        print(f"ended {time.monotonic() - start:.2f} s after SIGINT")
        report = run.report()
        check((report["phase"], report["reason"]) == ("Stopped", "StopRequested"), f"{report['phase']} {report['reason']}")
        check((run.dir / "final/model.safetensors").exists(), "the weights were not exported")
        ends = [e["text"] for e in run.events() if e["event"] == "exited"]
        check(ends and all(text.startswith("ended (") for text in ends), f"not everyone ended by itself: {ends}")


def test_output_that_nobody_reads_ends_the_run(build):
    """As `diloco run job.yaml | head` does; and under nohup the end of a terminal is no reason to stop."""
    with Run(build, manifest(TEXT, **ENDLESS), PACED) as run:
        run.training(2)
        piped = [run.diloco, "run", "job.json", "--dir", "piped", *PACED]
        with subprocess.Popen(piped, cwd=run.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
            check("run folder" in other.stdout.readline(), "no first line")
            other.stdout.close()
            check(other.wait(60) == 0, f"exit code {other.returncode}: {other.stderr.read()}")
        report = json.loads((run.folder / "piped/report.json").read_text())
        check((report["phase"], report["reason"]) == ("Stopped", "StopRequested"), f"{report['phase']} {report['reason']}")
        command = ["nohup", run.diloco, "run", "job.json", "--dir", "hup", *PACED]
        with subprocess.Popen(command, cwd=run.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as other:
            wait(lambda: json.loads(run.ask("status", "hup", "--json"))["round"] > 0, 30, "rounds")
            other.send_signal(signal.SIGHUP)
            at = json.loads(run.ask("status", "hup", "--json"))["round"]
            wait(lambda: json.loads(run.ask("status", "hup", "--json"))["round"] > at + 4, 30, "rounds after SIGHUP")
            other.send_signal(signal.SIGTERM)
            check(other.wait(60) == 0, f"exit code {other.returncode}")


def test_second_interrupt_kills_at_once(build):
    with Run(build, manifest(TEXT, **ENDLESS), PACED) as run:
        learners = run.training(2)
        os.kill(learners[0]["pid"], signal.SIGSTOP)  # It will not react to anything but SIGKILL.
        run.process.send_signal(signal.SIGINT)
        wait(lambda: run.has_event("once more kills"), 10, "the first interrupt")
        run.process.send_signal(signal.SIGINT)
        run.exit(5, code=1)


def test_stuck_learner_does_not_hold_up_the_stop(build):
    with Run(build, manifest(TEXT, sync={"finishSeconds": 1}, **ENDLESS), PACED) as run:
        learners = run.training(2)
        os.kill(learners[1]["pid"], signal.SIGSTOP)
        start = time.monotonic()
        run.ask("stop", "run")
        run.exit(45)
        print(f"ended {time.monotonic() - start:.1f} s after the request although a learner was stuck")


def test_scale_up_and_down(build):
    with Run(build, manifest(TEXT, learners={"replicas": 2, "max": 4}, **ENDLESS), PACED) as run:
        before = run.training(2)
        run.ask("scale", "run", "4")
        during = run.training(4)
        check(all(during[n]["pid"] == before[n]["pid"] for n in before), "learners were restarted by scaling up")
        check(during[3]["step"] < during[0]["step"], "a late learner is ahead of the first")
        run.ask("scale", "run", "1")
        wait(lambda: len(run.learners()) == 1, 30, "one learner")
        (kept, entry), = run.training(1).items()
        check(entry["pid"] == during[kept]["pid"], "the learner that stayed was restarted")
        check("0 to 4 learners" in run.ask("scale", "run", "5", code=2), "no word about the maximum")
        check("scale to" in run.ask("scale", "run", "many", code=2), "no word about what is expected")
        check("no learner 9 runs" in run.ask("kill", "run", "learner", "9", code=2), "no word about learner 9")
        check(run.has_event("asked to stop (ScaleDown)"), "nobody was asked to leave")


def test_killed_syncer_comes_back_on_its_port(build):
    """J5: learners outlive the syncer."""
    job = manifest(TEXT, training={"tokenBudget": 150000}, syncer={"shards": 2})
    with Run(build, job, PACED) as run:
        before = run.training(2)
        wait(lambda: run.status()["round"] > 3, 30, "some rounds")
        port = (run.dir / "ports/shard-1").read_text()
        round_before = run.status()["round"]
        run.ask("kill", "run", "syncer", "1")
        wait(lambda: run.has_event("started again", "syncer-1"), 20, "the restart of shard 1")
        again = wait((run.dir / "ports/shard-1").read_text, 20, "the port file of the restarted shard")
        check(again == port, f"the shard came back on {again}, not on {port}")
        wait(lambda: run.status()["round"] > round_before and run.status()["phase"] == "Training", 30, "rounds after the restart")
        after = run.learners()
        check(all(after[n]["pid"] == before[n]["pid"] for n in before), "learners were restarted, too")
        run.exit(90)
        check(run.report()["phase"] == "Succeeded", "the run did not succeed")


def test_chaos_on_schedule_is_measured(build):
    job = manifest(TEXT, training={"tokenBudget": 160000}, learners={"replicas": 3, "max": 4})
    with Run(build, job, [*PACED, "--chaos", "kill@30%:2,join@70%", "--results", "results.json"]) as run:
        run.exit(120)
        report = run.report()
        check(len(report["kills"]) == 1 and report["kills"][0]["learner"] == 2, f"kills: {report['kills']}")
        kill = report["kills"][0]
        check(kill["learnersCompared"] == 2, f"compared: {kill}")
        # Paced learners on a machine that may be busy: a stall would show as a third or less.
        check(kill["ratio"] > 0.6, f"the other learners slowed down to {kill['ratio']}")
        check(kill["replacedAfterSeconds"] < 10, f"replaced after {kill['replacedAfterSeconds']} s")
        results = {e["name"]: e["value"] for e in json.loads((run.folder / "results.json").read_text())}
        check(abs(results["kill_step_rate_ratio"] - kill["ratio"]) < 1e-6, "results and report differ")
        tally = {e["learner"]: e for e in report["learners"]}
        check(tally[2]["starts"] == 2 and 3 in tally, f"tally {tally}")
        print(f"the other learners' step rate after the kill: {kill['ratio']:.3f} of before")


def test_status_and_top(build):
    with Run(build, manifest(TEXT, **ENDLESS), PACED) as run:
        run.training(2)
        wait(lambda: "validation" in run.status(), 30, "a validation loss")
        text = run.ask("status", "run")
        for word in ("Training", "learners 2/2", "tokens/s", "validation loss", "training"):
            check(word in text, f"'{word}' is not in:\n{text}")
        url = "http://" + (run.dir / "ports/shard-0").read_text().strip()
        check("learners 2/2" in run.ask("status", url), "status of a URL")
        check(json.loads(run.ask("status", url, "--json"))["connected"] == 2, "status of a URL as JSON")
        check("no syncer answers" in run.ask("status", "http://127.0.0.1:1", code=1), "status of nobody")
        top = subprocess.Popen([run.diloco, "top", "run"], cwd=run.folder, stdout=subprocess.PIPE, text=True)
        check("learners 2/2" in top.stdout.readline(), "top shows nothing")
        run.process.send_signal(signal.SIGINT)
        run.exit(40)
        top.communicate(timeout=10)
        check(top.returncode == 0, f"top ended with {top.returncode}")
        check("Stopped" in run.ask("status", "run"), "status after the end")


def bad_input(build, job, arguments=(), bin_dir=None, prepare=None):
    """Runs something that must be refused: exit code 2, no run folder, nothing started. Returns what it said."""
    run = Run(build, job, arguments, bin_dir)
    try:
        if prepare:
            prepare(run)
        done = subprocess.run(run.command, cwd=run.folder, capture_output=True, text=True, timeout=20, check=False)
        check(done.returncode == 2, f"exit code {done.returncode}: {done.stdout}{done.stderr}")
        check("started" not in done.stdout, "something was started")
        return done.stderr, run
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)


def test_bad_inputs_are_refused_before_anything_starts(build):
    """U2: what, where, what to do."""
    import socket
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen(1)
    port = taken.getsockname()[1]
    empty = tempfile.mkdtemp(prefix="diloco-empty-")

    def malformed(run):
        (run.folder / "job.json").write_text("spec: {training: [")

    def full(run):
        run.dir.mkdir()
        (run.dir / "precious").write_text("x")

    rows = [
        ("malformed YAML", manifest(TEXT), [], None, malformed, "job.json"),
        ("quorum above max", manifest(TEXT, sync={"quorum": 5}, learners={"max": 4}), [], None, None, "quorum"),
        ("missing data", manifest("nowhere.txt"), [], None, None, "nowhere.txt"),
        ("no data", manifest(TEXT, training={"data": {"paths": []}}), [], None, None, "training.data.paths is empty"),
        ("empty data", manifest("/dev/null"), [], None, None, "/dev/null"),
        ("too large a model", manifest(TEXT, training={"model": {"width": 65536, "layers": 512, "heads": 64}}), [], None, None,
         "memory"),
        ("port in use", manifest(TEXT, syncer={"port": port}), [], None, None, str(port)),
        ("folder taken", manifest(TEXT), [], None, full, "is not empty"),
        ("folder without a parent", manifest(TEXT), ["--dir", "nowhere/run"], None, None, "nowhere/run"),
        ("folder not writable", manifest(TEXT), ["--dir", "/proc/run"], None, None, "/proc/run"),
        ("no programs", manifest(TEXT), [], empty, None, "diloco-syncer is missing"),
        ("suspended", manifest(TEXT, suspend=True), [], None, None, "suspend"),
        ("chaos of an unknown kind", manifest(TEXT), ["--chaos", "burn@5%"], None, None, "burn@5%"),
        ("chaos without a budget", manifest(TEXT, training={"tokenBudget": 0}), ["--chaos", "kill@5%"], None, None, "udget"),
        ("results nowhere", manifest(TEXT), ["--results", "nowhere/r.json"], None, None, "nowhere/r.json"),
        ("unknown option", manifest(TEXT), ["--frobnicate"], None, None, "frobnicate"),
        ("unknown log level", manifest(TEXT), ["--log-level", "loud"], None, None, "loud"),
        ("unknown field", manifest(TEXT, sync={"quorun": 1}), [], None, None, "quorun"),
    ]
    try:
        for name, job, arguments, bin_dir, prepare, expected in rows:
            said, run = bad_input(build, job, arguments, bin_dir, prepare)
            check(expected in said, f"{name}: '{expected}' is not in: {said}")
            check(len(said.strip().splitlines()) <= 6, f"{name}: says too much: {said}")
    finally:
        taken.close()
        shutil.rmtree(empty)


def stand_in(build, folder, condition):
    """A folder of programs whose worker does `condition` (shell) before it becomes the real one."""
    programs = pathlib.Path(build).resolve() / "bin"
    (folder / "diloco-syncer").symlink_to(programs / "diloco-syncer")
    worker = folder / "diloco-worker"
    worker.write_text(f'#!/bin/sh\n{condition}\nexec "{programs}/diloco-worker" "$@"\n')
    worker.chmod(0o755)
    return folder


@contextlib.contextmanager
def programs_with(build, condition):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="diloco-bin-"))
    try:
        yield stand_in(build, folder, condition)
    finally:
        shutil.rmtree(folder)


def test_learners_that_cannot_work_fail_the_job(build):
    broken = '[ "$1" = learn ] && { echo "t error j l the reason" >&2; exit 2; }'
    with programs_with(build, broken) as programs, Run(build, manifest(TEXT, **ENDLESS), [], programs) as run:
        run.exit(20, code=2)
        check("BadInput" in run.text() and "the reason" in run.text(), "the reason is not shown")
        check(all(e["starts"] == 1 for e in run.report()["learners"]), "a learner was tried again")


def test_crashing_learner_is_given_up_and_the_others_go_on(build):
    crashing = '[ "$1" = learn ] && case "$*" in *"--learner 1 "*) exit 1;; esac'
    job = manifest(TEXT, training={"tokenBudget": 130000})  # At 50 steps a second: 20 s.
    with programs_with(build, crashing) as programs, Run(build, job, PACED, programs) as run:
        wait(lambda: sum("exit code 1" in e["text"] for e in run.events()) >= 3, 30, "three crashes of learner 1")
        times = [e["seconds"] for e in run.events() if e["event"] == "started" and e["who"] == "learner-1"]
        gaps = [b - a for a, b in zip(times, times[1:])]
        check(len(gaps) >= 2 and gaps[1] > gaps[0] > 0.4, f"no growing backoff: {gaps}")
        wait(lambda: run.learners()[0]["state"] == "training", 30, "the other learner's training")
        wait(lambda: run.learners()[1]["state"] == "waiting", 10, "learner 1 being shown as waiting")
        wait(lambda: run.learners()[1]["state"] == "given up", 40, "the end of learner 1's budget")
        check(run.has_event("will not be started again (CrashLoop)", "learner-1"), "no word about giving up")
        check(run.learners()[0]["incarnation"] == 1, "the other learner was restarted")
        run.exit(90)
        check(run.report()["phase"] == "Succeeded", "one crashing learner failed the job")


def test_view_on_a_terminal_follows_resizes_and_leaves_nothing_behind(build):
    run = Run(build, manifest(TEXT, **ENDLESS), PACED)
    environment = {**os.environ, "TERM": "xterm", "LANG": "C.UTF-8"}
    environment.pop("NO_COLOR", None)
    environment.pop("LC_ALL", None)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(run.folder)
        os.execve(run.command[0], run.command, environment)
    output = bytearray()

    def read_until(text, seconds=30):
        end = time.monotonic() + seconds
        os.set_blocking(terminal, False)
        while text.encode() not in output[read_until.seen:]:
            check(time.monotonic() < end, f"'{text}' does not appear: {bytes(output[-2000:])!r}")
            try:
                output.extend(os.read(terminal, 65536))
            except BlockingIOError:
                time.sleep(0.02)
        read_until.seen = len(output)
    read_until.seen = 0
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        read_until("Training")
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 40, 0, 0))
        read_until("\x1b[2J")
        read_until("learner")
        os.kill(pid, signal.SIGINT)
        read_until("report: ")
    finally:
        with contextlib.suppress(ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(run.folder, ignore_errors=True)
    text = output.decode(errors="replace")
    check(text.count("\x1b[?25l") == text.count("\x1b[?25h") > 5, "the cursor was left hidden")
    check("\x1b[?1049" not in text, "the alternate screen was used")
    check("\x1b[32m" in text, "no colours on a terminal")
    narrow = text[text.rindex("\x1b[?2026h"):text.rindex("\x1b[?2026l")]
    widths = [len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip("\r")) for line in narrow.split("\n")]
    check(max(widths) <= 40 and len(widths) <= 10, f"the last frame does not fit 40x10: {widths}")


if __name__ == "__main__":
    main([test_runs_to_the_end_and_reports, test_first_step_comes_soon, test_deadline_ends_the_job, test_killed_learner_is_replaced_alone,
          test_nothing_outlives_a_killed_supervisor, test_interrupt_ends_in_order, test_output_that_nobody_reads_ends_the_run,
          test_second_interrupt_kills_at_once,
          test_stuck_learner_does_not_hold_up_the_stop, test_scale_up_and_down, test_killed_syncer_comes_back_on_its_port,
          test_chaos_on_schedule_is_measured, test_status_and_top, test_bad_inputs_are_refused_before_anything_starts,
          test_learners_that_cannot_work_fail_the_job, test_crashing_learner_is_given_up_and_the_others_go_on,
          test_view_on_a_terminal_follows_resizes_and_leaves_nothing_behind])
