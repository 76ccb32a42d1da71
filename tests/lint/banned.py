#!/usr/bin/env python3
"""Calls and words that do not belong in the tree: banned.py ROOT. Fails when it looked at nothing."""
import pathlib
import re
import sys

CALLS = re.compile(r"\b(strcpy|strcat|sprintf|vsprintf|strtok|atoi|atol|atof|gets|gmtime|localtime|rand|srand)\s*\(")
# DL_MIN and DL_MAX evaluate an argument twice: a draw in it is drawn twice, and the two differ.
DRAWN_TWICE = re.compile(r"\bDL_M(?:IN|AX)\([^;]*?\b(dl_rng_\w+|sim_uniform|sim_exponential|sim_chance)\s*\(")
FLAGS = re.compile(r"-Ofast|-ffast-math")
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
FOLDERS = ("common", "syncer", "worker", "operator", "sim", "tests")


def blank(match):
    return "".join("\n" if c == "\n" else " " for c in match.group(0))


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    faults = []
    looked = 0
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.[ch]")):
            looked += 1
            code = COMMENT_OR_STRING.sub(blank, path.read_text(encoding="utf-8"))
            for match in DRAWN_TWICE.finditer(code):
                number = code.count("\n", 0, match.start()) + 1
                faults.append(f"{path.relative_to(root)}:{number}: {match.group(1)} in DL_MIN or DL_MAX is drawn twice")
            for number, line in enumerate(code.splitlines(), 1):
                for match in CALLS.finditer(line):
                    faults.append(f"{path.relative_to(root)}:{number}: banned call {match.group(1)}")
    makefile = root / "Makefile"
    if makefile.exists():
        for number, line in enumerate(makefile.read_text(encoding="utf-8").splitlines(), 1):
            if FLAGS.search(line):
                faults.append(f"Makefile:{number}: fast-math changes what NaN means")
    if looked == 0:
        faults.append("banned: found no source at all; wrong folder?")
    for fault in faults:
        print(fault)
    print(f"banned: {looked} files, {len(faults)} faults")
    return 1 if faults else 0


sys.exit(main())
