#!/usr/bin/env python3
"""Codecs, merges and outer optimisers against independent implementations: NumPy for codecs, mean, RDA and Lion, PyTorch for
SGD with Nesterov momentum and AdamW, all in float64. merge_oracle.py --build DIR"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch

BLOCK = 256
NONE, BF16, INT8, INT4 = range(4)
BLOCK_BYTES = (1024, 512, 260, 132)
MEAN, RDA = range(2)
NESTEROV, SGD, ADAMW, LION = range(4)
# name, role, rows, columns: ends within a block, within a tile and at one; several tiles; both roles.
TENSORS = (("embedding", "embedding", 301, 20), ("attention", "weight", 100, 100), ("norm", "weight", 1, 77),
           ("square", "weight", 64, 256), ("ffn", "weight", 41, 1000))
FLOAT32 = 2.0 ** -24  # Relative error of one rounding.


def padded(count):
    return -(-count // BLOCK) * BLOCK


def slices():
    offset = 0
    for name, role, rows, columns in TENSORS:
        yield role, offset, rows * columns
        offset += padded(rows * columns)


LENGTH = sum(padded(rows * columns) for _, _, rows, columns in TENSORS)


# --- codecs ------------------------------------------------------------------------------------------------------------------

def encode(codec, values):
    """What dl_codec_encode must give, from the documented format alone."""
    if codec == NONE:
        return values.tobytes()
    if codec == BF16:
        return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    limit = np.float32(127 if codec == INT8 else 7)
    blocks = values.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    safe = np.where(largest < 2.0 ** -100, np.float32(1), largest).astype(np.float32)
    inverse = np.where(largest < 2.0 ** -100, np.float32(0), limit / safe).astype(np.float32)
    scale = np.where(largest < 2.0 ** -100, np.float32(0), largest / limit).astype("<f4")
    q = np.rint(blocks * inverse).astype(np.int8)
    if codec == INT4:
        q = (q[:, :128] & 15) | (q[:, 128:] << 4)
    return np.concatenate([scale.view(np.uint8).reshape(-1, 4), q.view(np.uint8)], axis=1).tobytes()


def decode(codec, encoded):
    if codec == NONE:
        return np.frombuffer(encoded, "<f4").copy()
    if codec == BF16:
        return (np.frombuffer(encoded, "<u2").astype(np.uint32) << 16).view(np.float32)
    rows = np.frombuffer(encoded, np.uint8).reshape(-1, BLOCK_BYTES[codec])
    scale = rows[:, :4].copy().view("<f4")
    q = rows[:, 4:].copy().view(np.int8)
    if codec == INT4:
        low = ((q & 15) ^ 8) - 8
        q = np.concatenate([low, q >> 4], axis=1)
    return (q.astype(np.float32) * scale).reshape(-1)


def check_codecs(tool, folder, rng):
    values = (rng.standard_normal(64 * BLOCK) * 10.0 ** rng.integers(-12, 3, 64 * BLOCK)).astype(np.float32)
    values[:BLOCK] = 0
    values[BLOCK:2 * BLOCK] = 1e-35
    values[2 * BLOCK:3 * BLOCK] = np.arange(BLOCK) - 127.5  # Ties.
    (folder / "values").write_bytes(values.tobytes())
    for codec in range(4):
        subprocess.run([tool, "encode", str(codec), folder / "values", folder / "encoded"], check=True)
        encoded = (folder / "encoded").read_bytes()
        assert encoded == encode(codec, values), f"codec {codec}: other bytes than NumPy's"
        subprocess.run([tool, "decode", str(codec), folder / "encoded", folder / "decoded"], check=True)
        decoded = (folder / "decoded").read_bytes()
        assert decoded == decode(codec, encoded).tobytes(), f"codec {codec}: decoded to other values than NumPy's"
    return 8


# --- merge and outer step ----------------------------------------------------------------------------------------------------

def merge(method, embedding, deltas, weights):
    """The outer gradient in float64, and per element the magnitude that rounding errors are relative to."""
    gradient, magnitude = np.zeros(LENGTH), np.zeros(LENGTH)
    share = np.array(weights) / np.sum(weights)
    for role, offset, count in slices():
        x = np.stack([d[offset:offset + count].astype(np.float64) for d in deltas])
        part, size = (share[:, None] * x).sum(axis=0), (share[:, None] * np.abs(x)).sum(axis=0)
        if (embedding if role == "embedding" else method) == RDA:
            norms = np.linalg.norm(x, axis=1)
            unit = x / norms[:, None]
            direction = (share[:, None] * unit).sum(axis=0)
            gain = (share * norms).sum() / np.linalg.norm(direction)
            part, size = gain * direction, gain * (share[:, None] * np.abs(unit)).sum(axis=0)
        gradient[offset:offset + count], magnitude[offset:offset + count] = part, size
    return gradient, magnitude


class Lion:
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, parameter, lr, betas, weight_decay):
        self.parameter, self.lr, self.betas, self.decay = parameter, lr, betas, weight_decay
        self.momentum = torch.zeros_like(parameter)

    def step(self):
        gradient, (beta1, beta2) = self.parameter.grad, self.betas
        self.mixed = beta1 * self.momentum + (1 - beta1) * gradient
        with torch.no_grad():
            self.parameter -= self.lr * (torch.sign(self.mixed) + self.decay * self.parameter)
        self.momentum = beta2 * self.momentum + (1 - beta2) * gradient


def optimiser(kind, parameter, lr, momentum, beta2, epsilon, decay):
    if kind == NESTEROV:
        return torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=True)
    if kind == SGD:
        return torch.optim.SGD([parameter], lr=lr)
    if kind == ADAMW:
        return torch.optim.AdamW([parameter], lr=lr, betas=(momentum, beta2), eps=epsilon, weight_decay=decay)
    return Lion(parameter, lr, (momentum, beta2), decay)


def check_merge(tool, folder, rng, method, embedding, kind, learners, codec, threads):
    """Three rounds; codec None: mixed. Compares Theta after each."""
    lr, momentum, beta2, epsilon = (0.02 if kind in (ADAMW, LION) else 0.7), 0.9, 0.95, 1e-8
    decay = 0.1 if kind in (ADAMW, LION) else 0.0
    used = np.zeros(LENGTH, bool)
    for _, offset, count in slices():
        used[offset:offset + count] = True
    theta = (rng.standard_normal(LENGTH) * 0.02 * used).astype(np.float32)
    (folder / "theta").write_bytes(theta.tobytes())
    script = [f"tensor {n} {role} {r} {c}" for n, role, r, c in TENSORS]
    script += [f"merge {method} {embedding}", f"threads {threads}",
               f"outer {kind} {lr} {momentum} {beta2} {epsilon} {decay}", f"theta {folder}/theta"]
    rounds = []
    for number in range(3):
        common = rng.standard_normal(LENGTH)
        deltas, weights = [], []
        # Fewer learners in a later round; pushed in any order.
        for m in rng.permutation(max(1, learners - number)):
            delta = ((rng.standard_normal(LENGTH) + 0.5 * common) * 1e-3 * (1 + m) * used).astype(np.float32)
            c = int(rng.integers(4)) if codec is None else codec
            encoded = encode(c, delta)
            path = folder / f"push{number}.{m}"
            path.write_bytes(encoded)
            weights.append(float(rng.integers(1, 10)) * 1e5)
            deltas.append(decode(c, encoded))
            script.append(f"push {m} {c} {weights[-1]} {path}")
        script.append("round")
        rounds.append((deltas, weights))
    (folder / "script").write_text("\n".join(script) + "\n", encoding="utf-8")
    output = subprocess.run([tool, "merge", folder / "script", folder / "out"], check=True, capture_output=True, text=True)
    got = np.fromfile(folder / "out", "<f4").reshape(3, LENGTH)

    parameter = torch.nn.Parameter(torch.from_numpy(theta.astype(np.float64)))
    step = optimiser(kind, parameter, lr, momentum, beta2, epsilon, decay)
    worst, allowed, settled = 0.0, np.zeros(LENGTH), np.ones(LENGTH, bool)
    for number, (deltas, weights) in enumerate(rounds):
        gradient, magnitude = merge(method, embedding, deltas, weights)
        stats = json.loads(output.stdout.splitlines()[number])
        norm = np.linalg.norm(gradient)
        assert abs(stats["gradient_norm"] - norm) <= 1e-6 * norm, (stats, norm)
        parameter.grad = torch.from_numpy(gradient)
        step.step()
        expected = parameter.detach().numpy()
        # Rounding of the merged gradient (learners + 26 of its magnitudes: factors, products, sums, norms, gain) reaches Theta
        # through the optimiser; Theta itself rounds a few times a round.
        error = (len(deltas) + 30) * magnitude * FLOAT32
        if kind in (NESTEROV, SGD):
            reach = lr * error * (1 + momentum + momentum ** 2) if kind == NESTEROV else lr * error
        elif kind == ADAMW:  # m / sqrt(v) is at most sqrt(steps) steep in the gradient's relative error.
            reach = 4 * lr * error / (np.sqrt(step.state[parameter]["exp_avg_sq"].numpy()) + epsilon) + 32 * lr * FLOAT32
        else:  # A sign that rounding can turn settles nothing, from then on.
            settled &= np.abs(step.mixed.numpy()) > 4 * error
            reach = 4 * lr * FLOAT32 * np.ones(LENGTH)
        allowed = allowed + reach + 4 * FLOAT32 * np.abs(expected)
        difference = np.abs(got[number] - expected)
        assert np.all(difference[settled] <= allowed[settled]), (
            f"round {number}: {np.max((difference - allowed)[settled])} too far")
        worst = max(worst, float(np.max((difference / np.maximum(allowed, 1e-300))[settled & used])))
        assert np.mean(settled[used]) > 0.99
        assert not np.any(got[number][~used]), "a gap is not zero"
    return worst


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True, type=pathlib.Path)
    tool = (parser.parse_args().build / "tools" / "merge_oracle").resolve()
    rng = np.random.default_rng(20260421)
    torch.set_num_threads(1)
    cases, worst = 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        compared = check_codecs(tool, folder, rng)
        for kind in (NESTEROV, SGD, ADAMW, LION):
            for method, embedding in ((MEAN, MEAN), (RDA, MEAN), (RDA, RDA)):
                for learners, codec in ((1, NONE), (3, BF16), (5, INT8), (8, INT4), (9, None)):
                    try:
                        used = check_merge(tool, folder, rng, method, embedding, kind, learners, codec, 1 + cases % 3)
                    except AssertionError as error:
                        print(f"optimiser {kind}, method {method}/{embedding}, {learners} learners, codec {codec}: {error}")
                        return 1
                    worst = max(worst, used)
                    cases += 1
    assert cases == 60 and compared == 8
    print(f"{compared} codec runs equal to NumPy's bytes; {cases} merges of 3 rounds within {worst:.2f} of the tolerance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
