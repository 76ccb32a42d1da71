"""The forms that experiment.py compares: what each changes in the manifest, what happens to its learners, its inner rate."""
from lib.ensemble import merge

DATA = "/usr/share/dictd/gcide.dict.dz"
BATCH, SEQUENCE, LEARNERS = 8, 128, 4
# Best inner rates of scans, by the steps of a run: of data-parallel, and of forms whose learners take steps of their own.
TOGETHER = {400: 0.008, 800: 0.006, 2400: 0.006}
APART = {400: 0.004, 800: 0.006, 2400: 0.004}
APART_MEAN = {400: 0.008}

SYNCHRONOUS = {"mode": "synchronous", "quorum": "100%", "warmup": {"steps": 0}, "compression": "none",
               "merge": {"method": "mean"}}
COLD = {"warmup": {"steps": 0}}
MEAN = {"merge": {"method": "mean"}}


def base(steps, learners, seed, rate, batch):
    return {
        "apiVersion": "diloco.dev/v1alpha1", "kind": "DecoupledDiLoCoJob", "metadata": {"name": "experiment"},
        "spec": {
            "training": {
                "tokenBudget": steps * learners * batch * SEQUENCE, "seed": seed, "batchSequences": batch, "threads": 1,
                "evaluationSeconds": max(3, steps // 80),
                "model": {"width": 96, "layers": 3, "heads": 4, "sequenceLength": SEQUENCE},
                "data": {"paths": [DATA], "validationFraction": 0.01, "validationSequences": 256},
                "innerOptimizer": {"learningRate": rate, "warmupSteps": 50, "decaySteps": steps},
            },
            "sync": {"fragments": 8, "interval": 24, "overlap": 2, "quorum": 1,
                     "compression": "none", "heartbeatSeconds": 1, "timeoutSeconds": 10},
            "syncer": {"shards": 1},
            "learners": {"min": 0, "max": 16, "replicas": learners},
        },
    }


class Mode:
    """One row of the table."""

    def __init__(self, text, sync=None, learners=LEARNERS, batch=BATCH, together=False, kill_every=0, slow=False,
                 join_half=0, rates=None, rate_of=None):
        self.rates = rates or (TOGETHER if together else APART)
        self.rate_of = rate_of  # The mode whose inner rate this one takes, where it is not one of its own.
        self.text, self.sync, self.learners, self.batch = text, sync or {}, learners, batch
        self.together = together  # One process with the batches of all learners: data-parallel without a network.
        self.kill_every, self.slow, self.join_half = kill_every, slow, join_half

    def rate(self, steps):
        """Of the scan whose runs were nearest in length."""
        return self.rates[min(self.rates, key=lambda scanned: abs(scanned - steps))]


def job_of(mode, steps, seed, rate):
    if mode.together:
        job = base(steps, 1, seed, rate, mode.batch * mode.learners)
        job["spec"]["training"]["threads"] = 2
        # Alone with everything exact, what it sends is what it has: the syncer's versions are the curve to draw.
        merge(job["spec"]["sync"], dict(SYNCHRONOUS, interval=20, fragments=1, overlap=0))
    else:
        job = base(steps, mode.learners, seed, rate, mode.batch)
    merge(job["spec"]["sync"], mode.sync)
    return job


def step_seconds(learners):
    """An inner step of this model takes about 30 ms of one core; learners share two."""
    return 0.03 * max(1, learners / 2)


MODES = {
    "data_parallel": Mode("data-parallel: one model, the batches of all learners together", together=True),
    "alone": Mode("one learner alone: a quarter of the tokens", learners=1,
                  sync=dict(COLD, fragments=1, interval=10**6)),
    "diloco": Mode("DiLoCo: P=1, everybody waits", sync=dict(SYNCHRONOUS, fragments=1, overlap=0)),
    "streaming": Mode("Streaming DiLoCo: P=8, tau=2, everybody takes part", sync=SYNCHRONOUS),
    "decoupled_cold": Mode("Decoupled, RDA, no interval warm-up", sync=COLD),
    "decoupled_mean_cold": Mode("Decoupled, weighted mean, no interval warm-up", sync=dict(COLD, **MEAN)),
    "decoupled": Mode("Decoupled, RDA, interval warm-up"),
    "decoupled_mean": Mode("Decoupled, weighted mean, interval warm-up", sync=MEAN, rates=APART_MEAN),
    "decoupled_int8": Mode("Decoupled, int8 pushes", sync={"compression": "int8"}, rate_of="decoupled"),
    "decoupled_int4": Mode("Decoupled, int4 pushes", sync={"compression": "int4"}, rate_of="decoupled"),
    "decoupled_int4_bf16": Mode("Decoupled, int4 pushes, bf16 broadcasts",
                                sync={"compression": "int4", "broadcastCompression": "bf16"}, rate_of="decoupled"),
    "decoupled_killed": Mode("Decoupled, a learner killed every 15 s", kill_every=15, rate_of="decoupled"),
    "decoupled_slow": Mode("Decoupled, one learner 4x slower", slow=True, rate_of="decoupled"),
    "decoupled_joined": Mode("Decoupled, 4 more learners for the second half", join_half=4, rate_of="decoupled"),
    "data_parallel_m2": Mode("data-parallel, 2x the batch", learners=2, together=True),
    "decoupled_m2": Mode("Decoupled, RDA, M=2", learners=2, rates={400: 0.006}),
    "decoupled_mean_m2": Mode("Decoupled, mean, M=2", learners=2, sync=MEAN, rates=APART_MEAN),
    "data_parallel_m8": Mode("data-parallel, 8x the batch", learners=8, together=True),
    "decoupled_m8": Mode("Decoupled, RDA, M=8", learners=8, rates={400: 0.006}),
    "decoupled_mean_m8": Mode("Decoupled, mean, M=8", learners=8, sync=MEAN, rates=APART_MEAN),
    "data_parallel_b32": Mode("data-parallel, batch 4 x 32", batch=32, together=True),
    "decoupled_b32": Mode("Decoupled, RDA, batch 32", batch=32),
    "decoupled_mean_b32": Mode("Decoupled, mean, batch 32", batch=32, sync=MEAN),
    "decoupled_warm150": Mode("Decoupled, RDA, interval warm-up of 150 steps whatever the length", rate_of="decoupled",
                              sync={"warmup": {"steps": 150}}),
    "decoupled_rebase": Mode("Decoupled, apply: rebase", sync={"apply": "rebase"}, rate_of="decoupled"),
    "decoupled_alpha": Mode("Decoupled, applyAlpha 0.5", sync={"applyAlpha": 0.5}, rate_of="decoupled"),
    "decoupled_nesterov5": Mode("Decoupled, Nesterov 0.7 / 0.5", sync={"outerOptimizer": {
        "type": "nesterov", "learningRate": 0.7, "momentum": 0.5}}),
    "decoupled_nesterov9": Mode("Decoupled, Nesterov 0.7 / 0.9", sync={"outerOptimizer": {
        "type": "nesterov", "learningRate": 0.7, "momentum": 0.9}}),
    "decoupled_stale": Mode("Decoupled, one learner 4x slower, staleness decay 0.1", slow=True,
                            sync={"merge": {"stalenessDecay": 0.1}}, rate_of="decoupled"),
    "decoupled_h8": Mode("Decoupled, H=8", sync={"interval": 8}, rate_of="decoupled"),
    "decoupled_h48": Mode("Decoupled, H=48", sync={"interval": 48}, rate_of="decoupled"),
}

# Twice, since what is said of them rests on differences of one or two per cent; the time limit allows no more.
TWICE = ["data_parallel", "decoupled", "decoupled_mean", "decoupled_slow"]
ONCE = ["alone", "diloco", "streaming", "decoupled_cold", "decoupled_killed", "decoupled_int8", "decoupled_int4", "decoupled_joined",
        "data_parallel_m2", "decoupled_m2", "decoupled_mean_m2", "data_parallel_m8", "decoupled_m8", "decoupled_mean_m8"]
LENGTHS = ["data_parallel", "streaming", "decoupled_cold", "decoupled", "decoupled_warm150", "decoupled_mean"]
PLANS = {
    # (mode, steps, seeds); `make experiment` is the first, within 25 minutes on 2 cores.
    "quick": [(name, 400, 2) for name in TWICE] + [(name, 400, 1) for name in ONCE] + [
        (name, 800, 1) for name in ("data_parallel", "decoupled")],
    "long": [(name, 800, 3) for name in MODES] + [
        (name, steps, seeds) for steps, seeds in ((400, 3), (2400, 2)) for name in LENGTHS],
}
