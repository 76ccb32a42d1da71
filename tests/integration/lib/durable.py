"""Figures of what survives: tests note theirs in build/results/durable.json, each its own members."""
import fcntl
import json
import pathlib
import sys

FILE_BLOCK_BYTES = 4096  # Of a fragment's file: header (40: bytes of the parameters, 48: of the state), parameters, state.


def note_figures(build, **figures):
    """Merges `figures` into build/results/durable.json; `build` is build/<variant>."""
    path = pathlib.Path(build).resolve().parent / "results" / "durable.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        known = json.loads(text) if text else {}
        known.update(figures)
        file.seek(0)
        file.truncate()
        file.write(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":  # durable.py BUILD NAME=NUMBER...: for benches.
    note_figures(sys.argv[1], **{name: float(value) for name, value in (a.split("=") for a in sys.argv[2:])})
