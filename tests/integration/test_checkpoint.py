#!/usr/bin/env python3
"""Checkpoints of a run over two shards: made and exported while it trains, kept over restarts, removed."""
import json
import pathlib
import re
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import TEXT, check, main, manifest  # noqa: E402
from test_resume import resume, tape, uids_of  # noqa: E402
from test_run import PACED, Run, wait  # noqa: E402


def tensors(path):
    """{name: bytes} and the metadata of a safetensors file."""
    content = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + size])
    metadata = header.pop("__metadata__", {})
    return {name: content[8 + size + e["data_offsets"][0]:8 + size + e["data_offsets"][1]] for name, e in header.items()}, metadata


def files(run):
    return len(list(run.dir.glob("state/shard-*/fragment-*.bin")))


def rounds(run):
    return run.status()["round"]


def test_checkpoints_while_it_trains(build):
    """S4: retention leaves pinned versions alone; a cut over both shards is exported without stopping a merge."""
    job = manifest(TEXT, training={"tokenBudget": 250000}, syncer={"shards": 2}, learners={"replicas": 3, "max": 4})
    with Run(build, job, PACED) as run:
        wait(lambda: rounds(run) >= 8, 60, "rounds")
        for name in ("9.9", "nobody"):
            check("no such" in run.ask("checkpoint", "run", "--remove", name, code=2), "removing what is not there")
        check("not exported its weights yet" in run.ask("generate", "run", code=2), "text from a run without weights")
        made = run.ask("checkpoint", "run", "--name", "first")
        one = re.search(r"checkpoint (\d+\.\d+)", made).group(1)
        check("of this name" in run.ask("checkpoint", "run", "--name", "first", code=2), "a name twice")
        check("looks like" in run.ask("checkpoint", "run", "--name", "3.1", code=2), "a name like an id")
        listed = run.ask("checkpoint", "run", "--list")
        line = next(l for l in listed.splitlines() if l.startswith(one))
        check("first" in line and "complete" in line, line)
        clock = line.split()[-1]
        check(re.fullmatch(r"v\d+(\.\d+){3}", clock), f"no vector clock of four fragments: {clock}")
        for s in (0, 1):
            with tape(run, s) as db:
                learners = db.execute("SELECT count(*), min(step) FROM checkpoint_learners").fetchone()
                check(learners[0] == 3 and learners[1] > 0, f"shard {s}: learners of the cut: {learners}")
        at = rounds(run)
        run.ask("export", "run", "--checkpoint", "first", "--out", "a")
        wait(lambda: rounds(run) >= at + 20, 60, "twenty rounds more: nothing has stopped")
        run.ask("export", "run", "--checkpoint", clock, "--out", "b")
        run.ask("export", "run", "--out", "now")
        a, metadata = tensors(run.folder / "a" / "model.safetensors")
        b, _ = tensors(run.folder / "b" / "model.safetensors")
        now, later = tensors(run.folder / "now" / "model.safetensors")
        check(metadata["versions"] == clock and metadata["checkpoint"] == one and metadata["job"] == "test", f"{metadata}")
        run.ask("generate", "now", "--tokens", "5")
        check(a == b and a.keys() == now.keys() and a != now, "the checkpoint has changed, or is what is there now")
        check((run.folder / "a" / "config.json").read_bytes() == (run.folder / "now" / "config.json").read_bytes(), "two configs")
        versions = [[int(v) for v in text[1:].split(".")] for text in (clock, later["versions"])]
        check(all(x <= y for x, y in zip(*versions)) and versions[0] != versions[1], f"{versions}")
        check(run.ask("checkpoint", "run", "--list").count("complete") == 1, "the export's own cut is left")
        # Kept over a kill of everything and a restart, by both shards.
        run.process.kill()
        run.process.wait(10)
        wait(lambda: not run.pids(), 10, "the end of all processes")
        check("first" in run.ask("checkpoint", "run", "--list"), "a run at rest lists its checkpoints, too")
        resume(run, *PACED)
        at = wait(lambda: any(e["event"] == "resumed" for e in run.events()) and rounds(run), 30, "the run, again")
        wait(lambda: rounds(run) >= at + 12, 60, "rounds")
        run.ask("export", "run", "--checkpoint", one, "--out", "c")
        check(tensors(run.folder / "c" / "model.safetensors")[0] == a, "the checkpoint has changed over the restart")
        before = files(run)
        run.ask("checkpoint", "run", "--remove", "first")
        wait(lambda: files(run) <= before - 4, 10, "the removal of what only the checkpoint kept")
        run.exit(120)
        # At rest the newest versions are what the evaluator exported at the end.
        run.ask("export", "run", "--out", "last")
        check(tensors(run.folder / "last" / "model.safetensors")[0] == tensors(run.dir / "final" / "model.safetensors")[0],
              "the newest versions are not the final weights")
        # What tests/compat opens with transformers is the evaluator's export: its config is this one, to the byte.
        check((run.folder / "last" / "config.json").read_bytes() == (run.dir / "final" / "config.json").read_bytes(), "another config")
        check(run.ask("export", "run", "--checkpoint", "nine", "--out", "x", code=2).count("no checkpoint") == 1, "an unknown one")


