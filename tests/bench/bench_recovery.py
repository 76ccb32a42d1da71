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
    lines = [{"name": name, "value": figures[key], "unit": unit, "ratio_to": yardstick, "ratio": figures[key]}
             for name, key, unit, yardstick in (
                 ("recovery_first_push", "rejoin_ratio", "x", "transfer_of_state"),  # At most 2.
                 ("recovery_others_rate", "others_round_rate_ratio", "of before", "round_rate_before"),  # At least 0.95.
                 ("recovery_serving_step", "serving_step_ratio", "x", "step_before"))]  # At most 1.05.
    for line in lines:
        print(f"{line['name']:28} {line['value']:.3f} {line['unit']} ({line['ratio_to']})")
    (build.parent / "results" / "recovery.json").write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    enter()
    main()
