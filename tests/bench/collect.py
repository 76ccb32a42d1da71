#!/usr/bin/env python3
"""After the benchmarks: one file of all figures, the goals that are met, missed or without a figure, and what has changed.

    collect.py FOLDER [--baseline FILE] [--write] [--only NAME...] [--document FILE]

FOLDER holds one JSON file a benchmark; bench.json is made of them. --baseline compares with the figures stored there: ratios with
ratios, since they hold on any machine, and absolute figures only where the processor is the same. --write stores this run as the
baseline instead, and puts its table between the marks in --document. Never fails because of a figure."""
import argparse
import datetime
import json
import os
import pathlib
import platform
import sys

WORSE = 1.2  # Marked from here on.
MARK = "<!-- figures: make bench-baseline -->"
MARK_END = "<!-- end of figures -->"

# Every named figure and its goal, the only place where they stand: a bound for its ratio, and what the ratio is.
GOALS = {}


def goals(names, sense, bound, what):
    for name in names.split():
        GOALS[name] = (sense, bound, what)


goals("push_cpu broadcast_cpu", "<=", 1.3, "CPU s per GB of a learner's network thread, to that of one end of plain TCP")
goals("push_cpu_tls broadcast_cpu_tls", "<=", 1.3, "the same over TLS 1.3, to plain TLS's")
goals("round_f32", "<=", 1.3, "a round of 8 learners x 100 MB, to plain TCP that moves the same bytes")
goals("round_int4", "<=", 0.45, "int4 pushes and bf16 broadcasts, to round_f32")
goals("round_f32_gloo", "<=", 1.3, "round_f32 to Gloo's all-reduce of 8 x 100 MB")
goals("round_int4_gloo", "<=", 1.0, "round_int4 to the same")
goals("round_f32_by_hand", "<=", 1.3, "round_f32 to the same work written by hand over plain TCP: deltas, mean, outer step, copies")
goals("round_f32_gloo_outer", "<=", 1.0, "round_f32 to DiLoCo's outer step in PyTorch: deltas, Gloo's all-reduce, SGD, copies")
goals("round_int4_gloo_outer", "<=", 0.6, "round_int4 to the same")
goals("merge_mean_1t merge_mean_2t merge_rda_1t merge_rda_2t", ">=", 0.85, "bytes a second of the merge, to reading memory")
for _size in ("1m", "10m", "50m"):
    for _threads in ("1t", "2t"):
        goals(f"trainer_{_size}_{_threads}", ">=", 1.2, "tokens a second, to PyTorch eager")
        goals(f"trainer_{_size}_{_threads}_compiled", ">=", 1.0, "tokens a second, to torch.compile")
goals("commit_f32", "<=", 0.05, "8 x 100 MB, what a round takes longer for being durable, to the whole round")
goals("fairness_64", ">=", 0.8, "64 learners x 10 MB: the slowest one's share of updates, to the mean")
goals("control_p99_ms_64", "<=", 1.0, "99th percentile of a request to the syncer meanwhile, to 100 ms")
goals("recovery_first_push", "<=", 2.0, "1 GiB over 1 Gbit/s: a joiner's first merged push, to the transfer of its state")
goals("recovery_others_rate", ">=", 0.95, "the others' round rate meanwhile, to before and after")
goals("recovery_serving_step recovery_serving_step_cpu", "<=", 1.05, "a step of the learner that serves, by the clock and by processor time")
goals("start_seconds", "<=", 1.0, "`diloco run` of the demo's job to the first inner step, to 1 s")
goals("syncer_idle_mb", "<=", 1.0, "memory of a syncer with nobody connected, to 16 MB")

# Of figures without a goal: more is better.
RATES = ("GB/s", "tokens/s", "1/s", "of ", "GFLOP/s")


def machine():
    model = platform.processor() or platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cpu": model, "cores": len(os.sched_getaffinity(0))}


def is_figure(entry):
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("value"), (int, float))


def read_figures(folder):
    """{figure: entry} and {figure: benchmark}; files that are not of a benchmark are passed by."""
    figures, origin = {}, {}
    for path in sorted(folder.glob("*.json")):
        if path.name in ("bench.json", "demo.json", "experiment.json"):
            continue
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            print(f"{path}: no JSON, left out")
            continue
        if isinstance(entries, list):
            for entry in filter(is_figure, entries):
                figures[entry["name"]] = entry
                origin[entry["name"]] = path.stem
    return figures, origin


def wants_more(entry):
    goal = GOALS.get(entry["name"])
    return goal[0] == ">=" if goal else entry["unit"].startswith(RATES)


