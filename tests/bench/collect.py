#!/usr/bin/env python3
"""Puts the figures of all benchmarks of one run into build/results/bench.json: collect.py FOLDER."""
import json
import pathlib
import sys

APART = {"bench.json", "demo.json", "durable.json", "experiment.json"}


def main():
    folder = pathlib.Path(sys.argv[1])
    figures = []
    for path in sorted(folder.glob("*.json")):
        if path.name not in APART:
            figures += json.loads(path.read_text())
    if not figures:
        sys.exit(f"{folder}: no benchmark left any figures")
    (folder / "bench.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{len(figures)} figures in {folder / 'bench.json'}")


main()
