#!/usr/bin/env python3
"""The built-in trainer against PyTorch: loss, every gradient, and the weights after 20 AdamW steps."""
import argparse
import math
import pathlib
import subprocess
import sys
import tempfile

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent / "oracle"))
import llama  # noqa: E402
import safetensors_reader  # noqa: E402

LOSS_TOLERANCE = 1e-5  # Relative.
GRADIENT_TOLERANCE = 1e-4  # Relative to the tensor's largest gradient.
# After 20 steps, norm of the error relative to norm of the tensor's change. (AdamW divides by the gradient's size, so that the
# few elements whose gradient is all rounding still move by a whole learning rate: no bound on the largest error is tight.)
WEIGHT_TOLERANCE = 1e-3


def check(condition, text):
    if not condition:
        sys.exit(f"FAILED: {text}")


def rate(settings, step):
    """Linear warm-up, then half a cosine down to the floor."""
    peak, floor = settings["learning_rate"], settings["learning_rate"] * settings["min_learning_rate_ratio"]
    warmup, end = settings["warmup_steps"], settings["decay_steps"]
    if step <= warmup:
        return peak * step / warmup
    if step >= end:
        return floor
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))


def make_optimizer(weights, s):
    groups = [
        {"params": [w for w in weights.values() if w.dim() >= 2], "weight_decay": s["weight_decay"]},
        {"params": [w for w in weights.values() if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=s["learning_rate"], betas=(s["beta1"], s["beta2"]), eps=s["epsilon"])


def worst(got, expected, scale):
    return ((got.double() - expected).abs().max() / scale).item()


def check_case(directory, name):
    before, metadata = safetensors_reader.read(directory / f"{name}.before.safetensors")
    gradients, first = safetensors_reader.read(directory / f"{name}.gradients.safetensors")
    after, last = safetensors_reader.read(directory / f"{name}.after.safetensors")
    settings = {key: float(value) for key, value in metadata.items()}
    tokens, targets = (before.pop(key).long() for key in ("tokens", "targets"))
    check(set(before) == set(gradients) == set(after), f"{name}: the three files hold different tensors")
    weights = {key: value.double().requires_grad_() for key, value in before.items()}
    optimizer = make_optimizer(weights, settings)
    gradient_error = 0.0
    for step in range(len(tokens)):
        optimizer.zero_grad()
        loss = llama.loss(weights, settings, tokens[step], targets[step])
        loss.backward()
        if step == 0:
            error = abs(float(first["loss"]) - loss.item()) / loss.item()
            check(error < LOSS_TOLERANCE, f"{name}: loss {first['loss']} instead of {loss.item()}")
            for key, weight in weights.items():
                e = worst(gradients[key], weight.grad, weight.grad.abs().max())
                check(e < GRADIENT_TOLERANCE, f"{name}: gradient of {key} is off by {e:.2g}")
                gradient_error = max(gradient_error, e)
        torch.nn.utils.clip_grad_norm_(weights.values(), settings["clip_norm"])
        for group in optimizer.param_groups:
            group["lr"] = rate(settings, step + 1)
        optimizer.step()
    error = abs(float(last["loss"]) - loss.item()) / loss.item()
    check(error < LOSS_TOLERANCE * 10, f"{name}: loss of the last step {last['loss']} instead of {loss.item()}")
    weight_error = 0.0
    for key, weight in weights.items():
        change = (weight.detach() - before[key].double()).norm()
        check(change > 0, f"{name}: {key} did not change")
        e = ((after[key].double() - weight.detach()).norm() / change).item()
        check(e < WEIGHT_TOLERANCE, f"{name}: {key} after 20 steps is off by {e:.2g}")
        weight_error = max(weight_error, e)
    print(f"{name}: {len(weights)} tensors, gradients within {gradient_error:.1e}, weights after 20 steps within {weight_error:.1e}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True, type=pathlib.Path)
    build = parser.parse_args().build
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        tool = build / "tools" / "model_oracle"
        names = subprocess.run([tool, directory], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        check(len(names) >= 3, "the tool wrote too few cases")
        for name in names:
            check_case(pathlib.Path(directory), name)
    print(f"{len(names)} models agree with torch {torch.__version__}")


main()
