#!/usr/bin/env python3
"""Whole ensembles of real processes: learners and an evaluator finish by the token budget, the loss falls, the counters add
up, the exported weights are the syncer's; learners leave and join; wrong input ends with the right exit status."""
import json
import pathlib
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import TEXT, Ensemble, check, main, manifest  # noqa: E402
from lib.tape import read_tape  # noqa: E402

STEP_TOKENS = 4 * 32  # Of one learner, in the library's manifest.
# A step of this tiny model takes a millisecond, a durable commit tens: at full speed nearly all steps would fall into the
# time that a round is under way, which no real model's do.
PACED = ["--step-seconds", "0.02"]


def evaluations(folder):
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def last_status(ensemble, seconds):
    """The syncer's last status before it ends, once it had begun to finish."""
    seen = {}

    def ended():
        if ensemble.processes["syncer-0"].poll() is not None:
            return True
        seen.update(ensemble.status())
        return False

    ensemble.wait(ended, seconds, "the end of the job", every=0.02)
    return seen


def fragments_of(build, ensemble, folder):
    """{fragment: hash} of exported weights."""
    tool = pathlib.Path(build).resolve() / "tools" / "weights"
    text = subprocess.run([tool, ensemble.job_file, folder], check=True, capture_output=True, text=True, timeout=30).stdout
    return {int(line.split()[0]): line.split()[1] for line in text.splitlines()}


def test_finishes_by_budget(build):
    steps = 400
    job = manifest(TEXT, training={"tokenBudget": 3 * STEP_TOKENS * steps, "evaluationSeconds": 0.2},
                   sync={"warmup": {"steps": 40, "interval": 2}}, learners={"replicas": 3, "max": 4})
    with Ensemble(build, job) as e:
        final = e.folder / "final"
        e.start_syncers()
        e.start_evaluator(final)
        for n in range(3):
            e.start_learner(n, extra=PACED)
        status = last_status(e, 180)
        for name in ("learner-0", "learner-1", "learner-2", "evaluator", "syncer-0"):
            e.wait_exit(name, 30)

        found = evaluations(final)
        print(f"{len(found)} evaluations, loss {found[0]['loss']:.3f} -> {found[-1]['loss']:.3f}")
        check(len(found) >= 2, "fewer than two evaluations")
        check(found[0]["loss"] > 2.5, f"the first state is evaluated: {found[0]}")
        check(found[-1]["loss"] < 2.0, f"the loss falls: {found[-1]}")
        check(all(a["tokens"] <= b["tokens"] and a["round"] <= b["round"] and a["seconds"] < b["seconds"]
                  for a, b in zip(found, found[1:])), "evaluations go forwards")

        tape = read_tape(e.folder / "state-0")
        fragments = job["spec"]["sync"]["fragments"]
        merged = [sum(p.tokens for p in tape.participants if p.fragment == f) for f in range(fragments)]
        check(tape.totals["tokens"] >= job["spec"]["training"]["tokenBudget"], f"budget not reached: {tape.totals}")
        check(tape.totals["rounds_merged"] == len(tape.rounds), f"{len(tape.rounds)} rounds on record: {tape.totals}")
        check(abs(sum(merged) / fragments - tape.totals["tokens_merged"]) <= 1,
              f"merged tokens of fragments {merged}, in all {tape.totals}")
        check(all(p.tokens == p.steps * STEP_TOKENS for p in tape.participants), "tokens are steps times batch")
        check(max(merged) <= tape.totals["tokens"], "more merged than trained")
        # What is trained while a round is under way is overwritten; the rest is merged. (Commits of a tiny model are slow.)
        check(min(merged) > tape.totals["tokens"] * 0.1, f"work is lost: {merged} of {tape.totals}")
        check({p.learner for p in tape.participants} == {0, 1, 2}, "every learner takes part")
        check(status["tokens"] <= tape.totals["tokens"] or status["phase"] == "Ended", "status is ahead of the record")
        accepted = status["verdicts"]["accepted"]  # The first state's, too.
        check(0 < accepted <= len(tape.participants) + fragments, f"{accepted} accepted, {len(tape.participants)} merged")
        check(status["joins"] == 4, f"{status['joins']} joins")
        wrong = {name: count for name, count in status["verdicts"].items()
                 if count and name not in ("accepted", "late", "nothing")}
        check(not wrong, f"pushes came to nothing: {wrong}")

        newest = {}
        for r in tape.rounds:
            newest[r.fragment] = r.hash
        exported = fragments_of(build, e, final)
        check(exported == newest, f"exported weights {exported} are not the syncer's {newest}")


