#!/usr/bin/env python3
"""tests/bench/collect.py: what it marks as worse, which goals it calls missed, and that a figure never fails it."""
import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import check, main  # noqa: E402

COLLECT = pathlib.Path(__file__).resolve().parent.parent / "bench" / "collect.py"


def figure(name, value, unit, ratio=None):
    return {"name": name, "value": value, "min": value, "max": value, "unit": unit, "ratio": ratio,
            "ratio_to": None if ratio is None else "yardstick"}


class Bench:
    """A folder of results, and a baseline beside it."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.baseline = self.folder / "base" / "baseline.json"
        self.baseline.parent.mkdir()

    def collect(self, figures, *arguments):
        (self.folder / "some.json").write_text(json.dumps(figures))
        (self.folder / "durable.json").write_text('{"notes": "of tests, not of a bench"}')
        done = subprocess.run([sys.executable, COLLECT, self.folder, "--baseline", self.baseline, *arguments], capture_output=True,
                              text=True, timeout=30, check=False)
        check(done.returncode == 0, f"exit code {done.returncode}: {done.stderr}")
        compared = done.stdout.split("goals:")[0].splitlines()
        return {line.split()[0]: line for line in compared if line.strip()}, done.stdout


OLD = [figure("push_cpu", 0.4, "CPU s/GB", 1.0), figure("merge_mean_1t", 30, "ms", 0.9), figure("memory_read_1t", 30, "GB/s"),
       figure("syncer_binary_mb", 2, "MB"), figure("round_f32", 500, "ms", 1.2)]
NEW = [figure("push_cpu", 0.1, "CPU s/GB", 1.31), figure("merge_mean_1t", 30, "ms", 0.7), figure("memory_read_1t", 20, "GB/s"),
       figure("syncer_binary_mb", 1, "MB"), figure("round_f32", 900, "ms", 1.25)]
WORSE = {"push_cpu": True, "merge_mean_1t": True, "memory_read_1t": True, "syncer_binary_mb": False, "round_f32": False}


def test_worse_and_missed(build):
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        bench.collect(OLD, "--write")
        lines, text = bench.collect(NEW)
        for name, worse in WORSE.items():
            check(("WORSE" in lines[name]) == worse, f"{name}: {lines[name]}")
        missed = text.split("goals:")[1]
        check("push_cpu " in missed and "merge_mean_1t" in missed, "missed goals are not named")
        check("round_f32 " not in missed.split("without a figure")[0], "a goal that is met is called missed")
        check("start_seconds" in missed.split("without a figure")[1], "a missing figure is not named")
        kept = {e["name"]: e for e in json.loads((bench.folder / "bench.json").read_text())}
        check(set(kept) == set(WORSE) and kept["push_cpu"]["ratio"] == 1.31, f"bench.json: {kept}")


def test_another_machine_compares_ratios_only(build):
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        bench.collect(OLD, "--write")
        baseline = json.loads(bench.baseline.read_text())
        baseline["machine"]["cpu"] = "another one"
        bench.baseline.write_text(json.dumps(baseline))
        lines, text = bench.collect(NEW)
        check("memory_read_1t" not in lines, "an absolute figure was compared with another machine's")
        check("WORSE" in lines["push_cpu"] and "only ratios" in text, text)


def test_without_a_baseline_and_with_a_document(build):
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        document = bench.folder / "text.md"
        document.write_text("before\n<!-- figures: make bench-baseline -->\nold\n<!-- end of figures -->\nafter\n")
        _, text = bench.collect(OLD)
        check("now/baseline" not in text and "goals:" in text, "there is nothing to compare with")
        bench.collect(OLD, "--write", "--document", document)
        written = document.read_text()
        check(written.startswith("before\n") and written.endswith("after\n") and "old" not in written, written)
        check("| `push_cpu` | 0.4 CPU s/GB | 1 | ≤ 1.3 |" in written and "| `fairness_64` | not measured |" in written, written)


if __name__ == "__main__":
    main([test_worse_and_missed, test_another_machine_compares_ratios_only, test_without_a_baseline_and_with_a_document])
