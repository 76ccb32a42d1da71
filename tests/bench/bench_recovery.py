#!/usr/bin/env python3
"""J3 at full size: a joiner takes 1 GiB of state from a peer over a link shaped to 1 Gbit/s, several times in one run, with windows
between in which nobody joins. Its first merged push should come within twice what plain TCP takes for as much; the others' round
rate, and a step of the peer that serves, should change by less than 5 %.

    bench_recovery.py --build DIR [--mib 1024] [--rate 1gbit] [--cycles 4] [--window 25]

Figures go to build/results/durable.json and build/results/recovery.json. What tells what:
    others_round_rate_ratio   by the commits' times. The joiner, which a cluster has on another machine, runs at the lowest priority;
                              with _shared (every second time) it competes with the others for this machine's processors.
    serving_step_ratio        a step of the peer by the clock, without its rest: with all that others take of its processor.
    serving_step_cpu_ratio    the same by processor time of the trainer's thread: what serving makes the step itself do (the
                              snapshot's copy, colder caches). Holds on a busy machine, too.
    serving_cpu_share         what the serving thread takes of one core, beside the step.
    beside_step_ratio         a step of the learner that serves nobody, by the clock: what sharing the machine does alone.
    strangers_cpu_share       cores taken by what is not of this measurement. Above 0.1, figures by the clock are worth little."""
import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "integration"))
from lib.durable import note_figures  # noqa: E402
from lib.rejoin import measure  # noqa: E402
from lib.shaped import enter  # noqa: E402

LINES = (
    ("recovery_first_push", "rejoin_ratio", "x", "transfer_of_state"),  # At most 2.
    ("recovery_others_rate", "others_round_rate_ratio", "of before", "round_rate_before"),  # At least 0.95.
    ("recovery_others_rate_shared", "others_round_rate_ratio_shared", "of before", "round_rate_before"),
    ("recovery_serving_step", "serving_step_ratio", "x", "step_before"),  # At most 1.05.
    ("recovery_serving_step_cpu", "serving_step_cpu_ratio", "x", "step_before"),  # At most 1.05.
    ("recovery_beside_step", "beside_step_ratio", "x", "step_before"),
    ("recovery_serving_thread", "serving_cpu_share", "cores", "core"),
    ("recovery_strangers", "strangers_cpu_share", "cores", "core"),
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build/release"))
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--window", type=float, default=25)
    options = parser.parse_args()
    build = options.build.resolve()
    figures = measure(build, options.mib << 20, options.rate, options.window, options.cycles)
    note_figures(build, **figures)
    lines = [{"name": name, "value": figures[key], "unit": unit, "ratio_to": yardstick, "ratio": figures[key]}
             for name, key, unit, yardstick in LINES if key in figures]
    for line in lines:
        print(f"{line['name']:32} {line['value']:.3f} {line['unit']} ({line['ratio_to']})")
    (build.parent / "results" / "recovery.json").write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    enter()
    main()
