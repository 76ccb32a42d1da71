#!/usr/bin/env python3
"""`diloco run --resume`: a run that was killed, or stopped, goes on where it was; what may change, and what may not."""
import json
import pathlib
import shutil
import signal
import sqlite3
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import TEXT, check, main, manifest  # noqa: E402
from test_run import ENDLESS, PACED, Run, wait  # noqa: E402


def tape(run, shard=0):
    return sqlite3.connect(f"file:{run.dir}/state/shard-{shard}/tape.db?mode=ro", uri=True)


def committed(run, shard=0):
    """{fragment: (version, hash)} of the newest commits, and the totals."""
    with tape(run, shard) as db:
        newest = {f: (v, h) for f, v, h in db.execute("SELECT fragment, max(version), hash FROM commits GROUP BY fragment")}
        return newest, db.execute("SELECT rounds_merged, tokens FROM totals").fetchone()


def resume(run, *arguments):
    """Goes on with the run in place of the old process."""
    run.process.wait(10)
    with open(run.output, "ab") as out:
        run.process = subprocess.Popen([run.diloco, "run", "--resume", "run", *arguments], cwd=run.folder,
                                       stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def uids_of(run, part):
    """Of the connected learners, once there are three whose uid holds `part`."""
    uids = {e["uid"] for e in run.status()["learners"] if e["state"] == "connected" and part in e["uid"]}
    return uids if len(uids) == 3 else None


def test_killed_runs_go_on_twice(build):
    """S1, S2: the supervisor and all its processes are killed, twice; nothing committed is missing, and the job succeeds."""
    job = manifest(TEXT, training={"tokenBudget": 300000}, syncer={"shards": 2}, learners={"replicas": 3, "max": 4})
    with Run(build, job, PACED) as run:
        for life in (2, 3):
            rounds = committed(run)[1][0] if life > 2 else 0
            wait(lambda: run.status()["round"] >= 2 * rounds + 8, 60, "rounds")
            run.process.kill()  # The children go with it.
            run.process.wait(10)
            wait(lambda: not run.pids(), 10, "the end of all processes")
            told = run.ask("status", "run")
            check("Interrupted" in told and "--resume" in told, f"status of a run that was cut off: {told}")
            view = json.loads(run.ask("status", "run", "--json"))["run"]
            check(view["over"] and view["phase"] == "Interrupted", f"{view}")
            check("Interrupted" in run.ask("top", "run"), "top waits for a run that is no more")
            before = [committed(run, s) for s in (0, 1)]
            token = (run.dir / "token").read_text()
            with tape(run) as db:
                possible = dict(db.execute("SELECT name, value FROM counters"))["possible_ns"]
            resume(run, *PACED)
            wait(lambda: any(e["event"] == "resumed" and f"life {life}" in e["text"] for e in run.events()), 20, "the event")
            uids = wait(lambda: uids_of(run, f".{life}."), 30, "all learners, of this life")
            for s in (0, 1):
                newest, totals = committed(run, s)
                with tape(run, s) as db:
                    for fragment, (version, digest) in before[s][0].items():
                        row = db.execute("SELECT hash FROM commits WHERE fragment = ? AND version = ?", (fragment, version)).fetchone()
                        check(row == (digest,) and newest[fragment][0] >= version, f"fragment {fragment} version {version} is {row}")
                check(totals[0] >= before[s][1][0] and totals[1] >= before[s][1][1], f"{before[s][1]} then {totals}")
            check((run.dir / "token").read_text() == token, "the token is another one")
            with tape(run) as db:  # Goodput is over all lives, not anew.
                later = dict(db.execute("SELECT name, value FROM counters"))
            check(later["possible_ns"] >= possible > 0 and later["busy_ns"] > 0, f"goodput begins anew: {possible} {later}")
            check(len(uids) == 3, f"{uids}")
        run.exit(120)
        report = run.report()
        check(report["phase"] == "Succeeded" and report["tokens"] >= 300000, f"{report['phase']} {report['tokens']}")
        check((run.dir / "final" / "model.safetensors").stat().st_size > 0, "no weights")


def test_what_may_change(build):
    job = manifest(TEXT, learners={"replicas": 2, "max": 4}, **ENDLESS)
    with Run(build, job, PACED) as run:
        wait(lambda: run.status()["round"] >= 4, 60, "rounds")
        check("under way" in run.ask("run", "--resume", "run", code=2), "a run that is under way is taken over")
        run.process.send_signal(signal.SIGINT)
        run.exit(30)
        before = run.report()["tokens"]
        job["spec"]["sync"]["interval"] = 16
        (run.folder / "other.json").write_text(json.dumps(job))
        check("spec.sync.interval cannot change" in run.ask("run", "--resume", "run", "other.json", code=2), "a frozen field")
        check("no run" in run.ask("run", "--resume", ".", "job.json", code=2), "a folder without a run")
        check("--dir" in run.ask("run", "--resume", "run", "--dir", "x", code=2), "two folders")
        # More learners and a budget: these may change.
        job["spec"]["sync"]["interval"] = 8
        job["spec"]["learners"]["replicas"] = 3
        job["spec"]["training"]["tokenBudget"] = before + 100000
        (run.folder / "more.json").write_text(json.dumps(job))
        resume(run, "more.json")
        run.training(3)
        run.exit(90)
        report = run.report()
        check(report["phase"] == "Succeeded" and before < report["tokens"], f"{report['phase']} {before} {report['tokens']}")
        check(json.loads((run.dir / "job.json").read_text())["spec"]["learners"]["replicas"] == 3, "job.json is the old one")


def test_budget_that_is_reached_already(build):
    """Q8: a run that is over, resumed as it is and with a smaller budget: over again within seconds, with the weights, and it says why."""
    job = manifest(TEXT, training={"tokenBudget": 40000}, learners={"replicas": 2, "max": 2})
    with Run(build, job) as run:
        run.exit(90)
        rounds = run.report()["status"]["round"]
        job["spec"]["training"]["tokenBudget"] = 20000
        (run.folder / "less.json").write_text(json.dumps(job))
        for life, manifest_name in ((2, ()), (3, ("less.json",))):
            shutil.rmtree(run.dir / "final")
            before = len(run.events())
            resume(run, *manifest_name)
            run.exit(20)
            check(run.report()["phase"] == "Succeeded" and run.report()["status"]["round"] == rounds, f"{run.report()}")
            check((run.dir / "final" / "model.safetensors").stat().st_size > 0, f"life {life}: no weights")
            texts = [e["text"] for e in run.events()[before:]]
            check(any("token budget reached" in text for text in texts), f"life {life}: {texts}")


def test_a_longer_budget_brings_no_second_warmup(build):
    """K8: the default warm-up follows the budget that the job began with: 3/8 of 400 steps, which a longer one leaves."""
    job = manifest(TEXT, training={"tokenBudget": 400 * 2 * 4 * 32}, sync={"warmup": {"steps": -1}},
                   learners={"replicas": 2, "max": 4})
    with Run(build, job, PACED) as run:
        wait(lambda: run.status()["phase"] == "Training", 60, "the end of warm-up")
        run.process.send_signal(signal.SIGINT)
        run.exit(30)
        job["spec"]["training"]["tokenBudget"] = 10**12
        (run.folder / "longer.json").write_text(json.dumps(job))
        resume(run, "longer.json")
        phase = wait(lambda: run.status()["phase"] if run.status()["phase"] in ("Warmup", "Training") else None, 60, "training")
        check(phase == "Training", f"phase {phase}")
        with tape(run) as db:
            kept = db.execute("SELECT value FROM meta WHERE key = 'warmup_steps'").fetchone()
        check(kept == ("150",), f"warm-up steps {kept}")
        run.process.send_signal(signal.SIGINT)
        run.exit(30)


if __name__ == "__main__":
    main([test_a_longer_budget_brings_no_second_warmup, test_killed_runs_go_on_twice, test_what_may_change, test_budget_that_is_reached_already])
