#!/usr/bin/env python3
"""LlamaForCausalLM opens each exported model without a complaint, and its logits are ours."""
import argparse
import pathlib
import sys

import torch
import transformers

TOLERANCE = 1e-4  # Absolute, on logits of the order of one.


def check(condition, text):
    if not condition:
        sys.exit(f"FAILED: {text}")


def check_model(folder, reader):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    check(type(model) is transformers.LlamaForCausalLM, f"{folder}: opened as {type(model).__name__}")
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        check(not info.get(what), f"{folder}: {what} {info.get(what)}")
    expected, _ = reader.read(folder / "expected" / "logits.safetensors")
    tokens, ours = expected["tokens"].long(), expected["logits"]
    with torch.no_grad():
        theirs = model.eval()(tokens).logits
    check(theirs.shape == ours.shape, f"{folder}: logits of shape {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
    error = (theirs - ours).abs().max().item()
    spread = ours.std().item()
    check(spread > 0.1, f"{folder}: logits are all alike, so that agreement would mean nothing")
    check(error < TOLERANCE, f"{folder}: logits differ by {error:.2g}")
    print(f"{folder.name}: {sum(p.numel() for p in model.parameters())} parameters, logits within {error:.1e} (spread {spread:.2f})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--python-path", required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.python_path)
    import safetensors_reader

    torch.set_num_threads(1)
    folders = sorted(path for path in arguments.folder.iterdir() if path.is_dir())
    check(len(folders) >= 3, "too few exported models")
    for folder in folders:
        check_model(folder, safetensors_reader)
    print(f"compat: {len(folders)} passed, 0 failed (transformers {transformers.__version__}, torch {torch.__version__})")


main()
