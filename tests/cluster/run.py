#!/usr/bin/env python3
"""Runs the cluster tests: run.py --build build/san-address [TEST...]

Without KUBECONFIG: brings a cluster up on this machine (root), imports the images of BUILD/images, and takes it down again, also
when it is interrupted or killed. With KUBECONFIG: uses that cluster, whose nodes must be able to pull DILOCO_IMAGE_PREFIX/
diloco-operator:DILOCO_IMAGE_TAG and the two others; what stops nodes or gives them capacity is then left out. A cluster that was
brought up by hand (cluster.py up) is used and stays.

A test is a program that exits 0 only when what it claims held. After the tests the logs of every container that ran are searched
for reports of sanitizers. Closes with "cluster: N passed, N failed". TEST_TRIES=2 tries a failed test once more and says so.
"""
import argparse
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import cluster, nodes  # noqa: E402
from lib.settings import HERE, KUBECONFIG, ROOT, STATE, fail, say, tools  # noqa: E402

TEST_SECONDS = int(os.environ.get("CLUSTER_TEST_SECONDS", "600"))
IMAGES = ("diloco-operator", "diloco-syncer", "diloco-worker")
REPORT = re.compile(r"ERROR: (?:Address|Leak|Thread)Sanitizer|runtime error: |AddressSanitizer:DEADLYSIGNAL")


def run_test(test, log_dir, environment):
    """Whether it held; its output goes to a log of its own and is shown when it did not."""
    log = log_dir / f"{test.stem}.log"
    for attempt in range(int(os.environ.get("TEST_TRIES", "1"))):
        started = time.monotonic()
        with open(log, "w", encoding="utf-8") as out:
            process = subprocess.Popen([sys.executable, test, "--build", log_dir.parents[1]], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       env=environment, start_new_session=True)
            try:
                code = process.wait(TEST_SECONDS)
            except subprocess.TimeoutExpired:
                code = f"no end within {TEST_SECONDS} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        took = time.monotonic() - started
        if code == 0 and lines:
            flaky = "  FLAKY: failed at first, see above" if attempt else ""
            print(f"  ok   {test.stem:<28} {took:6.1f} s  {lines[-1]}{flaky}", flush=True)
            return True
        print(f"  FAIL {test.stem} ({took:.1f} s, {code}; log: {log})")
        print("\n".join(lines[-250:]), flush=True)
    return False


def search_logs(log_dir, whole):
    """No container that ran has reported a fault of memory; after a `whole` run there were logs of all three programs to look at."""
    logs = sorted((STATE / "kept-logs").glob("*.log"))
    kept = log_dir / "containers"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    reports = []
    for log in logs:
        text = log.read_text(encoding="utf-8", errors="replace")
        shutil.copyfile(log, kept / log.name)
        for match in REPORT.finditer(text):
            reports.append(f"{log.name}: {text[match.start():match.start() + 200].splitlines()[0]}")
    containers = [log.name.rsplit("_", 2)[1] for log in logs]
    counts = {name: containers.count(name) for name in ("operator", "syncer", "learner")}
    for report in reports:
        print(f"  sanitizer: {report}")
    seen = ", ".join(f"{number} of {name}s" for name, number in counts.items())
    print(f"  logs of {len(logs)} containers ({seen}) searched: {len(reports)} reports of sanitizers", flush=True)
    return not reports and (all(counts.values()) or not whole)


def run_all(tests, build, log_dir, own, environment):
    """How many tests passed and failed; the cluster that they needed is up in between only."""
    started_here = False
    passed = failed = 0
    try:
        if own:
            archives = [build / "images" / f"{name}.tar" for name in IMAGES]
            missing = [str(archive) for archive in archives if not archive.exists()]
            if missing:
                fail(f"no {', '.join(missing)}; run make images first")
            started_here = cluster.up(owner=None if cluster.is_up() else os.getpid())
            for archive in archives:
                nodes.import_image(archive)
            environment.update(KUBECONFIG=str(KUBECONFIG), DILOCO_CLUSTER_OWN="1")
        environment["PATH"] = f"{tools()}:{environment['PATH']}"
        for test in tests:
            if run_test(test, log_dir, environment):
                passed += 1
            else:
                failed += 1
        if own:
            if search_logs(log_dir, len(tests) > 5):
                passed += 1
            else:
                failed += 1
    finally:
        if started_here:
            shutil.copytree(STATE / "logs", log_dir / "daemons", dirs_exist_ok=True)
            say("taking the cluster down")
            if cluster.down():
                passed += 1  # Nothing is left behind: processes, mounts, namespaces, links, chains, cgroups.
            else:
                failed += 1
    return passed, failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("tests", nargs="*")
    args = parser.parse_args()
    build = pathlib.Path(args.build).resolve()
    tests = [pathlib.Path(test).resolve() for test in args.tests] or sorted(HERE.glob("test_*.py"))
    log_dir = build / "log" / "cluster"
    log_dir.mkdir(parents=True, exist_ok=True)
    own = not os.environ.get("KUBECONFIG")
    # Checks of leaks are the unit tests' matter; here they would double the time of the many short `diloco check`.
    environment = {"ASAN_OPTIONS": "detect_leaks=0", **os.environ}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    subprocess.run([HERE / "build_tools.sh"], check=True)
    with cluster.tests_locked() if own else contextlib.nullcontext():
        passed, failed = run_all(tests, build, log_dir, own, environment)
    print(f"cluster: {passed} passed, {failed} failed")
    sys.exit(0 if failed == 0 and passed > 0 else 1)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