def test_started_again_after_its_end(build):
    """J5: everybody has heard of the end, and there never was an evaluator: a syncer that is started again waits for nobody."""
    job = manifest(TEXT, training={"tokenBudget": 2 * STEP_TOKENS * 40}, sync={"finishSeconds": 120, "warmup": {"steps": 0}},
                   learners={"replicas": 2})
    with Ensemble(build, job) as e:
        e.start_syncers()
        for n in range(2):
            e.start_learner(n)
        for name in ("learner-0", "learner-1", "syncer-0"):
            e.wait_exit(name, 60)
        e.start("again", [e.bin / "diloco-syncer", "--job", e.job_file, "--shard", "0", "--listen", "127.0.0.1:0", "--token-file",
                          e.token_file, "--state-dir", e.folder / "state-0"])
        e.wait_exit("again", 40)
        check("budget reached" in e.log("again"), f"it does not say why: {e.log('again')[-300:]!r}")


def test_weights_speak(build):
    """What was exported goes on a prompt, the same for the same seed, in the text's own words."""
    job = manifest(TEXT, training={"tokenBudget": STEP_TOKENS * 600, "evaluationSeconds": 0},
                   learners={"replicas": 1, "max": 1})
    with Ensemble(build, job) as e:
        e.start_syncers()
        e.start_evaluator(e.folder / "final")
        e.start_learner(0, extra=PACED)
        e.wait_exit("learner-0", 120)
        e.wait_exit("evaluator", 30)
        check(len(evaluations(e.folder / "final")) == 1, "evaluationSeconds 0 means one evaluation, the last")

        def speak(*more):
            return subprocess.run([e.bin / "diloco-worker", "generate", "--weights", e.folder / "final", "--prompt",
                                   "The learner ", "--tokens", "300", *more], check=True, capture_output=True,
                                  timeout=60).stdout
        text = speak("--seed", "1")
        check(text == speak("--seed", "1"), "the same seed makes another text")
        check(text != speak("--seed", "2"), "another seed makes the same text")
        check(text.startswith(b"The learner ") and len(text) == 12 + 300 + 1, f"{len(text)} bytes: {text[:40]}")
        corpus = set((e.folder / TEXT).read_text().lower().replace(".", "").split())
        words = text.decode(errors="replace").lower().replace(".", "").split()[:-1]
        known = sum(word in corpus for word in words) / len(words)
        print(f"{known:.0%} of {len(words)} words are the text's: {text[:120]!r}")
        check(known > 0.4, "the words are not the text's")


def test_leaving_and_joining(build):
    """A notice of preemption ends a learner in time and in order; another one takes over its id and its place."""
    job = manifest(TEXT, training={"tokenBudget": 10**9, "evaluationSeconds": 0}, learners={"replicas": 2, "max": 2})
    with Ensemble(build, job) as e:
        e.start_syncers()
        e.start_evaluator(e.folder / "final")
        for n in range(2):
            e.start_learner(n, extra=PACED)
        e.wait(lambda: e.status()["step"] >= 150 and e.learner(1)["pushesMerged"] > 2, 60, "150 steps")
        e.signal("learner-1", signal.SIGTERM)
        e.wait_exit("learner-1", 10)
        e.wait(lambda: e.status()["leaves"]["preempted"] == 1, 5, "the leave, counted as a preemption")
        check("asked to leave" in e.log("learner-1"), "the learner says why it leaves")
        left_at = e.status()["tokens"]
        e.start_learner(1, extra=PACED)
        e.wait(lambda: e.learner(1)["pushesMerged"] > 0 and e.learner(1)["state"] == "connected", 30, "the successor's push")
        line = next(l for l in e.log("learner-1").splitlines() if "joined learner=1" in l and not l.endswith("place=0"))
        facts = dict(word.split("=") for word in line.split() if "=" in word)
        place = left_at // (2 * STEP_TOKENS)
        check(int(facts["place"]) >= place, f"the schedule goes on at {facts['place']}, the ensemble was at {place}")
        data = e.status()["data"]
        check(data["counted"] + data["leased"] + data["queued"] == data["positions"] >= 4 * 2 * place, f"the data: {data}")
        # An evaluator that has to leave exports what it holds.
        e.signal("evaluator", signal.SIGTERM)
        e.wait_exit("evaluator", 10)
        check((e.folder / "final" / "model.safetensors").exists(), "the evaluator that left exported nothing")
        check(not (e.folder / "final" / "evaluations.jsonl").exists(), "evaluationSeconds 0 means none before the end")
        e.start_evaluator(e.folder / "last")
        e.wait(lambda: e.log("evaluator").count("joined round") == 2, 20, "the second evaluator")
        # Asked to stop, the job ends in order, and the weights are exported.
        e.stop_job()
        for name in ("syncer-0", "learner-0", "learner-1", "evaluator"):
            e.wait_exit(name, 30)
        check((e.folder / "last" / "model.safetensors").exists(), "no weights exported")
        check(len(evaluations(e.folder / "last")) == 1, "the last state is evaluated")