def judge_goals(figures):
    missed, missing = [], []
    for name, (sense, bound, what) in GOALS.items():
        ratio = figures.get(name, {}).get("ratio")
        if ratio is None:
            missing.append(name)
        elif not (ratio >= bound if sense == ">=" else ratio <= bound):
            missed.append(f"  {name:28} {ratio:8.3g}, goal {sense} {bound:g}: {what}")
    met = len(GOALS) - len(missed) - len(missing)
    print(f"\ngoals: {met} of {len(GOALS)} met" + ("; missed:" if missed else ""))
    print(*missed, sep="\n", end="\n" if missed else "")
    if missing:
        print("  without a figure (or its yardstick) in this run: " + " ".join(missing))


def compare(figures, baseline):
    """Prints the table; returns how many figures got worse."""
    same = baseline["machine"] == machine()
    print(f"\nbaseline of {baseline['date']}, {baseline['machine']['cpu']}, {baseline['machine']['cores']} cores"
          + ("" if same else ": another machine, so only ratios are compared"))
    print(f"{'figure':30} {'now':>10} {'baseline':>10} {'now/baseline':>12}")
    worse = 0
    for name, entry in figures.items():
        old = baseline["figures"].get(name)
        key = "ratio" if entry.get("ratio") is not None else "value"
        if old is None or old.get(key) is None or (key == "value" and not same):
            continue
        if old[key] == 0 or entry[key] == 0:
            continue
        change = entry[key] / old[key]
        is_worse = (1 / change if wants_more(entry) else change) > WORSE
        worse += is_worse
        kind = "" if key == "ratio" else " " + entry["unit"]
        print(f"{name[:30]:30} {entry[key]:10.4g} {old[key]:10.4g} {change:12.2f}{kind}{'  WORSE' if is_worse else ''}")
    print(f"{worse} worse by more than {100 * (WORSE - 1):.0f} %")
    return worse


def table(baseline):
    """The named figures, for the documentation."""
    where = baseline["machine"]
    lines = [f"Taken on {baseline['date']} on {where['cpu']}, {where['cores']} cores.", "",
             "| figure | value (min to max) | ratio | goal | what the ratio is |", "| --- | --- | --- | --- | --- |"]
    for name, (sense, bound, what) in GOALS.items():
        entry = baseline["figures"].get(name)
        value, ratio = "not measured", ""
        if entry is not None:
            low, high = entry.get("min", entry["value"]), entry.get("max", entry["value"])
            spread = "" if low == high else f" ({low:.3g} to {high:.3g})"
            value = f"{entry['value']:.3g}{spread} {entry['unit']}"
            ratio = "" if entry.get("ratio") is None else f"{entry['ratio']:.3g}"
        lines.append(f"| `{name}` | {value} | {ratio} | {'≥' if sense == '>=' else '≤'} {bound:g} | {what} |")
    return "\n".join(lines)


def write_document(path, text, mark, mark_end):
    """Puts the text between the marks of a document."""
    document = path.read_text(encoding="utf-8")
    before, found, rest = document.partition(mark)
    _, ended, after = rest.partition(mark_end)
    if not found or not ended:
        sys.exit(f"{path}: the marks {mark} and {mark_end} are not there")
    path.write_text(f"{before}{mark}\n\n{text}\n\n{mark_end}{after}", encoding="utf-8")


def store(figures, path, document):
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    baseline = {"date": date, "machine": machine(), "figures": {name: figures[name] for name in sorted(figures)}}
    path.write_text(json.dumps(baseline, indent=1) + "\n", encoding="utf-8")
    print(f"baseline: {len(figures)} figures in {path}")
    if document is not None:
        write_document(document, table(baseline), MARK, MARK_END)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--baseline", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--document", type=pathlib.Path)
    options = parser.parse_args()
    figures, origin = read_figures(options.folder)
    if not figures:
        sys.exit(f"{options.folder}: no benchmark left any figures")
    path = options.folder / "bench.json"
    path.write_text(json.dumps(list(figures.values()), indent=1) + "\n", encoding="utf-8")
    print(f"\n{len(figures)} figures in {path}")
    if options.write:
        store(figures, options.baseline, options.document)
    elif options.baseline is not None and options.baseline.exists():
        chosen = {n: e for n, e in figures.items() if not options.only or origin[n].split("_")[0] in options.only}
        compare(chosen, json.loads(options.baseline.read_text(encoding="utf-8")))
    judge_goals(figures)


if __name__ == "__main__":
    main()