def balance(run):
    """{what: positions} of the ledger's coverage, without a fault."""
    with tape(run) as db:
        check(db.execute("SELECT * FROM coverage_faults").fetchall() == [], "the ledger does not balance")
        return dict(db.execute("SELECT what, sum(count) FROM coverage GROUP BY what"))


def counted_by(run, clock):
    """Positions that the pushes in these versions' history had seen, told from the pushes themselves (shard 0)."""
    seen = {}
    with tape(run) as db:
        for f, version in enumerate(clock):
            for uid, lease, cursor in db.execute(
                    "SELECT uid, lease, cursor FROM participants WHERE fragment = ? AND version <= ? AND lease > 0", (f, version)):
                seen[uid] = max(seen.get(uid, (0, 0)), (lease, cursor))
        total = 0
        for uid, (lease, cursor) in seen.items():
            total += cursor + db.execute("SELECT coalesce(sum(count), 0) FROM leases WHERE uid = ? AND lease < ?", (uid, lease)).fetchone()[0]
        return total


def test_back_to_a_checkpoint(build):
    """S4, J8: a run goes on from a checkpoint of it, over two shards: weights, progress and ledger are the cut's; what came after
    stays in the tape, counts no longer and is trained on again; the whole is replayed to the bit."""
    job = manifest(TEXT, training={"tokenBudget": 250000}, syncer={"shards": 2}, learners={"replicas": 3, "max": 4})
    with Run(build, job, PACED) as run:
        wait(lambda: rounds(run) >= 12, 60, "rounds")
        run.ask("checkpoint", "run", "--name", "good")
        line = next(l for l in run.ask("checkpoint", "run", "--list").splitlines() if "good" in l).split()
        clock = [int(v) for v in line[-1][1:].split(".")]
        at = rounds(run)
        wait(lambda: rounds(run) >= at + 30, 60, "thirty rounds more")
        run.process.kill()
        run.process.wait(10)
        wait(lambda: not run.pids(), 10, "the end of all processes")
        counted = balance(run)["counted"]
        check("no checkpoint" in run.ask("run", "--resume", "run", "--checkpoint", "bad", code=2), "to one that is not there")
        check("name it with --resume" in run.ask("run", "job.json", "--checkpoint", "good", code=2), "without a run")
        check(balance(run)["counted"] == counted, "a refusal has changed the ledger")
        run.ask("export", "run", "--checkpoint", "good", "--out", "cut")
        # As the run will do it first, to see what is there before it goes on.
        shards = [a for s in (0, 1) for a in ("--state-dir", run.dir / "state" / f"shard-{s}")]
        done = subprocess.run([pathlib.Path(run.diloco).parent / "diloco-export", *shards, "--roll-back", "good"], capture_output=True, text=True)
        check(done.returncode == 0, f"{done.stdout} {done.stderr}")
        run.ask("export", "run", "--out", "back")
        check(tensors(run.folder / "back" / "model.safetensors")[0] == tensors(run.folder / "cut" / "model.safetensors")[0],
              "the newest versions are not the checkpoint's")
        coverage = balance(run)
        check(coverage["counted"] == counted_by(run, [clock[0], 0, clock[2], 0]) < counted and "leased" not in coverage,
              f"{coverage}, before {counted}")
        with tape(run) as db:
            tokens = db.execute("SELECT t.tokens, c.tokens FROM totals t, checkpoints c WHERE c.name = 'good'").fetchone()
            check(tokens[0] == tokens[1] > 0, f"progress is not the checkpoint's: {tokens}")
            check(db.execute("SELECT count(*) FROM events WHERE kind = 'rolled_back'").fetchone()[0] == 1, "no event")
        resume(run, "--checkpoint", "good", *PACED)
        wait(lambda: any(e["event"] == "rolled_back" for e in run.events()), 20, "the event")
        wait(lambda: uids_of(run, ".3."), 30, "learners of this life")
        at = rounds(run)
        wait(lambda: rounds(run) >= at + 8, 60, "eight rounds more")
        run.process.kill()
        run.process.wait(10)
        wait(lambda: not run.pids(), 10, "the end of all processes")
        (run.dir / "rolling-back").write_text("good")  # As a roll-back leaves it that is cut off between two shards.
        resume(run, *PACED)
        wait(lambda: len([e for e in run.events() if e["event"] == "rolled_back"]) == 2, 20, "the roll-back's end")
        run.exit(120)
        report = run.report()
        check(report["phase"] == "Succeeded" and report["tokens"] >= 250000, f"{report['phase']} {report['tokens']}")
        check(not (run.dir / "rolling-back").exists(), "the mark of a roll-back under way is left")
        check(balance(run)["counted"] > coverage["counted"], "nothing counts any more")
        result = json.loads(run.ask("replay", "run", "--json", "--quiet"))
        check(result["replayMismatches"] == 0 and result["replayedRounds"] > at + 8, f"{result}")


if __name__ == "__main__":
    main([test_checkpoints_while_it_trains, test_back_to_a_checkpoint])