def test_wrong_input(build):
    """Exit status 2: wrong arguments or input; 3: refused. The text names what is wrong."""
    job = manifest(TEXT)
    with Ensemble(build, job) as e:
        e.start_syncers()
        missing = e.folder / "missing.json"
        missing.write_text(json.dumps(manifest("not-there.txt")))
        short = e.folder / "short.json"
        (e.folder / "short.txt").write_text("too short")
        short.write_text(json.dumps(manifest("short.txt")))
        wide = e.folder / "wide.json"
        wide.write_text(json.dumps(manifest(TEXT, training={"model": {"width": 64}})))
        other = e.folder / "other-token"
        other.write_text("wrong\n")
        worker, token, endpoint = e.bin / "diloco-worker", e.token_file, e.endpoints()
        cases = [
            ("no-job", 2, "nowhere.yaml", ["learn", "--job", "nowhere.yaml", "--endpoints", endpoint]),
            ("no-data", 2, "not-there.txt", ["learn", "--job", missing, "--endpoints", endpoint]),
            ("short-data", 2, "need 66", ["evaluate", "--job", short, "--endpoints", endpoint, "--export", e.folder / "x"]),
            ("no-endpoint", 2, "--endpoints", ["learn", "--job", e.job_file]),
            ("bad-endpoint", 2, "http://", ["learn", "--job", e.job_file, "--endpoints", "http://127.0.0.1:1"]),
            ("no-token", 2, "no-such-token", ["learn", "--job", e.job_file, "--endpoints", endpoint, "--token-file",
                                              e.folder / "no-such-token"]),
            ("no-folder", 2, "/nowhere/x", ["evaluate", "--job", e.job_file, "--endpoints", endpoint, "--export", "/nowhere/x"]),
            ("no-weights", 2, "nowhere", ["generate", "--weights", "nowhere"]),
            ("wrong-token", 3, "status 401: the syncer refused the token", ["learn", "--job", e.job_file, "--endpoints", endpoint, "--token-file", other]),
            ("high-id", 2, "learners.max", ["learn", "--job", e.job_file, "--endpoints", endpoint, "--token-file", token,
                                            "--learner", "99"]),
        ]
        for name, code, said, arguments in cases:
            e.start(name, [worker, *arguments])
            e.wait_exit(name, 20, code)
            check(said in e.log(name), f"{name}: nothing of '{said}' in {e.log(name)[-300:]!r}")
            check("<html" not in e.log(name), f"{name}: a page for browsers in the log")
        # Other sizes than those of the learner that came first.
        e.start_learner(0)
        e.wait(lambda: e.status()["connected"] == 1, 20, "the first learner")
        e.start("other-sizes", [worker, "learn", "--job", wide, "--endpoints", endpoint, "--token-file", token])
        e.wait_exit("other-sizes", 20, 3)
        check("embed_tokens" in e.log("other-sizes"), "the first tensor that differs is not named")


if __name__ == "__main__":
    main([test_finishes_by_budget, test_started_again_after_its_end, test_weights_speak, test_leaving_and_joining, test_wrong_input])
