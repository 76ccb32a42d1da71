#!/usr/bin/env python3
"""Does it learn as well as data-parallel? Trains the same small model on the same text at equal tokens in every
synchronisation form, with the real programs, and prints a table of the global model's validation loss.

    experiment.py --build DIR [--plan quick|long] [--only MODE,MODE] [--steps N] [--seeds N] [--rates R,R]
                  [--runs FILE] [--resume] [--out FILE]

Each learner takes `steps` inner steps of 8 x 128 bytes, 4 learners unless the mode says otherwise; data-parallel takes the same
number of steps with the batches of all learners together. Every form has the inner rate that was best for it in a scan
(`--rates` scans again: each rate with the first seed, the others at the best); a variation of a form (a codec, a kill) takes the
rate of what it varies. Every run is a line of --runs as soon as it ends; with --resume what the file holds is not run again, so
that a table may be made in several sittings. The table goes to build/results/experiment.json; report.py makes the tables and the
drawing of docs/quality.md from it.
"""
import argparse
import json
import math
import pathlib
import random
import signal
import statistics
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integration"))
from lib.ensemble import Ensemble, merge  # noqa: E402
from modes import LEARNERS, MODES, PLANS, job_of, step_seconds  # noqa: E402


def keep_killing(ensemble, learners, seconds, stop, seed):
    chance = random.Random(seed)
    while not stop.wait(seconds):
        n = chance.randrange(learners)
        ensemble.signal(f"learner-{n}", signal.SIGKILL)
        ensemble.processes[f"learner-{n}"].wait(10)
        ensemble.start_learner(n)


def run(build, name, steps, seed, rate, limit, changes):
    """Trains once; the final validation loss, seconds, and what the syncer counted."""
    mode = MODES[name]
    job = job_of(mode, steps, seed, rate)
    merge(job["spec"], changes)
    with Ensemble(build, job, text=False) as e:
        start = time.monotonic()
        e.start_syncers()
        count = job["spec"]["learners"]["replicas"]
        stop = threading.Event()
        for n in range(count):
            # A fixed pace: a quarter of the speed that a learner has on a share of two cores.
            extra = ["--step-seconds", 4 * step_seconds(count)] if mode.slow and n == count - 1 else []
            e.start_learner(n, extra=extra)
        e.start_evaluator()
        if mode.kill_every:
            threading.Thread(target=keep_killing, args=(e, count, mode.kill_every, stop, seed), daemon=True).start()
        status = {}
        joined = False
        while e.processes["evaluator"].poll() is None:
            if time.monotonic() - start > limit:
                raise RuntimeError(f"not finished after {limit} s: {status.get('phase')} {status.get('tokens')}")
            dead = [n for n, p in e.processes.items() if n.startswith("syncer") and p.poll() not in (None, 0)]
            if dead:
                e.print_logs()
                raise RuntimeError(f"{dead[0]} died: status {e.processes[dead[0]].returncode}")
            try:
                status = e.status()
            except OSError:
                pass
            if mode.join_half and not joined and status.get("tokens", 0) >= job["spec"]["training"]["tokenBudget"] / 2:
                joined = True
                for n in range(count, count + mode.join_half):
                    e.start_learner(n)
            time.sleep(0.2)
        stop.set()
        seconds = time.monotonic() - start
        if e.processes["evaluator"].returncode != 0:
            e.print_logs()
            raise RuntimeError("the evaluator failed")
        lines = (e.folder / "final" / "evaluations.jsonl").read_text().splitlines()
        curve = [(entry["tokens"], entry["loss"]) for entry in map(json.loads, lines)]
        return {"mode": name, "steps": steps, "seed": seed, "rate": rate, "changes": changes, "loss": curve[-1][1],
                "seconds": seconds, "tokens": curve[-1][0], "rounds": status.get("round", 0), "curve": curve,
                "merged": status.get("tokensMerged", 0) / max(1, status.get("tokens", 0)),
                "verdicts": {k: v for k, v in status.get("verdicts", {}).items() if v}}


