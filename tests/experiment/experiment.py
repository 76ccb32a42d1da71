#!/usr/bin/env python3
"""Does it learn as well as data-parallel? Trains the same small model on the same text at equal tokens in every
synchronisation form, with the real programs, and prints a table of the global model's validation loss.

    experiment.py --build DIR [--plan quick|long] [--only MODE,MODE] [--seeds N] [--steps N] [--rates R,R] [--out FILE]

Each learner takes `steps` inner steps of 8 x 128 bytes, 4 learners unless the mode says otherwise; data-parallel takes the same
number of steps with the batches of all learners together. A form is tried at each inner rate with the first seed, and goes on
with its best; a variation of a form (a codec, a kill) takes the rate of what it varies. Figures go to
build/results/experiment.json; report.py makes the table and the drawing of docs/quality.md from them.
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

DATA = "/usr/share/dictd/gcide.dict.dz"
BATCH, SEQUENCE, LEARNERS = 8, 128, 4
RATES = (0.002, 0.004)

SYNCHRONOUS = {"mode": "synchronous", "quorum": "100%", "warmup": {"steps": 0}, "compression": "none",
               "merge": {"method": "mean"}}


def base(steps, learners, seed, rate, batch=BATCH):
    return {
        "apiVersion": "diloco.dev/v1alpha1", "kind": "DecoupledDiLoCoJob", "metadata": {"name": "experiment"},
        "spec": {
            "training": {
                "tokenBudget": steps * learners * batch * SEQUENCE, "seed": seed, "batchSequences": batch, "threads": 1,
                "evaluationSeconds": 3,
                "model": {"width": 96, "layers": 3, "heads": 4, "sequenceLength": SEQUENCE},
                "data": {"paths": [DATA], "validationFraction": 0.01, "validationSequences": 256},
                "innerOptimizer": {"learningRate": rate, "warmupSteps": 50, "decaySteps": steps},
            },
            "sync": {"fragments": 8, "interval": 24, "overlap": 2, "warmup": {"steps": 150, "interval": 2}, "quorum": 1,
                     "compression": "none", "heartbeatSeconds": 1, "timeoutSeconds": 10},
            "syncer": {"shards": 1},
            "learners": {"min": 0, "max": 16, "replicas": learners},
        },
    }


class Mode:
    """One row of the table: changes of the manifest, and what happens to the learners meanwhile."""

    def __init__(self, text, sync=None, learners=LEARNERS, batch=BATCH, together=False, kill_every=0, slow=False,
                 join_half=0, training=None, rate_of=None):
        self.rate_of = rate_of  # The mode whose best inner rate it takes; None: it has one of its own.
        self.text, self.sync, self.learners, self.batch = text, sync or {}, learners, batch
        self.together = together  # One process with the batches of all learners: data-parallel without a network.
        self.kill_every, self.slow, self.join_half, self.training = kill_every, slow, join_half, training or {}

    def job(self, steps, seed, rate):
        if self.together:
            job = base(steps, 1, seed, rate, self.batch * self.learners)
            job["spec"]["training"]["threads"] = 2
            merge(job["spec"]["sync"], {"interval": steps, "fragments": 1, "warmup": {"steps": 0}})
        else:
            job = base(steps, self.learners, seed, rate, self.batch)
        merge(job["spec"]["sync"], self.sync)
        merge(job["spec"]["training"], self.training)
        return job


MODES = {
    "data_parallel": Mode("data-parallel: one model, the batches of all learners together", together=True),
    "alone": Mode("one learner alone: a quarter of the tokens", learners=1, sync={"fragments": 1, "interval": 10**6,
                                                                                 "warmup": {"steps": 0}}),
    "diloco": Mode("DiLoCo: P=1, everybody waits", sync=dict(SYNCHRONOUS, fragments=1, overlap=0)),
    "streaming": Mode("Streaming DiLoCo: P=8, tau=2, everybody takes part", sync=SYNCHRONOUS),
    "decoupled_cold": Mode("Decoupled, RDA, no interval warm-up", sync={"warmup": {"steps": 0}}),
    "decoupled": Mode("Decoupled, RDA, interval warm-up (the default)"),
    "decoupled_mean": Mode("Decoupled, weighted mean", sync={"merge": {"method": "mean"}}),
    "decoupled_int8": Mode("Decoupled, int8 pushes", sync={"compression": "int8"}, rate_of="decoupled"),
    "decoupled_int4": Mode("Decoupled, int4 pushes", sync={"compression": "int4"}, rate_of="decoupled"),
    "decoupled_int4_bf16": Mode("Decoupled, int4 pushes, bf16 broadcasts",
                                sync={"compression": "int4", "broadcastCompression": "bf16"}, rate_of="decoupled"),
    "decoupled_killed": Mode("Decoupled, a learner killed every 15 s", kill_every=15, rate_of="decoupled"),
    "decoupled_slow": Mode("Decoupled, one learner 4x slower", slow=True, rate_of="decoupled"),
    "decoupled_joined": Mode("Decoupled, 4 more learners for the second half", join_half=4, rate_of="decoupled"),
    "decoupled_m2": Mode("Decoupled, M=2", learners=2),
    "decoupled_m8": Mode("Decoupled, M=8", learners=8),
    "decoupled_mean_m2": Mode("Decoupled, mean, M=2", learners=2, sync={"merge": {"method": "mean"}}),
    "decoupled_mean_m8": Mode("Decoupled, mean, M=8", learners=8, sync={"merge": {"method": "mean"}}),
    "data_parallel_m2": Mode("data-parallel, 2x the batch", learners=2, together=True),
    "data_parallel_m8": Mode("data-parallel, 8x the batch", learners=8, together=True),
    "decoupled_rebase": Mode("Decoupled, apply: rebase", sync={"apply": "rebase"}, rate_of="decoupled"),
    "decoupled_alpha": Mode("Decoupled, applyAlpha 0.5", sync={"applyAlpha": 0.5}, rate_of="decoupled"),
    "decoupled_nesterov5": Mode("Decoupled, Nesterov 0.7 / 0.5", sync={"outerOptimizer": {
        "type": "nesterov", "learningRate": 0.7, "momentum": 0.5}}),
    "decoupled_nesterov9": Mode("Decoupled, Nesterov 0.7 / 0.9", sync={"outerOptimizer": {
        "type": "nesterov", "learningRate": 0.7, "momentum": 0.9}}),
    "decoupled_stale": Mode("Decoupled, one learner 4x slower, staleness decay 0.1", slow=True,
                            sync={"merge": {"stalenessDecay": 0.1}}, rate_of="decoupled"),
}
PLANS = {
    # Name: (modes, seeds, steps); `make experiment` is the first, within 25 minutes on 2 cores.
    "quick": (["data_parallel", "alone", "diloco", "streaming", "decoupled_cold", "decoupled", "decoupled_mean",
               "decoupled_int8", "decoupled_int4", "decoupled_killed", "decoupled_slow", "decoupled_joined"], 2, 400),
    "long": (list(MODES), 3, 800),
}


def keep_killing(ensemble, learners, seconds, stop, seed):
    chance = random.Random(seed)
    kills = 0
    while not stop.wait(seconds):
        n = chance.randrange(learners)
        ensemble.signal(f"learner-{n}", signal.SIGKILL)
        ensemble.processes[f"learner-{n}"].wait(10)
        ensemble.start_learner(n)
        kills += 1
    return kills


def run(build, mode, steps, seed, rate, limit):
    """Trains once; the final validation loss, seconds, and what the syncer counted."""
    job = mode.job(steps, seed, rate)
    with Ensemble(build, job, text=False) as e:
        start = time.monotonic()
        e.start_syncers()
        count = job["spec"]["learners"]["replicas"]
        stop = threading.Event()
        threads = []
        for n in range(count):
            # A fixed pace: a quarter of the speed that a learner has on a share of two cores.
            extra = ["--step-seconds", 4 * step_seconds(count)] if mode.slow and n == count - 1 else []
            e.start_learner(n, extra=extra)
        e.start_evaluator()
        if mode.kill_every:
            threads.append(threading.Thread(target=keep_killing, args=(e, count, mode.kill_every, stop, seed), daemon=True))
            threads[-1].start()
        status = {}
        joined = False
        while e.processes["evaluator"].poll() is None:
            if time.monotonic() - start > limit:
                raise RuntimeError(f"not finished after {limit} s: {status.get('phase')} {status.get('tokens')}")
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
        return {"loss": curve[-1][1], "seconds": seconds, "tokens": curve[-1][0], "rounds": status.get("round", 0),
                "seed": seed, "rate": rate, "curve": curve,
                "verdicts": {k: v for k, v in status.get("verdicts", {}).items() if v}}


def step_seconds(learners):
    """An inner step of this model takes about 30 ms of one core; learners share two."""
    return 0.03 * max(1, learners / 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--plan", choices=PLANS, default="quick")
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="inner learning rates to try")
    parser.add_argument("--limit", type=float, default=900, help="seconds a run may take")
    parser.add_argument("--out", default="build/results/experiment.json")
    arguments = parser.parse_args()
    modes, seeds, steps = PLANS[arguments.plan]
    modes = arguments.only.split(",") if arguments.only else modes
    seeds, steps = arguments.seeds or seeds, arguments.steps or steps
    unknown = [name for name in modes if name not in MODES]
    if unknown:
        parser.error(f"no such mode: {', '.join(unknown)}; there are {', '.join(MODES)}")
    rates = [float(rate) for rate in arguments.rates.split(",")]
    print(f"{steps} inner steps a learner, {seeds} seed(s); validation loss in nats a byte", flush=True)
    print(f"{'mode':22} {'loss':>7} {'spread':>7} {'to d.p.':>8} {'rate':>6} {'seconds':>8}  form", flush=True)
    results, reference, best_rate = [], {}, {}
    for name in modes:
        mode = MODES[name]
        tried = [best_rate[mode.rate_of]] if mode.rate_of in best_rate else rates
        first = [run(arguments.build, mode, steps, 1, rate, arguments.limit) for rate in tried]
        best = min(first, key=lambda r: r["loss"])
        best_rate[name] = best["rate"]
        runs = [best] + [run(arguments.build, mode, steps, seed + 1, best["rate"], arguments.limit)
                         for seed in range(1, seeds)]
        losses = [r["loss"] for r in runs]
        mean = statistics.fmean(losses)
        spread = max(losses) - min(losses)
        if mode.together:
            reference[mode.learners] = mean
        beside = reference.get(mode.learners, math.nan)
        print(f"{name:22} {mean:7.4f} {spread:7.4f} {100 * (mean / beside - 1):+7.2f}% {best['rate']:6.4f} "
              f"{statistics.fmean(r['seconds'] for r in runs):8.1f}  {mode.text}; {runs[0]['verdicts']}", flush=True)
        entry = {"name": f"val_loss_{name}", "value": mean, "unit": "nats/byte", "spread": spread, "form": mode.text,
                 "rate": best["rate"], "rates_tried": {str(r["rate"]): r["loss"] for r in first}, "runs": runs,
                 "steps": steps, "learners": mode.learners}
        if not math.isnan(beside):
            entry.update(ratio_to="val_loss_data_parallel", ratio=mean / beside)
        results.append(entry)
        out = pathlib.Path(arguments.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
