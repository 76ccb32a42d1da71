#!/usr/bin/env python3
"""Tables (Markdown) and drawing (SVG) of an experiment: report.py [EXPERIMENT.json] [--svg FILE] [--document FILE]. The tables go
to stdout, and with --document between the marks of that file."""
import argparse
import html
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))
from collect import write_document  # noqa: E402

MARK = "<!-- tables: tests/experiment/report.py -->"
MARK_END = "<!-- end of tables -->"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 420, 60, 44, 16, 190
COLOURS = ["#1b1b1b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195"]
DRAWN = ["data_parallel", "alone", "diloco", "streaming", "decoupled_cold", "decoupled", "decoupled_mean", "decoupled_killed"]


def mode_of(entry):
    return entry["runs"][0]["mode"]


def gap(entry):
    return f"{100 * (entry['ratio'] - 1):+.1f} %" if "ratio" in entry else ""


def table(entries, steps):
    lines = [f"{steps} inner steps a learner:", "",
             "| form | mode | seeds | loss, mean (spread) | to data-parallel | inner rate | tokens merged |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for e in entries:
        if e["steps"] == steps:
            lines.append(f"| {e['form']} | `{mode_of(e)}` | {len(e['runs'])} | {e['value']:.3f} ({e['spread']:.3f}) | {gap(e)} | "
                         f"{e['rate']:g} | {100 * statistics.fmean(r['merged'] for r in e['runs']):.0f} % |")
    return "\n".join(lines)


def scans(entries):
    tried = [e for e in entries if len(e["rates_tried"]) > 1]
    rates = sorted({float(rate) for e in tried for rate in e["rates_tried"]})
    lines = ["Loss at each inner rate, first seed:", "", "| mode | steps | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
             "| --- " * (len(rates) + 2) + "|"]
    for e in tried:
        losses = {float(rate): loss for rate, loss in e["rates_tried"].items()}
        lines.append(f"| `{mode_of(e)}` | {e['steps']} | " + " | ".join(
            f"{losses[rate]:.3f}" if rate in losses else "" for rate in rates) + " |")
    return ["\n".join(lines)] if tried else []


def drawing(entries, steps):
    curves = {mode_of(e): e["runs"][0]["curve"] for e in entries if e["steps"] == steps}
    curves = {name: curves[name] for name in DRAWN if name in curves}
    tokens_max = max(t for curve in curves.values() for t, _ in curve)
    losses = [loss for curve in curves.values() for t, loss in curve if t > 0.1 * tokens_max]
    least, most = min(losses) - 0.02, max(losses) + 0.02

    def x(tokens):
        return LEFT + (WIDTH - LEFT - RIGHT) * tokens / tokens_max

    def y(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (most - loss) / (most - least)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
           f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for i in range(6):
        loss = least + (most - least) * i / 5
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>'
                   f'<text x="{LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        tokens = tokens_max * i / 5
        out.append(f'<text x="{x(tokens):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tokens / 1e6:.1f}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">million tokens, all learners'
               '</text>')
    for i, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(f"{x(t):.1f},{y(loss):.1f}" for t, loss in curve if loss <= most)
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{points}"/>'
                   f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 16 + 18 * i}" fill="{colour}">{html.escape(name)} '
                   f'{curve[-1][1]:.3f}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", default="build/results/experiment.json")
    parser.add_argument("--svg", help="write the drawing of loss over tokens here")
    parser.add_argument("--document", type=pathlib.Path, help="put the tables between its marks")
    arguments = parser.parse_args()
    entries = json.loads(pathlib.Path(arguments.file).read_text())
    text = "\n\n".join([table(entries, steps) for steps in sorted({e["steps"] for e in entries})] + scans(entries))
    print(text)
    if arguments.document is not None:
        write_document(arguments.document, text, MARK, MARK_END)
    if arguments.svg:
        pathlib.Path(arguments.svg).write_text(drawing(entries, entries[0]["steps"]))


main()
