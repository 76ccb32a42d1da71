#!/usr/bin/env python3
"""docs/examples/pytorch.py, as a person starts it: two PyTorch programs join through libdiloco, train together, and end with the job."""
import json
import os
import pathlib
import re
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib.ensemble import Ensemble, check, main  # noqa: E402

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples"


def test_example_trains(build):
    """S5, Q8: a trainer of one's own exchanges its tensors; the syncer exports them under the names that it gave."""
    job = {"metadata": {"name": "pytorch"}, "spec": {"syncer": {"shards": 1}}}
    with Ensemble(build, job, text=False) as e:
        text = (EXAMPLES / "pytorch.yaml").read_text(encoding="utf-8")
        check("tokenBudget: 1000000" in text, "the sample's budget has changed")
        e.job_file.write_text(text.replace("tokenBudget: 1000000", "tokenBudget: 150000"))
        e.start_syncers()
        os.environ.update(DILOCO_JOB="pytorch", DILOCO_ENDPOINTS=e.endpoints(), DILOCO_TOKEN_FILE=str(e.token_file),
                          DILOCO_LIBRARY=str(pathlib.Path(build).resolve() / "lib" / "libdiloco.so"))
        for name in ("first", "second"):
            e.start(name, [sys.executable, EXAMPLES / "pytorch.py"])
        for name in ("first", "second"):
            e.wait_exit(name, 120)
            end = re.search(r"over: the job has succeeded; loss ([\d.]+), (\d+) pushes, (\d+) updates", e.log(name))
            check(end is not None, f"{name} said: {e.log(name)}")
            check(float(end[1]) < 2 and int(end[2]) > 4 and int(end[3]) > 4, f"{name}: {end[0]}")  # It begins at ln 64 = 4.2.
        e.wait_exit("syncer-0", 30)
        out = e.folder / "out"
        subprocess.run([e.bin / "diloco-export", "--state-dir", e.folder / "state-0", "--out", out], check=True, timeout=30)
        with open(out / "model.safetensors", "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        check(header["embed.weight"]["shape"] == [64, 32] and "mix.weight_hh_l0" in header and "head.bias" in header, f"{list(header)}")


def test_what_is_wrong_is_said(build):
    """U2: without a variable, and with another job's name."""
    job = {"metadata": {"name": "pytorch"}, "spec": {"syncer": {"shards": 1}}}
    with Ensemble(build, job, text=False) as e:
        e.job_file.write_text((EXAMPLES / "pytorch.yaml").read_text(encoding="utf-8"))
        e.start_syncers()
        os.environ.update(DILOCO_JOB="other", DILOCO_ENDPOINTS=e.endpoints(), DILOCO_TOKEN_FILE=str(e.token_file),
                          DILOCO_LIBRARY=str(pathlib.Path(build).resolve() / "lib" / "libdiloco.so"))
        e.start("other", [sys.executable, EXAMPLES / "pytorch.py"])
        e.wait_exit("other", 60, code=1)
        check('serves job "pytorch", not "other"' in e.log("other"), e.log("other"))


if __name__ == "__main__":
    main([test_example_trains, test_what_is_wrong_is_said])
