#!/usr/bin/env python3
"""J3 at full size: a joiner takes 1 GiB of state from a peer over a link shaped to 1 Gbit/s. Its first merged push should come within
twice what plain TCP takes for as much; the others' round rate, and a step of the peer that serves, should change by less than 5 %.

    bench_recovery.py --build DIR [--mib 1024] [--rate 1gbit]

Figures go to build/results/durable.json and build/results/recovery.json."""
import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "integration"))
from lib.durable import note_figures  # noqa: E402
from lib.rejoin import measure  # noqa: E402
from lib.shaped import enter  # noqa: E402


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build/release"))
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rate", default="1gbit")
    options = parser.parse_args()
    build = options.build.resolve()
    figures = measure(build, options.mib << 20, options.rate, 15)
    note_figures(build, **figures)
    lines = [{"name": name, "value": figures[key], "unit": "x", "ratio_to": None, "ratio": None} for name, key in (
        ("recovery/first merged push of a joiner, to the transfer time of its state (at most 2)", "rejoin_ratio"),
        ("recovery/the others' round rate meanwhile, to before (at least 0.95)", "others_round_rate_ratio"),
        ("recovery/a step of the learner that serves, to before (at most 1.05)", "serving_step_ratio"))]
    (build.parent / "results" / "recovery.json").write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    enter()
    main()