class Runs:
    """All runs so far, on disk as soon as they are done."""

    def __init__(self, path, resume):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            self.path.unlink(missing_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.runs = {self.key(r): r for r in map(json.loads, lines)}

    @staticmethod
    def key(r):
        return r["mode"], r["steps"], r["seed"], r["rate"], json.dumps(r["changes"], sort_keys=True)

    def get(self, build, name, steps, seed, rate, limit, changes):
        key = self.key({"mode": name, "steps": steps, "seed": seed, "rate": rate, "changes": changes})
        if key not in self.runs:
            self.runs[key] = run(build, name, steps, seed, rate, limit, changes)
            with self.path.open("a") as out:
                out.write(json.dumps(self.runs[key]) + "\n")
        return self.runs[key]


def row(name, steps, runs, scanned, main_steps):
    """A figure of experiment.json."""
    losses = [r["loss"] for r in runs]
    mode = MODES[name]
    return {"name": f"val_loss_{name}" + (f"_{steps}" if steps != main_steps else ""), "value": statistics.fmean(losses),
            "unit": "nats/byte", "spread": max(losses) - min(losses), "form": mode.text, "rate": runs[0]["rate"],
            "rates_tried": {str(r["rate"]): r["loss"] for r in scanned}, "runs": runs, "steps": steps,
            "learners": mode.learners, "batch": mode.batch, "together": mode.together}


def add_ratios(rows):
    """Each row beside the data-parallel of as many learners, as large a batch, as many steps."""
    beside = {(r["learners"], r["batch"], r["steps"]): r for r in rows if r["together"]}
    for r in rows:
        reference = beside.get((r["learners"], r["batch"], r["steps"]))
        if reference is not None:
            r["ratio_to"], r["ratio"] = reference["name"], r["value"] / reference["value"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--plan", choices=PLANS, default="quick")
    parser.add_argument("--only", default="", help="these modes alone")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates", default="", help="inner learning rates to scan")
    parser.add_argument("--set", default="{}", help="JSON that is merged into every job's spec: to try a thing out")
    parser.add_argument("--limit", type=float, default=1800, help="seconds a run may take")
    parser.add_argument("--runs", default="build/results/experiment_runs.jsonl")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", default="build/results/experiment.json")
    arguments = parser.parse_args()
    cells = PLANS[arguments.plan]
    if arguments.only:
        names = arguments.only.split(",")
        unknown = [name for name in names if name not in MODES]
        if unknown:
            parser.error(f"no such mode: {', '.join(unknown)}; there are {', '.join(MODES)}")
        cells = [(name, cells[0][1], cells[0][2]) for name in names]
    cells = [(name, arguments.steps or steps, arguments.seeds or seeds) for name, steps, seeds in cells]
    scan = [float(rate) for rate in arguments.rates.split(",")] if arguments.rates else []
    changes = json.loads(arguments.set)
    runs = Runs(arguments.runs, arguments.resume)
    print("validation loss in nats a byte", flush=True)
    print(f"{'mode':26} {'steps':>5} {'seeds':>5} {'loss':>7} {'spread':>7} {'to d.p.':>8} {'rate':>6} {'seconds':>8}  merged  form",
          flush=True)
    rows, best_rate = [], {}
    for name, steps, seeds in cells:
        mode = MODES[name]
        rates = scan or [mode.rate(steps)]
        if mode.rate_of is not None:
            rates = [best_rate.get((mode.rate_of, steps), MODES[mode.rate_of].rate(steps))]
        scanned = [runs.get(arguments.build, name, steps, 1, rate, arguments.limit, changes) for rate in rates]
        best = min(scanned, key=lambda r: r["loss"])
        best_rate[name, steps] = best["rate"]
        rows.append(row(name, steps, [best] + [
            runs.get(arguments.build, name, steps, seed, best["rate"], arguments.limit, changes)
            for seed in range(2, seeds + 1)], scanned, cells[0][1]))
        add_ratios(rows)
        r = rows[-1]
        print(f"{name:26} {steps:5} {seeds:5} {r['value']:7.4f} {r['spread']:7.4f} "
              f"{100 * (r.get('ratio', math.nan) - 1):+7.2f}% {r['rate']:6.4f} "
              f"{statistics.fmean(one['seconds'] for one in r['runs']):8.1f}  {100 * r['runs'][0]['merged']:6.1f}%  {mode.text} "
              f"{r['rates_tried'] if len(scanned) > 1 else ''}", flush=True)
        out = pathlib.Path(arguments.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
